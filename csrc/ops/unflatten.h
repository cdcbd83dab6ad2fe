// fastgrad::unflatten_: writes real coordinates into a tensor, the inverse of flatten_.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastgrad {

// Real coordinate c of tensor = coordinates[c], rounded to tensor's dtype. Turns a vector of R^m into a
// cotangent.
// tensor: strided, floating or complex, any strides, mutated in place.
// coordinates: float64, shape (coordinates of tensor,), any stride.
void unflatten_(const at::Tensor& tensor, const at::Tensor& coordinates);

// Argument checks shared by all kernels except Meta.
void check_unflatten(const at::Tensor& tensor, const at::Tensor& coordinates);

}  // namespace fastgrad
