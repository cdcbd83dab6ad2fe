// fastgrad::displace_: moves every coordinate of a tensor by its own displacement.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastgrad {

// x[j] = origin[j] + scale * displacement[j] for every real coordinate j of x, rounded to x's dtype;
// scale 0 restores the bits of origin.
// x: strided, floating or complex, mutated in place. origin: contiguous snapshot of x.
// displacement: float64, shape (coordinates of x,), any stride.
void displace_(const at::Tensor& x, const at::Tensor& origin, const at::Tensor& displacement, double scale);

// Argument checks shared by all kernels except Meta.
void check_displace(const at::Tensor& x, const at::Tensor& origin, const at::Tensor& displacement);

}  // namespace fastgrad
