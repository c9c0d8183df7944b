#include "lib/program/plots.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>

#include <unistd.h>

#include "lib/device/error.h"
#include "lib/program/files.h"
#include "lib/program/format.h"
#include "lib/program/plot_parts.h"
#include "lib/program/process.h"

namespace {

struct NamedKind {
  const char* name;
  PlotKind kind;
};
const NamedKind kinds[] = {{"timeline", PlotKind::timeline}, {"memory", PlotKind::memory},
                           {"curves", PlotKind::curves},     {"loss", PlotKind::loss},
                           {"bars", PlotKind::bars},         {"scaling", PlotKind::scaling},
                           {"unit", PlotKind::unit}};

PlotKind kind_of(const PlotRequest& r) {
  if (r.kind == PlotKind::unit) return r.kind;
  REQUIRE_USER(!r.files.empty(), "--plot: name a file, or --kind unit");
  for (const std::string& path : r.files) REQUIRE_USER(std::ifstream(path), "%s cannot be read", path.c_str());
  if (r.kind != PlotKind::automatic) return r.kind;
  return is_trace(r.files[0]) ? PlotKind::timeline : is_log(r.files[0]) ? PlotKind::curves : kind_of_rows(r.files);
}

bool has_ending(const std::string& text, const std::string& ending) {
  return text.size() >= ending.size() && text.compare(text.size() - ending.size(), ending.size(), ending) == 0;
}

std::string out_of(const PlotRequest& r) {
  if (!r.out.empty()) {
    REQUIRE_USER(has_ending(r.out, ".svg"), "--out %s: a picture is SVG; give a name that ends in .svg", r.out.c_str());
    return r.out;
  }
  if (r.files.empty()) return "unit.svg";
  const std::string& path = r.files[0];
  const size_t dot = path.rfind('.'), slash = path.rfind('/');
  const bool ending = dot != std::string::npos && (slash == std::string::npos || dot > slash);
  return (ending ? path.substr(0, dot) : path) + ".svg";
}

// A file that goes when this does.
struct TemporaryFile {
  std::string path;
  explicit TemporaryFile(const std::string& content) {
    const char* dir = std::getenv("TMPDIR");
    path = std::string(dir && *dir ? dir : "/tmp") + "/fsdp-plot-XXXXXX";
    const int fd = ::mkstemp(&path[0]);
    REQUIRE_USER(fd >= 0, "%s cannot be created", path.c_str());
    ::close(fd);
    std::ofstream out(path);
    out << content;
    REQUIRE_USER(out.flush(), "%s cannot be written", path.c_str());
  }
  ~TemporaryFile() { std::remove(path.c_str()); }
  TemporaryFile(const TemporaryFile&) = delete;
};

void run_gnuplot(const std::string& script) {
  const TemporaryFile file(script), said("");
  const std::string error = run({"gnuplot", file.path}, said.path, 120);
  REQUIRE_USER(error != "exit status 127",
               "there is no gnuplot, which makes the pictures: apt-get install gnuplot-nox");
  if (error.empty()) return;
  std::string why = error;
  for (const std::string& line : lines_of(read_file(said.path)))
    if (line.find("line ") != std::string::npos) why = line;
  throw Error("gnuplot: " + why);
}

// Of a disk that is full gnuplot says nothing.
std::string drawn_by_gnuplot(const PlotRequest& r) {
  const TemporaryFile picture("");
  run_gnuplot(plot_script(r, picture.path));
  std::string svg = read_file(picture.path);
  svg.erase(svg.find_last_not_of(" \n") + 1);
  if (!has_ending(svg, "</svg>"))
    throw Error("gnuplot: the picture breaks off; is there room in " + files::parent_of(picture.path) + "?");
  return svg + "\n";
}

}  // namespace

PlotKind plot_kind(const std::string& name) {
  if (name.empty()) return PlotKind::automatic;
  std::string all;
  for (const NamedKind& k : kinds) {
    if (name == k.name) return k.kind;
    all += (all.empty() ? "" : ", ") + std::string(k.name);
  }
  throw UsageError("--kind " + name + ": choose one of " + all);
}

std::vector<std::string> plot_kinds() {
  std::vector<std::string> names;
  for (const NamedKind& k : kinds) names.push_back(k.name);
  return names;
}

std::string in_quotes(const std::string& text) {
  std::string out = "\"";
  for (char c : text) {
    if (c == '"' || c == '\\' || c == '`') out += '\\';  // gnuplot runs what stands in backquotes
    out += c == '\n' ? ' ' : c;
  }
  return out + "\"";
}

std::string plot_opening(const std::string& out, int width, int height, const std::string& title) {
  std::string text =
      strf("set terminal svg noenhanced size %d,%d font \"sans-serif,13\" background \"#ffffff\"\n", width, height);
  text += "set encoding utf8\nset output " + in_quotes(out) + "\n";
  if (!title.empty()) text += "set title " + in_quotes(title) + " font \"sans-serif,15\"\n";
  text +=
      "set border 3 linecolor \"#444444\"\nset tics nomirror out textcolor \"#222222\"\n"
      "set grid linecolor \"#dddddd\" linetype 1 linewidth 0.7\nset key top left noautotitle\n"
      "set datafile missing \"?\"\n";
  return text;
}

std::string ticks(char axis, double least, double most, Axis kind) {
  std::vector<double> at;
  if (!(most > 0)) most = 1;  // a step of nothing would never come to the end
  if (kind == Axis::logarithmic) {
    for (double power = std::pow(10, std::floor(std::log10(least))); power <= most; power *= 10)
      for (double digit : {1.0, 2.0, 5.0})
        if (digit * power >= 0.7 * least && digit * power <= 1.5 * most) at.push_back(digit * power);
  } else {
    const double power = std::pow(10, std::floor(std::log10(most / 5)));
    double step = 10 * power;
    for (double digit : {5.0, 2.0, 1.0})
      if (most / (digit * power) <= 8) step = digit * power;
    for (int i = 0; i * step <= most; i++) at.push_back(i * step);
  }
  std::string text = strf("set %ctics (", axis);
  for (size_t i = 0; i < at.size(); i++) {
    const std::string shown = at[i] >= 1 || at[i] == 0
                                  ? at[i] == std::floor(at[i]) ? grouped(std::llround(at[i])) : strf("%.3g", at[i])
                                  : strf("%.2g", at[i]);
    text += strf("%s\"%s\" %.10g", i ? ", " : "", shown.c_str(), at[i]);
  }
  return text + ")\n";
}

std::string plot_script(const PlotRequest& r, const std::string& out) {
  switch (kind_of(r)) {
    case PlotKind::timeline:
      return timeline_script(r, out);
    case PlotKind::memory:
      return memory_script(r, out);
    case PlotKind::curves:
      return curves_script(r, out);
    case PlotKind::loss:
      return loss_script(r, out);
    case PlotKind::bars:
      return bars_script(r, out);
    case PlotKind::scaling:
      return scaling_script(r, out);
    case PlotKind::unit:
    case PlotKind::automatic:
      break;
  }
  throw UsageError("--kind unit is drawn without gnuplot");
}

std::string plot(const PlotRequest& r) {
  const std::string out = out_of(r);
  files::require_replaceable(out);
  for (const std::string& path : r.files)
    REQUIRE_USER(path != out, "--out %s is the file to plot; choose another", out.c_str());
  const std::string there = read_file(out);
  REQUIRE_USER(there.empty() || there.find("<svg") < 1000,
               "--out %s: not a picture (SVG), so it is not overwritten; choose another", out.c_str());
  const PlotKind kind = kind_of(r);
  const bool unit = kind == PlotKind::unit;
  REQUIRE_USER(!unit || (r.files.empty() && r.title.empty()),
               "--kind unit draws a preset's block: no files, no --title");
  REQUIRE_USER(r.key.empty() || kind == PlotKind::bars || kind == PlotKind::scaling,
               "--key names a figure of rows, which bars and scaling show; leave it out");
  files::replace(out, unit ? unit_svg(r.preset, r.ranks) : drawn_by_gnuplot(r));
  return out;
}

const std::vector<Picture>& pictures() {
  const auto of = [](const char* name, Words files, PlotKind kind, const char* key = "", const char* title = "") {
    Picture p = {name, {}};
    p.request.files = std::move(files), p.request.kind = kind, p.request.key = key, p.request.title = title;
    return p;
  };
  using K = PlotKind;
  static const std::vector<Picture> all = {
      of("unit", {}, K::unit),
      of("step-timeline", {"trace-rope-2gpu.json"}, K::timeline),
      of("step-timeline-plan", {"trace-plan.json"}, K::timeline),
      of("step-memory", {"trace-plan.json"}, K::memory),
      of("seq", {"seq-2gpu.jsonl"}, K::scaling),
      of("seq-memory", {"seq-2gpu.jsonl"}, K::scaling, "peak_mib"),
      of("depth", {"depth-2gpu.jsonl"}, K::scaling),
      of("depth-memory", {"depth-2gpu.jsonl"}, K::scaling, "peak_mib"),
      of("width", {"width-2gpu.jsonl"}, K::scaling),
      of("width-memory", {"width-2gpu.jsonl"}, K::scaling, "peak_mib"),
      of("world", {"world-2gpu.jsonl"}, K::scaling),
      of("world-memory", {"world-2gpu.jsonl"}, K::scaling, "peak_mib"),
      of("context", {"context-2gpu.jsonl"}, K::scaling, "tokens_per_sec"),
      of("mlp-1024", {"mlp-1024-2gpu.jsonl"}, K::bars),
      of("mlp-4096", {"mlp-4096-2gpu.jsonl"}, K::bars),
      of("recompute", {"recompute-2gpu.jsonl"}, K::bars),
      of("recompute-memory", {"recompute-2gpu.jsonl"}, K::bars, "peak_mib"),
      of("nsa-loss", {"nsa-loss-1gpu.jsonl"}, K::loss),
      of("class-loss", {"class-2gpu.jsonl"}, K::loss),
      of("class-speed", {"class-2gpu.jsonl"}, K::bars, "tokens_per_sec"),
      of("precision-loss", {"precision-2gpu.jsonl"}, K::loss),
  };
  return all;
}

int make_pictures(const std::string& results_dir) {
  for (const Picture& p : pictures()) {
    PlotRequest r = p.request;
    r.out = results_dir + "/" + p.name + ".svg";
    std::string missing;
    for (std::string& file : r.files) {
      file = results_dir + "/" + file;
      if (access(file.c_str(), R_OK) != 0) missing += (missing.empty() ? "" : ", ") + file;
    }
    if (!missing.empty()) std::printf("%s: left out; there is no %s\n", r.out.c_str(), missing.c_str());
    else std::printf("%s: made\n", plot(r).c_str());
  }
  return 0;
}
