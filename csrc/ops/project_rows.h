// fastgrad::project_rows_: v^T J, summed over blocks of rows.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastgrad {

// sums[k, first_column + j] += sum_i cotangents[k, first_row + i * row_step] rows[i, j]. The sum of the squares of the
// same terms, which scales the rounding and the tolerance of the sum, is added to `squares` at the same place. Offsets
// are passed instead of views, because making views would cost more than a small block.
// sums, squares: float64, shape (k, all columns), mutated in place. cotangents: float64, shape
// (k, all rows). rows: float64, shape (rows, columns). Any strides.
void project_rows_(
    const at::Tensor& sums, const at::Tensor& squares, const at::Tensor& cotangents, const at::Tensor& rows,
    int64_t first_row, int64_t row_step, int64_t first_column);

// Argument checks shared by all kernels except Meta.
void check_project_rows(
    const at::Tensor& sums, const at::Tensor& squares, const at::Tensor& cotangents, const at::Tensor& rows,
    int64_t first_row, int64_t row_step, int64_t first_column);

}  // namespace fastgrad
