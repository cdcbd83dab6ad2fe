// CUDA kernel of fastgrad::realize_: the direction is computed in registers, and not stored.
#include "realize.h"

#include "../kernels/difference.h"
#include "../kernels/direction.h"
#include "device.h"

namespace fastgrad::cuda {
namespace {

template <typename T>
__global__ void realize_kernel(
    double* displacement, double* realized, const T* origin, int64_t size, int64_t seed, int64_t stream, int64_t first,
    double eps, double relative_step) {
  for (int64_t c = first_element(); c < size; c += element_step()) {
    const double step = direction_component(seed, stream, first + c) * directional_step(origin[c], eps, relative_step);
    displacement[c] = step;
    realized[c] = realized_component(origin[c], step, eps);
  }
}

}  // namespace

cudaError_t launch_realize(
    double* displacement, double* realized, const void* origin, RealType type, int64_t size, int64_t seed,
    int64_t stream, int64_t first, double eps, double relative_step, cudaStream_t cuda_stream) {
  if (size == 0) {
    return cudaSuccess;
  }
  return with_real_type(type, [&](auto zero) {
    using T = decltype(zero);
    FASTGRAD_LAUNCH(
        realize_kernel<T>, blocks_for(size), threads_per_block, cuda_stream, displacement, realized,
        static_cast<const T*>(origin), size, seed, stream, first, eps, relative_step);
    return cudaGetLastError();
  });
}

}  // namespace fastgrad::cuda
