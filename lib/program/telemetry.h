// What the run says: a line a step for people, JSON lines for programs.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "lib/program/files.h"
#include "lib/program/finding.h"
#include "lib/program/format.h"
#include "lib/program/json.h"
#include "lib/program/tensorboard.h"

struct StepRecord {
  int64_t step;                                         // counts from 1
  double loss, grad_norm, lr, step_ms, tokens_per_sec;  // tokens of all ranks
  double peak_mib;
  double mfu;                                   // 0..1; negative: unknown chip
  double exposed_gather_ms, exposed_reduce_ms;  // negative: not measured
  double val_loss;                              // NaN: none at this step
  std::string ended = {};                       // when, if known, as the device came there: now_iso8601()'s
  nlohmann::json more = {};                     // an object: what else goes into the log
  bool is_last = false;                         // the run ends here, before its last step
};

// Throws UsageError if --log may not write to that path: anything but a regular file; a file that is neither empty nor
// the log of a run, which begins with a header. Nothing is changed.
void check_log(const std::string& path);

enum class Lines { live, plain };
struct TelemetryOptions {
  std::string log = "";          // a file; empty: none
  std::string tensorboard = "";  // a directory; empty: none
  bool append = false;  // behind the whole lines of an earlier part of the run; otherwise what is there is replaced
  int64_t first_step = 1, total_steps = 1, log_every = 1;
  Lines lines = Lines::live;  // where people watch standard output; plain anywhere else
};

// Rank 0 owns one. The terminal gets one live line (rewritten in place), anything else a plain line a step; the JSON
// file gets the header first, then an object a step, flushed each time, TensorBoard's an event. When
// something cannot be written, and when it can again, is said.
class Telemetry {
 public:
  // Throws UsageError, before training starts, if a file cannot be written, for what check_log refuses, and if another
  // run is writing to the log (where its file system has locks); nothing is changed then.
  Telemetry(const TelemetryOptions& o, const nlohmann::json& header);
  ~Telemetry();
  void step(const StepRecord& r);
  void record(const nlohmann::json& j);  // another line of the file
  void note(const std::string& line);    // a line for people; the live line goes on below it
  void tell(const Finding& f) { note(f.line), record(f.record); }

 private:
  using Clock = std::chrono::steady_clock;
  double seconds_left(int64_t step);  // negative: not known yet
  double smoothed(double loss);
  void add_event(const StepRecord& r);
  void redraw(const StepRecord& r, double seconds_left, double average);

  const TelemetryOptions o_;
  std::unique_ptr<files::File> file_;  // locked
  int64_t bytes_ = 0;                  // in it
  std::unique_ptr<EventFile> events_;
  bool redraws_;
  bool live_ = false;  // the cursor stands on a live line
  Clock::time_point drawn_ = {};
  struct Outlet {
    const char *option, *pieces;
    bool fails = false;  // that was said, and since then so many were written in a row
    int in_a_row = 0;
  };
  void missing(Outlet* to, const Error& e);
  void written(Outlet* to);
  Outlet log_outlet_ = {"log", "lines"}, events_outlet_ = {"tensorboard", "events"};
  int64_t first_ = 0;  // step that was told here
  Clock::time_point first_ended_ = {};
  double loss_sum_ = 0, loss_weight_ = 0;  // of the smoothed loss
};

// Whether --log-every says this one: the first, the last, where the run stops early too, and what has a validation.
bool is_due(const StepRecord& r, int64_t total_steps, int64_t log_every);
// The line of a step. seconds_left: of the run; negative: not known.
std::string step_line(const StepRecord& r, int64_t total_steps, double seconds_left);
// The same for a terminal of so many columns: what does not fit is left out, or cut. smoothed_loss is shown in place of
// the step's own unless it is NaN.
std::string live_line(const StepRecord& r, int64_t total_steps, double seconds_left, double smoothed_loss, int columns);
nlohmann::json step_json(const StepRecord& r);
std::string now_iso8601();  // UTC, milliseconds
