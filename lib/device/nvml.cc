#include "lib/device/nvml.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "lib/device/error.h"
#include "lib/device/library.h"

const Nvml* load_nvml() {
  static const Nvml* const loaded = []() -> const Nvml* {
    static Nvml n;
    Library nvml("libnvidia-ml.so.1");
    nvml.find("nvmlInit_v2", &n.init), nvml.find("nvmlShutdown", &n.shutdown);
    nvml.find("nvmlDeviceGetCount_v2", &n.count), nvml.find("nvmlDeviceGetHandleByIndex_v2", &n.by_index);
    nvml.find("nvmlDeviceGetHandleByUUID", &n.by_uuid), nvml.find("nvmlDeviceGetUUID", &n.uuid_of);
    nvml.find("nvmlDeviceGetUtilizationRates", &n.utilization), nvml.find("nvmlDeviceGetClockInfo", &n.clock);
    nvml.find("nvmlDeviceGetPowerUsage", &n.power);
    const bool enough = nvml.why().empty();
    nvml.find("nvmlDeviceGetComputeRunningProcesses_v3", &n.processes);
    return enough ? &n : nullptr;
  }();
  return loaded;
}

std::vector<std::string> visible_gpus(const char* cuda_visible_devices, int most) {
  std::vector<std::string> gpus;
  if (!cuda_visible_devices) {
    for (int i = 0; i < most; i++) gpus.push_back(std::to_string(i));
    return gpus;
  }
  const std::string list = cuda_visible_devices;
  for (size_t at = 0; at < list.size() && int(gpus.size()) < most;) {
    const size_t end = std::min(list.find(',', at), list.size());
    std::string gpu = list.substr(at, end - at);
    gpu.erase(std::remove(gpu.begin(), gpu.end(), ' '), gpu.end());
    // CUDA stops at the first that is none.
    const bool index = !gpu.empty() && gpu.find_first_not_of("0123456789") == std::string::npos;
    if (!index && gpu.rfind("GPU-", 0) != 0 && gpu.rfind("MIG-", 0) != 0) break;
    gpus.push_back(gpu);
    at = end + 1;
  }
  return gpus;
}

std::string nvml_uuid(const std::string& digits) {
  std::string uuid = "GPU";
  size_t at = 0;
  for (size_t n : {8, 4, 4, 4, 12}) uuid += "-" + digits.substr(std::min(at, digits.size()), n), at += n;
  return uuid;
}

namespace {

// Null: no such GPU.
Nvml::Gpu find_gpu(const Nvml& nvml, const std::string& name) {
  Nvml::Gpu gpu = nullptr;
  if (name.rfind("GPU-", 0) != 0 && name.rfind("MIG-", 0) != 0)
    return nvml.by_index(unsigned(std::atoi(name.c_str())), &gpu) == 0 ? gpu : nullptr;
  if (nvml.by_uuid(name.c_str(), &gpu) == 0) return gpu;
  unsigned n = 0;
  if (nvml.count(&n) != 0) return nullptr;
  for (unsigned i = 0; i < n; i++) {
    char uuid[96] = "";
    if (nvml.by_index(i, &gpu) == 0 && nvml.uuid_of(gpu, uuid, sizeof uuid) == 0 &&
        std::strncmp(uuid, name.c_str(), name.size()) == 0)
      return gpu;
  }
  return nullptr;
}

// Without those that are not known; NaN of none.
std::vector<double> known(std::vector<double> x) {
  x.erase(std::remove_if(x.begin(), x.end(), [](double v) { return std::isnan(v); }), x.end());
  return x;
}
double median(std::vector<double> x) {
  x = known(std::move(x));
  if (x.empty()) return std::nan("");
  std::sort(x.begin(), x.end());
  return (x[(x.size() - 1) / 2] + x[x.size() / 2]) / 2;
}
double mean(std::vector<double> x) {
  x = known(std::move(x));
  double sum = 0;
  for (double v : x) sum += v;
  return x.empty() ? std::nan("") : sum / double(x.size());
}

}  // namespace

std::vector<std::string> memory_users(const Nvml* nvml, const std::string& gpu) {
  if (!nvml || !nvml->processes || nvml->init() != 0) return {};
  std::vector<Nvml::Process> found(64);
  unsigned n = unsigned(found.size());
  const Nvml::Gpu handle = find_gpu(*nvml, gpu);
  if (!handle || nvml->processes(handle, &n, found.data()) != 0) n = 0;
  nvml->shutdown();
  found.resize(n);
  std::sort(found.begin(), found.end(), [](const Nvml::Process& a, const Nvml::Process& b) { return a.used > b.used; });
  std::vector<std::string> users;
  for (const Nvml::Process& p : found) {
    if (pid_t(p.pid) == getpid() || p.used == ~0ull) continue;
    std::string name;
    std::getline(std::ifstream("/proc/" + std::to_string(p.pid) + "/comm"), name);
    users.push_back(strf("%s (pid %u) %llu MiB", name.empty() ? "a process" : name.c_str(), p.pid, p.used >> 20));
  }
  return users;
}

std::vector<std::string> uuids_of(const Nvml* nvml, const std::vector<std::string>& gpus) {
  std::vector<std::string> uuids;
  if (!nvml || nvml->init() != 0) return uuids;
  for (const std::string& name : gpus) {
    char uuid[96] = "";
    const Nvml::Gpu gpu = find_gpu(*nvml, name);
    if (gpu && nvml->uuid_of(gpu, uuid, sizeof uuid) == 0) uuids.push_back(uuid);
  }
  nvml->shutdown();
  return uuids;
}

double unix_seconds() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

GpuSampler::GpuSampler(const Nvml* nvml, const std::vector<std::string>& gpus) : nvml_(nvml) {
  if (!nvml_ || nvml_->init() != 0) {
    nvml_ = nullptr;
    return;
  }
  for (const std::string& name : gpus)
    if (Nvml::Gpu gpu = find_gpu(*nvml_, name)) gpus_.push_back(gpu);
  if (gpus_.empty()) return;
  thread_ = std::thread([this] {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stop_) {
      lock.unlock();
      look();
      lock.lock();
      changed_.wait_for(lock, std::chrono::milliseconds(200), [this] { return stop_; });
    }
  });
}

GpuSampler::~GpuSampler() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
  if (nvml_) nvml_->shutdown();
}

void GpuSampler::look() {
  for (Nvml::Gpu gpu : gpus_) {
    const double none = std::nan("");
    Nvml::Utilization rates = {};
    unsigned mhz = 0, milliwatts = 0;
    Sample s;
    s.utilization = nvml_->utilization(gpu, &rates) == 0 ? rates.gpu / 100.0 : none;
    s.clock_mhz = nvml_->clock(gpu, Nvml::sm_clock, &mhz) == 0 ? mhz : none;
    s.power_w = nvml_->power(gpu, &milliwatts) == 0 ? milliwatts / 1e3 : none;
    s.at = unix_seconds();
    std::lock_guard<std::mutex> lock(mutex_);
    samples_.push_back(s);
  }
}

std::optional<GpuSummary> GpuSampler::summary(double from, double to) const {
  std::vector<double> utilization, clock, power;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Sample& s : samples_) {
      if (s.at < from || s.at > to) continue;
      utilization.push_back(s.utilization), clock.push_back(s.clock_mhz), power.push_back(s.power_w);
    }
  }
  if (utilization.empty()) return std::nullopt;
  return GpuSummary{mean(utilization), median(clock), median(power), int(gpus_.size()), int(clock.size())};
}
