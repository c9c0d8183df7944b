// The programs whose memory is planned: a step, and a micro-batch of a validation. The planner runs them dry and the
// loop for real, so that both take the same buffers in the same order. The host's pointers are not read unless the
// device's mode is run.
#pragma once

#include "lib/program/run.h"
#include "model.h"

// host: the step's micro-batches, one behind the other; pinned, and free again when `copied` has passed.
template <class T, class G>
void step_program(Device& dev, Model<T, G>& model, const Run& r, const int32_t* host, const ops::AdamW* adamw,
                  Event& copied) {
  dev.mem.begin("step");
  model.begin_step(adamw, float(r.o.clip));
  const double scale = 1.0 / double(r.tokens_per_step());
  for (int64_t m = 0; m < r.grad_accum; m++)
    model.forward_backward(host + m * batch_ints(r.model, r.batch), scale, m == 0, m + 1 == r.grad_accum, copied);
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
