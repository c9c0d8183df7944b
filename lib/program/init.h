// --init DIR: a run that begins with the model of a folder (model_folder.h).
//
//   const ModelFolder from = folder_for_all(o.init, world);     // rank 0 reads config.json and headers
//   Run r = resolve_from(from, o, world.size, gpus);            // options left open are the model's
//   load_model(from, dev, world, parts_of(model.fsdp));         // each rank reads the bytes of its own shards
#pragma once

#include <string>
#include <vector>

#include "lib/program/checkpoint.h"
#include "lib/program/model_folder.h"

// Collective; throws UsageError on all ranks.
ModelFolder folder_for_all(const std::string& dir, const World& world);

// As resolve(), but what the command line leaves open is the model's; --seq is its longest, but no more than 4096.
// Throws UsageError: an option says otherwise than config.json (but for --attn nsa with a model of dense attention);
// the sizes are not possible here; a tensor that the model needs is not there, or has another shape or a dtype other
// than BF16, F16 and F32; there is one that the model does not have.
Run resolve_from(const ModelFolder& from, Options o, int world_size, int gpus);

// Fills in weights; what the folder does not have (NSA's gates and compression, where its attention is dense) stays as
// it is. Collective, in Mode::run; waits for the compute stream. Throws UsageError, the same on all ranks. Moments are
// left alone.
void load_model(const ModelFolder& from, Device& dev, const World& world, const std::vector<Part>& parts);

// One line for people: what the model was, and what became of it.
std::string init_text(const ModelFolder& from, const Run& r);
