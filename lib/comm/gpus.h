// Which GPU a rank takes, and who takes it too. A launcher shows all GPUs of a host to every rank (mpirun), or to each
// rank its own (srun --gpus-per-task=1, CUDA_VISIBLE_DEVICES): then all of them call theirs number 0, and only the
// GPUs' own names tell whether it is one GPU or several.
//
//   const DeviceAssignment taken = assign_device(Backend::gpu, world);
//   Device dev(Backend::gpu, taken.ordinal, taken.sharers);
//   const bool nccl = taken.host_cards == world.local_size;    // it wants a card for each rank
#pragma once

#include <string>
#include <vector>

#include "lib/comm/world.h"
#include "lib/device/device.h"

struct DeviceAssignment {
  int ordinal = 0;     // of this rank's GPU, among those that it sees
  int sharers = 1;     // ranks on this rank's GPU, or on a CPU those of the host; itself among them
  int host_cards = 0;  // cards that the ranks of this host take; two parts of a card (MIG) are one
  int world_gpus = 0;  // GPUs that all ranks take
};
// A rank takes GPU number local_rank, modulo those that it sees; it must see one. Collective over all ranks, which are
// all on GPUs or all on CPUs; an error of one is thrown on all, and UsageError for what wrong_sharing says.
DeviceAssignment assign_device(Backend backend, const World& world);

// The counts, without a GPU: what each rank takes, and on which host, by rank. All but the ordinal.
struct RankGpu {
  int host;  // a number that the ranks of a host have in common
  GpuName gpu;
  std::string host_name = {};
  std::vector<std::string> visible = {};  // cards that the rank sees
};
DeviceAssignment count_gpus(const std::vector<RankGpu>& taken, int rank);
// Why ranks must not share GPUs as they do here, or "": on a host there is a card for each, or on other hosts there is.
// That all hosts share theirs is somebody's wish, who has few.
std::string wrong_sharing(const std::vector<RankGpu>& taken);
