// What a step runs on: a GPU, or a CPU's threads that behave like one. A rank owns one Device, which owns the rest:
// three streams, the planned memory, what has failed. The parts have a header each:
//
//   error.h        errors and their texts            dtype.h        fp32, bf16, fp64
//   stream.h       streams and events                memory.h       planned memory
//   host_memory.h  pinned host memory                graph.h        CUDA graphs
//   timeline.h     what operations cost
//
//   Device dev(Backend::gpu, 0);
//   step(dev);  // Mode::plan: memory is recorded, nothing runs
//   dev.mem.commit(), dev.mem.rewind(), dev.mode = Mode::run;
//   step(dev);  // runs
//   dev.compute().synchronize();
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lib/device/dtype.h"
#include "lib/device/error.h"
#include "lib/device/graph.h"
#include "lib/device/host_memory.h"
#include "lib/device/memory.h"
#include "lib/device/stream.h"
#include "lib/device/timeline.h"

enum class Backend { cpu, gpu };
enum class CommStreams { two, one };  // for gathers and reductions

enum class Mode {
  plan,  // kernels and collectives off, memory is being recorded
  tune,  // kernels and collectives off except that matmul times its algorithms; memory is real
  run,
};

int gpu_count();         // CUDA devices that this process can use; 0 without a driver or in a build without CUDA
std::string cpu_name();  // this machine's model
// What GPU `ordinal` of this process is, whatever other processes call it. Empty in a build without CUDA.
struct GpuName {
  std::string uuid;  // of the GPU, or of the part of one (MIG) that is given to this process
  std::string card;  // its PCI address; the parts of a GPU have one
};
GpuName name_gpu(int ordinal);

struct Device {
  // ordinal: CUDA device (ignored on a CPU); plan_only makes a GPU to plan for without a GPU. sharers: ranks that live
  // on this device, or on this host's memory. comm: whether gathers and reductions share a stream; see comm_streams()
  // of lib/comm.
  static constexpr int plan_only = -1;
  Device(Backend backend, int ordinal, int sharers = 1, CommStreams comm = CommStreams::two);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // What a CPU stream's work or a host function has thrown; rethrown by check().
  void fail(std::exception_ptr e);
  bool failed() const;
  void check();

  // Where a step's time goes: what the compute stream is given from here on is `name`'s, until the next mark. Marks are
  // events on that stream, and nothing where nobody has asked for a profile.
  void mark(const char* name) {
    marked_ = name;
    if (profiling_ && mode == Mode::run) add_mark();
  }
  void start_profile();
  // Milliseconds by name, in order of first appearance; waits for the marks, and ends the profile.
  std::vector<std::pair<std::string, double>> end_profile();

  Backend backend;
  int ordinal, sharers;
  uint64_t graphs = 0, in_graph = 0;   // made so far; the number of the one that is being made, or 0
  std::unique_ptr<Event> after_graph;  // the latest launch
  Mode mode = Mode::plan;
  std::string name;                         // "NVIDIA H200", or the CPU's model
  int64_t total_bytes = 0, free_bytes = 0;  // free when the device was opened
  int compute_capability = 0;               // 90 for sm_90; 0 on a CPU
  int multiprocessors = 0;

  std::unique_ptr<Stream> compute_, gather_, reduce_;
  Stream& compute() { return *compute_; }
  Stream& gather() { return *gather_; }
  Stream& reduce() { return reduce_ ? *reduce_ : *gather_; }
  Memory mem{*this};
  Timeline* timeline = nullptr;  // what a dry run reports to; null: nobody asks
  // cuBLASLt's workspace: planned, one for the compute stream. Set by ops::keep_workspace.
  void* blas_workspace = nullptr;
  int64_t blas_workspace_bytes = 0;
  // How operations are carried out; results change by rounding alone. The same on all ranks, and in the dry run as in
  // the run. Set by plan().
  bool fuse = true;          // lib/ops/ops.h says what is fused with what
  bool tune_matmuls = true;  // Mode::tune times candidates

 private:
  friend class MarkedWait;
  friend class MarkedRecomputation;
  void add_mark();
  struct Failure;
  std::shared_ptr<Failure> failure_;
  bool profiling_ = false, recomputing_ = false;
  const char* marked_ = "";  // the latest mark's name
  std::vector<std::pair<std::string, Event>> marks_;
};

// Within its life the compute stream waits, and that is no operation's time; behind it the operation goes on that was
// marked before.
class MarkedWait {
 public:
  explicit MarkedWait(Device& dev) : dev_(dev), before_(dev.marked_) { dev.mark("waiting for communication"); }
  ~MarkedWait() { dev_.mark(before_); }
  MarkedWait(const MarkedWait&) = delete;

 private:
  Device& dev_;
  const char* before_;
};
// Within its life what is marked is recomputation: "norms" stands in the profile as "norms, recomputed".
class MarkedRecomputation {
 public:
  explicit MarkedRecomputation(Device& dev) : dev_(dev) { dev.recomputing_ = true; }
  ~MarkedRecomputation() { dev_.recomputing_ = false; }
  MarkedRecomputation(const MarkedRecomputation&) = delete;

 private:
  Device& dev_;
};
