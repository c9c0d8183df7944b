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

double causal_pairs(int64_t T) { return double(T) * double(T) / 2; }

void add_tflops(json* result, double pairs, int64_t D, int64_t DV) {
  const double forward = 2 * pairs * double(D + DV), backward = 2 * pairs * double(3 * D + 2 * DV);
  const auto rate = [&](double flops, const char* ms) { return flops / result->at(ms).get<double>() / 1e9; };
  (*result)["forward_tflops"] = rate(forward, "forward_ms");
  (*result)["forward_backward_tflops"] = rate(forward + backward, "forward_backward_ms");
}

bool time_peers_kernels(const RowFile& rows, int64_t timeout_s) {
  const std::vector<json> ours = read_json_lines(rows.path);
  json shapes = json::array();
  for (const json& row : ours) {
    const json& a = row.at("attention");
    const bool causal = !a.contains("window") && !a.contains("compressed");
    if (causal && std::find(shapes.begin(), shapes.end(), a) == shapes.end()) shapes.push_back(a);
  }
  const std::string files = strf("build/bench/kernels-%d-peers", int(getpid())), list = files + ".json",
                    output = files + ".log";
  std::ofstream(list) << shapes.dump() << "\n";
  const std::string failed = run({"python3", "peers/attention.py", list}, output, timeout_s);
  std::vector<json> theirs;
  for (json row : read_json_lines(output)) {
    if (!row.contains("attention")) continue;
    row["who"] = "PyTorch", row["hardware"] = ours.front().at("hardware");
    if (row.contains("result")) {
      const json& a = row["attention"];
      const int64_t B = a.at("B"), T = a.at("T"), H = a.at("H"), D = a.at("D");
      add_tflops(&row["result"], double(B * H) * causal_pairs(T), D, a.value("DV", D));
    }
    rows.append(row);
    theirs.push_back(row);
  }
  std::printf("\n%s", sweep_table(theirs).c_str());
  if (!failed.empty()) std::printf("PyTorch did not time all of its rows: %s\n", why(failed, output).c_str());
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
