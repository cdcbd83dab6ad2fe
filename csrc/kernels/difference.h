// Perturbing one coordinate and dividing by the step actually taken.
#pragma once

#include "host_device.h"

#include <cmath>

namespace fastgrad {

// x + step, rounded to T: the value that the function under test gets.
template <typename T>
FASTGRAD_HOST_DEVICE T perturbed(T x, double step) {
  return static_cast<T>(static_cast<double>(x) + step);
}

// (x + step) - (x - step) in floating point. Rounding can make it differ from 2 step. If x is infinite, it is NaN.
// Then the result is 2 step, so that a function that is constant in x has the derivative zero.
template <typename T>
FASTGRAD_HOST_DEVICE double realized_width(T x, double step) {
  const double width = static_cast<double>(perturbed(x, step)) - static_cast<double>(perturbed(x, -step));
  return width - width == 0 ? width : 2 * step;  // isfinite, in a form that vectorizes
}

// The step for a single-coordinate difference: eps if it changes x, otherwise relative_step |x| (an eps of 1e-6 is less
// than half an ulp of 1e11).
template <typename T>
FASTGRAD_HOST_DEVICE double coordinate_step(T x, double eps, double relative_step) {
  const double size = static_cast<double>(x) < 0 ? -static_cast<double>(x) : static_cast<double>(x);
  return realized_width(x, eps) == 0.0 ? size * relative_step : eps;
}

// A coordinate moved by its step, sign -1 or 1, or put back, sign 0, which keeps the bits.
template <typename T>
FASTGRAD_HOST_DEVICE T moved_coordinate(T x, int sign, double eps, double relative_step) {
  return sign == 0 ? x : perturbed(x, sign * coordinate_step(x, eps, relative_step));
}

// x moved by scale times a displacement; scale 0 keeps the bits.
template <typename T>
FASTGRAD_HOST_DEVICE T displaced(T x, double displacement, double scale) {
  return scale == 0 ? x : perturbed(x, scale * displacement);
}

// The derivative of one output, from its values on both sides of a step with this realized width.
template <typename T>
FASTGRAD_HOST_DEVICE double difference_quotient(double plus, T minus, double width) {
  return (plus - static_cast<double>(minus)) / width;
}

// The component of a direction that differences with the displacements d and d / 2 realize after rounding, with the
// same extrapolation as in kernels/richardson.h.
template <typename T>
FASTGRAD_HOST_DEVICE double realized_component(T x, double displacement, double eps) {
  return (8.0 * realized_width(x, displacement / 2) - realized_width(x, displacement)) / (6.0 * eps);
}

// The step length of a coordinate along a direction: max(eps, relative_step |x|). For an infinite x it is eps, so that
// x does not move; an infinite step would give NaN.
template <typename T>
FASTGRAD_HOST_DEVICE double directional_step(T x, double eps, double relative_step) {
  const double size = static_cast<double>(x) < 0 ? -static_cast<double>(x) : static_cast<double>(x);
  const double step = size * relative_step;
  return step > eps && step - step == 0 ? step : eps;  // isfinite, in a form that vectorizes
}

}  // namespace fastgrad
