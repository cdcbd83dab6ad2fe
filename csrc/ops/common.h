// Shared by the operators and their callers: argument checks and real coordinates of strided tensors.
//
// The real coordinates of a tensor are its elements in C order of its logical indices, one
// coordinate for a real element and two, (re, im), for a complex one.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/Dispatch.h>
#include <c10/core/ScalarType.h>

#include <cstdint>

namespace fastgrad {

// For a loop that is bound by arithmetic: also compiled for AVX2, and the loader chooses what the CPU supports. Without
// FMA, so that both round alike.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__)
#define FASTGRAD_AVX2_TOO __attribute__((target_clones("avx2", "default")))
#else
#define FASTGRAD_AVX2_TOO
#endif

// With fewer coordinates than this, a second thread is not worth its cost.
constexpr int64_t grain_size = 16384;

inline int64_t coordinates_per_element(const at::Tensor& tensor) { return tensor.is_complex() ? 2 : 1; }

inline int64_t coordinate_count(const at::Tensor& tensor) { return tensor.numel() * coordinates_per_element(tensor); }

// `tensor` as a C-contiguous one-dimensional tensor of its real coordinates, in its own dtype: a
// view where the layout allows it, a copy elsewhere. Call it without grad mode, or autograd records its operations.
at::Tensor real_coordinates(const at::Tensor& tensor);

// kernels/difference.h's coordinate_step in plain ATen, for a zero-dimensional real `value`.
at::Tensor coordinate_step(const at::Tensor& value, double eps, double relative_step);

// The number of bytes from the beginning of a strided tensor's storage to the end of its last element in memory.
int64_t bytes_reached(const at::Tensor& tensor);

// Rejects a tensor whose storage was freed or shrunk underneath it. The checks of an argument's kind below include
// this.
void check_storage(const char* op, const char* name, const at::Tensor& tensor);

// Rejects an argument that is not a strided tensor of floating or complex dtype.
void check_differentiable(const char* op, const char* name, const at::Tensor& tensor);

// Rejects an argument that is not a strided float64 tensor with `dim` dimensions.
void check_float64(const char* op, const char* name, const at::Tensor& tensor, int64_t dim);

// Rejects an argument that is not a contiguous float64 tensor with one dimension.
void check_contiguous_float64(const char* op, const char* name, const at::Tensor& tensor);

// Rejects an argument that is not a contiguous int64 tensor with one dimension.
void check_indices(const char* op, const char* name, const at::Tensor& tensor);

// Rejects indices, int64 on the CPU, outside [0, size).
void check_range(const char* op, const char* name, const at::Tensor& indices, int64_t size);

// Rejects an argument to be written whose strides put several elements at one place in memory.
void check_written(const char* op, const char* name, const at::Tensor& tensor);

// Rejects an argument to be written, `out`, that shares memory with another one, which would be read after the write.
void check_apart(
    const char* op, const char* out_name, const at::Tensor& out, const char* name, const at::Tensor& tensor);

// The same if each element is read before its place is written: both may be the same memory, but may not overlap in
// part.
void check_same_or_apart(
    const char* op, const char* out_name, const at::Tensor& out, const char* name, const at::Tensor& tensor);

// Rejects x if it cannot be written, and origin if it is not a C-contiguous snapshot of x. name: of x, in messages.
void check_origin(const char* op, const at::Tensor& x, const at::Tensor& origin, const char* name = "x");

// Whether a Python subclass intercepts the operators on `tensor`: it knows the operators of ATen, but not fastgrad's.
inline bool is_wrapper_subclass(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->is_python_dispatch(); }

// Element offset in memory of the element with flat index `index` of a strided tensor.
inline int64_t element_offset(const at::Tensor& tensor, int64_t index) {
  if (tensor.is_contiguous()) {
    return index;
  }
  int64_t offset = 0;
  for (int64_t dim = tensor.dim() - 1; dim >= 0; --dim) {
    offset += index % tensor.size(dim) * tensor.stride(dim);
    index /= tensor.size(dim);
  }
  return offset;
}

// Offset in memory, in real numbers, of a real coordinate of a strided tensor.
inline int64_t coordinate_offset(const at::Tensor& tensor, int64_t coordinate) {
  const int64_t width = coordinates_per_element(tensor);
  return element_offset(tensor, coordinate / width) * width + coordinate % width;
}

}  // namespace fastgrad

// Registers the plain ATen kernel of an operator that writes into its arguments, for every device that has no kernel of
// its own and for lazily conjugated or negated arguments: torch's own fallback for these corrupts its stack if an
// operator returns nothing.
#define FASTGRAD_COMPOSITE(NAME, KERNEL)                                                           \
  TORCH_LIBRARY_IMPL(fastgrad, CompositeExplicitAutograd, library) { library.impl(NAME, KERNEL); } \
  TORCH_LIBRARY_IMPL(fastgrad, Conjugate, library) { library.impl(NAME, KERNEL); }                 \
  TORCH_LIBRARY_IMPL(fastgrad, Negative, library) { library.impl(NAME, KERNEL); }

// Runs the lambda with `real_t` bound to the real type of a floating or complex dtype.
#define FASTGRAD_DISPATCH_REAL(DTYPE, NAME, ...)                                                           \
  AT_DISPATCH_SWITCH(                                                                                      \
      c10::toRealValueType(DTYPE), NAME,                                                                   \
      AT_PRIVATE_CASE_TYPE_USING_HINT(at::kDouble, real_t, __VA_ARGS__) AT_PRIVATE_CASE_TYPE_USING_HINT(   \
          at::kFloat, real_t, __VA_ARGS__) AT_PRIVATE_CASE_TYPE_USING_HINT(at::kHalf, real_t, __VA_ARGS__) \
          AT_PRIVATE_CASE_TYPE_USING_HINT(at::kBFloat16, real_t, __VA_ARGS__))
