// Sweeps: how time and memory of a step go with depth, sequence length, width or the number of ranks. And the time of
// the attention kernels alone.
//
//   ./bench --sweep depth            on the reference shape `rope` (on a CPU, on `tiny`), with the ranks at hand
//   ./bench --sweep width --ranks 2 --values 1024,2048 -- --param-dtype fp32
//   ./bench --sweep knobs            what each knob of FSDP costs, one at a time
//   ./bench --sweep attention        NSA beside dense attention, from q, k and v to o, by sequence length; in this
//   process
//   ./bench --sweep collectives      gathers and reductions by size, alone and beside a product
//   ./bench --attention              on GPU 0, in this process
//
// Typed without mpirun. Each row of a sweep is a run of its own, `mpirun -np W ./train ...` in fresh processes, so that
// no memory is left from the row before and a row that fails is only a row that says so. What is read is the JSON that
// ./train logs. At the end stands a Markdown table; each row goes into results/ with the command, commit and hardware
// it came from.
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "CLI/CLI.hpp"
#include "nlohmann/json.hpp"

#include "build/version.h"
#include "lib/comm/comm.h"
#include "lib/device/device.h"
#include "lib/program/estimate.h"
#include "lib/ops/ops.h"
#include "lib/program/telemetry.h"
#include "nsa_attention.h"

namespace {

using nlohmann::json;
using Words = std::vector<std::string>;

struct Settings {
  std::string sweep, preset, window, out;
  std::vector<int64_t> values;
  int64_t steps = 0, ranks = 0, timeout = 900;
  int64_t first = 0, last = 0;  // the window, steps counted from 1
  bool peer = false, attention = false, gpu = false;
  bool rank = false;    // of a sweep of collectives: started by mpirun, which this program started
  Words extra;          // for ./train, after --
  std::string command;  // as typed
};

struct Row {
  int64_t value = 0, ranks = 0;
  std::string name;                 // of the value: itself, or the options that it stands for
  std::string who, command, error;  // error: empty if the row is good
  json header = json::object(), result = json::object();
};

// ------------------------------------------------------------------------------------------------------- processes

volatile pid_t running = 0;  // the child's process group, for the signal handler

void stop_child_and_exit(int signal) {
  if (running > 0) kill(-running, SIGTERM);
  _exit(128 + signal);
}

std::string join(const Words& words) {
  std::string line;
  for (const std::string& w : words) {
    const bool plain = !w.empty() && w.find_first_of(" \t\"'$&|;<>()*?\\`") == std::string::npos;
    line += (line.empty() ? "" : " ") + (plain ? w : "'" + w + "'");
  }
  return line;
}

// Runs a command with its output in a file. Returns "" or what went wrong.
std::string run(const Words& words, const std::string& output, int64_t timeout_s) {
  std::vector<char*> argv;
  for (const std::string& w : words) argv.push_back(const_cast<char*>(w.c_str()));
  argv.push_back(nullptr);
  const pid_t child = fork();
  if (child < 0) return strf("fork: %s", std::strerror(errno));
  if (child == 0) {
    setpgid(0, 0);
    const int in = open("/dev/null", O_RDONLY), to = open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
    dup2(in, 0);
    if (to >= 0) dup2(to, 1), dup2(to, 2);
    execvp(argv[0], argv.data());
    std::fprintf(stderr, "error: %s: %s\n", argv[0], std::strerror(errno));
    _exit(127);
  }
  setpgid(child, child);
  running = child;
  const auto start = std::chrono::steady_clock::now();
  int status = 0, signals = 0;
  while (waitpid(child, &status, WNOHANG) == 0) {
    const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    // mpirun ends its ranks on SIGTERM; what does not heed it is killed.
    if (signals == 0 && s > double(timeout_s)) kill(-child, SIGTERM), signals = 1;
    if (signals == 1 && s > double(timeout_s) + 15) kill(-child, SIGKILL), signals = 2;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  running = 0;
  if (signals) return strf("timed out after %lld s", static_cast<long long>(timeout_s));
  if (WIFSIGNALED(status)) return strf("killed by signal %d", WTERMSIG(status));
  if (WEXITSTATUS(status)) return strf("exit status %d", WEXITSTATUS(status));
  return "";
}

std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines(1);
  for (char c : text) {
    if (c == '\n' || c == '\r') lines.emplace_back();
    else lines.back() += c;
  }
  return lines;
}

// The first line of a log that tells of an error: our own `error: ...`, else the first that has the word in it.
std::string error_line(const std::string& log) {
  std::string any;
  for (const std::string& line : lines_of(read_file(log))) {
    if (line.rfind("error: ", 0) == 0) return line.substr(7);
    std::string lower = line;
    for (char& c : lower) c = char(std::tolower(static_cast<unsigned char>(c)));
    if (any.empty() && (lower.find("error") != std::string::npos || lower.find("out of memory") != std::string::npos))
      any = line;
  }
  return any;
}

// The same with `ranks` ranks under mpirun; what went wrong is what they say it was.
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

// The sweep `knobs`: one change to the run of the preset in each row but the first; --values counts them from 1.
struct Knob {
  const char* options;
  bool needs_gpus;  // two or more, and NCCL
};
const Knob knobs[] = {
    {"as it is", false},
    {"--gather nccl", true},
    {"--shard grad", false},
    {"--shard none", false},
    {"--shard hybrid:2", false},
    {"--wrap sublayer", false},
    {"--wrap auto", false},
    {"--wrap single", false},
    {"--limit-all-gathers 1", false},
    {"--limit-all-gathers off", false},
    {"--gradient-slots 1", false},
    {"--forward-prefetch 0 --backward-prefetch none", false},
    {"--backward-prefetch post", false},
    {"--reduce-dtype fp32", false},
    {"--param-dtype fp32 --autocast bf16", false},
    {"--moments bf16", false},
    {"--clip 0 --optimizer-in-backward 1", false},
    {"--replicate-below 65536", false},
    {"--meta-init 0", false},
    {"--grad-accum 2", false},
    {"--grad-accum 2 --accum-sync last", false},
    {"--recompute mlp", false},
    {"--recompute attn", false},
    {"--recompute attn --keep-attention 1", false},
    {"--recompute both", false},
    {"--recompute both --keep-attention 1", false},
    {"--recompute block", false},
    {"--recompute block --keep-attention 1", false},
    {"--graph 1", true},
};
constexpr int64_t knob_count = std::size(knobs);

Words words_of(const std::string& text) {
  std::istringstream in(text);
  return Words(std::istream_iterator<std::string>(in), {});
}

// ------------------------------------------------------------------------------------------------------------ rows

double median(std::vector<double> v) {
  if (v.empty()) return -1;
  std::sort(v.begin(), v.end());
  return v.size() % 2 ? v[v.size() / 2] : (v[v.size() / 2 - 1] + v[v.size() / 2]) / 2;
}

// What ./train logged: the header, then a step a line. Fills the row, or says in it what is missing.
void read_log(const std::string& path, const Settings& s, Row* row) {
  std::vector<double> ms, rate, mfu, gather, reduce;
  double peak = -1, loss = 0;
  for (const std::string& line : lines_of(read_file(path))) {
    const json j = json::parse(line, nullptr, false);
    if (j.is_discarded() || !j.is_object()) continue;
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
  row->result = {{"step_ms", median(ms)},
                 {"step_ms_min", *std::min_element(ms.begin(), ms.end())},
                 {"step_ms_max", *std::max_element(ms.begin(), ms.end())},
                 {"tokens_per_sec", median(rate)},
                 {"mfu", mfu.empty() ? json() : json(median(mfu))},
                 {"peak_mib", std::max(peak, memory.value("peak_mib", -1.0))},
                 {"init_mib", memory.value("init_mib", json())},
                 {"before_step_mib", memory.value("before_step_mib", json())},
                 {"planned_peak_mib", memory.value("planned_peak_mib", json())},
                 {"estimated_ms", row->header.value("estimated_ms", json())},
                 {"last_loss", loss},
                 {"steps", ms.size()}};
  if (!gather.empty()) row->result["exposed_gather_ms"] = median(gather);
  if (!reduce.empty()) row->result["exposed_reduce_ms"] = median(reduce);
}

std::string log_name(const Settings& s, const Row& row, const char* ending) {
  return strf("build/bench/%s-%lld-%s%s", s.sweep.c_str(), static_cast<long long>(row.value), row.who.c_str(), ending);
}

Row train_row(const Settings& s, int64_t value) {
  Row row;
  row.who = "fsdp.cu", row.value = value, row.name = std::to_string(value);
  row.ranks = s.sweep == "world" ? value : s.ranks;
  const std::string log = log_name(s, row, ".jsonl"), output = log_name(s, row, ".log");
  std::remove(log.c_str());
  auto number = [](int64_t n) { return std::to_string(n); };
  Words train = {"./train", "--preset", s.preset, "--data", "random", "--steps", number(s.steps), "--log", log};
  // Against PyTorch, which has dense attention alone.
  if (s.preset.rfind("mlp", 0) != 0) train.insert(train.end(), {"--attn", "dense"});
  if (s.gpu) train.insert(train.end(), {"--batch", "8"});
  if (s.sweep == "depth" || s.sweep == "seq") train.insert(train.end(), {"--" + s.sweep, number(value)});
  if (s.sweep == "width") {
    // Heads of 128 in groups of four as in the reference shape; of 32 in pairs on a CPU.
    const int64_t heads = std::max<int64_t>(1, value / (s.gpu ? 128 : 32));
    train.insert(train.end(), {"--dim", number(value), "--hidden", number(4 * value), "--heads", number(heads),
                               "--kv-heads", number(std::max<int64_t>(1, heads / (s.gpu ? 4 : 2)))});
  }
  // A later option wins over the same one before it only if it stands once: drop what stands already.
  const auto add = [&](const Words& options) {
    for (const std::string& e : options) {
      auto at = std::find(train.begin(), train.end(), e.substr(0, e.find('=')));
      if (e.rfind("--", 0) == 0 && at != train.end()) train.erase(at, at + 2);
    }
    train.insert(train.end(), options.begin(), options.end());
  };
  add(s.extra);
  if (s.sweep == "knobs") {
    row.name = knobs[value - 1].options;
    if (value > 1) add(words_of(row.name));
    if (row.name != "--graph 1") train.push_back("--comm-timing");  // which a graph cannot have
  }
  row.command = "mpirun -np " + number(row.ranks) + " " + join(train);
  row.error = run_ranks(row.ranks, train, output, s.timeout);
  read_log(log, s, &row);
  return row;
}

// The same shape in PyTorch FSDP2, compiled block by block. The shape is what ./train says it ran.
Row peer_row(const Settings& s, const Row& ours) {
  Row row;
  row.who = "PyTorch", row.value = ours.value, row.name = ours.name, row.ranks = ours.ranks;
  const json c = ours.header.value("config", json::object());
  for (const char* key :
       {"arch", "dim", "depth", "heads", "kv_heads", "hidden", "vocab", "seq", "batch", "param_dtype", "reduce_dtype"})
    if (!c.contains(key)) {
      row.error = "no shape to compare with";
      return row;
    }
  auto number = [&](const char* key) { return std::to_string(c[key].get<int64_t>()); };
  const std::string output = log_name(s, row, ".log");
  const Words words = {"python3",
                       "-m",
                       "torch.distributed.run",
                       "--standalone",
                       "--nproc_per_node=" + std::to_string(row.ranks),
                       "peers/torch_fsdp.py",
                       "--arch",
                       c["arch"].get<std::string>(),
                       "--dim",
                       number("dim"),
                       "--depth",
                       number("depth"),
                       "--heads",
                       number("heads"),
                       "--kv-heads",
                       number("kv_heads"),
                       "--mlp-mult",
                       strf("%.8g", c["hidden"].get<double>() / c["dim"].get<double>()),
                       "--vocab",
                       number("vocab"),
                       "--seq",
                       number("seq"),
                       "--bs",
                       number("batch"),
                       "--ckpt",
                       c.value("recompute", std::string("none")),
                       "--target",
                       "next",
                       "--param-dtype",
                       c["param_dtype"].get<std::string>(),
                       "--reduce-dtype",
                       c["reduce_dtype"].get<std::string>(),
                       "--warmup",
                       "8",
                       "--steps",
                       std::to_string(std::max<int64_t>(1, s.last - s.first + 1))};
  row.command = join(words);
  row.error = run(words, output, s.timeout);
  json found;
  for (const std::string& line : lines_of(read_file(output))) {
    const json j = json::parse(line, nullptr, false);
    if (j.is_object() && j.contains("ok")) found = j;
  }
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

// Where rows go, and that they can, before the first of them takes its time. Leaves no file of no rows.
void open_out(Settings* s) {
  mkdir("build", 0777), mkdir("build/bench", 0777);
  if (s->out.empty()) {
    mkdir("results", 0777);
    const std::string name = s->attention ? "attention" : s->sweep == "attention" ? "nsa" : s->sweep;
    s->out = "results/" + name + "-" + now_iso8601().substr(0, 10) + ".jsonl";
  }
  const bool is_there = access(s->out.c_str(), F_OK) == 0;
  REQUIRE_USER(std::ofstream(s->out, std::ios::app), "--out %s cannot be written: %s", s->out.c_str(),
               std::strerror(errno));
  if (!is_there) std::remove(s->out.c_str());
}

void append_row(const Settings& s, const json& j) {
  std::ofstream out(s.out, std::ios::app);
  out << j.dump() << "\n";
  REQUIRE_USER(out.flush(), "--out %s cannot be written", s.out.c_str());
}

void write_row(const Settings& s, const Row& row, const json& hardware) {
  json j = {{"date", now_iso8601()},
            {"sweep", s.sweep},
            {s.sweep, s.sweep == "knobs" ? json(row.name) : json(row.value)},
            {"ranks", row.ranks},
            {"who", row.who},
            {"command", row.command},
            {"commit", row.header.value("commit", json(FSDP_COMMIT))},
            {"hardware", row.header.value("hardware", hardware)},
            {"window", {s.first, s.last}}};
  if (row.header.contains("config")) j["config"] = row.header["config"];
  if (row.error.empty()) j["result"] = row.result;
  else j["error"] = row.error;
  append_row(s, j);
}

// ----------------------------------------------------------------------------------------------------------- table

// The first row is the head.
void print_markdown(std::vector<Words> table) {
  for (Words& cells : table)
    for (std::string& cell : cells) std::replace(cell.begin(), cell.end(), '|', '/');
  std::vector<size_t> width(table[0].size());
  for (const Words& cells : table)
    for (size_t i = 0; i < cells.size(); ++i) width[i] = std::max(width[i], cells[i].size());
  // Numbers to the right, words to the left.
  auto left = [&](size_t i) {
    const std::string& name = table[0][i];
    return name == "who" || name == "note" || name == "shape" || name == "kernel" || name == "knobs";
  };
  for (size_t r = 0; r < table.size(); ++r) {
    std::string line = "|";
    for (size_t i = 0; i < table[r].size(); ++i) {
      const std::string space(width[i] - table[r][i].size(), ' ');
      line += " " + (left(i) ? table[r][i] + space : space + table[r][i]) + " |";
    }
    std::printf("%s\n", line.c_str());
    if (r > 0) continue;
    line = "|";
    for (size_t i = 0; i < width.size(); ++i)
      line += " " + std::string(width[i] - !left(i), '-') + (left(i) ? " |" : ": |");
    std::printf("%s\n", line.c_str());
  }
}

void print_table(const Settings& s, const std::vector<Row>& rows) {
  auto any = [&](auto test) { return std::any_of(rows.begin(), rows.end(), test); };
  const bool who = any([](const Row& r) { return r.who != "fsdp.cu"; });
  const bool exposed = any([](const Row& r) { return r.result.contains("exposed_gather_ms"); });
  const bool notes = any([](const Row& r) { return !r.error.empty(); });
  const bool estimated = any([](const Row& r) { return r.result.value("estimated_ms", json()).is_number(); });
  std::vector<Words> table(1);
  table[0] = {s.sweep};
  if (who) table[0].push_back("who");
  if (s.sweep != "world") table[0].push_back("ranks");
  for (const char* name : {"init MiB", "pre-step0 MiB", "peak MiB", "planned peak MiB", "step ms"})
    table[0].push_back(name);
  if (estimated) table[0].push_back("estimated ms");
  for (const char* name : {"tokens/s", "MFU %"}) table[0].push_back(name);
  if (exposed) table[0].push_back("exposed ms (gather + reduce)");
  if (notes) table[0].push_back("note");
  for (const Row& row : rows) {
    Words cells = {s.sweep != "knobs" || row.value == 1 ? row.name : "`" + row.name + "`"};
    if (who) cells.push_back(row.who);
    if (s.sweep != "world") cells.push_back(std::to_string(row.ranks));
    auto cell = [&](const char* key, auto text) {
      const bool known = row.error.empty() && row.result.contains(key) && row.result[key].is_number();
      cells.push_back(known ? text(row.result[key].get<double>()) : "-");
    };
    auto whole = [](double x) { return grouped(std::llround(x)); };
    for (const char* key : {"init_mib", "before_step_mib", "peak_mib", "planned_peak_mib"}) cell(key, whole);
    cell("step_ms", [](double x) { return strf("%.1f", x); });
    if (estimated) cell("estimated_ms", [](double x) { return strf("%.1f", x); });
    cell("tokens_per_sec", whole);
    cell("mfu", [](double x) { return strf("%.1f", 100 * x); });
    if (exposed)
      cell("exposed_gather_ms",
           [&](double x) { return strf("%.1f + %.1f", x, row.result.value("exposed_reduce_ms", 0.0)); });
    if (notes) cells.push_back(row.error);
    table.push_back(cells);
  }
  print_markdown(table);
}

// -------------------------------------------------------------------------------------------------------- settings

json ask_hardware() {
  REQUIRE_USER(access("./train", X_OK) == 0, "there is no ./train here: run make first, and bench beside it");
  const std::string output = "build/bench/hardware.log", why = run({"./train", "--hardware"}, output, 120);
  const std::string text = read_file(output);
  for (const std::string& line : lines_of(text)) {
    const json j = json::parse(line, nullptr, false);
    if (j.is_object() && j.contains("gpus")) return j;
  }
  throw Error(strf("./train --hardware gave no answer (%s)", why.empty() ? "no JSON line" : why.c_str()));
}

Settings parse(int argc, char** argv) {
  Settings s;
  const auto end = std::find(argv, argv + argc, std::string("--"));
  if (end != argv + argc) s.extra.assign(end + 1, argv + argc);
  Words typed(argv, argv + argc);
  typed.erase(std::remove(typed.begin(), typed.end(), "--rank"), typed.end());
  s.command = join(typed);
  CLI::App app(
      "Time and memory of a training step, over a sweep; options of ./train follow after --. Or the time of the "
      "attention kernels alone");
  auto* sweep = app.add_option("--sweep", s.sweep,
                               "what to vary: depth, seq, width or world; knobs: one option of FSDP in each row; "
                               "attention: NSA beside dense, by length; collectives: gathers and reductions, by MiB")
                    ->check(CLI::IsMember({"depth", "seq", "width", "world", "knobs", "attention", "collectives"}));
  app.add_flag("--attention", s.attention, "time the attention kernels on GPU 0")->excludes(sweep);
  app.add_option("--values", s.values, "the values, with commas (default: a list that suits the machine)")
      ->delimiter(',')
      ->check(CLI::Range(int64_t(1), int64_t(1) << 40))
      ->needs(sweep);
  auto* ranks = app.add_option("--ranks", s.ranks, "ranks (default: a rank a GPU; on a CPU 2)")
                    ->check(CLI::Range(1, 1 << 20))
                    ->needs(sweep);
  auto* preset =
      app.add_option("--preset", s.preset, "shape to vary (default: rope on GPUs, tiny on a CPU)")->needs(sweep);
  auto* steps = app.add_option("--steps", s.steps, "steps a row (default: 30; on a CPU 6)")
                    ->check(CLI::Range(1, 1 << 20))
                    ->needs(sweep);
  auto* window =
      app.add_option("--window", s.window, "FIRST:LAST, the steps that count, from 1 (default: 5:24; on a CPU 3:6)")
          ->needs(sweep);
  auto* timeout = app.add_option("--timeout", s.timeout, "seconds a row (default: 900)")
                      ->check(CLI::Range(1, 1 << 20))
                      ->needs(sweep);
  app.add_option("--out", s.out, "JSON lines are added to this file (default: results/SWEEP-DATE.jsonl)");
  app.add_flag("--rank", s.rank)->needs(sweep)->group("");
  auto* peer =
      app.add_flag("--peer", s.peer, "after each row the same shape in PyTorch (peers/torch_fsdp.py)")->needs(sweep);
  try {
    app.parse(int(end - argv), argv);
  } catch (const CLI::CallForHelp&) {
    std::printf("%s", app.help().c_str());
    std::exit(0);
  } catch (const CLI::ParseError& e) { throw UsageError(std::string(e.what()) + "; see ./bench --help"); }
  REQUIRE_USER(s.attention || !s.sweep.empty(), "--sweep or --attention is needed; see ./bench --help");
  // Neither of these runs ./train; and the kernels of attention run in this process.
  const bool kernels = s.attention || s.sweep == "attention", trains = !kernels && s.sweep != "collectives";
  const std::string what = s.attention ? "--attention" : "--sweep " + s.sweep;
  REQUIRE_USER(trains || s.extra.empty(), "%s runs no ./train: nothing may follow after --", what.c_str());
  for (CLI::Option* o : {preset, steps, window, peer, ranks, timeout})
    REQUIRE_USER(o->count() == 0 || trains || (!kernels && (o == ranks || o == timeout)),
                 "%s: %s changes nothing there", what.c_str(), o->get_name().c_str());
  REQUIRE_USER(s.sweep != "knobs" || !s.peer, "--sweep knobs: --peer: PyTorch has not these knobs");
  for (int64_t v : s.values)
    REQUIRE_USER(s.sweep != "knobs" || v <= knob_count, "--sweep knobs --values %lld: there are %lld rows",
                 static_cast<long long>(v), static_cast<long long>(knob_count));
  return s;
}

// What the command line left open, for this machine.
void complete(const json& hardware, Settings* s) {
  const int64_t gpus = hardware.value("gpus", int64_t(0));
  s->gpu = gpus > 0;
  if (s->preset.empty()) s->preset = s->gpu ? "rope" : "tiny";
  if (s->ranks == 0) s->ranks = s->gpu ? gpus : 2;
  if (s->steps == 0) s->steps = s->gpu ? 30 : 6;
  if (s->values.empty()) {
    if (s->sweep == "knobs") {
      for (int64_t i = 1; i <= knob_count; ++i)
        if (!knobs[i - 1].needs_gpus || (s->gpu && s->ranks <= gpus)) s->values.push_back(i);
    } else if (s->sweep == "world")
      for (int64_t w = 1; w <= (s->gpu ? s->ranks : 4); ++w) s->values.push_back(w);
    else if (s->sweep == "depth")
      s->values = s->gpu ? std::vector<int64_t>{2, 4, 6, 8, 12, 16, 24, 32} : std::vector<int64_t>{1, 2, 4, 8};
    else if (s->sweep == "seq")
      s->values = s->gpu ? std::vector<int64_t>{512, 1024, 2048, 4096, 8192, 16384, 32768}
                         : std::vector<int64_t>{128, 256, 512, 1024};
    else
      s->values = s->gpu ? std::vector<int64_t>{1024, 2048, 4096, 6144, 8192, 12288, 16384}
                         : std::vector<int64_t>{64, 128, 256};
  }
  // Few steps leave a shorter window.
  s->first = std::min<int64_t>(s->gpu ? 5 : 3, s->steps), s->last = std::min<int64_t>(24, s->steps);
  if (!s->window.empty()) {
    int used = 0;
    long long first = 0, last = 0;
    const int n = std::sscanf(s->window.c_str(), "%lld:%lld%n", &first, &last, &used);
    REQUIRE_USER(n == 2 && size_t(used) == s->window.size() && first >= 1 && last >= first && last <= s->steps,
                 "--window %s: allowed is FIRST:LAST with 1 <= FIRST <= LAST <= %lld, the steps", s->window.c_str(),
                 static_cast<long long>(s->steps));
    s->first = first, s->last = last;
  }
  if (s->peer && !run({"python3", "-c", "import torch; assert torch.cuda.is_available()"}, "/dev/null", 120).empty()) {
    std::printf("--peer: python3 here has no torch that sees a GPU; its rows are left out\n");
    s->peer = false;
  }
}

int sweep(Settings s) {
  const json hardware = ask_hardware();
  complete(hardware, &s);
  const std::string name = hardware.value("name", "?");
  std::printf("%s: %zu rows of %lld steps, steps %lld to %lld count; %s; %s\n", s.sweep.c_str(), s.values.size(),
              static_cast<long long>(s.steps), static_cast<long long>(s.first), static_cast<long long>(s.last),
              s.gpu
                  ? strf("%lld x %s", static_cast<long long>(hardware.value("gpus", int64_t(0))), name.c_str()).c_str()
                  : name.c_str(),
              s.out.c_str());
  std::vector<Row> rows;
  auto keep = [&](const Row& row) {
    write_row(s, row, hardware);
    rows.push_back(row);
    const std::string told =
        row.error.empty() ? strf("%.1f ms a step", row.result["step_ms"].get<double>()) : row.error;
    std::printf("%s %s, %s: %s\n", s.sweep.c_str(), row.name.c_str(), row.who.c_str(), told.c_str());
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

// Milliseconds of 20 calls after 3 that do not count, one behind the other: a call's time is from the end of the one
// before to its own.
template <class F>
std::vector<double> time_calls(Device& dev, Stream& s, F call) {
  std::vector<Event> ends;
  for (int i = 0; i <= 20; ++i) ends.emplace_back(dev, true);
  for (int i = 0; i < 3; ++i) call();
  for (Event& end : ends) {
    if (&end != &ends[0]) call();
    s.record(end);
  }
  s.synchronize();
  std::vector<double> ms;
  for (size_t i = 1; i < ends.size(); ++i) ms.push_back(elapsed_ms(ends[i - 1], ends[i]));
  return ms;
}

// ----------------------------------------------------------------------------------------------------- collectives

// A product to run beside collectives: on a GPU the widest of the reference shape, for 8192 tokens.
template <class T>
struct Product {
  int64_t M, N, K;
  T *y = nullptr, *x = nullptr, *w = nullptr;
  explicit Product(bool gpu) : M(gpu ? 8192 : 128), N(gpu ? 16384 : 256), K(gpu ? 4096 : 128) {}
  void keep(Memory& mem) {
    y = mem.keep<T>(M * N, "y", Purpose::activations);
    x = mem.keep<T>(M * K, "x", Purpose::activations), w = mem.keep<T>(N * K, "w", Purpose::activations);
  }
  void operator()(Stream& s) const { ops::matmul<T>(s, y, x, w, nullptr, nullptr, M, N, K); }
};

// Milliseconds of one of `calls` calls on stream s while `other` does `others` of its own, which must last longer.
template <class F, class G>
double time_beside(Device& dev, Stream& s, int64_t calls, F call, Stream& other, int64_t others, G other_call) {
  Event begun(dev), start(dev, true), end(dev, true);
  other_call();
  other.record(begun);
  for (int64_t i = 1; i < others; ++i) other_call();
  s.wait(begun);
  s.record(start);
  for (int64_t i = 0; i < calls; ++i) call();
  s.record(end);
  s.synchronize(), other.synchronize();
  return elapsed_ms(start, end) / double(calls);
}

// What one rank does; rank 0 writes the rows and prints the table.
template <class T>
void time_collectives(const Settings& s, const World& world) {
  const bool gpu = gpu_count() > 0;
  const Transport transport = gpu ? Transport::nccl : Transport::mpi;
  Device dev(gpu ? Backend::gpu : Backend::cpu, gpu ? world.local_rank : 0, gpu ? 1 : world.local_size);
  const bool engines = agree(copy_engines_pay(dev) && on_one_host(world, world.size) ? "" : "no").empty();
  // Parts of whole vectors.
  auto bytes_of = [&](int64_t mib) { return (mib << 20) / (256 * world.size) * 256 * world.size; };
  const int64_t largest = bytes_of(*std::max_element(s.values.begin(), s.values.end()));

  T* buf = nullptr;
  Product<T> product(gpu);
  std::unique_ptr<Channel> ring, engine;
  auto open = [&](bool open) {
    buf = dev.mem.keep<T>(largest / int64_t(sizeof(T)), "buffer", Purpose::gather_slots);
    product.keep(dev.mem);
    ring = std::make_unique<Channel>(dev, dev.gather(), world, transport, "ring", largest, open);
    if (engines)
      engine = std::make_unique<Channel>(dev, dev.gather(), world, transport, "copy engines", largest, open, true);
  };
  open(false);
  if (engines) use_nccl_memory(dev);
  dev.mem.commit();
  dev.mem.rewind();
  dev.mode = Mode::run;
  open(true);
  Stream &compute = dev.compute(), &talk = dev.gather();
  // Normal numbers, made in fp32 where y will be, a piece at a time.
  int64_t made = 0;
  const auto fill = [&](T* to, int64_t n) {
    const int64_t piece = product.M * product.N / 2;
    for (int64_t at = 0; at < n; at += piece, made += piece) {
      float* wide = reinterpret_cast<float*>(product.y);
      ops::init_normal(compute, wide, 1, 1, made, std::min(piece, n - at), 0, 1);
      ops::cast<T, float>(compute, to + at, wide, std::min(piece, n - at));
    }
  };
  fill(product.x, product.M * product.K), fill(product.w, product.N * product.K);
  fill(buf, largest / int64_t(sizeof(T)));
  compute.synchronize();

  const Chip* chip = chip_named(dev.name);
  const auto multiply = [&] { product(compute); };
  // Rank 0's: the ranks must agree on how many collectives there are to be.
  const auto agreed = [](double x) { return std::atof(broadcast_text(strf("%.17g", x)).c_str()); };
  const auto enough = [](double ms, double of) { return std::max<int64_t>(3, std::llround(ms / of)); };
  const double product_ms = agreed(median(time_calls(dev, compute, multiply)));
  std::vector<Words> table = {{"", "by", "MiB", "ms", "GB/s sent", "of the link", "estimated ms", "beside products, ms",
                               "a product beside it"}};
  struct Kind {
    const char* name;
    Collective what;
    Channel* channel;
    const char* by;
  };
  std::vector<Kind> kinds = {{"all_gather", Collective::all_gather, ring.get(), name_of(transport)},
                             {"reduce_scatter", Collective::reduce_scatter, ring.get(), name_of(transport)}};
  if (engines) kinds.push_back({"all_gather", Collective::all_gather, engine.get(), "copy engines"});
  for (const Kind& k : kinds)
    for (int64_t mib : s.values) {
      const int64_t bytes = bytes_of(mib), count = bytes / world.size / int64_t(sizeof(T));
      const auto call = [&] {
        if (k.what == Collective::all_gather) k.channel->all_gather(buf, count, dtype_of<T>);
        else k.channel->reduce_scatter(buf, count, dtype_of<T>);
      };
      barrier();
      const std::vector<double> alone = time_calls(dev, talk, call);
      const double ms = agreed(median(alone)), gb_s = 1e-6 * sent(k.what, double(bytes), world.size) / ms;
      // As many as fill 40 ms alone, beside what alone takes three times as long.
      const double beside_product =
          time_beside(dev, talk, enough(40, ms), call, compute, enough(120, product_ms), multiply);
      barrier();
      const double product_beside =
          time_beside(dev, compute, enough(40, product_ms), multiply, talk, enough(120, ms), call);
      json result = {{"ms", ms},
                     {"ms_min", *std::min_element(alone.begin(), alone.end())},
                     {"ms_max", *std::max_element(alone.begin(), alone.end())},
                     {"sent_gb_s", gb_s},
                     {"beside_product_ms", beside_product},
                     {"product_ms", product_ms},
                     {"product_beside_ms", product_beside}};
      if (chip) {
        result["of_link"] = 1e9 * gb_s / chip->link;
        result["estimated_ms"] = 1e3 * Estimate(*chip).seconds(k.what, double(bytes), world.size, world.local_size,
                                                               k.channel == engine.get() ? Via::copy_engines : Via::kernels);
      }
      auto cell = [&](const char* key) { return chip ? strf("%.3f", result[key].get<double>()) : std::string("-"); };
      table.push_back({k.name, k.by, std::to_string(mib), strf("%.3f", ms), strf("%.1f", gb_s), cell("of_link"),
                       cell("estimated_ms"), strf("%.3f", beside_product),
                       strf("x %.2f", product_beside / product_ms)});
      if (world.rank == 0)
        append_row(s, {{"date", now_iso8601()},
                       {"sweep", s.sweep},
                       {"collective", k.name},
                       {"by", k.by},
                       {"mib", mib},
                       {"ranks", world.size},
                       {"dtype", name_of(dtype_of<T>)},
                       {"command", s.command},
                       {"commit", FSDP_COMMIT},
                       {"hardware", {{"gpus", gpu_count()}, {"name", dev.name}, {"nccl", nccl_version()}}},
                       {"result", result}});
    }
  if (world.rank == 0) print_markdown(table);
}

int collectives_rank(const Settings& s, int argc, char** argv) {
  const World world = init_mpi(&argc, &argv);
  const int gpus = gpu_count();
  const std::string error =
      agree(world.size < 2 ? "--sweep collectives: one rank has nobody to talk to: --ranks 2"
            : gpus > 0 && gpus < world.local_size
                ? strf("--sweep collectives: %d ranks on a host of %d GPU%s: NCCL needs one for each", world.local_size,
                       gpus, gpus == 1 ? "" : "s")
                : "");
  if (error.empty()) or_abort([&] { gpus > 0 ? time_collectives<bf16>(s, world) : time_collectives<float>(s, world); });
  else if (world.rank == 0) std::fprintf(stderr, "error: %s\n", error.c_str());
  finish_mpi();
  return error.empty() ? 0 : 2;
}

int sweep_collectives(Settings s) {
  const json hardware = ask_hardware();
  const int64_t gpus = hardware.value("gpus", int64_t(0));
  if (s.ranks == 0) s.ranks = gpus > 0 ? gpus : 2;
  if (s.values.empty())
    s.values = gpus > 0 ? std::vector<int64_t>{1, 4, 16, 64, 336, 1024} : std::vector<int64_t>{1, 8};
  Words words = {"./bench", "--rank", "--sweep",  s.sweep, "--ranks", std::to_string(s.ranks),
                 "--out",   s.out,    "--values", ""};
  for (int64_t v : s.values) words.back() += (words.back().empty() ? "" : ",") + std::to_string(v);
  const std::string output = "build/bench/collectives.log";
  std::printf("collectives of %lld ranks, medians of 20 calls; %s; %s\n\n", static_cast<long long>(s.ranks),
              hardware.value("name", "?").c_str(), s.out.c_str());
  std::fflush(stdout);
  const std::string error = run_ranks(s.ranks, words, output, s.timeout);
  REQUIRE_USER(error.empty(), "%s", error.c_str());
  std::printf("%s", read_file(output).c_str());
  return 0;
}

// ------------------------------------------------------------------------------------------------------- attention

#if FSDP_CUDA
// Owns GPU memory; it goes back with it.
struct GpuArrays {
  std::vector<void*> owned;
  GpuArrays() = default;
  GpuArrays(const GpuArrays&) = delete;
  ~GpuArrays() {
    for (void* p : owned) cudaFree(p);
  }
  template <class T>
  T* make(int64_t n) {
    void* p = nullptr;
    CUDA_CHECK(cudaMalloc(&p, size_t(n) * sizeof(T)));
    owned.push_back(p);
    return static_cast<T*>(p);
  }
};

// Pairs of a query and a key that it sees, in one head of one sequence; causal: half of all.
double seen_pairs(const AttentionShape& a) {
  if (a.sees == Sees::causal) return double(a.T) * double(a.T) / 2;
  double pairs = 0;
  for (int64_t t = 0; t < a.T; ++t) {
    const int64_t ended = t + 1 < a.block ? 0 : (t + 1 - a.block) / std::max<int64_t>(1, a.stride) + 1;
    pairs += double(a.sees == Sees::window ? std::min(t + 1, a.window) : std::min(ended, a.keys));
  }
  return pairs;
}

// One shape by the kernels of `arch`: q, k and v are columns of one buffer, as in a model, and normal numbers.
// Compressed keys have a buffer of their own.
json time_attention_shape(Device& dev, int arch, AttentionShape a) {
  const int64_t rows = a.B * a.T, k_at = a.H * a.D, v_at = k_at + a.HKV * a.D, ld = v_at + a.HKV * a.D;
  a.ld_q = a.ld_kv = a.ld_dq = a.ld_dkv = ld, a.ld_o = a.H * a.D;
  Stream& s = dev.compute();
  GpuArrays arrays;
  auto *qkv = arrays.make<bf16>(rows * ld), *dqkv = arrays.make<bf16>(rows * ld);
  auto *o = arrays.make<bf16>(rows * a.ld_o), *d_o = arrays.make<bf16>(rows * a.ld_o);
  auto *lse = arrays.make<float>(a.B * a.H * a.T), *work = arrays.make<float>(attention_backward_workspace<bf16>(a));
  {
    GpuArrays fp32;
    auto* x = fp32.make<float>(rows * ld);
    ops::init_normal(s, x, 1, 1, 0, rows * ld, 0, 1);
    ops::cast<bf16, float>(s, qkv, x, rows * ld);
    ops::init_normal(s, x, 1, 2, 0, rows * a.ld_o, 0, 1);
    ops::cast<bf16, float>(s, d_o, x, rows * a.ld_o);
    s.synchronize();
  }
  bf16 *k = qkv + k_at, *v = qkv + v_at, *dk = dqkv + k_at, *dv = dqkv + v_at;
  if (a.sees == Sees::compressed) {
    a.ld_kv = a.ld_dkv = 2 * a.HKV * a.D;
    const int64_t n = a.B * a.keys * a.ld_kv;
    k = arrays.make<bf16>(n), v = k + a.HKV * a.D, dk = arrays.make<bf16>(n), dv = dk + a.HKV * a.D;
    s.copy(k, qkv, n * int64_t(sizeof(bf16)));
  }
  auto forward = [&] { gpu::attention_forward<bf16>(s.cuda(), arch, o, lse, qkv, k, v, a); };
  auto both = [&] {
    forward();
    gpu::attention_backward<bf16>(s.cuda(), arch, dqkv, dk, dv, d_o, qkv, k, v, o, lse, work, a);
  };
  // Two products forward and five backward; only pairs that are seen count.
  const double flops = 4.0 * double(a.B * a.H) * seen_pairs(a) * double(a.D);
  json result;
  auto add = [&](const std::string& name, const std::vector<double>& ms, double work_done) {
    result[name + "_ms"] = median(ms);
    result[name + "_ms_min"] = *std::min_element(ms.begin(), ms.end());
    result[name + "_ms_max"] = *std::max_element(ms.begin(), ms.end());
    result[name + "_tflops"] = work_done / median(ms) / 1e9;
  };
  add("forward", time_calls(dev, s, forward), flops);
  add("forward_backward", time_calls(dev, s, both), 3.5 * flops);
  return result;
}
#endif

int time_attention(Settings s) {
#if FSDP_CUDA
  REQUIRE_USER(gpu_count() > 0, "--attention: no GPU here");
  Device dev(Backend::gpu, 0);
  dev.mode = Mode::run;
  const int cc = dev.compute_capability;
  REQUIRE_USER(cc >= 80, "--attention: %s has compute capability %d.%d; the kernels need 8.0", dev.name.c_str(),
               cc / 10, cc % 10);
  int runtime = 0, driver = 0;
  CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  CUDA_CHECK(cudaDriverGetVersion(&driver));
  const json hardware = {{"gpus", gpu_count()},
                         {"name", dev.name},
                         {"compute_capability", cc},
                         {"cuda_runtime", runtime},
                         {"cuda_driver", driver}};
  struct Kernels {
    int arch;
    const char* name;
  };
  std::vector<Kernels> kernels = {{80, "sm_80 (mma.sync)"}};
  if (cc == 90) kernels.insert(kernels.begin(), {90, "sm_90a (wgmma)"});
  std::printf("attention in bf16, medians of 20 calls; %s; %s\n\n", dev.name.c_str(), s.out.c_str());
  std::vector<Words> table = {{"shape", "kernel", "forward ms", "TFLOP/s", "forward + backward ms", "TFLOP/s", "note"}};
  bool any = false;
  std::vector<AttentionShape> shapes;
  auto add = [&](int64_t B, int64_t T, int64_t H, int64_t HKV, int64_t D) -> AttentionShape& {
    AttentionShape a = {};
    a.B = B, a.T = T, a.H = H, a.HKV = HKV, a.D = D, a.scale = 1 / std::sqrt(double(D));
    shapes.push_back(a);
    return shapes.back();
  };
  add(1, 8192, 32, 8, 128), add(1, 4096, 32, 8, 128), add(8, 4096, 32, 8, 128), add(1, 32768, 32, 8, 128);
  add(1, 2048, 12, 2, 64), add(16, 2048, 12, 2, 64), add(1, 8192, 32, 8, 64);
  // The branches of NSA that these kernels do: a window, and compressed keys.
  for (const auto& [H, HKV] : {std::pair<int64_t, int64_t>{32, 8}, {64, 4}}) {
    for (int64_t T = 4096; T <= 65536; T *= 2) {
      AttentionShape& a = add(1, T, H, HKV, 128);
      a.sees = Sees::window, a.window = 512;
    }
    for (int64_t T = 4096; T <= 65536; T *= 2) {
      AttentionShape& a = add(1, T, H, HKV, 128);
      a.sees = Sees::compressed, a.block = 32, a.stride = 16, a.keys = (T - a.block) / a.stride + 1;
    }
  }
  for (const AttentionShape& a : shapes)
    for (const Kernels& k : kernels) {
      json row = {
          {"date", now_iso8601()}, {"attention", {{"B", a.B}, {"T", a.T}, {"H", a.H}, {"HKV", a.HKV}, {"D", a.D}}},
          {"kernel", k.name},      {"command", s.command},
          {"commit", FSDP_COMMIT}, {"hardware", hardware}};
      std::string rule;
      if (a.sees == Sees::window) {
        rule = strf(" window %lld", static_cast<long long>(a.window));
        row["attention"]["window"] = a.window;
      } else if (a.sees == Sees::compressed) {
        rule = strf(" compressed %lld/%lld", static_cast<long long>(a.block), static_cast<long long>(a.stride));
        row["attention"]["compressed"] = {{"block", a.block}, {"stride", a.stride}, {"keys", a.keys}};
      }
      Words cells = {
          strf("B%lld T%lld %lld/%lld D%lld%s", static_cast<long long>(a.B), static_cast<long long>(a.T),
               static_cast<long long>(a.H), static_cast<long long>(a.HKV), static_cast<long long>(a.D), rule.c_str()),
          k.name};
      try {
        const json r = time_attention_shape(dev, k.arch, a);
        for (const char* name : {"forward", "forward_backward"}) {
          cells.push_back(strf("%.3f", r[std::string(name) + "_ms"].get<double>()));
          cells.push_back(strf("%.0f", r[std::string(name) + "_tflops"].get<double>()));
        }
        cells.push_back("");
        row["result"] = r, any = true;
      } catch (const OutOfMemory&) {  // on a small GPU: the other shapes may fit
        cudaGetLastError();           // has been told
        row["error"] = "out of memory";
        cells.insert(cells.end(), {"-", "-", "-", "-", "out of memory"});
      }
      append_row(s, row);
      table.push_back(cells);
    }
  if (std::all_of(table.begin() + 1, table.end(), [](const Words& cells) { return cells.back().empty(); }))
    for (Words& cells : table) cells.pop_back();
  print_markdown(table);
  return any ? 0 : 1;
#else
  (void)s;
  throw UsageError("--attention: this build has no GPU backend: rebuild with CUDA");
#endif
}

// ---------------------------------------------------------------------------------------------------- NSA beside dense

// Forward, and forward and backward, of one layer's attention without its projections: medians of `reps` after two that
// do not count. The memory is planned as in ./train. T: bf16 on a GPU, fp32 on a CPU.
template <class T>
json time_layer(Backend backend, bool sparse, const NsaShape& n, int reps) {
  Device dev(backend, 0);
  AttentionShape d = {};
  d.B = n.B, d.T = n.T, d.H = n.H, d.HKV = n.HKV, d.D = n.D, d.scale = n.scale;
  d.ld_q = d.ld_kv = d.ld_dq = d.ld_dkv = (n.H + 2 * n.HKV) * n.D, d.ld_o = n.H * n.D;
  const int64_t rows = n.B * n.T, row = sparse ? n.ld : d.ld_q, width = n.H * n.D;
  T *x = nullptr, *dx = nullptr, *d_o = nullptr;
  auto arrays = [&] {
    x = dev.mem.keep<T>(rows * row, "x", Purpose::activations);
    dx = dev.mem.keep<T>(rows * row, "dx", Purpose::activations);
    d_o = dev.mem.keep<T>(rows * width, "do", Purpose::activations);
  };
  auto layer = [&](Event& start, Event& middle, Event& end) {
    Stream& s = dev.compute();
    dev.mem.begin("layer");
    {
      Buffer<T> o = dev.mem.take<T>(rows * width, "o");
      NsaSaved<T> saved;
      Buffer<acc_t<T>> lse, work;
      s.record(start);
      if (sparse) {
        nsa_forward<T>(dev, o, &saved, x, PhiWeights<const T>(), n, Purpose::activations);
      } else {
        lse = dev.mem.take<acc_t<T>>(rows * n.H, "lse");
        attention_forward<T>(s, o, lse, x, x + width, x + width + n.HKV * n.D, d);
      }
      s.record(middle);
      if (sparse) {
        nsa_backward<T, T>(dev, dx, PhiWeights<T>(), d_o, x, PhiWeights<const T>(), std::move(saved), n);
      } else {
        work = dev.mem.take<acc_t<T>>(attention_backward_workspace<T>(d), "workspace");
        attention_backward<T>(s, dx, dx + width, dx + width + n.HKV * n.D, d_o, x, x + width, x + width + n.HKV * n.D,
                              o, lse, work, d);
      }
      s.record(end);
    }
    dev.mem.end();
  };
  arrays();
  Event unused(dev, true);
  layer(unused, unused, unused);
  dev.mem.commit();
  dev.mem.rewind();
  arrays();
  dev.mode = Mode::run;
  Stream& s = dev.compute();
  // Normal numbers; made in pieces, through the arena's own gradient array.
  auto fill = [&](T* to, int64_t count, uint32_t tensor) {
    const int64_t piece = rows * row * int64_t(sizeof(T)) / 4;
    float* wide = reinterpret_cast<float*>(dx);
    for (int64_t at = 0; at < count; at += piece) {
      const int64_t m = std::min(piece, count - at);
      ops::init_normal(s, wide, 1, tensor, at, m, 0, 1);
      ops::cast<T, float>(s, to + at, wide, m);
    }
  };
  fill(x, rows * row, 1), fill(d_o, rows * width, 2);
  std::vector<Event> events;
  for (int i = 0; i < 3 * (reps + 2); ++i) events.emplace_back(dev, true);
  for (int i = 0; i < reps + 2; ++i) {
    if (i == reps + 1) dev.start_profile();
    layer(events[size_t(3 * i)], events[size_t(3 * i + 1)], events[size_t(3 * i + 2)]);
  }
  json parts = json::object();
  for (const auto& t : dev.end_profile()) parts[t.first] = t.second;
  s.synchronize();
  std::vector<double> forward, both;
  for (int i = 2; i < reps + 2; ++i) {
    forward.push_back(elapsed_ms(events[size_t(3 * i)], events[size_t(3 * i + 1)]));
    both.push_back(elapsed_ms(events[size_t(3 * i)], events[size_t(3 * i + 2)]));
  }
  return {{"forward_ms", median(forward)},
          {"forward_backward_ms", median(both)},
          {"forward_backward_ms_min", *std::min_element(both.begin(), both.end())},
          {"forward_backward_ms_max", *std::max_element(both.begin(), both.end())},
          {"parts_ms", parts},
          {"planned_peak_mib", double(dev.mem.arena_bytes()) / 1048576}};
}

int sweep_attention(Settings s) {
  const bool gpu = gpu_count() > 0;
  const Backend backend = gpu ? Backend::gpu : Backend::cpu;
  std::string name;
  {
    Device dev(backend, 0);
    name = dev.name;
  }
  if (s.values.empty())
    s.values =
        gpu ? std::vector<int64_t>{4096, 8192, 16384, 32768, 65536, 131072} : std::vector<int64_t>{256, 512, 1024};
  std::printf("one layer's attention, q, k, v to o, batch 1, %s; %s; %s\n\n", gpu ? "bf16" : "fp32", name.c_str(),
              s.out.c_str());
  std::vector<Words> table = {{"T", "heads", "D", "NSA forward ms", "forward + backward ms", "MiB", "dense forward ms",
                               "forward + backward ms", "MiB", "note"}};
  const std::vector<std::pair<int64_t, int64_t>> heads =
      gpu ? std::vector<std::pair<int64_t, int64_t>>{{32, 8}, {64, 4}}
          : std::vector<std::pair<int64_t, int64_t>>{{4, 1}};
  bool any = false;
  for (const auto& [H, HKV] : heads)
    for (int64_t T : s.values) {
      NsaShape n = {};
      n.B = 1, n.T = T, n.H = H, n.HKV = HKV, n.D = gpu ? 128 : 64;
      n.scale = 1 / std::sqrt(double(n.D)), n.ld = (n.columns() + 7) / 8 * 8;
      Words cells = {std::to_string(T), strf("%lld/%lld", static_cast<long long>(H), static_cast<long long>(HKV)),
                     std::to_string(n.D)};
      std::string note;
      for (bool sparse : {true, false}) {
        json row = {{"date", now_iso8601()},
                    {"attention", {{"B", 1}, {"T", T}, {"H", H}, {"HKV", HKV}, {"D", n.D}}},
                    {"kernel", sparse ? "nsa" : "dense"},
                    {"command", s.command},
                    {"commit", FSDP_COMMIT},
                    {"hardware", {{"gpus", gpu_count()}, {"name", name}}}};
        try {
          const int reps = T > 40000 ? 5 : 15;
          const json r = gpu ? time_layer<bf16>(backend, sparse, n, reps) : time_layer<float>(backend, sparse, n, 3);
          for (const char* key : {"forward_ms", "forward_backward_ms"})
            cells.push_back(strf("%.3f", r[key].get<double>()));
          cells.push_back(grouped(int64_t(r["planned_peak_mib"].get<double>())));
          row["result"] = r, any = true;
        } catch (const OutOfMemory& e) {
          row["error"] = e.what(), note = "no room in memory";
          cells.insert(cells.end(), {"-", "-", "-"});
        }
        append_row(s, row);
      }
      cells.push_back(note);
      table.push_back(cells);
    }
  print_markdown(table);
  return any ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, stop_child_and_exit);
  try {
    Settings s = parse(argc, argv);
    if (s.rank) return collectives_rank(s, argc, argv);
    open_out(&s);
    if (s.sweep == "collectives") return sweep_collectives(s);
    return s.attention ? time_attention(s) : s.sweep == "attention" ? sweep_attention(s) : sweep(s);
  } catch (const UsageError& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
