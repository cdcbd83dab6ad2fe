// CUDA launcher of fastgrad::richardson_ on raw pointers; ops/richardson.h holds the contract.
#pragma once

#include "launch.h"

namespace fastgrad::cuda {

// All contiguous, `size` outputs. Does not synchronize; returns the launch error.
cudaError_t launch_richardson(
    double* derivative, double* noise, const double* base, const double* plus, const double* minus,
    const double* half_plus, const double* half_minus, int64_t size, double eps, double ulp, cudaStream_t cuda_stream);

}  // namespace fastgrad::cuda
