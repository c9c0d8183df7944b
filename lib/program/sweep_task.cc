#include "lib/program/sweep_parts.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include <unistd.h>

#include "lib/device/error.h"
#include "lib/program/format.h"
#include "lib/program/process.h"

using ll = long long;

namespace sweep_parts {

// Steps that take so long, with one at least that is not the row's first.
int64_t steps_of(double warm_seconds, double step_seconds) {
  if (warm_seconds <= 0 || step_seconds <= 0) return 0;
  return int64_t(std::min(1000.0, std::ceil(warm_seconds / step_seconds)));
}

// What a row says of its steps, or --steps in its place; a window that ends later has as many.
static int64_t steps_said(const SweepRun& run, const SweepRow& row) {
  return run.steps ? run.steps : row.steps > 0 ? std::max(row.steps, run.last) : row.steps;
}

static void choose_steps(const SweepRun& run, Task* t) {
  const bool whole = t->row.steps != 0, slow = t->plan.seconds > 1;
  const bool profiles =
      std::find(run.sweep->measured.begin(), run.sweep->measured.end(), "--profile") != run.sweep->measured.end();
  t->first = run.first ? run.first : t->row.first ? t->row.first : run.machine.gpu ? 5 : 3;
  t->last = run.last ? run.last : t->row.last ? t->row.last : run.machine.gpu ? 24 : 6;
  const int64_t usual = !run.machine.gpu ? 6 : slow ? 0 : 30, said = steps_said(run, t->row);
  t->steps = said < 0 ? 0 : said > 0 ? said : std::max(usual, t->last + profiles);
  if (t->last < 0) t->last = t->steps;
  if (t->steps > 0) t->last = std::min(t->last, t->steps), t->first = std::min(t->first, t->last);
  if (!whole) t->warm = steps_of(run.warm_seconds, t->plan.seconds);
}

// Plans a row; why ./train would refuse it, "" where it would not.
static std::string refusal(const Words& options, int64_t ranks, const std::string& chip, Planned* plan) {
  try {
    *plan = planned(options, ranks, chip);
    return "";
  } catch (const UsageError& e) { return e.what(); }
}

std::vector<Task> tasks_of(const SweepRun& run) {
  std::vector<Task> tasks;
  int64_t number = 0;
  for (SweepRow& row : run.sweep->rows(run.machine)) {
    number++;
    if (!run.only.empty() && !run.only.count(number)) continue;
    Task t;
    t.number = number, t.ranks = row.ranks ? row.ranks : run.machine.ranks, t.row = std::move(row);
    if (!t.row.no_counterpart) {
      const Words own = t.row.options;
      set_options(run.extra, &t.row.options);
      // The schedule of the learning rate, which both follow, is that of the steps.
      if (t.row.steps > 0) set_options({"--steps", std::to_string(steps_said(run, t.row))}, &t.row.options);
      const std::string chip = run.machine.gpu ? run.machine.chip : "";
      t.refused = refusal(t.row.options, t.ranks, chip, &t.plan);
      if (Planned plan; !t.refused.empty()) t.by_extra = refusal(own, t.ranks, chip, &plan).empty();
      if (!t.plan.config.value("save_dtype", "").empty() && !t.row.peers.empty())
        t.row.peers.clear(), t.row.no_peer = "torchao does not save activations in fp8";
    }
    t.only_planned = run.machine.gpu && t.ranks > run.machine.gpus;
    choose_steps(run, &t);
    tasks.push_back(std::move(t));
  }
  for (int64_t n : run.only)
    REQUIRE_USER(n <= number, "--only %lld: --sweep %s has %lld rows", ll(n), run.sweep->name, ll(number));
  return tasks;
}

bool runs(const Task& t) { return !t.row.no_counterpart && t.refused.empty() && !t.only_planned; }

static std::string stem_of(const SweepRun& run, int64_t number) {
  return strf("build/bench/%s-%lld-ranks-%lld", run.sweep->name, ll(run.machine.ranks), ll(number));
}
std::string file_of(const SweepRun& run, int64_t number, const char* ending) {
  return stem_of(run, number) + strf("-%d%s", int(getpid()), ending);
}
void forget(const Words& files) {
  for (const std::string& file : files) std::remove(file.c_str());
}

Words environment_of(const SweepRow& row) {
  Words words;
  for (const auto& e : row.environment) words.push_back(e.first + "=" + e.second);
  return words;
}
std::string prefix(const SweepRow& row) {
  std::string text;
  for (const std::string& e : environment_of(row)) text += e + " ";
  return text;
}

Words train_words(const SweepRun& run, const Task& t, const std::string& log) {
  Words words = {"./train"};
  set_options(options_of(*run.sweep, t.row), &words);
  if (!run.machine.gpu) set_options({"--device", "cpu"}, &words);
  if (t.row.steps == 0 || run.steps) set_options({"--steps", std::to_string(t.warm + t.steps)}, &words);
  if (t.ranks == 1 && run.machine.gpus > 1) set_options({"--allow-single-rank"}, &words);
  set_options({"--log", log}, &words);
  return words;
}
std::string recorded_log(const SweepRun& run, const Task& t) { return stem_of(run, t.number) + ".jsonl"; }
std::string train_command(const SweepRun& run, const Task& t) {
  return prefix(t.row) + "mpirun -np " + std::to_string(t.ranks) + " " +
         join(train_words(run, t, recorded_log(run, t)));
}

// What PyTorch is told of our options, by their keys; everything else of ./train is ours alone. DDP has no units.
static const char told[] =
    "arch dim depth heads kv_heads hidden vocab seq batch grad_accum accum_sync shard param_dtype reduce_dtype "
    "autocast "
    "tf32 recompute keep_attention moments clip lr min_lr_ratio warmup beta1 beta2 eps weight_decay seed "
    "optimizer_in_backward tie_embeddings freeze data";
static const char told_of_units[] = " wrap reshard_after_forward forward_prefetch backward_prefetch";
static const char told_of_fp8[] = " matmul_dtype fp8_scaling gather_dtype";

Words peer_words(const SweepRun& run, const Task& t, const Peer& peer) {
  Words words;
  const bool shards = t.plan.config.value("shard", "") != "none",
             fp8 = t.plan.config.value("matmul_dtype", "") == "fp8";
  for (const std::string& key :
       words_of(std::string(told) + (shards ? told_of_units : "") + (fp8 ? told_of_fp8 : ""))) {
    if (!t.plan.config.contains(key)) continue;
    const json& value = t.plan.config[key];
    std::string option = "--" + key;
    std::replace(option.begin(), option.end(), '_', '-');
    if (value.is_boolean()) {
      if (value.get<bool>()) words.push_back(option);
      continue;
    }
    const std::string as_text = value.is_string() ? value.get<std::string>() : value.dump();
    if (as_text.empty() || as_text == "-1") continue;  // at its default
    words.insert(words.end(), {option, as_text});
  }
  // What is not sharded is made whole on every rank anyway.
  if (shards && t.plan.config.value("meta_init", 1) == 0) set_options({"--meta-init", "0"}, &words);
  // Ours are gathered in fp32 and cast behind the gather; the configuration names what they are cast to.
  if (!t.plan.config.value("autocast", "").empty()) set_options({"--param-dtype", "fp32"}, &words);
  if (t.steps > 0) set_options({"--steps", std::to_string(t.steps)}, &words);
  set_options({"--first", std::to_string(t.first)}, &words);
  if (t.last > 0) set_options({"--last", std::to_string(t.last)}, &words);
  words.push_back("--log-losses");
  if (t.warm > 0) set_options({"--warm-seconds", strf("%g", run.warm_seconds)}, &words);
  if (!run.machine.gpu) set_options({"--device", "cpu"}, &words);
  set_options(peer.options, &words);
  return words;
}
Words torchrun(int64_t ranks) {
  return words_of("python3 -m torch.distributed.run --standalone --nproc_per_node=" + std::to_string(ranks) +
                  " peers/torch_fsdp.py");
}
std::string peer_command(const SweepRun& run, const Task& t, const Peer& peer) {
  return prefix(t.row) + join(torchrun(t.ranks)) + " " + join(peer_words(run, t, peer));
}

}  // namespace sweep_parts
