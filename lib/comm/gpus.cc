#include "lib/comm/gpus.h"

#include <set>
#include <utility>

DeviceAssignment count_gpus(const std::vector<RankGpu>& taken, int rank) {
  const RankGpu& mine = taken[size_t(rank)];
  DeviceAssignment a;
  std::set<std::string> cards;
  std::set<std::pair<int, std::string>> gpus;  // tests play several hosts on one, each with GPUs of its own
  a.sharers = 0;
  for (const RankGpu& other : taken) {
    gpus.insert({other.host, other.gpu.uuid});
    if (other.host != mine.host) continue;
    cards.insert(other.gpu.card);
    a.sharers += other.gpu.uuid == mine.gpu.uuid;
  }
  a.host_cards = int(cards.size()), a.world_gpus = int(gpus.size());
  return a;
}

DeviceAssignment assign_device(Backend backend, const World& world) {
  DeviceAssignment a;
  a.sharers = world.local_size;
  if (backend == Backend::cpu) return a;
  GpuName mine;
  std::string error;
  int ordinal = 0;
  try {
    const int seen = gpu_count();
    if (seen == 0)
      throw CudaError(strf("rank %d sees no GPU, and others do; look at CUDA_VISIBLE_DEVICES there", world.rank));
    ordinal = world.local_rank % seen;
    mine = name_gpu(ordinal);
  } catch (const Error& e) { error = e.what(); }
  error = agree(error);
  if (!error.empty()) throw CudaError(error);
  // Neither name has a blank in it. A host is known by its first rank.
  std::vector<RankGpu> taken;
  for (const std::string& text :
       gather_texts(strf("%d ", world.rank - world.local_rank) + mine.uuid + " " + mine.card)) {
    const size_t uuid = text.find(' ') + 1, card = text.find(' ', uuid) + 1;
    taken.push_back({std::stoi(text), {text.substr(uuid, card - 1 - uuid), text.substr(card)}});
  }
  a = count_gpus(taken, world.rank);
  a.ordinal = ordinal;
  return a;
}
