// CPU and plain ATen kernels of fastgrad::dots.
#include "dots.h"

#include "../kernels/products.h"
#include "common.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace fastgrad {

void check_dots(const at::Tensor& rows, const at::Tensor& vector) {
  check_float64("dots", "rows", rows, 2);
  check_float64("dots", "vector", vector, 1);
  TORCH_CHECK(
      rows.is_contiguous() && vector.is_contiguous() && rows.size(1) == vector.size(0),
      "dots: rows and vector must be contiguous, with as many columns as elements, got ", rows.sizes(), " and ",
      vector.sizes());
}

namespace {

constexpr int64_t lanes = 8;
constexpr int64_t products_at_once = 256;  // columns handled in one row before the next row; alternating between rows
                                           // reads several streams of memory at a time

// Adds up products, and their magnitudes.
FASTGRAD_AVX2_TOO void dot(const double* a, const double* b, int64_t size, double* sums) {
  // Independent sums, because a single sum would wait for the previous addition each time.
  double sum[lanes] = {};
  double terms[lanes] = {};
  const auto add = [&](int64_t lane, int64_t j) {
    const double term = dot_term(a[j], b[j]);
    sum[lane] += term;
    terms[lane] += std::fabs(term);
  };
  int64_t j = 0;
  for (; j + lanes <= size; j += lanes) {
#pragma omp simd
    for (int64_t lane = 0; lane < lanes; ++lane) {
      add(lane, j + lane);
    }
  }
  for (; j < size; ++j) {
    add(0, j);
  }
  sums[0] += std::accumulate(sum, sum + lanes, 0.0);
  sums[1] += std::accumulate(terms, terms + lanes, 0.0);
}

at::Tensor dots_cpu(const at::Tensor& rows, const at::Tensor& vector) {
  check_dots(rows, vector);
  const int64_t count = rows.size(0);
  const int64_t size = rows.size(1);
  const int64_t chunks = (size + grain_size - 1) / grain_size;
  const at::Tensor partial = at::zeros({chunks, count, 2}, rows.options());
  const double* a = rows.const_data_ptr<double>();
  const double* b = vector.const_data_ptr<double>();
  auto* sums = partial.mutable_data_ptr<double>();
  at::parallel_for(0, chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t last = std::min(size, (chunk + 1) * grain_size);
      for (int64_t first = chunk * grain_size; first < last; first += products_at_once) {
        for (int64_t row = 0; row < count; ++row) {
          dot(a + row * size + first, b + first, std::min(products_at_once, last - first),
              sums + (chunk * count + row) * 2);
        }
      }
    }
  });
  return partial.sum(0);
}

at::Tensor dots_composite(const at::Tensor& rows, const at::Tensor& vector) {
  check_dots(rows, vector);
  const at::Tensor terms = at::where(vector == 0, at::zeros({}, rows.options()), rows * vector);
  return at::stack({terms.sum(1), at::abs(terms).sum(1)}, 1);
}

at::Tensor dots_meta(const at::Tensor& rows, const at::Tensor&) {
  return at::empty_symint({rows.sym_size(0), 2}, rows.options());
}

}  // namespace

TORCH_LIBRARY_IMPL(fastgrad, CPU, library) { library.impl("dots", &dots_cpu); }
TORCH_LIBRARY_IMPL(fastgrad, Meta, library) { library.impl("dots", &dots_meta); }
TORCH_LIBRARY_IMPL(fastgrad, CompositeExplicitAutograd, library) { library.impl("dots", &dots_composite); }

}  // namespace fastgrad
