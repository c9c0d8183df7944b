// The sweeps of ./bench: every table of the five reports that this project is read beside, and a few of its own. A
// sweep is a function that lists its rows for a machine; what a row says is what ./train and PyTorch run, and what the
// report measured. A new sweep is a row of the table `sweeps` in sweeps.cc.
//
//   for (const SweepRow& row : find_sweep("depth").rows({/*gpu=*/true, /*gpus=*/2, 2, "h200"}))
//     std::printf("%s: ./train %s\n", row.name.c_str(), join(row.options).c_str());
//
// On a machine without GPUs the same rows run on tiny shapes: what is tested there is the sweep, not the speed.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "lib/program/json.h"
#include "lib/program/rows.h"

// What the rows are made for.
struct SweepMachine {
  bool gpu = false;
  int64_t gpus = 0;           // of this machine
  int64_t ranks = 2;          // of a row that does not say: --ranks, or one for each GPU
  std::string chip = "h200";  // as --gpu of ./train has it, for rows that the plan sizes and for those it stands in for
};

// PyTorch on the same row.
struct Peer {
  std::string variant;      // "" or what sets it apart, "flex"
  Words options;            // of peers/torch_fsdp.py, beside those that follow from ours, which they replace
  std::string script = {};  // another program of peers/ with these options alone; it prints one JSON line
};

// What a row is to reach on the machine that its figures are of, two H200.
struct Target {
  const char* figure = "";      // of a result, as `figures` in table_figures.cc has it; "": there is no goal
  double before = 0, goal = 0;  // measured when the goal was set; to be reached
  double aim = 0;               // hoped for; 0: no more than the goal
};

struct SweepRow {
  std::string name;                                         // unique in the sweep
  std::vector<std::pair<std::string, std::string>> labels;  // column and cell, from the left; what the table shows
  Words options;                                            // of ./train
  int64_t ranks = 0;                                        // 0: the machine's
  std::vector<std::pair<std::string, std::string>> environment = {};  // of ours and of PyTorch's processes
  std::vector<Peer> peers = {};
  std::string no_peer = {};                // why PyTorch cannot run this row, where that is so
  nlohmann::json theirs = nullptr;         // the report's own figures, keys as in a result
  std::string note = {};                   // what differs from the report's row
  int64_t steps = 0, first = 0, last = 0;  // the window, from 1, of so many steps; 0: SweepRun's
  bool no_counterpart = false;             // nothing to run: the note says why
  bool drops_trace = false;                // --trace, to a file that goes with the row: no picture is made of it
  Target target = {};
};

enum class SweepKind {
  training,     // rows are runs of ./train
  planned,      // the same, of which none is run: more GPUs than anybody here has
  layers,       // one layer's attention by sequence length: time_attention_layers
  kernels,      // the attention kernels: time_attention_kernels
  collectives,  // collectives_rank
};

struct Sweep {
  const char* name;    // of --sweep
  const char* report;  // the table that it mirrors; "": of this project
  const char* what;    // what varies, for --list
  SweepKind kind = SweepKind::training;
  std::vector<SweepRow> (*rows)(const SweepMachine&) = nullptr;  // training alone
  const char* theirs_on = "";                                    // the report's machine
  Words measured = {};  // options of ./train that measure more, at some cost of time: --comm-timing, --profile
  std::vector<int64_t> on_gpus = {}, on_cpu = {};  // what the other kinds vary
};

const std::vector<Sweep>& sweeps();
const Sweep& find_sweep(const std::string& name);  // throws UsageError: lists the names

// What a row runs with: its options, and what the sweep measures besides, which a graph's inside cannot be.
Words options_of(const Sweep& sweep, const SweepRow& row);

// Adds options to a command; they replace the same ones before them, because ./train takes each once.
void set_options(const Words& options, Words* command);
