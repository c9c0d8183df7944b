// What a rank copies out of its peers' memory, whose it is and where it goes: ranks of one process, each with an arena
// that the others see.
#include <memory>
#include <vector>

#include "lib/comm/channel.h"
#include "test/catch.h"

namespace {

constexpr int64_t count = 4 * 37, most = 4 * 11;  // numbers of a part, and of those that are fetched at a time

uint32_t number(int rank, int64_t i) { return uint32_t(1 + rank * 10000 + i); }

// Of an arena: this rank's shard, its gradient (ranks, count), a slot (ranks, count), the parts that it has fetched
// (ranks - 1, count), room for a piece of each (ranks - 1, most).
struct Layout {
  int64_t gradient, slot, fetched, room, all;
  explicit Layout(int ranks)
      : gradient(count),
        slot(gradient + ranks * count),
        fetched(slot + ranks * count),
        room(fetched + (ranks - 1) * count),
        all(room + (ranks - 1) * most) {}
};

void check_fetched(Backend backend, int ranks) {
  INFO(ranks << " ranks");
  const Layout at(ranks);
  Device dev(backend, 0);
  const auto keep = [&] { return dev.mem.keep<uint32_t>(ranks * at.all, "arenas", Purpose::workspace); };
  keep();
  dev.mem.commit(), dev.mem.rewind();
  dev.mode = Mode::run;
  uint32_t* const arenas = keep();
  const auto arena = [&](int rank) { return arenas + rank * at.all; };
  HostBuffer<uint32_t> host(dev, ranks * at.all);
  for (int r = 0; r < ranks; r++)
    for (int64_t i = 0; i < at.all; i++) host[r * at.all + i] = i < at.slot ? number(r, i) : 0;
  Stream& stream = dev.gather();
  stream.copy(arenas, host.get(), ranks * at.all * 4);
  int meetings = 0;
  for (int r = 0; r < ranks; r++) {
    World world;
    world.rank = r, world.size = world.local_size = ranks;
    Channel channel(dev, stream, world, Transport::nccl, "peers", ranks * count * 4, Links::planned,
                    CopyEngines::all_gather);
    Peers peers;
    peers.ranks = ranks, peers.rank = r, peers.base = reinterpret_cast<const char*>(arena(r));
    for (int of = 0; of < ranks; of++) peers.arena[of] = reinterpret_cast<char*>(arena(of));
    channel.all_gather(arena(r) + at.slot, count, Dtype::f32, arena(r), peers);
    uint32_t* const room = arena(r) + at.room;
    const auto keep_piece = [&](int64_t first, int64_t n) {
      for (int i = 0; i < ranks - 1; i++) stream.copy(arena(r) + at.fetched + i * count + first, room + i * n, n * 4);
    };
    const auto meet = [&] { meetings++; };
    channel.all_to_all(arena(r) + at.gradient + r * count, count, Dtype::f32, peers, meet, room, most, keep_piece);
  }
  stream.copy(host.get(), arenas, ranks * at.all * 4);
  stream.synchronize();
  CHECK(meetings == 2 * ranks);
  for (int r = 0; r < ranks; r++) {
    const uint32_t* got = host.get() + r * at.all + at.slot;
    int64_t wrong = 0;
    for (int of = 0; of < ranks; of++)
      for (int64_t i = 0; i < count; i++) wrong += *got++ != number(of, i);
    for (int of = 0; of < ranks; of++)
      for (int64_t i = 0; i < count && of != r; i++) wrong += *got++ != number(of, at.gradient + r * count + i);
    CHECK(wrong == 0);
  }
}

}  // namespace

TEST_CASE("a rank fetches its peers' shards, and its part of their gradients", "[comm]") {
  for (int ranks : {2, 3, 4, most_peers}) check_fetched(Backend::cpu, ranks);
}

TEST_CASE("GPU: a rank fetches its peers' shards, and its part of their gradients", "[comm][gpu]") {
  NEEDS_GPU();
  for (int ranks : {2, 3, 4, most_peers}) check_fetched(Backend::gpu, ranks);
}
