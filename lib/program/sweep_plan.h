// What a row of a sweep should take, from the plan: nothing runs, and no GPU is needed.
//
//   planned(words_of("--preset rope --depth 8"), 2, "h200").seconds     // of a step on two GPUs
#pragma once

#include <cstdint>
#include <string>

#include "lib/program/json.h"
#include "lib/program/rows.h"

struct Planned {
  double seconds = 0;  // of a step; 0 where nothing is known of it
  double init_mib = 0, before_step_mib = 0, peak_mib = 0;
  double tokens_per_sec = 0;  // of all GPUs
  int communicators = 0;      // over NCCL
  double mfu = 0;
  nlohmann::json config = nlohmann::json::object();  // all options, as they were resolved
};

// options: of ./train. chip: as --gpu has it; "": on a CPU, of whose time nothing is known, as with --device cpu.
// Throws UsageError for options that ./train would refuse.
Planned planned(const Words& options, int64_t ranks, const std::string& chip);

// Its config alone.
nlohmann::json resolved(const Words& options, int64_t ranks, const std::string& chip);

// Whether it has room on that chip; not if ./train would refuse it.
bool fits_on(const Words& options, int64_t ranks, const std::string& chip);

// Its matmul and attention FLOPs a token by three conventions, over those that our MFU counts (attention's causal
// half): attention counted in full, as in PaLM and torchtitan; and as simple_pytorch's main.py counts, which leaves a
// factor of dim out of the MLP's term and the groups of heads out of attention's.
struct FlopsAs {
  double full, simple_pytorch;
};
FlopsAs flops_as_others_count(const nlohmann::json& config);
