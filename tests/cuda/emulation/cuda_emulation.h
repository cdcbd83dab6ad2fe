// CUDA kernels on the CPU: one fiber a thread of a block, __syncthreads() as a yield to the others.
//
// Checks indexing and arithmetic of .cu files that include no torch headers and launch through
// FASTGRAD_LAUNCH. Blocks run one after another; races, shuffles and streams are out of its sight.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __shared__ static

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  dim3(unsigned x_, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0 };
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace cuda_emulation {

class Block {
 public:
  // Runs body once for every thread of one block.
  static void run(dim3 size, const std::function<void()>& body) {
    Block block(body);
    current_ = &block;
    for (unsigned z = 0; z < size.z; ++z)
      for (unsigned y = 0; y < size.y; ++y)
        for (unsigned x = 0; x < size.x; ++x) block.add(dim3(x, y, z));
    block.run_all();
    current_ = nullptr;
  }

  // Hands control to the next thread: everybody reaches the barrier before anybody passes it,
  // because every round resumes each unfinished thread exactly once.
  static void yield() {
    Fiber& fiber = *current_->running_;
    swapcontext(&fiber.context, &current_->scheduler_);
  }

 private:
  struct Fiber {
    ucontext_t context;
    dim3 index;
    bool finished = false;
  };
  static constexpr size_t stack_size = 64 * 1024;

  explicit Block(const std::function<void()>& body) : body_(body) {}

  void add(dim3 index) {
    auto fiber = std::make_unique<Fiber>();
    fiber->index = index;
    if (fibers_.size() == stacks_.size()) {
      stacks_.emplace_back(new char[stack_size]);
    }
    getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = stacks_[fibers_.size()].get();
    fiber->context.uc_stack.ss_size = stack_size;
    fiber->context.uc_link = &scheduler_;
    makecontext(&fiber->context, reinterpret_cast<void (*)()>(&Block::start), 0);
    fibers_.push_back(std::move(fiber));
  }

  static void start() {
    current_->body_();
    current_->running_->finished = true;
  }

  void run_all() {
    for (bool any = true; any;) {
      any = false;
      for (const auto& fiber : fibers_) {
        if (!fiber->finished) {
          any = true;
          running_ = fiber.get();
          threadIdx = fiber->index;
          swapcontext(&scheduler_, &fiber->context);
        }
      }
    }
  }

  static inline Block* current_ = nullptr;
  static inline std::vector<std::unique_ptr<char[]>> stacks_;  // serve every block: making them is slow
  const std::function<void()>& body_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  Fiber* running_ = nullptr;
  ucontext_t scheduler_;
};

inline void launch(dim3 grid, dim3 block, const std::function<void()>& body) {
  gridDim = grid;
  blockDim = block;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; ++x) {
        blockIdx = dim3(x, y, z);
        Block::run(block, body);
      }
}

}  // namespace cuda_emulation

inline void atomicAdd(double* target, double value) { *target += value; }

inline void __syncthreads() { cuda_emulation::Block::yield(); }

#define FASTGRAD_MOST_BLOCKS 8  // few, so that a grid's edge is cheap to reach
#define FASTGRAD_LAUNCH(kernel, grid, block, stream, ...) \
  cuda_emulation::launch((grid), (block), [&] { kernel(__VA_ARGS__); })
