// fastgrad::perturb_coordinates_: moves some real coordinates of a tensor at once, for example those of a column group.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fastgrad {

// As perturb_coordinate_ for each of the coordinates, bit for bit; sign 0 restores the origin's bits.
// values: strided, floating or complex, mutated in place, all other coordinates untouched.
// origin: contiguous snapshot of values, same dtype and shape.
// coordinates: int64, shape (count,), contiguous, strictly increasing real coordinates of values;
// on other devices than the CPU, the caller must ensure this. sign: -1, 0 or 1. eps, relative_step: >= 0.
// restored: int64, shape (others,), contiguous, other real coordinates, which get the origin's bits in the same launch;
// those outside values are skipped, because before the first step, there is nothing to restore.
void perturb_coordinates_(
    const at::Tensor& values, const at::Tensor& origin, const at::Tensor& coordinates, int64_t sign, double eps,
    double relative_step, const std::optional<at::Tensor>& restored = std::nullopt);

// Argument checks shared by all kernels except Meta.
void check_perturb_coordinates(
    const at::Tensor& values, const at::Tensor& origin, const at::Tensor& coordinates, int64_t sign,
    const std::optional<at::Tensor>& restored);

}  // namespace fastgrad
