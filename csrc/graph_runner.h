// VJPs of small graphs without the autograd engine, whose queue and threads cost more than small operators.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace fastgrad {

// Computes vjp(outputs, inputs, cotangents, false) repeatedly. The engine computes the first VJP, and so do direct
// calls of the nodes. If both agree bit for bit, later VJPs, and all VJPs of graphs with the same nodes and edges, call
// only the nodes, in the engine's order. The engine runs all VJPs of a graph with custom Functions or hooks, of more
// than a few nodes, or with anything but plain tensors of one device, the CPU or a CUDA device; those for which a node
// raises; and those on another device or stream than the current one.
class GraphRunner {
 public:
  GraphRunner(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs);

  // The number of the first output whose values, or the values of whose cotangent, backward has modified; -1: none. All
  // VJPs show this for small tensors on the CPU. The first VJPs of custom code also show it for other cotangents.
  int64_t modified_output() const { return modified_output_; }
  int64_t modified_cotangent() const { return modified_cotangent_; }

  // Whether later VJPs call only the nodes, without the engine.
  bool bypasses_engine() const { return state_ == State::nodes; }

  // The gradients of the inputs; undefined for an input without a gradient. The GIL is held on entry and on return.
  std::vector<at::Tensor> vjp(const std::vector<at::Tensor>& cotangents);

  // vjp_of_undefined: the grad_output of output `one` is undefined, and the others are zero; without `one`, all are
  // undefined.
  std::vector<at::Tensor> vjp_of_zeros();
  std::vector<at::Tensor> vjp_of_undefined(std::optional<int64_t> one);

 private:
  enum class State { untried, nodes, engine };

  struct Step {
    torch::autograd::Node* node;
    bool is_run;                                           // the gradient of an input depends on it
    std::vector<std::pair<int64_t, uint32_t>> successors;  // for each output: the next step (-1: none) and its input
  };

  bool find_steps();

  // Whether the nodes of this device run on the current device and on its current stream, as the engine runs them.
  bool is_on_current_stream() const;

  // The types of the nodes and the edges between them, outputs and inputs, and the type of the device.
  std::vector<uint64_t> structure() const;

  // The results of the nodes; an undefined cotangent is passed on as such.
  std::vector<at::Tensor> run(const std::vector<at::Tensor>& cotangents) const;

  // vjp(outputs, inputs, cotangents, false); sees what backward modifies.
  std::vector<at::Tensor> run_engine(const std::vector<at::Tensor>& cotangents);

  // As run; nothing if the engine must compute this VJP instead.
  std::optional<std::vector<at::Tensor>> try_run(const std::vector<at::Tensor>& cotangents);

  State state_ = State::untried;
  int64_t modified_output_ = -1, modified_cotangent_ = -1;
  int64_t copied_ = 0;  // VJPs whose large cotangents were copied
  std::optional<bool> is_custom_;
  std::vector<at::Tensor> outputs_, inputs_;
  torch::autograd::edge_list roots_;
  at::Device device_ = at::kCPU;
  std::vector<Step> steps_;                              // each after all steps from which it gets gradients
  std::vector<std::pair<int64_t, uint32_t>> from_, to_;  // the step and its input for each output and each input
};

// The graph behind some outputs, for VJPs of all of them, or of one, with respect to some inputs.
class Graph {
 public:
  Graph(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs);

  // `of` raises if there is no output of this number.
  GraphRunner& all() { return get(-1); }
  GraphRunner& of(int64_t output);

  // As of GraphRunner, among all outputs.
  int64_t modified_output() const { return number_of(&GraphRunner::modified_output); }
  int64_t modified_cotangent() const { return number_of(&GraphRunner::modified_cotangent); }

  const std::vector<at::Tensor>& outputs() const { return outputs_; }
  const std::vector<at::Tensor>& inputs() const { return inputs_; }

 private:
  GraphRunner& get(int64_t which);
  int64_t number_of(int64_t (GraphRunner::*number)() const) const;

  std::vector<at::Tensor> outputs_, inputs_;
  std::map<int64_t, GraphRunner> runners_;  // by output; -1: all
};

}  // namespace fastgrad
