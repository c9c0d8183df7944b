// The directory that a run saves to: which names in it are a checkpoint's, which steps it holds, and that it is this
// run's. Nothing in it that a user may have put there is written over or removed: a name counts as a save's only if it
// is exactly one that a save gives, and what it names is of the kind that a save makes.
//
//   step-20                            a step: manifest.json and rank-N.bin, nothing else
//   latest, .tmp-latest                links to a step
//   .tmp-step-20, .tmp-old-step-10     a step that is being written, or deleted
//   .tmp-probe-1a2b3c4d                a file of a byte at most, by which a rank finds out whether it can write
//   .lock                              a file that the run which saves here has locked: "host HOST, process PID"
//
// These are called on rank 0 unless they say otherwise. dir has no slash at its end.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lib/comm/world.h"
#include "lib/program/directory_lock.h"

// ------------------------------------------------------------------------------------------------------------ names

extern const std::string manifest_name, latest_name, tmp_latest_name;

std::string name_of_step(int64_t step);
int64_t step_of(const std::string& name);     // -1: the name is not a step's
bool is_shard_name(const std::string& name);  // rank-0.bin
std::string tmp_of(const std::string& dir, int64_t step);
std::string old_of(const std::string& dir, int64_t step);

// Whether a file of that absolute path without links, be it there or not, is part of a checkpoint in dir, or of dir if
// that is a step's own directory.
bool in_checkpoint(const std::string& path, const std::string& dir);
// The checkpoint, of whichever run, that this path is or lies inside; empty: none.
std::string checkpoint_around(const std::string& path);

// ------------------------------------------------------------------------------------------------------------ steps

// What --resume says: a step's directory, a directory of steps (its `latest`, without which the newest), or "latest":
// that of save_dir. Returns the step's directory. Throws UsageError.
std::string find_checkpoint(const std::string& resume, const std::string& save_dir);

// "resume from DIR/step-20", or that nothing is there to resume from: for errors that end a run which saves to dir.
std::string way_back(const std::string& dir);

// The steps in a directory, each with what tells its manifest from any other of that name.
using Steps = std::map<int64_t, std::string>;
Steps steps_in(const std::string& dir);

// Throws UsageError if dir holds steps of a run that does not go on: they would be replaced and removed; or something
// of the user's that has a name which saving gives out. On rank 0. Returns the steps that are there.
Steps check_save(const std::string& dir, const std::string& resume);
// Throws Error if another run has saved to dir: a step is there that is not one of `known`.
void require_known(const std::string& dir, const Steps& known);

// Throw Error unless path is a directory of files that a save puts into a step's, and of nothing else; unless path is
// a link to a step, or nothing.
void require_step_files(const std::string& path);
void require_link_to_step(const std::string& path);

// A step, or what is left of one, if it is there. Throws Error if there is anything else in it; what can be removed is
// removed.
void remove_step(const std::string& path);
// What a save that was broken off left in dir. Returns what could not be removed, and why: nothing is lost by that.
// Throws Error if a user's file has such a name; the others are removed all the same.
std::vector<std::string> remove_leftovers(const std::string& dir);

// ------------------------------------------------------------------------------------------------------ this run's

// Throws UsageError, alike on all ranks, with `option` in front, if what rank 0 creates under a name that begins with
// `start` is not seen by all: on other hosts it is another directory of that name. Collective on all ranks.
void require_shared(const World& world, const char* option, const std::string& start);

// What a run holds of the directory that it saves to (where the file system has no locks, require_known is what keeps
// two runs apart), from before it opens its outputs: a run that may not save must
// not have touched those of the run that does.
struct SaveDirectory {
  // Collective; makes dir, locks it, removes what a killed run left in it, and writes and removes a file there from
  // every rank, which all of them must see. found: what check_save returned on rank 0; by itself what is there now.
  // Throws UsageError, the same on all ranks: another run has dir too, or has saved to it since `found`; a rank cannot
  // write there, or has another directory of that name.
  SaveDirectory(const World& world, const std::string& dir, std::optional<Steps> found = std::nullopt);

  std::string dir;                      // without a slash at its end
  std::unique_ptr<DirectoryLock> lock;  // rank 0's
  Steps known;                          // rank 0's: found, and this run's own
  std::vector<std::string> notes;       // rank 0's: what could not be removed
};
