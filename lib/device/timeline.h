// What a step asks of a chip, told in the order in which it is issued. In a dry run nothing runs; operations,
// collectives, events and waits are reported to a Timeline instead, if the device has one, which can make an estimate
// of the step's time out of them. The device knows no more of it than this interface.
//
//   if (s.off()) return s.spend(moves<float>(3 * n));    // an elementwise kernel: two tensors read, one written
//
//   struct Launches : Timeline { ... };                  // counts, or keeps clocks: lib/program/estimate.h
//   Device dev(Backend::gpu, Device::plan_only);
//   dev.timeline = &launches;
//   step(dev);
#pragma once

#include <cstdint>

#include <string>

#include "lib/device/dtype.h"
#include "lib/device/memory.h"

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

enum class Collective { all_gather, reduce_scatter, all_reduce, broadcast, all_to_all };
// What a rank sends of a buffer of `bytes`: all parts but one, and in an all_reduce twice.
inline double sent(Collective kind, double bytes, int ranks) {
  return bytes * (ranks - 1) / ranks * (kind == Collective::all_reduce ? 2 : 1);
}
// What moves the bytes: kernels on multiprocessors, or copy engines beside them.
enum class Via { kernels, copy_engines };

struct Timeline {
  // Where an event was recorded; one that never was is at the start.
  struct Point {
    int stream = 0;
    double seconds = 0;
  };
  virtual ~Timeline() = default;
  // stream: 0 compute, 1 gather, 2 reduce.
  virtual void operation(int stream, const Cost& cost) = 0;
  // bytes: of all ranks' parts together. ranks: of the collective's group, `local` of them in a node.
  virtual void collective(int stream, Collective kind, double bytes, int ranks, int local, Via via) = 0;
  // An event is recorded, or a stream waits for one: a call of the host each.
  virtual Point record(int stream) = 0;
  virtual void wait(int stream, const Point& event) = 0;
  // What follows is another step.
  virtual void next_step() = 0;
  // What begins with begin_repeat() and ends with skip() comes so many times more, and is not told again. Only of a
  // Timeline that can skip.
  virtual bool can_skip() const { return false; }
  virtual void begin_repeat() {}
  virtual void skip(int64_t) {}
  // The plan takes memory for a purpose, or gives it back (negative): bytes, as the plan rounds them.
  virtual void memory(Purpose, int64_t) {}
  // When the stream comes here a slot, by its name in the plan of memory, begins to hold a unit; "": nothing. how: what
  // is to be said of it.
  virtual void holds(int /*stream*/, const std::string& /*slot*/, const std::string& /*unit*/, const char* /*how*/) {}
  // Whose the operations are that follow: the compute stream's mark; the unit of a gather or reduction.
  std::string mark, unit;
};
