// CPU and plain ATen kernels of fastgrad::unflatten_.
#include "unflatten.h"

#include "common.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/complex.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

namespace fastgrad {

void check_unflatten(const at::Tensor& tensor, const at::Tensor& coordinates) {
  check_differentiable("unflatten_", "tensor", tensor);
  check_float64("unflatten_", "coordinates", coordinates, 1);
  TORCH_CHECK(
      coordinates.numel() == coordinate_count(tensor), "unflatten_: coordinates must have ", coordinate_count(tensor),
      " elements, one for each real coordinate of tensor, got ", coordinates.numel());
  check_written("unflatten_", "tensor", tensor);
  check_same_or_apart("unflatten_", "tensor", tensor, "coordinates", coordinates);
}

namespace {

void unflatten_composite(const at::Tensor& tensor, const at::Tensor& coordinates) {
  check_unflatten(tensor, coordinates);
  if (!tensor.is_complex()) {
    tensor.copy_(coordinates.reshape(tensor.sizes()));
    return;
  }
  const at::Tensor parts = coordinates.reshape({-1, 2}).to(c10::toRealValueType(tensor.scalar_type()));
  // Not view_as_complex, which needs an even storage offset: that of the coordinates may be odd.
  tensor.copy_(at::complex(parts.select(-1, 0), parts.select(-1, 1)).reshape(tensor.sizes()));
}

void unflatten_cpu(const at::Tensor& tensor, const at::Tensor& coordinates) {
  check_unflatten(tensor, coordinates);
  if (!tensor.is_contiguous()) {
    return unflatten_composite(tensor, coordinates);  // ATen walks strides faster than element_offset
  }
  const double* values = coordinates.const_data_ptr<double>();
  const int64_t stride = coordinates.stride(0);
  FASTGRAD_DISPATCH_REAL(tensor.scalar_type(), "unflatten_", [&] {
    auto* out = static_cast<real_t*>(tensor.mutable_data_ptr());
    at::parallel_for(0, coordinates.numel(), grain_size, [=](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        out[c] = static_cast<real_t>(values[c * stride]);
      }
    });
  });
}

void unflatten_meta(const at::Tensor&, const at::Tensor&) {}  // no checks: sizes may be symbolic

}  // namespace

void unflatten_(const at::Tensor& tensor, const at::Tensor& coordinates) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fastgrad::unflatten_", "").typed<decltype(unflatten_)>();
  if (is_wrapper_subclass(tensor)) {
    return unflatten_composite(tensor, coordinates);
  }
  op.call(tensor, coordinates);
}

TORCH_LIBRARY_IMPL(fastgrad, CPU, library) { library.impl("unflatten_", &unflatten_cpu); }
TORCH_LIBRARY_IMPL(fastgrad, Meta, library) { library.impl("unflatten_", &unflatten_meta); }
FASTGRAD_COMPOSITE("unflatten_", &unflatten_composite)

}  // namespace fastgrad
