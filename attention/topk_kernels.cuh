// The kernels of attention/topk.cu: scores of a tile of queries by sm_90's or sm_80's tensor cores, or in float; then
// the same block of threads chooses for those queries.
#pragma once

#include <string>
#include <type_traits>

#include "attention/sm80.cuh"
#include "attention/sm90.cuh"
#include "attention/tiles.cuh"
#include "attention/topk_choose.cuh"

namespace attention::topk {

// ------------------------------------------------------------------------------------------------------------ scores
// What mma.sync and wgmma have in common: a warp has 16 keys x 128 columns; lane 4g + c has keys g and g + 8, and
// columns 2c and 2c + 1 of every 8. s[4i + 2r + e]: key g + 8r, column 8i + 2c + e.

// heads: of a tile, in load_lse and what follows; 0: a.heads.
//
// This thread's columns are 2 of every 8. Their lse, infinity where there is no query; first_head: of the tile.
template <int heads, int N>
__device__ inline void load_lse(float (&to)[N], const float* lse, int b, int first_head, int q0, const TopK& a) {
  const int end = min(a.T - q0, a.queries);
  const float *first = lse + (int64_t(b) * a.H + first_head) * a.T + q0 + threadIdx.x % 4 * 2, *at = first;
  int h = 0, t = threadIdx.x % 4 * 2;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) to[2 * i + e] = t + e < end ? at[e] : INFINITY;
    at += a.T;
    if (++h == (heads ? heads : a.heads)) h = 0, t += 8, at = first += 8;
  }
}
// From lse what is added to scores, both in units of log2. Of scores that are pooled, keys that lie in one block with
// all their tokens, which are all but every fourth, count twice.
template <bool pooled, int N>
__device__ inline void make_shifts(float (&shift)[N]) {
  const float weight = pooled && threadIdx.x / 4 % 4 < 3 ? 1.f : 0.f;
#pragma unroll
  for (int i = 0; i < N; ++i) shift[i] = fmaf(shift[i], -1.4426950408889634f, weight);
}
template <int S, int N>
__device__ inline void exponentials(float (&s)[S], const float (&shift)[N], const TopK& a) {
#pragma unroll
  for (int i = 0; i < 2 * N; ++i) s[i] = exp2_approx(fmaf(s[i], a.scale_log2, shift[i / 4 * 2 + i % 2]));
}

// Sums p over heads, and stores scores of the four blocks that begin in keys 16 m to 16 m + 15, or sums of those keys.
// A block's: (p0 + p1) + (p2 + p3), each pair's by one exchange, both pairs' by another; + p[-1], which for the first
// of the four is in another warp, so that every fourth block's is carried to the reader. p0 to p2 have been doubled by
// make_shifts. groups: of 8 columns.
template <bool pooled, int heads, int groups = 16, int N>
__device__ inline void store_scores(const float (&p)[N], float* to, int m, bool add, const TopK& a) {
  const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const bool odd = g & 1, upper = g & 2;  // an odd g ends up with keys 8 to 15, an `upper` one with column 2c + 1
  const bool first = g == 0 || g == 2;    // of the four blocks
  const int from = (odd ? g < 4 ? 6 : 3 : 2) * 4 + c;  // who has the key before the block
  constexpr unsigned last_heads[] = {0, 0xffff, 0xaaaa, 0x4924, 0x8888, 0, 0x820, 0,     0x8080,
                                     0, 0,      0,      0x800,  0,      0, 0,     0x8000};
  const unsigned last_head = heads ? last_heads[heads] : a.last_head;
  to += 2 * c * a.row;
  float* const carried = to + a.blocks + m;
  float* const at = pooled ? to + upper * a.row + 4 * m + 2 * odd + g / 4 : to + 16 * m + g;
  float sum[4] = {0, 0, 0, 0};
  int64_t query = 0;
#pragma unroll
  for (int i = 0; i < groups; ++i) {
#pragma unroll
    for (int x = 0; x < 4; ++x) sum[x] = heads && i % std::max(heads, 1) == 0 ? p[4 * i + x] : sum[x] + p[4 * i + x];
    if (!(last_head >> i & 1)) continue;
    if constexpr (pooled) {
      float pair[2], end[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float own = odd ? sum[2 + e] : sum[e], got = __shfl_xor_sync(~0u, odd ? sum[e] : sum[2 + e], 4);
        pair[e] = own + got;
        end[e] = odd ? own : got;  // where g % 4 is 2 or 3: p3
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

// Column 8i + c of a tile is query c of 8 and head first_head + i % heads. address(column, piece): where 8 elements of
// a column are copied to in shared memory. Columns without a query become zeros.
template <int D, int heads, int threads, class Address>
__device__ inline void load_queries(const bf16* q, int thread, int b, int first_head, int q0, const TopK& a,
                                    const Address& address) {
  constexpr int across = threads / 8;  // of a column
  const int c = thread / across, piece = thread % across, end = min(a.T - q0, a.queries);
  const bf16 *first = q + (int64_t(b) * a.T + q0 + c) * a.ld + first_head * D + piece * 8, *from = first;
  int h = 0, t = c;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
#pragma unroll
    for (int x = 0; x < D / 8; x += across)
      if (piece + x < D / 8) copy16(address(8 * i + c, piece + x), t < end ? from + x * 8 : q, t < end);
    from += D;
    if (++h == (heads ? heads : a.heads)) h = 0, t += 8, from = first += 8 * a.ld;
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
// H200, D 128, 32/8 heads: 0.066 ms at T 4096, 0.163 at 8192, 0.408 at 16384, 1.115 at 32768, 3.40 at 65536 (323
// TFLOP/s), 13.23 at 131072. 64/4 heads: 0.061 ms at 4096, 4.44 at 65536 (495 TFLOP/s), 17.96 at 131072.

template <int D>
struct Sm90 {
  static constexpr int warps = 4;                                                 // that do all but fetch keys
  static constexpr int keys = 64, stages = D > 128 ? 2 : 4, tile = keys * D * 2;  // two blocks fit on an SM
  static constexpr int q = 0, k = std::max(TopK::columns * D * 2, warps*room_bytes), bars = k + stages * tile;
  static constexpr int items = bars + 16 * stages, lists = items + 32, bytes = lists + warps * list_bytes + 1024;
  static_assert(k % 1024 == 0, "wgmma's tiles begin at multiples of 1024");
};

template <int D, bool pooled, int heads>
__global__ void __launch_bounds__(256, 2)
    sm90_kernel(int32_t* indices, const bf16* q, const __grid_constant__ CUtensorMap k_map, const float* lse,
                float* scratch, TopK a, Problem work, int list) {
  begin_kernel();
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
      for (int round = 0, item = blockIdx.x; items.publish(round, item); ++round) {
        int b, q0, head;
        a.locate(item, &b, &q0, &head);
        item = items.draw();  // early, to hide the latency of the counter
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
    for (int round = 0, item; items.receive(round, &item); ++round) {
      int b, q0, head;
      a.locate(item, &b, &q0, &head);
      const int tiles = 2 * ceil_div(a.keys_wanted(q0), 2 * L::keys);
      for (int part = 0; part < a.group && tiles > 0; part += a.heads) {
        const int first_head = head * a.group + part;
        float shift[32], s0[64], s1[64];
        load_lse<heads>(shift, lse, b, first_head, q0, a);
        named_barrier(1, 128);  // columns and scores of before have been read
        load_queries<D, heads, 128>(q, threadIdx.x % 128, b, first_head, q0, a, [&](int column, int piece) {
          return base + L::q + piece / 8 * TopK::columns * 128 + column * 128 + ((piece ^ column) % 8) * 16;
        });
        copies_wait_all();
        shared_visible();
        named_barrier(1, 128);
        make_shifts<pooled>(shift);

        const auto start = [&](float(&s)[64], int n) {
          ring.wait(n);
          wgmma_begin();
          multiply_nt<D, L::keys, TopK::columns>(s, base + L::k + ring.slot(n) * L::tile, base + L::q);
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
                         reinterpret_cast<uint64_t*>(smem + own + L::lists + warp * list_bytes), a);
    }
  }
#else
  __trap();  // code for another architecture, which has sm80's kernels
#endif
}

// f(std::integral_constant<int, N>()): N is `heads` where there is a kernel for so many, else 0.
template <int N = 16, class F>
Kernel with_heads(int heads, const F& f) {
  if constexpr (TopK::has_kernel(N))
    if (heads == N) return f(std::integral_constant<int, N>());
  if constexpr (N > 0) return with_heads<N - 1>(heads, f);
  else return f(std::integral_constant<int, 0>());
}
inline std::string variant(const char* which, int heads) {
  return strf("%s, %d head%s", which, heads, heads == 1 ? "" : "s");
}

// As Items and tensor_map want it: an item for every 128 rows; keys, of which there may be none.
template <int D>
Problem sm90_problem(const TopK& a) {
  AttentionShape shape = {a.B, a.tiles * 128, a.HKV, a.HKV, D, a.ld, int64_t(a.HKV) * D, 0, 0, 0, a.scale};
  shape.keys = std::max(a.keys, 1);
  return Problem(shape);
}
template <int D>
CUtensorMap sm90_keys(const bf16* q, const bf16* k, const TopK& a, const Problem& work) {
  return sm90::tensor_map(a.keys ? k : q, work.ld_kv, a.HKV, D, work.keys, work);
}

template <int D, bool pooled, int heads>
Kernel sm90_launch_heads(cudaStream_t stream, int32_t* indices, const bf16* q, const bf16* k, const float* lse,
                         float* scratch, const TopK& a) {
  const Problem work = sm90_problem<D>(a);
  const CUtensorMap k_map = sm90_keys<D>(q, k, a, work);
  launch(stream, sm90_kernel<D, pooled, heads>,
         {std::min(a.most(), 2 * persistent_blocks(a.most())), 256, Sm90<D>::bytes}, indices, q, k_map, lse, scratch, a,
         work, sm90::next_list());
  static const std::string name = heads ? variant("pooled", heads) : pooled ? "pooled, any heads" : "not pooled";
  return {"sm90", name.c_str(), heads == 0};
}

template <int D, bool pooled>
Kernel sm90_launch(cudaStream_t stream, int32_t* indices, const bf16* q, const bf16* k, const float* lse,
                   float* scratch, const TopK& a) {
  return with_heads(pooled ? a.heads : 0, [&](auto heads) {
    constexpr int n = pooled ? decltype(heads)::value : 0;
    return sm90_launch_heads<D, pooled, n>(stream, indices, q, k, lse, scratch, a);
  });
}

// ------------------------------------------------------------------------------------------------------------- sm_80
// The same with mma.sync. A block is 8 warps; 128 keys stream past at a time, of which a warp owns 16 against all
// columns, and a thread what it owns above; two stages. Scores that are chosen from come to where columns and keys
// were. Blocks take every gridDim-th item.
// H200, D 128, 32/8 heads: 0.099 ms at T 4096, 7.44 at 65536, 27.7 at 131072; shared memory, of which every warp reads
// all columns for its 16 keys, allows 2.6 at 65536.

template <int D>
constexpr int sm80_tiles = std::max((TopK::columns + 2 * 128) * D * 2, 8 * room_bytes);
template <int D>
constexpr int sm80_bytes = sm80_tiles<D> + 8 * list_bytes;
static_assert(sm80_bytes<64> <= small_memory && sm80_bytes<128> <= small_memory, "what every chip of the family has");
static_assert(sm80_bytes<192> <= 163 << 10, "and others");

template <int D, bool pooled>
__global__ void __launch_bounds__(sm80::threads, 1)
    sm80_kernel(int32_t* indices, const bf16* q, const bf16* k, const float* lse, float* scratch, TopK a) {
  begin_kernel();
#ifndef __CUDA_ARCH_FEAT_SM90_ALL  // Hopper has its own
  using namespace sm80;
  constexpr int BN = 128, tile = BN * D * 2;
  extern __shared__ __align__(1024) uint8_t smem[];
  const uint32_t q_tile = shared_base(), k_tiles = q_tile + TopK::columns * D * 2;
  const int warp = threadIdx.x / 32;
  float* scores = scratch + blockIdx.x * a.scores();
  for (int item = blockIdx.x; item < a.items(); item += gridDim.x) {
    int b, q0, head;
    a.locate(item, &b, &q0, &head);
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
      load_queries<D, 0, sm80::threads>(q, threadIdx.x, b, first_head, q0, a,
                                        [&](int column, int c) { return piece<D>(q_tile, column, c); });
      load(0);
      load_lse<0>(shift, lse, b, first_head, q0, a);
      make_shifts<pooled>(shift);
#pragma unroll 1
      for (int j = 0; j < tiles; ++j) {
        if (j + 1 < tiles) load(j + 1), copies_wait<1>();
        else copies_wait<0>();
        __syncthreads();
        sm80::multiply_nt<D, TopK::columns>(s, k_tiles + j % 2 * tile, warp * 16, q_tile);
        __syncthreads();
        exponentials(s, shift, a);
        store_scores<pooled, 0>(s, scores, 8 * j + warp, part > 0, a);
      }
    }
    __syncthreads();
    choose_all<pooled>(indices, scores, b, q0, head, warp, 8, reinterpret_cast<float*>(smem + warp * room_bytes),
                       reinterpret_cast<uint64_t*>(smem + sm80_tiles<D> + warp * list_bytes), a);
  }
#endif
}

template <int D, bool pooled>
Kernel sm80_launch(cudaStream_t stream, int32_t* indices, const bf16* q, const bf16* k, const float* lse,
                   float* scratch, const TopK& a) {
  launch(stream, sm80_kernel<D, pooled>, {a.most(), sm80::threads, sm80_bytes<D>}, indices, q, k, lse, scratch, a);
  return {"sm80", pooled ? "pooled" : "not pooled", !pooled};
}

// ------------------------------------------------------------------------------------------------------------- float
// No effort at speed: a block's 8 warps own 4 queries each of an item's 32, and go through the heads one by one; a lane
// makes the score of one key.

using FloatTile = float[32][129];  // an odd stride: lanes of a warp read different rows

static __device__ void load_tile(FloatTile& to, const float* from, int64_t ld, int valid, int D) {
  for (int i = threadIdx.x; i < 32 * D; i += 256) to[i / D][i % D] = i / D < valid ? from[i / D * ld + i % D] : 0.f;
}
static __device__ float dot(const float* x, const float* y, int D) {
  float sum = 0;
  for (int d = 0; d < D; ++d) sum += x[d] * y[d];
  return sum;
}

static __global__ void __launch_bounds__(256)
    float_kernel(int32_t* indices, const float* q, const float* k, const float* lse, float* scratch, TopK a) {
  begin_kernel();
  __shared__ FloatTile qs, ks;
  __shared__ __align__(16) uint64_t gathered[8][list_bytes / 8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float* scores = scratch + blockIdx.x * a.scores();
  for (int item = blockIdx.x; item < a.items(); item += gridDim.x) {
    int b, q0, head;
    a.locate(item, &b, &q0, &head);
    const int keys = a.keys_wanted(q0);
    for (int h = head * a.group; h < (head + 1) * a.group; ++h)
      for (int k0 = 0; k0 < keys; k0 += 32) {
        const int64_t ld = int64_t(a.HKV) * a.D;
        __syncthreads();
        if (k0 == 0) load_tile(qs, q + (int64_t(b) * a.T + q0) * a.ld + h * a.D, a.ld, a.T - q0, a.D);
        load_tile(ks, k + (int64_t(b) * a.keys + k0) * ld + head * a.D, ld, a.keys - k0, a.D);
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

}  // namespace attention::topk
