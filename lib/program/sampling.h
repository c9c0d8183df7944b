// --sample: text by the model that is being trained. A token costs a forward pass, in which units are gathered and
// resharded as in a validation, so no rank ever has the model whole; there is no cache of keys and values. All ranks
// compute the same logits; rank 0 draws the token and tells the others.
//
//   const std::vector<int32_t> prompt = parse_prompt("Once upon", *data, model.vocab);
//   Writer<T, G> writer(dev, world, model, config, batch);
//   const std::vector<int32_t> tokens = writer.write(prompt, 200, {0.8, 40, seed, step, vocab});   // collective
//   note(sample_finding(tokens, prompt.size() + 200, *data, step).line);
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "lib/program/data.h"
#include "lib/program/finding.h"
#include "lib/program/step.h"

struct Draw {
  double temperature;  // 0: the most likely token
  int64_t top_k;       // among so many of the most likely; 0: all
  uint64_t seed;
  int64_t step;   // so that samples of several steps differ
  int64_t vocab;  // tokens below it alone: rows of the head that no tokenizer uses are never drawn
};
// The token at place `at` of what is written, from n logits; of tokens as likely as each other the lowest first. The
// same for the same draw and place. -1: no logit is a number.
int32_t draw_token(const float* logits, int64_t n, const Draw& draw, int64_t at);

// Whether the tokens of a corpus are bytes of text.
bool is_text(const Corpus& data);
// How many of the model's tokens mean something: the tokenizer's, where the data says how many it has.
int64_t used_vocab(const Corpus& data, int64_t vocab);
// --prompt as tokens: text where tokens are bytes, else token ids with commas or blanks between them. Empty: what
// begins a document. Throws UsageError: no such id; empty, and nothing says what begins a document.
std::vector<int32_t> parse_prompt(const std::string& prompt, const Corpus& data, int64_t vocab);
// As people read it: text, in which control characters and bytes that are no UTF-8 are replaced by signs that a
// terminal can show; or ids.
std::string sample_text(const std::vector<int32_t>& tokens, bool text);
// "sample after step 20: ..."; and, where there are fewer tokens than were wanted, why.
Finding sample_finding(const std::vector<int32_t>& tokens, int64_t wanted, const Corpus& data, int64_t step);

template <class T, class G>
class Writer {
 public:
  // The model, its sizes and its micro-batch.
  Writer(Device& dev, const World& world, Model<T, G>& model, const ModelConfig& config, int64_t batch)
      : dev_(dev),
        world_(world),
        model_(model),
        c_(config),
        M_(batch * config.seq),
        batch_(dev, batch_ints(c_, batch)),
        logits_(dev, c_.vocab),
        copied_(dev),
        done_(dev) {}

  // The prompt and n tokens behind it; fewer where no logit is a number. Collective, in Mode::run, between steps. What
  // does not fit into a sequence is forgotten from its beginning.
  std::vector<int32_t> write(std::vector<int32_t> tokens, int64_t n, const Draw& draw) {
    for (int64_t i = 0; i < n; i++) {
      const int64_t length = std::min(c_.seq, int64_t(tokens.size()));
      int32_t* row = micro_batch_at(batch_.get(), M_).tokens;  // the first; the others are padding
      std::copy(tokens.end() - length, tokens.end(), row);
      sample_program(dev_, model_, batch_.get(), length - 1, logits_.get(), copied_);
      dev_.compute().record(done_);
      synchronize(done_);
      dev_.check();
      int32_t token = draw_logits(draw, int64_t(tokens.size()));
      if (world_.size > 1) token = std::stoi(broadcast_text(std::to_string(token)));
      if (token < 0) break;
      tokens.push_back(token);
    }
    model_.fsdp.empty_slots();
    return tokens;
  }

 private:
  int32_t draw_logits(const Draw& draw, int64_t at) const {
    const std::vector<float> logits(logits_.get(), logits_.get() + draw.vocab);
    return draw_token(logits.data(), draw.vocab, draw, at);
  }

  Device& dev_;
  const World& world_;
  Model<T, G>& model_;
  const ModelConfig& c_;
  int64_t M_;
  HostBuffer<int32_t> batch_;
  HostBuffer<acc_t<T>> logits_;
  Event copied_, done_;
};
