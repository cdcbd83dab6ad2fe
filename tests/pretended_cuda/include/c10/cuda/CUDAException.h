#pragma once
#include <c10/util/Exception.h>

#define C10_CUDA_CHECK(expression)                                              \
  do {                                                                          \
    const cudaError_t error = (expression);                                     \
    TORCH_CHECK(error == cudaSuccess, "CUDA error: ", static_cast<int>(error)); \
  } while (0)
