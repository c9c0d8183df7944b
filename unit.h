// Units: parameters that are gathered together, how they lie in one flat buffer, and where that is cut into the shards
// that ranks own (Zhao et al. 2023, arXiv 2304.11277, section 3.2).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct Param {
  std::string name;
  std::vector<int64_t> shape;
  float mean, std;    // initial weights: normal(mean, std) clamped at 3 std, keyed by `id` and by nothing else
  bool decay;         // weight decay: matrices only
  bool joined;        // lies right behind the one before it, because one product takes both
  bool frozen;        // is not trained
  bool has_gradient;  // trained, or joined with a parameter that is. lay_out fills it in
  uint32_t id;        // index in the table of all parameters
  int64_t numel;      // the product of the shape
  int64_t offset;     // in the unit's buffer
};

// Parameters one behind the other, and padding, cut into equal shards (Zhao et al. 2023, section 3.2.3). All in
// elements.
struct FlatParam {
  int64_t offset_in_unit = 0;   // of the flat parameter, in the unit's buffer
  int64_t offset_in_shard = 0;  // of a rank's shard of it, in the rank's shard of the unit
  int64_t numel = 0;
  int64_t padded = 0, shard = 0;  // padded = shards * shard
};

struct Unit {
  std::string name;
  std::vector<Param> params;
  bool replicated = false;  // not sharded: every rank has all of it
  int reductions = 1;       // in a micro-batch; 2 where two distant parts of the model share a weight
  // Two flat parameters make the unit's buffer, and a rank's shards of them, in that order, its shard of the unit: what
  // has a gradient, with matrices first, so that the decayed elements are a prefix; and what is only gathered. Either
  // may be empty.
  FlatParam with_gradient, without_gradient;
  int64_t numel = 0, decayed = 0;  // elements of both; of them with weight decay
  int64_t padded = 0, shard = 0;   // of both
  bool trained() const;            // has a parameter that is not frozen
  // The part of a parameter that lies in the shard of `rank`: how many elements, the first of them in the parameter,
  // and where that lies in the shard.
  struct Piece {
    int64_t numel, first, offset_in_shard;
  };
  Piece piece(const Param& p, int rank) const;
};

// Shards are multiples of this many elements, so that every rank's is aligned for vectors and for the network. A small
// flat parameter may leave the last ranks with padding only.
constexpr int64_t shard_align = 64;
// Sorts the parameters; fills in has_gradient, the offsets, and all numbers of the units, for `shards` ranks of a shard
// group. Sizes of parameters must be multiples of 8 (16-byte loads of any). Calling it again, for another number of
// shards, is allowed.
void lay_out(std::vector<Unit>* units, int shards);
