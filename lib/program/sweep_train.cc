#include "lib/program/sweep_parts.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <optional>

#include "build/version.h"
#include "lib/device/error.h"
#include "lib/program/format.h"
#include "lib/program/process.h"
#include "lib/program/telemetry.h"

using ll = long long;

namespace sweep_parts {

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
    if (const Target& g = t.row.target; *g.figure) {
      j["target"] = {{"figure", g.figure}, {"before", g.before}, {"goal", g.goal}};
      if (g.aim > 0) j["target"]["aim"] = g.aim;
    }
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
static std::vector<std::string> gpus_of(int64_t ranks) {
  return visible_gpus(std::getenv("CUDA_VISIBLE_DEVICES"), int(ranks));
}
GpuSampler sampler_of(int64_t ranks) { return {load_nvml(), gpus_of(ranks)}; }
void add_uuids(const SweepRun& run, json* row) {
  if (!run.machine.gpu) return;
  const std::vector<std::string> uuids = uuids_of(load_nvml(), gpus_of((*row)["ranks"]));
  if (!uuids.empty()) (*row)["hardware"]["uuids"] = uuids;
}

// "2026-11-22T09:10:19.123Z" in seconds since 1970; NaN: it is none.
static double unix_of(const std::string& iso) {
  std::tm t = {};
  double seconds = 0;
  const int n = std::sscanf(iso.c_str(), "%d-%d-%dT%d:%d:%lfZ", &t.tm_year, &t.tm_mon, &t.tm_mday, &t.tm_hour,
                            &t.tm_min, &seconds);
  if (n != 6) return std::nan("");
  t.tm_year -= 1900, t.tm_mon -= 1;
  return double(timegm(&t)) + seconds;
}

static int64_t last_step(const std::vector<json>& log) {
  int64_t last = 0;
  for (const json& j : log) last = std::max(last, j.value("step", int64_t(0)));
  return last;
}

// The step lines of a log: the window's medians, every step's time and loss.
static json read_steps(const std::vector<json>& log, int64_t first, int64_t last, json* row) {
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

static void add_mfu_by_others(const json& config, json* result) {
  if (!result->contains("mfu") || !(*result)["mfu"].is_number()) return;
  const FlopsAs as = flops_as_others_count(config);
  const double mfu = (*result)["mfu"].get<double>();
  if (config.value("attn", "") == "nsa") return;  // theirs counts dense attention
  (*result)["mfu_full"] = mfu * as.full, (*result)["mfu_simple_pytorch"] = mfu * as.simple_pytorch;
}

std::string planned_command(const SweepRun& run, const Task& t) {
  return "./train --plan --world " + std::to_string(t.ranks) + " --gpu " + run.machine.chip + " " + join(t.row.options);
}

json planned_row(const SweepRun& run, const Task& t) {
  json row = row_of(run, t, ours, "", 1);
  row["command"] = planned_command(run, t);
  row["config"] = t.plan.config, row["planned"] = true;
  if (!t.refused.empty()) row["error"] = t.refused;
  else if (!t.row.environment.empty()) row["note"] = "not planned: the estimate knows nothing of its interconnect";
  else if (t.plan.config.value("device", "") == "cpu") row["note"] = "not planned: nothing is known of a CPU's time";
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
  const TrainFiles files = own_files(run, t.number);
  const std::string log = files.log, output = file_of(run, t.number, ".log");
  forget({log});
  const GpuSampler gpus = sampler_of(t.ranks);
  const double launched = unix_seconds();
  std::string error = run_ranks(t.ranks, environment_of(t.row), train_words(run, t, files), output, run.timeout_s);
  forget({files.trace});
  const std::vector<json> lines = read_json_lines(log);
  json header = json::object(), profile = json::object();
  for (const json& j : lines) {
    if (j.contains("config")) header = j;
    if (j.contains("profile_ms")) profile = j;
  }
  for (const char* key : {"commit", "config", "hardware", "versions"})
    if (header.contains(key)) row[key] = header[key];
  if (row.contains("config")) {
    const TrainFiles recorded = recorded_files(run, t.number);
    json& config = row["config"];
    config["log"] = recorded.log;
    if (config.value("trace", "") == files.trace) config["trace"] = recorded.trace;
  }
  add_uuids(run, &row);
  const int64_t first = t.warm + t.first, last = t.last > 0 ? t.warm + t.last : 0;
  const json result = read_steps(lines, first, last, &row);
  row["window"] = {first, last > 0 ? last : int64_t(row["steps_ms"].size())};
  if (const int64_t made = last_step(lines); error.empty() && made < std::max(first, last))
    error = strf("the run ended with step %lld, before step %lld of the window", ll(made), ll(std::max(first, last)));
  if (error.empty() && result.is_null()) error = strf("no steps from %lld on in the log", ll(first));
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
  // The plan knows nothing of what an environment variable does to the links.
  if (header.contains("estimated_ms") && t.row.environment.empty()) r["estimated_ms"] = header["estimated_ms"];
  for (const char* key : {"nccl_share", "clock_mhz", "power_w"})
    if (profile.contains(key)) r[key] = profile[key];
  if (profile.contains("shares")) r.update(profile["shares"]);
  double from = std::nan(""), to = std::nan("");
  for (const json& j : lines) {
    const int64_t step = j.value("step", int64_t(0));
    if (j.contains("ended")) r["first_step_s"] = unix_of(j["ended"]) - launched;
    if (step == first) from = unix_of(j.value("timestamp", ""));
    if (step > 0 && (last == 0 || step <= last)) to = unix_of(j.value("timestamp", ""));
  }
  add_gpu_summary(gpus, from, to, &r);
  add_mfu_by_others(row["config"], &r);
  forget({log, output});
  return row;
}

std::string outcome_of(const json& row) {
  if (row.contains("error")) return row["error"];
  if (!row.contains("result")) return row.value("note", "");
  const json& r = row["result"];
  const json peak = r.value("peak_mib", json());  // PyTorch's is null on a CPU
  return strf("%.1f ms a step", r["step_ms"].get<double>()) +
         (peak.is_number() ? ", " + grouped(std::llround(peak.get<double>())) + " MiB" : "");
}

}  // namespace sweep_parts
