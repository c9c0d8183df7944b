// Casts to fp8. Bytes: 2 read a number (4 of a master weight), and 1 written for each copy, as it lies and transposed.
// Where an activation makes the numbers its layer is read instead, once for the largest and once for the cast.
#pragma once

#include <cuda_fp8.h>

#include "lib/device/fp8.h"
#include "lib/ops/kernels.cuh"
#include "lib/ops/kernels_elementwise.cuh"
#include "lib/ops/kernels_sums.cuh"
#include "lib/ops/ops.h"

namespace gpu {

template <class T>
void amax(cudaStream_t stream, float* out, const T* x, float* partials, int64_t n) {
  sum_by_blocks<width<T>>(stream, out, Always<Term::largest>(), Read<T>{x}, partials, n, aligned(x),
                          /*accumulate=*/false);
}

// Byte `n` of each of four words, the first word's lowest.
__device__ __forceinline__ uint32_t column_of(const uint32_t (&rows)[4], int n) {
  const uint32_t pick = n | (n + 4) << 4;
  return __byte_perm(__byte_perm(rows[0], rows[1], pick), __byte_perm(rows[2], rows[3], pick), 0x5410);
}

// ------------------------------------------------------------------------------------------------------ what is cast

// One matrix of bf16, or several that are made from the same numbers: at() gives 8 numbers in a row of each, two in a
// word. Numbers that an activation makes are rounded, as if they had been written and read.
using Eight = uint32_t[4];
__device__ __forceinline__ void load(Eight& w, const bf16* x) {
  const uint4 v = *reinterpret_cast<const uint4*>(x);
  w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
}

template <Dtype format>
struct Matrix {
  static constexpr int matrices = 1;
  static constexpr Dtype format_of(int) { return format; }
  const bf16* x;  // (R,C)
  int64_t C;
  __device__ void at(Eight (&w)[1], int64_t r, int64_t c) const { load(w[0], x + r * C + c); }
};
struct Gelu {  // g
  static constexpr int matrices = 1, amaxes = 1;
  static constexpr Dtype format_of(int) { return Dtype::e4m3; }
  static constexpr int amax_of(int) { return 0; }
  const bf16* h;  // (R,F)
  int64_t F;
  __device__ void at(Eight (&w)[1], int64_t r, int64_t c) const {
    load(w[0], h + r * F + c);
#pragma unroll
    for (uint32_t& x : w[0]) x = pack_bf16(gelu<bf16>(low_bf16(x)).x, gelu<bf16>(high_bf16(x)).x);
  }
};
struct GeluGradients {  // dh, g
  static constexpr int matrices = 2, amaxes = 2;
  static constexpr Dtype format_of(int k) { return k == 0 ? Dtype::e5m2 : Dtype::e4m3; }
  static constexpr int amax_of(int k) { return k; }
  const bf16 *dg, *h;  // (R,F)
  int64_t F;
  __device__ void at(Eight (&w)[2], int64_t r, int64_t c) const {
    load(w[0], dg + r * F + c), load(w[1], h + r * F + c);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 a = gelu<bf16>(low_bf16(w[1][i])), b = gelu<bf16>(high_bf16(w[1][i]));
      w[0][i] = pack_bf16(low_bf16(w[0][i]) * a.y, high_bf16(w[0][i]) * b.y), w[1][i] = pack_bf16(a.x, b.x);
    }
  }
};
struct Swiglu {  // g
  static constexpr int matrices = 1, amaxes = 1;
  static constexpr Dtype format_of(int) { return Dtype::e4m3; }
  static constexpr int amax_of(int) { return 0; }
  const bf16* h;  // (R,2F)
  int64_t F;
  __device__ void at(Eight (&w)[1], int64_t r, int64_t c) const {
    Eight up;
    load(w[0], h + 2 * r * F + c), load(up, h + 2 * r * F + F + c);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      w[0][i] = pack_bf16(swiglu<bf16>(low_bf16(w[0][i]), low_bf16(up[i])),
                          swiglu<bf16>(high_bf16(w[0][i]), high_bf16(up[i])));
  }
};
struct SwigluGradients {  // the two halves of dh, which have one scale, and g
  static constexpr int matrices = 3, amaxes = 2;
  static constexpr Dtype format_of(int k) { return k < 2 ? Dtype::e5m2 : Dtype::e4m3; }
  static constexpr int amax_of(int k) { return k / 2; }
  const bf16 *dg, *h;  // (R,F), (R,2F)
  int64_t F;
  __device__ void at(Eight (&w)[3], int64_t r, int64_t c) const {
    load(w[0], h + 2 * r * F + c), load(w[1], h + 2 * r * F + F + c), load(w[2], dg + r * F + c);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const SwigluGradient a = swiglu_gradient<bf16>(low_bf16(w[0][i]), low_bf16(w[1][i]), low_bf16(w[2][i]));
      const SwigluGradient b = swiglu_gradient<bf16>(high_bf16(w[0][i]), high_bf16(w[1][i]), high_bf16(w[2][i]));
      w[0][i] = pack_bf16(a.gate, b.gate), w[1][i] = pack_bf16(a.up, b.up), w[2][i] = pack_bf16(a.g, b.g);
    }
  }
};

// The larger of two, twice; NaN if either is.
__device__ __forceinline__ uint32_t larger(uint32_t a, uint32_t b) {
  uint32_t c;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
  return c;
}
// partials (amaxes,gridDim.x). `across` threads, whole warps of them, stand along a row, the others of a block on the
// rows behind it.
template <class F>
__global__ void __launch_bounds__(sum_threads) amax_kernel(float* partials, F f, int64_t R, int64_t C, int across) {
  begin_kernel();
  const int64_t below = blockDim.x / across, column = threadIdx.x % across * 8;
  uint32_t most[F::amaxes] = {};  // two in each
  for (int64_t r = int64_t(blockIdx.x) * below + threadIdx.x / across; r < R; r += gridDim.x * below) {
#pragma unroll 2
    for (int64_t c = column; c < C; c += across * 8) {
      Eight w[F::matrices];
      f.at(w, r, c);
#pragma unroll
      for (int k = 0; k < F::matrices; ++k)
#pragma unroll
        for (uint32_t x : w[k]) most[F::amax_of(k)] = larger(most[F::amax_of(k)], x & 0x7fff7fff);
    }
  }
#pragma unroll
  for (int k = 0; k < F::amaxes; ++k) {
    const float a = term_of(Term::largest, low_bf16(most[k])), b = term_of(Term::largest, high_bf16(most[k]));
    const float all = block_total(Term::largest, both(Term::largest, a, b));
    if (threadIdx.x == 0) partials[k * gridDim.x + blockIdx.x] = all;
    __syncthreads();
  }
}
// out (amaxes); partials: amaxes * sum_partials() numbers.
template <class F>
void largest_of(cudaStream_t stream, float* out, F f, float* partials, int64_t R, int64_t C) {
  const int across = int(std::min<int64_t>(sum_threads, round_up_to_warp(C / 8))), below = sum_threads / across;
  const int blocks = int(std::min(ops::sum_partials(), ceil_div(R, below)));
  launch(stream, amax_kernel<F>, {blocks, across * below}, partials, f, R, C, across);
  for (int k = 0; k < F::amaxes; ++k) {
    launch(stream, sum_finish_kernel<float>, {1, sum_threads}, out + k, Term::largest, partials + k * blocks, blocks,
           /*accumulate=*/false);
  }
}

// ------------------------------------------------------------------------------------------------------------- casts

// Four numbers in a word, the first lowest, of two words of two; rounded to nearest even, beyond the largest number to
// that.
__device__ __forceinline__ uint32_t four_fp8(Dtype format, float4 x) {
  const auto two = [=](float a, float b) -> uint32_t {
    return __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, format == Dtype::e5m2 ? __NV_E5M2 : __NV_E4M3);
  };
  return two(x.x, x.y) | two(x.z, x.w) << 16;
}
__device__ __forceinline__ uint32_t four_fp8(Dtype format, uint32_t a, uint32_t b, float4 scale) {
  return four_fp8(format, make_float4(low_bf16(a) * scale.x, high_bf16(a) * scale.y, low_bf16(b) * scale.z,
                                      high_bf16(b) * scale.w));
}
// Where a matrix goes; its rows are parts of rows of ld numbers. amax and unscale: fp8::scales numbers.
struct Fp8Target {
  uint8_t *rows, *columns;
  float* unscale;
  const float* amax;
  int64_t ld;
};
template <int n>
struct Fp8Targets {
  Fp8Target of[n];
};

// A block casts 128 x 128 numbers of each matrix. A thread takes 4 rows of 8 of them at a time and turns them in
// registers: a word of shared memory is 4 rows of a column. A warp takes 32 rows of 32 numbers: a sector and more of
// each in memory, and 32 banks for each of its stores. R and C are multiples of 16, so that every vector is whole.
constexpr int fp8_tile = 128, fp8_threads = 256;
constexpr int fp8_turns = 16 * warp / fp8_threads;  // 4 x 4 parts of 32 x 32
struct Fp8Place {
  int wide = threadIdx.x % 4, high = threadIdx.x / 4 % 8, at = threadIdx.x / warp;
  __device__ int four(int turn) const { return (at + turn * (fp8_threads / warp)) / 4 * 8 + high; }  // rows from 4 * it
  __device__ int column(int turn) const { return (at + turn * (fp8_threads / warp)) % 4 * 32 + wide * 8; }
};

using Fp8Words = uint32_t[fp8_turns][4];               // of each row columns 0 to 3, or 4 to 7
using Fp8Tile = uint32_t[fp8_tile][fp8_tile / 4 + 1];  // [column][four rows]
// What a block's threads hold of a tile, transposed.
__device__ __forceinline__ void store_columns(uint8_t* columns, const Fp8Words& left, const Fp8Words& right,
                                              Fp8Tile& tile, int64_t r0, int64_t c0, int64_t R, int64_t C) {
  const Fp8Place place;
#pragma unroll
  for (int turn = 0; turn < fp8_turns; ++turn) {
    const int four = place.four(turn), c = place.column(turn);
    if (r0 + 4 * four >= R || c0 + c >= C) continue;
#pragma unroll
    for (int m = 0; m < 4; ++m)
      tile[c + m][four] = column_of(left[turn], m), tile[c + 4 + m][four] = column_of(right[turn], m);
  }
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

// The scales of a tile's rows and columns, as far as they are wanted; 256 threads find one each.
__device__ __forceinline__ void find_scales(float (&of)[2][fp8_tile], const Fp8Target& to, Dtype format, int64_t r0,
                                            int64_t c0, int64_t R, int64_t C) {
  const bool column = threadIdx.x >= fp8_tile;
  const int64_t i = threadIdx.x % fp8_tile + (column ? c0 : r0), n = column ? C : R, place = (column ? R : 0) + i;
  if (i < n && (column ? to.columns : to.rows)) {
    const float scale = fp8::scale_for(to.amax[place], fp8::largest_number(format));
    of[column][threadIdx.x % fp8_tile] = scale;
    if ((column ? blockIdx.y : blockIdx.x) == 0) to.unscale[place] = 1 / scale;
  }
  __syncthreads();
}

template <fp8::Scaling scaling, class F>
__global__ void __launch_bounds__(fp8_threads)
    to_fp8_kernel(F f, Fp8Targets<F::matrices> targets, int64_t R, int64_t C) {
  begin_kernel();
  constexpr int n = F::matrices, turns = fp8_turns;
  constexpr bool by_row = scaling == fp8::Scaling::row;
  static_assert(!by_row || n == 1);
  __shared__ Fp8Tile tile;
  __shared__ float vectors[2][by_row ? fp8_tile : 1];  // scales of rows, and of columns
  const int64_t r0 = int64_t(blockIdx.y) * fp8_tile, c0 = int64_t(blockIdx.x) * fp8_tile;
  float4 scale[n];
  if constexpr (by_row) {
    find_scales(vectors, targets.of[0], F::format_of(0), r0, c0, R, C);
  } else {
#pragma unroll
    for (int k = 0; k < n; ++k) {
      const float one = fp8::scale_for(*targets.of[k].amax, fp8::largest_number(F::format_of(k)));
      scale[k] = make_float4(one, one, one, one);
      if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *targets.of[k].unscale = 1 / one;
    }
  }
  const Fp8Place place;
  Fp8Words left[n], right[n];
#pragma unroll
  for (int turn = 0; turn < turns; ++turn) {
    const int64_t row = r0 + 4 * place.four(turn), column = c0 + place.column(turn);
    if (row >= R || column >= C) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Eight w[n];
      f.at(w, row + i, column);
#pragma unroll
      for (int k = 0; k < n; ++k) {
        const Dtype format = F::format_of(k);
        const auto cast = [&](float4 a, float4 b) {
          return make_uint2(four_fp8(format, w[k][0], w[k][1], a), four_fp8(format, w[k][2], w[k][3], b));
        };
        uint2 by_rows, by_columns;
        if constexpr (by_row) {
          const float one = vectors[0][4 * place.four(turn) + i];
          by_rows = cast(make_float4(one, one, one, one), make_float4(one, one, one, one));
          const float* const each = vectors[1] + place.column(turn);
          by_columns =
              cast(make_float4(each[0], each[1], each[2], each[3]), make_float4(each[4], each[5], each[6], each[7]));
        } else {
          by_rows = by_columns = cast(scale[k], scale[k]);
        }
        left[k][turn][i] = by_columns.x, right[k][turn][i] = by_columns.y;
        const Fp8Target& to = targets.of[k];
        if (to.rows) *reinterpret_cast<uint2*>(to.rows + (row + i) * to.ld + column) = by_rows;
      }
    }
  }
#pragma unroll
  for (int k = 0; k < n; ++k) {
    uint8_t* const columns = targets.of[k].columns;
    if (!columns) continue;
    if (k > 0) __syncthreads();
    store_columns(columns, left[k], right[k], tile, r0, c0, R, C);
  }
}
// columns (C,R) of codes (R,C).
__global__ void __launch_bounds__(fp8_threads)
    transpose_codes_kernel(uint8_t* columns, const uint8_t* codes, int64_t R, int64_t C) {
  begin_kernel();
  __shared__ Fp8Tile tile;
  const int64_t r0 = int64_t(blockIdx.y) * fp8_tile, c0 = int64_t(blockIdx.x) * fp8_tile;
  const Fp8Place place;
  Fp8Words left, right;
#pragma unroll
  for (int turn = 0; turn < fp8_turns; ++turn) {
    const int64_t row = r0 + 4 * place.four(turn), column = c0 + place.column(turn);
    if (row >= R || column >= C) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint2 eight = *reinterpret_cast<const uint2*>(codes + (row + i) * C + column);
      left[turn][i] = eight.x, right[turn][i] = eight.y;
    }
  }
  store_columns(columns, left, right, tile, r0, c0, R, C);
}
// A thread casts 8 numbers.
__global__ void __launch_bounds__(256) to_e4m3_kernel(uint8_t* codes, const float* x, const float* amax, int64_t n) {
  begin_kernel();
  const int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 8;
  if (i >= n) return;
  const float scale = fp8::scale_for(*amax, fp8::largest_number(Dtype::e4m3));
  const float4 a = *reinterpret_cast<const float4*>(x + i), b = *reinterpret_cast<const float4*>(x + i + 4);
  const auto four = [&](float4 v) {
    return four_fp8(Dtype::e4m3, make_float4(v.x * scale, v.y * scale, v.z * scale, v.w * scale));
  };
  *reinterpret_cast<uint2*>(codes + i) = make_uint2(four(a), four(b));
}
__global__ void unscales_kernel(float* unscale, const float* amax, int64_t n, float largest) {
  begin_kernel();
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x)
    unscale[i * fp8::scale_stride] = 1 / fp8::scale_for(amax[i], largest);
}
static_assert(ops::fp8_most_rows == 65535 * int64_t(fp8_tile));  // of a grid's second dimension
inline dim3 fp8_tiles(int64_t R, int64_t C) {
  return dim3(unsigned(ceil_div(C, fp8_tile)), unsigned(ceil_div(R, fp8_tile)));
}
template <fp8::Scaling scaling = fp8::Scaling::tensor, class F>
void cast_to_fp8(cudaStream_t stream, F f, const Fp8Targets<F::matrices>& targets, int64_t R, int64_t C) {
  launch(stream, to_fp8_kernel<scaling, F>, {fp8_tiles(R, C), fp8_threads}, f, targets, R, C);
}

// rows (tiles along a row,R), columns (tiles along a column,C): the largest of a tile's rows and columns. Threads stand
// as in to_fp8_kernel.
__global__ void __launch_bounds__(fp8_threads)
    vector_amax_kernel(float* rows, float* columns, Matrix<Dtype::e4m3> f, int64_t R, int64_t C) {
  begin_kernel();
  __shared__ uint32_t row_most[fp8_tile][fp8_tile / 8 + 1], column_most[fp8_tile / 4][fp8_tile / 2 + 1];
  const int64_t r0 = int64_t(blockIdx.y) * fp8_tile, c0 = int64_t(blockIdx.x) * fp8_tile;
  const Fp8Place place;
#pragma unroll
  for (int turn = 0; turn < fp8_turns; ++turn) {
    const int64_t row = r0 + 4 * place.four(turn), column = c0 + place.column(turn);
    const bool inside = row < R && column < C;
    Eight most = {};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Eight w[1] = {};
      if (inside) f.at(w, row + i, column);
      uint32_t of_row = 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t magnitude = w[0][j] & 0x7fff7fff;
        of_row = larger(of_row, magnitude), most[j] = larger(most[j], magnitude);
      }
      row_most[4 * place.four(turn) + i][place.column(turn) / 8] = of_row;
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) column_most[place.four(turn)][place.column(turn) / 2 + j] = most[j];
  }
  __syncthreads();
  const int i = threadIdx.x % fp8_tile;
  const bool column = threadIdx.x >= fp8_tile;
  uint32_t two = 0;
  if (column)
    for (int four = 0; four < fp8_tile / 4; ++four) two = larger(two, column_most[four][i / 2]);
  else
    for (int eight = 0; eight < fp8_tile / 8; ++eight) two = larger(two, row_most[i][eight]);
  const float a = term_of(Term::largest, low_bf16(two)), b = term_of(Term::largest, high_bf16(two));
  if (column && columns && c0 + i < C) columns[int64_t(blockIdx.y) * C + c0 + i] = i % 2 ? b : a;
  if (!column && rows && r0 + i < R) rows[int64_t(blockIdx.x) * R + r0 + i] = both(Term::largest, a, b);
}
// out (n) = the largest of each column of parts (count,n).
__global__ void __launch_bounds__(256) vector_amax_finish_kernel(float* out, const float* parts, int count, int64_t n) {
  begin_kernel();
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float most = 0;
  for (int part = 0; part < count; ++part) most = both(Term::largest, most, parts[part * n + i]);
  out[i] = most;
}
inline void vector_amax(cudaStream_t stream, float* rows, float* columns, const bf16* x, float* partials, int64_t R,
                        int64_t C) {
  if (R == 0 || C == 0) return;
  const dim3 tiles = fp8_tiles(R, C);
  float* const of_columns = partials + tiles.x * R;
  launch(stream, vector_amax_kernel, {tiles, fp8_threads}, rows ? partials : nullptr, columns ? of_columns : nullptr,
         Matrix<Dtype::e4m3>{x, C}, R, C);
  const auto finish = [&](float* out, const float* parts, int count, int64_t n) {
    if (!out) return;
    launch(stream, vector_amax_finish_kernel, {unsigned(ceil_div(n, 256)), 256}, out, parts, count, n);
  };
  finish(rows, partials, int(tiles.x), R), finish(columns, of_columns, int(tiles.y), C);
}
inline Fp8Target target(const ops::Fp8Matrix& to, const float* amax, int64_t ld) {
  return {to.rows, to.columns, to.unscale, amax, ld};
}
// Columns [from, ...) of the matrix, which has R rows.
inline Fp8Target part_of(Fp8Target to, int64_t from, int64_t R) {
  if (to.rows) to.rows += from;
  if (to.columns) to.columns += from * R;
  return to;
}

inline void to_fp8(cudaStream_t stream, const ops::Fp8Matrix& to, const bf16* x, const float* amax, int64_t R,
                   int64_t C) {
  if (R == 0 || C == 0) return;
  const auto cast = [&](auto matrix) {
    const Fp8Targets<1> targets = {{target(to, amax, C)}};
    if (to.scaling == fp8::Scaling::row) cast_to_fp8<fp8::Scaling::row>(stream, matrix, targets, R, C);
    else cast_to_fp8(stream, matrix, targets, R, C);
  };
  if (to.format == Dtype::e5m2) cast(Matrix<Dtype::e5m2>{x, C});
  else cast(Matrix<Dtype::e4m3>{x, C});
}

inline void to_e4m3(cudaStream_t stream, uint8_t* codes, const float* x, const float* amax, int64_t n) {
  if (n == 0) return;
  launch(stream, to_e4m3_kernel, {unsigned(ceil_div(n, 8 * 256)), 256}, codes, x, amax, n);
}
inline void unscales(cudaStream_t stream, float* unscale, const float* amax, int64_t n, Dtype format) {
  launch(stream, unscales_kernel, {1, 256}, unscale, amax, n, fp8::largest_number(format));
}
inline void transpose_codes(cudaStream_t stream, uint8_t* columns, const uint8_t* codes, int64_t R, int64_t C) {
  if (R == 0 || C == 0) return;
  launch(stream, transpose_codes_kernel, {fp8_tiles(R, C), fp8_threads}, columns, codes, R, C);
}

// Back to bf16: two numbers from two bytes, the first in the lower. Both formats are parts of half's.
__device__ __forceinline__ uint32_t two_from_fp8(uint16_t codes, Dtype format, float unscale) {
  const __half2 x = __half2(__nv_cvt_fp8x2_to_halfraw2(codes, format == Dtype::e5m2 ? __NV_E5M2 : __NV_E4M3));
  return pack_bf16(__low2float(x) * unscale, __high2float(x) * unscale);
}
// A thread takes 16 numbers.
__global__ void __launch_bounds__(256) from_fp8_kernel(bf16* x, ops::Fp8Factor from, int64_t n) {
  begin_kernel();
  const int64_t i = (int64_t(blockIdx.x) * blockDim.x + threadIdx.x) * 16;
  if (i >= n) return;
  const uint4 codes = *reinterpret_cast<const uint4*>(from.data + i);
  const float unscale = *from.unscale;
  const auto low = [&](uint32_t w) { return two_from_fp8(uint16_t(w), from.format, unscale); };
  const auto high = [&](uint32_t w) { return two_from_fp8(uint16_t(w >> 16), from.format, unscale); };
  uint4* const to = reinterpret_cast<uint4*>(x + i);
  to[0] = make_uint4(low(codes.x), high(codes.x), low(codes.y), high(codes.y));
  to[1] = make_uint4(low(codes.z), high(codes.z), low(codes.w), high(codes.w));
}
inline void from_fp8(cudaStream_t stream, bf16* x, const ops::Fp8Factor& from, int64_t n) {
  if (n == 0) return;
  launch(stream, from_fp8_kernel, {unsigned(ceil_div(n, 16 * 256)), 256}, x, from, n);
}

inline void activation_to_fp8(cudaStream_t stream, ops::Activation kind, const ops::Fp8Matrix& g, const bf16* h,
                              float* amax, float* partials, int64_t R, int64_t F) {
  if (R == 0 || F == 0) return;
  const auto cast = [&](auto activated) {
    largest_of(stream, amax, activated, partials, R, F);
    cast_to_fp8(stream, activated, {{target(g, amax, F)}}, R, F);
  };
  if (kind == ops::Activation::gelu) cast(Gelu{h, F});
  else cast(Swiglu{h, F});
}
inline void activation_backward_to_fp8(cudaStream_t stream, ops::Activation kind, const ops::Fp8Matrix& dh,
                                       const ops::Fp8Matrix& g, const bf16* dg, const bf16* h, float* amax,
                                       float* partials, int64_t R, int64_t F) {
  if (R == 0 || F == 0) return;
  const Fp8Target to_g = target(g, amax + 1, F);
  if (kind == ops::Activation::gelu) {
    const GeluGradients all{dg, h, F};
    largest_of(stream, amax, all, partials, R, F);
    cast_to_fp8(stream, all, {{target(dh, amax, F), to_g}}, R, F);
  } else {
    const SwigluGradients all{dg, h, F};
    const Fp8Target to_dh = target(dh, amax, 2 * F);
    largest_of(stream, amax, all, partials, R, F);
    cast_to_fp8(stream, all, {{to_dh, part_of(to_dh, F, R), to_g}}, R, F);
  }
}

}  // namespace gpu
