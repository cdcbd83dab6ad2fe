// CUDA kernel of fastgrad::project_entries_: runs of one target are added up, window by window, level by level.
#include "project_entries.h"

#include "../kernels/products.h"
#include "../kernels/sparse.h"
#include "device.h"

#include <cmath>

namespace fastgrad::cuda {
namespace {

// The terms of the entries themselves.
struct Products {
  const double* vector;
  int64_t weights;
  const int64_t* sources;
  const int64_t* order;
  const double* entries;

  __device__ void add(double& sum, double& square, int64_t e) const {
    const int64_t own = order[e];
    add_term(sum, square, is_within(sources[own], weights) ? vector[sources[own]] : NAN, entries[own]);
  }
};

// Results that a level passed on.
struct Partials {
  const double* sums;
  const double* squares;

  __device__ void add(double& sum, double& square, int64_t e) const {
    sum += sums[e];
    square += squares[e];
  }
};

// The first thread of a run of one target within a window adds it up. A complete run goes to its target. A run that
// began before or goes on is passed to the next level, where each window has two places, for its first and its last
// run; unused places are zero.
template <typename Terms>
__global__ void project_entries_kernel(
    double* __restrict__ sums, double* __restrict__ squares, int64_t size, const int64_t* __restrict__ targets,
    Terms terms, int64_t count, int64_t* __restrict__ next_targets, double* __restrict__ next_sums,
    double* __restrict__ next_squares) {
  for (int64_t e = first_element(); e < count; e += element_step()) {
    const int64_t window = e / entries_window;
    const int64_t begin = window * entries_window;
    const int64_t end = begin + entries_window < count ? begin + entries_window : count;
    const int64_t target = targets[e];
    if (e > begin && targets[e - 1] == target) {
      continue;
    }
    double sum = 0;
    double square = 0;
    int64_t last = e;
    do {
      terms.add(sum, square, last);
    } while (++last < end && targets[last] == target);
    const bool is_whole = !(e == begin && begin > 0 && targets[begin - 1] == target) &&
                          !(last == end && end < count && targets[end] == target);
    if (is_whole && is_within(target, size)) {
      sums[target] += sum;
      if (squares != nullptr) {
        squares[target] += square;
      }
    }
    const auto hand_on = [&](int64_t place, bool counts) {
      next_targets[place] = target;
      next_sums[place] = counts ? sum : 0;
      next_squares[place] = counts ? square : 0;
    };
    if (count > entries_window && e == begin) {
      hand_on(2 * window, !is_whole);
    }
    if (count > entries_window && last == end) {
      hand_on(2 * window + 1, !is_whole && e != begin);
    }
  }
}

}  // namespace

cudaError_t launch_project_entries(
    double* sums, double* squares, int64_t size, const double* vector, int64_t weights, const int64_t* sources,
    const int64_t* targets, const int64_t* order, const double* entries, int64_t count, int64_t* partial_targets,
    double* partial_sums, double* partial_squares, cudaStream_t cuda_stream) {
  if (count == 0) {
    return cudaSuccess;
  }
  const Products products{vector, weights, sources, order, entries};
  FASTGRAD_LAUNCH(
      project_entries_kernel, blocks_for(count), threads_per_block, cuda_stream, sums, squares, size, targets, products,
      count, partial_targets, partial_sums, partial_squares);
  cudaError_t error = cudaGetLastError();
  while (error == cudaSuccess && count > entries_window) {
    count = 2 * entries_windows(count);
    const int64_t* const own_targets = partial_targets;
    const Partials partials{partial_sums, partial_squares};
    partial_targets += count;
    partial_sums += count;
    partial_squares += count;
    FASTGRAD_LAUNCH(
        project_entries_kernel, blocks_for(count), threads_per_block, cuda_stream, sums, squares, size, own_targets,
        partials, count, partial_targets, partial_sums, partial_squares);
    error = cudaGetLastError();
  }
  return error;
}

}  // namespace fastgrad::cuda
