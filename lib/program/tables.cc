// Tables of training: theirs, PyTorch's and ours.
#include "lib/program/tables.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "lib/device/error.h"
#include "lib/program/format.h"
#include "lib/program/process.h"
#include "lib/program/table_parts.h"

namespace {

using nlohmann::json;

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

bool on_other_days(const json& a, const json& b) {
  return string_of(a, "date").substr(0, 10) != string_of(b, "date").substr(0, 10);
}

std::string theirs_cell(const Entry& e, const Figure& f, bool first) {
  if (!e.ours || !e.ours->contains("theirs") || !(*e.ours)["theirs"].is_object()) return "-";
  const json& theirs = (*e.ours)["theirs"];
  std::string text = text_of(theirs, f);
  if (text.empty() && first) text = string_of(theirs, "text");
  return text.empty() ? "-" : text;
}

const json& target_of(const Entry& e) {
  static const json none = json::object();
  return e.ours && e.ours->contains("target") ? (*e.ours)["target"] : none;
}

std::string target_cell(const json& target, const char* key, const Figure& f) {
  return has_number(target, key) ? f.text(target[key].get<double>()) : "-";
}

std::string cell(const Entry& e, const Column& c, bool first, bool* any_dagger) {
  const json& target = target_of(e);
  const std::string key = *c.key ? c.key : string_of(target, "figure");
  if (key.empty()) return "-";
  const Figure& f = figure_named(key);
  switch (c.whose) {
    case Whose::theirs:
      return theirs_cell(e, f, first);
    case Whose::pytorch:
      return run_cell(peer_of(e, c.variant), c, f, first, any_dagger);
    case Whose::ours:
      return run_cell(e.ours, c, f, first, any_dagger);
    case Whose::ratio:
      return ratio_cell(e.ours, peer_of(e, c.variant), f.key);
    case Whose::figure:
      return f.title;
    case Whose::before:
      return target_cell(target, "before", f);
    case Whose::goal:
      return target_cell(target, "goal", f);
    case Whose::aim:
      return target_cell(target, "aim", f);
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
  const std::string what = *c.key ? std::string(": ") + figure_named(c.key).title : "",
                    variant = *c.variant ? std::string(" ") + c.variant : "";
  switch (c.whose) {
    case Whose::theirs:
      return "theirs" + (machine.empty() ? "" : ", " + machine) + what;
    case Whose::pytorch:
      return "PyTorch" + variant + gpus + what;
    case Whose::ours:
      return "ours" + gpus + what;
    case Whose::ratio:
      return "ours / PyTorch" + variant + gpus + what;
    case Whose::figure:
      return "figure";
    case Whose::before:
      return "before";
    case Whose::goal:
      return "goal";
    case Whose::aim:
      return "aim";
  }
  return "";
}

// What a run's line has beside its figures.
Words notes_of(const json& row) {
  Words notes;
  if (is_planned(row) && row.contains("result")) add_note("*planned*", &notes);
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
  Words other_days;  // a chip is not the same on each
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
      if (p.column.whose == Whose::ratio && cells[i + 1].back() != "-" &&
          on_other_days(*e->ours, *peer_of(*e, p.column.variant)))
        add_note("`" + e->row + "`", &other_days);
    }
    Words notes;
    for (const Entry& e : lines[i]) add_notes(e, with_pytorch, &notes);
    cells[i + 1].push_back(together(notes));
    any_note |= !notes.empty();
  }
  if (any_note) cells[0].push_back("note");
  else
    for (size_t i = 1; i < cells.size(); i++) cells[i].pop_back();
  return finished(std::move(cells), labels, any_note, any_dagger) +
         (other_days.empty() ? "" : "\nOurs and PyTorch's ran on different days in: " + together(other_days) + ".\n");
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
    for (const char* key : figures_of_training())
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

}  // namespace

std::string training_table(const std::vector<json>& rows, const Table& table) {
  const Rows merged = merged_rounds(rows);
  const std::vector<Entry> entries = entries_of(merged, table);
  if (entries.empty()) return "";
  return table.form == Table::companion ? companion_table(entries, table) : lines_table(entries, table);
}

std::string sweep_table(const std::vector<json>& rows) {
  const Table all = {"", {}, Table::lines};
  const bool targets = std::any_of(rows.begin(), rows.end(), [](const json& row) { return row.contains("target"); });
  const std::string training = training_table(rows, targets ? find_table("targets") : all), plain = plain_table(rows);
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
