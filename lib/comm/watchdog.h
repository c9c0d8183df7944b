// Ends a run in which a rank is gone, is stopped, or waits for what never comes: with one line that says who and where,
// and a flight record of every rank (flight.h), on all ranks, within a time that the user sets.
//
//   Watchdog watchdog(world, {60, "records"});  // collective; from here to its end
//   train();
//
// A thread a rank. Ten times a second it looks whether the other processes of its host are there, and asks NCCL's
// communicators for errors; twice a second it tells rank 0 how far this rank is, and rank 0 answers. It has a
// communicator of its own, waits in no call, and takes next to no time. What it finds:
//
//   a process of its host is gone     killed, crashed                                            at once
//   NCCL has met an error             in a kernel or on the network; told with NCCL's text       at once
//   a rank does not answer            stopped; its host or network is down                       after the timeout
//   all ranks wait and nothing moves  a collective that some never came to, a lost message       after the timeout
//
// A rank that answers and waits for nobody is at work, however long: a load or a save is no fault. Of the time that
// this thread did not run a fourth of the timeout counts at most, so that a job which is stopped as a whole and
// continued has missed nothing, and one whose processors are overloaded still ends in time.
//
// ncclCommAbort is not called: it is for going on without the communicator, and here the process ends, which frees the
// GPU though kernels still wait on it; in a communicator whose peer is gone it can itself wait.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lib/comm/world.h"

struct WatchdogOptions {
  // 0: nobody is missed and nothing is too long, so channels over NCCL are not followed; what is certain still ends the
  // run.
  double timeout_s = 60;
  std::string records_dir;               // where flight records go; made if it is not there
  std::function<void()> each_tick = {};  // what else the thread is to do, ten times a second; may be empty
};

class Watchdog {
 public:
  // Collective, over a world that init_mpi has told of. One at a time.
  Watchdog(const World& world, const WatchdogOptions& options);
  // Collective: waits for the other ranks, and is the last to look while it does.
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;

 private:
  struct Impl;
  void loop();
  std::unique_ptr<Impl> impl_;
};

// What watches one of NCCL's communicators: returns an error's text, or nothing. Called by a watchdog's thread until
// it is taken away.
int watch_errors(std::function<std::string()> error);
void unwatch_errors(int number);

// What is said of a fault: what it is, and then what the others do, of up to four.
struct RankSeen {
  int rank = 0;
  std::string process, text;  // "host, pid 7", "step 12, all_gather of 'block 3'"
  bool waits = false;
};
std::string fault_text(const std::string& what, const std::vector<RankSeen>& others);
