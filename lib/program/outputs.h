// The files that a run writes: none of them may be one that it reads, another that it writes, or somebody else's.
//
//   ./train --data corpus.txt --log corpus.txt     would write the log over the corpus
#pragma once

#include <memory>

#include "lib/program/directory_lock.h"
#include "lib/program/options.h"

// Throws UsageError, or Error, that names the option and the file: --log, --trace or --export is the file of --data,
// --val-data, --eval or --config, or one of the others, by whatever path or link; it lies in a step of --save's or
// --resume's directory, or is one of --diagnostics' files; check_log, check_trace or check_export refuses it. The same
// of --diagnostics, a directory, which must not be --save's or --resume's either, and so with --tensorboard; see
// check_diagnostics and check_tensorboard. On rank 0, which writes them, before anything is written.
void check_outputs(const Options& o);

// What a run holds of the directories of --tensorboard and --diagnostics, from before it opens anything: a run that may
// not write there must not have touched what the run that does writes. --save and --log are locked where they are
// opened.
struct OutputLocks {
  std::unique_ptr<DirectoryLock> tensorboard, diagnostics;
};
// Makes those directories. Throws UsageError, with the option and who has it, if another run does. On rank 0.
OutputLocks lock_outputs(const Options& o);

// From here on a write to a closed pipe (./train | head -1), or beyond what a file may hold (ulimit -f), is an error of
// the call, as a full disk is, and no signal that ends the process: what cannot be said is lost, and training goes on.
void ignore_write_signals();
