#include "fsdp.h"

#include <algorithm>

void lay_out(std::vector<Unit>* units, int world_size) {
  for (Unit& u : *units) {
    u.numel = u.decayed = 0;
    bool vectors = false;
    for (Param& p : u.params) {
      p.numel = 1;
      for (int64_t n : p.shape) p.numel *= n;
      ASSERT(p.numel % 8 == 0);
      ASSERT(!(p.decay && vectors));  // decayed elements are a prefix
      vectors = vectors || !p.decay;
      p.offset = u.numel;
      u.numel += p.numel;
      if (p.decay) u.decayed += p.numel;
    }
    int64_t pieces = (u.numel + shard_align * world_size - 1) / (shard_align * world_size);
    u.shard = pieces * shard_align;
    u.padded = u.shard * world_size;
  }
}

const char* name_of(Issued::Kind kind) {
  static const char* names[] = {"all_gather", "reduce_scatter", "all_reduce", "optimizer", "use", "release"};
  return names[kind];
}

const char* stream_of(Issued::Kind kind) {
  static const char* streams[] = {"gather", "reduce", "reduce", "compute", "compute", "compute"};
  return streams[kind];
}

namespace {
int64_t largest(const std::vector<Unit>& units) {
  int64_t most = 0;
  for (const Unit& u : units) most = std::max(most, u.padded);
  return most;
}
}  // namespace

template <class T, class G>
Fsdp<T, G>::Fsdp(Device& dev, const World& world, Transport transport, std::vector<Unit> units,
                 const FsdpOptions& options, bool open)
    : dev_(dev),
      world_(world),
      options_(options),
      units_(std::move(units)),
      gather_channel_(dev, dev.gather(), world, transport, "gather",
                      dev.backend == Backend::gpu ? largest(units_) * int64_t(sizeof(T)) : 0, open),
      reduce_channel_(dev, dev.reduce(), world, transport, "reduce", largest(units_) * size_of(options.reduce_dtype),
                      open),
      weights_ready_(dev),
      scalars_ready_(dev),
      scalars_summed_(dev) {
  Memory& mem = dev.mem;
  for (const Unit& u : units_) {
    State s;
    s.master = mem.keep<float>(u.shard, u.name + " master", Purpose::master);
    s.m = mem.keep<float>(u.shard, u.name + " first moment", Purpose::moments);
    s.v = mem.keep<float>(u.shard, u.name + " second moment", Purpose::moments);
    state_.push_back(std::move(s));
  }
  for (int i = 0; i < options.gather_slots; i++)
    slots_.emplace_back(dev, mem.keep<T>(largest(units_), strf("gather slot %d", i), Purpose::gather_slots));
  bool narrow = options.reduce_dtype != dtype_of<G>;
  ASSERT(!narrow || (options.reduce_dtype == Dtype::bf16 && dtype_of<G> == Dtype::f32));
  for (int i = 0; i < options.gradient_slots; i++) {
    G* p = mem.keep<G>(largest(units_), strf("gradient slot %d", i), Purpose::gradient_slots);
    bf16* q = narrow ? mem.keep<bf16>(largest(units_), strf("gradient slot %d, narrow", i), Purpose::gradient_slots)
                     : nullptr;
    gradient_slots_.emplace_back(dev, p, q);
  }
  scalars_ = mem.keep<double>(n_scalars, "scalars", Purpose::workspace);
  partials_ = mem.keep<double>(ops::sum_partials(), "partial sums", Purpose::workspace);
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
  for (size_t i = 0; i < units_.size(); i++) {
    const Unit& u = units_[i];
    int64_t from = world_.rank * u.shard, to = from + u.shard;
    s.zero(state_[i].master, u.shard * 4);  // the padding stays zero for ever: its gradient is zero
    s.zero(state_[i].m, u.shard * 4);
    s.zero(state_[i].v, u.shard * 4);
    for (const Param& p : u.params) {
      int64_t a = std::max(from, p.offset), b = std::min(to, p.offset + p.numel);
      if (a >= b) continue;
      float* w = state_[i].master + (a - from);
      if (p.std == 0) ops::fill(s, w, p.mean, b - a);
      else ops::init_normal(s, w, options_.seed, p.id, a - p.offset, b - a, p.mean, p.std);
    }
  }
  s.record(weights_ready_);
}

template <class T, class G>
void Fsdp<T, G>::gather(int u) {
  Slot* free = nullptr;
  for (Slot& s : slots_) {
    if (s.unit == u) {
      s.in_use = true;  // still there, or already on its way
      return;
    }
    if (!s.in_use && (!free || s.last_release < free->last_release)) free = &s;
  }
  if (!free) return;
  const Unit& unit = units_[size_t(u)];
  Stream& stream = gather_channel_.stream();
  stream.wait(weights_ready_);
  stream.wait(free->released);
  ops::cast(stream, free->p + world_.rank * unit.shard, state_[size_t(u)].master, unit.shard);
  gather_channel_.all_gather(free->p, unit.shard, dtype_of<T>);
  stream.record(free->gathered);
  free->unit = u;
  free->in_use = true;
  note(Issued::all_gather, u, unit.padded * int64_t(sizeof(T)));
}

template <class T, class G>
const T* Fsdp<T, G>::use(int u) {
  gather(u);
  for (Slot& s : slots_)
    if (s.unit == u) {
      timed_wait(0, s.gathered);
      note(Issued::use, u, 0);
      return s.p;
    }
  throw Error(strf("internal error: no slot for unit '%s': release a unit first", units_[size_t(u)].name.c_str()));
}

template <class T, class G>
void Fsdp<T, G>::release(int u) {
  for (Slot& s : slots_)
    if (s.unit == u) {
      ASSERT(s.in_use);
      dev_.compute().record(s.released);
      s.in_use = false;
      s.last_release = ++releases_;
      note(Issued::release, u, 0);
      return;
    }
  ASSERT(!"a unit that was released is in a slot");
}

template <class T, class G>
G* Fsdp<T, G>::gradient(int u) {
  GradientSlot& s = gradient_slots_[next_gradient_slot_];
  ASSERT(s.unit == -1);
  const Unit& unit = units_[size_t(u)];
  timed_wait(1, s.reduced);
  dev_.compute().zero(s.p + unit.numel, (unit.padded - unit.numel) * int64_t(sizeof(G)));
  s.unit = u;
  return s.p;
}

template <class T, class G>
void Fsdp<T, G>::reduce(int u) {
  GradientSlot& s = gradient_slots_[next_gradient_slot_];
  ASSERT(s.unit == u);
  const Unit& unit = units_[size_t(u)];
  State& state = state_[size_t(u)];
  bool first = state.gradient.get() == nullptr;
  if (first) state.gradient = dev_.mem.take<float>(unit.shard, "gradient shard", Purpose::gradients);
  dev_.compute().record(s.ready);
  Stream& stream = reduce_channel_.stream();
  stream.wait(s.ready);
  auto sum = [&](auto* p, Dtype dtype) {
    reduce_channel_.reduce_scatter(p, unit.shard, dtype);
    ops::accumulate_gradient(stream, state.gradient.get(), p + world_.rank * unit.shard, unit.shard, !first);
  };
  if (!s.narrow) sum(s.p, dtype_of<G>);
  if constexpr (std::is_same_v<G, float>) {
    if (s.narrow) {
      ops::cast(stream, s.narrow, s.p, unit.padded);
      sum(s.narrow, Dtype::bf16);
    }
  }
  stream.record(s.reduced);
  note(Issued::reduce_scatter, u, unit.padded * size_of(options_.reduce_dtype));
  s.unit = -1;
  next_gradient_slot_ = (next_gradient_slot_ + 1) % gradient_slots_.size();
}

template <class T, class G>
void Fsdp<T, G>::sum_scalars() {
  Stream& compute = dev_.compute();
  Stream& stream = reduce_channel_.stream();
  compute.record(scalars_ready_);
  stream.wait(scalars_ready_);
  reduce_channel_.all_reduce(scalars_, n_scalars);
  stream.record(scalars_summed_);
  timed_wait(1, scalars_summed_);
  note(Issued::all_reduce, -1, n_scalars * 8);
}

template <class T, class G>
void Fsdp<T, G>::step(const ops::AdamW& adamw, float clip) {
  Stream& s = dev_.compute();
  // The last reductions end in issue order on their stream, so the last gradient slots' events cover all.
  for (GradientSlot& g : gradient_slots_) timed_wait(1, g.reduced);
  bool accumulate = false;
  for (size_t i = 0; i < units_.size(); i++) {
    ASSERT(state_[i].gradient.get() != nullptr);
    ops::sum_squares(s, scalars_, state_[i].gradient.get(), partials_, units_[i].shard, accumulate);
    accumulate = true;
  }
  sum_scalars();
  s.sleep(optimizer_delay_ms_);
  for (size_t i = 0; i < units_.size(); i++) {
    const Unit& u = units_[i];
    int64_t decayed = std::min(std::max<int64_t>(u.decayed - world_.rank * u.shard, 0), u.shard);
    // The gathers of the next step read the master copies behind weights_ready_; those of this step are over, because
    // the compute stream has waited for each of them.
    ops::adamw(s, state_[i].master, state_[i].m, state_[i].v, state_[i].gradient.get(), scalars_, clip, adamw, u.shard,
               decayed);
    state_[i].gradient.reset();
  }
  s.record(weights_ready_);
  for (Slot& slot : slots_) {
    ASSERT(!slot.in_use);
    slot.unit = -1;
  }
  note(Issued::optimizer, -1, 0);
}

template <class T, class G>
void Fsdp<T, G>::note(Issued::Kind kind, int unit, int64_t bytes) {
  if (tracing_) trace_.push_back({kind, unit, bytes});
}

template <class T, class G>
void Fsdp<T, G>::timed_wait(int kind, const Event& e) {
  Stream& s = dev_.compute();
  if (!options_.timing || s.off()) {
    s.wait(e);
    return;
  }
  Waits& w = waits_[timed_step_][kind];
  size_t i = w.used++;
  if (i == w.events.size()) w.events.emplace_back(Event(dev_, true), Event(dev_, true));
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
  reduce_channel_.delay_ms = reduce_ms;
  optimizer_delay_ms_ = optimizer_ms;
}

template class Fsdp<float, float>;
template class Fsdp<bf16, bf16>;
template class Fsdp<bf16, float>;
template class Fsdp<double, double>;
