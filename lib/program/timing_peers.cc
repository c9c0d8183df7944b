#include <algorithm>
#include <cstdio>
#include <fstream>
#include <utility>

#include <unistd.h>

#include "lib/device/error.h"
#include "lib/program/process.h"
#include "lib/program/tables.h"
#include "lib/program/timing.h"

using nlohmann::json;

bool time_peers_kernels(const RowFile& rows, int64_t timeout_s) {
  json shapes = json::array(), hardware;
  for (const json& row : read_json_lines(rows.path)) {
    const json& a = row.at("attention");
    const bool causal = !a.contains("window") && !a.contains("compressed");
    if (causal && std::find(shapes.begin(), shapes.end(), a) == shapes.end()) shapes.push_back(a);
    hardware = row.at("hardware");
  }
  const std::string files = strf("build/bench/kernels-%d-peers", int(getpid())), list = files + ".json",
                    output = files + ".log";
  std::ofstream(list) << shapes.dump() << "\n";
  const std::string failed = run({"python3", "peers/attention.py", list}, output, timeout_s);
  std::vector<json> theirs;
  for (json row : read_json_lines(output)) {
    if (!row.contains("attention")) continue;
    row["who"] = "PyTorch", row["hardware"] = hardware;
    rows.append(row);
    theirs.push_back(row);
  }
  std::printf("\n%s", sweep_table(theirs).c_str());
  if (!failed.empty()) {
    const std::string error = error_line(output);
    std::printf("PyTorch has not timed all of its rows: %s%s%s; see %s\n", failed.c_str(), error.empty() ? "" : ": ",
                error.c_str(), output.c_str());
  }
  std::remove(list.c_str());
  if (failed.empty()) std::remove(output.c_str());
  return failed.empty();
}

void keep_peers(const std::vector<json>& before, std::vector<json>* now) {
  const auto is_of = [](const json& row, const json& of) {
    return row.value("who", "") == "PyTorch" && row.at("attention") == of.at("attention");
  };
  const auto gpu = [](const json& row) { return row.value("/hardware/name"_json_pointer, ""); };
  const std::string here = now->empty() ? "" : gpu(now->front());
  for (const json& old : before)
    if (is_of(old, old) && gpu(old) == here &&
        std::none_of(now->begin(), now->end(), [&](const json& row) { return is_of(row, old); }))
      now->push_back(old);
}

std::vector<json> by_attention(std::vector<json> rows) {
  std::vector<json> sorted;
  for (json& row : rows) {
    if (row.is_null()) continue;
    const json attention = row.at("attention");
    for (json& other : rows)
      if (!other.is_null() && other.at("attention") == attention) sorted.push_back(std::exchange(other, nullptr));
  }
  return sorted;
}
