#include "unrecorded_backward.h"

#include "blocks.h"
#include "rows.h"

#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <cmath>
#include <utility>

namespace py = pybind11;

namespace fastgrad {
namespace {

at::Tensor tensor_at(const py::tuple& values, int64_t position) {
  TORCH_CHECK(
      0 <= position && position < static_cast<int64_t>(values.size()), "UnrecordedBackward: there is no argument ",
      position, " among ", values.size());
  PyObject* const value = PyTuple_GET_ITEM(values.ptr(), position);
  TORCH_CHECK(THPVariable_Check(value), "UnrecordedBackward: argument ", position, " must be a tensor");
  return THPVariable_Unpack(value);
}

// Whether all values are equal; a NaN equals nothing.
bool is_same(const at::Tensor& left, const at::Tensor& right) {
  if (left.layout() != at::kStrided || right.layout() != at::kStrided) {
    return false;
  }
  if (is_small_and_plain(left) && is_small_and_plain(right) && left.sizes() == right.sizes()) {
    const double* const values = left.const_data_ptr<double>();
    return std::equal(values, values + left.numel(), right.const_data_ptr<double>());
  }
  return have_equal_values(left, right);
}

bool is_same_gradient(const at::Tensor& left, const at::Tensor& right) {
  return left.defined() && right.defined() ? is_same(left, right) : left.defined() == right.defined();
}

// The largest difference of two sets of gradients: of the strided ones, where NaN equals NaN; infinite if gradients are
// undefined, or have other sizes, in only one set.
double largest_change(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
  const BelowAutograd guard;
  double largest = 0;
  for (size_t k = 0; k < left.size(); ++k) {
    const bool both = left[k].defined() && right[k].defined();
    if (left[k].defined() != right[k].defined() || (both && left[k].sizes() != right[k].sizes())) {
      return INFINITY;
    }
    const bool are_strided = both && left[k].layout() == at::kStrided && right[k].layout() == at::kStrided;
    if (are_strided && left[k].numel() > 0) {
      const at::Tensor equal = left[k].eq(right[k]).logical_or(left[k].isnan().logical_and(right[k].isnan()));
      const at::Tensor change = (left[k] - right[k]).abs().masked_fill(equal, 0.0);
      largest = std::max(largest, change.nan_to_num(INFINITY, INFINITY, INFINITY).max().item<double>());
    }
  }
  return largest;
}

std::vector<at::Tensor> differentiable(const py::object& result) {
  std::vector<at::Tensor> outputs;
  const auto add = [&](PyObject* value) {
    if (THPVariable_Check(value) && THPVariable_Unpack(value).requires_grad()) {
      outputs.push_back(THPVariable_Unpack(value));
    }
  };
  if (py::isinstance<py::tuple>(result) || py::isinstance<py::list>(result)) {
    for (const py::handle value : result) {
      add(value.ptr());
    }
  } else {
    add(result.ptr());
  }
  return outputs;
}

std::vector<uint32_t> versions_of(const std::vector<at::Tensor>& tensors) {
  std::vector<uint32_t> versions;
  versions.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) {
    versions.push_back(tensor.is_inference() ? 0 : tensor._version());
  }
  return versions;
}

py::tuple part(const py::tuple& values, size_t begin, size_t end) {
  return py::reinterpret_steal<py::tuple>(
      PyTuple_GetSlice(values.ptr(), static_cast<Py_ssize_t>(begin), static_cast<Py_ssize_t>(end)));
}

}  // namespace

UnrecordedBackward::UnrecordedBackward(
    py::object func, py::object refuse, int64_t count, std::vector<int64_t> inputs, std::vector<int64_t> grad_outputs,
    bool record)
    : func_(std::move(func)),
      refuse_(std::move(refuse)),
      count_(count),
      inputs_(std::move(inputs)),
      grad_outputs_(std::move(grad_outputs)),
      record_(record) {
  TORCH_CHECK(count >= 0, "UnrecordedBackward: count must be at least 0, got ", count);
}

bool UnrecordedBackward::is_kept_at(const std::vector<at::Tensor>& inputs) const {
  const auto same = [](const at::Tensor& left, const at::Tensor& right) { return left.is_same(right); };
  return kept_ && std::equal(inputs.begin(), inputs.end(), kept_->inputs.begin(), kept_->inputs.end(), same) &&
         std::equal(inputs.begin(), inputs.end(), kept_->values.begin(), kept_->values.end(), is_same);
}

UnrecordedBackward::Forward UnrecordedBackward::forward(
    const py::tuple& arguments, const py::tuple& grad_outputs, const std::vector<at::Tensor>& inputs) {
  const auto result = py::reinterpret_steal<py::object>(PyObject_Call(func_.ptr(), arguments.ptr(), nullptr));
  if (!result) {
    throw py::error_already_set();
  }
  std::vector<at::Tensor> outputs = differentiable(result);
  check_memory(inputs);
  if (outputs.empty() || outputs.size() != grad_outputs.size()) {
    refuse_(outputs.size(), grad_outputs.size());
  }
  std::vector<at::Tensor> values;
  values.reserve(inputs.size());
  for (const at::Tensor& input : inputs) {
    const BelowAutograd guard;
    values.push_back(input.clone());
  }
  return {Graph(std::move(outputs), inputs), inputs, std::move(values)};
}

std::vector<at::Tensor> UnrecordedBackward::call(const py::tuple& arguments) {
  TORCH_CHECK(
      static_cast<int64_t>(arguments.size()) >= count_,
      "UnrecordedBackward: arguments must hold at least as many as count, ", count_, ", got ", arguments.size());
  const py::tuple given = part(arguments, 0, count_);
  const py::tuple grad_outputs = part(arguments, count_, arguments.size());
  const auto requiring_grad = [](const py::tuple& values, int64_t position) {
    at::Tensor tensor = tensor_at(values, position);
    return tensor.requires_grad() ? tensor : tensor.requires_grad_();
  };
  std::vector<at::Tensor> inputs;
  for (const int64_t position : inputs_) {
    inputs.push_back(requiring_grad(given, position));
  }
  for (const int64_t position : grad_outputs_) {
    requiring_grad(grad_outputs, position);
  }
  std::vector<at::Tensor> cotangents;
  for (size_t k = 0; k < grad_outputs.size(); ++k) {
    cotangents.push_back(tensor_at(grad_outputs, static_cast<int64_t>(k)));
  }
  const c10::AutoGradMode mode(record_);
  if (!is_kept_at(inputs)) {
    kept_.reset();  // before the next forward: two graphs may not fit in memory
    Forward first = forward(given, grad_outputs, inputs);
    std::vector<at::Tensor> gradients = first.graph.all().vjp(cotangents);
    if (reuses_.value_or(true)) {
      kept_ = std::move(first);
    }
    return gradients;
  }
  if (reuses_) {
    return kept_->graph.all().vjp(cotangents);
  }
  const std::vector<uint32_t> versions = versions_of(cotangents);
  std::vector<at::Tensor> gradients = forward(given, grad_outputs, inputs).graph.all().vjp(cotangents);
  // If backward has written into its grad_outputs, it cannot run on them again.
  const bool has_written = versions_of(cotangents) != versions;
  const std::vector<at::Tensor> again = has_written ? gradients : kept_->graph.all().vjp(cotangents);
  if (has_written || !std::equal(gradients.begin(), gradients.end(), again.begin(), again.end(), is_same_gradient)) {
    if (!has_written) {
      movement_ = largest_change(again, kept_->graph.all().vjp(cotangents));
    }
    stop_reusing();
  } else {
    reuses_ = true;
  }
  return gradients;
}

void UnrecordedBackward::stop_reusing() {
  reuses_ = false;
  kept_.reset();
}

}  // namespace fastgrad
