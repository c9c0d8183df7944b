// The model at work: forward, loss and backward of one micro-batch; each module says where it gathers, uses, releases
// and reduces its unit. What it is made of: model/config.h. T: dtype of parameters and activations; G: of unsharded
// gradients before they are reduced. A step:
//
//   model.begin_step(adamw, clip);
//   for (int m = 0; m < micro_batches; m++)
//     model.forward_backward(batch + m * batch_ints(config, B), scale, m == 0, m + 1 == micro_batches, copied);
//   model.end_step();  // model.fsdp.scalars() then has the norm and the loss
//
// Shapes: B sequences of T tokens are M = B*T rows; C dim, H and HKV heads of D, of DV in values, F hidden, V vocab.
#pragma once

#include <vector>

#include "model/linear.h"
#include "model/config.h"

template <class T, class G>
class Model {
 public:
  // Plans or takes its memory from dev.mem, then the Fsdp's. batch: sequences a micro-batch.
  Model(Device& dev, const World& world, Transport transport, const ModelConfig& config, int64_t batch,
        const FsdpOptions& options, Links links);

  void init_weights();
  // Begins a step. adamw: pinned, read when the compute stream comes to it, which is before `copied` of the step's
  // micro-batches.
  void begin_step(const ops::AdamW* adamw, float clip) { fsdp.begin_step(adamw, clip); }
  // Adds the micro-batch's sum of losses to loss_sum, and `scale` times its gradient to the gradient shards. host:
  // pinned, as index_batch leaves it; free to be written again once `copied` has passed. first, last: of the step.
  void forward_backward(const int32_t* host, double scale, bool first, bool last, Event& copied);
  // The loss alone; nothing is saved for a backward. row_losses: pinned, takes the M rows' losses; may be null.
  void evaluate(const int32_t* host, bool first, Event& copied, acc_t<T>* row_losses = nullptr);
  // The logits (V) of the token that follows row `row` of the micro-batch, whose targets are not read. logits: pinned.
  void next_logits(const int32_t* host, int64_t row, acc_t<T>* logits, Event& copied);
  // From here on until end_step() every module marks in bad_outputs() (modules, on the device) if it hands something on
  // that is infinite or not a number; the head, its loss. Not for a graph.
  void watch_outputs();
  const int32_t* bad_outputs() const { return bad_outputs_; }
  int unit_of(int module) const { return unit_of_[size_t(module)]; }  // -1: all its parameters are replicated
  // Ends a step: fsdp.scalars() then holds the step's, of all ranks.
  void end_step();
  // Ends a validation: fsdp.scalars()->loss then holds the sum of losses.
  void finish_evaluation();

  // On the device, one for each block, of the latest step's micro-batches on all ranks; null without
  // ModelConfig::diagnostics.
  const NsaSums* nsa_sums() const { return nsa_sums_; }
  const NsaMaxima* nsa_maxima() const { return nsa_maxima_; }
  // For each block, the kernels of the latest step's micro-batches as they were issued; empty without diagnostics.
  const std::vector<NsaKernels>& kernels() const { return kernels_; }

  Fsdp<T, G> fsdp;

 private:
  using A = acc_t<T>;
  // What a block's forward leaves for its backward. Empty: not kept, to be recomputed.
  struct Saved {
    Buffer<T> x;       // (M, C) the block's input
    Buffer<A> stats1;  // (M, 2) of its norm
    // In fp8: the largest numbers that the products of this block read, for the backward to cast alike.
    Buffer<float> largest1, largest2;  // (M) of the norms' rows
    Buffer<float> largest_o;           // (1) of attention's output
    Buffer<T> qkv;                     // (M, row) q (H*D), k (key_heads*D), v (key_heads*DV), NSA's gates
    Buffer<T> gate_h;                  // (M, gate_hidden) the gates' hidden layer before its activation
    Buffer<T> o;                       // (M, H*DV) attention's output; dense
    Buffer<A> lse;                     // (B, H, T) log-sum-exp; dense
    NsaSaved<T> nsa;                   // in place of o and lse
    Buffer<T> x2;                      // (M, C) the MLP's input, x + Wo o
    Buffer<A> stats2;                  // (M, 2) of its norm
    Buffer<T> h;                       // (M, F), SwiGLU (M, 2F): the hidden layer before its activation
    // Or the same in e4m3, with a scale for each piece that the forward pass made it in.
    Buffer<uint8_t> h8;
    Buffer<float> h8_unscales;
  };
  struct ParamRef {
    int unit = -1;  // -1: the architecture has no such parameter
    int64_t offset = 0;
    bool frozen = false;  // has no gradient
    bool fp8 = false;     // is gathered in it
    int64_t amax = 0;     // its place in weight_amaxes_
    bool exists() const { return unit >= 0; }
  };
  struct BlockParams {
    ParamRef qkv;                                  // (row, C)
    ParamRef o;                                    // (C, H*DV)
    ParamRef up;                                   // (F, C), SwiGLU gate and up (2F, C)
    ParamRef down;                                 // (C, F)
    ParamRef up_bias, down_bias;                   // (F), (C)
    ParamRef norm1, norm1_bias;                    // (C)
    ParamRef norm2, norm2_bias, gate_bias;         // (C), (C), (gates)
    ParamRef gate_w1_bias, gate_w2, gate_w2_bias;  // (gate_hidden), (gates, gate_hidden), (gates)
    ParamRef phi[6];                               // in the order of PhiWeights
  };
  const T* weight(const ParamRef& p) const;  // of a unit that is in use
  const T* weight_if_any(const ParamRef& p) const { return p.exists() ? weight(p) : nullptr; }
  G* grad(const ParamRef& p) const;  // of a unit whose gradient is being written
  G* grad_if_any(const ParamRef& p) const { return p.exists() ? grad(p) : nullptr; }
  bool trained(int u) const { return fsdp.units()[size_t(u)].trained(); }
  using Sides = typename Linear<T>::Sides;
  typename Linear<T>::Weight block_weight(const ParamRef& p);  // q, k, v's, o's or the MLP's
  Fp8Copy cast_weight(const ParamRef& p, int64_t N, int64_t K, Sides sides);
  void linear_wgrad(const ParamRef& p, const T* dy, const Fp8Copy& dy8, const T* x, int64_t M, int64_t N, int64_t K,
                    bool accumulate, typename Linear<T>::Maxima of_x = {});
  // Of a norm's rows [i, i + rows), or what there is one of; none if not in fp8.
  typename Linear<T>::Maxima maxima(const Buffer<float>& largest, int64_t i, int64_t rows) const {
    if (!largest) return {};
    return {largest.get() + i, rows};
  }
  void wgrad(const ParamRef& p, const T* dy, const T* x, int64_t M, int64_t N, int64_t K, bool accumulate);
  PhiWeights<const T> phi_weights(const BlockParams& at) const;
  PhiWeights<G> phi_grads(const BlockParams& at) const;

  // The schedule. A micro-batch goes through a list of turns; each module takes its own with take_turn and says the
  // verbs, which act on its unit where its turn begins or ends the unit's run of turns.
  void begin_micro_batch(const std::vector<Turn>& turns, bool last);
  void begin_backward();
  void end_micro_batch();
  const Turn& take_turn(Turn::Kind kind, int module);
  void gather(const Turn& t);  // and prefetches what comes behind it
  void use(const Turn& t);
  void release(const Turn& t);
  void gradient(const Turn& t);
  void reduce(const Turn& t);
  int unit_behind(const Turn& t) const;  // the one that is gathered next, in this micro-batch or the next; -1: none

  void load(const int32_t* host, Event& copied);
  template <class X>
  void look_at(int module, const X* output, int64_t n);
  void begin_diagnostics();
  NsaCounted<T> counted(int64_t block, const Saved& v) const;
  void count(const std::vector<NsaCounted<T>>& blocks);
  void count_kept(const std::vector<Saved>& saved);
  void sum_diagnostics();
  Buffer<T> embed();
  // A block's parts, for the forward pass and to recompute them.
  void queries(int64_t block, Saved* v, Purpose life);
  void gates(int64_t block, Saved* v, Purpose life);
  void gates_backward(int64_t block, const Saved& v, T* dqkv);
  Buffer<T> attend(int64_t block, Saved* v, Purpose life, NsaKernels* ran);
  void project(int64_t block, Saved* v, const T* o, Purpose life);
  Buffer<T> middle(int64_t block, Saved* v);
  Buffer<T> block_forward(int64_t block, Saved* saved, Buffer<T> x, bool keep);
  void attention_forward_turn(int64_t block, Saved* v, bool keep);
  Buffer<T> mlp_forward(int64_t block, Saved* v, Buffer<T> n, bool keep);
  Buffer<T> forward(const int32_t* host, Event& copied);
  Buffer<T> head(Buffer<T> x, double scale, bool backward, bool first, A* row_losses = nullptr);
  void head_of_row(Buffer<T> x, int64_t row, A* logits);
  Buffer<T> block_backward(int64_t block, Saved saved, Buffer<T> dx);
  void recompute_queries(int64_t block, Saved* v);
  void recompute_attention(int64_t block, Saved* v);
  void recompute_gated_sum(int64_t block, Saved* v);
  void recompute_middle(int64_t block, Saved* v);
  Buffer<T> recompute_hidden(int64_t block, Saved* v, int64_t i, int64_t rows);
  void save_hidden(Saved* v, const T* h, int64_t i, int64_t rows);
  Buffer<T> restore_hidden(const Saved& v, int64_t i, int64_t rows);
  void attention_backward_turn(int64_t block, Saved* v, T* dx);
  Buffer<T> queries_backward(int64_t block, Saved* v, const T* d_o);
  // Does what the activation makes, and its gradients, exist in fp8 alone? A bias wants its layer's gradient itself,
  // and so do scales of rows, which take passes of their own to find.
  bool casts_activation(const BlockParams& at) const {
    return c_.fp8 && !linear_.scales_rows() && !at.up_bias.exists();
  }
  struct MlpBackward {  // what the pieces of rows share
    // fp32, over pieces; empty: the gradient is made in one piece, or not wanted.
    Buffer<A> up, down, up_bias, norm, norm_bias;
    Fp8Copy up8, down8;  // the weights' columns
  };
  void mlp_backward_turn(int64_t block, Saved* v, T* dx);
  Fp8Copy activation_backward(int64_t block, const T* dx, T* h, int64_t i, int64_t rows, const MlpBackward& all);
  void up_backward(int64_t block, Saved* v, T* dx, const T* dh, Fp8Copy dh8, int64_t i, int64_t rows,
                   const MlpBackward& all);
  Buffer<T> mlp_input(int64_t block, Saved* v, int64_t i, int64_t rows, const char* name);
  int64_t forward_piece(int64_t i) const;
  int64_t forward_piece_number(int64_t i) const;
  template <class E>
  void norm_backward(T* dx, E* dgamma, E* dbeta, T* dn, const T* x, const A* stats, const T* gamma, int64_t rows,
                     bool accumulate);
  void embed_backward(Buffer<T> dx);
  ops::Activation activation() const {
    return c_.arch == Arch::llama ? ops::Activation::swiglu : ops::Activation::gelu;
  }
  NsaKernels* kernels_of(int64_t block) { return kernels_.empty() ? nullptr : &kernels_[size_t(block)]; }
  AttentionShape attention_shape() const;

  Device& dev_;
  ModelConfig c_;
  int64_t M_, chunk_, rows_, forward_rows_;  // rows; and of Pieces
  ops::Norm norm_;
  Linear<T> linear_;
  std::vector<BlockParams> params_;  // by block
  ParamRef embedding_, head_, head_norm_, head_norm_bias_;
  int replicated_ = -1;       // the unit of parameters that are not sharded
  int last_of_backward_ = 0;  // the module that the backward pass ends with
  std::vector<int> unit_of_;  // by module; -1: all its parameters are replicated
  std::vector<Turn> training_, evaluation_;
  const std::vector<Turn>* turns_ = nullptr;  // of the micro-batch that is being issued
  size_t turn_ = 0;                           // the next of them
  bool last_ = true;                          // the step's last micro-batch
  std::vector<const T*> weights_;             // by unit, from its element in_fp8 on; null: not in use
  std::vector<G*> grads_;                     // by unit; null: not being written
  float* weight_amaxes_ = nullptr;  // (depth, 4) the largest numbers of the weights that are multiplied in fp8
  G* discarded_ = nullptr;  // where gradients go that come with others and are not wanted; never read for anything
  MicroBatch batch_;        // the device's
  A* rope_table_;           // (T, D), cos and sin
  A* loss_sum_;             // (1)
  int32_t* bad_outputs_;    // (modules)
  bool watches_ = false;    // the outputs
  // Of each block, with ModelConfig::diagnostics.
  double* nsa_partials_ = nullptr;
  NsaSums* nsa_sums_ = nullptr;
  NsaMaxima* nsa_maxima_ = nullptr;
  std::vector<NsaKernels> kernels_;
};
