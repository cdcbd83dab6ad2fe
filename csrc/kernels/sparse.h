// Entries of a sparse Jacobian in groups of one color.
#pragma once

#include "host_device.h"

#include <cstdint>

namespace fastgrad {

// The entry at a position of a compressed row or column; no subtrahend: null.
FASTGRAD_HOST_DEVICE double decompressed(const double* compressed, const double* subtrahend, int64_t position) {
  return subtrahend == nullptr ? compressed[position] : compressed[position] - subtrahend[position];
}

}  // namespace fastgrad
