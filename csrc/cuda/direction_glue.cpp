// Registers the CUDA launcher of fastgrad::direction_: checks, device guard, the caller's stream.
#include "../ops/direction.h"
#include "direction.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

namespace fastgrad {
namespace {

void direction_cuda(const at::Tensor& out, int64_t seed, int64_t stream, int64_t first, bool halved) {
  check_direction(out, first);
  const c10::cuda::CUDAGuard guard(out.device());
  C10_CUDA_CHECK(
      cuda::launch_direction(
          out.mutable_data_ptr<double>(), out.stride(0), out.numel(), seed, stream, first, halved,
          c10::cuda::getCurrentCUDAStream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(fastgrad, CUDA, library) { library.impl("direction_", &direction_cuda); }

}  // namespace fastgrad
