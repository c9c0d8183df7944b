// Rows of results for the tests of what reads them: a sweep over depth on two GPUs, with PyTorch and a report beside.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "lib/device/error.h"
#include "lib/program/json.h"
#include "test/catch.h"
#include "test/errors.h"
#include "test/scratch.h"

// A file of rows, a line each.
inline std::string rows_in(const ScratchDirectory& dir, const std::string& name,
                           const std::vector<nlohmann::json>& rows) {
  std::string text;
  for (const nlohmann::json& row : rows) text += row.dump() + "\n";
  return dir.file(name, text);
}

inline nlohmann::json result_row(int number, const std::string& depth, const std::string& who, double ms, double mib) {
  return {{"sweep", "depth"},
          {"number", number},
          {"row", depth},
          {"who", who},
          {"labels", nlohmann::json::array({nlohmann::json::array({"depth", depth})})},
          {"ranks", 2},
          {"hardware", {{"name", "NVIDIA H200"}, {"gpus", 2}}},
          {"commit", "abc1234"},
          {"date", "2026-11-22T08:00:00.000Z"},
          {"result", {{"step_ms", ms}, {"step_ms_min", ms - 1}, {"step_ms_max", ms + 2}, {"peak_mib", mib}}}};
}

// Depth 4 measured by all, 32 out of memory for the report and for PyTorch, 64 planned.
inline std::vector<nlohmann::json> depth_rows() {
  using nlohmann::json;
  json four = result_row(1, "4", "fsdp.cu", 350.25, 11078), peer = result_row(1, "4", "PyTorch", 375.5, 12823);
  four["theirs"] = {{"peak_mib", 14550}, {"step_ms", 1119}}, four["theirs_on"] = "2 x A100 SXM";
  four["result"].update({{"planned_peak_mib", 11077.9}, {"mfu", 0.521}, {"tokens_per_sec", 187112.2}});
  json deep = result_row(2, "32", "fsdp.cu", 2521.64, 91204), failed = result_row(2, "32", "PyTorch", 0, 0);
  deep["theirs"] = {{"text", "OOM bwd"}}, deep["theirs_on"] = "2 x A100 SXM";
  failed.erase("result"), failed["error"] = "OOM: tried to allocate 2.00 GiB";
  json planned = result_row(3, "64", "fsdp.cu", 5100.5, 61000.4);
  planned["planned"] = true, planned["no_peer"] = "needs 8 GPUs", planned["ranks"] = 8;
  planned["result"].erase("step_ms_min"), planned["result"].erase("step_ms_max");
  return {planned, peer, four, failed, deep};
}
