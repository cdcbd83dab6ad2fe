// The operators through the dispatcher, CPU kernel against the plain ATen kernel of other devices.
#include "ops/central_difference.h"
#include "ops/compare.h"
#include "ops/decompress.h"
#include "ops/perturb_coordinate.h"
#include "ops/perturb_coordinates.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace {

TEST(Ops, PerturbDifferenceRestore) {
  const at::Tensor origin = at::tensor({1.0, -2.0, 3.0}, at::kDouble);
  const at::Tensor x = origin.clone();
  const at::Tensor column = at::empty({3}, at::kDouble);
  fastgrad::perturb_coordinate_(x, origin, 1, 1, 1e-6, 0x1p-24);
  column.copy_(x * x);
  fastgrad::perturb_coordinate_(x, origin, 1, -1, 1e-6, 0x1p-24);
  fastgrad::central_difference_(column, x * x, origin, 1, 1e-6, 0x1p-24);
  fastgrad::perturb_coordinate_(x, origin, 1, 0, 1e-6, 0x1p-24);
  EXPECT_TRUE(at::equal(x, origin));
  EXPECT_TRUE(at::allclose(column, at::tensor({0.0, -4.0, 0.0}, at::kDouble), 1e-6, 1e-8));
}

TEST(Ops, PerturbAGroupDecompressRestore) {
  const at::Tensor origin = at::tensor({1.0, -2.0, 3.0}, at::kDouble);
  const at::Tensor group = at::tensor({0, 2}, at::kLong);
  const at::Tensor x = origin.clone();
  fastgrad::perturb_coordinates_(x, origin, group, 1, 0.5, 0);
  const at::Tensor plus = x * 4;
  fastgrad::perturb_coordinates_(x, origin, group, -1, 0.5, 0);
  const at::Tensor values = at::full({3}, 7.0, at::kDouble);
  fastgrad::decompress_(values, plus, x * 4, at::tensor({1, 2, 0}, at::kLong), at::tensor({2, 1}, at::kLong));
  fastgrad::perturb_coordinates_(x, origin, group, 0, 0.5, 0);
  EXPECT_TRUE(at::equal(x, origin));
  EXPECT_TRUE(at::equal(values, at::tensor({7.0, 4.0, 4.0}, at::kDouble)));
  fastgrad::decompress_(values, plus, std::nullopt, at::tensor({1, 2, 0}, at::kLong), at::tensor({0}, at::kLong));
  EXPECT_EQ(values[0].item<double>(), -8.0);
}

TEST(Ops, CompareNamesTheWorstEntry) {
  const at::Tensor numerical = at::zeros({3, 70}, at::kDouble);
  const at::Tensor analytical = numerical.clone();
  analytical[1][2] = 1e-3;
  analytical[2][65] = 5.0;
  for (const at::Tensor& n : {numerical, numerical.t().contiguous().t()}) {
    const at::Tensor fields = fastgrad::compare(analytical, n, 1e-5, 1e-3, false, false);
    EXPECT_EQ(fields[0].item<double>(), 2);
    EXPECT_EQ(fields[2].item<double>(), 2);
    EXPECT_EQ(fields[3].item<double>(), 65);
    EXPECT_EQ(fields[4].item<double>(), 5.0);
  }
}

TEST(Ops, AMessageNamesOpArgumentAndValue) {
  const at::Tensor x = at::zeros({2}, at::kDouble);
  try {
    fastgrad::perturb_coordinate_(x, x.clone(), 2, 1, 1e-6, 0);
    FAIL() << "coordinate 2 of 2 was accepted";
  } catch (const c10::Error& error) {
    EXPECT_NE(
        std::string(error.what()).find("perturb_coordinate_: coordinate must be in [0, 2), got 2"), std::string::npos);
  }
}

}  // namespace
