#include "lib/program/options.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <map>
#include <variant>

#include <unistd.h>

#include "CLI/CLI.hpp"

#include "lib/device/error.h"
#include "lib/program/checked_json.h"
#include "lib/program/chips.h"
#include "lib/program/config_file.h"
#include "lib/program/json.h"
#include "lib/program/options_parts.h"
#include "lib/program/presets.h"

using namespace options_parts;

namespace {

constexpr double most = double(most_exact);
Allowed from(double lo, double hi) { return {lo, hi}; }
Allowed above(double lo, double hi) { return {lo, hi, "lo"}; }
Allowed from_to_below(double lo, double hi) { return {lo, hi, "hi"}; }
Allowed in_fp32(Allowed a) {
  a.fp32 = true;
  return a;
}
Allowed at_least(double lo) { return {lo, most}; }
Allowed one_of(std::vector<const char*> words) { return {0, 0, "", std::move(words), {}}; }
Allowed any_as(std::vector<const char*> suggested) { return {0, 0, "", {}, std::move(suggested)}; }
const Allowed any = {}, flag = {};

std::vector<Spec> flat(const std::vector<Group>& groups) {
  std::vector<Spec> all;
  for (const Group& g : groups)
    for (const Spec& s : g.specs) all.push_back(s), all.back().group = g.name;
  return all;
}

}  // namespace

// clang-format off
const std::vector<Spec> options_parts::specs = flat({
{"Model", {
  {"preset", "NAME", &Options::preset, one_of(preset_names()), "model shape and batch; sizes given as options win", "tiny on a CPU, m7c on a GPU"},
  {"arch", "NAME", &Options::arch, one_of(names_of(arch_names)), "simple: LayerNorm, sin/cos positions, biases; rope: RMSNorm, RoPE, no biases; llama: rope with SwiGLU; mlp: no attention", "the preset's"},
  {"dim", "N", &Options::dim, from(1, 1 << 20), "width of the residual stream", "the preset's"},
  {"depth", "N", &Options::depth, from(1, 4096), "number of blocks", "the preset's"},
  {"heads", "N", &Options::heads, from(1, 4096), "query heads; must divide dim unless --head-dim is given", "the preset's"},
  {"kv-heads", "N", &Options::kv_heads, from(1, 4096), "key/value heads; must divide heads", "the preset's"},
  {"head-dim", "N", &Options::head_dim, from(1, 1 << 16), "width of a head's queries and keys", "dim / heads"},
  {"v-head-dim", "N", &Options::v_head_dim, from(1, 1 << 16), "width of a head's values and output", "--head-dim"},
  {"hidden", "N", &Options::hidden, from(1, 1 << 24), "width of the MLP's hidden layer", "the preset's"},
  {"vocab", "N", &Options::vocab, from(2, 1 << 24), "vocabulary size; token ids are 0 to vocab - 1", "the preset's"},
  {"seq", "N", &Options::seq, from(1, 1 << 24), "tokens per sequence", "the preset's"},
  {"rope-base", "X", &Options::rope_base, from(1, 1e12), "base of the rotary angles"},
  {"rope-scaling", "HOW", &Options::rope_scaling, any, "none; llama3:F:LOW:HIGH:N: divide low rotary frequencies by F, as Llama 3.1 does with llama3:8:1:4:8192"},
  {"norm-eps", "X", &Options::norm_eps, in_fp32(above(0, 1)), "what norms add to the variance"},
  {"tie-embeddings", "", &Options::tie_embeddings, flag, "use the embedding's weight for the head"},
  {"freeze", "NAMES", &Options::freeze, any, "parameters or modules not to train, as in embedding,block.0 (--show-params lists the names)", "none"},
}},
{"Attention", {
  {"attn", "NAME", &Options::attn, one_of({"nsa", "dense"}), "nsa: Native Sparse Attention (compressed, selected and sliding-window branches); dense: causal", "nsa"},
  {"nsa-block", "N", &Options::nsa_block, from(1, 4096), "tokens per compressed key"},
  {"nsa-stride", "N", &Options::nsa_stride, from(1, 4096), "tokens from one compressed key to the next; must divide both block sizes"},
  {"nsa-select-block", "N", &Options::nsa_select_block, from(1, 4096), "tokens per selection block"},
  {"nsa-selected", "N", &Options::nsa_selected, from(3, 4096), "blocks each query selects: the first, its own, the one before it, and the top-scoring of the rest"},
  {"nsa-window", "N", &Options::nsa_window, from(1, 1 << 24), "keys in the sliding window"},
  {"nsa-phi", "NAME", &Options::nsa_phi, one_of(names_of(phi_names)), "what turns a block into a compressed key"},
  {"nsa-gate", "NAME", &Options::nsa_gate, one_of(names_of(nsa_gate_names)), "what computes the gates from the block's input: a linear layer, or a two-layer MLP with SiLU"},
}},
{"Batch", {
  {"batch", "N", &Options::batch, from(1, 1 << 20), "sequences per rank and micro-batch", "the preset's"},
  {"global-batch", "N", &Options::global_batch, from(1, 1 << 24), "sequences per step over all ranks; need not be a multiple of the ranks", "batch x ranks x grad-accum"},
  {"grad-accum", "N", &Options::grad_accum, from(1, 1 << 16), "micro-batches per step", "the preset's; 1 with --batch or --global-batch"},
}},
{"Optimizer", {
  {"lr", "X", &Options::lr, in_fp32(above(0, 10)), "peak learning rate"},
  {"min-lr-ratio", "X", &Options::min_lr_ratio, from(0, 1), "the cosine schedule ends at this fraction of the peak"},
  {"warmup", "STEPS", &Options::warmup, at_least(0), "linear warm-up", "a tenth of the steps, at most 100"},
  {"clip-norm", "P", &Options::clip_norm, one_of({"1", "2", "3", "inf"}), "the norm that --clip bounds and the log shows"},
  {"on-nan", "WHAT", &Options::on_nan, any_as({"stop", "skip", "skip:"}), "at a loss or gradient norm that is not finite: stop; or skip[:K], leave the step out, at most K in a row (10), and save nothing before a step is good again"},
  {"beta1", "X", &Options::beta1, in_fp32(from_to_below(0, 1)), "AdamW's beta1"},
  {"beta2", "X", &Options::beta2, in_fp32(from_to_below(0, 1)), "AdamW's beta2"},
  {"eps", "X", &Options::eps, in_fp32(above(0, 1)), "AdamW's epsilon"},
  {"weight-decay", "X", &Options::weight_decay, from(0, 10), "AdamW's weight decay, on matrices only"},
  {"clip", "X", &Options::clip, in_fp32(from(0, 1e9)), "maximum global gradient norm; 0: no clipping"},
  {"steps", "N", &Options::steps, at_least(1), "length of the schedule", "200 on a GPU, 32 on a CPU"},
  {"stop-after", "STEPS", &Options::stop_after, at_least(0), "stop early; the schedule keeps its length; 0: before the first step, to --export, --eval or --sample with the initial or the resumed weights", "at the end of the schedule"},
  {"tokens", "N", &Options::tokens, at_least(1), "stop after this many tokens, those before --resume included; sets the length of the schedule unless --steps does", "no limit"},
  {"epochs", "X", &Options::epochs, above(0, 1e6), "stop after this many passes over the data, in whole steps; sets the length of the schedule unless --steps does", "no limit"},
  {"minutes", "X", &Options::minutes, above(0, 1e6), "stop after this many minutes", "no limit"},
  {"seed", "N", &Options::seed, at_least(0), "seed of the initial weights and of the data order"},
}},
{"Data", {
  {"data", "FILES", &Options::data, any, "text or token files (data/README.md): a file, patterns such as 'shard_*.bin' and names with commas between them; or random", "a built-in synthetic corpus"},
  {"val-data", "FILES", &Options::val_data, any, "validation data", "the last tenth of the data"},
  {"val-every", "STEPS", &Options::val_every, at_least(0), "validate every STEPS steps; 0: never"},
  {"val-batches", "N", &Options::val_batches, from(1, 1 << 20), "batches of the global batch size per validation"},
}},
{"Evaluation and samples", {
  {"eval", "FILES", &Options::eval, any, "at the end print loss, perplexity and bits per byte of all of a text or token file, each token once; of an llm.c file of questions (HellaSwag), acc_norm", "none"},
  {"sample", "N", &Options::sample, from(0, 1 << 20), "generate N tokens after --prompt at the end; 0: none"},
  {"sample-every", "STEPS", &Options::sample_every, at_least(0), "generate a sample every STEPS steps too; 0: only at the end"},
  {"prompt", "TEXT", &Options::prompt, any, "what a sample begins with: text where tokens are bytes; otherwise token ids, as in '464 3290', and ids are written (data/decode.py turns them into text)", "the token that ends a document, or a line end"},
  {"temperature", "X", &Options::temperature, from(0, 100), "divides the logits before a token is drawn; 0: take the most likely token"},
  {"top-k", "N", &Options::top_k, from(0, 1 << 24), "draw among the N most likely tokens; 0: among all"},
}},
{"Precision", {
  {"param-dtype", "TYPE", &Options::param_dtype, one_of({"bf16", "fp32"}), "type of gathered parameters and activations; master weights are fp32", "bf16 on a GPU, fp32 on a CPU"},
  {"reduce-dtype", "TYPE", &Options::reduce_dtype, one_of({"bf16", "fp32"}), "type in which gradients are reduced", "that of --param-dtype"},
  {"matmul-dtype", "TYPE", &Options::matmul_dtype, one_of({"fp8", "off"}), "run the matmuls of q, k, v, o and the MLP in fp8, scaled by this step's amax: e4m3, gradients in e5m2", "that of --param-dtype"},
  {"fp8-scaling", "WHAT", &Options::fp8_scaling, one_of({"tensor", "row"}), "granularity of the scales of --matmul-dtype fp8: one per tensor, or one per row (per column where a product reduces over rows), which is more accurate and slower; row needs compute capability 9.0"},
  {"gather-dtype", "TYPE", &Options::gather_dtype, one_of({"fp8", "off"}), "all-gather the weights of --matmul-dtype fp8 in fp8, each tensor scaled by its amax over all ranks: down to half the bytes on the wire and in the slot", "that of --param-dtype"},
  {"save-dtype", "TYPE", &Options::save_dtype, one_of({"fp8", "off"}), "keep the MLP's hidden layer for the backward pass in fp8 (e4m3), half the size; its gradients are then of the rounded layer", "that of --param-dtype"},
  {"tf32", "", &Options::tf32, flag, "let fp32 matmuls round their inputs to TF32"},
  {"autocast", "TYPE", &Options::autocast, one_of({"bf16", "off"}), "gather parameters in fp32 and cast them for the matmuls; gradients are reduced in fp32 unless --reduce-dtype says otherwise", "off"},
  {"moments", "TYPE", &Options::moments, one_of({"fp32", "bf16"}), "type of AdamW's moments; bf16 is rounded stochastically"},
}},
{"Sharding", {
  {"shard", "MODE", &Options::shard, any_as({"full", "grad", "none", "hybrid:"}), "full: shard parameters, gradients and optimizer state (ZeRO-3); grad: keep parameters unsharded after the forward (ZeRO-2); "
    "none: replicate everything and all-reduce gradients (DDP); hybrid:K: full within groups of K ranks, replicated across groups (HSDP)"},
  {"wrap", "WHAT", &Options::wrap, one_of(names_of(wrap_names)), "what makes a unit, which is gathered at once: a block; attention and MLP separately; modules by size; the entire model"},
  {"wrap-min-params", "N", &Options::wrap_min_params, at_least(0), "--wrap auto: a module with at least N parameters is a unit; smaller neighbours are merged until they reach N"},
  {"bucket-mb", "MiB", &Options::bucket_mb, from(0, 1 << 20), "--wrap auto: do not merge neighbours beyond this size; 0: no limit"},
  {"reshard-after-forward", "0|1", &Options::reshard_after_forward, from(0, 1), "0: keep parameters unsharded from the forward to the end of the step", "1; 0 with --shard grad and none"},
  {"limit-all-gathers", "N", &Options::limit_all_gathers, any_as({"off"}), "slots for gathered units, 1 to 64; units much larger than the others share one more; off: one per unit", "2"},
  {"gradient-slots", "N", &Options::gradient_slots, from(1, 64), "slots for unsharded gradients: units whose reduction may be pending; much larger ones share one more"},
  {"forward-prefetch", "N", &Options::forward_prefetch, from(0, 64), "units to gather ahead, as far as slots allow; 0: gather a unit when it is needed", "one less than the slots, at least 1"},
  {"backward-prefetch", "WHEN", &Options::backward_prefetch, one_of(names_of(backward_prefetch_names)), "gather the next unit before a unit's gradient is computed, after it, or when it is needed"},
  {"accum-sync", "WHEN", &Options::accum_sync, one_of({"every", "last"}), "reduce gradients in every micro-batch, or accumulate them unsharded in fp32 and reduce in the last"},
  {"replicate-below", "BYTES", &Options::replicate_below, at_least(0), "keep parameters smaller than this, as gathered, replicated on every rank"},
  {"optimizer-in-backward", "0|1", &Options::optimizer_in_backward, from(0, 1), "1: run AdamW on a unit as soon as its gradient is reduced; needs --clip 0"},
  {"meta-init", "0|1", &Options::meta_init, from(0, 1), "1: initialize the shards only; 0: initialize the full model on every rank, then shard (to see what that costs)"},
  {"gather", "HOW", &Options::gather, one_of({"nccl", "copy-engine", "mpi"}), "what moves gathered parameters: NCCL's kernels; copy engines, which use almost no SMs; MPI through host memory",
    "copy-engine if each shard group is Hopper or newer GPUs of one host, else nccl; mpi unless each rank has a GPU"},
  {"reduce", "HOW", &Options::reduce, one_of({"nccl", "copy-engine"}), "what moves gradients: NCCL's reduce-scatter; an all-to-all by copy engines (by MPI on CPUs) and a sum "
    "in fp32 and in rank order by the shard's owner", "copy-engine if copy engines gather among 2 ranks, unless --reduce-ctas or --optimizer-in-backward 1 is given; else nccl; reduce-scatter over MPI unless each rank has a GPU"},
  {"reduce-tail", "HOW", &Options::reduce_tail, one_of({"peer", "same"}), "what moves a step's last two gradients, beside which nothing runs: kernels on all SMs that read the peers' memory and sum in fp32 and in rank order; the same as the rest",
    "peer if copy engines gather among 2 ranks, else same"},
  {"reduce-ctas", "N", &Options::reduce_ctas, from(0, 64), "thread blocks that NCCL may take for a reduction, at most: fewer leave more SMs to the kernels beside it; 0: NCCL's choice", "4 for gradients of at most 16 MiB, and 16 for larger ones of the same model; else 0"},
}},
{"Checkpoints", {
  {"save", "DIR", &Options::save, any, "save to DIR at the end, and every --save-every steps", "never"},
  {"save-every", "STEPS", &Options::save_every, at_least(0), "save every STEPS steps; 0: only at the end"},
  {"keep", "N", &Options::keep, from(0, 1 << 20), "saved steps to keep; 0: all"},
  {"resume", "DIR", &Options::resume, any_as({"latest"}), "resume from DIR: a step-N directory, or a --save directory for its latest step; latest: the latest step in --save; any number of ranks", "start from scratch"},
  {"init", "DIR", &Options::init, any, "begin with the weights and sizes of DIR: config.json and safetensors files of a Hugging Face Llama, or of --export; with --attn nsa the three branches share its keys and values; "
    "a checkpoint found by --resume takes precedence", "random weights"},
  {"export", "PATH", &Options::export_to, any, "write the unsharded model at the end: to a directory with config.json, in Hugging Face's names for llama with dense attention; or to one file, if the name ends in .safetensors", "not written"},
  {"export-shard-mb", "MiB", &Options::export_shard_mb, from(1, 1 << 20), "--export to a directory: cut the weights into files of at most this size"},
  {"max-positions", "N", &Options::max_positions, from(1, 1 << 24), "--export to a directory: max_position_embeddings in config.json", "--seq, or the model's of --init where that is more"},
  {"export-dtype", "TYPE", &Options::export_dtype, one_of({"bf16", "fp32"}), "type of the exported weights"},
}},
{"Memory", {
  {"recompute", "WHAT", &Options::recompute, one_of(names_of(recompute_names)), "what the backward pass recomputes instead of keeping (activation checkpointing); block: all but a block's input"},
  {"keep-attention", "0|1", &Options::keep_attention, from(0, 1), "1: with --recompute attn, both or block, keep attention's output and recompute only q, k and v; for long sequences"},
  {"keep-cheap", "0|1", &Options::keep_cheap, from(0, 1), "1: with --recompute none, also keep the outputs of norms and (not in fp8) activations; 0: recompute them in the backward pass, which is cheap"},
}},
{"Machine", {
  {"graph", "0|1", &Options::graph, from(0, 1), "1: from the third step on, run each step as one CUDA graph, collectives included"},
  {"fuse", "0|1", &Options::fuse, from(0, 1), "1: fuse biases, residuals, activations, the sums at norms and the backward of rotary positions into the kernels beside them; 0: a kernel for each (to see what that costs)"},
  {"tune-matmul", "0|1", &Options::tune_matmul, from(0, 1), "on a GPU, 1: before step 1, time cuBLASLt's algorithms for each product and keep the fastest; 0: use its first choice, and do not fuse activations"},
  {"allow-single-rank", "", &Options::allow_single_rank, flag, "train with one rank where several GPUs are visible, or where a launcher started several processes that MPI does not join"},
  {"timeout", "SECONDS", &Options::timeout, from(0, 86400), "end the run if a rank does not answer, or all wait for each other, for SECONDS (at least 2), of which the last 2 are for telling who, and if MPI takes that long to start (300 without this option) or to end; 0: never"},
  {"device", "NAME", &Options::device, one_of({"auto", "cpu", "gpu"}), "what the ranks compute on"},
}},
{"Output", {
  {"log", "FILE", &Options::log, any, "write JSON lines: a header, then an object per step; --resume appends", "no file"},
  {"tensorboard", "DIR", &Options::tensorboard, any, "write event files for TensorBoard to DIR every --log-every steps; --resume adds one", "no files"},
  {"log-every", "STEPS", &Options::log_every, at_least(1), "log every STEPS steps, and print a line for each of these also on a terminal, where without this option one line is redrawn"},
  {"comm-timing", "", &Options::comm_timing, flag, "measure the communication that computation does not hide"},
  {"nsa-stats", "", &Options::nsa_stats, flag, "log gate and selection statistics of each block over all ranks' sequences, and which kernels ran on rank 0; needs --log"},
  {"diagnostics", "DIR", &Options::diagnostics, any, "write training_fsdp.csv, k_stats_fsdp.csv, fallback_counters_fsdp.csv, a heartbeat of each rank, "
    "memory, dtypes and environment to DIR every --log-every steps; --resume appends", "no files"},
  {"mem-dump-every", "STEPS", &Options::mem_dump_every, at_least(0), "with --diagnostics: write the memory's state every STEPS steps; 0: at the start and at the first step alone"},
  {"stall", "SECONDS", &Options::stall, from(0, 1e6), "warn if no step ends within SECONDS; 0: never"},
  {"profile", "", &Options::profile, flag, "print and log where the time of the last step went; with CUPTI also its kernels by name, NCCL's share, and each kind of work beside the least that the chip allows"},
  {"trace", "FILE", &Options::trace, any, "write rank 0's last step, or the planned one with --plan, as a trace for ui.perfetto.dev: streams, units, with CUPTI every kernel", "no file"},
}},
{"Instead of training", {
  {"plan", "", &Options::plan, flag, "print the planned memory and the estimated time of a step; needs no GPU"},
  {"world", "N", &Options::world, from(1, 1 << 20), "with --plan, --show-schedule and --show-params: number of ranks", "those that mpirun starts"},
  {"gpu", "NAME", &Options::gpu, one_of(chip_words()), "with --plan: estimate the time of a step on this chip", "the GPU here, else h200"},
  {"show-schedule", "", &Options::show_schedule, flag, "print what a step gathers, uses, releases and reduces, in order"},
  {"show-params", "", &Options::show_params, flag, "print the table of parameters"},
  {"hardware", "", &Options::hardware, flag, "print the machine's hardware and the versions of its libraries as JSON"},
  {"list-presets", "", &Options::list_presets, flag, "print the presets and their sizes"},
  {"completion", "SHELL", &Options::completion, one_of({"bash"}), "print what lets Tab complete options and their values: source <(./train --completion bash)", "none"},
  {"version", "", &Options::version, flag, "print commit, CUDA, NCCL and MPI"},
}}});
// clang-format on

bool options_parts::is_flag(const Spec& s) { return std::holds_alternative<bool Options::*>(s.member); }
bool options_parts::is_number(const Spec& s) {
  return !is_flag(s) && !std::holds_alternative<std::string Options::*>(s.member);
}

namespace {

// Numbers as people write them: 4096, 0.1, 1e-08.
std::string number_text(double x) {
  return x == std::floor(x) && std::fabs(x) < 1e15 ? strf("%.0f", x) : strf("%g", x);
}

std::string joined(const std::vector<const char*>& words, const char* before_last) {
  std::string text;
  for (size_t i = 0; i < words.size(); ++i)
    text += (i == 0 ? "" : i + 1 == words.size() ? before_last : ", ") + std::string(words[i]);
  return text;
}

// "from 1 to 64", "of 0 or more", "above 0, up to 10", "from 0 to below 1".
std::string range_text(const Allowed& a) {
  const std::string lo = number_text(a.lo), hi = number_text(a.hi), open = a.open;
  if (a.hi == most) return "of " + lo + " or more";
  return open == "lo" ? "above " + lo + ", up to " + hi : "from " + lo + (open == "hi" ? " to below " : " to ") + hi;
}

// For errors: "must be a whole number from 1 to 64", "choose bf16 or fp32".
std::string allowed_text(const Spec& s) {
  if (is_flag(s)) return "choose true or false";
  if (!is_number(s)) return s.allowed.words.empty() ? "give a value" : "choose " + joined(s.allowed.words, " or ");
  const bool real = std::holds_alternative<double Options::*>(s.member);
  return std::string("must be ") + (real ? "a number " : "a whole number ") + range_text(s.allowed);
}

// A value as it was given, and as an error quotes it: "--dim 64", "FSDP_DIM=64", "--config FILE:3: dim = 64".
struct Given {
  std::string value, as;
};

std::string quoted(const std::string& value) { return value.empty() ? "''" : excerpt(value); }

[[noreturn]] void refuse(const Spec& s, const Given& given) {
  // A limit that is there for the sake of exact numbers alone is told to those who meet it.
  const bool beyond = is_number(s) && s.allowed.hi == most && std::strtod(given.value.c_str(), nullptr) > most;
  throw UsageError(strf("%s: %s%s; see --help", given.as.c_str(), allowed_text(s).c_str(),
                        beyond ? strf(", up to %.0f", most).c_str() : ""));
}

// Written so that a NaN is not.
bool in_range(const Spec& s, double x) {
  const std::string open = s.allowed.open;
  return (open == "lo" ? x > s.allowed.lo : x >= s.allowed.lo) && (open == "hi" ? x < s.allowed.hi : x <= s.allowed.hi);
}

template <class T>
T parse_number(const Spec& s, const Given& given) {
  const std::string& text = given.value;
  T x{};
  if constexpr (std::is_same_v<T, double>) {
    char* end = nullptr;
    errno = 0;
    x = std::strtod(text.c_str(), &end);
    if (text.empty() || *end || std::isspace(static_cast<unsigned char>(text[0]))) refuse(s, given);
  } else {
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), x);
    if (error != std::errc() || end != text.data() + text.size()) refuse(s, given);
  }
  if (!in_range(s, double(x))) refuse(s, given);
  const double narrow = double(float(x));
  REQUIRE_USER(!s.allowed.fp32 || (in_range(s, narrow) && (x == 0) == (narrow == 0)),
               "%s: in fp32, in which a step computes, that is %g; give another", given.as.c_str(), narrow);
  return x;
}

bool parse_flag(const Spec& s, const Given& given) {
  for (const char* yes : {"true", "1", "on", "yes"})
    if (given.value == yes) return true;
  for (const char* no : {"false", "0", "off", "no"})
    if (given.value == no) return false;
  refuse(s, given);
}

std::string parse_text(const Spec& s, const Given& given) {
  const auto& words = s.allowed.words;
  if (given.value.empty() || (!words.empty() && std::find(words.begin(), words.end(), given.value) == words.end()))
    refuse(s, given);
  try {
    (void)nlohmann::json(given.value).dump();
  } catch (const nlohmann::json::exception&) {
    throw UsageError(strf("%s: not valid UTF-8, which logs and checkpoints need; rename the file", given.as.c_str()));
  }
  // Where it is one of the words it says, of what a checkpoint may bring, that it is not wanted.
  return given.value == "off" && !words.empty() ? "" : given.value;
}

void set(const Spec& s, const Given& given, Options* o) {
  std::visit(
      [&](auto member) {
        using T = std::decay_t<decltype(o->*member)>;
        if constexpr (std::is_same_v<T, std::string>) o->*member = parse_text(s, given);
        else if constexpr (std::is_same_v<T, bool>) o->*member = parse_flag(s, given);
        else o->*member = parse_number<T>(s, given);
      },
      s.member);
}

nlohmann::json get(const Spec& s, const Options& o) {
  return std::visit([&](auto member) { return nlohmann::json(o.*member); }, s.member);
}

// Letters to change, drop, add or swap (two neighbours) to make b from a: Damerau and Levenshtein's distance.
int distance(const std::string& a, const std::string& b) {
  std::vector<std::vector<int>> d(a.size() + 1, std::vector<int>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i)
    for (size_t j = 0; j <= b.size(); ++j) {
      if (i == 0 || j == 0) {
        d[i][j] = int(i + j);
        continue;
      }
      d[i][j] = std::min({d[i - 1][j] + 1, d[i][j - 1] + 1, d[i - 1][j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        d[i][j] = std::min(d[i][j], d[i - 2][j - 2] + 1);
    }
  return d[a.size()][b.size()];
}

const char prefix[] = "FSDP_";  // of environment variables

}  // namespace

std::string options_parts::values_text(const Spec& s) {
  if (!is_number(s)) return joined(s.allowed.words, ", ");
  const std::string text = range_text(s.allowed);
  const size_t blank = text.find(' ') + 1;
  return text.rfind("above", 0) == 0 ? text : text.substr(blank);
}

std::string options_parts::default_text(const Spec& s) {
  if (s.otherwise) return s.otherwise;
  const nlohmann::json value = get(s, Options());
  return value.is_number() ? number_text(value.get<double>()) : value.is_string() ? value.get<std::string>() : "off";
}

std::string options_parts::variable_of(const std::string& name) {
  std::string variable = key_of(name);
  for (char& c : variable) c = char(std::toupper(static_cast<unsigned char>(c)));
  return prefix + variable;
}

std::string options_parts::nearest(const std::string& typed, const std::vector<std::string>& names) {
  if (typed.size() > 64) return "";
  std::string best;
  int best_distance = std::max(1, int(typed.size()) / 3) + 1;
  for (const std::string& name : names) {
    // The beginning of a name is near too: --kv for --kv-heads.
    int d = distance(typed, name);
    if (typed.size() >= 2 && name.rfind(typed, 0) == 0) d = 1;
    if (d < best_distance) best_distance = d, best = name;
  }
  return best;
}

std::string options_parts::did_you_mean(const std::string& name) {
  return name.empty() ? "" : " (did you mean " + name + "?)";
}

namespace {

std::string nearest_option(std::string typed) {
  typed.erase(0, typed.find_first_not_of('-'));
  typed = typed.substr(0, typed.find('='));
  std::replace(typed.begin(), typed.end(), '_', '-');
  std::vector<std::string> names;
  for (const Spec& s : specs) names.push_back(s.name);
  return nearest(typed, names);
}

std::string in_quotes(const std::string& s) {
  const char quote = s.find('"') == std::string::npos ? '"' : '\'';
  return quote + s + quote;
}

[[noreturn]] void refuse_extras(const std::vector<std::string>& extras) {
  std::string culprit;
  for (const std::string& a : extras)
    if (culprit.empty() || (culprit[0] != '-' && a[0] == '-')) culprit = a;
  if (culprit.empty() || culprit[0] != '-')
    throw UsageError(strf("unexpected argument '%s'; see --help", excerpt(culprit).c_str()));
  const std::string near = nearest_option(culprit);
  throw UsageError(strf("unknown option %s%s; see --help", excerpt(culprit).c_str(),
                        did_you_mean(near.empty() ? "" : "--" + near).c_str()));
}

// What else CLI11 finds wrong: values that are missing, options given twice.
[[noreturn]] void refuse_usage(const CLI::Option* config, const std::vector<CLI::Option*>& options,
                               const std::string& what) {
  if (config->count() > 1) throw UsageError("--config is given more than once");
  if (what.find("--config:") != std::string::npos) throw UsageError("--config needs a file name");
  for (size_t i = 0; i < options.size(); ++i) {
    const Spec& s = specs[i];
    if (!is_flag(s) && options[i]->count() > 1) throw UsageError(strf("--%s is given more than once", s.name));
    if (!is_flag(s) && what.find(strf("--%s:", s.name)) != std::string::npos)
      throw UsageError(strf("--%s needs a value: %s; see --help", s.name, allowed_text(s).c_str()));
  }
  throw UsageError(what + "; see --help");
}

// Where values come from, the first that has one wins: the command line, the environment, the file.
using Layer = std::map<std::string, Given>;  // by an option's name

Layer read_arguments(int argc, const char* const* argv) {
  CLI::App app;
  app.set_help_flag();
  std::vector<CLI::Option*> options;
  for (const Spec& s : specs) {
    const std::string name = strf("--%s", s.name);
    options.push_back(is_flag(s) ? app.add_flag(name) : app.add_option(name));
  }
  const CLI::Option* config = app.add_option("--config");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ExtrasError&) { refuse_extras(app.remaining()); } catch (const CLI::ParseError& e) {
    refuse_usage(config, options, e.what());
  }
  Layer layer;
  auto add = [&](const std::string& name, const CLI::Option* option, const char* between) {
    if (option->count() == 0) return;
    const std::string value = option->results().back();
    layer[name] = {value, "--" + name + between + quoted(value)};
  };
  for (size_t i = 0; i < options.size(); ++i) add(specs[i].name, options[i], is_flag(specs[i]) ? "=" : " ");
  add("config", config, " ");
  return layer;
}

// An empty variable is as one that is not set.
Layer read_environment() {
  Layer layer;
  auto add = [&](const std::string& name) {
    const std::string variable = variable_of(name);
    const char* value = std::getenv(variable.c_str());
    if (value && *value) layer[name] = {value, variable + "=" + quoted(value)};
  };
  for (const Spec& s : specs) add(s.name);
  add("config");
  return layer;
}

// Of variables that look as if they were an option's, and are not.
std::vector<std::string> unknown_variables() {
  std::vector<std::string> warnings;
  const std::string for_tests = std::string(prefix) + "TEST_";
  for (char** variable = environ; *variable; ++variable) {
    const std::string text = *variable, name = text.substr(0, text.find('='));
    if (name.rfind(prefix, 0) != 0 || name.rfind(for_tests, 0) == 0 || name == variable_of("config")) continue;
    if (std::any_of(specs.begin(), specs.end(), [&](const Spec& s) { return variable_of(s.name) == name; })) continue;
    std::string as_option = name.substr(sizeof prefix - 1);
    for (char& c : as_option) c = char(std::tolower(static_cast<unsigned char>(c)));
    const std::string near = nearest_option(as_option);
    warnings.push_back(strf("the environment has %s, which is no option%s; it is ignored", excerpt(name).c_str(),
                            did_you_mean(near.empty() ? "" : variable_of(near)).c_str()));
  }
  return warnings;
}

Layer read_file(const std::string& path) {
  Layer layer;
  for (const Setting& setting : read_config(path)) {
    const std::string where = strf("--config %s:%d: ", path.c_str(), setting.line), shown = excerpt(setting.name);
    REQUIRE_USER(std::any_of(specs.begin(), specs.end(), [&](const Spec& s) { return s.name == setting.name; }),
                 "%sunknown option '%s'%s; see --help", where.c_str(), shown.c_str(),
                 did_you_mean(nearest_option(setting.name)).c_str());
    const Given given = {setting.value, where + shown + " = " + quoted(setting.value)};
    REQUIRE_USER(layer.emplace(setting.name, given).second, "%s%s is given more than once", where.c_str(),
                 shown.c_str());
  }
  return layer;
}

}  // namespace

bool parse_options(int argc, const char* const* argv, Options* out, std::string* text) {
  *out = Options();
  // Before anything else: help is for those whose command line is wrong, too.
  for (int i = 1; i < argc; ++i)
    if (const std::string word = argv[i]; word == "--help" || word == "-h" || word.rfind("--help=", 0) == 0) {
      const bool next = word.size() <= 6 && i + 1 < argc && argv[i + 1][0] != '-';
      const std::string section = word.size() > 7 ? word.substr(7) : next ? argv[i + 1] : "";
      *text = section.empty() ? help_text() : help_section(section);
      return false;
    }
  std::vector<Layer> layers = {read_arguments(argc, argv), read_environment()};
  auto find = [&](const std::string& name) -> const Given* {
    for (const Layer& layer : layers)
      if (const auto it = layer.find(name); it != layer.end()) return &it->second;
    return nullptr;
  };
  if (const Given* config = find("config")) {
    REQUIRE_USER(!config->value.empty(), "%s: needs a file name", config->as.c_str());
    out->config = config->value;
    layers.push_back(read_file(out->config));
  }
  for (const Spec& s : specs)
    if (const Given* given = find(s.name)) set(s, *given, out), out->given.push_back(s.name);
  out->warnings = unknown_variables();
  check_combinations(*out);
  if (out->resume.empty()) check_carried_combinations(*out);
  return true;
}

std::string key_of(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

bool Options::instead_of_training() const {
  return plan || show_schedule || show_params || hardware || version || list_presets || !completion.empty();
}

bool Options::gives(const std::string& name) const { return std::count(given.begin(), given.end(), name) > 0; }

nlohmann::json to_json(const Options& o) {
  nlohmann::json j;
  for (const Spec& s : specs) j[key_of(s.name)] = get(s, o);
  return j;
}

void take_over(const nlohmann::json& settings, const std::vector<std::string>& names, Options* o) {
  for (const Spec& s : specs) {
    if (o->gives(s.name) || std::count(names.begin(), names.end(), s.name) == 0) continue;
    const auto it = settings.find(key_of(s.name));
    if (it == settings.end() || it->is_null()) continue;
    std::visit([&](auto member) { it->get_to(o->*member); }, s.member);
  }
}

namespace {
// Whether a checkpoint may say that: what the command line takes, and what stands for an option that was not given.
bool may_be(const Spec& s, const nlohmann::json& value) {
  if (value == get(s, Options())) return true;
  if (is_flag(s)) return value.is_boolean();
  if (is_number(s)) {
    const bool real = std::holds_alternative<double Options::*>(s.member);
    return (real ? value.is_number() : value.is_number_integer()) && in_range(s, value.get<double>());
  }
  const auto& words = s.allowed.words;
  return value.is_string() && (words.empty() || std::count(words.begin(), words.end(), value.get<std::string>()) > 0);
}

// For errors about values in files: "a whole number from 1 to 64", "bf16 or fp32".
std::string kind_text(const Spec& s) {
  if (is_flag(s)) return "true or false";
  if (is_number(s)) return allowed_text(s).substr(std::string("must be ").size());
  return s.allowed.words.empty() ? "a text" : joined(s.allowed.words, " or ");
}
}  // namespace

std::string option_allows(const std::string& name, const nlohmann::json& value) {
  const auto s = std::find_if(specs.begin(), specs.end(), [&](const Spec& spec) { return spec.name == name; });
  ASSERT(s != specs.end());
  const bool unset = s->otherwise && value == get(*s, Options());  // stands for what the machine chooses
  return may_be(*s, value) && !unset ? "" : kind_text(*s);
}

nlohmann::json read_state(const nlohmann::json& state, const std::string& file) {
  const char* remedy = "resume from another checkpoint";
  const CheckedJson top(state, file, remedy);
  top.at("step").whole(0, most_exact);
  if (top.has("trained_tokens")) top.at("trained_tokens").whole(0, most_exact);
  if (top.has("data_files"))
    for (const CheckedJson& f : top.at("data_files").items()) f.at("file").text(), f.at("tokens").whole(1, most_exact);
  if (top.has("tokens")) {
    const CheckedJson tokens = top.at("tokens");
    tokens.at("vocab").whole(0, most_exact), tokens.at("tokenizer").text();
  }
  nlohmann::json options = top.at("options").object();
  const CheckedJson settings(state["options"], file, remedy);
  for (const Spec& s : specs) {
    const std::string key = key_of(s.name);
    if (!options.contains(key)) options[key] = s.otherwise ? nlohmann::json() : get(s, Options());
    else if (!may_be(s, options[key])) settings.at(key.c_str()).refuse(kind_text(s));
  }
  nlohmann::json read = state;
  read["options"] = options;
  return read;
}

std::string to_config(const Options& o) {
  const Options unset;
  std::string text;
  for (const Spec& s : specs) {
    const nlohmann::json value = get(s, o);
    if (value == get(s, unset)) continue;
    text += strf("%s = %s\n", s.name,
                 value.is_string() ? in_quotes(value.get<std::string>()).c_str() : value.dump().c_str());
  }
  return text;
}
