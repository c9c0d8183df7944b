#include "lib/program/sweep_parts.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include <unistd.h>

#include "lib/device/error.h"
#include "lib/program/format.h"
#include "lib/program/options.h"
#include "lib/program/process.h"

using ll = long long;

namespace sweep_parts {

// Steps that take so long, with one at least that is not the row's first.
int64_t steps_of(double seconds, double step_seconds) {
  if (seconds <= 0 || step_seconds <= 0) return 0;
  return int64_t(std::min(1000.0, std::ceil(seconds / step_seconds)));
}

// What a row says of its steps, or --steps in its place; a window that ends later has as many.
static int64_t steps_said(const SweepRun& run, const SweepRow& row) {
  return run.steps ? run.steps : row.steps > 0 ? std::max(row.steps, run.last) : row.steps;
}

// The last step that counts, where nobody says which: 20 do, and of short steps as many as take a second. A chip at its
// power limit swings, and 20 steps of a few milliseconds fall anywhere in a swing.
static int64_t usual_last(const SweepRun& run, const Task& t) {
  if (!run.machine.gpu) return 6;
  const int64_t of_a_second = run.steps ? 0 : steps_of(1, t.plan.seconds);
  return std::max<int64_t>(24, t.first - 1 + of_a_second);
}

static void choose_steps(const SweepRun& run, Task* t) {
  const bool whole = t->row.steps != 0, slow = t->plan.seconds > 1;
  const bool profiles =
      std::find(run.sweep->measured.begin(), run.sweep->measured.end(), "--profile") != run.sweep->measured.end();
  t->first = run.first ? run.first : t->row.first ? t->row.first : run.machine.gpu ? 5 : 3;
  t->last = run.last ? run.last : t->row.last ? t->row.last : usual_last(run, *t);
  const int64_t usual = !run.machine.gpu ? 6 : slow ? 0 : 30, said = steps_said(run, t->row);
  t->steps = said < 0 ? 0 : said > 0 ? said : std::max(usual, t->last + profiles);
  if (t->last < 0) t->last = t->steps;
  if (t->steps > 0) t->last = std::min(t->last, t->steps), t->first = std::min(t->first, t->last);
  if (!whole) t->warm = steps_of(run.warm_seconds, t->plan.seconds);
}

namespace {

// What becomes of each option of ./train, by its key, where PyTorch runs beside it; each is in one of these lists.
//
// PyTorch is told. DDP has no units, and only --wrap auto has sizes; how many steps there are a corpus may have to
// tell.
const char told[] =
    "arch dim depth heads kv_heads head_dim v_head_dim hidden vocab seq rope_base batch grad_accum accum_sync shard "
    "param_dtype reduce_dtype autocast tf32 recompute keep_attention moments clip lr min_lr_ratio beta1 beta2 eps "
    "weight_decay seed optimizer_in_backward tie_embeddings freeze data";
const char told_of_units[] = "wrap reshard_after_forward forward_prefetch backward_prefetch replicate_below";
const char told_of_sizes[] = "wrap_min_params bucket_mb";
const char told_of_fp8[] = "matmul_dtype fp8_scaling gather_dtype";
const char told_of_steps[] = "steps warmup";
const char told_by_hand[] = "device meta_init";
// It cannot follow: with another value than the default there is no PyTorch beside the row. Validation keeps a part of
// the data from training.
const char not_followed[] = "attn norm_eps rope_scaling clip_norm on_nan global_batch val_every save_dtype init resume";
// It trains the same without: what sizes come from, NSA's own, how ours moves and computes, when it ends, what it says.
const char ours_alone[] =
    "preset nsa_block nsa_stride nsa_select_block nsa_selected nsa_window nsa_phi nsa_gate nsa_stats limit_all_gathers "
    "keep_cheap gradient_slots gather reduce reduce_tail reduce_ctas graph fuse tune_matmul allow_single_rank timeout "
    "stall stop_after tokens epochs minutes val_data val_batches eval sample sample_every prompt temperature top_k "
    "save save_every keep export export_dtype export_shard_mb max_positions log log_every tensorboard comm_timing "
    "diagnostics mem_dump_every profile trace plan world gpu show_schedule show_params hardware list_presets "
    "completion version";

Words keys_of(const std::vector<const char*>& lists) {
  Words keys;
  for (const char* list : lists)
    for (const std::string& key : words_of(list)) keys.push_back(key);
  return keys;
}

std::string option_of(std::string key) {
  std::replace(key.begin(), key.end(), '_', '-');
  return "--" + key;
}
std::string text_of(const json& value) { return value.is_string() ? value.get<std::string>() : value.dump(); }

// An option that PyTorch cannot follow, as it was typed; "": there is none.
std::string refused_by(const Task& t, const Peer& peer) {
  static const json unset = to_json(Options());
  static const Words known =
      keys_of({told, told_of_units, told_of_sizes, told_of_fp8, told_of_steps, told_by_hand, not_followed, ours_alone});
  const json& c = t.plan.config;
  for (const auto& [key, value] : c.items())
    if (std::find(known.begin(), known.end(), key) == known.end())
      throw Error(strf("lib/program/sweep_task.cc has to say what PyTorch does with --%s", key.c_str()));
  for (const std::string& key : words_of(not_followed)) {
    const bool follows = key == "attn" ? c[key] != "nsa" || peer.variant == "dense"  // which its column says
                         : key == "global_batch"
                             ? c[key] == c["batch"].get<int64_t>() * c["grad_accum"].get<int64_t>() * t.ranks
                             : c[key] == unset[key];
    if (!follows) return option_of(key) + " " + text_of(c[key]);
  }
  return "";
}

}  // namespace

// Leaves out what PyTorch cannot run, and says why where nothing is left.
static void drop_peers(Task* t) {
  std::string why;
  const auto refused = [&](const Peer& peer) {
    const std::string option = refused_by(*t, peer);
    if (!option.empty()) why = "PyTorch has no " + option;
    return !option.empty();
  };
  std::vector<Peer>& peers = t->row.peers;
  peers.erase(std::remove_if(peers.begin(), peers.end(), refused), peers.end());
  if (!why.empty() && peers.empty()) t->row.no_peer = why;
}

// Plans a row; why ./train would refuse it, "" where it would not.
static std::string refusal(const Words& options, int64_t ranks, const std::string& chip, Planned* plan) {
  try {
    *plan = planned(options, ranks, chip);
    return "";
  } catch (const UsageError& e) { return e.what(); }
}

static std::string stem_of(const SweepRun& run, int64_t number) {
  return strf("build/bench/%s-%lld-ranks-%lld", run.sweep->name, ll(run.machine.ranks), ll(number));
}
std::string file_of(const SweepRun& run, int64_t number, const char* ending) {
  return stem_of(run, number) + strf("-%d%s", int(getpid()), ending);
}
TrainFiles own_files(const SweepRun& run, int64_t number) {
  return {file_of(run, number, ".jsonl"), file_of(run, number, "-trace.json")};
}
TrainFiles recorded_files(const SweepRun& run, int64_t number) {
  return {stem_of(run, number) + ".jsonl", stem_of(run, number) + "-trace.json"};
}

bool trains_otherwise(const json& before, const json& now) {
  const json none = json::object(), was = before.value("config", none), is = now.value("config", none);
  for (const std::string& key : keys_of({told, told_of_units, told_of_sizes, told_of_fp8}))
    if (was.contains(key) && is.contains(key) && was[key] != is[key]) return true;
  return false;
}

// What ./bench tells every row itself, with what to give it in place of those behind --, and what trains nothing.
static void refuse_own_options(const Words& extra) {
  const std::string sets = "./bench sets it for each row; ", prints = "it prints and exits, so that no row would train";
  const std::pair<const char*, std::string> own[] = {
      {"--steps", sets + "give --steps N before the --"},
      {"--gpu", sets + "give --gpu CHIP before the --"},
      {"--world", sets + "give --ranks N before the --"},
      {"--plan", sets + "give --gpu CHIP before the --, for plans of it"},
      {"--device", sets + "rows run on GPUs where the machine has some"},
      {"--log", sets + "--out FILE is where the rows go"},
      {"--help", prints},
      {"-h", prints},
      {"--version", prints},
      {"--hardware", prints},
      {"--list-presets", prints},
      {"--completion", prints},
      {"--show-params", prints},
      {"--show-schedule", prints}};
  for (const auto& [option, why] : own)
    for (const std::string& word : extra)
      REQUIRE_USER(word.substr(0, word.find('=')) != option, "%s behind --: %s", option, why.c_str());
}

// What a row gives an option, with its name: "" where it leaves it out.
static std::string given(const SweepRow& row, const std::string& option) {
  const auto is_option = [](const std::string& word) { return word.rfind("--", 0) == 0; };
  const auto at = std::find(row.options.begin(), row.options.end(), option);
  if (at == row.options.end()) return "";
  return join(Words(at, std::find_if(at + 1, row.options.end(), is_option)));
}

// Rows that differ in an option, and are called by it, would run with one value of it and keep their names.
static void refuse_varied_options(const SweepRun& run, const std::vector<SweepRow>& rows) {
  for (const std::string& word : run.extra) {
    const std::string option = word.substr(0, word.find('='));
    if (option.rfind("--", 0) != 0 || rows.empty()) continue;
    for (const SweepRow& row : rows)
      REQUIRE_USER(given(row, option) == given(rows[0], option),
                   "%s behind --: it is what rows of --sweep %s differ in; choose rows with --only", option.c_str(),
                   run.sweep->name);
  }
}

std::vector<Task> tasks_of(const SweepRun& run) {
  refuse_own_options(run.extra);
  std::vector<SweepRow> rows = run.sweep->rows(run.machine);
  refuse_varied_options(run, rows);
  std::vector<Task> tasks;
  int64_t number = 0;
  for (SweepRow& row : rows) {
    number++;
    if (!run.only.empty() && !run.only.count(number)) continue;
    Task t;
    t.number = number, t.ranks = row.ranks ? row.ranks : run.machine.ranks, t.row = std::move(row);
    if (!t.row.no_counterpart) {
      if (t.row.drops_trace) set_options({"--trace", recorded_files(run, number).trace}, &t.row.options);
      const Words own = t.row.options;
      set_options(run.extra, &t.row.options);
      // The schedule of the learning rate, which both follow, is that of the steps.
      if (t.row.steps > 0) set_options({"--steps", std::to_string(steps_said(run, t.row))}, &t.row.options);
      const std::string chip = run.machine.gpu ? run.machine.chip : "";
      t.refused = refusal(t.row.options, t.ranks, chip, &t.plan);
      if (Planned plan; !t.refused.empty()) t.by_extra = refusal(own, t.ranks, chip, &plan).empty();
      if (t.refused.empty()) drop_peers(&t);
    }
    t.only_planned = run.machine.gpu && t.ranks > run.machine.gpus;
    choose_steps(run, &t);
    if (runs(t) && t.steps > 0) {  // the warm-up of the learning rate follows from all steps
      Words options = t.row.options;
      set_options({"--steps", std::to_string(t.warm + t.steps)}, &options);
      t.plan.config = resolved(options, t.ranks, run.machine.gpu ? run.machine.chip : "");
    }
    tasks.push_back(std::move(t));
  }
  for (int64_t n : run.only)
    REQUIRE_USER(n <= number, "--only %lld: --sweep %s has %lld rows", ll(n), run.sweep->name, ll(number));
  return tasks;
}

bool runs(const Task& t) { return !t.row.no_counterpart && t.refused.empty() && !t.only_planned; }

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

Words train_words(const SweepRun& run, const Task& t, const TrainFiles& files) {
  Words words = {"./train"};
  set_options(options_of(*run.sweep, t.row), &words);
  if (!run.machine.gpu) set_options({"--device", "cpu"}, &words);
  if (t.row.steps == 0 || run.steps) set_options({"--steps", std::to_string(t.warm + t.steps)}, &words);
  if (t.ranks == 1 && run.machine.gpus > 1) set_options({"--allow-single-rank"}, &words);
  std::replace(words.begin(), words.end(), recorded_files(run, t.number).trace, files.trace);
  set_options({"--log", files.log}, &words);
  return words;
}
std::string train_command(const SweepRun& run, const Task& t) {
  return prefix(t.row) + "mpirun -np " + std::to_string(t.ranks) + " " +
         join(train_words(run, t, recorded_files(run, t.number)));
}

Words peer_words(const SweepRun& run, const Task& t, const Peer& peer) {
  Words words;
  const auto is = [&](const char* key, const char* value) { return t.plan.config.value(key, "") == value; };
  const bool shards = !is("shard", "none");
  std::vector<const char*> lists = {told};
  if (shards) lists.push_back(told_of_units);
  if (shards && is("wrap", "auto")) lists.push_back(told_of_sizes);
  if (is("matmul_dtype", "fp8")) lists.push_back(told_of_fp8);
  if (t.steps > 0) lists.push_back(told_of_steps);
  for (const std::string& key : keys_of(lists)) {
    if (!t.plan.config.contains(key)) continue;
    const json& value = t.plan.config[key];
    const std::string option = option_of(key);
    if (value.is_boolean()) {
      if (value.get<bool>()) words.push_back(option);
      continue;
    }
    const std::string as_text = text_of(value);
    if (as_text.empty() || as_text == "-1") continue;  // at its default
    words.insert(words.end(), {option, as_text});
  }
  // What is not sharded is made whole on every rank anyway.
  if (shards && t.plan.config.value("meta_init", 1) == 0) set_options({"--meta-init", "0"}, &words);
  // Ours are gathered in fp32 and cast behind the gather; the configuration names what they are cast to.
  if (!t.plan.config.value("autocast", "").empty()) set_options({"--param-dtype", "fp32"}, &words);
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
