#include "fsdp/unit.h"

#include <algorithm>
#include <iterator>

#include "lib/device/error.h"

bool Unit::trained() const {
  return std::any_of(params.begin(), params.end(), [](const Param& p) { return !p.frozen; });
}

namespace {

// One product makes the gradients of all parameters that are joined, so they have one together or not at all.
void find_gradients(Unit* u) {
  for (size_t i = 0, end; i < u->params.size(); i = end) {
    bool any = !u->params[i].frozen;
    for (end = i + 1; end < u->params.size() && u->params[end].joined; end++) any = any || !u->params[end].frozen;
    for (; i < end; i++) u->params[i].has_gradient = any;
  }
}

// Appends the parameters with a gradient, or those without, to the unit's buffer as one flat parameter.
FlatParam append_flat(Unit* u, bool with_gradient, int shards) {
  FlatParam f = {u->padded, u->shard, 0, 0, 0};
  for (Param& p : u->params) {
    if (p.has_gradient != with_gradient) continue;
    ASSERT(p.numel > 0 && p.numel % 8 == 0);
    p.offset = f.offset_in_unit + f.numel;
    f.numel += p.numel;
    if (with_gradient && p.decay) u->decayed += p.numel;
  }
  f.shard = (f.numel + shard_align * shards - 1) / (shard_align * shards) * shard_align;
  f.padded = f.shard * shards;
  u->numel += f.numel, u->padded += f.padded, u->shard += f.shard;
  return f;
}

void lay_out(Unit* u, int shards) {
  find_gradients(u);
  // Weight decay is for a prefix, so that AdamW needs one number to know whom.
  auto rank = [](const Param& p) { return !p.has_gradient ? 3 : p.fp8 ? 0 : p.decay ? 1 : 2; };
  std::stable_sort(u->params.begin(), u->params.end(),
                   [&](const Param& a, const Param& b) { return rank(a) < rank(b); });
  u->numel = u->decayed = u->padded = u->shard = u->in_fp8 = 0;
  u->scaled.clear();
  for (const Param& p : u->params) {
    if (!p.fp8) break;
    ASSERT(p.has_gradient && p.decay);
    if (!p.joined) u->scaled.push_back({u->in_fp8, 0});
    u->scaled.back().numel += p.numel, u->in_fp8 += p.numel;
  }
  u->with_gradient = append_flat(u, /*with_gradient=*/true, shards);
  u->without_gradient = append_flat(u, /*with_gradient=*/false, shards);
}

}  // namespace

void lay_out(std::vector<Unit>* units, int shards) {
  for (Unit& u : *units) {
    const int parts = u.replicated ? 1 : shards;
    lay_out(&u, parts);
    if (u.in_fp8 == 0 || fp8_layout(u, parts, 2).bytes < 2 * u.padded) continue;
    for (Param& p : u.params) p.fp8 = false;
    lay_out(&u, parts);
  }
}

// The first rank that has some of the rest fills the end of its part, if the next has some too: so they join.
Fp8Layout fp8_layout(const Unit& u, int shards, int64_t element_bytes) {
  const FlatParam& f = u.with_gradient;
  const auto aligned = [](int64_t n) { return (n + shard_align - 1) / shard_align * shard_align; };
  Fp8Layout l;
  l.rest = (f.padded + 255) / 256 * 256;
  if (const int64_t rest = f.numel - u.in_fp8; rest > 0) {
    const int64_t owner = u.in_fp8 / f.shard, here = std::min(rest, (owner + 1) * f.shard - u.in_fp8);
    l.part = aligned(std::max(here, std::min(rest - here, f.shard)));
    l.first = here == rest ? owner * l.part : (owner + 1) * l.part - here;
  }
  l.bytes = l.rest + shards * l.part * element_bytes;
  return l;
}

Unit::Piece Unit::piece(const Param& p, int rank) const {
  const FlatParam& f = p.has_gradient ? with_gradient : without_gradient;
  const int64_t from = f.offset_in_unit + rank * f.shard, a = std::max(from, p.offset),
                b = std::min(from + f.shard, p.offset + p.numel);
  return a < b ? Piece{b - a, a - p.offset, f.offset_in_shard + a - from} : Piece{0, 0, 0};
}

int64_t largest_gather(const std::vector<Unit>& units) {
  return largest(units, [](const Unit& u) { return std::max(u.with_gradient.padded, u.without_gradient.padded); });
}

int64_t largest_sharded_gradient(const std::vector<Unit>& units) {
  return largest(units, [](const Unit& u) { return u.replicated ? 0 : u.with_gradient.padded; });
}

bool any_in_fp8(const std::vector<Unit>& units) {
  return std::any_of(units.begin(), units.end(), [](const Unit& u) { return u.in_fp8 > 0; });
}

std::vector<Unit> replicated(const std::vector<Unit>& units) {
  std::vector<Unit> found;
  std::copy_if(units.begin(), units.end(), std::back_inserter(found), [](const Unit& u) { return u.replicated; });
  return found;
}
