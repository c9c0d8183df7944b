// TensorBoard's event files: the scalars of a step in a record. What `tensorboard --logdir DIR` shows.
//
//   EventFile events("runs/a", EventFile::Begin::anew, 1);   // makes the directory and a file in it
//   events.add(step_record);
//
//   a record  bytes of the event (u64), masked CRC-32C of these eight (u32), the event, its masked CRC-32C (u32);
//             little-endian (TFRecord)
//   an event  tensorflow.Event as a protocol buffer, by protozero; the numbers of its fields are in tensorboard.cc
//
// A run writes a file of its own, and its first records say from which step on it tells: readers drop what an earlier
// run in the directory, which came further than the checkpoint, has told of that step and later ones. So nothing of
// another file is touched, whatever a killed run left at its end.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "lib/program/files.h"

struct StepRecord;

// Throws UsageError if --tensorboard may not write there: anything but a directory; one with event files that are not
// this program's. Nothing is changed.
void check_tensorboard(const std::string& dir);

class EventFile {
 public:
  enum class Begin {
    anew,       // what earlier runs wrote there is removed
    behind_it,  // of a run that is resumed
  };
  EventFile(const std::string& dir, Begin begin, int64_t first_step);  // throws UsageError
  // Loss, gradient norm and so on, under the step's number. What cannot be written whole is not written at all: throws
  // Error then, and the next one may go through.
  void add(const StepRecord& r);

 private:
  void write(const std::string& event);
  std::unique_ptr<files::File> file_;
  int64_t bytes_ = 0;
};
