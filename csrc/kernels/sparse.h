// Entries of a sparse Jacobian in groups of one color.
#pragma once

#include "host_device.h"

#include <cstdint>

namespace fastgrad {

// Whether an index is in [0, size).
FASTGRAD_HOST_DEVICE bool is_within(int64_t index, int64_t size) {
  return static_cast<uint64_t>(index) < static_cast<uint64_t>(size);
}

// The entry at a position of a compressed row or column, minus that of `subtrahend` unless this is null.
FASTGRAD_HOST_DEVICE double decompressed(const double* compressed, const double* subtrahend, int64_t position) {
  return subtrahend == nullptr ? compressed[position] : compressed[position] - subtrahend[position];
}

}  // namespace fastgrad
