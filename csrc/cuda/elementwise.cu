// CUDA kernels of the element-wise operators: one kernel, whose operation on an element is a functor.
#include "elementwise.h"

#include "../kernels/difference.h"
#include "../kernels/direction.h"
#include "../kernels/richardson.h"
#include "../kernels/sparse.h"
#include "device.h"

#include <cmath>

namespace fastgrad::cuda {
namespace {

template <typename Functor>
__global__ void elementwise_kernel(Functor functor, int64_t count) {
  for (int64_t i = first_element(); i < count; i += element_step()) {
    functor(i);
  }
}

// Calls functor(i) on the device for each i in [0, count).
template <typename Functor>
cudaError_t for_each(int64_t count, cudaStream_t cuda_stream, const Functor& functor) {
  if (count == 0) {
    return cudaSuccess;
  }
  FASTGRAD_LAUNCH(elementwise_kernel, blocks_for(count), threads_per_block, cuda_stream, functor, count);
  return cudaGetLastError();
}

template <typename T>
struct Flatten {
  double* __restrict__ out;
  int64_t stride;
  const T* __restrict__ values;

  __device__ void operator()(int64_t c) const { out[c * stride] = static_cast<double>(values[c]); }
};

template <typename T>
struct Unflatten {
  T* __restrict__ values;
  const double* __restrict__ coordinates;
  int64_t stride;

  __device__ void operator()(int64_t c) const { values[c] = static_cast<T>(coordinates[c * stride]); }
};

// Calls use(c, component) for component first + c of a direction, c in [0, size). A thread draws the random words of a
// group of four coordinates. The words go through shared memory, so that neighboring threads take neighboring
// coordinates: a warp that writes to four places each costs four times as many memory transactions.
template <typename Use>
__global__ void components_kernel(Use use, int64_t size, int64_t seed, int64_t stream, int64_t first, bool halved) {
  FASTGRAD_SHARED(uint32_t, words, (4 * threads_per_block));
  const int64_t groups = direction_groups(first, size);
  for (int64_t done = static_cast<int64_t>(blockIdx.x) * threads_per_block; done < groups; done += element_step()) {
    const int64_t group = first / 4 + done;
    const Words4 own = direction_words(seed, stream, group + threadIdx.x);
    for (int k = 0; k < 4; ++k) {
      words[4 * threadIdx.x + k] = own.word[k];
    }
    __syncthreads();
    for (int k = 0; k < 4; ++k) {
      const int64_t place = k * threads_per_block + threadIdx.x;
      const int64_t coordinate = 4 * group + place;
      if (coordinate >= first && coordinate < first + size) {
        use(coordinate - first, component_of(words[place], coordinate, halved));
      }
    }
    __syncthreads();  // the next groups use the same memory
  }
}

template <typename Use>
cudaError_t for_each_component(
    int64_t size, int64_t seed, int64_t stream, int64_t first, bool halved, cudaStream_t cuda_stream, const Use& use) {
  if (size == 0) {
    return cudaSuccess;
  }
  FASTGRAD_LAUNCH(
      components_kernel, blocks_for(direction_groups(first, size)), threads_per_block, cuda_stream, use, size, seed,
      stream, first, halved);
  return cudaGetLastError();
}

struct Direction {
  double* __restrict__ out;
  int64_t stride;

  __device__ void operator()(int64_t c, double component) const { out[c * stride] = component; }
};

template <typename T>
struct Realize {
  double* __restrict__ displacement;
  double* __restrict__ realized;
  const T* __restrict__ origin;
  double eps, relative_step;

  __device__ void operator()(int64_t c, double component) const {
    const T x = origin[c];
    const double step = component * directional_step(x, eps, relative_step);
    displacement[c] = step;
    realized[c] = realized_component(x, step, eps);
  }
};

template <typename T>
struct PerturbCoordinate {
  T* __restrict__ x;
  const T* __restrict__ origin;
  Place moved, restored;
  int sign;
  double eps, relative_step;

  __device__ void operator()(int64_t) const {
    x[restored.target] = origin[restored.coordinate];
    x[moved.target] = moved_coordinate(origin[moved.coordinate], sign, eps, relative_step);
  }
};

template <typename T>
struct PerturbCoordinates {
  T* __restrict__ values;
  const T* __restrict__ origin;
  int64_t size;
  const int64_t* __restrict__ coordinates;
  int64_t count;
  const int64_t* __restrict__ restored;
  int sign;
  double eps, relative_step;

  __device__ void operator()(int64_t k) const {
    const bool moves = k < count;
    const int64_t c = moves ? coordinates[k] : restored[k - count];
    if (is_within(c, size)) {
      values[c] = moved_coordinate(origin[c], moves ? sign : 0, eps, relative_step);
    }
  }
};

template <typename T>
struct Displace {
  T* __restrict__ x;
  const T* __restrict__ origin;
  const double* __restrict__ displacement;
  int64_t stride;
  double scale;

  __device__ void operator()(int64_t c) const { x[c] = displaced(origin[c], displacement[c * stride], scale); }
};

template <typename T>
__device__ double width_at(const void* origin, int64_t coordinate, double eps, double relative_step) {
  const T value = static_cast<const T*>(origin)[coordinate];
  return realized_width(value, coordinate_step(value, eps, relative_step));
}

template <typename T>
struct CentralDifference {
  double* __restrict__ column;
  int64_t stride;
  const T* __restrict__ minus;
  const void* __restrict__ origin;
  RealType origin_type;
  int64_t coordinate;
  double eps, relative_step;

  __device__ void operator()(int64_t i, double width) const {
    column[i * stride] = difference_quotient(column[i * stride], minus[i], width);
  }

  // On the device, so that nothing waits for it. All threads take the same branch, so one kernel serves all pairs
  // of types.
  __device__ double width() const {
    switch (origin_type) {
      case RealType::float64:
        return width_at<double>(origin, coordinate, eps, relative_step);
      case RealType::float32:
        return width_at<float>(origin, coordinate, eps, relative_step);
      case RealType::float16:
        return width_at<Float16>(origin, coordinate, eps, relative_step);
      default:
        return width_at<BFloat16>(origin, coordinate, eps, relative_step);
    }
  }
};

// The width is computed once per thread: it takes more instructions than an element.
template <typename T>
__global__ void central_difference_kernel(CentralDifference<T> difference, int64_t count) {
  const double width = difference.width();
  for (int64_t i = first_element(); i < count; i += element_step()) {
    difference(i, width);
  }
}

struct Richardson {
  double* __restrict__ derivative;
  double* __restrict__ noise;
  const double* __restrict__ base;
  const double* __restrict__ plus;
  const double* __restrict__ minus;
  const double* __restrict__ half_plus;
  const double* __restrict__ half_minus;
  double eps, ulp;

  __device__ void operator()(int64_t i) const {
    const FourValues f{plus[i], minus[i], half_plus[i], half_minus[i]};
    derivative[i] = richardson(f, eps);
    noise[i] = louder(difference_noise(f, base[i], eps, ulp), noise[i]);
  }
};

struct Decompress {
  double* __restrict__ values;
  int64_t nonzeros;
  const double* __restrict__ compressed;
  const double* __restrict__ subtrahend;
  int64_t size;
  const int64_t* __restrict__ positions;
  const int64_t* __restrict__ entries;

  __device__ void operator()(int64_t k) const {
    const int64_t e = entries[k];
    if (is_within(e, nonzeros)) {
      values[e] = is_within(positions[e], size) ? decompressed(compressed, subtrahend, positions[e]) : NAN;
    }
  }
};

}  // namespace

cudaError_t launch_flatten(
    double* out, int64_t stride, const void* values, RealType type, int64_t size, cudaStream_t cuda_stream) {
  return with_real_type(type, [&](auto zero) {
    using T = decltype(zero);
    return for_each(size, cuda_stream, Flatten<T>{out, stride, static_cast<const T*>(values)});
  });
}

cudaError_t launch_unflatten(
    void* values, RealType type, const double* coordinates, int64_t stride, int64_t size, cudaStream_t cuda_stream) {
  return with_real_type(type, [&](auto zero) {
    using T = decltype(zero);
    return for_each(size, cuda_stream, Unflatten<T>{static_cast<T*>(values), coordinates, stride});
  });
}

cudaError_t launch_direction(
    double* out, int64_t stride, int64_t size, int64_t seed, int64_t stream, int64_t first, bool halved,
    cudaStream_t cuda_stream) {
  return for_each_component(size, seed, stream, first, halved, cuda_stream, Direction{out, stride});
}

cudaError_t launch_perturb_coordinate(
    void* x, const void* origin, Place moved, Place restored, RealType type, int sign, double eps, double relative_step,
    cudaStream_t cuda_stream) {
  return with_real_type(type, [&](auto zero) {
    using T = decltype(zero);
    const PerturbCoordinate<T> perturb{static_cast<T*>(x), static_cast<const T*>(origin), moved, restored, sign, eps,
                                       relative_step};
    return for_each(1, cuda_stream, perturb);
  });
}

cudaError_t launch_perturb_coordinates(
    void* values, const void* origin, RealType type, int64_t size, const int64_t* coordinates, int64_t count,
    const int64_t* restored, int64_t restored_count, int sign, double eps, double relative_step,
    cudaStream_t cuda_stream) {
  return with_real_type(type, [&](auto zero) {
    using T = decltype(zero);
    const PerturbCoordinates<T> perturb{static_cast<T*>(values),
                                        static_cast<const T*>(origin),
                                        size,
                                        coordinates,
                                        count,
                                        restored,
                                        sign,
                                        eps,
                                        relative_step};
    return for_each(count + restored_count, cuda_stream, perturb);
  });
}

cudaError_t launch_displace(
    void* x, const void* origin, RealType type, const double* displacement, int64_t stride, int64_t size, double scale,
    cudaStream_t cuda_stream) {
  return with_real_type(type, [&](auto zero) {
    using T = decltype(zero);
    const Displace<T> displace{static_cast<T*>(x), static_cast<const T*>(origin), displacement, stride, scale};
    return for_each(size, cuda_stream, displace);
  });
}

cudaError_t launch_realize(
    double* displacement, double* realized, const void* origin, RealType type, int64_t size, int64_t seed,
    int64_t stream, int64_t first, double eps, double relative_step, cudaStream_t cuda_stream) {
  return with_real_type(type, [&](auto zero) {
    using T = decltype(zero);
    const Realize<T> realize{displacement, realized, static_cast<const T*>(origin), eps, relative_step};
    return for_each_component(size, seed, stream, first, /*halved=*/false, cuda_stream, realize);
  });
}

cudaError_t launch_central_difference(
    double* column, int64_t stride, const void* minus, RealType minus_type, int64_t size, const void* origin,
    RealType origin_type, int64_t coordinate, double eps, double relative_step, cudaStream_t cuda_stream) {
  return with_real_type(minus_type, [&](auto zero) {
    using T = decltype(zero);
    const CentralDifference<T> difference{
        column, stride, static_cast<const T*>(minus), origin, origin_type, coordinate, eps, relative_step};
    if (size > 0) {
      FASTGRAD_LAUNCH(central_difference_kernel<T>, blocks_for(size), threads_per_block, cuda_stream, difference, size);
    }
    return cudaGetLastError();
  });
}

cudaError_t launch_richardson(
    double* derivative, double* noise, const double* base, const double* plus, const double* minus,
    const double* half_plus, const double* half_minus, int64_t size, double eps, double ulp, cudaStream_t cuda_stream) {
  return for_each(size, cuda_stream, Richardson{derivative, noise, base, plus, minus, half_plus, half_minus, eps, ulp});
}

cudaError_t launch_decompress(
    double* values, int64_t nonzeros, const double* compressed, const double* subtrahend, int64_t size,
    const int64_t* positions, const int64_t* entries, int64_t count, cudaStream_t cuda_stream) {
  return for_each(count, cuda_stream, Decompress{values, nonzeros, compressed, subtrahend, size, positions, entries});
}

}  // namespace fastgrad::cuda
