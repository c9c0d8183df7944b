// The command line: help, the file of options, and each kind of mistake in one line.
#include <cctype>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <limits>
#include <sstream>
#include <thread>

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/program/config_file.h"
#include "lib/program/json.h"
#include "lib/program/options.h"
#include "lib/program/presets.h"
#include "lib/program/report.h"
#include "lib/program/run.h"
#include "lib/program/telemetry.h"
#include "test/catch.h"
#include "test/errors.h"
#include "test/scratch.h"

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

TEST_CASE("a section of the help says more about its options, and about no other's", "[options]") {
  Options o;
  std::string help, again;
  REQUIRE(!parse({"--dim", "x", "--help", "Sharding", "--lr", "3"}, &o, &help));
  CHECK(!parse({"--help=sharding"}, &o, &again));
  CHECK(help == again);
  CHECK(help.rfind("SHARDING\n", 0) == 0);
  for (const char* word :
       {"\n    --wrap WHAT\n", "Values: block, sublayer, auto, single.\n", "Environment: FSDP_WRAP."})
    CHECK(help.find(word) != std::string::npos);
  CHECK(help.find("--dim") == std::string::npos);
  CHECK(!parse({"--help", "instead-of-training"}, &o, &help));
  CHECK(help.find("Environment: FSDP_VERSION=1.") != std::string::npos);
  // What is no option of the table stands in a section too.
  CHECK(help.find("\n    --help [SECTION]\n") != std::string::npos);
  CHECK(!parse({"--help", "machine"}, &o, &help));
  CHECK(help.find("\n    --config FILE\n") != std::string::npos);
  // Every option stands in one section; the sections are those that a wrong one's refusal lists.
  std::string list = refusal({"--help", "x"}), all;
  CHECK(list.rfind("--help x: no such section; choose one of model, attention, ", 0) == 0);
  list = list.substr(list.find("one of ") + 7) + ",";
  for (size_t at = 0, end; (end = list.find(',', at)) != std::string::npos; at = end + 2) {
    const std::string name = list.substr(at, end - at);
    CHECK(!parse({"--help", name.c_str()}, &o, &help));
    std::istringstream lines(help);
    for (std::string line; std::getline(lines, line);) CHECK(line.size() <= 88);
    all += help;
  }
  const auto keys = to_json(Options());
  for (const auto& item : keys.items()) {
    std::string name = "\n    --" + item.key();
    for (char& c : name)
      if (c == '_') c = '-';
    INFO(name);
    const size_t first = std::min(all.find(name + " "), all.find(name + "\n"));
    CHECK(first != std::string::npos);
    CHECK(all.find(name + "\n", first + 1) == std::string::npos);
  }
  refused({"--help", "shardin"}, {"--help shardin", "did you mean sharding?"});
}

TEST_CASE("the list of presets has the sizes that a run of each has", "[options]") {
  std::istringstream lines(presets_text());
  std::string line;
  std::getline(lines, line);
  CHECK(line.rfind("preset ", 0) == 0);
  for (const char* name : preset_names()) {
    INFO(name);
    const Run r = resolve(parsed({"--preset", name}), 1, 0);
    REQUIRE(std::getline(lines, line));
    std::istringstream words(line);
    std::string preset, arch, heads, kv_heads, unit;
    int64_t dim, depth, hidden, vocab, seq, batch, accum;
    double parameters;
    words >> preset >> arch >> dim >> depth >> heads >> kv_heads >> hidden >> vocab >> seq >> batch >> accum >>
        parameters >> unit;
    CHECK(preset == name);
    CHECK(arch == name_of(r.model.arch));
    CHECK(heads == (r.model.arch == Arch::mlp ? "-" : std::to_string(r.model.heads)));
    CHECK(kv_heads == (r.model.arch == Arch::mlp ? "-" : std::to_string(r.model.kv_heads)));
    for (const auto& [shown, is] :
         {std::pair(dim, r.model.dim), std::pair(depth, r.model.depth), std::pair(hidden, r.model.hidden),
          std::pair(vocab, r.model.vocab), std::pair(seq, r.model.seq), std::pair(batch, r.batch),
          std::pair(accum, r.grad_accum)})
      CHECK(shown == is);
    CHECK(unit == "M");
    CHECK(std::fabs(parameters - 1e-6 * double(parameter_count(r.model))) < 0.06);
  }
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
                            "--head-dim",
                            "96",
                            "--v-head-dim",
                            "64",
                            "--hidden",
                            "100",
                            "--vocab",
                            "257",
                            "--seq",
                            "33",
                            "--rope-base",
                            "10000.5",
                            "--rope-scaling",
                            "llama3:8:1:4:8192",
                            "--norm-eps",
                            "1e-6",
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
                            "--reduce",
                            "copy-engine",
                            "--reduce-tail",
                            "same",
                            "--reduce-ctas",
                            "3",
                            "--tie-embeddings",
                            "--freeze",
                            "embedding,block.0.mlp",
                            "--clip-norm",
                            "inf",
                            "--gradient-slots",
                            "4",
                            "--device",
                            "cpu",
                            "--allow-single-rank",
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
                            "--diagnostics",
                            "d",
                            "--mem-dump-every",
                            "7",
                            "--stall",
                            "60",
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
                            "--keep-cheap",
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
                            "model",
                            "--export-shard-mb",
                            "100",
                            "--init",
                            "c",
                            "--max-positions",
                            "4097",
                            "--export-dtype",
                            "fp32",
                            "--eval",
                            "val.bin",
                            "--sample",
                            "100",
                            "--sample-every",
                            "50",
                            "--prompt",
                            "Once upon",
                            "--temperature",
                            "0.5",
                            "--top-k",
                            "40",
                            "--on-nan",
                            "skip:3",
                            "--timeout",
                            "5.5",
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
                            "--tensorboard",
                            "events",
                            "--matmul-dtype",
                            "fp8",
                            "--save-dtype",
                            "fp8",
                            "--fp8-scaling",
                            "row",
                            "--gather-dtype",
                            "fp8",
                            "--list-presets",
                            "--completion",
                            "bash",
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
  ScratchFile file(to_config(o));
  CHECK(to_json(parsed({"--config", file.path.c_str()})) == changed);
  CHECK(to_config(Options()).empty());
}

TEST_CASE("the command line wins over the file", "[options]") {
  ScratchFile file("# a run\ndim = 128   # width\npreset = \"tiny\"\ntf32 = true\nplan = false\nlr=0.5\n\n");
  const Options o = parsed({"--dim", "64", "--config", file.path.c_str()});
  CHECK(o.dim == 64);
  CHECK(o.preset == "tiny");
  CHECK(o.tf32);
  CHECK(!o.plan);
  CHECK(o.lr == 0.5);
}

// A variable that is set as long as the test.
struct Variable {
  std::string name;
  Variable(const char* name, const std::string& value) : name(name) { setenv(name, value.c_str(), 1); }
  ~Variable() { unsetenv(name.c_str()); }
};

TEST_CASE("the command line wins over the environment, and that over the file", "[options]") {
  ScratchFile file("dim = 128\ndepth = 5\nlr = 0.5\ntf32 = true\n");
  {
    const Variable dim("FSDP_DIM", "96"), depth("FSDP_DEPTH", "3"), tf32("FSDP_TF32", "0"),
        gate("FSDP_NSA_GATE", "mlp"), profile("FSDP_PROFILE", "1"), empty("FSDP_LR", ""),
        config("FSDP_CONFIG", file.path);
    const Options o = parsed({"--dim", "64"});
    CHECK(o.dim == 64);
    CHECK(o.depth == 3);
    CHECK(o.lr == 0.5);  // what is empty is not set
    CHECK(!o.tf32);
    CHECK(o.profile);
    CHECK(o.nsa_gate == "mlp");
    CHECK(o.config == file.path);
    CHECK(o.warnings.empty());
    for (const char* name : {"dim", "depth", "lr", "tf32", "nsa-gate"}) CHECK(o.gives(name));
  }
  // Every option has one.
  const auto all = to_json(Options());
  for (const auto& [key, value] : all.items()) {
    std::string name = "FSDP_" + key;
    for (char& c : name) c = char(std::toupper(c));
    INFO(name);
    const Variable v(name.c_str(), "?!"), validates("FSDP_VAL_EVERY", key == "val_every" ? "?!" : "1"),
        samples("FSDP_SAMPLE", key == "sample" ? "?!" : "1");
    const std::string text = refusal({});
    if (text.empty()) CHECK(to_json(parsed({}))[key] == "?!");
    else CHECK(text.rfind(name + "=?!: ", 0) == 0);
  }
}

TEST_CASE("mistakes in the environment name the variable", "[options]") {
  {
    const Variable v("FSDP_DIM", "wide");
    refused({}, {"FSDP_DIM=wide", "a whole number from 1 to 1048576"});
    CHECK(parsed({"--dim", "64"}).dim == 64);
  }
  {
    const Variable v("FSDP_TF32", "perhaps");
    refused({}, {"FSDP_TF32=perhaps", "true or false"});
  }
  {
    const Variable v("FSDP_CONFIG", "/nowhere/run");
    refused({}, {"/nowhere/run", "No such file"});
  }
  {
    const Variable a("FSDP_KV_HEAD", "2"), b("FSDP_", "2"), c("FSDP_TEST_X", "1"), d("FSDPX", "1");
    const Options o = parsed({});
    REQUIRE(o.warnings.size() == 2);
    const std::string both = o.warnings[0] + o.warnings[1];
    CHECK(both.find("FSDP_KV_HEAD, which is no option (did you mean FSDP_KV_HEADS?)") != std::string::npos);
    CHECK(both.find("FSDP_, ") != std::string::npos);
  }
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
  for (const char* large : {"9007199254740993", "123456789012345678901234567890"})
    refused({"--seed", large}, {large, "of 0 or more, up to 9000000000000000"});
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
  refused({"--tf32=perhaps"}, {"--tf32=perhaps", "true or false"});
  CHECK(!parsed({"--tf32=false"}).tf32);
  const std::string huge = "--" + std::string(1 << 20, 'x'), long_value(1 << 20, '7');
  refused({huge.c_str()}, {"unknown option --xxx"});
  CHECK(refusal({huge.c_str()}).size() < 200);
  CHECK(refusal({"--dim", long_value.c_str()}).size() < 200);
  refused({"--world", "8"}, {"--world", "--plan"});
  refused({"--timeout", "1"}, {"--timeout 1", "2 seconds or more, or 0"});
  CHECK((parsed({"--timeout", "2"}).timeout == 2 && parsed({"--timeout", "0"}).timeout == 0));
  refused({"--bucket-mb", "5"}, {"--bucket-mb needs --wrap auto"});
  refused({"--wrap-min-params", "5"}, {"--wrap-min-params needs --wrap auto"});
  refused({"--steps", "--dim"}, {"--steps --dim"});
}

TEST_CASE("what a file of options may hold", "[options]") {
  auto values = [](const std::string& text) {
    ScratchFile file(text);
    std::string all;
    for (const Setting& s : read_config(file.path)) all += strf("%d %s=%s|", s.line, s.name.c_str(), s.value.c_str());
    return all;
  };
  CHECK(values("# a run\n\ndim = 128   # width\r\n; no more\n\tpreset=tiny") == "3 dim=128|5 preset=tiny|");
  CHECK(values("data = \"my #1.txt\" # one\nlog = a#b\nval-data='it'\ndata = 'a \"b\" it's'\n") ==
        "1 data=my #1.txt|2 log=a#b|3 val-data=it|4 data=a \"b\" it's|");
  CHECK(values("a = \nb = \"\"\nc = # d\n") == "1 a=|2 b=|3 c=|");
}

TEST_CASE("mistakes in a file of options", "[options]") {
  refused({"--config", "/nowhere/run.toml"}, {"--config /nowhere/run.toml", "No such file"});
  refused({"--config"}, {"--config"});
  refused({"--config", ""}, {"--config ''", "file name"});
  refused({"--config", "a", "--config", "b"}, {"--config is given more than once"});
  for (const char* no_file : {"/dev/zero", "/dev/null", "/tmp"})
    refused({"--config", no_file}, {no_file, "not a regular file"});
  {
    ScratchFile file("");
    std::remove(file.path.c_str());
    REQUIRE(mkfifo(file.path.c_str(), 0600) == 0);
    refused({"--config", file.path.c_str()},
            {file.path.c_str(), "not a regular file"});  // at once: nobody writes to it
  }
  const std::vector<std::pair<std::string, const char*>> cases = {
      {"dmi = 3\n", ":1: unknown option 'dmi' (did you mean dim?)"},
      {"\ndim = big\n", ":2: dim = big: must be a whole number"},
      {"[model]\ndim = 3\n", ":1: sections such as [model]"},
      {"dim = 1\n\ndim = 2\n", ":3: dim is given more than once"},
      {"preset = \"x\"\n", ":1: preset = x: choose"},
      {"tf32 = perhaps\n", ":1: tf32 = perhaps: choose true or false"},
      {"nonsense\n", ":1: 'nonsense': write name = value"},
      {"dim = \n", ":1: dim = ''"},
      {"= 3\n", "write name = value"},
      {"data = \"x\n", "the quote does not end"},
      {std::string(100000, 'k') + " = 3", ":1: unknown option 'kkk"},
      {"dim = " + std::string(100000, '9'), ":1: dim = 999"},
      {std::string(1 << 21, '\n'), "larger than 1 MiB"},
      {std::string("\0\x1b[31m = 1\n", 10), "unknown option '??[31m'"},
  };
  for (const auto& [text, word] : cases) {
    ScratchFile file(text);
    refused({"--config", file.path.c_str()}, {file.path.c_str(), word});
    CHECK(refusal({"--config", file.path.c_str()}).size() < 400);
  }
}

TEST_CASE("the line and the JSON object of a step", "[telemetry]") {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  StepRecord r{12, 3.21451, 1.234, 3e-4, 324.1, 101123, 17203, 0.556, -1, -1, nan};
  CHECK(step_line(r, 100, 92) ==
        "step   12/100  loss 3.2145  norm 1.23  lr 3.0e-04  324.1 ms  101,123 tok/s  mfu 55.6 %  peak 17,203 MiB  left "
        "1m32s");
  CHECK(live_line(r, 100, 92, nan, 200) ==
        "step 12/100 loss 3.2145 norm 1.23 lr 3.0e-04 324.1 ms 101,123 tok/s mfu 55.6% 17,203 MiB left 1m32s");
  CHECK(live_line(r, 100, 92, 3.5, 40) == "step 12/100 avg loss 3.5000 left 1m32s");
  auto j = step_json(r);
  CHECK(j["mfu"] == 0.556);
  CHECK(j.count("val_loss") == 0);
  CHECK(j.count("exposed_gather_ms") == 0);
  for (const char* key : {"step", "loss", "tokens_per_sec", "grad_norm", "lr", "timestamp", "step_ms", "peak_mib"})
    CHECK(j.count(key) == 1);
  r = {1234567, 3.2, 123456.7, 3e-4, 32412.1, 123456789, 1234567, 0.556, 12.3, 4.5, 2.5};
  // What does not fit is left out, step and loss never; a line as long as the terminal is wide would wrap in some.
  for (int columns = 1; columns < 200; columns++) {
    const std::string line = live_line(r, 2345678, 1e6, nan, columns), all = "step 1234567/2345678 loss 3.2000";
    INFO(columns << " " << line);
    CHECK(line.size() < std::max<size_t>(2, size_t(columns)));
    CHECK(line.substr(0, all.size()) == all.substr(0, line.size()));
  }
  CHECK(live_line(r, 2345678, 1e6, nan, 199).find("exposed 12.3 + 4.5 ms") != std::string::npos);
  StepRecord early = {};
  early.step = 7;
  early.val_loss = nan;
  CHECK(!is_due(early, 100, 10));
  early.is_last = true;
  CHECK(is_due(early, 100, 10));
  r.loss = -nan;
  CHECK(step_line(r, 100, 1).find("loss nan") != std::string::npos);
  r.mfu = -1, r.loss = nan;
  j = step_json(r);
  CHECK(j["mfu"].is_null());
  CHECK(j["val_loss"] == 2.5);
  CHECK(j["exposed_reduce_ms"] == 4.5);
  CHECK(nlohmann::json::parse(j.dump())["loss"].is_null());
  CHECK(step_line(r, 100, 1).find("mfu") == std::string::npos);
}

TEST_CASE("what another run was told is taken over where this one is told nothing", "[options]") {
  const ScratchFile file("beta1 = 0.5\ntf32 = false\n");
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
  CHECK(refusal({{"trained_tokens", -1}}).find("\"trained_tokens\" is -1, not a whole number from 0") !=
        std::string::npos);
  CHECK(refusal({{"step", "3"}}).find("\"step\" is \"3\", not a whole number from 0 to 9000000000000000") !=
        std::string::npos);
  CHECK(refusal({{"tokens", {{"vocab", "x"}, {"tokenizer", "t"}}}}).find("\"tokens.vocab\" is \"x\"") !=
        std::string::npos);
  for (const char* key : {"step", "options"})
    CHECK(refusal({{key, nullptr}}) ==
          strf("DIR/manifest.json: there is no \"%s\"; resume from another checkpoint", key));
  // What the command line refuses, a checkpoint must not bring in.
  const std::pair<const char*, json> outside[] = {{"grad_accum", 0},  {"nsa_selected", int64_t(1) << 62},
                                                  {"depth", -1},      {"lr", 1e308},
                                                  {"attn", "zzz"},    {"seed", -1},
                                                  {"seq", 1e300},     {"dim", uint64_t(1) << 63},
                                                  {"device", "gpu2"}, {"beta1", 1},
                                                  {"clip_norm", 2},   {"preset", "large"}};
  for (const auto& [key, value] : outside) {
    INFO(key << " " << value);
    CHECK(refusal({{"options", {{key, value}}}}).find(strf("\"%s\" is ", key)) != std::string::npos);
  }
  CHECK(refusal({{"step", INT64_MIN}}).find("\"step\" is -9223372036854775808, not") != std::string::npos);
  CHECK_THROWS_AS(read_state(json(7), "F"), UsageError);
}

TelemetryOptions log_to(const std::string& path, bool append) {
  TelemetryOptions o;
  o.log = path, o.append = append, o.total_steps = 10;
  return o;
}

TEST_CASE("a log says when its disk is full and when there is room again, and has whole lines", "[telemetry]") {
  const ScratchFile file(""), said("");
  const char* path = file.path.c_str();
  const nlohmann::json header = {{"command", std::string(100, 'x')}, {"commit", ""}},
                       line = {{"line", std::string(50, 'y')}};
  rlimit before;
  REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
  const auto action = std::signal(SIGXFSZ, SIG_IGN);
  {
    Telemetry t(log_to(path, false), header);
    const auto room = [&](rlim_t bytes) {
      const rlimit most = {bytes, before.rlim_max};
      REQUIRE(setrlimit(RLIMIT_FSIZE, &most) == 0);
    };
    room(400);
    std::fflush(stdout);
    const int terminal = dup(STDOUT_FILENO), fd = open(said.path.c_str(), O_WRONLY);
    dup2(fd, STDOUT_FILENO);
    for (int i = 0; i < 10; ++i) t.record(line);
    room(450);
    for (int i = 0; i < 10; ++i) t.record(line);  // one of them fits
    room(before.rlim_cur);
    for (int i = 0; i < 12; ++i) t.record(line);
    room(400);
    for (int i = 0; i < 10; ++i) t.record(line);
    std::fflush(stdout);
    dup2(terminal, STDOUT_FILENO);
    close(terminal), close(fd);
    room(before.rlim_cur);
    t.record(line);
  }
  std::signal(SIGXFSZ, action);
  std::ifstream note(said.path);
  std::string said_first, said_second, said_third, said_last;
  std::getline(note, said_first), std::getline(note, said_second), std::getline(note, said_third);
  std::getline(note, said_last);
  const std::string full = strf("warning: --log: lines from here on are missing: %s: write failed", path);
  CHECK(said_first.rfind(full, 0) == 0);
  CHECK(said_second == "--log: lines are written again");
  CHECK(said_third.rfind(full, 0) == 0);
  CHECK(said_last.empty());
  struct {
    int whole = 0, half = 0, headers = 0;
  } lines;
  const auto count = [&] {
    std::ifstream in(path);
    lines = {};
    for (std::string text; std::getline(in, text);) {
      const nlohmann::json j = nlohmann::json::parse(text, nullptr, false);
      lines.whole += j == line, lines.half += j.is_discarded(), lines.headers += j == header;
    }
  };
  count();
  CHECK((lines.headers == 1 && lines.whole == 18 && lines.half == 0));
  // A run that was killed in the middle of a line, which the next takes away.
  std::ofstream(path, std::ios::app) << "{\"line\": \"yy";
  {
    Telemetry t(log_to(path, true), header);
    t.record(line);
  }
  count();
  CHECK((lines.headers == 2 && lines.whole == 19 && lines.half == 0));
}

TEST_CASE("a log is one run's", "[telemetry]") {
  const ScratchFile file("");
  const nlohmann::json header = {{"command", "mpirun ./train --data caf\xe9"}, {"commit", ""}};  // no UTF-8
  const auto contents = [&] {
    std::ifstream in(file.path);
    return std::string(std::istreambuf_iterator<char>(in), {});
  };
  Telemetry first(log_to(file.path, false), header);
  first.record({{"step", 1}});
  const std::string written = contents();
  CHECK(written == "{\"command\":\"mpirun ./train --data caf\xef\xbf\xbd\",\"commit\":\"\"}\n{\"step\":1}\n");
  for (const bool append : {false, true}) {
    INFO(append);
    TelemetryOptions o = log_to(file.path, append);
    o.tensorboard = file.path + ".events";
    CHECK(error_of([&] { Telemetry(o, header); }) ==
          "--log " + file.path + ": another run is writing to it; give each run a log of its own");
    CHECK(contents() == written);
    CHECK(::access(o.tensorboard.c_str(), F_OK) != 0);
  }
}

TEST_CASE("the time that is left is that of the steps since the first one told", "[telemetry]") {
  using Clock = std::chrono::steady_clock;
  const ScratchFile said("");
  TelemetryOptions o;
  o.total_steps = 2000000, o.lines = Lines::plain;
  StepRecord r = {};
  r.mfu = r.exposed_gather_ms = -1, r.val_loss = std::nan("");
  Telemetry t(o, {});
  std::fflush(stdout);
  const int terminal = dup(STDOUT_FILENO), fd = open(said.path.c_str(), O_WRONLY);
  dup2(fd, STDOUT_FILENO);
  const auto begun = Clock::now();
  t.step((r.step = 999000, r));  // as behind a checkpoint: what came before took none of this run's time
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  t.step((r.step = 1000000, r));
  const double most = std::chrono::duration<double>(Clock::now() - begun).count();
  dup2(terminal, STDOUT_FILENO);
  close(terminal), close(fd);
  std::ifstream in(said.path);
  std::string first, second;
  std::getline(in, first), std::getline(in, second);
  INFO(first << "\n" << second);
  CHECK(first.find("left") == std::string::npos);
  const size_t at = second.find("left ");
  REQUIRE(at != std::string::npos);
  const std::string left = second.substr(at + 5);
  const size_t minutes = left.find('m');
  const double seconds =
      minutes == std::string::npos ? std::stod(left) : 60 * std::stod(left) + std::stod(left.substr(minutes + 1));
  // A thousand times as many steps are left as were taken.
  CHECK(seconds >= 20);
  CHECK(seconds <= 1000 * most + 0.5);
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
