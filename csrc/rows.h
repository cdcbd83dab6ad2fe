// Shared by the loops over evaluations and over VJPs: rows of coordinates from tensors, and Ctrl-C.
#pragma once

#include "ops/common.h"
#include "ops/flatten.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/real.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>

namespace fastgrad {

// Largest number of elements of a tensor that is copied by a plain loop rather than an operator.
constexpr int64_t small_size = 1024;

// Our own operators run below autograd: no graph, no version bumps.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

inline void raise_if_interrupted() {
  if (PyErr_CheckSignals() != 0) {
    throw pybind11::error_already_set();
  }
}

// A gradient or tangent (value), made complex or real like the tensor to which it belongs.
inline at::Tensor with_domain_of(const at::Tensor& tensor, const at::Tensor& value) {
  if (value.is_complex() == tensor.is_complex()) {
    return value;
  }
  return value.is_complex() ? at::real(value) : value.to(c10::toComplexType(value.scalar_type()));
}

// The keys of dense tensors on the CPU, and on a CUDA device.
constexpr c10::DispatchKeySet cpu_keys(c10::DispatchKey::CPU);
constexpr c10::DispatchKeySet cuda_keys(c10::DispatchKey::CUDA);

// The keys of a tensor by which its operators are dispatched, without those for gradients and autocast.
inline c10::DispatchKeySet backend_keys(const at::Tensor& tensor) {
  constexpr c10::DispatchKeySet no_matter =
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
  return tensor.key_set() - no_matter;
}

inline bool is_plain_backend(c10::DispatchKeySet keys) { return keys == cpu_keys || keys == cuda_keys; }

// Whether `tensor` is dense, on the CPU or a CUDA device, not lazy, and not of a subclass that intercepts its
// operators.
inline bool is_plain_dense(const at::Tensor& tensor) {
  return tensor.defined() && is_plain_backend(backend_keys(tensor));
}

// The same on the CPU.
inline bool is_plain_cpu(const at::Tensor& tensor) { return tensor.defined() && backend_keys(tensor) == cpu_keys; }

// Whether, in addition, its elements are contiguous and in memory.
inline bool is_plain_memory(const at::Tensor& tensor) {
  return is_plain_cpu(tensor) && tensor.is_contiguous() &&
         static_cast<size_t>(tensor.storage_offset() + tensor.numel()) * tensor.element_size() <=
             tensor.storage().nbytes();
}

// The same, and its dtype is float64.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble && is_plain_memory(tensor);
}

// Whether, in addition, its elements are few. Copying them needs no operator and no view of the target.
inline bool is_small_and_plain(const at::Tensor& tensor) { return tensor.numel() <= small_size && is_plain(tensor); }

// matrix[row, offset : offset + size], which must be within it, as a single view, because on a device each view costs
// about as much as a kernel launch. matrix: two dimensions.
inline at::Tensor row_segment(const at::Tensor& matrix, int64_t row, int64_t offset, int64_t size) {
  return at::as_strided(
      matrix, {size}, {matrix.stride(1)}, matrix.storage_offset() + row * matrix.stride(0) + offset * matrix.stride(1));
}

// Writes the `size` coordinates of `tensor`, divided by `divisor` (a power of two), to
// matrix[row, offset : offset + size], which must be within the matrix. matrix: float64, two dimensions.
inline void flatten_into(
    const at::Tensor& matrix, int64_t row, int64_t offset, int64_t size, const at::Tensor& tensor,
    double divisor = 1.0) {
  if (is_small_and_plain(tensor) && tensor.numel() == size && matrix.is_cpu() && matrix.is_contiguous()) {
    const double* const values = tensor.const_data_ptr<double>();
    double* const target = matrix.mutable_data_ptr<double>() + row * matrix.size(1) + offset;
    std::transform(values, values + size, target, [&](double value) { return value / divisor; });
    return;
  }
  const at::Tensor segment = row_segment(matrix, row, offset, size);
  flatten_(segment, tensor);
  if (divisor != 1.0) {
    segment.div_(divisor);
  }
}

// Like at::equal, but also for complex32, which at::equal does not support.
inline bool have_equal_values(const at::Tensor& left, const at::Tensor& right) {
  if (left.scalar_type() != at::kComplexHalf || right.scalar_type() != at::kComplexHalf) {
    return at::equal(left, right);
  }
  const BelowAutograd guard;
  return at::equal(real_coordinates(left), real_coordinates(right));
}

inline at::Tensor as_strided_layout(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided ? tensor : tensor.to_dense();
}

}  // namespace fastgrad
