// CPU and plain ATen kernels of fastgrad::project_rows_.
#include "project_rows.h"

#include "../kernels/products.h"
#include "common.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/matmul.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <algorithm>

namespace fastgrad {

void check_project_rows(
    const at::Tensor& sums, const at::Tensor& squares, const at::Tensor& cotangents, const at::Tensor& rows,
    int64_t first_row, int64_t row_step, int64_t first_column) {
  check_float64("project_rows_", "sums", sums, 2);
  check_float64("project_rows_", "squares", squares, 2);
  check_float64("project_rows_", "cotangents", cotangents, 2);
  check_float64("project_rows_", "rows", rows, 2);
  TORCH_CHECK(
      sums.size(0) == cotangents.size(0) && squares.sizes() == sums.sizes(),
      "project_rows_: sums and squares must have shape (k, columns) for cotangents of shape (k, rows), got ",
      sums.sizes(), ", ", squares.sizes(), " and ", cotangents.sizes());
  // No sums and products of the arguments: they may overflow.
  const bool rows_within =
      rows.size(0) == 0 || (first_row >= 0 && first_row < cotangents.size(1) &&
                            rows.size(0) - 1 <= (cotangents.size(1) - 1 - first_row) / std::max<int64_t>(row_step, 1));
  TORCH_CHECK(
      first_row >= 0 && row_step > 0 && first_column >= 0 && rows_within && first_column <= sums.size(1) - rows.size(1),
      "project_rows_: rows of shape ", rows.sizes(), " at row ", first_row, " (step ", row_step, ") and column ",
      first_column, " must lie within ", cotangents.size(1), " rows and ", sums.size(1), " columns");
  check_written("project_rows_", "sums", sums);
  check_written("project_rows_", "squares", squares);
  check_apart("project_rows_", "sums", sums, "squares", squares);
  for (const auto& [name, tensor] : {std::pair("cotangents", cotangents), std::pair("rows", rows)}) {
    check_apart("project_rows_", "sums", sums, name, tensor);
    check_apart("project_rows_", "squares", squares, name, tensor);
  }
}

namespace {

void project_rows_cpu(
    const at::Tensor& sums, const at::Tensor& squares, const at::Tensor& cotangents, const at::Tensor& rows,
    int64_t first_row, int64_t row_step, int64_t first_column) {
  check_project_rows(sums, squares, cotangents, rows, first_row, row_step, first_column);
  const double* block = rows.const_data_ptr<double>();
  const double* weights = cotangents.const_data_ptr<double>();
  auto* sum = sums.mutable_data_ptr<double>();
  auto* square = squares.mutable_data_ptr<double>();
  const int64_t work_per_column = std::max<int64_t>(1, rows.size(0) * cotangents.size(0));
  at::parallel_for(
      0, rows.size(1), std::max<int64_t>(1, grain_size / work_per_column), [&](int64_t begin, int64_t end) {
        for (int64_t i = 0; i < rows.size(0); ++i) {
          const double* row = block + i * rows.stride(0);
          for (int64_t k = 0; k < cotangents.size(0); ++k) {
            const double weight = weights[k * cotangents.stride(0) + (first_row + i * row_step) * cotangents.stride(1)];
            double* const sum_k = sum + k * sums.stride(0);
            double* const square_k = square + k * squares.stride(0);
            for (int64_t j = begin; j < end; ++j) {
              add_term(
                  sum_k[(first_column + j) * sums.stride(1)], square_k[(first_column + j) * squares.stride(1)], weight,
                  row[j * rows.stride(1)]);
            }
          }
        }
      });
}

void project_rows_composite(
    const at::Tensor& sums, const at::Tensor& squares, const at::Tensor& cotangents, const at::Tensor& rows,
    int64_t first_row, int64_t row_step, int64_t first_column) {
  check_project_rows(sums, squares, cotangents, rows, first_row, row_step, first_column);
  const int64_t count = rows.size(0);
  if (count == 0) {
    return;
  }
  const at::Tensor weights = cotangents.slice(1, first_row, first_row + (count - 1) * row_step + 1, row_step);
  sums.narrow(1, first_column, rows.size(1)).add_(at::matmul(weights, rows));
  squares.narrow(1, first_column, rows.size(1)).add_(at::matmul(weights * weights, rows * rows));
}

void project_rows_meta(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&, int64_t, int64_t, int64_t) {
}  // no checks: sizes may be symbolic

}  // namespace

void project_rows_(
    const at::Tensor& sums, const at::Tensor& squares, const at::Tensor& cotangents, const at::Tensor& rows,
    int64_t first_row, int64_t row_step, int64_t first_column) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fastgrad::project_rows_", "").typed<decltype(project_rows_)>();
  op.call(sums, squares, cotangents, rows, first_row, row_step, first_column);
}

TORCH_LIBRARY_IMPL(fastgrad, CPU, library) { library.impl("project_rows_", &project_rows_cpu); }
TORCH_LIBRARY_IMPL(fastgrad, Meta, library) { library.impl("project_rows_", &project_rows_meta); }
FASTGRAD_COMPOSITE("project_rows_", &project_rows_composite)

}  // namespace fastgrad
