#include "kept_history.h"

#include <utility>

namespace fastgrad {

namespace impl = torch::autograd::impl;

namespace {

// Null unless the tensor is a view for reverse mode.
torch::autograd::DifferentiableViewMeta* view_of(const at::Tensor& tensor) {
  auto* view = impl::get_view_autograd_meta(tensor);
  return view != nullptr && view->has_bw_view() ? view : nullptr;
}

}  // namespace

KeptHistory::KeptHistory(const at::Tensor& tensor) {
  const auto add = [this](const at::Tensor& one) {
    const auto* meta = impl::get_autograd_meta(one);
    const auto* view = view_of(one);
    const bool is_current = view != nullptr && view->get_attr_version() == one._version();
    places_.push_back(
        {one, meta == nullptr ? Node() : meta->grad_fn_, meta == nullptr ? 0 : meta->output_nr_, is_current});
  };
  if (const auto* view = view_of(tensor)) {
    add(view->get_backward_view().base_);
  }
  add(tensor);
}

void KeptHistory::restore() const {
  for (const Place& place : places_) {
    restore(place);
  }
}

void KeptHistory::restore(const Place& place) {
  auto* meta = impl::get_autograd_meta(place.tensor);
  if (meta == nullptr) {
    return;
  }
  if (meta->grad_fn_ != place.node) {
    if (meta->retains_grad_ && place.node && meta->grad_fn_) {
      place.node->add_retains_grad_hook(meta->grad_fn_->pop_retains_grad_hook(meta->output_nr_), place.output);
    }
    meta->grad_fn_ = place.node;
    meta->output_nr_ = place.output;
  }
  if (place.is_current) {
    view_of(place.tensor)->set_attr_version(place.tensor._version());
  }
}

}  // namespace fastgrad
