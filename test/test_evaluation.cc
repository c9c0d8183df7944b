// What a model is asked beside its steps, at any number of ranks: losses of sequences, answers to questions, samples.
#include <cmath>
#include <cstdio>
#include <fstream>
#include <numeric>

#include <unistd.h>

#include "lib/program/evaluation.h"
#include "lib/program/hellaswag.h"
#include "lib/program/plan.h"
#include "lib/program/sampling.h"
#include "test/catch.h"
#include "test/scratch.h"

namespace {

// A file that all ranks read and rank 0 writes.
struct SharedFile {
  SharedDirectory dir;
  std::string path = dir / "file";
  explicit SharedFile(const std::string& bytes) {
    if (test_world().rank == 0) dir.file("file", bytes);
    barrier();
  }
};

using M = Model<float, float>;

struct Harness {
  const World& world = test_world();
  Run r;
  Transport transport = world.size > 1 ? Transport::mpi : Transport::none;
  Device dev{Backend::cpu, 0, world.size, comm_streams(Backend::cpu, transport)};
  std::unique_ptr<M> model;

  // Initial weights, but for those that begin as zero or one: these would hide what goes wrong with them.
  explicit Harness(Options o) {
    o.device = "cpu", o.preset = "tiny", o.eval = "planned", o.sample = 1;
    if (o.dim == 0) o.dim = 32, o.heads = 2, o.kv_heads = 1, o.hidden = 64;
    r = resolve(o, world.size, 0);
    plan(dev, world, transport, r);
    dev.mem.commit(), dev.mem.rewind();
    dev.mode = Mode::run;
    ops::keep_workspace(dev);
    model = std::make_unique<M>(dev, world, transport, r.model, r.batch, r.fsdp, Links::open);
    model->init_weights();
  }
  std::vector<double> losses(const EvalSet& set) { return sequence_losses(dev, world, *model, r.model, r.batch, set); }
  // The logits behind row `row` of a micro-batch whose first sequence is `tokens`, with `behind` in all that follows.
  std::vector<float> logits(const std::vector<int32_t>& tokens, int64_t row, int32_t behind = 0) {
    const int64_t rows = r.batch * r.model.seq;
    HostBuffer<int32_t> batch(dev, batch_ints(r.model, r.batch));
    HostBuffer<float> out(dev, r.model.vocab);
    Event copied(dev);
    int32_t* to = micro_batch_at(batch.get(), rows).tokens;
    std::fill(to, to + rows, behind);
    std::copy(tokens.begin(), tokens.end(), to);
    sample_program(dev, *model, batch.get(), row, out.get(), copied);
    dev.compute().synchronize();
    dev.check();
    model->fsdp.empty_slots();
    return std::vector<float>(out.get(), out.get() + out.size());
  }
  // -log softmax of a token, in double.
  double loss(const std::vector<int32_t>& tokens, int64_t row, int32_t target) {
    const std::vector<float> l = logits(tokens, row);
    double sum = 0;
    for (float x : l) sum += std::exp(double(x));
    return std::log(sum) - double(l[size_t(target)]);
  }
};

Options sized(int64_t seq, int64_t batch) {
  Options o;
  o.seq = seq, o.batch = batch;
  return o;
}

std::vector<int32_t> some_tokens(int64_t n, int64_t vocab) {
  std::vector<int32_t> t;
  for (int64_t i = 0; i < n; i++) t.push_back(int32_t((i * i * 31 + i * 7 + 3) % vocab));
  return t;
}

std::string u16s(const std::vector<int32_t>& v) {
  std::string s;
  for (int32_t x : v) s += char(x & 255), s += char(x >> 8);
  return s;
}

std::string questions_file(const std::vector<Question>& questions) {
  std::vector<int32_t> header(256);
  header[0] = 20240522, header[1] = 1, header[2] = int32_t(questions.size());
  std::string bytes(reinterpret_cast<const char*>(header.data()), 1024);
  for (const Question& q : questions) {
    std::vector<int32_t> v = {65535, 0, 7, int32_t(q.right), int32_t(q.answers.size()), int32_t(q.context.size())};
    v.insert(v.end(), q.context.begin(), q.context.end());
    for (const auto& a : q.answers) v.push_back(int32_t(a.size())), v.insert(v.end(), a.begin(), a.end());
    v[1] = 2 * int32_t(v.size());
    bytes += u16s(v);
  }
  return bytes;
}

}  // namespace

TEST_CASE("every token of a file but the first is a target once, at any number of ranks", "[evaluation]") {
  // 107 tokens: 106 targets, in windows of 32 three and one of 10, for batches of 2 on 1 to 4 ranks.
  for (const char* attn : {"dense", "nsa"}) {
    Options o = sized(32, 2);
    o.attn = attn;
    o.norm_eps = 0.5;  // in every norm, of one path through the head as of the other
    Harness h(o);
    const std::vector<int32_t> tokens = some_tokens(107, 250);
    std::string text(tokens.begin(), tokens.end());
    const SharedFile file(text);
    const auto set = open_eval(file.path, h.r.model.vocab, 32);
    REQUIRE(set->sequences() == 4);
    const std::vector<double> losses = h.losses(*set);
    double sum = 0;
    for (int64_t first = 0, i = 0; first < 106; first += 32, i++) {
      const int64_t n = std::min<int64_t>(32, 106 - first);
      const std::vector<int32_t> window(tokens.begin() + first, tokens.begin() + first + n);
      double here = 0;
      for (int64_t t = 0; t < n; t++) here += h.loss(window, t, tokens[size_t(first + t + 1)]);
      CHECK(losses[size_t(i)] == Approx(here).epsilon(1e-5));
      sum += here;
    }
    const nlohmann::json found = evaluated(*set, losses).record.at("eval");
    CHECK(found.at("targets") == 106);
    CHECK(found.at("loss").get<double>() == Approx(sum / 106).epsilon(1e-5));
    CHECK(found.at("perplexity").get<double>() == Approx(std::exp(sum / 106)).epsilon(1e-4));
    CHECK(found.at("bits_per_byte").get<double>() == Approx(sum / 106 / std::log(2.0)).epsilon(1e-5));
  }
}

TEST_CASE("a file of fewer tokens than a window, or than there are ranks", "[evaluation]") {
  Harness h(sized(32, 1));
  const SharedFile file("ab");
  const auto set = open_eval(file.path, h.r.model.vocab, 32);
  REQUIRE(set->sequences() == 1);
  CHECK(h.losses(*set)[0] == Approx(h.loss({'a'}, 0, 'b')).epsilon(1e-5));
}

TEST_CASE("questions are answered by the lowest mean loss, at any number of ranks", "[evaluation]") {
  Harness h(sized(32, 2));
  std::vector<Question> questions;
  std::vector<double> of_answers;
  int64_t by_mean = 0, by_sum = 0;
  for (int64_t i = 0; i < 7; i++) {
    Question q;
    q.context = some_tokens(i == 6 ? 40 : 3 + i, 200);  // the last one's does not fit
    for (int64_t a = 0; a < 4; a++) {
      q.answers.push_back(some_tokens(1 + (a * 3 + i) % 5, 190 + a));
      q.answers.back()[0] = int32_t(10 * i + a);
    }
    std::vector<double> sums, means;
    for (const auto& answer : q.answers) {
      std::vector<int32_t> tokens = q.context;
      tokens.insert(tokens.end(), answer.begin(), answer.end());
      if (tokens.size() > 33) tokens.erase(tokens.begin(), tokens.end() - 33);
      double sum = 0;
      for (size_t t = tokens.size() - answer.size(); t < tokens.size(); t++)
        sum += h.loss({tokens.begin(), tokens.end() - 1}, int64_t(t) - 1, tokens[t]);
      sums.push_back(sum), means.push_back(sum / double(answer.size())), of_answers.push_back(sum);
    }
    const int64_t best = std::min_element(means.begin(), means.end()) - means.begin();
    q.right = i % 3 == 2 ? (best + 1) % 4 : best;
    by_mean += q.right == best;
    by_sum += q.right == std::min_element(sums.begin(), sums.end()) - sums.begin();
    questions.push_back(q);
  }
  REQUIRE(by_mean == 5);
  REQUIRE(by_mean != by_sum);  // or the norm would not show
  const SharedFile file(questions_file(questions));
  const auto set = open_eval(file.path, h.r.model.vocab, 32);
  REQUIRE(set->sequences() == 28);
  const std::vector<double> losses = h.losses(*set);
  for (size_t i = 0; i < losses.size(); i++) CHECK(losses[i] == Approx(of_answers[i]).epsilon(1e-5));
  const Finding f = evaluated(*set, losses);
  const nlohmann::json found = f.record.at("eval");
  CHECK(found.at("right_norm") == by_mean);
  CHECK(found.at("questions") == 7);
  CHECK(found.at("acc").get<double>() == Approx(double(by_sum) / 7));
  INFO(f.line);
  CHECK(f.line.find("acc_norm 0.7143 (5 of 7 questions)") != std::string::npos);
  CHECK(f.line.find("4 contexts are cut to --seq 32") != std::string::npos);
  // A NaN is less than nothing and nothing is less than it: the first answer would be the best.
  std::vector<double> broken = losses;
  broken[3] = NAN;
  const Finding unknown = evaluated(*set, broken);
  CHECK(unknown.record.is_null());
  CHECK(unknown.wrong.find("the loss of sequence 4 of 28 is nan") != std::string::npos);
}

TEST_CASE("what follows a row does not change its logits, in any architecture", "[evaluation]") {
  for (const char* arch : {"simple", "rope", "llama", "mlp"})
    for (const char* attn : {"dense", "nsa"}) {
      if (std::string(arch) == "mlp" && std::string(attn) == "nsa") continue;
      Options o = sized(96, 2);
      o.arch = arch, o.tie_embeddings = std::string(arch) == "llama";
      if (std::string(arch) != "mlp") o.attn = attn;
      o.nsa_block = 8, o.nsa_stride = 4, o.nsa_select_block = 16, o.nsa_selected = 3, o.nsa_window = 16;
      Harness h(o);
      INFO(arch << " " << attn);
      const std::vector<int32_t> tokens = some_tokens(96, 256);
      for (const int64_t row : {0, 1, 17, 50, 95}) {
        const std::vector<int32_t> prefix(tokens.begin(), tokens.begin() + row + 1);
        const std::vector<float> a = h.logits(prefix, row), b = h.logits(prefix, row, 201);
        CHECK(a == b);
        CHECK(a != h.logits({tokens.begin(), tokens.begin() + row + 1}, row > 0 ? row - 1 : 1));
      }
    }
}

TEST_CASE("a sample is a walk of argmax at temperature 0, forgets its beginning, and repeats", "[evaluation]") {
  Harness h(sized(32, 1));
  Writer<float, float> writer(h.dev, h.world, *h.model, h.r.model, h.r.batch);
  const std::vector<int32_t> prompt = some_tokens(28, 256);
  const std::vector<int32_t> greedy = writer.write(prompt, 10, {0, 0, 5, 1, 256});
  REQUIRE(greedy.size() == 38);
  for (size_t n = 28; n < 38; n++) {
    const std::vector<int32_t> seen(greedy.begin() + int64_t(n > 32 ? n - 32 : 0), greedy.begin() + int64_t(n));
    const std::vector<float> l = h.logits(seen, int64_t(seen.size()) - 1);
    CHECK(greedy[n] == std::max_element(l.begin(), l.end()) - l.begin());
  }
  const auto drawn = [&](uint64_t seed, int64_t step) { return writer.write(prompt, 10, {1, 0, seed, step, 256}); };
  CHECK(drawn(5, 1) == drawn(5, 1));
  CHECK(drawn(5, 1) != drawn(6, 1));
  CHECK(drawn(5, 1) != drawn(5, 2));
  // The same on all ranks.
  const std::string mine = sample_text(drawn(5, 1), false);
  CHECK(broadcast_text(mine) == mine);
  // Rows of the head that no tokenizer uses.
  for (const int32_t t : writer.write({3}, 30, {10, 0, 1, 1, 4})) CHECK(t < 4);
}
