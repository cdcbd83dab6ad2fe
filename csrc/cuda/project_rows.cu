// CUDA kernel of fastgrad::project_rows_: a block takes a few columns, its threads share their rows.
#include "project_rows.h"

#include "../kernels/products.h"
#include "device.h"

namespace fastgrad::cuda {
namespace {

constexpr int most_columns = 32;  // of a block: a warp reads neighbors

// `columns`, a power of two, of the columns belong to a block at a time; its other threads take other rows.
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
  for (int64_t piece = blockIdx.x; piece < count * tiles; piece += gridDim.x) {
    const int64_t k = piece / tiles;
    const int64_t j = piece % tiles * columns + own % columns;
    double sum = 0;
    double square = 0;
    if (j < column_count) {
      for (int64_t i = lane; i < row_count; i += lanes) {
        add_term(sum, square, cotangents.at(k, first_row + i * row_step), rows.at(i, j));
      }
    }
    shared_sums[own] = sum;
    shared_squares[own] = square;
    for (int half = lanes / 2; half > 0; half /= 2) {
      __syncthreads();
      if (lane < half) {
        shared_sums[own] += shared_sums[own + half * columns];
        shared_squares[own] += shared_squares[own + half * columns];
      }
    }
    if (lane == 0 && j < column_count) {
      sums.at(k, first_column + j) += shared_sums[own];
      squares.at(k, first_column + j) += shared_squares[own];
    }
    __syncthreads();  // the memory serves the next piece, too
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
  FASTGRAD_LAUNCH(
      project_rows_kernel, blocks_for(count * tiles, 1), threads_per_block, cuda_stream, sums, squares, cotangents,
      rows, count, row_count, column_count, first_row, row_step, first_column, columns);
  return cudaGetLastError();
}

}  // namespace fastgrad::cuda
