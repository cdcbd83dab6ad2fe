// CUDA launcher of fastgrad::decompress_ on raw pointers; ops/decompress.h holds the contract.
#pragma once

#include "launch.h"

namespace fastgrad::cuda {

// For entries[k], k in [0, count); subtrahend: null where there is none. Does not synchronize; returns the
// launch error.
cudaError_t launch_decompress(
    double* values, const double* compressed, const double* subtrahend, const int64_t* positions,
    const int64_t* entries, int64_t count, cudaStream_t cuda_stream);

}  // namespace fastgrad::cuda
