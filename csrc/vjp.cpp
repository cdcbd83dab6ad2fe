// The VJP loop: rows of Jacobians by calling the autograd engine directly.
#include "vjp.h"

#include "graph_nodes.h"
#include "graph_runner.h"
#include "memory.h"
#include "ops/common.h"
#include "ops/decompress.h"
#include "ops/perturb_coordinate.h"
#include "ops/unflatten.h"
#include "reused_tensor.h"
#include "rows.h"

#include <ATen/ops/any.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/basic_ops.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <unordered_map>

namespace py = pybind11;

namespace fastgrad {
namespace {

// Sets a cotangent to this value at one coordinate, and to zero elsewhere.
void set_one_hot(const at::Tensor& cotangent, int64_t coordinate, double value) {
  const BelowAutograd guard;
  count_as_written(cotangent);
  if (is_small_and_plain(cotangent)) {
    double* const values = cotangent.mutable_data_ptr<double>();
    std::fill_n(values, cotangent.numel(), 0.0);
    values[coordinate] = value;
    return;
  }
  cotangent.zero_();
  perturb_coordinate_(cotangent, /*origin=*/cotangent, coordinate, value < 0 ? -1 : 1, std::abs(value), 0.0);
}

// Whether a gradient equals the gradient for a multiple of its cotangent, divided by this multiple. If only the
// second one overflows, it is run again. If it overflows again, the inverse multiple is run; otherwise `again` becomes
// NaN. rerun(exponent): runs the VJP for the multiple with this exponent, 1 or -1.
template <typename Rerun>
bool is_repeated(const at::Tensor& gradient, const at::Tensor& again, const Rerun& rerun) {
  if (at::equal(gradient, again)) {
    return true;
  }
  if (at::isfinite(again).all().item<bool>() || !at::isfinite(gradient).all().item<bool>()) {
    return false;
  }
  rerun(1);
  if (at::isfinite(again).all().item<bool>()) {
    again.fill_(std::numeric_limits<double>::quiet_NaN());
    return false;
  }
  rerun(-1);
  return at::equal(gradient, again);
}

}  // namespace

double largest_difference(const at::Tensor& left, const at::Tensor& right) {
  if (at::equal(left, right)) {
    return 0.0;
  }
  const double largest = at::sub(left, right).abs_().max().item<double>();
  return std::isnan(largest) ? std::numeric_limits<double>::infinity() : largest;
}

namespace {

// Writes coordinates (float64, one dimension) as the values of a tensor.
void unflatten_into(const at::Tensor& tensor, const at::Tensor& coordinates) {
  if (is_small_and_plain(tensor) && is_small_and_plain(coordinates) && coordinates.numel() == tensor.numel()) {
    std::copy_n(coordinates.const_data_ptr<double>(), tensor.numel(), tensor.mutable_data_ptr<double>());
    return;
  }
  unflatten_(tensor, coordinates);
}

}  // namespace

void check_vjp_memory(
    const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
    const std::vector<at::Tensor>& cotangents) {
  for (const at::Tensor& output : outputs) {
    check_storage("vjp", "an output", output);
  }
  for (const at::Tensor& input : inputs) {
    check_storage("vjp", "an input", input);
  }
  for (const at::Tensor& cotangent : cotangents) {
    if (cotangent.defined()) {
      check_storage("vjp", "a cotangent", cotangent);
    }
  }
}

std::vector<at::Tensor> vjp(
    const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs,
    const std::vector<at::Tensor>& cotangents, bool create_graph) {
  check_vjp_memory(outputs, inputs, cotangents);
  const py::gil_scoped_release released;
  return torch::autograd::grad(outputs, inputs, cotangents, /*retain_graph=*/true, create_graph, /*allow_unused=*/true);
}

std::vector<at::Tensor> vjp_of_zeros(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) {
  std::vector<at::Tensor> zeros;
  zeros.reserve(outputs.size());
  {
    const BelowAutograd guard;
    for (const at::Tensor& output : outputs) {
      zeros.push_back(at::empty_like(output, {}, at::MemoryFormat::Contiguous).zero_());
    }
  }
  return vjp(outputs, inputs, zeros, /*create_graph=*/false);
}

std::vector<at::Tensor> with_undefined_grads(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> behind;
  behind.reserve(outputs.size());
  for (const at::Tensor& output : outputs) {
    check_storage("with_undefined_grads", "an output", output);
    behind.push_back((*std::make_shared<torch::autograd::UndefinedGrad>())({output}).at(0));
  }
  return behind;
}

bool is_plain_zero(const at::Tensor& gradient, const at::Tensor& input) {
  if (gradient._is_zerotensor()) {
    return gradient.scalar_type() == input.scalar_type() && gradient.device() == input.device() &&
           gradient.sizes() == input.sizes();
  }
  if (gradient.is_conj() || gradient.is_neg()) {
    if (gradient.layout() != at::kStrided || !gradient.is_cpu() ||
        bytes_reached(gradient) > static_cast<int64_t>(gradient.storage().nbytes())) {
      return false;
    }
    const BelowAutograd guard;
    return is_plain_zero(gradient.resolve_conj().resolve_neg(), input);
  }
  const bool is_complex = gradient.scalar_type() == at::kComplexDouble;
  if (!(is_complex || gradient.scalar_type() == at::kDouble) || !is_plain_dense(gradient) ||
      gradient.scalar_type() != input.scalar_type() || gradient.device() != input.device() ||
      gradient.sizes() != input.sizes()) {
    return false;
  }
  if (!is_plain_memory(gradient)) {
    const BelowAutograd guard;  // waits for a device
    return gradient.layout() == at::kStrided &&
           bytes_reached(gradient) <= static_cast<int64_t>(gradient.storage().nbytes()) && !gradient.any().item<bool>();
  }
  const auto* const first = static_cast<const double*>(gradient.const_data_ptr());
  return std::all_of(first, first + coordinate_count(gradient), [](double value) { return value == 0; });
}

namespace {

// An empty tensor like `output` in a layout that autograd may pass and that shows most errors: dimensions in reverse
// order of memory, and gaps of NaN, which a backward that ignores strides reads.
at::Tensor gapped_and_transposed(const at::Tensor& output) {
  std::vector<int64_t> sizes = output.sizes().vec();
  std::reverse(sizes.begin(), sizes.end());
  sizes.push_back(2);
  std::vector<int64_t> order(output.dim());
  std::iota(order.rbegin(), order.rend(), 0);
  const at::Tensor storage = at::full(sizes, std::numeric_limits<double>::quiet_NaN(), output.options());
  return storage.select(-1, 0).permute(order);
}

// The largest entries of the gradients of one sparse input at elements that it does not specify, row by
// row. They are kept on the device of the gradients until all are computed, because reading them waits for the device.
class UnspecifiedEntries {
 public:
  // divisor: a power of two.
  void add(const at::Tensor& gradient, const at::Tensor& elements, int64_t row, double divisor) {
    const at::Tensor others = gradient.div(divisor).index_fill_(0, elements, 0);
    if (others.numel() == 0) {
      return;
    }
    const auto [magnitude, element] = others.abs().max(0, /*keepdim=*/true);  // a NaN is the largest
    rows_.push_back(row);
    elements_.push_back(element);
    values_.push_back(others.index_select(0, element));
  }

  // The largest of all rows, if any is not zero.
  std::optional<UnspecifiedEntry> largest() const {
    std::optional<UnspecifiedEntry> found;
    if (rows_.empty()) {
      return found;
    }
    const at::Tensor elements = at::cat(elements_).to(at::kCPU);
    const at::Tensor values = at::cat(values_).to(at::kCPU, at::kComplexDouble);
    for (size_t k = 0; k < rows_.size(); ++k) {
      const auto value = values.const_data_ptr<c10::complex<double>>()[k];
      const double size = std::abs(value);
      if (std::isnan(size) || size > (found ? std::abs(found->value) : 0.0)) {
        found = UnspecifiedEntry{rows_[k], elements.const_data_ptr<int64_t>()[k], value};
      }
    }
    return found;
  }

 private:
  std::vector<int64_t> rows_;
  std::vector<at::Tensor> elements_, values_;
};
using Unspecified = std::map<int64_t, UnspecifiedEntries>;  // by input

void read_unspecified(const Unspecified& entries, GradientsMatch& match) {
  const BelowAutograd guard;
  for (const auto& [input, of_input] : entries) {
    if (const auto largest = of_input.largest()) {
      match.unspecified[input] = *largest;
    }
  }
}

// Lays gradients, divided by a power of two, end to end into rows[row] (float64, shape (count, coordinates
// of all inputs)).
void flatten_gradients(
    const std::vector<at::Tensor>& gradients, const std::vector<InputBlock>& inputs, const at::Tensor& rows,
    int64_t row, GradientsMatch& match, Unspecified& unspecified, double divisor = 1.0) {
  check_in_place(inputs);  // a backward can also change inputs
  int64_t end = 0;
  for (size_t k = 0; k < inputs.size(); ++k) {
    const at::Tensor& argument = inputs[k].argument;
    const int64_t size = coordinate_count(inputs[k].origin);
    const int64_t offset = end;
    end += size;
    at::Tensor gradient = gradients[k];
    if (!gradient.defined()) {
      rows.select(0, row).narrow(0, offset, size).zero_();
      continue;
    }
    const bool same_size = gradient.sizes() == argument.sizes();
    const bool same_dtype = gradient.scalar_type() == argument.scalar_type();
    match.sizes = match.sizes && same_size;
    match.dtypes = match.dtypes && same_dtype;
    match.strided = match.strided && gradient.layout() == at::kStrided;
    if (!same_size) {
      rows.select(0, row).narrow(0, offset, size).zero_();
      continue;
    }
    gradient = with_domain_of(inputs[k].origin, as_strided_layout(gradient));
    if (inputs[k].elements.defined()) {
      gradient = gradient.reshape({-1});
      unspecified[static_cast<int64_t>(k)].add(gradient, inputs[k].elements, row, divisor);
      gradient = gradient.index_select(0, inputs[k].elements);
    }
    flatten_into(rows, row, offset, size, gradient, divisor);
  }
}

// Whether the memory of a gradient can be used without a copy: its elements are the coordinates of the input, and
// nothing else refers to it. (A backward may keep the tensor that it returns, and overwrite it in the next call.) A
// storage that is not resizable may wrap memory that something else owns.
bool can_be_taken(const at::Tensor& gradient, const InputBlock& input) {
  return gradient.defined() && is_plain(gradient) && gradient.sizes() == input.argument.sizes() &&
         input.origin.scalar_type() == at::kDouble && input.argument.layout() == at::kStrided &&
         gradient.use_count() == 1 && gradient.storage().use_count() == 1 && gradient.storage().resizable();
}

// The number of coordinates of all outputs.
int64_t total(const std::vector<at::Tensor>& outputs) {
  return std::accumulate(outputs.begin(), outputs.end(), int64_t{0}, [](int64_t sum, const at::Tensor& output) {
    return sum + coordinate_count(output);
  });
}

// Rejects rows that do not have an element for each coordinate of all inputs.
void check_rows(const char* what, const char* name, const at::Tensor& rows, const std::vector<InputBlock>& inputs) {
  check_float64(what, name, rows, 2);
  TORCH_CHECK(
      rows.size(1) == total(inputs), what, ": ", name, " must have ", total(inputs),
      " columns, one for each real coordinate of the inputs, got ", rows.size(1));
  check_written(what, name, rows);
}

// Rejects blocks that are not those of the graph's inputs.
void check_inputs(const char* what, const Graph& graph, const std::vector<InputBlock>& inputs) {
  const bool same = std::equal(
      inputs.begin(), inputs.end(), graph.inputs().begin(), graph.inputs().end(),
      [](const InputBlock& block, const at::Tensor& input) { return block.argument.is_same(input); });
  TORCH_CHECK(same, what, ": inputs must be the blocks of the ", graph.inputs().size(), " inputs of the graph");
}

// Rows of cotangents as grad_outputs, each in one layout, for all outputs or for only one.
class Cotangents {
 public:
  // layouts, only: as in vjp_coordinates.
  Cotangents(
      const char* what, Graph& graph, const std::vector<InputBlock>& inputs, const at::Tensor& rows,
      const std::vector<int64_t>& layouts, const std::vector<int64_t>& only)
      : graph_(graph), rows_(rows), layouts_(layouts), only_(only) {
    check_inputs(what, graph, inputs);
    const std::vector<at::Tensor>& outputs = graph.outputs();
    check_float64(what, "cotangents", rows, 2);
    TORCH_CHECK(
        rows.size(1) == total(outputs), what, ": cotangents must have ", total(outputs),
        " columns, one for each real coordinate of the outputs, got ", rows.size(1));
    TORCH_CHECK(
        layouts.empty() || static_cast<int64_t>(layouts.size()) == rows.size(0), what,
        ": layouts must have one number for each row of cotangents, ", rows.size(0), ", or none, got ", layouts.size());
    for (const int64_t layout : layouts) {
      TORCH_CHECK(
          0 <= layout && layout <= static_cast<int64_t>(Layout::expanded), what,
          ": layouts must hold numbers of layouts, at least 0 and at most ", static_cast<int64_t>(Layout::expanded),
          ", got ", layout);
    }
    TORCH_CHECK(
        only.empty() || static_cast<int64_t>(only.size()) == rows.size(0), what,
        ": only must have one number for each row of cotangents, ", rows.size(0), ", or none, got ", only.size());
    for (const int64_t output : only) {
      TORCH_CHECK(
          -1 <= output && output < static_cast<int64_t>(outputs.size()), what,
          ": only must hold numbers of outputs, "
          "at least -1 and less than ",
          outputs.size(), ", got ", output);
    }
  }

  // The VJP of row k.
  std::vector<at::Tensor> vjp(int64_t k) const {
    const std::vector<at::Tensor>& outputs = graph_.outputs();
    const Layout layout = layouts_.empty() ? Layout::contiguous : static_cast<Layout>(layouts_[k]);
    const int64_t one = only_.empty() ? -1 : only_[k];
    std::vector<at::Tensor> grad_outputs;
    {
      const BelowAutograd guard;
      const at::Tensor row = rows_.select(0, k);
      int64_t offset = 0;
      for (int64_t i = 0; i < static_cast<int64_t>(outputs.size()); ++i) {
        const int64_t size = coordinate_count(outputs[i]);
        if (one == -1 || one == i) {
          grad_outputs.push_back(
              grad_output(i, outputs[i], size == row.numel() ? row : row.narrow(0, offset, size), layout));
        }
        offset += size;
      }
    }
    return (one == -1 ? graph_.all() : graph_.of(one)).vjp(grad_outputs);
  }

 private:
  at::Tensor grad_output(int64_t i, const at::Tensor& output, const at::Tensor& coordinates, Layout layout) const {
    if (layout == Layout::expanded && coordinates.numel() > 0) {
      const at::Tensor value = at::empty({}, output.options());
      unflatten_(value, coordinates.narrow(0, 0, coordinates_per_element(output)));
      return value.expand(output.sizes());
    }
    const auto make = [&] { return memory_for(output, layout); };
    const at::Tensor made = layout == Layout::contiguous ? contiguous_[i].next(make) : make();
    unflatten_into(made, coordinates);
    return made;
  }

  static at::Tensor memory_for(const at::Tensor& output, Layout layout) {
    // torch treats an empty tensor as contiguous even if its strides are not, and backwards then fail.
    if (output.numel() > 0 && layout == Layout::gapped) {
      return gapped_and_transposed(output);
    }
    if (output.numel() > 0 && layout == Layout::offset) {
      // torch's view_as_complex takes even offsets only, so its own view_as_real would raise for an odd one.
      const auto& node = output.grad_fn();
      const int64_t offset = node && is_custom(*node) ? 1 : 2;
      const at::Tensor storage =
          at::full({output.numel() + offset}, std::numeric_limits<double>::quiet_NaN(), output.options());
      return storage.narrow(0, offset, output.numel()).view(output.sizes());
    }
    return at::empty_like(output, {}, at::MemoryFormat::Contiguous);
  }

  Graph& graph_;
  const at::Tensor& rows_;
  const std::vector<int64_t>& layouts_;
  const std::vector<int64_t>& only_;
  mutable std::unordered_map<int64_t, ReusedTensor> contiguous_;  // by output
};

}  // namespace

std::tuple<at::Tensor, GradientsMatch> vjp_coordinates(
    Graph& graph, const std::vector<InputBlock>& inputs, const at::Tensor& cotangents,
    const std::vector<int64_t>& layouts, const std::vector<int64_t>& only) {
  const Cotangents rows("vjp_coordinates", graph, inputs, cotangents, layouts, only);
  const int64_t count = cotangents.size(0);
  const int64_t n = total(inputs);
  at::Tensor gradients;
  GradientsMatch match;
  Unspecified unspecified;
  for (int64_t k = 0; k < count; ++k) {
    std::vector<at::Tensor> found = rows.vjp(k);
    {
      const BelowAutograd guard;
      if (count == 1 && found.size() == 1 && can_be_taken(found[0], inputs[0])) {
        check_in_place(inputs);
        gradients = found[0].view({1, n});
      } else {
        if (!gradients.defined()) {
          gradients = cotangents.is_cpu() ? empty_vectors({count, n}) : at::empty({count, n}, cotangents.options());
        }
        flatten_gradients(found, inputs, gradients, k, match, unspecified);
      }
    }
    raise_if_interrupted();
  }
  read_unspecified(unspecified, match);
  return {gradients.defined() ? gradients : at::empty({0, n}, cotangents.options()), match};
}

std::tuple<int64_t, std::optional<at::Tensor>, GradientsMatch> first_other_vjp(
    Graph& graph, const std::vector<InputBlock>& inputs, const at::Tensor& cotangents, const std::vector<int64_t>& only,
    const std::vector<int64_t>& order, const at::Tensor& known) {
  const std::vector<int64_t> contiguous;
  const Cotangents rows("first_other_vjp", graph, inputs, cotangents, contiguous, only);
  check_rows("first_other_vjp", "known", known, inputs);
  TORCH_CHECK(
      known.size(0) == cotangents.size(0), "first_other_vjp: known must have as many rows as cotangents, ",
      cotangents.size(0), ", got ", known.size(0));
  for (const int64_t k : order) {
    TORCH_CHECK(
        0 <= k && k < cotangents.size(0), "first_other_vjp: order must hold numbers of rows, at least 0 and less than ",
        cotangents.size(0), ", got ", k);
  }
  const at::Tensor gradient = at::empty({1, known.size(1)}, known.options());
  GradientsMatch match;
  Unspecified unspecified;
  std::optional<at::Tensor> other;
  size_t position = 0;
  for (; position < order.size() && !other; ++position) {
    const int64_t k = order[position];
    const std::vector<at::Tensor> found = rows.vjp(k);
    {
      const BelowAutograd guard;
      flatten_gradients(found, inputs, gradient, 0, match, unspecified);
      if (!at::equal(gradient.select(0, 0), known.select(0, k))) {
        other = gradient;
      }
    }
    raise_if_interrupted();
  }
  read_unspecified(unspecified, match);
  return {static_cast<int64_t>(position), other, match};
}

GradientsMatch vjp_rows(
    Graph& graph, int64_t which, const std::vector<InputBlock>& inputs, int64_t first, bool imaginary,
    const at::Tensor& rows, const at::Tensor& repeated, double repeat_scale) {
  check_inputs("vjp_rows", graph, inputs);
  GraphRunner& runner = graph.of(which);
  const at::Tensor& output = graph.outputs()[which];
  check_rows("vjp_rows", "rows", rows, inputs);
  check_rows("vjp_rows", "repeated", repeated, inputs);
  const int64_t count = rows.size(0);
  TORCH_CHECK(
      first >= 0 && first <= output.numel() && count <= output.numel() - first, "vjp_rows: elements must be in [0, ",
      output.numel(), "), got ", count, " from ", first, " on");
  TORCH_CHECK(
      repeated.size(0) <= count, "vjp_rows: repeated must have at most as many rows as rows, ", count, ", got ",
      repeated.size(0));
  TORCH_CHECK(!imaginary || output.is_complex(), "vjp_rows: output must be complex if imaginary is true");
  GradientsMatch match;
  Unspecified unspecified;
  const int64_t width = coordinates_per_element(output);
  at::Tensor cotangent;
  {
    const BelowAutograd guard;
    cotangent = at::empty_like(output, {}, at::MemoryFormat::Contiguous);
  }
  const auto run = [&](int64_t i, double scale, const at::Tensor& into) {
    // All of it is written every time, because a backward may have written into it.
    set_one_hot(cotangent, (first + i) * width + (imaginary ? 1 : 0), scale);
    const std::vector<at::Tensor> gradients = runner.vjp({cotangent});
    const BelowAutograd guard;
    flatten_gradients(gradients, inputs, into, i, match, unspecified, scale);
  };
  for (int64_t i = 0; i < rows.size(0); ++i) {
    run(i, 1.0, rows);
    if (i < repeated.size(0)) {
      run(i, repeat_scale, repeated);
    }
    raise_if_interrupted();
  }
  const int64_t twice = repeated.size(0);
  match.repeats = twice == 0 || at::equal(twice == rows.size(0) ? rows : rows.narrow(0, 0, twice), repeated);
  if (!match.repeats) {
    match.repeats = true;
    for (int64_t i = 0; i < twice; ++i) {
      const auto rerun = [&](int exponent) { run(i, std::pow(repeat_scale, exponent), repeated); };
      match.repeats = is_repeated(rows.select(0, i), repeated.select(0, i), rerun) && match.repeats;
    }
  }
  read_unspecified(unspecified, match);
  return match;
}

GradientsMatch vjp_groups(
    Graph& graph, int64_t which, const std::vector<InputBlock>& inputs, const Groups& groups, const at::Tensor& values,
    int64_t n, int64_t repeated, double repeat_scale, bool expand) {
  check_inputs("vjp_groups", graph, inputs);
  GraphRunner& runner = graph.of(which);
  const at::Tensor& output = graph.outputs()[which];
  check_contiguous_float64("vjp_groups", "values", values);
  TORCH_CHECK(
      n == total(inputs), "vjp_groups: n must be the number of real coordinates of the inputs, ", total(inputs),
      ", got ", n);
  GradientsMatch match;
  Unspecified unspecified;
  const at::Tensor gradient = at::empty({1, n}, values.options());
  const at::Tensor again = at::empty({1, n}, values.options());
  const at::Tensor coordinates = groups.coordinates.to(values.device());  // once: a copy waits for the device
  const auto run = [&](const at::Tensor& rows, double scale, const at::Tensor& into) {
    at::Tensor cotangent;
    {
      const BelowAutograd guard;
      if (!output.is_complex() && rows.numel() == output.numel()) {
        // All rows: nothing to scatter.
        cotangent = expand && scale != 1.0 ? at::full({}, scale, output.options()).expand(output.sizes())
                                           : at::full(output.sizes(), scale, output.options());
      } else {
        const at::Tensor ones = at::full({rows.numel()}, scale, values.options());
        cotangent = at::zeros_like(output.detach(), {}, at::MemoryFormat::Contiguous);
        unflatten_(cotangent, at::zeros({coordinate_count(output)}, values.options()).index_copy_(0, rows, ones));
      }
    }
    const std::vector<at::Tensor> gradients = runner.vjp({cotangent});
    const BelowAutograd guard;
    flatten_gradients(gradients, inputs, into, 0, match, unspecified, scale);
  };
  for (int64_t g = 0; g < groups.count(); ++g) {
    const auto [begin, end] = groups.coordinates_of(g);
    const at::Tensor rows = coordinates.narrow(0, begin, end - begin);
    run(rows, 1.0, gradient);
    {
      const BelowAutograd guard;
      decompress_(values, gradient.select(0, 0), std::nullopt, groups.positions, groups.entries_of(g));
    }
    if (g < repeated) {
      run(rows, repeat_scale, again);
      const auto rerun = [&](int exponent) { run(rows, std::pow(repeat_scale, exponent), again); };
      if (!is_repeated(gradient, again, rerun)) {
        match.repeats = false;
        match.movement = std::max(match.movement, largest_difference(gradient, again));
      }
    }
    raise_if_interrupted();
  }
  read_unspecified(unspecified, match);
  return match;
}

}  // namespace fastgrad
