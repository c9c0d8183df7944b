// The memory and the time of a step before it runs, for the ranks that are here or for a world that is not; what to
// change where it does not fit; and what is printed instead of training.
//
//   Device dev(Backend::gpu, Device::plan_only);
//   plan(dev, world, Transport::nccl, r);              // dev.mem.report() now tells the peak
//   price(r, 64, *chip_named("h200")).seconds          // of a step on 64 GPUs
#pragma once

#include <string>
#include <vector>

#include "lib/program/estimate.h"
#include "lib/program/run.h"
#include "lib/program/trace.h"

// Dry run: every take and give of the programs, no kernel. Afterwards dev.mem knows the peak, and dev.estimate, where
// there is one, the time of a step that follows another; and dev.fuse, tf32 and tune_matmuls are the run's, for the
// steps that follow. Returns what a step issues.
std::vector<Issued> plan(Device& dev, const World& world, Transport transport, const Run& r);

// The least time that the chip's datasheet allows a step's operations, in seconds.
struct Limits {
  double products, attention, memory_bound;
};
// Memory and time of a step, by a dry run.
struct Price {
  double bytes, seconds, tokens_per_sec;  // of a GPU; bytes: the peak
  double init_bytes, before_step_bytes;   // once the weights are there; when a step begins
  int communicators;                      // over NCCL
  Limits limits;
  std::string text;  // Estimate's table
};
Price price(Run r, const World& world, const Chip& chip);
// On ranks that are not here: nodes full of GPUs, one for each rank. Chooses the gathers as a run there would.
Price price(Run r, int ranks, const Chip& chip);

// Bytes that CUDA, cuBLAS and NCCL with so many communicators take beside a plan.
double reserve(int communicators = usual_communicators);
// Whether a chip has room for a plan of so many bytes, and for that.
bool fits(double bytes, const Chip& chip, int communicators = usual_communicators);

// What to change so that it fits, and costs least: of the fewest changes that do it those with the most tokens/s. One
// line.
std::string advice(const Options& o, int ranks, const Chip& chip);

// The step that is priced, with every operation, collective and wait, and its memory. Throws UsageError where no time
// is estimated.
Trace planned_trace(Run r, int ranks, const Chip& chip);

// What is asked for instead of training, as --plan or --version: prints, writes --trace, and returns the exit
// status. Starts no MPI and takes no memory; under mpirun only the first process speaks. command: as it was typed.
int answer(const Options& o, const std::string& command);
// Writes to standard output. Throws Error if that is full or closed.
void print_answer(const std::string& text);
