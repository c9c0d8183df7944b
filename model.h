// The models: a transformer in three dialects, and an MLP. Forward, loss and backward of one micro-batch, with every
// gather, use, release and reduce in the open.
//
//   simple  LayerNorm with bias, sin/cos positions added to the embedding (Vaswani et al. 2017), tanh-GELU MLP with
//           biases
//   rope    RMSNorm, rotary positions (Su et al. 2021), tanh-GELU MLP, no biases
//   llama   rope with SwiGLU (Shazeer 2020) for the MLP
//   mlp     embedding, depth x (x + W2 gelu(W1 x)), LayerNorm, head: no attention
// All have pre-norm residual blocks, causal attention with grouped heads (GQA: Ainslie et al. 2023) without biases, a
// final norm and a head that is not tied to the embedding.
//
// Parameters are one table, made by parameter_table: names, shapes, initial weights, units. A unit is the embedding, a
// block, or the head with the final norm. Activations are (M, .) with M = batch * seq rows. T: dtype of parameters and
// activations; G: of whole gradients before they are reduced.
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

struct ModelConfig {
  Arch arch = Arch::rope;
  int64_t dim = 0, depth = 0, heads = 0, kv_heads = 0, hidden = 0, vocab = 0, seq = 0;
  double rope_base = 500000;
  bool sparse = false;  // Native Sparse Attention; false: dense causal attention
  NsaShape nsa = {};  // its sizes: block, stride, select_block, selected, window, phi; the rest follows from the model
  Recompute recompute = Recompute::none;
  bool diagnostics = false;                   // NsaStats of every block, of the latest micro-batch; and NsaKernels
  int64_t logits_bytes = int64_t(256) << 20;  // the most that may exist at one time
  int64_t head_dim() const { return dim / heads; }
  bool attends() const { return arch != Arch::mlp; }
  // Heads of keys, and of values, in a row of projections: one set, or one for each branch.
  int64_t key_heads() const { return sparse ? 3 * kv_heads : kv_heads; }
  int64_t gates() const { return sparse ? (3 * heads + 7) / 8 * 8 : 0; }  // with padding, so that rows are aligned
  int64_t row() const { return (heads + 2 * key_heads()) * head_dim() + gates(); }
  NsaShape nsa_shape(int64_t batch) const;
};

struct Preset {
  const char* name;
  ModelConfig model;
  int64_t batch, grad_accum;
};
const Preset& preset_named(const std::string& name);  // throws UsageError

// Throws UsageError: which sizes do not fit together, or not what the kernels can do.
void check_config(const ModelConfig& c, int64_t batch, Backend backend, Dtype dtype);

std::vector<Unit> parameter_table(const ModelConfig& c);
int64_t parameter_count(const ModelConfig& c);
// Forward and backward, of a token: 6 for each weight that multiplies (all matrices but the embedding), and 12 L d for
// each key that a query sees: on average T/2 in dense causal attention, hence 6 L d T; in sparse attention those of the
// three branches. Recomputation is not counted (PaLM: Chowdhery et al. 2022, appendix B).
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
  // Adds the micro-batch's sum of losses to loss_sum, and `scale` times its gradient to the gradient shards. host:
  // pinned, as index_batch leaves it; free to be written again once `copied` has passed. first, last: of the step.
  void forward_backward(const int32_t* host, double scale, bool first, bool last, Event& copied);
  // The loss alone; nothing is saved for a backward.
  void evaluate(const int32_t* host, bool first, Event& copied);
  // Ends a step: fsdp.scalars() then holds the squared gradient norm and the sum of losses over all ranks.
  void step(const ops::AdamW& adamw, float clip);
  // Ends a validation: scalars()[1] holds the sum of losses.
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
  // Places of a block's parameters in its unit, -1 where the architecture has none.
  struct Places {
    int64_t qkv, o, up, down, up_bias, down_bias, norm1, norm1_bias, norm2, norm2_bias, gate_bias;
    int64_t phi[6];  // in the order of PhiWeights
  };

  void load(const int32_t* host, Event& copied);
  Buffer<T> embed();
  // A block's parts, for the forward pass and for making them again: attention's output from the input; the middle and
  // its norm from that; what the MLP's backward wants from the middle's norm.
  Buffer<T> attend(const T* w, Saved* v, Purpose life, NsaKernels* ran);
  Buffer<T> middle(const T* w, Saved* v, const T* o, Purpose life);
  void hidden_again(const T* w, Saved* v, const T* n);
  Buffer<T> block_forward(int u, Saved* saved, Buffer<T> x, bool keep);
  Buffer<T> mlp_block_forward(int u, Saved* saved, Buffer<T> x, bool keep);
  Buffer<T> head(Buffer<T> x, double scale, bool backward, bool first);
  Buffer<T> block_backward(int u, Saved saved, Buffer<T> dx);
  Buffer<T> mlp_block_backward(int u, Saved saved, Buffer<T> dx);
  void embed_backward(Buffer<T> dx);
  int head_unit() const { return int(c_.depth) + 1; }
  bool keeps_mlp() const { return c_.recompute == Recompute::none || c_.recompute == Recompute::attn; }
  bool keeps_attention() const { return c_.recompute == Recompute::none || c_.recompute == Recompute::mlp; }
  bool keeps_middle() const { return c_.recompute != Recompute::block; }
  NsaKernels* kernels_of(int u) { return kernels_.empty() ? nullptr : &kernels_[size_t(u) - 1]; }
  AttentionShape attention_shape() const;
  template <class E>
  PhiWeights<E> phi_at(E* base) const;

  Device& dev_;
  ModelConfig c_;
  int64_t M_, chunk_;  // rows; rows whose logits exist at one time
  ops::Norm norm_;
  Places at_;
  int32_t* batch_;
  A *rope_table_, *loss_sum_;
  NsaStats* stats_;
  std::vector<NsaKernels> kernels_;
};
