// wgmma: Hopper's matrix products (sm_90a), their operands' descriptors, and products of tiles made of them.
//
// A warpgroup multiplies 64 x 16 by 16 x N, asynchronously. Thread (warp w, lane 4g + c) holds of the 64 x N result,
// for each 8 columns i: d[4i], d[4i+1] = row 16w + g, columns 8i + 2c and the next; d[4i+2], d[4i+3] = row 16w + g + 8.
#pragma once

#include <cstdint>

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
namespace hopper {

__device__ inline void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int groups>
__device__ inline void wgmma_wait() {  // until at most that many of the latest groups are in flight
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}
// The compiler must not move reads of a result above the wait for it, nor writes below the product that reads them.
template <int N>
__device__ inline void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
__device__ inline void pin(uint32_t (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(d[i])::"memory");
}

// Matrix descriptor of the piece that starts `bytes` into a tile: address, the stride between panels (used only when
// the operand's columns span several), 1024 bytes between groups of 8 rows, 128-byte swizzle. `tile` is the tile's low
// word, so that stepping through it costs one addition.
__device__ inline uint32_t tile_word(uint32_t at, uint32_t panel_bytes = 0) { return at >> 4 | panel_bytes >> 4 << 16; }
__device__ inline uint64_t descriptor(uint32_t tile, uint32_t bytes) {
  return uint64_t(tile + (bytes >> 4)) | uint64_t(1u << 30 | 1024 >> 4) << 32;
}

// An accumulator of 32, 64 or 96 registers: its names in the text of an instruction, and its operands.
#define D8(c, d, i) c(d[i]), c(d[i + 1]), c(d[i + 2]), c(d[i + 3]), c(d[i + 4]), c(d[i + 5]), c(d[i + 6]), c(d[i + 7])
#define D32(c, d, i) D8(c, d, i), D8(c, d, i + 8), D8(c, d, i + 16), D8(c, d, i + 24)
#define R32                                                                                                        \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, " \
  "%24, %25, %26, %27, %28, %29, %30, %31"
#define R64                                                                                                         \
  R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, " \
      "%53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define R96                                                                                                         \
  R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, " \
      "%85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define OUT32(c) D32(c, d, 0)
#define OUT64(c) D32(c, d, 0), D32(c, d, 32)
#define OUT96(c) OUT64(c), D32(c, d, 64)
// ADD 0: a fresh product, which does not read d, and says so to the compiler, which would otherwise wait for the
// products before it. Both operands in shared memory (SS), or A in registers and B in shared memory, contracted over its
// rows (RS).
#define WGMMA_SS(N, LIST, A, B, TRANSPOSED, ADD, OUT)                                                         \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" LIST "}, %" #A ", %" #B ", " #ADD \
               ", 1, 1, %" #TRANSPOSED ", %" #TRANSPOSED ";"                                                  \
               : OUT                                                                                          \
               : "l"(a), "l"(b), "n"(transposed))
#define WGMMA_RS(N, LIST, A0, A1, A2, A3, B, ADD, OUT)                                                           \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" LIST "}, {%" #A0 ", %" #A1 ", %" #A2 \
               ", %" #A3 "}, %" #B ", " #ADD ", 1, 1, 1;"                                                        \
               : OUT                                                                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b))

// transposed 1: both contracted over their rows.
template <bool fresh, int transposed>
__device__ inline void wgmma_ss(float (&d)[32], uint64_t a, uint64_t b) {
  if constexpr (fresh) WGMMA_SS(64, R32, 32, 33, 34, 0, OUT32("=f"));
  else WGMMA_SS(64, R32, 32, 33, 34, 1, OUT32("+f"));
}
template <bool fresh, int transposed>
__device__ inline void wgmma_ss(float (&d)[64], uint64_t a, uint64_t b) {
  if constexpr (fresh) WGMMA_SS(128, R64, 64, 65, 66, 0, OUT64("=f"));
  else WGMMA_SS(128, R64, 64, 65, 66, 1, OUT64("+f"));
}
// d (+)= A B^T, contracted along D.
template <bool fresh, int N>
__device__ inline void wgmma_nt(float (&d)[N], uint64_t a, uint64_t b) {
  wgmma_ss<fresh, 0>(d, a, b);
}
// d (+)= A^T B, contracted over rows.
template <bool fresh, int N>
__device__ inline void wgmma_tn(float (&d)[N], uint64_t a, uint64_t b) {
  wgmma_ss<fresh, 1>(d, a, b);
}
// d (+)= A B: A in registers.
template <bool fresh>
__device__ inline void wgmma_nn(float (&d)[32], const uint32_t* a, uint64_t b) {
  if constexpr (fresh) WGMMA_RS(64, R32, 32, 33, 34, 35, 36, 0, OUT32("=f"));
  else WGMMA_RS(64, R32, 32, 33, 34, 35, 36, 1, OUT32("+f"));
}
template <bool fresh>
__device__ inline void wgmma_nn(float (&d)[64], const uint32_t* a, uint64_t b) {
  if constexpr (fresh) WGMMA_RS(128, R64, 64, 65, 66, 67, 68, 0, OUT64("=f"));
  else WGMMA_RS(128, R64, 64, 65, 66, 67, 68, 1, OUT64("+f"));
}
template <bool fresh>
__device__ inline void wgmma_nn(float (&d)[96], const uint32_t* a, uint64_t b) {
  if constexpr (fresh) WGMMA_RS(192, R96, 96, 97, 98, 99, 100, 0, OUT96("=f"));
  else WGMMA_RS(192, R96, 96, 97, 98, 99, 100, 1, OUT96("+f"));
}
// d (+)= A B, or A B^T: both in shared memory. add 0: a fresh product.
#define WGMMA_IF(TRANSPOSED)                                                                                       \
  asm volatile(                                                                                                    \
      "{\n.reg .pred p;\n"                                                                                         \
      "setp.ne.b32 p, %98, 0;\n"                                                                                   \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" R96 "}, %96, %97, p, 1, 1, 0, " #TRANSPOSED ";\n}" \
      : OUT96("+f")                                                                                                \
      : "l"(a), "l"(b), "r"(add))
__device__ inline void wgmma_nn_if(int add, float (&d)[96], uint64_t a, uint64_t b) { WGMMA_IF(1); }
__device__ inline void wgmma_nt_if(int add, float (&d)[96], uint64_t a, uint64_t b) { WGMMA_IF(0); }
#undef WGMMA_IF
#undef D8
#undef D32
#undef OUT32
#undef OUT64
#undef OUT96
#undef R32
#undef R64
#undef R96
#undef WGMMA_SS
#undef WGMMA_RS

// s = A B^T. A: 64 rows of a tile of RA; B: a whole tile of RB = N rows.
template <int D, int RA, int RB>
__device__ inline void multiply_nt(float (&s)[RB / 2], uint32_t a, uint32_t b) {
  a = tile_word(a), b = tile_word(b);
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint64_t at_a = descriptor(a, k / 4 * RA * 128 + k % 4 * 32), at_b = descriptor(b, k / 4 * RB * 128 + k % 4 * 32);
    if (k == 0) wgmma_nt<true>(s, at_a, at_b);
    else wgmma_nt<false>(s, at_a, at_b);
  }
}
// d += P B. P: 64 x N in registers, as `pack_rows` leaves it; B: a tile of N rows.
template <int D, int N>
__device__ inline void multiply_nn(float (&d)[D / 2], const uint32_t (&p)[N / 4], uint32_t b) {
  b = tile_word(b, N * 128);
#pragma unroll
  for (int k = 0; k < N / 16; ++k) wgmma_nn<false>(d, p + 4 * k, descriptor(b, k * 16 * 128));
}
// d = P B. P: 64 x 64 in registers, as pack_rows leaves it; B: a tile of 64 rows.
template <int D>
__device__ inline void multiply_nn_fresh(float (&d)[D / 2], const uint32_t (&p)[16], uint32_t b) {
  b = tile_word(b, 64 * 128);
  wgmma_nn<true>(d, p, descriptor(b, 0));
#pragma unroll
  for (int k = 1; k < 4; ++k) wgmma_nn<false>(d, p + 4 * k, descriptor(b, k * 16 * 128));
}
// d = A^T B. A: a panel of 64 rows; B: a tile of 64 rows.
template <int D>
__device__ inline void multiply_tn(float (&d)[D / 2], uint32_t a, uint32_t b) {
  a = tile_word(a), b = tile_word(b, 64 * 128);
  wgmma_tn<true>(d, descriptor(a, 0), descriptor(b, 0));
#pragma unroll
  for (int k = 1; k < 4; ++k) wgmma_tn<false>(d, descriptor(a, k * 16 * 128), descriptor(b, k * 16 * 128));
}

}  // namespace hopper
#endif  // sm_90a
