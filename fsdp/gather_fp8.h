// Gathers of units whose matrices are multiplied in fp8: those travel as e4m3, and what is not in fp8 follows in T.
// Each scale follows from the largest number that any rank has of what shares it, as the weights are now.
#pragma once

#include <cstdint>
#include <vector>

#include "fsdp/issued.h"
#include "fsdp/unit.h"
#include "lib/comm/comm.h"
#include "lib/device/device.h"

template <class T>
class Fp8Gathers {
 public:
  // Takes memory for the largest numbers and scales of what is in fp8. Keeps references.
  Fp8Gathers(Device& dev, const std::vector<Unit>& units);

  struct Shard {  // of a unit
    int rank, ranks;
    const float* master;
    bool gathered;  // false: it is the whole unit, and only cast
  };
  // On the channel's stream: my shard to where the all_gathers want it, then those. slot: as fp8_layout has it.
  void gather(int u, const Shard& mine, T* slot, Channel& channel, IssueLog* issued);
  // The weights are new, or may be: their largest numbers are looked for at the next gather.
  void forget() { current_.assign(current_.size(), false); }
  // What the codes of a unit from `offset` on, which share a scale, are multiplied by (1).
  const float* unscale(int u, int64_t offset) const;

 private:
  struct Scales {              // of a unit, on all ranks alike; null: it has nothing in fp8
    float* amax = nullptr;     // (scaled)
    float* unscale = nullptr;  // (scaled, scale_stride)
  };
  template <class F>
  void each_piece(int u, const Shard& mine, F f) const;
  void find_amax(int u, const Shard& mine, Channel& channel, IssueLog* issued);

  const std::vector<Unit>& units_;
  std::vector<Scales> scales_;  // by unit
  std::vector<bool> current_;   // by unit: amax is of the weights as they are
  float* partials_ = nullptr;
};
