#include "attention/selected_masked.cuh"

#include "attention/dq_order.h"
#include "attention/kv_parts.cuh"

#if FSDP_CUDA
#include "attention/prepare.cuh"
#include "attention/sm90_backward.cuh"
#include "attention/sm90_backward_pair.cuh"
#include "attention/sm90_forward.cuh"
#endif

namespace attention::selected {

static AttentionShape dense_shape(const NsaShape& a) {
  return {a.B, a.T, a.H, a.HKV, a.D, a.ld, a.ld, a.H * a.D, a.ld, a.ld, a.scale};
}
static int64_t word_bytes(const NsaShape& a) {
  const int64_t n = (a.T + 127) / 128 * 2;
  return a.B * a.HKV * n * n * 8;  // a multiple of 32
}
// Does one kernel make all gradients, or a pair of them? As in attention/dense.cu, the one wants many sequences, with
// tiles of 128 keys that fill a large GPU twice.
static bool in_one(const NsaShape& a, int64_t segment) {
  const int64_t units = a.B * a.HKV;
  return segment == masked_in_one ||
         (units >= 32 && units * ((a.T + 127) / 128) >= 256 && (a.D == 64 || a.H <= 4 * a.HKV));
}
bool masked_turns(const NsaShape& a) { return is_masked(a, AttentionPass::backward, /*segment=*/0) && in_one(a, 0); }
// One kernel's counts are cleared with the words: it makes them again.
int64_t masked_words(const NsaShape& a) { return in_one(a, 0) ? 0 : word_bytes(a); }
// Words; in the backward behind them statistics, and the sums of dQ with their counts or of parts of dK and dV.
int64_t masked_bytes(const NsaShape& a, AttentionPass pass, int64_t segment, StatsAt stats) {
  if (pass == AttentionPass::forward) return word_bytes(a);
  const AttentionShape shape = dense_shape(a);
  const Problem p(shape);
  const DqOrder order(p);
  const int64_t numbers = in_one(a, segment) ? order.sums(a.D) + order.counts() : part_numbers(shape, kv_parts(shape));
  return word_bytes(a) + (numbers + (stats == StatsAt::workspace ? attention_stats(a.B, a.T, a.H) : 0)) * 4;
}

#if FSDP_CUDA

// words from indices (B,HKV,T,selected). A block has 64 queries of a pair, of which each warp makes half of every word;
// blockIdx.x: (B, HKV, Tp/64). Zeros `counts` besides, for the backward in one kernel.
__global__ void __launch_bounds__(64) word_kernel(uint64_t* words, const int32_t* indices, int T, int selected,
                                                  int tiles, unsigned* counts, int n_counts) {
  begin_kernel();
  for (int i = int(blockIdx.x * 64 + threadIdx.x); i < n_counts; i += int(gridDim.x) * 64) counts[i] = 0;
  const int tile = blockIdx.x % tiles, pair = blockIdx.x / tiles, t = tile * 64 + int(threadIdx.x);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint64_t blocks = 0;  // this query's
  if (t < T) {
    const int32_t* chosen = indices + (int64_t(pair) * T + t) * selected;
    const auto take = [&](int j) { blocks |= j >= 0 && j < tiles ? uint64_t(1) << j : 0; };
    if (selected % 4 == 0 && reinterpret_cast<uintptr_t>(indices) % 16 == 0) {
      for (int r = 0; r < selected; r += 4) {
        const int4 j = *reinterpret_cast<const int4*>(chosen + r);
        take(j.x), take(j.y), take(j.z), take(j.w);
      }
    } else {
      for (int r = 0; r < selected; ++r) take(chosen[r]);
    }
  }
  let_next_in();
  uint32_t* to = reinterpret_cast<uint32_t*>(words + int64_t(blockIdx.x) * tiles) + warp;
  for (int j0 = 0; j0 < tiles; j0 += 32) {
    uint32_t mine = 0;
    for (int j = 0; j < 32; ++j) {
      const uint32_t queries = __ballot_sync(~0u, int(blocks >> (j0 + j) & 1));
      if (lane == j) mine = queries;
    }
    if (j0 + lane < tiles) to[(j0 + lane) * 2] = mine;
  }
}

static Chosen choose(cudaStream_t stream, char* scratch, const int32_t* indices, const NsaShape& a, const Problem& p,
                     const Addends& addends = {}, unsigned* counts = nullptr, int n_counts = 0) {
  uint64_t* words = reinterpret_cast<uint64_t*>(scratch);
  const Chosen mask(dense_shape(a), p, words, addends);
  launch(stream, word_kernel, {unsigned(a.B * a.HKV * mask.n), 64}, words, indices, p.T, int(a.selected), mask.n,
         counts, n_counts);
  return mask;
}

void masked_forward(cudaStream_t stream, bf16* o, float* lse, const bf16* q, const bf16* k, const bf16* v,
                    const int32_t* indices, char* scratch, const NsaShape& a) {
  const Problem p(dense_shape(a));
  const Chosen mask = choose(stream, scratch, indices, a, p);
  const auto run = a.D == 128 ? sm90::forward<128, 128, Chosen> : sm90::forward<64, 64, Chosen>;
  run(stream, o, lse, nullptr, q, k, v, p, mask);
}

void masked_backward(cudaStream_t stream, bf16* dq, bf16* dk, bf16* dv, const bf16* dq_compressed, const bf16* d_o,
                     const bf16* q, const bf16* k, const bf16* v, const bf16* o, const float* lse,
                     const int32_t* indices, char* scratch, const NsaShape& a, Gate<bf16> gate, int64_t segment,
                     const Begun<float>& begun) {
  const AttentionShape shape = dense_shape(a);
  const Problem p(shape);
  const bool one = in_one(a, segment);
  const DqOrder order(p);
  float* const made = reinterpret_cast<float*>(scratch + word_bytes(a));
  float* const sums = begun.stats ? made : made + attention_stats(a.B, a.T, a.H);
  auto* counts = reinterpret_cast<unsigned*>(sums + order.sums(a.D));
  const Addends addends = {{dq, dq_compressed}, {p.ld_dq, a.H * a.D}};
  const Chosen mask = begun.words ? Chosen(shape, p, reinterpret_cast<const uint64_t*>(begun.words), addends)
                                  : choose(stream, scratch, indices, a, p, addends, counts, one ? order.counts() : 0);
  if (!begun.stats) prepare(stream, made, d_o, o, lse, p, gate);
  const float *lse2 = begun.stats ? begun.stats : made, *delta = lse2 + a.B * a.H * p.Tp;
  if (one) {
    const auto in_one = [&](auto turns) {
      constexpr bool t = turns.value;
      return a.D == 128 ? sm90::backward_in_one<128, Chosen, DqOrder, t>
                        : sm90::backward_in_one<64, Chosen, DqOrder, t>;
    };
    const auto run = begun.rotary ? in_one(std::true_type()) : in_one(std::false_type());
    if (begun.before_dq) begun.before_dq();
    run(stream, dq, dk, dv, d_o, q, k, v, lse2, delta, p, mask, order, sums, counts, begun.rotary);
    return;
  }
  ASSERT(!begun.rotary);
  const Parts parts = {dk, dv, sums, kv_parts(shape)};
  const auto of_keys = a.D == 128 ? sm90::backward_of_keys<128, 128, Chosen> : sm90::backward_of_keys<64, 64, Chosen>;
  of_keys(stream, parts, d_o, q, k, v, lse2, delta, p, mask);
  if (begun.before_dq) begun.before_dq();
  const auto of_queries =
      a.D == 128 ? sm90::backward_of_queries<128, 128, Chosen> : sm90::backward_of_queries<64, 64, Chosen>;
  of_queries(stream, dq, parts, d_o, q, k, v, lse2, delta, p, mask);
}

#endif

}  // namespace attention::selected
