// CUDA kernel of fastgrad::decompress_.
#include "decompress.h"

#include "../kernels/sparse.h"
#include "device.h"

#include <cmath>

namespace fastgrad::cuda {
namespace {

__global__ void decompress_kernel(
    double* values, int64_t nonzeros, const double* compressed, const double* subtrahend, int64_t size,
    const int64_t* positions, const int64_t* entries, int64_t count) {
  for (int64_t k = first_element(); k < count; k += element_step()) {
    const int64_t e = entries[k];
    if (is_within(e, nonzeros)) {
      values[e] = is_within(positions[e], size) ? decompressed(compressed, subtrahend, positions[e]) : NAN;
    }
  }
}

}  // namespace

cudaError_t launch_decompress(
    double* values, int64_t nonzeros, const double* compressed, const double* subtrahend, int64_t size,
    const int64_t* positions, const int64_t* entries, int64_t count, cudaStream_t cuda_stream) {
  if (count == 0) {
    return cudaSuccess;
  }
  FASTGRAD_LAUNCH(
      decompress_kernel, blocks_for(count), threads_per_block, cuda_stream, values, nonzeros, compressed, subtrahend,
      size, positions, entries, count);
  return cudaGetLastError();
}

}  // namespace fastgrad::cuda
