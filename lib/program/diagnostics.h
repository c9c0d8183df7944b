// --diagnostics DIR: what the third report's trainer wrote beside its training, in the same files and
// columns, so that what reads those reads these. Rank 0 writes all but the heartbeats.
//
//   training_fsdp.csv           step,loss,lr,toks_per_s; no header
//   k_stats_fsdp.csv            step,k_mean,k_max,rows,pct_at_max: keys seen in the selected blocks
//   fallback_counters_fsdp.csv  step,nsa_fallback_names...,total_fallbacks: calls since step 1
//   heartbeat_rank{r}.jsonl     each rank's; msg: boot, progress, stall, throughput, gate_collapse, end
//   mem_fsdp_{boot,step1}       .txt for people, .json; and every --mem-dump-every steps
//   opt_state_fsdp_mb.txt       MiB of AdamW's moments on rank 0
//   dtypes_report_fsdp.txt, env.json: see audits.h
//
// A heartbeat's gpu_mem_reserved is the arena, gpu_mem_alloc what of it lives between steps, gpu_mem_peak the most that
// lives at one time; MiB.
//
// Statistics are over all layers, micro-batches and ranks. toks_per_s is all ranks' by the wall clock since the line
// before, as the report counts it: whatever the device waits for shows; the log's is the device's own.
//
// Without a directory nothing is written, and the terminal alone hears of stalls and anomalies.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "lib/comm/world.h"
#include "lib/program/anomalies.h"
#include "lib/program/files.h"
#include "lib/program/json.h"
#include "lib/program/run.h"
#include "lib/program/stall_watch.h"
#include "lib/program/telemetry.h"

// Throws UsageError if dir may not be that of a run: it is no directory, or has files with these names that no run
// wrote; with `appends`, CSV files whose columns are others. Nothing is changed. On rank 0.
void check_diagnostics(const std::string& dir, bool appends);
bool is_diagnostics_file(const std::string& name);  // one of the names above

// A file of lines. What cannot be written whole is not written at all; half a line that a killed program left is cut
// off.
class LineFile {
 public:
  explicit LineFile(const std::string& path);  // made if it is not there. Throws Error
  void add(const std::string& line);           // Throws Error
  void cut(int64_t bytes);                     // leaves so many; throws Error
  int64_t bytes() const { return bytes_; }

 private:
  std::unique_ptr<files::File> file_;
  int64_t bytes_;
};
// How many bytes of a CSV's text, with or without a header, are the rows before `step`: those behind were made by a run
// that came further than the checkpoint from which it is resumed, and are made again.
int64_t bytes_before(const std::string& text, int64_t step);

class Diagnostics {
 public:
  struct Step {
    const NsaSums* sums;      // of each layer; null: nobody counts
    const NsaMaxima* maxima;  // of each layer
    double fetch_seconds;     // the host's, to make the step's batches
  };
  // dev: planned. header: of the log, rank 0's. note: tells people a line; on rank 0, empty on others. world and dev
  // must outlive this. Makes the directory and what is known before the first step; without --resume removes what an
  // earlier run left there. Throws UsageError.
  Diagnostics(const Run& r, const World& world, const Device& dev, const nlohmann::json& header,
              std::function<void(const std::string&)> note);

  // From here on steps are awaited, this one first.
  void begin(int64_t first_step);
  // Once, behind the first step, which launches what each one launches; collective if there is a directory.
  void count_fallbacks(const std::vector<NsaKernels>& layers);
  // After each step. What cannot be written is said once, and training goes on.
  void step(const StepRecord& s, const Step& of);
  // No step is awaited any more. wrong: what ended the run before its last step; empty: nothing did.
  void end(const std::string& wrong = "");

 private:
  double seconds() const;  // since begin()
  void stalled(double seconds, int64_t step);
  void heartbeat(int64_t step, const char* message, const nlohmann::json& more);
  nlohmann::json progress(const StepRecord& s, const Step& of, const NsaStats* gates, double tokens_per_sec) const;
  void rows(const StepRecord& s, const NsaStats* gates, double tokens_per_sec);
  void dump_memory(const std::string& when);
  void start_files(const nlohmann::json& header);
  template <class F>
  void attempt(F f);  // to write

  const Run r_;
  const World& world_;
  const Device& dev_;
  const std::function<void(const std::string&)> note_;
  const std::string dir_;
  MemoryReport memory_ = {};
  std::unique_ptr<LineFile> training_, k_stats_, fallbacks_, heartbeat_;
  std::vector<int64_t> fallback_calls_;  // a step's, of all ranks and layers, by name and then all
  Anomalies anomalies_;
  std::chrono::steady_clock::time_point begun_ = {};
  int64_t first_ = 1, last_ = 0;  // steps: the run's first, the latest that was reported
  int64_t line_step_ = 0;         // of the latest line, and its time
  double line_seconds_ = 0;
  std::mutex mutex_;                 // of heartbeat_, which the stall watch writes too
  std::atomic<bool> failed_{false};  // something could not be written, and that was said
  std::unique_ptr<StallWatch> watch_;
};
