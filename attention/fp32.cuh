// Attention in float, without tensor cores: any D up to 128 that 8 divides. For fp32 training and for checks.
//
// Every kernel is 256 threads over a tile of 64 x 64 scores; thread (ty, tx) of 16 x 16 owns rows ty + 16 i and columns
// tx + 16 j of it, and of the 64 x D sums the same rows and columns 4 tx + 64 j to 4 tx + 64 j + 3. Tiles lie in shared
// memory row by row, padded by 4, so that the 16 threads of a row read 16-byte words from different banks. A product
// reads 8 such words for 64 multiply-adds. Tiles have D of 64 or 128 columns; those past the head's are zero. Shapes:
// o, q, do, dq (B,T,H,D); k, v, dk, dv (B,keys,HKV,D); lse (B,H,T); lse2, delta (B,H,Tp).
#pragma once

#include "attention/tiles.cuh"

namespace attention::fp32 {

constexpr int side = 64, own = 4, threads = 256;

template <int N>
using Tile = float[side][N + 4];
using Scores = float[own][own];
template <int D>
using Sums = float[own][D / 64][4];

struct Place {
  int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
  __device__ int row(int i) const { return ty + 16 * i; }
  __device__ int column(int j) const { return tx + 16 * j; }
};

// Rows [0, valid) of `D_of` numbers; what is past them becomes zero. Reads and writes each number once.
template <int D>
__device__ inline void load(Tile<D>& to, const float* from, int64_t ld, int valid, int D_of) {
  for (int i = threadIdx.x; i < side * D / 4; i += threads) {
    const int r = i / (D / 4), c = i % (D / 4) * 4;
    float4 x = {0, 0, 0, 0};
    if (r < valid && c < D_of) x = *reinterpret_cast<const float4*>(from + r * ld + c);
    *reinterpret_cast<float4*>(&to[r][c]) = x;
  }
}

// s = a b^T, over D.
template <int D>
__device__ inline void multiply(Scores& s, const Tile<D>& a, const Tile<D>& b, Place at) {
#pragma unroll
  for (int i = 0; i < own; ++i)
#pragma unroll
    for (int j = 0; j < own; ++j) s[i][j] = 0;
#pragma unroll 4
  for (int d = 0; d < D; d += 4) {
    float4 x[own], y[own];
#pragma unroll
    for (int i = 0; i < own; ++i) x[i] = *reinterpret_cast<const float4*>(&a[at.row(i)][d]);
#pragma unroll
    for (int j = 0; j < own; ++j) y[j] = *reinterpret_cast<const float4*>(&b[at.column(j)][d]);
#pragma unroll
    for (int i = 0; i < own; ++i)
#pragma unroll
      for (int j = 0; j < own; ++j) {
        s[i][j] = fmaf(x[i].x, y[j].x, s[i][j]), s[i][j] = fmaf(x[i].y, y[j].y, s[i][j]);
        s[i][j] = fmaf(x[i].z, y[j].z, s[i][j]), s[i][j] = fmaf(x[i].w, y[j].w, s[i][j]);
      }
  }
}

// sum += p b, over the 64 columns of p. A row of p is written and read by the same half warp.
template <int D>
__device__ inline void accumulate(Sums<D>& sum, const Tile<side>& p, const Tile<D>& b, Place at) {
#pragma unroll 2
  for (int k = 0; k < side; k += 4) {
    float x[own][4];
#pragma unroll
    for (int i = 0; i < own; ++i) *reinterpret_cast<float4*>(x[i]) = *reinterpret_cast<const float4*>(&p[at.row(i)][k]);
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
      for (int j = 0; j < D / 64; ++j) {
        const float4 y = *reinterpret_cast<const float4*>(&b[k + e][4 * at.tx + 64 * j]);
#pragma unroll
        for (int i = 0; i < own; ++i) {
          sum[i][j][0] = fmaf(x[i][e], y.x, sum[i][j][0]), sum[i][j][1] = fmaf(x[i][e], y.y, sum[i][j][1]);
          sum[i][j][2] = fmaf(x[i][e], y.z, sum[i][j][2]), sum[i][j][3] = fmaf(x[i][e], y.w, sum[i][j][3]);
        }
      }
  }
}

__device__ inline void store(Tile<side>& to, const Scores& s, Place at) {
  __syncwarp();  // the last reader of these rows
#pragma unroll
  for (int i = 0; i < own; ++i)
#pragma unroll
    for (int j = 0; j < own; ++j) to[at.row(i)][at.column(j)] = s[i][j];
  __syncwarp();
}

// A row of sums, times f, to `D_of` numbers at `to`.
template <int D>
__device__ inline void write_row(float* to, const float (&sum)[D / 64][4], float f, int D_of, Place at) {
#pragma unroll
  for (int j = 0; j < D / 64; ++j) {
    const int c = 4 * at.tx + 64 * j;
    if (c < D_of) *reinterpret_cast<float4*>(to + c) = {sum[j][0] * f, sum[j][1] * f, sum[j][2] * f, sum[j][3] * f};
  }
}

// Over the 16 threads of a row.
template <class F>
__device__ inline float over_row(float x, F f) {
#pragma unroll
  for (int lane = 8; lane; lane /= 2) x = f(x, __shfl_xor_sync(~0u, x, lane));
  return x;
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
  Tile<D> q, k, v;
  Tile<side> p;
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
  float top[own], sum[own] = {};
#pragma unroll
  for (int i = 0; i < own; ++i) top[i] = -INFINITY;
  for (int k0 = mask.first_key(q0) / side * side; k0 < mask.last_key(q0 + side); k0 += side) {
    __syncthreads();
    const int64_t kv = (int64_t(item.b) * a.keys + k0) * a.ld_kv + h / a.group * a.D;
    load<D>(tile.k, k + kv, a.ld_kv, a.keys - k0, a.D);
    load<D>(tile.v, v + kv, a.ld_kv, a.keys - k0, a.D);
    __syncthreads();
    Scores s;
    multiply<D>(s, tile.q, tile.k, at);
    const bool whole = k0 + side <= a.keys && mask.whole(q0, q0 + side, k0, k0 + side);
#pragma unroll
    for (int i = 0; i < own; ++i) {
      float m = top[i];
#pragma unroll
      for (int j = 0; j < own; ++j) {
        const int key = k0 + at.column(j);
        const bool seen = whole || (key < a.keys && mask.visible(q0 + at.row(i), key));
        s[i][j] = seen ? s[i][j] * a.scale : -INFINITY;
        m = fmaxf(m, s[i][j]);
      }
      m = over_row(m, [](float x, float y) { return fmaxf(x, y); });
      const float factor = m == -INFINITY ? 1.f : expf(top[i] - m);  // the same for the whole row
      sum[i] *= factor;
#pragma unroll
      for (int j = 0; j < own; ++j) {
        s[i][j] = m == -INFINITY ? 0.f : expf(s[i][j] - m);
        sum[i] += s[i][j];
      }
      top[i] = m;
#pragma unroll
      for (int j = 0; j < D / 64; ++j)
#pragma unroll
        for (float& x : acc[i][j]) x *= factor;
    }
    store(tile.p, s, at);
    accumulate<D>(acc, tile.p, tile.v, at);
  }
#pragma unroll
  for (int i = 0; i < own; ++i) {
    const int t = q0 + at.row(i);
    const float all = over_row(sum[i], [](float x, float y) { return x + y; });
    if (t >= a.T) continue;
    float* to = o + (int64_t(item.b) * a.T + t) * a.ld_o + h * a.D;
    write_row<D>(to, acc[i], all > 0 ? 1 / all : 0.f, a.D, at);
    if (at.tx == 0) lse[int64_t(item.b * a.H + h) * a.T + t] = all > 0 ? top[i] + logf(all) : -INFINITY;
  }
}

template <int D>
struct BackwardTiles {
  Tile<D> q, d_o, k, v;
  Tile<side> p;
};

// The block's 64 keys against all queries of the group's heads that see them; rows of the scores are keys.
template <int D, class Mask>
__global__ void __launch_bounds__(threads)
    backward_kv(float* dk, float* dv, const float* d_o, const float* q, const float* k, const float* v,
                const float* lse2, const float* delta, Problem a, Mask mask) {
  extern __shared__ char memory[];
  BackwardTiles<D>& tile = *reinterpret_cast<BackwardTiles<D>*>(memory);
  const Place at;
  const Item item(a.HKV, a.keys);
  const int k0 = item.first, head = item.head;
  const int64_t kv = (int64_t(item.b) * a.keys + k0) * a.ld_kv + head * a.D;
  load<D>(tile.k, k + kv, a.ld_kv, a.keys - k0, a.D);
  load<D>(tile.v, v + kv, a.ld_kv, a.keys - k0, a.D);
  Sums<D> dk_acc = {}, dv_acc = {};
  for (int h = head * a.group; h < (head + 1) * a.group; ++h)
    for (int q0 = mask.first_query(k0) / side * side; q0 < mask.last_query(k0 + side); q0 += side) {
      __syncthreads();
      const int64_t row = int64_t(item.b) * a.T + q0, stats = int64_t(item.b * a.H + h) * a.Tp + q0;
      load<D>(tile.q, q + row * a.ld_q + h * a.D, a.ld_q, a.T - q0, a.D);
      load<D>(tile.d_o, d_o + row * a.ld_o + h * a.D, a.ld_o, a.T - q0, a.D);
      __syncthreads();
      const bool whole = k0 + side <= a.keys && q0 + side <= a.T && mask.whole(q0, q0 + side, k0, k0 + side);
      Scores p, ds;
      multiply<D>(p, tile.k, tile.q, at);
#pragma unroll
      for (int i = 0; i < own; ++i)
#pragma unroll
        for (int j = 0; j < own; ++j) {
          const int t = q0 + at.column(j), key = k0 + at.row(i);
          const bool seen = whole || (t < a.T && key < a.keys && mask.visible(t, key));
          p[i][j] = seen ? exp2f(p[i][j] * a.scale_log2 - lse2[stats + at.column(j)]) : 0.f;
        }
      store(tile.p, p, at);
      accumulate<D>(dv_acc, tile.p, tile.d_o, at);
      multiply<D>(ds, tile.v, tile.d_o, at);
#pragma unroll
      for (int i = 0; i < own; ++i)
#pragma unroll
        for (int j = 0; j < own; ++j) ds[i][j] = p[i][j] * (ds[i][j] - delta[stats + at.column(j)]);
      store(tile.p, ds, at);
      accumulate<D>(dk_acc, tile.p, tile.q, at);
    }
#pragma unroll
  for (int i = 0; i < own; ++i) {
    if (k0 + at.row(i) >= a.keys) continue;
    const int64_t to = (int64_t(item.b) * a.keys + k0 + at.row(i)) * a.ld_dkv + head * a.D;
    write_row<D>(dk + to, dk_acc[i], a.scale, a.D, at);
    write_row<D>(dv + to, dv_acc[i], 1, a.D, at);
  }
}

template <int D, class Mask>
__global__ void __launch_bounds__(threads)
    backward_q(float* dq, const float* d_o, const float* q, const float* k, const float* v, const float* lse2,
               const float* delta, Problem a, Mask mask) {
  extern __shared__ char memory[];
  BackwardTiles<D>& tile = *reinterpret_cast<BackwardTiles<D>*>(memory);
  const Place at;
  const Item item(a.H, a.T);
  const int q0 = item.first, h = item.head;
  const int64_t row = int64_t(item.b) * a.T + q0, stats = int64_t(item.b * a.H + h) * a.Tp + q0;
  load<D>(tile.q, q + row * a.ld_q + h * a.D, a.ld_q, a.T - q0, a.D);
  load<D>(tile.d_o, d_o + row * a.ld_o + h * a.D, a.ld_o, a.T - q0, a.D);
  float lse_of[own], delta_of[own];  // Tp is a multiple of the tile
#pragma unroll
  for (int i = 0; i < own; ++i) lse_of[i] = lse2[stats + at.row(i)], delta_of[i] = delta[stats + at.row(i)];
  Sums<D> acc = {};
  for (int k0 = mask.first_key(q0) / side * side; k0 < mask.last_key(q0 + side); k0 += side) {
    __syncthreads();
    const int64_t kv = (int64_t(item.b) * a.keys + k0) * a.ld_kv + h / a.group * a.D;
    load<D>(tile.k, k + kv, a.ld_kv, a.keys - k0, a.D);
    load<D>(tile.v, v + kv, a.ld_kv, a.keys - k0, a.D);
    __syncthreads();
    const bool whole = k0 + side <= a.keys && mask.whole(q0, q0 + side, k0, k0 + side);
    Scores p, ds;
    multiply<D>(p, tile.q, tile.k, at);
    multiply<D>(ds, tile.d_o, tile.v, at);
#pragma unroll
    for (int i = 0; i < own; ++i)
#pragma unroll
      for (int j = 0; j < own; ++j) {
        const int key = k0 + at.column(j);
        const bool seen = whole || (key < a.keys && mask.visible(q0 + at.row(i), key));
        ds[i][j] = seen ? exp2f(p[i][j] * a.scale_log2 - lse_of[i]) * (ds[i][j] - delta_of[i]) : 0.f;
      }
    store(tile.p, ds, at);
    accumulate<D>(acc, tile.p, tile.k, at);
  }
#pragma unroll
  for (int i = 0; i < own; ++i)
    if (q0 + at.row(i) < a.T) write_row<D>(dq + (row + at.row(i)) * a.ld_dq + h * a.D, acc[i], a.scale, a.D, at);
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
