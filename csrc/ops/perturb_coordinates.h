// fastgrad::perturb_coordinates_: move some real coordinates of a tensor at once, as a column group does.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fastgrad {

// perturb_coordinate_ for each of the coordinates, to the same bits; sign 0 restores the origin's.
// values: strided, floating or complex, mutated in place, all other coordinates untouched.
// origin: contiguous snapshot of values, same dtype and shape.
// coordinates: int64, shape (count,), contiguous, strictly increasing real coordinates of values;
// on another device than the CPU the caller must ensure this. sign: -1, 0 or 1. eps, relative_step: >= 0.
// restored: int64, shape (others,), contiguous, other real coordinates, which get the origin's bits in the same launch;
// coordinates outside of values are skipped, because before the first step there is none to restore.
void perturb_coordinates_(
    const at::Tensor& values, const at::Tensor& origin, const at::Tensor& coordinates, int64_t sign, double eps,
    double relative_step, const std::optional<at::Tensor>& restored = std::nullopt);

// Argument checks of every kernel.
void check_perturb_coordinates(
    const at::Tensor& values, const at::Tensor& origin, const at::Tensor& coordinates, int64_t sign,
    const std::optional<at::Tensor>& restored);

}  // namespace fastgrad
