#include "lib/program/diagnostics.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <utility>

#include "lib/device/nvml.h"
#include "lib/device/terminal.h"
#include "lib/program/audits.h"
#include "lib/program/format.h"

using nlohmann::json;
using ll = long long;

namespace {

const char* const training_name = "training_fsdp.csv";
const char* const k_stats_name = "k_stats_fsdp.csv";
const char* const fallbacks_name = "fallback_counters_fsdp.csv";
const char* const optimizer_name = "opt_state_fsdp_mb.txt";
const char* const dtypes_name = "dtypes_report_fsdp.txt";
const char* const environment_name = "env.json";
const std::string heartbeat_start = "heartbeat_rank", heartbeat_end = ".jsonl", memory_start = "mem_fsdp_";

const char* const k_stats_header = "step,k_mean,k_max,rows,pct_at_max";
std::string fallbacks_header() {
  std::string header = "step";
  for (const char* name : nsa_fallback_names) header += strf(",%s", name);
  return header + ",total_fallbacks";
}

// The number in a name that is start, digits, end; -1: it is another name.
int64_t number_in(const std::string& name, const std::string& start, const std::string& end) {
  if (name.size() <= start.size() + end.size() || name.compare(0, start.size(), start) != 0 ||
      name.compare(name.size() - end.size(), end.size(), end) != 0)
    return -1;
  const std::string digits = name.substr(start.size(), name.size() - start.size() - end.size());
  const bool all = digits.find_first_not_of("0123456789") == std::string::npos && digits.size() <= 18;
  return all ? std::stoll(digits) : -1;
}

std::string contents(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}

// A small file anew.
void write_file(const std::string& path, const std::string& text) {
  const std::unique_ptr<files::File> file = files::open_to_append(path);
  files::cut(file.get(), 0);
  file->write(text.data(), int64_t(text.size()));
}

}  // namespace

bool is_diagnostics_file(const std::string& name) {
  for (const char* fixed : {training_name, k_stats_name, fallbacks_name, optimizer_name, dtypes_name, environment_name})
    if (name == fixed) return true;
  for (const char* end : {".txt", ".json"})
    if (name == memory_start + "boot" + end || number_in(name, memory_start + "step", end) >= 0) return true;
  return number_in(name, heartbeat_start, heartbeat_end) >= 0;
}

void check_diagnostics(const std::string& dir, bool appends) {
  struct stat s;
  if (::stat(dir.c_str(), &s) != 0) return;
  REQUIRE_USER(S_ISDIR(s.st_mode), "--diagnostics %s: not a directory; choose another", dir.c_str());
  std::string first;
  for (const std::string& name : files::names_in(dir)) {
    if (!is_diagnostics_file(name)) continue;
    if (first.empty()) first = name;
    REQUIRE_USER(files::kind_of(dir + "/" + name) == S_IFREG,
                 "--diagnostics %s: %s there is not a regular file; remove "
                 "it or choose another directory",
                 dir.c_str(), name.c_str());
  }
  if (first.empty()) return;
  const json environment = json::parse(contents(dir + "/" + environment_name), nullptr, false);
  REQUIRE_USER(
      environment.is_object() && environment.contains("distributed_backend") && environment.contains("command") &&
          environment.contains("commit"),
      "--diagnostics %s: %s is there, but no env.json of a run, so nothing is overwritten; remove it or choose "
      "another directory",
      dir.c_str(), first.c_str());
  if (!appends) return;
  for (const auto& [name, header] :
       {std::pair(k_stats_name, std::string(k_stats_header)), std::pair(fallbacks_name, fallbacks_header())}) {
    const std::string text = contents(dir + "/" + name);
    REQUIRE_USER(
        text.empty() || text.substr(0, text.find('\n')) == header,
        "--diagnostics %s: %s has other columns than this program's, so it cannot go on; choose another directory",
        dir.c_str(), name);
  }
}

// ------------------------------------------------------------------------------------------------------------- lines

LineFile::LineFile(const std::string& path) : file_(files::open_to_append(path)) {
  struct stat s;
  if (::fstat(file_->fd, &s) != 0) files::fail("fstat", path, errno);
  bytes_ = s.st_size;
  constexpr int64_t longest = 1 << 16;  // line
  std::ifstream in(path);
  in.seekg(std::max<int64_t>(0, bytes_ - longest));
  const std::string end{std::istreambuf_iterator<char>(in), {}};
  const size_t newline = end.rfind('\n');
  if (newline != std::string::npos && newline + 1 < end.size()) cut(bytes_ - int64_t(end.size() - newline - 1));
}

void LineFile::add(const std::string& line) { files::append_whole(file_.get(), line + "\n", &bytes_); }

void LineFile::cut(int64_t bytes) {
  files::cut(file_.get(), bytes);
  bytes_ = bytes;
}

int64_t bytes_before(const std::string& text, int64_t step) {
  size_t at = 0;
  for (size_t end; (end = text.find('\n', at)) != std::string::npos; at = end + 1) {
    char* rest = nullptr;
    const ll row = std::strtoll(text.c_str() + at, &rest, 10);
    if (rest == text.c_str() + at) continue;  // the header
    if (row >= step) break;
  }
  return int64_t(at);
}

// ----------------------------------------------------------------------------------------------------------- the run

Diagnostics::Diagnostics(const Run& r, const World& world, const Device& dev, const json& header,
                         std::function<void(const std::string&)> note)
    : r_(r), world_(world), dev_(dev), note_(std::move(note)), dir_(files::without_slash(r.o.diagnostics)) {
  if (dir_.empty()) return;
  memory_ = dev.mem.report();
  try {
    files::make_dirs(dir_);
    heartbeat_ = std::make_unique<LineFile>(dir_ + "/" + heartbeat_start + std::to_string(world.rank) + heartbeat_end);
    if (r.o.resume.empty()) heartbeat_->cut(0);
    if (world.rank == 0) start_files(header);
  } catch (const Error& e) { throw UsageError(strf("--diagnostics: %s", e.what())); }
}

// Rank 0's. The other ranks may have begun their heartbeats.
void Diagnostics::start_files(const json& header) {
  if (r_.o.resume.empty())
    for (const std::string& name : files::names_in(dir_))
      if (is_diagnostics_file(name)) {
        const int64_t rank = number_in(name, heartbeat_start, heartbeat_end);
        if (rank < 0 || rank >= world_.size) files::remove(dir_ + "/" + name);
      }
  write_file(dir_ + "/" + environment_name,
             environment_json(header, dev_).dump(2, ' ', false, json::error_handler_t::replace) + "\n");
  write_file(dir_ + "/" + dtypes_name, dtypes_text(r_, r_.fsdp.shards(world_.size)));
  write_file(dir_ + "/" + optimizer_name, strf("%.2f\n", mib(memory_.before_step[int(Purpose::moments)])));
  training_ = std::make_unique<LineFile>(dir_ + "/" + training_name);
  if (r_.model.sparse) {
    k_stats_ = std::make_unique<LineFile>(dir_ + "/" + k_stats_name);
    if (k_stats_->bytes() == 0) k_stats_->add(k_stats_header);
    fallbacks_ = std::make_unique<LineFile>(dir_ + "/" + fallbacks_name);
    if (fallbacks_->bytes() == 0) fallbacks_->add(fallbacks_header());
  }
}

template <class F>
void Diagnostics::attempt(F f) {
  try {
    f();
  } catch (const Error& e) {
    if (!failed_.exchange(true))
      terminal::say(strf("warning: rank %d: --diagnostics: lines are missing from here on: %s; training goes on",
                         world_.rank, e.what()));
  }
}

double Diagnostics::seconds() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun_).count();
}

void Diagnostics::begin(int64_t first_step) {
  first_ = first_step, last_ = line_step_ = first_step - 1;
  begun_ = std::chrono::steady_clock::now();
  anomalies_.judge(0, 0, nullptr);
  if (!dir_.empty()) {
    for (const auto& [file, name] : {std::pair(training_.get(), training_name), std::pair(k_stats_.get(), k_stats_name),
                                     std::pair(fallbacks_.get(), fallbacks_name)}) {
      const std::string text = file ? contents(dir_ + "/" + name) : "";
      if (!text.empty()) attempt([&, file = file] { file->cut(bytes_before(text, first_step)); });
    }
    if (world_.rank == 0) dump_memory("boot");
    heartbeat(last_, "boot", {{"ranks", world_.size}, {"device", dev_.name}});
  }
  watch_ = std::make_unique<StallWatch>(r_.o.stall, [this](double s, int64_t step) { stalled(s, step); });
  watch_->step_ended(last_);
}

void Diagnostics::end(const std::string& wrong) {
  watch_.reset();
  if (!dir_.empty()) heartbeat(last_, "end", wrong.empty() ? json::object() : json{{"text", wrong}});
}

// On the watch's thread. Every rank says it: of one that is stopped only the others can tell.
void Diagnostics::stalled(double seconds, int64_t step) {
  const std::string text =
      strf("no step has ended for %.3g s: step %lld of %lld is awaited", seconds, ll(step + 1), ll(r_.last_step));
  terminal::say(strf("warning: rank %d: %s", world_.rank, text.c_str()));
  if (!dir_.empty()) heartbeat(step, "stall", {{"text", text}, {"seconds", seconds}});
}

void Diagnostics::heartbeat(int64_t step, const char* message, const json& more) {
  json j = {{"ts", unix_seconds()},
            {"iso", now_iso8601()},
            {"pid", getpid()},
            {"rank", world_.rank},
            {"step", step},
            {"msg", message},
            {"backend", "FSDP"},
            {"gpu_mem_alloc", int64_t(mib(memory_.before_step_total))},
            {"gpu_mem_reserved", int64_t(mib(dev_.mem.device_reported_bytes()))},
            {"gpu_mem_peak", int64_t(mib(memory_.live_peak))}};
  j.update(more);
  const std::lock_guard<std::mutex> lock(mutex_);
  attempt([&] { heartbeat_->add(j.dump()); });
}

void Diagnostics::count_fallbacks(const std::vector<NsaKernels>& layers) {
  if (dir_.empty() || layers.empty()) return;
  std::vector<int64_t> mine(nsa_fallbacks + 1);
  for (const NsaKernels& k : layers) {
    for (int i = 0; i < nsa_fallbacks; i++) mine[size_t(i)] += k.fallbacks[i];
    mine[nsa_fallbacks] += k.general;
  }
  fallback_calls_ = mine;
  if (world_.size == 1) return;
  fallback_calls_.assign(mine.size(), 0);
  for (const std::string& text : gather_texts(json(mine).dump())) {
    const json of = json::parse(text);
    for (size_t i = 0; i < mine.size(); i++) fallback_calls_[i] += of.at(i).get<int64_t>();
  }
}

// -------------------------------------------------------------------------------------------------------------- steps

void Diagnostics::step(const StepRecord& s, const Step& of) {
  watch_->step_ended(last_ = s.step);
  const double now = seconds(), tokens = double(r_.tokens_per_step());
  NsaStats counted = {};
  if (of.sums) counted = summary(total(of.sums, r_.model.depth), total(of.maxima, r_.model.depth));
  const NsaStats* const gates = of.sums ? &counted : nullptr;
  for (const Anomaly& a : anomalies_.judge(now, double(s.step - first_ + 1) * tokens, gates)) {
    if (note_) note_("warning: " + a.text);
    if (!dir_.empty()) heartbeat(s.step, a.name, {{"text", a.text}});
  }
  if (dir_.empty()) return;
  if (is_due(s, r_.last_step, r_.o.log_every)) {
    const double tokens_per_sec = double(s.step - line_step_) * tokens / (now - line_seconds_);
    line_step_ = s.step, line_seconds_ = now;
    heartbeat(s.step, "progress", progress(s, of, gates, tokens_per_sec));
    if (world_.rank == 0) rows(s, gates, tokens_per_sec);
  }
  const int64_t every = r_.o.mem_dump_every;
  if (world_.rank == 0 && (s.step == first_ || (every > 0 && s.step % every == 0)))
    dump_memory("step" + std::to_string(s.step));
}

json Diagnostics::progress(const StepRecord& s, const Step& of, const NsaStats* gates, double tokens_per_sec) const {
  json j = {
      {"loss", s.loss}, {"toks_per_s", tokens_per_sec}, {"dt_fetch_s", of.fetch_seconds}, {"grad_norm", s.grad_norm},
      {"lr", s.lr},     {"step_ms", s.step_ms}};
  if (!std::isnan(s.val_loss)) j["val_loss"] = s.val_loss;
  if (!gates) return j;
  j.update({{"gate_entropy_mean", gates->entropy_mean},
            {"gate_entropy_min", gates->entropy_min},
            {"gate_max_gate", gates->share_max},
            {"gate_max_gate_mean", gates->share_max_mean},
            {"gate_collapse_frac", gates->collapsed},
            {"gate_branch_shares", {gates->share[0], gates->share[1], gates->share[2]}},
            {"sel_k_mean", gates->keys_mean},
            {"sel_k_max", int64_t(gates->keys_max)},
            {"sel_rows", int64_t(gates->rows)},
            {"sel_pct_at_max", gates->at_max}});
  for (size_t i = 0; i < fallback_calls_.size(); i++)
    j[strf("fb_%s", i < nsa_fallbacks ? nsa_fallback_names[i] : "total_fallbacks")] = fallback_calls_[i] * s.step;
  return j;
}

void Diagnostics::rows(const StepRecord& s, const NsaStats* gates, double tokens_per_sec) {
  attempt([&] { training_->add(strf("%lld,%.6f,%.6e,%.0f", ll(s.step), plain_nan(s.loss), s.lr, tokens_per_sec)); });
  if (!gates) return;
  attempt([&] {
    k_stats_->add(strf("%lld,%.4f,%lld,%lld,%.4f", ll(s.step), gates->keys_mean, ll(gates->keys_max), ll(gates->rows),
                       gates->at_max));
  });
  std::string row = std::to_string(s.step);
  for (int64_t calls : fallback_calls_) row += strf(",%lld", ll(calls * s.step));
  attempt([&] { fallbacks_->add(row); });
}

void Diagnostics::dump_memory(const std::string& when) {
  const std::string start = dir_ + "/" + memory_start + when;
  attempt([&] {
    write_file(start + ".txt", memory_text(memory_, dev_, world_.size));
    write_file(start + ".json", memory_json(memory_, dev_).dump(2) + "\n");
  });
}
