// lib/device: error texts, streams and events. What holds on both backends is a function of the backend, which a CPU
// case and a GPU case ([gpu]) call; CPU streams are also held by gates, so that what must not depend on time is tested
// without it.
#include "test/catch.h"
#include "test/errors.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>

#include "lib/device/library.h"

namespace {

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
  CHECK(error_of<UsageError>([&] { REQUIRE_USER(batch > 0, "--batch %d: must be positive", batch); }) ==
        "--batch -3: must be positive");
  CHECK_NOTHROW([&] { REQUIRE_USER(batch < 0, "not thrown"); }());
  const int line = __LINE__ + 1;
  const std::string text = error_of<Error>([&] { ASSERT(batch == 7); });
  CHECK(has(text, "batch == 7"));
  CHECK(has(text, strf("%s:%d", __FILE__, line)));
  CHECK_NOTHROW([&] { ASSERT(batch == -3); }());
  // A broken promise is not the user's fault.
  CHECK_THROWS_AS(error_of<UsageError>([&] { ASSERT(batch == 7); }), Error);
}

#if FSDP_CUDA
TEST_CASE("a library tells the first that it lacks, and has the rest", "[device]") {
  double (*cosine)(double) = nullptr;
  Library math("libm.so.6");
  math.find("cos", &cosine);
  REQUIRE(cosine);
  CHECK(cosine(0) == 1);
  CHECK(math.why().empty());
  void (*none)() = [] {};
  math.find("no_such", &none);
  CHECK(!none);
  math.find("nor_such", &none);
  CHECK(math.why() == "libm.so.6 has no no_such");
  Library absent("libabsent.so.7");
  absent.find("cos", &cosine);
  CHECK(!cosine);
  CHECK(absent.why().find("libabsent.so.7") == 0);
}

TEST_CASE("an error of CUDA names the call, the file and the line", "[device]") {
  const int line = __LINE__ + 1;
  const std::string text = error_of<CudaError>([&] { CUDA_CHECK(cudaSetDevice(99999)); });
  cudaGetLastError();  // so that the next check does not see it
  CHECK(has(text, "cudaSetDevice(99999)"));
  CHECK(has(text, strf("%s:%d", __FILE__, line)));
  CHECK(has(text, strf("rank %d", this_rank())));
  CHECK_NOTHROW([&] { CUDA_CHECK(cudaSuccess); }());
  const std::string full =
      error_of<OutOfMemory>([] { throw_cuda(int(cudaErrorMemoryAllocation), "cudaMalloc(&p, n)", "some.cu", 12); });
  CHECK(has(full, "cudaMalloc(&p, n)"));
  CHECK(has(full, "some.cu:12"));
  CHECK(has(full, "--batch"));
}
#else
TEST_CASE("a build without CUDA says so when it is asked for a GPU", "[device]") {
  CHECK(gpu_count() == 0);
  CHECK(has(error_of<UsageError>([] { Device dev(Backend::gpu, 0); }), "no GPU backend"));
}
#endif

// ------------------------------------------------------------------------------------------------- streams and events

namespace {

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

  // By a kernel: any number of bytes from any place to any, and none beside them.
  char *place = reinterpret_cast<char*>(t.place), *to = reinterpret_cast<char*>(t.to.get());
  const char* from = reinterpret_cast<const char*>(t.from.get());
  for (int64_t bytes : {0, 1, 4, 16, 1000, 4096, 4 * int(n) - 64})
    for (auto [read_at, written_at] : {std::pair<int64_t, int64_t>{0, 0}, {16, 32}, {4, 8}, {1, 3}}) {
      t.a.zero(place, n * 4);
      t.a.copy_by_kernel(place + written_at, from + read_at, bytes);
      t.a.copy(to, place, n * 4);
      t.a.synchronize();
      std::vector<char> expected(size_t(n * 4), 0);
      std::copy_n(from + read_at, bytes, expected.begin() + written_at);
      CHECK(std::equal(expected.begin(), expected.end(), to));
    }

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
  t.a.sleep(1000);
  t.a.record(a_done);
  CHECK(watch.ms() < 900);  // the host is not held
  t.copy_through(t.b, 0);
  t.b.record(b_done);
  t.b.synchronize();
  CHECK(t.to[0] == t.from[0]);
  CHECK(watch.ms() < 950);  // nor is the other stream
  t.a.synchronize();
  CHECK(watch.ms() >= 995);
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
  t.a.sleep(1000);
  Watch watch;
  synchronize(middle);
  CHECK(t.to[1] == t.from[1]);
  CHECK(watch.ms() < 900);
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
  t.a.sleep(500);
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
  CHECK(ms < 5000);
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
  CHECK(error_of<MpiError>([&] { b.synchronize(); }) == "the first failure");
  CHECK_FALSE(later);   // work behind a failure is dropped
  CHECK_FALSE(beside);  // on all streams
  CHECK(error_of<MpiError>([&] { a.synchronize(); }) == "the first failure");
  CHECK(error_of<MpiError>([&] { synchronize(e); }) == "the first failure");
  CHECK(error_of<MpiError>([&] { dev.check(); }) == "the first failure");
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
    a.sleep(5000);
    a.host([&] { ran = true; });
    a.enqueue([&] { ran = true; });
    a.copy(to.get(), from.get(), 4);
    a.copy_by_kernel(to.get(), from.get(), 4);
    a.zero(to.get(), 4);
    a.record(e);
    b.wait(e);
    a.synchronize();
    b.synchronize();
    CHECK(watch.ms() < 2500);
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
    std::mt19937_64 rng(seed);
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
