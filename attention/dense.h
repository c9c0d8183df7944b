// Dense attention: exact softmax attention in one pass over tiles (FlashAttention-2: Dao 2023, arXiv 2307.08691, Alg. 1
// and 2), causal, in a sliding window, or to compressed keys: NSA's baseline, and two of its three branches.
//
//   AttentionShape a = {B, T, H, HKV, D, ld, ld, H * D, ld, ld, 1 / std::sqrt(double(D))};  // causal; q, k, v: columns
//   attention_forward<bf16>(stream, o, lse, x, x + H * D, x + (H + HKV) * D, a);            // of rows x (B*T, ld)
//   attention_backward<bf16>(stream, dx, dx + H * D, dx + (H + HKV) * D, d_o, x, x + H * D, x + (H + HKV) * D, o, lse,
//                            workspace, a);  // attention_backward_workspace<bf16>(a) numbers
//
// Shapes: q (B,T,H,D), o (B,T,H,DV), k (B,keys,HKV,D), v (B,keys,HKV,DV), lse (B,H,T). DV is D unless values are
// narrower than keys, as the NSA paper's are (192 and 128). H is a multiple of HKV; query head h reads KV head h /
// (H/HKV). Element (b,t,h,d) of a tensor lies at p[(b*T + t) * ld + h*D + d], of v and o with DV for D. lse: natural
// logarithm of the softmax's denominator; -inf where a query sees no key, and o is zero there. Backwards write every
// gradient without atomics: each sum has one order, so two runs agree bit for bit.
//
// bf16 on a GPU: D 64 or 128, or D 192 with DV 128 where a block has more than 99 KiB of shared memory (wgmma on
// sm_90a, mma.sync on sm_80 and newer); float on a GPU: any D <= 128 that 8 divides, three TF32 products for each;
// both: addresses (but lse's) and row strides are multiples of 16 bytes. CPU: any D and DV, float, bf16 and double.
// Anything else throws Error.
#pragma once

#include <string>
#include <vector>

#include "lib/device/device.h"

// Which keys j query t sees. Both count from 0.
enum class Sees {
  causal,      // j <= t
  window,      // t - window < j <= t: `window` keys, the query's own among them
  compressed,  // key j stands for tokens [stride*j, stride*j + block): the last of them must not lie after t
};

// How many compressed keys end within the first `tokens` tokens of a sequence: of T tokens there are
// compressed_keys(T, ...), and query t sees compressed_keys(t + 1, ...) of them.
template <class I>
HD constexpr I compressed_keys(I tokens, I block, I stride) {
  return tokens < block ? 0 : (tokens - block) / stride + 1;
}

struct AttentionShape {
  int64_t B, T, H, HKV, D;    // sequences, queries of each, query heads, KV heads, head dim
  int64_t ld_q, ld_kv, ld_o;  // row strides in numbers: q; k and, without an own one, v; o and do
  int64_t ld_dq, ld_dkv;      // dq; dk and, without an own one, dv
  double scale;               // positive; 1/sqrt(D) unless the caller says otherwise
  Sees sees = Sees::causal;
  int64_t keys = 0;  // rows of k and v in a sequence; 0: T. Only with Sees::compressed another number
  int64_t window = 0, block = 0, stride = 0;
  int64_t DV = 0;               // head dim of v and o; 0: D
  int64_t ld_v = 0, ld_dv = 0;  // row strides of v and dv; 0: ld_kv and ld_dkv

  int64_t v_dim() const { return DV ? DV : D; }
};

// Whether a GPU has kernels for these head dims of keys and values, dense and NSA's.
constexpr bool has_gpu_kernels(Dtype t, int64_t D, int64_t DV) {
  if (t != Dtype::bf16) return D == DV && D <= 128 && D % 8 == 0;
  return (D == DV && (D == 64 || D == 128)) || (D == 192 && DV == 128);
}

enum class AttentionPass { forward, backward };

// Which kernel a call launched, for logs and tests.
struct Kernel {
  const char* code = nullptr;  // sm90, sm80, cuda or fp32 (any GPU; fp32: of float), plain loops; null: none ran
  const char* variant = "";
  bool general = false;  // the fallback for any shape, where other shapes have a specialised kernel
};
constexpr Kernel plain_loops = {"plain loops"};
std::string name_of(const Kernel& k);

// o (B,T,H,DV) and lse (B,H,T) from q (B,T,H,D), k (B,keys,HKV,D) and v (B,keys,HKV,DV). amax (B,H,T), of each query
// and head the largest |o|, of a NaN infinity: for a cast to fp8; null: not wanted. A GPU has it in bf16 alone.
template <class T>
Kernel attention_forward(Stream& s, T* o, acc_t<T>* lse, const T* q, const T* k, const T* v, const AttentionShape& a,
                         float* amax = nullptr);

// A gate on attention's output: y = sigmoid(gate) * o, and the backward gets dy in place of do. gate and dgate (B,T,H)
// lie at p[(b*T + t) * ld + h]. Null pointers: no gate.
template <class T>
struct Gate {
  const T* gate = nullptr;
  T* dgate = nullptr;  // written
  int64_t ld = 0;
};

// A GPU's backward begins with statistics of each query and head, after which it needs o and lse no more: lse in units
// of log2, with the gate's logarithm off it, and behind them rowsum(do * o), each (B,H,T) in rows rounded up to 128.
// Several attentions of the same queries can begin at once, which reads do once (attention_begin_backward).
enum class StatsAt { workspace, elsewhere };
template <class T>
struct BackwardStart {
  const T* o = nullptr;
  const acc_t<T>* lse = nullptr;
  Gate<T> gate = {};          // its gradient is written
  acc_t<T>* stats = nullptr;  // attention_stats() numbers
};
constexpr int most_starts = 3;
int64_t attention_stats(int64_t B, int64_t T, int64_t H);
// d_o, the o's and gated_sum, which becomes the sum of the gated o's (null: not wanted; one of the o's may make room
// for it): (B,T,H,DV), in rows of a.ld_o. Two starts or three; on a GPU and in bf16 alone.
template <class T>
void attention_begin_backward(Stream& s, const std::vector<BackwardStart<T>>& starts, const T* d_o,
                              const AttentionShape& a, T* gated_sum = nullptr);

// On Hopper, in bf16: a pair of kernels that do seven products, or, for causal and compressed keys, one that does five
// but waits at its start and takes memory for sums of dq. `suits`: whichever is faster.
enum class BackwardKernels { suits, pair, one };

// Numbers of acc_t<T> in the backward's workspace: lse and rowsum(do * o), each (B,H,T) in rows rounded up to 128,
// partial sums of dk and dv where few keys are seen by many queries, and one kernel's sums of dq.
template <class T>
int64_t attention_backward_workspace(const AttentionShape& a, BackwardKernels kernels = BackwardKernels::suits,
                                     StatsAt stats = StatsAt::workspace);

// Can the backward undo rotary positions on the way?
template <class T>
bool attention_backward_turns(const Device& dev, const AttentionShape& a);

// dq, dk, dv, shaped as q, k, v with row strides ld_dq, ld_dkv and ld_dv, are written, and dgate where there is a gate.
// d_o: the gradient of o, or of sigmoid(gate) * o. o: where its rows are as dq's, it may be dq itself. stats: of
// attention_begin_backward, which has read o and lse and seen to the gate. rotary: where attention_backward_turns(),
// the table of ops::rope_table by which q and k were turned: dq and dk leave turned back, rounded once.
template <class T>
Kernel attention_backward(Stream& s, T* dq, T* dk, T* dv, const T* d_o, const T* q, const T* k, const T* v, const T* o,
                          const acc_t<T>* lse, acc_t<T>* workspace, const AttentionShape& a, Gate<T> gate = {},
                          const acc_t<T>* stats = nullptr, const acc_t<T>* rotary = nullptr);

#if FSDP_CUDA
// The kernels behind these on a bare CUDA stream, for tests and timings: the same arguments and shapes. arch: compute
// capability (90, 80, ...) whose kernels are to run; an H200 runs both 90's and 80's. T: float or bf16.
namespace gpu {
template <class T>
Kernel attention_forward(cudaStream_t stream, int arch, T* o, float* lse, const T* q, const T* k, const T* v,
                         const AttentionShape& a, float* amax = nullptr);
template <class T>
Kernel attention_backward(cudaStream_t stream, int arch, T* dq, T* dk, T* dv, const T* d_o, const T* q, const T* k,
                          const T* v, const T* o, const float* lse, float* workspace, const AttentionShape& a,
                          Gate<T> gate = {}, BackwardKernels kernels = BackwardKernels::suits,
                          const float* stats = nullptr, const float* rotary = nullptr);
}  // namespace gpu
#endif
