// fastgrad::project_entries_: sums of the entries of a sparse Jacobian along a vector.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace fastgrad {

// fastgrad::project_entries_(sums, squares, vector, sources, targets, entries).
// sums[targets[e]] += vector[sources[e]] * entries[e] for each e, and the squares of these terms to squares.
// J u: sources are the columns of the entries, targets their rows; v^T J: the other way round.
// sums, squares: float64, one-dimensional, of equal length, mutated in place. vector: float64, one-dimensional, any
// length. sources, targets: int64, entries: float64, shape (nonzeros,). All contiguous; sums and squares share no
// memory with each other or the rest. Sources and targets that are out of range raise an error; the terms of the others
// have been added by then. On a device, such a check would wait for the device. There, a source out of range adds NaN,
// and a target out of range adds nothing.
//
// Argument checks shared by all kernels except Meta.
void check_project_entries(
    const at::Tensor& sums, const std::optional<at::Tensor>& squares, const at::Tensor& vector,
    const at::Tensor& sources, const at::Tensor& targets, const at::Tensor& entries);

}  // namespace fastgrad
