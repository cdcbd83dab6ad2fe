// The loops that call the Python function under test and the autograd engine.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/complex.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/utils/pybind.h>

#include "graph_runner.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

namespace fastgrad {

// One differentiable input of the function under test: a block of consecutive real coordinates.
struct InputBlock {
  // stand_in, values, elements: as below; none for a strided argument. Refuses what does not fit together.
  InputBlock(
      const at::Tensor& argument, int64_t first, double relative_step, const std::optional<at::Tensor>& stand_in,
      const std::optional<at::Tensor>& values, const std::optional<at::Tensor>& elements);

  at::Tensor argument;   // the caller's own tensor
  at::Tensor stand_in;   // what func gets instead while inputs are perturbed; undefined: argument itself
  at::Tensor values;     // strided memory under a version counter of its own: what is perturbed
  at::Tensor origin;     // contiguous snapshot of the values at x: what is restored
  at::Tensor elements;   // int64: the flat index of each value in argument; undefined: all, in C order
  int64_t first;         // its first coordinate
  double relative_step;  // for steps at magnitudes where eps moves nothing

  // If func gets a stand-in: the memory of the caller's own tensor, because func may change it, and its values at x.
  at::Tensor own_values, own_origin;
};

// Refuses inputs whose memory somebody freed or replaced, so that perturbing `values` would not perturb them.
void check_in_place(const std::vector<InputBlock>& inputs);

// Refuses tensors whose storage func freed or shrunk, because torch would read beyond its end.
void check_memory(const std::vector<at::Tensor>& inputs);

// One differentiable output: where func returns it and what it must look like when perturbed.
struct OutputSpec {
  OutputSpec(int64_t position, at::Tensor like);

  int64_t position;  // in the tuple that func returns
  at::Tensor like;   // same shape, dtype and device; the values are never read
};

// The coordinates of all outputs, end to end.
int64_t total(const std::vector<OutputSpec>& outputs);

// The object that func returned as its output number `position`, or null if there is none; and whether an object is a
// tensor of this shape, dtype and device.
PyObject* output_at(PyObject* result, int64_t position);
bool looks_like(PyObject* object, const at::Tensor& like);

// Columns of a sparse Jacobian that share no row, or rows that share no column, group by group: each group takes one
// difference, or one VJP. All are int64, contiguous and on the CPU, except `entries` and `positions`, which are on the
// device of the values.
struct Groups {
  // Refuses tensors of other dtypes and devices, and starts that are not one per group.
  Groups(at::Tensor coordinates, at::Tensor starts, at::Tensor entries, at::Tensor entry_starts, at::Tensor positions);

  at::Tensor coordinates;   // group by group, ascending within: of the inputs, or of one output
  at::Tensor starts;        // shape (groups + 1,): where each group's coordinates start
  at::Tensor entries;       // of the Jacobian, group by group
  at::Tensor entry_starts;  // shape (groups + 1,)
  at::Tensor positions;     // shape (entries of the Jacobian,): the row, or the column, of each

  int64_t count() const { return starts.numel() - 1; }

  // Groups first, ..., last - 1 alone, or as many of them as there are.
  Groups part(int64_t first, int64_t last) const;

  // Where the coordinates of group g begin and end, and its entries. The caller must check the coordinates themselves.
  std::pair<int64_t, int64_t> coordinates_of(int64_t g) const;
  at::Tensor entries_of(int64_t g) const;
};

// Random directions u in R^n, as of Evaluator::realize, one for each stream. The derivative along one takes as many
// evaluations as `points` says: two, or four for Richardson extrapolation.
struct RandomDirections {
  int64_t seed;
  std::vector<int64_t> streams, points;
  double step, relative;
};

// What differences along directions give, all float64.
struct Derivatives {
  at::Tensor directions;   // what rounding leaves of each u: shape (count, coordinates of all inputs)
  at::Tensor derivatives;  // shape (count, coordinates of all outputs)
  at::Tensor noise;        // how far each output's derivatives may be off: shape (coordinates of all outputs,)
  std::optional<std::pair<double, double>> sizes;  // of small ones: the norm of noise, the largest derivative
  // Of a screening: the norm of the error of one-sided derivatives along the first direction, and its step.
  double curvature = 0.0, step = 0.0;
};

// If an output differs from its OutputSpec: the number of the evaluation, the number of the output, what func returned.
using Changed = std::tuple<int64_t, int64_t, pybind11::object>;

// Calls func with the caller's own arguments, unperturbed or perturbed in place. After every call,
// exceptions and interrupts included, the inputs hold the bits of their origins again, except after evaluate(): its
// graph may need values that func wrote, so the next call restores the inputs first.
class Evaluator {
 public:
  Evaluator(pybind11::object func, pybind11::tuple arguments, std::vector<InputBlock> blocks);

  // Whether the inputs hold other values than their origins; a NaN counts as another. Refuses inputs whose memory
  // func freed or replaced, as every evaluation does.
  bool inputs_changed() const;

  // The real coordinates of all inputs at x, end to end: float64, where the first input is; not to be written to.
  at::Tensor coordinates() const;

  // Writes the real widths of differences, for all inputs, into widths (float64, shape (coordinates of all inputs,)):
  // of single coordinates at each block's eps, and of x + scale * displacement.
  void coordinate_widths(const at::Tensor& widths, const std::vector<double>& eps) const;
  void realized_widths(const at::Tensor& widths, const at::Tensor& displacement, double scale) const;

  // func at x; gradients are recorded where record_graph and the caller's grad mode say so.
  pybind11::object evaluate(bool record_graph);

  // By realize_, for a direction u in R^n of a seed and stream: displacement (float64, shape (coordinates of all
  // inputs,)) becomes h u, and realized (of the same shape) becomes u after rounding. The inputs' relative steps are
  // multiplied by `relative`.
  void realize(
      const at::Tensor& displacement, const at::Tensor& realized, int64_t seed, int64_t stream, double eps,
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

  // The same from the fewest evaluations, for a check that passes. Along the first direction, there are three
  // evaluations, at x + h u, x - h u and x + h u / 2, which measure noise and curvature. Along each other direction,
  // there is one evaluation at x + h' u if noise and curvature show that a one-sided derivative with the best h' is
  // precise enough; otherwise there are two, at x + h u and x - h u. budget: the largest 2-norm of the noise of
  // one-sided derivatives; h is a multiple of the step if rounding would exceed the budget. All inputs and outputs are
  // on one device; `base` and the results are on the CPU. along.points is not used.
  std::variant<Derivatives, Changed> screening_derivatives(
      const RandomDirections& along, const at::Tensor& base, double curve, double budget,
      const std::vector<OutputSpec>& outputs, const std::vector<double>& ulps);

  // Numerical columns first, first + 1, ...: row j of `columns` (float64, shape (count, m), m the
  // coordinates of all outputs end to end) becomes the central difference at coordinate first + j,
  // two evaluations each. Returns nothing or, at the first evaluation with an output that differs from its OutputSpec,
  // (coordinate, output, what func returned instead).
  std::optional<std::tuple<int64_t, int64_t, pybind11::object>> difference_columns(
      int64_t first, const at::Tensor& columns, const std::vector<OutputSpec>& outputs, double eps, bool record_graph);

  // Numerical entries of a sparse Jacobian (float64, shape (entries,)), not yet divided by the steps:
  // entry e becomes y+ - y- at its row, with all columns of its group perturbed together. Two evaluations per group.
  // Returns as difference_columns does, with the first coordinate of the group as the coordinate.
  std::optional<std::tuple<int64_t, int64_t, pybind11::object>> difference_groups(
      const Groups& groups, const at::Tensor& values, int64_t m, const std::vector<OutputSpec>& outputs, double eps,
      bool record_graph);

  // func at arguments made by the caller: dual tensors over the inputs.
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
  // inputs)). undefined: for each row the input that gets no tangent, or -1; empty: all get one. Called at a level of
  // forward-mode AD; the inputs are strided. Returns as tangent_columns does, with the row as the coordinate.
  std::tuple<std::optional<Changed>, bool> jvps(
      const at::Tensor& directions, const std::vector<int64_t>& undefined, const at::Tensor& products,
      const std::vector<OutputSpec>& outputs);

  // Tangents of the outputs if one input has this tangent and the other inputs have none; zeros if an output has none.
  // And the tangents for several tangents of this input, in one vectorized run: they are in the first dimension of
  // `tangents_of_input` and of the results. Both are called at a level of forward-mode AD. An unexpected result of func
  // is returned as by difference_columns.
  std::variant<std::vector<at::Tensor>, Changed> tangents(
      int64_t input, const at::Tensor& tangent, const std::vector<OutputSpec>& outputs);
  std::variant<std::vector<at::Tensor>, Changed> batched_tangents(
      int64_t input, const at::Tensor& tangents_of_input, const std::vector<OutputSpec>& outputs);

  // Puts the origins back into every input, and an input's own memory back where func replaced or freed it.
  void restore();

  // Calls of func so far.
  int64_t evaluations() const { return evaluations_; }

  // Whether func changes its inputs: then all of them are restored around every evaluation. The evaluator sees this
  // from version counters; it must be told if func writes without increasing them.
  bool mutates_inputs() const { return mutates_inputs_; }
  void set_mutates_inputs(bool mutates) { mutates_inputs_ = mutates; }

  // The first input whose tangent was changed by a call of `jvps`; -1: none. This is not tested if func changes its
  // inputs, because it then also changes their tangents.
  int64_t modified_tangent() const { return modified_tangent_; }

  // Whether func records gradients at perturbed inputs if it is asked to. It does not if its values are known to be the
  // same without.
  bool records_differences() const { return records_differences_; }
  void set_records_differences(bool records) { records_differences_ = records; }

 private:
  pybind11::object call(bool record_graph, const pybind11::tuple& arguments);

  // Refuses coordinates first, ..., first + count - 1 that the inputs do not have.
  void check_coordinates(const char* what, int64_t first, int64_t count) const;

  // What x + displacement really moves by: float64, into `moved`, shape (coordinates of all inputs,); on the CPU.
  void realize_one_sided(const at::Tensor& moved, const at::Tensor& displacement) const;

  // The origin of an input on this device; a copy on the CPU is made once.
  at::Tensor origin_on(at::Device device, size_t block) const;

  // As values_along, for a displacement and values on the CPU: with outputs on a device, one copy of each.
  std::optional<Changed> values_on_cpu(
      const at::Tensor& displacement, const std::vector<double>& scales, const std::vector<at::Tensor>& values,
      const std::vector<OutputSpec>& outputs);

  // Moves all inputs to x + scale * displacement. parts: for each input, its part of the displacement, on its device.
  void displace(const std::vector<at::Tensor>& parts, double scale);
  std::vector<at::Tensor> parts_of(const at::Tensor& displacement) const;

  // A copy of coordinates for each block, where its values are.
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

  pybind11::object func_;
  pybind11::tuple arguments_;
  std::vector<InputBlock> blocks_;
  int64_t size_ = 0;  // the coordinates of all inputs
  int64_t evaluations_ = 0;
  int64_t modified_tangent_ = -1;
  bool mutates_inputs_ = false;
  bool records_differences_ = true;
  mutable std::vector<at::Tensor> origins_on_cpu_;  // of inputs on a device, once they were asked for
};

// The real coordinates of some tensors end to end: float64, one dimension, where the first is.
at::Tensor flattened(const std::vector<at::Tensor>& tensors);

// By cotangent, the largest of |v . J u - (v J) . u| over some directions u; a NaN is the largest. cotangents: shape
// (rows, m); derivatives J u: (count, m); gradients v J: (rows, n); directions: (count, n); all float64, contiguous.
std::vector<double> largest_residuals(
    const at::Tensor& cotangents, const at::Tensor& derivatives, const at::Tensor& gradients,
    const at::Tensor& directions);

// What body() returns, called at a level of forward-mode AD. torch has one level for all threads, so threads take
// turns; a thread that waits for its turn has released the GIL. The level ends with the call, also after an exception:
// between entering and leaving it, only body itself handles signals.
pybind11::object at_dual_level(const pybind11::object& body);

// The vector-Jacobian product: gradients of sum_o <cotangents[o], outputs[o]> with respect to the
// inputs, undefined where there is none; recorded for differentiation where create_graph says so. An
// undefined cotangent stands for 1 and needs an output of one element. Keeps the graph. Called and
// returns with the GIL held.
std::vector<at::Tensor> vjp(
    const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
    const std::vector<at::Tensor>& cotangents, bool create_graph);

// Refuses tensors whose storage was freed or shrunk: what backward saved may lie there, and torch would read it.
void check_vjp_memory(
    const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
    const std::vector<at::Tensor>& cotangents);

// Each output, followed by a node whose backward passes on an undefined gradient, no matter which one it gets.
std::vector<at::Tensor> with_undefined_grads(const std::vector<at::Tensor>& outputs);

// vjp with zeros for cotangents.
std::vector<at::Tensor> vjp_of_zeros(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);

// Whether a gradient is zero, has its input's sizes, dtype and device, and is so small and plain that this can be seen
// without an operator. If false, operators must decide.
bool is_plain_zero(const at::Tensor& gradient, const at::Tensor& input);

// The largest entry of some gradients at an element that their sparse input does not specify.
struct UnspecifiedEntry {
  int64_t row;      // of the rows that were computed
  int64_t element;  // flat index in the input
  c10::complex<double> value;
};

// Properties of the gradients that some rows come from.
struct GradientsMatch {
  bool dtypes = true;                               // all had the dtype of their inputs
  bool sizes = true;                                // all had the size of their inputs; others leave zeros
  bool repeats = true;                              // a second run, where there was one, gave equal values
  double movement = 0.0;                            // of groups: the largest difference of a second run
  std::map<int64_t, UnspecifiedEntry> unspecified;  // by input, where there is any
};

// Whether a node is a custom Function, of Python or C++.
bool is_custom(const torch::autograd::Node& node);

// How a grad_output is laid out in memory. contiguous. gapped: with reversed dimensions and gaps of NaN. offset:
// contiguous, but after a NaN at the beginning of its storage, at an offset of one element if a custom node gets it (so
// that addresses are not aligned for vectorized loads), otherwise of two. expanded, for a row that is constant over
// each output: a single value with stride 0, as from sum().
enum class Layout : int64_t { contiguous, gapped, offset, expanded };

// V J in coordinates: row k of the result (float64, shape (count, coordinates of all inputs end to end)) = the
// VJP of row k of cotangents (float64, shape (count, coordinates of all outputs end to end)). layouts: the Layout of
// the grad_output for each row; empty: contiguous for all rows. only: for each row the one output that gets a
// grad_output, or -1 if all outputs get one; empty: all outputs, for all rows. The result for a single row may be the
// tensor that autograd returned, if nothing else refers to it.
std::tuple<at::Tensor, GradientsMatch> vjp_coordinates(
    Graph& graph, const std::vector<InputBlock>& inputs, const at::Tensor& cotangents,
    const std::vector<int64_t>& layouts, const std::vector<int64_t>& only);

// Runs the VJPs of rows order[0], order[1], ... of cotangents, contiguous, until one differs from its row of `known`
// (float64, shape (count, coordinates of all inputs)); cotangents and only as of vjp_coordinates. Returns how many were
// run, the VJP that differs (shape (1, coordinates of all inputs)), if one does, and what the gradients looked like.
std::tuple<int64_t, std::optional<at::Tensor>, GradientsMatch> first_other_vjp(
    Graph& graph, const std::vector<InputBlock>& inputs, const at::Tensor& cotangents, const std::vector<int64_t>& only,
    const std::vector<int64_t>& order, const at::Tensor& known);

// Analytical rows of one output: row i of `rows` becomes the VJP with the one-hot cotangent at element
// first + i of output, 1 or, for `imaginary`, 1j. Row i of `repeated`, which may have fewer rows,
// becomes the VJP with `repeat_scale` times that cotangent, run right after and divided by
// repeat_scale, a power of two. This division is exact, so equal rows mean that the backward is deterministic and,
// for a scale other than 1, homogeneous. Where the scaled row overflows and the row does not, the scale is
// 1 / repeat_scale.
// rows, repeated: float64, shape (count, coordinates of all inputs end to end), mutated in place.
GradientsMatch vjp_rows(
    Graph& graph, int64_t output, const std::vector<InputBlock>& inputs, int64_t first, bool imaginary,
    const at::Tensor& rows, const at::Tensor& repeated, double repeat_scale);

// Analytical entries of the rows of one output in a sparse Jacobian. Entry e becomes the component at its column of
// the VJP whose cotangent is 1 (at imaginary coordinates: 1j) on all rows of the entry's group. The VJP of each of the
// first `repeated` groups is run again with `repeat_scale` (plus or minus a power of two) times its cotangent. With
// `expand`, this scaled cotangent is expanded with stride 0 if the group consists of all rows of a real output.
// `repeats` of the result: whether all second runs, divided by their scale, gave equal gradients.
// values: float64, shape (entries of the Jacobian,), mutated in place; n: coordinates of all inputs.
GradientsMatch vjp_groups(
    Graph& graph, int64_t output, const std::vector<InputBlock>& inputs, const Groups& groups, const at::Tensor& values,
    int64_t n, int64_t repeated, double repeat_scale, bool expand);

// By how much two tensors of one shape, float64, differ at most; infinite where either holds a NaN and they differ.
double largest_difference(const at::Tensor& left, const at::Tensor& right);

// The coordinates of all inputs, end to end.
int64_t total(const std::vector<InputBlock>& inputs);

// The caller's own tensors.
std::vector<at::Tensor> arguments_of(const std::vector<InputBlock>& inputs);

// Whether no Python is seen to run in the backward of `outputs`: no dispatch mode, and no hook, Function or tensor
// subclass of the user's. Such code may take one grad_output at a time only, and count on being called for each.
// Hooks on saved tensors leave no trace in the graph.
bool runs_no_custom_code(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);

// The nodes of the graph behind outputs, and how many of them are custom Functions; no more than `most` are visited.
std::tuple<int64_t, int64_t> count_nodes(const std::vector<at::Tensor>& outputs, int64_t most);

// The ids of the streams that the backward of `outputs` with respect to `inputs` runs on, each once; none for a
// backward on the CPU.
std::vector<int64_t> backward_streams(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);

// The results of all VJPs of a small problem.
struct WholeBackward {
  struct Rows {
    at::Tensor rows, repeated;  // as vjp_rows writes them; of vectorized rows none is repeated
    GradientsMatch match;
  };
  std::vector<Rows> parts;  // output by output, the imaginary parts of complex ones; then their real parts
  bool vectorized = false;  // the rows of some are one vectorized VJP
  at::Tensor products;      // of the cotangents with all rows, as of vjp_coordinates
  double movement = 0.0;    // by how much the first product changed when it was run again
  bool add_up = true;       // the products were seen to be what the rows add up to
  // Gradients of zeros; where asked for, of undefined grad_outputs of all outputs and, if there are several, of one
  // after the other.
  std::vector<std::vector<at::Tensor>> zeros;
  bool are_zero = true;  // all of these were seen to be zero, and like their inputs
  int64_t vjps = 0;

  // The same with rows and products on another device; the gradients in `zeros` stay where they are.
  WholeBackward to(at::Device device) const;
};

// Runs all these VJPs: of zeros, of undefined grad_outputs, of one-hot ones as in vjp_rows, and of `cotangents`
// (float64, shape (count, coordinates of all outputs)) in `layouts`; without cotangents, there are no products. The
// sums of the rows may differ from the products by atol, and by rtol of the largest sum. If an output has
// `fewest_vectorized` elements or more (0: never), its rows are one vectorized VJP, if the backward can be vectorized;
// then pass 0 for `repeated`.
WholeBackward whole_backward(
    Graph& graph, const std::vector<InputBlock>& inputs, const at::Tensor& cotangents,
    const std::vector<int64_t>& layouts, int64_t repeated, double repeat_scale, bool undefined,
    int64_t fewest_vectorized, double atol, double rtol);

// The VJPs of several grad_outputs of one output, as one vectorized VJP. The first dimension of `cotangents` and of
// each gradient counts them; a gradient is undefined if there is none. As torch.autograd.grad with is_grads_batched.
std::vector<at::Tensor> vectorized_vjp(Graph& graph, int64_t output, const at::Tensor& cotangents);

// Whether the gradients of vectorized VJPs are strided and equal those of single VJPs except for rounding, by the rule
// of torch.allclose. single: the gradients of each VJP.
bool are_close(
    const std::vector<std::optional<at::Tensor>>& batched,
    const std::vector<std::vector<std::optional<at::Tensor>>>& single);

// Of one input: its coordinates, whether two of them are an entry, atol and rtol.
using InputTolerances = std::tuple<int64_t, bool, double, double>;

// The largest absolute and relative error of each input in some rows of a small Jacobian; nothing where an entry is
// wrong. rows: analytical, of output coordinates first_row + i row_step, shape (rows, n); columns: numerical, shape
// (n, m); both float64, contiguous, on one device. Elsewhere than on the CPU it waits for the device, once.
std::optional<std::vector<std::pair<double, double>>> largest_errors(
    const at::Tensor& rows, const at::Tensor& columns, int64_t first_row, int64_t row_step,
    const std::vector<InputTolerances>& inputs);

}  // namespace fastgrad
