#include "lib/comm/peers.h"

#if FSDP_CUDA && FSDP_NCCL
#include <nccl.h>
#if NCCL_VERSION_CODE >= 22800
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-parameter"
#include <nccl_device.h>
#pragma GCC diagnostic pop
#define WINDOWS 1
#endif
#endif

#ifdef WINDOWS
namespace gpu {
static __global__ void find_arenas(char** arenas, ncclWindow_t window, int ranks) {
  for (int r = 0; r < ranks; ++r) arenas[r] = static_cast<char*>(ncclGetLsaPointer(window, 0, r));
}
static __global__ void read_signals(uint32_t* to, Peers p) {
  for (int r = 0; r < p.ranks; ++r) to[r] = *reinterpret_cast<volatile const uint32_t*>(p.of(r, p.signals));
}
}  // namespace gpu

int peers::map(Stream& stream, void* comm, void* window, Peers* p) {
  const int reached = ncclTeamLsa(static_cast<ncclComm_t>(comm)).nRanks;
  if (reached != p->ranks) return reached;
  HostBuffer<char*> arenas(stream.device(), p->ranks);
  gpu::find_arenas<<<1, 1, 0, stream.cuda()>>>(arenas.get(), static_cast<ncclWindow_t>(window), p->ranks);
  CUDA_CHECK_LAUNCH();
  stream.synchronize();
  for (int r = 0; r < p->ranks; ++r) p->arena[r] = r == p->rank ? p->base : arenas[r];
  return reached;
}

std::vector<uint32_t> peers::read(Stream& stream, const Peers& p) {
  HostBuffer<uint32_t> names(stream.device(), p.ranks);
  gpu::read_signals<<<1, 1, 0, stream.cuda()>>>(names.get(), p);
  CUDA_CHECK_LAUNCH();
  stream.synchronize();
  return std::vector<uint32_t>(names.get(), names.get() + p.ranks);
}
#endif
