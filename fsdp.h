// Fully sharded data parallelism (FSDP; ZeRO stage 3: Rajbhandari et al. 2020, arXiv 1910.02054; Zhao et al. 2023,
// arXiv 2304.11277), written out: gather -> use -> release -> reduce.
//
// A unit is a set of parameters that are gathered together (embedding, one block, head). They lie in one flat buffer,
// padded so that it cuts into W equal shards; rank r owns shard r of every unit, as an fp32 master copy with AdamW's
// two moments. Nothing else of the model lives on a rank for longer than it is used:
//
//   gather(u)     gather stream: cast my master shard into my part of a slot, all_gather the slot in place
//   use(u)        compute stream waits for that; returns the whole unit in the compute dtype
//   release(u)    compute stream is done reading; the slot may be gathered into again
//   gradient(u)   a slot to write the unit's whole gradient into; compute waits until its last reduction is done
//   reduce(u)     reduce stream: reduce_scatter the slot in place, add my part to my fp32 gradient shard
//   step(...)     global gradient norm, clip, AdamW on the shards
//
// There are as many slots as the options say, and no other buffers: their number is the rate limiter. A slot keeps its
// unit until it is gathered over, so the block that the forward pass ends with is not gathered again for the backward.
// This file knows units of parameters and nothing of transformers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/comm.h"
#include "lib/device.h"
#include "lib/ops.h"

struct Param {
  std::string name;
  std::vector<int64_t> shape;
  float mean, std;  // initial weights: normal(mean, std) clamped at 3 std, keyed by `id`, so they do not depend on W
  bool decay;       // weight decay: matrices only
  int unit;
  uint32_t id;            // place in the model's table
  int64_t numel, offset;  // offset in the unit's flat buffer
};

struct Unit {
  std::string name;
  std::vector<Param> params;  // matrices first: the decayed elements are a prefix of the flat buffer
  int64_t numel = 0, decayed = 0;
  int64_t padded = 0, shard = 0;  // padded = W * shard
};

// Shards are cut at multiples of this, so that every rank's part is aligned for vectors and for the network. A small
// unit may leave ranks at the end with padding only.
constexpr int64_t shard_align = 64;
// Fills in offset, numel, padded and shard. Sizes must be multiples of 8 (16-byte loads of any parameter).
void lay_out(std::vector<Unit>* units, int world_size);

struct FsdpOptions {
  Dtype reduce_dtype = Dtype::f32;  // G's dtype, or bf16 for a float G: the gradient is then cast before the reduction
  int gather_slots = 2, gradient_slots = 2;
  uint64_t seed = 0;
  bool timing = false;  // measure how long the compute stream waits for gathers and reductions
};

// What was issued, in order: for tests and for people.
struct Issued {
  enum Kind { all_gather, reduce_scatter, all_reduce, optimizer, use, release } kind;
  int unit;       // -1: all
  int64_t bytes;  // of the whole buffer; 0: nothing moves
  bool moves() const { return kind != use && kind != release; }
};
const char* name_of(Issued::Kind kind);
const char* stream_of(Issued::Kind kind);  // gather, reduce or compute

template <class T, class G>
class Fsdp {
 public:
  // Plans or takes the memory (see Memory). Collective over all ranks when `open`.
  Fsdp(Device& dev, const World& world, Transport transport, std::vector<Unit> units, const FsdpOptions& options,
       bool open);

  void init_weights();
  // Issues the gather of a unit unless a slot still holds it. With no slot free it does nothing, and use() gathers.
  void gather(int u);
  const T* use(int u);
  void release(int u);
  G* gradient(int u);
  void reduce(int u);
  // Mean-gradient scaling is the caller's: gradients arrive as sums over ranks and micro-batches. scalars[0] becomes
  // the sum of squares of the whole gradient, the others are summed over ranks (loss); all on the device.
  void step(const ops::AdamW& adamw, float clip);
  // Sums scalars() over the ranks without a step (validation).
  void sum_scalars();
  static constexpr int n_scalars = 2;
  double* scalars() const { return scalars_; }

  const std::vector<Unit>& units() const { return units_; }
  // This rank's shard of a unit: weights and AdamW's moments, unit(u).shard numbers each.
  float* master(int u) const { return state_[size_t(u)].master; }
  float* first_moment(int u) const { return state_[size_t(u)].m; }
  float* second_moment(int u) const { return state_[size_t(u)].v; }
  int64_t parameters() const;
  void begin_trace() { trace_.clear(), tracing_ = true; }
  const std::vector<Issued>& trace() const { return trace_; }
  // How long the compute stream stood still for communication, in ms, between two calls of begin_timing(). Two steps
  // are kept: that of the latest begin_timing() and the one before, which can be read while the latest still runs.
  // Needs FsdpOptions::timing.
  void begin_timing() {
    timed_step_ ^= 1;
    for (Waits& w : waits_[timed_step_]) w.used = 0;
  }
  void exposed_ms(bool latest, double* gathers, double* reductions);
  // Tests delay the streams with these.
  void set_delays(double gather_ms, double reduce_ms, double optimizer_ms);

 private:
  struct State {
    float *master, *m, *v;
    Buffer<float> gradient;  // my shard; lives from the unit's first reduction to the optimizer
  };
  struct Slot {
    Slot(Device& dev, T* p) : p(p), gathered(dev), released(dev) {}
    T* p;
    int unit = -1;        // what it holds, -1: nothing that is current
    bool in_use = false;  // gathered and not yet released
    int64_t last_release = 0;
    Event gathered, released;
  };
  struct GradientSlot {
    GradientSlot(Device& dev, G* p, bf16* narrow) : p(p), narrow(narrow), ready(dev), reduced(dev) {}
    G* p;
    bf16* narrow;  // the copy in the reduce dtype, where that is not G
    int unit = -1;
    Event ready, reduced;
  };
  void note(Issued::Kind kind, int unit, int64_t bytes);
  void timed_wait(int kind, const Event& e);

  Device& dev_;
  World world_;
  FsdpOptions options_;
  std::vector<Unit> units_;
  std::vector<State> state_;
  std::vector<Slot> slots_;
  std::vector<GradientSlot> gradient_slots_;
  size_t next_gradient_slot_ = 0;
  int64_t releases_ = 0;
  double *scalars_, *partials_;
  Channel gather_channel_, reduce_channel_;
  Event weights_ready_, scalars_ready_, scalars_summed_;
  double optimizer_delay_ms_ = 0;
  bool tracing_ = false;
  std::vector<Issued> trace_;
  struct Waits {
    std::vector<std::pair<Event, Event>> events;
    size_t used = 0;
  };
  Waits waits_[2][2];  // [step][gathers, reductions]
  int timed_step_ = 0;
};
