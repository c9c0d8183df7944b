// Diagnostics on a GPU. A block owns 64 queries, a thread every 256th (query, head) of them; the blocks' sums go to
// memory and one block merges them, in order. Reads the gates' columns and the indices, nothing else of a row.
#pragma once

#include "attention/stats.h"

namespace gpu {

// All threads' sums into the first's, in a fixed tree.
inline __device__ void merge_block(StatsSum& sum) {
  __shared__ alignas(16) unsigned char raw[128 * sizeof(StatsSum)];
  auto* all = reinterpret_cast<StatsSum*>(raw);
  for (int half = 128; half; half /= 2) {
    if (int(threadIdx.x) >= half && int(threadIdx.x) < 2 * half) all[threadIdx.x - half] = sum;
    __syncthreads();
    if (int(threadIdx.x) < half) sum.merge(all[threadIdx.x]);
    __syncthreads();
  }
}

// x (B*T, ld), indices (B,HKV,T,n), targets (B*T), partials (gridDim.x).
template <class T>
__global__ void __launch_bounds__(256)
    stats_kernel(StatsSum* partials, const T* x, const int32_t* indices, const int32_t* targets, NsaShape a) {
  StatsSum sum;
  const int64_t first = blockIdx.x * stats_rows, rows = a.B * a.T - first < stats_rows ? a.B * a.T - first : stats_rows;
  for (int64_t i = threadIdx.x; i < rows * a.H; i += 256)
    sum.add_row(first + i / a.H, int(i % a.H), x, indices, targets, a);
  merge_block(sum);
  if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}
__global__ void __launch_bounds__(256)
    stats_result_kernel(NsaSums* sums, NsaMaxima* maxima, const StatsSum* partials, int64_t n) {
  StatsSum sum;
  for (int64_t i = threadIdx.x; i < n; i += 256) sum.merge(partials[i]);
  merge_block(sum);
  if (threadIdx.x == 0) sum.add_to(sums, maxima);
}

template <class T>
void nsa_stats(cudaStream_t stream, NsaSums* sums, NsaMaxima* maxima, const T* x, const int32_t* indices,
               const int32_t* targets, double* partials, const NsaShape& a) {
  const int64_t n = (a.B * a.T + stats_rows - 1) / stats_rows;
  auto* parts = reinterpret_cast<StatsSum*>(partials);
  stats_kernel<<<unsigned(n), 256, 0, stream>>>(parts, x, indices, targets, a);
  CUDA_CHECK_LAUNCH();
  stats_result_kernel<<<1, 256, 0, stream>>>(sums, maxima, parts, n);
  CUDA_CHECK_LAUNCH();
}

}  // namespace gpu
