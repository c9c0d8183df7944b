// Attention in plain loops, to the keys that AttentionShape::sees lets a query see: the CPU backend, and the oracle
// that the GPU kernels are tested against.
//
//   s[t][j] = scale q[t] . k[j],  j seen by t   p[t][j] = exp(s[t][j] - lse[t]),  lse[t] = log sum_j exp(s[t][j])
//   o[t] = sum_j p[t][j] v[j]
//   dv[j] = sum_t p[t][j] do[t]                 dp[t][j] = do[t] . v[j],  delta[t] = do[t] . o[t]
//   ds[t][j] = p[t][j] (dp[t][j] - delta[t])    dq[t] = scale sum_j ds[t][j] k[j],  dk[j] = scale sum_t ds[t][j] q[t]
//
// A query that sees no key has o = 0 and lse = -inf, and neither gives nor gets a gradient.
//
// One thread; tiles of 64 queries against 256 keys (the forward's softmax: 64 queries against all they see), only so
// that the compiler can keep sums in vector registers and tiles in cache. Keys that no query of a tile sees are left
// out. Every sum runs in the order of its index (dk and dv: heads of the group, then queries).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "attention/dense.h"
#include "cpu/ops.h"

namespace cpu {
namespace attention_detail {

constexpr int BM = 64, BN = 256;

// c (m x n) += a (m x k) b (k x n). Element (i,p) of a is a[i * ai + p * ap]; rows of b and c are contiguous.
// Blocks of 4 rows by 128 bytes of columns stay in registers over the whole sum.
template <class A>
void multiply_add(A* c, int64_t ldc, const A* a, int64_t ai, int64_t ap, const A* b, int64_t ldb, int m, int n, int k) {
  constexpr int U = 4, W = 128 / sizeof(A);
  for (int i0 = 0; i0 < m; i0 += U)
    for (int j0 = 0; j0 < n; j0 += W) {
      int u = std::min(U, m - i0), w = std::min(W, n - j0);
      A sum[U][W] = {};
      if (u == U && w == W) {
        const A* x = a + i0 * ai;
        const A* y = b + j0;
        for (int p = 0; p < k; ++p, x += ap, y += ldb)
          for (int i = 0; i < U; ++i) {
            const A xi = x[i * ai];
#pragma GCC ivdep
            for (int j = 0; j < W; ++j) sum[i][j] += xi * y[j];
          }
      } else {
        for (int p = 0; p < k; ++p)
          for (int i = 0; i < u; ++i)
            for (int j = 0; j < w; ++j) sum[i][j] += a[(i0 + i) * ai + p * ap] * b[p * ldb + j0 + j];
      }
      for (int i = 0; i < u; ++i)
        for (int j = 0; j < w; ++j) c[(i0 + i) * ldc + j0 + j] += sum[i][j];
    }
}

inline double exponential(double x) { return std::exp(x); }
// exp(x) for x <= 88 to 2 units in the last place, and 0 below -87; branch-free, so that loops over it vectorise.
// exp(x) = 2^n e^r with n = round(x / ln 2), |r| <= ln 2 / 2; ln 2 is subtracted in two parts.
inline float exponential(float x) {
  float in = x < -87.f ? -87.f : x;
  float n = in * 1.44269504f + 12582912.f;  // 1.5 * 2^23: the sum's low bits are the rounded quotient
  uint32_t bits;                            // unsigned, because NaN goes this way too
  std::memcpy(&bits, &n, 4);
  n -= 12582912.f;
  float r = in - n * 0.693359375f + n * 2.12194440e-4f;
  float p = 1.f / 5040;
  p = p * r + 1.f / 720;
  p = p * r + 1.f / 120;
  p = p * r + 1.f / 24;
  p = p * r + 1.f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  uint32_t power = (bits - 0x4b400000u + 127u) << 23;
  float two_n;
  std::memcpy(&two_n, &power, 4);
  return x < -87.f ? 0.f : p * two_n;
}

// Blocks of multiply_add that lack rows or columns take slower loops, so the twins bring whole ones, filled with zeros:
// keys in multiples of 32, rows in multiples of 4. A row's bits then do not depend on where a sequence ends either.
inline int64_t padded(int64_t keys) { return (keys + 31) / 32 * 32; }
inline int whole_rows(int m) { return (m + 3) / 4 * 4; }

// m rows of D, widened.
template <class T, class A>
void widen(A* to, const T* from, int64_t ld, int64_t m, int64_t D) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t d = 0; d < D; ++d) to[i * D + d] = A(from[i * ld + d]);
}
// The same as columns of D rows, which are `ld_to` apart.
template <class T, class A>
void widen_transposed(A* to, int64_t ld_to, const T* from, int64_t ld, int64_t m, int64_t D) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t d = 0; d < D; ++d) to[d * ld_to + i] = A(from[i * ld + d]);
}

// delta[i] = do[i] . o[i] of m queries. With a gate g = sigmoid(gate), which multiplies o in what do is the gradient
// of: dgate = g (1 - g) delta, and then do and delta times g are those of o itself. row: of the first query; h: its
// head.
template <class T, class A>
void gated_delta(A* delta, A* d_o, const T* o, int64_t ld_o, int m, int64_t D, const Gate<T>& gate, int64_t row,
                 int64_t h) {
  for (int i = 0; i < m; ++i) {
    delta[i] = 0;
    for (int64_t d = 0; d < D; ++d) delta[i] += d_o[i * D + d] * A(o[i * ld_o + d]);
    if (!gate.gate) continue;
    const int64_t at = (row + i) * gate.ld + h;
    const A g = A(1) / (A(1) + std::exp(-A(gate.gate[at])));
    gate.dgate[at] = T(g * (A(1) - g) * delta[i]);
    delta[i] *= g;
    for (int64_t d = 0; d < D; ++d) d_o[i * D + d] *= g;
  }
}

// Query t sees keys [first_seen, end_seen). Both grow with t.
inline int64_t rows_of_keys(const AttentionShape& a) { return a.keys ? a.keys : a.T; }
inline int64_t stride_of_values(const AttentionShape& a) { return a.ld_v ? a.ld_v : a.ld_kv; }
inline int64_t first_seen(const AttentionShape& a, int64_t t) {
  return a.sees == Sees::window ? std::max<int64_t>(0, t + 1 - a.window) : 0;
}
inline int64_t end_seen(const AttentionShape& a, int64_t t) {
  if (a.sees != Sees::compressed) return t + 1;
  return std::min(rows_of_keys(a), compressed_keys(t + 1, a.block, a.stride));
}

}  // namespace attention_detail

template <class T>
void attention_forward(T* o, acc_t<T>* lse, const T* q, const T* k, const T* v, const AttentionShape& a,
                       float* amax = nullptr) {
  using namespace attention_detail;
  using A = acc_t<T>;
  const int64_t T_ = a.T, D = a.D, DV = a.v_dim(), group = a.H / a.HKV, keys = rows_of_keys(a), ldk = padded(keys);
  const int64_t ld_v = stride_of_values(a);
  std::vector<A> kt(ldk * D), vs(ldk * DV), qs(BM * D), s, out(BM * DV);
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t head = 0; head < a.HKV; ++head) {
      widen_transposed(kt.data(), ldk, k + b * keys * a.ld_kv + head * D, a.ld_kv, keys, D);
      widen(vs.data(), v + b * keys * ld_v + head * DV, ld_v, keys, DV);
      for (int64_t h = head * group; h < (head + 1) * group; ++h)
        for (int64_t t0 = 0; t0 < T_; t0 += BM) {
          const int m = int(std::min<int64_t>(BM, T_ - t0));
          const int64_t lo = first_seen(a, t0) / 32 * 32;  // keys that some query sees, and a few more
          const int n = int(padded(end_seen(a, t0 + m - 1)) - lo);
          widen(qs.data(), q + (b * T_ + t0) * a.ld_q + h * D, a.ld_q, m, D);
          s.assign(int64_t(BM) * n, A(0));
          std::fill(out.begin(), out.end(), A(0));
          for (int j = 0; j < n; j += BN)
            multiply_add(&s[j], n, qs.data(), D, 1, &kt[lo + j], ldk, whole_rows(m), std::min(BN, n - j), int(D));
          for (int i = 0; i < m; ++i) {
            A* row = s.data() + int64_t(i) * n;
            const int from = int(first_seen(a, t0 + i) - lo), to = int(end_seen(a, t0 + i) - lo);
            A top = -INFINITY, sum = 0;
            for (int j = from; j < to; ++j) row[j] *= A(a.scale), top = row[j] > top ? row[j] : top;
            for (int j = from; j < to; ++j) row[j] = exponential(row[j] - top);
            for (int j = from; j < to; ++j) sum += row[j];
            for (int j = from; j < to; ++j) row[j] /= sum;
            for (int j = 0; j < from; ++j) row[j] = 0;
            for (int j = to; j < n; ++j) row[j] = 0;
            lse[(b * a.H + h) * T_ + t0 + i] = top + std::log(sum);  // no key: -inf + -inf
          }
          for (int j = 0; j < n; j += BN)
            multiply_add(out.data(), DV, &s[j], n, 1, &vs[(lo + j) * DV], DV, whole_rows(m), int(DV),
                         std::min(BN, n - j));
          for (int i = 0; i < m; ++i) {
            T* const row = o + (b * T_ + t0 + i) * a.ld_o + h * DV;
            for (int64_t d = 0; d < DV; ++d) row[d] = T(out[i * DV + d]);
            if (amax) amax[(b * a.H + h) * T_ + t0 + i] = float(power_sum(GradNorm::inf, row, DV));
          }
        }
    }
}

template <class T>
void attention_backward(T* dq, T* dk, T* dv, const T* d_o, const T* q, const T* k, const T* v, const T* o,
                        const acc_t<T>* lse, const AttentionShape& a, Gate<T> gate = {}) {
  using namespace attention_detail;
  using A = acc_t<T>;
  const int64_t T_ = a.T, D = a.D, DV = a.v_dim(), group = a.H / a.HKV, keys = rows_of_keys(a), ldk = padded(keys);
  const int64_t ld_v = stride_of_values(a), ld_dv = a.ld_dv ? a.ld_dv : a.ld_dkv;
  std::vector<A> ks(ldk * D), kt(ldk * D), vt(ldk * DV), dks(ldk * D), dvs(ldk * DV);  // of one KV head; t: transposed
  std::vector<A> qs(BM * D), dos(BM * DV), dqs(BM * D), p(BM * BN), ds(BM * BN), delta(BM);
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t head = 0; head < a.HKV; ++head) {
      const int64_t at = b * keys * a.ld_kv + head * D;
      widen(ks.data(), k + at, a.ld_kv, keys, D);
      widen_transposed(kt.data(), ldk, k + at, a.ld_kv, keys, D);
      widen_transposed(vt.data(), ldk, v + b * keys * ld_v + head * DV, ld_v, keys, DV);
      std::fill(dks.begin(), dks.end(), A(0));
      std::fill(dvs.begin(), dvs.end(), A(0));
      for (int64_t h = head * group; h < (head + 1) * group; ++h)
        for (int64_t t0 = 0; t0 < T_; t0 += BM) {
          const int m = int(std::min<int64_t>(BM, T_ - t0));
          const A* l = lse + (b * a.H + h) * T_ + t0;
          widen(qs.data(), q + (b * T_ + t0) * a.ld_q + h * D, a.ld_q, m, D);
          widen(dos.data(), d_o + (b * T_ + t0) * a.ld_o + h * DV, a.ld_o, m, DV);
          std::fill(dqs.begin(), dqs.end(), A(0));
          gated_delta(delta.data(), dos.data(), o + (b * T_ + t0) * a.ld_o + h * DV, a.ld_o, m, DV, gate, b * T_ + t0,
                      h);
          const int64_t end = padded(end_seen(a, t0 + m - 1));
          for (int64_t j0 = first_seen(a, t0) / 32 * 32; j0 < end; j0 += BN) {
            const int w = int(std::min<int64_t>(BN, end - j0));
            std::fill(p.begin(), p.end(), A(0));
            std::fill(ds.begin(), ds.end(), A(0));
            multiply_add(p.data(), BN, qs.data(), D, 1, &kt[j0], ldk, whole_rows(m), w, int(D));
            multiply_add(ds.data(), BN, dos.data(), DV, 1, &vt[j0], ldk, whole_rows(m), w, int(DV));
            for (int i = 0; i < m; ++i) {
              A *pi = &p[i * BN], *dsi = &ds[i * BN];
              const auto within = [&](int64_t key) {
                return int(std::min<int64_t>(std::max<int64_t>(key - j0, 0), w));
              };
              const int from = within(first_seen(a, t0 + i)), to = within(end_seen(a, t0 + i));
              for (int j = from; j < to; ++j) {
                pi[j] = exponential(pi[j] * A(a.scale) - l[i]);
                dsi[j] = pi[j] * (dsi[j] - delta[i]) * A(a.scale);
              }
              for (int j = 0; j < from; ++j) pi[j] = dsi[j] = 0;
              for (int j = to; j < w; ++j) pi[j] = dsi[j] = 0;
            }
            multiply_add(dqs.data(), D, ds.data(), BN, 1, &ks[j0 * D], D, whole_rows(m), int(D), w);
            multiply_add(&dks[j0 * D], D, ds.data(), 1, BN, qs.data(), D, w, int(D), m);
            multiply_add(&dvs[j0 * DV], DV, p.data(), 1, BN, dos.data(), DV, w, int(DV), m);
          }
          for (int i = 0; i < m; ++i)
            for (int64_t d = 0; d < D; ++d) dq[(b * T_ + t0 + i) * a.ld_dq + h * D + d] = T(dqs[i * D + d]);
        }
      for (int64_t j = 0; j < keys; ++j) {
        T *to_k = dk + (b * keys + j) * a.ld_dkv + head * D, *to_v = dv + (b * keys + j) * ld_dv + head * DV;
        for (int64_t d = 0; d < D; ++d) to_k[d] = T(dks[j * D + d]);
        for (int64_t d = 0; d < DV; ++d) to_v[d] = T(dvs[j * DV + d]);
      }
    }
}

}  // namespace cpu
