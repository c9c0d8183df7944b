// Who selected a piece: from each query's list of blocks to each piece's list of queries, and what is done with slots.
//
// A list holds the slots (query in its segment * slots + rank * parts + part) of one pair, segment and piece, ordered
// by query. The order comes from counting: no atomic decides it.
//
// Shapes: q, dq, k, v, dk, dv are columns of (B*T, ld); o, do (B*T, H DV); dq_compressed (B*T, H D); lse (B,H,T); stats
// (B,T,H). Of a launch: slots' rows (pairs, segment, slots, group, DV of o or D of dq) and their lse2 without that;
// sums (pairs, T D of dK and then T DV of dV); split_sums (pairs, max_splits, likewise with piece_keys for T).
#pragma once

#include "attention/selected.cuh"
#include "attention/tiles.cuh"

namespace attention::selected {

// A piece that a block (CTA) keeps, and a stretch of its list. split: where in split_sums the sums of a list of several
// units go; an only unit adds to what segments before left in sums, or writes where they left nothing.
struct Unit {
  static constexpr int adds = -1, writes = -2;
  int piece, first, count, split;
};
struct Split {  // a piece's units, and where in split_sums they begin if they are several
  int first, count;
};

// The arguments that all kernels here share: NsaShape and Plan in the kernels' types, and arrays in the scratch.
struct Problem {
  int B, T, H, HKV, D, DV, group;
  int n, block, parts, slots, pieces;
  int64_t ld;
  float scale, scale_log2;
  int segment, segments, tile, tiles, unit, max_units, max_splits;
  bool lists_near;  // are near blocks in lists, too?
  Divisor by_group, by_slots;
  const int32_t* indices;  // (B,HKV,T,n)
  int* counts;             // (pairs, segments, tiles, pieces)
  int* starts;             // (pairs, segments, pieces)
  int* unit_counts;        // (pairs, segments)
  int* entries;            // (pairs, segments, segment * slots)
  Unit* units;             // (pairs, segments, max_units)
  Split* lists;            // (pairs, segments, pieces)

  Problem(const NsaShape& a, const Plan& p, const int32_t* indices_, char* scratch, bool lists_near_ = true)
      : B(int(a.B)),
        T(int(a.T)),
        H(int(a.H)),
        HKV(int(a.HKV)),
        D(int(a.D)),
        DV(int(a.v_dim())),
        group(int(a.H / a.HKV)),
        n(int(a.selected)),
        block(int(a.select_block)),
        parts(int(p.parts)),
        slots(int(p.slots)),
        pieces(int(p.pieces)),
        ld(a.ld),
        scale(float(a.scale)),
        scale_log2(float(a.scale * 1.4426950408889634)),
        segment(int(p.segment)),
        segments(int(p.segments)),
        tile(int(p.tile)),
        tiles(int(p.tiles)),
        unit(int(p.unit)),
        max_units(int(p.max_units)),
        max_splits(int(p.max_splits)),
        lists_near(lists_near_),
        by_group(group),
        by_slots(slots),
        indices(indices_),
        counts(reinterpret_cast<int*>(scratch + p.counts)),
        starts(reinterpret_cast<int*>(scratch + p.starts)),
        unit_counts(reinterpret_cast<int*>(scratch + p.unit_counts)),
        entries(reinterpret_cast<int*>(scratch + p.entries)),
        units(reinterpret_cast<Unit*>(scratch + p.units)),
        lists(reinterpret_cast<Split*>(scratch + p.lists)) {}

  __host__ __device__ int first_query(int s) const { return s * segment; }
  __host__ __device__ int last_query(int s) const { return s + 1 < segments ? (s + 1) * segment : T; }
  __device__ int first_key(int piece) const { return piece / parts * block + piece % parts * piece_keys; }
  __device__ int key_count(int piece) const {
    int in_block = block - piece % parts * piece_keys, in_sequence = T - first_key(piece);
    return min(piece_keys, min(in_block, in_sequence));
  }
  // Pieces of which a query before t1 may see a key.
  __device__ int pieces_before(int t1) const { return ceil_div(t1, block) * parts; }
  // Have segments before this one left sums of a piece's dK and dV?
  __device__ bool summed_before(int piece, int s) const { return piece < pieces_before(first_query(s)); }
  // j: a block of which t may see a key.
  __device__ bool is_near(int j, int t) const { return j == 0 || (j + 2) * block > t; }
  // Slot r of query t, whose indices are at `chosen`: the piece, or -1. one: parts is 1.
  template <bool one = false>
  __device__ int piece_of(const int32_t* chosen, int r, int t) const {
    if (one) {
      const int j = chosen[r];
      return j >= 0 && j * block <= t ? j : -1;
    }
    const int j = chosen[r / parts], piece = j * parts + r % parts;
    return j >= 0 && first_key(piece) <= t ? piece : -1;
  }
};

// How many of a tile's queries selected each piece, into counts (pairs, segments, tiles, pieces); and afterwards
// (`write`), when counts and starts say where, their slots into entries. A block owns a tile, a thread every 256th
// query. Which of 256 queries selected a piece is a row of bits in shared memory, and a query's place among them is the
// number of bits before it. Reads indices once each time.
constexpr int list_range = 1024;  // pieces at a time

template <bool write>
__global__ void __launch_bounds__(256) list_queries(Problem a) {
  begin_kernel();
  __shared__ uint32_t bits[write ? 8 : 1][list_range];   // word w: of the queries of warp w
  __shared__ uint8_t before[write ? 8 : 1][list_range];  // bits in the words before
  __shared__ int next[list_range];                       // where the next slot goes, or the count
  const int tile = blockIdx.x % a.tiles, list = blockIdx.x / a.tiles, segment = list % a.segments;
  const int pair = list / a.segments, s0 = a.first_query(segment), t0 = s0 + tile * a.tile;
  const int t1 = min(t0 + a.tile, a.last_query(segment)), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (t0 >= t1) return;
  int* counts = a.counts + (int64_t(list) * a.tiles + tile) * a.pieces;
  int* entries = a.entries + int64_t(list) * a.segment * a.slots;
  const int pieces = a.pieces_before(t1), all = a.pieces_before(a.last_query(segment));
  const bool aligned = a.n % 4 == 0 && reinterpret_cast<uintptr_t>(a.indices) % 16 == 0;
  for (int p0 = 0; p0 < pieces; p0 += list_range) {
    const int range = min(list_range, pieces - p0);
    for (int i = threadIdx.x; i < range; i += 256)
      next[i] = write ? a.starts[int64_t(list) * a.pieces + p0 + i] + counts[p0 + i] : 0;
    for (int t = t0 + int(threadIdx.x); t - int(threadIdx.x) < t1; t += 256) {
      const int32_t* chosen = a.indices + (int64_t(pair) * a.T + t) * a.n;
      const auto each = [&](auto f) {  // f(index in range, slot)
        const auto one = [&](int r, int j) {
          if (j < 0 || (!a.lists_near && a.is_near(j, t))) return;
          for (int part = 0; part < a.parts; ++part) {
            const int p = j * a.parts + part;
            if (j * a.block + part * piece_keys <= t && p >= p0 && p < p0 + range) f(p - p0, r * a.parts + part);
          }
        };
        if (t >= t1) return;
        if (aligned) {
          for (int r = 0; r < a.n; r += 4) {
            const int4 j = *reinterpret_cast<const int4*>(chosen + r);
            one(r, j.x), one(r + 1, j.y), one(r + 2, j.z), one(r + 3, j.w);
          }
        } else {
          for (int r = 0; r < a.n; ++r) one(r, chosen[r]);
        }
      };
      if (write) {
        for (int i = threadIdx.x; i < range; i += 256)
          for (auto& word : bits) word[i] = 0;
        __syncthreads();
        each([&](int p, int) { atomicOr(&bits[warp % (write ? 8 : 1)][p], 1u << lane); });
        __syncthreads();
        for (int i = threadIdx.x; i < range; i += 256)
          for (int w = 0, sum = 0; w < (write ? 8 : 1); ++w) before[w][i] = uint8_t(sum), sum += __popc(bits[w][i]);
        __syncthreads();
        each([&](int p, int slot) {
          const int w = warp % (write ? 8 : 1);
          entries[next[p] + before[w][p] + __popc(bits[w][p] & ((1u << lane) - 1))] = (t - s0) * a.slots + slot;
        });
        __syncthreads();
        for (int i = threadIdx.x; i < range; i += 256)
          next[i] += before[(write ? 8 : 1) - 1][i] + __popc(bits[(write ? 8 : 1) - 1][i]);
      } else {
        __syncthreads();
        each([&](int p, int) { atomicAdd(&next[p], 1); });
      }
    }
    __syncthreads();
    if (!write)
      for (int i = threadIdx.x; i < range; i += 256) counts[p0 + i] = next[i];
    __syncthreads();
  }
  if (!write)
    for (int i = pieces + threadIdx.x; i < all; i += 256) counts[i] = 0;
}

// The sums of x over the threads before this one of 1024, and over all. Three numbers at once.
__device__ inline void sums_before(int (&x)[3], int (&all)[3]) {
  __shared__ int warps[3][32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum[3];
  for (int k = 0; k < 3; ++k) {
    sum[k] = x[k];
    for (int d = 1; d < 32; d *= 2) {
      int y = __shfl_up_sync(~0u, sum[k], d);
      if (lane >= d) sum[k] += y;
    }
    if (lane == 31) warps[k][warp] = sum[k];
  }
  __syncthreads();
  if (warp < 3) {
    int y = warps[warp][lane];
    for (int d = 1; d < 32; d *= 2) {
      int z = __shfl_up_sync(~0u, y, d);
      if (lane >= d) y += z;
    }
    warps[warp][lane] = y;
  }
  __syncthreads();
  for (int k = 0; k < 3; ++k) {
    x[k] = sum[k] - x[k] + (warp ? warps[k][warp - 1] : 0);
    all[k] = warps[k][31];
  }
  __syncthreads();
}

// counts: sums over the tiles before; starts: where a list begins; the lists cut into units. A block owns a pair and
// segment, a thread every 1024th piece.
__global__ void __launch_bounds__(1024) cut_lists(Problem a) {
  begin_kernel();
  const int list = blockIdx.x, segment = list % a.segments;
  const int queries = a.last_query(segment) - a.first_query(segment), tiles = ceil_div(queries, a.tile);
  const int pieces = a.pieces_before(a.last_query(segment));
  int before[3] = {0, 0, 0};  // entries, units, units of lists with several
  for (int p0 = 0; p0 < pieces; p0 += 1024) {
    const int piece = p0 + int(threadIdx.x);
    int count = 0;
    if (piece < pieces) {
      int* counts = a.counts + int64_t(list) * a.tiles * a.pieces + piece;
      for (int i = 0; i < tiles; i += 16) {  // read together, for none waits for another
        int x[16];
#pragma unroll
        for (int e = 0; e < 16; ++e) x[e] = i + e < tiles ? counts[int64_t(i + e) * a.pieces] : 0;
#pragma unroll
        for (int e = 0; e < 16; ++e) {
          if (i + e < tiles) counts[int64_t(i + e) * a.pieces] = count;
          count += x[e];
        }
      }
    }
    const int units = ceil_div(count, a.unit), splits = units > 1 ? units : 0;
    int x[3] = {count, units, splits}, all[3];
    sums_before(x, all);
    for (int k = 0; k < 3; ++k) x[k] += before[k], before[k] += all[k];
    if (piece < pieces) {
      a.starts[int64_t(list) * a.pieces + piece] = x[0];
      a.lists[int64_t(list) * a.pieces + piece] = {x[2], units};
      const int only = a.summed_before(piece, segment) ? Unit::adds : Unit::writes;
      for (int u = 0; u < units; ++u)
        a.units[int64_t(list) * a.max_units + x[1] + u] = {piece, x[0] + u * a.unit, min(a.unit, count - u * a.unit),
                                                           splits ? x[2] + u : only};
    }
  }
  if (threadIdx.x == 0) a.unit_counts[list] = before[1];
}

// A block's unit, or false. Blocks of a launch: units fastest, then pairs, so that a pair's queries stay in L2.
__device__ inline bool unit_of(const Problem& a, int pair0, int segment, Unit* unit, int* pair, int* list) {
  *pair = pair0 + blockIdx.x / a.max_units, *list = *pair * a.segments + segment;
  const int u = blockIdx.x % a.max_units;
  if (u >= a.unit_counts[*list]) return false;
  const int4 x = *reinterpret_cast<const int4*>(a.units + int64_t(*list) * a.max_units + u);
  *unit = {x.x, x.y, x.z, x.w};
  return true;
}

// The columns that a thread of the next two kernels owns, 8 of a query's head, and its row in the first slot.
template <int D>
struct Owned {
  int c, x, t, b, h, pair;  // x: query in the segment; pair: in the launch
  int64_t row;
  __device__ Owned(const Problem& a, int pair0, int segment) {
    const int t0 = a.first_query(segment), queries = a.last_query(segment) - t0;
    const unsigned i = blockIdx.x * 256u + threadIdx.x, rows = i / (D / 8), all = rows / a.group;
    const int g = rows % a.group;
    c = i % (D / 8) * 8, x = all % queries, pair = all / queries, t = t0 + x;
    b = (pair0 + pair) / a.HKV, h = (pair0 + pair) % a.HKV * a.group + g;
    row = (int64_t(pair) * a.segment + x) * a.slots * a.group + g;
  }
};
__device__ inline void add_scaled(float (&sum)[8], float f, const uint4& y) {
  const uint32_t z[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    sum[2 * e] += f * low_bf16(z[e]);
    sum[2 * e + 1] += f * high_bf16(z[e]);
  }
}

// o and lse from a query's slots, in the order of its ranks, four at a time. Slots are read once, as they lie; o and
// lse are written once. H200: 88 % of DRAM's bandwidth.
template <int D, bool one>
__global__ void __launch_bounds__(256) merge_slots(bf16* o, float* lse, const bf16* rows, const float* lse2, Problem a,
                                                   int pair0, int pairs, int segment) {
  begin_kernel();
  const Owned<D> own(a, pair0, segment);
  if (own.pair >= pairs) return;
  const int32_t* chosen = a.indices + (int64_t(pair0 + own.pair) * a.T + own.t) * a.n;
  rows += own.row * D + own.c, lse2 += own.row;
  float sum[8] = {}, total = 0, top = -INFINITY;
  for (int r0 = 0; r0 < a.slots; r0 += 4) {
    float l[4], before = top;
    uint4 y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool seen = r0 + i < a.slots && a.piece_of<one>(chosen, r0 + i, own.t) >= 0;
      const int64_t at = int64_t(r0 + i) * a.group;
      l[i] = seen ? lse2[at] : -INFINITY;
      y[i] = seen ? __ldcs(reinterpret_cast<const uint4*>(rows + at * D)) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) top = fmaxf(top, l[i]);
    if (top == -INFINITY) continue;
    const float factor = exp2_approx(before - top);
    total *= factor;
#pragma unroll
    for (float& x : sum) x *= factor;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float w = exp2_approx(l[i] - top);
      total += w;
      add_scaled(sum, w, y[i]);
    }
  }
  const float f = total > 0 ? 1 / total : 0.f;
  *reinterpret_cast<uint4*>(o + ((int64_t(own.b) * a.T + own.t) * a.H + own.h) * D + own.c) = {
      pack_bf16(sum[0] * f, sum[1] * f), pack_bf16(sum[2] * f, sum[3] * f), pack_bf16(sum[4] * f, sum[5] * f),
      pack_bf16(sum[6] * f, sum[7] * f)};
  if (own.c == 0)
    lse[(int64_t(own.b) * a.H + own.h) * a.T + own.t] =
        total > 0 ? (top + log2f(total)) * 0.6931471805599453f : -INFINITY;
}

// dq: what it holds, what the compressed branch brings, and the sum of a query's slots, in the order of its ranks.
// Slots are read once, as they lie; dq is read and written once. H200: 4.1 TB/s, 86 % of DRAM's bandwidth.
template <int D, bool one>
__global__ void __launch_bounds__(256)
    sum_slots(bf16* dq, const bf16* dq_compressed, const bf16* rows, Problem a, int pair0, int pairs, int segment) {
  begin_kernel();
  const Owned<D> own(a, pair0, segment);
  if (own.pair >= pairs) return;
  const int32_t* chosen = a.indices + (int64_t(pair0 + own.pair) * a.T + own.t) * a.n;
  rows += own.row * D + own.c;
  float sum[8] = {};
  for (int r0 = 0; r0 < a.slots; r0 += 4) {
    uint4 y[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool seen = r0 + i < a.slots && a.piece_of<one>(chosen, r0 + i, own.t) >= 0;
      y[i] = seen ? __ldcs(reinterpret_cast<const uint4*>(rows + int64_t(r0 + i) * a.group * D)) : uint4{0, 0, 0, 0};
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) add_scaled(sum, a.scale, y[i]);
  }
  uint4* to = reinterpret_cast<uint4*>(dq + (int64_t(own.b) * a.T + own.t) * a.ld + own.h * D + own.c);
  add_scaled(sum, 1, *to);
  if (dq_compressed)
    add_scaled(
        sum, 1,
        *reinterpret_cast<const uint4*>(dq_compressed + ((int64_t(own.b) * a.T + own.t) * a.H + own.h) * D + own.c));
  *to = {pack_bf16(sum[0], sum[1]), pack_bf16(sum[2], sum[3]), pack_bf16(sum[4], sum[5]), pack_bf16(sum[6], sum[7])};
}

// Statistics of (B,T,H): lse in units of log2, and delta = rowsum(do * o). A gate multiplies do: taken off lse as its
// logarithm, it multiplies the probabilities instead, and with them all that the backward makes of them. 8 lanes take a
// row of one head. Reads do and o once.
template <class E>
__global__ void __launch_bounds__(256)
    statistics(float2* stats, const E* d_o, const E* o, const float* lse, Problem a, Gate<E> gate) {
  begin_kernel();
  const int64_t i = (int64_t(blockIdx.x) * 256 + threadIdx.x) / 8;
  if (i >= int64_t(a.B) * a.T * a.H) return;  // the same for 8 lanes, and they alone exchange below
  const int h = int(i % a.H), t = int(i / a.H % a.T), b = int(i / a.H / a.T);
  float sum = 0;
  constexpr int n = 16 / sizeof(E);
  for (int d = threadIdx.x % 8 * n; d < a.DV; d += 8 * n) {
    alignas(16) E x[n], y[n];
    *reinterpret_cast<uint4*>(x) = *reinterpret_cast<const uint4*>(d_o + i * a.DV + d);
    *reinterpret_cast<uint4*>(y) = *reinterpret_cast<const uint4*>(o + i * a.DV + d);
#pragma unroll
    for (int e = 0; e < n; ++e) sum += float(x[e]) * float(y[e]);
  }
  const unsigned lanes = 0xffu << (threadIdx.x % 32 / 8 * 8);
  for (int x = 4; x; x /= 2) sum += __shfl_xor_sync(lanes, sum, x);
  if (threadIdx.x % 8) return;
  const float l = lse[(int64_t(b) * a.H + h) * a.T + t];
  float log2_gate = 0;
  if (gate.gate) {
    const int64_t at = i / a.H * gate.ld + h;
    const float e = __expf(-fabsf(float(gate.gate[at]))), f = (float(gate.gate[at]) < 0 ? e : 1.f) / (1 + e);
    gate.dgate[at] = E(f * (1 - f) * sum);
    log2_gate = log2f(f);
  }
  stats[i] = {l == -INFINITY ? INFINITY : l * 1.4426950408889634f - log2_gate, sum};
}

// dK and dV of a unit's keys, as four warps hold them in accumulators of products (a warp 16 keys, a thread 2 x 2 of
// each 16 x 8 tile): added to the segments' before, or, of a list with other units, left for sum_units.
template <int N>
__device__ __forceinline__ void add_rows(float* to, const float (&x)[N / 2], bool to_what_is_there, int keys) {
  constexpr int at_once = 8;  // reads in flight
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  to += row * N + lane % 4 * 2;
#pragma unroll
  for (int i0 = 0; i0 < N / 4; i0 += at_once) {
    const auto place = [&](int i) { return reinterpret_cast<float2*>(to + i % 2 * 8 * N + i / 2 * 8); };
    float2 before[at_once];
#pragma unroll
    for (int e = 0; e < at_once; ++e)
      before[e] = to_what_is_there && row + e % 2 * 8 < keys ? *place(i0 + e) : float2{0, 0};
#pragma unroll
    for (int e = 0; e < at_once; ++e)
      if (row + e % 2 * 8 < keys) *place(i0 + e) = {before[e].x + x[2 * (i0 + e)], before[e].y + x[2 * (i0 + e) + 1]};
  }
}
template <int D, int DV>
__device__ __forceinline__ void add_to_sums(float* sums, float* split_sums, const float (&dk)[D / 2],
                                            const float (&dv)[DV / 2], const Unit& unit, const Problem& a, int pair,
                                            int first_key, int keys) {
  const bool only = unit.split < 0, adds = unit.split == Unit::adds;
  const int64_t key = only ? first_key : 0;
  float* const to = only ? sums + int64_t(pair) * a.T * (D + DV)
                         : split_sums + (int64_t(pair) * a.max_splits + unit.split) * piece_keys * (D + DV);
  add_rows<D>(to + key * D, dk, adds, keys);
  add_rows<DV>(to + int64_t(only ? a.T : piece_keys) * D + key * DV, dv, adds, keys);
}

// dK and dV of the keys that queries so far may see, in sums: the units of a list of several are added, first unit
// first, and keys that nobody selected yet are zero. The last segment's are rounded to dk and dv instead. A block owns
// 1024 numbers of every 128th piece, a thread 4 of them.
template <int D, int DV>
constexpr int sum_blocks = piece_keys*(D + DV) / 1024 * 128;  // of a pair

template <int D, int DV>
__global__ void __launch_bounds__(256)
    sum_units(bf16* dk, bf16* dv, float* sums, const float* split_sums, Problem a, int pair0, int segment) {
  begin_kernel();
  constexpr int all = piece_keys * (D + DV);  // numbers of a unit
  const int pair = blockIdx.x / sum_blocks<D, DV>, x = blockIdx.x % sum_blocks<D, DV>;
  const int i = x / 128 * 1024 + threadIdx.x * 4, b = (pair0 + pair) / a.HKV, head = (pair0 + pair) % a.HKV;
  const bool of_keys = i < piece_keys * D, last = segment + 1 == a.segments;
  const int at = of_keys ? i : i - piece_keys * D, width = of_keys ? D : DV, row = of_keys ? at / D : at / DV;
  const Split* lists = a.lists + (int64_t(pair0 + pair) * a.segments + segment) * a.pieces;
  split_sums += int64_t(pair) * a.max_splits * all + i;
  sums += int64_t(pair) * a.T * (D + DV) + (of_keys ? 0 : int64_t(a.T) * D) + at - row * width;
  bf16* const out = (of_keys ? dk : dv) + int64_t(b) * a.T * a.ld + head * width + at - row * width;
  const float f = of_keys ? a.scale : 1.f;
  const int pieces = a.pieces_before(a.last_query(segment));
#pragma unroll 4
  for (int piece = x % 128; piece < pieces; piece += 128) {
    const Split list = lists[piece];
    const bool summed = a.summed_before(piece, segment), there = summed || list.count == 1;
    if (row >= a.key_count(piece) || (!last && list.count < 2 && there)) continue;
    const int64_t key = a.first_key(piece) + row;
    float4* to = reinterpret_cast<float4*>(sums + key * width);
    float4 sum = there ? *to : float4{0, 0, 0, 0};
    if (list.count > 1) {
#pragma unroll 8
      for (int u = 0; u < list.count; ++u) {
        const float4 y = *reinterpret_cast<const float4*>(split_sums + int64_t(list.first + u) * all);
        sum.x += y.x, sum.y += y.y, sum.z += y.z, sum.w += y.w;
      }
    }
    if (last) {
      *reinterpret_cast<uint2*>(out + key * a.ld) = {pack_bf16(sum.x * f, sum.y * f), pack_bf16(sum.z * f, sum.w * f)};
    } else {
      *to = sum;
    }
  }
}

}  // namespace attention::selected
