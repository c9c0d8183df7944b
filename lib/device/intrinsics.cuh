// Single instructions that kernels of both attention and lib/ops are made of.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

// Two floats, rounded to nearest even, as a pair of bf16; `low` has the lower address.
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// And back.
__device__ __forceinline__ float low_bf16(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }
// The same as a pair of fp16.
__device__ __forceinline__ uint32_t pack_half(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
__device__ __forceinline__ float2 unpack_half(uint32_t pair) {
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

// |x| as a number whose order is that of the magnitudes, a NaN's above all others; and back, infinity of a NaN.
__device__ __forceinline__ uint32_t magnitude(float x) { return __float_as_uint(x) & 0x7fffffff; }
__device__ __forceinline__ float amax_of(uint32_t magnitude) { return __uint_as_float(min(magnitude, 0x7f800000)); }

// One instruction each; what is smaller than a normal number is zero.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
