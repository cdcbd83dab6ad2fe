// fastgrad::perturb_coordinate_: moves one real coordinate of a tensor.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fastgrad {

// x[coordinate] = origin[coordinate] + sign * step, in x's dtype; sign 0 restores the origin's bits.
// step is eps, or relative_step * |origin[coordinate]| if eps is too small to move it.
// x: strided, floating or complex, mutated in place, all other coordinates untouched.
// origin: contiguous snapshot of x, same dtype and shape.
// coordinate: a real coordinate of x. sign: -1, 0 or 1. eps, relative_step: >= 0.
// restored: another real coordinate of x, which gets the origin's bits in the same launch.
void perturb_coordinate_(
    const at::Tensor& x, const at::Tensor& origin, int64_t coordinate, int64_t sign, double eps, double relative_step,
    std::optional<int64_t> restored = std::nullopt);

// Argument checks shared by all kernels except Meta.
void check_perturb_coordinate(
    const at::Tensor& x, const at::Tensor& origin, int64_t coordinate, int64_t sign, std::optional<int64_t> restored);

}  // namespace fastgrad
