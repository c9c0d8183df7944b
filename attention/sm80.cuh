// Attention on any GPU since Ampere (sm_80): mma.sync, with tiles brought in by cp.async and read by ldmatrix.
//
// Every kernel is 8 warps; a warp owns 16 rows of the block's 128 and every matrix product that makes them. The other
// side's tiles stream past in two stages. As on Hopper, an accumulator rounded to bf16 is in place as the left operand
// of the next product, and the backward is two kernels without atomics. 96 KiB of shared memory at D = 128, so that the
// smaller chips of the family run it too. D: head dim of q and k, DV: of v and o; 192 and 128 take 120 KiB in the
// backward and 128 KiB in the forward.
//
// Tiles in shared memory: R rows of D, each row's 16-byte pieces permuted by the row number, so that ldmatrix meets no
// bank twice.
#pragma once

#include "attention/kv_parts.cuh"

namespace attention::sm80 {

constexpr int rows = 128, threads = 256;

__device__ inline uint32_t shared_base() {
  extern __shared__ __align__(1024) uint8_t smem[];
  return uint32_t(__cvta_generic_to_shared(smem));
}
template <int D>
__device__ inline uint32_t piece(uint32_t tile, int row, int c) {  // address of 8 elements, columns 8c to 8c + 7
  return tile + row * D * 2 + (c ^ (row & 7)) * 16;
}
// R rows from `from`; those from `valid` on become zeros and are not read.
template <int R, int D>
__device__ inline void load_tile(uint32_t to, const bf16* from, int64_t ld, int valid) {
#pragma unroll
  for (int i = threadIdx.x; i < R * D / 8; i += threads) {
    int r = i / (D / 8), c = i % (D / 8);
    const bf16* p = r < valid ? from + r * ld + c * 8 : from;
    copy16(piece<D>(to, r, c), p, r < valid);
  }
}

__device__ inline void load_matrices(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(at)
               : "memory");
}
// d (16 x 8) += a (16 x 16) b (16 x 8). Lane 4g + c holds d[0..1]: row g, columns 2c, 2c + 1; d[2..3]: row g + 8.
__device__ inline void mma(float* d, const uint32_t* a, uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// s = A B^T. A: this warp's 16 rows, from row `row` of a tile; B: a whole tile of N rows.
template <int D, int N>
__device__ inline void multiply_nt(float (&s)[N / 2], uint32_t a, int row, uint32_t b) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < N / 2; ++i) s[i] = 0;
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    uint32_t x[4], y[4];
    load_matrices(x, piece<D>(a, row + lane % 16, 2 * k + lane / 16));
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
      load_matrices(y, piece<D>(b, n * 16 + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
      mma(s + 8 * n, x, y[0], y[1]);
      mma(s + 8 * n + 4, x, y[2], y[3]);
    }
  }
}
// d += P B. P: 16 x N in registers, as pack_rows leaves it; B: a tile of N rows.
template <int D, int N>
__device__ inline void multiply_nn(float (&d)[D / 2], const uint32_t (&p)[N / 4], uint32_t b) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int k = 0; k < N / 16; ++k)
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      uint32_t y[4];
      load_matrices_transposed(y, piece<D>(b, k * 16 + lane % 16, 2 * n + lane / 16));
      mma(d + 8 * n, p + 4 * k, y[0], y[1]);
      mma(d + 8 * n + 4, p + 4 * k, y[2], y[3]);
    }
}
// Writes a warp's 16 x D accumulator as bf16; `to` is its first row, of which `valid` exist.
template <int D>
__device__ inline void store_rows(bf16* to, int64_t ld, int valid, const float (&d)[D / 2], float f0, float f1) {
  int lane = threadIdx.x % 32, r = lane / 4;
#pragma unroll
  for (int i = 0; i < D / 8; ++i) {
    int c = i * 8 + lane % 4 * 2;
    if (r < valid) *reinterpret_cast<uint32_t*>(to + r * ld + c) = pack_bf16(d[4 * i] * f0, d[4 * i + 1] * f0);
    if (r + 8 < valid)
      *reinterpret_cast<uint32_t*>(to + (r + 8) * ld + c) = pack_bf16(d[4 * i + 2] * f1, d[4 * i + 3] * f1);
  }
}

template <int D>
__device__ inline void store_rows_fp32(float* to, int valid, const float (&d)[D / 2], float f) {  // rows of D
  int lane = threadIdx.x % 32, r = lane / 4;
#pragma unroll
  for (int i = 0; i < D / 4; ++i)
    if (r + i % 2 * 8 < valid)
      *reinterpret_cast<float2*>(to + (r + i % 2 * 8) * D + i / 2 * 8 + lane % 4 * 2) = {d[2 * i] * f,
                                                                                         d[2 * i + 1] * f};
}

// q (B,T,H,D), o (B,T,H,DV), k (B,keys,HKV,D), v (B,keys,HKV,DV), lse (B,H,T), amax (B,H,T) or null. A block owns 128
// queries of one head and walks their keys, 64 at a time, from the diagonal down.
template <int D, int DV>
constexpr int forward_bytes = (rows * D + 2 * 64 * (D + DV)) * 2;

template <int D, int DV, class Mask>
__global__ void __launch_bounds__(threads, 1) forward_kernel(bf16* o, float* lse, float* amax, const bf16* q,
                                                             const bf16* k, const bf16* v, Problem a, Mask mask) {
  begin_kernel();
#ifndef __CUDA_ARCH_FEAT_SM90_ALL  // Hopper has its own
  constexpr int BN = 64, k_bytes = BN * D * 2, v_bytes = BN * DV * 2;
  const uint32_t q_tile = shared_base(), k_tiles = q_tile + rows * D * 2, v_tiles = k_tiles + 2 * k_bytes;
  const int tiles = ceil_div(a.T, rows);
  const int h = blockIdx.x % a.H, q0 = (tiles - 1 - blockIdx.x / a.H % tiles) * rows, b = blockIdx.x / a.H / tiles;
  const int first = mask.first_key(q0) / BN, last = ceil_div(mask.last_key(q0 + rows), BN);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16, t = q0 + row + lane / 4;
  k += b * a.keys * a.ld_kv + h / a.group * D, v += b * a.keys * a.ld_v + h / a.group * DV;

  auto load = [&](int j) {
    int slot = j % 2;
    load_tile<BN, D>(k_tiles + slot * k_bytes, k + j * BN * a.ld_kv, a.ld_kv, a.keys - j * BN);
    load_tile<BN, DV>(v_tiles + slot * v_bytes, v + j * BN * a.ld_v, a.ld_v, a.keys - j * BN);
    copies_commit();
  };
  load_tile<rows, D>(q_tile, q + (int64_t(b) * a.T + q0) * a.ld_q + h * D, a.ld_q, a.T - q0);
  if (first < last) load(last - 1);

  float s[BN / 2], acc[DV / 2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  uint32_t p[BN / 4];
#pragma unroll
  for (int i = 0; i < DV / 2; ++i) acc[i] = 0;
#pragma unroll 1
  for (int j = last - 1; j >= first; --j) {
    if (j > first) load(j - 1), copies_wait<1>();
    else copies_wait<0>();
    __syncthreads();
    multiply_nt<D, BN>(s, q_tile, row, k_tiles + j % 2 * k_bytes);
    if (!mask.whole(q0 + row, q0 + row + 16, j * BN, (j + 1) * BN)) {
#pragma unroll
      for (int i = 0; i < BN / 2; ++i)
        if (!mask.visible(t + i / 2 % 2 * 8, j * BN + i / 4 * 8 + lane % 4 * 2 + i % 2)) s[i] = -INFINITY;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float m = top[r], part = 0;
#pragma unroll
      for (int i = 0; i < BN / 8; ++i) m = fmaxf(m, fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
      m = row_max(m);
      float shift = m == -INFINITY ? 0.f : m * a.scale_log2;  // a row that sees nothing yet
      float factor = exp2_approx(top[r] * a.scale_log2 - shift);
      top[r] = m;
#pragma unroll
      for (int i = 0; i < BN / 4; ++i) {
        float& x = s[i / 2 * 4 + 2 * r + i % 2];
        x = exp2_approx(fmaf(x, a.scale_log2, -shift));
        part += x;
      }
      sum[r] = sum[r] * factor + part;
#pragma unroll
      for (int i = 0; i < DV / 4; ++i) acc[i / 2 * 4 + 2 * r + i % 2] *= factor;
    }
    pack_rows(p, s);
    multiply_nn<DV, BN>(acc, p, v_tiles + j % 2 * v_bytes);
    __syncthreads();
  }
  float inverse[2];
  const int64_t at = int64_t(b * a.H + h) * a.T + t;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = row_sum(sum[r]);
    inverse[r] = total > 0 ? 1 / total : 0.f;
    if (lane % 4 == 0 && t + 8 * r < a.T) lse[at + 8 * r] = total > 0 ? top[r] * a.scale + logf(total) : -INFINITY;
  }
  if (amax) store_row_amax(amax + at, acc, inverse[0], inverse[1], t, a.T);
  int t0 = q0 + row;
  store_rows<DV>(o + (int64_t(b) * a.T + t0) * a.ld_o + h * DV, a.ld_o, a.T - t0, acc, inverse[0], inverse[1]);
#endif
}

// dK and dV. A block owns 128 keys of one KV head and walks the queries of the group's heads that see them, all or its
// part (KvLoop), 32 at a time: S^T = K Q^T, P^T = exp(S^T - lse), dV += P^T dO, dP^T = V dO^T,
// dS^T = P^T (dP^T - delta), dK += dS^T Q.
// dQ. A block owns 128 queries of one head and walks their keys, 32 at a time, likewise.
// q, dq (B,T,H,D), do (B,T,H,DV), k, dk (B,keys,HKV,D), v, dv (B,keys,HKV,DV); lse2, delta (B,H,Tp); part_sums: as
// part_at.
template <int D, int DV>
constexpr int backward_bytes = (rows + 2 * 32) * (D + DV) * 2;

template <int D, int DV, class Mask>
__global__ void __launch_bounds__(threads, 1)
    backward_kv(bf16* dk, bf16* dv, const bf16* d_o, const bf16* q, const bf16* k, const bf16* v, const float* lse2,
                const float* delta, Problem a, Mask mask, int parts, float* part_sums) {
  begin_kernel();
#ifndef __CUDA_ARCH_FEAT_SM90_ALL  // Hopper has its own
  constexpr int BM = 32, q_bytes = BM * D * 2, do_bytes = BM * DV * 2;
  const uint32_t k_tile = shared_base(), v_tile = k_tile + rows * D * 2;
  const uint32_t q_tiles = v_tile + rows * DV * 2, do_tiles = q_tiles + 2 * q_bytes;
  const int k_tiles = ceil_div(a.keys, rows);
  const int part = blockIdx.x % parts, head = blockIdx.x / parts % a.HKV;
  const int k0 = blockIdx.x / parts / a.HKV % k_tiles * rows, b = blockIdx.x / parts / a.HKV / k_tiles;
  const KvLoop loop(mask, k0, k0 + rows, BM, a.group, part, parts);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16, j = k0 + row + lane / 4;
  const int64_t row0 = int64_t(b) * a.keys + k0;

  auto load = [&](int slot, int h, int m) {
    int q0 = m * BM;
    int64_t at = int64_t(b) * a.T + q0;
    load_tile<BM, D>(q_tiles + slot * q_bytes, q + at * a.ld_q + h * D, a.ld_q, a.T - q0);
    load_tile<BM, DV>(do_tiles + slot * do_bytes, d_o + at * a.ld_o + h * DV, a.ld_o, a.T - q0);
    copies_commit();
  };
  load_tile<rows, D>(k_tile, k + row0 * a.ld_kv + head * D, a.ld_kv, a.keys - k0);
  load_tile<rows, DV>(v_tile, v + row0 * a.ld_v + head * DV, a.ld_v, a.keys - k0);
  const int steps = loop.end - loop.begin, last = loop.first + loop.tiles;
  int h = head * a.group + (steps ? loop.begin / loop.tiles : 0);
  int m = steps ? loop.first + loop.begin % loop.tiles : 0;  // tile of queries
  if (steps > 0) load(0, h, m);

  float s[BM / 2], dp[BM / 2], dk_acc[D / 2], dv_acc[DV / 2];
  uint32_t p[BM / 4];
#pragma unroll
  for (float& x : dk_acc) x = 0;
#pragma unroll
  for (float& x : dv_acc) x = 0;
#pragma unroll 1
  for (int n = 0; n < steps; ++n) {
    int q0 = m * BM, slot = n % 2;
    int64_t stats = int64_t(b * a.H + h) * a.Tp + q0 + lane % 4 * 2;
    if (++m == last) m = loop.first, ++h;
    if (n + 1 < steps) load(slot ^ 1, h, m), copies_wait<1>();
    else copies_wait<0>();
    __syncthreads();
    multiply_nt<D, BM>(s, k_tile, row, q_tiles + slot * q_bytes);
    multiply_nt<DV, BM>(dp, v_tile, row, do_tiles + slot * do_bytes);
#pragma unroll
    for (int i = 0; i < BM / 2; ++i) {
      int c = i / 4 * 8 + i % 2;
      bool seen = mask.visible(q0 + lane % 4 * 2 + c, j + i / 2 % 2 * 8);
      s[i] = seen ? exp2_approx(fmaf(s[i], a.scale_log2, -lse2[stats + c])) : 0.f;
      dp[i] = s[i] * (dp[i] - delta[stats + c]);
    }
    pack_rows(p, s);
    multiply_nn<DV, BM>(dv_acc, p, do_tiles + slot * do_bytes);
    pack_rows(p, dp);
    multiply_nn<D, BM>(dk_acc, p, q_tiles + slot * q_bytes);
    __syncthreads();
  }
  int j0 = k0 + row;
  if (parts > 1) {
    float* dk_sums = part_sums + part_at(a, parts, 0, part, b, head) + int64_t(j0) * D;
    float* dv_sums = part_sums + part_at(a, parts, 1, part, b, head) + int64_t(j0) * DV;
    store_rows_fp32<D>(dk_sums, a.keys - j0, dk_acc, a.scale);
    store_rows_fp32<DV>(dv_sums, a.keys - j0, dv_acc, 1);
    return;
  }
  const int64_t at = row0 + row;
  store_rows<D>(dk + at * a.ld_dkv + head * D, a.ld_dkv, a.keys - j0, dk_acc, a.scale, a.scale);
  store_rows<DV>(dv + at * a.ld_dv + head * DV, a.ld_dv, a.keys - j0, dv_acc, 1, 1);
#endif
}

template <int D, int DV, class Mask>
__global__ void __launch_bounds__(threads, 1)
    backward_q(bf16* dq, const bf16* d_o, const bf16* q, const bf16* k, const bf16* v, const float* lse2,
               const float* delta, Problem a, Mask mask, Parts parts) {
  begin_kernel();
#ifndef __CUDA_ARCH_FEAT_SM90_ALL  // Hopper has its own
  constexpr int BN = 32, k_bytes = BN * D * 2, v_bytes = BN * DV * 2;
  const uint32_t q_tile = shared_base(), do_tile = q_tile + rows * D * 2;
  const uint32_t k_tiles = do_tile + rows * DV * 2, v_tiles = k_tiles + 2 * k_bytes;
  const int tiles = ceil_div(a.T, rows), of_queries = a.B * a.H * tiles;
  if (int(blockIdx.x) >= of_queries) return parts.join_item(a, int(blockIdx.x) - of_queries, threadIdx.x);
  const int h = blockIdx.x % a.H, q0 = (tiles - 1 - blockIdx.x / a.H % tiles) * rows, b = blockIdx.x / a.H / tiles;
  const int first = mask.first_key(q0) / BN, last = ceil_div(mask.last_key(q0 + rows), BN);
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16, t = q0 + row + lane / 4;
  const int64_t at = int64_t(b) * a.T + q0, stats = int64_t(b * a.H + h) * a.Tp + t;
  const float l[2] = {lse2[stats], lse2[stats + 8]}, r[2] = {delta[stats], delta[stats + 8]};
  k += b * a.keys * a.ld_kv + h / a.group * D, v += b * a.keys * a.ld_v + h / a.group * DV;

  auto load = [&](int j) {
    int slot = j % 2;
    load_tile<BN, D>(k_tiles + slot * k_bytes, k + j * BN * a.ld_kv, a.ld_kv, a.keys - j * BN);
    load_tile<BN, DV>(v_tiles + slot * v_bytes, v + j * BN * a.ld_v, a.ld_v, a.keys - j * BN);
    copies_commit();
  };
  load_tile<rows, D>(q_tile, q + at * a.ld_q + h * D, a.ld_q, a.T - q0);
  load_tile<rows, DV>(do_tile, d_o + at * a.ld_o + h * DV, a.ld_o, a.T - q0);
  if (first < last) load(last - 1);

  float s[BN / 2], dp[BN / 2], acc[D / 2];
  uint32_t ds[BN / 4];
#pragma unroll
  for (int i = 0; i < D / 2; ++i) acc[i] = 0;
#pragma unroll 1
  for (int j = last - 1; j >= first; --j) {
    if (j > first) load(j - 1), copies_wait<1>();
    else copies_wait<0>();
    __syncthreads();
    multiply_nt<D, BN>(s, q_tile, row, k_tiles + j % 2 * k_bytes);
    multiply_nt<DV, BN>(dp, do_tile, row, v_tiles + j % 2 * v_bytes);
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) {
      int e = i / 2 % 2;
      bool seen = mask.visible(t + e * 8, j * BN + i / 4 * 8 + lane % 4 * 2 + i % 2);
      s[i] = seen ? exp2_approx(fmaf(s[i], a.scale_log2, -l[e])) * (dp[i] - r[e]) : 0.f;
    }
    pack_rows(ds, s);
    multiply_nn<D, BN>(acc, ds, k_tiles + j % 2 * k_bytes);
    __syncthreads();
  }
  int t0 = q0 + row;
  store_rows<D>(dq + (int64_t(b) * a.T + t0) * a.ld_dq + h * D, a.ld_dq, a.T - t0, acc, a.scale, a.scale);
#endif
}

template <int D, int DV, class Mask>
void forward(cudaStream_t stream, bf16* o, float* lse, float* amax, const bf16* q, const bf16* k, const bf16* v,
             const Problem& a, const Mask& mask) {
  launch(stream, forward_kernel<D, DV, Mask>, {a.B * a.H * ceil_div(a.T, rows), threads, forward_bytes<D, DV>}, o, lse,
         amax, q, k, v, a, mask);
}

template <int D, int DV, class Mask>
void backward(cudaStream_t stream, bf16* dq, const Parts& parts, const bf16* d_o, const bf16* q, const bf16* k,
              const bf16* v, const float* lse2, const float* delta, const Problem& a, const Mask& mask) {
  static_assert(threads == Parts::threads, "");
  constexpr int bytes = backward_bytes<D, DV>;
  launch(stream, backward_kv<D, DV, Mask>, {a.B * a.HKV * parts.parts * ceil_div(a.keys, rows), threads, bytes},
         parts.dk, parts.dv, d_o, q, k, v, lse2, delta, a, mask, parts.parts, parts.sums);
  launch(stream, backward_q<D, DV, Mask>, {a.B * a.H * ceil_div(a.T, rows) + parts.items(a), threads, bytes}, dq, d_o,
         q, k, v, lse2, delta, a, mask, parts);
}

}  // namespace attention::sm80
