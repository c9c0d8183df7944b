// Attention. Dense causal attention here is the baseline; Native Sparse Attention joins it on the same tile loop.
//
// Shapes: q (B,T,H,D), k and v (B,T,HKV,D), o (B,T,H,D); H a multiple of HKV; query head h reads KV head h / (H/HKV).
// Element (b,t,h,d) of a tensor lies at p[(b*T + t) * ld + h*D + d]: q, k and v may be columns of one (B*T, ld) buffer.
// o, its gradient and q's gradient have strides of their own. lse (B,H,T): log of the softmax's denominator, natural.
// Key j is visible to query t iff j <= t. scale is positive, 1/sqrt(D) unless the caller says otherwise.
//
// Exact softmax in one pass over tiles: FlashAttention-2 (Dao 2023, arXiv 2307.08691), Alg. 1 and 2. The backward
// writes dq, dk and dv without atomics: the sums have one order, so two runs agree bit for bit.
// bf16 on a GPU: D 64 or 128, tensor cores (wgmma on sm_90a, mma.sync on sm_80 and newer); float on a GPU: any D <= 128
// that 8 divides, simple kernels; both: addresses (but lse's) and row strides multiples of 16 bytes. CPU: any D, float,
// bf16 and double. Anything else throws Error.
#pragma once

#include "lib/device.h"

struct AttentionShape {
  int64_t B, T, H, HKV, D;
  int64_t ld_q, ld_kv, ld_o;  // row strides in elements: q; k and v; o and do
  int64_t ld_dq, ld_dkv;      // of the gradients
  double scale;
};

template <class T>
void attention_forward(Stream& s, T* o, acc_t<T>* lse, const T* q, const T* k, const T* v, const AttentionShape& a);

// acc_t numbers of workspace that the backward wants (rowsum(do * o) and whatever else the kernel needs).
template <class T>
int64_t attention_backward_workspace(const AttentionShape& a);

template <class T>
void attention_backward(Stream& s, T* dq, T* dk, T* dv, const T* d_o, const T* q, const T* k, const T* v, const T* o,
                        const acc_t<T>* lse, acc_t<T>* workspace, const AttentionShape& a);

#if FSDP_CUDA
// The kernels behind these on a bare CUDA stream, for tests and timings. arch: compute capability (90, 80, ...) whose
// kernels are to run; an H200 runs both 90's and 80's. T: float or bf16.
namespace gpu {
template <class T>
void attention_forward(cudaStream_t stream, int arch, T* o, float* lse, const T* q, const T* k, const T* v,
                       const AttentionShape& a);
template <class T>
void attention_backward(cudaStream_t stream, int arch, T* dq, T* dk, T* dv, const T* d_o, const T* q, const T* k,
                        const T* v, const T* o, const float* lse, float* workspace, const AttentionShape& a);
}  // namespace gpu
#endif
