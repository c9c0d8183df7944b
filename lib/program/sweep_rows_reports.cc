// The comm sweep, the NSA report, the class plan and the patch notes, row by row.
#include "lib/program/sweep_rows.h"

#include <algorithm>

#include "lib/program/process.h"
#include "lib/program/sweep_plan.h"

using nlohmann::json;

namespace sweep_rows {

// ----------------------------------------------------------------------------------------------- the comm sweep, 47 B

struct Comm {
  const char* wrap;
  const char* bucket;  // "-": this wrapping has none
  bool reshard, limit;
  const char* gather;
};

static std::string comm_options(const Comm& c) {
  std::string options = std::string("--wrap ") + c.wrap + (c.reshard ? "" : " --reshard-after-forward 0");
  // Modules of this model are 288 MiB and more: any number of them may be merged, up to the bucket.
  if (*c.bucket != '-') options += std::string(" --wrap-min-params 1000000000 --bucket-mb ") + c.bucket;
  return options + (c.reshard ? c.limit ? " --limit-all-gathers 2" : " --limit-all-gathers off" : "");
}

static std::vector<Comm> comm_matrix(const SweepMachine& m) {
  std::vector<Comm> all;
  std::vector<std::pair<const char*, const char*>> wraps = {{"block", "-"}, {"single", "-"}};
  for (const char* b : {"0", "25", "50", "100", "200"}) wraps.emplace_back("auto", b);
  for (const auto& w : wraps)
    for (const char* gather : {"copy-engine", "nccl"}) {
      if (!m.gpu && *gather == 'c') continue;
      all.push_back({w.first, w.second, /*reshard=*/true, /*limit=*/true, gather});
      all.push_back({w.first, w.second, /*reshard=*/true, /*limit=*/false, gather});
      // Nothing is gathered twice: no limit to set.
      all.push_back({w.first, w.second, /*reshard=*/false, /*limit=*/true, gather});
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

// -------------------------------------------------------------------------------------------- the NSA report's phases

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

// ---------------------------------------------------------------------------------------------------- the patch notes

Rows precision(const SweepMachine& m) {
  struct Of {
    const char *name, *options;
  };
  const std::vector<Of> all = {{"fp32", "--param-dtype fp32"},
                               {"tf32", "--param-dtype fp32 --tf32"},
                               {"autocast", "--param-dtype fp32 --autocast bf16"},
                               {"bf16", "--param-dtype bf16"}};
  Rows rows;
  const auto add = [&](const Of& a, const char* attn) {
    SweepRow r{std::string(a.name) + ", " + attn,
               {{"precision", a.name}, {"attention", attn}},
               shape(m, "m7c", std::string(a.options) + (m.gpu ? " --batch 4" : ""), Tokens::built_in)};
    set_options({"--attn", attn}, &r.options);
    r.steps = r.last = m.gpu ? 200 : 8, r.first = 5;
    if (*attn == 'd') r.peers = {{"", {}}};
    else r.no_peer = "PyTorch has no NSA";
    rows.push_back(std::move(r));
  };
  for (const char* attn : {"dense", "nsa"})
    for (const Of& a : all) add(a, attn);
  add({"fp8", "--param-dtype bf16 --matmul-dtype fp8"}, "dense");
  return rows;
}

}  // namespace sweep_rows
