// --eval: sequences whose losses are wanted, dealt out to the ranks, each computed once; and what is made of them. The
// result does not depend on the number of ranks: the losses of a sequence are added up on the host, and sequences in
// their order.
//
//   std::unique_ptr<EvalSet> set = open_eval("val.bin", model.vocab, model.seq);
//   const Finding f = evaluated(*set, sequence_losses(dev, world, model, config, batch, *set));  // collective
//   note(f.line);   // "evaluated val.bin: loss 2.137142, perplexity 8.4752, ..."
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "lib/program/data.h"
#include "lib/program/finding.h"
#include "lib/program/step.h"

struct EvalSet {
  virtual ~EvalSet() = default;
  TokenKind kind = {};     // of its tokens
  std::string names = {};  // its files, as they were asked for
  virtual int64_t sequences() const = 0;
  // seq numbers each. A target of -1 is not wanted, and has no loss.
  virtual void sequence(int64_t i, int32_t* inputs, int32_t* targets) const = 0;
  // losses: of each sequence, the sum over its targets, in nats; finite.
  virtual Finding result(const std::vector<double>& losses) const = 0;
};

// names: text or token files (as data_files takes them; several are one), every token of which but the first is a
// target once: mean loss, perplexity, bits per byte of the text; or a file of questions (hellaswag.h): how many are
// answered right, by the lowest mean loss of an answer's tokens. Throws UsageError as open_whole_corpus and
// read_questions do.
std::unique_ptr<EvalSet> open_eval(const std::string& names, int64_t vocab, int64_t seq, Reader reader = {});

// What is made of the losses of all sequences; of some that are not finite, what is wrong.
Finding evaluated(const EvalSet& set, const std::vector<double>& losses);

// A micro-batch on its way: two take turns, so that the device computes while the host prepares and adds up.
template <class A>
struct EvalInFlight {
  HostBuffer<int32_t> batch;
  HostBuffer<A> losses;  // of each row
  Event copied, done;
  int64_t first = -1;  // the sequence in its first row; -1: none
  EvalInFlight(Device& dev, int64_t ints, int64_t rows) : batch(dev, ints), losses(dev, rows), copied(dev), done(dev) {}
};

// Every sequence's sum of losses, on all ranks. Collective, in Mode::run, with the model's memory as validation takes
// it. What a rank throws, others cannot know of: call it within or_abort.
template <class T, class G>
std::vector<double> sequence_losses(Device& dev, const World& world, Model<T, G>& model, const ModelConfig& config,
                                    int64_t batch, const EvalSet& set) {
  using A = acc_t<T>;
  const int64_t T_ = config.seq, M = batch * T_, all = set.sequences(), stride = batch * world.size;
  std::vector<double> sums;  // this rank's, in the order of its rows
  EvalInFlight<A> slots[2] = {{dev, batch_ints(config, batch), M}, {dev, batch_ints(config, batch), M}};
  auto collect = [&](EvalInFlight<A>& was) {
    if (was.first < 0) return;
    synchronize(was.done);
    dev.check();
    const MicroBatch b = micro_batch_at(was.batch.get(), M);
    for (int64_t i = 0; i < batch && was.first + i < all; i++) {
      double sum = 0;
      for (int64_t t = i * T_; t < (i + 1) * T_; t++)
        if (b.targets[t] >= 0) sum += double(was.losses[t]);
      sums.push_back(sum);
    }
    was.first = -1;
  };
  int64_t turn = 0;
  for (int64_t at = 0; at < all; at += stride, turn++) {
    EvalInFlight<A>& now = slots[turn % 2];
    collect(now);
    now.first = at + world.rank * batch;
    const MicroBatch b = micro_batch_at(now.batch.get(), M);
    std::fill(b.tokens, b.tokens + M, 0);
    std::fill(b.targets, b.targets + M, -1);
    for (int64_t i = 0; i < batch && now.first + i < all; i++)
      set.sequence(now.first + i, b.tokens + i * T_, b.targets + i * T_);
    validation_program(dev, model, now.batch.get(), /*first=*/true, now.copied, now.losses.get());
    dev.compute().record(now.done);
  }
  for (int64_t i = 0; i < 2; i++) collect(slots[(turn + i) % 2]);
  model.fsdp.empty_slots();

  std::vector<double> losses(static_cast<size_t>(all));
  const std::string mine(reinterpret_cast<const char*>(sums.data()), sums.size() * sizeof(double));
  const std::vector<std::string> of_ranks = world.size > 1 ? gather_texts(mine) : std::vector<std::string>{mine};
  for (int64_t i = 0; i < all; i++) {
    const int64_t rank = i % stride / batch, row = i / stride * batch + i % batch;
    std::memcpy(&losses[size_t(i)], of_ranks[size_t(rank)].data() + row * int64_t(sizeof(double)), sizeof(double));
  }
  return losses;
}
