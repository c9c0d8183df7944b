#include "lib/device/stream.h"

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>

#include "lib/device/device.h"
#if FSDP_CUDA
#include "lib/device/launch.cuh"
#endif

namespace {
using Clock = std::chrono::steady_clock;

// One record() of a CPU event: raised when the stream's thread reaches it.
struct Flag {
  std::mutex mutex;
  std::condition_variable raised;
  bool done = false;
  Clock::time_point when;
  void raise() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      when = Clock::now();
      done = true;
    }
    raised.notify_all();  // outside of the lock, which who wakes wants at once
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    raised.wait(lock, [&] { return done; });
  }
};
}  // namespace

struct Event::State {
  Device* dev;
  Timeline::Point point;  // in a dry run
  std::shared_ptr<Flag> flag;
#if FSDP_CUDA
  cudaEvent_t cuda = nullptr;
  bool recorded = false;
  uint64_t graph = 0;  // in which it was recorded last; 0: in none
  ~State() {
    if (cuda) cudaEventDestroy(cuda);
  }
#endif
};

Event::Event(Device& dev, Kind kind) : s_(std::make_unique<State>()) {
  s_->dev = &dev;
  (void)kind;
#if FSDP_CUDA
  if (dev.backend == Backend::gpu && dev.ordinal != Device::plan_only)
    CUDA_CHECK(cudaEventCreateWithFlags(&s_->cuda, kind == timed ? cudaEventDefault : cudaEventDisableTiming));
#endif
}
Event::~Event() = default;
Event::Event(Event&&) noexcept = default;

float elapsed_ms(Event& from, Event& to) {
#if FSDP_CUDA
  if (from.s_->cuda) {
    CUDA_CHECK(cudaEventSynchronize(to.s_->cuda));
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, from.s_->cuda, to.s_->cuda));
    return ms;
  }
#endif
  synchronize(from);
  synchronize(to);
  ASSERT(from.s_->flag && to.s_->flag);
  return std::chrono::duration<float, std::milli>(to.s_->flag->when - from.s_->flag->when).count();
}

void synchronize(Event& e) {
#if FSDP_CUDA
  if (e.s_->cuda) {
    if (e.s_->graph) return synchronize(*e.s_->dev->after_graph);
    if (e.s_->recorded) CUDA_CHECK(cudaEventSynchronize(e.s_->cuda));
    e.s_->dev->check();
    return;
  }
#endif
  if (e.s_->flag) e.s_->flag->wait();
  e.s_->dev->check();
}

// A CPU stream: a thread that takes work from a queue in order. After a failure it drops work but still raises flags,
// so that nobody waits for ever; the failure reaches the host at its next synchronize.
struct Stream::Worker {
  Device& dev;
  std::mutex mutex;
  std::condition_variable changed;
  enum class Runs { until_a_failure, always };
  std::deque<std::pair<std::function<void()>, Runs>> queue;
  bool stop = false, busy = false;
  std::thread thread;

  explicit Worker(Device& d) : dev(d), thread([this] { loop(); }) {}
  ~Worker() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      stop = true;
      changed.notify_all();
    }
    thread.join();
  }
  void push(std::function<void()> work, Runs when) {
    {
      std::lock_guard<std::mutex> lock(mutex);
      queue.emplace_back(std::move(work), when);
    }
    changed.notify_all();
  }
  void drain() {
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait(lock, [&] { return queue.empty() && !busy; });
  }
  void loop() {
    std::unique_lock<std::mutex> lock(mutex);
    for (;;) {
      changed.wait(lock, [&] { return stop || !queue.empty(); });
      if (queue.empty()) return;
      auto item = std::move(queue.front());
      queue.pop_front();
      busy = true;
      lock.unlock();
      if (item.second == Runs::always || !dev.failed()) {
        try {
          item.first();
        } catch (...) { dev.fail(std::current_exception()); }
      }
      item.first = nullptr;
      lock.lock();
      busy = false;
      if (queue.empty()) changed.notify_all();  // for who drains, and would be woken by each piece of work
    }
  }
};

Stream::Stream(Device& dev, Priority priority) : dev_(dev) {
  (void)priority;
  if (dev.backend == Backend::gpu && dev.ordinal == Device::plan_only) return;  // always off
  if (dev.backend == Backend::cpu) {
    worker_ = std::make_unique<Worker>(dev);
    return;
  }
#if FSDP_CUDA
  int least = 0, greatest = 0;
  CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  CUDA_CHECK(cudaStreamCreateWithPriority(&cuda_, cudaStreamNonBlocking, priority == high ? greatest : least));
#endif
}
Stream::~Stream() {
#if FSDP_CUDA
  if (cuda_) cudaStreamDestroy(cuda_);
#endif
}

bool Stream::off() const { return dev_.mode != Mode::run; }
bool Stream::on_gpu() const { return dev_.backend == Backend::gpu; }

void Stream::enqueue(std::function<void()> work) {
  if (off()) return;
  ASSERT(worker_);
  worker_->push(std::move(work), Worker::Runs::until_a_failure);
}

void Stream::host(std::function<void()> work) {
  if (off()) return;
  if (worker_) {
    worker_->push(std::move(work), Worker::Runs::until_a_failure);
    return;
  }
#if FSDP_CUDA
  struct Job {
    std::function<void()> work;
    Device* dev;
  };
  auto run = [](void* p) {
    std::unique_ptr<Job> job(static_cast<Job*>(p));
    if (job->dev->failed()) return;
    try {
      job->work();
    } catch (...) { job->dev->fail(std::current_exception()); }
  };
  auto job = std::make_unique<Job>(Job{std::move(work), &dev_});
  CUDA_CHECK(cudaLaunchHostFunc(cuda_, run, job.get()));
  job.release();
#endif
}

void Stream::record(Event& e) {
  if (off()) {
    if (dev_.timeline) e.s_->point = dev_.timeline->record(number());
    return;
  }
#if FSDP_CUDA
  if (cuda_) {
    CUDA_CHECK(cudaEventRecord(e.s_->cuda, cuda_));
    e.s_->recorded = true, e.s_->graph = dev_.in_graph;
    return;
  }
#endif
  auto flag = e.s_->flag = std::make_shared<Flag>();
  worker_->push([flag] { flag->raise(); }, Worker::Runs::always);
}

void Stream::wait(const Event& e) {
  if (off()) {
    if (dev_.timeline) dev_.timeline->wait(number(), e.s_->point);
    return;
  }
#if FSDP_CUDA
  if (cuda_) {
    if (dev_.in_graph && e.s_->graph != dev_.in_graph) return;
    if (!dev_.in_graph && e.s_->graph) return wait(*dev_.after_graph);
    if (e.s_->recorded) CUDA_CHECK(cudaStreamWaitEvent(cuda_, e.s_->cuda, 0));
    return;
  }
#endif
  if (auto flag = e.s_->flag) worker_->push([flag] { flag->wait(); }, Worker::Runs::always);
}

void Stream::copy(void* to, const void* from, int64_t bytes) {
  if (bytes == 0) return;
  if (off()) return spend({Work::memory, 2.0 * double(bytes)});
#if FSDP_CUDA
  if (cuda_) {
    CUDA_CHECK(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDefault, cuda_));
    return;
  }
#endif
  enqueue([=] { std::memcpy(to, from, size_t(bytes)); });
}

#if FSDP_CUDA
namespace gpu {
template <class V>
__global__ void __launch_bounds__(256) copy_kernel(V* to, const V* from, int64_t n) {
  begin_kernel();
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x;
  if (i < n) to[i] = from[i];
}
// f(V()) of the widest V that all of these addresses and sizes, or-ed, are multiples of.
template <class F>
static void with_widest(uint64_t all, const F& f) {
  if (all % sizeof(uint4) == 0) f(uint4());
  else if (all % sizeof(uint32_t) == 0) f(uint32_t());
  else if (all % sizeof(uint16_t) == 0) f(uint16_t());
  else f(uint8_t());
}
static void copy(cudaStream_t stream, void* to, const void* from, int64_t bytes) {
  const uint64_t all = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | uint64_t(bytes);
  with_widest(all, [&](auto v) {
    using V = decltype(v);
    const int64_t n = bytes / int64_t(sizeof(V));
    launch(stream, copy_kernel<V>, {unsigned((n + 255) / 256), 256}, static_cast<V*>(to), static_cast<const V*>(from),
           n);
  });
}
}  // namespace gpu
#endif

void Stream::copy_by_kernel(void* to, const void* from, int64_t bytes) {
#if FSDP_CUDA
  if (cuda_ && !off() && bytes > 0) return gpu::copy(cuda_, to, from, bytes);
#endif
  copy(to, from, bytes);
}

#if FSDP_CUDA
namespace gpu {
// A thread owns one V; `across` of them are a row.
template <class V>
__global__ void __launch_bounds__(256) zero_kernel(char* p, int64_t pitch, int64_t across, int64_t rows) {
  begin_kernel();
  const int64_t i = int64_t(blockIdx.x) * 256 + threadIdx.x, row = rows == 1 ? 0 : i / across;
  if (i < across * rows) *reinterpret_cast<V*>(p + row * pitch + (i - row * across) * int64_t(sizeof(V))) = V();
}
void zero(cudaStream_t stream, void* p, int64_t pitch, int64_t bytes, int64_t rows) {
  if (bytes == 0 || rows == 0) return;
  const uint64_t all = reinterpret_cast<uintptr_t>(p) | uint64_t(pitch) | uint64_t(bytes);
  with_widest(all, [&](auto v) {
    using V = decltype(v);
    const int64_t across = bytes / int64_t(sizeof(V)), blocks = (across * rows + 255) / 256;
    launch(stream, zero_kernel<V>, {unsigned(blocks), 256}, static_cast<char*>(p), pitch, across, rows);
  });
}
static __global__ void clear_words(uint32_t* p, int64_t n) {
  begin_kernel();
  for (int64_t i = 0; i < n; ++i) p[i] = 0;
}
const void* clear_words_kernel() { return reinterpret_cast<const void*>(clear_words); }
}  // namespace gpu
#endif

void Stream::zero(void* p, int64_t bytes) { zero_rows(p, bytes, bytes, 1); }
void Stream::zero_rows(void* p, int64_t pitch, int64_t bytes, int64_t rows) {
  if (bytes == 0 || rows == 0) return;
  if (off()) return spend({Work::memory, double(bytes) * double(rows)});
#if FSDP_CUDA
  if (cuda_) return gpu::zero(cuda_, p, pitch, bytes, rows);
#endif
  enqueue([=] {
    for (int64_t r = 0; r < rows; ++r) std::memset(static_cast<char*>(p) + r * pitch, 0, size_t(bytes));
  });
}

#if FSDP_CUDA
namespace {
__global__ void spin(int64_t ns) {
  uint64_t start, now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
  do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  while (int64_t(now - start) < ns);
}
}  // namespace
#endif

void Stream::sleep(double ms) {
  if (off() || ms <= 0) return;
#if FSDP_CUDA
  if (cuda_) {
    spin<<<1, 1, 0, cuda_>>>(int64_t(ms * 1e6));
    CUDA_CHECK_LAUNCH();
    return;
  }
#endif
  enqueue([=] { std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms)); });
}

int Stream::number() const { return this == dev_.compute_.get() ? 0 : this == dev_.gather_.get() ? 1 : 2; }
void Stream::spend(const Cost& cost) {
  if (dev_.timeline) dev_.timeline->operation(number(), cost);
}
void Stream::spend(Collective kind, double bytes, int ranks, int local, Via via) {
  if (dev_.timeline) dev_.timeline->collective(number(), kind, bytes, ranks, local, via);
}
void Stream::holds(const std::string& slot, const std::string& unit, const char* how) {
  if (dev_.timeline) dev_.timeline->holds(number(), slot, unit, how);
}

void Stream::synchronize() {
#if FSDP_CUDA
  if (cuda_) CUDA_CHECK(cudaStreamSynchronize(cuda_));
#endif
  if (worker_) worker_->drain();
  dev_.check();
}
