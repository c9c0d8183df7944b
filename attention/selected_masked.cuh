// The selected branch's forward over short sequences, as dense attention under a mask: a query that selects 16 blocks
// of 64 sees most of 2048 keys, so tiles that are computed whole, and masked, cost less than gathering rows. Which of
// 64 queries selected a block of 64 keys is one word of bits, that TMA loads with the tiles. The backward keeps its
// lists: there masked tiles were level at best (H200: 60.9 against 61.9 ms of a step of m7c at batch 16, slower
// elsewhere).
#pragma once

#include "attention/tiles.cuh"
#include "nsa_attention.h"

namespace attention::selected {

// Key j <= t whose block of 64 the query selected. words (B, HKV, n, n), n = Tp/64: word [i][j] has bit t % 64 where
// query t of the i-th 64 selected block j.
struct Chosen {
  static constexpr bool chooses = true;
  int T, HKV, n;
  const uint64_t* words;
  Chosen(const Problem& a, const uint64_t* words_) : T(a.T), HKV(a.HKV), n(a.Tp / 64), words(words_) {}
  HD int first_key(int /*q0*/) const { return 0; }
  HD int last_key(int q1) const { return q1 < T ? q1 : T; }
  HD int first_query(int k0) const { return k0; }
  HD int last_query(int /*k1*/) const { return T; }
  HD const uint64_t* words_at(int b, int kv_head, int i, int j) const {
    return words + ((int64_t(b) * HKV + kv_head) * n + i) * n + j;
  }
  // The rule within a tile of 64 queries and two blocks, an even one and the next, or twice the same.
  struct Tile {
    uint64_t even, odd;
    HD bool whole(int q0, int /*q1*/, int /*k0*/, int k1) const { return k1 <= q0 + 1 && (even & odd) == ~uint64_t(0); }
    HD bool visible(int t, int j) const { return ((j & 64 ? odd : even) >> (t & 63) & 1) != 0 && j <= t; }
  };
};

// Lists or masked tiles? As plan()'s segment: 0 leaves it to the shape, and masked_tiles asks for them.
constexpr int64_t masked_tiles = -1;
constexpr int64_t masked_tokens = 4096;  // of a sequence, at most
// Of a shape, not of a GPU: Hopper has kernels for it. Tiles of 128 queries must fill a large GPU twice; below, and for
// longer sequences, lists were as fast or faster.
inline bool is_masked(const NsaShape& a, int64_t segment) {
  if (a.select_block != 64 || a.T > masked_tokens || (a.D != 64 && a.D != 128) || a.D != a.v_dim()) return false;
  return segment == masked_tiles || (segment == 0 && a.B * a.H * ((a.T + 127) / 128) >= 256);
}
int64_t masked_bytes(const NsaShape& a);

#if FSDP_CUDA
// As gpu::nsa_selected_forward; scratch: masked_bytes. indices name a block once.
void masked_forward(cudaStream_t stream, bf16* o, float* lse, const bf16* q, const bf16* k, const bf16* v,
                    const int32_t* indices, char* scratch, const NsaShape& a);
#endif

}  // namespace attention::selected
