// CUDA launcher of fastgrad::realize_ on raw pointers; ops/realize.h holds the contract.
#pragma once

#include "launch.h"

namespace fastgrad::cuda {

// All contiguous, `size` real coordinates; origin of a type. Does not synchronize; returns the launch error.
cudaError_t launch_realize(
    double* displacement, double* realized, const void* origin, RealType type, int64_t size, int64_t seed,
    int64_t stream, int64_t first, double eps, double relative_step, cudaStream_t cuda_stream);

}  // namespace fastgrad::cuda
