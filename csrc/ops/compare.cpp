// CPU and plain ATen kernels of fastgrad::compare.
#include "compare.h"

#include "common.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/complex.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/logical_or.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <optional>

namespace fastgrad {

void check_compare(const at::Tensor& analytical, const at::Tensor& numerical, bool complex_entries) {
  check_float64("compare", "analytical", analytical, 2);
  check_float64("compare", "numerical", numerical, 2);
  TORCH_CHECK(
      analytical.sizes() == numerical.sizes(), "compare: analytical and numerical must have the same shape, got ",
      analytical.sizes(), " and ", numerical.sizes());
  TORCH_CHECK(
      !complex_entries || analytical.size(1) % 2 == 0, "compare: complex entries need an even number of columns, got ",
      analytical.size(1));
}

ComparisonStatistics compare_blocks(
    const StridedBlock& analytical, const StridedBlock& numerical, int64_t rows, int64_t entries, double atol,
    double rtol, bool complex_entries, bool equal_nan) {
  const int64_t width = complex_entries ? 2 : 1;
  const auto entry = [&](const StridedBlock& block, int64_t row, int64_t k) {
    const double* const first = block.data + row * block.row_stride + k * width * block.column_stride;
    return Entry{first[0], complex_entries ? first[block.column_stride] : 0.0};
  };
  const auto compare_stripes = [&](int64_t begin, int64_t end, ComparisonStatistics statistics) {
    for (int64_t first = begin * stripe_columns; first < std::min(end * stripe_columns, entries);
         first += stripe_columns) {
      const int64_t last = std::min(first + stripe_columns, entries);
      for (int64_t i = 0; i < rows; ++i) {
        for (int64_t k = first; k < last; ++k) {
          reduce(statistics, entry(analytical, i, k), entry(numerical, i, k), i, k, atol, rtol, equal_nan);
        }
      }
    }
    return statistics;
  };
  const int64_t stripes = (entries + stripe_columns - 1) / stripe_columns;
  const int64_t stripes_per_task = std::max<int64_t>(1, grain_size / std::max<int64_t>(1, rows * stripe_columns));
  return at::parallel_reduce(0, stripes, stripes_per_task, ComparisonStatistics{}, compare_stripes, combine);
}

namespace {

StridedBlock strided(const at::Tensor& block) {
  return {block.const_data_ptr<double>(), block.stride(0), block.stride(1)};
}

at::Tensor compare_cpu(
    const at::Tensor& analytical, const at::Tensor& numerical, double atol, double rtol, bool complex_entries,
    bool equal_nan) {
  check_compare(analytical, numerical, complex_entries);
  const int64_t entries = analytical.size(1) / (complex_entries ? 2 : 1);
  const ComparisonStatistics statistics = compare_blocks(
      strided(analytical), strided(numerical), analytical.size(0), entries, atol, rtol, complex_entries, equal_nan);
  at::Tensor fields = at::empty({comparison_fields}, analytical.options());
  std::memcpy(fields.mutable_data_ptr<double>(), &statistics, sizeof(statistics));
  return fields;
}

at::Tensor compare_composite(
    const at::Tensor& analytical, const at::Tensor& numerical, double atol, double rtol, bool complex_entries,
    bool equal_nan) {
  check_compare(analytical, numerical, complex_entries);
  if (analytical.numel() == 0) {
    at::Tensor fields = at::zeros({comparison_fields}, analytical.options());
    fields.slice(0, 1, 4).fill_(-1);
    return fields;
  }
  const auto as_entries = [&](const at::Tensor& block) {
    return complex_entries ? at::complex(block.slice(1, 0, std::nullopt, 2), block.slice(1, 1, std::nullopt, 2))
                           : block;
  };
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const at::Tensor a = as_entries(analytical);
  const at::Tensor n = as_entries(numerical);
  const at::Tensor error = at::abs(a - n);
  const at::Tensor size = at::abs(n);
  at::Tensor equal = a.eq(n);
  if (equal_nan) {
    equal = at::logical_or(equal, at::logical_and(at::isnan(a), at::isnan(n)));
  }
  const at::Tensor finite = at::isfinite(error);
  const at::Tensor allowed = size * rtol + atol;
  const at::Tensor mismatch = at::logical_not(at::logical_or(equal, at::logical_and(finite, error.le(allowed))));
  const at::Tensor zero = at::zeros_like(error);
  at::Tensor excess = error / allowed;
  excess = at::where(at::logical_and(finite, excess.ge(0)), excess, at::full_like(error, infinity));
  excess = at::where(equal, at::full_like(error, -1), excess).reshape({-1});
  const at::Tensor relative = error / size;
  const at::Tensor counted = at::logical_and(finite, at::logical_not(equal));
  const at::Tensor absolute_errors = at::where(counted, error, zero).reshape({-1});
  const at::Tensor relative_errors =
      at::where(at::logical_and(counted, at::isfinite(relative)), relative, zero).reshape({-1});
  const at::Tensor product =
      complex_entries ? at::view_as_real(a * n.conj()).contiguous() : at::stack({a * n, zero}, -1);
  const auto sum = [&](const at::Tensor& terms) { return at::where(mismatch, terms, zero).sum(); };
  const at::Tensor a_size = at::abs(a);

  const at::Tensor worst = excess.argmax();
  const at::Tensor worst_excess = excess.index_select(0, worst.reshape({1})).reshape({});
  const at::Tensor found = worst_excess.ge(0);
  const at::Tensor none = at::full_like(worst_excess, -1);
  const at::Tensor row = worst.div(error.size(1), "floor").to(at::kDouble);
  const at::Tensor column = worst.remainder(error.size(1)).to(at::kDouble);
  return at::stack({
      mismatch.sum().to(at::kDouble),
      worst_excess,
      at::where(found, row, none),
      at::where(found, column, none),
      absolute_errors.max(),
      relative_errors.max(),
      sum(a_size * a_size),
      sum(size * size),
      sum(product.select(-1, 0)),
      sum(product.select(-1, 1)),
  });
}

at::Tensor compare_meta(const at::Tensor& analytical, const at::Tensor&, double, double, bool, bool) {
  return at::empty({comparison_fields}, analytical.options());
}

}  // namespace

at::Tensor compare(
    const at::Tensor& analytical, const at::Tensor& numerical, double atol, double rtol, bool complex_entries,
    bool equal_nan) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fastgrad::compare", "").typed<decltype(compare)>();
  return op.call(analytical, numerical, atol, rtol, complex_entries, equal_nan);
}

TORCH_LIBRARY_IMPL(fastgrad, CPU, library) { library.impl("compare", &compare_cpu); }
TORCH_LIBRARY_IMPL(fastgrad, Meta, library) { library.impl("compare", &compare_meta); }
TORCH_LIBRARY_IMPL(fastgrad, CompositeExplicitAutograd, library) { library.impl("compare", &compare_composite); }

}  // namespace fastgrad
