// CUDA kernel of fastgrad::direction_: the components are computed in registers, written once.
#include "direction.h"

#include "../kernels/direction.h"
#include "device.h"

namespace fastgrad::cuda {
namespace {

__global__ void direction_kernel(
    double* out, int64_t stride, int64_t size, int64_t seed, int64_t stream, int64_t first, bool halved) {
  for (int64_t j = first_element(); j < size; j += element_step()) {
    out[j * stride] = direction_component(seed, stream, first + j, halved);
  }
}

}  // namespace

cudaError_t launch_direction(
    double* out, int64_t stride, int64_t size, int64_t seed, int64_t stream, int64_t first, bool halved,
    cudaStream_t cuda_stream) {
  if (size == 0) {
    return cudaSuccess;
  }
  FASTGRAD_LAUNCH(
      direction_kernel, blocks_for(size), threads_per_block, cuda_stream, out, stride, size, seed, stream, first,
      halved);
  return cudaGetLastError();
}

}  // namespace fastgrad::cuda
