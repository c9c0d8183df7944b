// The programs whose memory is planned: a step, and a micro-batch of a validation. The planner runs them dry and the
// loop for real, so that both take the same buffers in the same order. The host's pointers are not read unless the
// device's mode is run.
#pragma once

#include "lib/program/run.h"
#include "model.h"

// The micro-batches between the first and the last are alike: the same buffers, operations and collectives. A dry run
// issues so many of them, with the first, in which its clocks settle; the last of these stands for the rest.
constexpr int64_t dry_micro_batches = 4;

// host: the step's micro-batches, one behind the other; pinned, and free again when `copied` has passed. weight: of its
// gradient; one that is no number makes a step that changes nothing (ops::adamw).
template <class T, class G>
void step_program(Device& dev, Model<T, G>& model, const Run& r, const int32_t* host, const ops::AdamW* adamw,
                  Event& copied, double weight = 1) {
  dev.mem.begin("step");
  model.begin_step(adamw, float(r.o.clip));
  const double scale = weight / double(r.tokens_per_step());
  const int64_t last = r.grad_accum - 1;
  const bool skips = dev.mode != Mode::run && (!dev.timeline || dev.timeline->can_skip());
  auto issue = [&](int64_t m) {
    model.forward_backward(host + m * batch_ints(r.model, r.batch), scale, m == 0, m == last, copied);
  };
  issue(0);
  for (int64_t m = 1, alike; m < last; m += alike) {
    alike = skips && m == dry_micro_batches - 1 ? last - m : 1;
    model.fsdp.trace_times(alike);
    dev.mem.begin_repeat();
    if (dev.timeline) dev.timeline->begin_repeat();
    issue(m);
    if (alike > 1 && dev.timeline) dev.timeline->skip(alike - 1);
    dev.mem.end_repeat();
  }
  model.fsdp.trace_times(1);
  if (last > 0) issue(last);
  model.end_step();
  dev.mem.end();
}

// first: of the validation; its loss begins anew.
template <class T, class G>
void validation_program(Device& dev, Model<T, G>& model, const int32_t* host, bool first, Event& copied) {
  dev.mem.begin("validation");
  model.evaluate(host, first, copied);
  dev.mem.end();
}
