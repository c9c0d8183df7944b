// Who adds to dQ when, where one kernel makes all gradients (sm90_backward.cuh). A block owns 128 keys of one KV head,
// a unit being a KV head of a sequence, and walks the queries that see them, 64 at a time; so every tile of 64 queries
// gets a summand from each tile of 128 keys that it sees. They are added in the order of the keys, which a count for
// each tile of queries enforces: a sum has one order, and two runs agree bit for bit.
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
  static constexpr int queries = 64, keys = 128;  // of a tile
  int q_tiles, k_tiles, group, units, chunk;

  explicit DqOrder(const Problem& a)
      : q_tiles(ceil_div(a.T, queries)),
        k_tiles(ceil_div(a.T, keys)),
        group(a.group),
        units(a.B * a.HKV),
        chunk(chunk_of(a.D)) {}

  int blocks() const { return units * k_tiles; }
  HD int counts() const { return chunk * group * q_tiles; }
  int64_t sums(int64_t D) const { return int64_t(counts()) * queries * D; }  // numbers
  HD int64_t tile_at(int unit, int h, int i) const { return (int64_t(unit % chunk) * group + h) * q_tiles + i; }
  // Block n's unit and tile of keys: a few units together, so that the blocks in work are of several; of those the keys
  // with most queries first, so that what is drawn last is short.
  HD void locate(int n, int* unit, int* j) const {
    const int first = n / (chunk * k_tiles) * chunk, here = units - first < chunk ? units - first : chunk;
    n -= first * k_tiles;
    *unit = first + n % here, *j = n / here;
  }
  // Units of a chunk: enough blocks that they seldom wait for a slot (measured: results/gpu-tests-2026-11-25.log), and
  // of that many units or up to twice as many what leaves the last chunk least short.
  int chunk_of(int D) const {
    const int least = ceil_div(D == 64 ? 128 : 256, k_tiles);
    const auto missing = [&](int n) { return (n - units % n) % n; };  // units that a last chunk of n lacks
    int best = least;
    for (int n = least + 1; n < 2 * least; ++n)
      if (missing(n) * best < missing(best) * n) best = n;
    return best < units ? best : units;
  }
  // How many tiles of keys add to query tile i.
  HD int summands(int i) const { return i * queries / keys + 1; }

  // Of key tile j: steps [0, steps), of which step s is head s % group of query tile tile(s). In steps from `finishes`
  // on its summand is the tile's last.
  HD int steps(int j) const { return (q_tiles - j * (keys / queries)) * group; }
  HD int finishes(int j) const {
    const int others = q_tiles - (j + 1) * (keys / queries);
    return others > 0 ? others * group : 0;
  }
  HD int tile(int s) const { return q_tiles - 1 - s / group; }
};

}  // namespace attention
