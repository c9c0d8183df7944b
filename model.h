// The models: a transformer in three dialects, and an MLP. Forward, loss and backward of one micro-batch, with every
// gather, use, release and reduce in the open.
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
// says. Activations are (M, .) with M = batch * seq rows. T: dtype of parameters and activations; G: of whole gradients
// before they are reduced.
#pragma once

#include <string>
#include <vector>

#include "fsdp.h"
#include "nsa_attention.h"

enum class Arch { simple, rope, llama, mlp };
const char* name_of(Arch a);
Arch arch_named(const std::string& name);  // throws UsageError

// What a block's backward makes again instead of keeping it, norms and all; indices of selected blocks are always kept.
enum class Recompute {
  none,
  mlp,    // the MLP's hidden layer
  attn,   // q, k, v and attention
  both,   // a block keeps its input and its middle
  block,  // its input alone
};

// What makes a unit.
enum class Wrap {
  block,     // the embedding; each block; the head
  sublayer,  // each module
  size,      // a module of wrap_min_params or more; of smaller neighbours, as many as it takes to have as many
  single,    // everything
};
enum class BackwardPrefetch { pre, post, none };  // before a unit's gradient is computed, after that, or on demand

struct ModelConfig {
  Arch arch = Arch::rope;
  int64_t dim = 0, depth = 0, heads = 0, kv_heads = 0, hidden = 0, vocab = 0, seq = 0;
  double rope_base = 500000;
  bool sparse = false;  // Native Sparse Attention; false: dense causal attention
  NsaShape nsa = {};  // its sizes: block, stride, select_block, selected, window, phi; the rest follows from the model
  Recompute recompute = Recompute::none;
  bool keep_attention = false;                // with attn, both, block: only q, k and v are made again
  bool diagnostics = false;                   // NsaStats of every block, of the latest micro-batch; and NsaKernels
  int64_t logits_bytes = int64_t(256) << 20;  // the most that may exist at one time
  int64_t hidden_bytes = int64_t(512) << 20;  // of the MLP's hidden layer; see Model's rows_
  Wrap wrap = Wrap::block;
  int64_t wrap_min_params = 0, bucket_params = 0;  // bucket_params: small neighbours are not merged beyond; 0: no limit
  int64_t replicate_below = 0;                     // parameters of fewer elements are whole on every rank
  bool tied = false;                               // the head multiplies by the embedding
  std::vector<std::string> frozen = {};            // parameters whose names begin so are not trained
  int forward_prefetch = 1;                        // units gathered ahead
  BackwardPrefetch backward_prefetch = BackwardPrefetch::pre;
  int64_t head_dim() const { return dim / heads; }
  bool attends() const { return arch != Arch::mlp; }
  bool keeps_queries() const { return recompute == Recompute::none || recompute == Recompute::mlp; }
  // Heads of keys, and of values, in a row of projections: one set, or one for each branch.
  int64_t key_heads() const { return sparse ? 3 * kv_heads : kv_heads; }
  int64_t gates() const { return sparse ? (3 * heads + 7) / 8 * 8 : 0; }  // with padding, so that rows are aligned
  int64_t row() const { return (heads + 2 * key_heads()) * head_dim() + gates(); }
  NsaShape nsa_shape(int64_t batch) const;
  // Modules in the order of the forward pass: 0 is the embedding, the last the head.
  int modules() const { return int(depth) * (attends() ? 2 : 1) + 2; }
  int attention_module(int64_t block) const { return 1 + 2 * int(block); }
  int mlp_module(int64_t block) const { return attends() ? 2 + 2 * int(block) : 1 + int(block); }
};

struct Preset {
  const char* name;
  ModelConfig model;
  int64_t batch, grad_accum;
};
const Preset& preset_named(const std::string& name);  // throws UsageError

// Throws UsageError: which sizes do not fit together, or not what the kernels can do.
void check_config(const ModelConfig& c, int64_t batch, Backend backend, Dtype dtype);

// Units in the order of the forward pass, and at the end that of the replicated parameters, if there are any.
std::vector<Unit> parameter_table(const ModelConfig& c);
int64_t parameter_count(const ModelConfig& c);
// Forward and backward, of a token: 6 for each weight that multiplies (all matrices but the embedding), and 12 L d for
// each key that a query sees: on average T/2 in dense causal attention, hence 6 L d T; in sparse attention those of the
// three branches. Recomputation is not counted (PaLM: Chowdhery et al. 2022, appendix B), nor is what the backward pass
// leaves out because weights are frozen.
double flops_per_token(const ModelConfig& c);

// A micro-batch as ints, the layout that both the host's and the device's copies have: tokens (M), targets (M; -1 is
// padding), then the tokens' index for the embedding's gradient.
int64_t batch_ints(const ModelConfig& c, int64_t batch);
// Fills in the index, behind tokens and targets.
void index_batch(const ModelConfig& c, int64_t batch, int32_t* host);

template <class T, class G>
class Model {
 public:
  // Plans or takes its memory from dev.mem, then the Fsdp's. batch: sequences a micro-batch.
  Model(Device& dev, const World& world, Transport transport, const ModelConfig& config, int64_t batch,
        const FsdpOptions& options, bool open);

  void init_weights();
  // Begins a step. adamw: pinned, read when the compute stream comes to it, which is before `copied` of the step's
  // micro-batches.
  void begin_step(const ops::AdamW* adamw, float clip) { fsdp.begin_step(adamw, clip); }
  // Adds the micro-batch's sum of losses to loss_sum, and `scale` times its gradient to the gradient shards. host:
  // pinned, as index_batch leaves it; free to be written again once `copied` has passed. first, last: of the step.
  void forward_backward(const int32_t* host, double scale, bool first, bool last, Event& copied);
  // The loss alone; nothing is saved for a backward.
  void evaluate(const int32_t* host, bool first, Event& copied);
  // Ends a step: fsdp.scalars() then holds the step's, of all ranks.
  void end_step();
  // Ends a validation: fsdp.scalars()->loss then holds the sum of losses.
  void finish_evaluation();

  // On the device, one for each block; null without ModelConfig::diagnostics.
  const NsaStats* stats() const { return stats_; }
  // For each block, the kernels of the latest step's micro-batches as they were issued; empty without diagnostics.
  const std::vector<NsaKernels>& kernels() const { return kernels_; }

  Fsdp<T, G> fsdp;

 private:
  using A = acc_t<T>;
  // What a block's forward leaves for its backward.
  struct Saved {
    Buffer<T> x, qkv, o, x2, h;  // input; queries, keys, values; attention's output; input of the MLP; before GELU
    Buffer<A> stats1, stats2, lse;
    NsaSaved<T> nsa;  // in place of o and lse
  };
  struct Place {
    int unit = -1;  // -1: the architecture has no such parameter
    int64_t at = 0;
    bool frozen = false;  // has no gradient
  };
  struct Places {  // of a block
    Place qkv, o, up, down, up_bias, down_bias, norm1, norm1_bias, norm2, norm2_bias, gate_bias;
    Place phi[6];  // in the order of PhiWeights
  };
  Place place(const std::string& name) const;
  const T* weight(const Place& p) const { return p.unit < 0 ? nullptr : weights_[size_t(p.unit)] + p.at; }
  G* grad(const Place& p) const { return p.unit < 0 ? nullptr : p.frozen ? discarded_ : grads_[size_t(p.unit)] + p.at; }
  bool trained(int u) const { return fsdp.units()[size_t(u)].trained(); }
  void wgrad(const Place& p, const T* dy, const T* x, int64_t M, int64_t N, int64_t K, bool accumulate);
  PhiWeights<const T> phi_weights(const Places& at) const;
  PhiWeights<G> phi_grads(const Places& at) const;

  // The schedule. Between begin_pass and end_pass, enter() makes a module's weights the ones in hand: it releases the
  // unit before, if that is another, has the next ones gathered, and waits for its own. next: the module whose turn
  // comes after this one, where it is not the neighbour. open() and close() go round a module's backward: close()
  // has the unit's gradient reduced, unless the next module adds to it.
  enum class Pass { forward, backward, evaluation };
  void begin_pass(Pass pass, bool last);
  void end_pass();
  void enter(int module, int next = -1);
  void leave();
  void prefetch_behind(int module, int u, int next = -1);  // going backward, of enter(module, next): u is in hand
  void open(int module);
  void close(int module);
  int following_unit(int module, int u) const;  // going backward; -1: none

  void load(const int32_t* host, Event& copied);
  Buffer<T> embed();
  // A block's parts, for the forward pass and for making them again: q, k and v from the input; attention's output;
  // NSA's from its branches'; its projection; the middle and its norm.
  void queries(int64_t block, Saved* v, Purpose life);
  Buffer<T> attend(int64_t block, Saved* v, Purpose life, NsaKernels* ran);
  Buffer<T> combine(int64_t block, Saved* v);
  void project(int64_t block, Saved* v, const T* o, Purpose life);
  Buffer<T> middle(int64_t block, Saved* v);
  Buffer<T> block_forward(int64_t block, Saved* saved, Buffer<T> x, bool keep);
  Buffer<T> mlp_forward(int64_t block, Saved* v, Buffer<T> n, bool keep);
  Buffer<T> head(Buffer<T> x, double scale, bool backward, bool first);
  Buffer<T> block_backward(int64_t block, Saved saved, Buffer<T> dx);
  void mlp_backward(int64_t block, Saved* v, T* dx);
  int64_t forward_piece(int64_t i) const;
  void embed_backward(Buffer<T> dx);
  int64_t hidden_row() const { return c_.arch == Arch::llama ? 2 * c_.hidden : c_.hidden; }
  bool keeps_mlp() const { return c_.recompute == Recompute::none || c_.recompute == Recompute::attn; }
  bool keeps_attention() const { return c_.keeps_queries() || c_.keep_attention; }
  bool keeps_middle() const { return c_.recompute != Recompute::block; }
  NsaKernels* kernels_of(int64_t block) { return kernels_.empty() ? nullptr : &kernels_[size_t(block)]; }
  AttentionShape attention_shape() const;

  Device& dev_;
  ModelConfig c_;
  // Rows; rows whose logits exist at one time; rows whose hidden layers exist at one time, where they are not kept,
  // in the backward, and in the forward, which has two tensors of that size. The gradients of the MLP's matrices are
  // then sums over pieces: over two in the gradient's own dtype, over more in the accumulation type, whatever needs
  // less memory (wide_).
  int64_t M_, chunk_, rows_, forward_rows_;
  bool wide_ = false;
  ops::Norm norm_;
  std::vector<Places> at_;
  Place embedding_, head_, head_norm_, head_norm_bias_;
  std::vector<int> unit_of_;  // by module; -1: all its parameters are replicated
  int replicated_ = -1;       // that unit
  int last_of_backward_ = 0;  // the module that the backward pass ends with
  Pass pass_ = Pass::forward;
  bool last_ = true;
  int current_ = -1, open_ = -1;   // the units in hand
  std::vector<const T*> weights_;  // by unit; valid while it is in hand
  std::vector<G*> grads_;
  G* discarded_ = nullptr;  // where gradients go that come with others and are not wanted; never read for anything
  int32_t* batch_;
  A *rope_table_, *loss_sum_;
  NsaStats* stats_;
  std::vector<NsaKernels> kernels_;
};
