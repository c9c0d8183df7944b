// Attention's forward on Hopper. The accumulator of Q K^T, rounded to bf16, is in place as the left operand of P V:
// nothing but inputs passes through shared memory.
//
// A persistent block takes items of 128 queries of one head, one after another, so that loading the next and storing
// the last hide behind products. An item whose queries see no key walks a tile all the same, of which it sees nothing.
// A consumer thread owns parts of two rows. Q is read once; K and V once for each 128 queries and head, from L2 mostly;
// o and lse are written once. Scores of the next key tile are in flight while the previous one's P V is, and the
// softmax runs beside both. H200, T 8192, 32/8 heads, D 128: 0.79 to 0.86 ms, 640 to 695 TFLOP/s (tensor pipes 76 %
// busy at 1.7 GHz). T 65536: a window of 512 1.15 ms (480 TFLOP/s of what is seen, 600 of the five tiles walked for
// four), keys compressed 32/16 3.4 to 3.8 ms (580 to 650).
#pragma once

#include "attention/sm90.cuh"

namespace attention::sm90 {

template <int D, int DV>
struct Forward {
  static constexpr int BM = 128, BN = 128, stages = 2;
  // o on its way out has memory of its own, or, where keys are too wide for that, the item's q's, which is over.
  static constexpr bool o_in_q = D > 128;
  static constexpr int q = 0, o = o_in_q ? q : q + BM * D * 2, k = o_in_q ? q + BM * D * 2 : o + BM * DV * 2;
  static constexpr int v = k + stages * BN * D * 2, words = v + stages * BN * DV * 2, bars = words + stages * 32;
  static constexpr int items = bars + 16 * (2 * stages + 1), bytes = items + 32 + 1024;
};

// Maps of q (B,T,H,D), o (B,T,H,DV), k (B,keys,HKV,D), v (B,keys,HKV,DV); lse (B,H,T), amax (B,H,T) or null.
template <int D, int DV, class Mask>
__global__ void __launch_bounds__(384, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap o_map, float* lse,
                   float* amax, Problem a, Mask mask, int list) {
  begin_kernel();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using L = Forward<D, DV>;
  constexpr int BM = L::BM, BN = L::BN, k_tile = BN * D * 2, v_tile = BN * DV * 2;
  uint32_t base = shared_base();
  Ring<L::stages> k_ring(base + L::bars), v_ring(k_ring.full + k_ring.bytes);
  Ring<1> q_ring(v_ring.full + v_ring.bytes);
  const Items items(base + L::items, a, list);
  if (threadIdx.x == 0) {
    k_ring.init(consumers), v_ring.init(consumers), q_ring.init(consumers), items.ring.init(consumers);
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
        items.locate(item, a, &b, &q0, &h);
        item = items.draw();  // early, so that it is there when it is wanted
        int first = mask.first_key(q0) / BN, last = ceil_div(mask.last_key(q0 + BM), BN);
        if (last == first) ++last;
        load_tile<BM, D>(base + L::q, q_map, q_ring.acquire(round, BM * D * 2), q0, h, b);
        for (int j = last - 1; j >= first; --j, ++n) {
          int slot = k_ring.slot(n);
          uint32_t bar = k_ring.acquire(n, k_tile + (Mask::chooses ? 32 : 0));
          load_tile<BN, D>(base + L::k + slot * k_tile, k_map, bar, j * BN, h / a.group, b);
          if constexpr (Mask::chooses)
            for (int i = 0; i < 2; ++i)
              bulk_load(base + L::words + slot * 32 + i * 16, mask.words_at(b, h / a.group, q0 / 64 + i, j * 2), 16,
                        bar);
          load_tile<BN, DV>(base + L::v + slot * v_tile, v_map, v_ring.acquire(n, v_tile), j * BN, h / a.group, b);
        }
      }
    }
  } else {
    more_registers<240>();
    int wg = warpgroup - 1, lane = threadIdx.x % 32;
    uint32_t q_rows = base + L::q + wg * 64 * 128, o_rows = base + L::o + wg * 64 * DV * 2;
    int n = 0;
    for (int round = 0, item; items.receive(round, &item); ++round) {
      int b, q0, h;
      items.locate(item, a, &b, &q0, &h);
      int first = mask.first_key(q0) / BN, last = ceil_div(mask.last_key(q0 + BM), BN);
      if (last == first) ++last;
      int t0 = q0 + wg * 64, t = t0 + threadIdx.x / 32 % 4 * 16 + lane / 4;  // this thread's rows: t and t + 8

      float s[BN / 2], o[DV / 2], row[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, factor[2];
      uint32_t p[BN / 4];
#pragma unroll
      for (int i = 0; i < DV / 2; ++i) o[i] = 0;

      auto chosen = [&](int n) {  // in tile n
        return chosen_of<Mask, 2>(base + L::words + k_ring.slot(n) * 32 + wg * 16);
      };
      // Scores of key tile j to probabilities relative to the rows' maxima so far.
      auto softmax = [&](int j, const auto& chosen) {
        auto hide = [&](const auto& rule) {
#pragma unroll
          for (int i = 0; i < BN / 2; ++i)
            if (!rule.visible(t + i / 2 % 2 * 8, j * BN + i / 4 * 8 + lane % 4 * 2 + i % 2)) s[i] = -INFINITY;
        };
        if (!mask.whole(t0, t0 + 64, j * BN, (j + 1) * BN)) hide(mask);
        if (!chosen.whole()) hide(chosen);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float top = row[r];
#pragma unroll
          for (int i = 0; i < BN / 8; ++i) top = fmaxf(top, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
          top = row_max(top);
          float shift = top == -INFINITY ? 0.f : top * a.scale_log2;  // a row that sees nothing yet
          factor[r] = exp2_approx(row[r] * a.scale_log2 - shift);
          row[r] = top;
          float part = 0;
#pragma unroll
          for (int i = 0; i < BN / 8; ++i) {
            float& x = s[4 * i + 2 * r];
            float& y = s[4 * i + 2 * r + 1];
            x = exp2_approx(fmaf(x, a.scale_log2, -shift));
            y = exp2_approx(fmaf(y, a.scale_log2, -shift));
            part += x + y;
          }
          sum[r] = sum[r] * factor[r] + part;
        }
      };

      q_ring.wait(round);
      k_ring.wait(n);
      wgmma_begin();
      multiply_nt<D, BM, BN>(s, q_rows, base + L::k + k_ring.slot(n) * k_tile);
      wgmma_commit();
      wgmma_wait<0>();
      pin(s);
      const auto first_chosen = chosen(n);
      k_ring.release(n);
      softmax(last - 1, first_chosen);
      pack_rows(p, s);

#pragma unroll 1
      for (int j = last - 2; j >= first; --j, ++n) {
        k_ring.wait(n + 1);
        wgmma_begin();
        multiply_nt<D, BM, BN>(s, q_rows, base + L::k + k_ring.slot(n + 1) * k_tile);
        wgmma_commit();
        v_ring.wait(n);
        pin(o), pin(p);
        wgmma_begin();
        multiply_nn<DV, BN>(o, p, base + L::v + v_ring.slot(n) * v_tile);
        wgmma_commit();
        const auto next_chosen = chosen(n + 1);
        wgmma_wait<1>();
        pin(s);
        k_ring.release(n + 1);
        softmax(j, next_chosen);
        wgmma_wait<0>();
        pin(o), pin(p);
        v_ring.release(n);
#pragma unroll
        for (int i = 0; i < DV / 2; ++i) o[i] *= factor[i / 2 % 2];
        pack_rows(p, s);
      }
      if constexpr (!L::o_in_q) q_ring.release(round);
      v_ring.wait(n);
      pin(o), pin(p);
      wgmma_begin();
      multiply_nn<DV, BN>(o, p, base + L::v + v_ring.slot(n) * v_tile);
      wgmma_commit();
      wgmma_wait<0>();
      pin(o);
      v_ring.release(n);
      ++n;

      float inverse[2];
      const int64_t at = int64_t(b * a.H + h) * a.T + t;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float total = row_sum(sum[r]);
        inverse[r] = total > 0 ? 1 / total : 0.f;
        if (lane % 4 == 0 && t + 8 * r < a.T) lse[at + 8 * r] = total > 0 ? row[r] * a.scale + logf(total) : -INFINITY;
      }
      if (amax) store_row_amax(amax + at, o, inverse[0], inverse[1], t, a.T);
      if constexpr (L::o_in_q) {
        named_barrier(1 + wg, 128);  // all four warps have done with this warpgroup's rows of q
        store_rows<DV, BM>(o, inverse[0], inverse[1], q_rows, 1 + wg, o_map, t0, h, b);
        if (threadIdx.x % 128 == 0) store_wait();
        named_barrier(1 + wg, 128);
        q_ring.release(round);
      } else {
        if (threadIdx.x % 128 == 0) store_wait();  // the previous item's rows have left
        named_barrier(1 + wg, 128);
        store_rows<DV, 64>(o, inverse[0], inverse[1], o_rows, 1 + wg, o_map, t0, h, b);
      }
    }
    if (threadIdx.x % 128 == 0) store_wait();
  }
#else
  __trap();  // code for another architecture, which has sm80's kernels
#endif
}

template <int D, int DV, class Mask>
void forward(cudaStream_t stream, bf16* o, float* lse, float* amax, const bf16* q, const bf16* k, const bf16* v,
             const Problem& a, const Mask& mask) {
  using L = Forward<D, DV>;
  const int items = a.B * a.H * ceil_div(a.T, L::BM);
  launch(stream, forward_kernel<D, DV, Mask>, {persistent_blocks(items), 384, L::bytes},
         tensor_map(q, a.ld_q, a.H, D, a.T, a), tensor_map(k, a.ld_kv, a.HKV, D, a.keys, a),
         tensor_map(v, a.ld_v, a.HKV, DV, a.keys, a), tensor_map(o, a.ld_o, a.H, DV, a.T, a), lse, amax, a, mask,
         next_list());
}

}  // namespace attention::sm90
