#include "model.h"

#include <algorithm>

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
      batch_(micro_batch_at(dev.mem.keep<int32_t>(batch_ints(config, batch), "tokens", Purpose::workspace), M_)),
      loaded_(dev),
      indexed_(dev),
      loss_sum_(dev.mem.keep<A>(1, "loss", Purpose::workspace)),
      last_of_backward_(last_of_backward(config)),
      watch_(dev, config.modules()),
      schedule_(dev, c_, fsdp),
      blocks_(dev, c_, M_, schedule_, watch_),
      attention_(blocks_, batch_.targets),
      pieces_(pieces_of(config, batch, int64_t(sizeof(T)))),
      mlp_(blocks_, pieces_),
      embedding_(schedule_.find("embedding.weight")),
      head_(config.tied ? embedding_ : schedule_.find("head.weight")),
      head_norm_(schedule_.find("head.norm")),
      head_norm_bias_(schedule_.find("head.norm.bias")) {}

template <class T, class G>
void Model<T, G>::init_weights() {
  attention_.init();
  fsdp.init_weights();
}

// Ints [from, to) of a micro-batch.
template <class T, class G>
void Model<T, G>::load(Stream& s, const int32_t* host, int64_t from, int64_t to) {
  constexpr int64_t small = int64_t(512) << 10;
  const int64_t bytes = (to - from) * int64_t(sizeof(int32_t));
  if (bytes <= small) s.copy_by_kernel(batch_.tokens + from, host + from, bytes);
  else s.copy(batch_.tokens + from, host + from, bytes);
}

// The index of a large vocabulary takes longer than the tokens, and nobody needs it before the backward pass: it is
// copied beside the forward pass. `copied` tells the host when it may fill in the next micro-batch; it does not wait
// for it here.
template <class T, class G>
Buffer<T> Model<T, G>::load_and_embed(const int32_t* host, Event& copied) {
  const int64_t index = batch_.index - batch_.tokens;
  load(dev_.compute(), host, 0, index);
  dev_.compute().record(loaded_);
  Buffer<T> x = embed();
  Stream& beside = dev_.reduce();
  beside.wait(loaded_);
  load(beside, host, index, batch_ints(c_, M_ / c_.seq));
  beside.record(indexed_);
  beside.record(copied);
  return x;
}

// ------------------------------------------------------------------------------------------------------- the step

// Read from top to bottom this is the step: what a block saves is handed from its forward to its backward and dies
// there, so activations are at their most in the head, and shrink block by block behind it.
template <class T, class G>
void Model<T, G>::forward_backward(const int32_t* host, double scale, bool first, bool last, Event& copied) {
  std::vector<Saved<T>> saved(static_cast<size_t>(c_.depth));
  auto goes_back = [&](int64_t block) { return c_.mlp_module(block) >= last_of_backward_; };
  if (first && attention_.counts()) attention_.begin_counting();

  dev_.mem.phase("forward");
  schedule_.begin_training(last);
  Buffer<T> x = load_and_embed(host, copied);
  for (int64_t i = 0; i < c_.depth; i++) x = block_forward(i, &saved[size_t(i)], std::move(x), goes_back(i));
  if (attention_.counts()) attention_.count_kept(saved);
  if (last && attention_.counts()) attention_.sum_counts(&fsdp);

  dev_.compute().wait(indexed_);
  dev_.mem.phase("head");
  schedule_.begin_backward();
  x = head(Pass::training, std::move(x), scale, first);

  for (int64_t i = c_.depth - 1; i >= 0 && goes_back(i); i--) {
    dev_.mem.phase(strf("backward of block %lld", static_cast<long long>(i)));
    x = block_backward(i, std::move(saved[size_t(i)]), std::move(x));
  }
  if (last_of_backward_ == 0) {
    dev_.mem.phase("backward of the embedding");
    embed_backward(std::move(x));
  }
  x.reset();
  schedule_.end_micro_batch();
}

// The same forward pass without a backward: nothing is kept, every unit is resharded, so validation fits where training
// does. Up to the head.
template <class T, class G>
Buffer<T> Model<T, G>::forward(const int32_t* host, Event& copied) {
  schedule_.begin_evaluation();
  Buffer<T> x = load_and_embed(host, copied);
  for (int64_t i = 0; i < c_.depth; i++) x = block_forward(i, nullptr, std::move(x), /*keep=*/false);
  dev_.compute().wait(indexed_);
  return x;
}

template <class T, class G>
void Model<T, G>::evaluate(const int32_t* host, bool first, Event& copied, A* row_losses) {
  dev_.mem.phase("validation");
  head(Pass::evaluation, forward(host, copied), /*scale=*/0, first, row_losses);
  schedule_.end_micro_batch();
}

template <class T, class G>
void Model<T, G>::next_logits(const int32_t* host, int64_t row, A* logits, Event& copied) {
  dev_.mem.phase("sample");
  head_of_row(forward(host, copied), row, logits);
  schedule_.end_micro_batch();
}

// The loss rides along with the gradient norm: one all_reduce for both.
template <class T, class G>
void Model<T, G>::end_step() {
  dev_.mem.phase("optimizer");
  dev_.mark("optimizer");
  ops::cast(dev_.compute(), &fsdp.scalars()->loss, loss_sum_, 1);
  fsdp.end_step();
  watch_.end();
}

// The step behind a validation must gather what it would have gathered without one: a step that is recorded as a graph
// cannot count on what happens to be resident.
template <class T, class G>
void Model<T, G>::finish_evaluation() {
  ops::cast(dev_.compute(), &fsdp.scalars()->loss, loss_sum_, 1);
  fsdp.sum_scalars();
  fsdp.empty_slots();
}

// ------------------------------------------------------------------------------------------------------- embedding

// tokens (M) -> x (M, C). Positions are added here by the architecture that has them in the residual stream.
template <class T, class G>
Buffer<T> Model<T, G>::embed() {
  const Turn& t = schedule_.take_turn(Turn::forward, 0);
  Buffer<T> x = dev_.mem.take<T>(M_ * c_.dim, "block input", Purpose::activations);
  schedule_.gather(t), schedule_.use(t);
  dev_.mark("embedding");
  ops::embedding_forward(dev_.compute(), x.get(), schedule_.weight(embedding_), batch_.tokens, M_, c_.seq, c_.dim,
                         c_.arch == Arch::simple);
  watch_.look_at(0, x.get(), M_ * c_.dim);
  schedule_.release(t);
  return x;
}

// dx (M, C) -> the embedding's gradient: each row of it is a sum over the places of its token, in their order, so two
// runs agree bit for bit. Tied, it adds to what the head has left there.
template <class T, class G>
void Model<T, G>::embed_backward(Buffer<T> dx) {
  const Turn& t = schedule_.take_turn(Turn::gradient, 0);
  Buffer<A> partials = dev_.mem.take<A>(ops::embedding_partials(M_, c_.dim), "partial sums");
  const ops::TokenIndex index = ops::token_index_at(batch_.index, M_, c_.vocab);
  // Of a large vocabulary a micro-batch has few tokens: what its owners read need not be written as zeros first.
  ops::UsedRows used = {index.start, c_.vocab, c_.dim};
  if (c_.vocab < M_ || embedding_.frozen || !schedule_.takes_rows(t, used)) used = {};
  schedule_.gradient(t);
  dev_.mark("embedding, backward");
  if (!embedding_.frozen)
    ops::embedding_backward(dev_.compute(), schedule_.grad(embedding_), dx.get(), index, partials.get(), M_, c_.vocab,
                            c_.dim,
                            c_.tied      ? ops::TableRows::add
                            : used.start ? ops::TableRows::used
                                         : ops::TableRows::all);
  schedule_.reduce(t, used);
}

// ----------------------------------------------------------------------------------------------------------- block

// x (M, C) -> the next block's input. keep: something of this block is trained, so its backward will come.
template <class T, class G>
Buffer<T> Model<T, G>::block_forward(int64_t block, Saved<T>* saved, Buffer<T> x, bool keep) {
  Saved<T> here;
  Saved<T>* v = keep ? saved : &here;
  v->x = std::move(x);
  if (c_.attends()) attention_.forward_turn(block, v, keep);
  return mlp_.forward_turn(block, v, keep);
}

// dx arrives as the gradient of the block's output and leaves, in the same buffer, as that of its input.
template <class T, class G>
Buffer<T> Model<T, G>::block_backward(int64_t block, Saved<T> v, Buffer<T> dx) {
  if (c_.attends() && !c_.keeps_middle()) attention_.recompute_turn(block, &v), mlp_.recompute_turn(block, &v);
  mlp_.backward_turn(block, &v, dx);
  if (c_.attends()) attention_.backward_turn(block, &v, dx);
  return dx;
}

// ------------------------------------------------------------------------------------------------------------ head

// Final norm, logits, loss, and back again to the gradient of x, chunk by chunk: no more than Pieces::logits rows of
// logits ever exist.
template <class T, class G>
Buffer<T> Model<T, G>::head(Pass pass, Buffer<T> x, double scale, bool first, A* row_losses) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const int64_t M = M_, C = c_.dim, V = c_.vocab;
  const bool backward = pass == Pass::training;
  const int64_t chunk = pieces_.logits;
  const Turn& t = schedule_.take_turn(backward ? Turn::gradient : Turn::forward, c_.head_module());
  schedule_.gather(t), schedule_.use(t);
  dev_.mark("head and loss");
  Buffer<A> stats = mem.take<A>(2 * M, "final statistics"), losses = mem.take<A>(M, "losses");
  Buffer<T> n = mem.take<T>(M * C, "final normed, then its gradient");
  ops::norm_forward<T>(s, blocks_.norm, n, nullptr, stats, x, nullptr, schedule_.weight(head_norm_),
                       schedule_.weight_if_any(head_norm_bias_), M, C, c_.norm_eps);
  if (backward) schedule_.gradient(t);
  {
    Buffer<T> logits = mem.take<T>(chunk * V, "logits of a chunk");
    // Logits and their gradient share one buffer; each chunk's dx takes the place of its n, which is read for the last
    // time. Chunks are summed in the accumulation type: a sum of many roundings to bf16 would lose what they add.
    const bool wide = backward && !head_.frozen && !std::is_same_v<G, A> && chunk < M;
    Buffer<A> sum;
    if (wide) sum = mem.take<A>(V * C, "head's gradient");
    for (int64_t i = 0; i < M; i += chunk) {
      const int64_t rows = std::min(chunk, M - i);
      ops::matmul<T>(s, logits, n + i * C, schedule_.weight(head_), nullptr, nullptr, rows, V, C);
      ops::cross_entropy<T>(s, logits, losses + i, batch_.targets + i, A(scale), backward, rows, V);
      if (!backward) continue;
      if (wide) ops::matmul_wgrad<T, A>(s, sum, logits, n + i * C, rows, V, C, i > 0);
      else if (!head_.frozen) ops::matmul_wgrad<T, G>(s, schedule_.grad(head_), logits, n + i * C, rows, V, C, i > 0);
      ops::matmul_dgrad<T>(s, n + i * C, logits, schedule_.weight(head_), rows, V, C);
    }
    if constexpr (!std::is_same_v<G, A>)
      if (wide) ops::cast<G, A>(s, schedule_.grad(head_), sum, V * C);
  }
  {
    Buffer<A> partials = mem.take<A>(ops::sum_partials(), "partial sums");
    ops::sum<A>(s, loss_sum_, losses, partials, M, !first);
    watch_.look_at(t.module, loss_sum_, 1);
  }
  if (row_losses) s.copy(row_losses, losses.get(), M * int64_t(sizeof(A)));
  if (!backward) {
    schedule_.release(t);
    return Buffer<T>();
  }
  const auto late = blocks_.late_norm(head_norm_, head_norm_bias_, M);
  Buffer<A> partials;
  if (!late.pieces) partials = mem.take<A>(ops::norm_backward_partials(blocks_.norm, M, C), "partial sums");
  ops::norm_backward<T, G>(s, blocks_.norm, n, schedule_.grad(head_norm_), schedule_.grad_if_any(head_norm_bias_), n,
                           nullptr, x, stats, schedule_.weight(head_norm_), late.pieces ? late.pieces : partials.get(),
                           M, C, /*accumulate=*/false, late.sums);
  schedule_.release(t);
  schedule_.reduce(t);
  return n;
}

// The head of one row alone: its logits are all that exist.
template <class T, class G>
void Model<T, G>::head_of_row(Buffer<T> x, int64_t row, A* logits) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const int64_t C = c_.dim, V = c_.vocab;
  const Turn& t = schedule_.take_turn(Turn::forward, c_.head_module());
  schedule_.gather(t), schedule_.use(t);
  dev_.mark("head of a sample");
  Buffer<A> stats = mem.take<A>(2, "final statistics"), wide = mem.take<A>(V, "logits in fp32");
  Buffer<T> n = mem.take<T>(C, "final normed"), narrow = mem.take<T>(V, "logits");
  ops::norm_forward<T>(s, blocks_.norm, n, nullptr, stats, x + row * C, nullptr, schedule_.weight(head_norm_),
                       schedule_.weight_if_any(head_norm_bias_), 1, C, c_.norm_eps);
  ops::matmul<T>(s, narrow, n, schedule_.weight(head_), nullptr, nullptr, 1, V, C);
  ops::cast<A, T>(s, wide, narrow, V);
  s.copy(logits, wide.get(), V * int64_t(sizeof(A)));
  schedule_.release(t);
}

template class Model<float, float>;
template class Model<bf16, bf16>;
template class Model<bf16, float>;
template class Model<double, double>;
