// The stages of NSA (nsa_attention.h), each a function on a stream with a twin in cpu/nsa.h (same name, same arguments
// without the stream). Each returns the kernel that it launched. x (B*T, ld) is the fused buffer that NsaShape
// describes; "columns of x" are passed as the address of the first.
#pragma once

#include <functional>

#include "nsa_attention.h"

// ---- choosing (attention/topk.cu): scores of selection blocks (eq. 8 to 10) and each query's best n (eq. 11).
// indices (B,HKV,T,n): ascending, min(n, t/select_block + 1) of them, then -1. p = exp(scale q.k - lse) over the
// compressed keys that query t sees, in fp32; a block's score is the sum over i of p[i] * (tokens that compressed key i
// shares with the block) / stride, summed over the group's heads in their order. q: columns of x (B*T, ld); k:
// compressed keys (B*compressed(), HKV D); lse (B,H,T): the compressed branch's. scratch: nsa_topk_scratch(a) numbers.
template <class T>
int64_t nsa_topk_scratch(const NsaShape& a);
template <class T>
Kernel nsa_topk(Stream& s, int32_t* indices, const T* q, const T* k, const acc_t<T>* lse, acc_t<T>* scratch,
                const NsaShape& a);

// ---- attending (attention/selected.cu): softmax over the keys j <= t of the selected blocks (eq. 12).
// o (B*T, H DV) and lse (B,H,T) from q, k, v, columns of x (B*T, ld), and indices (B,HKV,T,n). scratch: bytes, as the
// GPU's kernels need them.
template <class T>
int64_t nsa_selected_forward_scratch(const Device& dev, const NsaShape& a);
template <class T>
Kernel nsa_selected_forward(Stream& s, T* o, acc_t<T>* lse, const T* q, const T* k, const T* v, const int32_t* indices,
                            char* scratch, const NsaShape& a);
// d_o (B*T, H DV): gradient of sigmoid(gate) * o. dk, dv: columns of dx (B*T, ld), written, zero where no query
// selected the key. dq, columns of dx too, comes with the window's gradient and leaves as the sum of it, of
// dq_compressed (B*T, H D; may be null) and of this branch's. before_dq, if there is one, is called before the first
// kernel is launched that reads dq or dq_compressed: they may come from another stream.
// In masked tiles (nsa_selected_in_tiles) it may find more begun: the statistics, as attention_backward does, and the
// words of bits, nsa_selected_words bytes, that are all the forward has in its scratch. 0: it makes its own. rotary:
// where nsa_selected_turns(), dq as the sum that it is and dk leave without the rotary positions of this table.
bool nsa_selected_in_tiles(const Device& dev, const NsaShape& a, Dtype dtype);
int64_t nsa_selected_words(const Device& dev, const NsaShape& a, Dtype dtype);
bool nsa_selected_turns(const Device& dev, const NsaShape& a, Dtype dtype);
template <class A>
struct Begun {
  std::function<void()> before_dq;
  const A* stats = nullptr;
  const char* words = nullptr;
  const A* rotary = nullptr;
};
template <class T>
int64_t nsa_selected_backward_scratch(const Device& dev, const NsaShape& a, StatsAt stats = StatsAt::workspace);
template <class T>
Kernel nsa_selected_backward(Stream& s, T* dq, T* dk, T* dv, const T* dq_compressed, const T* d_o, const T* q,
                             const T* k, const T* v, const T* o, const acc_t<T>* lse, const int32_t* indices,
                             char* scratch, const NsaShape& a, Gate<T> gate, const Begun<acc_t<T>>& begun = {});

// ---- compressing (attention/compress.cu)
// Phi::mean: compressed keys k, dk (B*compressed(), HKV D) and values v, dv (B*compressed(), HKV DV), of the columns of
// the compressed branch in x and dx (B*T, ld). Every row of dx is written.
template <class T>
Kernel nsa_mean(Stream& s, T* k, T* v, const T* x, const NsaShape& a);
template <class T>
Kernel nsa_mean_backward(Stream& s, T* dx, const T* dk, const T* dv, const NsaShape& a);
// What follows is of keys, or of values with DV for D.
// Phi::linear and mlp: blocks (HKV, B*compressed(), block*D) = the blocks' rows of x + position (HKV, block, D). What
// follows is ops::matmul's, a head at a time; nsa_heads_last makes (rows, heads D) of (heads, rows, D), and
// nsa_heads_first the reverse.
template <class T>
Kernel nsa_blocks(Stream& s, T* blocks, const T* x, const T* position, const NsaShape& a);
// dx, columns of (B*T, ld): a token's sum over the blocks that hold it; dposition (HKV, block, D): the sum over all
// blocks. dblocks is shaped as blocks. partials: nsa_blocks_partials(a) numbers.
int64_t nsa_blocks_partials(const NsaShape& a);
template <class T, class G>
Kernel nsa_blocks_backward(Stream& s, T* dx, G* dposition, const T* dblocks, acc_t<T>* partials, const NsaShape& a);
template <class T>
Kernel nsa_heads_last(Stream& s, T* out, const T* x, int64_t heads, int64_t rows, int64_t D);
template <class T>
Kernel nsa_heads_first(Stream& s, T* out, const T* x, int64_t heads, int64_t rows, int64_t D);
