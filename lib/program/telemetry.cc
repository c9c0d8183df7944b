#include "lib/program/telemetry.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/device/error.h"
#include "lib/device/terminal.h"

std::string now_iso8601() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t t = std::chrono::system_clock::to_time_t(now);
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count() % 1000;
  std::tm utc;
  gmtime_r(&t, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
  return strf("%s.%03dZ", text, int(ms));
}

bool is_due(const StepRecord& r, int64_t total_steps, int64_t log_every) {
  return r.step % log_every == 0 || r.step == 1 || r.step >= total_steps || r.is_last || !std::isnan(r.val_loss);
}

namespace {

using terminal::Style;

// Of a step's line. In a narrow terminal the highest `spare` is dropped first; 0: never.
struct Part {
  int spare;
  std::string text;
  Style style = Style::plain;
};

std::string joined(const std::vector<Part>& parts, int spare, const char* between, terminal::Stream s) {
  std::string line;
  for (const Part& p : parts)
    if (p.spare <= spare) line += (line.empty() ? "" : between) + terminal::painted(s, p.style, p.text);
  return line;
}
size_t width(const std::vector<Part>& parts, int spare, size_t between) {
  size_t n = 0;
  for (const Part& p : parts)
    if (p.spare <= spare) n += (n ? between : 0) + p.text.size();
  return n;
}

}  // namespace

std::string step_line(const StepRecord& r, int64_t total_steps, double seconds_left) {
  const std::string total = std::to_string(total_steps);
  std::string line = strf("step %*lld/%s  loss %.4f", int(std::max<size_t>(total.size(), 4)),
                          static_cast<long long>(r.step), total.c_str(), plain_nan(r.loss));
  if (!std::isnan(r.val_loss)) line += strf("  val %.4f", r.val_loss);
  line += strf("  norm %.2f  lr %.1e  %.1f ms  %s tok/s", plain_nan(r.grad_norm), r.lr, r.step_ms,
               grouped(std::llround(r.tokens_per_sec)).c_str());
  if (r.mfu >= 0) line += strf("  mfu %.1f %%", 100 * r.mfu);
  line += strf("  peak %s MiB", grouped(std::llround(r.peak_mib)).c_str());
  if (r.exposed_gather_ms >= 0) line += strf("  exposed %.1f + %.1f ms", r.exposed_gather_ms, r.exposed_reduce_ms);
  return line + (seconds_left >= 0 ? "  left " + duration_text(seconds_left) : "");
}

std::string live_line(const StepRecord& r, int64_t total_steps, double seconds_left, double smoothed_loss,
                      int columns) {
  std::vector<Part> parts;
  parts.push_back({0, strf("step %lld/%lld", static_cast<long long>(r.step), static_cast<long long>(total_steps))});
  if (std::isnan(smoothed_loss)) parts.push_back({0, strf("loss %.4f", plain_nan(r.loss))});
  else parts.push_back({0, strf("avg loss %.4f", smoothed_loss), Style::bold});
  if (!std::isnan(r.val_loss)) parts.push_back({1, strf("val %.4f", r.val_loss), Style::bold});
  parts.push_back({5, strf("norm %.2f", plain_nan(r.grad_norm))});
  parts.push_back({7, strf("lr %.1e", r.lr)});
  parts.push_back({4, strf("%.1f ms", r.step_ms)});
  parts.push_back({3, grouped(std::llround(r.tokens_per_sec)) + " tok/s"});
  if (r.mfu >= 0) parts.push_back({2, strf("mfu %.1f%%", 100 * r.mfu)});
  parts.push_back({6, grouped(std::llround(r.peak_mib)) + " MiB"});
  if (r.exposed_gather_ms >= 0)
    parts.push_back({8, strf("exposed %.1f + %.1f ms", r.exposed_gather_ms, r.exposed_reduce_ms)});
  if (seconds_left >= 0) parts.push_back({1, "left " + duration_text(seconds_left)});
  // Without the last column, in which some terminals wrap.
  const size_t room = size_t(std::max(columns - 1, 1));
  int spare = 8;
  while (spare > 0 && width(parts, spare, 1) > room) spare--;
  if (width(parts, spare, 1) <= room) return joined(parts, spare, " ", terminal::out);
  for (Part& p : parts) p.style = Style::plain;
  return joined(parts, spare, " ", terminal::out).substr(0, room);
}

nlohmann::json step_json(const StepRecord& r) {
  // NaN and infinity become null: JSON has no words for them.
  nlohmann::json j = {{"step", r.step},
                      {"loss", r.loss},
                      {"tokens_per_sec", r.tokens_per_sec},
                      {"grad_norm", r.grad_norm},
                      {"lr", r.lr},
                      {"timestamp", now_iso8601()},
                      {"step_ms", r.step_ms},
                      {"peak_mib", r.peak_mib},
                      {"mfu", r.mfu >= 0 ? nlohmann::json(r.mfu) : nlohmann::json()}};
  if (r.exposed_gather_ms >= 0) j["exposed_gather_ms"] = r.exposed_gather_ms;
  if (r.exposed_reduce_ms >= 0) j["exposed_reduce_ms"] = r.exposed_reduce_ms;
  if (!r.ended.empty()) j["ended"] = r.ended;
  if (r.more.is_object()) j.update(r.more);
  if (!std::isnan(r.val_loss)) j["val_loss"] = r.val_loss;
  return j;
}

void check_log(const std::string& path) {
  struct stat s;
  if (::stat(path.c_str(), &s) != 0) return;
  REQUIRE_USER(S_ISREG(s.st_mode), "--log %s: not a regular file; choose another", path.c_str());
  if (s.st_size == 0) return;
  // A header has some thousand bytes, and a hundred for each rank. What has more before its first line ends is not read
  // to its end.
  std::FILE* file = std::fopen(path.c_str(), "r");
  REQUIRE_USER(file, "--log %s cannot be read: %s", path.c_str(), std::strerror(errno));
  std::string line(16 << 20, 0);
  line.resize(std::fread(&line[0], 1, line.size(), file));
  std::fclose(file);
  line.resize(std::min(line.find('\n'), line.size()));
  const nlohmann::json header = nlohmann::json::parse(line, nullptr, false);
  REQUIRE_USER(header.is_object() && header.contains("command") && header.contains("commit"),
               "--log %s: not a training log, so it is not overwritten; remove it or choose another file",
               path.c_str());
}

namespace {

// Of this run alone: two that write to one file would destroy each other's lines.
std::unique_ptr<files::File> open_log(const std::string& path) {
  check_log(path);
  const int fd = ::open(path.c_str(), O_CREAT | O_APPEND | O_RDWR | O_NONBLOCK | O_CLOEXEC, 0666);
  REQUIRE_USER(fd >= 0, "--log %s cannot be written: %s", path.c_str(), std::strerror(errno));
  auto file = std::make_unique<files::File>(fd, path);
  REQUIRE_USER(::flock(fd, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK,
               "--log %s: another run is writing to it; give each run a log of its own", path.c_str());
  return file;
}

// The bytes of its whole lines: a run that was killed may have left half of another.
int64_t whole_lines(const files::File& file) {
  constexpr int64_t most = 1 << 16;
  char piece[most];
  for (int64_t end = files::size_of(file); end > 0;) {
    const int64_t n = std::min(most, end);
    files::read_at(file, piece, n, end -= n);
    for (int64_t i = n; i > 0; i--)
      if (piece[i - 1] == '\n') return end + i;
  }
  return 0;
}

}  // namespace

Telemetry::Telemetry(const TelemetryOptions& o, const nlohmann::json& header)
    : o_(o), redraws_(o.lines == Lines::live && terminal::is_watched(terminal::out)) {
  if (!o.log.empty()) {
    file_ = open_log(o.log);
    try {
      bytes_ = o.append ? whole_lines(*file_) : 0;
      files::cut(file_.get(), bytes_);
      // The command line is as it was typed, in whatever encoding.
      const std::string text = header.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
      files::append_whole(file_.get(), text + "\n", &bytes_);
    } catch (const Error& e) { throw UsageError(strf("--log: %s", e.what())); }
  }
  // Its old files are removed by whoever has the log.
  if (!o.tensorboard.empty())
    events_ = std::make_unique<EventFile>(
        o.tensorboard, o.append ? EventFile::Begin::behind_it : EventFile::Begin::anew, o.first_step);
}

Telemetry::~Telemetry() {
  if (live_) std::printf("\n");
  std::fflush(stdout);
}

// By the clock, so that validations and saves count. The first step warms caches and would spoil the estimate.
double Telemetry::seconds_left(int64_t step) {
  const auto now = Clock::now();
  if (first_ == 0) first_ = step, first_ended_ = now;
  if (step == first_) return -1;
  return std::chrono::duration<double>(now - first_ended_).count() / double(step - first_) *
         double(o_.total_steps - step);
}

// The mean of some twenty steps, the latest weighing most.
double Telemetry::smoothed(double loss) {
  constexpr double keeps = 0.95;
  if (!std::isfinite(loss)) return loss;
  loss_sum_ = keeps * loss_sum_ + (1 - keeps) * loss, loss_weight_ = keeps * loss_weight_ + (1 - keeps);
  return loss_sum_ / loss_weight_;
}

void Telemetry::step(const StepRecord& r) {
  const double left = seconds_left(r.step), average = smoothed(r.loss);
  const bool due = is_due(r, o_.total_steps, o_.log_every);
  if (redraws_) redraw(r, left, average);
  else if (due) std::printf("%s\n", step_line(r, o_.total_steps, left).c_str()), std::fflush(stdout);
  if (due) record(step_json(r)), add_event(r);
}

void Telemetry::add_event(const StepRecord& r) {
  if (!events_) return;
  try {
    events_->add(r);
    written(&events_outlet_);
  } catch (const Error& e) { missing(&events_outlet_, e); }
}

// Rewritten in place, twenty times a second at most; what is worth keeping stays, with its own loss: the ends, each
// validation and each tenth of the run.
void Telemetry::redraw(const StepRecord& r, double seconds_left, double average) {
  const int64_t tenth = std::max<int64_t>(1, o_.total_steps / 10);
  const bool keep =
      r.step == first_ || r.step >= o_.total_steps || r.is_last || !std::isnan(r.val_loss) || r.step % tenth == 0;
  const auto now = Clock::now();
  if (!keep && live_ && now - drawn_ < std::chrono::milliseconds(50)) return;
  const std::string line =
      live_line(r, o_.total_steps, seconds_left, keep ? std::nan("") : average, terminal::columns());
  std::printf("%s%s%s", terminal::clear_line(terminal::out), line.c_str(), keep ? "\n" : "");
  std::fflush(stdout);
  live_ = !keep, drawn_ = now;
}

void Telemetry::record(const nlohmann::json& j) {
  if (!file_) return;
  try {
    files::append_whole(file_.get(), j.dump() + "\n", &bytes_);
    written(&log_outlet_);
  } catch (const Error& e) { missing(&log_outlet_, e); }
}

void Telemetry::missing(Outlet* to, const Error& e) {
  to->in_a_row = 0;
  if (!std::exchange(to->fails, true))
    note(strf("warning: --%s: %s from here on are missing: %s; training continues", to->option, to->pieces, e.what()));
}

// On a disk that is all but full a short piece may fit between others that do not.
void Telemetry::written(Outlet* to) {
  constexpr int enough = 10;
  if (!to->fails || ++to->in_a_row < enough) return;
  to->fails = false;
  note(strf("--%s: %s are written again", to->option, to->pieces));
}

void Telemetry::note(const std::string& line) {
  std::printf("%s%s\n", live_ ? terminal::clear_line(terminal::out) : "",
              terminal::with_colours(terminal::out, line).c_str());
  live_ = false;
  std::fflush(stdout);
}
