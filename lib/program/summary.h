// What runs were like, beside each other: speed, loss, memory, and the speed-up over one of them.
//
//   ./bench --summary results/class-2gpu.jsonl --over ddp_fp32
//   ./bench --summary a.jsonl b.jsonl            // logs of ./train --log
//
// Reads training logs (a header and a line a step), rows of results, and lines of peers/torch_fsdp.py; which one a file
// is, its content says.
#pragma once

#include <string>
#include <vector>

#include "lib/program/json.h"
#include "lib/program/rows.h"

// {"over": NAME, "runs": [{"name", "who", "median_tokens_per_sec", "step_ms", "final_loss", "best_loss",
//   "tail_loss", "tail_loss_deviation" (mean and standard deviation of the last tenth of the steps), "peak_mib",
//   "speed_up" | "error"}, ...], "recommendation": TEXT}
// What is not known of a run is not there; nor is the speed-up of what was planned over what was measured, or the other
// way round. A loss that is not a number is "NaN", and so is what follows from it.
//
// over: the run that speed-ups are over, "NAME" or "NAME, WHO"; "": ddp_fp32 where there is one, else the first good
// one, of those that were measured if any was. Of a log the steps from the fifth on count, as in a sweep; the first
// alone is left out of fewer than eight. Throws UsageError for a file that is none of these, and for a name that is not
// there, which lists those that are.
nlohmann::json summarize(const Words& paths, const std::string& over);

std::string summary_markdown(const nlohmann::json& summary);

// Which run to choose, and the figures it follows from: of those that ran, need no more memory than 80 GiB or the GPU
// that they ran on has, and whose loss at the end is not above the baseline's by more than its scatter from step to
// step, the fastest. A second sentence names the leanest where that is another one.
std::string recommendation(const nlohmann::json& summary);

// What --summary prints: the table and the recommendation, and the JSON into `json_path` if that is not empty. Returns
// the exit status. Throws UsageError.
int print_summary(const Words& paths, const std::string& over, const std::string& json_path);
