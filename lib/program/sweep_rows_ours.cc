// What no report has a table of.
#include "lib/program/sweep_rows.h"

#include <algorithm>

#include "lib/program/process.h"

using nlohmann::json;

namespace sweep_rows {

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

// `rope` with these options; named after them, or `without` any.
static SweepRow rope_with(const SweepMachine& m, const std::string& options, const std::string& without) {
  return {options.empty() ? without : options,
          {{"options", options.empty() ? without : "`" + options + "`"}},
          shape(m, "rope", options)};
}

Rows knobs(const SweepMachine& m) {
  const char* const all[] = {"",
                             "--gather nccl",
                             "--reduce nccl",
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
                             "--keep-cheap 1",
                             "--fuse 0",
                             "--tune-matmul 0",
                             "--graph 1"};
  Rows rows;
  for (const std::string options : all) {
    if (!m.gpu && (options == "--graph 1" || options == "--gather nccl" || options == "--reduce nccl")) continue;
    if (options == "--shard hybrid:2" && m.ranks % 2) continue;
    rows.push_back(rope_with(m, options, "as it is"));
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
    SweepRow r{preset, {{"model", preset}}, shape(m, preset)};
    if (m.gpu)
      set_options({"--trace", std::string("results/trace-") + preset + "-" + text(m.ranks) + "gpu.json"}, &r.options);
    r.drops_trace = !m.gpu;
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

// What can be in fp8, one after another and together.
Rows fp8(const SweepMachine& m) {
  Rows rows;
  for (const std::string options :
       {"", "--matmul-dtype fp8", "--matmul-dtype fp8 --fp8-scaling row", "--matmul-dtype fp8 --gather-dtype fp8",
        "--matmul-dtype fp8 --save-dtype fp8", "--matmul-dtype fp8 --gather-dtype fp8 --save-dtype fp8"}) {
    rows.push_back(rope_with(m, options, "bf16"));
    rows.back().peers = {{"", {}}};
  }
  return rows;
}

// What rounding to fp8 costs a model of 0.3 B parameters, beside what another seed does.
Rows fp8_loss(const SweepMachine& m) {
  const char* const small =
      " --dim 1024 --depth 20 --heads 8 --kv-heads 2 --hidden 4096 --vocab 256 --seq 1024 --batch 4 --graph 1 "
      "--val-every "
      "500";
  Rows rows;
  for (const int seed : m.gpu ? std::vector<int>{1, 2, 3} : std::vector<int>{1})
    for (const std::string dtype : {"bf16", "fp8"}) {
      SweepRow r{dtype + ", seed " + text(seed),
                 {{"matmuls", dtype}, {"seed", text(seed)}},
                 shape(m, "llama-1b", "--seed " + text(seed) + if_gpu(m, small), Tokens::built_in),
                 1};
      if (dtype == "fp8") set_options({"--matmul-dtype", "fp8"}, &r.options);
      if (m.gpu) set_options({"--data", "data/shakespeare.txt"}, &r.options);  // data/README.md says whence
      r.steps = r.last = m.gpu ? 2000 : 8, r.first = 5;
      rows.push_back(std::move(r));
    }
  return rows;
}

// ------------------------------------------------------------------------------------------------------------- speed

namespace {
struct Workload {
  const char *name, *preset, *options;
  const char* on_gpu = "";  // options that a CPU's small shapes leave out
};
const Workload rope = {"rope", "rope", ""};
const Workload rope_recomputed = {"rope, recompute both", "rope", "--recompute both"};
const Workload llama = {"llama-8b, 8192 tokens, batch 2", "llama-8b", "", " --seq 8192 --batch 2"};
const Workload long_nsa = {"rope, 65,536 tokens, NSA", "rope", "--attn nsa --batch 1", " --seq 65536"};
const Workload long_dense = {"simple, 32,768 tokens, recompute both", "simple", "--recompute both", " --seq 32768"};
const Workload m7c_dense = {"m7c, dense, a graph", "m7c", "", " --graph 1"};
const Workload m7c_nsa = {"m7c, NSA, a graph", "m7c", "--attn nsa", " --graph 1"};
const Workload m7c_dense_16 = {"m7c, dense, batch 16, a graph, cheap kept", "m7c", "--keep-cheap 1",
                               " --batch 16 --graph 1"};
const Workload m7c_nsa_16 = {"m7c, NSA, batch 16, a graph, cheap kept", "m7c", "--attn nsa --keep-cheap 1",
                             " --batch 16 --graph 1"};
const Workload rope_fp8 = {"rope, fp8", "rope", "--matmul-dtype fp8"};
const Workload llama_fp8 = {"llama-8b, 8192 tokens, batch 2, fp8", "llama-8b", "--matmul-dtype fp8",
                            " --seq 8192 --batch 2"};
const Workload class_graph = {"class, a graph", "class", "", " --graph 1"};

SweepRow row_of(const SweepMachine& m, const Workload& a) {
  return {a.name, {{"model", a.name}}, shape(m, a.preset, a.options + if_gpu(m, a.on_gpu))};
}
}  // namespace

// Goals for the speed of a step, as they were set on two H200.
Rows targets(const SweepMachine& m) {
  struct Of {
    Workload workload;
    int64_t ranks;
    Target target;
  };
  const char *const ms = "step_ms", *const rate = "tokens_per_sec_gpu";
  const std::vector<Of> all = {{rope, 1, {ms, 303, 292, 285}},
                               {rope, 2, {ms, 310, 295, 285}},
                               {rope_recomputed, 2, {ms, 347, 335, 325}},
                               {llama, 2, {rate, 11076, 11500, 12000}},
                               {long_nsa, 2, {rate, 86140, 95000, 100000}},
                               {long_dense, 2, {ms, 4885, 4500, 4300}},
                               {m7c_dense, 2, {ms, 4.76, 4.0}},
                               {m7c_nsa, 2, {ms, 7.96, 5.5}},
                               {m7c_dense_16, 2, {rate, 749e3, 850e3}},
                               {m7c_nsa_16, 2, {rate, 480e3, 600e3}},
                               {class_graph, 2, {ms, 6.04, 5.0}},
                               {rope_fp8, 2, {ms, 310, 235, 215}},  // before: in bf16
                               {llama_fp8, 2, {rate, 11076, 14451, 15500}}};
  Rows rows;
  for (const Of& a : all) {
    SweepRow r = row_of(m, a.workload);
    if (a.ranks == 1) r.name += ", 1 GPU";
    r.labels.push_back({"GPUs", text(a.ranks)});
    r.ranks = a.ranks;
    if (m.gpu) r.target = a.target;
    const std::string options = a.workload.options;
    if (options.find("nsa") != std::string::npos) r.no_peer = "PyTorch has no NSA";
    else r.peers = {{"", {}}};
    rows.push_back(std::move(r));
  }
  return rows;
}

// What a step is made of, of those that the goals are set for.
Rows step_shares(const SweepMachine& m) {
  Rows rows;
  for (const Workload& a : {rope, rope_fp8, m7c_dense, m7c_nsa, long_nsa}) rows.push_back(row_of(m, a));
  return rows;
}

}  // namespace sweep_rows
