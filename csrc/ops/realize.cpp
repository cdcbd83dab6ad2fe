// CPU and plain ATen kernels of fastgrad::realize_.
#include "realize.h"

#include "../kernels/difference.h"
#include "common.h"
#include "direction.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <algorithm>

namespace fastgrad {

void check_realize(
    const at::Tensor& displacement, const at::Tensor& realized, const at::Tensor& origin, int64_t first) {
  check_direction(displacement, first);
  check_differentiable("realize_", "origin", origin);
  TORCH_CHECK(origin.is_contiguous(), "realize_: origin must be contiguous, got strides ", origin.strides());
  for (const auto& [name, tensor] : {std::pair("displacement", displacement), std::pair("realized", realized)}) {
    check_float64("realize_", name, tensor, 1);
    TORCH_CHECK(
        tensor.is_contiguous() && tensor.numel() == coordinate_count(origin), "realize_: ", name,
        " must be contiguous with ", coordinate_count(origin),
        " elements, one for each real coordinate of origin, got ", tensor.numel());
    check_apart("realize_", name, tensor, "origin", origin);
  }
  check_apart("realize_", "displacement", displacement, "realized", realized);
}

namespace {

constexpr int64_t columns_at_once = 2048;  // so few that the direction stays in the cache until it is used

// displacement: the direction on entry.
template <typename T>
FASTGRAD_AVX2_TOO void realize(
    double* displacement, double* realized, const T* origin, double eps, double relative_step, int64_t count) {
  for (int64_t j = 0; j < count; ++j) {
    const double step = displacement[j] * directional_step(origin[j], eps, relative_step);
    displacement[j] = step;
    realized[j] = realized_component(origin[j], step, eps);
  }
}

void realize_cpu(
    const at::Tensor& displacement, const at::Tensor& realized, const at::Tensor& origin, int64_t seed, int64_t stream,
    int64_t first, double eps, double relative_step) {
  check_realize(displacement, realized, origin, first);
  auto* steps = displacement.mutable_data_ptr<double>();
  auto* out = realized.mutable_data_ptr<double>();
  FASTGRAD_DISPATCH_REAL(origin.scalar_type(), "realize_", [&] {
    const auto* values = static_cast<const real_t*>(origin.const_data_ptr());
    at::parallel_for(0, displacement.numel(), grain_size, [&](int64_t begin, int64_t end) {
      for (int64_t j = begin; j < end; j += columns_at_once) {
        const int64_t count = std::min(columns_at_once, end - j);
        write_direction(steps + j, 1, count, seed, stream, first + j, /*halved=*/false);
        realize(steps + j, out + j, values + j, eps, relative_step, count);
      }
    });
  });
}

void realize_composite(
    const at::Tensor& displacement, const at::Tensor& realized, const at::Tensor& origin, int64_t seed, int64_t stream,
    int64_t first, double eps, double relative_step) {
  check_realize(displacement, realized, origin, first);
  const at::Tensor own = real_coordinates(origin);
  const at::Tensor values = own.to(at::kDouble);
  direction_(displacement, seed, stream, first, /*halved=*/false);
  const at::Tensor steps = (at::abs(values) * relative_step).clamp_min(eps);
  displacement.mul_(at::where(at::isfinite(steps), steps, eps));
  const auto width = [&](double scale) {
    const auto moved = [&](double sign) {
      return (values + sign * scale * displacement).to(own.scalar_type()).to(at::kDouble);
    };
    const at::Tensor difference = moved(1.0) - moved(-1.0);
    return at::where(at::isfinite(difference), difference, 2 * scale * displacement);
  };
  realized.copy_((8.0 * width(0.5) - width(1.0)) / (6.0 * eps));
}

void realize_meta(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, int64_t, int64_t, double, double) {
}  // no checks: sizes may be symbolic

}  // namespace

void realize_(
    const at::Tensor& displacement, const at::Tensor& realized, const at::Tensor& origin, int64_t seed, int64_t stream,
    int64_t first, double eps, double relative_step) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fastgrad::realize_", "").typed<decltype(realize_)>();
  op.call(displacement, realized, origin, seed, stream, first, eps, relative_step);
}

TORCH_LIBRARY_IMPL(fastgrad, CPU, library) { library.impl("realize_", &realize_cpu); }
TORCH_LIBRARY_IMPL(fastgrad, Meta, library) { library.impl("realize_", &realize_meta); }
FASTGRAD_COMPOSITE("realize_", &realize_composite)

}  // namespace fastgrad
