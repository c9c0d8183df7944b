// What the run says: a line a step for people, JSON lines for programs, the chips' peaks for MFU.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

#include "nlohmann/json.hpp"

// Dense bf16 tensor-core peak by the datasheet, TFLOP/s; 0 if the chip is not known ("unknown chip").
double peak_bf16_tflops(const std::string& device_name);

struct StepRecord {
  int64_t step;                                         // counts from 1
  double loss, grad_norm, lr, step_ms, tokens_per_sec;  // tokens of all ranks
  double peak_mib;
  double mfu;                                   // 0..1; negative: unknown chip
  double exposed_gather_ms, exposed_reduce_ms;  // negative: not measured
  double val_loss;                              // NaN: none at this step
  nlohmann::json more = {};                     // an object: what else goes into the log
};

// Rank 0 owns one. The terminal gets one live line (rewritten in place), anything else a plain line a step; the JSON
// file gets the header first, then an object a step, flushed each time; what cannot be written later is said once.
class Telemetry {
 public:
  // path empty: no file. append: behind what an earlier part of the run wrote. Throws UsageError if it cannot be
  // written (before training starts).
  Telemetry(const std::string& path, bool append, const nlohmann::json& header, int64_t total_steps, int64_t log_every);
  ~Telemetry();
  void step(const StepRecord& r);
  void record(const nlohmann::json& j);  // another line of the file
  void note(const std::string& line);    // a line for people; the live line goes on below it

 private:
  FILE* file_ = nullptr;
  bool terminal_;
  bool live_ = false;  // the cursor stands on a live line
  bool full_ = false;  // a line could not be written, and that was said
  int64_t total_, every_;
  double ms_sum_ = 0;  // of the timed steps, for the time left
  int64_t timed_ = 0;
};

// The line of a step. live: to be rewritten in place on a terminal of 100 columns; what does not fit is left out.
std::string step_line(const StepRecord& r, int64_t total_steps, double seconds_left, bool live);
nlohmann::json step_json(const StepRecord& r);
// Whether people watch standard output. mpirun gives its ranks a terminal of their own: its own output is what counts.
bool stdout_is_terminal();

std::string now_iso8601();            // UTC, milliseconds
std::string count_text(double n);     // 973.2 M
std::string mib_text(int64_t bytes);  // 17,203
inline double mib(int64_t bytes) { return double(bytes) / (1 << 20); }
std::string grouped(int64_t n);             // 101,123
std::string duration_text(double seconds);  // 1m32s
