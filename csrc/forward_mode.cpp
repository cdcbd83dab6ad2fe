// JVPs by forward-mode AD, and torch's level of forward-mode AD.
#include "evaluator.h"

#include "batch_level.h"
#include "ops/common.h"
#include "ops/flatten.h"
#include "ops/perturb_coordinate.h"
#include "ops/unflatten.h"
#include "outputs.h"
#include "reused_tensor.h"
#include "rows.h"

#include <ATen/ops/_add_batch_dim.h>
#include <ATen/ops/_make_dual.h>
#include <ATen/ops/_remove_batch_dim.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <utility>

namespace py = pybind11;

namespace fastgrad {
namespace {

// Writes the coordinates of the tangents of all outputs into `column`, zeros where there is none; domains_match becomes
// false where one is complex and its output is not, or the reverse. Returns as visit_outputs does.
std::optional<std::pair<int64_t, py::object>> visit_tangents(
    const py::object& result, const std::vector<OutputSpec>& outputs, const at::Tensor& column, bool& domains_match) {
  return visit_outputs(result, outputs, [&](size_t o, const at::Tensor& output, int64_t offset, int64_t size) {
    const at::Tensor segment = column.narrow(0, offset, size);
    const at::Tensor& tangent = output._fw_grad(/*level=*/0);
    if (!tangent.defined()) {
      segment.zero_();
      return;
    }
    domains_match = domains_match && tangent.is_complex() == outputs[o].like.is_complex();
    flatten_(segment, with_domain_of(outputs[o].like, tangent));
  });
}

// Whether all values are equal; a NaN, which is the tangent of an infinite input, equals a NaN.
bool are_same(const at::Tensor& left, const at::Tensor& right) {
  return have_equal_values(left, right) ||
         (left.sizes() == right.sizes() && left.scalar_type() == right.scalar_type() &&
          at::allclose(real_coordinates(left), real_coordinates(right), /*rtol=*/0, /*atol=*/0, /*equal_nan=*/true));
}

}  // namespace

std::tuple<std::optional<std::tuple<int64_t, int64_t, py::object>>, bool> Evaluator::tangent_columns(
    int64_t first, const at::Tensor& columns, const std::vector<OutputSpec>& outputs, const py::tuple& duals,
    const std::vector<at::Tensor>& tangents) {
  check_columns("tangent_columns", columns, outputs);
  check_coordinates("tangent_columns", first, columns.size(0));
  TORCH_CHECK(
      tangents.size() == blocks_.size(), "tangent_columns: tangents must have one element for each of ", blocks_.size(),
      " inputs, got ", tangents.size());
  std::vector<at::Tensor> zeros;
  for (const at::Tensor& tangent : tangents) {
    zeros.push_back(at::zeros_like(tangent, {}, at::MemoryFormat::Contiguous));
  }
  bool domains_match = true;
  size_t b = 0;
  for (int64_t j = 0; j < columns.size(0); ++j) {
    while (first + j >= blocks_[b].first + coordinate_count(blocks_[b].origin)) {
      ++b;
    }
    const auto set_tangent = [&](int64_t sign) {
      const BelowAutograd guard;
      if (mutates_inputs_) {
        for (const at::Tensor& tangent : tangents) {
          tangent.zero_();  // func changed it together with its input
        }
      }
      perturb_coordinate_(tangents[b], zeros[b], first + j - blocks_[b].first, sign, 1.0, 0.0);
    };
    const OnExit resetting([&] { set_tangent(0); });
    set_tangent(1);
    const py::object result = evaluate_at(duals);
    const auto changed = visit_tangents(result, outputs, columns.select(0, j), domains_match);
    if (changed) {
      return {std::make_tuple(first + j, changed->first, changed->second), domains_match};
    }
    raise_if_interrupted();
  }
  return {std::nullopt, domains_match};
}

py::tuple Evaluator::dual_arguments(
    const std::function<at::Tensor(size_t, const at::Tensor&)>& tangent_of, std::vector<GivenTangent>* given) const {
  py::tuple arguments = arguments_;
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const at::Tensor primal = blocks_[b].argument.detach();
    const at::Tensor tangent = tangent_of(b, primal);
    const at::Tensor dual = tangent.defined() ? at::_make_dual(primal, tangent, /*level=*/0) : primal;
    if (given != nullptr && tangent.defined()) {
      const BelowAutograd guard;
      const at::Tensor& inside = dual._fw_grad(/*level=*/0);  // a copy, if the input is a view
      given->push_back({static_cast<int64_t>(b), inside, inside.clone()});
    }
    arguments = replaced(blocks_[b], std::move(arguments), py::cast(dual));
  }
  return arguments;
}

std::tuple<std::optional<Changed>, bool> Evaluator::jvps(
    const at::Tensor& directions, const std::vector<int64_t>& undefined, const at::Tensor& products,
    const std::vector<OutputSpec>& outputs) {
  check_columns("jvps", products, outputs);
  check_float64("jvps", "directions", directions, 2);
  TORCH_CHECK(
      directions.size(0) == products.size(0) && directions.size(1) == size_, "jvps: directions must have shape (",
      products.size(0), ", ", size_, "), got ", directions.sizes());
  const auto count = static_cast<size_t>(products.size(0));
  const auto inputs = static_cast<int64_t>(blocks_.size());
  const auto is_known = [&](int64_t which) { return which >= -1 && which < 2 * inputs; };
  TORCH_CHECK(
      undefined.empty() || (undefined.size() == count && std::all_of(undefined.begin(), undefined.end(), is_known)),
      "jvps: undefined must be empty, or one of -1, ..., ", 2 * inputs - 1, " for each of ", count, " directions, got ",
      undefined);
  std::vector<ReusedTensor> tangents(blocks_.size());
  bool domains_match = true;
  for (size_t k = 0; k < count; ++k) {
    const auto row = static_cast<int64_t>(k);
    const at::Tensor direction = directions.select(0, row);
    const auto tangent_of = [&](size_t b, const at::Tensor& primal) {
      const int64_t which = undefined.empty() ? -1 : undefined[k];
      const auto input = static_cast<int64_t>(b);
      if (which >= inputs ? input != which - inputs : input == which) {
        return at::Tensor();
      }
      const at::Tensor& tangent = tangents[b].next([&] { return at::empty_like(primal); });
      unflatten_(tangent, direction.narrow(0, blocks_[b].first, coordinate_count(blocks_[b].origin)));
      return tangent;
    };
    std::vector<GivenTangent> given;
    const py::object result = evaluate_at(dual_arguments(tangent_of, &given));
    for (const GivenTangent& one : given) {
      const BelowAutograd guard;
      if (modified_tangent_ < 0 && !mutates_inputs_ && !are_same(one.tangent, one.values)) {
        modified_tangent_ = one.input;
      }
    }
    if (const auto changed = visit_tangents(result, outputs, products.select(0, row), domains_match)) {
      return {std::make_tuple(row, changed->first, changed->second), domains_match};
    }
    raise_if_interrupted();
  }
  return {std::nullopt, domains_match};
}

std::variant<std::vector<at::Tensor>, Changed> Evaluator::tangents(
    int64_t input, const at::Tensor& tangent, const std::vector<OutputSpec>& outputs) {
  TORCH_CHECK(
      input >= 0 && input < static_cast<int64_t>(blocks_.size()), "tangents: input must be in [0, ", blocks_.size(),
      "), got ", input);
  const py::object result = evaluate_at(dual_arguments(
      [&](size_t b, const at::Tensor&) { return static_cast<int64_t>(b) == input ? tangent : at::Tensor(); }));
  std::vector<at::Tensor> found;
  const auto changed = visit_outputs(result, outputs, [&](size_t o, const at::Tensor& output, int64_t, int64_t) {
    const at::Tensor& own = output._fw_grad(/*level=*/0);
    const at::Tensor& like = outputs[o].like;
    found.push_back(own.defined() ? own : at::zeros({}, like.options()).expand(like.sizes()));
  });
  if (changed) {
    return std::make_tuple(int64_t{0}, changed->first, changed->second);
  }
  return found;
}

std::variant<std::vector<at::Tensor>, Changed> Evaluator::batched_tangents(
    int64_t input, const at::Tensor& tangents_of_input, const std::vector<OutputSpec>& outputs) {
  TORCH_CHECK(
      tangents_of_input.dim() > 0,
      "batched_tangents: tangents must have at least one dimension, that of the batch, got none");
  const BatchLevel batch;
  auto found = tangents(input, at::_add_batch_dim(tangents_of_input, 0, batch.level), outputs);
  if (auto* const batched = std::get_if<std::vector<at::Tensor>>(&found)) {
    for (at::Tensor& one : *batched) {
      one = at::_remove_batch_dim(one, batch.level, tangents_of_input.size(0), 0);
    }
  }
  return found;
}

namespace {

// A turn at torch's level of forward-mode AD. The lock is a Python lock: a thread that holds it can acquire it again,
// and Ctrl-C interrupts waiting for it.
class Turn {
 public:
  Turn() { lock().attr("acquire")(); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;
  ~Turn() { lock().attr("release")(); }

 private:
  static const py::object& lock() {
    PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> storage;
    return storage.call_once_and_store_result([] { return py::module_::import("threading").attr("RLock")(); })
        .get_stored();
  }
};

// Like torch.autograd.forward_ad.dual_level, which an interrupt can leave in an intermediate state.
class DualLevel {
 public:
  DualLevel()
      : module_(py::module_::import("torch.autograd.forward_ad")),
        outer_(module_.attr("_current_level")),
        level_(torch::autograd::forward_ad::enter_dual_level()) {
    module_.attr("_current_level") = level_;
  }
  DualLevel(const DualLevel&) = delete;
  DualLevel& operator=(const DualLevel&) = delete;
  ~DualLevel() {
    module_.attr("_current_level") = outer_;
    try {
      torch::autograd::forward_ad::exit_dual_level(level_);
    } catch (const c10::Error&) {
      // func has left the level itself; a destructor cannot report this.
    }
  }

 private:
  py::object module_, outer_;
  uint64_t level_;
};

}  // namespace

py::object at_dual_level(const py::object& body) {
  const Turn turn;
  const DualLevel level;
  return body();
}

}  // namespace fastgrad
