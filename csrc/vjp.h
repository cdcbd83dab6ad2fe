// The loops that run VJPs on the graph of the function under test.
#pragma once

#include "blocks.h"
#include "graph_runner.h"

#include <ATen/core/Tensor.h>
#include <c10/util/complex.h>

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

namespace fastgrad {

// The vector-Jacobian product: gradients of sum_o <cotangents[o], outputs[o]> with respect to the
// inputs, undefined where there is none; recorded for differentiation if create_graph is true. An
// undefined cotangent stands for 1 and needs an output of one element. Keeps the graph. Called and
// returns with the GIL held.
std::vector<at::Tensor> vjp(
    const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
    const std::vector<at::Tensor>& cotangents, bool create_graph);

// Rejects tensors whose storage was freed or shrunk: backward may read values that forward saved in it.
void check_vjp_memory(
    const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
    const std::vector<at::Tensor>& cotangents);

// Each output, followed by a node whose backward passes on an undefined gradient, no matter which one it gets.
std::vector<at::Tensor> with_undefined_grads(const std::vector<at::Tensor>& outputs);

// vjp with zeros for cotangents.
std::vector<at::Tensor> vjp_of_zeros(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);

// Whether a fast test shows that a gradient is zero and has its input's sizes, dtype and device. If false, the caller
// must test this by operators: the gradient may be large or not plain.
bool is_plain_zero(const at::Tensor& gradient, const at::Tensor& input);

// The largest entry of some gradients at an element that their sparse input does not specify.
struct UnspecifiedEntry {
  int64_t row;      // among the rows that were computed
  int64_t element;  // flat index in the input
  c10::complex<double> value;
};

// Properties of the gradients that some rows come from.
struct GradientsMatch {
  bool dtypes = true;                               // all had the dtype of their inputs
  bool sizes = true;                                // all had the size of their inputs; others count as zeros
  bool strided = true;                              // all were strided, not sparse
  bool repeats = true;                              // second runs, if any, gave equal values
  double movement = 0.0;                            // for groups: the largest difference of a second run
  std::map<int64_t, UnspecifiedEntry> unspecified;  // by input, if there is any
};

// The memory layout of a grad_output. gapped: dimensions in reverse order, and gaps of NaN between elements. offset:
// contiguous, but after a NaN at the beginning of its storage, at an offset of one element if a custom node gets it (so
// that addresses are not aligned for vectorized loads), otherwise of two. expanded, for a row that is constant over
// each output: a single value with stride 0, as from sum().
enum class Layout : int64_t { contiguous, gapped, offset, expanded };

// VJPs in coordinates: row k of the result (float64, shape (count, coordinates of all inputs end to end)) is the
// VJP of row k of cotangents (float64, shape (count, coordinates of all outputs end to end)). layouts: the Layout of
// the grad_output for each row; empty: contiguous for all rows. only: for each row the one output that gets a
// grad_output, or -1 if all outputs get one; empty: all outputs, for all rows. The result for a single row may be the
// tensor that autograd returned, if nothing else refers to it.
std::tuple<at::Tensor, GradientsMatch> vjp_coordinates(
    Graph& graph, const std::vector<InputBlock>& inputs, const at::Tensor& cotangents,
    const std::vector<int64_t>& layouts, const std::vector<int64_t>& only);

// Runs the VJPs of rows order[0], order[1], ... of cotangents, contiguous, until one differs from its row of `known`
// (float64, shape (count, coordinates of all inputs)); cotangents and only as of vjp_coordinates. Returns how many were
// run, the VJP that differs (shape (1, coordinates of all inputs)), if one does, and properties of the gradients.
std::tuple<int64_t, std::optional<at::Tensor>, GradientsMatch> first_other_vjp(
    Graph& graph, const std::vector<InputBlock>& inputs, const at::Tensor& cotangents, const std::vector<int64_t>& only,
    const std::vector<int64_t>& order, const at::Tensor& known);

// Analytical rows of one output: row i of `rows` becomes the VJP with the one-hot cotangent at element
// first + i of output, 1 or, for `imaginary`, 1j. Row i of `repeated`, which may have fewer rows,
// becomes the VJP with `repeat_scale` times that cotangent, run right after and divided by
// repeat_scale, a power of two. This division is exact, so equal rows mean that the backward is deterministic and,
// for a scale other than 1, homogeneous. If the scaled row overflows and the row does not, the scale is
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

// The largest difference of two float64 tensors of one shape; infinite if either contains a NaN.
double largest_difference(const at::Tensor& left, const at::Tensor& right);

}  // namespace fastgrad
