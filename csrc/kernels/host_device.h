// Marks a one-element body as callable from host and device code alike.
#pragma once

#if defined(__CUDACC__) || defined(__HIPCC__)
#define FASTGRAD_HOST_DEVICE __host__ __device__ inline
#else
#define FASTGRAD_HOST_DEVICE inline
#endif
