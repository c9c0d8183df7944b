// What the attention kernels of every architecture share: which keys a query sees, the arguments, and bf16 packing.
#pragma once

#include "nsa_attention.h"

namespace attention {

// Which keys a query sees, in rows and keys rather than in tiles, so that every tile shape asks the same questions.
// A kernel walks the tiles that overlap [first_key, last_key) of its queries (or [first_query, last_query) of its
// keys), and tests single elements only in tiles that are not whole(). Sparse attention brings its own.
struct Causal {
  int T;
  __host__ __device__ int first_key(int /*q0*/) const { return 0; }
  __host__ __device__ int last_key(int q1) const { return q1 < T ? q1 : T; }  // of queries before q1
  __host__ __device__ int first_query(int k0) const { return k0; }            // of keys from k0 on
  __host__ __device__ int last_query(int /*k1*/) const { return T; }
  // Are all keys before k1 visible to all queries from q0 on?
  __host__ __device__ bool whole(int q0, int k1) const { return k1 <= q0 + 1; }
  __host__ __device__ bool visible(int t, int j) const { return j <= t; }
};

// AttentionShape in the kernels' types. A row is one (b,t); the statistics lie in rows of Tp, T rounded up to whole
// tiles, so that a tile's worth of them can be copied without asking where the sequence ends.
struct Problem {
  int B, T, H, HKV, D, group;
  int64_t ld_q, ld_kv, ld_o, ld_dq, ld_dkv;
  int Tp;
  float scale, scale_log2;  // the second has log2(e) in it: softmax is computed with exp2

  explicit Problem(const AttentionShape& a)
      : B(int(a.B)),
        T(int(a.T)),
        H(int(a.H)),
        HKV(int(a.HKV)),
        D(int(a.D)),
        group(int(a.H / a.HKV)),
        ld_q(a.ld_q),
        ld_kv(a.ld_kv),
        ld_o(a.ld_o),
        ld_dq(a.ld_dq),
        ld_dkv(a.ld_dkv),
        Tp(int((a.T + 127) / 128 * 128)),
        scale(float(a.scale)),
        scale_log2(float(a.scale * 1.4426950408889634)) {}
};

inline __host__ __device__ int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Where a part of a group's heads (head_splits) puts its sums in the workspace; which: 0 dK, 1 dV. (B, HKV, T, D).
inline __host__ __device__ int64_t split_at(const Problem& a, int splits, int which, int split, int b, int head) {
  return (((int64_t(which) * splits + split) * a.B + b) * a.HKV + head) * a.T * a.D;
}

// Two floats as a pair of bf16, `lo` at the lower address.
inline __device__ uint32_t pack(float lo, float hi) {
  uint32_t d;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(hi), "f"(lo));
  return d;
}
inline __device__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// Over the four lanes that hold one row of an accumulator, in mma.sync and wgmma alike.
inline __device__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
inline __device__ float row_sum(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// The accumulators of mma.sync and wgmma are laid out as their left operands are: two groups of 8 columns make one
// step 16 deep.
template <int N>
inline __device__ void pack_rows(uint32_t (&p)[N / 2], const float (&s)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
}

}  // namespace attention
