// CUDA launchers of fastgrad::dots on raw pointers; ops/dots.h holds the contract.
#pragma once

#include "launch.h"

namespace fastgrad::cuda {

// Columns that one block adds up, on any device, so that the order of the sums is always the same.
constexpr int64_t dots_chunk = 16 * threads_per_block;

// Pieces of a row, each added up by a block.
inline int64_t dots_chunks(int64_t size) { return (size + dots_chunk - 1) / dots_chunk; }

// result: shape (count, 2), contiguous. rows: shape (count, size), contiguous. vector: shape (size,).
// partial: memory for 2 * count * dots_chunks(size) doubles, written. Does not synchronize; returns the
// launch error.
cudaError_t launch_dots(
    double* result, double* partial, const double* rows, const double* vector, int64_t count, int64_t size,
    cudaStream_t cuda_stream);

}  // namespace fastgrad::cuda
