// How a kernel comes to see its peers' arenas: by a window of NCCL's on them.
#pragma once

#include <vector>

#include "lib/device/device.h"
#include "lib/device/peers.h"

namespace peers {
// Fills in the arenas, of a window (an ncclWindow_t) that all ranks of an ncclComm_t have opened on theirs. Returns of
// how many ranks a kernel can read them; if not of all, none is filled in. Waits for the stream.
int map(Stream& stream, void* comm, void* window, Peers* p);
// The first signal of each rank, as this rank reads them. Waits for the stream.
std::vector<uint32_t> read(Stream& stream, const Peers& p);
}  // namespace peers
