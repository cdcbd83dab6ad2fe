// The CUDA kernels in the CPU emulation, at sizes around block and grid edges, against the one-element bodies.
#include "cuda/compare.h"
#include "cuda/device.h"
#include "cuda/dots.h"
#include "cuda/elementwise.h"
#include "cuda/project_entries.h"
#include "cuda/project_rows.h"
#include "kernels/difference.h"
#include "kernels/direction.h"
#include "kernels/products.h"
#include "kernels/richardson.h"
#include "kernels/sparse.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

using namespace fastgrad;
using namespace fastgrad::cuda;

constexpr int64_t block = threads_per_block;
constexpr int64_t grid = FASTGRAD_MOST_BLOCKS * block;
constexpr double nan = std::numeric_limits<double>::quiet_NaN();
constexpr double infinity = std::numeric_limits<double>::infinity();

template <typename T>
constexpr RealType type_of() {
  return sizeof(T) == 8                         ? RealType::float64
         : sizeof(T) == 4                       ? RealType::float32
         : std::is_same_v<T, fastgrad::Float16> ? RealType::float16
                                                : RealType::bfloat16;
}

// Values around zero, the same in every call, then -0, NaN and infinity.
template <typename T = double>
std::vector<T> numbers(int64_t size, int64_t stream = 0) {
  std::vector<T> values;
  for (int64_t j = 0; j < size; ++j) {
    values.push_back(static_cast<T>(direction_component(5, stream, j)));
  }
  return values;
}

// Awkward ones among them.
template <typename T>
std::vector<T> origins(int64_t size) {
  std::vector<T> values = numbers<T>(size);
  const double special[] = {-0.0, 1e4, infinity, nan};
  for (int64_t j = 0; j < std::min<int64_t>(size, 4); ++j) {
    values[size - 1 - j] = static_cast<T>(special[j]);
  }
  return values;
}

template <typename T>
bool same_bits(const std::vector<T>& left, const std::vector<T>& right) {
  return left.size() == right.size() &&
         (left.empty() || !std::memcmp(left.data(), right.data(), left.size() * sizeof(T)));
}

template <typename T>
class Emulated : public testing::Test {
 public:
  static constexpr int64_t sizes[] = {0, 1, block - 1, block, block + 1, grid - 1, grid + 1, 3 * grid + 7};
};
using Types = testing::Types<double, float, fastgrad::Float16, fastgrad::BFloat16>;
TYPED_TEST_SUITE(Emulated, Types);

TYPED_TEST(Emulated, FlattenAndUnflatten) {
  for (const int64_t size : this->sizes) {
    const std::vector<TypeParam> values = origins<TypeParam>(size);
    for (const int64_t stride : {1, 3}) {
      std::vector<double> out(size * stride + 1, -7.0);
      std::vector<double> expected = out;
      for (int64_t c = 0; c < size; ++c) {
        expected[c * stride] = static_cast<double>(values[c]);
      }
      ASSERT_EQ(launch_flatten(out.data(), stride, values.data(), type_of<TypeParam>(), size, nullptr), cudaSuccess);
      ASSERT_TRUE(same_bits(out, expected));
      std::vector<TypeParam> back(size + 1, static_cast<TypeParam>(-7.0));
      ASSERT_EQ(launch_unflatten(back.data(), type_of<TypeParam>(), out.data(), stride, size, nullptr), cudaSuccess);
      for (int64_t c = 0; c < size; ++c) {
        ASSERT_TRUE(back[c] == values[c] || (back[c] != back[c] && values[c] != values[c]));
      }
      EXPECT_EQ(static_cast<double>(back[size]), -7.0);
    }
  }
}

TYPED_TEST(Emulated, PerturbCoordinate) {
  const std::vector<TypeParam> origin = origins<TypeParam>(9);
  for (const int sign : {-1, 0, 1}) {
    for (int64_t c = 0; c < 9; ++c) {
      std::vector<TypeParam> x(18, static_cast<TypeParam>(7.0));
      std::vector<TypeParam> expected = x;
      for (const int64_t restored : {c, (c + 1) % 9}) {
        expected[2 * restored] = origin[restored];
        expected[2 * c] = moved_coordinate(origin[c], sign, 1e-3, 0x1p-7);
        ASSERT_EQ(
            launch_perturb_coordinate(
                x.data(), origin.data(), {2 * c, c}, {2 * restored, restored}, type_of<TypeParam>(), sign, 1e-3, 0x1p-7,
                nullptr),
            cudaSuccess);
        EXPECT_TRUE(same_bits(x, expected));
      }
    }
  }
}

TYPED_TEST(Emulated, PerturbCoordinates) {
  for (const int64_t size : this->sizes) {
    const std::vector<TypeParam> origin = origins<TypeParam>(2 * size + 4);
    std::vector<int64_t> chosen(size);
    // Other coordinates to restore, and two outside, as before the first step and after the last.
    std::vector<int64_t> restored = {-1, static_cast<int64_t>(origin.size())};
    for (int64_t k = 0; k < size; k += 3) {
      restored.push_back(2 * k + ((k + 1) % 2));
    }
    for (int64_t k = 0; k < size; ++k) {
      chosen[k] = 2 * k + (k % 2);
    }
    for (const int sign : {-1, 0, 1}) {
      std::vector<TypeParam> x(origin.size(), static_cast<TypeParam>(7.0));
      std::vector<TypeParam> expected = x;
      const auto perturb = [&] {
        return launch_perturb_coordinates(
            x.data(), origin.data(), type_of<TypeParam>(), origin.size(), chosen.data(), size, restored.data(),
            restored.size(), sign, 1e-3, 0x1p-7, nullptr);
      };
      for (const int64_t c : chosen) {
        expected[c] = moved_coordinate(origin[c], sign, 1e-3, 0x1p-7);
      }
      for (size_t k = 2; k < restored.size(); ++k) {
        expected[restored[k]] = origin[restored[k]];
      }
      ASSERT_EQ(perturb(), cudaSuccess);
      ASSERT_TRUE(same_bits(x, expected));
      std::vector<int64_t> outside = {-1, static_cast<int64_t>(origin.size()), INT64_MIN, INT64_MAX};
      outside.resize(std::min(size, int64_t{4}));
      std::copy(outside.begin(), outside.end(), chosen.begin());
      ASSERT_EQ(perturb(), cudaSuccess);
      ASSERT_TRUE(same_bits(x, expected));
      for (size_t k = 0; k < outside.size(); ++k) {
        chosen[k] = static_cast<int64_t>(2 * k + (k % 2));
      }
    }
  }
}

TYPED_TEST(Emulated, Displace) {
  for (const int64_t size : this->sizes) {
    const std::vector<TypeParam> origin = origins<TypeParam>(size);
    const std::vector<double> displacement = numbers(2 * size, 1);
    for (const double scale : {-0.5, 0.0}) {
      std::vector<TypeParam> x(size + 1, static_cast<TypeParam>(7.0));
      std::vector<TypeParam> expected = x;
      for (int64_t c = 0; c < size; ++c) {
        expected[c] = displaced(origin[c], displacement[2 * c], scale);
      }
      ASSERT_EQ(
          launch_displace(x.data(), origin.data(), type_of<TypeParam>(), displacement.data(), 2, size, scale, nullptr),
          cudaSuccess);
      ASSERT_TRUE(same_bits(x, expected));
    }
  }
}

TYPED_TEST(Emulated, Realize) {
  for (const int64_t size : this->sizes) {
    const std::vector<TypeParam> origin = origins<TypeParam>(size);
    std::vector<double> displacement(size + 1, 7.0);
    std::vector<double> steps = displacement;
    std::vector<double> realized(size + 1, -7.0);
    std::vector<double> expected = realized;
    for (int64_t c = 0; c < size; ++c) {
      steps[c] = direction_component(3, 1, 5 + c) * directional_step(origin[c], 1e-3, 0x1p-7);
      expected[c] = realized_component(origin[c], steps[c], 1e-3);
    }
    ASSERT_EQ(
        launch_realize(
            displacement.data(), realized.data(), origin.data(), type_of<TypeParam>(), size, 3, 1, 5, 1e-3, 0x1p-7,
            nullptr),
        cudaSuccess);
    ASSERT_TRUE(same_bits(displacement, steps));
    ASSERT_TRUE(same_bits(realized, expected));
  }
}

TYPED_TEST(Emulated, CentralDifference) {
  const std::vector<TypeParam> origin = origins<TypeParam>(9);
  for (const int64_t size : this->sizes) {
    const std::vector<float> minus = numbers<float>(size, 3);
    for (const int64_t coordinate : {0, 6, 7}) {
      std::vector<double> column = numbers(2 * size + 1, 4);
      std::vector<double> expected = column;
      const double width = realized_width(origin[coordinate], coordinate_step(origin[coordinate], 1e-3, 0x1p-7));
      for (int64_t i = 0; i < size; ++i) {
        expected[2 * i] = difference_quotient(column[2 * i], minus[i], width);
      }
      ASSERT_EQ(
          launch_central_difference(
              column.data(), 2, minus.data(), RealType::float32, size, origin.data(), type_of<TypeParam>(), coordinate,
              1e-3, 0x1p-7, nullptr),
          cudaSuccess);
      ASSERT_TRUE(same_bits(column, expected));
    }
  }
}

class EmulatedDoubles : public testing::TestWithParam<int64_t> {};

TEST_P(EmulatedDoubles, Direction) {
  const int64_t size = GetParam();
  for (const int64_t stride : {1, 3}) {
    std::vector<double> out(size * stride + 1, -7.0);
    for (const int64_t first : {0, 1000, 1003}) {  // at the edge of a group of four, and within
      std::fill(out.begin(), out.end(), -7.0);
      ASSERT_EQ(launch_direction(out.data(), stride, size, 11, 2, first, true, nullptr), cudaSuccess);
      for (int64_t j = 0; j < size; ++j) {
        ASSERT_EQ(out[j * stride], direction_component(11, 2, first + j, true));
      }
      EXPECT_EQ(out[size * stride], -7.0);  // nothing past the end
    }
  }
}

TEST_P(EmulatedDoubles, Richardson) {
  const int64_t size = GetParam();
  std::vector<std::vector<double>> values;
  for (int64_t stream = 0; stream < 5; ++stream) {
    values.push_back(origins<double>(size));
    std::rotate(values.back().begin(), values.back().begin() + std::min(size, stream), values.back().end());
  }
  std::vector<double> derivative(size + 1, -7.0);
  std::vector<double> noise = numbers(size + 1, 6);
  std::vector<double> expected = derivative;
  std::vector<double> expected_noise = noise;
  for (int64_t i = 0; i < size; ++i) {
    const FourValues f{values[1][i], values[2][i], values[3][i], values[4][i]};
    expected[i] = richardson(f, 1e-3);
    expected_noise[i] = louder(difference_noise(f, values[0][i], 1e-3, 0x1p-52), noise[i]);
  }
  ASSERT_EQ(
      launch_richardson(
          derivative.data(), noise.data(), values[0].data(), values[1].data(), values[2].data(), values[3].data(),
          values[4].data(), size, 1e-3, 0x1p-52, nullptr),
      cudaSuccess);
  const auto agree = [](const std::vector<double>& left, const std::vector<double>& right) {
    return std::equal(left.begin(), left.end(), right.begin(), [](double a, double b) {
      return a == b || (std::isnan(a) && std::isnan(b));
    });
  };
  ASSERT_TRUE(agree(derivative, expected));
  ASSERT_TRUE(agree(noise, expected_noise));
}

TEST_P(EmulatedDoubles, Decompress) {
  const int64_t count = GetParam();
  const std::vector<double> compressed = numbers(17, 7);
  const std::vector<double> subtrahend = numbers(17, 8);
  std::vector<int64_t> positions(2 * count + 1);
  std::vector<int64_t> entries(count);
  for (int64_t e = 0; e < 2 * count + 1; ++e) {
    positions[e] = e * 5 % 17;
  }
  for (int64_t k = 0; k < count; ++k) {
    entries[k] = 2 * k + 1;
  }
  for (const double* less : {static_cast<const double*>(nullptr), subtrahend.data()}) {
    std::vector<double> values(2 * count + 1, -7.0);
    std::vector<double> expected = values;
    for (const int64_t e : entries) {
      expected[e] = decompressed(compressed.data(), less, positions[e]);
    }
    const auto decompress = [&] {
      return launch_decompress(
          values.data(), values.size(), compressed.data(), less, 17, positions.data(), entries.data(), count, nullptr);
    };
    ASSERT_EQ(decompress(), cudaSuccess);
    ASSERT_TRUE(same_bits(values, expected));
    if (count < 2) {
      continue;
    }
    const std::vector<int64_t> positions_within = positions;
    const std::vector<int64_t> entries_within = entries;
    positions[entries[0]] = 17;
    entries[1] = -1;
    ASSERT_EQ(decompress(), cudaSuccess);
    expected[entries[0]] = nan;
    ASSERT_TRUE(same_bits(values, expected));
    positions = positions_within;
    entries = entries_within;
  }
}

TEST_P(EmulatedDoubles, ProjectEntries) {
  const int64_t count = GetParam();
  const std::vector<double> vector = numbers(13, 7);
  const std::vector<double> entries = numbers(count, 8);
  // Every entry with its own target; few targets; a target of nearly all entries; runs around a window.
  for (const auto& target_of : std::vector<std::function<int64_t(int64_t)>>{
           [](int64_t e) { return 3 * e; }, [](int64_t e) { return e * 3 % 17; },
           [](int64_t e) { return e % 50 == 7 ? e % 17 : 4; }, [](int64_t e) { return e / (entries_window + 1); }}) {
    std::vector<int64_t> sources(count), targets(count), order(count), ascending;
    for (int64_t e = 0; e < count; ++e) {
      sources[e] = e * 5 % 13;
      targets[e] = target_of(e);
    }
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return targets[a] < targets[b]; });
    for (const int64_t e : order) {
      ascending.push_back(targets[e]);
    }
    const int64_t size = 3 * count + 19;
    const int64_t partials = project_entries_partials(count);
    for (const bool squared : count < grid - 1 ? std::vector<bool>{false, true} : std::vector<bool>{true}) {
      std::vector<double> expected(size, -7.0), expected_squares = expected, first;
      for (int64_t e = 0; e < count; ++e) {
        add_term(expected[targets[e]], expected_squares[targets[e]], vector[sources[e]], entries[e]);
      }
      for (int repeat = 0; repeat < 2; ++repeat) {
        std::vector<double> sums(size, -7.0), squares(size, -7.0);
        std::vector<int64_t> partial_targets(partials);
        std::vector<double> partial_sums(partials, nan), partial_squares(partials, nan);
        const auto project = [&](const std::vector<int64_t>& from, const std::vector<int64_t>& to) {
          return launch_project_entries(
              sums.data(), squared ? squares.data() : nullptr, size, vector.data(), 13, from.data(), to.data(),
              order.data(), entries.data(), count, partial_targets.data(), partial_sums.data(), partial_squares.data(),
              nullptr);
        };
        ASSERT_EQ(project(sources, ascending), cudaSuccess);
        ASSERT_EQ(project(sources, std::vector<int64_t>(count, size)), cudaSuccess);  // adds nothing
        for (int64_t t = 0; t < size; ++t) {
          ASSERT_NEAR(sums[t], expected[t], 1e-13 * (1 + count));
          ASSERT_NEAR(squares[t], squared ? expected_squares[t] : -7.0, 1e-13 * (1 + count));
        }
        ASSERT_TRUE(repeat == 0 || same_bits(sums, first));
        first = sums;
        ASSERT_EQ(project(std::vector<int64_t>(count, -1), ascending), cudaSuccess);
        for (const int64_t target : targets) {
          ASSERT_TRUE(std::isnan(sums[target]));
        }
      }
    }
  }
}

TEST_P(EmulatedDoubles, Dots) {
  const int64_t size = GetParam();
  for (const int64_t count : {1, 3, 10}) {
    const std::vector<double> rows = numbers(count * size, 9);
    std::vector<double> vector = numbers(size, 10);
    if (size > 0) {
      vector[size - 1] = 0;
    }
    std::vector<double> result(2 * count + 1, -7.0);
    std::vector<double> partial(2 * count * dots_chunks(size) + 1, nan);
    ASSERT_EQ(
        launch_dots(result.data(), partial.data(), rows.data(), vector.data(), count, size, nullptr), cudaSuccess);
    for (int64_t row = 0; row < count; ++row) {
      double sum = 0;
      double terms = 0;
      for (int64_t j = 0; j < size; ++j) {
        sum += dot_term(rows[row * size + j], vector[j]);
        terms += std::fabs(dot_term(rows[row * size + j], vector[j]));
      }
      ASSERT_NEAR(result[2 * row], sum, 1e-13 * (1 + terms));
      ASSERT_NEAR(result[2 * row + 1], terms, 1e-13 * (1 + terms));
    }
    EXPECT_EQ(result[2 * count], -7.0);
    EXPECT_TRUE(std::isnan(partial.back()));
  }
}

TEST_P(EmulatedDoubles, ProjectRows) {
  // A block takes 32 columns, so a grid is full with fewer columns than it has threads.
  const int64_t size = GetParam() < grid - 1 ? GetParam() : GetParam() - grid + 32 * FASTGRAD_MOST_BLOCKS;
  // Wide blocks of few rows, and high ones of few columns, which fill no grid.
  std::vector<std::pair<int64_t, int64_t>> shapes = {{2, size}};
  if (size <= dots_chunk + 1) {
    shapes.insert(shapes.end(), {{size, 2}, {size / 64, 33}});
  }
  for (const auto& [row_count, column_count] : shapes) {
    // Cotangents of one pass and of several, the last of which is not full.
    const std::vector<int64_t> counts =
        size <= block ? std::vector<int64_t>{1, 2, 3, 8, 9, 17} : std::vector<int64_t>{3};
    for (const int64_t count : counts) {
      const int64_t columns = column_count + 3;
      const std::vector<double> rows = numbers(row_count * column_count, 11);
      const std::vector<double> cotangents = numbers(count * (2 * row_count + 1), 12);
      const std::vector<double> before = numbers(count * columns, 13);
      for (const bool transposed : {false, true}) {
        std::vector<double> sums = before;
        std::vector<double> squares = before;
        const auto matrix = [transposed](auto* values, int64_t high, int64_t wide) {
          using T = std::remove_pointer_t<decltype(values)>;
          return transposed ? Matrix<T>{values, 1, high} : Matrix<T>{values, wide, 1};
        };
        const auto weights = matrix(cotangents.data(), count, 2 * row_count + 1);
        const auto entries = matrix(rows.data(), row_count, column_count);
        const auto totals = matrix(sums.data(), count, columns);
        ASSERT_EQ(
            launch_project_rows(
                totals, matrix(squares.data(), count, columns), weights, entries, count, row_count, column_count, 1, 2,
                2, nullptr),
            cudaSuccess);
        std::vector<double> expected = before;
        std::vector<double> expected_squares = before;
        const auto places = matrix(expected.data(), count, columns);
        const auto square_places = matrix(expected_squares.data(), count, columns);
        for (int64_t k = 0; k < count; ++k) {
          for (int64_t i = 0; i < row_count; ++i) {
            for (int64_t j = 0; j < column_count; ++j) {
              add_term(places.at(k, j + 2), square_places.at(k, j + 2), weights.at(k, 1 + 2 * i), entries.at(i, j));
            }
          }
        }
        for (size_t e = 0; e < sums.size(); ++e) {
          ASSERT_NEAR(sums[e], expected[e], 1e-13 * (1 + std::fabs(expected_squares[e])));
          ASSERT_NEAR(squares[e], expected_squares[e], 1e-13 * (1 + std::fabs(expected_squares[e])));
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Sizes, EmulatedDoubles,
    testing::Values(
        0, 1, block - 1, block, block + 1, 2 * block + 1, dots_chunk - 1, dots_chunk + 1, grid - 1, grid + 1));

class EmulatedCompare : public testing::TestWithParam<std::pair<int64_t, int64_t>> {};

TEST_P(EmulatedCompare, EqualsALoopOverTheEntries) {
  const auto [rows, entries] = GetParam();
  for (const bool complex_entries : {false, true}) {
    const int64_t columns = entries * (complex_entries ? 2 : 1);
    const std::vector<double> n = numbers(rows * columns, 14);
    std::vector<double> a = n;
    for (size_t e = 0; e < a.size(); e += 3) {
      a[e] *= e % 2 == 0 ? 1.25 : 1 + 1e-9;  // several entries tie for the worst
    }
    if (a.size() > 40) {
      a[a.size() - 2] = nan;
    }
    for (const bool transposed : {false, true}) {
      const auto matrix = [&, high = rows](const std::vector<double>& values) {
        return transposed ? Matrix<const double>{values.data(), 1, high}
                          : Matrix<const double>{values.data(), columns, 1};
      };
      ComparisonStatistics expected;
      for (int64_t stripe = 0; stripe < entries; stripe += stripe_columns) {
        for (int64_t i = 0; i < rows; ++i) {
          for (int64_t k = stripe; k < std::min(stripe + stripe_columns, entries); ++k) {
            const auto at = [&, wide = complex_entries](const std::vector<double>& values) {
              return wide ? Entry{matrix(values).at(i, 2 * k), matrix(values).at(i, 2 * k + 1)}
                          : Entry{matrix(values).at(i, k), 0.0};
            };
            const ComparisonStatistics before = expected;
            reduce(expected, at(a), at(n), i, k, 1e-5, 1e-3, false);
            const bool may = complex_entries ? may_change<true>(maxima_of(before), at(a), at(n), 1e-5, 1e-3)
                                             : may_change<false>(maxima_of(before), at(a), at(n), 1e-5, 1e-3);
            ASSERT_TRUE(may || !std::memcmp(&before, &expected, sizeof(expected)));
          }
        }
      }
      ComparisonStatistics found;
      std::vector<ComparisonStatistics> partial(comparison_blocks);
      ASSERT_EQ(
          launch_compare(
              &found, partial.data(), matrix(a), matrix(n), rows, entries, 1e-5, 1e-3, complex_entries, false, nullptr),
          cudaSuccess);
      EXPECT_EQ(found.mismatches, expected.mismatches);
      EXPECT_EQ(found.worst_excess, expected.worst_excess);
      EXPECT_EQ(found.worst_row, expected.worst_row);
      EXPECT_EQ(found.worst_column, expected.worst_column);
      EXPECT_EQ(found.largest_absolute, expected.largest_absolute);
      EXPECT_EQ(found.largest_relative, expected.largest_relative);
      const double* const sums = &found.sum_analytical;
      const double* const expected_sums = &expected.sum_analytical;
      for (int field = 0; field < 4; ++field) {
        EXPECT_TRUE(
            std::fabs(sums[field] - expected_sums[field]) <= 1e-12 * (1 + expected.sum_numerical) ||
            (std::isnan(sums[field]) && std::isnan(expected_sums[field])));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, EmulatedCompare,
    testing::Values(
        std::pair(0, 0), std::pair(0, 3), std::pair(3, 0), std::pair(1, 1), std::pair(31, 33), std::pair(32, 32),
        std::pair(33, 31), std::pair(300, 1), std::pair(1, 300), std::pair(100, 130), std::pair(290, 290)));

// Blocks of more rows, and more chunks, than blocks of threads.
TEST(EmulatedGrids, MoreWorkThanBlocks) {
  const int64_t size = (FASTGRAD_MOST_BLOCKS + 3) * dots_chunk + 5;
  const std::vector<double> row = numbers(size, 9);
  std::vector<double> result(2, nan), partial(2 * dots_chunks(size), nan);
  ASSERT_EQ(launch_dots(result.data(), partial.data(), row.data(), row.data(), 1, size, nullptr), cudaSuccess);
  const double expected = std::inner_product(row.begin(), row.end(), row.begin(), 0.0);
  EXPECT_NEAR(result[0], expected, 1e-12 * expected);
  EXPECT_NEAR(result[1], expected, 1e-12 * expected);

  const int64_t rows = 2 * FASTGRAD_MOST_BLOCKS + 1;
  std::vector<double> results(2 * rows, nan), partials(2 * rows, nan);
  const std::vector<double> ones(rows, 1.0);
  ASSERT_EQ(launch_dots(results.data(), partials.data(), ones.data(), row.data(), rows, 1, nullptr), cudaSuccess);
  for (const double value : results) {
    ASSERT_EQ(std::fabs(value), std::fabs(row[0]));
  }

  // Every tile has a wrong entry. That of the last tile is the worst, and the first of those that tie.
  const int64_t high = 33 * FASTGRAD_MOST_BLOCKS;
  std::vector<double> analytical(high, 1.0);
  for (int64_t i = 0; i < high; i += 32) {
    analytical[i] = i < high / 2 ? 2.0 : 3.0;
  }
  const std::vector<double> numerical(high, 1.0);
  ComparisonStatistics found;
  std::vector<ComparisonStatistics> of_blocks(comparison_blocks);
  ASSERT_EQ(
      launch_compare(
          &found, of_blocks.data(), Matrix<const double>{analytical.data(), 1, 1},
          Matrix<const double>{numerical.data(), 1, 1}, high, 1, 1e-5, 1e-3, false, false, nullptr),
      cudaSuccess);
  EXPECT_EQ(found.mismatches, std::ceil(high / 32.0));
  EXPECT_EQ(found.worst_row, (high / 2 + 31) / 32 * 32);
  EXPECT_EQ(found.largest_absolute, 2.0);
}

// Whether the kernels with barriers give right results. There are more pieces than blocks, so that a block processes
// several pieces in turn.
bool kernels_with_barriers_are_right() {
  constexpr int64_t pieces = FASTGRAD_MOST_BLOCKS + 20;
  const auto near = [](double left, double right) { return std::fabs(left - right) <= 1e-12; };
  std::vector<double> components(4 * block * pieces);
  launch_direction(components.data(), 1, 4 * block * pieces, 11, 2, 0, true, nullptr);
  bool right = true;
  for (int64_t c = 0; c < 4 * block * pieces; ++c) {
    right = right && components[c] == direction_component(11, 2, c, true);
  }
  if (!right) {
    return false;
  }

  const std::vector<double> values = numbers(block * pieces, 9);
  const std::vector<double> ones(block * pieces, 1.0);
  std::vector<double> result(2 * pieces), partial(2 * pieces);
  launch_dots(result.data(), partial.data(), values.data(), ones.data(), pieces, block, nullptr);
  for (int64_t row = 0; row < pieces; ++row) {
    const double* const first = values.data() + row * block;
    right = right && near(result[2 * row], std::accumulate(first, first + block, 0.0));
  }
  if (!right) {
    return false;
  }

  constexpr int64_t rows = 12, columns = 32 * pieces;
  const std::vector<double> matrix = numbers(rows * columns, 9);
  std::vector<double> sums(columns, 0.0), squares(columns, 0.0);
  launch_project_rows(
      {sums.data(), columns, 1}, {squares.data(), columns, 1}, {ones.data(), rows, 1}, {matrix.data(), columns, 1}, 1,
      rows, columns, 0, 1, 0, nullptr);
  for (int64_t j = 0; j < columns; ++j) {
    double sum = 0, square = 0;
    for (int64_t i = 0; i < rows; ++i) {
      add_term(sum, square, 1.0, matrix[i * columns + j]);
    }
    right = right && near(sums[j], sum) && near(squares[j], square);
  }
  if (!right) {
    return false;
  }

  ComparisonStatistics found;
  std::vector<ComparisonStatistics> of_blocks(comparison_blocks);
  launch_compare(
      &found, of_blocks.data(), {values.data(), 32, 1}, {ones.data(), 32, 1}, 3 * block, 32, 0.0, 0.0, false, false,
      nullptr);
  return found.mismatches == 3 * block * 32;
}

TEST(Emulation, NoticesEveryBarrierThatIsMissing) {
  ASSERT_TRUE(kernels_with_barriers_are_right());
  std::map<std::string, std::vector<cuda_emulation::Barrier*>> places;
  for (cuda_emulation::Barrier* const barrier : cuda_emulation::Barrier::all) {
    places[barrier->place].push_back(barrier);
  }
  EXPECT_GE(places.size(), 6u);
  const auto set = [](const std::vector<cuda_emulation::Barrier*>& barriers, bool off) {
    for (cuda_emulation::Barrier* const barrier : barriers) {
      barrier->is_off = off;
    }
  };
  for (const auto& [place, barriers] : places) {
    set(barriers, true);
    bool right = true;
    for (int attempt = 0; attempt < 3; ++attempt) {
      right = right && kernels_with_barriers_are_right();
    }
    set(barriers, false);
    EXPECT_FALSE(right) << "nothing shows that the barrier at " << place << " is needed";
  }
  EXPECT_TRUE(kernels_with_barriers_are_right());
}

// The launchers return the launch errors of every kernel that they launch.
TEST(Emulation, LaunchErrorsAreHandedOn) {
  const std::vector<double> values = numbers(2 * block, 9);
  std::vector<double> out(values.size()), partial(values.size());
  ComparisonStatistics found;
  std::vector<ComparisonStatistics> of_blocks(comparison_blocks);
  std::vector<int64_t> order(values.size()), none(values.size(), 0), partial_targets(values.size());
  std::iota(order.begin(), order.end(), 0);
  const auto size = static_cast<int64_t>(values.size());
  const RealType type = RealType::float64;
  const std::vector<std::pair<int, std::function<cudaError_t()>>> launchers = {
      {1, [&] { return launch_flatten(out.data(), 1, values.data(), type, size, nullptr); }},
      {1, [&] { return launch_unflatten(out.data(), type, values.data(), 1, size, nullptr); }},
      {1, [&] { return launch_direction(out.data(), 1, size, 0, 0, 0, false, nullptr); }},
      {1, [&] { return launch_displace(out.data(), values.data(), type, values.data(), 1, size, 1, nullptr); }},
      {1,
       [&] {
         return launch_realize(out.data(), partial.data(), values.data(), type, size, 0, 0, 0, 1e-3, 0x1p-24, nullptr);
       }},
      {1,
       [&] { return launch_perturb_coordinate(out.data(), values.data(), {0, 0}, {0, 0}, type, 1, 1e-3, 0, nullptr); }},
      {1,
       [&] {
         return launch_perturb_coordinates(
             out.data(), values.data(), type, size, order.data(), size, nullptr, 0, 1, 1e-3, 0, nullptr);
       }},
      {1,
       [&] {
         return launch_central_difference(
             out.data(), 1, values.data(), type, size, values.data(), type, 0, 1e-3, 0, nullptr);
       }},
      {1,
       [&] {
         return launch_richardson(
             out.data(), partial.data(), values.data(), values.data(), values.data(), values.data(), values.data(),
             size, 1e-3, 0, nullptr);
       }},
      {1,
       [&] {
         return launch_decompress(
             out.data(), size, values.data(), nullptr, size, order.data(), order.data(), size, nullptr);
       }},
      {2, [&] { return launch_dots(out.data(), partial.data(), values.data(), values.data(), 1, size, nullptr); }},
      {2,
       [&] {
         return launch_compare(
             &found, of_blocks.data(), {values.data(), 2, 1}, {values.data(), 2, 1}, block, 2, 0, 0, false, false,
             nullptr);
       }},
      {1,
       [&] {
         return launch_project_rows(
             {out.data(), 2, 1}, {partial.data(), 2, 1}, {values.data(), block, 1}, {values.data(), 2, 1}, 1, block, 2,
             0, 1, 0, nullptr);
       }},
      {2,
       [&] {
         std::vector<double> sums(size), squares(size);
         return launch_project_entries(
             out.data(), nullptr, size, values.data(), size, order.data(), none.data(), order.data(), values.data(),
             size, partial_targets.data(), sums.data(), squares.data(), nullptr);
       }},
  };
  for (const auto& [kernels, launch] : launchers) {
    for (int failing = 1; failing <= kernels; ++failing) {
      cuda_emulation::failing_launch = failing;
      EXPECT_EQ(launch(), cudaErrorLaunchFailure);
      EXPECT_EQ(cuda_emulation::failing_launch, 0);
    }
    EXPECT_EQ(launch(), cudaSuccess);
  }
}

// The emulation itself: barriers that not all threads reach, or at different places, and launches that fail.
void waits_in_half_of_its_threads() {
  if (threadIdx.x < 32) {
    __syncthreads();
  }
}

void waits_in_two_places() {
  if (threadIdx.x < 32) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

void does_nothing() {}

TEST(Emulation, RefusesWhatADeviceDoes) {
  EXPECT_THROW(FASTGRAD_LAUNCH(waits_in_half_of_its_threads, 1, 64, nullptr), std::logic_error);
  EXPECT_THROW(FASTGRAD_LAUNCH(waits_in_two_places, 1, 64, nullptr), std::logic_error);
  for (const auto& [blocks, threads] : {std::pair(0u, 64u), {1u, 0u}, {1u, 1025u}}) {
    FASTGRAD_LAUNCH(does_nothing, blocks, threads, nullptr);
    EXPECT_EQ(cudaGetLastError(), cudaErrorInvalidConfiguration);
    EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  }
}

// The emulation itself: a block-wide sum needs the barrier to work.
void block_sum(const int* values, int* sums) {
  FASTGRAD_SHARED(int, shared, 64);
  shared[threadIdx.x] = values[blockIdx.x * blockDim.x + threadIdx.x];
  __syncthreads();
  for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) {
      shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    __syncthreads();
  }
  if (threadIdx.x == 0) {
    sums[blockIdx.x] = shared[0];
  }
}

TEST(Emulation, Barrier) {
  std::vector<int> values(128);
  std::iota(values.begin(), values.end(), 0);
  std::vector<int> sums(2);
  const int* const first = values.data();
  int* const out = sums.data();
  FASTGRAD_LAUNCH(block_sum, 2, 64, nullptr, first, out);
  EXPECT_EQ(sums[0], 63 * 64 / 2);
  EXPECT_EQ(sums[1], 63 * 64 / 2 + 64 * 64);
}

}  // namespace
