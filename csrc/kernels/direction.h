// One component of a random direction, as a pure function of (seed, stream, coordinate).
#pragma once

#include "philox.h"

namespace fastgrad {

// Magnitude uniform in [0.5, 1.5), sign random: bounded away from zero, so that no coordinate can
// hide, and not all of one size, so that two rarely cancel. `seed` keys the generator, `stream`
// numbers the directions of one check. With `halved`, a random half of the components is zero, never
// that of coordinate 0, lest a short direction vanish. Every operation is exact, so all devices
// agree bit for bit.
FASTGRAD_HOST_DEVICE double direction_component(int64_t seed, int64_t stream, int64_t coordinate, bool halved = false) {
  const auto low = [](int64_t value) { return static_cast<uint32_t>(value); };
  const auto high = [](int64_t value) { return static_cast<uint32_t>(static_cast<uint64_t>(value) >> 32); };
  const Words4 words =
      philox4x32_10(Words4{{low(coordinate), high(coordinate), low(stream), high(stream)}}, low(seed), high(seed));
  if (halved && coordinate != 0 && (words.word[2] & 1u)) {
    return 0.0;
  }
  const double magnitude = 0.5 + words.word[0] * (1.0 / 4294967296.0);
  return (words.word[1] & 1u) ? magnitude : -magnitude;
}

}  // namespace fastgrad
