// CUDA kernel of fastgrad::perturb_coordinate_: one thread, so that nothing travels to the host and back.
#include "perturb_coordinate.h"

#include "../kernels/difference.h"
#include "device.h"

namespace fastgrad::cuda {
namespace {

template <typename T>
__global__ void perturb_coordinate_kernel(T* target, const T* value, int sign, double eps, double relative_step) {
  *target = moved_coordinate(*value, sign, eps, relative_step);
}

}  // namespace

cudaError_t launch_perturb_coordinate(
    void* x, int64_t target, const void* origin, int64_t coordinate, RealType type, int sign, double eps,
    double relative_step, cudaStream_t cuda_stream) {
  return with_real_type(type, [&](auto zero) {
    using T = decltype(zero);
    FASTGRAD_LAUNCH(
        perturb_coordinate_kernel<T>, 1, 1, cuda_stream, static_cast<T*>(x) + target,
        static_cast<const T*>(origin) + coordinate, sign, eps, relative_step);
    return cudaGetLastError();
  });
}

}  // namespace fastgrad::cuda
