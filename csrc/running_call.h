// The call of a caller's function that another thread runs.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

namespace fastgrad {

// The frame of the outermost function above all files in `package` that a thread runs; None if it runs none, or if a
// function whose file ends with one of `excluded` is among them. In Python, the thread could change its frames while
// they are read, which may crash the process. Here, the reading thread does not give up the interpreter in between.
pybind11::object running_call(
    unsigned long thread, const std::string& package, const std::vector<std::string>& excluded);

}  // namespace fastgrad
