// What a rank copies out of its peers' memory, whose it is and where it goes, and what it sums there: ranks of one
// process, each with an arena that the others see.
#include <algorithm>
#include <list>
#include <memory>
#include <vector>

#include "cpu/ops.h"
#include "lib/comm/channel.h"
#include "lib/ops/ops.h"
#include "test/arrays.h"
#include "test/catch.h"

namespace {

constexpr int64_t count = 4 * 37, most = 4 * 11;  // numbers of a part, and of those that are fetched at a time

uint32_t number(int rank, int64_t i) { return uint32_t(1 + rank * 10000 + i); }

// Of one rank of so many, whose arenas follow each other, `bytes` each.
Peers peers_of(char* arenas, int64_t bytes, int ranks, int rank) {
  Peers peers;
  peers.ranks = ranks, peers.rank = rank, peers.base = arenas + rank * bytes;
  for (int of = 0; of < ranks; of++) peers.arena[of] = arenas + of * bytes;
  return peers;
}

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
    const Peers peers = peers_of(reinterpret_cast<char*>(arenas), 4 * at.all, ranks, r);
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

// Every rank sums its part of what lies in all arenas, each on a stream of its own, since they wait for each other: all
// their blocks must fit on the GPU, so that no thread has more than one vector.
template <class To, class E>
void check_summed(int ranks, bool accumulate, ops::GradNorm p) {
  INFO(ranks << " ranks, " << sizeof(E) << " to " << sizeof(To) << " bytes, accumulate " << accumulate << ", norm "
             << int(p));
  constexpr int64_t vector = 16 / int64_t(sizeof(E));
  const int64_t n = (peer_threads * (most_peer_blocks / ranks) - 37) * vector, parts = ranks * n * int64_t(sizeof(E)),
                arena = parts + (peer_signals(ranks) + 4) / 4 * 16;
  std::vector<E> gradients(size_t(ranks * ranks * n));  // (ranks, owners, n)
  for (size_t i = 0; i < gradients.size(); i++) gradients[i] = E(float(int(i * 7919 % 2003) - 1001) / 256);
  std::vector<char> host(size_t(ranks * arena));
  for (int r = 0; r < ranks; r++)
    std::copy_n(reinterpret_cast<const char*>(&gradients[size_t(r * ranks * n)]), parts, &host[size_t(r * arena)]);
  std::vector<To> shards(size_t(ranks * n));
  for (size_t i = 0; i < shards.size(); i++) shards[i] = To(float(int(i * 31 % 97) - 48) / 16);
  std::vector<double> powers(size_t(ranks), NAN);
  std::vector<To> want = shards;
  std::vector<double> want_powers(size_t(ranks), NAN);
  for (int r = 0; r < ranks; r++) {
    const auto part = [&](int of) { return &gradients[size_t((of * ranks + r) * n)]; };
    std::vector<E> others;
    for (int of = 0; of < ranks; of++)
      if (of != r) others.insert(others.end(), part(of), part(of) + n);
    cpu::sum_parts(&want[size_t(r * n)], part(r), r, others.data(), n, ranks, accumulate, {p, &want_powers[size_t(r)]});
  }

  Device& dev = test_device(Backend::gpu);
  Arrays arrays(dev.compute());
  char* const arenas = arrays.up(host);
  To* const to = arrays.up(shards);
  double *const out = arrays.up(powers), *const partials = arrays.scratch<double>(ranks * ops::sum_partials());
  std::list<Stream> streams;
  // What follows a sum may hold up another rank's, where streams share a queue of the hardware's; four do not.
  const bool norms = ranks <= 4;
  for (int r = 0; r < ranks; r++) {
    Peers peers = peers_of(arenas, arena, ranks, r);
    peers.signals = reinterpret_cast<uint32_t*>(arenas + r * arena + parts);
    const E* const mine = reinterpret_cast<const E*>(arenas + r * arena) + r * n;
    const ops::PowerSum sum{p, norms ? out + r : nullptr, partials + r * ops::sum_partials()};
    ops::sum_parts(streams.emplace_back(dev, Stream::normal), to + r * n, mine, peers, n, accumulate, sum);
  }
  for (Stream& s : streams) s.synchronize();
  arrays.down();
  CHECK(std::equal(shards.begin(), shards.end(), want.begin(), [](To x, To y) { return float(x) == float(y); }));
  for (int r = 0; r < ranks && norms; r++) CHECK(powers[size_t(r)] == Approx(want_powers[size_t(r)]).epsilon(1e-6));
}

}  // namespace

TEST_CASE("a rank fetches its peers' shards, and its part of their gradients", "[comm]") {
  for (int ranks : {2, 3, 4, most_peers}) check_fetched(Backend::cpu, ranks);
}

TEST_CASE("GPU: a rank fetches its peers' shards, and its part of their gradients", "[comm][gpu]") {
  NEEDS_GPU();
  for (int ranks : {2, 3, 4, most_peers}) check_fetched(Backend::gpu, ranks);
}

TEST_CASE("GPU: ranks of one GPU sum their parts in each other's memory", "[comm][gpu]") {
  NEEDS_GPU();
  const Device& dev = test_device(Backend::gpu);
  if (dev.compute_capability < 90 || has_small_memory(dev.compute_capability) || dev.multiprocessors < most_peer_blocks)
    SKIP_TEST("the blocks of all ranks do not fit on this GPU");
  // What is launched for the first time waits for all that runs, and of that some would wait for it: what ends a sum is
  // launched first by a rank alone.
  check_summed<float, bf16>(1, /*accumulate=*/false, ops::GradNorm::two);
  for (int ranks : {2, 3, 4, most_peers})
    for (ops::GradNorm p : {ops::GradNorm::one, ops::GradNorm::two, ops::GradNorm::three, ops::GradNorm::inf}) {
      check_summed<bf16, bf16>(ranks, /*accumulate=*/false, p);
      check_summed<float, bf16>(ranks, /*accumulate=*/false, p);
      check_summed<float, bf16>(ranks, /*accumulate=*/true, p);
      check_summed<float, float>(ranks, /*accumulate=*/true, p);
    }
}
