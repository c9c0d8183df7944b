#include "lib/program/hellaswag.h"

#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <fstream>

#include "lib/device/error.h"
#include "lib/program/token_file.h"

using ll = long long;

namespace {

constexpr int32_t magic = int32_t(questions_magic), version = 1;
constexpr int64_t header_bytes = 1024;

bool is_regular(const std::string& path) {
  struct stat s;
  return ::stat(path.c_str(), &s) == 0 && S_ISREG(s.st_mode);
}

// The file's numbers of two bytes, one after the other.
struct Reading {
  const std::string& path;
  std::vector<uint16_t> numbers;
  int64_t vocab, seq;
  int64_t question = 0;
  size_t at = 0;

  [[noreturn]] void refuse(const std::string& what) const {
    throw UsageError(strf("--eval %s: question %lld, byte %lld: %s; make the file again", path.c_str(), ll(question),
                          ll(header_bytes) + 2 * ll(at), what.c_str()));
  }
  int64_t next(const char* what) {
    if (at == numbers.size()) refuse(strf("the file ends before %s", what));
    return numbers[at++];
  }
  std::vector<int32_t> tokens(const char* what) {
    const int64_t n = next(what);
    if (n == 0) --at, refuse(strf("%s is empty", what));
    std::vector<int32_t> all;
    for (int64_t i = 0; i < n; i++) {
      const int64_t token = next(what);
      if (token >= vocab)
        --at, refuse(strf("token %lld is not below the vocabulary, %lld: raise --vocab", ll(token), ll(vocab)));
      all.push_back(int32_t(token));
    }
    return all;
  }
  Question one() {
    const size_t begin = at;
    if (next("its first number") != 65535) --at, refuse("it does not begin with 65535");
    const int64_t bytes = next("its size");
    next("its number");
    Question q;
    q.right = next("the right answer's number");
    const int64_t answers = next("its number of answers");
    if (q.right >= answers) refuse(strf("answer %lld is said to be right, of %lld", ll(q.right), ll(answers)));
    q.context = tokens("the context");
    for (int64_t i = 0; i < answers; i++) {
      q.answers.push_back(tokens("an answer"));
      const int64_t n = int64_t(q.answers.back().size());
      REQUIRE_USER(n <= seq, "--eval %s: question %lld has an answer of %lld tokens, more than --seq %lld",
                   path.c_str(), ll(question), ll(n), ll(seq));
    }
    if (bytes != 2 * int64_t(at - begin))
      refuse(strf("it has %lld bytes and says %lld", 2 * ll(at - begin), ll(bytes)));
    return q;
  }
};

}  // namespace

bool has_questions(const std::string& path) {
  int32_t first = 0;
  return is_regular(path) && std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(&first), 4) &&
         first == magic;
}

std::vector<Question> read_questions(const std::string& path, int64_t vocab, int64_t seq) {
  const char* file = path.c_str();
  REQUIRE_USER(is_regular(path), "--eval %s: not a regular file", file);
  std::ifstream in(path, std::ios::binary | std::ios::ate);
  const int64_t bytes = in.tellg(), most = int64_t(1) << 30;
  REQUIRE_USER(in && bytes >= header_bytes, "--eval %s is truncated: it ends inside its header of %lld bytes", file,
               ll(header_bytes));
  REQUIRE_USER(bytes <= most && bytes % 2 == 0, "--eval %s: %lld bytes, which can be an even number up to %lld", file,
               ll(bytes), ll(most));
  int32_t header[header_bytes / 4];
  Reading r = {path, std::vector<uint16_t>(size_t(bytes - header_bytes) / 2), vocab, seq};
  in.seekg(0);
  in.read(reinterpret_cast<char*>(header), header_bytes);
  in.read(reinterpret_cast<char*>(r.numbers.data()), bytes - header_bytes);
  REQUIRE_USER(in, "--eval %s cannot be read: %s", file, std::strerror(errno));
  REQUIRE_USER(header[0] == magic && header[1] == version,
               "--eval %s has a wrong version: llm.c magic %d goes with version %d, not %d", file, magic, version,
               header[1]);
  const int64_t count = header[2];
  REQUIRE_USER(count > 0, "--eval %s: its header says %lld questions", file, ll(count));
  std::vector<Question> questions;
  for (r.question = 0; r.question < count; r.question++) questions.push_back(r.one());
  REQUIRE_USER(r.at == r.numbers.size(), "--eval %s is longer than its header says (%lld questions); make it again",
               file, ll(count));
  return questions;
}
