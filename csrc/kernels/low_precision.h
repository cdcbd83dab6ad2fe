// float16 and bfloat16 as storage, for device code that includes no torch headers.
#pragma once

#include "host_device.h"

#include <cstdint>
#include <cstring>

namespace fastgrad {

FASTGRAD_HOST_DEVICE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

FASTGRAD_HOST_DEVICE float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

// 5 bits of exponent, 10 of mantissa. Conversion from float rounds to nearest, ties to even. Conversion from double
// goes through float, as in c10::Half.
struct Float16 {
  uint16_t bits;

  Float16() = default;
  FASTGRAD_HOST_DEVICE explicit Float16(float value) {
    constexpr uint32_t infinity = 0x7F800000u, smallest_normal = 0x38800000u, rebias = 0x38000000u;
    const uint32_t sign = bits_of(value) >> 16 & 0x8000u;
    const uint32_t size = bits_of(value) & 0x7FFFFFFFu;
    uint32_t magnitude;
    if (size > infinity) {
      magnitude = 0x7E00u;
    } else if (size < smallest_normal) {
      // Floats in [0.5, 1) have the spacing of subnormal float16 numbers, so the addition rounds.
      magnitude = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
    } else {
      const uint32_t rounded = (size - rebias + 0x0FFFu + (size >> 13 & 1u)) >> 13;
      magnitude = rounded < 0x7C00u ? rounded : 0x7C00u;
    }
    bits = static_cast<uint16_t>(sign | magnitude);
  }
  FASTGRAD_HOST_DEVICE explicit Float16(double value) : Float16(static_cast<float>(value)) {}

  FASTGRAD_HOST_DEVICE operator float() const {
    const uint32_t sign = (bits & 0x8000u) << 16;
    const uint32_t exponent = bits >> 10 & 0x1Fu;
    const uint32_t mantissa = bits & 0x3FFu;
    if (exponent == 0) {
      const float size = static_cast<float>(mantissa) * 0x1p-24f;
      return float_of(sign | bits_of(size));
    }
    return float_of(sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | mantissa << 13);
  }
};

// The upper half of a float. From float: to the nearest, ties to even; from double by way of float.
struct BFloat16 {
  uint16_t bits;

  BFloat16() = default;
  FASTGRAD_HOST_DEVICE explicit BFloat16(float value) {
    const uint32_t all = bits_of(value);
    bits = value != value ? 0x7FC0u : static_cast<uint16_t>((all + 0x7FFFu + (all >> 16 & 1u)) >> 16);
  }
  FASTGRAD_HOST_DEVICE explicit BFloat16(double value) : BFloat16(static_cast<float>(value)) {}

  FASTGRAD_HOST_DEVICE operator float() const { return float_of(static_cast<uint32_t>(bits) << 16); }
};

}  // namespace fastgrad
