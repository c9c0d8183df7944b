#include "lib/program/options.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <variant>

#include "CLI/CLI.hpp"
#include "nlohmann/json.hpp"

#include "lib/device/error.h"

namespace {

using Member =
    std::variant<int64_t Options::*, uint64_t Options::*, double Options::*, bool Options::*, std::string Options::*>;

// What a value may be. Numbers: from lo to hi, `open` leaves the ends out that it names ("lo", "hi" or "both").
struct Allowed {
  double lo = 0, hi = 0;
  const char* open = "";
  std::vector<const char*> words = {};  // strings: one of these; none: anything
};

struct Spec {
  const char* group;
  const char* name;
  const char* value;  // the value's name in the help; it tells the unit
  Member member;
  Allowed allowed;
  const char* help;
  const char* by_itself;  // what happens without the option; null: the number in Options
};

constexpr double most = 9e15;  // whole numbers up to here are exact in double
const std::vector<const char*> presets = {"tiny",     "simple",   "rope",     "class",    "m7c",
                                          "mlp-1024", "mlp-4096", "llama-1b", "llama-8b", "llama-47b"};

const std::vector<Spec>& specs() {
  static const std::vector<Spec> table = {
      {"Model",
       "preset",
       "NAME",
       &Options::preset,
       {0, 0, "", presets},
       "a shape that fills in every size not given here",
       "tiny on a CPU, m7c on a GPU"},
      {"Model",
       "arch",
       "NAME",
       &Options::arch,
       {0, 0, "", {"simple", "rope", "llama", "mlp"}},
       "simple: LayerNorm, sin/cos positions, biases; rope: RMSNorm, RoPE, no biases; llama: rope with SwiGLU; mlp: no "
       "attention",
       "the preset's"},
      {"Model", "dim", "N", &Options::dim, {1, 1 << 20}, "width of the residual stream", "the preset's"},
      {"Model", "depth", "N", &Options::depth, {1, 4096}, "blocks", "the preset's"},
      {"Model", "heads", "N", &Options::heads, {1, 4096}, "query heads; they must divide dim", "the preset's"},
      {"Model",
       "kv-heads",
       "N",
       &Options::kv_heads,
       {1, 4096},
       "key/value heads; they must divide heads",
       "the preset's"},
      {"Model", "hidden", "N", &Options::hidden, {1, 1 << 24}, "width inside the MLP", "the preset's"},
      {"Model", "vocab", "N", &Options::vocab, {2, 1 << 24}, "token ids are 0 to vocab - 1", "the preset's"},
      {"Model", "seq", "N", &Options::seq, {1, 1 << 24}, "tokens a sequence", "the preset's"},
      {"Model", "rope-base", "X", &Options::rope_base, {1, 1e12}, "base of the rotary angles", nullptr},

      {"Model",
       "tie-embeddings",
       "",
       &Options::tie_embeddings,
       {},
       "the head multiplies by the embedding's weight",
       nullptr},
      {"Model",
       "freeze",
       "NAMES",
       &Options::freeze,
       {},
       "parameters that are not trained: beginnings of names, with commas between (--show-params lists them)",
       "none"},

      {"Attention",
       "attn",
       "NAME",
       &Options::attn,
       {0, 0, "", {"nsa", "dense"}},
       "nsa: Native Sparse Attention (compressed, selected and window branches); dense: causal",
       "nsa"},
      {"Attention",
       "nsa-block",
       "N",
       &Options::nsa_block,
       {1, 4096},
       "tokens that one compressed key stands for",
       nullptr},
      {"Attention",
       "nsa-stride",
       "N",
       &Options::nsa_stride,
       {1, 4096},
       "tokens from one compressed key to the next; it must divide both block sizes",
       nullptr},
      {"Attention",
       "nsa-select-block",
       "N",
       &Options::nsa_select_block,
       {1, 4096},
       "tokens of a block that queries select",
       nullptr},
      {"Attention",
       "nsa-selected",
       "N",
       &Options::nsa_selected,
       {1, 4096},
       "blocks a query selects: the first, its own, the one before and the best of the rest",
       nullptr},
      {"Attention", "nsa-window", "N", &Options::nsa_window, {1, 1 << 24}, "keys of the sliding window", nullptr},
      {"Attention",
       "nsa-phi",
       "NAME",
       &Options::nsa_phi,
       {0, 0, "", {"mean", "linear", "mlp"}},
       "what makes a compressed key of a block",
       nullptr},

      {"Batch", "batch", "N", &Options::batch, {1, 1 << 20}, "sequences a rank and micro-batch", "the preset's"},
      {"Batch",
       "global-batch",
       "N",
       &Options::global_batch,
       {1, 1 << 24},
       "sequences a step, all ranks together; the ranks need not divide it",
       "batch x ranks x grad-accum"},
      {"Batch", "grad-accum", "N", &Options::grad_accum, {1, 1 << 16}, "micro-batches a step", nullptr},

      {"Optimizer", "lr", "X", &Options::lr, {0, 10, "lo"}, "peak learning rate", nullptr},
      {"Optimizer",
       "min-lr-ratio",
       "X",
       &Options::min_lr_ratio,
       {0, 1},
       "the cosine ends at this part of the peak",
       nullptr},
      {"Optimizer",
       "warmup",
       "STEPS",
       &Options::warmup,
       {0, most},
       "linear warm-up",
       "a tenth of the steps, 100 at most"},
      {"Optimizer",
       "clip-norm",
       "P",
       &Options::clip_norm,
       {0, 0, "", {"1", "2", "3", "inf"}},
       "the norm that --clip bounds and that is shown",
       nullptr},
      {"Optimizer", "beta1", "X", &Options::beta1, {0, 1, "hi"}, "AdamW", nullptr},
      {"Optimizer", "beta2", "X", &Options::beta2, {0, 1, "hi"}, "AdamW", nullptr},
      {"Optimizer", "eps", "X", &Options::eps, {0, 1, "lo"}, "AdamW", nullptr},
      {"Optimizer", "weight-decay", "X", &Options::weight_decay, {0, 10}, "AdamW, on matrices alone", nullptr},
      {"Optimizer", "clip", "X", &Options::clip, {0, 1e9}, "largest global gradient norm; 0: no clipping", nullptr},
      {"Optimizer", "steps", "N", &Options::steps, {1, most}, "length of the schedule", "chosen by the machine"},
      {"Optimizer",
       "stop-after",
       "STEPS",
       &Options::stop_after,
       {1, most},
       "end sooner; the schedule stays",
       "at the schedule's end"},
      {"Optimizer",
       "tokens",
       "N",
       &Options::tokens,
       {1, most},
       "end after this many tokens; sets the schedule where --steps does not",
       "no limit"},
      {"Optimizer", "minutes", "X", &Options::minutes, {0, 1e6, "lo"}, "end after this time", "no limit"},
      {"Optimizer", "seed", "N", &Options::seed, {0, most}, "of the weights and of the order of the data", nullptr},

      {"Data",
       "data",
       "FILE",
       &Options::data,
       {},
       "text or token file (data/README.md), or random",
       "a built-in synthetic corpus"},
      {"Data", "val-data", "FILE", &Options::val_data, {}, "validation data", "the last tenth of the data"},
      {"Data", "val-every", "STEPS", &Options::val_every, {0, most}, "validate every so many steps; 0: never", nullptr},
      {"Data", "val-batches", "N", &Options::val_batches, {1, 1 << 20}, "batches a validation", nullptr},

      {"Precision",
       "param-dtype",
       "TYPE",
       &Options::param_dtype,
       {0, 0, "", {"bf16", "fp32"}},
       "gathered parameters and activations; master weights are fp32",
       "bf16 on a GPU, fp32 on a CPU"},
      {"Precision",
       "reduce-dtype",
       "TYPE",
       &Options::reduce_dtype,
       {0, 0, "", {"bf16", "fp32"}},
       "gradients between ranks",
       "as param-dtype"},
      {"Precision", "tf32", "", &Options::tf32, {}, "fp32 matmuls may round their inputs to TF32", nullptr},

      {"Precision",
       "autocast",
       "TYPE",
       &Options::autocast,
       {0, 0, "", {"bf16"}},
       "gather parameters in fp32 and cast them for the matmuls; gradients are reduced in fp32",
       "off"},
      {"Precision",
       "moments",
       "TYPE",
       &Options::moments,
       {0, 0, "", {"fp32", "bf16"}},
       "AdamW's; bf16 is rounded stochastically",
       nullptr},

      {"Sharding",
       "shard",
       "MODE",
       &Options::shard,
       {},
       "full: parameters, gradients and optimizer (ZeRO-3); grad: parameters stay whole after the forward (ZeRO-2); "
       "none: everything whole, gradients all-reduced (DDP); hybrid:K: full within groups of K ranks, which are "
       "replicas of each other (HSDP)",
       nullptr},
      {"Sharding",
       "wrap",
       "WHAT",
       &Options::wrap,
       {0, 0, "", {"block", "sublayer", "auto", "single"}},
       "what is gathered together: a block; its attention and its MLP apart; by size; the whole model",
       nullptr},
      {"Sharding",
       "wrap-min-params",
       "N",
       &Options::wrap_min_params,
       {0, most},
       "--wrap auto: a module of so many is a unit, smaller neighbours are put together until they have as many",
       nullptr},
      {"Sharding",
       "bucket-mb",
       "MiB",
       &Options::bucket_mb,
       {0, 1 << 20},
       "--wrap auto: small neighbours are not put together beyond; 0: no limit",
       nullptr},
      {"Sharding",
       "reshard-after-forward",
       "0|1",
       &Options::reshard_after_forward,
       {0, 1},
       "0: what is gathered for the forward stays until the step ends",
       "1, 0 with --shard grad and none"},
      {"Sharding",
       "limit-all-gathers",
       "N",
       &Options::limit_all_gathers,
       {},
       "slots for gathered units, 1 to 64; off: one for each unit",
       "2"},
      {"Sharding",
       "gradient-slots",
       "N",
       &Options::gradient_slots,
       {1, 64},
       "units whose gradients may wait for their reduction",
       nullptr},

      {"Sharding",
       "forward-prefetch",
       "N",
       &Options::forward_prefetch,
       {0, 64},
       "units gathered ahead, as far as there are slots; 0: a unit's gather begins when it is wanted",
       "the slots less one, at least 1"},
      {"Sharding",
       "backward-prefetch",
       "WHEN",
       &Options::backward_prefetch,
       {0, 0, "", {"pre", "post", "none"}},
       "the next unit is gathered before a unit's gradient is computed, after it, or when it is wanted",
       nullptr},
      {"Sharding",
       "accum-sync",
       "WHEN",
       &Options::accum_sync,
       {0, 0, "", {"every", "last"}},
       "gradients are reduced in every micro-batch, or kept whole in fp32 until the last",
       nullptr},
      {"Sharding",
       "replicate-below",
       "BYTES",
       &Options::replicate_below,
       {0, most},
       "parameters that are smaller, as gathered, are whole on every rank",
       nullptr},
      {"Sharding",
       "optimizer-in-backward",
       "0|1",
       &Options::optimizer_in_backward,
       {0, 1},
       "1: AdamW on a unit as soon as its gradient is reduced; needs --clip 0",
       nullptr},
      {"Sharding",
       "meta-init",
       "0|1",
       &Options::meta_init,
       {0, 1},
       "1: weights are made sharded; 0: whole, then cut (to see what that costs)",
       nullptr},
      {"Sharding",
       "gather",
       "HOW",
       &Options::gather,
       {0, 0, "", {"nccl", "copy-engine", "mpi"}},
       "who moves gathered parameters: NCCL's kernels; copy engines, which leave the SMs alone; MPI through host "
       "memory",
       "copy-engine where those that shard are Hopper GPUs or later of one host, else nccl; mpi without a GPU a rank"},

      {"Checkpoints",
       "save",
       "DIR",
       &Options::save,
       {},
       "save to DIR at the end, and every --save-every steps",
       "never"},
      {"Checkpoints", "save-every", "STEPS", &Options::save_every, {0, most}, "0: at the end alone", nullptr},
      {"Checkpoints", "keep", "N", &Options::keep, {0, 1 << 20}, "saved steps that stay; 0: all", nullptr},
      {"Checkpoints",
       "resume",
       "DIR",
       &Options::resume,
       {},
       "go on from a saved step, from the latest in DIR, or from the `latest` in --save; any number of ranks",
       "start anew"},
      {"Checkpoints",
       "export",
       "FILE",
       &Options::export_to,
       {},
       "write the whole model as safetensors at the end",
       "no file"},
      {"Checkpoints",
       "export-dtype",
       "TYPE",
       &Options::export_dtype,
       {0, 0, "", {"bf16", "fp32"}},
       "of --export",
       nullptr},

      {"Memory",
       "recompute",
       "WHAT",
       &Options::recompute,
       {0, 0, "", {"none", "mlp", "attn", "both", "block"}},
       "what the backward pass makes again instead of keeping it (activation checkpointing); block: all but a block's "
       "input",
       nullptr},
      {"Memory",
       "keep-attention",
       "0|1",
       &Options::keep_attention,
       {0, 1},
       "1: with --recompute attn, both or block, keep attention's output and make only q, k and v again: for long "
       "sequences",
       nullptr},

      {"Machine",
       "graph",
       "0|1",
       &Options::graph,
       {0, 1},
       "1: from the third step on, a step is one CUDA graph, collectives and all",
       nullptr},
      {"Machine",
       "device",
       "NAME",
       &Options::device,
       {0, 0, "", {"auto", "cpu", "gpu"}},
       "what the ranks compute on",
       nullptr},

      {"Output",
       "log",
       "FILE",
       &Options::log,
       {},
       "write JSON lines: a header, then an object a step; with --resume behind those that are there",
       "no file"},
      {"Output", "log-every", "STEPS", &Options::log_every, {1, most}, "print and log every so many steps", nullptr},
      {"Output",
       "comm-timing",
       "",
       &Options::comm_timing,
       {},
       "measure the communication that the computation does not hide",
       nullptr},

      {"Output",
       "nsa-stats",
       "",
       &Options::nsa_stats,
       {},
       "log for each block what gates and selection do, on rank 0's sequences, and which kernels ran; needs --log",
       nullptr},
      {"Output", "profile", "", &Options::profile, {}, "print and log where the time of the last step went", nullptr},

      {"Instead of training",
       "plan",
       "",
       &Options::plan,
       {},
       "print the planned memory and the estimated time; needs no GPU",
       nullptr},
      {"Instead of training",
       "world",
       "N",
       &Options::world,
       {1, 1 << 20},
       "with --plan, --show-schedule and --show-params: for this many ranks",
       "the ranks there are"},
      {"Instead of training",
       "gpu",
       "NAME",
       &Options::gpu,
       {0, 0, "", {"h200", "h100", "a100", "l40s", "rtx4090"}},
       "with --plan: estimate the time of a step on this chip",
       "the chip here, without one h200"},
      {"Instead of training",
       "show-schedule",
       "",
       &Options::show_schedule,
       {},
       "print what a step gathers, uses, releases and reduces, in order",
       nullptr},
      {"Instead of training", "show-params", "", &Options::show_params, {}, "print the table of parameters", nullptr},
      {"Instead of training", "hardware", "", &Options::hardware, {}, "print what there is, as JSON", nullptr},
      {"Instead of training", "version", "", &Options::version, {}, "print commit, CUDA, NCCL and MPI", nullptr},
  };
  return table;
}

bool is_flag(const Spec& s) { return std::holds_alternative<bool Options::*>(s.member); }
bool is_number(const Spec& s) { return !is_flag(s) && !std::holds_alternative<std::string Options::*>(s.member); }

// Numbers as people write them: 4096, 0.1, 1e-08.
std::string number_text(double x) {
  return x == std::floor(x) && std::fabs(x) < 1e15 ? strf("%.0f", x) : strf("%g", x);
}

// "from 1 to 64", "0 or more", "bf16 or fp32"; brief: "1 to 64", "bf16, fp32".
std::string range_text(const Spec& s, bool brief) {
  const Allowed& a = s.allowed;
  if (is_number(s)) {
    if (a.hi == most) return number_text(a.lo) + " or more";
    const bool lo_open = std::string(a.open) == "lo", hi_open = std::string(a.open) == "hi";
    return strf("%s%s %s %s",
                lo_open ? "above "
                : brief ? ""
                        : "from ",
                number_text(a.lo).c_str(), hi_open ? "to below" : "to", number_text(a.hi).c_str());
  }
  std::string text;
  for (size_t i = 0; i < a.words.size(); ++i)
    text += (i == 0 ? "" : i + 1 == a.words.size() && !brief ? " or " : ", ") + std::string(a.words[i]);
  return text.empty() && !brief ? "a file's name" : text;
}

std::string allowed_text(const Spec& s) {
  const char* kind = std::holds_alternative<double Options::*>(s.member) ? "a number" : "a whole number";
  return is_number(s) ? strf("%s%s %s", kind, s.allowed.hi == most ? "," : "", range_text(s, false).c_str())
                      : range_text(s, false);
}

[[noreturn]] void refuse(const Spec& s, const std::string& value) {
  throw UsageError(strf("--%s %s: allowed is %s; see --help", s.name, value.empty() ? "(nothing)" : value.c_str(),
                        allowed_text(s).c_str()));
}

template <class T>
T parse_number(const Spec& s, const std::string& text) {
  T x{};
  if constexpr (std::is_same_v<T, double>) {
    char* end = nullptr;
    errno = 0;
    x = std::strtod(text.c_str(), &end);
    if (text.empty() || *end || std::isspace(static_cast<unsigned char>(text[0]))) refuse(s, text);
  } else {
    auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), x);
    if (error != std::errc() || end != text.data() + text.size()) refuse(s, text);
  }
  const std::string open = s.allowed.open;
  const double d = double(x);
  // Written so that a NaN is refused.
  if (!(open == "lo" ? d > s.allowed.lo : d >= s.allowed.lo)) refuse(s, text);
  if (!(open == "hi" ? d < s.allowed.hi : d <= s.allowed.hi)) refuse(s, text);
  return x;
}

void set(const Spec& s, const std::string& text, Options* o) {
  std::visit(
      [&](auto member) {
        using T = std::decay_t<decltype(o->*member)>;
        if constexpr (std::is_same_v<T, std::string>) {
          const auto& words = s.allowed.words;
          if (text.empty() || (!words.empty() && std::find(words.begin(), words.end(), text) == words.end()))
            refuse(s, text);
          try {
            (void)nlohmann::json(text).dump();
          } catch (const nlohmann::json::exception&) {
            throw UsageError(
                strf("--%s %s: it is not UTF-8, as logs and checkpoints are; rename the file", s.name, text.c_str()));
          }
          o->*member = text;
        } else if constexpr (!std::is_same_v<T, bool>) {
          o->*member = parse_number<T>(s, text);
        }
      },
      s.member);
}

nlohmann::json get(const Spec& s, const Options& o) {
  return std::visit([&](auto member) { return nlohmann::json(o.*member); }, s.member);
}

// Letters to change, drop, add or swap (two neighbours) to make b from a.
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

// " (did you mean --x?)", or nothing if no name is near.
std::string suggestion(std::string name, const char* dashes) {
  name.erase(0, name.find_first_not_of('-'));
  name = name.substr(0, name.find('='));
  std::replace(name.begin(), name.end(), '_', '-');
  std::string best;
  int best_distance = std::max(1, int(name.size()) / 3) + 1;
  for (const Spec& s : specs()) {
    // The beginning of a name is near too: --kv for --kv-heads.
    int d = distance(name, s.name);
    if (name.size() >= 2 && std::string(s.name).rfind(name, 0) == 0) d = 1;
    if (d < best_distance) best_distance = d, best = s.name;
  }
  return best.empty() ? "" : strf(" (did you mean %s%s?)", dashes, best.c_str());
}

std::string default_text(const Spec& s) {
  if (s.by_itself) return s.by_itself;
  const nlohmann::json value = get(s, Options());
  return value.is_number() ? number_text(value.get<double>()) : value.is_string() ? value.get<std::string>() : "off";
}

std::string help_text() {
  const size_t column = 26, width = 100;
  std::string text =
      "Trains a transformer with fully sharded data parallelism.\n"
      "Usage: mpirun -np RANKS ./train [options]\n";
  auto entry = [&](const std::string& name, const std::string& what) {
    std::string line = "  " + name;
    line.resize(std::max(column, line.size() + 2), ' ');
    size_t at = 0;
    while (at < what.size()) {  // words, wrapped
      size_t end = std::min(what.find(' ', at), what.size());
      if (line.size() > column && line.size() + 1 + (end - at) > width) {
        text += line + "\n";
        line = std::string(column, ' ');
      } else if (at > 0) {
        line += ' ';
      }
      line += what.substr(at, end - at);
      at = end + 1;
    }
    text += line + "\n";
  };
  const char* group = "";
  for (const Spec& s : specs()) {
    if (std::string(group) != s.group) text += strf("\n%s\n", group = s.group);
    std::string what = s.help;
    const std::string range = range_text(s, true);
    if (!is_flag(s))
      what += strf(" (%s%sdefault: %s)", range.c_str(), range.empty() ? "" : "; ", default_text(s).c_str());
    entry(strf("--%s%s%s", s.name, *s.value ? " " : "", s.value), what);
    if (std::string(s.name) == "device")
      entry("--config FILE", "more options, a `name = value` a line without the dashes; the command line wins");
  }
  entry("--help", "print this");
  return text;
}

std::string in_quotes(const std::string& s) {
  const char quote = s.find('"') == std::string::npos ? '"' : '\'';
  return quote + s + quote;
}

}  // namespace

bool parse_options(int argc, const char* const* argv, Options* out, std::string* text) {
  *out = Options();
  CLI::App app;
  app.set_help_flag();
  app.allow_config_extras(CLI::config_extras_mode::error);
  app.set_config("--config", "", "");
  std::vector<CLI::Option*> options;
  for (const Spec& s : specs()) {
    const std::string name = strf("--%s", s.name);
    if (auto flag = std::get_if<bool Options::*>(&s.member)) {
      options.push_back(app.add_flag(name, out->*(*flag)));
    } else {
      options.push_back(
          app.add_option_function<std::string>(name, [&s, out](const std::string& value) { set(s, value, out); }));
    }
  }
  // Before anything else: help is for those whose command line is wrong, too.
  for (int i = 1; i < argc; ++i)
    if (std::string(argv[i]) == "--help" || std::string(argv[i]) == "-h") {
      *text = help_text();
      return false;
    }
  try {
    app.parse(argc, argv);
  } catch (const CLI::ExtrasError& e) {
    std::string culprit;
    for (const std::string& a : app.remaining())
      if (culprit.empty() || (culprit[0] != '-' && a[0] == '-')) culprit = a;
    if (culprit.empty() || culprit[0] != '-')
      throw UsageError(strf("unexpected argument '%s'; see --help", culprit.c_str()));
    throw UsageError(strf("unknown option %s%s; see --help", culprit.c_str(), suggestion(culprit, "--").c_str()));
  } catch (const CLI::ConfigError& e) {
    // "INI was not able to parse NAME" is CLI11's way to say that there is no such option.
    std::string what = e.what(), unable = "not able to parse ";
    const size_t at = what.find(unable);
    if (at != std::string::npos) {
      const std::string key = what.substr(at + unable.size());
      const size_t section = key.find(".++");
      what = section != std::string::npos ? strf("sections such as [%s] are not used", key.substr(0, section).c_str())
                                          : strf("unknown name '%s'%s", key.c_str(), suggestion(key, "").c_str());
    }
    throw UsageError(
        strf("--config %s: %s; see --help", app.get_config_ptr()->as<std::string>().c_str(), what.c_str()));
  } catch (const CLI::FileError&) {
    throw UsageError(
        strf("--config %s: no such file, or it cannot be read", app.get_config_ptr()->as<std::string>().c_str()));
  } catch (const CLI::ParseError& e) {
    const std::string what = e.what();
    if (app.get_config_ptr()->count() > 1) throw UsageError("--config is given more than once");
    if (what.find("--config:") != std::string::npos) throw UsageError("--config needs a value, a file's name");
    for (size_t i = 0; i < options.size(); ++i) {
      const Spec& s = specs()[i];
      if (!is_flag(s) && options[i]->count() > 1) throw UsageError(strf("--%s is given more than once", s.name));
      if (!is_flag(s) && what.find(strf("--%s:", s.name)) != std::string::npos)
        throw UsageError(strf("--%s needs a value, %s; see --help", s.name, allowed_text(s).c_str()));
      if (is_flag(s) && what.find(strf("--%s ", s.name)) != std::string::npos)
        throw UsageError(strf("--%s is on by its name alone; in a file it is true or false", s.name));
    }
    throw UsageError(what + "; see --help");
  }
  for (size_t i = 0; i < options.size(); ++i)
    if (options[i]->count() > 0) out->given.push_back(specs()[i].name);
  REQUIRE_USER(!out->nsa_stats || !out->log.empty(), "--nsa-stats needs --log FILE, where they go");
  REQUIRE_USER(out->save_every == 0 || !out->save.empty(), "--save-every needs --save DIR");
  for (const char* name : {"val-data", "val-batches"})
    REQUIRE_USER(out->val_every > 0 || !out->gives(name), "--%s needs --val-every STEPS", name);
  REQUIRE_USER(!out->profile || out->minutes == 0,
               "--profile is of the last step, which is not known before --minutes are over; --stop-after sets it");
  REQUIRE_USER(out->resume != "latest" || !out->save.empty(),
               "--resume latest is the latest step in --save DIR, which is not given");
  REQUIRE_USER(out->graph == 0 || (!out->comm_timing && !out->profile),
               "--graph 1: what a graph does cannot be timed from outside; leave out --comm-timing and --profile");
  REQUIRE_USER(out->graph == 0 || out->gather != "mpi", "--graph 1: MPI cannot be part of a CUDA graph");
  REQUIRE_USER(out->optimizer_in_backward == 0 || out->clip == 0,
               "--optimizer-in-backward 1 needs --clip 0: the norm is known only when all gradients are");
  REQUIRE_USER(out->autocast.empty() || out->param_dtype != "bf16",
               "--autocast bf16 gathers parameters in fp32, which --param-dtype bf16 contradicts");
  REQUIRE_USER(out->wrap == "auto" || (out->bucket_mb == 0 && out->wrap_min_params == Options().wrap_min_params),
               "--wrap-min-params and --bucket-mb are for --wrap auto");
  const bool keeps = out->shard == "grad" || out->shard == "none";
  REQUIRE_USER(!keeps || out->reshard_after_forward != 1,
               "--shard %s keeps parameters whole; --reshard-after-forward 1"
               " is for full and hybrid:K",
               out->shard.c_str());
  REQUIRE_USER(out->limit_all_gathers.empty() || (!keeps && out->reshard_after_forward != 0),
               "--limit-all-gathers: a unit that is not resharded after the forward has a slot of its own");
  REQUIRE_USER(out->world == 0 || out->plan || out->show_schedule || out->show_params,
               "--world is for --plan, --show-schedule and --show-params: the ranks of a run are mpirun's -np");
  REQUIRE_USER(out->gpu.empty() || out->plan, "--gpu is for --plan: a run takes the GPUs that there are");
  return true;
}

std::string key_of(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

bool Options::gives(const std::string& name) const { return std::count(given.begin(), given.end(), name) > 0; }

nlohmann::json to_json(const Options& o) {
  nlohmann::json j;
  for (const Spec& s : specs()) j[key_of(s.name)] = get(s, o);
  return j;
}

void take_over(const nlohmann::json& settings, const std::vector<std::string>& names, Options* o) {
  for (const Spec& s : specs()) {
    if (o->gives(s.name) || std::count(names.begin(), names.end(), s.name) == 0) continue;
    std::visit([&](auto member) { settings.at(key_of(s.name)).get_to(o->*member); }, s.member);
  }
}

std::string to_config(const Options& o) {
  const Options unset;
  std::string text;
  for (const Spec& s : specs()) {
    const nlohmann::json value = get(s, o);
    if (value == get(s, unset)) continue;
    text += strf("%s = %s\n", s.name,
                 value.is_string() ? in_quotes(value.get<std::string>()).c_str() : value.dump().c_str());
  }
  return text;
}
