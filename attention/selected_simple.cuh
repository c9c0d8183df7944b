// The selected branch in float, for checks on a GPU: any D up to 128 that 8 divides, no tensor cores, no effort at
// speed. A warp owns a query's head (o, lse, dq), or a key (dk, dv); lanes own every 32nd column.
#pragma once

#include "attention/selected_lists.cuh"

namespace attention::selected::simple {

struct Row {  // of up to 128 columns
  float x[4];
  __device__ void zero() {
    for (float& y : x) y = 0;
  }
  __device__ void load(const float* p, int D) {
    for (int i = 0; i < 4; ++i) x[i] = threadIdx.x % 32 + 32 * i < D ? p[threadIdx.x % 32 + 32 * i] : 0.f;
  }
  __device__ void store(float* p, float f, int D) const {
    for (int i = 0; i < 4; ++i)
      if (threadIdx.x % 32 + 32 * i < D) p[threadIdx.x % 32 + 32 * i] = x[i] * f;
  }
  __device__ void add(float f, const Row& y) {
    for (int i = 0; i < 4; ++i) x[i] += f * y.x[i];
  }
  __device__ float dot(const Row& y) const {
    float sum = 0;
    for (int i = 0; i < 4; ++i) sum += x[i] * y.x[i];
    for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    return sum;
  }
};

// f(key) for all keys that query t of a pair sees, in order.
template <class F>
__device__ void for_keys(const Problem& a, int pair, int t, F f) {
  const int32_t* chosen = a.indices + (int64_t(pair) * a.T + t) * a.n;
  for (int r = 0; r < a.n; ++r)
    if (chosen[r] >= 0)
      for (int64_t j = int64_t(chosen[r]) * a.block; j < (int64_t(chosen[r]) + 1) * a.block && j <= t; ++j) f(j);
}

__global__ void __launch_bounds__(256)
    forward_kernel(float* o, float* lse, const float* q, const float* k, const float* v, Problem a) {
  begin_kernel();
  const int64_t row = int64_t(blockIdx.x) * 8 + threadIdx.x / 32;  // of (B,T,H)
  if (row >= int64_t(a.B) * a.T * a.H) return;
  const int h = int(row % a.H), t = int(row / a.H % a.T), b = int(row / a.H / a.T), head = h / a.group;
  Row x, sum, y;
  x.load(q + (int64_t(b) * a.T + t) * a.ld + h * a.D, a.D);
  sum.zero();
  float top = -INFINITY, total = 0;
  for_keys(a, b * a.HKV + head, t, [&](int64_t j) {
    const int64_t at = (int64_t(b) * a.T + j) * a.ld + head * a.D;
    y.load(k + at, a.D);
    const float s = x.dot(y) * a.scale, m = fmaxf(top, s), factor = expf(top - m), p = expf(s - m);
    y.load(v + at, a.D);
    for (float& z : sum.x) z *= factor;
    sum.add(p, y);
    total = total * factor + p, top = m;
  });
  sum.store(o + row * a.D, total > 0 ? 1 / total : 0.f, a.D);
  if (threadIdx.x % 32 == 0) lse[(int64_t(b) * a.H + h) * a.T + t] = total > 0 ? top + logf(total) : -INFINITY;
}

__global__ void __launch_bounds__(256)
    backward_q(float* dq, const float* dq_compressed, const float* d_o, const float* q, const float* k, const float* v,
               const float2* stats, Problem a) {
  begin_kernel();
  const int64_t row = int64_t(blockIdx.x) * 8 + threadIdx.x / 32;
  if (row >= int64_t(a.B) * a.T * a.H) return;
  const int h = int(row % a.H), t = int(row / a.H % a.T), b = int(row / a.H / a.T), head = h / a.group;
  const int64_t at_q = (int64_t(b) * a.T + t) * a.ld + h * a.D;
  const float2 stat = stats[row];
  Row x, dx, sum, y, z;
  x.load(q + at_q, a.D), dx.load(d_o + row * a.D, a.D);
  sum.zero();
  for_keys(a, b * a.HKV + head, t, [&](int64_t j) {
    const int64_t at = (int64_t(b) * a.T + j) * a.ld + head * a.D;
    y.load(k + at, a.D), z.load(v + at, a.D);
    sum.add(exp2f(x.dot(y) * a.scale_log2 - stat.x) * (dx.dot(z) - stat.y) * a.scale, y);
  });
  y.load(dq + at_q, a.D);
  sum.add(1, y);
  if (dq_compressed) {
    y.load(dq_compressed + row * a.D, a.D);
    sum.add(1, y);
  }
  sum.store(dq + at_q, 1, a.D);
}

__global__ void __launch_bounds__(256) backward_kv(float* dk, float* dv, const float* d_o, const float* q,
                                                   const float* k, const float* v, const float2* stats, Problem a) {
  begin_kernel();
  const int64_t row = int64_t(blockIdx.x) * 8 + threadIdx.x / 32;  // of (B,T,HKV)
  if (row >= int64_t(a.B) * a.T * a.HKV) return;
  const int head = int(row % a.HKV), j = int(row / a.HKV % a.T), b = int(row / a.HKV / a.T), lane = threadIdx.x % 32;
  const int64_t at = (int64_t(b) * a.T + j) * a.ld + head * a.D;
  Row x, dx, y, z, key_sum, value_sum;
  y.load(k + at, a.D), z.load(v + at, a.D);
  key_sum.zero(), value_sum.zero();
  for (int t0 = j; t0 < a.T; t0 += 32) {
    bool selected = false;
    const int32_t* chosen = a.indices + (int64_t(b * a.HKV + head) * a.T + t0 + lane) * a.n;
    for (int r = 0; t0 + lane < a.T && r < a.n; ++r) selected = selected || chosen[r] == j / a.block;
    for (unsigned left = __ballot_sync(~0u, selected); left; left &= left - 1) {
      const int64_t t = int64_t(b) * a.T + t0 + __ffs(left) - 1;
      for (int h = head * a.group; h < (head + 1) * a.group; ++h) {
        x.load(q + t * a.ld + h * a.D, a.D), dx.load(d_o + (t * a.H + h) * a.D, a.D);
        const float2 stat = stats[t * a.H + h];
        const float p = exp2f(x.dot(y) * a.scale_log2 - stat.x);
        value_sum.add(p, dx);
        key_sum.add(p * (dx.dot(z) - stat.y), x);
      }
    }
  }
  key_sum.store(dk + at, a.scale, a.D);
  value_sum.store(dv + at, 1, a.D);
}

}  // namespace attention::selected::simple
