// Who adds to dQ when, where one kernel makes all gradients (sm90_backward.cuh). A block owns 128 keys of one KV head,
// a unit being a KV head of a sequence, and walks the queries that see them, 64 at a time; so every tile of 64 queries
// gets a summand from each tile of 128 keys that it sees. They are added in the order of the keys, which a count for
// each tile of queries enforces: a sum has one order, and two runs agree bit for bit.
//
// Blocks walk from the last queries to the first, a group's heads innermost. Then all blocks of a unit go at one pace,
// and the block of the next 128 keys comes by a moment later: none waits but for those that began at the same time. A
// block waits only for blocks that were drawn before it, so a launch of any size ends.
//
// Sums are in fp32, in as many slots as units are in work at one time: unit u has slot u % slots, and its first summand
// waits for the last of unit u - slots. Twice as many, so that nobody waits where one chunk of units follows another,
// as long as 128 MiB hold them; a wait is as long as the shortest blocks are, a sequence that needs more is long.
#pragma once

#include "attention/tiles.cuh"

namespace attention {

struct DqOrder {
  static constexpr int queries = 64, keys = 128;  // of a tile
  int q_tiles, k_tiles, group, units, chunk, slots, parts;

  DqOrder(const Problem& a, int parts_)
      : q_tiles(ceil_div(a.T, queries)),
        k_tiles(ceil_div(a.keys, keys)),
        group(a.group),
        units(a.B * a.HKV),
        chunk(ceil_div(264, k_tiles * parts_)),
        parts(parts_) {
    if (chunk > units) chunk = units;
    const int64_t unit_bytes = int64_t(group) * q_tiles * queries * a.D * 4;
    slots = 2 * chunk * unit_bytes <= int64_t(128) << 20 ? 2 * chunk : chunk;
    if (slots > units) slots = units;
  }

  int blocks() const { return units * k_tiles * parts; }
  HD int counts() const { return slots * group * q_tiles; }
  int64_t sums(int64_t D) const { return int64_t(counts()) * queries * D; }  // numbers
  HD int64_t tile_at(int unit, int h, int i) const { return (int64_t(unit % slots) * group + h) * q_tiles + i; }
  // Block n's unit, tile of keys and part of the loop over queries: a few units together, so that the blocks in work
  // are of several; of those the keys with most queries first, so that what is drawn last is short.
  HD void locate(int n, int* unit, int* j, int* part) const {
    const int first = n / (chunk * k_tiles * parts) * chunk, here = units - first < chunk ? units - first : chunk;
    n -= first * k_tiles * parts;
    *unit = first + n % here, *part = n / here % parts, *j = n / here / parts;
  }

  // How many of a sequence's first queries are in tiles to which no key adds.
  template <class Mask>
  int unseeing(const Mask& mask) const {
    int i = 0;
    while (i < q_tiles && first_keys(mask, i) >= last_keys(mask, i)) ++i;
    return i * queries;
  }

  // Key tiles [first_keys, last_keys) add to query tile i.
  template <class Mask>
  static HD int first_keys(const Mask& mask, int i) {
    return mask.first_key(i * queries) / keys;
  }
  template <class Mask>
  static HD int last_keys(const Mask& mask, int i) {
    return ceil_div(mask.last_key((i + 1) * queries), keys);
  }
};

// The loop of key tile j: steps [begin, end), of which step s is head s % group of query tile last - 1 - s / group. In
// steps from `finishes` on its summand is the last of the tile.
struct DqLoop {
  int last, begin, end, finishes;
  template <class Mask>
  HD DqLoop(const Mask& mask, const DqOrder& order, int j, int part) {
    const auto adds = [&](int i) { return order.first_keys(mask, i) <= j && j < order.last_keys(mask, i); };
    const int first = mask.first_query(j * order.keys) / order.queries;
    last = ceil_div(mask.last_query((j + 1) * order.keys), order.queries);
    while (first < last && !adds(last - 1)) --last;  // whose queries that would see the keys lie past T
    const int tiles = first < last ? last - first : 0;
    begin = int(int64_t(tiles) * order.group * part / order.parts);
    end = int(int64_t(tiles) * order.group * (part + 1) / order.parts);
    int i = first;
    while (i < last && order.last_keys(mask, i) == j + 1) ++i;
    finishes = (last - i) * order.group;
    finishes = finishes < begin ? begin : finishes > end ? end : finishes;
  }
  HD int tile(int s, int group) const { return last - 1 - s / group; }
};

}  // namespace attention
