// CPU and plain ATen kernels of fastgrad::project_entries_.
#include "project_entries.h"

#include "../kernels/products.h"
#include "../kernels/sparse.h"
#include "common.h"

#include <ATen/ops/index_select.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

namespace fastgrad {

void check_project_entries(
    const at::Tensor& sums, const std::optional<at::Tensor>& squares, const at::Tensor& vector,
    const at::Tensor& sources, const at::Tensor& targets, const at::Tensor& entries) {
  check_contiguous_float64("project_entries_", "sums", sums);
  check_contiguous_float64("project_entries_", "vector", vector);
  check_contiguous_float64("project_entries_", "entries", entries);
  check_indices("project_entries_", "sources", sources);
  check_indices("project_entries_", "targets", targets);
  if (squares) {
    check_contiguous_float64("project_entries_", "squares", *squares);
    TORCH_CHECK(
        squares->numel() == sums.numel(), "project_entries_: squares must have as many elements as sums, ",
        sums.numel(), ", got ", squares->numel());
  }
  TORCH_CHECK(
      sources.numel() == entries.numel() && targets.numel() == entries.numel(),
      "project_entries_: sources and targets must have as many elements as entries, ", entries.numel(), ", got ",
      sources.numel(), " and ", targets.numel());
  const auto check_sums = [&](const char* name, const at::Tensor& tensor) {
    check_apart("project_entries_", name, tensor, "vector", vector);
    check_apart("project_entries_", name, tensor, "sources", sources);
    check_apart("project_entries_", name, tensor, "targets", targets);
    check_apart("project_entries_", name, tensor, "entries", entries);
  };
  check_sums("sums", sums);
  if (squares) {
    check_sums("squares", *squares);
    check_apart("project_entries_", "sums", sums, "squares", *squares);
  }
}

namespace {

// In one thread, because entries that share a target must not be added concurrently.
void project_entries_cpu(
    const at::Tensor& sums, const std::optional<at::Tensor>& squares, const at::Tensor& vector,
    const at::Tensor& sources, const at::Tensor& targets, const at::Tensor& entries) {
  check_project_entries(sums, squares, vector, sources, targets, entries);
  auto* sum = sums.mutable_data_ptr<double>();
  auto* square = squares ? squares->mutable_data_ptr<double>() : nullptr;
  const double* weight = vector.const_data_ptr<double>();
  const int64_t* source = sources.const_data_ptr<int64_t>();
  const int64_t* target = targets.const_data_ptr<int64_t>();
  const double* entry = entries.const_data_ptr<double>();
  const int64_t weights = vector.numel();
  const int64_t size = sums.numel();
  const auto add_all = [&](const auto& add) {
    bool all_within = true;
    for (int64_t e = 0; e < entries.numel(); ++e) {
      if (is_within(source[e], weights) && is_within(target[e], size)) {
        add(e);
      } else {
        all_within = false;
      }
    }
    return all_within;
  };
  const bool all_within =
      square == nullptr
          ? add_all([&](int64_t e) { sum[target[e]] += weight[source[e]] * entry[e]; })
          : add_all([&](int64_t e) { add_term(sum[target[e]], square[target[e]], weight[source[e]], entry[e]); });
  if (!all_within) {  // located only now: a pass beforehand would take as long as all of this
    check_range("project_entries_", "sources", sources, weights);
    check_range("project_entries_", "targets", targets, size);
  }
}

void project_entries_composite(
    const at::Tensor& sums, const std::optional<at::Tensor>& squares, const at::Tensor& vector,
    const at::Tensor& sources, const at::Tensor& targets, const at::Tensor& entries) {
  check_project_entries(sums, squares, vector, sources, targets, entries);
  const at::Tensor terms = at::index_select(vector, 0, sources) * entries;
  sums.index_add_(0, targets, terms);
  if (squares) {
    squares->index_add_(0, targets, terms * terms);
  }
}

void project_entries_meta(
    const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
    const at::Tensor&) {}  // no checks: sizes may be symbolic

}  // namespace

TORCH_LIBRARY_IMPL(fastgrad, CPU, library) { library.impl("project_entries_", &project_entries_cpu); }
TORCH_LIBRARY_IMPL(fastgrad, Meta, library) { library.impl("project_entries_", &project_entries_meta); }
FASTGRAD_COMPOSITE("project_entries_", &project_entries_composite)

}  // namespace fastgrad
