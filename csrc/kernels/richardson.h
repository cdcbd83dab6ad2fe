// A directional derivative from two central differences, and its error.
#pragma once

#include "host_device.h"

#include <cmath>

namespace fastgrad {

// Values of one output at x + h u, x - h u, x + h u / 2, x - h u / 2.
struct FourValues {
  double plus, minus, half_plus, half_minus;
};

// Richardson extrapolation of D(h) and D(h/2), with D(h) = f(x + h u) - f(x - h u), for the step eps. Its error is of
// order h^4.
FASTGRAD_HOST_DEVICE double richardson(const FourValues& f, double eps) {
  return (8.0 * (f.half_plus - f.half_minus) - (f.plus - f.minus)) / (6.0 * eps);
}

// An estimate of the error of the derivative, from curvature, a kink or jump between the points, and rounding.
// ulp: the relative spacing of the output's dtype. The second differences of a smooth function are proportional to h^2.
// If a kink is at x itself, D is linear in h, and only second differences show the kink. NaN if a value is NaN.
FASTGRAD_HOST_DEVICE double difference_noise(const FourValues& f, double base, double eps, double ulp) {
  const double rounding = ulp * (base < 0 ? -base : base);
  const double curvature = std::fabs(2.0 * (f.half_plus - f.half_minus) - (f.plus - f.minus));
  const double kink = std::fabs((f.plus + f.minus - 2.0 * base) - 4.0 * (f.half_plus + f.half_minus - 2.0 * base));
  const double smooth = curvature <= 2.0 * rounding ? 2.0 * rounding : curvature;
  const double heard = kink > 64.0 * rounding ? kink : 0.0;
  return (heard > smooth ? heard : smooth) / (2.0 * eps);
}

// The larger of two noise values; NaN counts as the largest.
FASTGRAD_HOST_DEVICE double louder(double found, double worst) {
  return worst != worst || found <= worst ? worst : found;
}

}  // namespace fastgrad
