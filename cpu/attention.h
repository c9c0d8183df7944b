// Dense causal attention in plain loops: the CPU backend, and the oracle that the GPU kernels are tested against.
//
//   s[t][j] = scale q[t] . k[j],  j <= t        p[t][j] = exp(s[t][j] - lse[t]),  lse[t] = log sum_j exp(s[t][j])
//   o[t] = sum_j p[t][j] v[j]
//   dv[j] = sum_t p[t][j] do[t]                 dp[t][j] = do[t] . v[j],  delta[t] = do[t] . o[t]
//   ds[t][j] = p[t][j] (dp[t][j] - delta[t])    dq[t] = scale sum_j ds[t][j] k[j],  dk[j] = scale sum_t ds[t][j] q[t]
//
// One thread; tiles of 64 queries against 256 keys (the forward's softmax: 64 queries against all they see), only so
// that the compiler can keep sums in vector registers and tiles in cache. Every sum runs in the order of its index (dk
// and dv: heads of the group, then queries).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "nsa_attention.h"

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
        for (int p = 0; p < k; ++p, x += ap, y += ldb) {
          A x0 = x[0], x1 = x[ai], x2 = x[2 * ai], x3 = x[3 * ai];
#pragma GCC ivdep
          for (int j = 0; j < W; ++j) {
            sum[0][j] += x0 * y[j];
            sum[1][j] += x1 * y[j];
            sum[2][j] += x2 * y[j];
            sum[3][j] += x3 * y[j];
          }
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
  int32_t bits;
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
  int32_t power = (bits - 0x4b400000 + 127) << 23;
  float two_n;
  std::memcpy(&two_n, &power, 4);
  return x < -87.f ? 0.f : p * two_n;
}

// m rows of D, widened; `transposed` gives D rows of m.
template <class T, class A>
void widen(A* to, const T* from, int64_t ld, int64_t m, int64_t D, bool transposed = false) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t d = 0; d < D; ++d) to[transposed ? d * m + i : i * D + d] = A(from[i * ld + d]);
}

}  // namespace attention_detail

template <class T>
void attention_forward(T* o, acc_t<T>* lse, const T* q, const T* k, const T* v, const AttentionShape& a) {
  using namespace attention_detail;
  using A = acc_t<T>;
  const int64_t T_ = a.T, D = a.D, group = a.H / a.HKV;
  std::vector<A> kt(T_ * D), vs(T_ * D), qs(BM * D), s(BM * T_), out(BM * D);
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t head = 0; head < a.HKV; ++head) {
      widen(kt.data(), k + b * T_ * a.ld_kv + head * D, a.ld_kv, T_, D, true);
      widen(vs.data(), v + b * T_ * a.ld_kv + head * D, a.ld_kv, T_, D);
      for (int64_t h = head * group; h < (head + 1) * group; ++h)
        for (int64_t t0 = 0; t0 < T_; t0 += BM) {
          const int m = int(std::min<int64_t>(BM, T_ - t0)), n = int(t0) + m;  // queries; keys that some of them see
          widen(qs.data(), q + (b * T_ + t0) * a.ld_q + h * D, a.ld_q, m, D);
          std::fill(s.begin(), s.begin() + int64_t(m) * n, A(0));
          std::fill(out.begin(), out.end(), A(0));
          for (int j = 0; j < n; j += BN)
            multiply_add(&s[j], n, qs.data(), D, 1, &kt[j], T_, m, std::min(BN, n - j), int(D));
          for (int i = 0; i < m; ++i) {
            A* row = &s[int64_t(i) * n];
            const int seen = int(t0) + i + 1;
            A top = -INFINITY, sum = 0;
            for (int j = 0; j < seen; ++j) row[j] *= A(a.scale), top = row[j] > top ? row[j] : top;
            for (int j = 0; j < seen; ++j) row[j] = exponential(row[j] - top);
            for (int j = 0; j < seen; ++j) sum += row[j];
            for (int j = 0; j < seen; ++j) row[j] /= sum;
            for (int j = seen; j < n; ++j) row[j] = 0;
            lse[(b * a.H + h) * T_ + t0 + i] = top + std::log(sum);
          }
          for (int j = 0; j < n; j += BN)
            multiply_add(out.data(), D, &s[j], n, 1, &vs[int64_t(j) * D], D, m, int(D), std::min(BN, n - j));
          for (int i = 0; i < m; ++i)
            for (int64_t d = 0; d < D; ++d) o[(b * T_ + t0 + i) * a.ld_o + h * D + d] = T(out[i * D + d]);
        }
    }
}

template <class T>
void attention_backward(T* dq, T* dk, T* dv, const T* d_o, const T* q, const T* k, const T* v, const T* o,
                        const acc_t<T>* lse, const AttentionShape& a, Gate<T> gate = {}) {
  using namespace attention_detail;
  using A = acc_t<T>;
  const int64_t T_ = a.T, D = a.D, group = a.H / a.HKV;
  std::vector<A> ks(T_ * D), kt(T_ * D), vt(T_ * D), dks(T_ * D), dvs(T_ * D);  // of one KV head; t: transposed
  std::vector<A> qs(BM * D), dos(BM * D), dqs(BM * D), p(BM * BN), ds(BM * BN), delta(BM);
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t head = 0; head < a.HKV; ++head) {
      const int64_t at = b * T_ * a.ld_kv + head * D;
      widen(ks.data(), k + at, a.ld_kv, T_, D);
      widen(kt.data(), k + at, a.ld_kv, T_, D, true);
      widen(vt.data(), v + at, a.ld_kv, T_, D, true);
      std::fill(dks.begin(), dks.end(), A(0));
      std::fill(dvs.begin(), dvs.end(), A(0));
      for (int64_t h = head * group; h < (head + 1) * group; ++h)
        for (int64_t t0 = 0; t0 < T_; t0 += BM) {
          const int m = int(std::min<int64_t>(BM, T_ - t0)), n = int(t0) + m;
          const A* l = lse + (b * a.H + h) * T_ + t0;
          widen(qs.data(), q + (b * T_ + t0) * a.ld_q + h * D, a.ld_q, m, D);
          widen(dos.data(), d_o + (b * T_ + t0) * a.ld_o + h * D, a.ld_o, m, D);
          std::fill(dqs.begin(), dqs.end(), A(0));
          for (int i = 0; i < m; ++i) {
            const T* oi = o + (b * T_ + t0 + i) * a.ld_o + h * D;
            delta[i] = 0;
            for (int64_t d = 0; d < D; ++d) delta[i] += dos[i * D + d] * A(oi[d]);
            if (!gate.gate) continue;
            const int64_t at = (b * T_ + t0 + i) * gate.ld + h;
            const A g = A(1) / (A(1) + std::exp(-A(gate.gate[at])));
            gate.dgate[at] = T(g * (A(1) - g) * delta[i]);
            delta[i] *= g;
            for (int64_t d = 0; d < D; ++d) dos[i * D + d] *= g;
          }
          for (int j0 = 0; j0 < n; j0 += BN) {
            const int w = std::min(BN, n - j0);
            std::fill(p.begin(), p.end(), A(0));
            std::fill(ds.begin(), ds.end(), A(0));
            multiply_add(p.data(), BN, qs.data(), D, 1, &kt[j0], T_, m, w, int(D));
            multiply_add(ds.data(), BN, dos.data(), D, 1, &vt[j0], T_, m, w, int(D));
            for (int i = 0; i < m; ++i) {
              A *pi = &p[i * BN], *dsi = &ds[i * BN];
              const int seen = std::max(0, std::min(w, int(t0) + i + 1 - j0));
              for (int j = 0; j < seen; ++j) {
                pi[j] = exponential(pi[j] * A(a.scale) - l[i]);
                dsi[j] = pi[j] * (dsi[j] - delta[i]) * A(a.scale);
              }
              for (int j = seen; j < w; ++j) pi[j] = dsi[j] = 0;
            }
            multiply_add(dqs.data(), D, ds.data(), BN, 1, &ks[j0 * D], D, m, int(D), w);
            multiply_add(&dks[j0 * D], D, ds.data(), 1, BN, qs.data(), D, w, int(D), m);
            multiply_add(&dvs[j0 * D], D, p.data(), 1, BN, dos.data(), D, w, int(D), m);
          }
          for (int i = 0; i < m; ++i)
            for (int64_t d = 0; d < D; ++d) dq[(b * T_ + t0 + i) * a.ld_dq + h * D + d] = T(dqs[i * D + d]);
        }
      for (int64_t j = 0; j < T_; ++j)
        for (int64_t d = 0; d < D; ++d) {
          dk[(b * T_ + j) * a.ld_dkv + head * D + d] = T(dks[j * D + d]);
          dv[(b * T_ + j) * a.ld_dkv + head * D + d] = T(dvs[j * D + d]);
        }
    }
}

}  // namespace cpu
