// Native Sparse Attention (NSA: Yuan et al. 2025, arXiv 2502.11089).
//
// o = sum over branches of sigmoid(gate) * attention (eq. 5), with keys and values of its own for each branch:
//   compressed  blocks of `block` tokens, one every `stride`, each made into one key and value by phi (eq. 7)
//   selected    the keys of the n (`selected`) blocks of select_block tokens that score best (top-k) (eq. 8 to 12)
//   window      the last `window` keys
// The paper leaves open, and we choose: keys are rotated (RoPE) before they are compressed; a query's window holds
// `window` keys with its own; block 0, the query's own block and the one before are always selected, without
// duplicates, and equal scores go to the lowest index. Scores choose blocks and get no gradient: compressed keys learn
// from the compressed branch's output alone.
//
//   NsaShape a = {B, T, H, HKV, D, ld, 1 / std::sqrt(double(D))};  // ld >= a.columns(): the fused projection's width
//   NsaSaved<bf16> saved;
//   nsa_forward<bf16>(dev, o, &saved, x, phi, a, Purpose::activations);            // x (B*T, ld) -> o (B*T, H DV)
//   nsa_backward<bf16, bf16>(dev, dx, dphi, d_o, x, phi, std::move(saved), a);     // d_o (B*T, H DV) -> dx (B*T, ld)
//
// The branches' attention is attention/dense.h's and attention/selected.cu's; attention/stages.h lists every stage.
#pragma once

#include <functional>

#include "attention/dense.h"

enum class Phi {
  mean,    // of a block's keys (or values)
  linear,  // (block's keys + positions) flattened, times a matrix, a KV head at a time
  mlp,     // the same through a hidden layer of 2 D and tanh-GELU
};

// A row (b, t) of the fused buffer x (B*T, ld), and of its gradient, is: q (H D), keys of the three branches (HKV D
// each: compressed, selected, window), their values (HKV DV each), gates before the sigmoid (H each), padding up to ld.
// DV is D unless values are narrower than keys, as the paper's are (192 and 128); head dims as in attention/dense.h.
struct NsaShape {
  int64_t B, T, H, HKV, D;                   // sequences, tokens, query heads, KV heads, head dim
  int64_t ld;                                // numbers in a row
  double scale;                              // of scores: 1/sqrt(D) unless the caller says otherwise
  int64_t block = 32, stride = 16;           // l, d: tokens of a compressed key, and from one to the next
  int64_t select_block = 64, selected = 16;  // l', n: tokens of a selection block, and how many a query selects
  int64_t window = 512;                      // w
  Phi phi = Phi::mean;
  int64_t DV = 0;  // head dim of values and of o; 0: D

  int64_t v_dim() const { return DV ? DV : D; }
  int64_t compressed() const { return compressed_keys(T, block, stride); }                    // keys, of a sequence
  int64_t compressed_seen(int64_t t) const { return compressed_keys(t + 1, block, stride); }  // by query t
  int64_t select_blocks() const { return (T + select_block - 1) / select_block; }
  int64_t k(int branch) const { return (H + branch * HKV) * D; }  // columns
  int64_t v(int branch) const { return (H + 3 * HKV) * D + branch * HKV * v_dim(); }
  HD int64_t gate(int branch) const { return (H + 3 * HKV) * D + 3 * HKV * (DV ? DV : D) + branch * H; }
  int64_t columns() const { return gate(3); }
  // phi's shape for values, which are as wide as its keys are.
  NsaShape of_values() const {
    NsaShape a = *this;
    a.D = v_dim(), a.DV = 0;
    return a;
  }
};
constexpr NsaShape nsa_defaults{};  // of block, stride, select_block, selected, window and phi: those of the paper
// Throws UsageError: a combination that the equations forbid (block and select_block are multiples of stride,
// select_block >= block, 3 <= selected), by name.
void check_nsa(const NsaShape& a);

// phi's parameters for keys and values; all null with Phi::mean. Shapes, of values with DV for D: position
// (HKV, block, D); w1 linear (HKV, D, block D), mlp (HKV, 2 D, block D); w2 mlp (HKV, D, 2 D).
template <class T>
struct PhiWeights {
  T *position_k = nullptr, *w1_k = nullptr, *w2_k = nullptr, *position_v = nullptr, *w1_v = nullptr, *w2_v = nullptr;
};

struct NsaKernels;  // which kernels ran: below

// What the forward leaves for the backward.
template <class T>
struct NsaSaved {
  Buffer<T> k, v;                                             // compressed: (B*compressed(), HKV D and HKV DV)
  Buffer<T> o_compressed, o_selected, o_window;               // (B*T, H DV)
  Buffer<acc_t<T>> lse_compressed, lse_selected, lse_window;  // (B, H, T)
  Buffer<int32_t> indices;  // (B, HKV, T, n): selected blocks; in masked tiles, words of bits behind them that say so
};
// o (B*T, H DV) from x (B*T, ld). saved null: nothing is kept. A recomputed forward passes a `saved` that has the first
// one's indices, which are then used and not chosen again. life: how long the plan keeps what is saved. ran: counts the
// kernels launched; may be null. amax: as attention_forward's. of_gates, if there is one, is called with a stream that
// has room for what makes the gates, x's last columns: they are read last.
template <class T>
void nsa_forward(Device& dev, T* o, NsaSaved<T>* saved, const T* x, PhiWeights<const T> phi, const NsaShape& a,
                 Purpose life, NsaKernels* ran = nullptr, float* amax = nullptr,
                 const std::function<void(Stream&)>& of_gates = {});
// What the branches' backwards begin with. Where they begin alike, they do it together, with one look at d_o, and may
// leave the gated sum (B*T, H DV) as the forward does, for a backward that has not kept it: in o, if that is not null,
// in the place of the selected branch's output. The gates' columns of dx are written, and the branches' outputs given
// back, which nothing needs any more. What follows is for who has memory: the selected branch's dK and dV do not wait
// for the window's dQ, and the workspaces of both live at one time. Where they do not begin alike, or this is not
// called, nsa_backward sees to it all, one branch's workspace after another.
template <class T>
struct NsaBegun {
  bool has = false;
  Buffer<acc_t<T>> stats[3];
};
template <class T>
bool nsa_begins_at_once(const Device& dev, const NsaShape& a);
template <class T>
NsaBegun<T> nsa_begin_backward(Device& dev, Buffer<T>* o, T* dx, const T* d_o, const T* x, NsaSaved<T>* saved,
                               const NsaShape& a);
// Can the backward undo the rotary positions of q and of the selected branch's keys on the way?
template <class T>
bool nsa_backward_turns(const Device& dev, const NsaShape& a);
// dx (B*T, ld) from d_o (B*T, H DV): all columns are written, the padding with zeros. dphi: gradients of phi's
// parameters, written. rotary: where nsa_backward_turns(), the table of positions that are undone. of_gates, if there
// is one, is called with the stream on which the gates' gradients have come, and gives it what goes on with them; the
// compute stream waits for that.
template <class T, class G>
void nsa_backward(Device& dev, T* dx, PhiWeights<G> dphi, const T* d_o, const T* x, PhiWeights<const T> phi,
                  NsaSaved<T> saved, const NsaShape& a, NsaKernels* ran = nullptr, NsaBegun<T> begun = {},
                  const std::function<void(Stream&)>& of_gates = {}, const acc_t<T>* rotary = nullptr);
// The last stage of the forward by itself, for a backward that recomputes o: o (B*T, H DV) = sum over branches of
// sigmoid(gate) * branch, each (B*T, H DV), with the gates of x (B*T, ld); summed in fp32, rounded once. amax: as
// attention_forward's.
template <class T>
Kernel nsa_combine(Stream& s, T* o, const T* compressed, const T* selected, const T* window, const T* x,
                   const NsaShape& a, float* amax = nullptr);

// ------------------------------------------------------------------------------------------------------ diagnostics
// What a layer's gates and selection do, from x's gates and the indices (B, HKV, T, n); and which kernels ran.

// Of a layer over any number of queries: of several micro-batches and ranks, sums add up and the largest of the maxima
// counts. All zero: of no query. A branch's share is its gate over the sum of the three; the entropy is the shares', in
// nats: ln 3 where the gates are equal, 0 where one has all.
struct NsaSums {
  double gates = 0, entropy = 0, largest_share = 0, share[3] = {0, 0, 0};  // over queries and heads; gates: how many
  double collapsed = 0;                   // of them with entropy below 0.1 and a share above 0.95
  double rows = 0, keys = 0, at_max = 0;  // over queries and KV heads; rows: how many; keys that the query sees in its
                                          // selected blocks; those rows that see as many as any can, min(n l', T)
};
struct NsaMaxima {
  double entropy_lack = 0, gate = 0, share = 0, keys = 0;  // entropy_lack: ln 3 less the entropy
};
// Of several, in an array, as of a model's layers: all together.
NsaSums total(const NsaSums* sums, int64_t n);
NsaMaxima total(const NsaMaxima* maxima, int64_t n);
int64_t nsa_stats_partials();  // doubles, of a layer
template <class T>
struct NsaCounted {
  double* partials;        // nsa_stats_partials() of them, which begin at zero
  const T* x;              // (B, T, ld): the gates' columns are read
  const int32_t* indices;  // (B, HKV, T, n)
};
// Adds the queries to their layers' partial sums, in one launch for many layers. Those with a target (B, T) below 0 are
// padding and are left out.
template <class T>
void nsa_stats(Stream& s, const std::vector<NsaCounted<T>>& layers, const int32_t* targets, const NsaShape& a);
// sums and maxima (layers) from partials (layers, nsa_stats_partials()).
void nsa_stats_total(Stream& s, NsaSums* sums, NsaMaxima* maxima, const double* partials, int64_t layers);

// The same for people and programs; all zero of no query.
struct NsaStats {
  double entropy_mean, entropy_min;
  double gate_max, share_max, share_max_mean;  // the last: of the largest share of each query and head
  double share[3];                             // means: compressed, selected, window
  double collapsed;                            // a part, as at_max
  double keys_mean, keys_max, rows, at_max;
};
NsaStats summary(const NsaSums& sums, const NsaMaxima& maxima);

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

// What a general kernel is general in: a stage, forward and backward, and the variant that stands in for special ones.
constexpr int nsa_fallbacks = 5;
extern const char* const nsa_fallback_names[nsa_fallbacks];  // "selection_any_heads": stage_variant
int nsa_fallback(Stage s, const Kernel& k);                  // an index there; -1: k has no name of its own

// Of a layer's calls: each stage's latest kernel, and how many calls there were, those of a fallback among them. Phi's
// products are cuBLASLt's and not counted.
struct NsaKernels {
  Kernel latest[nsa_stages];
  int64_t calls = 0, general = 0;
  int64_t fallbacks[nsa_fallbacks] = {};  // the general ones by name
  void add(Stage s, const Kernel& k) {
    if (!k.code) return;  // planning
    latest[int(s)] = k, ++calls, general += k.general;
    if (const int f = k.general ? nsa_fallback(s, k) : -1; f >= 0) ++fallbacks[f];
  }
};
