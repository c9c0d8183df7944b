// Fully sharded data parallelism (FSDP; ZeRO stage 3: Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023,
// arXiv 2304.11277), written out: gather -> use -> release -> gradient -> reduce. A training step of n units, one after
// another, with the next unit's gather hidden behind the computation of this one:
//
//   fsdp.begin_step(adamw, clip);
//   for (int u = 0; u < n; u++) {  // forward
//     fsdp.gather(u);
//     if (u + 1 < n) fsdp.prefetch(u + 1);
//     x[u + 1] = forward(fsdp.use(u), x[u]);
//     fsdp.reshard(u);
//   }
//   for (int u = n - 1; u >= 0; u--) {  // backward
//     fsdp.gather(u);
//     if (u > 0) fsdp.prefetch(u - 1);
//     dx = backward(fsdp.gradient(u), fsdp.use(u), x[u], dx);
//     fsdp.release(u);
//     fsdp.reduce(u);
//   }
//   fsdp.end_step();
//
// A unit (fsdp/unit.h) is a set of parameters that are gathered together (embedding, one block, head). They lie in one
// flat buffer, padded so that it cuts into equal shards, one for each rank of a shard group; a rank owns its shard of
// every unit, as an fp32 master copy with AdamW's two moments. Frozen parameters lie behind the trainable ones, are
// sharded on their own, and are gathered alone: they have no gradient and no moments (but for what one product makes
// together with a trainable parameter). Nothing else of the model stays on a rank for longer than it is used:
//
//   gather(u)     gather stream: all_gather the ranks' master shards into a slot; begins when the compute stream comes
//                 to this call. In bf16 nothing is cast: a master copy lies in two halves (lib/device/halves.h), of
//                 which the upper is what is sent. One rank gathers nothing, and computes with its master copy as it
//                 lies. What goes in fp8 is scaled by the largest number that any rank has of it, which an all_reduce
//                 finds once a step. Where ranks fetch, they wait for each other when AdamW is done with a unit, or
//                 with all, and then copy each other's shards without asking again
//   prefetch(u)   the same, begun as soon as a slot is free; if none is, nothing, and gather(u) does it later
//   use(u)        compute stream waits for the gather; returns the unsharded unit in the compute dtype
//   release(u)    compute stream has read the slot for the last time; the unit stays resident until the slot is needed
//   reshard(u)    release, and the slot is empty
//   gradient(u)   a slot to write the unit's unsharded gradient into; compute waits for the slot's last reduction
//   reduce(u)     reduce stream: reduce_scatter the slot in place, add my part to my gradient shard; or bring here my
//                 part of every rank's, and add their sum to that shard (reduce_by_copy_engine)
//   end_step()    global gradient norm, whose terms the last reductions have left; clip, AdamW on the shards
//
// There are as many slots as the options say, and one more for units that are much larger than the others, as embedding
// and head may be: their number is the rate limiter.
//
// A shard group is all ranks, or fewer, and then the groups are replicas of each other: gradients are summed within the
// group by the reduce_scatter, and between the replicas of a shard by an all_reduce. A group of one rank is plain data
// parallelism. This file knows units of parameters and nothing of transformers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/exposed.h"
#include "fsdp/gather_fp8.h"
#include "fsdp/issued.h"
#include "fsdp/unit.h"
#include "lib/comm/comm.h"
#include "lib/device/device.h"
#include "lib/ops/ops.h"

struct FsdpOptions {
  int shard_ranks = 0;  // ranks of a shard group, neighbours; 0: all. They must divide the world
  int shards(int world_size) const { return shard_ranks ? shard_ranks : world_size; }
  bool reshard_after_forward = true;  // false: a unit has a slot of its own and is gathered once a step
  int gather_slots = 2;               // 0: as many as units
  int gradient_slots = 2;
  Dtype reduce_dtype = Dtype::f32;  // G's dtype, or bf16 for a float G: the gradient is then cast before the reduction
  bool gather_wide = false;         // gather fp32 and cast to T behind the gather, instead of before it
  Dtype moment_dtype = Dtype::f32;  // or bf16
  bool reduce_last = false;         // accumulate unsharded fp32 gradients until a step's last micro-batch, reduce then
  bool update_in_backward = false;  // AdamW on a unit as soon as its gradient is reduced; excludes clipping
  ops::GradNorm norm = ops::GradNorm::two;
  bool gather_over_mpi = false;        // where reductions go over NCCL
  bool gather_by_copy_engine = false;  // see Channel
  // Parts go to their owners by all_to_all, who sums them in fp32 and in rank order: by copy engines, on a GPU. What is
  // replicated is all_reduced all the same.
  bool reduce_by_copy_engine = false;
  // A step's last two gradients, beside which nothing runs, are not sent to their owners: these read them in their
  // peers' memory, with all SMs, and sum them in fp32 and in rank order.
  bool read_tail = false;
  // What copy engines carry each rank copies out of its peers' memory, and waits for them only where it must.
  bool fetch = false;
  // What both need: these ranks map each other's memory.
  bool can_map_peers(int world_size) const {
    return gather_by_copy_engine && shards(world_size) > 1 && shards(world_size) <= most_peers;
  }
  // That a rank opens where its channels go over NCCL.
  int communicators(int world_size) const {
    const bool shards_here = shards(world_size) > 1, replicates = shards(world_size) < world_size;
    const bool exchanges = reduce_by_copy_engine && !fetch;
    return shards_here * ((gather_over_mpi ? 0 : 1) + 1 + exchanges + has_small_ring()) + replicates;
  }
  bool uses_copy_engines() const { return gather_by_copy_engine || reduce_by_copy_engine; }
  // Thread blocks of a reduction by NCCL, at most; 0: NCCL's choice. small_reduce_ctas: of gradients of small_gradient
  // bytes or fewer, which then go by a communicator of their own; 0: as all others.
  int reduce_ctas = 0, small_reduce_ctas = 0;
  static constexpr int64_t small_gradient = int64_t(16) << 20;
  bool has_small_ring() const { return small_reduce_ctas > 0; }
  bool unsharded_init = false;  // make the full model's weights on every rank, then cut: to show what that costs
  uint64_t seed = 0;            // of the initial weights
};

// What a step leaves on the device for the host to read, and a validation (its loss alone). Sums over all ranks.
struct StepScalars {
  double norm2;  // the square of the global gradient norm; not finite if the loss is not: the step was then left out
  double loss;   // the sum of losses, as the model leaves it
  double steps;  // every rank's AdamW step: world size times the step, unless a rank has skipped or repeated one
  double halts;  // of the ranks' AdamW::halt: they are asked to stop
};

constexpr int step_scalars = sizeof(StepScalars) / sizeof(double);

template <class T, class G>
class Fsdp {
 public:
  // Plans or takes the memory (see Memory). Collective over all ranks where links are open. units: laid out for the
  // ranks of a shard group.
  Fsdp(Device& dev, const World& world, Transport transport, std::vector<Unit> units, const FsdpOptions& options,
       Links links);

  void init_weights();
  // adamw: on the host, pinned; it is read when the compute stream comes to it. clip: the largest gradient norm; 0:
  // off.
  void begin_step(const ops::AdamW* adamw, float clip);
  // last: the step's last micro-batch; gradients are complete when it has reduced them.
  void begin_micro_batch(bool last) { last_micro_batch_ = last; }

  // The verbs; see above. Using one out of order (release without use, reduce without gradient, no slot left to use) is
  // an internal error that names the verb and the unit.
  void prefetch(int u);
  void gather(int u);
  // (padded), or of a unit with parameters in fp8 the others, from element in_fp8 on. Gathers what was not gathered
  // before.
  const T* use(int u);
  // Of a unit in use the parameters in fp8 (in_fp8), e4m3, and what those from `offset` on, which share a scale, are
  // multiplied by (1).
  const uint8_t* codes(int u);
  const float* unscale(int u, int64_t offset) const { return fp8_.unscale(u, offset); }
  void release(int u);
  // Release alone where the options keep the unit resident (reshard_after_forward off, replicated).
  void reshard(int u);
  // Whether, before its gradient is written, reduce(u, used) can take it.
  bool takes_rows(int u, const ops::UsedRows& used) const;
  G* gradient(int u);  // (padded of with_gradient); holds what the last unit left there, but for zeros in the padding
  void reduce(int u) { reduce(u, {}); }
  // The same of a gradient that is a matrix with few rows that are not zero; what lies in the others counts as zero.
  // used: in the arena, and there until the step's end. sums: parts of the gradient that are still to be made, on the
  // reduce stream; then it records `summed`.
  void reduce(int u, const ops::UsedRows& used, const ops::ColumnSums<G>& sums = {}, Event* summed = nullptr);

  // Global gradient norm, clip, AdamW, which changes nothing if that norm is not finite. With update_in_backward it has
  // run by then, and nothing is left to hold back. Mean-gradient scaling is the caller's: gradients arrive as sums over
  // ranks and micro-batches. scalars() then holds the step's, whose loss the caller has put there before.
  void end_step();
  // Nothing of a step that is a graph begins before the graph does. So that its first gathers hide all the same, the
  // step before it ends with them, beside AdamW: of these units, as far as there are slots, each into a slot that stays
  // the same from step to step.
  void end_steps_with_gathers(const std::vector<int>& units);
  // Before such a graph is made, and before each launch: somebody may have used the slots.
  void before_graph();
  // Sums the loss in scalars() over the ranks without a step (validation).
  void sum_scalars();
  // Somebody copies the weights and moments: the updates of the step that comes wait for the event, which stays where
  // it is until then. Such a step cannot be recorded as a graph.
  void hold_updates(const Event& until) { held_ = &until; }
  bool holds_updates() const { return held_; }
  // For what a model counts beside its loss: n doubles, summed over all ranks, or the largest of each, in place. On the
  // reduce stream, behind what the compute stream was given so far; the compute stream sees it behind end_step().
  void all_reduce(double* x, int64_t n, Channel::Reduction how);
  // No unit is resident from here on. At the end of each step, and wherever what is issued next must not depend on what
  // was issued before: weights that are new, and a step that is recorded once and replayed often.
  void empty_slots();
  StepScalars* scalars() const { return scalars_; }  // on the device
  // Of the latest step, on the device: each unit's share of the norm as this rank's shard has it (units; what is not
  // trained has 0). One that is not finite tells in whose gradient something went wrong.
  const double* unit_sums() const { return unit_sums_; }

  const std::vector<Unit>& units() const { return units_; }
  // This rank's shard of a unit: its index, whether this is the first rank that holds it; weights (shard), and AdamW's
  // moments (shard of with_gradient).
  int shard_rank(int u) const { return units_[size_t(u)].replicated ? 0 : shard_world_.rank; }
  bool first_replica(int u) const {
    return replica_world_.rank == 0 && (!units_[size_t(u)].replicated || shard_world_.rank == 0);
  }
  Masters master(int u) const { return state_[size_t(u)].master; }
  void* first_moment(int u) const { return state_[size_t(u)].m; }
  void* second_moment(int u) const { return state_[size_t(u)].v; }
  Dtype moment_dtype() const { return options_.moment_dtype; }
  // Whether the unit waits for none of the slots that most units share, so that it may be gathered early.
  bool has_large_slot(int u) const { return small_slot_ > 0 && slot_numel(u) > small_slot_; }
  int gradient_slots() const { return int(rotating_) + (last_large_ >= 0); }  // of sharded units
  int64_t parameters() const;
  int64_t pinned_bytes() const;  // of the host's memory, beside the plan: what the channels stage through on a GPU
  IssueLog& issued() { return issued_; }       // what is issued, from its begin() on
  ExposedTime& exposed() { return exposed_; }  // from its begin() to the step's end
  void remark(int unit, const char* text) { issued_.note(Issued::remark, unit, 0, Dtype::f32, 1, text); }
  // Tests delay the streams with these.
  void set_delays(double gather_ms, double reduce_ms, double optimizer_ms);

 private:
  struct State {  // of a unit
    explicit State(Device& dev) : ready(dev) {}
    Masters master;
    Event ready;             // to be gathered: AdamW, or what made the weights, is done with the master copy
    bool all_ready = false;  // on all ranks, as far as the gather stream has waited for it
    void *m = nullptr, *v = nullptr;
    Buffer<float> gradient;            // my shard of it; lives from the unit's first reduction to the optimizer
    Buffer<bf16> bf16_gradient;        // instead of it, where a step has one reduction, in bf16
    Buffer<float> unsharded_gradient;  // summed over micro-batches, where only the last one reduces
    int reductions = 0;                // so far in this micro-batch
    std::vector<std::pair<int64_t, int64_t>> trained;  // ranges of my shard that AdamW changes
  };

  // A buffer for one unsharded unit.
  //
  //   state     it holds                                   left by
  //   empty     nothing that is current                    gather, prefetch: -> busy
  //   busy      a unit, on its way or being read           release: -> resident; reshard: -> empty
  //   resident  a unit that nobody reads, still current    gather, prefetch of that unit: -> busy, and nothing moves;
  //                                                        of another: -> busy with that; empty_slots: -> empty
  //
  // Where several are free, the one released longest ago is taken, so that a unit stays resident as long as it can.
  // Units that are much larger than the others have a slot between them (small_slot, in fsdp.cu).
  struct Slot {
    enum State { empty, busy, resident };
    Slot(Device& dev, const std::string& name, T* p, float* wide)
        : name(name), p(p), wide(wide), gathered(dev), released(dev) {}
    std::string name;  // in the plan of memory
    T* p;              // of a unit that is not gathered: its master copy
    float* wide;       // what is gathered, where that is not p
    int owner = -1;    // the one unit that it is for; -1: any that is, or is not, large
    bool large = false;
    bool is_master = false;
    State state = empty;
    int unit = -1;  // -1: empty
    int64_t last_release = 0;
    Event gathered, released;
  };

  // A buffer for one unsharded gradient. Idle (unit -1), though its last reduction may still read it; gradient() waits
  // for that and gives it to a unit; reduce() makes it idle again. Sharded units that are not large take turns over the
  // first `rotating_` of them; a replicated one has its own.
  struct GradientSlot {
    GradientSlot(Device& dev, const std::string& name, G* p) : name(name), p(p), written(dev), reduction_done(dev) {}
    std::string name;  // in the plan of memory
    G* p;
    int owner = -1;
    bool large = false;
    int unit = -1;
    Event written, reduction_done;
    // Given back when compute has waited for it: the gradient in fp32, this rank's shard of it; a large one's parts.
    Buffer<float> read_by_reduction[2];
    Buffer<char> parts;
  };

  // What reduce() does with the gradient that a micro-batch leaves.
  enum class Reduction {
    accumulate,  // add it to the unsharded fp32 gradient: nothing is sent (reduce_last, before the last micro-batch)
    shard,       // reduce_scatter, and add my shard of the sum to my gradient shard
    complete,    // the same for the last time: with its share of the norm
    update,      // the same, and AdamW on the shard at once (update_in_backward)
  };
  // What a reduction leaves: in fp32, of this one or added to what is there, or in bf16.
  struct GradientShard {
    float* fp32;
    bf16* bf16_alone;
    bool accumulate;
  };

  void keep_state();
  void keep_gather_slots();
  void keep_gradient_slots();
  bool fetches() const { return options_.fetch && shard_world_.size > 1; }
  bool exchanges() const { return options_.reduce_by_copy_engine && shard_world_.size > 1; }
  bool at_tail() const { return options_.read_tail && shard_world_.size > 1 && reduced_ >= trained_units_ - 1; }
  Issued::Kind reduction_of(int u) const;
  void open_exchange(Transport transport, Links links);
  template <class E>
  E* room_for_parts(Buffer<char>* in, int64_t numel);
  template <class E>
  void exchange(int u, E* gradient, const GradientShard& to, ops::PowerSum norm);
  // The channel that a sharded gradient of so many bytes is reduced on; and f(each channel).
  Channel& ring(int64_t bytes) {
    return small_reduce_channel_ && bytes <= FsdpOptions::small_gradient ? *small_reduce_channel_ : reduce_channel_;
  }
  template <class Self, class F>
  static void for_each_channel(Self& self, const F& f) {
    for (auto* c : {&self.gather_channel_, &self.reduce_channel_, &self.replica_channel_}) f(*c);
    for (auto* c : {&self.small_reduce_channel_, &self.exchange_channel_})
      if (*c) f(**c);
  }
  int shards(int u) const { return units_[size_t(u)].replicated ? 1 : shard_world_.size; }
  void tell(Stream& s, const Slot& slot, const std::string& unit, const char* how = "");
  Slot* slot_of(int u);
  void begin_gather(int u, Slot* slot);
  void meet_owners(int u);
  void gather_next();
  void order_updates();
  void gather_into(int u, Slot* slot);
  int64_t slot_numel(int u) const;
  bool in_halves(int u) const;
  T* as_slot(int u) const;
  Slot& used_slot(int u, const char* verb);
  GradientSlot& gradient_slot_of(int u);
  void await_reduction(GradientSlot& s);
  Reduction next_reduction(int u);
  template <class E>
  void sum_over_ranks(int u, E* gradient, const ops::UsedRows& used, const GradientShard& to, ops::PowerSum norm);
  ops::PowerSum share_of_norm(int u, Reduction how);
  template <class E>
  void update(Stream& s, int u, const E* gradient, float clip, ops::Series* series);
  void begin_scalars();
  void all_reduce_scalars(Stream& s);

  Device& dev_;
  World shard_world_, replica_world_;
  FsdpOptions options_;
  std::vector<Unit> units_;
  std::vector<State> state_;
  std::vector<Slot> slots_;
  std::vector<GradientSlot> gradient_slots_;
  size_t next_gradient_slot_ = 0, rotating_ = 0;
  // Of the unit that the reduce stream is at, so one of each does for all: its gradient in the reduce dtype, where that
  // is not G; and this rank's shard of the sum, for AdamW in the backward pass.
  bf16* narrow_gradient_ = nullptr;
  float* updated_gradient_ = nullptr;
  int last_large_ = -1;  // of the units with large gradients the one that a micro-batch reduces last; -1: there is none
  int64_t small_slot_ = 0, small_gradient_ = 0;      // elements of a slot that is not for large units
  std::vector<std::pair<int, Slot*>> next_gathers_;  // units that the next step begins with, and where they go
  std::vector<int> update_order_;                    // of AdamW, at a step's end
  int64_t releases_ = 0;
  size_t met_alone_ = 0;  // units for which the ranks have met one by one since the weights are new
  ops::AdamW* adamw_;
  float clip_ = 0;
  bool last_micro_batch_ = true;
  int trained_units_ = 0, reduced_ = 0;  // reduced: those whose gradient is complete in this step
  Peers peers_;
  const Event* held_ = nullptr;
  StepScalars* scalars_;
  double *partials_, *unit_sums_, *scalars_of_ranks_ = nullptr;
  Channel gather_channel_, reduce_channel_, replica_channel_;
  std::optional<Channel> small_reduce_channel_;  // on the same stream; see FsdpOptions
  std::optional<Channel> exchange_channel_;      // of parts of gradients; ranks that fetch do so on the reduce channel
  // What parts are received in, but for those that have other room. One for all units, since they are summed before the
  // reduce stream comes to the next; from a step's first use of it to its end.
  Buffer<char> received_;
  Fp8Gathers<T> fp8_;
  ExposedTime exposed_;
  Event scalars_ready_, scalars_summed_, counted_, wanted_;
  double optimizer_delay_ms_ = 0;
  IssueLog issued_;
};
