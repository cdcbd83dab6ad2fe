// Reads the frames of another thread.
#include "running_call.h"

#include <algorithm>
#include <string_view>

namespace fastgrad {

namespace py = pybind11;

namespace {

// While it exists, no garbage collection runs: new frame objects may start one, which may run Python code.
class WithoutCollection {
 public:
  WithoutCollection() : was_enabled_(PyGC_Disable() != 0) {}
  WithoutCollection(const WithoutCollection&) = delete;
  WithoutCollection& operator=(const WithoutCollection&) = delete;
  ~WithoutCollection() {
    if (was_enabled_) {
      PyGC_Enable();
    }
  }

 private:
  const bool was_enabled_;
};

py::object frame_of(unsigned long thread) {
  PyThreadState* state = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
  while (state != nullptr && state->thread_id != thread) {
    state = PyThreadState_Next(state);
  }
  return py::reinterpret_steal<py::object>(
      state == nullptr ? nullptr : reinterpret_cast<PyObject*>(PyThreadState_GetFrame(state)));
}

// The file of a frame's code; empty if its name is no text.
std::string file_of(PyFrameObject* frame) {
  const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  const char* const name = PyUnicode_AsUTF8(code.attr("co_filename").ptr());
  if (name == nullptr) {
    PyErr_Clear();
  }
  return name == nullptr ? "" : name;
}

bool starts_with(std::string_view text, std::string_view part) { return text.substr(0, part.size()) == part; }

bool ends_with(std::string_view text, std::string_view part) {
  return text.size() >= part.size() && text.substr(text.size() - part.size()) == part;
}

}  // namespace

py::object running_call(unsigned long thread, const std::string& package, const std::vector<std::string>& excluded) {
  const WithoutCollection guard;
  py::object found = py::none();
  for (py::object frame = frame_of(thread); frame;) {
    auto* const raw = reinterpret_cast<PyFrameObject*>(frame.ptr());
    const std::string file = file_of(raw);
    if (starts_with(file, package)) {
      break;
    }
    if (std::any_of(excluded.begin(), excluded.end(), [&](const std::string& one) { return ends_with(file, one); })) {
      return py::none();
    }
    found = frame;
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(raw)));
  }
  return found;
}

}  // namespace fastgrad
