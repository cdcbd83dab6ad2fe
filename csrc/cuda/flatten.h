// CUDA launcher of fastgrad::flatten_ on raw pointers; ops/flatten.h holds the contract.
#pragma once

#include "launch.h"

namespace fastgrad::cuda {

// out[c * stride] = values[c] for c in [0, size); values: contiguous, of a type. Does not synchronize;
// returns the launch error.
cudaError_t launch_flatten(
    double* out, int64_t stride, const void* values, RealType type, int64_t size, cudaStream_t cuda_stream);

}  // namespace fastgrad::cuda
