// Derivatives of func along random directions, from two or four evaluations each, and what they say of VJPs.
#include "loops.h"

#include "kernels/richardson.h"
#include "ops/common.h"
#include "ops/richardson.h"
#include "rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/zeros.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace py = pybind11;

namespace fastgrad {
namespace {

constexpr int64_t points_of_richardson = 4;

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

// The 2-norm of one vector, and the largest magnitude of others (a NaN is the largest), where they are small.
std::optional<std::pair<double, double>> sizes_of(const at::Tensor& noise, const at::Tensor& derivatives) {
  if (!is_small_and_plain(noise) || !is_small_and_plain(derivatives)) {
    return std::nullopt;
  }
  double squares = 0;
  const double* const loud = noise.const_data_ptr<double>();
  for (int64_t i = 0; i < noise.numel(); ++i) {
    squares += loud[i] * loud[i];
  }
  double largest = 0;
  const double* const values = derivatives.const_data_ptr<double>();
  for (int64_t i = 0; i < derivatives.numel(); ++i) {
    largest = louder(std::fabs(values[i]), largest);
  }
  return std::make_pair(std::sqrt(squares), largest);
}

}  // namespace

std::variant<Derivatives, Changed> Evaluator::differences_along(
    const RandomDirections& along, const at::Tensor& base, double curve, const std::optional<at::Tensor>& fixed,
    const std::vector<OutputSpec>& outputs, const std::vector<double>& ulps) {
  const auto count = static_cast<int64_t>(along.streams.size());
  TORCH_CHECK(
      along.points.size() == along.streams.size(), "differences_along: points must be one for each of ", count,
      " streams, got ", along.points.size());
  int64_t most = 0;
  for (const int64_t points : along.points) {
    TORCH_CHECK(
        points == 2 || points == points_of_richardson, "differences_along: points must be two or four, got ", points);
    most = std::max(most, points);
  }
  TORCH_CHECK(
      ulps.size() == outputs.size(), "differences_along: ulps must be one for each of ", outputs.size(),
      " outputs, got ", ulps.size());
  int64_t m = 0;
  for (const OutputSpec& output : outputs) {
    m += coordinate_count(output.like);
  }
  const auto check_base = [&] {
    check_contiguous_float64("differences_along", "base", base);
    TORCH_CHECK(base.numel() == m, "differences_along: base must have ", m, " elements, got ", base.numel());
  };
  check_base();
  if (fixed) {
    TORCH_CHECK(
        fixed->layout() == at::kStrided && fixed->scalar_type() == at::kBool && fixed->dim() == 1 &&
            fixed->size(0) == size_ && fixed->device() == base.device(),
        "differences_along: fixed must be a bool tensor of ", size_, " elements on ", base.device(), ", got ",
        fixed->scalar_type(), " of shape ", fixed->sizes(), " on ", fixed->device());
    check_storage("differences_along", "fixed", *fixed);
  }
  const auto options = base.options();
  const auto vector = [&](int64_t size) { return at::empty({size}, options); };
  Derivatives into;
  // Not one block: where vectors are large, blocks of several sizes leave holes in the heap. And before what stays:
  // memory above that goes back to the system when it is free, and what comes next is made anew, page by page.
  const at::Tensor displacement = vector(size_);
  std::vector<at::Tensor> memory;
  for (int64_t k = 0; k < most; ++k) {
    memory.push_back(vector(m));
  }
  into.directions = at::empty({count, size_}, options);
  into.derivatives = at::empty({count, m}, options);
  into.noise = at::zeros({m}, options);
  for (int64_t k = 0; k < count; ++k) {
    const auto points = static_cast<std::ptrdiff_t>(along.points[k]);
    const std::vector<at::Tensor> values(memory.begin(), memory.begin() + points);
    {
      const BelowAutograd guard;
      const at::Tensor direction = into.directions.select(0, k);
      realize(displacement, direction, along.seed, along.streams[k], along.step, along.relative);
      if (fixed) {
        displacement.masked_fill_(*fixed, 0.0);
        direction.masked_fill_(*fixed, 0.0);
      }
    }
    static const std::vector<double> scales{1.0, -1.0, 0.5, -0.5};
    const std::vector<double> used(scales.begin(), scales.begin() + points);
    if (auto changed = values_along(displacement, used, values, outputs, /*record_graph=*/true)) {
      return *std::move(changed);
    }
    check_base();  // func has run
    const BelowAutograd guard;
    const at::Tensor derivative = into.derivatives.select(0, k);
    int64_t offset = 0;
    for (size_t o = 0; o < outputs.size(); ++o) {
      const int64_t size = coordinate_count(outputs[o].like);
      const auto own = [&](const at::Tensor& whole) { return size == m ? whole : whole.narrow(0, offset, size); };
      if (points == points_of_richardson) {
        richardson_(
            own(derivative), own(into.noise), own(base), own(values[0]), own(values[1]), own(values[2]), own(values[3]),
            along.step, ulps[o]);
      } else {
        two_points(
            {own(derivative), own(into.noise), own(base), own(values[0]), own(values[1]), along.step, ulps[o], curve});
      }
      offset += size;
    }
  }
  into.sizes = sizes_of(into.noise, into.derivatives);
  return into;
}

std::vector<double> largest_residuals(
    const at::Tensor& cotangents, const at::Tensor& derivatives, const at::Tensor& gradients,
    const at::Tensor& directions) {
  const auto check = [](const char* name, const at::Tensor& matrix, int64_t rows, int64_t columns) {
    check_float64("largest_residuals", name, matrix, 2);
    TORCH_CHECK(
        matrix.is_contiguous() && matrix.size(0) == rows && matrix.size(1) == columns, "largest_residuals: ", name,
        " must be contiguous and have shape (", rows, ", ", columns, "), got ", matrix.sizes());
  };
  check_float64("largest_residuals", "cotangents", cotangents, 2);
  check_float64("largest_residuals", "directions", directions, 2);
  check("cotangents", cotangents, cotangents.size(0), cotangents.size(1));
  check("directions", directions, directions.size(0), directions.size(1));
  check("derivatives", derivatives, directions.size(0), cotangents.size(1));
  check("gradients", gradients, cotangents.size(0), directions.size(1));
  const auto on_cpu = [](const at::Tensor& matrix) { return matrix.is_cpu(); };
  std::vector<double> largest(cotangents.size(0), 0.0);
  if (!on_cpu(cotangents) || !on_cpu(derivatives) || !on_cpu(gradients) || !on_cpu(directions)) {
    if (largest.empty() || directions.size(0) == 0) {
      return largest;
    }
    const at::Tensor values = at::matmul(cotangents, derivatives.t()) - at::matmul(gradients, directions.t());
    const at::Tensor found = values.abs().amax(1).cpu();
    std::copy_n(found.const_data_ptr<double>(), largest.size(), largest.begin());
    return largest;
  }
  const int64_t m = cotangents.size(1);
  const int64_t n = directions.size(1);
  for (int64_t row = 0; row < cotangents.size(0); ++row) {
    const double* const v = cotangents.const_data_ptr<double>() + row * m;
    const double* const g = gradients.const_data_ptr<double>() + row * n;
    for (int64_t k = 0; k < directions.size(0); ++k) {
      const double numerical = std::inner_product(v, v + m, derivatives.const_data_ptr<double>() + k * m, 0.0);
      const double analytical = std::inner_product(g, g + n, directions.const_data_ptr<double>() + k * n, 0.0);
      largest[row] = louder(std::fabs(numerical - analytical), largest[row]);
    }
  }
  return largest;
}

}  // namespace fastgrad
