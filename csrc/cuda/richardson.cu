// CUDA kernel of fastgrad::richardson_.
#include "richardson.h"

#include "../kernels/richardson.h"
#include "device.h"

namespace fastgrad::cuda {
namespace {

__global__ void richardson_kernel(
    double* derivative, double* noise, const double* base, const double* plus, const double* minus,
    const double* half_plus, const double* half_minus, int64_t size, double eps, double ulp) {
  for (int64_t i = first_element(); i < size; i += element_step()) {
    const FourValues f{plus[i], minus[i], half_plus[i], half_minus[i]};
    derivative[i] = richardson(f, eps);
    noise[i] = louder(difference_noise(f, base[i], eps, ulp), noise[i]);
  }
}

}  // namespace

cudaError_t launch_richardson(
    double* derivative, double* noise, const double* base, const double* plus, const double* minus,
    const double* half_plus, const double* half_minus, int64_t size, double eps, double ulp, cudaStream_t cuda_stream) {
  if (size == 0) {
    return cudaSuccess;
  }
  FASTGRAD_LAUNCH(
      richardson_kernel, blocks_for(size), threads_per_block, cuda_stream, derivative, noise, base, plus, minus,
      half_plus, half_minus, size, eps, ulp);
  return cudaGetLastError();
}

}  // namespace fastgrad::cuda
