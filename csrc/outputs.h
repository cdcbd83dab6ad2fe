// Shared by the loops over evaluations: testing what func returned, and undoing the changes of a loop.
#pragma once

#include "blocks.h"

#include "ops/common.h"
#include "rows.h"

#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <utility>
#include <vector>

namespace fastgrad {

// Runs an action at the end of its block, also after an exception.
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
      // The memory of an input was freed or replaced. A destructor cannot report this; the last restore() does.
    }
  }

 private:
  Action action_;
};

inline void check_columns(const char* what, const at::Tensor& columns, const std::vector<OutputSpec>& outputs) {
  check_float64(what, "columns", columns, 2);
  TORCH_CHECK(
      columns.size(1) == total(outputs), what, ": columns must have ", total(outputs),
      " elements each, one for each real coordinate of the outputs, got ", columns.size(1));
  check_written(what, "columns", columns);
}

// Calls visit(number, tensor, offset, size) with each expected output that func returned; offset and size give its
// coordinates. Stops at the first output that is not as expected, and returns its number and what func returned
// instead; otherwise returns nothing.
template <typename Visit>
std::optional<std::pair<int64_t, pybind11::object>> visit_outputs(
    const pybind11::object& result, const std::vector<OutputSpec>& outputs, const Visit& visit) {
  const BelowAutograd guard;
  int64_t offset = 0;
  for (size_t o = 0; o < outputs.size(); ++o) {
    PyObject* const object = output_at(result.ptr(), outputs[o].position);
    if (!looks_like(object, outputs[o].like)) {
      return std::pair(
          static_cast<int64_t>(o), object ? pybind11::reinterpret_borrow<pybind11::object>(object) : pybind11::none());
    }
    const int64_t size = coordinate_count(outputs[o].like);
    visit(o, THPVariable_Unpack(object), offset, size);
    offset += size;
  }
  return std::nullopt;
}

}  // namespace fastgrad
