// Memory for large vectors.
#pragma once

#include <ATen/core/Tensor.h>

namespace fastgrad {

// An uninitialized float64 tensor on the CPU. Large ones are in huge pages where the system offers them: faults of
// ordinary pages (4 KiB each) would take longer than all passes over a vector.
at::Tensor empty_vectors(at::IntArrayRef sizes);

}  // namespace fastgrad
