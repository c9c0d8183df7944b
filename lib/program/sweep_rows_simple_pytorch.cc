// The tables of simple_pytorch, row by row.
#include "lib/program/sweep_rows.h"

#include <algorithm>

#include "lib/program/process.h"

using nlohmann::json;

namespace sweep_rows {

// PyTorch runs the first, the middle and the last of a sweep's values: it compiles each anew.
static void add_peers_at_ends(Rows* rows, const Words& options = {}) {
  if (rows->empty()) return;
  for (size_t i : {size_t(0), rows->size() / 2, rows->size() - 1})
    if ((*rows)[i].peers.empty()) (*rows)[i].peers = {{"", options}};
}

static json peak_and_ms(double mib, double ms) { return {{"peak_mib", mib}, {"step_ms", ms}}; }
static json stages(double init, double before, double peak, double ms) {
  json j = peak_and_ms(peak, ms);
  if (init >= 0) j["init_mib"] = init;
  if (before >= 0) j["before_step_mib"] = before;
  return j;
}
static json words(const char* what) { return {{"text", what}}; }

struct Theirs {
  int64_t value;
  json figures;
};
static json of(const std::vector<Theirs>& all, int64_t value) {
  for (const Theirs& t : all)
    if (t.value == value) return t.figures;
  return nullptr;
}

// ------------------------------------------------------------------------------------------- simple_pytorch: the MLPs

// In theirs ac_mode="full" leaves out the checkpoint that gathers a block's weights again for the backward pass.
static const char full_mode[] = "theirs keeps the gathered weights: ours is --reshard-after-forward 0";
static const char compile_model[] = "theirs compiles: ours fuses epilogues and residuals with norms";
static const char compile_step[] = "theirs compiles the step: ours chooses the matmuls' kernels by timing them";
static const char compile_both[] = "theirs compiles forward and backward: ours replays a step as one CUDA graph";

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
static Rows over(const SweepMachine& m, const char* label, const Values& values, const std::vector<Theirs>& theirs,
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
static std::string width_options(const SweepMachine& m, int64_t dim) {
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
static Rows ranks_rows(const SweepMachine& m, const Values& ranks, const std::vector<Theirs>& theirs,
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

}  // namespace sweep_rows
