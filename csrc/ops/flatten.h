// fastgrad::flatten_: the real coordinates of a tensor as float64.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastgrad {

// out[c] = real coordinate c of tensor, rounded to float64: how a gradient becomes a piece of a row
// of a Jacobian block, and an output a piece of a column.
// out: float64, shape (coordinates of tensor,), any stride, mutated in place.
// tensor: strided, floating or complex.
void flatten_(const at::Tensor& out, const at::Tensor& tensor);

// What every kernel of it demands.
void check_flatten(const at::Tensor& out, const at::Tensor& tensor);

}  // namespace fastgrad
