// Operations that sum: bias gradients, the gradient of the embedding, cross-entropy, shards of gradients and their
// norms. Sums that cross blocks go through partial sums in memory and a second kernel with a fixed order: no atomics,
// the same bits every time.
#pragma once

#include <cfloat>
#include <type_traits>

#include "lib/ops/kernels.cuh"
#include "lib/ops/kernels_elementwise.cuh"
#include "lib/ops/kernels_norm.cuh"
#include "lib/ops/ops.h"

namespace gpu {

// ----------------------------------------------------------------------------------------------------- column sums

// partials (gridDim.y,gridDim.z,C): sums over a run (y) of the M rows of matrix z of gridDim.z. A block owns 32 vectors
// of columns in one run of rows; its eight warps take the rows in turn, a lane owns one vector. rows.fetch(m, c) reads
// what vector c of row m of all matrices is made of, which rows.take makes of it.
template <int N, class Rows>
__global__ void __launch_bounds__(256) column_sums_kernel(float* partials, Rows of, int64_t M, int64_t C) {
  begin_kernel();
  constexpr int warps = 8, ahead = 4;
  __shared__ float sums[warps][warp][N];
  const int64_t c = (int64_t(blockIdx.x) * warp + threadIdx.x) * N, first = blockIdx.z * M;
  const int64_t rows = ceil_div(M, gridDim.y), begin = rows * blockIdx.y, end = begin + rows < M ? begin + rows : M;
  float total[N] = {};
  if (c < C)
    for (int64_t m = begin + threadIdx.y; m < end; m += ahead * warps) {
      typename Rows::Read read[ahead];
#pragma unroll
      for (int k = 0; k < ahead; ++k)
        if (m + k * warps < end) read[k] = of.fetch(first + m + k * warps, c);
#pragma unroll
      for (int k = 0; k < ahead; ++k) {
        if (m + k * warps >= end) break;
        float v[N];
        of.take(v, read[k], first + m + k * warps, c);
#pragma unroll
        for (int j = 0; j < N; ++j) total[j] += v[j];
      }
    }
#pragma unroll
  for (int j = 0; j < N; ++j) sums[threadIdx.y][threadIdx.x][j] = total[j];
  let_next_in();
  __syncthreads();
  if (threadIdx.y > 0 || c >= C) return;
#pragma unroll
  for (int j = 0; j < N; ++j) {
#pragma unroll
    for (int y = 1; y < warps; ++y) total[j] += sums[y][threadIdx.x][j];
    partials[(int64_t(blockIdx.y) * gridDim.z + blockIdx.z) * C + c + j] = total[j];
  }
}
// of (matrices,M,C); partials (runs,matrices,C).
template <int N, class Rows>
void column_sums(cudaStream_t stream, float* partials, const Rows& of, int runs, int64_t matrices, int64_t M,
                 int64_t C) {
  const dim3 blocks(unsigned(ceil_div(C, warp * N)), unsigned(runs), unsigned(matrices));
  launch(stream, column_sums_kernel<N, Rows>, {blocks, dim3(warp, 8)}, partials, of, M, C);
}

// Rows of ld numbers as they are.
template <class T, int N>
struct PlainRows {
  const T* x;
  int64_t ld;
  using Read = Pack<T, N>;
  __device__ Read fetch(int64_t m, int64_t c) const { return load<N>(x + m * ld + c); }
  __device__ void take(float (&v)[N], const Read& read, int64_t, int64_t) const { widen(v, read); }
};
template <class T>
void column_sums(cudaStream_t stream, float* partials, const T* x, int runs, int64_t matrices, int64_t M, int64_t C,
                 int64_t ld) {
  constexpr int N = width<T>;
  if (C % N == 0 && ld % N == 0 && aligned(x))
    column_sums<N>(stream, partials, PlainRows<T, N>{x, ld}, runs, matrices, M, C);
  else column_sums<1>(stream, partials, PlainRows<T, 1>{x, ld}, runs, matrices, M, C);
}

// db (C), dy (M,ld), partials (bias_grad_partials(M,C)).
template <class T, class G>
void bias_grad(cudaStream_t stream, G* db, const T* dy, float* partials, int64_t M, int64_t C, int64_t ld,
               bool accumulate, ops::ColumnSums<G>* later) {
  const int runs = int(ops::bias_grad_partials(M, C) / C);
  column_sums(stream, partials, dy, runs, 1, M, C, ld);
  ops::ColumnSums<G> now;
  (later ? later : &now)->add(db, partials, runs, C);
  sum_columns(stream, now, accumulate);
}

// Rows of F of a hidden layer through GELU's backward, in place.
template <class T, int N>
struct GeluRows {
  T *dg_g, *h_dh;
  int64_t F;
  struct Read {
    Pack<T, N> dg, h;
  };
  __device__ Read fetch(int64_t m, int64_t f) const { return {load<N>(dg_g + m * F + f), load<N>(h_dh + m * F + f)}; }
  __device__ void take(float (&dh)[N], const Read& read, int64_t m, int64_t f) const {
    float x[N];
    widen(x, read.h), widen(dh, read.dg);
    gelu_gradient<T>(x, dh);
    const Pack<T, N> rounded = narrow<T>(dh);
    store(dg_g + m * F + f, x), store(h_dh + m * F + f, rounded);
    widen(dh, rounded);
  }
};
template <class T, class G>
void gelu_backward(cudaStream_t stream, T* dg_g, T* h_dh, int64_t M, int64_t F, G* db, float* partials,
                   ops::ColumnSums<G>* later) {
  constexpr int N = width<T>;
  const int runs = int(ops::bias_grad_partials(M, F) / F);
  if (F % N == 0 && aligned(dg_g, h_dh)) column_sums<N>(stream, partials, GeluRows<T, N>{dg_g, h_dh, F}, runs, 1, M, F);
  else column_sums<1>(stream, partials, GeluRows<T, 1>{dg_g, h_dh, F}, runs, 1, M, F);
  later->add(db, partials, runs, F);
}

// ------------------------------------------------------------------------------------------ gradient of the embedding

// total (N) += rows order[begin..end) of dx (M,C), at channels c .. c + N - 1.
template <class T, int N>
__device__ __forceinline__ void add_rows(float (&total)[N], const T* dx, const int32_t* order, int begin, int end,
                                         int64_t C, int64_t c) {
#pragma unroll 4
  for (int i = begin; i < end; ++i) {
    float v[N];
    load(v, dx + order[i] * C + c);
#pragma unroll
    for (int j = 0; j < N; ++j) total[j] += v[j];
  }
}

// partials (gridDim.x,C), dx (M,C). A block owns partial sum blockIdx.x (one chunk of the occurrences of a frequent
// token) and a vector of channels a thread. The launch has as many blocks as there may be partial sums in any batch;
// those without one leave.
template <class T, int N>
__global__ void __launch_bounds__(256)
    embedding_chunks_kernel(float* partials, const T* dx, ops::TokenIndex index, int64_t V, int64_t C) {
  begin_kernel();
  const int slot = blockIdx.x;
  const int64_t c = (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * N;
  if (slot >= index.part[V] || c >= C) return;
  int64_t v = 0, above = V;  // the row v that owns the slot: part[v] <= slot < part[v + 1]
  while (above - v > 1) {
    const int64_t middle = (v + above) / 2;
    (index.part[middle] <= slot ? v : above) = middle;
  }
  const int begin = index.start[v] + (slot - index.part[v]) * int(ops::TokenIndex::chunk);
  const int end = min(begin + int(ops::TokenIndex::chunk), index.start[v + 1]);
  float total[N] = {};
  add_rows<T>(total, dx, index.order, begin, end, C, c);
  store(partials + slot * C + c, total);
}

// dtable (V,C), dx (M,C), partials as above. A thread owns a vector of channels of `rows` rows: the sum of a row's
// occurrences, or of its partial sums. Of a large table most rows have no token in a batch.
template <class T, class G, int N, int rows>
__global__ void __launch_bounds__(256)
    embedding_backward_kernel(G* dtable, const T* dx, ops::TokenIndex index, const float* partials, int64_t V,
                              int64_t C, ops::TableRows which) {
  begin_kernel();
  const bool accumulate = which == ops::TableRows::add;
  const int64_t first_row = int64_t(blockIdx.x) * blockDim.y * rows + threadIdx.y, next = blockDim.y;
  const int64_t c = (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * N;
  if (c >= C) return;
  // All that says where the rows' tokens are is on its way at once.
  int begin[rows], end[rows], first[rows], last[rows];
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    const int64_t v = min(first_row + i * next, V - 1);
    begin[i] = index.start[v], end[i] = index.start[v + 1], first[i] = index.part[v], last[i] = index.part[v + 1];
  }
#pragma unroll
  for (int i = 0; i < rows; ++i) {
    const int64_t v = first_row + i * next;
    if (v >= V) return;
    if (which != ops::TableRows::all && begin[i] == end[i]) continue;
    float total[N] = {}, before[N] = {};
    if (accumulate) load(before, dtable + v * C + c);
    if (first[i] == last[i]) add_rows<T>(total, dx, index.order, begin[i], end[i], C, c);
    else
#pragma unroll 4
      for (int slot = first[i]; slot < last[i]; ++slot) {
        float p[N];
        load(p, partials + slot * C + c);
#pragma unroll
        for (int j = 0; j < N; ++j) total[j] += p[j];
      }
#pragma unroll
    for (int j = 0; j < N; ++j) total[j] += before[j];
    store(dtable + v * C + c, total);
  }
}

template <class T, class G, int N>
void embedding_backward_by(cudaStream_t stream, G* dtable, const T* dx, ops::TokenIndex index, float* partials,
                           int64_t M, int64_t V, int64_t C, ops::TableRows which) {
  const Grid g = rows_by_vectors(V, C / N);
  const int64_t slots = ops::embedding_partials(M, 1);
  if (slots > 0) {
    const unsigned x = g.threads.x;  // one row of threads: a block has one slot
    const dim3 blocks(unsigned(slots), unsigned(ceil_div(C / N, x)));
    launch(stream, embedding_chunks_kernel<T, N>, {blocks, x}, partials, dx, index, V, C);
  }
  const auto start = [&](auto kernel, int rows) {
    const dim3 blocks(unsigned(ceil_div(V, int64_t(g.threads.y) * rows)), g.blocks.y);
    launch(stream, kernel, {blocks, g.threads}, dtable, dx, index, partials, V, C, which);
  };
  const bool large = V >= 4096;
  if (large) start(embedding_backward_kernel<T, G, N, 4>, 4);
  else start(embedding_backward_kernel<T, G, N, 1>, 1);
}
template <class T, class G>
void embedding_backward(cudaStream_t stream, G* dtable, const T* dx, ops::TokenIndex index, float* partials, int64_t M,
                        int64_t V, int64_t C, ops::TableRows which) {
  constexpr int N = width<T>;
  if (C % N == 0 && aligned(dtable, dx, partials))
    embedding_backward_by<T, G, N>(stream, dtable, dx, index, partials, M, V, C, which);
  else embedding_backward_by<T, G, 1>(stream, dtable, dx, index, partials, M, V, C, which);
}

// ---------------------------------------------------------------------------------------------------- cross-entropy

// The softmax of part of a row: its largest number and sum of exp(x - largest). Parts are merged in any order.
struct Softmax {
  float largest = -FLT_MAX, sum = 0;
  __device__ void merge(float other_largest, float other_sum) {
    const float both = fmaxf(largest, other_largest);
    // Without contraction, so that both sides of an exchange get the same bits.
    sum = __fadd_rn(__fmul_rn(sum, expf(largest - both)), __fmul_rn(other_sum, expf(other_largest - both)));
    largest = both;
  }
};

template <class T>
__device__ __forceinline__ float exponential(float x) {
  if constexpr (sizeof(T) == 2) {
    float y;  // __expf, but for numbers below 2^-126, which it computes apart; here they are zeros
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.4426950409f));
    return y;
  } else {
    return expf(x);
  }
}

// logits (M,V), loss_rows, targets (M). A block owns a row. First pass: online softmax (Milakov & Gimelshein 2018),
// every thread over its own vectors, then merged. Second pass: gradient in place. A row is read once where a thread can
// keep its vectors, no more than `kept`; kept 0: it is read twice, and up to V = 64 K in bf16 is still in L2.
template <int kept>
constexpr int cross_entropy_threads = kept ? 512 : 1024;
template <class T, int N, int kept>
__global__ void __launch_bounds__(cross_entropy_threads<kept>, 2)
    cross_entropy_kernel(T* logits, float* loss_rows, const int32_t* targets, float scale, bool backward, int64_t V) {
  begin_kernel();
  __shared__ float largests[warp], sums[warp];
  const int64_t m = blockIdx.x, first = int64_t(threadIdx.x) * N, stride = int64_t(blockDim.x) * N;
  T* row = logits + m * V;
  const int target = targets[m];
  if (target < 0) {  // ignored
    if (threadIdx.x == 0) loss_rows[m] = 0;
    if (backward)
      for (int64_t v = first; v < V; v += stride) store(row + v, zeros<T, N>());
    return;
  }
  const float at_target = threadIdx.x == 0 ? float(row[target]) : 0;  // before it is overwritten

  Softmax mine;
  const auto add = [&](const Pack<T, N>& vector) {
    float x[N];
    widen(x, vector);
    float largest = x[0], sum = 0;
#pragma unroll
    for (int j = 1; j < N; ++j) largest = fmaxf(largest, x[j]);
    largest = fmaxf(largest, mine.largest);
#pragma unroll
    for (int j = 0; j < N; ++j) sum += exponential<T>(x[j] - largest);
    mine.sum = mine.sum * exponential<T>(mine.largest - largest) + sum, mine.largest = largest;
  };
  Pack<T, N> mine_of_row[std::max(kept, 1)];
  if constexpr (kept > 0) {
#pragma unroll
    for (int i = 0; i < kept; ++i)
      if (const int64_t v = first + i * stride; v < V) mine_of_row[i] = load<N>(row + v);
#pragma unroll
    for (int i = 0; i < kept; ++i)
      if (first + i * stride < V) add(mine_of_row[i]);
  } else {
#pragma unroll 4
    for (int64_t v = first; v < V; v += stride) add(load<N>(row + v));
  }
  const auto merge_warp = [&] {
#pragma unroll
    for (int o = warp / 2; o > 0; o /= 2)
      mine.merge(__shfl_xor_sync(0xffffffffu, mine.largest, o), __shfl_xor_sync(0xffffffffu, mine.sum, o));
  };
  merge_warp();
  const int lane = threadIdx.x % warp, warps = blockDim.x / warp;
  if (lane == 0) largests[threadIdx.x / warp] = mine.largest, sums[threadIdx.x / warp] = mine.sum;
  __syncthreads();
  mine.largest = lane < warps ? largests[lane] : -FLT_MAX, mine.sum = lane < warps ? sums[lane] : 0;
  merge_warp();

  if (threadIdx.x == 0) loss_rows[m] = logf(mine.sum) + mine.largest - at_target;
  if (!backward) return;
  const float factor = scale / mine.sum;
  const auto put = [&](int64_t v, const Pack<T, N>& vector) {
    float x[N];
    widen(x, vector);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] = factor * exponential<T>(x[j] - mine.largest);
    if (const int64_t at = target - v; 0 <= at && at < N) {
#pragma unroll
      for (int j = 0; j < N; ++j) x[j] -= j == at ? scale : 0;
    }
    store(row + v, x);
  };
  if constexpr (kept > 0) {
#pragma unroll
    for (int i = 0; i < kept; ++i)
      if (const int64_t v = first + i * stride; v < V) put(v, mine_of_row[i]);
  } else {
#pragma unroll 2
    for (int64_t v = first; v < V; v += stride) put(v, load<N>(row + v));
  }
}

template <class T>
void cross_entropy(cudaStream_t stream, T* logits, float* loss_rows, const int32_t* targets, float scale, bool backward,
                   int64_t M, int64_t V) {
  constexpr int N = width<T>, kept = 8;
  if (M == 0) return;
  const bool vectors = V % N == 0 && aligned(logits);
  const auto start = [&](auto kernel, int64_t threads) {
    launch(stream, kernel, {unsigned(M), unsigned(threads)}, logits, loss_rows, targets, scale, backward, V);
  };
  const int64_t n = vectors ? V / N : V;  // of a row
  if (vectors && n > 1024 && n <= kept * cross_entropy_threads<kept>)
    return start(cross_entropy_kernel<T, N, kept>, cross_entropy_threads<kept>);
  const int64_t threads = std::min<int64_t>(cross_entropy_threads<0>, round_up_to_warp(n));
  if (vectors) start(cross_entropy_kernel<T, N, 0>, threads);
  else start(cross_entropy_kernel<T, 1, 0>, threads);
}

// ------------------------------------------------------------------------------------------------------------- sums

// What is added up of a number: itself, or a power of its absolute value. largest: nothing is added, the largest
// absolute value is taken, and a NaN counts as infinity: a maximum over ranks may lose one.
enum class Term { itself, absolute, square, cube, largest };
// As a constant every kernel that takes it is compiled once more; as a number it costs a comparison an element. So it
// is a constant where it is nearly always the same: of the norms, the second.
template <Term term>
using Always = std::integral_constant<Term, term>;

template <class A>
__device__ __forceinline__ A both(Term term, A a, A b) {
  if (term == Term::largest) return b > a ? b : a;
  return a + b;
}
__device__ __forceinline__ float term_of(Term term, float x) {
  if (term == Term::largest && x != x) return INFINITY;
  return term == Term::itself ? x : term == Term::square ? x * x : term == Term::cube ? fabsf(x * x * x) : fabsf(x);
}
// Over the block; the result is thread 0's.
template <class A>
__device__ __forceinline__ A block_total(Term term, A x) {
  __shared__ A warps[warp];
#pragma unroll
  for (int o = warp / 2; o > 0; o /= 2) x = both(term, x, __shfl_xor_sync(0xffffffffu, x, o));
  if (threadIdx.x % warp == 0) warps[threadIdx.x / warp] = x;
  __syncthreads();
  x = threadIdx.x < blockDim.x / warp ? warps[threadIdx.x] : A(0);
#pragma unroll
  for (int o = warp / 2; o > 0; o /= 2) x = both(term, x, __shfl_xor_sync(0xffffffffu, x, o));
  return x;
}

// partials (gridDim.x): totals over the blocks' shares of the n numbers that f gives. A thread strides over vectors of
// N. term: an Always or a Term, here and below.
constexpr int sum_threads = 256;
template <class A, int N, class Which, class F>
__global__ void __launch_bounds__(sum_threads) sum_kernel(A* partials, Which term, F f, int64_t n) {
  begin_kernel();
  const int64_t vectors = n / N, stride = int64_t(gridDim.x) * blockDim.x;
  const int64_t t = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  A total = 0;
#pragma unroll 4
  for (int64_t i = t; i < vectors; i += stride) {
    float v[N], sum = 0;
    f.get(v, i * N);
#pragma unroll
    for (int j = 0; j < N; ++j) sum = both(term, sum, term_of(term, v[j]));
    total = both(term, total, A(sum));
  }
  for (int64_t i = vectors * N + t; i < n; i += stride) {
    float v[1];
    f.get(v, i);
    total = both(term, total, A(term_of(term, v[0])));
  }
  total = block_total(term, total);
  if (threadIdx.x == 0) partials[blockIdx.x] = total;
}
// out (1), from partials (n).
template <class A>
__global__ void __launch_bounds__(sum_threads)
    sum_finish_kernel(A* out, Term term, const A* partials, int64_t n, bool accumulate) {
  begin_kernel();
  A total = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) total = both(term, total, partials[i]);
  total = block_total(term, total);
  if (threadIdx.x == 0) *out = both(term, accumulate ? *out : A(0), total);
}
template <int N, class A, class Which, class F>
void sum_by_blocks(cudaStream_t stream, A* out, Which term, F f, A* partials, int64_t n, bool vectors,
                   bool accumulate) {
  const int blocks = int(std::min(ops::sum_partials(), ceil_div(n, 4 * sum_threads)));
  if (blocks > 0) {
    if (vectors) launch(stream, sum_kernel<A, N, Which, F>, {blocks, sum_threads}, partials, term, f, n);
    else launch(stream, sum_kernel<A, 1, Which, F>, {blocks, sum_threads}, partials, term, f, n);
  }
  launch(stream, sum_finish_kernel<A>, {1, sum_threads}, out, term, partials, blocks, accumulate);
}

template <class T>
struct Read {
  const T* x;
  template <int N>
  __device__ void get(float (&v)[N], int64_t i) const {
    load(v, x + i);
  }
};
template <class A>
void sum(cudaStream_t stream, A* out, const A* x, A* partials, int64_t n, bool accumulate) {
  sum_by_blocks<4>(stream, out, Always<Term::itself>(), Read<A>{x}, partials, n, aligned(x), accumulate);
}

// -------------------------------------------------------------------------------------------- shards of a gradient

inline Term term_of(ops::GradNorm p) {
  return p == ops::GradNorm::one     ? Term::absolute
         : p == ops::GradNorm::three ? Term::cube
         : p == ops::GradNorm::two   ? Term::square
                                     : Term::largest;
}
// Calls by(term) with the p-norm's.
template <class F>
void with_term(ops::GradNorm p, F by) {
  if (p == ops::GradNorm::two) by(Always<Term::square>());
  else by(term_of(p));
}
// Writes n numbers, and sums the powers of what is written while it is in registers, if somebody asks.
template <class F>
struct Write {
  F f;
  template <int N>
  __device__ void at(int64_t i) const {
    float v[N];
    f.get(v, i);
  }
};
template <int N, class F>
void write_and_sum(cudaStream_t stream, F f, int64_t n, bool vectors, ops::PowerSum sum) {
  if (!sum.out) return each<N>(stream, Write<F>{f}, n, vectors);
  with_term(sum.p, [&](auto term) { sum_by_blocks<N>(stream, sum.out, term, f, sum.partials, n, vectors, sum.adds); });
}

// sizeof(G) + sizeof(To) bytes an element, 4 more if it accumulates; the sum of powers reads nothing.
template <class To, class G>
struct AccumulateGradient {
  To* shard;      // (n)
  const G* grad;  // (n)
  bool accumulate;
  template <int N>
  __device__ void get(float (&s)[N], int64_t i) const {
    float before[N];
    load(s, grad + i);
    if (accumulate) {
      load(before, shard + i);
#pragma unroll
      for (int j = 0; j < N; ++j) s[j] += before[j];
    }
    store(shard + i, s);
  }
};
template <class G, class To>
void accumulate_gradient(cudaStream_t stream, To* shard, const G* grad, int64_t n, bool accumulate, ops::PowerSum sum) {
  write_and_sum<common_width<To, G>>(stream, AccumulateGradient<To, G>{shard, grad, accumulate}, n,
                                     aligned(shard, grad), sum);
}

// What the ranks have sent of a shard, summed: ranks * sizeof(E) bytes read an element and sizeof(To) written, and read
// if it accumulates: with bf16 parts of two ranks 8 bytes, or 12. A thread owns a vector of all parts, whose loads do
// not wait for each other.
template <class To, class E>
struct SumParts {
  To* to;           // (n)
  const E* mine;    // (n), of `rank`
  const E* others;  // (ranks - 1, n)
  int64_t n;
  int rank, ranks;
  bool accumulate;
  __device__ const E* part(int r) const { return r == rank ? mine : others + among_others(r, rank) * n; }
  template <int N>
  __device__ void get(float (&sum)[N], int64_t i) const {
    float x[N];
    load(sum, part(0) + i);
#pragma unroll 4
    for (int r = 1; r < ranks; ++r) {
      load(x, part(r) + i);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += x[j];
    }
    if (accumulate) {
      load(x, to + i);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += x[j];
    }
    const Pack<To, N> rounded = narrow<To>(sum);
    store(to + i, rounded);
    widen(sum, rounded);
  }
};
template <class To, class E>
void sum_parts(cudaStream_t stream, To* to, const E* mine, int rank, const E* others, int64_t n, int ranks,
               bool accumulate, ops::PowerSum sum) {
  constexpr int N = common_width<To, E>;
  write_and_sum<N>(stream, SumParts<To, E>{to, mine, others, n, rank, ranks, accumulate}, n,
                   aligned(to, mine, others) && n % N == 0, sum);
}

inline void total_power(cudaStream_t stream, ops::GradNorm p, double* out, const double* pieces, int64_t n) {
  launch(stream, sum_finish_kernel<double>, {1, sum_threads}, out, term_of(p), pieces, n, /*accumulate=*/false);
}
// x (1), loss (1) or none.
static __global__ void power_kernel(double* x, double exponent, const double* loss) {
  begin_kernel();
  if (exponent != 1) *x = pow(*x, exponent);
  if (loss && !isfinite(*loss)) *x = NAN;
}
// Of the sum of powers, to the square of the norm.
inline double exponent_of(ops::GradNorm p) { return p == ops::GradNorm::inf ? 2.0 : 2.0 / int(p); }
inline void squared_norm(cudaStream_t stream, ops::GradNorm p, double* out, const double* loss) {
  if (p == ops::GradNorm::two && !loss) return;
  launch(stream, power_kernel, {1, 1}, out, exponent_of(p), loss);
}

}  // namespace gpu
