// A small problem, set up in one call: for checks whose overhead would otherwise exceed the time of func.
#pragma once

#include "evaluator.h"
#include "graph_runner.h"
#include "whole_backward.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <tuple>
#include <variant>
#include <vector>

namespace fastgrad {

// func at its arguments, and the graph of its first evaluation. Only for what needs no special care: arguments and
// outputs that are plain, double precision and strided, in memory of their own, all on the CPU or on one CUDA device;
// no mode or subclass that sees operators. Everything else is left to the caller. Vectors and matrices of coordinates
// are on the CPU for any device: a copy takes as long as one or two launches, and the following work takes no launch.
class SmallProblem {
 public:
  // Calls func once, and restores the inputs if it raises. Returns null, without calling func, if an argument or a mode
  // needs special care. relative_step: of double precision; records_differences: as in Evaluator.
  static std::shared_ptr<SmallProblem> trace(
      pybind11::object func, const pybind11::tuple& arguments, double relative_step, bool records_differences);

  // Whether the outputs and the graph also need no special care. If false, only evaluator, blocks, result and seconds
  // can be used.
  bool is_plain() const { return graph_ != nullptr; }

  const std::shared_ptr<Evaluator>& evaluator() const { return evaluator_; }
  const std::vector<InputBlock>& blocks() const { return blocks_; }
  const pybind11::object& result() const { return result_; }
  double seconds() const { return seconds_; }
  // The part of `seconds` in which the processor ran this process; on a CUDA device, all of them.
  double working_seconds() const { return working_seconds_; }
  // Where the arguments and outputs are.
  at::Device tensor_device() const { return device_; }

  int64_t n() const { return n_; }
  int64_t m() const { return m_; }
  int64_t nodes() const { return nodes_; }
  int64_t custom_nodes() const { return custom_nodes_; }
  // Whether custom code, hooks included, runs in the backward: it may keep a state.
  bool is_custom() const { return is_custom_; }
  // Whether a later graph runs custom code although the first one does not.
  bool became_custom() const { return became_custom_; }
  bool records_differences() const { return evaluator_->records_differences(); }
  Graph& graph() const { return *shared_graph(); }
  std::shared_ptr<Graph> shared_graph() const;

  // Of an input or output: position among arguments or results, number of elements, coordinates per element.
  using Place = std::tuple<int64_t, int64_t, int64_t>;
  const std::vector<Place>& inputs() const { return inputs_; }
  const std::vector<Place>& outputs() const { return outputs_; }

  // Releases the result, the graph and values that were kept from them. Afterwards, the problem is not plain.
  void release();

  // Evaluates func once more, for VJPs on a new graph. If its outputs have other properties, returns false, and there
  // is no graph afterwards. Also returns false, and keeps the graph, if backward has modified a grad_output or output.
  bool record_again();

  // Whether a row of cotangents gives the same VJP as in `known`, bit for bit, on the current graph.
  bool repeats(const at::Tensor& cotangents, const at::Tensor& known, int64_t row) const;

  // Runs VJPs until one differs from the known one, as first_other_vjp in vjp.h.
  std::tuple<int64_t, std::optional<at::Tensor>, GradientsMatch> first_other_vjp(
      const at::Tensor& cotangents, const std::vector<int64_t>& only, const std::vector<int64_t>& order,
      const at::Tensor& known) const;

  // All VJPs, as whole_backward in whole_backward.h; without custom code, and with cotangents, as brief_backward.
  WholeBackward whole_backward(
      const at::Tensor& cotangents, const std::vector<int64_t>& layouts, int64_t repeated, double repeat_scale,
      bool undefined, int64_t fewest_vectorized, double atol, double rtol) const;

  // A copy of a brief `backward` with the VJPs that it left out, as `complete` in whole_backward.h.
  WholeBackward completed(
      const WholeBackward& backward, const at::Tensor& cotangents, const std::vector<int64_t>& layouts,
      int64_t repeated, double repeat_scale) const;

  // The outputs of the first evaluation, and those of the current graph: float64, shape (m,).
  at::Tensor base() const;
  at::Tensor outputs_of_graph() const;

  // `count` columns of the numerical Jacobian, float64, shape (count, m); or what func returned if its outputs have
  // other properties.
  std::variant<at::Tensor, Changed> difference_columns(double eps, int64_t first, int64_t count) const;

  // All columns from one vectorized call, as of Evaluator::vectorized_columns, and the largest error of the outputs at
  // x and x + displacement, which are `values` (float64, shape (m,)) in single calls; a NaN counts as infinite. Nothing
  // if a result has other properties than an output.
  std::optional<std::pair<at::Tensor, double>> vectorized_columns(
      const pybind11::object& evaluate, const at::Tensor& displacement, const at::Tensor& values, double eps) const;

  // The outputs at other inputs: float64, shape (m,); or what func returned.
  std::variant<at::Tensor, Changed> values_of(const std::vector<at::Tensor>& inputs) const;

  // The numerical entries of a sparse Jacobian, as of Evaluator::difference_groups, divided by their steps: float64,
  // shape (entries,); or what func returned. columns: the column of each entry.
  std::variant<at::Tensor, Changed> difference_entries(
      const Groups& groups, const at::Tensor& columns, double eps) const;

  // The outputs at x + displacement (float64, shape (n,)): float64, shape (m,); or what changed about them.
  std::variant<at::Tensor, Changed> values_at(const at::Tensor& displacement) const;

  // The largest absolute and relative error, by output and part as in WholeBackward, and by input. Nothing if the
  // complete check must decide: if an entry is wrong, if VJPs vary or do not add up, if gradients have other sizes or,
  // with check_dtypes, other dtypes, or if gradients that should be zero are not.
  std::optional<std::vector<std::vector<std::pair<double, double>>>> errors(
      const WholeBackward& backward, const at::Tensor& columns, double atol, double rtol, bool check_dtypes) const;

  // VJPs of rows of cotangents, as vjp_coordinates gives them.
  std::tuple<at::Tensor, GradientsMatch> vjps(
      const at::Tensor& cotangents, const std::vector<int64_t>& layouts, const std::vector<int64_t>& only) const;

  // Whether zero grad_outputs, if `zeros`, and undefined grad_outputs of all outputs and of each one, if `undefined`,
  // give zeros like the inputs. One VJP each. Nothing if a gradient that is not plain may differ from zero.
  std::optional<bool> are_zeros_zero(bool zeros, bool undefined) const;

  // As Evaluator::screening_derivatives. The outputs at x are those of the first evaluation.
  std::variant<Derivatives, Changed> screening_derivatives(
      const RandomDirections& along, double curve, double budget, bool measure_noise,
      const std::optional<Derivatives>& known) const;

  // As Evaluator::differences_along.
  std::variant<Derivatives, Changed> differences_along(const RandomDirections& along, double curve) const;

  // As Evaluator::jvps, within a level of forward-mode AD. Returns what func returned instead of its outputs, if it
  // did; the tangents of the outputs, float64, shape (count, m); and whether a tangent is complex exactly if its output
  // is.
  std::tuple<std::optional<Changed>, at::Tensor, bool> jvps(
      const at::Tensor& directions, const std::vector<int64_t>& undefined) const;

  // The tangents of the outputs for several tangents of one input: one at a time, or in one vectorized call of func.
  std::variant<std::vector<std::vector<at::Tensor>>, Changed> tangents(
      int64_t input, const at::Tensor& tangents_of_input) const;
  std::variant<std::vector<at::Tensor>, Changed> batched_tangents(
      int64_t input, const at::Tensor& tangents_of_input) const;

  // The largest absolute and relative error of the Jacobian by forward mode, for each input or part of an input (first
  // real inputs and imaginary parts, then real parts), and for each output. Nothing if an entry is wrong. tangents,
  // columns: the analytical and the numerical Jacobian, float64, shape (n, m).
  std::optional<std::vector<std::vector<std::pair<double, double>>>> tangent_errors(
      const at::Tensor& tangents, const at::Tensor& columns, double atol, double rtol) const;

  // Whether func, without a graph and with its arguments number first, first + 1, ... negated in place, returns the
  // values of the first evaluation, negated if there are such arguments. Differences of up to `rounding` times the
  // largest value do not count. One evaluation. It can be called only if records_differences is false, because
  // otherwise the values of the first evaluation are not kept.
  bool negates_unrecorded(int64_t first, double rounding) const;

 private:
  bool take_outputs();

  // The relative spacing of each output's dtype.
  std::vector<double> ulps() const;

  // An empty float64 tensor of this shape on the device of the arguments; and a tensor moved to this device.
  at::Tensor empty_on_device(at::IntArrayRef shape) const;
  at::Tensor on_device(const at::Tensor& tensor) const;

  std::shared_ptr<Evaluator> evaluator_;
  std::vector<InputBlock> blocks_;
  pybind11::object result_;
  double seconds_ = 0.0;
  double working_seconds_ = 0.0;
  int64_t n_ = 0, m_ = 0, nodes_ = 0, custom_nodes_ = 0;
  bool is_custom_ = false;
  bool became_custom_ = false;
  at::Device device_ = at::kCPU;
  std::vector<Place> inputs_, outputs_;
  std::vector<OutputSpec> specs_;
  std::shared_ptr<Graph> graph_;
  at::Tensor base_;
};

}  // namespace fastgrad
