// Sweeps: how time and memory of a step go with depth, sequence length, width or the number of ranks. And the time of
// the attention kernels alone.
//
//   ./bench --sweep depth            on the reference shape `rope` (on a CPU, on `tiny`), with the ranks at hand
//   ./bench --sweep width --ranks 2 --values 1024,2048 -- --param-dtype fp32
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
#include "lib/device.h"
#include "lib/ops.h"
#include "lib/telemetry.h"
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
  Words extra;          // for ./train, after --
  std::string command;  // as typed
};

struct Row {
  int64_t value = 0, ranks = 0;
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
    if (!j.contains("step")) {
      row->header = j;
      continue;
    }
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
  row.who = "fsdp.cu", row.value = value;
  row.ranks = s.sweep == "world" ? value : s.ranks;
  const std::string log = log_name(s, row, ".jsonl"), output = log_name(s, row, ".log");
  std::remove(log.c_str());
  auto number = [](int64_t n) { return std::to_string(n); };
  Words train = {"./train", "--preset", s.preset, "--data", "random", "--steps", number(s.steps), "--log", log};
  if (s.gpu) train.insert(train.end(), {"--batch", "8", "--param-dtype", "bf16", "--reduce-dtype", "bf16"});
  if (s.sweep == "depth" || s.sweep == "seq") train.insert(train.end(), {"--" + s.sweep, number(value)});
  if (s.sweep == "width") {
    // Heads of 128 in groups of four as in the reference shape; of 32 in pairs on a CPU.
    const int64_t heads = std::max<int64_t>(1, value / (s.gpu ? 128 : 32));
    train.insert(train.end(), {"--dim", number(value), "--hidden", number(4 * value), "--heads", number(heads),
                               "--kv-heads", number(std::max<int64_t>(1, heads / (s.gpu ? 4 : 2)))});
  }
  // A later option wins over the same one before it only if it stands once: drop ours where the user gives it.
  for (const std::string& e : s.extra) {
    auto at = std::find(train.begin(), train.end(), e.substr(0, e.find('=')));
    if (e.rfind("--", 0) == 0 && at != train.end()) train.erase(at, at + 2);
  }
  train.insert(train.end(), s.extra.begin(), s.extra.end());
  row.command = "mpirun -np " + number(row.ranks) + " " + join(train);
  // setup.sh knows the flags that this machine's mpirun needs.
  Words words = {
      "bash", "-c",
      ". ./setup.sh env " + number(row.ranks) + " && exec mpirun $MPIRUN_FLAGS -np " + number(row.ranks) + " \"$@\"",
      "bench"};
  words.insert(words.end(), train.begin(), train.end());
  row.error = run(words, output, s.timeout);
  if (!row.error.empty() && row.error.rfind("timed out", 0) != 0) {
    const std::string line = error_line(output);
    if (!line.empty()) row.error = line;
  }
  read_log(log, s, &row);
  return row;
}

// The same shape in PyTorch FSDP2, compiled block by block. The shape is what ./train says it ran.
Row peer_row(const Settings& s, const Row& ours) {
  Row row;
  row.who = "PyTorch", row.value = ours.value, row.ranks = ours.ranks;
  const json c = ours.header.value("config", json::object());
  for (const char* key : {"arch", "dim", "depth", "heads", "kv_heads", "hidden", "vocab", "seq", "batch"})
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
                       "--target",
                       "next",
                       "--reduce-dtype",
                       "bf16",
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

void append_row(const Settings& s, const json& j) {
  std::ofstream out(s.out, std::ios::app);
  out << j.dump() << "\n";
  REQUIRE_USER(out.flush(), "--out %s cannot be written", s.out.c_str());
}

void write_row(const Settings& s, const Row& row, const json& hardware) {
  json j = {{"date", now_iso8601()},
            {"sweep", s.sweep},
            {s.sweep, row.value},
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
    return name == "who" || name == "note" || name == "shape" || name == "kernel";
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
  std::vector<Words> table(1);
  table[0] = {s.sweep};
  if (who) table[0].push_back("who");
  if (s.sweep != "world") table[0].push_back("ranks");
  for (const char* name : {"init MiB", "pre-step0 MiB", "peak MiB", "planned peak MiB", "step ms", "tokens/s", "MFU %"})
    table[0].push_back(name);
  if (exposed) table[0].push_back("exposed ms (gather + reduce)");
  if (notes) table[0].push_back("note");
  for (const Row& row : rows) {
    Words cells = {std::to_string(row.value)};
    if (who) cells.push_back(row.who);
    if (s.sweep != "world") cells.push_back(std::to_string(row.ranks));
    auto cell = [&](const char* key, auto text) {
      const bool known = row.error.empty() && row.result.contains(key) && row.result[key].is_number();
      cells.push_back(known ? text(row.result[key].get<double>()) : "-");
    };
    auto whole = [](double x) { return grouped(std::llround(x)); };
    for (const char* key : {"init_mib", "before_step_mib", "peak_mib", "planned_peak_mib"}) cell(key, whole);
    cell("step_ms", [](double x) { return strf("%.1f", x); });
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
  s.command = join(Words(argv, argv + argc));
  CLI::App app(
      "Time and memory of a training step, over a sweep; options of ./train follow after --. Or the time of the "
      "attention kernels alone");
  auto* sweep = app.add_option("--sweep", s.sweep, "what to vary: depth, seq, width or world")
                    ->check(CLI::IsMember({"depth", "seq", "width", "world"}));
  app.add_flag("--attention", s.attention, "time the attention kernels on GPU 0")->excludes(sweep);
  app.add_option("--values", s.values, "the values, with commas (default: a list that suits the machine)")
      ->delimiter(',')
      ->check(CLI::PositiveNumber)
      ->needs(sweep);
  app.add_option("--ranks", s.ranks, "ranks (default: a rank a GPU; on a CPU 2)")
      ->check(CLI::Range(1, 1 << 20))
      ->needs(sweep);
  app.add_option("--preset", s.preset, "shape to vary (default: rope on GPUs, tiny on a CPU)")->needs(sweep);
  app.add_option("--steps", s.steps, "steps a row (default: 30; on a CPU 6)")
      ->check(CLI::Range(1, 1 << 20))
      ->needs(sweep);
  app.add_option("--window", s.window, "FIRST:LAST, the steps that count, from 1 (default: 5:24; on a CPU 3:6)")
      ->needs(sweep);
  app.add_option("--timeout", s.timeout, "seconds a row (default: 900)")->check(CLI::Range(1, 1 << 20))->needs(sweep);
  app.add_option("--out", s.out,
                 "JSON lines are added to this file (default: results/SWEEP-DATE.jsonl, results/attention.jsonl)");
  app.add_flag("--peer", s.peer, "after each row the same shape in PyTorch (peers/torch_fsdp.py)")->needs(sweep);
  try {
    app.parse(int(end - argv), argv);
  } catch (const CLI::CallForHelp&) {
    std::printf("%s", app.help().c_str());
    std::exit(0);
  } catch (const CLI::ParseError& e) { throw UsageError(std::string(e.what()) + "; see ./bench --help"); }
  REQUIRE_USER(s.attention || !s.sweep.empty(), "--sweep or --attention is needed; see ./bench --help");
  REQUIRE_USER(!s.attention || s.extra.empty(), "--attention runs no ./train: nothing may follow after --");
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
    if (s->sweep == "world")
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
  if (s->out.empty()) s->out = "results/" + s->sweep + "-" + now_iso8601().substr(0, 10) + ".jsonl";
  if (s->peer && !run({"python3", "-c", "import torch; assert torch.cuda.is_available()"}, "/dev/null", 120).empty()) {
    std::printf("--peer: python3 here has no torch that sees a GPU; its rows are left out\n");
    s->peer = false;
  }
}

int sweep(Settings s) {
  mkdir("build", 0777), mkdir("build/bench", 0777), mkdir("results", 0777);
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
    std::printf("%s %lld, %s: %s\n", s.sweep.c_str(), static_cast<long long>(row.value), row.who.c_str(), told.c_str());
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

// Milliseconds of 20 calls after 3 that do not count, one behind the other: a call's time is from the end of the one
// before to its own.
template <class F>
std::vector<double> time_calls(Device& dev, F call) {
  Stream& s = dev.compute();
  std::vector<Event> ends;
  for (int i = 0; i <= 20; ++i) ends.emplace_back(dev, true);
  for (int i = 0; i < 3; ++i) call();
  for (Event& end : ends) {
    if (&end != &ends[0]) call();
    s.record(end);
  }
  std::vector<double> ms;
  for (size_t i = 1; i < ends.size(); ++i) ms.push_back(elapsed_ms(ends[i - 1], ends[i]));
  return ms;
}

// One shape by the kernels of `arch`: q, k and v are columns of one buffer, as in a model, and normal numbers.
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
  auto forward = [&] { gpu::attention_forward<bf16>(s.cuda(), arch, o, lse, qkv, qkv + k_at, qkv + v_at, a); };
  auto both = [&] {
    forward();
    gpu::attention_backward<bf16>(s.cuda(), arch, dqkv, dqkv + k_at, dqkv + v_at, d_o, qkv, qkv + k_at, qkv + v_at, o,
                                  lse, work, a);
  };
  // Two products forward and five backward; half of the scores of causal attention are counted.
  const double flops = 4.0 * double(a.B * a.H) * double(a.T) * double(a.T) * double(a.D) / 2;
  json result;
  auto add = [&](const std::string& name, const std::vector<double>& ms, double work_done) {
    result[name + "_ms"] = median(ms);
    result[name + "_ms_min"] = *std::min_element(ms.begin(), ms.end());
    result[name + "_ms_max"] = *std::max_element(ms.begin(), ms.end());
    result[name + "_tflops"] = work_done / median(ms) / 1e9;
  };
  add("forward", time_calls(dev, forward), flops);
  add("forward_backward", time_calls(dev, both), 3.5 * flops);
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
  mkdir("results", 0777);
  if (s.out.empty()) s.out = "results/attention.jsonl";
  std::printf("causal attention in bf16, medians of 20 calls; %s; %s\n\n", dev.name.c_str(), s.out.c_str());
  std::vector<Words> table = {{"shape", "kernel", "forward ms", "TFLOP/s", "forward + backward ms", "TFLOP/s", "note"}};
  bool any = false;
  const int64_t shapes[][5] = {{1, 8192, 32, 8, 128},  {1, 4096, 32, 8, 128}, {8, 4096, 32, 8, 128},
                               {1, 32768, 32, 8, 128}, {1, 2048, 12, 2, 64},  {16, 2048, 12, 2, 64},
                               {1, 8192, 32, 8, 64}};  // B, T, H, HKV, D
  for (const auto& [B, T, H, HKV, D] : shapes)
    for (const Kernels& k : kernels) {
      json row = {{"date", now_iso8601()}, {"attention", {{"B", B}, {"T", T}, {"H", H}, {"HKV", HKV}, {"D", D}}},
                  {"kernel", k.name},      {"command", s.command},
                  {"commit", FSDP_COMMIT}, {"hardware", hardware}};
      Words cells = {strf("B%lld T%lld %lld/%lld D%lld", static_cast<long long>(B), static_cast<long long>(T),
                          static_cast<long long>(H), static_cast<long long>(HKV), static_cast<long long>(D)),
                     k.name};
      try {
        const json r = time_attention_shape(dev, k.arch, {B, T, H, HKV, D, 0, 0, 0, 0, 0, 1 / std::sqrt(double(D))});
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

}  // namespace

int main(int argc, char** argv) {
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, stop_child_and_exit);
  try {
    const Settings s = parse(argc, argv);
    return s.attention ? time_attention(s) : sweep(s);
  } catch (const UsageError& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 2;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "error: %s\n", e.what());
    return 1;
  }
}
