// Registers the CUDA launchers: checks, device guard, the caller's stream. Nothing here waits for the device.
//
// One file for all operators: the headers take seconds to compile, and each operator takes only a few lines.
#include "../ops/central_difference.h"
#include "../ops/common.h"
#include "../ops/compare.h"
#include "../ops/decompress.h"
#include "../ops/direction.h"
#include "../ops/displace.h"
#include "../ops/dots.h"
#include "../ops/flatten.h"
#include "../ops/perturb_coordinate.h"
#include "../ops/perturb_coordinates.h"
#include "../ops/project_entries.h"
#include "../ops/project_rows.h"
#include "../ops/realize.h"
#include "../ops/richardson.h"
#include "../ops/unflatten.h"
#include "compare.h"
#include "dots.h"
#include "elementwise.h"
#include "project_entries.h"
#include "project_rows.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/sort.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <initializer_list>

namespace fastgrad {
namespace {

cuda::RealType real_type(const char* op, const at::Tensor& tensor) {
  switch (c10::toRealValueType(tensor.scalar_type())) {
    case at::kDouble:
      return cuda::RealType::float64;
    case at::kFloat:
      return cuda::RealType::float32;
    case at::kHalf:
      return cuda::RealType::float16;
    case at::kBFloat16:
      return cuda::RealType::bfloat16;
    default:
      TORCH_CHECK_NOT_IMPLEMENTED(false, op, ": not implemented on CUDA for ", tensor.scalar_type());
  }
}

void check_one_device(const char* op, const at::Tensor& first, std::initializer_list<at::Tensor> others) {
  for (const at::Tensor& other : others) {
    TORCH_CHECK(
        other.device() == first.device(), op, ": all tensors must be on one device, got ", first.device(), " and ",
        other.device());
  }
}

template <typename T>
cuda::Matrix<T> matrix(T* values, const at::Tensor& tensor) {
  return {values, tensor.stride(0), tensor.stride(1)};
}

// Applies `change` to x, or to a contiguous copy that is then copied to x.
template <typename Change>
void change_contiguous(const at::Tensor& x, const Change& change) {
  const at::Tensor contiguous = x.contiguous();
  change(contiguous);
  if (!contiguous.is_same(x)) {
    x.copy_(contiguous);
  }
}

void perturb_coordinate_cuda(
    const at::Tensor& x, const at::Tensor& origin, int64_t coordinate, int64_t sign, double eps, double relative_step,
    std::optional<int64_t> restored) {
  check_perturb_coordinate(x, origin, coordinate, sign, restored);
  check_one_device("perturb_coordinate_", x, {origin});
  const c10::cuda::CUDAGuard guard(x.device());
  const auto place = [&](int64_t c) { return cuda::Place{coordinate_offset(x, c), c}; };
  C10_CUDA_CHECK(
      cuda::launch_perturb_coordinate(
          x.mutable_data_ptr(), origin.const_data_ptr(), place(coordinate), place(restored.value_or(coordinate)),
          real_type("perturb_coordinate_", x), static_cast<int>(sign), eps, relative_step,
          c10::cuda::getCurrentCUDAStream()));
}

void perturb_coordinates_cuda(
    const at::Tensor& values, const at::Tensor& origin, const at::Tensor& coordinates, int64_t sign, double eps,
    double relative_step, const std::optional<at::Tensor>& restored) {
  check_perturb_coordinates(values, origin, coordinates, sign, restored);
  check_one_device("perturb_coordinates_", values, {origin, coordinates, restored.value_or(coordinates)});
  const c10::cuda::CUDAGuard guard(values.device());
  change_contiguous(values, [&](const at::Tensor& target) {
    C10_CUDA_CHECK(
        cuda::launch_perturb_coordinates(
            target.mutable_data_ptr(), origin.const_data_ptr(), real_type("perturb_coordinates_", values),
            coordinate_count(values), coordinates.const_data_ptr<int64_t>(), coordinates.numel(),
            restored ? restored->const_data_ptr<int64_t>() : nullptr, restored ? restored->numel() : 0,
            static_cast<int>(sign), eps, relative_step, c10::cuda::getCurrentCUDAStream()));
  });
}

void displace_cuda(const at::Tensor& x, const at::Tensor& origin, const at::Tensor& displacement, double scale) {
  check_displace(x, origin, displacement);
  check_one_device("displace_", x, {origin, displacement});
  const c10::cuda::CUDAGuard guard(x.device());
  change_contiguous(x, [&](const at::Tensor& target) {
    C10_CUDA_CHECK(
        cuda::launch_displace(
            target.mutable_data_ptr(), origin.const_data_ptr(), real_type("displace_", x),
            displacement.const_data_ptr<double>(), displacement.stride(0), displacement.numel(), scale,
            c10::cuda::getCurrentCUDAStream()));
  });
}

void direction_cuda(const at::Tensor& out, int64_t seed, int64_t stream, int64_t first, bool halved) {
  check_direction(out, first);
  const c10::cuda::CUDAGuard guard(out.device());
  C10_CUDA_CHECK(
      cuda::launch_direction(
          out.mutable_data_ptr<double>(), out.stride(0), out.numel(), seed, stream, first, halved,
          c10::cuda::getCurrentCUDAStream()));
}

void flatten_cuda(const at::Tensor& out, const at::Tensor& tensor) {
  check_flatten(out, tensor);
  if (out.device() != tensor.device()) {
    out.copy_(real_coordinates(tensor));  // an output, or a gradient, on another device than the first
    return;
  }
  const c10::cuda::CUDAGuard guard(out.device());
  const at::Tensor source = tensor.contiguous();
  C10_CUDA_CHECK(
      cuda::launch_flatten(
          out.mutable_data_ptr<double>(), out.stride(0), source.const_data_ptr(), real_type("flatten_", tensor),
          out.numel(), c10::cuda::getCurrentCUDAStream()));
}

void unflatten_cuda(const at::Tensor& tensor, const at::Tensor& coordinates) {
  check_unflatten(tensor, coordinates);
  if (tensor.device() != coordinates.device()) {
    unflatten_(tensor, coordinates.to(tensor.device()));
    return;
  }
  const c10::cuda::CUDAGuard guard(tensor.device());
  change_contiguous(tensor, [&](const at::Tensor& target) {
    C10_CUDA_CHECK(
        cuda::launch_unflatten(
            target.mutable_data_ptr(), real_type("unflatten_", tensor), coordinates.const_data_ptr<double>(),
            coordinates.stride(0), coordinates.numel(), c10::cuda::getCurrentCUDAStream()));
  });
}

void central_difference_cuda(
    const at::Tensor& column, const at::Tensor& minus, const at::Tensor& origin, int64_t coordinate, double eps,
    double relative_step) {
  check_central_difference(column, minus, origin, coordinate);
  if (minus.device() != column.device() || origin.device() != column.device()) {
    // An output of another device than the input, or than the first output.
    central_difference_(column, minus.to(column.device()), origin.to(column.device()), coordinate, eps, relative_step);
    return;
  }
  const c10::cuda::CUDAGuard guard(column.device());
  const at::Tensor source = minus.contiguous();
  const at::Tensor at_x = origin.contiguous();
  C10_CUDA_CHECK(
      cuda::launch_central_difference(
          column.mutable_data_ptr<double>(), column.stride(0), source.const_data_ptr(),
          real_type("central_difference_", minus), column.numel(), at_x.const_data_ptr(),
          real_type("central_difference_", origin), coordinate, eps, relative_step, c10::cuda::getCurrentCUDAStream()));
}

void realize_cuda(
    const at::Tensor& displacement, const at::Tensor& realized, const at::Tensor& origin, int64_t seed, int64_t stream,
    int64_t first, double eps, double relative_step) {
  check_realize(displacement, realized, origin, first);
  check_one_device("realize_", displacement, {realized, origin});
  const c10::cuda::CUDAGuard guard(displacement.device());
  C10_CUDA_CHECK(
      cuda::launch_realize(
          displacement.mutable_data_ptr<double>(), realized.mutable_data_ptr<double>(), origin.const_data_ptr(),
          real_type("realize_", origin), displacement.numel(), seed, stream, first, eps, relative_step,
          c10::cuda::getCurrentCUDAStream()));
}

void richardson_cuda(
    const at::Tensor& derivative, const at::Tensor& noise, const at::Tensor& base, const at::Tensor& plus,
    const at::Tensor& minus, const at::Tensor& half_plus, const at::Tensor& half_minus, double eps, double ulp) {
  check_richardson(derivative, noise, base, plus, minus, half_plus, half_minus);
  check_one_device("richardson_", derivative, {noise, base, plus, minus, half_plus, half_minus});
  const c10::cuda::CUDAGuard guard(derivative.device());
  C10_CUDA_CHECK(
      cuda::launch_richardson(
          derivative.mutable_data_ptr<double>(), noise.mutable_data_ptr<double>(), base.const_data_ptr<double>(),
          plus.const_data_ptr<double>(), minus.const_data_ptr<double>(), half_plus.const_data_ptr<double>(),
          half_minus.const_data_ptr<double>(), derivative.numel(), eps, ulp, c10::cuda::getCurrentCUDAStream()));
}

void decompress_cuda(
    const at::Tensor& values, const at::Tensor& compressed, const std::optional<at::Tensor>& subtrahend,
    const at::Tensor& positions, const at::Tensor& entries) {
  check_decompress(values, compressed, subtrahend, positions, entries);
  check_one_device("decompress_", values, {compressed, subtrahend.value_or(compressed), positions, entries});
  const c10::cuda::CUDAGuard guard(values.device());
  C10_CUDA_CHECK(
      cuda::launch_decompress(
          values.mutable_data_ptr<double>(), values.numel(), compressed.const_data_ptr<double>(),
          subtrahend ? subtrahend->const_data_ptr<double>() : nullptr, compressed.numel(),
          positions.const_data_ptr<int64_t>(), entries.const_data_ptr<int64_t>(), entries.numel(),
          c10::cuda::getCurrentCUDAStream()));
}

at::Tensor dots_cuda(const at::Tensor& rows, const at::Tensor& vector) {
  check_dots(rows, vector);
  check_one_device("dots", rows, {vector});
  const c10::cuda::CUDAGuard guard(rows.device());
  const int64_t count = rows.size(0);
  const int64_t size = rows.size(1);
  const at::Tensor result = at::empty({count, 2}, rows.options());
  const at::Tensor partial = at::empty({count, cuda::dots_chunks(size), 2}, rows.options());
  C10_CUDA_CHECK(
      cuda::launch_dots(
          result.mutable_data_ptr<double>(), partial.mutable_data_ptr<double>(), rows.const_data_ptr<double>(),
          vector.const_data_ptr<double>(), count, size, c10::cuda::getCurrentCUDAStream()));
  return result;
}

at::Tensor compare_cuda(
    const at::Tensor& analytical, const at::Tensor& numerical, double atol, double rtol, bool complex_entries,
    bool equal_nan) {
  check_compare(analytical, numerical, complex_entries);
  check_one_device("compare", analytical, {numerical});
  const c10::cuda::CUDAGuard guard(analytical.device());
  const at::Tensor fields = at::empty({comparison_fields}, analytical.options());
  const at::Tensor partial = at::empty({cuda::comparison_blocks, comparison_fields}, analytical.options());
  C10_CUDA_CHECK(
      cuda::launch_compare(
          static_cast<ComparisonStatistics*>(fields.mutable_data_ptr()),
          static_cast<ComparisonStatistics*>(partial.mutable_data_ptr()),
          matrix(analytical.const_data_ptr<double>(), analytical),
          matrix(numerical.const_data_ptr<double>(), numerical), analytical.size(0),
          analytical.size(1) / (complex_entries ? 2 : 1), atol, rtol, complex_entries, equal_nan,
          c10::cuda::getCurrentCUDAStream()));
  return fields;
}

void project_rows_cuda(
    const at::Tensor& sums, const at::Tensor& squares, const at::Tensor& cotangents, const at::Tensor& rows,
    int64_t first_row, int64_t row_step, int64_t first_column) {
  check_project_rows(sums, squares, cotangents, rows, first_row, row_step, first_column);
  check_one_device("project_rows_", sums, {squares, cotangents, rows});
  const c10::cuda::CUDAGuard guard(sums.device());
  C10_CUDA_CHECK(
      cuda::launch_project_rows(
          matrix(sums.mutable_data_ptr<double>(), sums), matrix(squares.mutable_data_ptr<double>(), squares),
          matrix(cotangents.const_data_ptr<double>(), cotangents), matrix(rows.const_data_ptr<double>(), rows),
          cotangents.size(0), rows.size(0), rows.size(1), first_row, row_step, first_column,
          c10::cuda::getCurrentCUDAStream()));
}

void project_entries_cuda(
    const at::Tensor& sums, const std::optional<at::Tensor>& squares, const at::Tensor& vector,
    const at::Tensor& sources, const at::Tensor& targets, const at::Tensor& entries) {
  check_project_entries(sums, squares, vector, sources, targets, entries);
  check_one_device("project_entries_", sums, {squares.value_or(sums), vector, sources, targets, entries});
  const c10::cuda::CUDAGuard guard(sums.device());
  // Sorted, and in the order of the entries for equal targets, so that the sums and their order depend on nothing
  // else.
  const auto [ascending, order] = at::sort(targets, /*stable=*/true, /*dim=*/0, /*descending=*/false);
  const int64_t count = entries.numel();
  const int64_t partials = cuda::project_entries_partials(count);
  const at::Tensor partial_targets = at::empty({partials}, targets.options());
  const at::Tensor partial_sums = at::empty({2, partials}, entries.options());
  auto* const partial_values = partial_sums.mutable_data_ptr<double>();
  C10_CUDA_CHECK(
      cuda::launch_project_entries(
          sums.mutable_data_ptr<double>(), squares ? squares->mutable_data_ptr<double>() : nullptr, sums.numel(),
          vector.const_data_ptr<double>(), vector.numel(), sources.const_data_ptr<int64_t>(),
          ascending.const_data_ptr<int64_t>(), order.const_data_ptr<int64_t>(), entries.const_data_ptr<double>(), count,
          partial_targets.mutable_data_ptr<int64_t>(), partial_values, partial_values + partials,
          c10::cuda::getCurrentCUDAStream()));
}

}  // namespace

TORCH_LIBRARY_IMPL(fastgrad, CUDA, library) {
  library.impl("perturb_coordinate_", &perturb_coordinate_cuda);
  library.impl("perturb_coordinates_", &perturb_coordinates_cuda);
  library.impl("displace_", &displace_cuda);
  library.impl("direction_", &direction_cuda);
  library.impl("flatten_", &flatten_cuda);
  library.impl("unflatten_", &unflatten_cuda);
  library.impl("central_difference_", &central_difference_cuda);
  library.impl("realize_", &realize_cuda);
  library.impl("decompress_", &decompress_cuda);
  library.impl("dots", &dots_cuda);
  library.impl("richardson_", &richardson_cuda);
  library.impl("compare", &compare_cuda);
  library.impl("project_rows_", &project_rows_cuda);
  library.impl("project_entries_", &project_entries_cuda);
}

}  // namespace fastgrad
