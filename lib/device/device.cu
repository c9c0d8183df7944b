#include "lib/device/device.h"

#include "lib/program/estimate.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <mutex>
#include <numeric>
#include <thread>

#if FSDP_CUDA
#include <cuda.h>
#endif

// ---------------------------------------------------------------------------------------------------------- errors

namespace {
int rank_for_errors = -1;
}
int this_rank() { return rank_for_errors; }
void set_this_rank(int rank) { rank_for_errors = rank; }

std::string strf(const char* format, ...) {
  va_list args, again;
  va_start(args, format);
  va_copy(again, args);
  int n = std::vsnprintf(nullptr, 0, format, args);
  va_end(args);
  std::string s(size_t(std::max(n, 0)), '\0');
  std::vsnprintf(&s[0], s.size() + 1, format, again);
  va_end(again);
  return s;
}

#if FSDP_CUDA
void throw_cuda(int code, const char* call, const char* file, int line) {
  cudaError_t e = cudaError_t(code);
  const char* remedy = "";
  if (e == cudaErrorMemoryAllocation) remedy = "; lower --batch or --seq, or free the GPU of other programs";
  if (e == cudaErrorNoDevice || e == cudaErrorInsufficientDriver)
    remedy = "; check the driver with nvidia-smi, or run with --device cpu";
  if (e == cudaErrorNoKernelImageForDevice) remedy = "; rebuild on this machine, or with make ARCH=<its architecture>";
  if (e == cudaErrorIllegalAddress || e == cudaErrorLaunchFailure)
    remedy = "; run under compute-sanitizer to find the kernel";
  std::string text =
      strf("CUDA: %s failed at %s:%d on rank %d: %s%s", call, file, line, this_rank(), cudaGetErrorString(e), remedy);
  if (e == cudaErrorMemoryAllocation) throw OutOfMemory(text);
  throw CudaError(text);
}
#endif

// ---------------------------------------------------------------------------------------------------------- device

struct Device::Failure {
  std::mutex mutex;
  std::exception_ptr first;
};

void Device::fail(std::exception_ptr e) {
  std::lock_guard<std::mutex> lock(failure_->mutex);
  if (!failure_->first) failure_->first = e;
}
bool Device::failed() const {
  std::lock_guard<std::mutex> lock(failure_->mutex);
  return failure_->first != nullptr;
}
void Device::check() {
  std::lock_guard<std::mutex> lock(failure_->mutex);
  if (failure_->first) std::rethrow_exception(failure_->first);
}

int gpu_count() {
#if FSDP_CUDA
  int n = 0;
  if (cudaGetDeviceCount(&n) != cudaSuccess) {
    cudaGetLastError();  // no driver is an answer, not an error
    return 0;
  }
  return n;
#else
  return 0;
#endif
}

namespace {
std::string value_in_file(const char* path, const std::string& key) {
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);)
    if (line.compare(0, key.size(), key) == 0) {
      size_t at = line.find(':');
      at = line.find_first_not_of(" \t", at + 1);
      return at == std::string::npos ? "" : line.substr(at);
    }
  return "";
}
}  // namespace

Device::Device(Backend backend, int ordinal, int sharers, bool one_comm_stream)
    : backend(backend), ordinal(ordinal), sharers(sharers), failure_(std::make_shared<Failure>()) {
  if (backend == Backend::cpu) {
    name = value_in_file("/proc/cpuinfo", "model name");
    if (name.empty()) name = "CPU";
    total_bytes = int64_t(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
    std::string available = value_in_file("/proc/meminfo", "MemAvailable");
    free_bytes = available.empty() ? total_bytes : std::atoll(available.c_str()) * 1024;
  } else if (ordinal == plan_only) {
    name = "planned GPU";
  } else {
#if FSDP_CUDA
    CUDA_CHECK(cudaSetDevice(ordinal));
    cudaDeviceProp prop;
    CUDA_CHECK(cudaGetDeviceProperties(&prop, ordinal));
    name = prop.name;
    compute_capability = prop.major * 10 + prop.minor;
    multiprocessors = prop.multiProcessorCount;
    size_t free = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    free_bytes = int64_t(free), total_bytes = int64_t(total);
#else
    throw UsageError("this build has no GPU backend: rebuild with CUDA, or run with --device cpu");
#endif
  }
  compute_ = std::make_unique<Stream>(*this, "compute", false);
  gather_ = std::make_unique<Stream>(*this, "gather", true);
  if (!one_comm_stream) reduce_ = std::make_unique<Stream>(*this, "reduce", true);
}

Device::~Device() {
  // The streams first: their work still uses the arena.
  compute_.reset(), gather_.reset(), reduce_.reset();
}

void* take_host_memory(Device& dev, int64_t bytes, bool* pinned) {
  void* p = nullptr;
  const size_t n = size_t(std::max<int64_t>(bytes, 1));
  *pinned = false;
#if FSDP_CUDA
  if (dev.backend == Backend::gpu && dev.ordinal != Device::plan_only) {
    CUDA_CHECK(cudaMallocHost(&p, n));
    *pinned = true;
  }
#endif
  (void)dev;
  if (!p) p = std::aligned_alloc(64, (n + 63) / 64 * 64);
  if (!p) throw Error(strf("this host has no %.0f MiB left; fewer ranks a host want less", double(n) / (1 << 20)));
  std::memset(p, 0, n);
  return p;
}
void give_host_memory(void* p, bool pinned) {
#if FSDP_CUDA
  if (pinned) {
    if (p) cudaFreeHost(p);
    return;
  }
#endif
  (void)pinned;
  std::free(p);
}

// --------------------------------------------------------------------------------------------------------- streams

namespace {
using Clock = std::chrono::steady_clock;

// One record() of a CPU event: raised when the stream's thread reaches it.
struct Flag {
  std::mutex mutex;
  std::condition_variable raised;
  bool done = false;
  Clock::time_point when;
  void raise() {
    std::lock_guard<std::mutex> lock(mutex);
    when = Clock::now();
    done = true;
    raised.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    raised.wait(lock, [&] { return done; });
  }
};
}  // namespace

struct Event::State {
  Device* dev;
  double clock = 0;  // in an estimate; and the stream that recorded it
  int recorder = 0;
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

Event::Event(Device& dev, bool timing) : s_(std::make_unique<State>()) {
  s_->dev = &dev;
  (void)timing;
#if FSDP_CUDA
  if (dev.backend == Backend::gpu && dev.ordinal != Device::plan_only)
    CUDA_CHECK(cudaEventCreateWithFlags(&s_->cuda, timing ? cudaEventDefault : cudaEventDisableTiming));
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
  std::deque<std::pair<std::function<void()>, bool>> queue;  // work, and whether it runs after a failure too
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
  void push(std::function<void()> work, bool always) {
    std::lock_guard<std::mutex> lock(mutex);
    queue.emplace_back(std::move(work), always);
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
      if (item.second || !dev.failed()) {
        try {
          item.first();
        } catch (...) { dev.fail(std::current_exception()); }
      }
      item.first = nullptr;
      lock.lock();
      busy = false;
      changed.notify_all();
    }
  }
};

Stream::Stream(Device& dev, const char* name, bool high_priority) : dev_(dev) {
  (void)name, (void)high_priority;
  if (dev.backend == Backend::gpu && dev.ordinal == Device::plan_only) return;  // always off
  if (dev.backend == Backend::cpu) {
    worker_ = std::make_unique<Worker>(dev);
    return;
  }
#if FSDP_CUDA
  int least = 0, greatest = 0;
  CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  CUDA_CHECK(cudaStreamCreateWithPriority(&cuda_, cudaStreamNonBlocking, high_priority ? greatest : least));
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
  worker_->push(std::move(work), false);
}

void Stream::host(std::function<void()> work) {
  if (off()) return;
  if (worker_) {
    worker_->push(std::move(work), false);
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
    if (!dev_.estimate) return;
    dev_.estimate->host_call();
    e.s_->recorder = place(), e.s_->clock = dev_.estimate->clock(place());
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
  worker_->push([flag] { flag->raise(); }, true);
}

void Stream::wait(const Event& e) {
  if (off()) {
    if (!dev_.estimate) return;
    dev_.estimate->host_call();
    dev_.estimate->wait(place(), e.s_->recorder, e.s_->clock);
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
  if (auto flag = e.s_->flag) worker_->push([flag] { flag->wait(); }, true);
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

void Stream::zero(void* p, int64_t bytes) {
  if (bytes == 0) return;
  if (off()) return spend({Work::memory, double(bytes)});
#if FSDP_CUDA
  if (cuda_) {
    CUDA_CHECK(cudaMemsetAsync(p, 0, size_t(bytes), cuda_));
    return;
  }
#endif
  enqueue([=] { std::memset(p, 0, size_t(bytes)); });
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

int Stream::place() const { return this == dev_.compute_.get() ? 0 : this == dev_.gather_.get() ? 1 : 2; }
void Stream::spend(const Cost& cost) {
  if (dev_.estimate) dev_.estimate->spend(place(), cost);
}
void Stream::spend(Collective kind, double bytes, int ranks, int local, bool engines) {
  if (dev_.estimate) dev_.estimate->spend(place(), kind, bytes, ranks, local, engines);
}

void Stream::synchronize() {
#if FSDP_CUDA
  if (cuda_) CUDA_CHECK(cudaStreamSynchronize(cuda_));
#endif
  if (worker_) worker_->drain();
  dev_.check();
}

// --------------------------------------------------------------------------------------------------------- profile

void Device::add_mark(const char* name) {
  marks_.emplace_back(name, Event(*this, true));
  compute().record(marks_.back().second);
}

void Device::start_profile() {
  marks_.clear();
  profiling_ = true;
}

std::vector<std::pair<std::string, double>> Device::end_profile() {
  mark("");
  profiling_ = false;
  std::vector<std::pair<std::string, double>> times;
  for (size_t i = 0; i + 1 < marks_.size(); i++) {
    const std::string& name = marks_[i].first;
    auto at = std::find_if(times.begin(), times.end(), [&](const auto& t) { return t.first == name; });
    if (at == times.end()) at = times.insert(times.end(), {name, 0.0});
    at->second += elapsed_ms(marks_[i].second, marks_[i + 1].second);
  }
  marks_.clear();
  return times;
}

// ----------------------------------------------------------------------------------------------------------- graphs

Graph::~Graph() {
#if FSDP_CUDA
  if (exec_) cudaGraphExecDestroy(static_cast<cudaGraphExec_t>(exec_));
#endif
}

#if FSDP_CUDA
namespace {
// The runtime knows neither the kernels of libraries that launch through the driver nor all kinds of nodes.
Graph::Nodes count_nodes(cudaGraph_t graph) {
  auto driver = [](const char* name, auto** function) {
    void* p = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    CUDA_CHECK(cudaGetDriverEntryPointByVersion(name, &p, 12030, cudaEnableDefault, &found));
#else
    CUDA_CHECK(cudaGetDriverEntryPoint(name, &p, cudaEnableDefault, &found));
#endif
    *function = reinterpret_cast<std::remove_reference_t<decltype(*function)>>(p);
    return found == cudaDriverEntryPointSuccess;
  };
  CUresult (*type_of)(CUgraphNode, CUgraphNodeType*) = nullptr;
  CUresult (*params_of)(CUgraphNode, CUDA_KERNEL_NODE_PARAMS*) = nullptr;
  CUresult (*name_of)(const char**, CUfunction) = nullptr;
  CUresult (*name_of_kernel)(const char**, CUkernel) = nullptr;
  Graph::Nodes count;
  if (!driver("cuGraphNodeGetType", &type_of) || !driver("cuGraphKernelNodeGetParams", &params_of) ||
      !driver("cuFuncGetName", &name_of) || !driver("cuKernelGetName", &name_of_kernel))
    return count;
  size_t n = 0;
  CUDA_CHECK(cudaGraphGetNodes(graph, nullptr, &n));
  std::vector<cudaGraphNode_t> nodes(n);
  CUDA_CHECK(cudaGraphGetNodes(graph, nodes.data(), &n));
  for (cudaGraphNode_t node : nodes) {
    CUgraphNodeType type;
    if (type_of(node, &type) != CUDA_SUCCESS) {
      count.others++;
    } else if (type == CU_GRAPH_NODE_TYPE_KERNEL) {
      CUDA_KERNEL_NODE_PARAMS params = {};
      const char* name = "";
      count.kernels++;
      if (params_of(node, &params) != CUDA_SUCCESS) continue;
      if (params.func) name_of(&name, params.func);
      else name_of_kernel(&name, params.kern);
      count.nccl_kernels += std::strstr(name, "nccl") != nullptr;
    } else {
      const bool copies = type == CU_GRAPH_NODE_TYPE_MEMCPY || type == CU_GRAPH_NODE_TYPE_MEMSET;
      (copies ? count.copies : count.others)++;
    }
  }
  return count;
}
}  // namespace
#endif

void Graph::make(const std::function<void()>& work) {
  ASSERT(dev_.backend == Backend::gpu && dev_.mode == Mode::run && !exec_ && !dev_.in_graph);
#if FSDP_CUDA
  std::vector<Stream*> others;
  for (Stream* s : {&dev_.gather(), &dev_.reduce()})
    if (others.empty() || others[0] != s) others.push_back(s);
  Event fork(dev_);
  std::vector<Event> joins;
  for (size_t i = 0; i < others.size(); i++) joins.emplace_back(dev_);
  const cudaStream_t compute = dev_.compute().cuda();
  CUDA_CHECK(cudaStreamBeginCapture(compute, cudaStreamCaptureModeThreadLocal));
  dev_.in_graph = ++dev_.graphs;
  cudaGraph_t graph = nullptr;
  try {
    dev_.compute().record(fork);
    for (Stream* s : others) s->wait(fork);
    work();
    for (size_t i = 0; i < others.size(); i++) others[i]->record(joins[i]), dev_.compute().wait(joins[i]);
  } catch (...) {
    cudaStreamEndCapture(compute, &graph);
    dev_.in_graph = 0;
    throw;
  }
  dev_.in_graph = 0;
  CUDA_CHECK(cudaStreamEndCapture(compute, &graph));
  nodes_ = count_nodes(graph);
  cudaGraphExec_t exec = nullptr;
  CUDA_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  CUDA_CHECK(cudaGraphDestroy(graph));
  exec_ = exec;
  if (!dev_.after_graph) dev_.after_graph = std::make_unique<Event>(dev_);
#else
  (void)work;
#endif
}

void Graph::launch() {
  ASSERT(exec_);
#if FSDP_CUDA
  CUDA_CHECK(cudaGraphLaunch(static_cast<cudaGraphExec_t>(exec_), dev_.compute().cuda()));
  dev_.compute().record(*dev_.after_graph);
#endif
}

// ---------------------------------------------------------------------------------------------------------- memory

const char* name_of(Purpose p) {
  static const char* names[purposes] = {"master",         "moments",     "gradients",   "gather slots",
                                        "gradient slots", "activations", "temporaries", "workspace"};
  return names[int(p)];
}

namespace {
constexpr int64_t kept_align = 4096, align = 256, arena_align = 2 << 20;
int64_t round_up(int64_t n, int64_t a) { return (n + a - 1) / a * a; }

// Places buffers one after another, each into the lowest gap between those that live at one time with it.
int64_t pack_in_order(const std::vector<Life>& lives, const std::vector<int>& order, int64_t align,
                      std::vector<int64_t>* offsets) {
  struct Taken {
    int64_t from, to, born, dead;
  };
  std::vector<Taken> all;  // by offset
  offsets->assign(lives.size(), 0);
  int64_t total = 0;
  for (int i : order) {
    const Life& l = lives[size_t(i)];
    const int64_t bytes = round_up(l.bytes, align);
    int64_t at = 0;
    for (const Taken& t : all) {
      if (t.from - at >= bytes) break;
      if (t.born < l.dead && l.born < t.dead) at = std::max(at, t.to);
    }
    (*offsets)[size_t(i)] = at;
    total = std::max(total, at + bytes);
    const auto place =
        std::upper_bound(all.begin(), all.end(), at, [](int64_t x, const Taken& t) { return x < t.from; });
    all.insert(place, {at, at + bytes, l.born, l.dead});
  }
  return total;
}
}  // namespace

int64_t most_live(const std::vector<Life>& lives, int64_t align) {
  std::vector<std::pair<int64_t, int64_t>> changes;
  for (const Life& l : lives) {
    if (l.dead <= l.born) continue;
    changes.emplace_back(l.born, round_up(l.bytes, align));
    changes.emplace_back(l.dead, -round_up(l.bytes, align));
  }
  std::sort(changes.begin(), changes.end());  // at one time, deaths (negative) come before births
  int64_t live = 0, most = 0;
  for (const auto& c : changes) most = std::max(most, live += c.second);
  return most;
}

int64_t pack(const std::vector<Life>& lives, int64_t align, std::vector<int64_t>* offsets) {
  // Offline storage allocation is NP-hard. Placing the largest first is within a few per cent here, and where it is
  // not, one of the other orders usually is. What is left over goes when the buffer that lies highest is placed first,
  // and then the one that lies highest now, and so on. Stop as soon as the lower bound is met.
  std::vector<int> order(lives.size()), best_order;
  auto span = [&](int i) { return lives[size_t(i)].dead - lives[size_t(i)].born; };
  auto size = [&](int i) { return lives[size_t(i)].bytes; };
  auto born = [&](int i) { return lives[size_t(i)].born; };
  const std::function<bool(int, int)> rules[] = {
      [&](int a, int b) { return size(a) > size(b); },
      [&](int a, int b) { return span(a) > span(b); },
      [&](int a, int b) { return double(size(a)) * double(span(a)) > double(size(b)) * double(span(b)); },
      [&](int a, int b) { return born(a) < born(b); },
  };
  std::vector<int64_t> at;
  int64_t best = -1, bound = most_live(lives, align);
  for (const auto& rule : rules) {
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), rule);
    const int64_t total = pack_in_order(lives, order, align, &at);
    if (best < 0 || total < best) best = total, *offsets = at, best_order = order;
    if (best == bound) break;
  }
  order = best_order, at = *offsets;
  const int64_t n = int64_t(lives.size()), tries = n == 0 ? 0 : std::min<int64_t>(200, 400000000 / (n * n));
  for (int64_t i = 0; i < tries && best > bound; i++) {
    auto end = [&](int i) { return span(i) > 0 ? at[size_t(i)] + size(i) : -1; };
    const auto top = std::max_element(order.begin(), order.end(), [&](int a, int b) { return end(a) < end(b); });
    std::rotate(order.begin(), top, top + 1);
    const int64_t total = pack_in_order(lives, order, align, &at);
    if (total < best) best = total, *offsets = at;
  }
  return std::max<int64_t>(best, 0);
}

void* Memory::keep_bytes(int64_t bytes, const std::string& name, Purpose p) {
  ASSERT(current_ < 0 && bytes >= 0);
  if (!committed()) {
    int64_t at = kept_.empty() ? 0 : kept_.back().offset + round_up(kept_.back().bytes, kept_align);
    kept_.push_back({name, p, bytes, 0, 0, at, ""});
    arena_ = -1;
    return reinterpret_cast<char*>(int64_t(1) << 44) + at;
  }
  if (next_kept_ >= kept_.size() || kept_[next_kept_].name != name || kept_[next_kept_].bytes != bytes)
    throw Error(strf("internal error: '%s' (%lld bytes) is not what the memory plan holds at place %zu", name.c_str(),
                     (long long)bytes, next_kept_));
  return base_ + kept_[next_kept_++].offset;
}

void Memory::rewind() { next_kept_ = 0; }

void Memory::begin(const std::string& program) {
  ASSERT(current_ < 0);
  for (size_t i = 0; i < programs_.size(); i++)
    if (programs_[i].name == program) current_ = int(i);
  if (current_ < 0) {
    if (committed()) throw Error("internal error: program '" + program + "' was never planned");
    current_ = int(programs_.size());
    programs_.emplace_back();
    programs_.back().name = program;
  }
  phase_ = program;
  cursor_ = 0;
}

void Memory::end() {
  ASSERT(current_ >= 0 && live_.empty());
  Program& p = programs_[size_t(current_)];
  if (p.recorded && cursor_ != p.order.size())
    throw Error("internal error: program '" + p.name + "' ended before its memory plan");
  if (!p.recorded) arena_ = -1;
  p.recorded = true;
  current_ = -1;
}

void Memory::phase(const std::string& name) { phase_ = name; }

void* Memory::take_bytes(int64_t bytes, const char* name, Purpose purpose) {
  ASSERT(current_ >= 0 && bytes >= 0);
  Program& p = programs_[size_t(current_)];
  auto add = [&](char* at, int index) {
    live_.emplace_back(at, index);
    return at;
  };
  // Distinct addresses that no one may follow: 16 TiB up, apart from the kept ones.
  auto fake = [](int index) { return reinterpret_cast<char*>(int64_t(1) << 45) + (int64_t(index) << 36); };
  if (!p.recorded) {
    const int index = int(p.bufs.size());
    p.bufs.push_back({name, purpose, bytes, p.clock++, -1, 0, phase_});
    p.order.push_back(index);
    return add(fake(index), index);
  }
  const int index = cursor_ < p.order.size() ? p.order[cursor_] : -1;
  if (index < 0 || p.bufs[size_t(index)].bytes != bytes || p.bufs[size_t(index)].name != name)
    throw Error(strf("internal error: in '%s', phase '%s': taking '%s' (%lld bytes) departs from the memory plan",
                     p.name.c_str(), phase_.c_str(), name, (long long)bytes));
  cursor_++;
  return add(committed() ? base_ + kept_bytes_ + p.bufs[size_t(index)].offset : fake(index), index);
}

void Memory::give(void* ptr) {
  if (current_ < 0) return;  // unwinding after an error
  Program& p = programs_[size_t(current_)];
  for (size_t i = live_.size(); i-- > 0;) {
    if (live_[i].first != ptr) continue;
    int index = live_[i].second;
    live_.erase(live_.begin() + std::ptrdiff_t(i));
    if (!p.recorded) {
      p.bufs[size_t(index)].dead = p.clock++;
      p.order.push_back(~index);
    } else if (cursor_ < p.order.size() && p.order[cursor_] == ~index) {
      cursor_++;
    } else if (!std::uncaught_exceptions()) {
      std::fprintf(stderr, "internal error: giving '%s' back departs from the memory plan\n",
                   p.bufs[size_t(index)].name.c_str());
      std::abort();  // called from destructors: nothing can be thrown here
    }
    return;
  }
}

void Memory::pack_all() const {
  kept_bytes_ = kept_.empty() ? 0 : kept_.back().offset + round_up(kept_.back().bytes, kept_align);
  int64_t most = 0;
  for (Program& p : programs_) {
    std::vector<Life> lives;
    // A buffer of no bytes gets an address of its own too, since give() tells buffers by their addresses.
    for (const Buf& b : p.bufs) lives.push_back({std::max<int64_t>(b.bytes, 1), b.born, b.dead});
    std::vector<int64_t> offsets;
    most = std::max(most, pack(lives, align, &offsets));
    for (size_t i = 0; i < offsets.size(); i++) p.bufs[i].offset = offsets[i];
  }
  arena_ = round_up(std::max<int64_t>(kept_bytes_ + most, 1), arena_align);
}

int64_t Memory::arena_bytes() const {
  if (arena_ < 0) pack_all();
  return arena_;
}

MemoryReport Memory::report() const {
  MemoryReport r = {};
  r.arena = arena_bytes();
  for (const Buf& b : kept_) {
    int64_t bytes = round_up(b.bytes, kept_align);
    if (b.purpose == Purpose::master) r.init[int(b.purpose)] += bytes, r.init_total += bytes;
    r.before_step[int(b.purpose)] += bytes, r.before_step_total += bytes;
  }
  int64_t most = -1, most_weights = 0;
  for (const Program& p : programs_) {
    // The moment right after a birth is the only kind at which a maximum can fall.
    for (const Buf& at : p.bufs) {
      int64_t live = 0, weights = 0;
      for (const Buf& b : p.bufs)
        if (b.born <= at.born && at.born < b.dead) {
          live += round_up(b.bytes, align);
          if (b.purpose == Purpose::master) weights += round_up(b.bytes, align);
        }
      most_weights = std::max(most_weights, weights);
      if (live <= most) continue;
      most = live;
      std::copy(r.before_step, r.before_step + purposes, r.peak);
      int64_t largest = 0;
      for (const Buf& b : p.bufs)
        if (b.born <= at.born && at.born < b.dead) {
          r.peak[int(b.purpose)] += round_up(b.bytes, align);
          if (b.bytes > largest) largest = b.bytes, r.largest = b.name;
        }
      r.peak_phase = at.phase;
    }
  }
  if (most < 0) std::copy(r.before_step, r.before_step + purposes, r.peak);
  r.init[int(Purpose::master)] += most_weights, r.init_total += most_weights;
  r.live_peak = r.before_step_total + std::max<int64_t>(most, 0);
  return r;
}

void Memory::commit() {
  ASSERT(!committed() && current_ < 0);
  int64_t want = arena_bytes();
  ASSERT(dev_.backend == Backend::cpu || dev_.ordinal != Device::plan_only);
  // All sharers' arenas against what was free at the start: by now some may have taken theirs.
  int64_t free = dev_.free_bytes;
  bool fits = want * dev_.sharers <= free;
#if FSDP_CUDA
  if (dev_.backend == Backend::gpu) {
    size_t f = 0, t = 0;
    CUDA_CHECK(cudaMemGetInfo(&f, &t));
    if (want > int64_t(f)) fits = false, free = int64_t(f);
  }
#endif
  if (!fits) {
    MemoryReport r = report();
    std::string shared = dev_.sharers > 1 ? strf(", for each of %d ranks that share it", dev_.sharers) : "";
    throw OutOfMemory(
        strf("no room in memory: the plan asks for %.0f MiB (peak in %s; largest there: %s)%s, and %s has "
             "%.0f MiB free of %.0f; nothing was allocated; lower --batch or --seq, or use more ranks",
             double(want) / 1048576.0, r.peak_phase.c_str(), r.largest.c_str(), shared.c_str(), dev_.name.c_str(),
             double(free) / 1048576.0, double(dev_.total_bytes) / 1048576.0));
  }
  if (dev_.backend == Backend::cpu) {
    void* p = mmap(nullptr, size_t(want), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
      throw OutOfMemory(
          strf("no room in memory: the system refused the arena of %.0f MiB on rank %d: %s; lower --batch "
               "or --seq",
               double(want) / 1048576.0, this_rank(), std::strerror(errno)));
    base_ = static_cast<char*>(p);
    device_reported_ = want;
  } else {
#if FSDP_CUDA
    size_t before = 0, after = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&before, &total));
    if (allocate) base_ = static_cast<char*>(allocate(want));
    else CUDA_CHECK(cudaMalloc(&base_, size_t(want)));
    CUDA_CHECK(cudaMemGetInfo(&after, &total));
    device_reported_ = int64_t(before) - int64_t(after);
#endif
  }
  next_kept_ = 0;
}

void Memory::poison() {
  ASSERT(committed());
  int64_t bytes = arena_ - kept_bytes_;
#if FSDP_CUDA
  if (dev_.backend == Backend::gpu) {
    CUDA_CHECK(cudaMemset(base_ + kept_bytes_, 0xff, size_t(bytes)));
    CUDA_CHECK(cudaDeviceSynchronize());  // the streams do not wait for the default stream
    return;
  }
#endif
  std::memset(base_ + kept_bytes_, 0xff, size_t(bytes));
}

Memory::~Memory() {
  if (!base_) return;
#if FSDP_CUDA
  if (dev_.backend == Backend::gpu) {
    if (free) free(base_);
    else cudaFree(base_);
    return;
  }
#endif
  munmap(base_, size_t(arena_));
}
