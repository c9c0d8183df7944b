#include "lib/program/evaluation.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "lib/program/format.h"
#include "lib/program/hellaswag.h"

using nlohmann::json;

namespace {

// Windows of seq targets, side by side; the last may be shorter.
struct TextEval : EvalSet {
  std::unique_ptr<Corpus> corpus;
  int64_t seq;

  TextEval(std::unique_ptr<Corpus> c, int64_t seq) : corpus(std::move(c)), seq(seq) { kind = *corpus; }
  int64_t targets() const { return corpus->count - 1; }
  int64_t sequences() const override { return (targets() + seq - 1) / seq; }
  void sequence(int64_t i, int32_t* inputs, int32_t* wanted) const override {
    const int64_t first = i * seq, n = std::min(seq, targets() - first);
    std::vector<int32_t> tokens(size_t(n + 1));
    corpus->read(first, n + 1, tokens.data());
    std::fill(inputs + n, inputs + seq, 0);
    std::fill(wanted + n, wanted + seq, -1);
    std::copy(tokens.begin(), tokens.end() - 1, inputs);
    std::copy(tokens.begin() + 1, tokens.end(), wanted);
  }
  Finding result(const std::vector<double>& losses) const override {
    const double loss = std::accumulate(losses.begin(), losses.end(), 0.0) / double(targets());
    // A token has so many bytes of text on average; the first one, which nothing predicts, too.
    const bool known = corpus->text_bytes > 0;
    const double bits = known ? loss / std::log(2.0) * double(corpus->count) / double(corpus->text_bytes) : 0;
    const std::string bits_text = known ? strf("%.4f bits per byte", bits)
                                        : "bits per byte unknown (the header does not say how many bytes the text has)";
    const double perplexity = std::exp(loss);
    return {strf(perplexity < 1e6 ? "evaluated %s: loss %.6f, perplexity %.4f, %s; %s targets, each once"
                                  : "evaluated %s: loss %.6f, perplexity %.3g, %s; %s targets, each once",
                 names.c_str(), loss, perplexity, bits_text.c_str(), grouped(targets()).c_str()),
            {{"eval",
              {{"file", names},
               {"loss", loss},
               {"perplexity", perplexity},
               {"bits_per_byte", known ? json(bits) : json()},
               {"targets", targets()}}}}};
  }
};

// A sequence is a context and one of its answers, of which the answer is scored.
struct QuestionEval : EvalSet {
  std::vector<Question> questions;
  int64_t seq;
  std::vector<std::pair<int64_t, int64_t>> of_sequence;  // question, answer
  int64_t shortened = 0;                                 // sequences whose context does not fit

  QuestionEval(std::vector<Question> q, int64_t seq) : questions(std::move(q)), seq(seq) {
    for (size_t i = 0; i < questions.size(); i++)
      for (size_t a = 0; a < questions[i].answers.size(); a++) {
        of_sequence.push_back({int64_t(i), int64_t(a)});
        shortened += int64_t(questions[i].context.size() + questions[i].answers[a].size()) > seq + 1;
      }
  }
  int64_t sequences() const override { return int64_t(of_sequence.size()); }
  void sequence(int64_t i, int32_t* inputs, int32_t* targets) const override {
    const auto [question, answer] = of_sequence[size_t(i)];
    const Question& q = questions[size_t(question)];
    std::vector<int32_t> tokens = q.context;
    const std::vector<int32_t>& scored = q.answers[size_t(answer)];
    tokens.insert(tokens.end(), scored.begin(), scored.end());
    // What does not fit is the beginning of the context.
    const int64_t n = std::min(seq, int64_t(tokens.size()) - 1);
    std::fill(inputs, inputs + seq, 0);
    std::fill(targets, targets + seq, -1);
    std::copy(tokens.end() - 1 - n, tokens.end() - 1, inputs);
    std::copy(scored.begin(), scored.end(), targets + n - int64_t(scored.size()));
  }
  Finding result(const std::vector<double>& losses) const override {
    int64_t right = 0, right_by_sum = 0;
    size_t at = 0;
    for (const Question& q : questions) {
      size_t best = 0, best_by_sum = 0;  // the first of those that are alike
      const double* sum = losses.data() + at;
      auto mean = [&](size_t a) { return sum[a] / double(q.answers[a].size()); };
      for (size_t a = 1; a < q.answers.size(); a++) {
        if (mean(a) < mean(best)) best = a;
        if (sum[a] < sum[best_by_sum]) best_by_sum = a;
      }
      right += int64_t(best) == q.right, right_by_sum += int64_t(best_by_sum) == q.right;
      at += q.answers.size();
    }
    const double all = double(questions.size());
    const std::string cut =
        shortened ? strf("; %s contexts are cut to --seq %lld", grouped(shortened).c_str(), static_cast<long long>(seq))
                  : "";
    return {strf("evaluated %s: acc_norm %.4f (%s of %s questions), acc %.4f%s", names.c_str(), double(right) / all,
                 grouped(right).c_str(), grouped(int64_t(questions.size())).c_str(), double(right_by_sum) / all,
                 cut.c_str()),
            {{"eval",
              {{"file", names},
               {"acc_norm", double(right) / all},
               {"acc", double(right_by_sum) / all},
               {"right_norm", right},
               {"questions", questions.size()}}}}};
  }
};

}  // namespace

std::unique_ptr<EvalSet> open_eval(const std::string& names, int64_t vocab, int64_t seq, Reader reader) {
  const std::vector<std::string> paths = data_files(names);
  std::unique_ptr<EvalSet> set;
  if (paths.size() == 1 && has_questions(paths[0]))
    set = std::make_unique<QuestionEval>(read_questions(paths[0], vocab, seq), seq);
  else set = std::make_unique<TextEval>(open_whole_corpus(names, vocab, reader), seq);
  set->names = names;
  return set;
}

Finding evaluated(const EvalSet& set, const std::vector<double>& losses) {
  const auto bad = std::find_if(losses.begin(), losses.end(), [](double loss) { return !std::isfinite(loss); });
  if (bad == losses.end()) return set.result(losses);
  return {"",
          {},
          strf("--eval %s: the loss of sequence %td of %zu is %f with these weights, so nothing is said of them; "
               "train with a lower --lr, or begin with other weights",
               set.names.c_str(), bad - losses.begin() + 1, losses.size(), plain_nan(*bad))};
}
