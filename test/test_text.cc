// Tokens and text without a model: drawing a token, prompts, what is printed, files of questions.
#include <cmath>
#include <cstring>
#include <fstream>
#include <unistd.h>

#include "lib/program/hellaswag.h"
#include "lib/program/sampling.h"
#include "test/catch.h"
#include "test/errors.h"
#include "test/scratch.h"

namespace {

struct Known : Corpus {  // a corpus of nothing but what is known of it
  void read(int64_t, int64_t, int32_t*) const override {}
};

std::string questions(std::vector<int32_t> header, const std::vector<uint16_t>& numbers) {
  header.resize(256);
  return std::string(reinterpret_cast<const char*>(header.data()), 1024) +
         std::string(reinterpret_cast<const char*>(numbers.data()), 2 * numbers.size());
}

}  // namespace

TEST_CASE("a token is drawn as often as the softmax says", "[text]") {
  const float logits[] = {1, -2, 0.5f, 3, 3, NAN, -INFINITY};
  const int n = 20000;
  auto counts = [&](double temperature, int64_t top_k) {
    std::vector<int> count(7);
    for (int i = 0; i < n; i++) count[size_t(draw_token(logits, 7, {temperature, top_k, 3, 1, 7}, i))]++;
    return count;
  };
  auto expected = [&](double temperature, const std::vector<int>& among) {
    std::vector<double> p(7);
    double sum = 0;
    for (int i : among) sum += p[size_t(i)] = std::exp(double(logits[i]) / temperature);
    for (double& x : p) x /= sum;
    return p;
  };
  auto agree = [&](const std::vector<int>& count, const std::vector<double>& p) {
    for (size_t i = 0; i < 7; i++) {
      INFO("token " << i);
      CHECK(std::fabs(count[i] - n * p[i]) <= 4 * std::sqrt(n * p[i]) + 1e-9);
    }
  };
  agree(counts(1, 0), expected(1, {0, 1, 2, 3, 4}));
  agree(counts(3, 0), expected(3, {0, 1, 2, 3, 4}));
  agree(counts(1, 3), expected(1, {0, 3, 4}));
  agree(counts(1, 1), expected(1, {3}));  // of those alike the lowest
  agree(counts(0, 0), expected(1, {3}));
  CHECK(draw_token(logits + 5, 1, {1, 0, 0, 1, 1}, 0) == -1);
  const float infinite[] = {1, INFINITY, 2}, none[] = {-INFINITY, -INFINITY};
  CHECK(draw_token(infinite, 3, {1, 0, 0, 1, 3}, 0) == 1);
  CHECK(draw_token(none, 2, {1, 0, 0, 1, 2}, 0) == 0);
  CHECK(draw_token(logits + 5, 2, {1, 0, 0, 1, 2}, 0) == 1);
}

TEST_CASE("a prompt is text where tokens are bytes, and token ids elsewhere", "[text]") {
  Known bytes, ids, marked;
  bytes.tokenizer = "bytes";
  ids.vocab = 300;
  marked.tokenizer = "tiktoken gpt2", marked.vocab = 50257, marked.end_of_document = 50256;
  using Tokens = std::vector<int32_t>;
  CHECK(parse_prompt("a\xc3\xa9", bytes, 264) == Tokens{97, 195, 169});
  CHECK(parse_prompt("", bytes, 256) == Tokens{10});
  CHECK(parse_prompt("", marked, 50304) == Tokens{50256});
  CHECK(parse_prompt("3, 299 0", ids, 512) == Tokens{3, 299, 0});
  CHECK(has(error_of<UsageError>([&] { parse_prompt("a\xc3\xa9", bytes, 128); }), "byte 195"));
  CHECK(has(error_of<UsageError>([&] { parse_prompt("", ids, 512); }), "--prompt"));
  CHECK(has(error_of<UsageError>([&] { parse_prompt("3 300", ids, 512); }), "'300' is no token id from 0 to 299"));
  CHECK(has(error_of<UsageError>([&] { parse_prompt("3 -1", ids, 512); }), "'-1'"));
  CHECK(has(error_of<UsageError>([&] { parse_prompt("Once upon", ids, 512); }), "'Once'"));
  CHECK(has(error_of<UsageError>([&] { parse_prompt("3 99999999999999999999", ids, 512); }), "'99999999999999999999'"));
  CHECK(used_vocab(bytes, 264) == 256);
  CHECK(used_vocab(marked, 50304) == 50257);
  CHECK(used_vocab(Known(), 512) == 512);
}

TEST_CASE("a sample is printed so that no terminal obeys it", "[text]") {
  auto shown = [](const std::string& s) {
    std::vector<int32_t> tokens;
    for (char c : s) tokens.push_back(uint8_t(c));
    return sample_text(tokens, true);
  };
  const std::string unknown = "\xef\xbf\xbd";
  CHECK(shown("two\nlines\t\xe2\x82\xac \xf0\x9f\x98\x80") == "two\nlines\t\xe2\x82\xac \xf0\x9f\x98\x80");
  CHECK(shown("\x1b[31m") == "\xe2\x90\x9b[31m");
  CHECK(shown(std::string("\0\x7f\r", 3)) == "\xe2\x90\x80\xe2\x90\xa1\xe2\x90\x8d");
  CHECK(shown("\xc2\x9b") == unknown);  // a control character of two bytes
  // Cut, overlong, a surrogate, beyond the last.
  CHECK(shown("a\xe2\x82") == "a" + unknown + unknown);
  CHECK(shown("\xc0\xaf") == unknown + unknown);
  CHECK(shown("\xe0\x80\x80") == unknown + unknown + unknown);
  CHECK(shown("\xed\xa0\x80") == unknown + unknown + unknown);
  CHECK(shown("\xf4\x90\x80\x80") == unknown + unknown + unknown + unknown);
  CHECK(sample_text({5, 300, 7}, false) == "5 300 7");
  CHECK(sample_finding({5, 300}, 2, Known(), 20).line == "sample after step 20: 5 300");
  CHECK(has(sample_finding({5, 300}, 3, Known(), 20).line, "no logit is a number"));
}

TEST_CASE("files of questions, and what is wrong with them", "[text]") {
  const std::vector<uint16_t> good = {65535, 28, 0, 1, 2, 2, 5, 6, 1, 7, 3, 8, 9, 10};
  const std::vector<int32_t> header = {20240522, 1, 1, 28};
  auto read = [](const std::string& bytes, int64_t seq = 8) {
    const ScratchFile f(bytes);
    CHECK(has_questions(f.path));
    return read_questions(f.path, 100, seq);
  };
  const std::vector<Question> q = read(questions(header, good));
  REQUIRE(q.size() == 1);
  CHECK(q[0].context == std::vector<int32_t>{5, 6});
  CHECK(q[0].answers == std::vector<std::vector<int32_t>>{{7}, {8, 9, 10}});
  CHECK(q[0].right == 1);

  auto wrong = [&](size_t at, uint16_t value) {
    std::vector<uint16_t> bad = good;
    bad[at] = value;
    const std::string text = error_of<UsageError>([&] { read(questions(header, bad)); });
    CHECK(has(text, "/fsdp-test-"));
    CHECK(!has(text, "\n"));
    return text;
  };
  CHECK(has(wrong(0, 1), "question 0, byte 1024: it does not begin with 65535"));
  CHECK(has(wrong(1, 30), "it has 28 bytes and says 30"));
  CHECK(has(wrong(3, 2), "answer 2 is said to be right, of 2"));
  CHECK(has(wrong(4, 3), "the file ends before an answer"));
  CHECK(has(wrong(4, 0), "answer 1 is said to be right, of 0"));
  CHECK(has(wrong(5, 0), "byte 1034: the context is empty"));
  CHECK(has(wrong(5, 60000), "the file ends before the context"));
  CHECK(has(wrong(6, 100), "byte 1036: token 100 is not below the vocabulary, 100"));
  CHECK(has(wrong(8, 0), "an answer is empty"));
  CHECK(has(error_of<UsageError>([&] { read(questions(header, good), 2); }), "answer of 3 tokens, more than --seq 2"));
  CHECK(has(error_of<UsageError>([&] { read(questions({20240522, 2, 1}, good)); }), "version"));
  CHECK(has(error_of<UsageError>([&] { read(questions({20240522, 1, 2}, good)); }), "question 1, byte 1052"));
  CHECK(has(error_of<UsageError>([&] { read(questions({20240522, 1, 0}, good)); }), "0 questions"));
  CHECK(has(error_of<UsageError>([&] { read(questions({20240522, 1, -1}, good)); }), "-1 questions"));
  std::vector<uint16_t> longer = good;
  longer.push_back(0);
  CHECK(has(error_of<UsageError>([&] { read(questions(header, longer)); }), "longer than its header says"));
  CHECK(has(error_of<UsageError>([&] { read(questions(header, good).substr(0, 900)); }), "inside its header"));
  CHECK(has(error_of<UsageError>([&] { read(questions(header, good) + "x"); }), "even number"));
  CHECK(!has_questions("/tmp"));
  CHECK(!has_questions("/nowhere"));
}
