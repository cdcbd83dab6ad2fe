// CUDA launcher of fastgrad::direction_ on raw pointers; ops/direction.h holds the contract.
#pragma once

#include "launch.h"

namespace fastgrad::cuda {

// out[j * stride] for j in [0, size) on `cuda_stream`; does not synchronize. Returns the launch error.
cudaError_t launch_direction(
    double* out, int64_t stride, int64_t size, int64_t seed, int64_t stream, int64_t first, bool halved,
    cudaStream_t cuda_stream);

}  // namespace fastgrad::cuda
