// Shared by the kernels: one way to launch a kernel, and to declare shared memory, so that the CPU emulation of the
// tests can replace a device.
#pragma once

#include "launch.h"

#ifndef FASTGRAD_EMULATE_CUDA
#define FASTGRAD_SHARED(type, name, count) __shared__ type name[count]
#define FASTGRAD_LAUNCH(kernel, grid, block, stream, ...) kernel<<<(grid), (block), 0, (stream)>>>(__VA_ARGS__)
#endif

namespace fastgrad::cuda {

// The first element and the step of a thread in a grid-stride loop.
__device__ inline int64_t first_element() { return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ inline int64_t element_step() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

// Reduces values[0], ..., values[threads_per_block - 1] in shared memory, one value per thread, to values[0]. They are
// always joined in the same order. Every thread of the block must call this function.
template <typename T, typename Join>
__device__ void block_reduce_in_place(T* values, Join join) {
  const int own = static_cast<int>(threadIdx.x);
  for (int half = threads_per_block / 2; half > 0; half /= 2) {
    __syncthreads();
    if (own < half) {
      values[own] = join(values[own], values[own + half]);
    }
  }
}

// Reduces the values of all threads of a block of threads_per_block, one per thread. They are always joined in the same
// order. Every thread of the block must call this function; only thread 0 gets the result. T is made of doubles.
template <typename T, typename Join>
__device__ T block_reduce(T value, Join join) {
  static_assert(sizeof(T) % sizeof(double) == 0 && alignof(T) <= alignof(double), "T is made of doubles");
  FASTGRAD_SHARED(double, memory, threads_per_block * (sizeof(T) / sizeof(double)));
  T* const values = reinterpret_cast<T*>(static_cast<double*>(memory));
  const int own = static_cast<int>(threadIdx.x);
  values[own] = value;
  block_reduce_in_place(values, join);
  value = values[own];
  __syncthreads();  // the next call uses the same memory
  return value;
}

}  // namespace fastgrad::cuda
