// What the run says: a line a step for people, JSON lines for programs.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "lib/program/finding.h"
#include "lib/program/format.h"
#include "nlohmann/json.hpp"

struct StepRecord {
  int64_t step;                                         // counts from 1
  double loss, grad_norm, lr, step_ms, tokens_per_sec;  // tokens of all ranks
  double peak_mib;
  double mfu;                                   // 0..1; negative: unknown chip
  double exposed_gather_ms, exposed_reduce_ms;  // negative: not measured
  double val_loss;                              // NaN: none at this step
  std::string ended = {};                       // when, if known, as the device came there: now_iso8601()'s
  nlohmann::json more = {};                     // an object: what else goes into the log
};

// Throws UsageError if --log may not write to that path: anything but a regular file; a file that is neither empty nor
// the log of a run, which begins with a header. Nothing is changed.
void check_log(const std::string& path);

// Rank 0 owns one. The terminal gets one live line (rewritten in place), anything else a plain line a step; the JSON
// file gets the header first, then an object a step, flushed each time; what cannot be written later is said once.
class Telemetry {
 public:
  // path empty: no file. append: behind what an earlier part of the run wrote; otherwise a log that is there is
  // replaced. Throws UsageError, before training starts, if it cannot be written and for what check_log refuses.
  Telemetry(const std::string& path, bool append, const nlohmann::json& header, int64_t total_steps, int64_t log_every);
  ~Telemetry();
  void step(const StepRecord& r);
  void record(const nlohmann::json& j);  // another line of the file
  void note(const std::string& line);    // a line for people; the live line goes on below it
  void tell(const Finding& f) { note(f.line), record(f.record); }

 private:
  FILE* file_ = nullptr;
  std::string path_;
  bool terminal_;
  bool live_ = false;  // the cursor stands on a live line
  bool full_ = false;  // a line could not be written, and that was said
  int64_t total_, every_;
  double ms_sum_ = 0;  // of the timed steps, for the time left
  int64_t timed_ = 0;
};

// Whether --log-every says this one: the first, the last and what has a validation always.
bool is_due(const StepRecord& r, int64_t total_steps, int64_t log_every);
// The line of a step. live: to be rewritten in place on a terminal of 100 columns; what does not fit is left out.
std::string step_line(const StepRecord& r, int64_t total_steps, double seconds_left, bool live);
nlohmann::json step_json(const StepRecord& r);
// Whether people watch standard output. mpirun gives its ranks a terminal of their own: its own output is what counts.
bool stdout_is_terminal();

std::string now_iso8601();  // UTC, milliseconds
