// The compiled module fastgrad._C: functions that call Python, run the autograd engine or compute with sparsity
// patterns, and some operators, for calls without the overhead of torch.ops.
#include "coloring.h"
#include "evaluator.h"
#include "graph_nodes.h"
#include "kept_history.h"
#include "kept_tensor.h"
#include "memory.h"
#include "ops/compare.h"
#include "ops/direction.h"
#include "ops/flatten.h"
#include "ops/project_rows.h"
#include "running_call.h"
#include "small_problem.h"
#include "unrecorded_backward.h"
#include "vjp.h"
#include "whole_backward.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <limits>

namespace py = pybind11;

namespace {

std::vector<at::Tensor> vjp_of_all(fastgrad::Graph& graph, const std::vector<at::Tensor>& cotangents) {
  return graph.all().vjp(cotangents);
}

std::vector<at::Tensor> vjp_of_one(fastgrad::Graph& graph, int64_t output, const at::Tensor& cotangent) {
  return graph.of(output).vjp({cotangent});
}

std::vector<at::Tensor> vjp_of_zeros(fastgrad::Graph& graph) { return graph.all().vjp_of_zeros(); }

std::vector<at::Tensor> vjp_of_undefined(fastgrad::Graph& graph, const std::optional<int64_t>& one) {
  return graph.all().vjp_of_undefined(one);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  using fastgrad::Derivatives;
  using fastgrad::Evaluator;
  using fastgrad::Graph;
  using fastgrad::Groups;
  using fastgrad::InputBlock;
  using fastgrad::KeptHistory;
  using fastgrad::KeptTensor;
  using fastgrad::OutputSpec;
  using fastgrad::RandomDirections;
  using fastgrad::SmallProblem;
  using fastgrad::UnrecordedBackward;

  py::class_<InputBlock>(module, "InputBlock")
      .def(
          py::init<
              const at::Tensor&, int64_t, double, const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
              const std::optional<at::Tensor>&>(),
          py::arg("argument"), py::arg("first"), py::arg("relative_step"), py::arg("stand_in") = py::none(),
          py::arg("values") = py::none(), py::arg("elements") = py::none());
  py::class_<OutputSpec>(module, "OutputSpec")
      .def(py::init<int64_t, at::Tensor>(), py::arg("position"), py::arg("like"));
  py::class_<Groups>(module, "Groups")
      .def(
          py::init<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>(), py::arg("coordinates"),
          py::arg("starts"), py::arg("entries"), py::arg("entry_starts"), py::arg("positions"))
      .def("part", torch::wrap_pybind_function(&Groups::part))
      .def_readonly("coordinates", &Groups::coordinates)
      .def_readonly("starts", &Groups::starts)
      .def_readonly("entries", &Groups::entries)
      .def_readonly("entry_starts", &Groups::entry_starts)
      .def_readonly("positions", &Groups::positions);
  py::class_<RandomDirections>(module, "RandomDirections")
      .def(
          py::init<int64_t, std::vector<int64_t>, std::vector<int64_t>, double, double, std::vector<int64_t>>(),
          py::arg("seed"), py::arg("streams"), py::arg("points"), py::arg("step"), py::arg("relative"),
          py::arg("parts") = std::vector<int64_t>{});
  py::class_<Derivatives>(module, "Derivatives")
      .def_readonly("directions", &Derivatives::directions)
      .def_readonly("derivatives", &Derivatives::derivatives)
      .def_readonly("noise", &Derivatives::noise)
      .def_readonly("sizes", &Derivatives::sizes)
      .def_readonly("curvature", &Derivatives::curvature)
      .def_readonly("is_complete", &Derivatives::is_complete)
      .def_readonly("measures_noise", &Derivatives::measures_noise)
      .def_readonly("step", &Derivatives::step);
  py::class_<Evaluator, std::shared_ptr<Evaluator>>(module, "Evaluator")
      .def(py::init<py::object, py::tuple, std::vector<InputBlock>>())
      .def("coordinates", torch::wrap_pybind_function(&Evaluator::coordinates))
      .def("coordinate_widths", torch::wrap_pybind_function(&Evaluator::coordinate_widths))
      .def("realized_widths", torch::wrap_pybind_function(&Evaluator::realized_widths))
      .def("evaluate", torch::wrap_pybind_function(&Evaluator::evaluate))
      .def("realize", torch::wrap_pybind_function(&Evaluator::realize))
      .def("values_along", torch::wrap_pybind_function(&Evaluator::values_along))
      .def("differences_along", torch::wrap_pybind_function(&Evaluator::differences_along))
      .def("screening_derivatives", torch::wrap_pybind_function(&Evaluator::screening_derivatives))
      .def("difference_columns", torch::wrap_pybind_function(&Evaluator::difference_columns))
      .def("difference_groups", torch::wrap_pybind_function(&Evaluator::difference_groups))
      .def("inputs_at", torch::wrap_pybind_function(&Evaluator::inputs_at))
      .def("evaluate_at", torch::wrap_pybind_function(&Evaluator::evaluate_at))
      .def("tangent_columns", torch::wrap_pybind_function(&Evaluator::tangent_columns))
      .def("jvps", torch::wrap_pybind_function(&Evaluator::jvps))
      .def("inputs_changed", torch::wrap_pybind_function(&Evaluator::inputs_changed))
      .def("restore", torch::wrap_pybind_function(&Evaluator::restore))
      .def_property_readonly("evaluations", &Evaluator::evaluations)
      .def_property_readonly("modified_tangent", &Evaluator::modified_tangent)
      .def_property("mutates_inputs", &Evaluator::mutates_inputs, &Evaluator::set_mutates_inputs)
      .def_property("records_differences", &Evaluator::records_differences, &Evaluator::set_records_differences);
  py::class_<Graph, std::shared_ptr<Graph>>(module, "Graph")
      .def(py::init<std::vector<at::Tensor>, std::vector<at::Tensor>>(), py::arg("outputs"), py::arg("inputs"))
      .def("vjp", torch::wrap_pybind_function(&vjp_of_all))
      .def_property_readonly("modified_output", &Graph::modified_output)
      .def_property_readonly("modified_cotangent", &Graph::modified_cotangent)
      .def_property_readonly("inputs", &Graph::inputs)
      .def_property_readonly("outputs", &Graph::outputs)
      .def("vjp_of_one", torch::wrap_pybind_function(&vjp_of_one))
      .def_property_readonly("bypasses_engine", [](fastgrad::Graph& graph) { return graph.all().bypasses_engine(); })
      .def("vjp_of_zeros", torch::wrap_pybind_function(&vjp_of_zeros))
      .def("vjp_of_undefined", torch::wrap_pybind_function(&vjp_of_undefined));
  py::class_<UnrecordedBackward>(module, "UnrecordedBackward")
      .def(
          py::init<py::object, py::object, int64_t, std::vector<int64_t>, std::vector<int64_t>, bool>(),
          py::arg("func"), py::arg("refuse"), py::arg("count"), py::arg("inputs"), py::arg("grad_outputs"),
          py::arg("record"))
      .def("call", torch::wrap_pybind_function(&UnrecordedBackward::call))
      .def("forget", torch::wrap_pybind_function(&UnrecordedBackward::forget))
      .def("stop_reusing", torch::wrap_pybind_function(&UnrecordedBackward::stop_reusing))
      .def_property_readonly("keeps_graph", &UnrecordedBackward::keeps_graph)
      .def_property_readonly("movement", &UnrecordedBackward::movement);
  py::class_<KeptHistory>(module, "KeptHistory")
      .def(py::init<const at::Tensor&>(), py::arg("tensor"))
      .def("restore", torch::wrap_pybind_function(py::overload_cast<>(&KeptHistory::restore, py::const_)));
  py::class_<KeptTensor, std::shared_ptr<KeptTensor>>(module, "KeptTensor")
      .def_static("keep", torch::wrap_pybind_function(&KeptTensor::keep))
      .def("restore", torch::wrap_pybind_function(&KeptTensor::restore));
  py::class_<SmallProblem, std::shared_ptr<SmallProblem>>(module, "SmallProblem")
      .def_static("trace", torch::wrap_pybind_function(&SmallProblem::trace))
      .def_property_readonly("is_plain", &SmallProblem::is_plain)
      .def_property_readonly("evaluator", &SmallProblem::evaluator)
      .def_property_readonly("blocks", &SmallProblem::blocks)
      .def_property_readonly("result", &SmallProblem::result)
      .def_property_readonly("seconds", &SmallProblem::seconds)
      .def_property_readonly("working_seconds", &SmallProblem::working_seconds)
      .def_property_readonly("n", &SmallProblem::n)
      .def_property_readonly("m", &SmallProblem::m)
      .def_property_readonly("nodes", &SmallProblem::nodes)
      .def_property_readonly("records_differences", &SmallProblem::records_differences)
      .def_property_readonly("custom_nodes", &SmallProblem::custom_nodes)
      .def_property_readonly("is_custom", &SmallProblem::is_custom)
      .def_property_readonly("became_custom", &SmallProblem::became_custom)
      .def_property_readonly("vectorizes", [](const SmallProblem& problem) { return !problem.is_custom(); })
      .def_property_readonly_static("device", [](const py::object&) { return at::Device(at::kCPU); })
      .def_property_readonly("tensor_device", &SmallProblem::tensor_device)
      .def_property_readonly_static(
          "unit_roundoff", [](const py::object&) { return std::numeric_limits<double>::epsilon() / 2; })
      .def_property_readonly("inputs", &SmallProblem::inputs)
      .def_property_readonly("outputs", &SmallProblem::outputs)
      .def_property_readonly("graph", &SmallProblem::shared_graph)
      .def("release", &SmallProblem::release)
      .def("record_again", torch::wrap_pybind_function(&SmallProblem::record_again))
      .def("repeats", torch::wrap_pybind_function(&SmallProblem::repeats))
      .def("first_other_vjp", torch::wrap_pybind_function(&SmallProblem::first_other_vjp))
      .def("whole_backward", torch::wrap_pybind_function(&SmallProblem::whole_backward))
      .def("completed", torch::wrap_pybind_function(&SmallProblem::completed))
      .def("base", torch::wrap_pybind_function(&SmallProblem::base))
      .def("outputs_of_graph", torch::wrap_pybind_function(&SmallProblem::outputs_of_graph))
      .def("difference_columns", torch::wrap_pybind_function(&SmallProblem::difference_columns))
      .def("vectorized_columns", torch::wrap_pybind_function(&SmallProblem::vectorized_columns))
      .def("values_of", torch::wrap_pybind_function(&SmallProblem::values_of))
      .def("differences_along", torch::wrap_pybind_function(&SmallProblem::differences_along))
      .def("difference_entries", torch::wrap_pybind_function(&SmallProblem::difference_entries))
      .def("values_at", torch::wrap_pybind_function(&SmallProblem::values_at))
      .def("errors", torch::wrap_pybind_function(&SmallProblem::errors))
      .def("vjps", torch::wrap_pybind_function(&SmallProblem::vjps))
      .def("are_zeros_zero", torch::wrap_pybind_function(&SmallProblem::are_zeros_zero))
      .def("screening_derivatives", torch::wrap_pybind_function(&SmallProblem::screening_derivatives))
      .def("jvps", torch::wrap_pybind_function(&SmallProblem::jvps))
      .def("tangents", torch::wrap_pybind_function(&SmallProblem::tangents))
      .def("batched_tangents", torch::wrap_pybind_function(&SmallProblem::batched_tangents))
      .def("tangent_errors", torch::wrap_pybind_function(&SmallProblem::tangent_errors))
      .def("negates_unrecorded", torch::wrap_pybind_function(&SmallProblem::negates_unrecorded));
  py::class_<fastgrad::UnspecifiedEntry>(module, "UnspecifiedEntry")
      .def_readonly("row", &fastgrad::UnspecifiedEntry::row)
      .def_readonly("element", &fastgrad::UnspecifiedEntry::element)
      .def_readonly("value", &fastgrad::UnspecifiedEntry::value);
  py::class_<fastgrad::GradientsMatch>(module, "GradientsMatch")
      .def_readonly("unspecified", &fastgrad::GradientsMatch::unspecified)
      .def_readonly("dtypes", &fastgrad::GradientsMatch::dtypes)
      .def_readonly("sizes", &fastgrad::GradientsMatch::sizes)
      .def_readonly("strided", &fastgrad::GradientsMatch::strided)
      .def_readonly("repeats", &fastgrad::GradientsMatch::repeats)
      .def_readonly("movement", &fastgrad::GradientsMatch::movement);
  py::class_<fastgrad::WholeBackward::Rows>(module, "Rows")
      .def_readonly("rows", &fastgrad::WholeBackward::Rows::rows)
      .def_readonly("repeated", &fastgrad::WholeBackward::Rows::repeated)
      .def_readonly("match", &fastgrad::WholeBackward::Rows::match);
  py::class_<fastgrad::WholeBackward>(module, "WholeBackward")
      .def_readonly("parts", &fastgrad::WholeBackward::parts)
      .def_readonly("vectorized", &fastgrad::WholeBackward::vectorized)
      .def_readonly("products", &fastgrad::WholeBackward::products)
      .def_readonly("brief", &fastgrad::WholeBackward::brief)
      .def_readonly("movement", &fastgrad::WholeBackward::movement)
      .def_readonly("add_up", &fastgrad::WholeBackward::add_up)
      .def_readonly("zeros", &fastgrad::WholeBackward::zeros)
      .def_readonly("are_zero", &fastgrad::WholeBackward::are_zero)
      .def_readonly("vjps", &fastgrad::WholeBackward::vjps)
      .def("to", torch::wrap_pybind_function(&fastgrad::WholeBackward::to));
  module.def("bucket", torch::wrap_pybind_function_no_gil(&fastgrad::bucket), py::arg("keys"), py::arg("count"));
  module.def(
      "color", torch::wrap_pybind_function_no_gil(&fastgrad::color), py::arg("starts"), py::arg("members"),
      py::arg("targets"));
  module.def(
      "star_color", torch::wrap_pybind_function_no_gil(&fastgrad::star_color), py::arg("starts"), py::arg("members"),
      py::arg("most"));
  module.def(
      "transpose", torch::wrap_pybind_function_no_gil(&fastgrad::transpose), py::arg("starts"), py::arg("members"),
      py::arg("targets"));
  module.def("compare", torch::wrap_pybind_function_no_gil(&fastgrad::compare));
  module.def("direction_", torch::wrap_pybind_function_no_gil(&fastgrad::direction_));
  module.def("check_memory", torch::wrap_pybind_function(&fastgrad::check_memory));
  module.def("flattened", torch::wrap_pybind_function(&fastgrad::flattened));
  module.def("flatten_", torch::wrap_pybind_function(&fastgrad::flatten_));
  module.def("at_dual_level", torch::wrap_pybind_function(&fastgrad::at_dual_level));
  module.def("backward_streams", torch::wrap_pybind_function(&fastgrad::backward_streams));
  module.def("is_plain_zero", torch::wrap_pybind_function(&fastgrad::is_plain_zero));
  module.def("explained_sums", torch::wrap_pybind_function(&fastgrad::explained_sums));
  module.def("empty_vectors", torch::wrap_pybind_function(&fastgrad::empty_vectors));
  module.def("largest_residuals", torch::wrap_pybind_function(&fastgrad::largest_residuals));
  module.def("largest_errors", torch::wrap_pybind_function(&fastgrad::largest_errors));
  module.def("project_rows_", torch::wrap_pybind_function_no_gil(&fastgrad::project_rows_));
  module.def("running_call", &fastgrad::running_call, py::arg("thread"), py::arg("package"), py::arg("excluded"));
  module.def("count_nodes", torch::wrap_pybind_function(&fastgrad::count_nodes));
  module.def("runs_no_custom_code", torch::wrap_pybind_function(&fastgrad::runs_no_custom_code));
  module.def("are_close", torch::wrap_pybind_function(&fastgrad::are_close));
  module.def("vectorized_vjp", torch::wrap_pybind_function(&fastgrad::vectorized_vjp));
  module.def("vjp", torch::wrap_pybind_function(&fastgrad::vjp));
  module.def(
      "vjp_coordinates", torch::wrap_pybind_function(&fastgrad::vjp_coordinates), py::arg("graph"), py::arg("inputs"),
      py::arg("cotangents"), py::arg("layouts") = std::vector<int64_t>(), py::arg("only") = std::vector<int64_t>());
  module.def("first_other_vjp", torch::wrap_pybind_function(&fastgrad::first_other_vjp));
  module.def("vjp_groups", torch::wrap_pybind_function(&fastgrad::vjp_groups));
  module.def("vjp_rows", torch::wrap_pybind_function(&fastgrad::vjp_rows));
  module.def("whole_backward", torch::wrap_pybind_function(&fastgrad::whole_backward));
}
