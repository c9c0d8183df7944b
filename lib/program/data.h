// Tokens: text as bytes, token files (token_file.h), a built-in synthetic corpus, uniform random tokens. Several files
// are one that holds them all, one behind the other.
//
// Batches come from one global order that depends on the seed and on nothing else: window i of epoch e holds tokens
// [p*T, p*T + T] where p is place i of a permutation of the windows keyed by (seed, e). Sequence number n of the run
// (n = step * global_batch + row) is window n mod windows of epoch n / windows. Which rank reads it is not part of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lib/program/data_files.h"

// What is known of the tokens is of all that was opened, whatever part of it this is.
struct Corpus : TokenKind {
  virtual ~Corpus() = default;
  // Writes tokens [first, first + n) to out. Of a file, throws Error that names it and the byte: it cannot be read, or
  // was cut or written to since it was opened; a token that is not below the vocabulary.
  virtual void read(int64_t first, int64_t n, int32_t* out) const = 0;
  std::function<void(const std::string&)> warn = {};  // is told, once, that a file was removed while it is open
  int64_t count = 0;                                  // tokens
  std::string description;
  int64_t text_bytes = -1, end_of_document = -1;  // as TokenHeader's
  std::vector<DataFile> files = {};
};

enum class Split { all, training, validation };  // validation: the last tenth; training: the rest
struct Reader {                                  // which part of a file's tokens is checked when it is opened
  int rank = 0, ranks = 1;
  bool checked = false;  // they were, when the other part was opened: none
};
// names: as data_files takes them; "" the synthetic corpus; "random" uniform tokens below vocab. Throws UsageError
// (missing, empty, fewer than seq + 1 tokens, wrong magic, truncated, a vocabulary larger than the model's, a token at
// or above it: file, offset, what to do; files that differ in kind). The last tenth is cut off at a multiple of seq.
std::unique_ptr<Corpus> open_corpus(const std::string& names, int64_t vocab, int64_t seq, uint64_t seed, Split split,
                                    Reader reader = {});
// Files alone, and all of them, however short: two tokens are enough.
std::unique_ptr<Corpus> open_whole_corpus(const std::string& names, int64_t vocab, Reader reader = {});

struct Sampler {
  const Corpus* corpus;
  int64_t seq;
  uint64_t seed;
  bool shuffle = true;  // validation reads in order
  int64_t windows() const { return (corpus->count - 1) / seq; }
  // inputs (seq) and targets (seq, shifted by one) of sequence number n of the run.
  void sequence(int64_t n, int32_t* inputs, int32_t* targets) const;
};
// Place i of a permutation of [0, n) keyed by key: a Feistel network that walks its cycle back into range.
int64_t permute(int64_t i, int64_t n, uint64_t key);
