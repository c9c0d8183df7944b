// The last step of the selected branch's forward on Hopper, for blocks of 64 keys: joins a query's slots with what it
// sees in block 0, its own block and the one before, which NSA always selects. These are in no list and no slot: all
// queries of a block have the same three, so a block (CTA) keeps them, and full tiles of those queries multiply them as
// they lie. Each of its warpgroups takes tiles of 64 rows of the queries' heads.
//
// H200, T 65536, 32/8 heads, D 128, 16 blocks: 164 us for 16,384 queries of 2 KV heads, DRAM 71 % busy. A ring of
// blocks for a block (CTA) that walks several, slots prefetched to L2 or fetched half a row ahead: no faster
// (results/gpu-tests-2026-11-28.log).
#pragma once

#include "attention/selected_sm90.cuh"

namespace attention::selected::sm90 {

template <int D, int DV>
struct Near {
  static constexpr int groups = D > 128 ? 2 : 4, threads = groups * 128;
  static constexpr int stride = near_slots + 4;  // of a row's weights: its slots', and that of the three blocks
  static constexpr int k = 0, v = k + near_blocks * N * D * 2, q = v + near_blocks * N * DV * 2, q_tile = M * D * 2;
  static constexpr int weights = q + groups * q_tile,
                       info = weights + groups * M * stride * 4;  // [groups][words, lse][M]
  static constexpr int bytes = info + groups * 2 * M * 4 + 1024;
};

static __device__ uint4 no_slot;  // zeros, which a lane reads where there is no slot: so no load waits for a branch

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// What two rows of a thread have seen of some blocks: softmax's output before its division, and what it takes to go on.
template <int DV>
struct Seen {
  float x[DV / 2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};

  // A block more. keys[r]: how many of its keys row r sees, from the first on.
  template <int D, bool fresh>
  __device__ void add(uint32_t q_tile, uint32_t k_tile, uint32_t v_tile, const int (&keys)[2], float scale_log2) {
    float s[N / 2];
    wgmma_begin();
    multiply_nt<D, M, N>(s, q_tile, k_tile);
    wgmma_commit();
    wgmma_wait<0>();
    pin(s);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int most = keys[r] - int(threadIdx.x) % 4 * 2;
      float high = top[r];
#pragma unroll
      for (int e = 0; e < N / 4; ++e) {
        float& y = s[e / 2 * 4 + 2 * r + e % 2];
        if (e / 2 * 8 + e % 2 >= most) y = -INFINITY;
        high = fmaxf(high, y);
      }
      high = row_max(high);
      const float shift = high == -INFINITY ? 0 : high * scale_log2;
      const float factor = exp2_approx(fmaf(top[r], scale_log2, -shift));
      top[r] = high, sum[r] *= factor;
      if (!fresh) {
#pragma unroll
        for (int e = 0; e < DV / 4; ++e) x[e / 2 * 4 + 2 * r + e % 2] *= factor;
      }
#pragma unroll
      for (int e = 0; e < N / 4; ++e) {
        float& y = s[e / 2 * 4 + 2 * r + e % 2];
        y = exp2_approx(fmaf(y, scale_log2, -shift));
        sum[r] += y;
      }
    }
    uint32_t p[N / 4];
    pack_rows(p, s);
    pin(p);
    if (!fresh) pin(x);
    wgmma_begin();
    if constexpr (fresh) multiply_nn_fresh<DV>(x, p, v_tile);
    else multiply_nn<DV, N>(x, p, v_tile);
    wgmma_commit();
    wgmma_wait<0>();
    pin(x), pin(p);
  }
};
#endif

// o and lse of a launch's queries. The three blocks come first, rounded as a slot is, then a query's slots in the order
// of its ranks.
template <int D, int DV>
__global__ void __launch_bounds__(Near<D, DV>::threads, 1)
    near_and_merge(bf16* o, float* lse, const bf16* slot_rows, const float* slot_lse, const bf16* q, const bf16* k,
                   const bf16* v, Problem a, int pair0, int segment) {
  begin_kernel();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using L = Near<D, DV>;
  const int s0 = a.first_query(segment), blocks = ceil_div(a.last_query(segment) - s0, N);
  const int pair = blockIdx.x / blocks, own = s0 / N + blockIdx.x % blocks, t0 = own * N;
  const int b = (pair0 + pair) / a.HKV, head = (pair0 + pair) % a.HKV, wg = warpgroup_index();
  const int thread = threadIdx.x % 128, warp = thread / 32, lane = thread % 32;
  const uint32_t base = shared_base(), q_tile = base + L::q + wg * L::q_tile;
  const uint32_t weights = base + L::weights + wg * M * L::stride * 4, info = base + L::info + wg * 2 * M * 4;
  const int64_t row0 = int64_t(b) * a.T;
  q += (row0 + t0) * a.ld + head * a.group * D;
  const auto slot_of = [&](int query, int g) {  // the first of a query's head
    return (int64_t(pair) * a.segment + t0 - s0 + query) * a.slots * a.group + g;
  };

  // Block 0 where it is neither of the others, the one before if there is one, the queries' own. What is not there is
  // zero.
  const auto load_blocks = [&](uint32_t to, const bf16* from, auto width) {
    constexpr int W = decltype(width)::value, pieces = W / 8;
    from += row0 * a.ld + head * W;
    for (int x = threadIdx.x; x < near_blocks * N * pieces; x += L::threads) {
      const int i = x / (N * pieces), r = x / pieces % N, c = x % pieces, key = (i == 0 ? 0 : own - 2 + i) * N + r;
      const bool there = own + i >= 2 && key < a.T;
      copy16(piece_at(to + i * N * W * 2, r, c), there ? from + key * a.ld + c * 8 : from, there);
    }
  };
  const auto load_queries = [&](int n) {
    for (int x = thread; x < M * D / 8; x += 128) {
      const int r = x / (D / 8), c = x % (D / 8), row = n * M + r, query = a.by_group(row), g = row - query * a.group;
      const bool there = t0 + query < a.T;
      copy16(piece_at(q_tile, r, c), there ? q + query * a.ld + g * D + c * 8 : q, there);
    }
    copies_commit();
  };
  // Two lanes share a row: which of the three blocks its query chose, and the lse of its slots, on their way to
  // weights.
  constexpr int each = near_slots / 2;
  const int mine = warp * 16 + lane / 2;
  const uint32_t my_weights = weights + (mine * L::stride + lane % 2 * each) * 4;
  const auto load_choice = [&](int n) {
    const int query = a.by_group(n * M + mine), t = t0 + query;
    const float* const of_slots = slot_lse + slot_of(query, n * M + mine - query * a.group);
    const int32_t* chosen = a.indices + (int64_t(pair0 + pair) * a.T + t) * a.n;
    int near = 0;
    float l[each];
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int r = lane % 2 * each + i, j = t < a.T && r < a.slots ? chosen[r] : -1;
      const bool seen = j >= 0 && j <= own, is_near = seen && a.is_near(j, t);
      if (is_near) near |= j == own ? 4 : j == own - 1 ? 2 : 1;
      l[i] = seen && !is_near ? of_slots[r * a.group] : -INFINITY;
    }
    near |= __shfl_xor_sync(~0u, near, 1);
    if (lane % 2 == 0) store_shared(info + mine * 4, near | query << 3);
#pragma unroll
    for (int i = 0; i < each; ++i) store_shared(my_weights + i * 4, l[i]);
  };
  load_blocks(base + L::k, k, std::integral_constant<int, D>());
  load_blocks(base + L::v, v, std::integral_constant<int, DV>());
  if (wg < a.group) load_queries(wg), load_choice(wg);
  copies_wait<0>();
  shared_visible();
  __syncthreads();

#pragma unroll 1
  for (int n = wg; n < a.group; n += L::groups) {
    if (n != wg) {
      named_barrier(1 + wg, 128);  // the rows before have been read
      load_queries(n), load_choice(n);
      copies_wait<0>();
      shared_visible();
      named_barrier(1 + wg, 128);
    }
    const int r0 = warp * 16 + lane / 4, words[2] = {load_shared(info + r0 * 4), load_shared(info + r0 * 4 + 32)};
    Seen<DV> seen;
    const auto add = [&](auto block) {
      constexpr int i = decltype(block)::value;
      int keys[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) keys[r] = words[r] >> i & 1 ? i == 2 ? (words[r] >> 3) + 1 : N : 0;
      seen.template add<D, i == 0>(q_tile, base + L::k + i * N * D * 2, base + L::v + i * N * DV * 2, keys,
                                   a.scale_log2);
    };
    add(std::integral_constant<int, 0>()), add(std::integral_constant<int, 1>()), add(std::integral_constant<int, 2>());
    float f[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float sum = row_sum(seen.sum[r]);
      f[r] = sum > 0 ? __fdividef(1, sum) : 0;
      if (lane % 4 == 0)
        store_shared(info + (M + r0 + 8 * r) * 4, sum > 0 ? fmaf(seen.top[r], a.scale_log2, __log2f(sum)) : -INFINITY);
    }
    named_barrier(1 + wg, 128);  // everybody has left the queries: their rows' outputs take their place
#pragma unroll
    for (int e = 0; e < DV / 16; ++e) {
      const float* x = seen.x + 8 * e;
      hopper::store_matrices(piece_at(q_tile, warp * 16 + lane % 16, 2 * e + lane / 16),
                             pack_bf16(x[0] * f[0], x[1] * f[0]), pack_bf16(x[2] * f[1], x[3] * f[1]),
                             pack_bf16(x[4] * f[0], x[5] * f[0]), pack_bf16(x[6] * f[1], x[7] * f[1]));
    }
    {
      const int query = load_shared(info + mine * 4) >> 3, t = t0 + query;
      const float near = load_shared_float(info + (M + mine) * 4);
      float l[each], most = near, total = 0;
#pragma unroll
      for (int i = 0; i < each; ++i) l[i] = load_shared_float(my_weights + i * 4), most = fmaxf(most, l[i]);
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      const float shift = most == -INFINITY ? 0 : most, of_near = exp2_approx(near - shift);
#pragma unroll
      for (int i = 0; i < each; ++i) l[i] = exp2_approx(l[i] - shift), total += l[i];
      total += __shfl_xor_sync(~0u, total, 1);
      total += of_near;
      const float scale = total > 0 ? __fdividef(1, total) : 0;
#pragma unroll
      for (int i = 0; i < each; ++i) store_shared(my_weights + i * 4, l[i] * scale);
      if (lane % 2 == 0) {
        store_shared(my_weights + near_slots * 4, of_near * scale);
        if (t < a.T)
          lse[(int64_t(b) * a.H + head * a.group + n * M + mine - query * a.group) * a.T + t] =
              total > 0 ? (shift + __log2f(total)) * 0.6931471805599453f : -INFINITY;
      }
    }
    __syncwarp();
    // A lane joins 8 columns of a row at a time.
    constexpr int across = DV / 8, together = 8;
#pragma unroll 1
    for (int at = lane; at < 16 * across; at += 32) {
      const int r = warp * 16 + at / across, c = at % across, row = n * M + r;
      const int query = a.by_group(row), g = row - query * a.group;
      const bf16* from = slot_rows + slot_of(query, g) * DV + c * 8;
      const uint32_t w_at = weights + r * L::stride * 4;
      float sum[8] = {};
      add_scaled(sum, load_shared_float(w_at + near_slots * 4), load_shared4(piece_at(q_tile, r, c)));
#pragma unroll
      for (int i0 = 0; i0 < near_slots; i0 += together) {
        uint4 y[together];
        float w[together];
#pragma unroll
        for (int i = 0; i < together; i += 4) {
          const uint4 four = load_shared4(w_at + (i0 + i) * 4);
          w[i] = __uint_as_float(four.x), w[i + 1] = __uint_as_float(four.y);
          w[i + 2] = __uint_as_float(four.z), w[i + 3] = __uint_as_float(four.w);
        }
#pragma unroll
        for (int i = 0; i < together; ++i)
          y[i] = __ldcs(w[i] != 0 ? reinterpret_cast<const uint4*>(from + (i0 + i) * a.group * DV) : &no_slot);
#pragma unroll
        for (int i = 0; i < together; ++i) add_scaled(sum, w[i], y[i]);
      }
      if (t0 + query < a.T)
        *reinterpret_cast<uint4*>(o + ((row0 + t0 + query) * a.H + head * a.group + g) * DV + c * 8) = {
            pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7])};
    }
  }
#else
  __trap();  // code for another architecture, which has merge_slots
#endif
}

}  // namespace attention::selected::sm90
