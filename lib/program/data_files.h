// The files that an option names: --data, --val-data, --eval.
//
//   data_files("shard_*.bin")        every file that matches, in the order of their names' bytes
//   data_files("web_*.bin,code.bin") one pattern after the other
//   data_files("a,b*.txt")           that file alone, if there is one of that name
//
// A pattern is the shell's: * ? [a-z], and \ before one of these to mean itself.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

// What a run remembers of a file, to know it again.
struct DataFile {
  std::string path;
  int64_t tokens;
};

// What tokens are of; what is not known differs from nothing.
struct TokenKind {
  int64_t vocab = 0;           // the tokenizer's; 0: not said
  std::string tokenizer = {};  // its name; bytes_tokenizer; empty: not said
};
// What two kinds differ in that cannot be told apart by one model; empty: nothing.
std::string difference(const TokenKind& a, const TokenKind& b);

// Throws UsageError: nothing matches a pattern, a file is named twice, a name is empty. A name without a pattern is
// taken as it is, whether or not there is such a file.
std::vector<std::string> data_files(const std::string& names);
