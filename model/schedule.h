// A micro-batch's turns (config.h) as gathers, uses, releases and reductions of units. A module takes its turn and says
// the verbs, which act where the turn begins or ends the run of turns that share its unit:
//
//   const Turn& t = schedule.take_turn(Turn::forward, module);
//   schedule.gather(t);  // and prefetches the unit that comes behind it
//   schedule.use(t);
//   multiply(y, x, schedule.weight(p));
//   schedule.release(t);
//
// A turn out of order, and a parameter of a unit that is not in use, are internal errors.
#pragma once

#include <deque>
#include <initializer_list>
#include <string>
#include <unordered_map>
#include <vector>

#include "model/config.h"

// Where a parameter lies.
struct ParamRef {
  int unit = -1;  // -1: the architecture has no such parameter
  int64_t offset = 0;
  bool frozen = false;  // has no gradient
  bool fp8 = false;     // is gathered in it
  int64_t amax = 0;     // of a block's matrix: its place among those that may be multiplied in fp8
  bool exists() const { return unit >= 0; }
};

template <class T, class G>
class Schedule {
 public:
  // Takes memory for gradients that nobody wants. Keeps references to all.
  Schedule(Device& dev, const ModelConfig& c, Fsdp<T, G>& fsdp);
  ParamRef find(const std::string& name) const;

  // A micro-batch goes through one list of turns. last: of the step.
  void begin_training(bool last) { begin(training_, last); }
  void begin_evaluation() { begin(evaluation_, /*last=*/true); }
  std::vector<int> first_units() const;  // that a step gathers ahead of its first turn, in this order
  bool trains() const { return turns_ == &training_; }
  void begin_backward();
  void end_micro_batch();

  const Turn& take_turn(Turn::Kind kind, int module);
  void gather(const Turn& t);
  void use(const Turn& t);
  void release(const Turn& t);
  void gradient(const Turn& t);
  // used: as Fsdp has it, of the one unit that the turn writes.
  bool takes_rows(const Turn& t, const ops::UsedRows& used) const;
  void reduce(const Turn& t, const ops::UsedRows& used = {});
  void remark(int unit, const char* text) { fsdp_.remark(unit, text); }

  // Of a unit that is in use: a parameter that is not gathered in fp8, or null where the architecture has none; and one
  // that is.
  const T* weight(const ParamRef& p) const;
  const T* weight_if_any(const ParamRef& p) const { return p.exists() ? weight(p) : nullptr; }
  const uint8_t* codes(const ParamRef& p) { return fsdp_.codes(p.unit) + p.offset; }
  const float* unscale(const ParamRef& p) const { return fsdp_.unscale(p.unit, p.offset); }
  // Gradients that are sums of columns, of norms and biases. Their operation leaves pieces, and the reduction of their
  // unit begins with adding those up, on its own stream, so that no product waits for it.
  struct LateSums {
    acc_t<T>* pieces = nullptr;  // null: the operation adds them up itself
    ops::ColumnSums<G>* sums = nullptr;
  };
  // Takes memory for as many pieces as a block leaves.
  void keep_late_sums(int64_t numbers);
  // Room for pieces of these gradients, of one unit that is being written. None where the unit is written in all of a
  // micro-batch or has left as many as there is room for, or where somebody wants but a part of them.
  LateSums late_sums(std::initializer_list<ParamRef> of, int64_t numbers);
  // Of a unit whose gradient is being written.
  G* grad(const ParamRef& p) const;
  G* grad_if_any(const ParamRef& p) const { return p.exists() ? grad(p) : nullptr; }

  int unit_of(int module) const { return unit_of_[size_t(module)]; }  // -1: all its parameters are replicated

 private:
  void begin(const std::vector<Turn>& turns, bool last);
  bool trained(int u) const { return fsdp_.units()[size_t(u)].trained(); }
  int unit_behind(const Turn& t) const;  // the one that is gathered next, in this micro-batch or the next; -1: none

  Device& dev_;
  const ModelConfig& c_;
  Fsdp<T, G>& fsdp_;
  std::unordered_map<std::string, ParamRef> refs_;
  int replicated_ = -1;  // the unit of parameters that are not sharded
  std::vector<int> unit_of_;
  std::vector<Turn> training_, evaluation_;
  const std::vector<Turn>* turns_ = nullptr;  // of the micro-batch that is being issued
  size_t turn_ = 0;                           // the next of them
  bool last_ = true;                          // the step's last micro-batch
  std::vector<const T*> weights_;             // by unit, from its element in_fp8 on; null: not in use
  std::vector<G*> grads_;                     // by unit; null: not being written
  // Areas for pieces take turns: while one is read, on the reduce stream, the next unit writes into another.
  struct Area {
    Area(Device& dev, acc_t<T>* p) : p(p), summed(dev) {}
    acc_t<T>* p;
    Event summed;
  };
  std::deque<Area> areas_;
  size_t area_ = 0;
  int64_t area_numbers_ = 0, used_ = 0;  // of this unit
  ops::ColumnSums<G> sums_;
  int sums_of_ = -1;        // the unit
  G* discarded_ = nullptr;  // where gradients go that come with others and are not wanted; never read for anything
};
