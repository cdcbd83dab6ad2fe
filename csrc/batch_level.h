// torch's own level of vectorization, which torch.autograd.grad uses for is_grads_batched.
#pragma once

#include <ATen/LegacyVmapMode.h>
#include <c10/util/Exception.h>

#include <cstdint>

namespace fastgrad {

// A level of vectorization, during the lifetime of the object. Warnings of operators that run in C++ are dropped: the
// user need not know that an operator has no batching rule and therefore takes one row at a time.
class BatchLevel {
 public:
  BatchLevel() : guard_(&silence_), level(at::impl::VmapMode::increment_nesting()) {}
  BatchLevel(const BatchLevel&) = delete;
  BatchLevel& operator=(const BatchLevel&) = delete;
  ~BatchLevel() { at::impl::VmapMode::decrement_nesting(); }

 private:
  class Silence : public c10::WarningHandler {
   public:
    void process(const c10::Warning&) override {}
  };

  Silence silence_;
  c10::WarningUtils::WarningHandlerGuard guard_;

 public:
  const int64_t level;
};

}  // namespace fastgrad
