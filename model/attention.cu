#include "model/attention.h"

#include <algorithm>
#include <cmath>

template <class T, class G>
BlockAttention<T, G>::BlockAttention(Blocks<T, G>& blocks, const int32_t* targets)
    : dev_(blocks.dev),
      c_(blocks.c),
      M_(blocks.M),
      blocks_(blocks),
      schedule_(blocks.schedule),
      linear_(blocks.linear),
      targets_(targets) {
  Memory& mem = dev_.mem;
  if (c_.sparse && c_.diagnostics) {
    partials_ = mem.keep<double>(c_.depth * nsa_stats_partials(), "diagnostics, partial sums", Purpose::workspace);
    sums_ = mem.keep<NsaSums>(c_.depth, "diagnostics, sums", Purpose::workspace);
    maxima_ = mem.keep<NsaMaxima>(c_.depth, "diagnostics, maxima", Purpose::workspace);
  }
  const bool rotates = c_.arch == Arch::rope || c_.arch == Arch::llama;
  if (rotates) rope_table_ = mem.keep<A>(c_.seq * c_.head_dim(), "rotary table", Purpose::workspace);
}

template <class T, class G>
void BlockAttention<T, G>::init() {
  if (rope_table_) ops::rope_table<T>(dev_.compute(), rope_table_, c_.seq, c_.head_dim(), c_.rope);
}

// q, k and v are columns of one buffer: one product makes them, and nothing is split or transposed.
template <class T, class G>
AttentionShape BlockAttention<T, G>::dense_shape() const {
  const int64_t D = c_.head_dim(), DV = c_.v_head_dim(), row = c_.row();
  const double scale = 1 / std::sqrt(double(D));
  AttentionShape a = {M_ / c_.seq, c_.seq, c_.heads, c_.kv_heads, D, row, row, c_.heads * DV, row, row, scale};
  a.DV = DV;
  return a;
}

template <class T, class G>
PhiWeights<const T> BlockAttention<T, G>::phi_weights(const BlockParams& at) const {
  auto w = [&](int i) { return schedule_.weight_if_any(at.phi[i]); };
  return {w(0), w(1), w(2), w(3), w(4), w(5)};
}
template <class T, class G>
PhiWeights<G> BlockAttention<T, G>::phi_grads(const BlockParams& at) const {
  auto dw = [&](int i) { return schedule_.grad_if_any(at.phi[i]); };
  return {dw(0), dw(1), dw(2), dw(3), dw(4), dw(5)};
}

// ------------------------------------------------------------------------------------------------------------- forward

// The norm of the block's input again, from the statistics that were kept: the same bits, and one pass over x less.
template <class T, class G>
Buffer<T> BlockAttention<T, G>::input(int64_t block, const Saved<T>& v, const char* name) {
  const BlockParams& at = blocks_.params[size_t(block)];
  Buffer<T> n = dev_.mem.take<T>(M_ * c_.dim, name);
  ops::norm_apply<T>(dev_.compute(), blocks_.norm, n, v.stats1, v.x, schedule_.weight(at.norm1),
                     schedule_.weight_if_any(at.norm1_bias), M_, c_.dim);
  return n;
}

// x -> norm -> q, k, v, with their positions; NSA's gates are due. Fills in the norm's statistics.
template <class T, class G>
void BlockAttention<T, G>::queries(int64_t block, Saved<T>* v, Purpose life) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const BlockParams& at = blocks_.params[size_t(block)];
  const int64_t M = M_, C = c_.dim, QKV = c_.row();
  dev_.mark("norms");
  const bool keeps = c_.keep_cheap && life == Purpose::activations;
  Buffer<T> n;
  if (v->stats1) {
    n = input(block, *v, "normed");
  } else {
    n = mem.take<T>(M * C, "normed", keeps ? life : Purpose::temporaries);
    v->stats1 = mem.take<A>(2 * M, "statistics 1", Purpose::activations);
    if (c_.fp8) v->largest1 = mem.take<float>(M, "largest numbers 1", Purpose::activations);
    ops::norm_forward<T>(s, blocks_.norm, n, nullptr, v->stats1, v->x, nullptr, schedule_.weight(at.norm1),
                         schedule_.weight_if_any(at.norm1_bias), M, C, c_.norm_eps, v->largest1);
  }
  dev_.mark("projections");
  v->qkv = mem.take<T>(M * QKV, "q, k, v", life);
  linear_.forward(v->qkv, n, blocks_.weight(at.qkv), blocks_.cast_weight(at.qkv, QKV, C, Sides::rows), nullptr, nullptr,
                  M, QKV, C, blocks_.maxima(v->largest1, 0, M));
  if (keeps) v->n1 = std::move(n);
  else n.reset();
  if (rope_table_) {
    dev_.mark("positions");
    ops::rope<T>(s, v->qkv, rope_table_, M, c_.seq, c_.heads + c_.key_heads(), c_.head_dim(), QKV, /*inverse=*/false);
  }
  v->gates_due = c_.sparse;
}

// NSA's gates before their sigmoid, from W n, or of the MLP W1 n, which lies behind q, k and v; they take its place. s:
// the compute stream, or for the former one beside it.
template <class T, class G>
void BlockAttention<T, G>::gates(Stream& s, int64_t block, Saved<T>* v, Purpose life) {
  Memory& mem = dev_.mem;
  const BlockParams& at = blocks_.params[size_t(block)];
  const int64_t M = M_, N = c_.gates(), F = c_.gate_hidden(), QKV = c_.row();
  T* columns = v->qkv + nsa_shape().gate(0);
  v->gates_due = false;
  dev_.mark("gates");
  if (c_.nsa_gate == NsaGate::linear) return ops::add_bias<T>(s, columns, schedule_.weight(at.gate_bias), M, N, QKV);
  v->gate_h = mem.take<T>(M * F, "hidden of the gates", life);
  Buffer<T> g = mem.take<T>(M * N, "gates");
  {
    Buffer<T> a = mem.take<T>(M * F, "activated of the gates");
    ops::silu_forward<T>(s, a, v->gate_h, columns, schedule_.weight(at.gate_w1_bias), M, F, QKV);
    ops::matmul<T>(s, g, a, schedule_.weight(at.gate_w2), schedule_.weight(at.gate_w2_bias), nullptr, M, N, F);
  }
  ops::copy_columns<T>(s, columns, g, M, N, QKV, N);
}

// With gates of an MLP: dqkv (M, row) comes with their gradient, zero in the padding, and leaves with that of W1 n in
// its place.
template <class T, class G>
void BlockAttention<T, G>::gates_backward(int64_t block, const Saved<T>& v, T* dqkv) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const BlockParams& at = blocks_.params[size_t(block)];
  const int64_t M = M_, N = c_.gates(), F = c_.gate_hidden(), QKV = c_.row();
  T* columns = dqkv + nsa_shape().gate(0);
  Buffer<A> partials = mem.take<A>(ops::bias_grad_partials(M, std::max(N, F)), "partial sums");
  dev_.mark("gates, backward");
  Buffer<T> dg = mem.take<T>(M * N, "gradient of the gates");
  Buffer<T> da = mem.take<T>(M * F, "gradient of activated, then activated");
  ops::copy_columns<T>(s, dg, columns, M, N, N, QKV);
  ops::bias_grad<T, G>(s, schedule_.grad(at.gate_w2_bias), dg, partials, M, N, N);
  ops::matmul_dgrad<T>(s, da, dg, schedule_.weight(at.gate_w2), M, N, F);
  ops::silu_backward<T>(s, da, columns, v.gate_h, M, F, QKV);
  if (!at.gate_w2.frozen) ops::matmul_wgrad<T, G>(s, schedule_.grad(at.gate_w2), dg, da, M, N, F);
  ops::bias_grad<T, G>(s, schedule_.grad(at.gate_w1_bias), columns, partials, M, F, QKV);
}

// q, k, v, and what NSA's gates are made of -> attention. Fills in what its backward reads.
template <class T, class G>
Buffer<T> BlockAttention<T, G>::attend(int64_t block, Saved<T>* v, Purpose life, NsaKernels* ran) {
  const int64_t M = M_, D = c_.head_dim(), H = c_.heads;
  Buffer<T> o = dev_.mem.take<T>(M * H * c_.v_head_dim(), "attention", c_.sparse ? Purpose::temporaries : life);
  Buffer<float> largest;
  if (c_.fp8 && !linear_.scales_rows() && !v->largest_o)
    largest = dev_.mem.take<float>(M * H, "largest numbers of attention");
  if (c_.sparse) {
    if (v->gates_due && c_.nsa_gate == NsaGate::mlp) gates(dev_.compute(), block, v, life);
    std::function<void(Stream&)> of_gates;
    if (v->gates_due) of_gates = [&](Stream& on) { gates(on, block, v, life); };
    nsa_forward<T>(dev_, o, &v->nsa, v->qkv, phi_weights(blocks_.params[size_t(block)]), nsa_shape(), life, ran,
                   largest, of_gates);
  } else {
    dev_.mark("attention");
    v->lse = dev_.mem.take<A>(M * H, "log-sum-exp", life);
    attention_forward<T>(dev_.compute(), o, v->lse, v->qkv, v->qkv + H * D, v->qkv + c_.queries_and_keys(),
                         dense_shape(), largest);
  }
  if (largest) {
    v->largest_o = dev_.mem.take<float>(1, "largest number of attention", Purpose::activations);
    linear_.find_amax(v->largest_o.get(), largest.get(), M * H);
  }
  return o;
}

// Wo o, which the MLP's norm adds to x to make x2.
template <class T, class G>
void BlockAttention<T, G>::project(int64_t block, Saved<T>* v, const T* o, Purpose life) {
  v->x2 = dev_.mem.take<T>(M_ * c_.dim, "middle of the block", life);
  dev_.mark("projections");
  const ParamRef& w = blocks_.params[size_t(block)].o;
  const int64_t C = c_.dim, K = c_.heads * c_.v_head_dim();
  linear_.forward(v->x2, o, blocks_.weight(w), blocks_.cast_weight(w, C, K, Sides::rows), nullptr, nullptr, M_, C, K,
                  blocks_.maxima(v->largest_o, 0, 1));
}

// x -> x2, but for the sum, which the MLP's norm makes. keep: what the options keep for the backward.
template <class T, class G>
void BlockAttention<T, G>::forward_turn(int64_t block, Saved<T>* v, bool keep) {
  const Turn& t = schedule_.take_turn(Turn::forward, c_.attention_module(block));
  auto life = [&](bool kept) { return keep && kept ? Purpose::activations : Purpose::temporaries; };
  const bool trains = schedule_.trains();
  schedule_.gather(t), schedule_.use(t);
  queries(block, v, life(c_.keeps_queries()));
  Buffer<T> o = attend(block, v, life(c_.keeps_attention()), trains ? kernels_of(block) : nullptr);
  if (!keep || !c_.keeps_queries()) {
    if (trains && counts()) count({counted(block, *v)});  // not to be seen behind the forward pass
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
  blocks_.watch.look_at(t.module, v->x2.get(), M_ * c_.dim);
  if (keep && c_.keeps_attention() && !c_.sparse) v->o = std::move(o);
  schedule_.release(t);
}

// ------------------------------------------------------------------------------------------------------- recomputation

// The same call as the forward pass makes, on the same input: recomputation changes no bit.
template <class T, class G>
void BlockAttention<T, G>::recompute_queries(int64_t block, Saved<T>* v) {
  MarkedRecomputation marked(dev_);
  schedule_.remark(schedule_.unit_of(c_.attention_module(block)), "recompute attention");
  queries(block, v, Purpose::temporaries);
  if (v->gates_due && c_.keeps_attention()) gates(dev_.compute(), block, v, Purpose::temporaries);  // else in attend()
}

// NSA takes the blocks that the forward pass chose, or rounding might choose others and the gradient be of another
// loss.
template <class T, class G>
void BlockAttention<T, G>::recompute_attention(int64_t block, Saved<T>* v) {
  MarkedRecomputation marked(dev_);
  v->o = attend(block, v, Purpose::temporaries, kernels_of(block));
}

// The gated sum of NSA's branches, which are kept; the sum itself is cheaper to make again than to keep.
template <class T, class G>
void BlockAttention<T, G>::recompute_gated_sum(int64_t block, Saved<T>* v) {
  MarkedRecomputation marked(dev_);
  v->o = dev_.mem.take<T>(M_ * c_.heads * c_.v_head_dim(), "attention");
  dev_.mark("gates");
  const Kernel k = nsa_combine<T>(dev_.compute(), v->o, v->nsa.o_compressed, v->nsa.o_selected, v->nsa.o_window, v->qkv,
                                  nsa_shape());
  if (NsaKernels* ran = kernels_of(block)) ran->add(Stage::gates, k);
}

template <class T, class G>
void BlockAttention<T, G>::recompute_turn(int64_t block, Saved<T>* v) {
  const Turn& t = schedule_.take_turn(Turn::recompute, c_.attention_module(block));
  schedule_.gather(t), schedule_.use(t);
  if (c_.sparse || !c_.keeps_attention()) recompute_queries(block, v);
  if (!c_.keeps_attention()) recompute_attention(block, v);
  if (!v->o) recompute_gated_sum(block, v);
  {
    MarkedRecomputation marked(dev_);
    project(block, v, v->o, Purpose::temporaries);
  }
  schedule_.release(t);
}

// ------------------------------------------------------------------------------------------------------------ backward

// dx (M, C), the gradient of x2, through Wo, attention, the projections and the norm, to that of x. Each wgrad stands
// as early as its inputs allow, so that they can be freed: what lives longest here decides the peak of long sequences.
template <class T, class G>
void BlockAttention<T, G>::backward_turn(int64_t block, Saved<T>* v, T* dx) {
  Memory& mem = dev_.mem;
  const int64_t M = M_, C = c_.dim, H = c_.heads, K = H * c_.v_head_dim(), QKV = c_.row();
  const BlockParams& at = blocks_.params[size_t(block)];
  const Turn& t = schedule_.take_turn(Turn::gradient, c_.attention_module(block));
  schedule_.gather(t), schedule_.use(t);
  schedule_.gradient(t);
  if (!v->qkv) recompute_queries(block, v);
  if (c_.keeps_middle() && !c_.keeps_attention()) recompute_attention(block, v);
  Buffer<T> dqkv;
  {
    Buffer<T> d_o = mem.take<T>(M * K, "gradient of attention");
    dev_.mark("projections, backward");
    Fp8Copy dx8 = linear_.cast_gradient(dx, M, C);
    linear_.dgrad(d_o, dx, dx8, blocks_.weight(at.o), blocks_.cast_weight(at.o, C, K, Sides::columns), M, C, K,
                  /*accumulate=*/false);
    // Who recomputes q, k and v has no memory for what a backward of NSA that is begun apart takes.
    NsaBegun<T> begun;
    if (!v->o && c_.keeps_queries() && nsa_begins_at_once<T>(dev_, nsa_shape())) {
      dqkv = mem.take<T>(M * QKV, "gradient of q, k, v");
      begun = nsa_begin_backward<T>(dev_, &v->o, dqkv, d_o, v->qkv, &v->nsa, nsa_shape());
    } else if (!v->o) {
      recompute_gated_sum(block, v);
    }
    dev_.mark("projections, backward");
    blocks_.wgrad(at.o, dx, dx8, v->o, M, C, K, /*accumulate=*/false, blocks_.maxima(v->largest_o, 0, 1));
    dx8 = Fp8Copy();
    if (c_.sparse) v->o.reset();
    if (!dqkv) dqkv = mem.take<T>(M * QKV, "gradient of q, k, v");
    queries_backward(block, v, dqkv, d_o, std::move(begun));
    v->o.reset(), v->lse.reset(), v->qkv.reset(), v->gate_h.reset();
  }
  if (rope_table_) turn_back(dqkv);
  dev_.mark("norms, backward");
  Buffer<T> n = std::move(v->n1);  // then its gradient
  if (!n) n = input(block, *v, "normed, then its gradient");
  dev_.mark("projections, backward");
  {
    const Fp8Copy dqkv8 = linear_.cast_gradient(dqkv, M, QKV);
    blocks_.wgrad(at.qkv, dqkv, dqkv8, n, M, QKV, C, /*accumulate=*/false, blocks_.maxima(v->largest1, 0, M));
    linear_.dgrad(n, dqkv, dqkv8, blocks_.weight(at.qkv), blocks_.cast_weight(at.qkv, QKV, C, Sides::columns), M, QKV,
                  C, /*accumulate=*/false);
  }
  dqkv.reset();
  dev_.mark("norms, backward");
  blocks_.norm_backward(dx, schedule_.grad(at.norm1), schedule_.grad_if_any(at.norm1_bias), n, v->x, v->stats1,
                        schedule_.weight(at.norm1), M, /*accumulate=*/false,
                        blocks_.late_norm(at.norm1, at.norm1_bias, M));
  schedule_.release(t);
  schedule_.reduce(t);
}

// Does attention's backward undo the rotation of q and k on the way?
template <class T, class G>
bool BlockAttention<T, G>::backward_turns() const {
  if (!rope_table_ || !dev_.fuse) return false;
  return c_.sparse ? nsa_backward_turns<T>(dev_, nsa_shape()) : attention_backward_turns<T>(dev_, dense_shape());
}

// Undoes the rotation of what of dqkv attention's backward has not: of NSA's keys it sees to the selected branch's.
template <class T, class G>
void BlockAttention<T, G>::turn_back(T* dqkv) {
  const int64_t D = c_.head_dim();
  const auto turn = [&](T* x, int64_t heads) {
    dev_.mark("positions, backward");
    ops::rope<T>(dev_.compute(), x, rope_table_, M_, c_.seq, heads, D, c_.row(), /*inverse=*/true);
  };
  if (!backward_turns()) return turn(dqkv, c_.heads + c_.key_heads());
  if (!c_.sparse) return;
  const NsaShape a = nsa_shape();
  turn(dqkv + a.k(0), c_.kv_heads), turn(dqkv + a.k(2), c_.kv_heads);
}

// d_o (M, H*DV) -> the gradient of q, k, v and the gates, dqkv (M, row), before the rotation is undone unless
// backward_turns(). Frees what NSA saved.
template <class T, class G>
void BlockAttention<T, G>::queries_backward(int64_t block, Saved<T>* v, T* dqkv, const T* d_o, NsaBegun<T> begun) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const int64_t M = M_, D = c_.head_dim(), H = c_.heads, QKV = c_.row();
  const BlockParams& at = blocks_.params[size_t(block)];
  if (c_.sparse) {
    const NsaShape a = nsa_shape();
    const bool linear = c_.nsa_gate == NsaGate::linear;
    Buffer<A> partials;
    std::function<void(Stream&)> of_gates;
    if (linear) {
      partials = mem.take<A>(ops::bias_grad_partials(M, c_.gates()), "partial sums");
      of_gates = [&](Stream& on) {
        ops::bias_grad<T, G>(on, schedule_.grad(at.gate_bias), dqkv + a.gate(0), partials, M, c_.gates(), QKV);
      };
    }
    nsa_backward<T, G>(dev_, dqkv, phi_grads(at), d_o, v->qkv, phi_weights(at), std::move(v->nsa), a, kernels_of(block),
                       std::move(begun), of_gates, backward_turns() ? rope_table_ : nullptr);
    if (!linear) gates_backward(block, *v, dqkv);
  } else {
    const AttentionShape a = dense_shape();
    Buffer<A> workspace = mem.take<A>(attention_backward_workspace<T>(a), "attention workspace");
    const int64_t k = H * D, val = c_.queries_and_keys();
    dev_.mark("attention, backward");
    attention_backward<T>(s, dqkv, dqkv + k, dqkv + val, d_o, v->qkv, v->qkv + k, v->qkv + val, v->o, v->lse, workspace,
                          a, /*gate=*/{}, /*stats=*/nullptr, backward_turns() ? rope_table_ : nullptr);
  }
}

// --------------------------------------------------------------------------------------------------------- diagnostics

template <class T, class G>
void BlockAttention<T, G>::begin_counting() {
  kernels_.assign(size_t(c_.depth), {});
  dev_.compute().zero(partials_, c_.depth * nsa_stats_partials() * int64_t(sizeof(double)));
}

template <class T, class G>
NsaCounted<T> BlockAttention<T, G>::counted(int64_t block, const Saved<T>& v) const {
  return {partials_ + block * nsa_stats_partials(), v.qkv, v.nsa.indices};
}
template <class T, class G>
void BlockAttention<T, G>::count(const std::vector<NsaCounted<T>>& blocks) {
  nsa_stats<T>(dev_.compute(), blocks, targets_, nsa_shape());
}
// What the forward pass has kept is counted behind it, all blocks at once.
template <class T, class G>
void BlockAttention<T, G>::count_kept(const std::vector<Saved<T>>& saved) {
  std::vector<NsaCounted<T>> kept;
  for (size_t i = 0; i < saved.size(); i++)
    if (saved[i].qkv) kept.push_back(counted(int64_t(i), saved[i]));
  if (!kept.empty()) count(kept);
}

template <class T, class G>
void BlockAttention<T, G>::sum_counts(Fsdp<T, G>* fsdp) {
  nsa_stats_total(dev_.compute(), sums_, maxima_, partials_, c_.depth);
  fsdp->all_reduce(reinterpret_cast<double*>(sums_), c_.depth * int64_t(sizeof(NsaSums) / sizeof(double)),
                   Channel::sum);
  fsdp->all_reduce(reinterpret_cast<double*>(maxima_), c_.depth * int64_t(sizeof(NsaMaxima) / sizeof(double)),
                   Channel::max);
}

template class BlockAttention<float, float>;
template class BlockAttention<bf16, bf16>;
template class BlockAttention<bf16, float>;
template class BlockAttention<double, double>;
