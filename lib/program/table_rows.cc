// Rows of results: read, told apart, and rounds of one run made one row.
#include <algorithm>
#include <cctype>
#include <fstream>
#include <iterator>
#include <map>
#include <regex>

#include "lib/device/error.h"
#include "lib/program/process.h"
#include "lib/program/table_parts.h"

using nlohmann::json;

std::string string_of(const json& j, const char* key) {
  return j.contains(key) && j[key].is_string() ? j[key].get<std::string>() : "";
}
bool has_number(const json& j, const char* key) { return j.is_object() && j.contains(key) && j[key].is_number(); }
bool is_planned(const json& row) { return row.contains("planned") && row["planned"] == true; }
bool is_training(const json& row) { return row.contains("row") && row["row"].is_string(); }

size_t tail_steps(size_t losses) { return std::min(losses, std::max<size_t>(5, losses / 10)); }

static json mean_of_last(const json& losses, size_t n) {
  double sum = 0;
  for (size_t i = losses.size() - n; i < losses.size(); ++i) {
    if (!losses[i].is_number()) return nullptr;
    sum += losses[i].get<double>();
  }
  return sum / double(n);
}

json figures_of(const json& row) {
  json result = row.contains("result") && row["result"].is_object() ? row["result"] : json::object();
  const json validated = row.value("val_losses", json::array());  // [step, loss]
  if (!validated.empty()) result["val_loss"] = validated.back().at(1);
  const json losses = row.value("losses", json::array());
  if (!losses.empty()) {
    result["mean_loss"] = mean_of_last(losses, losses.size());
    result["tail_loss"] = mean_of_last(losses, tail_steps(losses.size()));
  }
  if (has_number(result, "estimated_ms") && has_number(result, "step_ms") && !is_planned(row))
    result["estimate_error"] = result["estimated_ms"].get<double>() / result["step_ms"].get<double>() - 1;
  if (has_number(result, "tokens_per_sec") && row.value("ranks", 0) > 0)
    result["tokens_per_sec_gpu"] = result["tokens_per_sec"].get<double>() / row["ranks"].get<double>();
  for (const std::string kind : {"products", "attention", "memory_bound"}) {
    const std::string ms = kind + "_ms", limit = kind + "_limit_ms";
    if (has_number(result, ms.c_str()) && has_number(result, limit.c_str()) && result[limit] > 0)
      result[kind + "_of_limit"] = result[ms].get<double>() / result[limit].get<double>();
  }
  if (!is_planned(row)) return result;
  const std::pair<const char*, const char*> stand_in[] = {{"peak_mib", "planned_peak_mib"},
                                                          {"step_ms", "estimated_ms"}};
  for (const auto& [key, planned] : stand_in)
    if (!has_number(result, key) && has_number(result, planned)) result[key] = result[planned];
  return result;
}

namespace {

bool is_plain(const json& row) { return row.contains("attention") || row.contains("collective"); }

// Whether two lines are repetitions of one run, or the same.
std::string run_key(const json& row) {
  return string_of(row, "sweep") + "\n" + string_of(row, "row") + "\n" + std::to_string(row.value("ranks", 0)) + "\n" +
         string_of(row, "who") + "\n" + string_of(row, "variant");
}

json in_one(const std::map<int64_t, json>& rounds) {
  Rows good;
  std::string failed;
  for (const auto& [round, row] : rounds) {
    if (!row.contains("error")) good.push_back(row);
    else
      failed += strf("%sround %lld: %s", failed.empty() ? "" : "; ", static_cast<long long>(round),
                     error_word(string_of(row, "error")).c_str());
  }
  if (rounds.size() == 1 || good.empty()) return rounds.begin()->second;
  json row = good[0];
  if (!failed.empty()) row["note"] = string_of(row, "note") + (string_of(row, "note").empty() ? "" : "; ") + failed;
  row["rounds"] = json::array();
  std::map<std::string, std::vector<double>> figures;
  for (const json& g : good) {
    const json result = figures_of(g);
    row["rounds"].push_back(result);
    for (const auto& [key, value] : result.items())
      if (value.is_number()) figures[key].push_back(value.get<double>());
  }
  const auto ends = [](const std::string& key, const char* with) {
    return key.size() > 4 && key.compare(key.size() - 4, 4, with) == 0;
  };
  for (const auto& [key, values] : figures)
    row["result"][key] = ends(key, "_min")   ? *std::min_element(values.begin(), values.end())
                         : ends(key, "_max") ? *std::max_element(values.begin(), values.end())
                                             : median(values);
  return row;
}

bool is_text(const json& j) { return j.is_string(); }
bool is_whole(const json& j) { return j.is_number_integer(); }
bool is_object(const json& j) { return j.is_object(); }
bool is_list(const json& j) { return j.is_array(); }
bool is_list_of_labels(const json& j) {
  return j.is_array() && std::all_of(j.begin(), j.end(), [](const json& l) {
           return l.is_array() && l.size() == 2 && l[0].is_string() && l[1].is_string();
         });
}
bool is_list_of_losses(const json& j) {
  return j.is_array() && std::all_of(j.begin(), j.end(), [](const json& l) { return l.is_array() && l.size() == 2; });
}

// What is taken from a row without a look at its type.
struct Field {
  const char* pointer;
  bool (*fits)(const json&);
  const char* type;
};
const Field fields[] = {
    {"/sweep", is_text, "text"},
    {"/number", is_whole, "a whole number"},
    {"/round", is_whole, "a whole number"},
    {"/ranks", is_whole, "a whole number"},
    {"/who", is_text, "text"},
    {"/variant", is_text, "text"},
    {"/labels", is_list_of_labels, "a list of pairs of text"},
    {"/command", is_text, "text"},
    {"/commit", is_text, "text"},
    {"/date", is_text, "text"},
    {"/hardware", is_object, "an object"},
    {"/hardware/name", is_text, "text"},
    {"/theirs_on", is_text, "text"},
    {"/theirs/text", is_text, "text"},
    {"/error", is_text, "text"},
    {"/result", is_object, "an object"},
    {"/losses", is_list, "a list"},
    {"/val_losses", is_list_of_losses, "a list of pairs, step and loss"},
    {"/attention", is_object, "an object"},
    {"/attention/T", is_whole, "a whole number"},
    {"/attention/H", is_whole, "a whole number"},
};

void require_types(const json& row, const std::string& path, int64_t line) {
  for (const Field& f : fields) {
    const json::json_pointer p(f.pointer);
    if (!row.contains(p) || f.fits(row[p])) continue;
    std::string key = f.pointer + 1;
    std::replace(key.begin(), key.end(), '/', '.');
    throw UsageError(strf("%s, line %lld: \"%s\" is %.60s, not %s; make the row anew, or delete the line", path.c_str(),
                          static_cast<long long>(line), key.c_str(), row[p].dump().c_str(), f.type));
  }
}

}  // namespace

std::vector<json> merged_rounds(const std::vector<json>& rows) {
  std::vector<std::string> order;
  std::map<std::string, std::map<int64_t, json>> runs;
  Rows others;
  for (const json& row : rows) {
    if (!is_training(row)) {
      others.push_back(row);
      continue;
    }
    const std::string key = run_key(row);
    if (!runs.count(key)) order.push_back(key);
    auto& rounds = runs[key];
    const bool any_measured =
        std::any_of(rounds.begin(), rounds.end(), [](const auto& r) { return !is_planned(r.second); });
    if (is_planned(row) && any_measured) continue;
    if (!is_planned(row) && !any_measured) rounds.clear();
    rounds[row.value("round", int64_t(1))] = row;
  }
  Rows merged;
  for (const std::string& key : order) merged.push_back(in_one(runs[key]));
  merged.insert(merged.end(), others.begin(), others.end());
  return merged;
}

std::string error_word(const std::string& error) {
  std::string lower = error;
  for (char& c : lower) c = char(std::tolower(static_cast<unsigned char>(c)));
  const auto says = [&](const char* what) { return lower.find(what) != std::string::npos; };
  static const std::regex oom("(^|[^a-z])oom([^a-z]|$)");  // not "make room"
  const std::string before = error.substr(0, error.find(':'));
  if (before == "OOM" || before == "OOM bwd" || before == "OOM?" || before == "badshape") return before;
  if (says("out of memory") || says("no room in memory") || std::regex_search(lower, oom) || says("does not fit"))
    return "OOM";
  if (says("timed out")) return "timeout";
  return "failed";
}

void add_note(const std::string& text, Words* notes) {
  if (!text.empty() && std::find(notes->begin(), notes->end(), text) == notes->end()) notes->push_back(text);
}
std::string together(const Words& notes) {
  std::string all;
  for (const std::string& n : notes) all += (all.empty() ? "" : "; ") + n;
  return all;
}

std::string who_of(const json& row) {
  const std::string variant = string_of(row, "variant");
  return string_of(row, "who") + (variant.empty() ? "" : " " + variant);
}

std::vector<json> read_rows(const Words& paths) {
  Rows all;
  for (const std::string& path : paths) {
    std::ifstream in(path);
    REQUIRE_USER(in, "%s cannot be read", path.c_str());
    Rows rows;
    std::string text;
    for (int64_t line = 1; std::getline(in, text); line++) {
      if (text.empty()) continue;
      json row = json::parse(text, nullptr, /*allow_exceptions=*/false);
      REQUIRE_USER(row.is_object() && (is_training(row) || is_plain(row)),
                   "%s, line %lld: not a row of ./bench --sweep", path.c_str(), static_cast<long long>(line));
      require_types(row, path, line);
      rows.push_back(std::move(row));
    }
    REQUIRE_USER(!rows.empty(), "%s is empty", path.c_str());
    std::stable_sort(rows.begin(), rows.end(), [](const json& a, const json& b) {
      return a.value("number", int64_t(0)) < b.value("number", int64_t(0));
    });
    all.insert(all.end(), std::make_move_iterator(rows.begin()), std::make_move_iterator(rows.end()));
  }
  return all;
}
