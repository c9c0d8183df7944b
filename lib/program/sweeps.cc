#include "lib/program/sweeps.h"

#include <algorithm>

#include "lib/device/error.h"
#include "lib/program/process.h"
#include "lib/program/sweep_rows.h"

Words sweep_rows::shape(const SweepMachine& m, const std::string& preset, const std::string& options, Tokens tokens) {
  Words words = {"--preset", preset};
  if (tokens == Tokens::random) set_options({"--data", "random"}, &words);
  const bool attends = preset.rfind("mlp", 0) != 0;
  if (attends) set_options({"--attn", "dense"}, &words);
  if (!m.gpu) {
    set_options(words_of("--dim 64 --depth 2"), &words);
    if (attends) set_options(words_of("--heads 2 --kv-heads 1"), &words);
    set_options(words_of("--hidden 256 --vocab 256 --seq 128 --batch 2"), &words);
  }
  set_options(words_of(options), &words);
  return words;
}

const std::vector<Sweep>& sweeps() {
  using namespace sweep_rows;
  using K = SweepKind;
  static const std::vector<Sweep> table = {
      // clang-format off
      // name, the report's table, what varies, kind, rows, the report's machine, what else is measured
      {"comm", "the comm sweep (47 B)", "wrapping, buckets, resharding, the limit of all-gathers, who gathers", K::training, comm, "8 x B200 (not run)", {"--comm-timing", "--profile"}},
      {"nsa-fsdp", "the NSA report, phases 1 to 4", "FSDP's configuration under NSA", K::training, nsa_fsdp, "2 x A100 PCIe"},
      {"precision", "the patch notes", "fp32, tf32, autocast, bf16, fp8, and the loss after 200 steps", K::training, precision},
      {"class", "the class plan", "DDP, FSDP, checkpointing, the limit of all-gathers, over two epochs", K::training, class_rows},
      {"mlp-1024", "simple_pytorch, the first MLP table", "one change after another", K::training, mlp_1024, "their first machine"},
      {"mlp-4096", "simple_pytorch, the second MLP table", "one change after another", K::training, mlp_4096, "4 x A100 SXM"},
      {"options", "simple_pytorch, compile options", "what the compiler's options stand for", K::training, compile_options, "4 x A100 SXM"},
      {"meta-init", "simple_pytorch, meta init", "the memory of each stage, with and without", K::training, meta_init, "4 x A100 SXM"},
      {"recompute", "simple_pytorch, the list of ckpt", "what is recomputed", K::training, recompute, "2 x A100 SXM"},
      {"seq", "simple_pytorch, sequence length", "tokens in a sequence", K::training, seq, "2 x A100 SXM"},
      {"depth", "simple_pytorch, depth", "blocks", K::training, depth, "2 x A100 SXM"},
      {"width", "simple_pytorch, width", "dim, with heads and MLP in proportion", K::training, width, "2 x A100 SXM"},
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
      {"fp8", "", "what is in fp8: matmuls, scaled by tensor or row, gathers, saved layers", K::training, fp8, "", {"--comm-timing"}},
      {"fp8-loss", "", "the losses of matmuls in bf16 and fp8 on text, three seeds", K::training, fp8_loss},
      {"targets", "", "goals for the speed of a step, and what was there when they were set", K::training, targets},
      {"step-shares", "", "where a step goes: products, attention, memory, waiting, beside the chip's limits", K::training, step_shares, "", {"--profile"}},
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
