// cuda:0 and cuda:1 as torch's core sees devices: the current one, streams, events, memory, random numbers.
//
// All of it is this process's own memory and threads; every request takes effect immediately.
#include "device.h"

#include <ATen/core/Generator.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>

namespace pretended {
namespace {

using Clock = std::chrono::steady_clock;

thread_local c10::DeviceIndex current_device = 0;
thread_local std::array<c10::StreamId, devices> current_streams{};
std::atomic<int64_t> streams_made{0};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = c10::kCUDA;
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device getDevice() const override { return {c10::kCUDA, current_device}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() >= 0 && device.index() < devices, "CUDA error: invalid device ordinal");
    current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return devices; }

  static c10::Device with_index(c10::Device device) {
    return {c10::kCUDA, device.has_index() ? device.index() : current_device};
  }
  static c10::Stream stream(c10::Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, with_index(device), id);
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_streams.at(with_index(device).index()));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream(device, ++streams_made); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream before = getStream(next.device());
    current_streams.at(next.device_index()) = next.id();
    return before;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}

  static Clock::time_point& time_of(void* event) { return *static_cast<Clock::time_point*>(event); }
  void record(void** event, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) {
      *event = new Clock::time_point;
    }
    time_of(*event) = Clock::now();
  }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<Clock::time_point*>(event);
  }
  double elapsedTime(void* begin, void* end, c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(time_of(end) - time_of(begin)).count();
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    constexpr size_t alignment = 64;
    void* const data =
        size == 0 ? nullptr : std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
    if (data != nullptr) {
      std::memset(data, 0xFF, size);
    }
    return {data, data, &std::free, c10::Device(c10::kCUDA, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
} memory;
REGISTER_ALLOCATOR(c10::kCUDA, &memory)

// A CPU generator that is used as the generator of a device.
struct Generator final : c10::GeneratorImpl {
  Generator(c10::DeviceIndex index, at::Generator behind)
      : c10::GeneratorImpl(c10::Device(c10::kCUDA, index), c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        behind(std::move(behind)) {}
  void set_current_seed(uint64_t seed) override { behind.set_current_seed(seed); }
  uint64_t current_seed() const override { return behind.current_seed(); }
  uint64_t seed() override { return behind.seed(); }
  void set_offset(uint64_t) override {}
  uint64_t get_offset() const override { return 0; }
  void set_state(const c10::TensorImpl& state) override { behind.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return behind.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(device().index(), behind.clone()); }
  at::Generator behind;
};

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<Generator>(device < 0 ? current_device : device, at::detail::createCPUGenerator());
}

struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return devices; }
  int getNumGPUs() const override { return devices; }
  c10::DeviceIndex current_device() const override { return pretended::current_device; }
  c10::DeviceIndex getCurrentDevice() const override { return pretended::current_device; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? pretended::current_device : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
};

}  // namespace

c10::Allocator* allocator() { return &memory; }

const at::Generator& default_generator(c10::DeviceIndex device) {
  static const std::array<at::Generator, devices> generators{new_generator(0), new_generator(1)};
  return generators.at(device);
}

at::Generator on_cpu(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->behind;
}

}  // namespace pretended

namespace at {
using pretended::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks)  // the name is the key that torch looks up
}  // namespace at

TORCH_LIBRARY_FRAGMENT(pretended_cuda, library) {
  library.def("exchange_device(int device) -> int", [](int64_t device) {
    const c10::Device next(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
    return static_cast<int64_t>(pretended::Guard().exchangeDevice(next).index());
  });
  library.def("current_device() -> int", [] { return static_cast<int64_t>(pretended::current_device); });
  library.def(
      "current_stream(int device) -> int", [](int64_t device) { return pretended::current_streams.at(device); });
  library.def("exchange_stream(int device, int stream) -> int", [](int64_t device, int64_t stream) {
    const c10::Device on(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
    return pretended::Guard().exchangeStream(pretended::Guard::stream(on, stream)).id();
  });
  library.def("streams_made() -> int", [] { return pretended::streams_made.load(); });
  library.def("default_generator(int device) -> Generator?", [](int64_t device) {
    return pretended::default_generator(static_cast<c10::DeviceIndex>(device));
  });
}
