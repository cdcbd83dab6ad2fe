// CUDA kernels of fastgrad::compare: statistics of each block of threads, then those of all.
#include "compare.h"

#include "device.h"

namespace fastgrad::cuda {
namespace {

// A tile is 32 entries wide, so that a warp reads neighbors of a row-major operand, and as many high, so
// that the lines of a column-major one are used whole while the cache holds them.
constexpr int64_t tile_rows = 32;
constexpr int64_t rows_at_once = threads_per_block / stripe_columns;

__device__ Entry entry_at(const Matrix<const double>& block, int64_t row, int64_t entry, bool is_complex) {
  return is_complex ? Entry{block.at(row, 2 * entry), block.at(row, 2 * entry + 1)} : Entry{block.at(row, entry), 0.0};
}

__global__ void compare_kernel(
    ComparisonStatistics* __restrict__ partial, Matrix<const double> analytical, Matrix<const double> numerical,
    int64_t rows, int64_t entries, double atol, double rtol, bool complex_entries, bool equal_nan) {
  ComparisonStatistics statistics;
  const int64_t tiles_high = (rows + tile_rows - 1) / tile_rows;
  const int64_t stripes = (entries + stripe_columns - 1) / stripe_columns;
  // Down the stripes, one by one: every thread visits its entries in the order of kernels/comparison.h. A step of the
  // grid is so many stripes and tiles; a division for each tile would take longer than its entries.
  const int64_t stripe_step = gridDim.x / tiles_high;
  const int64_t tile_step = gridDim.x % tiles_high;
  int64_t stripe = blockIdx.x / tiles_high;
  int64_t tile = blockIdx.x % tiles_high;
  for (; stripe < stripes; stripe += stripe_step, tile += tile_step) {
    if (tile >= tiles_high) {
      tile -= tiles_high;
      if (++stripe >= stripes) {
        break;
      }
    }
    const int64_t k = stripe * stripe_columns + threadIdx.x % stripe_columns;
    const int64_t first = tile * tile_rows;
    const int64_t last = first + tile_rows < rows ? first + tile_rows : rows;
    for (int64_t i = first + threadIdx.x / stripe_columns; i < last && k < entries; i += rows_at_once) {
      reduce(
          statistics, entry_at(analytical, i, k, complex_entries), entry_at(numerical, i, k, complex_entries), i, k,
          atol, rtol, equal_nan);
    }
  }
  statistics = block_reduce(statistics, combine);
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = statistics;
  }
}

__global__ void combine_kernel(
    ComparisonStatistics* __restrict__ fields, const ComparisonStatistics* __restrict__ partial, int64_t count) {
  ComparisonStatistics statistics;
  for (int64_t b = threadIdx.x; b < count; b += threads_per_block) {
    statistics = combine(statistics, partial[b]);
  }
  statistics = block_reduce(statistics, combine);
  if (threadIdx.x == 0) {
    *fields = statistics;
  }
}

}  // namespace

cudaError_t launch_compare(
    ComparisonStatistics* fields, ComparisonStatistics* partial, Matrix<const double> analytical,
    Matrix<const double> numerical, int64_t rows, int64_t entries, double atol, double rtol, bool complex_entries,
    bool equal_nan, cudaStream_t cuda_stream) {
  const int64_t tiles = (rows + tile_rows - 1) / tile_rows * ((entries + stripe_columns - 1) / stripe_columns);
  const int64_t blocks = tiles < comparison_blocks ? tiles : comparison_blocks;
  if (blocks > 0) {
    FASTGRAD_LAUNCH(
        compare_kernel, static_cast<unsigned>(blocks), threads_per_block, cuda_stream, partial, analytical, numerical,
        rows, entries, atol, rtol, complex_entries, equal_nan);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
      return error;
    }
  }
  FASTGRAD_LAUNCH(combine_kernel, 1, threads_per_block, cuda_stream, fields, partial, blocks);
  return cudaGetLastError();
}

}  // namespace fastgrad::cuda
