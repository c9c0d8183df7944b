// What a model is before it runs: its sizes, its parameters and the units that they make, its FLOPs, and the order in
// which its modules take turns. Nothing here knows a stream.
//
//   simple  LayerNorm with bias, sin/cos positions added to the embedding (Vaswani et al. 2017), tanh-GELU MLP with
//           biases
//   rope    RMSNorm, rotary positions (Su et al. 2021), tanh-GELU MLP, no biases
//   llama   rope with SwiGLU (Shazeer 2020) for the MLP
//   mlp     embedding, depth x (x + W2 gelu(W1 x)), LayerNorm, head: no attention
// All have pre-norm residual blocks, causal attention with grouped heads (GQA: Ainslie et al. 2023) without biases, a
// final norm and a head, which may be tied to the embedding.
//
// Parameters are one table, made by parameter_table: names, shapes, initial weights, units. Modules are the embedding,
// a block's attention and its MLP, and the head with the final norm; a unit is a run of them, as ModelConfig::wrap
// says.
//
//   ModelConfig c;
//   c.arch = Arch::rope, c.dim = 768, c.depth = 12, c.heads = 12, c.kv_heads = 2, c.hidden = 3072;
//   c.vocab = 256, c.seq = 2048;
//   parameter_count(c);                                    // 73,550,592
//   training_turns(c, make_table(c).unit_of);              // embedding, block 0's attention, ..., and back again
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "fsdp.h"
#include "nsa_attention.h"

enum class Arch { simple, rope, llama, mlp };

// What a block's backward recomputes instead of keeping it (activation checkpointing), norms and all; the indices of
// selected blocks are always kept, and some of the last block's hidden layer where that takes no memory.
enum class Recompute {
  none,
  mlp,    // the MLP's hidden layer
  attn,   // q, k, v and attention
  both,   // a block keeps its input and the input of its MLP
  block,  // its input alone
};

// What makes NSA's gates, before their sigmoid, of n, the block's normed input.
enum class NsaGate {
  linear,  // W n + b
  mlp,     // W2 silu(W1 n + b1) + b2: see ModelConfig::gate_hidden
};

// What makes a unit.
enum class Wrap {
  block,     // the embedding; each block; the head
  sublayer,  // each module
  size,      // a module of wrap_min_params or more; smaller neighbours together, until they have as many
  single,    // everything
};
// When the backward pass gathers the next unit: before a unit's gradient is computed, after that, or on demand.
enum class BackwardPrefetch { pre, post, none };

struct ModelConfig {
  Arch arch = Arch::rope;
  int64_t dim = 0, depth = 0, heads = 0, kv_heads = 0, hidden = 0, vocab = 0, seq = 0;
  int64_t own_head_dim = 0, own_v_head_dim = 0;  // 0: dim / heads; as keys
  Rope rope = {};
  double norm_eps = 1e-5;
  bool sparse = false;  // Native Sparse Attention; false: dense causal attention
  NsaGate nsa_gate = NsaGate::linear;
  NsaShape nsa = {};  // its sizes: block, stride, select_block, selected, window, phi; the rest follows from the model
  Recompute recompute = Recompute::none;
  bool keep_attention = false;  // with attn, both, block: only q, k and v are recomputed
  bool keep_cheap = false;      // with none: norms' and activations' outputs are kept, too, and not recomputed
  bool fp8 = false;             // blocks' products with q, k, v, o and the MLP's weights multiply in fp8
  fp8::Scaling fp8_scaling = fp8::Scaling::tensor;  // of those products
  bool gather_fp8 = false;                          // those weights are gathered in fp8 too
  bool save_fp8 = false;                            // the MLP's hidden layer, where it is kept, is kept in fp8
  bool diagnostics = false;                         // count what every block's gates and selection do; and NsaKernels
  int64_t logits_bytes = int64_t(256) << 20;        // of logits that exist at one time; see Pieces
  int64_t hidden_bytes = int64_t(512) << 20;        // of the MLP's hidden layer; see Pieces
  Wrap wrap = Wrap::block;
  int64_t wrap_min_params = 0, bucket_params = 0;  // bucket_params: small neighbours are not merged beyond; 0: no limit
  int64_t replicate_below = 0;                     // parameters of fewer elements are not sharded
  bool tied = false;                               // the head multiplies by the embedding
  std::vector<std::string> frozen = {};            // these are not trained; see is_among
  int forward_prefetch = 1;                        // units gathered ahead
  BackwardPrefetch backward_prefetch = BackwardPrefetch::pre;
  int64_t head_dim() const { return own_head_dim ? own_head_dim : dim / heads; }  // of queries and keys
  int64_t v_head_dim() const { return own_v_head_dim ? own_v_head_dim : head_dim(); }
  bool attends() const { return arch != Arch::mlp; }
  // What the forward pass leaves for the backward: q, k, v; attention's output; the MLP's input; its hidden layer.
  bool keeps_queries() const { return recompute == Recompute::none || recompute == Recompute::mlp; }
  bool keeps_attention() const { return keeps_queries() || keep_attention; }
  bool keeps_middle() const { return recompute != Recompute::block; }
  bool keeps_mlp() const { return recompute == Recompute::none || recompute == Recompute::attn; }
  // In fp8 the activation's output exists in 8 bits alone.
  bool keeps_activated() const { return keep_cheap && !fp8 && !save_fp8; }
  // Heads of keys, and of values, in a row of projections: one set, or one for each branch.
  int64_t key_heads() const { return sparse ? 3 * kv_heads : kv_heads; }
  int64_t gates() const { return sparse ? (3 * heads + 7) / 8 * 8 : 0; }  // with padding, so that rows are aligned
  // The width of the gates' MLP. The paper gives none; half a head dim for each KV head is what gates from d_k numbers
  // through d_k/2 have, a KV head at a time. W1 n comes with q, k and v, in columns that the gates then take: no fewer.
  int64_t gate_hidden() const {
    return sparse && nsa_gate == NsaGate::mlp ? std::max(gates(), (kv_heads * head_dim() / 2 + 7) / 8 * 8) : 0;
  }
  int64_t hidden_row() const { return arch == Arch::llama ? 2 * hidden : hidden; }  // of the MLP's hidden layer
  int64_t queries_and_keys() const { return (heads + key_heads()) * head_dim(); }   // columns; values follow them
  int64_t row() const { return queries_and_keys() + key_heads() * v_head_dim() + std::max(gates(), gate_hidden()); }
  NsaShape nsa_shape(int64_t batch) const;
  // Modules in the order of the forward pass: 0 is the embedding, the last the head.
  int modules() const { return int(depth) * (attends() ? 2 : 1) + 2; }
  int head_module() const { return modules() - 1; }
  int attention_module(int64_t block) const { return 1 + 2 * int(block); }
  int mlp_module(int64_t block) const { return attends() ? 2 + 2 * int(block) : 1 + int(block); }
  // -1 for the embedding and the head.
  int block_of(int module) const {
    return module == 0 || module == head_module() ? -1 : attends() ? (module - 1) / 2 : module - 1;
  }
  int first_module(int block) const { return attends() ? attention_module(block) : mlp_module(block); }
};

// Is a parameter one of those that `some` names, itself or the module that it is in? block.1 is of block.1.mlp.up, and
// of no block.10.
bool is_among(const std::string& parameter, const std::string& some);

// Units in the order of the forward pass, and at the end that of the replicated parameters, if there are any.
std::vector<Unit> parameter_table(const ModelConfig& c);
// The same, and the unit of each module; -1: all its parameters are replicated.
struct ParameterTable {
  std::vector<Unit> units;
  std::vector<int> unit_of;
};
ParameterTable make_table(const ModelConfig& c);
// Compression's own weights multiply once for each compressed key, not once for each token.
bool of_phi(const Param& p);
int64_t parameter_count(const ModelConfig& c);
// Forward and backward, of a token: 6 for each weight that multiplies (all matrices but the embedding), and 6 L H times
// both head dims for each key that a query sees, 12 L d if H heads of one dim make d: on average T/2 in dense causal
// attention, hence 6 L d T; in sparse attention those of the three branches. Recomputation is not counted (PaLM:
// Chowdhery et al. 2022, appendix B), nor is what the backward pass leaves out because weights are frozen.
double flops_per_token(const ModelConfig& c);

// The module that the backward pass ends with, the first of a block: nothing before it is trained.
int last_of_backward(const ModelConfig& c);

// Rows of a micro-batch that go through a module at one time, so that what it makes takes the bytes that ModelConfig
// allows, or what rounding rows up to whole tiles of 128 adds.
struct Pieces {
  int64_t logits;          // rows whose logits exist at one time
  int64_t hidden;          // whose hidden layers do, in the backward
  int64_t hidden_forward;  // and, where they are not kept, in the forward, which has two tensors of that size
};
Pieces pieces_of(const ModelConfig& c, int64_t batch, int64_t element_bytes);

// A micro-batch as ints, in the layout that both the host's and the device's copies have.
struct MicroBatch {
  int32_t* tokens;   // (M)
  int32_t* targets;  // (M); -1: padding, which has no loss and no gradient
  int32_t* index;    // where each token stands, for the embedding's gradient; see ops::build_token_index
};
MicroBatch micro_batch_at(int32_t* p, int64_t M);
int64_t batch_ints(const ModelConfig& c, int64_t batch);  // in all
// Fills in the index, behind tokens and targets.
void index_batch(const ModelConfig& c, int64_t batch, int32_t* host);

// A module's turn at computing. Modules take turns in the same order in every micro-batch, so the order is listed once,
// and what is gathered, released and reduced follows from the list: a unit is gathered before the first of its turns in
// a row and released behind the last; a prefetch is the next turn that begins with another unit, forward or backward.
struct Turn {
  enum Kind {
    forward,
    recompute,  // makes again what the forward pass did not keep
    gradient,   // backward; the head's turn is its forward and its backward
  } kind;
  int module;
  int uses = -1;    // the unit whose weights it reads; -1: it reads none, or replicated ones alone
  int writes = -1;  // the unit whose gradient it adds to; -1: none, or the replicated one alone
  bool begins_use = false, ends_use = false;            // of the turns in a row that use this unit
  bool begins_gradient = false, ends_gradient = false;  // of the turns in a row that write its gradient
  bool reshards = false;                                // where its use ends, the unit is not needed soon
  size_t next_use = 0;                                  // the next turn that begins a use; past the last: none
};
// In order. unit_of: as of make_table.
std::vector<Turn> training_turns(const ModelConfig& c, const std::vector<int>& unit_of);
std::vector<Turn> evaluation_turns(const ModelConfig& c, const std::vector<int>& unit_of);
