// CUDA launcher of fastgrad::perturb_coordinates_ on raw pointers; ops/perturb_coordinates.h holds the contract.
#pragma once

#include "launch.h"

namespace fastgrad::cuda {

// values[c] = origin[c], moved, for c = coordinates[k], k in [0, count), and nothing for c outside of [0, size);
// values, origin: contiguous, of a type, `size` coordinates. Does not synchronize; returns the launch error.
cudaError_t launch_perturb_coordinates(
    void* values, const void* origin, RealType type, int64_t size, const int64_t* coordinates, int64_t count, int sign,
    double eps, double relative_step, cudaStream_t cuda_stream);

}  // namespace fastgrad::cuda
