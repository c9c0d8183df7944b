#include "lib/program/report.h"

#include <algorithm>
#include <thread>

#include "build/version.h"
#include "lib/ops/cublaslt.h"
#include "lib/program/json.h"
#include "lib/program/launch.h"
#include "lib/program/presets.h"

using nlohmann::json;
using ll = long long;

std::string commit() { return FSDP_COMMIT; }

namespace {

// As CUDA counts its own: 13000 is 13.0. Empty: there is none.
#if FSDP_CUDA
std::string cuda_version(int v) { return strf("%d.%d", v / 1000, v % 1000 / 10); }
#endif
std::string runtime_version() {
#if FSDP_CUDA
  return cuda_version(CUDART_VERSION);
#else
  return "";
#endif
}
// The newest that the driver can do.
std::string driver_version() {
#if FSDP_CUDA
  int v = 0;
  if (cudaDriverGetVersion(&v) == cudaSuccess && v > 0) return cuda_version(v);
#endif
  return "";
}

}  // namespace

std::string versions() {
  const std::string blas = cublaslt_version();
  const std::string cuda =
      FSDP_CUDA ? runtime_version() + ", cuBLASLt " + (blas.empty() ? "none" : blas) : "none (CPU backend alone)";
  return strf("fsdp.cu %s\nCUDA %s\nNCCL %s\nMPI  %s\n", build_id().c_str(), cuda.c_str(), nccl_version().c_str(),
              mpi_version().c_str());
}

json versions_json() {
  auto or_null = [](const std::string& version) {
    return version.empty() || version == "none" ? json() : json(version);
  };
  return {{"cuda", or_null(runtime_version())},
          {"cuda_driver", or_null(driver_version())},
          {"cublas", or_null(gpu_count() ? cublaslt_version() : "")},  // a run on a CPU does not load it
          {"nccl", or_null(nccl_version())},
          {"mpi", or_null(mpi_version())}};
}

int cores() { return int(std::max(1u, std::thread::hardware_concurrency())); }

json hardware_json(const Device& dev, int gpus) {
  return {{"gpus", gpus},
          {"name", dev.name},
          {"memory_bytes", dev.total_bytes},
          {"host", {{"cores", cores()}, {"cpu", cpu_name()}}}};
}

std::string size_text(const ModelConfig& c) {
  int64_t frozen = 0;
  for (const Unit& u : parameter_table(c))
    for (const Param& p : u.params) frozen += p.frozen ? p.numel : 0;
  return count_text(double(parameter_count(c))) + " parameters" +
         (frozen ? " (" + count_text(double(frozen)) + " frozen)" : "");
}

std::string memory_table(const MemoryReport& m, int world_size) {
  std::string text = strf("memory of a rank of %d, MiB %12s %14s %10s\n", world_size, "init", "before step 1", "peak");
  for (int p = 0; p < purposes; p++)
    text += strf("  %-26s %12.1f %14.1f %10.1f\n", name_of(Purpose(p)), mib(m.init[p]), mib(m.before_step[p]),
                 mib(m.peak[p]));
  text += strf("  %-26s %12.1f %14.1f %10.1f\n", "sum", mib(m.init_total), mib(m.before_step_total), mib(m.live_peak));
  text += strf("  %-26s %38.1f   peak in %s; largest buffer: %s\n", "arena", mib(m.arena), m.peak_phase.c_str(),
               m.largest.c_str());
  return text;
}

std::string units_text(const Run& r, int world_size) {
  const int shards = r.fsdp.shards(world_size);
  std::vector<Unit> units = parameter_table(r.model);
  lay_out(&units, shards);
  std::string text = strf("%-34s %6s %16s %16s %10s\n", "units", "", "parameters", "shard per rank", "padding");
  for (size_t i = 0, end; i < units.size(); i = end) {
    const Unit& u = units[i];
    for (end = i + 1; end < units.size() && units[end].numel == u.numel && units[end].shard == u.shard;) end++;
    text += strf("  %-32s %6s %16s %16s %10s\n", (end > i + 1 ? u.name + " to " + units[end - 1].name : u.name).c_str(),
                 end > i + 1 ? strf("%zu x", end - i).c_str() : "", grouped(u.numel).c_str(), grouped(u.shard).c_str(),
                 grouped(u.padded - u.numel).c_str());
  }
  return text;
}

std::string parameters_text(const Run& r, int world_size) {
  std::vector<Unit> units = parameter_table(r.model);
  const int shards = r.fsdp.shards(world_size);
  lay_out(&units, shards);
  int column = 28;
  for (const Unit& u : units) {
    column = std::max(column, int(u.name.size()) + 7);
    for (const Param& p : u.params) column = std::max(column, int(p.name.size()));
  }
  std::string text =
      strf("%-*s %-18s %14s  %-22s %s\n", column, "parameter", "shape", "elements", "initial weights", "decay");
  int64_t total = 0;
  for (const Unit& u : units) {
    for (const Param& p : u.params) {
      std::string shape;
      for (int64_t n : p.shape) shape += (shape.empty() ? "" : " x ") + std::to_string(n);
      const std::string init = p.std > 0 ? strf("normal(%g, %.4g)", p.mean, p.std) : strf("%g", p.mean);
      text += strf("%-*s %-18s %14s  %-22s %s\n", column, p.name.c_str(), shape.c_str(), grouped(p.numel).c_str(),
                   init.c_str(),
                   p.frozen  ? "frozen"
                   : p.decay ? "yes"
                             : "no");
    }
    text += strf("  unit %-*s %-18s %14s  ", column - 7, u.name.c_str(), "", grouped(u.numel).c_str());
    if (u.replicated) text += "replicated on every rank\n";
    else if (shards == 1) text += "unsharded\n";
    else
      text += strf("shard of each of %d ranks: %s, padding %s\n", shards, grouped(u.shard).c_str(),
                   grouped(u.padded - u.numel).c_str());
    total += u.numel;
  }
  return text + strf("%s parameters\n", grouped(total).c_str());
}

std::string presets_text() {
  std::string text = strf("%-10s %-7s %6s %6s %6s %9s %7s %8s %6s %6s %6s %12s\n", "preset", "arch", "dim", "depth",
                          "heads", "kv-heads", "hidden", "vocab", "seq", "batch", "accum", "parameters");
  for (const char* name : preset_names()) {
    Options o;
    o.preset = name;
    const Run r = resolve(o, 1, 0);
    const ModelConfig& c = r.model;
    text += strf("%-10s %-7s %6lld %6lld %6s %9s %7lld %8lld %6lld %6lld %6lld %12s\n", name, name_of(c.arch),
                 ll(c.dim), ll(c.depth), c.arch == Arch::mlp ? "-" : std::to_string(c.heads).c_str(),
                 c.arch == Arch::mlp ? "-" : std::to_string(c.kv_heads).c_str(), ll(c.hidden), ll(c.vocab), ll(c.seq),
                 ll(r.batch), ll(r.grad_accum), strf("%.1f M", 1e-6 * double(parameter_count(c))).c_str());
  }
  return text +
         "batch: sequences per rank and micro-batch; accum: micro-batches per step; parameters: with NSA, the "
         "default\n";
}

std::string choices_text(const Run& r, Transport transport) {
  const FsdpOptions& f = r.fsdp;
  auto count = [](int n, const char* what) { return strf("%d %s%s", n, what, n == 1 ? "" : "s"); };
  const bool casts = r.model.gather_fp8 || (f.gather_wide && transport != Transport::none);
  std::string text = f.gather_by_copy_engine                            ? "gathers by copy engines"
                     : f.gather_over_mpi || transport == Transport::mpi ? "gathers by MPI"
                     : transport == Transport::nccl                     ? "gathers by NCCL's kernels"
                     : casts                                            ? "gathers are local casts"
                                                                        : "one rank gathers nothing";
  if (transport != Transport::none || casts)
    text += ", into " +
            (!f.reshard_after_forward || f.gather_slots == 0 ? "a slot for each unit" : count(f.gather_slots, "slot"));
  if (transport != Transport::none)
    text += strf("; reductions by %s", f.reduce_by_copy_engine        ? "all-to-all and a sum in rank order"
                                       : transport == Transport::nccl ? "NCCL's kernels"
                                                                      : "MPI");
  if (transport == Transport::nccl && f.reduce_ctas > 0) text += strf(" of at most %d thread blocks", f.reduce_ctas);
  if (transport == Transport::nccl && f.has_small_ring())
    text += strf(", %d up to %lld MiB", f.small_reduce_ctas, ll(FsdpOptions::small_gradient >> 20));
  if (f.read_tail) text += "; a step's last two read by their owners";
  return text + strf("; %s; moments in %s; %s; weights initialized %s; %s; %s; %s\n",
                     count(f.gradient_slots, "gradient slot").c_str(), name_of(f.moment_dtype),
                     r.o.clip > 0 ? ("clipping by the norm " + r.o.clip_norm).c_str() : "no clipping",
                     f.unsharded_init ? "unsharded, then sharded" : "sharded",
                     r.o.fuse ? "epilogues are fused" : "epilogues are kernels of their own",
                     r.backend == Backend::cpu ? "products by BLAS"
                     : r.o.tune_matmul         ? "products by the fastest of cuBLASLt's algorithms"
                                               : "products by cuBLASLt's first choice",
                     r.o.graph ? "a step is one CUDA graph" : "kernels are launched one by one");
}

std::string schedule_text(const std::vector<Issued>& issued, const ModelConfig& c, int world_size) {
  std::vector<Unit> units = parameter_table(c);
  std::string text = strf("%5s  %-8s %-19s %-20s %12s\n", "", "stream", "what", "unit", "MiB");
  double gathered = 0, reduced = 0;
  for (size_t i = 0; i < issued.size(); i++) {
    const Issued& e = issued[i];
    if (e.times > 1 && issued[i - 1].times == 1)
      text += strf("%5s  the micro-batch that follows comes %s times\n", "", grouped(e.times).c_str());
    const std::string unit = e.unit < 0 ? "all" : units[size_t(e.unit)].name;
    text += strf("%5zu  %-8s %-19s ", i + 1, stream_of(e), name_of(e));
    if (e.bytes == 0) text += unit + "\n";
    else if (e.ranks == 1) text += strf("%-20s one rank: nothing moves\n", unit.c_str());
    else text += strf("%-20s %12.3f  %s, %d ranks\n", unit.c_str(), mib(e.bytes), name_of(e.dtype), e.ranks);
    (e.of_gather() ? gathered : reduced) += double(e.times) * e.sent() / (1 << 20);
  }
  return text + strf("each of %d ranks sends and receives %.1f MiB in gathers and %.1f MiB in reductions\n", world_size,
                     gathered, reduced);
}

std::string fsdp_text(const Run& r, int world_size) {
  const FsdpOptions& f = r.fsdp;
  const Options& o = r.o;
  const bool wide = r.dtype == Dtype::f32 || f.gather_wide, keeps = !f.reshard_after_forward;
  const char* gathered = name_of(wide ? Dtype::f32 : r.dtype);
  const std::string narrow = r.model.gather_fp8 ? std::string(name_of(Dtype::e4m3)) + " and " : "";
  std::string ours = strf(
      "FSDP: shard %s over %d of %d ranks, wrap %s, limit-all-gathers %s, gradient-slots %d, "
      "reshard-after-forward %d, forward-prefetch %d, backward-prefetch %s, accum-sync %s; "
      "fp32 masters, %s moments, gathered in %s%s, reduced in %s",
      o.shard.c_str(), f.shards(world_size), world_size, o.wrap.c_str(),
      keeps || f.gather_slots == 0 ? "off" : std::to_string(f.gather_slots).c_str(), f.gradient_slots, !keeps,
      std::min(r.model.forward_prefetch, int(parameter_table(r.model).size()) - 1), o.backward_prefetch.c_str(),
      o.accum_sync.c_str(), name_of(f.moment_dtype), narrow.c_str(), gathered, name_of(r.reduce_dtype));
  const bool hybrid = f.shard_ranks > 1;
  const char* strategy = f.shard_ranks == 1 ? "NO_SHARD"
                         : hybrid           ? (keeps ? "_HYBRID_SHARD_ZERO2" : "HYBRID_SHARD")
                         : keeps            ? "SHARD_GRAD_OP"
                                            : "FULL_SHARD";
  const std::string policy = r.model.wrap == Wrap::block      ? "transformer_auto_wrap_policy"
                             : r.model.wrap == Wrap::sublayer ? "ModuleWrapPolicy of attention and MLP"
                             : r.model.wrap == Wrap::size
                                 ? strf("size_based_auto_wrap_policy(min_num_params=%lld)", ll(r.model.wrap_min_params))
                                 : "no auto_wrap_policy";
  const char* backward = r.model.backward_prefetch == BackwardPrefetch::pre    ? "BACKWARD_PRE"
                         : r.model.backward_prefetch == BackwardPrefetch::post ? "BACKWARD_POST"
                                                                               : "None";
  auto torch_name = [](const std::string& dtype) { return dtype == "bf16" ? "bfloat16" : "float32"; };
  return ours +
         strf(
             "; in PyTorch %s, %s, limit_all_gathers=%s, forward_prefetch=%s, backward_prefetch=%s, "
             "MixedPrecision(param_dtype=%s, reduce_dtype=%s)%s\n",
             strategy, policy.c_str(), !keeps && f.gather_slots > 0 ? "True" : "False",
             r.model.forward_prefetch > 0 ? "True" : "False", backward, torch_name(gathered),
             torch_name(name_of(r.reduce_dtype)),
             (std::string(f.gather_wide ? ", autocast(bfloat16)" : "") + (f.reduce_last ? ", no_sync()" : "")).c_str());
}

std::string opening_text(const Run& r, const Device& dev, const World& world, Transport transport,
                         const std::string& data, double estimated_ms) {
  std::string text;
  for (const std::string& notice : r.notices) text += "note: " + notice + "\n";
  const bool nccl = transport == Transport::nccl, gathers = r.fsdp.gather_by_copy_engine,
             reductions = nccl && r.fsdp.reduce_by_copy_engine;
  const char* by_engines = gathers && reductions ? ", gathers and reductions by copy engines"
                           : gathers             ? ", gathers by copy engines"
                           : reductions          ? ", reductions by copy engines"
                                                 : "";
  text += strf("%s%s, %s in %zu units over %d rank%s of %s; %s%s, gradients in %s; collectives: %s%s\n",
               name_of(r.model.arch), r.model.sparse ? " with NSA" : "", size_text(r.model).c_str(),
               parameter_table(r.model).size(), world.size, world.size > 1 ? "s" : "", dev.name.c_str(),
               name_of(r.dtype), fp8_text(r.model).c_str(), name_of(r.reduce_dtype), name_of(transport), by_engines);
  text += fsdp_text(r, world.size);
  text += strf("data: %s; %s tokens a step (%lld x %lld%s), %lld steps\n", data.c_str(),
               grouped(r.tokens_per_step()).c_str(), ll(r.global_batch), ll(r.model.seq),
               r.grad_accum > 1 ? " accumulated" : "", ll(r.last_step));
  text += memory_table(dev.mem.report(), world.size);
  return text + (estimated_ms < 0 ? "" : strf("estimated: %.1f ms a step\n", estimated_ms));
}

nlohmann::json header(const Run& r, const Device& dev, const World& world, Transport transport, int gpus,
                      double estimated_ms, const std::string& command) {
  json config = settings(r);
  config.update({{"limit_all_gathers", r.fsdp.gather_slots},
                 {"reshard_after_forward", r.fsdp.reshard_after_forward},
                 {"gather", r.fsdp.gather_by_copy_engine   ? "copy-engine"
                            : r.fsdp.gather_over_mpi       ? "mpi"
                            : transport == Transport::none ? "none"
                                                           : name_of(transport)},
                 {"reduce", transport == Transport::none   ? "none"
                            : r.fsdp.reduce_by_copy_engine ? "copy-engine"
                                                           : name_of(transport)},
                 {"reduce_tail", r.fsdp.read_tail ? "peer" : "same"},
                 {"reduce_ctas", transport == Transport::nccl ? r.fsdp.reduce_ctas : 0},
                 {"small_reduce_ctas", transport == Transport::nccl ? r.fsdp.small_reduce_ctas : 0},
                 {"parameters", parameter_count(r.model)},
                 {"flops_per_token", flops_per_token(r.model)}});
  json h = hardware_json(dev, gpus);
  h["ranks"] = world.size, h["transport"] = name_of(transport);
  const MemoryReport mem = dev.mem.report();
  return {{"command", command},
          {"timestamp", now_iso8601()},
          {"commit", commit()},
          {"versions", versions_json()},
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

nlohmann::json stats_json(const NsaSums* sums, const NsaMaxima* maxima, const std::vector<NsaKernels>& kernels) {
  json all = json::array();
  for (size_t i = 0; i < kernels.size(); i++) {
    const NsaStats b = summary(sums[i], maxima[i]);
    json ran = json::object();
    for (int s = 0; s < nsa_stages; s++)
      if (kernels[i].latest[s].code) ran[name_of(Stage(s))] = name_of(kernels[i].latest[s]);
    all.push_back({{"gate_entropy_mean", b.entropy_mean},
                   {"gate_entropy_min", b.entropy_min},
                   {"gate_max", b.gate_max},
                   {"share_max", b.share_max},
                   {"share_max_mean", b.share_max_mean},
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

void report_graph(const Graph::Nodes& n, Telemetry* telemetry) {
  telemetry->record(
      {{"graph",
        {{"kernels", n.kernels}, {"nccl_kernels", n.nccl_kernels}, {"copies", n.copies}, {"others", n.others}}}});
  telemetry->note(strf("a step is a graph of %d kernels, %d of them NCCL's, %d copies and clears, %d other nodes",
                       n.kernels, n.nccl_kernels, n.copies, n.others));
}

namespace {
// A table of at most so many rows, and one for the rest.
void note_rows(const char* title, const std::vector<StepProfile::Row>& rows, size_t most, Telemetry* telemetry) {
  double sum = 0, rest_ms = 0;
  int64_t count = 0, rest = 0;
  for (const auto& r : rows) sum += r.ms, count += r.count;
  telemetry->note(title);
  for (size_t i = 0; i < rows.size(); i++) {
    const auto& r = rows[i];
    if (i < most)
      telemetry->note(strf("  %-52.52s %9.3f  %5.1f %% %6lld", r.name.c_str(), r.ms, 100 * r.ms / sum, ll(r.count)));
    else rest_ms += r.ms, rest += r.count;
  }
  if (rest > 0)
    telemetry->note(strf("  %-52s %9.3f  %5.1f %% %6lld", "others", rest_ms, 100 * rest_ms / sum, ll(rest)));
  telemetry->note(strf("  %-52s %9.3f          %6lld", "sum", sum, ll(count)));
}

// Each kind of work beside its limit, and what of both they come to together.
void note_shares(const std::vector<StepProfile::Share>& shares, Telemetry* telemetry) {
  double sum = 0;
  telemetry->note("where the step went: ms, the lower bound on this chip, and the ratio");
  for (const auto& s : shares) {
    sum += s.ms;
    telemetry->note(strf("  %-36s %9.3f", s.name, s.ms) + (s.limit_ms < 0 ? "" : strf(" %9.3f", s.limit_ms)) +
                    (s.limit_ms > 0 ? strf(" %6.2f", s.ms / s.limit_ms) : ""));
  }
  telemetry->note(strf("  %-36s %9.3f", "sum", sum));
}

json shares_json(const std::vector<StepProfile::Share>& shares) {
  json all = json::object();
  for (const auto& s : shares) {
    all[s.key + std::string("_ms")] = s.ms;
    if (s.limit_ms >= 0) all[s.key + std::string("_limit_ms")] = s.limit_ms;
  }
  return all;
}

json rows_json(const std::vector<StepProfile::Row>& rows) {
  json all = json::array();
  for (const auto& r : rows) {
    all.push_back({{"name", r.name}, {"ms", r.ms}, {"count", r.count}});
    if (r.bytes > 0) all.back()["mib"] = mib(r.bytes);
  }
  return all;
}
}  // namespace

void report_profile(const StepProfile& p, Telemetry* telemetry) {
  double sum = 0;
  json marks = json::object();
  for (const auto& t : p.marks) sum += t.second, marks[t.first] = t.second;
  telemetry->note(strf("the last step on the device, ms (the host issued it in %.2f)", p.host_ms));
  for (const auto& t : p.marks)
    telemetry->note(strf("  %-36s %9.3f  %5.1f %%", t.first.c_str(), t.second, 100 * t.second / sum));
  telemetry->note(strf("  %-36s %9.3f", "sum", sum));
  json j = {{"profile_step", p.step}, {"profile_ms", marks}, {"host_ms", p.host_ms}};
  if (!p.kernels.empty()) {
    constexpr size_t most_rows = 24;
    note_rows("its kernels, ms, share and number", p.kernels, most_rows, telemetry);
    telemetry->note(strf("  NCCL's share of the kernels' time: %.1f %%", 100 * p.nccl_share));
    if (!p.copies.empty()) note_rows("its copies and clears, ms, share and number", p.copies, most_rows, telemetry);
    j["kernels"] = rows_json(p.kernels), j["copies"] = rows_json(p.copies), j["nccl_share"] = p.nccl_share;
  }
  if (!p.shares.empty()) {
    note_shares(p.shares, telemetry);
    j["shares"] = shares_json(p.shares);
  }
  if (p.gpu) {  // what is not known is NaN, and null in JSON
    telemetry->note(strf("the GPU while the steps ran: utilization %.0f %%, clock %.0f MHz, power %.0f W (%d samples)",
                         100 * p.gpu->utilization, p.gpu->clock_mhz, p.gpu->power_w, p.gpu->samples));
    j["gpu_utilization"] = p.gpu->utilization, j["clock_mhz"] = p.gpu->clock_mhz, j["power_w"] = p.gpu->power_w;
  }
  telemetry->record(j);
}
