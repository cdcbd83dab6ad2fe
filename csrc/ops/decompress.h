// fastgrad::decompress_: takes entries of a sparse Jacobian from the results of column or row groups.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fastgrad {

// values[e] = compressed[positions[e]] - subtrahend[positions[e]] for each e in entries; without a
// subtrahend, compressed[positions[e]].
// values: float64, shape (nonzeros,), mutated in place only at these entries.
// compressed, subtrahend: float64, one-dimensional, of equal length. positions: int64, shape (nonzeros,).
// entries: int64, shape (count,), distinct. All contiguous; values share no memory with the rest. Entries outside
// values and positions outside compressed raise an error, after the others were written. On a device, this check
// would wait for the device. There, positions outside give NaN, and entries outside are ignored.
void decompress_(
    const at::Tensor& values, const at::Tensor& compressed, const std::optional<at::Tensor>& subtrahend,
    const at::Tensor& positions, const at::Tensor& entries);

// Argument checks shared by all kernels except Meta.
void check_decompress(
    const at::Tensor& values, const at::Tensor& compressed, const std::optional<at::Tensor>& subtrahend,
    const at::Tensor& positions, const at::Tensor& entries);

}  // namespace fastgrad
