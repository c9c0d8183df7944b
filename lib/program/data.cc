#include "lib/program/data.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/device/error.h"

namespace {

// Mixes 64 bits so that each depends on all (the finaliser of splitmix64).
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// ------------------------------------------------------------------------------------------------------- synthetic

// Little stories in which much can be predicted, some of it only by looking back: spelling, agreement of number and
// gender, who is there and what lies where, sums. The text is always the same; the run's seed shuffles its windows.
struct Storyteller {
  uint64_t state = 20240229;
  std::string text;

  int64_t below(int64_t n) { return int64_t(mix(state++) % uint64_t(n)); }
  template <size_t N>
  const char* one_of(const char* const (&words)[N]) {
    return words[below(N)];
  }
  static std::string capital(std::string s) {
    s[0] = char(std::toupper(static_cast<unsigned char>(s[0])));
    return s;
  }
  void say(const std::string& sentence) { text += capital(sentence) + " "; }

  static std::string number(int64_t n) {
    static const char* const small[] = {
        "zero", "one",    "two",    "three",    "four",     "five",    "six",     "seven",     "eight",    "nine",
        "ten",  "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"};
    static const char* const tens[] = {"",      "",      "twenty",  "thirty", "forty",
                                       "fifty", "sixty", "seventy", "eighty", "ninety"};
    if (n < 20) return small[n];
    return std::string(tens[n / 10]) + (n % 10 ? std::string("-") + small[n % 10] : "");
  }
  static std::string plural(const std::string& noun) {
    const std::string end = noun.substr(noun.size() - 1), two = noun.substr(noun.size() - 2);
    if (two == "ch" || two == "sh" || end == "x" || end == "s") return noun + "es";
    if (end == "y" && std::string("aeiou").find(noun[noun.size() - 2]) == std::string::npos)
      return noun.substr(0, noun.size() - 1) + "ies";
    return noun + "s";
  }
  static std::string a(const std::string& noun) {
    return (std::string("aeiou").find(noun[0]) == std::string::npos ? "a " : "an ") + noun;
  }

  void story() {
    static const char* const women[] = {"Ada",  "Clara", "Emmy", "Grace", "Hedy",
                                        "Lise", "Maria", "Rosa", "Sofia", "Vera"};
    static const char* const men[] = {"Alan",  "Blaise", "Carl", "Evariste", "Felix",
                                      "Henri", "Isaac",  "Leo",  "Niels",    "Otto"};
    static const char* const things[] = {"lamp",  "box",   "brush",  "map", "key",   "kettle", "orange", "umbrella",
                                         "penny", "watch", "ladder", "egg", "berry", "violin", "button", "letter"};
    static const char* const colours[] = {"red", "green", "blue", "old", "yellow", "small", "heavy", "silver"};
    static const char* const places[] = {"kitchen", "garden",  "library", "cellar",
                                         "market",  "station", "attic",   "harbour"};
    static const char* const days[] = {"Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"};
    static const char* const weather[] = {"it rained", "the sun shone", "the wind blew", "snow fell",
                                          "fog lay on the river"};
    static const char* const finds[] = {"found", "lost", "bought", "painted", "mended", "hid"};
    static const char* const feelings[] = {"glad", "tired", "hungry", "proud", "surprised", "calm"};

    const bool woman = below(2);
    const std::string who = woman ? one_of(women) : one_of(men), friend_ = woman ? one_of(men) : one_of(women);
    const std::string she = woman ? "she" : "he", hers = woman ? "hers" : "his", thing = one_of(things);
    const std::string the_thing = std::string("the ") + one_of(colours) + " " + thing;
    const std::string place = one_of(places), other = one_of(places), feeling = one_of(feelings);
    const std::string day = one_of(days);

    say("on " + day + " " + one_of(weather) + ", and " + who + " went to the " + place + ".");
    say(she + " " + one_of(finds) + " " + a(the_thing.substr(4)) + " there.");
    const int64_t sentences = 2 + below(5);
    for (int64_t i = 0; i < sentences; ++i) {
      const std::string item = one_of(things);
      const int64_t x = 1 + below(40), y = 1 + below(40), few = 1 + below(9);
      switch (below(8)) {
        case 0:
          say(who + " was " + feeling + ", because " + the_thing + " was " + hers + ".");
          break;
        case 1:
          say("there " + (few == 1 ? "was " + a(item) : "were " + number(few) + " " + plural(item)) + " in the " +
              place + ".");
          break;
        case 2:
          say(number(x) + " and " + number(y) + " make " + number(x + y) + ".");
          break;
        case 3:
          text += strf("%d + %d = %d. ", int(x), int(y), int(x + y));
          break;
        case 4:
          say("\"Where is " + the_thing + "?\" asked " + friend_ + ". \"It is in the " + place + ",\" said " + who +
              ".");
          break;
        case 5:
          say(friend_ + " gave " + who + " " + (few == 1 ? a(item) : number(few) + " " + plural(item)) + ", and " +
              she + " thanked " + (woman ? "him" : "her") + ".");
          break;
        case 6:
          say("the " + (few == 1 ? item + " is " : plural(item) + " are ") + one_of(colours) + ".");
          break;
        default:
          say(friend_ + " came from the " + other + " to see " + who + " and " + the_thing + ".");
          break;
      }
    }
    say("in the evening " + who + " and " + friend_ + " left the " + place + " with " + the_thing + ", and " + who +
        " was " + feeling + ".");
    text.back() = '\n';
  }
};

// --------------------------------------------------------------------------------------------------------- corpora

// Tokens of 1, 2 or 4 bytes as numbers.
void widen(const uint8_t* p, int width, int64_t n, int32_t* out) {
  if (width == 1) std::copy(p, p + n, out);
  if (width == 4) std::memcpy(out, p, size_t(n) * 4);
  for (int64_t i = 0; width == 2 && i < n; ++i) {
    uint16_t t;
    std::memcpy(&t, p + 2 * i, 2);
    out[i] = t;
  }
}

struct Synthetic : Corpus {
  std::string text;
  int64_t first_token = 0;  // where this part begins
  void read(int64_t first, int64_t n, int32_t* out) const override {
    ASSERT(first >= 0 && n >= 0 && first + n <= count);
    widen(reinterpret_cast<const uint8_t*>(text.data()) + first_token + first, 1, n, out);
  }
};

// Uniform tokens, each a hash of its place: nothing to store, nothing to learn.
struct Random : Corpus {
  int64_t vocab = 0, first_token = 0;
  uint64_t key = 0;
  void read(int64_t first, int64_t n, int32_t* out) const override {
    ASSERT(first >= 0 && n >= 0 && first + n <= count);
    for (int64_t i = 0; i < n; ++i) {
      // The upper 32 bits, scaled to [0, vocab) by a product.
      const uint64_t h = mix(key + uint64_t(first_token + first + i)) >> 32;
      out[i] = int32_t((h * uint64_t(vocab)) >> 32);
    }
  }
};

template <class T>
int64_t first_at_or_above(const uint8_t* tokens, int64_t count, int64_t limit) {
  // A block's maximum first: the compiler makes wide instructions of it, and it runs as fast as the file is read.
  const int64_t block = 1 << 16;
  for (int64_t start = 0; start < count; start += block) {
    const int64_t n = std::min(block, count - start);
    T most = 0;
    for (int64_t i = 0; i < n; ++i) {
      T t;
      std::memcpy(&t, tokens + (start + i) * int64_t(sizeof(T)), sizeof(T));
      most = std::max(most, t);
    }
    if (int64_t(most) < limit) continue;
    for (int64_t i = start;; ++i) {
      T t;
      std::memcpy(&t, tokens + i * int64_t(sizeof(T)), sizeof(T));
      if (int64_t(t) >= limit) return i;
    }
  }
  return -1;
}
// The first of the tokens that is not below the limit, or -1.
int64_t first_bad(const uint8_t* tokens, int width, int64_t count, int64_t limit) {
  if (width < 4 && limit >= int64_t(1) << (8 * width)) return -1;
  return width == 1   ? first_at_or_above<uint8_t>(tokens, count, limit)
         : width == 2 ? first_at_or_above<uint16_t>(tokens, count, limit)
                      : first_at_or_above<uint32_t>(tokens, count, limit);
}

uint32_t u32_at(const uint8_t* p) {
  uint32_t x;
  std::memcpy(&x, p, 4);
  return x;
}

bool ends_with(const std::string& s, const char* end) {
  const size_t n = std::strlen(end);
  return s.size() >= n && s.compare(s.size() - n, n, end) == 0;
}

// Where the tokens begin, how wide they are and how many there should be.
struct Format {
  int64_t header = 0;
  int width = 1;
  uint64_t count = 0;
  const char* name = "text, a byte a token";
};

constexpr int64_t longest_header = 1024;

// p: the file's first bytes, as many as a header has, or all; bytes: how many it has.
Format read_header(const std::string& path, const uint8_t* p, int64_t bytes) {
  const char* file = path.c_str();
  Format f;
  f.count = uint64_t(bytes);
  auto need = [&](int64_t n) {
    REQUIRE_USER(bytes >= n, "data file %s is truncated: it ends inside its header of %lld bytes; make it again", file,
                 static_cast<long long>(n));
  };
  if (bytes >= 6 && std::memcmp(p, "TOKENS", 6) == 0) {
    need(24);
    REQUIRE_USER(std::memcmp(p, "TOKENS01", 8) == 0,
                 "data file %s has a wrong magic number: \"%.8s\" is not \"TOKENS01\" (data/README.md has the format)",
                 file, reinterpret_cast<const char*>(p));
    f.header = 24;
    const uint32_t width = u32_at(p + 8);
    REQUIRE_USER(width == 2 || width == 4, "data file %s: its header says %u bytes a token, which can be 2 or 4", file,
                 width);
    f.width = int(width);
    std::memcpy(&f.count, p + 16, 8);
    f.name = width == 2 ? "uint16 tokens" : "uint32 tokens";
    return f;
  }
  const uint32_t magic = bytes >= 4 ? u32_at(p) : 0;
  if (magic == 20240520 || magic == 20240801) {
    need(longest_header);
    const uint32_t version = u32_at(p + 4), expected = magic == 20240520 ? 1 : 7;
    REQUIRE_USER(version == expected, "data file %s has a wrong version: llm.c magic %u goes with version %u, not %u",
                 file, magic, expected, version);
    f.header = longest_header, f.width = magic == 20240520 ? 2 : 4;
    f.count = u32_at(p + 8);
    f.name = magic == 20240520 ? "llm.c, uint16 tokens" : "llm.c, uint32 tokens";
    return f;
  }
  // Anything may be text, but a file with such a name is not meant to be.
  REQUIRE_USER(
      !ends_with(path, ".bin") && !ends_with(path, ".tokens"),
      "data file %s has a wrong magic number: a .bin or .tokens file starts with \"TOKENS01\" or an llm.c header "
      "(data/README.md has the formats; rename it to .txt if it is text)",
      file);
  return f;
}

// A file is read, not mapped: where it is cut while it is used, reading says so, and a mapping would kill the process.
struct TokenFile : Corpus {
  std::string path;
  int fd = -1;
  struct stat opened = {};  // what it was
  Format format = {};
  int64_t first_token = 0;  // where this part begins
  int64_t vocab = 0;
  mutable bool said_gone = false;

  ~TokenFile() override {
    if (fd >= 0) close(fd);
  }

  void read(int64_t first, int64_t n, int32_t* out) const override {
    ASSERT(first >= 0 && n >= 0 && first + n <= count);
    const int64_t index = first_token + first, at = format.header + index * format.width;
    std::vector<uint8_t> bytes(size_t(n * format.width));
    read_bytes(at, &bytes);
    require_tokens(bytes, index);
    require_unchanged(at);
    widen(bytes.data(), format.width, n, out);
  }

  // Fills `to` from byte `at` on.
  void read_bytes(int64_t at, std::vector<uint8_t>* to) const {
    for (size_t have = 0; have < to->size();) {
      const ssize_t n = pread(fd, to->data() + have, to->size() - have, off_t(at) + off_t(have));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0)
        throw Error(
            strf("data file %s cannot be read at byte %lld: %s; see that the disk or server that holds it is "
                 "there, and --resume",
                 path.c_str(), ll(at) + ll(have), std::strerror(errno)));
      if (n == 0) cut(at + int64_t(have));
      have += size_t(n);
    }
  }

  // tokens: the bytes of those from number `index` on.
  void require_tokens(const std::vector<uint8_t>& tokens, int64_t index) const {
    const int64_t bad = first_bad(tokens.data(), format.width, int64_t(tokens.size()) / format.width, vocab);
    if (bad < 0) return;
    uint32_t token = 0;
    std::memcpy(&token, tokens.data() + bad * format.width, size_t(format.width));
    throw UsageError(
        strf("data file %s: token %u at index %lld (byte %lld) is not below the vocabulary, %lld: raise "
             "--vocab, or make the file for this vocabulary",
             path.c_str(), token, ll(index + bad), ll(format.header + (index + bad) * format.width), ll(vocab)));
  }

 private:
  using ll = long long;

  [[noreturn]] void cut(int64_t at) const {
    struct stat now = {};
    fstat(fd, &now);
    throw Error(strf(
        "data file %s was cut while it was in use: it had %lld bytes and has %lld, as was seen in reading byte %lld; "
        "restore it, and --resume",
        path.c_str(), ll(opened.st_size), ll(now.st_size), ll(at)));
  }

  // at: the byte that was read.
  void require_unchanged(int64_t at) const {
    struct stat now;
    if (fstat(fd, &now) != 0)
      throw Error(
          strf("data file %s is no longer there: %s, as was seen in reading byte %lld; restore it, and --resume",
               path.c_str(), std::strerror(errno), ll(at)));
    if (now.st_size < opened.st_size) cut(at);
    if (now.st_size != opened.st_size || now.st_mtim.tv_sec != opened.st_mtim.tv_sec ||
        now.st_mtim.tv_nsec != opened.st_mtim.tv_nsec)
      throw Error(strf(
          "data file %s was written to while it was in use, as was seen in reading byte %lld; restore it, and --resume "
          "from a step before that",
          path.c_str(), ll(at)));
    if (now.st_nlink == 0 && warn && !std::exchange(said_gone, true))
      warn(
          strf("data file %s was removed or replaced; training goes on with what it has open, but --resume will not "
               "find it",
               path.c_str()));
  }
};

void check_length(const std::string& path, const Format& f, int64_t bytes) {
  const char* file = path.c_str();
  const uint64_t there = uint64_t(bytes - f.header) / uint64_t(f.width);
  REQUIRE_USER(f.count <= there,
               "data file %s is truncated: its header says %llu tokens of %d bytes, it holds %llu; make it again", file,
               static_cast<unsigned long long>(f.count), f.width, static_cast<unsigned long long>(there));
  REQUIRE_USER(int64_t(f.count) * f.width + f.header == bytes,
               "data file %s is longer than its header says (%llu tokens of %d bytes); make it again", file,
               static_cast<unsigned long long>(f.count), f.width);
  REQUIRE_USER(f.count > 0, "data file %s is empty: its header says 0 tokens", file);
}

std::unique_ptr<TokenFile> open_file(const std::string& path, int64_t vocab) {
  const char* file = path.c_str();
  auto corpus = std::make_unique<TokenFile>();
  corpus->path = path, corpus->vocab = vocab;
  corpus->fd = open(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // of a FIFO it would wait for a writer
  REQUIRE_USER(corpus->fd >= 0, "data file %s cannot be opened: %s", file, std::strerror(errno));
  REQUIRE_USER(fstat(corpus->fd, &corpus->opened) == 0 && S_ISREG(corpus->opened.st_mode),
               "data file %s is not a regular file", file);
  const int64_t bytes = corpus->opened.st_size;
  REQUIRE_USER(bytes > 0, "data file %s is empty", file);

  std::vector<uint8_t> part(size_t(std::min(bytes, longest_header)));
  corpus->read_bytes(0, &part);
  const Format f = corpus->format = read_header(path, part.data(), bytes);
  check_length(path, f, bytes);
  corpus->count = int64_t(f.count);
  corpus->description = strf("%s (%s)", file, f.name);

  posix_fadvise(corpus->fd, 0, 0, POSIX_FADV_SEQUENTIAL);
  const int64_t most = int64_t(1) << 20;  // tokens at once
  for (int64_t at = 0; at < corpus->count; at += most) {
    part.resize(size_t(std::min(most, corpus->count - at) * f.width));
    corpus->read_bytes(f.header + at * f.width, &part);
    corpus->require_tokens(part, at);
  }
  posix_fadvise(corpus->fd, 0, 0, POSIX_FADV_NORMAL);
  return corpus;
}

std::unique_ptr<Synthetic> synthetic(int64_t vocab, int64_t seq) {
  // At least 32 windows of any length, and 2 MiB.
  const int64_t bytes = std::max<int64_t>(2 << 20, 40 * (seq + 1));
  Storyteller teller;
  while (int64_t(teller.text.size()) < bytes) teller.story();
  auto corpus = std::make_unique<Synthetic>();
  corpus->text = std::move(teller.text);
  corpus->text.resize(size_t(bytes));
  corpus->count = bytes;
  corpus->description = "synthetic stories";
  const char most = *std::max_element(corpus->text.begin(), corpus->text.end());
  REQUIRE_USER(most < vocab,
               "the built-in corpus holds bytes up to %d: --vocab %lld is too small for it (or use --data random)",
               int(most), static_cast<long long>(vocab));
  return corpus;
}

// [first, first + count) of `all` tokens.
void cut(int64_t all, int64_t seq, Split split, const std::string& what, int64_t* first, int64_t* count) {
  const int64_t need = seq + 1;
  const long long have = all;
  REQUIRE_USER(
      all >= need,
      "%s holds %lld tokens, fewer than one batch: a sequence and its targets are %lld at --seq %lld; use more "
      "data or a smaller --seq",
      what.c_str(), have, static_cast<long long>(need), static_cast<long long>(seq));
  // The last tenth, but at least one sequence, as far as training keeps one as well.
  const int64_t at = std::min(all / 10 * 9 + all % 10 * 9 / 10, all - need) / seq * seq;
  REQUIRE_USER(split == Split::all || at >= need,
               "%s holds %lld tokens, too few to keep a tenth for validation at --seq %lld: give --val-data, use more "
               "data or a smaller --seq",
               what.c_str(), have, static_cast<long long>(seq));
  *first = split == Split::validation ? at : 0;
  *count = split == Split::all ? all : split == Split::training ? at : all - at;
}

}  // namespace

std::unique_ptr<Corpus> open_corpus(const std::string& path, int64_t vocab, int64_t seq, uint64_t seed, Split split) {
  if (path == "random") {
    auto corpus = std::make_unique<Random>();
    cut(int64_t(1) << 40, seq, split, "random data", &corpus->first_token, &corpus->count);
    corpus->vocab = vocab, corpus->key = mix(seed);
    corpus->description = "random tokens";
    return corpus;
  }
  if (path.empty()) {
    auto corpus = synthetic(vocab, seq);
    cut(corpus->count, seq, split, "the built-in corpus", &corpus->first_token, &corpus->count);
    return corpus;
  }
  auto corpus = open_file(path, vocab);
  cut(corpus->count, seq, split, "data file " + path, &corpus->first_token, &corpus->count);
  return corpus;
}

int64_t permute(int64_t i, int64_t n, uint64_t key) {
  ASSERT(n > 0 && i >= 0 && i < n);
  // The halves of an even number of bits, 2^(2 half) >= n and < 4n (16 at least): a walk takes few rounds.
  int half = 2;
  while (half < 31 && (int64_t(1) << (2 * half)) < n) ++half;
  const uint64_t mask = (uint64_t(1) << half) - 1;
  do {
    uint64_t left = uint64_t(i) >> half, right = uint64_t(i) & mask;
    for (uint64_t round = 0; round < 6; ++round) {
      const uint64_t next = left ^ (mix(key ^ mix(right * 8 + round)) & mask);
      left = right, right = next;
    }
    i = int64_t(left << half | right);
  } while (i >= n);
  return i;
}

void Sampler::sequence(int64_t n, int32_t* inputs, int32_t* targets) const {
  const int64_t all = windows(), epoch = n / all, place = n % all;
  const int64_t p = shuffle ? permute(place, all, mix(seed ^ mix(uint64_t(epoch)))) : place;
  std::vector<int32_t> tokens(size_t(seq + 1));
  corpus->read(p * seq, seq + 1, tokens.data());
  std::copy(tokens.begin(), tokens.end() - 1, inputs);
  std::copy(tokens.begin() + 1, tokens.end(), targets);
}
