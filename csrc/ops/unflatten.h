// fastgrad::unflatten_: real coordinates into a tensor, the mirror of flatten_.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastgrad {

// Real coordinate c of tensor = coordinates[c], rounded to tensor's dtype: how a vector of R^m
// becomes a cotangent.
// tensor: strided, floating or complex, any strides, mutated in place.
// coordinates: float64, shape (coordinates of tensor,), any stride.
void unflatten_(const at::Tensor& tensor, const at::Tensor& coordinates);

// What every kernel of it demands.
void check_unflatten(const at::Tensor& tensor, const at::Tensor& coordinates);

}  // namespace fastgrad
