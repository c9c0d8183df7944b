// The loop over queries for dK and dV, cut in parts where it is too long for one block: how many, and their sum.
#pragma once

#include <algorithm>

#include "attention/tiles.cuh"

namespace attention {

// dK and dV of 128 keys are one block's work: with few keys too few blocks to fill a GPU, and of unequal length. Then
// several blocks share each loop over queries (KvLoop), each part's sums go to memory in fp32, and the kernel of dQ,
// which comes next, joins them where it has no more queries (Parts). As many parts as leave no block much more than its
// share of 128 multiprocessors, nor less than 512 queries; or fewer that take one block of each, where that is no
// later: what stands around a block's steps costs as much as some three of them. The number depends on the shape alone,
// and is known in a build without CUDA too, so that every build plans the same memory.
inline int kv_parts(const AttentionShape& a) {
  const Problem p(a);
  return with_mask(a, [&](const auto& mask) {
    int64_t longest = 0, all = 0, blocks = 0;  // the first two in steps of 64 queries
    for (int k0 = 0; k0 < p.keys; k0 += 128, ++blocks) {
      const KvLoop loop(mask, k0, k0 + 128, 64, p.group, 0, 1);
      longest = std::max<int64_t>(longest, loop.end), all += loop.end;
    }
    all *= a.B * a.HKV, blocks *= a.B * a.HKV;
    if (all == 0) return 1;
    constexpr int64_t around = 3;
    const int64_t once = std::max<int64_t>(128 / blocks, 1);
    const bool as_soon = longest / once + around <= all / 128 + 2 * around;
    const int64_t parts = as_soon ? once : (longest * 128 + all / 2) / all;
    return int(std::max<int64_t>(1, std::min(parts, longest / 8)));
  });
}

// Numbers of the workspace for sums of parts of dK and dV.
inline int64_t part_numbers(const AttentionShape& a, int parts) {
  return parts > 1 ? parts * a.B * a.HKV * (a.keys ? a.keys : a.T) * (a.D + a.v_dim()) : 0;
}

// dk (B,keys,HKV,D) and dv (B,keys,HKV,DV), and where parts of them lie on their way there, `sums` (part_at), to be
// joined first part first. An item is the work of 256 threads, four columns of a row at a time; there is none where one
// part is all.
struct Parts {
  bf16 *dk, *dv;
  float* sums;
  int parts;
  static constexpr int threads = 256, quads_of_item = 4 * threads;

  HD int64_t quads(const Problem& a) const { return int64_t(a.B) * a.HKV * a.keys * (a.D + a.DV) / 4; }
  int items(const Problem& a) const { return parts > 1 ? int((quads(a) + quads_of_item - 1) / quads_of_item) : 0; }
#ifdef __CUDACC__
  // All that one thread reads of a few parts is on its way at a time. Where there are several parts, keys are so few
  // that an int counts them.
  __device__ void join_item(const Problem& a, int item, int thread) const {
    constexpr int n = quads_of_item / threads;
    const int all = int(quads(a)), rows = a.B * a.HKV * a.keys, of_keys = rows * a.D / 4;
    const float4* from[n];
    int stride[n];  // from part to part
    float4 sum[n];
    const auto quad = [&](int i) { return item * quads_of_item + i * threads + thread; };
#pragma unroll
    for (int i = 0; i < n; ++i) {
      const bool of_v = quad(i) >= of_keys;
      stride[i] = rows * (of_v ? a.DV : a.D) / 4, sum[i] = {0, 0, 0, 0};
      from[i] = reinterpret_cast<const float4*>(sums) + quad(i) + (of_v ? int64_t(parts - 1) * of_keys : 0);
    }
#pragma unroll 4
    for (int part = 0; part < parts; ++part)
#pragma unroll
      for (int i = 0; i < n; ++i) {
        if (quad(i) >= all) continue;
        const float4 x = from[i][int64_t(part) * stride[i]];
        sum[i].x += x.x, sum[i].y += x.y, sum[i].z += x.z, sum[i].w += x.w;
      }
#pragma unroll
    for (int i = 0; i < n; ++i) {
      if (quad(i) >= all) continue;
      const bool of_v = quad(i) >= of_keys;
      const int width = of_v ? a.DV : a.D, at = quad(i) - (of_v ? of_keys : 0), row = at / (width / 4);
      const int c = at % (width / 4) * 4, j = row % a.keys, head = row / a.keys % a.HKV, b = row / a.keys / a.HKV;
      bf16* to = (of_v ? dv : dk) + (int64_t(b) * a.keys + j) * (of_v ? a.ld_dv : a.ld_dkv) + head * width + c;
      *reinterpret_cast<uint2*>(to) = {pack_bf16(sum[i].x, sum[i].y), pack_bf16(sum[i].z, sum[i].w)};
    }
  }
#endif
};

}  // namespace attention
