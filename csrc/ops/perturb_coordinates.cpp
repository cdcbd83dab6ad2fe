// CPU and plain ATen kernels of fastgrad::perturb_coordinates_.
#include "perturb_coordinates.h"

#include "../kernels/difference.h"
#include "../kernels/sparse.h"
#include "common.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/index_copy.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

namespace fastgrad {

void check_perturb_coordinates(
    const at::Tensor& values, const at::Tensor& origin, const at::Tensor& coordinates, int64_t sign,
    const std::optional<at::Tensor>& restored) {
  check_origin("perturb_coordinates_", values, origin, "values");
  check_indices("perturb_coordinates_", "coordinates", coordinates);
  TORCH_CHECK(sign >= -1 && sign <= 1, "perturb_coordinates_: sign must be -1, 0 or 1, got ", sign);
  check_apart("perturb_coordinates_", "values", values, "coordinates", coordinates);
  if (restored) {
    check_indices("perturb_coordinates_", "restored", *restored);
    check_apart("perturb_coordinates_", "values", values, "restored", *restored);
  }
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
    double relative_step, const std::optional<at::Tensor>& restored) {
  check_perturb_coordinates(values, origin, coordinates, sign, restored);
  const bool contiguous = values.is_contiguous();
  const int64_t* chosen = coordinates.const_data_ptr<int64_t>();
  const int64_t* others = restored ? restored->const_data_ptr<int64_t>() : nullptr;
  const int64_t size = coordinate_count(values);
  FASTGRAD_DISPATCH_REAL(values.scalar_type(), "perturb_coordinates_", [&] {
    const auto* at_x = static_cast<const real_t*>(origin.const_data_ptr());
    auto* out = static_cast<real_t*>(values.mutable_data_ptr());
    for (int64_t k = 0; k < (restored ? restored->numel() : 0); ++k) {
      if (is_within(others[k], size)) {
        out[coordinate_offset(values, others[k])] = at_x[others[k]];
      }
    }
    at::parallel_for(0, coordinates.numel(), grain_size, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        const int64_t c = chosen[k];
        out[contiguous ? c : coordinate_offset(values, c)] =
            moved_coordinate(at_x[c], static_cast<int>(sign), eps, relative_step);
      }
    });
  });
}

// `all` with the origin's values at the coordinates `restored`. Those outside select one more
// element, which is dropped: removing them would wait for the device.
at::Tensor with_restored(const at::Tensor& all, const at::Tensor& at_x, const at::Tensor& restored) {
  const int64_t size = all.numel();
  const at::Tensor own = restored.to(all.device());
  const at::Tensor index = at::where((own >= 0).logical_and(own < size), own, size);
  const at::Tensor marked = at::zeros({size + 1}, all.options().dtype(at::kBool)).index_fill_(0, index, true);
  return at::where(marked.narrow(0, 0, size), at_x, all);
}

void perturb_coordinates_composite(
    const at::Tensor& values, const at::Tensor& origin, const at::Tensor& coordinates, int64_t sign, double eps,
    double relative_step, const std::optional<at::Tensor>& restored) {
  check_perturb_coordinates(values, origin, coordinates, sign, restored);
  const at::Tensor chosen = coordinates.to(values.device());
  const at::Tensor at_x = real_coordinates(origin);
  at::Tensor moved = at::index_select(at_x, 0, chosen);
  if (sign != 0) {
    moved = moved + sign * coordinate_step(moved, eps, relative_step);
  }
  const at::Tensor now = real_coordinates(values);
  const at::Tensor all = at::index_copy(restored ? with_restored(now, at_x, *restored) : now, 0, chosen, moved);
  values.copy_(
      values.is_complex() ? at::view_as_complex(all.reshape({-1, 2})).reshape(values.sizes())
                          : all.reshape(values.sizes()));
}

void perturb_coordinates_meta(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, double, double,
    const std::optional<at::Tensor>&) {}  // no checks: sizes may be symbolic

}  // namespace

void perturb_coordinates_(
    const at::Tensor& values, const at::Tensor& origin, const at::Tensor& coordinates, int64_t sign, double eps,
    double relative_step, const std::optional<at::Tensor>& restored) {
  if (is_wrapper_subclass(values)) {
    return perturb_coordinates_composite(values, origin, coordinates, sign, eps, relative_step, restored);
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fastgrad::perturb_coordinates_", "")
                             .typed<decltype(perturb_coordinates_)>();
  op.call(values, origin, coordinates, sign, eps, relative_step, restored);
}

TORCH_LIBRARY_IMPL(fastgrad, CPU, library) { library.impl("perturb_coordinates_", &perturb_coordinates_cpu); }
TORCH_LIBRARY_IMPL(fastgrad, Meta, library) { library.impl("perturb_coordinates_", &perturb_coordinates_meta); }
FASTGRAD_COMPOSITE("perturb_coordinates_", &perturb_coordinates_composite)

}  // namespace fastgrad
