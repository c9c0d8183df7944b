// What ran when: the currency of profiles and traces. Marks make spans out of events (device.h), CUPTI's records are
// spans of kernels and copies (activity.h), and an estimate makes them without running anything
// (lib/program/estimate.h). lib/program/trace.h writes them to a file.
#pragma once

#include <cstdint>
#include <string>

struct Span {
  enum Lane { compute, gather, reduce, other };  // the stream; other: none of the program's, as NCCL may use
  enum Kind { operation, kernel, nccl_kernel, collective, copy, clear, wait, slot };
  Lane lane = compute;
  Kind kind = operation;
  std::string name;
  double from = 0, to = 0;  // seconds; all spans of a step begin to count at the same time
  std::string unit = {};    // whose parameters are gathered here, or whose gradients are reduced
  std::string mark = {};    // the operation that a kernel belongs to, where that is not the name; or the slot
  int64_t bytes = 0;        // copied, or of the buffer that a collective gathers or reduces
  uint32_t stream = 0;      // its number, where the lane is other
};
