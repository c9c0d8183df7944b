// Which unit's output was the first that was not finite: the forward pass of a bad step again, with a look at what each
// module hands on. Costs a step where one is bad, and nothing where none is.
#pragma once

#include <cmath>
#include <string>

#include "lib/comm/flight.h"
#include "lib/program/bad_steps.h"
#include "lib/program/step.h"

// Collective. host, adamw, copied: the step's; the run must not update in the backward pass, by which the weights would
// be others. flags: pinned, of as many numbers as the model has modules. Returns what is to be said, the same on all
// ranks; nothing if all outputs are finite, as they may be where a step that was already running has updated the
// weights.
template <class T, class G>
std::string first_bad_output(Device& dev, Model<T, G>& model, const Run& r, const int32_t* host,
                             const ops::AdamW* adamw, Event& copied, int32_t* flags) {
  flight::set_phase("a step that was not finite, again");
  model.watch_outputs();
  step_program(dev, model, r, host, adamw, copied, std::nan(""));
  dev.compute().copy(flags, model.bad_outputs(), r.model.modules() * int64_t(sizeof(int32_t)));
  dev.compute().synchronize();
  flight::set_phase("");
  const BadOutput first = first_on_any_rank(flags, r.model.modules());
  if (first.module < 0) return "";
  const int unit = model.unit_of(first.module);
  return bad_output_text(r.model, first,
                         unit < 0 ? model.fsdp.units().back().name : model.fsdp.units()[size_t(unit)].name);
}
