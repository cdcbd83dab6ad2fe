// The one-element bodies: steps, differences, the allclose rule and its reduction.
#include "kernels/comparison.h"
#include "kernels/difference.h"
#include "kernels/direction.h"
#include "kernels/low_precision.h"
#include "kernels/richardson.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();
constexpr double nan = std::numeric_limits<double>::quiet_NaN();

TEST(Step, EpsWhereItMoves) {
  EXPECT_EQ(fastgrad::coordinate_step(3.0, 1e-6, 0x1p-24), 1e-6);
  EXPECT_EQ(fastgrad::coordinate_step(-1e12, 1e-6, 0x1p-24), 1e12 * 0x1p-24);
  EXPECT_EQ(fastgrad::coordinate_step(0.0, 1e-6, 0x1p-24), 1e-6);
}

TEST(Step, WidthIsWhatWasAdded) {
  const double width = fastgrad::realized_width(1e9, 1e-6);
  EXPECT_EQ(width, (1e9 + 1e-6) - (1e9 - 1e-6));
  EXPECT_NE(width, 2e-6);
  EXPECT_EQ(fastgrad::realized_width(infinity, 1e-6), 2e-6);
  EXPECT_TRUE(std::isfinite(fastgrad::realized_width(1.0f, 1e-6)));
}

// Converts every value to float. Converts back every float next to a value, or next to the middle of two values.
template <typename Own, typename Other>
void expect_the_bits_of() {
  for (uint32_t pattern = 0; pattern < 0x10000; ++pattern) {
    Own own;
    own.bits = static_cast<uint16_t>(pattern);
    const float value = Other(own.bits, Other::from_bits());
    if (value != value) {
      ASSERT_TRUE(std::isnan(static_cast<float>(own)));
      continue;
    }
    ASSERT_EQ(fastgrad::bits_of(own), fastgrad::bits_of(value));
    Own next;
    next.bits = static_cast<uint16_t>(pattern + 1);
    for (const double start :
         {static_cast<double>(value), (static_cast<double>(value) + static_cast<float>(next)) / 2}) {
      const float middle = static_cast<float>(start);
      constexpr float far = std::numeric_limits<float>::infinity();
      for (const float wanted : {std::nextafter(middle, -far), middle, std::nextafter(middle, far)}) {
        if (wanted == wanted) {
          ASSERT_EQ(Own(wanted).bits, Other(static_cast<float>(wanted)).x) << wanted;
        }
      }
    }
  }
  EXPECT_TRUE(std::isnan(static_cast<float>(Own(nan))));
}

TEST(LowPrecision, RoundsAsTorchDoes) {
  expect_the_bits_of<fastgrad::Float16, c10::Half>();
  expect_the_bits_of<fastgrad::BFloat16, c10::BFloat16>();
}

TEST(Direction, BoundedAwayFromZeroAndMixed) {
  int positive = 0, zero = 0;
  for (int64_t j = 0; j < 1000; ++j) {
    const double u = fastgrad::direction_component(7, 3, j);
    EXPECT_GE(std::fabs(u), 0.5);
    EXPECT_LT(std::fabs(u), 1.5);
    positive += u > 0;
    const double halved = fastgrad::direction_component(7, 3, j, true);
    EXPECT_TRUE(halved == 0.0 || halved == u);
    zero += halved == 0.0;
  }
  EXPECT_NEAR(positive, 500, 80);
  EXPECT_NEAR(zero, 500, 80);
  EXPECT_NE(fastgrad::direction_component(7, 3, 0, true), 0.0);
}

TEST(Direction, KeyedByAllOfSeedStreamAndCoordinate) {
  const double u = fastgrad::direction_component(7, 3, 5);
  EXPECT_NE(u, fastgrad::direction_component(8, 3, 5));
  EXPECT_NE(u, fastgrad::direction_component(7, 4, 5));
  EXPECT_NE(u, fastgrad::direction_component(7, 3, 6));
  EXPECT_NE(u, fastgrad::direction_component(7 + (int64_t{1} << 32), 3, 5));
  EXPECT_NE(u, fastgrad::direction_component(7, 3, 5 + (int64_t{1} << 32)));
}

fastgrad::ComparisonStatistics one(
    fastgrad::Entry a, fastgrad::Entry n, double atol, double rtol, bool equal_nan = false) {
  fastgrad::ComparisonStatistics statistics;
  fastgrad::reduce(statistics, a, n, 4, 5, atol, rtol, equal_nan);
  return statistics;
}

TEST(Comparison, AllcloseRule) {
  EXPECT_EQ(one({1.0, 0}, {1.0 + 1e-6, 0}, 1e-5, 0).mismatches, 0);
  EXPECT_EQ(one({1.0, 0}, {1.1, 0}, 1e-5, 1e-3).mismatches, 1);
  EXPECT_EQ(one({0.0, 0}, {10.0, 0}, 0, 1.0).mismatches, 0);  // relative to the numerical one,
  EXPECT_EQ(one({10.0, 0}, {0.0, 0}, 0, 1.0).mismatches, 1);  // not to the analytical one
  EXPECT_EQ(one({infinity, 0}, {infinity, 0}, 0, 0).mismatches, 0);
  EXPECT_EQ(one({1.0, 0}, {infinity, 0}, 0, 1.0).mismatches, 1);
  EXPECT_EQ(one({nan, 0}, {nan, 0}, 1, 1).mismatches, 1);
  EXPECT_EQ(one({nan, 0}, {nan, 0}, 1, 1, true).mismatches, 0);
  EXPECT_EQ(one({1.0, 0}, {nan, 0}, 1, 1, true).worst_excess, infinity);
}

TEST(Comparison, ComplexEntriesByModulus) {
  EXPECT_EQ(one({3.0, 4.0}, {0.0, 0.0}, 5.0, 0).mismatches, 0);
  EXPECT_EQ(one({3.0, 4.0}, {0.0, 0.0}, 4.99, 0).mismatches, 1);
  const auto statistics = one({0.0, 2.0}, {1.0, 0.0}, 0, 0);  // a conj(n) = 2i
  EXPECT_EQ(statistics.sum_product_re, 0.0);
  EXPECT_EQ(statistics.sum_product_im, 2.0);
}

TEST(Comparison, CombineKeepsTheWorst) {
  const auto small = one({1.0, 0}, {1.1, 0}, 1e-3, 0);
  auto large = one({1.0, 0}, {2.0, 0}, 1e-3, 0);
  large.worst_row = 9;
  const auto both = fastgrad::combine(small, large);
  EXPECT_EQ(both.mismatches, 2);
  EXPECT_EQ(both.worst_row, 9);
  EXPECT_EQ(both.largest_absolute, 1.0);
  EXPECT_EQ(fastgrad::combine(large, small).worst_row, 9);
}

TEST(Comparison, TheEntryVisitedFirstWinsATie) {
  const auto at = [](double row, double column) {
    auto statistics = one({1.0, 0}, {2.0, 0}, 1e-3, 0);
    statistics.worst_row = row;
    statistics.worst_column = column;
    return statistics;
  };
  const auto order = {at(0, 1), at(0, 2), at(1, 0), at(9, 31), at(0, 32)};
  for (const auto* left = order.begin(); left != order.end(); ++left) {
    for (const auto* right = left; right != order.end(); ++right) {
      for (const auto& both : {fastgrad::combine(*left, *right), fastgrad::combine(*right, *left)}) {
        EXPECT_EQ(both.worst_row, left->worst_row);
        EXPECT_EQ(both.worst_column, left->worst_column);
      }
    }
  }
}

TEST(Richardson, IsExactForCubicsAndSeesKinks) {
  const double eps = 1e-2;
  const auto four = [&](auto f) { return fastgrad::FourValues{f(eps), f(-eps), f(eps / 2), f(-eps / 2)}; };
  const auto cubic = [](double h) { return 2 + 3 * h + 5 * h * h + 7 * h * h * h; };
  EXPECT_NEAR(fastgrad::richardson(four(cubic), eps), 3.0, 1e-12);
  // The truncation of D(h) alone: h^2 / 8 times the third derivative, 42.
  EXPECT_NEAR(fastgrad::difference_noise(four(cubic), 2.0, eps, 2.2e-16), eps * eps * 42 / 8, 1e-9);
  const auto kink = [](double h) { return h < 0 ? -h : h; };
  EXPECT_EQ(fastgrad::richardson(four(kink), eps), 0.0);
  EXPECT_NEAR(fastgrad::difference_noise(four(kink), 0.0, eps, 2.2e-16), 1.0, 1e-9);
  const auto nothing = [](double) { return std::nan(""); };
  EXPECT_TRUE(std::isnan(fastgrad::difference_noise(four(nothing), 1.0, eps, 2.2e-16)));
}

TEST(Difference, RealizedComponentIsTheDirectionUpToRounding) {
  EXPECT_NEAR(fastgrad::realized_component(0.75, 1e-6 * 1.25, 1e-6), 1.25, 1e-9);
  const float x = 1.0f;
  const double step = 1e-6 * 1.25;
  const double whole = fastgrad::realized_width(x, step);
  const double half = fastgrad::realized_width(x, step / 2);
  EXPECT_EQ(fastgrad::realized_component(x, step, 1e-6), (8 * half - whole) / 6e-6);
  EXPECT_NEAR(fastgrad::realized_component(std::numeric_limits<double>::infinity(), step, 1e-6), 1.25, 1e-12);
}

TEST(Difference, AnInfiniteCoordinateTakesAFiniteStep) {
  EXPECT_EQ(fastgrad::directional_step(-std::numeric_limits<double>::infinity(), 1e-6, 0x1p-24), 1e-6);
  EXPECT_EQ(fastgrad::directional_step(0x1p30, 1e-6, 0x1p-24), 64.0);
}

}  // namespace
