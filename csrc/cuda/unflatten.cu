// CUDA kernel of fastgrad::unflatten_.
#include "unflatten.h"

#include "device.h"

namespace fastgrad::cuda {
namespace {

template <typename T>
__global__ void unflatten_kernel(T* values, const double* coordinates, int64_t stride, int64_t size) {
  for (int64_t c = first_element(); c < size; c += element_step()) {
    values[c] = static_cast<T>(coordinates[c * stride]);
  }
}

}  // namespace

cudaError_t launch_unflatten(
    void* values, RealType type, const double* coordinates, int64_t stride, int64_t size, cudaStream_t cuda_stream) {
  if (size == 0) {
    return cudaSuccess;
  }
  return with_real_type(type, [&](auto zero) {
    using T = decltype(zero);
    FASTGRAD_LAUNCH(
        unflatten_kernel<T>, blocks_for(size), threads_per_block, cuda_stream, static_cast<T*>(values), coordinates,
        stride, size);
    return cudaGetLastError();
  });
}

}  // namespace fastgrad::cuda
