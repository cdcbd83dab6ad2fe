// The allclose rule, entry by entry, and the statistics of a comparison as a reduction.
#pragma once

#include "host_device.h"

#include <cmath>
#include <cstdint>
#include <limits>

namespace fastgrad {

// A Jacobian entry: real, or assembled from the two real coordinates of a complex input.
struct Entry {
  double re;
  double im;
};

FASTGRAD_HOST_DEVICE double modulus(Entry z) { return z.im == 0.0 ? std::fabs(z.re) : std::hypot(z.re, z.im); }

// Whether either part is NaN; the modulus does not show this if the other part is infinite.
FASTGRAD_HOST_DEVICE bool is_nan(Entry z) { return std::isnan(z.re) || std::isnan(z.im); }

// The statistics of a comparison of analytical with numerical entries. `sums` run over the mismatched
// entries only, for the diagnosis of a mismatch.
struct ComparisonStatistics {
  double mismatches = 0;     // entries outside the tolerance
  double worst_excess = -1;  // max of |a - n| / (atol + rtol |n|); inf where that is not a number
  double worst_row = -1;     // where that maximum is
  double worst_column = -1;
  double largest_absolute = 0;  // max of |a - n| over entries where it is a number
  double largest_relative = 0;  // max of |a - n| / |n| over entries where it is finite
  double sum_analytical = 0;    // sum of |a|^2
  double sum_numerical = 0;     // sum of |n|^2
  double sum_product_re = 0;    // sum of a conj(n)
  double sum_product_im = 0;
};
constexpr int64_t comparison_fields = 10;
static_assert(sizeof(ComparisonStatistics) == comparison_fields * sizeof(double), "fields are doubles only");

// Whether error / size may be larger than `largest`: with this test, few entries need the slow division.
FASTGRAD_HOST_DEVICE bool may_exceed(double error, double largest, double size) {
  constexpr double below = 1.0 - 0x1p-50;  // more than the rounding of the product and the quotient
  return !(error < largest * size * below);
}

// The maxima of the statistics; most entries are below them.
struct ComparisonMaxima {
  double largest_absolute, largest_relative, worst_excess;
};

FASTGRAD_HOST_DEVICE ComparisonMaxima maxima_of(const ComparisonStatistics& statistics) {
  return {statistics.largest_absolute, statistics.largest_relative, statistics.worst_excess};
}

// Whether `reduce` may change statistics with these maxima: a few products for the entries that agree, so that a kernel
// need not hold the statistics in registers. Entries that are not complex have no imaginary part.
template <bool complex_entries>
FASTGRAD_HOST_DEVICE bool may_change(
    const ComparisonMaxima& maxima, Entry analytical, Entry numerical, double atol, double rtol) {
  const Entry difference{analytical.re - numerical.re, complex_entries ? analytical.im - numerical.im : 0.0};
  const double error = modulus(difference);
  if (error == 0.0) {
    return false;
  }
  const double size = modulus(numerical);
  const double allowed = atol + rtol * size;
  return !(error <= allowed && error <= maxima.largest_absolute) || may_exceed(error, maxima.worst_excess, allowed) ||
         (size > 0.0 && may_exceed(error, maxima.largest_relative, size));
}

// Adds one entry to the statistics, by the rule of torch.isclose(analytical, numerical): equal values
// (infinities too) are close, anything else needs a finite difference within atol + rtol |n|.
FASTGRAD_HOST_DEVICE void reduce(
    ComparisonStatistics& statistics, Entry analytical, Entry numerical, int64_t row, int64_t column, double atol,
    double rtol, bool equal_nan) {
  const Entry difference{analytical.re - numerical.re, analytical.im - numerical.im};
  const double error = modulus(difference);
  if (error == 0.0 || (analytical.re == numerical.re && analytical.im == numerical.im)) {
    return;
  }
  const double size = modulus(numerical);
  if (equal_nan && is_nan(numerical) && is_nan(analytical)) {
    return;
  }
  const double allowed = atol + rtol * size;
  if (std::isfinite(error)) {
    statistics.largest_absolute = error > statistics.largest_absolute ? error : statistics.largest_absolute;
    if (may_exceed(error, statistics.largest_relative, size)) {
      const double relative = error / size;
      if (std::isfinite(relative) && relative > statistics.largest_relative) {
        statistics.largest_relative = relative;
      }
    }
  }
  if (may_exceed(error, statistics.worst_excess, allowed)) {
    double excess = error / allowed;
    if (!(excess >= 0.0) || !std::isfinite(error)) {
      excess = std::numeric_limits<double>::infinity();
    }
    if (excess > statistics.worst_excess) {
      statistics.worst_excess = excess;
      statistics.worst_row = static_cast<double>(row);
      statistics.worst_column = static_cast<double>(column);
    }
  }
  if (!(std::isfinite(error) && error <= allowed)) {
    statistics.mismatches += 1;
    statistics.sum_analytical += analytical.re * analytical.re + analytical.im * analytical.im;
    statistics.sum_numerical += size * size;
    statistics.sum_product_re += analytical.re * numerical.re + analytical.im * numerical.im;
    statistics.sum_product_im += analytical.im * numerical.re - analytical.re * numerical.im;
  }
}

// Entries are visited in stripes of this many columns, and row by row within a stripe. The cache holds a line of each
// column of a stripe, so the lines of a column-major operand are used whole.
constexpr int64_t stripe_columns = 32;

// Whether the worst entry of `left` is visited before that of `right`.
FASTGRAD_HOST_DEVICE bool precedes(const ComparisonStatistics& left, const ComparisonStatistics& right) {
  const auto stripe = [](double column) { return static_cast<int64_t>(column) / stripe_columns; };
  if (stripe(left.worst_column) != stripe(right.worst_column)) {
    return stripe(left.worst_column) < stripe(right.worst_column);
  }
  return left.worst_row != right.worst_row ? left.worst_row < right.worst_row : left.worst_column < right.worst_column;
}

// Joins the statistics of two disjoint sets of entries; of two worst entries that tie, the one visited first wins.
FASTGRAD_HOST_DEVICE ComparisonStatistics combine(ComparisonStatistics left, const ComparisonStatistics& right) {
  if (right.worst_excess > left.worst_excess || (right.worst_excess == left.worst_excess && precedes(right, left))) {
    left.worst_excess = right.worst_excess;
    left.worst_row = right.worst_row;
    left.worst_column = right.worst_column;
  }
  left.mismatches += right.mismatches;
  left.largest_absolute =
      right.largest_absolute > left.largest_absolute ? right.largest_absolute : left.largest_absolute;
  left.largest_relative =
      right.largest_relative > left.largest_relative ? right.largest_relative : left.largest_relative;
  left.sum_analytical += right.sum_analytical;
  left.sum_numerical += right.sum_numerical;
  left.sum_product_re += right.sum_product_re;
  left.sum_product_im += right.sum_product_im;
  return left;
}

}  // namespace fastgrad
