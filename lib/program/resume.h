// What a resumed run takes over from its checkpoint, what it may be told otherwise, and what it may not.
//
//   SavedState saved = load_state(o.resume, o.save, world);   // checkpoint.h; with --resume
//   saved.state = read_state(saved.state, "manifest.json");   // options.h: a value for every option
//   take_up(saved.state, &o);                                 // options left open are the checkpoint's
//   Run r = resolve(o, world.size, gpus);
//   compare(saved.state, &r);                                 // throws UsageError; notices say what has changed
#pragma once

#include <cstdint>

#include "nlohmann/json_fwd.hpp"

#include "lib/program/run.h"

// What a checkpoint says beside weights and moments. The order of the data and the learning rate follow from the step.
nlohmann::json state_at(const Run& r, int64_t step);

// What the command line leaves open is the checkpoint's, but for what a run may shed: frozen parameters are trained
// when they are not named again, and how a model is sharded, rounded and kept is each run's own.
void take_up(const nlohmann::json& state, Options* o);

// Refuses what contradicts the checkpoint and does not show in its tensors; notes what differs.
void compare(const nlohmann::json& state, Run* r);
