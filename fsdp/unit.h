// Units: parameters that are gathered together, how they lie in one flat buffer, and where that is cut into the shards
// that ranks own (Zhao et al. 2023, arXiv 2304.11277, section 3.2).
#pragma once

#include <algorithm>
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
  bool fp8;           // is gathered in e4m3, under one scale with what is joined to it; is trained
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
  // What is gathered in e4m3 comes first of all; what shares a scale, one behind the other.
  struct Scaled {
    int64_t offset, numel;
  };
  std::vector<Scaled> scaled;
  int64_t in_fp8 = 0;  // elements of them
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
// A gathered unit with parameters in fp8: a code for each element of with_gradient, of which those behind in_fp8 mean
// nothing; and the parameters behind in_fp8, one behind the other, in a buffer that cuts into a part of one size for
// each rank of a shard group, which holds what that rank's shard has of them.
struct Fp8Layout {
  int64_t rest = 0;   // bytes from the codes to that buffer
  int64_t part = 0;   // its elements of a rank; 0: all parameters are in fp8
  int64_t first = 0;  // where in it element in_fp8 lies
  int64_t bytes = 0;  // of both
};
Fp8Layout fp8_layout(const Unit& u, int shards, int64_t element_bytes);

// Sorts the parameters; drops fp8 where a unit has so much beside it that it would take no fewer bytes than bf16; fills
// in has_gradient, the offsets, and all numbers of the units, for `shards` ranks of a shard group. Sizes of parameters
// must be multiples of 8 (16-byte loads of any). Calling it again, for another number of shards, is allowed; what has
// dropped fp8 stays without.
void lay_out(std::vector<Unit>* units, int shards);

// Of several units: the most that f finds of one, such as the elements of its gradient; of the elements that one
// collective gathers; of a gradient that is sharded; whether any gathers in fp8; those that are not sharded.
template <class F>
int64_t largest(const std::vector<Unit>& units, F f) {
  int64_t most = 0;
  for (const Unit& u : units) most = std::max<int64_t>(most, f(u));
  return most;
}
int64_t largest_gather(const std::vector<Unit>& units);
int64_t largest_sharded_gradient(const std::vector<Unit>& units);
bool any_in_fp8(const std::vector<Unit>& units);
std::vector<Unit> replicated(const std::vector<Unit>& units);
