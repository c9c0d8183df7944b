// Number formats. bf16 is storage only: it is widened to float for every sum and rounded to nearest even on the way
// back.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifndef FSDP_CUDA
#define FSDP_CUDA 0  // 1: nvcc compiles this file and the GPU backend is built in
#endif
#if FSDP_CUDA
#include <cuda_runtime.h>
#define HD __host__ __device__
#else
#define HD
#endif

// A float as it lies in memory.
HD inline uint32_t bits_of(float f) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(f);
#else
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
#endif
}
HD inline float float_of(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
#endif
}

struct bf16 {
  uint16_t bits;
  bf16() = default;
  HD bf16(float f) {
    uint32_t u = bits_of(f);
    // Round to nearest even; a NaN keeps its sign and stays a NaN (the rounding could otherwise carry into infinity).
    bits = (u & 0x7fffffffu) > 0x7f800000u ? uint16_t((u >> 16) | 0x0040u)
                                           : uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
  }
  HD operator float() const { return float_of(uint32_t(bits) << 16); }
  // Rounds away from zero if the bits cut off and `random`, a number below 2^16, come to 2^16 or more: with the odds
  // that make the mean right. What is not finite is rounded as ever.
  static HD bf16 stochastic(float f, uint32_t random) {
    const uint32_t u = bits_of(f);
    if ((u & 0x7f800000u) == 0x7f800000u) return bf16(f);
    bf16 b;
    b.bits = uint16_t((u + random) >> 16);
    return b;
  }
};
static_assert(sizeof(bf16) == 2, "bf16 is two bytes");

enum class Dtype : int { f32, bf16, f64, e4m3, e5m2 };  // the last two: lib/device/fp8.h

inline int64_t size_of(Dtype t) {
  constexpr int64_t sizes[] = {4, 2, 8, 1, 1};
  return sizes[int(t)];
}
inline const char* name_of(Dtype t) {
  constexpr const char* names[] = {"fp32", "bf16", "fp64", "e4m3", "e5m2"};
  return names[int(t)];
}
inline bool is_fp8(Dtype t) { return t == Dtype::e4m3 || t == Dtype::e5m2; }

template <class T>
constexpr Dtype dtype_of = std::is_same_v<T, bf16>     ? Dtype::bf16
                           : std::is_same_v<T, double> ? Dtype::f64
                                                       : Dtype::f32;

// Sums, softmax and norm statistics: float for float and bf16; double for double, which the gradient checks use.
template <class T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;
