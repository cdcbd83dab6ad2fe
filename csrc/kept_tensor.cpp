#include "kept_tensor.h"

#include "rows.h"

#include <ATen/native/Resize.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <utility>

namespace py = pybind11;

namespace fastgrad {

std::shared_ptr<KeptTensor> KeptTensor::keep(const py::object& tensor) {
  if (!THPVariable_CheckExact(tensor.ptr())) {
    return nullptr;
  }
  const at::Tensor& value = THPVariable_Unpack(tensor.ptr());
  if (!is_plain_memory(value) || value.layout() != at::kStrided || value.is_inference() || !value.is_leaf() ||
      value.grad().defined()) {
    return nullptr;
  }
  return std::make_shared<KeptTensor>(value);
}

KeptTensor::KeptTensor(at::Tensor tensor)
    : tensor_(std::move(tensor)),
      alias_(tensor_.variable_data()),
      history_(tensor_),
      bits_(std::make_unique<char[]>(tensor_.nbytes())),
      bytes_(tensor_.nbytes()),
      version_(tensor_._version()),
      requires_grad_(tensor_.requires_grad()) {
  if (bytes_ > 0) {
    std::memcpy(bits_.get(), alias_.const_data_ptr(), bytes_);
  }
}

void KeptTensor::restore() {
  bool changed = false;
  if (!tensor_.storage().is_alias_of(alias_.storage()) || tensor_.storage_offset() != alias_.storage_offset() ||
      tensor_.sizes() != alias_.sizes() || tensor_.strides() != alias_.strides() ||
      tensor_.scalar_type() != alias_.scalar_type()) {
    tensor_.set_data(alias_);  // `x.data = ...` and `x.resize_()` moved it
  }
  if (bytes_ > 0) {
    if (!is_plain_memory(alias_)) {  // func freed it
      at::native::resize_bytes_cpu(
          alias_.storage().unsafeGetStorageImpl(), alias_.storage_offset() * alias_.element_size() + bytes_);
    }
    // Tensors are written only if their values have changed, because unchecked ones may be mapped read-only.
    if (std::memcmp(alias_.const_data_ptr(), bits_.get(), bytes_) != 0) {
      std::memcpy(alias_.mutable_data_ptr(), bits_.get(), bytes_);
      changed = true;
    }
  }
  if ((requires_grad_ || changed) && tensor_._version() != version_) {
    torch::autograd::impl::bump_version(tensor_);  // graphs of func may refer to the values that it wrote
  }
  history_.restore();
  if (tensor_.requires_grad() != requires_grad_ && tensor_.is_leaf()) {
    tensor_.requires_grad_(requires_grad_);
  }
  if (tensor_.grad().defined()) {
    tensor_.mutable_grad() = at::Tensor();
  }
}

}  // namespace fastgrad
