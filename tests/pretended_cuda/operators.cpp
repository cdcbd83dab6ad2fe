// Operators of the simulated device: the CPU's kernels on the same memory, under the rules of a device.
//
// Tensors of several devices cannot be combined. Reads by the host are counted, and forbidden where torch forbids
// waiting. Random numbers come from the device's own generator.
#include "device.h"

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/SparseTensorUtils.h>
#include <ATen/SparseCsrTensorImpl.h>
#include <ATen/SparseCsrTensorUtils.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <atomic>
#include <string_view>

namespace pretended {
namespace {

std::atomic<int64_t> reads{0};
std::atomic<bool> reads_are_errors{false};

// The host waits for the device.
void read() {
  ++reads;
  TORCH_CHECK(!reads_are_errors, "called a synchronizing CUDA operation");
}

c10::DataPtr borrowed(void* data, at::Storage owner, c10::Device device) {
  return {data, new at::Storage(std::move(owner)), [](void* kept) { delete static_cast<at::Storage*>(kept); }, device};
}

at::Storage twin(const at::Storage& storage, c10::Device device) {
  return at::Storage(
      at::Storage::use_byte_size_t(), storage.nbytes(), borrowed(storage.mutable_data_ptr().get(), storage, device),
      c10::GetAllocator(device.type()), true);
}

// Converts an operator's tensors on the device to CPU tensors over the same memory, and back.
class Twins {
 public:
  std::optional<c10::Device> device;  // where results go

  at::Tensor on_cpu(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) {
      return tensor;
    }
    device = device.value_or(tensor.device());
    for (const auto& [cpu, own] : pairs_) {
      if (own.is_same(tensor)) {
        return cpu;
      }
    }
    at::Tensor cpu;
    if (tensor.is_sparse()) {
      auto* const sparse = at::sparse::get_sparse_impl(tensor);
      cpu = at::detail::make_tensor<at::SparseTensorImpl>(
          c10::DispatchKeySet(c10::DispatchKey::SparseCPU), tensor.dtype());
      auto* const twin = at::sparse::get_sparse_impl(cpu);
      twin->resize_(sparse->sparse_dim(), sparse->dense_dim(), tensor.sizes());
      twin->set_indices_and_values_unsafe(on_cpu(sparse->indices()), on_cpu(sparse->values()));
      twin->set_coalesced(sparse->coalesced());
    } else if (at::sparse_csr::is_sparse_compressed(tensor)) {
      auto* const sparse = at::sparse_csr::get_sparse_csr_impl(tensor);
      cpu = at::detail::make_tensor<at::SparseCsrTensorImpl>(
          c10::DispatchKeySet(c10::DispatchKey::SparseCsrCPU), c10::Device(c10::kCPU), tensor.layout(), tensor.dtype());
      at::sparse_csr::get_sparse_csr_impl(cpu)->set_member_tensors(
          on_cpu(sparse->compressed_indices()), on_cpu(sparse->plain_indices()), on_cpu(sparse->values()),
          tensor.sizes());
    } else {
      const auto* const storage = tensor.storage().unsafeGetStorageImpl();
      const auto known = std::find_if(pairs_.begin(), pairs_.end(), [&](const auto& pair) {
        return pair.second.has_storage() && pair.second.storage().unsafeGetStorageImpl() == storage;
      });
      cpu = view_of(
          known != pairs_.end() ? known->first.storage() : twin(tensor.storage(), c10::kCPU), tensor,
          c10::DispatchKey::CPU);
    }
    pairs_.emplace_back(cpu, tensor);
    return cpu;
  }

  // Transfers changes of arguments other than values: new sizes and new memory.
  void settle() {
    for (size_t k = 0; k < pairs_.size(); ++k) {
      const auto [cpu, own] = pairs_[k];
      if (own.is_sparse()) {
        auto* const sparse = at::sparse::get_sparse_impl(own);
        auto* const found = at::sparse::get_sparse_impl(cpu);
        sparse->raw_resize_(found->sparse_dim(), found->dense_dim(), cpu.sizes());
        sparse->set_indices_and_values_unsafe(on_device(found->indices()), on_device(found->values()));
        sparse->set_coalesced(found->coalesced());
      } else if (own.has_storage()) {
        const at::Storage& storage = cpu.storage();
        if (storage.data() != own.storage().data()) {
          own.storage().set_data_ptr_noswap(borrowed(storage.mutable_data_ptr().get(), storage, own.device()));
          own.storage().unsafeGetStorageImpl()->set_nbytes(storage.nbytes());
        }
        if (cpu.sizes() != own.sizes() || cpu.strides() != own.strides()) {
          own.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides(), cpu.storage_offset());
        }
      }
    }
  }

  at::Tensor on_device(const at::Tensor& cpu) {
    if (!cpu.defined() || !device || !cpu.is_cpu()) {
      return cpu;
    }
    for (const auto& [twin, own] : pairs_) {
      if (twin.is_same(cpu)) {
        return own;
      }
    }
    if (cpu.is_sparse()) {
      auto* const found = at::sparse::get_sparse_impl(cpu);
      const c10::DeviceGuard guard(*device);  // it begins with empty tensors on the current device
      at::Tensor own =
          at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(c10::DispatchKey::SparseCUDA), cpu.dtype());
      auto* const sparse = at::sparse::get_sparse_impl(own);
      sparse->resize_(found->sparse_dim(), found->dense_dim(), cpu.sizes());
      sparse->set_indices_and_values_unsafe(on_device(found->indices()), on_device(found->values()));
      sparse->set_coalesced(found->coalesced());
      return own;
    }
    if (at::sparse_csr::is_sparse_compressed(cpu)) {
      auto* const found = at::sparse_csr::get_sparse_csr_impl(cpu);
      at::Tensor own = at::detail::make_tensor<at::SparseCsrTensorImpl>(
          c10::DispatchKeySet(c10::DispatchKey::SparseCsrCUDA), *device, cpu.layout(), cpu.dtype());
      at::sparse_csr::get_sparse_csr_impl(own)->set_member_tensors(
          on_device(found->compressed_indices()), on_device(found->plain_indices()), on_device(found->values()),
          cpu.sizes());
      return own;
    }
    TORCH_CHECK_NOT_IMPLEMENTED(cpu.layout() == at::kStrided, "the simulated device has no layout ", cpu.layout());
    for (const auto& [twin, own] : pairs_) {
      if (twin.has_storage() && twin.storage().unsafeGetStorageImpl() == cpu.storage().unsafeGetStorageImpl()) {
        return view_of(own.storage(), cpu, c10::DispatchKey::CUDA);
      }
    }
    const at::Tensor own = view_of(twin(cpu.storage(), *device), cpu, c10::DispatchKey::CUDA);
    pairs_.emplace_back(cpu, own);  // several results may share memory
    return own;
  }

 private:
  static at::Tensor view_of(at::Storage storage, const at::Tensor& like, c10::DispatchKey key) {
    c10::DispatchKeySet keys(key);
    if (like._is_zerotensor()) {
      keys = keys.add(c10::DispatchKey::ZeroTensor);
    }
    at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, like.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
    view._set_conj(like.is_conj());
    view._set_neg(like.is_neg());
    return view;
  }

  std::vector<std::pair<at::Tensor, at::Tensor>> pairs_;
};

// The device of all tensors of a call. Numbers on the CPU, indices and copied tensors may be on any device.
class OneDevice {
 public:
  explicit OneDevice(const c10::OperatorHandle& op) : op_(op) {
    const std::string_view name = op.operator_name().name;
    is_free_ = name.find("copy") != std::string_view::npos || name.find("index") != std::string_view::npos ||
               name.find("set_") != std::string_view::npos;
  }
  void see(const at::Tensor& tensor) {
    if (is_free_ || !tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) {
      return;
    }
    TORCH_CHECK(
        !seen_ || *seen_ == tensor.device(), "Expected all tensors to be on the same device, but ", op_.operator_name(),
        " got tensors on ", *seen_, " and ", tensor.device());
    seen_ = tensor.device();
  }

 private:
  const c10::OperatorHandle& op_;
  bool is_free_;
  std::optional<c10::Device> seen_;
};

// Random numbers of a device come from its own generator, however the CPU's kernel requests them.
class Dice {
 public:
  Dice(bool throws, c10::DeviceIndex device) {
    if (throws) {
      own_ = on_cpu(default_generator(device));
      kept_ = at::detail::getDefaultCPUGenerator().get_state();
      at::Generator cpu = at::detail::getDefaultCPUGenerator();
      cpu.set_state(own_.get_state());
    }
  }
  ~Dice() {
    if (own_.defined()) {
      at::Generator cpu = at::detail::getDefaultCPUGenerator();
      own_.set_state(cpu.get_state());
      cpu.set_state(kept_);
    }
  }

 private:
  at::Generator own_;
  at::Tensor kept_;
};

// The CPU's key of the same kind of tensors.
c10::DispatchKey key_on_cpu(c10::DispatchKey key) {
  switch (key) {
    case c10::DispatchKey::SparseCUDA:
      return c10::DispatchKey::SparseCPU;
    case c10::DispatchKey::SparseCsrCUDA:
      return c10::DispatchKey::SparseCsrCPU;
    default:
      return c10::DispatchKey::CPU;
  }
}

void run(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  Twins twins;
  OneDevice one_device(op);
  for (size_t i = first; i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    const auto moved = [&](const at::Tensor& tensor) {
      one_device.see(tensor);
      return twins.on_cpu(tensor);
    };
    if (value.isTensor()) {
      value = moved(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      std::transform(tensors.begin(), tensors.end(), tensors.begin(), moved);
      value = c10::IValue(tensors);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        tensors.push_back(tensor ? std::optional<at::Tensor>(moved(*tensor)) : tensor);
      }
      value = c10::IValue(tensors);
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      twins.device =
          value.toDevice().has_index() ? value.toDevice() : c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice();
      value = c10::IValue(c10::Device(c10::kCPU));
    } else if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      value = c10::IValue(on_cpu(value.toGenerator()));
    }
  }
  if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape)) {
    read();
  }
  {
    const Dice dice(
        op.hasTag(at::Tag::nondeterministic_seeded), twins.device.value_or(c10::Device(c10::kCUDA, 0)).index());
    op.redispatchBoxed(c10::DispatchKeySet(key_on_cpu(keys.highestPriorityTypeId())), stack);
  }
  twins.settle();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); ++i) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) {
      value = twins.on_device(value.toTensor());
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> tensors = value.toTensorVector();
      for (at::Tensor& tensor : tensors) {
        tensor = twins.on_device(tensor);
      }
      value = c10::IValue(tensors);
    }
  }
}

c10::Device device_of(const std::optional<c10::Device>& device) {
  return device && device->has_index() ? *device : c10::impl::VirtualGuardImpl(c10::kCUDA).getDevice();
}

at::Tensor empty(
    c10::SymIntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_of(device));
  return at::Tensor(
      at::detail::empty_generic(
          C10_AS_INTARRAYREF_SLOW(sizes), allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
          dtype.value_or(at::get_default_dtype_as_scalartype()), format));
}

at::Tensor empty_strided(
    c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device_of(device));
  return at::Tensor(
      at::detail::empty_strided_generic(
          C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), allocator(),
          c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype.value_or(at::get_default_dtype_as_scalartype())));
}

// Zeros that have no memory.
struct NoMemory final : c10::Allocator {
  explicit NoMemory(c10::DeviceIndex index) : device(c10::kCUDA, index) {}
  c10::DataPtr allocate(size_t) override { return {nullptr, device}; }
  c10::DeleterFnPtr raw_deleter() const override { return &c10::detail::deleteNothing; }
  void copy_data(void*, const void*, size_t) const override {}
  c10::Device device;
};

at::Tensor zero_tensor(
    c10::SymIntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  static NoMemory nothing[devices] = {NoMemory(0), NoMemory(1)};
  return at::Tensor(
      at::detail::empty_generic(
          C10_AS_INTARRAYREF_SLOW(sizes), &nothing[device_of(device).index()],
          c10::DispatchKeySet({c10::DispatchKey::CUDA, c10::DispatchKey::ZeroTensor}),
          dtype.value_or(at::get_default_dtype_as_scalartype()), std::nullopt));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.device().type() != source.device().type() && !non_blocking && self.numel() > 0) {
    read();
  }
  Twins to, from;
  to.on_cpu(self).copy_(from.on_cpu(source));
  to.settle();
  return self;
}

}  // namespace
}  // namespace pretended

TORCH_LIBRARY_FRAGMENT(pretended_cuda, library) {
  library.def("reads() -> int", [] { return pretended::reads.load(); });
  library.def("forbid_reads(bool forbidden) -> ()", [](bool forbidden) { pretended::reads_are_errors = forbidden; });
}
namespace {

// If the CPU has its own kernel, the device has one, too: the default for all devices is not meant for it.
void register_kernels(torch::Library& library, c10::DispatchKey like) {
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    const auto op = c10::Dispatcher::singleton().findOp(name);
    const bool is_special = name.name == "aten::copy_" || name.name == "aten::_efficientzerotensor" ||
                            name.name == "aten::empty_strided" ||
                            (name.name == "aten::empty" && name.overload_name == "memory_format");
    if (name.name.rfind("aten::", 0) == 0 && op->hasKernelForDispatchKey(like) &&
        !(is_special && like == c10::DispatchKey::CPU)) {
      const std::string full = name.name.substr(6) + (name.overload_name.empty() ? "" : "." + name.overload_name);
      library.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&pretended::run>());
    }
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&pretended::run>()); }
TORCH_LIBRARY_IMPL(_, SparseCUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&pretended::run>());
}
TORCH_LIBRARY_IMPL(_, SparseCsrCUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&pretended::run>());
}
TORCH_LIBRARY_IMPL(aten, SparseCUDA, library) { register_kernels(library, c10::DispatchKey::SparseCPU); }
TORCH_LIBRARY_IMPL(aten, SparseCsrCUDA, library) { register_kernels(library, c10::DispatchKey::SparseCsrCPU); }
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  register_kernels(library, c10::DispatchKey::CPU);
  // Not decomposed: they would choose a library by the device, and these libraries are missing.
  for (const char* name : {"convolution", "_convolution", "convolution_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&pretended::run>());
  }
  library.impl("empty.memory_format", &pretended::empty);
  library.impl("empty_strided", &pretended::empty_strided);
  library.impl("copy_", &pretended::copy_);
  library.impl("_efficientzerotensor", &pretended::zero_tensor);
}
