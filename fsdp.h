// Fully sharded data parallelism (FSDP; ZeRO stage 3: Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023,
// arXiv 2304.11277), written out: gather -> use -> release -> reduce.
//
// A unit is a set of parameters that are gathered together (embedding, one block, head). They lie in one flat buffer,
// padded so that it cuts into equal shards, one for each rank of a shard group; a rank owns its shard of every unit, as
// an fp32 master copy with AdamW's two moments. What is frozen lies behind what is trained, is cut on its own, and is
// gathered alone: it has no gradient and no moments (but for what one product makes together with what is trained).
// Nothing else of the model lives on a rank for longer than it is used:
//
//   gather(u)     gather stream: cast my master shard into my part of a slot, all_gather the slot in place
//   use(u)        compute stream waits for that; returns the whole unit in the compute dtype
//   release(u)    compute stream is done reading; the slot may be gathered into again
//   gradient(u)   a slot to write the unit's whole gradient into; compute waits until its last reduction is done
//   reduce(u)     reduce stream: reduce_scatter the slot in place, add my part to my fp32 gradient shard
//   end_step()    global gradient norm, clip, AdamW on the shards
//
// There are as many slots as the options say, and no other buffers: their number is the rate limiter. Between the
// backward pass and the next forward pass a slot keeps its unit until another is gathered into it.
//
// A shard group is all ranks, or fewer, and then the groups are replicas of each other: gradients are summed within the
// group by the reduce_scatter, and between the replicas of a shard by an all_reduce. A group of one rank is plain data
// parallelism. This file knows units of parameters and nothing of transformers.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lib/comm/comm.h"
#include "lib/device/device.h"
#include "lib/ops/ops.h"

struct Param {
  std::string name;
  std::vector<int64_t> shape;
  float mean,
      std;         // initial weights: normal(mean, std) clamped at 3 std, keyed by `id`, so they depend on nothing else
  bool decay;      // weight decay: matrices only
  bool joined;     // lies right behind the one before it, because one product takes both
  bool frozen;     // is not trained
  bool reduced;    // has a gradient that is reduced: trained, or joined with what is. lay_out fills it in
  int module;      // of the model, in the order of its forward pass
  uint32_t id;     // place in the model's table
  int64_t numel;   // the product of the shape
  int64_t offset;  // in the unit's buffer
};

// Parameters one behind the other, and padding, cut into equal shards (Zhao et al. 2023, section 3.2.3).
struct FlatParam {
  int64_t at = 0, part = 0;  // of it in the unit's buffer; of a rank's shard of it in the rank's part of the unit
  int64_t numel = 0;
  int64_t padded = 0, shard = 0;  // padded = shards * shard
};

struct Unit {
  std::string name;
  std::vector<Param> params;
  bool replicated = false;  // whole on every rank
  int reductions = 1;       // a micro-batch; 2 where two distant modules share a weight
  // Two flat parameters make the unit's buffer, and a rank's shards of them, in that order, its part of the unit: what
  // is reduced, with matrices first, so that the decayed elements are a prefix; and what is only gathered. Either may
  // be empty.
  FlatParam reduced, fixed;
  int64_t numel = 0, decayed = 0;
  int64_t padded = 0, shard = 0;  // of both
  bool trained() const;           // any of it
  // What of a parameter lies in shard `rank`: how many elements, the first of them, and its place in the rank's part.
  struct Piece {
    int64_t numel, first, at;
  };
  Piece piece(const Param& p, int rank) const;
};

// Shards are cut at multiples of this, so that every rank's part is aligned for vectors and for the network. A small
// flat parameter may leave ranks at the end with padding only.
constexpr int64_t shard_align = 64;
// Sorts the parameters; fills in their offsets, and all numbers of the units. Sizes of parameters must be multiples of
// 8 (16-byte loads of any).
void lay_out(std::vector<Unit>* units, int shards);

struct FsdpOptions {
  int shard_ranks = 0;  // ranks of a shard group, neighbours; 0: all. They must divide the world
  int shards(int world_size) const { return shard_ranks ? shard_ranks : world_size; }
  bool reshard_after_forward = true;  // false: a unit has a slot of its own and is gathered once a step
  int gather_slots = 2;               // 0: as many as units
  int gradient_slots = 2;
  Dtype reduce_dtype = Dtype::f32;  // G's dtype, or bf16 for a float G: the gradient is then cast before the reduction
  bool gather_wide = false;         // gather fp32 and cast to T behind the gather, instead of before it
  Dtype moment_dtype = Dtype::f32;  // or bf16
  bool reduce_last = false;  // keep whole gradients, in fp32, until a step's last micro-batch, and reduce them then
  bool update_in_backward = false;  // AdamW on a unit as soon as its gradient is reduced; excludes clipping
  ops::GradNorm norm = ops::GradNorm::two;
  bool gather_over_mpi = false;        // where reductions go over NCCL
  bool gather_by_copy_engine = false;  // see Channel
  bool whole_init = false;  // make the whole model's weights on every rank, then cut: to show what that costs
  uint64_t seed = 0;
};

// What was issued, in order: for tests and for people.
struct Issued {
  enum Kind {
    all_gather,
    reduce_scatter,
    all_reduce,
    broadcast,
    optimizer,
    use,
    release,
    cast,
    recompute_attention,
    recompute_mlp
  } kind;
  int unit;       // -1: all
  int64_t bytes;  // of the whole buffer; 0: nothing moves between ranks
  Dtype dtype;
  int ranks;             // that it is among
  double sent() const {  // by a rank
    return ::sent(kind == all_reduce ? Collective::all_reduce : Collective::all_gather, double(bytes), ranks);
  }
  bool moves() const { return bytes > 0 || kind == optimizer; }
};
const char* name_of(Issued::Kind kind);
const char* stream_of(const Issued& i);  // gather, reduce or compute

// What a step leaves on the device for the host to read, and a validation (its loss alone). Sums over all ranks.
struct StepScalars {
  double norm2;  // the square of the global gradient norm
  double loss;   // the sum of losses, as the model leaves it
  double steps;  // every rank's AdamW step: world size times the step, unless a rank has skipped or repeated one
};

template <class T, class G>
class Fsdp {
 public:
  // Plans or takes the memory (see Memory). Collective over all ranks when `open`. units: laid out for the ranks of a
  // shard group.
  Fsdp(Device& dev, const World& world, Transport transport, std::vector<Unit> units, const FsdpOptions& options,
       bool open);

  void init_weights();
  // adamw: on the host, pinned; it is read when the compute stream comes to it.
  void begin_step(const ops::AdamW* adamw, float clip);
  // last: the step's last micro-batch; gradients are complete when it has reduced them.
  void begin_micro_batch(bool last) { last_micro_batch_ = last; }
  // Issues the gather of a unit unless a slot still holds it. With no slot free it does nothing, and use() gathers.
  // late: only when the compute stream has come to this point.
  void gather(int u, bool late = false);
  // Gathers, late, what was not gathered ahead.
  const T* use(int u);
  // forget: the slot is empty then, whatever gathers cost.
  void release(int u, bool forget = false);
  G* gradient(int u);
  void reduce(int u);
  // Global gradient norm, clip, AdamW. Mean-gradient scaling is the caller's: gradients arrive as sums over ranks and
  // micro-batches. scalars() then holds the step's, whose loss the caller has put there before.
  void end_step();
  // Sums the loss in scalars() over the ranks without a step (validation).
  void sum_scalars();
  // No slot holds a unit from here on. At the end of each step, and wherever what is issued next must not depend on
  // what was issued before: weights that are new, and a step that is recorded once and replayed often.
  void empty_slots();
  StepScalars* scalars() const { return scalars_; }  // on the device

  const std::vector<Unit>& units() const { return units_; }
  // This rank's part of a unit: which shards it is made of, whether it is the first rank that holds them; weights, and
  // AdamW's moments of what is reduced.
  int shard_rank(int u) const { return units_[size_t(u)].replicated ? 0 : shard_world_.rank; }
  bool first_replica(int u) const {
    return replica_world_.rank == 0 && (!units_[size_t(u)].replicated || shard_world_.rank == 0);
  }
  float* master(int u) const { return state_[size_t(u)].master; }
  void* first_moment(int u) const { return state_[size_t(u)].m; }
  void* second_moment(int u) const { return state_[size_t(u)].v; }
  Dtype moment_dtype() const { return options_.moment_dtype; }
  int64_t parameters() const;
  void begin_trace() { trace_.clear(), tracing_ = true; }
  void note(Issued::Kind kind, int unit, int64_t bytes = 0, Dtype dtype = Dtype::f32, int ranks = 1);
  const std::vector<Issued>& trace() const { return trace_; }
  // How long the compute stream stood still for communication, in ms, from begin_timing() to the step's end. Two steps
  // are kept: that of the latest begin_timing() and the one before, which can be read while the latest still runs.
  void begin_timing() {
    timing_ = true;
    timed_step_ ^= 1;
    for (Waits& w : waits_[timed_step_]) w.used = 0;
  }
  void exposed_ms(bool latest, double* gathers, double* reductions);
  // Tests delay the streams with these.
  void set_delays(double gather_ms, double reduce_ms, double optimizer_ms);

 private:
  struct State {
    explicit State(Device& dev) : ready(dev) {}
    float* master;
    Event ready;  // to be gathered: AdamW, or what made the weights, is done with the master copy
    void *m = nullptr, *v = nullptr;
    // My shard of the gradient; lives from the unit's first reduction to the optimizer.
    Buffer<float> gradient;
    Buffer<float> whole;  // the whole gradient so far, where it is not reduced in every micro-batch
    int reductions = 0;   // so far in this micro-batch
    std::vector<std::pair<int64_t, int64_t>> trained;  // ranges of my shard that AdamW changes
  };
  struct Slot {
    Slot(Device& dev, T* p, float* wide) : p(p), wide(wide), gathered(dev), released(dev) {}
    T* p;
    float* wide;          // what is gathered, where that is not p
    int owner = -1;       // the one unit that goes here; -1: any
    int unit = -1;        // what it holds, -1: nothing that is current
    bool in_use = false;  // gathered and not yet released
    int64_t last_release = 0;
    Event gathered, released;
  };
  struct GradientSlot {
    GradientSlot(Device& dev, G* p, bf16* narrow) : p(p), narrow(narrow), ready(dev), reduced(dev) {}
    G* p;
    bf16* narrow;           // the copy in the reduce dtype, where that is not G
    float* mine = nullptr;  // my part in fp32, for AdamW in the backward pass
    int owner = -1;
    int unit = -1;
    Event ready, reduced;
    Buffer<float> done[2];  // what the reduction reads: given back when compute has waited for it
  };
  int shards(int u) const { return units_[size_t(u)].replicated ? 1 : shard_world_.size; }
  Slot* slot_of(int u);
  GradientSlot& gradient_slot_of(int u);
  void await(GradientSlot& s);
  void add_to_norm(Stream& s, int u, const float* gradient);
  void update(Stream& s, int u, const float* gradient, float clip);
  void timed_wait(int kind, const Event& e);
  void all_reduce_norm(Stream& s);

  Device& dev_;
  World shard_world_, replica_world_;
  FsdpOptions options_;
  std::vector<Unit> units_;
  std::vector<State> state_;
  std::vector<Slot> slots_;
  std::vector<GradientSlot> gradient_slots_;
  size_t next_gradient_slot_ = 0, rotating_ = 0;
  int64_t releases_ = 0;
  ops::AdamW* adamw_;
  float clip_ = 0;
  bool last_micro_batch_ = true, norm_begun_ = false;
  StepScalars* scalars_;
  double* partials_;
  Channel gather_channel_, reduce_channel_, replica_channel_;
  Event scalars_ready_, scalars_summed_, late_;
  double optimizer_delay_ms_ = 0;
  bool tracing_ = false;
  std::vector<Issued> trace_;
  struct Waits {
    std::vector<std::pair<Event, Event>> events;
    size_t used = 0;
  };
  Waits waits_[2][2];  // [step][gathers, reductions]
  int timed_step_ = 0;
  bool timing_ = false;
};
