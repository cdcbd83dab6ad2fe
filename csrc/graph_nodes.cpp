#include "graph_nodes.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace py = pybind11;

namespace fastgrad {
namespace {

// A node as the graph holds it; the kind of pointer differs between versions of torch.
using NodePointer = std::decay_t<decltype(std::declval<torch::autograd::Edge>().function)>;

// Passes each node of a backward to visit(node), which returns whether to go on to its successors.
template <typename Visit>
void visit_backward(const std::vector<at::Tensor>& outputs, const Visit& visit) {
  std::vector<NodePointer> open;
  std::unordered_set<torch::autograd::Node*> seen;
  const auto add = [&](const NodePointer& node) {
    if (node && seen.insert(node.get()).second) {
      open.push_back(node);
    }
  };
  for (const at::Tensor& output : outputs) {
    add(output.grad_fn());
  }
  while (!open.empty()) {
    const NodePointer node = std::move(open.back());
    open.pop_back();
    if (visit(node)) {
      for (const torch::autograd::Edge& edge : node->next_edges()) {
        add(edge.function);
      }
    }
  }
}

// The Python names of the values that a kind of node saves.
const std::vector<std::string>& saved_names(const py::handle& node) {
  static std::unordered_map<PyTypeObject*, std::vector<std::string>> known;  // the types live as long as torch
  const auto [found, is_new] = known.try_emplace(Py_TYPE(node.ptr()));
  if (is_new) {
    for (const py::handle& name : py::module_::import("builtins").attr("dir")(py::type::of(node))) {
      auto text = name.cast<std::string>();
      if (text.rfind("_raw_saved_", 0) == 0) {
        found->second.push_back(std::move(text));
      }
    }
  }
  return found->second;
}

// A subclass that intercepts every operator.
bool is_of_python(const at::Tensor& tensor) { return tensor.key_set().has(c10::DispatchKey::Python); }

// Whether a tensor that the node saved is of such a subclass. If it was changed or released, backward raises.
bool is_of_python(const torch::autograd::SavedVariable& saved, const NodePointer& node) {
  try {
    return is_of_python(saved.unpack(node));
  } catch (const c10::Error&) {
    return false;
  }
}

// Whether a tensor that the node saved runs any code in each backward: when a hook unpacks it, or as a subclass.
bool saves_custom_code(const NodePointer& node) {
  const auto runs_code = [&](const py::handle& saved) {
    py::detail::make_caster<torch::autograd::SavedVariable> caster;
    if (!caster.load(saved, false)) {
      return false;
    }
    const auto& variable = static_cast<torch::autograd::SavedVariable&>(caster);
    return variable.has_hooks() || is_of_python(variable, node);
  };
  const auto object = py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(node));
  for (const std::string& name : saved_names(object)) {
    const py::object saved = object.attr(name.c_str());
    if (py::isinstance<py::tuple>(saved) ? std::any_of(saved.begin(), saved.end(), runs_code) : runs_code(saved)) {
      return true;
    }
  }
  return false;
}

}  // namespace

bool is_custom(const torch::autograd::Node& node) {
  const std::string_view name = typeid(node).name();  // the types are hidden or templates, so names are compared
  return name.find("PyNode") != std::string_view::npos || name.find("CppNode") != std::string_view::npos;
}

bool runs_no_custom_code(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  constexpr size_t most_nodes = 10000;  // visiting a node takes a microsecond
  const auto runs_code = [](const at::Tensor& tensor) { return is_of_python(tensor); };
  const auto is_hooked = [](const at::Tensor& input) { return !torch::autograd::impl::hooks(input).empty(); };
  if (c10::impl::TorchDispatchModeTLS::any_modes_set() || std::any_of(outputs.begin(), outputs.end(), runs_code) ||
      std::any_of(inputs.begin(), inputs.end(), runs_code) || std::any_of(inputs.begin(), inputs.end(), is_hooked)) {
    return false;
  }
  bool found_none = true;
  size_t nodes = 0;
  visit_backward(outputs, [&](const NodePointer& node) {
    const bool hooks = !node->pre_hooks().empty() || !node->post_hooks().empty() || !node->tensor_pre_hooks().empty() ||
                       !node->retains_grad_hooks().empty();
    found_none = found_none && !hooks && !is_custom(*node) && ++nodes <= most_nodes && !saves_custom_code(node);
    return found_none;
  });
  return found_none;
}

std::tuple<int64_t, int64_t> count_nodes(const std::vector<at::Tensor>& outputs, int64_t most) {
  int64_t nodes = 0;
  int64_t custom = 0;
  visit_backward(outputs, [&](const NodePointer& node) {
    custom += is_custom(*node) ? 1 : 0;
    return ++nodes < most;
  });
  return {nodes, custom};
}

std::vector<int64_t> backward_streams(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  using torch::autograd::Node;
  std::vector<torch::autograd::Edge> ends;
  for (const at::Tensor& input : inputs) {
    ends.push_back(torch::autograd::impl::gradient_edge(input));
  }
  const auto is_end = [&](const Node& node) {
    return std::any_of(ends.begin(), ends.end(), [&](const auto& end) { return end.function.get() == &node; });
  };
  std::unordered_set<int64_t> streams;
  visit_backward(outputs, [&](const NodePointer& node) {
    if (const auto stream = node->stream()) {
      streams.insert(stream->id());
    }
    return !is_end(*node);
  });
  return {streams.begin(), streams.end()};
}

}  // namespace fastgrad
