// lib/program/diagnostics.h and what it is made of: anomalies, the stall watch, the files and their columns.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include <sys/resource.h>
#include <unistd.h>

#include "lib/program/audits.h"
#include "lib/program/diagnostics.h"
#include "lib/program/json.h"
#include "lib/program/outputs.h"
#include "lib/program/report.h"
#include "test/catch.h"
#include "test/errors.h"
#include "test/scratch.h"

namespace {

namespace fs = std::filesystem;
using nlohmann::json;

std::string text_of(const std::string& path) {
  std::ifstream in(path);
  return {std::istreambuf_iterator<char>(in), {}};
}
void write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

std::vector<json> lines_of(const std::string& path) {
  std::vector<json> all;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) all.push_back(json::parse(line));
  return all;
}
std::vector<std::string> messages(const std::string& path) {
  std::vector<std::string> all;
  for (const json& j : lines_of(path)) all.push_back(j.at("msg"));
  return all;
}

Options options(std::vector<const char*> more) {
  std::vector<const char*> argv = {"train", "--device", "cpu", "--preset", "tiny", "--steps", "100"};
  argv.insert(argv.end(), more.begin(), more.end());
  Options o;
  std::string text;
  REQUIRE(parse_options(int(argv.size()), argv.data(), &o, &text));
  return o;
}

// A run's Diagnostics without a run: steps as the loop tells them.
struct Told {
  World world;
  Run r;
  Device dev{Backend::cpu, 0};
  std::vector<std::string> notes;
  std::unique_ptr<Diagnostics> diagnostics;
  std::vector<NsaSums> sums;
  std::vector<NsaMaxima> maxima;

  explicit Told(const Options& o, const World& among = World()) : world(among), r(resolve(o, world.size, 0)) {
    const json header = {{"command", "./train"}, {"commit", "abc"}, {"versions", json::object()}, {"hardware", 1}};
    diagnostics = std::make_unique<Diagnostics>(r, world, dev, header,
                                                [this](const std::string& line) { notes.push_back(line); });
    sums.resize(size_t(r.model.depth)), maxima.resize(size_t(r.model.depth));
    for (size_t i = 0; i < sums.size(); i++) {
      sums[i].gates = 10, sums[i].entropy = 10, sums[i].largest_share = 4 + double(i), sums[i].rows = 8;
      sums[i].keys = 100, sums[i].at_max = 1 + double(i);
      sums[i].share[0] = 2, sums[i].share[1] = 3, sums[i].share[2] = 5;
      maxima[i].keys = 20 + double(i), maxima[i].share = 0.5;
    }
  }
  void step(int64_t n, double loss = 1.25) {
    StepRecord s = {};
    s.step = n, s.loss = loss, s.lr = 3e-4, s.grad_norm = 2.5, s.step_ms = 10, s.val_loss = std::nan("");
    diagnostics->step(s, {r.model.diagnostics ? sums.data() : nullptr, maxima.data(), 0.001});
  }
};

}  // namespace

// --------------------------------------------------------------------------------------------------------- anomalies

namespace {
// Readings one behind the other, of so many tokens/s each. What was said is counted, and the latest is kept.
struct Judged {
  Anomalies anomalies;
  double seconds = 0, tokens = 0;
  std::string text = {};
  int operator()(const std::vector<double>& readings, const NsaStats* gates = nullptr) {
    int n = 0;
    for (double throughput : readings) {
      seconds += thresholds::reading_seconds, tokens += throughput * thresholds::reading_seconds;
      for (const Anomaly& a : anomalies.judge(seconds, tokens, gates)) text = a.text, ++n;
    }
    return n;
  }
};
}  // namespace

TEST_CASE("throughput has fallen when four readings are below half of what four have held", "[diagnostics]") {
  Judged said;
  CHECK(said({1, 1}) == 0);                         // where it begins, and a slow start
  CHECK(said({500, 100, 100, 100, 110, 90}) == 0);  // 500 was not held, and 100 was
  CHECK(said({49, 49, 49}) == 0);
  CHECK(said({51, 49, 49, 49}) == 0);  // not in a row
  CHECK(said({48}) == 1);
  CHECK(has(said.text, "4 readings in a row below 50 % of the 100 tokens/s"));
  CHECK(has(said.text, "the latest 48"));
  CHECK(said({49, 10, 0, 49, 49}) == 0);       // it is said
  CHECK(said({51, 49, 49, 49, 49, 49}) == 1);  // it was well in between
}

TEST_CASE("what comes between two readings is not judged", "[diagnostics]") {
  Anomalies a;
  NsaStats bad = {};
  bad.rows = 1;
  int n = 0;
  for (int i = 0; i < 100; i++) n += int(a.judge(0.5 * i, 0, &bad).size());  // one reading in 50 s
  CHECK(n == 0);
  CHECK(a.judge(60, 0, &bad).empty());
  CHECK(a.judge(90, 0, &bad).size() == 1);
}

TEST_CASE("gates have collapsed after three readings beyond one of the thresholds", "[diagnostics]") {
  NsaStats well = {};
  well.rows = 1, well.entropy_mean = 0.2, well.share_max_mean = 0.9, well.collapsed = 0.5, well.share_max = 1;
  CHECK_FALSE(gates_collapsed(well));
  CHECK_FALSE(gates_collapsed(NsaStats{}));  // of no query
  for (double NsaStats::*of : {&NsaStats::entropy_mean, &NsaStats::share_max_mean, &NsaStats::collapsed}) {
    NsaStats bad = well;
    bad.*of += of == &NsaStats::entropy_mean ? -1e-6 : 1e-6;
    CHECK(gates_collapsed(bad));
    Judged said;
    CHECK(said({1}, &well) == 0);
    CHECK(said({1, 1}, &bad) == 0);
    CHECK(said({1}, &well) == 0);
    CHECK(said({1, 1}, &bad) == 0);
    CHECK(said({1, 1, 1}, &bad) == 1);
    CHECK(has(said.text, "gates have collapsed"));
    CHECK(said({1, 1, 1}) == 0);  // nobody counts them
    CHECK(said({1}, &well) == 0);
    CHECK(said({1, 1, 1, 1, 1, 1}, &bad) == 1);
  }
}

TEST_CASE("a stall is said once", "[diagnostics]") {
  std::atomic<int> said{0};
  std::atomic<int64_t> step{-1};
  const auto wait = [](double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); };
  const auto until = [&](int n) {
    for (int i = 0; i < 1000 && said < n; i++) wait(0.01);
  };
  {
    StallWatch watch(0.3, [&](double seconds, int64_t latest) {
      step = latest;
      if (seconds >= 0.3) ++said;
    });
    const auto now = [] { return std::chrono::steady_clock::now(); };
    double longest = 0;              // a busy machine may hold this thread up
    for (int i = 1; i <= 20; i++) {  // as long as two stalls
      const auto from = now();
      wait(0.03), watch.step_ended(i);
      longest = std::max(longest, std::chrono::duration<double>(now() - from).count());
    }
    const int early = said;
    if (longest < 0.25) CHECK(early == 0);
    until(early + 1);
    CHECK(step == 20);
    wait(0.7);
    CHECK(said == early + 1);
    watch.step_ended(21);
    until(early + 2);
    CHECK(step == 21);
    CHECK(said == early + 2);
  }
  const int all = said;
  StallWatch none(0, [&](double, int64_t) { ++said; });
  wait(0.05);
  CHECK(said == all);
}

// -------------------------------------------------------------------------------------------------------------- files

TEST_CASE("the rows before a step", "[diagnostics]") {
  const std::string header = "step,k_mean\n", rows = "1,a\n2,b\n10,c\n11,d\n";
  CHECK(bytes_before(rows, 1) == 0);
  CHECK(bytes_before(rows, 2) == 4);
  CHECK(bytes_before(rows, 11) == 13);
  CHECK(bytes_before(rows, 12) == int64_t(rows.size()));
  CHECK(bytes_before(header + rows, 1) == int64_t(header.size()));
  CHECK(bytes_before(header + rows + "12", 20) == int64_t((header + rows).size()));  // half a row
  CHECK(bytes_before("", 1) == 0);
}

TEST_CASE("what cannot be written whole is not written at all", "[diagnostics]") {
  ScratchDirectory dir;
  const std::string path = dir / "lines";
  LineFile file(path);
  CHECK(file.bytes() == 0);
  file.add("12345");
  // The disk is full behind the next five bytes.
  rlimit before;
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  const auto old = std::signal(SIGXFSZ, SIG_IGN);
  rlimit full = before;
  full.rlim_cur = 11;
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &full) == 0);
  CHECK_THROWS_AS(file.add("abcdefgh"), Error);
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
  std::signal(SIGXFSZ, old);
  CHECK(text_of(path) == "12345\n");
  file.add("6");
  CHECK(text_of(path) == "12345\n6\n");
  std::ofstream(path, std::ios::app) << "half";
  LineFile again(path);
  CHECK(again.bytes() == 8);
  again.add("7");
  CHECK(text_of(path) == "12345\n6\n7\n");
}

TEST_CASE("the files have the report's names and columns", "[diagnostics]") {
  ScratchDirectory dir;
  const std::string made = dir / "new/d";  // with the directory above it
  Told t(options({"--diagnostics", made.c_str(), "--mem-dump-every", "2", "--log-every", "2"}));
  REQUIRE(t.r.model.diagnostics);
  t.diagnostics->begin(1);
  std::vector<NsaKernels> kernels(2);
  kernels[0].add(Stage::selection, {"sm90", "pooled, any heads", true});
  kernels[1].add(Stage::selected, {"sm90", "blocks in pieces", true});
  kernels[1].add(Stage::selected_backward, {"sm80", "blocks in pieces", true});
  kernels[1].add(Stage::window, {"sm90"});
  t.diagnostics->count_fallbacks(kernels);
  for (int64_t n = 1; n <= 4; n++) t.step(n);
  t.diagnostics->end();

  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(made)) names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  CHECK(names == std::vector<std::string>{"dtypes_report_fsdp.txt", "env.json", "fallback_counters_fsdp.csv",
                                          "heartbeat_rank0.jsonl", "k_stats_fsdp.csv", "mem_fsdp_boot.json",
                                          "mem_fsdp_boot.txt", "mem_fsdp_step1.json", "mem_fsdp_step1.txt",
                                          "mem_fsdp_step2.json", "mem_fsdp_step2.txt", "mem_fsdp_step4.json",
                                          "mem_fsdp_step4.txt", "opt_state_fsdp_mb.txt", "training_fsdp.csv"});
  for (const std::string& name : names) CHECK(is_diagnostics_file(name));
  // Steps 1, 2 and 4; of two layers.
  CHECK(text_of(made + "/k_stats_fsdp.csv") ==
        "step,k_mean,k_max,rows,pct_at_max\n1,12.5000,21,16,0.1875\n2,12.5000,21,16,0.1875\n4,12.5000,21,16,0.1875\n");
  CHECK(text_of(made + "/fallback_counters_fsdp.csv") ==
        "step,compression_single_numbers,gates_single_numbers,selection_any_heads,selection_not_pooled,"
        "selected_in_pieces,total_fallbacks\n1,0,0,1,0,2,3\n2,0,0,2,0,4,6\n4,0,0,4,0,8,12\n");
  const std::string training = text_of(made + "/training_fsdp.csv");
  CHECK(training.rfind("1,1.250000,3.000000e-04,", 0) == 0);
  CHECK(std::count(training.begin(), training.end(), '\n') == 3);
  CHECK(std::count(training.begin(), training.end(), ',') == 9);
  CHECK(training.find('.', training.rfind(',')) == std::string::npos);  // whole tokens/s

  CHECK(messages(made + "/heartbeat_rank0.jsonl") ==
        std::vector<std::string>{"boot", "progress", "progress", "progress", "end"});
  const json j = lines_of(made + "/heartbeat_rank0.jsonl")[3];
  for (const char* key : {"ts",
                          "iso",
                          "pid",
                          "rank",
                          "step",
                          "msg",
                          "backend",
                          "gpu_mem_alloc",
                          "gpu_mem_reserved",
                          "loss",
                          "toks_per_s",
                          "dt_fetch_s",
                          "grad_norm",
                          "gate_entropy_mean",
                          "gate_entropy_min",
                          "gate_max_gate",
                          "gate_collapse_frac",
                          "gate_branch_shares",
                          "sel_k_mean",
                          "sel_k_max",
                          "sel_rows",
                          "sel_pct_at_max",
                          "fb_selection_any_heads",
                          "fb_total_fallbacks"}) {
    INFO(key);
    CHECK(j.contains(key));
  }
  CHECK(j.at("step") == 4);
  CHECK(j.at("grad_norm") == 2.5);
  CHECK(j.at("gate_max_gate") == 0.5);
  CHECK(j.at("gate_max_gate_mean") == Approx(0.45));
  CHECK(j.at("gate_branch_shares") == json({0.2, 0.3, 0.5}));
  CHECK(j.at("fb_total_fallbacks") == 12);
  CHECK(json::parse(text_of(made + "/mem_fsdp_step1.json")).at("before_step_bytes").size() == purposes);

  // A new run of two ranks: what the old one left is gone, but not the heartbeat that the other rank may have begun.
  World two;
  two.size = two.local_size = 2;
  for (const char* other : {"/heartbeat_rank1.jsonl", "/heartbeat_rank2.jsonl"}) write(made + other, "{}\n");
  Told dense(options({"--diagnostics", made.c_str(), "--attn", "dense"}), two);
  dense.diagnostics->begin(1);
  dense.step(1);
  CHECK_FALSE(fs::exists(made + "/k_stats_fsdp.csv"));
  CHECK_FALSE(fs::exists(made + "/mem_fsdp_step4.txt"));
  CHECK(text_of(made + "/heartbeat_rank1.jsonl") == "{}\n");
  CHECK_FALSE(fs::exists(made + "/heartbeat_rank2.jsonl"));
  CHECK(messages(made + "/heartbeat_rank0.jsonl") == std::vector<std::string>{"boot", "progress"});
  CHECK_FALSE(lines_of(made + "/heartbeat_rank0.jsonl").back().contains("gate_entropy_mean"));
}

TEST_CASE("a run that is resumed goes on in the same files from its step", "[diagnostics]") {
  ScratchDirectory dir;
  const std::vector<const char*> fresh = {"--diagnostics", dir.path.c_str()};
  {
    Told t(options(fresh));
    t.diagnostics->begin(1);
    t.diagnostics->count_fallbacks(std::vector<NsaKernels>(2));
    for (int64_t n = 1; n <= 7; n++) t.step(n, double(n));
  }
  std::ofstream(dir / "training_fsdp.csv", std::ios::app) << "8,8.0";  // it was killed there
  Told t(options({"--diagnostics", dir.path.c_str(), "--resume", "x"}));
  CHECK(has(text_of(dir / "training_fsdp.csv"), "7,7.000000"));  // until the first step is about to run
  t.diagnostics->begin(6);
  t.diagnostics->count_fallbacks(std::vector<NsaKernels>(2));
  for (int64_t n = 6; n <= 9; n++) t.step(n, double(n) + 0.5);
  for (const char* name : {"training_fsdp.csv", "k_stats_fsdp.csv", "fallback_counters_fsdp.csv"}) {
    INFO(name);
    std::ifstream in(dir / name);
    std::vector<std::string> steps;
    for (std::string line; std::getline(in, line);) steps.push_back(line.substr(0, line.find(',')));
    std::vector<std::string> expected = {"1", "2", "3", "4", "5", "6", "7", "8", "9"};
    if (name != std::string("training_fsdp.csv")) expected.insert(expected.begin(), "step");
    CHECK(steps == expected);
  }
  CHECK(has(text_of(dir / "training_fsdp.csv"), "\n5,5.000000,"));
  CHECK(has(text_of(dir / "training_fsdp.csv"), "\n6,6.500000,"));
  const std::vector<std::string> all = messages(dir / "heartbeat_rank0.jsonl");
  CHECK(std::count(all.begin(), all.end(), "boot") == 2);
  CHECK(std::count(all.begin(), all.end(), "progress") == 7 + 4);
  CHECK(fs::exists(dir / "mem_fsdp_step6.txt"));
}

TEST_CASE("a stall is in the heartbeat, and what ended the run", "[diagnostics]") {
  ScratchDirectory dir;
  Told t(options({"--diagnostics", dir.path.c_str(), "--stall", "0.1"}));
  t.diagnostics->begin(1);
  t.step(1);
  for (int i = 0; i < 500 && messages(dir / "heartbeat_rank0.jsonl").back() != "stall"; i++) usleep(10000);
  t.diagnostics->end("too slow");
  const std::vector<json> all = lines_of(dir / "heartbeat_rank0.jsonl");
  CHECK(all.back().at("text") == "too slow");
  const json j = all.at(all.size() - 2);
  CHECK(j.at("msg") == "stall");
  CHECK(j.at("step") == 1);
  CHECK(j.at("seconds") >= 0.1);
  CHECK(has(j.at("text"), "step 2 of 100 is awaited"));
}

TEST_CASE("without a directory nothing is written", "[diagnostics]") {
  ScratchDirectory dir;
  const fs::path before = fs::current_path();
  fs::current_path(dir.path);
  {
    Told t(options({}));
    CHECK_FALSE(t.r.model.diagnostics);
    t.diagnostics->begin(1);
    t.step(1);
    t.diagnostics->end();
  }
  fs::current_path(before);
  CHECK(fs::is_empty(dir.path));
}

TEST_CASE("a directory that cannot be this run's is refused, and left alone", "[diagnostics]") {
  ScratchDirectory dir;
  auto refusal = [&](std::vector<const char*> more) {
    return error_of<UsageError>([&] { check_outputs(options(more)); });
  };
  const std::string file = dir / "file", foreign = dir / "foreign", ours = dir / "ours", saved = dir / "saved";
  write(file, "x");
  CHECK(has(refusal({"--diagnostics", file.c_str()}), "not a directory"));
  CHECK(has(error_of<UsageError>([&] { Told t(options({"--diagnostics", file.c_str()})); }), "--diagnostics: " + file));
  fs::create_directory(foreign);
  write(foreign + "/notes.txt", "mine");
  CHECK(refusal({"--diagnostics", foreign.c_str()}) == "");  // none of our names
  write(foreign + "/training_fsdp.csv", "1,2,3,4\n");
  CHECK(has(refusal({"--diagnostics", foreign.c_str()}), "training_fsdp.csv is there, but no env.json of a run"));
  write(foreign + "/env.json", "{}");
  CHECK(has(refusal({"--diagnostics", foreign.c_str()}), "no env.json of a run"));
  CHECK(text_of(foreign + "/training_fsdp.csv") == "1,2,3,4\n");
  { Told t(options({"--diagnostics", ours.c_str()})); }
  CHECK(refusal({"--diagnostics", ours.c_str()}) == "");
  write(ours + "/k_stats_fsdp.csv", "step,other\n");
  CHECK(refusal({"--diagnostics", ours.c_str()}) == "");  // it is replaced
  CHECK(has(error_of<UsageError>([&] { check_diagnostics(ours, true); }), "k_stats_fsdp.csv has other columns"));
  fs::remove(ours + "/k_stats_fsdp.csv");
  fs::create_directory(ours + "/heartbeat_rank0.jsonl.d");
  CHECK(refusal({"--diagnostics", ours.c_str()}) == "");
  fs::create_symlink(file, ours + "/heartbeat_rank7.jsonl");
  CHECK(has(refusal({"--diagnostics", ours.c_str()}), "heartbeat_rank7.jsonl there is not a regular file"));
  fs::create_directory(saved);
  CHECK(has(refusal({"--diagnostics", saved.c_str(), "--save", (saved + "/").c_str()}), "where checkpoints are"));
  CHECK(has(refusal({"--diagnostics", (saved + "/step-3").c_str(), "--save", saved.c_str()}), "where checkpoints are"));
  CHECK(refusal({"--diagnostics", (saved + "/diagnostics").c_str(), "--save", saved.c_str()}) == "");
  const std::string new_one = dir / "new";
  CHECK(has(refusal({"--diagnostics", new_one.c_str(), "--log", (new_one + "/heartbeat_rank0.jsonl").c_str()}),
            "one of the files of --diagnostics"));
  CHECK(refusal({"--diagnostics", new_one.c_str(), "--log", (new_one + "/log.jsonl").c_str()}) == "");
}

TEST_CASE("what cannot be written later is said, and steps go on", "[diagnostics]") {
  ScratchDirectory dir;
  Told t(options({"--diagnostics", dir.path.c_str()}));
  t.diagnostics->begin(1);
  t.step(1);
  checkpoint_hook = [](const char* call, const std::string&) { return std::string(call) == "write" ? ENOSPC : 0; };
  for (int64_t n = 2; n <= 5; n++) t.step(n);
  checkpoint_hook = nullptr;
  t.step(6);
  t.diagnostics->end();
  const std::string training = text_of(dir / "training_fsdp.csv");
  CHECK(std::count(training.begin(), training.end(), '\n') == 2);
  CHECK(messages(dir / "heartbeat_rank0.jsonl") == std::vector<std::string>{"boot", "progress", "progress", "end"});
}

TEST_CASE("the environment that is written holds what changes a run, and no secret", "[diagnostics]") {
  ::setenv("AWS_SECRET_ACCESS_KEY", "hush", 1);
  ::setenv("NCCL_DEBUG", "WARN", 1);
  const json header = {{"command", "./train"}, {"commit", "abc"}, {"versions", json::object()}, {"hardware", 1}};
  const json j = environment_json(header, test_device(Backend::cpu));
  ::unsetenv("AWS_SECRET_ACCESS_KEY"), ::unsetenv("NCCL_DEBUG");
  CHECK_FALSE(has(j.dump(), "hush"));
  CHECK(j.at("env").at("NCCL_DEBUG") == "WARN");
  CHECK(j.at("commit") == "abc");
  CHECK(j.at("distributed_backend") == "FSDP");
}

TEST_CASE("the report of types names every parameter once", "[diagnostics]") {
  const Run r = resolve(options({"--autocast", "bf16", "--moments", "bf16"}), 2, 0);
  const std::string text = dtypes_text(r, 2);
  CHECK(text.rfind(strf("# DTYPE SUMMARY (elements) - FSDP\nfp32: %lld (100.00%%)\n\n",
                        static_cast<long long>(parameter_count(r.model))),
                   0) == 0);
  for (const Unit& u : parameter_table(r.model))
    for (const Param& p : u.params) CHECK(has(text, "\nPARAM " + p.name + " fp32 ["));
  CHECK(has(text, "\nPARAM embedding.weight fp32 [256, 128]\n"));
  CHECK(has(text, "USE gathered_parameters fp32\nUSE activations bf16\nUSE unsharded_gradients fp32\n"));
  CHECK(has(text, "USE moments bf16\n"));
}

TEST_CASE("the report of types tells a shard that is reduced once from one that is summed", "[diagnostics]") {
  const auto shards_in = [](std::initializer_list<const char*> more, const char* type) {
    std::vector<const char*> all = {"--autocast", "bf16", "--reduce-dtype", "bf16"};
    all.insert(all.end(), more);
    return has(dtypes_text(resolve(options(all), 2, 0), 2), strf("USE gradient_shards %s\n", type));
  };
  CHECK(shards_in({}, "bf16"));
  CHECK(shards_in({"--reduce", "copy-engine"}, "bf16"));
  CHECK(shards_in({"--grad-accum", "2", "--accum-sync", "last"}, "bf16"));
  CHECK(shards_in({"--grad-accum", "2"}, "fp32"));
  CHECK(shards_in({"--optimizer-in-backward", "1", "--clip", "0"}, "fp32"));
}

TEST_CASE("a unit that is not gathered in fp8 where others are is told", "[diagnostics]") {
  const auto resolved = [](std::initializer_list<const char*> more) {
    std::vector<const char*> all = {"--attn",         "nsa", "--nsa-phi",      "mlp",
                                    "--matmul-dtype", "fp8", "--gather-dtype", "fp8"};
    all.insert(all.end(), more);
    return resolve(options(all), 2, 0);
  };
  const Run r = resolved({"--wrap", "sublayer"});  // tiny, whose compression has more parameters than q, k, v and o
  const std::string text = dtypes_text(r, 2);
  CHECK(has(text, "USE gathered_matrices_of_block.0.mlp e4m3\n"));
  CHECK_FALSE(has(text, "gathered_matrices_of_block.0.attention"));
  REQUIRE(r.notices.size() == 1);
  CHECK(has(r.notices[0], "2 of 4 units"));
  // Where none is, the way out is one that helps.
  CHECK(has(error_of<UsageError>([&] { resolved({"--nsa-gate", "mlp"}); }), "use --wrap sublayer"));
}

// ---------------------------------------------------------------------------------------------------------- all ranks

TEST_CASE("each rank has its heartbeat, and fallbacks are all ranks'", "[diagnostics]") {
  const World& world = test_world();
  SharedDirectory dir;
  {
    Told t(options({"--diagnostics", dir.path.c_str()}), world);
    t.diagnostics->begin(1);
    std::vector<NsaKernels> kernels(1);
    for (int i = 0; i <= world.rank; i++) kernels[0].add(Stage::gates, {"cuda", "single numbers", true});
    t.diagnostics->count_fallbacks(kernels);
    t.step(1);
    barrier();
  }
  const json j = lines_of(dir / strf("heartbeat_rank%d.jsonl", world.rank)).back();
  CHECK(j.at("rank") == world.rank);
  CHECK(j.at("sel_rows") == 16);
  CHECK(j.at("fb_gates_single_numbers") == world.size * (world.size + 1) / 2);
  CHECK(has(text_of(dir / "fallback_counters_fsdp.csv"),
            strf("\n1,0,%d,0,0,0,%d\n", world.size * (world.size + 1) / 2, world.size * (world.size + 1) / 2)));
  barrier();
}
