// Differences of one output along one direction, from its values at two or three points.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <utility>

namespace fastgrad {

// An output's values at x + step u and x - step u, the derivative, and the values to compare with: float64,
// contiguous, shape (coordinates of the output,).
struct TwoPoints {
  at::Tensor derivative, noise, base, plus, minus;
  double step;
  double ulp;          // the relative spacing of the output's dtype
  double curve;        // bound of the distance of a smooth function's one-sided derivatives, relative to the derivative
  double usual = 0.0;  // the root mean square of the derivatives along another direction
};

// derivative = (plus - minus) / (2 step); noise becomes at least the distance of the one-sided derivatives from it, if
// this is more than curvature and rounding explain. At an extremum, a smooth function is curved although its derivative
// is zero. Therefore, the root mean square of all derivatives counts in addition to the output's own, along this
// direction or, if it is larger there, along another one. A NaN stays NaN. plus and minus may be overwritten if they
// are on a device.
void two_points(const TwoPoints& at);

// Squared 2-norms over an output's coordinates, of errors of one-sided derivatives: from curvature, which is
// proportional to the step, and from rounding, which is proportional to its inverse.
struct OneSidedError {
  double curvature = 0.0, rounding = 0.0;
};

// The same on the CPU. If is_measured, `half` holds the values at x + step u / 2, and noise also covers their distance
// from the parabola through the other three points, converted to a derivative. The reason may be curvature of higher
// order, a kink, a jump or rounding inside func. Otherwise, only the rounding of the outputs counts. What noise held
// before is lost. half becomes the curvature error of a one-sided derivative with this step, and rounding_inside its
// estimated rounding error; their squared 2-norms are added to `error`. Returns the root mean square of the derivative.
double first_direction(
    const TwoPoints& at, const at::Tensor& half, bool is_measured, const at::Tensor& rounding_inside,
    OneSidedError& error);

// derivative = (plus - base) / step, on the CPU.
void one_sided(const at::Tensor& derivative, const at::Tensor& plus, const at::Tensor& base, double step);

// target += curvature * share + rounding / share, on the CPU. All have one shape.
void add_one_sided_noise(
    const at::Tensor& target, const at::Tensor& curvature, const at::Tensor& rounding, double share);

// Of a vector in plain memory on the CPU: its 2-norm, the same for any number of threads; and its root mean square.
double norm_of(const at::Tensor& vector);
double usual_of(const at::Tensor& vector);

// The 2-norm of `noise`, and the largest magnitude of `derivatives` (a NaN is the largest); nothing if their memory is
// not plain.
std::optional<std::pair<double, double>> sizes_of(const at::Tensor& noise, const at::Tensor& derivatives);

}  // namespace fastgrad
