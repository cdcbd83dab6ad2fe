// fastgrad::project_rows_: v^T J summed up block of rows by block of rows.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastgrad {

// sums[k, j] += sum_i cotangents[k, i] rows[i, j], and squares[k, j] += the sum of the squares of
// the same terms, which scales the rounding and the tolerance of the sum.
// sums, squares: float64, shape (cotangents, columns), mutated in place.
// cotangents: float64, shape (cotangents, rows). rows: float64, shape (rows, columns). Any strides.
void project_rows_(
    const at::Tensor& sums, const at::Tensor& squares, const at::Tensor& cotangents, const at::Tensor& rows);

}  // namespace fastgrad
