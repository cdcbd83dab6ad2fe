// CPU and plain ATen kernels of fastgrad::perturb_coordinate_.
#include "perturb_coordinate.h"

#include "../kernels/difference.h"
#include "common.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/real.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

namespace fastgrad {

void check_perturb_coordinate(
    const at::Tensor& x, const at::Tensor& origin, int64_t coordinate, int64_t sign, std::optional<int64_t> restored) {
  check_origin("perturb_coordinate_", x, origin);
  TORCH_CHECK(
      coordinate >= 0 && coordinate < coordinate_count(x), "perturb_coordinate_: coordinate must be in [0, ",
      coordinate_count(x), "), got ", coordinate);
  TORCH_CHECK(sign >= -1 && sign <= 1, "perturb_coordinate_: sign must be -1, 0 or 1, got ", sign);
  TORCH_CHECK(
      !restored || (*restored >= 0 && *restored < coordinate_count(x) && *restored != coordinate),
      "perturb_coordinate_: restored must be another coordinate in [0, ", coordinate_count(x), "), got ",
      restored.value_or(0));
}

namespace {

void perturb_coordinate_cpu(
    const at::Tensor& x, const at::Tensor& origin, int64_t coordinate, int64_t sign, double eps, double relative_step,
    std::optional<int64_t> restored) {
  check_perturb_coordinate(x, origin, coordinate, sign, restored);
  FASTGRAD_DISPATCH_REAL(x.scalar_type(), "perturb_coordinate_", [&] {
    auto* const out = static_cast<real_t*>(x.mutable_data_ptr());
    const auto* const at_x = static_cast<const real_t*>(origin.const_data_ptr());
    if (restored) {
      out[coordinate_offset(x, *restored)] = at_x[*restored];
    }
    out[coordinate_offset(x, coordinate)] =
        moved_coordinate(at_x[coordinate], static_cast<int>(sign), eps, relative_step);
  });
}

// The entry of `tensor` that holds a real coordinate, as a zero-dimensional view.
at::Tensor coordinate_view(const at::Tensor& tensor, int64_t coordinate) {
  at::Tensor view = tensor;
  if (tensor.is_complex()) {
    view = coordinate % 2 == 0 ? at::real(tensor) : at::imag(tensor);  // also where it is lazily conjugated
    coordinate /= 2;
  }
  while (view.dim() > 0) {
    const int64_t size = view.size(-1);
    view = view.select(-1, coordinate % size);
    coordinate /= size;
  }
  return view;
}

void perturb_coordinate_composite(
    const at::Tensor& x, const at::Tensor& origin, int64_t coordinate, int64_t sign, double eps, double relative_step,
    std::optional<int64_t> restored) {
  check_perturb_coordinate(x, origin, coordinate, sign, restored);
  if (restored) {
    coordinate_view(x, *restored).copy_(coordinate_view(origin, *restored));
  }
  at::Tensor target = coordinate_view(x, coordinate);
  const at::Tensor value = coordinate_view(origin, coordinate);
  if (sign == 0) {
    target.copy_(value);
    return;
  }
  const at::Tensor step = coordinate_step(value, eps, relative_step);
  target.copy_(value + sign * step);
}

void perturb_coordinate_meta(
    const at::Tensor&, const at::Tensor&, int64_t, int64_t, double, double, std::optional<int64_t>) {
}  // no checks: sizes may be symbolic

}  // namespace

void perturb_coordinate_(
    const at::Tensor& x, const at::Tensor& origin, int64_t coordinate, int64_t sign, double eps, double relative_step,
    std::optional<int64_t> restored) {
  if (is_wrapper_subclass(x)) {
    return perturb_coordinate_composite(x, origin, coordinate, sign, eps, relative_step, restored);
  }
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fastgrad::perturb_coordinate_", "")
                             .typed<decltype(perturb_coordinate_)>();
  op.call(x, origin, coordinate, sign, eps, relative_step, restored);
}

TORCH_LIBRARY_IMPL(fastgrad, CPU, library) { library.impl("perturb_coordinate_", &perturb_coordinate_cpu); }
TORCH_LIBRARY_IMPL(fastgrad, Meta, library) { library.impl("perturb_coordinate_", &perturb_coordinate_meta); }
FASTGRAD_COMPOSITE("perturb_coordinate_", &perturb_coordinate_composite)

}  // namespace fastgrad
