// CUDA launcher of fastgrad::perturb_coordinate_ on raw pointers; ops/perturb_coordinate.h holds the contract.
#pragma once

#include "launch.h"

namespace fastgrad::cuda {

// x[target] = origin[coordinate], moved; both of a type, counted in real coordinates. Does not
// synchronize; returns the launch error.
cudaError_t launch_perturb_coordinate(
    void* x, int64_t target, const void* origin, int64_t coordinate, RealType type, int sign, double eps,
    double relative_step, cudaStream_t cuda_stream);

}  // namespace fastgrad::cuda
