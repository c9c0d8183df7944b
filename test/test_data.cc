// Corpora, the checks on files, and the order of the data.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <numeric>
#include <set>
#include <tuple>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/program/data.h"
#include "lib/program/files.h"
#include "test/catch.h"
#include "test/scratch.h"

namespace {

template <class T>
std::string as_bytes(const std::vector<T>& v) {
  return std::string(reinterpret_cast<const char*>(v.data()), v.size() * sizeof(T));
}

std::string token_file(uint32_t width, uint64_t count, const std::string& tokens, const char* magic = "TOKENS01") {
  return std::string(magic, 8) + as_bytes<uint32_t>({width, 0}) + as_bytes<uint64_t>({count}) + tokens;
}

// With a header that names its tokenizer.
struct Named {
  uint32_t width = 2, vocab = 100;
  uint64_t text_bytes = 40;
  uint32_t end = 99;
  std::string tokenizer = "tiktoken gpt2";
  std::string file(const std::vector<uint16_t>& tokens) const {
    std::string name = tokenizer;
    name.resize(216);
    return "TOKENS02" + as_bytes<uint32_t>({width, vocab}) + as_bytes<uint64_t>({tokens.size(), text_bytes}) +
           as_bytes<uint32_t>({end, 0}) + name + as_bytes(tokens);
  }
};

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
  ScratchFile file(token_file(2, t.size(), as_bytes(t)));
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
  // An epoch of one seed is in no other seed's order of another epoch either.
  std::set<std::vector<int32_t>> orders;
  for (uint64_t seed = 0; seed < 6; ++seed)
    for (int64_t epoch = 0; epoch < 6; ++epoch) {
      const Sampler of{corpus.get(), 5, seed};
      std::vector<int32_t> order;
      for (int64_t n = 0; n < 10; ++n) {
        int32_t a[5], targets[5];
        of.sequence(10 * epoch + n, a, targets);
        order.push_back(a[0]);
      }
      orders.insert(order);
    }
  CHECK(orders.size() == 36);
}

TEST_CASE("text is a token a byte", "[data]") {
  ScratchFile file("hello, world\n");
  auto corpus = open_corpus(file.path, 256, 4, 0, Split::all);
  CHECK(corpus->count == 13);
  auto t = tokens_of(*corpus);
  CHECK(std::string(t.begin(), t.end()) == "hello, world\n");
  CHECK(corpus->description.find(file.path) != std::string::npos);
}

TEST_CASE("what no token can exceed is not read through", "[data]") {
  ScratchFile file("");
  REQUIRE(::truncate(file.path.c_str(), 64 << 20) == 0);
  const auto bytes_read = [] {  // by this process
    std::ifstream io("/proc/self/io");
    std::string name;
    int64_t n = -1;
    io >> name >> n;
    return n;
  };
  for (const auto& [vocab, least, most] : {std::tuple(256, 0, 1 << 20), std::tuple(255, 64 << 20, 65 << 20)}) {
    INFO(vocab);
    const int64_t before = bytes_read();
    open_corpus(file.path, vocab, 64, 0, Split::all);
    const int64_t n = bytes_read() - before;
    CHECK((before < 0 || (n >= least && n <= most)));
  }
}

TEST_CASE("token files of both widths, and llm.c's", "[data]") {
  const std::vector<uint16_t> small = {0, 1, 65535, 300, 7, 8};
  const std::vector<uint32_t> large = {0, 1, 65536, 300, 99999, 8};
  const std::vector<int32_t> small_tokens(small.begin(), small.end()), large_tokens(large.begin(), large.end());
  ScratchFile a(token_file(2, 6, as_bytes(small))), b(token_file(4, 6, as_bytes(large)));
  ScratchFile c(llmc_file(20240520, 1, 6, as_bytes(small)), ".bin"),
      d(llmc_file(20240801, 7, 6, as_bytes(large)), ".bin");
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
    ScratchFile f("");
    std::remove(f.path.c_str());
    REQUIRE(mkfifo(f.path.c_str(), 0600) == 0);
    refused(refusal(f.path), {f.path.c_str(), "not a regular file"});  // at once: nobody writes to it
  }
  {
    ScratchFile f("");
    refused(refusal(f.path), {f.path.c_str(), "is empty"});
  }
  {
    ScratchFile f("abcd");
    refused(refusal(f.path), {f.path.c_str(), "holds 4 tokens", "fewer than one batch", "5 at --seq 4"});
  }
  {
    ScratchFile f(token_file(2, 6, six, "TOKENS03"));
    refused(refusal(f.path), {f.path.c_str(), "wrong magic number", "TOKENS03"});
  }
  {
    ScratchFile f("some text or other", ".bin");
    refused(refusal(f.path), {f.path.c_str(), "wrong magic number"});
  }
  {
    ScratchFile f(llmc_file(20240520, 2, 6, six));
    refused(refusal(f.path), {f.path.c_str(), "wrong version"});
  }
  {
    ScratchFile f(token_file(3, 6, six));
    refused(refusal(f.path), {f.path.c_str(), "3 bytes a token"});
  }
  for (uint64_t count : {uint64_t(7), uint64_t(1) << 62, ~uint64_t(0)}) {
    ScratchFile f(token_file(2, count, six));
    refused(refusal(f.path), {f.path.c_str(), "truncated", "it holds 6"});
  }
  {
    ScratchFile f(token_file(2, 6, six).substr(0, 20));
    refused(refusal(f.path), {f.path.c_str(), "truncated", "header"});
  }
  {
    ScratchFile f(token_file(2, 6, six + "x"));
    refused(refusal(f.path), {f.path.c_str(), "longer than its header"});
  }
  {
    ScratchFile f(token_file(2, 0, ""));
    refused(refusal(f.path), {f.path.c_str(), "empty"});
  }
}

TEST_CASE("a token outside the vocabulary is named with its place", "[data]") {
  std::vector<uint16_t> t(200000, 5);
  t[150001] = 257, t[150007] = 300;
  ScratchFile small(token_file(2, t.size(), as_bytes(t)));
  refused(refusal(small.path, 257), {"token 257", "index 150001", "byte 300026", "257", "--vocab"});
  CHECK(refusal(small.path, 301).empty());
  std::vector<uint32_t> u(100, 5);
  u[99] = 0xffffffffu;
  ScratchFile large(token_file(4, u.size(), as_bytes(u)));
  refused(refusal(large.path, 1 << 24), {"token 4294967295", "index 99"});
  ScratchFile text("plain ASCII, then \xc3\xa9");
  refused(refusal(text.path, 128), {"token 195", "index 18"});
  // The largest token that so many bytes hold is checked like any other.
  ScratchFile byte("text, then \xff"), half(token_file(2, 5, as_bytes<uint16_t>({1, 2, 3, 4, 65535})));
  ScratchFile word(token_file(4, 5, as_bytes<uint32_t>({1, 2, 3, 4, UINT32_MAX})));
  refused(refusal(byte.path, 255), {"token 255", "index 11"});
  refused(refusal(half.path, 65535), {"token 65535", "index 4"});
  refused(refusal(word.path, UINT32_MAX), {"token 4294967295", "index 4"});
  CHECK(refusal(byte.path, 256).empty());
  CHECK(refusal(half.path, 65536).empty());
  CHECK(refusal(word.path, int64_t(UINT32_MAX) + 1).empty());
}

TEST_CASE("the last tenth is kept apart", "[data]") {
  std::vector<uint16_t> t(1000);
  std::iota(t.begin(), t.end(), uint16_t(0));
  ScratchFile file(token_file(2, t.size(), as_bytes(t)));
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
  auto open_aged = [&](const ScratchFile& f) {
    age(f.path);
    auto corpus = open_corpus(f.path, 100, 4, 0, Split::all);
    CHECK(reading(*corpus, 900).empty());
    return corpus;
  };
  {
    ScratchFile f(bytes);
    auto corpus = open_aged(f);
    REQUIRE(truncate(f.path.c_str(), 24 + 2 * 902) == 0);
    // In the middle of what is wanted; behind it; and before it, where reading itself succeeds.
    refused(reading(*corpus, 900), {f.path.c_str(), "was cut", "had 2024 bytes and has 1828", "byte 1828"});
    refused(reading(*corpus, 950), {f.path.c_str(), "was cut", "byte 1924"});
    refused(reading(*corpus, 0), {f.path.c_str(), "was cut", "byte 24"});
  }
  {
    ScratchFile f(bytes);
    auto corpus = open_aged(f);
    overwrite(f.path, 24 + 2 * 7, 6);
    refused(reading(*corpus, 900), {f.path.c_str(), "was written to", "byte 1824"});
  }
  {
    // As long as it was, in the second in which it was written.
    ScratchFile f(bytes);
    auto corpus = open_aged(f);
    const timespec times[2] = {{1000000000, 0}, {1000000000, 4000000}};
    REQUIRE(utimensat(AT_FDCWD, f.path.c_str(), times, 0) == 0);
    refused(reading(*corpus, 900), {f.path.c_str(), "was written to"});
  }
  {
    // Written over so that no clock shows it.
    ScratchFile f(bytes);
    auto corpus = open_aged(f);
    overwrite(f.path, 24 + 2 * 903, 100);
    age(f.path);
    CHECK(reading(*corpus, 0).empty());
    refused(reading(*corpus, 900), {f.path.c_str(), "token 100", "index 903", "byte 1830", "100"});
  }
  {
    ScratchFile f(bytes);
    auto corpus = open_aged(f);
    std::ofstream(f.path, std::ios::binary | std::ios::app) << "x";
    refused(reading(*corpus, 900), {f.path.c_str(), "was written to"});
  }
  {
    // What is open stays, and that it is gone is said once.
    ScratchFile f(bytes);
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

TEST_CASE("a header that names its tokenizer", "[data]") {
  const std::vector<uint16_t> t = {1, 2, 3, 99, 4, 99};
  const Named named;
  {
    ScratchFile f(named.file(t));
    auto corpus = open_corpus(f.path, 100, 4, 0, Split::all);
    CHECK(tokens_of(*corpus) == std::vector<int32_t>(t.begin(), t.end()));
    CHECK(corpus->tokenizer == "tiktoken gpt2");
    CHECK(corpus->vocab == 100);
    CHECK(corpus->text_bytes == 40);
    CHECK(corpus->end_of_document == 99);
    CHECK(corpus->description == f.path + " (uint16 tokens of tiktoken gpt2)");
    // The tokens would do: it is the tokenizer that has too many, and a prompt or other files may bring them.
    refused(refusal(f.path, 99),
            {f.path.c_str(), "vocabulary in its header, 100 (tiktoken gpt2)", "99", "--vocab 104"});
  }
  Named plain = named;
  plain.text_bytes = 0, plain.end = 0xffffffff;
  ScratchFile f(plain.file(t));
  auto corpus = open_corpus(f.path, 100, 4, 0, Split::all);
  CHECK(corpus->text_bytes == -1);
  CHECK(corpus->end_of_document == -1);
  auto wrong = [&](Named n) {
    ScratchFile bad(n.file(t));
    const std::string text = refusal(bad.path, 1 << 20);
    refused(text, {bad.path.c_str()});
    return text;
  };
  auto with = [&](auto change) {
    Named n = named;
    change(&n);
    return wrong(n);
  };
  refused(with([](Named* n) { n->width = 3; }), {"3 bytes a token", "1, 2 or 4"});
  refused(with([](Named* n) { n->vocab = 0; }), {"vocabulary of 0", "65536"});
  refused(with([](Named* n) { n->vocab = 65537; }), {"vocabulary of 65537"});
  Named largest = named;
  largest.vocab = 65536;
  ScratchFile all_of_two_bytes(largest.file(t));
  CHECK(refusal(all_of_two_bytes.path, 65536).empty());
  refused(with([](Named* n) { n->text_bytes = ~uint64_t(0); }), {"18446744073709551615 bytes of text"});
  refused(with([](Named* n) { n->text_bytes = uint64_t(1) << 61; }), {"2305843009213693952 bytes of text in"});
  std::vector<uint16_t> beyond = t;
  beyond[1] = 100;
  ScratchFile of_another(named.file(beyond));
  refused(refusal(of_another.path),
          {"token 100 at index 1 (byte 258) is not below the vocabulary in the file's header, 100"});
  refused(with([](Named* n) { n->end = 100; }), {"token 100 ends a document"});
  refused(with([](Named* n) { n->tokenizer = ""; }), {"no name of a tokenizer"});
  refused(with([](Named* n) { n->tokenizer = "\x1b[31m"; }), {"no name of a tokenizer"});
  ScratchFile old(token_file(2, 6, as_bytes(t)).replace(12, 4, as_bytes<uint32_t>({50257})));
  refused(refusal(old.path, 50256), {"vocabulary in its header, 50257", "--vocab 50264"});
  CHECK(refusal(old.path, 50257).empty());
}

TEST_CASE("many files are one that holds them all", "[data]") {
  std::vector<uint16_t> all(1000);
  std::iota(all.begin(), all.end(), uint16_t(0));
  const ScratchDirectory directory;
  const std::string dir = directory.path + "/";
  std::vector<std::string> made;
  auto write = [&](const std::string& name, const std::string& bytes) {
    std::ofstream(dir + name, std::ios::binary) << bytes;
    made.push_back(dir + name);
  };
  Named named;
  named.vocab = 1000, named.end = 0xffffffff;
  auto part = [&](size_t from, size_t to) {
    return named.file({all.begin() + int64_t(from), all.begin() + int64_t(to)});
  };
  write("shard_0.bin", part(0, 300));
  write("shard_1.bin", part(300, 303));  // shorter than a window
  write("shard_2.bin", part(303, 1000));
  write("whole", named.file(all));
  for (const Split split : {Split::all, Split::training, Split::validation})
    for (const int64_t seq : {7, 64}) {
      auto many = open_corpus(dir + "shard_*.bin", 1000, seq, 0, split);
      auto one = open_corpus(dir + "whole", 1000, seq, 0, split);
      REQUIRE(tokens_of(*many) == tokens_of(*one));
      CHECK(many->text_bytes == 3 * 40);
      const Sampler a = {many.get(), seq, 42}, b = {one.get(), seq, 42};
      REQUIRE(a.windows() == b.windows());
      for (int64_t n = 0; n < 3 * a.windows(); n++) {
        std::vector<int32_t> x(static_cast<size_t>(seq)), y = x, tx = x, ty = x;
        a.sequence(n, x.data(), tx.data());
        b.sequence(n, y.data(), ty.data());
        CHECK((x == y && tx == ty));
      }
    }
  auto names = [&](const std::string& patterns) {
    std::string text;
    for (const std::string& path : data_files(patterns)) text += files::file_name(path) + " ";
    return text;
  };
  CHECK(names(dir + "shard_*.bin") == "shard_0.bin shard_1.bin shard_2.bin ");
  CHECK(names(dir + "shard_[12].bin," + dir + "shard_0*") == "shard_1.bin shard_2.bin shard_0.bin ");
  CHECK(names(dir + "whole") == "whole ");
  CHECK(names(dir + "none") == "none ");
  write("a,b*.bin", "a name that looks like patterns");
  CHECK(names(dir + "a,b*.bin") == "a,b*.bin ");
  auto corpus = open_corpus(dir + "shard_?.bin", 1000, 4, 0, Split::all);
  refused(corpus->description, {"shard_?.bin (3 files, uint16 tokens of tiktoken gpt2)"});
  REQUIRE(corpus->files.size() == 3);
  CHECK(corpus->files[1].tokens == 3);

  refused(refusal(dir + "none*.bin", 1000), {"none*.bin", "no file matches"});
  write("caf\xe9.bin", "a name in Latin 1");
  refused(refusal(dir + "caf?.bin", 1000), {"caf?.bin", "/caf\\xe9.bin is not valid UTF-8", "rename it"});
  refused(refusal(dir + "whole,", 1000), {"a name is empty"});
  refused(refusal(dir + "shard_*," + dir + "shard_1.bin", 1000), {"shard_1.bin is named twice"});
  // Several ranks share the checking, and a token of any file's is found by one of them.
  std::vector<uint16_t> bad(3500000, 5);
  bad[3400000] = 999;
  named.vocab = 900;
  write("bad_0.bin", named.file(bad));
  int found = 0;
  for (int rank = 0; rank < 2; rank++) try {
      open_corpus(dir + "bad_0.bin", 900, 4, 0, Split::all, {rank, 2});
    } catch (const UsageError& e) { found += std::string(e.what()).find("index 3400000") != std::string::npos; }
  CHECK(found == 1);
  CHECK_NOTHROW(open_corpus(dir + "bad_0.bin", 900, 4, 0, Split::validation, {0, 1, /*checked=*/true}));
  // Files of one kind.
  auto differs = [&](const char* name, const std::string& bytes) {
    write(name, bytes);
    const std::string text = refusal(dir + "whole," + dir + name, 2000);
    refused(text, {"whole", name, "differ"});
    return text;
  };
  const std::vector<uint16_t> few = {1, 2, 3, 4, 5, 6};
  named = Named();
  refused(differs("other.bin", (named.vocab = 1001, named).file(few)), {"a vocabulary of 1000 and 1001"});
  named.vocab = 1000, named.tokenizer = "bytes";
  refused(differs("name.bin", named.file(few)), {"the tokenizer tiktoken gpt2 and bytes"});
  refused(differs("wide.bin", token_file(4, 2, as_bytes<uint32_t>({1, 2}))), {"2 bytes a token and 4"});
  refused(differs("text.txt", "hello, world"), {"2 bytes a token and 1"});
  CHECK(refusal(dir + "whole," + dir + "old.bin", 1000).find("No such file") != std::string::npos);
  write("old.bin", token_file(2, 6, as_bytes(few)));  // says nothing of its tokenizer
  CHECK(refusal(dir + "whole," + dir + "old.bin", 1000).empty());
  // What one says of all stands for them, whoever says it; how much text they are is known if each says it.
  named = Named(), named.vocab = 1000, named.end = 999;
  write("said.bin", named.file(few));
  for (const std::string& names : {dir + "old.bin," + dir + "said.bin", dir + "said.bin," + dir + "old.bin"}) {
    const auto both = open_corpus(names, 1000, 4, 0, Split::all);
    CHECK(both->tokenizer == "tiktoken gpt2");
    CHECK(both->vocab == 1000);
    CHECK(both->end_of_document == 999);
    CHECK(both->text_bytes == -1);
  }
  for (const std::string& path : made) std::remove(path.c_str());
  rmdir(directory.path.c_str());
}
