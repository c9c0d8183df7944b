// Sweeps: how time and memory of a step change with depth, sequence length, width, the number of ranks, or with one
// option of FSDP at a time. And the time of attention and of collectives alone.
//
//   ./bench --sweep depth            on the preset `rope` (on a CPU, on `tiny`), a rank for each GPU
//   ./bench --sweep width --ranks 2 --values 1024,2048 -- --param-dtype fp32
//   ./bench --sweep knobs            what each option of FSDP costs, one at a time
//   ./bench --sweep attention        one layer's NSA beside dense attention, by sequence length
//   ./bench --sweep collectives      gathers and reductions by size, alone and beside a matmul
//   ./bench --attention              the attention kernels on GPU 0
//
// Run it without mpirun. Each row of a sweep of training runs is a run of its own, `mpirun -np W ./train ...` in fresh
// processes: no memory is left over from the row before, and a row that fails costs only itself. What is read is the
// JSON that ./train logs. Rows go into results/ with the command, commit and hardware that made them, and a Markdown
// table ends the output. A new sweep is a row of the table `sweeps`; what is timed without ./train is in
// lib/program/timing.h.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

#include "CLI/CLI.hpp"
#include "nlohmann/json.hpp"

#include "build/version.h"
#include "lib/device/device.h"
#include "lib/program/process.h"
#include "lib/program/rows.h"
#include "lib/program/telemetry.h"
#include "lib/program/timing.h"

namespace {

using nlohmann::json;

// ---------------------------------------------------------------------------------------------------------- sweeps

enum class Varies {
  option,      // an option of ./train, or several that follow from one value
  variant,     // a list of changes to one run of ./train; the value counts them from 1
  ranks,       // how many ranks run ./train
  layer,       // sequence length of one layer's attention; see time_attention_layers
  collective,  // MiB of a collective; see collectives_rank
  nothing,     // see time_attention_kernels
};

struct Variant {
  const char* options;                                               // of ./train; "": the run as it is
  enum Needs { nothing, nccl, nccl_and_no_timing } needs = nothing;  // nccl: a GPU for each rank
};

struct By {
  Varies varies;
  std::function<std::string(int64_t value, bool gpu)> options = {};  // Varies::option: of ./train, by value
  std::vector<Variant> variants = {};
  bool trains() const { return varies == Varies::option || varies == Varies::ranks || varies == Varies::variant; }
};

By option(const char* name) {
  return {Varies::option, [name](int64_t value, bool) { return name + (" " + std::to_string(value)); }};
}

// Heads of 128 in groups of four, as in the reference shape; on a CPU heads of 32 in pairs.
By width() {
  return {Varies::option, [](int64_t dim, bool gpu) {
            const int64_t heads = std::max<int64_t>(1, dim / (gpu ? 128 : 32)), group = gpu ? 4 : 2;
            return "--dim " + std::to_string(dim) + " --hidden " + std::to_string(4 * dim) + " --heads " +
                   std::to_string(heads) + " --kv-heads " + std::to_string(std::max<int64_t>(1, heads / group));
          }};
}

using Values = std::vector<int64_t>;

struct Sweep {
  const char* name;  // of --sweep; names the value in rows and table
  const char* help;  // what varies
  By by;
  Values on_gpus = {}, on_cpu = {};  // by default. Ranks: none means 1 to --ranks. Variants: all that can run here
  const char* file = name;           // rows go into results/FILE-DATE.jsonl
};

// clang-format off
const By knobs = {Varies::variant, {}, {
    {""},
    {"--gather nccl", Variant::nccl},
    {"--shard grad"},
    {"--shard none"},
    {"--shard hybrid:2"},
    {"--wrap sublayer"},
    {"--wrap auto"},
    {"--wrap single"},
    {"--limit-all-gathers 1"},
    {"--limit-all-gathers off"},
    {"--gradient-slots 1"},
    {"--forward-prefetch 0 --backward-prefetch none"},
    {"--backward-prefetch post"},
    {"--reduce-dtype fp32"},
    {"--param-dtype fp32 --autocast bf16"},
    {"--moments bf16"},
    {"--clip 0 --optimizer-in-backward 1"},
    {"--replicate-below 65536"},
    {"--meta-init 0"},
    {"--grad-accum 2"},
    {"--grad-accum 2 --accum-sync last"},
    {"--recompute mlp"},
    {"--recompute attn"},
    {"--recompute attn --keep-attention 1"},
    {"--recompute both"},
    {"--recompute both --keep-attention 1"},
    {"--recompute block"},
    {"--recompute block --keep-attention 1"},
    {"--graph 1", Variant::nccl_and_no_timing},
}};

const std::vector<Sweep> sweeps = {
    // name, what varies, by
    //    default values on GPUs, on a CPU
    {"depth", "blocks", option("--depth"),
     {2, 4, 6, 8, 12, 16, 24, 32}, {1, 2, 4, 8}},
    {"seq", "tokens in a sequence", option("--seq"),
     {512, 1024, 2048, 4096, 8192, 16384, 32768}, {128, 256, 512, 1024}},
    {"width", "dim, with heads and MLP in proportion", width(),
     {1024, 2048, 4096, 6144, 8192, 12288, 16384}, {64, 128, 256}},
    {"world", "ranks", {Varies::ranks},
     {}, {1, 2, 3, 4}},
    {"knobs", "one option of FSDP in each row", knobs},
    {"attention", "sequence length of one layer, NSA beside dense", {Varies::layer},
     {4096, 8192, 16384, 32768, 65536, 131072}, {256, 512, 1024}, "nsa"},
    {"collectives", "MiB of all-gathers and reduce-scatters", {Varies::collective},
     {1, 4, 16, 64, 336, 1024}, {1, 8}},
};
const Sweep attention_kernels = {"attention", "time the attention kernels on GPU 0", {Varies::nothing}};
// clang-format on

// -------------------------------------------------------------------------------------------------------- settings

struct Settings {
  const Sweep* sweep = nullptr;
  std::string preset, window;
  RowFile rows;
  Values values;
  int64_t steps = 0, ranks = 0, timeout = 900;
  int64_t first = 0, last = 0;  // the window: the steps that count, from 1
  bool peer = false, gpu = false;
  bool rank = false;  // one of the ranks that --sweep collectives has started
  Words extra;        // options of ./train, after --
};

const Sweep& find_sweep(const std::string& name) {
  return *std::find_if(sweeps.begin(), sweeps.end(), [&](const Sweep& s) { return s.name == name; });
}

Settings parse(int argc, char** argv) {
  Settings s;
  const auto end = std::find(argv, argv + argc, std::string("--"));
  if (end != argv + argc) s.extra.assign(end + 1, argv + argc);
  Words typed(argv, argv + argc), names;
  typed.erase(std::remove(typed.begin(), typed.end(), "--rank"), typed.end());
  s.rows.command = join(typed), s.rows.commit = FSDP_COMMIT;
  std::string name, varied;
  bool kernels = false;
  for (const Sweep& sweep : sweeps) {
    names.push_back(sweep.name);
    varied += strf("%s %s: %s", varied.empty() ? "" : ";", sweep.name, sweep.help);
  }
  const CLI::Range count(1, 1 << 20);
  CLI::App app(
      "Time and memory of a training step over a sweep, or the time of attention or of collectives alone. Options of "
      "./train follow after --");
  // clang-format off
  auto* sweep = app.add_option("--sweep", name, "what to vary." + varied)->check(CLI::IsMember(names));
  app.add_flag("--attention", kernels, attention_kernels.help)->excludes(sweep);
  app.add_option("--values", s.values, "values to sweep, separated by commas (default: a list that suits the machine)")
      ->delimiter(',')->check(CLI::Range(int64_t(1), int64_t(1) << 40))->needs(sweep);
  auto* ranks = app.add_option("--ranks", s.ranks, "ranks (default: one for each GPU; on a CPU 2)")->check(count)->needs(sweep);
  auto* preset = app.add_option("--preset", s.preset, "shape to start from (default: rope on GPUs, tiny on a CPU)")->needs(sweep);
  auto* steps = app.add_option("--steps", s.steps, "steps of each row (default: 30; on a CPU 6)")->check(count)->needs(sweep);
  auto* window = app.add_option("--window", s.window, "FIRST:LAST, the steps that count, from 1 (default: 5:24; on a CPU 3:6)")->needs(sweep);
  auto* timeout = app.add_option("--timeout", s.timeout, "seconds that a row may take (default: 900)")->check(count)->needs(sweep);
  auto* peer = app.add_flag("--peer", s.peer, "run the same shape in PyTorch after each row (peers/torch_fsdp.py)")->needs(sweep);
  app.add_option("--out", s.rows.path, "file to append rows to, as JSON lines (default: results/SWEEP-DATE.jsonl)");
  app.add_flag("--rank", s.rank)->needs(sweep)->group("");
  // clang-format on
  try {
    app.parse(int(end - argv), argv);
  } catch (const CLI::CallForHelp&) {
    std::printf("%s", app.help().c_str());
    std::exit(0);
  } catch (const CLI::ParseError& e) { throw UsageError(std::string(e.what()) + "; see ./bench --help"); }
  REQUIRE_USER(kernels || !name.empty(), "choose --sweep NAME or --attention; see ./bench --help");
  s.sweep = kernels ? &attention_kernels : &find_sweep(name);

  const By& by = s.sweep->by;
  const std::string what = kernels ? "--attention" : "--sweep " + name;
  REQUIRE_USER(by.trains() || s.extra.empty(), "%s does not run ./train; leave out -- and what follows it",
               what.c_str());
  for (CLI::Option* o : {preset, steps, window, peer, ranks, timeout}) {
    const bool used = by.trains() || (by.varies == Varies::collective && (o == ranks || o == timeout));
    REQUIRE_USER(used || o->count() == 0, "%s does not use %s; leave it out", what.c_str(), o->get_name().c_str());
  }
  REQUIRE_USER(by.varies != Varies::variant || !s.peer, "%s: PyTorch does not have these options; leave out --peer",
               what.c_str());
  for (int64_t v : s.values)
    REQUIRE_USER(by.varies != Varies::variant || v <= int64_t(by.variants.size()),
                 "%s --values %lld: choose rows from 1 to %zu", what.c_str(), static_cast<long long>(v),
                 by.variants.size());
  return s;
}

Values default_values(const Sweep& sweep, bool gpu, bool nccl, int64_t ranks) {
  Values values = gpu ? sweep.on_gpus : sweep.on_cpu;
  if (sweep.by.varies == Varies::ranks && values.empty())
    for (int64_t w = 1; w <= ranks; ++w) values.push_back(w);
  for (size_t i = 0; i < sweep.by.variants.size(); ++i)
    if (nccl || sweep.by.variants[i].needs == Variant::nothing) values.push_back(int64_t(i) + 1);
  return values;
}

// Fills in for this machine what the command line left open.
void complete(const json& hardware, Settings* s) {
  const int64_t gpus = hardware.value("gpus", int64_t(0));
  s->gpu = gpus > 0;
  if (s->preset.empty()) s->preset = s->gpu ? "rope" : "tiny";
  if (s->ranks == 0) s->ranks = s->gpu ? gpus : 2;
  if (s->steps == 0) s->steps = s->gpu ? 30 : 6;
  if (s->values.empty()) s->values = default_values(*s->sweep, s->gpu, s->gpu && s->ranks <= gpus, s->ranks);
  // Few steps leave a shorter window.
  s->first = std::min<int64_t>(s->gpu ? 5 : 3, s->steps), s->last = std::min<int64_t>(24, s->steps);
  if (s->window.empty()) return;
  int used = 0;
  long long first = 0, last = 0;
  const int n = std::sscanf(s->window.c_str(), "%lld:%lld%n", &first, &last, &used);
  REQUIRE_USER(n == 2 && size_t(used) == s->window.size() && first >= 1 && last >= first && last <= s->steps,
               "--window %s: give FIRST:LAST with 1 <= FIRST <= LAST <= %lld, the number of steps", s->window.c_str(),
               static_cast<long long>(s->steps));
  s->first = first, s->last = last;
}

// Makes the directories and checks that rows can be written, before the first of them takes its time.
void open_rows(Settings* s) {
  mkdir("build", 0777), mkdir("build/bench", 0777);
  if (s->rows.path.empty()) {
    mkdir("results", 0777);
    s->rows.path = strf("results/%s-%s.jsonl", s->sweep->file, now_iso8601().substr(0, 10).c_str());
  }
  s->rows.require_writable();
}

// ------------------------------------------------------------------------------------------------------- processes

// Runs a command with `ranks` ranks under mpirun, its output in a file. Returns "" or what went wrong, in the
// ranks' own words if they said it.
std::string run_ranks(int64_t ranks, const Words& words, const std::string& output, int64_t timeout_s) {
  const std::string n = std::to_string(ranks);
  // setup.sh knows the flags that this machine's mpirun needs.
  Words all = {"bash", "-c", ". ./setup.sh env " + n + " && exec mpirun $MPIRUN_FLAGS -np " + n + " \"$@\"", "bench"};
  all.insert(all.end(), words.begin(), words.end());
  const std::string error = run(all, output, timeout_s);
  if (error.empty() || error.rfind("timed out", 0) == 0) return error;
  const std::string line = error_line(output);
  return line.empty() ? error : line;
}

// What this machine has, by a process of its own: asking a GPU takes some of its memory.
json ask_hardware() {
  REQUIRE_USER(access("./train", X_OK) == 0, "no ./train in this directory: run `make`, and ./bench where ./train is");
  const std::string output = "build/bench/hardware.log", why = run({"./train", "--hardware"}, output, 120);
  for (const json& j : read_json_lines(output))
    if (j.contains("gpus")) return j;
  throw Error(strf("./train --hardware printed no JSON line%s%s; see %s", why.empty() ? "" : ": ", why.c_str(),
                   output.c_str()));
}

// ------------------------------------------------------------------------------------------------------------ rows

struct Row {
  int64_t value = 0, ranks = 0;
  std::string name;                 // the value as text, or the options that it stands for
  std::string who, command, error;  // error: empty if the row is good
  json header = json::object(), result = json::object();
};

std::string log_name(const Settings& s, const Row& row, const char* ending) {
  return strf("build/bench/%s-%lld-%s%s", s.sweep->name, static_cast<long long>(row.value), row.who.c_str(), ending);
}

// Reads what ./train logged: a header, then a line a step. Fills in the row, or says in it what is missing.
void read_log(const std::string& path, const Settings& s, Row* row) {
  std::vector<double> ms, rate, mfu, gather, reduce;
  double peak = -1, loss = 0;
  for (const json& j : read_json_lines(path)) {
    if (j.contains("config")) row->header = j;
    if (!j.contains("step")) continue;
    const int64_t step = j.value("step", int64_t(0));
    if (step < s.first || step > s.last) continue;
    auto add = [&](const char* key, std::vector<double>* to) {
      if (j.contains(key) && j[key].is_number()) to->push_back(j[key].get<double>());
    };
    add("step_ms", &ms), add("tokens_per_sec", &rate), add("mfu", &mfu);
    add("exposed_gather_ms", &gather), add("exposed_reduce_ms", &reduce);
    if (j.contains("peak_mib") && j["peak_mib"].is_number()) peak = std::max(peak, j["peak_mib"].get<double>());
    if (j.contains("loss") && j["loss"].is_number()) loss = j["loss"].get<double>();
  }
  if (!row->error.empty()) return;
  if (ms.empty()) {
    row->error =
        strf("no steps %lld to %lld in the log", static_cast<long long>(s.first), static_cast<long long>(s.last));
    return;
  }
  const json memory = row->header.value("memory", json::object());
  row->result = spread("step_ms", ms);
  row->result.update({{"tokens_per_sec", median(rate)},
                      {"mfu", mfu.empty() ? json() : json(median(mfu))},
                      {"peak_mib", std::max(peak, memory.value("peak_mib", -1.0))},
                      {"init_mib", memory.value("init_mib", json())},
                      {"before_step_mib", memory.value("before_step_mib", json())},
                      {"planned_peak_mib", memory.value("planned_peak_mib", json())},
                      {"estimated_ms", row->header.value("estimated_ms", json())},
                      {"last_loss", loss},
                      {"steps", ms.size()}});
  if (!gather.empty()) row->result["exposed_gather_ms"] = median(gather);
  if (!reduce.empty()) row->result["exposed_reduce_ms"] = median(reduce);
}

// Adds options to a command; they replace the same ones before them, because ./train takes each once.
void set_options(const Words& options, Words* command) {
  for (const std::string& o : options) {
    if (o.rfind("--", 0) != 0) continue;
    const auto at = std::find(command->begin(), command->end(), o.substr(0, o.find('=')));
    if (at == command->end()) continue;
    const auto is_option = [](const std::string& word) { return word.rfind("--", 0) == 0; };
    command->erase(at, std::find_if(at + 1, command->end(), is_option));
  }
  command->insert(command->end(), options.begin(), options.end());
}

Row train_row(const Settings& s, int64_t value) {
  Row row;
  row.who = "fsdp.cu", row.value = value, row.name = std::to_string(value);
  row.ranks = s.sweep->by.varies == Varies::ranks ? value : s.ranks;
  const std::string log = log_name(s, row, ".jsonl"), output = log_name(s, row, ".log");
  std::remove(log.c_str());
  Words train = {"./train", "--preset", s.preset, "--data", "random", "--steps", std::to_string(s.steps), "--log", log};
  // For the comparison with PyTorch, which has only dense attention.
  if (s.preset.rfind("mlp", 0) != 0) set_options({"--attn", "dense"}, &train);
  if (s.gpu) set_options({"--batch", "8"}, &train);
  if (s.sweep->by.options) set_options(words_of(s.sweep->by.options(value, s.gpu)), &train);
  set_options(s.extra, &train);
  if (s.sweep->by.varies == Varies::variant) {
    const Variant& variant = s.sweep->by.variants[size_t(value - 1)];
    row.name = *variant.options ? variant.options : "as it is";
    set_options(words_of(variant.options), &train);
    if (variant.needs != Variant::nccl_and_no_timing) set_options({"--comm-timing"}, &train);
  }
  row.command = "mpirun -np " + std::to_string(row.ranks) + " " + join(train);
  row.error = run_ranks(row.ranks, train, output, s.timeout);
  read_log(log, s, &row);
  return row;
}

// The same shape in PyTorch FSDP2, compiled block by block. The shape is what ./train says it ran.
Row peer_row(const Settings& s, const Row& ours) {
  Row row;
  row.who = "PyTorch", row.value = ours.value, row.name = ours.name, row.ranks = ours.ranks;
  const json c = ours.header.value("config", json::object());
  Words words = words_of("python3 -m torch.distributed.run --standalone --nproc_per_node=" + std::to_string(row.ranks) +
                         " peers/torch_fsdp.py --target next --warmup 8");
  for (const std::string& key :
       words_of("arch dim depth heads kv_heads hidden vocab seq batch param_dtype reduce_dtype")) {
    if (!c.contains(key)) {
      row.error = "no shape to compare with";
      return row;
    }
    if (key == "hidden") continue;  // given as a multiple of dim
    std::string option = "--" + (key == "batch" ? "bs" : key);
    std::replace(option.begin(), option.end(), '_', '-');
    words.insert(words.end(), {option, c[key].is_string() ? c[key].get<std::string>() : c[key].dump()});
  }
  words.insert(words.end(),
               {"--mlp-mult", strf("%.8g", c["hidden"].get<double>() / c["dim"].get<double>()), "--ckpt",
                c.value("recompute", std::string("none")), "--steps", std::to_string(s.last - s.first + 1)});
  const std::string output = log_name(s, row, ".log");
  row.command = join(words);
  row.error = run(words, output, s.timeout);
  json found;
  for (const json& j : read_json_lines(output))
    if (j.contains("ok")) found = j;
  if (found.is_object() && found.value("ok", false)) {
    row.error = "";
    row.result = {{"step_ms", found["step_ms"]},
                  {"step_ms_min", found["step_ms_min"]},
                  {"step_ms_max", found["step_ms_max"]},
                  {"tokens_per_sec", found["tok_s"]},
                  {"mfu", found["mfu_causal"].get<double>() / 100},
                  {"peak_mib", found["peak_alloc_mib"]},
                  {"reserved_mib", found["reserved_mib"]},
                  {"torch", found["torch"]}};
  } else if (found.is_object()) {
    row.error = found.value("error", "failed") + ": " + lines_of(found.value("detail", "")).front();
  } else if (row.error.empty() || row.error.rfind("exit", 0) == 0) {
    const std::string line = error_line(output);
    row.error = line.empty() ? "no result" : line;
  }
  return row;
}

void write_row(const Settings& s, const Row& row, const json& hardware) {
  json j = {{"sweep", s.sweep->name},
            {s.sweep->name, s.sweep->by.varies == Varies::variant ? json(row.name) : json(row.value)},
            {"ranks", row.ranks},
            {"who", row.who},
            {"command", row.command},
            {"hardware", row.header.value("hardware", hardware)},
            {"window", {s.first, s.last}}};
  for (const char* key : {"commit", "config"})
    if (row.header.contains(key)) j[key] = row.header[key];
  if (row.error.empty()) j["result"] = row.result;
  else j["error"] = row.error;
  s.rows.append(j);
}

// ----------------------------------------------------------------------------------------------------------- table

std::string rounded(const json& result, const char* key) { return grouped(std::llround(result[key].get<double>())); }
std::string tenths(const json& result, const char* key) { return strf("%.1f", result[key].get<double>()); }
std::string percent(const json& result, const char* key) { return strf("%.1f", 100 * result[key].get<double>()); }
std::string gathers_and_reductions(const json& result, const char* key) {
  return tenths(result, key) + strf(" + %.1f", result.value("exposed_reduce_ms", 0.0));
}

// clang-format off
struct Column {
  const char* title;
  const char* key;  // of a row's result
  std::string (*text)(const json& result, const char* key);
  enum Shown { always, if_known } shown = always;  // if_known: left out where no row has the key
};
const std::vector<Column> columns = {
    {"init MiB",                    "init_mib",          rounded},
    {"pre-step0 MiB",               "before_step_mib",   rounded},
    {"peak MiB",                    "peak_mib",          rounded},
    {"planned peak MiB",            "planned_peak_mib",  rounded},
    {"step ms",                     "step_ms",           tenths},
    {"estimated ms",                "estimated_ms",      tenths, Column::if_known},
    {"tokens/s",                    "tokens_per_sec",    rounded},
    {"MFU %",                       "mfu",               percent},
    {"exposed ms (gather + reduce)", "exposed_gather_ms", gathers_and_reductions, Column::if_known},
};
// clang-format on

void print_table(const Settings& s, const std::vector<Row>& rows) {
  const auto any = [&](auto test) { return std::any_of(rows.begin(), rows.end(), test); };
  const auto has = [](const Row& r, const Column& c) {
    return r.error.empty() && r.result.contains(c.key) && r.result[c.key].is_number();
  };
  const bool peers = any([](const Row& r) { return r.who != "fsdp.cu"; });
  const bool notes = any([](const Row& r) { return !r.error.empty(); });
  const bool ranks = s.sweep->by.varies != Varies::ranks;
  std::vector<Words> table(1);
  Words& head = table[0];
  head = {s.sweep->name};
  if (peers) head.push_back("who");
  if (ranks) head.push_back("ranks");
  std::vector<Column> shown;
  for (const Column& c : columns)
    if (c.shown == Column::always || any([&](const Row& r) { return has(r, c); })) shown.push_back(c);
  for (const Column& c : shown) head.push_back(c.title);
  if (notes) head.push_back("note");
  for (const Row& r : rows) {
    Words cells = {r.name[0] == '-' ? "`" + r.name + "`" : r.name};
    if (peers) cells.push_back(r.who);
    if (ranks) cells.push_back(std::to_string(r.ranks));
    for (const Column& c : shown) cells.push_back(has(r, c) ? c.text(r.result, c.key) : "-");
    if (notes) cells.push_back(r.error);
    table.push_back(cells);
  }
  std::printf("%s", markdown(table).c_str());
}

// ------------------------------------------------------------------------------------------------------------ runs

int sweep_training(Settings s) {
  const json hardware = ask_hardware();
  complete(hardware, &s);
  const std::string machine = (s.gpu ? hardware["gpus"].dump() + " x " : "") + hardware.value("name", "?");
  std::printf("%s: %zu rows of %lld steps, steps %lld to %lld count; %s; %s\n", s.sweep->name, s.values.size(),
              static_cast<long long>(s.steps), static_cast<long long>(s.first), static_cast<long long>(s.last),
              machine.c_str(), s.rows.path.c_str());
  std::vector<Row> rows;
  auto keep = [&](const Row& row) {
    write_row(s, row, hardware);
    rows.push_back(row);
    const std::string outcome =
        row.error.empty() ? strf("%.1f ms a step", row.result["step_ms"].get<double>()) : row.error;
    std::printf("%s %s, %s: %s\n", s.sweep->name, row.name.c_str(), row.who.c_str(), outcome.c_str());
    std::fflush(stdout);
  };
  for (int64_t value : s.values) {
    keep(train_row(s, value));
    if (s.peer) keep(peer_row(s, Row(rows.back())));
  }
  std::printf("\n");
  print_table(s, rows);
  return std::any_of(rows.begin(), rows.end(), [](const Row& r) { return r.error.empty(); }) ? 0 : 1;
}

// ./bench itself is what runs under mpirun here.
int sweep_collectives(Settings s) {
  const json hardware = ask_hardware();
  const int64_t gpus = hardware.value("gpus", int64_t(0));
  if (s.ranks == 0) s.ranks = gpus > 0 ? gpus : 2;
  if (s.values.empty()) s.values = gpus > 0 ? s.sweep->on_gpus : s.sweep->on_cpu;
  std::string values;
  for (int64_t v : s.values) values += (values.empty() ? "" : ",") + std::to_string(v);
  const Words words = {"./bench", "--rank",    "--sweep",  s.sweep->name, "--ranks", std::to_string(s.ranks),
                       "--out",   s.rows.path, "--values", values};
  const std::string output = "build/bench/collectives.log";
  std::printf("collectives of %lld ranks, medians of 20 calls; %s; %s\n\n", static_cast<long long>(s.ranks),
              hardware.value("name", "?").c_str(), s.rows.path.c_str());
  std::fflush(stdout);
  const std::string error = run_ranks(s.ranks, words, output, s.timeout);
  REQUIRE_USER(error.empty(), "%s", error.c_str());
  std::printf("%s", read_file(output).c_str());
  return 0;
}

int run_bench(Settings s) {
  switch (s.sweep->by.varies) {
    case Varies::option:
    case Varies::ranks:
    case Varies::variant:
      return sweep_training(s);
    case Varies::collective:
      return sweep_collectives(s);
    case Varies::layer:
      if (s.values.empty()) s.values = gpu_count() > 0 ? s.sweep->on_gpus : s.sweep->on_cpu;
      return time_attention_layers(s.rows, s.values) ? 0 : 1;
    case Varies::nothing:
      return time_attention_kernels(s.rows) ? 0 : 1;
  }
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  end_child_on_signals();
  try {
    Settings s = parse(argc, argv);
    if (s.rank) return collectives_rank(s.rows, s.values, &argc, &argv);
    open_rows(&s);
    return run_bench(s);
  } catch (const UsageError& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
