// Corpora, the checks on files, and the order of the data.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <numeric>
#include <set>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/program/data.h"
#include "test/catch.h"

namespace {

// A file that lives as long as the test.
struct File {
  std::string path;
  explicit File(const std::string& bytes, const char* ending = "") {
    char name[] = "/tmp/fsdp-test-XXXXXX";
    const int fd = mkstemp(name);
    REQUIRE(fd >= 0);
    close(fd);
    std::remove(name);
    path = std::string(name) + ending;
    std::ofstream(path, std::ios::binary) << bytes;
  }
  ~File() { std::remove(path.c_str()); }
};

template <class T>
std::string as_bytes(const std::vector<T>& v) {
  return std::string(reinterpret_cast<const char*>(v.data()), v.size() * sizeof(T));
}

std::string token_file(uint32_t width, uint64_t count, const std::string& tokens, const char* magic = "TOKENS01") {
  return std::string(magic, 8) + as_bytes<uint32_t>({width, 0}) + as_bytes<uint64_t>({count}) + tokens;
}

std::string llmc_file(int32_t magic, int32_t version, int32_t count, const std::string& tokens) {
  std::vector<int32_t> header(256);
  header[0] = magic, header[1] = version, header[2] = count;
  return as_bytes(header) + tokens;
}

std::vector<int32_t> tokens_of(const Corpus& c) {
  std::vector<int32_t> t(size_t(c.count));
  c.read(0, c.count, t.data());
  return t;
}

// The one line that opening the file is refused with.
std::string refusal(const std::string& path, int64_t vocab = 256, int64_t seq = 4, Split split = Split::all) {
  try {
    open_corpus(path, vocab, seq, 0, split);
  } catch (const UsageError& e) { return e.what(); }
  return "";
}

void refused(const std::string& text, std::initializer_list<const char*> words) {
  INFO(text);
  CHECK(text.find('\n') == std::string::npos);
  for (const char* word : words) {
    INFO(word);
    CHECK(text.find(word) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("permute is a bijection, and a different one for each key", "[data]") {
  for (int64_t n : {1, 2, 3, 4, 5, 7, 15, 16, 17, 31, 64, 100, 255, 256, 257, 1000, 4097, 65536}) {
    for (uint64_t key : {0ull, 1ull, 0xdeadbeefull}) {
      std::vector<bool> seen(static_cast<size_t>(n));
      bool good = true;
      for (int64_t i = 0; i < n; ++i) {
        const int64_t p = permute(i, n, key);
        good = good && p >= 0 && p < n && !seen[size_t(p)];
        if (good) seen[size_t(p)] = true;
      }
      INFO("n " << n << " key " << key);
      CHECK(good);
    }
  }
  int same = 0, fixed = 0, neighbours = 0;
  for (int64_t i = 0; i < 1000; ++i) {
    same += permute(i, 1000, 1) == permute(i, 1000, 2);
    fixed += permute(i, 1000, 1) == i;
    neighbours += i > 0 && permute(i, 1000, 1) == permute(i - 1, 1000, 1) + 1;
  }
  // Each is about 1 in a random permutation.
  CHECK(same < 10);
  CHECK(fixed < 10);
  CHECK(neighbours < 10);
  // Far beyond 32 bits.
  const int64_t n = (int64_t(1) << 40) + 12345;
  std::set<int64_t> seen;
  for (int64_t i = 0; i < 1000; ++i) {
    const int64_t p = permute(n - 1 - i * 999983, n, 7);
    CHECK((p >= 0 && p < n));
    seen.insert(p);
  }
  CHECK(seen.size() == 1000);
}

TEST_CASE("an epoch reads every window once, and the next in another order", "[data]") {
  std::vector<uint16_t> t(5 * 10 + 3);
  std::iota(t.begin(), t.end(), uint16_t(0));
  File file(token_file(2, t.size(), as_bytes(t)));
  auto corpus = open_corpus(file.path, 100, 5, 0, Split::all);
  Sampler sampler{corpus.get(), 5, 42};
  REQUIRE(sampler.windows() == 10);
  std::vector<std::vector<int>> epochs(3);
  for (int64_t n = 0; n < 30; ++n) {
    int32_t inputs[5], targets[5];
    sampler.sequence(n, inputs, targets);
    CHECK(inputs[0] % 5 == 0);
    for (int i = 0; i < 5; ++i) {
      CHECK(inputs[i] == inputs[0] + i);
      CHECK(targets[i] == inputs[i] + 1);
    }
    epochs[size_t(n / 10)].push_back(inputs[0] / 5);
  }
  CHECK(epochs[0] != epochs[1]);
  CHECK(epochs[1] != epochs[2]);
  for (auto& e : epochs) {
    std::sort(e.begin(), e.end());
    for (int i = 0; i < 10; ++i) CHECK(e[size_t(i)] == i);
  }
  // Another seed, another order; no shuffling, the file's order.
  Sampler other{corpus.get(), 5, 43}, plain{corpus.get(), 5, 42, false};
  int differ = 0;
  for (int64_t n = 0; n < 10; ++n) {
    int32_t a[5], b[5], c[5], targets[5];
    sampler.sequence(n, a, targets);
    other.sequence(n, b, targets);
    plain.sequence(n, c, targets);
    differ += a[0] != b[0];
    CHECK(c[0] == 5 * n);
  }
  CHECK(differ > 0);
}

TEST_CASE("text is a token a byte", "[data]") {
  File file("hello, world\n");
  auto corpus = open_corpus(file.path, 256, 4, 0, Split::all);
  CHECK(corpus->count == 13);
  auto t = tokens_of(*corpus);
  CHECK(std::string(t.begin(), t.end()) == "hello, world\n");
  CHECK(corpus->description.find(file.path) != std::string::npos);
}

TEST_CASE("token files of both widths, and llm.c's", "[data]") {
  const std::vector<uint16_t> small = {0, 1, 65535, 300, 7, 8};
  const std::vector<uint32_t> large = {0, 1, 65536, 300, 99999, 8};
  const std::vector<int32_t> small_tokens(small.begin(), small.end()), large_tokens(large.begin(), large.end());
  File a(token_file(2, 6, as_bytes(small))), b(token_file(4, 6, as_bytes(large)));
  File c(llmc_file(20240520, 1, 6, as_bytes(small)), ".bin"), d(llmc_file(20240801, 7, 6, as_bytes(large)), ".bin");
  CHECK(tokens_of(*open_corpus(a.path, 65536, 4, 0, Split::all)) == small_tokens);
  CHECK(tokens_of(*open_corpus(b.path, 100000, 4, 0, Split::all)) == large_tokens);
  CHECK(tokens_of(*open_corpus(c.path, 65536, 4, 0, Split::all)) == small_tokens);
  CHECK(tokens_of(*open_corpus(d.path, 100000, 4, 0, Split::all)) == large_tokens);
}

TEST_CASE("bad data files are refused in one line", "[data]") {
  const std::string six = as_bytes<uint16_t>({1, 2, 3, 4, 5, 6});
  refused(refusal("/nowhere/tokens.bin"), {"/nowhere/tokens.bin", "No such file"});
  refused(refusal("/tmp"), {"/tmp", "not a regular file"});
  refused(refusal("/dev/zero"), {"/dev/zero", "not a regular file"});
  {
    File f("");
    std::remove(f.path.c_str());
    REQUIRE(mkfifo(f.path.c_str(), 0600) == 0);
    refused(refusal(f.path), {f.path.c_str(), "not a regular file"});  // at once: nobody writes to it
  }
  {
    File f("");
    refused(refusal(f.path), {f.path.c_str(), "is empty"});
  }
  {
    File f("abcd");
    refused(refusal(f.path), {f.path.c_str(), "holds 4 tokens", "fewer than one batch", "5 at --seq 4"});
  }
  {
    File f(token_file(2, 6, six, "TOKENS02"));
    refused(refusal(f.path), {f.path.c_str(), "wrong magic number", "TOKENS02"});
  }
  {
    File f("some text or other", ".bin");
    refused(refusal(f.path), {f.path.c_str(), "wrong magic number"});
  }
  {
    File f(llmc_file(20240520, 2, 6, six));
    refused(refusal(f.path), {f.path.c_str(), "wrong version"});
  }
  {
    File f(token_file(3, 6, six));
    refused(refusal(f.path), {f.path.c_str(), "3 bytes a token"});
  }
  for (uint64_t count : {uint64_t(7), uint64_t(1) << 62, ~uint64_t(0)}) {
    File f(token_file(2, count, six));
    refused(refusal(f.path), {f.path.c_str(), "truncated", "it holds 6"});
  }
  {
    File f(token_file(2, 6, six).substr(0, 20));
    refused(refusal(f.path), {f.path.c_str(), "truncated", "header"});
  }
  {
    File f(token_file(2, 6, six + "x"));
    refused(refusal(f.path), {f.path.c_str(), "longer than its header"});
  }
  {
    File f(token_file(2, 0, ""));
    refused(refusal(f.path), {f.path.c_str(), "empty"});
  }
}

TEST_CASE("a token outside the vocabulary is named with its place", "[data]") {
  std::vector<uint16_t> t(200000, 5);
  t[150001] = 257, t[150007] = 300;
  File small(token_file(2, t.size(), as_bytes(t)));
  refused(refusal(small.path, 257), {"token 257", "index 150001", "byte 300026", "257", "--vocab"});
  CHECK(refusal(small.path, 301).empty());
  std::vector<uint32_t> u(100, 5);
  u[99] = 0xffffffffu;
  File large(token_file(4, u.size(), as_bytes(u)));
  refused(refusal(large.path, 1 << 24), {"token 4294967295", "index 99"});
  File text("plain ASCII, then \xc3\xa9");
  refused(refusal(text.path, 128), {"token 195", "index 18"});
}

TEST_CASE("the last tenth is kept apart", "[data]") {
  std::vector<uint16_t> t(1000);
  std::iota(t.begin(), t.end(), uint16_t(0));
  File file(token_file(2, t.size(), as_bytes(t)));
  for (int64_t seq : {1, 7, 16, 100, 300}) {
    auto train = open_corpus(file.path, 1000, seq, 0, Split::training),
         val = open_corpus(file.path, 1000, seq, 0, Split::validation);
    INFO("seq " << seq);
    CHECK(train->count % seq == 0);
    CHECK(train->count + val->count == 1000);
    CHECK(train->count >= seq + 1);
    CHECK(val->count >= seq + 1);
    CHECK(tokens_of(*val).front() == train->count);
    CHECK(tokens_of(*val).back() == 999);
    if (seq <= 16) CHECK(std::abs(train->count - 900) <= seq);
  }
  refused(refusal(file.path, 1000, 600, Split::training), {"too few", "--val-data"});
  CHECK(refusal(file.path, 1000, 600, Split::all).empty());
}

TEST_CASE("random tokens are uniform, repeat, and depend on the seed", "[data]") {
  auto a = open_corpus("random", 10, 64, 1, Split::all), b = open_corpus("random", 10, 64, 1, Split::all);
  auto c = open_corpus("random", 10, 64, 2, Split::all), val = open_corpus("random", 10, 64, 1, Split::validation);
  std::vector<int32_t> x(20000), y(20000), z(20000), v(20000);
  a->read(1000, 20000, x.data());
  b->read(1000, 20000, y.data());
  c->read(1000, 20000, z.data());
  val->read(1000, 20000, v.data());
  CHECK(x == y);
  CHECK(x != z);
  CHECK(x != v);
  std::vector<int> counts(10);
  for (int32_t t : x) {
    REQUIRE((t >= 0 && t < 10));
    ++counts[size_t(t)];
  }
  for (int n : counts) CHECK((n > 1800 && n < 2200));
  int32_t last;
  a->read(a->count - 1, 1, &last);
  CHECK((last >= 0 && last < 10));
}

TEST_CASE("the built-in corpus is text, always the same, long enough for any sequence", "[data]") {
  auto a = open_corpus("", 256, 1024, 1, Split::all), b = open_corpus("", 256, 1024, 2, Split::all);
  CHECK(a->count >= 1 << 20);
  CHECK(tokens_of(*a) == tokens_of(*b));
  for (int32_t t : tokens_of(*a)) REQUIRE((t == '\n' || (t >= ' ' && t < 127)));
  auto longer = open_corpus("", 128, 1 << 18, 1, Split::training);
  CHECK(Sampler{longer.get(), 1 << 18, 0}.windows() >= 16);
  // A long one begins with the short one.
  std::vector<int32_t> x(1000), y(1000);
  a->read(0, 1000, x.data());
  longer->read(0, 1000, y.data());
  CHECK(x == y);
  refused(refusal("", 100, 1024), {"--vocab 100", "too small"});
}

TEST_CASE("a file that changes while it is in use is an error that names it and the byte", "[data]") {
  const std::vector<uint16_t> t(1000, 5);
  const std::string bytes = token_file(2, t.size(), as_bytes(t));
  auto reading = [](const Corpus& c, int64_t first) {
    std::vector<int32_t> tokens(5);
    try {
      c.read(first, 5, tokens.data());
    } catch (const Error& e) { return std::string(e.what()); }
    return std::string();
  };
  auto overwrite = [](const std::string& path, int64_t at, uint16_t token) {
    std::fstream f(path, std::ios::binary | std::ios::in | std::ios::out);
    f.seekp(at);
    f.write(reinterpret_cast<const char*>(&token), 2);
  };
  auto age = [](const std::string& path) {  // so that any write later is seen, however coarse the clock
    const timespec times[2] = {{1000000000, 0}, {1000000000, 0}};
    REQUIRE(utimensat(AT_FDCWD, path.c_str(), times, 0) == 0);
  };
  auto open_aged = [&](const File& f) {
    age(f.path);
    auto corpus = open_corpus(f.path, 100, 4, 0, Split::all);
    CHECK(reading(*corpus, 900).empty());
    return corpus;
  };
  {
    File f(bytes);
    auto corpus = open_aged(f);
    REQUIRE(truncate(f.path.c_str(), 24 + 2 * 902) == 0);
    // In the middle of what is wanted; behind it; and before it, where reading itself succeeds.
    refused(reading(*corpus, 900), {f.path.c_str(), "was cut", "had 2024 bytes and has 1828", "byte 1828"});
    refused(reading(*corpus, 950), {f.path.c_str(), "was cut", "byte 1924"});
    refused(reading(*corpus, 0), {f.path.c_str(), "was cut", "byte 24"});
  }
  {
    File f(bytes);
    auto corpus = open_aged(f);
    overwrite(f.path, 24 + 2 * 7, 6);
    refused(reading(*corpus, 900), {f.path.c_str(), "was written to", "byte 1824"});
  }
  {
    // Written over so that no clock shows it.
    File f(bytes);
    auto corpus = open_aged(f);
    overwrite(f.path, 24 + 2 * 903, 100);
    age(f.path);
    CHECK(reading(*corpus, 0).empty());
    refused(reading(*corpus, 900), {f.path.c_str(), "token 100", "index 903", "byte 1830", "100"});
  }
  {
    File f(bytes);
    auto corpus = open_aged(f);
    std::ofstream(f.path, std::ios::binary | std::ios::app) << "x";
    refused(reading(*corpus, 900), {f.path.c_str(), "was written to"});
  }
  {
    // What is open stays, and that it is gone is said once.
    File f(bytes);
    auto corpus = open_aged(f);
    std::vector<std::string> said;
    corpus->warn = [&](const std::string& line) { said.push_back(line); };
    std::remove(f.path.c_str());
    CHECK(reading(*corpus, 900).empty());
    CHECK(reading(*corpus, 0).empty());
    REQUIRE(said.size() == 1);
    refused(said[0], {f.path.c_str(), "removed or replaced", "--resume"});
  }
}
