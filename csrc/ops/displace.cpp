// CPU and plain ATen kernels of fastgrad::displace_.
#include "displace.h"

#include "../kernels/difference.h"
#include "common.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

namespace fastgrad {

void check_displace(const at::Tensor& x, const at::Tensor& origin, const at::Tensor& displacement) {
  check_origin("displace_", x, origin);
  check_float64("displace_", "displacement", displacement, 1);
  TORCH_CHECK(
      displacement.numel() == coordinate_count(x), "displace_: displacement must have ", coordinate_count(x),
      " elements, one for each real coordinate of x, got ", displacement.numel());
  check_same_or_apart("displace_", "x", x, "displacement", displacement);
}

namespace {

template <typename T>
FASTGRAD_AVX2_TOO void add_scaled(T* x, const T* origin, const double* displacement, double scale, int64_t count) {
  for (int64_t c = 0; c < count; ++c) {
    x[c] = perturbed(origin[c], scale * displacement[c]);
  }
}

void displace_cpu(const at::Tensor& x, const at::Tensor& origin, const at::Tensor& displacement, double scale) {
  check_displace(x, origin, displacement);
  const int64_t width = coordinates_per_element(x);
  const double* steps = displacement.const_data_ptr<double>();
  const int64_t stride = displacement.stride(0);
  const bool contiguous = x.is_contiguous();
  FASTGRAD_DISPATCH_REAL(x.scalar_type(), "displace_", [&] {
    const auto* values = static_cast<const real_t*>(origin.const_data_ptr());
    auto* out = static_cast<real_t*>(x.mutable_data_ptr());
    at::parallel_for(0, coordinate_count(x), grain_size, [&](int64_t begin, int64_t end) {
      if (contiguous && stride == 1 && scale != 0) {
        return add_scaled(out + begin, values + begin, steps + begin, scale, end - begin);
      }
      for (int64_t c = begin; c < end; ++c) {
        const int64_t target = contiguous ? c : element_offset(x, c / width) * width + c % width;
        out[target] = displaced(values[c], steps[c * stride], scale);
      }
    });
  });
}

void displace_composite(const at::Tensor& x, const at::Tensor& origin, const at::Tensor& displacement, double scale) {
  check_displace(x, origin, displacement);
  if (scale == 0) {
    x.copy_(origin);
    return;
  }
  const at::Tensor values = real_coordinates(origin);
  const at::Tensor moved = (values.to(at::kDouble) + scale * displacement).to(values.scalar_type());
  x.copy_(x.is_complex() ? at::view_as_complex(moved.reshape({-1, 2})).reshape(x.sizes()) : moved.reshape(x.sizes()));
}

void displace_meta(const at::Tensor&, const at::Tensor&, const at::Tensor&, double) {
}  // no checks: sizes may be symbolic

}  // namespace

void displace_(const at::Tensor& x, const at::Tensor& origin, const at::Tensor& displacement, double scale) {
  if (is_wrapper_subclass(x)) {
    return displace_composite(x, origin, displacement, scale);
  }
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fastgrad::displace_", "").typed<decltype(displace_)>();
  op.call(x, origin, displacement, scale);
}

TORCH_LIBRARY_IMPL(fastgrad, CPU, library) { library.impl("displace_", &displace_cpu); }
TORCH_LIBRARY_IMPL(fastgrad, Meta, library) { library.impl("displace_", &displace_meta); }
FASTGRAD_COMPOSITE("displace_", &displace_composite)

}  // namespace fastgrad
