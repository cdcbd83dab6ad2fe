// CUDA kernel of fastgrad::central_difference_: the width is found on the device, by every thread for itself.
#include "central_difference.h"

#include "../kernels/difference.h"
#include "device.h"

namespace fastgrad::cuda {
namespace {

template <typename T>
__device__ double width_at(const void* origin, int64_t coordinate, double eps, double relative_step) {
  const T value = static_cast<const T*>(origin)[coordinate];
  return realized_width(value, coordinate_step(value, eps, relative_step));
}

// A branch that all threads take alike, instead of a kernel for each pair of types.
__device__ double width_at(const void* origin, RealType type, int64_t coordinate, double eps, double relative_step) {
  switch (type) {
    case RealType::float64:
      return width_at<double>(origin, coordinate, eps, relative_step);
    case RealType::float32:
      return width_at<float>(origin, coordinate, eps, relative_step);
    case RealType::float16:
      return width_at<Float16>(origin, coordinate, eps, relative_step);
    default:
      return width_at<BFloat16>(origin, coordinate, eps, relative_step);
  }
}

template <typename T>
__global__ void central_difference_kernel(
    double* column, int64_t stride, const T* minus, int64_t size, const void* origin, RealType origin_type,
    int64_t coordinate, double eps, double relative_step) {
  const double width = width_at(origin, origin_type, coordinate, eps, relative_step);
  for (int64_t i = first_element(); i < size; i += element_step()) {
    column[i * stride] = difference_quotient(column[i * stride], minus[i], width);
  }
}

}  // namespace

cudaError_t launch_central_difference(
    double* column, int64_t stride, const void* minus, RealType minus_type, int64_t size, const void* origin,
    RealType origin_type, int64_t coordinate, double eps, double relative_step, cudaStream_t cuda_stream) {
  if (size == 0) {
    return cudaSuccess;
  }
  return with_real_type(minus_type, [&](auto zero) {
    using T = decltype(zero);
    FASTGRAD_LAUNCH(
        central_difference_kernel<T>, blocks_for(size), threads_per_block, cuda_stream, column, stride,
        static_cast<const T*>(minus), size, origin, origin_type, coordinate, eps, relative_step);
    return cudaGetLastError();
  });
}

}  // namespace fastgrad::cuda
