// How far a GPU's stream is in a channel's collectives, known without asking it: a kernel of one thread before and
// behind each writes to host memory. In a CUDA graph as well, since what it writes is a count of its own and no
// argument. About two microseconds each, on the channel's stream.
//
//   Progress progress(dev, stream, lane);
//   flight::issue(lane, "all_gather", "block 3", bytes);
//   progress.starts(), ncclAllGather(...), progress.finishes();
#pragma once

#include "lib/comm/flight.h"
#include "lib/device/device.h"

class Progress {
 public:
  // For a lane of the flight record, whose collectives all run on this stream of a GPU. Waits for the stream.
  Progress(Device& dev, Stream& stream, int lane);
  Progress(const Progress&) = delete;
  void starts();
  void finishes();

 private:
  Stream& stream_;
  int lane_;
  HostBuffer<flight::Marks> marks_;
};
