#include "test/fuzz/targets.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <map>

#include "lib/device/error.h"
#include "lib/program/checkpoint_manifest.h"
#include "lib/program/data.h"
#include "lib/program/hellaswag.h"
#include "lib/program/json.h"
#include "lib/program/model_folder.h"
#include "lib/program/options.h"
#include "lib/program/safetensors.h"
#include "lib/program/sampling.h"
#include "lib/program/summary.h"
#include "lib/program/telemetry.h"

namespace {

// A regular file with these bytes that no directory knows.
struct File {
  explicit File(const std::string& bytes) : fd(memfd_create("fuzz", 0)) {
    const bool written = fd >= 0 && write(fd, bytes.data(), bytes.size()) == ssize_t(bytes.size());
    if (!written) std::perror("fuzz: memfd"), std::abort();
    path = "/proc/self/fd/" + std::to_string(fd);
  }
  ~File() { close(fd); }
  File(const File&) = delete;
  int fd;
  std::string path;
};

void parse_words(const std::vector<std::string>& words) {
  std::vector<const char*> argv = {"./train"};
  for (const std::string& w : words) argv.push_back(w.c_str());
  Options o;
  std::string text;
  parse_options(int(argv.size()), argv.data(), &o, &text);
}

// A line a word, which holds no zero, as the system passes none.
void command_line(const std::string& bytes) {
  std::vector<std::string> words(1);
  for (const char c : bytes) {
    if (c == '\n') words.emplace_back();
    else if (c) words.back() += c;
  }
  parse_words(words);
}

void config_file(const std::string& bytes) { parse_words({"--config", File(bytes).path}); }

void tokens(const std::string& bytes) {
  const File file(bytes);
  for (const Split split : {Split::all, Split::validation}) {
    const std::unique_ptr<Corpus> corpus = open_corpus(file.path, 256, 4, 0, split);
    const Sampler sampler = {corpus.get(), 4, 0};
    int32_t in[4], out[4];
    for (int64_t n = 0; n < 4; n++) sampler.sequence(n, in, out);
  }
}

void questions(const std::string& bytes) {
  const File file(bytes);
  if (has_questions(file.path)) read_questions(file.path, 256, 4);
}

// As text, and as ids; and as what a model might write.
void prompt(const std::string& bytes) {
  struct : Corpus {
    void read(int64_t, int64_t, int32_t*) const override {}
  } text, ids;
  text.tokenizer = "bytes", ids.vocab = 300;
  const std::vector<int32_t> tokens = parse_prompt(bytes, text, 256);
  (void)nlohmann::json(sample_text(tokens, /*text=*/true)).dump();  // throws where it is no UTF-8
  parse_prompt(bytes, ids, 300);
}

// The text as it is, and sealed anew, so that what lies behind the checksum is reached too.
void manifest(const std::string& bytes) {
  const auto read = [](const std::string& text) {
    const Manifest m = parse_manifest("/nowhere", text);
    read_state(m.state, m.path);
  };
  try {
    read(bytes);
  } catch (const Error&) {}
  const nlohmann::json j = nlohmann::json::parse(bytes, nullptr, /*allow_exceptions=*/false);
  if (j.is_object()) read(seal(j));
}

void log_file(const std::string& bytes) {
  const File file(bytes);
  try {
    check_log(file.path);
  } catch (const Error&) {}
  summary_markdown(summarize({file.path}, ""));
}

// The header of a file that is as long as it says the most.
void safetensors(const std::string& bytes) {
  constexpr int64_t data = 96;
  parse_safetensors(bytes, "FILE", 8 + int64_t(bytes.size()) + data);
}

void model_config(const std::string& bytes) {
  std::string model_type;
  parse_model_config(bytes, "config.json", &model_type);
}

const std::map<std::string, void (*)(const std::string&)> targets = {
    {"command-line", command_line}, {"config", config_file},      {"tokens", tokens},
    {"questions", questions},       {"prompt", prompt},           {"manifest", manifest},
    {"model-config", model_config}, {"safetensors", safetensors}, {"log", log_file}};

}  // namespace

std::vector<std::string> fuzz_targets() {
  std::vector<std::string> names;
  for (const auto& t : targets) names.push_back(t.first);
  return names;
}

void fuzz(const std::string& target, const std::string& bytes) {
  const auto t = targets.find(target);
  if (t == targets.end()) std::fprintf(stderr, "fuzz: no target '%s'\n", target.c_str()), std::abort();
  try {
    t->second(bytes);
  } catch (const Error&) {}
}
