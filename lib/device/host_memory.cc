#include "lib/device/host_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "lib/device/device.h"

// Not what CUDA_CHECK says of it: it is the host whose memory is short.
[[noreturn]] static void no_room(size_t bytes) {
  throw Error(strf("not enough host memory for %.0f MiB; use fewer ranks on this host", double(bytes) / (1 << 20)));
}

void* take_host_memory(Device& dev, int64_t bytes, bool* pinned) {
  void* p = nullptr;
  const size_t n = size_t(std::max<int64_t>(bytes, 1));
  *pinned = false;
#if FSDP_CUDA
  if (dev.backend == Backend::gpu && dev.ordinal != Device::plan_only) {
    const cudaError_t found = cudaMallocHost(&p, n);
    if (found == cudaErrorMemoryAllocation) no_room(n);
    CUDA_CHECK(found);
    *pinned = true;
  }
#endif
  (void)dev;
  if (!p) p = std::aligned_alloc(64, (n + 63) / 64 * 64);
  if (!p) no_room(n);
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
