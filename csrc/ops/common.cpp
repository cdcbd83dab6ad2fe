// Shared by the operators. The messages of failed checks name the operator, the argument and the given value.
#include "common.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/eq.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <limits>

namespace fastgrad {

at::Tensor real_coordinates(const at::Tensor& tensor) {
  const at::Tensor resolved = tensor.resolve_conj().resolve_neg();
  return (resolved.is_complex() ? at::view_as_real(resolved) : resolved).reshape({-1});
}

at::Tensor coordinate_step(const at::Tensor& value, double eps, double relative_step) {
  const at::Tensor still = at::logical_and(at::eq(value + eps, value - eps), at::isfinite(value));
  return at::where(still, at::abs(value) * relative_step, at::full_like(value, eps));
}

int64_t bytes_reached(const at::Tensor& tensor) {
  if (tensor.numel() == 0) {
    return 0;
  }
  int64_t elements = tensor.storage_offset() + 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  }
  return elements * static_cast<int64_t>(tensor.element_size());
}

void check_storage(const char* op, const char* name, const at::Tensor& tensor) {
  if (!tensor.has_storage() || tensor.numel() == 0) {
    return;
  }
  TORCH_CHECK(
      bytes_reached(tensor) <= static_cast<int64_t>(tensor.storage().nbytes()), op, ": ", name, " needs ",
      bytes_reached(tensor), " bytes of storage, which was freed or shrunk to ", tensor.storage().nbytes());
}

void check_differentiable(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.layout() == at::kStrided && (tensor.is_floating_point() || tensor.is_complex()), op, ": ", name,
      " must be a strided tensor of floating or complex dtype, got ", tensor.layout(), " ", tensor.scalar_type());
  check_storage(op, name, tensor);
}

void check_float64(const char* op, const char* name, const at::Tensor& tensor, int64_t dim) {
  TORCH_CHECK(
      tensor.layout() == at::kStrided && tensor.scalar_type() == at::kDouble && tensor.dim() == dim, op, ": ", name,
      " must be a float64 tensor with ", dim, " dimensions, got ", tensor.scalar_type(), " with ", tensor.dim(), ", ",
      tensor.layout());
  check_storage(op, name, tensor);
}

void check_contiguous_float64(const char* op, const char* name, const at::Tensor& tensor) {
  check_float64(op, name, tensor, 1);
  TORCH_CHECK(tensor.is_contiguous(), op, ": ", name, " must be contiguous, got stride ", tensor.stride(0));
}

void check_indices(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.layout() == at::kStrided && tensor.scalar_type() == at::kLong && tensor.dim() == 1 &&
          tensor.is_contiguous(),
      op, ": ", name, " must be a contiguous int64 tensor with one dimension, got ", tensor.scalar_type(), " with ",
      tensor.dim(), ", ", tensor.layout());
  check_storage(op, name, tensor);
}

void check_range(const char* op, const char* name, const at::Tensor& indices, int64_t size) {
  TORCH_CHECK(size >= 0, op, ": the bound of ", name, " must be >= 0, got ", size);
  const auto* index = indices.const_data_ptr<int64_t>();
  int64_t least = std::numeric_limits<int64_t>::max();
  int64_t most = -1;
  for (int64_t k = 0; k < indices.numel(); ++k) {
    least = std::min(least, index[k]);
    most = std::max(most, index[k]);
  }
  TORCH_CHECK(least >= 0 && most < size, op, ": ", name, " must be in [0, ", size, "), got ", least < 0 ? least : most);
}

void check_written(const char* op, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(
      at::has_internal_overlap(tensor) != at::MemOverlap::Yes, op, ": ", name,
      " must have a separate place in memory for each element, because it is written, got ", tensor.sizes(),
      " with strides ", tensor.strides());
}

void check_apart(
    const char* op, const char* out_name, const at::Tensor& out, const char* name, const at::Tensor& tensor) {
  const at::MemOverlapStatus status = at::get_overlap_status(out, tensor);
  TORCH_CHECK(
      status != at::MemOverlapStatus::Full && status != at::MemOverlapStatus::Partial, op, ": ", out_name,
      ", which is written, must not share memory with ", name, ", got overlapping tensors");
}

void check_same_or_apart(
    const char* op, const char* out_name, const at::Tensor& out, const char* name, const at::Tensor& tensor) {
  TORCH_CHECK(
      at::get_overlap_status(out, tensor) != at::MemOverlapStatus::Partial, op, ": ", out_name,
      ", which is written, must share all of its memory with ", name, " or none, got tensors that overlap in part");
}

void check_origin(const char* op, const at::Tensor& x, const at::Tensor& origin, const char* name) {
  check_differentiable(op, name, x);
  check_differentiable(op, "origin", origin);
  TORCH_CHECK(
      origin.scalar_type() == x.scalar_type() && origin.sizes() == x.sizes() && origin.is_contiguous(), op,
      ": origin must be a contiguous snapshot of ", name, ", ", x.scalar_type(), x.sizes(), ", got ",
      origin.scalar_type(), origin.sizes());
  check_written(op, name, x);
  check_same_or_apart(op, name, x, "origin", origin);
}

}  // namespace fastgrad
