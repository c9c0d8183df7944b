// Collectives on a stream. NCCL moves data between GPUs, one a rank; otherwise (CPU ranks, ranks that share a GPU, a
// build without NCCL) the same collectives go over MPI through host memory.
//
// A Channel is a stream with a communicator of its own: one for gathers and one for reductions, so that they overlap
// each other. Collectives are enqueued on the channel's stream and return at once. All ranks must call them in the same
// order, channel by channel. Counts are per rank and 64 bit; any world size.
//
//   Channel gathers(dev, dev.gather(), world, Transport::nccl, "gather", most_bytes, Links::open);
//   gathers.all_gather(slot, count, Dtype::bf16, shard);  // from each rank's shard to all ranks' slots
//   dev.gather().record(gathered);
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "lib/comm/world.h"
#include "lib/device/device.h"
#include "lib/device/peers.h"

enum class Transport { none, nccl, mpi };  // none: one rank
const char* name_of(Transport t);
std::string nccl_version();  // "2.28.9", or "none" in a build without NCCL

// Collectives through a GPU's host memory wait for each other where gathers and reductions run in different orders on
// different ranks: they share a stream.
CommStreams comm_streams(Backend backend, Transport transport);

// What a GPU needs beside the arena. context_bytes: CUDA's context, which is there before a run asks what is free; a
// plan for a GPU that is not here counts it too. library_bytes: what comes after the arena, kernels' code that is
// loaded at its first use, cuBLASLt, graphs; and over NCCL the buffers and code of so many communicators, for three of
// which there is room in any case.
constexpr int64_t context_bytes = int64_t(448) << 20;
constexpr int usual_communicators = 3;
int64_t library_bytes(Backend backend, Transport transport, int communicators);

// Over MPI an all_reduce goes in pieces of multiples of so many numbers for each rank.
constexpr int64_t piece_numbers = 64;

// From now on the arena is memory that other ranks' copy engines can reach. Before Memory::commit(). Throws UsageError
// in a build without NCCL 2.28.
void use_nccl_memory(Device& dev);
// Whether copy engines are what gathers should go by on this device, if its ranks are on one host: where they were
// measured to be faster (Hopper and later), library and driver can, and all GPUs reach each other. A rank that does not
// see the others' GPUs cannot ask: false.
bool copy_engines_pay(const Device& dev, const World& world);

// What copy engines carry on a channel, and no SM has a part in (NCCL's zero-CTA policy on symmetric windows). The rest
// goes by kernels.
enum class CopyEngines { none, all_gather, all_to_all };

// planned: memory is recorded and nobody is talked to, as in a world that is not here (--plan --world N).
enum class Links { planned, open };

// The largest buffers that collectives of a channel will see, all ranks' parts together. What a rank receives before it
// has a place, the parts that a reduction sums and on a GPU an all_to_all's, has over MPI a buffer of its own.
struct ChannelBytes {
  int64_t any, received;  // received <= any
  ChannelBytes(int64_t any, int64_t received) : any(any), received(received) {}
  ChannelBytes(int64_t both) : ChannelBytes(both, both) {}
};

class Channel {
 public:
  // MPI stages what is received through planned memory (CPU), everything through pinned host memory (GPU). Collective
  // over all ranks, of all groups. A world of one needs no transport, whatever is given. engines: of arena memory,
  // whose buffers lie at the same places on all ranks; one host; after use_nccl_memory. Throws NcclError where NCCL
  // would take kernels instead. most_ctas: thread blocks of an NCCL kernel; 0: NCCL's choice.
  Channel(Device& dev, Stream& stream, const World& world, Transport transport, const char* name, ChannelBytes most,
          Links links, CopyEngines engines = CopyEngines::none, int most_ctas = 0);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // buf holds size*count elements; rank r's part, [r*count, (r+1)*count), is copied to all: from buf itself, or from
  // `mine` (count), elsewhere, which is read only.
  void all_gather(void* buf, int64_t count, Dtype t, const void* mine = nullptr);
  // The same by this rank alone, asking nobody: it copies the others' `mine`, which lies there as here, out of their
  // arenas. All ranks have met since it was written, and meet again before it is.
  void all_gather(void* buf, int64_t count, Dtype t, const void* mine, const Peers& peers);
  // In place: this rank's part becomes the sum of that part over all ranks; the other parts are left undefined. Over
  // MPI bf16 is summed in fp32 in rank order; NCCL sums in its ring's order. Both repeat bit for bit.
  void reduce_scatter(void* buf, int64_t count, Dtype t);
  // The same by the caller's own kernels, which `work` enqueues on the stream; bytes: of all parts together.
  void reduce_scatter(int64_t bytes, const std::function<void()>& work);
  // How kernels of this rank find what lies in the arenas of all, on a channel that copy engines carry gathers on.
  // signals: peer_signals(size) in the arena, at the same place on all ranks. Collective. Throws NcclError.
  Peers map_peers(uint32_t* signals);
  // from, to: size*count elements each, apart; part r of rank s's `from` becomes part s of rank r's `to`. No rank's
  // `to` is written before that rank's stream has come here, and what follows on it finds `from` read and `to`
  // complete.
  void all_to_all(const void* from, void* to, int64_t count, Dtype t);
  // The same by this rank alone: from the others' arenas it copies what lies there as `mine` (count) does here, `most`
  // elements of each at a time, to others ((size - 1)*most), one rank's behind the other's. use(first, n): enqueues what
  // reads n of each there, from `first` on, before others come to their place. What is this rank's for itself stays
  // where it is. meet: enqueues a kernel in which all ranks wait for all.
  void all_to_all(const void* mine, int64_t count, Dtype t, const Peers& peers, const std::function<void()>& meet,
                  void* others, int64_t most, const std::function<void(int64_t first, int64_t n)>& use);
  // In place; every rank gets the same bits. Sums over MPI as reduce_scatter does. max is for f32 and f64.
  enum Reduction { sum, max };
  void all_reduce(void* buf, int64_t count, Dtype t, Reduction how = sum);
  void all_reduce(int64_t bytes, const std::function<void()>& work);  // by the caller's own kernels
  void barrier(const std::function<void()>& work);                    // the same way
  void broadcast(void* buf, int64_t bytes, int root);

  Stream& stream() { return stream_; }
  bool communicates() const { return transport_ == Transport::nccl; }  // has a communicator of NCCL's
  int64_t pinned_bytes() const;  // of the host's memory, which a GPU's MPI stages through
  // Whose the collectives are from here on, for the flight record: a unit's name.
  void set_unit(const std::string& unit) { unit_ = unit; }
  double delay_ms = 0;  // for tests: sleeps before each collective

 private:
  struct Impl;
  class Recorded;
  void over_mpi(const char* what, int64_t bytes, std::function<void()> work);
  void by_callers_kernels(Collective what, Via via, const char* name, int64_t bytes, const std::function<void()>& work);
  template <class F>
  void fetch(const Peers& peers, const void* mine, int64_t bytes, const F& place);
  void watch(const std::string& name);
  void open_window();
  Via via(CopyEngines carried) const { return engines_ == carried ? Via::copy_engines : Via::kernels; }
  Device& dev_;
  Stream& stream_;
  World world_;
  Transport transport_;
  ChannelBytes most_;
  std::string unit_;
  CopyEngines engines_;
  std::unique_ptr<Impl> impl_;
};
