// Diagnostics on a GPU. One launch a layer: thread by thread the (query, head)s are dealt out to at most 256 blocks,
// each of which adds its sum to its own partial, so that nobody waits for another. A block a layer merges the partials,
// once a step, in order. Reads the gates' columns and the indices, nothing else of a row.
#pragma once

#include <algorithm>

#include "attention/stats.h"

namespace gpu {

constexpr int stats_threads = 128;

// All threads' sums into the first's, in a fixed tree: a warp's by shuffles, then the warps' in order.
inline __device__ void merge_block(StatsSum& sum) {
  constexpr int words = sizeof(StatsSum) / sizeof(double), warps = stats_threads / 32;
  static_assert(sizeof(StatsSum) == words * sizeof(double), "StatsSum is an array of double");
  __shared__ double all[warps][words];
  auto* own = reinterpret_cast<double*>(&sum);
  for (int lanes = 16; lanes; lanes /= 2) {
    StatsSum other;
    for (int i = 0; i < words; ++i) reinterpret_cast<double*>(&other)[i] = __shfl_down_sync(~0u, own[i], lanes);
    sum.merge(other);
  }
  const int warp = int(threadIdx.x) / 32;
  if (threadIdx.x % 32 == 0)
    for (int i = 0; i < words; ++i) all[warp][i] = own[i];
  __syncthreads();
  if (threadIdx.x == 0)
    for (int i = 1; i < warps; ++i) sum.merge(*reinterpret_cast<const StatsSum*>(all[i]));
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
