// CPU launcher and plain ATen kernel of fastgrad::perturb_along_.
#include "perturb_along.h"

#include "../kernels/difference.h"
#include "../kernels/direction.h"
#include "common.h"
#include "direction.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

namespace fastgrad {
namespace {

void check_arguments(const at::Tensor& x, const at::Tensor& origin, int64_t sign) {
  check_origin("perturb_along_", x, origin);
  TORCH_CHECK(sign >= -1 && sign <= 1, "perturb_along_: sign must be -1, 0 or 1, got ", sign);
}

void perturb_along_cpu(
    const at::Tensor& x, const at::Tensor& origin, int64_t seed, int64_t stream, int64_t first, int64_t sign,
    double eps, double relative_step) {
  check_arguments(x, origin, sign);
  const int64_t width = coordinates_per_element(x);
  FASTGRAD_DISPATCH_REAL(x.scalar_type(), "perturb_along_", [&] {
    const auto* values = static_cast<const real_t*>(origin.const_data_ptr());
    auto* out = static_cast<real_t*>(x.mutable_data_ptr());
    at::parallel_for(0, x.numel(), grain_size, [&](int64_t begin, int64_t end) {
      for (int64_t element = begin; element < end; ++element) {
        const int64_t target = element_offset(x, element) * width;
        for (int64_t part = 0; part < width; ++part) {
          const int64_t coordinate = element * width + part;
          const real_t value = values[coordinate];
          const double step = directional_step(value, eps, relative_step);
          out[target + part] =
              sign == 0 ? value : perturbed(value, sign * step * direction_component(seed, stream, first + coordinate));
        }
      }
    });
  });
}

void perturb_along_composite(
    const at::Tensor& x, const at::Tensor& origin, int64_t seed, int64_t stream, int64_t first, int64_t sign,
    double eps, double relative_step) {
  check_arguments(x, origin, sign);
  if (sign == 0) {
    x.copy_(origin);
    return;
  }
  const at::Tensor values = real_coordinates(origin).to(at::kDouble);
  const at::Tensor u = at::empty({values.numel()}, values.options());
  direction_(u, seed, stream, first, /*halved=*/false);
  at::Tensor moved = values + sign * (at::abs(values) * relative_step).clamp_min(eps) * u;
  moved = moved.to(c10::toRealValueType(x.scalar_type()));
  x.copy_(x.is_complex() ? at::view_as_complex(moved.reshape({-1, 2})).reshape(x.sizes()) : moved.reshape(x.sizes()));
}

void perturb_along_meta(const at::Tensor&, const at::Tensor&, int64_t, int64_t, int64_t, int64_t, double, double) {
}  // sizes may be symbolic here

}  // namespace

void perturb_along_(
    const at::Tensor& x, const at::Tensor& origin, int64_t seed, int64_t stream, int64_t first, int64_t sign,
    double eps, double relative_step) {
  if (is_wrapper_subclass(x)) {
    return perturb_along_composite(x, origin, seed, stream, first, sign, eps, relative_step);
  }
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fastgrad::perturb_along_", "").typed<decltype(perturb_along_)>();
  op.call(x, origin, seed, stream, first, sign, eps, relative_step);
}

TORCH_LIBRARY_IMPL(fastgrad, CPU, library) { library.impl("perturb_along_", &perturb_along_cpu); }
TORCH_LIBRARY_IMPL(fastgrad, Meta, library) { library.impl("perturb_along_", &perturb_along_meta); }
TORCH_LIBRARY_IMPL(fastgrad, CompositeExplicitAutograd, library) {
  library.impl("perturb_along_", &perturb_along_composite);
}

// torch's own fallback for lazily conjugated or negated tensors corrupts its stack where an operator
// mutates one and returns nothing.
TORCH_LIBRARY_IMPL(fastgrad, Conjugate, library) { library.impl("perturb_along_", &perturb_along_composite); }
TORCH_LIBRARY_IMPL(fastgrad, Negative, library) { library.impl("perturb_along_", &perturb_along_composite); }

}  // namespace fastgrad
