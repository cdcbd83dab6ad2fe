// The CUDA kernels in the CPU emulation, at sizes around block and grid edges.
#include "cuda/direction.h"
#include "kernels/direction.h"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace {

class EmulatedDirection : public testing::TestWithParam<int64_t> {};

TEST_P(EmulatedDirection, EqualsTheBodyBitForBit) {
  const int64_t size = GetParam();
  for (const int64_t stride : {1, 3}) {
    std::vector<double> out(size * stride + 1, -7.0);
    ASSERT_EQ(fastgrad::cuda::launch_direction(out.data(), stride, size, 11, 2, 1000, true, nullptr), cudaSuccess);
    for (int64_t j = 0; j < size; ++j) {
      ASSERT_EQ(out[j * stride], fastgrad::direction_component(11, 2, 1000 + j, true));
    }
    EXPECT_EQ(out[size * stride], -7.0);  // nothing past the end
  }
}

constexpr int64_t block = fastgrad::cuda::threads_per_block;
INSTANTIATE_TEST_SUITE_P(
    Sizes, EmulatedDirection,
    testing::Values(
        0, 1, block - 1, block, block + 1, 2 * block + 1, FASTGRAD_MOST_BLOCKS* block - 1,
        FASTGRAD_MOST_BLOCKS* block + 1, 3 * FASTGRAD_MOST_BLOCKS * block + 7));

// The emulation itself: a block-wide sum needs the barrier to work.
void block_sum(const int* values, int* sums) {
  static int shared[64];
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
