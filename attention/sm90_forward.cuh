// Attention's forward on Hopper. The accumulator of Q K^T, rounded to bf16, is in place as the left operand of P V:
// nothing but inputs passes through shared memory.
//
// A persistent block takes items, one after another, so that loading the next and storing the last hide behind
// products. An item is 128 queries of one head, 64 for each of two consumer warpgroups (Share::rows). Or, with heads of
// 64, which leave registers free, three warpgroups share 64 queries and each walks every third tile of their keys
// (Share::keys): where items of 128 are too few and too unequal for a GPU. Their sums are joined in the tiles' order.
// An item whose queries see no key walks a tile all the same, of which it sees nothing. A consumer thread owns parts of
// two rows. Q is read once; K and V once for each item, from L2
// mostly; o and lse are written once. Scores of the next key tile are in flight while the previous one's P V is, and
// the softmax runs beside both. H200, T 8192, 32/8 heads, D 128: 0.79 to 0.86 ms, 640 to 695 TFLOP/s (tensor pipes 76 %
// busy at 1.7 GHz). T 65536: a window of 512 1.15 ms (480 TFLOP/s of what is seen, 600 of the five tiles walked for
// four), keys compressed 32/16 3.4 to 3.8 ms (580 to 650).
#pragma once

#include "attention/sm90.cuh"

namespace attention::sm90 {

template <int D, int DV, Share share>
struct Forward {
  static constexpr bool by_keys = share == Share::keys;
  static constexpr int warpgroups = by_keys ? 3 : 2, threads = 128 * (1 + warpgroups);
  static constexpr int producers_registers = 24, registers = by_keys ? 160 : 240;
  static constexpr int BM = by_keys ? 64 : 64 * warpgroups, BN = 128;
  // By keys a slot is one warpgroup's, for ever: K's is free while the warpgroup makes probabilities.
  static constexpr int readers = by_keys ? 4 : 4 * warpgroups;  // warps of a tile
  static constexpr int row_stages = D == 64 ? 3 : 2;
  static constexpr int k_stages = by_keys ? warpgroups : row_stages, v_stages = by_keys ? 2 * warpgroups : row_stages;
  // o on its way out has memory of its own, 64 rows a warpgroup, or, where keys are too wide for that, the item's q's,
  // which is over.
  static constexpr bool o_in_q = D > 128;
  static constexpr int q = 0, o = o_in_q ? q : q + BM * D * 2,
                       k = o_in_q ? q + BM * D * 2 : o + warpgroups * 64 * DV * 2;
  static constexpr int v = k + k_stages * BN * D * 2, part = v + v_stages * BN * DV * 2;
  // Sums of rows, of the warpgroups that come second and third to an item, thread by thread: o, and two rows' maxima
  // and sums.
  static constexpr int part_numbers = DV / 2 + 4, part_bytes = part_numbers * 128 * 4;
  static constexpr int word_bytes = BM / 64 * 16, words = part + (by_keys ? (warpgroups - 1) * part_bytes : 0);
  static constexpr int bars = words + k_stages * word_bytes;
  static constexpr int items = bars + 16 * (k_stages + v_stages + 1 + warpgroups - 1), bytes = items + 32 + 1024;
};

// Maps of q (B,T,H,D), o (B,T,H,DV), k (B,keys,HKV,D), v (B,keys,HKV,DV); lse (B,H,T), amax (B,H,T) or null.
template <int D, int DV, Share share, class Mask>
__global__ void __launch_bounds__(Forward<D, DV, share>::threads, 1)
    forward_kernel(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
                   const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap o_map, float* lse,
                   float* amax, Problem a, Mask mask, int list) {
  begin_kernel();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using L = Forward<D, DV, share>;
  constexpr int BM = L::BM, BN = L::BN, k_tile = BN * D * 2, v_tile = BN * DV * 2;
  uint32_t base = shared_base();
  Ring<L::k_stages> k_ring(base + L::bars);
  Ring<L::v_stages> v_ring(k_ring.full + k_ring.bytes);
  Ring<1> q_ring(v_ring.full + v_ring.bytes);
  const auto part_ring = [&](int place) { return Ring<1>(q_ring.full + place * q_ring.bytes); };  // of places from 1 on
  const Items items(base + L::items, a, list, BM);
  if (threadIdx.x == 0) {
    k_ring.init(L::readers), v_ring.init(L::readers), q_ring.init(4 * L::warpgroups);
    items.ring.init(4 * L::warpgroups);
    for (int place = 1; L::by_keys && place < L::warpgroups; ++place) part_ring(place).init(4);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();

  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    fewer_registers<L::producers_registers>();
    if (threadIdx.x == 0) {
      int n = 0;  // tiles of K and V so far
      for (int round = 0, item = blockIdx.x; items.publish(round, item); ++round) {
        int b, q0, h;
        items.order.locate(item, a, &b, &q0, &h);
        item = items.draw();  // early, so that it is there when it is wanted
        int first = mask.first_key(q0) / BN, last = ceil_div(mask.last_key(q0 + BM), BN);
        if (last == first) ++last;
        load_tile<BM, D>(base + L::q, q_map, q_ring.acquire(round, BM * D * 2), q0, h, b);
        for (int j = last - 1; j >= first; --j, ++n) {
          int slot = k_ring.slot(n);
          uint32_t bar = k_ring.acquire(n, k_tile + (Mask::chooses ? 16 * (BM / 64) : 0));
          load_tile<BN, D>(base + L::k + slot * k_tile, k_map, bar, j * BN, h / a.group, b);
          if constexpr (Mask::chooses)
            for (int i = 0; i < BM / 64; ++i)
              bulk_load(base + L::words + slot * L::word_bytes + i * 16,
                        mask.words_at(b, h / a.group, min(q0 / 64 + i, a.Tp / 64 - 1), j * 2), 16, bar);
          slot = v_ring.slot(n);
          load_tile<BN, DV>(base + L::v + slot * v_tile, v_map, v_ring.acquire(n, v_tile), j * BN, h / a.group, b);
        }
      }
    }
  } else {
    more_registers<L::registers>();
    int wg = warpgroup - 1, lane = threadIdx.x % 32;
    uint32_t q_rows = base + L::q + (L::by_keys ? 0 : wg * 64 * 128), o_rows = base + L::o + wg * 64 * DV * 2;
    constexpr int step = L::by_keys ? L::warpgroups : 1;
    int n0 = 0;  // tiles of K and V before this item
    for (int round = 0, item; items.receive(round, &item); ++round) {
      int b, q0, h;
      items.order.locate(item, a, &b, &q0, &h);
      int first = mask.first_key(q0) / BN, last = ceil_div(mask.last_key(q0 + BM), BN);
      if (last == first) ++last;
      int t0 = L::by_keys ? q0 : q0 + wg * 64;
      int t = t0 + threadIdx.x / 32 % 4 * 16 + lane / 4;  // this thread's rows: t and t + 8

      float s[BN / 2], o[DV / 2], row[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, factor[2];
      uint32_t p[BN / 4];
#pragma unroll
      for (int i = 0; i < DV / 2; ++i) o[i] = 0;

      auto chosen = [&](int n) {  // in tile n
        return chosen_of<Mask, 2>(base + L::words + k_ring.slot(n) * L::word_bytes + (L::by_keys ? 0 : wg * 16));
      };
      // Scores of key tile j to probabilities relative to the rows' maxima so far.
      auto softmax = [&](int j, const auto& chosen) {
        constexpr int blocks = Mask::chooses ? BN / 64 : 1;
        if (!mask.whole(t0, t0 + 64, j * BN, (j + 1) * BN))
#pragma unroll
          for (int i = 0; i < BN / 2; ++i)
            if (!mask.visible(t + i / 2 % 2 * 8, j * BN + i / 4 * 8 + lane % 4 * 2 + i % 2)) s[i] = -INFINITY;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          // A row of this thread's has chosen a block or has not: all of a block's keys have one answer.
          bool seen[blocks];
          float top = row[r];
#pragma unroll
          for (int c = 0; c < blocks; ++c) {
            seen[c] = chosen.visible(t + 8 * r, c * 64);
            float with_block = top;
#pragma unroll
            for (int i = c * (BN / 8 / blocks); i < (c + 1) * (BN / 8 / blocks); ++i)
              with_block = fmaxf(with_block, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
            if (seen[c]) top = with_block;
          }
          top = row_max(top);
          float shift = top == -INFINITY ? 0.f : top * a.scale_log2;  // a row that sees nothing yet
          factor[r] = exp2_approx(row[r] * a.scale_log2 - shift);
          row[r] = top;
          float part = 0;
#pragma unroll
          for (int i = 0; i < BN / 8; ++i) {
            float& x = s[4 * i + 2 * r];
            float& y = s[4 * i + 2 * r + 1];
            const float from = seen[i / (BN / 8 / blocks)] ? -shift : -INFINITY;
            x = exp2_approx(fmaf(x, a.scale_log2, from));
            y = exp2_approx(fmaf(y, a.scale_log2, from));
            part += x + y;
          }
          sum[r] = sum[r] * factor[r] + part;
        }
      };

      const int n1 = n0 + last - first;  // tiles after this item
      // Tiles go to warpgroups in turns, also from item to item: `place` says how many have one before this. By keys it
      // may have none of an item's.
      const int place = (wg - n0 % step + step) % step;
      int n = n0 + (L::by_keys ? place : 0);
      const auto tile_of = [&](int n) { return last - 1 - (n - n0); };
      q_ring.wait(round);
      if (!L::by_keys || n < n1) {
        k_ring.wait(n);
        wgmma_begin();
        multiply_nt<D, BM, BN>(s, q_rows, base + L::k + k_ring.slot(n) * k_tile);
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
        const auto first_chosen = chosen(n);
        k_ring.release(n);
        softmax(tile_of(n), first_chosen);
        pack_rows(p, s);

#pragma unroll 1
        for (; n + step < n1; n += step) {
          const int next = n + step;
          k_ring.wait(next);
          wgmma_begin();
          multiply_nt<D, BM, BN>(s, q_rows, base + L::k + k_ring.slot(next) * k_tile);
          wgmma_commit();
          v_ring.wait(n);
          pin(o), pin(p);
          wgmma_begin();
          multiply_nn<DV, BN>(o, p, base + L::v + v_ring.slot(n) * v_tile);
          wgmma_commit();
          const auto next_chosen = chosen(next);
          wgmma_wait<1>();
          pin(s);
          k_ring.release(next);
          softmax(tile_of(next), next_chosen);
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
      } else if constexpr (!L::o_in_q) {
        q_ring.release(round);
      }
      n0 = n1;

#pragma unroll
      for (int r = 0; r < 2; ++r) sum[r] = row_sum(sum[r]);
      if constexpr (L::by_keys) {
        const auto number = [&](int place, int i) {
          return base + L::part + (place - 1) * L::part_bytes + (i * 128 + threadIdx.x % 128) * 4;
        };
        if (place > 0) {
          const Ring<1> ring = part_ring(place);
          ring.wait_free(round);
#pragma unroll
          for (int i = 0; i < DV / 2; ++i) store_shared(number(place, i), o[i]);
#pragma unroll
          for (int r = 0; r < 2; ++r)
            store_shared(number(place, DV / 2 + r), row[r]), store_shared(number(place, DV / 2 + 2 + r), sum[r]);
          named_barrier(1 + wg, 128);
          if (threadIdx.x % 128 == 0) barrier_arrive(ring.full);
          continue;
        }
#pragma unroll 1
        for (int next = 1; next < L::warpgroups; ++next) {
          part_ring(next).wait(round);
          float theirs[2];
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const float other = load_shared_float(number(next, DV / 2 + r)), top = fmaxf(row[r], other);
            const float shift = top == -INFINITY ? 0.f : top * a.scale_log2;
            factor[r] = exp2_approx(row[r] * a.scale_log2 - shift),
            theirs[r] = exp2_approx(other * a.scale_log2 - shift);
            row[r] = top, sum[r] = sum[r] * factor[r] + load_shared_float(number(next, DV / 2 + 2 + r)) * theirs[r];
          }
#pragma unroll
          for (int i = 0; i < DV / 2; ++i)
            o[i] = o[i] * factor[i / 2 % 2] + load_shared_float(number(next, i)) * theirs[i / 2 % 2];
          part_ring(next).release(round);
        }
      }

      float inverse[2];
      const int64_t at = int64_t(b * a.H + h) * a.T + t;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        inverse[r] = sum[r] > 0 ? 1 / sum[r] : 0.f;
        if (lane % 4 == 0 && t + 8 * r < a.T)
          lse[at + 8 * r] = sum[r] > 0 ? row[r] * a.scale + logf(sum[r]) : -INFINITY;
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
    let_next_in();
    if (threadIdx.x % 128 == 0) store_wait();
  }
#else
  __trap();  // code for another architecture, which has sm80's kernels
#endif
}

template <int D, int DV, Share share, class Mask>
void forward(cudaStream_t stream, bf16* o, float* lse, float* amax, const bf16* q, const bf16* k, const bf16* v,
             const Problem& a, const Mask& mask) {
  using L = Forward<D, DV, share>;
  const int items = a.B * a.H * ceil_div(a.T, L::BM);
  launch(stream, forward_kernel<D, DV, share, Mask>, {persistent_blocks(items), L::threads, L::bytes},
         tensor_map(q, a.ld_q, a.H, D, a.T, a), tensor_map(k, a.ld_kv, a.HKV, D, a.keys, a),
         tensor_map(v, a.ld_v, a.HKV, DV, a.keys, a), tensor_map(o, a.ld_o, a.H, DV, a.T, a), lse, amax, a, mask,
         next_list());
}
template <int D, int DV, class Mask>
void forward(cudaStream_t stream, bf16* o, float* lse, float* amax, const bf16* q, const bf16* k, const bf16* v,
             const Problem& a, const Mask& mask) {
  if constexpr (D == 64)
    if (share_of(a, mask) == Share::keys) return forward<D, DV, Share::keys>(stream, o, lse, amax, q, k, v, a, mask);
  forward<D, DV, Share::rows>(stream, o, lse, amax, q, k, v, a, mask);
}

}  // namespace attention::sm90
