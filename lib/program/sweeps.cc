#include "lib/program/sweeps.h"

#include <algorithm>

#include "lib/program/plan.h"
#include "lib/program/process.h"
#include "lib/program/sweep_plan.h"

namespace {

using nlohmann::json;
using Rows = std::vector<SweepRow>;
using Labels = std::vector<std::pair<std::string, std::string>>;
using Values = std::vector<int64_t>;

const char* const a100s = "2 x A100 SXM";

std::string text(int64_t n) { return std::to_string(n); }

// A preset of ./train with these options besides; on a CPU its shape is made small, so that a row takes a second.
enum class Tokens { random, built_in };  // random ones teach nothing, and the loss says nothing
Words shape(const SweepMachine& m, const std::string& preset, const std::string& options = "",
            Tokens tokens = Tokens::random) {
  Words words = {"--preset", preset};
  if (tokens == Tokens::random) set_options({"--data", "random"}, &words);
  if (preset.rfind("mlp", 0) != 0) set_options({"--attn", "dense"}, &words);
  if (!m.gpu)
    set_options(words_of("--dim 64 --depth 2 --heads 2 --kv-heads 1 --hidden 256 --vocab 256 --seq 128 --batch 2"),
                &words);
  set_options(words_of(options), &words);
  return words;
}
Values pick(const SweepMachine& m, const Values& on_gpu, const Values& on_cpu) { return m.gpu ? on_gpu : on_cpu; }
std::string if_gpu(const SweepMachine& m, const char* options) { return m.gpu ? options : ""; }

// PyTorch runs the first, the middle and the last of a sweep's values: it compiles each anew.
void add_peers_at_ends(Rows* rows, const Words& options = {}) {
  if (rows->empty()) return;
  for (size_t i : {size_t(0), rows->size() / 2, rows->size() - 1})
    if ((*rows)[i].peers.empty()) (*rows)[i].peers = {{"", options}};
}

json peak_and_ms(double mib, double ms) { return {{"peak_mib", mib}, {"step_ms", ms}}; }
json stages(double init, double before, double peak, double ms) {
  json j = peak_and_ms(peak, ms);
  if (init >= 0) j["init_mib"] = init;
  if (before >= 0) j["before_step_mib"] = before;
  return j;
}
json words(const char* what) { return {{"text", what}}; }

struct Theirs {
  int64_t value;
  json figures;
};
json of(const std::vector<Theirs>& all, int64_t value) {
  for (const Theirs& t : all)
    if (t.value == value) return t.figures;
  return nullptr;
}

// ------------------------------------------------------------------------------------------- simple_pytorch: the MLPs

// In theirs ac_mode="full" leaves out the checkpoint that gathers a block's weights again for the backward pass.
const char full_mode[] = "theirs keeps the gathered weights: ours is --reshard-after-forward 0";
const char compile_model[] = "theirs compiles: ours fuses epilogues and residuals with norms";
const char compile_step[] = "theirs compiles the step: ours chooses the matmuls' kernels by timing them";
const char compile_both[] = "theirs compiles forward and backward: ours replays a step as one CUDA graph";

Rows mlp_1024(const SweepMachine& m) {
  const char* const p = "mlp-1024";
  const std::string plain = " --fuse 0 --tune-matmul 0", fused = " --fuse 1 --tune-matmul 0", tuned = "",
                    graph = if_gpu(m, " --graph 1"), fp32 = "--param-dtype fp32";
  const auto peer = [](const char* options) { return std::vector<Peer>{{"", words_of(options)}}; };
  Rows rows;
  const auto add = [&](const char* name, int64_t ranks, const std::string& options, const char* compile, json theirs,
                       const char* note = "") {
    SweepRow r{name, {{"what", name}}, shape(m, p, options), ranks};
    r.peers = peer(compile), r.theirs = std::move(theirs), r.note = note;
    rows.push_back(std::move(r));
  };
  add("nothing", 1, fp32 + plain, "--compile none", stages(348, -1, 5985, 340));
  add("+autocast(bf16)", 1, fp32 + " --autocast bf16" + plain, "--compile none", stages(348, -1, 2211, 63));
  add("+data_parallel", 0, fp32 + plain, "--compile none", stages(348, 432, 5513, 844));
  add("+compile(model)", 0, fp32 + fused, "--compile model", stages(348, 432, 3347, 1018), compile_model);
  add("+ac_mode=full", 0, fp32 + fused + " --reshard-after-forward 0", "--compile model", stages(348, 432, 3347, 850),
      full_mode);
  add("+compile(step_fn)", 0, fp32 + tuned, "--compile block", stages(348, 432, 2638, 825), compile_step);
  add("+compile(_fwd)+compile(_bwd)", 0, fp32 + graph, "--compile fwdbwd", stages(348, 432, 2638, 780), compile_both);
  add("+param=fp32,reduce=bf16", 0, fp32 + " --reduce-dtype bf16" + graph, "--compile fwdbwd",
      stages(348, 432, 2638, 651));
  add("+param=bf16,reduce=fp32", 0, "--param-dtype bf16 --reduce-dtype fp32" + graph, "--compile fwdbwd",
      stages(348, 432, 1502, 429));
  add("+param=bf16,reduce=bf16", 0, "--param-dtype bf16 --reduce-dtype bf16" + graph, "--compile fwdbwd",
      stages(348, 432, 1502, 294));
  return rows;
}

Rows mlp_4096(const SweepMachine& m) {
  const char* const p = "mlp-4096";
  const std::string plain = " --fuse 0 --tune-matmul 0", graph = if_gpu(m, " --graph 1"), fp32 = "--param-dtype fp32",
                    bf16 = "--param-dtype bf16 --reduce-dtype bf16";
  Rows rows;
  const auto add = [&](const char* name, int64_t ranks, const std::string& options, const char* compile, json theirs,
                       const char* note = "") {
    SweepRow r{name, {{"what", name}}, shape(m, p, options), ranks};
    r.peers = {{"", words_of(compile)}}, r.theirs = std::move(theirs), r.note = note;
    rows.push_back(std::move(r));
  };
  add("nothing", 1, fp32 + plain, "--compile none", stages(3072, -1, 40977, 7020));
  add("autocast (bf16)", 1, fp32 + " --autocast bf16" + plain, "--compile none", stages(3072, -1, 30737, 600));
  add("compile (_fwd + _bwd)", 1, fp32 + graph, "--compile fwdbwd", stages(3072, -1, 33297, 6978), compile_both);
  add("both", 1, fp32 + " --autocast bf16" + graph, "--compile fwdbwd", stages(3072, -1, 22801, 565), compile_both);
  add("data_parallel", 0, fp32 + plain, "--compile none", stages(3072, 3200, 36625, 7169));
  add("+compile(2x)", 0, fp32 + graph, "--compile fwdbwd", stages(3072, 3200, 26896, 7141), compile_both);
  add("+ac_mode=full + compile(2x)", 0, fp32 + " --reshard-after-forward 0" + graph, "--compile fwdbwd",
      stages(3072, 3200, 28944, 7118), full_mode);
  add("+param=fp32,reduce=bf16", 0, fp32 + " --reduce-dtype bf16" + graph, "--compile fwdbwd", nullptr);
  add("+param=bf16,reduce=fp32", 0, "--param-dtype bf16 --reduce-dtype fp32" + graph, "--compile fwdbwd", nullptr);
  add("+param=bf16,reduce=bf16", 0, bf16 + graph, "--compile fwdbwd", stages(3072, 3200, 15633, 566));
  add("+compile(model, options)", 0, bf16 + graph, "--compile model --compile-mode max-autotune-no-cudagraphs",
      stages(3072, 3200, 8448, 590), "theirs turns every option on; ours: fused, tuned, one graph");
  add("+compile(model)", 0, bf16, "--compile model", stages(3072, 3200, 19473, 575), "ours: fused and tuned, no graph");
  return rows;
}

// Each of the compiler's options, and what stands for it here.
Rows compile_options(const SweepMachine& m) {
  Rows rows;
  const auto add = [&](const char* name, const std::string& options, json theirs, const char* note,
                       std::vector<Peer> peers = {}) {
    SweepRow r{name, {{"what", name}}, shape(m, "mlp-4096", "--param-dtype bf16 --reduce-dtype bf16 " + options)};
    r.theirs = std::move(theirs), r.note = note, r.peers = std::move(peers);
    rows.push_back(std::move(r));
  };
  add("no option", "--fuse 0 --tune-matmul 0", peak_and_ms(19473, 575), "", {{"", {"--compile", "model"}}});
  add("epifusion", "--fuse 1 --tune-matmul 0", peak_and_ms(19473, 569), "--fuse 1");
  add("shape-padding", m.gpu ? "--fuse 0 --tune-matmul 0 --vocab 32776" : "--fuse 0 --tune-matmul 0 --vocab 264",
      peak_and_ms(19473, 568),
      "nothing to pad at a vocabulary of 32,768; ours shows what 8 more words cost, 32,776 being no multiple of 64");
  add("autotune", "--fuse 0 --tune-matmul 1", peak_and_ms(19473, 590), "--tune-matmul 1",
      {{"", {"--compile", "model", "--compile-mode", "max-autotune-no-cudagraphs"}}});
  add("cudagraph", "--fuse 0 --tune-matmul 0" + if_gpu(m, " --graph 1"), peak_and_ms(8448, 572), "--graph 1");
  add("cg+epi+pad", "--fuse 1 --tune-matmul 0" + if_gpu(m, " --graph 1"), peak_and_ms(8448, 573), "--fuse 1 --graph 1");
  add("all", "--fuse 1 --tune-matmul 1" + if_gpu(m, " --graph 1"), nullptr, "--fuse 1 --tune-matmul 1 --graph 1");
  return rows;
}

Rows meta_init(const SweepMachine& m) {
  Rows rows;
  SweepRow without{"without", {{"meta init", "without"}}, shape(m, "mlp-4096", "--meta-init 0")};
  without.theirs = stages(3072, 3200, 15633, 559), without.peers = {{"", {"--compile", "fwdbwd", "--meta-init", "0"}}};
  SweepRow with{"with", {{"meta init", "with"}}, shape(m, "mlp-4096", "--meta-init 1")};
  with.theirs = stages(768, 1088, 15633, 496), with.peers = {{"", {"--compile", "fwdbwd", "--meta-init", "1"}}};
  rows = {without, with};
  return rows;
}

// ------------------------------------------------------------------------------------ simple_pytorch: the transformer

Rows recompute(const SweepMachine& m) {
  struct Of {
    const char *mode, *keep;
    json theirs;
  };
  const std::vector<Of> all = {{"none", "0", peak_and_ms(26661, 974)},
                               {"mlp", "0", peak_and_ms(17446, 1055)},
                               {"attn", "0", peak_and_ms(23765, 1018)},
                               {"attn", "1", nullptr},
                               {"both", "0", peak_and_ms(14550, 1088)},
                               {"both", "1", nullptr},
                               {"block", "0", words("OOM")},
                               {"block", "1", nullptr}};
  Rows rows;
  for (const Of& a : all) {
    const bool keep = *a.keep == '1';
    const std::string options = std::string("--recompute ") + a.mode + (keep ? " --keep-attention 1" : "");
    SweepRow r{std::string(a.mode) + (keep ? ", attention kept" : ""),
               {{"recomputed", a.mode}, {"attention's output", keep ? "kept" : "-"}},
               shape(m, "simple", options)};
    r.theirs = a.theirs, r.peers = {{"", {}}};
    if (keep) r.no_peer = "", r.peers = {{"", {"--keep-attention", "1"}}};
    rows.push_back(std::move(r));
  }
  return rows;
}

// One option of ./train over its values, recomputing both halves of a block as theirs.
Rows over(const SweepMachine& m, const char* label, const Values& values, const std::vector<Theirs>& theirs,
          std::string (*options)(const SweepMachine&, int64_t)) {
  Rows rows;
  for (int64_t v : values) {
    SweepRow r{text(v), {{label, text(v)}}, shape(m, "simple", "--recompute both " + options(m, v))};
    if (m.gpu) r.theirs = of(theirs, v);
    rows.push_back(std::move(r));
  }
  add_peers_at_ends(&rows);
  return rows;
}

Rows seq(const SweepMachine& m) {
  return over(m, "seq", pick(m, {512, 1024, 2048, 4096, 8192, 16384, 32768}, {64, 128, 256}),
              {{512, peak_and_ms(7827, 142)},
               {1024, peak_and_ms(8323, 252)},
               {2048, peak_and_ms(10196, 500)},
               {4096, peak_and_ms(14550, 1119)},
               {8192, peak_and_ms(23257, 2722)},
               {16384, peak_and_ms(40672, 7631)},
               {32768, words("OOM bwd")}},
              [](const SweepMachine&, int64_t v) { return "--seq " + text(v); });
}

Rows depth(const SweepMachine& m) {
  return over(m, "depth", pick(m, {2, 4, 6, 8, 12, 16, 24, 32}, {1, 2, 4, 8}),
              {{2, peak_and_ms(10484, 615)},
               {4, peak_and_ms(14550, 1119)},
               {6, peak_and_ms(18615, 1600)},
               {8, peak_and_ms(22681, 2104)},
               {12, peak_and_ms(30812, 3107)},
               {16, peak_and_ms(38943, 4085)},
               {24, peak_and_ms(55205, 6053)},
               {32, peak_and_ms(71467, 8034)}},
              [](const SweepMachine&, int64_t v) { return "--depth " + text(v); });
}

// Heads of 128 in groups of four, as in the reference shape; on a CPU heads of 32 in pairs.
std::string width_options(const SweepMachine& m, int64_t dim) {
  const int64_t heads = std::max<int64_t>(1, dim / (m.gpu ? 128 : 32)), group = m.gpu ? 4 : 2;
  const int64_t kv = heads % group ? heads : std::max<int64_t>(1, heads / group);
  return "--dim " + text(dim) + " --hidden " + text(4 * dim) + " --heads " + text(heads) + " --kv-heads " + text(kv);
}

Rows width(const SweepMachine& m) {
  Rows rows = over(m, "width", pick(m, {768, 1024, 2048, 4096, 6144, 8192, 12288, 16384}, {64, 128, 256}),
                   {{768, words("badshape")},
                    {1024, peak_and_ms(5968, 177)},
                    {2048, peak_and_ms(8325, 400)},
                    {4096, peak_and_ms(14550, 1119)},
                    {6144, peak_and_ms(23782, 2130)},
                    {8192, peak_and_ms(36118, 3501)},
                    {12288, peak_and_ms(67415, 7230)},
                    {16384, words("OOM bwd")}},
                   width_options);
  if (m.gpu) rows[0].note = "6 heads of 128 make no groups of four: ours has 6 key heads";
  return rows;
}

// How many ranks theirs had; more than this machine's GPUs come from the plan.
Rows ranks_rows(const SweepMachine& m, const Values& ranks, const std::vector<Theirs>& theirs,
                std::string (*options)(int64_t)) {
  Rows rows;
  for (int64_t w : ranks) {
    SweepRow r{text(w), {{"GPUs", text(w)}}, shape(m, "simple", "--recompute both " + options(w)), w};
    if (m.gpu) r.theirs = of(theirs, w);
    if (!m.gpu || w <= m.ranks) r.peers = {{"", {}}};
    rows.push_back(std::move(r));
  }
  return rows;
}

Rows world(const SweepMachine& m) {
  return ranks_rows(m, pick(m, {1, 2, 3, 4, 6, 8}, {1, 2, 3, 4}),
                    {{1, peak_and_ms(20119, 1105)},
                     {2, peak_and_ms(14550, 1119)},
                     {3, peak_and_ms(12705, 1115)},
                     {4, peak_and_ms(11765, 1116)},
                     {6, peak_and_ms(10839, 1119)},
                     {8, peak_and_ms(10373, 1114)}},
                    [](int64_t) { return std::string(); });
}

Rows global_batch(const SweepMachine& m) {
  Rows rows;
  const std::vector<Theirs> theirs = {{1, words("OOM bwd")},
                                      {2, peak_and_ms(40670, 4352)},
                                      {4, peak_and_ms(20472, 2196)},
                                      {8, peak_and_ms(10373, 1114)}};
  const int64_t sequences = m.gpu ? 64 : 8;
  for (int64_t w : pick(m, {1, 2, 4, 8}, {1, 2, 4})) {
    SweepRow r{text(w),
               {{"GPUs", text(w)}, {"batch a GPU", text(sequences / w)}},
               shape(m, "simple", "--recompute both --batch " + text(sequences / w)),
               w};
    if (m.gpu) r.theirs = of(theirs, w);
    if (!m.gpu || w <= m.ranks) r.peers = {{"", {}}};
    rows.push_back(std::move(r));
  }
  return rows;
}

// Parameters below 1 MiB replicated or sharded, as theirs; NCCL_P2P_DISABLE=1 sends all bytes through host memory,
// which is the bad interconnect that can be had here.
Rows small_params(const SweepMachine& m) {
  struct Shape {
    const char *name, *options;
    json good[2], bad[2];  // theirs: replicated, sharded
  };
  const std::vector<Shape> shapes = {
      {"depth 4", "--depth 4", {nullptr, nullptr}, {peak_and_ms(10375, 4823), peak_and_ms(10373, 4608)}},
      {"depth 8", "--depth 8", {peak_and_ms(17882, 2091), peak_and_ms(17880, 2096)}, {nullptr, nullptr}},
      {"depth 32, seq 128",
       m.gpu ? "--depth 32 --seq 128" : "--depth 8 --seq 64",
       {peak_and_ms(22884, 552), peak_and_ms(22871, 565)},
       {peak_and_ms(11672, 20695), peak_and_ms(11656, 18084)}}};
  Rows rows;
  for (bool bad : {false, true})
    for (const Shape& s : shapes)
      for (bool shards : {false, true}) {
        const char* const what = shards ? "sharded" : "replicated";
        const char* const link = bad ? "through host memory" : "NVLink";
        SweepRow r{std::string(s.name) + ", " + link + ", " + what,
                   {{"shape", s.name}, {"interconnect", link}, {"small ones", what}},
                   shape(m, "simple",
                         std::string("--recompute both ") + s.options + " --replicate-below " +
                             (shards  ? "0"
                              : m.gpu ? "1048576"
                                      : "1024"))};
        if (m.gpu) r.theirs = (bad ? s.bad : s.good)[shards ? 1 : 0];
        if (bad) r.environment = {{"NCCL_P2P_DISABLE", "1"}}, set_options({"--gather", "nccl"}, &r.options);
        if (bad && !m.gpu) r.environment.clear(), set_options({"--gather", "mpi"}, &r.options);
        rows.push_back(std::move(r));
      }
  return rows;
}

Rows mfu(const SweepMachine& m) {
  struct Of {
    const char *name, *seq, *depth, *remat, *gqa, *options;
    double flex, sdpa;  // theirs, %
  };
  const std::vector<Of> all = {
      {"4096, 4, yes, 4", "4096", "4", "yes", "4", "--recompute both", 26.0, 30.5},
      {"4096, 8, yes, 4", "4096", "8", "yes", "4", "--recompute both --depth 8", 23.7, 28.8},
      {"4096, 4, no, 4", "4096", "4", "no", "4", "", 29.5, 35.3},
      {"512, 4, yes, 4", "512", "4", "yes", "4", "--recompute both --seq 512", 20.0, 20.8},
      {"4096, 4, yes, 1", "4096", "4", "yes", "1", "--recompute both --kv-heads 32", 24.3, 28.0},
  };
  Rows rows;
  for (const char* attn : {"dense", "nsa"})
    for (const Of& a : all) {
      const std::string small = m.gpu ? a.options : words_of(a.options).empty() ? "" : "--recompute both";
      SweepRow r{std::string(attn) + ", " + a.name,
                 {{"attention", attn}, {"seq", a.seq}, {"depth", a.depth}, {"remat", a.remat}, {"gqa", a.gqa}},
                 shape(m, "simple", small)};
      set_options({"--attn", attn}, &r.options);
      if (std::string(attn) == "dense") {
        r.theirs = {{"mfu", a.sdpa / 100}, {"mfu_flex", a.flex / 100}};
        r.peers = {{"sdpa", {}}, {"flex", {"--attn", "flex"}}};
      } else {
        r.no_peer = "PyTorch has no NSA";
      }
      rows.push_back(std::move(r));
    }
  const char* const replicate[] = {"full", "none"};
  for (const char* shard : replicate) {
    SweepRow r{std::string("no recomputation, --shard ") + shard,
               {{"attention", "dense"}, {"seq", "4096"}, {"depth", "4"}, {"remat", "yes"}, {"gqa", "4"}},
               shape(m, "simple", std::string("--recompute both --shard ") + shard)};
    r.name = std::string("mode=") + (*shard == 'f' ? "fully_shard" : "replicate");
    r.labels[0].second = std::string("dense, ") + r.name;
    r.theirs = *shard == 'f' ? json{{"mfu", 0.305}, {"mfu_flex", 0.26}} : json{{"mfu", 0.304}, {"mfu_flex", 0.258}};
    r.peers = {{"sdpa", {}}};
    rows.push_back(std::move(r));
  }
  for (int64_t w : pick(m, {1, 2, 4}, {1, 2})) {
    SweepRow r{
        "GPUs " + text(w),
        {{"attention", "dense, " + text(w) + " GPUs"}, {"seq", "4096"}, {"depth", "4"}, {"remat", "yes"}, {"gqa", "4"}},
        shape(m, "simple", "--recompute both"),
        w};
    r.theirs = {{"mfu_flex", w == 1 ? 0.262 : w == 2 ? 0.259 : 0.26}};
    if (w == 1) r.peers = {{"sdpa", {}}, {"flex", {"--attn", "flex"}}};
    rows.push_back(std::move(r));
  }
  return rows;
}

// ------------------------------------------------------------------------------------------------- the comm sweep, 47
// B

struct Comm {
  const char* wrap;
  const char* bucket;  // "-": this wrapping has none
  bool reshard, limit;
  const char* gather;
};

std::string comm_options(const Comm& c) {
  std::string options = std::string("--wrap ") + c.wrap + (c.reshard ? "" : " --reshard-after-forward 0");
  // Modules of this model are 288 MiB and more: any number of them may be merged, up to the bucket.
  if (*c.bucket != '-') options += std::string(" --wrap-min-params 1000000000 --bucket-mb ") + c.bucket;
  return options + (c.reshard ? c.limit ? " --limit-all-gathers 2" : " --limit-all-gathers off" : "");
}

std::vector<Comm> comm_matrix(const SweepMachine& m) {
  std::vector<Comm> all;
  std::vector<std::pair<const char*, const char*>> wraps = {{"block", "-"}, {"single", "-"}};
  for (const char* b : {"0", "25", "50", "100", "200"}) wraps.emplace_back("auto", b);
  for (const auto& w : wraps)
    for (const char* gather : {"copy-engine", "nccl"}) {
      if (!m.gpu && *gather == 'c') continue;
      all.push_back({w.first, w.second, true, true, gather});
      all.push_back({w.first, w.second, true, false, gather});
      all.push_back({w.first, w.second, false, true, gather});  // nothing is gathered twice: no limit to set
    }
  return all;
}

Rows comm(const SweepMachine& m) {
  const std::vector<Comm> matrix = comm_matrix(m);
  // All rows at one depth: the largest at which each of them fits.
  const auto options_at = [&](const Comm& c, int64_t depth) {
    Words o = shape(m, "llama-47b", comm_options(c));
    if (m.gpu) set_options({"--depth", text(depth), "--gather", c.gather}, &o);
    return o;
  };
  const auto all_fit = [&](int64_t depth) {
    return std::all_of(matrix.begin(), matrix.end(),
                       [&](const Comm& c) { return fits_on(options_at(c, depth), m.ranks, m.chip); });
  };
  int64_t depth = 2;
  if (m.gpu)
    for (depth = 54; depth > 1 && !all_fit(depth);) depth--;
  Rows rows;
  for (const Comm& c : matrix) {
    const char *const reshard = c.reshard ? "1" : "0", *const limit = !c.reshard ? "-" : c.limit ? "2" : "off";
    SweepRow r{
        std::string(c.wrap) + " " + c.bucket + " " + reshard + " " + limit + " " + c.gather,
        {{"wrap", c.wrap}, {"bucket MiB", c.bucket}, {"reshard", reshard}, {"limit", limit}, {"gather", c.gather}},
        options_at(c, depth)};
    r.note = "depth " + text(depth) + " of 54";
    const bool first_of_wrap = c.limit && std::string(c.gather) != "nccl" && (*c.bucket == '-' || *c.bucket == '0');
    if (first_of_wrap && *c.wrap != 'a') r.peers = {{"", {}}};
    if (*c.wrap == 'a') r.no_peer = "FSDP2 wraps what it is given: there is no wrapping by size and no bucket";
    rows.push_back(std::move(r));
  }
  if (!m.gpu) return rows;
  struct Whole {
    const char *name, *reshard, *limit, *gather, *options;
  };
  for (const Whole& w : {Whole{"reshard 1", "1", "2", "copy-engine", ""},
                         Whole{"reshard 0", "0", "-", "copy-engine", "--reshard-after-forward 0"},
                         Whole{"reshard 1, nccl", "1", "2", "nccl", "--gather nccl"},
                         Whole{"reshard 1, batch 2", "1", "2", "copy-engine", "--batch 2"}}) {
    SweepRow r{
        std::string("whole, 8 GPUs, ") + w.name,
        {{"wrap", "block"}, {"bucket MiB", "-"}, {"reshard", w.reshard}, {"limit", w.limit}, {"gather", w.gather}},
        shape(m, "llama-47b", w.options),
        8};
    r.note = std::string("all 54 blocks on 8 GPUs") + (std::string(w.options) == "--batch 2" ? ", batch 2" : "");
    rows.push_back(std::move(r));
  }
  return rows;
}

// ---------------------------------------------------------------------------------------------- the NSA report's
// phases

Rows nsa_fsdp(const SweepMachine& m) {
  const auto theirs = [](const char* utilization, double gib) {
    json j = {{"first_step_text", "> 300 s"}, {"utilization_text", utilization}, {"tokens_text", "< 1 tok/s"}};
    j["peak_mib"] = gib * 1024;
    return j;
  };
  Rows rows;
  const auto add = [&](const char* name, const char* words_, const std::string& options, json of_theirs,
                       const char* note = "") {
    // Their model: NSA with a gate that is an MLP, two micro-batches of one sequence.
    SweepRow r{name, {{"phase", name}, {"configuration", words_}}, shape(m, "m7c", options)};
    set_options(words_of("--attn nsa --nsa-gate mlp --grad-accum 2"), &r.options);
    if (m.gpu) set_options({"--batch", "1"}, &r.options);
    set_options(words_of(options), &r.options);
    r.theirs = std::move(of_theirs), r.note = note;
    r.peers = {{"dense", {"--attn", "sdpa"}}};
    rows.push_back(std::move(r));
  };
  add("original", "wrap each block, checkpointing", "--wrap block --recompute block", theirs("15-17 %", 1.0));
  add("phase 1", "auto_wrap=False, BACKWARD_PRE, checkpointing",
      "--wrap single --backward-prefetch pre --recompute block", theirs("15-17 %", 1.4));
  SweepRow flat{"phase 2", {{"phase", "phase 2"}, {"configuration", "use_orig_params=0"}}, {}};
  flat.no_counterpart = true;
  flat.note = "not run by theirs; ours has flat parameters and their names at once, so there is nothing to turn off";
  rows.push_back(flat);
  add("phase 3", "SHARD_GRAD_OP, checkpointing", "--wrap single --shard grad --recompute block", nullptr,
      "not run by theirs");
  add("phase 4", "no checkpointing", "--wrap single --recompute none", theirs("17 %", 49));
  add("ours", "wrap each block, no checkpointing", "--wrap block", nullptr);
  if (m.gpu) add("ours, a graph", "wrap each block, no checkpointing, --graph 1", "--graph 1", nullptr);
  add("ours, batch 16", "wrap each block, no checkpointing, 16 sequences a GPU",
      m.gpu ? "--batch 16 --grad-accum 1" : "--batch 4 --grad-accum 1", nullptr);
  // Where their minutes went: attention that is a loop over tokens, with and without sharding.
  for (int64_t ranks : m.ranks > 1 ? Values{1, m.ranks} : Values{1}) {
    const char* const name = ranks == 1 ? "a loop over tokens, not sharded" : "a loop over tokens, FSDP2";
    SweepRow r{name, {{"phase", "-"}, {"configuration", std::string(name) + ", one block of twelve"}}, {}, ranks};
    r.no_counterpart = true;
    r.note = "ours has no such loop; peers/nsa_per_token.py, one block and one step at 2048 tokens";
    r.peers = {{"a loop over tokens",
                words_of(m.gpu ? "--depth 1 --steps 1" : "--depth 1 --steps 1 --seq 64 --device cpu"),
                "peers/nsa_per_token.py"}};
    rows.push_back(std::move(r));
  }
  if (m.gpu) {
    SweepRow r{"125 M",
               {{"phase", "125 M"}, {"configuration", "the preset with 125 M parameters, --graph 1"}},
               words_of("--preset m7c-125m --data random --nsa-gate mlp --grad-accum 2 --graph 1")};
    r.note = "theirs says 125 M; with bytes its model has 79 M";
    r.peers = {{"dense", {"--attn", "sdpa"}}};
    rows.push_back(std::move(r));
  }
  return rows;
}

// ------------------------------------------------------------------------------------------------------ the class plan

Rows class_rows(const SweepMachine& m) {
  Rows rows;
  const auto add = [&](const char* name, const std::string& options, const std::string& peer, const char* note = "") {
    SweepRow r{name,
               {{"experiment", name}},
               shape(m, "class", (m.gpu ? "--epochs 2 " : "--epochs 0.01 ") + options, Tokens::built_in)};
    r.peers = {{"", words_of(peer)}};
    r.note = note;
    r.first = 5, r.steps = r.last = -1;  // to the end of the epochs
    rows.push_back(std::move(r));
  };
  add("ddp_fp32", "--shard none --param-dtype fp32 --recompute block", "");
  add("fsdp_bf16", "--recompute block", "");
  add("fsdp_bf16_no_checkpoint", "", "");
  add("fsdp_bf16_no_limit_all_gathers", "--recompute block --limit-all-gathers off",
      "--parallel fsdp1 --limit-all-gathers off", "PyTorch: FSDP1, because FSDP2 has no such switch");
  if (m.gpu) add("fsdp_bf16_graph", "--graph 1", "", "the fastest of ours");
  return rows;
}

// ------------------------------------------------------------------------------------------------------ the patch
// notes

Rows precision(const SweepMachine& m) {
  struct Of {
    const char *name, *options;
  };
  const std::vector<Of> all = {{"fp32", "--param-dtype fp32"},
                               {"tf32", "--param-dtype fp32 --tf32"},
                               {"autocast", "--param-dtype fp32 --autocast bf16"},
                               {"bf16", "--param-dtype bf16"}};
  Rows rows;
  for (const char* attn : {"dense", "nsa"})
    for (const Of& a : all) {
      SweepRow r{std::string(a.name) + ", " + attn,
                 {{"precision", a.name}, {"attention", attn}},
                 shape(m, "m7c", std::string(a.options) + (m.gpu ? " --batch 4" : ""), Tokens::built_in)};
      set_options({"--attn", attn}, &r.options);
      r.steps = r.last = m.gpu ? 200 : 8, r.first = 5;
      if (*attn == 'd') r.peers = {{"", {}}};
      else r.no_peer = "PyTorch has no NSA";
      rows.push_back(std::move(r));
    }
  return rows;
}

// ------------------------------------------------------------------------------------------------------------- our own

Rows context(const SweepMachine& m) {
  Rows rows;
  for (int64_t t : pick(m, {4096, 8192, 16384, 32768, 65536, 131072}, {128, 256}))
    for (const char* attn : {"nsa", "dense"}) {
      SweepRow r{text(t) + ", " + attn,
                 {{"seq", text(t)}, {"attention", attn}},
                 shape(m, "rope", "--batch 1 --recompute both --seq " + text(t))};
      set_options({"--attn", attn}, &r.options);
      if (*attn == 'd') r.peers = {{"", {}}};
      else r.no_peer = "PyTorch has no NSA";
      rows.push_back(std::move(r));
    }
  return rows;
}

Rows knobs(const SweepMachine& m) {
  const char* const all[] = {"",
                             "--gather nccl",
                             "--shard grad",
                             "--shard none",
                             "--shard hybrid:2",
                             "--wrap sublayer",
                             "--wrap auto",
                             "--wrap single",
                             "--limit-all-gathers 1",
                             "--limit-all-gathers off",
                             "--gradient-slots 1",
                             "--forward-prefetch 0 --backward-prefetch none",
                             "--backward-prefetch post",
                             "--reduce-dtype fp32",
                             "--param-dtype fp32 --autocast bf16",
                             "--moments bf16",
                             "--clip 0 --optimizer-in-backward 1",
                             "--replicate-below 65536",
                             "--meta-init 0",
                             "--grad-accum 2",
                             "--grad-accum 2 --accum-sync last",
                             "--recompute mlp",
                             "--recompute attn",
                             "--recompute attn --keep-attention 1",
                             "--recompute both",
                             "--recompute both --keep-attention 1",
                             "--recompute block",
                             "--recompute block --keep-attention 1",
                             "--fuse 0",
                             "--tune-matmul 0",
                             "--graph 1"};
  Rows rows;
  for (const std::string options : all) {
    if (!m.gpu && (options == "--graph 1" || options == "--gather nccl")) continue;
    if (options == "--shard hybrid:2" && m.ranks % 2) continue;
    const std::string name = options.empty() ? "as it is" : options;
    rows.push_back({name, {{"options", options.empty() ? name : "`" + name + "`"}}, shape(m, "rope", options)});
  }
  return rows;
}

// Who moves what is gathered, and a step as a graph.
Rows graph(const SweepMachine& m) {
  struct Of {
    const char *name, *preset, *options;
  };
  const std::vector<Of> all = {
      {"m7c, NSA", "m7c", "--attn nsa"},
      {"m7c, dense", "m7c", ""},
      {"m7c, NSA, batch 16", "m7c", "--attn nsa --batch 16"},
      {"class", "class", ""},
      {"class, --shard none --autocast bf16", "class", "--shard none --param-dtype fp32 --autocast bf16"},
      {"rope", "rope", ""}};
  Rows rows;
  // One rank gathers nothing, and a CPU has no copy engines and no graphs.
  const bool moves = m.gpu && m.ranks > 1;
  for (const Of& a : all)
    for (const char* gather : moves ? std::vector<const char*>{"nccl", "copy-engine"} : std::vector<const char*>{"-"})
      for (const bool as_graph : m.gpu ? std::vector<bool>{false, true} : std::vector<bool>{false}) {
        const bool shards = std::string(a.options).find("--shard none") == std::string::npos;
        if (!shards && *gather == 'c') continue;
        SweepRow r{
            std::string(a.name) + ", " + gather + (as_graph ? ", graph" : ""),
            {{"model", a.name}, {"gathers", shards ? gather : "-"}, {"step", as_graph ? "a graph" : "as issued"}},
            shape(m, a.preset, std::string(a.options) + (as_graph ? " --graph 1" : ""))};
        if (moves && shards) set_options({"--gather", gather}, &r.options);
        rows.push_back(std::move(r));
      }
  return rows;
}

// Every kernel and copy of a step, in a file for pictures.
Rows traces(const SweepMachine& m) {
  Rows rows;
  for (const char* preset : {"rope", "m7c"}) {
    const std::string file = m.gpu ? std::string("results/trace-") + preset + "-" + text(m.ranks) + "gpu.json"
                                   : std::string("build/bench/trace-") + preset + ".json";
    SweepRow r{preset, {{"model", preset}}, shape(m, preset, "--trace " + file)};
    if (*preset == 'm') set_options({"--attn", "nsa"}, &r.options);
    rows.push_back(std::move(r));
  }
  return rows;
}

// More ranks than anybody here has, by the plan.
Rows scale(const SweepMachine& m) {
  struct Of {
    int64_t gpus;
    const char* options;
  };
  const std::vector<Of> all = {
      {8, ""}, {64, ""}, {512, ""}, {4096, ""}, {4096, "--shard hybrid:64"}, {4096, "--shard hybrid:8"}};
  Rows rows;
  for (const Of& a : all) {
    SweepRow r{text(a.gpus) + (*a.options ? std::string(", ") + a.options : ""),
               {{"GPUs", text(a.gpus)}, {"options", *a.options ? std::string("`") + a.options + "`" : "-"}},
               shape(m, "llama-47b", a.options),
               a.gpus};
    set_options({"--attn", "nsa"}, &r.options);
    rows.push_back(std::move(r));
  }
  return rows;
}

// The same model, seed and data on a CPU and on GPUs.
Rows losses(const SweepMachine& m) {
  struct Of {
    const char *name, *options;
  };
  const std::vector<Of> all = {{"CPU, fp32", "--device cpu --param-dtype fp32"},
                               {"GPU, fp32", "--device gpu --param-dtype fp32"},
                               {"GPU, bf16", "--device gpu --param-dtype bf16"}};
  Rows rows;
  for (const Of& a : all) {
    if (!m.gpu && *a.name == 'G') continue;
    SweepRow r{
        a.name,
        {{"on", a.name}},
        shape(m, "tiny", std::string(a.options) + (m.gpu ? " --attn nsa --batch 4 --seq 256" : ""), Tokens::built_in)};
    r.steps = r.last = m.gpu ? 150 : 8, r.first = 5;
    rows.push_back(std::move(r));
  }
  return rows;
}

// What the branches learn in place of all keys.
Rows nsa_loss(const SweepMachine& m) {
  Rows rows;
  for (const char* attn : {"nsa", "dense"}) {
    SweepRow r{attn,
               {{"attention", attn}},
               shape(m, "m7c", m.gpu ? "--batch 4 --val-every 250" : "--val-every 4", Tokens::built_in),
               1};
    set_options({"--attn", attn}, &r.options);
    if (m.gpu) set_options({"--data", "data/shakespeare.txt"}, &r.options);  // data/README.md says whence
    r.steps = r.last = m.gpu ? 1000 : 8, r.first = 5;
    rows.push_back(std::move(r));
  }
  return rows;
}

}  // namespace

const std::vector<Sweep>& sweeps() {
  using K = SweepKind;
  static const std::vector<Sweep> table = {
      // clang-format off
      // name, the report's table, what varies, kind, rows, the report's machine, what else is measured
      {"comm", "the comm sweep (47 B)", "wrapping, buckets, resharding, the limit of all-gathers, who gathers", K::training, comm, "8 x B200 (not run)", {"--comm-timing", "--profile"}},
      {"nsa-fsdp", "the NSA report, phases 1 to 4", "FSDP's configuration under NSA", K::training, nsa_fsdp, "2 x A100 PCIe"},
      {"precision", "the patch notes", "fp32, tf32, autocast, bf16, and the loss after 200 steps", K::training, precision},
      {"class", "the class plan", "DDP, FSDP, checkpointing, the limit of all-gathers, over two epochs", K::training, class_rows},
      {"mlp-1024", "simple_pytorch, the first MLP table", "one change after another", K::training, mlp_1024, "their first machine"},
      {"mlp-4096", "simple_pytorch, the second MLP table", "one change after another", K::training, mlp_4096, "4 x A100 SXM"},
      {"options", "simple_pytorch, compile options", "what the compiler's options stand for", K::training, compile_options, "4 x A100 SXM"},
      {"meta-init", "simple_pytorch, meta init", "the memory of each stage, with and without", K::training, meta_init, "4 x A100 SXM"},
      {"recompute", "simple_pytorch, the list of ckpt", "what is recomputed", K::training, recompute, a100s},
      {"seq", "simple_pytorch, sequence length", "tokens in a sequence", K::training, seq, a100s},
      {"depth", "simple_pytorch, depth", "blocks", K::training, depth, a100s},
      {"width", "simple_pytorch, width", "dim, with heads and MLP in proportion", K::training, width, a100s},
      {"world", "simple_pytorch, constant batch a GPU", "GPUs", K::training, world, "A100 SXM", {"--comm-timing"}},
      {"global-batch", "simple_pytorch, global batch 64", "GPUs that share 64 sequences", K::training, global_batch, "A100 SXM"},
      {"small-params", "simple_pytorch, skipping small ones", "small parameters replicated or sharded, on two interconnects", K::training, small_params, "4 x A100 SXM; 8 x RTX 4090"},
      {"mfu", "simple_pytorch, MFU", "attention, length, depth, recomputation, groups, GPUs", K::training, mfu, "4 x A100"},
      {"context", "", "whole steps by sequence length, NSA and dense", K::training, context},
      {"knobs", "", "one option of FSDP in each row", K::training, knobs, "", {"--comm-timing"}},
      {"graph", "", "a step as issued and as a graph; gathers by NCCL and by copy engines", K::training, graph},
      {"trace", "", "a trace of a step, and what tracing costs it", K::training, traces},
      {"scale", "", "47 B parameters on up to 4,096 GPUs, by the plan", K::planned, scale},
      {"losses", "", "the loss of one model on a CPU and on GPUs", K::training, losses},
      {"nsa-loss", "", "the losses of NSA and dense attention on text", K::training, nsa_loss},
      {"attention", "", "one layer by sequence length, NSA beside dense", K::layers, nullptr, "", {}, {4096, 8192, 16384, 32768, 65536, 131072}, {256, 512, 1024}},
      {"kernels", "", "the attention kernels alone", K::kernels},
      {"collectives", "", "MiB of all-gathers and reduce-scatters", K::collectives, nullptr, "", {}, {1, 4, 16, 64, 336, 1024}, {1, 8}},
      // clang-format on
  };
  return table;
}

const Sweep& find_sweep(const std::string& name) {
  std::string all;
  for (const Sweep& s : sweeps()) {
    if (name == s.name) return s;
    all += (all.empty() ? "" : ", ") + std::string(s.name);
  }
  throw UsageError("--sweep " + name + ": choose one of " + all);
}

Words options_of(const Sweep& sweep, const SweepRow& row) {
  Words options = row.options;
  const auto at = std::find(options.begin(), options.end(), "--graph");
  const bool graph = at != options.end() && at + 1 != options.end() && at[1] == "1";
  for (const std::string& o : sweep.measured)
    if (!graph || o != "--comm-timing") set_options({o}, &options);
  return options;
}

void set_options(const Words& options, Words* command) {
  for (const std::string& o : options) {
    if (o.rfind("--", 0) != 0) continue;
    const auto at = std::find(command->begin(), command->end(), o.substr(0, o.find('=')));
    if (at == command->end()) continue;
    const auto is_option = [](const std::string& word) { return word.rfind("--", 0) == 0; };
    command->erase(at, std::find_if(at + 1, command->end(), is_option));
  }
  command->insert(command->end(), options.begin(), options.end());
}
