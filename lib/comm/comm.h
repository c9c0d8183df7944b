// Ranks and collectives. MPI starts the ranks; NCCL moves data between GPUs, one a rank; otherwise (CPU ranks, ranks
// that share a GPU, a build without NCCL) the same collectives go over MPI through host memory.
//
// A Channel is a stream with a communicator of its own: one for gathers and one for reductions, so that they overlap
// each other. Collectives are enqueued on the channel's stream and return at once. All ranks must call them in the same
// order, channel by channel. Counts are per rank and 64 bit; any world size.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lib/device/device.h"

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

// Starts MPI (once a process) and tells who we are. Errors: MpiError.
World init_mpi(int* argc, char*** argv);
void finish_mpi();
// Kills all ranks, with `text` as the one line said. For errors that other ranks cannot know of.
[[noreturn]] void abort_all_ranks(const std::string& text, int status);

// Runs f. What it throws, other ranks cannot know of and may be waiting for in a collective: it ends them all.
void or_abort(const std::function<void()>& f);

// Host-side collectives on all ranks, for set-up and between steps; never inside one.
void barrier();
std::string broadcast_text(const std::string& text, int root = 0);
// All ranks pass their error, empty if none. Returns the lowest rank's error, the same on all ranks, or empty.
std::string agree(const std::string& error);
// Throws UsageError on every rank if `text` is not the same on all; `what` names it.
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

enum class Transport { none, nccl, mpi };  // none: one rank
const char* name_of(Transport t);
std::string nccl_version();  // "2.28.9", or "none" in a build without NCCL
std::string mpi_version();

// From now on the arena is memory that other ranks' copy engines can reach. Before Memory::commit(). Throws UsageError
// in a build without NCCL 2.28.
void use_nccl_memory(Device& dev);
// Whether copy engines are what gathers should go by on this device, if its ranks are on one host: where they were
// measured to be faster (Hopper and later), the library can, and all GPUs reach each other.
bool copy_engines_pay(const Device& dev);

class Channel {
 public:
  // `max_bytes`: the largest buffer that a collective here will see (all ranks' parts together); MPI stages through
  // planned memory (CPU) or pinned host memory (GPU) of that size. Collective over all ranks, of all groups. A world of
  // one needs no transport, whatever is given. In a planned world (`--plan --world N`) transport says what to plan for
  // and nothing is opened.
  // copy_engines: all_gathers of arena memory go by copy engines and use no SM (NCCL's zero-CTA policy on symmetric
  // windows; one host; after use_nccl_memory). Throws NcclError where NCCL would take kernels instead.
  Channel(Device& dev, Stream& stream, const World& world, Transport transport, const char* name, int64_t max_bytes,
          bool open, bool copy_engines = false);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // In place: buf holds size*count elements; rank r's part, [r*count, (r+1)*count), is copied to all.
  void all_gather(void* buf, int64_t count, Dtype t);
  // In place: this rank's part becomes the sum of that part over all ranks; the other parts are left undefined. Over
  // MPI bf16 is summed in fp32 in rank order; NCCL sums in its ring's order. Both repeat bit for bit.
  void reduce_scatter(void* buf, int64_t count, Dtype t);
  // In place; every rank gets the same bits. Sums over MPI as reduce_scatter does. max is for f64 alone.
  enum Reduction { sum, max };
  void all_reduce(void* buf, int64_t count, Dtype t, Reduction how = sum);
  void broadcast(void* buf, int64_t bytes, int root);

  Stream& stream() { return stream_; }
  double delay_ms = 0;  // for tests: sleeps before each collective

 private:
  struct Impl;
  Device& dev_;
  Stream& stream_;
  World world_;
  Transport transport_;
  int64_t max_bytes_;
  bool copy_engines_;
  std::unique_ptr<Impl> impl_;
};
