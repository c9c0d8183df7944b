// The model at work: forward, loss and backward of one micro-batch; each module says where it gathers, uses, releases
// and reduces its unit. Its parts are in model/: what a model is made of (config.h), the verbs (schedule.h), a block's
// halves (attention.h, mlp.h). T: dtype of parameters and activations; G: of unsharded gradients before they are
// reduced. A step:
//
//   model.begin_step(adamw, clip);
//   for (int m = 0; m < micro_batches; m++)
//     model.forward_backward(batch + m * batch_ints(config, B), scale, m == 0, m + 1 == micro_batches, copied);
//   model.end_step();  // model.fsdp.scalars() then has the norm and the loss
//
// Shapes: B sequences of T tokens are M = B*T rows; C dim, H and HKV heads of D, of DV in values, F hidden, V vocab.
#pragma once

#include <vector>

#include "model/attention.h"
#include "model/mlp.h"

template <class T, class G>
class Model {
 public:
  // Plans or takes its memory from dev.mem, then the Fsdp's. batch: sequences a micro-batch.
  Model(Device& dev, const World& world, Transport transport, const ModelConfig& config, int64_t batch,
        const FsdpOptions& options, Links links);
  Model(const Model&) = delete;  // its parts refer to each other

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
  void watch_outputs() { watch_.begin(); }
  const int32_t* bad_outputs() const { return watch_.bad(); }
  int unit_of(int module) const { return schedule_.unit_of(module); }  // -1: all its parameters are replicated
  // From here on a step ends with the gathers that the next begins with (see Fsdp).
  void end_steps_with_gathers() { fsdp.end_steps_with_gathers(schedule_.first_units()); }
  // Ends a step: fsdp.scalars() then holds the step's, of all ranks.
  void end_step();
  // Ends a validation: fsdp.scalars()->loss then holds the sum of losses.
  void finish_evaluation();

  // On the device, one for each block, of the latest step's micro-batches on all ranks; null without
  // ModelConfig::diagnostics.
  const NsaSums* nsa_sums() const { return attention_.sums(); }
  const NsaMaxima* nsa_maxima() const { return attention_.maxima(); }
  // For each block, the kernels of the latest step's micro-batches as they were issued; empty without diagnostics.
  const std::vector<NsaKernels>& kernels() const { return attention_.kernels(); }

  Fsdp<T, G> fsdp;

 private:
  using A = acc_t<T>;
  void load(Stream& s, const int32_t* host, int64_t from, int64_t to);
  Buffer<T> load_and_embed(const int32_t* host, Event& copied);
  Buffer<T> forward(const int32_t* host, Event& copied);
  Buffer<T> embed();
  void embed_backward(Buffer<T> dx);
  Buffer<T> block_forward(int64_t block, Saved<T>* saved, Buffer<T> x, bool keep);
  Buffer<T> block_backward(int64_t block, Saved<T> saved, Buffer<T> dx);
  enum class Pass { training, evaluation };
  Buffer<T> head(Pass pass, Buffer<T> x, double scale, bool first, A* row_losses = nullptr);
  void head_of_row(Buffer<T> x, int64_t row, A* logits);

  Device& dev_;
  const ModelConfig c_;
  const int64_t M_;             // rows of a micro-batch
  MicroBatch batch_;            // the device's
  Event loaded_, indexed_;      // its tokens and targets, its index
  A* loss_sum_;                 // (1)
  const int last_of_backward_;  // the module that the backward pass ends with
  OutputWatch watch_;
  Schedule<T, G> schedule_;
  Blocks<T, G> blocks_;
  BlockAttention<T, G> attention_;
  const Pieces pieces_;
  BlockMlp<T, G> mlp_;
  const ParamRef embedding_, head_, head_norm_, head_norm_bias_;
};
