// What the attention kernels of every architecture share: which keys a query sees, and the arguments.
#pragma once

#include "attention/dense.h"
#ifdef __CUDACC__
#include "lib/device/launch.cuh"
#include "lib/device/intrinsics.cuh"
#endif

namespace attention {

inline HD int ceil_div(int a, int b) { return (a + b - 1) / b; }

// n / d for 0 <= n < 2^31 and 1 <= d, by a product, where d is known to the host alone: with 2^(l-1) < d <= 2^l and m =
// 2^(31+l) / d, rounded up, it is n m / 2^(31+l), rounded down (Granlund and Montgomery, Division by Invariant Integers
// using Multiplication, theorem 4.2).
struct Divisor {
  uint32_t m;
  int l = 0;
  explicit Divisor(int d) {
    while (int64_t(1) << l < d) ++l;
    m = uint32_t(((uint64_t(1) << (31 + l)) + d - 1) / d);
  }
  HD int operator()(int n) const { return int(uint32_t(uint64_t(2u * uint32_t(n)) * m >> 32) >> l); }
};

// The masks: which keys a query sees, in rows and keys rather than in tiles, so that they serve every tile shape.
// A kernel walks the tiles that overlap [first_key, last_key) of its queries (or [first_query, last_query) of its
// keys; either may be empty), and tests single elements only in tiles that are not whole(). They are called
// with queries past T and keys past the last too, as parts of tiles; the answer for the former does not matter.
// chooses: the rule is another for each query, and comes with each tile; see selected_masked.cuh.

// Key j <= t.
struct Causal {
  static constexpr bool chooses = false;
  int T;
  explicit Causal(const AttentionShape& a) : T(int(a.T)) {}
  HD int first_key(int /*q0*/) const { return 0; }               // of queries from q0 on
  HD int last_key(int q1) const { return q1 < T ? q1 : T; }      // of queries before q1
  HD int first_query(int k0) const { return k0; }                // of keys from k0 on
  HD int last_query(int /*k1*/) const { return T; }              // of keys before k1
  HD bool whole(int q0, int /*q1*/, int /*k0*/, int k1) const {  // do queries [q0, q1) see all keys [k0, k1)?
    return k1 <= q0 + 1;
  }
  HD bool visible(int t, int j) const { return j <= t; }
};
// What is added to dQ besides, in bf16: each that is not null, dq itself or another. A row is a query with all heads.
struct Addends {
  const bf16* p[2];
  int64_t ld[2];
};
// Of a tile, that its mask says nothing more.
struct All {
  HD bool whole() const { return true; }
  HD bool visible(int, int) const { return true; }
};

// The last `window` keys up to the query's own.
struct Window {
  static constexpr bool chooses = false;
  int T, window;
  explicit Window(const AttentionShape& a) : T(int(a.T)), window(int(a.window < a.T ? a.window : a.T)) {}
  HD int first_key(int q0) const { return q0 < window ? 0 : q0 - window + 1; }
  HD int last_key(int q1) const { return q1 < T ? q1 : T; }
  HD int first_query(int k0) const { return k0; }
  HD int last_query(int k1) const { return k1 - 1 < T - window ? k1 - 1 + window : T; }
  HD bool whole(int q0, int q1, int k0, int k1) const { return k1 <= q0 + 1 && q1 - window <= k0; }
  HD bool visible(int t, int j) const { return unsigned(t - j) < unsigned(window); }
};

// Key j stands for tokens [stride*j, stride*j + block): the last of them must not lie after the query.
struct Compressed {
  static constexpr bool chooses = false;
  int T, keys, block, stride;
  explicit Compressed(const AttentionShape& a)
      : T(int(a.T)), keys(int(a.keys ? a.keys : a.T)), block(int(a.block)), stride(int(a.stride)) {}
  HD int first_key(int /*q0*/) const { return 0; }
  HD int last_key(int q1) const {
    const int ended = compressed_keys(q1 < T ? q1 : T, block, stride);
    return ended < keys ? ended : keys;
  }
  HD int first_query(int k0) const { return stride * k0 + block - 1; }
  HD int last_query(int /*k1*/) const { return T; }
  HD bool whole(int q0, int /*q1*/, int /*k0*/, int k1) const { return k1 <= keys && first_query(k1 - 1) <= q0; }
  HD bool visible(int t, int j) const { return first_query(j) <= t && j < keys; }
};

template <class F>
auto with_mask(const AttentionShape& a, F f) {
  return a.sees == Sees::causal ? f(Causal(a)) : a.sees == Sees::window ? f(Window(a)) : f(Compressed(a));
}

// Query heads of which blocks work at a time. Blocks drift apart, and causal ones would read again and again what L2,
// of 50 MB on a large GPU, does not keep: so the heads of one KV head, or of as many, a divisor of them all, as have
// their K and V there. A window's blocks share a short stretch of all heads.
inline int heads_of_set(const AttentionShape& a) {
  constexpr int64_t kept = 32 << 20;
  const int64_t bytes = (a.keys ? a.keys : a.T) * (a.D + a.v_dim()) * 2;  // of a KV head in bf16
  int64_t sets = 1;
  while (a.sees == Sees::causal && sets < a.HKV && (a.HKV % sets != 0 || a.HKV / sets * bytes > kept)) ++sets;
  return int(a.H / sets);
}

// AttentionShape in the kernels' types. A row is one (b,t); the statistics lie in rows of Tp, T rounded up to whole
// tiles, so that a tile's worth of them can be copied without a test for the sequence's end.
struct Problem {
  int B, T, keys, H, HKV, D, DV, group;
  int64_t ld_q, ld_kv, ld_v, ld_o, ld_dq, ld_dkv, ld_dv;
  int Tp, heads_of_set;
  float scale, scale_log2;  // the second has log2(e) in it: softmax is computed with exp2

  explicit Problem(const AttentionShape& a)
      : B(int(a.B)),
        T(int(a.T)),
        keys(int(a.keys ? a.keys : a.T)),
        H(int(a.H)),
        HKV(int(a.HKV)),
        D(int(a.D)),
        DV(int(a.v_dim())),
        group(int(a.H / a.HKV)),
        ld_q(a.ld_q),
        ld_kv(a.ld_kv),
        ld_v(a.ld_v ? a.ld_v : a.ld_kv),
        ld_o(a.ld_o),
        ld_dq(a.ld_dq),
        ld_dkv(a.ld_dkv),
        ld_dv(a.ld_dv ? a.ld_dv : a.ld_dkv),
        Tp(int((a.T + 127) / 128 * 128)),
        heads_of_set(attention::heads_of_set(a)),
        scale(float(a.scale)),
        scale_log2(float(a.scale * 1.4426950408889634)) {}
};

// In which order blocks take tiles of so many queries of one head: heads fastest, so that blocks which work at one time
// share K and V in L2, then queries, those with most keys first; a set of heads after another (heads_of_set).
struct QueryOrder {
  int rows, tiles;
  HD QueryOrder(const Problem& a, int rows_) : rows(rows_), tiles(ceil_div(a.T, rows)) {}
  HD int count(const Problem& a) const { return a.B * a.H * tiles; }
  HD void locate(int n, const Problem& a, int* b, int* q0, int* h) const {
    const int heads = a.heads_of_set, sets = a.H / heads, set = n / (heads * tiles);
    n -= set * heads * tiles;
    *h = set % sets * heads + n % heads;
    *q0 = (tiles - 1 - n / heads) * rows;
    *b = set / sets;
  }
};

// The loop over queries for dK and dV of keys [k0, k1): head after head of the group, in each the tiles of BM queries
// that see the keys. Step n is tile first + n % tiles of the group's head n / tiles. The loop may be cut in parts for
// as many blocks (kv_parts): this one has steps [begin, end).
struct KvLoop {
  int first, tiles, begin, end;
  template <class Mask>
  HD KvLoop(const Mask& mask, int k0, int k1, int BM, int group, int part, int parts)
      : first(mask.first_query(k0) / BM) {
    const int last = ceil_div(mask.last_query(k1), BM);
    tiles = first < last ? last - first : 0;
    begin = int(int64_t(tiles) * group * part / parts);
    end = int(int64_t(tiles) * group * (part + 1) / parts);
  }
};

// Where a part of that loop puts its sums in the workspace; which: 0 dK (parts, B, HKV, keys, D), and behind it 1 dV
// (parts, B, HKV, keys, DV).
inline HD int64_t part_at(const Problem& a, int parts, int which, int part, int b, int head) {
  const int64_t rows = int64_t(a.B) * a.HKV * a.keys, row = ((int64_t(part) * a.B + b) * a.HKV + head) * a.keys;
  return which ? parts * rows * a.D + row * a.DV : row * a.D;
}

#ifdef __CUDACC__

// Over the four lanes that hold one row of an accumulator, in mma.sync and wgmma alike.
inline __device__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
inline __device__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
// The largest |d f| of this thread's two rows, all of their columns, as it is rounded to bf16.
template <int N>
inline __device__ float2 row_amax(const float (&d)[N], float f0, float f1) {
  uint32_t most[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < N; ++i) most[i / 2 % 2] = max(most[i / 2 % 2], magnitude(d[i] * (i / 2 % 2 ? f1 : f0)));
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int o = 1; o <= 2; o *= 2) most[r] = max(most[r], __shfl_xor_sync(~0u, most[r], o));
  const uint32_t pair = pack_bf16(__uint_as_float(most[0]), __uint_as_float(most[1]));
  return {amax_of(magnitude(low_bf16(pair))), amax_of(magnitude(high_bf16(pair)))};
}
// The same of rows t and t + 8 of T, where they exist, to amax[0] and amax[8].
template <int N>
inline __device__ void store_row_amax(float* amax, const float (&d)[N], float f0, float f1, int t, int T) {
  const float2 most = row_amax(d, f0, f1);
  if (threadIdx.x % 4 == 0 && t < T) amax[0] = most.x;
  if (threadIdx.x % 4 == 0 && t + 8 < T) amax[8] = most.y;
}

// The accumulators of mma.sync and wgmma are laid out as their left operands are: two groups of 8 columns make one
// step 16 deep.
template <int N>
inline __device__ void pack_rows(uint32_t (&p)[N / 2], const float (&s)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) p[i] = pack_bf16(s[2 * i], s[2 * i + 1]);
}
#endif

}  // namespace attention
