// CUDA launcher of fastgrad::project_rows_ on raw pointers; ops/project_rows.h holds the contract.
#pragma once

#include "launch.h"

namespace fastgrad::cuda {

// For `count` cotangents and a block of row_count x column_count. Does not synchronize; returns the launch error.
cudaError_t launch_project_rows(
    Matrix<double> sums, Matrix<double> squares, Matrix<const double> cotangents, Matrix<const double> rows,
    int64_t count, int64_t row_count, int64_t column_count, int64_t first_row, int64_t row_step, int64_t first_column,
    cudaStream_t cuda_stream);

}  // namespace fastgrad::cuda
