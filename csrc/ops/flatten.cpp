// CPU and plain ATen kernels of fastgrad::flatten_.
#include "flatten.h"

#include "common.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

namespace fastgrad {

void check_flatten(const at::Tensor& out, const at::Tensor& tensor) {
  check_float64("flatten_", "out", out, 1);
  check_differentiable("flatten_", "tensor", tensor);
  TORCH_CHECK(
      out.numel() == coordinate_count(tensor), "flatten_: out must have ", coordinate_count(tensor),
      " elements, one for each real coordinate of tensor, got ", out.numel());
  check_written("flatten_", "out", out);
  check_same_or_apart("flatten_", "out", out, "tensor", tensor);
}

namespace {

void flatten_cpu(const at::Tensor& out, const at::Tensor& tensor) {
  check_flatten(out, tensor);
  const at::Tensor source = tensor.contiguous();
  auto* values = out.mutable_data_ptr<double>();
  const int64_t stride = out.stride(0);
  FASTGRAD_DISPATCH_REAL(tensor.scalar_type(), "flatten_", [&] {
    const auto* coordinates = static_cast<const real_t*>(source.const_data_ptr());
    at::parallel_for(0, out.numel(), grain_size, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        values[c * stride] = static_cast<double>(coordinates[c]);
      }
    });
  });
}

void flatten_composite(const at::Tensor& out, const at::Tensor& tensor) {
  check_flatten(out, tensor);
  out.copy_(real_coordinates(tensor));
}

void flatten_meta(const at::Tensor&, const at::Tensor&) {}  // no checks: sizes may be symbolic

}  // namespace

void flatten_(const at::Tensor& out, const at::Tensor& tensor) {
  if (is_wrapper_subclass(tensor)) {
    return flatten_composite(out, tensor);
  }
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fastgrad::flatten_", "").typed<decltype(flatten_)>();
  op.call(out, tensor);
}

TORCH_LIBRARY_IMPL(fastgrad, CPU, library) { library.impl("flatten_", &flatten_cpu); }
TORCH_LIBRARY_IMPL(fastgrad, Meta, library) { library.impl("flatten_", &flatten_meta); }
FASTGRAD_COMPOSITE("flatten_", &flatten_composite)

}  // namespace fastgrad
