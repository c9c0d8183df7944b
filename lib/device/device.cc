#include "lib/device/device.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <mutex>

#include "lib/device/activity.h"

#if FSDP_CUDA
#include "lib/device/driver.h"
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define FSDP_NVTX 1
#endif
#endif

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

GpuName name_gpu(int ordinal) {
  GpuName name;
#if FSDP_CUDA
  char card[32] = "";
  CUDA_CHECK(cudaDeviceGetPCIBusId(card, sizeof card, ordinal));
  name.card = card;
  CUuuid uuid = {};
  CUdevice device = 0;
  CUresult (*device_of)(CUdevice*, int) = nullptr;
  CUresult (*uuid_of)(CUuuid*, CUdevice) = nullptr;
  // As of CUDA 11.4 it tells the parts of one GPU apart.
  if (!driver_function("cuDeviceGet", 11040, &device_of) || !driver_function("cuDeviceGetUuid", 11040, &uuid_of) ||
      device_of(&device, ordinal) != CUDA_SUCCESS || uuid_of(&uuid, device) != CUDA_SUCCESS)
    throw CudaError(strf("CUDA: the driver does not tell the UUID of GPU %d on rank %d; it may be older than CUDA 11.4",
                         ordinal, this_rank()));
  for (char c : uuid.bytes) name.uuid += strf("%02x", unsigned(static_cast<unsigned char>(c)));
#endif
  (void)ordinal;
  return name;
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

std::string cpu_name() {
  const std::string name = value_in_file("/proc/cpuinfo", "model name");
  return name.empty() ? "CPU" : name;
}

Device::Device(Backend backend, int ordinal, int sharers, CommStreams comm)
    : backend(backend), ordinal(ordinal), sharers(sharers), failure_(std::make_shared<Failure>()) {
  if (backend == Backend::cpu) {
    name = cpu_name();
    total_bytes = int64_t(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGE_SIZE);
    free_bytes = free_bytes_now();
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
  compute_ = std::make_unique<Stream>(*this, Stream::normal);
  gather_ = std::make_unique<Stream>(*this, Stream::high);
  if (comm == CommStreams::two) reduce_ = std::make_unique<Stream>(*this, Stream::high);
  if (backend == Backend::cpu || ordinal == plan_only) return;
  branch_ = std::make_unique<Stream>(*this, Stream::normal);
  branches_ = std::make_unique<Event>(*this), joins_ = std::make_unique<Event>(*this);
}

int64_t Device::free_bytes_now() const {
  if (backend == Backend::cpu) {
    const std::string available = value_in_file("/proc/meminfo", "MemAvailable");
    return available.empty() ? total_bytes : std::atoll(available.c_str()) * 1024;
  }
#if FSDP_CUDA
  if (ordinal != plan_only) {
    size_t free = 0, total = 0;
    CUDA_CHECK(cudaMemGetInfo(&free, &total));
    return int64_t(free);
  }
#endif
  return 0;
}

Device::~Device() {
  // The streams first: their work still uses the arena.
  compute_.reset(), gather_.reset(), reduce_.reset(), branch_.reset();
}

// --------------------------------------------------------------------------------------------------------- profile

namespace {
// NVTX's ranges of this thread, one in another. Without a profiler a call costs a test of a pointer.
void begin_range(const char* name) {
#ifdef FSDP_NVTX
  nvtxRangePushA(name);
#else
  (void)name;
#endif
}
void end_range() {
#ifdef FSDP_NVTX
  nvtxRangePop();
#endif
}
}  // namespace

const char* const waiting = "waiting for communication";

void Device::mark(const char* name) {
  marked_ = name;
  if (timeline) timeline->mark = marked();
  if (mode != Mode::run) return;
  if (backend == Backend::gpu) {
    if (range_open_) end_range();
    range_open_ = *name != 0;
    if (range_open_) begin_range(recomputing_ ? marked().c_str() : name);
  }
  if (!profiles()) return;
  marks_.push_back({marked(), Event(*this, Event::timed), activity::now()});
  compute().record(marks_.back().event);
}

void Device::start_profile() {
  marks_.clear(), works_.clear();
  profiling_ = true;
}

Device::Profile Device::take_profile() {
  mark("");
  profiling_ = false;
  Profile p;
  if (!marks_.empty()) p.began_ns = marks_.front().host_ns, p.ended_ns = marks_.back().host_ns;
  auto on_host = [&](uint64_t ns) { return 1e-9 * double(int64_t(ns - p.began_ns)); };
  auto on_device = [&](Event& e) { return 1e-3 * double(elapsed_ms(marks_.front().event, e)); };
  for (size_t i = 0; i + 1 < marks_.size(); i++) {
    Mark &from = marks_[i], &to = marks_[i + 1];
    if (from.name.empty()) continue;
    Span s;
    s.name = from.name, s.kind = from.name == waiting ? Span::wait : Span::operation;
    s.from = on_host(from.host_ns), s.to = on_host(to.host_ns);
    p.host.push_back(s);
    s.from = on_device(from.event), s.to = on_device(to.event);
    p.device.push_back(s);
  }
  for (Work& w : works_) {
    Span s = w.span;
    s.from = on_host(w.from_ns), s.to = on_host(w.to_ns);
    p.host.push_back(s);
    s.from = on_device(w.from), s.to = on_device(w.to);
    p.device.push_back(s);
  }
  marks_.clear(), works_.clear();
  return p;
}

std::vector<std::pair<std::string, double>> sums(const std::vector<Span>& spans) {
  std::vector<std::pair<std::string, double>> times;
  for (const Span& s : spans) {
    if (s.lane != Span::compute) continue;
    auto at = std::find_if(times.begin(), times.end(), [&](const auto& t) { return t.first == s.name; });
    if (at == times.end()) at = times.insert(times.end(), {s.name, 0.0});
    at->second += 1e3 * (s.to - s.from);
  }
  return times;
}

std::vector<std::pair<std::string, double>> Device::end_profile() { return sums(take_profile().device); }

Branch::Branch(Device& dev, bool worth)
    : dev_(dev),
      stream_(worth && dev.branch_ && dev.mode == Mode::run && !dev.profiles() ? *dev.branch_ : dev.compute()) {
  if (&stream_ == &dev.compute()) return;
  dev.compute().record(*dev.branches_);
  stream_.wait(*dev.branches_);
}
void Branch::join() {
  if (&stream_ == &dev_.compute()) return;
  stream_.record(*dev_.joins_);
  dev_.compute().wait(*dev_.joins_);
}

NamedWork::NamedWork(Device& dev, Stream& stream, Span::Lane lane, const char* what, const std::string& unit,
                     int64_t bytes)
    : dev_(dev), stream_(stream) {
  if (dev.timeline) dev.timeline->unit = unit;
  if (dev.mode != Mode::run) return;
  range_ = dev.backend == Backend::gpu;
  if (range_) begin_range((std::string(what) + " " + unit).c_str());
  profiled_ = dev.profiles();
  if (!profiled_) return;
  dev.works_.push_back({{}, Event(dev, Event::timed), Event(dev, Event::timed), activity::now(), 0});
  Span& s = dev.works_.back().span;
  s.lane = lane, s.kind = Span::collective, s.name = what, s.unit = unit, s.bytes = bytes;
  stream.record(dev.works_.back().from);
}

NamedWork::~NamedWork() {
  if (dev_.timeline) dev_.timeline->unit.clear();
  if (profiled_) {
    Device::Work& w = dev_.works_.back();
    w.to_ns = activity::now();
    stream_.record(w.to);
  }
  if (range_) end_range();
}
