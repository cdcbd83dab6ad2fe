// fastgrad::direction_: components of a random direction.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastgrad {

// out[j] = component first + j of direction (seed, stream): +-[0.5, 1.5) or, with halved, zero for a
// random half of them; the same bits on every device (kernels/direction.h).
// out: float64, one-dimensional, any stride, mutated in place. first: not negative.
void direction_(const at::Tensor& out, int64_t seed, int64_t stream, int64_t first, bool halved);

// Argument checks shared by all kernels except Meta: component numbers, rounded up to groups of four, must exist.
void check_direction(const at::Tensor& out, int64_t first);

// Writes `count` components, at least one, to memory of this process, `stride` elements from one to the next.
void write_direction(
    double* out, int64_t stride, int64_t count, int64_t seed, int64_t stream, int64_t first, bool halved);

}  // namespace fastgrad
