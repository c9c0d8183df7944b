// Times what a step is made of, each part alone, outside of training: collectives, one layer's attention, and the
// attention kernels. ./bench calls these; each adds a row to `rows` for what it has timed and prints a table at the
// end.
//
//   time_attention_layers({"results/nsa.jsonl", "./bench --sweep attention", FSDP_COMMIT}, {4096, 65536});
//
// All times are milliseconds between events on a stream, medians of many calls after a few that do not count. Inputs
// are normal numbers: a GPU multiplies zeros faster, because they draw less power.
#pragma once

#include <cstdint>
#include <vector>

#include "lib/device/device.h"
#include "lib/program/rows.h"

// Milliseconds of each of 20 calls after 3 that do not count. They are issued back to back: a call lasts from the end
// of the one before it to its own end.
template <class F>
std::vector<double> time_calls(Device& dev, Stream& s, F call) {
  std::vector<Event> ends;
  for (int i = 0; i <= 20; ++i) ends.emplace_back(dev, Event::timed);
  for (int i = 0; i < 3; ++i) call();
  for (Event& end : ends) {
    if (&end != &ends[0]) call();
    s.record(end);
  }
  s.synchronize();
  std::vector<double> ms;
  for (size_t i = 1; i < ends.size(); ++i) ms.push_back(elapsed_ms(ends[i - 1], ends[i]));
  return ms;
}

// All-gathers and reduce-scatters of buffers of so many MiB (all ranks' parts together) over NCCL, or MPI without GPUs:
// alone, beside a matmul on the compute stream, and that matmul beside them. Every rank of an mpirun calls this first
// of all: it starts and ends MPI. Returns the exit status; rank 0 writes the rows, the table, or an error's one line.
int collectives_rank(const RowFile& rows, const std::vector<int64_t>& mib, int* argc, char*** argv);

// One layer's attention without its projections, from q, k and v to o, batch 1: NSA beside dense attention, by sequence
// length, with memory planned as in ./train. In bf16 on GPU 0, in fp32 on a CPU. Returns whether anything was timed.
bool time_attention_layers(const RowFile& rows, const std::vector<int64_t>& lengths);

// The attention kernels in bf16 on GPU 0: causal, and NSA's window and compressed branches, each kernel that the GPU
// can run. Throws UsageError without a GPU that has kernels. Returns whether anything was timed.
bool time_attention_kernels(const RowFile& rows);

// Pairs of a query and a key that it sees, in one head of one sequence under the causal rule: half of all.
double causal_pairs(int64_t T);
// To "forward_ms" and "forward_backward_ms" their TFLOP/s: two matmuls forward and five backward, of which one and
// three contract over keys' head dim D or make it, the others over values' DV; pairs of all heads and sequences.
void add_tflops(nlohmann::json* result, double pairs, int64_t D, int64_t DV);

// PyTorch's attention by cuDNN (peers/attention.py) on those of the shapes in `rows` that are causal: a row for each,
// "who": "PyTorch", on the hardware of ours. Returns whether all were timed, and says why if not.
bool time_peers_kernels(const RowFile& rows, int64_t timeout_s);

// To the rows timed now, PyTorch's of before: of the same GPU, where it has not timed that attention anew.
void keep_peers(const std::vector<nlohmann::json>& before, std::vector<nlohmann::json>* now);

// Rows of one attention together, in the order in which the first of each came.
std::vector<nlohmann::json> by_attention(std::vector<nlohmann::json> rows);
