// CUDA kernel of fastgrad::displace_.
#include "displace.h"

#include "../kernels/difference.h"
#include "device.h"

namespace fastgrad::cuda {
namespace {

template <typename T>
__global__ void displace_kernel(
    T* x, const T* origin, const double* displacement, int64_t stride, int64_t size, double scale) {
  for (int64_t c = first_element(); c < size; c += element_step()) {
    x[c] = displaced(origin[c], displacement[c * stride], scale);
  }
}

}  // namespace

cudaError_t launch_displace(
    void* x, const void* origin, RealType type, const double* displacement, int64_t stride, int64_t size, double scale,
    cudaStream_t cuda_stream) {
  if (size == 0) {
    return cudaSuccess;
  }
  return with_real_type(type, [&](auto zero) {
    using T = decltype(zero);
    FASTGRAD_LAUNCH(
        displace_kernel<T>, blocks_for(size), threads_per_block, cuda_stream, static_cast<T*>(x),
        static_cast<const T*>(origin), displacement, stride, size, scale);
    return cudaGetLastError();
  });
}

}  // namespace fastgrad::cuda
