// CUDA kernel of fastgrad::realize_: the direction is computed in registers, and not stored.
#include "realize.h"

#include "../kernels/difference.h"
#include "../kernels/direction.h"
#include "device.h"

namespace fastgrad::cuda {
namespace {

// A thread takes a group of four coordinates, which share their random words.
template <typename T>
__global__ void realize_kernel(
    double* displacement, double* realized, const T* origin, int64_t size, int64_t seed, int64_t stream, int64_t first,
    int64_t groups, double eps, double relative_step) {
  for (int64_t g = first_element(); g < groups; g += element_step()) {
    const int64_t group = first / 4 + g;
    const Words4 words = direction_words(seed, stream, group);
    for (int64_t coordinate = 4 * group; coordinate < 4 * group + 4; ++coordinate) {
      const int64_t c = coordinate - first;
      if (c >= 0 && c < size) {
        const T x = origin[c];
        const double step = component_of(words, coordinate, /*halved=*/false) * directional_step(x, eps, relative_step);
        displacement[c] = step;
        realized[c] = realized_component(x, step, eps);
      }
    }
  }
}

}  // namespace

cudaError_t launch_realize(
    double* displacement, double* realized, const void* origin, RealType type, int64_t size, int64_t seed,
    int64_t stream, int64_t first, double eps, double relative_step, cudaStream_t cuda_stream) {
  if (size == 0) {
    return cudaSuccess;
  }
  const int64_t groups = direction_groups(first, size);
  return with_real_type(type, [&](auto zero) {
    using T = decltype(zero);
    FASTGRAD_LAUNCH(
        realize_kernel<T>, blocks_for(groups), threads_per_block, cuda_stream, displacement, realized,
        static_cast<const T*>(origin), size, seed, stream, first, groups, eps, relative_step);
    return cudaGetLastError();
  });
}

}  // namespace fastgrad::cuda
