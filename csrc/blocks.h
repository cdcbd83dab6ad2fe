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
  // stand_in, values, elements: as below; none for a strided argument. Rejects arguments that do not fit together.
  InputBlock(
      const at::Tensor& argument, int64_t first, double relative_step, const std::optional<at::Tensor>& stand_in,
      const std::optional<at::Tensor>& values, const std::optional<at::Tensor>& elements);

  at::Tensor argument;   // the caller's own tensor
  at::Tensor stand_in;   // what func gets instead while inputs are perturbed; undefined: argument itself
  at::Tensor values;     // what is perturbed: strided memory under a version counter of its own
  at::Tensor origin;     // what is restored: contiguous snapshot of the values at x
  at::Tensor elements;   // int64: the flat index of each value in argument; undefined: all, in C order
  int64_t first;         // its first coordinate
  double relative_step;  // step relative to |x|, for coordinates so large that adding eps does not change them

  // If func gets a stand-in: the memory of the caller's own tensor, because func may change it, and its values at x.
  at::Tensor own_values, own_origin;
};

// Whether an input is still in the same memory, so that perturbing block.values perturbs the input.
bool is_in_place(const InputBlock& block);

// Copies a snapshot back; if the memory was freed, into new memory.
void copy_back(const at::Tensor& values, const at::Tensor& origin);

// Rejects inputs whose memory was freed or replaced, so that perturbing `values` would not perturb them.
void check_in_place(const std::vector<InputBlock>& inputs);

// Rejects tensors whose storage func freed or shrank, because torch would read beyond its end.
void check_memory(const std::vector<at::Tensor>& inputs);

// One differentiable output: where func returns it and what it must look like when perturbed.
struct OutputSpec {
  OutputSpec(int64_t position, at::Tensor like);

  int64_t position;  // in the tuple that func returns
  at::Tensor like;   // same shape, dtype and device; the values are never read
};

// The number of coordinates of all outputs.
int64_t total(const std::vector<OutputSpec>& outputs);

// The object that func returned as its output number `position`, or null if there is none; and whether an object is a
// tensor of this shape, dtype and device.
PyObject* output_at(PyObject* result, int64_t position);
bool looks_like(PyObject* object, const at::Tensor& like);

// Groups of columns of a sparse Jacobian that share no row, or of rows that share no column. Each group takes one
// difference, or one VJP. All tensors are int64, contiguous and on the CPU, except `entries` and `positions`, which are
// on the device of the values.
struct Groups {
  // Rejects tensors of other dtypes and devices, and starts without exactly one element more than there are groups.
  Groups(at::Tensor coordinates, at::Tensor starts, at::Tensor entries, at::Tensor entry_starts, at::Tensor positions);

  at::Tensor coordinates;   // of the inputs or of one output, group by group; ascending within a group
  at::Tensor starts;        // shape (groups + 1,): where each group's coordinates start
  at::Tensor entries;       // numbers of the entries of the Jacobian, group by group
  at::Tensor entry_starts;  // shape (groups + 1,): where each group's entries start
  at::Tensor positions;     // shape (entries of the Jacobian,): the row, or the column, of each

  int64_t count() const { return starts.numel() - 1; }

  // Only groups first, ..., last - 1; fewer if there are fewer groups.
  Groups part(int64_t first, int64_t last) const;

  // Where the coordinates of group g begin and end; and the numbers of its entries. The caller must check the
  // coordinates themselves.
  std::pair<int64_t, int64_t> coordinates_of(int64_t g) const;
  at::Tensor entries_of(int64_t g) const;
};

// The real coordinates of some tensors end to end: float64, one dimension, on the device of the first tensor.
at::Tensor flattened(const std::vector<at::Tensor>& tensors);

// The number of coordinates of all inputs.
int64_t total(const std::vector<InputBlock>& inputs);

// The caller's own tensors.
std::vector<at::Tensor> arguments_of(const std::vector<InputBlock>& inputs);

}  // namespace fastgrad
