// What kernels on Hopper (sm_90a) are made of beside wgmma: barriers in shared memory, registers that warpgroups hand
// to each other, and maps of matrices for TMA. Addresses are 32-bit shared-memory addresses throughout.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "lib/device/error.h"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "Hopper kernels need -gencode arch=compute_90a,code=sm_90a (sm_90 without the a has no wgmma)"
#endif

namespace hopper {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

__device__ inline void barrier_init(uint32_t bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}
__device__ inline void barrier_expect(uint32_t bar, uint32_t bytes) {  // arrives, and waits for that many bytes too
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ inline void barrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ inline void barrier_wait(uint32_t bar, uint32_t parity) {  // for the phase of that parity to end
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
  } while (!done);
}

// A ring of `stages` slots: the n-th tile goes to slot n % stages. full: the copy has landed; empty: all the warps that
// read it, as many as init was told, are done with it. One lane arrives for its warp, behind a __syncwarp that puts the
// other lanes' reads before it. A race checker that follows barriers thread by thread does not see that; built with
// -DEVERY_LANE_ARRIVES=1, which is slower, it has nothing to report.
#ifndef EVERY_LANE_ARRIVES
#define EVERY_LANE_ARRIVES 0
#endif
template <int stages>
struct Ring {
  uint32_t full, empty;
  __device__ explicit Ring(uint32_t at) : full(at), empty(at + 8 * stages) {}
  static constexpr int bytes = 16 * stages;
  __device__ void init(int warps) const {
    for (int i = 0; i < stages; ++i)
      barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, EVERY_LANE_ARRIVES ? 32 * warps : warps);
  }
  static __device__ int slot(int n) { return n % stages; }
  // Producer: wait until slot n is free, then promise the bytes of its copies. Returns the barrier they signal.
  __device__ uint32_t acquire(int n, uint32_t bytes) const {
    wait_free(n);
    barrier_expect(full + 8 * slot(n), bytes);
    return full + 8 * slot(n);
  }
  __device__ void wait_free(int n) const {
    barrier_wait(empty + 8 * slot(n), ((n / stages) & 1) ^ 1);  // a fresh barrier counts as one phase ended
  }
  __device__ void wait(int n) const { barrier_wait(full + 8 * slot(n), (n / stages) & 1); }
  __device__ void release(int n) const {  // all lanes of a warp call it
    __syncwarp();
    if (EVERY_LANE_ARRIVES || threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * slot(n));
  }
};

template <int registers>
__device__ inline void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ inline void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The warpgroup's number; equal in all lanes, which the compiler can see.
__device__ inline int warpgroup_index() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }

// The thread that stored by TMA waits until its shared memory has been read.
__device__ inline void store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

// What this thread has written to shared memory, or waited for, is there for TMA and wgmma.
__device__ inline void shared_visible() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four 8 x 8 matrices of bf16, of each of which a lane has a pair: row lane / 4, columns 2 (lane % 4) and the next.
// Lanes 8m to 8m + 7 say where the rows of matrix m go.
__device__ inline void store_matrices(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
               "r"(d)
               : "memory");
}

__device__ inline uint32_t shared_base() {  // swizzled tiles must start at multiples of 1024
  extern __shared__ __align__(1024) uint8_t smem[];
  return (uint32_t(__cvta_generic_to_shared(smem)) + 1023) & ~1023u;
}
#endif  // sm_90a

// A map for TMA of boxes of a bf16 tensor, its innermost dimension first: sizes and box in numbers, strides of all
// others in bytes. Boxes arrive with the 128-byte swizzle, and zeros past the tensor's end. Throws CudaError where the
// driver has no encoder; the driver refuses addresses and strides that are not multiples of 16 bytes.
template <int dims>
CUresult encode_boxes(CUtensorMap* map, const void* p, const cuuint64_t (&sizes)[dims],
                      const cuuint64_t (&strides)[dims - 1], const cuuint32_t (&box)[dims]) {
  static const auto encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
#else
    CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &f, cudaEnableDefault, &found));
#endif
    if (!f || found != cudaDriverEntryPointSuccess)
      throw CudaError("the driver has no cuTensorMapEncodeTiled; it must support CUDA 12 or newer");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f);
  }();
  cuuint32_t steps[dims];
  for (cuuint32_t& step : steps) step = 1;
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, dims, const_cast<void*>(p), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

}  // namespace hopper
