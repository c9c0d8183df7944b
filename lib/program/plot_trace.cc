// Pictures of a trace: what ran when, and the memory that it took.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <map>
#include <sstream>

#include "lib/device/error.h"
#include "lib/program/format.h"
#include "lib/program/plot_parts.h"
#include "lib/program/process.h"

namespace {

using nlohmann::json;

json parsed(const std::string& path) { return json::parse(read_file(path), nullptr, /*allow_exceptions=*/false); }

double number(const json& j, const char* key, double otherwise) {
  return j.contains(key) && j[key].is_number() ? j[key].get<double>() : otherwise;
}
std::string words(const json& j, const char* key) {
  return j.contains(key) && j[key].is_string() ? j[key].get<std::string>() : "";
}
json args_of(const json& event) {
  return event.contains("args") && event["args"].is_object() ? event["args"] : json::object();
}

// Milliseconds from the step's beginning.
struct Bar {
  double from, to;
  std::string what, group;  // what: its label; group: what colours it
};
struct Lane {
  std::string cat, title;
  std::vector<Bar> bars = {};
};
constexpr size_t streams = 3, most_slots = 12;  // lanes

// The step's beginning and end, in a trace's microseconds.
std::pair<double, double> window_of(const json& trace, const std::string& path) {
  double from = INFINITY, to = -INFINITY;
  for (const json& e : trace["traceEvents"]) {
    if (words(e, "ph") != "X" && words(e, "ph") != "C") continue;
    from = std::min(from, number(e, "ts", INFINITY));
    to = std::max(to, number(e, "ts", -INFINITY) + number(e, "dur", 0));
  }
  REQUIRE_USER(to > from, "%s: a trace without spans", path.c_str());
  const json other = trace.value("otherData", json::object());
  return {number(other, "begin_us", from), number(other, "end_us", to)};
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

std::string group_of(const std::string& cat, const std::string& name, const json& args) {
  const std::string kind = words(args, "kind"), what = words(args, "mark").empty() ? name : words(args, "mark");
  if (kind == "wait" || contains(what, "waiting")) return "waits";
  if (cat == "slot")
    return contains(name, ", resident") ? "resident" : contains(what, "gradient") ? "gradient" : "held";
  if (cat != "compute") return cat;
  if (contains(what, "recomputed")) return "recomputed";
  if (contains(what, "backward")) return "backward";
  if (contains(what, "AdamW") || contains(what, "optimizer")) return "AdamW";
  return "forward";
}

// The operation that computes, the unit that is gathered or reduced, or what a slot holds.
std::string what_of(const std::string& cat, const std::string& name, const json& args) {
  if (cat == "slot") return name.substr(0, name.find(','));
  if (cat != "compute") return words(args, "unit");
  const std::string mark = words(args, "mark").empty() ? name : words(args, "mark");
  return contains(mark, "waiting") ? "" : mark.substr(0, mark.find(','));
}

// Neighbours with one label and colour in one bar: a gap of a thousandth of the step is not seen.
void merge(std::vector<Bar>* bars, double gap) {
  std::stable_sort(bars->begin(), bars->end(), [](const Bar& a, const Bar& b) { return a.from < b.from; });
  std::vector<Bar> merged;
  for (const Bar& b : *bars) {
    Bar* last = merged.empty() ? nullptr : &merged.back();
    if (last && last->group == b.group && last->what == b.what && b.from - last->to < gap)
      last->to = std::max(last->to, b.to);
    else merged.push_back(b);
  }
  *bars = merged;
}

struct Group {
  const char *name, *colour, *title;
};
const char* const stack_colours[] = {"#0072B2", "#56B4E9", "#009E73", "#CC79A7",
                                     "#D55E00", "#F0E442", "#E69F00", "#999999"};  // from the bottom
const Group groups[] = {{"forward", "#56B4E9", "forward pass"},  {"backward", "#0072B2", "backward pass"},
                        {"recomputed", "#CC79A7", "recomputed"}, {"AdamW", "#F0E442", "AdamW"},
                        {"waits", "#D55E00", "waits"},           {"gather", "#E69F00", "gathers"},
                        {"reduce", "#009E73", "reductions"},     {"held", "#F3CF80", "weights"},
                        {"resident", "#FAE9C6", "resident"},     {"gradient", "#80CEB9", "gradients"}};

std::vector<Lane> lanes_of(const json& trace, double begin, double end) {
  std::vector<Lane> lanes = {{"compute", "compute"}, {"gather", "gathers"}, {"reduce", "reductions"}};
  for (const json& e : trace["traceEvents"]) {
    if (words(e, "ph") != "X") continue;
    const std::string cat = words(e, "cat"), slot = cat == "slot" ? words(args_of(e), "mark") : "";
    const double ts = number(e, "ts", 0), to = ts + number(e, "dur", 0);
    if (to <= begin || ts >= end) continue;
    const auto same = [&](const Lane& lane) { return lane.cat == cat && (cat != "slot" || lane.title == slot); };
    auto lane = std::find_if(lanes.begin(), lanes.end(), same);
    if (lane == lanes.end() && cat == "slot") lane = lanes.insert(lanes.end(), {cat, slot});
    if (lane != lanes.end())
      lane->bars.push_back({(std::max(ts, begin) - begin) / 1e3, (std::min(to, end) - begin) / 1e3,
                            what_of(cat, words(e, "name"), args_of(e)), group_of(cat, words(e, "name"), args_of(e))});
  }
  if (lanes.size() > streams + most_slots) lanes.resize(streams);
  for (Lane& lane : lanes) merge(&lane.bars, (end - begin) / 1e3 / 1000);
  return lanes;
}

std::string title_of(const PlotRequest& r, const json& trace, const char* what) {
  if (!r.title.empty()) return r.title;
  const json other = trace.value("otherData", json::object());
  std::string text = what;
  // Behind --preset in the command, as a word of its own.
  std::istringstream command(words(other, "command"));
  for (std::string word, before; command >> word; before = word)
    if (before == "--preset") text += " of " + word;
  if (other.contains("ranks")) text += " on " + other["ranks"].dump() + (other["ranks"] == 1 ? " GPU" : " GPUs");
  if (words(other, "source") == "plan") text += ", planned";
  return text;
}

const json& only_file(const PlotRequest& r, const char* kind, json* trace) {
  REQUIRE_USER(r.files.size() == 1, "--kind %s takes one trace, not %zu files", kind, r.files.size());
  *trace = read_trace(r.files[0]);
  return *trace;
}

}  // namespace

bool is_trace(const std::string& path) {
  std::ifstream in(path);
  std::string start(4096, '\0');
  in.read(&start[0], std::streamsize(start.size()));
  return start.find("\"traceEvents\"") != std::string::npos;
}

json read_trace(const std::string& path) {
  json trace = parsed(path);
  const bool is = trace.is_object() && trace.contains("traceEvents") && trace["traceEvents"].is_array();
  REQUIRE_USER(is, "%s is not a trace: ./train --trace FILE makes one", path.c_str());
  return trace;
}

std::string timeline_script(const PlotRequest& r, const std::string& out) {
  json trace;
  only_file(r, "timeline", &trace);
  const auto [begin, end] = window_of(trace, r.files[0]);
  const std::vector<Lane> lanes = lanes_of(trace, begin, end);
  const double length = (end - begin) / 1e3;
  std::string text = plot_opening(out, 1000, 330 + 40 * int(lanes.size() - streams), title_of(r, trace, "A step"));
  std::string labels;
  std::map<std::string, std::string> data;
  bool any = false;
  for (size_t i = 0; i < lanes.size(); i++) {
    const double y = double(lanes.size() - i);
    for (size_t j = 0; j < lanes[i].bars.size(); j++) {
      const Bar& b = lanes[i].bars[j];
      any = true;
      data[b.group] += strf("%.4f %.4f %.2f %.2f\n", b.from, b.to, y - 0.36, y + 0.36);
      // Within the bar, or behind it where it is narrow and nothing follows for a while.
      const double room = length * 0.0078 * double(b.what.size());
      const bool within = b.to - b.from > room;
      const double free_until = j + 1 < lanes[i].bars.size() ? lanes[i].bars[j + 1].from : length;
      if (b.what.empty() || b.group == "resident") continue;
      if (!within && (i == 0 || i >= streams || free_until - b.to < 1.1 * room)) continue;
      if (within)
        labels += strf("set label %s at %.4f,%.2f center front font \"sans-serif,10\" textcolor \"#000000\"\n",
                       in_quotes(b.what).c_str(), (b.from + b.to) / 2, y);
      else
        labels += strf("set label %s at %.4f,%.2f left offset 0.4,0 front font \"sans-serif,10\"\n",
                       in_quotes(b.what).c_str(), b.to, y);
    }
  }
  REQUIRE_USER(any, "%s: a trace without spans of computation, gathers or reductions", r.files[0].c_str());
  for (const auto& [group, lines] : data) text += "$" + group + " << EOD\n" + lines + "EOD\n";
  text += strf("set xrange [0:%.4f]\nset yrange [0.4:%.1f]\nset xlabel \"ms\"\n", length, double(lanes.size()) + 0.6);
  text += "set ytics (";
  for (size_t i = 0; i < lanes.size(); i++)
    text += strf("%s%s %zu", i ? ", " : "", in_quotes(lanes[i].title).c_str(), lanes.size() - i);
  // Slots make the key two lines.
  text += strf(
      ")\nset grid noytics\nset bmargin %d\nset key at screen 0.5,0.03 center bottom horizontal samplen 1.5\n"
      "set style fill solid 1 border linecolor \"#ffffff\"\n",
      lanes.size() > streams ? 8 : 6);
  text += labels + "plot ";
  bool first = true;
  for (const Group& g : groups)
    if (data.count(g.name)) {
      text += strf("%s$%s using (($1+$2)/2):(($3+$4)/2):1:2:3:4 with boxxyerror linecolor \"%s\" title \"%s\"",
                   first ? "" : ", \\\n     ", g.name, g.colour, g.title);
      first = false;
    }
  return text + "\n";
}

std::string memory_script(const PlotRequest& r, const std::string& out) {
  json trace;
  only_file(r, "memory", &trace);
  const auto [begin, end] = window_of(trace, r.files[0]);
  std::vector<std::string> purposes;                   // from the bottom
  std::map<double, std::map<std::string, double>> at;  // ms -> MiB by purpose; of several at a time the last
  for (const json& e : trace["traceEvents"]) {
    if (words(e, "ph") != "C" || words(e, "name").rfind("memory", 0) != 0) continue;
    auto& here = at[(number(e, "ts", 0) - begin) / 1e3];
    here.clear();
    const json args = args_of(e);
    for (const auto& [purpose, value] : args.items()) {
      if (!value.is_number()) continue;
      here[purpose] = value.get<double>();
      if (std::find(purposes.begin(), purposes.end(), purpose) == purposes.end()) purposes.push_back(purpose);
    }
  }
  REQUIRE_USER(!at.empty(), "%s: a trace without memory: ./train --plan --trace FILE has it", r.files[0].c_str());
  // What changes least lies at the bottom.
  std::map<std::string, double> variation;
  for (const std::string& p : purposes) {
    double before = NAN;
    for (auto& [ms, values] : at) {
      if (!std::isnan(before)) variation[p] += std::fabs(values[p] - before);
      before = values[p];
    }
  }
  std::stable_sort(purposes.begin(), purposes.end(),
                   [&](const auto& a, const auto& b) { return variation[a] < variation[b]; });
  std::string data;
  double highest = 0, when = 0;
  std::string before;
  for (auto& [ms, values] : at) {
    std::string sums;
    double sum = 0;
    for (const std::string& p : purposes) sum += values[p], sums += strf(" %.2f", sum);
    if (sum > highest) highest = sum, when = ms;
    if (!before.empty()) data += strf("%.4f", ms) + before + "\n";  // a step, and no slope
    data += strf("%.4f", ms) + sums + "\n";
    before = sums;
  }
  data += strf("%.4f", std::max((end - begin) / 1e3, at.rbegin()->first)) + before + "\n";
  std::string text =
      plot_opening(out, 1000, 420, title_of(r, trace, "Memory over a step")) + "$memory << EOD\n" + data + "EOD\n";
  const double top = axis_end(highest, 1.12);
  text += strf("set xrange [0:%.4f]\nset yrange [0:%.0f]\n", (end - begin) / 1e3, top);
  text +=
      "set xlabel \"ms\"\nset ylabel \"MiB\"\nset key outside right top vertical\n"
      "set style fill solid 1 noborder\n";
  text += strf("set label \"%s MiB\" at %.4f,%.2f center offset 0,0.8 front\n", grouped(std::llround(highest)).c_str(),
               when, highest);
  text += ticks('y', 0, top, Axis::linear) + "plot ";
  for (size_t i = purposes.size(); i-- > 0;)
    text += strf("$memory using 1:%zu with filledcurves y1=0 linecolor \"%s\" title %s%s", i + 2,
                 stack_colours[i % plot_colour_count], in_quotes(purposes[i]).c_str(), i ? ", \\\n     " : "\n");
  return text;
}
