// Attention in float: any D up to 128 that 8 divides. For fp32 training and for checks.
//
// Tensor cores take no floats, but they take TF32, whose 11 bits multiply exactly. A float is a TF32 number and a rest
// that is one too, to 2^-23 of it; of the four products of two such pairs the three that count are summed in fp32
// (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical
// peak performance", 2022, section 3). So a product takes three on tensor cores; on the other units it would read 2
// bytes of shared memory for each multiply-add, twice as many as there is time for.
//
// Every kernel is 4 warps over tiles of 64 x `step` scores, 16 rows a warp: 64 rows are its own, and it walks along the
// others. Lane 4 g + t owns rows g and g + 8 of its warp's, and columns 8 n + 2 t and the next of them, as the
// instruction m16n8k8 lays its sums out; of the 64 x D sums the same. As a left factor, scores stay where they are: the
// order of a sum's terms is free, so lane t's terms t and t + 4 are columns 2 t and 2 t + 1. Tiles lie in shared memory
// row by row, padded by 4, so that a warp reads 32 banks both along rows and across them. They have D of 64 or 128
// columns; those past the head's are zero. Shapes: o, q, do, dq (B,T,H,D); k, v, dk, dv (B,keys,HKV,D); lse (B,H,T);
// lse2, delta (B,H,Tp).
#pragma once

#include "attention/tiles.cuh"

namespace attention::fp32 {

constexpr int side = 64, threads = 128;
// Rows that a walk takes at a time: of 64, the sums and scores of a wide head would not fit the registers.
constexpr int step(int D) { return D > 64 ? 32 : 64; }

template <int R, int D>
using Tile = float[R][D + 4];
template <int D>
using Sums = float[D / 8][4];
template <int D>
using Scores = float[step(D) / 8][4];

struct Place {
  int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  __device__ int row(int i) const { return int(threadIdx.x) / 32 * 16 + g + 8 * i; }  // of a sum's [2 i] and [2 i + 1]
  __device__ int column(int n, int c) const { return 8 * n + 2 * t + c % 2; }         // of [n][c]
};

// Rows [0, valid) of `D_of` numbers; what is past them becomes zero. Reads and writes each number once.
template <int D, int R>
__device__ inline void load(Tile<R, D>& to, const float* from, int64_t ld, int valid, int D_of) {
#pragma unroll 4
  for (int n = 0; n < R * D / 4 / threads; ++n) {
    const int i = threadIdx.x + n * threads, r = i / (D / 4), c = i % (D / 4) * 4;
    float4 x = {0, 0, 0, 0};
    if (r < valid && c < D_of) x = *reinterpret_cast<const float4*>(from + r * ld + c);
    *reinterpret_cast<float4*>(&to[r][c]) = x;
  }
}

// x as a TF32 number and the rest. Tensor cores leave out the last 13 bits of what they read.
template <int N>
struct Pair {
  uint32_t high[N], rest[N];
  __device__ explicit Pair(const float (&x)[N]) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      high[i] = (__float_as_uint(x[i]) + 0x1000) & 0xffffe000;
      rest[i] = __float_as_uint(x[i] - __uint_as_float(high[i]));
    }
  }
};

// c += a b: 16 x 8 sums of 8 terms, in TF32. Lane 4 g + t has terms t and t + 4 of a's rows g and g + 8, and of b's
// column g.
__device__ inline void mma(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// The same of floats, the small products first. Tensor cores cut their sums off where others round: eight terms are
// summed there, and added to the rest here.
__device__ inline void mma(float (&c)[4], const Pair<4>& a, const Pair<2>& b) {
  float sum[4] = {0, 0, 0, 0};
  mma(sum, a.rest, b.high);
  mma(sum, a.high, b.rest);
  mma(sum, a.high, b.high);
#pragma unroll
  for (int i = 0; i < 4; ++i) c[i] += sum[i];
}

// s = a b^T, over D.
template <int D>
__device__ inline void multiply(Scores<D>& s, const Tile<side, D>& a, const Tile<step(D), D>& b, Place at) {
#pragma unroll
  for (auto& sums : s)
#pragma unroll
    for (float& x : sums) x = 0;
  const int r0 = at.row(0), r1 = at.row(1);
#pragma unroll 1
  for (int first = 0; first < D; first += 8) {
    const int d = first + at.t;
    const Pair<4> x({a[r0][d], a[r1][d], a[r0][d + 4], a[r1][d + 4]});
#pragma unroll
    for (int n = 0; n < step(D) / 8; ++n) mma(s[n], x, Pair<2>({b[8 * n + at.g][d], b[8 * n + at.g][d + 4]}));
  }
}

// sum += p b, over the columns of p.
template <int D>
__device__ inline void accumulate(Sums<D>& sum, const Scores<D>& p, const Tile<step(D), D>& b, Place at) {
#pragma unroll
  for (int k = 0; k < step(D) / 8; ++k) {
    const Pair<4> x({p[k][0], p[k][2], p[k][1], p[k][3]});
    const int r = at.column(k, 0);
#pragma unroll
    for (int n = 0; n < D / 8; ++n) mma(sum[n], x, Pair<2>({b[r][8 * n + at.g], b[r + 1][8 * n + at.g]}));
  }
}

// Row i of sums, times f, to `D_of` numbers at `to`.
template <int D>
__device__ inline void write_row(float* to, const Sums<D>& sum, int i, float f, int D_of, Place at) {
#pragma unroll
  for (int n = 0; n < D / 8; ++n)
    if (8 * n < D_of) *reinterpret_cast<float2*>(to + at.column(n, 0)) = {sum[n][2 * i] * f, sum[n][2 * i + 1] * f};
}

// Over the 4 lanes of a row.
template <class F>
__device__ inline float over_row(float x, F f) {
  x = f(x, __shfl_xor_sync(~0u, x, 2));
  return f(x, __shfl_xor_sync(~0u, x, 1));
}

// Which block this is: a tile of 64 rows of one head of one sequence. The heads of a group stand beside each other.
struct Item {
  int head, first, b;
  __device__ Item(int heads, int rows) {
    const int n = ceil_div(rows, side);
    head = blockIdx.x % heads, first = blockIdx.x / heads % n * side, b = blockIdx.x / heads / n;
  }
};

template <int D>
struct ForwardTiles {
  Tile<side, D> q;
  Tile<step(D), D> k, v;
};

template <int D, class Mask>
__global__ void __launch_bounds__(threads)
    forward_kernel(float* o, float* lse, const float* q, const float* k, const float* v, Problem a, Mask mask) {
  extern __shared__ char memory[];
  ForwardTiles<D>& tile = *reinterpret_cast<ForwardTiles<D>*>(memory);
  const Place at;
  const Item item(a.H, a.T);
  const int q0 = item.first, h = item.head;
  load<D>(tile.q, q + (int64_t(item.b) * a.T + q0) * a.ld_q + h * a.D, a.ld_q, a.T - q0, a.D);
  Sums<D> acc = {};
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  for (int k0 = mask.first_key(q0) / step(D) * step(D); k0 < mask.last_key(q0 + side); k0 += step(D)) {
    __syncthreads();
    const int64_t kv = (int64_t(item.b) * a.keys + k0) * a.ld_kv + h / a.group * a.D;
    load<D>(tile.k, k + kv, a.ld_kv, a.keys - k0, a.D);
    load<D>(tile.v, v + kv, a.ld_kv, a.keys - k0, a.D);
    __syncthreads();
    Scores<D> s;
    multiply<D>(s, tile.q, tile.k, at);
    const bool whole = k0 + step(D) <= a.keys && mask.whole(q0, q0 + side, k0, k0 + step(D));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float m = top[i];
#pragma unroll
      for (int n = 0; n < step(D) / 8; ++n)
#pragma unroll
        for (int c = 2 * i; c < 2 * i + 2; ++c) {
          const int key = k0 + at.column(n, c);
          const bool seen = whole || (key < a.keys && mask.visible(q0 + at.row(i), key));
          s[n][c] = seen ? s[n][c] * a.scale : -INFINITY;
          m = fmaxf(m, s[n][c]);
        }
      m = over_row(m, [](float x, float y) { return fmaxf(x, y); });
      const float factor = m == -INFINITY ? 1.f : expf(top[i] - m);  // the same for the whole row
      sum[i] *= factor;
#pragma unroll
      for (int n = 0; n < step(D) / 8; ++n)
#pragma unroll
        for (int c = 2 * i; c < 2 * i + 2; ++c) {
          s[n][c] = m == -INFINITY ? 0.f : expf(s[n][c] - m);
          sum[i] += s[n][c];
        }
      top[i] = m;
#pragma unroll
      for (int n = 0; n < D / 8; ++n) acc[n][2 * i] *= factor, acc[n][2 * i + 1] *= factor;
    }
    accumulate<D>(acc, s, tile.v, at);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = q0 + at.row(i);
    const float all = over_row(sum[i], [](float x, float y) { return x + y; });
    if (t >= a.T) continue;
    float* to = o + (int64_t(item.b) * a.T + t) * a.ld_o + h * a.D;
    write_row<D>(to, acc, i, all > 0 ? 1 / all : 0.f, a.D, at);
    if (at.t == 0) lse[int64_t(item.b * a.H + h) * a.T + t] = all > 0 ? top[i] + logf(all) : -INFINITY;
  }
}

// own: k and v where keys are, or q and do; walked: the others.
template <int D>
struct BackwardTiles {
  Tile<side, D> own[2];
  Tile<step(D), D> walked[2];
};

// The block's 64 keys against all queries of the group's heads that see them; rows of the scores are keys.
template <int D, class Mask>
__global__ void __launch_bounds__(threads)
    backward_kv(float* dk, float* dv, const float* d_o, const float* q, const float* k, const float* v,
                const float* lse2, const float* delta, Problem a, Mask mask) {
  extern __shared__ char memory[];
  BackwardTiles<D>& tile = *reinterpret_cast<BackwardTiles<D>*>(memory);
  auto& [k_tile, v_tile] = tile.own;
  auto& [q_tile, do_tile] = tile.walked;
  const Place at;
  const Item item(a.HKV, a.keys);
  const int k0 = item.first, head = item.head;
  const int64_t kv = (int64_t(item.b) * a.keys + k0) * a.ld_kv + head * a.D;
  load<D>(k_tile, k + kv, a.ld_kv, a.keys - k0, a.D);
  load<D>(v_tile, v + kv, a.ld_kv, a.keys - k0, a.D);
  Sums<D> dk_acc = {}, dv_acc = {};
  for (int h = head * a.group; h < (head + 1) * a.group; ++h)
    for (int q0 = mask.first_query(k0) / step(D) * step(D); q0 < mask.last_query(k0 + side); q0 += step(D)) {
      __syncthreads();
      const int64_t row = int64_t(item.b) * a.T + q0, stats = int64_t(item.b * a.H + h) * a.Tp + q0;
      load<D>(q_tile, q + row * a.ld_q + h * a.D, a.ld_q, a.T - q0, a.D);
      load<D>(do_tile, d_o + row * a.ld_o + h * a.D, a.ld_o, a.T - q0, a.D);
      __syncthreads();
      const bool whole = k0 + side <= a.keys && q0 + step(D) <= a.T && mask.whole(q0, q0 + step(D), k0, k0 + side);
      Scores<D> p, ds;
      multiply<D>(p, k_tile, q_tile, at);
#pragma unroll
      for (int n = 0; n < step(D) / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          const int column = at.column(n, c), t = q0 + column, key = k0 + at.row(c / 2);
          const bool seen = whole || (t < a.T && key < a.keys && mask.visible(t, key));
          p[n][c] = seen ? exp2f(p[n][c] * a.scale_log2 - lse2[stats + column]) : 0.f;
        }
      accumulate<D>(dv_acc, p, do_tile, at);
      multiply<D>(ds, v_tile, do_tile, at);
#pragma unroll
      for (int n = 0; n < step(D) / 8; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) ds[n][c] = p[n][c] * (ds[n][c] - delta[stats + at.column(n, c)]);
      accumulate<D>(dk_acc, ds, q_tile, at);
    }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (k0 + at.row(i) >= a.keys) continue;
    const int64_t to = (int64_t(item.b) * a.keys + k0 + at.row(i)) * a.ld_dkv + head * a.D;
    write_row<D>(dk + to, dk_acc, i, a.scale, a.D, at);
    write_row<D>(dv + to, dv_acc, i, 1, a.D, at);
  }
}

template <int D, class Mask>
__global__ void __launch_bounds__(threads)
    backward_q(float* dq, const float* d_o, const float* q, const float* k, const float* v, const float* lse2,
               const float* delta, Problem a, Mask mask) {
  extern __shared__ char memory[];
  BackwardTiles<D>& tile = *reinterpret_cast<BackwardTiles<D>*>(memory);
  auto& [q_tile, do_tile] = tile.own;
  auto& [k_tile, v_tile] = tile.walked;
  const Place at;
  const Item item(a.H, a.T);
  const int q0 = item.first, h = item.head;
  const int64_t row = int64_t(item.b) * a.T + q0, stats = int64_t(item.b * a.H + h) * a.Tp + q0;
  load<D>(q_tile, q + row * a.ld_q + h * a.D, a.ld_q, a.T - q0, a.D);
  load<D>(do_tile, d_o + row * a.ld_o + h * a.D, a.ld_o, a.T - q0, a.D);
  float lse_of[2], delta_of[2];  // Tp is a multiple of the tile
#pragma unroll
  for (int i = 0; i < 2; ++i) lse_of[i] = lse2[stats + at.row(i)], delta_of[i] = delta[stats + at.row(i)];
  Sums<D> acc = {};
  for (int k0 = mask.first_key(q0) / step(D) * step(D); k0 < mask.last_key(q0 + side); k0 += step(D)) {
    __syncthreads();
    const int64_t kv = (int64_t(item.b) * a.keys + k0) * a.ld_kv + h / a.group * a.D;
    load<D>(k_tile, k + kv, a.ld_kv, a.keys - k0, a.D);
    load<D>(v_tile, v + kv, a.ld_kv, a.keys - k0, a.D);
    __syncthreads();
    const bool whole = k0 + step(D) <= a.keys && mask.whole(q0, q0 + side, k0, k0 + step(D));
    Scores<D> p, ds;
    multiply<D>(p, q_tile, k_tile, at);
    multiply<D>(ds, do_tile, v_tile, at);
#pragma unroll
    for (int n = 0; n < step(D) / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const int key = k0 + at.column(n, c), i = c / 2;
        const bool seen = whole || (key < a.keys && mask.visible(q0 + at.row(i), key));
        ds[n][c] = seen ? exp2f(p[n][c] * a.scale_log2 - lse_of[i]) * (ds[n][c] - delta_of[i]) : 0.f;
      }
    accumulate<D>(acc, ds, k_tile, at);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (q0 + at.row(i) < a.T) write_row<D>(dq + (row + at.row(i)) * a.ld_dq + h * a.D, acc, i, a.scale, a.D, at);
}

template <class Kernel, class... Args>
void launch(cudaStream_t stream, Kernel kernel, int blocks, int bytes, const Args&... args) {
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<blocks, threads, bytes, stream>>>(args...);
  CUDA_CHECK_LAUNCH();
}

template <int D, class Mask>
void forward(cudaStream_t stream, float* o, float* lse, const float* q, const float* k, const float* v,
             const Problem& a, const Mask& mask) {
  launch(stream, forward_kernel<D, Mask>, a.B * a.H * ceil_div(a.T, side), sizeof(ForwardTiles<D>), o, lse, q, k, v, a,
         mask);
}

template <int D, class Mask>
void backward(cudaStream_t stream, float* dq, float* dk, float* dv, const float* d_o, const float* q, const float* k,
              const float* v, const float* lse2, const float* delta, const Problem& a, const Mask& mask) {
  launch(stream, backward_kv<D, Mask>, a.B * a.HKV * ceil_div(a.keys, side), sizeof(BackwardTiles<D>), dk, dv, d_o, q,
         k, v, lse2, delta, a, mask);
  launch(stream, backward_q<D, Mask>, a.B * a.H * ceil_div(a.T, side), sizeof(BackwardTiles<D>), dq, d_o, q, k, v, lse2,
         delta, a, mask);
}

}  // namespace attention::fp32
