// lib/device: error texts, streams and events, the packing of buffers, planned memory. What holds on both backends is
// a function of the backend, which a CPU case and a GPU case ([gpu]) call; CPU streams are also held by gates, so that
// what must not depend on time is tested without it.
#include "test/catch.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cmath>
#include <csignal>
#include <cstring>
#include <fstream>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

namespace {

using Rng = std::mt19937_64;

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// What an error of kind E says; another kind, or none, does not look like any text that a test expects.
template <class E, class F>
std::string text_of(F f) {
  try {
    f();
  } catch (const E& e) { return e.what(); } catch (...) {
    return "(an error of another kind)";
  }
  return "(no error)";
}

// Holds a CPU stream until it is opened. The limit turns what would be a hanging test into a failed one.
class Gate {
 public:
  ~Gate() { open(); }
  void open() {
    std::lock_guard<std::mutex> lock(state_->mutex);
    state_->open = true;
    state_->changed.notify_all();
  }
  std::function<void()> pass() const {
    return [s = state_] {
      std::unique_lock<std::mutex> lock(s->mutex);
      s->changed.wait_for(lock, std::chrono::seconds(20), [&] { return s->open; });
    };
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool open = false;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// Whether it comes true before long.
bool soon(const std::atomic<bool>& flag) {
  for (int ms = 0; ms < 10000 && !flag; ++ms) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return flag;
}
void pause_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

class Watch {
 public:
  double ms() const {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace

// ------------------------------------------------------------------------------------------------------------- errors

TEST_CASE("strf prints text of any length", "[device]") {
  CHECK(strf("%d of %s", 3, "four") == "3 of four");
  CHECK(strf("%s", "").empty());
  const std::string text(10000, 'x');
  CHECK(strf("<%s>", text.c_str()) == "<" + text + ">");
}

TEST_CASE("errors say what and where", "[device]") {
  const int batch = -3;
  CHECK(text_of<UsageError>([&] { REQUIRE_USER(batch > 0, "--batch %d: must be positive", batch); }) ==
        "--batch -3: must be positive");
  CHECK_NOTHROW([&] { REQUIRE_USER(batch < 0, "not thrown"); }());
  const int line = __LINE__ + 1;
  const std::string text = text_of<Error>([&] { ASSERT(batch == 7); });
  CHECK(has(text, "batch == 7"));
  CHECK(has(text, strf("%s:%d", __FILE__, line)));
  CHECK_NOTHROW([&] { ASSERT(batch == -3); }());
  // A broken promise is not the user's fault.
  CHECK(text_of<UsageError>([&] { ASSERT(batch == 7); }) == "(an error of another kind)");
}

#if FSDP_CUDA
TEST_CASE("an error of CUDA names the call, the file and the line", "[device]") {
  const int line = __LINE__ + 1;
  const std::string text = text_of<CudaError>([&] { CUDA_CHECK(cudaSetDevice(99999)); });
  cudaGetLastError();  // so that the next check does not see it
  CHECK(has(text, "cudaSetDevice(99999)"));
  CHECK(has(text, strf("%s:%d", __FILE__, line)));
  CHECK(has(text, strf("rank %d", this_rank())));
  CHECK_NOTHROW([&] { CUDA_CHECK(cudaSuccess); }());
  const std::string full =
      text_of<OutOfMemory>([] { throw_cuda(int(cudaErrorMemoryAllocation), "cudaMalloc(&p, n)", "some.cu", 12); });
  CHECK(has(full, "cudaMalloc(&p, n)"));
  CHECK(has(full, "some.cu:12"));
  CHECK(has(full, "--batch"));
}
#else
TEST_CASE("a build without CUDA says so when it is asked for a GPU", "[device]") {
  CHECK(gpu_count() == 0);
  CHECK(has(text_of<UsageError>([] { Device dev(Backend::gpu, 0); }), "no GPU backend"));
}
#endif

// ------------------------------------------------------------------------------------------------- streams and events

namespace {

int ordinal_of(Backend backend) { return backend == Backend::gpu ? test_device(backend).ordinal : 0; }

// A device with `n` numbers in its memory and as many before and behind them on the host: on a GPU only a copy that has
// an end in device memory leaves the host alone.
struct Bench {
  Device dev;
  Stream &a = dev.compute(), &b = dev.gather(), &c = dev.reduce();
  HostBuffer<int32_t> from, to;
  int32_t* place;
  Bench(Backend backend, int64_t n, int64_t n_host)
      : dev(backend, ordinal_of(backend)), from(dev, n_host), to(dev, n_host), place(nullptr) {
    dev.mem.keep<int32_t>(n, "place", Purpose::workspace);
    dev.mem.commit();
    place = dev.mem.keep<int32_t>(n, "place", Purpose::workspace);
    dev.mode = Mode::run;
    for (int64_t i = 0; i < n_host; ++i) from[i] = int32_t(uint32_t(i + 1) * 2654435761u);
  }
  void copy_through(Stream& s, int64_t i) {
    s.copy(&place[i], &from[i], 4);
    s.copy(&to[i], &place[i], 4);
  }
};

// Copies show the order of work; each sleep is long beside what must pass meanwhile.
void streams_in_order(Backend backend) {
  constexpr int64_t n = 1 << 16, rounds = 50;
  Bench t(backend, n, n * rounds);
  for (int64_t r = 0; r < rounds; ++r) {  // one place that all rounds go through
    t.a.copy(t.place, &t.from[r * n], n * 4);
    if (r % 10 == 9) t.a.zero(&t.place[n / 2], n / 2 * 4);
    t.a.copy(&t.to[r * n], t.place, n * 4);
  }
  t.a.synchronize();
  int64_t wrong = 0;
  for (int64_t i = 0; i < n * rounds; ++i) wrong += t.to[i] != (i / n % 10 == 9 && i % n >= n / 2 ? 0 : t.from[i]);
  CHECK(wrong == 0);

  // Host work has its place in the order too, and a copy of no bytes is no work.
  int32_t seen = -1;
  t.a.sleep(20);
  t.copy_through(t.a, 1);
  t.a.host([&] { seen = t.to[1], t.from[2] = 17; });
  t.copy_through(t.a, 2);
  t.a.copy(nullptr, nullptr, 0);
  t.a.zero(nullptr, 0);
  t.a.synchronize();
  CHECK(seen == t.from[1]);
  CHECK(t.to[2] == 17);
}

void streams_side_by_side(Backend backend) {
  Bench t(backend, 1, 1);
  Event a_done(t.dev, Event::timed), b_done(t.dev, Event::timed);
  t.a.sleep(1);  // what a first use costs
  t.copy_through(t.b, 0);
  t.a.synchronize();
  t.b.synchronize();
  t.to[0] = 0;
  Watch watch;
  t.a.sleep(400);
  t.a.record(a_done);
  CHECK(watch.ms() < 300);  // the host is not held
  t.copy_through(t.b, 0);
  t.b.record(b_done);
  t.b.synchronize();
  CHECK(t.to[0] == t.from[0]);
  CHECK(watch.ms() < 350);  // nor is the other stream
  t.a.synchronize();
  CHECK(watch.ms() >= 395);
  CHECK(elapsed_ms(b_done, a_done) > 0);
}

void events_order_streams(Backend backend) {
  Bench t(backend, 3, 2);
  Event first(t.dev), second(t.dev), middle(t.dev);
  // a, then b, then c, each behind the one before.
  t.a.sleep(30);
  t.a.copy(&t.place[0], &t.from[0], 4);
  t.a.record(first);
  t.b.wait(first);
  t.b.copy(&t.place[1], &t.place[0], 4);
  t.b.record(second);
  t.c.wait(second);
  t.c.copy(&t.to[0], &t.place[1], 4);
  t.c.synchronize();
  CHECK(t.to[0] == t.from[0]);

  // The host waits for an event, and not for what the stream does after it.
  t.a.sleep(20);
  t.copy_through(t.a, 1);
  t.a.record(middle);
  t.a.sleep(300);
  Watch watch;
  synchronize(middle);
  CHECK(t.to[1] == t.from[1]);
  CHECK(watch.ms() < 250);
  t.a.synchronize();
}

// wait() means the latest record() at the time of the call; never recorded holds nobody; a later record is not meant.
void events_mean_the_latest_record(Backend backend) {
  Bench t(backend, 3, 3);
  Event e(t.dev), a_done(t.dev, Event::timed), b_done(t.dev, Event::timed);
  t.b.wait(e);  // never recorded
  t.copy_through(t.b, 0);
  t.a.record(e);
  t.b.wait(e);
  t.a.sleep(200);
  t.a.record(e);  // after the wait above: it does not move it
  t.a.record(a_done);
  t.copy_through(t.b, 1);
  t.b.record(b_done);
  t.b.synchronize();
  CHECK(t.to[0] == t.from[0]);
  CHECK(t.to[1] == t.from[1]);
  CHECK(elapsed_ms(b_done, a_done) > 0);
  // Recorded again: now the second record counts.
  t.a.record(e);
  t.a.sleep(30);
  t.copy_through(t.a, 2);
  t.a.record(e);
  int32_t seen = 0;
  t.b.wait(e);
  t.b.host([&] { seen = t.to[2]; });
  t.b.synchronize();
  CHECK(seen == t.from[2]);
  // A moved event is the same event, and the stream that waits needs the event no longer than the call takes.
  t.to[2] = 0, seen = 0;
  {
    Event short_lived(t.dev);
    t.a.sleep(30);
    t.copy_through(t.a, 2);
    t.a.record(short_lived);
    Event moved(std::move(short_lived));
    t.b.wait(moved);
  }
  t.b.host([&] { seen = t.to[2]; });
  t.b.synchronize();
  CHECK(seen == t.from[2]);
}

void elapsed_time(Backend backend) {
  Device& dev = test_device(backend);
  Stream& a = dev.compute();
  Event from(dev, Event::timed), to(dev, Event::timed);
  a.record(from);
  a.sleep(25);
  a.record(to);
  const float ms = elapsed_ms(from, to);  // waits by itself
  CHECK(ms >= 24.9f);
  CHECK(ms < 500);
  Event never(dev, Event::timed);
  CHECK_THROWS_AS(elapsed_ms(never, to), Error);
#if FSDP_CUDA
  cudaGetLastError();
#endif
}

void failures_reach_the_host(Backend backend) {
  Device dev(backend, ordinal_of(backend));  // a failure stays with its device
  dev.mode = Mode::run;
  Stream &a = dev.compute(), &b = dev.gather();
  CHECK_FALSE(dev.failed());
  CHECK_NOTHROW(dev.check());
  std::atomic<bool> later{false}, beside{false};
  Event e(dev);
  a.host([] { throw MpiError("the first failure"); });
  a.host([&] {
    later = true;
    throw Error("the second failure");
  });
  a.record(e);
  b.wait(e);  // raised although the work before it failed: nobody waits for ever
  b.host([&] { beside = true; });
  CHECK(text_of<MpiError>([&] { b.synchronize(); }) == "the first failure");
  CHECK_FALSE(later);   // work behind a failure is dropped
  CHECK_FALSE(beside);  // on all streams
  CHECK(text_of<MpiError>([&] { a.synchronize(); }) == "the first failure");
  CHECK(text_of<MpiError>([&] { synchronize(e); }) == "the first failure");
  CHECK(text_of<MpiError>([&] { dev.check(); }) == "the first failure");
  CHECK(dev.failed());
}

void nothing_is_enqueued_but_in_a_run(Backend backend) {
  Device dev(backend, ordinal_of(backend));
  Stream &a = dev.compute(), &b = dev.gather();
  HostBuffer<int32_t> from(dev, 1), to(dev, 1);
  Event e(dev), again(dev);
  bool ran = false;
  for (Mode mode : {Mode::plan, Mode::tune}) {
    dev.mode = mode;
    CHECK(a.off());
    from[0] = 1, to[0] = 2;
    Watch watch;
    a.sleep(500);
    a.host([&] { ran = true; });
    a.enqueue([&] { ran = true; });
    a.copy(to.get(), from.get(), 4);
    a.zero(to.get(), 4);
    a.record(e);
    b.wait(e);
    a.synchronize();
    b.synchronize();
    CHECK(watch.ms() < 250);
    CHECK_FALSE(ran);
    CHECK(to[0] == 2);
  }
  // The record above was none either: a wait for it holds nobody, and there is no time to tell.
  dev.mode = Mode::run;
  CHECK_FALSE(a.off());
  b.wait(e);
  b.record(again);
  b.synchronize();
  CHECK_THROWS_AS(elapsed_ms(e, again), Error);
#if FSDP_CUDA
  cudaGetLastError();
#endif
}

void all_of_streams(Backend backend) {
  streams_in_order(backend);
  streams_side_by_side(backend);
  events_order_streams(backend);
  events_mean_the_latest_record(backend);
  elapsed_time(backend);
  failures_reach_the_host(backend);
  nothing_is_enqueued_but_in_a_run(backend);
}

}  // namespace

TEST_CASE("streams keep their order", "[device]") { streams_in_order(Backend::cpu); }
TEST_CASE("streams run side by side", "[device]") { streams_side_by_side(Backend::cpu); }
TEST_CASE("events order streams", "[device]") { events_order_streams(Backend::cpu); }
TEST_CASE("a wait means the latest record", "[device]") { events_mean_the_latest_record(Backend::cpu); }
TEST_CASE("the time between events", "[device]") { elapsed_time(Backend::cpu); }
TEST_CASE("what a stream's work throws reaches the host", "[device]") { failures_reach_the_host(Backend::cpu); }
TEST_CASE("planning and tuning enqueue nothing", "[device]") { nothing_is_enqueued_but_in_a_run(Backend::cpu); }
TEST_CASE("GPU: streams and events", "[device][gpu]") {
  NEEDS_GPU();
  all_of_streams(Backend::gpu);
}

TEST_CASE("work of one CPU stream runs one at a time, in order", "[device]") {
  Stream& a = test_device(Backend::cpu).compute();
  std::vector<int> order;
  std::atomic<int> at_once{0}, most{0};
  for (int i = 0; i < 2000; ++i) {
    auto work = [&, i] {
      most = std::max<int>(most, ++at_once);
      order.push_back(i);
      --at_once;
    };
    if (i % 2) a.enqueue(work);
    else a.host(work);
  }
  a.synchronize();
  CHECK(most == 1);
  CHECK(order.size() == 2000);
  CHECK(std::is_sorted(order.begin(), order.end()));
}

TEST_CASE("two CPU streams run at one time", "[device]") {
  Device& dev = test_device(Backend::cpu);
  Gate met;
  std::atomic<bool> through{false};
  dev.compute().enqueue([&, wait = met.pass()] {
    wait();
    through = true;
  });
  dev.gather().enqueue([&] { met.open(); });  // only if it does not wait for the other
  CHECK(soon(through));
  dev.compute().synchronize();
  dev.gather().synchronize();
}

TEST_CASE("a CPU stream waits exactly as long as its event says", "[device]") {
  Device& dev = test_device(Backend::cpu);
  Stream &a = dev.compute(), &b = dev.gather();
  Event e(dev);
  std::atomic<bool> first{false}, second{false};
  Gate one, two;
  a.enqueue(one.pass());
  a.record(e);
  b.wait(e);
  b.enqueue([&] { first = true; });
  a.enqueue(two.pass());
  a.record(e);  // does not move the wait above, which has not come to its turn yet
  pause_ms(50);
  CHECK_FALSE(first);
  one.open();
  CHECK(soon(first));
  b.wait(e);
  b.enqueue([&] { second = true; });
  pause_ms(50);
  CHECK_FALSE(second);
  two.open();
  CHECK(soon(second));
  a.synchronize();
  b.synchronize();
}

TEST_CASE("synchronize waits for work that is under way", "[device]") {
  Stream& a = test_device(Backend::cpu).compute();
  std::atomic<bool> done{false};
  a.sleep(30);
  a.enqueue([&] {
    pause_ms(30);  // the queue is empty by now
    done = true;
  });
  a.synchronize();
  CHECK(done);
}

TEST_CASE("a CPU device finishes its work before it goes", "[device]") {
  std::atomic<int> done{0};
  {
    Device dev(Backend::cpu, 0);
    dev.mode = Mode::run;
    Event e(dev);
    dev.reduce().sleep(20);
    dev.reduce().record(e);
    dev.compute().wait(e);  // of a stream that is taken down later
    for (Stream* s : {&dev.compute(), &dev.gather(), &dev.reduce()}) s->enqueue([&] { ++done; });
  }
  CHECK(done == 3);
}

// Every piece of work checks that all the work that events put before it has been done, whatever the threads do.
TEST_CASE("any web of events holds on CPU streams", "[device]") {
  Device& dev = test_device(Backend::cpu);
  Stream* streams[] = {&dev.compute(), &dev.gather(), &dev.reduce()};
  using Clock = std::array<int, 3>;  // how much of each stream's work has been done for certain
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    Rng rng(seed);
    Clock known[3] = {};
    std::atomic<int> done[3] = {}, broken{0};
    std::vector<Event> events;
    std::vector<Clock> meant(8, Clock{});
    for (int i = 0; i < 8; ++i) events.emplace_back(dev);
    for (int step = 0; step < 3000; ++step) {
      const size_t s = rng() % 3, e = rng() % 8;
      const uint64_t kind = rng() % 4;
      if (kind == 0) {
        streams[s]->record(events[e]);
        meant[e] = known[s];
      } else if (kind == 1) {
        streams[s]->wait(events[e]);
        for (size_t i = 0; i < 3; ++i) known[s][i] = std::max(known[s][i], meant[e][i]);
      } else {
        const int us = rng() % 50 ? 0 : 200;
        streams[s]->enqueue([&, s, us, before = known[s]] {
          if (us) std::this_thread::sleep_for(std::chrono::microseconds(us));
          for (size_t i = 0; i < 3; ++i)
            if (done[i] < before[i]) ++broken;
          ++done[s];
        });
        ++known[s][s];
      }
    }
    for (Stream* s : streams) s->synchronize();
    CHECK(broken == 0);
    for (size_t i = 0; i < 3; ++i) CHECK(done[i] == known[i][i]);
  }
}

// Writes down what it is told.
struct Report : Timeline {
  std::string said;
  double now = 0;
  void operation(int stream, const Cost& c) override { said += strf("%d: %.0f bytes; ", stream, c.bytes); }
  void collective(int stream, Collective, double bytes, int ranks, int local, Via via) override {
    said += strf("%d: %.0f bytes over %d of %d%s; ", stream, bytes, ranks, local,
                 via == Via::copy_engines ? " by engines" : "");
  }
  Point record(int stream) override {
    said += strf("%d: record; ", stream);
    return {stream, ++now};
  }
  void wait(int stream, const Point& event) override {
    said += strf("%d: wait for %d's of %.0f; ", stream, event.stream, event.seconds);
  }
  void next_step() override { said += "step; "; }
};

TEST_CASE("a dry run reports to its timeline, and only a dry run", "[device]") {
  Device dev(Backend::cpu, 0);
  std::vector<char> a(100), b(100);
  Report report;
  auto work = [&] {
    Event copied(dev);
    dev.compute().wait(copied);  // never recorded
    dev.gather().copy(a.data(), b.data(), 100);
    dev.gather().record(copied);
    dev.compute().wait(copied);
    dev.reduce().zero(a.data(), 7);
    dev.reduce().zero(a.data(), 0);  // nothing
    dev.reduce().record(copied);
    dev.compute().wait(copied);
  };
  work();  // to nobody
  dev.timeline = &report;
  work();
  CHECK(report.said ==
        "0: wait for 0's of 0; 1: 200 bytes; 1: record; 0: wait for 1's of 1; 2: 7 bytes; 2: record; "
        "0: wait for 2's of 2; ");
  report.said.clear();
  dev.compute().spend(moves<float>(3));
  dev.gather().spend(Collective::all_gather, 64, 4, 2, Via::copy_engines);
  CHECK(report.said == "0: 12 bytes; 1: 64 bytes over 4 of 2 by engines; ");
  report.said.clear();
  dev.mode = Mode::run;
  work();
  for (Stream* s : {&dev.compute(), &dev.gather(), &dev.reduce()}) s->synchronize();
  CHECK(report.said.empty());
}

TEST_CASE("a planned GPU has no streams and no memory", "[device]") {
  Device dev(Backend::gpu, Device::plan_only);
  CHECK(dev.compute().off());
  CHECK(dev.compute().on_gpu());
  Event e(dev);
  dev.compute().host([] { throw Error("ran"); });
  dev.compute().record(e);
  dev.gather().wait(e);
  dev.compute().synchronize();
  dev.mem.keep<float>(1000, "weights", Purpose::master);
  CHECK(dev.mem.report().init_total >= 4000);
  CHECK_THROWS_AS(dev.mem.commit(), Error);
  CHECK_FALSE(dev.mem.committed());
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
  for (uint64_t seed = 1; seed <= 6; ++seed)
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
    const std::string text = text_of<OutOfMemory>([&] { mem.commit(); });
    has_all(text, {"backward 3", "the large one", strf("asks for %.0f MiB", double(mem.arena_bytes()) / mib), dev.name,
                   strf("of %.0f;", double(dev.total_bytes) / mib), "nothing was allocated"});
    if (backend == Backend::cpu) {
      CHECK(has(text, strf("has %.0f MiB free", double(dev.free_bytes) / mib)));
      CHECK(mapped() - before < dev.total_bytes / 2);
    }
    CHECK_FALSE(has(text, "too small"));
    CHECK_FALSE(mem.committed());
    CHECK(mem.device_reported_bytes() == 0);
  }
  {
    // What fits once need not fit for all that share the device.
    Device dev(backend, ordinal_of(backend), 3);
    Memory& mem = dev.mem;
    mem.begin("step");
    mem.take<char>(dev.total_bytes / 2, "half of it").reset();
    mem.end();
    has_all(text_of<OutOfMemory>([&] { mem.commit(); }), {"half of it", "3 ranks"});
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
  const std::string text = text_of<OutOfMemory>([&] { dev.mem.commit(dev.free_bytes); });
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
    return text_of<Error>([&] { deviate(mem); });
  };
  const std::string none = "(no error)";
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
  CHECK(text_of<UsageError>([&] { step(true); }) == "the reason");
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
  CHECK(has(text_of<Error>([&] { keep(1); }), "'b'"));
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
