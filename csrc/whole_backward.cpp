// All VJPs of a check of one small output, in one call.
#include "loops.h"

#include "kernels/comparison.h"
#include "ops/project_rows.h"
#include "rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <utility>

namespace fastgrad {
namespace {

bool are_plain_zeros(const std::vector<at::Tensor>& gradients, const std::vector<at::Tensor>& inputs) {
  const auto is_zero = [](const at::Tensor& gradient, const at::Tensor& input) {
    return !gradient.defined() || is_plain_zero(gradient, input);
  };
  return std::equal(gradients.begin(), gradients.end(), inputs.begin(), is_zero);
}

// Whether two small blocks are equal up to a tolerance, relative to the largest of the second or absolute: the
// tighter one. A NaN is not.
bool are_close(const at::Tensor& left, const at::Tensor& right, double atol, double rtol) {
  const auto* const a = left.const_data_ptr<double>();
  const auto* const b = right.const_data_ptr<double>();
  double largest = 0;
  for (int64_t i = 0; i < right.numel(); ++i) {
    largest = std::max(largest, std::abs(b[i]));
  }
  const double tolerance = std::min(atol, rtol * largest);
  return std::equal(a, a + left.numel(), b, [=](double x, double y) { return std::abs(x - y) <= tolerance; });
}

}  // namespace

WholeBackward whole_backward(
    const at::Tensor& output, const std::vector<InputBlock>& inputs, const at::Tensor& cotangents, int64_t repeated,
    double repeat_scale, bool undefined, double atol, double rtol) {
  WholeBackward whole;
  const auto count = [&](int64_t vjps) { whole.vjps += vjps; };
  std::vector<at::Tensor> arguments;
  int64_t n = 0;
  for (const InputBlock& input : inputs) {
    arguments.push_back(input.argument);
    n += coordinate_count(input.origin);
  }
  whole.zeros = vjp_of_zeros({output}, arguments);
  count(1);
  whole.are_zero = are_plain_zeros(whole.zeros, arguments);
  if (undefined) {
    whole.undefined = vjp_of_zeros(with_undefined_grads({output}), arguments);
    count(1);
    whole.are_zero = whole.are_zero && are_plain_zeros(whole.undefined, arguments);
  }
  const auto options = at::TensorOptions().dtype(at::kDouble).device(output.device());
  const int64_t m = output.numel();
  const int64_t twice = std::min(m, repeated);
  const std::initializer_list<bool> real = {false};
  const std::initializer_list<bool> complex = {true, false};
  for (const bool imaginary : output.is_complex() ? complex : real) {
    WholeBackward::Rows rows{at::empty({m, n}, options), at::empty({twice, n}, options), {}};
    rows.match = vjp_rows(output, inputs, 0, imaginary, rows.rows, rows.repeated, repeat_scale);
    count(m + twice);
    whole.parts.push_back(std::move(rows));
  }
  if (cotangents.size(0) == 0) {
    return whole;
  }
  whole.products = at::empty({cotangents.size(0), n}, options);
  vjp_coordinates({output}, inputs, cotangents, /*gapped=*/1, /*expanded=*/1, whole.products);
  count(cotangents.size(0));
  if (twice < m) {
    const at::Tensor again = at::empty({1, n}, options);
    vjp_coordinates({output}, inputs, cotangents.narrow(0, 0, 1), /*gapped=*/1, /*expanded=*/0, again);
    count(1);
    whole.moved = !at::equal(again, whole.products.narrow(0, 0, 1));
  }
  whole.add_up = whole.parts.size() == 1 && output.is_cpu();
  if (whole.add_up) {
    const at::Tensor sums = at::zeros({2, cotangents.size(0), n}, options);
    project_rows_(sums.select(0, 0), sums.select(0, 1), cotangents, whole.parts[0].rows, 0, 1, 0);
    whole.add_up = are_close(whole.products, sums.select(0, 0), atol, rtol);
  }
  return whole;
}

std::optional<std::vector<std::pair<double, double>>> largest_errors(
    const at::Tensor& rows, const at::Tensor& columns, const std::vector<InputBlock>& inputs,
    const std::vector<double>& atol, const std::vector<double>& rtol) {
  const int64_t m = rows.size(0);
  const int64_t n = rows.size(1);
  TORCH_CHECK(
      rows.is_cpu() && rows.is_contiguous() && columns.is_cpu() && columns.is_contiguous() &&
          columns.sizes() == at::IntArrayRef({n, m}),
      "largest_errors: rows and columns must be contiguous, on the CPU, and of transposed shapes");
  const auto* const analytical = rows.const_data_ptr<double>();
  const auto* const numerical = columns.const_data_ptr<double>();
  std::vector<std::pair<double, double>> errors;
  errors.reserve(inputs.size());
  int64_t first = 0;
  for (size_t k = 0; k < inputs.size(); ++k) {
    const int64_t width = inputs[k].origin.is_complex() ? 2 : 1;
    const int64_t last = first + coordinate_count(inputs[k].origin);
    ComparisonStatistics statistics;
    for (int64_t i = 0; i < m; ++i) {
      for (int64_t j = first; j < last; j += width) {
        const double* const a = analytical + i * n + j;
        const double* const b = numerical + j * m + i;
        const bool pair = width == 2;
        const Entry found{a[0], pair ? a[1] : 0.0};
        const Entry expected{b[0], pair ? b[m] : 0.0};
        reduce(statistics, found, expected, i, j, atol[k], rtol[k], /*equal_nan=*/false);
      }
    }
    if (statistics.mismatches != 0) {
      return std::nullopt;
    }
    errors.emplace_back(statistics.largest_absolute, statistics.largest_relative);
    first = last;
  }
  return errors;
}

}  // namespace fastgrad
