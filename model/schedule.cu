#include "model/schedule.h"

#include <algorithm>

template <class T, class G>
Schedule<T, G>::Schedule(Device& dev, const ModelConfig& c, Fsdp<T, G>& fsdp) : dev_(dev), c_(c), fsdp_(fsdp) {
  const std::vector<Unit>& units = fsdp.units();
  weights_.resize(units.size()), grads_.resize(units.size());
  // What a step needs of a parameter is its unit and its offset; nobody looks for a name in a step.
  int64_t discarded = 0;  // nobody computes the gradient of a frozen matrix, but the others' come with what is computed
  for (size_t u = 0; u < units.size(); u++) {
    if (units[u].replicated) replicated_ = int(u);
    for (const Param& p : units[u].params) {
      refs_[p.name] = {int(u), p.offset, !p.has_gradient, p.fp8, 0};
      if (!p.has_gradient && (p.shape.size() == 1 || of_phi(p))) discarded = std::max(discarded, p.numel);
    }
  }
  if (discarded > 0) discarded_ = dev.mem.keep<G>(discarded, "gradients of what is frozen", Purpose::workspace);
  unit_of_ = make_table(c_).unit_of;
  training_ = training_turns(c_, unit_of_), evaluation_ = evaluation_turns(c_, unit_of_);
}

template <class T, class G>
ParamRef Schedule<T, G>::find(const std::string& name) const {
  const auto ref = refs_.find(name);
  return ref == refs_.end() ? ParamRef() : ref->second;
}

// A pointer into a slot is good while the unit is in use, and dangles behind its release: asking then is an error here,
// not a wrong number later.
template <class T, class G>
const T* Schedule<T, G>::weight(const ParamRef& p) const {
  ASSERT(p.exists() && weights_[size_t(p.unit)]);
  const int64_t in_fp8 = fsdp_.units()[size_t(p.unit)].in_fp8;
  ASSERT(!p.fp8);
  return weights_[size_t(p.unit)] + (p.offset - in_fp8);
}

// Kernels that make several gradients at one go write all of them; those of frozen parameters go where nobody looks.
template <class T, class G>
G* Schedule<T, G>::grad(const ParamRef& p) const {
  if (p.frozen) return discarded_;
  ASSERT(p.exists() && grads_[size_t(p.unit)]);
  return grads_[size_t(p.unit)] + p.offset;
}

// As many areas as slots for gradients, so that a unit finds its area read where it finds its slot so.
template <class T, class G>
void Schedule<T, G>::keep_late_sums(int64_t numbers) {
  constexpr int64_t most = int64_t(6) << 20;  // bytes; where rows are wider, steps are long and sums are not noticed
  if (numbers * int64_t(sizeof(acc_t<T>)) > most) return;
  area_numbers_ = numbers;
  for (int i = 0; i < fsdp_.gradient_slots(); i++)
    areas_.emplace_back(dev_, dev_.mem.template keep<acc_t<T>>(numbers, "pieces of sums", Purpose::workspace));
}

template <class T, class G>
typename Schedule<T, G>::LateSums Schedule<T, G>::late_sums(std::initializer_list<ParamRef> of, int64_t numbers) {
  constexpr int64_t vector = 4;  // pieces are written in vectors
  const int u = of.begin()->unit;
  int n = 0;
  for (const ParamRef& p : of) {
    if (!p.exists()) continue;
    n++;
    if (p.frozen || p.unit != u || u == replicated_) return {};
  }
  ASSERT(sums_of_ < 0 || sums_of_ == u);
  if (areas_.empty() || used_ + numbers > area_numbers_ || sums_.n + n > sums_.most) return {};
  sums_of_ = u;
  acc_t<T>* const pieces = areas_[area_].p + used_;
  used_ += (numbers + vector - 1) / vector * vector;
  return {pieces, &sums_};
}

// Replicated parameters are used by every module, so their unit is in use all the time.
template <class T, class G>
void Schedule<T, G>::begin(const std::vector<Turn>& turns, bool last) {
  turns_ = &turns, turn_ = 0, last_ = last;
  fsdp_.begin_micro_batch(last);
  if (c_.forward_prefetch > 0)
    for (int u : {replicated_, turns[0].uses})
      if (u >= 0) fsdp_.prefetch(u);
  if (replicated_ >= 0) weights_[size_t(replicated_)] = fsdp_.use(replicated_);
}

template <class T, class G>
std::vector<int> Schedule<T, G>::first_units() const {
  std::vector<int> units;
  if (c_.forward_prefetch == 0) return units;
  if (replicated_ >= 0) units.push_back(replicated_);
  size_t turn = 0;
  for (int ahead = 0; ahead <= c_.forward_prefetch && turn < training_.size(); ahead++, turn = training_[turn].next_use)
    if (training_[turn].uses >= 0) units.push_back(training_[turn].uses);
  return units;
}

// Any module may write to the replicated unit's gradient, from the head on; it is reduced when the micro-batch ends.
template <class T, class G>
void Schedule<T, G>::begin_backward() {
  if (replicated_ >= 0 && trained(replicated_)) grads_[size_t(replicated_)] = fsdp_.gradient(replicated_);
}

template <class T, class G>
void Schedule<T, G>::end_micro_batch() {
  ASSERT(turn_ == turns_->size());
  if (replicated_ < 0) return;
  fsdp_.release(replicated_);
  if (grads_[size_t(replicated_)]) fsdp_.reduce(replicated_);
  weights_[size_t(replicated_)] = nullptr, grads_[size_t(replicated_)] = nullptr;
}

// The code's order against the list's: a module that computes out of turn would read another unit's weights.
template <class T, class G>
const Turn& Schedule<T, G>::take_turn(Turn::Kind kind, int module) {
  ASSERT(turn_ < turns_->size());
  const Turn& t = (*turns_)[turn_++];
  ASSERT(t.kind == kind && t.module == module);
  return t;
}

// While a unit computes, the next one is on its way. With two slots its gather waits, on its own stream, for the
// release of the unit two before it; with one slot there is none free, prefetch does nothing, and nothing overlaps. A
// large unit that does not wait for a slot of the others is on its way one unit earlier.
template <class T, class G>
void Schedule<T, G>::gather(const Turn& t) {
  if (t.begins_use) fsdp_.gather(t.uses);
  if (t.kind == Turn::forward) {
    // Up to the head: what the backward pass wants depends on what is still resident when it begins.
    size_t next = t.next_use;
    for (int ahead = 0; ahead < c_.forward_prefetch && next <= size_t(c_.head_module()); ahead++) {
      if (next >= turns_->size()) break;
      fsdp_.prefetch((*turns_)[next].uses);
      next = (*turns_)[next].next_use;
    }
    if (c_.forward_prefetch == 0 || next > size_t(c_.head_module()) || next >= turns_->size()) return;
    if (const int u = (*turns_)[next].uses; fsdp_.has_large_slot(u)) fsdp_.prefetch(u);
  } else if (c_.backward_prefetch == BackwardPrefetch::pre) {
    if (const int u = unit_behind(t); u >= 0) fsdp_.prefetch(u);
  }
}

// The first turn of a run waits for the gather; the others find the weights there.
template <class T, class G>
void Schedule<T, G>::use(const Turn& t) {
  if (t.begins_use) weights_[size_t(t.uses)] = fsdp_.use(t.uses);
}

// Behind the last turn of a run. A unit that is not needed soon gives its slot up; the one that the backward pass
// begins with stays resident. A prefetch of kind `post` stands here: between a unit's gradient and its reduction.
template <class T, class G>
void Schedule<T, G>::release(const Turn& t) {
  if (!t.ends_use) return;
  weights_[size_t(t.uses)] = nullptr;
  if (t.reshards) fsdp_.reshard(t.uses);
  else fsdp_.release(t.uses);
  if (t.kind == Turn::gradient && c_.backward_prefetch == BackwardPrefetch::post)
    if (const int u = unit_behind(t); u >= 0) fsdp_.gather(u);
}

// Waits for a gradient slot, which is why it stands in front of the first write and not earlier.
template <class T, class G>
void Schedule<T, G>::gradient(const Turn& t) {
  if (!t.begins_gradient || !trained(t.writes)) return;
  grads_[size_t(t.writes)] = fsdp_.gradient(t.writes);
  if (!areas_.empty()) fsdp_.exposed().wait(ExposedTime::reductions, areas_[area_].summed);
}

template <class T, class G>
bool Schedule<T, G>::takes_rows(const Turn& t, const ops::UsedRows& used) const {
  return t.begins_gradient && t.ends_gradient && trained(t.writes) && fsdp_.takes_rows(t.writes, used);
}

// Behind the last write of a run: from here the reduction runs beside the modules that follow.
template <class T, class G>
void Schedule<T, G>::reduce(const Turn& t, const ops::UsedRows& used) {
  if (!t.ends_gradient || !trained(t.writes)) return;
  grads_[size_t(t.writes)] = nullptr;
  if (sums_of_ < 0) return fsdp_.reduce(t.writes, used);
  ASSERT(sums_of_ == t.writes);
  fsdp_.reduce(t.writes, used, sums_, &areas_[area_].summed);
  area_ = (area_ + 1) % areas_.size();
  sums_ = {}, sums_of_ = -1, used_ = 0;
}

// Behind a micro-batch's last unit comes the first of the next micro-batch. Behind the step's last nobody: AdamW has
// yet to change the weights.
template <class T, class G>
int Schedule<T, G>::unit_behind(const Turn& t) const {
  if (t.next_use < turns_->size()) return (*turns_)[t.next_use].uses;
  const int first = (*turns_)[0].uses;
  return last_ || first == t.uses ? -1 : first;
}

template class Schedule<float, float>;
template class Schedule<bf16, bf16>;
template class Schedule<bf16, float>;
template class Schedule<double, double>;
