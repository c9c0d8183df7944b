// The command line: help, the file of options, and each kind of mistake in one line.
#include <cctype>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <limits>
#include <sstream>

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "lib/program/options.h"
#include "lib/program/telemetry.h"
#include "nlohmann/json.hpp"
#include "test/catch.h"

namespace {

bool parse(std::vector<const char*> arguments, Options* o, std::string* text) {
  arguments.insert(arguments.begin(), "train");
  return parse_options(int(arguments.size()), arguments.data(), o, text);
}

Options parsed(const std::vector<const char*>& arguments) {
  Options o;
  std::string text;
  REQUIRE(parse(arguments, &o, &text));
  return o;
}

std::string refusal(const std::vector<const char*>& arguments) {
  Options o;
  std::string text;
  try {
    parse(arguments, &o, &text);
  } catch (const UsageError& e) { return e.what(); }
  return "";
}

void refused(const std::vector<const char*>& arguments, std::initializer_list<const char*> words) {
  const std::string text = refusal(arguments);
  std::string line;
  for (const char* a : arguments) line += std::string(a) + " ";
  INFO(line << "-> " << text);
  CHECK(!text.empty());
  CHECK(text.find('\n') == std::string::npos);
  for (const char* word : words) {
    INFO(word);
    CHECK(text.find(word) != std::string::npos);
  }
}

struct ConfigFile {
  std::string path;
  explicit ConfigFile(const std::string& text) {
    char name[] = "/tmp/fsdp-test-XXXXXX";
    const int fd = mkstemp(name);
    REQUIRE(fd >= 0);
    close(fd);
    path = name;
    std::ofstream(path) << text;
  }
  ~ConfigFile() { std::remove(path.c_str()); }
};

}  // namespace

TEST_CASE("help names every option, its values and its default", "[options]") {
  Options o;
  std::string help;
  REQUIRE(!parse({"--help"}, &o, &help));
  const auto all = to_json(Options());
  for (const auto& [key, value] : all.items()) {
    std::string name = "--" + key;
    for (char& c : name)
      if (c == '_') c = '-';
    INFO(name);
    CHECK(help.find("\n  " + name + " ") != std::string::npos);
  }
  for (const char* word : {"Model\n", "Batch\n", "Optimizer\n", "Data\n", "Precision\n", "Sharding\n", "Machine\n",
                           "Output\n", "Instead of training\n", "--config FILE", "default: 0.0003"})
    CHECK(help.find(word) != std::string::npos);
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) CHECK(line.size() <= 100);
  // Help is for those whose command line is wrong, too.
  std::string again;
  CHECK(!parse({"--dim", "x", "-h"}, &o, &again));
  CHECK(help == again);
}

TEST_CASE("options are read", "[options]") {
  const Options o = parsed({"--preset", "tiny", "--dim=96", "--kv-heads", "2", "--lr", "1e-3", "--tf32", "--seed",
                            "9000000000000000", "--data", "some file.txt", "--stop-after", "7", "--warmup", "0"});
  CHECK(o.preset == "tiny");
  CHECK(o.dim == 96);
  CHECK(o.kv_heads == 2);
  CHECK(o.lr == 1e-3);
  CHECK(o.tf32);
  CHECK(o.seed == 9000000000000000ull);
  CHECK(o.data == "some file.txt");
  CHECK(o.stop_after == 7);
  CHECK(o.warmup == 0);
  CHECK(o.depth == 0);
  CHECK(o.device == "auto");
  CHECK(to_json(parsed({})) == to_json(Options()));
}

TEST_CASE("options make a round trip through a file", "[options]") {
  // Every option away from its default.
  const Options o = parsed({"--preset",
                            "rope",
                            "--arch",
                            "llama",
                            "--dim",
                            "256",
                            "--depth",
                            "3",
                            "--heads",
                            "4",
                            "--kv-heads",
                            "2",
                            "--hidden",
                            "100",
                            "--vocab",
                            "257",
                            "--seq",
                            "33",
                            "--rope-base",
                            "10000.5",
                            "--batch",
                            "3",
                            "--global-batch",
                            "13",
                            "--grad-accum",
                            "2",
                            "--lr",
                            "0.00012345678901234567",
                            "--min-lr-ratio",
                            "0.3",
                            "--warmup",
                            "5",
                            "--beta1",
                            "0.8",
                            "--beta2",
                            "0.9",
                            "--eps",
                            "1e-9",
                            "--weight-decay",
                            "0",
                            "--clip",
                            "0",
                            "--steps",
                            "77",
                            "--stop-after",
                            "70",
                            "--tokens",
                            "123456789012",
                            "--minutes",
                            "1.5",
                            "--seed",
                            "3",
                            "--data",
                            "it's a file",
                            "--val-data",
                            "b \"quoted\"",
                            "--val-every",
                            "9",
                            "--val-batches",
                            "2",
                            "--param-dtype",
                            "fp32",
                            "--reduce-dtype",
                            "bf16",
                            "--tf32",
                            "--limit-all-gathers",
                            "3",
                            "--autocast",
                            "bf16",
                            "--moments",
                            "bf16",
                            "--shard",
                            "hybrid:4",
                            "--wrap",
                            "auto",
                            "--wrap-min-params",
                            "7",
                            "--bucket-mb",
                            "5",
                            "--reshard-after-forward",
                            "1",
                            "--forward-prefetch",
                            "2",
                            "--backward-prefetch",
                            "post",
                            "--accum-sync",
                            "last",
                            "--replicate-below",
                            "4096",
                            "--meta-init",
                            "0",
                            "--optimizer-in-backward",
                            "1",
                            "--gather",
                            "copy-engine",
                            "--tie-embeddings",
                            "--freeze",
                            "embedding,block.0.mlp",
                            "--clip-norm",
                            "inf",
                            "--gradient-slots",
                            "4",
                            "--device",
                            "cpu",
                            "--fuse",
                            "0",
                            "--tune-matmul",
                            "0",
                            "--log",
                            "x.jsonl",
                            "--comm-timing",
                            "--attn",
                            "nsa",
                            "--nsa-stats",
                            "--nsa-block",
                            "64",
                            "--nsa-stride",
                            "8",
                            "--nsa-select-block",
                            "128",
                            "--nsa-selected",
                            "8",
                            "--nsa-window",
                            "100",
                            "--nsa-phi",
                            "mlp",
                            "--nsa-gate",
                            "mlp",
                            "--recompute",
                            "both",
                            "--keep-attention",
                            "1",
                            "--save",
                            "a dir",
                            "--save-every",
                            "5",
                            "--keep",
                            "0",
                            "--resume",
                            "b",
                            "--export",
                            "m.safetensors",
                            "--export-dtype",
                            "fp32",
                            "--log-every",
                            "3",
                            "--plan",
                            "--world",
                            "8",
                            "--gpu",
                            "h100",
                            "--show-params",
                            "--show-schedule",
                            "--hardware",
                            "--version"});
  const auto changed = to_json(o), unset = to_json(Options());
  for (const auto& [key, value] : changed.items()) {
    INFO(key);
    // Some of the others exclude these.
    if (key != "graph" && key != "profile" && key != "epochs" && key != "trace") CHECK(value != unset[key]);
  }
  CHECK(parsed({"--profile", "--graph", "1"}).profile);
  CHECK(parsed({"--epochs", "1.5"}).epochs == 1.5);
  CHECK(parsed({"--trace", "a.json"}).trace == "a.json");
  CHECK(parsed({"--plan", "--trace", "a.json", "--show-schedule"}).trace == "a.json");
  CHECK(parsed({"--graph", "1"}).graph == 1);
  CHECK(to_config(parsed({"--graph", "1"})) == "graph = 1\n");
  ConfigFile file(to_config(o));
  CHECK(to_json(parsed({"--config", file.path.c_str()})) == changed);
  CHECK(to_config(Options()).empty());
}

TEST_CASE("the command line wins over the file", "[options]") {
  ConfigFile file("# a run\ndim = 128   # width\npreset = \"tiny\"\ntf32 = true\nplan = false\nlr=0.5\n\n");
  const Options o = parsed({"--dim", "64", "--config", file.path.c_str()});
  CHECK(o.dim == 64);
  CHECK(o.preset == "tiny");
  CHECK(o.tf32);
  CHECK(!o.plan);
  CHECK(o.lr == 0.5);
}

TEST_CASE("each mistake is one line that names the culprit", "[options]") {
  refused({"--dmi", "64"}, {"--dmi", "--dim", "see --help"});
  refused({"--learning-rate", "64"}, {"--learning-rate", "see --help"});
  refused({"--kv", "2"}, {"--kv", "--kv-heads"});
  refused({"--kv_heads", "2"}, {"--kv_heads", "did you mean --kv-heads"});
  refused({"-d"}, {"-d"});
  refused({"stray"}, {"'stray'"});
  refused({"--dim"}, {"--dim", "needs a value", "1048576"});
  refused({"--dim="}, {"--dim"});
  for (const char* bad : {"abc", "1.5", "0", "-3", "1048577", "99999999999999999999", "1e3", " 3", "3 ", "0x10", "+3"})
    refused({"--dim", bad}, {"--dim", bad, "a whole number from 1 to 1048576"});
  for (const char* bad : {"abc", "nan", "inf", "-1", "0", "11", "1e999", "1,5"})
    refused({"--lr", bad}, {"--lr", bad, "a number above 0, up to 10"});
  refused({"--beta2", "1"}, {"--beta2 1", "to below 1"});
  refused({"--seed", "-1"}, {"--seed -1", "0 or more"});
  refused({"--preset", "huge"}, {"--preset huge", "tiny", "llama-47b"});
  refused({"--arch", "Simple"}, {"--arch Simple", "simple, rope, llama or mlp"});
  refused({"--param-dtype", "fp16"}, {"--param-dtype fp16", "bf16 or fp32"});
  refused({"--device", "tpu"}, {"--device tpu", "auto, cpu or gpu"});
  refused({"--data", ""}, {"--data"});
  refused({"--data", "caf\xe9.txt"}, {"--data caf", "UTF-8"});
  CHECK(parsed({"--data", "caf\xc3\xa9.txt"}).data == "caf\xc3\xa9.txt");
  refused({"--val-data", "x"}, {"--val-data", "--val-every"});
  refused({"--val-batches", "4"}, {"--val-batches", "--val-every"});
  refused({"--profile", "--minutes", "1"}, {"--profile", "--minutes"});
  refused({"--trace", "a.json", "--minutes", "1"}, {"--trace", "--minutes"});
  refused({"--trace", "a.json", "--show-params"}, {"--trace", "--plan"});
  refused({"--graph", "1", "--comm-timing"}, {"--graph 1", "--comm-timing"});
  refused({"--dim", "3", "--dim", "4"}, {"--dim", "more than once"});
  refused({"--tf32=perhaps"}, {"--tf32"});
  refused({"--world", "8"}, {"--world", "--plan"});
  refused({"--steps", "--dim"}, {"--steps --dim"});
}

TEST_CASE("mistakes in a file of options", "[options]") {
  refused({"--config", "/nowhere/run.toml"}, {"--config /nowhere/run.toml"});
  refused({"--config"}, {"--config"});
  const std::vector<std::pair<const char*, const char*>> cases = {
      {"dmi = 3\n", "did you mean dim"},  {"dim = big\n", "--dim big"},
      {"[model]\ndim = 3\n", "[model]"},  {"dim = 1\ndim = 2\n", "more than once"},
      {"preset = \"x\"\n", "--preset x"}, {"tf32 = perhaps\n", "--tf32"},
      {"nonsense\n", "nonsense"},
  };
  for (const auto& [text, word] : cases) {
    ConfigFile file(text);
    refused({"--config", file.path.c_str()}, {word});
  }
}

TEST_CASE("the line and the JSON object of a step", "[telemetry]") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  StepRecord r{12, 3.21451, 1.234, 3e-4, 324.1, 101123, 17203, 0.556, -1, -1, nan};
  CHECK(step_line(r, 100, 92, false) ==
        "step   12/100  loss 3.2145  norm 1.23  lr 3.0e-04  324.1 ms  101,123 tok/s  mfu 55.6 %  peak 17,203 MiB  left "
        "1m32s");
  CHECK(step_line(r, 100, 92, true).size() < 100);
  auto j = step_json(r);
  CHECK(j["mfu"] == 0.556);
  CHECK(j.count("val_loss") == 0);
  CHECK(j.count("exposed_gather_ms") == 0);
  for (const char* key : {"step", "loss", "tokens_per_sec", "grad_norm", "lr", "timestamp", "step_ms", "peak_mib"})
    CHECK(j.count(key) == 1);
  r = {1234567, 3.2, 123456.7, 3e-4, 32412.1, 123456789, 1234567, 0.556, 12.3, 4.5, 2.5};
  CHECK(step_line(r, 2345678, 1e6, true).size() < 100);
  CHECK(step_line(r, 2345678, 1e6, true).find("loss 3.2000") != std::string::npos);
  r.mfu = -1, r.loss = nan;
  j = step_json(r);
  CHECK(j["mfu"].is_null());
  CHECK(j["val_loss"] == 2.5);
  CHECK(j["exposed_reduce_ms"] == 4.5);
  CHECK(nlohmann::json::parse(j.dump())["loss"].is_null());
  CHECK(step_line(r, 100, 1, false).find("mfu") == std::string::npos);
}

TEST_CASE("what another run was told is taken over where this one is told nothing", "[options]") {
  const ConfigFile file("beta1 = 0.5\ntf32 = false\n");
  const auto was = to_json(parsed(
      {"--dim", "64", "--lr", "0.1", "--beta1", "0.7", "--data", "x", "--tf32", "--seed", "9", "--kv-heads", "2"}));
  Options o = parsed({"--lr", "0.0003", "--config", file.path.c_str()});  // a default, but given
  CHECK(o.gives("lr"));
  CHECK(o.gives("beta1"));
  CHECK(!o.gives("dim"));
  take_over(was, {"dim", "lr", "beta1", "data", "tf32", "kv-heads"}, &o);
  CHECK(o.dim == 64);
  CHECK(o.kv_heads == 2);
  CHECK(o.lr == 0.0003);
  CHECK(o.beta1 == 0.5);
  CHECK(o.data == "x");
  CHECK(!o.tf32);
  CHECK(o.seed == 0);  // not asked for
}

TEST_CASE("a state that an older or another program wrote", "[options]") {
  using nlohmann::json;
  const json full = to_json(parsed({"--dim", "64", "--lr", "0.1", "--data", "x", "--tf32", "--seed", "9"}));
  const json state = {{"step", 3}, {"sequences", 12}, {"options", full}};
  CHECK(read_state(state, "F") == state);
  // What it does not name has its default; null, where that is not one value.
  for (const auto& item : full.items()) {
    INFO(item.key());
    json less = state;
    less["options"].erase(item.key());
    const json read = read_state(less, "F"), &value = read["options"][item.key()];
    CHECK((value.is_null() || value == to_json(Options())[item.key()]));
    Options o;
    take_over(read["options"], {"dim", "lr", "data", "tf32", "seed"}, &o);
    json expected = to_json(Options());
    for (const char* key : {"dim", "lr", "data", "tf32", "seed"})
      if (item.key() != key) expected[key] = full[key];
    CHECK(to_json(o) == expected);
  }
  json less = state;
  for (const char* key : {"dim", "seed", "rope_base", "heads"}) less["options"].erase(key);
  const json read = read_state(less, "F")["options"];
  CHECK(read["seed"] == 0);
  CHECK(read["rope_base"] == 500000);
  CHECK(read["dim"].is_null());
  CHECK(read["heads"].is_null());
  // A value of another type, or none where there must be one: the file and the key in one line.
  auto refusal = [&](const json& patch) {
    json wrong = state;
    wrong.merge_patch(patch);
    std::string text;
    try {
      read_state(wrong, "DIR/manifest.json");
    } catch (const UsageError& e) { text = e.what(); }
    return text;
  };
  CHECK(refusal({{"options", {{"dim", "64"}}}}) ==
        "DIR/manifest.json: \"dim\" is \"64\", not a whole number from 1 to 1048576; resume from another checkpoint");
  CHECK(refusal({{"options", {{"seed", 1.5}}}}).find("\"seed\" is 1.5, not a whole number") != std::string::npos);
  CHECK(refusal({{"options", {{"lr", true}}}}).find("\"lr\" is true, not a number") != std::string::npos);
  CHECK(refusal({{"options", {{"tf32", 1}}}}).find("\"tf32\" is 1, not true or false") != std::string::npos);
  CHECK(refusal({{"options", {{"data", 1}}}}).find("\"data\" is 1, not a text") != std::string::npos);
  CHECK(refusal({{"options", 5}}).find("\"options\" is 5, not an object") != std::string::npos);
  CHECK(refusal({{"step", "3"}}).find("\"step\" is \"3\", not a whole number from 0 to 9000000000000000") != std::string::npos);
  for (const char* key : {"step", "options"})
    CHECK(refusal({{key, nullptr}}) ==
          strf("DIR/manifest.json: there is no \"%s\"; resume from another checkpoint", key));
  // What the command line refuses, a checkpoint must not bring in.
  const std::pair<const char*, json> outside[] = {
      {"grad_accum", 0},  {"nsa_selected", int64_t(1) << 62}, {"depth", -1},    {"lr", 1e308},
      {"attn", "zzz"},    {"seed", -1},                       {"seq", 1e300},   {"dim", uint64_t(1) << 63},
      {"device", "gpu2"}, {"beta1", 1},                       {"clip_norm", 2}, {"preset", "large"}};
  for (const auto& [key, value] : outside) {
    INFO(key << " " << value);
    CHECK(refusal({{"options", {{key, value}}}}).find(strf("\"%s\" is ", key)) != std::string::npos);
  }
  CHECK(refusal({{"step", INT64_MIN}}).find("\"step\" is -9223372036854775808, not") != std::string::npos);  CHECK_THROWS_AS(read_state(json(7), "F"), UsageError);
}

TEST_CASE("a log whose disk is full says so once, and goes on in a new line", "[telemetry]") {
  const ConfigFile file(""), said("");
  const char* path = file.path.c_str();
  const nlohmann::json header = {{"command", std::string(100, 'x')}, {"commit", ""}},
                       line = {{"line", std::string(50, 'y')}};
  rlimit before;
  REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
  const auto action = std::signal(SIGXFSZ, SIG_IGN);
  {
    Telemetry t(path, false, header, 10, 1);
    const rlimit small = {400, before.rlim_max};
    REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
    std::fflush(stdout);
    const int terminal = dup(STDOUT_FILENO), fd = open(said.path.c_str(), O_WRONLY);
    dup2(fd, STDOUT_FILENO);
    for (int i = 0; i < 10; ++i) t.record(line);
    std::fflush(stdout);
    dup2(terminal, STDOUT_FILENO);
    close(terminal), close(fd);
    setrlimit(RLIMIT_FSIZE, &before);
  }
  std::signal(SIGXFSZ, action);
  std::ifstream note(said.path);
  std::string first, second;
  std::getline(note, first), std::getline(note, second);
  CHECK(first.rfind("--log: lines from here on are missing", 0) == 0);
  CHECK(second.empty());
  {
    Telemetry t(path, true, header, 10, 1);
    t.record(line);
  }
  std::ifstream in(path);
  int whole = 0, half = 0, headers = 0;
  for (std::string text; std::getline(in, text);) {
    const nlohmann::json j = nlohmann::json::parse(text, nullptr, false);
    whole += j == line, half += j.is_discarded(), headers += j == header;
  }
  CHECK(headers == 2);
  CHECK(whole >= 4);
  CHECK(half == 1);
}

TEST_CASE("figures for people", "[telemetry]") {
  CHECK(grouped(0) == "0");
  CHECK(grouped(999) == "999");
  CHECK(grouped(1000) == "1,000");
  CHECK(grouped(-1234567) == "-1,234,567");
  CHECK(mib_text(int64_t(17203) << 20) == "17,203");
  CHECK(count_text(973.2e6) == "973.2 M");
  CHECK(count_text(999999) == "1.0 M");
  CHECK(count_text(12) == "12");
  CHECK(duration_text(92) == "1m32s");
  CHECK(duration_text(59.6) == "1m00s");
  CHECK(duration_text(7265) == "2h01m");
  CHECK(duration_text(0) == "0s");
  const std::string t = now_iso8601();
  CHECK(t.size() == 24);
  CHECK(t.back() == 'Z');
}
