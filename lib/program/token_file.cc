#include "lib/program/token_file.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <unistd.h>

#include "lib/device/error.h"

using ll = long long;
using ull = unsigned long long;

namespace {

template <class T>
T number_at(const uint8_t* p) {
  T x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

template <class T>
int64_t first_at_or_above(const uint8_t* tokens, int64_t count, int64_t limit) {
  // A block's maximum first: the compiler makes wide instructions of it, and it runs as fast as the file is read.
  const int64_t block = 1 << 16;
  for (int64_t start = 0; start < count; start += block) {
    const int64_t n = std::min(block, count - start);
    T most = 0;
    for (int64_t i = 0; i < n; ++i) most = std::max(most, number_at<T>(tokens + (start + i) * int64_t(sizeof(T))));
    if (int64_t(most) < limit) continue;
    for (int64_t i = start;; ++i)
      if (int64_t(number_at<T>(tokens + i * int64_t(sizeof(T)))) >= limit) return i;
  }
  return -1;
}
// Whether a token of so many bytes can be at or above the limit.
bool may_reach(int width, int64_t limit) { return limit < int64_t(1) << (8 * width); }

// The first of the tokens that is not below the limit, or -1.
int64_t first_bad(const uint8_t* tokens, int width, int64_t count, int64_t limit) {
  if (!may_reach(width, limit)) return -1;
  return width == 1   ? first_at_or_above<uint8_t>(tokens, count, limit)
         : width == 2 ? first_at_or_above<uint16_t>(tokens, count, limit)
                      : first_at_or_above<uint32_t>(tokens, count, limit);
}

bool ends_with(const std::string& s, const char* end) {
  const size_t n = std::strlen(end);
  return s.size() >= n && s.compare(s.size() - n, n, end) == 0;
}

std::string width_text(int width) { return width == 1 ? "bytes" : strf("uint%d tokens", 8 * width); }

// What the house's own formats begin with.
void read_width_and_count(const char* file, const uint8_t* p, bool one_byte, TokenHeader* h) {
  const uint32_t width = number_at<uint32_t>(p + 8);
  REQUIRE_USER((width == 1 && one_byte) || width == 2 || width == 4,
               "data file %s: its header says %u bytes a token, which can be %s2 or 4", file, width,
               one_byte ? "1, " : "");
  h->width = int(width), h->format = width_text(h->width);
  h->vocab = number_at<uint32_t>(p + 12), h->count = number_at<uint64_t>(p + 16);
}

void read_named(const char* file, const uint8_t* p, TokenHeader* h) {
  constexpr int64_t name_at = 40, name_end = 256;
  h->bytes = name_end;
  read_width_and_count(file, p, /*one_byte=*/true, h);
  REQUIRE_USER(h->vocab > 0 && h->vocab <= int64_t(1) << (8 * h->width),
               "data file %s: its header says a vocabulary of %lld, which can be 1 to %lld at %d bytes a token", file,
               ll(h->vocab), ll(1) << (8 * h->width), h->width);
  const uint64_t text_bytes = number_at<uint64_t>(p + 24);
  REQUIRE_USER(text_bytes < uint64_t(1) << 62, "data file %s: its header says %llu bytes of text", file,
               ull(text_bytes));
  if (text_bytes > 0) h->text_bytes = int64_t(text_bytes);
  const uint32_t end = number_at<uint32_t>(p + 32);
  REQUIRE_USER(end == UINT32_MAX || end < h->vocab,
               "data file %s: its header says that token %u ends a document, which is not below its vocabulary, %lld",
               file, end, ll(h->vocab));
  if (end != UINT32_MAX) h->end_of_document = end;
  const char* name = reinterpret_cast<const char*>(p) + name_at;
  h->tokenizer.assign(name, strnlen(name, size_t(name_end - name_at)));
  const bool printable =
      std::all_of(h->tokenizer.begin(), h->tokenizer.end(), [](char c) { return c >= 32 && c < 127; });
  REQUIRE_USER(!h->tokenizer.empty() && printable, "data file %s: its header has no name of a tokenizer at byte %lld",
               file, ll(name_at));
  h->format += " of " + h->tokenizer;
}

}  // namespace

TokenHeader read_token_header(const std::string& path, const uint8_t* p, int64_t bytes) {
  const char* file = path.c_str();
  TokenHeader h;
  auto need = [&](int64_t n) {
    REQUIRE_USER(bytes >= n, "data file %s is truncated: it ends inside its header of %lld bytes; make it again", file,
                 ll(n));
  };
  if (bytes >= 6 && std::memcmp(p, "TOKENS", 6) == 0) {
    const bool second = bytes >= 8 && std::memcmp(p, "TOKENS02", 8) == 0;
    need(second ? 256 : 24);
    if (second) {
      read_named(file, p, &h);
      return h;
    }
    REQUIRE_USER(std::memcmp(p, "TOKENS01", 8) == 0,
                 "data file %s has a wrong magic number: \"%.8s\" is neither \"TOKENS01\" nor \"TOKENS02\" "
                 "(data/README.md has the formats)",
                 file, reinterpret_cast<const char*>(p));
    h.bytes = 24;
    read_width_and_count(file, p, /*one_byte=*/false, &h);
    return h;
  }
  const uint32_t magic = bytes >= 4 ? number_at<uint32_t>(p) : 0;
  if (magic == 20240520 || magic == 20240801) {
    need(longest_token_header);
    const uint32_t version = number_at<uint32_t>(p + 4), expected = magic == 20240520 ? 1 : 7;
    REQUIRE_USER(version == expected, "data file %s has a wrong version: llm.c magic %u goes with version %u, not %u",
                 file, magic, expected, version);
    h.bytes = longest_token_header, h.width = magic == 20240520 ? 2 : 4;
    h.count = number_at<uint32_t>(p + 8);
    h.format = "llm.c, " + width_text(h.width);
    return h;
  }
  REQUIRE_USER(magic != questions_magic, "data file %s holds questions, which --eval alone takes, one file at a time",
               file);
  // Anything may be text, but a file with such a name is not meant to be.
  REQUIRE_USER(!ends_with(path, ".bin") && !ends_with(path, ".tokens"),
               "data file %s has a wrong magic number: a .bin or .tokens file starts with \"TOKENS02\", \"TOKENS01\" "
               "or an llm.c "
               "header (data/README.md has the formats; rename it to .txt if it is text)",
               file);
  h.count = uint64_t(bytes), h.text_bytes = bytes;
  h.width = 1, h.tokenizer = bytes_tokenizer, h.format = "text, a byte a token";
  return h;
}

TokenFile::TokenFile(const std::string& path, int64_t vocab) : path_(path), below_(vocab) {
  const char* file = path.c_str();
  fd_ = open(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // of a FIFO it would wait for a writer
  REQUIRE_USER(fd_ >= 0, "data file %s cannot be opened: %s", file, std::strerror(errno));
  try {
    REQUIRE_USER(fstat(fd_, &opened_) == 0 && S_ISREG(opened_.st_mode), "data file %s is not a regular file", file);
    const int64_t bytes = opened_.st_size;
    REQUIRE_USER(bytes > 0, "data file %s is empty", file);
    std::vector<uint8_t> part(size_t(std::min(bytes, longest_token_header)));
    read_bytes(0, &part);
    header_ = read_token_header(path, part.data(), bytes);
    require_length();
    const std::string of = header_.tokenizer.empty() ? "" : " (" + header_.tokenizer + ")";
    REQUIRE_USER(header_.vocab <= vocab,
                 "data file %s: the vocabulary in its header, %lld%s, is larger than the model's, %lld; use --vocab "
                 "%lld, or data of another tokenizer",
                 file, ll(header_.vocab), of.c_str(), ll(vocab), ll((header_.vocab + 7) / 8 * 8));
    if (header_.vocab > 0) below_ = header_.vocab;
    constexpr int64_t most_a_token = int64_t(1) << 16;  // bytes; of known vocabularies none has a token of a hundredth
    REQUIRE_USER(header_.text_bytes / most_a_token <= count(),
                 "data file %s: its header says %lld bytes of text in %lld tokens; make the file again", file,
                 ll(header_.text_bytes), ll(count()));
  } catch (...) {
    close(fd_);
    throw;
  }
}

TokenFile::~TokenFile() { close(fd_); }

void TokenFile::require_length() const {
  const char* file = path_.c_str();
  const int64_t bytes = opened_.st_size;
  const uint64_t there = uint64_t(bytes - header_.bytes) / uint64_t(header_.width);
  REQUIRE_USER(header_.count <= there,
               "data file %s is truncated: its header says %llu tokens of %d bytes, it holds %llu; make it again", file,
               ull(header_.count), header_.width, ull(there));
  REQUIRE_USER(count() * header_.width + header_.bytes == bytes,
               "data file %s is longer than its header says (%llu tokens of %d bytes); make it again", file,
               ull(header_.count), header_.width);
  REQUIRE_USER(header_.count > 0, "data file %s is empty: its header says 0 tokens", file);
}

void TokenFile::check_tokens(int rank, int ranks) const {
  if (!may_reach(header_.width, below_)) return;  // nothing is read for nothing
  const int64_t most = int64_t(1) << 20;          // tokens at once
  std::vector<uint8_t> part;
  posix_fadvise(fd_, 0, 0, POSIX_FADV_SEQUENTIAL);
  for (int64_t at = rank * most; at < count(); at += ranks * most) {
    part.resize(size_t(std::min(most, count() - at) * header_.width));
    read_bytes(header_.bytes + at * header_.width, &part);
    require_tokens(part, at);
  }
  posix_fadvise(fd_, 0, 0, POSIX_FADV_NORMAL);
}

void TokenFile::read(int64_t first, int64_t n, int32_t* out,
                     const std::function<void(const std::string&)>& warn) const {
  ASSERT(first >= 0 && n >= 0 && first + n <= count());
  const int64_t at = header_.bytes + first * header_.width;
  std::vector<uint8_t> bytes(size_t(n * header_.width));
  read_bytes(at, &bytes);
  require_tokens(bytes, first);
  require_unchanged(at, warn);
  widen_tokens(bytes.data(), header_.width, n, out);
}

// Fills `to` from byte `at` on.
void TokenFile::read_bytes(int64_t at, std::vector<uint8_t>* to) const {
  for (size_t have = 0; have < to->size();) {
    const ssize_t n = pread(fd_, to->data() + have, to->size() - have, off_t(at) + off_t(have));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0)
      throw Error(
          strf("data file %s cannot be read at byte %lld: %s; see that the disk or server that holds it is "
               "there",
               path_.c_str(), ll(at) + ll(have), std::strerror(errno)));
    if (n == 0) cut(at + int64_t(have));
    have += size_t(n);
  }
}

// tokens: the bytes of those from number `index` on.
void TokenFile::require_tokens(const std::vector<uint8_t>& tokens, int64_t index) const {
  const int width = header_.width;
  const int64_t bad = first_bad(tokens.data(), width, int64_t(tokens.size()) / width, below_);
  if (bad < 0) return;
  uint32_t token = 0;
  std::memcpy(&token, tokens.data() + bad * width, size_t(width));
  const std::string at = strf("data file %s: token %u at index %lld (byte %lld)", path_.c_str(), token, ll(index + bad),
                              ll(header_.bytes + (index + bad) * width));
  throw UsageError(strf(header_.vocab > 0 ? "%s is not below the vocabulary in the file's header, %lld: make it again"
                                          : "%s is not below the vocabulary, %lld: raise --vocab, or make the file for "
                                            "this vocabulary",
                        at.c_str(), ll(below_)));
}

void TokenFile::cut(int64_t at) const {
  struct stat now = {};
  fstat(fd_, &now);
  throw Error(strf(
      "data file %s was cut while it was in use: it had %lld bytes and has %lld, as was seen in reading byte %lld; "
      "restore it",
      path_.c_str(), ll(opened_.st_size), ll(now.st_size), ll(at)));
}

// at: the byte that was read.
void TokenFile::require_unchanged(int64_t at, const std::function<void(const std::string&)>& warn) const {
  struct stat now;
  if (fstat(fd_, &now) != 0)
    throw Error(strf("data file %s is no longer there: %s, as was seen in reading byte %lld; restore it", path_.c_str(),
                     std::strerror(errno), ll(at)));
  if (now.st_size < opened_.st_size) cut(at);
  if (now.st_size != opened_.st_size || now.st_mtim.tv_sec != opened_.st_mtim.tv_sec ||
      now.st_mtim.tv_nsec != opened_.st_mtim.tv_nsec)
    throw Error(
        strf("data file %s was written to while it was in use, as was seen in reading byte %lld; restore it, since "
             "steps after that have read other tokens",
             path_.c_str(), ll(at)));
  if (now.st_nlink == 0 && warn && !std::exchange(said_gone_, true))
    warn(
        strf("data file %s was removed or replaced; training goes on with what it has open, but --resume will not "
             "find it",
             path_.c_str()));
}

void widen_tokens(const uint8_t* p, int width, int64_t n, int32_t* out) {
  if (width == 1) std::copy(p, p + n, out);
  if (width == 4) std::memcpy(out, p, size_t(n) * 4);
  for (int64_t i = 0; width == 2 && i < n; ++i) out[i] = number_at<uint16_t>(p + 2 * i);
}
