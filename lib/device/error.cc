#include "lib/device/error.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>

#if FSDP_CUDA
#include <cuda_runtime.h>
#endif

namespace {
int rank_for_errors = -1;
}
int exit_status(const std::exception& e) { return dynamic_cast<const UsageError*>(&e) ? 2 : 1; }

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
