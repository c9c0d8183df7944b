// What a step runs on: streams and events (CUDA's, or worker threads on a CPU), planned memory, and typed errors.
//
// A rank owns one Device. Its work goes into in-order Streams that are tied by Events, with CUDA's meaning on both
// backends: nothing is synchronous with the host, so a missing event is a bug on a CPU too, and the tests look for it.
// Memory never comes from an allocator inside a step. The program is first run with the kernels off (Mode::plan):
// Memory records when each buffer is born and dies; commit() packs them into one arena; afterwards the same calls, in
// the same order, hand out the planned addresses and anything else is an error.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "lib/device/dtype.h"

// ---------------------------------------------------------------------------------------------------------- errors
// Every error is one line: what, where, why, what to do. `where` is file:line where the failing call stands.

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
struct UsageError : Error {  // the user's input is wrong: exit status 2
  using Error::Error;
};
struct CudaError : Error {
  using Error::Error;
};
struct CublasError : Error {
  using Error::Error;
};
struct NcclError : Error {
  using Error::Error;
};
struct MpiError : Error {
  using Error::Error;
};
struct OutOfMemory : Error {
  using Error::Error;
};

int this_rank();  // for error texts; -1 before MPI has started
void set_this_rank(int rank);
std::string strf(const char* format, ...) __attribute__((format(printf, 1, 2)));  // printf into a string

#define REQUIRE_USER(cond, ...)                       \
  do {                                                \
    if (!(cond)) throw UsageError(strf(__VA_ARGS__)); \
  } while (0)
// A broken promise inside the program; never the user's fault.
#define ASSERT(cond)                                                                                        \
  do {                                                                                                      \
    if (!(cond)) throw Error(strf("internal error: %s does not hold at %s:%d", #cond, __FILE__, __LINE__)); \
  } while (0)

#if FSDP_CUDA
[[noreturn]] void throw_cuda(int code, const char* call, const char* file, int line);
#define CUDA_CHECK(call)                                                                   \
  do {                                                                                     \
    cudaError_t cuda_code_ = (call);                                                       \
    if (cuda_code_ != cudaSuccess) throw_cuda(int(cuda_code_), #call, __FILE__, __LINE__); \
  } while (0)
#define CUDA_CHECK_LAUNCH() CUDA_CHECK(cudaGetLastError())
#endif

// --------------------------------------------------------------------------------------------------------- streams

enum class Mode {
  plan,  // kernels and collectives off, memory is being recorded
  tune,  // kernels and collectives off except that matmul times its algorithms; memory is real
  run,
};

struct Device;
class Estimate;  // lib/estimate.h

// What an operation asks of a chip, for an estimate of its time.
enum class Work { matmul, attention, memory, optimizer };
struct Cost {
  Work kind;
  double bytes = 0;  // read and written
  double flops = 0;
  double share = 1;  // of the chip's peak, that the FLOPs reach
  Dtype dtype = Dtype::bf16;
  int launches = 1;
  double tasks = 0;  // equal parts that the FLOPs come in, each one multiprocessor's; 0: very many
};
// An operation that takes as long as so many T to and from memory.
template <class T>
Cost moves(int64_t numbers, int launches = 1, Work kind = Work::memory) {
  Cost c{kind, double(numbers) * double(sizeof(T))};
  c.launches = launches;
  return c;
}
enum class Collective { all_gather, reduce_scatter, all_reduce, broadcast };
// What a rank sends of a buffer of `bytes`: all parts but one, and in an all_reduce twice.
inline double sent(Collective kind, double bytes, int ranks) {
  return bytes * (ranks - 1) / ranks * (kind == Collective::all_reduce ? 2 : 1);
}

// A point in a stream. wait() refers to the latest record() at the time of the call; an event that was never recorded
// holds nobody up.
class Event {
 public:
  explicit Event(Device& dev, bool timing = false);
  ~Event();
  Event(Event&&) noexcept;
  Event& operator=(Event&&) = delete;
  struct State;

 private:
  friend class Stream;
  friend float elapsed_ms(Event&, Event&);
  friend void synchronize(Event&);
  std::unique_ptr<State> s_;
};
float elapsed_ms(Event& from, Event& to);  // both recorded, with timing; waits for `to`
void synchronize(Event& e);                // the host waits

class Stream {
 public:
  Stream(Device& dev, const char* name, bool high_priority);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  bool off() const;  // Mode is not run: enqueue nothing
  bool on_gpu() const;
  Device& device() const { return dev_; }
#if FSDP_CUDA
  cudaStream_t cuda() const { return cuda_; }
#endif
  void enqueue(std::function<void()> work);  // CPU backend: runs on this stream's thread, in order
  void host(std::function<void()> work);     // either backend: host code, in stream order; it must call no CUDA
  void record(Event& e);
  void wait(const Event& e);
  void copy(void* to, const void* from, int64_t bytes);  // device or pinned host memory, any direction
  void zero(void* p, int64_t bytes);
  void sleep(double ms);  // for tests: holds this stream up, not the host
  // In a dry run that estimates time (Device::estimate): an operation stands here, or a collective of a group of ranks,
  // `local` of them in a node. Otherwise nothing.
  void spend(const Cost& cost);
  void spend(Collective kind, double bytes, int ranks, int local, bool engines = false);
  void synchronize();  // the host waits; rethrows what a CPU stream's work has thrown

 private:
  struct Worker;
  int place() const;  // compute 0, gather 1, reduce 2
  Device& dev_;
  std::unique_ptr<Worker> worker_;
#if FSDP_CUDA
  cudaStream_t cuda_ = nullptr;
#endif
};

// ---------------------------------------------------------------------------------------------------------- memory

enum class Purpose { master, moments, gradients, gather_slots, gradient_slots, activations, temporaries, workspace };
constexpr int purposes = 8;
const char* name_of(Purpose p);

// One buffer's life: born and dead count the takes and gives of its program; [born, dead) is when it is live.
struct Life {
  int64_t bytes, born, dead;
};
// Offsets for buffers such that no two that are live together overlap; deterministic. Offsets and the total are
// multiples of `align`. Returns the total; at least the largest sum of (aligned) bytes live at one time.
int64_t pack(const std::vector<Life>& lives, int64_t align, std::vector<int64_t>* offsets);
int64_t most_live(const std::vector<Life>& lives, int64_t align);

struct MemoryReport {
  int64_t init[purposes], before_step[purposes], peak[purposes];  // bytes live: while the model is made, before the
                                                                  // first step, and at the peak
  int64_t init_total, before_step_total, live_peak, arena;        // arena >= live_peak: packing and alignment
  std::string peak_phase, largest;                                // where the peak falls; the largest buffer in it
};

class Memory;

// Owns one planned buffer; gives it back when it goes out of scope.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(Memory* m, T* p, int64_t n) : m_(m), p_(p), n_(n) {}
  Buffer(Buffer&& o) noexcept { *this = std::move(o); }
  Buffer& operator=(Buffer&& o) noexcept;
  ~Buffer() { reset(); }
  void reset();
  T* get() const { return p_; }
  operator T*() const { return p_; }
  int64_t size() const { return n_; }

 private:
  Memory* m_ = nullptr;
  T* p_ = nullptr;
  int64_t n_ = 0;
};

class Memory {
 public:
  explicit Memory(Device& dev) : dev_(dev) {}
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // For the life of the program. Call in the same order when planning and after commit(); `rewind()` between the two.
  template <class T>
  T* keep(int64_t n, const std::string& name, Purpose p) {
    return static_cast<T*>(keep_bytes(n * int64_t(sizeof(T)), name, p));
  }
  // Between begin(program) and end(). A buffer belongs to the compute stream; other streams may touch it only behind
  // an event that the compute stream recorded after the take and waited for before the give.
  template <class T>
  Buffer<T> take(int64_t n, const char* name, Purpose p = Purpose::temporaries) {
    return Buffer<T>(this, static_cast<T*>(take_bytes(n * int64_t(sizeof(T)), name, p)), n);
  }
  // "step", "validate": each has its own trace, all share the arena. The first time it is recorded, then followed.
  void begin(const std::string& program);
  void end();
  void phase(const std::string& name);  // names what follows, for the report and for errors

  void poison();  // for tests: fills all that is not kept with NaN patterns
  void commit();  // packs, checks against the free memory of the device (OutOfMemory), allocates the arena
  void rewind();  // keep() starts again from its first buffer
  bool committed() const { return base_ != nullptr; }
  char* base() const { return base_; }
  // Who gives the arena, where it is not cudaMalloc; free takes what allocate returned. Set before commit().
  std::function<void*(int64_t)> allocate;
  std::function<void(void*)> free;
  MemoryReport report() const;                                        // planning or after commit
  int64_t arena_bytes() const;                                        // packs if need be; what commit() allocates
  int64_t device_reported_bytes() const { return device_reported_; }  // what the device says the arena took

 private:
  template <class T>
  friend class Buffer;
  struct Buf {
    std::string name;
    Purpose purpose;
    int64_t bytes, born, dead, offset;
    std::string phase;
  };
  struct Program {
    std::string name;
    std::vector<Buf> bufs;
    int64_t clock = 0;
    bool recorded = false;
    std::vector<int> order;  // take: index of the buffer; give: ~index
  };
  void* keep_bytes(int64_t bytes, const std::string& name, Purpose p);
  void* take_bytes(int64_t bytes, const char* name, Purpose p);
  void give(void* p);
  void pack_all() const;

  Device& dev_;
  mutable std::vector<Buf> kept_;
  size_t next_kept_ = 0;
  mutable std::vector<Program> programs_;
  int current_ = -1;
  size_t cursor_ = 0;
  std::vector<std::pair<char*, int>> live_;  // address -> buffer, of the current program
  std::string phase_;
  char* base_ = nullptr;
  mutable int64_t arena_ = -1, kept_bytes_ = 0;
  int64_t device_reported_ = 0;
};

template <class T>
Buffer<T>& Buffer<T>::operator=(Buffer&& o) noexcept {
  if (this != &o) {
    reset();
    m_ = o.m_, p_ = o.p_, n_ = o.n_;
    o.m_ = nullptr, o.p_ = nullptr, o.n_ = 0;
  }
  return *this;
}
template <class T>
void Buffer<T>::reset() {
  if (p_) m_->give(p_);
  m_ = nullptr, p_ = nullptr, n_ = 0;
}

// ---------------------------------------------------------------------------------------------------------- device

enum class Backend { cpu, gpu };

// Host memory that copies to and from the device can run beside (pinned on a GPU). Not part of the plan: the program
// makes a few at start and none in a step.
void* take_host_memory(Device& dev, int64_t bytes, bool* pinned);  // zeroed
void give_host_memory(void* p, bool pinned);
template <class T>
class HostBuffer {
 public:
  HostBuffer(Device& dev, int64_t n)
      : p_(static_cast<T*>(take_host_memory(dev, n * int64_t(sizeof(T)), &pinned_))), n_(n) {}
  ~HostBuffer() { give_host_memory(p_, pinned_); }
  HostBuffer(HostBuffer&& o) noexcept : pinned_(o.pinned_), p_(o.p_), n_(o.n_) { o.p_ = nullptr; }
  HostBuffer& operator=(HostBuffer&&) = delete;
  T* get() const { return p_; }
  T& operator[](int64_t i) const { return p_[i]; }
  int64_t size() const { return n_; }

 private:
  bool pinned_ = false;
  T* p_;
  int64_t n_;
};

int gpu_count();  // CUDA devices that this process can use; 0 without a driver or in a build without CUDA

// A CUDA graph of what a function gives the streams. It begins and ends with all of them at rest: they start where the
// compute stream stands and it waits for them, so events from before need no waiting for, and who waits later for one
// that was recorded in here waits for the whole launch. The pointers that it was made with must stay.
class Graph {
 public:
  explicit Graph(Device& dev) : dev_(dev) {}
  ~Graph();
  Graph(Graph&& o) noexcept : dev_(o.dev_), nodes_(o.nodes_), exec_(o.exec_) { o.exec_ = nullptr; }
  bool made() const { return exec_ != nullptr; }
  void make(const std::function<void()>& work);  // runs nothing
  void launch();                                 // on the compute stream
  // How many kernels, and of them NCCL's; how many copies and clears.
  struct Nodes {
    int kernels = 0, nccl_kernels = 0, copies = 0, others = 0;
  };
  const Nodes& nodes() const { return nodes_; }

 private:
  Device& dev_;
  Nodes nodes_;
  void* exec_ = nullptr;
};

struct Device {
  // ordinal: CUDA device (ignored on a CPU); plan_only makes a GPU to plan for without a GPU. sharers: ranks that live
  // on this device, or on this host's memory. one_comm_stream: gathers and reductions share a stream, for collectives
  // through host memory, which would otherwise wait for each other in different orders on different ranks.
  static constexpr int plan_only = -1;
  Device(Backend backend, int ordinal, int sharers = 1, bool one_comm_stream = false);
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
    if (profiling_ && mode == Mode::run) add_mark(name);
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
  Estimate* estimate = nullptr;  // keeps the time of a dry run; null: nobody asks
  // cuBLASLt's workspace: planned, one for the compute stream. Set by ops::keep_workspace.
  void* blas_workspace = nullptr;
  int64_t blas_workspace_bytes = 0;

 private:
  void add_mark(const char* name);
  struct Failure;
  std::shared_ptr<Failure> failure_;
  bool profiling_ = false;
  std::vector<std::pair<std::string, Event>> marks_;
};
