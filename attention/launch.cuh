// Launches kernels with more dynamic shared memory than a block may have by default.
#pragma once

#include <unordered_map>

#include "lib/device/stream.h"

namespace attention {

// Asks the driver once for each kernel, and again only for more.
inline void allow_shared(const void* kernel, int bytes) {
  static thread_local std::unordered_map<const void*, int> allowed;
  int& most = allowed[kernel];
  if (bytes <= most) return;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  most = bytes;
}

template <class... Parameters, class... Args>
void launch(cudaStream_t stream, void (*kernel)(Parameters...), int64_t blocks, int threads, int bytes,
            const Args&... args) {
  allow_shared(reinterpret_cast<const void*>(kernel), bytes);
  kernel<<<unsigned(blocks), unsigned(threads), size_t(bytes), stream>>>(args...);
  CUDA_CHECK_LAUNCH();
}

}  // namespace attention
