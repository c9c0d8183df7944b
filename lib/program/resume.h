// What a resumed run takes over from its checkpoint, what it may be told otherwise, and what it may not.
//
//   SavedState saved = load_resumed(o, world);                // with --resume
//   Run r = resolve_resumed(saved, o, world.size, gpus);      // options left open are the checkpoint's
//   compare(saved.state, &r);                                 // the data is; notices say what has changed
#pragma once

#include <cstdint>

#include "nlohmann/json_fwd.hpp"

#include "lib/program/checkpoint.h"
#include "lib/program/run.h"

// What a checkpoint says beside weights and moments. The order of the data and the learning rate follow from the step.
nlohmann::json state_at(const Run& r, int64_t step);

// What the command line leaves open is the checkpoint's, but for what a run may shed: frozen parameters are trained
// when they are not named again, and how a model is sharded and kept in memory, and who moves it, is each run's own.
void take_up(const nlohmann::json& state, Options* o);

// What --resume names, with a value for every option. Collective over `world`. Throws as load_state and read_state do.
SavedState load_resumed(const Options& o, const World& world);
// As resolve(), behind take_up. Throws UsageError that names the checkpoint, which may have brought what is refused: too
// if the run has another model, seed or global batch.
Run resolve_resumed(const SavedState& saved, Options o, int world_size, int gpus);
// The same error with that name; step_dir: SavedState's.
UsageError of_checkpoint(const UsageError& e, const std::string& step_dir);

// What a checkpoint's model was trained on; nothing is known where there is no state, or an older one.
TokenKind tokens_of(const nlohmann::json& state);

// Refuses other data of the same name; notes what differs.
void compare(const nlohmann::json& state, Run* r);
