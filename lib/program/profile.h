// What --profile and --trace ask of a run's last step: its marks, with CUPTI its kernels and copies, and how the GPU
// was while the steps ran. Rank 0 asks CUPTI, and reports; the others' streams are marked as rank 0's are, so that all
// of them run alike. Without either option nothing is done.
//
//   check_profile(&r);                                   // rank 0, before the device is opened
//   StepProfiler profiler(job);
//   for (...) {
//     profiler.begin(step, first);
//     issue(step);
//     profiler.end(step);                                // of the last step: waits for it
//   }
//   profiler.tell(stop);                                 // behind the lines of all steps: reports, writes the file
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lib/device/activity.h"
#include "lib/device/device.h"
#include "lib/device/nvml.h"
#include "lib/program/plan.h"
#include "lib/program/report.h"
#include "lib/program/start.h"
#include "lib/program/trace.h"

// Opens CUPTI, or says in the run's notices why it cannot be asked. Throws UsageError where that leaves nothing to see.
void check_profile(Run* r);

class StepProfiler {
 public:
  explicit StepProfiler(const Job& job);
  void begin(int64_t step, int64_t first);  // of this run
  void end(int64_t step);
  void tell(const std::string& stop);                    // why the run ended before its last step, or nothing
  const std::string& failed() const { return failed_; }  // why the trace was not written, at the rank that writes it

 private:
  void report();
  void write();

  const Job& job_;
  const bool asked_, speaks_;
  bool recording_ = false;  // CUPTI is
  // Of the last step, once it has ended: marks, how long the host took, and what CUPTI has.
  bool ended_ = false;
  Device::Profile marks_;
  double host_ms_ = 0;
  std::vector<Span> ran_;
  std::string failed_;
  std::chrono::steady_clock::time_point from_;
  double sampled_from_ = 0;
  std::unique_ptr<GpuSampler> sampler_;
  std::optional<GpuSummary> gpu_;
};

// The numbers that CUPTI has for the device's streams.
struct StreamNumbers {
  uint32_t compute, gather, reduce;
};
// CUPTI's records of the step that was profiled, as spans with its marks and units; in seconds since the profile began.
// What the host issued before or after the step is left out; a record of which that is not known belongs to it from the
// first one on that does.
std::vector<Span> spans_of(const std::vector<activity::Record>& records, const Device::Profile& profile,
                           const StreamNumbers& streams);
// By name, those that take longest first: of kernels, or of copies and clears.
std::vector<StepProfile::Row> rows_of(const std::vector<Span>& spans, bool kernels);
// Where a step's time went, by CUPTI's spans: products, attention, what is bound by memory, and waiting, which add up
// to the time from the first that computes to the end of the last. What runs beside an earlier one, as in a graph,
// counts from that one's end. A graph's streams are not told apart, so its casts around collectives count too. None
// without spans.
std::vector<StepProfile::Share> shares_of(const std::vector<Span>& ran, const std::optional<Limits>& limits);
// NCCL's part of the time of kernels; negative if there are none.
double nccl_share(const std::vector<Span>& spans);
