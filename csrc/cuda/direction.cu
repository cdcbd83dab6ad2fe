// CUDA kernel of fastgrad::direction_: the components are computed in registers, written once.
#include "direction.h"

#include "../kernels/direction.h"
#include "device.h"

namespace fastgrad::cuda {
namespace {

// A thread takes a group of four coordinates, which share their random words.
__global__ void direction_kernel(
    double* out, int64_t stride, int64_t size, int64_t seed, int64_t stream, int64_t first, int64_t groups,
    bool halved) {
  for (int64_t g = first_element(); g < groups; g += element_step()) {
    const int64_t group = first / 4 + g;
    const Words4 words = direction_words(seed, stream, group);
    for (int64_t coordinate = 4 * group; coordinate < 4 * group + 4; ++coordinate) {
      if (coordinate >= first && coordinate < first + size) {
        out[(coordinate - first) * stride] = component_of(words, coordinate, halved);
      }
    }
  }
}

}  // namespace

cudaError_t launch_direction(
    double* out, int64_t stride, int64_t size, int64_t seed, int64_t stream, int64_t first, bool halved,
    cudaStream_t cuda_stream) {
  if (size == 0) {
    return cudaSuccess;
  }
  const int64_t groups = direction_groups(first, size);
  FASTGRAD_LAUNCH(
      direction_kernel, blocks_for(groups), threads_per_block, cuda_stream, out, stride, size, seed, stream, first,
      groups, halved);
  return cudaGetLastError();
}

}  // namespace fastgrad::cuda
