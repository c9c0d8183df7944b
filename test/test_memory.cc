// lib/device/memory.h: the packing of buffers, planned memory. What holds on both backends is a function of the
// backend, which a CPU case and a GPU case ([gpu]) call.
#include "test/catch.h"
#include "test/errors.h"

#include <algorithm>
#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <numeric>
#include <random>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {
using Rng = std::mt19937_64;
}

// ------------------------------------------------------------------------------------------------------------ packing

namespace {

int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

enum class Give { newest, oldest, any };  // which buffer goes next: a stack, a queue, neither

// A run of takes and gives with about `many` buffers live. Sizes: of six kinds, or spread evenly over the powers of
// two.
std::vector<Life> schedule(Rng& rng, int count, Give give, bool few_sizes, uint64_t many, int64_t largest = 64 << 20) {
  const int64_t sizes[] = {512, 4096, 65536, 3 << 18, 1 << 20, 5 << 20};
  std::vector<Life> lives;
  std::vector<size_t> live;
  int64_t clock = 0;
  while (int(lives.size()) < count || !live.empty()) {
    if (int(lives.size()) < count && (live.empty() || rng() % (2 * many) >= live.size())) {
      int64_t bytes = few_sizes ? sizes[rng() % 6] : 1 + int64_t(rng() % (uint64_t(2) << rng() % 26));
      live.push_back(lives.size());
      lives.push_back({std::min(bytes, largest), clock++, -1});
    } else {
      const size_t k = give == Give::newest ? live.size() - 1 : give == Give::oldest ? 0 : rng() % live.size();
      lives[live[k]].dead = clock++;
      live.erase(live.begin() + std::ptrdiff_t(k));
    }
  }
  return lives;
}

bool together(const Life& a, const Life& b) { return a.born < b.dead && b.born < a.dead; }

// Pairs of buffers that are live together and overlap, and offsets that break a promise.
int64_t faults(const std::vector<Life>& lives, const std::vector<int64_t>& at, int64_t total, int64_t align) {
  int64_t n = at.size() != lives.size() || total % align != 0;
  for (size_t i = 0; i < lives.size() && i < at.size(); ++i) {
    n += at[i] < 0 || at[i] % align != 0 || at[i] + lives[i].bytes > total;
    for (size_t j = 0; j < i; ++j)
      n += at[i] < at[j] + lives[j].bytes && at[j] < at[i] + lives[i].bytes && together(lives[i], lives[j]);
  }
  return n;
}

// The same as most_live, looked up moment by moment.
int64_t most_live_slowly(const std::vector<Life>& lives, int64_t align) {
  int64_t most = 0;
  for (const Life& at : lives) {
    int64_t live = 0;
    for (const Life& l : lives) live += l.born <= at.born && at.born < l.dead ? up(l.bytes, align) : 0;
    most = std::max(most, live);
  }
  return most;
}

}  // namespace

TEST_CASE("packing: no two buffers that live together overlap", "[device]") {
  double worst = 1, sum = 0;
  int runs = 0;
  for (uint64_t seed = 1; seed <= 4; ++seed)
    for (Give give : {Give::newest, Give::oldest, Give::any})
      for (bool few : {false, true})
        for (uint64_t live : {3, 20, 60}) {
          Rng rng(seed * 1000 + live);
          const int64_t align = seed % 3 == 0 ? 1 : seed % 3 == 1 ? 256 : 4096;
          const std::vector<Life> lives = schedule(rng, seed == 1 ? 2500 : 600, give, few, live);
          std::vector<int64_t> at, again;
          const int64_t total = pack(lives, align, &at), bound = most_live(lives, align);
          CHECK(faults(lives, at, total, align) == 0);
          CHECK(bound == most_live_slowly(lives, align));
          CHECK(total >= bound);
          CHECK(pack(lives, align, &again) == total);
          CHECK(again == at);
          if (give == Give::newest) CHECK(total == bound);  // a stack packs without a gap
          worst = std::max(worst, double(total) / double(bound));
          sum += double(total) / double(bound), ++runs;
        }
  // No proof stands behind these two; they are what the heuristic reaches on such schedules, with some room.
  CAPTURE(worst, sum / runs);
  CHECK(worst < 1.25);
  CHECK(sum / runs < 1.03);
}

TEST_CASE("packing: simple schedules take no more than what is live", "[device]") {
  constexpr int64_t align = 256;
  const auto tight = [&](const std::vector<Life>& lives, int64_t bytes) {
    std::vector<int64_t> at;
    const int64_t total = pack(lives, align, &at);
    CHECK(faults(lives, at, total, align) == 0);
    CHECK(most_live(lives, align) == bytes);
    CHECK(total == bytes);
  };
  tight({}, 0);
  tight({{1, 0, 1}}, 256);
  tight({{0, 0, 1}}, 0);
  tight({{256, 0, 4}, {257, 1, 3}}, 256 + 512);                                         // nested
  tight({{100, 0, 9}, {5000, 1, 8}, {300, 2, 3}, {700, 4, 7}}, 256 + 5120 + 768);       // a stack
  tight({{1000, 0, 9}, {10, 1, 9}, {3000, 2, 9}}, 1024 + 256 + 3072);                   // all at once
  tight({{1000, 0, 1}, {5000, 1, 2}, {10, 2, 3}, {4000, 3, 4}}, 5120);                  // one after the other
  tight({{1000, 0, 2}, {1000, 1, 4}, {1000, 3, 6}, {1000, 5, 7}, {1000, 6, 9}}, 2048);  // two of one size at a time
  // Equal sizes never leave a gap that does not fit, in whatever order they are listed.
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    Rng rng(seed);
    std::vector<Life> lives = schedule(rng, 300, Give::any, false, 15);
    for (Life& l : lives) l.bytes = 1000;
    std::shuffle(lives.begin(), lives.end(), rng);
    tight(lives, most_live_slowly(lives, align));
  }
}

// ------------------------------------------------------------------------------------------------------------- memory

namespace {

// The plan's units, which the report shows: kept buffers, others, the arena.
constexpr int64_t kept_unit = 4096, unit = 256, arena_unit = 2 << 20;

// Takes and gives as the lives say. at_take(i, address) follows a take, at_give(i, address) comes before a give.
template <class F, class G>
void play(Memory& mem, const std::string& program, const std::vector<Life>& lives, F at_take, G at_give) {
  std::vector<int64_t> what;  // by time: which buffer, and ~ for a give
  for (size_t i = 0; i < lives.size(); ++i) {
    what.resize(std::max(what.size(), size_t(lives[i].dead) + 1));
    what[size_t(lives[i].born)] = int64_t(i);
    what[size_t(lives[i].dead)] = ~int64_t(i);
  }
  mem.begin(program);
  std::vector<Buffer<char>> held(lives.size());
  for (int64_t w : what) {
    const size_t i = size_t(w < 0 ? ~w : w);
    if (w >= 0) {
      held[i] = mem.take<char>(lives[i].bytes, strf("buffer %zu", i).c_str());
      at_take(i, held[i].get());
    } else {
      at_give(i, held[i].get());
      held[i].reset();
    }
  }
  mem.end();
}
void play(Memory& mem, const std::string& program, const std::vector<Life>& lives) {
  play(
      mem, program, lives, [](size_t, char*) {}, [](size_t, char*) {});
}

TEST_CASE("a part that is repeated is recorded once and followed from then on", "[device]") {
  Device dev(Backend::cpu, 0);
  Memory& mem = dev.mem;
  auto run = [&](int times) {
    mem.begin("step");
    auto held = mem.take<char>(1000, "held");
    std::vector<char*> at;
    for (int i = 0; i < times; i++) {
      mem.begin_repeat();
      auto first = mem.take<char>(5000, "first");
      auto second = mem.take<char>(3000, "second");
      first.reset();
      at.push_back(second.get());
      second.reset();
      mem.end_repeat();
    }
    auto last = mem.take<char>(7000, "last");
    CHECK(last.get() != held.get());
    last.reset(), held.reset();
    mem.end();
    for (char* p : at) CHECK(p == at[0]);
    return at;
  };
  SECTION("as often as one likes") {
    run(3);
    const int64_t arena = mem.arena_bytes();
    mem.commit();
    for (int times : {1, 2, 100}) run(times);
    CHECK(mem.arena_bytes() == arena);
    CHECK(mem.report().live_peak == 1024 + 5120 + 3072);
  }
  SECTION("what departs from it is an error") {
    mem.begin("step");
    mem.begin_repeat();
    mem.take<char>(10, "a");
    mem.end_repeat();
    mem.begin_repeat();
    CHECK_THROWS_AS(mem.take<char>(11, "a"), Error);
    CHECK_THROWS_AS(mem.end_repeat(), Error);
  }
  SECTION("what outlives it is an error") {
    mem.begin("step");
    mem.begin_repeat();
    const auto held = mem.take<char>(10, "a");
    CHECK_THROWS_AS(mem.end_repeat(), Error);
  }
}

void replay_keeps_to_the_plan(Backend backend) {
  Device dev(backend, ordinal_of(backend));
  Memory& mem = dev.mem;
  Rng rng(5);
  const std::vector<Life> programs[] = {schedule(rng, 400, Give::any, false, 20, 100000),
                                        schedule(rng, 300, Give::oldest, false, 30, 100000)};
  const char* names[] = {"step", "validate"};
  mem.keep<char>(100, "kept", Purpose::master);
  for (int p = 0; p < 2; ++p) play(mem, names[p], programs[p]);
  std::vector<int64_t> offsets[2];
  int64_t most = 0;
  for (int p = 0; p < 2; ++p) most = std::max(most, pack(programs[p], unit, &offsets[p]));
  CHECK(mem.arena_bytes() == up(kept_unit + most, arena_unit));  // one arena for both programs
  CHECK_FALSE(mem.committed());
  mem.commit();
  REQUIRE(mem.committed());
  char* base = mem.keep<char>(100, "kept", Purpose::master);
  for (int round = 0; round < 6; ++round) {  // in any order, and again and again
    const int p = round % 3 == 2;
    int64_t wrong = 0;
    std::vector<char*> live;
    std::vector<int64_t> bytes;
    const auto& lives = programs[p];
    play(
        mem, names[p], lives,
        [&](size_t i, char* at) {
          wrong += at != base + kept_unit + offsets[p][i];
          wrong += at + lives[i].bytes > base + mem.arena_bytes();
          for (size_t j = 0; j < live.size(); ++j) wrong += at < live[j] + bytes[j] && live[j] < at + lives[i].bytes;
          live.push_back(at), bytes.push_back(lives[i].bytes);
        },
        [&](size_t i, char* at) {
          for (size_t j = 0; j < live.size(); ++j)
            if (live[j] == at && bytes[j] == lives[i].bytes) {
              live.erase(live.begin() + std::ptrdiff_t(j)), bytes.erase(bytes.begin() + std::ptrdiff_t(j));
              return;
            }
          ++wrong;
        });
    CHECK(wrong == 0);
  }
}

// Every buffer keeps what was written into it for as long as it is live, and kept ones for ever.
void buffers_hold_data(Backend backend) {
  Device dev(backend, ordinal_of(backend));
  Memory& mem = dev.mem;
  Rng rng(9);
  constexpr int64_t largest = 5000, kept_bytes = 3000;
  const std::vector<Life> lives = schedule(rng, 300, Give::any, false, 12, largest);
  mem.keep<char>(kept_bytes, "kept", Purpose::master);
  mem.keep<char>(1, "small", Purpose::moments);
  play(mem, "step", lives);
  mem.commit();
  char* kept = mem.keep<char>(kept_bytes, "kept", Purpose::master);
  char* small = mem.keep<char>(1, "small", Purpose::moments);
  dev.mode = Mode::run;
  Stream& s = dev.compute();
  HostBuffer<char> fill(dev, 256 * largest), back(dev, int64_t(lives.size()) * largest), back_kept(dev, kept_bytes + 1);
  for (int v = 0; v < 256; ++v) std::memset(&fill[v * largest], v, largest);
  const auto value = [](size_t i) { return int(i * 37 % 251); };
  for (int round = 0; round < 2; ++round) {
    s.copy(kept, &fill[252 * largest], kept_bytes);
    s.copy(small, &fill[253 * largest], 1);
    play(
        mem, "step", lives, [&](size_t i, char* at) { s.copy(at, &fill[value(i) * largest], lives[i].bytes); },
        [&](size_t i, char* at) { s.copy(&back[int64_t(i) * largest], at, lives[i].bytes); });
    s.copy(back_kept.get(), kept, kept_bytes);
    s.copy(&back_kept[kept_bytes], small, 1);
    s.synchronize();
    int64_t wrong = 0;
    for (size_t i = 0; i < lives.size(); ++i)
      wrong += std::memcmp(&back[int64_t(i) * largest], &fill[value(i) * largest], size_t(lives[i].bytes)) != 0;
    CHECK(wrong == 0);
    CHECK(std::memcmp(back_kept.get(), &fill[252 * largest], kept_bytes) == 0);
    CHECK(back_kept[kept_bytes] == char(253));
  }
}

void poison_fills_all_but_what_is_kept(Backend backend) {
  Device dev(backend, ordinal_of(backend));
  Memory& mem = dev.mem;
  constexpr int64_t n = 1 << 22, kept_bytes = 5000;
  HostBuffer<char> one(dev, kept_bytes), back(dev, n), back_kept(dev, kept_bytes);
  std::memset(one.get(), 1, kept_bytes);
  const auto step = [&](auto use) {
    mem.begin("step");
    {
      auto a = mem.take<char>(n, "a");
      use(a.get());
    }
    mem.end();
  };
  CHECK_THROWS_AS(mem.poison(), Error);  // there is nothing yet to fill
  mem.keep<char>(kept_bytes, "kept", Purpose::master);
  step([](char*) {});
  mem.commit();
  char* kept = mem.keep<char>(kept_bytes, "kept", Purpose::master);
  dev.mode = Mode::run;
  Stream& s = dev.compute();
  s.copy(kept, one.get(), kept_bytes);
  step([&](char* a) { s.zero(a, n); });
  s.synchronize();
  mem.poison();
  step([&](char* a) { s.copy(back.get(), a, n); });
  s.copy(back_kept.get(), kept, kept_bytes);
  s.synchronize();
  CHECK(std::count(back.get(), back.get() + n, char(0xff)) == n);
  float f;
  bf16 h;
  std::memcpy(&f, back.get(), sizeof f);
  std::memcpy(&h, back.get(), sizeof h);
  CHECK(std::isnan(f));
  CHECK(std::isnan(float(h)));
  CHECK(std::memcmp(back_kept.get(), one.get(), kept_bytes) == 0);
  // What follows finds the poison done, and is not overtaken by it.
  for (int round = 0; round < 10; ++round) {
    mem.poison();
    step([&](char* a) {
      s.zero(a, n);
      s.copy(back.get(), a, n);
    });
    s.synchronize();
    CHECK(std::count(back.get(), back.get() + n, char(0)) == n);
  }
}

// An arena that does not fit is refused before the device is asked for it.
void no_room_is_said(Backend backend) {
  constexpr double mib = 1048576;
  const auto has_all = [](const std::string& text, const std::vector<std::string>& parts) {
    for (const std::string& part : parts) CHECK(has(text, part));
  };
  {
    Device dev(backend, ordinal_of(backend));
    Memory& mem = dev.mem;
    mem.begin("step");
    mem.phase("forward 3");
    mem.take<char>(1000, "too small to be named").reset();
    mem.phase("backward 3");
    mem.take<char>(2 * dev.total_bytes, "the large one").reset();
    mem.end();
    const auto mapped = [] {
      int64_t pages = 0;
      std::ifstream("/proc/self/statm") >> pages;
      return pages * sysconf(_SC_PAGE_SIZE);
    };
    const int64_t before = mapped();
    const std::string text = error_of<OutOfMemory>([&] { mem.commit(); });
    has_all(text, {"backward 3", "the large one", strf("asks for %.0f MiB", double(mem.arena_bytes()) / mib), dev.name,
                   strf("of %.0f;", double(dev.total_bytes) / mib), "nothing was allocated; lower --batch"});
    if (backend == Backend::cpu) {
      CHECK(has(text, strf("has %.0f MiB free", double(dev.free_bytes) / mib)));
      CHECK(mapped() - before < dev.total_bytes / 2);
    }
    CHECK_FALSE(has(text, "too small"));
    CHECK_FALSE(mem.committed());
    CHECK(mem.device_reported_bytes() == 0);
  }
  {
    // What stays between steps does not fit either, and no smaller batch helps.
    Device dev(backend, ordinal_of(backend));
    dev.mem.keep<char>(2 * dev.total_bytes, "weights", Purpose::master);
    dev.mem.begin("step");
    dev.mem.take<char>(1000, "an activation").reset();
    dev.mem.end();
    const std::string text = error_of<OutOfMemory>([&] { dev.mem.commit(); });
    has_all(text, {strf("before step 1 takes %.0f MiB", 2 * double(dev.total_bytes) / mib), "use more ranks"});
    CHECK_FALSE(has(text, "lower --batch"));
  }
  {
    // What fits once need not fit for all that share the device.
    Device dev(backend, ordinal_of(backend), 3);
    Memory& mem = dev.mem;
    mem.begin("step");
    mem.take<char>(dev.total_bytes / 2, "half of it").reset();
    mem.end();
    has_all(error_of<OutOfMemory>([&] { mem.commit(); }), {"half of it", "3 ranks"});
  }
  if (backend == Backend::gpu) {
    // One that shares the GPU and has its arena already is not counted a second time. (A CPU's free memory is read
    // once, at the start.)
    Device one(backend, ordinal_of(backend), 2), two(backend, ordinal_of(backend), 2);
    for (Device* dev : {&one, &two}) {
      dev->mem.begin("step");
      dev->mem.take<char>(two.free_bytes / 5 * 2, "most of a half").reset();
      dev->mem.end();
    }
    CHECK_NOTHROW(one.mem.commit());
    CHECK_NOTHROW(two.mem.commit());
  }
}

}  // namespace

TEST_CASE("a replay hands out the planned memory", "[device]") { replay_keeps_to_the_plan(Backend::cpu); }
TEST_CASE("buffers hold their data", "[device]") { buffers_hold_data(Backend::cpu); }
TEST_CASE("poison fills all but what is kept", "[device]") { poison_fills_all_but_what_is_kept(Backend::cpu); }
TEST_CASE("a plan without room is refused", "[device]") { no_room_is_said(Backend::cpu); }
TEST_CASE("GPU: planned memory", "[device][gpu]") {
  NEEDS_GPU();
  replay_keeps_to_the_plan(Backend::gpu);
  buffers_hold_data(Backend::gpu);
  poison_fills_all_but_what_is_kept(Backend::gpu);
  no_room_is_said(Backend::gpu);
}

TEST_CASE("a plan fits beside what libraries take later", "[device]") {
  const auto fits = [](int64_t arena, int64_t reserve, int64_t at_start, int64_t now, int sharers) {
    return Room{arena, reserve, at_start, now, sharers}.fits();
  };
  CHECK(fits(100, 0, 100, 100, 1));
  CHECK_FALSE(fits(101, 0, 100, 100, 1));
  CHECK(fits(90, 10, 100, 100, 1));
  CHECK_FALSE(fits(91, 10, 100, 100, 1));  // passed before, and died in NCCL's start
  CHECK(fits(40, 10, 100, 50, 2));         // the other has taken its arena
  CHECK_FALSE(fits(40, 10, 100, 49, 2));
  CHECK_FALSE(fits(41, 10, 100, 100, 2));  // both want that
  CHECK_FALSE(fits(30, 5, 100, 100, 3));
  // What commit() says of it.
  Device dev(Backend::cpu, 0);
  dev.mem.keep<char>(1 << 20, "kept", Purpose::master);
  const std::string text = error_of<OutOfMemory>([&] { dev.mem.commit(dev.free_bytes); });
  CHECK(has(text, strf("and %.0f MiB for CUDA's libraries", double(dev.free_bytes) / 1048576)));
  CHECK(has(text, "nothing was allocated"));
  CHECK_FALSE(dev.mem.committed());
  CHECK_NOTHROW(dev.mem.commit(1 << 20));
}

TEST_CASE("the arena is all that the device is asked for", "[device]") {
  Device dev(Backend::cpu, 0);
  Memory& mem = dev.mem;
  mem.keep<char>(10 << 20, "kept", Purpose::master);
  CHECK(mem.device_reported_bytes() == 0);
  mem.commit();
  CHECK(mem.arena_bytes() == 10 << 20);
  CHECK(mem.device_reported_bytes() == mem.arena_bytes());
  CHECK_THROWS_AS(mem.commit(), Error);  // once is enough
}
TEST_CASE("GPU: the arena is what the GPU says it took", "[device][gpu]") {
  NEEDS_GPU();
  for (const int64_t bytes : {int64_t(1), int64_t(100) << 20, (int64_t(1) << 30) + 12345}) {
    Device dev(Backend::gpu, test_device(Backend::gpu).ordinal);
    dev.mem.keep<char>(bytes, "kept", Purpose::master);
    dev.mem.commit();
    CHECK(dev.mem.arena_bytes() == up(bytes, arena_unit));
    CHECK(std::abs(dev.mem.device_reported_bytes() - dev.mem.arena_bytes()) <= arena_unit);
  }
}

TEST_CASE("a step that departs from the plan is an error", "[device]") {
  // A device for each, since what has gone wrong once is not used again. The planned step takes a, takes b, gives b,
  // takes c, gives a, gives c.
  const auto after_plan = [](auto deviate) {
    Device dev(Backend::cpu, 0);
    Memory& mem = dev.mem;
    mem.begin("step");
    mem.phase("the planned phase");
    auto a = mem.take<float>(100, "a");
    mem.take<float>(300, "b").reset();
    auto c = mem.take<float>(200, "c");
    a.reset(), c.reset();
    mem.end();
    mem.begin("other");
    mem.end();
    mem.commit();
    return error_of<Error>([&] { deviate(mem); });
  };
  const std::string none;
  const auto replay = [](Memory& mem) {
    mem.begin("step");
    auto a = mem.take<float>(100, "a");
    mem.take<float>(300, "b").reset();
    auto c = mem.take<float>(200, "c");
    a.reset(), c.reset();
    mem.end();
  };
  CHECK(after_plan(replay) == none);
  CHECK(after_plan([&](Memory& mem) {
          replay(mem);
          replay(mem);
        }) == none);

  // Other size: the text names the program, the phase, the buffer and its size.
  std::string text = after_plan([](Memory& mem) {
    mem.begin("step");
    mem.phase("a wrong phase");
    auto a = mem.take<float>(101, "a");
  });
  for (const char* part : {"'step'", "'a wrong phase'", "'a'", "404"}) CHECK(has(text, part));
  const auto departs = [&](auto deviate) { CHECK(has(after_plan(deviate), "departs from the memory plan")); };
  departs([](Memory& mem) {  // smaller is another size too
    mem.begin("step");
    auto a = mem.take<float>(99, "a");
  });
  departs([](Memory& mem) {  // other name
    mem.begin("step");
    auto a = mem.take<float>(100, "A");
  });
  departs([](Memory& mem) {  // other order
    mem.begin("step");
    auto b = mem.take<float>(300, "b");
  });
  departs([](Memory& mem) {  // b is held too long: c's place comes after b's end
    mem.begin("step");
    auto a = mem.take<float>(100, "a");
    auto b = mem.take<float>(300, "b");
    auto c = mem.take<float>(200, "c");
  });
  departs([](Memory& mem) {  // one more than planned
    mem.begin("step");
    auto a = mem.take<float>(100, "a");
    mem.take<float>(300, "b").reset();
    auto c = mem.take<float>(200, "c");
    a.reset(), c.reset();
    auto d = mem.take<float>(100, "a");
  });
  departs([](Memory& mem) {  // another program's buffer
    mem.begin("other");
    auto a = mem.take<float>(100, "a");
  });
  text = after_plan([](Memory& mem) {  // less than planned
    mem.begin("step");
    mem.end();
  });
  CHECK(has(text, "'step' ended before its memory plan"));
  CHECK(has(after_plan([](Memory& mem) { mem.begin("unheard of"); }), "'unheard of' was never planned"));

  // A buffer outlives its program.
  CHECK(after_plan([](Memory& mem) {
          mem.begin("step");
          auto a = mem.take<float>(100, "a");
          mem.end();
        }) != none);
  // Outside of a program; a program in a program; something kept in a program.
  CHECK(after_plan([](Memory& mem) { mem.take<float>(100, "a"); }) != none);
  CHECK(after_plan([](Memory& mem) { mem.end(); }) != none);
  CHECK(after_plan([](Memory& mem) {
          mem.begin("step");
          mem.begin("other");
        }) != none);
  CHECK(after_plan([](Memory& mem) {
          mem.begin("other");
          mem.keep<float>(1, "late", Purpose::master);
        }) != none);
}

TEST_CASE("planning has rules too", "[device]") {
  Device dev(Backend::cpu, 0);
  Memory& mem = dev.mem;
  CHECK_THROWS_AS(mem.take<float>(1, "outside"), Error);
  CHECK_THROWS_AS(mem.end(), Error);
  mem.begin("step");
  CHECK_THROWS_AS(mem.begin("inside"), Error);
  CHECK_THROWS_AS(mem.keep<float>(1, "inside", Purpose::master), Error);
  CHECK_THROWS_AS(mem.commit(), Error);
  CHECK_THROWS_AS(mem.take<float>(-1, "negative"), Error);
  auto a = mem.take<float>(1, "a");
  CHECK_THROWS_AS(mem.end(), Error);  // a is still out
  a.reset();
  mem.end();
  // Planned once, it is followed: the same again, and nothing else.
  const int64_t planned = mem.report().live_peak;
  mem.begin("step");
  CHECK_THROWS_AS(mem.take<float>(2, "a"), Error);
  a = mem.take<float>(1, "a");
  CHECK_THROWS_AS(mem.take<float>(1, "b"), Error);
  a.reset();
  mem.end();
  CHECK(mem.report().live_peak == planned);
}

TEST_CASE("giving back in another order than planned ends the program", "[device]") {
  // A destructor cannot throw, so this one aborts: in a child, whose last words are read here.
  Device dev(Backend::cpu, 0);
  Memory& mem = dev.mem;
  const auto step = [&](bool as_planned) {
    mem.begin("step");
    auto a = mem.take<float>(100, "the first");
    auto b = mem.take<float>(100, "the second");
    if (as_planned) a.reset();
    b.reset(), a.reset();
    mem.end();
  };
  step(true);
  mem.commit();
  step(true);
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::signal(SIGABRT, SIG_DFL);  // the test runner's handler would report a failed test
    const rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    alarm(20);
    dup2(ends[1], 2);
    step(false);
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char part[256];
  for (ssize_t n; (n = read(ends[0], part, sizeof part)) > 0;) text.append(part, size_t(n));
  close(ends[0]);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  CHECK(WTERMSIG(status) == SIGABRT);
  CHECK(has(text, "'the second' back departs from the memory plan"));
}

TEST_CASE("an error in a step unwinds through its buffers", "[device]") {
  Device dev(Backend::cpu, 0);
  Memory& mem = dev.mem;
  const auto step = [&](bool fail) {
    mem.begin("step");
    auto a = mem.take<float>(100, "a");
    auto b = mem.take<float>(100, "b");
    if (fail) throw UsageError("the reason");
    a.reset(), b.reset();  // the other way round than the destructors
    mem.end();
  };
  step(false);
  mem.commit();
  step(false);
  CHECK(error_of<UsageError>([&] { step(true); }) == "the reason");
}

TEST_CASE("a buffer has one owner", "[device]") {
  Device dev(Backend::cpu, 0);
  Memory& mem = dev.mem;
  const auto step = [&] {
    mem.begin("step");
    Buffer<double> nothing, a = mem.take<double>(10, "a");
    CHECK(nothing.get() == nullptr);
    CHECK(nothing.size() == 0);
    CHECK(a.size() == 10);
    double* at = a;
    Buffer<double> b(std::move(a));
    CHECK(a.get() == nullptr);
    CHECK(b.get() == at);
    Buffer<double> c = mem.take<double>(20, "c");
    c = std::move(b);  // gives its own back
    CHECK(c.get() == at);
    CHECK(c.size() == 10);
    c = mem.take<double>(30, "d");  // d is taken before the first is given
    c.reset();
    c.reset();
    mem.end();
  };
  step();
  // 80 (a) and 160 (c), then 80 and 240 (d): at most two units live.
  CHECK(mem.report().live_peak == 2 * unit);
  mem.commit();
  step();
}

TEST_CASE("buffers of no bytes are buffers", "[device]") {
  // As a rank has them whose part of a tensor is empty. Their address must tell them from others.
  Device dev(Backend::cpu, 0);
  Memory& mem = dev.mem;
  const auto step = [&] {
    mem.begin("step");
    auto none = mem.take<float>(0, "none");
    auto some = mem.take<float>(10, "some");
    auto no_more = mem.take<float>(0, "no more");
    none.reset(), no_more.reset(), some.reset();
    mem.end();
  };
  mem.keep<float>(0, "kept none", Purpose::master);
  mem.keep<float>(10, "kept some", Purpose::master);
  step();
  CHECK(mem.report().live_peak == kept_unit + unit);  // they take nothing
  mem.commit();
  CHECK_NOTHROW(mem.keep<float>(0, "kept none", Purpose::master));
  CHECK_NOTHROW(mem.keep<float>(10, "kept some", Purpose::master));
  CHECK_NOTHROW(step());
}

TEST_CASE("kept buffers come back in their order", "[device]") {
  Device dev(Backend::cpu, 0);
  Memory& mem = dev.mem;
  const int64_t sizes[] = {1, 5000, 4096, 12345};
  const char* names[] = {"a", "b", "c", "d"};
  const auto keep = [&](int i) { return mem.keep<char>(sizes[i], names[i], Purpose::master); };
  for (int i = 0; i < 4; ++i) keep(i);
  mem.rewind();
  mem.commit();
  char* at[4];
  for (int i = 0; i < 4; ++i) at[i] = keep(i);
  for (int i = 0; i < 4; ++i) {
    CHECK(reinterpret_cast<uintptr_t>(at[i]) % kept_unit == 0);
    CHECK(at[i] + sizes[i] <= at[0] + mem.arena_bytes());
    if (i > 0) CHECK(at[i - 1] + sizes[i - 1] <= at[i]);
    std::memset(at[i], i + 1, size_t(sizes[i]));  // it is there
  }
  CHECK_THROWS_AS(keep(0), Error);  // one too many
  mem.rewind();
  for (int i = 0; i < 4; ++i) CHECK(keep(i) == at[i]);
  mem.rewind();
  CHECK(has(error_of<Error>([&] { keep(1); }), "'b'"));
  CHECK_THROWS_AS(mem.keep<char>(2, "a", Purpose::master), Error);
  CHECK_THROWS_AS(mem.keep<char>(1, "e", Purpose::master), Error);
  CHECK(keep(0) == at[0]);  // what was refused has moved nothing
}

TEST_CASE("the memory report adds up", "[device]") {
  Device dev(Backend::gpu, Device::plan_only);  // a plan needs no device
  Memory& mem = dev.mem;
  const auto bytes_of = [](const int64_t* of, Purpose p) { return of[int(p)]; };
  const auto total = [](const int64_t* of) { return std::accumulate(of, of + purposes, int64_t(0)); };
  CHECK(mem.report().live_peak == 0);
  mem.keep<float>(10000, "weights", Purpose::master);         // 40000 bytes: 10 units of 4096
  mem.keep<float>(1000, "more weights", Purpose::master);     // 4000: 1
  mem.keep<float>(20000, "moments", Purpose::moments);        // 80000: 20
  mem.keep<bf16>(10000, "gradients", Purpose::gradients);     // 20000: 5
  mem.keep<char>(1, "slot", Purpose::gather_slots);           // 1
  mem.keep<char>(4097, "other slot", Purpose::gather_slots);  // 2

  MemoryReport r = mem.report();
  CHECK(bytes_of(r.init, Purpose::master) == 11 * kept_unit);
  CHECK(total(r.init) == 11 * kept_unit);
  CHECK(r.init_total == 11 * kept_unit);
  CHECK(bytes_of(r.before_step, Purpose::master) == 11 * kept_unit);
  CHECK(bytes_of(r.before_step, Purpose::moments) == 20 * kept_unit);
  CHECK(bytes_of(r.before_step, Purpose::gradients) == 5 * kept_unit);
  CHECK(bytes_of(r.before_step, Purpose::gather_slots) == 3 * kept_unit);
  CHECK(total(r.before_step) == 39 * kept_unit);
  CHECK(r.before_step_total == 39 * kept_unit);
  CHECK(r.live_peak == 39 * kept_unit);
  CHECK(total(r.peak) == 39 * kept_unit);

  mem.begin("step");
  mem.phase("forward");
  auto x = mem.take<float>(1000, "x", Purpose::activations);  // 4000: 16 units of 256
  auto y = mem.take<float>(2000, "y", Purpose::activations);  // 8000: 32
  mem.take<float>(100, "t").reset();                          // 400: 2, a temporary; 50 live
  mem.phase("head");
  {
    auto logits = mem.take<float>(3000, "logits");              // 12000: 47
    auto work = mem.take<char>(5, "work", Purpose::workspace);  // 1; 96 live: the peak of the step
  }
  mem.phase("backward");
  auto g = mem.take<bf16>(500, "g", Purpose::gradient_slots);  // 1000: 4
  y.reset();
  auto h = mem.take<float>(2500, "h", Purpose::activations);  // 10000: 40; 60 live
  x.reset(), g.reset(), h.reset();
  mem.end();
  r = mem.report();
  CHECK(r.live_peak == 39 * kept_unit + 96 * unit);
  CHECK(r.peak_phase == "head");
  CHECK(r.largest == "logits");
  CHECK(bytes_of(r.peak, Purpose::activations) == 48 * unit);
  CHECK(bytes_of(r.peak, Purpose::temporaries) == 47 * unit);
  CHECK(bytes_of(r.peak, Purpose::workspace) == 1 * unit);
  CHECK(bytes_of(r.peak, Purpose::gradient_slots) == 0);
  CHECK(bytes_of(r.peak, Purpose::moments) == 20 * kept_unit);
  CHECK(total(r.peak) == r.live_peak);
  CHECK(r.before_step_total == 39 * kept_unit);

  // Another program counts only where its peak is higher.
  mem.begin("validate");
  mem.phase("validation");
  mem.take<char>(90 * unit, "small").reset();
  mem.end();
  CHECK(mem.report().peak_phase == "head");
  CHECK(mem.report().live_peak == 39 * kept_unit + 96 * unit);
  mem.begin("export");
  mem.phase("export");
  mem.take<char>(100 * unit + 1, "all of it", Purpose::workspace).reset();
  mem.end();
  r = mem.report();
  CHECK(r.peak_phase == "export");
  CHECK(r.largest == "all of it");
  CHECK(r.live_peak == 39 * kept_unit + 101 * unit);
  CHECK(bytes_of(r.peak, Purpose::workspace) == 101 * unit);
  CHECK(bytes_of(r.peak, Purpose::activations) == 0);
  CHECK(total(r.peak) == r.live_peak);

  // Weights that a program makes whole stand beside the kept ones while the model is made.
  CHECK(r.init_total == 11 * kept_unit);
  mem.begin("init");
  mem.take<char>(7 * unit, "whole", Purpose::master).reset();
  mem.take<char>(3 * unit, "a smaller one", Purpose::master).reset();
  mem.end();
  r = mem.report();
  CHECK(bytes_of(r.init, Purpose::master) == 11 * kept_unit + 7 * unit);
  CHECK(r.init_total == total(r.init));
  CHECK(r.before_step_total == 39 * kept_unit);

  CHECK(r.arena == mem.arena_bytes());
  CHECK(r.arena % arena_unit == 0);
  CHECK(r.arena >= r.live_peak);
}

TEST_CASE("the arena holds the peak of the plan, and commit does not change the report", "[device]") {
  Device dev(Backend::cpu, 0);
  Memory& mem = dev.mem;
  Rng rng(3);
  for (int i = 0; i < 5; ++i) mem.keep<char>(100000 * (i + 1), strf("kept %d", i), Purpose(i));
  const std::vector<Life> lives = schedule(rng, 500, Give::any, false, 20, 1 << 20);
  play(mem, "step", lives);
  const MemoryReport r = mem.report();
  CHECK(r.live_peak == r.before_step_total + most_live_slowly(lives, unit));
  CHECK(r.arena >= r.live_peak);
  CHECK(r.arena < r.live_peak * 1.25 + arena_unit);
  mem.commit();
  const MemoryReport after = mem.report();
  CHECK(after.live_peak == r.live_peak);
  CHECK(after.arena == r.arena);
  CHECK(after.peak_phase == r.peak_phase);
  CHECK(after.largest == r.largest);
  CHECK(std::equal(r.peak, r.peak + purposes, after.peak));
}
