// lib/comm/comm.h: the collectives and the host-side agreements between ranks, at any world size. Every rank can
// compute what every other rank holds (value() below), so each checks its results by itself. Between two collectives
// nothing here throws: a rank that left early would leave the others waiting.
#include "test/catch.h"
#include "test/errors.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

// Number i of a rank's data: 24 random bits and a random exponent, so that sums round, and another order or another
// rounding of the sum shows.
uint64_t mix(uint64_t x) {  // splitmix64 (Steele et al. 2014)
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
template <class T>
T value(uint64_t seed, int rank, int64_t i) {
  const uint64_t x = mix(mix(seed * 1000 + uint64_t(rank)) + uint64_t(i));
  const double v = std::ldexp(double(x >> 40) * 0x1p-23 - 1, int(x & 15) - 8);
  if constexpr (std::is_same_v<T, double>) return v + std::ldexp(double(x >> 8 & 0xffffffffu), -60);
  else return T(float(v));
}
// The sum over ranks, in rank order, in fp32 for bf16; rounded once at the end.
template <class T>
T sum_in_order(uint64_t seed, int ranks, int64_t i) {
  acc_t<T> sum = acc_t<T>(value<T>(seed, 0, i));
  for (int r = 1; r < ranks; ++r) sum += acc_t<T>(value<T>(seed, r, i));
  return T(sum);
}

constexpr int64_t largest_count = 100003;  // a prime: no power of two divides a part
constexpr int64_t counts[] = {0, 1, 7, 64, 1000, largest_count};
constexpr int64_t guard = 64;  // bytes behind a buffer that nobody may touch
constexpr char untouched = 0x5a;

// Two channels, as training has them, over planned buffers of a device of their own.
struct Rig {
  const World world = test_world();
  const Transport transport;
  const int64_t bytes;  // of each buffer
  Device dev;
  std::unique_ptr<Channel> gathers, reductions;
  char *one = nullptr, *two = nullptr;
  HostBuffer<char> host;

  explicit Rig(Backend backend, Transport over = Transport::mpi)
      : transport(world.size == 1 ? Transport::none : over),
        bytes(largest_count * 8 * world.size),
        dev(backend, backend == Backend::gpu ? world.local_rank % gpus() : 0,
            backend == Backend::gpu ? (world.local_size + gpus() - 1) / gpus() : world.local_size,
            comm_streams(backend, transport)),
        host(dev, bytes + guard) {
    lay_out(Links::planned);
    dev.mem.commit();
    lay_out(Links::open);
    dev.mode = Mode::run;
  }
  // Both streams are done before either channel goes.
  ~Rig() {
    try {
      dev.compute().synchronize();
      dev.gather().synchronize();
      dev.reduce().synchronize();
    } catch (const Error& e) { std::fprintf(stderr, "rank %d: %s\n", world.rank, e.what()); }
  }
  void lay_out(Links links) {
    one = dev.mem.keep<char>(bytes + guard, "one", Purpose::gather_slots);
    two = dev.mem.keep<char>(bytes + guard, "two", Purpose::gradient_slots);
    gathers.reset();
    gathers = std::make_unique<Channel>(dev, dev.gather(), world, transport, "gather", bytes, links);
    reductions.reset();
    reductions = std::make_unique<Channel>(dev, dev.reduce(), world, transport, "reduce", bytes, links);
  }
  bool exact() const { return transport != Transport::nccl; }  // sums in rank order
  // A stream's work has an error to tell only here; it is kept for the CHECK, not thrown.
  std::string finish(Stream& s) {
    try {
      s.synchronize();
      return "";
    } catch (const Error& e) { return e.what(); }
  }
  // data -> buf, with a guard behind it; the collective; buf -> data. Whether all went well.
  template <class T>
  bool around(Channel& channel, char* buf, std::vector<T>& data, const std::function<void(T*)>& collective) {
    const int64_t n = int64_t(data.size() * sizeof(T));
    if (n) std::memcpy(host.get(), data.data(), size_t(n));
    std::memset(host.get() + n, untouched, size_t(guard));
    Stream& s = channel.stream();
    s.copy(buf, host.get(), n + guard);
    collective(reinterpret_cast<T*>(buf));
    s.copy(host.get(), buf, n + guard);
    const std::string error = finish(s);
    CHECK(error == "");
    if (n) std::memcpy(data.data(), host.get(), size_t(n));
    return error.empty() && std::count(host.get() + n, host.get() + n + guard, untouched) == guard;
  }
};

template <class T>
bool same(const T& a, const T& b) {
  return std::memcmp(&a, &b, sizeof(T)) == 0;
}
template <class T>
T nan() {
  T v;
  std::memset(static_cast<void*>(&v), 0xff, sizeof v);
  return v;
}

// In place: a rank sets its own part alone. Or its part lies elsewhere, and comes from there.
template <class T>
void check_all_gather(Rig& rig, int64_t count, uint64_t seed, bool apart = false) {
  const int ranks = rig.world.size, rank = rig.world.rank;
  std::vector<T> data(size_t(count * ranks), nan<T>()), mine;
  for (int64_t i = 0; i < count; ++i) mine.push_back(value<T>(seed, rank, i));
  if (!apart) std::copy(mine.begin(), mine.end(), data.begin() + rank * count);
  CHECK(rig.around<T>(*rig.gathers, rig.one, data, [&](T* buf) {
    if (!apart) return rig.gathers->all_gather(buf, count, dtype_of<T>);
    std::memcpy(rig.host.get(), mine.data(), mine.size() * sizeof(T));
    rig.gathers->stream().copy(rig.two, rig.host.get(), count * int64_t(sizeof(T)));
    rig.gathers->all_gather(buf, count, dtype_of<T>, rig.two);
  }));
  int64_t wrong = 0;
  for (int r = 0; r < ranks; ++r)
    for (int64_t i = 0; i < count; ++i) wrong += !same(data[size_t(r * count + i)], value<T>(seed, r, i));
  CAPTURE(name_of(dtype_of<T>), count, ranks);
  CHECK(wrong == 0);
}

// How far a sum may be from the one in rank order: nothing, or what adding in another order can make.
template <class T>
double allowed(const Rig& rig, uint64_t seed, int64_t i) {
  if (rig.exact()) return 0;
  const double eps = sizeof(T) == 2 ? 0x1p-8 : sizeof(T) == 4 ? 0x1p-23 : 0x1p-52;
  double size = 0;
  for (int r = 0; r < rig.world.size; ++r) size += std::abs(double(value<T>(seed, r, i)));
  return eps * rig.world.size * size;
}

template <class T>
std::vector<T> check_reduce_scatter(Rig& rig, int64_t count, uint64_t seed) {
  const int ranks = rig.world.size, rank = rig.world.rank;
  std::vector<T> data(static_cast<size_t>(count * ranks));
  for (int64_t i = 0; i < count * ranks; ++i) data[size_t(i)] = value<T>(seed, rank, i);
  CHECK(rig.around<T>(*rig.reductions, rig.two, data,
                      [&](T* buf) { rig.reductions->reduce_scatter(buf, count, dtype_of<T>); }));
  int64_t wrong = 0;
  for (int64_t i = rank * count; i < (rank + 1) * count; ++i) {
    const T sum = sum_in_order<T>(seed, ranks, i);
    wrong +=
        !same(data[size_t(i)], sum) && !(std::abs(double(data[size_t(i)]) - double(sum)) <= allowed<T>(rig, seed, i));
  }
  CAPTURE(name_of(dtype_of<T>), count, ranks);
  CHECK(wrong == 0);
  return std::vector<T>(data.begin() + rank * count, data.begin() + (rank + 1) * count);  // the rest is undefined
}

template <class T>
void check_all_to_all(Rig& rig, int64_t count, uint64_t seed) {
  const int ranks = rig.world.size, rank = rig.world.rank;
  std::vector<T> sent(static_cast<size_t>(count * ranks)), data(sent.size(), nan<T>());
  for (int64_t i = 0; i < count * ranks; ++i) sent[size_t(i)] = value<T>(seed, rank, i);
  HostBuffer<char> from(rig.dev, std::max<int64_t>(1, count * ranks * int64_t(sizeof(T))));
  if (count) std::memcpy(from.get(), sent.data(), sent.size() * sizeof(T));
  CHECK(rig.around<T>(*rig.reductions, rig.two, data, [&](T* buf) {
    rig.reductions->stream().copy(rig.one, from.get(), int64_t(sent.size() * sizeof(T)));
    rig.reductions->all_to_all(rig.one, buf, count, dtype_of<T>);
  }));
  int64_t wrong = 0;
  for (int r = 0; r < ranks; ++r)
    for (int64_t i = 0; i < count; ++i)
      wrong += !same(data[size_t(r * count + i)], value<T>(seed, r, rank * count + i));
  CAPTURE(name_of(dtype_of<T>), count, ranks);
  CHECK(wrong == 0);
}

template <class T>
void check_all_reduce(Rig& rig, int64_t n, uint64_t seed) {
  std::vector<T> data(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) data[size_t(i)] = value<T>(seed, rig.world.rank, i);
  CHECK(
      rig.around<T>(*rig.reductions, rig.two, data, [&](T* buf) { rig.reductions->all_reduce(buf, n, dtype_of<T>); }));
  int64_t wrong = 0;
  for (int64_t i = 0; i < n; ++i) {
    const T sum = sum_in_order<T>(seed, rig.world.size, i);
    wrong +=
        !same(data[size_t(i)], sum) && !(std::abs(double(data[size_t(i)]) - double(sum)) <= allowed<T>(rig, seed, i));
  }
  CAPTURE(name_of(dtype_of<T>), n, rig.world.size);
  CHECK(wrong == 0);
}

// The largest of all ranks' numbers; a NaN on one rank is everybody's.
void check_largest(Rig& rig) {
  const int64_t n = 100, broken = 7;
  std::vector<double> data(n);
  for (int64_t i = 0; i < n; ++i) data[size_t(i)] = value<double>(5, rig.world.rank, i);
  if (rig.world.rank == rig.world.size / 2) data[broken] = std::nan("");
  CHECK(rig.around<double>(*rig.reductions, rig.two, data,
                           [&](double* buf) { rig.reductions->all_reduce(buf, n, Dtype::f64, Channel::max); }));
  for (int64_t i = 0; i < n; ++i) {
    double most = -INFINITY;
    for (int r = 0; r < rig.world.size; ++r) most = std::max(most, value<double>(5, r, i));
    if (i != broken) CHECK(data[size_t(i)] == most);
    else if (rig.exact()) CHECK(std::isnan(data[size_t(i)]));  // NCCL promises nothing
  }
}

void check_broadcast(Rig& rig, int64_t bytes, int root, uint64_t seed) {
  std::vector<char> data(static_cast<size_t>(bytes));
  for (int64_t i = 0; i < bytes; ++i) data[size_t(i)] = char(mix(seed + uint64_t(rig.world.rank * bytes + i)));
  CHECK(rig.around<char>(*rig.gathers, rig.one, data, [&](char* buf) { rig.gathers->broadcast(buf, bytes, root); }));
  int64_t wrong = 0;
  for (int64_t i = 0; i < bytes; ++i) wrong += data[size_t(i)] != char(mix(seed + uint64_t(root * bytes + i)));
  CAPTURE(bytes, root, rig.world.size);
  CHECK(wrong == 0);
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// Sums do not depend on who comes late.
template <class T>
void check_repeats(Rig& rig, int64_t count) {
  const std::vector<T> once = check_reduce_scatter<T>(rig, count, 77);
  for (int late = 0; late < rig.world.size; ++late) {
    rig.reductions->delay_ms = rig.world.rank == late ? 5 : 0;
    CHECK(same_bits(once, check_reduce_scatter<T>(rig, count, 77)));
  }
  rig.reductions->delay_ms = 0;
}

template <class T>
void check_collectives_of(Rig& rig) {
  uint64_t seed = 1;
  for (int64_t count : counts) {
    check_all_gather<T>(rig, count, seed++);
    check_all_gather<T>(rig, count, seed++, /*apart=*/true);
    check_reduce_scatter<T>(rig, count, seed++);
    check_all_to_all<T>(rig, count, seed++);
  }
  for (int64_t count : {int64_t(7), int64_t(3000)}) check_repeats<T>(rig, count);
}

void check_collectives(Rig& rig) {
  check_collectives_of<float>(rig);
  check_collectives_of<bf16>(rig);
  check_collectives_of<double>(rig);
  uint64_t seed = 100;
  // The largest in more pieces than one, where every rank's must fit into the staging memory together.
  for (int64_t n : counts) check_all_reduce<double>(rig, n, seed++);
  for (int64_t n : counts) check_all_reduce<float>(rig, n * 2, seed++);
  for (int64_t n : counts) check_all_reduce<bf16>(rig, n * rig.world.size, seed++);
  check_largest(rig);
  for (int64_t bytes : {int64_t(0), int64_t(1), int64_t(7), int64_t(4096), largest_count})
    for (int root = 0; root < rig.world.size; ++root) check_broadcast(rig, bytes, root, seed++);
}

// Gathers on one channel, reductions on the other, all in flight at once, with ranks and channels late in turns.
// any_order: each rank enqueues the two channels' calls in an order of its own.
void check_two_channels(Rig& rig, bool any_order) {
  constexpr int rounds = 12;
  constexpr int64_t count = 1000;
  const int ranks = rig.world.size, rank = rig.world.rank;
  const int64_t slot = count * ranks;
  HostBuffer<char> from(rig.dev, 2 * rounds * slot * 4), to(rig.dev, 2 * rounds * slot * 4);
  const auto at = [&](HostBuffer<char>& h, int which, int round) {
    return reinterpret_cast<float*>(h.get()) + (which * rounds + round) * slot;
  };
  for (int round = 0; round < rounds; ++round)
    for (int64_t i = 0; i < slot; ++i) {
      at(from, 0, round)[i] = i / count == rank ? value<float>(uint64_t(500 + round), rank, i) : nan<float>();
      at(from, 1, round)[i] = value<float>(uint64_t(600 + round), rank, i);
    }
  const auto issue = [&](int which, int round) {
    Channel& channel = which == 0 ? *rig.gathers : *rig.reductions;
    const uint64_t dice = mix(uint64_t(rank * 1000 + which * 100 + round));
    channel.delay_ms = dice % 3 == 0 ? double(dice % 7) : 0;
    float* buf = reinterpret_cast<float*>(which == 0 ? rig.one : rig.two) + round * slot;
    channel.stream().copy(buf, at(from, which, round), slot * 4);
    if (which == 0) channel.all_gather(buf, count, Dtype::f32);
    else channel.reduce_scatter(buf, count, Dtype::f32);
    channel.stream().copy(at(to, which, round), buf, slot * 4);
    channel.delay_ms = 0;
  };
  int next[2] = {0, 0};
  for (uint64_t i = 0; next[0] < rounds || next[1] < rounds; ++i) {
    int which = int(mix(i * 100 + (any_order ? uint64_t(rank) : 0)) % 2);
    if (next[which] == rounds) which = 1 - which;
    issue(which, next[which]++);
  }
  CHECK(rig.finish(rig.gathers->stream()) == "");
  CHECK(rig.finish(rig.reductions->stream()) == "");
  int64_t wrong = 0;
  for (int round = 0; round < rounds; ++round)
    for (int64_t i = 0; i < slot; ++i) {
      wrong += !same(at(to, 0, round)[i], value<float>(uint64_t(500 + round), int(i / count), i));
      if (i / count != rank) continue;
      const float sum = sum_in_order<float>(uint64_t(600 + round), ranks, i), got = at(to, 1, round)[i];
      wrong += !same(got, sum) && !(std::abs(double(got) - sum) <= allowed<float>(rig, uint64_t(600 + round), i));
    }
  CHECK(wrong == 0);
}

// While planning and tuning a collective does nothing: it may be called by one rank alone.
void check_off(Rig& rig) {
  for (Mode mode : {Mode::plan, Mode::tune}) {
    rig.dev.mode = mode;
    if (rig.world.rank == 0) {
      rig.gathers->all_gather(rig.one, 10, Dtype::f32);
      rig.reductions->reduce_scatter(rig.two, 10, Dtype::bf16);
      rig.reductions->all_reduce(rig.two, 10, Dtype::f64);
      rig.gathers->broadcast(rig.one, 10, 0);
    }
    CHECK(rig.finish(rig.dev.gather()) == "");
    CHECK(rig.finish(rig.dev.reduce()) == "");
  }
  rig.dev.mode = Mode::run;
  check_all_gather<float>(rig, 10, 900);  // and nothing is left over
  check_reduce_scatter<float>(rig, 10, 901);
}

// Why this cannot run on GPUs, the same on all ranks; empty if it can.
std::string no_gpu_here() { return agree(have_gpu() ? "" : "no GPU"); }
std::string no_nccl_here() {
  const World& w = test_world();
  return agree(!have_gpu()                ? "no GPU"
               : nccl_version() == "none" ? "a build without NCCL"
               : !one_gpu_a_rank()        ? strf("%d ranks, %d GPUs: NCCL needs one a rank", w.local_size, gpus())
                                          : "");
}

}  // namespace

// -------------------------------------------------------------------------------------------------------- collectives

TEST_CASE("collectives over MPI", "[comm]") {
  Rig rig(Backend::cpu);
  check_collectives(rig);
}

TEST_CASE("a bf16 sum is the fp32 sum, rounded once", "[comm]") {
  // Numbers where every other way to add shows: rank 0 brings a large one, the others bring halves of its last place.
  Rig rig(Backend::cpu);
  const int ranks = rig.world.size, rank = rig.world.rank;
  constexpr int64_t count = 100;
  std::vector<bf16> data(static_cast<size_t>(count * ranks), bf16(rank == 0 ? 256.0f : 1.0f));  // places of 2
  rig.around<bf16>(*rig.reductions, rig.two, data,
                   [&](bf16* buf) { rig.reductions->reduce_scatter(buf, count, Dtype::bf16); });
  // Rounded at each step the sum would stay 256: every 1 is a tie, which goes to even.
  const float sum = float(bf16(256.0f + float(ranks - 1)));
  if (ranks > 2) CHECK(sum > 256);
  int64_t wrong = 0;
  for (int64_t i = rank * count; i < (rank + 1) * count; ++i) wrong += float(data[size_t(i)]) != sum;
  CHECK(wrong == 0);
}

TEST_CASE("two channels do not disturb each other", "[comm]") {
  Rig rig(Backend::cpu);
  check_two_channels(rig, true);
}

TEST_CASE("a late gather does not hold reductions up", "[comm]") {
  Rig rig(Backend::cpu);
  const World& w = rig.world;
  // The last rank comes to its gather only when its reductions are done; on all ranks the gather is enqueued first. The
  // limit turns what would hang into a failed test.
  constexpr int64_t count = 1000;
  std::promise<void> reduced;
  bool in_time = true;
  if (w.rank == w.size - 1)
    rig.gathers->stream().host([&, open = reduced.get_future().share()] {
      in_time = open.wait_for(std::chrono::seconds(5)) == std::future_status::ready;
    });
  rig.gathers->all_gather(rig.one, count, Dtype::f32);
  for (int i = 0; i < 5; ++i) rig.reductions->reduce_scatter(rig.two, count, Dtype::f32);
  CHECK(rig.finish(rig.reductions->stream()) == "");
  reduced.set_value();
  CHECK(rig.finish(rig.gathers->stream()) == "");
  CHECK(in_time);
}

TEST_CASE("collectives return at once", "[comm]") {
  Rig rig(Backend::cpu);
  // A channel's delay holds its stream up, once a collective, and not the host.
  rig.gathers->delay_ms = rig.reductions->delay_ms = 250;
  Event from(rig.dev, Event::timed), gathered(rig.dev, Event::timed), reduced(rig.dev, Event::timed);
  Stream &gather = rig.gathers->stream(), &reduce = rig.reductions->stream();
  const auto start = std::chrono::steady_clock::now();
  gather.record(from);
  rig.gathers->all_gather(rig.one, 10, Dtype::f32);
  rig.gathers->broadcast(rig.one, 10, 0);
  gather.record(gathered);
  reduce.wait(from);
  rig.reductions->reduce_scatter(rig.two, 10, Dtype::f32);
  rig.reductions->all_reduce(rig.two, 10, Dtype::f64);
  reduce.record(reduced);
  CHECK(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count() < 250);
  CHECK(rig.finish(gather) == "");
  CHECK(rig.finish(reduce) == "");
  CHECK(elapsed_ms(from, gathered) >= 499.9f);
  CHECK(elapsed_ms(from, reduced) >= 499.9f);
}

TEST_CASE("planning and tuning talk to nobody", "[comm]") {
  Rig rig(Backend::cpu);
  check_off(rig);
}

TEST_CASE("a planned world opens nothing", "[comm]") {
  // As for `--plan --world 8` by one rank: what it keeps is in the plan, and nobody else is needed.
  World world;
  world.rank = 3, world.size = 8;
  if (test_world().rank == 0) {
    Device dev(Backend::cpu, 0);
    Channel channel(dev, dev.gather(), world, Transport::mpi, "gather", 123456, Links::planned);
    CHECK(dev.mem.report().before_step[int(Purpose::workspace)] >= 123456);
    channel.all_gather(nullptr, 10, Dtype::f32);
    channel.reduce_scatter(nullptr, 10, Dtype::f32);
    channel.all_to_all(nullptr, nullptr, 10, Dtype::f32);
    CHECK_THROWS_AS(Channel(dev, dev.gather(), world, Transport::none, "none", 1, Links::planned), Error);
  }
}

TEST_CASE("groups of ranks talk among themselves, and to those in their place in other groups", "[comm]") {
  const World& world = test_world();
  for (int ranks = 1; ranks <= world.size; ++ranks) {
    if (world.size % ranks) {
      CHECK_THROWS_AS(shard_group(world, ranks), Error);
      continue;
    }
    const World shards = shard_group(world, ranks), replicas = replica_group(world, ranks);
    CHECK(shards.size == ranks);
    CHECK(shards.size * replicas.size == world.size);
    CHECK(shards.group * ranks + shards.rank == world.rank);
    CHECK(replicas.rank * ranks + replicas.group == world.rank);
    Device dev(Backend::cpu, 0, world.size);
    double* buf = nullptr;
    const Transport over = world.size > 1 ? Transport::mpi : Transport::none;
    std::unique_ptr<Channel> among, across;
    for (Links links : {Links::planned, Links::open}) {
      buf = dev.mem.keep<double>(2, "two numbers", Purpose::workspace);
      among = std::make_unique<Channel>(dev, dev.reduce(), shards, over, "among", 4096, links);
      across = std::make_unique<Channel>(dev, dev.reduce(), replicas, over, "across", 4096, links);
      if (links == Links::planned) dev.mem.commit(), dev.mem.rewind(), dev.mode = Mode::run;
    }
    buf[0] = buf[1] = double(1 << world.rank);
    among->all_reduce(buf, 1, Dtype::f64);
    across->all_reduce(buf + 1, 1, Dtype::f64);
    dev.reduce().synchronize();
    double mine = 0, theirs = 0;
    for (int r = 0; r < world.size; ++r) {
      if (r / ranks == world.rank / ranks) mine += double(1 << r);
      if (r % ranks == world.rank % ranks) theirs += double(1 << r);
    }
    CHECK(buf[0] == mine);
    CHECK(buf[1] == theirs);
  }
}

TEST_CASE("GPU: collectives over NCCL", "[comm][gpu][hosts]") {
  if (const std::string why = no_nccl_here(); !why.empty()) SKIP_TEST(why.c_str());
  Rig rig(Backend::gpu, Transport::nccl);
  check_collectives(rig);
  check_two_channels(rig, false);  // one order: kernels of two communicators must not wait for each other
  check_off(rig);
}

TEST_CASE("GPU: collectives over MPI through host memory", "[comm][gpu]") {
  if (const std::string why = no_gpu_here(); !why.empty()) SKIP_TEST(why.c_str());
  Rig rig(Backend::gpu, Transport::mpi);  // ranks share GPUs where there are fewer
  check_collectives(rig);
  check_two_channels(rig, false);  // they share a stream: one order
  check_off(rig);
}

// ------------------------------------------------------------------------------------------- agreements between ranks

TEST_CASE("broadcast_text gives all ranks the root's text", "[comm]") {
  const World& w = test_world();
  std::string long_text(100001, ' ');
  for (size_t i = 0; i < long_text.size(); ++i) long_text[i] = char(mix(i));
  const std::string texts[] = {"", "x", "two\nlines", std::string("a zero \0 inside", 15), long_text};
  for (const std::string& text : texts)
    for (int root = 0; root < w.size; ++root) {
      const std::string mine = w.rank == root ? text : std::string(size_t(w.rank * 7), 'o');
      CHECK(broadcast_text(mine, root) == text);
    }
  CHECK(broadcast_text(strf("rank %d", w.rank)) == "rank 0");
}

TEST_CASE("agree tells all ranks the lowest rank's error", "[comm]") {
  const World& w = test_world();
  CHECK(agree("") == "");
  const auto error_of = [](int rank) { return strf("rank %d: ", rank) + std::string(size_t(1000 / (rank + 1)), 'e'); };
  for (int mask = 0; mask < 64; ++mask) {  // every set of ranks that have one
    const auto fails = [&](int rank) { return mask >> rank % 6 & 1; };
    std::string lowest;
    for (int r = w.size - 1; r >= 0; --r)
      if (fails(r)) lowest = error_of(r);
    CHECK(agree(fails(w.rank) ? error_of(w.rank) : "") == lowest);
  }
}

TEST_CASE("require_same throws on all ranks when one differs", "[comm]") {
  const World& w = test_world();
  const auto said = [](const std::string& text) -> std::string {
    try {
      require_same(text, "the learning rate");
    } catch (const UsageError& e) { return e.what(); } catch (...) {
      return "(an error of another kind)";
    }
    return "";
  };
  CHECK(said("1e-3") == "");
  CHECK(said("") == "");
  for (int odd = 0; odd < w.size; ++odd) {
    for (const char* other : {"2e-3", "1e-3 ", ""}) {
      const std::string text = said(w.rank == odd ? other : "1e-3");
      if (w.size == 1) {
        CHECK(text == "");
        continue;
      }
      CHECK(has(text, "the learning rate"));
      CHECK(has(text, strf("rank %d", odd == 0 ? 1 : odd)));  // who departs from rank 0
      CHECK(has(text, odd == 0 ? "rank 0: " + std::string(other) : std::string("rank 0: 1e-3")));
      CHECK(has(text, odd == 0 ? "rank 1: 1e-3" : strf("rank %d: %s", odd, other)));
      CHECK(broadcast_text(text) == text);  // the same everywhere
    }
  }
  // Of many lines those that differ.
  const std::string lines = said(w.rank == 0 ? "dim = 1\nlr = 1\nlog = a\n" : "dim = 1\nlr = 2\nlog = a\nseq = 3\n");
  if (w.size > 1) CHECK(has(lines, "(rank 0: lr = 1; rank 1: lr = 2; seq = 3)"));
  CHECK(said("again the same") == "");  // and the ranks are still together
}

TEST_CASE("nobody passes a barrier before all have come", "[comm]") {
  const World& w = test_world();
  // One clock for all ranks of a host, and none between hosts.
  const bool one_host = agree(w.local_size == w.size ? "" : "several hosts").empty();
  const auto now = [] {
    return int64_t(
        std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count());
  };
  barrier();
  for (int late = 0; late < w.size; ++late) {
    if (w.rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(30));
    const int64_t came = now();
    barrier();
    const int64_t passed = now();
    const int64_t last = std::stoll(broadcast_text(std::to_string(came), late));
    if (one_host) CHECK(passed >= last);
  }
}

TEST_CASE("a group is on one host or it is not", "[comm][hosts]") {
  auto at = [](int rank, int local_rank, int local_size, int ranks) {
    World w;
    w.rank = rank, w.size = 12, w.local_rank = local_rank, w.local_size = local_size;
    return on_one_host(w, ranks);
  };
  CHECK(at(5, 1, 4, 4));
  CHECK(at(5, 1, 4, 2));
  CHECK(at(5, 1, 4, 1));
  CHECK(!at(5, 1, 4, 12));
  CHECK(at(1, 1, 3, 2));   // hosts of three, groups of two: 0 and 1 here
  CHECK(!at(2, 2, 3, 2));  // 2 here, 3 on the next
  CHECK(!at(3, 0, 3, 2));
  CHECK(at(4, 1, 3, 2));
  CHECK(on_one_host(test_world(), test_world().size) == (test_world().local_size == test_world().size));
}

TEST_CASE("a group has as many ranks on a host as fit there", "[comm][hosts]") {
  World w;
  w.rank = 21, w.size = 24, w.local_rank = 5, w.local_size = 8;  // three hosts of eight
  auto on_host = [&](int ranks) {
    return std::pair(shard_group(w, ranks).local_size, replica_group(w, ranks).local_size);
  };
  CHECK(on_host(1) == std::pair(1, 8));
  CHECK(on_host(2) == std::pair(2, 4));
  CHECK(on_host(4) == std::pair(4, 2));
  CHECK(on_host(8) == std::pair(8, 1));
  CHECK(on_host(12) == std::pair(8, 1));  // replicas are on other hosts
  CHECK(on_host(24) == std::pair(8, 1));
}

TEST_CASE("ranks are numbered host by host", "[comm][hosts]") {
  using Numbers = std::vector<int>;
  CHECK(by_host({}) == Numbers{});
  CHECK(by_host({5}) == Numbers{0});
  CHECK(by_host({0, 0, 1, 1}) == Numbers{0, 1, 2, 3});              // in runs: as they are
  CHECK(by_host({0, 1, 0, 1}) == Numbers{0, 2, 1, 3});              // in turn
  CHECK(by_host({9, 3, 7, 9, 3, 7}) == Numbers{0, 2, 4, 1, 3, 5});  // a host's number says nothing of its order
  CHECK(by_host({1, 0, 0, 1, 0}) == Numbers{0, 2, 3, 1, 4});        // hosts of two and three
  // And it is what collectives go by.
  const World& w = test_world();
  const std::vector<std::string> at = gather_texts(strf("%d of %d", w.local_rank, w.local_size));
  for (int r = 0; r < w.size; ++r) CHECK(at[size_t(r)] == strf("%d of %d", r % w.local_size, w.local_size));
  CHECK(on_one_host(w, w.local_size));
  // Neighbours know each other by the host that they play, and others do not.
  const char* id = std::getenv("NCCL_HOSTID");
  const std::vector<std::string> hosts = gather_texts(id ? id : "this");
  for (int r = 0; r < w.size; ++r) {
    const bool mate = r / w.local_size == w.rank / w.local_size;
    CHECK((hosts[size_t(r)] == hosts[size_t(w.rank)]) == mate);
  }
}

TEST_CASE("ranks share a GPU where the GPU says so, whatever number it has", "[comm]") {
  // Each rank's host, GPU and card.
  using Ranks = std::vector<RankGpu>;
  struct Counts {
    int sharers, host_cards, world_gpus;
    bool operator==(const Counts& o) const {
      return sharers == o.sharers && host_cards == o.host_cards && world_gpus == o.world_gpus;
    }
  };
  const auto count = [](const Ranks& ranks, int rank) {
    const DeviceAssignment a = count_gpus(ranks, rank);
    return Counts{a.sharers, a.host_cards, a.world_gpus};
  };
  const auto on = [](int host, const char* uuid, const char* card) { return RankGpu{host, {uuid, card}}; };
  // One GPU a process: all are number 0, and nobody shares.
  const Ranks own = {on(0, "a", "1"), on(0, "b", "2"), on(0, "c", "3")};
  for (int r = 0; r < 3; ++r) CHECK(count(own, r) == Counts{1, 3, 3});
  // Four ranks on two GPUs, and three.
  const Ranks four = {on(0, "a", "1"), on(0, "b", "2"), on(0, "a", "1"), on(0, "b", "2")};
  for (int r = 0; r < 4; ++r) CHECK(count(four, r) == Counts{2, 2, 2});
  const Ranks three = {on(0, "a", "1"), on(0, "b", "2"), on(0, "a", "1")};
  CHECK(count(three, 0) == Counts{2, 2, 2});
  CHECK(count(three, 1) == Counts{1, 2, 2});
  // Two hosts: one full, one shared.
  const Ranks hosts = {on(0, "a", "1"), on(0, "b", "2"), on(2, "c", "1"), on(2, "c", "1")};
  CHECK(count(hosts, 1) == Counts{1, 2, 3});
  CHECK(count(hosts, 3) == Counts{2, 1, 3});
  // Hosts that are played on one machine have GPUs of their own.
  const Ranks played = {on(0, "a", "1"), on(0, "b", "2"), on(2, "a", "1"), on(2, "b", "2")};
  for (int r = 0; r < 4; ++r) CHECK(count(played, r) == Counts{1, 2, 4});
  // Two parts of one card: each rank has its own memory, but NCCL wants a card for each.
  const Ranks parts = {on(0, "part-1", "1"), on(0, "part-2", "1")};
  for (int r = 0; r < 2; ++r) CHECK(count(parts, r) == Counts{1, 1, 2});
}

TEST_CASE("what libraries take beside the arena", "[comm]") {
  const int few = usual_communicators;
  const int64_t none = library_bytes(Backend::gpu, Transport::none, few);
  CHECK(library_bytes(Backend::cpu, Transport::mpi, few) == 0);
  CHECK(none > 0);
  CHECK(library_bytes(Backend::gpu, Transport::mpi, few) == none);
  const int64_t over_nccl = library_bytes(Backend::gpu, Transport::nccl, few);
  CHECK(over_nccl > none);
  CHECK(library_bytes(Backend::gpu, Transport::nccl, 1) == over_nccl);
  CHECK(library_bytes(Backend::gpu, Transport::nccl, few + 1) == over_nccl + (over_nccl - none) / few);
}

TEST_CASE("CPU ranks share their host's memory", "[comm]") {
  const DeviceAssignment a = assign_device(Backend::cpu, test_world());
  CHECK(a.ordinal == 0);
  CHECK(a.sharers == test_world().local_size);
  CHECK(a.world_gpus == 0);
}

TEST_CASE("no GPU is an error of all ranks, and no rank's fault", "[comm]") {
  if (have_gpu()) SKIP_TEST("a GPU is here");
  std::string text;
  try {
    assign_device(Backend::gpu, test_world());
  } catch (const Error& e) {
    text = e.what();
    CHECK_FALSE(is_fault(e));
  }
  CHECK(has(text, "rank 0 sees no GPU"));
}

TEST_CASE("GPU: each rank takes one, and all know who shares", "[comm][gpu][hosts]") {
  NEEDS_GPU();
  const World& w = test_world();
  const DeviceAssignment a = assign_device(Backend::gpu, w);
  CHECK(a.ordinal == w.local_rank % gpus());
  const GpuName mine = name_gpu(a.ordinal);
  CHECK(mine.uuid.size() == 32);
  CHECK(mine.uuid.find_first_not_of("0123456789abcdef") == std::string::npos);
  CHECK(std::count(mine.card.begin(), mine.card.end(), ':') == 2);
  for (int other = 0; other < gpus(); ++other) CHECK((name_gpu(other).uuid == mine.uuid) == (other == a.ordinal));
  // What they tell each other is what each sees of its own.
  int sharers = 0;
  const std::vector<std::string> uuids = gather_texts(mine.uuid);
  for (int r = w.rank - w.local_rank; r < w.rank - w.local_rank + w.local_size; ++r)
    sharers += uuids[size_t(r)] == mine.uuid;
  CHECK(a.sharers == sharers);
  CHECK(a.host_cards <= w.local_size);
  CHECK(a.world_gpus <= w.size);
  if (gpus() > 1) CHECK(a.host_cards == std::min(gpus(), w.local_size));  // all see all
}

TEST_CASE("every rank's text is on all ranks, in order", "[comm]") {
  const World& w = test_world();
  const auto text = [](int rank) { return std::string(size_t(rank * 1000 % 3001), char('a' + rank)); };
  const std::vector<std::string> all = gather_texts(text(w.rank));
  CHECK(int(all.size()) == w.size);
  for (int r = 0; r < w.size; ++r) CHECK(all[size_t(r)] == text(r));
}

TEST_CASE("ranks know who they are", "[comm]") {
  const World& w = test_world();
  CHECK(w.size >= 1);
  CHECK(w.rank >= 0);
  CHECK(w.rank < w.size);
  CHECK(this_rank() == w.rank);
  CHECK(w.local_rank >= 0);
  CHECK(w.local_rank < w.local_size);
  CHECK(w.local_size <= w.size);
  for (int r = 0; r < w.size; ++r) CHECK(broadcast_text(std::to_string(w.rank), r) == std::to_string(r));
  CHECK(!mpi_version().empty());
}

// Hidden, because it ends the program: test/cli/ranks.sh runs it and looks at what is left.
TEST_CASE("a rank throws while the others wait in a collective", "[.throws]") {
  const World& world = test_world();
  or_abort([&] {
    Device dev(Backend::cpu, 0, world.size);
    std::vector<float> data(size_t(64 * world.size));
    Channel channel(dev, dev.gather(), world, Transport::mpi, "gather", int64_t(data.size() * 4), Links::open);
    dev.mode = Mode::run;
    if (world.rank == 1) throw Error("out of luck");
    channel.all_gather(data.data(), 64, Dtype::f32);
    dev.gather().synchronize();
  });
}
