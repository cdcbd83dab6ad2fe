// CUDA launchers of the element-wise operators on raw pointers; ops/NAME.h holds the contract of each.
//
// Tensors are contiguous unless a stride is given, and `size` counts real coordinates. None of them synchronizes; all
// return the launch error, and success without a launch if there is nothing to do.
#pragma once

#include "launch.h"

namespace fastgrad::cuda {

// out[c * stride] = values[c].
cudaError_t launch_flatten(
    double* out, int64_t stride, const void* values, RealType type, int64_t size, cudaStream_t cuda_stream);

// values[c] = coordinates[c * stride].
cudaError_t launch_unflatten(
    void* values, RealType type, const double* coordinates, int64_t stride, int64_t size, cudaStream_t cuda_stream);

// out[j * stride] for j in [0, size): components of a random direction, from `first` on.
cudaError_t launch_direction(
    double* out, int64_t stride, int64_t size, int64_t seed, int64_t stream, int64_t first, bool halved,
    cudaStream_t cuda_stream);

// Where a coordinate lies in memory, and in the contiguous origin.
struct Place {
  int64_t target, coordinate;
};

// x[moved.target] = origin[moved.coordinate], perturbed, and x[restored.target] = origin[restored.coordinate],
// unchanged: the same place if nothing is restored. A single thread does this, so that no value is copied to the host.
cudaError_t launch_perturb_coordinate(
    void* x, const void* origin, Place moved, Place restored, RealType type, int sign, double eps, double relative_step,
    cudaStream_t cuda_stream);

// values[c] = origin[c], perturbed, for each c of `coordinates` that is within `size`; and unchanged for each c of
// `restored`.
cudaError_t launch_perturb_coordinates(
    void* values, const void* origin, RealType type, int64_t size, const int64_t* coordinates, int64_t count,
    const int64_t* restored, int64_t restored_count, int sign, double eps, double relative_step,
    cudaStream_t cuda_stream);

// x[c] = origin[c] + scale * displacement[c * stride].
cudaError_t launch_displace(
    void* x, const void* origin, RealType type, const double* displacement, int64_t stride, int64_t size, double scale,
    cudaStream_t cuda_stream);

// The displacement along a random direction, and the direction after rounding to the dtype of `origin`.
cudaError_t launch_realize(
    double* displacement, double* realized, const void* origin, RealType type, int64_t size, int64_t seed,
    int64_t stream, int64_t first, double eps, double relative_step, cudaStream_t cuda_stream);

// column[i * stride] = (column[i * stride] - minus[i]) / width, with the width of the step of origin[coordinate].
cudaError_t launch_central_difference(
    double* column, int64_t stride, const void* minus, RealType minus_type, int64_t size, const void* origin,
    RealType origin_type, int64_t coordinate, double eps, double relative_step, cudaStream_t cuda_stream);

// One step of Richardson extrapolation for each output, and the noise of its differences.
cudaError_t launch_richardson(
    double* derivative, double* noise, const double* base, const double* plus, const double* minus,
    const double* half_plus, const double* half_minus, int64_t size, double eps, double ulp, cudaStream_t cuda_stream);

// values[e] = compressed[positions[e]], less the subtrahend if there is one, for each e of `entries`; NaN where a
// position is not in [0, size).
cudaError_t launch_decompress(
    double* values, int64_t nonzeros, const double* compressed, const double* subtrahend, int64_t size,
    const int64_t* positions, const int64_t* entries, int64_t count, cudaStream_t cuda_stream);

}  // namespace fastgrad::cuda
