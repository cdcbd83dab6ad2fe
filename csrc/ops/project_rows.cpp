// CPU launcher and plain ATen kernel of fastgrad::project_rows_.
#include "project_rows.h"

#include "common.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/matmul.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <algorithm>

namespace fastgrad {
namespace {

void check_arguments(
    const at::Tensor& sums, const at::Tensor& squares, const at::Tensor& cotangents, const at::Tensor& rows) {
  check_float64("project_rows_", "sums", sums, 2);
  check_float64("project_rows_", "squares", squares, 2);
  check_float64("project_rows_", "cotangents", cotangents, 2);
  check_float64("project_rows_", "rows", rows, 2);
  TORCH_CHECK(
      sums.size(0) == cotangents.size(0) && sums.size(1) == rows.size(1) && squares.sizes() == sums.sizes() &&
          cotangents.size(1) == rows.size(0),
      "project_rows_: sums and squares must have shape (k, columns), cotangents (k, rows), rows (rows, columns), got ",
      sums.sizes(), ", ", squares.sizes(), ", ", cotangents.sizes(), " and ", rows.sizes());
}

void project_rows_cpu(
    const at::Tensor& sums, const at::Tensor& squares, const at::Tensor& cotangents, const at::Tensor& rows) {
  check_arguments(sums, squares, cotangents, rows);
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
            const double weight = weights[k * cotangents.stride(0) + i * cotangents.stride(1)];
            double* const sum_k = sum + k * sums.stride(0);
            double* const square_k = square + k * squares.stride(0);
            for (int64_t j = begin; j < end; ++j) {
              const double term = weight * row[j * rows.stride(1)];
              sum_k[j * sums.stride(1)] += term;
              square_k[j * squares.stride(1)] += term * term;
            }
          }
        }
      });
}

void project_rows_composite(
    const at::Tensor& sums, const at::Tensor& squares, const at::Tensor& cotangents, const at::Tensor& rows) {
  check_arguments(sums, squares, cotangents, rows);
  sums.add_(at::matmul(cotangents, rows));
  squares.add_(at::matmul(cotangents * cotangents, rows * rows));
}

void project_rows_meta(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&) {
}  // sizes may be symbolic here

}  // namespace

void project_rows_(
    const at::Tensor& sums, const at::Tensor& squares, const at::Tensor& cotangents, const at::Tensor& rows) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fastgrad::project_rows_", "").typed<decltype(project_rows_)>();
  op.call(sums, squares, cotangents, rows);
}

TORCH_LIBRARY_IMPL(fastgrad, CPU, library) { library.impl("project_rows_", &project_rows_cpu); }
TORCH_LIBRARY_IMPL(fastgrad, Meta, library) { library.impl("project_rows_", &project_rows_meta); }
TORCH_LIBRARY_IMPL(fastgrad, CompositeExplicitAutograd, library) {
  library.impl("project_rows_", &project_rows_composite);
}

}  // namespace fastgrad
