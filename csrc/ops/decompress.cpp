// CPU and plain ATen kernels of fastgrad::decompress_.
#include "decompress.h"

#include "../kernels/sparse.h"
#include "common.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/index_select.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include <atomic>

namespace fastgrad {

void check_decompress(
    const at::Tensor& values, const at::Tensor& compressed, const std::optional<at::Tensor>& subtrahend,
    const at::Tensor& positions, const at::Tensor& entries) {
  check_contiguous_float64("decompress_", "values", values);
  check_contiguous_float64("decompress_", "compressed", compressed);
  check_indices("decompress_", "positions", positions);
  check_indices("decompress_", "entries", entries);
  if (subtrahend) {
    check_contiguous_float64("decompress_", "subtrahend", *subtrahend);
    TORCH_CHECK(
        subtrahend->numel() == compressed.numel(), "decompress_: subtrahend must have as many elements as compressed, ",
        compressed.numel(), ", got ", subtrahend->numel());
  }
  TORCH_CHECK(
      positions.numel() == values.numel(), "decompress_: positions must have as many elements as values, ",
      values.numel(), ", got ", positions.numel());
  check_apart("decompress_", "values", values, "compressed", compressed);
  check_apart("decompress_", "values", values, "subtrahend", subtrahend.value_or(compressed));
  check_apart("decompress_", "values", values, "positions", positions);
  check_apart("decompress_", "values", values, "entries", entries);
}

namespace {

void decompress_cpu(
    const at::Tensor& values, const at::Tensor& compressed, const std::optional<at::Tensor>& subtrahend,
    const at::Tensor& positions, const at::Tensor& entries) {
  check_decompress(values, compressed, subtrahend, positions, entries);
  auto* out = values.mutable_data_ptr<double>();
  const double* minuend = compressed.const_data_ptr<double>();
  const double* less = subtrahend ? subtrahend->const_data_ptr<double>() : nullptr;
  const int64_t* position = positions.const_data_ptr<int64_t>();
  const int64_t* entry = entries.const_data_ptr<int64_t>();
  const int64_t nonzeros = values.numel();
  const int64_t size = compressed.numel();
  std::atomic<bool> all_within = true;
  at::parallel_for(0, entries.numel(), grain_size, [&](int64_t begin, int64_t end) {
    bool within = true;
    for (int64_t k = begin; k < end; ++k) {
      const int64_t e = entry[k];
      if (is_within(e, nonzeros) && is_within(position[e], size)) {
        out[e] = decompressed(minuend, less, position[e]);
      } else {
        within = false;
      }
    }
    if (!within) {
      all_within = false;
    }
  });
  if (!all_within) {  // located only now: a pass beforehand would take as long as all of this
    check_range("decompress_", "entries", entries, nonzeros);
    check_range("decompress_", "positions of entries", at::index_select(positions, 0, entries), size);
  }
}

void decompress_composite(
    const at::Tensor& values, const at::Tensor& compressed, const std::optional<at::Tensor>& subtrahend,
    const at::Tensor& positions, const at::Tensor& entries) {
  check_decompress(values, compressed, subtrahend, positions, entries);
  const at::Tensor places = at::index_select(positions, 0, entries);
  at::Tensor found = at::index_select(compressed, 0, places);
  if (subtrahend) {
    found = found - at::index_select(*subtrahend, 0, places);
  }
  values.index_copy_(0, entries, found);
}

void decompress_meta(
    const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&) {
}  // no checks: sizes may be symbolic

}  // namespace

void decompress_(
    const at::Tensor& values, const at::Tensor& compressed, const std::optional<at::Tensor>& subtrahend,
    const at::Tensor& positions, const at::Tensor& entries) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fastgrad::decompress_", "").typed<decltype(decompress_)>();
  op.call(values, compressed, subtrahend, positions, entries);
}

TORCH_LIBRARY_IMPL(fastgrad, CPU, library) { library.impl("decompress_", &decompress_cpu); }
TORCH_LIBRARY_IMPL(fastgrad, Meta, library) { library.impl("decompress_", &decompress_meta); }
FASTGRAD_COMPOSITE("decompress_", &decompress_composite)

}  // namespace fastgrad
