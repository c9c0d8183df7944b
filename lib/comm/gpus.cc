#include "lib/comm/gpus.h"

#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <set>
#include <sstream>
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

std::string wrong_sharing(const std::vector<RankGpu>& taken) {
  struct Host {
    std::string name;
    int ranks = 0;
    std::set<std::string> visible;
    std::map<std::string, std::vector<size_t>> by_card;  // who takes it
    bool shares() const { return int(by_card.size()) < ranks; }
  };
  std::map<int, Host> hosts;
  for (size_t r = 0; r < taken.size(); r++) {
    Host& h = hosts[taken[r].host];
    h.name = taken[r].host_name, h.ranks++;
    h.visible.insert(taken[r].visible.begin(), taken[r].visible.end());
    h.by_card[taken[r].gpu.card].push_back(r);
  }
  const bool all = std::all_of(hosts.begin(), hosts.end(), [](const auto& h) { return h.second.shares(); });
  for (const auto& [number, h] : hosts) {
    if (!h.shares()) continue;
    const auto shared =
        std::find_if(h.by_card.begin(), h.by_card.end(), [](const auto& c) { return c.second.size() > 1; });
    const int cards = int(h.visible.size());
    if (cards >= h.ranks)
      return strf(
          "ranks %zu and %zu on %s share the GPU %s, and %d GPUs are there for its %d ranks: not all of these see "
          "all; set the same CUDA_VISIBLE_DEVICES for all ranks, or one GPU for each",
          shared->second[0], shared->second[1], h.name.c_str(), shared->first.c_str(), cards, h.ranks);
    if (!all)
      return strf(
          "%s has %d GPU%s for its %d ranks, and other hosts have one for each rank; start %d there (in a "
          "hostfile: %s slots=%d)",
          h.name.c_str(), cards, cards > 1 ? "s" : "", h.ranks, cards, h.name.c_str(), cards);
  }
  return "";
}

DeviceAssignment assign_device(Backend backend, const World& world) {
  DeviceAssignment a;
  a.sharers = world.local_size;
  if (backend == Backend::cpu) return a;
  GpuName mine;
  std::string error, cards;
  int ordinal = 0;
  try {
    const int seen = gpu_count();
    if (seen == 0)
      throw CudaError(strf("rank %d sees no GPU, and others do; look at CUDA_VISIBLE_DEVICES there", world.rank));
    ordinal = world.local_rank % seen;
    mine = name_gpu(ordinal);
    for (int i = 0; i < seen; i++) cards += " " + name_gpu(i).card;
  } catch (const Error& e) { error = e.what(); }
  error = agree(error);
  if (!error.empty()) throw Error(error);  // of all ranks, and no rank's fault
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  // No name has a blank in it. A host is known by its first rank.
  std::vector<RankGpu> taken;
  const std::string here =
      strf("%d %s %s %s", world.rank - world.local_rank, *host ? host : "?", mine.uuid.c_str(), mine.card.c_str());
  for (const std::string& text : gather_texts(here + cards)) {
    std::istringstream words(text);
    RankGpu r;
    words >> r.host >> r.host_name >> r.gpu.uuid >> r.gpu.card;
    r.visible.assign(std::istream_iterator<std::string>(words), {});
    taken.push_back(r);
  }
  error = wrong_sharing(taken);
  if (!error.empty()) throw UsageError(error);
  a = count_gpus(taken, world.rank);
  a.ordinal = ordinal;
  return a;
}
