// Operations without sums: activations, positions, parameters.
#pragma once

#include <cmath>

#include "lib/ops/kernels.cuh"
#include "lib/ops/ops.h"
#include "lib/ops/philox.h"

namespace gpu {

// ------------------------------------------------------------------------------------------------------ activations

// The fast exponential (relative error about 2^-21) is far below bf16's rounding; float keeps the exact one.
template <class T>
__device__ __forceinline__ float sigmoid(float x) {
  if constexpr (sizeof(T) == 2) return reciprocal_approx(1.0f + exp2_approx(-1.4426950408889634f * x));
  else return 1.0f / (1.0f + expf(-x));
}

// gelu(h) and its slope; the formulas stand in cpu/ops.h. 0.5 (1 + tanh u) is sigmoid(2u).
template <class T>
__device__ __forceinline__ float2 gelu(float h) {
  constexpr float k = 1.5957691216057308f, a = 0.044715f;
  const float square = h * h, s = sigmoid<T>(h * (k * a * square + k)), g = h * s;
  return make_float2(g, s + g * (1.0f - s) * (3.0f * k * a * square + k));
}

template <class T>
struct GeluForward {
  T* g;        // (n)
  const T* h;  // (n)
  template <int N>
  __device__ void at(int64_t i) const {
    float x[N];
    load(x, h + i);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = gelu<T>(x[j]).x;
    store(g + i, x);
  }
};
template <class T>
void gelu_forward(cudaStream_t stream, T* g, const T* h, int64_t n) {
  each<width<T>>(stream, GeluForward<T>{g, h}, n, aligned(g, h));
}

template <class T>
struct AddBias {
  T* x;           // (M,ld), of which N columns
  const T* bias;  // (N)
  int64_t N, ld;
  template <int n>
  __device__ void at(int64_t i) const {
    float v[n], b[n];
    load(v, x + i / N * ld + i % N);
    load(b, bias + i % N);
#pragma unroll
    for (int j = 0; j < n; ++j) v[j] += b[j];
    store(x + i / N * ld + i % N, v);
  }
};
template <class T>
void add_bias(cudaStream_t stream, T* x, const T* bias, int64_t M, int64_t N, int64_t ld) {
  each<width<T>>(stream, AddBias<T>{x, bias, N, ld}, M * N,
                 aligned(x, bias) && N % width<T> == 0 && ld % width<T> == 0);
}

template <class T>
struct Add {
  T* y;            // (n)
  const T *a, *b;  // (n)
  template <int N>
  __device__ void at(int64_t i) const {
    float x[N], z[N];
    load(x, a + i), load(z, b + i);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] += z[j];
    store(y + i, x);
  }
};
template <class T>
void add(cudaStream_t stream, T* y, const T* a, const T* b, int64_t n) {
  each<width<T>>(stream, Add<T>{y, a, b}, n, aligned(y, a, b));
}

// x and the gradient d of gelu(x): gelu(x) and that of x.
template <class T, int N>
__device__ __forceinline__ void gelu_gradient(float (&x)[N], float (&d)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const float2 v = gelu<T>(x[j]);
    x[j] = v.x, d[j] *= v.y;
  }
}
template <class T>
struct GeluBackward {
  T *dg_g, *h_dh;  // (n)
  template <int N>
  __device__ void at(int64_t i) const {
    float x[N], d[N];
    load(x, h_dh + i), load(d, dg_g + i);
    gelu_gradient<T>(x, d);
    store(dg_g + i, x), store(h_dh + i, d);
  }
};
template <class T>
void gelu_backward(cudaStream_t stream, T* dg_g, T* h_dh, int64_t n) {
  each<width<T>>(stream, GeluBackward<T>{dg_g, h_dh}, n, aligned(dg_g, h_dh));
}

template <class T>
__device__ __forceinline__ float swiglu(float gate, float up) {
  return gate * sigmoid<T>(gate) * up;
}
struct SwigluGradient {
  float gate, up;  // their gradients, from that of g
  float g;
};
template <class T>
__device__ __forceinline__ SwigluGradient swiglu_gradient(float gate, float up, float dg) {
  const float s = sigmoid<T>(gate), silu = gate * s;
  return {dg * up * (s + silu * (1.0f - s)), dg * silu, silu * up};
}
// g or dg_g (M,F), h or h_dh (M,2F). A thread owns one vector of g and the two of h that it belongs to.
template <class T, int N>
__global__ void __launch_bounds__(256) swiglu_forward_kernel(T* g, const T* h, int64_t M, int64_t F) {
  begin_kernel();
  const int64_t m = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t f = (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * N;
  if (m >= M || f >= F) return;
  float a[N], b[N];
  load(a, h + 2 * m * F + f), load(b, h + 2 * m * F + F + f);
#pragma unroll
  for (int j = 0; j < N; ++j) a[j] = swiglu<T>(a[j], b[j]);
  store(g + m * F + f, a);
}
template <class T, int N>
__global__ void __launch_bounds__(256) swiglu_backward_kernel(T* dg_g, T* h_dh, int64_t M, int64_t F) {
  begin_kernel();
  const int64_t m = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t f = (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * N;
  if (m >= M || f >= F) return;
  T *gate = h_dh + 2 * m * F + f, *up = gate + F, *dg = dg_g + m * F + f;
  float a[N], b[N], d[N];
  load(a, gate), load(b, up), load(d, dg);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    const SwigluGradient of = swiglu_gradient<T>(a[j], b[j], d[j]);
    a[j] = of.gate, b[j] = of.up, d[j] = of.g;
  }
  store(gate, a), store(up, b), store(dg, d);
}
template <class T>
void swiglu_forward(cudaStream_t stream, T* g, const T* h, int64_t M, int64_t F) {
  constexpr int N = width<T>;
  if (M == 0 || F == 0) return;
  const bool vectors = F % N == 0 && aligned(g, h);
  const Grid grid = rows_by_vectors(M, vectors ? F / N : F);
  if (vectors) launch(stream, swiglu_forward_kernel<T, N>, grid, g, h, M, F);
  else launch(stream, swiglu_forward_kernel<T, 1>, grid, g, h, M, F);
}
template <class T>
void swiglu_backward(cudaStream_t stream, T* dg_g, T* h_dh, int64_t M, int64_t F) {
  constexpr int N = width<T>;
  if (M == 0 || F == 0) return;
  const bool vectors = F % N == 0 && aligned(dg_g, h_dh);
  const Grid grid = rows_by_vectors(M, vectors ? F / N : F);
  if (vectors) launch(stream, swiglu_backward_kernel<T, N>, grid, dg_g, h_dh, M, F);
  else launch(stream, swiglu_backward_kernel<T, 1>, grid, dg_g, h_dh, M, F);
}

template <class T>
struct SiluForward {
  T *a, *h;           // (M,N)
  const T *x, *bias;  // (M,ld), of which N columns; (N)
  int64_t columns, ld;
  template <int n>
  __device__ void at(int64_t i) const {
    float v[n], b[n];
    load(v, x + i / columns * ld + i % columns);
    load(b, bias + i % columns);
#pragma unroll
    for (int j = 0; j < n; ++j) v[j] = float(T(v[j] + b[j]));  // as it is stored: the backward has nothing else
    store(h + i, v);
#pragma unroll
    for (int j = 0; j < n; ++j) v[j] *= sigmoid<T>(v[j]);
    store(a + i, v);
  }
};
template <class T>
void silu_forward(cudaStream_t stream, T* a, T* h, const T* x, const T* bias, int64_t M, int64_t N, int64_t ld) {
  each<width<T>>(stream, SiluForward<T>{a, h, x, bias, N, ld}, M * N,
                 aligned(a, h, x, bias) && N % width<T> == 0 && ld % width<T> == 0);
}

template <class T>
struct SiluBackward {
  T *da_a, *dx;  // (M,N); (M,ld), of which N columns
  const T* h;    // (M,N)
  int64_t columns, ld;
  template <int n>
  __device__ void at(int64_t i) const {
    float v[n], d[n];
    load(v, h + i), load(d, da_a + i);
#pragma unroll
    for (int j = 0; j < n; ++j) {
      const float s = sigmoid<T>(v[j]), silu = v[j] * s;
      d[j] *= s + silu * (1.0f - s), v[j] = silu;
    }
    store(dx + i / columns * ld + i % columns, d), store(da_a + i, v);
  }
};
template <class T>
void silu_backward(cudaStream_t stream, T* da_a, T* dx, const T* h, int64_t M, int64_t N, int64_t ld) {
  each<width<T>>(stream, SiluBackward<T>{da_a, dx, h, N, ld}, M * N,
                 aligned(da_a, dx, h) && N % width<T> == 0 && ld % width<T> == 0);
}

template <class T>
struct CopyColumns {
  T* to;          // (M,ld_to), of which `columns` columns
  const T* from;  // (M,ld_from), of which as many
  int64_t columns, ld_to, ld_from;
  template <int n>
  __device__ void at(int64_t i) const {
    const int64_t m = i / columns, c = i % columns;
    float v[n];
    load(v, from + m * ld_from + c);
    store(to + m * ld_to + c, v);
  }
};
template <class T>
void copy_columns(cudaStream_t stream, T* to, const T* from, int64_t M, int64_t N, int64_t ld_to, int64_t ld_from) {
  each<width<T>>(stream, CopyColumns<T>{to, from, N, ld_to, ld_from}, M * N,
                 aligned(to, from) && N % width<T> == 0 && ld_to % width<T> == 0 && ld_from % width<T> == 0);
}

// -------------------------------------------------------------------------------------------------------- positions

struct RopeTable {
  float2* table;  // (T_,D/2)
  int64_t half, D;
  Rope how;
  template <int N>
  __device__ void at(int64_t i) const {
    const double angle = double(i / half) * how.angle(i % half, D);
    table[i] = make_float2(float(cos(angle)), float(sin(angle)));
  }
};
template <class T>
void rope_table(cudaStream_t stream, float* table, int64_t T_, int64_t D, const Rope& how) {
  each<1>(stream, RopeTable{reinterpret_cast<float2*>(table), D / 2, D, how}, T_ * (D / 2), /*vectors=*/false);
}

// x (M,ld), table (T_,D/2,2). threadIdx.x runs along the D / 2 pairs of a head, threadIdx.y and blockIdx.x along rows,
// blockIdx.y along groups of four heads. A thread owns N pairs of each head in its group: the table is read once a
// group, x read and written once.
constexpr int rope_heads = 4;
template <class T, int N>
__global__ void __launch_bounds__(256)
    rope_kernel(T* x, const float* table, int64_t M, int64_t T_, int64_t heads, int64_t D, int64_t ld, bool inverse) {
  begin_kernel();
  const int64_t m = int64_t(blockIdx.x) * blockDim.y + threadIdx.y, half = D / 2;
  if (m >= M) return;
  const int64_t first = int64_t(blockIdx.y) * rope_heads;
  for (int64_t i = int64_t(threadIdx.x) * N; i < half; i += int64_t(blockDim.x) * N) {
    float cs[2 * N];
    const float* at = table + (uint32_t(m) % uint32_t(T_) * half + i) * 2;
    if constexpr (N == 1) cs[0] = at[0], cs[1] = at[1];
    else load(cs, at);
    if (inverse)
#pragma unroll
      for (int j = 0; j < N; ++j) cs[2 * j + 1] = -cs[2 * j + 1];
    Pack<T, N> low[rope_heads], high[rope_heads];
    T* p = x + m * ld + first * D + i;
#pragma unroll
    for (int h = 0; h < rope_heads; ++h)
      if (first + h < heads) low[h] = load<N>(p + h * D), high[h] = load<N>(p + h * D + half);
#pragma unroll
    for (int h = 0; h < rope_heads; ++h) {
      if (first + h >= heads) continue;
      float a[N], b[N];
      widen(a, low[h]), widen(b, high[h]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float c = cs[2 * j], s = cs[2 * j + 1], turned = a[j] * c - b[j] * s;
        b[j] = b[j] * c + a[j] * s, a[j] = turned;
      }
      store(p + h * D, a), store(p + h * D + half, b);
    }
  }
}
template <class T>
void rope(cudaStream_t stream, T* x, const float* table, int64_t M, int64_t T_, int64_t heads, int64_t D, int64_t ld,
          bool inverse) {
  constexpr int N = width<T>;
  if (M == 0 || heads == 0) return;
  const bool vectors = D / 2 % N == 0 && ld % N == 0 && aligned(x, table);
  const int64_t pairs = vectors ? D / 2 / N : D / 2;
  const unsigned tx = unsigned(std::min<int64_t>(pairs, 256)), ty = 256 / tx;
  const dim3 blocks(unsigned(ceil_div(M, ty)), unsigned(ceil_div(heads, rope_heads))), threads(tx, ty);
  if (vectors) launch(stream, rope_kernel<T, N>, {blocks, threads}, x, table, M, T_, heads, D, ld, inverse);
  else launch(stream, rope_kernel<T, 1>, {blocks, threads}, x, table, M, T_, heads, D, ld, inverse);
}

// x (M,C), table (V,C), tokens (M). A thread owns one vector of channels in every blockDim.y-th of its block's rows, so
// that the frequencies are worked out once. The angle is taken into [-pi, pi] in double; there the fast sine is exact
// to 2^-21.
constexpr int rows_a_thread = 8;
template <class T, int N>
__global__ void __launch_bounds__(256)
    embedding_forward_kernel(T* __restrict__ x, const T* __restrict__ table, const int32_t* __restrict__ tokens,
                             int64_t M, int64_t T_, int64_t C, bool add_positions) {
  begin_kernel();
  const int64_t c = (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * N;
  if (c >= C) return;
  constexpr int pairs = (N + 1) / 2;
  double turns[pairs] = {};  // a position, of channels 2i and 2i + 1: 10000^(-2i/C) / 2 pi
#pragma unroll
  for (int j = 0; j < pairs; ++j)
    if (add_positions)
      turns[j] = exp2(double((c + 2 * j) / 2 * 2) / double(C) * -13.287712379549449) / 6.283185307179586;
  int64_t m = int64_t(blockIdx.x) * blockDim.y * rows_a_thread + threadIdx.y;
#pragma unroll 4
  for (int r = 0; r < rows_a_thread; ++r, m += blockDim.y) {
    if (m >= M) return;
    float v[N];
    load(v, table + tokens[m] * C + c);
    if (add_positions) {
      const double t = double(uint32_t(m) % uint32_t(T_));
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const double turn = t * turns[j / 2];
        const float angle = float(turn - rint(turn)) * 6.28318531f;
        v[j] += (c + j) % 2 ? __cosf(angle) : __sinf(angle);
      }
    }
    store(x + m * C + c, v);
  }
}
template <class T>
void embedding_forward(cudaStream_t stream, T* x, const T* table, const int32_t* tokens, int64_t M, int64_t T_,
                       int64_t C, bool add_positions) {
  constexpr int N = width<T>;
  if (M == 0) return;
  const bool vectors = C % N == 0 && aligned(x, table);
  Grid g = rows_by_vectors(M, vectors ? C / N : C);
  g.blocks.x = unsigned(ceil_div(M, int64_t(g.threads.y) * rows_a_thread));
  if (vectors) launch(stream, embedding_forward_kernel<T, N>, g, x, table, tokens, M, T_, C, add_positions);
  else launch(stream, embedding_forward_kernel<T, 1>, g, x, table, tokens, M, T_, C, add_positions);
}

// ------------------------------------------------------------------------------------------------------- parameters

// Weights in halves are read and written as vectors too: of two numbers one word of high halves, one of rests.
template <class W>
constexpr int weight_width = width<float>;
template <>
constexpr int weight_width<Halves> = width<bf16>;
inline bool aligned_weights(const float* w) { return aligned(w); }
inline bool aligned_weights(const Halves& w) { return aligned(w.high, w.rest); }
template <int N>
__device__ __forceinline__ void load(float (&f)[N], const Halves& w) {
  if constexpr (N == 1) {
    f[0] = get(w, 0);
  } else {
    Pack<bf16, N> high = load<N>(w.high);
    Pack<int16_t, N> rest = load<N>(w.rest);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const uint32_t h = word(high, i), r = word(rest, i);
      f[2 * i] = __uint_as_float((h << 16) + uint32_t(int32_t(int16_t(r))));
      f[2 * i + 1] = __uint_as_float((h & 0xffff0000u) + uint32_t(int32_t(r) >> 16));
    }
  }
}
template <int N>
__device__ __forceinline__ void store(const Halves& w, const float (&f)[N]) {
  if constexpr (N == 1) {
    put(w, 0, f[0]);
  } else {
    Pack<bf16, N> high;
    Pack<int16_t, N> rest;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const float a = f[2 * i], b = f[2 * i + 1];
      word(high, i) = uint32_t(nearest_away(a).bits) | uint32_t(nearest_away(b).bits) << 16;
      word(rest, i) = uint32_t(uint16_t(rest_of(a))) | uint32_t(uint16_t(rest_of(b))) << 16;
    }
    store(w.high, high), store(w.rest, rest);
  }
}

template <class W>
struct InitNormal {  // one Philox counter: normal numbers 4q .. 4q+3 of the tensor
  W w;               // (n)
  uint64_t seed;
  uint32_t tensor;
  int64_t first, n;
  float mean, std;
  template <int N>
  __device__ void at(int64_t t) const {
    const int64_t q = first / 4 + t;
    const Normals4 four = philox_normals(seed, tensor, uint64_t(q));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t i = 4 * q + j - first;
      if (i >= 0 && i < n) put(w, i, mean + std * fminf(3.0f, fmaxf(-3.0f, four.x[j])));
    }
  }
};
template <class W>
void init_normal(cudaStream_t stream, W w, uint64_t seed, uint32_t tensor, int64_t first, int64_t n, float mean,
                 float std) {
  if (n == 0) return;
  each<1>(stream, InitNormal<W>{w, seed, tensor, first, n, mean, std}, (first + n - 1) / 4 - first / 4 + 1,
          /*vectors=*/false);
}

template <class W>
struct Fill {
  W w;  // (n)
  float value;
  template <int N>
  __device__ void at(int64_t i) const {
    float v[N];
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = value;
    store(w + i, v);
  }
};
template <class W>
void fill(cudaStream_t stream, W w, float value, int64_t n) {
  each<weight_width<W>>(stream, Fill<W>{w, value}, n, aligned_weights(w));
}

template <class W>
struct CopyWeights {
  W to;               // (n)
  const float* from;  // (n)
  template <int N>
  __device__ void at(int64_t i) const {
    float v[N];
    load(v, from + i);
    store(to + i, v);
  }
};
template <class W>
void copy_weights(cudaStream_t stream, W to, const float* from, int64_t n) {
  each<weight_width<W>>(stream, CopyWeights<W>{to, from}, n, aligned_weights(to) && aligned(from));
}

template <class To, class From>
struct Cast {
  To* to;            // (n)
  const From* from;  // (n)
  template <int N>
  __device__ void at(int64_t i) const {
    float v[N];
    load(v, from + i);
    store(to + i, v);
  }
};
template <class To, class From>
void cast(cudaStream_t stream, To* to, const From* from, int64_t n) {
  each<common_width<To, From>>(stream, Cast<To, From>{to, from}, n, aligned(to, from));
}

template <class To>
struct CastWeights {
  To* to;          // (n)
  const float* w;  // (n)
  template <int N>
  __device__ void at(int64_t i) const {
    float v[N];
    load(v, w + i);
    if constexpr (std::is_same_v<To, bf16>) {
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] = nearest_away(v[j]);
    }
    store(to + i, v);
  }
};
template <class To>
void cast_weights(cudaStream_t stream, To* to, const float* w, int64_t n) {
  each<common_width<To, float>>(stream, CastWeights<To>{to, w}, n, aligned(to, w));
}

// Threads that find something all write the same.
template <class T>
struct FlagNotFinite {
  int32_t* flag;  // (1)
  const T* x;     // (n)
  template <int N>
  __device__ void at(int64_t i) const {
    float v[N];
    load(v, x + i);
    bool finite = true;
#pragma unroll
    for (int j = 0; j < N; ++j) finite = finite && isfinite(v[j]);
    if (!finite) *flag = 1;
  }
};
template <class T>
void flag_not_finite(cudaStream_t stream, int32_t* flag, const T* x, int64_t n) {
  each<width<T>>(stream, FlagNotFinite<T>{flag, x}, n, aligned(x));
}

// 28 bytes a parameter with moments in fp32, 20 in bf16: w, m, v read and written, the gradient read; 2 less where that
// is bf16. Random bits as in the twin: a draw serves four elements, both moments of each.
template <class W, class M, class G>
struct AdamWUpdate {
  W w;                    // (n)
  M *m, *v;               // (n)
  const G* grad;          // (n)
  const double* sumsq;    // (1) or none
  const ops::AdamW* now;  // (1)
  float clip;
  int64_t decayed, first;
  uint64_t seed;
  uint32_t tensor;
  template <int N>
  __device__ void at(int64_t i) const {
    float p[N], mi[N], vi[N], g[N];  // on their way before it is known that they count
    load(p, w + i), load(mi, m + i), load(vi, v + i), load(g, grad + i);
    if (sumsq && !isfinite(*sumsq)) return;
    const ops::AdamW a = *now;
    const float factor = clip > 0 ? fminf(1.0f, clip / float(sqrt(*sumsq))) : 1.0f;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float gj = g[j] * factor, decay = i + j < decayed ? a.weight_decay : 0.0f;
      mi[j] = a.beta1 * mi[j] + (1 - a.beta1) * gj;
      vi[j] = a.beta2 * vi[j] + (1 - a.beta2) * gj * gj;
      p[j] -= a.lr * (a.c1 * mi[j] / (sqrtf(a.c2 * vi[j]) + a.eps) + decay * p[j]);
    }
    if constexpr (std::is_same_v<M, bf16>) {
#pragma unroll
      for (int j = 0; j < N; j += 4) {
        const int64_t e = first + i + j;
        const Philox4 bits = philox4x32({{uint32_t(e / 4), uint32_t(uint64_t(e / 4) >> 32), tensor, a.step}},
                                        uint32_t(seed), uint32_t(seed >> 32));
#pragma unroll
        for (int k = 0; k < 4 && j + k < N; ++k) {
          // A vector begins at a multiple of four elements of the tensor; a single element anywhere.
          const uint32_t word = N == 1 ? bits.x[e % 4] : bits.x[k];
          mi[j + k] = bf16::stochastic(mi[j + k], word & 0xffffu), vi[j + k] = bf16::stochastic(vi[j + k], word >> 16);
        }
      }
    }
    store(w + i, p), store(m + i, mi), store(v + i, vi);
  }
};
template <class W, class M, class G>
void adamw(cudaStream_t stream, W w, M* m, M* v, const G* grad, const double* sumsq, float clip, const ops::AdamW* now,
           int64_t n, int64_t decayed, uint64_t seed, uint32_t tensor, int64_t first, ops::Series series) {
  // A vector of moments, whatever the rest is in: with two, a warp would read and write half of each sector at a time.
  constexpr int N = width<M>;
  const AdamWUpdate<W, M, G> update{w, m, v, grad, sumsq, now, clip, decayed, first, seed, tensor};
  each_of_series<N>(stream, update, n, first % 4 == 0 && aligned_weights(w) && aligned(m, v, grad),
                    series == ops::Series::begins);
}

}  // namespace gpu
