// Causal attention's backward on Hopper in one kernel: five products, where the pair (sm90_backward_pair.cuh) does
// seven.
//
// A block owns 128 keys of one KV head and walks the queries of the group's heads that see them, 64 at a time
// (dq_order.h); a consumer thread owns parts of two keys' rows. S^T = K Q^T, P^T = exp(S^T - lse), dV += P^T dO,
// dP^T = V dO^T, dS^T = P^T (dP^T - delta), dK += dS^T Q, all as in the pair. dS^T goes to shared memory too, for
// dQ = dS K contracts over both warpgroups' keys: each makes 64 of dQ's 128 columns, or, with 64 columns, all of every
// second step's.
//
// dQ's summands are added in memory, in fp32 and in the order of keys. Three warps of the first warpgroup keep
// consumers from ever waiting for memory: one loads tiles; one watches the counts of the tiles that come next and lets
// the consumers add when it is their turn; one waits until what they added has arrived, and counts it. The sums lie in
// the order in which threads hold them, so that a warp adds 512 bytes in a row. The block whose summand is the last of
// a tile scales the sum and writes it as bf16, when its walk is over.
//
// The mask may let queries choose blocks of keys (selected_masked.cuh): then words of bits come with the tiles, and dQ
// is added to what is there already.
//
// In flight at one time, a step n: dV, dK of n, S of n+1, dQ of n; while dQ runs, exponentials of n+1 do.
#pragma once

#include "attention/dq_order.h"
#include "attention/sm90.cuh"

namespace attention::sm90 {

template <int D>
struct Backward {
  static constexpr int BM = DqOrder::queries, BN = DqOrder::keys, stages = D == 128 ? 3 : 4, ahead = 4;
  static constexpr int k = 0, v = k + BN * D * 2, q = v + BN * D * 2, d_o = q + stages * BM * D * 2;
  static constexpr int ds = d_o + stages * BM * D * 2;  // two tiles of BN keys x BM queries
  static constexpr int stats = ds + 2 * BN * BM * 2, words = stats + stages * BM * 8, bars = words + stages * 16;
  static constexpr int word = bars + 16 * (stages + ahead + 1) + 8 * ahead, bytes = word + 16 + 1024;
  static constexpr int adders = D == 128 ? 8 : 4;  // warps that add a step's dQ
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
__device__ inline unsigned load_acquire(const unsigned* p) {
  unsigned x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}
// Four numbers of a sum in memory: the first summand, or another.
__device__ inline void put(float* p, float x, float y, float z, float w) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x), "f"(y), "f"(z), "f"(w) : "memory");
}
__device__ inline void add(float* p, float x, float y, float z, float w) {
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x), "f"(y), "f"(z), "f"(w)
               : "memory");
}
#endif

// Maps of q, do, dq (B,T,H,D), k, v, dk, dv (B,T,HKV,D); lse2, delta (B,H,Tp); sums: order.counts() tiles of 64 x D;
// counts: as many, and behind them the number of blocks drawn, all 0.
template <int D, class Mask>
__global__ void __launch_bounds__(384, 1)
    backward_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                    const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap do_map,
                    const __grid_constant__ CUtensorMap dq_map, const __grid_constant__ CUtensorMap dk_map,
                    const __grid_constant__ CUtensorMap dv_map, const float* lse2, const float* delta, Problem a,
                    Mask mask, DqOrder order, float* sums, unsigned* counts) {
  begin_kernel();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using L = Backward<D>;
  constexpr int BM = L::BM, BN = L::BN, tile = BM * D * 2, ds_bytes = BN * BM * 2;
  uint32_t base = shared_base();
  Ring<L::stages> ring(base + L::bars);
  Ring<L::ahead> turns(ring.full + ring.bytes);
  Ring<1> kv_ring(turns.full + turns.bytes);
  const uint32_t counted = kv_ring.full + kv_ring.bytes;  // a barrier a turn: its slot may be used again
  if (threadIdx.x == 0) {
    ring.init(consumers), turns.init(L::adders), kv_ring.init(consumers);
    for (int n = 0; n < L::ahead; ++n) barrier_init(counted + 8 * n, 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    store_shared(base + L::word, int(atomicAdd(counts + order.counts(), 1u)));  // blocks start in any order
  }
  __syncthreads();

  int unit, jt;
  order.locate(__shfl_sync(~0u, load_shared(base + L::word), 0), &unit, &jt);
  const int head = unit % a.HKV, b = unit / a.HKV, k0 = jt * BN;
  const int steps = order.steps(jt), finishes = order.finishes(jt);
  int i = order.tile(0), g = 0;  // a step's queries and head
  auto next = [&] {
    if (++g == a.group) g = 0, --i;
  };

  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    fewer_registers<24>();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (threadIdx.x == 0) {
      uint32_t bar = kv_ring.acquire(0, 2 * BN * D * 2);
      load_tile<BN, D>(base + L::k, k_map, bar, k0, head, b);
      load_tile<BN, D>(base + L::v, v_map, bar, k0, head, b);
      for (int n = 0; n < steps; ++n, next()) {
        int slot = ring.slot(n), h = head * a.group + g;
        int64_t stats = int64_t(b * a.H + h) * a.Tp + i * BM;
        bar = ring.acquire(n, 2 * tile + 2 * BM * 4 + (Mask::chooses ? 16 : 0));
        load_tile<BM, D>(base + L::q + slot * tile, q_map, bar, i * BM, h, b);
        bulk_load(base + L::stats + slot * BM * 8, lse2 + stats, BM * 4, bar);
        if constexpr (Mask::chooses) bulk_load(base + L::words + slot * 16, mask.words_at(b, head, i, jt * 2), 16, bar);
        load_tile<BM, D>(base + L::d_o + slot * tile, do_map, bar, i * BM, h, b);
        bulk_load(base + L::stats + slot * BM * 8 + BM * 4, delta + stats, BM * 4, bar);
      }
    } else if (warp == 1 && threadIdx.x % 32 == 0) {  // opens the turns
      for (int n = 0; n < steps; ++n, next()) {
        const unsigned before = unsigned(unit / order.chunk * order.summands(i) + jt);
        const unsigned* count = counts + order.tile_at(unit, g, i);
        barrier_wait(counted + 8 * turns.slot(n), ((n / L::ahead) & 1) ^ 1);
        while (load_acquire(count) != before) {}
        barrier_arrive(turns.full + 8 * turns.slot(n));
      }
    } else if (warp == 2 && threadIdx.x % 32 == 0) {  // counts what has been added; the last is counted further down
      for (int n = 0; n < steps; ++n, next()) {
        turns.wait_free(n + L::ahead);  // released by all who add
        if (n < finishes) {
          __threadfence();
          atomicAdd(counts + order.tile_at(unit, g, i), 1u);
        }
        barrier_arrive(counted + 8 * turns.slot(n));
      }
    }
  } else {
    more_registers<240>();
    int wg = warpgroup - 1, lane = threadIdx.x % 32;
    uint32_t k_rows = base + L::k + wg * 64 * 128, v_rows = base + L::v + wg * 64 * 128;
    int j0 = k0 + wg * 64, j = j0 + threadIdx.x / 32 % 4 * 16 + lane / 4;  // this thread's keys: j and j + 8

    float s[BM / 2], x[BM / 2], dk[D / 2], dv[D / 2];  // x: dP^T, then dQ
    uint32_t p[BM / 4], ds[BM / 4];
#pragma unroll
    for (int e = 0; e < D / 2; ++e) dk[e] = dv[e] = 0;
    pin(dk), pin(dv);

    auto start_scores = [&](int n) {
      ring.wait(n);
      wgmma_begin();
      multiply_nt<D, BN, BM>(s, k_rows, base + L::q + ring.slot(n) * tile);
      wgmma_commit();
    };
    auto start_dp = [&](int n) {
      wgmma_begin();
      multiply_nt<D, BN, BM>(x, v_rows, base + L::d_o + ring.slot(n) * tile);
      wgmma_commit();
    };
    auto stats = [&](int n) { return base + L::stats + ring.slot(n) * BM * 8 + lane % 4 * 8; };
    auto probabilities = [&](int n, int m) {  // of step n, query tile m, in place of the scores and packed
#pragma unroll
      for (int e = 0; e < BM / 8; ++e) {
        float2 l = load_shared2(stats(n) + e * 32);
#pragma unroll
        for (int c = 0; c < 4; ++c) s[4 * e + c] = exp2_approx(fmaf(s[4 * e + c], a.scale_log2, -(c % 2 ? l.y : l.x)));
      }
      auto hide = [&](const auto& rule) {
#pragma unroll
        for (int e = 0; e < BM / 2; ++e)
          if (!rule.visible(m * BM + e / 4 * 8 + lane % 4 * 2 + e % 2, j + e / 2 % 2 * 8)) s[e] = 0;
      };
      if (!mask.whole(m * BM, (m + 1) * BM, j0, j0 + 64)) hide(mask);
      const auto chosen = chosen_of<Mask, 1>(base + L::words + ring.slot(n) * 16 + wg * 8);
      if (!chosen.whole()) hide(chosen);
      pack_rows(p, s);
    };
    auto accumulate_v = [&](int n) {
      pin(p);
      wgmma_begin();
      multiply_nn<D, BM>(dv, p, base + L::d_o + ring.slot(n) * tile);
      wgmma_commit();
    };
    auto ds_tile = [&](int n) { return base + L::ds + n % 2 * ds_bytes; };
    auto make_ds = [&](int n) {  // packed, and this warpgroup's rows of the tile in shared memory
#pragma unroll
      for (int e = 0; e < BM / 8; ++e) {
        float2 r = load_shared2(stats(n) + BM * 4 + e * 32);
#pragma unroll
        for (int c = 0; c < 4; ++c) s[4 * e + c] *= x[4 * e + c] - (c % 2 ? r.y : r.x);
      }
      pack_rows(ds, s);
      const int row = threadIdx.x / 32 % 4 * 16 + lane % 16;
      const uint32_t to = ds_tile(n) + (wg * 64 + row) * 128;
#pragma unroll
      for (int e = 0; e < BM / 8; e += 2)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         to + ((e + lane / 16) ^ (row % 8)) * 16),
                     "r"(ds[2 * e]), "r"(ds[2 * e + 1]), "r"(ds[2 * e + 2]), "r"(ds[2 * e + 3])
                     : "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    };
    auto accumulate_k = [&](int n) {
      pin(ds);
      wgmma_begin();
      multiply_nn<D, BM>(dk, ds, base + L::q + ring.slot(n) * tile);
      wgmma_commit();
    };
    auto start_dq = [&](int n) {
      wgmma_begin();
      const uint32_t keys = tile_word(base + L::k + (D == 128 ? wg : 0) * BN * 128), rows = tile_word(ds_tile(n));
      wgmma_tn<true>(x, descriptor(rows, 0), descriptor(keys, 0));
#pragma unroll
      for (int e = 1; e < BN / 16; ++e)
        wgmma_tn<false>(x, descriptor(rows, e * 16 * 128), descriptor(keys, e * 16 * 128));
      wgmma_commit();
    };
    // Where this thread's numbers of the sum of a tile are: 8 times 4, 512 numbers apart.
    auto sum_at = [&](int g, int i) {
      return sums + order.tile_at(unit, g, i) * (BM * D) + (D == 128 ? wg : 0) * (BM * 64) + threadIdx.x % 128 * 4;
    };
    auto add_dq = [&](int n) {  // of step n, at g and i
      float* to = sum_at(g, i);
      turns.wait(n);
      if (jt == 0) {
#pragma unroll
        for (int e = 0; e < BM / 2; e += 4) put(to + e * 128, x[e], x[e + 1], x[e + 2], x[e + 3]);
      } else {
#pragma unroll
        for (int e = 0; e < BM / 2; e += 4) add(to + e * 128, x[e], x[e + 1], x[e + 2], x[e + 3]);
      }
      turns.release(n);
    };
    // Finds P of step n finished and nothing in flight, and leaves the same of the next step, if there is one.
    auto step = [&](int n, auto makes_dq, auto is_last) {
      start_dp(n);
      accumulate_v(n);
      wgmma_wait<1>();
      pin(x);
      make_ds(n);
      accumulate_k(n);
      if constexpr (!is_last) {
        wgmma_wait<1>();  // dV's product, most likely over by now: its P makes room for scores
        pin(dv);
        start_scores(n + 1);
      }
      named_barrier(3, 256);  // dS is there; and two steps ago's has been read by both
      if constexpr (makes_dq) start_dq(n);
      if constexpr (!is_last) {
        wgmma_wait<makes_dq ? 1 : 0>();  // all but dQ
        pin(s), pin(dk);
        ring.release(n);
        probabilities(n + 1, g + 1 == a.group ? i - 1 : i);
      }
      wgmma_wait<0>();
      if constexpr (is_last) pin(dk), pin(dv);
      if constexpr (makes_dq) {
        pin(x);
        add_dq(n);
      }
      next();
    };
    auto take_step = [&](int n, auto is_last) {
      if (D == 128 || n % 2 == wg) step(n, std::true_type(), is_last);
      else if constexpr (D != 128) step(n, std::false_type(), is_last);
    };

    kv_ring.wait(0);
    start_scores(0);
    wgmma_wait<0>();
    pin(s);
    probabilities(0, i);
#pragma unroll 1
    for (int n = 0; n + 1 < steps; ++n) take_step(n, std::false_type());
    take_step(steps - 1, std::true_type());
    __threadfence();        // what this block added, before it reads the sums
    named_barrier(3, 256);  // and both warpgroups have read K for the last time: it and V make room for the results
    store_rows<D, BN>(dk, a.scale, a.scale, k_rows, 1 + wg, dk_map, j0, head, b);
    store_rows<D, BN>(dv, 1, 1, v_rows, 1 + wg, dv_map, j0, head, b);
    // dQ of the tiles whose sums are complete, two at a time by way of the ring's tiles, which are free.
    constexpr int stride = D == 128 ? 1 : 2;  // a warpgroup has a half of each tile, or every second tile
    const uint32_t q_rows = base + L::q + wg * 2 * 64 * 128;
    for (int t = finishes + (D == 128 ? 0 : wg); t < steps; t += 2 * stride) {
      float y[2][32];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (t + c * stride >= steps) break;
        const int step = t + c * stride;
        const float* from = sum_at(step % a.group, order.tile(step));
#pragma unroll
        for (int e = 0; e < 32; e += 4) {
          const float4 z = __ldcg(reinterpret_cast<const float4*>(from + e * 128));
          y[c][e] = z.x, y[c][e + 1] = z.y, y[c][e + 2] = z.z, y[c][e + 3] = z.w;
        }
      }
      if (threadIdx.x % 128 == 0) store_wait();  // the rows before have left
      named_barrier(1 + wg, 128);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        if (t + c * stride >= steps) break;
        const int row = order.tile(t + c * stride) * BM, h = head * a.group + (t + c * stride) % a.group;
        const int col = D == 128 ? wg * 64 : 0;
#pragma unroll
        for (int e = 0; e < 32; ++e) y[c][e] *= a.scale;
        if constexpr (Mask::chooses) add_all(y[c], mask.addends, a, b, row, h * D + col);
        store_rows<64, 64>(y[c], 1, 1, q_rows + c * 64 * 128, 1 + wg, dq_map, row, h, b, col);
      }
    }
    named_barrier(3, 256);  // all sums have been read: their slots are free
    __threadfence();
    for (int t = finishes + int(threadIdx.x) - 128; t < steps; t += 256)
      atomicAdd(counts + order.tile_at(unit, t % a.group, order.tile(t)), 1u);
    if (threadIdx.x % 128 == 0) store_wait();
  }
#else
  __trap();  // code for another architecture, which has sm80's kernels
#endif
}

// sums: order.counts() tiles of 64 x D numbers; counts: order.counts() + 1, zeros.
template <int D, class Mask>
void backward_in_one(cudaStream_t stream, bf16* dq, bf16* dk, bf16* dv, const bf16* d_o, const bf16* q, const bf16* k,
                     const bf16* v, const float* lse2, const float* delta, const Problem& a, const Mask& mask,
                     const DqOrder& order, float* sums, unsigned* counts) {
  launch(stream, backward_kernel<D, Mask>, {order.blocks(), 384, Backward<D>::bytes},
         tensor_map(q, a.ld_q, a.H, D, a.T, a), tensor_map(k, a.ld_kv, a.HKV, D, a.T, a),
         tensor_map(v, a.ld_v, a.HKV, D, a.T, a), tensor_map(d_o, a.ld_o, a.H, D, a.T, a),
         tensor_map(dq, a.ld_dq, a.H, D, a.T, a), tensor_map(dk, a.ld_dkv, a.HKV, D, a.T, a),
         tensor_map(dv, a.ld_dv, a.HKV, D, a.T, a), lse2, delta, a, mask, order, sums, counts);
}

}  // namespace attention::sm90
