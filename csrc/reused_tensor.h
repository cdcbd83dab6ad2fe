// A tensor that is passed to func or to a backward repeatedly, each time with different values.
#pragma once

#include "ops/common.h"

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <vector>

namespace fastgrad {

// Increases the version counter as an in-place operation would, because operators below autograd do not.
inline void count_as_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) {
    tensor.unsafeGetTensorImpl()->bump_version();
  }
}

// One tensor that is passed again and again, as in torch's checker. A function that caches results by a tensor's
// identity or address then gives wrong results.
class ReusedTensor {
 public:
  // The last tensor if its properties are unchanged, otherwise a new one from make(). The caller writes new values.
  template <typename Make>
  const at::Tensor& next(const Make& make) {
    if (!looks_as_made()) {
      tensor_ = make();
      keys_ = tensor_.key_set();
      dtype_ = tensor_.scalar_type();
      sizes_ = tensor_.sizes().vec();
      strides_ = tensor_.layout() == at::kStrided ? tensor_.strides().vec() : std::vector<int64_t>();
    }
    count_as_written(tensor_);
    return tensor_;
  }

 private:
  bool looks_as_made() const {
    return tensor_.defined() && tensor_.layout() == at::kStrided && !tensor_.requires_grad() &&
           tensor_.key_set() == keys_ && tensor_.scalar_type() == dtype_ && tensor_.sizes() == sizes_ &&
           tensor_.strides() == strides_ && bytes_reached(tensor_) <= static_cast<int64_t>(tensor_.storage().nbytes());
  }

  at::Tensor tensor_;
  c10::DispatchKeySet keys_;
  at::ScalarType dtype_ = at::kDouble;
  std::vector<int64_t> sizes_, strides_;
};

}  // namespace fastgrad
