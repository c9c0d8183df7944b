// The tables of NOTES.md, README.md and results/README.md. A new one is an entry of tables(), and a pair of markers
// where it is to stand.
#include <algorithm>
#include <set>
#include <utility>

#include <unistd.h>

#include "lib/device/error.h"
#include "lib/program/chips.h"
#include "lib/program/process.h"
#include "lib/program/table_parts.h"
#include "lib/program/tables.h"

namespace {

using nlohmann::json;
using Columns = std::vector<Column>;

constexpr Whose theirs = Whose::theirs, pytorch = Whose::pytorch, ours = Whose::ours, ratio = Whose::ratio,
                figure_of_target = Whose::figure, before = Whose::before, goal = Whose::goal, aim = Whose::aim;

Columns joined(Columns a, const Columns& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// clang-format off
const Columns figures_of_theirs = {{theirs, "peak_mib"}, {theirs, "step_ms"}};
const Columns stages_of_theirs = {{theirs, "init_mib"}, {theirs, "before_step_mib"}, {theirs, "peak_mib"}, {theirs, "step_ms"}};
const Columns pair = {{pytorch, "peak_mib"}, {pytorch, "step_ms"}, {ours, "peak_mib"}, {ours, "planned_peak_mib"}, {ours, "step_ms"}, {ours, "mfu"}, {ratio, "step_ms"}};
const Columns pair_in_short = {{pytorch, "peak_mib"}, {pytorch, "step_ms"}, {ours, "peak_mib"}, {ours, "step_ms"}, {ratio, "step_ms"}};
const Columns pair_of_stages = {{pytorch, "init_mib"}, {pytorch, "peak_mib"}, {pytorch, "step_ms"}, {ours, "init_mib"}, {ours, "before_step_mib"}, {ours, "peak_mib"}, {ours, "planned_peak_mib"}, {ours, "step_ms"}, {ratio, "step_ms"}};
const Columns of_mfu = {{theirs, "mfu_flex"}, {theirs, "mfu"}, {pytorch, "mfu_simple_pytorch", "flex"}, {pytorch, "mfu_simple_pytorch", "sdpa"}, {pytorch, "mfu", "flex"}, {pytorch, "mfu", "sdpa"}, {ours, "mfu_simple_pytorch"}, {ours, "mfu"}, {ours, "step_ms"}};
const Columns of_comm = {{pytorch, "tokens_per_sec"}, {pytorch, "peak_mib"}, {ours, "tokens_per_sec"}, {ours, "step_ms"}, {ours, "peak_mib"}, {ours, "exposed_ms"}, {ours, "nccl_share"}};
const Columns of_nsa = {{theirs, "first_step_s"}, {theirs, "gpu_utilization"}, {theirs, "tokens_per_sec"}, {theirs, "peak_mib"}, {pytorch, "first_step_s", "dense"}, {pytorch, "step_ms", "dense"}, {pytorch, "peak_mib", "dense"}, {ours, "first_step_s"}, {ours, "step_ms"}, {ours, "tokens_per_sec"}, {ours, "gpu_utilization"}, {ours, "peak_mib"}};
const Columns of_class = {{pytorch, "tokens_per_sec"}, {pytorch, "peak_mib"}, {pytorch, "last_loss"}, {ours, "tokens_per_sec"}, {ours, "peak_mib"}, {ours, "last_loss"}, {ours, "best_loss"}, {ratio, "step_ms"}};
const Columns of_precision = {{pytorch, "step_ms"}, {pytorch, "peak_mib"}, {pytorch, "last_loss"}, {ours, "step_ms"}, {ours, "peak_mib"}, {ours, "last_loss"}, {ratio, "step_ms"}};
const Columns of_graph = {{ours, "step_ms"}, {ours, "tokens_per_sec"}, {ours, "gpu_utilization"}, {ours, "peak_mib"}};
const Columns of_knobs = {{ours, "step_ms"}, {ours, "estimated_ms"}, {ours, "exposed_ms"}, {ours, "init_mib"}, {ours, "before_step_mib"}, {ours, "peak_mib"}};
const Columns of_fp8 = {{pytorch, "step_ms"}, {pytorch, "peak_mib"}, {ours, "step_ms"}, {ours, "exposed_ms"}, {ours, "before_step_mib"}, {ours, "peak_mib"}, {ratio, "step_ms"}};
const Columns of_options = {{theirs, "peak_mib"}, {theirs, "step_ms"}, {pytorch, "first_peak_mib"}, {pytorch, "second_peak_mib"}, {pytorch, "peak_mib"}, {pytorch, "step_ms"}, {ours, "first_peak_mib"}, {ours, "second_peak_mib"}, {ours, "peak_mib"}, {ours, "step_ms"}};
const Columns of_targets = {{figure_of_target, ""}, {before, ""}, {goal, ""}, {aim, ""}, {pytorch, ""}, {ours, ""}, {ratio, "step_ms"}};
const Columns of_shares = {{ours, "step_ms"}, {ours, "products_ms"}, {ours, "products_limit_ms"}, {ours, "products_of_limit"}, {ours, "attention_ms"}, {ours, "attention_limit_ms"}, {ours, "attention_of_limit"}, {ours, "memory_bound_ms"}, {ours, "memory_bound_limit_ms"}, {ours, "memory_bound_of_limit"}, {ours, "waiting_ms"}};
const Columns of_losses = {{ours, "step_ms"}, {ours, "last_loss"}, {ours, "best_loss"}};
const Columns headline = {{ours, "step_ms"}, {ours, "tokens_per_sec"}, {ours, "mfu"}, {ours, "peak_mib"}};
// clang-format on

// The tables of the sweeps: what NAME shows on 2 GPUs, as the reports had, NAME-1gpu and NAME-4gpu on others, and
// NAME-gpus how it changes with their number.
struct OfSweep {
  const char* name;
  Columns columns;
  Columns beside = {};  // of NAME-gpus; none: there is no such table
  Table::Form form = Table::companion;
};

const std::vector<OfSweep>& of_sweeps() {
  static const std::vector<OfSweep> all = {
      {"mlp-1024", joined(stages_of_theirs, pair_of_stages)},
      {"mlp-4096", joined(stages_of_theirs, pair_of_stages)},
      {"options", of_options},
      {"meta-init", joined(stages_of_theirs, pair_of_stages)},
      {"recompute", joined(figures_of_theirs, pair), joined(figures_of_theirs, pair_in_short)},
      {"seq", joined(figures_of_theirs, pair), joined(figures_of_theirs, pair_in_short)},
      {"depth", joined(figures_of_theirs, pair), joined(figures_of_theirs, pair_in_short)},
      {"width", joined(figures_of_theirs, pair), joined(figures_of_theirs, pair_in_short)},
      {"small-params", joined(figures_of_theirs, {{ours, "peak_mib"}, {ours, "step_ms", "", Column::each}})},
      {"mfu", of_mfu},
      {"comm", of_comm},
      {"nsa-fsdp", of_nsa},
      {"class", of_class},
      {"precision", of_precision},
      {"context", pair, pair_in_short},
      {"knobs", of_knobs},
      {"graph", of_graph},
      {"fp8", of_fp8},
      {"losses", of_losses},
      {"step-shares", of_shares, {}, Table::lines},
  };
  return all;
}

std::vector<Table> all_tables() {
  std::vector<Table> list;
  static std::vector<std::string> names;  // what Table::name points at
  names.reserve(4 * of_sweeps().size());
  const auto add = [&](const std::string& name, Words files, const Columns& columns, Table::Form form,
                       Layout layout = Layout::stacked) {
    names.push_back(name);
    list.push_back({names.back().c_str(), std::move(files), form, columns, layout});
  };
  for (const OfSweep& s : of_sweeps()) {
    const std::string name = s.name;
    add(name, {name + "-2gpu", name + "-planned"}, s.columns, s.form);
    add(name + "-1gpu", {name + "-1gpu"}, s.columns, s.form);
    add(name + "-4gpu", {name + "-4gpu"}, s.columns, s.form);
    if (!s.beside.empty())
      add(name + "-gpus", {name + "-1gpu", name + "-2gpu", name + "-4gpu"}, s.beside, s.form, Layout::side_by_side);
  }
  // A file has every row: what a machine's GPUs can run is measured there, the row of one GPU too, and more are
  // planned.
  const Words worlds = {"world-2gpu", "world-4gpu"}, global_batches = {"global-batch-2gpu", "global-batch-4gpu"};
  list.push_back({"world", worlds, Table::companion, joined(joined(figures_of_theirs, pair), {{ours, "exposed_ms"}})});
  list.push_back({"global-batch", global_batches, Table::companion, joined(figures_of_theirs, pair)});

  list.push_back({"nsa-loss", {"nsa-loss-1gpu"}, Table::companion, joined(of_losses, {{ours, "val_loss"}})});
  list.push_back({"fp8-loss",
                  {"fp8-loss-1gpu"},
                  Table::companion,
                  {{ours, "step_ms"}, {ours, "mean_loss"}, {ours, "tail_loss"}, {ours, "val_loss"}}});
  list.push_back(
      {"scale", {"scale-planned"}, Table::companion, {{ours, "step_ms"}, {ours, "mfu"}, {ours, "peak_mib"}}});
  list.push_back({"targets", {"targets-2gpu"}, Table::companion, of_targets});
  Table estimate = {
      "estimate", {}, Table::companion, {{ours, "step_ms"}, {ours, "estimated_ms"}, {ours, "estimate_error"}}};
  for (const char* sweep : {"world", "recompute", "seq", "depth", "width", "mlp-1024", "nsa-fsdp", "class"})
    estimate.files.push_back(std::string(sweep) + "-2gpu");
  estimate.keep = [](const json& row) {
    return row.contains("result") && !row.contains("planned") && row.value("who", "") == "fsdp.cu";
  };
  list.push_back(estimate);

  // README.md.
  Table modes = {"headline-recompute", {"recompute-2gpu"}, Table::companion, pair};
  modes.rows = {"none", "both", "block"};
  list.push_back(modes);
  Table more = {"headline-rows",
                {"world-2gpu", "depth-2gpu", "seq-2gpu", "width-2gpu", "nsa-fsdp-2gpu"},
                Table::companion,
                pair_in_short};
  more.rows = {"world:1",  "world:2",   "world:4",     "world:8",
               "depth:32", "seq:32768", "width:16384", "nsa-fsdp:ours, a graph"};
  list.push_back(more);
  Table attention = {"headline-attention", {"attention-1gpu"}, Table::plain};
  attention.keep = [](const json& row) {
    const json a = row.value("attention", json::object());
    const int64_t t = a.value("T", int64_t(0));
    return a.value("H", 0) == 32 && (t == 8192 || t == 65536 || t == 131072);
  };
  list.push_back(attention);

  // Not of training.
  list.push_back({"attention", {"attention-1gpu"}, Table::plain});
  list.push_back({"kernels", {"kernels-1gpu"}, Table::plain});
  list.push_back({"collectives", {"collectives-2gpu"}, Table::plain});
  list.push_back({"collectives-4gpu", {"collectives-4gpu"}, Table::plain});
  return list;
}

// How many letters are to be changed, added or left out.
size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); j++) row[j] = j;
  for (size_t i = 1; i <= a.size(); i++) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); j++) {
      const size_t best = std::min({row[j] + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = row[j], row[j] = best;
    }
  }
  return row[b.size()];
}

// "depth-2gpu": what makes it.
bool is_plan(const std::string& file) { return file.size() > 8 && file.substr(file.size() - 8) == "-planned"; }
std::string command_of(const std::string& file, Table::Form form) {
  const std::string sweep = file.substr(0, file.rfind('-'));
  if (is_plan(file))
    return "`./bench --sweep " + sweep +
           (sweep == "scale" ? "`" : strf(" --gpu %s --ranks %d`", planned_chip, planned_ranks));
  const bool alone = form == Table::plain && sweep != "kernels";  // PyTorch has nothing to run beside it
  return "`./bench --sweep " + sweep + (alone ? "" : " --peer") + "`";
}
std::string machine_of(const std::string& file) {
  const size_t dash = file.rfind('-');
  const std::string n = file.substr(dash + 1, file.find_first_not_of("0123456789", dash + 1) - dash - 1);
  return n.empty() ? "" : n + (n == "1" ? " GPU" : " GPUs");
}

// "PyTorch 2.11.0"; "".
std::string torch_of(const json& row) {
  for (const char* pointer : {"/versions/torch", "/result/torch"}) {
    const json::json_pointer p(pointer);
    if (row.contains(p) && row[p].is_string()) return "PyTorch " + row[p].get<std::string>();
  }
  return "";
}
std::string torchao_of(const json& row) {
  const json::json_pointer p("/versions/torchao");
  return row.contains(p) && row[p].is_string() ? "torchao " + row[p].get<std::string>() : "";
}

std::string listed(const std::set<std::string>& all, const char* between) {
  std::string text;
  for (const std::string& one : all) text += (text.empty() ? "" : between) + one;
  return text;
}

// ", commit abc1234"; ", commits abc1234, def5678 (`8`; `16`), 1a2b3c4 (PyTorch's)": that of most of our rows first,
// and with each other one those of ours that were measured at it.
std::string commits_of(const std::vector<json>& rows) {
  constexpr size_t most_names = 8;
  std::vector<std::pair<std::string, Words>> commits;  // and the names of our rows
  for (const json& row : rows) {
    if (!row.contains("commit")) continue;
    const std::string name = row.value("commit", "");
    auto at = std::find_if(commits.begin(), commits.end(), [&](const auto& c) { return c.first == name; });
    if (at == commits.end()) at = commits.insert(at, {name, {}});
    if (row.value("who", "fsdp.cu") == "fsdp.cu") add_note("`" + row.value("row", "") + "`", &at->second);
  }
  std::stable_sort(commits.begin(), commits.end(),
                   [](const auto& a, const auto& b) { return a.second.size() > b.second.size(); });
  std::string text;
  for (const auto& [name, of] : commits) {
    text += (!text.empty() ? ", " : commits.size() > 1 ? ", commits " : ", commit ") + name;
    if (name == commits[0].first) continue;
    text += of.empty()               ? " (PyTorch's)"
            : of.size() > most_names ? strf(" (%zu rows)", of.size())
                                     : " (" + together(of) + ")";
  }
  return text;
}

// "`./bench --sweep depth --peer` on 2 x NVIDIA H200, commit abc1234, 2026-11-22, PyTorch 2.11.0: [depth-2gpu](...)"
std::string provenance(const std::string& file, const std::vector<json>& rows, Table::Form form,
                       const std::string& links) {
  std::set<std::string> machines, dates, beside;
  for (const json& row : rows) {
    if (row.contains("hardware") && (is_plan(file) || !is_planned(row)))
      machines.insert(row["hardware"].value("name", "?"));
    if (row.contains("date")) dates.insert(row.value("date", "").substr(0, 10));
    for (const std::string& of : {torch_of(row), torchao_of(row)})
      if (!of.empty()) beside.insert(of);
  }
  std::string text = command_of(file, form) + (is_plan(file) ? ", planned" : " on " + machine_of(file));
  if (!machines.empty()) text += " (" + listed(machines, ", ") + ")";
  text += commits_of(rows);
  if (!dates.empty()) text += ", " + (dates.size() > 1 ? *dates.begin() + " to " + *dates.rbegin() : *dates.begin());
  if (!beside.empty()) text += ", " + listed(beside, ", ");
  return text + ": [" + file + "](" + links + file + ".jsonl)";
}

}  // namespace

std::string rows_path(const std::string& results_dir, const std::string& file) {
  return results_dir + "/" + file + ".jsonl";
}

const std::vector<Table>& tables() {
  static const std::vector<Table> all = all_tables();
  return all;
}

const Table& find_table(const std::string& name) {
  size_t least = 1000;
  Words near;
  for (const Table& t : tables()) {
    if (name == t.name) return t;
    const size_t d = distance(name, t.name);
    if (d < least) least = d, near.clear();
    if (d == least) near.push_back(t.name);
  }
  std::string sounds;
  for (const std::string& n : near) sounds += (sounds.empty() ? "" : ", ") + n;
  throw UsageError("there is no table \"" + name + "\"; did you mean " + sounds +
                   "? lib/program/table_list.cc has all of them");
}

// Leaves out rows planned for another chip than the others ran on, or, where none ran, than the tables are of.
static void drop_other_chips(std::vector<json>* rows) {
  const auto chip = [](const json& row) {
    return chip_named(row.contains("hardware") ? row["hardware"].value("name", "") : "");
  };
  const auto ran = std::find_if(rows->begin(), rows->end(), [&](const json& r) { return !is_planned(r) && chip(r); });
  const Chip* of_table = ran != rows->end() ? chip(*ran) : chip_named(planned_chip);
  const auto is_other = [&](const json& row) { return is_planned(row) && chip(row) && chip(row) != of_table; };
  rows->erase(std::remove_if(rows->begin(), rows->end(), is_other), rows->end());
}

std::string render(const Table& table, const std::string& results_dir, const std::string& links) {
  std::vector<json> rows;
  std::string made, missing;
  for (const std::string& file : table.files) {
    const std::string path = rows_path(results_dir, file);
    if (access(path.c_str(), F_OK) != 0) {
      if (is_plan(file) && table.files.size() > 1) continue;  // what is measured needs none
      missing += (missing.empty() ? "Not measured yet: " : "; ") + command_of(file, table.form) +
                 (is_plan(file) ? "" : " on " + machine_of(file));
      continue;
    }
    std::vector<json> more = read_rows({path});
    made += (made.empty() ? "" : "; ") + provenance(file, more, table.form, links);
    for (json& row : more)
      if (table.form != Table::plain || !table.keep || table.keep(row)) rows.push_back(std::move(row));
  }
  drop_other_chips(&rows);
  std::string text = table.form == Table::plain ? plain_table(rows) : training_table(rows, table);
  if (text.empty() && !made.empty()) text = "No such row was measured.\n";
  for (const std::string& line : {made, missing})
    if (!line.empty()) text += (text.empty() ? "" : "\n") + line + ".\n";
  return text;
}

std::string figure(const std::string& words, const std::string& results_dir) {
  const Words all = words_of(words);
  REQUIRE_USER(all.size() >= 4, "figure %s: give FILE ROW WHO KEY, as in `depth-2gpu 4 ours step_ms`", words.c_str());
  std::string row = all[1];
  for (size_t i = 2; i + 2 < all.size(); i++) row += " " + all[i];
  const std::string path = rows_path(results_dir, all[0]);
  if (access(path.c_str(), F_OK) != 0) return "-";
  try {
    return figure_text(read_rows({path}), row, all[all.size() - 2], all.back());
  } catch (const UsageError& e) { throw UsageError("figure " + words + ": " + e.what()); }
}
