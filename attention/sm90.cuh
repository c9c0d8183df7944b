// Attention on Hopper (sm_90a): wgmma reads tiles from shared memory that TMA has put there.
//
// Every kernel is three warpgroups. One thread of the first is the producer: it keeps a ring of tiles filled. The other
// two are consumers: each owns 64 rows of the block's 128-row tile and every matrix product that makes them, so they
// never exchange anything; while one runs its exponentials, the other keeps the tensor cores busy.
//
// Nothing but inputs passes through shared memory. The accumulator of one product, rounded to bf16, is in place as the
// left operand of the next (P V; dS K; P^T dO; dS^T Q). For dK and dV that takes scores transposed, K Q^T, which is why
// the backward is two kernels, one that stays with its keys and one that stays with its queries. Together they do seven
// products where one fused kernel does five, but share no sums, add nothing atomically, and every sum has one order.
//
// Tiles in shared memory: R rows x D as D/64 panels of R x 64, a row of a panel being 128 bytes, its eight 16-byte
// pieces permuted by the row number (the 128-byte swizzle that TMA writes and wgmma reads). A panel row is a column
// group of a row-major matrix, so one copy serves as operand either way: contracted over D (scores) or over rows.
#pragma once

#include <cuda.h>

#include <atomic>
#include <map>
#include <tuple>

#include "attention/tiles.cuh"
#include "attention/wgmma.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error "Hopper kernels need -gencode arch=compute_90a,code=sm_90a (sm_90 without the a has no wgmma)"
#endif

namespace attention::sm90 {

constexpr int consumers = 8;  // warps of this file's kernels that read what the producer fetches

static __device__ unsigned items_drawn[256];  // one count a launch in flight; see Items

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// ------------------------------------------------------------------------------------- barriers, copies, registers
// Addresses are 32-bit shared-memory addresses throughout.

__device__ inline void barrier_init(uint32_t bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals));
}
__device__ inline void barrier_expect(uint32_t bar, uint32_t bytes) {  // arrives, and waits for that many bytes too
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ inline void barrier_arrive(uint32_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ inline void barrier_wait(uint32_t bar, uint32_t parity) {  // for the phase of that parity to end
  uint32_t done;
  do {
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
  } while (!done);
}

// A ring of `stages` slots: the n-th tile goes to slot n % stages. full: the copy has landed; empty: all the warps that
// read it, as many as init was told, are done with it. One lane arrives for its warp, behind a __syncwarp that puts the
// other lanes' reads before it. A race checker that follows barriers thread by thread does not see that; built with
// -DEVERY_LANE_ARRIVES=1, which is slower, it has nothing to report.
#ifndef EVERY_LANE_ARRIVES
#define EVERY_LANE_ARRIVES 0
#endif
template <int stages>
struct Ring {
  uint32_t full, empty;
  __device__ explicit Ring(uint32_t at) : full(at), empty(at + 8 * stages) {}
  static constexpr int bytes = 16 * stages;
  __device__ void init(int warps) const {
    for (int i = 0; i < stages; ++i)
      barrier_init(full + 8 * i, 1), barrier_init(empty + 8 * i, EVERY_LANE_ARRIVES ? 32 * warps : warps);
  }
  static __device__ int slot(int n) { return n % stages; }
  // Producer: wait until slot n is free, then promise the bytes of its copies. Returns the barrier they signal.
  __device__ uint32_t acquire(int n, uint32_t bytes) const {
    wait_free(n);
    barrier_expect(full + 8 * slot(n), bytes);
    return full + 8 * slot(n);
  }
  __device__ void wait_free(int n) const {
    barrier_wait(empty + 8 * slot(n), ((n / stages) & 1) ^ 1);  // a fresh barrier counts as one phase ended
  }
  __device__ void wait(int n) const { barrier_wait(full + 8 * slot(n), (n / stages) & 1); }
  __device__ void release(int n) const {  // all lanes of a warp call it
    __syncwarp();
    if (EVERY_LANE_ARRIVES || threadIdx.x % 32 == 0) barrier_arrive(empty + 8 * slot(n));
  }
};

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

template <int registers>
__device__ inline void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}
template <int registers>
__device__ inline void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}
__device__ inline void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The warpgroup's number; equal in all lanes, which the compiler can see.
__device__ inline int warpgroup_index() { return __shfl_sync(~0u, threadIdx.x / 128, 0); }

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
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(pack_bf16(d[4 * i] * f0, d[4 * i + 1] * f0)), "r"(pack_bf16(d[4 * i + 2] * f1, d[4 * i + 3] * f1)),
                 "r"(pack_bf16(d[4 * i + 4] * f0, d[4 * i + 5] * f0)),
                 "r"(pack_bf16(d[4 * i + 6] * f1, d[4 * i + 7] * f1))
                 : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
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
// The same thread that stored waits until its shared memory has been read.
__device__ inline void store_wait() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }

__device__ inline uint32_t shared_base() {  // swizzled tiles must start at multiples of 1024
  extern __shared__ uint8_t smem[];
  return (uint32_t(__cvta_generic_to_shared(smem)) + 1023) & ~1023u;
}
__device__ inline int load_shared(uint32_t at) {
  int x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(at) : "memory");
  return x;
}
__device__ inline void store_shared(uint32_t at, int x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory");
}
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

// Who sees what in a tile: the mask itself, or, where a mask chooses, what came with the tile. words: of the tile's
// first and second 64 keys, `step` bytes apart, which of 64 queries see them; 0 for a tile of 64 keys.
template <class Mask>
__device__ inline auto rule_of(const Mask& mask, uint32_t words, uint32_t step) {
  if constexpr (Mask::chooses) return typename Mask::Tile{load_shared64(words), load_shared64(words + step)};
  else return mask;
}

// The work queue of persistent blocks: items of 128 queries of one head, those with most keys first; heads fastest, so
// that a group's blocks share K and V in L2. A block begins with the item of its own number and draws the next from a
// counter while it works; the block that draws the last number resets the counter. So a block that starts late, because
// another stream's kernel occupies its SM, leaves no fixed share of the work behind. The producer passes an item to the
// consumers through one word of shared memory.
struct Items {
  Ring<1> ring;
  uint32_t word;
  int tiles, count, list;
  static constexpr int bytes = Ring<1>::bytes + 16;

  __device__ Items(uint32_t at, const Problem& a, int list_)
      : ring(at), word(at + Ring<1>::bytes), tiles(ceil_div(a.T, 128)), count(a.B * tiles * a.H), list(list_) {}
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
  __device__ void locate(int item, const Problem& a, int* b, int* q0, int* h) const {
    *h = item % a.H;
    *q0 = (tiles - 1 - item / a.H % tiles) * 128;
    *b = item / a.H / tiles;
  }
};

#endif  // sm_90a

// ---------------------------------------------------------------------------------------------------------- forward
// A persistent block takes items of 128 queries of one head, one after another, so that loading the next and storing
// the last hide behind products. An item whose queries see no key walks a tile all the same, of which it sees nothing.
// A consumer thread owns parts of two rows. Q is read once; K and V once for each 128 queries and head, from L2 mostly;
// o and lse are written once. Scores of the next key tile are in flight while the previous one's P V is, and the
// softmax runs beside both. H200, T 8192, 32/8 heads, D 128: 0.79 to 0.86 ms, 640 to 695 TFLOP/s (tensor pipes 76 %
// busy at 1.7 GHz). T 65536: a window of 512 1.15 ms (480 TFLOP/s of what is seen, 600 of the five tiles walked for
// four), keys compressed 32/16 3.4 to 3.8 ms (580 to 650).

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

      auto rule = [&](int n) {  // who sees what, in tile n
        return rule_of(mask, base + L::words + k_ring.slot(n) * 32 + wg * 16, 8);
      };
      // Scores of key tile j to probabilities relative to the rows' maxima so far.
      auto softmax = [&](int j, const auto& rule) {
        if (!rule.whole(t0, t0 + 64, j * BN, (j + 1) * BN)) {
#pragma unroll
          for (int i = 0; i < BN / 2; ++i)
            if (!rule.visible(t + i / 2 % 2 * 8, j * BN + i / 4 * 8 + lane % 4 * 2 + i % 2)) s[i] = -INFINITY;
        }
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
      const auto first_rule = rule(n);
      k_ring.release(n);
      softmax(last - 1, first_rule);
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
        const auto next_rule = rule(n + 1);
        wgmma_wait<1>();
        pin(s);
        k_ring.release(n + 1);
        softmax(j, next_rule);
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

// ------------------------------------------------------------------------------------------------------ dK and dV
// A block owns 128 keys of one KV head and walks the queries of the group's heads that see them, all or its part
// (KvLoop), 64 at a time; a consumer thread owns parts of two keys' rows. S^T = K Q^T, P^T = exp(S^T - lse),
// dV += P^T dO, dP^T = V dO^T, dS^T = P^T (dP^T - delta), dK += dS^T Q (times scale, at the end). Read once: K, V; for
// each 128 keys: Q, dO and the queries' statistics. Written once: dK, dV (or, of a part, its sums in fp32).
// H200, T 8192, 32/8 heads, D 128: 1.66 to 1.75 ms, four products at 630 to 660 TFLOP/s (tensor pipes 70 % busy at 1.77
// GHz): a 64-wide product with both operands in shared memory reads it as fast as it can be read; registers allow no
// wider one. T 65536: a window of 512 2.3 ms, keys compressed 32/16 7.5 to 7.8 ms.

template <int D, int DV>
struct BackwardKV {
  static constexpr int BM = 64, BN = 128, stages = D == 64 ? 4 : 3;
  static constexpr int k = 0, v = k + BN * D * 2, q = v + BN * DV * 2, d_o = q + stages * BM * D * 2;
  static constexpr int stats = d_o + stages * BM * DV * 2, bars = stats + stages * BM * 8;
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
        bar = ring.acquire(n, q_tile + do_tile + 2 * BM * 4);
        load_tile<BM, D>(base + L::q + slot * q_tile, q_map, bar, m * BM, h, b);
        bulk_load(base + L::stats + slot * BM * 8, lse2 + stats, BM * 4, bar);
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
    auto probabilities = [&](int n, int m) {  // of step n, query tile m, in place of the scores
#pragma unroll
      for (int i = 0; i < BM / 8; ++i) {
        float2 l = load_shared2(stats(n) + i * 32);
#pragma unroll
        for (int e = 0; e < 4; ++e) s[4 * i + e] = exp2_approx(fmaf(s[4 * i + e], a.scale_log2, -(e % 2 ? l.y : l.x)));
      }
      if (!mask.whole(m * BM, (m + 1) * BM, j0, j0 + 64)) {
#pragma unroll
        for (int i = 0; i < BM / 2; ++i)
          if (!mask.visible(m * BM + i / 4 * 8 + lane % 4 * 2 + i % 2, j + i / 2 % 2 * 8)) s[i] = 0;
      }
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
// Items as in the forward; their keys go past 128 at a time. A consumer thread owns parts of two rows. S = Q K^T,
// P = exp(S - lse), dP = dO V^T, dS = P (dP - delta), dQ += dS K (times scale, at the end). Read once: Q, dO,
// statistics; for each 128 queries and head: K, V. Written once: dQ.
// H200, T 8192, 32/8 heads, D 128: 1.02 to 1.1 ms, three products at 750 to 810 TFLOP/s (tensor pipes 91 % busy).
// T 65536: a window of 512 1.6 ms, keys compressed 32/16 4.8 ms.

template <int D, int DV>
struct BackwardQ {
  static constexpr int BM = 128, BN = D > 128 ? 64 : 128, stages = 2;
  static constexpr int q = 0, d_o = q + BM * D * 2, dq = d_o + BM * DV * 2, k = dq + BM * D * 2;
  static constexpr int v = k + stages * BN * D * 2, bars = v + stages * BN * DV * 2;
  static constexpr int items = bars + 16 * (2 * stages + 1), bytes = items + 32 + 1024;
};

// Maps of q, dq (B,T,H,D), do (B,T,H,DV), k (B,keys,HKV,D), v (B,keys,HKV,DV); lse2, delta (B,H,Tp).
template <int D, int DV, class Mask>
__global__ void __launch_bounds__(384, 1)
    backward_q(const __grid_constant__ CUtensorMap q_map, const __grid_constant__ CUtensorMap k_map,
               const __grid_constant__ CUtensorMap v_map, const __grid_constant__ CUtensorMap do_map,
               const __grid_constant__ CUtensorMap dq_map, const float* lse2, const float* delta, Problem a, Mask mask,
               int list) {
  begin_kernel();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using L = BackwardQ<D, DV>;
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
        uint32_t bar = q_ring.acquire(round, BM * (D + DV) * 2);
        load_tile<BM, D>(base + L::q, q_map, bar, q0, h, b);
        load_tile<BM, DV>(base + L::d_o, do_map, bar, q0, h, b);
        for (int j = last - 1; j >= first; --j, ++n) {
          int slot = k_ring.slot(n);
          load_tile<BN, D>(base + L::k + slot * k_tile, k_map, k_ring.acquire(n, k_tile), j * BN, h / a.group, b);
          load_tile<BN, DV>(base + L::v + slot * v_tile, v_map, v_ring.acquire(n, v_tile), j * BN, h / a.group, b);
        }
      }
    }
  } else {
    more_registers<240>();
    int wg = warpgroup - 1, lane = threadIdx.x % 32;
    uint32_t q_rows = base + L::q + wg * 64 * 128, do_rows = base + L::d_o + wg * 64 * 128;
    uint32_t dq_rows = base + L::dq + wg * 64 * 128;
    int n0 = 0;  // tiles of K and V before this item
    for (int round = 0, item; items.receive(round, &item); ++round) {
      int b, q0, h;
      items.locate(item, a, &b, &q0, &h);
      int first = mask.first_key(q0) / BN, last = ceil_div(mask.last_key(q0 + BM), BN);
      int t0 = q0 + wg * 64, t = t0 + threadIdx.x / 32 % 4 * 16 + lane / 4;  // this thread's rows: t and t + 8
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
      auto probabilities = [&](int j) {  // of key tile j, in place of the scores
        if (!mask.whole(t0, t0 + 64, j * BN, (j + 1) * BN)) {
#pragma unroll
          for (int i = 0; i < BN / 2; ++i)
            if (!mask.visible(t + i / 2 % 2 * 8, j * BN + i / 4 * 8 + lane % 4 * 2 + i % 2)) s[i] = -INFINITY;
        }
#pragma unroll
        for (int i = 0; i < BN / 2; ++i) s[i] = exp2_approx(fmaf(s[i], a.scale_log2, -l[i / 2 % 2]));
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
      const int steps = last - first;
      q_ring.wait(round);
      if (steps > 0) {
        start_scores(n0);
        start_dp(n0);
        wgmma_wait<1>();
        pin(s);
        probabilities(last - 1);
        wgmma_wait<0>();
        pin(dp);
        v_ring.release(n0);
#pragma unroll 1
        for (int n = n0; n + 1 < n0 + steps; ++n) {  // finds P and dP of step n finished and nothing in flight
          pack_ds();
          accumulate(n);
          start_scores(n + 1);
          wgmma_wait<1>();  // dQ's product: dS's registers make room for dP
          pin(dq);
          k_ring.release(n);
          start_dp(n + 1);
          wgmma_wait<1>();  // the scores; dP runs beside the exponentials
          pin(s);
          probabilities(last - 2 - (n - n0));
          wgmma_wait<0>();
          pin(dp);
          v_ring.release(n + 1);
        }
        pack_ds();
        accumulate(n0 + steps - 1);
        wgmma_wait<0>();
        pin(dq);
        k_ring.release(n0 + steps - 1);
        n0 += steps;
      }
      q_ring.release(round);
      if (threadIdx.x % 128 == 0) store_wait();  // the previous item's rows have left
      named_barrier(1 + wg, 128);
      store_rows<D, BM>(dq, a.scale, a.scale, dq_rows, 1 + wg, dq_map, t0, h, b);
    }
    if (threadIdx.x % 128 == 0) store_wait();
  }
#else
  __trap();  // code for another architecture, which has sm80's kernels
#endif
}

// ---------------------------------------------------------------------------------------------------------- launches

// Every copy is a box of 64 rows x 64 columns of one head; the map knows the strides and where the sequence ends.
inline CUtensorMap encoded_map(const bf16* p, int64_t ld, int heads, int dim, int rows, const Problem& a) {
  static const auto encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
    CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000, cudaEnableDefault, &found));
#else
    CUDA_CHECK(cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &f, cudaEnableDefault, &found));
#endif
    if (!f || found != cudaDriverEntryPointSuccess)
      throw CudaError("attention: the driver has no cuTensorMapEncodeTiled; it must support CUDA 12 or newer");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(f);
  }();
  CUtensorMap map;
  cuuint64_t dims[4] = {cuuint64_t(dim), cuuint64_t(rows), cuuint64_t(heads), cuuint64_t(a.B)};
  cuuint64_t strides[3] = {cuuint64_t(ld * 2), cuuint64_t(dim * 2), cuuint64_t(rows * ld * 2)};
  cuuint32_t box[4] = {64, 64, 1, 1}, steps[4] = {1, 1, 1, 1};
  CUresult r = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, const_cast<bf16*>(p), dims, strides, box, steps,
                      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
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

// Persistent blocks: one an SM. Launches take the lists of items in turn: two that are 256 launches apart share one and
// must not run side by side. Those of one stream never do.
inline int persistent_blocks(int items) {
  int device, sms;
  CUDA_CHECK(cudaGetDevice(&device));
  CUDA_CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device));
  return sms < items ? sms : items;
}
inline int next_list() {
  static std::atomic<unsigned> launches{0};
  return int(launches++ % 256);
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

template <int D, int DV, class Mask>
void backward(cudaStream_t stream, bf16* dq, bf16* dk, bf16* dv, const bf16* d_o, const bf16* q, const bf16* k,
              const bf16* v, const float* lse2, const float* delta, const Problem& a, const Mask& mask, int parts,
              float* part_sums) {
  using KV = BackwardKV<D, DV>;
  using Q = BackwardQ<D, DV>;
  CUtensorMap q_map = tensor_map(q, a.ld_q, a.H, D, a.T, a), do_map = tensor_map(d_o, a.ld_o, a.H, DV, a.T, a);
  CUtensorMap k_map = tensor_map(k, a.ld_kv, a.HKV, D, a.keys, a), v_map = tensor_map(v, a.ld_v, a.HKV, DV, a.keys, a);
  launch(stream, backward_kv<D, DV, Mask>, {a.B * a.HKV * parts * ceil_div(a.keys, KV::BN), 384, KV::bytes}, q_map,
         k_map, v_map, do_map, tensor_map(dk, a.ld_dkv, a.HKV, D, a.keys, a),
         tensor_map(dv, a.ld_dv, a.HKV, DV, a.keys, a), lse2, delta, a, mask, parts, part_sums);
  launch(stream, backward_q<D, DV, Mask>, {persistent_blocks(a.B * a.H * ceil_div(a.T, Q::BM)), 384, Q::bytes}, q_map,
         k_map, v_map, do_map, tensor_map(dq, a.ld_dq, a.H, D, a.T, a), lse2, delta, a, mask, next_list());
}

}  // namespace attention::sm90
