// CPU and plain ATen kernels of fastgrad::central_difference_.
#include "central_difference.h"

#include "../kernels/difference.h"
#include "common.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

namespace fastgrad {

void check_central_difference(
    const at::Tensor& column, const at::Tensor& minus, const at::Tensor& origin, int64_t coordinate) {
  check_float64("central_difference_", "column", column, 1);
  check_differentiable("central_difference_", "minus", minus);
  check_differentiable("central_difference_", "origin", origin);
  TORCH_CHECK(
      column.numel() == coordinate_count(minus), "central_difference_: column must have ", coordinate_count(minus),
      " elements, one for each real coordinate of minus, got ", column.numel());
  TORCH_CHECK(
      coordinate >= 0 && coordinate < coordinate_count(origin), "central_difference_: coordinate must be in [0, ",
      coordinate_count(origin), "), got ", coordinate);
  check_written("central_difference_", "column", column);
  check_same_or_apart("central_difference_", "column", column, "minus", minus);
  check_apart("central_difference_", "column", column, "origin", origin);
}

namespace {

void central_difference_cpu(
    const at::Tensor& column, const at::Tensor& minus, const at::Tensor& origin, int64_t coordinate, double eps,
    double relative_step) {
  check_central_difference(column, minus, origin, coordinate);
  double width = 0;
  FASTGRAD_DISPATCH_REAL(origin.scalar_type(), "central_difference_", [&] {
    const real_t value = static_cast<const real_t*>(origin.const_data_ptr())[coordinate];
    width = realized_width(value, coordinate_step(value, eps, relative_step));
  });
  const at::Tensor source = minus.contiguous();
  auto* out = column.mutable_data_ptr<double>();
  const int64_t stride = column.stride(0);
  FASTGRAD_DISPATCH_REAL(minus.scalar_type(), "central_difference_", [&] {
    const auto* values = static_cast<const real_t*>(source.const_data_ptr());
    at::parallel_for(0, column.numel(), grain_size, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        out[i * stride] = difference_quotient(out[i * stride], values[i], width);
      }
    });
  });
}

void central_difference_composite(
    const at::Tensor& column, const at::Tensor& minus, const at::Tensor& origin, int64_t coordinate, double eps,
    double relative_step) {
  check_central_difference(column, minus, origin, coordinate);
  const at::Tensor value = real_coordinates(origin).select(0, coordinate);
  const at::Tensor step = coordinate_step(value, eps, relative_step);
  at::Tensor width = (value + step).to(at::kDouble) - (value - step).to(at::kDouble);
  width = at::where(at::isfinite(width), width, 2 * step.to(at::kDouble));
  column.sub_(real_coordinates(minus).to(at::kDouble)).div_(width);
}

void central_difference_meta(const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, double, double) {
}  // no checks: sizes may be symbolic

}  // namespace

void central_difference_(
    const at::Tensor& column, const at::Tensor& minus, const at::Tensor& origin, int64_t coordinate, double eps,
    double relative_step) {
  if (is_wrapper_subclass(minus) || is_wrapper_subclass(origin)) {
    return central_difference_composite(column, minus, origin, coordinate, eps, relative_step);
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fastgrad::central_difference_", "")
                             .typed<decltype(central_difference_)>();
  op.call(column, minus, origin, coordinate, eps, relative_step);
}

TORCH_LIBRARY_IMPL(fastgrad, CPU, library) { library.impl("central_difference_", &central_difference_cpu); }
TORCH_LIBRARY_IMPL(fastgrad, Meta, library) { library.impl("central_difference_", &central_difference_meta); }
FASTGRAD_COMPOSITE("central_difference_", &central_difference_composite)

}  // namespace fastgrad
