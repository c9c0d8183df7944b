// Attention in float, for checks on a GPU: any D up to 128 that 8 divides, no tensor cores, no effort at speed.
//
// Every kernel is 8 warps; a warp owns 4 rows (queries, or keys for dK and dV) of the block's 32. The other side
// streams past 32 rows at a time, through shared memory: first each lane takes one of the 32 and makes a score, then
// each lane takes every 32nd column and sums. Shapes: o, q, do, dq (B,T,H,D); k, v, dk, dv (B,keys,HKV,D); lse (B,H,T);
// lse2, delta (B,H,Tp).
#pragma once

#include "attention/tiles.cuh"

namespace attention::simple {

constexpr int rows = 32, own = 4, pad = 129, most = 128 / 32;  // pad: one row's stride in shared memory, odd

using Tile = float[32][pad];

__device__ inline void load_tile(Tile& to, const float* from, int64_t ld, int valid, int D) {
  for (int i = threadIdx.x; i < 32 * D; i += 256) to[i / D][i % D] = i / D < valid ? from[i / D * ld + i % D] : 0.f;
}
__device__ inline float dot(const float* x, const float* y, int D) {
  float sum = 0;
  for (int d = 0; d < D; ++d) sum += x[d] * y[d];
  return sum;
}
// acc += sum over the lanes' weights x rows of `from`
__device__ inline void accumulate(float (&acc)[most], float weight, const Tile& from, int D) {
  int lane = threadIdx.x % 32;
  for (int l = 0; l < 32; ++l) {
    float w = __shfl_sync(~0u, weight, l);
#pragma unroll
    for (int i = 0; i < most; ++i)
      if (lane + 32 * i < D) acc[i] += w * from[l][lane + 32 * i];
  }
}
__device__ inline void store_row(float* to, const float (&acc)[most], float f, int D) {
#pragma unroll
  for (int i = 0; i < most; ++i) {
    int c = threadIdx.x % 32 + 32 * i;
    if (c < D) to[c] = acc[i] * f;
  }
}

template <class Mask>
__global__ void __launch_bounds__(256)
    forward_kernel(float* o, float* lse, const float* q, const float* k, const float* v, Problem a, Mask mask) {
  extern __shared__ Tile tiles[];
  Tile &qs = tiles[0], &ks = tiles[1], &vs = tiles[2];
  const int n = ceil_div(a.T, rows), h = blockIdx.x % a.H, q0 = blockIdx.x / a.H % n * rows, b = blockIdx.x / a.H / n;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * own;
  load_tile(qs, q + (int64_t(b) * a.T + q0) * a.ld_q + h * a.D, a.ld_q, a.T - q0, a.D);
  float acc[own][most] = {}, top[own], sum[own] = {};
  for (int i = 0; i < own; ++i) top[i] = -INFINITY;
  for (int k0 = mask.first_key(q0) / 32 * 32; k0 < mask.last_key(q0 + rows); k0 += 32) {
    __syncthreads();
    int64_t at = (int64_t(b) * a.keys + k0) * a.ld_kv + h / a.group * a.D;
    load_tile(ks, k + at, a.ld_kv, a.keys - k0, a.D);
    load_tile(vs, v + at, a.ld_kv, a.keys - k0, a.D);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < own; ++i) {
      bool seen = k0 + lane < a.keys && mask.visible(q0 + row + i, k0 + lane);
      float s = seen ? dot(qs[row + i], ks[lane], a.D) * a.scale : -INFINITY, m = s, p;
      for (int x = 16; x; x /= 2) m = fmaxf(m, __shfl_xor_sync(~0u, m, x));
      m = fmaxf(m, top[i]);
      if (m == -INFINITY) continue;  // the same for the whole warp
      float factor = expf(top[i] - m);
      p = expf(s - m);
      top[i] = m;
      sum[i] = sum[i] * factor + p;
      for (float& x : acc[i]) x *= factor;
      accumulate(acc[i], p, vs, a.D);
    }
  }
#pragma unroll
  for (int i = 0; i < own; ++i) {
    int t = q0 + row + i;
    for (int x = 16; x; x /= 2) sum[i] += __shfl_xor_sync(~0u, sum[i], x);
    if (t >= a.T) continue;
    store_row(o + (int64_t(b) * a.T + t) * a.ld_o + h * a.D, acc[i], sum[i] > 0 ? 1 / sum[i] : 0.f, a.D);
    if (lane == 0) lse[int64_t(b * a.H + h) * a.T + t] = sum[i] > 0 ? top[i] + logf(sum[i]) : -INFINITY;
  }
}

template <class Mask>
__global__ void __launch_bounds__(256)
    backward_kv(float* dk, float* dv, const float* d_o, const float* q, const float* k, const float* v,
                const float* lse2, const float* delta, Problem a, Mask mask) {
  extern __shared__ Tile tiles[];
  Tile &ks = tiles[0], &vs = tiles[1], &qs = tiles[2], &dos = tiles[3];
  const int n = ceil_div(a.keys, rows);
  const int head = blockIdx.x % a.HKV, k0 = blockIdx.x / a.HKV % n * rows, b = blockIdx.x / a.HKV / n;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * own;
  const int64_t kv_at = (int64_t(b) * a.keys + k0) * a.ld_kv + head * a.D;
  load_tile(ks, k + kv_at, a.ld_kv, a.keys - k0, a.D);
  load_tile(vs, v + kv_at, a.ld_kv, a.keys - k0, a.D);
  float dk_acc[own][most] = {}, dv_acc[own][most] = {};
  for (int h = head * a.group; h < (head + 1) * a.group; ++h)
    for (int q0 = mask.first_query(k0) / 32 * 32; q0 < mask.last_query(k0 + rows); q0 += 32) {
      __syncthreads();
      int64_t at = int64_t(b) * a.T + q0, stats = int64_t(b * a.H + h) * a.Tp + q0 + lane;
      load_tile(qs, q + at * a.ld_q + h * a.D, a.ld_q, a.T - q0, a.D);
      load_tile(dos, d_o + at * a.ld_o + h * a.D, a.ld_o, a.T - q0, a.D);
      __syncthreads();
#pragma unroll
      for (int i = 0; i < own; ++i) {
        bool seen = q0 + lane < a.T && mask.visible(q0 + lane, k0 + row + i);
        float p = seen ? exp2f(dot(ks[row + i], qs[lane], a.D) * a.scale_log2 - lse2[stats]) : 0.f;
        float ds = seen ? p * (dot(vs[row + i], dos[lane], a.D) - delta[stats]) : 0.f;
        accumulate(dv_acc[i], p, dos, a.D);
        accumulate(dk_acc[i], ds, qs, a.D);
      }
    }
#pragma unroll
  for (int i = 0; i < own; ++i) {
    if (k0 + row + i >= a.keys) continue;
    int64_t at = (int64_t(b) * a.keys + k0 + row + i) * a.ld_dkv + head * a.D;
    store_row(dk + at, dk_acc[i], a.scale, a.D);
    store_row(dv + at, dv_acc[i], 1, a.D);
  }
}

template <class Mask>
__global__ void __launch_bounds__(256)
    backward_q(float* dq, const float* d_o, const float* q, const float* k, const float* v, const float* lse2,
               const float* delta, Problem a, Mask mask) {
  extern __shared__ Tile tiles[];
  Tile &qs = tiles[0], &dos = tiles[1], &ks = tiles[2], &vs = tiles[3];
  const int n = ceil_div(a.T, rows), h = blockIdx.x % a.H, q0 = blockIdx.x / a.H % n * rows, b = blockIdx.x / a.H / n;
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * own;
  const int64_t at = int64_t(b) * a.T + q0, stats = int64_t(b * a.H + h) * a.Tp + q0 + row;
  load_tile(qs, q + at * a.ld_q + h * a.D, a.ld_q, a.T - q0, a.D);
  load_tile(dos, d_o + at * a.ld_o + h * a.D, a.ld_o, a.T - q0, a.D);
  float acc[own][most] = {};
  for (int k0 = mask.first_key(q0) / 32 * 32; k0 < mask.last_key(q0 + rows); k0 += 32) {
    __syncthreads();
    int64_t kv_at = (int64_t(b) * a.keys + k0) * a.ld_kv + h / a.group * a.D;
    load_tile(ks, k + kv_at, a.ld_kv, a.keys - k0, a.D);
    load_tile(vs, v + kv_at, a.ld_kv, a.keys - k0, a.D);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < own; ++i) {
      bool seen = k0 + lane < a.keys && mask.visible(q0 + row + i, k0 + lane);
      float p = seen ? exp2f(dot(qs[row + i], ks[lane], a.D) * a.scale_log2 - lse2[stats + i]) : 0.f;
      float ds = seen ? p * (dot(dos[row + i], vs[lane], a.D) - delta[stats + i]) : 0.f;
      accumulate(acc[i], ds, ks, a.D);
    }
  }
#pragma unroll
  for (int i = 0; i < own; ++i)
    if (q0 + row + i < a.T) store_row(dq + (at + row + i) * a.ld_dq + h * a.D, acc[i], a.scale, a.D);
}

template <class Mask>
void forward(cudaStream_t stream, float* o, float* lse, const float* q, const float* k, const float* v,
             const Problem& a, const Mask& mask) {
  constexpr int bytes = 3 * sizeof(Tile);
  auto kernel = forward_kernel<Mask>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kernel<<<a.B * a.H * ceil_div(a.T, rows), 256, bytes, stream>>>(o, lse, q, k, v, a, mask);
  CUDA_CHECK_LAUNCH();
}

template <class Mask>
void backward(cudaStream_t stream, float* dq, float* dk, float* dv, const float* d_o, const float* q, const float* k,
              const float* v, const float* lse2, const float* delta, const Problem& a, const Mask& mask) {
  constexpr int bytes = 4 * sizeof(Tile);
  auto kv = backward_kv<Mask>;
  CUDA_CHECK(cudaFuncSetAttribute(kv, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  kv<<<a.B * a.HKV * ceil_div(a.keys, rows), 256, bytes, stream>>>(dk, dv, d_o, q, k, v, lse2, delta, a, mask);
  CUDA_CHECK_LAUNCH();
  auto dq_kernel = backward_q<Mask>;
  CUDA_CHECK(cudaFuncSetAttribute(dq_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  dq_kernel<<<a.B * a.H * ceil_div(a.T, rows), 256, bytes, stream>>>(dq, d_o, q, k, v, lse2, delta, a, mask);
  CUDA_CHECK_LAUNCH();
}

}  // namespace attention::simple
