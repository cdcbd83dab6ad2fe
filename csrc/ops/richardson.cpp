// CPU and plain ATen kernels of fastgrad::richardson_.
#include "richardson.h"

#include "../kernels/richardson.h"
#include "common.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/where.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

namespace fastgrad {

void check_richardson(
    const at::Tensor& derivative, const at::Tensor& noise, const at::Tensor& base, const at::Tensor& plus,
    const at::Tensor& minus, const at::Tensor& half_plus, const at::Tensor& half_minus) {
  const auto check = [&](const char* name, const at::Tensor& tensor) {
    check_float64("richardson_", name, tensor, 1);
    TORCH_CHECK(
        tensor.is_contiguous() && tensor.numel() == derivative.numel(), "richardson_: ", name,
        " must be contiguous with as many elements as derivative, ", derivative.numel(), ", got ", tensor.numel());
  };
  const auto check_read = [&](const char* name, const at::Tensor& tensor) {
    check(name, tensor);
    check_apart("richardson_", "derivative", derivative, name, tensor);
    check_apart("richardson_", "noise", noise, name, tensor);
  };
  check("derivative", derivative);
  check("noise", noise);
  check_apart("richardson_", "derivative", derivative, "noise", noise);
  check_read("base", base);
  check_read("plus", plus);
  check_read("minus", minus);
  check_read("half_plus", half_plus);
  check_read("half_minus", half_minus);
}

namespace {

FASTGRAD_AVX2_TOO void extrapolate(
    double* derivative, double* noise, const double* base, const double* plus, const double* minus,
    const double* half_plus, const double* half_minus, double eps, double ulp, int64_t count) {
#pragma omp simd  // too many pointers for the compiler to test whether they share memory
  for (int64_t i = 0; i < count; ++i) {
    const FourValues f{plus[i], minus[i], half_plus[i], half_minus[i]};
    derivative[i] = richardson(f, eps);
    noise[i] = louder(difference_noise(f, base[i], eps, ulp), noise[i]);
  }
}

void richardson_cpu(
    const at::Tensor& derivative, const at::Tensor& noise, const at::Tensor& base, const at::Tensor& plus,
    const at::Tensor& minus, const at::Tensor& half_plus, const at::Tensor& half_minus, double eps, double ulp) {
  check_richardson(derivative, noise, base, plus, minus, half_plus, half_minus);
  auto* out = derivative.mutable_data_ptr<double>();
  auto* worst = noise.mutable_data_ptr<double>();
  const double* y = base.const_data_ptr<double>();
  const double* p = plus.const_data_ptr<double>();
  const double* m = minus.const_data_ptr<double>();
  const double* hp = half_plus.const_data_ptr<double>();
  const double* hm = half_minus.const_data_ptr<double>();
  at::parallel_for(0, derivative.numel(), grain_size, [&](int64_t begin, int64_t end) {
    extrapolate(
        out + begin, worst + begin, y + begin, p + begin, m + begin, hp + begin, hm + begin, eps, ulp, end - begin);
  });
}

void richardson_composite(
    const at::Tensor& derivative, const at::Tensor& noise, const at::Tensor& base, const at::Tensor& plus,
    const at::Tensor& minus, const at::Tensor& half_plus, const at::Tensor& half_minus, double eps, double ulp) {
  check_richardson(derivative, noise, base, plus, minus, half_plus, half_minus);
  const at::Tensor whole = plus - minus;
  const at::Tensor half = half_plus - half_minus;
  derivative.copy_((8.0 * half - whole) / (6.0 * eps));
  const at::Tensor rounding = ulp * at::abs(base);
  const at::Tensor kink = at::abs((plus + minus - 2.0 * base) - 4.0 * (half_plus + half_minus - 2.0 * base));
  at::Tensor found = at::maximum(at::abs(2.0 * half - whole), 2.0 * rounding);
  found = at::where((kink > 64.0 * rounding).logical_and(kink > found), kink, found) / (2.0 * eps);
  noise.copy_(at::maximum(noise, found));
}

void richardson_meta(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const at::Tensor&, double, double) {}  // no checks: sizes may be symbolic

}  // namespace

void richardson_(
    const at::Tensor& derivative, const at::Tensor& noise, const at::Tensor& base, const at::Tensor& plus,
    const at::Tensor& minus, const at::Tensor& half_plus, const at::Tensor& half_minus, double eps, double ulp) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fastgrad::richardson_", "").typed<decltype(richardson_)>();
  op.call(derivative, noise, base, plus, minus, half_plus, half_minus, eps, ulp);
}

TORCH_LIBRARY_IMPL(fastgrad, CPU, library) { library.impl("richardson_", &richardson_cpu); }
TORCH_LIBRARY_IMPL(fastgrad, Meta, library) { library.impl("richardson_", &richardson_meta); }
FASTGRAD_COMPOSITE("richardson_", &richardson_composite)

}  // namespace fastgrad
