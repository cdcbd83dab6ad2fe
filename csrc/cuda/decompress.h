// CUDA launcher of fastgrad::decompress_ on raw pointers; ops/decompress.h holds the contract.
#pragma once

#include "launch.h"

namespace fastgrad::cuda {

// For entries[k], k in [0, count); values and positions have nonzeros elements, compressed and subtrahend, which is
// null where there is none, `size`: an entry outside of the first writes nothing, a position outside of the second
// gives NaN. Does not synchronize; returns the launch error.
cudaError_t launch_decompress(
    double* values, int64_t nonzeros, const double* compressed, const double* subtrahend, int64_t size,
    const int64_t* positions, const int64_t* entries, int64_t count, cudaStream_t cuda_stream);

}  // namespace fastgrad::cuda
