// Attention's backward on Hopper in one kernel, to causal and to compressed keys: five products, where the pair
// (sm90_backward_pair.cuh) does seven.
//
// A block owns 128 keys of one KV head and walks queries that see them, 128 at a time (dq_order.h); a consumer thread
// owns parts of two keys' rows. S^T = K Q^T, P^T = exp(S^T - lse), dV += P^T dO, dP^T = V dO^T, dS^T = P^T (dP^T -
// delta), dK += dS^T Q, all as in the pair, but with products 128 wide: one of 64 with both operands in shared memory
// reads it as fast as it can be read. dS^T goes to shared memory too, for dQ = dS K contracts over both warpgroups'
// keys: each makes that of 64 queries.
//
// Registers: dK and dV of 128 columns leave room for one more result, which is S, dP and dQ in turn. P waits for dP in
// fp16, times 2^15, which is exact to 2^-12 down to 2e-9; what is made of it leaves without that factor. With 64
// columns there is room for two results: P stays as it is, and a step's dQ is made in the next step, when the other
// warpgroup's dS has long been there.
//
// The second warpgroup begins its exponentials when the first is through with its own: so each has the tensor cores
// while the other computes. Both at once was 6 to 8 % slower (results/gpu-tests-2026-11-27.log).
//
// dQ's summands are added in memory, in fp32 and in the order of keys. A warpgroup leaves its summand in shared memory;
// a warp of the first warpgroup hands it to TMA when it is its turn, and counts it when it has arrived. The sums lie in
// the order in which threads hold them. The block whose summand is the last of a tile scales the sum and writes it as
// bf16, when its walk is over.
//
// H200, compressed keys 32/16, T 65536, 32/8 heads, D 128: 9.75 ms at full clocks, 560 TFLOP/s, 13.3 ms in a step; L2,
// where dQ is added, is 77 % busy (results/gpu-tests-2026-11-28.log).
//
// The mask may let queries choose blocks of keys (selected_masked.cuh): then words of bits come with the tiles, and dQ
// is added to what is there already.
#pragma once

#include <type_traits>

#include "attention/dq_order.h"
#include "attention/sm90.cuh"

namespace attention::sm90 {

template <int D>
struct Backward {
  static constexpr bool narrow = D == 64;
  static constexpr int p_shift = narrow ? 0 : 15;  // P comes times 2^p_shift
  static constexpr float unscale = 1.f / (1 << p_shift);
  static constexpr int BM = DqOrder::rows, BN = DqOrder::rows, q_stages = 2, do_stages = narrow ? 2 : 1;
  static constexpr int tile = BM * D * 2, dq_bytes = 64 * D * 4;
  static constexpr int k = 0, v = k + BN * D * 2, q = v + BN * D * 2, d_o = q + q_stages * tile;
  static constexpr int ds = d_o + do_stages * tile;  // a tile of BN keys x BM queries
  // A warpgroup's dQ on its way to memory. With 128 columns the second's takes dS's place.
  static constexpr int dq0 = ds + BN * BM * 2, dq1 = narrow ? dq0 + dq_bytes : ds;
  static constexpr int lse = dq0 + (narrow ? 2 : 1) * dq_bytes, delta = lse + q_stages * BM * 4;
  static constexpr int words = delta + do_stages * BM * 4, bars = words + q_stages * 32;
  static constexpr int word = bars + 16 * (q_stages + do_stages + 1) + 8 * 5;
  static constexpr int bytes = word + 16;  // nothing for alignment: with 128 columns a block has no more to give
  static_assert(bytes <= 227 * 1024);
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ inline unsigned load_acquire(const unsigned* p) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
// From shared memory: a sum's first summand, or another.
__device__ inline void bulk_put(float* to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}
__device__ inline void bulk_add(float* to, uint32_t from, int bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
__device__ inline void proxy_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }
__device__ inline void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ inline void store_shared4(uint32_t at, const float* x) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
}
// threadIdx.x once more, so that what follows from it takes no register through a loop.
__device__ inline int thread_index() {
  int t;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
  return t;
}
#endif

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// dK and dV that go from block to block: where a thread of the consumers' has its numbers of a chain's dK, which are 4
// each, 512 apart, and of its dV, 128 D further; and how often the chain has been carried.
template <int D, class Order>
__device__ inline float* carried_at(const Order& order, int chain, float* sums) {
  const int thread = int(threadIdx.x) - 128;
  return sums + order.sums_of_dq(D) + int64_t(chain) * 2 * Order::rows * D + thread / 128 * 64 * D + thread % 128 * 4;
}
template <class Order>
__device__ inline unsigned* chain_count(const Order& order, int chain, unsigned* counts) {
  return counts + 2 * order.slots() + 1 + chain;
}
template <int D, class Order>
__device__ inline void add_carried(float (&dk)[D / 2], float (&dv)[D / 2], const Order& order, int chain, int times,
                                   float* sums, unsigned* counts) {
  if (threadIdx.x % 32 == 0)
    while (load_acquire(chain_count(order, chain, counts)) != unsigned(times)) {}
  __syncwarp();
  const float* from = carried_at<D>(order, chain, sums);
#pragma unroll
  for (int e = 0; e < D / 2; e += 4) {
    const float4 x = __ldcg(reinterpret_cast<const float4*>(from + e * 128));
    const float4 y = __ldcg(reinterpret_cast<const float4*>(from + Order::rows * D + e * 128));
    dk[e] += x.x, dk[e + 1] += x.y, dk[e + 2] += x.z, dk[e + 3] += x.w;
    dv[e] += y.x, dv[e + 1] += y.y, dv[e + 2] += y.z, dv[e + 3] += y.w;
  }
}
// Who counts it does so behind a barrier of all.
template <int D, class Order>
__device__ inline void carry(const float (&dk)[D / 2], const float (&dv)[D / 2], const Order& order, int chain,
                             float* sums) {
  float* to = carried_at<D>(order, chain, sums);
#pragma unroll
  for (int e = 0; e < D / 2; e += 4) {
    *reinterpret_cast<float4*>(to + e * 128) = {dk[e], dk[e + 1], dk[e + 2], dk[e + 3]};
    *reinterpret_cast<float4*>(to + Order::rows * D + e * 128) = {dv[e], dv[e + 1], dv[e + 2], dv[e + 3]};
  }
  __threadfence();
}

// Undoes rotary positions of a warpgroup's 64 rows, those of positions t and on, of each of n results, of which a
// thread has D / 2 numbers. table (T,D/2,2): as ops::rope_table makes it.
template <int D, int n>
__device__ inline void turn_back(float (&d)[n][D / 2], const float* table, int t, int T) {
  const int lane = threadIdx.x % 32;
  t += threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float4* at = reinterpret_cast<const float4*>(table) + int64_t(min(t + 8 * half, T - 1)) * (D / 4) + lane % 4;
#pragma unroll
    for (int e = 2 * half; e < D / 4; e += 4) {
      const float4 turn = __ldg(at + e / 4 * 4);  // cos and sin of two pairs
#pragma unroll
      for (int c = 0; c < n; ++c) {
        float &a = d[c][e], &b = d[c][e + D / 4], &x = d[c][e + 1], &y = d[c][e + 1 + D / 4];
        const float low = a * turn.x + b * turn.y, next = x * turn.z + y * turn.w;
        b = b * turn.x - a * turn.y, y = y * turn.z - x * turn.w;
        a = low, x = next;
      }
    }
  }
}
template <int D>
__device__ inline void turn_back(float (&d)[D / 2], const float* table, int t, int T) {
  turn_back<D, 1>(reinterpret_cast<float(&)[1][D / 2]>(d), table, t, T);
}
#endif

// Maps of q, do, dq (B,T,H,D), k, v, dk, dv (B,keys,HKV,D); lse2 and delta (B,H,Tp); sums: order.sums(D) numbers, first
// order.slots() tiles of 128 x D; counts: two for each, behind them the number of blocks begun, and what the order has
// besides, all 0. turns: dq, with what is added to it, and dk leave without the rotary positions of q and k; rotary:
// their table.
template <int D, class Mask, class Order, bool turns>
__global__ void __launch_bounds__(384, 1)
    backward_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                    const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap do_map,
                    const __grid_constant__ CUtensorMap dq_map, const __grid_constant__ CUtensorMap dk_map,
                    const __grid_constant__ CUtensorMap dv_map, const float* lse2, const float* delta, Problem a,
                    Mask mask, Order order, float* sums, unsigned* counts, const float* rotary) {
  begin_kernel();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using L = Backward<D>;
  constexpr bool narrow = L::narrow;
  constexpr int BM = L::BM, BN = L::BN, tile = L::tile;
  uint32_t base = shared_base();
  Ring<L::q_stages> q_ring(base + L::bars);
  Ring<L::do_stages> do_ring(q_ring.full + q_ring.bytes);
  Ring<1> kv_ring(do_ring.full + do_ring.bytes);
  // Of each warpgroup: its dQ lies in shared memory; it has been read there. Of both: all is in memory.
  const uint32_t staged = kv_ring.full + kv_ring.bytes, drained = staged + 16, added = drained + 16;
  if (threadIdx.x == 0) {
    q_ring.init(consumers), do_ring.init(consumers), kv_ring.init(consumers);
    for (int w = 0; w < 2; ++w) barrier_init(staged + 8 * w, 4), barrier_init(drained + 8 * w, 1);
    barrier_init(added, 2);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    int n;
    DqItem drawn;
    do n = int(atomicAdd(counts + 2 * order.slots(), 1u));  // blocks start in any order
    while (!order.locate(n, &drawn));
    store_shared(base + L::word, n);
  }
  __syncthreads();

  const auto located = [&] {  // again where it is wanted again, so that it takes no registers through a loop
    DqItem x;
    order.locate(__shfl_sync(~0u, load_shared(base + L::word), 0), &x);
    return x;
  };
  DqItem item = located();
  const int k0 = item.j * BN, steps = order.steps(item);
  const auto sequence = [&] { return order.pair(item.unit) / a.HKV; };
  const auto kv_head = [&] { return order.pair(item.unit) % a.HKV; };
  const auto first_head = [&] { return kv_head() * a.group + order.first_head(item.unit); };
  int i = order.tile(item, 0), g = 0;  // a step's queries and head
  auto next = [&] {
    if (++g == order.heads) g = 0, --i;
  };
  // Of warpgroup w's half of the tile of dQ of head g and queries i: its count, and its sum.
  const int first_slot = order.first_slot(item);
  auto slot = [&](int g, int i) { return first_slot + g * order.slots_of_head() + i; };
  auto count_at = [&](int w, int g, int i) { return counts + 2 * slot(g, i) + w; };
  auto sum_at = [&](int w, int g, int i) { return sums + (2ll * slot(g, i) + w) * (64 * D); };

  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    fewer_registers<24>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
      const int head = kv_head(), h0 = first_head(), b = sequence();
      uint32_t bar = kv_ring.acquire(0, 2 * BN * D * 2);
      load_tile<BN, D>(base + L::k, k_map, bar, k0, head, b);
      load_tile<BN, D>(base + L::v, v_map, bar, k0, head, b);
      for (int n = 0; n < steps; ++n, next()) {
        const int h = h0 + g;
        const int64_t stats = int64_t(b * a.H + h) * a.Tp + i * BM;
        int slot = q_ring.slot(n);
        bar = q_ring.acquire(n, tile + BM * 4 + (Mask::chooses ? 32 : 0));
        load_tile<BM, D>(base + L::q + slot * tile, q_map, bar, i * BM, h, b);
        bulk_load(base + L::lse + slot * BM * 4, lse2 + stats, BM * 4, bar);
        if constexpr (Mask::chooses)
          for (int e = 0; e < 2; ++e)
            bulk_load(base + L::words + slot * 32 + e * 16, mask.words_at(b, head, 2 * i + e, item.j * 2), 16, bar);
        slot = do_ring.slot(n);
        bar = do_ring.acquire(n, tile + BM * 4);
        load_tile<BM, D>(base + L::d_o + slot * tile, do_map, bar, i * BM, h, b);
        bulk_load(base + L::delta + slot * BM * 4, delta + stats, BM * 4, bar);
      }
    } else if ((warp == 1 || warp == 2) && threadIdx.x % 32 == 0) {  // adds a warpgroup's dQ, when it is its turn
      const int w = warp - 1;
      const auto before = order.before(item);
      const int finishes = order.finishes(item);
      for (int n = 0; n < steps; ++n, next()) {
        const unsigned turn = before(i);
        unsigned* const count = count_at(w, g, i);
        barrier_wait(staged + 8 * w, n & 1);
        while (load_acquire(count) != turn) {}
        proxy_fence();
        const uint32_t from = base + (w ? L::dq1 : L::dq0);
        if (item.j == 0) bulk_put(sum_at(w, g, i), from, L::dq_bytes);
        else bulk_add(sum_at(w, g, i), from, L::dq_bytes);
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        store_wait();
        barrier_arrive(drained + 8 * w);
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
        proxy_fence();
        if (n < finishes) {  // the last is counted further down
          __threadfence();
          atomicAdd(count, 1u);
        }
      }
      barrier_arrive(added);
    }
  } else {
    more_registers<240>();
    const int wg = warpgroup - 1, j0 = k0 + wg * 64;
    const uint32_t k_rows = base + L::k + wg * 64 * 128, v_rows = base + L::v + wg * 64 * 128;

    // s: S^T, and P^T with 64 columns. x: dP^T, then dQ. With 128 columns they are one, and half of it P^T in bf16
    // between S^T and dP^T. h: P^T in fp16, or with 64 columns in bf16; then dS^T in bf16.
    float x[BM / 2], more[BM / 2], dk[D / 2], dv[D / 2];
    float(&s)[BM / 2] = narrow ? more : x;
    float(&dq)[D / 2] = reinterpret_cast<float(&)[D / 2]>(x);
    uint32_t h[BM / 4];
#pragma unroll
    for (int e = 0; e < D / 2; ++e) dk[e] = dv[e] = 0;
    if constexpr (Order::carries) {
      const int before = order.chunks_before(item);
      if (before > 0) add_carried<D>(dk, dv, order, order.chain(item.unit, item.j), before, sums, counts);
    }
    pin(dk), pin(dv);

    auto start_scores = [&](int n) {
      q_ring.wait(n);
      wgmma_begin();
      multiply_nt<D, BN, BM>(s, k_rows, base + L::q + q_ring.slot(n) * tile);
      wgmma_commit();
    };
    auto start_dp = [&](int n) {
      wgmma_begin();
      multiply_nt<D, BN, BM>(x, v_rows, base + L::d_o + do_ring.slot(n) * tile);
      wgmma_commit();
    };
    auto hide_scores = [&](int n, int m) {            // of step n, query tile m: of keys that queries do not see
      auto hide = [&](const auto& rule, auto half) {  // of 64 queries
        const int lane = thread_index() % 32, j = j0 + thread_index() / 32 % 4 * 16 + lane / 4;  // keys j and j + 8
#pragma unroll
        for (int e = 0; e < BM / 4; ++e)
          if (!rule.visible(m * BM + half * 64 + e / 4 * 8 + lane % 4 * 2 + e % 2, j + e / 2 % 2 * 8))
            s[half * (BM / 4) + e] = -INFINITY;
      };
      constexpr std::integral_constant<int, 0> first = {};
      constexpr std::integral_constant<int, 1> second = {};
      if (!mask.whole(m * BM, (m + 1) * BM, j0, j0 + 64)) hide(mask, first), hide(mask, second);
      if constexpr (Mask::chooses) {
        const uint32_t words = base + L::words + q_ring.slot(n) * 32 + wg * 8;
        const auto of_first = chosen_of<Mask, 1>(words), of_second = chosen_of<Mask, 1>(words + 16);
        if (!of_first.whole()) hide(of_first, first);
        if (!of_second.whole()) hide(of_second, second);
      }
    };
    auto probabilities = [&](int n) {
      const uint32_t at = base + L::lse + q_ring.slot(n) * BM * 4 + thread_index() % 4 * 8;
#pragma unroll
      for (int e = 0; e < BM / 8; ++e) {
        const float2 l = load_shared2(at + e * 32);
        uint32_t p[2];
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          float &y = s[4 * e + 2 * c], &z = s[4 * e + 2 * c + 1];
          y = exp2_approx(fmaf(y, a.scale_log2, narrow ? -l.x : L::p_shift - l.x));  // 0 - x would be an instruction
          z = exp2_approx(fmaf(z, a.scale_log2, narrow ? -l.y : L::p_shift - l.y));
          p[c] = pack_bf16(y, z);
          h[2 * e + c] = narrow ? p[c] : pack_half(y, z);
        }
        if constexpr (!narrow)  // where wgmma wants an operand of 16 queries: 4 registers of their 8
          s[e / 2 * 8 + e % 2 * 2] = __uint_as_float(p[0]), s[e / 2 * 8 + e % 2 * 2 + 1] = __uint_as_float(p[1]);
      }
    };
    auto accumulate_v = [&](int n) {
      const uint32_t rows = tile_word(base + L::d_o + do_ring.slot(n) * tile, BM * 128);
      if constexpr (narrow) {
        pin(h);
      } else {
#pragma unroll
        for (int e = 0; e < BM / 2; ++e)
          if (e % 8 < 4) asm volatile("" : "+f"(s[e])::"memory");
      }
      wgmma_begin();
#pragma unroll
      for (int e = 0; e < BM / 16; ++e) {
        uint32_t p[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) p[c] = narrow ? h[4 * e + c] : __float_as_uint(s[8 * e + c]);
        wgmma_nn<false>(dv, p, descriptor(rows, e * 16 * 128));
      }
      wgmma_commit();
    };
    auto make_ds = [&](int n) {
      const uint32_t at = base + L::delta + do_ring.slot(n) * BM * 4 + thread_index() % 4 * 8;
#pragma unroll
      for (int e = 0; e < BM / 8; ++e) {
        const float2 r = load_shared2(at + e * 32);
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int at_x = 4 * e + 2 * c;
          const float2 p = narrow ? make_float2(s[at_x], s[at_x + 1]) : unpack_half(h[2 * e + c]);
          h[2 * e + c] = pack_bf16(p.x * (x[at_x] - r.x), p.y * (x[at_x + 1] - r.y));
        }
      }
    };
    auto accumulate_k = [&](int n) {
      pin(h);
      wgmma_begin();
      multiply_nn<D, BM>(dk, h, base + L::q + q_ring.slot(n) * tile);
      wgmma_commit();
    };
    auto store_ds = [&] {  // this warpgroup's rows of the tile
      const int lane = thread_index() % 32, row = thread_index() / 32 % 4 * 16 + lane % 16;
      const uint32_t to = base + L::ds + (wg * 64 + row) * 128 + ((lane / 16) ^ (row % 8)) * 16;
#pragma unroll
      for (int e = 0; e < BM / 8; e += 2) {
        const uint32_t at = (to ^ e % 8 * 16) + e / 8 * BN * 128;
        store_matrices(at, h[2 * e], h[2 * e + 1], h[2 * e + 2], h[2 * e + 3]);
      }
      shared_visible();
    };
    auto start_dq = [&] {
      wgmma_begin();
      const uint32_t rows = tile_word(base + L::ds + wg * BN * 128), keys = tile_word(base + L::k, BN * 128);
      wgmma_tn<true>(dq, descriptor(rows, 0), descriptor(keys, 0));
#pragma unroll
      for (int e = 1; e < BN / 16; ++e)
        wgmma_tn<false>(dq, descriptor(rows, e * 16 * 128), descriptor(keys, e * 16 * 128));
      wgmma_commit();
    };
    auto stage_dq = [&](int n) {  // a thread's numbers are D / 8 times 4, 512 apart
      if (n > 0) barrier_wait(drained + 8 * wg, (n - 1) & 1);
      const uint32_t to = base + (wg ? L::dq1 : L::dq0) + thread_index() % 128 * 16;
#pragma unroll
      for (int e = 0; e < D / 2; e += 4) store_shared4(to + e * 512, dq + e);
      shared_visible();
      __syncwarp();
      if (thread_index() % 32 == 0) barrier_arrive(staged + 8 * wg);
    };
    // Barriers, by what the other warpgroup has done: two each of the first two, one for each warpgroup.
    constexpr int ds_stored = 3, ds_read = 5, exponentials = 7, both = 8;
    auto await_other = [&](int what) { named_barrier(what + wg, 256); };
    auto tell_other = [&](int what) { named_arrive(what + 1 - wg, 256); };
    auto take_scores = [&](int n) {
      start_scores(n);
      wgmma_wait<0>();
      pin(s);
      hide_scores(n, i);
      if (wg == 1) named_barrier(exponentials, 256);
      probabilities(n);
      if (wg == 0) named_arrive(exponentials, 256);
      do_ring.wait(n);
    };
    auto finish_k = [&](int n) {
      wgmma_wait<0>();
      pin(dk);
      q_ring.release(n);
    };
    auto finish_dq = [&] {
      wgmma_wait<0>();
      pin(dq);
    };

    kv_ring.wait(0);
    if constexpr (narrow) {
      auto queries = [&](int n, auto is_last) {
        await_other(ds_stored);
        start_dq();
        finish_dq();
        if constexpr (!is_last) tell_other(ds_read);
        stage_dq(n);
      };
#pragma unroll 1
      for (int n = 0; n < steps; ++n, next()) {
        take_scores(n);
        accumulate_v(n);
        if (n > 0) queries(n - 1, std::false_type());
        start_dp(n);
        wgmma_wait<0>();
        pin(dv), pin(x);
        make_ds(n);
        accumulate_k(n);
        if (n > 0) await_other(ds_read);  // the step's before
        store_ds();
        do_ring.release(n);
        tell_other(ds_stored);
        finish_k(n);
      }
      queries(steps - 1, std::true_type());
    } else {
#pragma unroll 1
      for (int n = 0; n < steps; ++n, next()) {
        take_scores(n);
        accumulate_v(n);
        wgmma_wait<0>();  // P's registers are dP's
        pin(dv);
        start_dp(n);
        wgmma_wait<0>();
        pin(x);
        make_ds(n);
        accumulate_k(n);
        if (n > 0) barrier_wait(drained + 8, (n - 1) & 1);  // the second's dQ, which took dS's place
        store_ds();
        do_ring.release(n);
        if (wg == 1) tell_other(ds_stored);
        finish_k(n);
        await_other(ds_stored);
        start_dq();
        if (wg == 0) tell_other(ds_stored);  // now: the second's product comes behind the first's
        finish_dq();
        if (wg == 0) tell_other(ds_read);
        else await_other(ds_read);  // there is room for dQ
        stage_dq(n);
      }
    }
    item = located();
    const int head = kv_head(), h0 = first_head(), b = sequence(), finishes = order.finishes(item);
    bool writes = true;
    if constexpr (Order::carries) {
      const bool ends = order.ends(item);
      const int before = ends ? order.ends_before(item.unit, item.j) : -1;
      if (before >= 0)
        add_carried<D>(dk, dv, order, order.chain(before, item.j), order.chunks_of(item.j), sums, counts);
      writes = ends && order.ends_last(item.unit, item.j);
      if (!writes) carry<D>(dk, dv, order, order.chain(item.unit, item.j), sums);
    }
    barrier_wait(added, 0);
    named_barrier(both, 256);  // K has been read for the last time: it and V make room for the results
    if (writes) {
      if constexpr (turns) turn_back<D>(dk, rotary, j0, a.T);
      store_rows<D, BN>(dk, a.scale * L::unscale, a.scale * L::unscale, k_rows, 1 + wg, dk_map, j0, head, b);
      store_rows<D, BN>(dv, L::unscale, L::unscale, v_rows, 1 + wg, dv_map, j0, head, b);
    } else if constexpr (Order::carries) {
      if (threadIdx.x == 128) atomicAdd(chain_count(order, order.chain(item.unit, item.j), counts), 1u);
    }
    // dQ of the tiles whose sums are complete, two at a time by way of the ring's tiles, which are free.
    for (int t = finishes; t < steps; t += 2) {
      float y[2][D / 2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (t + c >= steps) break;
        const float* from = sum_at(wg, (t + c) % order.heads, order.tile(item, t + c)) + threadIdx.x % 128 * 4;
#pragma unroll
        for (int e = 0; e < D / 2; e += 4) {
          const float4 z = __ldcg(reinterpret_cast<const float4*>(from + e * 128));
          y[c][e] = z.x, y[c][e + 1] = z.y, y[c][e + 2] = z.z, y[c][e + 3] = z.w;
        }
      }
      if constexpr (turns && !Mask::chooses) {
        const int t0 = order.tile(item, t) * BM + wg * 64, t1 = order.tile(item, t + 1) * BM + wg * 64;
        if (t0 == t1) turn_back<D, 2>(y, rotary, t0, a.T);  // as a rule: two heads of the same queries
        else turn_back<D>(y[0], rotary, t0, a.T), turn_back<D>(y[1], rotary, max(t1, 0), a.T);
      }
      if (threadIdx.x % 128 == 0) store_wait();  // the rows before have left
      named_barrier(1 + wg, 128);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (t + c >= steps) break;
        const int row = order.tile(item, t + c) * BM + wg * 64, h = h0 + (t + c) % order.heads;
#pragma unroll
        for (int e = 0; e < D / 2; ++e) y[c][e] *= a.scale * L::unscale;
        if constexpr (Mask::chooses) {
          add_all(y[c], mask.addends, a, b, row, h * D);
          if constexpr (turns) turn_back<D>(y[c], rotary, row, a.T);
        }
        store_rows<D, BM>(y[c], 1, 1, base + L::q + c * tile + wg * 64 * 128, 1 + wg, dq_map, row, h, b);
      }
    }
    named_barrier(1 + wg, 128);  // the sums have been read: their slots are free
    __threadfence();
    for (int t = finishes + int(threadIdx.x % 128); t < steps; t += 128)
      atomicAdd(count_at(wg, t % order.heads, order.tile(item, t)), 1u);
    if (threadIdx.x % 128 == 0) store_wait();
  }
#else
  __trap();  // code for another architecture, which has sm80's kernels
#endif
}

// sums: order.sums(D) numbers; counts: order.counts(), zeros.
template <int D, class Mask, class Order, bool turns = false>
void backward_in_one(cudaStream_t stream, bf16* dq, bf16* dk, bf16* dv, const bf16* d_o, const bf16* q, const bf16* k,
                     const bf16* v, const float* lse2, const float* delta, const Problem& a, const Mask& mask,
                     const Order& order, float* sums, unsigned* counts, const float* rotary = nullptr) {
  launch(stream, backward_kernel<D, Mask, Order, turns>, {order.blocks(), 384, Backward<D>::bytes},
         tensor_map(q, a.ld_q, a.H, D, a.T, a), tensor_map(k, a.ld_kv, a.HKV, D, a.keys, a),
         tensor_map(v, a.ld_v, a.HKV, D, a.keys, a), tensor_map(d_o, a.ld_o, a.H, D, a.T, a),
         tensor_map(dq, a.ld_dq, a.H, D, a.T, a), tensor_map(dk, a.ld_dkv, a.HKV, D, a.keys, a),
         tensor_map(dv, a.ld_dv, a.HKV, D, a.keys, a), lse2, delta, a, mask, order, sums, counts, rotary);
}

}  // namespace attention::sm90
