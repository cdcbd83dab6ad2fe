// The nodes of the autograd graph behind some outputs.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <tuple>
#include <vector>

namespace fastgrad {

// Whether a node is a custom Function, of Python or C++.
bool is_custom(const torch::autograd::Node& node);

// Whether no code of the user is found that runs in the backward of `outputs`: no dispatch mode, custom Function, hook
// (also on saved tensors) or tensor subclass. Such code may take only one grad_output at a time, and rely on being
// called for each. False for graphs that are too large to visit.
bool runs_no_custom_code(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);

// The number of nodes of the graph behind outputs, and how many of them are custom Functions. Once `most` nodes were
// visited, no further edges are followed.
std::tuple<int64_t, int64_t> count_nodes(const std::vector<at::Tensor>& outputs, int64_t most);

// The ids of the streams that the backward of `outputs` with respect to `inputs` runs on, each once; none for a
// backward on the CPU.
std::vector<int64_t> backward_streams(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs);

}  // namespace fastgrad
