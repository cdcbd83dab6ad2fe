// fastgrad::central_difference_: one column of the numerical Jacobian, for one output.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastgrad {

// column[i] = (plus_i - minus_i) / w, with w the distance between the two values, after rounding, that
// perturb_coordinate_ gives the coordinate for signs 1 and -1 and the same other arguments.
// column: float64, shape (coordinates of minus,), any stride; holds the real coordinates of plus
//   (flatten_) on entry and the differences on return.
// minus: strided, floating or complex.
void central_difference_(
    const at::Tensor& column, const at::Tensor& minus, const at::Tensor& origin, int64_t coordinate, double eps,
    double relative_step);

// Argument checks shared by all kernels except Meta.
void check_central_difference(
    const at::Tensor& column, const at::Tensor& minus, const at::Tensor& origin, int64_t coordinate);

}  // namespace fastgrad
