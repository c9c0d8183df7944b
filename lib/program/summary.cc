#include "lib/program/summary.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <numeric>

#include "lib/device/error.h"
#include "lib/program/files.h"
#include "lib/program/format.h"
#include "lib/program/process.h"
#include "lib/program/tables.h"

namespace {

using nlohmann::json;
using Numbers = std::vector<double>;

constexpr size_t first_counted = 5;  // of a log, as in a sweep: before it clocks and caches settle

// JSON has no NaN: it is written as null, and a loss that is null was one.
double number_or_nan(const json& j) { return j.is_number() ? j.get<double>() : std::nan(""); }
json number_or_words(double v) { return std::isfinite(v) ? json(v) : json("NaN"); }

Numbers numbers(const json& list) {
  Numbers all;
  if (list.is_array())
    for (const json& j : list) all.push_back(number_or_nan(j));
  return all;
}

void set(const json& from, const char* key, const char* as, json* run) {
  if (from.contains(key) && from[key].is_number()) (*run)[as] = from[key];
}

// Final and best loss, and how the last tenth of the steps scatters.
void add_losses(const Numbers& losses, json* run) {
  if (losses.empty()) return;
  (*run)["final_loss"] = number_or_words(losses.back());
  Numbers finite;
  std::copy_if(losses.begin(), losses.end(), std::back_inserter(finite), [](double l) { return std::isfinite(l); });
  (*run)["best_loss"] = finite.empty() ? json("NaN") : json(*std::min_element(finite.begin(), finite.end()));
  const size_t n = tail_steps(losses.size());
  const auto from = losses.end() - long(n);
  const double mean = std::accumulate(from, losses.end(), 0.0) / double(n);
  double squares = 0;
  for (auto l = from; l != losses.end(); ++l) squares += (*l - mean) * (*l - mean);
  (*run)["tail_loss"] = number_or_words(mean), (*run)["tail_steps"] = n;
  (*run)["tail_loss_deviation"] = number_or_words(n > 1 ? std::sqrt(squares / double(n - 1)) : 0);
}

json of_row(const json& row) {
  json run = {{"name", row["row"]}, {"who", who_of(row)}};
  if (row.contains("planned")) run["planned"] = true;
  if (row.contains("hardware")) set(row["hardware"], "memory_bytes", "gpu_memory_bytes", &run);
  if (row.contains("error")) {
    run["error"] = row["error"];
    return run;
  }
  const json result = row.value("result", json::object());
  set(result, "tokens_per_sec", "median_tokens_per_sec", &run);
  set(result, "step_ms", "step_ms", &run);
  set(result, "peak_mib", "peak_mib", &run);
  add_losses(numbers(row.value("losses", json::array())), &run);
  if (!run.contains("final_loss"))
    set(result, "last_loss", "final_loss", &run), set(result, "best_loss", "best_loss", &run);
  return run;
}

// A line of peers/torch_fsdp.py as it was printed.
json of_peer_line(const json& line, const std::string& name) {
  const std::string tag = line.value("tag", "");
  json run = {{"name", tag.empty() ? name : tag}, {"who", "PyTorch"}};
  if (!line.value("ok", false)) {
    run["error"] = line.value("error", "failed");
    return run;
  }
  const json result = line.value("result", line);
  for (const auto& [key, as] : {std::pair("tokens_per_sec", "median_tokens_per_sec"),
                                {"tok_s", "median_tokens_per_sec"},
                                {"step_ms", "step_ms"},
                                {"peak_mib", "peak_mib"},
                                {"peak_alloc_mib", "peak_mib"},
                                {"loss_last", "final_loss"},
                                {"last_loss", "final_loss"}})
    set(result, key, as, &run);
  add_losses(numbers(line.value("losses", json::array())), &run);
  return run;
}

// The lines of a training log behind its header.
json of_log(const std::vector<json>& lines, const std::string& name) {
  json run = {{"name", name}, {"who", "fsdp.cu"}};
  std::vector<const json*> steps;
  Numbers losses, rate, ms;
  double peak = -1;
  for (const json& j : lines) {
    if (j.contains("memory")) peak = std::max(peak, j["memory"].value("peak_mib", -1.0));
    if (j.contains("hardware")) set(j["hardware"], "memory_bytes", "gpu_memory_bytes", &run);
    if (!j.contains("step") || !j.contains("step_ms")) continue;
    steps.push_back(&j), losses.push_back(number_or_nan(j.value("loss", json())));
    if (j.contains("peak_mib") && j["peak_mib"].is_number()) peak = std::max(peak, j["peak_mib"].get<double>());
  }
  const size_t skipped =
      steps.size() >= 8 ? first_counted - 1 : std::min<size_t>(1, steps.empty() ? 0 : steps.size() - 1);
  for (size_t i = skipped; i < steps.size(); i++) {
    if ((*steps[i]).contains("tokens_per_sec")) rate.push_back(number_or_nan((*steps[i])["tokens_per_sec"]));
    ms.push_back(number_or_nan((*steps[i])["step_ms"]));
  }
  if (steps.empty()) {
    run["error"] = "no step was logged";
    return run;
  }
  if (!rate.empty()) run["median_tokens_per_sec"] = median(rate);
  run["step_ms"] = median(ms);
  if (peak >= 0) run["peak_mib"] = peak;
  add_losses(losses, &run);
  return run;
}

bool is_log_header(const json& j) { return j.contains("command") && j.contains("config") && !j.contains("row"); }

void add_runs(const std::string& path, json* runs) {
  std::ifstream in(path);
  REQUIRE_USER(in, "%s cannot be read", path.c_str());
  const std::vector<json> lines = read_json_lines(path);
  REQUIRE_USER(!lines.empty(),
               "%s has no line of JSON: give a log of ./train --log, rows of ./bench --sweep, or lines of "
               "peers/torch_fsdp.py",
               path.c_str());
  if (is_log_header(lines[0])) {
    runs->push_back(of_log(lines, files::stem(path)));
  } else if (lines[0].contains("row")) {
    for (const json& row : merged_rounds(read_rows({path})))
      if (row.contains("row") && (row.contains("result") || row.contains("error"))) runs->push_back(of_row(row));
  } else if (std::any_of(lines.begin(), lines.end(), [](const json& j) { return j.contains("ok"); })) {
    for (const json& j : lines)
      if (j.contains("ok")) runs->push_back(of_peer_line(j, files::stem(path)));
  } else {
    throw UsageError(path + " is no training log, has no rows of a sweep and no lines of peers/torch_fsdp.py");
  }
}

std::string full_name(const json& run) { return run["name"].get<std::string>() + ", " + run["who"].get<std::string>(); }
bool is_planned(const json& run) { return run.contains("planned"); }
bool is_good(const json& run) { return !run.contains("error") && run.contains("median_tokens_per_sec"); }

// The index of the run that `over` names.
size_t find_baseline(const json& runs, const std::string& over) {
  const std::string wanted = over.empty() ? "ddp_fp32" : over;
  // Ours first, where a name alone says two.
  for (const bool ours : {true, false})
    for (size_t i = 0; i < runs.size(); i++)
      if (full_name(runs[i]) == wanted || (runs[i]["name"] == wanted && (runs[i]["who"] == "fsdp.cu") == ours)) {
        REQUIRE_USER(over.empty() || is_good(runs[i]), "--over %s: this run has no speed: %s", over.c_str(),
                     runs[i].value("error", "it was not measured").c_str());
        if (is_good(runs[i])) return i;
      }
  std::string all;
  for (const json& run : runs) all += (all.empty() ? "" : "; ") + full_name(run);
  REQUIRE_USER(over.empty(), "--over %s: choose one of: %s", over.c_str(), all.c_str());
  for (const bool planned : {false, true})
    for (size_t i = 0; i < runs.size(); i++)
      if (is_good(runs[i]) && is_planned(runs[i]) == planned) return i;
  throw UsageError("no run here has a speed: " + all);
}

// ------------------------------------------------------------------------------------------------------------- text

std::string cell(const json& run, const char* key, const char* format) {
  if (!run.contains(key)) return "-";
  return run[key].is_number() ? strf(format, run[key].get<double>()) : run[key].get<std::string>();
}
std::string whole(const json& run, const char* key) {
  return run.contains(key) ? grouped(std::llround(run[key].get<double>())) : "-";
}

const json* baseline_of(const json& summary) {
  for (const json& run : summary["runs"])
    if (full_name(run) == summary["over"]) return &run;
  return nullptr;
}

double memory_limit_mib(const json& run) {
  const double gpu = run.value("gpu_memory_bytes", 0.0) / (1 << 20);
  return gpu > 0 ? std::min(gpu, report_gpu_mib) : report_gpu_mib;
}

std::string loss_text(const json& run) {
  return cell(run, "tail_loss", "%.4f") + " ± " + cell(run, "tail_loss_deviation", "%.4f");
}
std::string with_figures(const json& run) {
  std::string text = full_name(run) + ": " + whole(run, "median_tokens_per_sec") + " tokens/s";
  if (run.contains("speed_up")) text += strf(" (x %.2f)", run["speed_up"].get<double>());
  if (run.contains("peak_mib")) text += ", " + whole(run, "peak_mib") + " MiB";
  return text + ", loss " + loss_text(run);
}

}  // namespace

json summarize(const Words& paths, const std::string& over) {
  json runs = json::array();
  REQUIRE_USER(!paths.empty(), "--summary: name a file");
  for (const std::string& path : paths) add_runs(path, &runs);
  REQUIRE_USER(!runs.empty(), "no row of %s was run", paths[0].c_str());
  const size_t at = find_baseline(runs, over);
  for (json& run : runs)
    if (is_good(run) &&
        is_planned(run) == is_planned(runs[at]))  // a plan over a measurement would be the estimate's error
      run["speed_up"] = run["median_tokens_per_sec"].get<double>() / runs[at]["median_tokens_per_sec"].get<double>();
  json summary = {{"over", full_name(runs[at])}, {"runs", runs}};
  summary["recommendation"] = recommendation(summary);
  return summary;
}

std::string summary_markdown(const json& summary) {
  const json& runs = summary["runs"];
  const bool failed = std::any_of(runs.begin(), runs.end(), [](const json& r) { return r.contains("error"); });
  std::vector<Words> rows = {
      {"run", "who", "tokens/s", "speed-up", "step ms", "final loss", "best loss", "loss at the end", "peak MiB"}};
  if (failed) rows[0].push_back("note");
  for (const json& run : runs) {
    rows.push_back({run["name"], run["who"], whole(run, "median_tokens_per_sec"), cell(run, "speed_up", "x %.2f"),
                    cell(run, "step_ms", "%.2f"), cell(run, "final_loss", "%.4f"), cell(run, "best_loss", "%.4f"),
                    run.contains("tail_loss") ? loss_text(run) : "-", whole(run, "peak_mib")});
    if (failed) rows.back().push_back(run.contains("error") ? lines_of(run.value("error", "failed")).front() : "");
    if (is_planned(run)) rows.back()[1] += ", planned";
  }
  using A = Align;
  return markdown(rows, {A::left, A::left, A::right, A::right, A::right, A::right, A::right, A::right, A::right});
}

std::string recommendation(const json& summary) {
  const json* base = baseline_of(summary);
  if (!base || !(*base).contains("tail_loss") || !(*base)["tail_loss"].is_number())
    return "No recommendation: the loss of " + summary["over"].get<std::string>() + " is not known.";
  const double noise = (*base)["tail_loss_deviation"].get<double>(), most = (*base)["tail_loss"].get<double>() + noise;
  std::vector<const json*> eligible;
  std::string excluded;
  const auto exclude = [&](const json& run, const std::string& why) {
    excluded += (excluded.empty() ? "" : "; ") + full_name(run) + " (" + why + ")";
  };
  for (const json& run : summary["runs"]) {
    if (is_planned(run)) continue;
    if (!is_good(run)) exclude(run, error_word(run.value("error", "")));
    else if (!run.contains("tail_loss")) exclude(run, "its loss is not known");
    else if (!run["tail_loss"].is_number() || run["tail_loss"].get<double>() > most)
      exclude(run, "its loss is " + loss_text(run));
    else if (run.value("peak_mib", 0.0) > memory_limit_mib(run))
      exclude(run, whole(run, "peak_mib") + " MiB are more than " + grouped(std::llround(memory_limit_mib(run))));
    else eligible.push_back(&run);
  }
  if (eligible.empty()) return "No recommendation: no run fits with a loss like the baseline's.";
  const json& fastest = **std::max_element(eligible.begin(), eligible.end(), [](const json* a, const json* b) {
    return (*a)["median_tokens_per_sec"].get<double>() < (*b)["median_tokens_per_sec"].get<double>();
  });
  std::string text = "Choose " + with_figures(fastest) + ". ";
  text += eligible.size() == 1 ? "It is the only run" : strf("It is the fastest of the %zu runs", eligible.size());
  text += strf(
      " that fit%s in memory and whose loss at the end (mean and standard deviation of the last %lld steps) is not "
      "above "
      "the baseline's by more than its scatter. ",
      eligible.size() == 1 ? "s" : "", static_cast<long long>((*base)["tail_steps"].get<int64_t>()));
  text += "The baseline is " + with_figures(*base) + ".";
  const auto leaner = [](const json* a, const json* b) {
    return (*a).value("peak_mib", 1e12) < (*b).value("peak_mib", 1e12);
  };
  const json& leanest = **std::min_element(eligible.begin(), eligible.end(), leaner);
  if (&leanest != &fastest && leanest.contains("peak_mib"))
    text += " Where memory is short: " + with_figures(leanest) + ".";
  if (!excluded.empty()) text += " Left out: " + excluded + ".";
  return text;
}

// That nothing is there, or an earlier one.
static void require_summary(const std::string& json_path) {
  files::require_replaceable(json_path);
  const std::string there = read_file(json_path);
  const json before = json::parse(there, nullptr, /*allow_exceptions=*/false);
  REQUIRE_USER(there.empty() || (before.is_object() && before.contains("recommendation")),
               "--json %s: not a summary, so it is not overwritten; choose another", json_path.c_str());
}

int print_summary(const Words& paths, const std::string& over, const std::string& json_path) {
  if (!json_path.empty()) require_summary(json_path);
  const json summary = summarize(paths, over);
  std::printf("%s\nspeed-up over %s\n%s\n", summary_markdown(summary).c_str(),
              summary["over"].get<std::string>().c_str(), summary["recommendation"].get<std::string>().c_str());
  if (!json_path.empty()) files::replace(json_path, summary.dump(2) + "\n");
  return 0;
}
