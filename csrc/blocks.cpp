#include "blocks.h"

#include "memory.h"
#include "ops/common.h"
#include "ops/flatten.h"
#include "rows.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <numeric>

namespace fastgrad {
namespace {

// The memory behind a tensor of any layout, under a version counter of its own.
at::Tensor memory_of(const at::Tensor& tensor) {
  const at::Tensor data = tensor.variable_data();
  const c10::Layout layout = data.layout();
  if (layout == at::kStrided || layout == at::kMkldnn) {
    return data;
  }
  return (layout == at::kSparse ? data._values() : data.values()).variable_data();
}

bool has_its_storage(const at::Tensor& values) {
  return !values.has_storage() || bytes_reached(values) <= static_cast<int64_t>(values.storage().nbytes());
}

// The memory that holds the coordinates of an argument.
const at::Tensor& checked_values(const at::Tensor& argument, const std::optional<at::Tensor>& values) {
  const at::Tensor& found = values ? *values : argument;
  check_differentiable("InputBlock", "values", found);
  TORCH_CHECK(
      found.scalar_type() == argument.scalar_type(), "InputBlock: values must have the argument's dtype, ",
      argument.scalar_type(), ", got ", found.scalar_type());
  return found;
}

}  // namespace

bool is_in_place(const InputBlock& block) {
  if (!has_its_storage(block.values) || (block.own_values.defined() && !has_its_storage(block.own_values))) {
    return false;
  }
  const at::Tensor& now = block.argument;
  const at::Tensor& then = block.values;
  return now.layout() != at::kStrided || is_wrapper_subclass(now) ||
         (now.scalar_type() == then.scalar_type() && now.sizes() == then.sizes() && now.strides() == then.strides() &&
          now.storage_offset() == then.storage_offset() && now.storage().is_alias_of(then.storage()));
}

void copy_back(const at::Tensor& values, const at::Tensor& origin) {
  if (is_small_and_plain(values)) {
    std::copy_n(origin.const_data_ptr<double>(), values.numel(), values.mutable_data_ptr<double>());
    return;
  }
  if (!has_its_storage(values)) {
    const at::Tensor bytes = at::empty({0}, values.options().dtype(at::kByte));
    bytes.set_(values.storage()).resize_({bytes_reached(values)});
  }
  values.copy_(origin);
}

PyObject* output_at(PyObject* result, int64_t position) {
  if (PyTuple_Check(result)) {
    return position < PyTuple_GET_SIZE(result) ? PyTuple_GET_ITEM(result, position) : nullptr;
  }
  if (PyList_Check(result)) {
    return position < PyList_GET_SIZE(result) ? PyList_GET_ITEM(result, position) : nullptr;
  }
  return position == 0 ? result : nullptr;
}

bool looks_like(PyObject* object, const at::Tensor& like) {
  if (object == nullptr || !THPVariable_Check(object)) {
    return false;
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  return tensor.scalar_type() == like.scalar_type() && tensor.sizes() == like.sizes() &&
         tensor.device() == like.device();
}

InputBlock::InputBlock(
    const at::Tensor& argument, int64_t first, double relative_step, const std::optional<at::Tensor>& stand_in,
    const std::optional<at::Tensor>& values, const std::optional<at::Tensor>& elements)
    : argument(argument),
      stand_in(stand_in.value_or(at::Tensor())),
      values(checked_values(argument, values).variable_data()),
      origin(this->values.clone(at::MemoryFormat::Contiguous)),
      elements(elements.value_or(at::Tensor())),
      first(first),
      relative_step(relative_step) {
  TORCH_CHECK(first >= 0, "InputBlock: first must be >= 0, got ", first);
  const int64_t expected = elements ? elements->numel() : argument.numel();
  TORCH_CHECK(
      this->values.numel() == expected, "InputBlock: values must have ", expected,
      " elements, one for each element that is perturbed, got ", this->values.numel());
  if (elements.has_value()) {
    check_indices("InputBlock", "elements", *elements);
  }
  if (stand_in.has_value()) {
    TORCH_CHECK(
        stand_in->sizes() == argument.sizes() && stand_in->scalar_type() == argument.scalar_type(),
        "InputBlock: stand_in must have the dtype and the sizes of the argument, ", argument.scalar_type(),
        argument.sizes(), ", got ", stand_in->scalar_type(), stand_in->sizes());
    own_values = memory_of(argument);
    check_storage("InputBlock", "argument", own_values);
    own_origin = own_values.clone();
  }
}

void check_in_place(const std::vector<InputBlock>& inputs) {
  for (size_t k = 0; k < inputs.size(); ++k) {
    TORCH_CHECK(
        is_in_place(inputs[k]), "func, or its backward, freed or replaced the memory of differentiable input ", k,
        ", as `x.data = ...` and `x.untyped_storage().resize_(0)` do: fastgrad perturbs the input in that memory. "
        "Change the values in place, or change a copy of the input.");
  }
}

void check_memory(const std::vector<at::Tensor>& inputs) {
  for (const at::Tensor& input : inputs) {
    check_storage("func", "an input", input);
  }
}

int64_t total(const std::vector<OutputSpec>& outputs) {
  int64_t sum = 0;
  for (const OutputSpec& output : outputs) {
    sum += coordinate_count(output.like);
  }
  return sum;
}

OutputSpec::OutputSpec(int64_t position, at::Tensor like) : position(position), like(std::move(like)) {
  TORCH_CHECK(position >= 0, "OutputSpec: position must be >= 0, got ", position);
}

Groups::Groups(
    at::Tensor coordinates, at::Tensor starts, at::Tensor entries, at::Tensor entry_starts, at::Tensor positions)
    : coordinates(std::move(coordinates)),
      starts(std::move(starts)),
      entries(std::move(entries)),
      entry_starts(std::move(entry_starts)),
      positions(std::move(positions)) {
  check_indices("Groups", "coordinates", this->coordinates);
  check_indices("Groups", "starts", this->starts);
  check_indices("Groups", "entries", this->entries);
  check_indices("Groups", "entry_starts", this->entry_starts);
  check_indices("Groups", "positions", this->positions);
  TORCH_CHECK(
      this->coordinates.is_cpu() && this->starts.is_cpu() && this->entry_starts.is_cpu(),
      "Groups: coordinates, starts and entry_starts must be on the CPU, got ", this->coordinates.device(), ", ",
      this->starts.device(), " and ", this->entry_starts.device());
  TORCH_CHECK(
      this->starts.numel() > 0 && this->starts.numel() == this->entry_starts.numel(),
      "Groups: starts and entry_starts must each have one element more than there are groups, got ",
      this->starts.numel(), " and ", this->entry_starts.numel());
}

Groups Groups::part(int64_t first, int64_t last) const {
  TORCH_CHECK(
      first >= 0 && first <= std::min(last, count()), "Groups: a part must begin in [0, ", count(),
      "] and not after its end, got ", first, " to ", last);
  const int64_t bounds = std::min(last, count()) - first + 1;
  return {coordinates, starts.narrow(0, first, bounds), entries, entry_starts.narrow(0, first, bounds), positions};
}

namespace {

std::pair<int64_t, int64_t> bounds_of(const at::Tensor& starts, int64_t g, int64_t size) {
  const auto* const start = starts.const_data_ptr<int64_t>() + g;
  TORCH_CHECK(
      0 <= start[0] && start[0] <= start[1] && start[1] <= size, "Groups: starts of groups must rise within [0, ", size,
      "], got ", start[0], " to ", start[1], " for group ", g);
  return {start[0], start[1]};
}

}  // namespace

std::pair<int64_t, int64_t> Groups::coordinates_of(int64_t g) const {
  return bounds_of(starts, g, coordinates.numel());
}

at::Tensor Groups::entries_of(int64_t g) const {
  const auto [begin, end] = bounds_of(entry_starts, g, entries.numel());
  return entries.narrow(0, begin, end - begin);
}

int64_t total(const std::vector<InputBlock>& inputs) {
  return std::accumulate(inputs.begin(), inputs.end(), int64_t{0}, [](int64_t sum, const InputBlock& input) {
    return sum + coordinate_count(input.origin);
  });
}

std::vector<at::Tensor> arguments_of(const std::vector<InputBlock>& inputs) {
  std::vector<at::Tensor> arguments;
  arguments.reserve(inputs.size());
  for (const InputBlock& input : inputs) {
    arguments.push_back(input.argument);
  }
  return arguments;
}

at::Tensor flattened(const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(!tensors.empty(), "flattened: tensors must hold at least one tensor, got none");
  int64_t total = 0;
  for (const at::Tensor& tensor : tensors) {
    check_differentiable("flattened", "a tensor", tensor);
    total += coordinate_count(tensor);
  }
  const BelowAutograd guard;
  const auto options = tensors[0].options().dtype(at::kDouble);
  const at::Tensor flat = tensors[0].is_cpu() ? empty_vectors({1, total}) : at::empty({1, total}, options);
  int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    const int64_t size = coordinate_count(tensor);
    if (c10::impl::TorchDispatchModeTLS::any_modes_set()) {
      flatten_(flat.select(0, 0).narrow(0, offset, size), tensor);  // an operator, which the mode sees
    } else {
      flatten_into(flat, 0, offset, size, tensor);
    }
    offset += size;
  }
  return flat.view({total});
}

}  // namespace fastgrad
