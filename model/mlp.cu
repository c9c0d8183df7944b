#include "model/mlp.h"

#include <algorithm>

template <class T, class G>
BlockMlp<T, G>::BlockMlp(Blocks<T, G>& blocks, const Pieces& pieces)
    : dev_(blocks.dev),
      c_(blocks.c),
      M_(blocks.M),
      rows_(pieces.hidden),
      forward_rows_(pieces.hidden_forward),
      last_rows_(rows_of_last(blocks.c, blocks.M, pieces, blocks.params.back())),
      blocks_(blocks),
      schedule_(blocks.schedule),
      linear_(blocks.linear) {}

// How much of the last block's hidden layer is kept where hidden layers are recomputed: the rows of the backward's
// first piece. They take no memory of their own where, with them, the rest of the forward and the head need no more
// than this piece's backward or the forward do without. `last`: the block's parameters.
template <class T, class G>
int64_t BlockMlp<T, G>::rows_of_last(const ModelConfig& c, int64_t M, const Pieces& pieces, const BlockParams& last) {
  constexpr int64_t element = sizeof(T), wide = std::is_same_v<G, A> ? 0 : sizeof(A);
  const int64_t UP = c.hidden_row(), F = c.hidden, kept = pieces.hidden * UP * element;
  const bool several = pieces.hidden < M;
  // Beyond one tensor of (M, C): in the forward the norm's output, in the head its own.
  const int64_t second = M * c.dim * element, normed = c.attends() ? second : 0;
  const int64_t forward = normed + pieces.hidden_forward * (UP + F) * element;
  const int64_t summed = (last.up.frozen ? 0 : UP) + (last.down.frozen ? 0 : F);
  const int64_t backward = kept + pieces.hidden * F * element + (several ? summed * c.dim * wide : 0);
  const int64_t rest = several ? forward : normed + pieces.hidden_forward * F * element;
  const int64_t head = second + pieces.logits * c.vocab * element + (pieces.logits < M ? c.vocab * c.dim * wide : 0);
  return kept + std::max(rest, head) <= std::max(backward, forward) ? pieces.hidden : 0;
}
// Rows of a block's hidden layer that are kept as they are.
template <class T, class G>
int64_t BlockMlp<T, G>::kept_rows(int64_t block) const {
  if (c_.keeps_mlp()) return c_.save_fp8 ? 0 : M_;
  return block == c_.depth - 1 ? last_rows_ : 0;
}
// Rows of the forward's piece that begins at row i; pieces of the backward are made of whole ones.
template <class T, class G>
int64_t BlockMlp<T, G>::forward_piece(int64_t i) const {
  return std::min(forward_rows_, std::min(M_ - i, rows_ - i % rows_));
}
template <class T, class G>
int64_t BlockMlp<T, G>::forward_piece_number(int64_t i) const {
  return i / rows_ * ((rows_ + forward_rows_ - 1) / forward_rows_) + i % rows_ / forward_rows_;
}

// ------------------------------------------------------------------------------------------------------------- forward

// x2 = x + Wo o, and its norm in the same pass, which is returned.
template <class T, class G>
Buffer<T> BlockMlp<T, G>::middle(int64_t block, Saved<T>* v, bool keep) {
  const BlockParams& at = blocks_.params[size_t(block)];
  const int64_t M = M_, C = c_.dim;
  dev_.mark("norms");
  if (!v->stats2) {
    v->stats2 = dev_.mem.take<A>(2 * M, "statistics 2", Purpose::activations);
    if (c_.fp8) v->largest2 = dev_.mem.take<float>(M, "largest numbers 2", Purpose::activations);
  }
  Buffer<T> n = dev_.mem.take<T>(M * C, "normed", keep && c_.keep_cheap ? Purpose::activations : Purpose::temporaries);
  ops::norm_forward<T>(dev_.compute(), blocks_.norm, n, v->x2, v->stats2, v->x, v->x2, schedule_.weight(at.norm2),
                       schedule_.weight_if_any(at.norm2_bias), M, C, c_.norm_eps, v->largest2);
  return n;
}

// x2 + W2 gelu(W1 n), n the norm of x2; without attention x + W2 gelu(W1 x). In the same pieces whether the hidden
// layer is kept or recomputed: the same products, so the same bits.
template <class T, class G>
Buffer<T> BlockMlp<T, G>::forward(int64_t block, Saved<T>* v, Buffer<T> n, bool keep) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const BlockParams& at = blocks_.params[size_t(block)];
  const int64_t C = c_.dim, F = c_.hidden, UP = c_.hidden_row();
  const T *in = c_.attends() ? n.get() : v->x.get(), *residual = c_.attends() ? v->x2.get() : v->x.get();
  dev_.mark("MLP");
  Buffer<T> out = mem.take<T>(M_ * C, "block input", Purpose::activations);
  const int64_t kept = keep ? kept_rows(block) : 0;
  if (kept) v->h = mem.take<T>(kept * UP, "MLP hidden", Purpose::activations);
  if (keep && c_.keeps_mlp() && c_.save_fp8) {
    v->h8 = mem.take<uint8_t>(M_ * UP, "MLP hidden", Purpose::activations);
    v->h8_unscales = mem.take<float>(forward_piece_number(M_ - 1) + 1, "MLP hidden, scales", Purpose::activations);
  }
  if (keep && c_.keeps_activated()) v->g = mem.take<T>(M_ * F, "MLP activated", Purpose::activations);
  const Fp8Copy up8 = blocks_.cast_weight(at.up, UP, C, Sides::rows),
                down8 = blocks_.cast_weight(at.down, C, F, Sides::rows);
  for (int64_t i = 0, rows; i < M_; i += rows) {
    rows = forward_piece(i);
    Buffer<T> here;
    if (i >= kept) here = mem.take<T>(rows * UP, "MLP hidden");
    T* h = here ? here.get() : v->h + i * UP;
    const auto hidden = v->h8 || !here ? ops::Hidden::kept : ops::Hidden::scratch;
    // The residual is the last product's epilogue: no kernel of its own reads and writes (M, C) once more.
    if (c_.fp8) {
      linear_.forward(h, in + i * C, blocks_.weight(at.up), up8, schedule_.weight_if_any(at.up_bias), nullptr, rows, UP,
                      C, blocks_.maxima(v->largest2, i, rows));
      if (v->h8) save_hidden(v, h, i, rows);
      const Fp8Copy g8 = linear_.cast_activation(activation(), h, rows, F);
      here.reset();
      linear_.forward(out + i * C, g8, down8, schedule_.weight_if_any(at.down_bias), residual + i * C, rows, C, F);
      continue;
    }
    Buffer<T> scratch;
    if (!v->g) scratch = mem.take<T>(rows * F, "activated");
    T* g = v->g ? v->g + i * F : scratch.get();
    if (c_.arch == Arch::llama) {
      ops::matmul_swiglu<T>(s, g, h, hidden, in + i * C, schedule_.weight(at.up), rows, F, C);
    } else {
      ops::matmul_gelu<T>(s, g, h, hidden, in + i * C, schedule_.weight(at.up), schedule_.weight_if_any(at.up_bias),
                          rows, F, C);
    }
    if (v->h8) save_hidden(v, h, i, rows);
    here.reset();
    ops::matmul<T>(s, out + i * C, g, schedule_.weight(at.down), schedule_.weight_if_any(at.down_bias),
                   residual + i * C, rows, C, F);
  }
  if (keep && c_.keep_cheap) v->n2 = std::move(n);
  else n.reset();
  if (!keep || !c_.keeps_middle()) v->x2.reset();
  return out;
}

template <class T, class G>
Buffer<T> BlockMlp<T, G>::forward_turn(int64_t block, Saved<T>* v, bool keep) {
  const Turn& t = schedule_.take_turn(Turn::forward, c_.mlp_module(block));
  schedule_.gather(t), schedule_.use(t);
  Buffer<T> n;
  if (c_.attends()) {
    n = middle(block, v, keep);
    if (!keep) v->x.reset();
  }
  Buffer<T> out = forward(block, v, std::move(n), keep);
  blocks_.watch.look_at(t.module, out.get(), M_ * c_.dim);
  schedule_.release(t);
  return out;
}

template <class T, class G>
void BlockMlp<T, G>::recompute_turn(int64_t block, Saved<T>* v) {
  const Turn& t = schedule_.take_turn(Turn::recompute, c_.mlp_module(block));
  schedule_.gather(t), schedule_.use(t);
  {
    MarkedRecomputation marked(dev_);
    middle(block, v, /*keep=*/false);
  }
  schedule_.release(t);
}

// ------------------------------------------------------------------------------------------------------------ backward

// The gradient of the hidden layer exists for rows_ rows at a time, so the MLP's gradients are sums over such pieces.
// They are summed in fp32 and rounded to G once: the number of pieces follows from memory, and should not show in a
// gradient. The pieces are the same whether the hidden layer is kept or recomputed: the same sums, so the same bits.
template <class T, class G>
void BlockMlp<T, G>::backward_turn(int64_t block, Saved<T>* v, T* dx) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const BlockParams& at = blocks_.params[size_t(block)];
  const int64_t C = c_.dim, F = c_.hidden, UP = c_.hidden_row();
  const Turn& t = schedule_.take_turn(Turn::gradient, c_.mlp_module(block));
  schedule_.gather(t), schedule_.use(t);
  schedule_.gradient(t);
  Sums all;
  const bool several = !std::is_same_v<G, A> && rows_ < M_;
  if (several && !at.down.frozen) all.down = mem.take<A>(C * F, "gradient of the MLP");
  auto take_up = [&] {
    all.up8 = blocks_.cast_weight(at.up, UP, C, Sides::columns);
    if (!several) return;
    if (!at.up.frozen) all.up = mem.take<A>(UP * C, "gradient of the MLP");
    if (at.up_bias.exists()) all.up_bias = mem.take<A>(F, "gradient of the MLP's bias");
    if (at.norm2.exists()) all.norm = mem.take<A>(C, "gradient of the MLP's norm");
    if (at.norm2_bias.exists()) all.norm_bias = mem.take<A>(C, "gradient of the MLP's norm");
  };
  auto round = [&](const ParamRef& p, Buffer<A>* sum, int64_t n) {
    if constexpr (!std::is_same_v<G, A>)
      if (*sum && !p.frozen) ops::cast<G, A>(s, schedule_.grad(p), *sum, n);
    sum->reset();
  };
  dev_.mark("MLP, backward");
  const int64_t kept = kept_rows(block);
  if (kept < M_ && !v->h8) schedule_.remark(t.uses, "recompute MLP");
  if (at.down_bias.exists())
    blocks_.bias_grad(schedule_.grad(at.down_bias), dx, M_, C, /*accumulate=*/false,
                      blocks_.late_bias(at.down_bias, M_, C));
  all.down8 = blocks_.cast_weight(at.down, C, F, Sides::columns);
  // Kept, the hidden layer holds its own gradient when it has been through the activation: the two halves then follow
  // each other, and their sums need not live together. In fp8 the gradient has a place of its own.
  const bool apart = kept == M_ && !casts_activation(at);
  for (int64_t i = 0; i < M_; i += rows_) {
    const int64_t rows = std::min(rows_, M_ - i);
    Buffer<T> recomputed;
    if (i >= kept) recomputed = v->h8 ? restore_hidden(*v, i, rows) : recompute_hidden(block, v, i, rows);
    T* h = recomputed ? recomputed.get() : v->h + i * UP;
    Fp8Copy dh8 = activation_backward(block, dx + i * C, h, v->g ? v->g + i * F : nullptr, i, rows, &all);
    if (apart) continue;
    if (i == 0) take_up();
    up_backward(block, v, dx + i * C, h, std::move(dh8), i, rows, all);
    if (i + rows >= kept) v->h.reset();
  }
  v->g.reset(), all.down8 = Fp8Copy();
  round(at.down, &all.down, C * F);
  if (apart) {
    take_up();
    for (int64_t i = 0; i < M_; i += rows_)
      up_backward(block, v, dx + i * C, v->h + i * UP, Fp8Copy(), i, std::min(rows_, M_ - i), all);
  }
  v->h.reset(), v->h8.reset(), v->h8_unscales.reset(), all.up8 = Fp8Copy();
  round(at.up, &all.up, UP * C), round(at.up_bias, &all.up_bias, F);
  round(at.norm2, &all.norm, C), round(at.norm2_bias, &all.norm_bias, C);
  schedule_.release(t);
  schedule_.reduce(t);
  v->x2.reset(), v->n2.reset(), v->stats2.reset(), v->largest2.reset();
}

// Rows [i, i + rows): dx (rows, C), the gradient of the MLP's output, through W2 and the activation. h (rows, F or 2F)
// becomes its own gradient, or that is returned in fp8. kept: what the activation made (rows, F), or null. Adds to W2's
// gradient. Where it can, sums up W1's bias beside it.
template <class T, class G>
Fp8Copy BlockMlp<T, G>::activation_backward(int64_t block, const T* dx, T* h, T* kept, int64_t i, int64_t rows,
                                            Sums* all) {
  Stream& s = dev_.compute();
  const BlockParams& at = blocks_.params[size_t(block)];
  const int64_t C = c_.dim, F = c_.hidden;
  dev_.mark("MLP, backward");
  Buffer<T> scratch;
  if (!kept) scratch = dev_.mem.take<T>(rows * F, "gradient of activated, then activated");
  T* g = kept ? kept : scratch.get();
  const Fp8Copy dx8 = linear_.cast_gradient(dx, rows, C);
  const auto late = blocks_.late_bias(at.up_bias, rows, F);
  const bool fuses = !c_.fp8 && !late.pieces;
  if (!fuses) linear_.dgrad(g, dx, dx8, blocks_.weight(at.down), all->down8, rows, C, F, /*accumulate=*/false);
  if (casts_activation(at)) {
    auto of = linear_.cast_activation_backward(activation(), g, h, rows, F);
    scratch.reset();
    if (all->down) linear_.wgrad(all->down.get(), dx8, of.g, rows, C, F, i > 0);
    else if (!at.down.frozen) linear_.wgrad(schedule_.grad(at.down), dx8, of.g, rows, C, F, i > 0);
    return std::move(of.dh);
  }
  if (fuses)
    ops::matmul_dgrad_activation<T>(s, activation(), g, kept ? ops::Activated::given : ops::Activated::made, h, dx,
                                    schedule_.weight(at.down), rows, C, F);
  else if (c_.arch == Arch::llama) ops::swiglu_backward<T>(s, g, h, rows, F);
  else if (late.pieces) {
    ops::gelu_backward<T, G>(s, g, h, rows, F, schedule_.grad(at.up_bias), late.pieces, late.sums);
    all->up_bias_summed = true;
  } else ops::gelu_backward<T>(s, g, h, rows * F);
  if (all->down) linear_.wgrad(all->down.get(), dx, dx8, g, rows, C, F, i > 0);
  else blocks_.wgrad(at.down, dx, dx8, g, rows, C, F, i > 0);
  return Fp8Copy();
}

// Rows [i, i + rows): dh (rows, F or 2F) through W1 and the norm. dx (rows, C) arrives as the gradient of the MLP's
// output and leaves as that of its input, which has come past the MLP too. Adds to the gradients of W1 and the norm.
// dh8: dh in fp8, if that is all there is of it.
template <class T, class G>
void BlockMlp<T, G>::up_backward(int64_t block, Saved<T>* v, T* dx, const T* dh, Fp8Copy dh8, int64_t i, int64_t rows,
                                 const Sums& all) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const BlockParams& at = blocks_.params[size_t(block)];
  const int64_t C = c_.dim, F = c_.hidden, UP = c_.hidden_row();
  const bool normed = c_.attends(), more = i > 0;
  Buffer<T> made;
  T* n = v->n2 ? v->n2 + i * C : nullptr;  // then its gradient
  if (normed && !n) {
    dev_.mark("norms, backward");
    made = input(block, v, i, rows, "normed, then its gradient");
    n = made.get();
    dev_.mark("MLP, backward");
  }
  const T* in = normed ? n : v->x + i * C;
  if (!dh8) dh8 = linear_.cast_gradient(dh, rows, UP);
  const auto of_in = blocks_.maxima(v->largest2, i, rows);
  if (all.up) linear_.wgrad(all.up.get(), dh, dh8, in, rows, UP, C, more, of_in);
  else blocks_.wgrad(at.up, dh, dh8, in, rows, UP, C, more, of_in);
  if (at.up_bias.exists() && !all.up_bias_summed) {
    if (all.up_bias) blocks_.bias_grad(all.up_bias.get(), dh, rows, F, more);
    else blocks_.bias_grad(schedule_.grad(at.up_bias), dh, rows, F, more, blocks_.late_bias(at.up_bias, rows, F));
  }
  // What came down the residual stream, past the MLP, stands in dx: the product adds to it, or a kernel of its own.
  if (!normed && !dev_.fuse) made = mem.take<T>(rows * C, "gradient of the MLP's input"), n = made.get();
  T* dn = n ? n : dx;
  linear_.dgrad(dn, dh, dh8, blocks_.weight(at.up), all.up8, rows, UP, C, dn == dx);
  if (!normed) return n ? ops::add<T>(s, dx, dx, n, rows * C) : void();
  dev_.mark("norms, backward");
  auto through_norm = [&](auto* dgamma, auto* dbeta, auto late) {
    blocks_.norm_backward(dx, dgamma, dbeta, n, v->x2 + i * C, v->stats2 + 2 * i, schedule_.weight(at.norm2), rows,
                          more, late);
  };
  if (all.norm) return through_norm(all.norm.get(), all.norm_bias.get(), typename Schedule<T, A>::LateSums());
  through_norm(schedule_.grad(at.norm2), schedule_.grad_if_any(at.norm2_bias),
               blocks_.late_norm(at.norm2, at.norm2_bias, rows));
}

// The norm of rows [i, i + rows) of the block's middle, from the statistics that the forward pass has left.
template <class T, class G>
Buffer<T> BlockMlp<T, G>::input(int64_t block, Saved<T>* v, int64_t i, int64_t rows, const char* name) {
  const BlockParams& at = blocks_.params[size_t(block)];
  Buffer<T> n = dev_.mem.take<T>(rows * c_.dim, name);
  ops::norm_apply<T>(dev_.compute(), blocks_.norm, n, v->stats2 + 2 * i, v->x2 + i * c_.dim, schedule_.weight(at.norm2),
                     schedule_.weight_if_any(at.norm2_bias), rows, c_.dim);
  return n;
}

// W1 n (rows, F or 2F), in the pieces that the forward pass made it in: the same products, so the same bits.
template <class T, class G>
Buffer<T> BlockMlp<T, G>::recompute_hidden(int64_t block, Saved<T>* v, int64_t i, int64_t rows) {
  MarkedRecomputation marked(dev_);
  const BlockParams& at = blocks_.params[size_t(block)];
  const int64_t C = c_.dim, UP = c_.hidden_row();
  Buffer<T> n;
  dev_.mark("norms");
  if (c_.attends()) n = input(block, v, i, rows, "normed");
  dev_.mark("MLP");
  Buffer<T> h = dev_.mem.take<T>(rows * UP, "MLP hidden");
  const T* in = n ? n.get() : v->x + i * C;
  const Fp8Copy up8 = blocks_.cast_weight(at.up, UP, C, Sides::rows);
  for (int64_t j = 0, some; j < rows; j += some) {
    some = forward_piece(i + j);
    linear_.forward(h + j * UP, in + j * C, blocks_.weight(at.up), up8, schedule_.weight_if_any(at.up_bias), nullptr,
                    some, UP, C, blocks_.maxima(v->largest2, i + j, some));
  }
  return h;
}

// Rows [i, i + rows), a piece of the forward pass, in fp8 and back. The gradient is then of a layer that is rounded;
// the forward pass goes on with the one that is not.
template <class T, class G>
void BlockMlp<T, G>::save_hidden(Saved<T>* v, const T* h, int64_t i, int64_t rows) {
  const int64_t UP = c_.hidden_row();
  Buffer<float> amax = dev_.mem.take<float>(1, "fp8, largest number");
  linear_.find_amax(amax, h, rows * UP);
  float* const unscale = v->h8_unscales + forward_piece_number(i);
  ops::to_fp8<T>(dev_.compute(), {Dtype::e4m3, v->h8 + i * UP, nullptr, unscale}, h, amax, rows, UP);
}
template <class T, class G>
Buffer<T> BlockMlp<T, G>::restore_hidden(const Saved<T>& v, int64_t i, int64_t rows) {
  const int64_t UP = c_.hidden_row();
  Buffer<T> h = dev_.mem.take<T>(rows * UP, "MLP hidden");
  for (int64_t j = 0, some; j < rows; j += some) {
    some = forward_piece(i + j);
    const float* const unscale = v.h8_unscales + forward_piece_number(i + j);
    ops::from_fp8<T>(dev_.compute(), h + j * UP, {Dtype::e4m3, v.h8 + (i + j) * UP, unscale}, some * UP);
  }
  return h;
}

template class BlockMlp<float, float>;
template class BlockMlp<bf16, bf16>;
template class BlockMlp<bf16, float>;
template class BlockMlp<double, double>;
