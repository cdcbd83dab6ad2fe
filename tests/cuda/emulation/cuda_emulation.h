// CUDA kernels on the CPU: one fiber per thread that waits at a barrier; __syncthreads() switches to other threads.
//
// Runs .cu files that include no torch headers, launch through FASTGRAD_LAUNCH and declare shared memory by
// FASTGRAD_SHARED. Blocks run one after another, and threads from barrier to barrier, both in random order. Shared
// memory is NaN when a block begins. So code that relies on an order without a barrier gives wrong sums, or NaN. A
// barrier that not all threads of a block reach is an error, and so is a launch that a device would refuse. Atomics,
// warps and streams are not emulated.
#pragma once

#ifndef __x86_64__
#include <ucontext.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

#define __global__
#define __launch_bounds__(...)
#define __device__
#define __host__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  dim3(unsigned x_, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidConfiguration = 9, cudaErrorLaunchFailure = 719 };

inline dim3 gridDim, blockDim, blockIdx, threadIdx;

namespace cuda_emulation {

// Held during launches: autograd runs backward on threads of its own.
inline std::mutex device;

inline std::mt19937 order{[] {
  const char* const seed = std::getenv("FASTGRAD_EMULATION_SEED");
  return seed ? static_cast<unsigned>(std::atoi(seed)) : 1u;
}()};

inline thread_local cudaError_t last_error = cudaSuccess;

// Number of launches until one fails, as on a device; 0: none fails.
inline int failing_launch = 0;

// Shared memory of every kernel so far: where, and how many bytes.
inline std::vector<std::pair<void*, size_t>> shared_memory;

inline void poison(const std::pair<void*, size_t>& memory) { std::memset(memory.first, 0xFF, memory.second); }

template <typename T, size_t count>
class Shared {
 public:
  Shared() {
    shared_memory.emplace_back(values_, sizeof(values_));
    poison(shared_memory.back());
  }
  operator T*() { return values_; }

 private:
  T values_[count];
};

// A place in the source where threads wait. If it is off, threads pass, as if the barrier was forgotten.
struct Barrier {
  Barrier(const char* file, int line) : place(std::string(file) + ":" + std::to_string(line)) { all.push_back(this); }
  std::string place;
  bool is_off = false;
  static inline std::vector<Barrier*> all;
};

// The registers and the stack of a fiber, or of its scheduler, while another one runs.
#ifdef __x86_64__
// swapcontext would save the signal mask, by two system calls each time, which took most of the time of kernels with
// barriers. Here the registers that a function must preserve are on the stack.
class Context {
 public:
  void start(char* stack, size_t size, void (*function)()) {
    void** const top = reinterpret_cast<void**>(stack + size / 16 * 16);
    pointer_ = top - 8;  // six registers, where to return, and the return address of function, which never returns
    std::fill(pointer_, top, nullptr);
    top[-2] = reinterpret_cast<void*>(function);
  }

  static void swap(Context& left, Context& entered) { exchange(&left.pointer_, entered.pointer_); }

 private:
  // In the registers: rdi is left, rsi is entered.
  [[gnu::naked, gnu::noinline]] static void exchange(void***, void**) {
    asm volatile(
        "pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15\n\t"
        "movq %rsp, (%rdi); movq %rsi, %rsp\n\t"
        "popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp; ret");
  }

  void** pointer_ = nullptr;
};
#else
class Context {
 public:
  void start(char* stack, size_t size, void (*function)()) {
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack;
    context_.uc_stack.ss_size = size;
    makecontext(&context_, function, 0);
  }

  static void swap(Context& left, Context& entered) { swapcontext(&left.context_, &entered.context_); }

 private:
  ucontext_t context_;
};
#endif

class Block {
 public:
  // Runs body once for every thread of one block.
  static void run(dim3 size, const std::function<void()>& body) {
    std::vector<dim3> threads;
    for (unsigned z = 0; z < size.z; ++z)
      for (unsigned y = 0; y < size.y; ++y)
        for (unsigned x = 0; x < size.x; ++x) threads.emplace_back(x, y, z);
    std::shuffle(threads.begin(), threads.end(), order);
    std::for_each(shared_memory.begin(), shared_memory.end(), poison);
    body_ = &body;
    std::vector<Fiber*> waiting;
    for (const dim3& thread : threads) {
      Fiber* const fiber = idle();
      fiber->thread = thread;
      if (!finishes(fiber)) {
        waiting.push_back(fiber);
      }
    }
    while (!waiting.empty()) {
      const bool together =
          waiting.size() == threads.size() && std::all_of(waiting.begin(), waiting.end(), [&](const Fiber* fiber) {
            return fiber->barrier->place == waiting.front()->barrier->place;
          });
      if (!together) {
        const std::string place = waiting.front()->barrier->place;
        fibers_.clear();
        idle_.clear();
        throw std::logic_error("emulation: not all threads of a block meet at " + place);
      }
      std::shuffle(waiting.begin(), waiting.end(), order);
      waiting.erase(std::remove_if(waiting.begin(), waiting.end(), &Block::finishes), waiting.end());
    }
  }

  static void wait(Barrier& barrier) {
    if (barrier.is_off) {
      return;
    }
    running_->barrier = &barrier;
    leave();
  }

 private:
  struct Fiber {
    Context context;
    std::unique_ptr<char[]> stack;
    dim3 thread;
    Barrier* barrier;  // where the thread waits; null: it has finished
    void* sanitizer = nullptr;
  };
  static constexpr size_t stack_size = 64 * 1024;

  // A fiber runs one thread after another. Only threads that wait at a barrier need a fiber each.
  static Fiber* idle() {
    if (idle_.empty()) {
      fibers_.push_back(std::make_unique<Fiber>());
      Fiber& fiber = *fibers_.back();
      fiber.stack.reset(new char[stack_size]);
      fiber.context.start(fiber.stack.get(), stack_size, &Block::live);
      idle_.push_back(&fiber);
    }
    Fiber* const fiber = idle_.back();
    idle_.pop_back();
    return fiber;
  }

  static void live() {
    arrive(nullptr);
    while (true) {
      (*body_)();
      running_->barrier = nullptr;
      leave();
    }
  }

  // Runs a thread up to its next barrier, or its end.
  static bool finishes(Fiber* fiber) {
    running_ = fiber;
    threadIdx = fiber->thread;
#ifdef __SANITIZE_ADDRESS__
    void* own = nullptr;
    __sanitizer_start_switch_fiber(&own, fiber->stack.get(), stack_size);
#endif
    Context::swap(scheduler_, fiber->context);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(own, nullptr, nullptr);
#endif
    if (fiber->barrier == nullptr) {
      idle_.push_back(fiber);
    }
    return fiber->barrier == nullptr;
  }

  static void leave() {
    Fiber* const fiber = running_;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&fiber->sanitizer, scheduler_stack_, scheduler_stack_size_);
#endif
    Context::swap(fiber->context, scheduler_);
    arrive(fiber->sanitizer);
  }

  static void arrive([[maybe_unused]] void* sanitizer) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(sanitizer, &scheduler_stack_, &scheduler_stack_size_);
#endif
  }

  static inline std::vector<std::unique_ptr<Fiber>> fibers_;  // reused for every block, because making them is slow
  static inline std::vector<Fiber*> idle_;
  static inline const std::function<void()>* body_ = nullptr;
  static inline Fiber* running_ = nullptr;
  static inline Context scheduler_;
  static inline const void* scheduler_stack_ = nullptr;
  static inline size_t scheduler_stack_size_ = 0;
};

inline void launch(dim3 grid, dim3 block, const std::function<void()>& body) {
  const std::lock_guard<std::mutex> lock(device);
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const uint64_t blocks = uint64_t{grid.x} * grid.y * grid.z;
  if (threads == 0 || threads > 1024 || blocks == 0 || grid.y > 65535 || grid.z > 65535) {
    last_error = cudaErrorInvalidConfiguration;
    return;
  }
  if (failing_launch > 0 && --failing_launch == 0) {
    last_error = cudaErrorLaunchFailure;
    return;
  }
  gridDim = grid;
  blockDim = block;
  std::vector<unsigned> numbers(blocks);
  std::iota(numbers.begin(), numbers.end(), 0u);
  std::shuffle(numbers.begin(), numbers.end(), order);
  for (const unsigned b : numbers) {
    blockIdx = dim3(b % grid.x, b / grid.x % grid.y, b / grid.x / grid.y);
    Block::run(block, body);
  }
}

}  // namespace cuda_emulation

inline cudaError_t cudaGetLastError() { return std::exchange(cuda_emulation::last_error, cudaSuccess); }

#define __syncthreads()                                         \
  ([] {                                                         \
    static cuda_emulation::Barrier barrier(__FILE__, __LINE__); \
    cuda_emulation::Block::wait(barrier);                       \
  }())

// Few blocks, so that tests reach the edge of a grid cheaply; more than threads per block, to test their reduction.
#define FASTGRAD_MOST_BLOCKS 300
#define FASTGRAD_SHARED(type, name, count) static cuda_emulation::Shared<type, count> name
#define FASTGRAD_LAUNCH(kernel, grid, block, stream, ...) \
  cuda_emulation::launch((grid), (block), [&] { kernel(__VA_ARGS__); })
