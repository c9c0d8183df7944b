// From options to a run, and what is said of it: resolution, plans and advice, tables, and what a resumed run takes
// over.
#include <algorithm>
#include <sstream>
#include <set>
#include <string>
#include <vector>

#include "lib/program/json.h"
#include "lib/program/options.h"
#include "lib/program/plan.h"
#include "lib/program/presets.h"
#include "lib/program/report.h"
#include "lib/program/resume.h"
#include "lib/program/run.h"
#include "test/catch.h"
#include "test/errors.h"

namespace {

using nlohmann::json;
using Words = std::vector<std::string>;

Words words_of(const std::string& line) {
  std::istringstream in(line);
  Words words;
  for (std::string word; in >> word;) words.push_back(word);
  return words;
}

// "--dim 64 --tf32" as ./train reads it.
Options parsed(const std::string& line) {
  std::vector<const char*> argv = {"train"};
  const Words words = words_of(line);
  for (const std::string& word : words) argv.push_back(word.c_str());
  Options o;
  std::string text;
  REQUIRE(parse_options(int(argv.size()), argv.data(), &o, &text));
  return o;
}

Run on_cpu(const std::string& line, int ranks = 1) { return resolve(parsed("--device cpu " + line), ranks, 0); }
Run on_gpus(const std::string& line, int ranks = 1) { return resolve(parsed("--device gpu " + line), ranks, 1); }

void says(const std::string& text, const std::vector<std::string>& words) {
  INFO(text);
  for (const std::string& word : words) {
    INFO(word);
    CHECK(text.find(word) != std::string::npos);
  }
}

bool same(const std::string& a, const std::string& b) { return words_of(a) == words_of(b); }  // but for blanks
std::string line_with(const std::string& text, const std::string& word) {
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);)
    if (line.find(word) != std::string::npos) return line;
  return "";
}

}  // namespace

// -------------------------------------------------------------------------------------------------------- resolve

TEST_CASE("batches follow from what is given of them", "[program]") {
  struct {
    const char* options;
    int ranks;
    int64_t batch, accum, global;
  } cases[] = {
      {"--preset class", 4, 8, 2, 64},  // the preset's accumulation holds until something is said
      {"--preset class --batch 4", 4, 4, 1, 16},
      {"--preset class --grad-accum 1", 4, 8, 1, 32},
      {"--preset class --grad-accum 3", 4, 8, 3, 96},
      {"--preset class --global-batch 10", 4, 3, 1, 10},
      {"--preset class --global-batch 10 --grad-accum 2", 4, 2, 2, 10},
      {"--preset class --global-batch 10 --batch 5", 4, 5, 1, 10},
      {"--preset class --global-batch 12 --batch 3", 4, 3, 1, 12},
      {"--preset class --global-batch 1", 4, 1, 1, 1},
  };
  for (const auto& c : cases) {
    INFO(c.options);
    const Run r = on_cpu(c.options, c.ranks);
    CHECK(r.batch == c.batch);
    CHECK(r.grad_accum == c.accum);
    CHECK(r.global_batch == c.global);
    CHECK(r.tokens_per_step() == c.global * r.model.seq);
  }
  // Three ranks have 4, 3 and 3 of ten rows.
  says(error_of<UsageError>([] { on_cpu("--preset class --global-batch 10 --batch 3", 3); }),
       {"--global-batch 10", "3 ranks", "--batch 3", "9 sequences", "use --grad-accum 2"});
  CHECK(on_cpu("--preset class --global-batch 10 --batch 4", 3).global_batch == 10);
}

TEST_CASE("presets have the parameters that they are named for", "[program]") {
  CHECK(parameter_count(on_gpus("--preset m7c").model) == 78638304);
  CHECK(parameter_count(on_gpus("--preset m7c-125m").model) == 125136096);
}

TEST_CASE("the schedule's length, its end and its warm-up", "[program]") {
  struct {
    const char* options;
    int64_t steps, last, warmup;
  } cases[] = {
      {"", 32, 32, 3},
      {"--steps 50", 50, 50, 5},
      {"--steps 5000", 5000, 5000, 100},
      {"--steps 50 --warmup 0", 50, 50, 0},
      {"--steps 50 --warmup 70", 50, 50, 70},
      {"--steps 50 --stop-after 7", 50, 7, 5},
      {"--steps 50 --stop-after 70", 50, 50, 5},
      {"--steps 50 --stop-after 0", 50, 0, 5},
      {"--tokens 512", 1, 1, 0},
      {"--tokens 5121", 11, 11, 1},
      {"--tokens 5121 --steps 40", 40, 11, 4},
      {"--tokens 5121 --steps 10", 10, 10, 1},
  };
  for (const auto& c : cases) {
    INFO(c.options);
    const Run r = on_cpu(std::string("--preset tiny ") + c.options);  // 512 tokens a step
    CHECK(r.steps == c.steps);
    CHECK(r.last_step == c.last);
    CHECK(r.warmup == c.warmup);
  }
  CHECK(on_gpus("").steps == 200);
}

TEST_CASE("epochs are the whole steps in so many passes over the data", "[program]") {
  auto of = [](const std::string& options, int64_t sequences) {
    Run r = on_cpu("--preset tiny --global-batch 8 " + options);
    limit_epochs(sequences, &r);
    return r;
  };
  struct {
    const char* options;
    int64_t sequences, steps, last, warmup;
  } cases[] = {
      {"--epochs 1", 80, 10, 10, 1},
      {"--epochs 1", 87, 10, 10, 1},
      {"--epochs 2", 87, 21, 21, 2},  // the eleventh step's batch begins in the first pass and ends in the second
      {"--epochs 0.1", 800, 10, 10, 1},
      {"--epochs 0.3", 80, 3, 3, 0},
      {"--epochs 2000", 8000, 2000000, 2000000, 100},
      {"--epochs 1 --steps 40", 80, 40, 10, 4},
      {"--epochs 1 --steps 4", 80, 4, 4, 0},
      {"--epochs 1 --stop-after 3", 80, 10, 3, 1},
      {"--epochs 1 --warmup 7", 80, 10, 10, 7},
      {"", 80, 32, 32, 3},
      {"--tokens 40960", 80, 10, 10, 1},
  };
  for (const auto& c : cases) {
    INFO(c.options << " of " << c.sequences);
    const Run r = of(c.options, c.sequences);
    CHECK(r.steps == c.steps);
    CHECK(r.last_step == c.last);
    CHECK(r.warmup == c.warmup);
  }
  auto refused = [](auto f) -> std::string {
    try {
      f();
    } catch (const UsageError& e) { return e.what(); }
    return "";
  };
  says(refused([&] { of("--epochs 0.5", 15); }), {"--epochs 0.5", "7.5 sequences", "the 8 of a step"});
  CHECK(of("--epochs 0.5", 16).steps == 1);
  says(refused([&] { of("--epochs 1 --data random", 15); }), {"--epochs 1", "--data random"});
}

TEST_CASE("a way to shard is the knobs that it stands for", "[program]") {
  struct {
    const char* options;
    int shard_ranks, slots;
    bool reshard;
    int prefetch;
  } cases[] = {
      {"", 0, 2, true, 1},
      {"--shard grad", 0, 2, false, 1},
      {"--shard none", 1, 2, false, 1},
      {"--shard hybrid:2", 2, 2, true, 1},
      {"--shard hybrid:4", 4, 2, true, 1},
      {"--reshard-after-forward 0", 0, 2, false, 1},
      {"--limit-all-gathers 1", 0, 1, true, 1},
      {"--limit-all-gathers 5", 0, 5, true, 4},
      {"--limit-all-gathers off", 0, 0, true, 1 << 20},
      {"--limit-all-gathers 5 --forward-prefetch 0", 0, 5, true, 0},
  };
  for (const auto& c : cases) {
    INFO(c.options);
    const Run r = on_cpu(c.options, 4);
    CHECK(r.fsdp.shard_ranks == c.shard_ranks);
    CHECK(r.fsdp.gather_slots == c.slots);
    CHECK(r.fsdp.reshard_after_forward == c.reshard);
    CHECK(r.model.forward_prefetch == c.prefetch);
  }
  for (const char* bad : {"some", "hybrid", "hybrid:", "hybrid:x", "hybrid:0", "hybrid:-2", "hybrid:9999999"})
    says(error_of<UsageError>([&] { on_cpu(std::string("--shard ") + bad, 4); }),
         {std::string("--shard ") + bad, "hybrid:"});
  says(error_of<UsageError>([] { on_cpu("--shard hybrid:3", 4); }), {"--shard hybrid:3", "4 ranks"});
  for (const char* bad : {"0", "65", "x", "-1", "111"})
    says(error_of<UsageError>([&] { on_cpu(std::string("--limit-all-gathers ") + bad, 4); }),
         {"--limit-all-gathers", "1 to 64", "off"});
  const Run r = on_cpu(
      "--autocast bf16 --moments bf16 --accum-sync last --clip-norm inf --meta-init 0 --bucket-mb 1 --wrap auto "
      "--replicate-below 10 --gradient-slots 3 --clip 0 --optimizer-in-backward 1 --seed 9 --tie-embeddings");
  CHECK(r.fsdp.gather_wide);
  CHECK(r.fsdp.moment_dtype == Dtype::bf16);
  CHECK(r.fsdp.reduce_last);
  CHECK(r.fsdp.norm == ops::GradNorm::inf);
  CHECK(r.fsdp.unsharded_init);
  CHECK(r.fsdp.gradient_slots == 3);
  CHECK(r.fsdp.update_in_backward);
  CHECK(r.fsdp.seed == 9);
  CHECK(r.model.tied);
  CHECK(r.model.bucket_params == (1 << 20) / 4);  // gathered in fp32
  CHECK(r.model.replicate_below == 3);
  CHECK(on_cpu("--replicate-below 12").model.replicate_below == 3);  // of 12 bytes none is smaller than 12
  CHECK(on_cpu("--replicate-below 13").model.replicate_below == 4);
  CHECK(on_gpus("--bucket-mb 1 --wrap auto").model.bucket_params == (1 << 20) / 2);
  CHECK(on_cpu("--clip-norm 3").fsdp.norm == ops::GradNorm(3));
}

TEST_CASE("modules by size are a unit from the size that is asked for, and merged up to the bucket's", "[program]") {
  ModelConfig c;
  c.arch = Arch::mlp, c.dim = 8, c.hidden = 16, c.depth = 4, c.vocab = 40, c.wrap = Wrap::size;
  // Parameters: the embedding 320, each block 256, the head 336, of which its norm's two have 8 each.
  auto units = [&](int64_t least, int64_t bucket) {
    c.wrap_min_params = least, c.bucket_params = bucket;
    std::string names;
    for (const Unit& u : parameter_table(c)) names += (names.empty() ? "" : " ") + u.name;
    return names;
  };
  const std::string each = "embedding block.0 block.1 block.2 block.3 head";
  CHECK(units(0, 0) == each);
  CHECK(units(256, 0) == each);
  CHECK(units(257, 0) == "embedding block.0..block.1 block.2..block.3 head");
  CHECK(units(512, 0) == "embedding..block.0 block.1..block.2 block.3..head");
  CHECK(units(513, 0) == "embedding..block.0 block.1..block.3 head");
  CHECK(units(10000, 0) == "model");
  CHECK(units(10000, 512) == "embedding block.0..block.1 block.2..block.3 head");
  CHECK(units(10000, 511) == each);
  CHECK(units(10000, 1) == each);
  c.vocab = 16;  // 128 and 144: too small to be units, and nothing else is
  CHECK(units(256, 0) == each);
  c.wrap = Wrap::block, c.vocab = 40;
  auto replicated = [&](int64_t below) {
    c.replicate_below = below;
    const std::vector<Unit> all = parameter_table(c);
    return all.back().replicated ? int(all.back().params.size()) : 0;
  };
  CHECK(replicated(8) == 0);
  CHECK(replicated(9) == 2);
  CHECK(replicated(128) == 2);
  CHECK(replicated(129) == 2 + 2 * 4);
  CHECK(replicated(320) == 2 + 2 * 4);
  CHECK(make_table(c).unit_of[0] == 0);
}

TEST_CASE("what the machine and the preset decide, and what is given against them", "[program]") {
  CHECK(resolve(Options(), 1, 0).preset == "tiny");
  CHECK(resolve(Options(), 1, 1).preset == "m7c");
  CHECK(resolve(Options(), 1, 0).notices.size() == 1);
  CHECK(resolve(Options(), 1, 1).notices.empty());
  // An option that does nothing says so.
  Options tf32;
  tf32.tf32 = true;
  CHECK(resolve(tf32, 1, 1).notices == Words{"--tf32 has no effect: matmuls run in bf16"});
  tf32.param_dtype = "fp32";
  CHECK(resolve(tf32, 1, 1).notices.empty());
  tf32.device = "cpu";
  CHECK(resolve(tf32, 1, 1).notices == Words{"--tf32 has no effect on the CPU"});
  CHECK(on_cpu("").dtype == Dtype::f32);
  CHECK(on_cpu("").reduce_dtype == Dtype::f32);
  CHECK(on_gpus("").dtype == Dtype::bf16);
  CHECK(on_gpus("").reduce_dtype == Dtype::bf16);
  CHECK(on_gpus("--param-dtype fp32").reduce_dtype == Dtype::f32);
  CHECK(on_gpus("--reduce-dtype fp32").dtype == Dtype::bf16);
  CHECK(on_gpus("--autocast bf16").dtype == Dtype::bf16);
  CHECK(on_gpus("--autocast bf16").reduce_dtype == Dtype::f32);
  says(error_of<UsageError>([] { resolve(parsed("--device gpu"), 1, 0); }), {"--device gpu", "--device cpu"});
  CHECK(resolve(parsed("--device gpu --plan"), 1, 0).backend == Backend::gpu);
  CHECK(resolve(parsed("--plan"), 1, 0).backend == Backend::gpu);
  CHECK(resolve(parsed("--show-params"), 1, 0).backend == Backend::cpu);

  const ModelConfig tiny = preset_named("tiny").model;
  const ModelConfig m = on_cpu("--preset tiny --dim 256 --heads 4 --rope-base 7").model;
  CHECK(m.hidden == 2 * tiny.hidden);  // a width alone keeps the MLP's proportion
  CHECK(m.heads == 4);
  CHECK(m.depth == tiny.depth);
  CHECK(m.rope.base == 7);
  CHECK(m.rope.scaling == RopeScaling());
  CHECK(m.norm_eps == 1e-5);
  CHECK(on_cpu("--norm-eps 1e-6 --rope-scaling llama3:32:1:4.5:8192").model.rope.scaling ==
        RopeScaling{32, 1, 4.5, 8192});
  CHECK(on_cpu("--norm-eps 1e-6").model.norm_eps == 1e-6);
  for (const char* bad : {"linear:2", "llama3", "llama3:8:1:4", "llama3:8:1:4:8192:", "llama3:1:1:4:8192",
                          "llama3:nan:1:4:8192", "llama3:8:4:4:8192", "llama3:8:1:4:0"})
    says(error_of<UsageError>([&] { on_cpu(std::string("--rope-scaling ") + bad); }), {bad, "llama3:8:1:4:8192"});
  CHECK(on_cpu("--preset tiny --dim 256 --hidden 64").model.hidden == 64);
  CHECK(on_cpu("--preset tiny").model.sparse);
  CHECK(!on_cpu("--preset tiny --attn dense").model.sparse);
  CHECK(!on_cpu("--preset mlp-1024 --batch 1").model.sparse);
  // A step of less than what is asked for every so many steps.
  const auto says_of = [](const std::string& line, const std::string& words) {
    const Words said = on_cpu("--steps 5 " + line).notices;
    return std::count_if(said.begin(), said.end(), [&](const std::string& n) { return has(n, words); });
  };
  CHECK(says_of("--warmup 6", "--warmup 6: the run has 5 steps: it never reaches --lr") == 1);
  CHECK(says_of("--stop-after 6", "--stop-after 6: the run has 5 steps") == 1);
  CHECK(says_of("--val-every 6", "nothing is validated") == 1);
  CHECK(says_of("--stop-after 4 --val-every 5", "--val-every 5: the run has 4 steps") == 1);
  CHECK(says_of("--warmup 5 --stop-after 5 --val-every 5", "the run has") == 0);
  CHECK(on_cpu("--preset tiny --freeze embedding,,head").model.frozen == Words{"embedding", "head"});
  const auto frozen = [](const std::string& names) {  // modules of the parameters that are
    std::set<std::string> modules;
    for (const Unit& u : parameter_table(on_cpu("--preset tiny --depth 12 --freeze " + names).model))
      for (const Param& p : u.params)
        if (p.frozen) modules.insert(p.name.substr(0, p.name.find('.', p.name.find('.') + 1)));
    return modules;
  };
  CHECK(frozen("block.1") == std::set<std::string>{"block.1"});  // and not block.10 and block.11
  CHECK(frozen("block.11.mlp,block.2.attention.q") == std::set<std::string>{"block.11", "block.2"});
  const NsaShape n =
      on_cpu("--nsa-block 64 --nsa-stride 8 --nsa-select-block 128 --nsa-selected 5 --nsa-window 9").model.nsa;
  CHECK((n.block == 64 && n.stride == 8 && n.select_block == 128 && n.selected == 5 && n.window == 9));
  with_types(on_gpus("--reduce-dtype fp32"), [](auto t, auto g) {
    CHECK((dtype_of<decltype(t)> == Dtype::bf16 && dtype_of<decltype(g)> == Dtype::f32));
  });
  with_types(on_cpu("--reduce-dtype bf16"), [](auto t, auto g) {
    CHECK((dtype_of<decltype(t)> == Dtype::f32 && dtype_of<decltype(g)> == Dtype::f32));
  });
}

TEST_CASE("each name is its own choice, and a name that is none is refused", "[program]") {
  for (const auto& e : arch_names) {
    const Run r = on_cpu(std::string("--arch ") + e.name + " --recompute none");
    CHECK(r.model.arch == e.value);
    CHECK(name_of(r.model.arch) == std::string(e.name));
  }
  for (const auto& e : wrap_names) CHECK(on_cpu(std::string("--wrap ") + e.name).model.wrap == e.value);
  for (const auto& e : recompute_names) CHECK(on_cpu(std::string("--recompute ") + e.name).model.recompute == e.value);
  for (const auto& e : phi_names) CHECK(on_cpu(std::string("--nsa-phi ") + e.name).model.nsa.phi == e.value);
  for (const auto& e : backward_prefetch_names)
    CHECK(on_cpu(std::string("--backward-prefetch ") + e.name).model.backward_prefetch == e.value);
  for (const char* name : preset_names()) CHECK(preset_named(name).name == std::string(name));
  says(error_of<UsageError>([] { preset_named("huge"); }),
       {"unknown preset 'huge'", "choose", "tiny, simple", "llama-47b"});
}

TEST_CASE("sizes that do not fit together are refused by name", "[program]") {
  auto cpu = [](const std::string& options, const std::vector<std::string>& words) {
    INFO(options);
    says(error_of<UsageError>([&] { on_cpu(options); }), words);
  };
  auto gpu = [](const std::string& options, const std::vector<std::string>& words) {
    INFO(options);
    says(error_of<UsageError>([&] { on_gpus(options); }), words);
  };
  cpu("--dim 100 --heads 3 --kv-heads 1", {"--dim 100", "--heads 3"});
  cpu("--heads 4 --kv-heads 3", {"--heads 4", "--kv-heads 3"});
  cpu("--arch mlp --dim 100", {"--dim 100", "multiple of 8"});
  cpu("--hidden 100", {"--hidden 100", "multiple of 8"});
  cpu("--batch 1048576 --seq 4096", {"--batch 1048576", "--seq 4096"});
  cpu("--dim 24 --heads 2", {"head dim 12", "--dim 24", "--heads 2"});
  cpu("--preset mlp-1024 --attn nsa", {"--attn nsa", "mlp"});
  cpu("--preset mlp-1024 --recompute attn", {"--recompute attn", "mlp"});
  cpu("--preset mlp-1024 --recompute both --keep-attention 1", {"--keep-attention 1", "mlp"});
  cpu("--keep-attention 1", {"--keep-attention 1", "--recompute attn, both or block"});
  cpu("--keep-cheap 1 --recompute mlp", {"--keep-cheap 1", "--recompute none"});
  cpu("--attn dense --nsa-stats --log x", {"--nsa-stats", "dense"});
  cpu("--freeze blok", {"--freeze blok", "--show-params"});
  cpu("--freeze block.", {"--freeze block.", "--show-params"});
  cpu("--freeze embed", {"--freeze embed", "--show-params"});
  cpu("--freeze embedding,block,head", {"nothing is left to train"});
  cpu("--nsa-block 30", {"30"});
  gpu("--vocab 257", {"--vocab 257", "use --vocab 264"});
  gpu("--preset tiny --dim 64 --heads 2", {"head dim 32", "64 and 128"});
  gpu("--preset tiny --param-dtype fp32 --dim 512 --heads 2", {"head dim 256", "at most 128"});
  CHECK(on_cpu("--vocab 257").model.vocab == 257);
  CHECK(on_gpus("--vocab 257 --param-dtype fp32").model.vocab == 257);
}

TEST_CASE("copy engines gather and reduce where they can and pay, and as asked for", "[program]") {
  auto engines = [](const std::string& options, int ranks, Transport transport, bool one_host, bool pay) {
    Run r = on_gpus(options, ranks);
    choose_collectives(&r, ranks, transport, one_host, pay);
    return r.fsdp.gather_by_copy_engine;
  };
  const bool here = true, pay = true;
  CHECK(engines("", 4, Transport::nccl, here, pay));
  CHECK(!engines("", 4, Transport::nccl, !here, pay));
  CHECK(!engines("", 4, Transport::nccl, here, !pay));
  CHECK(!engines("", 4, Transport::mpi, here, pay));
  CHECK(!engines("", 1, Transport::none, here, pay));
  CHECK(!engines("--shard none", 4, Transport::nccl, here, pay));
  CHECK(!engines("--gather nccl", 4, Transport::nccl, here, pay));
  CHECK(engines("--gather copy-engine", 4, Transport::nccl, here, !pay));
  auto reads = [](const std::string& options, int ranks, bool pay) {
    Run r = on_gpus(options, ranks);
    choose_collectives(&r, ranks, Transport::nccl, /*one_host=*/true, pay);
    return r.fsdp.read_tail;
  };
  auto fetches = [](const std::string& options, int ranks, bool pay) {
    Run r = on_gpus(options, ranks);
    choose_collectives(&r, ranks, Transport::nccl, /*one_host=*/true, pay);
    return r.fsdp.fetch;
  };
  CHECK(fetches("", 2, pay));
  CHECK(fetches("--shard hybrid:2", 4, pay));
  CHECK(fetches("--gather copy-engine --reduce-tail same", 2, !pay));
  CHECK(!fetches("", 4, pay));
  CHECK(!fetches("", 2, !pay));
  CHECK(!fetches("--gather nccl", 2, pay));
  CHECK(reads("", 2, pay));
  CHECK(!reads("", 3, pay));
  CHECK(!reads("", 2, !pay));
  CHECK(!reads("--gather nccl", 2, pay));
  CHECK(!reads("--reduce-tail same", 2, pay));
  CHECK(reads("--reduce-tail peer", 8, pay));
  CHECK(reads("--gather copy-engine --reduce copy-engine --reduce-tail peer", 4, !pay));
  // Ranks that fetch reduce by engines.
  auto exchanges = [](const std::string& options, int ranks, bool pay) {
    Run r = on_gpus(options, ranks);
    choose_collectives(&r, ranks, Transport::nccl, /*one_host=*/true, pay);
    CHECK(!(r.fsdp.reduce_by_copy_engine && r.fsdp.has_small_ring()));
    return r.fsdp.reduce_by_copy_engine;
  };
  for (const char* options : {"--preset class", "--preset tiny", "--preset rope --grad-accum 4", "--param-dtype fp32",
                              "--grad-accum 2 --accum-sync last"})
    CHECK(exchanges(options, 2, pay));
  CHECK(!exchanges("", 4, pay));
  CHECK(!exchanges("--shard hybrid:2", 4, pay));
  CHECK(!exchanges("", 2, !pay));
  CHECK(exchanges("--reduce copy-engine", 4, pay));
  for (const char* options :
       {"--reduce nccl", "--reduce-ctas 8", "--reduce-ctas 0", "--gather nccl", "--optimizer-in-backward 1 --clip 0"})
    CHECK(!exchanges(options, 2, pay));
  says(error_of<UsageError>([&] { reads("--reduce-tail peer --gather nccl", 4, pay); }),
       {"--reduce-tail peer", "copy engines"});
  says(error_of<UsageError>([&] { reads("--reduce-tail peer", 9, pay); }), {"--reduce-tail peer", "there are 9"});
  auto refused = [](const Run& r, Transport transport, bool one_host) {
    return error_of<UsageError>([&] { check_collectives(r, transport, one_host); });
  };
  says(refused(on_gpus("--gather copy-engine", 4), Transport::nccl, !here), {"--gather copy-engine", "hosts"});
  says(refused(on_gpus("--gather nccl", 4), Transport::mpi, here), {"--gather nccl", "GPU per rank"});
  says(refused(on_cpu("--gather copy-engine", 1), Transport::none, here), {"--gather copy-engine", "CPU"});
  says(refused(on_cpu("--graph 1"), Transport::none, here), {"--graph 1", "CPU"});
  says(refused(on_gpus("--graph 1", 4), Transport::mpi, here), {"--graph 1", "MPI"});
  CHECK(refused(on_gpus("--graph 1", 4), Transport::nccl, here).empty());
  CHECK(refused(on_cpu("--gather mpi", 4), Transport::mpi, here).empty());
  // A CPU's ranks are each other's copy engines, wherever they are; who is told to sum what nobody sends is not obeyed.
  CHECK(refused(on_cpu("--reduce copy-engine", 4), Transport::mpi, !here).empty());
  CHECK(on_cpu("--reduce copy-engine", 4).fsdp.reduce_by_copy_engine);
  CHECK(!on_gpus("--reduce nccl", 4).fsdp.reduce_by_copy_engine);
  CHECK(refused(on_gpus("--reduce copy-engine --shard hybrid:2", 4), Transport::nccl, here).empty());
  says(refused(on_gpus("--reduce copy-engine", 4), Transport::nccl, !here), {"--reduce copy-engine", "hosts"});
  says(refused(on_gpus("--reduce copy-engine", 4), Transport::mpi, here), {"--reduce copy-engine", "GPU per rank"});
  says(refused(on_cpu("--reduce nccl", 4), Transport::mpi, here), {"--reduce nccl", "NCCL"});
  says(refused(on_cpu("--reduce-ctas 4", 4), Transport::mpi, here), {"--reduce-ctas 4", "NCCL", "MPI"});
  says(refused(on_gpus("--reduce-ctas 4", 1), Transport::none, here), {"--reduce-ctas 4", "one rank"});
  CHECK(refused(on_cpu("--reduce-ctas 0", 4), Transport::mpi, here).empty());
  for (const char* shard : {"none", "hybrid:1"})
    says(refused(on_gpus(std::string("--reduce copy-engine --shard ") + shard, 4), Transport::nccl, here),
         {"--reduce copy-engine", "--shard", shard});
}

// --------------------------------------------------------------------------------------------------------- resume

TEST_CASE("a resumed run is the checkpoint's where it is told nothing", "[program]") {
  const std::string was_told =
      "--preset class --dim 96 --depth 3 --heads 4 --kv-heads 2 --hidden 64 --vocab 300 --seq 32 --attn dense --lr "
      "0.01 "
      "--warmup 2 --steps 40 --global-batch 6 --grad-accum 2 --beta1 0.5 --clip 3 --seed 7 --freeze head --shard grad "
      "--recompute mlp --data random --val-every 5 --val-batches 9 --tie-embeddings";
  const json state = state_at(on_cpu(was_told, 2), 11);
  CHECK(state.at("step") == 11);
  CHECK(state.at("sequences") == 66);
  CHECK(state.at("commit") == commit());

  Options o = parsed("--device cpu");
  take_up(state, &o);
  const Run r = resolve(o, 3, 0), was = on_cpu(was_told, 2);
  CHECK(r.model.arch == was.model.arch);
  CHECK(r.model.dim == 96);
  CHECK(r.model.depth == 3);
  CHECK(r.model.heads == 4);
  CHECK(r.model.kv_heads == 2);
  CHECK(r.model.hidden == 64);
  CHECK(r.model.vocab == 300);
  CHECK(r.model.seq == 32);
  CHECK(!r.model.sparse);
  CHECK(r.model.tied);
  CHECK(r.o.lr == 0.01);
  CHECK(r.warmup == 2);
  CHECK(r.steps == 40);
  CHECK(r.global_batch == 6);
  CHECK(r.grad_accum == 2);
  CHECK(r.o.beta1 == 0.5);
  CHECK(r.o.clip == 3);
  CHECK(r.o.seed == 7);
  CHECK(r.o.data == "random");
  CHECK(r.o.val_every == 5);
  CHECK(r.o.val_batches == 9);
  CHECK(r.preset == "class");
  // Its own: what is frozen, sharded and kept.
  CHECK(r.model.frozen.empty());
  CHECK(r.fsdp.reshard_after_forward);
  CHECK(r.model.recompute == Recompute::none);

  auto resumed = [&](const std::string& line) {
    Options told = parsed("--device cpu " + line);
    take_up(state, &told);
    return told;
  };
  CHECK(resumed("--lr 0.0003 --seed 8").lr == 0.0003);  // a default, but given
  CHECK(resumed("--lr 0.0003 --seed 8").seed == 8);
  CHECK(resumed("--preset tiny").dim == 0);  // another preset's sizes are its own
  CHECK(resumed("--preset class").dim == 96);
  CHECK(resumed("--preset tiny").lr == 0.01);
  for (const char* said : {"--batch 4", "--grad-accum 3"}) CHECK(resumed(said).global_batch == 6);
  CHECK(resumed("--global-batch 9").global_batch == 9);
  for (const char* said : {"--tokens 1000", "--epochs 2"}) CHECK(resumed(said).steps == 0);
  // The same command on other numbers of ranks: the global batch stays, and no rank computes padding for it.
  struct Cut {
    const char* line;
    int ranks;
    int64_t batch, grad_accum;
  };
  for (const Cut& c :
       {Cut{"--batch 3", 2, 3, 1}, Cut{"--batch 3", 1, 3, 2}, Cut{"--batch 3", 3, 2, 1},
        Cut{"--batch 1 --grad-accum 3", 2, 1, 3}, Cut{"--batch 1 --grad-accum 3", 1, 1, 6}, Cut{"--batch 4", 1, 3, 2},
        Cut{"--grad-accum 4", 1, 2, 4}, Cut{"--batch 8", 6, 1, 1}, Cut{"--batch 2", 4, 2, 1}}) {
    INFO(c.line << " on " << c.ranks);
    const Run cut = resolve(resumed(c.line), c.ranks, 0);
    CHECK(cut.batch == c.batch);
    CHECK(cut.grad_accum == c.grad_accum);
    CHECK(cut.global_batch == 6);
  }
  Options untouched = parsed("--lr 0.5");
  take_up(json(), &untouched);
  CHECK(to_json(untouched) == to_json(parsed("--lr 0.5")));
}

TEST_CASE("tokens count from the first of all, whatever the length of sequences", "[program]") {
  const std::string told = "--preset tiny --global-batch 4 --seq ";
  const auto resumed = [](const SavedState& saved, const std::string& line) {
    return resolve_resumed(saved, parsed("--device cpu " + line), 1, 0);
  };
  SavedState saved;
  saved.state = state_at(on_cpu(told + "32"), 10);  // 1,280 tokens
  CHECK(saved.state.at("trained_tokens") == 1280);
  CHECK(resumed(saved, "--tokens 2560").last_step == 20);
  CHECK(resumed(saved, "--tokens 2561").last_step == 21);
  const Run longer = resumed(saved, "--tokens 2560 --seq 128");  // 512 tokens a step
  CHECK(longer.last_step == 13);
  CHECK(longer.steps == 13);
  CHECK(resumed(saved, "--tokens 1280 --seq 128").last_step == 10);
  CHECK(resumed(saved, "--tokens 5 --seq 128").last_step == 10);
  CHECK(resumed(saved, "--tokens 2560 --seq 128 --steps 100").steps == 100);
  // A run of several lengths that goes on once more.
  saved.state = state_at(longer, 13);
  CHECK(saved.state.at("trained_tokens") == 1280 + 3 * 512);
  CHECK(resumed(saved, "--tokens 3000 --seq 32").last_step == 13 + 2);
  // A checkpoint that does not say.
  saved.state = state_at(on_cpu(told + "32"), 10);
  saved.state.erase("trained_tokens");
  CHECK(resumed(saved, "--tokens 2560 --seq 128").last_step == 13);
}

TEST_CASE("a resumed run rounds as its checkpoint does, unless it is told otherwise", "[program]") {
  SavedState saved;
  saved.step_dir = "run/step-3";
  const auto resumed = [&](const std::string& was, const std::string& line) {
    saved.state = state_at(on_cpu("--preset tiny " + was), 3);
    return resolve_resumed(saved, parsed("--device cpu --resume run " + line), 1, 0);
  };
  const std::string was =
      "--param-dtype bf16 --reduce-dtype fp32 --matmul-dtype fp8 --fp8-scaling row --save-dtype fp8 "
      "--tf32 --moments bf16 --on-nan skip:3 ";
  Run r = resumed(was, "");
  CHECK((r.dtype == Dtype::bf16 && r.reduce_dtype == Dtype::f32));
  CHECK((r.model.fp8 && r.model.save_fp8 && r.model.fp8_scaling == fp8::Scaling::row));
  CHECK((r.o.tf32 && r.fsdp.moment_dtype == Dtype::bf16 && r.nan_skips == 3));
  // What follows from another does so again where that is told otherwise, and only there.
  r = resumed(was, "--param-dtype fp32 --matmul-dtype off --save-dtype off --tf32=false");
  CHECK((r.dtype == Dtype::f32 && r.reduce_dtype == Dtype::f32 && !r.o.tf32));
  CHECK((!r.model.fp8 && !r.model.save_fp8 && r.model.fp8_scaling == fp8::Scaling::tensor));
  compare(saved.state, &r);
  says(r.notices.back(), {"--matmul-dtype \"\" (was \"fp8\")", "--save-dtype", "--tf32 false", "--param-dtype \"fp32\"",
                          "--fp8-scaling"});
  r = resumed(was, "--param-dtype bf16 --matmul-dtype fp8");
  CHECK((r.reduce_dtype == Dtype::f32 && r.model.fp8_scaling == fp8::Scaling::row));
  // --autocast says more of the types than --param-dtype beside it.
  for (const char* line : {"", "--autocast bf16", "--param-dtype fp32 --autocast bf16"}) {
    INFO(line);
    r = resumed("--param-dtype fp32 --autocast bf16 --reduce-dtype bf16", line);
    CHECK((r.fsdp.gather_wide && r.dtype == Dtype::bf16 && r.reduce_dtype == Dtype::bf16));
  }
  for (const char* line : {"--autocast off", "--param-dtype fp32"}) {
    INFO(line);
    r = resumed("--autocast bf16 --reduce-dtype bf16", line);
    CHECK((!r.fsdp.gather_wide && r.dtype == Dtype::f32 && r.reduce_dtype == Dtype::f32));
  }
  CHECK(resumed("--param-dtype bf16 --reduce-dtype bf16", "--autocast bf16").reduce_dtype == Dtype::f32);
  // What the checkpoint brings goes together with what is given, or is refused as the checkpoint's.
  CHECK(resumed("--val-every 1", "--val-data file").o.val_data == "file");
  CHECK(resumed("--clip 0", "--optimizer-in-backward 1").fsdp.update_in_backward);
  const auto refused = [&](const std::string& line) { return error_of<UsageError>([&] { resumed(was, line); }); };
  says(refused("--val-data file"), {"--val-data needs --val-every", "(what is not given is of run/step-3)"});
  says(refused("--recompute both"), {"--save-dtype fp8", "(what is not given is of run/step-3)"});
  // The machine's own choice is another where the machine is.
  saved.state["options"]["device"] = "gpu";
  r = resolve_resumed(saved, parsed("--device cpu --resume run"), 1, 0);
  compare(saved.state, &r);
  says(r.notices.back(), {"parameters in bf16", "made on a GPU", "on a CPU the default is --param-dtype fp32"});
}

TEST_CASE("what contradicts a checkpoint is refused, what differs is said", "[program]") {
  const std::string was = "--preset tiny --seq 64 --global-batch 4 --steps 20 --seed 3 ";
  const json state = state_at(on_cpu(was), 5);
  auto notices = [&](const std::string& line) {
    Run r = on_cpu(line);
    const size_t before = r.notices.size();
    compare(state, &r);
    return Words(r.notices.begin() + int(before), r.notices.end());
  };
  CHECK(notices(was).empty());
  CHECK(notices(was + "--grad-accum 2 --shard grad --recompute both --log-every 7").empty());
  for (const char* end : {"--stop-after 5", "--stop-after 3"})
    CHECK(notices(was + end) ==
          Words{strf("nothing to train: the checkpoint is of step 5, and the run ends after step %c", end[13])});
  CHECK(notices(was + "--stop-after 0").empty());  // which asks for no step
  const Words one = notices(was + "--lr 0.01 --freeze head");
  REQUIRE(one.size() == 1);
  CHECK(one[0] == "differs from the checkpoint: --freeze \"head\" (was \"\"), --lr 0.01 (was 0.0003)");
  // Each option that a resumed run carries over, told otherwise.
  for (const char* told : {"--rope-base 9",
                           "--rope-scaling llama3:8:1:4:8192",
                           "--norm-eps 0.1",
                           "--max-positions 99 --save unused",
                           "--nsa-block 64",
                           "--nsa-stride 8",
                           "--nsa-select-block 128",
                           "--nsa-selected 5",
                           "--nsa-window 9",
                           "--min-lr-ratio 0.3",
                           "--warmup 7",
                           "--beta1 0.5",
                           "--beta2 0.5",
                           "--eps 0.1",
                           "--weight-decay 0",
                           "--clip 9",
                           "--clip-norm 1",
                           "--data random",
                           "--val-every 3",
                           "--param-dtype bf16 --reduce-dtype fp32",
                           "--reduce-dtype bf16",
                           "--autocast bf16 --param-dtype fp32",
                           "--matmul-dtype fp8",
                           "--save-dtype fp8",
                           "--moments bf16",
                           "--on-nan skip"}) {
    INFO(told);
    const Words said = notices(was + told);
    REQUIRE(said.size() == 1);
    says(said[0], {words_of(told)[0] + " ", words_of(told)[1]});
  }
  Options longer = parsed("--device cpu " + was);
  longer.steps = 30, longer.seq = 128;
  Run r = resolve(longer, 1, 0);
  compare(state, &r);
  says(r.notices.back(), {"--steps 30 (was 20)", "--seq 128 (was 64)"});

  // Told before data is opened, and by a plan too.
  SavedState saved;
  saved.state = state;
  auto refused = [&](const std::string& line) {
    return error_of<UsageError>([&] { resolve_resumed(saved, parsed("--device cpu " + line), 1, 0); });
  };
  says(refused("--seed 4"), {"--seed 4", "made with 3"});
  says(refused("--heads 4"), {"--heads 4", "made with 2"});
  says(refused("--kv-heads 2"), {"--kv-heads 2", "made with 1"});
  says(refused("--attn dense"), {"--attn \"dense\"", "made with \"nsa\""});
  says(refused("--arch llama"), {"--arch \"llama\"", "made with \"rope\""});
  says(refused("--depth 3"), {"--depth 3", "made with 2"});
  says(refused("--hidden 64"), {"--hidden 64", "made with "});
  says(refused("--nsa-phi mlp"), {"--nsa-phi \"mlp\""});
  says(refused("--global-batch 5"), {"5", "--global-batch 4"});
  Run fresh = on_cpu("");
  compare(json(), &fresh);
  CHECK(fresh.notices == on_cpu("").notices);
}

// ---------------------------------------------------------------------------------------------------------- plans

TEST_CASE("a plan fits where the chip has room for it and for CUDA", "[program]") {
  Chip chip = *chip_named("h200");
  chip.memory = 10e9;
  CHECK(fits(1e9, chip));
  CHECK(!fits(10e9, chip));
  CHECK(!fits(9.5e9, chip));  // CUDA's and NCCL's own
  CHECK(!fits(11e9, chip));
}

TEST_CASE("a step's price is that of the ranks which share it", "[program]") {
  const Chip& chip = *chip_named("h200");
  const std::string line = "--plan --preset m7c --batch 2";
  const Price one = price(on_gpus(line, 1), 1, chip), eight = price(on_gpus(line, 8), 8, chip),
              validated = price(on_gpus(line + " --val-every 1", 1), 1, chip);
  CHECK(eight.bytes < one.bytes);  // shards of the master weights and moments
  CHECK(one.tokens_per_sec == Approx(2 * 2048 / one.seconds));
  CHECK(validated.bytes == one.bytes);
  CHECK(validated.seconds == one.seconds);                          // a step alone
  CHECK(eight.tokens_per_sec == Approx(2 * 2048 / eight.seconds));  // of a GPU
  says(one.text, {"step"});
}

TEST_CASE("a plan has the scratch of the GPU's own kernels", "[program]") {
  const auto mib = [](const std::string& line, const char* chip) {
    return price(on_gpus(line, 1), 1, *chip_named(chip)).bytes / (1 << 20);
  };
  // Of 2,048 tokens Hopper needs no lists of who selected what, and slots for none; of 8,192 it does.
  const std::string line = "--plan --preset m7c --attn nsa --batch 16 --grad-accum 1 --seq ";
  CHECK(mib(line + "2048", "h100") < mib(line + "2048", "a100") - 200);
  CHECK(mib(line + "2048", "h100") == mib(line + "2048", "h200"));
  CHECK(mib(line + "8192", "h100") == mib(line + "8192", "a100"));
}

namespace {
struct ToldInFull : Estimate {
  using Estimate::Estimate;
  bool can_skip() const override { return false; }
};
}  // namespace

TEST_CASE("micro-batches that are planned once and counted make the plan of them all", "[program]") {
  const Chip& chip = *chip_named("h200");
  World world;
  world.size = world.local_size = 4;
  struct Plan {
    MemoryReport memory;
    double seconds, host, exposed, gathers, reductions, slowed;
    std::string text;
    std::vector<Issued> issued;
  };
  auto plan_with = [&](auto& estimate, const Run& r) {
    Device dev(Backend::gpu, Device::plan_only);
    dev.timeline = &estimate;
    Plan p;
    p.issued = plan(dev, world, Transport::nccl, r);
    p.memory = dev.mem.report(), p.seconds = estimate.step(), p.host = estimate.host();
    p.exposed = estimate.exposed(1) + estimate.exposed(2);
    p.gathers = estimate.talking(Collective::all_gather), p.reductions = estimate.talking(Collective::reduce_scatter);
    p.slowed = estimate.slowed(), p.text = estimate.text(1e6, 1e15);
    return p;
  };
  const char* const models[] = {"--preset tiny", "--preset m7c --wrap sublayer", "--preset tiny --tie-embeddings",
                                "--preset simple --depth 2 --gradient-slots 3", "--preset mlp-1024"};
  const char* const knobs[] = {"",
                               "--recompute block --keep-attention 0",
                               "--keep-cheap 1",
                               "--accum-sync last --reduce-dtype fp32",
                               "--clip 0 --optimizer-in-backward 1 --replicate-below 20000",
                               "--limit-all-gathers 3 --backward-prefetch post",
                               "--shard grad --accum-sync last"};
  for (const char* model : models)
    for (const char* knob : knobs) {
      auto run = [&](int accum) { return on_gpus(strf("%s %s --grad-accum %d", model, knob, accum), 4); };
      INFO(model << " " << knob);
      Estimate counted(chip);
      ToldInFull told(chip);
      const Plan a = plan_with(counted, run(9)), b = plan_with(told, run(9));
      auto same = [](double x, double y) { return std::fabs(x - y) <= 1e-9 * std::fabs(y) + 1e-12; };
      CHECK(same(a.seconds, b.seconds));
      CHECK(same(a.host, b.host));
      CHECK(same(a.exposed, b.exposed));
      CHECK(same(a.gathers, b.gathers));
      CHECK(same(a.reductions, b.reductions));
      CHECK(same(a.slowed, b.slowed));
      CHECK(a.text == b.text);  // of products, collectives and bytes sent, too
      CHECK(a.memory.arena == b.memory.arena);
      CHECK(a.issued.size() < b.issued.size());
      auto sent = [](const std::vector<Issued>& issued) {
        double bytes = 0;
        for (const Issued& i : issued) bytes += double(i.times) * i.sent();
        return bytes;
      };
      CHECK(same(sent(a.issued), sent(b.issued)));
      // As many as there may be ask for no more memory than three.
      Estimate three(chip), most(chip);
      const Plan c = plan_with(three, run(3)), d = plan_with(most, run(65536));
      CHECK(c.memory.arena == d.memory.arena);
      CHECK(c.memory.live_peak == d.memory.live_peak);
      CHECK(d.issued.size() == a.issued.size());
    }
}

TEST_CASE("advice is a change that fits, with options that are there", "[program]") {
  // Each has a knob that costs memory, and a chip that is a little too small.
  const char* cases[] = {"",
                         "--shard grad",
                         "--shard hybrid:2",
                         "--wrap single",
                         "--limit-all-gathers off",
                         "--grad-accum 2 --accum-sync last",
                         "--replicate-below 1000000000",
                         "--autocast bf16",
                         "--reduce-dtype fp32",
                         "--gradient-slots 4",
                         "--keep-cheap 1",
                         "--moments bf16 --clip 0 --optimizer-in-backward 1"};
  const int ranks = 4;
  for (const char* knob : cases) {
    const std::string line = std::string("--plan --device gpu --preset tiny --batch 4 ") + knob;
    INFO(line);
    Chip chip = *chip_named("h200");
    const Price now = price(resolve(parsed(line), ranks, 0), ranks, chip);
    chip.memory += now.bytes - 1 - chip.memory + reserve();
    REQUIRE(!fits(now.bytes, chip));
    const std::string text = advice(parsed(line), ranks, chip), begins = "the cheapest change that fits: ";
    INFO(text);
    REQUIRE(text.rfind(begins, 0) == 0);
    CHECK(std::count(text.begin(), text.end(), '\n') == 1);
    // What it says, done: later options take the place of those that are there.
    Words told = words_of(text.substr(begins.size(), text.find(": ", begins.size()) - begins.size()));
    Words all = words_of(line);
    if (told[0] == "without") {
      told.erase(told.begin());
      const auto at = std::find(all.begin(), all.end(), told[0]);
      all.erase(at, at + 2);
      told.erase(told.begin());
    }
    for (size_t i = 0; i + 1 < told.size(); i += 2) {
      const auto at = std::find(all.begin(), all.end(), told[i]);
      if (at != all.end()) all.erase(at, at + 2);
      all.push_back(told[i]), all.push_back(told[i + 1]);
    }
    std::string changed;
    for (const std::string& word : all) changed += word + " ";
    const Price then = price(resolve(parsed(changed), ranks, 0), ranks, chip);
    CHECK(fits(then.bytes, chip));
    says(text, {grouped(int64_t(then.tokens_per_sec)) + " tokens/s"});
  }
  Chip chip = *chip_named("h200");
  chip.memory = 0;
  says(advice(parsed("--plan --device gpu --preset tiny"), ranks, chip),
       {"no change makes it fit", "--batch or --seq"});
  // Where three changes do not do, more GPUs may.
  const Options alone = parsed("--plan --device gpu --preset tiny --seq 64 --dim 1024 --heads 16");
  Options least = alone;
  least.recompute = "block";
  chip.memory = reserve() + price(resolve(least, 64, 0), 64, chip).bytes;
  says(advice(alone, 1, chip), {"--recompute block on 64 does"});
}

// --------------------------------------------------------------------------------------------------------- tables

TEST_CASE("the table of a plan's memory adds up", "[program]") {
  Device dev(Backend::cpu, Device::plan_only);
  World world;
  world.size = world.local_size = 2;
  plan(dev, world, Transport::mpi, on_cpu("--preset tiny", 2));
  const MemoryReport m = dev.mem.report();
  const std::string text = memory_table(m, 2);
  for (int p = 0; p < purposes; p++)
    CHECK(same(line_with(text, std::string("  ") + name_of(Purpose(p)) + " "),
               strf("%s %.1f %.1f %.1f", name_of(Purpose(p)), mib(m.init[p]), mib(m.before_step[p]), mib(m.peak[p]))));
  CHECK(same(line_with(text, "  sum"),
             strf("sum %.1f %.1f %.1f", mib(m.init_total), mib(m.before_step_total), mib(m.live_peak))));
  says(line_with(text, "arena"), {strf("%.1f", mib(m.arena)), m.peak_phase, m.largest});
  says(text, {"rank of 2"});
}

TEST_CASE("the tables of units and parameters", "[program]") {
  const Run r = on_gpus("--preset tiny --depth 3 --freeze head.norm --replicate-below 1000", 4);
  const std::string params = parameters_text(r, 4), units = units_text(r, 4);
  int64_t total = 0;
  for (const Unit& u : parameter_table(r.model)) {
    says(params, {"unit " + u.name});
    for (const Param& p : u.params) {
      const std::string line = line_with(params, p.name + " ");
      says(line, {grouped(p.numel), p.frozen ? "frozen" : p.decay ? " yes" : " no"});
      total += p.numel;
    }
  }
  says(params, {grouped(total) + " parameters", "256 x 128", "shard of each of 4 ranks", "normal(0, "});
  CHECK(same(line_with(params, "unit replicated"), "unit replicated 920 replicated on every rank"));
  says(parameters_text(on_cpu(""), 1), {"unsharded"});
  says(line_with(units, "block.0 to block.2"), {"3 x"});
  CHECK(line_with(units, "block.1 ").empty());
}

TEST_CASE("a schedule's events add up to what a rank sends", "[program]") {
  Device dev(Backend::gpu, Device::plan_only);
  World world;
  world.size = world.local_size = 4;
  const Run r = on_gpus("--preset tiny --grad-accum 2", 4);
  const std::vector<Issued> issued = plan(dev, world, Transport::nccl, r);
  const std::string text = schedule_text(issued, r.model, 4);
  CHECK(std::count(text.begin(), text.end(), '\n') == int64_t(issued.size()) + 2);
  double gathers = 0, reductions = 0;
  for (const Issued& e : issued) (e.kind == Issued::all_gather ? gathers : reductions) += e.sent() / (1 << 20);
  says(text,
       {strf("each of 4 ranks sends and receives %.1f MiB in gathers and %.1f MiB in reductions", gathers, reductions),
        "all_gather          block.0", "bf16, 4 ranks", "embedding", "optimizer"});
  CHECK(gathers > 0);

  auto choices = [](const std::string& options, Transport t) { return choices_text(on_gpus(options, 4), t); };
  says(choices("", Transport::nccl), {"NCCL's kernels", "into 2 slots;", "2 gradient slots", "moments in fp32",
                                      "clipping by the norm 2", "initialized sharded", "one by one"});
  says(choices("--preset tiny", Transport::nccl), {"reductions by NCCL's kernels of at most 4 thread blocks;"});
  says(choices("--preset rope", Transport::nccl), {"reductions by NCCL's kernels;"});
  says(choices("--preset class --attn dense", Transport::nccl),
       {"NCCL's kernels of at most 16 thread blocks, 4 up to 16 MiB;"});
  says(choices("--preset class --attn dense --reduce copy-engine", Transport::nccl),
       {"all-to-all and a sum in rank order;"});
  says(choices("--preset class --attn dense --reduce-ctas 7", Transport::nccl),
       {"NCCL's kernels of at most 7 thread blocks;"});
  says(choices("--preset rope --reduce-ctas 7", Transport::nccl), {"NCCL's kernels of at most 7 thread blocks;"});
  says(choices("--preset tiny --reduce-ctas 0", Transport::nccl), {"reductions by NCCL's kernels;"});
  says(choices_text(on_gpus("", 1), Transport::none), {"one rank gathers nothing; "});
  says(choices("--limit-all-gathers 1 --gradient-slots 1", Transport::nccl), {"into 1 slot;", "1 gradient slot;"});
  says(choices("--shard grad --clip 0 --graph 1", Transport::nccl),
       {"a slot for each unit", "no clipping", "CUDA graph"});
  says(choices("--meta-init 0 --moments bf16", Transport::mpi), {"by MPI", "unsharded, then", "moments in bf16"});
}

TEST_CASE("what a run says first, and what its log says first", "[program]") {
  Device dev(Backend::cpu, 0);
  World world;
  world.size = world.local_size = 2;
  Run r = on_cpu("--preset tiny --grad-accum 2 --limit-all-gathers 3", 2);
  plan(dev, world, Transport::mpi, r);
  r.notices = {"first", "second"};
  const std::string text = opening_text(r, dev, world, Transport::mpi, "a file", 12.34);
  CHECK(text.rfind("note: first\nnote: second\nrope with NSA, ", 0) == 0);
  says(text,
       {"2 ranks of " + dev.name, "fp32, gradients in fp32",
        "data: a file; 2,048 tokens a step (4 x 512 accumulated), 32 steps", "arena", "estimated: 12.3 ms a step"});
  CHECK(opening_text(r, dev, world, Transport::mpi, "a file", -1).find("estimated") == std::string::npos);

  const json h = header(r, dev, world, Transport::mpi, 0, -1, "a command");
  CHECK(h.at("command") == "a command");
  CHECK(h.at("commit") == commit());
  CHECK(h.at("estimated_ms").is_null());
  CHECK(header(r, dev, world, Transport::mpi, 0, 5, "").at("estimated_ms") == 5);
  CHECK(h.at("hardware").at("ranks") == 2);
  CHECK(h.at("hardware").at("name") == dev.name);
  CHECK(h.at("hardware").at("host").at("cores") == cores());
  CHECK(h.at("hardware").at("host").at("cpu") == dev.name);
  CHECK(h.at("versions") == versions_json());
  for (const char* library : {"cuda", "cuda_driver", "cublas", "nccl", "mpi"}) {
    const json& version = h.at("versions").at(library);
    INFO(library);
    // --version tells the same, but for the driver's.
    const bool known = version.is_string() && !version.get<std::string>().empty();
    CHECK((known || version.is_null()));
    if (known && library != std::string("cuda_driver"))
      CHECK(versions().find(version.get<std::string>()) != std::string::npos);
  }
  CHECK(h.at("versions").at("mpi").is_string());
  CHECK(h.at("memory").at("planned_peak_mib").get<double>() == mib(dev.mem.report().arena));
  const json& c = h.at("config");  // every option, resolved
  const json all = to_json(Options());
  for (const auto& [key, value] : all.items()) CHECK(c.count(key) == 1);
  CHECK(c.at("preset") == "tiny");
  CHECK(c.at("arch") == "rope");
  CHECK(c.at("attn") == "nsa");
  CHECK(c.at("dim") == 128);
  CHECK(c.at("batch") == 1);
  CHECK(c.at("grad_accum") == 2);
  CHECK(c.at("global_batch") == 4);
  CHECK(c.at("steps") == 32);
  CHECK(c.at("warmup") == 3);
  CHECK(c.at("param_dtype") == "fp32");
  CHECK(c.at("device") == "cpu");
  CHECK(c.at("limit_all_gathers") == 3);
  CHECK(c.at("parameters") == parameter_count(r.model));
  CHECK(settings(on_cpu("--attn dense")).at("attn") == "dense");
  CHECK(settings(on_cpu("--preset mlp-1024")).at("attn") == "");
}

TEST_CASE("one line says how a model is sharded, in two languages", "[program]") {
  auto line = [](const std::string& options, int ranks) { return fsdp_text(on_gpus(options, ranks), ranks); };
  const std::string plain = line("", 4);
  CHECK(std::count(plain.begin(), plain.end(), '\n') == 1);
  says(plain, {"shard full over 4 of 4 ranks", "wrap block", "limit-all-gathers 2", "reshard-after-forward 1",
               "forward-prefetch 1", "backward-prefetch pre", "gathered in bf16, reduced in bf16", "FULL_SHARD",
               "transformer_auto_wrap_policy", "limit_all_gathers=True", "forward_prefetch=True",
               "backward_prefetch=BACKWARD_PRE", "MixedPrecision(param_dtype=bfloat16, reduce_dtype=bfloat16)"});
  says(line("--shard grad --reduce-dtype fp32", 4),
       {"limit-all-gathers off", "reshard-after-forward 0", "SHARD_GRAD_OP", "limit_all_gathers=False",
        "reduce_dtype=float32)"});
  says(line("--shard none", 4), {"over 1 of 4 ranks", "NO_SHARD"});
  says(line("--shard hybrid:2 --wrap sublayer --backward-prefetch post", 4),
       {"over 2 of 4 ranks", " HYBRID_SHARD,", "attention and MLP", "BACKWARD_POST"});
  says(line("--shard hybrid:2 --reshard-after-forward 0", 4), {"_HYBRID_SHARD_ZERO2"});
  says(line("--limit-all-gathers off --preset tiny --wrap single", 4),
       {"limit-all-gathers off", "limit_all_gathers=False", "no auto_wrap_policy"});
  says(line("--forward-prefetch 0 --backward-prefetch none --wrap auto --wrap-min-params 77", 2),
       {"forward_prefetch=False", "backward_prefetch=None", "min_num_params=77"});
  says(line("--autocast bf16 --accum-sync last --moments bf16", 2),
       {"bf16 moments", "gathered in fp32, reduced in fp32", "autocast(bfloat16), no_sync()"});
}

TEST_CASE("diagnostics of blocks in the log", "[program]") {
  NsaSums sums[2];
  NsaMaxima maxima[2];
  for (NsaSums& s : sums) s.gates = 8, s.rows = 4;
  sums[0].entropy = 4, sums[1].share[2] = 2, maxima[1].keys = 9;
  std::vector<NsaKernels> kernels(2);
  kernels[1].calls = 26;
  const json j = stats_json(sums, maxima, kernels).at("nsa");
  REQUIRE(j.size() == 2);
  CHECK(j[0].at("gate_entropy_mean") == 0.5);
  CHECK(j[1].at("sel_k_max") == 9);
  CHECK(j[1].at("branch_shares")[2] == 0.25);
  CHECK(j[1].at("kernel_calls") == 26);
  CHECK(j[0].at("kernels").empty());
}
