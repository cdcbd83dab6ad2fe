// fastgrad::perturb_color_: move the real coordinates of one color, whose number is in memory.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastgrad {

// perturb_coordinate_ for each real coordinate c of values with colors[c] == color[0], to the same bits;
// sign 0 restores the origin's. Nothing about the color is known to the host: what was recorded once can
// run again for another.
// values: strided, floating or complex, mutated in place, all other coordinates untouched.
// origin: contiguous snapshot of values, same dtype and shape. colors: int64, shape (coordinates of
// values,), contiguous. color: int64, shape (1,). sign: -1, 0 or 1. eps, relative_step: >= 0.
void perturb_color_(
    const at::Tensor& values, const at::Tensor& origin, const at::Tensor& colors, const at::Tensor& color, int64_t sign,
    double eps, double relative_step);

// What every kernel of it demands.
void check_perturb_color(
    const at::Tensor& values, const at::Tensor& origin, const at::Tensor& colors, const at::Tensor& color,
    int64_t sign);

}  // namespace fastgrad
