// Diagnostics on a GPU. One launch a layer: thread by thread the (query, head)s are dealt out to at most 256 blocks,
// each of which adds its sum to its own partial, so that nobody waits for another. A block a layer merges the partials,
// once a step, in order. Reads the gates' columns and the indices, nothing else of a row.
#pragma once

#include <algorithm>

#include "attention/stats.h"

namespace gpu {

constexpr int stats_threads = 128;

// All threads' sums into the first's, in a fixed tree.
inline __device__ void merge_block(StatsSum& sum) {
  __shared__ alignas(16) unsigned char raw[stats_threads / 2 * sizeof(StatsSum)];
  auto* all = reinterpret_cast<StatsSum*>(raw);
  for (int half = stats_threads / 2; half; half /= 2) {
    if (int(threadIdx.x) >= half && int(threadIdx.x) < 2 * half) all[threadIdx.x - half] = sum;
    __syncthreads();
    if (int(threadIdx.x) < half) sum.merge(all[threadIdx.x]);
    __syncthreads();
  }
}

// x (B*T, ld), indices (B,HKV,T,n), targets (B*T), partials (gridDim.x).
template <class T>
__global__ void __launch_bounds__(stats_threads)
    stats_kernel(StatsSum* partials, const T* x, const int32_t* indices, const int32_t* targets, NsaShape a) {
  StatsSum sum;
  for (int64_t i = blockIdx.x * int64_t(stats_threads) + threadIdx.x; i < a.B * a.T * a.H;
       i += gridDim.x * int64_t(stats_threads))
    sum.add_row(i / a.H, int(i % a.H), x, indices, targets, a);
  merge_block(sum);
  if (threadIdx.x == 0) partials[blockIdx.x].merge(sum);
}
// sums, maxima (gridDim.x), partials (gridDim.x, stats_partials).
__global__ void __launch_bounds__(stats_threads)
    stats_total_kernel(NsaSums* sums, NsaMaxima* maxima, const StatsSum* partials) {
  StatsSum sum;
  for (int64_t i = threadIdx.x; i < stats_partials; i += stats_threads)
    sum.merge(partials[blockIdx.x * stats_partials + i]);
  merge_block(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum.sums, maxima[blockIdx.x] = sum.maxima;
}

template <class T>
void nsa_stats(cudaStream_t stream, double* partials, const T* x, const int32_t* indices, const int32_t* targets,
               const NsaShape& a) {
  const int64_t blocks = std::min(stats_partials, (a.B * a.T * a.H + stats_threads - 1) / stats_threads);
  stats_kernel<<<unsigned(blocks), stats_threads, 0, stream>>>(reinterpret_cast<StatsSum*>(partials), x, indices,
                                                               targets, a);
  CUDA_CHECK_LAUNCH();
}
inline void nsa_stats_total(cudaStream_t stream, NsaSums* sums, NsaMaxima* maxima, const double* partials,
                            int64_t layers) {
  stats_total_kernel<<<unsigned(layers), stats_threads, 0, stream>>>(sums, maxima,
                                                                     reinterpret_cast<const StatsSum*>(partials));
  CUDA_CHECK_LAUNCH();
}

}  // namespace gpu
