// The gradients of a function as a function of its inputs and grad_outputs, if these gradients are not differentiated.
#pragma once

#include "graph_runner.h"

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace fastgrad {

// Runs func and its backward. If only grad_outputs have changed since the last call, func is not called: its graph is
// reused. The first reuse is tested; if it gives other gradients, graphs are never reused. If `call` raises while a
// graph is kept, the caller decides: `stop_reusing`.
class UnrecordedBackward {
 public:
  // count: the number of func's arguments. inputs, grad_outputs: the positions of the checked ones, among func's
  // arguments and among the grad_outputs. refuse(outputs, grad_outputs) raises an error about these numbers, which do
  // not fit. record: whether gradients are recorded in func.
  UnrecordedBackward(
      pybind11::object func, pybind11::object refuse, int64_t count, std::vector<int64_t> inputs,
      std::vector<int64_t> grad_outputs, bool record);

  // The gradients of func with respect to the checked inputs; undefined for an input without a gradient. arguments: the
  // arguments of func, then grad_outputs. The checked tensors among them are set to require grad, because in
  // forward-mode AD they are detached.
  std::vector<at::Tensor> call(const pybind11::tuple& arguments);

  // Forgets the last graph.
  void forget() { kept_.reset(); }

  // Whether a graph is kept. None is kept while func or the backward of its new graph runs at other inputs, so if
  // `call` raises, this is whether the exception may be one of the kept graph.
  bool keeps_graph() const { return kept_.has_value(); }

  // If the kept graph gave other gradients than a new one: their largest change when the kept graph ran once more. A
  // graph that cannot be used again gives the same gradients again.
  double movement() const { return movement_; }

  // Never reuses a graph from now on.
  void stop_reusing();

 private:
  struct Forward {
    Graph graph;
    std::vector<at::Tensor> inputs, values;
  };

  bool is_kept_at(const std::vector<at::Tensor>& inputs) const;
  Forward forward(
      const pybind11::tuple& arguments, const pybind11::tuple& grad_outputs, const std::vector<at::Tensor>& inputs);

  pybind11::object func_, refuse_;
  int64_t count_;
  std::vector<int64_t> inputs_, grad_outputs_;
  bool record_;
  std::optional<bool> reuses_;  // nothing: not tried yet
  std::optional<Forward> kept_;
  double movement_ = 0;
};

}  // namespace fastgrad
