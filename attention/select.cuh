// Selection: blocks' scores from compressed keys (eq. 8 to 10 of NSA), and each query's best blocks (eq. 11).
//
// A query with more than n blocks up to its own, `cur`, takes 0, cur - 1 and cur, and the best n - 3 of 1 to cur - 2;
// the others take all they have and need no score. Every compressed key that shares a token with one of those
// candidates ends before block cur begins: no score has to be masked. A tile has scores of more blocks than some of its
// queries may choose, or see: nobody reads those.
//
// The product is S^T = K Q^T, and eight neighbouring columns of it are eight queries of one head. A thread thus holds
// the same (key, query) for all heads, and sums them in their order without asking anyone. The columns of a tile are
// 128: as many times 8 queries as go with the group's heads (a part of them, the largest divisor up to 16, where the
// group is larger: then the sums go through the scratch from part to part).
//
// Blocks of threads are persistent. Each has room in the scratch for the scores of one tile of queries, mostly in L2:
// where a selection block is 4 strides and a compressed key 2 (as in 64, 32, 16), scores of blocks; else the sums over
// heads of single keys, which the reader adds up. Either way equal keys give equal scores, bit for bit, wherever they
// lie: an addition's place in the order depends on nothing but the place in the block.
#pragma once

#include <algorithm>

#include "nsa_attention.h"

#if FSDP_CUDA
// The kernels behind nsa_select on a bare CUDA stream, for tests and timings. arch: as in gpu::attention_forward.
namespace gpu {
template <class T>
Kernel nsa_select(cudaStream_t stream, int arch, int32_t* indices, const T* q, const T* k, const float* lse,
                  float* scratch, const NsaShape& a);
}
#endif

namespace attention {

// NsaShape in the kernels' types, and how they cut it up. An item is a tile of queries of one KV head.
struct Selection {
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

  Selection(const NsaShape& a, bool narrow)
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
  HD int items() const { return B * tiles * HKV; }
  HD int most() const { return items() < most_blocks ? items() : most_blocks; }
  HD int64_t scores() const { return int64_t(queries) * row; }  // of one tile

  // The dearest first; heads fastest, so that blocks side by side read the same rows of the buffer that q lies in.
  HD void place(int item, int* b, int* q0, int* head) const {
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

#ifdef __CUDACC__
#include "attention/simple.cuh"
#include "attention/sm80.cuh"
#include "attention/sm90.cuh"
#include "attention/tiles.cuh"

namespace attention::selection {

// ------------------------------------------------------------------------------------------------------------ choice

// Scores of blocks j0 + lane + 32 i, i < N, from a query's row, as numbers that compare as they do (scores are not
// negative) and are not 0; before block 1 and past `last`, 0.
__device__ inline unsigned comparable(float score, int j, int last) {
  return j >= 1 && j <= last ? __float_as_uint(score) + 1 : 0;
}
struct OfBlocks {
  const float *row, *carried;
  __device__ OfBlocks(const float* row, int blocks) : row(row), carried(row + blocks) {}
  template <int N>
  __device__ void load(unsigned (&x)[N], int j0, int last) const {
    const int j = j0 + int(threadIdx.x % 32);
    const float *p = row + j, *c = carried + j / 4 - 1;
    float score[N], carry[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const bool in = j + 32 * i >= 1 && j + 32 * i <= last;
      score[i] = in ? p[32 * i] : 0.f;
      carry[i] = in && j % 4 == 0 ? c[8 * i] : 0.f;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = comparable(score[i] + carry[i], j + 32 * i, last);
  }
};
struct OfKeys {
  const float* row;
  int key_strides, block_strides;
  template <int N>
  __device__ void load(unsigned (&x)[N], int j0, int last) const {
#pragma unroll 1
    for (int n = 0; n < N; ++n) {
      const int j = j0 + int(threadIdx.x % 32) + 32 * n, begin = j * block_strides, end = begin + block_strides;
      float sum = 0;
      if (j >= 1 && j <= last)
        for (int i = begin - key_strides + 1; i < end; ++i)
          sum = fmaf(float(min(i + key_strides, end) - max(i, begin)), row[i], sum);
#pragma unroll
      for (int i = 0; i < N; ++i)
        if (i == n) x[i] = comparable(sum, j, last);
    }
  }
};

// A number in [lo, hi] that at least `wanted` numbers reach, by count(): the largest such, or one that no more than
// `enough` reach. At least `wanted` reach lo, and none is above hi.
template <class Count>
__device__ inline unsigned reached(int wanted, int enough, unsigned lo, unsigned hi, const Count& count) {
  while (lo < hi) {
    const unsigned middle = hi - (hi - lo) / 2;
    const int c = count(middle);
    if (c < wanted) hi = middle - 1;
    else if (lo = middle; c <= enough) break;
  }
  return lo;
}

constexpr int list_bytes = 2 * 32 * 4;  // of shared memory for a warp
// Room for the scores of so many blocks of two queries, and what is carried to them; for each warp.
constexpr int room = 1024, room_bytes = 2 * (room + room / 4) * 4;

// A warp writes the list of query t: the blocks that it takes anyway, and the best `wanted` of the others, 1 to `last`.
// Every lane finds the best of its blocks; what about `wanted` of those 32 reach is a bound that about 17 of all blocks
// reach (for wanted = 13 and scores in any order that does not repeat every 32 blocks). Those are gathered, one in a
// lane, and each counts those before it. If they are more than 32, because many are equal or many are wanted, the exact
// bound is searched among all. near: the first `in_room` numbers of the row and what is carried to them, in shared
// memory, where the numbers become comparable ones; the rest come from `score`.
template <int in_room, class Score>
__device__ inline void choose(int32_t* list, int t, float* near, const Score& score, unsigned* gathered,
                              const Selection& a) {
  const int lane = threadIdx.x % 32, n = a.n, cur = t / a.select_block, wanted = n - 3, last = cur - 2;
  const unsigned before = (1u << lane) - 1;
  if (cur < n) {
    for (int i = lane; i < n; i += 32) list[i] = i <= cur ? i : -1;
    return;
  }
  if (lane < 3) list[lane == 0 ? 0 : n - lane] = lane == 0 ? 0 : cur + 1 - lane;
  if (wanted == 0) return;

  unsigned* const numbers = reinterpret_cast<unsigned*>(near);
  unsigned best = 0;
#pragma unroll 1
  for (int j0 = 0; j0 < in_room && j0 <= last; j0 += 256) {
    unsigned x[8];
    OfBlocks(near, in_room).load(x, j0, last);
#pragma unroll
    for (int i = 0; i < 8; ++i) numbers[j0 + 32 * i + lane] = x[i], best = max(best, x[i]);
  }
  // f(j, j's score) in all lanes, 32 blocks at a time in their order.
  const auto far = [&](auto&& f) {
#pragma unroll 1
    for (int j0 = in_room; j0 <= last; j0 += 256) {
      unsigned x[8];
      score.load(x, j0, last);
#pragma unroll
      for (int i = 0; i < 8; ++i) f(j0 + 32 * i + lane, x[i]);
    }
  };
  const auto each = [&](auto&& f) {
#pragma unroll 1
    for (int j0 = 0; j0 < in_room && j0 <= last; j0 += 256) {
      unsigned x[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = numbers[j0 + 32 * i + lane];
#pragma unroll
      for (int i = 0; i < 8; ++i) f(j0 + 32 * i + lane, x[i]);
    }
    far(f);
  };
  far([&](int, unsigned x) { best = max(best, x); });
  const unsigned top = __reduce_max_sync(~0u, best);
  unsigned bound = 0;
  if (wanted <= 28) {
    bound = reached(wanted, wanted + 2, __reduce_min_sync(~0u, best), top,
                    [&](unsigned x) { return __popc(__ballot_sync(~0u, best >= x)); });
    int found = 0;
    each([&](int j, unsigned x) {
      const unsigned lanes = __ballot_sync(~0u, x >= bound);
      const int at = found + __popc(lanes & before);
      if (x >= bound && at < 32) gathered[at] = x, gathered[32 + at] = unsigned(j);
      found += __popc(lanes);
    });
    if (found <= 32) {
      __syncwarp();
      const unsigned x = lane < found ? gathered[lane] : 0, j = lane < found ? gathered[32 + lane] : 0;
      int rank = 0;
      for (int i0 = 0; i0 < found; i0 += 8)
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const unsigned y = __shfl_sync(~0u, x, i0 + i);
          rank += y > x || (y == x && i0 + i < lane);
        }
      const bool taken = lane < found && rank < wanted;
      const unsigned lanes = __ballot_sync(~0u, taken);
      if (taken) list[1 + __popc(lanes & before)] = int32_t(j);
      return;
    }
  }
  const auto count = [&](unsigned bound) {
    int c = 0;
    each([&](int, unsigned x) { c += x >= bound; });
    return int(__reduce_add_sync(~0u, unsigned(c)));
  };
  bound = reached(wanted, wanted, bound, top, count);
  int equals = wanted - (bound == ~0u ? 0 : count(bound + 1)), taken = 0;  // of those at the bound, the first so many
  each([&](int j, unsigned x) {
    const unsigned among = __ballot_sync(~0u, x == bound);
    const bool take = x > bound || (x == bound && __popc(among & before) < equals);
    const unsigned lanes = __ballot_sync(~0u, take);
    if (take) list[1 + taken + __popc(lanes & before)] = j;
    taken += __popc(lanes), equals -= __popc(among);
  });
}

// All warps of a block (or those that call it: `warps` of them, this one number `warp`) choose for a tile's queries.
// Where the scratch has scores of blocks, a query's are on their way while the one before is chosen for. near
// and gathered: room_bytes and list_bytes of this warp.
template <bool pooled>
__device__ inline void choose_all(int32_t* indices, const float* scores, int b, int q0, int head, int warp, int warps,
                                  float* near, unsigned* gathered, const Selection& a) {
  const int lane = threadIdx.x % 32, end = min(a.queries, a.T - q0);
  indices += ((int64_t(b) * a.HKV + head) * a.T + q0) * a.n;
  const auto copy = [&](float* to, const float* from, int count) {
    for (int i = 4 * lane; i < count; i += 128)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(uint32_t(__cvta_generic_to_shared(to + i))),
                   "l"(from + i)
                   : "memory");
  };
  const auto fetch = [&](int r, float* to) {
    const int last = r < end ? min(a.last_candidate(q0 + r), room - 1) : 0;
    if (last) {
      const float* row = scores + int64_t(r) * a.row;
      copy(to, row, last + 1), copy(to + room, row + a.blocks, last / 4);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  if constexpr (pooled) fetch(warp, near);
#pragma unroll 1
  for (int r = warp, turn = 0; r < end; r += warps, turn ^= 1) {
    const float* row = scores + int64_t(r) * a.row;
    if constexpr (pooled) {
      float *mine = near + turn * (room + room / 4), *other = near + (turn ^ 1) * (room + room / 4);
      fetch(r + warps, other);
      asm volatile("cp.async.wait_group 1;" ::: "memory");
      __syncwarp();
      choose<room>(indices + int64_t(r) * a.n, q0 + r, mine, OfBlocks(row, a.blocks), gathered, a);
    } else {
      choose<0>(indices + int64_t(r) * a.n, q0 + r, near, OfKeys{row, a.key_strides, a.block_strides}, gathered, a);
    }
    __syncwarp();
  }
}

// ------------------------------------------------------------------------------------------------------------ scores
// What mma.sync and wgmma have in common: a warp has 16 keys x 128 columns; lane 4g + c has keys g and g + 8, and
// columns 2c and 2c + 1 of every 8. s[4i + 2r + e]: key g + 8r, column 8i + 2c + e.

// Minus lse in units of log2 of this thread's columns; first_head: of the tile.
__device__ inline void load_shifts(float (&shift)[32], const float* lse, int b, int first_head, int q0,
                                   const Selection& a) {
  int h = 0, t = q0 + threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e)
      shift[2 * i + e] = t + e < a.T && t < q0 + a.queries
                             ? lse[(int64_t(b) * a.H + first_head + h) * a.T + t + e] * -1.4426950408889634f
                             : -INFINITY;
    if (++h == a.heads) h = 0, t += 8;
  }
}
__device__ inline void exponentials(float (&s)[64], const float (&shift)[32], const Selection& a) {
#pragma unroll
  for (int i = 0; i < 64; ++i) s[i] = exp2_approx(fmaf(s[i], a.scale_log2, shift[i / 4 * 2 + i % 2]));
}

// Sums p over heads, and stores scores of the four blocks that begin in keys 16 m to 16 m + 15, or sums of those keys.
// A block's: (2p0 + 2p1) + (2p2 + p3), each pair's by one exchange, both pairs' by another; + p[-1], which for the
// first of the four is in another warp, so that every fourth block's is carried to the reader.
template <bool pooled, int heads>
__device__ inline void store_scores(const float (&p)[64], float* to, int m, bool add, const Selection& a) {
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const bool odd = g & 1, upper = g & 2;  // an odd g ends up with keys 8 to 15, an `upper` one with column 2c + 1
  const float weight = g % 4 == 3 ? 1.f : 2.f;
  const bool first = g == 0 || g == 2;                 // of the four blocks
  const int from = (odd ? g < 4 ? 6 : 3 : 2) * 4 + c;  // who has the key before the block
  constexpr unsigned last_heads[] = {0, 0, 0xaaaa, 0, 0x8888, 0, 0, 0, 0x8080, 0, 0, 0, 0, 0, 0, 0, 0x8000};
  const unsigned last_head = heads ? last_heads[heads] : a.last_head;
  to += 2 * c * a.row;
  float* const carried = to + a.blocks + m;
  float* const at = pooled ? to + upper * a.row + 4 * m + 2 * odd + g / 4 : to + 16 * m + g;
  float sum[4] = {0, 0, 0, 0};
  int64_t query = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
#pragma unroll
    for (int x = 0; x < 4; ++x) sum[x] += p[4 * i + x];
    if (!(last_head >> i & 1)) continue;
    if constexpr (pooled) {
      float pair[2], end[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float low = weight * sum[e], high = weight * sum[2 + e];
        const float got = __shfl_xor_sync(~0u, odd ? low : high, 4);
        pair[e] = (odd ? high : low) + got;
        end[e] = odd ? sum[2 + e] : got;  // where g % 4 is 2 or 3: p3
      }
      float score = (upper ? pair[1] : pair[0]) + __shfl_xor_sync(~0u, upper ? pair[0] : pair[1], 8);
      const float end0 = __shfl_sync(~0u, end[0], from), end1 = __shfl_sync(~0u, end[1], from);
      score += first ? 0.f : upper ? end1 : end0;
      at[query] = score;
      if (g == 7) carried[query] = sum[2], carried[query + a.row] = sum[3];
    } else {
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        float* one = at + query + x % 2 * a.row + x / 2 * 8;
        *one = add ? *one + sum[x] : sum[x];
      }
    }
#pragma unroll
    for (int x = 0; x < 4; ++x) sum[x] = 0;
    query += 8 * a.row;
    if constexpr (heads < 4) asm volatile("" : "+l"(query));  // 16 addresses do not fit into the registers
  }
}

// Column 8i + c of a tile is query c of 8 and head i % heads of those in hand. Address says where a column's piece of 8
// elements goes. Columns without a query become zeros.
template <int D, class Address>
__device__ inline void load_queries(const bf16* q, int thread, int b, int first_head, int q0, const Selection& a,
                                    const Address& address) {
  if (thread >= D) return;  // 8 columns at a time
  const int c = thread / (D / 8), piece = thread % (D / 8);
  const bf16* first = q + (int64_t(b) * a.T + q0) * a.ld + first_head * D + piece * 8;
  int h = 0, t = c;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const bool valid = q0 + t < a.T && t < a.queries;
    const bf16* from = valid ? first + t * a.ld + h * D : q;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address(8 * i + c, piece)), "l"(from),
                 "r"(valid ? 16 : 0)
                 : "memory");
    if (++h == a.heads) h = 0, t += 8;
  }
}

// ------------------------------------------------------------------------------------------------------------- sm_90
// A block is a warpgroup of which one thread keeps a ring of key tiles filled, and one that does all else; two blocks
// share an SM, so that one's products and exponentials run while the other chooses. Its item: the tile's columns stay
// in shared memory, keys stream past 64 at a time; scores of the next keys are in flight while these become
// probabilities. A thread has 2 of the keys and 32 of the columns. When the products are done, scores of the queries
// that are chosen for come to where the columns were. Read once: q, lse; for each tile, k (from L2); written once and
// read by the same block: scores (from block 1024 on twice or more); written once: indices. Limits: tensor cores and
// exponentials alike allow 790 TFLOP/s at D 128, 1.4 ms at T 65536 with 32 heads.
// H200, D 128, 32/8 heads: 0.072 ms at T 4096, 0.180 at 8192, 0.438 at 16384, 1.205 at 32768, 3.71 at 65536 (296
// TFLOP/s), 14.34 at 131072. 64/4 heads: 0.085 ms at 4096, 5.07 at 65536 (434 TFLOP/s), 19.66 at 131072.

template <int D>
struct Sm90 {
  static constexpr int warps = 4;  // that do all but fetch keys
  static constexpr int keys = 64, stages = 4, tile = keys * D * 2;
  static constexpr int q = 0, k = std::max(Selection::columns * D * 2, warps*room_bytes), bars = k + stages * tile;
  static constexpr int items = bars + 16 * stages, lists = items + 32, bytes = lists + warps * list_bytes + 1024;
  static_assert(k % 1024 == 0, "wgmma's tiles begin at multiples of 1024");
};

template <int D, bool pooled, int heads>
__global__ void __launch_bounds__(256, 2)
    sm90_kernel(int32_t* indices, const bf16* q, const __grid_constant__ CUtensorMap k_map, const float* lse,
                float* scratch, Selection a, Problem work, int list) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using namespace sm90;
  using L = Sm90<D>;
  extern __shared__ uint8_t smem[];
  const uint32_t base = shared_base();
  const Ring<L::stages> ring(base + L::bars);
  const Items items(base + L::items, work, list);
  if (threadIdx.x == 0) {
    ring.init(L::warps), items.ring.init(L::warps);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  if (warpgroup_index() == 0) {
    fewer_registers<40>();
    if (threadIdx.x == 0) {
      int n = 0;  // tiles of keys so far
      for (int round = 0, item = blockIdx.x; items.tell(round, item); ++round) {
        int b, q0, head;
        a.place(item, &b, &q0, &head);
        item = items.draw();  // early, so that it is there when it is wanted
        const int tiles = 2 * ceil_div(a.keys_wanted(q0), 2 * L::keys);
        for (int part = 0; part < a.group; part += a.heads)
          for (int j = 0; j < tiles; ++j, ++n)
            load_tile<L::keys, D>(base + L::k + ring.slot(n) * L::tile, k_map, ring.acquire(n, L::tile), j * L::keys,
                                  head, b);
      }
    }
  } else {
    more_registers<216>();
    const int warp = threadIdx.x / 32 % 4;
    float* scores = scratch + blockIdx.x * a.scores();
    int n = 0;
    for (int round = 0, item; items.ask(round, &item); ++round) {
      int b, q0, head;
      a.place(item, &b, &q0, &head);
      const int tiles = 2 * ceil_div(a.keys_wanted(q0), 2 * L::keys);
      for (int part = 0; part < a.group && tiles > 0; part += a.heads) {
        const int first_head = head * a.group + part;
        float shift[32], s0[64], s1[64];
        named_barrier(1, 128);  // columns and scores of before have been read
        load_queries<D>(q, threadIdx.x % 128, b, first_head, q0, a, [&](int column, int piece) {
          return base + L::q + piece / 8 * Selection::columns * 128 + column * 128 + ((piece ^ column) % 8) * 16;
        });
        load_shifts(shift, lse, b, first_head, q0, a);
        asm volatile("cp.async.wait_all;\nfence.proxy.async.shared::cta;" ::: "memory");
        named_barrier(1, 128);

        const auto start = [&](float(&s)[64], int n) {
          ring.wait(n);
          wgmma_begin();
          multiply_nt<D, L::keys, Selection::columns>(s, base + L::k + ring.slot(n) * L::tile, base + L::q);
          wgmma_commit();
        };
        const auto finish = [&](float(&s)[64], int n) {
          wgmma_wait<0>();
          pin(s);
          ring.release(n);
        };
        const auto use = [&](float(&s)[64], int j) {
          exponentials(s, shift, a);
          store_scores<pooled, heads>(s, scores, 4 * j + warp, part > 0, a);
        };
        start(s0, n);
        for (int j = 0;; j += 2) {
          finish(s0, n + j);
          start(s1, n + j + 1);
          use(s0, j);
          finish(s1, n + j + 1);
          if (j + 2 == tiles) break;
          start(s0, n + j + 2);
          use(s1, j + 1);
        }
        use(s1, tiles - 1);
        n += tiles;
      }
      named_barrier(1, 128);
      uint32_t own = base - uint32_t(__cvta_generic_to_shared(smem));
      asm volatile("" : "+r"(own));  // what follows from it shall not stay in registers while products run
      choose_all<pooled>(indices, scores, b, q0, head, warp, L::warps,
                         reinterpret_cast<float*>(smem + own + L::q + warp * room_bytes),  // where the columns were
                         reinterpret_cast<unsigned*>(smem + own + L::lists + warp * list_bytes), a);
    }
  }
#else
  __trap();  // code for another architecture, which has sm80's kernels
#endif
}

template <int D, bool pooled, int heads>
Kernel sm90_launch_heads(cudaStream_t stream, int32_t* indices, const bf16* q, const bf16* k, const float* lse,
                         float* scratch, const Selection& a) {
  // As Items and tensor_map want it: an item for every 128 rows; keys, of which there may be none.
  AttentionShape shape = {a.B, a.tiles * 128, a.HKV, a.HKV, D, a.ld, int64_t(a.HKV) * D, 0, 0, 0, a.scale};
  shape.keys = std::max(a.keys, 1);
  const Problem work(shape);
  const CUtensorMap k_map = sm90::tensor_map(a.keys ? k : q, work.ld_kv, a.HKV, work.keys, work);
  auto kernel = sm90_kernel<D, pooled, heads>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Sm90<D>::bytes));
  kernel<<<std::min(a.most(), 2 * sm90::persistent_blocks(a.most())), 256, Sm90<D>::bytes, stream>>>(
      indices, q, k_map, lse, scratch, a, work, sm90::next_list());
  CUDA_CHECK_LAUNCH();
  const char* of = heads == 2    ? "pooled, 2 heads"
                   : heads == 4  ? "pooled, 4 heads"
                   : heads == 8  ? "pooled, 8 heads"
                   : heads == 16 ? "pooled, 16 heads"
                   : pooled      ? "pooled, any heads"
                                 : "not pooled";
  return {"sm90", of, heads == 0};
}

template <int D, bool pooled>
Kernel sm90_launch(cudaStream_t stream, int32_t* indices, const bf16* q, const bf16* k, const float* lse,
                   float* scratch, const Selection& a) {
  const auto launch = [&](auto f) { return f(stream, indices, q, k, lse, scratch, a); };
  if constexpr (pooled) {
    if (a.heads == 2) return launch(sm90_launch_heads<D, true, 2>);
    if (a.heads == 4) return launch(sm90_launch_heads<D, true, 4>);
    if (a.heads == 8) return launch(sm90_launch_heads<D, true, 8>);
    if (a.heads == 16) return launch(sm90_launch_heads<D, true, 16>);
  }
  return launch(sm90_launch_heads<D, pooled, 0>);
}

// ------------------------------------------------------------------------------------------------------------- sm_80
// The same with mma.sync. A block is 8 warps; 128 keys stream past at a time, of which a warp owns 16 against all
// columns, and a thread what it owns above; two stages. Scores that are chosen from come to where columns and keys
// were. Blocks take every gridDim-th item.
// H200, D 128, 32/8 heads: 0.098 ms at T 4096, 7.93 at 65536, 29.6 at 131072; shared memory, of which every warp reads
// all columns for its 16 keys, allows 2.6 at 65536.

template <int D>
constexpr int sm80_tiles = std::max((Selection::columns + 2 * 128) * D * 2, 8 * room_bytes);
template <int D>
constexpr int sm80_bytes = sm80_tiles<D> + 8 * list_bytes;
static_assert(sm80_bytes<64> <= 99 << 10 && sm80_bytes<128> <= 99 << 10, "what every chip of the family has");

template <int D, bool pooled>
__global__ void __launch_bounds__(sm80::threads, 1)
    sm80_kernel(int32_t* indices, const bf16* q, const bf16* k, const float* lse, float* scratch, Selection a) {
  using namespace sm80;
  constexpr int BN = 128, tile = BN * D * 2;
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t q_tile = shared_base(), k_tiles = q_tile + Selection::columns * D * 2;
  const int warp = threadIdx.x / 32;
  float* scores = scratch + blockIdx.x * a.scores();
  for (int item = blockIdx.x; item < a.items(); item += gridDim.x) {
    int b, q0, head;
    a.place(item, &b, &q0, &head);
    const int tiles = ceil_div(a.keys_wanted(q0), BN);
    const int64_t ld = int64_t(a.HKV) * D;
    const bf16* from = k + int64_t(b) * a.keys * ld + head * D;
    const auto load = [&](int j) {
      sm80::load_tile<BN, D>(k_tiles + j % 2 * tile, from + int64_t(j) * BN * ld, ld, a.keys - j * BN);
      copies_commit();
    };
    for (int part = 0; part < a.group && tiles > 0; part += a.heads) {
      const int first_head = head * a.group + part;
      float shift[32], s[64];
      __syncthreads();  // columns and scores of before have been read
      load_queries<D>(q, threadIdx.x, b, first_head, q0, a,
                      [&](int column, int c) { return piece<D>(q_tile, column, c); });
      load(0);
      load_shifts(shift, lse, b, first_head, q0, a);
#pragma unroll 1
      for (int j = 0; j < tiles; ++j) {
        if (j + 1 < tiles) load(j + 1), copies_wait<1>();
        else copies_wait<0>();
        __syncthreads();
        sm80::multiply_nt<D, Selection::columns>(s, k_tiles + j % 2 * tile, warp * 16, q_tile);
        __syncthreads();
        exponentials(s, shift, a);
        store_scores<pooled, 0>(s, scores, 8 * j + warp, part > 0, a);
      }
    }
    __syncthreads();
    choose_all<pooled>(indices, scores, b, q0, head, warp, 8, reinterpret_cast<float*>(smem + warp * room_bytes),
                       reinterpret_cast<unsigned*>(smem + sm80_tiles<D> + warp * list_bytes), a);
  }
}

template <int D, bool pooled>
Kernel sm80_launch(cudaStream_t stream, int32_t* indices, const bf16* q, const bf16* k, const float* lse,
                   float* scratch, const Selection& a) {
  auto kernel = sm80_kernel<D, pooled>;
  CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sm80_bytes<D>));
  kernel<<<a.most(), sm80::threads, sm80_bytes<D>, stream>>>(indices, q, k, lse, scratch, a);
  CUDA_CHECK_LAUNCH();
  return {"sm80", pooled ? "pooled" : "not pooled", !pooled};
}

// ------------------------------------------------------------------------------------------------------------- float
// For checks, as simple.cuh: a block's 8 warps own 4 queries each of an item's 32, and go through the heads one by one;
// a lane makes the score of one key.

static __global__ void __launch_bounds__(256)
    float_kernel(int32_t* indices, const float* q, const float* k, const float* lse, float* scratch, Selection a) {
  using namespace simple;
  __shared__ Tile qs, ks;
  __shared__ unsigned gathered[8][list_bytes / 4];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* scores = scratch + blockIdx.x * a.scores();
  for (int item = blockIdx.x; item < a.items(); item += gridDim.x) {
    int b, q0, head;
    a.place(item, &b, &q0, &head);
    const int keys = a.keys_wanted(q0);
    for (int h = head * a.group; h < (head + 1) * a.group; ++h)
      for (int k0 = 0; k0 < keys; k0 += 32) {
        const int64_t ld = int64_t(a.HKV) * a.D;
        __syncthreads();
        if (k0 == 0) simple::load_tile(qs, q + (int64_t(b) * a.T + q0) * a.ld + h * a.D, a.ld, a.T - q0, a.D);
        simple::load_tile(ks, k + (int64_t(b) * a.keys + k0) * ld + head * a.D, ld, a.keys - k0, a.D);
        __syncthreads();
        for (int r = warp; r < 32 && q0 + r < a.T; r += 8) {
          const float p = expf(dot(qs[r], ks[lane], a.D) * a.scale - lse[(int64_t(b) * a.H + h) * a.T + q0 + r]);
          float* at = scores + int64_t(r) * a.row + k0 + lane;
          *at = h > head * a.group ? *at + p : p;
        }
      }
    __syncwarp();  // a warp chooses for the queries that it has scores of
    choose_all<false>(indices, scores, b, q0, head, warp, 8, nullptr, gathered[warp], a);
  }
}

}  // namespace attention::selection
#endif  // __CUDACC__
