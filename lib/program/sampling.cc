#include "lib/program/sampling.h"

#include <charconv>
#include <cmath>
#include <numeric>

#include "lib/ops/philox.h"
#include "lib/program/config_file.h"
#include "lib/program/token_file.h"

using ll = long long;

namespace {

// Uniform in [0, 1), of 53 bits, by nothing but the seed, the step and the place.
double uniform(const Draw& d, int64_t at) {
  const uint32_t key[2] = {uint32_t(d.seed), uint32_t(d.seed >> 32)};
  const uint64_t step = uint64_t(d.step);
  const Philox4 r = philox4x32({{uint32_t(at), uint32_t(step), uint32_t(step >> 32), 0x73616d70}}, key[0], key[1]);
  return double((uint64_t(r.x[0]) << 32 | r.x[1]) >> 11) * 0x1p-53;
}

// How long the UTF-8 character at `at` is; 0: it is none.
size_t utf8_length(const std::string& s, size_t at) {
  const auto byte = [&](size_t i) { return i < s.size() ? uint8_t(s[i]) : 0; };
  const uint8_t first = byte(at);
  const size_t n = first < 0x80                    ? 1
                   : first >= 0xc2 && first < 0xe0 ? 2
                   : (first & 0xf0) == 0xe0        ? 3
                   : first >= 0xf0 && first < 0xf5 ? 4
                                                   : 0;
  for (size_t i = 1; i < n; i++)
    if ((byte(at + i) & 0xc0) != 0x80) return 0;
  const uint8_t second = byte(at + 1);
  const bool overlong = (first == 0xe0 && second < 0xa0) || (first == 0xf0 && second < 0x90);
  const bool beyond = (first == 0xed && second >= 0xa0) || (first == 0xf4 && second >= 0x90);
  return overlong || beyond ? 0 : n;
}

// Text for a terminal and for JSON.
std::string printable(const std::string& s) {
  std::string text;
  for (size_t at = 0, n; at < s.size(); at += std::max<size_t>(n, 1)) {
    n = utf8_length(s, at);
    const uint8_t c = uint8_t(s[at]);
    const bool second_set = n == 2 && c == 0xc2 && uint8_t(s[at + 1]) < 0xa0;  // of control characters
    if (n == 0 || second_set) text += "\xef\xbf\xbd";                          // U+FFFD
    else if (n == 1 && c < 32 && c != '\n' && c != '\t') text += {'\xe2', '\x90', char(0x80 + c)};  // U+2400 + c
    else if (c == 127) text += "\xe2\x90\xa1";                                                      // U+2421
    else text += s.substr(at, n);
  }
  return text;
}

}  // namespace

int32_t draw_token(const float* logits, int64_t n, const Draw& draw, int64_t at) {
  std::vector<int32_t> best;
  for (int64_t i = 0; i < n; i++)
    if (!std::isnan(logits[i])) best.push_back(int32_t(i));
  if (best.empty()) return -1;
  const auto before = [&](int32_t a, int32_t b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; };
  const int64_t k = draw.temperature == 0 ? 1 : draw.top_k == 0 ? n : draw.top_k;
  if (k < int64_t(best.size())) {
    std::nth_element(best.begin(), best.begin() + (k - 1), best.end(), before);
    best.resize(size_t(k));
  }
  if (best.size() == 1) return best[0];
  std::sort(best.begin(), best.end());
  const double most = logits[*std::min_element(best.begin(), best.end(), before)];
  if (std::isinf(most)) return *std::min_element(best.begin(), best.end(), before);
  std::vector<double> sums;
  double sum = 0;
  for (const int32_t i : best) sums.push_back(sum += std::exp((double(logits[i]) - most) / draw.temperature));
  const auto drawn = std::upper_bound(sums.begin(), sums.end(), uniform(draw, at) * sum);
  return best[std::min(size_t(drawn - sums.begin()), best.size() - 1)];
}

bool is_text(const Corpus& data) { return data.tokenizer == bytes_tokenizer; }

int64_t used_vocab(const Corpus& data, int64_t vocab) {
  return std::min(vocab, data.vocab > 0 ? data.vocab : is_text(data) ? 256 : vocab);
}

std::vector<int32_t> parse_prompt(const std::string& prompt, const Corpus& data, int64_t vocab) {
  const int64_t below = used_vocab(data, vocab);
  std::vector<int32_t> tokens;
  if (prompt.empty() && data.end_of_document >= 0) return {int32_t(data.end_of_document)};
  if (is_text(data)) {
    for (const char c : prompt.empty() ? "\n" : prompt) {
      tokens.push_back(uint8_t(c));
      REQUIRE_USER(tokens.back() < below, "--prompt: byte %d is not below the vocabulary, %lld", tokens.back(),
                   ll(below));
    }
    return tokens;
  }
  for (const char *at = prompt.c_str(), *end = at + prompt.size();;) {
    at = std::find_if(at, end, [](char c) { return c != ' ' && c != ','; });
    if (at == end) break;
    int64_t token = -1;
    const auto [behind, error] = std::from_chars(at, end, token);
    const bool whole = error == std::errc() && (behind == end || *behind == ' ' || *behind == ',');
    REQUIRE_USER(
        whole && token >= 0 && token < below,
        "--prompt: '%s' is no token id from 0 to %lld; where tokens are not bytes it takes ids, as in --prompt "
        "'464 3290'",
        excerpt(std::string(at, std::find_if(
                                    at, end, [](char c) { return c == ' ' || c == ','; })))
            .c_str(),
        ll(below - 1));
    tokens.push_back(int32_t(token)), at = behind;
  }
  REQUIRE_USER(!tokens.empty(), "--sample: nothing says which token begins a document of %s; give --prompt token ids",
               data.description.c_str());
  return tokens;
}

std::string sample_text(const std::vector<int32_t>& tokens, bool text) {
  if (text) return printable(std::string(tokens.begin(), tokens.end()));
  std::string ids;
  for (const int32_t t : tokens) ids += (ids.empty() ? "" : " ") + std::to_string(t);
  return ids;
}

Finding sample_finding(const std::vector<int32_t>& tokens, int64_t wanted, const Corpus& data, int64_t step) {
  const std::string text = sample_text(tokens, is_text(data));
  nlohmann::json record = {{"after_step", step}, {"tokens", tokens}};
  if (is_text(data)) record["text"] = text;
  const char* const why = int64_t(tokens.size()) < wanted ? " (it ends here: no logit is a number)" : "";
  return {strf("sample after step %lld: ", ll(step)) + text + why, {{"sample", record}}};
}
