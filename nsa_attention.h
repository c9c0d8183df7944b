// Attention: Native Sparse Attention (NSA: Yuan et al. 2025, arXiv 2502.11089), and dense causal attention, its
// baseline.
//
// Dense attention, and two of NSA's three branches, are exact softmax in one pass over tiles (FlashAttention-2: Dao
// 2023, arXiv 2307.08691, Alg. 1 and 2) under different rules of which key a query sees; attention/ has the kernels.
// Backwards write every gradient without atomics: the sums have one order, so two runs agree bit for bit.
//
// Shapes: q (B,T,H,D), k and v (B,keys,HKV,D), o (B,T,H,D); H a multiple of HKV; query head h reads KV head h /
// (H/HKV). Element (b,t,h,d) of a tensor lies at p[(b*T + t) * ld + h*D + d]: q, k and v may be columns of one (B*T,
// ld) buffer. lse (B,H,T): log of the softmax's denominator, natural; -inf where a query sees no key, and o is zero
// there. bf16 on a GPU: D 64 or 128, tensor cores (wgmma on sm_90a, mma.sync on sm_80 and newer); float on a GPU: any D
// <= 128 that 8 divides, simple kernels; both: addresses (but lse's) and row strides multiples of 16 bytes. CPU: any D,
// float, bf16 and double. Anything else throws Error.
#pragma once

#include "lib/device/device.h"

// Which keys j query t sees. Both count from 0.
enum class Sees {
  causal,      // j <= t
  window,      // t - window < j <= t: `window` keys, the query's own among them
  compressed,  // key j stands for tokens [stride*j, stride*j + block): the last of them must not lie after t
};

struct AttentionShape {
  int64_t B, T, H, HKV, D;
  int64_t ld_q, ld_kv, ld_o;  // row strides in elements: q; k and v; o and do
  int64_t ld_dq, ld_dkv;      // of the gradients
  double scale;               // positive; 1/sqrt(D) unless the caller says otherwise
  Sees sees = Sees::causal;
  int64_t keys = 0;  // rows of k and v in a sequence; 0: T. Only with Sees::compressed another number
  int64_t window = 0, block = 0, stride = 0;
};

// Which kernel a call has launched, as the code that picks it says; for diagnostics. Nothing but constants: it costs
// nothing to be told.
struct Kernel {
  const char* code = nullptr;  // whose instructions: sm90, sm80, cuda (any GPU); fp32; plain loops; null: nothing ran
  const char* variant = "";
  bool general = false;  // one for any shape, in place of a special one that this code has for some
};
constexpr Kernel plain_loops = {"plain loops"};
std::string name_of(const Kernel& k);

template <class T>
Kernel attention_forward(Stream& s, T* o, acc_t<T>* lse, const T* q, const T* k, const T* v, const AttentionShape& a);

// acc_t numbers of workspace that the backward wants (rowsum(do * o) and whatever else the kernel needs).
template <class T>
int64_t attention_backward_workspace(const AttentionShape& a);

// A gate on a branch: sigmoid(gate) multiplies o in what do is the gradient of. gate and its gradient (B,T,H) lie at
// p[(b*T + t) * ld + h]. Null pointers: no gate.
template <class T>
struct Gate {
  const T* gate = nullptr;
  T* dgate = nullptr;  // written
  int64_t ld = 0;
};

// do is the gradient of (sigmoid(gate) times) o. dq, dk, dv are written.
template <class T>
Kernel attention_backward(Stream& s, T* dq, T* dk, T* dv, const T* d_o, const T* q, const T* k, const T* v, const T* o,
                          const acc_t<T>* lse, acc_t<T>* workspace, const AttentionShape& a, Gate<T> gate = {});

#if FSDP_CUDA
// The kernels behind these on a bare CUDA stream, for tests and timings. arch: compute capability (90, 80, ...) whose
// kernels are to run; an H200 runs both 90's and 80's. T: float or bf16.
namespace gpu {
template <class T>
Kernel attention_forward(cudaStream_t stream, int arch, T* o, float* lse, const T* q, const T* k, const T* v,
                         const AttentionShape& a);
template <class T>
Kernel attention_backward(cudaStream_t stream, int arch, T* dq, T* dk, T* dv, const T* d_o, const T* q, const T* k,
                          const T* v, const T* o, const float* lse, float* workspace, const AttentionShape& a,
                          Gate<T> gate = {});
}  // namespace gpu
#endif

// ------------------------------------------------------------------------------------------------------------- NSA
// o = sum over branches of sigmoid(gate) * attention: compressed (eq. 7), selected (eq. 8 to 12), sliding window;
// eq. 5. Each branch has keys and values of its own. The paper leaves open, and we choose: keys are rotated before they
// are compressed; a query's window holds `window` keys with its own; block 0, the query's own block and the one before
// are always selected, without duplicates, and equal scores go to the lowest index.

enum class Phi {
  mean,    // of a block's keys (values)
  linear,  // (block's keys + positions) flattened, times a matrix, a KV head at a time
  mlp,     // the same through a hidden layer of 2 D and tanh-GELU
};

// The columns of a row of the fused buffer, and of its gradient: q (H D), keys of the three branches (HKV D each:
// compressed, selected, window), their values likewise, gates (H for each branch, likewise), then padding up to ld.
struct NsaShape {
  int64_t B, T, H, HKV, D;
  int64_t ld;
  double scale;
  int64_t block = 32, stride = 16;           // l, d: tokens of a compressed key, and from one to the next
  int64_t select_block = 64, selected = 16;  // l', n: tokens of a selection block, and how many a query selects
  int64_t window = 512;                      // w
  Phi phi = Phi::mean;

  int64_t compressed() const { return T < block ? 0 : (T - block) / stride + 1; }  // keys, of a sequence
  int64_t select_blocks() const { return (T + select_block - 1) / select_block; }
  int64_t k(int branch) const { return (H + branch * HKV) * D; }  // columns
  int64_t v(int branch) const { return (H + (3 + branch) * HKV) * D; }
  HD int64_t gate(int branch) const { return (H + 6 * HKV) * D + branch * H; }
  int64_t columns() const { return (H + 6 * HKV) * D + 3 * H; }
};
// Throws UsageError: a combination that the equations forbid (block and select_block are multiples of stride,
// select_block >= block, 3 <= selected), by name.
void check_nsa(const NsaShape& a);

// ---- The stages, each a function on a stream with its twin in cpu/nsa.h (same name and arguments but the stream).

// phi's parameters for keys and values; all null with Phi::mean. Shapes for each KV head, one head after another:
// position (block, D); w1 linear (D, block D), mlp (2 D, block D); w2 mlp (D, 2 D).
template <class T>
struct PhiWeights {
  T *position_k = nullptr, *w1_k = nullptr, *w2_k = nullptr, *position_v = nullptr, *w1_v = nullptr, *w2_v = nullptr;
};

// Scores of selection blocks (eq. 8 to 10) and their top n: indices (B,HKV,T,n), ascending, min(n, t/select_block + 1)
// of them, then -1. p = exp(scale q.k - lse) over the compressed keys that query t sees, in fp32; a block's score is
// sum over i of p[i] * (tokens that compressed key i shares with the block) / stride, summed over the group's heads in
// their order. k: compressed keys (B*compressed(), HKV D). scratch: nsa_select_scratch(a) numbers.
template <class T>
int64_t nsa_select_scratch(const NsaShape& a);
template <class T>
Kernel nsa_select(Stream& s, int32_t* indices, const T* q, const T* k, const acc_t<T>* lse, acc_t<T>* scratch,
                  const NsaShape& a);

// Attention over the keys j <= t of the selected blocks. o (B*T, H D), lse (B,H,T). q, k, v: columns of rows of a.ld.
// scratch: bytes.
template <class T>
int64_t nsa_selected_forward_scratch(const NsaShape& a);
template <class T>
Kernel nsa_selected_forward(Stream& s, T* o, acc_t<T>* lse, const T* q, const T* k, const T* v, const int32_t* indices,
                            char* scratch, const NsaShape& a);
// d_o (B*T, H D): gradient of sigmoid(gate) * o. dk, dv: columns of rows of a.ld, written, zero where nobody selected.
// dq, a column too, holds the window's gradient and leaves as the sum of that, of dq_compressed (B*T, H D; may be null)
// and of this branch's.
template <class T>
int64_t nsa_selected_backward_scratch(const NsaShape& a);
template <class T>
Kernel nsa_selected_backward(Stream& s, T* dq, T* dk, T* dv, const T* dq_compressed, const T* d_o, const T* q,
                             const T* k, const T* v, const T* o, const acc_t<T>* lse, const int32_t* indices,
                             char* scratch, const NsaShape& a, Gate<T> gate);

// Compressed keys or values (B*compressed(), HKV D) of columns x (rows of a.ld): Phi::mean.
template <class T>
Kernel nsa_mean(Stream& s, T* out, const T* x, const NsaShape& a);
template <class T>
Kernel nsa_mean_backward(Stream& s, T* dx, const T* dout, const NsaShape& a);  // every row of dx is written
// Phi::linear and mlp. blocks (HKV, B*compressed(), block*D) = the block's rows of x + position; the products between
// are ops::matmul's, a head at a time; (HKV, rows, D) <-> (rows, HKV D) by nsa_heads_last and nsa_heads_first.
template <class T>
Kernel nsa_blocks(Stream& s, T* blocks, const T* x, const T* position, const NsaShape& a);
// dx: the sum over the blocks that hold a row; dposition (HKV, block, D): over all blocks. partials: numbers.
int64_t nsa_blocks_partials(const NsaShape& a);
template <class T, class G>
Kernel nsa_blocks_backward(Stream& s, T* dx, G* dposition, const T* dblocks, acc_t<T>* partials, const NsaShape& a);
template <class T>
Kernel nsa_heads_last(Stream& s, T* out, const T* x, int64_t heads, int64_t rows, int64_t D);
template <class T>
Kernel nsa_heads_first(Stream& s, T* out, const T* x, int64_t heads, int64_t rows, int64_t D);

// o (B*T, H D) = sum over branches of sigmoid(gate) * branch, each (B*T, H D); fp32 sum, rounded once.
template <class T>
Kernel nsa_combine(Stream& s, T* o, const T* compressed, const T* selected, const T* window, const T* x,
                   const NsaShape& a);

// ---- Diagnostics: what the gates and the selection of a layer do, from the gates' columns and the indices alone; and
// which kernels ran.
struct NsaStats {
  // Over all queries and heads. A branch's share is its gate over the sum of the three.
  float entropy_mean, entropy_min;  // of the shares, in nats: ln 3 where the gates are equal, 0 where one has all
  float gate_max;
  float share[3];   // means: compressed, selected, window
  float collapsed;  // part with entropy below 0.1 and a share above 0.95
  // Over all queries and KV heads: keys that the query sees in its selected blocks.
  float keys_mean, keys_max, rows, at_max;  // rows: how many; at_max: the part of them with keys_max keys
};
// partials: nsa_stats_partials(a) doubles.
int64_t nsa_stats_partials(const NsaShape& a);
template <class T>
void nsa_stats(Stream& s, NsaStats* out, const T* x, const int32_t* indices, double* partials, const NsaShape& a);

enum class Stage {
  compression,
  compressed,
  selection,
  selected,
  window,
  gates,
  window_backward,
  compressed_backward,
  selected_backward,
  compression_backward
};
constexpr int nsa_stages = 10;
const char* name_of(Stage s);

// Of a layer's calls: each stage's latest kernel, and how many there were, general ones among them. Phi's products are
// cuBLASLt's and not counted.
struct NsaKernels {
  Kernel latest[nsa_stages];
  int64_t calls = 0, general = 0;
  void add(Stage s, const Kernel& k) {
    if (!k.code) return;  // planning
    latest[int(s)] = k, ++calls, general += k.general;
  }
};

// ---- The whole, with its temporaries taken from the memory plan.

// What the forward leaves for the backward.
template <class T>
struct NsaSaved {
  Buffer<T> k, v;  // compressed
  Buffer<T> o_compressed, o_selected, o_window;
  Buffer<acc_t<T>> lse_compressed, lse_selected, lse_window;
  Buffer<int32_t> indices;
};
// o (B*T, H D) from the fused rows x. Indices that saved has already are taken, not chosen again; null: nothing is
// kept. ran: is told the kernels; may be null.
template <class T>
void nsa_forward(Device& dev, T* o, NsaSaved<T>* saved, const T* x, PhiWeights<const T> phi, const NsaShape& a,
                 Purpose life, NsaKernels* ran = nullptr);
// dx: the gradient of the fused rows, all columns() of them written. dphi: gradients of phi's parameters, written.
template <class T, class G>
void nsa_backward(Device& dev, T* dx, PhiWeights<G> dphi, const T* d_o, const T* x, PhiWeights<const T> phi,
                  NsaSaved<T> saved, const NsaShape& a, NsaKernels* ran = nullptr);
