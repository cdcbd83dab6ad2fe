// CPU launcher and plain ATen kernel of fastgrad::perturb_color_.
#include "perturb_color.h"

#include "../kernels/difference.h"
#include "common.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/where.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

namespace fastgrad {

void check_perturb_color(
    const at::Tensor& values, const at::Tensor& origin, const at::Tensor& colors, const at::Tensor& color,
    int64_t sign) {
  check_origin("perturb_color_", values, origin, "values");
  check_indices("perturb_color_", "colors", colors);
  check_indices("perturb_color_", "color", color);
  TORCH_CHECK(
      colors.numel() == coordinate_count(values), "perturb_color_: colors must have ", coordinate_count(values),
      " elements, one for each real coordinate of values, got ", colors.numel());
  TORCH_CHECK(color.numel() == 1, "perturb_color_: color must have one element, got ", color.numel());
  TORCH_CHECK(sign >= -1 && sign <= 1, "perturb_color_: sign must be -1, 0 or 1, got ", sign);
}

namespace {

void perturb_color_cpu(
    const at::Tensor& values, const at::Tensor& origin, const at::Tensor& colors, const at::Tensor& color, int64_t sign,
    double eps, double relative_step) {
  check_perturb_color(values, origin, colors, color, sign);
  const int64_t width = coordinates_per_element(values);
  const int64_t* of_coordinate = colors.const_data_ptr<int64_t>();
  const int64_t chosen = *color.const_data_ptr<int64_t>();
  FASTGRAD_DISPATCH_REAL(values.scalar_type(), "perturb_color_", [&] {
    const auto* at_x = static_cast<const real_t*>(origin.const_data_ptr());
    auto* out = static_cast<real_t*>(values.mutable_data_ptr());
    at::parallel_for(0, colors.numel(), grain_size, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        if (of_coordinate[c] == chosen) {
          const int64_t target = element_offset(values, c / width) * width + c % width;
          out[target] = moved_coordinate(at_x[c], static_cast<int>(sign), eps, relative_step);
        }
      }
    });
  });
}

void perturb_color_composite(
    const at::Tensor& values, const at::Tensor& origin, const at::Tensor& colors, const at::Tensor& color, int64_t sign,
    double eps, double relative_step) {
  check_perturb_color(values, origin, colors, color, sign);
  at::Tensor moved = real_coordinates(origin);
  if (sign != 0) {
    moved = moved + sign * coordinate_step(moved, eps, relative_step);
  }
  const at::Tensor all = at::where(at::eq(colors, color), moved, real_coordinates(values));
  values.copy_(
      values.is_complex() ? at::view_as_complex(all.reshape({-1, 2})).reshape(values.sizes())
                          : all.reshape(values.sizes()));
}

void perturb_color_meta(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, double, double) {
}  // sizes may be symbolic here

}  // namespace

void perturb_color_(
    const at::Tensor& values, const at::Tensor& origin, const at::Tensor& colors, const at::Tensor& color, int64_t sign,
    double eps, double relative_step) {
  if (is_wrapper_subclass(values)) {
    return perturb_color_composite(values, origin, colors, color, sign, eps, relative_step);
  }
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fastgrad::perturb_color_", "").typed<decltype(perturb_color_)>();
  op.call(values, origin, colors, color, sign, eps, relative_step);
}

TORCH_LIBRARY_IMPL(fastgrad, CPU, library) { library.impl("perturb_color_", &perturb_color_cpu); }
TORCH_LIBRARY_IMPL(fastgrad, Meta, library) { library.impl("perturb_color_", &perturb_color_meta); }
TORCH_LIBRARY_IMPL(fastgrad, CompositeExplicitAutograd, library) {
  library.impl("perturb_color_", &perturb_color_composite);
}

// torch's own fallback for lazily conjugated or negated tensors corrupts its stack where an operator
// mutates one and returns nothing.
TORCH_LIBRARY_IMPL(fastgrad, Conjugate, library) { library.impl("perturb_color_", &perturb_color_composite); }
TORCH_LIBRARY_IMPL(fastgrad, Negative, library) { library.impl("perturb_color_", &perturb_color_composite); }

}  // namespace fastgrad
