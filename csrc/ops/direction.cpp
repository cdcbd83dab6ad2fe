// CPU and plain ATen kernels of fastgrad::direction_; the CUDA launcher is cuda/elementwise.cu.
#include "direction.h"

#include "../kernels/direction.h"
#include "common.h"
#include "direction_avx2.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

namespace fastgrad {
void write_direction(
    double* out, int64_t stride, int64_t count, int64_t seed, int64_t stream, int64_t first, bool halved) {
#ifdef FASTGRAD_HAS_AVX2
  static const bool has_avx2 = __builtin_cpu_supports("avx2");
#endif
  const int64_t end = first + count;
  // Group by group: four components for each call of the generator; whole groups without a test for each.
  for (int64_t group = first >> 2; group <= (end - 1) >> 2; ++group) {
    const int64_t own = 4 * group;
#ifdef FASTGRAD_HAS_AVX2
    if (has_avx2 && stride == 1 && group > 0 && own >= first && end - own >= 4 * groups_at_once) {
      write_groups_avx2(out + (own - first), seed, stream, group, halved);
      group += groups_at_once - 1;
      continue;
    }
#endif
    const Words4 words = direction_words(seed, stream, group);
    const auto write = [&](int64_t coordinate) {
      out[(coordinate - first) * stride] = component_of(words.word[coordinate & 3], coordinate, halved);
    };
    if (own >= first && own + 4 <= end) {
      for (int64_t k = 0; k < 4; ++k) {
        write(own + k);
      }
      continue;
    }
    const int64_t last = std::min(end, own + 4);
    for (int64_t coordinate = std::max(first, own); coordinate < last; ++coordinate) {
      write(coordinate);
    }
  }
}

namespace {

void direction_cpu(const at::Tensor& out, int64_t seed, int64_t stream, int64_t first, bool halved) {
  check_direction(out, first);
  auto* values = out.mutable_data_ptr<double>();
  const int64_t stride = out.stride(0);
  at::parallel_for(0, out.numel(), grain_size, [&](int64_t begin, int64_t end) {
    write_direction(values + begin * stride, stride, end - begin, seed, stream, first + begin, halved);
  });
}

void direction_composite(const at::Tensor& out, int64_t seed, int64_t stream, int64_t first, bool halved) {
  check_direction(out, first);
  const at::Tensor values = at::empty({out.numel()}, out.options().device(at::kCPU));
  direction_cpu(values, seed, stream, first, halved);
  out.copy_(values);
}

void direction_meta(const at::Tensor&, int64_t, int64_t, int64_t, bool) {}  // no checks: sizes may be symbolic

}  // namespace

void check_direction(const at::Tensor& out, int64_t first) {
  check_float64("direction_", "out", out, 1);
  check_written("direction_", "out", out);
  TORCH_CHECK(
      first >= 0 && first <= std::numeric_limits<int64_t>::max() - out.numel() - 3,
      "direction_: first must be in [0, 2^63 - elements - 3), got ", first);
}

void direction_(const at::Tensor& out, int64_t seed, int64_t stream, int64_t first, bool halved) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fastgrad::direction_", "").typed<decltype(direction_)>();
  op.call(out, seed, stream, first, halved);
}

TORCH_LIBRARY_IMPL(fastgrad, CPU, library) { library.impl("direction_", &direction_cpu); }
TORCH_LIBRARY_IMPL(fastgrad, Meta, library) { library.impl("direction_", &direction_meta); }
FASTGRAD_COMPOSITE("direction_", &direction_composite)

}  // namespace fastgrad
