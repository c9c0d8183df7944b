// The selected branch over short sequences, as dense attention under a mask: a query that selects 16 blocks of 64 sees
// most of 2048 keys, so tiles that are computed whole, and masked, cost less than gathering rows. Which of 64 queries
// selected a block of 64 keys is one word of bits, that TMA loads with the tiles.
#pragma once

#include "attention/tiles.cuh"
#include "attention/stages.h"

namespace attention::selected {

// Key j <= t whose block of 64 the query selected. words (B, HKV, n, n), n = Tp/64: word [i][j] has bit t % 64 where
// query t of the i-th 64 selected block j.
struct Chosen : Causal {
  static constexpr bool chooses = true;
  int HKV, n;
  const uint64_t* words;
  Addends addends;  // of the backward, which does not begin dq
  Chosen(const AttentionShape& shape, const Problem& a, const uint64_t* words_, const Addends& addends_ = {})
      : Causal(shape), HKV(a.HKV), n(a.Tp / 64), words(words_), addends(addends_) {}
  HD const uint64_t* words_at(int b, int kv_head, int i, int j) const {
    return words + ((int64_t(b) * HKV + kv_head) * n + i) * n + j;
  }
  // What was chosen in a tile of 64 queries and a block, or an even block and the next. Who comes before whom is the
  // mask's to say: it matters in few tiles, and this in most.
  template <int blocks>
  struct Tile {
    uint64_t word[blocks];
    HD bool whole() const { return (word[0] & word[blocks - 1]) == ~uint64_t(0); }
    HD bool visible(int t, int j) const { return (word[j & 64 ? blocks - 1 : 0] >> (t & 63) & 1) != 0; }
  };
};

// Lists or masked tiles? As plan()'s segment: 0 leaves it to the shape, and masked_tiles asks for them, masked_in_one
// for one kernel in the backward too.
constexpr int64_t masked_tiles = -1, masked_in_one = -2;
constexpr int64_t masked_tokens = 4096;  // of a sequence, at most: of 64 blocks there is a bit each
// Of a shape, not of a GPU: Hopper has kernels for it. In longer sequences, and in the forward of 4096 tokens where few
// heads leave a large GPU idle, lists are as fast or faster (results/gpu-tests-2026-11-25.log).
inline bool is_masked(const NsaShape& a, AttentionPass pass, int64_t segment) {
  if (a.select_block != 64 || a.T > masked_tokens || (a.D != 64 && a.D != 128) || a.D != a.v_dim()) return false;
  if (segment != 0) return segment < 0;
  return a.T <= 2048 || (pass == AttentionPass::forward && a.B * a.H * ((a.T + 127) / 128) >= 256);
}
int64_t masked_bytes(const NsaShape& a, AttentionPass pass, int64_t segment, StatsAt stats);
int64_t masked_words(const NsaShape& a);  // bytes that the backward would rather not make again
bool masked_turns(const NsaShape& a);     // can the backward undo rotary positions?

#if FSDP_CUDA
// As gpu::nsa_selected_forward and _backward; scratch: masked_bytes. indices name a block once.
void masked_forward(cudaStream_t stream, bf16* o, float* lse, const bf16* q, const bf16* k, const bf16* v,
                    const int32_t* indices, char* scratch, const NsaShape& a);
void masked_backward(cudaStream_t stream, bf16* dq, bf16* dk, bf16* dv, const bf16* dq_compressed, const bf16* d_o,
                     const bf16* q, const bf16* k, const bf16* v, const bf16* o, const float* lse,
                     const int32_t* indices, char* scratch, const NsaShape& a, Gate<bf16> gate, int64_t segment,
                     const Begun<float>& begun);
#endif

}  // namespace attention::selected
