// Choosing blocks (top-k): scores of selection blocks from compressed keys (eq. 8 to 10 of NSA), and each query's best
// n (eq. 11). Here: how the work is cut, and its kernels on a bare CUDA stream. topk_choose.cuh chooses,
// topk_kernels.cuh makes the scores; topk_few.cuh does both where blocks are few. What attends to the chosen blocks is
// attention/selected.cu.
//
// A query with more than n blocks up to its own, `cur`, takes 0, cur - 1 and cur, and the best n - 3 of 1 to cur - 2;
// the others take all they have and need no score. Every compressed key that shares a token with one of those
// candidates ends before block cur begins: no score has to be masked. A tile has scores of more blocks than some of its
// queries may choose, or see: those are never read.
//
// The product is S^T = K Q^T, and eight neighbouring columns of it are eight queries of one head. A thread thus holds
// the same (key, query) for all heads, and sums them in their order without any exchange. The columns of a tile are
// 128: 8 queries times all heads of the group, as often as fits (of a group of more than 16 heads, times its largest
// divisor up to 16: then the sums pass from part to part through the scratch).
//
// Blocks of threads (CTAs) are persistent (but for those of topk_few.cuh). Each has room in the scratch for the scores
// of one tile of queries, mostly in L2: where a selection block is 4 strides and a compressed key 2 (as in 64, 32, 16),
// scores of blocks; else the sums over heads of single keys, which the reader adds up. Either way equal keys give equal
// scores, bit for bit, wherever they lie: an addition's place in the order depends on nothing but the place in the
// block.
#pragma once

#include <algorithm>

#include "nsa_attention.h"

#if FSDP_CUDA
// The kernels behind nsa_topk (attention/stages.h) on a bare CUDA stream, for tests and timings: indices (B,HKV,T,n), q
// columns of (B*T,ld), k (B*compressed(), HKV D), lse (B,H,T). arch: as in gpu::attention_forward.
namespace gpu {
template <class T>
Kernel nsa_topk(cudaStream_t stream, int arch, int32_t* indices, const T* q, const T* k, const float* lse,
                float* scratch, const NsaShape& a);
}
#endif

namespace attention {

// NsaShape in the kernels' types, and how they cut it up. An item is a tile of queries of one KV head.
struct TopK {
  // Blocks of threads that run at once, at most: two on every SM of an H200. Memory is planned by it without a GPU.
  static constexpr int most_blocks = 264, columns = 128;

  int B, T, H, HKV, D, group, keys, n, select_block;
  int key_strides, block_strides;  // strides in a compressed key (l/d) and in a selection block (l'/d)
  int64_t ld;
  float scale, scale_log2;
  int heads, queries;      // of a tile: heads that are in its columns at a time, queries
  bool pooled;             // the scratch has scores of blocks rather than of keys
  unsigned last_head;      // bit i: columns 8 i to 8 i + 7 are the last head of their queries
  int tiles, blocks, row;  // a query's row in the scratch: `blocks` numbers (blocks, a multiple of 32) and what the
                           // last of every 16 keys adds to the block after them; or sums of keys, a multiple of 128

  TopK(const NsaShape& a, bool narrow)
      : B(int(a.B)),
        T(int(a.T)),
        H(int(a.H)),
        HKV(int(a.HKV)),
        D(int(a.D)),
        group(int(a.H / a.HKV)),
        keys(int(a.compressed())),
        n(int(a.selected)),
        select_block(int(a.select_block)),
        key_strides(int(a.block / a.stride)),
        block_strides(int(a.select_block / a.stride)),
        ld(a.ld),
        scale(float(a.scale)),
        scale_log2(float(a.scale * 1.4426950408889634)) {
    heads = std::min(group, 16);
    while (group % heads) --heads;
    queries = narrow ? columns / 8 / heads * 8 : 32;
    pooled = narrow && group == heads && key_strides == 2 && block_strides == 4;
    last_head = 0;
    for (int i = heads; i <= columns / 8; i += heads) last_head |= 1u << (i - 1);
    tiles = (T + queries - 1) / queries;
    blocks = int((a.select_blocks() + 31) / 32 * 32);
    row = pooled ? blocks + blocks / 4 : int((a.select_blocks() * block_strides + 127) / 128 * 128);
  }
  // Whether sm_90 has a kernel in which this number of heads is a constant.
  static constexpr bool has_kernel(int heads) {
    return (heads >= 1 && heads <= 4) || heads == 6 || heads == 8 || heads == 12 || heads == 16;
  }
  // Whether the sequence is so short that the kernels of topk_few.cuh choose.
  bool few() const { return pooled && blocks == 32 && has_kernel(heads); }
  HD int items() const { return B * tiles * HKV; }
  HD int most() const { return items() < most_blocks ? items() : most_blocks; }
  HD int64_t scores() const { return int64_t(queries) * row; }  // of one tile

  // Those with most keys first; heads fastest, so that neighbouring blocks read the same rows of q's buffer.
  HD void locate(int item, int* b, int* q0, int* head) const {
    *head = item % HKV;
    *q0 = (tiles - 1 - item / HKV % tiles) * queries;
    *b = item / HKV / tiles;
  }
  // A query may choose from blocks 1 to that; 0: nothing to choose.
  HD int last_candidate(int t) const {
    const int cur = t / select_block;
    return cur < n || n == 3 ? 0 : cur - 2;
  }
  // Keys [0, that) make all the scores that queries [q0, q0 + queries) choose by.
  HD int keys_wanted(int q0) const {
    const int last = last_candidate((q0 + queries < T ? q0 + queries : T) - 1);
    return last ? (last + 1) * block_strides : 0;
  }
};

}  // namespace attention
