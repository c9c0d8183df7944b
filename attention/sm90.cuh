// What attention's kernels on Hopper (sm_90a) share: wgmma reads tiles from shared memory that TMA has put there.
//
// In a kernel of dense attention one thread of the first warpgroup is the producer: it keeps a ring of tiles filled.
// The two others are consumers: each owns 64 rows of the block's tile and every matrix product that makes them, so they
// never exchange anything; while one runs its exponentials, the other keeps the tensor cores busy. Where tiles are too
// few for a GPU, consumers, two or three, share 64 rows and walk different keys (Share), and exchange their sums at the
// end.
//
// Tiles in shared memory: R rows x D as D/64 panels of R x 64, a row of a panel being 128 bytes, its eight 16-byte
// pieces permuted by the row number (the 128-byte swizzle that TMA writes and wgmma reads). A panel row is a column
// group of a row-major matrix, so one copy serves as operand either way: contracted over D (scores) or over rows.
#pragma once

#include <algorithm>
#include <atomic>
#include <map>
#include <tuple>

#include "attention/tiles.cuh"
#include "lib/device/hopper.cuh"
#include "lib/device/wgmma.cuh"

namespace attention::sm90 {

constexpr int consumers = 8;  // warps of such a kernel that read what the producer fetches

static __device__ unsigned items_drawn[256];  // one count a launch in flight; see Items

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

using namespace hopper;

__device__ inline void tma_load(uint32_t to, const CUtensorMap& map, uint32_t bar, int col, int row, int head, int b) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(to),
      "l"(&map), "r"(bar), "r"(col), "r"(row), "r"(head), "r"(b)
      : "memory");
}
__device__ inline void tma_store(const CUtensorMap& map, uint32_t from, int col, int row, int head, int b) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(from), "r"(col), "r"(row), "r"(head), "r"(b)
               : "memory");
}
__device__ inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(bar)
               : "memory");
}
// Rows [row, row + R) of one head; rows past T arrive as zeros.
template <int R, int D>
__device__ inline void load_tile(uint32_t to, const CUtensorMap& map, uint32_t bar, int row, int head, int b) {
#pragma unroll
  for (int c = 0; c < D / 64; ++c)
#pragma unroll
    for (int r = 0; r < R; r += 64) tma_load(to + (c * R + r) * 128, map, bar, c * 64, row + r, head, b);
}

// Writes a warpgroup's 64 x D accumulator as bf16 to rows [row, row + 64) of one head (TMA leaves out rows past T), by
// way of its own 64 rows of a tile of R in shared memory. `id` names a barrier of this warpgroup's. They are columns
// from col on.
template <int D, int R>
__device__ inline void store_rows(const float (&d)[D / 2], float f0, float f1, uint32_t to, int id,
                                  const CUtensorMap& map, int row, int head, int b, int col = 0) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  int r = warp * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < D / 8; i += 2) {
    int piece = i + lane / 16;  // of 8 columns
    uint32_t at = to + piece / 8 * R * 128 + r * 128 + ((piece % 8) ^ (r % 8)) * 16;
    store_matrices(at, pack_bf16(d[4 * i] * f0, d[4 * i + 1] * f0), pack_bf16(d[4 * i + 2] * f1, d[4 * i + 3] * f1),
                   pack_bf16(d[4 * i + 4] * f0, d[4 * i + 5] * f0), pack_bf16(d[4 * i + 6] * f1, d[4 * i + 7] * f1));
  }
  shared_visible();
  named_barrier(id, 128);
  if (threadIdx.x % 128 == 0) {
#pragma unroll
    for (int c = 0; c < D / 64; ++c) tma_store(map, to + c * R * 128, col + c * 64, row, head, b);
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }
}
// The same straight to memory in fp32, rows of D of which `valid` exist.
template <int D>
__device__ inline void store_rows_fp32(const float (&d)[D / 2], float f, float* to, int valid) {
  int r = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4, c = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < D / 4; ++i)
    if (r + i % 2 * 8 < valid)
      *reinterpret_cast<float2*>(to + (r + i % 2 * 8) * D + i / 2 * 8 + c) = {d[2 * i] * f, d[2 * i + 1] * f};
}
__device__ inline int load_shared(uint32_t at) {
  int x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}
__device__ inline void store_shared(uint32_t at, int x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
__device__ inline float load_shared_float(uint32_t at) { return __int_as_float(load_shared(at)); }
__device__ inline void store_shared(uint32_t at, float x) { store_shared(at, __float_as_int(x)); }
__device__ inline uint64_t load_shared64(uint32_t at) {
  uint64_t x;
  asm volatile("ld.shared.b64 %0, [%1];" : "=l"(x) : "r"(at) : "memory");
  return x;
}
__device__ inline float2 load_shared2(uint32_t at) {
  float2 x;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at));
  return x;
}

// What a mask that chooses says of a tile: its words, which came with the tile. Other masks have no more to say.
template <class Mask, int words>
__device__ inline auto chosen_of(uint32_t at) {
  if constexpr (Mask::chooses) {
    typename Mask::template Tile<words> tile;
#pragma unroll
    for (int i = 0; i < words; ++i) tile.word[i] = load_shared64(at + 8 * i);
    return tile;
  } else {
    return All();
  }
}

// Adds the addends to a warpgroup's 64 rows of dQ, of which a thread has N numbers: sequence b, rows from t0 on, of
// which those past T are not there, columns from col on.
template <int N>
__device__ inline void add_all(float (&d)[N], const Addends& addends, const Problem& a, int b, int t0, int col) {
  const int lane = threadIdx.x % 32, t = t0 + threadIdx.x / 32 % 4 * 16 + lane / 4;
  for (int n = 0; n < 2; ++n) {
    if (!addends.p[n]) continue;
    const bf16* more = addends.p[n] + (int64_t(b) * a.T + t) * addends.ld[n] + col + lane % 4 * 2;
#pragma unroll
    for (int e = 0; e < N; e += 2) {
      if (t + e / 2 % 2 * 8 >= a.T) continue;
      const uint32_t x = *reinterpret_cast<const uint32_t*>(more + e / 2 % 2 * 8 * addends.ld[n] + e / 4 * 8);
      d[e] += low_bf16(x), d[e + 1] += high_bf16(x);
    }
  }
}

// The work queue of persistent blocks: items of so many queries of one head. A block begins with the item of its own
// number and draws the next from a counter while it works; the block that draws the last number resets the counter. So
// a block that starts late, because another stream's kernel occupies its SM, leaves no fixed share of the work behind.
// Behind the queries' there may be other items. The producer passes an item to the consumers through one word of shared
// memory.
struct Items {
  Ring<1> ring;
  uint32_t word;
  QueryOrder order;
  int of_queries, count, list;
  static constexpr int bytes = Ring<1>::bytes + 16;

  __device__ Items(uint32_t at, const Problem& a, int list_, int rows = 128, int others = 0)
      : ring(at),
        word(at + Ring<1>::bytes),
        order(a, rows),
        of_queries(order.count(a)),
        count(of_queries + others),
        list(list_) {}
  __device__ int draw() const {
    unsigned drawn = atomicAdd(&items_drawn[list], 1);
    if (drawn == unsigned(count) - 1) atomicExch(&items_drawn[list], 0);
    return int(gridDim.x + drawn);
  }
  // Producer: passes the item of a round on. False when there is none left, which is passed on too.
  __device__ bool publish(int round, int item) const {
    ring.wait_free(round);
    store_shared(word, item);
    barrier_arrive(ring.full);
    return item < count;
  }
  // Consumers: the item of a round, or false.
  __device__ bool receive(int round, int* item) const {
    ring.wait(round);
    if (threadIdx.x % 32 == 0) *item = load_shared(word);  // the lane that arrives when it has been read
    *item = __shfl_sync(~0u, *item, 0);
    ring.release(round);
    return *item < count;
  }
};

#endif  // sm_90a

// ---------------------------------------------------------------------------------------------------------- launches

// Every copy is a box of 64 rows x 64 columns of one head; the map knows the strides and where the sequence ends.
inline CUtensorMap encoded_map(const bf16* p, int64_t ld, int heads, int dim, int rows, const Problem& a) {
  CUtensorMap map;
  cuuint64_t dims[4] = {cuuint64_t(dim), cuuint64_t(rows), cuuint64_t(heads), cuuint64_t(a.B)};
  cuuint64_t strides[3] = {cuuint64_t(ld * 2), cuuint64_t(dim * 2), cuuint64_t(rows * ld * 2)};
  cuuint32_t box[4] = {64, 64, 1, 1};
  CUresult r = hopper::encode_boxes(&map, p, dims, strides, box);
  if (r != CUDA_SUCCESS)
    throw CudaError(
        strf("attention: no tensor map for address %p, row stride %lld, B %d rows %d heads %d D %d "
             "(error %d): addresses and row strides must be multiples of 16 bytes",
             static_cast<const void*>(p), (long long)ld, a.B, rows, heads, dim, int(r)));
  return map;
}
// The driver encodes a map once: it holds an address and sizes, and every step brings the same.
inline CUtensorMap tensor_map(const bf16* p, int64_t ld, int heads, int dim, int rows, const Problem& a) {
  constexpr size_t most = 4096;  // far more than a model's
  static thread_local std::map<std::tuple<const bf16*, int64_t, int, int, int, int>, CUtensorMap> known;
  const auto key = std::make_tuple(p, ld, heads, rows, a.B, dim);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  if (known.size() == most) known.clear();
  return known.emplace(key, encoded_map(p, ld, heads, dim, rows, a)).first->second;
}

// How warpgroups share an item: by keys where the longest item of 128 queries is a tenth or more above a block's share
// of them all, in tiles of 128 keys. Of a shape, not of a GPU: 132 blocks.
enum class Share { rows, keys };
template <class Mask>
Share share_of(const Problem& a, const Mask& mask) {
  int64_t longest = 0, all = 0;
  for (int q0 = 0; q0 < a.T; q0 += 128) {
    const int64_t tiles = ceil_div(mask.last_key(q0 + 128), 128) - mask.first_key(q0) / 128;
    longest = std::max(longest, tiles), all += tiles;
  }
  return longest * 132 * 10 > all * a.B * a.H * 11 ? Share::keys : Share::rows;
}
// Launches take the lists of items in turn: two that are 256 launches apart share one and must not run side by side.
// Those of one stream never do.
inline int next_list() {
  static std::atomic<unsigned> launches{0};
  return int(launches++ % 256);
}

}  // namespace attention::sm90
