// Attention's backward on Hopper in two kernels, one that stays with its keys and one that stays with its queries.
//
// Nothing but inputs passes through shared memory. The accumulator of one product, rounded to bf16, is in place as the
// left operand of the next (dS K; P^T dO; dS^T Q). For dK and dV that takes scores transposed, K Q^T, which is why
// there are two. Together they do seven products where one fused kernel does five (sm90_backward.cuh), but share no
// sums, add nothing atomically, and every sum has one order.
#pragma once

#include "attention/kv_parts.cuh"
#include "attention/sm90.cuh"

namespace attention::sm90 {

// ------------------------------------------------------------------------------------------------------ dK and dV
// A block owns 128 keys of one KV head and walks the queries of the group's heads that see them, all or its part
// (KvLoop), 64 at a time; a consumer thread owns parts of two keys' rows. S^T = K Q^T, P^T = exp(S^T - lse),
// dV += P^T dO, dP^T = V dO^T, dS^T = P^T (dP^T - delta), dK += dS^T Q (times scale, at the end). Read once: K, V; for
// each 128 keys: Q, dO and the queries' statistics. Written once: dK, dV (or, of a part, its sums in fp32).
// H200, T 8192, 32/8 heads, D 128: 1.66 to 1.75 ms, four products at 630 to 660 TFLOP/s (tensor pipes 70 % busy at 1.77
// GHz): a 64-wide product with both operands in shared memory reads it as fast as it can be read; registers allow no
// wider one. T 65536: a window of 512 1.9 ms, keys compressed 32/16 6.7 ms.

template <int D, int DV>
struct BackwardKV {
  static constexpr int BM = 64, BN = 128, stages = D == 64 ? 4 : 3;
  static constexpr int k = 0, v = k + BN * D * 2, q = v + BN * DV * 2, d_o = q + stages * BM * D * 2;
  static constexpr int stats = d_o + stages * BM * DV * 2, words = stats + stages * BM * 8, bars = words + stages * 16;
  static constexpr int bytes = bars + 16 * (stages + 1) + 1024;
};

// Maps of q (B,T,H,D), do (B,T,H,DV), k, dk (B,keys,HKV,D), v, dv (B,keys,HKV,DV); lse2, delta (B,H,Tp); part_sums: as
// part_at.
template <int D, int DV, class Mask>
__global__ void __launch_bounds__(384, 1)
    backward_kv(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap do_map,
                const __grid_constant__ CUtensorMap dk_map, const __grid_constant__ CUtensorMap dv_map,
                const float* lse2, const float* delta, Problem a, Mask mask, int parts, float* part_sums) {
  begin_kernel();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using L = BackwardKV<D, DV>;
  constexpr int BM = L::BM, BN = L::BN, q_tile = BM * D * 2, do_tile = BM * DV * 2;
  uint32_t base = shared_base();
  Ring<L::stages> ring(base + L::bars);
  Ring<1> kv_ring(ring.full + ring.bytes);
  if (threadIdx.x == 0) {
    ring.init(consumers), kv_ring.init(consumers);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  // The first keys are seen by most queries: they go first.
  const int k_tiles = ceil_div(a.keys, BN);
  const int part = blockIdx.x % parts, head = blockIdx.x / parts % a.HKV;
  const int k0 = blockIdx.x / parts / a.HKV % k_tiles * BN, b = blockIdx.x / parts / a.HKV / k_tiles;
  const KvLoop loop(mask, k0, k0 + BN, BM, a.group, part, parts);
  const int steps = loop.end - loop.begin, last = loop.first + loop.tiles;
  int m = steps ? loop.first + loop.begin % loop.tiles : 0;  // tile of queries

  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    fewer_registers<24>();
    if (threadIdx.x == 0) {
      uint32_t bar = kv_ring.acquire(0, BN * (D + DV) * 2);
      load_tile<BN, D>(base + L::k, k_map, bar, k0, head, b);
      load_tile<BN, DV>(base + L::v, v_map, bar, k0, head, b);
      int h = head * a.group + (steps ? loop.begin / loop.tiles : 0);
      for (int n = 0; n < steps; ++n) {
        int slot = ring.slot(n);
        int64_t stats = int64_t(b * a.H + h) * a.Tp + m * BM;
        bar = ring.acquire(n, q_tile + do_tile + 2 * BM * 4 + (Mask::chooses ? 16 : 0));
        load_tile<BM, D>(base + L::q + slot * q_tile, q_map, bar, m * BM, h, b);
        bulk_load(base + L::stats + slot * BM * 8, lse2 + stats, BM * 4, bar);
        if constexpr (Mask::chooses)
          bulk_load(base + L::words + slot * 16, mask.words_at(b, head, m, k0 / 64), 16, bar);
        load_tile<BM, DV>(base + L::d_o + slot * do_tile, do_map, bar, m * BM, h, b);
        bulk_load(base + L::stats + slot * BM * 8 + BM * 4, delta + stats, BM * 4, bar);
        if (++m == last) m = loop.first, ++h;
      }
    }
  } else {
    more_registers<240>();
    int wg = warpgroup - 1, lane = threadIdx.x % 32;
    uint32_t k_rows = base + L::k + wg * 64 * 128, v_rows = base + L::v + wg * 64 * 128;
    int j0 = k0 + wg * 64, j = j0 + threadIdx.x / 32 % 4 * 16 + lane / 4;  // this thread's keys: j and j + 8

    float s[BM / 2], dp[BM / 2], dk[D / 2], dv[DV / 2];
    uint32_t p[BM / 4], ds[BM / 4];
#pragma unroll
    for (int i = 0; i < D / 2; ++i) dk[i] = 0;
#pragma unroll
    for (int i = 0; i < DV / 2; ++i) dv[i] = 0;
    pin(dk), pin(dv);

    auto start_scores = [&](int n) {
      ring.wait(n);
      wgmma_begin();
      multiply_nt<D, BN, BM>(s, k_rows, base + L::q + ring.slot(n) * q_tile);
      wgmma_commit();
    };
    auto start_dp = [&](int n) {
      wgmma_begin();
      multiply_nt<DV, BN, BM>(dp, v_rows, base + L::d_o + ring.slot(n) * do_tile);
      wgmma_commit();
    };
    auto stats = [&](int n) { return base + L::stats + ring.slot(n) * BM * 8 + lane % 4 * 8; };
    // lse2 of this thread's queries of step n. Half of it is fetched before the wait for scores, which hides its
    // latency; there is no room for all of it then, nor does delta gain by it.
    float2 lse[BM / 8];
    auto fetch_lse = [&](int n, int first) {
#pragma unroll
      for (int i = first; i < first + BM / 16; ++i) lse[i] = load_shared2(stats(n) + i * 32);
    };
    auto probabilities = [&](int n, int m) {  // of step n, query tile m, in place of the scores
      fetch_lse(n, BM / 16);
#pragma unroll
      for (int i = 0; i < BM / 8; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s[4 * i + e] = exp2_approx(fmaf(s[4 * i + e], a.scale_log2, -(e % 2 ? lse[i].y : lse[i].x)));
      }
      auto hide = [&](const auto& rule) {
#pragma unroll
        for (int i = 0; i < BM / 2; ++i)
          if (!rule.visible(m * BM + i / 4 * 8 + lane % 4 * 2 + i % 2, j + i / 2 % 2 * 8)) s[i] = 0;
      };
      if (!mask.whole(m * BM, (m + 1) * BM, j0, j0 + 64)) hide(mask);
      const auto chosen = chosen_of<Mask, 1>(base + L::words + ring.slot(n) * 16 + wg * 8);
      if (!chosen.whole()) hide(chosen);
    };
    auto pack_ds = [&](int n) {
#pragma unroll
      for (int i = 0; i < BM / 8; ++i) {
        float2 r = load_shared2(stats(n) + BM * 4 + i * 32);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[4 * i + e] *= dp[4 * i + e] - (e % 2 ? r.y : r.x);
      }
      pack_rows(ds, s);
      pin(ds);
    };
    auto accumulate_v = [&](int n) {
      pin(p);
      wgmma_begin();
      multiply_nn<DV, BM>(dv, p, base + L::d_o + ring.slot(n) * do_tile);
      wgmma_commit();
    };
    auto accumulate_k = [&](int n) {
      wgmma_begin();
      multiply_nn<D, BM>(dk, ds, base + L::q + ring.slot(n) * q_tile);
      wgmma_commit();
    };
    kv_ring.wait(0);
    if constexpr (D > 128) {
      // dK and dV leave no room for two products' results and an operand: one product after another. The other
      // warpgroup's fill the gaps.
#pragma unroll 1
      for (int n = 0; n < steps; ++n) {
        start_scores(n);
        fetch_lse(n, 0);
        wgmma_wait<0>();
        pin(s);
        probabilities(n, m);
        pack_rows(p, s);
        accumulate_v(n);
        wgmma_wait<0>();
        pin(dv);
        start_dp(n);
        wgmma_wait<0>();
        pin(dp);
        pack_ds(n);
        accumulate_k(n);
        wgmma_wait<0>();
        pin(dk);
        ring.release(n);
        if (++m == last) m = loop.first;
      }
    } else if (steps > 0) {
      start_scores(0);
      start_dp(0);
      fetch_lse(0, 0);
      wgmma_wait<1>();
      pin(s);
      probabilities(0, m);
      pack_rows(p, s);
      wgmma_wait<0>();
      pin(dp);
#pragma unroll 1
      for (int n = 0; n + 1 < steps; ++n) {  // finds P and dP of step n finished and nothing in flight
        if (++m == last) m = loop.first;     // of the next step, whose scores queue up behind this step's sums
        accumulate_v(n);
        pack_ds(n);
        accumulate_k(n);
        wgmma_wait<1>();  // dV's product, most likely over by now: its P makes room for scores
        pin(dv);
        start_scores(n + 1);
        start_dp(n + 1);
        fetch_lse(n + 1, 0);
        wgmma_wait<1>();  // all but dP
        pin(s), pin(dk);
        ring.release(n);
        probabilities(n + 1, m);
        pack_rows(p, s);
        wgmma_wait<0>();
        pin(dp);
      }
      accumulate_v(steps - 1);
      pack_ds(steps - 1);
      accumulate_k(steps - 1);
      wgmma_wait<0>();
      pin(dk), pin(dv);
    }
    let_next_in();
    if (parts > 1) {
      float *to_k = part_sums + part_at(a, parts, 0, part, b, head),
            *to_v = part_sums + part_at(a, parts, 1, part, b, head);
      store_rows_fp32<D>(dk, a.scale, to_k + int64_t(j0) * D, a.keys - j0);
      store_rows_fp32<DV>(dv, 1, to_v + int64_t(j0) * DV, a.keys - j0);
      return;
    }
    // K's and V's rows of this warpgroup have been read for the last time: they make room for the results.
    store_rows<D, BN>(dk, a.scale, a.scale, k_rows, 1 + wg, dk_map, j0, head, b);
    store_rows<DV, BN>(dv, 1, 1, v_rows, 1 + wg, dv_map, j0, head, b);
    if (threadIdx.x % 128 == 0) store_wait();
  }
#else
  __trap();  // code for another architecture, which has sm80's kernels
#endif
}

// ---------------------------------------------------------------------------------------------------------------- dQ
// Items as in the forward, of 128 queries or, shared by keys, of 64; their keys go past 128 at a time. Behind them the
// sums of dK's and dV's parts, which fill the time of blocks that are done early. A consumer thread owns parts of two
// rows. S = Q K^T, P = exp(S - lse), dP = dO V^T, dS = P (dP - delta), dQ += dS K (times
// scale, at the end). Read once: Q, dO, statistics; for each item: K, V. Written once: dQ. H200, T 8192, 32/8 heads, D
// 128: 1.02 to 1.1 ms, three products at 750 to 810 TFLOP/s (tensor pipes 91 % busy). T 65536: a window of 512 1.6 ms,
// keys compressed 32/16 4.8 ms.

template <int D, int DV, Share share>
struct BackwardQ {
  static constexpr bool by_keys = share == Share::keys;
  static constexpr int BM = by_keys ? 64 : 128, BN = D > 128 ? 64 : 128;
  // By keys a slot is one warpgroup's, for ever.
  static constexpr int readers = by_keys ? 4 : consumers, stages = by_keys ? 4 : 2;
  static constexpr int q = 0, d_o = q + BM * D * 2, dq = d_o + BM * DV * 2, k = dq + BM * D * 2;
  static constexpr int v = k + stages * BN * D * 2, part = v + stages * BN * DV * 2;
  static constexpr int word_bytes = BM / 64 * 16, words = part + (by_keys ? D / 2 * 128 * 4 : 0);
  static constexpr int bars = words + stages * word_bytes;
  static constexpr int items = bars + 16 * (2 * stages + 2), bytes = items + 32 + 1024;
};

// Maps of q, dq (B,T,H,D), do (B,T,H,DV), k (B,keys,HKV,D), v (B,keys,HKV,DV); lse2, delta (B,H,Tp).
template <int D, int DV, Share share, class Mask>
__global__ void __launch_bounds__(384, 1)
    backward_q(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
               const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap do_map,
               const __grid_constant__ CUtensorMap dq_map, const float* lse2, const float* delta, Problem a, Mask mask,
               Parts parts, int sums, int list) {
  begin_kernel();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using L = BackwardQ<D, DV, share>;
  constexpr int BM = L::BM, BN = L::BN, k_tile = BN * D * 2, v_tile = BN * DV * 2;
  uint32_t base = shared_base();
  Ring<L::stages> k_ring(base + L::bars), v_ring(k_ring.full + k_ring.bytes);
  Ring<1> q_ring(v_ring.full + v_ring.bytes), part_ring(q_ring.full + q_ring.bytes);
  const Items items(base + L::items, a, list, BM, sums);
  if (threadIdx.x == 0) {
    k_ring.init(L::readers), v_ring.init(L::readers), q_ring.init(consumers), part_ring.init(4);
    items.ring.init(consumers);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    fewer_registers<24>();
    if (threadIdx.x == 0) {
      int n = 0;  // tiles of K and V so far
      for (int round = 0, item = blockIdx.x; items.publish(round, item); ++round) {
        int b, q0, h;
        items.order.locate(item, a, &b, &q0, &h);
        const bool of_queries = item < items.of_queries;
        item = items.draw();  // early, so that it is there when it is wanted
        if (!of_queries) continue;
        int first = mask.first_key(q0) / BN, last = ceil_div(mask.last_key(q0 + BM), BN);
        uint32_t bar = q_ring.acquire(round, BM * (D + DV) * 2);
        load_tile<BM, D>(base + L::q, q_map, bar, q0, h, b);
        load_tile<BM, DV>(base + L::d_o, do_map, bar, q0, h, b);
        for (int j = last - 1; j >= first; --j, ++n) {
          int slot = k_ring.slot(n);
          bar = k_ring.acquire(n, k_tile + (Mask::chooses ? L::word_bytes : 0));
          load_tile<BN, D>(base + L::k + slot * k_tile, k_map, bar, j * BN, h / a.group, b);
          if constexpr (Mask::chooses)
            for (int i = 0; i < BM / 64; ++i)
              bulk_load(base + L::words + slot * L::word_bytes + i * 16,
                        mask.words_at(b, h / a.group, q0 / 64 + i, j * 2), 16, bar);
          load_tile<BN, DV>(base + L::v + slot * v_tile, v_map, v_ring.acquire(n, v_tile), j * BN, h / a.group, b);
        }
      }
    }
  } else {
    more_registers<240>();
    int wg = warpgroup - 1, lane = threadIdx.x % 32;
    const int rows = L::by_keys ? 0 : wg * 64;  // this warpgroup's of the item, from here on
    uint32_t q_rows = base + L::q + rows * 128, do_rows = base + L::d_o + rows * 128,
             dq_rows = base + L::dq + rows * 128;
    constexpr int step = L::by_keys ? 2 : 1;
    int n0 = 0;  // tiles of K and V before this item
    for (int round = 0, item; items.receive(round, &item); ++round) {
      if (item >= items.of_queries) {  // and so are the rest
        parts.join_item(a, item - items.of_queries, int(threadIdx.x) - 128);
        continue;
      }
      int b, q0, h;
      items.order.locate(item, a, &b, &q0, &h);
      int first = mask.first_key(q0) / BN, last = ceil_div(mask.last_key(q0 + BM), BN);
      int t0 = q0 + rows, t = t0 + threadIdx.x / 32 % 4 * 16 + lane / 4;  // this thread's rows: t and t + 8
      const int64_t stats = int64_t(b * a.H + h) * a.Tp + t;
      const float l[2] = {lse2[stats], lse2[stats + 8]}, r[2] = {delta[stats], delta[stats + 8]};

      float s[BN / 2], dp[BN / 2], dq[D / 2];
      uint32_t ds[BN / 4];
#pragma unroll
      for (int i = 0; i < D / 2; ++i) dq[i] = 0;
      pin(dq);

      auto start_scores = [&](int n) {
        k_ring.wait(n);
        wgmma_begin();
        multiply_nt<D, BM, BN>(s, q_rows, base + L::k + k_ring.slot(n) * k_tile);
        wgmma_commit();
      };
      auto start_dp = [&](int n) {
        v_ring.wait(n);
        wgmma_begin();
        multiply_nt<DV, BM, BN>(dp, do_rows, base + L::v + v_ring.slot(n) * v_tile);
        wgmma_commit();
      };
      auto probabilities = [&](int n, int j) {  // of step n, key tile j, in place of the scores
        constexpr int blocks = Mask::chooses ? BN / 64 : 1;
        if (!mask.whole(t0, t0 + 64, j * BN, (j + 1) * BN))
#pragma unroll
          for (int i = 0; i < BN / 2; ++i)
            if (!mask.visible(t + i / 2 % 2 * 8, j * BN + i / 4 * 8 + lane % 4 * 2 + i % 2)) s[i] = -INFINITY;
        const auto chosen = chosen_of<Mask, 2>(base + L::words + k_ring.slot(n) * L::word_bytes + rows / 64 * 16);
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) {  // a row has chosen all of a block's keys or none
          const int r = i / 2 % 2, c = i / (BN / 2 / blocks);
          s[i] = exp2_approx(fmaf(s[i], a.scale_log2, chosen.visible(t + 8 * r, c * 64) ? -l[r] : -INFINITY));
        }
      };
      auto pack_ds = [&] {
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) s[i] *= dp[i] - r[i / 2 % 2];
        pack_rows(ds, s);
        pin(ds);
      };
      auto accumulate = [&](int n) {
        wgmma_begin();
        multiply_nn<D, BN>(dq, ds, base + L::k + k_ring.slot(n) * k_tile);
        wgmma_commit();
      };
      const int n1 = n0 + last - first;  // tiles after this item
      // This warpgroup's first tile. By keys those that its slots hold, and perhaps none of an item's. Which of the two
      // has the first changes from item to item, but not the sum of theirs.
      int n = L::by_keys ? n0 + (wg + n0) % step : n0;
      const auto tile_of = [&](int n) { return last - 1 - (n - n0); };
      q_ring.wait(round);
      if (n < n1) {
        start_scores(n);
        start_dp(n);
        wgmma_wait<1>();
        pin(s);
        probabilities(n, tile_of(n));
        wgmma_wait<0>();
        pin(dp);
        v_ring.release(n);
#pragma unroll 1
        for (; n + step < n1; n += step) {  // finds P and dP of tile n finished and nothing in flight
          const int next = n + step;
          pack_ds();
          accumulate(n);
          start_scores(next);
          wgmma_wait<1>();  // dQ's product: dS's registers make room for dP
          pin(dq);
          k_ring.release(n);
          start_dp(next);
          wgmma_wait<1>();  // the scores; dP runs beside the exponentials
          pin(s);
          probabilities(next, tile_of(next));
          wgmma_wait<0>();
          pin(dp);
          v_ring.release(next);
        }
        pack_ds();
        accumulate(n);
        wgmma_wait<0>();
        pin(dq);
        k_ring.release(n);
      }
      n0 = n1;
      q_ring.release(round);
      if constexpr (L::by_keys) {  // the second warpgroup's sums go to the first
        const auto number = [&](int i) { return base + L::part + (i * 128 + threadIdx.x % 128) * 4; };
        if (wg > 0) {
          part_ring.wait_free(round);
#pragma unroll
          for (int i = 0; i < D / 2; ++i) store_shared(number(i), dq[i]);
          named_barrier(1 + wg, 128);
          if (threadIdx.x % 128 == 0) barrier_arrive(part_ring.full);
          continue;
        }
        part_ring.wait(round);
#pragma unroll
        for (int i = 0; i < D / 2; ++i) dq[i] += load_shared_float(number(i));
        part_ring.release(round);
      }
      if (threadIdx.x % 128 == 0) store_wait();  // the previous item's rows have left
      named_barrier(1 + wg, 128);
#pragma unroll
      for (int i = 0; i < D / 2; ++i) dq[i] *= a.scale;
      if constexpr (Mask::chooses) add_all(dq, mask.addends, a, b, t0, h * D);
      store_rows<D, BM>(dq, 1, 1, dq_rows, 1 + wg, dq_map, t0, h, b);
    }
    let_next_in();
    if (threadIdx.x % 128 == 0) store_wait();
  }
#else
  __trap();  // code for another architecture, which has sm80's kernels
#endif
}

template <int D, int DV, class Mask>
void backward_of_keys(cudaStream_t stream, const Parts& to, const bf16* d_o, const bf16* q, const bf16* k,
                      const bf16* v, const float* lse2, const float* delta, const Problem& a, const Mask& mask) {
  using KV = BackwardKV<D, DV>;
  launch(stream, backward_kv<D, DV, Mask>, {a.B * a.HKV * to.parts * ceil_div(a.keys, KV::BN), 384, KV::bytes},
         tensor_map(q, a.ld_q, a.H, D, a.T, a), tensor_map(k, a.ld_kv, a.HKV, D, a.keys, a),
         tensor_map(v, a.ld_v, a.HKV, DV, a.keys, a), tensor_map(d_o, a.ld_o, a.H, DV, a.T, a),
         tensor_map(to.dk, a.ld_dkv, a.HKV, D, a.keys, a), tensor_map(to.dv, a.ld_dv, a.HKV, DV, a.keys, a), lse2,
         delta, a, mask, to.parts, to.sums);
}

template <int D, int DV, Share share, class Mask>
void backward_of_queries_by(cudaStream_t stream, bf16* dq, const Parts& parts, const bf16* d_o, const bf16* q,
                            const bf16* k, const bf16* v, const float* lse2, const float* delta, const Problem& a,
                            const Mask& mask) {
  static_assert(consumers * 32 == Parts::threads, "");
  using Q = BackwardQ<D, DV, share>;
  const int sums = parts.items(a), items = a.B * a.H * ceil_div(a.T, Q::BM) + sums;
  launch(stream, backward_q<D, DV, share, Mask>, {persistent_blocks(items), 384, Q::bytes},
         tensor_map(q, a.ld_q, a.H, D, a.T, a), tensor_map(k, a.ld_kv, a.HKV, D, a.keys, a),
         tensor_map(v, a.ld_v, a.HKV, DV, a.keys, a), tensor_map(d_o, a.ld_o, a.H, DV, a.T, a),
         tensor_map(dq, a.ld_dq, a.H, D, a.T, a), lse2, delta, a, mask, parts, sums, next_list());
}
// Joins the parts of dK and dV too.
template <int D, int DV, class Mask>
void backward_of_queries(cudaStream_t stream, bf16* dq, const Parts& parts, const bf16* d_o, const bf16* q,
                         const bf16* k, const bf16* v, const float* lse2, const float* delta, const Problem& a,
                         const Mask& mask) {
  if constexpr (D == 64)
    if (share_of(a, mask) == Share::keys)
      return backward_of_queries_by<D, DV, Share::keys>(stream, dq, parts, d_o, q, k, v, lse2, delta, a, mask);
  backward_of_queries_by<D, DV, Share::rows>(stream, dq, parts, d_o, q, k, v, lse2, delta, a, mask);
}

template <int D, int DV, class Mask>
void backward(cudaStream_t stream, bf16* dq, const Parts& parts, const bf16* d_o, const bf16* q, const bf16* k,
              const bf16* v, const float* lse2, const float* delta, const Problem& a, const Mask& mask) {
  backward_of_keys<D, DV>(stream, parts, d_o, q, k, v, lse2, delta, a, mask);
  backward_of_queries<D, DV>(stream, dq, parts, d_o, q, k, v, lse2, delta, a, mask);
}

}  // namespace attention::sm90
