// Arguments of the launchers: types, strides, streams; sizes of grids.
#pragma once

#include "../kernels/host_device.h"
#include "../kernels/low_precision.h"

#ifdef FASTGRAD_EMULATE_CUDA
#include "cuda_emulation.h"
#else
#include <cuda_runtime.h>
#define FASTGRAD_MOST_BLOCKS 4096  // fills any device
#endif

#include <cstdint>

namespace fastgrad::cuda {

constexpr int threads_per_block = 256;

// Number of blocks for `size` > 0 pieces of work, by the number per block.
inline unsigned blocks_for(int64_t size, int64_t per_block = threads_per_block) {
  const int64_t blocks = (size - 1) / per_block + 1;
  return static_cast<unsigned>(blocks < FASTGRAD_MOST_BLOCKS ? blocks : FASTGRAD_MOST_BLOCKS);
}

// The dtype of a tensor's elements or, if they are complex, of their real and imaginary parts.
enum class RealType { float64, float32, float16, bfloat16 };

// Calls visit with a value of the type; only the type matters.
template <typename Visit>
cudaError_t with_real_type(RealType type, const Visit& visit) {
  switch (type) {
    case RealType::float64:
      return visit(double());
    case RealType::float32:
      return visit(float());
    case RealType::float16:
      return visit(Float16());
    default:
      return visit(BFloat16());
  }
}

// A matrix with any strides, which no other pointer of its kernel overlaps; T is double or const double.
template <typename T>
struct Matrix {
  T* __restrict__ values;
  int64_t row_stride, column_stride;

  FASTGRAD_HOST_DEVICE T& at(int64_t row, int64_t column) const {
    return values[row * row_stride + column * column_stride];
  }
};

}  // namespace fastgrad::cuda
