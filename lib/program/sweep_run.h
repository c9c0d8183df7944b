// Runs a sweep: each row in fresh processes, ./train under mpirun and PyTorch under its own launcher, so that no memory
// is left over from the row before and a row that fails costs only itself. What is read is the JSON that they write.
//
//   SweepRun run;
//   run.sweep = &find_sweep("depth"), run.hardware = ask_hardware();
//   return run_sweep(run);
//
// Rows go into one file, a JSON object a line, in the order of the sweep; the file is whole after every row. A row has
// what made it: command, environment, commit, hardware, versions, date, and the times and losses of all steps.
#pragma once

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "lib/program/directory_lock.h"
#include "lib/program/json.h"
#include "lib/program/sweeps.h"

enum class Peers { off, on };
enum class Begin { anew, where_it_stopped };

struct SweepRun {
  const Sweep* sweep = nullptr;
  SweepMachine machine;
  nlohmann::json hardware;  // see ask_hardware
  std::string path;         // of the rows
  Words extra;              // options of ./train for every row; they win
  std::set<int64_t> only;   // numbers of rows, from 1; none: all. The other rows of the file stay as they are
  Begin begin = Begin::anew;
  Peers peers = Peers::off;     // off: the file keeps its PyTorch rows
  int64_t rounds = 1;           // how often each row runs, one after another
  int64_t steps = 0;            // of each row, less its warm-up; 0: the row's, 30, or 24 where one takes a second
  int64_t first = 0, last = 0;  // that count, from 1 behind the warm-up; 0: the row's, 5 to 24, or from 5 for a second
  double warm_seconds = 0;      // steps before the first, so that the chip's clocks have settled
  int64_t timeout_s = 900;      // of a row
};

// What this machine has, by a process of its own: asking a GPU takes some of its memory. Throws UsageError without
// ./train.
nlohmann::json ask_hardware();

// Runs what is to be run and prints progress and the table. Returns the exit status: 1 if no row is good. Throws
// UsageError for a file that is not a sweep's, rows that are not there, or extra options that every row refuses or that
// are not for a row to say.
int run_sweep(const SweepRun& run);

// For as long as rows are written to a file: two that did so at a time would each lose the other's. Throws UsageError
// that names who has it, or says what is there that is no regular file.
std::shared_ptr<DirectoryLock> lock_rows(const std::string& path);

// What would run, a command a line; nothing is.
void print_commands(const SweepRun& run);

// How large a sweep is, by the plan; minutes are negative where nothing is known of the machine.
struct SweepSize {
  int64_t rows;
  double minutes, minutes_with_peers;
};
SweepSize size_of(const SweepRun& run);

// Runs a command with `ranks` ranks under mpirun, its output in a file. Returns "" or what went wrong, in the ranks'
// own words if they said it. environment: NAME=VALUE.
std::string run_ranks(int64_t ranks, const Words& environment, const Words& command, const std::string& output,
                      int64_t timeout_s);
