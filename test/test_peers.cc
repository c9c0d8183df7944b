// What ranks fetch from each other's memory, whose they are and when: ranks of one process here, each with a stream of
// its own and an arena that the others see.
#include <cstring>
#include <memory>
#include <vector>

#include "lib/comm/channel.h"
#include "lib/ops/ops.h"
#include "test/catch.h"

namespace {

constexpr int64_t count = 4 * 37;  // numbers of a part

uint32_t number(int round, int rank, int64_t i) { return uint32_t(1 + round * 100000 + rank * 10000 + i); }

// Of an arena: signals, this rank's shard, its gradient (ranks, count), a slot (ranks, count), the parts that it has
// fetched (ranks - 1, count).
struct Layout {
  int64_t signals, shard, gradient, slot, fetched, all;
  explicit Layout(int ranks)
      : signals(0),
        shard((peer_signals(ranks) + 3) / 4 * 4),
        gradient(shard + count),
        slot(gradient + ranks * count),
        fetched(slot + ranks * count),
        all(fetched + (ranks - 1) * count) {}
};

struct Rank {
  Stream stream;
  Channel channel;
  Peers peers;
  uint32_t* arena;
  Rank(Device& dev, const World& world, uint32_t* arenas, const Layout& at)
      : stream(dev, Stream::high),
        channel(dev, stream, world, Transport::nccl, "peers", count * world.size * 4, Links::planned,
                CopyEngines::all_gather),
        arena(arenas + world.rank * at.all) {
    peers.ranks = world.size, peers.rank = world.rank;
    peers.base = reinterpret_cast<const char*>(arena);
    peers.signals = arena + at.signals;
    for (int r = 0; r < world.size; r++) peers.arena[r] = reinterpret_cast<char*>(arenas + r * at.all);
  }
};

// Rounds in which every rank writes a shard and a gradient, and all fetch all. Without `meets` a round is over before
// the next call.
void check_fetched(Backend backend, int ranks, bool meets) {
  constexpr int rounds = 3;
  INFO(ranks << " ranks");
  const Layout at(ranks);
  Device dev(backend, 0);
  const auto keep = [&] { return dev.mem.keep<uint32_t>(ranks * at.all, "arenas", Purpose::workspace); };
  keep();
  dev.mem.commit(), dev.mem.rewind();
  dev.mode = Mode::run;
  uint32_t* const arenas = keep();
  const int64_t written = (1 + ranks) * count, read = (2 * ranks - 1) * count;
  HostBuffer<uint32_t> from(dev, rounds * ranks * written), to(dev, rounds * ranks * read);
  for (int round = 0; round < rounds; round++)
    for (int r = 0; r < ranks; r++)
      for (int64_t i = 0; i < written; i++) from[(round * ranks + r) * written + i] = number(round, r, i);
  dev.compute().zero(arenas, ranks * at.all * 4);
  dev.compute().synchronize();

  std::vector<std::unique_ptr<Rank>> all;
  for (int r = 0; r < ranks; r++) {
    World world;
    world.rank = r, world.size = world.local_size = ranks;
    all.push_back(std::make_unique<Rank>(dev, world, arenas, at));
  }
  const auto settle = [&] {
    for (auto& rank : all) rank->stream.synchronize();
  };
  for (int round = 0; round < rounds; round++) {
    for (int r = 0; r < ranks; r++) {
      Rank& rank = *all[size_t(r)];
      rank.stream.sleep(meets ? double((r * 7 + round * 3) % 5) : 0);
      rank.stream.copy(rank.arena + at.shard, &from[(round * ranks + r) * written], written * 4);
      if (meets) ops::meet_peers(rank.stream, rank.peers, row_of_gathers);
    }
    if (!meets) settle();
    for (int r = 0; r < ranks; r++) {
      Rank& rank = *all[size_t(r)];
      rank.channel.all_gather(rank.arena + at.slot, count, Dtype::f32, rank.arena + at.shard, rank.peers);
      rank.channel.all_to_all(rank.arena + at.gradient, rank.arena + at.fetched, count, Dtype::f32, rank.peers, [&] {
        if (meets) ops::meet_peers(rank.stream, rank.peers, row_of_reductions);
      });
      rank.stream.copy(&to[(round * ranks + r) * read], rank.arena + at.slot, read * 4);
    }
    if (!meets) settle();
  }
  settle();
  for (int round = 0; round < rounds; round++)
    for (int r = 0; r < ranks; r++) {
      const uint32_t* got = &to[(round * ranks + r) * read];
      int64_t wrong = 0;
      for (int of = 0; of < ranks; of++)
        for (int64_t i = 0; i < count; i++) wrong += *got++ != number(round, of, i);
      for (int of = 0; of < ranks; of++)
        for (int64_t i = 0; i < count && of != r; i++) wrong += *got++ != number(round, of, (1 + r) * count + i);
      CHECK(wrong == 0);
    }
}

}  // namespace

TEST_CASE("a rank fetches its peers' shards, and its part of their gradients", "[comm]") {
  for (int ranks : {2, 3, 4, most_peers}) check_fetched(Backend::cpu, ranks, /*meets=*/false);
}

// More ranks than these would have to share the GPU's queues, and wait there for each other.
TEST_CASE("GPU: ranks that have met find what their peers wrote before", "[comm][gpu]") {
  NEEDS_GPU();
  for (int ranks : {2, 3, 4}) check_fetched(Backend::gpu, ranks, /*meets=*/true);
}
