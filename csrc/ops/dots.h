// fastgrad::dots: dot products of a few rows with one vector, and the size of their terms.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastgrad {

// fastgrad::dots(rows, vector). For each row r: (sum_j rows[r, j] vector[j], sum_j |rows[r, j] vector[j]|). If
// vector[j] is zero, so is the term, even if the row is not finite there. The order of the sums does not depend on the
// number of threads. rows: float64, shape (count, size), contiguous. vector: float64, shape (size,), contiguous.
// Returns float64, shape (count, 2).
//
// Argument checks shared by all kernels except Meta.
void check_dots(const at::Tensor& rows, const at::Tensor& vector);

}  // namespace fastgrad
