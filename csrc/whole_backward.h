// All VJPs of a check of a small problem, in one call, and their comparison with differences.
#pragma once

#include "vjp.h"

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

namespace fastgrad {

// The results of all VJPs of a small problem.
struct WholeBackward {
  struct Rows {
    at::Tensor rows, repeated;  // as vjp_rows writes them; vectorized rows are not repeated
    GradientsMatch match;
  };
  // By output: real outputs, and imaginary parts of complex ones; then the real parts of complex ones.
  std::vector<Rows> parts;
  bool vectorized = false;  // whether the rows of an output came from one vectorized VJP
  at::Tensor products;      // VJPs of the cotangents, as from vjp_coordinates
  double movement = 0.0;    // largest change of the first product when it was run again
  bool add_up = true;       // whether the products are the sums of the rows, weighted by the cotangents
  bool brief = false;       // whether zeros and second runs were left out, as by brief_backward
  // Gradients for zero grad_outputs, unless `brief`; with `undefined`, also for undefined grad_outputs of all outputs
  // and, if there are several, of each output.
  std::vector<std::vector<at::Tensor>> zeros;
  bool are_zero = true;  // whether all of these are known to be zero and like their inputs (is_plain_zero)
  int64_t vjps = 0;

  // A copy with rows and products on another device; the gradients in `zeros` stay on theirs.
  WholeBackward to(at::Device device) const;
};

// Runs all VJPs: of `cotangents` (float64, shape (count, coordinates of all outputs)) in `layouts`, of one-hot
// grad_outputs as in vjp_rows, of undefined grad_outputs, of zeros and, if some row ran only once, of the first
// cotangent again. Without cotangents, there are no products. The sums of the rows may differ from the products by
// min(atol, rtol * the largest sum). If an output has `fewest_vectorized` elements or more (0: never), its rows are one
// vectorized VJP, if the backward can be vectorized; then pass 0 for `repeated`.
WholeBackward whole_backward(
    Graph& graph, const std::vector<InputBlock>& inputs, const at::Tensor& cotangents,
    const std::vector<int64_t>& layouts, int64_t repeated, double repeat_scale, bool undefined,
    int64_t fewest_vectorized, double atol, double rtol);

// The same without zeros and without second runs. This is enough for built-in code if a cotangent is mostly zero, which
// shows how it treats zeros, and if the caller repeats a VJP.
WholeBackward brief_backward(
    Graph& graph, const std::vector<InputBlock>& inputs, const at::Tensor& cotangents,
    const std::vector<int64_t>& layouts, bool undefined, int64_t fewest_vectorized, double atol, double rtol);

// Runs what brief_backward has left out: the first `repeated` rows of each part again, at two scales, unless rows were
// vectorized; zeros; and the first cotangent again.
void complete(
    WholeBackward& whole, Graph& graph, const std::vector<InputBlock>& inputs, const at::Tensor& cotangents,
    const std::vector<int64_t>& layouts, int64_t repeated, double repeat_scale);

// The VJPs of several grad_outputs of one output, as one vectorized VJP. The first dimension of `cotangents` and of
// each gradient counts them; a gradient is undefined if there is none. As torch.autograd.grad with is_grads_batched.
std::vector<at::Tensor> vectorized_vjp(Graph& graph, int64_t output, const at::Tensor& cotangents);

// Whether the gradients of vectorized VJPs are strided and equal those of single VJPs except for rounding, by the rule
// of torch.allclose. single: the gradients of each VJP.
bool are_close(
    const std::vector<std::optional<at::Tensor>>& batched,
    const std::vector<std::vector<std::optional<at::Tensor>>>& single);

// For one input: the number of its coordinates, whether two of them form one complex entry, atol and rtol.
using InputTolerances = std::tuple<int64_t, bool, double, double>;

// The largest absolute and relative error of each input in some rows of a small Jacobian; nothing if an entry is
// wrong. rows: analytical, of output coordinates first_row + i row_step, shape (rows, n); columns: numerical, shape
// (n, m); both float64, contiguous, on one device. On other devices than the CPU, it waits for the device once.
std::optional<std::vector<std::pair<double, double>>> largest_errors(
    const at::Tensor& rows, const at::Tensor& columns, int64_t first_row, int64_t row_step,
    const std::vector<InputTolerances>& inputs);

}  // namespace fastgrad
