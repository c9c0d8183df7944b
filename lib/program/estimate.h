// The time of a step before it runs. A dry run (Mode::plan) issues every operation of a step in order, so it can keep a
// clock for each stream: an operation adds the time that it should take, an event notes its stream's clock, and a wait
// moves the waiting stream's clock up to the event's. How far the compute stream's clock jumps in a wait is exposed
// communication. Two steps tell what one takes: the first begins with all streams at rest, and the gathers that open
// another hide behind the end of the one before. The host, which is a step ahead, holds the device up only where it
// takes longer for a whole step.
//
// An operation takes the longer of two times, for its FLOPs and for its bytes, and a latency for each launch. Chips are
// described by their datasheets (chips.h); what part of that an operation reaches was measured on an H200, and is taken
// to be the same on the others. The parts stand beside the operations (`share`) and in estimate.cc.
#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include "lib/device/span.h"
#include "lib/device/timeline.h"
#include "lib/program/chips.h"

constexpr int gpus_per_node = 8;  // of a world that is not here

// Memory that the plan takes for a purpose, or gives back (negative), when the compute stream comes there.
struct MemoryChange {
  double at;  // seconds
  Purpose purpose;
  int64_t bytes;
};

class Estimate : public Timeline {
 public:
  // graph: a step is one CUDA graph, which the host launches in one call. tf32: products of float are TF32's.
  explicit Estimate(const Chip& chip, bool graph = false, bool tf32 = false)
      : chip_(chip), graph_(graph), tf32_(tf32) {}

  void operation(int stream, const Cost& c) override;
  void collective(int stream, Collective kind, double bytes, int ranks, int local, Via via) override;
  Point record(int stream) override;
  void wait(int stream, const Point& event) override;
  void next_step() override;  // what is told from then on is that step alone
  bool can_skip() const override { return !keeps_; }
  void begin_repeat() override;
  void skip(int64_t times) override;
  double clock(int stream) const { return clock_[size_t(stream)]; }

  // From here on what runs when is kept: operations by their marks, collectives by their units, and what the compute
  // stream waits; and meanwhile what memory is taken, and what slots hold. Of the latest step, which begins at begun().
  void keep_spans() { keeps_ = true; }
  const std::vector<Span>& spans() const { return kept_; }
  const std::vector<MemoryChange>& memory_changes() const { return memory_; }
  const std::vector<Span>& slots() const { return slots_; }  // by their beginning; Span::mark is the slot
  double begun() const { return begun_; }
  void memory(Purpose purpose, int64_t bytes) override;
  void holds(int stream, const std::string& slot, const std::string& unit, const char* how) override;

  double seconds(const Cost& c) const;  // alone on the chip
  double seconds(Collective kind, double bytes, int ranks, int local, Via via = Via::kernels) const;
  double step() const;
  double host() const;                                                            // to issue the step
  double busy(Work kind) const { return sums_.busy[size_t(kind)]; }               // the compute stream
  double slowed() const { return sums_.slowed; }                                  // it, beside collectives
  double exposed(int recorder) const { return sums_.exposed[size_t(recorder)]; }  // it, waiting for that stream
  // The least that the datasheet allows for the compute stream's operations: their FLOPs at its peak or their bytes at
  // its bandwidth, whichever takes longer. What a tile computes and a mask discards is among the FLOPs; launches cost
  // nothing.
  double limit(Work kind) const { return sums_.limit[size_t(kind)]; }
  double talking(Collective kind) const { return sums_.traffic[size_t(kind)].seconds; }

  // The table for people. Of a GPU and step: tokens, FLOPs as MFU counts them.
  std::string text(double tokens, double flops) const;

 private:
  struct Traffic {
    int64_t count = 0;
    double bytes = 0, seconds = 0;
  };
  struct Sums {  // of a step
    std::array<double, 3> exposed = {};
    std::array<double, 4> busy = {}, limit = {};
    std::array<Traffic, 5> traffic = {};
    double slowed = 0, product_flops = 0, skipped = 0;  // skipped: seconds that no clock has counted
    int64_t calls = 0;
  };
  struct Busy {
    double from, to, takes;  // of the compute stream's time
  };
  using Spans = std::vector<Busy>;
  void keep(int stream, Span::Kind kind, const std::string& name, double from, double bytes = 0);
  double launched() const;  // what a kernel costs before its work
  double least(const Cost& c) const;
  static double end_of(double start, double seconds, double takes, const Spans& spans);

  const Chip chip_;
  const bool graph_, tf32_;
  std::array<double, 3> clock_ = {};
  Sums sums_, sums_before_repeat_;
  double repeat_from_ = 0;
  // In which a stream has a collective running: in a node, and between nodes.
  std::array<std::array<Spans, 3>, 2> spans_;
  std::array<Spans, 3> kernels_;  // and a memory-bound kernel
  double begun_ = 0;
  bool keeps_ = false;
  std::vector<Span> kept_;
  std::vector<MemoryChange> memory_;
  std::vector<Span> slots_;
  std::map<std::string, size_t> holding_;  // for a slot that holds something, the span in slots_ that is to end
};
