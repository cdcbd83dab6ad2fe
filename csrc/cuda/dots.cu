// CUDA kernels of fastgrad::dots: each block adds up a chunk of a row, then one block the chunks of each row.
#include "dots.h"

#include "../kernels/products.h"
#include "device.h"

#include <cmath>

namespace fastgrad::cuda {
namespace {

// A sum, and the sum of the absolute values of its terms.
struct Sums {
  double signed_sum, size;
};

__device__ inline Sums added(Sums left, Sums right) {
  return {left.signed_sum + right.signed_sum, left.size + right.size};
}

__global__ void dots_kernel(
    double* __restrict__ partial, const double* __restrict__ rows, const double* __restrict__ vector, int64_t count,
    int64_t size, int64_t chunks) {
  for (int64_t piece = blockIdx.x; piece < count * chunks; piece += gridDim.x) {
    const double* const row = rows + piece / chunks * size;
    const int64_t first = piece % chunks * dots_chunk;
    const int64_t last = first + dots_chunk < size ? first + dots_chunk : size;
    Sums sums{0, 0};
    for (int64_t j = first + threadIdx.x; j < last; j += threads_per_block) {
      const double term = dot_term(row[j], vector[j]);
      sums = added(sums, {term, std::fabs(term)});
    }
    sums = block_reduce(sums, added);
    if (threadIdx.x == 0) {
      partial[2 * piece] = sums.signed_sum;
      partial[2 * piece + 1] = sums.size;
    }
  }
}

__global__ void chunks_kernel(
    double* __restrict__ result, const double* __restrict__ partial, int64_t count, int64_t chunks) {
  for (int64_t row = blockIdx.x; row < count; row += gridDim.x) {
    Sums sums{0, 0};
    for (int64_t piece = row * chunks + threadIdx.x; piece < (row + 1) * chunks; piece += threads_per_block) {
      sums = added(sums, {partial[2 * piece], partial[2 * piece + 1]});
    }
    sums = block_reduce(sums, added);
    if (threadIdx.x == 0) {
      result[2 * row] = sums.signed_sum;
      result[2 * row + 1] = sums.size;
    }
  }
}

}  // namespace

cudaError_t launch_dots(
    double* result, double* partial, const double* rows, const double* vector, int64_t count, int64_t size,
    cudaStream_t cuda_stream) {
  if (count == 0) {
    return cudaSuccess;
  }
  const int64_t chunks = dots_chunks(size);
  if (chunks > 0) {
    FASTGRAD_LAUNCH(
        dots_kernel, blocks_for(count * chunks, 1), threads_per_block, cuda_stream, partial, rows, vector, count, size,
        chunks);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
      return error;
    }
  }
  FASTGRAD_LAUNCH(chunks_kernel, blocks_for(count, 1), threads_per_block, cuda_stream, result, partial, count, chunks);
  return cudaGetLastError();
}

}  // namespace fastgrad::cuda
