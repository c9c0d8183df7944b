#include "lib/program/telemetry.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <utility>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

#include "lib/device/error.h"

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

bool stdout_is_terminal() {
  if (!isatty(STDOUT_FILENO)) return false;
  // Open MPI connects a rank's standard output to a pseudo-terminal even when mpirun's goes to a file.
  if (!std::getenv("OMPI_COMM_WORLD_SIZE") && !std::getenv("PMI_SIZE")) return true;
  char target[256];
  const ssize_t n = readlink(strf("/proc/%d/fd/1", int(getppid())).c_str(), target, sizeof target - 1);
  if (n < 0) return false;
  target[n] = 0;
  return std::strncmp(target, "/dev/pts/", 9) == 0 || std::strncmp(target, "/dev/tty", 8) == 0;
}

bool is_due(const StepRecord& r, int64_t total_steps, int64_t log_every) {
  return r.step % log_every == 0 || r.step == 1 || r.step >= total_steps || !std::isnan(r.val_loss);
}

std::string step_line(const StepRecord& r, int64_t total_steps, double seconds_left, bool live) {
  // In the order they are printed; the live line drops the highest `spare` first.
  struct Part {
    int spare;
    std::string text;
  };
  std::vector<Part> parts;
  const std::string total = std::to_string(total_steps);
  parts.push_back({0, strf("step %*lld/%s", live ? 0 : int(std::max<size_t>(total.size(), 4)),
                           static_cast<long long>(r.step), total.c_str())});
  parts.push_back({0, strf("loss %.4f", r.loss)});
  if (!std::isnan(r.val_loss)) parts.push_back({1, strf("val %.4f", r.val_loss)});
  parts.push_back({4, strf("norm %.2f", r.grad_norm)});
  parts.push_back({5, strf("lr %.1e", r.lr)});
  parts.push_back({0, strf("%.1f ms", r.step_ms)});
  parts.push_back({0, grouped(std::llround(r.tokens_per_sec)) + " tok/s"});
  if (r.mfu >= 0) parts.push_back({0, strf(live ? "mfu %.1f%%" : "mfu %.1f %%", 100 * r.mfu)});
  parts.push_back({3, strf("%s%s MiB", live ? "" : "peak ", grouped(std::llround(r.peak_mib)).c_str())});
  if (r.exposed_gather_ms >= 0)
    parts.push_back({6, strf("exposed %.1f + %.1f ms", r.exposed_gather_ms, r.exposed_reduce_ms)});
  if (seconds_left >= 0) parts.push_back({2, "left " + duration_text(seconds_left)});
  const size_t gap = live ? 1 : 2, width = 99;
  for (int spare = 7;; --spare) {
    std::string line;
    for (const Part& p : parts)
      if (p.spare < spare) line += (line.empty() ? "" : std::string(gap, ' ')) + p.text;
    if (!live || line.size() <= width || spare == 1) return line;
  }
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

Telemetry::Telemetry(const std::string& path, bool append, const nlohmann::json& header, int64_t total_steps,
                     int64_t log_every)
    : path_(path), terminal_(stdout_is_terminal()), total_(total_steps), every_(log_every < 1 ? 1 : log_every) {
  if (path.empty()) return;
  check_log(path);
  file_ = std::fopen(path.c_str(), append ? "a+" : "w");
  REQUIRE_USER(file_, "--log %s cannot be written: %s", path.c_str(), std::strerror(errno));
  // A run that was killed, or whose disk was full, may have left half a line.
  const bool half = append && std::fseek(file_, -1, SEEK_END) == 0 && std::fgetc(file_) != '\n';
  std::fseek(file_, 0, SEEK_END);  // between reading and writing
  std::fprintf(file_, "%s%s\n", half ? "\n" : "", header.dump().c_str());
  const bool written = std::fflush(file_) == 0;
  const int why = errno;
  if (!written) {
    std::fclose(file_);
    throw UsageError(strf("--log %s cannot be written: %s", path.c_str(), std::strerror(why)));
  }
}

Telemetry::~Telemetry() {
  if (live_) std::printf("\n");
  std::fflush(stdout);
  if (file_) std::fclose(file_);
}

void Telemetry::step(const StepRecord& r) {
  // The first step warms caches and would spoil the estimate.
  if (r.step > 1) ms_sum_ += r.step_ms, ++timed_;
  const double left = timed_ ? ms_sum_ / double(timed_) / 1e3 * double(total_ - r.step) : -1;
  const bool last = r.step >= total_, validated = !std::isnan(r.val_loss);
  const bool due = is_due(r, total_, every_);
  if (terminal_) {
    // Rewritten in place; what is worth keeping stays: the ends, each validation and each tenth of the run.
    const int64_t tenth = std::max<int64_t>(1, total_ / 10);
    const bool keep = r.step == 1 || last || validated || r.step % tenth == 0;
    std::printf("\r\033[K%s%s", step_line(r, total_, left, true).c_str(), keep ? "\n" : "");
    live_ = !keep;
    std::fflush(stdout);
  } else if (due) {
    std::printf("%s\n", step_line(r, total_, left, false).c_str());
    std::fflush(stdout);
  }
  if (due) record(step_json(r));
}

void Telemetry::record(const nlohmann::json& j) {
  if (!file_) return;
  const bool written = std::fprintf(file_, "%s\n", j.dump().c_str()) > 0 && std::fflush(file_) == 0;
  if (!written && !std::exchange(full_, true))
    note(strf("--log %s: lines from here on are missing or incomplete: %s; training continues", path_.c_str(),
              std::strerror(errno)));
}

void Telemetry::note(const std::string& line) {
  std::printf("%s%s\n", live_ ? "\r\033[K" : "", line.c_str());
  live_ = false;
  std::fflush(stdout);
}
