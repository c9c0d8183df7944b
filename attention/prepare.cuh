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
// The 8 lanes of a row add up eight sums, of which lane i gets x[i]: seven shuffles, with the bits of three for each.
__device__ __forceinline__ float sum_of_lane(float (&x)[8]) {
#pragma unroll
  for (int half = 4; half; half /= 2) {
    const bool upper = threadIdx.x & half;
#pragma unroll
    for (int i = 0; i < half; ++i)
      x[i] = (upper ? x[i + half] : x[i]) + __shfl_xor_sync(~0u, upper ? x[i] : x[i + half], half);
  }
  return x[0];
}
// A thread reads 16 bytes at a time of `rows` rows in each of n attentions. What there is one of for a row and an
// attention (lse, gate, delta), one of the 8 lanes handles: attention `mine` at time my_t.
template <class E, int n>
__global__ void __launch_bounds__(256)
    prepare_kernel(const __grid_constant__ Starts<E> starts, const E* d_o, Problem a, unsigned* counts, int n_counts) {
  begin_kernel();
  const int64_t thread = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (thread < n_counts) counts[thread] = 0;
  constexpr int rows = 2, lanes = 8, width = 16 / sizeof(E);  // of a thread; of a row; numbers at a time
  static_assert(rows * n <= lanes);
  const int tiles = a.Tp / (32 * rows), tile = blockIdx.x / a.H % tiles, lane = threadIdx.x % lanes;
  const int h = blockIdx.x % a.H, b = blockIdx.x / a.H / tiles, t0 = tile * 32 * rows + int(threadIdx.x) / lanes;
  const int my_t = t0 + lane / n * 32;
  const BackwardStart<E>& mine = starts.of[lane % n];
  const bool makes = lane < rows * n, in_sequence = makes && my_t < a.T;
  float l = -INFINITY, gate = 0;  // before the sigmoid
  if (in_sequence) l = mine.lse[int64_t(b * a.H + h) * a.T + my_t];
  if (in_sequence && mine.gate.gate) gate = float(mine.gate.gate[(int64_t(b) * a.T + my_t) * mine.gate.ld + h]);
  float delta[lanes] = {}, g[rows][n];
  const float my_g = 1 / (1 + __expf(-gate));
#pragma unroll
  for (int r = 0; r < rows; ++r)
#pragma unroll
    for (int i = 0; i < n; ++i) g[r][i] = n > 1 ? __shfl_sync(~0u, my_g, r * n + i, lanes) : 0;
#pragma unroll
  for (int r = 0; r < rows; ++r) {
    if (t0 + r * 32 >= a.T) continue;
    const int64_t at = (int64_t(b) * a.T + t0 + r * 32) * a.ld_o + h * a.DV;
    for (int d = lane * width; d < a.DV; d += lanes * width) {
      alignas(16) E x[width], y[n][width];
      *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(d_o + at + d);
#pragma unroll
      for (int i = 0; i < n; ++i)
        *reinterpret_cast<uint4*>(y[i]) = *reinterpret_cast<const uint4*>(starts.of[i].o + at + d);
      float sum[width] = {};
#pragma unroll
      for (int i = 0; i < n; ++i)
#pragma unroll
        for (int e = 0; e < width; ++e) {
          delta[r * n + i] += float(x[e]) * float(y[i][e]);
          if (n > 1) sum[e] += g[r][i] * float(y[i][e]);
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
  const float my_delta = sum_of_lane(delta);
  if (!makes) return;
  float log2_gate = 0;
  if (in_sequence && mine.gate.gate) {
    const float e = __expf(-fabsf(gate)), of = (gate < 0 ? e : 1.f) / (1 + e);
    mine.gate.dgate[(int64_t(b) * a.T + my_t) * mine.gate.ld + h] = E(of * (1 - of) * my_delta);
    log2_gate = log2f(of);
  }
  float* const to = mine.stats + int64_t(b * a.H + h) * a.Tp + my_t;
  to[0] = l == -INFINITY ? INFINITY : l * 1.4426950408889634f - log2_gate;
  to[int64_t(a.B) * a.H * a.Tp] = my_delta;
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
