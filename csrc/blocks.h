// The inputs and outputs of the function under test as blocks of real coordinates, and groups of coordinates.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace fastgrad {

// One differentiable input of the function under test: a block of consecutive real coordinates.
struct InputBlock {
  // stand_in, values, elements: as below; none for a strided argument. Refuses what does not fit together.
  InputBlock(
      const at::Tensor& argument, int64_t first, double relative_step, const std::optional<at::Tensor>& stand_in,
      const std::optional<at::Tensor>& values, const std::optional<at::Tensor>& elements);

  at::Tensor argument;   // the caller's own tensor
  at::Tensor stand_in;   // what func gets instead while inputs are perturbed; undefined: argument itself
  at::Tensor values;     // strided memory under a version counter of its own: what is perturbed
  at::Tensor origin;     // contiguous snapshot of the values at x: what is restored
  at::Tensor elements;   // int64: the flat index of each value in argument; undefined: all, in C order
  int64_t first;         // its first coordinate
  double relative_step;  // for steps at magnitudes where eps moves nothing

  // If func gets a stand-in: the memory of the caller's own tensor, because func may change it, and its values at x.
  at::Tensor own_values, own_origin;
};

// Whether an input is still in the same memory, so that perturbing block.values perturbs the input.
bool is_in_place(const InputBlock& block);

// Copies a snapshot back; if the memory was freed, into new memory.
void copy_back(const at::Tensor& values, const at::Tensor& origin);

// Refuses inputs whose memory somebody freed or replaced, so that perturbing `values` would not perturb them.
void check_in_place(const std::vector<InputBlock>& inputs);

// Refuses tensors whose storage func freed or shrunk, because torch would read beyond its end.
void check_memory(const std::vector<at::Tensor>& inputs);

// One differentiable output: where func returns it and what it must look like when perturbed.
struct OutputSpec {
  OutputSpec(int64_t position, at::Tensor like);

  int64_t position;  // in the tuple that func returns
  at::Tensor like;   // same shape, dtype and device; the values are never read
};

// The coordinates of all outputs, end to end.
int64_t total(const std::vector<OutputSpec>& outputs);

// The object that func returned as its output number `position`, or null if there is none; and whether an object is a
// tensor of this shape, dtype and device.
PyObject* output_at(PyObject* result, int64_t position);
bool looks_like(PyObject* object, const at::Tensor& like);

// Columns of a sparse Jacobian that share no row, or rows that share no column, group by group: each group takes one
// difference, or one VJP. All are int64, contiguous and on the CPU, except `entries` and `positions`, which are on the
// device of the values.
struct Groups {
  // Refuses tensors of other dtypes and devices, and starts that are not one per group.
  Groups(at::Tensor coordinates, at::Tensor starts, at::Tensor entries, at::Tensor entry_starts, at::Tensor positions);

  at::Tensor coordinates;   // group by group, ascending within: of the inputs, or of one output
  at::Tensor starts;        // shape (groups + 1,): where each group's coordinates start
  at::Tensor entries;       // of the Jacobian, group by group
  at::Tensor entry_starts;  // shape (groups + 1,)
  at::Tensor positions;     // shape (entries of the Jacobian,): the row, or the column, of each

  int64_t count() const { return starts.numel() - 1; }

  // Only groups first, ..., last - 1; fewer if there are fewer groups.
  Groups part(int64_t first, int64_t last) const;

  // Where the coordinates of group g begin and end, and its entries. The caller must check the coordinates themselves.
  std::pair<int64_t, int64_t> coordinates_of(int64_t g) const;
  at::Tensor entries_of(int64_t g) const;
};

// The real coordinates of some tensors end to end: float64, one dimension, where the first is.
at::Tensor flattened(const std::vector<at::Tensor>& tensors);

// The coordinates of all inputs, end to end.
int64_t total(const std::vector<InputBlock>& inputs);

// The caller's own tensors.
std::vector<at::Tensor> arguments_of(const std::vector<InputBlock>& inputs);

}  // namespace fastgrad
