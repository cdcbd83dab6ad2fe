// Included before each source: the operators' checks and helpers, compiled again without their registrations.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/Tensor.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#undef TORCH_LIBRARY_IMPL
#define TORCH_LIBRARY_IMPL(name, key, library) \
  [[maybe_unused]] static void C10_ANONYMOUS_VARIABLE(unregistered_)([[maybe_unused]] torch::Library & library)
