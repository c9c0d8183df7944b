// Who the ranks are, and what they agree on: MPI starts them, and on the host they tell each other texts. For set-up
// and between steps; never inside one (channel.h).
//
//   const World world = init_mpi(&argc, &argv);
//   std::string error;
//   try {
//     prepare();                                    // may fail on some ranks only
//   } catch (const Error& e) { error = e.what(); }
//   error = agree(error);                           // the lowest rank's error, on all of them
//   if (!error.empty()) throw Error(error);         // together, so that nobody waits for one that is gone
//   require_same(settings, "the configuration");
//   or_abort([&] { train(); });                     // what one rank throws from here on ends all
//   finish_mpi();
//
// Collective over all ranks: init_mpi, number_by_host, finish_mpi, barrier, broadcast_text, gather_texts, agree,
// require_same, and TextChannel but for abandon.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "lib/device/error.h"

// Ranks are numbered host by host, however the launcher dealt them out (mpirun --map-by node): neighbours share a host
// where hosts have room for them, and the ranks of a host are the run [rank - local_rank, rank - local_rank +
// local_size).
struct World {
  int rank = 0, size = 1;
  int local_rank = 0, local_size = 1;  // among the ranks of this host, by a shared-memory split
  int group = 0;  // which of the worlds of this size, where the ranks are cut into several; see shard_group
};
// The ranks in groups of `ranks` neighbours, which must divide the world: a rank's own group, and those that have its
// place in theirs.
World shard_group(const World& world, int ranks);
World replica_group(const World& world, int ranks);
// Whether this rank's group of `ranks` neighbours is on one host, if hosts have runs of neighbours. Ranks may differ.
bool on_one_host(const World& world, int ranks);

// Ends this process with a line on standard error and this status, which is not 0, unless it is destroyed within so
// many seconds (0: never): where no watchdog looks, while MPI starts and ends. Rank 0 speaks, and its launcher ends the
// others then, for which Open MPI's takes some seconds; where no rank 0 can, they say the same 15 s later.
class Deadline {
 public:
  Deadline(double seconds, const std::string& line, int status);
  ~Deadline();
  Deadline(const Deadline&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable met_;
  bool is_met_ = false;
  std::thread thread_;
};

// Starts MPI (once a process) and tells who we are. Errors: MpiError. MPI's own numbers are seen by nobody else.
World init_mpi(int* argc, char*** argv);
// The number that each rank gets: hosts in the order of their lowest ranks, and a host's ranks in the order that they
// have. hosts[r]: anything that rank r's host, and no other, is known by.
std::vector<int> by_host(const std::vector<int>& hosts);
// What init_mpi does with the hosts that there are: from here on all of lib/comm goes by the new numbers. For tests,
// which play hosts. Collective, outside everything that is open.
World number_by_host(int host);
void finish_mpi();
// Kills all ranks, with `text` as the one line said. For errors that other ranks cannot know of. Of several that come
// to this on a host the first is heard. fault: what the ranks were doing tells something, and flight records are
// written where there is a place for them (flight.h).
enum class Cause { error, fault };
[[noreturn]] void abort_all_ranks(const std::string& text, int status, Cause cause = Cause::error);

// Errors of CUDA, cuBLAS, NCCL and MPI are faults: they meet one rank, and the others cannot know of them.
bool is_fault(const std::exception& e);
// With what this rank has met, named by its number.
[[noreturn]] void abort_all_ranks(const std::exception& e);

// Runs f. What it throws, other ranks cannot know of and may be waiting for in a collective: it ends them all.
void or_abort(const std::function<void()>& f);

// Host-side collectives on all ranks, for set-up and between steps; never inside one.
void barrier();
std::string broadcast_text(const std::string& text, int root = 0);
std::vector<std::string> gather_texts(const std::string& text);  // every rank's, in order, on all of them
// All ranks pass their error, empty if none. Returns the lowest rank's error, the same on all ranks, or empty.
std::string agree(const std::string& error);
// Throws UsageError on every rank if `text` is not the same on all; `what` names it, and the error has its lines that
// differ.
void require_same(const std::string& text, const std::string& what);

// The same on a communicator of its own, so that a thread beside the training can use them while the training talks.
// Waiting burns no core. With one rank there is no MPI in it. All of it is collective over `world`, the constructor
// and the destructor too.
class TextChannel {
 public:
  explicit TextChannel(const World& world);
  ~TextChannel();
  TextChannel(const TextChannel&) = delete;
  std::vector<std::string> gather(const std::string& text);  // rank 0: every rank's, in order; other ranks: none
  std::string broadcast(const std::string& text);            // rank 0's
  std::string agree(const std::string& error);
  // For errors after which the other ranks may never come: whoever waits here, or comes later, gets an Abandoned.
  struct Abandoned {};
  void abandon() { abandoned_ = true; }

 private:
  struct Impl;
  World world_;
  std::unique_ptr<Impl> impl_;
  std::atomic<bool> abandoned_{false};
};
std::string mpi_version();
