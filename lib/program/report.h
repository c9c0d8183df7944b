// What a run says beside its steps: tables for people, JSON objects for the log.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "nlohmann/json_fwd.hpp"

#include "lib/device/nvml.h"
#include "lib/program/run.h"
#include "lib/program/telemetry.h"
#include "model.h"

std::string commit();    // of the source tree that was built
std::string versions();  // of it, CUDA, NCCL and MPI, a line each
// The same as an object, and the newest CUDA that the driver can do; null: this build or this machine has none.
nlohmann::json versions_json();
// gpus: that are used, or that are here.
nlohmann::json hardware_json(const Device& dev, int gpus);
int cores();  // of this machine

// --plan's tables, and --show-params'. world_size: ranks that the parameters are sharded for.
std::string size_text(const ModelConfig& c);  // "973.2 M parameters", "973.2 M parameters (134.2 M frozen)"
std::string memory_table(const MemoryReport& m, int world_size);
std::string units_text(const Run& r, int world_size);  // neighbours that are alike in one line
std::string parameters_text(const Run& r, int world_size);
std::string presets_text();  // --list-presets
// --show-schedule: the choices that are no event of a step, and its events in order.
std::string choices_text(const Run& r, Transport transport);
std::string schedule_text(const std::vector<Issued>& issued, const ModelConfig& c, int world_size);

// How the model is sharded, in the options' words and in those of PyTorch's FSDP: one line.
std::string fsdp_text(const Run& r, int world_size);
// The lines before the first step. estimated_ms, here and below: of a step; negative if nothing is known of the chip.
std::string opening_text(const Run& r, const Device& dev, const World& world, Transport transport,
                         const std::string& data, double estimated_ms);
// The log's first line. gpus: those that the ranks compute on.
nlohmann::json header(const Run& r, const Device& dev, const World& world, Transport transport, int gpus,
                      double estimated_ms, const std::string& command);

// --nsa-stats: an object a block. sums, maxima: on the host, as many as there are kernels.
nlohmann::json stats_json(const NsaSums* sums, const NsaMaxima* maxima, const std::vector<NsaKernels>& kernels);
// --graph 1, once.
void report_graph(const Graph::Nodes& n, Telemetry* telemetry);
// --profile. host_ms: how long the host took to issue the step. Where that is as long as the step, the device waited
// for it.
struct StepProfile {
  struct Row {
    std::string name;
    double ms = 0;
    int64_t count = 0, bytes = 0;
  };
  struct Share {
    const char *name, *key;  // for people; in the log, before _ms and _limit_ms
    double ms = 0;
    double limit_ms = -1;  // the least that the chip allows; negative: nothing is known of it
  };
  int64_t step = 0;
  std::vector<std::pair<std::string, double>> marks;  // milliseconds by name, on the compute stream
  double host_ms = 0;
  std::vector<Row> kernels, copies;    // by name, those that take longest first; empty without CUPTI
  std::vector<Share> shares = {};      // of the step; empty without CUPTI
  double nccl_share = -1;              // of the kernels' time; negative without CUPTI
  std::optional<GpuSummary> gpu = {};  // while the run's steps ran
};
void report_profile(const StepProfile& p, Telemetry* telemetry);
