// ./train: the training loop, from top to bottom. Start at main().
//
//   mpirun -np 4 ./train --seq 4096
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>

#include "cblas.h"
#include "nlohmann/json.hpp"

#include "build/version.h"
#include "lib/program/checkpoint.h"
#include "lib/program/data.h"
#include "lib/program/estimate.h"
#include "lib/program/options.h"
#include "lib/program/telemetry.h"
#include "model.h"

#if FSDP_CUDA
#include <cublasLt.h>
#endif
#ifndef FSDP_NCCL
#define FSDP_NCCL 0
#endif

namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;
using ll = long long;

int cores() { return int(std::max(1u, std::thread::hardware_concurrency())); }
double mib(int64_t bytes) { return double(bytes) / (1 << 20); }

// ------------------------------------------------------------------------------------------------- what is to be run

// Options with every choice made: what they leave open depends on the machine and on the number of ranks.
struct Run {
  Options o;
  std::string preset;
  ModelConfig model;
  FsdpOptions fsdp;
  Backend backend = Backend::cpu;
  Dtype dtype = Dtype::f32, reduce_dtype = Dtype::f32;
  int64_t batch = 0, grad_accum = 1, global_batch = 0;
  int64_t steps = 0, last_step = 0, warmup = 0;
  std::vector<std::string> notices;  // what was chosen that a user may not expect
  int64_t tokens_per_step() const { return global_batch * model.seq; }
};

// The knobs of sharding. gathered: the dtype in which parameters are gathered.
void shard(const Options& o, int world_size, Dtype gathered, Run* r) {
  FsdpOptions& f = r->fsdp;
  ModelConfig& m = r->model;
  const std::string hybrid = "hybrid:";
  if (o.shard.rfind(hybrid, 0) == 0) {
    const std::string k = o.shard.substr(hybrid.size());
    f.shard_ranks = k.size() < 7 && k.find_first_not_of("0123456789") == std::string::npos ? std::atoi(k.c_str()) : 0;
    REQUIRE_USER(f.shard_ranks > 0, "--shard %s: hybrid:K wants a number of ranks, as in hybrid:2", o.shard.c_str());
    REQUIRE_USER(world_size % f.shard_ranks == 0, "--shard %s: %d ranks cannot be cut into groups of %d",
                 o.shard.c_str(), world_size, f.shard_ranks);
  } else {
    REQUIRE_USER(o.shard == "full" || o.shard == "grad" || o.shard == "none",
                 "--shard %s: allowed is full, grad, none or hybrid:K", o.shard.c_str());
    f.shard_ranks = o.shard == "none" ? 1 : 0;
  }
  const bool keeps = o.shard == "grad" || o.shard == "none" || o.reshard_after_forward == 0;
  f.reshard_after_forward = !keeps;
  if (o.limit_all_gathers == "off") {
    f.gather_slots = 0;
  } else if (!o.limit_all_gathers.empty()) {
    const std::string& n = o.limit_all_gathers;
    f.gather_slots = n.size() < 3 && n.find_first_not_of("0123456789") == std::string::npos ? std::atoi(n.c_str()) : 0;
    REQUIRE_USER(f.gather_slots >= 1 && f.gather_slots <= 64,
                 "--limit-all-gathers %s: allowed is a number of slots from 1 to 64, or off", n.c_str());
  }
  f.gradient_slots = int(o.gradient_slots);
  f.reduce_dtype = r->reduce_dtype;
  f.gather_wide = !o.autocast.empty();
  f.moment_dtype = o.moments == "bf16" ? Dtype::bf16 : Dtype::f32;
  f.reduce_last = o.accum_sync == "last";
  f.update_in_backward = o.optimizer_in_backward == 1;
  f.norm = o.clip_norm == "inf" ? ops::GradNorm::inf : ops::GradNorm(std::atoi(o.clip_norm.c_str()));
  f.whole_init = o.meta_init == 0;
  f.gather_over_mpi = o.gather == "mpi";
  f.gather_by_copy_engine = o.gather == "copy-engine";
  f.seed = o.seed;

  const std::pair<const char*, Wrap> wraps[] = {
      {"block", Wrap::block}, {"sublayer", Wrap::sublayer}, {"auto", Wrap::size}, {"single", Wrap::single}};
  for (const auto& w : wraps)
    if (o.wrap == w.first) m.wrap = w.second;
  m.wrap_min_params = o.wrap_min_params;
  m.bucket_params = (o.bucket_mb << 20) / size_of(gathered);
  m.replicate_below = (o.replicate_below + size_of(gathered) - 1) / size_of(gathered);
  m.tied = o.tie_embeddings;
  for (size_t at = 0; at < o.freeze.size();) {
    const size_t end = std::min(o.freeze.find(',', at), o.freeze.size());
    if (end > at) m.frozen.push_back(o.freeze.substr(at, end - at));
    at = end + 1;
  }
  // Slots that are asked for are to be used.
  const int slots_ahead = f.gather_slots ? std::max(1, f.gather_slots - 1) : 1 << 20;
  m.forward_prefetch = o.forward_prefetch >= 0 ? int(o.forward_prefetch) : slots_ahead;
  m.backward_prefetch = o.backward_prefetch == "pre"    ? BackwardPrefetch::pre
                        : o.backward_prefetch == "post" ? BackwardPrefetch::post
                                                        : BackwardPrefetch::none;
}

Run resolve(const Options& o, int world_size, int gpus) {
  Run r;
  r.o = o;
  REQUIRE_USER(o.device != "gpu" || gpus > 0 || o.plan || o.show_schedule,
               FSDP_CUDA
                   ? "--device gpu: there is no GPU here that this process can use (nvidia-smi lists them); "
                     "--device cpu runs without"
                   : "--device gpu: this build has no GPU backend; install CUDA and rebuild, or use --device cpu");
  r.backend = o.device == "gpu" || (o.device == "auto" && (gpus > 0 || o.plan || o.show_schedule)) ? Backend::gpu
                                                                                                   : Backend::cpu;
  const bool gpu = r.backend == Backend::gpu;
  const Preset p = preset_named(!o.preset.empty() ? o.preset : gpu ? "m7c" : "tiny");
  r.preset = p.name;
  if (!gpu && o.device == "auto")
    r.notices.push_back(strf("no GPU here: training preset %s in %s on the CPU", p.name,
                             o.param_dtype.empty() ? "fp32" : o.param_dtype.c_str()));

  auto or_preset = [](int64_t given, int64_t preset) { return given ? given : preset; };
  ModelConfig& m = r.model;
  m = p.model;
  if (!o.arch.empty()) m.arch = arch_named(o.arch);
  m.dim = or_preset(o.dim, m.dim), m.depth = or_preset(o.depth, m.depth), m.vocab = or_preset(o.vocab, m.vocab);
  m.heads = or_preset(o.heads, m.heads), m.kv_heads = or_preset(o.kv_heads, m.kv_heads);
  m.seq = or_preset(o.seq, m.seq), m.rope_base = o.rope_base;
  // A width given alone keeps the preset's proportion of the MLP.
  m.hidden = or_preset(o.hidden, o.dim ? p.model.hidden * m.dim / p.model.dim : m.hidden);

  REQUIRE_USER(o.attn.empty() || m.attends(), "--attn %s: architecture %s has no attention", o.attn.c_str(),
               name_of(m.arch));
  m.sparse = m.attends() && o.attn != "dense";
  REQUIRE_USER(!o.nsa_stats || m.sparse, "--nsa-stats: %s has none", m.attends() ? "dense attention" : name_of(m.arch));
  m.nsa.block = o.nsa_block, m.nsa.stride = o.nsa_stride, m.nsa.select_block = o.nsa_select_block;
  m.nsa.selected = o.nsa_selected, m.nsa.window = o.nsa_window;
  m.nsa.phi = o.nsa_phi == "mean" ? Phi::mean : o.nsa_phi == "linear" ? Phi::linear : Phi::mlp;

  const std::pair<const char*, Recompute> modes[] = {{"none", Recompute::none},
                                                     {"mlp", Recompute::mlp},
                                                     {"attn", Recompute::attn},
                                                     {"both", Recompute::both},
                                                     {"block", Recompute::block}};
  m.diagnostics = o.nsa_stats;
  for (const auto& mode : modes)
    if (o.recompute == mode.first) m.recompute = mode.second;
  m.keep_attention = o.keep_attention == 1;

  auto dtype = [&](const std::string& name, Dtype otherwise) {
    return name.empty() ? otherwise : name == "bf16" ? Dtype::bf16 : Dtype::f32;
  };
  const bool autocast = !o.autocast.empty();
  r.dtype = autocast ? Dtype::bf16 : dtype(o.param_dtype, gpu ? Dtype::bf16 : Dtype::f32);
  r.reduce_dtype = dtype(o.reduce_dtype, autocast ? Dtype::f32 : r.dtype);
  shard(o, world_size, autocast ? Dtype::f32 : r.dtype, &r);

  // A preset's accumulation holds as long as nothing is said about batches.
  const bool batch_said = o.batch || o.global_batch || o.grad_accum != 1;
  r.grad_accum = batch_said ? o.grad_accum : p.grad_accum;
  const int64_t places = world_size * r.grad_accum;
  r.batch = o.batch ? o.batch : o.global_batch ? (o.global_batch + places - 1) / places : p.batch;
  r.global_batch = o.global_batch ? o.global_batch : r.batch * places;
  // Rows are dealt out rank by rank, so the first ranks may hold one more.
  const int64_t most = (r.global_batch + world_size - 1) / world_size;
  REQUIRE_USER(
      most <= r.batch * r.grad_accum,
      "--global-batch %lld: %d ranks x --batch %lld x --grad-accum %lld hold only %lld sequences; --grad-accum "
      "%lld would do",
      ll(r.global_batch), world_size, ll(r.batch), ll(r.grad_accum), ll(places * r.batch),
      ll((most + r.batch - 1) / r.batch));
  check_config(m, r.batch, r.backend, r.dtype);
  const std::vector<Unit> units = parameter_table(m);
  for (const std::string& start : m.frozen) {
    bool any = false;
    for (const Unit& u : units)
      for (const Param& p : u.params) any = any || p.name.compare(0, start.size(), start) == 0;
    REQUIRE_USER(any, "--freeze %s: no parameter's name begins so; --show-params lists them", start.c_str());
  }
  REQUIRE_USER(std::any_of(units.begin(), units.end(), [](const Unit& u) { return u.trained(); }),
               "--freeze %s: nothing is left to train; leave a name out", o.freeze.c_str());

  const int64_t for_tokens = (o.tokens + r.tokens_per_step() - 1) / r.tokens_per_step();
  r.steps = o.steps ? o.steps : o.tokens ? for_tokens : gpu ? 200 : 32;
  r.last_step = r.steps;
  if (o.tokens) r.last_step = std::min(r.last_step, for_tokens);
  if (o.stop_after) r.last_step = std::min(r.last_step, o.stop_after);
  r.warmup = o.warmup >= 0 ? o.warmup : std::min<int64_t>(100, r.steps / 10);
  return r;
}

// Linear warm-up, then half a cosine down to min_lr_ratio at the schedule's end. step counts from 1.
double learning_rate(const Run& r, int64_t step) {
  if (step <= r.warmup) return r.o.lr * double(step) / double(r.warmup);
  const double progress = double(step - r.warmup) / double(std::max<int64_t>(1, r.steps - r.warmup));
  const double cosine = 0.5 * (1 + std::cos(3.14159265358979323846 * std::min(1.0, progress)));
  return r.o.lr * (r.o.min_lr_ratio + (1 - r.o.min_lr_ratio) * cosine);
}

// ------------------------------------------------------------------------------------------------------ what is said

std::string versions() {
  std::string cuda = "none (CPU backend alone)";
#if FSDP_CUDA
  const size_t lt = cublasLtGetVersion();
  cuda = strf("%d.%d, cuBLASLt %zu.%zu.%zu", CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10, lt / 10000,
              lt / 100 % 100, lt % 100);
#endif
  return strf("fsdp.cu %s\nCUDA %s\nNCCL %s\nMPI  %s\n", FSDP_COMMIT, cuda.c_str(), nccl_version().c_str(),
              mpi_version().c_str());
}

json hardware(const Device* dev, int gpus) {
  json j = {{"gpus", gpus}, {"cpus", cores()}};
  if (dev) {
    j["name"] = dev->name, j["memory_bytes"] = dev->total_bytes;
  } else {
    Device d(gpus > 0 ? Backend::gpu : Backend::cpu, 0);
    j["name"] = d.name, j["memory_bytes"] = d.total_bytes;
  }
  return j;
}

std::string memory_table(const MemoryReport& m, int world_size) {
  std::string text = strf("memory of a rank of %d, MiB %12s %14s %10s\n", world_size, "init", "before step 1", "peak");
  for (int p = 0; p < purposes; p++)
    text += strf("  %-26s %12.1f %14.1f %10.1f\n", name_of(Purpose(p)), mib(m.init[p]), mib(m.before_step[p]),
                 mib(m.peak[p]));
  text += strf("  %-26s %12.1f %14.1f %10.1f\n", "sum", mib(m.init_total), mib(m.before_step_total), mib(m.live_peak));
  text += strf("  %-26s %38.1f   the peak: %s; largest there: %s\n", "arena", mib(m.arena), m.peak_phase.c_str(),
               m.largest.c_str());
  return text;
}

std::string parameters_text(const ModelConfig& c, const FsdpOptions& o, int world_size) {
  std::vector<Unit> units = parameter_table(c);
  const int shards = o.shards(world_size);
  lay_out(&units, shards);
  std::string text = strf("%-28s %-18s %14s  %-22s %s\n", "parameter", "shape", "elements", "initial weights", "decay");
  int64_t total = 0;
  for (const Unit& u : units) {
    for (const Param& p : u.params) {
      std::string shape;
      for (int64_t n : p.shape) shape += (shape.empty() ? "" : " x ") + std::to_string(n);
      const std::string init = p.std > 0 ? strf("normal(%g, %.4g)", p.mean, p.std) : strf("%g", p.mean);
      text +=
          strf("%-28s %-18s %14s  %-22s %s\n", p.name.c_str(), shape.c_str(), grouped(p.numel).c_str(), init.c_str(),
               p.frozen  ? "frozen"
               : p.decay ? "yes"
                         : "no");
    }
    text += strf("  unit %-21s %-18s %14s  ", u.name.c_str(), "", grouped(u.numel).c_str());
    text += u.replicated || shards == 1 ? "whole on every rank\n"
                                        : strf("shard of a rank of %d: %s, padding %s\n", shards,
                                               grouped(u.shard).c_str(), grouped(u.padded - u.numel).c_str());
    total += u.numel;
  }
  return text + strf("%s parameters\n", grouped(total).c_str());
}

json stats_json(const NsaStats* blocks, const std::vector<NsaKernels>& kernels) {
  json all = json::array();
  for (size_t i = 0; i < kernels.size(); i++) {
    const NsaStats& b = blocks[i];
    json ran = json::object();
    for (int s = 0; s < nsa_stages; s++)
      if (kernels[i].latest[s].code) ran[name_of(Stage(s))] = name_of(kernels[i].latest[s]);
    all.push_back({{"gate_entropy_mean", b.entropy_mean},
                   {"gate_entropy_min", b.entropy_min},
                   {"gate_max", b.gate_max},
                   {"branch_shares", {b.share[0], b.share[1], b.share[2]}},
                   {"gate_collapse_frac", b.collapsed},
                   {"sel_k_mean", b.keys_mean},
                   {"sel_k_max", b.keys_max},
                   {"sel_rows", b.rows},
                   {"sel_pct_at_max", b.at_max},
                   {"kernels", ran},
                   {"kernel_calls", kernels[i].calls},
                   {"general", kernels[i].general}});
  }
  return {{"nsa", all}};
}

// host_ms: how long the host took to issue the step. Where that is as long as the step, the device waited for it.
void report_profile(const std::vector<std::pair<std::string, double>>& times, double host_ms, Telemetry* telemetry) {
  if (!telemetry) return;
  double sum = 0;
  json j = json::object();
  for (const auto& t : times) sum += t.second, j[t.first] = t.second;
  telemetry->note(strf("the last step on the device, ms (the host issued it in %.2f)", host_ms));
  for (const auto& t : times)
    telemetry->note(strf("  %-36s %9.3f  %5.1f %%", t.first.c_str(), t.second, 100 * t.second / sum));
  telemetry->note(strf("  %-36s %9.3f", "sum", sum));
  telemetry->record({{"profile_ms", j}, {"host_ms", host_ms}});
}

std::string schedule_text(const std::vector<Issued>& issued, const ModelConfig& c, int world_size) {
  std::vector<Unit> units = parameter_table(c);
  std::string text = strf("%5s  %-8s %-19s %-20s %12s\n", "", "stream", "what", "unit", "MiB");
  double gathered = 0, reduced = 0;
  for (size_t i = 0; i < issued.size(); i++) {
    const Issued& e = issued[i];
    const std::string unit = e.unit < 0 ? "all" : units[size_t(e.unit)].name;
    text += strf("%5zu  %-8s %-19s ", i + 1, stream_of(e), name_of(e.kind));
    if (e.bytes == 0) text += unit + "\n";
    else if (e.ranks == 1) text += strf("%-20s one rank: nothing moves\n", unit.c_str());
    else text += strf("%-20s %12.3f  %s, %d ranks\n", unit.c_str(), mib(e.bytes), name_of(e.dtype), e.ranks);
    (e.kind == Issued::all_gather ? gathered : reduced) += e.sent() / (1 << 20);
  }
  return text + strf("a rank of %d sends and receives %.1f MiB in gathers and %.1f MiB in reductions\n", world_size,
                     gathered, reduced);
}

// The choices that are no event of the schedule.
std::string choices_text(const Run& r, Transport transport) {
  const FsdpOptions& f = r.fsdp;
  auto count = [](int n, const char* what) { return strf("%d %s%s", n, what, n == 1 ? "" : "s"); };
  std::string text = "gathers by ";
  text += f.gather_by_copy_engine                            ? "copy engines"
          : f.gather_over_mpi || transport == Transport::mpi ? "MPI"
          : transport == Transport::nccl                     ? "NCCL's kernels"
                                                             : "nobody";
  text += ", into " +
          (!f.reshard_after_forward || f.gather_slots == 0 ? "a slot for each unit" : count(f.gather_slots, "slot"));
  return text + strf("; %s; moments in %s; %s; weights made %s; %s\n", count(f.gradient_slots, "gradient slot").c_str(),
                     name_of(f.moment_dtype),
                     r.o.clip > 0 ? ("clipping by the norm " + r.o.clip_norm).c_str() : "no clipping",
                     f.whole_init ? "whole, then cut" : "sharded",
                     r.o.graph ? "a step is one CUDA graph" : "kernels are issued one by one");
}

// All options, as they were resolved: for logs, and for checkpoints.
json settings(const Run& r) {
  json j = to_json(r.o);
  const ModelConfig& m = r.model;
  j.update({{"preset", r.preset},
            {"arch", name_of(m.arch)},
            {"attn", m.sparse      ? "nsa"
                     : m.attends() ? "dense"
                                   : ""},
            {"dim", m.dim},
            {"depth", m.depth},
            {"heads", m.heads},
            {"kv_heads", m.kv_heads},
            {"hidden", m.hidden},
            {"vocab", m.vocab},
            {"seq", m.seq},
            {"batch", r.batch},
            {"grad_accum", r.grad_accum},
            {"global_batch", r.global_batch},
            {"steps", r.steps},
            {"warmup", r.warmup},
            {"param_dtype", name_of(r.dtype)},
            {"reduce_dtype", name_of(r.reduce_dtype)},
            {"device", r.backend == Backend::gpu ? "gpu" : "cpu"}});
  return j;
}

// estimated_ms: of a step; negative if nothing is known of the chip.
json header(const Run& r, const Device& dev, const World& world, Transport transport, int gpus_used,
            double estimated_ms, const std::string& command) {
  json config = settings(r);
  config.update({{"limit_all_gathers", r.fsdp.gather_slots},
                 {"reshard_after_forward", r.fsdp.reshard_after_forward},
                 {"gather", r.fsdp.gather_by_copy_engine   ? "copy-engine"
                            : r.fsdp.gather_over_mpi       ? "mpi"
                            : transport == Transport::none ? "none"
                                                           : name_of(transport)},
                 {"parameters", parameter_count(r.model)},
                 {"flops_per_token", flops_per_token(r.model)}});
  json h = hardware(&dev, gpus_used);
  h["ranks"] = world.size, h["transport"] = name_of(transport);
  const MemoryReport mem = dev.mem.report();
  return {{"command", command},
          {"commit", FSDP_COMMIT},
          {"versions", versions()},
          {"config", config},
          {"hardware", h},
          {"estimated_ms", estimated_ms < 0 ? json() : json(estimated_ms)},
          {"memory",
           {{"init_mib", mib(mem.init_total)},
            {"before_step_mib", mib(mem.before_step_total)},
            {"planned_peak_mib", mib(mem.arena)},
            {"live_peak_mib", mib(mem.live_peak)},
            {"peak_mib", mib(dev.mem.device_reported_bytes())}}}};
}

// --------------------------------------------------------------------------------------------------------- the data

// This rank's rows of a step, in the layout that the model loads. Rows are numbered over all ranks: rank r has those
// from r * global / W on, and puts them into its micro-batches one after another; places left over are padding.
void fill_batches(const Run& r, const World& world, const Sampler& sampler, int64_t first_sequence, int64_t rows_in_all,
                  int64_t micro_batches, int32_t* host) {
  const int64_t T = r.model.seq, M = r.batch * T, ints = batch_ints(r.model, r.batch);
  const int64_t from = world.rank * rows_in_all / world.size, to = (world.rank + 1) * rows_in_all / world.size;
  for (int64_t m = 0; m < micro_batches; m++, host += ints) {
    for (int64_t i = 0; i < r.batch; i++) {
      const int64_t row = from + m * r.batch + i;
      int32_t *tokens = host + i * T, *targets = host + M + i * T;
      if (row < to) {
        sampler.sequence(first_sequence + row, tokens, targets);
      } else {
        std::fill(tokens, tokens + T, 0);
        std::fill(targets, targets + T, -1);
      }
    }
    index_batch(r.model, r.batch, host);
  }
}

// --------------------------------------------------------------------------------------------------------- the loop

struct Context {
  Device& dev;
  const World& world;
  Transport transport;
  int gpus_used;
  Corpus *data, *val_data;
  Telemetry* telemetry;  // rank 0's
  const json& state;     // of the checkpoint that the run goes on from; null: none
};

// The programs whose memory is planned: one step, and one batch of a validation. The host's pointers are not read
// unless the device's mode is run.
template <class T, class G>
void step_program(Device& dev, Model<T, G>& model, const Run& r, const int32_t* host, const ops::AdamW* adamw,
                  Event& copied) {
  dev.mem.begin("step");
  model.begin_step(adamw, float(r.o.clip));
  const double scale = 1.0 / double(r.tokens_per_step());
  for (int64_t m = 0; m < r.grad_accum; m++)
    model.forward_backward(host + m * batch_ints(r.model, r.batch), scale, m == 0, m + 1 == r.grad_accum, copied);
  model.end_step();
  dev.mem.end();
}
template <class T, class G>
void validation_program(Device& dev, Model<T, G>& model, const int32_t* host, bool first, Event& copied) {
  dev.mem.begin("validation");
  model.evaluate(host, first, copied);
  dev.mem.end();
}

// Dry run: every take and give of the programs, no kernel. Afterwards dev.mem knows the peak, and an estimate the time
// of a step that follows another; returns what a step issues.
template <class T, class G>
std::vector<Issued> plan(Device& dev, const World& world, Transport transport, const Run& r) {
  dev.mode = Mode::plan;
  ops::keep_workspace(dev);
  Model<T, G> model(dev, world, transport, r.model, r.batch, r.fsdp, false);
  Event copied(dev);
  Timeline* const timeline = std::exchange(dev.timeline, nullptr);  // of the step alone
  model.init_weights();
  dev.timeline = timeline;
  model.fsdp.begin_trace();
  step_program(dev, model, r, nullptr, nullptr, copied);
  std::vector<Issued> issued = model.fsdp.trace();
  if (dev.timeline && r.o.graph == 0) {  // one graph begins when the one before has ended
    dev.timeline->next_step();
    step_program(dev, model, r, nullptr, nullptr, copied);
  }
  if (r.o.val_every > 0) validation_program(dev, model, nullptr, true, copied);
  return issued;
}

// What a checkpoint says beside weights and moments. The order of the data and the learning rate follow from the step.
json state_at(const Run& r, int64_t step) {
  return {{"step", step}, {"sequences", step * r.global_batch}, {"commit", FSDP_COMMIT}, {"options", settings(r)}};
}

// What a run that goes on takes over, and may be told otherwise.
const std::vector<std::string> carried = {"rope-base",    "nsa-block",  "nsa-stride", "nsa-select-block",
                                          "nsa-selected", "nsa-window", "lr",         "min-lr-ratio",
                                          "warmup",       "beta1",      "beta2",      "eps",
                                          "weight-decay", "clip",       "clip-norm",  "data",
                                          "val-data",     "val-every"};

// What the command line leaves open is the checkpoint's, but for what a run may shed: frozen parameters are trained
// when they are not named again, and how a model is sharded, rounded and kept is each run's own.
void take_up(const json& state, Options* o) {
  if (state.is_null()) return;
  const json& was = state.at("options");
  std::vector<std::string> names = carried;
  auto also = [&](std::initializer_list<const char*> more) { names.insert(names.end(), more.begin(), more.end()); };
  also({"nsa-phi", "seed", "val-batches"});
  if (!o->gives("preset") || o->preset == was.at("preset"))
    also({"arch", "attn", "dim", "depth", "heads", "kv-heads", "hidden", "vocab", "seq", "tie-embeddings"});
  if (!o->gives("batch") && !o->gives("global-batch") && !o->gives("grad-accum")) also({"global-batch", "grad-accum"});
  if (!o->gives("tokens")) also({"steps"});
  take_over(was, names, o);
}

// Refuses what contradicts the checkpoint and does not show in its tensors; says what goes on in another way.
void compare(const json& state, Run* r) {
  if (state.is_null()) return;
  const json now = settings(*r), &was = state.at("options");
  auto differs = [&](const std::string& name) { return now.at(key_of(name)) != was.at(key_of(name)); };
  auto here = [&](const std::string& name) { return "--" + name + " " + now.at(key_of(name)).dump(); };
  auto there = [&](const std::string& name) { return was.at(key_of(name)).dump(); };
  for (const char* name : {"seed", "heads", "kv-heads"})
    REQUIRE_USER(!differs(name), "%s: the checkpoint was made with %s", here(name).c_str(), there(name).c_str());
  REQUIRE_USER(!differs("global-batch"),
               "a step of %lld sequences: the checkpoint was made with --global-batch %s, and its place in the data "
               "counts in those",
               ll(r->global_batch), there("global-batch").c_str());
  std::vector<std::string> names = {"seq", "steps", "freeze"};
  names.insert(names.end(), carried.begin(), carried.end());
  std::string others;
  for (const std::string& name : names)
    if (differs(name)) others += (others.empty() ? " " : ", ") + here(name) + " (" + there(name) + " there)";
  if (!others.empty()) r->notices.push_back("not as in the checkpoint:" + others);
}

// Returns what is wrong, the same on all ranks, with what the user asked for, or nothing. What else goes wrong throws.
template <class T, class G>
std::string train(const Context& c, const Run& r) {
  Device& dev = c.dev;
  const World& world = c.world;
  const bool speaks = world.rank == 0;

  // Everything that can fail for want of memory or of a file has done so before this point, on all ranks together.
  dev.mem.rewind();
  dev.mode = Mode::tune;
  ops::keep_workspace(dev);
  Model<T, G> model(dev, world, c.transport, r.model, r.batch, r.fsdp, true);
  const int64_t ints = batch_ints(r.model, r.batch);
  // The host is one step ahead of the device: two of each, for the step that runs and the one being prepared.
  std::vector<HostBuffer<int32_t>> batches;
  std::vector<HostBuffer<double>> results;
  std::vector<HostBuffer<char>> stats;
  std::vector<NsaKernels> kernels[2];
  std::vector<Graph> graphs;
  std::vector<HostBuffer<ops::AdamW>> adamw;
  std::vector<Event> copied, started, done, val_done;
  constexpr int scalars = Fsdp<T, G>::n_scalars;
  for (int i = 0; i < 2; i++) {
    batches.emplace_back(dev, ints * r.grad_accum);
    adamw.emplace_back(dev, 1);
    results.emplace_back(dev, 2 * scalars);  // the step's, and validation's
    stats.emplace_back(dev, r.o.nsa_stats ? r.model.depth * int64_t(sizeof(NsaStats)) : 1);
    graphs.emplace_back(dev);
    copied.emplace_back(dev), val_done.emplace_back(dev);
    started.emplace_back(dev, Event::timed), done.emplace_back(dev, Event::timed);
  }
  HostBuffer<int32_t> val_batch(dev, ints);
  Event val_copied(dev);
  step_program(dev, model, r, batches[0].get(), adamw[0].get(), copied[0]);  // times the matmuls
  if (r.o.val_every > 0) validation_program(dev, model, val_batch.get(), true, val_copied);
  dev.mode = Mode::run;
  model.init_weights();
  dev.compute().synchronize();
  const std::vector<Part> parts = parts_of(model.fsdp), own_parts = parts_of(model.fsdp, true);
  std::unique_ptr<Saver> saver;
  int64_t done_before = 0, saved = 0;
  try {
    auto note = [&](const std::string& line) { c.telemetry->note(line); };
    if (!c.state.is_null())
      load_checkpoint(r.o.resume, r.o.save, dev, world, parts, note).at("step").get_to(done_before);
    if (!r.o.save.empty()) saver = std::make_unique<Saver>(dev, world, r.o.save, r.o.keep, own_parts, note);
  } catch (const UsageError& e) { return e.what(); }
  if (speaks && done_before > 0)
    c.telemetry->note(strf("going on after step %lld of %s", ll(done_before), r.o.resume.c_str()));

  const Sampler sampler{c.data, r.model.seq, r.o.seed};
  const Sampler val_sampler{c.val_data, r.model.seq, r.o.seed, false};
  const int64_t val_rows = c.val_data ? std::min(val_sampler.windows(), r.o.val_batches * r.batch * world.size) : 0;
  const double peak_tflops = peak_bf16_tflops(dev.name) * c.gpus_used, flops = flops_per_token(r.model);
  if (speaks && r.backend == Backend::gpu && peak_tflops == 0)
    c.telemetry->note(strf("unknown chip %s: no MFU is given", dev.name.c_str()));

  auto report = [&](int64_t step, bool latest) {
    const int slot = int(step % 2);
    const bool validated = r.o.val_every > 0 && step % r.o.val_every == 0;
    synchronize(validated ? val_done[slot] : done[slot]);
    dev.check();
    const double steps = results[slot][2], at_one = double(step) * world.size;
    if (steps != at_one && speaks)  // all ranks see it, and one says it
      abort_all_ranks(strf("step %lld: the ranks are not all at one step: theirs sum to %.0f and not to %.0f. A rank "
                           "has skipped or repeated one, and weights are of several steps; --resume a step before this",
                           ll(step), steps, at_one),
                      1);
    if (!speaks) return;
    StepRecord s = {};
    s.step = step;
    s.grad_norm = std::sqrt(results[slot][0]);
    s.loss = results[slot][1] / double(r.tokens_per_step());
    s.val_loss = validated ? results[slot][scalars + 1] / double(val_rows * r.model.seq) : std::nan("");
    s.lr = learning_rate(r, step);
    s.step_ms = elapsed_ms(started[slot], done[slot]);
    s.tokens_per_sec = double(r.tokens_per_step()) / s.step_ms * 1e3;
    s.mfu = peak_tflops > 0 ? flops * s.tokens_per_sec / (peak_tflops * 1e12) : -1;
    s.peak_mib = mib(dev.mem.device_reported_bytes());
    s.exposed_gather_ms = s.exposed_reduce_ms = -1;
    if (r.o.comm_timing) model.fsdp.exposed_ms(latest, &s.exposed_gather_ms, &s.exposed_reduce_ms);
    if (model.stats()) s.more = stats_json(reinterpret_cast<const NsaStats*>(stats[slot].get()), kernels[slot]);
    c.telemetry->step(s);
  };

  // All ranks have the same norm. What is not finite makes weights that are not, for ever.
  auto diverged = [&](int64_t step) { return !std::isfinite(results[int(step % 2)][0]); };
  auto divergence = [&](int64_t step) {
    dev.compute().synchronize();  // with a step that is still running
    return strf(
        "step %lld: the norm of the gradient is %g: the run has diverged, and nothing of it is saved from here; "
        "a lower --lr, a longer --warmup or a --clip would help%s",
        ll(step), std::sqrt(results[int(step % 2)][0]),
        saver ? ("; --resume " + r.o.save + " goes on from its latest step").c_str() : "");
  };

  auto loop = [&]() -> std::string {
    const auto begin = Clock::now();
    int64_t step = done_before + 1;
    for (; step <= r.last_step; step++) {
      const int slot = int(step % 2);
      synchronize(done[slot]);  // two steps ago
      fill_batches(r, world, sampler, (step - 1) * r.global_batch, r.global_batch, r.grad_accum, batches[slot].get());

      Stream& s = dev.compute();
      const bool profiled = r.o.profile && step == r.last_step;
      if (profiled) dev.start_profile();
      const auto issued = Clock::now();
      s.record(started[slot]);
      dev.mark("tokens");
      if (r.o.comm_timing) model.fsdp.begin_timing();
      adamw[slot][0] = ops::AdamW(float(learning_rate(r, step)), float(r.o.beta1), float(r.o.beta2), float(r.o.eps),
                                  float(r.o.weight_decay), step);
      auto issue = [&] { step_program(dev, model, r, batches[slot].get(), adamw[slot].get(), copied[slot]); };
      // The first two run as they are: what is loaded or connected at its first use cannot be part of a graph.
      if (r.o.graph == 0 || step <= done_before + 2) {
        issue();
      } else {
        if (!graphs[slot].made()) {
          graphs[slot].make(issue);
          const Graph::Nodes& n = graphs[slot].nodes();
          if (speaks && step == done_before + 3) {
            c.telemetry->record({{"graph",
                                  {{"kernels", n.kernels},
                                   {"nccl_kernels", n.nccl_kernels},
                                   {"copies", n.copies},
                                   {"others", n.others}}}});
            c.telemetry->note(
                strf("a step is a graph of %d kernels, %d of them NCCL's, %d copies and clears, %d other nodes",
                     n.kernels, n.nccl_kernels, n.copies, n.others));
          }
        }
        graphs[slot].launch();
      }
      s.copy(results[slot].get(), model.fsdp.scalars(), scalars * 8);
      if (model.stats()) s.copy(stats[slot].get(), model.stats(), r.model.depth * int64_t(sizeof(NsaStats)));
      kernels[slot] = model.kernels();
      s.record(done[slot]);
      if (profiled) {
        const double host_ms = std::chrono::duration<double, std::milli>(Clock::now() - issued).count();
        report_profile(dev.end_profile(), host_ms, speaks ? c.telemetry : nullptr);
      }

      if (r.o.val_every > 0 && step % r.o.val_every == 0) {
        const int64_t rows = r.batch * world.size;
        for (int64_t at = 0; at < val_rows; at += rows) {
          synchronize(val_copied);
          fill_batches(r, world, val_sampler, at, std::min(rows, val_rows - at), 1, val_batch.get());
          validation_program(dev, model, val_batch.get(), at == 0, val_copied);
        }
        model.finish_evaluation();
        s.copy(results[slot].get() + scalars, model.fsdp.scalars(), scalars * 8);
        s.record(val_done[slot]);
      }

      if (step > done_before + 1) {
        report(step - 1, false);
        if (diverged(step - 1)) return divergence(step - 1);
      }
      if (saver) {
        saver->check();
        if (r.o.save_every > 0 && step % r.o.save_every == 0 && (step == r.last_step || saver->idle(step)))
          saver->begin(saved = step, state_at(r, step));
      }
      if (r.o.minutes > 0) {  // rank 0's clock counts
        const double minutes = std::chrono::duration<double>(Clock::now() - begin).count() / 60;
        if (broadcast_text(minutes >= r.o.minutes ? "stop" : "go on") == "stop") break;
      }
    }
    const int64_t last = std::min(step, r.last_step);
    if (last > done_before) {
      report(last, true);
      if (diverged(last)) return divergence(last);
      if (speaks && last < r.last_step) c.telemetry->note(strf("stopped after step %lld: time is up", ll(last)));
      if (saver && saved != last) saver->begin(last, state_at(r, last));
    }
    if (saver) saver->finish();
    dev.compute().synchronize();
    if (!r.o.export_to.empty()) {
      try {
        export_safetensors(r.o.export_to, r.o.export_dtype == "bf16" ? Dtype::bf16 : Dtype::f32, dev, world, own_parts);
      } catch (const Error& e) { return e.what(); }
      if (speaks) c.telemetry->note("the model is in " + r.o.export_to);
    }
    return "";
  };
  // What one rank throws ends all of them here: who unwound would take the model from under a step that still runs.
  std::string wrong;
  or_abort([&] { wrong = loop(); });
  return wrong;
}

// T of activations, G of whole gradients: the reduction's own dtype where that loses nothing.
template <class F>
void with_types(const Run& r, F f) {
  if (r.dtype == Dtype::f32) f(float(), float());
  else if (r.reduce_dtype == Dtype::bf16) f(bf16(), bf16());
  else f(bf16(), float());
}

// Who gathers and reduces: what the options ask for, or the best that there is. Throws if they ask for what there is
// not. one_host: the ranks that shard among themselves are on one; engines: copy engines pay there.
void choose_gathers(Run* r, int ranks, Transport transport, bool one_host, bool engines) {
  const Options& o = r->o;
  REQUIRE_USER(o.graph == 0 || (r->backend == Backend::gpu && transport != Transport::mpi),
               "--graph 1 needs a GPU for each rank, and NCCL: %s",
               r->backend == Backend::gpu ? "here collectives go over MPI" : "this run is on the CPU");
  REQUIRE_USER(o.gather.empty() || o.gather == "mpi" || transport != Transport::mpi,
               "--gather %s needs a GPU for each rank, and NCCL", o.gather.c_str());
  REQUIRE_USER(o.gather != "copy-engine" || r->backend == Backend::gpu,
               "--gather copy-engine needs GPUs: this run is on the CPU");
  REQUIRE_USER(o.gather != "copy-engine" || one_host,
               "--gather copy-engine: ranks that shard among themselves are on several hosts, and copy engines reach "
               "one; --shard hybrid:K with the K ranks of a host");
  if (o.gather.empty())
    r->fsdp.gather_by_copy_engine = transport == Transport::nccl && one_host && engines && r->fsdp.shards(ranks) > 1;
}

// ------------------------------------------------------------------------------------------------------------- main

// A world that is not here: nodes full of GPUs, one for each rank, or the ranks of a CPU. Chooses the run's gathers.
struct Elsewhere {
  World world;
  Transport transport;
};
Elsewhere elsewhere(Run* r, int ranks, bool engines) {
  const bool gpu = r->backend == Backend::gpu;
  Elsewhere e;
  e.world.size = ranks, e.world.local_size = gpu ? std::min(ranks, gpus_per_node) : ranks;
  e.transport = ranks == 1 ? Transport::none : gpu ? Transport::nccl : Transport::mpi;
  choose_gathers(r, ranks, e.transport, on_one_host(e.world, r->fsdp.shards(ranks)), engines);
  return e;
}

// Memory and time of a step, by a dry run.
struct Price {
  double bytes, seconds, tokens_per_sec;  // of a GPU
  std::string text;
};
Price price(Run r, const World& world, const Chip& chip) {
  Estimate estimate(chip, r.o.graph == 1);
  Device dev(Backend::gpu, Device::plan_only);
  dev.timeline = &estimate;
  r.o.val_every = 0;  // a step alone
  const Transport transport = world.size > 1 ? Transport::nccl : Transport::none;
  with_types(r, [&](auto t, auto g) { plan<decltype(t), decltype(g)>(dev, world, transport, r); });
  const double tokens = double(r.tokens_per_step()) / world.size, bytes = double(dev.mem.arena_bytes());
  return {bytes, estimate.step(), tokens / estimate.step(), estimate.text(tokens, tokens * flops_per_token(r.model))};
}
Price price(Run r, int ranks, const Chip& chip) {
  const World world = elsewhere(&r, ranks, chip.copy_engines).world;
  return price(r, world, chip);
}

// CUDA and NCCL keep something for themselves.
bool fits(double bytes, const Chip& chip) { return bytes + 1.5e9 <= chip.memory; }

// What to change so that it fits, and costs least: of the fewest changes that do it those with the most tokens/s.
std::string advice(const Options& o, int ranks, const Chip& chip) {
  const Run now = resolve(o, ranks, 0);
  using Change = std::pair<std::string, std::function<void(Options*)>>;
  std::vector<std::vector<Change>> groups;  // one of each group at most
  groups.emplace_back();
  for (const char* mode : {"mlp", "attn", "both", "block"})
    for (int64_t keep : {0, 1})
      if (o.recompute != mode || o.keep_attention != keep)
        groups.back().push_back({strf("--recompute %s%s", mode, keep ? " --keep-attention 1" : ""),
                                 [=](Options* c) { c->recompute = mode, c->keep_attention = keep; }});
  if (!now.fsdp.reshard_after_forward || now.fsdp.shard_ranks > 0)
    groups.push_back({{"--shard full", [](Options* c) { c->shard = "full", c->reshard_after_forward = -1; }}});
  if (o.moments == "fp32") groups.push_back({{"--moments bf16", [](Options* c) { c->moments = "bf16"; }}});
  groups.emplace_back();
  for (const char* wrap : {"block", "sublayer"})
    if (o.wrap != wrap && o.wrap != "sublayer")
      groups.back().push_back({strf("--wrap %s", wrap), [=](Options* c) { c->wrap = wrap; }});
  if (o.limit_all_gathers == "off" || now.fsdp.gather_slots > 2)
    groups.push_back({{"--limit-all-gathers 2", [](Options* c) { c->limit_all_gathers = "2"; }}});
  if (o.accum_sync == "last") groups.push_back({{"--accum-sync every", [](Options* c) { c->accum_sync = "every"; }}});
  if (o.replicate_below > 0) groups.push_back({{"--replicate-below 0", [](Options* c) { c->replicate_below = 0; }}});
  if (!o.autocast.empty()) groups.push_back({{"without --autocast", [](Options* c) { c->autocast.clear(); }}});
  if (now.reduce_dtype != now.dtype && o.autocast.empty())
    groups.push_back({{"--reduce-dtype bf16", [](Options* c) { c->reduce_dtype = "bf16"; }}});
  if (o.gradient_slots > 1) groups.push_back({{"--gradient-slots 1", [](Options* c) { c->gradient_slots = 1; }}});
  if (o.optimizer_in_backward == 0)
    groups.push_back(
        {{"--clip 0 --optimizer-in-backward 1", [](Options* c) { c->clip = 0, c->optimizer_in_backward = 1; }}});
  groups.emplace_back();
  for (int64_t part = 2; part <= 8 && now.batch % part == 0; part *= 2) {
    const int64_t batch = now.batch / part, accum = now.grad_accum * part;
    groups.back().push_back({strf("--batch %lld --grad-accum %lld", ll(batch), ll(accum)),
                             [=](Options* c) { c->batch = batch, c->grad_accum = accum, c->global_batch = 0; }});
  }
  for (size_t changes = 1; changes <= 3; changes++) {
    std::string best;
    double most = 0;
    std::function<void(size_t, size_t, Options, std::string)> go = [&](size_t from, size_t left, Options c,
                                                                       std::string said) {
      if (left > 0) {
        for (size_t g = from; g < groups.size(); g++)
          for (const Change& change : groups[g]) {
            Options next = c;
            change.second(&next);
            go(g + 1, left - 1, next, said + (said.empty() ? "" : " ") + change.first);
          }
        return;
      }
      try {
        const Price p = price(resolve(c, ranks, 0), ranks, chip);
        if (fits(p.bytes, chip) && p.tokens_per_sec > most) {
          most = p.tokens_per_sec;
          best = strf("%s: %.1f GB, %s tokens/s a GPU", said.c_str(), 1e-9 * p.bytes, grouped(ll(most)).c_str());
        }
      } catch (const UsageError&) {}  // this model cannot
    };
    go(0, changes, o, "");
    if (!best.empty()) return "the cheapest change that fits: " + best + "\n";
  }
  for (int more = 2 * ranks; more <= 65536; more *= 2) {
    Options c = o;
    c.recompute = "block", c.keep_attention = 0, c.shard = "full", c.reshard_after_forward = -1;
    try {
      const Price p = price(resolve(c, more, 0), more, chip);
      if (fits(p.bytes, chip))
        return strf(
            "up to three changes of those tried do not make it fit on %d GPUs; --recompute block on %d does: %.1f GB\n",
            ranks, more, 1e-9 * p.bytes);
    } catch (const UsageError&) {}
  }
  return "nothing that is tried makes it fit: a batch is too large for one GPU; lower --seq or --batch\n";
}

// --gpu's, the one here, or an H200.
std::string chip_for(const Run& r) {
  return !r.o.gpu.empty() ? r.o.gpu : gpu_count() > 0 ? Device(Backend::gpu, 0).name : "H200";
}

// The step on that chip, and whether there is room for it.
std::string estimate_text(const Run& r, int ranks) {
  const Chip* chip = chip_named(chip_for(r));
  if (!chip) return strf("unknown chip %s: no time is estimated; --gpu h200 would\n", chip_for(r).c_str());
  Price p = price(r, ranks, *chip);
  if (r.fsdp.gather_over_mpi && ranks > 1)
    p.text = "a step with --gather mpi is not estimated: it takes what hosts take\n";
  if (fits(p.bytes, *chip)) return p.text + strf("it fits: %.1f of %.0f GB\n", 1e-9 * p.bytes, 1e-9 * chip->memory);
  return p.text +
         strf("it does not fit: %.1f GB, and %s has %.0f, of which CUDA takes some\n", 1e-9 * p.bytes, chip->name,
              1e-9 * chip->memory) +
         advice(r.o, ranks, *chip);
}

// Units with what a rank has of them; neighbours that are alike in one line.
std::string units_text(const Run& r, int ranks) {
  const int shards = r.fsdp.shards(ranks);
  std::vector<Unit> units = parameter_table(r.model);
  lay_out(&units, shards);
  std::string text = strf("%-34s %6s %16s %16s %10s\n", "units", "", "parameters", "shard of a rank", "padding");
  for (size_t i = 0, end; i < units.size(); i = end) {
    const Unit& u = units[i];
    for (end = i + 1; end < units.size() && units[end].numel == u.numel && units[end].shard == u.shard;) end++;
    text += strf("  %-32s %6s %16s %16s %10s\n", (end > i + 1 ? u.name + " to " + units[end - 1].name : u.name).c_str(),
                 end > i + 1 ? strf("%zu x", end - i).c_str() : "", grouped(u.numel).c_str(), grouped(u.shard).c_str(),
                 grouped(u.padded - u.numel).c_str());
  }
  return text;
}

// --help and its kind: no MPI, no memory. Under mpirun only the first process speaks.
int answer(const Options& o) {
  auto number = [](std::initializer_list<const char*> names, int otherwise) {
    for (const char* name : names)
      if (const char* value = std::getenv(name)) return std::atoi(value);
    return otherwise;
  };
  const int rank = number({"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}, 0);
  const int ranks = o.world ? int(o.world) : number({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}, 1);
  if (rank != 0) return 0;
  if (o.version) {
    std::printf("%s", versions().c_str());
  } else if (o.hardware) {
    std::printf("%s\n", hardware(nullptr, gpu_count()).dump().c_str());
  } else {
    Run r = resolve(o, ranks, gpu_count());
    if (o.show_params) {
      std::printf("%s", parameters_text(r.model, r.fsdp, ranks).c_str());
    } else {
      Device dev(r.backend, Device::plan_only);
      const Chip* chip = chip_named(chip_for(r));
      const Elsewhere there = elsewhere(&r, ranks, chip && chip->copy_engines);
      std::vector<Issued> issued;
      with_types(
          r, [&](auto t, auto g) { issued = plan<decltype(t), decltype(g)>(dev, there.world, there.transport, r); });
      std::printf("%s%s: %s parameters, %s, batch %lld x %lld tokens a rank\n", name_of(r.model.arch),
                  r.model.sparse ? " with NSA" : "", count_text(double(parameter_count(r.model))).c_str(),
                  name_of(r.dtype), ll(r.batch), ll(r.model.seq));
      if (o.plan) std::printf("%s%s", units_text(r, ranks).c_str(), memory_table(dev.mem.report(), ranks).c_str());
      if (o.plan && r.backend == Backend::gpu) std::printf("%s", estimate_text(r, ranks).c_str());
      if (o.show_schedule)
        std::printf("%s%s", choices_text(r, there.transport).c_str(), schedule_text(issued, r.model, ranks).c_str());
    }
  }
  return 0;
}

// From here on every rank takes part. An error that all ranks can know of is agreed on and said once; any other ends
// all ranks from where it happened.
void run(Options o, const World& world, const std::string& command) {
  const int gpus = gpu_count();
  std::string text = to_config(o) + "commit = " + FSDP_COMMIT;
  std::replace(text.begin(), text.end(), '\n', ';');
  require_same(text, "the configuration");

  json state;
  if (!o.resume.empty()) state = load_state(o.resume, o.save, world);

  Run r;
  std::unique_ptr<Corpus> data, val_data;
  std::unique_ptr<Device> dev;
  Transport transport = Transport::none;
  std::string error, sharing;
  try {
    take_up(state, &o);
    r = resolve(o, world.size, gpus);
    compare(state, &r);
    if (world.rank == 0 && !o.save.empty()) check_save(o.save, o.resume);
    if (world.rank == 0 && !o.export_to.empty()) check_export(o.export_to);
    const bool splits = o.val_every > 0 && o.val_data.empty();
    data = open_corpus(o.data, r.model.vocab, r.model.seq, o.seed, splits ? 1 : 0);
    if (o.val_every > 0)
      val_data = splits ? open_corpus(o.data, r.model.vocab, r.model.seq, o.seed, 2)
                        : open_corpus(o.val_data, r.model.vocab, r.model.seq, o.seed, 0);
    const bool gpu = r.backend == Backend::gpu;
    if (world.size > 1 && gpu && (world.local_size > gpus || !FSDP_NCCL))
      sharing = world.local_size > gpus ? strf("%d ranks share %d GPU%s", world.local_size, gpus, gpus > 1 ? "s" : "")
                                        : "this build has no NCCL";
  } catch (const Error& e) { error = e.what(); }
  error = agree(error);
  if (!error.empty()) throw UsageError(error);
  require_same(strf("%s, %s, %lld tokens", r.backend == Backend::gpu ? "GPU" : "CPU", data->description.c_str(),
                    ll(data->count)),
               "what the machine holds");

  // One rank a GPU talks through NCCL. Otherwise all go through host memory, all in the same way.
  sharing = agree(sharing);
  const bool gpu = r.backend == Backend::gpu;
  if (world.size > 1) transport = gpu && sharing.empty() ? Transport::nccl : Transport::mpi;
  const bool one_host = agree(on_one_host(world, r.fsdp.shards(world.size)) ? "" : "no").empty();
  choose_gathers(&r, world.size, transport, one_host, false);  // what cannot be is said before a device is opened
  if (!sharing.empty()) r.notices.push_back(sharing + ": collectives go over MPI through host memory, which is slow");
  const int sharers = gpu ? (world.local_size + gpus - 1) / gpus : world.local_size;
  const int gpus_used = gpu ? std::max(1, world.size / sharers) : 0;
  if (!std::getenv("OPENBLAS_NUM_THREADS")) openblas_set_num_threads(std::max(1, cores() / world.local_size));
  ops::set_allow_tf32(o.tf32);

  bool engines = false;
  try {
    dev = std::make_unique<Device>(r.backend, gpu ? world.local_rank % gpus : 0, sharers,
                                   comm_streams(r.backend, transport));
    engines = copy_engines_pay(*dev);
    with_types(r, [&](auto t, auto g) { plan<decltype(t), decltype(g)>(*dev, world, transport, r); });
  } catch (const Error& e) { error = e.what(); }
  error = agree(error);
  if (!error.empty()) throw Error(error);
  choose_gathers(&r, world.size, transport, one_host, agree(engines ? "" : "no").empty());

  double estimated_ms = -1;
  if (world.rank == 0) {
    const Chip* chip = gpu && transport != Transport::mpi && !r.fsdp.gather_over_mpi ? chip_named(dev->name) : nullptr;
    if (chip) estimated_ms = 1e3 * price(r, world, *chip).seconds;
    for (const std::string& notice : r.notices) std::printf("note: %s\n", notice.c_str());
    const std::string batch =
        strf("%lld x %lld", ll(r.global_batch), ll(r.model.seq)) + (r.grad_accum > 1 ? " accumulated" : "");
    std::printf("%s%s, %s parameters in %zu units over %d rank%s of %s; %s, gradients in %s; collectives: %s%s\n",
                name_of(r.model.arch), r.model.sparse ? " with NSA" : "",
                count_text(double(parameter_count(r.model))).c_str(), parameter_table(r.model).size(), world.size,
                world.size > 1 ? "s" : "", dev->name.c_str(), name_of(r.dtype), name_of(r.reduce_dtype),
                name_of(transport), r.fsdp.gather_by_copy_engine ? ", gathers by copy engines" : "");
    std::printf("data: %s; %s tokens a step (%s), %lld steps\n", data->description.c_str(),
                grouped(r.tokens_per_step()).c_str(), batch.c_str(), ll(r.last_step));
    std::printf("%s", memory_table(dev->mem.report(), world.size).c_str());
    if (chip) std::printf("estimated: %.1f ms a step\n", estimated_ms);
    std::fflush(stdout);
  }
  std::unique_ptr<Telemetry> telemetry;
  try {
    if (r.fsdp.gather_by_copy_engine && transport == Transport::nccl) use_nccl_memory(*dev);
    dev->mem.commit();
    if (world.rank == 0)
      telemetry = std::make_unique<Telemetry>(o.log, !o.resume.empty(),
                                              header(r, *dev, world, transport, gpus_used, estimated_ms, command),
                                              r.last_step, o.log_every);
  } catch (const Error& e) { error = e.what(); }
  error = agree(error);
  if (!error.empty()) throw Error(error);

  const Context context{*dev, world, transport, gpus_used, data.get(), val_data.get(), telemetry.get(), state};
  or_abort([&] { with_types(r, [&](auto t, auto g) { error = train<decltype(t), decltype(g)>(context, r); }); });
  if (!error.empty()) throw UsageError(error);
}

int exit_status(const Error& e) { return dynamic_cast<const UsageError*>(&e) ? 2 : 1; }

}  // namespace

int main(int argc, char** argv) {
  Options o;
  std::string text, error, command = "mpirun -np ";
  try {
    if (!parse_options(argc, argv, &o, &text)) {
      std::printf("%s", text.c_str());
      return 0;
    }
  } catch (const Error& e) { error = e.what(); }
  if (error.empty() && (o.version || o.hardware || o.show_params || o.plan || o.show_schedule)) {
    try {
      return answer(o);
    } catch (const Error& e) {
      std::fprintf(stderr, "error: %s\n", e.what());
      return exit_status(e);
    }
  }
  World world;
  int status = 0;
  try {
    world = init_mpi(&argc, &argv);
    command += std::to_string(world.size);
    for (int i = 0; i < argc; i++) command += std::string(" ") + argv[i];
    error = agree(error);
    if (!error.empty()) throw UsageError(error);
    run(o, world, command);
  } catch (const Error& e) {  // agreed on: the same on all ranks
    status = exit_status(e);
    if (world.rank == 0) std::fprintf(stderr, "error: %s\n", e.what());
  } catch (const std::exception& e) { abort_all_ranks(strf("rank %d: %s", world.rank, e.what()), 1); }
  finish_mpi();
  return status;
}
