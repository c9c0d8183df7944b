// Casts to fp8. Bytes: 2 read a number, and 1 written for each copy, as it lies and transposed.
#pragma once

#include <cuda_fp8.h>

#include "lib/device/fp8.h"
#include "lib/ops/kernels.cuh"
#include "lib/ops/kernels_sums.cuh"
#include "lib/ops/ops.h"

namespace gpu {

template <class T>
void amax(cudaStream_t stream, float* out, const T* x, float* partials, int64_t n) {
  sum_by_blocks<Term::largest, width<T>>(stream, out, Read<T>{x}, partials, n, aligned(x), /*accumulate=*/false);
}

// Two numbers in two bytes, the first in the lower; rounded to nearest even, beyond the largest number to that.
template <Dtype format>
__device__ __forceinline__ uint32_t two_fp8(float low, float high) {
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE,
                                  format == Dtype::e5m2 ? __NV_E5M2 : __NV_E4M3);
}
// Byte `n` of each of four words, the first word's lowest.
__device__ __forceinline__ uint32_t column_of(const uint32_t (&rows)[4], int n) {
  const uint32_t pick = n | (n + 4) << 4;
  return __byte_perm(__byte_perm(rows[0], rows[1], pick), __byte_perm(rows[2], rows[3], pick), 0x5410);
}

// A block casts 128 x 128 numbers. A thread takes 4 rows of 8 of them at a time and turns them in registers: a word of
// shared memory is 4 rows of a column. A warp takes 32 rows of 32 numbers: a sector and more of each in memory, and 32
// banks for each of its stores. R and C are multiples of 16, so that every vector is whole.
constexpr int fp8_tile = 128, fp8_threads = 256;
template <class T, Dtype format>
__global__ void __launch_bounds__(fp8_threads) to_fp8_kernel(uint8_t* rows, uint8_t* columns, float* unscale,
                                                             const T* x, const float* amax, int64_t R, int64_t C) {
  __shared__ uint32_t tile[fp8_tile][fp8_tile / 4 + 1];  // [column][four rows]
  const float scale = fp8::scale_for(*amax, fp8::format(format).largest);
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *unscale = 1 / scale;
  const int64_t r0 = int64_t(blockIdx.y) * fp8_tile, c0 = int64_t(blockIdx.x) * fp8_tile;
  const int wide = threadIdx.x % 4, high = threadIdx.x / 4 % 8, at = threadIdx.x / warp;
#pragma unroll
  for (int part = at; part < 16; part += fp8_threads / warp) {  // 4 x 4 parts of 32 x 32
    const int four = part / 4 * 8 + high, c = part % 4 * 32 + wide * 8;
    const int64_t row = r0 + 4 * four, column = c0 + c;
    if (row >= R || column >= C) continue;
    float v[4][8];
#pragma unroll
    for (int i = 0; i < 4; ++i) load(v[i], x + (row + i) * C + column);
    uint32_t low[4], next[4];  // columns 0 to 3 and 4 to 7 of each row
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (float& a : v[i]) a *= scale;
      low[i] = two_fp8<format>(v[i][0], v[i][1]) | two_fp8<format>(v[i][2], v[i][3]) << 16;
      next[i] = two_fp8<format>(v[i][4], v[i][5]) | two_fp8<format>(v[i][6], v[i][7]) << 16;
      if (rows) *reinterpret_cast<uint2*>(rows + (row + i) * C + column) = make_uint2(low[i], next[i]);
    }
    if (!columns) continue;
#pragma unroll
    for (int n = 0; n < 4; ++n) tile[c + n][four] = column_of(low, n), tile[c + 4 + n][four] = column_of(next, n);
  }
  if (!columns) return;
  __syncthreads();
#pragma unroll
  for (int i = threadIdx.x; i < fp8_tile * fp8_tile / 16; i += fp8_threads) {
    const int c = i / 8, four = i % 8 * 4;
    const int64_t row = r0 + 4 * four, column = c0 + c;
    if (row >= R || column >= C) continue;
    const uint32_t(&w)[fp8_tile / 4 + 1] = tile[c];
    *reinterpret_cast<uint4*>(columns + column * R + row) = make_uint4(w[four], w[four + 1], w[four + 2], w[four + 3]);
  }
}

template <class T>
void to_fp8(cudaStream_t stream, const ops::Fp8Matrix& to, const T* x, const float* amax, int64_t R, int64_t C) {
  if (R == 0 || C == 0) return;
  const dim3 blocks(unsigned(ceil_div(C, fp8_tile)), unsigned(ceil_div(R, fp8_tile)));
  const auto kernel = to.format == Dtype::e5m2 ? to_fp8_kernel<T, Dtype::e5m2> : to_fp8_kernel<T, Dtype::e4m3>;
  kernel<<<blocks, fp8_threads, 0, stream>>>(to.rows, to.columns, to.unscale, x, amax, R, C);
  CUDA_CHECK_LAUNCH();
}

}  // namespace gpu
