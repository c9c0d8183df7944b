// The parts of sweep_run.h: the file of rows, what is to run, ./train's rows and PyTorch's. Nothing else includes this.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lib/device/nvml.h"
#include "lib/program/json.h"
#include "lib/program/sweep_plan.h"
#include "lib/program/sweep_run.h"

namespace sweep_parts {

using nlohmann::json;

constexpr char ours[] = "fsdp.cu", theirs[] = "PyTorch";  // "who" of a row

// ---- sweep_file.cc
// Rows by sweep order; one for each row, who, variant and round. Written whole at each change.
struct ResultFile {
  std::string path;
  std::vector<json> rows;
  std::shared_ptr<DirectoryLock> lock = {};  // see lock_rows
  const json* find(const json& like) const;  // null: it is not there
  // The row that --continue keeps: a good one of the same command on as many ranks of such a chip, whose window is the
  // same. null: it is to run; where that is because the file's row is of another run, that is said.
  const json* kept(const json& like) const;
  // Replaces the same one. With it go other rounds of it by another command, and PyTorch's where it trains otherwise
  // than the row that they stood beside.
  void put(const json& row);
  void drop_stale();  // at the end of a sweep: rows of before that nothing has replaced
  void write() const;
};
// ---- sweep_task.cc
// A row with everything chosen.
struct Task {
  int64_t number = 0, ranks = 0;
  SweepRow row;
  Planned plan;
  std::string refused;        // why ./train would not run it
  bool by_extra = false;      // and without SweepRun::extra it would
  bool only_planned = false;  // more ranks than GPUs
  // Steps: before the first that is numbered, all behind those, and the window. steps 0: as many as the epochs have,
  // which is known when a corpus is open; last 0: to the end.
  int64_t warm = 0, steps = 0, first = 0, last = 0;
};
std::vector<Task> tasks_of(const SweepRun& run);
bool trains_otherwise(const json& before, const json& now);  // of ours: than PyTorch was told
// Begun anew its rows are "stale", but for those that are now refused: they stay until put() has others, so that a
// sweep that is interrupted loses nothing, and --continue makes them again.
ResultFile open_file(const SweepRun& run, const std::vector<Task>& tasks);
bool runs(const Task& t);
// What a row's processes write: this process's own, since another sweep of the same name may run beside it. Goes with
// forget, unless an error leads to it.
std::string file_of(const SweepRun& run, int64_t number, const char* ending);
void forget(const Words& files);
Words environment_of(const SweepRow& row);  // NAME=VALUE
std::string prefix(const SweepRow& row);    // the same before a command
// The files that ./train writes for a row: what this process's are, or what a row calls them, every run's alike.
struct TrainFiles {
  std::string log, trace;  // trace: of SweepRow::drops_trace
};
TrainFiles own_files(const SweepRun& run, int64_t number);
TrainFiles recorded_files(const SweepRun& run, int64_t number);
Words train_words(const SweepRun& run, const Task& t, const TrainFiles& files);
std::string train_command(const SweepRun& run, const Task& t);
Words peer_words(const SweepRun& run, const Task& t, const Peer& peer);
std::string peer_command(const SweepRun& run, const Task& t, const Peer& peer);
Words torchrun(int64_t ranks);

// ---- sweep_train.cc
// What a row has before anything is known of its run.
json row_of(const SweepRun& run, const Task& t, const char* who, const std::string& variant, int64_t round);
std::string planned_command(const SweepRun& run, const Task& t);
json planned_row(const SweepRun& run, const Task& t);
json train_row(const SweepRun& run, const Task& t, int64_t round);
std::string outcome_of(const json& row);  // for people, in a few words
GpuSampler sampler_of(int64_t ranks);
void add_uuids(const SweepRun& run, json* row);  // of the GPUs that it ran on
// What the GPUs did from one moment to another, in seconds since 1970.
void add_gpu_summary(const GpuSampler& gpus, double from, double to, json* result);

// ---- sweep_peers.cc
// PyTorch beside the rows that have run, those of one world and environment in one process.
void run_all_peers(const SweepRun& run, std::vector<Task> tasks, int64_t round, ResultFile* file);

}  // namespace sweep_parts
