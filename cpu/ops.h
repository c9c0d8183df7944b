// The twin of every operation of lib/ops/ops.h in plain loops: the CPU backend, and the oracle of the kernels' tests.
// Read a twin first, then its kernel. T: storage (float, bf16, double); sums are in A = acc_t<T>. Inner loops are
// written so that a compiler can use vector registers: unit stride, no branches, an exponential of its own, sums in
// lanes.
#pragma once

#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "lib/ops/ops.h"
#include "lib/ops/philox.h"

namespace cpu {

using ops::AdamW;
using ops::GradNorm;
using ops::Norm;
using ops::PowerSum;
using ops::TableRows;
using ops::TokenIndex;

// ------------------------------------------------------------------------------------------------------- building bits

// sum of f(0) .. f(n-1), in 16 partial sums that a compiler may keep in vector registers. The order is fixed.
template <class A, class F>
inline A sum_of(int64_t n, F f) {
  constexpr int lanes = 16;
  const int64_t whole = n / lanes * lanes;
  A lane[lanes] = {}, tail = 0;
  for (int64_t i = 0; i < whole; i += lanes)
    for (int j = 0; j < lanes; ++j) lane[j] += f(i + j);
  for (int64_t i = whole; i < n; ++i) tail += f(i);
  for (int width = lanes / 2; width > 0; width /= 2)
    for (int j = 0; j < width; ++j) lane[j] += lane[j + width];
  return lane[0] + tail;
}

// e^x without a call, so that loops vectorise: x = k ln 2 + r with |r| <= ln(2)/2, a polynomial for e^r, k put into the
// exponent's bits. Relative error below 2e-7; saturates outside [-87, 88].
inline float exp_(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the last bits of the sum are k, rounded
  const float k = shifted - 12582912.0f;
  const float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;  // ln 2 in two parts, so that r keeps all its bits
  float p = 1.9875691500e-4f;                                   // Cephes' minimax polynomial
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  uint32_t bits;
  std::memcpy(&bits, &shifted, 4);
  bits = (bits + 127u) << 23;  // the magic number's own bits are shifted out
  float power;
  std::memcpy(&power, &bits, 4);
  return p * power;
}
inline double exp_(double x) { return std::exp(x); }

template <class A>
inline A sigmoid(A x) {
  return A(1) / (A(1) + exp_(-x));
}

// ------------------------------------------------------------------------------------------------------------- matmul

inline void gemm(bool ta, bool tb, int64_t M, int64_t N, int64_t K, const float* a, const float* b, float beta,
                 float* c) {
  cblas_sgemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, int(M), int(N), int(K), 1,
              a, int(ta ? M : K), b, int(tb ? K : N), beta, c, int(N));
}
inline void gemm(bool ta, bool tb, int64_t M, int64_t N, int64_t K, const double* a, const double* b, double beta,
                 double* c) {
  cblas_dgemm(CblasRowMajor, ta ? CblasTrans : CblasNoTrans, tb ? CblasTrans : CblasNoTrans, int(M), int(N), int(K), 1,
              a, int(ta ? M : K), b, int(tb ? K : N), beta, c, int(N));
}

// BLAS knows no bf16: such a matrix is copied to a float scratch (one a role and thread, kept between calls).
enum Role { role_a, role_b, role_out };
template <class T>
inline acc_t<T>* scratch(Role role, T* p, int64_t n) {
  if constexpr (!std::is_same_v<T, bf16>) {
    return p;
  } else {
    static thread_local std::vector<float> kept[3];
    if (int64_t(kept[role].size()) < n) kept[role].resize(n);
    return kept[role].data();
  }
}
template <class T>
inline const acc_t<T>* widened(Role role, const T* p, int64_t n) {
  acc_t<T>* to = scratch(role, const_cast<T*>(p), n);
  if constexpr (std::is_same_v<T, bf16>)
    for (int64_t i = 0; i < n; ++i) to[i] = p[i];
  return to;
}

template <class T>
void matmul(T* y, const T* x, const T* w, const T* bias, const T* residual, int64_t M, int64_t N, int64_t K) {
  using A = acc_t<T>;
  A* out = scratch(role_out, y, M * N);
  const bool add = bias || residual;
  for (int64_t m = 0; add && m < M; ++m)
    for (int64_t n = 0; n < N; ++n)
      out[m * N + n] = (bias ? A(bias[n]) : A(0)) + (residual ? A(residual[m * N + n]) : A(0));
  gemm(false, true, M, N, K, widened(role_a, x, M * K), widened(role_b, w, N * K), A(add), out);
  if constexpr (std::is_same_v<T, bf16>)
    for (int64_t i = 0; i < M * N; ++i) y[i] = out[i];
}

// out (+)= op(a) op(b), rounded once to G.
template <class T, class G>
void multiply(G* out, bool ta, bool tb, const T* a, const T* b, int64_t M, int64_t N, int64_t K, bool accumulate) {
  using A = acc_t<T>;
  A* sum = scratch(role_out, out, M * N);
  if constexpr (std::is_same_v<G, bf16>)
    for (int64_t i = 0; accumulate && i < M * N; ++i) sum[i] = out[i];
  gemm(ta, tb, M, N, K, widened(role_a, a, M * K), widened(role_b, b, N * K), A(accumulate), sum);
  if constexpr (std::is_same_v<G, bf16>)
    for (int64_t i = 0; i < M * N; ++i) out[i] = sum[i];
}
template <class T>
void matmul_dgrad(T* dx, const T* dy, const T* w, int64_t M, int64_t N, int64_t K, bool accumulate = false) {
  multiply(dx, false, false, dy, w, M, K, N, accumulate);
}
template <class T, class G>
void matmul_wgrad(G* dw, const T* dy, const T* x, int64_t M, int64_t N, int64_t K, bool accumulate = false) {
  multiply(dw, true, false, dy, x, N, K, M, accumulate);
}

template <class T, class G>
void bias_grad(G* db, const T* dy, acc_t<T>* partials, int64_t M, int64_t N, int64_t ld, bool accumulate = false,
               const ops::ColumnSums<G>* later = nullptr) {
  std::fill(partials, partials + N, acc_t<T>(0));
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n) partials[n] += acc_t<T>(dy[m * ld + n]);
  for (int64_t n = 0; !later && n < N; ++n) db[n] = G(accumulate ? acc_t<T>(db[n]) + partials[n] : partials[n]);
}
template <class G>
void sum_columns(const ops::ColumnSums<G>& sums) {
  for (int i = 0; i < sums.n; ++i)
    for (int64_t c = 0; c < sums.of[i].C; ++c) {
      acc_t<G> total = 0;
      for (int p = 0; p < sums.of[i].count; ++p) total += sums.of[i].pieces[p * sums.of[i].C + c];
      sums.of[i].out[c] = G(total);
    }
}

template <class T>
void add_bias(T* x, const T* bias, int64_t M, int64_t N, int64_t ld) {
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n) x[m * ld + n] = T(acc_t<T>(x[m * ld + n]) + acc_t<T>(bias[n]));
}

template <class T>
void add(T* y, const T* a, const T* b, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] = T(acc_t<T>(a[i]) + acc_t<T>(b[i]));
}

// Of |x|^p; of infinity, the largest.
template <class X>
double power_sum(GradNorm p, const X* x, int64_t n) {
  if (p == GradNorm::inf) {
    double most = 0;
    for (int64_t i = 0; i < n; ++i) {
      const double a = std::fabs(double(float(x[i])));
      most = std::max(most, a == a ? a : double(INFINITY));
    }
    return most;
  }
  return sum_of<double>(n, [=](int64_t i) {
    const double a = std::fabs(double(float(x[i])));
    return p == GradNorm::one ? a : p == GradNorm::two ? a * a : a * a * a;
  });
}

// -------------------------------------------------------------------------------------------------------------- norms

// y = (x - mean) / std * gamma + beta for one row; forward and apply share it and so agree in every bit.
template <class T>
inline void normalize_row(T* y, const T* x, const acc_t<T>* stats, const T* gamma, const T* beta, int64_t C) {
  using A = acc_t<T>;
  const A mean = stats[0], inv_std = stats[1];
  if (beta)
    for (int64_t c = 0; c < C; ++c) y[c] = T((A(x[c]) - mean) * inv_std * A(gamma[c]) + A(beta[c]));
  else
    for (int64_t c = 0; c < C; ++c) y[c] = T((A(x[c]) - mean) * inv_std * A(gamma[c]));
}

template <class T>
void norm_apply(Norm, T* y, const acc_t<T>* stats, const T* x, const T* gamma, const T* beta, int64_t M, int64_t C) {
  for (int64_t m = 0; m < M; ++m) normalize_row(y + m * C, x + m * C, stats + 2 * m, gamma, beta, C);
}

// The statistics are those of the sum as it is stored (rounded to T): the backward has nothing else.
template <class T>
void norm_forward(Norm kind, T* y, T* sum, acc_t<T>* stats, const T* x, const T* delta, const T* gamma, const T* beta,
                  int64_t M, int64_t C, double eps, float* largest = nullptr) {
  using A = acc_t<T>;
  for (int64_t m = 0; m < M; ++m) {
    const T* row = x + m * C;
    if (delta) {
      for (int64_t c = 0; c < C; ++c) sum[m * C + c] = T(A(row[c]) + A(delta[m * C + c]));
      row = sum + m * C;
    }
    const A mean = kind == Norm::layer ? sum_of<A>(C, [=](int64_t c) { return A(row[c]); }) / A(C) : A(0);
    const A variance = sum_of<A>(C, [=](int64_t c) { return (A(row[c]) - mean) * (A(row[c]) - mean); }) / A(C);
    stats[2 * m] = mean, stats[2 * m + 1] = A(1) / std::sqrt(variance + A(eps));
    normalize_row(y + m * C, row, stats + 2 * m, gamma, beta, C);
    if (largest) largest[m] = float(power_sum(GradNorm::inf, y + m * C, C));
  }
}

// With xhat = (x - mean) / std and g = dy gamma: dx = (g - mean(g) - xhat mean(g xhat)) / std; the mean of g is there
// because the forward takes the mean off, so the RMS norm lacks it.
template <class T, class G>
void norm_backward(Norm kind, T* dx, G* dgamma, G* dbeta, const T* dy, const T* dres, const T* x, const acc_t<T>* stats,
                   const T* gamma, acc_t<T>* partials, int64_t M, int64_t C, bool accumulate = false,
                   const ops::ColumnSums<G>* later = nullptr) {
  using A = acc_t<T>;
  const bool layer = kind == Norm::layer;
  A *sum_gamma = partials, *sum_beta = partials + C;
  std::fill(partials, partials + (layer ? 2 : 1) * C, A(0));
  for (int64_t m = 0; m < M; ++m) {
    const T *xr = x + m * C, *gr = dy + m * C;
    const A mean = stats[2 * m], inv_std = stats[2 * m + 1];
    const auto xhat = [=](int64_t c) { return (A(xr[c]) - mean) * inv_std; };
    const auto g = [=](int64_t c) { return A(gr[c]) * A(gamma[c]); };
    for (int64_t c = 0; c < C; ++c) sum_gamma[c] += A(gr[c]) * xhat(c);
    for (int64_t c = 0; layer && c < C; ++c) sum_beta[c] += A(gr[c]);
    const A mean_g = layer ? sum_of<A>(C, g) / A(C) : A(0);
    const A mean_gx = sum_of<A>(C, [=](int64_t c) { return g(c) * xhat(c); }) / A(C);
    for (int64_t c = 0; c < C; ++c) {
      const A through = inv_std * (g(c) - mean_g - xhat(c) * mean_gx);
      dx[m * C + c] = T(through + (dres ? A(dres[m * C + c]) : A(0)));
    }
  }
  if (later) return;
  for (int64_t c = 0; c < C; ++c) dgamma[c] = G(accumulate ? A(dgamma[c]) + sum_gamma[c] : sum_gamma[c]);
  for (int64_t c = 0; dbeta && c < C; ++c) dbeta[c] = G(accumulate ? A(dbeta[c]) + sum_beta[c] : sum_beta[c]);
}

// -------------------------------------------------------------------------------------------------------- activations

// gelu(h) = h/2 (1 + tanh u) = h sigmoid(2u) with u = sqrt(2/pi) (h + 0.044715 h^3): no cancellation for negative h.
template <class A>
struct Gelu {
  A value, slope;
};
template <class A>
inline Gelu<A> gelu(A h) {
  const A k = A(1.5957691216057308), a = A(0.044715);  // k = 2 sqrt(2/pi)
  const A s = sigmoid(k * (h + a * h * h * h));
  return {h * s, s + h * s * (A(1) - s) * k * (A(1) + A(3) * a * h * h)};
}

template <class T>
void gelu_forward(T* g, const T* h, int64_t n) {
  for (int64_t i = 0; i < n; ++i) g[i] = T(gelu(acc_t<T>(h[i])).value);
}
template <class T>
void gelu_backward(T* dg_g, T* h_dh, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const auto at = gelu(acc_t<T>(h_dh[i]));
    h_dh[i] = T(acc_t<T>(dg_g[i]) * at.slope), dg_g[i] = T(at.value);
  }
}
template <class T, class G>
void gelu_backward(T* dg_g, T* h_dh, int64_t M, int64_t F, G* db, acc_t<T>* partials, const ops::ColumnSums<G>* later) {
  gelu_backward(dg_g, h_dh, M * F);
  bias_grad(db, h_dh, partials, M, F, F, /*accumulate=*/false, later);
}
template <class T>
void matmul_gelu(T* g, T* h, const T* x, const T* w, const T* bias, int64_t M, int64_t N, int64_t K) {
  matmul(h, x, w, bias, static_cast<const T*>(nullptr), M, N, K);
  gelu_forward(g, h, M * N);
}

template <class T>
void swiglu_forward(T* g, const T* h, int64_t M, int64_t F) {
  using A = acc_t<T>;
  for (int64_t m = 0; m < M; ++m) {
    const T *gate = h + 2 * m * F, *up = gate + F;
    for (int64_t f = 0; f < F; ++f) g[m * F + f] = T(A(gate[f]) * sigmoid(A(gate[f])) * A(up[f]));
  }
}
template <class T>
void swiglu_backward(T* dg_g, T* h_dh, int64_t M, int64_t F) {
  using A = acc_t<T>;
  for (int64_t m = 0; m < M; ++m) {
    T *gate = h_dh + 2 * m * F, *up = gate + F, *dg = dg_g + m * F;
    for (int64_t f = 0; f < F; ++f) {
      const A a = gate[f], b = up[f], d = dg[f], s = sigmoid(a), silu = a * s;
      gate[f] = T(d * b * (s + silu * (A(1) - s))), up[f] = T(d * silu), dg[f] = T(silu * b);
    }
  }
}

template <class T>
void silu_forward(T* a, T* h, const T* x, const T* bias, int64_t M, int64_t N, int64_t ld) {
  using A = acc_t<T>;
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n) {
      h[m * N + n] = T(A(x[m * ld + n]) + A(bias[n]));
      const A v = h[m * N + n];  // as it is stored: the backward has nothing else
      a[m * N + n] = T(v * sigmoid(v));
    }
}
template <class T>
void silu_backward(T* da_a, T* dx, const T* h, int64_t M, int64_t N, int64_t ld) {
  using A = acc_t<T>;
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n) {
      const A v = h[m * N + n], s = sigmoid(v), silu = v * s;
      dx[m * ld + n] = T(A(da_a[m * N + n]) * (s + silu * (A(1) - s)));
      da_a[m * N + n] = T(silu);
    }
}
template <class T>
void copy_columns(T* to, const T* from, int64_t M, int64_t N, int64_t ld_to, int64_t ld_from) {
  for (int64_t m = 0; m < M; ++m) std::copy(from + m * ld_from, from + m * ld_from + N, to + m * ld_to);
}

// ---------------------------------------------------------------------------------------------------------- positions

template <class T>
void rope_table(acc_t<T>* table, int64_t T_, int64_t D, const Rope& how) {
  for (int64_t t = 0; t < T_; ++t)
    for (int64_t i = 0; i < D / 2; ++i) {
      const double angle = double(t) * how.angle(i, D);
      table[(t * (D / 2) + i) * 2] = acc_t<T>(std::cos(angle));
      table[(t * (D / 2) + i) * 2 + 1] = acc_t<T>(std::sin(angle));
    }
}
template <class T>
void rope(T* x, const acc_t<T>* table, int64_t M, int64_t T_, int64_t heads, int64_t D, int64_t ld, bool inverse) {
  using A = acc_t<T>;
  for (int64_t m = 0; m < M; ++m)
    for (int64_t h = 0; h < heads; ++h) {
      T *low = x + m * ld + h * D, *high = low + D / 2;
      const A* cs = table + (m % T_) * D;
      for (int64_t i = 0; i < D / 2; ++i) {
        const A c = cs[2 * i], s = inverse ? -cs[2 * i + 1] : cs[2 * i + 1], a = low[i], b = high[i];
        low[i] = T(a * c - b * s), high[i] = T(b * c + a * s);
      }
    }
}

// ---------------------------------------------------------------------------------------------------------- embedding

template <class T>
void embedding_forward(T* x, const T* table, const int32_t* tokens, int64_t M, int64_t T_, int64_t C,
                       bool add_positions) {
  using A = acc_t<T>;
  std::vector<A> position(C, A(0));
  for (int64_t t = 0; t < std::min(M, T_); ++t) {
    for (int64_t c = 0; add_positions && c < C; ++c) {
      const double angle = double(t) * std::exp2(-double(c / 2 * 2) / double(C) * std::log2(10000.0));
      position[c] = A(c % 2 ? std::cos(angle) : std::sin(angle));
    }
    for (int64_t m = t; m < M; m += T_) {
      const T* row = table + tokens[m] * C;
      for (int64_t c = 0; c < C; ++c) x[m * C + c] = T(A(row[c]) + position[c]);
    }
  }
}

// Sums in the kernels' order: each chunk of occurrences from zero, then the chunks.
template <class T, class G>
void embedding_backward(G* dtable, const T* dx, TokenIndex index, acc_t<T>*, int64_t, int64_t V, int64_t C,
                        TableRows rows) {
  using A = acc_t<T>;
  std::vector<A> row(C), part(C);
  for (int64_t v = 0; v < V; ++v) {
    if (rows == TableRows::used && index.start[v] == index.start[v + 1]) continue;
    std::fill(row.begin(), row.end(), A(0));
    for (int64_t begin = index.start[v]; begin < index.start[v + 1]; begin += TokenIndex::chunk) {
      const int64_t end = std::min<int64_t>(begin + TokenIndex::chunk, index.start[v + 1]);
      std::fill(part.begin(), part.end(), A(0));
      for (int64_t i = begin; i < end; ++i)
        for (int64_t c = 0; c < C; ++c) part[c] += A(dx[index.order[i] * C + c]);
      for (int64_t c = 0; c < C; ++c) row[c] += part[c];
    }
    for (int64_t c = 0; c < C; ++c)
      dtable[v * C + c] = G(rows == TableRows::add ? A(dtable[v * C + c]) + row[c] : row[c]);
  }
}

// --------------------------------------------------------------------------------------------------------------- head

template <class T>
void cross_entropy(T* logits, acc_t<T>* loss_rows, const int32_t* targets, acc_t<T> scale, bool backward, int64_t M,
                   int64_t V) {
  using A = acc_t<T>;
  for (int64_t m = 0; m < M; ++m) {
    T* row = logits + m * V;
    const int64_t target = targets[m];
    if (target < 0) {
      loss_rows[m] = A(0);
      if (backward) std::fill(row, row + V, T(A(0)));
      continue;
    }
    A largest = A(row[0]);
    for (int64_t v = 1; v < V; ++v) largest = A(row[v]) > largest ? A(row[v]) : largest;
    const A total = sum_of<A>(V, [=](int64_t v) { return exp_(A(row[v]) - largest); });
    const A at_target = row[target];
    loss_rows[m] = std::log(total) + largest - at_target;
    if (!backward) continue;
    const A factor = scale / total;
    for (int64_t v = 0; v < V; ++v) row[v] = T(factor * exp_(A(row[v]) - largest));
    row[target] = T(scale * (exp_(at_target - largest) / total - A(1)));
  }
}

template <class A>
void sum(A* out, const A* x, A*, int64_t n, bool accumulate) {
  const A total = sum_of<A>(n, [=](int64_t i) { return x[i]; });
  *out = accumulate ? *out + total : total;
}

template <class T>
void flag_not_finite(int32_t* flag, const T* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    if (!std::isfinite(acc_t<T>(x[i]))) *flag = 1;
}

// --------------------------------------------------------------------------------------------------------- parameters

template <class W>
void init_normal(W w, uint64_t seed, uint32_t tensor, int64_t first, int64_t n, float mean, float std) {
  Normals4 four{};
  for (int64_t i = first; i < first + n; ++i) {
    if (i == first || i % 4 == 0) four = philox_normals(seed, tensor, uint64_t(i / 4));
    put(w, i - first, mean + std * std::min(3.0f, std::max(-3.0f, four.x[i % 4])));
  }
}
template <class W>
void fill(W w, float value, int64_t n) {
  for (int64_t i = 0; i < n; ++i) put(w, i, value);
}
template <class W>
void copy_weights(W to, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) put(to, i, from[i]);
}

template <class To, class From>
void cast(To* to, const From* from, int64_t n) {
  if constexpr (std::is_same_v<To, From>) std::memmove(to, from, n * sizeof(To));
  else
    for (int64_t i = 0; i < n; ++i) to[i] = To(from[i]);
}
template <class To>
void cast_weights(To* to, const float* w, int64_t n) {
  if constexpr (std::is_same_v<To, bf16>)
    for (int64_t i = 0; i < n; ++i) to[i] = nearest_away(w[i]);
  else cast(to, w, n);
}
inline void total_power(GradNorm p, double* out, const double* pieces, int64_t n) {
  double total = 0;
  for (int64_t i = 0; i < n; ++i) total = p == GradNorm::inf ? std::max(total, pieces[i]) : total + pieces[i];
  *out = total;
}
template <class X>
void add_powers(const PowerSum& sum, const X* x, int64_t n) {
  if (!sum.out) return;
  const double pieces[] = {sum.adds ? *sum.out : 0, power_sum(sum.p, x, n)};
  total_power(sum.p, sum.out, pieces, 2);
}
template <class G, class To>
void accumulate_gradient(To* shard, const G* grad, int64_t n, bool accumulate, PowerSum sum = {}) {
  if (accumulate)
    for (int64_t i = 0; i < n; ++i) shard[i] = To(float(shard[i]) + float(grad[i]));
  else
    for (int64_t i = 0; i < n; ++i) shard[i] = To(float(grad[i]));
  add_powers(sum, shard, n);
}
template <class To, class E>
void sum_parts(To* to, const E* mine, int rank, const E* others, int64_t n, int ranks, bool accumulate,
               PowerSum sum = {}) {
  auto part = [&](int r) { return r == rank ? mine : others + among_others(r, rank) * n; };
  for (int64_t i = 0; i < n; ++i) {
    acc_t<E> total = acc_t<E>(part(0)[i]);
    for (int r = 1; r < ranks; ++r) total += acc_t<E>(part(r)[i]);
    to[i] = To(accumulate ? float(to[i]) + float(total) : total);
  }
  add_powers(sum, to, n);
}
inline void squared_norm(GradNorm p, double* out, const double* loss = nullptr) {
  if (p == GradNorm::inf) *out *= *out;
  else if (p != GradNorm::two) *out = std::pow(*out, 2.0 / double(int(p)));
  if (loss && !std::isfinite(*loss)) *out = std::nan("");
}

// Element i of a tensor takes its two random halves from word i % 4 of the draw for i / 4.
inline Philox4 rounding_bits(uint64_t seed, uint32_t tensor, uint32_t step, int64_t quad) {
  return philox4x32({{uint32_t(quad), uint32_t(quad >> 32), tensor, step}}, uint32_t(seed), uint32_t(seed >> 32));
}

template <class W, class M, class G>
void adamw(W w, M* m, M* v, const G* grad, const double* sumsq, float clip, const AdamW* now, int64_t n,
           int64_t decayed, uint64_t seed, uint32_t tensor, int64_t first, ops::Series = ops::Series::begins) {
  if (sumsq && !std::isfinite(*sumsq)) return;
  const AdamW a = *now;
  const float factor = clip > 0 ? std::min(1.0f, clip / float(std::sqrt(*sumsq))) : 1.0f;
  const auto update = [=](int64_t begin, int64_t end, float weight_decay) {
    Philox4 bits{};
    for (int64_t i = begin; i < end; ++i) {
      const float g = float(grad[i]) * factor;
      const float mi = a.beta1 * float(m[i]) + (1 - a.beta1) * g;
      const float vi = a.beta2 * float(v[i]) + (1 - a.beta2) * g * g;
      if constexpr (std::is_same_v<M, bf16>) {
        if (i == begin || (first + i) % 4 == 0) bits = rounding_bits(seed, tensor, a.step, (first + i) / 4);
        const uint32_t word = bits.x[(first + i) % 4];
        m[i] = bf16::stochastic(mi, word & 0xffffu), v[i] = bf16::stochastic(vi, word >> 16);
      } else {
        m[i] = mi, v[i] = vi;
      }
      const float was = get(w, i);
      put(w, i, was - a.lr * (a.c1 * mi / (std::sqrt(a.c2 * vi) + a.eps) + weight_decay * was));
    }
  };
  update(0, std::min(decayed, n), a.weight_decay);
  update(std::min(decayed, n), n, 0.0f);
}

}  // namespace cpu
