// A step as a file for ui.perfetto.dev or chrome://tracing: what ran on which stream and when, and, of a planned step,
// the memory that it takes and what its slots hold. The format is Chrome's trace events, one on a line.
//
//   {"displayTimeUnit": "ms", "otherData": {"format": "fsdp.cu trace", "version": 1, ...}, "traceEvents": [
//   {"ph": "M", ...}, ... {"ph": "X", ...}, ... {"ph": "C", ...}, ...
//   ]}
//
//   otherData       "source": "cupti", every kernel and copy; "marks", events around operations, gathers and
//                   reductions; "plan", the estimate, nothing has run. "command", "commit", "date", "ranks", "rank",
//                   "chip". "step", its number (not in a plan); "begin_us" and "end_us", from where to where on the
//                   compute stream; "step_ms". In a plan "before_step_mib", "live_peak_mib" (the largest sum of the
//                   counters) and "planned_peak_mib" (the arena).
//   "ph": "M"       names of processes (pid) and tracks (tid), as below. Not all are in every file.
//   "ph": "X"       a span: "name", "cat", "ts" and "dur" in microseconds, from the file's first span on. "args":
//                   "kind", one of operation, kernel, nccl_kernel, collective, copy, clear, wait, slot; where they are
//                   known "unit", whose parameters are gathered or gradients reduced, "mark", the operation that a
//                   kernel belongs to, or the slot, and "bytes".
//   "ph": "C"       "memory, MiB" at a "ts"; "args": MiB for each purpose (name_of(Purpose))
//
//   pid  process                        tid  track            cat
//   1    streams                        1    compute          compute
//                                       2    gathers          gather
//                                       3    reductions       reduce
//                                       100+ stream N         other        none of the program's
//   2    NCCL and copy engines          1    NCCL kernels     nccl         the same records as in process 1, by what
//                                       2    copy engines     copy         runs them; with CUPTI alone
//   3    host                           1    marks            host         as they are issued; spans lie in each other
//   4    memory                                               memory       the counters
//   5    slots                          1...  a slot's name   slot         the unit that it holds, from the gather to
//                                                                          the release, then "UNIT, resident", until
//                                                                          another is gathered into it; or whose
//                                                                          gradient, until it is reduced. In a plan
//
// On a track of processes 1, 2 and 5 no two spans overlap: what would goes to a track of the same name with a number,
// whose tid is higher by 1000, 2000, ...
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "nlohmann/json_fwd.hpp"

#include "lib/device/memory.h"
#include "lib/device/span.h"
#include "lib/program/estimate.h"

struct Trace {
  const char* source = "";
  double begin = 0, end = 0;  // of the step; seconds, as the spans count them
  std::vector<Span> device, host;
  int64_t before_step[purposes] = {};  // bytes
  std::vector<MemoryChange> memory;
  std::vector<Span> slots;
  int64_t live_peak = 0, arena = 0;  // of the plan, bytes
};

// Throws UsageError if --trace may not write there: anything but a regular file, a file that is neither empty nor a
// trace, a directory that takes no files. Leaves nothing.
void check_trace(const std::string& path);
// about: for otherData. What is there is replaced when the file is complete. Throws Error.
void write_trace(const std::string& path, const Trace& trace, const nlohmann::json& about);
