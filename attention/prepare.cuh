// What every backward of attention begins with: the queries' statistics.
#pragma once

#include "attention/tiles.cuh"

namespace attention {

// Queries' statistics for the backward: delta = rowsum(do * o), and lse in units of log2. A gate g multiplies do: taken
// off lse as its logarithm, it multiplies the probabilities instead, and with them all that the backward makes of them.
// In rows of Tp, where queries past T get delta 0 and lse +inf, which makes their probabilities 0. 8 lanes take a row
// of one head, of one of several attentions that share do: blocks side by side take the same rows, so that do is read
// from memory once. Reads each o once. Zeros `counts` besides, for the backward in one kernel.
template <class E>
struct Starts {
  BackwardStart<E> of[most_starts];
  int n;
};
template <class E>
__global__ void __launch_bounds__(256)
    prepare_kernel(Starts<E> starts, const E* d_o, Problem a, unsigned* counts, int n_counts) {
  begin_kernel();
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n_counts) counts[i] = 0;
  const BackwardStart<E>& start = starts.of[blockIdx.x % starts.n];
  const Gate<E> gate = start.gate;
  const int block = blockIdx.x / starts.n;
  const int tiles = a.Tp / 64, tile = block / a.H % tiles;  // of 64 queries of a head: two a thread
  const int h = block % a.H, b = block / a.H / tiles, t0 = tile * 64 + int(threadIdx.x) / 8;
  const bool writes = threadIdx.x % 8 == 0;
  float sum[2] = {0, 0}, l[2] = {-INFINITY, -INFINITY}, gate_input[2] = {0, 0};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int t = t0 + r * 32;
    if (t >= a.T) continue;
    if (writes) {  // now, to wait for memory once
      l[r] = start.lse[int64_t(b * a.H + h) * a.T + t];
      if (gate.gate) gate_input[r] = float(gate.gate[(int64_t(b) * a.T + t) * gate.ld + h]);
    }
    const int64_t at = (int64_t(b) * a.T + t) * a.ld_o + h * a.DV;
    constexpr int n = 16 / sizeof(E);
    for (int d = threadIdx.x % 8 * n; d < a.DV; d += 8 * n) {
      alignas(16) E x[n], y[n];
      *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(d_o + at + d);
      *reinterpret_cast<uint4*>(y) = *reinterpret_cast<const uint4*>(start.o + at + d);
#pragma unroll
      for (int e = 0; e < n; ++e) sum[r] += float(x[e]) * float(y[e]);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    for (int x = 4; x; x /= 2) sum[r] += __shfl_xor_sync(~0u, sum[r], x);
    if (!writes) continue;
    const int t = t0 + r * 32;
    float log2_gate = 0;
    if (gate.gate && t < a.T) {
      const float e = __expf(-fabsf(gate_input[r])), g = (gate_input[r] < 0 ? e : 1.f) / (1 + e);
      gate.dgate[(int64_t(b) * a.T + t) * gate.ld + h] = E(g * (1 - g) * sum[r]);
      log2_gate = log2f(g);
    }
    float* const to = start.stats + int64_t(b * a.H + h) * a.Tp + t;
    to[0] = l[r] == -INFINITY ? INFINITY : l[r] * 1.4426950408889634f - log2_gate;
    to[int64_t(a.B) * a.H * a.Tp] = sum[r];
  }
}

template <class E>
void prepare(cudaStream_t stream, const Starts<E>& starts, const E* d_o, const Problem& a, unsigned* counts = nullptr,
             int n_counts = 0) {
  launch(stream, prepare_kernel<E>, {unsigned(int64_t(a.B) * (a.Tp / 64) * a.H * starts.n), 256}, starts, d_o, a,
         counts, n_counts);
}
// Of one attention: lse2, and behind it delta.
template <class E>
void prepare(cudaStream_t stream, float* stats, const E* d_o, const E* o, const float* lse, const Problem& a,
             Gate<E> gate, unsigned* counts = nullptr, int n_counts = 0) {
  prepare(stream, Starts<E>{{{o, lse, gate, stats}}, 1}, d_o, a, counts, n_counts);
}

}  // namespace attention
