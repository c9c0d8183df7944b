// The loop over queries for dK and dV, cut in parts where it is too long for one block: how many, and their sum.
#pragma once

#include <algorithm>

#include "attention/tiles.cuh"

#if FSDP_CUDA
#include "lib/device/launch.cuh"
#endif

namespace attention {

// dK and dV of 128 keys are one block's work: with few keys too few blocks to fill a GPU, and of unequal length. Then
// several blocks share each loop over queries (KvLoop), each part's sums go to memory in fp32, and sum_parts adds them
// in order. As many parts as leave no block much more than its share of 128 multiprocessors, nor less than 512 queries.
// The number depends on the shape alone, and is known in a build without CUDA too, so that every build plans the same
// memory.
inline int kv_parts(const AttentionShape& a) {
  const Problem p(a);
  return with_mask(a, [&](const auto& mask) {
    int64_t longest = 0, all = 0;  // steps of 64 queries
    for (int k0 = 0; k0 < p.keys; k0 += 128) {
      const KvLoop loop(mask, k0, k0 + 128, 64, p.group, 0, 1);
      longest = std::max<int64_t>(longest, loop.end), all += loop.end;
    }
    all *= a.B * a.HKV;
    if (all == 0) return 1;
    return int(std::max<int64_t>(1, std::min((longest * 128 + all / 2) / all, longest / 8)));
  });
}

// Numbers of the workspace for sums of parts of dK and dV.
inline int64_t part_numbers(const AttentionShape& a, int parts) {
  return parts > 1 ? parts * a.B * a.HKV * (a.keys ? a.keys : a.T) * (a.D + a.v_dim()) : 0;
}

#if FSDP_CUDA
// dk (B,keys,HKV,D) and dv (B,keys,HKV,DV) that were summed in parts: the sums over parts of part_sums (part_at), first
// part first. A thread owns 4 columns.
static __global__ void __launch_bounds__(256)
    sum_parts(bf16* dk, bf16* dv, const float* part_sums, Problem a, int parts) {
  begin_kernel();
  const int64_t rows = int64_t(a.B) * a.HKV * a.keys, of_keys = rows * a.D / 4;
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= of_keys + rows * a.DV / 4) return;
  const int which = i >= of_keys, width = which ? a.DV : a.D;
  const int64_t at = which ? i - of_keys : i, row = at / (width / 4);
  const int c = int(at % (width / 4)) * 4, j = int(row % a.keys), head = int(row / a.keys % a.HKV);
  const int b = int(row / a.keys / a.HKV);
  part_sums += part_at(a, parts, which, 0, 0, 0) + at * 4;
  float4 sum = {0, 0, 0, 0};
#pragma unroll 4
  for (int part = 0; part < parts; ++part) {
    float4 x = *reinterpret_cast<const float4*>(part_sums + part * rows * width);
    sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
  }
  bf16* to = (which ? dv : dk) + (int64_t(b) * a.keys + j) * (which ? a.ld_dv : a.ld_dkv) + head * width + c;
  *reinterpret_cast<uint2*>(to) = {pack_bf16(sum.x, sum.y), pack_bf16(sum.z, sum.w)};
}

inline void join_parts(cudaStream_t stream, bf16* dk, bf16* dv, const float* part_sums, const Problem& a, int parts) {
  if (parts == 1) return;
  const int64_t n = int64_t(a.B) * a.HKV * a.keys * (a.D + a.DV) / 4;
  launch(stream, sum_parts, {unsigned((n + 255) / 256), 256}, dk, dv, part_sums, a, parts);
}
#endif

}  // namespace attention
