// Derivatives of func along random directions from the fewest evaluations, for small checks in fast mode.
#include "evaluator.h"

#include "kernels/difference.h"
#include "memory.h"
#include "ops/common.h"
#include "rows.h"
#include "two_points.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace py = pybind11;

namespace fastgrad {
namespace {

// Of one-sided derivatives with step h' along the other directions: the best ratio of h' to the step of the first
// direction, a power of two, at most 1 / 2; nothing if the error exceeds the budget. error: estimated along the first
// direction.
std::optional<double> best_share(const OneSidedError& error, double budget) {
  constexpr int smallest = -12;
  constexpr double infinity = std::numeric_limits<double>::infinity();
  if (!(error.curvature < infinity) || !(error.rounding < infinity)) {
    return std::nullopt;
  }
  int exponent = smallest;
  const auto norm = [&](int e) {
    return std::sqrt(error.curvature) * std::ldexp(1, e) + std::sqrt(error.rounding) / std::ldexp(1, e);
  };
  while (exponent < -1 && norm(exponent + 1) < norm(exponent)) {
    ++exponent;
  }
  return norm(exponent) <= budget ? std::optional(std::ldexp(1, exponent)) : std::nullopt;
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
  constexpr double factor = 8;  // 1 / SMALLER_STEP of fastgrad/checks/small_steps.py
  // For smooth functions, the error of a central difference is about curvature^2 / derivative.
  return noise * derivative <= 2 * error.curvature && noise / (factor * factor) + rounding * factor <= noise / 4;
}

// Whether the noise of central differences comes from rounding: it is more than curvature explains.
bool is_rounding(double noise, double derivative, const OneSidedError& error) {
  constexpr double curvature_ratio = 64;  // as CURVATURE_RATIO of fastgrad/checks/small_steps.py
  return noise * derivative > curvature_ratio * error.curvature;
}

// target = (x + displacement, rounded, - x) * factor.
FASTGRAD_AVX2_TOO void movement(
    double* target, const double* x, const double* displacement, double factor, int64_t count) {
#pragma omp simd
  for (int64_t j = 0; j < count; ++j) {
    target[j] = (perturbed(x[j], displacement[j]) - x[j]) * factor;
  }
}

}  // namespace

void Evaluator::realize_one_sided(const at::Tensor& direction, const at::Tensor& displacement, double step) const {
  double* const to = direction.mutable_data_ptr<double>();
  const double* const by = displacement.const_data_ptr<double>();
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const int64_t first = blocks_[b].first;
    const at::Tensor origin = real_coordinates(origin_on(at::kCPU, b));
    const double* const x = origin.const_data_ptr<double>();
    at::parallel_for(0, origin.numel(), grain_size, [&](int64_t begin, int64_t end) {
      movement(to + first + begin, x + begin, by + first + begin, 1 / step, end - begin);
    });
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
  along.check("screening_derivatives");
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
  const at::Tensor displacement = empty_vectors({size_});
  at::Tensor first_values = empty_vectors({2, m});
  std::vector<at::Tensor> memory{first_values.select(0, 0), first_values.select(0, 1), empty_vectors({m})};
  const at::Tensor rounding = empty_vectors({m});
  Derivatives into;
  into.directions = empty_vectors({count, size_});
  into.derivatives = empty_vectors({count, m});
  into.noise = empty_vectors({m}).zero_();
  into.measures_noise = measure_noise || known;
  const auto by_output = [&](const auto& visit) {
    int64_t offset = 0;
    for (size_t o = 0; o < outputs.size(); ++o) {
      const int64_t size = coordinate_count(outputs[o].like);
      visit([=](const at::Tensor& whole) { return size == m ? whole : whole.narrow(0, offset, size); }, o);
      offset += size;
    }
  };
  std::vector<double> usual(outputs.size(), 0.0);  // of each output along the first direction
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
  const auto points = [&](const auto& own, int64_t k, double step, size_t output) {
    const at::Tensor derivative = own(into.derivatives.select(0, k));
    return TwoPoints{derivative,      own(into.noise), own(base),
                     own(memory[0]),  own(memory[1]),  step,
                     ulps.at(output), curve,           k > 0 ? usual[output] : 0.0};
  };
  // The derivative along the first direction, and whether one-sided derivatives suffice along the others.
  const auto estimate = [&](bool is_measured) {
    error = {};
    by_output([&](const auto& own, size_t output) {
      usual[output] =
          first_direction(points(own, 0, widest, output), own(memory[2]), is_measured, own(rounding), error);
    });
    step_fraction = all_double ? best_share(error, budget) : std::nullopt;
  };
  for (int64_t k = 0; k < count; ++k) {
    const bool is_one_sided = step_fraction && !along.is_part(k);
    const double fraction = is_one_sided ? *step_fraction : 1.0;
    const double step = widest * fraction;
    const at::Tensor direction = into.directions.select(0, k);
    realize_along(displacement, direction, along, k, step, along.relative * fraction);
    if (is_one_sided) {
      realize_one_sided(direction, displacement, step);
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
    } else if (auto changed = evaluate(is_one_sided ? std::vector{1.0} : std::vector{1.0, -1.0}, 0)) {
      return *std::move(changed);
    }
    if (is_one_sided) {
      const BelowAutograd guard;
      one_sided(into.derivatives.select(0, k), memory[0], base, step);
    } else if (k > 0) {
      const BelowAutograd guard;
      by_output([&](const auto& own, size_t output) { two_points(points(own, k, step, output)); });
    } else {
      if (!into.measures_noise) {
        const BelowAutograd guard;
        estimate(false);
        // For smooth functions, the error of a central difference is about curvature^2 / derivative.
        into.measures_noise =
            !(norm_of(into.noise) <= budget && error.curvature <= budget * norm_of(into.derivatives.select(0, 0)));
        if (!into.measures_noise) {
          into.first_values = first_values;
          memory[0] = empty_vectors({m});
          memory[1] = empty_vectors({m});
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
        const double size = norm_of(derivative);
        const bool is_curved = widest > along.step && noise > too_noisy * budget &&
                               is_too_curved(noise, output_rounding / widest, size, error);
        // If derivatives are known, sums disagreed at this step: this must be explained here.
        const bool is_rounded =
            !known && !measure_noise && budget > 0 && noise > too_noisy / 2 * budget && is_rounding(noise, size, error);
        // An eighth of the step reduces errors from curvature to one 64th.
        if (is_curved || is_rounded ||
            (budget > 0 && has_kink(into.noise, derivative, 64 * too_noisy * budget, curve))) {
          into.directions = into.directions.narrow(0, 0, 1).clone();
          into.derivatives = into.derivatives.narrow(0, 0, 1).clone();
          into.is_complete = false;
          break;
        }
      }
      if (step_fraction) {
        const BelowAutograd guard;
        add_one_sided_noise(into.noise, memory[2], rounding, *step_fraction);
      }
    }
  }
  into.sizes = sizes_of(into.noise, into.derivatives);
  into.curvature = std::sqrt(error.curvature);
  into.step = widest;
  return into;
}

}  // namespace fastgrad
