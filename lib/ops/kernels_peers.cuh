// The sum over ranks of what each has at the same place of its memory, which every owner reads for itself over NVLink:
// a reduce_scatter in one kernel, which sums in fp32 and in rank order, writes the shard and its share of the norm.
#pragma once

#include "lib/device/peers.h"
#include "lib/ops/kernels_sums.cuh"

namespace gpu {

// This block and the same block of all other ranks wait for each other; `times`: how often they have, with this; row:
// of signals. What a rank wrote before it came, by any kernel, the others may read behind it.
__device__ __forceinline__ void meet(const Peers& p, uint32_t times, int row) {
  __syncthreads();
  if (threadIdx.x < p.ranks) {
    uint32_t* const come_of = p.signals + row * p.ranks;
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p.of(threadIdx.x, come_of) + p.rank), "r"(times)
                 : "memory");
    uint32_t come;
    do asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(come) : "l"(come_of + threadIdx.x) : "memory");
    while (int(come - times) < 0);
  }
  __syncthreads();
}
__device__ __forceinline__ void meet(const Peers& p, uint32_t times) { meet(p, times, int(blockIdx.x)); }

static __global__ void meet_kernel(Peers peers, int row) {
  begin_kernel();
  const uint32_t met = peers.own()[row];
  meet(peers, met + 1, row);
  if (threadIdx.x == 0) peers.own()[row] = met + 1;
}
inline void meet_peers(cudaStream_t stream, const Peers& peers, int row) {
  launch(stream, meet_kernel, {1, 32}, peers, row);
}

// to (n) = (adds ? to : 0) + the ranks' parts at `mine` (n), in vectors. NVLink is slow to answer, so a thread has
// `stages` vectors of each rank under way, and of `to`, which takes most of the shared memory. Writes sizeof(To) an
// element and reads ranks * sizeof(E), all but one of them from afar. partials (gridDim.x) or none: of the sum of
// powers of what is written.
template <int stages, bool adds, class Which, class To, class E>
__global__ void __launch_bounds__(peer_threads, 1)
    sum_peers_kernel(double* partials, Which term, To* to, const E* mine, Peers peers, int64_t n) {
  begin_kernel();
  extern __shared__ uint4 ring[];  // (stages, ranks and what of `to` is as wide, threads)
  constexpr int N = width<E>, own = adds ? N * int(sizeof(To)) / int(sizeof(uint4)) : 0;
  const int64_t first = (int64_t(blockIdx.x) * peer_threads + threadIdx.x) * N,
                stride = int64_t(gridDim.x) * peer_threads * N;
  const auto slot = [&](int stage, int v) {
    return ring + (stage * (peers.ranks + own) + v) * peer_threads + threadIdx.x;
  };
  const auto fetch = [&](int64_t i, int stage) {
    if (i < n) {
      for (int r = 0; r < peers.ranks; ++r) copy16(slot(stage, r), peers.of(r, mine) + i);
#pragma unroll
      for (int v = 0; v < own; ++v) copy16(slot(stage, peers.ranks + v), reinterpret_cast<const uint4*>(to + i) + v);
    }
    copies_commit();
  };
  const uint32_t met = peers.own()[blockIdx.x];
  meet(peers, met + 1);
#pragma unroll
  for (int s = 0; s < stages; ++s) fetch(first + s * stride, s);
  double total = 0;
  int stage = 0;
  for (int64_t i = first; i < n; i += stride) {
    float sum[N], x[N];
    copies_wait<stages - 1>();
    load(sum, reinterpret_cast<const E*>(slot(stage, 0)));
    for (int r = 1; r < peers.ranks; ++r) {
      load(x, reinterpret_cast<const E*>(slot(stage, r)));
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += x[j];
    }
    if constexpr (adds) {
      Pack<To, N> before;
#pragma unroll
      for (int v = 0; v < own; ++v) before.q[v] = *slot(stage, peers.ranks + v);
      widen(x, before);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += x[j];
    }
    fetch(i + stages * stride, stage);
    if (++stage == stages) stage = 0;
    const Pack<To, N> written = narrow<To, N>(sum);
    store(to + i, written);
    widen(sum, written);
    float powers = 0;
#pragma unroll
    for (int j = 0; j < N; ++j) powers = both(term, powers, term_of(term, sum[j]));
    total = both(term, total, double(powers));
  }
  meet(peers, met + 2);  // from here on the others may write where this rank has read
  if (threadIdx.x == 0) peers.own()[blockIdx.x] = met + 2;
  if (!partials) return;
  total = block_total(term, total);
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

template <class Which, class To, class E>
void sum_peers(cudaStream_t stream, Which term, To* to, const E* mine, const Peers& peers, int64_t n, bool accumulate,
               int blocks, double* partials) {
  constexpr int vectors = 24, own = width<E> * int(sizeof(To)) / int(sizeof(uint4));  // under way, of a thread
  const auto start = [&](auto kernel, int stages, int of_each) {
    ASSERT(stages * of_each <= vectors);
    launch(stream, kernel, {blocks, peer_threads, stages * of_each * peer_threads * int(sizeof(uint4))}, partials, term,
           to, mine, peers, n);
  };
  const auto start_for = [&](auto most) {
    constexpr int ranks = decltype(most)::value, adding = vectors / (ranks + own), setting = vectors / ranks;
    if (accumulate) start(sum_peers_kernel<adding, true, Which, To, E>, adding, peers.ranks + own);
    else start(sum_peers_kernel<setting, false, Which, To, E>, setting, peers.ranks);
  };
  static_assert(most_peers == 8);
  if (peers.ranks <= 2) start_for(std::integral_constant<int, 2>());
  else if (peers.ranks <= 4) start_for(std::integral_constant<int, 4>());
  else start_for(std::integral_constant<int, 8>());
}

// The same of a matrix whose element `first` is the first of `mine`: a block has some of its rows, and asks first which
// ranks have used which.
template <class Which, class To, class E>
__global__ void __launch_bounds__(peer_threads)
    sum_rows_kernel(double* partials, Which term, To* to, const E* mine, int64_t first, ops::UsedRows rows, Peers peers,
                    int64_t n, bool accumulate) {
  begin_kernel();
  extern __shared__ uint8_t users[];  // (rows of this block): a bit for each rank
  constexpr int N = width<E>, ahead = 4;
  const int64_t row0 = first / rows.width, row_end = ceil_div(first + n, rows.width),
                rows_each = ceil_div(row_end - row0, int64_t(gridDim.x)), my_row = row0 + blockIdx.x * rows_each,
                my_end = min(my_row + rows_each, row_end);
  const uint32_t met = peers.own()[blockIdx.x];
  meet(peers, met + 1);
  for (int64_t v = my_row + threadIdx.x; v < my_end; v += peer_threads) {
    uint32_t bits = 0;
    for (int r = 0; r < peers.ranks && v < rows.count; ++r) {
      const int32_t* const start = peers.of(r, rows.start) + v;
      bits |= uint32_t(__ldcg(start) < __ldcg(start + 1)) << r;
    }
    users[v - my_row] = uint8_t(bits);
  }
  __syncthreads();
  // In elements of the shard.
  const int64_t begin = max(my_row * rows.width - first, int64_t(0)), end = min(my_end * rows.width - first, n);
  double total = 0;
  for (int64_t i = begin + threadIdx.x * N; i < end; i += ahead * peer_threads * N) {
    float sum[ahead][N], of_ranks[ahead][N] = {};
    uint32_t bits[ahead] = {};
#pragma unroll
    for (int k = 0; k < ahead; ++k) {
      const int64_t at = i + k * peer_threads * N;
#pragma unroll
      for (int j = 0; j < N; ++j) sum[k][j] = 0;
      if (at >= end) continue;
      if (accumulate) load(sum[k], to + at);
      bits[k] = users[uint32_t(first + at - my_row * rows.width) / uint32_t(rows.width)];
    }
    for (int r = 0; r < peers.ranks; ++r) {
      Pack<E, N> read[ahead];
#pragma unroll
      for (int k = 0; k < ahead; ++k)
        if (bits[k] >> r & 1)
          read[k].q[0] = __ldcg(reinterpret_cast<const uint4*>(peers.of(r, mine) + i + k * peer_threads * N));
#pragma unroll
      for (int k = 0; k < ahead; ++k) {
        if (!(bits[k] >> r & 1)) continue;
        float x[N];
        widen(x, read[k]);
#pragma unroll
        for (int j = 0; j < N; ++j) of_ranks[k][j] += x[j];
      }
    }
#pragma unroll
    for (int k = 0; k < ahead; ++k) {
      const int64_t at = i + k * peer_threads * N;
      if (at >= end) break;
#pragma unroll
      for (int j = 0; j < N; ++j) sum[k][j] += of_ranks[k][j];
      const Pack<To, N> written = narrow<To, N>(sum[k]);
      if (bits[k] != 0 || !accumulate) store(to + at, written);
      widen(sum[k], written);
      float powers = 0;
#pragma unroll
      for (int j = 0; j < N; ++j) powers = both(term, powers, term_of(term, sum[k][j]));
      total = both(term, total, double(powers));
    }
  }
  meet(peers, met + 2);
  if (threadIdx.x == 0) peers.own()[blockIdx.x] = met + 2;
  if (!partials) return;
  total = block_total(term, total);
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}

// start(term, partials): a kernel of so many blocks, each of which leaves a partial sum where there is room for them.
template <class F>
void sum_with_powers(cudaStream_t stream, int blocks, ops::PowerSum sum, const F& start) {
  if (!sum.out) return start(Always<Term::square>(), nullptr);
  with_term(sum.p, [&](auto term) { start(term, sum.partials); });
  launch(stream, sum_finish_kernel<double>, {1, sum_threads}, sum.out, term_of(sum.p), sum.partials, blocks, sum.adds);
}

template <class To, class E>
void sum_parts(cudaStream_t stream, To* to, const E* mine, const Peers& peers, int64_t n, bool accumulate,
               ops::PowerSum sum) {
  ASSERT(aligned(to, mine) && n % width<E> == 0);
  const int blocks = int(std::min<int64_t>(most_peer_blocks, ceil_div(n, peer_threads * width<E>)));
  sum_with_powers(stream, blocks, sum, [&](auto term, double* partials) {
    sum_peers(stream, term, to, mine, peers, n, accumulate, blocks, partials);
  });
}

// As many blocks on all ranks, whose shards may begin and end within rows.
template <class To, class E>
void sum_parts(cudaStream_t stream, To* to, const E* mine, int64_t first, ops::UsedRows rows, const Peers& peers,
               int64_t n, bool accumulate, ops::PowerSum sum) {
  ASSERT(aligned(to, mine) && n % width<E> == 0 && first % width<E> == 0 && rows.width % width<E> == 0);
  static_assert(most_peers <= 8);
  const int blocks = most_peer_blocks, rows_each = int(ceil_div(ceil_div(n, rows.width) + 1, int64_t(blocks)));
  ASSERT(rows_each * rows.width < int64_t(1) << 31);
  sum_with_powers(stream, blocks, sum, [&](auto term, double* partials) {
    launch(stream, sum_rows_kernel<decltype(term), To, E>, {blocks, peer_threads, rows_each}, partials, term, to, mine,
           first, rows, peers, n, accumulate);
  });
}

// mine (count), the first of which is the total of pieces (n), becomes the sum over ranks, in their order; then the
// first is raised to `exponent`, and is not a number where the second is not finite. from_ranks (2, ranks, count):
// every rank writes into its place in all of them, by turns into either half: a rank that is ahead does not overwrite
// what another has still to read.
static __global__ void __launch_bounds__(sum_threads)
    sum_scalars_kernel(Term term, double* mine, int count, const double* pieces, int64_t n, double* from_ranks,
                       Peers peers, double exponent) {
  begin_kernel();
  __shared__ double sums[sum_threads];
  double total = 0;
  for (int64_t i = threadIdx.x; i < n; i += sum_threads) total = both(term, total, pieces[i]);
  total = block_total(term, total);
  const int numbers = peers.ranks * count, r = threadIdx.x / count, i = threadIdx.x % count;
  const uint32_t met = peers.own()[0];
  double* const half = from_ranks + (met & 1) * numbers;
  if (threadIdx.x == 0) mine[0] = total;
  __syncthreads();
  if (threadIdx.x < numbers) peers.of(r, half)[peers.rank * count + i] = mine[i];
  meet(peers, met + 1);
  if (threadIdx.x < count) {
    double sum = __ldcg(half + threadIdx.x);
    for (int of = 1; of < peers.ranks; ++of) {
      const double x = __ldcg(half + of * count + threadIdx.x);
      sum = threadIdx.x == 0 ? both(term, sum, x) : sum + x;
    }
    sums[threadIdx.x] = sum;
    if (threadIdx.x > 0) mine[threadIdx.x] = sum;
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  peers.own()[0] = met + 1;
  const double power = exponent == 1 ? sums[0] : pow(sums[0], exponent);
  mine[0] = isfinite(sums[1]) ? power : NAN;
}
inline void sum_scalars(cudaStream_t stream, ops::GradNorm p, double* mine, int count, const double* pieces, int64_t n,
                        double* from_ranks, const Peers& peers) {
  ASSERT(count > 1 && count * peers.ranks <= sum_threads);
  launch(stream, sum_scalars_kernel, {1, sum_threads}, term_of(p), mine, count, pieces, n, from_ranks, peers,
         exponent_of(p));
}

}  // namespace gpu
