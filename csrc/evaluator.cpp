// The evaluation loops. Every pass handles a pending Ctrl-C; destructors restore the inputs.
#include "evaluator.h"

#include "kernels/difference.h"
#include "ops/central_difference.h"
#include "ops/common.h"
#include "ops/decompress.h"
#include "ops/displace.h"
#include "ops/flatten.h"
#include "ops/perturb_coordinate.h"
#include "ops/perturb_coordinates.h"
#include "ops/realize.h"
#include "outputs.h"
#include "rows.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/where.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <array>
#include <utility>

namespace py = pybind11;

namespace fastgrad {
namespace {

void check_vector(const char* what, const char* name, const at::Tensor& vector, int64_t size) {
  check_float64(what, name, vector, 1);
  TORCH_CHECK(vector.numel() == size, what, ": ", name, " must have ", size, " elements, got ", vector.numel());
}

void check_widths(const char* what, const at::Tensor& widths, int64_t size) {
  check_vector(what, "widths", widths, size);
  check_contiguous_float64(what, "widths", widths);
}

// Moves one coordinate of an input by its step (sign -1 or 1) or restores it (sign 0); also restores another
// coordinate, `restored`, if there is one.
void move_coordinate(
    const InputBlock& block, int64_t coordinate, int64_t sign, double eps,
    std::optional<int64_t> restored = std::nullopt) {
  if (is_small_and_plain(block.values)) {
    const double* const at_x = block.origin.const_data_ptr<double>();
    double* const values = block.values.mutable_data_ptr<double>();
    if (restored) {
      values[*restored] = at_x[*restored];
    }
    values[coordinate] = moved_coordinate(at_x[coordinate], static_cast<int>(sign), eps, block.relative_step);
    return;
  }
  const BelowAutograd guard;
  perturb_coordinate_(block.values, block.origin, coordinate, sign, eps, block.relative_step, restored);
}

// The coordinate that is moved. It is restored in the same call that moves the next coordinate of the same input.
class MovedCoordinate {
 public:
  explicit MovedCoordinate(double eps) : eps_(eps) {}

  void move(const InputBlock& block, int64_t coordinate, int64_t sign) {
    if (block_ != &block) {
      put_back();
    }
    const bool others = block_ != nullptr && coordinate_ != coordinate;
    const std::optional<int64_t> restored = others ? std::optional(coordinate_) : std::nullopt;
    block_ = &block;
    coordinate_ = coordinate;
    move_coordinate(block, coordinate, sign, eps_, restored);
  }

  void put_back() {
    if (block_ != nullptr) {
      move_coordinate(*block_, coordinate_, 0, eps_);
    }
    block_ = nullptr;
  }

  // All inputs were restored.
  void forget() { block_ = nullptr; }

 private:
  const InputBlock* block_ = nullptr;
  int64_t coordinate_ = 0;
  double eps_;
};

// columns[j, offset : offset + size] holds an output at x + h, where h is the step of one coordinate of an input. It
// becomes the central difference of this output, with its values at x - h.
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
  central_difference_(row_segment(columns, j, offset, size), minus, block.origin, coordinate, eps, block.relative_step);
}

uint32_t version(const at::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

}  // namespace

Evaluator::Evaluator(py::object func, py::tuple arguments, std::vector<InputBlock> blocks)
    : func_(std::move(func)), arguments_(std::move(arguments)), blocks_(std::move(blocks)) {
  for (const InputBlock& block : blocks_) {
    TORCH_CHECK(
        block.first == size_, "Evaluator: blocks must lie end to end, got one that begins at ", block.first,
        " where the last one ends at ", size_);
    size_ += coordinate_count(block.origin);
  }
}

void Evaluator::check_coordinates(const char* what, int64_t first, int64_t count) const {
  TORCH_CHECK(
      first >= 0 && first <= size_ && count <= size_ - first, what, ": coordinates must be in [0, ", size_, "), got ",
      count, " from ", first, " on");
}

py::object Evaluator::call(bool record_graph, const py::tuple& arguments) {
  check_in_place(blocks_);
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
  check_in_place(blocks_);
  return result;
}

py::tuple Evaluator::replaced(const InputBlock& block, py::tuple arguments, const py::object& by) const {
  if (arguments.is(arguments_)) {
    arguments = py::tuple(py::list(arguments_));
  }
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (THPVariable_Check(arguments_[i].ptr()) && THPVariable_Unpack(arguments_[i].ptr()).is_same(block.argument)) {
      arguments[i] = by;
    }
  }
  return arguments;
}

py::tuple Evaluator::arguments_with(const std::vector<at::Tensor>& inputs) const {
  TORCH_CHECK(
      inputs.size() == blocks_.size(), "arguments_with: there must be one tensor for each of ", blocks_.size(),
      " inputs, got ", inputs.size());
  py::tuple arguments = arguments_;
  for (size_t b = 0; b < blocks_.size(); ++b) {
    arguments = replaced(blocks_[b], std::move(arguments), py::cast(inputs[b]));
  }
  return arguments;
}

py::tuple Evaluator::perturbed_arguments() const {
  py::tuple arguments = arguments_;
  for (const InputBlock& block : blocks_) {
    if (block.stand_in.defined()) {
      // No operator writes one element of an MKLDNN tensor, so a new tensor is made.
      const bool mkldnn = block.argument.layout() == at::kMkldnn;
      const at::Tensor stand_in = mkldnn ? block.values.to_mkldnn().requires_grad_() : block.stand_in;
      arguments = replaced(block, std::move(arguments), py::cast(stand_in));
    }
  }
  return arguments;
}

void Evaluator::restore() {
  const BelowAutograd guard;
  for (const InputBlock& block : blocks_) {
    copy_back(block.values, block.origin);
    if (block.own_values.defined()) {
      copy_back(block.own_values, block.own_origin);
    }
    if (!is_in_place(block)) {
      block.argument.set_data(block.values);
    }
  }
}

bool Evaluator::inputs_changed() const {
  check_in_place(blocks_);
  const BelowAutograd guard;
  const auto changed = [](const InputBlock& block) {
    // Compared as real coordinates, because at::equal does not support complex32.
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

// (x moved up) - (x moved down), after rounding to the input's dtype: the divisor of a difference.
// move(moved, x, first, sign) writes the coordinates from `first` on. An infinite coordinate does not move. Its width
// is nominal(first, count), so that a function that is constant in this coordinate has the derivative zero.
template <typename Move, typename Nominal>
void measure_widths(const InputBlock& block, const at::Tensor& widths, const Move& move, const Nominal& nominal) {
  const at::Tensor all = real_coordinates(block.origin);
  // On the CPU, pieces are so small that temporaries stay in the cache. On a device, fewer calls matter more.
  const int64_t piece = all.is_cpu() ? 1 << 15 : std::max<int64_t>(1, all.numel());
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

// The same by the functions of kernels/difference.h, for an input in this process's memory; otherwise returns false.
// step(x, i): the step of coordinate i.
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
  check_widths("coordinate_widths", widths, size_);
  TORCH_CHECK(
      eps.size() == blocks_.size(), "coordinate_widths: eps must have an element for each of ", blocks_.size(),
      " inputs, got ", eps.size());
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
  check_widths("realized_widths", widths, size_);
  check_vector("realized_widths", "displacement", displacement, size_);
  check_same_or_apart("realized_widths", "widths", widths, "displacement", displacement);
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
    parts.push_back(real_coordinates(block.origin).to(blocks_[0].origin.device(), at::kDouble));
  }
  if (parts.empty()) {
    return at::empty({0}, at::kDouble);
  }
  return parts.size() == 1 ? parts[0] : at::cat(parts);
}

py::object Evaluator::evaluate(bool record_graph) {
  if (mutates_inputs_) {
    restore();
  }
  return call(record_graph, arguments_);
}

void Evaluator::displace(const std::vector<at::Tensor>& parts, double scale) {
  const BelowAutograd guard;
  for (size_t b = 0; b < blocks_.size(); ++b) {
    displace_(blocks_[b].values, blocks_[b].origin, parts[b], scale);
  }
}

std::vector<at::Tensor> Evaluator::parts_of(const at::Tensor& displacement) const {
  const BelowAutograd guard;
  std::vector<at::Tensor> parts;
  parts.reserve(blocks_.size());
  for (const InputBlock& block : blocks_) {
    const at::Tensor part = displacement.narrow(0, block.first, coordinate_count(block.origin));
    parts.push_back(part.to(block.values.device()));
  }
  return parts;
}

void Evaluator::realize(
    const at::Tensor& displacement, const at::Tensor& realized, int64_t seed, int64_t stream, double eps,
    double relative) const {
  const BelowAutograd guard;
  check_vector("realize", "displacement", displacement, size_);
  check_vector("realize", "realized", realized, size_);
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const InputBlock& block = blocks_[b];
    const int64_t size = coordinate_count(block.origin);
    realize_(
        displacement.narrow(0, block.first, size), realized.narrow(0, block.first, size),
        origin_on(displacement.device(), b), seed, stream, block.first, eps, relative * block.relative_step);
  }
}

void Evaluator::realize_along(
    const at::Tensor& displacement, const at::Tensor& realized, const RandomDirections& along, int64_t k, double step,
    double relative) const {
  realize(displacement, realized, along.seed, along.streams[k], step, relative);
  if (!along.is_part(k)) {
    return;
  }
  const int64_t count = 1 + *std::max_element(along.parts.begin(), along.parts.end());
  for (size_t b = 0; b < blocks_.size(); ++b) {
    if (static_cast<int64_t>(b) % count != along.parts[k]) {
      for (const at::Tensor& vector : {displacement, realized}) {
        vector.narrow(0, blocks_[b].first, coordinate_count(blocks_[b].origin)).zero_();
      }
    }
  }
}

at::Tensor Evaluator::origin_on(at::Device device, size_t block) const {
  const at::Tensor& origin = blocks_[block].origin;
  if (!device.is_cpu() || origin.is_cpu()) {
    return origin.to(device);
  }
  origins_on_cpu_.resize(blocks_.size());
  at::Tensor& copy = origins_on_cpu_[block];
  if (!copy.defined()) {
    copy = origin.to(device);
  }
  return copy;
}

std::optional<std::tuple<int64_t, int64_t, py::object>> Evaluator::values_along(
    const at::Tensor& displacement, const std::vector<double>& scales, const std::vector<at::Tensor>& values,
    const std::vector<OutputSpec>& outputs, bool record_graph) {
  check_vector("values_along", "displacement", displacement, size_);
  TORCH_CHECK(
      values.size() == scales.size(), "values_along: values must have as many elements as scales, ", scales.size(),
      ", got ", values.size());
  for (const at::Tensor& row : values) {
    check_vector("values_along", "values", row, total(outputs));
    check_written("values_along", "values", row);
  }
  check_in_place(blocks_);
  const std::vector<at::Tensor> parts = parts_of(displacement);
  const OnExit restoring([this] { restore(); });
  for (size_t s = 0; s < values.size(); ++s) {
    displace(parts, scales[s]);
    const py::object result = call(record_graph && records_differences_, perturbed_arguments());
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
  check_columns("difference_columns", columns, outputs);
  check_coordinates("difference_columns", first, columns.size(0));
  check_in_place(blocks_);
  if (mutates_inputs_) {
    restore();
  }
  MovedCoordinate moved(eps);
  const OnExit restoring([&] { mutates_inputs_ ? restore() : moved.put_back(); });
  auto block = blocks_.begin();
  for (int64_t j = 0; j < columns.size(0); ++j) {
    while (first + j >= block->first + coordinate_count(block->origin)) {
      ++block;
    }
    const int64_t coordinate = first + j - block->first;
    for (const int64_t sign : {1, -1}) {
      if (mutates_inputs_) {
        restore();
        moved.forget();
      }
      moved.move(*block, coordinate, sign);
      const py::object result = call(record_graph && records_differences_, perturbed_arguments());
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

std::vector<at::Tensor> Evaluator::inputs_at(const at::Tensor& displacement) const {
  check_vector("inputs_at", "displacement", displacement, size_);
  const BelowAutograd guard;
  const std::vector<at::Tensor> parts = parts_of(displacement);
  std::vector<at::Tensor> inputs;
  for (size_t b = 0; b < blocks_.size(); ++b) {
    inputs.push_back(at::empty_like(blocks_[b].origin));
    displace_(inputs.back(), blocks_[b].origin, parts[b], 1.0);
  }
  return inputs;
}

at::Tensor Evaluator::points_of(const InputBlock& block, const at::Tensor& last, double eps) const {
  const BelowAutograd guard;
  std::vector<int64_t> sizes = block.origin.sizes().vec();
  sizes.insert(sizes.begin(), 2 * size_ + 2);
  at::Tensor points = at::empty(sizes, block.origin.options());
  points.copy_(block.origin);
  points.select(0, 2 * size_ + 1).copy_(last);
  const int64_t own = coordinate_count(block.origin);
  for (const int64_t sign : {1, -1}) {
    // The points that move this input, and in each of them, after `own` coordinates per point, another coordinate.
    const at::Tensor moved = points.narrow(0, (sign == 1 ? 0 : size_) + block.first, own);
    const at::Tensor coordinates = at::arange(0, own * own, own + 1, points.options().dtype(at::kLong));
    perturb_coordinates_(moved, moved, coordinates, sign, eps, block.relative_step);
  }
  return points;
}

std::optional<at::Tensor> Evaluator::vectorized_columns(
    const py::object& evaluate, const at::Tensor& displacement, const at::Tensor& columns,
    const std::vector<OutputSpec>& outputs, double eps) {
  check_columns("vectorized_columns", columns, outputs);
  TORCH_CHECK(columns.size(0) == size_, "vectorized_columns: there must be ", size_, " columns, got ", columns.size(0));
  check_in_place(blocks_);
  const std::vector<at::Tensor> last = inputs_at(displacement);
  std::vector<at::Tensor> points;
  for (size_t b = 0; b < blocks_.size(); ++b) {
    points.push_back(points_of(blocks_[b], last[b], eps));
  }
  ++evaluations_;
  const py::object results = evaluate(arguments_with(points), 2 * size_ + 2);
  check_in_place(blocks_);
  const BelowAutograd guard;
  const at::Tensor known = at::empty({2, columns.size(1)}, columns.options());
  int64_t offset = 0;
  for (const OutputSpec& output : outputs) {
    PyObject* const value = output_at(results.ptr(), output.position);
    std::vector<int64_t> sizes = output.like.sizes().vec();
    sizes.insert(sizes.begin(), 2 * size_ + 2);
    if (!looks_like(value, output.like.expand(sizes))) {
      return std::nullopt;
    }
    const int64_t own = coordinate_count(output.like);
    const at::Tensor all = real_coordinates(THPVariable_Unpack(value).detach().contiguous()).reshape({-1, own});
    at::Tensor part = columns.narrow(1, offset, own);
    at::sub_out(part, all.narrow(0, 0, size_), all.narrow(0, size_, size_));
    known.narrow(1, offset, own).copy_(all.narrow(0, 2 * size_, 2));
    offset += own;
  }
  const at::Tensor widths = at::empty({size_}, at::kDouble);
  coordinate_widths(widths, std::vector<double>(blocks_.size(), eps));
  columns.div_(widths.to(columns.device()).unsqueeze(1));
  return known;
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
  const auto bounds = groups.coordinates_of(g);
  const auto* begin = all + bounds.first;
  const auto* const end = all + bounds.second;
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
  TORCH_CHECK(
      begin == end, "difference_groups: coordinates of group ", g, " must be in [0, ", size_, "), got ", *begin);
}

std::optional<std::tuple<int64_t, int64_t, py::object>> Evaluator::difference_groups(
    const Groups& groups, const at::Tensor& values, int64_t m, const std::vector<OutputSpec>& outputs, double eps,
    bool record_graph) {
  check_vector("difference_groups", "values", values, groups.positions.numel());
  TORCH_CHECK(
      m == total(outputs), "difference_groups: m must be the number of real coordinates of the outputs, ",
      total(outputs), ", got ", m);
  check_in_place(blocks_);
  if (mutates_inputs_) {
    restore();
  }
  const std::array<at::Tensor, 2> sides = {at::empty({m}, values.options()), at::empty({m}, values.options())};
  // Once, not for each group: a copy to a device waits for the device.
  const std::vector<at::Tensor> copies = with_blocks(groups.coordinates);
  for (int64_t g = 0; g < groups.count(); ++g) {
    const OnExit restoring([&] { mutates_inputs_ ? restore() : perturb_together(groups, g, copies, 0, eps); });
    for (const int64_t sign : {1, -1}) {
      if (mutates_inputs_) {
        restore();
      }
      perturb_together(groups, g, copies, sign, eps);
      const py::object result = call(record_graph && records_differences_, perturbed_arguments());
      const at::Tensor& side = sides[sign == 1 ? 0 : 1];
      const auto changed =
          visit_outputs(result, outputs, [&](size_t, const at::Tensor& output, int64_t offset, int64_t size) {
            flatten_(side.narrow(0, offset, size), output);
          });
      if (changed) {
        const int64_t first = groups.coordinates[groups.coordinates_of(g).first].item<int64_t>();
        return std::make_tuple(first, changed->first, changed->second);
      }
    }
    const BelowAutograd guard;
    decompress_(values, sides[0], sides[1], groups.positions, groups.entries_of(g));
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

}  // namespace fastgrad
