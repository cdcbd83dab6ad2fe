// CUDA kernel of fastgrad::perturb_coordinates_.
#include "perturb_coordinates.h"

#include "../kernels/difference.h"
#include "../kernels/sparse.h"
#include "device.h"

namespace fastgrad::cuda {
namespace {

template <typename T>
__global__ void perturb_coordinates_kernel(
    T* values, const T* origin, int64_t size, const int64_t* coordinates, int64_t count, int sign, double eps,
    double relative_step) {
  for (int64_t k = first_element(); k < count; k += element_step()) {
    const int64_t c = coordinates[k];
    if (is_within(c, size)) {
      values[c] = moved_coordinate(origin[c], sign, eps, relative_step);
    }
  }
}

}  // namespace

cudaError_t launch_perturb_coordinates(
    void* values, const void* origin, RealType type, int64_t size, const int64_t* coordinates, int64_t count, int sign,
    double eps, double relative_step, cudaStream_t cuda_stream) {
  if (count == 0) {
    return cudaSuccess;
  }
  return with_real_type(type, [&](auto zero) {
    using T = decltype(zero);
    FASTGRAD_LAUNCH(
        perturb_coordinates_kernel<T>, blocks_for(count), threads_per_block, cuda_stream, static_cast<T*>(values),
        static_cast<const T*>(origin), size, coordinates, count, sign, eps, relative_step);
    return cudaGetLastError();
  });
}

}  // namespace fastgrad::cuda
