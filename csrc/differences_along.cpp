// Derivatives of func along random directions, from two or four evaluations each, and their comparison with VJPs.
#include "evaluator.h"

#include "kernels/richardson.h"
#include "ops/common.h"
#include "ops/richardson.h"
#include "rows.h"
#include "two_points.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/zeros.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace py = pybind11;

namespace fastgrad {
namespace {

constexpr int64_t points_of_richardson = 4;

}  // namespace

void RandomDirections::check(const char* caller) const {
  const auto count = static_cast<int64_t>(streams.size());
  const bool one_each = parts.empty() || parts.size() == streams.size();
  const auto is_valid = [&](int64_t part) { return part >= -1 && part < count; };
  TORCH_CHECK(
      one_each && std::all_of(parts.begin(), parts.end(), is_valid), caller,
      ": parts must be empty, or one of -1, ..., ", count - 1, " for each of ", count, " streams, got ", parts);
}

std::variant<Derivatives, Changed> Evaluator::differences_along(
    const RandomDirections& along, const at::Tensor& base, double curve, const std::optional<at::Tensor>& fixed,
    const std::vector<OutputSpec>& outputs, const std::vector<double>& ulps) {
  const auto count = static_cast<int64_t>(along.streams.size());
  TORCH_CHECK(
      along.points.size() == along.streams.size(), "differences_along: points must have one element for each of ",
      count, " streams, got ", along.points.size());
  along.check("differences_along");
  int64_t most = 0;
  for (const int64_t points : along.points) {
    TORCH_CHECK(
        points == 2 || points == points_of_richardson, "differences_along: points must be two or four, got ", points);
    most = std::max(most, points);
  }
  TORCH_CHECK(
      ulps.size() == outputs.size(), "differences_along: ulps must have one element for each of ", outputs.size(),
      " outputs, got ", ulps.size());
  const int64_t m = total(outputs);
  const auto check_base = [&] {
    check_contiguous_float64("differences_along", "base", base);
    TORCH_CHECK(base.numel() == m, "differences_along: base must have ", m, " elements, got ", base.numel());
  };
  check_base();
  if (fixed) {
    TORCH_CHECK(
        fixed->layout() == at::kStrided && fixed->scalar_type() == at::kBool && fixed->dim() == 1 &&
            fixed->size(0) == size_ && fixed->device() == base.device(),
        "differences_along: fixed must be a bool tensor of ", size_, " elements on ", base.device(), ", got ",
        fixed->scalar_type(), " of shape ", fixed->sizes(), " on ", fixed->device());
    check_storage("differences_along", "fixed", *fixed);
  }
  const auto options = base.options();
  const auto vector = [&](int64_t size) { return at::empty({size}, options); };
  Derivatives into;
  // The vectors are not one block: if they are large, blocks of several sizes leave holes in the heap. They are
  // allocated before blocks that live longer: freed memory above such blocks returns to the system, and the next
  // allocation maps new pages one by one.
  const at::Tensor displacement = vector(size_);
  std::vector<at::Tensor> memory;
  for (int64_t k = 0; k < most; ++k) {
    memory.push_back(vector(m));
  }
  into.directions = at::empty({count, size_}, options);
  into.derivatives = at::empty({count, m}, options);
  into.noise = at::zeros({m}, options);
  for (int64_t k = 0; k < count; ++k) {
    const auto points = static_cast<std::ptrdiff_t>(along.points[k]);
    const std::vector<at::Tensor> values(memory.begin(), memory.begin() + points);
    {
      const BelowAutograd guard;
      const at::Tensor direction = into.directions.select(0, k);
      realize_along(displacement, direction, along, k, along.step, along.relative);
      if (fixed) {
        displacement.masked_fill_(*fixed, 0.0);
        direction.masked_fill_(*fixed, 0.0);
      }
    }
    static const std::vector<double> scales{1.0, -1.0, 0.5, -0.5};
    const std::vector<double> used(scales.begin(), scales.begin() + points);
    if (auto changed = values_along(displacement, used, values, outputs, /*record_graph=*/true)) {
      return *std::move(changed);
    }
    check_base();  // func has run
    const BelowAutograd guard;
    const at::Tensor derivative = into.derivatives.select(0, k);
    int64_t offset = 0;
    for (size_t o = 0; o < outputs.size(); ++o) {
      const int64_t size = coordinate_count(outputs[o].like);
      const auto own = [&](const at::Tensor& whole) { return size == m ? whole : whole.narrow(0, offset, size); };
      if (points == points_of_richardson) {
        richardson_(
            own(derivative), own(into.noise), own(base), own(values[0]), own(values[1]), own(values[2]), own(values[3]),
            along.step, ulps[o]);
      } else {
        two_points(
            {own(derivative), own(into.noise), own(base), own(values[0]), own(values[1]), along.step, ulps[o], curve});
      }
      offset += size;
    }
  }
  into.sizes = sizes_of(into.noise, into.derivatives);
  return into;
}

std::vector<double> largest_residuals(
    const at::Tensor& cotangents, const at::Tensor& derivatives, const at::Tensor& gradients,
    const at::Tensor& directions) {
  const auto check = [](const char* name, const at::Tensor& matrix, int64_t rows, int64_t columns) {
    check_float64("largest_residuals", name, matrix, 2);
    TORCH_CHECK(
        matrix.is_contiguous() && matrix.size(0) == rows && matrix.size(1) == columns, "largest_residuals: ", name,
        " must be contiguous and have shape (", rows, ", ", columns, "), got ", matrix.sizes());
  };
  check_float64("largest_residuals", "cotangents", cotangents, 2);
  check_float64("largest_residuals", "directions", directions, 2);
  check("cotangents", cotangents, cotangents.size(0), cotangents.size(1));
  check("directions", directions, directions.size(0), directions.size(1));
  check("derivatives", derivatives, directions.size(0), cotangents.size(1));
  check("gradients", gradients, cotangents.size(0), directions.size(1));
  const auto is_small = [](const at::Tensor& matrix) { return matrix.is_cpu() && matrix.size(1) <= small_size; };
  std::vector<double> largest(cotangents.size(0), 0.0);
  if (!is_small(cotangents) || !is_small(derivatives) || !is_small(gradients) || !is_small(directions)) {
    if (largest.empty() || directions.size(0) == 0) {
      return largest;
    }
    const at::Tensor values = at::matmul(cotangents, derivatives.t()) - at::matmul(gradients, directions.t());
    const at::Tensor found = values.abs().amax(1).cpu();
    std::copy_n(found.const_data_ptr<double>(), largest.size(), largest.begin());
    return largest;
  }
  const int64_t m = cotangents.size(1);
  const int64_t n = directions.size(1);
  for (int64_t row = 0; row < cotangents.size(0); ++row) {
    const double* const v = cotangents.const_data_ptr<double>() + row * m;
    const double* const g = gradients.const_data_ptr<double>() + row * n;
    for (int64_t k = 0; k < directions.size(0); ++k) {
      const double numerical = std::inner_product(v, v + m, derivatives.const_data_ptr<double>() + k * m, 0.0);
      const double analytical = std::inner_product(g, g + n, directions.const_data_ptr<double>() + k * n, 0.0);
      largest[row] = louder(std::fabs(numerical - analytical), largest[row]);
    }
  }
  return largest;
}

std::optional<double> explained_sums(
    const at::Tensor& entries, const at::Tensor& sources, const at::Tensor& targets, const at::Tensor& weights,
    const at::Tensor& sums, double allowed, double rounding) {
  const int64_t count = entries.numel();
  check_float64("explained_sums", "entries", entries, 1);
  check_float64("explained_sums", "weights", weights, 2);
  check_float64("explained_sums", "sums", sums, 2);
  TORCH_CHECK(
      is_plain(entries) && is_plain(weights) && is_plain(sums) && weights.size(0) == sums.size(0),
      "explained_sums: entries, weights and sums must be contiguous on the CPU, with as many rows of weights as "
      "of sums, got ",
      weights.sizes(), " and ", sums.sizes());
  const auto check_entries = [&](const char* name, const at::Tensor& indices, int64_t size) {
    check_indices("explained_sums", name, indices);
    TORCH_CHECK(
        indices.is_cpu() && indices.numel() == count, "explained_sums: ", name, " must have one element for each of ",
        count, " entries on the CPU, got ", indices.numel(), " on ", indices.device());
    if (count > 0) {
      check_range("explained_sums", name, indices, size);
    }
  };
  check_entries("sources", sources, weights.size(1));
  check_entries("targets", targets, sums.size(1));
  const auto* const from = sources.const_data_ptr<int64_t>();
  const auto* const to = targets.const_data_ptr<int64_t>();
  const auto* const entry = entries.const_data_ptr<double>();
  double largest = 0;
  std::vector<double> totals(sums.size(1));
  std::vector<double> sizes(sums.size(1));
  for (int64_t row = 0; row < sums.size(0); ++row) {
    std::fill(totals.begin(), totals.end(), 0.0);
    std::fill(sizes.begin(), sizes.end(), 0.0);
    const double* const weight = weights.const_data_ptr<double>() + row * weights.size(1);
    for (int64_t e = 0; e < count; ++e) {
      const double term = entry[e] * weight[from[e]];
      totals[to[e]] += term;
      sizes[to[e]] += std::fabs(term);
    }
    const double* const sum = sums.const_data_ptr<double>() + row * sums.size(1);
    for (int64_t i = 0; i < sums.size(1); ++i) {
      const double explained = allowed + rounding * sizes[i];
      if (!(std::fabs(sum[i] - totals[i]) <= explained)) {
        return std::nullopt;
      }
      largest = louder(explained, largest);
    }
  }
  return largest;
}

}  // namespace fastgrad
