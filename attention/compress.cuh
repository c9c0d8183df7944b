// GPU kernels around the attention of NSA's branches: keys and values to compressed ones and back, the layouts that
// phi's products want, and the gated sum of the branches.
//
// All are bound by memory. A thread owns one 16-byte vector of a row of what is written (one number, where strides or
// addresses do not allow vectors) and sums what goes into it, in fp32 and in the order of the index: nothing is written
// twice, and no sum crosses threads but the positions', which goes through partial sums in memory. Blocks of tokens
// overlap: a token is read, or a token's gradient sums, block/stride times, all but the first time from a cache.
// H200, T 65536, 32/8 heads, D 128: the sum of branches 0.53 ms (4.1 TB/s of the 4.1 that a copy reaches); blocks 2.8
// and their backward 3.0 TB/s; the mean of keys 0.10 ms and its backward 0.07 ms (1.4 and 2.1 TB/s of rows 20 KiB
// apart).
#pragma once

#include "lib/ops/kernels.cuh"
#include "lib/ops/kernels_sums.cuh"
#include "lib/ops/ops.h"
#include "nsa_attention.h"

namespace gpu {
namespace compress {

// f.at<N>(row, column) for M rows, by N columns.
template <int N, class F>
__global__ void __launch_bounds__(256) rows_kernel(F f, int M, int vectors) {
  begin_kernel();
  const int row = blockIdx.x * blockDim.y + threadIdx.y, vector = blockIdx.y * blockDim.x + threadIdx.x;
  if (row < M && vector < vectors) f.template at<N>(row, vector * N);
}
template <int N, class F>
void rows_by(cudaStream_t stream, F f, int64_t M, int64_t C) {
  if (M > 1 << 30 || C > 1 << 23) throw Error("nsa: too many rows or columns for one launch");
  const Grid g = rows_by_vectors(M, C / N);
  launch(stream, rows_kernel<N, F>, g, f, int(M), int(C / N));
}
template <class T, class F>
Kernel rows(cudaStream_t stream, F f, int64_t M, int64_t C, bool vectors) {
  if (M == 0 || C == 0) return {};
  vectors ? rows_by<width<T>>(stream, f, M, C) : rows_by<1>(stream, f, M, C);
  return {"cuda", vectors ? "vectors" : "single numbers", !vectors};
}
// The same of keys and of values at one go: many of these kernels are so short that starting one costs as much.
template <int N, class F>
__global__ void __launch_bounds__(256) both_kernel(F keys, F values, int M, int vectors_k, int vectors_v) {
  begin_kernel();
  const int row = blockIdx.x * blockDim.y + threadIdx.y, vector = blockIdx.y * blockDim.x + threadIdx.x;
  if (row >= M) return;
  if (blockIdx.z == 0 && vector < vectors_k) keys.template at<N>(row, vector * N);
  if (blockIdx.z == 1 && vector < vectors_v) values.template at<N>(row, vector * N);
}
template <class T, class F>
Kernel both(cudaStream_t stream, F keys, F values, int64_t M, int64_t C_k, int64_t C_v, bool vectors) {
  if (M == 0) return {};
  if (M > 1 << 30 || std::max(C_k, C_v) > 1 << 23) throw Error("nsa: too many rows or columns for one launch");
  const auto by = [&](auto width) {
    constexpr int N = width.value;
    Grid g = rows_by_vectors(M, std::max(C_k, C_v) / N);
    g.blocks.z = 2;
    launch(stream, both_kernel<N, F>, g, keys, values, int(M), int(C_k / N), int(C_v / N));
  };
  if (vectors) by(std::integral_constant<int, width<T>>());
  else by(std::integral_constant<int, 1>());
  return {"cuda", vectors ? "vectors" : "single numbers", !vectors};
}
template <class T>
bool whole_vectors(const NsaShape& a) {
  return a.D % width<T> == 0 && a.ld % width<T> == 0;
}

// NsaShape as far as it is about blocks of tokens, in the kernels' types.
struct Blocks {
  int T, keys, D, block, stride;
  int64_t columns, ld;  // of a compressed row (HKV D); of a fused one
  explicit Blocks(const NsaShape& a)
      : T(int(a.T)),
        keys(int(a.compressed())),
        D(int(a.D)),
        block(int(a.block)),
        stride(int(a.stride)),
        columns(a.HKV * a.D),
        ld(a.ld) {}
  // Blocks [first, end) hold token t.
  __device__ int first(int t) const { return compressed_keys(t, block, stride); }
  __device__ int end(int t) const { return min(keys, t / stride + 1); }
};

// Row b * keys + i: the mean of tokens [stride i, stride i + block) of sequence b.
template <class T>
struct Mean {
  T* out;      // (B*keys, HKV D)
  const T* x;  // columns of (B*T, ld)
  Blocks a;
  float factor;
  template <int N>
  __device__ void at(int row, int c) const {
    const T* from = x + (int64_t(row / a.keys) * a.T + a.stride * (row % a.keys)) * a.ld + c;
    float sum[N] = {};
#pragma unroll 16
    for (int r = 0; r < a.block; ++r) {
      float v[N];
      load(v, from + r * a.ld);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += v[j];
    }
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] *= factor;
    store(out + row * a.columns + c, sum);
  }
};

// Row b * T + t: the sum of the gradients that token t gets from the blocks that hold it.
template <class T>
struct MeanBackward {
  T* dx;          // columns of (B*T, ld)
  const T* dout;  // (B*keys, HKV D)
  Blocks a;
  float factor;
  template <int N>
  __device__ void at(int row, int c) const {
    const int b = row / a.T, t = row % a.T, end = a.end(t);
    float sum[N] = {};
    for (int i = a.first(t); i < end; ++i) {
      float v[N];
      load(v, dout + (int64_t(b) * a.keys + i) * a.columns + c);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += v[j];
    }
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] *= factor;
    store(dx + row * a.ld + c, sum);
  }
};
template <class T>
struct BlocksBackward {
  T* dx;             // columns of (B*T, ld)
  const T* dblocks;  // (HKV, B*keys, block, D)
  Blocks a;
  int64_t rows;  // B * keys
  template <int N>
  __device__ void at(int row, int c) const {
    const int b = row / a.T, t = row % a.T, end = a.end(t), h = c / a.D, d = c % a.D;
    float sum[N] = {};
    for (int i = a.first(t); i < end; ++i) {
      float v[N];
      load(v, dblocks + ((h * rows + int64_t(b) * a.keys + i) * a.block + t - a.stride * i) * a.D + d);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += v[j];
    }
    store(dx + row * a.ld + c, sum);
  }
};

// Row (h * B + b) * keys + i; column r * D + d: token stride i + r, and its place in the block.
template <class T>
struct Unfold {
  T* blocks;          // (HKV, B*keys, block, D)
  const T* x;         // columns of (B*T, ld)
  const T* position;  // (HKV, block, D)
  Blocks a;
  int B;
  template <int N>
  __device__ void at(int row, int c) const {
    const int i = row % a.keys, b = row / a.keys % B, h = row / a.keys / B, r = c / a.D, d = c % a.D;
    float v[N], p[N];
    load(v, x + (int64_t(b) * a.T + a.stride * i + r) * a.ld + h * a.D + d);
    load(p, position + int64_t(h) * a.block * a.D + c);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] += p[j];
    store(blocks + int64_t(row) * a.block * a.D + c, v);
  }
};

// (heads, rows, D) to (rows, heads D), or back.
template <class T, bool last>
struct MoveHeads {
  T* out;
  const T* x;
  int64_t heads, rows;
  int D;
  template <int N>
  __device__ void at(int row, int c) const {
    const int64_t in_row = row * heads * D + c, in_head = (c / D * rows + row) * D + c % D;
    store(out + (last ? in_row : in_head), load<N>(x + (last ? in_head : in_row)));
  }
};

template <class T, bool finds_amax>
struct Combine {
  T* o;                                     // (B*T, H D), D being values' head dim
  const T *compressed, *selected, *window;  // (B*T, H D)
  const T* gates;                           // columns of (B*T, ld): H of each branch, one branch after another
  int64_t ld;
  int tokens, H, D;
  float* amax;  // (B,H,T), if finds_amax
  template <int N>
  __device__ void at(int row, int c) const {
    const int64_t from = int64_t(row) * H * D + c;
    const T* gate = gates + row * ld + c / D;
    const Pack<T, N> branch[3] = {load<N>(compressed + from), load<N>(selected + from), load<N>(window + from)};
    float sum[N] = {};
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      const float x = float(gate[i * H]), g = 1 / (1 + (sizeof(T) == 2 ? __expf(-x) : expf(-x)));
      float v[N];
      widen(v, branch[i]);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] += g * v[j];
    }
    const Pack<T, N> rounded = narrow<T>(sum);
    store(o + from, rounded);
    if constexpr (finds_amax) {
      uint32_t most = 0;
      widen(sum, rounded);
#pragma unroll
      for (int j = 0; j < N; ++j) most = max(most, magnitude(sum[j]));
      const int lanes = D / N, first = threadIdx.x % warp / lanes * lanes;  // those that hold this row of the head
      for (int across = lanes / 2; across > 0; across /= 2)
        most = max(most, __shfl_xor_sync(((1u << lanes) - 1) << first, most, across));
      if (c % D == 0) amax[(int64_t(row / tokens) * H + c / D) * tokens + row % tokens] = amax_of(most);
    }
  }
};

}  // namespace compress

template <class T>
Kernel nsa_mean(cudaStream_t stream, T* k, T* v, const T* x, const NsaShape& a) {
  using namespace compress;
  const NsaShape w = a.of_values();
  const float factor = 1 / float(a.block);
  const Mean<T> keys{k, x + a.k(0), Blocks(a), factor}, values{v, x + a.v(0), Blocks(w), factor};
  const bool vectors = whole_vectors<T>(a) && whole_vectors<T>(w) && aligned(keys.out, keys.x, values.out, values.x);
  return both<T>(stream, keys, values, a.B * a.compressed(), a.HKV * a.D, a.HKV * w.D, vectors);
}
template <class T>
Kernel nsa_mean_backward(cudaStream_t stream, T* dx, const T* dk, const T* dv, const NsaShape& a) {
  using namespace compress;
  const NsaShape w = a.of_values();
  const float factor = 1 / float(a.block);
  const MeanBackward<T> keys{dx + a.k(0), dk, Blocks(a), factor}, values{dx + a.v(0), dv, Blocks(w), factor};
  const bool vectors =
      whole_vectors<T>(a) && whole_vectors<T>(w) && aligned(keys.dx, keys.dout, values.dx, values.dout);
  return both<T>(stream, keys, values, a.B * a.T, a.HKV * a.D, a.HKV * w.D, vectors);
}

template <class T>
Kernel nsa_blocks(cudaStream_t stream, T* blocks, const T* x, const T* position, const NsaShape& a) {
  using namespace compress;
  const Unfold<T> f{blocks, x, position, Blocks(a), int(a.B)};
  return rows<T>(stream, f, a.HKV * a.B * a.compressed(), a.block * a.D,
                 whole_vectors<T>(a) && aligned(blocks, x, position));
}
template <class T, class G>
Kernel nsa_blocks_backward(cudaStream_t stream, T* dx, G* dposition, const T* dblocks, float* partials,
                           const NsaShape& a) {
  using namespace compress;
  const int64_t M = a.B * a.compressed(), C = a.block * a.D;
  const BlocksBackward<T> f{dx, dblocks, Blocks(a), M};
  const Kernel of_dx = rows<T>(stream, f, a.B * a.T, a.HKV * a.D, whole_vectors<T>(a) && aligned(dx, dblocks));
  const int runs = int(nsa_blocks_partials(a) / (a.HKV * C));
  column_sums(stream, partials, dblocks, runs, a.HKV, M, C, C);
  ops::ColumnSums<G> sums;
  sums.add(dposition, partials, runs, a.HKV * C);
  sum_columns(stream, sums);
  return of_dx;
}

template <class T>
Kernel nsa_heads_last(cudaStream_t stream, T* out, const T* x, int64_t heads, int64_t rows, int64_t D) {
  const compress::MoveHeads<T, true> f{out, x, heads, rows, int(D)};
  return compress::rows<T>(stream, f, rows, heads * D, D % width<T> == 0 && aligned(out, x));
}
template <class T>
Kernel nsa_heads_first(cudaStream_t stream, T* out, const T* x, int64_t heads, int64_t rows, int64_t D) {
  const compress::MoveHeads<T, false> f{out, x, heads, rows, int(D)};
  return compress::rows<T>(stream, f, rows, heads * D, D % width<T> == 0 && aligned(out, x));
}

template <class T>
Kernel nsa_combine(cudaStream_t stream, T* o, const T* compressed, const T* selected, const T* window, const T* x,
                   const NsaShape& a, float* amax) {
  const bool vectors = a.v_dim() % width<T> == 0 && aligned(o, compressed, selected, window);
  const auto combine = [&](auto finds_amax) {
    return compress::Combine<T, finds_amax.value>{o,    compressed, selected, window,         x + a.gate(0),
                                                  a.ld, int(a.T),   int(a.H), int(a.v_dim()), amax};
  };
  if (!amax) return compress::rows<T>(stream, combine(std::false_type()), a.B * a.T, a.H * a.v_dim(), vectors);
  const int64_t lanes = a.v_dim() / width<T>;  // of a warp's hold a row of a head
  if (!vectors || lanes > warp / 2 || (lanes & (lanes - 1)))
    throw Error(strf("nsa: no kernel finds the largest numbers of heads of %lld", (long long)a.v_dim()));
  compress::rows_by<width<T>>(stream, combine(std::true_type()), a.B * a.T, a.H * a.v_dim());
  return {"cuda", "vectors"};
}

}  // namespace gpu
