// CUDA launcher of fastgrad::project_entries_ on raw pointers; ops/project_entries.h holds the contract.
#pragma once

#include "launch.h"

namespace fastgrad::cuda {

// squares: null where they are not wanted. sums and squares have `size` elements, vector `weights`: a target outside of
// the first adds nothing, a source outside of the second NaN. Terms that share a target are added in any order. Does
// not synchronize; returns the launch error.
cudaError_t launch_project_entries(
    double* sums, double* squares, int64_t size, const double* vector, int64_t weights, const int64_t* sources,
    const int64_t* targets, const double* entries, int64_t count, cudaStream_t cuda_stream);

}  // namespace fastgrad::cuda
