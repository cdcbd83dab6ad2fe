// fastgrad::central_difference_: one column of the numerical Jacobian, for one output.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastgrad {

// column[i] = (plus_i - minus_i) / w, with w the distance by which perturb_coordinate_ with the
// same origin, coordinate, eps and relative_step really moved that coordinate between its two signs.
// column: float64, shape (coordinates of minus,), any stride; holds the real coordinates of plus
//   (flatten_) on entry and the differences on return.
// minus: strided, floating or complex.
void central_difference_(
    const at::Tensor& column, const at::Tensor& minus, const at::Tensor& origin, int64_t coordinate, double eps,
    double relative_step);

// Argument checks of every kernel.
void check_central_difference(
    const at::Tensor& column, const at::Tensor& minus, const at::Tensor& origin, int64_t coordinate);

}  // namespace fastgrad
