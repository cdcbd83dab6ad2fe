// fastgrad::flatten_: the real coordinates of a tensor as float64.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastgrad {

// out[c] = real coordinate c of tensor, rounded to float64. Turns a gradient into a piece of a row of a
// Jacobian block, and an output into a piece of a column.
// out: float64, shape (coordinates of tensor,), any stride, mutated in place.
// tensor: strided, floating or complex.
void flatten_(const at::Tensor& out, const at::Tensor& tensor);

// Argument checks shared by all kernels except Meta.
void check_flatten(const at::Tensor& out, const at::Tensor& tensor);

}  // namespace fastgrad
