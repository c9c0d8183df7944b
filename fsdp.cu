#include "fsdp.h"

#include <algorithm>

bool Unit::trained() const {
  return std::any_of(params.begin(), params.end(), [](const Param& p) { return !p.frozen; });
}

void lay_out(std::vector<Unit>* units, int shards) {
  for (Unit& u : *units) {
    for (size_t i = 0, end; i < u.params.size(); i = end) {
      bool any = !u.params[i].frozen;
      for (end = i + 1; end < u.params.size() && u.params[end].joined; end++) any = any || !u.params[end].frozen;
      for (; i < end; i++) u.params[i].reduced = any;
    }
    auto place = [](const Param& p) { return !p.reduced ? 2 : p.decay ? 0 : 1; };
    std::stable_sort(u.params.begin(), u.params.end(),
                     [&](const Param& a, const Param& b) { return place(a) < place(b); });
    u.numel = u.decayed = u.padded = u.shard = 0;
    auto cut = [&](FlatParam* f, bool reduced) {
      *f = {u.padded, u.shard, 0, 0, 0};
      for (Param& p : u.params) {
        if (p.reduced != reduced) continue;
        ASSERT(p.numel > 0 && p.numel % 8 == 0);
        p.offset = f->at + f->numel;
        f->numel += p.numel;
        if (reduced && p.decay) u.decayed += p.numel;
      }
      const int parts = u.replicated ? 1 : shards;
      f->shard = (f->numel + shard_align * parts - 1) / (shard_align * parts) * shard_align;
      f->padded = f->shard * parts;
      u.numel += f->numel, u.padded += f->padded, u.shard += f->shard;
    };
    cut(&u.reduced, true), cut(&u.fixed, false);
  }
}

Unit::Piece Unit::piece(const Param& p, int rank) const {
  const FlatParam& f = p.reduced ? reduced : fixed;
  const int64_t from = f.at + rank * f.shard, a = std::max(from, p.offset),
                b = std::min(from + f.shard, p.offset + p.numel);
  return a < b ? Piece{b - a, a - p.offset, f.part + a - from} : Piece{0, 0, 0};
}

const char* name_of(Issued::Kind kind) {
  static const char* names[] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast",           "optimizer",
                                "use",        "release",        "cast",       "recompute attention", "recompute MLP"};
  return names[kind];
}

const char* stream_of(const Issued& i) {
  static const char* streams[] = {"gather",  "reduce",  "reduce", "reduce",  "compute",
                                  "compute", "compute", "gather", "compute", "compute"};
  return i.kind == Issued::optimizer && i.unit >= 0 ? "reduce" : streams[i.kind];
}

namespace {
template <class F>
int64_t largest(const std::vector<Unit>& units, F f) {
  int64_t most = 0;
  for (const Unit& u : units) most = std::max<int64_t>(most, f(u));
  return most;
}
int64_t gathered(const Unit& u) { return std::max(u.reduced.padded, u.fixed.padded); }
// Bytes of the largest reduction among `ranks`; at least a multiple of what an all_reduce's pieces are rounded to.
int64_t largest_reduction(const std::vector<Unit>& units, int64_t FlatParam::*numel, Dtype dtype, int ranks) {
  return std::max<int64_t>(largest(units, [&](const Unit& u) { return u.reduced.*numel; }) * size_of(dtype),
                           ranks * 512);
}
}  // namespace

template <class T, class G>
Fsdp<T, G>::Fsdp(Device& dev, const World& world, Transport transport, std::vector<Unit> units,
                 const FsdpOptions& options, bool open)
    : dev_(dev),
      shard_world_(shard_group(world, options.shards(world.size))),
      replica_world_(replica_group(world, options.shards(world.size))),
      options_(options),
      units_(std::move(units)),
      gather_channel_(
          dev, dev.gather(), shard_world_, options.gather_over_mpi ? Transport::mpi : transport, "gather",
          dev.backend == Backend::gpu ? largest(units_, gathered) * (options.gather_wide ? 4 : int64_t(sizeof(T))) : 0,
          open ? Links::open : Links::planned, options.gather_by_copy_engine ? Via::copy_engines : Via::kernels),
      reduce_channel_(dev, dev.reduce(), shard_world_, transport, "reduce",
                      largest_reduction(units_, &FlatParam::padded, options.reduce_dtype, shard_world_.size),
                      open ? Links::open : Links::planned),
      replica_channel_(dev, dev.reduce(), replica_world_, transport, "replicas",
                       largest_reduction(units_, &FlatParam::shard, options.reduce_dtype, replica_world_.size),
                       open ? Links::open : Links::planned),
      scalars_ready_(dev),
      scalars_summed_(dev),
      late_(dev) {
  Memory& mem = dev.mem;
  const bool narrow_moments = options.moment_dtype == Dtype::bf16;
  for (size_t i = 0; i < units_.size(); i++) {
    const Unit& u = units_[i];
    State s(dev);
    s.master = mem.keep<float>(u.shard, u.name + " master", Purpose::master);
    auto moment = [&](const char* name) -> void* {
      if (!u.trained()) return nullptr;
      if (narrow_moments) return mem.keep<bf16>(u.reduced.shard, u.name + name, Purpose::moments);
      return mem.keep<float>(u.reduced.shard, u.name + name, Purpose::moments);
    };
    s.m = moment(" first moment"), s.v = moment(" second moment");
    // Neighbours that are trained make one range.
    for (const Param& p : u.params) {
      const Unit::Piece mine = u.piece(p, shard_rank(int(i)));
      if (mine.numel == 0 || p.frozen) continue;
      if (s.trained.empty() || s.trained.back().second < mine.at) s.trained.emplace_back(mine.at, mine.at);
      s.trained.back().second = mine.at + mine.numel;
    }
    state_.push_back(std::move(s));
  }

  // A slot of its own for each unit that stays where it is once gathered; the others share as many as there are to be.
  auto add_slot = [&](int owner, int64_t numel, const std::string& name) {
    const bool is_master = std::is_same_v<T, float> && owner >= 0 && shards(owner) == 1;
    const Purpose p = Purpose::gather_slots;
    T* to = is_master ? reinterpret_cast<T*>(state_[size_t(owner)].master) : mem.keep<T>(numel, name, p);
    const bool gathered = owner < 0 || shards(owner) > 1;
    float* wide = options.gather_wide && gathered ? mem.keep<float>(numel, name + ", fp32", p) : nullptr;
    slots_.emplace_back(dev, to, wide);
    slots_.back().owner = owner;
  };
  const bool own = !options.reshard_after_forward || options.gather_slots == 0;
  for (size_t i = 0; i < units_.size(); i++)
    if (own || units_[i].replicated) add_slot(int(i), units_[i].padded, units_[i].name + " gathered");
  int64_t most = 0, most_trained = 0, most_shard = 0;
  int sharded = 0;
  for (const Unit& u : units_) {
    if (u.replicated) continue;
    sharded++;
    most = std::max(most, u.padded);
    most_trained = std::max(most_trained, u.reduced.padded), most_shard = std::max(most_shard, u.reduced.shard);
  }
  for (int i = 0; !own && i < std::min(options.gather_slots, sharded); i++)
    add_slot(-1, most, strf("gather slot %d", i));

  const bool narrow = options.reduce_dtype != dtype_of<G>;
  ASSERT(!narrow || (options.reduce_dtype == Dtype::bf16 && dtype_of<G> == Dtype::f32));
  auto add_gradient_slot = [&](int owner, int64_t numel, int64_t shard, const std::string& name) {
    const Purpose p = Purpose::gradient_slots;
    G* to = mem.keep<G>(numel, name, p);
    gradient_slots_.emplace_back(dev, to, narrow ? mem.keep<bf16>(numel, name + ", narrow", p) : nullptr);
    gradient_slots_.back().owner = owner;
    if (options.update_in_backward) gradient_slots_.back().mine = mem.keep<float>(shard, name + ", my part", p);
  };
  for (int i = 0; most_trained > 0 && i < std::min(options.gradient_slots, sharded); i++)
    add_gradient_slot(-1, most_trained, most_shard, strf("gradient slot %d", i));
  rotating_ = gradient_slots_.size();
  for (size_t i = 0; i < units_.size(); i++)
    if (units_[i].replicated && units_[i].trained())
      add_gradient_slot(int(i), units_[i].reduced.padded, units_[i].reduced.shard, units_[i].name + " gradient");

  scalars_ = mem.keep<double>(n_scalars, "scalars", Purpose::workspace);
  partials_ = mem.keep<double>(ops::sum_partials(), "partial sums", Purpose::workspace);
  adamw_ = mem.keep<ops::AdamW>(1, "learning rate and its kind", Purpose::workspace);
}

template <class T, class G>
int64_t Fsdp<T, G>::parameters() const {
  int64_t n = 0;
  for (const Unit& u : units_) n += u.numel;
  return n;
}

template <class T, class G>
void Fsdp<T, G>::init_weights() {
  Stream& s = dev_.compute();
  auto make = [&](const Param& p, float* to, int64_t from, int64_t numel) {
    if (p.std == 0) ops::fill(s, to, p.mean, numel);
    else ops::init_normal(s, to, options_.seed, p.id, from, numel, p.mean, p.std);
  };
  std::vector<Buffer<float>> whole;
  if (options_.whole_init) {
    dev_.mem.begin("init");
    dev_.mem.phase("making the whole model's weights");
    for (const Unit& u : units_) {
      whole.push_back(dev_.mem.take<float>(u.padded, "whole weights", Purpose::master));
      for (const Param& p : u.params) make(p, whole.back() + p.offset, 0, p.numel);
    }
  }
  for (size_t i = 0; i < units_.size(); i++) {
    const Unit& u = units_[i];
    State& state = state_[i];
    s.zero(state.master, u.shard * 4);  // the padding stays zero for ever: its gradient is zero
    for (const Param& p : u.params) {
      const Unit::Piece mine = u.piece(p, shard_rank(int(i)));
      if (mine.numel == 0) continue;
      if (options_.whole_init) s.copy(state.master + mine.at, whole[i] + p.offset + mine.first, mine.numel * 4);
      else make(p, state.master + mine.at, mine.first, mine.numel);
    }
    s.record(state.ready);
    if (!state.m) continue;
    s.zero(state.m, u.reduced.shard * size_of(options_.moment_dtype));
    s.zero(state.v, u.reduced.shard * size_of(options_.moment_dtype));
  }
  if (options_.whole_init) {
    whole.clear();
    dev_.mem.end();
  }
  empty_slots();  // of what a dry run has left there
}

template <class T, class G>
void Fsdp<T, G>::begin_step(const ops::AdamW* adamw, float clip) {
  dev_.compute().copy(adamw_, adamw, sizeof(ops::AdamW));
  dev_.compute().copy(scalars_ + 2, &adamw_->summand, sizeof(double));
  clip_ = clip;
  norm_begun_ = false;
  ASSERT(clip == 0 || !options_.update_in_backward);
}

// The slot that holds the unit, or else one that it may be gathered into, or none.
template <class T, class G>
typename Fsdp<T, G>::Slot* Fsdp<T, G>::slot_of(int u) {
  Slot* free = nullptr;
  for (Slot& s : slots_) {
    if (s.unit == u || s.owner == u) return &s;
    if (s.owner < 0 && !s.in_use && (!free || s.last_release < free->last_release)) free = &s;
  }
  return free;
}

template <class T, class G>
void Fsdp<T, G>::gather(int u, bool late) {
  Slot* slot = slot_of(u);
  if (!slot) return;
  slot->in_use = true;
  if (slot->unit == u) return;  // still there, or already on its way
  slot->unit = u;
  const Unit& unit = units_[size_t(u)];
  Stream& stream = gather_channel_.stream();
  if (late) {
    dev_.compute().record(late_);
    stream.wait(late_);
  }
  stream.wait(state_[size_t(u)].ready);
  stream.wait(slot->released);
  const float* master = state_[size_t(u)].master;
  const bool sharded = !(shards(u) == 1 && slot->owner == u);
  auto bring = [&](auto* to) {
    using E = std::remove_pointer_t<decltype(to)>;
    for (const FlatParam& f : {unit.reduced, unit.fixed})
      if (f.numel > 0 && static_cast<const void*>(to) != master)
        ops::cast(stream, to + f.at + shard_rank(u) * f.shard, master + f.part, f.shard);
    for (const FlatParam& f : {unit.reduced, unit.fixed}) {
      if (f.numel == 0 || !sharded) continue;
      gather_channel_.all_gather(to + f.at, f.shard, dtype_of<E>);
      note(Issued::all_gather, u, f.padded * int64_t(sizeof(E)), dtype_of<E>, shards(u));
    }
    if (!sharded) note(Issued::cast, u);
  };
  if (slot->wide && sharded) {
    bring(slot->wide);
    ops::cast(stream, slot->p, slot->wide, unit.padded);
  } else {
    bring(slot->p);
  }
  stream.record(slot->gathered);
}

template <class T, class G>
const T* Fsdp<T, G>::use(int u) {
  Slot* slot = slot_of(u);
  if (!slot)
    throw Error(strf("internal error: no slot for unit '%s': release a unit first", units_[size_t(u)].name.c_str()));
  gather(u, true);
  timed_wait(0, slot->gathered);
  note(Issued::use, u);
  return slot->p;
}

template <class T, class G>
void Fsdp<T, G>::release(int u, bool forget) {
  Slot* slot = slot_of(u);
  ASSERT(slot && slot->unit == u && slot->in_use);
  dev_.compute().record(slot->released);
  slot->in_use = false;
  slot->last_release = ++releases_;
  if (forget && options_.reshard_after_forward && !units_[size_t(u)].replicated) slot->unit = -1;
  note(Issued::release, u);
}

template <class T, class G>
typename Fsdp<T, G>::GradientSlot& Fsdp<T, G>::gradient_slot_of(int u) {
  for (size_t i = rotating_; i < gradient_slots_.size(); i++)
    if (gradient_slots_[i].owner == u) return gradient_slots_[i];
  return gradient_slots_[next_gradient_slot_];
}

template <class T, class G>
void Fsdp<T, G>::await(GradientSlot& s) {
  timed_wait(1, s.reduced);
  for (Buffer<float>& b : s.done) b.reset();
}

template <class T, class G>
G* Fsdp<T, G>::gradient(int u) {
  GradientSlot& s = gradient_slot_of(u);
  ASSERT(s.unit == -1);
  const Unit& unit = units_[size_t(u)];
  await(s);
  // What nobody writes: the padding; of a unit that is reduced in two goes, what the other go writes.
  const int64_t from = unit.reductions > 1 ? 0 : unit.reduced.numel;
  dev_.compute().zero(s.p + from, (unit.reduced.padded - from) * int64_t(sizeof(G)));
  s.unit = u;
  return s.p;
}

template <class T, class G>
void Fsdp<T, G>::reduce(int u) {
  GradientSlot& s = gradient_slot_of(u);
  ASSERT(s.unit == u);
  const Unit& unit = units_[size_t(u)];
  const FlatParam& flat = unit.reduced;
  State& state = state_[size_t(u)];
  const bool last_here = ++state.reductions == unit.reductions, complete = last_here && last_micro_batch_;
  if (last_here) state.reductions = 0;
  const bool later = options_.reduce_last && !complete, update = options_.update_in_backward && complete;
  const bool first_whole = later && !state.whole.get(), first_shard = !later && !state.gradient.get();
  if (first_whole) state.whole = dev_.mem.take<float>(flat.padded, "whole gradient", Purpose::gradients);
  if (first_shard && !update) state.gradient = dev_.mem.take<float>(flat.shard, "gradient shard", Purpose::gradients);
  float* shard = state.gradient.get() ? state.gradient.get() : s.mine;

  for (const Param& p : unit.params)
    if (p.frozen && p.reduced) dev_.compute().zero(s.p + p.offset, p.numel * int64_t(sizeof(G)));
  dev_.compute().record(s.ready);
  Stream& stream = reduce_channel_.stream();
  stream.wait(s.ready);
  auto sum = [&](auto* p, Dtype dtype) {
    auto* mine = p + shard_rank(u) * flat.shard;
    if (unit.replicated) reduce_channel_.all_reduce(p, flat.shard, dtype);
    else reduce_channel_.reduce_scatter(p, flat.shard, dtype);
    replica_channel_.all_reduce(mine, flat.shard, dtype);
    // Each rank of a group has summed with its own peers, whose ring may have another order: one of them is right.
    const bool several = unit.replicated && shard_world_.size > 1 && replica_world_.size > 1;
    if (several) reduce_channel_.broadcast(mine, flat.shard * size_of(dtype), 0);
    ops::accumulate_gradient(stream, shard, mine, flat.shard, !first_shard);
    if (shard_world_.size > 1 || replica_world_.size == 1)
      note(unit.replicated ? Issued::all_reduce : Issued::reduce_scatter, u, flat.padded * size_of(dtype), dtype,
           shard_world_.size);
    if (replica_world_.size > 1) note(Issued::all_reduce, u, flat.shard * size_of(dtype), dtype, replica_world_.size);
    if (several) note(Issued::broadcast, u, flat.shard * size_of(dtype), dtype, shard_world_.size);
  };
  if (state.whole.get()) ops::accumulate_gradient(stream, state.whole.get(), s.p, flat.padded, !first_whole);
  if (!later) {
    if (state.whole.get() && !s.narrow)
      ops::cast(stream, s.p, static_cast<const float*>(state.whole.get()), flat.padded);
    if (!s.narrow) sum(s.p, dtype_of<G>);
    if constexpr (std::is_same_v<G, float>) {
      if (s.narrow) {
        const float* from = state.whole.get() ? state.whole.get() : s.p;
        ops::cast(stream, s.narrow, from, flat.padded);
        sum(s.narrow, Dtype::bf16);
      }
    }
  }
  if (update) {
    add_to_norm(stream, u, shard);
    this->update(stream, u, shard, 0);
    note(Issued::optimizer, u);
  }
  stream.record(s.reduced);
  if (!later) s.done[0] = std::move(state.whole);
  if (update) s.done[1] = std::move(state.gradient);
  s.unit = -1;
  if (s.owner < 0) next_gradient_slot_ = (next_gradient_slot_ + 1) % rotating_;
}

template <class T, class G>
void Fsdp<T, G>::add_to_norm(Stream& s, int u, const float* gradient) {
  const Unit& unit = units_[size_t(u)];
  if (unit.replicated && shard_world_.rank > 0) return;  // counted once
  ops::sum_powers(s, options_.norm, scalars_, gradient, partials_, unit.reduced.shard, norm_begun_);
  norm_begun_ = true;
}

template <class T, class G>
void Fsdp<T, G>::update(Stream& s, int u, const float* gradient, float clip) {
  State& state = state_[size_t(u)];
  const Unit& unit = units_[size_t(u)];
  for (const auto& range : state.trained) {
    const int64_t from = range.first, n = range.second - from, at = shard_rank(u) * unit.reduced.shard + from;
    const int64_t decayed = std::min(std::max<int64_t>(unit.decayed - at, 0), n);
    auto step = [&](auto* m, auto* v) {
      ops::adamw(s, state.master + from, m + from, v + from, gradient + from, scalars_, clip, adamw_, n, decayed,
                 options_.seed, uint32_t(u), at);
    };
    if (options_.moment_dtype == Dtype::bf16) step(static_cast<bf16*>(state.m), static_cast<bf16*>(state.v));
    else step(static_cast<float*>(state.m), static_cast<float*>(state.v));
  }
  s.record(state.ready);
}

// Replicas may sum their shards' norms in another order: all take the first one's, so that they clip, and stay, alike.
template <class T, class G>
void Fsdp<T, G>::all_reduce_norm(Stream& s) {
  auto sum = [&](Channel& channel, const World& among, double* x, int64_t n, auto... how) {
    channel.all_reduce(x, n, Dtype::f64, how...);
    note(Issued::all_reduce, -1, n * 8, Dtype::f64, among.size);
  };
  const bool both = options_.norm != ops::GradNorm::inf, groups = replica_world_.size > 1;
  if (shard_world_.size > 1 || !groups) {
    if (!both) sum(reduce_channel_, shard_world_, scalars_, 1, Channel::max);
    sum(reduce_channel_, shard_world_, scalars_ + !both, n_scalars - !both);
  }
  if (groups) {
    if (replica_world_.rank > 0) s.zero(scalars_, 8);
    sum(replica_channel_, replica_world_, scalars_, n_scalars);
  }
  ops::squared_norm(s, options_.norm, scalars_);
}

template <class T, class G>
void Fsdp<T, G>::sum_scalars() {
  Stream& compute = dev_.compute();
  Stream& stream = reduce_channel_.stream();
  compute.record(scalars_ready_);
  stream.wait(scalars_ready_);
  all_reduce_norm(stream);
  stream.record(scalars_summed_);
  timed_wait(1, scalars_summed_);
}

template <class T, class G>
void Fsdp<T, G>::end_step() {
  Stream& s = dev_.compute();
  for (GradientSlot& g : gradient_slots_) await(g);
  next_gradient_slot_ = 0;  // every step takes and gives its buffers in the planned order
  if (!options_.update_in_backward)
    for (size_t i = 0; i < units_.size(); i++) {
      if (!units_[i].trained()) continue;
      ASSERT(state_[i].gradient.get() != nullptr);
      add_to_norm(s, int(i), state_[i].gradient.get());
    }
  if (!norm_begun_) s.zero(scalars_, 8);
  sum_scalars();
  timing_ = false;
  // The optimizer says of what it changes when it can be gathered. Of what is frozen, too, something must: where this
  // step is a graph, what is gathered behind it has no other event of it to wait for.
  for (size_t i = 0; i < units_.size(); i++)
    if (!units_[i].trained()) s.record(state_[i].ready);
  // The gathers of this step are over, because the compute stream has waited for each of them. Those of the next begin
  // while AdamW is still at other units: the first ones hide behind it. What is not cut is wanted first.
  for (bool replicated : {true, false})
    for (size_t i = 0; i < units_.size() && !options_.update_in_backward; i++) {
      if (!units_[i].trained() || units_[i].replicated != replicated) continue;
      s.sleep(optimizer_delay_ms_ / double(units_.size()));
      update(s, int(i), state_[i].gradient.get(), clip_);
      state_[i].gradient.reset();
    }
  if (!options_.update_in_backward) note(Issued::optimizer, -1);
  empty_slots();
}

template <class T, class G>
void Fsdp<T, G>::empty_slots() {
  for (Slot& slot : slots_) {
    ASSERT(!slot.in_use);
    slot.unit = -1;
  }
}

template <class T, class G>
void Fsdp<T, G>::note(Issued::Kind kind, int unit, int64_t bytes, Dtype dtype, int ranks) {
  if (tracing_) trace_.push_back({kind, unit, bytes, dtype, ranks});
}

template <class T, class G>
void Fsdp<T, G>::timed_wait(int kind, const Event& e) {
  Stream& s = dev_.compute();
  if (!timing_ || s.off()) {
    s.wait(e);
    return;
  }
  Waits& w = waits_[timed_step_][kind];
  size_t i = w.used++;
  if (i == w.events.size()) w.events.emplace_back(Event(dev_, Event::timed), Event(dev_, Event::timed));
  s.record(w.events[i].first);
  s.wait(e);
  s.record(w.events[i].second);
}

template <class T, class G>
void Fsdp<T, G>::exposed_ms(bool latest, double* gathers, double* reductions) {
  double sum[2] = {0, 0};
  for (int kind = 0; kind < 2; kind++) {
    Waits& w = waits_[latest ? timed_step_ : timed_step_ ^ 1][kind];
    for (size_t i = 0; i < w.used; i++) sum[kind] += elapsed_ms(w.events[i].first, w.events[i].second);
  }
  *gathers = sum[0], *reductions = sum[1];
}

template <class T, class G>
void Fsdp<T, G>::set_delays(double gather_ms, double reduce_ms, double optimizer_ms) {
  gather_channel_.delay_ms = gather_ms;
  reduce_channel_.delay_ms = replica_channel_.delay_ms = reduce_ms;
  optimizer_delay_ms_ = optimizer_ms;
}

template class Fsdp<float, float>;
template class Fsdp<bf16, bf16>;
template class Fsdp<bf16, float>;
template class Fsdp<double, double>;
