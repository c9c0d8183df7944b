// Tokens: text as bytes, token files, a built-in synthetic corpus, uniform random tokens.
//
// Token file, little endian: 8 bytes "TOKENS01", uint32 bytes a token (2 or 4), uint32 vocabulary size (0: not said),
// uint64 count, then the tokens. llm.c's token files are read too: a header of 256 int32 (magic 20240520 version 1:
// uint16 tokens; magic 20240801 version 7: uint32), [2] = count. Any other file is text: one token a byte.
//
// Batches come from one global order that depends on the seed and on nothing else: window i of epoch e holds tokens
// [p*T, p*T + T] where p is place i of a permutation of the windows keyed by (seed, e). Sequence number n of the run
// (n = step * global_batch + row) is window n mod windows of epoch n / windows. Which rank reads it is not part of it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

struct Corpus {
  virtual ~Corpus() = default;
  // Writes tokens [first, first + n) to out. Of a file, throws Error that names it and the byte: it cannot be read, or
  // was cut or written to since it was opened; a token that is not below the vocabulary.
  virtual void read(int64_t first, int64_t n, int32_t* out) const = 0;
  std::function<void(const std::string&)> warn = {};  // is told, once, that the file was removed while it is open
  int64_t count = 0;                                  // tokens
  std::string description;
};

enum class Split { all, training, validation };  // validation: the last tenth; training: the rest
// path: a file; "" the synthetic corpus; "random" uniform tokens below vocab. Checks the whole file: throws UsageError
// (missing, empty, shorter than seq + 1 tokens, wrong magic, truncated, a token at or above vocab: file, offset, what
// to do). The last tenth is cut off at a multiple of seq.
std::unique_ptr<Corpus> open_corpus(const std::string& path, int64_t vocab, int64_t seq, uint64_t seed, Split split);

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
