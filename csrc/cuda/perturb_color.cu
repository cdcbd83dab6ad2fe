// CUDA kernel of fastgrad::perturb_color_: the color is read on the device, so that a captured launch serves all.
#include "perturb_color.h"

#include "../kernels/difference.h"
#include "device.h"

namespace fastgrad::cuda {
namespace {

template <typename T>
__global__ void perturb_color_kernel(
    T* values, const T* origin, const int64_t* colors, const int64_t* color, int64_t size, int sign, double eps,
    double relative_step) {
  for (int64_t c = first_element(); c < size; c += element_step()) {
    if (colors[c] == *color) {
      values[c] = moved_coordinate(origin[c], sign, eps, relative_step);
    }
  }
}

}  // namespace

cudaError_t launch_perturb_color(
    void* values, const void* origin, RealType type, const int64_t* colors, const int64_t* color, int64_t size,
    int sign, double eps, double relative_step, cudaStream_t cuda_stream) {
  if (size == 0) {
    return cudaSuccess;
  }
  return with_real_type(type, [&](auto zero) {
    using T = decltype(zero);
    FASTGRAD_LAUNCH(
        perturb_color_kernel<T>, blocks_for(size), threads_per_block, cuda_stream, static_cast<T*>(values),
        static_cast<const T*>(origin), colors, color, size, sign, eps, relative_step);
    return cudaGetLastError();
  });
}

}  // namespace fastgrad::cuda
