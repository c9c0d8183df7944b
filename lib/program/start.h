// From options to a run that is about to make its first step: what all ranks have agreed on, and what each has opened.
//
//   Job job = start(options, world, "./train --preset tiny");   // collective
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lib/comm/comm.h"
#include "lib/comm/watchdog.h"
#include "lib/program/checkpoint.h"
#include "lib/program/data.h"
#include "lib/program/diagnostics.h"
#include "lib/program/evaluation.h"
#include "lib/program/json.h"
#include "lib/program/launch.h"
#include "lib/program/model_folder.h"
#include "lib/program/outputs.h"
#include "lib/program/plan.h"
#include "lib/program/run.h"
#include "lib/program/telemetry.h"

struct Job {
  const World& world;
  SavedState saved = {};                        // of the checkpoint that is resumed; its state is null if there is none
  std::optional<ModelFolder> init = {};         // of --init, where no checkpoint is resumed
  std::unique_ptr<SaveDirectory> save_to = {};  // with --save
  OutputLocks locks = {};                       // rank 0's
  Run r = {};
  std::unique_ptr<Corpus> data = {}, val_data = {};
  std::unique_ptr<EvalSet> eval = {};  // with --eval
  std::vector<int32_t> prompt = {};    // with --sample
  Transport transport = Transport::none;
  int gpus_used = 0;                          // by all ranks
  std::unique_ptr<Device> dev = {};           // its memory is planned and taken
  std::unique_ptr<Telemetry> telemetry = {};  // rank 0's
  std::unique_ptr<Diagnostics> diagnostics = {};
  std::vector<RankFacts> ranks = {};
  std::optional<Price> price = {};  // on a GPU that chips.h knows; rank 0's
  std::string command = {};         // as it was typed, behind mpirun
};

// Collective. An error that all ranks can know of is agreed on and thrown on every rank, UsageError where the user
// asked for what cannot be, or started ranks in a way that nobody means (launch.h); any other ends all ranks from where
// it happened. Rank 0 says where the ranks are and what is about to run. typed: the command without mpirun. world must
// outlive the job.
Job start(const Options& o, const World& world, const std::string& typed);

// Who watches a run: it leaves flight records beside the diagnostics, or the checkpoints, and rank 0's looks for the
// file that halts a run.
WatchdogOptions watchdog_options(const Options& o, const World& world);
