// fastgrad::compare: two Jacobian blocks under the allclose rule, in one pass.
#pragma once

#include "../kernels/comparison.h"

#include <ATen/core/Tensor.h>

namespace fastgrad {

// Compares analytical with numerical entry by entry: close if equal or if |a - n| is finite and
// |a - n| <= atol + rtol |n|; with equal_nan two NaNs are close.
// analytical, numerical: float64, the same shape (rows, columns), any strides.
// complex_entries: columns 2k and 2k + 1 are the real and imaginary part of one entry, which is
//   judged by its modulus.
// Returns the float64 tensor of the fields of ComparisonStatistics (kernels/comparison.h), on the
// device of analytical; worst_row and worst_column count rows and entries of this block, -1 where
// all entries are equal. No temporary has the size of the block in the CPU and CUDA kernels.
at::Tensor compare(
    const at::Tensor& analytical, const at::Tensor& numerical, double atol, double rtol, bool complex_entries,
    bool equal_nan);

// Entries in memory, with the strides of rows and columns.
struct StridedBlock {
  const double* data;
  int64_t row_stride, column_stride;
};

// compare on the CPU, without tensors: for `rows` rows with `entries` entries each.
ComparisonStatistics compare_blocks(
    const StridedBlock& analytical, const StridedBlock& numerical, int64_t rows, int64_t entries, double atol,
    double rtol, bool complex_entries, bool equal_nan);

// Argument checks shared by all kernels except Meta.
void check_compare(const at::Tensor& analytical, const at::Tensor& numerical, bool complex_entries);

}  // namespace fastgrad
