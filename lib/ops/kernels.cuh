// What the kernels share: 16-byte vectors, sums over warps and blocks, launch shapes.
//
// Nearly all operations of lib/ops/ops.h are bound by memory: the limit is the bytes they must read and write over the
// bandwidth of the HBM. To come near it every access is a coalesced 16-byte vector, every byte is touched once, and
// enough loads are in flight (about 25 KiB an SM on an H200).
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "lib/device/intrinsics.cuh"
#include "lib/device/launch.cuh"
#include "lib/device/stream.h"

namespace gpu {

constexpr int warp = 32;

HD inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int round_up_to_warp(int64_t n) { return int(ceil_div(n, warp) * warp); }

// Numbers in a 16-byte vector.
template <class T>
constexpr int width = 16 / int(sizeof(T));

// Vectors of the narrower of two types.
template <class A, class B>
constexpr int common_width = width<A> > width<B> ? width<A> : width<B>;

// May all these be read as 16-byte vectors? (null: not read at all)
template <class... P>
bool aligned(const P*... p) {
  return ((reinterpret_cast<uintptr_t>(p) | ...) & 15) == 0;
}

// --------------------------------------------------------------------------------------------------------- vectors

// N numbers as they lie in memory: whole vectors of 16 bytes or one of 8, or one number where a row has odd length.
template <class T, int N>
struct Pack {
  static_assert(N * sizeof(T) % 16 == 0 || N * sizeof(T) == 8, "whole vectors");
  using Vector = std::conditional_t<N * sizeof(T) == 8, uint2, uint4>;
  Vector q[N * sizeof(T) / sizeof(Vector)];
};
template <class T>
struct Pack<T, 1> {
  T x;
};

// The i-th 32 bits of a vector.
template <class V>
__device__ __forceinline__ uint32_t& word(V& v, int i) {
  return reinterpret_cast<uint32_t*>(v.q)[i];
}
template <class V>
__device__ __forceinline__ uint32_t word(const V& v, int i) {
  return reinterpret_cast<const uint32_t*>(v.q)[i];
}

template <int N, class T>
__device__ __forceinline__ Pack<T, N> load(const T* p) {
  Pack<T, N> v;
  if constexpr (N == 1) {
    v.x = *p;
  } else {
#pragma unroll
    for (int i = 0; i < int(sizeof(v) / sizeof(v.q[0])); ++i)
      v.q[i] = reinterpret_cast<const typename Pack<T, N>::Vector*>(p)[i];
  }
  return v;
}
template <int N, class T>
__device__ __forceinline__ void store(T* p, const Pack<T, N>& v) {
  if constexpr (N == 1) {
    *p = v.x;
  } else {
#pragma unroll
    for (int i = 0; i < int(sizeof(v) / sizeof(v.q[0])); ++i)
      reinterpret_cast<typename Pack<T, N>::Vector*>(p)[i] = v.q[i];
  }
}
// Brings the cache line of p into L2; unlike a load, it holds no register.
constexpr int cache_line = 128;
__device__ __forceinline__ void prefetch(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
template <class T, int N>
__device__ __forceinline__ Pack<T, N> zeros() {
  Pack<T, N> v;
  if constexpr (N == 1) {
    v.x = T(0.0f);
  } else {
#pragma unroll
    for (int i = 0; i < int(sizeof(v) / 4); ++i) word(v, i) = 0;
  }
  return v;
}

// Widened to float for arithmetic, and rounded back (two bf16 in one instruction).
template <class T, int N>
__device__ __forceinline__ void widen(float (&f)[N], const Pack<T, N>& v) {
  if constexpr (N == 1) {
    f[0] = float(v.x);
  } else {
#pragma unroll
    for (int i = 0; i < int(sizeof(v) / 4); ++i) {
      const uint32_t w = word(v, i);
      if constexpr (sizeof(T) == 2) f[2 * i] = low_bf16(w), f[2 * i + 1] = high_bf16(w);
      else f[i] = __uint_as_float(w);
    }
  }
}
template <class T, int N>
__device__ __forceinline__ Pack<T, N> narrow(const float (&f)[N]) {
  Pack<T, N> v;
  if constexpr (N == 1) {
    v.x = T(f[0]);
  } else {
#pragma unroll
    for (int i = 0; i < int(sizeof(v) / 4); ++i)
      if constexpr (sizeof(T) == 2) word(v, i) = pack_bf16(f[2 * i], f[2 * i + 1]);
      else word(v, i) = __float_as_uint(f[i]);
  }
  return v;
}
template <int N, class T>
__device__ __forceinline__ void load(float (&f)[N], const T* p) {
  widen(f, load<N>(p));
}
template <class T, int N>
__device__ __forceinline__ void store(T* p, const float (&f)[N]) {
  store(p, narrow<T>(f));
}

// ------------------------------------------------------------------------------------------------------------- sums

template <class A>
__device__ __forceinline__ A warp_sum(A x) {
#pragma unroll
  for (int o = warp / 2; o > 0; o /= 2) x += __shfl_xor_sync(0xffffffffu, x, o);
  return x;
}

// Sums of a and b over the blockDim.x threads (whole warps) that share threadIdx.y; all get the result. Every thread of
// the block calls. `shared` must not be the one of the call before: with two in turn one barrier a call is enough.
template <class A>
struct RowSums {
  A warps[2][warp];  // a block has at most 32 warps
};
template <class A>
__device__ __forceinline__ void row_sums(A& a, A& b, RowSums<A>& shared) {
  a = warp_sum(a), b = warp_sum(b);
  const int warps = blockDim.x / warp;
  if (warps == 1) return;
  const int lane = threadIdx.x % warp, first = threadIdx.y * warps;
  if (lane == 0) shared.warps[0][first + threadIdx.x / warp] = a, shared.warps[1][first + threadIdx.x / warp] = b;
  __syncthreads();
  a = warp_sum(lane < warps ? shared.warps[0][first + lane] : A(0));
  b = warp_sum(lane < warps ? shared.warps[1][first + lane] : A(0));
}

// The largest of the threads' a >= 0, over threads as row_sums is and with its `shared`.
__device__ __forceinline__ float row_largest(float a, RowSums<float>& shared) {
  const auto over_warp = [](float x) {
#pragma unroll
    for (int o = warp / 2; o > 0; o /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, o));
    return x;
  };
  a = over_warp(a);
  const int warps = blockDim.x / warp, lane = threadIdx.x % warp, first = threadIdx.y * warps;
  if (warps == 1) return a;
  if (lane == 0) shared.warps[0][first + threadIdx.x / warp] = a;
  __syncthreads();
  return over_warp(lane < warps ? shared.warps[0][first + lane] : 0.0f);
}

// ---------------------------------------------------------------------------------------------------- elementwise

// F at index 0 .. n-1: a thread owns N consecutive elements, most often a 16-byte vector of the narrowest type; the
// last few (n % N) have a thread each.
template <int N, class F>
__device__ __forceinline__ void my_elements(const F& f, int64_t n) {
  const int64_t t = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, full = n / N, i = full * N + (t - full);
  if (t < full) f.template at<N>(t * N);
  else if (i < n) f.template at<1>(i);
}
template <int N, class F>
__global__ void __launch_bounds__(256) each_kernel(F f, int64_t n) {
  begin_kernel();
  my_elements<N>(f, n);
}
template <int N, class F>
__global__ void __launch_bounds__(256) each_of_series_kernel(F f, int64_t n, bool first) {
  begin_of_series(first);
  my_elements<N>(f, n);
  end_of_series(first);
}
template <int N, class F, class... More>
void launch_each(cudaStream_t stream, void (*by_vectors)(F, int64_t, More...), void (*singly)(F, int64_t, More...), F f,
                 int64_t n, bool vectors, More... more) {
  if (n == 0) return;
  const int64_t threads = vectors ? n / N + n % N : n;
  launch(stream, vectors ? by_vectors : singly, {unsigned(ceil_div(threads, 256)), 256}, f, n, more...);
}
template <int N, class F>
void each(cudaStream_t stream, F f, int64_t n, bool vectors) {
  launch_each<N>(stream, each_kernel<N, F>, each_kernel<1, F>, f, n, vectors);
}
// One of a series; see begin_of_series.
template <int N, class F>
void each_of_series(cudaStream_t stream, F f, int64_t n, bool vectors, bool first) {
  launch_each<N>(stream, each_of_series_kernel<N, F>, each_of_series_kernel<1, F>, f, n, vectors, first);
}

// For M rows of n vectors each: about 256 threads a block, threadIdx.x along the vectors of a row, threadIdx.y and
// blockIdx.x along the rows, blockIdx.y along a long row.
inline Grid rows_by_vectors(int64_t M, int64_t n) {
  const unsigned x = unsigned(std::min<int64_t>(256, round_up_to_warp(n))), y = 256 / x;
  return {dim3(unsigned(ceil_div(M, y)), unsigned(ceil_div(n, x))), dim3(x, y)};
}

}  // namespace gpu
