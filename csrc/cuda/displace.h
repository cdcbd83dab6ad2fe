// CUDA launcher of fastgrad::displace_ on raw pointers; ops/displace.h holds the contract.
#pragma once

#include "launch.h"

namespace fastgrad::cuda {

// x[c] = origin[c] + scale * displacement[c * stride] for c in [0, size); x, origin: contiguous, of a type.
// Does not synchronize; returns the launch error.
cudaError_t launch_displace(
    void* x, const void* origin, RealType type, const double* displacement, int64_t stride, int64_t size, double scale,
    cudaStream_t cuda_stream);

}  // namespace fastgrad::cuda
