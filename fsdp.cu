#include "fsdp.h"

#include <algorithm>
#include <numeric>
#include <tuple>

// ----------------------------------------------------------------------------------------------- what a rank keeps

namespace {
// The least staging memory of an all_reduce, for each rank: a piece of the widest numbers.
constexpr int64_t piece_bytes = piece_numbers * int64_t(sizeof(double));
// Of the gathers, and where blocks are gathered in fp8 the all_reduce of largest numbers.
ChannelBytes gather_bytes(const std::vector<Unit>& units, int64_t element_bytes, int ranks) {
  const int64_t reductions = any_in_fp8(units) ? ranks * piece_bytes : 0;
  return {std::max(largest_gather(units) * element_bytes, reductions), reductions};
}
// Bytes of the largest reduction among `ranks`.
int64_t largest_reduction(const std::vector<Unit>& units, int64_t FlatParam::*numel, Dtype dtype, int ranks) {
  return std::max<int64_t>(largest(units, [&](const Unit& u) { return u.with_gradient.*numel; }) * size_of(dtype),
                           ranks * piece_bytes);
}
// Units share `slots` slots, each as large as the largest of them. But where a few are much larger than all others, as
// an embedding and a head are, and never come within so many units, they have one slot between them, and the others
// share so many smaller ones. That takes less memory, and a large unit need not wait for a slot that a small one holds.
struct SharedSlots {
  int64_t numel = 0, count = 0, large = 0;  // large: elements of the one for large units; 0: none is
};
// sizes: of the units that share, in the order of their use.
SharedSlots small_slot(const std::vector<int64_t>& sizes, int slots) {
  if (sizes.empty()) return {};
  const int64_t most = *std::max_element(sizes.begin(), sizes.end());
  SharedSlots best = {most, std::min<int64_t>(slots, int64_t(sizes.size())), 0};
  for (int64_t small : sizes) {
    int64_t last = -slots, others = 0;
    bool apart = 0 < small && small < most;
    for (int64_t i = 0; i < int64_t(sizes.size()); i++) {
      if (sizes[size_t(i)] <= small) others++;
      else apart = apart && i - last >= slots, last = i;
    }
    const SharedSlots split = {small, std::min<int64_t>(slots, others), most};
    if (apart && split.large + split.numel * split.count < best.large + best.numel * best.count) best = split;
  }
  return best;
}
}  // namespace

template <class T, class G>
Fsdp<T, G>::Fsdp(Device& dev, const World& world, Transport transport, std::vector<Unit> units,
                 const FsdpOptions& options, Links links)
    : dev_(dev),
      shard_world_(shard_group(world, options.shards(world.size))),
      replica_world_(replica_group(world, options.shards(world.size))),
      options_(options),
      units_(std::move(units)),
      gather_channel_(dev, dev.gather(), shard_world_, options.gather_over_mpi ? Transport::mpi : transport, "gather",
                      gather_bytes(units_, options.gather_wide ? 4 : int64_t(sizeof(T)), shard_world_.size), links,
                      options.gather_by_copy_engine ? CopyEngines::all_gather : CopyEngines::none),
      reduce_channel_(dev, dev.reduce(), shard_world_, transport, "reduce",
                      largest_reduction(exchanges() ? replicated(units_) : units_, &FlatParam::padded,
                                        options.reduce_dtype, shard_world_.size),
                      links, CopyEngines::none, options.reduce_ctas),
      replica_channel_(dev, dev.reduce(), replica_world_, transport, "replicas",
                       largest_reduction(units_, &FlatParam::shard, options.reduce_dtype, replica_world_.size), links),
      fp8_(dev, units_),
      exposed_(dev, world.size > 1),
      scalars_ready_(dev),
      scalars_summed_(dev),
      counted_(dev),
      wanted_(dev) {
  for (const Unit& u : units_) trained_units_ += u.trained();
  order_updates();
  keep_state();
  keep_gather_slots();
  keep_gradient_slots();
  if (exchanges() && !fetches()) open_exchange(transport, links);
  if (options.has_small_ring() && shard_world_.size > 1 && transport == Transport::nccl)
    small_reduce_channel_.emplace(dev, dev.reduce(), shard_world_, transport, "small reduce",
                                  FsdpOptions::small_gradient, links, CopyEngines::none, options.small_reduce_ctas);
  int opened = 0;
  for_each_channel(*this, [&](const Channel& c) { opened += c.communicates(); });
  ASSERT(transport != Transport::nccl || opened == options.communicators(world.size));
  scalars_ = dev.mem.keep<StepScalars>(1, "scalars", Purpose::workspace);
  partials_ = dev.mem.keep<double>(ops::sum_partials(), "partial sums", Purpose::workspace);
  unit_sums_ = dev.mem.keep<double>(int64_t(units_.size()), "sums of units", Purpose::workspace);
  adamw_ = dev.mem.keep<ops::AdamW>(1, "learning rate and its kind", Purpose::workspace);
  if (options.read_tail && shard_world_.size > 1)
    scalars_of_ranks_ = dev.mem.keep<double>(ops::scalars_of_peers(step_scalars, shard_world_.size), "scalars of peers",
                                             Purpose::workspace);
  if (fetches() || scalars_of_ranks_) {
    ASSERT(options.can_map_peers(world.size));
    uint32_t* signals = dev.mem.keep<uint32_t>(peer_signals(shard_world_.size), "signals of peers", Purpose::workspace);
    if (links == Links::open) peers_ = gather_channel_.map_peers(signals);
  }
}

// Whether the unit's master copy lies in halves: where its upper half is what is gathered.
template <class T, class G>
bool Fsdp<T, G>::in_halves(int u) const {
  const bool gathered_wide = options_.gather_wide && shards(u) > 1;
  return std::is_same_v<T, bf16> && units_[size_t(u)].in_fp8 == 0 && !gathered_wide;
}

// What a rank owns for ever: its shard of each unit in fp32, and AdamW's moments of what has a gradient.
template <class T, class G>
void Fsdp<T, G>::keep_state() {
  Memory& mem = dev_.mem;
  for (size_t i = 0; i < units_.size(); i++) {
    const Unit& u = units_[i];
    State s(dev_);
    float* const master = mem.keep<float>(u.shard, u.name + " master", Purpose::master);
    s.master = master;
    if (bf16* const high = reinterpret_cast<bf16*>(master); in_halves(int(i)))
      s.master = Halves{high, reinterpret_cast<int16_t*>(high + u.shard)};
    auto moment = [&](const char* name) -> void* {
      if (!u.trained()) return nullptr;
      const int64_t n = u.with_gradient.shard;
      if (options_.moment_dtype == Dtype::bf16) return mem.keep<bf16>(n, u.name + name, Purpose::moments);
      return mem.keep<float>(n, u.name + name, Purpose::moments);
    };
    s.m = moment(" first moment"), s.v = moment(" second moment");
    // Adjacent parameters make one range, hence one AdamW kernel: usually the shard has but one.
    for (const Param& p : u.params) {
      const Unit::Piece mine = u.piece(p, shard_rank(int(i)));
      if (mine.numel == 0 || p.frozen) continue;
      if (s.trained.empty() || s.trained.back().second < mine.offset_in_shard)
        s.trained.emplace_back(mine.offset_in_shard, mine.offset_in_shard);
      s.trained.back().second = mine.offset_in_shard + mine.numel;
    }
    state_.push_back(std::move(s));
  }
}

// Elements of T that a slot must have for the unit.
template <class T, class G>
int64_t Fsdp<T, G>::slot_numel(int u) const {
  const Unit& unit = units_[size_t(u)];
  const int64_t size = int64_t(sizeof(T));
  return unit.in_fp8 > 0 ? (fp8_layout(unit, shards(u), size).bytes + size - 1) / size : unit.padded;
}

// The unit's master copy, if it can be computed with as it lies: one rank has all of it, in T.
template <class T, class G>
T* Fsdp<T, G>::as_slot(int u) const {
  const Masters& master = state_[size_t(u)].master;
  if (shards(u) > 1 || units_[size_t(u)].in_fp8 > 0) return nullptr;
  if constexpr (std::is_same_v<T, float>) return master.whole;
  else if constexpr (std::is_same_v<T, bf16>) return master.halves.high;
  else return nullptr;
}

// A slot of its own for each unit that stays resident once it is gathered; it takes no memory where it is the master
// copy. The others share as many as the options allow.
template <class T, class G>
void Fsdp<T, G>::keep_gather_slots() {
  auto add = [&](int owner, int64_t numel, const std::string& name, T* master) {
    const Purpose purpose = Purpose::gather_slots;
    T* p = master ? master : dev_.mem.keep<T>(numel, name, purpose);
    const bool gathered = (owner < 0 ? shard_world_.size : shards(owner)) > 1;
    float* wide = options_.gather_wide && gathered ? dev_.mem.keep<float>(numel, name + ", fp32", purpose) : nullptr;
    slots_.emplace_back(dev_, name, p, wide);
    slots_.back().owner = owner, slots_.back().is_master = master;
  };
  const bool own = !options_.reshard_after_forward || options_.gather_slots == 0;
  std::vector<int64_t> sharing;
  for (size_t i = 0; i < units_.size(); i++) {
    const Unit& u = units_[i];
    const int64_t numel = slot_numel(int(i));
    T* const master = as_slot(int(i));
    if (own || u.replicated || master) add(int(i), numel, u.name + " gathered", master);
    else sharing.push_back(numel);
  }
  const SharedSlots shared = small_slot(sharing, options_.gather_slots);
  small_slot_ = shared.numel;
  for (int i = 0; i < shared.count; i++) add(-1, shared.numel, strf("gather slot %d", i), nullptr);
  if (shared.large > 0)  // the last of all
    add(-1, shared.large, "large gather slot", nullptr), slots_.back().large = true;
}

// Sharded units share gradient slots; a replicated unit has its own, because its gradient is written in every module of
// a micro-batch.
template <class T, class G>
void Fsdp<T, G>::keep_gradient_slots() {
  const bool narrow = options_.reduce_dtype != dtype_of<G>;
  ASSERT(!narrow || (options_.reduce_dtype == Dtype::bf16 && dtype_of<G> == Dtype::f32));
  const Purpose purpose = Purpose::gradient_slots;
  int64_t most = 0, most_of_shard = 0;
  auto add = [&](int owner, int64_t numel, int64_t shard, const std::string& name) {
    gradient_slots_.emplace_back(dev_, name, dev_.mem.keep<G>(numel, name, purpose));
    gradient_slots_.back().owner = owner;
    most = std::max(most, numel), most_of_shard = std::max(most_of_shard, shard);
  };
  std::vector<int64_t> sharded;
  for (const Unit& u : units_)
    if (!u.replicated && u.with_gradient.padded > 0) sharded.push_back(u.with_gradient.padded);
  const SharedSlots shared = small_slot(sharded, options_.gradient_slots);
  small_gradient_ = shared.numel;
  for (size_t i = units_.size(); i-- > 0;)
    if (!units_[i].replicated && units_[i].with_gradient.padded > small_gradient_) last_large_ = int(i);
  for (int i = 0; i < shared.count; i++)
    add(-1, shared.numel, shared.numel / shard_world_.size, strf("gradient slot %d", i));
  rotating_ = gradient_slots_.size();
  if (shared.large > 0) {
    add(-1, shared.large, shared.large / shard_world_.size, "large gradient slot");
    gradient_slots_.back().large = true;
  }
  for (size_t i = 0; i < units_.size(); i++)
    if (units_[i].replicated && units_[i].trained())
      add(int(i), units_[i].with_gradient.padded, units_[i].with_gradient.shard, units_[i].name + " gradient");
  if (narrow) narrow_gradient_ = dev_.mem.keep<bf16>(most, "gradient in bf16", purpose);
  if (options_.update_in_backward) updated_gradient_ = dev_.mem.keep<float>(most_of_shard, "gradient shard", purpose);
}

template <class T, class G>
void Fsdp<T, G>::open_exchange(Transport transport, Links links) {
  const int64_t most = largest_sharded_gradient(units_);
  exchange_channel_.emplace(dev_, dev_.reduce(), shard_world_, transport, "exchange",
                            dev_.backend == Backend::gpu ? most * size_of(options_.reduce_dtype) : 0, links,
                            CopyEngines::all_to_all);
}

template <class T, class G>
int64_t Fsdp<T, G>::parameters() const {
  int64_t n = 0;
  for (const Unit& u : units_) n += u.numel;
  return n;
}

template <class T, class G>
int64_t Fsdp<T, G>::pinned_bytes() const {
  int64_t n = 0;
  for_each_channel(*this, [&](const Channel& c) { n += c.pinned_bytes(); });
  return n;
}

// Each rank makes the elements that it owns and no others: the generator is keyed by parameter and position, so the
// weights do not depend on the number of ranks, and the full model never exists anywhere (PyTorch: meta-device init).
template <class T, class G>
void Fsdp<T, G>::init_weights() {
  Stream& s = dev_.compute();
  auto make = [&](const Param& p, const Masters& to, int64_t from, int64_t numel) {
    if (p.std == 0) ops::fill(s, to, p.mean, numel);
    else ops::init_normal(s, to, options_.seed, p.id, from, numel, p.mean, p.std);
  };
  std::vector<Buffer<float>> unsharded;
  if (options_.unsharded_init) {
    dev_.mem.begin("init");
    dev_.mem.phase("making the unsharded model's weights");
    for (const Unit& u : units_) {
      unsharded.push_back(dev_.mem.take<float>(u.padded, "unsharded weights", Purpose::master));
      for (const Param& p : u.params) make(p, unsharded.back() + p.offset, 0, p.numel);
    }
  }
  for (size_t i = 0; i < units_.size(); i++) {
    const Unit& u = units_[i];
    State& state = state_[i];
    void* const master = state.master.whole ? static_cast<void*>(state.master.whole) : state.master.halves.high;
    s.zero(master, u.shard * 4);  // the padding stays zero for ever: its gradient is zero
    for (const Param& p : u.params) {
      const Unit::Piece mine = u.piece(p, shard_rank(int(i)));
      const Masters to = state.master + mine.offset_in_shard;
      if (mine.numel == 0) continue;
      if (options_.unsharded_init) ops::copy_weights(s, to, unsharded[i] + p.offset + mine.first, mine.numel);
      else make(p, to, mine.first, mine.numel);
    }
    s.record(state.ready);
    if (!state.m) continue;
    s.zero(state.m, u.with_gradient.shard * size_of(options_.moment_dtype));
    s.zero(state.v, u.with_gradient.shard * size_of(options_.moment_dtype));
  }
  if (options_.unsharded_init) {
    unsharded.clear();
    dev_.mem.end();
  }
  s.zero(unit_sums_, int64_t(units_.size() * sizeof(double)));  // a validation sums them, too
  empty_slots();                                                // of what a dry run has left resident
}

template <class T, class G>
void Fsdp<T, G>::begin_step(const ops::AdamW* adamw, float clip) {
  dev_.compute().copy_by_kernel(adamw_, adamw, sizeof(ops::AdamW));
  dev_.compute().copy_by_kernel(&scalars_->steps, &adamw_->summand, 2 * sizeof(double));
  dev_.compute().zero(unit_sums_, int64_t(units_.size() * sizeof(double)));
  clip_ = clip;
  ASSERT(clip == 0 || !options_.update_in_backward);
}

// ------------------------------------------------------------------------------------------- gather, use, release

// A trace shows what slots hold; a master copy is no slot.
template <class T, class G>
void Fsdp<T, G>::tell(Stream& s, const Slot& slot, const std::string& unit, const char* how) {
  if (!slot.is_master) s.holds(slot.name, unit, how);
}

// The slot in which the unit is resident or on its way, or else one that it may be gathered into, or none.
template <class T, class G>
typename Fsdp<T, G>::Slot* Fsdp<T, G>::slot_of(int u) {
  Slot* free = nullptr;
  for (Slot& s : slots_) {
    if (s.unit == u || s.owner == u) return &s;
    if (s.owner < 0 && s.large == has_large_slot(u) && s.state != Slot::busy &&
        (!free || s.last_release < free->last_release))
      free = &s;
  }
  return free;
}

template <class T, class G>
typename Fsdp<T, G>::Slot& Fsdp<T, G>::used_slot(int u, const char* verb) {
  Slot* slot = slot_of(u);
  if (!slot || slot->unit != u || slot->state != Slot::busy)
    throw Error(strf("internal error: %s of unit '%s', which is not in use", verb, units_[size_t(u)].name.c_str()));
  return *slot;
}

template <class T, class G>
void Fsdp<T, G>::prefetch(int u) {
  Slot* slot = slot_of(u);
  if (!slot) return;
  if (slot->unit != u) begin_gather(u, slot);
  slot->state = Slot::busy;
}

template <class T, class G>
void Fsdp<T, G>::gather(int u) {
  Slot* slot = slot_of(u);
  if (!slot)
    throw Error(strf("internal error: no slot for unit '%s': release a unit first", units_[size_t(u)].name.c_str()));
  if (slot->unit != u) {
    // Were the gather stream allowed to run ahead to here, what was not prefetched would be hidden all the same, and
    // the options that turn prefetching off would measure nothing.
    dev_.compute().record(wanted_);
    gather_channel_.stream().wait(wanted_);
    begin_gather(u, slot);
  }
  slot->state = Slot::busy;
}

// On the gather stream, behind two events: AdamW is done with the master shard, and compute with the slot's last unit.
template <class T, class G>
void Fsdp<T, G>::begin_gather(int u, Slot* slot) {
  const Unit& unit = units_[size_t(u)];
  Stream& stream = gather_channel_.stream();
  gather_channel_.set_unit(unit.name);
  stream.wait(state_[size_t(u)].ready);
  meet_owners(u);
  stream.wait(slot->released);
  tell(stream, *slot, unit.name);
  if (!slot->is_master) gather_into(u, slot);
  stream.record(slot->gathered);
  slot->unit = u;
}

// What peers have changed may be copied when all are done with it. Units that are wanted while AdamW is still at
// others, as many as there are slots, are each met for; then it is over, and one meeting does for all.
template <class T, class G>
void Fsdp<T, G>::meet_owners(int u) {
  State& state = state_[size_t(u)];
  if (!fetches() || shards(u) == 1 || units_[size_t(u)].in_fp8 > 0 || state.all_ready) return;
  Stream& stream = gather_channel_.stream();
  state.all_ready = true;
  if (++met_alone_ > slots_.size())
    for (State& s : state_) stream.wait(s.ready), s.all_ready = true;
  const NamedWork named(dev_, stream, Span::gather, "barrier", units_[size_t(u)].name, 0);
  gather_channel_.barrier([&] { ops::meet_peers(stream, peers_, row_of_gathers); });
}

template <class T, class G>
void Fsdp<T, G>::gather_into(int u, Slot* slot) {
  const Unit& unit = units_[size_t(u)];
  const Masters& master = state_[size_t(u)].master;
  const bool sharded = !(shards(u) == 1 && slot->owner == u);
  Stream& stream = gather_channel_.stream();
  const int64_t bytes = slot_numel(u) * (slot->wide ? int64_t(sizeof(float)) : int64_t(sizeof(T)));
  const NamedWork named(dev_, stream, Span::gather, sharded ? "all_gather" : "cast", unit.name, bytes);
  auto unshard = [&](auto* to) {
    using E = std::remove_pointer_t<decltype(to)>;
    // The all_gather takes my shard from where it lies, or it is cast straight to where it is wanted.
    const E* mine = nullptr;
    if constexpr (std::is_same_v<E, float>) mine = master.whole;
    if constexpr (std::is_same_v<E, bf16>) mine = master.halves.high;
    for (const FlatParam& f : {unit.with_gradient, unit.without_gradient})
      if (f.numel > 0 && !mine)
        ops::cast_weights(stream, to + f.offset_in_unit + shard_rank(u) * f.shard, master.whole + f.offset_in_shard,
                          f.shard);
    for (const FlatParam& f : {unit.with_gradient, unit.without_gradient}) {
      if (f.numel == 0 || !sharded) continue;
      E* const part = to + f.offset_in_unit;
      const E* from = mine ? mine + f.offset_in_shard : nullptr;
      if (fetches() && from) gather_channel_.all_gather(part, f.shard, dtype_of<E>, from, peers_);
      else gather_channel_.all_gather(part, f.shard, dtype_of<E>, from);
      issued_.note(Issued::all_gather, u, f.padded * int64_t(sizeof(E)), dtype_of<E>, shards(u));
    }
    if (!sharded) issued_.note(Issued::cast, u);
  };
  if (unit.in_fp8 > 0) {
    ASSERT(!slot->wide);
    fp8_.gather(u, {shard_rank(u), shards(u), master.whole, sharded}, slot->p, gather_channel_, &issued_);
  } else if (slot->wide) {
    unshard(slot->wide);
    ops::cast_weights(stream, slot->p, slot->wide, unit.padded);
  } else {
    unshard(slot->p);
  }
}

template <class T, class G>
const T* Fsdp<T, G>::use(int u) {
  gather(u);
  Slot& slot = used_slot(u, "use");
  exposed_.wait(ExposedTime::gathers, slot.gathered);
  tell(dev_.compute(), slot, units_[size_t(u)].name);
  issued_.note(Issued::use, u);
  if (units_[size_t(u)].in_fp8 == 0) return slot.p;
  const Fp8Layout layout = fp8_layout(units_[size_t(u)], shards(u), sizeof(T));
  return reinterpret_cast<const T*>(codes(u) + layout.rest) + layout.first;
}
template <class T, class G>
const uint8_t* Fsdp<T, G>::codes(int u) {
  return reinterpret_cast<const uint8_t*>(used_slot(u, "codes").p);
}

// Behind this event, and no sooner, another unit may be gathered into the slot. It is the one that is easy to forget:
// without it all is well until the network is faster than the kernels.
template <class T, class G>
void Fsdp<T, G>::release(int u) {
  Slot& slot = used_slot(u, "release");
  dev_.compute().record(slot.released);
  tell(dev_.compute(), slot, units_[size_t(u)].name, ", resident");
  slot.state = Slot::resident;
  slot.last_release = ++releases_;
  issued_.note(Issued::release, u);
}

template <class T, class G>
void Fsdp<T, G>::reshard(int u) {
  Slot& slot = used_slot(u, "reshard");
  release(u);
  if (!options_.reshard_after_forward || units_[size_t(u)].replicated) return;
  tell(dev_.compute(), slot, "");
  slot.state = Slot::empty, slot.unit = -1;
}

template <class T, class G>
void Fsdp<T, G>::empty_slots() {
  for (Slot& slot : slots_) {
    ASSERT(slot.state != Slot::busy);
    tell(dev_.compute(), slot, "");
    slot.state = Slot::empty, slot.unit = -1;
  }
  for (State& state : state_) state.all_ready = false;
  met_alone_ = 0;
  fp8_.forget();
}

template <class T, class G>
void Fsdp<T, G>::end_steps_with_gathers(const std::vector<int>& units) {
  next_gathers_.clear();
  for (int u : units) {
    const auto taken = [&](const Slot& s) {
      return std::any_of(next_gathers_.begin(), next_gathers_.end(), [&](auto& next) { return next.second == &s; });
    };
    const auto slot = std::find_if(slots_.begin(), slots_.end(), [&](const Slot& s) {
      return s.owner == u || (s.owner < 0 && s.large == has_large_slot(u) && !taken(s));
    });
    if (slot != slots_.end()) next_gathers_.emplace_back(u, &*slot);
  }
  order_updates();
}

// First what is used first: what is replicated, then what a step ends with gathering. The rest goes by size beside such
// gathers, the largest first: their first copy waits until all blocks of the kernel that runs have begun.
template <class T, class G>
void Fsdp<T, G>::order_updates() {
  auto key = [&](int u) {
    const Unit& unit = units_[size_t(u)];
    const auto next = std::find_if(next_gathers_.begin(), next_gathers_.end(), [u](auto& g) { return g.first == u; });
    const int64_t size = next_gathers_.empty() || next != next_gathers_.end() ? 0 : unit.shard;
    return std::tuple(!unit.replicated, next - next_gathers_.begin(), -size, u);
  };
  update_order_.resize(units_.size());
  std::iota(update_order_.begin(), update_order_.end(), 0);
  std::sort(update_order_.begin(), update_order_.end(), [&](int a, int b) { return key(a) < key(b); });
}

template <class T, class G>
void Fsdp<T, G>::gather_next() {
  for (auto [u, slot] : next_gathers_) {
    begin_gather(u, slot);
    slot->state = Slot::resident;
  }
}

template <class T, class G>
void Fsdp<T, G>::before_graph() {
  bool there = true;
  for (auto [u, slot] : next_gathers_) there = there && slot->unit == u && slot->state == Slot::resident;
  if (!there) {
    empty_slots();
    gather_next();
  }
  // Whatever ran since, a graph meets for all other units.
  for (State& state : state_) state.all_ready = false;
  for (auto [u, slot] : next_gathers_) state_[size_t(u)].all_ready = true, dev_.compute().wait(slot->gathered);
  met_alone_ = slots_.size();
}

// -------------------------------------------------------------------------------------------------------- the step

template <class T, class G>
template <class E>
void Fsdp<T, G>::update(Stream& s, int u, const E* gradient, float clip, ops::Series* series) {
  if (held_) s.wait(*held_);
  State& state = state_[size_t(u)];
  const Unit& unit = units_[size_t(u)];
  const double* norm2 = options_.update_in_backward ? nullptr : &scalars_->norm2;  // not known before the step's end
  for (const auto& range : state.trained) {
    const int64_t from = range.first, n = range.second - from, at = shard_rank(u) * unit.with_gradient.shard + from;
    const int64_t decayed = std::min(std::max<int64_t>(unit.decayed - at, 0), n);
    auto step = [&](auto* m, auto* v) {
      ops::adamw(s, state.master + from, m + from, v + from, gradient + from, norm2, clip, adamw_, n, decayed,
                 options_.seed, uint32_t(u), at, *series);
      *series = ops::Series::goes_on;
    };
    if (options_.moment_dtype == Dtype::bf16) step(static_cast<bf16*>(state.m), static_cast<bf16*>(state.v));
    else step(static_cast<float*>(state.m), static_cast<float*>(state.v));
  }
  s.record(state.ready);
}

template <class T, class G>
void Fsdp<T, G>::end_step() {
  Stream& s = dev_.compute();
  begin_scalars();
  // The oldest reduction first: buffers are given back in one order, however many micro-batches the slots have turned
  // in.
  for (size_t i = 0; i < gradient_slots_.size(); i++)
    await_reduction(gradient_slots_[i < rotating_ ? (next_gradient_slot_ + i) % rotating_ : i]);
  received_.reset();
  reduced_ = 0;
  next_gradient_slot_ = 0;  // every step takes and gives its buffers in the planned order
  if (!options_.update_in_backward)
    for (size_t i = 0; i < units_.size(); i++)
      ASSERT(!units_[i].trained() || state_[i].gradient.get() || state_[i].bf16_gradient.get());
  exposed_.wait(ExposedTime::reductions, scalars_summed_);
  exposed_.end();
  // AdamW records when a unit can be gathered again. For a frozen unit somebody else must: where this step is a graph,
  // the gathers behind it have no other event of it to wait for.
  for (size_t i = 0; i < units_.size(); i++)
    if (!units_[i].trained()) s.record(state_[i].ready);
  // The gathers of this step are over, because the compute stream has waited for each of them. Those of the next begin
  // while AdamW is still at other units, so that the first ones hide behind it.
  ops::Series series = ops::Series::begins;
  for (size_t at = 0; at < units_.size() && !options_.update_in_backward; at++) {
    const int i = update_order_[at];
    if (!units_[size_t(i)].trained()) continue;
    s.sleep(optimizer_delay_ms_ / double(units_.size()));
    State& state = state_[size_t(i)];
    if (state.bf16_gradient.get()) update<bf16>(s, i, state.bf16_gradient, clip_, &series);
    else update<float>(s, i, state.gradient, clip_, &series);
  }
  for (State& state : state_) state.gradient.reset(), state.bf16_gradient.reset();
  if (!options_.update_in_backward) issued_.note(Issued::optimizer, -1);
  held_ = nullptr;
  empty_slots();
  gather_next();
}

template <class T, class G>
void Fsdp<T, G>::set_delays(double gather_ms, double reduce_ms, double optimizer_ms) {
  for_each_channel(*this, [&](Channel& c) { c.delay_ms = &c == &gather_channel_ ? gather_ms : reduce_ms; });
  optimizer_delay_ms_ = optimizer_ms;
}

// fsdp/reduce.cu has what is summed over ranks, and calls this.
template void Fsdp<float, float>::update(Stream&, int, const float*, float, ops::Series*);
template void Fsdp<bf16, bf16>::update(Stream&, int, const float*, float, ops::Series*);
template void Fsdp<bf16, float>::update(Stream&, int, const float*, float, ops::Series*);
template void Fsdp<double, double>::update(Stream&, int, const float*, float, ops::Series*);

template class Fsdp<float, float>;
template class Fsdp<bf16, bf16>;
template class Fsdp<bf16, float>;
template class Fsdp<double, double>;
