// Memory for large vectors, in huge pages.
#include "memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstdlib>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fastgrad {

at::Tensor empty_vectors(at::IntArrayRef sizes) {
#if defined(MADV_HUGEPAGE)
  constexpr size_t page = size_t{1} << 21;  // bytes; of a huge page on x86-64, and on ARM with base pages of 4 KiB
  at::detail::check_size_nonnegative(sizes);
  const size_t bytes = at::detail::computeStorageNbytesContiguous(sizes, sizeof(double));  // checks overflow
  void* memory = nullptr;
  if (bytes >= page && posix_memalign(&memory, page, bytes) == 0) {
    madvise(memory, bytes, MADV_HUGEPAGE);  // only advice: if it fails, the pages are ordinary ones
    return at::from_blob(memory, sizes, [](void* start) { std::free(start); }, at::kDouble);
  }
#endif
  return at::empty(sizes, at::kDouble);  // if memory lacks, this raises the allocator's error
}

}  // namespace fastgrad
