// CUDA kernel of fastgrad::project_entries_.
#include "project_entries.h"

#include "../kernels/sparse.h"
#include "device.h"

#include <cmath>

namespace fastgrad::cuda {
namespace {

__global__ void project_entries_kernel(
    double* sums, double* squares, int64_t size, const double* vector, int64_t weights, const int64_t* sources,
    const int64_t* targets, const double* entries, int64_t count) {
  for (int64_t e = first_element(); e < count; e += element_step()) {
    if (!is_within(targets[e], size)) {
      continue;
    }
    const double term = is_within(sources[e], weights) ? vector[sources[e]] * entries[e] : NAN;
    atomicAdd(sums + targets[e], term);
    if (squares != nullptr) {
      atomicAdd(squares + targets[e], term * term);
    }
  }
}

}  // namespace

cudaError_t launch_project_entries(
    double* sums, double* squares, int64_t size, const double* vector, int64_t weights, const int64_t* sources,
    const int64_t* targets, const double* entries, int64_t count, cudaStream_t cuda_stream) {
  if (count == 0) {
    return cudaSuccess;
  }
  FASTGRAD_LAUNCH(
      project_entries_kernel, blocks_for(count), threads_per_block, cuda_stream, sums, squares, size, vector, weights,
      sources, targets, entries, count);
  return cudaGetLastError();
}

}  // namespace fastgrad::cuda
