// Marks functions of single elements as callable from both host and device code.
#pragma once

#if defined(__CUDACC__) || defined(__HIPCC__)
#define FASTGRAD_HOST_DEVICE __host__ __device__ inline
#else
#define FASTGRAD_HOST_DEVICE inline
#endif
