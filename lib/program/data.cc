#include "lib/program/data.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <sys/resource.h>

#include "lib/device/error.h"
#include "lib/program/token_file.h"

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

struct Synthetic : Corpus {
  std::string text;
  int64_t first_token = 0;  // where this part begins
  void read(int64_t first, int64_t n, int32_t* out) const override {
    ASSERT(first >= 0 && n >= 0 && first + n <= count);
    widen_tokens(reinterpret_cast<const uint8_t*>(text.data()) + first_token + first, 1, n, out);
  }
};

// Uniform tokens, each a hash of its place: nothing to store, nothing to learn.
struct Random : Corpus {
  int64_t below = 0, first_token = 0;  // below: the model's vocabulary
  uint64_t key = 0;
  void read(int64_t first, int64_t n, int32_t* out) const override {
    ASSERT(first >= 0 && n >= 0 && first + n <= count);
    for (int64_t i = 0; i < n; ++i) {
      // The upper 32 bits, scaled to [0, below) by a product.
      const uint64_t h = mix(key + uint64_t(first_token + first + i)) >> 32;
      out[i] = int32_t((h * uint64_t(below)) >> 32);
    }
  }
};

// Files, read as one that holds them all, one behind the other.
struct TokenFiles : Corpus {
  std::vector<std::unique_ptr<TokenFile>> parts;
  std::vector<int64_t> starts = {0};  // of each in the whole, and the whole's end
  int64_t first_token = 0;            // where this part of the whole begins

  void add(std::unique_ptr<TokenFile> part) {
    starts.push_back(starts.back() + part->count());
    files.push_back({part->path(), part->count()});
    parts.push_back(std::move(part));
  }
  void read(int64_t first, int64_t n, int32_t* out) const override {
    ASSERT(first >= 0 && n >= 0 && first + n <= count);
    first += first_token;
    size_t i = size_t(std::upper_bound(starts.begin(), starts.end(), first) - starts.begin()) - 1;
    for (int64_t here; n > 0; first += here, out += here, n -= here, ++i) {
      here = std::min(n, starts[i + 1] - first);
      parts[i]->read(first - starts[i], here, out, warn);
    }
  }
};

// So that so many files can be open at once, as far as the system lets this process.
void allow_open_files(size_t n) {
  const rlim_t beside = 256;  // what else a rank has open
  rlimit limit = {};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= n + beside) return;
  limit.rlim_cur = std::min<rlim_t>(n + beside, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);  // if not, opening says so
}

std::unique_ptr<TokenFiles> open_files(const std::string& names, int64_t vocab, Reader reader) {
  auto corpus = std::make_unique<TokenFiles>();
  const std::vector<std::string> paths = data_files(names);
  allow_open_files(paths.size());
  bool text_bytes_said = true;
  corpus->text_bytes = 0;
  for (const std::string& path : paths) {
    auto file = std::make_unique<TokenFile>(path, vocab);
    const TokenHeader& h = file->header();
    if (!corpus->parts.empty()) {
      const TokenFile& first = *corpus->parts[0];
      const int width = first.header().width;
      const std::string differs =
          width != h.width ? strf("%d bytes a token and %d", width, h.width) : difference(first.header(), h);
      REQUIRE_USER(differs.empty(), "data files %s and %s differ: %s; train on those of one kind", first.path().c_str(),
                   path.c_str(), differs.c_str());
    }
    if (corpus->tokenizer.empty()) corpus->tokenizer = h.tokenizer;
    if (corpus->vocab == 0) corpus->vocab = h.vocab;
    if (corpus->end_of_document < 0) corpus->end_of_document = h.end_of_document;
    text_bytes_said = text_bytes_said && h.text_bytes >= 0;
    corpus->text_bytes += h.text_bytes;
    corpus->add(std::move(file));
  }
  if (!text_bytes_said) corpus->text_bytes = -1;
  for (const auto& part : corpus->parts)
    if (!reader.checked) part->check_tokens(reader.rank, reader.ranks);
  corpus->count = corpus->starts.back();
  const std::string& format = corpus->parts[0]->header().format;
  corpus->description = paths.size() == 1 ? strf("%s (%s)", names.c_str(), format.c_str())
                                          : strf("%s (%zu files, %s)", names.c_str(), paths.size(), format.c_str());
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
  corpus->tokenizer = bytes_tokenizer, corpus->text_bytes = bytes;
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

std::unique_ptr<Corpus> open_corpus(const std::string& names, int64_t vocab, int64_t seq, uint64_t seed, Split split,
                                    Reader reader) {
  if (names == "random") {
    auto corpus = std::make_unique<Random>();
    cut(int64_t(1) << 40, seq, split, "random data", &corpus->first_token, &corpus->count);
    corpus->below = vocab, corpus->key = mix(seed);
    corpus->description = "random tokens";
    return corpus;
  }
  if (names.empty()) {
    auto corpus = synthetic(vocab, seq);
    cut(corpus->count, seq, split, "the built-in corpus", &corpus->first_token, &corpus->count);
    return corpus;
  }
  auto corpus = open_files(names, vocab, reader);
  const std::string what = (corpus->files.size() == 1 ? "data file " : "data files ") + names;
  cut(corpus->count, seq, split, what, &corpus->first_token, &corpus->count);
  return corpus;
}

std::unique_ptr<Corpus> open_whole_corpus(const std::string& names, int64_t vocab, Reader reader) {
  auto corpus = open_files(names, vocab, reader);
  REQUIRE_USER(corpus->count > 1, "data file %s holds one token, and none after it to predict", names.c_str());
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
