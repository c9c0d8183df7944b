// A query's n blocks from the scores of all: a warp a query.
#pragma once

#include "attention/topk.cuh"

namespace attention::topk {

// Scores from a query's row as numbers that compare as they do (scores are not negative) and are not 0; before block 1
// and past `last`, 0. four: of blocks j to j + 3; j is a multiple of 4, and so are the addresses of OfBlocks.
__device__ inline unsigned comparable(float score, int j, int last) {
  return j >= 1 && j <= last ? __float_as_uint(score) + 1 : 0;
}
struct OfBlocks {
  const float *row, *carried;
  __device__ OfBlocks(const float* row, int blocks) : row(row), carried(row + blocks) {}
  __device__ unsigned one(int j, int last) const {
    const bool in = j >= 1 && j <= last;
    return comparable(in ? row[j] + (j % 4 == 0 ? carried[j / 4 - 1] : 0.f) : 0.f, j, last);
  }
  __device__ void four(unsigned (&x)[4], int j, int last) const {
    const float4 score = *reinterpret_cast<const float4*>(row + j);
    x[0] = comparable(score.x + (j ? carried[j / 4 - 1] : 0.f), j, last);
    x[1] = comparable(score.y, j + 1, last), x[2] = comparable(score.z, j + 2, last);
    x[3] = comparable(score.w, j + 3, last);
  }
};
struct OfKeys {
  const float* row;
  int key_strides, block_strides;
  __device__ void four(unsigned (&x)[4], int j0, int last) const {
#pragma unroll 1
    for (int e = 0; e < 4; ++e) {
      const int j = j0 + e, begin = j * block_strides, end = begin + block_strides;
      float sum = 0;
      if (j >= 1 && j <= last)
        for (int i = begin - key_strides + 1; i < end; ++i)
          sum = fmaf(float(min(i + key_strides, end) - max(i, begin)), row[i], sum);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (i == e) x[i] = comparable(sum, j, last);
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

constexpr int list_bytes = 32 * 8;  // of shared memory for a warp
// Room for the scores of so many blocks of two queries, and what is carried to them; for each warp.
constexpr int room = 1024, room_bytes = 2 * (room + room / 4) * 4;
static_assert(room / 128 * 4 <= 32, "a lane has a bit for each of its numbers there");

// A warp writes the list of query t: the blocks that are always selected, and the best `wanted` of the rest, 1 to
// `last`. A lane has 4 neighbours of every 128, and finds the best of their lower halves and of their upper ones; what
// about `wanted` of those 64 reach is a bound that about 16 of all blocks reach (for wanted = 13 and scores in any
// order that does not repeat every 128 blocks). Those are gathered, one in a lane, and each counts those before it. If
// they are more than 32, because many are equal or many are wanted, the exact bound is searched among all. near: the
// first `in_room` numbers of the row and what is carried to them, in shared memory, where the numbers become comparable
// ones; the rest come from `score`.
template <int in_room, class Score>
__device__ inline void choose(int32_t* list, int t, float* near, const Score& score, uint64_t* gathered,
                              const TopK& a) {
  const int lane = threadIdx.x % 32, n = a.n, cur = t / a.select_block, wanted = n - 3, last = cur - 2;
  const unsigned before = (1u << lane) - 1;
  if (cur < n) {
    for (int i = lane; i < n; i += 32) list[i] = i <= cur ? i : -1;
    return;
  }
  if (lane < 3) list[lane == 0 ? 0 : n - lane] = lane == 0 ? 0 : cur + 1 - lane;
  if (wanted == 0) return;

  gathered[lane] = 0;
  unsigned best[2] = {0, 0};
  const auto better = [&](const unsigned(&x)[4]) {
    best[0] = max(best[0], max(x[0], x[1])), best[1] = max(best[1], max(x[2], x[3]));
  };
  uint4* const numbers = reinterpret_cast<uint4*>(near) + lane;
#pragma unroll 1
  for (int j0 = 0; j0 < in_room && j0 <= last; j0 += 256)
#pragma unroll
    for (int i = 0; i < 256; i += 128) {
      unsigned x[4];
      OfBlocks(near, in_room).four(x, j0 + i + 4 * lane, last);
      numbers[(j0 + i) / 4] = {x[0], x[1], x[2], x[3]};
      better(x);
    }
  // f(j, scores of j to j + 3) in all lanes, 128 blocks at a time in their order.
  const auto far = [&](auto&& f) {
#pragma unroll 1
    for (int j0 = in_room; j0 <= last; j0 += 128) {
      const int j = j0 + 4 * lane;
      unsigned x[4] = {0, 0, 0, 0};
      if (j <= last) score.four(x, j, last);
      f(j, x);
    }
  };
  const auto each = [&](auto&& f) {
#pragma unroll 1
    for (int j0 = 0; j0 < in_room && j0 <= last; j0 += 128) {
      const uint4 y = numbers[j0 / 4];
      const unsigned x[4] = {y.x, y.y, y.z, y.w};
      f(j0 + 4 * lane, x);
    }
    far(f);
  };
  far([&](int, const unsigned(&x)[4]) { better(x); });
  const unsigned top = __reduce_max_sync(~0u, max(best[0], best[1]));
  unsigned bound = 0;
  if (last <= 32 && wanted <= 28) bound = 1;          // all of them are gathered
  else if (wanted <= 28 && wanted <= last / 2 + 1) {  // there are so many that have a block
    const unsigned least = __reduce_min_sync(~0u, min(best[0] - 1, best[1] - 1)) + 1;  // of them
    bound = reached(wanted, wanted + 2, least, top, [&](unsigned x) {
      return __popc(__ballot_sync(~0u, best[0] >= x)) + __popc(__ballot_sync(~0u, best[1] >= x));
    });
  }
  if (bound > 0) {
    unsigned mine = 0;  // bit 4i + e: number e of 128 i + 4 lane
#pragma unroll 2
    for (int j0 = (min(last + 1, in_room) + 127) / 128 * 128 - 128; j0 >= 0; j0 -= 128) {
      const uint4 x = numbers[j0 / 4];
      mine = mine << 4 | (x.x >= bound) | (x.y >= bound) << 1 | (x.z >= bound) << 2 | (x.w >= bound) << 3;
    }
    __syncwarp();  // all have been set to 0
    int found = 0;
    const auto gather = [&](bool take, unsigned lanes, int j, unsigned x) {
      const int at = found + __popc(lanes & before);
      if (take && at < 32) gathered[at] = uint64_t(x) << 32 | unsigned(~j);
      found += __popc(lanes);
    };
    for (unsigned lanes; (lanes = __ballot_sync(~0u, mine)) != 0; mine &= mine - 1) {
      const int bit = __ffs(int(mine)) - 1, j = bit / 4 * 128 + 4 * lane + bit % 4;
      gather(mine, lanes, j, mine ? reinterpret_cast<const unsigned*>(near)[j] : 0);
    }
    far([&](int j, const unsigned(&x)[4]) {
#pragma unroll
      for (int e = 0; e < 4; ++e) gather(x[e] >= bound, __ballot_sync(~0u, x[e] >= bound), j + e, x[e]);
    });
    if (found <= 32) {
      __syncwarp();
      const uint64_t own = gathered[lane];
      int larger = 0, lower = 0;  // numbers that are larger, or equal and of a lower block; lower blocks
      for (int i0 = 0; i0 < found; i0 += 8)
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
          const ulonglong2 y = *reinterpret_cast<const ulonglong2*>(gathered + i0 + i);
          larger += (y.x > own) + (y.y > own);
          lower += (unsigned(y.x) > unsigned(own)) + (unsigned(y.y) > unsigned(own));
        }
      const bool taken = lane < found && larger < wanted;
      unsigned* const flags = reinterpret_cast<unsigned*>(gathered);  // in the order of blocks
      __syncwarp();
      if (lane < found) flags[lower] = taken;
      __syncwarp();
      const unsigned blocks = __ballot_sync(~0u, lane < found && flags[lane]);
      if (taken) list[1 + __popc(blocks & ((1u << lower) - 1))] = int32_t(~unsigned(own));
      return;
    }
  }
  const auto count = [&](unsigned bound) {
    int c = 0;
    each([&](int, const unsigned(&x)[4]) {
      c += (x[0] >= bound) + (x[1] >= bound) + (x[2] >= bound) + (x[3] >= bound);
    });
    return int(__reduce_add_sync(~0u, unsigned(c)));
  };
  bound = reached(wanted, wanted, bound, top, count);
  int equals = wanted - (bound == ~0u ? 0 : count(bound + 1)), taken = 0;  // of those at the bound, the first so many
  each([&](int j, const unsigned(&x)[4]) {
    // Of lower lanes: those at the bound, and those that are taken, which are above it or among its first.
    int equal = 0, above = 0, all_equal = 0, all_above = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const unsigned at = __ballot_sync(~0u, x[e] == bound), over = __ballot_sync(~0u, x[e] > bound);
      equal += __popc(at & before), all_equal += __popc(at);
      above += __popc(over & before), all_above += __popc(over);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (x[e] > bound || (x[e] == bound && equal < equals)) list[1 + taken + above + min(equal, equals)] = j + e;
      above += x[e] > bound, equal += x[e] == bound;
    }
    taken += all_above + min(all_equal, equals), equals -= min(all_equal, equals);
  });
}

// All warps of a block (or those that call it: `warps` of them, this one number `warp`) choose for a tile's queries.
// Where the scratch has scores of blocks, a query's are on their way while the one before is chosen for. near
// and gathered: room_bytes and list_bytes of this warp.
template <bool pooled>
__device__ inline void choose_all(int32_t* indices, const float* scores, int b, int q0, int head, int warp, int warps,
                                  float* near, uint64_t* gathered, const TopK& a) {
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
    copies_commit();
  };
  if constexpr (pooled) fetch(warp, near);
#pragma unroll 1
  for (int r = warp, turn = 0; r < end; r += warps, turn ^= 1) {
    const float* row = scores + int64_t(r) * a.row;
    if constexpr (pooled) {
      float *mine = near + turn * (room + room / 4), *other = near + (turn ^ 1) * (room + room / 4);
      fetch(r + warps, other);
      copies_wait<1>();
      __syncwarp();
      choose<room>(indices + int64_t(r) * a.n, q0 + r, mine, OfBlocks(row, a.blocks), gathered, a);
    } else {
      choose<0>(indices + int64_t(r) * a.n, q0 + r, near, OfKeys{row, a.key_strides, a.block_strides}, gathered, a);
    }
    __syncwarp();
  }
}

}  // namespace attention::topk
