// The selected branch of NSA (attention/selected.cu): how its work is cut, and its kernels on a bare CUDA stream.
#pragma once

#include "attention/stages.h"

namespace attention::selected {

// Most keys that a tile of scores has. A selection block of more is cut into pieces of so many, one after another.
constexpr int piece_keys = 64;
// Near a query are block 0, its own and the one before, which NSA always selects (selected_near.cuh). Most slots that a
// query has where these are in no list.
constexpr int near_blocks = 3, near_slots = 16;

// How a call is cut, and what lies where in its scratch. A pair is a sequence and a KV head. A launch takes some pairs
// and one segment of their queries; a query has a slot for every piece that it may select, and a slot holds the group's
// heads, DV numbers each of o or D of dq.
struct Plan {
  int64_t parts, slots, pieces;                // of a selection block; of a query; of a sequence
  int64_t segment, segments;                   // queries of a segment; segments of a sequence
  int64_t tile, tiles;                         // queries that are counted together; tiles of a segment
  int64_t pairs, pairs_at_once;                // in all; in a launch
  int64_t unit;                                // most queries of a block (CTA)
  int64_t max_units, max_splits;               // of a pair and segment: units; units of lists that have several
  int64_t counts, starts, units, unit_counts;  // offsets in bytes
  int64_t lists, entries, stats, slot_stats, slot_rows, sums, split_sums, bytes;
};
// segment: 0 or less for the default, else a number of queries, of which 256 is a divisor.
Plan plan(const NsaShape& a, AttentionPass pass, int64_t segment = 0);
// Bytes of scratch for bf16 on a GPU of compute capability `arch`: the plan's, or what masked tiles need there
// (selected_masked.cuh). 0: any GPU, without those.
int64_t scratch_bytes(const NsaShape& a, int arch, AttentionPass pass, int64_t segment = 0,
                      StatsAt stats = StatsAt::workspace);

}  // namespace attention::selected

#if FSDP_CUDA
// The same arguments and shapes as in attention/stages.h, and segment as in plan(); masked tiles may be taken for 0. T:
// float or bf16; float needs no scratch but the backward's, B*T*H*8 bytes, and has no segments.
namespace gpu {
template <class T>
Kernel nsa_selected_forward(cudaStream_t stream, int arch, T* o, float* lse, const T* q, const T* k, const T* v,
                            const int32_t* indices, char* scratch, const NsaShape& a, int64_t segment = 0);
template <class T>
Kernel nsa_selected_backward(cudaStream_t stream, int arch, T* dq, T* dk, T* dv, const T* dq_compressed, const T* d_o,
                             const T* q, const T* k, const T* v, const T* o, const float* lse, const int32_t* indices,
                             char* scratch, const NsaShape& a, Gate<T> gate, int64_t segment = 0,
                             const Begun<float>& begun = {});
}  // namespace gpu
#endif
