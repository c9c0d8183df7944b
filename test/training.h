// What the tests train: small models of every kind on known tokens, through all of Fsdp and Model, and what came of it.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lib/program/presets.h"
#include "model.h"
#include "test/catch.h"
#include "test/worst.h"

#ifdef __SANITIZE_ADDRESS__
constexpr bool sanitized = true;
#else
constexpr bool sanitized = false;
#endif

ModelConfig small(Arch arch, int64_t vocab);
ModelConfig small_on_gpu(Arch arch);
// Cuts of it. In the last two the backward pass begins in a unit that the forward pass has left in hand.
inline void whole_blocks(ModelConfig*) {}
inline void sublayers(ModelConfig* c) { c->wrap = Wrap::sublayer; }
inline void small_units(ModelConfig* c) { c->wrap = Wrap::size, c->wrap_min_params = 4000; }
inline void head_with_last_mlp(ModelConfig* c) { c->wrap = Wrap::size, c->wrap_min_params = 3200; }
inline void replicated_head(ModelConfig* c) { c->replicate_below = 1100; }
// Small enough that a sequence of 24 has compressed keys, blocks to choose from and tokens behind the window.
ModelConfig sparse(ModelConfig c, Phi phi);
// Queries together are wider than the model, and keys wider than values.
ModelConfig wide_heads(ModelConfig c);
constexpr Arch all_archs[] = {Arch::simple, Arch::rope, Arch::llama, Arch::mlp};
std::vector<std::pair<std::string, ModelConfig>> all_models(int64_t vocab);

struct Setup {
  ModelConfig model;
  int64_t rows = 12;  // of the global batch; those that do not divide leave padding
  int64_t micro_batches = 1;
  int64_t steps = 10;
  FsdpOptions fsdp;
  double lr = 3e-3, clip = 1;
  double delay_ms = 0;
  double optimizer_ms = 0;                    // by which AdamW is late too, in all
  std::pair<double, double> delays = {0, 0};  // of gathers and reductions alone; the last step's waits are then timed
  bool poison = false;
  bool silent = false;  // every target is padding
  Backend backend = Backend::cpu;
  bool share_gpu = false;
  bool graph = false;         // from the third step on
  bool gathers_next = false;  // steps end with the gathers that the next begins with, as they do with a graph
  int64_t no_graph = 0;       // but not every so many steps, as behind a save
  bool together = false;      // the host does not wait for one step before it issues the next
  bool validate = false;      // after each step, on the batch of the next
  bool fuse = true;
  int64_t skipped = 0;  // a step that the last rank leaves out, to make one more than the others instead
};

using Weights = std::map<std::string, std::vector<float>>;  // by parameter

struct Outcome {
  std::vector<double> losses, norms, validated, steps;
  std::vector<Issued> trace;               // of the last step
  Weights weights, trained;                // as gathered after init, and after the last step
  std::vector<std::vector<float>> shards;  // this rank's weights after the last step
  std::vector<NsaStats> nsa;               // of the last step, by block, where the model has diagnostics
  MemoryReport memory;
  int64_t reported = 0;
  std::pair<double, double> exposed = {0, 0};  // ms: the last step's waits for gathers, reductions, if they are timed
  int64_t growth = 0;  // bytes that the process, or the GPU's other memory, took from the tenth step on
};

int32_t token_at(int64_t step, int64_t row, int64_t at, int64_t vocab);

// Collective.
template <class T, class G>
Outcome train(const Setup& s, const World& world);
// Rank 0 alone; the others get an empty outcome.
template <class T, class G>
Outcome alone(const Setup& s) {
  return test_world().rank == 0 ? train<T, G>(s, World()) : Outcome();
}

// One step on one CPU rank. The gradient is read where AdamW leaves it: with beta1 = 0 the first moment is the
// gradient. profile: where the step's time went, if anyone asks.
using Profile = std::vector<std::pair<std::string, double>>;
template <class T, class G>
Weights gradients(const ModelConfig& c, int64_t batch, const World& world = World(), Profile* profile = nullptr);

double furthest(const std::vector<double>& x, const std::vector<double>& y);
inline bool same(const Outcome& a, const Outcome& b) { return a.losses == b.losses && a.norms == b.norms; }
// What moves, and with `uses` what is used, in a line: gather0 use0 gather1 ...
std::string text_of(const std::vector<Issued>& issued, bool uses = false);
// A shard's weights on the host.
inline std::vector<float> numbers_of(const Masters& w, int64_t n) {
  std::vector<float> numbers;
  for (int64_t i = 0; i < n; ++i) numbers.push_back(get(w, i));
  return numbers;
}
