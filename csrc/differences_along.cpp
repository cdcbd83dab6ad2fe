// Derivatives of func along random directions, from two or four evaluations each, and their comparison with VJPs.
#include "evaluator.h"

#include "kernels/difference.h"
#include "kernels/richardson.h"
#include "ops/common.h"
#include "ops/richardson.h"
#include "rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/zeros.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace py = pybind11;

namespace fastgrad {
namespace {

constexpr int64_t points_of_richardson = 4;

// An output's values at x + step u and x - step u, the derivative, and the values to compare with.
struct TwoPoints {
  at::Tensor derivative, noise, base, plus, minus;  // float64, shape (coordinates of the output,)
  double step;
  double ulp;          // the relative spacing of the output's dtype
  double curve;        // bound of the distance of a smooth function's one-sided derivatives, relative to the derivative
  double usual = 0.0;  // the root mean square of the derivatives along another direction
};

// derivative = (plus - minus) / (2 step); noise becomes at least the distance of the one-sided derivatives from it, if
// this is more than curvature and rounding explain. At an extremum, a smooth function is curved although its derivative
// is zero. Therefore, the root mean square of all derivatives counts in addition to the output's own, along this
// direction or, if it is larger there, along another one. A NaN stays NaN.
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
    const double usual = louder(std::sqrt(squares / static_cast<double>(std::max<int64_t>(1, count))), at.usual);
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
  const at::Tensor usual = at::linalg_vector_norm(at.derivative).div_(root).clamp_min_(at.usual);
  if (at.derivative.is_cpu() && bend.max().item<double>() <= at.curve * usual.item<double>()) {
    return;  // no output is curved that much; on a device, this test would wait
  }
  at.minus.copy_(at.derivative).abs_().add_(usual).mul_(at.curve).add_(at.base.abs(), 32 * at.ulp / at.step);
  bend.masked_fill_(bend <= at.minus, 0.0);
  at.noise.copy_(at::maximum(at.noise, bend));
}

// Estimated errors of one-sided derivatives with step h' along the other directions. The estimate comes from the first
// direction. The curvature error is proportional to h', the rounding error to 1 / h'. Both fields are squared 2-norms,
// for h' equal to the step of the first direction.
struct OneSidedError {
  double curvature = 0.0, rounding = 0.0;

  // The best ratio of h' to the step, a power of two, at most 1 / 2; nothing if the error exceeds the budget.
  std::optional<double> share(double budget) const {
    constexpr int smallest = -12;
    if (!(curvature < std::numeric_limits<double>::infinity()) ||
        !(rounding < std::numeric_limits<double>::infinity())) {
      return std::nullopt;
    }
    int exponent = smallest;
    const auto error = [&](int e) {
      return std::sqrt(curvature) * std::ldexp(1, e) + std::sqrt(rounding) / std::ldexp(1, e);
    };
    while (exponent < -1 && error(exponent + 1) < error(exponent)) {
      ++exponent;
    }
    return error(exponent) <= budget ? std::optional(std::ldexp(1, exponent)) : std::nullopt;
  }
};

double norm_of(const at::Tensor& vector) {
  const double* const v = vector.const_data_ptr<double>();
  return std::sqrt(std::inner_product(v, v + vector.numel(), v, 0.0));
}

// The root mean square of a vector.
double usual_of(const at::Tensor& vector) {
  return norm_of(vector) / std::sqrt(static_cast<double>(std::max<int64_t>(1, vector.numel())));
}

// Whether an output is noisier than a limit, and than curvature explains. curve: as in TwoPoints.
bool has_kink(const at::Tensor& noise, const at::Tensor& derivative, double limit, double curve) {
  const double* const values = noise.const_data_ptr<double>();
  const double* const d = derivative.const_data_ptr<double>();
  const double usual = usual_of(derivative);
  for (int64_t i = 0; i < noise.numel(); ++i) {
    if (values[i] > limit && values[i] > curve * (std::fabs(d[i]) + usual)) {
      return true;
    }
  }
  return false;
}

// The smallest multiple of a step, up to a limit, at which rounding of the outputs takes at most half of the budget.
// rounding: the error of the outputs, a 2-norm.
double step_above_rounding(double step, double rounding, double budget) {
  constexpr double limit = 64;
  double multiple = 1;
  while (budget > 0 && multiple < limit && rounding / (step * multiple) > budget / 2) {
    multiple *= 2;
  }
  return step * multiple;
}

// Whether the noise of central differences would become at most a quarter of it at a smaller step, because it comes
// from curvature. rounding: the part of the noise that comes from rounding of the outputs.
bool is_too_curved(double noise, double rounding, double derivative, const OneSidedError& error) {
  constexpr double factor = 8;  // 1 / SMALLER_STEP of fastgrad/checks/small_sums.py
  // For smooth functions, the error of a central difference is about curvature^2 / derivative.
  return noise * derivative <= 2 * error.curvature && noise / (factor * factor) + rounding * factor <= noise / 4;
}

// Like two_points, on the CPU. If is_measured, `half` holds the values at x + step u / 2, and noise also covers their
// distance from the parabola through the other three points, converted to a derivative. The reason may be curvature of
// higher order, a kink, a jump or rounding inside func. Otherwise, only the rounding of the outputs counts. half
// becomes the curvature error of a one-sided derivative with this step, and rounding_inside its estimated rounding
// error.
void first_direction(
    const TwoPoints& at, const at::Tensor& half, bool is_measured, const at::Tensor& rounding_inside,
    OneSidedError& error) {
  const int64_t count = at.derivative.numel();
  const double* const y = at.base.const_data_ptr<double>();
  const double* const p = at.plus.const_data_ptr<double>();
  const double* const m = at.minus.const_data_ptr<double>();
  double* const h = half.mutable_data_ptr<double>();
  double* const inside = rounding_inside.mutable_data_ptr<double>();
  double* const noise = at.noise.mutable_data_ptr<double>();
  // A cubic c t^3 deviates by 3 c step^3 / 8 from the parabola, and its central difference by c step^2.
  const double of_cubic = 8.0 / (3.0 * at.step);
  for (int64_t i = 0; i < count; ++i) {
    const double second = p[i] + m[i] - 2 * y[i];
    const double rounding = std::fabs(y[i]) * at.ulp / at.step;
    const double off = is_measured ? std::fabs(h[i] - y[i] - (p[i] - m[i]) / 4 - second / 8) * of_cubic : 0.0;
    // A deviation of a few units of rounding shows no cubic term: only the rounding of a difference counts then.
    noise[i] = louder(off <= 4 * rounding ? rounding : off, noise[i]);
    h[i] = std::fabs(second) / (2 * at.step);
    error.curvature += h[i] * h[i];
    inside[i] = louder(off / 2, rounding);
    error.rounding += inside[i] * inside[i];
  }
  two_points(at);  // last, because it may overwrite its arguments
}

// The 2-norm of `noise`, and the largest magnitude of `derivatives` (a NaN is the largest); nothing if their memory is
// not plain.
std::optional<std::pair<double, double>> sizes_of(const at::Tensor& noise, const at::Tensor& derivatives) {
  if (!is_plain(noise) || !is_plain(derivatives)) {
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

void check_parts(const char* caller, const RandomDirections& along) {
  const auto count = static_cast<int64_t>(along.streams.size());
  const bool one_each = along.parts.empty() || along.parts.size() == along.streams.size();
  const auto is_valid = [&](int64_t part) { return part >= -1 && part < count; };
  TORCH_CHECK(
      one_each && std::all_of(along.parts.begin(), along.parts.end(), is_valid), caller,
      ": parts must be empty, or one of -1, ..., ", count - 1, " for each of ", count, " streams, got ", along.parts);
}

}  // namespace

std::variant<Derivatives, Changed> Evaluator::differences_along(
    const RandomDirections& along, const at::Tensor& base, double curve, const std::optional<at::Tensor>& fixed,
    const std::vector<OutputSpec>& outputs, const std::vector<double>& ulps) {
  const auto count = static_cast<int64_t>(along.streams.size());
  TORCH_CHECK(
      along.points.size() == along.streams.size(), "differences_along: points must have one element for each of ",
      count, " streams, got ", along.points.size());
  check_parts("differences_along", along);
  int64_t most = 0;
  for (const int64_t points : along.points) {
    TORCH_CHECK(
        points == 2 || points == points_of_richardson, "differences_along: points must be two or four, got ", points);
    most = std::max(most, points);
  }
  TORCH_CHECK(
      ulps.size() == outputs.size(), "differences_along: ulps must have one element for each of ", outputs.size(),
      " outputs, got ", ulps.size());
  const int64_t m = total(outputs);
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
  // The vectors are not one block: if they are large, blocks of several sizes leave holes in the heap. They are
  // allocated before blocks that live longer: freed memory above such blocks returns to the system, and the next
  // allocation maps new pages one by one.
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
      realize_along(displacement, direction, along, k, along.step, along.relative);
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

void Evaluator::realize_one_sided(const at::Tensor& moved, const at::Tensor& displacement) const {
  double* const to = moved.mutable_data_ptr<double>();
  const double* const by = displacement.const_data_ptr<double>();
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const int64_t first = blocks_[b].first;
    const at::Tensor origin = real_coordinates(origin_on(at::kCPU, b));
    const double* const x = origin.const_data_ptr<double>();
    for (int64_t j = 0; j < origin.numel(); ++j) {
      to[first + j] = displaced(x[j], by[first + j], 1.0) - x[j];
    }
  }
}

std::optional<Changed> Evaluator::values_on_cpu(
    const at::Tensor& displacement, const std::vector<double>& scales, const std::vector<at::Tensor>& values,
    const std::vector<OutputSpec>& outputs) {
  const at::Device device = outputs.at(0).like.device();
  if (device.is_cpu()) {
    return values_along(displacement, scales, values, outputs, /*record_graph=*/true);
  }
  const auto count = static_cast<int64_t>(values.size());
  const at::Tensor rows = at::empty({count, total(outputs)}, displacement.options().device(device));
  auto changed = values_along(displacement.to(device), scales, rows.unbind(), outputs, /*record_graph=*/true);
  if (!changed) {
    const at::Tensor copy = rows.to(at::kCPU);
    for (int64_t k = 0; k < count; ++k) {
      values[k].copy_(copy.select(0, k));
    }
  }
  return changed;
}

std::variant<Derivatives, Changed> Evaluator::screening_derivatives(
    const RandomDirections& along, const at::Tensor& base, double curve, double budget, bool measure_noise,
    const std::optional<Derivatives>& known, const std::vector<OutputSpec>& outputs, const std::vector<double>& ulps) {
  const auto count = static_cast<int64_t>(along.streams.size());
  const int64_t m = total(outputs);
  check_parts("screening_derivatives", along);
  check_contiguous_float64("screening_derivatives", "base", base);
  TORCH_CHECK(
      base.numel() == m && base.is_cpu() && !ulps.empty() && ulps.size() == outputs.size(),
      "screening_derivatives: base must have ", m, " elements on the CPU, and ulps one for each of ", outputs.size(),
      " outputs, got ", base.numel(), " on ", base.device(), ", and ", ulps.size());
  const auto is_double = [](const at::Tensor& tensor) {
    return c10::toRealValueType(tensor.scalar_type()) == at::kDouble;
  };
  bool all_double = true;
  for (const InputBlock& block : blocks_) {
    all_double = all_double && is_double(block.origin);
  }
  for (const OutputSpec& output : outputs) {
    all_double = all_double && is_double(output.like);
  }
  TORCH_CHECK(
      !known || (known->first_values.defined() && known->first_values.size(1) == m &&
                 known->directions.size(0) == count && known->directions.size(1) == size_),
      "screening_derivatives: known must be derivatives without measured noise along ", count, " directions of ", size_,
      " coordinates, for ", m, " coordinates of the outputs");
  const auto vector = [&](int64_t size) { return at::empty({size}, base.options()); };
  const at::Tensor displacement = vector(size_);
  const std::vector<at::Tensor> memory{vector(m), vector(m), vector(m)};
  const at::Tensor rounding = vector(m);
  Derivatives into;
  into.directions = at::empty({count, size_}, base.options());
  into.derivatives = at::empty({count, m}, base.options());
  into.noise = at::zeros({m}, base.options());
  into.measures_noise = measure_noise || known;
  const auto by_output = [&](const auto& visit) {
    int64_t offset = 0;
    for (size_t o = 0; o < outputs.size(); ++o) {
      const int64_t size = coordinate_count(outputs[o].like);
      visit([=](const at::Tensor& whole) { return size == m ? whole : whole.narrow(0, offset, size); }, ulps[o]);
      offset += size;
    }
  };
  // Noise above atol, relative to the budget: sums agree up to a quarter of atol, and noisy outputs have small weights.
  constexpr double too_noisy = 32;
  const double output_rounding = norm_of(base) * *std::max_element(ulps.begin(), ulps.end());
  // A joint step of many coordinates crosses more kinks, and is curved more, the wider it is.
  constexpr int64_t most_widened = 1 << 14;  // coordinates; as MAX_AT_ONCE of fastgrad/engines/blocks.py
  const double widest =
      size_ + m <= most_widened ? step_above_rounding(along.step, output_rounding, budget) : along.step;
  OneSidedError error;
  std::optional<double>& step_fraction = into.step_fraction;
  const auto evaluate = [&](const std::vector<double>& scales, std::ptrdiff_t first) {
    const auto at = memory.begin() + first;
    auto changed = values_on_cpu(displacement, scales, {at, at + static_cast<std::ptrdiff_t>(scales.size())}, outputs);
    check_storage("screening_derivatives", "base", base);  // func has run
    return changed;
  };
  const auto points = [&](const auto& own, int64_t k, double step, double ulp) {
    const double usual = k > 0 ? usual_of(own(into.derivatives.select(0, 0))) : 0.0;
    return TwoPoints{
        own(into.derivatives.select(0, k)),
        own(into.noise),
        own(base),
        own(memory[0]),
        own(memory[1]),
        step,
        ulp,
        curve,
        usual};
  };
  // The derivative along the first direction, and whether one-sided derivatives suffice along the others.
  const auto estimate = [&](bool is_measured) {
    into.noise.zero_();
    error = {};
    by_output([&](const auto& own, double ulp) {
      first_direction(points(own, 0, widest, ulp), own(memory[2]), is_measured, own(rounding), error);
    });
    step_fraction = all_double ? error.share(budget) : std::nullopt;
  };
  for (int64_t k = 0; k < count; ++k) {
    const bool one_sided = step_fraction && !along.is_part(k);
    const double fraction = one_sided ? *step_fraction : 1.0;
    const double step = widest * fraction;
    const at::Tensor direction = into.directions.select(0, k);
    realize_along(displacement, direction, along, k, step, along.relative * fraction);
    if (one_sided) {
      realize_one_sided(direction, displacement);
      direction.mul_(1 / step);
    }
    if (known && k > 0 && known->step_fraction == step_fraction) {
      const BelowAutograd guard;
      direction.copy_(known->directions.select(0, k));
      into.derivatives.select(0, k).copy_(known->derivatives.select(0, k));
      into.noise.copy_(at::maximum(into.noise, known->noise));
      continue;
    }
    if (known && k == 0) {
      const BelowAutograd guard;
      memory[0].copy_(known->first_values.select(0, 0));
      memory[1].copy_(known->first_values.select(0, 1));
    } else if (auto changed = evaluate(one_sided ? std::vector{1.0} : std::vector{1.0, -1.0}, 0)) {
      return *std::move(changed);
    }
    if (one_sided) {
      const BelowAutograd guard;
      into.derivatives.select(0, k).copy_(memory[0]).sub_(base).mul_(1 / step);
    } else if (k > 0) {
      const BelowAutograd guard;
      by_output([&](const auto& own, double ulp) { two_points(points(own, k, step, ulp)); });
    } else {
      if (!into.measures_noise) {
        const BelowAutograd guard;
        into.first_values = at::stack({memory[0], memory[1]});
        estimate(false);
        // For smooth functions, the error of a central difference is about curvature^2 / derivative.
        into.measures_noise =
            !(norm_of(into.noise) <= budget && error.curvature <= budget * norm_of(into.derivatives.select(0, 0)));
        if (into.measures_noise) {
          memory[0].copy_(into.first_values.select(0, 0));  // two_points may have overwritten them
          memory[1].copy_(into.first_values.select(0, 1));
          into.first_values.reset();
        }
      }
      if (into.measures_noise) {
        if (auto changed = evaluate({0.5}, 2)) {
          return *std::move(changed);
        }
        const BelowAutograd guard;
        estimate(true);
        const double noise = norm_of(into.noise);
        const at::Tensor derivative = into.derivatives.select(0, 0);
        const bool is_curved = widest > along.step && noise > too_noisy * budget &&
                               is_too_curved(noise, output_rounding / widest, norm_of(derivative), error);
        // An eighth of the step reduces errors from curvature to one 64th.
        if (is_curved || (budget > 0 && has_kink(into.noise, derivative, 64 * too_noisy * budget, curve))) {
          into.directions = into.directions.narrow(0, 0, 1).clone();
          into.derivatives = into.derivatives.narrow(0, 0, 1).clone();
          into.is_complete = false;
          break;
        }
      }
      if (step_fraction) {
        const BelowAutograd guard;
        into.noise.add_(memory[2], *step_fraction).add_(rounding, 1 / *step_fraction);
      }
    }
  }
  into.sizes = sizes_of(into.noise, into.derivatives);
  into.curvature = std::sqrt(error.curvature);
  into.step = widest;
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
  const auto is_small = [](const at::Tensor& matrix) { return matrix.is_cpu() && matrix.size(1) <= small_size; };
  std::vector<double> largest(cotangents.size(0), 0.0);
  if (!is_small(cotangents) || !is_small(derivatives) || !is_small(gradients) || !is_small(directions)) {
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

std::optional<double> explained_sums(
    const at::Tensor& entries, const at::Tensor& sources, const at::Tensor& targets, const at::Tensor& weights,
    const at::Tensor& sums, double allowed, double rounding) {
  const int64_t count = entries.numel();
  check_float64("explained_sums", "entries", entries, 1);
  check_float64("explained_sums", "weights", weights, 2);
  check_float64("explained_sums", "sums", sums, 2);
  TORCH_CHECK(
      is_plain(entries) && is_plain(weights) && is_plain(sums) && weights.size(0) == sums.size(0),
      "explained_sums: entries, weights and sums must be contiguous on the CPU, with as many rows of weights as "
      "of sums, got ",
      weights.sizes(), " and ", sums.sizes());
  const auto check_entries = [&](const char* name, const at::Tensor& indices, int64_t size) {
    check_indices("explained_sums", name, indices);
    TORCH_CHECK(
        indices.is_cpu() && indices.numel() == count, "explained_sums: ", name, " must have one element for each of ",
        count, " entries on the CPU, got ", indices.numel(), " on ", indices.device());
    if (count > 0) {
      check_range("explained_sums", name, indices, size);
    }
  };
  check_entries("sources", sources, weights.size(1));
  check_entries("targets", targets, sums.size(1));
  const auto* const from = sources.const_data_ptr<int64_t>();
  const auto* const to = targets.const_data_ptr<int64_t>();
  const auto* const entry = entries.const_data_ptr<double>();
  double largest = 0;
  std::vector<double> totals(sums.size(1));
  std::vector<double> sizes(sums.size(1));
  for (int64_t row = 0; row < sums.size(0); ++row) {
    std::fill(totals.begin(), totals.end(), 0.0);
    std::fill(sizes.begin(), sizes.end(), 0.0);
    const double* const weight = weights.const_data_ptr<double>() + row * weights.size(1);
    for (int64_t e = 0; e < count; ++e) {
      const double term = entry[e] * weight[from[e]];
      totals[to[e]] += term;
      sizes[to[e]] += std::fabs(term);
    }
    const double* const sum = sums.const_data_ptr<double>() + row * sums.size(1);
    for (int64_t i = 0; i < sums.size(1); ++i) {
      const double explained = allowed + rounding * sizes[i];
      if (!(std::fabs(sum[i] - totals[i]) <= explained)) {
        return std::nullopt;
      }
      largest = louder(explained, largest);
    }
  }
  return largest;
}

}  // namespace fastgrad
