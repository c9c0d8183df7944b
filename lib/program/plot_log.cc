// The picture of training logs: loss, gradient norm and tokens/s by step, a panel each, the logs in one picture.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>

#include "lib/device/error.h"
#include "lib/program/files.h"
#include "lib/program/format.h"
#include "lib/program/plot_parts.h"
#include "lib/program/process.h"

namespace {

using nlohmann::json;

struct Panel {
  const char *key, *title;
};
const Panel panels[] = {{"loss", "loss"}, {"grad_norm", "gradient norm"}, {"tokens_per_sec", "tokens/s"}};

// What a log says of each step. A run that was resumed from a step before its latest did some again: the later line
// counts, and what was ahead of it was undone.
std::map<int64_t, json> steps_of(const std::string& path) {
  REQUIRE_USER(is_log(path), "%s is not a log of ./train --log; for rows or a trace take another --kind", path.c_str());
  std::map<int64_t, json> steps;
  for (json& j : read_json_lines(path)) {
    if (!j.contains("step") || !j["step"].is_number_integer()) continue;
    const int64_t step = j["step"];
    steps.erase(steps.lower_bound(step), steps.end());
    steps.emplace(step, std::move(j));
  }
  return steps;
}

// "step value" a line; a blank line, where the pen is lifted, for what is not finite, which a log has as null.
std::string points(const std::map<int64_t, json>& steps, const char* key) {
  std::string text;
  for (const auto& [step, j] : steps) {
    const auto value = j.find(key);
    if (value == j.end()) continue;
    const bool shown = value->is_number() && std::isfinite(value->get<double>());
    if (shown) text += strf("%lld %.6g\n", static_cast<long long>(step), value->get<double>());
    else if (!text.empty()) text += "\n";
  }
  return text;
}
bool has_points(const std::string& text) { return text.find_first_not_of('\n') != std::string::npos; }

// As short as tells them apart: the file's name without its ending, else what was typed.
Words names_of(const Words& paths) {
  Words names;
  for (const std::string& path : paths) {
    const auto same = [&](const std::string& other) { return files::file_name(other) == files::file_name(path); };
    names.push_back(std::count_if(paths.begin(), paths.end(), same) > 1 ? path : files::stem(path));
  }
  return names;
}

}  // namespace

std::string curves_script(const PlotRequest& r, const std::string& out) {
  const Words names = names_of(r.files);
  std::string data, plots[std::size(panels)];
  const auto add = [&](size_t panel, const std::string& name, const std::string& of, const std::string& how) {
    if (!has_points(of)) return;
    data += "$" + name + " << EOD\n" + of + "EOD\n";
    plots[panel] += (plots[panel].empty() ? "plot " : ", \\\n     ") + ("$" + name) + " using 1:2 with " + how;
  };
  int64_t first = INT64_MAX, last = 0;
  double fastest = 1;
  for (size_t i = 0; i < r.files.size(); i++) {
    const std::map<int64_t, json> steps = steps_of(r.files[i]);
    if (!steps.empty()) first = std::min(first, steps.begin()->first), last = std::max(last, steps.rbegin()->first);
    for (const auto& [step, j] : steps)
      if (j.contains("tokens_per_sec") && j["tokens_per_sec"].is_number())
        fastest = std::max(fastest, j["tokens_per_sec"].get<double>());
    const std::string colour = strf("linecolor \"%s\"", plot_colours[i % plot_colour_count]);
    const std::string line =
        strf("lines linewidth %.1f dashtype %zu %s", steps.size() > 300 ? 1.0 : 1.8, dashes_of(i), colour.c_str());
    for (size_t p = 0; p < std::size(panels); p++)
      add(p, strf("%s%zu", panels[p].key, i), points(steps, panels[p].key),
          line + (p == 0 ? " title " + in_quotes(names[i]) : ""));
    add(0, strf("val_loss%zu", i), points(steps, "val_loss"),
        strf("linespoints linewidth 1.8 pointtype %zu pointsize 0.6 %s title %s", 5 + 2 * (i % 3), colour.c_str(),
             in_quotes(names[i] + ", validation").c_str()));
  }
  REQUIRE_USER(!data.empty(), "%s has no steps to plot", join(r.files).c_str());
  size_t shown = 0;
  for (const std::string& p : plots) shown += !p.empty();
  std::string text = plot_opening(out, 900, 60 + 250 * int(shown), "") + data;
  text += strf("set multiplot layout %zu,1 title %s font \"sans-serif,15\"\n", shown,
               in_quotes(!r.title.empty()      ? r.title
                         : r.files.size() == 1 ? names[0]
                                               : "Training logs")
                   .c_str());
  // The same margins and range, so that a step stands at the same place in every panel.
  if (first < last)
    text += strf("set xrange [%lld:%lld]\n", static_cast<long long>(first), static_cast<long long>(last));
  text += strf("set lmargin 11\nset rmargin 3\nset key %s\nset format y \"%%.6g\"\n",
               r.files.size() > 4 ? "top right maxrows 5" : "top right");
  for (size_t p = 0; p < std::size(panels); p++) {
    if (plots[p].empty()) continue;
    text += std::string("set ylabel ") + in_quotes(panels[p].title) + "\n";
    if (p == 2) text += strf("set yrange [0:%.6g]\n", 1.1 * fastest) + ticks('y', 0, 1.1 * fastest, Axis::linear);
    text += --shown == 0 ? "set xlabel \"step\"\n" : "";
    text += plots[p] + "\n";
  }
  return text + "unset multiplot\n";
}
