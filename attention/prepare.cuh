// What every backward of attention begins with: the queries' statistics.
#pragma once

#include "attention/tiles.cuh"

namespace attention {

// Queries' statistics for the backward: delta = rowsum(do * o), and lse in units of log2, both in rows of Tp; queries
// past T get delta 0 and lse +inf, which makes their probabilities 0. A gate g multiplies do: taken off lse as its
// logarithm, it multiplies the probabilities instead, and with them all that the backward makes of them. 8 lanes take a
// row of one head. Reads do and o once. Zeros `counts` besides, for the backward in one kernel.
template <class E>
__global__ void __launch_bounds__(256)
    prepare_kernel(float* lse2, float* delta, const E* d_o, const E* o, const float* lse, Problem a, Gate<E> gate,
                   unsigned* counts, int n_counts) {
  begin_kernel();
  int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n_counts) counts[i] = 0;
  i /= 8;
  if (i >= int64_t(a.B) * a.Tp * a.H) return;  // the same for 8 lanes, and they alone exchange below
  int h = int(i % a.H), t = int(i / a.H % a.Tp), b = int(i / a.H / a.Tp);
  float sum = 0;
  if (t < a.T) {
    int64_t at = (int64_t(b) * a.T + t) * a.ld_o + h * a.DV;
    constexpr int n = 16 / sizeof(E);
    for (int d = threadIdx.x % 8 * n; d < a.DV; d += 8 * n) {
      alignas(16) E x[n], y[n];
      *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(d_o + at + d);
      *reinterpret_cast<uint4*>(y) = *reinterpret_cast<const uint4*>(o + at + d);
#pragma unroll
      for (int e = 0; e < n; ++e) sum += float(x[e]) * float(y[e]);
    }
  }
  unsigned lanes = 0xffu << (threadIdx.x % 32 / 8 * 8);
  for (int x = 4; x; x /= 2) sum += __shfl_xor_sync(lanes, sum, x);
  if (threadIdx.x % 8) return;
  float l = t < a.T ? lse[int64_t(b * a.H + h) * a.T + t] : -INFINITY, log2_gate = 0;
  if (gate.gate && t < a.T) {
    const int64_t at = (int64_t(b) * a.T + t) * gate.ld + h;
    const float e = __expf(-fabsf(float(gate.gate[at]))), g = (float(gate.gate[at]) < 0 ? e : 1.f) / (1 + e);
    gate.dgate[at] = E(g * (1 - g) * sum);
    log2_gate = log2f(g);
  }
  lse2[int64_t(b * a.H + h) * a.Tp + t] = l == -INFINITY ? INFINITY : l * 1.4426950408889634f - log2_gate;
  delta[int64_t(b * a.H + h) * a.Tp + t] = sum;
}

template <class E>
void prepare(cudaStream_t stream, float* lse2, float* delta, const E* d_o, const E* o, const float* lse,
             const Problem& a, Gate<E> gate, unsigned* counts = nullptr, int n_counts = 0) {
  const int64_t rows = int64_t(a.B) * a.H * a.Tp;
  launch(stream, prepare_kernel<E>, {unsigned((rows * 8 + 255) / 256), 256}, lse2, delta, d_o, o, lse, a, gate, counts,
         n_counts);
}

}  // namespace attention
