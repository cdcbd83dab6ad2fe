// torch's own level of vectorization, as torch.autograd.grad takes it for is_grads_batched.
#pragma once

#include <ATen/LegacyVmapMode.h>
#include <c10/util/Exception.h>

#include <cstdint>

namespace fastgrad {

// A level of vectorization, for the time that it lives. Warnings of operators that run here, and not through Python,
// are dropped: that one has no batching rule, and takes one row at a time, does not concern the user.
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
