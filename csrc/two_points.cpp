// Differences along one direction: loops that pass over the vectors once.
#include "two_points.h"

#include "kernels/richardson.h"
#include "ops/common.h"
#include "rows.h"

#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/maximum.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

namespace fastgrad {
namespace {

constexpr int64_t lanes = 8;  // independent sums, because a single sum would wait for the previous addition each time

// Sums over elements, and the largest of some values (a NaN is the largest).
struct Totals {
  std::array<double, 3> sums{};
  double largest = 0.0;

  void add(const Totals& other) {
    for (size_t k = 0; k < sums.size(); ++k) {
      sums[k] += other.sums[k];
    }
    largest = louder(other.largest, largest);
  }
};

// The totals of lanes.
struct Lanes {
  std::array<std::array<double, lanes>, 3> sums{};
  std::array<double, lanes> largest{};

  Totals total() const {
    Totals all;
    for (int64_t lane = 0; lane < lanes; ++lane) {
      Totals own;
      for (size_t k = 0; k < sums.size(); ++k) {
        own.sums[k] = sums[k][lane];
      }
      own.largest = largest[lane];
      all.add(own);
    }
    return all;
  }
};

// Calls element(i, lane) for all elements.
template <typename Element>
inline __attribute__((always_inline)) void in_lanes(int64_t count, const Element& element) {
  int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
#pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) {
      element(i + lane, lane);
    }
  }
  for (; i < count; ++i) {
    element(i, 0);
  }
}

// The totals over chunks, the same for any number of threads. of_chunk(first, count): those of some elements.
template <typename OfChunk>
Totals over_chunks(int64_t count, const OfChunk& of_chunk) {
  if (count <= grain_size) {
    return of_chunk(0, count);
  }
  const int64_t chunks = (count + grain_size - 1) / grain_size;
  std::vector<Totals> partial(chunks);
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t first = chunk * grain_size;
      partial[chunk] = of_chunk(first, std::min(grain_size, count - first));
    }
  });
  Totals all;
  for (const Totals& some : partial) {
    all.add(some);
  }
  return all;
}

// Memory of TwoPoints, from some element on.
struct Memory {
  double* derivative;
  double* noise;
  const double* base;
  const double* plus;
  const double* minus;

  explicit Memory(const TwoPoints& at)
      : derivative(at.derivative.mutable_data_ptr<double>()),
        noise(at.noise.mutable_data_ptr<double>()),
        base(at.base.const_data_ptr<double>()),
        plus(at.plus.const_data_ptr<double>()),
        minus(at.minus.const_data_ptr<double>()) {}

  Memory from(int64_t first) const {
    Memory part = *this;
    part.derivative += first;
    part.noise += first;
    part.base += first;
    part.plus += first;
    part.minus += first;
    return part;
  }
};

// Writes the derivative. Totals: its squares, and the largest distance of the one-sided derivatives from it.
FASTGRAD_AVX2_TOO Totals central(const Memory& at, double half, int64_t count) {
  Lanes all;
  in_lanes(count, [&](int64_t i, int64_t lane) {
    const double d = (at.plus[i] - at.minus[i]) * half;
    at.derivative[i] = d;
    all.sums[0][lane] += d * d;
    all.largest[lane] = louder(std::fabs(at.plus[i] + at.minus[i] - 2 * at.base[i]) * half, all.largest[lane]);
  });
  return all.total();
}

// Raises the noise to the distance of the one-sided derivatives where curvature and rounding do not explain it.
FASTGRAD_AVX2_TOO Totals
raise_noise(const Memory& at, double half, double curve, double usual, double rounding, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    const double bend = std::fabs(at.plus[i] + at.minus[i] - 2 * at.base[i]) * half;
    const double smooth = curve * (std::fabs(at.derivative[i]) + usual) + rounding * std::fabs(at.base[i]);
    at.noise[i] = bend <= smooth ? at.noise[i] : louder(bend, at.noise[i]);
  }
  return {};
}

double root_mean_square(double squares, int64_t count) {
  return std::sqrt(squares / static_cast<double>(std::max<int64_t>(1, count)));
}

// totals: those of `central`.
void raise_noise_if_curved(const TwoPoints& at, const Totals& totals, double usual) {
  if (totals.largest <= at.curve * usual) {
    return;  // no output is curved that much
  }
  over_chunks(at.derivative.numel(), [&](int64_t first, int64_t count) {
    return raise_noise(Memory(at).from(first), 1 / (2 * at.step), at.curve, usual, 32 * at.ulp / at.step, count);
  });
}

// Estimates of the first direction, in addition to `central`. half: as in first_direction. Totals: the squares of the
// derivative, of half and of rounding_inside, and the largest element of half.
template <bool is_measured>
FASTGRAD_AVX2_TOO Totals
first_of(const Memory& at, double* half, double* rounding_inside, double step, double ulp, int64_t count) {
  const double inverse = 1 / (2 * step);
  // A cubic c t^3 deviates by 3 c step^3 / 8 from the parabola, and its central difference by c step^2.
  const double of_cubic = 8.0 / (3.0 * step);
  const double spacing = ulp / step;
  Lanes all;
  in_lanes(count, [&](int64_t i, int64_t lane) {
    const double width = at.plus[i] - at.minus[i];
    const double second = at.plus[i] + at.minus[i] - 2 * at.base[i];
    const double rounding = std::fabs(at.base[i]) * spacing;
    const double off = is_measured ? std::fabs(half[i] - at.base[i] - width / 4 - second / 8) * of_cubic : 0.0;
    const double d = width * inverse;
    const double curved = std::fabs(second) * inverse;
    const double inside = louder(off / 2, rounding);
    at.derivative[i] = d;
    // A deviation of a few units of rounding shows no cubic term: only the rounding of a difference counts then.
    at.noise[i] = off <= 4 * rounding ? rounding : off;
    half[i] = curved;
    rounding_inside[i] = inside;
    all.sums[0][lane] += d * d;
    all.sums[1][lane] += curved * curved;
    all.sums[2][lane] += inside * inside;
    all.largest[lane] = louder(curved, all.largest[lane]);
  });
  return all.total();
}

FASTGRAD_AVX2_TOO Totals squares(const double* values, int64_t count) {
  Lanes all;
  in_lanes(count, [&](int64_t i, int64_t lane) { all.sums[0][lane] += values[i] * values[i]; });
  return all.total();
}

FASTGRAD_AVX2_TOO Totals magnitudes(const double* values, int64_t count) {
  Lanes all;
  in_lanes(
      count, [&](int64_t i, int64_t lane) { all.largest[lane] = louder(std::fabs(values[i]), all.largest[lane]); });
  return all.total();
}

FASTGRAD_AVX2_TOO Totals
subtract_and_scale(double* target, const double* left, const double* right, double factor, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    target[i] = (left[i] - right[i]) * factor;
  }
  return {};
}

FASTGRAD_AVX2_TOO Totals
add_scaled(double* target, const double* first, double scale, const double* second, double other, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) {
    target[i] = target[i] + scale * first[i] + other * second[i];
  }
  return {};
}

// The same as two_points, for tensors on a device.
void two_points_composite(const TwoPoints& at) {
  const double half = 1 / (2 * at.step);
  at.derivative.copy_(at.plus).sub_(at.minus).mul_(half);
  const at::Tensor bend = at.plus.add_(at.minus).sub_(at.base, 2).abs_().mul_(half);
  const double root = std::sqrt(static_cast<double>(std::max<int64_t>(1, at.derivative.numel())));
  const at::Tensor usual = at::linalg_vector_norm(at.derivative).div_(root).clamp_min_(at.usual);
  at.minus.copy_(at.derivative).abs_().add_(usual).mul_(at.curve).add_(at.base.abs(), 32 * at.ulp / at.step);
  bend.masked_fill_(bend <= at.minus, 0.0);
  at.noise.copy_(at::maximum(at.noise, bend));
}

}  // namespace

void two_points(const TwoPoints& at) {
  if (!is_plain(at.derivative)) {
    return two_points_composite(at);
  }
  const Memory memory(at);
  const double half = 1 / (2 * at.step);
  const Totals totals = over_chunks(
      at.derivative.numel(), [&](int64_t first, int64_t count) { return central(memory.from(first), half, count); });
  raise_noise_if_curved(at, totals, louder(root_mean_square(totals.sums[0], at.derivative.numel()), at.usual));
}

double first_direction(
    const TwoPoints& at, const at::Tensor& half, bool is_measured, const at::Tensor& rounding_inside,
    OneSidedError& error) {
  const Memory memory(at);
  double* const curved = half.mutable_data_ptr<double>();
  double* const inside = rounding_inside.mutable_data_ptr<double>();
  const Totals totals = over_chunks(at.derivative.numel(), [&](int64_t first, int64_t count) {
    return (is_measured ? first_of<true> : first_of<false>)(memory.from(first), curved + first, inside + first, at.step,
                                                            at.ulp, count);
  });
  error.curvature += totals.sums[1];
  error.rounding += totals.sums[2];
  const double usual = root_mean_square(totals.sums[0], at.derivative.numel());
  raise_noise_if_curved(at, totals, louder(usual, at.usual));
  return usual;
}

void one_sided(const at::Tensor& derivative, const at::Tensor& plus, const at::Tensor& base, double step) {
  double* const target = derivative.mutable_data_ptr<double>();
  const double* const p = plus.const_data_ptr<double>();
  const double* const y = base.const_data_ptr<double>();
  over_chunks(derivative.numel(), [&](int64_t first, int64_t count) {
    return subtract_and_scale(target + first, p + first, y + first, 1 / step, count);
  });
}

void add_one_sided_noise(
    const at::Tensor& target, const at::Tensor& curvature, const at::Tensor& rounding, double share) {
  double* const noise = target.mutable_data_ptr<double>();
  const double* const curved = curvature.const_data_ptr<double>();
  const double* const inside = rounding.const_data_ptr<double>();
  over_chunks(target.numel(), [&](int64_t first, int64_t count) {
    return add_scaled(noise + first, curved + first, share, inside + first, 1 / share, count);
  });
}

double norm_of(const at::Tensor& vector) {
  const double* const values = vector.const_data_ptr<double>();
  return std::sqrt(over_chunks(vector.numel(), [&](int64_t first, int64_t count) {
                     return squares(values + first, count);
                   }).sums[0]);
}

double usual_of(const at::Tensor& vector) {
  return norm_of(vector) / std::sqrt(static_cast<double>(std::max<int64_t>(1, vector.numel())));
}

std::optional<std::pair<double, double>> sizes_of(const at::Tensor& noise, const at::Tensor& derivatives) {
  if (!is_plain(noise) || !is_plain(derivatives)) {
    return std::nullopt;
  }
  const double* const values = derivatives.const_data_ptr<double>();
  const double largest = over_chunks(derivatives.numel(), [&](int64_t first, int64_t count) {
                           return magnitudes(values + first, count);
                         }).largest;
  return std::make_pair(norm_of(noise), largest);
}

}  // namespace fastgrad
