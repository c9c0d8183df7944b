// Products with an activation behind them, in one kernel (sm_90a): forward, which writes what the product and the
// activation make; and backward, where the gradient of what the activation made is rounded in shared memory, and never
// written to the GPU's.
//
// Persistent blocks, one an SM, of four warpgroups. One thread fetches 64 columns of both factors at a time; two
// warpgroups multiply, each 64 of a tile's 128 rows; the fourth takes what they have made of the tile before through
// the activation meanwhile. Products are summed along the contracted side by one accumulator and rounded once, as
// cuBLASLt's kernels do that do not split it: the bits are theirs.
#pragma once

#include <algorithm>
#include <map>
#include <tuple>

#include "lib/device/hopper.cuh"
#include "lib/device/wgmma.cuh"
#include "lib/ops/kernels_elementwise.cuh"

namespace ops::sm90 {

// A product (M,F), contracted over K, in tiles of BM x BF; of SwiGLU's forward F counts gates and as many ups, of which
// a tile has half each.
struct Product {
  int M, F, K;
  int rows, columns;  // of tiles
  HD int tiles() const { return rows * columns; }
};

constexpr int BM = 128, BF = 192, BK = 64, stages = 4;
constexpr int panel = 64 * 128;  // bytes of 64 rows x 64 columns
constexpr int a_bytes = BM * BK * 2, b_bytes = BK * BF * 2, stage_bytes = a_bytes + b_bytes;
constexpr int at_product = stages * stage_bytes, at_barriers = at_product + BM * BF * 2;
constexpr int shared_bytes = at_barriers + 16 * stages + 16 * 8 + 1024;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

using namespace hopper;

// Tiles that run at one time share rows of dy and columns of w, so that L2 reads each once.
__device__ inline void locate(const Product& s, int tile, int* row, int* column) {
  constexpr int group = 16;  // rows of tiles
  const int first = tile / (group * s.columns) * group, in = tile - first * s.columns;
  const int rows = min(group, s.rows - first);
  *row = first + in % rows, *column = in / rows;
}
__device__ inline void load_box(uint32_t to, const CUtensorMap& map, uint32_t bar, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(
          to),
      "l"(&map), "r"(bar), "r"(column), "r"(row)
      : "memory");
}
__device__ inline uint4 load_shared4(uint32_t at) {  // may move past accesses to memory, but not past barriers
  uint4 x;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at));
  return x;
}
// Without branches, so that many are in flight.
__device__ inline void load_if(bool wanted, uint4& x, const bf16* from) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.s32 p, %5, 0;\n"
      "@p ld.global.v4.b32 {%0, %1, %2, %3}, [%4];\n}"
      : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)
      : "l"(from), "r"(int(wanted)));
}
__device__ inline void store_if(bool wanted, bf16* to, const uint4& x) {
  asm volatile(
      "{\n.reg .pred p;\n"
      "setp.ne.s32 p, %5, 0;\n"
      "@p st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::"l"(to),
      "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w), "r"(int(wanted)));
}

// What a block's warpgroups pass to each other: tiles of factors, and for each multiplying warp and the one that takes
// its 16 rows up, that the product is there, and that it has been read.
struct Exchange {
  uint32_t base;
  Ring<stages> ring;
  __device__ explicit Exchange(uint32_t base) : base(base), ring(base + at_barriers) {}
  __device__ uint32_t written(int warp) const { return base + at_barriers + Ring<stages>::bytes + 16 * warp; }
  __device__ uint32_t read(int warp) const { return written(warp) + 8; }
  __device__ uint32_t rows(int warp) const {  // the product's, in panels
    return base + at_product + warp / 4 * 64 * BF * 2 + warp % 4 * 16 * 128;
  }
  static __device__ uint32_t in_rows(int row, int piece) {  // 8 columns of one of them
    return piece / 8 * panel + row * 128 + ((piece % 8) ^ (row % 8)) * 16;
  }
  __device__ void init() const {
    if (threadIdx.x == 0) {
      ring.init(8);
      for (int i = 0; i < 8; ++i) barrier_init(written(i), 1), barrier_init(read(i), 1);
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
  }
};

// load(to, bar, row, column, k): the factors' boxes of tile (row, column) from column k on.
template <class Load>
__device__ inline void fetch_tiles(const Exchange& x, const Product& s, Load load) {
  int n = 0;
  for (int tile = blockIdx.x; tile < s.tiles(); tile += gridDim.x) {
    int row, column;
    locate(s, tile, &row, &column);
    for (int k = 0; k < s.K; k += BK, ++n) {
      const uint32_t bar = x.ring.acquire(n, stage_bytes);
      load(x.base + x.ring.slot(n) * stage_bytes, bar, row, column, k);
    }
  }
}

// by_rows: the second factor is contracted over its rows, and comes as panels of 64 of its columns.
template <bool by_rows>
__device__ inline void multiply_tiles(const Exchange& x, const Product& s, int warpgroup) {
  const int lane = threadIdx.x % 32, warp = warpgroup * 4 + threadIdx.x / 32 % 4;
  int n = 0, turn = 0;
  for (int tile = blockIdx.x; tile < s.tiles(); tile += gridDim.x, ++turn) {
    float d[BF / 2];
#pragma unroll 1
    for (int k = 0; k < s.K; k += BK, ++n) {
      x.ring.wait(n);
      const uint32_t at = x.base + x.ring.slot(n) * stage_bytes;
      const uint32_t a = tile_word(at + warpgroup * panel), b = tile_word(at + a_bytes, by_rows ? panel : 0);
      wgmma_begin();
#pragma unroll
      for (int j = 0; j < BK / 16; ++j) {
        if constexpr (by_rows) wgmma_nn_if(k > 0 || j > 0, d, descriptor(a, j * 32), descriptor(b, j * 16 * 128));
        else wgmma_nt_if(k > 0 || j > 0, d, descriptor(a, j * 32), descriptor(b, j * 32));
      }
      wgmma_commit();
      if (k == 0) continue;
      wgmma_wait<1>();
      x.ring.release(n - 1);
    }
    wgmma_wait<0>();
    pin(d);
    x.ring.release(n - 1);
    barrier_wait(x.read(warp), (turn & 1) ^ 1);
#pragma unroll
    for (int i = 0; i < BF / 16; ++i)
      store_matrices(x.rows(warp) + Exchange::in_rows(lane % 16, i * 2 + lane / 16), pack_bf16(d[8 * i], d[8 * i + 1]),
                     pack_bf16(d[8 * i + 2], d[8 * i + 3]), pack_bf16(d[8 * i + 4], d[8 * i + 5]),
                     pack_bf16(d[8 * i + 6], d[8 * i + 7]));
    __syncwarp();
    if (lane == 0) barrier_arrive(x.written(warp));
  }
}

// 8 numbers: dg becomes g; h, of SwiGLU gate and up, its gradient.
__device__ inline void activation_backward(uint4& dg_g, uint4 (&h_dh)[1]) {
  uint32_t *d = &dg_g.x, *h = &h_dh[0].x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float x[2] = {low_bf16(h[i]), high_bf16(h[i])}, dx[2] = {low_bf16(d[i]), high_bf16(d[i])};
    gpu::gelu_gradient<bf16>(x, dx);
    d[i] = pack_bf16(x[0], x[1]), h[i] = pack_bf16(dx[0], dx[1]);
  }
}
__device__ inline void activation_backward(uint4& dg_g, uint4 (&h_dh)[2]) {
  uint32_t *d = &dg_g.x, *gate = &h_dh[0].x, *up = &h_dh[1].x;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const auto low = gpu::swiglu_gradient<bf16>(low_bf16(gate[i]), low_bf16(up[i]), low_bf16(d[i]));
    const auto high = gpu::swiglu_gradient<bf16>(high_bf16(gate[i]), high_bf16(up[i]), high_bf16(d[i]));
    gate[i] = pack_bf16(low.gate, high.gate), up[i] = pack_bf16(low.up, high.up), d[i] = pack_bf16(low.g, high.g);
  }
}

// A block's warpgroups at their work: load as of fetch_tiles, by_rows as of multiply_tiles; finish() takes products up.
template <bool by_rows, class Load, class Finish>
__device__ inline void divide_work(const Exchange& x, const Product& s, Load load, Finish finish) {
  const int warpgroup = warpgroup_index();
  if (warpgroup == 3) {
    fewer_registers<24>();
    if (threadIdx.x % 128 == 0) fetch_tiles(x, s, load);
  } else if (warpgroup < 2) {
    more_registers<144>();
    multiply_tiles<by_rows>(x, s, warpgroup);
    let_next_in();
  } else {
    more_registers<200>();
    finish();
    let_next_in();
  }
}

__device__ inline uint4 activation(const uint4& h_) {
  uint4 g_;
  const uint32_t* h = &h_.x;
  uint32_t* g = &g_.x;
#pragma unroll
  for (int i = 0; i < 4; ++i) g[i] = pack_bf16(gpu::gelu<bf16>(low_bf16(h[i])).x, gpu::gelu<bf16>(high_bf16(h[i])).x);
  return g_;
}
__device__ inline uint4 activation(const uint4& gate_, const uint4& up_) {
  uint4 g_;
  const uint32_t *gate = &gate_.x, *up = &up_.x;
  uint32_t* g = &g_.x;
#pragma unroll
  for (int i = 0; i < 4; ++i)
    g[i] = pack_bf16(gpu::swiglu<bf16>(low_bf16(gate[i]), low_bf16(up[i])),
                     gpu::swiglu<bf16>(high_bf16(gate[i]), high_bf16(up[i])));
  return g_;
}

#endif  // sm_90a

// parts 1, GELU: h (M,F); 2, SwiGLU: (M,2F), gate then up in each row; s has F columns of each. g (M,F). h null: what
// it would hold is not written.
template <int parts>
__global__ void __launch_bounds__(512, 1)
    forward_activation_kernel(const __grid_constant__ CUtensorMap x_map, const __grid_constant__ CUtensorMap w_map,
                              bf16* h, bf16* g, Product s) {
  begin_kernel();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const Exchange x(shared_base());
  x.init();
  constexpr int width = BF / parts;  // of a tile, in columns of g
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const auto load = [&](uint32_t to, uint32_t bar, int row, int column, int k) {
    load_box(to, x_map, bar, k, row * BM);
#pragma unroll
    for (int p = 0; p < parts; ++p) load_box(to + a_bytes + p * width * 128, w_map, bar, k, p * s.F + column * width);
  };
  divide_work<false>(x, s, load, [&] {
    // A lane takes 8 columns of g at a time, of 16 rows of either half of a tile.
    constexpr int across = width / 8, pieces = 16 * across / 32, together = parts == 1 ? 4 : 2;
    const int64_t ld = int64_t(s.F) * parts;
    int turn = 0;
    for (int tile = blockIdx.x; tile < s.tiles(); tile += gridDim.x, ++turn) {
      int row0, column0;
      locate(s, tile, &row0, &column0);
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const int number = half * 4 + warp;
        barrier_wait(x.written(number), turn & 1);
#pragma unroll
        for (int i0 = 0; i0 < pieces; i0 += together) {
          uint4 made[together][parts], out[together];
#pragma unroll
          for (int i = 0; i < together; ++i)
#pragma unroll
            for (int p = 0; p < parts; ++p) {
              const int at = (i0 + i) * 32 + lane;
              made[i][p] = load_shared4(x.rows(number) + Exchange::in_rows(at / across, at % across + p * across));
            }
          if (i0 + together == pieces) {
            __syncwarp();
            if (lane == 0) barrier_arrive(x.read(number));
          }
#pragma unroll
          for (int i = 0; i < together; ++i) {
            if constexpr (parts == 1) out[i] = activation(made[i][0]);
            else out[i] = activation(made[i][0], made[i][1]);
          }
#pragma unroll
          for (int i = 0; i < together; ++i) {
            const int at = (i0 + i) * 32 + lane;
            const int row = row0 * BM + half * 64 + warp * 16 + at / across, column = column0 * width + at % across * 8;
            const bool there = row < s.M && column < s.F;
#pragma unroll
            for (int p = 0; p < parts; ++p) store_if(there && h, h + row * ld + column + int64_t(p) * s.F, made[i][p]);
            store_if(there, g + int64_t(row) * s.F + column, out[i]);
          }
        }
      }
    }
  });
#else
  __trap();  // code for another architecture, which makes two kernels of it
#endif
}

// parts 1, GELU: h_dh (M,F); 2, SwiGLU: (M,2F), gate then up in each row. g (M,F), or null: it is not written.
template <int parts>
__global__ void __launch_bounds__(512, 1)
    dgrad_activation_kernel(const __grid_constant__ CUtensorMap dy_map, const __grid_constant__ CUtensorMap w_map,
                            bf16* h_dh, bf16* g, Product s) {
  begin_kernel();
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  const Exchange x(shared_base());
  x.init();
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const auto load = [&](uint32_t to, uint32_t bar, int row, int column, int k) {
    load_box(to, dy_map, bar, k, row * BM);
#pragma unroll
    for (int c = 0; c < BF / 64; ++c) load_box(to + a_bytes + c * panel, w_map, bar, column * BF + c * 64, k);
  };
  divide_work<true>(x, s, load, [&] {
    // A lane takes 8 columns at a time: of 4 rows x 64 columns a warp, of 16 rows of either half of a tile. It has
    // fetched the hidden layer a half ahead: a GPU's memory answers late.
    constexpr int pieces = BF / 16, together = parts == 1 ? 4 : 2;
    struct Place {
      int row, column;
    };
    const int64_t ld = int64_t(s.F) * parts;
    const auto of_piece = [](const Place& at, int i) { return Place{at.row + i % 4 * 4, at.column + i / 4 * 64}; };
    const auto is_there = [&](const Place& at) { return at.row < s.M && at.column < s.F; };
    const auto first_place = [&](int tile) {
      int row, column;
      locate(s, min(tile, s.tiles() - 1), &row, &column);
      return Place{row * BM + warp * 16 + lane / 8, column * BF + lane % 8 * 8};
    };
    uint4 ahead[pieces][parts] = {};
    const auto fetch = [&](const Place& from, int i) {
      const Place at = of_piece(from, i);
#pragma unroll
      for (int p = 0; p < parts; ++p)
        load_if(is_there(at), ahead[i][p], h_dh + at.row * ld + at.column + int64_t(p) * s.F);
    };
    Place here = first_place(blockIdx.x);
#pragma unroll
    for (int i = 0; i < pieces; ++i) fetch(here, i);
    int turn = 0;
    for (int tile = blockIdx.x; tile < s.tiles(); tile += gridDim.x, ++turn)
#pragma unroll 1
      for (int half = 0; half < 2; ++half) {
        const int number = half * 4 + warp;
        Place next = half == 0 ? Place{here.row + 64, here.column} : first_place(tile + gridDim.x);
        if (half == 1 && tile + int(gridDim.x) >= s.tiles()) next.row = s.M;  // there is none
        barrier_wait(x.written(number), turn & 1);
#pragma unroll
        for (int i0 = 0; i0 < pieces; i0 += together) {
          uint4 h[together][parts], d[together];
#pragma unroll
          for (int i = 0; i < together; ++i) {
            const int row = (i0 + i) % 4 * 4 + lane / 8;
            d[i] = load_shared4(x.rows(number) + Exchange::in_rows(row, (i0 + i) / 4 * 8 + lane % 8));
#pragma unroll
            for (int p = 0; p < parts; ++p) h[i][p] = ahead[i0 + i][p];
            fetch(next, i0 + i);
          }
          if (i0 + together == pieces) {
            __syncwarp();
            if (lane == 0) barrier_arrive(x.read(number));
          }
#pragma unroll
          for (int i = 0; i < together; ++i) activation_backward(d[i], h[i]);
#pragma unroll
          for (int i = 0; i < together; ++i) {
            const Place at = of_piece(here, i0 + i);
#pragma unroll
            for (int p = 0; p < parts; ++p)
              store_if(is_there(at), h_dh + at.row * ld + at.column + int64_t(p) * s.F, h[i][p]);
            store_if(is_there(at) && g, g + int64_t(at.row) * s.F + at.column, d[i]);
          }
        }
        here = next;
      }
  });
#else
  __trap();  // code for another architecture, which makes two kernels of it
#endif
}

// Boxes of 64 columns of a row-major matrix (rows, columns). The driver encodes a map once: every step brings the same.
inline CUtensorMap matrix_map(const bf16* p, int64_t rows, int64_t columns, int box_rows) {
  constexpr size_t most = 4096;  // far more than a model's
  static thread_local std::map<std::tuple<const bf16*, int64_t, int64_t, int>, CUtensorMap> known;
  const auto key = std::make_tuple(p, rows, columns, box_rows);
  if (const auto found = known.find(key); found != known.end()) return found->second;
  if (known.size() == most) known.clear();
  const cuuint64_t sizes[2] = {cuuint64_t(columns), cuuint64_t(rows)}, strides[1] = {cuuint64_t(columns * 2)};
  const cuuint32_t box[2] = {64, cuuint32_t(box_rows)};
  CUtensorMap map;
  const CUresult r = hopper::encode_boxes(&map, p, sizes, strides, box);
  if (r != CUDA_SUCCESS)
    throw CudaError(
        strf("matmul: no tensor map for address %p, %lld rows of %lld numbers (error %d): both must be "
             "multiples of 16 bytes",
             static_cast<const void*>(p), (long long)rows, (long long)columns, int(r)));
  return known.emplace(key, map).first->second;
}

// Can the kernels take this? Addresses and rows are multiples of 16 bytes, sizes of 32 bits.
inline bool takes_activation(const bf16* g, const bf16* h, const bf16* a, const bf16* b, int64_t M, int64_t F,
                             int64_t K) {
  return M > 0 && F > 0 && K > 0 && F % 8 == 0 && K % 8 == 0 && std::max({M, F, K}) < int64_t(1) << 30 &&
         gpu::aligned(g, h, a, b);
}
inline Product product_of(int64_t M, int64_t F, int64_t K, int width) {
  return {int(M), int(F), int(K), int((M + BM - 1) / BM), int((F + width - 1) / width)};
}
inline Grid grid_of(const Product& s) { return {unsigned(persistent_blocks(s.tiles())), 512, shared_bytes}; }
// g (M,F) = activation(h), h = x (M,K) w^T, w (F,K), of SwiGLU (2F,K). h null: it is not written.
inline void forward_activation(cudaStream_t stream, Activation kind, bf16* g, bf16* h, const bf16* x, const bf16* w,
                               int64_t M, int64_t F, int64_t K) {
  const int parts = kind == Activation::gelu ? 1 : 2;
  const Product s = product_of(M, F, K, BF / parts);
  launch(stream, parts == 1 ? forward_activation_kernel<1> : forward_activation_kernel<2>, grid_of(s),
         matrix_map(x, M, K, BM), matrix_map(w, F * parts, K, BF / parts), h, g, s);
}
// See ops::matmul_dgrad_activation; K is its N. g null: it is not written.
inline void dgrad_activation(cudaStream_t stream, Activation kind, bf16* g, bf16* h_dh, const bf16* dy, const bf16* w,
                             int64_t M, int64_t K, int64_t F) {
  const Product s = product_of(M, F, K, BF);
  launch(stream, kind == Activation::gelu ? dgrad_activation_kernel<1> : dgrad_activation_kernel<2>, grid_of(s),
         matrix_map(dy, M, K, BM), matrix_map(w, K, F, BK), h_dh, g, s);
}

}  // namespace ops::sm90
