#include "lib/program/audits.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>

#include "lib/program/format.h"
#include "lib/program/json.h"
#include "lib/program/report.h"
#include "lib/program/telemetry.h"

using nlohmann::json;
using ll = long long;

namespace {

bool matters(const std::string& variable) {
  for (const char* start : {"FSDP_", "NCCL_"})
    if (variable.rfind(start, 0) == 0) return true;
  static const char* const names[] = {
      "CI",
      "CUBLAS_WORKSPACE_CONFIG",
      "CUDA_DEVICE_MAX_CONNECTIONS",
      "CUDA_DEVICE_ORDER",
      "CUDA_LAUNCH_BLOCKING",
      "CUDA_MODULE_LOADING",
      "CUDA_VISIBLE_DEVICES",
      "LOCAL_RANK",
      "NVIDIA_TF32_OVERRIDE",
      "OMPI_COMM_WORLD_LOCAL_SIZE",
      "OMPI_COMM_WORLD_SIZE",
      "OMP_NUM_THREADS",
      "OPENBLAS_NUM_THREADS",
      "PMI_SIZE",
      "RANK",
      "SLURM_JOB_ID",
      "SLURM_JOB_NODELIST",
      "SLURM_NTASKS",
      "UCX_NET_DEVICES",
      "UCX_TLS",
      "WORLD_SIZE",
  };
  return std::find(std::begin(names), std::end(names), variable) != std::end(names);
}

int64_t resident_bytes() {  // of this process in the host's memory
  int64_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * sysconf(_SC_PAGE_SIZE);
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t n : shape) text += (text.empty() ? "" : ", ") + std::to_string(n);
  return "[" + text + "]";
}

}  // namespace

json environment_json(const json& header, const Device& dev) {
  json variables = json::object();
  for (char** entry = environ; *entry; entry++) {
    const std::string text = *entry;
    const size_t equals = text.find('=');
    if (equals != std::string::npos && matters(text.substr(0, equals)))
      variables[text.substr(0, equals)] = text.substr(equals + 1);
  }
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  const bool gpu = dev.backend == Backend::gpu;
  json j = {{"time", now_iso8601()}, {"distributed_backend", "FSDP"},
            {"cuda_available", gpu}, {"cuda_device_count", gpu_count()},
            {"host", host},          {"env", variables}};
  if (gpu) j["gpu_name"] = dev.name, j["cuda_capability"] = {dev.compute_capability / 10, dev.compute_capability % 10};
  for (const char* key : {"command", "commit", "versions", "hardware"}) j[key] = header.at(key);
  return j;
}

std::string dtypes_text(const Run& r, int shards) {
  const Dtype master = Dtype::f32;
  std::string parameters;
  int64_t elements = 0;
  std::vector<Unit> units = parameter_table(r.model);
  for (const Unit& u : units)
    for (const Param& p : u.params) {
      parameters += strf("PARAM %s %s %s\n", p.name.c_str(), name_of(master), shape_text(p.shape).c_str());
      elements += p.numel;
    }
  std::string uses;
  auto use = [&](const char* what, Dtype type) { uses += strf("USE %s %s\n", what, name_of(type)); };
  use("gathered_parameters", r.fsdp.gather_wide ? Dtype::f32 : r.dtype);
  lay_out(&units, shards);
  for (const Unit& u : units)
    if (u.in_fp8 > 0) use(("gathered_matrices_of_" + u.name).c_str(), Dtype::e4m3);
  use("activations", r.dtype);
  if (r.model.fp8) use("block_matmuls", Dtype::e4m3), use("block_matmul_gradients", Dtype::e5m2);
  if (r.model.save_fp8) use("saved_hidden_layers", Dtype::e4m3);
  with_types(r, [&](auto, auto g) { use("unsharded_gradients", dtype_of<decltype(g)>); });
  use("reduction", r.reduce_dtype);
  // A step's only sum is as wide as what was sent; but a tied embedding has two.
  const bool once = (r.grad_accum == 1 || r.fsdp.reduce_last) && !r.fsdp.update_in_backward;
  use("gradient_shards", once ? r.reduce_dtype : Dtype::f32);
  use("moments", r.fsdp.moment_dtype);
  return strf("# DTYPE SUMMARY (elements) - FSDP\n%s: %lld (100.00%%)\n\n", name_of(master), ll(elements)) +
         parameters + uses;
}

json memory_json(const MemoryReport& m, const Device& dev) {
  json before = json::object(), peak = json::object();
  for (int p = 0; p < purposes; p++)
    before[name_of(Purpose(p))] = m.before_step[p], peak[name_of(Purpose(p))] = m.peak[p];
  return {{"before_step_bytes", before},
          {"before_step_total_bytes", m.before_step_total},
          {"peak_bytes", peak},
          {"peak_total_bytes", m.live_peak},
          {"peak_phase", m.peak_phase},
          {"peak_largest", m.largest},
          {"arena_bytes", m.arena},
          {"arena_device_bytes", dev.mem.device_reported_bytes()},
          {"device_total_bytes", dev.total_bytes},
          {"device_free_bytes", dev.free_bytes_now()},
          {"host_resident_bytes", resident_bytes()}};
}

std::string memory_text(const MemoryReport& m, const Device& dev, int world_size) {
  return memory_table(m, world_size) +
         strf("%s: %.1f MiB free of %.1f, this process has %.1f MiB of the host's memory\n", dev.name.c_str(),
              mib(dev.free_bytes_now()), mib(dev.total_bytes), mib(resident_bytes()));
}
