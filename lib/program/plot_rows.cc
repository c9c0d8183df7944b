// Pictures of results: loss curves, bars, lines over what a sweep varies.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <optional>
#include <set>

#include "lib/device/error.h"
#include "lib/program/files.h"
#include "lib/program/plot_parts.h"
#include "lib/program/process.h"
#include "lib/program/tables.h"

namespace {

using nlohmann::json;

struct KeyTitle {
  const char *key, *title;
};
const KeyTitle key_titles[] = {{"step_ms", "ms a step"},
                               {"peak_mib", "peak MiB"},
                               {"tokens_per_sec", "tokens/s"},
                               {"mfu", "MFU"},
                               {"first_step_s", "launch to first step, s"},
                               {"init_mib", "MiB at init"},
                               {"nccl_share", "NCCL's share of GPU time"}};
std::string title_of_key(const std::string& key) {
  for (const KeyTitle& k : key_titles)
    if (key == k.key) return k.title;
  return key;
}
std::string key_of(const PlotRequest& r) { return r.key.empty() ? "step_ms" : r.key; }

std::vector<json> rows_of(const PlotRequest& r) {
  std::vector<json> rows;
  for (json& row : merged_rounds(read_rows(r.files)))
    if (row.contains("row") && (r.rows.empty() || std::find(r.rows.begin(), r.rows.end(), row["row"]) != r.rows.end()))
      rows.push_back(std::move(row));
  REQUIRE_USER(!rows.empty(), "%s has no rows of training to plot", r.files[0].c_str());
  return rows;
}

// The value of a row's first label, where that is a number.
std::optional<double> first_label(const json& row) {
  if (!row.contains("labels") || !row["labels"].is_array() || row["labels"].empty()) return {};
  const json& l = row["labels"][0];
  if (!l.is_array() || l.size() != 2 || !l[1].is_string()) return {};
  const std::string text = l[1];
  char* rest = nullptr;
  const double v = std::strtod(text.c_str(), &rest);
  return text.empty() || *rest ? std::nullopt : std::optional<double>(v);
}
std::string name_of_first_label(const json& row) { return row["labels"][0][0]; }

std::optional<double> value_of(const json& figures, const std::string& key) {
  if (!figures.is_object() || !figures.contains(key) || !figures[key].is_number()) return {};
  return figures[key].get<double>();
}

struct Point {
  double x;
  std::string row;
  std::optional<double> y;
  std::string word;  // why there is no y
  bool planned = false;
};
struct Series {
  std::string title, colour;
  std::vector<Point> points;
};

// Theirs, PyTorch's and ours, each for as many numbers of GPUs as there are; PyTorch's and ours also for what the other
// labels than the first say, where `by_label`.
std::vector<Series> series_of(const std::vector<json>& rows, const std::string& key, bool by_label) {
  std::set<int64_t> all_ranks;
  bool ranks_vary_by_row = false;
  std::map<std::string, std::set<int64_t>> ranks_of;
  for (const json& row : rows)
    all_ranks.insert(row.value("ranks", 0)), ranks_of[row["row"]].insert(row.value("ranks", 0));
  for (const auto& [name, ranks] : ranks_of) ranks_vary_by_row |= ranks.size() > 1;
  std::vector<Series> all;
  const auto add = [&](const std::string& title, const char* colour, const json& row, std::optional<double> y,
                       const std::string& word) {
    auto s = std::find_if(all.begin(), all.end(), [&](const Series& o) { return o.title == title; });
    if (s == all.end()) s = all.insert(all.end(), {title, colour, {}});
    const bool planned = row.contains("planned") && std::string(colour) != colour_theirs;
    s->points.push_back({first_label(row).value_or(0), row["row"], y, word, planned});
  };
  for (const json& row : rows) {
    if (!row.contains("theirs") || !row["theirs"].is_object()) continue;
    const std::string on = row.value("theirs_on", ""), word = row["theirs"].value("text", "");
    const auto y = value_of(row["theirs"], key);
    if (y || !word.empty()) add(on.empty() ? "theirs" : "theirs, " + on, colour_theirs, row, y, word);
  }
  for (const bool pytorch : {true, false})
    for (const json& row : rows) {
      if ((row.value("who", "") == "PyTorch") != pytorch) continue;
      const auto y = row.contains("result") ? value_of(row["result"], key) : std::nullopt;
      const std::string word =
          row.contains("error") ? error_word(row["error"].is_string() ? row["error"] : json("")) : "";
      if (!y && word.empty()) continue;
      std::string title = who_of(row);
      if (by_label)
        for (size_t i = 1; i < row["labels"].size(); i++) title += ", " + row["labels"][i][1].get<std::string>();
      if (ranks_vary_by_row)
        title += ", " + std::to_string(row.value("ranks", 0)) + (row.value("ranks", 0) == 1 ? " GPU" : " GPUs");
      add(title, pytorch ? colour_pytorch : colour_ours, row, y, word);
    }
  const char* const of_pytorch[] = {colour_pytorch, "#D55E00", "#F0E442"};
  const char* const of_ours[] = {colour_ours, "#56B4E9", "#009E73", "#CC79A7"};
  size_t pytorchs = 0, ours = 0;
  for (Series& s : all) {
    if (s.colour == colour_pytorch) s.colour = of_pytorch[pytorchs++ % 3];
    else if (s.colour == colour_ours) s.colour = of_ours[ours++ % 4];
  }
  return all;
}

void require_any(const std::vector<Series>& all, const PlotRequest& r) {
  for (const Series& s : all)
    for (const Point& p : s.points)
      if (p.y) return;
  throw UsageError(r.files[0] + ": no row has " + key_of(r));
}

std::string title_of(const PlotRequest& r, const std::vector<json>& rows) {
  return r.title.empty() ? rows[0].value("sweep", files::stem(r.files[0])) + ": " + title_of_key(key_of(r)) : r.title;
}

// ------------------------------------------------------------------------------------------------------------- loss

struct Curve {
  std::string title;
  std::string data;  // "step loss" a line
  std::string validation = {};
  size_t steps = 0;
};

std::vector<Curve> curves_of(const PlotRequest& r) {
  std::vector<Curve> curves;
  for (const std::string& path : r.files) {
    if (!is_log(path)) {
      PlotRequest one = r;
      one.files = {path};
      for (const json& row : rows_of(one)) {
        if (!row.contains("losses") || !row["losses"].is_array()) continue;
        Curve c = {row["row"].get<std::string>() + ", " + who_of(row), ""};
        for (const json& l : row["losses"]) {
          c.steps++;
          if (l.is_number() && std::isfinite(l.get<double>())) c.data += strf("%zu %.6g\n", c.steps, l.get<double>());
        }
        if (!c.data.empty()) curves.push_back(c);
      }
      continue;
    }
    Curve c = {files::stem(path), ""};
    for (const json& j : read_json_lines(path)) {
      if (!j.contains("step") || !j["step"].is_number()) continue;
      c.steps++;
      const double step = j["step"].get<double>();
      if (const auto l = value_of(j, "loss")) c.data += strf("%.0f %.6g\n", step, *l);
      if (const auto l = value_of(j, "val_loss")) c.validation += strf("%.0f %.6g\n", step, *l);
    }
    if (!c.data.empty()) curves.push_back(c);
  }
  return curves;
}

}  // namespace

bool is_log(const std::string& path) {
  std::ifstream in(path);
  std::string line;
  std::getline(in, line);
  const json j = json::parse(line, nullptr, /*allow_exceptions=*/false);
  return j.is_object() && j.contains("command") && j.contains("config") && !j.contains("row");
}

PlotKind kind_of_rows(const Words& files) {
  PlotRequest r;
  r.files = files;
  const std::vector<json> rows = rows_of(r);
  std::set<double> values;
  bool long_curves = false, all_numbers = true;
  for (const json& row : rows) {
    long_curves |= row.contains("losses") && row["losses"].size() >= 100;
    const auto v = first_label(row);
    if (v) values.insert(*v);
    all_numbers &= v.has_value();
  }
  return long_curves ? PlotKind::loss : all_numbers && values.size() >= 3 ? PlotKind::scaling : PlotKind::bars;
}

std::string loss_script(const PlotRequest& r, const std::string& out) {
  const std::vector<Curve> curves = curves_of(r);
  REQUIRE_USER(!curves.empty(), "%s has no losses to plot", r.files[0].c_str());
  std::string text = plot_opening(out, curves.size() > 4 ? 1100 : 900, 460, r.title.empty() ? "Loss" : r.title);
  std::string plots;
  const auto add = [&](const std::string& plot) { plots += (plots.empty() ? "plot " : ", \\\n     ") + plot; };
  for (size_t i = 0; i < curves.size(); i++) {
    const char* const colour = plot_colours[i % plot_colour_count];
    text += strf("$curve%zu << EOD\n", i) + curves[i].data + "EOD\n";
    add(strf("$curve%zu using 1:2 with lines linewidth %.1f dashtype %zu linecolor \"%s\" title %s", i,
             curves[i].steps > 300 ? 1.0 : 1.8, dashes_of(i), colour, in_quotes(curves[i].title).c_str()));
    if (curves[i].validation.empty()) continue;
    text += strf("$validation%zu << EOD\n", i) + curves[i].validation + "EOD\n";
    add(strf(
        "$validation%zu using 1:2 with linespoints linewidth 1.8 pointtype %zu pointsize 0.7 linecolor \"%s\" title %s",
        i, 5 + 2 * (i % 3), colour, in_quotes(curves[i].title + ", validation").c_str()));
  }
  text += std::string("set xlabel \"step\"\nset ylabel \"loss\"\nset key ") +
          (curves.size() > 4 ? "outside right top vertical Left reverse\n" : "top right\n");
  return text + plots + "\n";
}

std::string bars_script(const PlotRequest& r, const std::string& out) {
  const std::vector<json> rows = rows_of(r);
  const std::vector<Series> all = series_of(rows, key_of(r), /*by_label=*/false);
  require_any(all, r);
  Words names;
  for (const json& row : rows)
    if (std::find(names.begin(), names.end(), row["row"]) == names.end()) names.push_back(row["row"]);
  size_t longest = 0;
  for (const std::string& n : names) longest = std::max(longest, n.size());
  const double width = 0.8 / double(all.size());
  const int pixels = std::clamp(int(names.size() * (30 * all.size() + 25)) + 130, 700, 1400);
  std::string data, labels, plots;
  double highest = 0;
  for (const Series& s : all)
    for (const Point& p : s.points) highest = std::max(highest, p.y.value_or(0));
  for (size_t i = 0; i < all.size(); i++) {
    std::string of_series;
    for (const Point& p : all[i].points) {
      const double x =
          double(std::find(names.begin(), names.end(), p.row) - names.begin()) - 0.4 + (double(i) + 0.5) * width;
      if (p.y) of_series += strf("%.4f %.6g %.4f\n", x, *p.y, 0.92 * width);
      const std::string what = p.y ? *p.y >= 100 ? strf("%.0f", *p.y) : strf("%.3g", *p.y) : p.word;
      labels += strf(
          "set label %s at %.4f,%.6g rotate by 90 left offset 0,0.3 font \"sans-serif,10\" textcolor \"#333333\"\n",
          in_quotes(what + (p.planned ? " planned" : "")).c_str(), x, p.y.value_or(0));
    }
    if (of_series.empty()) of_series = "? ? ?\n";
    data += strf("$series%zu << EOD\n", i) + of_series + "EOD\n";
    plots +=
        (plots.empty() ? "plot " : ", \\\n     ") + strf("$series%zu using 1:2:3 with boxes linecolor \"%s\" title %s",
                                                         i, all[i].colour.c_str(), in_quotes(all[i].title).c_str());
  }
  std::string text = plot_opening(out, pixels, 480, title_of(r, rows)) + data + labels;
  text += "set style fill solid 1 noborder\nset xtics (";
  for (size_t i = 0; i < names.size(); i++) text += strf("%s%s %zu", i ? ", " : "", in_quotes(names[i]).c_str(), i);
  text +=
      std::string(")") + (longest * 9 > size_t(pixels) / names.size() ? " rotate by -25" : "") + "\nset grid noxtics\n";
  const double top = axis_end(highest, 1.18);
  text += strf(
      "set xrange [-0.6:%.1f]\nset yrange [0:%.6g]\nset ylabel %s\n"
      "set tmargin 5\nset title offset 0,1.4\n"
      "set key at graph 0.5,1.02 center bottom horizontal samplen 2\n",
      double(names.size()) - 0.4, top, in_quotes(title_of_key(key_of(r))).c_str());
  return text + ticks('y', 0, top, Axis::linear) + plots + "\n";
}

std::string scaling_script(const PlotRequest& r, const std::string& out) {
  const std::vector<json> rows = rows_of(r);
  for (const json& row : rows)
    REQUIRE_USER(first_label(row), "%s: row \"%s\" has no number to plot over; take --kind bars", r.files[0].c_str(),
                 row["row"].get<std::string>().c_str());
  std::vector<Series> all = series_of(rows, key_of(r), /*by_label=*/true);
  require_any(all, r);
  double least = INFINITY, most = 0;
  std::set<double> xs;
  for (Series& s : all) {
    std::stable_sort(s.points.begin(), s.points.end(), [](const Point& a, const Point& b) { return a.x < b.x; });
    for (const Point& p : s.points) {
      xs.insert(p.x);
      if (p.y && *p.y > 0) least = std::min(least, *p.y), most = std::max(most, *p.y);
    }
  }
  const double top = axis_end(most, 1.2);
  const bool log_y = most > 8 * least, log_x = *xs.begin() > 0 && *xs.rbegin() >= 4 * *xs.begin();
  std::string data, plots, labels;
  for (size_t i = 0; i < all.size(); i++) {
    std::string measured, planned, last;  // planned points go on from the last measured one
    for (const Point& p : all[i].points) {
      const std::string at = p.y ? strf("%.10g %.6g\n", p.x, *p.y) : "";
      if (p.y && p.planned) planned += (planned.empty() ? last : "") + at;
      else if (p.y) measured += at, last = at;
      else
        labels +=
            strf("set label %s at %.10g,graph 0.03 center offset 0,%.1f font \"sans-serif,11\" textcolor \"%s\"\n",
                 in_quotes(p.word).c_str(), p.x, 1.1 * double(i), all[i].colour.c_str());
    }
    const int mark = 5 + 2 * int(i % 5);  // filled; one less is hollow
    const auto add = [&](const char* kind, const std::string& points, int type, const std::string& dashes,
                         const std::string& title) {
      if (points.empty()) return;
      data += strf("$%s%zu << EOD\n", kind, i) + points + "EOD\n";
      plots +=
          (plots.empty() ? "plot " : ", \\\n     ") +
          strf("$%s%zu using 1:2 with linespoints linewidth 2 pointtype %d pointsize 0.9 linecolor \"%s\"%s title %s",
               kind, i, type, all[i].colour.c_str(), dashes.c_str(), in_quotes(title).c_str());
    };
    add("measured", measured, mark, "", all[i].title);
    add("planned", planned, mark - 1, " dashtype 2", all[i].title + ", planned");
  }
  std::string text = plot_opening(out, 950, 460, title_of(r, rows)) + data + labels;
  if (log_x) text += "set logscale x 2\n";
  if (log_y) text += strf("set logscale y\nset yrange [%.6g:%.6g]\n", 0.6 * least, 1.6 * most);
  else text += strf("set yrange [0:%.6g]\n", top);
  text += "set xtics (";
  bool first = true;
  for (double x : xs) text += strf("%s\"%.10g\" %.10g", first ? "" : ", ", x, x), first = false;
  text += ")\nset xlabel " + in_quotes(name_of_first_label(rows[0])) + "\nset ylabel " +
          in_quotes(title_of_key(key_of(r))) +
          "\nset offsets graph 0.04, graph 0.04, 0, 0\nset key outside right top vertical Left reverse\n" +
          ticks('y', log_y ? least : 0, log_y ? most : top, log_y ? Axis::logarithmic : Axis::linear);
  return text + plots + "\n";
}
