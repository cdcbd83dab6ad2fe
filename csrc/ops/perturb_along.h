// fastgrad::perturb_along_: move every coordinate of a tensor along a random direction.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastgrad {

// x[j] = origin[j] + sign * h_j * u_j for every real coordinate j of x, in x's dtype; sign 0
// restores. h_j = max(eps, relative_step |origin[j]|); u_j is the component of direction
// (seed, stream) at coordinate first + j: the direction is computed, never stored.
// x: strided, floating or complex, mutated in place. origin: contiguous snapshot of x.
void perturb_along_(
    const at::Tensor& x, const at::Tensor& origin, int64_t seed, int64_t stream, int64_t first, int64_t sign,
    double eps, double relative_step);

}  // namespace fastgrad
