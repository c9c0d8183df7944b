#include "fsdp/exposed.h"

#include <optional>

void ExposedTime::begin() {
  timing_ = true;
  step_ ^= 1;
  for (Waits& w : waits_[step_]) w.used = 0;
}

void ExposedTime::wait(Of of, const Event& e) {
  Stream& s = dev_.compute();
  std::optional<MarkedWait> marked;
  if (communicates_) marked.emplace(dev_);
  if (!timing_ || s.off()) {
    s.wait(e);
    return;
  }
  Waits& w = waits_[step_][of];
  const size_t i = w.used++;
  if (i == w.events.size()) w.events.emplace_back(Event(dev_, Event::timed), Event(dev_, Event::timed));
  s.record(w.events[i].first);
  s.wait(e);
  s.record(w.events[i].second);
}

void ExposedTime::read(bool latest, double* of_gathers, double* of_reductions) {
  double sum[2] = {0, 0};
  for (int of = 0; of < 2; of++) {
    Waits& w = waits_[latest ? step_ : step_ ^ 1][of];
    for (size_t i = 0; i < w.used; i++) sum[of] += elapsed_ms(w.events[i].first, w.events[i].second);
  }
  *of_gathers = sum[gathers], *of_reductions = sum[reductions];
}
