// The evaluation loop. Every pass looks for a pending Ctrl-C; restoring is RAII.
#include "loops.h"

#include "kernels/difference.h"
#include "ops/central_difference.h"
#include "ops/common.h"
#include "ops/decompress.h"
#include "ops/displace.h"
#include "ops/flatten.h"
#include "ops/perturb_coordinate.h"
#include "ops/perturb_coordinates.h"
#include "ops/realize.h"
#include "rows.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

namespace py = pybind11;

namespace fastgrad {
namespace {

template <typename Action>
class OnExit {
 public:
  explicit OnExit(Action action) : action_(std::move(action)) {}
  OnExit(const OnExit&) = delete;
  OnExit& operator=(const OnExit&) = delete;
  ~OnExit() {
    try {
      action_();
    } catch (...) {
      // Somebody took the inputs' memory away. A destructor cannot say so; the last restore() will.
    }
  }

 private:
  Action action_;
};

// The object that func returned as its output number `position`, or null if there is none.
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
  return tensor.scalar_type() == like.scalar_type() && tensor.sizes() == like.sizes();
}

// Moves one coordinate of an input by its step, sign -1 or 1, or puts it back, sign 0.
void move_coordinate(const InputBlock& block, int64_t coordinate, int64_t sign, double eps) {
  if (is_small_and_plain(block.values)) {
    const double x = block.origin.const_data_ptr<double>()[coordinate];
    block.values.mutable_data_ptr<double>()[coordinate] =
        moved_coordinate(x, static_cast<int>(sign), eps, block.relative_step);
    return;
  }
  const BelowAutograd guard;
  perturb_coordinate_(block.values, block.origin, coordinate, sign, eps, block.relative_step);
}

// columns[j, offset : offset + size], which holds an output at x + h, becomes its central difference, from that
// output at x - h, h the step of one coordinate of an input.
void difference_from(
    const at::Tensor& columns, int64_t j, int64_t offset, int64_t size, const at::Tensor& minus,
    const InputBlock& block, int64_t coordinate, double eps) {
  if (is_small_and_plain(minus) && is_small_and_plain(block.origin) && columns.is_cpu() && columns.is_contiguous()) {
    const double x = block.origin.const_data_ptr<double>()[coordinate];
    const double width = realized_width(x, coordinate_step(x, eps, block.relative_step));
    double* const column = columns.mutable_data_ptr<double>() + j * columns.size(1) + offset;
    const double* const values = minus.const_data_ptr<double>();
    std::transform(column, column + size, values, column, [&](double plus, double value) {
      return difference_quotient(plus, value, width);
    });
    return;
  }
  central_difference_(
      columns.select(0, j).narrow(0, offset, size), minus, block.origin, coordinate, eps, block.relative_step);
}

// Hands each expected output that func returned to visit(number, tensor, offset, size), offset and
// size being its coordinates; stops at the first that does not look as expected and returns its
// number and what stands there instead.
template <typename Visit>
std::optional<std::pair<int64_t, py::object>> visit_outputs(
    const py::object& result, const std::vector<OutputSpec>& outputs, const Visit& visit) {
  const BelowAutograd guard;
  int64_t offset = 0;
  for (size_t o = 0; o < outputs.size(); ++o) {
    PyObject* const object = output_at(result.ptr(), outputs[o].position);
    if (!looks_like(object, outputs[o].like)) {
      return std::pair(static_cast<int64_t>(o), object ? py::reinterpret_borrow<py::object>(object) : py::none());
    }
    const int64_t size = coordinate_count(outputs[o].like);
    visit(o, THPVariable_Unpack(object), offset, size);
    offset += size;
  }
  return std::nullopt;
}

uint32_t version(const at::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

// The memory behind a tensor of any layout, under a version counter of its own.
at::Tensor memory_of(const at::Tensor& tensor) {
  const at::Tensor data = tensor.variable_data();
  const c10::Layout layout = data.layout();
  if (layout == at::kStrided || layout == at::kMkldnn) {
    return data;
  }
  return (layout == at::kSparse ? data._values() : data.values()).variable_data();
}

}  // namespace

InputBlock::InputBlock(
    const at::Tensor& argument, int64_t first, double relative_step, const std::optional<at::Tensor>& stand_in,
    const std::optional<at::Tensor>& values, const std::optional<at::Tensor>& elements)
    : argument(argument),
      stand_in(stand_in.value_or(at::Tensor())),
      values(values.value_or(argument).variable_data()),
      origin(this->values.clone(at::MemoryFormat::Contiguous)),
      elements(elements.value_or(at::Tensor())),
      first(first),
      relative_step(relative_step) {
  if (stand_in.has_value()) {
    own_values = memory_of(argument);
    own_origin = own_values.clone();
  }
}

Evaluator::Evaluator(py::object func, py::tuple arguments, std::vector<InputBlock> blocks)
    : func_(std::move(func)), arguments_(std::move(arguments)), blocks_(std::move(blocks)) {}

py::object Evaluator::call(bool record_graph, const py::tuple& arguments) {
  std::vector<uint32_t> versions;
  versions.reserve(blocks_.size());
  for (const InputBlock& block : blocks_) {
    versions.push_back(version(block.argument));
  }
  ++evaluations_;
  py::object result;
  {
    const c10::AutoGradMode mode(record_graph && c10::GradMode::is_enabled());
    result = py::reinterpret_steal<py::object>(PyObject_Call(func_.ptr(), arguments.ptr(), nullptr));
  }
  for (size_t b = 0; b < blocks_.size(); ++b) {
    mutates_inputs_ = mutates_inputs_ || version(blocks_[b].argument) != versions[b];
  }
  if (!result) {
    throw py::error_already_set();
  }
  return result;
}

py::tuple Evaluator::perturbed_arguments() const {
  py::tuple arguments = arguments_;
  for (const InputBlock& block : blocks_) {
    if (!block.stand_in.defined()) {
      continue;
    }
    // No operator writes one element of an MKLDNN tensor: it is made anew.
    const bool mkldnn = block.argument.layout() == at::kMkldnn;
    const py::object stand_in = py::cast(mkldnn ? block.values.to_mkldnn().requires_grad_() : block.stand_in);
    if (arguments.is(arguments_)) {
      arguments = py::tuple(py::list(arguments_));
    }
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (THPVariable_Check(arguments_[i].ptr()) && THPVariable_Unpack(arguments_[i].ptr()).is_same(block.argument)) {
        arguments[i] = stand_in;
      }
    }
  }
  return arguments;
}

void Evaluator::restore() {
  const BelowAutograd guard;
  for (const InputBlock& block : blocks_) {
    if (is_small_and_plain(block.values)) {
      std::copy_n(block.origin.const_data_ptr<double>(), block.values.numel(), block.values.mutable_data_ptr<double>());
    } else {
      check_differentiable("restore", "an input", block.values);
      block.values.copy_(block.origin);
    }
    if (block.own_values.defined()) {
      block.own_values.copy_(block.own_origin);
    }
  }
}

bool Evaluator::inputs_changed() const {
  const BelowAutograd guard;
  const auto changed = [](const InputBlock& block) {
    // As real coordinates: at::equal knows no complex32.
    const auto differ = [](const at::Tensor& values, const at::Tensor& origin) {
      if (is_small_and_plain(values)) {
        const double* const first = values.const_data_ptr<double>();
        return !std::equal(first, first + values.numel(), origin.const_data_ptr<double>());
      }
      return !at::equal(real_coordinates(as_strided_layout(values)), real_coordinates(as_strided_layout(origin)));
    };
    return differ(block.values, block.origin) ||
           (block.own_values.defined() && differ(block.own_values, block.own_origin));
  };
  return std::any_of(blocks_.begin(), blocks_.end(), changed);
}

namespace {

// (x moved up) - (x moved down), as rounding to the input's dtype leaves it: what the difference between both
// is over. move(moved, x, first, sign) writes coordinates `first` and on; an infinite one, which does not
// move, has the width that nominal(first, count) says, so that a function constant in it has the derivative zero.
template <typename Move, typename Nominal>
void measure_widths(const InputBlock& block, const at::Tensor& widths, const Move& move, const Nominal& nominal) {
  constexpr int64_t piece = 1 << 15;  // temporaries stay in the cache
  const at::Tensor all = real_coordinates(block.origin);
  for (int64_t first = 0; first < all.numel(); first += piece) {
    const int64_t count = std::min(piece, all.numel() - first);
    const at::Tensor x = all.narrow(0, first, count);
    const at::Tensor up = at::empty_like(x);
    const at::Tensor down = at::empty_like(x);
    move(up, x, first, 1);
    move(down, x, first, -1);
    const at::Tensor width = up.to(at::kDouble) - down.to(at::kDouble);
    widths.narrow(0, block.first + first, count).copy_(at::where(width.isfinite(), width, nominal(first, count)));
  }
}

// The same for an input in this process's memory, by the kernels themselves; false where it is not. step(x, i) is
// that of coordinate i.
template <typename Step>
bool widths_on_cpu(const InputBlock& block, const at::Tensor& widths, const Step& step) {
  if (!block.origin.is_cpu() || !widths.is_cpu() || is_wrapper_subclass(block.origin)) {
    return false;
  }
  double* const out = widths.mutable_data_ptr<double>() + block.first;
  FASTGRAD_DISPATCH_REAL(block.origin.scalar_type(), "widths", [&] {
    const auto* const x = static_cast<const real_t*>(block.origin.const_data_ptr());
    at::parallel_for(0, coordinate_count(block.origin), grain_size, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        out[i] = realized_width(x[i], step(x[i], i));
      }
    });
  });
  return true;
}

}  // namespace

void Evaluator::coordinate_widths(const at::Tensor& widths, const std::vector<double>& eps) const {
  const BelowAutograd guard;
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const InputBlock& block = blocks_[b];
    const bool told =
        widths_on_cpu(block, widths, [&](auto x, int64_t) { return coordinate_step(x, eps[b], block.relative_step); });
    if (told) {
      continue;
    }
    measure_widths(
        block, widths,
        [&](const at::Tensor& moved, const at::Tensor& x, int64_t, int64_t sign) {
          const at::Tensor every = at::arange(x.numel(), x.options().dtype(at::kLong));
          perturb_coordinates_(moved, x, every, sign, eps[b], block.relative_step);
        },
        [&](int64_t, int64_t) {
          return at::scalar_tensor(2 * eps[b], widths.options().device(block.origin.device()));
        });
  }
}

void Evaluator::realized_widths(const at::Tensor& widths, const at::Tensor& displacement, double scale) const {
  const BelowAutograd guard;
  const at::Tensor all = displacement.contiguous();
  for (const InputBlock& block : blocks_) {
    const auto* const steps = all.is_cpu() ? all.const_data_ptr<double>() + block.first : nullptr;
    if (steps != nullptr && widths_on_cpu(block, widths, [&](auto, int64_t i) { return scale * steps[i]; })) {
      continue;
    }
    const auto own = [&](int64_t first, int64_t count) {
      return all.narrow(0, block.first + first, count).to(block.origin.device());
    };
    measure_widths(
        block, widths,
        [&](const at::Tensor& moved, const at::Tensor& x, int64_t first, int64_t sign) {
          displace_(moved, x, own(first, x.numel()), static_cast<double>(sign) * scale);
        },
        [&](int64_t first, int64_t count) { return own(first, count) * (2 * scale); });
  }
}

at::Tensor Evaluator::coordinates() const {
  const BelowAutograd guard;
  std::vector<at::Tensor> parts;
  for (const InputBlock& block : blocks_) {
    parts.push_back(real_coordinates(block.origin).to(at::kCPU, at::kDouble));
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts);
}

py::object Evaluator::evaluate(bool record_graph) {
  if (mutates_inputs_) {
    restore();
  }
  return call(record_graph, arguments_);
}

void Evaluator::displace(const at::Tensor& displacement, double scale) {
  const BelowAutograd guard;
  for (const InputBlock& block : blocks_) {
    const at::Tensor own = displacement.narrow(0, block.first, coordinate_count(block.origin));
    displace_(block.values, block.origin, own.to(block.values.device()), scale);
  }
}

void Evaluator::realize(
    const at::Tensor& displacement, const at::Tensor& realized, int64_t seed, int64_t stream, double eps,
    double relative) const {
  const BelowAutograd guard;
  for (const InputBlock& block : blocks_) {
    const int64_t size = coordinate_count(block.origin);
    realize_(
        displacement.narrow(0, block.first, size), realized.narrow(0, block.first, size),
        block.origin.to(displacement.device()), seed, stream, block.first, eps, relative * block.relative_step);
  }
}

std::optional<std::tuple<int64_t, int64_t, py::object>> Evaluator::values_along(
    const at::Tensor& displacement, const std::vector<double>& scales, const std::vector<at::Tensor>& values,
    const std::vector<OutputSpec>& outputs, bool record_graph) {
  const OnExit restoring([this] { restore(); });
  for (size_t s = 0; s < values.size(); ++s) {
    displace(displacement, scales[s]);
    const py::object result = call(record_graph, perturbed_arguments());
    const at::Tensor row = values[s].unsqueeze(0);
    const auto changed =
        visit_outputs(result, outputs, [&](size_t, const at::Tensor& output, int64_t offset, int64_t size) {
          flatten_into(row, 0, offset, size, output);
        });
    if (changed) {
      return std::make_tuple(static_cast<int64_t>(s), changed->first, changed->second);
    }
    raise_if_interrupted();
  }
  return std::nullopt;
}

std::optional<std::tuple<int64_t, int64_t, py::object>> Evaluator::difference_columns(
    int64_t first, const at::Tensor& columns, const std::vector<OutputSpec>& outputs, double eps, bool record_graph) {
  if (mutates_inputs_) {
    restore();
  }
  auto block = blocks_.begin();
  for (int64_t j = 0; j < columns.size(0); ++j) {
    while (first + j >= block->first + coordinate_count(block->origin)) {
      ++block;
    }
    const int64_t coordinate = first + j - block->first;
    const auto perturb = [&](int64_t sign) { move_coordinate(*block, coordinate, sign, eps); };
    const OnExit restoring([&] { mutates_inputs_ ? restore() : perturb(0); });
    for (const int64_t sign : {1, -1}) {
      if (mutates_inputs_) {
        restore();
      }
      perturb(sign);
      const py::object result = call(record_graph, perturbed_arguments());
      const auto changed =
          visit_outputs(result, outputs, [&](size_t, const at::Tensor& output, int64_t offset, int64_t size) {
            if (sign == 1) {
              flatten_into(columns, j, offset, size, output);
              return;
            }
            difference_from(columns, j, offset, size, output, *block, coordinate, eps);
          });
      if (changed) {
        return std::make_tuple(first + j, changed->first, changed->second);
      }
    }
    raise_if_interrupted();
  }
  return std::nullopt;
}

std::vector<at::Tensor> Evaluator::with_blocks(const at::Tensor& coordinates) const {
  const BelowAutograd guard;
  std::vector<at::Tensor> copies;
  copies.reserve(blocks_.size());
  for (const InputBlock& block : blocks_) {
    const bool again = !copies.empty() && copies.back().device() == block.values.device();
    copies.push_back(again ? copies.back() : coordinates.to(block.values.device()));
  }
  return copies;
}

void Evaluator::perturb_together(
    const Groups& groups, int64_t g, const std::vector<at::Tensor>& copies, int64_t sign, double eps) {
  const BelowAutograd guard;
  const auto* const all = groups.coordinates.const_data_ptr<int64_t>();
  const auto* const bounds = groups.starts.const_data_ptr<int64_t>();
  const auto* begin = all + bounds[g];
  const auto* const end = all + bounds[g + 1];
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const InputBlock& block = blocks_[b];
    const auto* const last = std::lower_bound(begin, end, block.first + coordinate_count(block.origin));
    if (last != begin) {
      const at::Tensor own = copies[b].narrow(0, begin - all, last - begin);
      perturb_coordinates_(
          block.values, block.origin, block.first == 0 ? own : own - block.first, sign, eps, block.relative_step);
    }
    begin = last;
  }
}

std::optional<std::tuple<int64_t, int64_t, py::object>> Evaluator::difference_groups(
    const Groups& groups, const at::Tensor& values, int64_t m, const std::vector<OutputSpec>& outputs, double eps,
    bool record_graph) {
  if (mutates_inputs_) {
    restore();
  }
  const std::array<at::Tensor, 2> sides = {at::empty({m}, values.options()), at::empty({m}, values.options())};
  // Once, not group by group: a copy to a device waits for it.
  const std::vector<at::Tensor> copies = with_blocks(groups.coordinates);
  for (int64_t g = 0; g < groups.count(); ++g) {
    const OnExit restoring([&] { mutates_inputs_ ? restore() : perturb_together(groups, g, copies, 0, eps); });
    for (const int64_t sign : {1, -1}) {
      if (mutates_inputs_) {
        restore();
      }
      perturb_together(groups, g, copies, sign, eps);
      const py::object result = call(record_graph, perturbed_arguments());
      const at::Tensor& side = sides[sign == 1 ? 0 : 1];
      const auto changed =
          visit_outputs(result, outputs, [&](size_t, const at::Tensor& output, int64_t offset, int64_t size) {
            flatten_(side.narrow(0, offset, size), output);
          });
      if (changed) {
        const int64_t first = slice(groups.coordinates, groups.starts, g)[0].item<int64_t>();
        return std::make_tuple(first, changed->first, changed->second);
      }
    }
    const BelowAutograd guard;
    decompress_(values, sides[0], sides[1], groups.positions, slice(groups.entries, groups.entry_starts, g));
    raise_if_interrupted();
  }
  return std::nullopt;
}

py::object Evaluator::evaluate_at(const py::tuple& arguments) {
  if (mutates_inputs_) {
    restore();
  }
  return call(/*record_graph=*/true, arguments);
}

std::tuple<std::optional<std::tuple<int64_t, int64_t, py::object>>, bool> Evaluator::tangent_columns(
    int64_t first, const at::Tensor& columns, const std::vector<OutputSpec>& outputs, const py::tuple& duals,
    const std::vector<at::Tensor>& tangents) {
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
        tangents[b].zero_();  // func changed the tangent together with its input
      }
      perturb_coordinate_(tangents[b], zeros[b], first + j - blocks_[b].first, sign, 1.0, 0.0);
    };
    const OnExit resetting([&] { set_tangent(0); });
    set_tangent(1);
    const py::object result = evaluate_at(duals);
    const at::Tensor column = columns.select(0, j);
    const auto changed =
        visit_outputs(result, outputs, [&](size_t o, const at::Tensor& output, int64_t offset, int64_t size) {
          const at::Tensor segment = column.narrow(0, offset, size);
          const at::Tensor& tangent = output._fw_grad(/*level=*/0);
          if (!tangent.defined()) {
            segment.zero_();
            return;
          }
          domains_match = domains_match && tangent.is_complex() == outputs[o].like.is_complex();
          flatten_(segment, with_domain_of(outputs[o].like, tangent));
        });
    if (changed) {
      return {std::make_tuple(first + j, changed->first, changed->second), domains_match};
    }
    raise_if_interrupted();
  }
  return {std::nullopt, domains_match};
}

}  // namespace fastgrad
