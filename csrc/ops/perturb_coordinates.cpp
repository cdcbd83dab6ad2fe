// CPU launcher and plain ATen kernel of fastgrad::perturb_coordinates_.
#include "perturb_coordinates.h"

#include "../kernels/difference.h"
#include "common.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/index_copy.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

namespace fastgrad {

void check_perturb_coordinates(
    const at::Tensor& values, const at::Tensor& origin, const at::Tensor& coordinates, int64_t sign) {
  check_origin("perturb_coordinates_", values, origin, "values");
  check_indices("perturb_coordinates_", "coordinates", coordinates);
  TORCH_CHECK(sign >= -1 && sign <= 1, "perturb_coordinates_: sign must be -1, 0 or 1, got ", sign);
  check_apart("perturb_coordinates_", "values", values, "coordinates", coordinates);
  const int64_t count = coordinates.numel();
  if (count == 0 || !coordinates.is_cpu() || is_wrapper_subclass(coordinates)) {
    return;  // reading them would wait for the device
  }
  const int64_t* chosen = coordinates.const_data_ptr<int64_t>();
  bool increasing = true;
  for (int64_t k = 1; k < count; ++k) {
    increasing &= chosen[k - 1] < chosen[k];
  }
  TORCH_CHECK(increasing, "perturb_coordinates_: coordinates must be strictly increasing");
  TORCH_CHECK(
      chosen[0] >= 0 && chosen[count - 1] < coordinate_count(values),
      "perturb_coordinates_: coordinates must be in [0, ", coordinate_count(values), "), got ", chosen[0], " to ",
      chosen[count - 1]);
}

namespace {

void perturb_coordinates_cpu(
    const at::Tensor& values, const at::Tensor& origin, const at::Tensor& coordinates, int64_t sign, double eps,
    double relative_step) {
  check_perturb_coordinates(values, origin, coordinates, sign);
  const int64_t width = coordinates_per_element(values);
  const bool contiguous = values.is_contiguous();
  const int64_t* chosen = coordinates.const_data_ptr<int64_t>();
  FASTGRAD_DISPATCH_REAL(values.scalar_type(), "perturb_coordinates_", [&] {
    const auto* at_x = static_cast<const real_t*>(origin.const_data_ptr());
    auto* out = static_cast<real_t*>(values.mutable_data_ptr());
    at::parallel_for(0, coordinates.numel(), grain_size, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        const int64_t c = chosen[k];
        const int64_t target = contiguous ? c : element_offset(values, c / width) * width + c % width;
        out[target] = moved_coordinate(at_x[c], static_cast<int>(sign), eps, relative_step);
      }
    });
  });
}

void perturb_coordinates_composite(
    const at::Tensor& values, const at::Tensor& origin, const at::Tensor& coordinates, int64_t sign, double eps,
    double relative_step) {
  check_perturb_coordinates(values, origin, coordinates, sign);
  const at::Tensor chosen = coordinates.to(values.device());
  at::Tensor moved = at::index_select(real_coordinates(origin), 0, chosen);
  if (sign != 0) {
    moved = moved + sign * coordinate_step(moved, eps, relative_step);
  }
  const at::Tensor all = at::index_copy(real_coordinates(values), 0, chosen, moved);
  values.copy_(
      values.is_complex() ? at::view_as_complex(all.reshape({-1, 2})).reshape(values.sizes())
                          : all.reshape(values.sizes()));
}

void perturb_coordinates_meta(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, double, double) {
}  // sizes may be symbolic here

}  // namespace

void perturb_coordinates_(
    const at::Tensor& values, const at::Tensor& origin, const at::Tensor& coordinates, int64_t sign, double eps,
    double relative_step) {
  if (is_wrapper_subclass(values)) {
    return perturb_coordinates_composite(values, origin, coordinates, sign, eps, relative_step);
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fastgrad::perturb_coordinates_", "")
                             .typed<decltype(perturb_coordinates_)>();
  op.call(values, origin, coordinates, sign, eps, relative_step);
}

TORCH_LIBRARY_IMPL(fastgrad, CPU, library) { library.impl("perturb_coordinates_", &perturb_coordinates_cpu); }
TORCH_LIBRARY_IMPL(fastgrad, Meta, library) { library.impl("perturb_coordinates_", &perturb_coordinates_meta); }
FASTGRAD_COMPOSITE("perturb_coordinates_", &perturb_coordinates_composite)

}  // namespace fastgrad
