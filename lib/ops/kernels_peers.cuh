// The sum over ranks of what each has at the same place of its memory, which every owner reads for itself over NVLink:
// a reduce_scatter in one kernel, which sums in fp32 and in rank order, writes the shard and its share of the norm.
#pragma once

#include "lib/device/peers.h"
#include "lib/ops/kernels_sums.cuh"

namespace gpu {

// This block and the same block of all other ranks wait for each other; `times`: how often they have, with this. What a
// rank wrote before it came, by any kernel, the others may read behind it.
__device__ __forceinline__ void meet(const Peers& p, uint32_t times) {
  __syncthreads();
  if (threadIdx.x < p.ranks) {
    uint32_t* const row = p.signals + blockIdx.x * p.ranks;
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p.of(threadIdx.x, row) + p.rank), "r"(times) : "memory");
    uint32_t come;
    do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(come) : "l"(row + threadIdx.x) : "memory");
    while (int(come - times) < 0);
  }
  __syncthreads();
}

// Ahead of time into shared memory, 16 bytes, through L2 alone.
__device__ __forceinline__ void copy_ahead(uint4* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(to))), "l"(from)
               : "memory");
}
__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int after>
__device__ __forceinline__ void await_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(after) : "memory");
}

// to (n) = (accumulate ? to : 0) + the ranks' parts at `mine` (n), in vectors. NVLink is slow to answer, so a thread
// has `stages` vectors of each rank under way, which for the ranks of a host takes most of the shared memory. Writes
// sizeof(To) an element and reads ranks * sizeof(E), all but one of them from afar. partials (gridDim.x) or none: of
// the sum of powers of what is written.
constexpr int peer_threads = 512;
template <Term term, int stages, class To, class E>
__global__ void __launch_bounds__(peer_threads, 1)
    sum_peers_kernel(double* partials, To* to, const E* mine, Peers peers, int64_t n, bool accumulate) {
  begin_kernel();
  extern __shared__ uint4 ring[];  // (stages, ranks, threads)
  constexpr int N = width<E>;
  const int64_t first = (int64_t(blockIdx.x) * peer_threads + threadIdx.x) * N,
                stride = int64_t(gridDim.x) * peer_threads * N;
  const auto slot = [&](int stage, int r) { return ring + (stage * peers.ranks + r) * peer_threads + threadIdx.x; };
  const auto fetch = [&](int64_t i, int stage) {
    if (i < n)
      for (int r = 0; r < peers.ranks; ++r) copy_ahead(slot(stage, r), peers.of(r, mine) + i);
    end_copies();
  };
  const uint32_t met = peers.own()[blockIdx.x];
  meet(peers, met + 1);
#pragma unroll
  for (int s = 0; s < stages; ++s) fetch(first + s * stride, s);
  double total = 0;
  int stage = 0;
  for (int64_t i = first; i < n; i += stride) {
    float sum[N], x[N], before[N];
    if (accumulate) load(before, to + i);
    await_copies<stages - 1>();
    load(sum, reinterpret_cast<const E*>(slot(stage, 0)));
    for (int r = 1; r < peers.ranks; ++r) {
      load(x, reinterpret_cast<const E*>(slot(stage, r)));
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += x[j];
    }
    fetch(i + stages * stride, stage);
    if (++stage == stages) stage = 0;
    if (accumulate) {
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += before[j];
    }
    const Pack<To, N> written = narrow<To, N>(sum);
    store(to + i, written);
    widen(sum, written);
    float powers = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) powers = both<term>(powers, term_of<term>(sum[j]));
    total = both<term>(total, double(powers));
  }
  meet(peers, met + 2);  // from here on the others may write where this rank has read
  if (threadIdx.x == 0) peers.own()[blockIdx.x] = met + 2;
  if (!partials) return;
  total = block_total<term>(total);
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

template <Term term, class To, class E>
void sum_peers(cudaStream_t stream, To* to, const E* mine, const Peers& peers, int64_t n, bool accumulate, int blocks,
               double* partials) {
  const auto start = [&](auto kernel, int stages) {
    launch(stream, kernel, {blocks, peer_threads, stages * peers.ranks * peer_threads * int(sizeof(uint4))}, partials,
           to, mine, peers, n, accumulate);
  };
  static_assert(most_peers == 8);
  if (peers.ranks <= 2) start(sum_peers_kernel<term, 12, To, E>, 12);
  else if (peers.ranks <= 4) start(sum_peers_kernel<term, 6, To, E>, 6);
  else start(sum_peers_kernel<term, 3, To, E>, 3);
}

template <class To, class E>
void sum_parts(cudaStream_t stream, To* to, const E* mine, const Peers& peers, int64_t n, bool accumulate,
               ops::PowerSum sum) {
  ASSERT(aligned(to, mine) && n % width<E> == 0);
  const int blocks = int(std::min<int64_t>(most_peer_blocks, ceil_div(n, peer_threads * width<E>)));
  if (!sum.out) return sum_peers<Term::square>(stream, to, mine, peers, n, accumulate, blocks, nullptr);
  with_term(sum.p, [&](auto term) {
    sum_peers<decltype(term)::value>(stream, to, mine, peers, n, accumulate, blocks, sum.partials);
    launch(stream, sum_finish_kernel<double, decltype(term)::value>, {1, sum_threads}, sum.out, sum.partials, blocks,
           false);
  });
}

}  // namespace gpu
