// CUDA launcher of fastgrad::central_difference_ on raw pointers; ops/central_difference.h holds the contract.
#pragma once

#include "launch.h"

namespace fastgrad::cuda {

// column[i * stride] for i in [0, size); minus, origin: contiguous, each of a type of its own. Does not
// synchronize; returns the launch error.
cudaError_t launch_central_difference(
    double* column, int64_t stride, const void* minus, RealType minus_type, int64_t size, const void* origin,
    RealType origin_type, int64_t coordinate, double eps, double relative_step, cudaStream_t cuda_stream);

}  // namespace fastgrad::cuda
