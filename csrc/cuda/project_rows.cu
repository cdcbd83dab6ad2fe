// CUDA kernels of fastgrad::project_rows_: a block takes a few columns, its threads share their rows.
#include "project_rows.h"

#include "../kernels/products.h"
#include "device.h"

namespace fastgrad::cuda {
namespace {

constexpr int most_columns = 32;  // per block, so that a warp reads neighbors
constexpr int most_together = 8;  // cotangents of one pass over the rows: the sums of each take four registers

// `columns`, a power of two, of the columns belong to a block at a time; its other threads take other rows. An entry is
// read once for `together` cotangents.
template <int together>
__global__ void project_rows_kernel(
    Matrix<double> sums, Matrix<double> squares, Matrix<const double> cotangents, Matrix<const double> rows,
    int64_t count, int64_t row_count, int64_t column_count, int64_t first_row, int64_t row_step, int64_t first_column,
    int columns) {
  FASTGRAD_SHARED(double, shared_sums, threads_per_block);
  FASTGRAD_SHARED(double, shared_squares, threads_per_block);
  const int own = static_cast<int>(threadIdx.x);
  const int lanes = threads_per_block / columns;
  const int lane = own / columns;
  const int64_t tiles = (column_count - 1) / columns + 1;
  const int64_t passes = (count - 1) / together + 1;
  for (int64_t piece = blockIdx.x; piece < passes * tiles; piece += gridDim.x) {
    const int64_t first = piece / tiles * together;
    const int used = count - first < together ? static_cast<int>(count - first) : together;
    const int64_t j = piece % tiles * columns + own % columns;
    double sum[together] = {};
    double square[together] = {};
    if (j < column_count) {
      const double* const entries = rows.values + j * rows.column_stride;
      const double* const weights =
          cotangents.values + first * cotangents.row_stride + first_row * cotangents.column_stride;
      for (int64_t i = lane; i < row_count; i += lanes) {
        const double entry = entries[i * rows.row_stride];
        const double* weight = weights + i * row_step * cotangents.column_stride;
        for (int c = 0; c < together; ++c) {
          add_term(sum[c], square[c], *weight, entry);
          // After the last cotangent, its weight is read again, and these sums are discarded.
          weight += c + 1 < used ? cotangents.row_stride : 0;
        }
      }
    }
    for (int c = 0; c < together && c < used; ++c) {
      shared_sums[own] = sum[c];
      shared_squares[own] = square[c];
      for (int half = lanes / 2; half > 0; half /= 2) {
        __syncthreads();
        if (lane < half) {
          shared_sums[own] += shared_sums[own + half * columns];
          shared_squares[own] += shared_squares[own + half * columns];
        }
      }
      if (lane == 0 && j < column_count) {
        sums.at(first + c, first_column + j) += shared_sums[own];
        squares.at(first + c, first_column + j) += shared_squares[own];
      }
      __syncthreads();  // the next cotangent uses the same memory
    }
  }
}

}  // namespace

cudaError_t launch_project_rows(
    Matrix<double> sums, Matrix<double> squares, Matrix<const double> cotangents, Matrix<const double> rows,
    int64_t count, int64_t row_count, int64_t column_count, int64_t first_row, int64_t row_step, int64_t first_column,
    cudaStream_t cuda_stream) {
  if (count == 0 || row_count == 0 || column_count == 0) {
    return cudaSuccess;
  }
  int columns = 1;
  while (columns < most_columns && columns < column_count) {
    columns *= 2;
  }
  const int64_t tiles = (column_count - 1) / columns + 1;
  const auto kernel = count == 1   ? project_rows_kernel<1>
                      : count == 2 ? project_rows_kernel<2>
                      : count <= 4 ? project_rows_kernel<4>
                                   : project_rows_kernel<most_together>;
  const int64_t passes = (count - 1) / most_together + 1;
  FASTGRAD_LAUNCH(
      kernel, blocks_for(passes * tiles, 1), threads_per_block, cuda_stream, sums, squares, cotangents, rows, count,
      row_count, column_count, first_row, row_step, first_column, columns);
  return cudaGetLastError();
}

}  // namespace fastgrad::cuda
