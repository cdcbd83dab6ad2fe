// One component of a random direction, as a pure function of (seed, stream, coordinate).
#pragma once

#include "philox.h"

namespace fastgrad {

// The random words of coordinates 4 g, ..., 4 g + 3 of a direction, one each: g is the group.
FASTGRAD_HOST_DEVICE Words4 direction_words(int64_t seed, int64_t stream, int64_t group) {
  const auto low = [](int64_t value) { return static_cast<uint32_t>(value); };
  const auto high = [](int64_t value) { return static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32); };
  return philox4x32_10(Words4{{low(group), high(group), low(stream), high(stream)}}, low(seed), high(seed));
}

// The number of groups that hold coordinates first, ..., first + size - 1; first is not negative, size not zero.
FASTGRAD_HOST_DEVICE int64_t direction_groups(int64_t first, int64_t size) {
  return (first + size - 1) / 4 - first / 4 + 1;
}

// Magnitude uniform in [0.5, 1.5), sign random: bounded away from zero, so that no coordinate is
// hidden, and not all of one size, so that two rarely cancel. With `halved`, a random half of the
// components is zero, never that of coordinate 0, so that a short direction does not vanish. Every operation is
// exact, so all devices agree bit for bit. No branch depends on a random bit: it would be mispredicted half the time.
FASTGRAD_HOST_DEVICE double component_of(uint32_t word, int64_t coordinate, bool halved) {
  const double magnitude = 0.5 + static_cast<int32_t>(word >> 2) * (1.0 / 1073741824.0);
  const int32_t sign = 2 * static_cast<int32_t>(word & 1u) - 1;
  const int32_t kept = 1 - static_cast<int32_t>((word >> 1) & static_cast<uint32_t>(halved && coordinate != 0));
  return magnitude * (kept * sign);
}

// A single component. `seed` keys the generator, `stream` numbers the directions of one check.
FASTGRAD_HOST_DEVICE double direction_component(int64_t seed, int64_t stream, int64_t coordinate, bool halved = false) {
  return component_of(direction_words(seed, stream, coordinate >> 2).word[coordinate & 3], coordinate, halved);
}

}  // namespace fastgrad
