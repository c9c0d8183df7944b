// A program's process as one of MPI's ranks: from its options to its exit status.
//
//   return run_as_rank(&argc, &argv, o, error, [&](const World& world) { train(o, world); });
#pragma once

#include <functional>
#include <string>

#include "lib/comm/world.h"
#include "lib/program/options.h"

// Starts MPI, calls run on every rank with a watchdog beside it, ends MPI and returns the process's exit status.
// error: what this rank found wrong with its options, which ends all ranks before run. What run throws is the same on
// all ranks, and rank 0 says it; a fault, or what is no Error, ends all ranks from the one that met it. MPI has
// --timeout to start and to end, and 300 s to start where --timeout is not given.
int run_as_rank(int* argc, char*** argv, const Options& o, const std::string& error,
                const std::function<void(const World&)>& run);
