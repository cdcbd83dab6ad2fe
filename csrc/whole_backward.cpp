// All VJPs of a check of a small problem, in one call.
#include "whole_backward.h"

#include "batch_level.h"
#include "graph_nodes.h"
#include "ops/compare.h"
#include "ops/project_rows.h"
#include "rows.h"

#include <ATen/ops/_add_batch_dim.h>
#include <ATen/ops/_remove_batch_dim.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/allclose.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/le.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <ATen/TensorOperators.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

namespace fastgrad {
namespace {

// Whether two contiguous matrices on the CPU are equal up to a tolerance: the smaller of atol and rtol times the
// largest magnitude in the second matrix. A NaN is never equal.
bool are_close(const at::Tensor& left, const at::Tensor& right, double atol, double rtol) {
  const auto* const a = left.const_data_ptr<double>();
  const auto* const b = right.const_data_ptr<double>();
  double largest = 0;
  for (int64_t i = 0; i < right.numel(); ++i) {
    largest = std::max(largest, std::abs(b[i]));
  }
  const double tolerance = std::min(atol, rtol * largest);
  return std::equal(a, a + left.numel(), b, [=](double x, double y) { return std::abs(x - y) <= tolerance; });
}

// The same by operators; waits for the device. A NaN is never equal.
bool are_close_elsewhere(const at::Tensor& left, const at::Tensor& right, double atol, double rtol) {
  if (right.numel() == 0) {
    return true;
  }
  const at::Tensor tolerance = (at::abs(right).amax() * rtol).clamp_max(atol);
  return at::le(at::abs(left - right).amax(), tolerance).item<bool>();
}

// The VJPs of several grad_outputs in one vectorized run. The first dimension of `cotangents` and of the gradients
// counts them.
std::vector<at::Tensor> batched_vjp(
    const at::Tensor& output, const std::vector<at::Tensor>& inputs, const at::Tensor& cotangents) {
  const BatchLevel batch;
  std::vector<at::Tensor> gradients =
      vjp({output}, inputs, {at::_add_batch_dim(cotangents, 0, batch.level)}, /*create_graph=*/false);
  for (at::Tensor& gradient : gradients) {
    gradient = gradient.defined() ? at::_remove_batch_dim(gradient, batch.level, cotangents.size(0), 0) : gradient;
  }
  return gradients;
}

// Whether two gradients are equal except for rounding, by the rule of torch.allclose at its defaults.
bool is_close(const at::Tensor& left, const at::Tensor& right) {
  constexpr double rtol = 1e-5;
  constexpr double atol = 1e-8;
  if (!is_small_and_plain(left) || !is_small_and_plain(right) || left.sizes() != right.sizes()) {
    return at::allclose(left, right, rtol, atol);
  }
  const auto* const values = left.const_data_ptr<double>();
  return std::equal(values, values + left.numel(), right.const_data_ptr<double>(), [=](double a, double b) {
    return a == b || (std::isfinite(b) && std::abs(a - b) <= atol + rtol * std::abs(b));
  });
}

// All rows of one output as vjp_rows gives them, up to rounding, from one vectorized VJP.
GradientsMatch vectorized_rows(
    const at::Tensor& output, const std::vector<InputBlock>& inputs, bool imaginary, const at::Tensor& rows) {
  GradientsMatch match;
  const int64_t count = rows.size(0);
  std::vector<int64_t> sizes = output.sizes().vec();
  sizes.insert(sizes.begin(), count);
  at::Tensor cotangents;
  {
    const BelowAutograd guard;
    cotangents = at::zeros({count, count}, output.options());
    cotangents.diagonal().fill_(imaginary ? c10::Scalar(c10::complex<double>(0, 1)) : c10::Scalar(1));
    cotangents = cotangents.view(sizes);
  }
  const std::vector<at::Tensor> gradients = batched_vjp(output, arguments_of(inputs), cotangents);
  const BelowAutograd guard;
  int64_t offset = 0;
  for (size_t k = 0; k < inputs.size(); ++k) {
    const at::Tensor& origin = inputs[k].origin;
    const int64_t size = coordinate_count(origin);
    const at::Tensor target = rows.narrow(1, offset, size);
    offset += size;
    if (!gradients[k].defined()) {
      target.zero_();
      continue;
    }
    match.dtypes = match.dtypes && gradients[k].scalar_type() == origin.scalar_type();
    match.sizes = match.sizes && gradients[k].sizes().slice(1) == origin.sizes();
    if (!match.sizes) {
      return match;
    }
    const at::Tensor values = with_domain_of(origin, as_strided_layout(gradients[k])).contiguous();
    target.copy_((values.is_complex() ? at::view_as_real(values) : values).reshape({count, size}));
  }
  return match;
}

// Like vectorized_rows; nullopt if the backward cannot be vectorized, which only a trial shows.
std::optional<GradientsMatch> try_vectorized_rows(
    const at::Tensor& output, const std::vector<InputBlock>& inputs, bool imaginary, const at::Tensor& rows) {
  if (output.layout() != at::kStrided) {
    return std::nullopt;
  }
  try {
    return vectorized_rows(output, inputs, imaginary, rows);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error&) {
    return std::nullopt;
  } catch (const python_error&) {  // raised by hooks on saved tensors, and already set in Python
    if (!PyErr_ExceptionMatches(PyExc_Exception) || PyErr_ExceptionMatches(PyExc_MemoryError)) {
      throw;
    }
    PyErr_Clear();
    return std::nullopt;
  }
}

// The gradients for zero or undefined grad_outputs; notes if they are not zero.
std::vector<at::Tensor> take_zeros(
    WholeBackward& whole, const Graph& graph, const std::vector<InputBlock>& inputs, std::vector<at::Tensor> found) {
  check_in_place(inputs);
  whole.vjps += 1;
  for (size_t k = 0; k < found.size(); ++k) {
    if (found[k].defined() && !is_plain_zero(found[k], graph.inputs()[k])) {
      whole.are_zero = false;
      found[k] = found[k].clone();  // it is compared later, and backward may overwrite its results until then
    }
  }
  return found;
}

// Runs zeros and, if some row ran only once, the first product again.
void add_zeros_and_repeat(
    WholeBackward& whole, Graph& graph, const std::vector<InputBlock>& inputs, const at::Tensor& cotangents,
    const std::vector<int64_t>& layouts) {
  whole.zeros.insert(whole.zeros.begin(), take_zeros(whole, graph, inputs, graph.all().vjp_of_zeros()));
  const auto repeats = [](const WholeBackward::Rows& part) { return part.repeated.size(0) == part.rows.size(0); };
  if (cotangents.size(0) == 0 || std::all_of(whole.parts.begin(), whole.parts.end(), repeats)) {
    return;
  }
  const at::Tensor first = cotangents.narrow(0, 0, 1);
  const std::vector<int64_t> own(layouts.begin(), layouts.begin() + (layouts.empty() ? 0 : 1));
  const at::Tensor again = std::get<0>(vjp_coordinates(graph, inputs, first, own, /*only=*/{}));
  whole.vjps += 1;
  whole.movement = largest_difference(again, whole.products.narrow(0, 0, 1));
}

// Whether the products equal the sums of the rows of all outputs.
bool add_up(
    const WholeBackward& whole, const std::vector<at::Tensor>& outputs, const at::Tensor& cotangents, double atol,
    double rtol) {
  const at::Tensor sums = at::zeros({2, cotangents.size(0), whole.products.size(1)}, whole.products.options());
  const at::Tensor totals = sums.select(0, 0);
  const at::Tensor squares = sums.select(0, 1);
  size_t part = 0;
  for (const bool real_parts : {false, true}) {
    int64_t first = 0;
    for (const at::Tensor& output : outputs) {
      const int64_t width = coordinates_per_element(output);
      if (!real_parts || width == 2) {
        const int64_t own = first + (width == 2 && !real_parts ? 1 : 0);
        project_rows_(totals, squares, cotangents, whole.parts[part++].rows, own, width, 0);
      }
      first += coordinate_count(output);
    }
  }
  return whole.products.is_cpu() ? are_close(whole.products, totals, atol, rtol)
                                 : are_close_elsewhere(whole.products, totals, atol, rtol);
}

// The products, the rows and, if `undefined`, undefined grad_outputs; arguments as for whole_backward.
WholeBackward products_and_rows(
    Graph& graph, const std::vector<InputBlock>& inputs, const at::Tensor& cotangents,
    const std::vector<int64_t>& layouts, int64_t repeated, double repeat_scale, bool undefined,
    int64_t fewest_vectorized, double atol, double rtol) {
  WholeBackward whole;
  const std::vector<at::Tensor>& outputs = graph.outputs();
  const int64_t n = total(inputs);
  const auto take_undefined = [&](std::optional<int64_t> only) {
    whole.zeros.push_back(take_zeros(whole, graph, inputs, graph.all().vjp_of_undefined(only)));
  };
  bool vectorizes = fewest_vectorized > 0;  // until the backward of an output cannot be vectorized
  const auto take_rows = [&](size_t o, bool imaginary) {
    const at::Tensor& output = outputs[o];
    const int64_t count = output.numel();
    const int64_t twice = std::min(count, repeated);
    const auto options = cotangents.options();
    WholeBackward::Rows part{at::empty({count, n}, options), at::empty({twice, n}, options), {}};
    std::optional<GradientsMatch> match;
    if (vectorizes && count >= fewest_vectorized) {
      match = try_vectorized_rows(output, inputs, imaginary, part.rows);
      vectorizes = match.has_value();
      whole.vectorized = whole.vectorized || vectorizes;
    }
    part.match =
        match ? *match
              : vjp_rows(graph, static_cast<int64_t>(o), inputs, 0, imaginary, part.rows, part.repeated, repeat_scale);
    whole.vjps += count + twice;
    whole.parts.push_back(std::move(part));
  };
  // Before the rows: if the first calls are wrong, the products differ from the sums of the rows, for any wrong entry.
  if (cotangents.size(0) != 0) {
    whole.products = std::get<0>(vjp_coordinates(graph, inputs, cotangents, layouts, /*only=*/{}));
    whole.vjps += cotangents.size(0);
  }
  for (size_t o = 0; o < outputs.size(); ++o) {
    take_rows(o, outputs[o].is_complex());
  }
  for (size_t o = 0; o < outputs.size(); ++o) {
    if (outputs[o].is_complex()) {
      take_rows(o, /*imaginary=*/false);
    }
  }
  // Last: if a backward is wrong in its first calls, a product is wrong, too, and fails a comparison.
  if (undefined) {
    take_undefined(std::nullopt);
    for (size_t o = 0; outputs.size() > 1 && o < outputs.size(); ++o) {
      take_undefined(static_cast<int64_t>(o));
    }
  }
  whole.add_up = cotangents.size(0) == 0 || add_up(whole, outputs, cotangents, atol, rtol);
  return whole;
}

}  // namespace

std::vector<at::Tensor> vectorized_vjp(Graph& graph, int64_t output, const at::Tensor& cotangents) {
  graph.of(output);  // rejects numbers of outputs that do not exist
  const at::Tensor& own = graph.outputs()[output];
  TORCH_CHECK(
      cotangents.dim() == own.dim() + 1 && cotangents.sizes().slice(1) == own.sizes() &&
          cotangents.scalar_type() == own.scalar_type() && cotangents.device() == own.device(),
      "vectorized_vjp: cotangents must have the device, the dtype and, after their first dimension, the sizes of "
      "output ",
      output, ", ", own.device(), " ", own.scalar_type(), own.sizes(), ", got ", cotangents.device(), " ",
      cotangents.scalar_type(), cotangents.sizes());
  check_vjp_memory(graph.outputs(), graph.inputs(), {cotangents});
  return batched_vjp(own, graph.inputs(), cotangents);
}

bool are_close(
    const std::vector<std::optional<at::Tensor>>& batched,
    const std::vector<std::vector<std::optional<at::Tensor>>>& single) {
  const BelowAutograd guard;
  for (size_t row = 0; row < single.size(); ++row) {
    TORCH_CHECK(
        single[row].size() == batched.size(), "are_close: each VJP must have ", batched.size(), " gradients, got ",
        single[row].size());
    for (size_t k = 0; k < batched.size(); ++k) {
      if (!batched[k] && !single[row][k]) {
        continue;
      }
      if (!batched[k] || !single[row][k]) {
        return false;
      }
      const at::Tensor& rows = *batched[k];
      const at::Tensor& gradient = *single[row][k];
      check_storage("are_close", "batched", rows);
      check_storage("are_close", "single", gradient);
      if (rows.layout() != at::kStrided || gradient.layout() != at::kStrided || rows.dim() != gradient.dim() + 1 ||
          rows.size(0) != static_cast<int64_t>(single.size()) || rows.scalar_type() != gradient.scalar_type() ||
          rows.device() != gradient.device() || rows.sizes().slice(1) != gradient.sizes() ||
          !is_close(rows.select(0, static_cast<int64_t>(row)), gradient)) {
        return false;
      }
    }
  }
  return true;
}

WholeBackward whole_backward(
    Graph& graph, const std::vector<InputBlock>& inputs, const at::Tensor& cotangents,
    const std::vector<int64_t>& layouts, int64_t repeated, double repeat_scale, bool undefined,
    int64_t fewest_vectorized, double atol, double rtol) {
  TORCH_CHECK(
      fewest_vectorized == 0 || repeated == 0, "whole_backward: repeated must be 0 if rows may be vectorized, got ",
      repeated);
  WholeBackward whole = products_and_rows(
      graph, inputs, cotangents, layouts, repeated, repeat_scale, undefined, fewest_vectorized, atol, rtol);
  add_zeros_and_repeat(whole, graph, inputs, cotangents, layouts);
  return whole;
}

WholeBackward brief_backward(
    Graph& graph, const std::vector<InputBlock>& inputs, const at::Tensor& cotangents,
    const std::vector<int64_t>& layouts, bool undefined, int64_t fewest_vectorized, double atol, double rtol) {
  WholeBackward whole = products_and_rows(
      graph, inputs, cotangents, layouts, /*repeated=*/0, /*repeat_scale=*/1.0, undefined, fewest_vectorized, atol,
      rtol);
  whole.brief = true;
  return whole;
}

void complete(
    WholeBackward& whole, Graph& graph, const std::vector<InputBlock>& inputs, const at::Tensor& cotangents,
    const std::vector<int64_t>& layouts, int64_t repeated, double repeat_scale) {
  size_t part = 0;
  for (const bool real_parts : {false, true}) {
    for (size_t o = 0; o < graph.outputs().size() && !whole.vectorized; ++o) {
      const at::Tensor& output = graph.outputs()[o];
      if (!real_parts || output.is_complex()) {
        WholeBackward::Rows& own = whole.parts.at(part++);
        const int64_t twice = std::min(output.numel(), repeated);
        const at::Tensor again = at::empty({twice, own.rows.size(1)}, own.rows.options());
        own.repeated = at::empty_like(again);
        const bool imaginary = output.is_complex() && !real_parts;
        own.match.repeats =
            vjp_rows(graph, static_cast<int64_t>(o), inputs, 0, imaginary, again, own.repeated, repeat_scale).repeats;
        whole.vjps += 2 * twice;
      }
    }
  }
  add_zeros_and_repeat(whole, graph, inputs, cotangents, layouts);
  whole.brief = false;
}

WholeBackward WholeBackward::to(at::Device device) const {
  WholeBackward moved = *this;
  for (Rows& part : moved.parts) {
    part.rows = part.rows.to(device);
    part.repeated = part.repeated.to(device);
  }
  if (products.defined()) {
    moved.products = products.to(device);
  }
  return moved;
}

namespace {

// largest_errors on another device, by operators: one copy for all inputs, which waits for the device.
std::optional<std::vector<std::pair<double, double>>> largest_errors_elsewhere(
    const at::Tensor& rows, const at::Tensor& columns, int64_t first_row, int64_t row_step,
    const std::vector<InputTolerances>& inputs) {
  const at::Tensor numerical = columns.t().slice(0, first_row, first_row + (rows.size(0) - 1) * row_step + 1, row_step);
  std::vector<at::Tensor> fields;
  int64_t first = 0;
  for (const auto& [size, is_complex, atol, rtol] : inputs) {
    fields.push_back(compare(
        rows.narrow(1, first, size), numerical.narrow(1, first, size), atol, rtol, is_complex, /*equal_nan=*/false));
    first += size;
  }
  const at::Tensor all = at::stack(fields).to(at::kCPU);
  const auto* const statistics = static_cast<const ComparisonStatistics*>(all.const_data_ptr());
  std::vector<std::pair<double, double>> errors;
  for (size_t k = 0; k < inputs.size(); ++k) {
    if (statistics[k].mismatches != 0) {
      return std::nullopt;
    }
    errors.emplace_back(statistics[k].largest_absolute, statistics[k].largest_relative);
  }
  return errors;
}

}  // namespace

std::optional<std::vector<std::pair<double, double>>> largest_errors(
    const at::Tensor& rows, const at::Tensor& columns, int64_t first_row, int64_t row_step,
    const std::vector<InputTolerances>& inputs) {
  check_float64("largest_errors", "rows", rows, 2);
  check_float64("largest_errors", "columns", columns, 2);
  const int64_t count = rows.size(0);
  const int64_t n = rows.size(1);
  const int64_t m = columns.size(1);
  TORCH_CHECK(
      rows.is_contiguous() && columns.is_contiguous() && columns.device() == rows.device() && columns.size(0) == n,
      "largest_errors: rows (rows, n) and columns (n, m) must be contiguous and on one device, got ", rows.sizes(),
      " and ", columns.sizes());
  // No sums or products of the arguments: they may overflow.
  TORCH_CHECK(
      first_row >= 0 && row_step > 0 && (count == 0 || (first_row < m && count - 1 <= (m - 1 - first_row) / row_step)),
      "largest_errors: ", count, " rows from ", first_row, " on (step ", row_step, ") must lie within ", m, " rows");
  if (!rows.is_cpu()) {
    return largest_errors_elsewhere(rows, columns, first_row, row_step, inputs);
  }
  std::vector<std::pair<double, double>> errors;
  errors.reserve(inputs.size());
  int64_t first = 0;
  for (const auto& [size, is_complex, atol, rtol] : inputs) {
    TORCH_CHECK(
        size >= 0 && size <= n - first && (!is_complex || size % 2 == 0), "largest_errors: inputs must have ", n,
        " coordinates in all, two for each complex element, got one with ", size, " from ", first, " on");
    const StridedBlock analytical{rows.const_data_ptr<double>() + first, n, 1};
    const StridedBlock numerical{columns.const_data_ptr<double>() + first * m + first_row, row_step, m};
    const int64_t entries = is_complex ? size / 2 : size;
    const ComparisonStatistics statistics =
        compare_blocks(analytical, numerical, count, entries, atol, rtol, is_complex, /*equal_nan=*/false);
    if (statistics.mismatches != 0) {
      return std::nullopt;
    }
    errors.emplace_back(statistics.largest_absolute, statistics.largest_relative);
    first += size;
  }
  return errors;
}

}  // namespace fastgrad
