// The ranks of one host as a kernel of one of them sees them: their arenas are mapped into its address space, and it
// reads what lies there over NVLink. Buffers lie at the same places in all arenas, since all ranks' plans are the same.
#pragma once

#include <cstdint>

#include "lib/device/dtype.h"

constexpr int most_peers = 8;
constexpr int measured_peers = 2;  // among more it has not been measured what they gain
constexpr int most_peer_blocks = 128;
constexpr int peer_threads = 512;
constexpr int row_of_gathers = most_peer_blocks, row_of_reductions = row_of_gathers + 1;  // of streams
constexpr int peer_rows = row_of_reductions + 1;

// Given to a kernel by value. Each of its blocks meets the same block of the others: it tells all how often it has
// come, and waits until all have come as often (meet, in lib/ops/kernels_peers.cuh). Such kernels run one behind the
// other; those that do nothing else, of two streams, have rows of signals of their own.
struct Peers {
  int ranks = 0, rank = 0;
  char* arena[most_peers] = {};  // this rank's is `base`: a kernel must not reach one memory by two addresses
  char* base = nullptr;          // as buffers have it
  uint32_t* signals = nullptr;  // (peer_rows, ranks): how often each rank's block has come; then this rank's own

  // Where `p`, in this rank's arena, lies in that of rank r.
  template <class T>
  HD T* of(int r, T* p) const {
    return reinterpret_cast<T*>(arena[r] + (reinterpret_cast<uintptr_t>(p) - reinterpret_cast<uintptr_t>(base)));
  }
  HD uint32_t* own() const { return signals + peer_rows * ranks; }
};
// Which of the others, in their order, rank r is to this one.
HD constexpr int among_others(int r, int rank) { return r - (r > rank); }
constexpr int64_t peer_signals(int ranks) { return peer_rows * (int64_t(ranks) + 1); }
