#include "small_problem.h"

#include "graph_nodes.h"
#include "ops/common.h"
#include "outputs.h"
#include "rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <limits>
#include <utility>

namespace py = pybind11;

namespace fastgrad {
namespace {

// In larger graphs, it is not known whether custom code runs, because runs_no_custom_code does not look at all nodes.
constexpr int64_t largest_small_graph = 10000;

bool is_plain_double(const at::Tensor& tensor) {
  return is_plain_dense(tensor) && tensor.layout() == at::kStrided &&
         (tensor.scalar_type() == at::kDouble || tensor.scalar_type() == at::kComplexDouble) &&
         bytes_reached(tensor) <= static_cast<int64_t>(tensor.storage().nbytes());
}

// Whether the strides show that no two elements share memory.
bool is_free_of_overlap(const at::Tensor& tensor) {
  std::vector<std::pair<int64_t, int64_t>> dimensions;  // stride and size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1) {
      dimensions.emplace_back(tensor.stride(d), tensor.size(d));
    }
  }
  std::sort(dimensions.begin(), dimensions.end());
  int64_t reach = 0;
  for (const auto& [stride, size] : dimensions) {
    if (stride <= reach) {
      return false;
    }
    reach += (size - 1) * stride;
  }
  return true;
}

// Largest depth of nested lists and tuples that are searched: a list may contain itself.
constexpr int deepest_constant = 8;

// Whether an argument holds no tensor: a number, a string or None, or a list or tuple of such.
bool is_constant(PyObject* object, int depth = 0) {
  if (PyList_CheckExact(object) || PyTuple_CheckExact(object)) {
    PyObject** const items = PySequence_Fast_ITEMS(object);
    return depth < deepest_constant && std::all_of(
                                           items, items + PySequence_Fast_GET_SIZE(object),
                                           [=](PyObject* item) { return is_constant(item, depth + 1); });
  }
  return object == Py_None || PyLong_Check(object) || PyFloat_CheckExact(object) || PyUnicode_CheckExact(object);
}

// The positions of the differentiable arguments, which have separate memory and are all on one device; empty if any
// argument needs special care.
std::vector<int64_t> checked_positions(const py::tuple& arguments) {
  std::vector<int64_t> positions;
  std::vector<at::Tensor> checked;
  for (size_t position = 0; position < arguments.size(); ++position) {
    PyObject* const object = PyTuple_GET_ITEM(arguments.ptr(), position);
    if ((PyList_Check(object) || PyTuple_Check(object) || PyDict_Check(object)) && !is_constant(object)) {
      return {};
    }
    if (!THPVariable_Check(object)) {
      continue;
    }
    const at::Tensor& tensor = THPVariable_Unpack(object);
    if (!THPVariable_CheckExact(object)) {
      return {};
    }
    if (!tensor.requires_grad()) {
      continue;
    }
    const auto shares = [&](const at::Tensor& other) {
      return other.device() != tensor.device() || other.storage().is_alias_of(tensor.storage());
    };
    if (!is_plain_double(tensor) || !is_free_of_overlap(tensor) || tensor.numel() == 0 || tensor.is_inference() ||
        std::any_of(checked.begin(), checked.end(), shares)) {
      return {};
    }
    checked.push_back(tensor);
    positions.push_back(static_cast<int64_t>(position));
  }
  return positions;
}

// Processor time of all threads of this process.
double processor_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

at::Tensor on_cpu(const at::Tensor& tensor) { return tensor.is_cpu() ? tensor : tensor.to(at::kCPU); }

// Waits until a device has done what was launched on the current stream.
void wait_for(at::Device device) {
  if (!device.is_cpu()) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    guard.synchronizeStream(guard.getStream(device));
  }
}

bool needs_care_by_mode() {
  return !c10::GradMode::is_enabled() || c10::InferenceMode::is_enabled() ||
         c10::impl::TorchDispatchModeTLS::any_modes_set() || at::impl::torch_function_mode_enabled() ||
         torch::autograd::AnomalyMode::is_enabled();
}

}  // namespace

std::shared_ptr<SmallProblem> SmallProblem::trace(
    py::object func, const py::tuple& arguments, double relative_step, bool records_differences) {
  if (needs_care_by_mode()) {
    return nullptr;
  }
  const std::vector<int64_t> positions = checked_positions(arguments);
  if (positions.empty()) {
    return nullptr;
  }
  auto problem = std::make_shared<SmallProblem>();
  for (const int64_t position : positions) {
    const at::Tensor& tensor = THPVariable_Unpack(PyTuple_GET_ITEM(arguments.ptr(), position));
    problem->blocks_.emplace_back(tensor, problem->n_, relative_step, std::nullopt, std::nullopt, std::nullopt);
    problem->inputs_.emplace_back(position, tensor.numel(), coordinates_per_element(tensor));
    problem->n_ += coordinate_count(tensor);
    problem->device_ = tensor.device();
  }
  problem->evaluator_ = std::make_shared<Evaluator>(std::move(func), arguments, problem->blocks_);
  problem->evaluator_->set_records_differences(records_differences);
  using Clock = std::chrono::steady_clock;
  wait_for(problem->device_);
  const auto start = Clock::now();
  const double worked = processor_seconds();
  try {
    problem->result_ = problem->evaluator_->evaluate(/*record_graph=*/true);
    wait_for(problem->device_);
  } catch (...) {
    problem->evaluator_->restore();
    throw;
  }
  problem->seconds_ = std::chrono::duration<double>(Clock::now() - start).count();
  problem->working_seconds_ = problem->seconds_;
  if (problem->device_.is_cpu()) {  // waiting for a device also takes processor time
    problem->working_seconds_ = std::min(problem->seconds_, processor_seconds() - worked);
  }
  try {
    if (!problem->evaluator_->inputs_changed() && !problem->evaluator_->mutates_inputs() && problem->take_outputs() &&
        !records_differences) {
      problem->base_ = on_cpu(flattened(problem->graph_->outputs()));
    }
  } catch (...) {
    problem->evaluator_->restore();
    throw;
  }
  return problem;
}

bool SmallProblem::take_outputs() {
  std::vector<at::Tensor> outputs;
  const auto take = [&](py::handle value, int64_t position) {
    if (value.is_none()) {
      return true;
    }
    if (!THPVariable_CheckExact(value.ptr())) {
      return false;
    }
    const at::Tensor& tensor = THPVariable_Unpack(value.ptr());
    if (!tensor.requires_grad()) {
      return true;
    }
    if (!is_plain_double(tensor) || tensor.device() != device_) {
      return false;
    }
    specs_.emplace_back(position, tensor.detach());
    outputs_.emplace_back(position, tensor.numel(), coordinates_per_element(tensor));
    outputs.push_back(tensor);
    m_ += coordinate_count(tensor);
    return true;
  };
  bool all_plain = true;
  if (PyTuple_Check(result_.ptr()) || PyList_Check(result_.ptr())) {
    int64_t position = 0;
    for (const py::handle value : result_) {
      all_plain = all_plain && take(value, position++);
    }
  } else {
    all_plain = take(result_, 0);
  }
  std::vector<at::Tensor> inputs = arguments_of(blocks_);
  if (!all_plain || m_ == 0) {
    return false;
  }
  std::tie(nodes_, custom_nodes_) = count_nodes(outputs, largest_small_graph + 1);
  if (nodes_ > largest_small_graph) {
    return false;
  }
  is_custom_ = !runs_no_custom_code(outputs, inputs);
  graph_ = std::make_shared<Graph>(std::move(outputs), std::move(inputs));
  return true;
}

std::shared_ptr<Graph> SmallProblem::shared_graph() const {
  TORCH_CHECK(graph_ != nullptr, "SmallProblem: the graph can be used only if the problem is plain");
  return graph_;
}

void SmallProblem::release() {
  result_ = py::none();
  graph_.reset();
  specs_.clear();
  base_ = at::Tensor();
}

bool SmallProblem::record_again() {
  if (graph().modified_output() >= 0 || graph().modified_cotangent() >= 0) {
    return false;  // otherwise this would be forgotten with the graph
  }
  graph_.reset();
  const py::object result = evaluator_->evaluate(/*record_graph=*/true);
  std::vector<at::Tensor> outputs;
  for (const OutputSpec& output : specs_) {
    PyObject* const value = output_at(result.ptr(), output.position);
    if (!looks_like(value, output.like) || !THPVariable_Unpack(value).requires_grad()) {
      return false;
    }
    outputs.push_back(THPVariable_Unpack(value));
  }
  std::vector<at::Tensor> inputs = arguments_of(blocks_);
  became_custom_ = became_custom_ || (!is_custom_ && !runs_no_custom_code(outputs, inputs));
  graph_ = std::make_shared<Graph>(std::move(outputs), std::move(inputs));
  return true;
}

bool SmallProblem::repeats(const at::Tensor& cotangents, const at::Tensor& known, int64_t row) const {
  const std::vector<int64_t> only(cotangents.dim() == 2 ? cotangents.size(0) : 0, -1);
  return !std::get<1>(first_other_vjp(cotangents, only, {row}, known));
}

std::tuple<int64_t, std::optional<at::Tensor>, GradientsMatch> SmallProblem::first_other_vjp(
    const at::Tensor& cotangents, const std::vector<int64_t>& only, const std::vector<int64_t>& order,
    const at::Tensor& known) const {
  auto [run, other, match] =
      fastgrad::first_other_vjp(graph(), blocks_, on_device(cotangents), only, order, on_device(known));
  return {run, other ? std::optional(on_cpu(*other)) : std::nullopt, std::move(match)};
}

WholeBackward SmallProblem::whole_backward(
    const at::Tensor& cotangents, const std::vector<int64_t>& layouts, int64_t repeated, double repeat_scale,
    bool undefined, int64_t fewest_vectorized, double atol, double rtol) const {
  const at::Tensor own = on_device(cotangents);
  const bool brief = !is_custom_ && cotangents.size(0) != 0;
  WholeBackward whole =
      brief ? brief_backward(graph(), blocks_, own, layouts, undefined, fewest_vectorized, atol, rtol)
            : fastgrad::whole_backward(
                  graph(), blocks_, own, layouts, repeated, repeat_scale, undefined, fewest_vectorized, atol, rtol);
  return device_.is_cpu() ? whole : whole.to(at::kCPU);
}

WholeBackward SmallProblem::completed(
    const WholeBackward& backward, const at::Tensor& cotangents, const std::vector<int64_t>& layouts, int64_t repeated,
    double repeat_scale) const {
  WholeBackward whole = device_.is_cpu() ? backward : backward.to(device_);
  complete(whole, graph(), blocks_, on_device(cotangents), layouts, repeated, repeat_scale);
  return device_.is_cpu() ? whole : whole.to(at::kCPU);
}

at::Tensor SmallProblem::on_device(const at::Tensor& tensor) const {
  return tensor.device() == device_ ? tensor : tensor.to(device_);
}

at::Tensor SmallProblem::empty_on_device(at::IntArrayRef shape) const {
  return at::empty(shape, blocks_.at(0).origin.options().dtype(at::kDouble));
}

std::variant<at::Tensor, Changed> SmallProblem::difference_columns(double eps, int64_t first, int64_t count) const {
  const at::Tensor columns = empty_on_device({count, m_});
  if (auto changed = evaluator_->difference_columns(first, columns, specs_, eps, /*record_graph=*/true)) {
    return *std::move(changed);
  }
  return on_cpu(columns);
}

std::optional<std::pair<at::Tensor, double>> SmallProblem::vectorized_columns(
    const py::object& evaluate, const at::Tensor& displacement, const at::Tensor& values, double eps) const {
  check_contiguous_float64("vectorized_columns", "values", values);
  TORCH_CHECK(
      values.is_cpu() && values.numel() == m_, "vectorized_columns: values must have ", m_, " elements, got ",
      values.numel());
  const at::Tensor columns = empty_on_device({n_, m_});
  const auto found = evaluator_->vectorized_columns(evaluate, on_device(displacement), columns, specs_, eps);
  if (!found) {
    return std::nullopt;
  }
  const at::Tensor vectorized = on_cpu(*found);
  const at::Tensor at_x = base();
  const double* const left = vectorized.const_data_ptr<double>();
  const double* const right[] = {at_x.const_data_ptr<double>(), values.const_data_ptr<double>()};
  double largest = 0;
  for (int64_t i = 0; i < 2 * m_; ++i) {
    const double error = std::abs(left[i] - right[i / m_][i % m_]);
    largest = std::isnan(error) ? std::numeric_limits<double>::infinity() : std::max(largest, error);
  }
  return std::pair(on_cpu(columns), largest);
}

std::variant<at::Tensor, Changed> SmallProblem::values_of(const std::vector<at::Tensor>& inputs) const {
  const at::Tensor values = empty_on_device({m_});
  const py::object result = evaluator_->evaluate_at(evaluator_->arguments_with(inputs));
  const auto changed =
      visit_outputs(result, specs_, [&](size_t, const at::Tensor& output, int64_t offset, int64_t size) {
        flatten_(values.narrow(0, offset, size), output);
      });
  if (changed) {
    return std::make_tuple(int64_t{0}, changed->first, changed->second);
  }
  return on_cpu(values);
}

std::variant<at::Tensor, Changed> SmallProblem::difference_entries(
    const Groups& groups, const at::Tensor& columns, double eps) const {
  const at::Tensor values = empty_on_device({columns.numel()}).zero_();
  if (auto changed = evaluator_->difference_groups(groups, values, m_, specs_, eps, /*record_graph=*/true)) {
    return *std::move(changed);
  }
  const BelowAutograd guard;
  const at::Tensor widths = at::empty({n_}, at::kDouble);
  evaluator_->coordinate_widths(widths, std::vector<double>(blocks_.size(), eps));
  return on_cpu(values).div_(widths.index_select(0, columns));
}

std::variant<at::Tensor, Changed> SmallProblem::values_at(const at::Tensor& displacement) const {
  const at::Tensor values = empty_on_device({m_});
  if (auto changed =
          evaluator_->values_along(on_device(displacement), {1.0}, {values}, specs_, /*record_graph=*/true)) {
    return *std::move(changed);
  }
  return on_cpu(values);
}

std::optional<std::vector<std::vector<std::pair<double, double>>>> SmallProblem::errors(
    const WholeBackward& backward, const at::Tensor& columns, double atol, double rtol, bool check_dtypes) const {
  if (backward.movement != 0 || !backward.add_up || !backward.are_zero) {
    return std::nullopt;
  }
  std::vector<InputTolerances> inputs;
  inputs.reserve(blocks_.size());
  for (const InputBlock& block : blocks_) {
    inputs.emplace_back(coordinate_count(block.origin), block.origin.is_complex(), atol, rtol);
  }
  std::vector<std::vector<std::pair<double, double>>> found;
  size_t part = 0;
  for (const bool real_parts : {false, true}) {
    int64_t first = 0;
    for (const OutputSpec& output : specs_) {
      const int64_t width = coordinates_per_element(output.like);
      if (!real_parts || width == 2) {
        const WholeBackward::Rows& rows = backward.parts.at(part++);
        if (!rows.match.repeats || !rows.match.sizes || !rows.match.strided || (check_dtypes && !rows.match.dtypes)) {
          return std::nullopt;
        }
        const int64_t own = first + (width == 2 && !real_parts ? 1 : 0);
        auto errors = largest_errors(rows.rows, columns, own, width, inputs);
        if (!errors) {
          return std::nullopt;
        }
        found.push_back(*std::move(errors));
      }
      first += coordinate_count(output.like);
    }
  }
  return found;
}

std::tuple<std::optional<Changed>, at::Tensor, bool> SmallProblem::jvps(
    const at::Tensor& directions, const std::vector<int64_t>& undefined) const {
  check_float64("jvps", "directions", directions, 2);
  const at::Tensor products = empty_on_device({directions.size(0), m_});
  auto [changed, domains_match] = evaluator_->jvps(on_device(directions), undefined, products, specs_);
  return {std::move(changed), on_cpu(products), domains_match};
}

std::variant<std::vector<std::vector<at::Tensor>>, Changed> SmallProblem::tangents(
    int64_t input, const at::Tensor& tangents_of_input) const {
  std::vector<std::vector<at::Tensor>> all;
  for (const at::Tensor& tangent : tangents_of_input.unbind()) {
    auto found = evaluator_->tangents(input, tangent, specs_);
    if (auto* const changed = std::get_if<Changed>(&found)) {
      return *std::move(changed);
    }
    all.push_back(std::get<std::vector<at::Tensor>>(std::move(found)));
  }
  return all;
}

std::variant<std::vector<at::Tensor>, Changed> SmallProblem::batched_tangents(
    int64_t input, const at::Tensor& tangents_of_input) const {
  return evaluator_->batched_tangents(input, tangents_of_input, specs_);
}

std::optional<std::vector<std::vector<std::pair<double, double>>>> SmallProblem::tangent_errors(
    const at::Tensor& tangents, const at::Tensor& columns, double atol, double rtol) const {
  check_float64("tangent_errors", "tangents", tangents, 2);
  check_float64("tangent_errors", "columns", columns, 2);
  TORCH_CHECK(
      tangents.size(0) == n_ && tangents.size(1) == m_ && columns.sizes() == tangents.sizes(),
      "tangent_errors: tangents and columns must have shape (", n_, ", ", m_, "), got ", tangents.sizes(), " and ",
      columns.sizes());
  std::vector<InputTolerances> outputs;  // a column has an entry for each output element
  outputs.reserve(specs_.size());
  for (const OutputSpec& output : specs_) {
    outputs.emplace_back(coordinate_count(output.like), output.like.is_complex(), atol, rtol);
  }
  const at::Tensor numerical = columns.t().contiguous();
  std::vector<std::vector<std::pair<double, double>>> found;
  for (const bool real_parts : {false, true}) {
    for (const InputBlock& block : blocks_) {
      const int64_t width = coordinates_per_element(block.origin);
      if (!real_parts || width == 2) {
        const int64_t first = block.first + (width == 2 && !real_parts ? 1 : 0);
        const int64_t end = block.first + coordinate_count(block.origin);
        const at::Tensor rows = tangents.slice(0, first, end, width).contiguous();
        auto errors = largest_errors(rows, numerical, first, width, outputs);
        if (!errors) {
          return std::nullopt;
        }
        found.push_back(*std::move(errors));
      }
    }
  }
  return found;
}

std::tuple<at::Tensor, GradientsMatch> SmallProblem::vjps(
    const at::Tensor& cotangents, const std::vector<int64_t>& layouts, const std::vector<int64_t>& only) const {
  auto [gradients, match] = vjp_coordinates(graph(), blocks_, on_device(cotangents), layouts, only);
  return {on_cpu(gradients), std::move(match)};
}

std::optional<bool> SmallProblem::are_zeros_zero(bool zeros, bool undefined) const {
  const std::vector<at::Tensor>& inputs = graph().inputs();
  bool all_zero = true;
  bool all_known = true;
  const auto look_at = [&](const std::vector<at::Tensor>& gradients) {
    check_in_place(blocks_);
    for (size_t k = 0; k < gradients.size(); ++k) {
      if (gradients[k].defined() && !is_plain_zero(gradients[k], inputs[k])) {
        all_zero = false;
        all_known = all_known && is_plain_double(gradients[k]);
      }
    }
  };
  GraphRunner& runner = graph().all();
  if (zeros) {
    look_at(runner.vjp_of_zeros());
  }
  if (undefined) {
    look_at(runner.vjp_of_undefined(std::nullopt));
    const auto count = static_cast<int64_t>(specs_.size());
    for (int64_t one = 0; count > 1 && one < count; ++one) {
      look_at(runner.vjp_of_undefined(one));
    }
  }
  return all_known ? std::optional(all_zero) : std::nullopt;
}

std::variant<Derivatives, Changed> SmallProblem::screening_derivatives(
    const RandomDirections& along, double curve, double budget, bool measure_noise,
    const std::optional<Derivatives>& known) const {
  return evaluator_->screening_derivatives(along, base(), curve, budget, measure_noise, known, specs_, ulps());
}

std::variant<Derivatives, Changed> SmallProblem::differences_along(const RandomDirections& along, double curve) const {
  return evaluator_->differences_along(along, on_device(base()), curve, std::nullopt, specs_, ulps());
}

at::Tensor SmallProblem::base() const { return base_.defined() ? base_ : outputs_of_graph(); }

at::Tensor SmallProblem::outputs_of_graph() const { return on_cpu(flattened(graph().outputs())); }

std::vector<double> SmallProblem::ulps() const {
  return std::vector<double>(specs_.size(), std::numeric_limits<double>::epsilon());
}

bool SmallProblem::negates_unrecorded(int64_t first, double rounding) const {
  TORCH_CHECK(base_.defined(), "negates_unrecorded: the values of the first evaluation were not kept");
  const at::Tensor displacement = empty_on_device({n_}).zero_();
  bool negated = false;
  for (size_t k = 0; k < blocks_.size(); ++k) {
    if (std::get<0>(inputs_[k]) >= first) {
      const at::Tensor values = real_coordinates(blocks_[k].origin).reshape(-1);
      displacement.narrow(0, blocks_[k].first, values.numel()).copy_(values).mul_(-2);
      negated = true;
    }
  }
  const at::Tensor there = empty_on_device({m_});
  if (evaluator_->values_along(displacement, {1.0}, {there}, specs_, /*record_graph=*/false)) {
    return false;
  }
  const at::Tensor values = on_cpu(there);
  const auto* const now = values.const_data_ptr<double>();
  const auto* const before = base_.const_data_ptr<double>();
  double largest = 0;
  for (int64_t i = 0; i < m_; ++i) {
    largest = std::max(largest, std::abs(before[i]));
  }
  const double sign = negated ? -1 : 1;
  return std::equal(
      now, now + m_, before, [=](double a, double b) { return std::abs(a - sign * b) <= rounding * largest; });
}

}  // namespace fastgrad
