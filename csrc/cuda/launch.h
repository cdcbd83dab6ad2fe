// One way to launch a kernel, so that the CPU emulation of the tests can stand in for a device.
#pragma once

#ifdef FASTGRAD_EMULATE_CUDA
#include "cuda_emulation.h"
#else
#include <cuda_runtime.h>
#define FASTGRAD_LAUNCH(kernel, grid, block, stream, ...) kernel<<<(grid), (block), 0, (stream)>>>(__VA_ARGS__)
#define FASTGRAD_MOST_BLOCKS 4096  // fills any device
#endif

#include <cstdint>

namespace fastgrad::cuda {

constexpr int threads_per_block = 256;

// Blocks for a grid-stride loop over `size` > 0 elements.
inline unsigned blocks_for(int64_t size) {
  const int64_t blocks = (size + threads_per_block - 1) / threads_per_block;
  return static_cast<unsigned>(blocks < FASTGRAD_MOST_BLOCKS ? blocks : FASTGRAD_MOST_BLOCKS);
}

}  // namespace fastgrad::cuda
