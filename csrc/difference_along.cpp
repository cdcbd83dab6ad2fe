// The derivative of func along one random direction, from two or four evaluations.
#include "loops.h"

#include "kernels/richardson.h"
#include "ops/common.h"
#include "ops/richardson.h"
#include "rows.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/sub.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>

namespace py = pybind11;

namespace fastgrad {
namespace {

constexpr size_t points_of_richardson = 4;

// What an output's values at x + step u and x - step u tell, and what they are compared with.
struct TwoPoints {
  at::Tensor derivative, noise, base, plus, minus;  // float64, shape (coordinates of the output,)
  double step;
  double ulp;    // the relative spacing of the output's dtype
  double curve;  // relative to the derivative: one-sided derivatives of a smooth function are no further off
};

// derivative = (plus - minus) / (2 step); noise becomes how far the one-sided derivatives are off that, at least,
// where this is more than curvature and rounding explain: at an extremum a smooth function bends though its derivative
// vanishes, so the output's own derivative counts together with the root mean square. A NaN stays one.
void two_points(const TwoPoints& at) {
  const int64_t count = at.derivative.numel();
  const double half = 1 / (2 * at.step);
  const auto plain = [](const at::Tensor& vector) { return is_small_and_plain(vector); };
  if (plain(at.derivative) && plain(at.noise) && plain(at.base) && plain(at.plus) && plain(at.minus)) {
    double* const d = at.derivative.mutable_data_ptr<double>();
    double* const noise = at.noise.mutable_data_ptr<double>();
    const double* const y = at.base.const_data_ptr<double>();
    const double* const p = at.plus.const_data_ptr<double>();
    const double* const m = at.minus.const_data_ptr<double>();
    double squares = 0;
    for (int64_t i = 0; i < count; ++i) {
      d[i] = (p[i] - m[i]) * half;
      squares += d[i] * d[i];
    }
    const double usual = std::sqrt(squares / static_cast<double>(std::max<int64_t>(1, count)));
    for (int64_t i = 0; i < count; ++i) {
      const double bend = std::fabs(p[i] + m[i] - 2 * y[i]) * half;
      const double smooth = at.curve * (std::fabs(d[i]) + usual) + 32 * at.ulp / at.step * std::fabs(y[i]);
      if (!(bend <= smooth)) {
        noise[i] = louder(bend, noise[i]);
      }
    }
    return;
  }
  at.derivative.copy_(at.plus).sub_(at.minus).mul_(half);
  const at::Tensor bend = at.plus.add_(at.minus).sub_(at.base, 2).abs_().mul_(half);
  const double root = std::sqrt(static_cast<double>(std::max<int64_t>(1, count)));
  const at::Tensor usual = at::linalg_vector_norm(at.derivative).div_(root);
  if (at.derivative.is_cpu() && bend.max().item<double>() <= at.curve * usual.item<double>()) {
    return;  // nothing bends that much anywhere; a device would have to be waited for
  }
  at.minus.copy_(at.derivative).abs_().add_(usual).mul_(at.curve).add_(at.base.abs(), 32 * at.ulp / at.step);
  bend.masked_fill_(bend <= at.minus, 0.0);
  at.noise.copy_(at::maximum(at.noise, bend));
}

}  // namespace

std::optional<std::tuple<int64_t, int64_t, py::object>> Evaluator::difference_along(
    const RandomDirection& along, const std::optional<at::Tensor>& fixed, const Derivative& into,
    const std::vector<at::Tensor>& values, const std::vector<OutputSpec>& outputs, const std::vector<double>& ulps) {
  TORCH_CHECK(
      values.size() == 2 || values.size() == points_of_richardson, "difference_along: values must be two or four, got ",
      values.size());
  TORCH_CHECK(
      ulps.size() == outputs.size(), "difference_along: ulps must be one for each of ", outputs.size(),
      " outputs, got ", ulps.size());
  int64_t m = 0;
  for (const OutputSpec& output : outputs) {
    m += coordinate_count(output.like);
  }
  const auto check = [&](const char* name, const at::Tensor& tensor) {
    check_contiguous_float64("difference_along", name, tensor);
    TORCH_CHECK(tensor.numel() == m, "difference_along: ", name, " must have ", m, " elements, got ", tensor.numel());
  };
  const auto check_all = [&] {
    check("derivative", into.derivative);
    check("noise", into.noise);
    check("base", into.base);
    for (const at::Tensor& row : values) {
      check("values", row);
    }
  };
  check_all();
  if (fixed) {
    TORCH_CHECK(
        fixed->layout() == at::kStrided && fixed->scalar_type() == at::kBool &&
            fixed->sizes() == along.direction.sizes() && fixed->device() == along.direction.device(),
        "difference_along: fixed must be a bool tensor like the direction, got ", fixed->scalar_type(), " of shape ",
        fixed->sizes(), " on ", fixed->device());
    check_storage("difference_along", "fixed", *fixed);
  }
  {
    const BelowAutograd guard;
    realize(along.displacement, along.direction, along.seed, along.stream, along.step, along.relative);
    if (fixed) {
      along.displacement.masked_fill_(*fixed, 0.0);
      along.direction.masked_fill_(*fixed, 0.0);
    }
  }
  static const std::vector<double> scales{1.0, -1.0, 0.5, -0.5};
  const std::vector<double> used(scales.begin(), scales.begin() + static_cast<std::ptrdiff_t>(values.size()));
  auto changed = values_along(along.displacement, used, values, outputs, /*record_graph=*/true);
  if (changed) {
    return changed;
  }
  check_all();  // func has run
  const BelowAutograd guard;
  int64_t offset = 0;
  for (size_t o = 0; o < outputs.size(); ++o) {
    const int64_t size = coordinate_count(outputs[o].like);
    const auto own = [&](const at::Tensor& vector) { return size == m ? vector : vector.narrow(0, offset, size); };
    if (values.size() == points_of_richardson) {
      richardson_(
          own(into.derivative), own(into.noise), own(into.base), own(values[0]), own(values[1]), own(values[2]),
          own(values[3]), along.step, ulps[o]);
    } else {
      two_points(
          {own(into.derivative), own(into.noise), own(into.base), own(values[0]), own(values[1]), along.step, ulps[o],
           into.curve});
    }
    offset += size;
  }
  return std::nullopt;
}

}  // namespace fastgrad
