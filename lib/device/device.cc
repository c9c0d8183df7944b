#include "lib/device/device.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <mutex>

#if FSDP_CUDA
#include "lib/device/driver.h"
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
  compute_ = std::make_unique<Stream>(*this, Stream::normal);
  gather_ = std::make_unique<Stream>(*this, Stream::high);
  if (comm == CommStreams::two) reduce_ = std::make_unique<Stream>(*this, Stream::high);
}

Device::~Device() {
  // The streams first: their work still uses the arena.
  compute_.reset(), gather_.reset(), reduce_.reset();
}

// --------------------------------------------------------------------------------------------------------- profile

void Device::add_mark() {
  marks_.emplace_back(std::string(marked_) + (recomputing_ ? ", recomputed" : ""), Event(*this, Event::timed));
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
