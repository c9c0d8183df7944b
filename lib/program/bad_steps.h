// Steps whose loss or gradient norm is not finite, which AdamW leaves out on all ranks (ops.h): what is said of one,
// and whether the run goes on (--on-nan).
//
//   BadSteps bad(run);
//   std::string end = bad.take(step, scalars, fsdp.units(), sums, replay, note);  // collective
#pragma once

#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "fsdp.h"
#include "lib/program/run.h"

// Of this rank's shards: the unit whose gradient is the first in the backward pass that is not finite; -1: none.
// sums (units): Fsdp::unit_sums.
int first_bad_unit(const std::vector<Unit>& units, const double* sums);

// Of the forward pass: the first module of all ranks whose output was flagged; module -1: none. Collective.
struct BadOutput {
  int module = -1, rank = 0;
};
BadOutput first_on_any_rank(const int32_t* flags, int modules);
std::string bad_output_text(const ModelConfig& c, const BadOutput& first, const std::string& unit);

class BadSteps {
 public:
  explicit BadSteps(const Run& r) : r_(r) {}
  // For every step, in order, on all ranks. Collective where the step is bad, which it is on all ranks or none. Returns
  // what ends the run, the same on all ranks, or nothing: then `note` has been told on rank 0 if the step was left out.
  // replay: says which output was the first that was bad, or nothing (replay.h); collective. Called where the step is
  // bad and the weights are still those that it had.
  std::string take(int64_t step, const StepScalars& of, const std::vector<Unit>& units, const double* sums,
                   const std::function<std::string()>& replay, const std::function<void(const std::string&)>& note);
  int64_t skipped() const { return skipped_; }  // of this run
  bool amid() const { return in_a_row_ > 0; }   // was the latest step skipped?
  // For every step that is not the run's last: does --save-every save it? One that is not finite it does not, for the
  // weights may be what is wrong: a save waits for a step that is, which `note` is told on rank 0, once. norm2: waits
  // for the step and gives its StepScalars::norm2; called only if a save is due.
  bool save_is_due(int64_t step, const std::function<double()>& norm2,
                   const std::function<void(const std::string&)>& note);

 private:
  const Run& r_;
  int64_t in_a_row_ = 0, skipped_ = 0;
  bool save_waits_ = false;
};
