// Who adds to dQ when, where one kernel makes all gradients (sm90_backward.cuh). A block owns 128 keys of one KV head
// and walks queries that see them, 128 at a time, from the last to the first, a group's heads innermost. So every tile
// of queries gets a summand from each tile of keys that it sees. They are added in the order of the keys, which counts
// for each tile of queries enforce: a sum has one order, and two runs agree bit for bit. A block waits only for blocks
// that were drawn before it, so a launch of any size ends.
//
// Sums are in fp32, in slots: not for all queries at a time, but for those in work. The first summand of a slot's next
// use waits for the last of the one before.
#pragma once

#include <algorithm>

#include "attention/tiles.cuh"

namespace attention {

// What a block does: its unit's keys of tile j, and its queries of one chunk (all are one where keys are causal).
struct DqItem {
  int unit, j, chunk;
};

// Causal keys. A unit is a KV head of a sequence, and a block walks all queries from its own keys on. As blocks begin
// with the last queries, all of a unit go at one pace, and the block of the next 128 keys comes by a moment later: none
// waits but for those that began at the same time.
//
// There are slots for as many units as are in work at one time, a set: unit u has slot u % set. Sets are of one size
// where units allow it: a smaller last one has too few blocks for a GPU, and they are as long as any.
struct DqOrder {
  static constexpr int rows = 128;  // queries of a tile, or keys
  static constexpr bool carries = false;
  int tiles, heads, units, set;  // tiles of a sequence; heads of a group

  explicit DqOrder(const Problem& a)
      : tiles(ceil_div(a.T, rows)), heads(a.group), units(a.B * a.HKV), set(even_set()) {}

  int launches() const { return 1; }
  const DqOrder& launch(int) const { return *this; }
  int blocks() const { return units * tiles; }
  HD int slots() const { return set * heads * tiles; }                   // tiles of sums
  int64_t sums(int64_t D) const { return int64_t(slots()) * rows * D; }  // numbers
  // Each half of a tile is counted apart; and there is a count of the blocks that have begun.
  HD int counts() const { return 2 * slots() + 1; }
  // That of head h and query tile i is first_slot(x) + h * slots_of_head() + i.
  HD int first_slot(const DqItem& x) const { return x.unit % set * heads * tiles; }
  HD int slots_of_head() const { return tiles; }
  // Block n's item: a few units together, so that the blocks in work are of several; of those the keys with most
  // queries first, so that what is drawn last is short. False: there is none of this number.
  HD bool locate(int n, DqItem* x) const {
    const int first = n / (set * tiles) * set, here = units - first < set ? units - first : set;
    n -= first * tiles;
    *x = {first + n % here, n / here, 0};
    return true;
  }
  HD int pair(int unit) const { return unit; }  // KV head of a sequence
  HD int first_head(int /*unit*/) const { return 0; }
  // Units of a set: enough blocks that they seldom wait for a slot (measured: results/gpu-tests-2026-11-27.log), and
  // of that many units or up to twice as many what leaves the last set least short.
  int even_set() const {
    const int least = ceil_div(256, tiles);
    const auto missing = [&](int n) { return (n - units % n) % n; };  // units that a last set of n lacks
    int best = least;
    for (int n = least + 1; n < 2 * least; ++n)
      if (missing(n) * best < missing(best) * n) best = n;
    return best < units ? best : units;
  }
  // How many summands a slot's tile i has got before that of an item.
  struct Before {
    unsigned uses, j;
    HD unsigned operator()(int i) const { return uses * unsigned(i + 1) + j; }
  };
  HD Before before(const DqItem& x) const { return {unsigned(x.unit / set), unsigned(x.j)}; }

  // An item's steps [0, steps), of which step s is head s % heads of query tile tile(x, s). In steps from `finishes`
  // on its summand is the tile's last.
  HD int steps(const DqItem& x) const { return (tiles - x.j) * heads; }
  HD int finishes(const DqItem& x) const { return (tiles - x.j - 1) * heads; }
  HD int tile(const DqItem& /*x*/, int s) const { return tiles - 1 - s / heads; }
};

// Compressed keys, one for every `stride` tokens: 128 of them begin to be seen 128 x stride queries later than those
// before, and blocks of a unit that walked to the end of their queries would end so far apart that those which follow
// walk alone, and read Q, dO and sums of dQ from memory again. So queries come in chunks of 128 x stride. In each
// chunk all tiles of keys that see it walk it at the same time, and dK and dV are carried in memory from a tile's chunk
// to its next. A round is a chunk of each unit: units begin at chunks of different lengths, go from there to the first
// one and on from the last, and so rounds have about as many blocks.
//
// A unit is a KV head of a sequence with a part of its group's heads, where whole groups would be too few blocks; the
// parts' dK and dV are added in the order in which they end. Slots are there for two chunks of each unit of a launch,
// which has no more units than give it 256 blocks in a round.
struct CompressedDqOrder {
  static constexpr int rows = 128, uses = 2;
  static constexpr bool carries = true;
  int tiles, key_tiles, chunk_tiles, chunks, parts, heads;  // tiles of queries, and of a chunk's; heads of a part
  int all_pairs, pairs, first_pair = 0, units;              // KV heads of sequences; of a launch

  CompressedDqOrder(const Problem& a, int stride, int parts_)
      : tiles(ceil_div(a.T, rows)),
        key_tiles(ceil_div(a.keys, rows)),
        chunk_tiles(std::min(stride, tiles)),
        chunks(ceil_div(tiles, chunk_tiles)),
        parts(parts_),
        heads(a.group / parts),
        all_pairs(a.B * a.HKV),
        pairs(ceil_div(all_pairs, ceil_div(all_pairs, ceil_div(256 * chunks, parts * blocks_of_unit())))),
        units(pairs * parts) {}
  int launches() const { return ceil_div(all_pairs, pairs); }
  CompressedDqOrder launch(int n) const {
    CompressedDqOrder x = *this;
    x.first_pair = n * pairs, x.pairs = std::min(pairs, all_pairs - x.first_pair), x.units = x.pairs * parts;
    return x;
  }
  // Blocks of a round, on average: a GPU wants at least one for each multiprocessor.
  int blocks_of_round() const { return blocks() / chunks; }

  HD int key_tiles_of(int chunk) const { return chunk < key_tiles ? chunk + 1 : key_tiles; }
  HD int tiles_of(int chunk) const {
    return tiles - chunk * chunk_tiles < chunk_tiles ? tiles - chunk * chunk_tiles : chunk_tiles;
  }
  HD int first_chunk(int unit) const { return chunks - 1 - int(int64_t(unit) * chunks / units); }
  HD int chunk_of(int unit, int round) const { return (first_chunk(unit) + chunks - round) % chunks; }
  HD int round_of(int unit, int chunk) const { return (first_chunk(unit) + chunks - chunk) % chunks; }

  int blocks_of_unit() const {
    int n = 0;
    for (int c = 0; c < chunks; ++c) n += key_tiles_of(c);
    return n;
  }
  int blocks() const { return units * blocks_of_unit(); }
  HD int slots() const { return units * uses * heads * chunk_tiles; }
  HD int chains() const { return units * key_tiles; }
  // Numbers: sums of dQ, and behind them dK and dV on their way, 128 keys of each chain.
  HD int64_t sums_of_dq(int64_t D) const { return int64_t(slots()) * rows * D; }
  int64_t sums(int64_t D) const { return sums_of_dq(D) + int64_t(chains()) * 2 * rows * D; }
  // Behind the count of blocks one for each chain, of its chunks that are over.
  HD int counts() const { return 2 * slots() + 1 + chains(); }
  HD int first_slot(const DqItem& x) const {
    return ((x.unit * uses + round_of(x.unit, x.chunk) % uses) * heads - x.chunk) * chunk_tiles;
  }
  HD int slots_of_head() const { return chunk_tiles; }
  // In a round units innermost: blocks follow each other in the order of their keys, a turn apart.
  HD bool locate(int n, DqItem* x) const {
    const int unit = n % units, j = n / units % key_tiles, chunk = chunk_of(unit, n / units / key_tiles);
    *x = {unit, j, chunk};
    return j < key_tiles_of(chunk);
  }
  HD int pair(int unit) const { return first_pair + unit / parts; }
  HD int first_head(int unit) const { return unit % parts * heads; }
  // The last chunk may have fewer tiles than others: then the rest of its slots is left as it was.
  struct Before {
    unsigned sure, of_last;
    int end;  // tiles from here on are not in the last chunk
    HD unsigned operator()(int i) const { return i < end ? sure + of_last : sure; }
  };
  HD Before before(const DqItem& x) const {
    Before b = {unsigned(x.j), 0, x.chunk * chunk_tiles + tiles_of(chunks - 1)};
    for (int r = round_of(x.unit, x.chunk) - uses; r >= 0; r -= uses) {
      const int c = chunk_of(x.unit, r);
      (c + 1 == chunks ? b.of_last : b.sure) += unsigned(key_tiles_of(c));
    }
    return b;
  }
  HD int steps(const DqItem& x) const { return tiles_of(x.chunk) * heads; }
  HD int finishes(const DqItem& x) const { return x.j + 1 == key_tiles_of(x.chunk) ? 0 : steps(x); }
  HD int tile(const DqItem& x, int s) const { return x.chunk * chunk_tiles + tiles_of(x.chunk) - 1 - s / heads; }

  // dK and dV of tile j of a unit's keys, a chain: its number; of its chunks, how many come before; is this the last?
  HD int chain(int unit, int j) const { return unit * key_tiles + j; }
  HD int chunks_of(int j) const { return chunks - j; }
  HD int chunks_before(const DqItem& x) const {
    const int first = first_chunk(x.unit);
    if (x.chunk <= first) return first - x.chunk;
    return (first < x.j ? 0 : first - x.j + 1) + chunks - 1 - x.chunk;
  }
  HD bool ends(const DqItem& x) const { return chunks_before(x) + 1 == chunks_of(x.j); }
  // Of the parts of a KV head, the unit whose chain j ends next before that of `unit`; or -1.
  HD int ends_before(int unit, int j) const {
    int best = -1;
    for (int u = unit / parts * parts, e = u + parts; u < e; ++u)
      if (end_of(u, j) < end_of(unit, j) && (best < 0 || end_of(u, j) > end_of(best, j))) best = u;
    return best;
  }
  // Does chain j of `unit` end last of these?
  HD bool ends_last(int unit, int j) const {
    bool last = true;
    for (int u = unit / parts * parts, e = u + parts; u < e; ++u) last = last && end_of(u, j) <= end_of(unit, j);
    return last;
  }
  // When a unit's chain j ends: its round, and in that its part.
  HD int end_of(int unit, int j) const {
    const int last = (first_chunk(unit) + 1) % chunks;
    return round_of(unit, last < j ? j : last) * parts + unit % parts;
  }
};

}  // namespace attention
