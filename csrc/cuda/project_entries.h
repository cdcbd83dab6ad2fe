// CUDA launcher of fastgrad::project_entries_ on raw pointers; ops/project_entries.h holds the contract.
#pragma once

#include "launch.h"

namespace fastgrad::cuda {

// Most entries that one thread adds up: longer runs are added up in levels, in an order that depends only on the
// targets.
constexpr int64_t entries_window = 32;

inline int64_t entries_windows(int64_t count) { return (count + entries_window - 1) / entries_window; }

// Sums that the levels pass on: the first and the last of each window.
inline int64_t project_entries_partials(int64_t count) {
  int64_t all = 0;
  while (count > entries_window) {
    count = 2 * entries_windows(count);
    all += count;
  }
  return all;
}

// targets: ascending; order[e]: which of sources and entries belongs to targets[e]. squares: null if none are needed.
// sums and squares have `size` elements, and vector has `weights`. A target outside sums adds nothing, and a source
// outside vector adds NaN. partial_targets, partial_sums, partial_squares: memory for
// project_entries_partials(count) each, written. Does not synchronize; returns the launch error.
cudaError_t launch_project_entries(
    double* sums, double* squares, int64_t size, const double* vector, int64_t weights, const int64_t* sources,
    const int64_t* targets, const int64_t* order, const double* entries, int64_t count, int64_t* partial_targets,
    double* partial_sums, double* partial_squares, cudaStream_t cuda_stream);

}  // namespace fastgrad::cuda
