// What Fsdp sums over ranks. The verbs gradient and reduce: a unit's gradient from the slot that a backward writes to
// the owners' shards of the sum over all ranks. And a step's scalars: the norm of all shards, and the loss.
#include "fsdp.h"

template <class T, class G>
typename Fsdp<T, G>::GradientSlot& Fsdp<T, G>::gradient_slot_of(int u) {
  const bool large = !units_[size_t(u)].replicated && units_[size_t(u)].with_gradient.padded > small_gradient_;
  for (size_t i = rotating_; i < gradient_slots_.size(); i++)
    if (GradientSlot& s = gradient_slots_[i]; s.owner == u || (s.large && large)) return s;
  return gradient_slots_[next_gradient_slot_];
}

template <class T, class G>
void Fsdp<T, G>::await_reduction(GradientSlot& s) {
  exposed_.wait(ExposedTime::reductions, s.reduction_done);
  for (Buffer<float>& b : s.read_by_reduction) b.reset();
  s.parts.reset();
}

template <class T, class G>
G* Fsdp<T, G>::gradient(int u) {
  GradientSlot& s = gradient_slot_of(u);
  const Unit& unit = units_[size_t(u)];
  if (s.unit != -1)
    throw Error(strf("internal error: gradient of unit '%s' before reduce of '%s'", unit.name.c_str(),
                     units_[size_t(s.unit)].name.c_str()));
  await_reduction(s);
  dev_.compute().holds(s.name, unit.name);
  // Of a unit that is reduced twice, what the other of its two modules writes.
  if (unit.reductions > 1) dev_.compute().zero(s.p, unit.with_gradient.padded * int64_t(sizeof(G)));
  s.unit = u;
  return s.p;
}

template <class T, class G>
typename Fsdp<T, G>::Reduction Fsdp<T, G>::next_reduction(int u) {
  State& state = state_[size_t(u)];
  const bool last_of_micro_batch = ++state.reductions == units_[size_t(u)].reductions;
  if (last_of_micro_batch) state.reductions = 0;
  const bool complete = last_of_micro_batch && last_micro_batch_;
  reduced_ += complete;
  if (complete) return options_.update_in_backward ? Reduction::update : Reduction::complete;
  return options_.reduce_last ? Reduction::accumulate : Reduction::shard;
}

// A replicated unit counts once.
template <class T, class G>
ops::PowerSum Fsdp<T, G>::share_of_norm(int u, Reduction how) {
  const bool elsewhere = units_[size_t(u)].replicated && shard_world_.rank > 0;
  if (elsewhere || (how != Reduction::complete && how != Reduction::update)) return {};
  return {options_.norm, unit_sums_ + u, partials_};
}

// Owners read it in their peers' memory, sum it as it lies there, and no peer writes those rows before the step's end:
// where its reduction is among the last of the step.
template <class T, class G>
bool Fsdp<T, G>::takes_rows(int u, const ops::UsedRows& used) const {
  const Unit& unit = units_[size_t(u)];
  const bool ends = last_micro_batch_ && unit.reductions == 1 && reduced_ + 1 >= trained_units_ - 1;
  const int64_t vector = 16 / std::min<int64_t>(size_of(options_.reduce_dtype), sizeof(G));
  return options_.read_tail && shard_world_.size > 1 && replica_world_.size == 1 && ends && !unit.replicated &&
         !options_.reduce_last && unit.params.size() == 1 && unit.with_gradient.numel == used.count * used.width &&
         used.width % vector == 0 && unit.with_gradient.shard % vector == 0;
}

template <class T, class G>
void Fsdp<T, G>::reduce(int u, const ops::UsedRows& used, const ops::ColumnSums<G>& sums, Event* summed) {
  ASSERT(!used.start || takes_rows(u, used));
  GradientSlot& s = gradient_slot_of(u);
  const Unit& unit = units_[size_t(u)];
  const FlatParam& flat = unit.with_gradient;
  State& state = state_[size_t(u)];
  if (s.unit != u) throw Error(strf("internal error: reduce of unit '%s' before its gradient", unit.name.c_str()));
  const Reduction how = next_reduction(u);
  const bool first_unsharded = !state.unsharded_gradient.get(), first_shard = !state.gradient.get();
  if (how == Reduction::accumulate && first_unsharded)
    state.unsharded_gradient = dev_.mem.take<float>(flat.padded, "unsharded gradient", Purpose::gradients);
  // One reduction in bf16 leaves its sum in bf16: fp32 is for what is added up.
  const bool in_bf16 = how == Reduction::complete && first_shard && options_.reduce_dtype == Dtype::bf16;
  if (in_bf16) state.bf16_gradient = dev_.mem.take<bf16>(flat.shard, "gradient shard", Purpose::gradients);
  if ((how == Reduction::shard || how == Reduction::complete) && first_shard && !in_bf16)
    state.gradient = dev_.mem.take<float>(flat.shard, "gradient shard", Purpose::gradients);
  float* unsharded = state.unsharded_gradient.get();
  float* shard = state.gradient.get() ? state.gradient.get() : updated_gradient_;
  const GradientShard to = {shard, state.bf16_gradient.get(), !first_shard};

  dev_.compute().record(s.written);
  Stream& stream = reduce_channel_.stream();
  stream.wait(s.written);
  ops::sum_columns(stream, sums);
  if (summed) stream.record(*summed);
  // A frozen parameter that is joined with a trained one has a gradient that must not count in the norm.
  for (const Param& p : unit.params)
    if (p.frozen && p.has_gradient) stream.zero(s.p + p.offset, p.numel * int64_t(sizeof(G)));
  // The padding, which nobody writes: here, where no kernel of the step waits for it.
  if (unit.reductions == 1) stream.zero(s.p + flat.numel, (flat.padded - flat.numel) * int64_t(sizeof(G)));
  const NamedWork named(dev_, stream, Span::reduce,
                        how == Reduction::accumulate ? "accumulate" : name_of(reduction_of(u)), unit.name,
                        flat.padded * size_of(options_.reduce_dtype));
  if (unsharded) ops::accumulate_gradient(stream, unsharded, s.p, flat.padded, !first_unsharded);
  if (how != Reduction::accumulate) {
    if constexpr (std::is_same_v<G, float>) {
      if (narrow_gradient_) ops::cast(stream, narrow_gradient_, unsharded ? unsharded : s.p, flat.padded);
    }
    if (unsharded && !narrow_gradient_) ops::cast(stream, s.p, static_cast<const float*>(unsharded), flat.padded);
    const ops::PowerSum norm = share_of_norm(u, how);
    if (narrow_gradient_) sum_over_ranks(u, narrow_gradient_, used, to, norm);
    else sum_over_ranks(u, s.p, used, to, norm);
    s.read_by_reduction[0] = std::move(state.unsharded_gradient);
  }
  if (how == Reduction::update) {
    ops::Series series = ops::Series::begins;
    update<float>(stream, u, shard, 0, &series);
    issued_.note(Issued::optimizer, u);
    s.read_by_reduction[1] = std::move(state.gradient);
  }
  stream.record(s.reduction_done);
  stream.holds(s.name, "");
  s.unit = -1;
  if (s.owner < 0 && !s.large) next_gradient_slot_ = (next_gradient_slot_ + 1) % rotating_;
}

template <class T, class G>
Issued::Kind Fsdp<T, G>::reduction_of(int u) const {
  return units_[size_t(u)].replicated ? Issued::all_reduce
         : exchanges() && !at_tail()  ? Issued::all_to_all
                                      : Issued::reduce_scatter;
}

// Taken behind `written`, which suffices: compute gives nothing back in between, so the room is free by then.
template <class T, class G>
template <class E>
E* Fsdp<T, G>::room_for_parts(Buffer<char>* in, int64_t numel) {
  if (!in->get())
    *in = dev_.mem.take<char>(numel * int64_t(sizeof(E)), "gradient parts received", Purpose::gradient_slots);
  return reinterpret_cast<E*>(in->get());
}

// The owner's sum of parts that copy engines bring: to `to`, or, where replicas are still to be added, to its own part
// of the gradient.
template <class T, class G>
template <class E>
void Fsdp<T, G>::exchange(int u, E* gradient, const GradientShard& to, ops::PowerSum norm) {
  const int64_t shard = units_[size_t(u)].with_gradient.shard;
  const int ranks = shard_world_.size, rank = shard_world_.rank;
  Stream& stream = reduce_channel_.stream();
  E* const mine = gradient + rank * shard;
  // Of n elements from `first` on.
  const auto sum = [&](int64_t first, int64_t n, const E* own, int own_rank, const E* others) {
    norm.adds = first > 0;
    if (replica_world_.size > 1)
      return ops::sum_parts(stream, mine + first, own + first, own_rank, others, n, ranks, /*accumulate=*/false);
    if constexpr (std::is_same_v<E, bf16>)
      if (to.bf16_alone)
        return ops::sum_parts(stream, to.bf16_alone + first, own + first, own_rank, others, n, ranks,
                              /*accumulate=*/false, norm);
    ops::sum_parts(stream, to.fp32 + first, own + first, own_rank, others, n, ranks, to.accumulate, norm);
  };
  if (!fetches()) {
    E* const parts = room_for_parts<E>(&received_, largest_sharded_gradient(units_));
    exchange_channel_->all_to_all(gradient, parts, shard, dtype_of<E>);
    return sum(0, shard, parts, 0, parts + shard);
  }
  // One peer's part has room in the shard of a step's only reduction, if its numbers are as wide: the sum takes its
  // place. A large unit's parts have memory while they are summed, when activations have gone. But those that a
  // micro-batch ends with come in pieces: it would leave the next one memory to give back that was not there before it.
  GradientSlot& s = gradient_slot_of(u);
  E* others = nullptr;
  if constexpr (std::is_same_v<E, bf16>) others = to.bf16_alone;
  if constexpr (std::is_same_v<E, float>) others = to.accumulate || !last_micro_batch_ ? nullptr : to.fp32;
  const bool in_place = ranks == 2 && others, whole = s.large && (last_micro_batch_ || u != last_large_);
  const int64_t most = in_place || whole ? shard : small_gradient_ / ranks;
  if (!in_place) others = room_for_parts<E>(whole ? &s.parts : &received_, most * (ranks - 1));
  reduce_channel_.all_to_all(
      mine, shard, dtype_of<E>, peers_, [&] { ops::meet_peers(stream, peers_, row_of_reductions); }, others, most,
      [&](int64_t first, int64_t n) { sum(first, n, mine, rank, others); });
}

// gradient (padded): this rank's. Leaves this rank's shard of the sum over all ranks in `to`: in fp32, added or set, or
// in bf16. used: its rows that are not zero, or none: all may be. norm: of what is left, if asked for.
template <class T, class G>
template <class E>
void Fsdp<T, G>::sum_over_ranks(int u, E* gradient, const ops::UsedRows& used, const GradientShard& to,
                                ops::PowerSum norm) {
  const Unit& unit = units_[size_t(u)];
  const FlatParam& flat = unit.with_gradient;
  const Dtype dtype = dtype_of<E>;
  const int64_t bytes = flat.shard * size_of(dtype);
  E* mine = gradient + shard_rank(u) * flat.shard;
  for_each_channel(*this, [&](Channel& c) {
    if (&c != &gather_channel_) c.set_unit(unit.name);
  });
  const Issued::Kind kind = reduction_of(u);
  const bool reads = kind == Issued::reduce_scatter && at_tail();
  // Without replicas the shard takes the owner's sum as it is: what was received unrounded, what was read as the
  // shard's type has it.
  const bool summed_in_shard = (kind == Issued::all_to_all || reads) && replica_world_.size == 1;
  Stream& stream = reduce_channel_.stream();
  if (kind == Issued::all_reduce) {
    reduce_channel_.all_reduce(gradient, flat.shard, dtype);
  } else if (reads) {
    reduce_channel_.reduce_scatter(flat.padded * size_of(dtype), [&] {
      const auto sum = [&](auto* out, bool accumulate, ops::PowerSum norm_of) {
        if (used.start)
          ops::sum_parts(stream, out, mine, mine - gradient, used, peers_, flat.shard, accumulate, norm_of);
        else ops::sum_parts(stream, out, mine, peers_, flat.shard, accumulate, norm_of);
      };
      if (!summed_in_shard) return sum(mine, /*accumulate=*/false, {});
      if constexpr (std::is_same_v<E, bf16>)
        if (to.bf16_alone) return sum(to.bf16_alone, /*accumulate=*/false, norm);
      sum(to.fp32, to.accumulate, norm);
    });
  } else if (kind == Issued::reduce_scatter) {
    ring(flat.padded * size_of(dtype)).reduce_scatter(gradient, flat.shard, dtype);
  } else {
    exchange(u, gradient, to, norm);
  }
  replica_channel_.all_reduce(mine, flat.shard, dtype);
  // A replicated unit has been summed by each rank of a group with that rank's own replicas, whose ring may add in
  // another order: the group takes its first rank's sum, or its copies of the unit would drift apart.
  const bool several = unit.replicated && shard_world_.size > 1 && replica_world_.size > 1;
  if (several) reduce_channel_.broadcast(mine, bytes, 0);
  if constexpr (std::is_same_v<E, bf16>)
    if (to.bf16_alone && !summed_in_shard)
      ops::accumulate_gradient(stream, to.bf16_alone, mine, flat.shard, /*accumulate=*/false, norm);
  if (!to.bf16_alone && !summed_in_shard)
    ops::accumulate_gradient(stream, to.fp32, mine, flat.shard, to.accumulate, norm);
  if (shard_world_.size > 1 || replica_world_.size == 1)
    issued_.note(kind, u, flat.padded * size_of(dtype), dtype, shard_world_.size);
  if (replica_world_.size > 1) issued_.note(Issued::all_reduce, u, bytes, dtype, replica_world_.size);
  if (several) issued_.note(Issued::broadcast, u, bytes, dtype, shard_world_.size);
}

// Replicas may sum their shards' norms in another order: all take the first one's, so that they clip, and stay, alike.
// The infinity norm is a maximum, and takes a collective of its own; all else are sums.
template <class T, class G>
void Fsdp<T, G>::all_reduce_scalars(Stream& s) {
  auto sum = [&](Channel& channel, const World& among, double* x, int64_t n, auto... how) {
    channel.all_reduce(x, n, Dtype::f64, how...);
    issued_.note(Issued::all_reduce, -1, n * 8, Dtype::f64, among.size);
  };
  const bool groups = replica_world_.size > 1;
  ops::total_power(s, options_.norm, &scalars_->norm2, unit_sums_, int64_t(units_.size()));
  if (shard_world_.size > 1 || !groups) {
    if (options_.norm == ops::GradNorm::inf) {
      sum(reduce_channel_, shard_world_, &scalars_->norm2, 1, Channel::max);
      sum(reduce_channel_, shard_world_, &scalars_->loss, step_scalars - 1);
    } else {
      sum(reduce_channel_, shard_world_, &scalars_->norm2, step_scalars);
    }
  }
  if (groups) {
    if (replica_world_.rank > 0) s.zero(&scalars_->norm2, sizeof(double));
    sum(replica_channel_, replica_world_, &scalars_->norm2, step_scalars);
  }
  ops::squared_norm(s, options_.norm, &scalars_->norm2, &scalars_->loss);
}

template <class T, class G>
void Fsdp<T, G>::all_reduce(double* x, int64_t n, Channel::Reduction how) {
  Stream& stream = reduce_channel_.stream();
  dev_.compute().record(counted_);
  stream.wait(counted_);
  const NamedWork named(dev_, stream, Span::reduce, "all_reduce", "diagnostics", n * int64_t(sizeof(double)));
  for (auto [channel, among] : {std::pair(&reduce_channel_, &shard_world_), {&replica_channel_, &replica_world_}}) {
    if (among->size == 1) continue;
    channel->all_reduce(x, n, Dtype::f64, how);
    issued_.note(Issued::all_reduce, -1, n * 8, Dtype::f64, among->size);
  }
}

// On the reduce stream, behind the last reduction. The losses are there as soon as compute has ended.
template <class T, class G>
void Fsdp<T, G>::begin_scalars() {
  dev_.compute().record(scalars_ready_);
  Stream& stream = reduce_channel_.stream();
  stream.wait(scalars_ready_);
  const int64_t bytes = sizeof(StepScalars);
  const NamedWork named(dev_, stream, Span::reduce, "all_reduce", "norm and loss", bytes);
  for (Channel* c : {&reduce_channel_, &replica_channel_}) c->set_unit("norm and loss");
  if (scalars_of_ranks_ && replica_world_.size == 1) {
    reduce_channel_.all_reduce(bytes, [&] {
      ops::sum_scalars(stream, options_.norm, &scalars_->norm2, step_scalars, unit_sums_, int64_t(units_.size()),
                       scalars_of_ranks_, peers_);
    });
    issued_.note(Issued::all_reduce, -1, bytes, Dtype::f64, shard_world_.size);
  } else {
    all_reduce_scalars(stream);
  }
  stream.record(scalars_summed_);
}

template <class T, class G>
void Fsdp<T, G>::sum_scalars() {
  begin_scalars();
  exposed_.wait(ExposedTime::reductions, scalars_summed_);
}

#define FOR(T, G)                                                                                 \
  template void Fsdp<T, G>::await_reduction(GradientSlot&);                                       \
  template G* Fsdp<T, G>::gradient(int);                                                          \
  template bool Fsdp<T, G>::takes_rows(int, const ops::UsedRows&) const;                          \
  template void Fsdp<T, G>::reduce(int, const ops::UsedRows&, const ops::ColumnSums<G>&, Event*); \
  template void Fsdp<T, G>::all_reduce(double*, int64_t, Channel::Reduction);                     \
  template void Fsdp<T, G>::begin_scalars();                                                      \
  template void Fsdp<T, G>::sum_scalars();
FOR(float, float)
FOR(bf16, bf16)
FOR(bf16, float)
FOR(double, double)
#undef FOR
