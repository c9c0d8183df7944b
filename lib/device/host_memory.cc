#include "lib/device/host_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "lib/device/device.h"

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
