// The programs whose memory is planned: a step; a micro-batch of a validation or an evaluation; a token of a sample.
// The planner runs them dry and the loop for real, so that both take the same buffers in the same order. The host's
// pointers are not read unless the device's mode is run.
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
    model.fsdp.issued().set_times(alike);
    dev.mem.begin_repeat();
    if (dev.timeline) dev.timeline->begin_repeat();
    issue(m);
    if (alike > 1 && dev.timeline) dev.timeline->skip(alike - 1);
    dev.mem.end_repeat();
  }
  model.fsdp.issued().set_times(1);
  if (last > 0) issue(last);
  model.end_step();
  dev.mem.end();
}

// first: of the validation; its loss begins anew. losses: of each row, pinned, on the host; null: nobody wants them.
template <class T, class G>
void validation_program(Device& dev, Model<T, G>& model, const int32_t* host, bool first, Event& copied,
                        acc_t<T>* losses = nullptr) {
  dev.mem.begin("validation");
  model.evaluate(host, first, copied, losses);
  dev.mem.end();
}

// logits: of the token behind row `row` of the micro-batch, pinned, on the host.
template <class T, class G>
void sample_program(Device& dev, Model<T, G>& model, const int32_t* host, int64_t row, acc_t<T>* logits,
                    Event& copied) {
  dev.mem.begin("sample");
  model.next_logits(host, row, logits, copied);
  dev.mem.end();
}

// What a run has use for beside the step, to plan it and to time its products.
template <class T, class G>
void other_programs(Device& dev, Model<T, G>& model, const Run& r, const int32_t* host, Event& copied) {
  const bool first = true;
  acc_t<T>* const nowhere = nullptr;
  if (r.o.val_every > 0 || !r.o.eval.empty()) validation_program(dev, model, host, first, copied);
  if (r.o.sample > 0) sample_program(dev, model, host, 0, nowhere, copied);
}
