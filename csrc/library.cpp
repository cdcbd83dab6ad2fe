// The schemas of every operator of the fastgrad library; ops/<op>.h holds each contract.
#include <torch/library.h>

TORCH_LIBRARY(fastgrad, library) {
  library.def(
      "perturb_coordinate_(Tensor(a!) x, Tensor origin, int coordinate, int sign, float eps, float relative_step, "
      "int? restored=None) -> ()");
  library.def(
      "perturb_coordinates_(Tensor(a!) values, Tensor origin, Tensor coordinates, int sign, float eps, "
      "float relative_step, Tensor? restored=None) -> ()");
  library.def("displace_(Tensor(a!) x, Tensor origin, Tensor displacement, float scale) -> ()");
  library.def("direction_(Tensor(a!) out, int seed, int stream, int first, bool halved) -> ()");
  library.def("flatten_(Tensor(a!) out, Tensor tensor) -> ()");
  library.def("unflatten_(Tensor(a!) tensor, Tensor coordinates) -> ()");
  library.def(
      "central_difference_(Tensor(a!) column, Tensor minus, Tensor origin, int coordinate, float eps, "
      "float relative_step) -> ()");
  library.def(
      "realize_(Tensor(a!) displacement, Tensor(b!) realized, Tensor origin, int seed, int stream, int first, float "
      "eps, "
      "float relative_step) -> ()");
  library.def(
      "decompress_(Tensor(a!) values, Tensor compressed, Tensor? subtrahend, Tensor positions, Tensor entries) -> ()");
  library.def("dots(Tensor rows, Tensor vector) -> Tensor");
  library.def(
      "richardson_(Tensor(a!) derivative, Tensor(b!) noise, Tensor base, Tensor plus, Tensor minus, Tensor half_plus, "
      "Tensor half_minus, float eps, float ulp) -> ()");
  library.def(
      "compare(Tensor analytical, Tensor numerical, float atol, float rtol, bool complex_entries, bool equal_nan) "
      "-> Tensor");
  library.def(
      "project_rows_(Tensor(a!) sums, Tensor(b!) squares, Tensor cotangents, Tensor rows, int first_row, int row_step, "
      "int first_column) -> ()");
  library.def(
      "project_entries_(Tensor(a!) sums, Tensor(b!)? squares, Tensor vector, Tensor sources, Tensor targets, "
      "Tensor entries) -> ()");
}
