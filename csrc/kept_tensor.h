// The state of a plain tensor before a check: its values, its memory, its graph, requires_grad and the missing
// gradient.
#pragma once

#include "kept_history.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <memory>

namespace fastgrad {

class KeptTensor {
 public:
  // Null if the tensor needs more care: it is a subclass, not contiguous in ordinary CPU memory, not a leaf, made in
  // inference mode, or has a gradient.
  static std::shared_ptr<KeptTensor> keep(const pybind11::object& tensor);

  explicit KeptTensor(at::Tensor tensor);

  // Writes only what has changed; may be called again.
  void restore();

 private:
  at::Tensor tensor_, alias_;  // alias_: the same memory under a version counter of its own
  KeptHistory history_;
  std::unique_ptr<char[]> bits_;
  size_t bytes_;
  int64_t version_;
  bool requires_grad_;
};

}  // namespace fastgrad
