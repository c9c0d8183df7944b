// Attention in float: any D up to 128 that 8 divides. For fp32 training and for checks.
//
// Tensor cores take no floats, but they take TF32, whose 11 bits multiply exactly. A float is a TF32 number and a rest
// that is one too, to 2^-23 of it; of the four products of two such pairs the three that count are summed in fp32
// (Ootomo and Yokota, "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical
// peak performance", 2022, section 3). So a product takes three on tensor cores; on the other units it would read 2
// bytes of shared memory for each multiply-add, twice as many as there is time for.
//
// In every kernel 4 warps make tiles of 64 x `step` scores, 16 rows a warp: 64 rows are their own, and they walk along
// the others. Lane 4 g + t owns rows g and g + 8 of its warp's, and columns 2 t and 2 t + 1 of every 8, as the
// instruction m16n8k8 lays its sums out; of the 64 x D sums the same. Which row or column of a tile that is, is free,
// and so is the order of a sum's terms: see column(), multiply() and accumulate(). So scores stay where they are as a
// left factor, and a lane reads 8 or 16 bytes at a time. Tiles lie in shared memory row by row, padded so that lanes
// that read together do from 32 banks. They have D of 64 or 128 columns; those past the head's are zero. Shapes: o, q,
// do, dq (B,T,H,D); k, v, dk, dv (B,keys,HKV,D); lse (B,H,T); lse2, delta (B,H,Tp).
#pragma once

#include "attention/tiles.cuh"

namespace attention::fp32 {

constexpr int side = 64, threads = 128;
// How many times 4 warps the registers of a multiprocessor hold, and where tiles must be small its shared memory.
constexpr int teams(int D, int step) { return step == 16 ? 1 : D > 64 ? 2 : 3; }

template <int R, int D>
using Tile = float[R][D + (R == side ? 16 : 8)];
template <int D>
using Sums = float[D / 8][4];
template <int step>
using Scores = float[step / 8][4];

// Which of 8 rows or columns of a walked tile is the instruction's column i. In this order, and with 8 words after each
// row, lanes read from 32 banks along rows, 16 bytes each, and across those of even i or of odd i, 8 bytes each. A
// block's own tiles are read along rows as they come, and have 16 words there.
__device__ inline int column(int i) { return i % 2 ? 4 + (i / 2 ^ 2) : i / 2; }

struct Place {
  int thread = threadIdx.x % threads, g = thread % 32 / 4, t = thread % 4;
  __device__ int first() const { return thread / 32 * 16; }        // row of the warp
  __device__ int row(int i) const { return first() + g + 8 * i; }  // of a sum's [2 i] and [2 i + 1]
  __device__ int column(int n, int c) const { return 8 * n + fp32::column(2 * t + c % 2); }  // of a score's [n][c]
};

// A walk's statistics; their rows end with a whole tile.
template <int step>
__device__ inline void load(float (&to)[step], const float* from, Place at) {
  const int i = at.thread * 4;
  if (i < step) copy16(to + i, from + i);
}

// Rows [0, valid) of `D_of` numbers; what is past them becomes zero. The copies are under way until copies_wait_all().
template <int D, int R>
__device__ inline void load(Tile<R, D>& to, const float* from, int64_t ld, int valid, int D_of, Place at) {
  constexpr int rows = threads / (D / 4);  // at a time
  const int r = at.thread / (D / 4), c = at.thread % (D / 4) * 4;
  const int left = c < D_of ? valid - r : 0;
  const float* x = from + (left > 0 ? r * ld + c : 0);
  const uint32_t y = uint32_t(__cvta_generic_to_shared(&to[r][c]));
#pragma unroll
  for (int n = 0; n < R / rows; ++n) {
    copy16(y + n * rows * sizeof(to[0]), x, n * rows < left);
    if ((n + 1) * rows < left) x += rows * ld;
  }
}

// Waits for the block's part, which alone shares what it loads.
__device__ inline void sync(int part) {
  const int id = part + 1, n = threads;
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(n) : "memory");
}

__device__ inline float2 read2(const float* x) { return *reinterpret_cast<const float2*>(x); }
__device__ inline float4 read4(const float* x) { return *reinterpret_cast<const float4*>(x); }

// x as a TF32 number and the rest. Tensor cores leave out the last 13 bits of what they read.
template <int N>
struct Pair {
  uint32_t high[N], rest[N];
  Pair() = default;
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
// The same of 16 terms in floats, for N sums that follow each other: a product's instructions wait for each other, and
// the other sums' fill the time. Small products first. Tensor cores cut their sums off where others round: sixteen
// terms are summed there, and added to the rest here.
template <int N>
__device__ inline void mma(float (*c)[4], const Pair<4> (&a)[2], const Pair<2> (&b)[2][N]) {
  float sum[N][4] = {};
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int n = 0; n < N; ++n) mma(sum[n], a[k].rest, b[k][n].high);
#pragma unroll
    for (int n = 0; n < N; ++n) mma(sum[n], a[k].high, b[k][n].rest);
  }
#pragma unroll
  for (int k = 0; k < 2; ++k)
#pragma unroll
    for (int n = 0; n < N; ++n) mma(sum[n], a[k].high, b[k][n].high);
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) c[n][i] += sum[n][i];
}

// s = a b^T, over D. Of 16 columns lane t has four that follow each other, as terms t and t + 4 of two instructions.
template <int D, int step>
__device__ inline void multiply(Scores<step>& s, const Tile<side, D>& a, const Tile<step, D>& b, Place at) {
#pragma unroll
  for (auto& sums : s)
#pragma unroll
    for (float& x : sums) x = 0;
  const float *a0 = &a[at.row(0)][4 * at.t], *a1 = &a[at.row(1)][4 * at.t], *b0 = &b[column(at.g)][4 * at.t];
#pragma unroll 1
  for (int d = 0; d < D; d += 16) {
    const float4 u = read4(a0 + d), v = read4(a1 + d);
    const Pair<4> x[2] = {Pair<4>({u.x, v.x, u.y, v.y}), Pair<4>({u.z, v.z, u.w, v.w})};
    Pair<2> y[2][step / 8];
#pragma unroll
    for (int n = 0; n < step / 8; ++n) {
      const float4 w = read4(b0 + d + n * 8 * sizeof(b[0]) / sizeof(float));
      y[0][n] = Pair<2>({w.x, w.y}), y[1][n] = Pair<2>({w.z, w.w});
    }
    mma(s, x, y);
  }
}

// Scores of what is not seen(row, column) become -inf.
template <int step, class F>
__device__ inline void hide(Scores<step>& s, Place at, F seen) {
#pragma unroll
  for (int n = 0; n < step / 8; ++n)
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (!seen(at.row(c / 2), at.column(n, c))) s[n][c] = -INFINITY;
}

// sum += p b, over columns [from, to) of p; this warp's others are zero. Sum n's column i is column 2 i + n % 2 of 16.
// (Where the compiler cannot join the turns of the outer loop, it needs fewer registers besides.)
template <int D, int step>
__device__ inline void accumulate(Sums<D>& sum, const Scores<step>& p, const Tile<step, D>& b, int from, int to,
                                  Place at) {
  constexpr int together = 4;
#pragma unroll
  for (int k = 0; k < step / 8; k += 2) {
    if (8 * k + 16 <= from || 8 * k >= to) continue;
    const Pair<4> x[2] = {Pair<4>({p[k][0], p[k][2], p[k][1], p[k][3]}),
                          Pair<4>({p[k + 1][0], p[k + 1][2], p[k + 1][1], p[k + 1][3]})};
#pragma unroll
    for (int n = 0; n < D / 8; n += together) {
      Pair<2> y[2][together];
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int m = 0; m < together; m += 2) {
          const float2 u = read2(&b[at.column(k + i, 0)][8 * (n + m) + 2 * at.g]);
          const float2 v = read2(&b[at.column(k + i, 1)][8 * (n + m) + 2 * at.g]);
          y[i][m] = Pair<2>({u.x, v.x}), y[i][m + 1] = Pair<2>({u.y, v.y});
        }
      mma(sum + n, x, y);
    }
  }
}

// Row i of sums, times f, to `D_of` numbers at `to`.
template <int D>
__device__ inline void write_row(float* to, const Sums<D>& sum, int i, float f, int D_of, Place at) {
#pragma unroll
  for (int n = 0; n < D / 8; n += 2) {
    const int d = 8 * n + 4 * at.t;
    const float *x = sum[n] + 2 * i, *y = sum[n + 1] + 2 * i;
    if (d < D_of) *reinterpret_cast<float4*>(to + d) = {x[0] * f, y[0] * f, x[1] * f, y[1] * f};
  }
}

// Which block this is: a tile of 64 rows of one head of one sequence. Blocks begin in order of their index: all heads
// of all sequences have a tile before any has the next, so that the tiles with the longest walks can come first. The
// heads of a group stand beside each other.
struct Item {
  int head, b, tile;
  __device__ Item(const Problem& a, int heads) {
    head = blockIdx.x % heads, b = blockIdx.x / heads % a.B, tile = blockIdx.x / heads / a.B;
  }
};

template <int D, int step>
struct ForwardTiles {
  Tile<side, D> q;
  Tile<step, D> k, v;
};

template <int D, int step, class Mask>
__global__ void __launch_bounds__(threads, teams(D, step))
    forward_kernel(float* o, float* lse, const float* q, const float* k, const float* v, Problem a, Mask mask) {
  begin_kernel();
  extern __shared__ char memory[];
  ForwardTiles<D, step>& tile = *reinterpret_cast<ForwardTiles<D, step>*>(memory);
  const Place at;
  const Item item(a, a.H);
  const int q0 = (ceil_div(a.T, side) - 1 - item.tile) * side, h = item.head;  // late queries see the most keys
  load<D>(tile.q, q + (int64_t(item.b) * a.T + q0) * a.ld_q + h * a.D, a.ld_q, a.T - q0, a.D, at);
  Sums<D> acc = {};
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  const int first_key = mask.first_key(q0 + at.first()), last_key = mask.last_key(q0 + at.first() + 16);
  const int begin = mask.first_key(q0) / step * step, end = mask.last_key(q0 + side);
  const int64_t kv = int64_t(item.b) * a.keys * a.ld_kv + h / a.group * a.D;
  const auto bring = [&](Tile<step, D>& to, const float* from, int k0) {
    load<D>(to, from + kv + k0 * a.ld_kv, a.ld_kv, a.keys - k0, a.D, at);
  };
  if (begin < end) bring(tile.k, k, begin);
  for (int k0 = begin; k0 < end; k0 += step) {  // of keys and values, the ones come while the others are multiplied
    copies_wait_all();
    __syncthreads();
    bring(tile.v, v, k0);
    Scores<step> s;
    multiply<D, step>(s, tile.q, tile.k, at);
    if (k0 + step > a.keys || !mask.whole(q0, q0 + side, k0, k0 + step))
      hide<step>(s, at, [&](int row, int key) { return k0 + key < a.keys && mask.visible(q0 + row, k0 + key); });
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float m = -INFINITY;
#pragma unroll
      for (int n = 0; n < step / 8; ++n)
#pragma unroll
        for (int c = 2 * i; c < 2 * i + 2; ++c) m = fmaxf(m, s[n][c]);
      m = fmaxf(top[i], row_max(m) * a.scale_log2);
      const float base = m == -INFINITY ? 0.f : m;  // the same for the whole row
      const float factor = exp2_approx(top[i] - base);
      sum[i] *= factor, top[i] = m;
#pragma unroll
      for (int n = 0; n < step / 8; ++n)
#pragma unroll
        for (int c = 2 * i; c < 2 * i + 2; ++c) {
          s[n][c] = exp2_approx(s[n][c] * a.scale_log2 - base);
          sum[i] += s[n][c];
        }
#pragma unroll
      for (int n = 0; n < D / 8; ++n) acc[n][2 * i] *= factor, acc[n][2 * i + 1] *= factor;
    }
    copies_wait_all();
    __syncthreads();
    if (k0 + step < end) bring(tile.k, k, k0 + step);
    accumulate<D, step>(acc, s, tile.v, first_key - k0, last_key - k0, at);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int t = q0 + at.row(i);
    const float all = row_sum(sum[i]);
    if (t >= a.T) continue;
    float* to = o + (int64_t(item.b) * a.T + t) * a.ld_o + h * a.D;
    write_row<D>(to, acc, i, all > 0 ? 1 / all : 0.f, a.D, at);
    if (at.t == 0)
      lse[int64_t(item.b * a.H + h) * a.T + t] = all > 0 ? top[i] * 0.6931471805599453f + logf(all) : -INFINITY;
  }
}

// 64 keys, and for each part of the walk what it walks along: lse2 and delta are the queries'.
template <int D, int step>
struct KvTiles {
  Tile<side, D> k, v;
  struct Walked {
    Tile<step, D> q, d_o;
    float lse2[step], delta[step];
  } walked[teams(D, step)];
};

// A block's later parts hand their sums to the first, which adds them in order.
template <int D, int step>
__device__ inline void add_parts(Sums<D>& sum, KvTiles<D, step>& tile, int part, Place at) {
  static_assert(teams(D, step) == 1 || sizeof(Sums<D>) * threads <= sizeof(tile.walked[0]));
#pragma unroll
  for (int from = 1; from < teams(D, step); ++from) {
    float4* place = reinterpret_cast<float4*>(&tile.walked[from]) + at.thread;
    __syncthreads();
    if (part == from)
#pragma unroll
      for (int n = 0; n < D / 8; ++n) place[n * threads] = {sum[n][0], sum[n][1], sum[n][2], sum[n][3]};
    __syncthreads();
    if (part == 0)
#pragma unroll
      for (int n = 0; n < D / 8; ++n) {
        const float4 x = place[n * threads];
        sum[n][0] += x.x, sum[n][1] += x.y, sum[n][2] += x.z, sum[n][3] += x.w;
      }
  }
}

// The block's 64 keys against all queries of the group's heads that see them; rows of the scores are keys. Blocks are
// few and their walks long: as many warps as a multiprocessor holds share one, 4 to a part.
template <int D, int step, class Mask>
__global__ void __launch_bounds__(teams(D, step) * threads)
    backward_kv(float* dk, float* dv, const float* d_o, const float* q, const float* k, const float* v,
                const float* lse2, const float* delta, Problem a, Mask mask) {
  begin_kernel();
  extern __shared__ char memory[];
  KvTiles<D, step>& tile = *reinterpret_cast<KvTiles<D, step>*>(memory);
  const Place at;
  const Item item(a, a.HKV);
  const int k0 = item.tile * side, head = item.head;  // most queries see early keys
  const int part = threadIdx.x / threads;
  auto& walked = tile.walked[part];
  const int64_t kv = (int64_t(item.b) * a.keys + k0) * a.ld_kv + head * a.D;
  constexpr int other = teams(D, step) > 1 ? 1 : 0;
  if (part == 0) load<D>(tile.k, k + kv, a.ld_kv, a.keys - k0, a.D, at);
  if (part == other) load<D>(tile.v, v + kv, a.ld_kv, a.keys - k0, a.D, at);
  copies_wait_all();
  __syncthreads();
  Sums<D> dk_acc = {}, dv_acc = {};
  const int first_query = mask.first_query(k0 + at.first()), last_query = mask.last_query(k0 + at.first() + 16);
  const KvLoop loop(mask, k0, k0 + side, step, a.group, part, teams(D, step));
  const auto head_at = [&](int i) { return head * a.group + i / loop.tiles; };
  const auto query_at = [&](int i) { return (loop.first + i % loop.tiles) * step; };
  const auto bring = [&](Tile<step, D>& to, const float* from, int64_t ld, int i) {
    const int q0 = query_at(i);
    load<D>(to, from + (int64_t(item.b) * a.T + q0) * ld + head_at(i) * a.D, ld, a.T - q0, a.D, at);
  };
  if (loop.begin < loop.end) bring(walked.d_o, d_o, a.ld_o, loop.begin);
  for (int i = loop.begin; i < loop.end; ++i) {  // of q and do, the one comes while the other is multiplied
    const int q0 = query_at(i);
    const int64_t stats = int64_t(item.b * a.H + head_at(i)) * a.Tp + q0;
    copies_wait_all();
    sync(part);
    bring(walked.q, q, a.ld_q, i);
    load(walked.lse2, lse2 + stats, at), load(walked.delta, delta + stats, at);
    Scores<step> p, ds;
    multiply<D, step>(ds, tile.v, walked.d_o, at);
    copies_wait_all();
    sync(part);
    multiply<D, step>(p, tile.k, walked.q, at);
    // lse2 of queries past the last is +inf, and sums of keys past the last are not written.
    if (!mask.whole(q0, q0 + step, k0, k0 + side))
      hide<step>(p, at, [&](int row, int t) { return mask.visible(q0 + t, k0 + row); });
#pragma unroll
    for (int n = 0; n < step / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        p[n][c] = exp2_approx(p[n][c] * a.scale_log2 - walked.lse2[at.column(n, c)]);
        ds[n][c] = p[n][c] * (ds[n][c] - walked.delta[at.column(n, c)]);
      }
    accumulate<D, step>(dv_acc, p, walked.d_o, first_query - q0, last_query - q0, at);
    sync(part);
    if (i + 1 < loop.end) bring(walked.d_o, d_o, a.ld_o, i + 1);
    accumulate<D, step>(dk_acc, ds, walked.q, first_query - q0, last_query - q0, at);
  }
  add_parts<D, step>(dk_acc, tile, part, at);
  add_parts<D, step>(dv_acc, tile, part, at);
  if (part) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (k0 + at.row(i) >= a.keys) continue;
    const int64_t to = (int64_t(item.b) * a.keys + k0 + at.row(i)) * a.ld_dkv + head * a.D;
    write_row<D>(dk + to, dk_acc, i, a.scale, a.D, at);
    write_row<D>(dv + to, dv_acc, i, 1, a.D, at);
  }
}

template <int D, int step>
struct QTiles {
  Tile<side, D> q, d_o;
  Tile<step, D> k, v;
};

template <int D, int step, class Mask>
__global__ void __launch_bounds__(threads, teams(D, step))
    backward_q(float* dq, const float* d_o, const float* q, const float* k, const float* v, const float* lse2,
               const float* delta, Problem a, Mask mask) {
  begin_kernel();
  extern __shared__ char memory[];
  QTiles<D, step>& tile = *reinterpret_cast<QTiles<D, step>*>(memory);
  const Place at;
  const Item item(a, a.H);
  const int q0 = (ceil_div(a.T, side) - 1 - item.tile) * side, h = item.head;  // late queries see the most keys
  const int64_t row = int64_t(item.b) * a.T + q0, stats = int64_t(item.b * a.H + h) * a.Tp + q0;
  load<D>(tile.q, q + row * a.ld_q + h * a.D, a.ld_q, a.T - q0, a.D, at);
  load<D>(tile.d_o, d_o + row * a.ld_o + h * a.D, a.ld_o, a.T - q0, a.D, at);
  float lse_of[2], delta_of[2];  // Tp is a multiple of the tile
#pragma unroll
  for (int i = 0; i < 2; ++i) lse_of[i] = lse2[stats + at.row(i)], delta_of[i] = delta[stats + at.row(i)];
  Sums<D> acc = {};
  const int first_key = mask.first_key(q0 + at.first()), last_key = mask.last_key(q0 + at.first() + 16);
  const int begin = mask.first_key(q0) / step * step, end = mask.last_key(q0 + side);
  const int64_t kv = int64_t(item.b) * a.keys * a.ld_kv + h / a.group * a.D;
  const auto bring = [&](Tile<step, D>& to, const float* from, int k0) {
    load<D>(to, from + kv + k0 * a.ld_kv, a.ld_kv, a.keys - k0, a.D, at);
  };
  if (begin < end) bring(tile.v, v, begin);
  for (int k0 = begin; k0 < end; k0 += step) {  // of keys and values, the ones come while the others are multiplied
    copies_wait_all();
    __syncthreads();
    bring(tile.k, k, k0);
    Scores<step> p, ds;
    multiply<D, step>(ds, tile.d_o, tile.v, at);
    copies_wait_all();
    __syncthreads();
    if (k0 + step < end) bring(tile.v, v, k0 + step);
    multiply<D, step>(p, tile.q, tile.k, at);
    if (k0 + step > a.keys || !mask.whole(q0, q0 + side, k0, k0 + step))
      hide<step>(p, at, [&](int row, int key) { return k0 + key < a.keys && mask.visible(q0 + row, k0 + key); });
#pragma unroll
    for (int n = 0; n < step / 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        ds[n][c] = exp2_approx(p[n][c] * a.scale_log2 - lse_of[c / 2]) * (ds[n][c] - delta_of[c / 2]);
    accumulate<D, step>(acc, ds, tile.k, first_key - k0, last_key - k0, at);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i)
    if (q0 + at.row(i) < a.T) write_row<D>(dq + (row + at.row(i)) * a.ld_dq + h * a.D, acc, i, a.scale, a.D, at);
}

template <int D, class Mask>
void forward(cudaStream_t stream, float* o, float* lse, const float* q, const float* k, const float* v,
             const Problem& a, const Mask& mask) {
  launch(stream, forward_kernel<D, 32, Mask>, {a.B * a.H * ceil_div(a.T, side), threads, sizeof(ForwardTiles<D, 32>)},
         o, lse, q, k, v, a, mask);
}

template <int D, int step, class Mask>
void backward(cudaStream_t stream, float* dq, float* dk, float* dv, const float* d_o, const float* q, const float* k,
              const float* v, const float* lse2, const float* delta, const Problem& a, const Mask& mask) {
  launch(stream, backward_kv<D, step, Mask>,
         {a.B * a.HKV * ceil_div(a.keys, side), teams(D, step) * threads, sizeof(KvTiles<D, step>)}, dk, dv, d_o, q, k,
         v, lse2, delta, a, mask);
  launch(stream, backward_q<D, step, Mask>, {a.B * a.H * ceil_div(a.T, side), threads, sizeof(QTiles<D, step>)}, dq,
         d_o, q, k, v, lse2, delta, a, mask);
}

// Chips with little shared memory: there the backward of heads above 64 walks in smaller steps.
static_assert(sizeof(ForwardTiles<128, 32>) <= small_memory && sizeof(KvTiles<64, 32>) <= small_memory);
static_assert(sizeof(KvTiles<128, 16>) <= small_memory && sizeof(QTiles<128, 16>) <= small_memory);

}  // namespace attention::fp32
