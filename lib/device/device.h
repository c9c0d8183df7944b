// What a step runs on: a GPU, or a CPU's threads that behave like one. A rank owns one Device, which owns the rest:
// four streams, the planned memory, what has failed. The parts have a header each:
//
//   error.h        errors and their texts            dtype.h        fp32, bf16, fp64
//   stream.h       streams and events                memory.h       planned memory
//   host_memory.h  pinned host memory                graph.h        CUDA graphs
//   timeline.h     what operations cost              span.h         what ran when
//   activity.h     kernels and copies, by CUPTI      nvml.h         how busy and how fast GPUs are
//
//   Device dev(Backend::gpu, 0);
//   step(dev);  // Mode::plan: memory is recorded, nothing runs
//   dev.mem.commit(), dev.mem.rewind(), dev.mode = Mode::run;
//   step(dev);  // runs
//   dev.compute().synchronize();
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lib/device/dtype.h"
#include "lib/device/error.h"
#include "lib/device/graph.h"
#include "lib/device/host_memory.h"
#include "lib/device/memory.h"
#include "lib/device/span.h"
#include "lib/device/stream.h"
#include "lib/device/timeline.h"

enum class Backend { cpu, gpu };

// GPUs of compute capability 8.6, 8.9 and 12 have 99 KiB of shared memory for a block, others from 8.0 on at least 163.
constexpr int small_memory = 99 << 10;
constexpr bool has_small_memory(int compute_capability) {
  return compute_capability == 86 || compute_capability == 89 || compute_capability >= 120;
}

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

  // Of the device's memory, or of this host's, as it is now.
  int64_t free_bytes_now() const;

  // What a CPU stream's work or a host function has thrown; rethrown by check().
  void fail(std::exception_ptr e);
  bool failed() const;
  void check();

  // Where a step's time goes: what the compute stream is given from here on is `name`'s, until the next mark; "":
  // nobody's. On a GPU a mark is an NVTX range too, for profilers that are attached. With a profile it is an event on
  // that stream, but not within a CUDA graph.
  void mark(const char* name);
  void start_profile();
  // The profile's spans; waits for them, and ends it. On the device: of the compute stream by its marks, of the others
  // by NamedWork, in seconds since the first mark. On the host: the same as they were issued, in seconds since
  // began_ns, which counts as activity::now() does. Marks first, then named work, both in the order of time.
  struct Profile {
    std::vector<Span> device, host;
    uint64_t began_ns = 0, ended_ns = 0;
  };
  Profile take_profile();
  // Its milliseconds on the compute stream by name, in order of first appearance.
  std::vector<std::pair<std::string, double>> end_profile();

  Backend backend;
  int ordinal, sharers;
  uint64_t graphs = 0, in_graph = 0;                    // made so far; the number of the one that is being made, or 0
  std::unique_ptr<Event> after_graph;                   // the latest launch
  std::function<void(uint64_t graph)> on_graph_launch;  // told of each, by the graph's number; may be empty
  Mode mode = Mode::plan;
  std::string name;                         // "NVIDIA H200", or the CPU's model
  int64_t total_bytes = 0, free_bytes = 0;  // free when the device was opened
  int compute_capability = 0;               // 90 for sm_90; 0 on a CPU. Of plan_only set by who knows the chip
  int multiprocessors = 0;

  std::unique_ptr<Stream> compute_, gather_, reduce_, branch_;
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
  bool tf32 = false;         // products of float round their inputs to 10 bits of mantissa, on tensor cores
  bool tune_matmuls = true;  // Mode::tune times candidates

 private:
  friend class MarkedWait;
  friend class MarkedRecomputation;
  friend class NamedWork;
  friend class Branch;
  bool profiles() const { return profiling_ && mode == Mode::run && in_graph == 0; }
  std::string marked() const { return std::string(marked_) + (recomputing_ ? ", recomputed" : ""); }
  struct Failure;
  std::shared_ptr<Failure> failure_;
  bool profiling_ = false, recomputing_ = false;
  const char* marked_ = "";  // the latest mark's name
  struct Mark {
    std::string name;
    Event event;
    uint64_t host_ns;
  };
  struct Work {
    Span span;
    Event from, to;
    uint64_t from_ns, to_ns;
  };
  std::vector<Mark> marks_;
  std::vector<Work> works_;
  bool range_open_ = false;  // NVTX's, of the latest mark
  std::unique_ptr<Event> branches_, joins_;
};

// By name, in order of first appearance, of spans on the compute stream: milliseconds.
std::vector<std::pair<std::string, double>> sums(const std::vector<Span>& spans);
extern const char* const waiting;  // the mark of what MarkedWait waits for

// Within its life the compute stream waits, and that is no operation's time; behind it the operation goes on that was
// marked before.
class MarkedWait {
 public:
  explicit MarkedWait(Device& dev) : dev_(dev), before_(dev.marked_) { dev.mark(waiting); }
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
// A stream of a GPU's own for work that leaves multiprocessors idle, beside the compute stream: begins behind what the
// compute stream has been given, until join(), behind which the compute stream goes on. One at a time. What the work
// touches must stay taken until then. Where there is nothing to gain (`worth` false, a CPU, a dry run, a profile) the
// stream is the compute stream.
class Branch {
 public:
  Branch(Device& dev, bool worth);
  Branch(const Branch&) = delete;
  Stream& stream() { return stream_; }
  void join();

 private:
  Device& dev_;
  Stream& stream_;
};
// Within its life the gather or the reduce stream is given a unit's gather or reduction: for profiles, for NVTX, and
// for the names of what a dry run reports. No mark is made meanwhile. bytes: of the whole unsharded buffer.
class NamedWork {
 public:
  NamedWork(Device& dev, Stream& stream, Span::Lane lane, const char* what, const std::string& unit, int64_t bytes);
  ~NamedWork();
  NamedWork(const NamedWork&) = delete;

 private:
  Device& dev_;
  Stream& stream_;
  bool range_ = false, profiled_ = false;
};
