#pragma once
#include <c10/core/DeviceGuard.h>

namespace c10::cuda {
struct CUDAGuard {
  explicit CUDAGuard(c10::Device device) : guard(device) { TORCH_CHECK(device.is_cuda(), "expected a CUDA device"); }
  c10::DeviceGuard guard;
};
}  // namespace c10::cuda
