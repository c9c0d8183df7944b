#include "lib/program/plan.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <utility>

#include "lib/program/init.h"
#include "lib/device/terminal.h"
#include "lib/program/json.h"
#include "lib/program/presets.h"
#include "lib/program/launch.h"
#include "lib/program/report.h"
#include "lib/program/resume.h"
#include "lib/program/step.h"

using ll = long long;

namespace {

template <class T, class G>
std::vector<Issued> dry_run(Device& dev, const World& world, Transport transport, const Run& r) {
  dev.mode = Mode::plan;
  ops::keep_workspace(dev);
  Model<T, G> model(dev, world, transport, r.model, r.batch, r.fsdp, Links::planned);
  Event copied(dev);
  const int32_t* const unread = nullptr;  // host memory, in a dry run
  const ops::AdamW* const adamw = nullptr;
  Timeline* const timeline = std::exchange(dev.timeline, nullptr);  // of the step alone
  model.init_weights();
  dev.timeline = timeline;
  model.fsdp.issued().begin();
  step_program(dev, model, r, unread, adamw, copied);
  std::vector<Issued> issued = model.fsdp.issued().all();
  if (dev.timeline && r.o.graph == 0) {  // one graph begins when the one before has ended
    dev.timeline->next_step();
    step_program(dev, model, r, unread, adamw, copied);
  }
  other_programs(dev, model, r, unread, copied);
  return issued;
}

// A world that is not here: nodes full of GPUs, one for each rank, or the ranks of a CPU. Chooses the run's
// collectives.
struct Elsewhere {
  World world;
  Transport transport;
};
Elsewhere elsewhere(Run* r, int ranks, bool engines) {
  const bool gpu = r->backend == Backend::gpu;
  Elsewhere e;
  e.world.size = ranks, e.world.local_size = gpu ? std::min(ranks, gpus_per_node) : ranks;
  e.transport = ranks == 1 ? Transport::none : gpu ? Transport::nccl : Transport::mpi;
  choose_collectives(r, ranks, e.transport, on_one_host(e.world, r->fsdp.shards(ranks)), engines);
  return e;
}

}  // namespace

std::vector<Issued> plan(Device& dev, const World& world, Transport transport, const Run& r) {
  dev.fuse = r.o.fuse == 1, dev.tune_matmuls = r.o.tune_matmul == 1, dev.tf32 = r.o.tf32;
  std::vector<Issued> issued;
  with_types(r, [&](auto t, auto g) { issued = dry_run<decltype(t), decltype(g)>(dev, world, transport, r); });
  return issued;
}

namespace {
void plan_step(Run r, const World& world, Device* dev, Estimate* estimate) {
  dev->timeline = estimate;
  r.o.val_every = 0, r.o.sample = 0, r.o.eval.clear();  // a step alone
  plan(*dev, world, world.size > 1 ? Transport::nccl : Transport::none, r);
}
}  // namespace

double reserve(int communicators) {
  return double(context_bytes + library_bytes(Backend::gpu, Transport::nccl, communicators));
}

bool fits(double bytes, const Chip& chip, int communicators) { return bytes + reserve(communicators) <= chip.memory; }

namespace {
// A step that has been run dry, and is not packed yet: that takes longer than all else.
struct DryStep {
  Run r;
  double tokens;  // of a GPU
  int communicators;
  Estimate estimate;
  Device dev{Backend::gpu, Device::plan_only};
  DryStep(const Run& run, const World& world, const Chip& chip)
      : r(run),
        tokens(double(run.tokens_per_step()) / world.size),
        communicators(run.fsdp.communicators(world.size)),
        estimate(chip, run.o.graph == 1, run.o.tf32 && run.dtype == Dtype::f32) {
    check_gpu(r.model, chip.compute_capability, chip.name);
    dev.compute_capability = chip.compute_capability;
    plan_step(r, world, &dev, &estimate);
  }
  DryStep(Run run, int ranks, const Chip& chip) : DryStep(run, elsewhere(&run, ranks, chip.copy_engines).world, chip) {}
  bool fits_on(const Chip& chip) const {
    return fits(double(dev.mem.live_peak()), chip, communicators) &&
           fits(double(dev.mem.arena_bytes()), chip, communicators);
  }
  double tokens_per_sec() const { return tokens / estimate.step(); }
};
}  // namespace

Price price(Run r, const World& world, const Chip& chip) {
  const DryStep step(r, world, chip);
  const MemoryReport memory = step.dev.mem.report();
  const Estimate& e = step.estimate;
  return {double(memory.arena),
          e.step(),
          step.tokens_per_sec(),
          double(memory.init_total),
          double(memory.before_step_total),
          step.communicators,
          {e.limit(Work::matmul), e.limit(Work::attention), e.limit(Work::memory) + e.limit(Work::optimizer)},
          e.text(step.tokens, step.tokens * flops_per_token(r.model))};
}
Price price(Run r, int ranks, const Chip& chip) {
  const World world = elsewhere(&r, ranks, chip.copy_engines).world;
  return price(r, world, chip);
}

Trace planned_trace(Run r, int ranks, const Chip& chip) {
  REQUIRE_USER(!r.fsdp.gather_over_mpi || ranks == 1,
               "--trace: the time of a step with --gather mpi is not estimated; choose another --gather");
  constexpr int64_t most = 64;
  REQUIRE_USER(r.grad_accum <= most,
               "--trace: a step of %lld micro-batches is too long to look at; use --grad-accum %lld or less",
               ll(r.grad_accum), ll(most));
  const World world = elsewhere(&r, ranks, chip.copy_engines).world;
  check_gpu(r.model, chip.compute_capability, chip.name);
  Estimate estimate(chip, r.o.graph == 1);
  estimate.keep_spans();
  Device dev(Backend::gpu, Device::plan_only);
  dev.compute_capability = chip.compute_capability;
  plan_step(r, world, &dev, &estimate);
  Trace t;
  t.source = "plan", t.begin = estimate.begun(), t.end = t.begin + estimate.step();
  t.device = estimate.spans(), t.memory = estimate.memory_changes(), t.slots = estimate.slots();
  const MemoryReport memory = dev.mem.report();
  std::copy(memory.before_step, memory.before_step + purposes, t.before_step);
  t.live_peak = memory.live_peak, t.arena = memory.arena;
  return t;
}

namespace {

using Change = std::pair<std::string, std::function<void(Options*)>>;
using Changes = std::vector<std::vector<Change>>;  // one of each group at most

// What is saved in fp8 is the MLP's; most modes keep nothing of it.
Change recomputing(const Options& o, const std::string& mode, int64_t keep) {
  const bool drops = !o.save_dtype.empty() && mode != "attn";
  const char* const cheap = o.keep_cheap ? " --keep-cheap 0" : "";
  return {strf("--recompute %s%s%s%s", mode.c_str(), keep ? " --keep-attention 1" : "", cheap,
               drops ? " without --save-dtype" : ""),
          [=](Options* c) {
            c->recompute = mode, c->keep_attention = keep, c->keep_cheap = 0;
            if (drops) c->save_dtype.clear();
          }};
}

// What can be changed in a run that does not fit.
Changes possible_changes(const Options& o, int ranks) {
  const Run now = resolve(o, ranks, 0);
  Changes groups;
  groups.emplace_back();
  if (o.keep_cheap) groups.back().push_back({"--keep-cheap 0", [](Options* c) { c->keep_cheap = 0; }});
  for (const char* mode : {"mlp", "attn", "both", "block"})
    for (int64_t keep : {0, 1})
      if (o.recompute != mode || o.keep_attention != keep) groups.back().push_back(recomputing(o, mode, keep));
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
  return groups;
}

// Of all ways to make so many of the changes: the one that fits with the most tokens/s.
struct Cheapest {
  const Changes& groups;
  int ranks;
  const Chip& chip;
  std::string best = {};
  double most = 0;

  // Groups from `from` on, so many changes left to make; said: those that are in `o`.
  void search(size_t from, size_t left, const Options& o, const std::string& said) {
    if (left == 0) return look_at(o, said);
    for (size_t g = from; g < groups.size(); g++)
      for (const Change& change : groups[g]) {
        Options next = o;
        change.second(&next);
        search(g + 1, left - 1, next, said + (said.empty() ? "" : " ") + change.first);
      }
  }
  void look_at(const Options& o, const std::string& said) {
    try {
      const DryStep step(resolve(o, ranks, 0), ranks, chip);
      if (step.tokens_per_sec() <= most || !step.fits_on(chip)) return;
      most = step.tokens_per_sec();
      best = strf("%s: %.1f GB, %s tokens/s a GPU", said.c_str(), 1e-9 * double(step.dev.mem.arena_bytes()),
                  grouped(ll(most)).c_str());
    } catch (const UsageError&) {}  // this model cannot
  }
};

// Ways to make so many of the changes, from a group on.
int64_t ways(const Changes& groups, size_t changes, size_t from = 0) {
  if (changes == 0) return 1;
  int64_t n = 0;
  for (size_t g = from; g < groups.size(); g++) n += int64_t(groups[g].size()) * ways(groups, changes - 1, g + 1);
  return n;
}

// The fewest ranks, of `from` and its doubles, on which the run fits with blocks recomputed; 0: none. least: bytes of
// all ranks that any run needs. Of a deep model each try takes its time. At any moment of the step so much is a rank's
// alone, and the rest is divided; so the peak is convex in 1 / ranks, and a line through two tries, each of twice the
// ranks of the one before, tells what any number of ranks needs at least. Where there is no room for that the search
// ends.
struct MoreRanks {
  int ranks = 0;
  double bytes = 0;  // of a GPU
};
MoreRanks ranks_that_fit(Options o, int from, double least, const Chip& chip) {
  recomputing(o, "block", 0).second(&o);
  o.shard = "full", o.reshard_after_forward = -1;
  double before = 0;  // bytes, of half as many ranks
  for (int64_t ranks = from; ranks <= 65536; ranks *= 2) {
    if (!fits(least / double(ranks), chip)) continue;
    try {
      const DryStep step(resolve(o, int(ranks), 0), int(ranks), chip);
      if (step.fits_on(chip)) return {int(ranks), double(step.dev.mem.arena_bytes())};
      const double peak = double(step.dev.mem.live_peak());
      if (before > 0 && !fits(2 * peak - before, chip)) break;
      before = peak;
    } catch (const UsageError&) { before = 0; }  // this model cannot be cut so
  }
  return {};
}

}  // namespace

std::string advice(const Options& o, int ranks, const Chip& chip) {
  const Run now = resolve(o, ranks, 0);
  const ModelConfig& model = now.model;
  // Weights in fp32 and two moments in bf16, at least: what these leave no room for is not run dry.
  const double least = 8.0 * double(parameter_count(model));
  // Of a deep or wide model fewer changes are looked at: so many blocks are run dry in a second or two, and a piece
  // takes about a quarter of a block.
  constexpr int64_t most_blocks = 50000;
  const int64_t blocks = model.depth + pieces_of_a_micro_batch(model, now.batch, now.dtype) / 4;
  const Changes groups = possible_changes(o, ranks);
  const char* const looked_at[] = {"not every change was looked at", "no single change fits",
                                   "no combination of up to two changes fits",
                                   "no combination of up to three changes fits"};
  size_t changes = 1;
  for (; changes <= 3 && fits(least / ranks, chip); changes++) {
    if (ways(groups, changes) * blocks > most_blocks) break;
    Cheapest cheapest{groups, ranks, chip};
    cheapest.search(0, changes, o, "");
    if (!cheapest.best.empty()) return "the cheapest change that fits: " + cheapest.best + "\n";
  }
  const std::string none = looked_at[fits(least / ranks, chip) ? changes - 1 : 3];
  const MoreRanks more = ranks_that_fit(o, changes == 1 ? ranks : 2 * ranks, least, chip);
  if (more.ranks > 0)
    return strf("%s on %d GPU%s; %s on %d does: %.1f GB\n", none.c_str(), ranks, ranks == 1 ? "" : "s",
                recomputing(o, "block", 0).first.c_str(), more.ranks, 1e-9 * more.bytes);
  return "no change makes it fit: a micro-batch is too large for one GPU; lower --batch or --seq\n";
}

namespace {

// --gpu's, the one here, or an H200.
std::string chip_for(const Run& r) {
  return !r.o.gpu.empty() ? r.o.gpu : gpu_count() > 0 ? Device(Backend::gpu, 0).name : "H200";
}

// The step on that chip, and whether there is room for it.
std::string estimate_text(const Run& r, int ranks) {
  const Chip* chip = chip_named(chip_for(r));
  if (!chip) return strf("unknown chip %s: no time estimated; name one, as in --gpu h200\n", chip_for(r).c_str());
  Price p = price(r, ranks, *chip);
  if (r.fsdp.gather_over_mpi && ranks > 1) p.text = "the time of a step with --gather mpi is not estimated\n";
  if (fits(p.bytes, *chip, p.communicators))
    return p.text + strf("it fits: %.1f of %.0f GB\n", 1e-9 * p.bytes, 1e-9 * chip->memory);
  return p.text +
         strf("it does not fit: %.1f GB, and %s has %.0f, of which CUDA and NCCL take %.1f\n", 1e-9 * p.bytes,
              chip->name, 1e-9 * chip->memory, 1e-9 * reserve(p.communicators)) +
         advice(r.o, ranks, *chip);
}

// --plan and --show-schedule, either or both.
std::string plan_text(Run r, int ranks) {
  Device dev(r.backend, Device::plan_only);
  const Chip* chip = chip_named(chip_for(r));
  if (chip && r.backend == Backend::gpu) dev.compute_capability = chip->compute_capability;
  const Elsewhere there = elsewhere(&r, ranks, chip && chip->copy_engines);
  const auto begun = std::chrono::steady_clock::now();
  const std::vector<Issued> issued = plan(dev, there.world, there.transport, r);
  // Estimate and advice are a few times that.
  if (std::chrono::steady_clock::now() - begun > std::chrono::milliseconds(500))
    terminal::say(strf("note: planning %lld blocks takes some seconds", ll(r.model.depth)));
  std::string text = strf("%s%s: %s, %s%s, batch %lld x %lld tokens a rank\n", name_of(r.model.arch),
                          r.model.sparse ? " with NSA" : "", size_text(r.model).c_str(), name_of(r.dtype),
                          fp8_text(r.model).c_str(), ll(r.batch), ll(r.model.seq));
  if (r.o.plan) text += units_text(r, ranks) + memory_table(dev.mem.report(), ranks);
  if (r.o.plan && r.backend == Backend::gpu) text += estimate_text(r, ranks);
  else if (!r.o.gpu.empty()) text += "--gpu " + r.o.gpu + " has no effect: a step on a CPU is not estimated\n";
  if (r.o.show_schedule) text += choices_text(r, there.transport) + schedule_text(issued, r.model, ranks);
  return text;
}

// --plan --trace.
void write_planned_trace(const Run& r, int ranks, const std::string& command) {
  const std::string& path = r.o.trace;
  check_trace(path);
  REQUIRE_USER(r.backend == Backend::gpu, "--trace: the time of a step on a CPU is not estimated; drop --device cpu");
  const Chip* chip = chip_named(chip_for(r));
  REQUIRE_USER(chip, "--trace: nothing is known of the chip %s; name one, as in --gpu h200", chip_for(r).c_str());
  write_trace(
      path, planned_trace(r, ranks, *chip),
      {{"command", command}, {"commit", commit()}, {"date", now_iso8601()}, {"ranks", ranks}, {"chip", chip->name}});
}

std::string hardware_text() {
  const int gpus = gpu_count();
  const Device dev(gpus > 0 ? Backend::gpu : Backend::cpu, 0);
  nlohmann::json all = hardware_json(dev, gpus);
  all["versions"] = versions_json();
  return all.dump() + "\n";
}

}  // namespace

void print_answer(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  terminal::flush_output(terminal::OutputReader::reads_all);
}

int answer(const Options& o, const std::string& command) {
  const Launcher by = launcher_of(std::getenv);
  if (by.of_mpi() && by.rank != 0) return 0;
  const int ranks = o.world ? int(o.world) : by.of_mpi() ? by.ranks : 1;
  only_one({{"--version", o.version},
            {"--hardware", o.hardware},
            {"--list-presets", o.list_presets},
            {"--completion", !o.completion.empty()},
            {"--show-params", o.show_params},
            {o.plan ? "--plan" : "--show-schedule", o.plan || o.show_schedule}});
  for (const std::string& warning : o.warnings) terminal::say("note: " + warning);
  std::string text;
  const auto resolved = [&] {
    if (!o.resume.empty()) return resolve_resumed(load_resumed(o, World()), o, ranks, gpu_count());
    if (o.init.empty()) return resolve(o, ranks, gpu_count());
    return resolve_from(parse_model_folder(o.init, read_model_folder(o.init)), o, ranks, gpu_count());
  };
  if (o.version) text = versions();
  else if (o.hardware) text = hardware_text();
  else if (o.list_presets) text = presets_text();
  else if (!o.completion.empty()) text = completion_script();
  else if (o.show_params) text = parameters_text(resolved(), ranks);
  else {
    const Run r = resolved();
    if (!o.trace.empty()) write_planned_trace(r, ranks, command);
    text = plan_text(r, ranks);
  }
  print_answer(text);
  return 0;
}
