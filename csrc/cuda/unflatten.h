// CUDA launcher of fastgrad::unflatten_ on raw pointers; ops/unflatten.h holds the contract.
#pragma once

#include "launch.h"

namespace fastgrad::cuda {

// values[c] = coordinates[c * stride], rounded to the type, for c in [0, size); values: contiguous. Does
// not synchronize; returns the launch error.
cudaError_t launch_unflatten(
    void* values, RealType type, const double* coordinates, int64_t stride, int64_t size, cudaStream_t cuda_stream);

}  // namespace fastgrad::cuda
