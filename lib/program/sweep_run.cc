#include "lib/program/sweep_run.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <map>
#include <optional>
#include <tuple>

#include <sys/stat.h>
#include <unistd.h>

#include "build/version.h"
#include "lib/device/error.h"
#include "lib/device/nvml.h"
#include "lib/program/format.h"
#include "lib/program/process.h"
#include "lib/program/sweep_plan.h"
#include "lib/program/telemetry.h"

using nlohmann::json;
using ll = long long;

namespace {

const char ours[] = "fsdp.cu", theirs[] = "PyTorch";

// --------------------------------------------------------------------------------------------------------- the file

// Rows by sweep order; one for each row, who, variant and round. Written whole at each change.
struct ResultFile {
  std::string path;
  std::vector<json> rows;

  static std::string key(const json& j) {
    return j.value("row", "") + "\n" + j.value("who", "") + "\n" + j.value("variant", "") + "\n" +
           std::to_string(j.value("round", 1));
  }
  const json* find(const json& like) const {
    for (const json& j : rows)
      if (key(j) == key(like)) return &j;
    return nullptr;
  }
  void put(const json& row) {
    const auto same = [&](const json& j) { return key(j) == key(row); };
    rows.erase(std::remove_if(rows.begin(), rows.end(), same), rows.end());
    rows.push_back(row);
    const auto before = [](const json& a, const json& b) {
      const auto order = [](const json& j) {
        return std::make_tuple(j.value("number", 0), j.value("who", "") != ours, j.value("variant", ""),
                               j.value("round", 1));
      };
      return order(a) < order(b);
    };
    std::stable_sort(rows.begin(), rows.end(), before);
    write();
  }
  void write() const {
    const std::string beside = path + ".part";
    {
      std::ofstream out(beside);
      for (const json& j : rows) out << j.dump() << "\n";
      out.flush();
      REQUIRE_USER(out, "%s cannot be written: %s", beside.c_str(), std::strerror(errno));
    }
    REQUIRE_USER(std::rename(beside.c_str(), path.c_str()) == 0, "%s cannot be written: %s", path.c_str(),
                 std::strerror(errno));
  }
};

ResultFile open_file(const SweepRun& run) {
  ResultFile file{run.path, read_json_lines(run.path)};
  const bool foreign = std::any_of(file.rows.begin(), file.rows.end(),
                                   [&](const json& j) { return j.value("sweep", "") != run.sweep->name; });
  struct stat s;
  const bool empty = ::stat(run.path.c_str(), &s) != 0 || s.st_size == 0;
  REQUIRE_USER(!foreign && (empty || !file.rows.empty()),
               "%s holds something else than rows of --sweep %s, and is not overwritten; choose another --out",
               run.path.c_str(), run.sweep->name);
  if (run.begin == Begin::anew && run.only.empty()) file.rows.clear();
  file.write();  // what cannot be written is said before the first row takes its time
  return file;
}

// ----------------------------------------------------------------------------------------------------- what is to run

// A row with everything chosen.
struct Task {
  int64_t number = 0, ranks = 0;
  SweepRow row;
  Planned plan;
  std::string refused;        // why ./train would not run it
  bool only_planned = false;  // more ranks than GPUs
  int64_t warm = 0, steps = 0, first = 0, last = 0;
};

// Steps that take so long, with one at least that is not the row's first.
int64_t steps_of(double warm_seconds, double step_seconds) {
  if (warm_seconds <= 0 || step_seconds <= 0) return 0;
  return int64_t(std::min(1000.0, std::ceil(warm_seconds / step_seconds)));
}

void choose_steps(const SweepRun& run, Task* t) {
  const bool whole = t->row.steps != 0, slow = t->plan.seconds > 1;
  const bool profiles =
      std::find(run.sweep->measured.begin(), run.sweep->measured.end(), "--profile") != run.sweep->measured.end();
  t->first = run.first ? run.first : t->row.first ? t->row.first : run.machine.gpu ? 5 : 3;
  t->last = run.last ? run.last : t->row.last ? t->row.last : run.machine.gpu ? 24 : 6;
  t->steps = run.steps          ? run.steps
             : t->row.steps     ? t->row.steps
             : !run.machine.gpu ? 6
             : slow             ? t->last + profiles
                                : 30;
  if (t->steps < 0) t->steps = t->last = t->plan.config.value("steps", int64_t(1));  // as many as the epochs have
  if (t->steps > 0) t->last = std::min(t->last, t->steps), t->first = std::min(t->first, t->last);
  if (!whole) t->warm = steps_of(run.warm_seconds, t->plan.seconds);
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
      set_options(run.extra, &t.row.options);
      // The schedule of the learning rate, which both follow, is that of the steps.
      if (t.row.steps > 0)
        set_options({"--steps", std::to_string(run.steps ? run.steps : t.row.steps)}, &t.row.options);
      try {
        t.plan = planned(t.row.options, t.ranks, run.machine.gpu ? run.machine.chip : "");
      } catch (const UsageError& e) { t.refused = e.what(); }
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

std::string file_of(const SweepRun& run, int64_t number, const char* ending) {
  return strf("build/bench/%s-%lld-ranks-%lld%s", run.sweep->name, ll(run.machine.ranks), ll(number), ending);
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

Words train_words(const SweepRun& run, const Task& t) {
  Words words = {"./train"};
  set_options(options_of(*run.sweep, t.row), &words);
  if (!run.machine.gpu) set_options({"--device", "cpu"}, &words);
  if (t.row.steps == 0 || run.steps) set_options({"--steps", std::to_string(t.warm + t.steps)}, &words);
  set_options({"--log", file_of(run, t.number, ".jsonl")}, &words);
  return words;
}
std::string train_command(const SweepRun& run, const Task& t) {
  return prefix(t.row) + "mpirun -np " + std::to_string(t.ranks) + " " + join(train_words(run, t));
}

// What PyTorch is told of our options, by their keys; everything else of ./train is ours alone. DDP has no units.
const char told[] =
    "arch dim depth heads kv_heads hidden vocab seq batch grad_accum accum_sync shard param_dtype reduce_dtype "
    "autocast "
    "tf32 recompute keep_attention moments clip lr min_lr_ratio warmup beta1 beta2 eps weight_decay seed "
    "optimizer_in_backward tie_embeddings freeze data";
const char told_of_units[] = " wrap reshard_after_forward forward_prefetch backward_prefetch";

Words peer_words(const SweepRun& run, const Task& t, const Peer& peer) {
  Words words;
  const bool shards = t.plan.config.value("shard", "") != "none";
  for (const std::string& key : words_of(std::string(told) + (shards ? told_of_units : ""))) {
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

// ------------------------------------------------------------------------------------------------------------- rows

json row_of(const SweepRun& run, const Task& t, const char* who, const std::string& variant, int64_t round) {
  json labels = json::array(), environment = json::object();
  for (const auto& l : t.row.labels) labels.push_back({l.first, l.second});
  for (const auto& e : t.row.environment) environment[e.first] = e.second;
  json j = {{"sweep", run.sweep->name}, {"number", t.number}, {"row", t.row.name},     {"who", who},
            {"labels", labels},         {"ranks", t.ranks},   {"commit", FSDP_COMMIT}, {"hardware", run.hardware},
            {"date", now_iso8601()}};
  j["hardware"]["gpus"] = run.machine.gpu ? t.ranks : 0;
  if (!variant.empty()) j["variant"] = variant;
  if (!environment.empty()) j["environment"] = environment;
  if (round > 1) j["round"] = round;
  if (who == std::string(ours)) {
    if (!t.row.theirs.is_null()) j["theirs"] = t.row.theirs, j["theirs_on"] = run.sweep->theirs_on;
    if (!t.row.note.empty()) j["note"] = t.row.note;
    if (!t.row.no_peer.empty()) j["no_peer"] = t.row.no_peer;
  }
  return j;
}

// What the GPUs did from one moment to another, in seconds since 1970; of the last second, where that is longer: the
// steps before the window are the same, and the driver's figures are means over as long.
void add_gpu_summary(const GpuSampler& gpus, double from, double to, json* result) {
  const std::optional<GpuSummary> seen = gpus.summary(std::min(from, to - 1), to);
  if (!seen) return;
  const auto add = [&](const char* key, double value) {
    if (!std::isnan(value)) (*result)[key] = value;
  };
  add("gpu_utilization", seen->utilization), add("clock_mhz", seen->clock_mhz), add("power_w", seen->power_w);
}
GpuSampler sampler_of(int64_t ranks) {
  return {load_nvml(), visible_gpus(std::getenv("CUDA_VISIBLE_DEVICES"), int(ranks))};
}

// "2026-11-22T09:10:19.123Z" in seconds since 1970; NaN: it is none.
double unix_of(const std::string& iso) {
  std::tm t = {};
  double seconds = 0;
  const int n = std::sscanf(iso.c_str(), "%d-%d-%dT%d:%d:%lfZ", &t.tm_year, &t.tm_mon, &t.tm_mday, &t.tm_hour,
                            &t.tm_min, &seconds);
  if (n != 6) return std::nan("");
  t.tm_year -= 1900, t.tm_mon -= 1;
  return double(timegm(&t)) + seconds;
}

// The step lines of a log: the window's medians, every step's time and loss.
json read_steps(const std::vector<json>& log, int64_t first, int64_t last, json* row) {
  std::vector<double> ms, rate, mfu, gather, reduce;
  std::vector<json> all_ms, losses;
  json validated = json::array();  // [step, loss]
  double peak = -1, best = std::nan("");
  json last_loss, result = json::object();
  for (const json& j : log) {
    if (!j.contains("step")) continue;
    const int64_t step = j.value("step", int64_t(0));
    all_ms.push_back(j.value("step_ms", json())), losses.push_back(j.value("loss", json()));
    if (losses.back().is_number()) {
      last_loss = losses.back();
      if (!(best <= last_loss.get<double>())) best = last_loss.get<double>();
    }
    const auto number = [&](const char* key) { return j.contains(key) && j[key].is_number(); };
    if (number("val_loss")) validated.push_back({step, j["val_loss"]});
    if (number("peak_mib") && step <= 2) result[step == 1 ? "first_peak_mib" : "second_peak_mib"] = j["peak_mib"];
    if (step < first || (last > 0 && step > last)) continue;
    const auto add = [&](const char* key, std::vector<double>* to) {
      if (number(key)) to->push_back(j[key].get<double>());
    };
    add("step_ms", &ms), add("tokens_per_sec", &rate), add("mfu", &mfu);
    add("exposed_gather_ms", &gather), add("exposed_reduce_ms", &reduce);
    if (number("peak_mib")) peak = std::max(peak, j["peak_mib"].get<double>());
  }
  (*row)["steps_ms"] = all_ms, (*row)["losses"] = losses;
  if (!validated.empty()) (*row)["val_losses"] = validated;
  if (ms.empty()) return nullptr;
  result.update(spread("step_ms", ms));
  result["tokens_per_sec"] = median(rate);
  if (!mfu.empty()) result["mfu"] = median(mfu);
  if (peak >= 0) result["peak_mib"] = peak;
  if (!gather.empty()) result["exposed_gather_ms"] = median(gather);
  if (!reduce.empty()) result["exposed_reduce_ms"] = median(reduce);
  result["last_loss"] = last_loss;
  if (!std::isnan(best)) result["best_loss"] = best;
  return result;
}

void add_mfu_by_others(const json& config, json* result) {
  if (!result->contains("mfu") || !(*result)["mfu"].is_number()) return;
  const FlopsAs as = flops_as_others_count(config);
  const double mfu = (*result)["mfu"].get<double>();
  if (config.value("attn", "") == "nsa") return;  // theirs counts dense attention
  (*result)["mfu_full"] = mfu * as.full, (*result)["mfu_simple_pytorch"] = mfu * as.simple_pytorch;
}

json planned_row(const SweepRun& run, const Task& t) {
  json row = row_of(run, t, ours, "", 1);
  row["command"] =
      "./train --plan --world " + std::to_string(t.ranks) + " --gpu " + run.machine.chip + " " + join(t.row.options);
  row["config"] = t.plan.config, row["planned"] = true;
  if (!t.refused.empty()) row["error"] = t.refused;
  else
    row["result"] = {
        {"step_ms", 1e3 * t.plan.seconds}, {"tokens_per_sec", t.plan.tokens_per_sec},   {"mfu", t.plan.mfu},
        {"init_mib", t.plan.init_mib},     {"before_step_mib", t.plan.before_step_mib}, {"peak_mib", t.plan.peak_mib}};
  if (row.contains("result")) add_mfu_by_others(t.plan.config, &row["result"]);
  return row;
}

json train_row(const SweepRun& run, const Task& t, int64_t round) {
  json row = row_of(run, t, ours, "", round);
  row["command"] = train_command(run, t);
  if (!t.refused.empty()) {
    row["error"] = t.refused;
    return row;
  }
  const std::string log = file_of(run, t.number, ".jsonl"), output = file_of(run, t.number, ".log");
  std::remove(log.c_str());
  const GpuSampler gpus = sampler_of(t.ranks);
  const double launched = unix_seconds();
  std::string error = run_ranks(t.ranks, environment_of(t.row), train_words(run, t), output, run.timeout_s);
  const std::vector<json> lines = read_json_lines(log);
  json header = json::object(), profile = json::object();
  for (const json& j : lines) {
    if (j.contains("config")) header = j;
    if (j.contains("profile_ms")) profile = j;
  }
  for (const char* key : {"commit", "config", "hardware", "versions"})
    if (header.contains(key)) row[key] = header[key];
  const int64_t first = t.warm + t.first, last = t.last > 0 ? t.warm + t.last : 0;
  const json result = read_steps(lines, first, last, &row);
  row["window"] = {first, last > 0 ? last : int64_t(row["steps_ms"].size())};
  if (error.empty() && result.is_null()) error = strf("no steps %lld to %lld in the log", ll(first), ll(last));
  if (!error.empty()) {
    row["error"] = error;
    return row;
  }
  row["result"] = result;
  const json memory = header.value("memory", json::object());
  json& r = row["result"];
  for (const char* key : {"init_mib", "before_step_mib", "planned_peak_mib"})
    if (memory.contains(key)) r[key] = memory[key];
  r["peak_mib"] = std::max(r.value("peak_mib", -1.0), memory.value("peak_mib", -1.0));
  if (header.contains("estimated_ms")) r["estimated_ms"] = header["estimated_ms"];
  for (const char* key : {"nccl_share", "clock_mhz", "power_w"})
    if (profile.contains(key)) r[key] = profile[key];
  double from = std::nan(""), to = std::nan("");
  for (const json& j : lines) {
    const int64_t step = j.value("step", int64_t(0));
    if (j.contains("ended")) r["first_step_s"] = unix_of(j["ended"]) - launched;
    if (step == first) from = unix_of(j.value("timestamp", ""));
    if (step > 0 && (last == 0 || step <= last)) to = unix_of(j.value("timestamp", ""));
  }
  add_gpu_summary(gpus, from, to, &r);
  add_mfu_by_others(row["config"], &r);
  return row;
}

std::string outcome_of(const json& row) {
  if (row.contains("error")) return row["error"];
  const json& r = row["result"];
  const json peak = r.value("peak_mib", json());  // PyTorch's is null on a CPU
  return strf("%.1f ms a step", r["step_ms"].get<double>()) +
         (peak.is_number() ? ", " + grouped(std::llround(peak.get<double>())) + " MiB" : "");
}

// ------------------------------------------------------------------------------------------------------------ PyTorch

struct PeerTask {
  const Task* task;
  const Peer* peer;
  std::string tag() const { return task->row.name + (peer->variant.empty() ? "" : ", " + peer->variant); }
};

json peer_row(const SweepRun& run, const PeerTask& p, int64_t round, const json& said, const std::string& error,
              double launched, const GpuSampler& gpus) {
  json row = row_of(run, *p.task, theirs, p.peer->variant, round);
  row["command"] = peer_command(run, *p.task, *p.peer);
  for (const char* key : {"steps_ms", "losses", "versions", "hardware", "args", "graph_breaks"})
    if (said.contains(key)) row[key] = said[key];
  if (!said.value("ok", false)) {
    const std::string kind = said.value("error", ""), detail = said.value("detail", "");
    row["error"] = kind.empty() ? error : detail.empty() ? kind : kind + ": " + lines_of(detail).front();
    return row;
  }
  row["window"] = said.value("window", json::array({p.task->first, p.task->last}));
  row["result"] = said["result"];
  if (launched > 0 && said.contains("first_step_unix"))
    row["result"]["first_step_s"] = said["first_step_unix"].get<double>() - launched;
  const json window = said.value("window_unix", json());
  if (window.is_array() && window.size() == 2) add_gpu_summary(gpus, window[0], window[1], &row["result"]);
  return row;
}

// What PyTorch has printed so far, by row.
std::map<std::string, json> said_in(const std::string& output) {
  std::map<std::string, json> said;
  for (const json& j : read_json_lines(output))
    if (j.contains("ok") && j.contains("tag")) said.emplace(j["tag"], j);
  return said;
}

// The rows of one world and environment in one process, which compiles a shape once. Where it ends in the middle of
// them, those behind run in another.
void run_peers(const SweepRun& run, std::vector<PeerTask> left, int64_t round, ResultFile* file) {
  const std::string rows = file_of(run, 0, "-peers.json"), output = file_of(run, 0, "-peers.log");
  while (!left.empty()) {
    json list = json::array();
    for (const PeerTask& p : left) list.push_back({{"tag", p.tag()}, {"args", peer_words(run, *p.task, *p.peer)}});
    std::ofstream(rows) << list.dump(1) << "\n";
    const Task& t = *left[0].task;
    Words command = {"env"};
    for (const std::string& e : environment_of(t.row)) command.push_back(e);
    const Words launcher = torchrun(t.ranks);
    command.insert(command.end(), launcher.begin(), launcher.end());
    command.insert(command.end(), {"--rows", rows});

    size_t done = 0;
    const GpuSampler gpus = sampler_of(t.ranks);
    const double launched = unix_seconds();
    const auto keep = [&](const json& said, const std::string& error) {
      const PeerTask& p = left[done];
      const json row = peer_row(run, p, round, said, error, done == 0 ? launched : 0, gpus);
      file->put(row);
      std::printf("%s %lld, %s, PyTorch: %s\n", run.sweep->name, ll(p.task->number), p.tag().c_str(),
                  outcome_of(row).c_str());
      std::fflush(stdout);
      done++;
    };
    const auto read_lines = [&] {
      for (const std::map<std::string, json> said = said_in(output); done < left.size();) {
        const auto found = said.find(left[done].tag());
        if (found == said.end()) break;
        keep(found->second, "");
      }
    };
    const std::string failed = ::run(command, output, run.timeout_s * int64_t(left.size()), read_lines);
    read_lines();
    if (done < left.size()) {  // it has ended in this one
      const std::string line = error_line(output);
      keep(json::object(), !line.empty() ? line : !failed.empty() ? failed : "no result; see " + output);
    }
    left.erase(left.begin(), left.begin() + long(done));
  }
}

// --------------------------------------------------------------------------------------------------------------- all

constexpr double launch_s = 7, compile_s = 25;  // seconds: until ./train and until PyTorch make a step

double seconds_of(const SweepRun& run, const Task& t) {
  if (!runs(t)) return 0;
  const double steps = double(t.warm + (t.steps > 0 ? t.steps : 128)) * t.plan.seconds;
  double s = launch_s + steps;
  if (run.peers == Peers::on) s += double(t.row.peers.size()) * (compile_s + 1.2 * steps);
  return s * double(run.rounds);
}

void run_rows(const SweepRun& run, const std::vector<Task>& tasks, int64_t round, ResultFile* file) {
  double left = 0;
  for (const Task& t : tasks) left += seconds_of(run, t) / double(run.rounds);
  for (const Task& t : tasks) {
    if (t.row.no_counterpart) {
      file->put(row_of(run, t, ours, "", 1));
      continue;
    }
    const json like = row_of(run, t, ours, "", round);
    const json* there = run.begin == Begin::where_it_stopped ? file->find(like) : nullptr;
    if (!there || there->contains("error")) {
      const json row = t.only_planned ? planned_row(run, t) : train_row(run, t, round);
      file->put(row);
      std::printf("%s %lld, %s: %s%s\n", run.sweep->name, ll(t.number), t.row.name.c_str(), outcome_of(row).c_str(),
                  t.only_planned ? " (planned)" : "");
    }
    left -= runs(t) ? launch_s + double(t.warm + std::max<int64_t>(t.steps, 0)) * t.plan.seconds : 0;
    if (left > 5) std::printf("  about %s left\n", duration_text(left).c_str());
    std::fflush(stdout);
  }
}

// A program of its own beside a row: one run, one JSON line.
void run_script(const SweepRun& run, const Task& t, const Peer& peer, int64_t round, ResultFile* file) {
  Words command = {"python3"};
  if (t.ranks > 1)
    command = words_of("python3 -m torch.distributed.run --standalone --nproc_per_node=" + std::to_string(t.ranks));
  command.push_back(peer.script);
  command.insert(command.end(), peer.options.begin(), peer.options.end());
  const std::string output = file_of(run, t.number, "-script.log");
  const GpuSampler gpus = sampler_of(t.ranks);
  const double launched = unix_seconds();
  const std::string failed = ::run(command, output, run.timeout_s);
  json row = row_of(run, t, theirs, peer.variant, round);
  row["command"] = join(command), row["error"] = failed.empty() ? "no result; see " + output : failed;
  if (!failed.empty() && !error_line(output).empty()) row["error"] = error_line(output);
  for (const json& j : read_json_lines(output)) {
    if (!j.value("ok", false)) continue;
    row.erase("error");
    row.update({{"result", j["result"]}, {"args", j["config"]}, {"versions", j["versions"]}});
    row["result"]["step_ms"] = 1e3 * j["result"]["step_s"].get<double>();
    add_gpu_summary(gpus, launched, unix_seconds(), &row["result"]);
  }
  file->put(row);
  std::printf("%s %lld, %s, PyTorch: %s\n", run.sweep->name, ll(t.number), t.row.name.c_str(), outcome_of(row).c_str());
}

void run_all_peers(const SweepRun& run, std::vector<Task> tasks, int64_t round, ResultFile* file) {
  std::map<std::string, std::vector<PeerTask>> groups;
  for (Task& t : tasks) {
    if (!runs(t) && !t.row.no_counterpart) continue;
    // As many steps, and as long a warm-up, as the epochs gave ours: only a corpus that is open knows.
    const json* mine = t.row.steps < 0 ? file->find(row_of(run, t, ours, "", round)) : nullptr;
    if (mine && mine->contains("config"))
      t.steps = t.last = (*mine)["config"]["steps"], t.plan.config["warmup"] = (*mine)["config"]["warmup"];
    for (const Peer& peer : t.row.peers) {
      const json* there =
          run.begin == Begin::where_it_stopped ? file->find(row_of(run, t, theirs, peer.variant, round)) : nullptr;
      if (there && !there->contains("error")) continue;
      if (!peer.script.empty()) run_script(run, t, peer, round, file);
      else groups[std::to_string(t.ranks) + prefix(t.row)].push_back({&t, &peer});
    }
  }
  for (auto& group : groups) run_peers(run, std::move(group.second), round, file);
}

}  // namespace

std::string run_ranks(int64_t ranks, const Words& environment, const Words& words, const std::string& output,
                      int64_t timeout_s) {
  const std::string n = std::to_string(ranks);
  // setup.sh knows the flags that this machine's mpirun needs.
  Words all = {"env"};
  all.insert(all.end(), environment.begin(), environment.end());
  const Words shell = {"bash", "-c", ". ./setup.sh env " + n + " && exec mpirun $MPIRUN_FLAGS -np " + n + " \"$@\"",
                       "bench"};
  all.insert(all.end(), shell.begin(), shell.end());
  all.insert(all.end(), words.begin(), words.end());
  const std::string error = run(all, output, timeout_s);
  if (error.empty() || error.rfind("timed out", 0) == 0) return error;
  const std::string line = error_line(output);
  return line.empty() ? error : line;
}

json ask_hardware() {
  REQUIRE_USER(access("./train", X_OK) == 0, "no ./train in this directory: run `make`, and ./bench where ./train is");
  const std::string output = strf("build/bench/hardware-%d.log", int(getpid())),
                    why = run({"./train", "--hardware"}, output, 120);
  const std::vector<json> lines = read_json_lines(output);
  for (const json& j : lines) {
    if (!j.contains("gpus")) continue;
    std::remove(output.c_str());
    return j;
  }
  throw Error(strf("./train --hardware printed no JSON line%s%s; see %s", why.empty() ? "" : ": ", why.c_str(),
                   output.c_str()));
}

int run_sweep(const SweepRun& run) {
  const std::vector<Task> tasks = tasks_of(run);
  ResultFile file = open_file(run);
  const double minutes = planned_minutes(run);
  std::printf("%s: %zu rows; %s%s; %s%s\n", run.sweep->name, tasks.size(),
              run.machine.gpus > 0 ? strf("%lld x ", ll(run.machine.gpus)).c_str()
              : run.machine.gpu    ? "planned for "
                                   : "small shapes on the CPU, ",
              run.hardware.value("name", "?").c_str(), run.path.c_str(),
              minutes > 0 ? strf("; about %.0f min", std::ceil(minutes)).c_str() : "");
  std::fflush(stdout);
  for (int64_t round = 1; round <= run.rounds; round++) {
    run_rows(run, tasks, round, &file);
    if (run.peers == Peers::on) run_all_peers(run, tasks, round, &file);
  }
  return std::any_of(file.rows.begin(), file.rows.end(), [](const json& j) { return j.contains("result"); }) ? 0 : 1;
}

void print_commands(const SweepRun& run) {
  for (const Task& t : tasks_of(run)) {
    if (t.row.no_counterpart) {
      std::printf("%lld %s: %s\n", ll(t.number), t.row.name.c_str(), t.row.note.c_str());
      if (run.peers == Peers::on)
        for (const Peer& peer : t.row.peers)
          std::printf("  PyTorch: %s %s\n", peer.script.c_str(), join(peer.options).c_str());
      continue;
    }
    const std::string command =
        t.only_planned ? planned_row(run, t)["command"].get<std::string>() : train_command(run, t);
    std::printf("%lld %s: %s\n", ll(t.number), t.row.name.c_str(), command.c_str());
    if (!t.refused.empty()) std::printf("  refused: %s\n", t.refused.c_str());
    if (run.peers == Peers::on && runs(t))
      for (const Peer& peer : t.row.peers) std::printf("  PyTorch: %s\n", peer_command(run, t, peer).c_str());
  }
}

double planned_minutes(const SweepRun& run) {
  if (!run.machine.gpu) return -1;
  double s = 0;
  for (const Task& t : tasks_of(run)) s += seconds_of(run, t);
  return s / 60;
}
