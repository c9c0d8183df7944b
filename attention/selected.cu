// The selected branch of NSA: softmax over the keys of the blocks that each query chose.
//
// Queries of a group choose for themselves, so neighbours share few blocks: a kernel that stays with its queries reads
// 64 keys and values for the few rows of one query. These stay with the keys instead. Lists say who selected a piece
// (selected_lists.cuh); a block (CTA) keeps 64 keys and values and gathers the rows of those queries, of any group full
// tiles. What it makes for a query (an output of 64 keys with its lse, or a part of dq) goes to the query's slot for
// that piece, in bf16, and a second kernel joins a query's slots in the order of its ranks; in the forward on Hopper it
// sees to the blocks that all queries around choose, too (selected_near.cuh). dK and dV are summed in
// registers along a list, in fp32 from there on. Nothing is added atomically: every sum has one order.
#include "attention/selected.cuh"

#include <algorithm>
#include <initializer_list>

#include "attention/selected_masked.cuh"
#include "attention/stages.h"
#include "cpu/nsa.h"

#if FSDP_CUDA
#include "attention/selected_near.cuh"
#include "attention/selected_simple.cuh"
#include "attention/selected_sm80.cuh"
#include "attention/selected_sm90.cuh"
#endif

static void check(const NsaShape& a) {
  if (a.B < 1 || a.T < 1 || a.D < 1 || a.DV < 0 || a.HKV < 1 || a.H < 1 || a.H % a.HKV || a.select_block < 1 ||
      a.selected < 1 || !(a.scale > 0))
    throw Error(
        strf("selected attention: bad shape B %lld T %lld H %lld HKV %lld D %lld DV %lld blocks of %lld, %lld of them, "
             "scale %g: all must be positive and HKV must divide H",
             (long long)a.B, (long long)a.T, (long long)a.H, (long long)a.HKV, (long long)a.D, (long long)a.v_dim(),
             (long long)a.select_block, (long long)a.selected, a.scale));
}

namespace attention::selected {

// Scratch, with N = min(T, segment) queries rounded up to 256 and P = min(B*HKV, what 512 MiB of slots hold, at least
// 1) pairs a launch, in bytes and to within small change:
//   slots     P * N * slots * H/HKV * (in the forward 2 DV, and 4 for their lse; in the backward 2 D)
//   lists     B*HKV * (4 T * slots + (4 * tiles + 28 * segments) * pieces), tiles of 256 queries, doubled while there
//             are more than 256 of them and two still divide a segment
//   backward  B*T*H * 8 for lse and delta, P * T * (D + DV) * 4 for dK and dV, P * max_splits * 256 (D + DV) for parts
//             of theirs
// So it grows with T as the tensors do, but for the lists of very long sequences, and for the slots, which are at most
// 512 MiB or one pair's in one segment. The latter has the rows that fit in an H200's L2 (16 MiB at a slot a query); in
// the backward, which adds to dK and dV once a segment, twice as many. These and a unit's length are what was fastest
// there.
Plan plan(const NsaShape& a, AttentionPass pass, int64_t segment) {
  const bool backward = pass == AttentionPass::backward;
  Plan p{};
  const auto up = [](int64_t x, int64_t to) { return (x + to - 1) / to * to; };
  const int64_t group = a.H / a.HKV, row = (backward ? a.D : a.v_dim()) * 2;  // a slot's, of a head
  p.parts = (a.select_block + piece_keys - 1) / piece_keys;
  p.slots = a.selected * p.parts, p.pieces = a.select_blocks() * p.parts;
  if (segment <= 0) segment = std::max<int64_t>((backward ? 32 << 20 : 16 << 20) / (group * row), 1);
  p.segment = up(std::min(a.T, segment), 256);
  p.segments = (a.T + p.segment - 1) / p.segment;
  p.tile = 256;
  while (p.tile * 256 < a.T && p.segment % (2 * p.tile) == 0) p.tile *= 2;
  p.tiles = p.segment / p.tile;
  p.pairs = a.B * a.HKV;
  p.pairs_at_once = std::clamp<int64_t>((int64_t(512) << 20) / (p.segment * p.slots * group * row), 1, p.pairs);
  const int64_t most = p.segment * p.slots;  // entries of the lists of a pair and segment
  const int64_t rows = p.pairs_at_once * std::min(a.T, p.segment) * p.slots * group;  // of a launch
  // A launch of few rows has shorter units, for they are what multiprocessors share.
  const int64_t unit_rows = backward ? std::clamp<int64_t>(rows / 256, 512, a.T < 16384 ? 2048 : 4096)
                                     : std::clamp<int64_t>(rows / 768, 256, 1024);
  p.unit = std::max<int64_t>(unit_rows / group, 1);
  p.max_units = std::min(p.pieces, most) + most / p.unit;
  p.max_splits = most / p.unit + std::min(p.pieces, most / p.unit);  // lists of several units have more than one's

  const int64_t lists = p.pairs * p.segments;
  const auto take = [&](int64_t bytes) {
    const int64_t at = p.bytes;
    p.bytes += up(bytes, 256);
    return at;
  };
  p.counts = take(lists * p.tiles * p.pieces * 4);
  p.starts = take(lists * p.pieces * 4);
  p.lists = take(lists * p.pieces * 8);
  p.units = take(lists * p.max_units * 16);
  p.unit_counts = take(lists * 4);
  p.entries = take(lists * most * 4);
  p.slot_rows = take(p.pairs_at_once * most * group * row);
  if (backward) {
    p.stats = take(a.B * a.T * a.H * 8);
    p.sums = take(p.pairs_at_once * a.T * (a.D + a.v_dim()) * 4);
    p.split_sums = take(p.pairs_at_once * p.max_splits * piece_keys * (a.D + a.v_dim()) * 4);
  } else {
    p.slot_stats = take(p.pairs_at_once * most * group * 4);
  }
  return p;
}

// In the forward: do lists leave out what is near (selected_near.cuh)? It pays where a group's heads fill tiles.
static bool joins_near(const NsaShape& a, int arch) {
  return arch == 90 && a.select_block == piece_keys && a.selected <= near_slots && a.H >= 4 * a.HKV;
}

int64_t scratch_bytes(const NsaShape& a, int arch, AttentionPass pass, int64_t segment, StatsAt stats) {
  const bool masked = arch == 90 && is_masked(a, pass, segment);
  ASSERT(masked || stats == StatsAt::workspace);
  return masked ? masked_bytes(a, pass, segment, stats) : plan(a, pass, segment).bytes;
}

#if FSDP_CUDA

template <class E>
static void check(const NsaShape& a, const Plan& p, std::initializer_list<const void*> addresses) {
  constexpr bool narrow = std::is_same_v<E, bf16>;
  const int64_t DV = a.v_dim();
  if (!has_gpu_kernels(dtype_of<E>, a.D, DV))
    throw Error(strf("selected attention: no %s kernel for head dims %lld and %lld of keys and values on a GPU: %s",
                     name_of(dtype_of<E>), (long long)a.D, (long long)DV,
                     narrow ? "64, 128, and 192 with 128 have one" : "equal multiples of 8 up to 128 have one"));
  bool aligned = a.ld * sizeof(E) % 16 == 0;  // for copies of 16 bytes
  for (const void* x : addresses) aligned = aligned && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  if (!aligned) throw Error("selected attention: addresses and row strides must be multiples of 16 bytes on a GPU");
  const int64_t group = a.H / a.HKV, most = 1ll << 31;
  if (a.T > 1 << 30 || a.B * a.H * a.T * 8 / 256 >= most || p.segment * p.slots * group >= most ||
      p.segment * a.ld / 8 >= most || p.pairs_at_once * p.max_units >= most || p.pairs * p.segments * p.tiles >= most ||
      p.pairs_at_once * p.pieces >= most)
    throw Error("selected attention: too many rows for one launch");
}

static unsigned blocks(int64_t threads) { return unsigned((threads + 255) / 256); }

static void make_lists(cudaStream_t stream, const Problem& a, const Plan& p) {
  const int64_t lists = p.pairs * p.segments;
  launch(stream, list_queries<false>, {unsigned(lists * p.tiles), 256}, a);
  launch(stream, cut_lists, {unsigned(lists), 1024}, a);
  launch(stream, list_queries<true>, {unsigned(lists * p.tiles), 256}, a);
}

// What joins a query's slots: a special one where a block is one piece.
static Kernel launched(const char* code, const Problem& a) {
  return {code, a.parts == 1 ? "blocks of one piece" : "blocks in pieces", a.parts != 1};
}

template <int D, int DV>
static Kernel forward(cudaStream_t stream, int arch, bf16* o, float* lse, const bf16* q, const bf16* k, const bf16* v,
                      const int32_t* indices, char* scratch, const NsaShape& shape, const Plan& p) {
  const bool near = joins_near(shape, arch);
  const Problem a(shape, p, indices, scratch, /*lists_near=*/!near);
  make_lists(stream, a, p);
  bf16* rows = reinterpret_cast<bf16*>(scratch + p.slot_rows);
  float* slot_lse = reinterpret_cast<float*>(scratch + p.slot_stats);
  static_assert(sm80::block_threads == sm90::block_threads);
  auto* kernel = sm80::forward_kernel<D, DV>;
  int bytes = sm80::forward_bytes<D, DV>;
  const char* code = "sm80";
  if (arch == 90) kernel = sm90::forward_kernel<D, DV>, bytes = sm90::Forward<D, DV>::bytes, code = "sm90";
  for (int pair0 = 0; pair0 < p.pairs; pair0 += int(p.pairs_at_once))
    for (int s = 0; s < a.segments; ++s) {
      const int pairs = int(std::min<int64_t>(p.pairs_at_once, p.pairs - pair0));
      launch(stream, kernel, {pairs * p.max_units, sm80::block_threads, bytes}, rows, slot_lse, q, k, v, a, pair0, s);
      const int64_t queries = a.last_query(s) - a.first_query(s);
      if (near) {
        using L = sm90::Near<D, DV>;
        launch(stream, sm90::near_and_merge<D, DV>, {unsigned(pairs * ((queries + 63) / 64)), L::threads, L::bytes}, o,
               lse, rows, slot_lse, q, k, v, a, pair0, s);
        continue;
      }
      const auto merge = a.parts == 1 ? merge_slots<DV, true> : merge_slots<DV, false>;
      launch(stream, merge, {blocks(pairs * queries * a.group * DV / 8), 256}, o, lse, rows, slot_lse, a, pair0, pairs,
             s);
    }
  return launched(code, a);
}

template <int D, int DV>
static Kernel backward(cudaStream_t stream, int arch, bf16* dq, bf16* dk, bf16* dv, const bf16* dq_compressed,
                       const bf16* d_o, const bf16* q, const bf16* k, const bf16* v, const float2* stats,
                       const int32_t* indices, char* scratch, const NsaShape& shape, const Plan& p) {
  const Problem a(shape, p, indices, scratch);
  make_lists(stream, a, p);
  bf16* rows = reinterpret_cast<bf16*>(scratch + p.slot_rows);
  float *sums = reinterpret_cast<float*>(scratch + p.sums), *splits = reinterpret_cast<float*>(scratch + p.split_sums);
  // One stage of tiles where two do not fit: for wide keys two would leave room for one block only.
  constexpr int roomy = D == 192 ? 1 : 2, small = D == 128 ? 1 : roomy;
  auto* kernel = sm80::backward_kernel<D, DV, roomy>;
  int bytes = sm80::Backward<D, DV, roomy>::bytes;
  const char* code = "sm80";
  if constexpr (small != roomy)
    if (has_small_memory(arch))
      kernel = sm80::backward_kernel<D, DV, small>, bytes = sm80::Backward<D, DV, small>::bytes,
      code = "sm80 in 99 KiB";
  if (arch == 90) kernel = sm90::backward_kernel<D, DV>, bytes = sm90::Backward<D, DV>::bytes, code = "sm90";
  for (int pair0 = 0; pair0 < p.pairs; pair0 += int(p.pairs_at_once)) {
    const int pairs = int(std::min<int64_t>(p.pairs_at_once, p.pairs - pair0));
    for (int s = 0; s < a.segments; ++s) {
      launch(stream, kernel, {pairs * p.max_units, sm80::block_threads, bytes}, rows, sums, splits, d_o, q, k, v, stats,
             a, pair0, s);
      launch(stream, sum_units<D, DV>, {unsigned(pairs * sum_blocks<D, DV>), 256}, dk, dv, sums, splits, a, pair0, s);
      const int64_t queries = a.last_query(s) - a.first_query(s);
      const auto sum = a.parts == 1 ? sum_slots<D, true> : sum_slots<D, false>;
      launch(stream, sum, {blocks(pairs * queries * a.group * D / 8), 256}, dq, dq_compressed, rows, a, pair0, pairs,
             s);
    }
  }
  return launched(code, a);
}

#endif

}  // namespace attention::selected

#if FSDP_CUDA
namespace gpu {

template <class T>
Kernel nsa_selected_forward(cudaStream_t stream, [[maybe_unused]] int arch, T* o, float* lse, const T* q, const T* k,
                            const T* v, const int32_t* indices, char* scratch, const NsaShape& shape, int64_t segment) {
  using namespace attention::selected;
  const Plan p = plan(shape, AttentionPass::forward, segment);
  attention::selected::check<T>(shape, p, {o, q, k, v, scratch});
  if constexpr (std::is_same_v<T, bf16>) {
    if (arch == 90 && is_masked(shape, AttentionPass::forward, segment)) {
      masked_forward(stream, o, lse, q, k, v, indices, scratch, shape);
      return {"sm90", "masked tiles"};
    }
    const auto run = shape.D == 192 ? forward<192, 128> : shape.D == 128 ? forward<128, 128> : forward<64, 64>;
    return run(stream, arch, o, lse, q, k, v, indices, scratch, shape, p);
  } else {
    const Problem a(shape, p, indices, scratch);
    launch(stream, simple::forward_kernel, {blocks(shape.B * shape.T * shape.H * 32), 256}, o, lse, q, k, v, a);
    return {"fp32"};
  }
}

template <class T>
Kernel nsa_selected_backward(cudaStream_t stream, [[maybe_unused]] int arch, T* dq, T* dk, T* dv,
                             const T* dq_compressed, const T* d_o, const T* q, const T* k, const T* v, const T* o,
                             const float* lse, const int32_t* indices, char* scratch, const NsaShape& shape,
                             Gate<T> gate, int64_t segment, const Begun<float>& begun) {
  using namespace attention::selected;
  const Plan p = plan(shape, AttentionPass::backward, segment);
  attention::selected::check<T>(shape, p, {dq, dk, dv, dq_compressed, d_o, q, k, v, o, scratch});
  constexpr bool narrow = std::is_same_v<T, bf16>;
  if constexpr (narrow)
    if (arch == 90 && is_masked(shape, AttentionPass::backward, segment)) {
      masked_backward(stream, dq, dk, dv, dq_compressed, d_o, q, k, v, o, lse, indices, scratch, shape, gate, segment,
                      begun);
      return {"sm90", "masked tiles"};
    }
  ASSERT(!begun.stats && !begun.words && !begun.rotary);
  if (begun.before_dq) begun.before_dq();
  const Problem a(shape, p, indices, scratch);
  float2* stats = reinterpret_cast<float2*>(scratch + (narrow ? p.stats : 0));
  launch(stream, statistics<T>, {blocks(shape.B * shape.T * shape.H * 8), 256}, stats, d_o, o, lse, a, gate);
  if constexpr (narrow) {
    const auto run = shape.D == 192 ? backward<192, 128> : shape.D == 128 ? backward<128, 128> : backward<64, 64>;
    return run(stream, arch, dq, dk, dv, dq_compressed, d_o, q, k, v, stats, indices, scratch, shape, p);
  } else {
    launch(stream, simple::backward_q, {blocks(shape.B * shape.T * shape.H * 32), 256}, dq, dq_compressed, d_o, q, k, v,
           stats, a);
    launch(stream, simple::backward_kv, {blocks(shape.B * shape.T * shape.HKV * 32), 256}, dk, dv, d_o, q, k, v, stats,
           a);
    return {"fp32"};
  }
}

#define INSTANTIATE(T)                                                                                              \
  template Kernel nsa_selected_forward(cudaStream_t, int, T*, float*, const T*, const T*, const T*, const int32_t*, \
                                       char*, const NsaShape&, int64_t);                                            \
  template Kernel nsa_selected_backward(cudaStream_t, int, T*, T*, T*, const T*, const T*, const T*, const T*,      \
                                        const T*, const T*, const float*, const int32_t*, char*, const NsaShape&,   \
                                        Gate<T>, int64_t, const Begun<float>&);
INSTANTIATE(float)
INSTANTIATE(bf16)
#undef INSTANTIATE

}  // namespace gpu
#endif

// For the estimate. A query's rows visit the pieces that it selected. The forward is bound by what a visit moves: it
// reads a row of q, writes a partial output and its lse, and the merge reads those again, or where near blocks are in
// no list a row of q for all of them; masked tiles, which Hopper alone has, are dense attention, a little slower. The
// backward is bound by its products. In float a warp goes query by query, and its keys come from L2
// (results/precision-2gpu.jsonl, `fp32, nsa`).
template <class T>
static Cost cost(const Device& dev, const NsaShape& a, AttentionPass pass) {
  const bool backward = pass == AttentionPass::backward;
  using attention::selected::piece_keys;
  const attention::selected::Plan p = attention::selected::plan(a, pass);
  const bool near = !backward && attention::selected::joins_near(a, dev.compute_capability);
  double blocks = 0, unlisted = 0;  // that the queries of a head select; of these, that are in no list
  for (int64_t first = 0; first < a.T; first += a.select_block) {
    const int64_t each = std::min(first / a.select_block + 1, a.selected),
                  queries = std::min(a.select_block, a.T - first);
    blocks += double(each * queries),
        unlisted += near ? double(std::min<int64_t>(each, attention::selected::near_blocks) * queries) : 0;
  }
  const double visits = double(a.B * a.H * p.parts) * blocks;
  Cost c{Work::attention};
  c.dtype = dtype_of<T>;
  const int64_t rounds = (p.pairs + p.pairs_at_once - 1) / p.pairs_at_once * p.segments;
  c.launches = int(backward ? 4 + 3 * rounds : 3 + 2 * rounds);
  const double both = double(a.D + a.v_dim()), products = 2 * (backward ? 2 * both + double(a.D) : both) * piece_keys;
  if (c.dtype == Dtype::f32) c.flops = visits * products, c.share = 0.035;
  else if (dev.compute_capability == 90 && attention::selected::is_masked(a, pass, /*segment=*/0)) {
    const double rows = double((a.T + 127) / 128), dims = backward ? 2 * both + double(a.D) : both;
    c.flops = 2 * double(a.B * a.H) * dims * rows * ((rows + 1) / 2 + 2.5) * 128 * 128;
    c.share = backward ? 0.4 : a.D > 64 ? 0.6 : 0.45, c.launches = 2;
  } else if (!backward) {
    c.bytes = (visits - double(a.B * a.H) * unlisted) * ((double(a.D) + 2 * double(a.v_dim())) * sizeof(T) + 8);
    if (near) c.bytes += double(a.B * a.H * a.T) * double(a.D) * sizeof(T);
  } else c.flops = visits * products, c.share = a.D > 64 ? 0.23 : 0.20;
  return c;
}

template <class T>
int64_t nsa_selected_forward_scratch(const Device& dev, const NsaShape& a) {
  check(a);
  return std::is_same_v<T, bf16> ? attention::selected::scratch_bytes(a, dev.compute_capability, AttentionPass::forward)
                                 : 0;
}

template <class T>
Kernel nsa_selected_forward(Stream& s, T* o, acc_t<T>* lse, const T* q, const T* k, const T* v, const int32_t* indices,
                            char* scratch, const NsaShape& a) {
  check(a);
  if (s.off()) return s.spend(cost<T>(s.device(), a, AttentionPass::forward)), Kernel();
#if FSDP_CUDA
  if (s.on_gpu()) {
    if constexpr (std::is_same_v<T, double>) throw Error("selected attention: no fp64 kernels on a GPU");
    else
      return gpu::nsa_selected_forward(s.cuda(), s.device().compute_capability, o, lse, q, k, v, indices, scratch, a);
  }
#endif
  s.enqueue([=] { cpu::nsa_selected_forward(o, lse, q, k, v, indices, scratch, a); });
  return plain_loops;
}

bool nsa_selected_in_tiles(const Device& dev, const NsaShape& a, Dtype dtype) {
  return dtype == Dtype::bf16 && dev.compute_capability == 90 &&
         attention::selected::is_masked(a, AttentionPass::backward, /*segment=*/0);
}

bool nsa_selected_turns(const Device& dev, const NsaShape& a, Dtype dtype) {
  return nsa_selected_in_tiles(dev, a, dtype) && attention::selected::masked_turns(a);
}

int64_t nsa_selected_words(const Device& dev, const NsaShape& a, Dtype dtype) {
  return nsa_selected_in_tiles(dev, a, dtype) ? attention::selected::masked_words(a) : 0;
}

template <class T>
int64_t nsa_selected_backward_scratch(const Device& dev, const NsaShape& a, StatsAt stats) {
  check(a);
  if (std::is_same_v<T, bf16>)
    return attention::selected::scratch_bytes(a, dev.compute_capability, AttentionPass::backward, /*segment=*/0, stats);
  return std::is_same_v<T, float> ? a.B * a.T * a.H * 8 : 0;
}

template <class T>
Kernel nsa_selected_backward(Stream& s, T* dq, T* dk, T* dv, const T* dq_compressed, const T* d_o, const T* q,
                             const T* k, const T* v, const T* o, const acc_t<T>* lse, const int32_t* indices,
                             char* scratch, const NsaShape& a, Gate<T> gate, const Begun<acc_t<T>>& begun) {
  check(a);
  if (s.off()) return s.spend(cost<T>(s.device(), a, AttentionPass::backward)), Kernel();
#if FSDP_CUDA
  if (s.on_gpu()) {
    if constexpr (std::is_same_v<T, double>) throw Error("selected attention: no fp64 kernels on a GPU");
    else
      return gpu::nsa_selected_backward(s.cuda(), s.device().compute_capability, dq, dk, dv, dq_compressed, d_o, q, k,
                                        v, o, lse, indices, scratch, a, gate, 0, begun);
  }
#endif
  ASSERT(!begun.stats && !begun.words && !begun.rotary);
  if (begun.before_dq) begun.before_dq();
  s.enqueue(
      [=] { cpu::nsa_selected_backward(dq, dk, dv, dq_compressed, d_o, q, k, v, o, lse, indices, scratch, a, gate); });
  return plain_loops;
}

#define INSTANTIATE(T)                                                                                              \
  template int64_t nsa_selected_forward_scratch<T>(const Device&, const NsaShape&);                                 \
  template Kernel nsa_selected_forward(Stream&, T*, acc_t<T>*, const T*, const T*, const T*, const int32_t*, char*, \
                                       const NsaShape&);                                                            \
  template int64_t nsa_selected_backward_scratch<T>(const Device&, const NsaShape&, StatsAt);                       \
  template Kernel nsa_selected_backward(Stream&, T*, T*, T*, const T*, const T*, const T*, const T*, const T*,      \
                                        const T*, const acc_t<T>*, const int32_t*, char*, const NsaShape&, Gate<T>, \
                                        const Begun<acc_t<T>>&);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bf16)
