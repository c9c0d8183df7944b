#include "lib/program/trace.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <utility>

#include "lib/device/error.h"
#include "lib/program/files.h"
#include "lib/program/format.h"
#include "lib/program/json.h"

using nlohmann::json;

namespace {

const char* const format = "fsdp.cu trace";
const char* const before_events = ",\"traceEvents\":[";

// The first line of a trace, without its last member.
bool is_trace(const std::string& first_line) {
  const size_t at = first_line.rfind(before_events);
  if (at == std::string::npos) return false;
  const json head = json::parse(first_line.substr(0, at) + "}", nullptr, false);
  return head.is_object() && head.contains("otherData") && head["otherData"].is_object() &&
         head["otherData"].value("format", json()) == format;
}

std::string first_line_of(const std::string& path) {
  constexpr size_t most = 1 << 20;  // a trace's has some thousand bytes
  std::FILE* file = std::fopen(path.c_str(), "r");
  REQUIRE_USER(file, "--trace %s cannot be read: %s", path.c_str(), std::strerror(errno));
  std::string line(most, 0);
  line.resize(std::fread(&line[0], 1, line.size(), file));
  std::fclose(file);
  line.resize(std::min(line.find('\n'), line.size()));
  return line;
}

struct Track {
  int pid, tid;
  std::string name;
  const char* cat;
};
const char* const processes[] = {"", "streams", "NCCL and copy engines", "host", "memory", "slots"};
constexpr int streams = 1, engines = 2, host = 3, memory = 4, slots = 5;
constexpr int other_streams = 100, next_lane = 1000;

Track stream_of(const Span& s) {
  switch (s.lane) {
    case Span::compute:
      return {streams, 1, "compute", "compute"};
    case Span::gather:
      return {streams, 2, "gathers", "gather"};
    case Span::reduce:
      return {streams, 3, "reductions", "reduce"};
    default:
      return {streams, other_streams + int(s.stream), strf("stream %u", s.stream), "other"};
  }
}

const char* name_of(Span::Kind kind) {
  static const char* const names[] = {"operation", "kernel", "nccl_kernel", "collective",
                                      "copy",      "clear",  "wait",        "slot"};
  return names[kind];
}

// The events of a file.
class Writer {
 public:
  explicit Writer(double zero) : zero_(zero) {}
  std::string text;  // so far

  // A span on its track, or on the first of that name where it overlaps with none; spans come by their beginning.
  void span(const Span& s, Track track, bool may_overlap) {
    const int first = track.tid;
    for (int lane = 1; !may_overlap; lane++) {
      track.tid = first + (lane - 1) * next_lane;
      const auto& end = ends_.insert({{track.pid, track.tid}, -std::numeric_limits<double>::infinity()}).first;
      if (end->second > s.from) continue;
      end->second = s.to;
      if (lane > 1) track.name += strf(" %d", lane);
      break;
    }
    name(track);
    json args = {{"kind", name_of(s.kind)}};
    if (!s.unit.empty()) args["unit"] = s.unit;
    if (!s.mark.empty()) args["mark"] = s.mark;
    if (s.bytes > 0) args["bytes"] = s.bytes;
    event({{"name", s.name},
           {"cat", track.cat},
           {"ph", "X"},
           {"pid", track.pid},
           {"tid", track.tid},
           {"ts", us(s.from)},
           {"dur", us(s.to) - us(s.from)},
           {"args", args}});
  }

  void counters(double at, const int64_t bytes[purposes]) {
    name_process(memory);
    json args = json::object();
    for (int p = 0; p < purposes; p++) args[::name_of(Purpose(p))] = mib(bytes[p]);
    event({{"name", "memory, MiB"}, {"cat", "memory"}, {"ph", "C"}, {"pid", memory}, {"ts", us(at)}, {"args", args}});
  }

  // In whole nanoseconds.
  double us(double seconds) const { return std::round(1e9 * (seconds - zero_)) / 1e3; }

 private:
  void event(const json& e) {
    // Names come from other libraries too: what is no UTF-8 is replaced.
    text += text.empty() ? "\n" : ",\n";
    text += e.dump(-1, ' ', false, json::error_handler_t::replace);
  }
  void name_process(int pid) {
    if (!std::exchange(named_[{pid, 0}], true))
      event({{"name", "process_name"}, {"ph", "M"}, {"pid", pid}, {"args", {{"name", processes[pid]}}}});
  }
  void name(const Track& t) {
    name_process(t.pid);
    if (std::exchange(named_[{t.pid, t.tid}], true)) return;
    event({{"name", "thread_name"}, {"ph", "M"}, {"pid", t.pid}, {"tid", t.tid}, {"args", {{"name", t.name}}}});
    event({{"name", "thread_sort_index"},
           {"ph", "M"},
           {"pid", t.pid},
           {"tid", t.tid},
           {"args", {{"sort_index", t.tid}}}});
  }

  double zero_;
  std::map<std::pair<int, int>, double> ends_;  // of the latest span of a track
  std::map<std::pair<int, int>, bool> named_;
};

std::vector<const Span*> by_beginning(const std::vector<Span>& spans) {
  std::vector<const Span*> all;
  for (const Span& s : spans)
    if (s.to > s.from) all.push_back(&s);
  std::stable_sort(all.begin(), all.end(), [](const Span* a, const Span* b) {
    return a->from != b->from ? a->from < b->from : a->to > b->to;  // what lies in another comes after it
  });
  return all;
}

// Where the file begins.
double start_of(const Trace& t) {
  double start = t.begin;
  for (const auto* spans : {&t.device, &t.host, &t.slots})
    for (const Span& s : *spans) start = std::min(start, s.from);
  for (const MemoryChange& c : t.memory) start = std::min(start, c.at);
  return start;
}

void write_events(Writer* to, const Trace& t) {
  for (const Span* s : by_beginning(t.device)) {
    to->span(*s, stream_of(*s), /*may_overlap=*/false);
    if (s->kind == Span::nccl_kernel) to->span(*s, {engines, 1, "NCCL kernels", "nccl"}, /*may_overlap=*/false);
    if (s->kind == Span::copy) to->span(*s, {engines, 2, "copy engines", "copy"}, /*may_overlap=*/false);
  }
  for (const Span* s : by_beginning(t.host)) to->span(*s, {host, 1, "marks", "host"}, /*may_overlap=*/true);
  std::map<std::string, int> tracks;  // of slots, in the order in which they are first used
  for (const Span* s : by_beginning(t.slots)) {
    const int track = tracks.insert({s->mark, int(tracks.size()) + 1}).first->second;
    to->span(*s, {slots, track, s->mark, "slot"}, /*may_overlap=*/false);
  }
  if (t.memory.empty()) return;
  int64_t live[purposes];
  std::copy(t.before_step, t.before_step + purposes, live);
  to->counters(start_of(t), live);
  for (const MemoryChange& c : t.memory) {
    live[int(c.purpose)] += c.bytes;
    to->counters(c.at, live);
  }
}

}  // namespace

void check_trace(const std::string& path) {
  const mode_t kind = files::kind_of(path);
  REQUIRE_USER(kind == 0 || kind == S_IFREG, "--trace %s: not a regular file; choose another", path.c_str());
  std::error_code none;
  if (kind == S_IFREG && !std::filesystem::is_empty(path, none))
    REQUIRE_USER(is_trace(first_line_of(path)),
                 "--trace %s: not a trace of a step, so it is not overwritten; remove it or choose another file",
                 path.c_str());
  try {
    files::remove(files::create_unique(path + ".tmp-")->path);
  } catch (const Error& e) { throw UsageError(strf("--trace: %s", e.what())); }
}

void write_trace(const std::string& path, const Trace& trace, const json& about) {
  Writer to(start_of(trace));
  json other = {{"format", format},           {"version", 1},
                {"source", trace.source},     {"begin_us", to.us(trace.begin)},
                {"end_us", to.us(trace.end)}, {"step_ms", 1e3 * (trace.end - trace.begin)}};
  if (!trace.memory.empty()) {
    int64_t before = 0;
    for (int64_t bytes : trace.before_step) before += bytes;
    other.update({{"before_step_mib", mib(before)},
                  {"live_peak_mib", mib(trace.live_peak)},
                  {"planned_peak_mib", mib(trace.arena)}});
  }
  other.update(about);
  write_events(&to, trace);
  std::string text = json({{"displayTimeUnit", "ms"}, {"otherData", other}})
                         .dump(-1, ' ', false, json::error_handler_t::replace);  // the command is as it was typed
  text.pop_back();                                                               // the brace
  text += before_events + to.text + "\n]}\n";
  try {
    files::replace(path, text);
  } catch (const Error& e) { throw Error(strf("--trace: %s", e.what())); }
}
