#include "lib/comm/progress.h"

#include <chrono>

#if FSDP_CUDA
// As profiles know the program's kernels from the libraries'.
namespace gpu {
static __device__ unsigned long long counts[flight::most_lanes][2];  // of each lane: started, finished

static __global__ void clear(int lane) { counts[lane][0] = counts[lane][1] = 0; }
// The time is there before the count that tells of it.
static __global__ void count_up(int lane, int which, flight::Marks::Count* to) {
  const unsigned long long n = ++counts[lane][which];
  int64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  to->ns[n % flight::Marks::kept] = now;
  __threadfence_system();
  to->count = n;
}
}  // namespace gpu
#endif

Progress::Progress(Device& dev, Stream& stream, int lane) : stream_(stream), lane_(lane), marks_(dev, 1) {
#if FSDP_CUDA
  // One that counts nothing, for the difference between the clocks: the GPU's may begin anywhere.
  gpu::clear<<<1, 1, 0, stream.cuda()>>>(lane);
  starts();
  CUDA_CHECK(cudaStreamSynchronize(stream.cuda()));
  const int64_t host_ns =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch()).count();
  const int64_t behind = host_ns - marks_[0].started.ns[1];
  gpu::clear<<<1, 1, 0, stream.cuda()>>>(lane);
  CUDA_CHECK_LAUNCH();
  CUDA_CHECK(cudaStreamSynchronize(stream.cuda()));
  marks_[0].started.count = 0;
  flight::follow(lane, marks_.get(), behind);
#endif
}

void Progress::starts() {
#if FSDP_CUDA
  gpu::count_up<<<1, 1, 0, stream_.cuda()>>>(lane_, 0, &marks_[0].started);
  CUDA_CHECK_LAUNCH();
#endif
}
void Progress::finishes() {
#if FSDP_CUDA
  gpu::count_up<<<1, 1, 0, stream_.cuda()>>>(lane_, 1, &marks_[0].finished);
  CUDA_CHECK_LAUNCH();
#endif
}
