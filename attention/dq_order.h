// Who adds to dQ when, where one kernel makes all gradients (sm90_backward.cuh). A block owns 128 keys of one KV head,
// a unit being a KV head of a sequence, and walks the queries that see them, 128 at a time; so every tile of queries
// gets a summand from each tile of keys up to its own. They are added in the order of the keys, which counts for each
// tile of queries enforce: a sum has one order, and two runs agree bit for bit.
//
// Blocks walk from the last queries to the first, a group's heads innermost. Then all blocks of a unit go at one pace,
// and the block of the next 128 keys comes by a moment later: none waits but for those that began at the same time. A
// block waits only for blocks that were drawn before it, so a launch of any size ends.
//
// Sums are in fp32, in as many slots as units are in work at one time, a chunk: unit u has slot u % chunk, and its
// first summand waits for the last of unit u - chunk. Chunks are of one size where units allow it: a shorter last one
// has too few blocks for a GPU, and they are as long as any.
#pragma once

#include "attention/tiles.cuh"

namespace attention {

struct DqOrder {
  static constexpr int rows = 128;  // queries of a tile, or keys
  int tiles, group, units, chunk;   // tiles of a sequence

  explicit DqOrder(const Problem& a)
      : tiles(ceil_div(a.T, rows)), group(a.group), units(a.B * a.HKV), chunk(even_chunk()) {}

  int blocks() const { return units * tiles; }
  HD int slots() const { return chunk * group * tiles; }                 // tiles of sums
  int64_t sums(int64_t D) const { return int64_t(slots()) * rows * D; }  // numbers
  // Each half of a tile is counted apart; and there is a count of the blocks that have begun.
  HD int counts() const { return 2 * slots() + 1; }
  HD int64_t slot(int unit, int h, int i) const { return (int64_t(unit % chunk) * group + h) * tiles + i; }
  // Block n's unit and tile of keys: a few units together, so that the blocks in work are of several; of those the keys
  // with most queries first, so that what is drawn last is short.
  HD void locate(int n, int* unit, int* j) const {
    const int first = n / (chunk * tiles) * chunk, here = units - first < chunk ? units - first : chunk;
    n -= first * tiles;
    *unit = first + n % here, *j = n / here;
  }
  // Units of a chunk: enough blocks that they seldom wait for a slot (measured: results/gpu-tests-2026-11-27.log), and
  // of that many units or up to twice as many what leaves the last chunk least short.
  int even_chunk() const {
    const int least = ceil_div(256, tiles);
    const auto missing = [&](int n) { return (n - units % n) % n; };  // units that a last chunk of n lacks
    int best = least;
    for (int n = least + 1; n < 2 * least; ++n)
      if (missing(n) * best < missing(best) * n) best = n;
    return best < units ? best : units;
  }
  // How many summands a slot's tile i has got before that of key tile j of this unit.
  HD unsigned before(int unit, int i, int j) const { return unsigned(unit / chunk * (i + 1) + j); }

  // Of key tile j: steps [0, steps), of which step s is head s % group of query tile tile(s). In steps from `finishes`
  // on its summand is the tile's last.
  HD int steps(int j) const { return (tiles - j) * group; }
  HD int finishes(int j) const { return (tiles - j - 1) * group; }
  HD int tile(int s) const { return tiles - 1 - s / group; }
};

}  // namespace attention
