// In-order streams of work tied by events, with CUDA's meaning on both backends: CUDA's own on a GPU, worker threads on
// a CPU. Nothing is synchronous with the host, so a missing event is a bug on a CPU too, and the tests look for it.
//
//   Event gathered(dev);
//   gather.copy(slot, shard, bytes);       // enqueued; returns at once
//   gather.record(gathered);
//   compute.wait(gathered);                // what compute is given from here on comes after the copy
//   compute.synchronize();                 // the host waits, and gets what the work has thrown
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "lib/device/error.h"
#include "lib/device/timeline.h"

struct Device;

// A point in a stream. wait() refers to the latest record() at the time of the call; an event that was never recorded
// holds nobody up.
class Event {
 public:
  enum Kind { ordering, timed };
  explicit Event(Device& dev, Kind kind = ordering);
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
float elapsed_ms(Event& from, Event& to);  // both timed and recorded; waits for `to`
void synchronize(Event& e);                // the host waits

class Stream {
 public:
  enum Priority { normal, high };
  Stream(Device& dev, Priority priority);
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
  // The same by a kernel, of what is small and waited for: a copy engine begins some microseconds late, and what follows
  // it does again. To device memory: where kernels write to the host's, all kernels of a graph begin a little later.
  void copy_by_kernel(void* to, const void* from, int64_t bytes);
  void zero(void* p, int64_t bytes);
  void zero_rows(void* p, int64_t pitch, int64_t bytes, int64_t rows);  // rows of `bytes`, `pitch` bytes apart
  void sleep(double ms);                                                // for tests: holds this stream up, not the host
  // In a dry run with a timeline: an operation stands here, or a collective, or a slot begins to hold a unit; see
  // Timeline. Otherwise nothing.
  void spend(const Cost& cost);
  void spend(Collective kind, double bytes, int ranks, int local, Via via = Via::kernels);
  void holds(const std::string& slot, const std::string& unit, const char* how = "");
  void synchronize();  // the host waits; rethrows what a CPU stream's work has thrown

 private:
  struct Worker;
  int number() const;  // as Timeline counts them
  Device& dev_;
  std::unique_ptr<Worker> worker_;
#if FSDP_CUDA
  cudaStream_t cuda_ = nullptr;
#endif
};
