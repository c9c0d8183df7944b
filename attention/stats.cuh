// Diagnostics on a GPU. Of each layer the (query, head)s are dealt out, thread by thread, to at most 256 blocks, each
// of which adds its sum to its own partial, so that nobody waits for another. One launch counts many layers, for a
// layer alone is over before it has begun: 5.5 us, twelve times a step of m7c. A block a layer merges the partials,
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

constexpr size_t stats_layers = 32;  // of a launch: kernels have little room for arguments
template <class T>
struct StatsLayers {
  NsaCounted<T> of[stats_layers];
};
// A grid of (blocks, layers); targets (B*T).
template <class T>
__global__ void __launch_bounds__(stats_threads)
    stats_kernel(__grid_constant__ const StatsLayers<T> layers, const int32_t* targets, NsaShape a) {
  begin_kernel();
  const NsaCounted<T>& layer = layers.of[blockIdx.y];
  StatsSum sum;
  for (int64_t i = blockIdx.x * int64_t(stats_threads) + threadIdx.x; i < a.B * a.T * a.H;
       i += gridDim.x * int64_t(stats_threads))
    sum.add_row(i / a.H, int(i % a.H), layer.x, layer.indices, targets, a);
  merge_block(sum);
  if (threadIdx.x == 0) reinterpret_cast<StatsSum*>(layer.partials)[blockIdx.x].merge(sum);
}
// sums, maxima (gridDim.x), partials (gridDim.x, stats_partials).
__global__ void __launch_bounds__(stats_threads)
    stats_total_kernel(NsaSums* sums, NsaMaxima* maxima, const StatsSum* partials) {
  begin_kernel();
  StatsSum sum;
  for (int64_t i = threadIdx.x; i < stats_partials; i += stats_threads)
    sum.merge(partials[blockIdx.x * stats_partials + i]);
  merge_block(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum.sums, maxima[blockIdx.x] = sum.maxima;
}

template <class T>
void nsa_stats(cudaStream_t stream, const std::vector<NsaCounted<T>>& layers, const int32_t* targets,
               const NsaShape& a) {
  const int64_t blocks = std::min(stats_partials, (a.B * a.T * a.H + stats_threads - 1) / stats_threads);
  for (size_t i = 0; i < layers.size(); i += stats_layers) {
    const size_t n = std::min(stats_layers, layers.size() - i);
    StatsLayers<T> some = {};
    std::copy_n(layers.begin() + ptrdiff_t(i), n, some.of);
    launch(stream, stats_kernel<T>, {dim3(unsigned(blocks), unsigned(n)), stats_threads}, some, targets, a);
  }
}
inline void nsa_stats_total(cudaStream_t stream, NsaSums* sums, NsaMaxima* maxima, const double* partials,
                            int64_t layers) {
  launch(stream, stats_total_kernel, {unsigned(layers), stats_threads}, sums, maxima,
         reinterpret_cast<const StatsSum*>(partials));
}

}  // namespace gpu
