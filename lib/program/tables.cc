#include "lib/program/tables.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "lib/device/error.h"
#include "lib/program/format.h"
#include "lib/program/plan.h"
#include "lib/program/process.h"

namespace {

using nlohmann::json;
using Rows = std::vector<json>;

std::string string_of(const json& j, const char* key) {
  return j.contains(key) && j[key].is_string() ? j[key].get<std::string>() : "";
}
bool has_number(const json& j, const char* key) { return j.is_object() && j.contains(key) && j[key].is_number(); }
bool is_planned(const json& row) { return row.contains("planned") && row["planned"] == true; }
bool is_training(const json& row) { return row.contains("row") && row["row"].is_string(); }
bool is_plain(const json& row) { return row.contains("attention") || row.contains("collective"); }

// --------------------------------------------------------------------------------------------------------- figures

std::string grouped_tenths(double v) {
  const long long tenths = std::llround(10 * v);
  return grouped(tenths / 10) + strf(".%lld", tenths % 10);
}
std::string whole(double v) { return grouped(std::llround(v)); }
// The reports give whole milliseconds: no tenths are made up for them.
std::string milliseconds(double v) {
  return v >= 10 && v == std::floor(v) ? whole(v) : v < 10 ? strf("%.2f", v) : grouped_tenths(v);
}
std::string percent(double v) { return strf("%.1f %%", 100 * v); }
std::string signed_percent(double v) { return strf("%+.1f %%", 100 * v); }
std::string tenths(double v) { return grouped_tenths(v); }
std::string hundredths(double v) { return strf("%.2f", v); }
std::string four_digits(double v) { return strf("%.4f", v); }

// What a column of training can show.
struct Figure {
  const char* key;
  const char* title;
  std::string (*text)(double);
  const char* in_words = "";  // the key under which a report has it in words
};
// clang-format off
const Figure figures[] = {
    {"init_mib",            "init MiB",                      whole},
    {"before_step_mib",     "pre-step0 MiB",                 whole},
    {"peak_mib",            "peak MiB",                      whole},
    {"planned_peak_mib",    "planned peak MiB",              whole},
    {"reserved_mib",        "reserved MiB",                  whole},
    {"first_peak_mib",      "peak MiB, step 1",              whole},
    {"second_peak_mib",     "peak MiB, step 2",              whole},
    {"step_ms",             "step ms",                       milliseconds},
    {"step_ms_spread",      "step ms, median (min-max)",     milliseconds},
    {"estimated_ms",        "estimated ms",                  milliseconds},
    {"estimate_error",      "error",                         signed_percent},
    {"tokens_per_sec",      "tokens/s",                      whole, "tokens_text"},
    {"mfu",                 "MFU",                           percent},
    {"mfu_flex",            "MFU, flex",                     percent},
    {"mfu_full",            "MFU, attention in full",        percent},
    {"mfu_simple_pytorch",  "MFU by simple_pytorch",         percent},
    {"exposed_ms",          "exposed ms, gather + reduce",   tenths},
    {"exposed_gather_ms",   "exposed gather ms",             tenths},
    {"exposed_reduce_ms",   "exposed reduce ms",             tenths},
    {"first_step_s",        "launch to first step, s",       tenths, "first_step_text"},
    {"gpu_utilization",     "GPU utilization",               percent, "utilization_text"},
    {"nccl_share",          "NCCL's share of GPU time",      percent},
    {"clock_mhz",           "clock MHz",                     whole},
    {"power_w",             "power W",                       whole},
    {"kernels",             "kernels",                       whole},
    {"last_loss",           "last loss",                     four_digits},
    {"best_loss",           "best loss",                     four_digits},
    {"val_loss",            "validation loss",               four_digits},
};
// What ends a sweep, from the left.
const char* const shown_of_training[] = {
    "init_mib", "before_step_mib", "first_peak_mib", "second_peak_mib", "peak_mib", "planned_peak_mib", "reserved_mib",
    "step_ms_spread", "estimated_ms", "tokens_per_sec", "mfu", "mfu_simple_pytorch", "exposed_ms", "first_step_s",
    "gpu_utilization", "nccl_share", "clock_mhz", "power_w", "kernels", "last_loss"};
// clang-format on

const Figure* find_figure(const std::string& key) {
  for (const Figure& f : figures)
    if (key == f.key) return &f;
  return nullptr;
}
const Figure& figure_named(const std::string& key) {
  const Figure* f = find_figure(key);
  REQUIRE_USER(f, "a table's figure \"%s\" is not known; `figures` in lib/program/tables.cc has those that are",
               key.c_str());
  return *f;
}

// "" where it is not there. result: of a row, or what a report measured.
std::string text_of(const json& result, const Figure& f) {
  const std::string key = f.key;
  if (key == "exposed_ms")
    return has_number(result, "exposed_gather_ms")
               ? tenths(result["exposed_gather_ms"].get<double>()) + " + " +
                     tenths(has_number(result, "exposed_reduce_ms") ? result["exposed_reduce_ms"].get<double>() : 0)
               : "";
  if (key == "step_ms_spread") {
    if (!has_number(result, "step_ms")) return "";
    std::string text = f.text(result["step_ms"].get<double>());
    if (has_number(result, "step_ms_min") && has_number(result, "step_ms_max"))
      text +=
          " (" + f.text(result["step_ms_min"].get<double>()) + "-" + f.text(result["step_ms_max"].get<double>()) + ")";
    return text;
  }
  if (has_number(result, f.key)) return f.text(result[f.key].get<double>());
  return *f.in_words ? string_of(result, f.in_words) : string_of(result, f.key);
}

// The libraries take some of it.
const char dagger[] = "†";
bool above_the_report(const json& result) {
  return has_number(result, "peak_mib") && result["peak_mib"].get<double>() + mib(int64_t(reserve())) > report_gpu_mib;
}
std::string footnote() {
  return strf("\n%s more than fits in the 80 GiB of the report's GPUs, of which CUDA, cuBLAS and NCCL take %s MiB.\n",
              dagger, whole(mib(int64_t(reserve()))).c_str());
}

// What a plan has for what was not measured.
json figures_of(const json& row) {
  json result = row.contains("result") && row["result"].is_object() ? row["result"] : json::object();
  const json validated = row.value("val_losses", json::array());  // [step, loss]
  if (!validated.empty()) result["val_loss"] = validated.back().at(1);
  if (has_number(result, "estimated_ms") && has_number(result, "step_ms") && !is_planned(row))
    result["estimate_error"] = result["estimated_ms"].get<double>() / result["step_ms"].get<double>() - 1;
  if (!is_planned(row)) return result;
  const std::pair<const char*, const char*> stand_in[] = {{"peak_mib", "planned_peak_mib"},
                                                          {"step_ms", "estimated_ms"}};
  for (const auto& [key, planned] : stand_in)
    if (!has_number(result, key) && has_number(result, planned)) result[key] = result[planned];
  return result;
}

// The first 120 characters or less, cut between words.
std::string clipped(const std::string& text) {
  const std::string line = lines_of(text).front();
  constexpr size_t most = 120;
  if (line.size() <= most) return line;
  const size_t at = line.rfind(' ', most);
  return line.substr(0, at == std::string::npos ? most : at) + " ...";
}

// What an error says beside its word.
std::string detail_of(const std::string& error) {
  const std::string word = error_word(error);
  if (error == word) return "";
  return clipped(error.rfind(word + ": ", 0) == 0 ? error.substr(word.size() + 2) : error);
}

// ------------------------------------------------------------------------------------------------------------ runs

// One row of a sweep on so many GPUs: our run, PyTorch's beside it.
struct Entry {
  std::string sweep, row;
  int64_t number = 0, ranks = 0;
  const json* ours = nullptr;
  std::vector<const json*> peers = {};
  const json& any() const { return ours ? *ours : *peers[0]; }
};

bool is_shown(const json& row, const Table& table) {
  if (!is_training(row)) return false;
  const std::string name = row["row"], full = string_of(row, "sweep") + ":" + name;
  const auto is_it = [&](const std::string& wanted) { return wanted == name || wanted == full; };
  if (!table.rows.empty() && std::none_of(table.rows.begin(), table.rows.end(), is_it)) return false;
  return !table.keep || table.keep(row);
}

// In the order of table.rows where it has names, else of sweeps as they come, numbers and GPUs.
std::vector<Entry> entries_of(const Rows& rows, const Table& table) {
  std::vector<Entry> entries;
  for (const json& row : rows) {
    if (!is_shown(row, table)) continue;
    const Entry e = {string_of(row, "sweep"), row["row"], row.value("number", int64_t(0)),
                     row.value("ranks", int64_t(0))};
    auto at = std::find_if(entries.begin(), entries.end(), [&](const Entry& other) {
      return other.sweep == e.sweep && other.row == e.row && other.ranks == e.ranks;
    });
    if (at == entries.end()) at = entries.insert(entries.end(), e);
    if (string_of(row, "who") == "PyTorch") at->peers.push_back(&row);
    else at->ours = &row;
  }
  Words order;
  for (const Entry& e : entries) order.push_back(e.sweep);
  const auto place = [&](const Entry& e) {
    if (table.rows.empty()) return std::find(order.begin(), order.end(), e.sweep) - order.begin();
    const auto is_it = [&](const std::string& name) { return name == e.row || name == e.sweep + ":" + e.row; };
    return std::find_if(table.rows.begin(), table.rows.end(), is_it) - table.rows.begin();
  };
  std::stable_sort(entries.begin(), entries.end(), [&](const Entry& a, const Entry& b) {
    return std::make_tuple(place(a), a.number, a.ranks) < std::make_tuple(place(b), b.number, b.ranks);
  });
  return entries;
}

using Labels = std::vector<std::pair<std::string, std::string>>;
Labels labels_of(const Entry& e) {
  Labels labels;
  const json& row = e.any();
  if (row.contains("labels") && row["labels"].is_array())
    for (const json& l : row["labels"])
      if (l.is_array() && l.size() == 2 && l[0].is_string() && l[1].is_string()) labels.emplace_back(l[0], l[1]);
  if (labels.empty()) labels.emplace_back(e.sweep.empty() ? "row" : e.sweep, e.row);
  return labels;
}

// Whether a label's cell says what it is without the label's name: words, and not a lone value.
bool speaks_for_itself(const std::string& value) {
  return value.find(' ') != std::string::npos || value.rfind('`', 0) == 0;
}

// The cells that name each entry, below their header. GPUs are told where they differ and no label does.
std::vector<Words> names_of(const std::vector<Entry>& entries, Layout layout) {
  const Labels first = labels_of(entries[0]);
  bool alike = true, ranks_differ = false, ranks_told = false;
  for (const Entry& e : entries) {
    const Labels l = labels_of(e);
    alike &= l.size() == first.size() && std::equal(l.begin(), l.end(), first.begin(),
                                                    [](const auto& a, const auto& b) { return a.first == b.first; });
    ranks_differ |= e.ranks != entries[0].ranks;
    for (const auto& name : l) ranks_told |= name.first == "GPUs";
  }
  const bool tell_ranks = ranks_differ && !(ranks_told && alike) && layout == Layout::stacked;
  std::vector<Words> cells(1);
  if (alike)
    for (const auto& l : first) cells[0].push_back(l.first);
  else cells[0] = {"row"};
  if (tell_ranks) cells[0].push_back("GPUs");
  for (const Entry& e : entries) {
    Words line;
    std::string all;
    for (const auto& [name, value] : labels_of(e)) {
      if (alike) line.push_back(value);
      if (!alike && (value.empty() || value == "-")) continue;
      all += (all.empty() ? "" : ", ") + (speaks_for_itself(value) ? value : name + " " + value);
    }
    if (!alike) line = {all};
    if (tell_ranks) line.push_back(std::to_string(e.ranks));
    cells.push_back(line);
  }
  return cells;
}

// -------------------------------------------------------------------------------------------------- companion tables

double step_ms(const json& row) {
  const json result = figures_of(row);
  return has_number(result, "step_ms") ? result["step_ms"].get<double>() : INFINITY;
}

// PyTorch's run that a column shows; null: none.
const json* peer_of(const Entry& e, const std::string& variant) {
  const json* best = nullptr;
  for (const json* p : e.peers) {
    if (string_of(*p, "variant") == variant) return p;
    if (variant.empty() && (!best || step_ms(*p) < step_ms(*best))) best = p;
  }
  return best;
}

std::string run_cell(const json* row, const Column& c, const Figure& f, bool first, bool* any_dagger) {
  if (!row) return "-";
  if (row->contains("error"))
    return first ? error_word((*row)["error"].is_string() ? string_of(*row, "error") : "") : "-";
  const json result = figures_of(*row);
  std::string text = text_of(result, f);
  if (c.rounds == Column::each && row->contains("rounds")) {
    text.clear();
    for (const json& r : (*row)["rounds"]) text += (text.empty() ? "" : " / ") + text_of(r, f);
  }
  if (text.empty()) return "-";
  if (is_planned(*row)) text = "*" + text + "*";
  if (std::string(f.key) == "peak_mib" && above_the_report(result))
    text += std::string(" ") + dagger, *any_dagger = true;
  const std::string variant = string_of(*row, "variant");
  if (first && *c.variant == 0 && !variant.empty()) text += " (" + variant + ")";
  return text;
}

std::string ratio_cell(const json* ours, const json* peer, const char* key) {
  for (const json* row : {ours, peer})
    if (!row || row->contains("error") || is_planned(*row) || !has_number(figures_of(*row), key)) return "-";
  const double denominator = figures_of(*peer)[key].get<double>();
  return denominator > 0 ? hundredths(figures_of(*ours)[key].get<double>() / denominator) : "-";
}

std::string theirs_cell(const Entry& e, const Figure& f, bool first) {
  if (!e.ours || !e.ours->contains("theirs") || !(*e.ours)["theirs"].is_object()) return "-";
  const json& theirs = (*e.ours)["theirs"];
  std::string text = text_of(theirs, f);
  if (text.empty() && first) text = string_of(theirs, "text");
  return text.empty() ? "-" : text;
}

std::string cell(const Entry& e, const Column& c, bool first, bool* any_dagger) {
  const Figure& f = figure_named(c.key);
  switch (c.whose) {
    case Whose::theirs:
      return theirs_cell(e, f, first);
    case Whose::pytorch:
      return run_cell(peer_of(e, c.variant), c, f, first, any_dagger);
    case Whose::ours:
      return run_cell(e.ours, c, f, first, any_dagger);
    case Whose::ratio:
      return ratio_cell(e.ours, peer_of(e, c.variant), c.key);
  }
  return "-";
}

// The report's machine; of several the part that they share behind the number of GPUs; "" where there is none.
std::string machine_of(const std::vector<Entry>& entries) {
  std::set<std::string> all, without_count;
  for (const Entry& e : entries) {
    const std::string m = e.ours ? string_of(*e.ours, "theirs_on") : "";
    if (m.empty()) continue;
    all.insert(m);
    const size_t digits = m.find_first_not_of("0123456789");
    without_count.insert(digits != std::string::npos && m.compare(digits, 3, " x ") == 0 ? m.substr(digits + 3) : m);
  }
  return all.size() == 1 ? *all.begin() : without_count.size() == 1 ? *without_count.begin() : "";
}

std::string title(const Column& c, const std::string& machine, const std::string& gpus) {
  const std::string what = figure_named(c.key).title, variant = *c.variant ? std::string(" ") + c.variant : "";
  switch (c.whose) {
    case Whose::theirs:
      return "theirs" + (machine.empty() ? "" : ", " + machine) + ": " + what;
    case Whose::pytorch:
      return "PyTorch" + variant + gpus + ": " + what;
    case Whose::ours:
      return "ours" + gpus + ": " + what;
    case Whose::ratio:
      return "ours / PyTorch" + variant + gpus + ": " + what;
  }
  return what;
}

void add_note(const std::string& text, Words* notes) {
  if (!text.empty() && std::find(notes->begin(), notes->end(), text) == notes->end()) notes->push_back(text);
}
std::string together(const Words& notes) {
  std::string all;
  for (const std::string& n : notes) all += (all.empty() ? "" : "; ") + n;
  return all;
}

// What a run's line has beside its figures.
Words notes_of(const json& row) {
  Words notes;
  if (is_planned(row)) add_note("*planned*", &notes);
  add_note(string_of(row, "note"), &notes);
  if (row.contains("error")) add_note(detail_of(string_of(row, "error")), &notes);
  return notes;
}

// Why PyTorch has no line beside ours; "" where nobody said.
std::string no_peer_of(const json& row) {
  const std::string why = string_of(row, "no_peer");
  return why.empty() || why.rfind("PyTorch", 0) == 0 ? why : "PyTorch: " + why;
}

void add_notes(const Entry& e, bool with_pytorch, Words* notes) {
  if (e.ours)
    for (const std::string& n : notes_of(*e.ours)) add_note(n, notes);
  if (!with_pytorch) return;
  if (e.ours && e.peers.empty()) add_note(no_peer_of(*e.ours), notes);
  for (const json* p : e.peers) {
    const std::string said = together(notes_of(*p));
    if (!said.empty()) add_note(who_of(*p) + ": " + said, notes);
  }
}

// A column of the table as it stands: the Column, and for which of a line's entries.
struct Placed {
  Column column;
  int64_t ranks;  // 0: the only one
  bool first;     // of its run's columns: where an error's word goes
};

std::vector<Placed> placed(const Table& table, const std::vector<Entry>& entries) {
  std::set<int64_t> all_ranks;
  for (const Entry& e : entries) all_ranks.insert(e.ranks);
  const bool beside = table.layout == Layout::side_by_side && all_ranks.size() > 1;
  std::vector<Placed> columns;
  const auto add = [&](const Column& c, int64_t ranks) {
    const bool first = std::none_of(columns.begin(), columns.end(), [&](const Placed& p) {
      return p.column.whose == c.whose && p.ranks == ranks && std::string(p.column.variant) == c.variant;
    });
    columns.push_back({c, ranks, first});
  };
  for (const Column& c : table.columns)
    if (!beside || c.whose == Whose::theirs) add(c, 0);
  if (beside)
    for (int64_t ranks : all_ranks)
      for (const Column& c : table.columns)
        if (c.whose != Whose::theirs) add(c, ranks);
  return columns;
}

std::string finished(std::vector<Words> lines, size_t labels, bool notes, bool any_dagger) {
  const size_t columns = lines[0].size();
  std::vector<Align> align(labels, Align::by_content);
  align.resize(columns - (notes ? 1 : 0), Align::right);
  if (notes) align.push_back(Align::left);
  return markdown(std::move(lines), align) + (any_dagger ? footnote() : "");
}

std::string companion_table(const std::vector<Entry>& entries, const Table& table) {
  const bool beside = table.layout == Layout::side_by_side;
  std::vector<std::vector<Entry>> lines;  // the entries of each
  for (const Entry& e : entries) {
    const auto same = [&](const std::vector<Entry>& l) { return l[0].sweep == e.sweep && l[0].row == e.row; };
    const auto at = beside ? std::find_if(lines.begin(), lines.end(), same) : lines.end();
    if (at != lines.end()) at->push_back(e);
    else lines.push_back({e});
  }
  std::vector<Entry> firsts;
  for (const auto& line : lines) firsts.push_back(line[0]);
  const std::vector<Placed> columns = placed(table, entries);
  std::vector<Words> cells = names_of(firsts, table.layout);
  const size_t labels = cells[0].size();
  const std::string machine = machine_of(entries);
  bool machine_told = false, any_dagger = false, any_note = false, with_pytorch = false;
  for (const Placed& p : columns) {
    const bool tell = p.column.whose == Whose::theirs && !machine_told;
    cells[0].push_back(
        title(p.column, tell ? machine : "",
              p.ranks == 0 ? "" : strf(", %lld GPU%s", static_cast<long long>(p.ranks), p.ranks > 1 ? "s" : "")));
    machine_told |= tell, with_pytorch |= p.column.whose == Whose::pytorch;
  }
  for (size_t i = 0; i < lines.size(); i++) {
    for (const Placed& p : columns) {
      const auto has_it = [&](const Entry& e) {
        return p.column.whose == Whose::theirs ? e.ours && e.ours->contains("theirs") : !p.ranks || e.ranks == p.ranks;
      };
      const auto e = std::find_if(lines[i].begin(), lines[i].end(), has_it);
      cells[i + 1].push_back(e == lines[i].end() ? "-" : cell(*e, p.column, p.first, &any_dagger));
    }
    Words notes;
    for (const Entry& e : lines[i]) add_notes(e, with_pytorch, &notes);
    cells[i + 1].push_back(together(notes));
    any_note |= !notes.empty();
  }
  if (any_note) cells[0].push_back("note");
  else
    for (size_t i = 1; i < cells.size(); i++) cells[i].pop_back();
  return finished(std::move(cells), labels, any_note, any_dagger);
}

// ------------------------------------------------------------------------------------------- a line a row and who

// What a report measured, as if it were a run.
json run_of_theirs(const json& ours) {
  const json& theirs = ours["theirs"];
  json row = {{"row", ours["row"]}, {"result", theirs}};
  const std::string on = string_of(ours, "theirs_on");
  row["who"] = "theirs" + (on.empty() ? "" : ", " + on);
  if (theirs.contains("text")) row["error"] = theirs["text"];
  return row;
}

std::string lines_table(const std::vector<Entry>& entries, const Table& table) {
  struct Line {
    size_t entry;
    json run;
  };
  std::vector<Line> lines;
  bool several = false;
  for (size_t i = 0; i < entries.size(); i++) {
    const Entry& e = entries[i];
    const bool theirs =
        table.theirs == Table::with_theirs && e.ours && e.ours->contains("theirs") && (*e.ours)["theirs"].is_object();
    if (theirs) lines.push_back({i, run_of_theirs(*e.ours)});
    for (const json* p : e.peers) lines.push_back({i, *p});
    if (e.ours) lines.push_back({i, *e.ours});
    several |= theirs || !e.peers.empty();
  }
  std::vector<Figure> shown;
  const auto any_has = [&](const Figure& f) {
    return std::any_of(lines.begin(), lines.end(), [&](const Line& l) {
      return !l.run.contains("error") && !text_of(figures_of(l.run), f).empty();
    });
  };
  if (table.columns.empty()) {
    for (const char* key : shown_of_training)
      if (any_has(figure_named(key))) shown.push_back(figure_named(key));
  } else {
    for (const Column& c : table.columns) shown.push_back(figure_named(c.key));
  }
  const std::vector<Words> names = names_of(entries, Layout::stacked);
  std::vector<Words> cells = {names[0]};
  if (several) cells[0].push_back("who");
  const size_t labels = cells[0].size();
  for (const Figure& f : shown) cells[0].push_back(f.title);
  bool any_dagger = false, any_note = false;
  for (const Line& l : lines) {
    Words line = names[l.entry + 1];
    if (several) line.push_back(who_of(l.run));
    for (size_t i = 0; i < shown.size(); i++)
      line.push_back(run_cell(&l.run, {Whose::ours, shown[i].key, "-"}, shown[i], i == 0, &any_dagger));
    Words notes = notes_of(l.run);
    if (string_of(l.run, "who") == "fsdp.cu" && entries[l.entry].peers.empty()) add_note(no_peer_of(l.run), &notes);
    line.push_back(together(notes));
    any_note |= !notes.empty();
    cells.push_back(line);
  }
  if (any_note) cells[0].push_back("note");
  else
    for (size_t i = 1; i < cells.size(); i++) cells[i].pop_back();
  return finished(std::move(cells), labels, any_note, any_dagger);
}

// ----------------------------------------------------------------------------------------- rows that are not training

std::string at(const json& row, const char* pointer, std::string (*text)(double)) {
  const json::json_pointer p(pointer);
  if (!row.contains(p)) return "-";
  const json& v = row[p];
  return v.is_number() ? text(v.get<double>()) : v.is_string() ? v.get<std::string>() : "-";
}
std::string heads(const json& row) { return at(row, "/attention/H", whole) + "/" + at(row, "/attention/HKV", whole); }
std::string shape(const json& row) {
  std::string s = "B " + at(row, "/attention/B", whole) + ", T " + at(row, "/attention/T", whole) + ", " + heads(row) +
                  " heads, D " + at(row, "/attention/D", whole);
  if (row.contains("/attention/window"_json_pointer)) s += ", window " + at(row, "/attention/window", whole);
  if (row.contains("/attention/compressed"_json_pointer))
    s += ", keys compressed " + at(row, "/attention/compressed/block", whole) + "/" +
         at(row, "/attention/compressed/stride", whole);
  return s;
}
std::string three_digits(double v) { return v < 1 ? strf("%.3f", v) : v < 100 ? strf("%.2f", v) : grouped_tenths(v); }
bool is_layer(const json& row) {
  const std::string kernel = string_of(row, "kernel");
  return row.contains("attention") && (kernel == "nsa" || kernel == "dense");
}

// One column: a name of the row, or a figure.
struct PlainColumn {
  const char* title;
  std::string (*text)(const json& row);
  Align align = Align::right;
};
struct PlainForm {
  bool (*is)(const json& row);
  std::vector<PlainColumn> names, shown;
  const char* beside = "";  // rows that differ in this key alone share a line; its values head their columns
};

const std::vector<PlainForm>& plain_forms() {
  // clang-format off
  static const std::vector<PlainForm> forms = {
      {is_layer,  // --sweep attention
       {{"tokens", [](const json& r) { return at(r, "/attention/T", whole); }},
        {"heads",  heads}},
       {{"forward ms",            [](const json& r) { return at(r, "/result/forward_ms", three_digits); }},
        {"forward + backward ms", [](const json& r) { return at(r, "/result/forward_backward_ms", three_digits); }},
        {"planned MiB",           [](const json& r) { return at(r, "/result/planned_peak_mib", whole); }}},
       "kernel"},
      {[](const json& r) { return r.contains("attention") && !is_layer(r); },  // --sweep kernels
       {{"shape",  shape, Align::left},
        {"kernel", [](const json& r) { return at(r, "/kernel", whole); }, Align::left}},
       {{"forward ms",                 [](const json& r) { return at(r, "/result/forward_ms", three_digits); }},
        {"TFLOP/s",                    [](const json& r) { return at(r, "/result/forward_tflops", whole); }},
        {"forward + backward ms",      [](const json& r) { return at(r, "/result/forward_backward_ms", three_digits); }},
        {"TFLOP/s",                    [](const json& r) { return at(r, "/result/forward_backward_tflops", whole); }}}},
      {[](const json& r) { return r.contains("collective"); },  // --sweep collectives
       {{"collective", [](const json& r) { return at(r, "/collective", whole); }, Align::left},
        {"by",         [](const json& r) { return at(r, "/by", whole); }, Align::left},
        {"GPUs",       [](const json& r) { return at(r, "/ranks", whole); }},
        {"MiB",        [](const json& r) { return at(r, "/mib", whole); }}},
       {{"ms",                    [](const json& r) { return at(r, "/result/ms", three_digits); }},
        {"GB/s sent",             [](const json& r) { return at(r, "/result/sent_gb_s", whole); }},
        {"of the link",           [](const json& r) { return at(r, "/result/of_link", hundredths); }},
        {"estimated ms",          [](const json& r) { return at(r, "/result/estimated_ms", three_digits); }},
        {"ms beside products",    [](const json& r) { return at(r, "/result/beside_product_ms", three_digits); }},
        {"a product beside it", [](const json& r) {
           const json result = r.value("result", json::object());
           if (!has_number(result, "product_ms") || !has_number(result, "product_beside_ms")) return std::string("-");
           return strf("x %.2f", result["product_beside_ms"].get<double>() / result["product_ms"].get<double>());
         }}}},
  };
  // clang-format on
  return forms;
}

std::string plain_table_of(const Rows& rows, const PlainForm& form) {
  Words values;                                                             // of form.beside, as they come
  std::vector<std::pair<Words, std::map<std::string, const json*>>> lines;  // names, and a row for each value
  for (const json& row : rows) {
    if (!form.is(row)) continue;
    Words names;
    for (const PlainColumn& c : form.names) names.push_back(c.text(row));
    const std::string value = *form.beside ? string_of(row, form.beside) : "";
    if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
    auto line =
        std::find_if(lines.begin(), lines.end(), [&](const auto& l) { return *form.beside && l.first == names; });
    if (line == lines.end()) line = lines.insert(lines.end(), {names, {}});
    line->second[value] = &row;  // measured again: the later one
  }
  if (lines.empty()) return "";
  std::vector<Words> cells(1);
  std::vector<Align> align;
  for (const PlainColumn& c : form.names) cells[0].push_back(c.title), align.push_back(c.align);
  for (const std::string& v : values)
    for (const PlainColumn& c : form.shown)
      cells[0].push_back((v.empty() ? "" : (v == "nsa" ? "NSA" : v) + ": ") + c.title), align.push_back(c.align);
  for (const auto& [names, by_value] : lines) {
    Words line = names;
    for (const std::string& v : values)
      for (const PlainColumn& c : form.shown) {
        const auto found = by_value.find(v);
        line.push_back(found == by_value.end() ? "-" : c.text(*found->second));
      }
    cells.push_back(line);
  }
  return markdown(cells, align);
}

// ---------------------------------------------------------------------------------------------------------- rounds

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
  const std::string before = error.substr(0, error.find(':'));
  if (before == "OOM" || before == "OOM bwd" || before == "OOM?" || before == "badshape") return before;
  if (says("out of memory") || says("oom") || says("does not fit")) return "OOM";
  if (says("timed out")) return "timeout";
  return "failed";
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

std::string training_table(const std::vector<json>& rows, const Table& table) {
  const Rows merged = merged_rounds(rows);
  const std::vector<Entry> entries = entries_of(merged, table);
  if (entries.empty()) return "";
  return table.form == Table::companion ? companion_table(entries, table) : lines_table(entries, table);
}

std::string plain_table(const std::vector<json>& rows) {
  std::string text;
  for (const PlainForm& form : plain_forms()) {
    const std::string one = plain_table_of(rows, form);
    text += (text.empty() || one.empty() ? "" : "\n") + one;
  }
  return text;
}

std::string sweep_table(const std::vector<json>& rows) {
  Table all = {"", {}, Table::lines};
  const std::string training = training_table(rows, all), plain = plain_table(rows);
  return training + (training.empty() || plain.empty() ? "" : "\n") + plain;
}

std::string figure_text(const std::vector<json>& rows, const std::string& row, const std::string& who,
                        const std::string& key) {
  const Rows merged = merged_rounds(rows);
  Table table = {"", {}};
  table.rows = {row};
  const std::vector<Entry> entries = entries_of(merged, table);
  REQUIRE_USER(!entries.empty(), "there is no row \"%s\"", row.c_str());
  // Of several numbers of GPUs the one that was measured.
  const auto measured = [](const Entry& e) { return e.ours && !is_planned(*e.ours); };
  auto e = std::find_if(entries.begin(), entries.end(), measured);
  if (e == entries.end()) e = entries.begin();
  Column c = {Whose::ours, key.c_str()};
  if (who == "theirs") c.whose = Whose::theirs;
  else if (who == "ratio") c.whose = Whose::ratio;
  else if (who != "ours") {
    REQUIRE_USER(who.rfind("PyTorch", 0) == 0, "\"%s\": choose ours, PyTorch, PyTorch-VARIANT, theirs or ratio",
                 who.c_str());
    c.whose = Whose::pytorch;
    if (who.size() > 8) c.variant = who.c_str() + 8;
  }
  bool any_dagger = false;
  const std::string text = cell(*e, c, /*first=*/true, &any_dagger);
  // A sentence says itself what was run, and has no footnote.
  const json* peer = peer_of(*e, c.variant);
  const std::string variant = peer ? string_of(*peer, "variant") : "";
  return text.substr(0, std::min(text.find(std::string(" ") + dagger), text.find(" (" + variant + ")")));
}
