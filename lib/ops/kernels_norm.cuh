// LayerNorm and RMSNorm. Limits (bf16, M rows of C): forward with a residual moves 8 M C bytes, backward 8 M C.
#pragma once

#include <type_traits>

#include "lib/ops/kernels.cuh"
#include "lib/ops/ops.h"

namespace gpu {

// How a block covers rows of `vectors` vectors: x threads a row with `each` vectors to a thread, y rows a block.
struct NormShape {
  int each;
  dim3 threads;
};
// each = 0: the row is too long for registers.
inline NormShape norm_shape(int64_t vectors, int most) {
  for (int each = most; each >= 1; each /= 2)  // best: many vectors to a thread and no idle lanes
    if (vectors % (warp * each) == 0 && vectors / each <= 1024) {
      const unsigned x = unsigned(vectors / each);
      return {each, dim3(x, std::max(1u, 256 / x))};
    }
  for (int each = 1; each <= most; each *= 2)
    if (vectors <= 1024 * each) {
      const unsigned x = unsigned(round_up_to_warp(ceil_div(vectors, each)));
      return {each, dim3(x, std::max(1u, 256 / x))};
    }
  return {0, dim3(512)};
}

// y (N) from x (N), at N channels of gamma and beta (N; beta may be null), and the largest |y|, of a NaN infinity. One
// function, without anything that a compiler may contract in different ways, so that norm_apply repeats the bits of
// norm_forward.
template <class T, int N>
__device__ __forceinline__ float normalize(T* y, const Pack<T, N>& x, float mean, float inv_std, const T* gamma,
                                           const T* beta) {
  float v[N], g[N], b[N] = {};
  widen(v, x), load(g, gamma);
  if (beta) load(b, beta);
#pragma unroll
  for (int j = 0; j < N; ++j) v[j] = __fmaf_rn(__fmul_rn(__fsub_rn(v[j], mean), inv_std), g[j], b[j]);
  const Pack<T, N> rounded = narrow<T>(v);
  store(y, rounded);
  widen(v, rounded);
  float largest = 0;
#pragma unroll
  for (int j = 0; j < N; ++j) largest = fmaxf(largest, v[j] != v[j] ? INFINITY : fabsf(v[j]));
  return largest;
}

// y, sum, x, delta (M,C), stats (M), gamma, beta (C), largest (M), the largest |y| of each row, if finds_largest;
// delta and beta may be null, sum too where delta is. A block owns blockDim.y rows, the blockDim.x threads of a row
// `each` vectors apiece, blockDim.x apart. x and delta are read once and stay in registers as sum, rounded to T; sum, y
// and the statistics are written once.
template <class T, int each, bool finds_largest>
__global__ void __launch_bounds__(1024)
    norm_forward_kernel(bool layer, T* y, T* sum, float2* stats, float* largest, const T* x, const T* delta,
                        const T* gamma, const T* beta, int64_t M, int64_t C, float eps) {
  begin_kernel();
  constexpr int N = width<T>;
  __shared__ RowSums<float> shared[2];
  const int64_t m = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const int mine = m < M ? int(C / N) : 0;  // a row past the end has no vectors but meets the others at the barriers
  Pack<T, N> p[each], d[each];
#pragma unroll
  for (int k = 0; k < each; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    p[k] = d[k] = zeros<T, N>();
    if (i >= mine) continue;
    p[k] = load<N>(x + m * C + i * N);
    if (delta) d[k] = load<N>(delta + m * C + i * N);
  }
  float total = 0, squares = 0, unused = 0;
#pragma unroll
  for (int k = 0; k < each; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    float a[N], b[N];
    widen(a, p[k]);
    if (delta) {
      widen(b, d[k]);
#pragma unroll
      for (int j = 0; j < N; ++j) a[j] += b[j];
      p[k] = narrow<T>(a);
      if (i < mine) store(sum + m * C + i * N, p[k]);
      widen(a, p[k]);
    }
#pragma unroll
    for (int j = 0; j < N; ++j) total += a[j];
  }
  float mean = 0;
  if (layer) {
    row_sums(total, unused, shared[0]);
    mean = total / C;
  }
#pragma unroll
  for (int k = 0; k < each; ++k) {
    float a[N];
    widen(a, p[k]);
    if (int(threadIdx.x + k * blockDim.x) < mine)
#pragma unroll
      for (int j = 0; j < N; ++j) squares += (a[j] - mean) * (a[j] - mean);
  }
  row_sums(squares, unused, shared[1]);
  const float inv_std = rsqrtf(squares / C + eps);
  if (m < M && threadIdx.x == 0) stats[m] = make_float2(mean, inv_std);
  float most = 0;
#pragma unroll
  for (int k = 0; k < each; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i < mine)
      most =
          fmaxf(most, normalize(y + m * C + i * N, p[k], mean, inv_std, gamma + i * N, beta ? beta + i * N : nullptr));
  }
  if constexpr (finds_largest) {
    most = row_largest(most, shared[0]);
    if (m < M && threadIdx.x == 0) largest[m] = most;
  }
}

// The same arguments. Rows of any length, one block each: read three times, from L2 after the first. A thread meets
// only its own channels, so sum needs no barrier.
template <class T>
__global__ void __launch_bounds__(512)
    norm_forward_any_kernel(bool layer, T* y, T* sum, float2* stats, float* largest, const T* x, const T* delta,
                            const T* gamma, const T* beta, int64_t C, float eps) {
  begin_kernel();
  __shared__ RowSums<float> shared[2];
  const int64_t row = int64_t(blockIdx.x) * C;
  const T* from = delta ? sum : x;
  float total = 0, squares = 0, unused = 0, mean = 0;
  for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
    if (delta) sum[row + c] = T(float(x[row + c]) + float(delta[row + c]));
    total += float(from[row + c]);
  }
  if (layer) {
    row_sums(total, unused, shared[0]);
    mean = total / C;
  }
  for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
    const float a = float(from[row + c]) - mean;
    squares += a * a;
  }
  row_sums(squares, unused, shared[1]);
  const float inv_std = rsqrtf(squares / C + eps);
  if (threadIdx.x == 0) stats[blockIdx.x] = make_float2(mean, inv_std);
  float most = 0;
  for (int64_t c = threadIdx.x; c < C; c += blockDim.x)
    most = fmaxf(most,
                 normalize(y + row + c, load<1>(from + row + c), mean, inv_std, gamma + c, beta ? beta + c : nullptr));
  if (!largest) return;
  most = row_largest(most, shared[0]);
  if (threadIdx.x == 0) largest[blockIdx.x] = most;
}

template <class T>
void norm_forward(cudaStream_t stream, ops::Norm kind, T* y, T* sum, float* stats, const T* x, const T* delta,
                  const T* gamma, const T* beta, int64_t M, int64_t C, double eps, float* largest) {
  constexpr int N = width<T>;
  if (M == 0) return;
  const bool layer = kind == ops::Norm::layer, vectors = C % N == 0 && aligned(y, sum, x, delta, gamma, beta);
  float2* s = reinterpret_cast<float2*>(stats);
  const NormShape shape = norm_shape(C / N, 4);
  const unsigned blocks = unsigned(ceil_div(M, shape.threads.y));
  const auto with = [&](auto each, auto finds_largest) {
    launch(stream, norm_forward_kernel<T, each.value, finds_largest.value>, {blocks, shape.threads}, layer, y, sum, s,
           largest, x, delta, gamma, beta, M, C, float(eps));
  };
  const auto with_each = [&](auto each) {
    return largest ? with(each, std::true_type()) : with(each, std::false_type());
  };
  if (!vectors || shape.each == 0)
    launch(stream, norm_forward_any_kernel<T>, {unsigned(M), 512}, layer, y, sum, s, largest, x, delta, gamma, beta, C,
           float(eps));
  else if (shape.each == 4) with_each(std::integral_constant<int, 4>());
  else if (shape.each == 2) with_each(std::integral_constant<int, 2>());
  else with_each(std::integral_constant<int, 1>());
}

// y, x (M,C), stats (M), gamma, beta (C; may be null). A thread owns one vector.
template <class T, int N>
__global__ void __launch_bounds__(256)
    norm_apply_kernel(T* y, const float2* stats, const T* x, const T* gamma, const T* beta, int64_t M, int64_t C) {
  begin_kernel();
  const int64_t m = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  const int64_t c = (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * N;
  if (m >= M || c >= C) return;
  const float2 s = stats[m];
  normalize(y + m * C + c, load<N>(x + m * C + c), s.x, s.y, gamma + c, beta ? beta + c : nullptr);
}

template <class T>
void norm_apply(cudaStream_t stream, ops::Norm, T* y, const float* stats, const T* x, const T* gamma, const T* beta,
                int64_t M, int64_t C) {
  constexpr int N = width<T>;
  if (M == 0) return;
  const float2* s = reinterpret_cast<const float2*>(stats);
  const bool vectors = C % N == 0 && aligned(y, x, gamma, beta);
  const Grid g = rows_by_vectors(M, vectors ? C / N : C);
  if (vectors) launch(stream, norm_apply_kernel<T, N>, g, y, s, x, gamma, beta, M, C);
  else launch(stream, norm_apply_kernel<T, 1>, g, y, s, x, gamma, beta, M, C);
}

// Each of the sums, in a fixed order. A block owns 32 columns of sum blockIdx.y; its 32 warps take the pieces in turn.
template <class G>
__global__ void __launch_bounds__(1024) sum_columns_kernel(ops::ColumnSums<G> sums, bool accumulate) {
  begin_kernel();
  __shared__ float of_warps[warp][warp + 1];
  const auto& of = sums.of[blockIdx.y];
  const int64_t c = int64_t(blockIdx.x) * warp + threadIdx.x;
  if (c - threadIdx.x >= of.C) return;
  float total = 0;
  if (c < of.C)
#pragma unroll 4
    for (int p = threadIdx.y; p < of.count; p += warp) total += of.pieces[int64_t(p) * of.C + c];
  of_warps[threadIdx.y][threadIdx.x] = total;
  __syncthreads();
  if (threadIdx.y != 0 || c >= of.C) return;
  total = 0;
#pragma unroll
  for (int y = 0; y < warp; ++y) total += of_warps[y][threadIdx.x];
  of.out[c] = G(accumulate ? float(of.out[c]) + total : total);
}
template <class G>
void sum_columns(cudaStream_t stream, const ops::ColumnSums<G>& sums, bool accumulate = false) {
  int64_t most = 0;
  for (int i = 0; i < sums.n; ++i) most = std::max(most, sums.of[i].C);
  if (sums.n > 0)
    launch(stream, sum_columns_kernel<G>, {dim3(unsigned(ceil_div(most, warp)), unsigned(sums.n)), dim3(warp, warp)},
           sums, accumulate);
}

// Threads of a block that has several rows: as many as registers allow twice on an SM, so that enough of what they read
// is under way.
constexpr int norm_backward_threads(int each, bool layer) { return each > 1 ? 256 : layer ? 320 : 384; }

// A block's row of partial sums (C) from its threads' sums: rows of the block are added up in order by its first row's
// threads, through `combine` (each * N for every thread) where the block has more than one.
template <int each, int N>
__device__ __forceinline__ void write_partials(float* out, float (&sums)[each][N], float* combine, int vectors) {
  if (blockDim.y > 1) {
    float* mine = combine + (threadIdx.y * blockDim.x + threadIdx.x) * each * N;
    __syncthreads();
#pragma unroll
    for (int k = 0; k < each; ++k)
#pragma unroll
      for (int j = 0; j < N; ++j) mine[k * N + j] = sums[k][j];
    __syncthreads();
    if (threadIdx.y > 0) return;
    for (unsigned y = 1; y < blockDim.y; ++y)
#pragma unroll
      for (int k = 0; k < each; ++k)
#pragma unroll
        for (int j = 0; j < N; ++j) sums[k][j] += mine[y * blockDim.x * each * N + k * N + j];
  }
#pragma unroll
  for (int k = 0; k < each; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i >= vectors) continue;
#pragma unroll
    for (int j = 0; j < N; j += 4)
      *reinterpret_cast<float4*>(out + i * N + j) =
          make_float4(sums[k][j], sums[k][j + 1], sums[k][j + 2], sums[k][j + 3]);
  }
}

// dx, dy, dres, x (M,C), stats (M), gamma (C), partials (2,gridDim.x,C): of dgamma and, of a LayerNorm, dbeta; dres may
// be null.
// A block owns the rows blockIdx.x * blockDim.y + threadIdx.y, + gridDim.x * blockDim.y, ...; a thread owns `each`
// vectors of channels, and their sums for dgamma and dbeta stay in its registers. x, dy, dres are read once (the next
// row's x and dy while this row is worked on), dx is written once; at the end the block writes one row of partial sums.
template <class T, int each, bool layer>
__global__ void __launch_bounds__(512)
    norm_backward_kernel(T* dx, float* partials, const T* dy, const T* dres, const T* x, const float2* stats,
                         const T* gamma, int64_t M, int64_t C) {
  begin_kernel();
  constexpr int N = width<T>;
  __shared__ RowSums<float> shared[2];
  __shared__ float combine[norm_backward_threads(each, layer) * each * N];
  const int vectors = int(C / N);
  const int64_t stride = int64_t(gridDim.x) * blockDim.y;
  int64_t m = int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  float sum_gamma[each][N] = {}, sum_beta[each][N] = {};
  Pack<T, N> xs[each], gs[each], gammas[each];
  float2 stat = make_float2(0, 0);

  const auto fetch = [&](int64_t row) {  // zeros where there is nothing: they add nothing
    const bool live = row < M;
    stat = live ? stats[row] : make_float2(0, 0);
#pragma unroll
    for (int k = 0; k < each; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      xs[k] = gs[k] = zeros<T, N>();
      if (!live || i >= vectors) continue;
      xs[k] = load<N>(x + row * C + i * N);
      gs[k] = load<N>(dy + row * C + i * N);
    }
  };
#pragma unroll
  for (int k = 0; k < each; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    gammas[k] = i < vectors ? load<N>(gamma + i * N) : zeros<T, N>();
  }
  fetch(m);
  int turn = 0;
  // All rows of a block iterate as long as its first row exists: row_sums has a barrier.
  for (int64_t first = m - threadIdx.y; first < M; first += stride, m += stride, turn ^= 1) {
    Pack<T, N> x_now[each], g_now[each], r_now[each];
    const float2 s = stat;
#pragma unroll
    for (int k = 0; k < each; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      x_now[k] = xs[k], g_now[k] = gs[k], r_now[k] = zeros<T, N>();
      if (dres && m < M && i < vectors) r_now[k] = load<N>(dres + m * C + i * N);
    }
    fetch(m + stride);
    float sum_g = 0, sum_gx = 0;
#pragma unroll
    for (int k = 0; k < each; ++k) {
      float a[N], g[N], w[N];
      widen(a, x_now[k]), widen(g, g_now[k]), widen(w, gammas[k]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float xhat = (a[j] - s.x) * s.y;
        sum_gamma[k][j] += g[j] * xhat;
        if (layer) sum_beta[k][j] += g[j];
        sum_g += g[j] * w[j], sum_gx += g[j] * w[j] * xhat;
      }
    }
    row_sums(sum_g, sum_gx, shared[turn]);
    const float mean_g = layer ? sum_g / C : 0, mean_gx = sum_gx / C;
#pragma unroll
    for (int k = 0; k < each; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (m >= M || i >= vectors) continue;
      float a[N], g[N], w[N], r[N];
      widen(a, x_now[k]), widen(g, g_now[k]), widen(w, gammas[k]), widen(r, r_now[k]);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float xhat = (a[j] - s.x) * s.y;
        r[j] += s.y * (g[j] * w[j] - mean_g - xhat * mean_gx);
      }
      store(dx + m * C + i * N, r);
    }
  }
  let_next_in();
  write_partials(partials + int64_t(blockIdx.x) * C, sum_gamma, combine, vectors);
  if (layer) write_partials(partials + (int64_t(gridDim.x) + blockIdx.x) * C, sum_beta, combine, vectors);
}

// The same, with the same arguments, where the sums leave no registers for rows: in blocks of more than 512 threads,
// which get 64 each, and with 16 floats of a row to a thread. x and dy are read twice, the second time from L1 or L2;
// instead of being read ahead, dres and the next row are prefetched into L2. At most 64 registers (sm_80, sm_90), so
// that an SM holds 1024 threads. The sums have the same order and the same bits as in norm_backward_kernel.
template <class T, int each, int threads>
__global__ void __launch_bounds__(threads)
    norm_backward_wide_kernel(bool layer, T* dx, float* partials, const T* dy, const T* dres, const T* x,
                              const float2* stats, const T* gamma, int64_t M, int64_t C) {
  begin_kernel();
  constexpr int N = width<T>;
  constexpr bool one_row = threads > 512;  // at a time in a block: then m < M is known
  __shared__ RowSums<float> shared[2];
  __shared__ float combine[one_row ? 1 : 256 * each * N];
  const int vectors = int(C / N);
  const unsigned y = one_row ? 0 : threadIdx.y;
  const int64_t line = threadIdx.x * (cache_line / int(sizeof(T)));  // enough: a row has at most 64 bytes to a thread
  const int64_t stride = int64_t(gridDim.x) * (one_row ? 1 : blockDim.y);
  float sum_gamma[each][N] = {}, sum_beta[each][N] = {};
  int turn = 0;
  for (int64_t first = int64_t(blockIdx.x) * (one_row ? 1 : blockDim.y); first < M; first += stride, turn ^= 1) {
    const int64_t m = first + y, row = m * C;
    const int mine = m < M ? vectors : 0;
    const float2 s = m < M ? stats[m] : make_float2(0, 0);
    if (line < C && m < M) {
      if (dres) prefetch(dres + row + line);
      if (m + stride < M) prefetch(x + row + stride * C + line), prefetch(dy + row + stride * C + line);
    }
    float sum_g = 0, sum_gx = 0;
#pragma unroll
    for (int k = 0; k < each; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= mine) continue;
      float a[N], g[N], w[N];
      load(a, x + row + i * N), load(g, dy + row + i * N), load(w, gamma + i * N);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float xhat = (a[j] - s.x) * s.y;
        sum_gamma[k][j] += g[j] * xhat, sum_beta[k][j] += g[j];
        sum_g += g[j] * w[j], sum_gx += g[j] * w[j] * xhat;
      }
    }
    row_sums(sum_g, sum_gx, shared[turn]);
    const float mean_g = layer ? sum_g / C : 0, mean_gx = sum_gx / C;
#pragma unroll
    for (int k = 0; k < each; ++k) {
      const int i = threadIdx.x + k * blockDim.x;
      if (i >= mine) continue;
      float a[N], g[N], w[N], r[N] = {};
      load(a, x + row + i * N), load(g, dy + row + i * N), load(w, gamma + i * N);
      if (dres) load(r, dres + row + i * N);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float xhat = (a[j] - s.x) * s.y;
        // Not fused with the subtraction: norm_backward_kernel reuses the rounded product of its sums.
        r[j] += s.y * (__fmul_rn(g[j], w[j]) - mean_g - xhat * mean_gx);
      }
      store(dx + row + i * N, r);
    }
  }
  write_partials(partials + int64_t(blockIdx.x) * C, sum_gamma, combine, vectors);
  if (layer) write_partials(partials + (int64_t(gridDim.x) + blockIdx.x) * C, sum_beta, combine, vectors);
}

// The same arguments. Rows of any length: a block owns rows as above, one at a time, and its row of partial sums in
// memory, of which a thread meets only its own channels.
template <class T>
__global__ void __launch_bounds__(512)
    norm_backward_any_kernel(bool layer, T* dx, float* partials, const T* dy, const T* dres, const T* x,
                             const float2* stats, const T* gamma, int64_t M, int64_t C) {
  begin_kernel();
  __shared__ RowSums<float> shared[2];
  float *sum_gamma = partials + int64_t(blockIdx.x) * C, *sum_beta = sum_gamma + int64_t(gridDim.x) * C;
  for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
    sum_gamma[c] = 0;
    if (layer) sum_beta[c] = 0;
  }
  int turn = 0;
  for (int64_t m = blockIdx.x; m < M; m += gridDim.x, turn ^= 1) {
    const float2 s = stats[m];
    const int64_t row = m * C;
    float sum_g = 0, sum_gx = 0;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
      const float g = float(dy[row + c]), w = float(gamma[c]), xhat = (float(x[row + c]) - s.x) * s.y;
      sum_gamma[c] += g * xhat;
      if (layer) sum_beta[c] += g;
      sum_g += g * w, sum_gx += g * w * xhat;
    }
    row_sums(sum_g, sum_gx, shared[turn]);
    const float mean_g = layer ? sum_g / C : 0, mean_gx = sum_gx / C;
    for (int64_t c = threadIdx.x; c < C; c += blockDim.x) {
      const float g = float(dy[row + c]) * float(gamma[c]), xhat = (float(x[row + c]) - s.x) * s.y;
      dx[row + c] = T((dres ? float(dres[row + c]) : 0) + s.y * (g - mean_g - xhat * mean_gx));
    }
  }
}

template <class T, class G>
void norm_backward(cudaStream_t stream, ops::Norm kind, T* dx, G* dgamma, G* dbeta, const T* dy, const T* dres,
                   const T* x, const float* stats, const T* gamma, float* partials, int64_t M, int64_t C,
                   bool accumulate, ops::ColumnSums<G>* later) {
  constexpr int N = width<T>, most = 16 / N;
  const bool layer = kind == ops::Norm::layer;
  const float2* s = reinterpret_cast<const float2*>(stats);
  const bool vectors = C % N == 0 && aligned(dx, dy, dres, x, gamma, partials);
  const NormShape shape = norm_shape(C / N, most);
  const int64_t most_blocks = ops::norm_backward_partials(kind, M, C) / ((layer ? 2 : 1) * C);  // each leaves sums
  dim3 t = shape.threads;
  if (t.y > 1) t.y = unsigned(norm_backward_threads(shape.each, layer)) / t.x;
  const bool any = !vectors || shape.each == 0;
  const int blocks = int(std::min(most_blocks, any ? M : ceil_div(M, t.y)));
  if (M == 0) {
    // Sums over no rows: sum_columns of no pieces writes zeros.
  } else if (any) {
    launch(stream, norm_backward_any_kernel<T>, {blocks, 512}, layer, dx, partials, dy, dres, x, s, gamma, M, C);
  } else {
    const auto start = [&](auto kernel, auto... first) {
      launch(stream, kernel, {blocks, t}, first..., dx, partials, dy, dres, x, s, gamma, M, C);
    };
    if (t.x * t.y > 512)
      start(shape.each == 1 ? norm_backward_wide_kernel<T, 1, 1024> : norm_backward_wide_kernel<T, most, 1024>, layer);
    else if (shape.each == 1) start(layer ? norm_backward_kernel<T, 1, true> : norm_backward_kernel<T, 1, false>);
    else if (shape.each == 2) start(layer ? norm_backward_kernel<T, 2, true> : norm_backward_kernel<T, 2, false>);
    else if constexpr (most > 2) start(norm_backward_wide_kernel<T, most, 512>, layer);
  }
  ops::ColumnSums<G> now, *sums = later ? later : &now;
  sums->add(dgamma, partials, blocks, C);
  if (dbeta) sums->add(dbeta, partials + blocks * C, blocks, C);
  sum_columns(stream, now, accumulate);
}

}  // namespace gpu
