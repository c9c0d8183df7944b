#include "lib/program/run.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "lib/program/json.h"
#include "lib/program/presets.h"

using ll = long long;

int64_t pieces_of_a_micro_batch(const ModelConfig& c, int64_t batch, Dtype dtype) {
  const int64_t M = batch * c.seq;
  const Pieces p = pieces_of(c, batch, size_of(dtype));
  return c.depth * ((M + p.hidden - 1) / p.hidden) + (M + p.logits - 1) / p.logits;
}

void check_config(const ModelConfig& c, int64_t batch, Backend backend, Dtype dtype) {
  if (c.attends()) {
    REQUIRE_USER(c.own_head_dim || c.dim % c.heads == 0, "--dim %lld is not divisible by --heads %lld; give --head-dim",
                 ll(c.dim), ll(c.heads));
    REQUIRE_USER(c.heads % c.kv_heads == 0, "--heads %lld is not divisible by --kv-heads %lld", ll(c.heads),
                 ll(c.kv_heads));
  }
  REQUIRE_USER(c.dim % 8 == 0, "--dim %lld is not a multiple of 8, which vector loads need", ll(c.dim));
  REQUIRE_USER(c.hidden % 8 == 0, "--hidden %lld is not a multiple of 8, which vector loads need", ll(c.hidden));
  REQUIRE_USER(batch * c.seq < int64_t(1) << 31,
               "--batch %lld x --seq %lld is more than 2^31 - 1 tokens per micro-batch", ll(batch), ll(c.seq));
  // A plan looks at each. So many of 512 MiB take a GPU about an hour a step at a dim of 4096.
  constexpr int64_t most_pieces = 1 << 17;
  const int64_t pieces = pieces_of_a_micro_batch(c, batch, dtype);
  REQUIRE_USER(
      pieces <= most_pieces,
      "--depth %lld with --batch %lld x --seq %lld tokens, --hidden %lld and --vocab %lld: a step would multiply "
      "%lld pieces of hidden layers and logits, and %lld is the most; lower one of them",
      ll(c.depth), ll(batch), ll(c.seq), ll(c.hidden), ll(c.vocab), ll(pieces), ll(most_pieces));
  const bool narrow_gpu = backend == Backend::gpu && dtype == Dtype::bf16;
  REQUIRE_USER(!narrow_gpu || c.vocab % 8 == 0,
               "--vocab %lld is not a multiple of 8, which bf16 on a GPU needs; use --vocab %lld", ll(c.vocab),
               ll((c.vocab + 7) / 8 * 8));
  REQUIRE_USER(c.attends() || c.recompute != Recompute::attn, "--recompute attn: architecture %s has no attention",
               name_of(c.arch));
  REQUIRE_USER(!c.keep_attention || c.attends(), "--keep-attention 1: architecture %s has no attention",
               name_of(c.arch));
  REQUIRE_USER(!c.save_fp8 || c.keeps_mlp(),
               "--save-dtype fp8 is about the MLP's hidden layer, which --recompute none and attn keep; drop one");
  REQUIRE_USER(!c.keep_attention || !c.keeps_queries(), "--keep-attention 1 needs --recompute attn, both or block");
  REQUIRE_USER(!c.keep_cheap || c.recompute == Recompute::none, "--keep-cheap 1 needs --recompute none");
  if (!c.attends()) return;
  const int64_t D = c.head_dim(), DV = c.v_head_dim();
  const std::string head = c.own_head_dim
                               ? strf("--head-dim %lld", ll(D))
                               : strf("head dim %lld (--dim %lld / --heads %lld)", ll(D), ll(c.dim), ll(c.heads));
  REQUIRE_USER(D % 8 == 0, "%s is not a multiple of 8", head.c_str());
  REQUIRE_USER(DV % 8 == 0, "--v-head-dim %lld is not a multiple of 8", ll(DV));
  const bool fits = backend == Backend::cpu || has_gpu_kernels(dtype, D, DV);
  REQUIRE_USER(fits || D == DV,
               "%s with --v-head-dim %lld: on a GPU values are as wide as keys, or 128 with keys of 192 in bf16",
               head.c_str(), ll(DV));
  REQUIRE_USER(fits || !narrow_gpu, "%s: bf16 attention on a GPU supports 64 and 128, and 192 with --v-head-dim 128",
               head.c_str());
  REQUIRE_USER(fits, "%s: attention on a GPU supports at most 128", head.c_str());
  if (c.sparse) check_nsa(c.nsa_shape(batch));
}

static const char* fp8_option(const ModelConfig& c) { return c.fp8 ? "--matmul-dtype" : "--save-dtype"; }

std::string fp8_text(const ModelConfig& c) {
  std::vector<std::string> what;
  if (c.fp8) what.push_back(c.fp8_scaling == fp8::Scaling::row ? "matmuls scaled by row" : "matmuls");
  if (c.gather_fp8) what.push_back("gathers");
  if (c.save_fp8) what.push_back("saved hidden layers");
  std::string text;
  for (size_t i = 0; i < what.size(); i++) text += (i == 0 ? "" : i + 1 < what.size() ? ", " : " and ") + what[i];
  return text.empty() ? "" : ", " + text + " in fp8";
}
void check_gpu(const ModelConfig& c, int compute_capability, const std::string& gpu) {
  const fp8::Support has = fp8::support(compute_capability);
  REQUIRE_USER(!(c.fp8 || c.save_fp8) || has != fp8::Support::none,
               "%s fp8: %s has no fp8, which came with compute capability 8.9; use %s off", fp8_option(c), gpu.c_str(),
               fp8_option(c));
  REQUIRE_USER(c.fp8_scaling == fp8::Scaling::tensor || has == fp8::Support::by_row,
               "--fp8-scaling row: cuBLASLt supports it on compute capability 9.0 only (H100, H200), not on %s; use "
               "--fp8-scaling tensor",
               gpu.c_str());
  REQUIRE_USER(!c.attends() || c.head_dim() <= 128 || !has_small_memory(compute_capability),
               "--head-dim %lld: its kernels need more than the 99 KiB of shared memory that a block has on %s; use "
               "--head-dim 128",
               ll(c.head_dim()), gpu.c_str());
}

namespace {

// Tensor cores take fp8 in rows of 16 bytes, and so do the transposes that the gradients need.
void check_fp8_sizes(const ModelConfig& c, int64_t batch, Dtype dtype) {
  REQUIRE_USER(dtype == Dtype::bf16, "%s fp8: on a GPU it takes what bf16 holds; drop --param-dtype %s", fp8_option(c),
               name_of(dtype));
  const auto check = [&](int64_t size, const char* what) {
    REQUIRE_USER(size % 16 == 0, "%s fp8: %s = %lld is not a multiple of 16, which fp8 on a GPU needs", fp8_option(c),
                 what, ll(size));
  };
  check(c.hidden, "--hidden"), check(batch * c.seq, "--batch x --seq");
  REQUIRE_USER(batch * c.seq <= ops::fp8_most_rows,
               "%s fp8: --batch x --seq = %lld is more than the %lld tokens that a cast to fp8 takes; lower --batch",
               fp8_option(c), ll(batch * c.seq), ll(ops::fp8_most_rows));
  if (!c.fp8) return;
  check(c.dim, "--dim");
  if (!c.attends()) return;
  check(c.heads * c.v_head_dim(), "the width of all heads");
  check(c.row(), c.sparse ? "the width of q, k, v and NSA's gates (another --nsa-gate or --heads makes another)"
                          : "the width of q, k and v");
}

// Units that have weights of fp8 matmuls, and of those the ones that are gathered in fp8.
struct Fp8Units {
  int64_t with = 0, gathered = 0;
};
Fp8Units fp8_units(const ModelConfig& c, int shards) {
  std::vector<Unit> units = parameter_table(c);
  Fp8Units n;
  for (const Unit& u : units)
    n.with += std::any_of(u.params.begin(), u.params.end(), [](const Param& p) { return p.fp8; });
  lay_out(&units, shards);
  for (const Unit& u : units) n.gathered += u.in_fp8 > 0;
  return n;
}
const char* remedy_for_gather_fp8(ModelConfig c, int shards) {
  for (const auto& [wrap, text] :
       {std::pair(Wrap::block, "use --wrap block"), std::pair(Wrap::sublayer, "use --wrap sublayer")}) {
    c.wrap = wrap;
    if (fp8_units(c, shards).gathered > 0) return text;
  }
  return "drop it";
}

void check_gather_fp8(Run* r, int shards) {
  const Options& o = r->o;
  if (o.gather_dtype.empty()) return;
  REQUIRE_USER(!o.matmul_dtype.empty(),
               "--gather-dtype fp8 gathers the weights of fp8 matmuls; add --matmul-dtype fp8");
  REQUIRE_USER(o.fp8_scaling == "tensor",
               "--gather-dtype fp8 supports per-tensor scales only, since a rank casts a part of each tensor; drop "
               "--fp8-scaling row");
  REQUIRE_USER(o.autocast.empty(), "--gather-dtype fp8: --autocast gathers in fp32; drop one");
  REQUIRE_USER(o.freeze.empty(), "--gather-dtype fp8 does not support frozen parameters; drop --freeze");
  const Fp8Units units = fp8_units(r->model, shards);
  REQUIRE_USER(units.gathered > 0,
               "--gather-dtype fp8 saves nothing over %d rank%s: in every unit the parameters outside fp8 matmuls "
               "outweigh the saving; %s",
               shards, shards == 1 ? "" : "s", remedy_for_gather_fp8(r->model, shards));
  if (units.gathered < units.with)
    r->notices.push_back(
        strf("--gather-dtype fp8: %lld of %lld units are gathered in %s, since their parameters "
             "outside fp8 matmuls outweigh the saving",
             ll(units.with - units.gathered), ll(units.with), name_of(r->dtype)));
}

// A number of decimal digits, below 10^digits; 0: it is none.
int small_number(const std::string& text, size_t digits) {
  const bool number = text.size() <= digits && text.find_first_not_of("0123456789") == std::string::npos;
  return number ? std::atoi(text.c_str()) : 0;
}

std::vector<std::string> split(const std::string& names) {
  std::vector<std::string> all;
  for (size_t at = 0; at < names.size();) {
    const size_t end = std::min(names.find(',', at), names.size());
    if (end > at) all.push_back(names.substr(at, end - at));
    at = end + 1;
  }
  return all;
}

// Of a shard group; 0: all.
int shard_ranks(const Options& o, int world_size) {
  const std::string hybrid = "hybrid:";
  if (o.shard.rfind(hybrid, 0) != 0) {
    REQUIRE_USER(o.shard == "full" || o.shard == "grad" || o.shard == "none",
                 "--shard %s: choose full, grad, none or hybrid:K", o.shard.c_str());
    return o.shard == "none" ? 1 : 0;
  }
  const int ranks = small_number(o.shard.substr(hybrid.size()), 6);
  REQUIRE_USER(ranks > 0, "--shard %s: K must be a number of ranks, as in hybrid:2", o.shard.c_str());
  REQUIRE_USER(world_size % ranks == 0, "--shard %s: groups of %d do not divide %d rank%s", o.shard.c_str(), ranks,
               world_size, world_size == 1 ? "" : "s");
  return ranks;
}

// 0: one for each unit.
int gather_slots(const Options& o, int otherwise) {
  const std::string& n = o.limit_all_gathers;
  if (n.empty()) return otherwise;
  if (n == "off") return 0;
  const int slots = small_number(n, 2);
  REQUIRE_USER(slots >= 1 && slots <= 64, "--limit-all-gathers %s: choose 1 to 64 slots, or off", n.c_str());
  return slots;
}

// Small gradients are reduced in no time, and a few thread blocks are enough to hide that. On an H100 or H200 4 of 132
// SMs leave 128, which is a whole wave of many a product's tiles. Larger ones, a vocabulary's among them, would be
// waited for: beside small ones they get 16, alone what NCCL likes.
void choose_ctas(const Run& r, int shards, FsdpOptions* f) {
  constexpr int few = 4, some = 16;
  std::vector<Unit> units = parameter_table(r.model);
  lay_out(&units, shards);
  int small = 0, large = 0;
  for (const Unit& u : units) {
    const int64_t bytes = u.with_gradient.padded * size_of(r.reduce_dtype);
    if (bytes > 0 && !u.replicated) (bytes <= FsdpOptions::small_gradient ? small : large)++;
  }
  if (large == 0) f->reduce_ctas = few;
  else if (small > 0 && !f->reduce_by_copy_engine) f->small_reduce_ctas = few, f->reduce_ctas = some;
}

// The knobs of sharding. gathered: the dtype in which parameters are gathered.
void shard(const Options& o, int world_size, Dtype gathered, Run* r) {
  FsdpOptions& f = r->fsdp;
  ModelConfig& m = r->model;
  f.shard_ranks = shard_ranks(o, world_size);
  const bool keeps = o.shard == "grad" || o.shard == "none" || o.reshard_after_forward == 0;
  f.reshard_after_forward = !keeps;
  f.gather_slots = gather_slots(o, f.gather_slots);
  f.gradient_slots = int(o.gradient_slots);
  f.reduce_dtype = r->reduce_dtype;
  f.gather_wide = !o.autocast.empty();
  f.moment_dtype = o.moments == "bf16" ? Dtype::bf16 : Dtype::f32;
  f.reduce_last = o.accum_sync == "last";
  f.update_in_backward = o.optimizer_in_backward == 1;
  f.norm = o.clip_norm == "inf" ? ops::GradNorm::inf : ops::GradNorm(std::atoi(o.clip_norm.c_str()));
  f.unsharded_init = o.meta_init == 0;
  f.gather_over_mpi = o.gather == "mpi";
  f.gather_by_copy_engine = o.gather == "copy-engine";
  f.reduce_by_copy_engine = o.reduce == "copy-engine";
  f.seed = o.seed;

  m.wrap = value_of(wrap_names, o.wrap);
  m.wrap_min_params = o.wrap_min_params;
  m.bucket_params = (o.bucket_mb << 20) / size_of(gathered);
  m.replicate_below = (o.replicate_below + size_of(gathered) - 1) / size_of(gathered);
  m.tied = o.tie_embeddings;
  m.frozen = split(o.freeze);
  // Slots that are asked for are to be used.
  const int slots_ahead = f.gather_slots ? std::max(1, f.gather_slots - 1) : 1 << 20;
  m.forward_prefetch = o.forward_prefetch >= 0 ? int(o.forward_prefetch) : slots_ahead;
  m.backward_prefetch = value_of(backward_prefetch_names, o.backward_prefetch);
}

RopeScaling rope_scaling(const std::string& text) {
  RopeScaling s;
  if (text == "none") return s;
  char end = 0;
  ll original = 0;
  const int read = std::sscanf(text.c_str(), "llama3:%lf:%lf:%lf:%lld%c", &s.factor, &s.low_freq_factor,
                               &s.high_freq_factor, &original, &end);
  s.original_seq = original;
  REQUIRE_USER(read == 4 && s.factor > 1 && s.factor <= 1e6 && s.low_freq_factor > 0 &&
                   s.high_freq_factor > s.low_freq_factor && s.high_freq_factor <= 1e6 && original > 0,
               "--rope-scaling %s: choose none, or llama3:FACTOR:LOW:HIGH:ORIGINAL with a factor above 1, LOW below "
               "HIGH, and the length of text that the model was first trained with, as in llama3:8:1:4:8192",
               text.c_str());
  return s;
}

int64_t or_else(int64_t given, int64_t otherwise) { return given ? given : otherwise; }

Dtype or_else(const std::string& name, Dtype otherwise) {
  return name.empty() ? otherwise : name == "bf16" ? Dtype::bf16 : Dtype::f32;
}

ModelConfig resolve_model(const Options& o, const ModelConfig& preset) {
  ModelConfig m = preset;
  if (!o.arch.empty()) m.arch = value_of(arch_names, o.arch);
  m.dim = or_else(o.dim, m.dim), m.depth = or_else(o.depth, m.depth), m.vocab = or_else(o.vocab, m.vocab);
  m.heads = or_else(o.heads, m.heads), m.kv_heads = or_else(o.kv_heads, m.kv_heads);
  m.own_head_dim = o.head_dim, m.own_v_head_dim = o.v_head_dim;
  m.seq = or_else(o.seq, m.seq);
  m.rope = {o.rope_base, rope_scaling(o.rope_scaling)}, m.norm_eps = o.norm_eps;
  // A width given alone keeps the preset's proportion of the MLP.
  m.hidden = or_else(o.hidden, o.dim ? preset.hidden * m.dim / preset.dim : m.hidden);

  REQUIRE_USER(o.attn.empty() || m.attends(), "--attn %s: architecture %s has no attention", o.attn.c_str(),
               name_of(m.arch));
  for (const char* name : {"heads", "kv-heads", "head-dim", "v-head-dim"})
    REQUIRE_USER(m.attends() || !o.gives(name), "--%s: architecture %s has no attention", name, name_of(m.arch));
  m.sparse = m.attends() && o.attn != "dense";
  for (const char* name : {"nsa-block", "nsa-stride", "nsa-select-block", "nsa-selected", "nsa-window", "nsa-phi",
                           "nsa-gate", "nsa-stats"})
    REQUIRE_USER(m.sparse || !o.gives(name), "--%s needs --attn nsa; this run has %s", name,
                 m.attends() ? "dense attention" : "no attention");
  const bool rotates = m.arch == Arch::rope || m.arch == Arch::llama;
  for (const char* name : {"rope-base", "rope-scaling"})
    REQUIRE_USER(rotates || !o.gives(name), "--%s: architecture %s has no RoPE", name, name_of(m.arch));
  m.nsa.block = o.nsa_block, m.nsa.stride = o.nsa_stride, m.nsa.select_block = o.nsa_select_block;
  m.nsa.selected = o.nsa_selected, m.nsa.window = o.nsa_window, m.nsa.phi = value_of(phi_names, o.nsa_phi);
  m.nsa_gate = value_of(nsa_gate_names, o.nsa_gate);
  m.diagnostics = o.nsa_stats || (m.sparse && !o.diagnostics.empty());
  m.recompute = value_of(recompute_names, o.recompute), m.keep_attention = o.keep_attention == 1;
  m.keep_cheap = o.keep_cheap == 1;
  return m;
}

void resolve_batch(const Options& o, const Preset& p, int world_size, Run* r) {
  // A preset's accumulation holds as long as nothing is said about batches.
  const bool batch_said = o.batch || o.global_batch || o.gives("grad-accum");
  r->grad_accum = batch_said ? o.grad_accum : p.grad_accum;
  const int64_t places = world_size * r->grad_accum;
  r->batch = o.batch ? o.batch : o.global_batch ? (o.global_batch + places - 1) / places : p.batch;
  r->global_batch = o.global_batch ? o.global_batch : r->batch * places;
  // Rows are dealt out rank by rank, so the first ranks may hold one more.
  const int64_t most = (r->global_batch + world_size - 1) / world_size;
  if (o.keeps_global_batch && most != r->batch * r->grad_accum) {
    r->batch = std::min(r->batch, most), r->grad_accum = (most + r->batch - 1) / r->batch;
    r->batch = (most + r->grad_accum - 1) / r->grad_accum;
    r->notices.push_back(strf("--batch %lld --grad-accum %lld on %d rank%s keeps the checkpoint's global batch of %lld",
                              ll(r->batch), ll(r->grad_accum), world_size, world_size == 1 ? "" : "s",
                              ll(r->global_batch)));
  }
  REQUIRE_USER(
      most <= r->batch * r->grad_accum,
      "--global-batch %lld: %d ranks x --batch %lld x --grad-accum %lld hold only %lld sequences; use --grad-accum "
      "%lld",
      ll(r->global_batch), world_size, ll(r->batch), ll(r->grad_accum), ll(places * r->batch),
      ll((most + r->batch - 1) / r->batch));
}

void check_frozen(const ModelConfig& m, const std::string& freeze) {
  const std::vector<Unit> units = parameter_table(m);
  for (const std::string& some : m.frozen) {
    bool any = false;
    for (const Unit& u : units)
      for (const Param& p : u.params) any = any || is_among(p.name, some);
    REQUIRE_USER(any, "--freeze %s: no parameter and no module has that name; --show-params lists the names",
                 some.c_str());
  }
  REQUIRE_USER(freeze.empty() || !m.frozen.empty(), "--freeze %s: it names no parameter; --show-params lists the names",
               freeze.c_str());
  REQUIRE_USER(std::any_of(units.begin(), units.end(), [](const Unit& u) { return u.trained(); }),
               "--freeze %s: nothing is left to train; drop a name", freeze.c_str());
}

// limit: steps that --tokens or --epochs leaves; 0: neither is given.
void resolve_schedule(const Options& o, int64_t limit, Run* r) {
  r->steps = o.steps ? o.steps : limit ? limit : r->backend == Backend::gpu ? 200 : 32;
  r->last_step = r->steps;
  if (limit) r->last_step = std::min(r->last_step, limit);
  if (o.stop_after >= 0) r->last_step = std::min(r->last_step, o.stop_after);
  r->warmup = o.warmup >= 0 ? o.warmup : std::min<int64_t>(100, r->steps / 10);
  const auto beyond = [&](const char* option, int64_t given, int64_t steps, const char* so) {
    if (given > steps)
      r->notices.push_back(
          strf("--%s %lld: the run has %lld step%s: %s", option, ll(given), ll(steps), steps == 1 ? "" : "s", so));
  };
  beyond("warmup", o.warmup, r->steps, "it never reaches --lr");
  if (r->last_step == 0) return;  // nothing is trained, and it is known
  beyond("stop-after", o.stop_after, r->last_step, "it does not stop early");
  beyond("val-every", o.val_every, r->last_step, "nothing is validated");
  beyond("sample-every", o.sample_every, r->last_step, "no samples are drawn");
}

// Steps in a row that may be skipped; 0: stop at the first.
int64_t nan_skips(const Options& o) {
  const std::string skip = "skip:";
  if (o.on_nan == "stop") return 0;
  const int64_t k = o.on_nan == "skip" ? 10 : o.on_nan.rfind(skip, 0) == 0 ? small_number(o.on_nan.substr(5), 6) : 0;
  REQUIRE_USER(k > 0, "--on-nan %s: choose stop, skip, or skip:K for at most K steps in a row", o.on_nan.c_str());
  REQUIRE_USER(o.optimizer_in_backward == 0,
               "--on-nan %s: with --optimizer-in-backward 1 a step is applied before its norm is known; use --on-nan "
               "stop",
               o.on_nan.c_str());
  return k;
}

}  // namespace

Run resolve(const Options& o, int world_size, int gpus, const Trained& before) {
  Run r;
  r.o = o, r.notices = o.warnings, r.before = before;
  const bool only_planned = o.plan || o.show_schedule;
  REQUIRE_USER(o.device != "gpu" || gpus > 0 || only_planned,
               FSDP_CUDA ? "--device gpu: no GPU that this process can use (nvidia-smi lists the machine's); "
                           "use --device cpu"
                         : "--device gpu: built without CUDA; install CUDA and rebuild, or use --device cpu");
  const bool gpu = o.device == "gpu" || (o.device == "auto" && (gpus > 0 || only_planned));
  r.backend = gpu ? Backend::gpu : Backend::cpu;
  const Preset p = preset_named(!o.preset.empty() ? o.preset : gpu ? "m7c" : "tiny");
  r.preset = o.init.empty() ? p.name : "";
  if (!gpu && o.device == "auto")
    r.notices.push_back(strf("no GPU found: training %s in %s on the CPU",
                             r.preset.empty() ? o.init.c_str() : ("preset " + r.preset).c_str(),
                             o.param_dtype.empty() ? "fp32" : o.param_dtype.c_str()));
  r.model = resolve_model(o, p.model);
  const bool autocast = !o.autocast.empty();
  r.dtype = autocast ? Dtype::bf16 : or_else(o.param_dtype, gpu ? Dtype::bf16 : Dtype::f32);
  r.reduce_dtype = or_else(o.reduce_dtype, autocast ? Dtype::f32 : r.dtype);
  if (o.tf32 && (!gpu || r.dtype != Dtype::f32))
    r.notices.push_back(std::string("--tf32 has no effect") +
                        (gpu ? strf(": matmuls run in %s", name_of(r.dtype)) : " on the CPU"));
  if (o.gives("tune-matmul") && !gpu) r.notices.push_back("--tune-matmul has no effect on the CPU");
  shard(o, world_size, autocast ? Dtype::f32 : r.dtype, &r);
  resolve_batch(o, p, world_size, &r);
  if (o.accum_sync == "last" && r.grad_accum == 1)
    r.notices.push_back("--accum-sync last has no effect: a step is one micro-batch");
  r.nan_skips = nan_skips(o);
  r.model.fp8 = o.matmul_dtype == "fp8", r.model.save_fp8 = o.save_dtype == "fp8";
  r.model.fp8_scaling = o.fp8_scaling == "row" ? fp8::Scaling::row : fp8::Scaling::tensor;
  r.model.gather_fp8 = o.gather_dtype == "fp8";
  REQUIRE_USER(r.model.fp8 || o.fp8_scaling == "tensor", "--fp8-scaling %s scales fp8 matmuls; add --matmul-dtype fp8",
               o.fp8_scaling.c_str());
  check_config(r.model, r.batch, r.backend, r.dtype);
  if ((r.model.fp8 || r.model.save_fp8) && gpu) check_fp8_sizes(r.model, r.batch, r.dtype);
  REQUIRE_USER(double(r.global_batch) * double(r.model.seq) < 9e15,
               "%d ranks x --batch %lld x --grad-accum %lld x --seq %lld are more than 9e15 tokens a step", world_size,
               ll(r.batch), ll(r.grad_accum), ll(r.model.seq));
  check_frozen(r.model, o.freeze);
  check_gather_fp8(&r, r.fsdp.shards(world_size));
  if (o.reduce_ctas >= 0) r.fsdp.reduce_ctas = int(o.reduce_ctas);
  else if (gpu) choose_ctas(r, r.fsdp.shards(world_size), &r.fsdp);
  REQUIRE_USER(o.epochs == 0 || o.data != "random", "--epochs %g: --data random has no end; use --steps or --tokens",
               o.epochs);
  const int64_t left = std::max<int64_t>(0, o.tokens - before.tokens);
  resolve_schedule(o, o.tokens ? before.steps + (left + r.tokens_per_step() - 1) / r.tokens_per_step() : 0, &r);
  return r;
}

void limit_epochs(int64_t sequences, Run* r) {
  const double steps = r->o.epochs * double(sequences) / double(r->global_batch);
  if (steps == 0) return;
  const int64_t whole = int64_t(std::floor(steps * (1 + 1e-12)));  // 0.1 is not quite a tenth
  REQUIRE_USER(
      whole > 0,
      "--epochs %g of the data are %.3g sequences, fewer than the %lld of a step; use more epochs or a smaller "
      "global batch",
      r->o.epochs, r->o.epochs * double(sequences), ll(r->global_batch));
  resolve_schedule(r->o, whole, r);
}

void check_collectives(const Run& r, Transport transport, bool one_host) {
  const Options& o = r.o;
  REQUIRE_USER(o.graph == 0 || (r.backend == Backend::gpu && transport != Transport::mpi),
               "--graph 1 needs NCCL and one GPU per rank; %s",
               r.backend == Backend::gpu ? "collectives go over MPI here" : "this run is on the CPU");
  REQUIRE_USER(o.gather.empty() || o.gather == "mpi" || transport != Transport::mpi,
               "--gather %s needs NCCL and one GPU per rank", o.gather.c_str());
  REQUIRE_USER(o.gather.empty() || o.gather == "mpi" || r.backend == Backend::gpu,
               "--gather %s needs GPUs; this run is on the CPU", o.gather.c_str());
  // On CPUs MPI plays the copy engines.
  const bool gpu = r.backend == Backend::gpu;
  REQUIRE_USER(o.reduce.empty() || transport != Transport::mpi || (o.reduce == "copy-engine" && !gpu),
               "--reduce %s needs NCCL and one GPU per rank", o.reduce.c_str());
  REQUIRE_USER(o.reduce_ctas <= 0 || transport == Transport::nccl,
               "--reduce-ctas %lld is for NCCL, and %s: leave it out", static_cast<long long>(o.reduce_ctas),
               transport == Transport::none ? "one rank reduces nothing" : "gradients go over MPI here");
  REQUIRE_USER(o.reduce != "copy-engine" || transport == Transport::none || r.fsdp.shard_ranks != 1,
               "--reduce copy-engine sends each shard's gradient to its owner; with --shard %s nothing is sharded, and "
               "gradients are all-reduced: drop one of them",
               o.shard.c_str());
  for (const auto& [option, how] : {std::pair("gather", &o.gather), std::pair("reduce", &o.reduce)})
    REQUIRE_USER(
        *how != "copy-engine" || !gpu || one_host,
        "--%s copy-engine: a shard group spans several hosts, and copy engines reach only their own; use --shard "
        "hybrid:K with K ranks of one host",
        option);
}

void choose_collectives(Run* r, int ranks, Transport transport, bool one_host, bool engines_pay) {
  check_collectives(*r, transport, one_host);
  if (r->o.gather.empty())
    r->fsdp.gather_by_copy_engine =
        transport == Transport::nccl && one_host && engines_pay && r->fsdp.shards(ranks) > 1;
  const int shards = r->fsdp.shards(ranks);
  const bool readable = r->fsdp.can_map_peers(ranks);
  REQUIRE_USER(
      r->o.reduce_tail != "peer" || readable,
      "--reduce-tail peer reads gradients where --gather copy-engine maps them, among 2 to %d ranks; %s: use "
      "--reduce-tail same",
      most_peers,
      r->fsdp.gather_by_copy_engine ? strf("there are %d", shards).c_str() : "copy engines gather nothing here");
  const bool measured = shards <= measured_peers;
  r->fsdp.fetch = readable && measured;
  r->fsdp.read_tail = readable && (r->o.reduce_tail.empty() ? measured : r->o.reduce_tail == "peer");
  // Ranks that fetch reduce as fast by copy engines as by rings, or faster (results/gpu-tests-2026-11-27.log). Not
  // measured: AdamW in the backward pass, and replicas.
  const bool open = r->o.reduce.empty() && r->o.reduce_ctas == -1;
  if (open && r->fsdp.fetch && ranks == shards && !r->fsdp.update_in_backward) {
    r->fsdp.reduce_by_copy_engine = true;
    r->fsdp.reduce_ctas = r->fsdp.small_reduce_ctas = 0;  // of what is left, the scalars
  }
}

nlohmann::json settings(const Run& r) {
  nlohmann::json j = to_json(r.o);
  const ModelConfig& m = r.model;
  j.update({{"preset", r.preset},
            {"arch", name_of(m.arch)},
            {"attn", m.sparse      ? "nsa"
                     : m.attends() ? "dense"
                                   : ""},
            {"dim", m.dim},
            {"depth", m.depth},
            {"heads", m.heads},
            {"kv_heads", m.kv_heads},
            {"head_dim", m.attends() ? m.head_dim() : 0},
            {"v_head_dim", m.attends() ? m.v_head_dim() : 0},
            {"hidden", m.hidden},
            {"vocab", m.vocab},
            {"seq", m.seq},
            {"batch", r.batch},
            {"grad_accum", r.grad_accum},
            {"global_batch", r.global_batch},
            {"steps", r.steps},
            {"warmup", r.warmup},
            {"param_dtype", name_of(r.dtype)},
            {"reduce_dtype", name_of(r.reduce_dtype)},
            {"device", r.backend == Backend::gpu ? "gpu" : "cpu"}});
  return j;
}
