// Launches of kernels, each of which may start while the one before it ends.
#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>

#include "lib/device/error.h"

// Programmatic dependent launch (compute capability 9.0 on): the blocks of a kernel take their places while the last
// ones of the kernel before leave theirs and what these wrote is still under way. So each kernel that `launch` starts
// calls this first: it returns when all work before has ended and is visible. Not one may leave it out, even if it
// needs nothing of its predecessor: the next kernel waits for that kernel alone, and takes its end for the end of all.
__device__ __forceinline__ void begin_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Near a block's end: once all blocks have come so far, those of the next kernel take the places of those that have
// ended. A kernel without it lets the next one in when its last block ends, in some graphs only when what that wrote
// has arrived. Near its beginning it was slower: blocks that wait take room.
__device__ __forceinline__ void let_next_in() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// For kernels of a series that need nothing of each other: a block takes the place that one of the kernel before has
// left. The first of them waits for what is before the series, then lets the second in, and so on; each but the first
// waits at its end, so that its end is still the end of all. The others read what was written before the series without
// a wait of their own, for which PTX promises nothing. It is there all the same: all blocks of the first have waited by
// then, so it is in L2, and a grid starts with a clean L1.
__device__ __forceinline__ void begin_of_series(bool first) {
  if (first) begin_kernel();
  let_next_in();
}
__device__ __forceinline__ void end_of_series(bool first) {
  if (!first) begin_kernel();
}

namespace launches {
// The driver is asked once for each kernel and thread, and again only for more.
inline void allow_shared(const void* kernel, int bytes) {
  static thread_local std::unordered_map<const void*, int> allowed;
  int& most = allowed[kernel];
  if (bytes <= most) return;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  most = bytes;
}

// Whether begin_kernel() waits in the code that runs: on a newer GPU that may be PTX of an older one. One kernel speaks
// for all, since they are compiled for the same GPUs, and a process has one.
inline bool may_start_early(const void* kernel) {
  static const bool may = [kernel] {
    cudaFuncAttributes code = {};
    CUDA_CHECK(cudaFuncGetAttributes(&code, kernel));
    return code.ptxVersion >= 90;
  }();
  return may;
}
}  // namespace launches

// shared_bytes: dynamic shared memory, as much as the chip has.
struct Grid {
  dim3 blocks, threads;
  int shared_bytes = 0;
};

// kernel(args...) on the grid, of a kernel that begins with begin_kernel(). Throws as CUDA_CHECK does.
template <class... Parameters, class... Args>
void launch(cudaStream_t stream, void (*kernel)(Parameters...), const Grid& grid, Args&&... args) {
  const void* const code = reinterpret_cast<const void*>(kernel);
  if (grid.shared_bytes > 0) launches::allow_shared(code, grid.shared_bytes);
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid.blocks, config.blockDim = grid.threads, config.dynamicSmemBytes = size_t(grid.shared_bytes);
  config.stream = stream, config.attrs = &early, config.numAttrs = launches::may_start_early(code) ? 1 : 0;
  CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...));
}

// Persistent blocks: one a multiprocessor, and no more than there are items of work.
inline int persistent_blocks(int items) {
  int device, sms;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  return sms < items ? sms : items;
}

namespace gpu {
// `rows` rows of `bytes` at p, `pitch` bytes apart. A kernel and not cudaMemset2DAsync, which starts and ends alone.
void zero(cudaStream_t stream, void* p, int64_t pitch, int64_t bytes, int64_t rows);
}  // namespace gpu
