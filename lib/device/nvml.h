// How busy and how fast GPUs are, by NVML, the library of nvidia-smi. It makes no CUDA context and takes no GPU memory,
// so that a program that only watches does not change what it measures.
//
//   GpuSampler sampler(load_nvml(), visible_gpus(std::getenv("CUDA_VISIBLE_DEVICES"), 2));
//   run();
//   if (const auto gpu = sampler.summary(from, to)) note(gpu->clock_mhz);
//
// The library is opened when somebody asks; where there is none, or it refuses, there is no summary, and no error. A
// driver's utilization is the part of a period of up to one second in which any kernel ran: a mean over less than a few
// seconds also tells of what was before.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

// The functions of the library that are called here, as nvml.h declares them; 0 is success. Tests bring their own.
struct Nvml {
  using Gpu = void*;
  struct Utilization {
    unsigned gpu, memory;  // per cent
  };
  struct Process {  // nvmlProcessInfo_t
    unsigned pid;
    unsigned long long used;  // bytes; all ones: not known
    unsigned instance, compute_instance;
  };
  enum Clock { sm_clock = 1 };
  int (*init)();
  int (*shutdown)();
  int (*count)(unsigned* gpus);
  int (*by_index)(unsigned index, Gpu* gpu);
  int (*by_uuid)(const char* uuid, Gpu* gpu);
  int (*uuid_of)(Gpu gpu, char* uuid, unsigned bytes);
  int (*utilization)(Gpu gpu, Utilization* rates);
  int (*clock)(Gpu gpu, Clock which, unsigned* mhz);
  int (*power)(Gpu gpu, unsigned* milliwatts);
  int (*processes)(Gpu gpu, unsigned* count, Process* processes);  // null: an old driver
};
// Null where there is none. Of the process, and never closed.
const Nvml* load_nvml();

// The first `most` of the GPUs that a program with this CUDA_VISIBLE_DEVICES (null: not set) has, in its order: UUIDs,
// of which the beginning is enough, or indices. Without it all that there are, by index: then fewer than `most` may
// exist. Indices are NVML's, by PCI address; CUDA's are the same where all GPUs of a machine are of one kind, and with
// CUDA_DEVICE_ORDER=PCI_BUS_ID.
std::vector<std::string> visible_gpus(const char* cuda_visible_devices, int most);
// "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6" of 32 hexadecimal digits, as Device's name_gpu has them.
std::string nvml_uuid(const std::string& digits);

// Which other processes hold memory of a GPU, the largest first: "python3 (pid 4711) 61440 MiB". Of those outside this
// container a driver tells nothing, or no name. None where there is no NVML or no such GPU.
std::vector<std::string> memory_users(const Nvml* nvml, const std::string& gpu);

// The UUIDs of those GPUs that there are: two chips of one name are told apart by them.
std::vector<std::string> uuids_of(const Nvml* nvml, const std::vector<std::string>& gpus);

struct GpuSummary {           // NaN: the driver does not tell, as of parts of a GPU (MIG)
  double utilization;         // 0..1, mean
  double clock_mhz, power_w;  // medians
  int gpus, samples;
};

// Looks at the GPUs every 200 ms: a look holds the driver, which launches wait for, on a thread of its own, for as long
// as it lives.
class GpuSampler {
 public:
  GpuSampler(const Nvml* nvml, const std::vector<std::string>& gpus);
  ~GpuSampler();
  GpuSampler(const GpuSampler&) = delete;
  // What was seen from one moment to another, in seconds since 1970, over all GPUs; nothing where nothing was.
  std::optional<GpuSummary> summary(double from, double to) const;

 private:
  struct Sample {
    double at, utilization, clock_mhz, power_w;
  };
  void look();
  const Nvml* nvml_;
  std::vector<Nvml::Gpu> gpus_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::vector<Sample> samples_;
  std::thread thread_;
};

double unix_seconds();  // now
