#include "lib/program/data.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include <fcntl.h>
#include <sys/mman.h>
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

// Tokens of 1, 2 or 4 bytes that lie in memory: a mapped file or the synthetic text.
struct Stored : Corpus {
  const uint8_t* tokens = nullptr;
  int width = 1;
  int64_t first_token = 0;  // where this part begins
  void* map = nullptr;
  size_t map_bytes = 0;
  std::string text;

  ~Stored() override {
    if (map) munmap(map, map_bytes);
  }
  void read(int64_t first, int64_t n, int32_t* out) const override {
    ASSERT(first >= 0 && n >= 0 && first + n <= count);
    const uint8_t* p = tokens + (first_token + first) * width;
    if (width == 1) std::copy(p, p + n, out);
    if (width == 4) std::memcpy(out, p, size_t(n) * 4);
    for (int64_t i = 0; width == 2 && i < n; ++i) {
      uint16_t t;
      std::memcpy(&t, p + 2 * i, 2);
      out[i] = t;
    }
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
  if (limit > int64_t(T(~T(0)))) return -1;
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
    need(1024);
    const uint32_t version = u32_at(p + 4), expected = magic == 20240520 ? 1 : 7;
    REQUIRE_USER(version == expected, "data file %s has a wrong version: llm.c magic %u goes with version %u, not %u",
                 file, magic, expected, version);
    f.header = 1024, f.width = magic == 20240520 ? 2 : 4;
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

std::unique_ptr<Stored> open_file(const std::string& path, int64_t vocab) {
  const char* file = path.c_str();
  const int fd = open(file, O_RDONLY | O_CLOEXEC);
  REQUIRE_USER(fd >= 0, "data file %s cannot be opened: %s", file, std::strerror(errno));
  auto corpus = std::make_unique<Stored>();
  struct stat info;
  const bool known = fstat(fd, &info) == 0, regular = known && S_ISREG(info.st_mode);
  const int64_t bytes = regular ? info.st_size : 0;
  if (bytes > 0) {
    void* map = mmap(nullptr, size_t(bytes), PROT_READ, MAP_PRIVATE, fd, 0);
    if (map != MAP_FAILED) corpus->map = map, corpus->map_bytes = size_t(bytes);
  }
  const int map_error = errno;
  close(fd);
  REQUIRE_USER(regular, "data file %s is not a regular file", file);
  REQUIRE_USER(bytes > 0, "data file %s is empty", file);
  REQUIRE_USER(corpus->map, "data file %s cannot be mapped: %s", file, std::strerror(map_error));

  const uint8_t* p = static_cast<const uint8_t*>(corpus->map);
  const Format f = read_header(path, p, bytes);
  const uint64_t there = uint64_t(bytes - f.header) / uint64_t(f.width);
  REQUIRE_USER(f.count <= there,
               "data file %s is truncated: its header says %llu tokens of %d bytes, it holds %llu; make it again", file,
               static_cast<unsigned long long>(f.count), f.width, static_cast<unsigned long long>(there));
  REQUIRE_USER(int64_t(f.count) * f.width + f.header == bytes,
               "data file %s is longer than its header says (%llu tokens of %d bytes); make it again", file,
               static_cast<unsigned long long>(f.count), f.width);
  REQUIRE_USER(f.count > 0, "data file %s is empty: its header says 0 tokens", file);
  corpus->tokens = p + f.header;
  corpus->width = f.width;
  corpus->count = int64_t(f.count);
  corpus->description = strf("%s (%s)", file, f.name);

  madvise(corpus->map, corpus->map_bytes, MADV_SEQUENTIAL);
  auto search = f.width == 1   ? first_at_or_above<uint8_t>
                : f.width == 2 ? first_at_or_above<uint16_t>
                               : first_at_or_above<uint32_t>;
  const int64_t bad = search(corpus->tokens, corpus->count, vocab);
  if (bad >= 0) {
    uint32_t token = 0;
    std::memcpy(&token, corpus->tokens + bad * f.width, size_t(f.width));
    throw UsageError(
        strf("data file %s: token %u at index %lld (byte %lld) is not below the vocabulary, %lld: raise "
             "--vocab, or make the file for this vocabulary",
             file, token, static_cast<long long>(bad), static_cast<long long>(f.header + bad * f.width),
             static_cast<long long>(vocab)));
  }
  madvise(corpus->map, corpus->map_bytes, MADV_NORMAL);
  return corpus;
}

std::unique_ptr<Stored> synthetic(int64_t vocab, int64_t seq) {
  // At least 32 windows of any length, and 2 MiB.
  const int64_t bytes = std::max<int64_t>(2 << 20, 40 * (seq + 1));
  Storyteller teller;
  while (int64_t(teller.text.size()) < bytes) teller.story();
  auto corpus = std::make_unique<Stored>();
  corpus->text = std::move(teller.text);
  corpus->text.resize(size_t(bytes));
  corpus->tokens = reinterpret_cast<const uint8_t*>(corpus->text.data());
  corpus->count = bytes;
  corpus->description = "synthetic stories";
  const int64_t most = *std::max_element(corpus->tokens, corpus->tokens + bytes);
  REQUIRE_USER(most < vocab,
               "the built-in corpus holds bytes up to %lld: --vocab %lld is too small for it (or use --data random)",
               static_cast<long long>(most), static_cast<long long>(vocab));
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
  std::unique_ptr<Stored> corpus = path.empty() ? synthetic(vocab, seq) : open_file(path, vocab);
  cut(corpus->count, seq, split, path.empty() ? "the built-in corpus" : "data file " + path, &corpus->first_token,
      &corpus->count);
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
  corpus->read(p * seq, seq, inputs);
  corpus->read(p * seq + 1, seq, targets);
}
