// What the operators share; a message names the op, the argument and what was given.
#include "common.h"

#include <ATen/ops/abs.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <ATen/TensorOperators.h>

namespace fastgrad {

at::Tensor real_coordinates(const at::Tensor& tensor) {
  const at::Tensor resolved = tensor.resolve_conj().resolve_neg();
  return (resolved.is_complex() ? at::view_as_real(resolved) : resolved).reshape({-1});
}

at::Tensor coordinate_step(const at::Tensor& value, double eps, double relative_step) {
  const at::Tensor still = at::logical_and(at::eq(value + eps, value - eps), at::isfinite(value));
  return at::where(still, at::abs(value) * relative_step, at::full_like(value, eps));
}

void check_differentiable(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.layout() == at::kStrided && (tensor.is_floating_point() || tensor.is_complex()), op, ": ", name,
      " must be a strided tensor of floating or complex dtype, got ", tensor.layout(), " ", tensor.scalar_type());
  if (!tensor.has_storage() || tensor.numel() == 0) {
    return;
  }
  int64_t elements = tensor.storage_offset() + 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  TORCH_CHECK(
      elements * static_cast<int64_t>(tensor.element_size()) <= static_cast<int64_t>(tensor.storage().nbytes()), op,
      ": ", name, " needs ", elements, " elements of storage, which was freed or shrunk to ", tensor.storage().nbytes(),
      " bytes");
}

void check_float64(const char* op, const char* name, const at::Tensor& tensor, int64_t dim) {
  TORCH_CHECK(
      tensor.scalar_type() == at::kDouble && tensor.dim() == dim, op, ": ", name, " must be a float64 tensor with ",
      dim, " dimensions, got ", tensor.scalar_type(), " with ", tensor.dim());
}

void check_contiguous_float64(const char* op, const char* name, const at::Tensor& tensor) {
  check_float64(op, name, tensor, 1);
  TORCH_CHECK(tensor.is_contiguous(), op, ": ", name, " must be contiguous, got stride ", tensor.stride(0));
}

void check_indices(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.scalar_type() == at::kLong && tensor.dim() == 1 && tensor.is_contiguous(), op, ": ", name,
      " must be a contiguous int64 tensor with one dimension, got ", tensor.scalar_type(), " with ", tensor.dim());
}

void check_origin(const char* op, const at::Tensor& x, const at::Tensor& origin, const char* name) {
  check_differentiable(op, name, x);
  TORCH_CHECK(
      origin.scalar_type() == x.scalar_type() && origin.sizes() == x.sizes() && origin.is_contiguous(), op,
      ": origin must be a contiguous snapshot of ", name, ", ", x.scalar_type(), x.sizes(), ", got ",
      origin.scalar_type(), origin.sizes());
}

}  // namespace fastgrad
