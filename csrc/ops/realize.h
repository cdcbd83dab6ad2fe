// fastgrad::realize_: the displacements along a random direction, and the direction after rounding.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastgrad {

// For every real coordinate j of origin, with u_j = component first + j of a direction (direction_, not halved) and the
// step h_j = max(eps, relative_step |origin[j]|): displacement[j] = h_j u_j, and realized[j] is the factor, after
// rounding, of column j in differences with displacements h u and h u / 2, divided and extrapolated as in richardson_
// with this eps: h_j u_j / eps up to rounding to origin's dtype. u is not stored.
// displacement, realized: float64, contiguous, shape (coordinates of origin,), mutated in place.
// origin: contiguous, floating or complex.
void realize_(
    const at::Tensor& displacement, const at::Tensor& realized, const at::Tensor& origin, int64_t seed, int64_t stream,
    int64_t first, double eps, double relative_step);

// Argument checks shared by all kernels except Meta.
void check_realize(const at::Tensor& displacement, const at::Tensor& realized, const at::Tensor& origin, int64_t first);

}  // namespace fastgrad
