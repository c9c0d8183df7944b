#include "model.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>

template <class T, class G>
Model<T, G>::Model(Device& dev, const World& world, Transport transport, const ModelConfig& config, int64_t batch,
                   const FsdpOptions& options, Links links)
    : fsdp(
          dev, world, transport,
          [&] {
            std::vector<Unit> units = parameter_table(config);
            lay_out(&units, options.shards(world.size));
            return units;
          }(),
          options, links),
      dev_(dev),
      c_(config),
      M_(batch * config.seq),
      norm_(config.arch == Arch::simple || config.arch == Arch::mlp ? ops::Norm::layer : ops::Norm::rms),
      linear_(dev, c_.fp8, c_.fp8_scaling) {
  const Pieces pieces = pieces_of(c_, batch, int64_t(sizeof(T)));
  chunk_ = pieces.logits, rows_ = pieces.hidden, forward_rows_ = pieces.hidden_forward;

  // By name, once: what a step needs of a parameter is its unit and its offset.
  std::unordered_map<std::string, ParamRef> refs;
  for (size_t u = 0; u < fsdp.units().size(); u++)
    for (const Param& p : fsdp.units()[u].params) refs[p.name] = {int(u), p.offset, !p.has_gradient, p.fp8};
  auto find = [&](const std::string& name) {
    const auto ref = refs.find(name);
    return ref == refs.end() ? ParamRef() : ref->second;
  };
  for (int64_t i = 0; i < c_.depth; i++) {
    auto at = [&](const char* name) { return find(strf("block.%lld.%s", static_cast<long long>(i), name)); };
    params_.push_back({at("attention.q"),
                       at("attention.o"),
                       at(c_.arch == Arch::llama ? "mlp.gate" : "mlp.up"),
                       at("mlp.down"),
                       at("mlp.up.bias"),
                       at("mlp.down.bias"),
                       at("norm1"),
                       at("norm1.bias"),
                       at("norm2"),
                       at("norm2.bias"),
                       at("attention.gate.bias"),
                       at("attention.gate.w1.bias"),
                       at("attention.gate.w2"),
                       at("attention.gate.w2.bias"),
                       {at("attention.phi_k.position"), at("attention.phi_k.w1"), at("attention.phi_k.w2"),
                        at("attention.phi_v.position"), at("attention.phi_v.w1"), at("attention.phi_v.w2")}});
  }
  for (size_t i = 0; i < params_.size(); i++) {
    BlockParams& at = params_[i];
    int64_t place = 4 * int64_t(i);
    for (ParamRef* p : {&at.qkv, &at.o, &at.up, &at.down}) p->amax = place++;
  }
  embedding_ = find("embedding.weight");
  head_ = c_.tied ? embedding_ : find("head.weight");
  head_norm_ = find("head.norm"), head_norm_bias_ = find("head.norm.bias");
  const std::vector<Unit>& units = fsdp.units();
  weights_.resize(units.size()), grads_.resize(units.size());
  for (size_t u = 0; u < units.size(); u++)
    if (units[u].replicated) replicated_ = int(u);
  unit_of_ = make_table(c_).unit_of;
  training_ = training_turns(c_, unit_of_), evaluation_ = evaluation_turns(c_, unit_of_);
  last_of_backward_ = last_of_backward(c_);
  int64_t discarded = 0;  // nobody computes the gradient of a frozen matrix, but the others' come with what is computed
  for (const Unit& u : units)
    for (const Param& p : u.params)
      if (!p.has_gradient && (p.shape.size() == 1 || of_phi(p))) discarded = std::max(discarded, p.numel);
  if (discarded > 0) discarded_ = dev.mem.keep<G>(discarded, "gradients of what is frozen", Purpose::workspace);

  batch_ = micro_batch_at(dev.mem.keep<int32_t>(batch_ints(c_, batch), "tokens", Purpose::workspace), M_);
  loss_sum_ = dev.mem.keep<A>(1, "loss", Purpose::workspace);
  if (c_.fp8) weight_amaxes_ = dev.mem.keep<float>(4 * c_.depth, "largest numbers of weights", Purpose::workspace);
  bad_outputs_ = dev.mem.keep<int32_t>(c_.modules(), "outputs that are not finite", Purpose::workspace);
  if (c_.sparse && c_.diagnostics) {
    nsa_partials_ =
        dev.mem.keep<double>(c_.depth * nsa_stats_partials(), "diagnostics, partial sums", Purpose::workspace);
    nsa_sums_ = dev.mem.keep<NsaSums>(c_.depth, "diagnostics, sums", Purpose::workspace);
    nsa_maxima_ = dev.mem.keep<NsaMaxima>(c_.depth, "diagnostics, maxima", Purpose::workspace);
  }
  const bool rotates = c_.arch == Arch::rope || c_.arch == Arch::llama;
  rope_table_ = rotates ? dev.mem.keep<A>(c_.seq * c_.head_dim(), "rotary table", Purpose::workspace) : nullptr;
}

// A pointer into a slot is good while the unit is in use, and dangles behind its release: asking then is an error here,
// not a wrong number later.
template <class T, class G>
const T* Model<T, G>::weight(const ParamRef& p) const {
  ASSERT(p.exists() && weights_[size_t(p.unit)]);
  const int64_t in_fp8 = fsdp.units()[size_t(p.unit)].in_fp8;
  ASSERT(!p.fp8);
  return weights_[size_t(p.unit)] + (p.offset - in_fp8);
}

// Kernels that make several gradients at one go write all of them; those of frozen parameters go where nobody looks.
template <class T, class G>
G* Model<T, G>::grad(const ParamRef& p) const {
  if (p.frozen) return discarded_;
  ASSERT(p.exists() && grads_[size_t(p.unit)]);
  return grads_[size_t(p.unit)] + p.offset;
}

template <class T, class G>
void Model<T, G>::init_weights() {
  if (rope_table_) ops::rope_table<T>(dev_.compute(), rope_table_, c_.seq, c_.head_dim(), c_.rope);
  fsdp.init_weights();
}

// q, k and v are columns of one buffer: one product makes them, and nothing is split or transposed.
template <class T, class G>
AttentionShape Model<T, G>::attention_shape() const {
  const int64_t D = c_.head_dim(), DV = c_.v_head_dim(), row = c_.row();
  const double scale = 1 / std::sqrt(double(D));
  AttentionShape a = {M_ / c_.seq, c_.seq, c_.heads, c_.kv_heads, D, row, row, c_.heads * DV, row, row, scale};
  a.DV = DV;
  return a;
}

template <class T, class G>
PhiWeights<const T> Model<T, G>::phi_weights(const BlockParams& at) const {
  auto w = [&](int i) { return weight_if_any(at.phi[i]); };
  return {w(0), w(1), w(2), w(3), w(4), w(5)};
}
template <class T, class G>
PhiWeights<G> Model<T, G>::phi_grads(const BlockParams& at) const {
  auto dw = [&](int i) { return grad_if_any(at.phi[i]); };
  return {dw(0), dw(1), dw(2), dw(3), dw(4), dw(5)};
}

template <class T, class G>
void Model<T, G>::wgrad(const ParamRef& p, const T* dy, const T* x, int64_t M, int64_t N, int64_t K, bool accumulate) {
  if (!p.frozen) ops::matmul_wgrad<T, G>(dev_.compute(), grad(p), dy, x, M, N, K, accumulate);
}

template <class T, class G>
typename Linear<T>::Weight Model<T, G>::block_weight(const ParamRef& p) {
  typename Linear<T>::Weight w;
  if (p.fp8) w.codes = fsdp.codes(p.unit) + p.offset, w.unscale = fsdp.unscale(p.unit, p.offset);
  else w.w = weight(p), w.amax = weight_amaxes_ ? weight_amaxes_ + p.amax : nullptr;
  return w;
}
template <class T, class G>
Fp8Copy Model<T, G>::cast_weight(const ParamRef& p, int64_t N, int64_t K, Sides sides) {
  return linear_.cast_weight(block_weight(p), N, K, sides);
}
template <class T, class G>
void Model<T, G>::linear_wgrad(const ParamRef& p, const T* dy, const Fp8Copy& dy8, const T* x, int64_t M, int64_t N,
                               int64_t K, bool accumulate, typename Linear<T>::Maxima of_x) {
  if (!p.frozen) linear_.wgrad(grad(p), dy, dy8, x, M, N, K, accumulate, of_x);
}

// `copied` tells the host when it may fill in the next micro-batch; it does not wait for it here.
template <class T, class G>
void Model<T, G>::load(const int32_t* host, Event& copied) {
  dev_.compute().copy(batch_.tokens, host, batch_ints(c_, M_ / c_.seq) * 4);
  dev_.compute().record(copied);
}

// ----------------------------------------------------------------------------------------------------- diagnostics

template <class T, class G>
void Model<T, G>::watch_outputs() {
  watches_ = true;
  dev_.compute().zero(bad_outputs_, c_.modules() * int64_t(sizeof(int32_t)));
}
template <class T, class G>
template <class X>
void Model<T, G>::look_at(int module, const X* output, int64_t n) {
  if (watches_) ops::flag_not_finite<X>(dev_.compute(), bad_outputs_ + module, output, n);
}

template <class T, class G>
void Model<T, G>::begin_diagnostics() {
  kernels_.assign(size_t(c_.depth), {});
  dev_.compute().zero(nsa_partials_, c_.depth * nsa_stats_partials() * int64_t(sizeof(double)));
}

template <class T, class G>
NsaCounted<T> Model<T, G>::counted(int64_t block, const Saved& v) const {
  return {nsa_partials_ + block * nsa_stats_partials(), v.qkv, v.nsa.indices};
}
template <class T, class G>
void Model<T, G>::count(const std::vector<NsaCounted<T>>& blocks) {
  nsa_stats<T>(dev_.compute(), blocks, batch_.targets, c_.nsa_shape(M_ / c_.seq));
}
// What the forward pass has kept is counted behind it, all blocks at once.
template <class T, class G>
void Model<T, G>::count_kept(const std::vector<Saved>& saved) {
  std::vector<NsaCounted<T>> kept;
  for (size_t i = 0; i < saved.size(); i++)
    if (saved[i].qkv) kept.push_back(counted(int64_t(i), saved[i]));
  if (!kept.empty()) count(kept);
}

// Behind the last forward, so that the backward hides it.
template <class T, class G>
void Model<T, G>::sum_diagnostics() {
  nsa_stats_total(dev_.compute(), nsa_sums_, nsa_maxima_, nsa_partials_, c_.depth);
  fsdp.all_reduce(reinterpret_cast<double*>(nsa_sums_), c_.depth * int64_t(sizeof(NsaSums) / sizeof(double)),
                  Channel::sum);
  fsdp.all_reduce(reinterpret_cast<double*>(nsa_maxima_), c_.depth * int64_t(sizeof(NsaMaxima) / sizeof(double)),
                  Channel::max);
}

// ------------------------------------------------------------------------------------------------------- the step

// Read from top to bottom this is the step: what a block saves is handed from its forward to its backward and dies
// there, so activations are at their most in the head, and shrink block by block behind it.
template <class T, class G>
void Model<T, G>::forward_backward(const int32_t* host, double scale, bool first, bool last, Event& copied) {
  std::vector<Saved> saved(static_cast<size_t>(c_.depth));
  auto goes_back = [&](int64_t block) { return c_.mlp_module(block) >= last_of_backward_; };
  if (first && nsa_partials_) begin_diagnostics();

  dev_.mem.phase("forward");
  begin_micro_batch(training_, last);
  load(host, copied);
  Buffer<T> x = embed();
  for (int64_t i = 0; i < c_.depth; i++) x = block_forward(i, &saved[size_t(i)], std::move(x), goes_back(i));
  if (nsa_partials_) count_kept(saved);
  if (last && nsa_partials_) sum_diagnostics();

  dev_.mem.phase("head");
  begin_backward();
  x = head(std::move(x), scale, true, first);

  for (int64_t i = c_.depth - 1; i >= 0 && goes_back(i); i--) {
    dev_.mem.phase(strf("backward of block %lld", static_cast<long long>(i)));
    x = block_backward(i, std::move(saved[size_t(i)]), std::move(x));
  }
  if (last_of_backward_ == 0) {
    dev_.mem.phase("backward of the embedding");
    embed_backward(std::move(x));
  }
  x.reset();
  end_micro_batch();
}

// The same forward pass without a backward: nothing is kept, every unit is resharded, so validation fits where training
// does. Up to the head.
template <class T, class G>
Buffer<T> Model<T, G>::forward(const int32_t* host, Event& copied) {
  begin_micro_batch(evaluation_, true);
  load(host, copied);
  Buffer<T> x = embed();
  for (int64_t i = 0; i < c_.depth; i++) x = block_forward(i, nullptr, std::move(x), false);
  return x;
}

template <class T, class G>
void Model<T, G>::evaluate(const int32_t* host, bool first, Event& copied, A* row_losses) {
  dev_.mem.phase("validation");
  head(forward(host, copied), 0, false, first, row_losses);
  end_micro_batch();
}

template <class T, class G>
void Model<T, G>::next_logits(const int32_t* host, int64_t row, A* logits, Event& copied) {
  dev_.mem.phase("sample");
  head_of_row(forward(host, copied), row, logits);
  end_micro_batch();
}

// ---- the schedule

// Replicated parameters are used by every module, so their unit is in use all the time.
template <class T, class G>
void Model<T, G>::begin_micro_batch(const std::vector<Turn>& turns, bool last) {
  turns_ = &turns, turn_ = 0, last_ = last;
  fsdp.begin_micro_batch(last);
  if (c_.forward_prefetch > 0)
    for (int u : {replicated_, turns[0].uses})
      if (u >= 0) fsdp.prefetch(u);
  if (replicated_ >= 0) weights_[size_t(replicated_)] = fsdp.use(replicated_);
}

// Any module may write to the replicated unit's gradient, from the head on; it is reduced when the micro-batch ends.
template <class T, class G>
void Model<T, G>::begin_backward() {
  if (replicated_ >= 0 && trained(replicated_)) grads_[size_t(replicated_)] = fsdp.gradient(replicated_);
}

template <class T, class G>
void Model<T, G>::end_micro_batch() {
  ASSERT(turn_ == turns_->size());
  if (replicated_ < 0) return;
  fsdp.release(replicated_);
  if (grads_[size_t(replicated_)]) fsdp.reduce(replicated_);
  weights_[size_t(replicated_)] = nullptr, grads_[size_t(replicated_)] = nullptr;
}

// The code's order against the list's: a module that computes out of turn would read another unit's weights.
template <class T, class G>
const Turn& Model<T, G>::take_turn(Turn::Kind kind, int module) {
  ASSERT(turn_ < turns_->size());
  const Turn& t = (*turns_)[turn_++];
  ASSERT(t.kind == kind && t.module == module);
  return t;
}

// While a unit computes, the next one is on its way. With two slots its gather waits, on its own stream, for the
// release of the unit two before it; with one slot there is none free, prefetch does nothing, and nothing overlaps.
template <class T, class G>
void Model<T, G>::gather(const Turn& t) {
  if (t.begins_use) fsdp.gather(t.uses);
  if (t.kind == Turn::forward) {
    // Up to the head: what the backward pass wants depends on what is still resident when it begins.
    size_t next = t.next_use;
    for (int ahead = 0; ahead < c_.forward_prefetch && next <= size_t(c_.head_module()); ahead++) {
      if (next >= turns_->size()) break;
      fsdp.prefetch((*turns_)[next].uses);
      next = (*turns_)[next].next_use;
    }
  } else if (c_.backward_prefetch == BackwardPrefetch::pre) {
    if (const int u = unit_behind(t); u >= 0) fsdp.prefetch(u);
  }
}

// The first turn of a run waits for the gather; the others find the weights there.
template <class T, class G>
void Model<T, G>::use(const Turn& t) {
  if (t.begins_use) weights_[size_t(t.uses)] = fsdp.use(t.uses);
}

// Behind the last turn of a run. A unit that is not needed soon gives its slot up; the one that the backward pass
// begins with stays resident. A prefetch of kind `post` stands here: between a unit's gradient and its reduction.
template <class T, class G>
void Model<T, G>::release(const Turn& t) {
  if (!t.ends_use) return;
  weights_[size_t(t.uses)] = nullptr;
  if (t.reshards) fsdp.reshard(t.uses);
  else fsdp.release(t.uses);
  if (t.kind == Turn::gradient && c_.backward_prefetch == BackwardPrefetch::post)
    if (const int u = unit_behind(t); u >= 0) fsdp.gather(u);
}

// Waits for a gradient slot, which is why it stands in front of the first write and not earlier.
template <class T, class G>
void Model<T, G>::gradient(const Turn& t) {
  if (t.begins_gradient && trained(t.writes)) grads_[size_t(t.writes)] = fsdp.gradient(t.writes);
}

// Behind the last write of a run: from here the reduction runs beside the modules that follow.
template <class T, class G>
void Model<T, G>::reduce(const Turn& t) {
  if (!t.ends_gradient || !trained(t.writes)) return;
  grads_[size_t(t.writes)] = nullptr;
  fsdp.reduce(t.writes);
}

// Behind a micro-batch's last unit comes the first of the next micro-batch. Behind the step's last nobody: AdamW has
// yet to change the weights.
template <class T, class G>
int Model<T, G>::unit_behind(const Turn& t) const {
  if (t.next_use < turns_->size()) return (*turns_)[t.next_use].uses;
  const int first = (*turns_)[0].uses;
  return last_ || first == t.uses ? -1 : first;
}

// The loss rides along with the gradient norm: one all_reduce for both.
template <class T, class G>
void Model<T, G>::end_step() {
  dev_.mem.phase("optimizer");
  dev_.mark("optimizer");
  ops::cast(dev_.compute(), &fsdp.scalars()->loss, loss_sum_, 1);
  fsdp.end_step();
  watches_ = false;
}

// The step behind a validation must gather what it would have gathered without one: a step that is recorded as a graph
// cannot count on what happens to be resident.
template <class T, class G>
void Model<T, G>::finish_evaluation() {
  dev_.compute().zero(&fsdp.scalars()->norm2, sizeof(double));
  ops::cast(dev_.compute(), &fsdp.scalars()->loss, loss_sum_, 1);
  fsdp.sum_scalars();
  fsdp.empty_slots();
}

// ------------------------------------------------------------------------------------------------------- embedding

// tokens (M) -> x (M, C). Positions are added here by the architecture that has them in the residual stream.
template <class T, class G>
Buffer<T> Model<T, G>::embed() {
  const Turn& t = take_turn(Turn::forward, 0);
  Buffer<T> x = dev_.mem.take<T>(M_ * c_.dim, "block input", Purpose::activations);
  gather(t), use(t);
  dev_.mark("embedding");
  ops::embedding_forward(dev_.compute(), x.get(), weight(embedding_), batch_.tokens, M_, c_.seq, c_.dim,
                         c_.arch == Arch::simple);
  look_at(0, x.get(), M_ * c_.dim);
  release(t);
  return x;
}

// dx (M, C) -> the embedding's gradient: each row of it is a sum over the places of its token, in their order, so two
// runs agree bit for bit. Tied, it adds to what the head has left there.
template <class T, class G>
void Model<T, G>::embed_backward(Buffer<T> dx) {
  const Turn& t = take_turn(Turn::gradient, 0);
  Buffer<A> partials = dev_.mem.take<A>(ops::embedding_partials(M_, c_.dim), "partial sums");
  gradient(t);
  dev_.mark("embedding, backward");
  if (!embedding_.frozen)
    ops::embedding_backward(dev_.compute(), grad(embedding_), dx.get(), ops::token_index_at(batch_.index, M_, c_.vocab),
                            partials.get(), M_, c_.vocab, c_.dim, c_.tied);
  reduce(t);
}

// ------------------------------------------------------------------------------------------------ block: attention

// x -> norm -> q, k, v, with their positions, and NSA's gates. Fills in the norm's statistics.
template <class T, class G>
void Model<T, G>::queries(int64_t block, Saved* v, Purpose life) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const BlockParams& at = params_[size_t(block)];
  const int64_t M = M_, C = c_.dim, QKV = c_.row();
  dev_.mark("norms");
  // Recomputed, the norm takes the statistics that were kept: the same bits, and one pass over x less.
  Buffer<T> n = mem.take<T>(M * C, "normed");
  if (v->stats1) {
    ops::norm_apply<T>(s, norm_, n, v->stats1, v->x, weight(at.norm1), weight_if_any(at.norm1_bias), M, C);
  } else {
    v->stats1 = mem.take<A>(2 * M, "statistics 1", Purpose::activations);
    if (c_.fp8) v->largest1 = mem.take<float>(M, "largest numbers 1", Purpose::activations);
    ops::norm_forward<T>(s, norm_, n, nullptr, v->stats1, v->x, nullptr, weight(at.norm1), weight_if_any(at.norm1_bias),
                         M, C, c_.norm_eps, v->largest1);
  }
  dev_.mark("projections");
  v->qkv = mem.take<T>(M * QKV, "q, k, v", life);
  linear_.forward(v->qkv, n, block_weight(at.qkv), cast_weight(at.qkv, QKV, C, Sides::rows), nullptr, nullptr, M, QKV,
                  C, maxima(v->largest1, 0, M));
  n.reset();
  if (rope_table_) {
    dev_.mark("positions");
    ops::rope<T>(s, v->qkv, rope_table_, M, c_.seq, c_.heads + c_.key_heads(), c_.head_dim(), QKV, false);
  }
  if (c_.sparse) gates(block, v, life);
}

// NSA's gates before their sigmoid, from W n, or of the MLP W1 n, which lies behind q, k and v; they take its place.
template <class T, class G>
void Model<T, G>::gates(int64_t block, Saved* v, Purpose life) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const BlockParams& at = params_[size_t(block)];
  const int64_t M = M_, N = c_.gates(), F = c_.gate_hidden(), QKV = c_.row();
  T* columns = v->qkv + c_.nsa_shape(M / c_.seq).gate(0);
  dev_.mark("gates");
  if (c_.nsa_gate == NsaGate::linear) return ops::add_bias<T>(s, columns, weight(at.gate_bias), M, N, QKV);
  v->gate_h = mem.take<T>(M * F, "hidden of the gates", life);
  Buffer<T> g = mem.take<T>(M * N, "gates");
  {
    Buffer<T> a = mem.take<T>(M * F, "activated of the gates");
    ops::silu_forward<T>(s, a, v->gate_h, columns, weight(at.gate_w1_bias), M, F, QKV);
    ops::matmul<T>(s, g, a, weight(at.gate_w2), weight(at.gate_w2_bias), nullptr, M, N, F);
  }
  ops::copy_columns<T>(s, columns, g, M, N, QKV, N);
}

// dqkv (M, row) comes with the gradient of the gates, zero in the padding, and leaves with that of W n or of W1 n in
// its place.
template <class T, class G>
void Model<T, G>::gates_backward(int64_t block, const Saved& v, T* dqkv) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const BlockParams& at = params_[size_t(block)];
  const int64_t M = M_, N = c_.gates(), F = c_.gate_hidden(), QKV = c_.row();
  T* columns = dqkv + c_.nsa_shape(M / c_.seq).gate(0);
  Buffer<A> partials = mem.take<A>(ops::bias_grad_partials(M, std::max(N, F)), "partial sums");
  dev_.mark("gates, backward");
  if (c_.nsa_gate == NsaGate::linear) return ops::bias_grad<T, G>(s, grad(at.gate_bias), columns, partials, M, N, QKV);
  Buffer<T> dg = mem.take<T>(M * N, "gradient of the gates");
  Buffer<T> da = mem.take<T>(M * F, "gradient of activated, then activated");
  ops::copy_columns<T>(s, dg, columns, M, N, N, QKV);
  ops::bias_grad<T, G>(s, grad(at.gate_w2_bias), dg, partials, M, N, N);
  ops::matmul_dgrad<T>(s, da, dg, weight(at.gate_w2), M, N, F, false);
  ops::silu_backward<T>(s, da, columns, v.gate_h, M, F, QKV);
  wgrad(at.gate_w2, dg, da, M, N, F, false);
  ops::bias_grad<T, G>(s, grad(at.gate_w1_bias), columns, partials, M, F, QKV);
}

// q, k, v -> attention. Fills in what its backward reads.
template <class T, class G>
Buffer<T> Model<T, G>::attend(int64_t block, Saved* v, Purpose life, NsaKernels* ran) {
  const int64_t M = M_, D = c_.head_dim(), H = c_.heads;
  Buffer<T> o = dev_.mem.take<T>(M * H * c_.v_head_dim(), "attention", c_.sparse ? Purpose::temporaries : life);
  Buffer<float> largest;
  if (c_.fp8 && !linear_.scales_rows() && !v->largest_o)
    largest = dev_.mem.take<float>(M * H, "largest numbers of attention");
  if (c_.sparse) {
    nsa_forward<T>(dev_, o, &v->nsa, v->qkv, phi_weights(params_[size_t(block)]), c_.nsa_shape(M / c_.seq), life, ran,
                   largest);
  } else {
    dev_.mark("attention");
    v->lse = dev_.mem.take<A>(M * H, "log-sum-exp", life);
    attention_forward<T>(dev_.compute(), o, v->lse, v->qkv, v->qkv + H * D, v->qkv + c_.queries_and_keys(),
                         attention_shape(), largest);
  }
  if (largest) {
    v->largest_o = dev_.mem.take<float>(1, "largest number of attention", Purpose::activations);
    linear_.find_amax(v->largest_o.get(), largest.get(), M * H);
  }
  return o;
}

// Wo o, which the MLP's norm adds to x to make x2.
template <class T, class G>
void Model<T, G>::project(int64_t block, Saved* v, const T* o, Purpose life) {
  v->x2 = dev_.mem.take<T>(M_ * c_.dim, "middle of the block", life);
  dev_.mark("projections");
  const ParamRef& w = params_[size_t(block)].o;
  const int64_t C = c_.dim, K = c_.heads * c_.v_head_dim();
  linear_.forward(v->x2, o, block_weight(w), cast_weight(w, C, K, Sides::rows), nullptr, nullptr, M_, C, K,
                  maxima(v->largest_o, 0, 1));
}

// x2 = x + Wo o, and its norm in the same pass, which is returned.
template <class T, class G>
Buffer<T> Model<T, G>::middle(int64_t block, Saved* v) {
  const BlockParams& at = params_[size_t(block)];
  const int64_t M = M_, C = c_.dim;
  dev_.mark("norms");
  if (!v->stats2) {
    v->stats2 = dev_.mem.take<A>(2 * M, "statistics 2", Purpose::activations);
    if (c_.fp8) v->largest2 = dev_.mem.take<float>(M, "largest numbers 2", Purpose::activations);
  }
  Buffer<T> n = dev_.mem.take<T>(M * C, "normed");
  ops::norm_forward<T>(dev_.compute(), norm_, n, v->x2, v->stats2, v->x, v->x2, weight(at.norm2),
                       weight_if_any(at.norm2_bias), M, C, c_.norm_eps, v->largest2);
  return n;
}

// x (M, C) -> the next block's input. keep: something of this block is trained, so its backward will come.
template <class T, class G>
Buffer<T> Model<T, G>::block_forward(int64_t block, Saved* saved, Buffer<T> x, bool keep) {
  Saved here;
  Saved& v = keep ? *saved : here;
  v.x = std::move(x);
  if (c_.attends()) attention_forward_turn(block, &v, keep);
  const Turn& t = take_turn(Turn::forward, c_.mlp_module(block));
  gather(t), use(t);
  Buffer<T> n;
  if (c_.attends()) {
    n = middle(block, &v);
    if (!keep) v.x.reset();
  }
  Buffer<T> out = mlp_forward(block, &v, std::move(n), keep);
  look_at(t.module, out.get(), M_ * c_.dim);
  release(t);
  return out;
}

// x -> x2, but for the sum, which the MLP's norm makes. keep: what the options keep for the backward.
template <class T, class G>
void Model<T, G>::attention_forward_turn(int64_t block, Saved* v, bool keep) {
  const Turn& t = take_turn(Turn::forward, c_.attention_module(block));
  auto life = [&](bool kept) { return keep && kept ? Purpose::activations : Purpose::temporaries; };
  const bool trains = turns_ == &training_;
  gather(t), use(t);
  queries(block, v, life(c_.keeps_queries()));
  Buffer<T> o = attend(block, v, life(c_.keeps_attention()), trains ? kernels_of(block) : nullptr);
  if (!keep || !c_.keeps_queries()) {
    if (trains && nsa_partials_) count({counted(block, *v)});  // not to be seen behind the forward pass
    v->qkv.reset(), v->gate_h.reset();
  }
  if (!keep || !c_.keeps_attention()) {
    v->lse.reset();
    // Selected blocks are kept whatever else is not: choosing again would cost as much as attending.
    Buffer<int32_t> indices = std::move(v->nsa.indices);
    v->nsa = NsaSaved<T>();
    if (keep) v->nsa.indices = std::move(indices);
  }
  project(block, v, o, life(c_.keeps_middle()));
  look_at(t.module, v->x2.get(), M_ * c_.dim);
  if (keep && c_.keeps_attention() && !c_.sparse) v->o = std::move(o);
  release(t);
}

// dx arrives as the gradient of the block's output and leaves, in the same buffer, as that of its input.
template <class T, class G>
Buffer<T> Model<T, G>::block_backward(int64_t block, Saved v, Buffer<T> dx) {
  if (c_.attends() && !c_.keeps_middle()) recompute_middle(block, &v);
  mlp_backward_turn(block, &v, dx);
  v.x2.reset(), v.stats2.reset(), v.largest2.reset();
  if (c_.attends()) attention_backward_turn(block, &v, dx);
  return dx;
}

// The same call as the forward pass makes, on the same input: recomputation changes no bit.
template <class T, class G>
void Model<T, G>::recompute_queries(int64_t block, Saved* v) {
  MarkedRecomputation marked(dev_);
  fsdp.remark(unit_of_[size_t(c_.attention_module(block))], "recompute attention");
  queries(block, v, Purpose::temporaries);
}

// NSA takes the blocks that the forward pass chose, or rounding might choose others and the gradient be of another
// loss.
template <class T, class G>
void Model<T, G>::recompute_attention(int64_t block, Saved* v) {
  MarkedRecomputation marked(dev_);
  v->o = attend(block, v, Purpose::temporaries, kernels_of(block));
}

// The gated sum of NSA's branches, which are kept; the sum itself is cheaper to make again than to keep.
template <class T, class G>
void Model<T, G>::recompute_gated_sum(int64_t block, Saved* v) {
  MarkedRecomputation marked(dev_);
  v->o = dev_.mem.take<T>(M_ * c_.heads * c_.v_head_dim(), "attention");
  dev_.mark("gates");
  const Kernel k = nsa_combine<T>(dev_.compute(), v->o, v->nsa.o_compressed, v->nsa.o_selected, v->nsa.o_window, v->qkv,
                                  c_.nsa_shape(M_ / c_.seq));
  if (NsaKernels* ran = kernels_of(block)) ran->add(Stage::gates, k);
}

// With Recompute::block a block has kept its input alone: two turns make x2 and its norm's statistics again, and leave
// q, k, v and attention's output for the turn of attention's gradient.
template <class T, class G>
void Model<T, G>::recompute_middle(int64_t block, Saved* v) {
  const Turn& attention = take_turn(Turn::recompute, c_.attention_module(block));
  gather(attention), use(attention);
  if (c_.sparse || !c_.keeps_attention()) recompute_queries(block, v);
  if (!c_.keeps_attention()) recompute_attention(block, v);
  if (!v->o) recompute_gated_sum(block, v);
  {
    MarkedRecomputation marked(dev_);
    project(block, v, v->o, Purpose::temporaries);
  }
  release(attention);
  const Turn& mlp = take_turn(Turn::recompute, c_.mlp_module(block));
  gather(mlp), use(mlp);
  {
    MarkedRecomputation marked(dev_);
    middle(block, v);
  }
  release(mlp);
}

// dx (M, C), the gradient of x2, through Wo, attention, the projections and the norm, to that of x. Each wgrad stands
// as early as its inputs allow, so that they can be freed: what lives longest here decides the peak of long sequences.
template <class T, class G>
void Model<T, G>::attention_backward_turn(int64_t block, Saved* v, T* dx) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const int64_t M = M_, C = c_.dim, H = c_.heads, K = H * c_.v_head_dim(), QKV = c_.row();
  const BlockParams& at = params_[size_t(block)];
  const Turn& t = take_turn(Turn::gradient, c_.attention_module(block));
  gather(t), use(t);
  gradient(t);
  if (!v->qkv) recompute_queries(block, v);
  if (c_.keeps_middle() && !c_.keeps_attention()) recompute_attention(block, v);
  Buffer<T> dqkv;
  {
    Buffer<T> d_o = mem.take<T>(M * K, "gradient of attention");
    dev_.mark("projections, backward");
    Fp8Copy dx8 = linear_.cast_gradient(dx, M, C);
    linear_.dgrad(d_o, dx, dx8, block_weight(at.o), cast_weight(at.o, C, K, Sides::columns), M, C, K, false);
    if (!v->o) recompute_gated_sum(block, v);
    dev_.mark("projections, backward");
    linear_wgrad(at.o, dx, dx8, v->o, M, C, K, false, maxima(v->largest_o, 0, 1));
    dx8 = Fp8Copy();
    if (c_.sparse) v->o.reset();
    dqkv = queries_backward(block, v, d_o);
    v->o.reset(), v->lse.reset(), v->qkv.reset(), v->gate_h.reset();
  }
  if (rope_table_) {
    dev_.mark("positions, backward");
    ops::rope<T>(s, dqkv, rope_table_, M, c_.seq, H + c_.key_heads(), c_.head_dim(), QKV, true);
  }
  dev_.mark("norms, backward");
  Buffer<T> n = mem.take<T>(M * C, "normed, then its gradient");
  ops::norm_apply<T>(s, norm_, n, v->stats1, v->x, weight(at.norm1), weight_if_any(at.norm1_bias), M, C);
  dev_.mark("projections, backward");
  {
    const Fp8Copy dqkv8 = linear_.cast_gradient(dqkv, M, QKV);
    linear_wgrad(at.qkv, dqkv, dqkv8, n, M, QKV, C, false, maxima(v->largest1, 0, M));
    linear_.dgrad(n, dqkv, dqkv8, block_weight(at.qkv), cast_weight(at.qkv, QKV, C, Sides::columns), M, QKV, C, false);
  }
  dqkv.reset();
  dev_.mark("norms, backward");
  norm_backward(dx, grad(at.norm1), grad_if_any(at.norm1_bias), n, v->x, v->stats1, weight(at.norm1), M,
                /*accumulate=*/false);
  release(t);
  reduce(t);
}

// d_o (M, H*DV) -> the gradient of q, k, v and the gates (M, row), before the rotation is undone. Frees what NSA saved.
template <class T, class G>
Buffer<T> Model<T, G>::queries_backward(int64_t block, Saved* v, const T* d_o) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const int64_t M = M_, D = c_.head_dim(), H = c_.heads, QKV = c_.row();
  const BlockParams& at = params_[size_t(block)];
  Buffer<T> dqkv = mem.take<T>(M * QKV, "gradient of q, k, v");
  if (c_.sparse) {
    const NsaShape a = c_.nsa_shape(M / c_.seq);
    nsa_backward<T, G>(dev_, dqkv, phi_grads(at), d_o, v->qkv, phi_weights(at), std::move(v->nsa), a,
                       kernels_of(block));
    gates_backward(block, *v, dqkv);
  } else {
    const AttentionShape a = attention_shape();
    Buffer<A> workspace = mem.take<A>(attention_backward_workspace<T>(a), "attention workspace");
    const int64_t k = H * D, val = c_.queries_and_keys();
    dev_.mark("attention, backward");
    attention_backward<T>(s, dqkv, dqkv + k, dqkv + val, d_o, v->qkv, v->qkv + k, v->qkv + val, v->o, v->lse, workspace,
                          a);
  }
  return dqkv;
}

// ------------------------------------------------------------------------------------------------------ block: MLP

// x2 + W2 gelu(W1 n), n the norm of x2; without attention x + W2 gelu(W1 x). In the same pieces whether the hidden
// layer is kept or recomputed: the same products, so the same bits.
template <class T, class G>
Buffer<T> Model<T, G>::mlp_forward(int64_t block, Saved* v, Buffer<T> n, bool keep) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const BlockParams& at = params_[size_t(block)];
  const int64_t C = c_.dim, F = c_.hidden, UP = c_.hidden_row();
  const T *in = c_.attends() ? n.get() : v->x.get(), *residual = c_.attends() ? v->x2.get() : v->x.get();
  dev_.mark("MLP");
  Buffer<T> out = mem.take<T>(M_ * C, "block input", Purpose::activations);
  const bool keeps = keep && c_.keeps_mlp();
  if (keeps && c_.save_fp8) {
    v->h8 = mem.take<uint8_t>(M_ * UP, "MLP hidden", Purpose::activations);
    v->h8_unscales = mem.take<float>(forward_piece_number(M_ - 1) + 1, "MLP hidden, scales", Purpose::activations);
  } else if (keeps) {
    v->h = mem.take<T>(M_ * UP, "MLP hidden", Purpose::activations);
  }
  const Fp8Copy up8 = cast_weight(at.up, UP, C, Sides::rows), down8 = cast_weight(at.down, C, F, Sides::rows);
  for (int64_t i = 0, rows; i < M_; i += rows) {
    rows = forward_piece(i);
    Buffer<T> here;
    if (!v->h) here = mem.take<T>(rows * UP, "MLP hidden");
    T* h = v->h ? v->h + i * UP : here.get();
    // The residual is the last product's epilogue: no kernel of its own reads and writes (M, C) once more.
    if (c_.fp8) {
      linear_.forward(h, in + i * C, block_weight(at.up), up8, weight_if_any(at.up_bias), nullptr, rows, UP, C,
                      maxima(v->largest2, i, rows));
      if (v->h8) save_hidden(v, h, i, rows);
      const Fp8Copy g8 = linear_.cast_activation(activation(), h, rows, F);
      here.reset();
      linear_.forward(out + i * C, g8, down8, weight_if_any(at.down_bias), residual + i * C, rows, C, F);
      continue;
    }
    Buffer<T> g = mem.take<T>(rows * F, "activated");
    if (c_.arch == Arch::llama) {
      ops::matmul<T>(s, h, in + i * C, weight(at.up), nullptr, nullptr, rows, UP, C);
      ops::swiglu_forward<T>(s, g, h, rows, F);
    } else {
      ops::matmul_gelu<T>(s, g, h, in + i * C, weight(at.up), weight_if_any(at.up_bias), rows, F, C);
    }
    if (v->h8) save_hidden(v, h, i, rows);
    here.reset();
    ops::matmul<T>(s, out + i * C, g, weight(at.down), weight_if_any(at.down_bias), residual + i * C, rows, C, F);
  }
  n.reset();
  if (!keep || !c_.keeps_middle()) v->x2.reset();
  return out;
}

// Rows of the forward's piece that begins at row i; pieces of the backward are made of whole ones.
template <class T, class G>
int64_t Model<T, G>::forward_piece(int64_t i) const {
  return std::min(forward_rows_, std::min(M_ - i, rows_ - i % rows_));
}
template <class T, class G>
int64_t Model<T, G>::forward_piece_number(int64_t i) const {
  return i / rows_ * ((rows_ + forward_rows_ - 1) / forward_rows_) + i % rows_ / forward_rows_;
}

// The gradient of the hidden layer exists for rows_ rows at a time, so the MLP's gradients are sums over such pieces.
// They are summed in fp32 and rounded to G once: the number of pieces follows from memory, and should not show in a
// gradient. The pieces are the same whether the hidden layer is kept or recomputed: the same sums, so the same bits.
template <class T, class G>
void Model<T, G>::mlp_backward_turn(int64_t block, Saved* v, T* dx) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const BlockParams& at = params_[size_t(block)];
  const int64_t C = c_.dim, F = c_.hidden, UP = c_.hidden_row();
  const Turn& t = take_turn(Turn::gradient, c_.mlp_module(block));
  gather(t), use(t);
  gradient(t);
  MlpBackward all;
  const bool several = !std::is_same_v<G, A> && rows_ < M_;
  if (several && !at.down.frozen) all.down = mem.take<A>(C * F, "gradient of the MLP");
  auto take_up = [&] {
    all.up8 = cast_weight(at.up, UP, C, Sides::columns);
    if (!several) return;
    if (!at.up.frozen) all.up = mem.take<A>(UP * C, "gradient of the MLP");
    if (at.up_bias.exists()) all.up_bias = mem.take<A>(F, "gradient of the MLP's bias");
    if (at.norm2.exists()) all.norm = mem.take<A>(C, "gradient of the MLP's norm");
    if (at.norm2_bias.exists()) all.norm_bias = mem.take<A>(C, "gradient of the MLP's norm");
  };
  auto round = [&](const ParamRef& p, Buffer<A>* sum, int64_t n) {
    if constexpr (!std::is_same_v<G, A>)
      if (*sum && !p.frozen) ops::cast<G, A>(s, grad(p), *sum, n);
    sum->reset();
  };
  dev_.mark("MLP, backward");
  if (!c_.keeps_mlp()) fsdp.remark(t.uses, "recompute MLP");
  if (at.down_bias.exists()) {
    Buffer<A> partials = mem.take<A>(ops::bias_grad_partials(M_, C), "partial sums");
    ops::bias_grad<T, G>(s, grad(at.down_bias), dx, partials, M_, C, C);
  }
  all.down8 = cast_weight(at.down, C, F, Sides::columns);
  // Kept, the hidden layer holds its own gradient when it has been through the activation: the two halves then follow
  // each other, and their sums need not live together. In fp8 the gradient has a place of its own.
  const bool apart = v->h && !casts_activation(at);
  for (int64_t i = 0; i < M_; i += rows_) {
    const int64_t rows = std::min(rows_, M_ - i);
    Buffer<T> recomputed;
    if (!v->h) recomputed = v->h8 ? restore_hidden(*v, i, rows) : recompute_hidden(block, v, i, rows);
    T* h = v->h ? v->h + i * UP : recomputed.get();
    Fp8Copy dh8 = activation_backward(block, dx + i * C, h, i, rows, all);
    if (apart) continue;
    if (i == 0) take_up();
    up_backward(block, v, dx + i * C, h, std::move(dh8), i, rows, all);
  }
  all.down8 = Fp8Copy();
  round(at.down, &all.down, C * F);
  if (apart) {
    take_up();
    for (int64_t i = 0; i < M_; i += rows_)
      up_backward(block, v, dx + i * C, v->h + i * UP, Fp8Copy(), i, std::min(rows_, M_ - i), all);
  }
  v->h.reset(), v->h8.reset(), v->h8_unscales.reset(), all.up8 = Fp8Copy();
  round(at.up, &all.up, UP * C), round(at.up_bias, &all.up_bias, F);
  round(at.norm2, &all.norm, C), round(at.norm2_bias, &all.norm_bias, C);
  release(t);
  reduce(t);
}

// Rows [i, i + rows): dx (rows, C), the gradient of the MLP's output, through W2 and the activation. h (rows, F or 2F)
// becomes its own gradient, or that is returned in fp8. Adds to W2's.
template <class T, class G>
Fp8Copy Model<T, G>::activation_backward(int64_t block, const T* dx, T* h, int64_t i, int64_t rows,
                                         const MlpBackward& all) {
  Stream& s = dev_.compute();
  const BlockParams& at = params_[size_t(block)];
  const int64_t C = c_.dim, F = c_.hidden;
  dev_.mark("MLP, backward");
  Buffer<T> g = dev_.mem.take<T>(rows * F, "gradient of activated, then activated");
  const Fp8Copy dx8 = linear_.cast_gradient(dx, rows, C);
  linear_.dgrad(g, dx, dx8, block_weight(at.down), all.down8, rows, C, F, false);
  if (casts_activation(at)) {
    auto of = linear_.cast_activation_backward(activation(), g, h, rows, F);
    g.reset();
    if (all.down) linear_.wgrad(all.down.get(), dx8, of.g, rows, C, F, i > 0);
    else if (!at.down.frozen) linear_.wgrad(grad(at.down), dx8, of.g, rows, C, F, i > 0);
    return std::move(of.dh);
  }
  if (c_.arch == Arch::llama) ops::swiglu_backward<T>(s, g, h, rows, F);
  else ops::gelu_backward<T>(s, g, h, rows * F);
  if (all.down) linear_.wgrad(all.down.get(), dx, dx8, g, rows, C, F, i > 0);
  else linear_wgrad(at.down, dx, dx8, g, rows, C, F, i > 0);
  return Fp8Copy();
}

// Rows [i, i + rows): dh (rows, F or 2F) through W1 and the norm. dx (rows, C) arrives as the gradient of the MLP's
// output and leaves as that of its input, which has come past the MLP too. Adds to the gradients of W1 and the norm.
// dh8: dh in fp8, if that is all there is of it.
template <class T, class G>
void Model<T, G>::up_backward(int64_t block, Saved* v, T* dx, const T* dh, Fp8Copy dh8, int64_t i, int64_t rows,
                              const MlpBackward& all) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const BlockParams& at = params_[size_t(block)];
  const int64_t C = c_.dim, F = c_.hidden, UP = c_.hidden_row();
  const bool normed = c_.attends(), more = i > 0;
  Buffer<T> n;
  if (normed) {
    dev_.mark("norms, backward");
    n = mlp_input(block, v, i, rows, "normed, then its gradient");
    dev_.mark("MLP, backward");
  }
  const T* in = normed ? n.get() : v->x + i * C;
  if (!dh8) dh8 = linear_.cast_gradient(dh, rows, UP);
  const auto of_in = maxima(v->largest2, i, rows);
  if (all.up) linear_.wgrad(all.up.get(), dh, dh8, in, rows, UP, C, more, of_in);
  else linear_wgrad(at.up, dh, dh8, in, rows, UP, C, more, of_in);
  if (at.up_bias.exists()) {
    Buffer<A> partials = mem.take<A>(ops::bias_grad_partials(rows, F), "partial sums");
    if (all.up_bias) ops::bias_grad<T, A>(s, all.up_bias, dh, partials, rows, F, F, more);
    else ops::bias_grad<T, G>(s, grad(at.up_bias), dh, partials, rows, F, F, more);
  }
  // What came down the residual stream, past the MLP, stands in dx: the product adds to it, or a kernel of its own.
  if (!normed && !dev_.fuse) n = mem.take<T>(rows * C, "gradient of the MLP's input");
  T* dn = n ? n.get() : dx;
  linear_.dgrad(dn, dh, dh8, block_weight(at.up), all.up8, rows, UP, C, dn == dx);
  if (!normed) return n ? ops::add<T>(s, dx, dx, n, rows * C) : void();
  dev_.mark("norms, backward");
  auto through_norm = [&](auto* dgamma, auto* dbeta) {
    norm_backward(dx, dgamma, dbeta, n, v->x2 + i * C, v->stats2 + 2 * i, weight(at.norm2), rows, more);
  };
  if (all.norm) through_norm(all.norm.get(), all.norm_bias.get());
  else through_norm(grad(at.norm2), grad_if_any(at.norm2_bias));
}

// dn (rows, C), the gradient of a norm's output, through the norm to its input's, which is added to dx: what is there
// came down the residual stream, past the norm. dn is free afterwards. Not fused, the sum is a kernel of its own.
template <class T, class G>
template <class E>
void Model<T, G>::norm_backward(T* dx, E* dgamma, E* dbeta, T* dn, const T* x, const A* stats, const T* gamma,
                                int64_t rows, bool accumulate) {
  Stream& s = dev_.compute();
  const int64_t C = c_.dim;
  const bool fuse = dev_.fuse;
  Buffer<A> partials = dev_.mem.take<A>(ops::norm_backward_partials(rows, C), "partial sums");
  ops::norm_backward<T, E>(s, norm_, fuse ? dx : dn, dgamma, dbeta, dn, fuse ? dx : nullptr, x, stats, gamma, partials,
                           rows, C, accumulate);
  if (!fuse) ops::add<T>(s, dx, dx, dn, rows * C);
}

// The norm of rows [i, i + rows) of the block's middle, from the statistics that the forward pass has left.
template <class T, class G>
Buffer<T> Model<T, G>::mlp_input(int64_t block, Saved* v, int64_t i, int64_t rows, const char* name) {
  const BlockParams& at = params_[size_t(block)];
  Buffer<T> n = dev_.mem.take<T>(rows * c_.dim, name);
  ops::norm_apply<T>(dev_.compute(), norm_, n, v->stats2 + 2 * i, v->x2 + i * c_.dim, weight(at.norm2),
                     weight_if_any(at.norm2_bias), rows, c_.dim);
  return n;
}

// W1 n (rows, F or 2F), in the pieces that the forward pass made it in: the same products, so the same bits.
template <class T, class G>
Buffer<T> Model<T, G>::recompute_hidden(int64_t block, Saved* v, int64_t i, int64_t rows) {
  MarkedRecomputation marked(dev_);
  const BlockParams& at = params_[size_t(block)];
  const int64_t C = c_.dim, UP = c_.hidden_row();
  Buffer<T> n;
  dev_.mark("norms");
  if (c_.attends()) n = mlp_input(block, v, i, rows, "normed");
  dev_.mark("MLP");
  Buffer<T> h = dev_.mem.take<T>(rows * UP, "MLP hidden");
  const T* in = n ? n.get() : v->x + i * C;
  const Fp8Copy up8 = cast_weight(at.up, UP, C, Sides::rows);
  for (int64_t j = 0, some; j < rows; j += some) {
    some = forward_piece(i + j);
    linear_.forward(h + j * UP, in + j * C, block_weight(at.up), up8, weight_if_any(at.up_bias), nullptr, some, UP, C,
                    maxima(v->largest2, i + j, some));
  }
  return h;
}

// Rows [i, i + rows), a piece of the forward pass, in fp8 and back. The gradient is then of a layer that is rounded;
// the forward pass goes on with the one that is not.
template <class T, class G>
void Model<T, G>::save_hidden(Saved* v, const T* h, int64_t i, int64_t rows) {
  const int64_t UP = c_.hidden_row();
  Buffer<float> amax = dev_.mem.take<float>(1, "fp8, largest number");
  linear_.find_amax(amax, h, rows * UP);
  float* const unscale = v->h8_unscales + forward_piece_number(i);
  ops::to_fp8<T>(dev_.compute(), {Dtype::e4m3, v->h8 + i * UP, nullptr, unscale}, h, amax, rows, UP);
}
template <class T, class G>
Buffer<T> Model<T, G>::restore_hidden(const Saved& v, int64_t i, int64_t rows) {
  const int64_t UP = c_.hidden_row();
  Buffer<T> h = dev_.mem.take<T>(rows * UP, "MLP hidden");
  for (int64_t j = 0, some; j < rows; j += some) {
    some = forward_piece(i + j);
    const float* const unscale = v.h8_unscales + forward_piece_number(i + j);
    ops::from_fp8<T>(dev_.compute(), h + j * UP, {Dtype::e4m3, v.h8 + (i + j) * UP, unscale}, some * UP);
  }
  return h;
}

// ------------------------------------------------------------------------------------------------------------ head

// Final norm, logits, loss, and back again to the gradient of x, chunk by chunk: no more than chunk_ rows of logits
// ever exist.
template <class T, class G>
Buffer<T> Model<T, G>::head(Buffer<T> x, double scale, bool backward, bool first, A* row_losses) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const int64_t M = M_, C = c_.dim, V = c_.vocab;
  const Turn& t = take_turn(backward ? Turn::gradient : Turn::forward, c_.head_module());
  gather(t), use(t);
  dev_.mark("head and loss");
  Buffer<A> stats = mem.take<A>(2 * M, "final statistics"), losses = mem.take<A>(M, "losses");
  Buffer<T> n = mem.take<T>(M * C, "final normed, then its gradient");
  ops::norm_forward<T>(s, norm_, n, nullptr, stats, x, nullptr, weight(head_norm_), weight_if_any(head_norm_bias_), M,
                       C, c_.norm_eps);
  if (backward) gradient(t);
  {
    Buffer<T> logits = mem.take<T>(chunk_ * V, "logits of a chunk");
    // Logits and their gradient share one buffer; each chunk's dx takes the place of its n, which is read for the last
    // time. Chunks are summed in the accumulation type: a sum of many roundings to bf16 would lose what they add.
    const bool wide = backward && !head_.frozen && !std::is_same_v<G, A> && chunk_ < M;
    Buffer<A> sum;
    if (wide) sum = mem.take<A>(V * C, "head's gradient");
    for (int64_t i = 0; i < M; i += chunk_) {
      const int64_t rows = std::min(chunk_, M - i);
      ops::matmul<T>(s, logits, n + i * C, weight(head_), nullptr, nullptr, rows, V, C);
      ops::cross_entropy<T>(s, logits, losses + i, batch_.targets + i, A(scale), backward, rows, V);
      if (!backward) continue;
      if (wide) ops::matmul_wgrad<T, A>(s, sum, logits, n + i * C, rows, V, C, i > 0);
      else wgrad(head_, logits, n + i * C, rows, V, C, i > 0);
      ops::matmul_dgrad<T>(s, n + i * C, logits, weight(head_), rows, V, C, false);
    }
    if constexpr (!std::is_same_v<G, A>)
      if (wide) ops::cast<G, A>(s, grad(head_), sum, V * C);
  }
  {
    Buffer<A> partials = mem.take<A>(ops::sum_partials(), "partial sums");
    ops::sum<A>(s, loss_sum_, losses, partials, M, !first);
    look_at(t.module, loss_sum_, 1);
  }
  if (row_losses) s.copy(row_losses, losses.get(), M * int64_t(sizeof(A)));
  if (!backward) {
    release(t);
    return Buffer<T>();
  }
  Buffer<A> partials = mem.take<A>(ops::norm_backward_partials(M, C), "partial sums");
  ops::norm_backward<T, G>(s, norm_, n, grad(head_norm_), grad_if_any(head_norm_bias_), n, nullptr, x, stats,
                           weight(head_norm_), partials, M, C);
  release(t);
  reduce(t);
  return n;
}

// The head of one row alone: its logits are all that exist.
template <class T, class G>
void Model<T, G>::head_of_row(Buffer<T> x, int64_t row, A* logits) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const int64_t C = c_.dim, V = c_.vocab;
  const Turn& t = take_turn(Turn::forward, c_.head_module());
  gather(t), use(t);
  dev_.mark("head of a sample");
  Buffer<A> stats = mem.take<A>(2, "final statistics"), wide = mem.take<A>(V, "logits in fp32");
  Buffer<T> n = mem.take<T>(C, "final normed"), narrow = mem.take<T>(V, "logits");
  ops::norm_forward<T>(s, norm_, n, nullptr, stats, x + row * C, nullptr, weight(head_norm_),
                       weight_if_any(head_norm_bias_), 1, C, c_.norm_eps);
  ops::matmul<T>(s, narrow, n, weight(head_), nullptr, nullptr, 1, V, C);
  ops::cast<A, T>(s, wide, narrow, V);
  s.copy(logits, wide.get(), V * int64_t(sizeof(A)));
  release(t);
}

template class Model<float, float>;
template class Model<bf16, bf16>;
template class Model<bf16, float>;
template class Model<double, double>;
