// CUDA kernel of fastgrad::flatten_.
#include "flatten.h"

#include "device.h"

namespace fastgrad::cuda {
namespace {

template <typename T>
__global__ void flatten_kernel(double* out, int64_t stride, const T* values, int64_t size) {
  for (int64_t c = first_element(); c < size; c += element_step()) {
    out[c * stride] = static_cast<double>(values[c]);
  }
}

}  // namespace

cudaError_t launch_flatten(
    double* out, int64_t stride, const void* values, RealType type, int64_t size, cudaStream_t cuda_stream) {
  if (size == 0) {
    return cudaSuccess;
  }
  return with_real_type(type, [&](auto zero) {
    using T = decltype(zero);
    FASTGRAD_LAUNCH(
        flatten_kernel<T>, blocks_for(size), threads_per_block, cuda_stream, out, stride, static_cast<const T*>(values),
        size);
    return cudaGetLastError();
  });
}

}  // namespace fastgrad::cuda
