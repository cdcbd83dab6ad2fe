// Sparsity patterns: their transpose, distance-2 coloring of one side, star coloring of a symmetric one, and
// sorting by color.
//
// A pattern joins vertices to targets, in CSR form: starts, int64 of shape (vertices + 1,), and
// members, int64 of shape (nonzeros,). Vertex k has the targets members[starts[k]:starts[k + 1]],
// distinct and in [0, targets). All tensors are contiguous and on the CPU; none is mutated.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <tuple>

namespace fastgrad {

// Colors of the vertices, int64 of shape (vertices,), such that no two vertices of one color share a
// target; colors 0, 1, ..., count - 1 are all used, and a vertex without targets has color 0.
// First fit: the vertices, in natural order, get the lowest color that fits. The largest number of vertices at
// one target is a lower bound of the number of colors. If more colors are needed, the order of decreasing number of
// targets (stable) is also tried, and the result with fewer colors is returned.
// Time: at worst proportional to nonzeros * count / 64; for dense blocks that overlap little, to the nonzeros.
at::Tensor color(const at::Tensor& starts, const at::Tensor& members, int64_t targets);

// A star coloring of a symmetric pattern: colors of its vertices, int64 of shape (vertices,). The targets are the
// vertices themselves; if a vertex is its own target, this is ignored. Neighbors have different colors, and every path
// of four vertices has at least three colors. Therefore, for each edge (u, v), u is the only neighbor of v with the
// color of u, or v is the only neighbor of u with the color of v. Colors 0, 1, ..., count - 1 are all used. First fit
// is tried in natural order and in the order of decreasing number of targets; the result with fewer colors is returned.
// Empty if both need more than `most` colors.
// The caller must ensure that the pattern is symmetric: this is not checked.
// Time: about nonzeros * count * count at worst, near nonzeros * count for most patterns.
// Source: Gebremedhin, Tarafdar, Manne & Pothen, New acyclic and star coloring algorithms (2007). Their algorithm
// stores the stars; this one stores the number of neighbors of each color for each vertex.
at::Tensor star_color(const at::Tensor& starts, const at::Tensor& members, int64_t most);

// (starts, members) of the transposed pattern, in which each target has vertices, in ascending order.
std::tuple<at::Tensor, at::Tensor> transpose(const at::Tensor& starts, const at::Tensor& members, int64_t targets);

// (order, starts) of a stable counting sort of keys, int64 of one dimension, in [0, count): key c is at the positions
// order[starts[c] : starts[c + 1]].
std::tuple<at::Tensor, at::Tensor> bucket(const at::Tensor& keys, int64_t count);

}  // namespace fastgrad
