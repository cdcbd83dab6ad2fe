// CUDA launcher of fastgrad::perturb_color_ on raw pointers; ops/perturb_color.h holds the contract.
#pragma once

#include "launch.h"

namespace fastgrad::cuda {

// values[c] = origin[c], moved, for c in [0, size) with colors[c] == *color, which is read on the device;
// values, origin: contiguous, of a type. Does not synchronize; returns the launch error.
cudaError_t launch_perturb_color(
    void* values, const void* origin, RealType type, const int64_t* colors, const int64_t* color, int64_t size,
    int sign, double eps, double relative_step, cudaStream_t cuda_stream);

}  // namespace fastgrad::cuda
