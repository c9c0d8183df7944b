// What every backward of attention begins with: the queries' statistics.
#pragma once

#include "attention/tiles.cuh"

namespace attention {

// Queries' statistics for the backward: delta = rowsum(do * o), and lse in units of log2. A gate g multiplies do: taken
// off lse as its logarithm, it multiplies the probabilities instead, and with them all that the backward makes of them.
// In rows of Tp, where queries past T get delta 0 and lse +inf, which makes their probabilities 0. 8 lanes take a row
// of one head, of n attentions that share do. Read once: do, each o, lse, gates. Zeros `counts` besides, for the
// backward in one kernel.
template <class E>
struct Starts {
  BackwardStart<E> of[most_starts];
  E* gated_sum;  // (B,T,H,DV) as do, of sigmoid(gate) * o, with the bits of nsa_combine; null: not wanted
};
template <class E, int n>
__global__ void __launch_bounds__(256)
    prepare_kernel(Starts<E> starts, const E* d_o, Problem a, unsigned* counts, int n_counts) {
  begin_kernel();
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread < n_counts) counts[thread] = 0;
  constexpr int rows = 2, width = 16 / sizeof(E);  // of a thread; numbers at a time
  const int tiles = a.Tp / (32 * rows), tile = blockIdx.x / a.H % tiles;
  const int h = blockIdx.x % a.H, b = blockIdx.x / a.H / tiles, t0 = tile * 32 * rows + int(threadIdx.x) / 8;
  const bool writes = threadIdx.x % 8 == 0;
  float delta[rows][n] = {}, l[rows][n], gate[rows][n] = {};  // before the sigmoid
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    const int t = t0 + r * 32;
#pragma unroll
    for (int i = 0; i < n; ++i) l[r][i] = -INFINITY;
    if (t >= a.T) continue;
    const int64_t row = int64_t(b) * a.T + t, at = row * a.ld_o + h * a.DV;
#pragma unroll
    for (int i = 0; i < n; ++i) {  // now, to wait for memory once
      const BackwardStart<E>& start = starts.of[i];
      if (writes) l[r][i] = start.lse[int64_t(b * a.H + h) * a.T + t];
      if (start.gate.gate) gate[r][i] = float(start.gate.gate[row * start.gate.ld + h]);
    }
    for (int d = threadIdx.x % 8 * width; d < a.DV; d += 8 * width) {
      alignas(16) E x[width], y[n][width];
      *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(d_o + at + d);
#pragma unroll
      for (int i = 0; i < n; ++i)
        *reinterpret_cast<uint4*>(y[i]) = *reinterpret_cast<const uint4*>(starts.of[i].o + at + d);
      float sum[width] = {};
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const float g = 1 / (1 + __expf(-gate[r][i]));
#pragma unroll
        for (int e = 0; e < width; ++e) {
          delta[r][i] += float(x[e]) * float(y[i][e]);
          if (n > 1) sum[e] += g * float(y[i][e]);
        }
      }
      if constexpr (n > 1)
        if (starts.gated_sum) {
#pragma unroll
          for (int e = 0; e < width; ++e) x[e] = E(sum[e]);
          *reinterpret_cast<uint4*>(starts.gated_sum + at + d) = *reinterpret_cast<const uint4*>(x);
        }
    }
  }
  let_next_in();
#pragma unroll
  for (int r = 0; r < rows; ++r)
#pragma unroll
    for (int i = 0; i < n; ++i) {
      for (int x = 4; x; x /= 2) delta[r][i] += __shfl_xor_sync(~0u, delta[r][i], x);
      if (!writes) continue;
      const BackwardStart<E>& start = starts.of[i];
      const int t = t0 + r * 32;
      float log2_gate = 0;
      if (start.gate.gate && t < a.T) {
        const float e = __expf(-fabsf(gate[r][i])), g = (gate[r][i] < 0 ? e : 1.f) / (1 + e);
        start.gate.dgate[(int64_t(b) * a.T + t) * start.gate.ld + h] = E(g * (1 - g) * delta[r][i]);
        log2_gate = log2f(g);
      }
      float* const to = start.stats + int64_t(b * a.H + h) * a.Tp + t;
      to[0] = l[r][i] == -INFINITY ? INFINITY : l[r][i] * 1.4426950408889634f - log2_gate;
      to[int64_t(a.B) * a.H * a.Tp] = delta[r][i];
    }
}

template <int n, class E>
void prepare(cudaStream_t stream, const Starts<E>& starts, const E* d_o, const Problem& a, unsigned* counts = nullptr,
             int n_counts = 0) {
  launch(stream, prepare_kernel<E, n>, {unsigned(int64_t(a.B) * (a.Tp / 64) * a.H), 256}, starts, d_o, a, counts,
         n_counts);
}
// Of one attention: lse2, and behind it delta.
template <class E>
void prepare(cudaStream_t stream, float* stats, const E* d_o, const E* o, const float* lse, const Problem& a,
             Gate<E> gate, unsigned* counts = nullptr, int n_counts = 0) {
  prepare<1>(stream, Starts<E>{{{o, lse, gate, stats}}, nullptr}, d_o, a, counts, n_counts);
}

}  // namespace attention
