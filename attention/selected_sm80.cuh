// The selected branch on any GPU since Ampere (sm_80): mma.sync, rows gathered by cp.async and read by ldmatrix.
//
// A unit's rows are its queries' heads, one query after another: row r is head r % group of entry r / group. They are
// taken in tiles whatever the group, so that no size of it leaves a tensor core idle.
#pragma once

#include "attention/selected_lists.cuh"
#include "attention/sm80.cuh"

namespace attention::selected::sm80 {

using namespace attention::sm80;
constexpr int block_threads = 128;

// A piece's keys or values; what follows its last is zero.
template <int D>
__device__ inline void load_piece(uint32_t to, const bf16* from, int64_t ld, int valid) {
#pragma unroll 4
  for (int i = threadIdx.x; i < piece_keys * D / 8; i += block_threads) {
    const int r = i / (D / 8), c = i % (D / 8);
    copy16(piece<D>(to, r, c), r < valid ? from + r * ld + c * 8 : from, r < valid);
  }
}
// Four lanes exchange 4 x 4 words: x[i] of lane c becomes what was x[c] of lane i.
__device__ inline void transpose_quad(uint32_t (&x)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    uint32_t y = __shfl_xor_sync(~0u, odd ? x[i] : x[i + 1], 1);
    (odd ? x[i] : x[i + 1]) = y;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    uint32_t y = __shfl_xor_sync(~0u, high ? x[i] : x[i + 2], 2);
    (high ? x[i] : x[i + 2]) = y;
  }
}

// Partial outputs. A block owns a unit and keeps the piece's K and V; a warp takes every fourth tile of 32 rows, by
// itself from the gather to the store: it fetches the next tile's Q as soon as it has its scores. Q is read once for
// each slot, from L2 mostly; slots are written once, normalised and rounded, with their lse. H200, T 65536, 32/8 heads,
// D 128, 16 blocks: 5.6 ms, 197 TFLOP/s; nothing is busy more than 62 % (L2), 12 warps wait for each other's results.
template <int D, int DV>
constexpr int forward_bytes = (piece_keys * (D + DV) + 128 * D) * 2;

template <int D, int DV>
__global__ void __launch_bounds__(block_threads, D == 192   ? 2
                                                 : D == 128 ? 3
                                                            : 4)
    forward_kernel(bf16* slot_rows, float* slot_lse, const bf16* q, const bf16* k, const bf16* v, Problem a, int pair0,
                   int segment) {
  begin_kernel();
#ifndef __CUDA_ARCH_FEAT_SM90_ALL  // Hopper has its own
  constexpr int M = 32, N = piece_keys;
  Unit unit;
  int pair, list;
  if (!unit_of(a, pair0, segment, &unit, &pair, &list)) return;
  const int b = pair / a.HKV, head = pair % a.HKV, key = a.first_key(unit.piece), keys = a.key_count(unit.piece);
  const int s0 = a.first_query(segment), rows = unit.count * a.group;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t k_tile = shared_base(), v_tile = k_tile + N * D * 2;
  const uint32_t q_tile = v_tile + N * DV * 2 + warp * M * D * 2;
  const int* entries = a.entries + int64_t(list) * a.segment * a.slots + unit.first;
  const int64_t kv_at = (int64_t(b) * a.T + key) * a.ld;
  q += (int64_t(b) * a.T + s0) * a.ld + head * a.group * D;
  slot_rows += int64_t(pair - pair0) * a.segment * a.slots * a.group * DV;
  slot_lse += int64_t(pair - pair0) * a.segment * a.slots * a.group;

  load_piece<D>(k_tile, k + kv_at + head * D, a.ld, keys);
  load_piece<DV>(v_tile, v + kv_at + head * DV, a.ld, keys);

  // Lane l holds row l of the current tile: the slot of its result (-1: none), and how many keys it sees.
  int to, limit;
  auto entry_of = [&](int tile) {
    const int r = tile * M + lane;
    return r < rows ? entries[r / a.group] : -1;
  };
  auto gather = [&](int tile, int entry) {
    const int g = (tile * M + lane) % a.group, x = entry / a.slots;
    to = entry < 0 ? -1 : entry * a.group + g;
    limit = entry < 0 ? keys : min(keys, s0 + x + 1 - key);
    const int from = entry < 0 ? -1 : int((x * a.ld + g * D) / 8);
#pragma unroll
    for (int i = 0; i < D / 8; ++i) {
      const int x = i * 32 + lane, r = x / (D / 8), c = x % (D / 8), at = __shfl_sync(~0u, from, r);
      copy16(piece<D>(q_tile, r, c), q + (at < 0 ? 0 : int64_t(at) * 8) + c * 8, at >= 0);
    }
    copies_commit();
  };
  int next = entry_of(warp);
  gather(warp, next);
  next = entry_of(warp + 4);
  copies_wait<0>();
  __syncthreads();

#pragma unroll 1
  for (int tile = warp; tile * M < rows; tile += 4) {
    copies_wait<0>();
    __syncwarp();
    float s[2][N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) s[0][i] = s[1][i] = 0;
#pragma unroll
    for (int c = 0; c < D / 16; ++c) {
      uint32_t x[2][4], y[4];
      load_matrices(x[0], piece<D>(q_tile, lane % 16, 2 * c + lane / 16));
      load_matrices(x[1], piece<D>(q_tile, 16 + lane % 16, 2 * c + lane / 16));
#pragma unroll
      for (int n = 0; n < N / 16; ++n) {
        load_matrices(y, piece<D>(k_tile, n * 16 + lane / 16 * 8 + lane % 8, 2 * c + lane / 8 % 2));
#pragma unroll
        for (int m = 0; m < 2; ++m) mma(s[m] + 8 * n, x[m], y[0], y[1]), mma(s[m] + 8 * n + 4, x[m], y[2], y[3]);
      }
    }
    const int here = to, sees = limit;
    __syncwarp();  // all lanes have read Q
    if ((tile + 4) * M < rows) {
      gather(tile + 4, next);
      next = entry_of(tile + 8);
    }
    if (__shfl_sync(~0u, sees, 0) < N) {  // row 0's query is the earliest
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const int most = __shfl_sync(~0u, sees, m * 16 + r * 8 + lane / 4) - lane % 4 * 2;
#pragma unroll
          for (int i = 0; i < N / 4; ++i)
            if (i / 2 * 8 + i % 2 >= most) s[m][i / 2 * 4 + 2 * r + i % 2] = -INFINITY;
        }
    }
    uint32_t p[2][N / 4];
    float inverse[2][2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = -INFINITY, sum = 0;
#pragma unroll
        for (int i = 0; i < N / 8; ++i) top = fmaxf(top, fmaxf(s[m][4 * i + 2 * r], s[m][4 * i + 2 * r + 1]));
        const float shift = row_max(top) * a.scale_log2;
#pragma unroll
        for (int i = 0; i < N / 4; ++i) {
          float& x = s[m][i / 2 * 4 + 2 * r + i % 2];
          x = exp2_approx(fmaf(x, a.scale_log2, -shift));
          sum += x;
        }
        sum = row_sum(sum);
        inverse[m][r] = 1 / sum;
        const int at = __shfl_sync(~0u, here, m * 16 + r * 8 + lane / 4);
        if (lane % 4 == 0 && at >= 0) slot_lse[at] = shift + log2f(sum);
      }
      pack_rows(p[m], s[m]);
    }
#pragma unroll
    for (int c = 0; c < DV / 32; ++c) {  // 32 columns
      float acc[2][16];
#pragma unroll
      for (int i = 0; i < 16; ++i) acc[0][i] = acc[1][i] = 0;
#pragma unroll
      for (int n = 0; n < N / 16; ++n)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          uint32_t y[4];
          load_matrices_transposed(y, piece<DV>(v_tile, n * 16 + lane % 16, 4 * c + 2 * e + lane / 16));
#pragma unroll
          for (int m = 0; m < 2; ++m)
            mma(acc[m] + 8 * e, p[m] + 4 * n, y[0], y[1]), mma(acc[m] + 8 * e + 4, p[m] + 4 * n, y[2], y[3]);
        }
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          uint32_t x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i)
            x[i] = pack_bf16(acc[m][4 * i + 2 * r] * inverse[m][r], acc[m][4 * i + 2 * r + 1] * inverse[m][r]);
          transpose_quad(x);
          const int at = __shfl_sync(~0u, here, m * 16 + r * 8 + lane / 4);
          if (at >= 0)
            __stcs(reinterpret_cast<uint4*>(slot_rows + int64_t(at) * DV + c * 32 + lane % 4 * 8),
                   uint4{x[0], x[1], x[2], x[3]});
        }
    }
  }
#endif
}

// dK, dV and the slots' dQ, in one kernel: five products. A block owns a unit; a warp owns 16 of the piece's keys, for
// which it sums dK and dV in registers over all rows, 64 at a time: S^T = K Q^T, P^T = exp(S^T - lse), dV += P^T dO,
// dP^T = V dO^T, dS^T = P^T (dP^T - delta), dK += dS^T Q. dS^T meets the others' in shared memory, and the warp makes a
// quarter of the tile's dS K from it. Q, dO and statistics are read once for each slot, from L2 mostly; slots are
// written once, rounded, without the scale. stages: of tiles; two fetch ahead, and at D = 128 want 109 KiB. H200, T
// 65536, 32/8 heads, D 128, 16 blocks: 17.4 ms, 158 TFLOP/s; shared memory is what it waits for.
template <int D, int DV, int stages>
struct Backward {
  static constexpr int M = 64, N = piece_keys, q_bytes = M * D * 2, do_bytes = M * DV * 2;
  static constexpr int k = 0, v = k + N * D * 2, q = v + N * DV * 2;
  static constexpr int d_o = q + stages * q_bytes, ds = d_o + stages * do_bytes;
  static constexpr int info = ds + M * N * 2;  // [3][from in q, from in do, to, limit, lse, delta][M]
  static constexpr int bytes = info + 3 * 6 * M * 4;
};

template <int D, int DV, int stages>
__global__ void __launch_bounds__(block_threads, 2)
    backward_kernel(bf16* slot_rows, float* sums, float* split_sums, const bf16* d_o, const bf16* q, const bf16* k,
                    const bf16* v, const float2* stats, Problem a, int pair0, int segment) {
  begin_kernel();
#ifndef __CUDA_ARCH_FEAT_SM90_ALL  // Hopper has its own
  using L = Backward<D, DV, stages>;
  constexpr int M = L::M, N = L::N;
  extern __shared__ __align__(1024) uint8_t smem[];
  Unit unit;
  int pair, list;
  if (!unit_of(a, pair0, segment, &unit, &pair, &list)) return;
  const int b = pair / a.HKV, head = pair % a.HKV, key = a.first_key(unit.piece), keys = a.key_count(unit.piece);
  const int s0 = a.first_query(segment), rows = unit.count * a.group, tiles = ceil_div(rows, M);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const uint32_t base = shared_base(), k_tile = base + L::k, v_tile = base + L::v, ds_tile = base + L::ds;
  const int* entries = a.entries + int64_t(list) * a.segment * a.slots + unit.first;
  const int64_t kv_at = (int64_t(b) * a.T + key) * a.ld, row0 = int64_t(b) * a.T + s0;
  q += row0 * a.ld + head * a.group * D;
  d_o += (row0 * a.H + head * a.group) * DV;
  stats += row0 * a.H + head * a.group;
  slot_rows += int64_t(pair - pair0) * a.segment * a.slots * a.group * D;

  auto info = [&](int n, int field) { return reinterpret_cast<int*>(smem + L::info) + (n % 3 * 6 + field) * M; };
  auto entry_of = [&](int n) {  // threads 0 to M - 1, each for its row of tile n
    const int r = n * M + int(threadIdx.x);
    return threadIdx.x < M && r < rows ? entries[r / a.group] : -1;
  };
  auto stats_of = [&](int n, int entry) {
    return entry < 0 ? float2{INFINITY, 0}
                     : stats[int64_t(entry / a.slots) * a.H + (n * M + int(threadIdx.x)) % a.group];
  };
  auto store_info = [&](int n, int entry, float2 stat) {
    if (threadIdx.x >= M) return;
    const int g = (n * M + int(threadIdx.x)) % a.group, x = entry / a.slots, r = threadIdx.x;
    info(n, 0)[r] = entry < 0 ? -1 : int((x * a.ld + g * D) / 8);
    info(n, 1)[r] = entry < 0 ? -1 : int((int64_t(x) * a.H + g) * DV / 8);
    info(n, 2)[r] = entry < 0 ? -1 : entry * a.group + g;
    info(n, 3)[r] = entry < 0 ? keys : min(keys, s0 + x + 1 - key);
    info(n, 4)[r] = __float_as_int(stat.x), info(n, 5)[r] = __float_as_int(stat.y);
  };
  auto gather = [&](int n) {
    const uint32_t q_to = base + L::q + n % stages * L::q_bytes, do_to = base + L::d_o + n % stages * L::do_bytes;
#pragma unroll
    for (int i = 0; i < M * D / 8 / block_threads; ++i) {
      const int x = i * block_threads + threadIdx.x, r = x / (D / 8), c = x % (D / 8), at = info(n, 0)[r];
      copy16(piece<D>(q_to, r, c), q + (at < 0 ? 0 : int64_t(at) * 8) + c * 8, at >= 0);
    }
#pragma unroll
    for (int i = 0; i < M * DV / 8 / block_threads; ++i) {
      const int x = i * block_threads + threadIdx.x, r = x / (DV / 8), c = x % (DV / 8), at = info(n, 1)[r];
      copy16(piece<DV>(do_to, r, c), d_o + (at < 0 ? 0 : int64_t(at) * 8) + c * 8, at >= 0);
    }
    copies_commit();
  };
  int entry = entry_of(0);
  store_info(0, entry, stats_of(0, entry));
  entry = entry_of(1);
  store_info(1, entry, stats_of(1, entry));
  entry = entry_of(2);
  load_piece<D>(k_tile, k + kv_at + head * D, a.ld, keys);
  load_piece<DV>(v_tile, v + kv_at + head * DV, a.ld, keys);
  __syncthreads();
  if (stages > 1) gather(0);

  float dk[D / 2], dv[DV / 2];
#pragma unroll
  for (float& x : dk) x = 0;
#pragma unroll
  for (float& x : dv) x = 0;
#pragma unroll 1
  for (int n = 0; n < tiles; ++n) {
    const float2 stat = stats_of(n + 2, entry);
    if (stages > 1 && n + 1 < tiles) {
      gather(n + 1);
      copies_wait<1>();
    } else {
      if (stages == 1) gather(n);
      copies_wait<0>();
    }
    __syncthreads();  // the tile has come, and everybody has left the one before
    {
      const uint32_t q_rows = base + L::q + n % stages * L::q_bytes, do_rows = base + L::d_o + n % stages * L::do_bytes;
      const int* limits = info(n, 3);
      const bool whole = limits[0] == N;  // the first row's query is the earliest
      float s[M / 2], dp[M / 2];
      uint32_t p[M / 4];
      multiply_nt<D, M>(s, k_tile, warp * 16, q_rows);
      multiply_nt<DV, M>(dp, v_tile, warp * 16, do_rows);
#pragma unroll
      for (int i = 0; i < M / 8; ++i) {
        const float2 l = *reinterpret_cast<const float2*>(info(n, 4) + i * 8 + lane % 4 * 2);
        const float2 d = *reinterpret_cast<const float2*>(info(n, 5) + i * 8 + lane % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float& x = s[4 * i + e];
          x = exp2_approx(fmaf(x, a.scale_log2, -(e % 2 ? l.y : l.x)));
          dp[4 * i + e] -= e % 2 ? d.y : d.x;
        }
        if (!whole) {
          const int2 most = *reinterpret_cast<const int2*>(limits + i * 8 + lane % 4 * 2);
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (warp * 16 + lane / 4 + e / 2 * 8 >= (e % 2 ? most.y : most.x)) s[4 * i + e] = 0;
        }
      }
      pack_rows(p, s);
      multiply_nn<DV, M>(dv, p, do_rows);
#pragma unroll
      for (int i = 0; i < M / 2; ++i) s[i] *= dp[i];
      pack_rows(p, s);
#pragma unroll
      for (int i = 0; i < M / 4; ++i) {  // rows are pieces of 8 columns here, keys the rows
        const int j = warp * 16 + lane / 4 + i % 2 * 8;
        *reinterpret_cast<uint32_t*>(smem + L::ds + j * M * 2 + ((i / 2) ^ (j & 7)) * 16 + lane % 4 * 4) = p[i];
      }
      multiply_nn<D, M>(dk, p, q_rows);
    }
    if (n + 2 < tiles) store_info(n + 2, entry, stat);
    entry = entry_of(n + 3);
    __syncthreads();  // dS is there
    const int r0 = warp % 2 * 32;
#pragma unroll
    for (int half = 0; half < D / 64; ++half) {
      const int c0 = warp / 2 * (D / 16) + half * 4;  // 32 columns, from the piece c0
      float acc[2][16];
#pragma unroll
      for (int i = 0; i < 16; ++i) acc[0][i] = acc[1][i] = 0;
#pragma unroll
      for (int j = 0; j < N / 16; ++j) {
        uint32_t x[2][4], y[4];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int row = j * 16 + lane / 16 * 8 + lane % 8;
          load_matrices_transposed(x[m], ds_tile + row * M * 2 + (((r0 + m * 16) / 8 + lane / 8 % 2) ^ (row & 7)) * 16);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          load_matrices_transposed(y, piece<D>(k_tile, j * 16 + lane % 16, c0 + 2 * e + lane / 16));
#pragma unroll
          for (int m = 0; m < 2; ++m) mma(acc[m] + 8 * e, x[m], y[0], y[1]), mma(acc[m] + 8 * e + 4, x[m], y[2], y[3]);
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          uint32_t x[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) x[i] = pack_bf16(acc[m][4 * i + 2 * r], acc[m][4 * i + 2 * r + 1]);
          transpose_quad(x);
          const int at = info(n, 2)[r0 + m * 16 + r * 8 + lane / 4];
          if (at >= 0)
            __stcs(reinterpret_cast<uint4*>(slot_rows + int64_t(at) * D + c0 * 8 + lane % 4 * 8),
                   uint4{x[0], x[1], x[2], x[3]});
        }
    }
  }
  add_to_sums<D, DV>(sums, split_sums, dk, dv, unit, a, pair - pair0, key, keys);
#endif
}

}  // namespace attention::selected::sm80
