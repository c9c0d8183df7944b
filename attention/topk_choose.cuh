// A query's n blocks from the scores of all: a warp a query.
#pragma once

#include "attention/topk.cuh"

namespace attention::topk {

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

// A warp writes the list of query t: the blocks that are always selected, and the best `wanted` of the rest, 1 to
// `last`. Every lane finds the best of its blocks; what about `wanted` of those 32 reach is a bound that about 17 of
// all blocks reach (for wanted = 13 and scores in any order that does not repeat every 32 blocks). Those are gathered,
// one in a lane, and each counts those before it. If they are more than 32, because many are equal or many are wanted,
// the exact bound is searched among all. near: the first `in_room` numbers of the row and what is carried to them, in
// shared memory, where the numbers become comparable ones; the rest come from `score`.
template <int in_room, class Score>
__device__ inline void choose(int32_t* list, int t, float* near, const Score& score, unsigned* gathered,
                              const TopK& a) {
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
    if (last <= 32) bound = 1;  // all of them are gathered
    else
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
                                  float* near, unsigned* gathered, const TopK& a) {
  const int lane = threadIdx.x % 32, end = min(a.queries, a.T - q0);
  indices += ((int64_t(b) * a.HKV + head) * a.T + q0) * a.n;
  const auto copy = [&](float* to, const float* from, int count) {
    for (int i = 4 * lane; i < count; i += 128) copy16(uint32_t(__cvta_generic_to_shared(to + i)), from + i);
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

}  // namespace attention::topk
