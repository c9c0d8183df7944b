// Options -> a run with every choice made: what a user leaves open depends on the machine, on the number of ranks and
// on the preset.
//
//   Run r = resolve(options, world.size, gpu_count());        // throws UsageError: one line that names the option
//   with_types(r, [&](auto t, auto g) { Model<decltype(t), decltype(g)> model(...); });
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "nlohmann/json_fwd.hpp"

#include "lib/program/data_files.h"
#include "lib/program/options.h"
#include "model.h"

// How far training has come.
struct Trained {
  int64_t steps = 0, tokens = 0;
};

struct Run {
  Options o;
  std::string preset;  // empty: the model's sizes are those of --init
  ModelConfig model;
  FsdpOptions fsdp;
  Backend backend = Backend::cpu;
  Dtype dtype = Dtype::f32, reduce_dtype = Dtype::f32;
  int64_t batch = 0, grad_accum = 1,
          global_batch = 0;                      // sequences a rank's micro-batch; micro-batches; sequences a step
  int64_t steps = 0, last_step = 0, warmup = 0;  // length of the schedule; where this run ends
  Trained before;                                // what the checkpoint that it goes on from has behind it
  int64_t nan_skips = 0;                         // bad steps in a row that --on-nan skips; 0: it stops
  std::vector<std::string> notices;              // what was chosen that a user may not expect
  std::vector<DataFile> data_files = {};         // that --data names, once they are open
  TokenKind tokens = {};                         // of the data, then
  int64_t tokens_per_step() const { return global_batch * model.seq; }
  // Of an exported model: what is asked for, else no less than it is trained at.
  int64_t max_positions() const {
    return o.gives("max-positions") ? o.max_positions : std::max(o.max_positions, model.seq);
  }
};

// gpus: those that this process can use. before: --tokens counts from the first token of all, whatever was the length
// of sequences then.
Run resolve(const Options& o, int world_size, int gpus, const Trained& before = {});

// With --epochs the schedule follows from the data, which is opened when the rest is resolved: the whole steps in that
// many passes over so many sequences. Without, nothing changes. Throws UsageError if there is no whole step.
void limit_epochs(int64_t sequences, Run* r);

// How often a micro-batch multiplies a piece of a hidden layer, forward and backward, or of the logits; see Pieces.
int64_t pieces_of_a_micro_batch(const ModelConfig& c, int64_t batch, Dtype dtype);
// Refuses sizes that do not fit together, or not what the kernels can do.
void check_config(const ModelConfig& c, int64_t batch, Backend backend, Dtype dtype);
// ", matmuls in fp8": what of a run is, for a line about its types; empty: nothing.
std::string fp8_text(const ModelConfig& c);
// Refuses what a GPU, here or planned for, has no kernels for: fp8 as it is asked for, wide keys.
void check_gpu(const ModelConfig& c, int compute_capability, const std::string& gpu);

// Who moves what is gathered and reduced. check_collectives refuses what the options ask for and the ranks cannot do;
// choose_collectives takes the fastest of the rest where they leave it open. one_host: every shard group's ranks share
// a host; engines_pay: see copy_engines_pay.
void check_collectives(const Run& r, Transport transport, bool one_host);
void choose_collectives(Run* r, int ranks, Transport transport, bool one_host, bool engines_pay);

// All options, as they were resolved: for logs, and for checkpoints.
nlohmann::json settings(const Run& r);

// Calls f(T(), G()): T of parameters and activations, G of unsharded gradients: the reduction's own dtype where that
// loses nothing.
template <class F>
void with_types(const Run& r, F f) {
  if (r.dtype == Dtype::f32) f(float(), float());
  else if (r.reduce_dtype == Dtype::bf16) f(bf16(), bf16());
  else f(bf16(), float());
}
