// CUDA kernels of fastgrad::compare: statistics of each block of threads, then those of all.
#include "compare.h"

#include "device.h"

namespace fastgrad::cuda {
namespace {

// A tile is 32 entries wide, so that a warp reads neighbors of a row-major operand, and as many high, so
// that the lines of a column-major one are used whole while the cache holds them.
constexpr int64_t tile_rows = 32;
constexpr int64_t rows_at_once = threads_per_block / stripe_columns;
// Entries of a thread in a tile. All are loaded before any is compared: the loads are in flight together.
constexpr int entries_per_thread = tile_rows / rows_at_once;

template <bool complex_entries>
__device__ Entry entry_at(const Matrix<const double>& block, int64_t row, int64_t entry) {
  return complex_entries ? Entry{block.at(row, 2 * entry), block.at(row, 2 * entry + 1)}
                         : Entry{block.at(row, entry), 0.0};
}

// Number of blocks that a multiprocessor should hold, so that enough loads are in flight. Therefore the code for the
// few entries that change the statistics spills some registers.
constexpr int blocks_held = 4;

template <bool complex_entries>
__global__ void __launch_bounds__(threads_per_block, blocks_held) compare_kernel(
    ComparisonStatistics* __restrict__ partial, Matrix<const double> analytical, Matrix<const double> numerical,
    int64_t rows, int64_t entries, double atol, double rtol, bool equal_nan) {
  // In shared memory, because few entries change them.
  FASTGRAD_SHARED(double, memory, (threads_per_block * comparison_fields));
  auto* const statistics = reinterpret_cast<ComparisonStatistics*>(static_cast<double*>(memory));
  ComparisonStatistics& own = statistics[threadIdx.x];
  own = {};
  ComparisonMaxima maxima = maxima_of(own);
  const int64_t tiles_high = (rows + tile_rows - 1) / tile_rows;
  const int64_t stripes = (entries + stripe_columns - 1) / stripe_columns;
  // Down the stripes, one by one: every thread visits its entries in the order of kernels/comparison.h. A step of the
  // grid is a number of stripes and tiles; a division per tile would take longer than its entries.
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
    const int64_t first = tile * tile_rows + threadIdx.x / stripe_columns;
    Entry a[entries_per_thread];
    Entry n[entries_per_thread];
    for (int e = 0; e < entries_per_thread; ++e) {
      const int64_t i = first + e * rows_at_once;
      const bool exists = i < rows && k < entries;
      a[e] = exists ? entry_at<complex_entries>(analytical, i, k) : Entry{0.0, 0.0};  // equal entries change nothing
      n[e] = exists ? entry_at<complex_entries>(numerical, i, k) : Entry{0.0, 0.0};
    }
    unsigned changing = 0;
    for (int e = 0; e < entries_per_thread; ++e) {
      changing |= static_cast<unsigned>(may_change<complex_entries>(maxima, a[e], n[e], atol, rtol)) << e;
    }
    // These entries are few. They are read again, so that the loop above need not keep all entries in registers.
    for (int e = 0; changing != 0; ++e, changing /= 2) {
      if (changing % 2 != 0) {
        const int64_t i = first + e * rows_at_once;
        reduce(
            own, entry_at<complex_entries>(analytical, i, k), entry_at<complex_entries>(numerical, i, k), i, k, atol,
            rtol, equal_nan);
        maxima = maxima_of(own);
      }
    }
  }
  block_reduce_in_place(statistics, combine);
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = own;
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
    const auto kernel = complex_entries ? compare_kernel<true> : compare_kernel<false>;
    FASTGRAD_LAUNCH(
        kernel, static_cast<unsigned>(blocks), threads_per_block, cuda_stream, partial, analytical, numerical, rows,
        entries, atol, rtol, equal_nan);
    const cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) {
      return error;
    }
  }
  FASTGRAD_LAUNCH(combine_kernel, 1, threads_per_block, cuda_stream, fields, partial, blocks);
  return cudaGetLastError();
}

}  // namespace fastgrad::cuda
