// The selected branch on Hopper (sm_90a): wgmma, with rows gathered by cp.async.
//
// As on sm_80, a block owns a unit: it keeps 64 keys and values and takes the rows of their list, 64 at a time, so that
// each side of a product is one warpgroup's 64 rows. Tiles in shared memory: 64 rows x D as panels of 64 x 64,
// swizzled, as attention/sm90.cuh has them. A block is one warpgroup; several of them to a multiprocessor hide each
// other's gathers, exponentials and stores.
#pragma once

#include "attention/selected_sm80.cuh"
#include "attention/sm90.cuh"

namespace attention::selected::sm90 {

constexpr int block_threads = 128, M = 64, N = piece_keys;  // rows of a tile; keys

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

using namespace attention::sm90;

__device__ inline uint32_t piece_at(uint32_t tile, int row, int c) {  // address of 8 elements, columns 8c to 8c + 7
  return tile + c / 8 * 64 * 128 + row * 128 + ((c % 8) ^ (row % 8)) * 16;
}

// A piece's keys or values; what follows its last is zero.
template <int D>
__device__ inline void load_piece(uint32_t to, const bf16* from, int64_t ld, int valid) {
#pragma unroll
  for (int i = 0; i < N * D / 8 / block_threads; ++i) {
    const int x = i * block_threads + threadIdx.x, r = x / (D / 8), c = x % (D / 8);
    copy16(piece_at(to, r, c), r < valid ? from + r * ld + c * 8 : from, r < valid);
  }
}
// Four words of each lane to the rows of a warp's 16 x 16 elements, at columns 8c and on, of a panel.
__device__ inline void store_matrices(uint32_t panel, int warp, int c, const uint32_t* x) {
  const int lane = threadIdx.x % 32, r = warp * 16 + lane % 16;
  hopper::store_matrices(panel + r * 128 + ((c + lane / 16) ^ (r % 8)) * 16, x[0], x[1], x[2], x[3]);
}

// `pieces` threads share the rows of a tile from their own on, `stride` apart, and gather each piece by piece; the
// first of them know one row each. A row past the list's last is the last again, and nothing comes of it.
template <int D>
struct Rows {
  static constexpr int pieces = D % 128 ? 8 : 16, stride = block_threads / pieces, own = M / stride;
  const int* entries;
  int rows;
  __device__ static bool knows() { return int(threadIdx.x) % pieces < own; }
  __device__ static int row() { return int(threadIdx.x) % pieces * stride + int(threadIdx.x) / pieces; }
  __device__ int of_list(int n) const { return n * M + row(); }  // that row of tile n
  // Its query's entry. Loaded a tile ahead: the first to compute with it waits for the load.
  __device__ int entry(int n, const Problem& a) const {
    return knows() ? entries[a.by_group(min(of_list(n), rows - 1))] : 0;
  }
  struct Row {
    int query, head, slot;  // in the segment; in the group; -1: none
  };
  __device__ Row row_of(int n, int entry, const Problem& a) const {
    const int r = min(of_list(n), rows - 1), head = r - a.by_group(r) * a.group;
    return {a.by_slots(entry), head, knows() && of_list(n) < rows ? entry * a.group + head : -1};
  }
  // Rows of W. at: in units of 8 elements from `from`.
  template <int W>
  __device__ static void gather(uint32_t tile, const bf16* from, int at) {
    const int lane = threadIdx.x % 32, c = threadIdx.x % pieces;
    from += c * 8;
#pragma unroll
    for (int i = 0; i < own; ++i) {
      const int x = __shfl_sync(~0u, at, lane / pieces * pieces + i), r = i * stride + threadIdx.x / pieces;
      const bf16* first = from + int64_t(x) * 8;
#pragma unroll
      for (int turn = 0; turn < W / 8; turn += pieces) copy16(piece_at(tile, r, turn + c), first + turn * 8);
    }
  }
};

__device__ inline uint4 load_shared4(uint32_t at) {
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "r"(at)
               : "memory");
  return x;
}
// Written once and read by the next kernel. Without a branch, which would hold back the loads behind it.
__device__ inline void store_if(bool wanted, bf16* to, const uint4& x) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.s32 p, %5, 0;\n"
      "@p st.global.cs.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(int(wanted))
      : "memory");
}

// The slots of rows of D that a warp's 16 rows go to: this lane writes 16 bytes of rows lane/8 + 0, 4, 8 and 12.
template <int D>
struct Slots {
  bf16* at[4];
  bool there[4];
  __device__ Slots(bf16* rows, uint32_t to) {  // to: where shared memory has the tile's slots
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16 + lane / 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int slot = load_shared(to + (first + 4 * i) * 4);
      there[i] = slot >= 0, at[i] = rows + int64_t(slot) * D + lane % 8 * 8;
    }
  }
  // W columns from `col` on as bf16, by way of 1 KiB of the warp's own: 8 rows of 64 columns at a time, whole lines.
  template <int W>
  __device__ void store(const float (&d)[W / 2], uint32_t room, int col = 0) const {
    const int lane = threadIdx.x % 32, in = lane % 8, out = lane / 8;
#pragma unroll
    for (int x = 0; x < W / 32; ++x) {
      const int c = x / 2, half = x % 2;
      const float* y = d + 32 * c + 2 * half;
#pragma unroll
      for (int i = 0; i < 2; ++i)
        hopper::store_matrices(room + in * 128 + ((4 * i + out) ^ in) * 16, pack_bf16(y[16 * i], y[16 * i + 1]),
                               pack_bf16(y[16 * i + 4], y[16 * i + 5]), pack_bf16(y[16 * i + 8], y[16 * i + 9]),
                               pack_bf16(y[16 * i + 12], y[16 * i + 13]));
      __syncwarp();
      uint4 line[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) line[r] = load_shared4(room + (out + 4 * r) * 128 + (in ^ (out + 4 * r)) * 16);
      __syncwarp();
#pragma unroll
      for (int r = 0; r < 2; ++r) store_if(there[2 * half + r], at[2 * half + r] + col + c * 64, line[r]);
    }
  }
};

#endif  // sm_90a

// Partial outputs. A block owns a unit, a thread parts of two rows of the current tile. Q is read once for each slot,
// from L2 mostly, and a tile's is fetched as soon as the one before has made its scores; slots are written once,
// normalised and rounded, with their lse. H200, T 65536, 32/8 heads, D 128, 16 listed: 4.7 ms in a step, for 1.1 TFLOP,
// 8.6 GB of Q and as much of slots; L1's data pipe and L2 65 % busy, DRAM 46 %.
template <int D, int DV>
struct Forward {
  static constexpr int k = 0, v = k + N * D * 2, q = v + N * DV * 2, room = q + M * D * 2;
  static constexpr int info = room + 4096, bytes = info + 2 * 2 * M * 4 + 1024;  // [2][to, limit][M]
};

template <int D, int DV>
__global__ void __launch_bounds__(block_threads, D > 128 ? 3 : 4)
    forward_kernel(bf16* slot_rows, float* slot_lse, const bf16* q, const bf16* k, const bf16* v, Problem a, int pair0,
                   int segment) {
  begin_kernel();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using L = Forward<D, DV>;
  Unit unit;
  int pair, list;
  if (!unit_of(a, pair0, segment, &unit, &pair, &list)) return;
  const int b = pair / a.HKV, head = pair % a.HKV, key = a.first_key(unit.piece), keys = a.key_count(unit.piece);
  const int s0 = a.first_query(segment), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t base = shared_base(), k_tile = base + L::k, v_tile = base + L::v, q_tile = base + L::q;
  const Rows<D> rows{a.entries + int64_t(list) * a.segment * a.slots + unit.first, unit.count * a.group};
  const int64_t kv_at = (int64_t(b) * a.T + key) * a.ld;
  q += (int64_t(b) * a.T + s0) * a.ld + head * a.group * D;
  slot_rows += int64_t(pair - pair0) * a.segment * a.slots * a.group * DV;
  slot_lse += int64_t(pair - pair0) * a.segment * a.slots * a.group;

  auto info = [&](int n, int field) { return base + L::info + ((n % 2 * 2 + field) * M) * 4; };
  auto gather = [&](int n, int entry) {
    const auto x = rows.row_of(n, entry, a);
    rows.template gather<D>(q_tile, q, int((x.query * a.ld + x.head * D) / 8));
    copies_commit();
    if (rows.knows()) {
      store_shared(info(n, 0) + rows.row() * 4, x.slot);
      store_shared(info(n, 1) + rows.row() * 4, x.slot < 0 ? keys : min(keys, s0 + x.query + 1 - key));
    }
  };
  load_piece<D>(k_tile, k + kv_at + head * D, a.ld, keys);
  load_piece<DV>(v_tile, v + kv_at + head * DV, a.ld, keys);
  gather(0, rows.entry(0, a));
  int next = rows.entry(1, a);

  const int tiles = ceil_div(rows.rows, M);
#pragma unroll 1
  for (int n = 0; n < tiles; ++n) {
    copies_wait<0>();
    shared_visible();
    __syncthreads();  // the tile has come
    float s[N / 2], o[DV / 2];
    wgmma_begin();
    multiply_nt<D, M, N>(s, q_tile, k_tile);
    wgmma_commit();
    const int r0 = warp * 16 + lane / 4;
    const int to[2] = {load_shared(info(n, 0) + r0 * 4), load_shared(info(n, 0) + r0 * 4 + 32)};
    const bool whole = load_shared(info(n, 1)) == N;  // the first row's query is the earliest
    wgmma_wait<0>();
    pin(s);
    __syncthreads();  // everybody has left it
    if (n + 1 < tiles) {
      gather(n + 1, next);
      next = rows.entry(n + 2, a);
    }
    if (!whole) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int most = load_shared(info(n, 1) + (r0 + 8 * r) * 4) - lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < N / 4; ++i)
          if (i / 2 * 8 + i % 2 >= most) s[i / 2 * 4 + 2 * r + i % 2] = -INFINITY;
      }
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float top = -INFINITY, sum = 0;
#pragma unroll
      for (int i = 0; i < N / 8; ++i) top = fmaxf(top, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
      const float shift = row_max(top) * a.scale_log2;
#pragma unroll
      for (int i = 0; i < N / 4; ++i) {
        float& x = s[i / 2 * 4 + 2 * r + i % 2];
        x = exp2_approx(fmaf(x, a.scale_log2, -shift));
        sum += x;
      }
      sum = row_sum(sum);
      if (lane % 4 == 0 && to[r] >= 0) slot_lse[to[r]] = shift + __log2f(sum);
      sum = __fdividef(1, sum);
#pragma unroll
      for (int i = 0; i < N / 4; ++i) s[i / 2 * 4 + 2 * r + i % 2] *= sum;
    }
    uint32_t p[N / 4];
    pack_rows(p, s);
    pin(p);
    wgmma_begin();
    multiply_nn_fresh<DV>(o, p, v_tile);
    wgmma_commit();
    wgmma_wait<0>();
    pin(o), pin(p);
    Slots<DV>(slot_rows, info(n, 0)).template store<DV>(o, base + L::room + warp * 1024);
  }
#else
  __trap();  // code for another architecture, which has sm80's kernels
#endif
}

// dK, dV and the slots' dQ, in one kernel: five products. A block owns a unit, a thread parts of two keys' dK and dV,
// which it sums in registers over all rows: S^T = K Q^T, P^T = exp(S^T - lse), dV += P^T dO, dP^T = V dO^T,
// dS^T = P^T (dP^T - delta), dK += dS^T Q. dS^T goes through shared memory to become the other side of dQ = dS K. Q, dO
// and statistics are read once for each slot, from L2 mostly, a tile ahead; slots are written once, rounded, without
// the scale. H200, T 65536, 32/8 heads, D 128, 16 blocks: 8.0 ms in a step, 345 TFLOP/s (tensor pipes 50 % busy, L1's
// data pipe 75 %, L2 70 %): registers allow two blocks, which is too few to keep any of these full.
template <int D, int DV>
struct Backward {
  static constexpr int stages =
      D > 128 ? 1 : 2;  // of tiles of Q and dO: for wide keys two would leave room for a block
  static constexpr int q_tile = M * D * 2, do_tile = M * DV * 2, k = 0, v = k + N * D * 2, q = v + N * DV * 2;
  static constexpr int d_o = q + stages * q_tile, ds = d_o + stages * do_tile, room = ds + M * N * 2,
                       info = room + 4096;  // [2][to, limit, lse, delta][M]
  static constexpr int bytes = info + 2 * 4 * M * 4 + 1024;
};

template <int D, int DV>
__global__ void __launch_bounds__(block_threads, 2)
    backward_kernel(bf16* slot_rows, float* sums, float* split_sums, const bf16* d_o, const bf16* q, const bf16* k,
                    const bf16* v, const float2* stats, Problem a, int pair0, int segment) {
  begin_kernel();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using L = Backward<D, DV>;
  Unit unit;
  int pair, list;
  if (!unit_of(a, pair0, segment, &unit, &pair, &list)) return;
  const int b = pair / a.HKV, head = pair % a.HKV, key = a.first_key(unit.piece), keys = a.key_count(unit.piece);
  const int s0 = a.first_query(segment), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t base = shared_base(), k_tile = base + L::k, v_tile = base + L::v, ds_tile = base + L::ds;
  const Rows<D> rows{a.entries + int64_t(list) * a.segment * a.slots + unit.first, unit.count * a.group};
  const int64_t kv_at = (int64_t(b) * a.T + key) * a.ld, row0 = int64_t(b) * a.T + s0;
  q += row0 * a.ld + head * a.group * D;
  d_o += (row0 * a.H + head * a.group) * DV;
  stats += row0 * a.H + head * a.group;
  slot_rows += int64_t(pair - pair0) * a.segment * a.slots * a.group * D;

  auto info = [&](int n, int field) { return base + L::info + ((n % 2 * 4 + field) * M) * 4; };
  auto gather = [&](int n, int entry) {  // returns the row's statistics, for store_stats
    const auto x = rows.row_of(n, entry, a);
    const float2 stat = x.slot < 0 ? float2{INFINITY, 0} : stats[int64_t(x.query) * a.H + x.head];
    const int slot = n % L::stages;
    rows.template gather<D>(base + L::q + slot * L::q_tile, q, int((x.query * a.ld + x.head * D) / 8));
    rows.template gather<DV>(base + L::d_o + slot * L::do_tile, d_o, int((int64_t(x.query) * a.H + x.head) * DV / 8));
    copies_commit();
    if (rows.knows()) {
      store_shared(info(n, 0) + rows.row() * 4, x.slot);
      store_shared(info(n, 1) + rows.row() * 4, x.slot < 0 ? keys : min(keys, s0 + x.query + 1 - key));
    }
    return stat;
  };
  auto store_stats = [&](int n, float2 stat) {
    if (!rows.knows()) return;
    store_shared(info(n, 2) + rows.row() * 4, __float_as_int(stat.x));
    store_shared(info(n, 3) + rows.row() * 4, __float_as_int(stat.y));
  };
  load_piece<D>(k_tile, k + kv_at + head * D, a.ld, keys);
  load_piece<DV>(v_tile, v + kv_at + head * DV, a.ld, keys);
  float2 stat = gather(0, rows.entry(0, a));
  int next = rows.entry(1, a);
  store_stats(0, stat);

  float dk[D / 2], dv[DV / 2];
#pragma unroll
  for (int i = 0; i < D / 2; ++i) dk[i] = 0;
#pragma unroll
  for (int i = 0; i < DV / 2; ++i) dv[i] = 0;
  pin(dk), pin(dv);
  const int tiles = ceil_div(rows.rows, M);
#pragma unroll 1
  for (int n = 0; n < tiles; ++n) {
    const uint32_t q_tile = base + L::q + n % L::stages * L::q_tile;
    const uint32_t do_tile = base + L::d_o + n % L::stages * L::do_tile;
    copies_wait<0>();
    shared_visible();
    __syncthreads();  // the tile has come, and everybody has left the one before
    const auto gather_next = [&] {
      if (n + 1 == tiles) return;
      stat = gather(n + 1, next);
      next = rows.entry(n + 2, a);
    };
    float s[M / 2], dp[M / 2];
    uint32_t p[M / 4], ds[M / 4];
    const auto start_dp = [&] {
      multiply_nt<DV, N, M>(dp, v_tile, do_tile);
      wgmma_commit();
    };
    wgmma_begin();
    multiply_nt<D, N, M>(s, k_tile, q_tile);
    wgmma_commit();
    // dK of wide keys takes the registers in which P, packed, would lie beside dP: there one product waits for another.
    if constexpr (D <= 128) start_dp(), gather_next();
    const bool whole = load_shared(info(n, 1)) == N;  // the first row's query is the earliest
    wgmma_wait<D <= 128 ? 1 : 0>();
    pin(s);
#pragma unroll
    for (int i = 0; i < M / 8; ++i) {
      const float2 l = load_shared2(info(n, 2) + i * 32 + lane % 4 * 8);
#pragma unroll
      for (int e = 0; e < 4; ++e) s[4 * i + e] = exp2_approx(fmaf(s[4 * i + e], a.scale_log2, -(e % 2 ? l.y : l.x)));
    }
    if (!whole) {
#pragma unroll
      for (int i = 0; i < M / 8; ++i) {
        const float2 most = load_shared2(info(n, 1) + i * 32 + lane % 4 * 8);
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (warp * 16 + lane / 4 + e / 2 * 8 >= __float_as_int(e % 2 ? most.y : most.x)) s[4 * i + e] = 0;
      }
    }
    pack_rows(p, s);
    pin(p);
    wgmma_begin();
    multiply_nn<DV, M>(dv, p, do_tile);
    wgmma_commit();
    if constexpr (D > 128) {
      wgmma_wait<0>();
      pin(dv);
      wgmma_begin();
      start_dp();
      wgmma_wait<0>();
    } else {
      wgmma_wait<1>();
    }
    pin(dp);
#pragma unroll
    for (int i = 0; i < M / 8; ++i) {
      const float2 d = load_shared2(info(n, 3) + i * 32 + lane % 4 * 8);
#pragma unroll
      for (int e = 0; e < 4; ++e) s[4 * i + e] *= dp[4 * i + e] - (e % 2 ? d.y : d.x);
    }
    pack_rows(ds, s);
#pragma unroll
    for (int i = 0; i < M / 16; ++i) store_matrices(ds_tile, warp, 2 * i, ds + 4 * i);
    pin(ds);
    wgmma_begin();
    multiply_nn<D, M>(dk, ds, q_tile);
    wgmma_commit();
    const uint32_t room = base + L::room + warp * 1024;
    if constexpr (D > 128) {
      wgmma_wait<0>();
      pin(dk), pin(ds);
      shared_visible();
      __syncthreads();  // dS is there, and everybody has left Q and dO
      gather_next();
      if (n + 1 < tiles) store_stats(n + 1, stat);
      const Slots<D> slots(slot_rows, info(n, 0));
#pragma unroll
      for (int c = 0; c < D / 64; ++c) {  // dQ, 64 columns at a time
        float dq[32];
        wgmma_begin();
        multiply_tn<64>(dq, ds_tile, k_tile + c * N * 128);
        wgmma_commit();
        wgmma_wait<0>();
        pin(dq);
        slots.template store<64>(dq, room, c * 64);
      }
    } else {
      wgmma_wait<1>();
      pin(dv), pin(p);
      shared_visible();
      __syncthreads();  // dS is there
      float dq[D / 2];
      wgmma_begin();
      multiply_tn<D>(dq, ds_tile, k_tile);
      wgmma_commit();
      if (n + 1 < tiles) store_stats(n + 1, stat);
      wgmma_wait<0>();
      pin(dq), pin(dk), pin(ds);
      Slots<D>(slot_rows, info(n, 0)).template store<D>(dq, room);
    }
  }
  add_to_sums<D, DV>(sums, split_sums, dk, dv, unit, a, pair - pair0, key, keys);
#else
  __trap();  // code for another architecture, which has sm80's kernels
#endif
}

}  // namespace attention::selected::sm90
