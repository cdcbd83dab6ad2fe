#include "graph_runner.h"

#include "graph_nodes.h"
#include "rows.h"
#include "vjp.h"

#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <set>
#include <string>
#include <typeinfo>
#include <unordered_map>

namespace fastgrad {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;

// In larger graphs, the engine takes only a small share of the time.
constexpr size_t most_nodes = 64;

// Like is_plain_dense, but lazily conjugated or negated tensors are allowed.
bool is_dense_or_lazy(const at::Tensor& tensor) {
  constexpr auto lazy = c10::DispatchKeySet({c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  return tensor.defined() && is_plain_backend(backend_keys(tensor) - lazy);
}

bool is_on(at::Device device, const at::Tensor& tensor) {
  return is_dense_or_lazy(tensor) && tensor.device() == device;
}

bool are_on(at::Device device, const std::vector<at::Tensor>& tensors) {
  return std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) { return is_on(device, tensor); });
}

bool are_equal(const std::vector<at::Tensor>& left, const std::vector<at::Tensor>& right) {
  return std::equal(left.begin(), left.end(), right.begin(), right.end(), [](const auto& a, const auto& b) {
    return a.defined() == b.defined() &&
           (!a.defined() || (is_dense_or_lazy(a) && is_dense_or_lazy(b) && a.scalar_type() == b.scalar_type() &&
                             a.sizes() == b.sizes() && have_equal_values(a, b)));
  });
}

// validate_outputs calls this function to complete its error messages. They are not shown: after an error, the engine
// runs the VJP again and raises with its own message.
std::string as_it_is(const std::string& message) { return message; }

// Shows which tensors are modified, by their values: those of small tensors on the CPU and, if asked for, those of
// others.
class TensorValues {
 public:
  TensorValues(const std::vector<at::Tensor>& tensors, bool copies_large) : tensors_(tensors) {
    for (const at::Tensor& tensor : tensors) {
      values_.push_back(small_values(tensor));
      copies_.emplace_back();
      if (copies_large && values_.back().empty() && is_dense_or_lazy(tensor)) {
        const BelowAutograd guard;
        copies_.back() = tensor.clone();
      }
    }
  }

  // The number of the first tensor whose values have changed since; -1: none.
  int64_t first_modified() const {
    const auto is_same = [](double old, double now) { return old == now || (std::isnan(old) && std::isnan(now)); };
    for (size_t k = 0; k < tensors_.size(); ++k) {
      const std::vector<double> now = small_values(tensors_[k]);
      if (!std::equal(now.begin(), now.end(), values_[k].begin(), values_[k].end(), is_same) ||
          (copies_[k].defined() && !have_equal_values(copies_[k], tensors_[k]))) {
        return static_cast<int64_t>(k);
      }
    }
    return -1;
  }

 private:
  static std::vector<double> small_values(const at::Tensor& tensor) {
    if (!tensor.defined() || !is_small_and_plain(tensor)) {
      return {};
    }
    const double* const values = tensor.const_data_ptr<double>();
    return {values, values + tensor.numel()};
  }

  const std::vector<at::Tensor>& tensors_;
  std::vector<std::vector<double>> values_;
  std::vector<at::Tensor> copies_;
};

// A backward usually modifies large cotangents in each call or never, and copies of them take time.
constexpr int64_t most_copied = 3;

bool is_accumulation(const Node& node) { return dynamic_cast<const torch::autograd::AccumulateGrad*>(&node); }

}  // namespace

GraphRunner::GraphRunner(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs)
    : outputs_(std::move(outputs)), inputs_(std::move(inputs)) {}

bool GraphRunner::find_steps() {
  const auto requires_grad = [](const at::Tensor& tensor) { return tensor.requires_grad(); };
  device_ = outputs_.empty() ? at::Device(at::kCPU) : outputs_[0].device();
  if (!are_on(device_, outputs_) || !are_on(device_, inputs_) || torch::autograd::AnomalyMode::is_enabled() ||
      !std::all_of(outputs_.begin(), outputs_.end(), requires_grad) ||
      !std::all_of(inputs_.begin(), inputs_.end(), requires_grad) || !runs_no_custom_code(outputs_, inputs_)) {
    return false;
  }
  std::vector<Node*> nodes;
  std::unordered_map<Node*, int64_t> places;
  const auto add = [&](const Edge& edge) {
    if (edge.is_valid() && places.emplace(edge.function.get(), 0).second) {
      nodes.push_back(edge.function.get());
    }
  };
  for (const at::Tensor& output : outputs_) {
    roots_.push_back(torch::autograd::impl::gradient_edge(output));
    add(roots_.back());
  }
  for (size_t k = 0; k < nodes.size(); ++k) {
    if (nodes.size() > most_nodes) {
      return false;
    }
    for (const Edge& edge : nodes[k]->next_edges()) {
      add(edge);
    }
  }
  // In the engine's order, except for the nodes that end a graph, which are not run.
  std::stable_sort(nodes.begin(), nodes.end(), [](const Node* left, const Node* right) {
    const bool last = is_accumulation(*right);
    return is_accumulation(*left) ? false : last || left->sequence_nr() > right->sequence_nr();
  });
  for (size_t k = 0; k < nodes.size(); ++k) {
    places[nodes[k]] = static_cast<int64_t>(k);
  }
  const auto place = [&](const Edge& edge) -> std::pair<int64_t, uint32_t> {
    const auto found = edge.is_valid() ? places.find(edge.function.get()) : places.end();
    return {found == places.end() ? -1 : found->second, edge.input_nr};
  };
  std::vector<bool> leads(nodes.size());
  for (const at::Tensor& input : inputs_) {
    to_.push_back(place(torch::autograd::impl::gradient_edge(input)));
    if (to_.back().first >= 0) {
      leads[to_.back().first] = true;
    }
  }
  for (const Edge& root : roots_) {
    from_.push_back(place(root));
  }
  for (size_t k = 0; k < nodes.size(); ++k) {
    Step step{nodes[k], false, {}};
    for (const Edge& edge : nodes[k]->next_edges()) {
      step.successors.push_back(place(edge));
      if (edge.is_valid() && step.successors.back().first <= static_cast<int64_t>(k)) {
        return false;  // recorded in another thread, or used again: the engine's order is unknown
      }
    }
    steps_.push_back(std::move(step));
  }
  for (size_t k = nodes.size(); k-- > 0;) {
    for (const auto& [successor, input] : steps_[k].successors) {
      steps_[k].is_run = steps_[k].is_run || (successor >= 0 && leads[successor]);
    }
    leads[k] = leads[k] || steps_[k].is_run;
  }
  return true;
}

bool GraphRunner::is_on_current_stream() const {
  if (device_.is_cpu()) {
    return true;
  }
  const c10::impl::VirtualGuardImpl current(device_.type());
  if (current.getDevice() != device_) {
    return false;
  }
  const c10::Stream stream = current.getStream(device_);
  return std::all_of(steps_.begin(), steps_.end(), [&](const Step& step) {
    const auto own = step.node->stream();
    return !own || *own == stream;
  });
}

std::vector<uint64_t> GraphRunner::structure() const {
  std::vector<uint64_t> found{static_cast<uint64_t>(device_.type())};
  const auto add = [&](const std::vector<std::pair<int64_t, uint32_t>>& edges) {
    found.push_back(edges.size());
    for (const auto& [step, input] : edges) {
      found.push_back(static_cast<uint64_t>(step));
      found.push_back(input);
    }
  };
  for (const Step& step : steps_) {
    const Node& node = *step.node;
    found.push_back(typeid(node).hash_code());
    found.push_back(step.is_run ? 1 : 0);
    add(step.successors);
  }
  add(from_);
  add(to_);
  return found;
}

std::vector<at::Tensor> GraphRunner::run(const std::vector<at::Tensor>& cotangents) const {
  TORCH_CHECK(cotangents.size() == outputs_.size());
  std::vector<torch::autograd::variable_list> buffers(steps_.size());
  for (size_t k = 0; k < steps_.size(); ++k) {
    buffers[k].resize(steps_[k].node->num_inputs());
  }
  const auto hand_on = [&](const std::pair<int64_t, uint32_t>& to, const at::Tensor& gradient) {
    if (to.first >= 0 && gradient.defined()) {
      TORCH_CHECK(is_on(device_, gradient));
      at::Tensor& sum = buffers[to.first].at(to.second);
      sum = sum.defined() ? at::add(sum, gradient) : gradient;
    }
  };
  torch::autograd::variable_list first = cotangents;
  for (size_t k = 0; k < first.size(); ++k) {
    TORCH_CHECK(!first[k].defined() || (is_on(device_, first[k]) && first[k].sizes() == outputs_[k].sizes()));
  }
  torch::autograd::validate_outputs(roots_, first, as_it_is);
  for (size_t k = 0; k < first.size(); ++k) {
    hand_on(from_[k], first[k]);
  }
  std::vector<at::Tensor> gradients(inputs_.size());
  for (size_t k = 0; k < steps_.size(); ++k) {
    for (size_t i = 0; i < inputs_.size(); ++i) {
      if (to_[i].first == static_cast<int64_t>(k)) {
        gradients[i] = buffers[k].at(to_[i].second);
      }
    }
    if (!steps_[k].is_run) {
      continue;
    }
    Node& node = *steps_[k].node;
    torch::autograd::variable_list found = node(std::move(buffers[k]));
    torch::autograd::validate_outputs(node.next_edges(), found, as_it_is);
    for (size_t i = 0; i < found.size(); ++i) {
      hand_on(steps_[k].successors.at(i), found[i]);
    }
  }
  return gradients;
}

std::optional<std::vector<at::Tensor>> GraphRunner::try_run(const std::vector<at::Tensor>& cotangents) {
  check_vjp_memory(outputs_, inputs_, cotangents);
  if (!is_on_current_stream()) {
    return std::nullopt;
  }
  try {
    const c10::AutoGradMode without_graph(false);
    const pybind11::gil_scoped_release released;
    return run(cotangents);
  } catch (const c10::Error&) {
  } catch (const python_error&) {  // of hooks on saved tensors; the Python error is set
    if (!PyErr_ExceptionMatches(PyExc_Exception)) {
      throw;  // Ctrl-C
    }
    PyErr_Clear();
  } catch (const pybind11::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) {
      throw;
    }
  }
  state_ = State::engine;
  return std::nullopt;
}

std::vector<at::Tensor> GraphRunner::run_engine(const std::vector<at::Tensor>& cotangents) {
  if (!is_custom_) {
    is_custom_ = !runs_no_custom_code(outputs_, inputs_);
  }
  const TensorValues outputs(outputs_, false), given(cotangents, *is_custom_ && copied_++ < most_copied);
  std::vector<at::Tensor> gradients = fastgrad::vjp(outputs_, inputs_, cotangents, /*create_graph=*/false);
  modified_output_ = modified_output_ < 0 ? outputs.first_modified() : modified_output_;
  modified_cotangent_ = modified_cotangent_ < 0 ? given.first_modified() : modified_cotangent_;
  return gradients;
}

std::vector<at::Tensor> GraphRunner::vjp(const std::vector<at::Tensor>& cotangents) {
  static std::set<std::vector<uint64_t>> known_structures;  // read and written with the GIL held
  constexpr size_t most_structures = 10000;                 // of up to some kilobytes each
  std::vector<uint64_t> own;
  if (state_ == State::untried) {
    if (find_steps()) {
      own = structure();
      state_ = known_structures.count(own) != 0 ? State::nodes : State::untried;
    } else {
      state_ = State::engine;
    }
  }
  if (state_ == State::nodes) {
    if (auto found = try_run(cotangents)) {
      return *std::move(found);
    }
  }
  std::vector<at::Tensor> known = run_engine(cotangents);
  if (state_ == State::untried) {
    const auto found = try_run(cotangents);
    state_ = found && are_equal(*found, known) ? State::nodes : State::engine;
    if (state_ == State::nodes && known_structures.size() < most_structures) {
      known_structures.insert(std::move(own));
    }
  }
  return known;
}

std::vector<at::Tensor> GraphRunner::vjp_of_zeros() {
  if (state_ == State::nodes) {
    std::vector<at::Tensor> zeros;
    for (const at::Tensor& output : outputs_) {
      const BelowAutograd guard;
      zeros.push_back(at::empty_like(output, {}, at::MemoryFormat::Contiguous).zero_());
    }
    if (auto found = try_run(zeros)) {
      return *std::move(found);
    }
  }
  return fastgrad::vjp_of_zeros(outputs_, inputs_);
}

std::vector<at::Tensor> GraphRunner::vjp_of_undefined(std::optional<int64_t> one) {
  TORCH_CHECK(
      !one || (0 <= *one && *one < static_cast<int64_t>(outputs_.size())),
      "vjp_of_undefined: one must be the number of an output, in [0, ", outputs_.size(), "), got ", one.value_or(0));
  if (state_ == State::nodes) {
    std::vector<at::Tensor> cotangents(outputs_.size());
    for (size_t k = 0; one && k < outputs_.size(); ++k) {
      const BelowAutograd guard;
      cotangents[k] = static_cast<int64_t>(k) == *one
                          ? at::Tensor()
                          : at::empty_like(outputs_[k], {}, at::MemoryFormat::Contiguous).zero_();
    }
    if (auto found = try_run(cotangents)) {
      return *std::move(found);
    }
  }
  const std::vector<at::Tensor> behind = with_undefined_grads(outputs_);
  std::vector<at::Tensor> trial = one ? outputs_ : behind;
  if (one) {
    trial.at(*one) = behind.at(*one);
  }
  return fastgrad::vjp_of_zeros(trial, inputs_);
}

Graph::Graph(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs)
    : outputs_(std::move(outputs)), inputs_(std::move(inputs)) {}

int64_t Graph::number_of(int64_t (GraphRunner::*number)() const) const {
  for (const auto& [output, runner] : runners_) {
    if ((runner.*number)() >= 0) {
      return output < 0 ? (runner.*number)() : output;
    }
  }
  return -1;
}

GraphRunner& Graph::of(int64_t output) {
  const auto count = static_cast<int64_t>(outputs_.size());
  TORCH_CHECK(
      0 <= output && output < count, "output must be the number of an output, in [0, ", count, "), got ", output);
  return get(count == 1 ? -1 : output);
}

GraphRunner& Graph::get(int64_t which) {
  const auto found = runners_.find(which);
  if (found != runners_.end()) {
    return found->second;
  }
  return runners_.try_emplace(which, which < 0 ? outputs_ : std::vector{outputs_[which]}, inputs_).first->second;
}

}  // namespace fastgrad
