// The nodes of the autograd graph that compute a tensor and, if it is a view, its base.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

namespace fastgrad {

class KeptHistory {
 public:
  explicit KeptHistory(const at::Tensor& tensor);

  // Undoes what in-place operations did to the nodes since construction; may be called again. The values must be those
  // at construction: then other views of the base, whose nodes autograd makes anew, have right gradients, too.
  void restore() const;

 private:
  using Node = decltype(torch::autograd::AutogradMeta::grad_fn_);

  struct Place {
    at::Tensor tensor;
    Node node;
    uint32_t output;
    bool is_current;  // of a view: whether its node belongs to its last version
  };

  static void restore(const Place& place);

  std::vector<Place> places_;  // of the base, then of the view
};

}  // namespace fastgrad
