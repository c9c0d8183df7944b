#include "unit.h"

#include <algorithm>

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

}  // namespace

void lay_out(std::vector<Unit>* units, int shards) {
  for (Unit& u : *units) {
    find_gradients(&u);
    // Weight decay is for a prefix, so that AdamW needs one number to know whom.
    auto rank = [](const Param& p) { return !p.has_gradient ? 2 : p.decay ? 0 : 1; };
    std::stable_sort(u.params.begin(), u.params.end(),
                     [&](const Param& a, const Param& b) { return rank(a) < rank(b); });
    u.numel = u.decayed = u.padded = u.shard = 0;
    const int parts = u.replicated ? 1 : shards;
    u.with_gradient = append_flat(&u, true, parts);
    u.without_gradient = append_flat(&u, false, parts);
  }
}

Unit::Piece Unit::piece(const Param& p, int rank) const {
  const FlatParam& f = p.has_gradient ? with_gradient : without_gradient;
  const int64_t from = f.offset_in_unit + rank * f.shard, a = std::max(from, p.offset),
                b = std::min(from + f.shard, p.offset + p.numel);
  return a < b ? Piece{b - a, a - p.offset, f.offset_in_shard + a - from} : Piece{0, 0, 0};
}
