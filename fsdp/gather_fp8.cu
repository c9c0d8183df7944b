#include "fsdp/gather_fp8.h"

#include <algorithm>

#include "lib/ops/ops.h"

template <class T>
Fp8Gathers<T>::Fp8Gathers(Device& dev, const std::vector<Unit>& units)
    : units_(units), scales_(units.size()), current_(units.size(), false) {
  Memory& mem = dev.mem;
  for (size_t u = 0; u < units.size(); u++) {
    const int64_t n = int64_t(units[u].scaled.size());
    if (n == 0) continue;
    scales_[u].amax = mem.keep<float>(n, units[u].name + " largest numbers", Purpose::workspace);
    scales_[u].unscale = mem.keep<float>(n * fp8::scale_stride, units[u].name + " scales", Purpose::workspace);
    if (!partials_) partials_ = mem.keep<float>(ops::sum_partials(), "partial maxima", Purpose::workspace);
  }
}

// Calls f(i, from, n, x) with what my shard has of what shares scale i: n numbers, the first of them element `from` of
// the unit and `x` in the master copy.
template <class T>
template <class F>
void Fp8Gathers<T>::each_piece(int u, const Shard& mine, F f) const {
  const Unit& unit = units_[size_t(u)];
  const FlatParam& flat = unit.with_gradient;
  const int64_t shard = mine.rank * flat.shard;
  for (size_t i = 0; i < unit.scaled.size(); i++) {
    const auto [offset, numel] = unit.scaled[i];
    const int64_t from = std::max(shard, offset), to = std::min(shard + flat.shard, offset + numel);
    if (from < to) f(i, from, to - from, mine.master + flat.offset_in_shard + from - shard);
  }
}

// Once for weights that are new: all ranks must scale a tensor alike, and none has all of it.
template <class T>
void Fp8Gathers<T>::find_amax(int u, const Shard& mine, Channel& channel, IssueLog* issued) {
  if (current_[size_t(u)]) return;
  current_[size_t(u)] = true;
  Stream& stream = channel.stream();
  const Scales& of = scales_[size_t(u)];
  const int64_t n = int64_t(units_[size_t(u)].scaled.size()), bytes = n * int64_t(sizeof(float));
  stream.zero(of.amax, bytes);
  each_piece(u, mine, [&](size_t i, int64_t, int64_t numel, const float* x) {
    ops::amax<float>(stream, of.amax + i, x, partials_, numel);
  });
  if (mine.gathered) {
    channel.all_reduce(of.amax, n, Dtype::f32, Channel::max);
    issued->note(Issued::amax, u, bytes, Dtype::f32, mine.ranks);
  }
  ops::unscales(stream, of.unscale, of.amax, n, Dtype::e4m3);
}

// Codes go to the element's place, and what is not in fp8 behind them.
template <class T>
void Fp8Gathers<T>::gather(int u, const Shard& mine, T* slot, Channel& channel, IssueLog* issued) {
  const Unit& unit = units_[size_t(u)];
  const FlatParam& flat = unit.with_gradient;
  ASSERT(unit.without_gradient.numel == 0);
  const Fp8Layout layout = fp8_layout(unit, mine.ranks, sizeof(T));
  uint8_t* const codes = reinterpret_cast<uint8_t*>(slot);
  T* const rest = reinterpret_cast<T*>(codes + layout.rest);
  Stream& stream = channel.stream();
  find_amax(u, mine, channel, issued);
  each_piece(u, mine, [&](size_t i, int64_t from, int64_t n, const float* x) {
    ops::to_e4m3(stream, codes + from, x, scales_[size_t(u)].amax + i, n);
  });
  const int64_t shard = mine.rank * flat.shard, from = std::max(shard, unit.in_fp8);
  if (const int64_t n = std::min(shard + flat.shard, flat.numel) - from; n > 0)
    ops::cast_weights(stream, rest + layout.first + from - unit.in_fp8,
                      mine.master + flat.offset_in_shard + from - shard, n);
  if (!mine.gathered) return issued->note(Issued::cast, u);
  channel.all_gather(codes, flat.shard, Dtype::e4m3);
  issued->note(Issued::all_gather, u, flat.padded, Dtype::e4m3, mine.ranks);
  if (layout.part == 0) return;
  channel.all_gather(rest, layout.part, dtype_of<T>);
  issued->note(Issued::all_gather, u, layout.part * mine.ranks * int64_t(sizeof(T)), dtype_of<T>, mine.ranks);
}

template <class T>
const float* Fp8Gathers<T>::unscale(int u, int64_t offset) const {
  const std::vector<Unit::Scaled>& scaled = units_[size_t(u)].scaled;
  const auto at = std::find_if(scaled.begin(), scaled.end(), [&](auto s) { return s.offset == offset; });
  ASSERT(at != scaled.end());
  return scales_[size_t(u)].unscale + (at - scaled.begin()) * fp8::scale_stride;
}

template class Fp8Gathers<float>;
template class Fp8Gathers<bf16>;
template class Fp8Gathers<double>;
