// Terms of sums of products.
#pragma once

#include "host_device.h"

namespace fastgrad {

// A term of a sum: zero if the weight is zero, even if the entry is not finite.
FASTGRAD_HOST_DEVICE double dot_term(double entry, double weight) { return weight == 0 ? 0 : entry * weight; }

// Adds a weighted entry to `sum`, and its square to `squares`.
FASTGRAD_HOST_DEVICE void add_term(double& sum, double& squares, double weight, double entry) {
  const double term = weight * entry;
  sum += term;
  squares += term * term;
}

}  // namespace fastgrad
