// The loops that call the function under test, a Python callable.
#pragma once

#include "blocks.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

namespace fastgrad {

// Random directions u in R^n, one for each stream (see Evaluator::realize). points: the number of evaluations for the
// derivative along each, two, or four for Richardson extrapolation. parts: for each, the part of the inputs that moves,
// or -1 if all move; empty: all move along each. Input number b is in part b % (number of parts).
struct RandomDirections {
  int64_t seed;
  std::vector<int64_t> streams, points;
  double step, relative;
  std::vector<int64_t> parts;

  bool is_part(int64_t k) const { return !parts.empty() && parts[k] >= 0; }

  // Rejects parts that are not valid. caller: the name for the message.
  void check(const char* caller) const;
};

// Results of differences along directions: all float64.
struct Derivatives {
  at::Tensor directions;   // each u after rounding: shape (count, coordinates of all inputs)
  at::Tensor derivatives;  // shape (count, coordinates of all outputs)
  at::Tensor noise;        // estimated error of each output's derivatives: shape (coordinates of all outputs,)
  std::optional<std::pair<double, double>> sizes;  // on the CPU: the norm of noise, the largest derivative
  // Only from screening_derivatives: the 2-norm, over outputs, of the curvature error of a one-sided derivative along
  // the first direction, and the step of this direction.
  double curvature = 0.0, step = 0.0;
  // Only from screening_derivatives: the ratio of the steps along the other directions to `step`, if one-sided
  // derivatives suffice there.
  std::optional<double> step_fraction;
  // Only from screening_derivatives: whether noise includes rounding inside func, which a third evaluation along the
  // first direction shows, and not only the rounding of the outputs. If not, first_values are those of the first two
  // evaluations: shape (2, coordinates of all outputs).
  bool measures_noise = true;
  at::Tensor first_values;
  // Only from screening_derivatives: false if there is only the derivative along the first direction, because it shows
  // too much curvature at a step that was chosen because of rounding.
  bool is_complete = true;
};

// If an output differs from its OutputSpec: the number of the evaluation, the index of the output, and what func
// returned instead.
using Changed = std::tuple<int64_t, int64_t, pybind11::object>;

// Calls func with the caller's own arguments, unperturbed or perturbed in place. After every call,
// exceptions and interrupts included, the inputs hold the bits of their origins again, except after evaluate(): its
// graph may need values that func wrote, so the next call restores the inputs first.
class Evaluator {
 public:
  Evaluator(pybind11::object func, pybind11::tuple arguments, std::vector<InputBlock> blocks);

  // Whether the inputs hold other values than their origins; a NaN counts as different. Rejects inputs whose memory
  // func freed or replaced, as every evaluation does.
  bool inputs_changed() const;

  // The real coordinates of all inputs at x, end to end: float64, on the device of the first input. Read-only.
  at::Tensor coordinates() const;

  // Writes the widths of differences, after rounding, into widths (float64, shape (coordinates of all inputs,)):
  // of differences of single coordinates, with the eps of each block; and between x + scale * displacement and
  // x - scale * displacement.
  void coordinate_widths(const at::Tensor& widths, const std::vector<double>& eps) const;
  void realized_widths(const at::Tensor& widths, const at::Tensor& displacement, double scale) const;

  // func at x; gradients are recorded if both record_graph and the caller's grad mode are true.
  pybind11::object evaluate(bool record_graph);

  // Calls realize_ for the direction u in R^n of this seed and stream: displacement (float64, shape (coordinates of all
  // inputs,)) becomes h u, and realized (of the same shape) becomes u after rounding. The inputs' relative steps are
  // multiplied by `relative`.
  void realize(
      const at::Tensor& displacement, const at::Tensor& realized, int64_t seed, int64_t stream, double eps,
      double relative) const;

  // The same for direction number k, with another step and relative step than `along` has.
  void realize_along(
      const at::Tensor& displacement, const at::Tensor& realized, const RandomDirections& along, int64_t k, double step,
      double relative) const;

  // func at x + scale * displacement (float64, shape (coordinates of all inputs,); fastgrad::displace_) for
  // several scales: each of `values` (float64, shape (m,)) becomes the outputs end to end. Returns as
  // difference_columns does, with the number of the scale instead of a coordinate.
  std::optional<std::tuple<int64_t, int64_t, pybind11::object>> values_along(
      const at::Tensor& displacement, const std::vector<double>& scales, const std::vector<at::Tensor>& values,
      const std::vector<OutputSpec>& outputs, bool record_graph);

  // The derivatives along random directions. base: the outputs at x, float64, shape (coordinates of all outputs,).
  // curve: the largest distance of a smooth function's one-sided derivatives from the central one, relative to the
  // central one. fixed: true for coordinates that do not move, shape (coordinates of all inputs,). ulps: the relative
  // spacing of each output's dtype.
  std::variant<Derivatives, Changed> differences_along(
      const RandomDirections& along, const at::Tensor& base, double curve, const std::optional<at::Tensor>& fixed,
      const std::vector<OutputSpec>& outputs, const std::vector<double>& ulps);

  // The same from the fewest evaluations, for a check that passes. Along the first direction, there are evaluations at
  // x + h u and x - h u, which show curvature, and at x + h u / 2, which measures noise, if measure_noise or if the
  // first two show noise above the budget. Along each other direction, there is one evaluation at x + h' u if noise and
  // curvature show that a one-sided derivative with the best h' is precise enough; otherwise, and if only a part of the
  // inputs moves, there are two, at x + h u and x - h u. budget: the largest 2-norm of the noise of one-sided
  // derivatives; h is a multiple of the step if rounding would exceed the budget. known: derivatives from the same
  // arguments without measured noise, to measure it; only evaluations that are not known are made. All inputs and
  // outputs are on one device; `base` and the results are on the CPU. along.points is not used.
  std::variant<Derivatives, Changed> screening_derivatives(
      const RandomDirections& along, const at::Tensor& base, double curve, double budget, bool measure_noise,
      const std::optional<Derivatives>& known, const std::vector<OutputSpec>& outputs, const std::vector<double>& ulps);

  // Numerical columns first, first + 1, ...: row j of `columns` (float64, shape (count, m), m the
  // coordinates of all outputs end to end) becomes the central difference at coordinate first + j,
  // two evaluations each. Returns nothing or, at the first evaluation with an output that differs from its OutputSpec,
  // (coordinate, number of the output, what func returned instead).
  std::optional<std::tuple<int64_t, int64_t, pybind11::object>> difference_columns(
      int64_t first, const at::Tensor& columns, const std::vector<OutputSpec>& outputs, double eps, bool record_graph);

  // The same for all columns (shape (coordinates of all inputs, m)), up to rounding, from one call of `evaluate`.
  // evaluate(arguments, count) gives the results of func for `count` points; the inputs among its arguments, and its
  // results, have a leading dimension that counts the points. Returns the outputs at x and at x + displacement
  // (float64, shape (2, m)); nothing if a result was of another kind than expected.
  std::optional<at::Tensor> vectorized_columns(
      const pybind11::object& evaluate, const at::Tensor& displacement, const at::Tensor& columns,
      const std::vector<OutputSpec>& outputs, double eps);

  // New tensors with the inputs at x + displacement.
  std::vector<at::Tensor> inputs_at(const at::Tensor& displacement) const;

  // Numerical entries of a sparse Jacobian (float64, shape (entries,)), not yet divided by the steps:
  // entry e becomes y+ - y- at its row, with all columns of its group perturbed together. Two evaluations per group.
  // Returns as difference_columns does, with the first coordinate of the group as the coordinate.
  std::optional<std::tuple<int64_t, int64_t, pybind11::object>> difference_groups(
      const Groups& groups, const at::Tensor& values, int64_t m, const std::vector<OutputSpec>& outputs, double eps,
      bool record_graph);

  // func's arguments with other tensors instead of the inputs.
  pybind11::tuple arguments_with(const std::vector<at::Tensor>& inputs) const;

  // func at arguments made by the caller: dual tensors over the inputs, or other points.
  pybind11::object evaluate_at(const pybind11::tuple& arguments);

  // Analytical columns by forward-mode AD: row j of `columns` (as in difference_columns) becomes the
  // tangent of the outputs where the tangent of the inputs is one-hot at coordinate first + j. duals
  // are func's arguments; tangents, one per input block, are the tangents inside them: zero, written
  // while this runs and zero again when it returns. An output without a tangent gives zeros.
  // Returns what difference_columns returns, and whether all tangents were complex where their
  // outputs are and real where they are real.
  std::tuple<std::optional<std::tuple<int64_t, int64_t, pybind11::object>>, bool> tangent_columns(
      int64_t first, const at::Tensor& columns, const std::vector<OutputSpec>& outputs, const pybind11::tuple& duals,
      const std::vector<at::Tensor>& tangents);

  // J u for several directions u by forward-mode AD: row k of `products` (float64, shape (count, m)) becomes the
  // tangent of the outputs where that of the inputs is row k of directions (float64, shape (count, coordinates of all
  // inputs)). undefined: for each row the input that gets no tangent; the number of inputs + b if only input b gets
  // one; or -1 if all get one. Empty: all get one. Called at a level of forward-mode AD; the inputs are strided.
  // Returns as tangent_columns does, with the row as the coordinate.
  std::tuple<std::optional<Changed>, bool> jvps(
      const at::Tensor& directions, const std::vector<int64_t>& undefined, const at::Tensor& products,
      const std::vector<OutputSpec>& outputs);

  // tangents: those of the outputs if one input has this tangent and the other inputs have none; zeros if an output has
  // none. batched_tangents: the same for several tangents of this input in one vectorized run; the first dimension of
  // `tangents_of_input` and of the results counts them. Both are called at a level of forward-mode AD. An unexpected
  // result of func is returned as by difference_columns.
  std::variant<std::vector<at::Tensor>, Changed> tangents(
      int64_t input, const at::Tensor& tangent, const std::vector<OutputSpec>& outputs);
  std::variant<std::vector<at::Tensor>, Changed> batched_tangents(
      int64_t input, const at::Tensor& tangents_of_input, const std::vector<OutputSpec>& outputs);

  // Puts the origins back into every input, and an input's own memory back where func replaced or freed it.
  void restore();

  // Calls of func so far.
  int64_t evaluations() const { return evaluations_; }

  // Whether func changes its inputs: if so, all inputs are restored around every evaluation. The evaluator sees changes
  // from version counters; for a func that writes without increasing them, the caller must set this.
  bool mutates_inputs() const { return mutates_inputs_; }
  void set_mutates_inputs(bool mutates) { mutates_inputs_ = mutates; }

  // The first input whose tangent was changed by a call of `jvps`; -1: none. This is not tested if func changes its
  // inputs, because it then also changes their tangents.
  int64_t modified_tangent() const { return modified_tangent_; }

  // Whether record_graph=true has an effect at perturbed inputs. False if func is known to return the same values when
  // gradients are not recorded.
  bool records_differences() const { return records_differences_; }
  void set_records_differences(bool records) { records_differences_ = records; }

 private:
  pybind11::object call(bool record_graph, const pybind11::tuple& arguments);

  // Rejects coordinates first, ..., first + count - 1 unless the inputs have all of them.
  void check_coordinates(const char* what, int64_t first, int64_t count) const;

  // Writes ((x + displacement) - x) / step, after rounding of the sum, into `direction`: float64, shape (coordinates of
  // all inputs,), on the CPU. All inputs are in double precision; step: a power of two times that of `displacement`.
  void realize_one_sided(const at::Tensor& direction, const at::Tensor& displacement, double step) const;

  // The origin of an input on this device; a copy on the CPU is made once.
  at::Tensor origin_on(at::Device device, size_t block) const;

  // Like values_along, for a displacement and values on the CPU. If outputs are on a device, the displacement is copied
  // once, and so are all values together.
  std::optional<Changed> values_on_cpu(
      const at::Tensor& displacement, const std::vector<double>& scales, const std::vector<at::Tensor>& values,
      const std::vector<OutputSpec>& outputs);

  // Moves all inputs to x + scale * displacement. parts: for each input, its part of the displacement, on its device.
  void displace(const std::vector<at::Tensor>& parts, double scale);
  std::vector<at::Tensor> parts_of(const at::Tensor& displacement) const;

  // A copy of coordinates for each block, on the device of its values.
  std::vector<at::Tensor> with_blocks(const at::Tensor& coordinates) const;

  // Moves the coordinates of group g by sign times their steps; sign 0 puts them back. copies: the coordinates of all
  // groups, from with_blocks.
  void perturb_together(
      const Groups& groups, int64_t g, const std::vector<at::Tensor>& copies, int64_t sign, double eps);

  // A tangent that func gets, and its values before.
  struct GivenTangent {
    int64_t input;
    at::Tensor tangent, values;
  };

  // func's arguments with tangents: tangent_of(b, primal) gives the tangent of input number b, undefined for none. The
  // tangents are added to `given`, unless it is null.
  pybind11::tuple dual_arguments(
      const std::function<at::Tensor(size_t, const at::Tensor&)>& tangent_of,
      std::vector<GivenTangent>* given = nullptr) const;

  // The arguments with another tensor in each position of an input.
  pybind11::tuple replaced(const InputBlock& block, pybind11::tuple arguments, const pybind11::object& by) const;

  // What func gets while inputs are perturbed.
  pybind11::tuple perturbed_arguments() const;

  // The values of an input at the points of all n differences: point j has coordinate j moved up, and point n + j moved
  // down. The last two points are x and `last`. Shape (2 n + 2, *shape of the input).
  at::Tensor points_of(const InputBlock& block, const at::Tensor& last, double eps) const;

  pybind11::object func_;
  pybind11::tuple arguments_;
  std::vector<InputBlock> blocks_;
  int64_t size_ = 0;  // the coordinates of all inputs
  int64_t evaluations_ = 0;
  int64_t modified_tangent_ = -1;
  bool mutates_inputs_ = false;
  bool records_differences_ = true;
  mutable std::vector<at::Tensor> origins_on_cpu_;  // of inputs on a device; made by the first origin_on
};

// For each cotangent v, the largest |v . J u - (v J) . u| over some directions u; a NaN counts as the largest.
// cotangents: shape (rows, m); derivatives J u: (count, m); gradients v J: (rows, n); directions: (count, n); all
// float64, contiguous.
std::vector<double> largest_residuals(
    const at::Tensor& cotangents, const at::Tensor& derivatives, const at::Tensor& gradients,
    const at::Tensor& directions);

// Tests weighted sums of the entries of a sparse Jacobian. Entry e is multiplied by weight sources[e] and added to sum
// targets[e]; the results must equal the given sums (float64, shape (rows, sums)), row by row. weights: shape (rows,
// weights); entries: shape (entries,). A difference is explained if it is at most `allowed` plus `rounding` times the
// sum of the magnitudes. Returns the largest of these bounds; nothing if a difference exceeds its bound or is NaN. All
// tensors are contiguous and on the CPU.
std::optional<double> explained_sums(
    const at::Tensor& entries, const at::Tensor& sources, const at::Tensor& targets, const at::Tensor& weights,
    const at::Tensor& sums, double allowed, double rounding);

// Calls body() at a level of forward-mode AD and returns its result. torch has one level for all threads, so threads
// take turns; a thread that waits for its turn has released the GIL. The level is always left, also after an exception.
// At this level, Python handles signals (Ctrl-C) only while body runs, so no signal can prevent leaving it.
pybind11::object at_dual_level(const pybind11::object& body);

}  // namespace fastgrad
