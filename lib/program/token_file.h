// A file of tokens: what its first bytes say, and its tokens, read where they are wanted. data/README.md has the
// formats.
//
//   TokenFile file("train.bin", /*vocab=*/50304);     // checks its header against its length and the model
//   file.check_tokens(rank, world_size);              // this rank's share of them
//   file.read(first, n, tokens);
#pragma once

#include <sys/stat.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "lib/program/data_files.h"

struct TokenHeader : TokenKind {
  int64_t bytes = 0;  // of the header; the tokens lie behind it
  int width = 1;      // bytes a token
  uint64_t count = 0;
  int64_t text_bytes = -1;       // that the tokens stand for; -1: not said
  int64_t end_of_document = -1;  // the token behind each document; -1: not said
  std::string format;            // for people
};
constexpr const char* bytes_tokenizer = "bytes";  // a token is a byte of the text
constexpr int64_t longest_token_header = 1024;
constexpr uint32_t questions_magic = 20240522;  // of a file that is none of tokens: see hellaswag.h

// p: the first bytes of the file, as many as the longest header has, or all; bytes: how many it has. Throws UsageError
// that names the file and the field: a magic number or a version that is none, a field that cannot be.
TokenHeader read_token_header(const std::string& path, const uint8_t* p, int64_t bytes);

// Opened for reading, not mapped: where it is cut while it is used, reading says so, and a mapping would kill the
// process.
class TokenFile {
 public:
  // vocab: the model's. Throws UsageError: missing, no regular file, empty, a header that does not fit its length, a
  // tokenizer with more tokens than the model.
  TokenFile(const std::string& path, int64_t vocab);
  ~TokenFile();
  TokenFile(const TokenFile&) = delete;

  // Reads the part of the tokens that is rank's of `ranks` and throws UsageError if one is not below the vocabulary.
  void check_tokens(int rank, int ranks) const;
  // Writes tokens [first, first + n) to out. Throws Error that names the file and the byte: it cannot be read, or was
  // cut or written to since it was opened; a token that is not below the vocabulary. warn, if there is one, is told
  // once that the file was removed.
  void read(int64_t first, int64_t n, int32_t* out, const std::function<void(const std::string&)>& warn) const;

  const std::string& path() const { return path_; }
  const TokenHeader& header() const { return header_; }
  int64_t count() const { return int64_t(header_.count); }

 private:
  void read_bytes(int64_t at, std::vector<uint8_t>* to) const;
  void require_tokens(const std::vector<uint8_t>& tokens, int64_t index) const;
  void require_unchanged(int64_t at, const std::function<void(const std::string&)>& warn) const;
  void require_length() const;
  [[noreturn]] void cut(int64_t at) const;

  std::string path_;
  int fd_ = -1;
  struct stat opened_ = {};  // what it was
  TokenHeader header_;
  int64_t below_;  // every token is: the vocabulary of the header where it says one, else the model's
  mutable bool said_gone_ = false;
};

// Tokens of 1, 2 or 4 bytes as numbers.
void widen_tokens(const uint8_t* p, int width, int64_t n, int32_t* out);
