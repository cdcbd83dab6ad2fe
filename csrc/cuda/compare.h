// CUDA launchers of fastgrad::compare on raw pointers; ops/compare.h holds the contract.
#pragma once

#include "../kernels/comparison.h"
#include "launch.h"

namespace fastgrad::cuda {

// Largest number of blocks of threads, each with its own statistics; at least one, even without entries.
constexpr int64_t comparison_blocks = FASTGRAD_MOST_BLOCKS < 1024 ? FASTGRAD_MOST_BLOCKS : 1024;

// Compares rows x entries entries, each of two columns if complex_entries. fields: the result.
// partial: memory for comparison_blocks statistics, written. Does not synchronize; returns the launch error.
cudaError_t launch_compare(
    ComparisonStatistics* fields, ComparisonStatistics* partial, Matrix<const double> analytical,
    Matrix<const double> numerical, int64_t rows, int64_t entries, double atol, double rtol, bool complex_entries,
    bool equal_nan, cudaStream_t cuda_stream);

}  // namespace fastgrad::cuda
