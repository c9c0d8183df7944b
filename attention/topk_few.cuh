// Choosing among 32 blocks or fewer on sm_90: up to 2,048 tokens in blocks of 64. A tile's scores are so few that they
// stay in shared memory, and a query's that a lane has one. There is little to compute and nothing to hide it behind:
// tiles are small, so that all of a short sequence's run at once, and a block of threads makes one.
//
// The products, their order and the sums are those of topk_kernels.cuh, and so is every bit of the scores.
#pragma once

#include "attention/topk_kernels.cuh"

namespace attention::topk {

// What the tile of a block of threads is. groups: of 8 columns, those that have a query.
template <int D, int heads>
struct Few {
  static constexpr int columns = heads > 8 ? 128 : 64, queries = columns / 8 / heads * 8, groups = queries / 8 * heads;
  static constexpr int threads = 128, blocks = 32, row = blocks + blocks / 4;  // as TopK has them
  static constexpr int keys = 64, tile = keys * D * 2, most_tiles = blocks * 4 / keys;
  static constexpr int q = 0, k = columns * D * 2, scores = k + most_tiles * tile, bar = scores + queries * row * 4;
  static constexpr int bytes = bar + 16 + 1024;
};

// A warp writes the list of query t: the blocks that are always selected, and the best of the rest. row: its scores and
// what is carried to them, where the scores become comparable numbers.
__device__ inline void choose_few(int32_t* list, int t, float* row, const TopK& a) {
  const int lane = threadIdx.x % 32, n = a.n, cur = t / a.select_block, wanted = n - 3;
  if (cur < n) {
    for (int i = lane; i < n; i += 32) list[i] = i <= cur ? i : -1;
    return;
  }
  if (lane < 3) list[lane == 0 ? 0 : n - lane] = lane == 0 ? 0 : cur + 1 - lane;
  const unsigned x = OfBlocks(row, 32).one(lane, cur - 2);
  unsigned* const numbers = reinterpret_cast<unsigned*>(row);
  numbers[lane] = x;
  __syncwarp();
  int before = 0;  // numbers that are larger, or equal and of a lower block
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    const uint4 y = *reinterpret_cast<const uint4*>(numbers + i);
    before += (y.x > x || (y.x == x && i < lane)) + (y.y > x || (y.y == x && i + 1 < lane)) +
              (y.z > x || (y.z == x && i + 2 < lane)) + (y.w > x || (y.w == x && i + 3 < lane));
  }
  const bool taken = before < wanted;
  const unsigned lanes = __ballot_sync(~0u, taken);
  if (taken) list[1 + __popc(lanes & ((1u << lane) - 1))] = lane;
}

// H200, D 64, 12/2 heads, T 2048: 5.7 us in a step of m7c, 51 with batch 16, where the persistent blocks took 13 and
// 126.
template <int D, int heads>
__global__ void __launch_bounds__(Few<D, heads>::threads)
    few_kernel(int32_t* indices, const bf16* q, const __grid_constant__ CUtensorMap k_map, const float* lse, TopK a) {
  begin_kernel();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using namespace sm90;
  using L = Few<D, heads>;
  extern __shared__ uint8_t smem[];
  const uint32_t base = shared_base();
  float* const scores = reinterpret_cast<float*>(smem + (base - uint32_t(__cvta_generic_to_shared(smem))) + L::scores);
  const int warp = threadIdx.x / 32;
  int b, q0, head;
  a.locate(int(blockIdx.x), &b, &q0, &head);
  const int tiles = ceil_div(a.keys_wanted(q0), L::keys);
  if (tiles > 0) {
    if (threadIdx.x == 0) {
      barrier_init(base + L::bar, 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      barrier_expect(base + L::bar, tiles * L::tile);
      for (int j = 0; j < tiles; ++j)
        sm90::load_tile<L::keys, D>(base + L::k + j * L::tile, k_map, base + L::bar, j * L::keys, head, b);
    }
    // Column 8i + c is query c of 8 and head i % heads, as load_queries has it.
    const bf16* const first = q + (int64_t(b) * a.T + q0) * a.ld + head * heads * D;
#pragma unroll
    for (int i = 0; i < L::columns * D / 8 / L::threads; ++i) {
      const int x = i * L::threads + threadIdx.x, column = x / (D / 8), piece = x % (D / 8);
      const int t = column / 8 / heads * 8 + column % 8, h = column / 8 % heads;
      const bool valid = column < 8 * L::groups && q0 + t < a.T;
      const uint32_t to = base + L::q + piece / 8 * L::columns * 128 + column * 128 + ((piece ^ column) % 8) * 16;
      copy16(to, valid ? first + t * a.ld + h * D + piece * 8 : q, valid);
    }
    float shift[2 * L::groups], s[L::columns / 2];
    load_lse<heads>(shift, lse, b, head * heads, q0, a);
    copies_wait_all();
    shared_visible();
    make_shifts<true>(shift);
    __syncthreads();
    barrier_wait(base + L::bar, 0);
#pragma unroll 1
    for (int j = 0; j < tiles; ++j) {
      wgmma_begin();
      multiply_nt<D, L::keys, L::columns>(s, base + L::k + j * L::tile, base + L::q);
      wgmma_commit();
      wgmma_wait<0>();
      pin(s);
      exponentials(s, shift, a);
      store_scores<true, heads, L::groups>(s, scores, 4 * j + warp, /*add=*/false, a);
    }
    __syncthreads();
  }
  let_next_in();
  indices += ((int64_t(b) * a.HKV + head) * a.T + q0) * a.n;
#pragma unroll 2
  for (int r = warp; r < L::queries; r += L::threads / 32)
    if (q0 + r < a.T) choose_few(indices + int64_t(r) * a.n, q0 + r, scores + r * L::row, a);
#else
  __trap();  // code for another architecture, which has sm80's kernels
#endif
}

template <int D, int heads>
Kernel few_launch_heads(cudaStream_t stream, int32_t* indices, const bf16* q, const bf16* k, const float* lse, TopK a) {
  using L = Few<D, heads>;
  a.queries = L::queries, a.tiles = ceil_div(a.T, L::queries);
  ASSERT(a.blocks == L::blocks && a.row == L::row && a.heads == heads);
  launch(stream, few_kernel<D, heads>, {unsigned(a.items()), L::threads, L::bytes}, indices, q,
         sm90_keys<D>(q, k, a, sm90_problem<D>(a)), lse, a);
  static const std::string name = variant("few blocks", heads);
  return {"sm90", name.c_str()};
}

template <int D>
Kernel few_launch(cudaStream_t stream, int32_t* indices, const bf16* q, const bf16* k, const float* lse,
                  const TopK& a) {
  return with_heads(a.heads, [&](auto heads) -> Kernel {
    constexpr int n = decltype(heads)::value;
    if constexpr (n > 0) return few_launch_heads<D, n>(stream, indices, q, k, lse, a);
    else throw Error(strf("internal error: nsa_topk: no kernel of few blocks for %d heads", a.heads));
  });
}

}  // namespace attention::topk
