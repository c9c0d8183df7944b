#include "model.h"

#include <algorithm>
#include <cmath>

const char* name_of(Arch a) {
  static const char* names[] = {"simple", "rope", "llama", "mlp"};
  return names[int(a)];
}

Arch arch_named(const std::string& name) {
  for (Arch a : {Arch::simple, Arch::rope, Arch::llama, Arch::mlp})
    if (name == name_of(a)) return a;
  throw UsageError("unknown architecture '" + name + "': simple, rope, llama and mlp there are");
}

const Preset& preset_named(const std::string& name) {
  //                          arch         dim  depth  h  kv  hidden  vocab   seq          batch, accumulation
  static const Preset table[] = {
      {"tiny", {Arch::rope, 128, 2, 2, 1, 512, 256, 512}, 1, 1},
      {"simple", {Arch::simple, 4096, 4, 32, 8, 16384, 32768, 4096}, 8, 1},
      {"rope", {Arch::rope, 4096, 4, 32, 8, 16384, 32768, 4096}, 8, 1},
      {"class", {Arch::simple, 768, 6, 12, 12, 3072, 32000, 256}, 8, 2},
      {"m7c", {Arch::rope, 768, 12, 12, 2, 3072, 256, 2048}, 1, 1},
      {"mlp-1024", {Arch::mlp, 1024, 3, 1, 1, 4096, 32768, 1024}, 8, 1},
      {"mlp-4096", {Arch::mlp, 4096, 4, 1, 1, 16384, 32768, 4096}, 8, 1},
      {"llama-1b", {Arch::llama, 2048, 16, 32, 8, 8192, 128256, 4096}, 2, 1},
      {"llama-8b", {Arch::llama, 4096, 32, 32, 8, 14336, 128256, 8192}, 1, 1},
      {"llama-47b", {Arch::llama, 8192, 54, 64, 8, 28672, 32768, 2048}, 1, 1},
  };
  for (const Preset& p : table)
    if (name == p.name) return p;
  throw UsageError("unknown preset '" + name + "'; see --help");
}

void check_config(const ModelConfig& c, int64_t batch, Backend backend, Dtype dtype) {
  auto ll = [](int64_t n) { return static_cast<long long>(n); };
  if (c.attends()) {
    REQUIRE_USER(c.dim % c.heads == 0, "--dim %lld is not divisible by --heads %lld", ll(c.dim), ll(c.heads));
    REQUIRE_USER(c.heads % c.kv_heads == 0, "--heads %lld is not divisible by --kv-heads %lld", ll(c.heads),
                 ll(c.kv_heads));
  }
  REQUIRE_USER(c.dim % 8 == 0, "--dim %lld is not a multiple of 8, which vector loads need", ll(c.dim));
  REQUIRE_USER(c.hidden % 8 == 0, "--hidden %lld is not a multiple of 8, which vector loads need", ll(c.hidden));
  REQUIRE_USER(batch * c.seq < int64_t(1) << 31, "--batch %lld x --seq %lld is more than 2^31 - 1 tokens a micro-batch",
               ll(batch), ll(c.seq));
  const bool narrow_gpu = backend == Backend::gpu && dtype == Dtype::bf16;
  REQUIRE_USER(!narrow_gpu || c.vocab % 8 == 0,
               "--vocab %lld is not a multiple of 8, which bf16 on a GPU needs; --vocab %lld leaves the rest unused",
               ll(c.vocab), ll((c.vocab + 7) / 8 * 8));
  REQUIRE_USER(c.attends() || c.recompute != Recompute::attn, "--recompute attn: architecture %s has no attention",
               name_of(c.arch));
  REQUIRE_USER(!c.keep_attention || (!c.keeps_queries() && c.attends()),
               "--keep-attention 1: %s; it is for --recompute attn, both and block",
               c.attends() ? "attention is not recomputed" : "there is no attention");
  if (!c.attends()) return;
  const int64_t D = c.head_dim();
  REQUIRE_USER(D % 8 == 0, "head dim %lld (--dim %lld / --heads %lld) is not a multiple of 8", ll(D), ll(c.dim),
               ll(c.heads));
  REQUIRE_USER(!narrow_gpu || D == 64 || D == 128,
               "head dim %lld (--dim %lld / --heads %lld): attention in bf16 on a GPU is made for 64 and 128", ll(D),
               ll(c.dim), ll(c.heads));
  REQUIRE_USER(backend == Backend::cpu || D <= 128,
               "head dim %lld (--dim %lld / --heads %lld): attention on a GPU goes up to 128", ll(D), ll(c.dim),
               ll(c.heads));
  if (c.sparse) check_nsa(c.nsa_shape(batch));
}

NsaShape ModelConfig::nsa_shape(int64_t batch) const {
  NsaShape n = nsa;
  n.B = batch, n.T = seq, n.H = heads, n.HKV = kv_heads, n.D = head_dim();
  n.ld = row(), n.scale = 1 / std::sqrt(double(n.D));
  return n;
}

// ------------------------------------------------------------------------------------------------------ parameters

namespace {

// All parameters in the order of the forward pass, which numbers them: initial weights do not depend on units.
std::vector<Param> all_parameters(const ModelConfig& c) {
  std::vector<Param> params;
  std::string prefix;
  int module = 0;
  auto add = [&](const std::string& name, std::vector<int64_t> shape, double mean, double std, bool joined = false) {
    Param p = {};
    p.name = prefix + "." + name;
    p.decay = shape.size() > 1;
    p.joined = joined;
    p.shape = std::move(shape);
    p.mean = float(mean), p.std = float(std);
    p.module = module;
    p.id = uint32_t(params.size());
    p.numel = 1;
    for (int64_t n : p.shape) p.numel *= n;
    for (const std::string& start : c.frozen) p.frozen = p.frozen || p.name.compare(0, start.size(), start) == 0;
    params.push_back(std::move(p));
  };
  // Small init (Nguyen & Salazar 2019), and 1/sqrt(2L) on what writes into the residual stream (Radford et al. 2019).
  // Where positions are added to the embedding, or no norm comes before its first use, the embedding must be as large
  // as they are.
  const double small = std::sqrt(2.0 / (5.0 * double(c.dim))), into_stream = small / std::sqrt(2.0 * double(c.depth));
  const bool biases = c.arch == Arch::simple, layer_norm = biases || c.arch == Arch::mlp;
  const int64_t C = c.dim, F = c.hidden;
  auto norm = [&](const std::string& name) {
    add(name, {C}, 1, 0);
    if (layer_norm) add(name + ".bias", {C}, 0, 0);
  };
  prefix = "embedding";
  add("weight", {c.vocab, C}, 0, layer_norm && !c.tied ? 1 : small);
  for (int64_t i = 0; i < c.depth; i++) {
    prefix = strf("block.%lld", static_cast<long long>(i));
    if (c.attends()) {
      module = c.attention_module(i);
      const int64_t D = c.head_dim();
      // Neighbours, so that one product makes them all.
      add("attention.q", {c.heads * D, C}, 0, small);
      const std::vector<const char*> branches =
          c.sparse ? std::vector<const char*>{"_compressed", "_selected", "_window"} : std::vector<const char*>{""};
      for (const char* kind : {"attention.k", "attention.v"})
        for (const char* branch : branches) add(std::string(kind) + branch, {c.kv_heads * D, C}, 0, small, true);
      if (c.sparse) {
        add("attention.gate", {c.gates(), C}, 0, small, true);
        // phi, for keys and for values.
        const int64_t wide = c.nsa.block * D;
        for (const char* of : {"attention.phi_k", "attention.phi_v"}) {
          if (c.nsa.phi == Phi::linear) add(std::string(of) + ".w1", {c.kv_heads * D, wide}, 0, 1 / std::sqrt(wide));
          if (c.nsa.phi != Phi::mlp) continue;
          add(std::string(of) + ".w1", {c.kv_heads * 2 * D, wide}, 0, 1 / std::sqrt(wide));
          add(std::string(of) + ".w2", {c.kv_heads * D, 2 * D}, 0, 1 / std::sqrt(2 * D));
        }
      }
      add("attention.o", {C, c.heads * D}, 0, into_stream);
      norm("norm1");
      if (c.sparse) {
        add("attention.gate.bias", {c.gates()}, 0, 0);  // gates start at one half
        if (c.nsa.phi != Phi::mean)
          for (const char* of : {"attention.phi_k", "attention.phi_v"})
            add(std::string(of) + ".position", {c.kv_heads * c.nsa.block * D}, 0, 0.02);
      }
    }
    module = c.mlp_module(i);
    if (c.arch == Arch::llama) add("mlp.gate", {F, C}, 0, small);
    add("mlp.up", {F, C}, 0, small, c.arch == Arch::llama);
    add("mlp.down", {C, F}, 0, into_stream);
    if (c.attends()) norm("norm2");
    if (biases) add("mlp.up.bias", {F}, 0, 0), add("mlp.down.bias", {C}, 0, 0);
  }
  prefix = "head", module = c.modules() - 1;
  if (!c.tied) add("weight", {c.vocab, C}, 0, small);
  norm("norm");
  return params;
}

// The unit of each module, counted in the order of the forward pass. sizes: parameters of each module.
std::vector<int> wrap(const ModelConfig& c, const std::vector<int64_t>& sizes) {
  const int n = c.modules();
  std::vector<int> unit_of(static_cast<size_t>(n));
  int unit = -1;
  int64_t size = 0;  // of the unit that small modules are being put into; 0: none is open
  for (int m = 0; m < n; m++) {
    const int64_t own = sizes[size_t(m)];
    bool begins = true;
    if (c.wrap == Wrap::single) begins = m == 0;
    if (c.wrap == Wrap::block) begins = m == 0 || m == n - 1 || !c.attends() || m % 2 == 1;
    if (c.wrap == Wrap::size) {
      const bool small = own < c.wrap_min_params;
      begins = !small || size == 0 || (c.bucket_params > 0 && size + own > c.bucket_params);
      size = !small ? 0 : begins ? own : size + own;
      if (size >= c.wrap_min_params) size = 0;
    }
    unit += begins;
    unit_of[size_t(m)] = unit;
  }
  if (c.tied) unit_of.back() = unit_of.front();
  return unit_of;
}

// The module that the backward pass ends with, the first of a block: nothing before it is trained.
int last_of_backward(const ModelConfig& c) {
  int m = c.modules() - 1;
  for (const Param& p : all_parameters(c))
    if (!p.frozen) m = std::min(m, p.module);
  return c.attends() && m > 0 && m < c.modules() - 1 && m % 2 == 0 ? m - 1 : m;
}

bool of_phi(const Param& p) { return p.name.find(".phi_") != std::string::npos; }

std::string module_name(const ModelConfig& c, int m) {
  if (m == 0) return "embedding";
  if (m == c.modules() - 1) return "head";
  const int block = c.attends() ? (m - 1) / 2 : m - 1;
  if (!c.attends()) return strf("block.%d", block);
  return strf("block.%d.%s", block, m % 2 ? "attention" : "mlp");
}

}  // namespace

std::vector<Unit> parameter_table(const ModelConfig& c) {
  const std::vector<Param> params = all_parameters(c);
  std::vector<int64_t> sizes(static_cast<size_t>(c.modules()));
  for (const Param& p : params) sizes[size_t(p.module)] += p.numel;
  const std::vector<int> unit_of = wrap(c, sizes);

  std::vector<Unit> units(size_t(*std::max_element(unit_of.begin(), unit_of.end()) + 1));
  Unit replicated;
  replicated.name = "replicated", replicated.replicated = true;
  for (size_t i = 0; i < params.size();) {  // what is joined goes together
    size_t end = i + 1;
    int64_t numel = params[i].numel;
    for (; end < params.size() && params[end].joined; end++) numel += params[end].numel;
    Unit& u = numel < c.replicate_below ? replicated : units[size_t(unit_of[size_t(params[i].module)])];
    u.params.insert(u.params.end(), params.begin() + int64_t(i), params.begin() + int64_t(end));
    i = end;
  }
  for (size_t u = 0; u < units.size(); u++) {
    int first = -1, last = -1;
    for (int m = 0; m < c.modules() - (c.tied ? 1 : 0); m++)
      if (unit_of[size_t(m)] == int(u)) first = first < 0 ? m : first, last = m;
    const bool whole = first == 0 && last >= c.modules() - (c.tied ? 2 : 1);
    const bool block = c.attends() && first > 0 && first % 2 == 1 && last == first + 1;
    units[u].name = whole   ? "model"
                    : block ? strf("block.%d", (first - 1) / 2)
                            : module_name(c, first) + (last > first ? ".." + module_name(c, last) : "");
    // Distant modules that share a weight make two goes of it, if a unit in between sends it away.
    const bool shares =
        c.tied && !whole &&
        std::any_of(units[u].params.begin(), units[u].params.end(), [](const Param& p) { return p.module == 0; });
    if (shares) units[u].name += " and head", units[u].reductions = last_of_backward(c) <= last ? 2 : 1;
  }
  units.erase(std::remove_if(units.begin(), units.end(), [](const Unit& u) { return u.params.empty(); }), units.end());
  if (units.size() == 1) units[0].reductions = 1;
  if (!replicated.params.empty()) units.push_back(std::move(replicated));
  return units;
}

int64_t parameter_count(const ModelConfig& c) {
  int64_t n = 0;
  for (const Unit& u : parameter_table(c))
    for (const Param& p : u.params) n += p.numel;
  return n;
}

double flops_per_token(const ModelConfig& c) {
  const int last = last_of_backward(c);
  auto of_weight = [&](const Param& p, int module) {
    return 2.0 * (1 + (module >= last) + !p.frozen) * double(p.numel);
  };
  double flops = 0;
  for (const Param& p : all_parameters(c)) {
    if (p.module == 0 && c.tied) flops += of_weight(p, c.modules() - 1);
    if (p.shape.size() < 2 || p.module == 0) continue;
    flops += of_weight(p, p.module) / (of_phi(p) ? double(c.nsa.stride) : 1.0);  // once for each compressed key
  }
  if (!c.attends()) return flops;
  double keys = double(c.seq) / 2;
  if (c.sparse) {
    const NsaShape n = c.nsa_shape(1);
    double sum = 0;
    for (int64_t t = 0; t < c.seq; t++) {
      const int64_t current = t / n.select_block, compressed = t + 1 < n.block ? 0 : (t + 1 - n.block) / n.stride + 1;
      sum += double(compressed + std::min(t + 1, n.window));
      sum += double(current < n.selected ? t + 1 : (n.selected - 1) * n.select_block + t % n.select_block + 1);
    }
    keys = sum / double(c.seq);
  }
  for (int64_t i = 0; i < c.depth; i++) flops += (c.attention_module(i) >= last ? 12 : 4) * double(c.dim) * keys;
  return flops;
}

// ----------------------------------------------------------------------------------------------------------- batch

int64_t batch_ints(const ModelConfig& c, int64_t batch) {
  int64_t M = batch * c.seq;
  return 2 * M + ops::token_index_ints(M, c.vocab);
}

void index_batch(const ModelConfig& c, int64_t batch, int32_t* host) {
  int64_t M = batch * c.seq;
  ops::build_token_index(host + 2 * M, host, M, c.vocab);
}

// ----------------------------------------------------------------------------------------------------------- model

template <class T, class G>
Model<T, G>::Model(Device& dev, const World& world, Transport transport, const ModelConfig& config, int64_t batch,
                   const FsdpOptions& options, bool open)
    : fsdp(
          dev, world, transport,
          [&] {
            std::vector<Unit> units = parameter_table(config);
            lay_out(&units, options.shards(world.size));
            return units;
          }(),
          options, open),
      dev_(dev),
      c_(config),
      M_(batch * config.seq),
      norm_(config.arch == Arch::simple || config.arch == Arch::mlp ? ops::Norm::layer : ops::Norm::rms) {
  // In whole tiles where pieces are large, all alike but the last.
  auto piece = [&](int64_t pieces) {
    const int64_t rows = (M_ + pieces - 1) / pieces, tile = rows < 128 ? 1 : 128;
    return std::min(M_, (rows + tile - 1) / tile * tile);
  };
  const int64_t size = int64_t(sizeof(T)), most = std::max<int64_t>(c_.logits_bytes / (c_.vocab * size), 1);
  chunk_ = piece((M_ + most - 1) / most);
  const int64_t hidden = M_ * hidden_row() * size;
  const int64_t sums = std::is_same_v<G, A> ? 0 : (c_.hidden + hidden_row()) * c_.dim * int64_t(sizeof(A));
  wide_ = hidden > 2 * c_.hidden_bytes + sums;
  rows_ = piece(hidden <= c_.hidden_bytes ? 1 : wide_ ? (hidden + c_.hidden_bytes - 1) / c_.hidden_bytes : 2);
  wide_ = wide_ && sums > 0;
  const int64_t half = (rows_ + 1) / 2;
  forward_rows_ = rows_ * hidden_row() * size * 2 <= c_.hidden_bytes ? rows_ : (half + 127) / 128 * 128;

  for (int64_t i = 0; i < c_.depth; i++) {
    auto at = [&](const char* name) { return place(strf("block.%lld.%s", static_cast<long long>(i), name)); };
    at_.push_back({at("attention.q"),
                   at("attention.o"),
                   at(c_.arch == Arch::llama ? "mlp.gate" : "mlp.up"),
                   at("mlp.down"),
                   at("mlp.up.bias"),
                   at("mlp.down.bias"),
                   at("norm1"),
                   at("norm1.bias"),
                   at("norm2"),
                   at("norm2.bias"),
                   at("attention.gate.bias"),
                   {at("attention.phi_k.position"), at("attention.phi_k.w1"), at("attention.phi_k.w2"),
                    at("attention.phi_v.position"), at("attention.phi_v.w1"), at("attention.phi_v.w2")}});
  }
  embedding_ = place("embedding.weight");
  head_ = c_.tied ? embedding_ : place("head.weight");
  head_norm_ = place("head.norm"), head_norm_bias_ = place("head.norm.bias");
  unit_of_.assign(size_t(c_.modules()), -1);
  const std::vector<Unit>& units = fsdp.units();
  weights_.resize(units.size()), grads_.resize(units.size());
  for (size_t u = 0; u < units.size(); u++) {
    if (units[u].replicated) replicated_ = int(u);
    for (const Param& p : units[u].params)
      if (!units[u].replicated) unit_of_[size_t(p.module)] = int(u);
  }
  if (c_.tied) unit_of_.back() = unit_of_.front();
  last_of_backward_ = last_of_backward(c_);
  int64_t discarded = 0;  // nobody computes the gradient of a frozen matrix, but the others' come with what is computed
  for (const Unit& u : units)
    for (const Param& p : u.params)
      if (!p.reduced && (p.shape.size() == 1 || of_phi(p))) discarded = std::max(discarded, p.numel);
  if (discarded > 0) discarded_ = dev.mem.keep<G>(discarded, "gradients of what is frozen", Purpose::workspace);

  batch_ = dev.mem.keep<int32_t>(batch_ints(c_, batch), "tokens", Purpose::workspace);
  loss_sum_ = dev.mem.keep<A>(1, "loss", Purpose::workspace);
  stats_ = c_.sparse && c_.diagnostics ? dev.mem.keep<NsaStats>(c_.depth, "diagnostics", Purpose::workspace) : nullptr;
  const bool rotates = c_.arch == Arch::rope || c_.arch == Arch::llama;
  rope_table_ = rotates ? dev.mem.keep<A>(c_.seq * c_.head_dim(), "rotary table", Purpose::workspace) : nullptr;
}

template <class T, class G>
typename Model<T, G>::Place Model<T, G>::place(const std::string& name) const {
  for (size_t u = 0; u < fsdp.units().size(); u++)
    for (const Param& p : fsdp.units()[u].params)
      if (p.name == name) return {int(u), p.offset, !p.reduced};
  return {};
}

template <class T, class G>
void Model<T, G>::init_weights() {
  if (rope_table_) ops::rope_table<T>(dev_.compute(), rope_table_, c_.seq, c_.head_dim(), c_.rope_base);
  fsdp.init_weights();
}

template <class T, class G>
AttentionShape Model<T, G>::attention_shape() const {
  const int64_t D = c_.head_dim(), row = (c_.heads + 2 * c_.kv_heads) * D;
  return {M_ / c_.seq, c_.seq, c_.heads, c_.kv_heads, D, row, row, c_.heads * D, row, row, 1 / std::sqrt(double(D))};
}

template <class T, class G>
PhiWeights<const T> Model<T, G>::phi_weights(const Places& at) const {
  auto w = [&](int i) { return weight(at.phi[i]); };
  return {w(0), w(1), w(2), w(3), w(4), w(5)};
}
template <class T, class G>
PhiWeights<G> Model<T, G>::phi_grads(const Places& at) const {
  auto dw = [&](int i) { return grad(at.phi[i]); };
  return {dw(0), dw(1), dw(2), dw(3), dw(4), dw(5)};
}

template <class T, class G>
void Model<T, G>::wgrad(const Place& p, const T* dy, const T* x, int64_t M, int64_t N, int64_t K, bool accumulate) {
  if (!p.frozen) ops::matmul_wgrad<T, G>(dev_.compute(), grad(p), dy, x, M, N, K, accumulate);
}

template <class T, class G>
void Model<T, G>::load(const int32_t* host, Event& copied) {
  dev_.compute().copy(batch_, host, batch_ints(c_, M_ / c_.seq) * 4);
  dev_.compute().record(copied);
}

// ------------------------------------------------------------------------------------------------------- the step

// While a unit computes, the next one is on its way. With two slots the gather of a unit waits, on its own stream, for
// the release of the unit two before it; with one it finds no slot and does nothing, and nothing overlaps.
template <class T, class G>
void Model<T, G>::forward_backward(const int32_t* host, double scale, bool first, bool last, Event& copied) {
  std::vector<Saved> saved(static_cast<size_t>(c_.depth));
  if (first && stats_) kernels_.assign(size_t(c_.depth), {});

  dev_.mem.phase("forward");
  begin_pass(Pass::forward, last);
  load(host, copied);
  Buffer<T> x = embed();
  auto goes_back = [&](int64_t block) { return c_.mlp_module(block) >= last_of_backward_; };
  for (int64_t i = 0; i < c_.depth; i++) x = block_forward(i, &saved[size_t(i)], std::move(x), goes_back(i));

  dev_.mem.phase("head");
  begin_pass(Pass::backward, last);
  x = head(std::move(x), scale, true, first);

  for (int64_t i = c_.depth - 1; i >= 0 && goes_back(i); i--) {
    dev_.mem.phase(strf("backward of block %lld", static_cast<long long>(i)));
    x = block_backward(i, std::move(saved[size_t(i)]), std::move(x));
  }

  if (last_of_backward_ == 0) {
    dev_.mem.phase("backward of the embedding");
    embed_backward(std::move(x));
  }
  x.reset();
  end_pass();
}

template <class T, class G>
void Model<T, G>::evaluate(const int32_t* host, bool first, Event& copied) {
  dev_.mem.phase("validation");
  begin_pass(Pass::evaluation, true);
  load(host, copied);
  Buffer<T> x = embed();
  for (int64_t i = 0; i < c_.depth; i++) x = block_forward(i, nullptr, std::move(x), false);
  head(std::move(x), 0, false, first);
  end_pass();
}

// The backward pass begins where the forward pass ends, with units in hand.
template <class T, class G>
void Model<T, G>::begin_pass(Pass pass, bool last) {
  pass_ = pass, last_ = last;
  if (pass == Pass::backward) {
    fsdp.begin_micro_batch(last);
    if (replicated_ >= 0 && trained(replicated_)) grads_[size_t(replicated_)] = fsdp.gradient(replicated_);
    // Where the head enters no unit of its own, nothing would be on its way behind the one in hand.
    const int head = unit_of_.back();
    if (head < 0 || head == current_) prefetch_behind(c_.modules() - 1, current_);
    return;
  }
  if (c_.forward_prefetch > 0)
    for (int u : {replicated_, unit_of_[0]})
      if (u >= 0) fsdp.gather(u);
  if (replicated_ >= 0) weights_[size_t(replicated_)] = fsdp.use(replicated_);
}

template <class T, class G>
void Model<T, G>::end_pass() {
  leave();
  ASSERT(open_ < 0);
  if (replicated_ < 0) return;
  fsdp.release(replicated_);
  if (pass_ == Pass::backward && trained(replicated_)) fsdp.reduce(replicated_);
}

template <class T, class G>
void Model<T, G>::enter(int module, int next) {
  const int u = unit_of_[size_t(module)];
  if (u < 0 || u == current_) return;
  leave();
  dev_.mark("waiting for communication");
  fsdp.gather(u, true);
  if (pass_ == Pass::backward) {
    prefetch_behind(module, u, next);
  } else {
    int ahead = 0, before = u;
    for (int m = module + 1; m < c_.modules() && ahead < c_.forward_prefetch; m++) {
      const int then = unit_of_[size_t(m)];
      if (then < 0 || then == before) continue;
      fsdp.gather(then);
      before = then, ahead++;
    }
  }
  weights_[size_t(u)] = fsdp.use(u);
  current_ = u;
}

template <class T, class G>
void Model<T, G>::prefetch_behind(int module, int u, int next) {
  if (c_.backward_prefetch != BackwardPrefetch::pre) return;
  const bool other = next >= 0 && unit_of_[size_t(next)] >= 0 && unit_of_[size_t(next)] != u;
  const int then = other ? unit_of_[size_t(next)] : following_unit(module, u);
  if (then >= 0) fsdp.gather(then);
}

template <class T, class G>
void Model<T, G>::leave() {
  if (current_ < 0) return;
  fsdp.release(current_, pass_ != Pass::backward);
  weights_[size_t(current_)] = nullptr;
  current_ = -1;
}

// The embedding's backward wants no weights; but the next micro-batch begins with it.
template <class T, class G>
int Model<T, G>::following_unit(int module, int u) const {
  auto other = [&](int m) { return unit_of_[size_t(m)] >= 0 && unit_of_[size_t(m)] != u; };
  for (int m = module - 1; m >= std::max(last_of_backward_, 1); m--) {
    // A block whose middle is not kept begins with its attention.
    if (c_.attends() && !keeps_middle() && m % 2 == 0 && other(m - 1)) return unit_of_[size_t(m - 1)];
    if (other(m)) return unit_of_[size_t(m)];
  }
  return !last_ && other(0) ? unit_of_[0] : -1;
}

template <class T, class G>
void Model<T, G>::open(int module) {
  const int u = unit_of_[size_t(module)];
  if (u < 0 || u == open_) return;
  ASSERT(open_ < 0);
  dev_.mark("waiting for communication");
  open_ = u;
  if (trained(u)) grads_[size_t(u)] = fsdp.gradient(u);
}

template <class T, class G>
void Model<T, G>::close(int module) {
  if (open_ < 0 || unit_of_[size_t(module)] < 0) return;
  for (int m = module - 1; m >= last_of_backward_; m--) {
    if (unit_of_[size_t(m)] < 0) continue;
    if (unit_of_[size_t(m)] == open_) return;
    break;
  }
  if (current_ == open_) leave();
  const int then = following_unit(module, -1);  // it may be the one just left
  if (then >= 0 && c_.backward_prefetch == BackwardPrefetch::post) fsdp.gather(then, true);
  if (trained(open_)) fsdp.reduce(open_);
  grads_[size_t(open_)] = nullptr;
  open_ = -1;
}

template <class T, class G>
void Model<T, G>::end_step() {
  dev_.mem.phase("optimizer");
  dev_.mark("optimizer, with the last reductions");
  ops::cast(dev_.compute(), &fsdp.scalars()->loss, loss_sum_, 1);
  fsdp.end_step();
}

template <class T, class G>
void Model<T, G>::finish_evaluation() {
  dev_.compute().zero(&fsdp.scalars()->norm2, sizeof(double));
  ops::cast(dev_.compute(), &fsdp.scalars()->loss, loss_sum_, 1);
  fsdp.sum_scalars();
  fsdp.empty_slots();
}

// ------------------------------------------------------------------------------------------------------- embedding

template <class T, class G>
Buffer<T> Model<T, G>::embed() {
  Buffer<T> x = dev_.mem.take<T>(M_ * c_.dim, "block input", Purpose::activations);
  enter(0);
  dev_.mark("embedding");
  ops::embedding_forward(dev_.compute(), x.get(), weight(embedding_), batch_, M_, c_.seq, c_.dim,
                         c_.arch == Arch::simple);
  return x;
}

template <class T, class G>
void Model<T, G>::embed_backward(Buffer<T> dx) {
  Buffer<A> partials = dev_.mem.take<A>(ops::embedding_partials(M_, c_.dim), "partial sums");
  open(0);
  dev_.mark("embedding, backward");
  if (!embedding_.frozen)
    ops::embedding_backward(dev_.compute(), grad(embedding_), dx.get(),
                            ops::token_index_at(batch_ + 2 * M_, M_, c_.vocab), partials.get(), M_, c_.vocab, c_.dim,
                            c_.tied);
  close(0);
}

// ------------------------------------------------------------------------------------------------ block: attention

// x -> norm -> q, k, v, with their positions, and NSA's gates. Fills in the norm's statistics.
template <class T, class G>
void Model<T, G>::queries(int64_t block, Saved* v, Purpose life) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const Places& at = at_[size_t(block)];
  const int64_t M = M_, C = c_.dim, QKV = c_.row();
  dev_.mark("norms");
  Buffer<T> n = mem.take<T>(M * C, "normed");
  if (v->stats1) {
    ops::norm_apply<T>(s, norm_, n, v->stats1, v->x, weight(at.norm1), weight(at.norm1_bias), M, C);
  } else {
    v->stats1 = mem.take<A>(2 * M, "statistics 1", Purpose::activations);
    ops::norm_forward<T>(s, norm_, n, nullptr, v->stats1, v->x, nullptr, weight(at.norm1), weight(at.norm1_bias), M, C);
  }
  dev_.mark("projections");
  v->qkv = mem.take<T>(M * QKV, "q, k, v", life);
  ops::matmul<T>(s, v->qkv, n, weight(at.qkv), nullptr, nullptr, M, QKV, C);
  n.reset();
  dev_.mark("positions");
  if (rope_table_)
    ops::rope<T>(s, v->qkv, rope_table_, M, c_.seq, c_.heads + c_.key_heads(), c_.head_dim(), QKV, false);
  if (c_.sparse)
    ops::add_bias<T>(s, v->qkv + c_.nsa_shape(M / c_.seq).gate(0), weight(at.gate_bias), M, c_.gates(), QKV);
}

// q, k, v -> attention. Fills in what its backward wants.
template <class T, class G>
Buffer<T> Model<T, G>::attend(int64_t block, Saved* v, Purpose life, NsaKernels* ran) {
  const int64_t M = M_, D = c_.head_dim(), H = c_.heads;
  Buffer<T> o = dev_.mem.take<T>(M * H * D, "attention", c_.sparse ? Purpose::temporaries : life);
  if (c_.sparse) {
    nsa_forward<T>(dev_, o, &v->nsa, v->qkv, phi_weights(at_[size_t(block)]), c_.nsa_shape(M / c_.seq), life, ran);
  } else {
    dev_.mark("attention");
    v->lse = dev_.mem.take<A>(M * H, "log-sum-exp", life);
    attention_forward<T>(dev_.compute(), o, v->lse, v->qkv, v->qkv + H * D, v->qkv + (H + c_.kv_heads) * D,
                         attention_shape());
  }
  return o;
}

// The gated sum of NSA's branches, again.
template <class T, class G>
Buffer<T> Model<T, G>::combine(int64_t block, Saved* v) {
  Buffer<T> o = dev_.mem.take<T>(M_ * c_.heads * c_.head_dim(), "attention");
  dev_.mark("gates, backward");
  const Kernel k = nsa_combine<T>(dev_.compute(), o, v->nsa.o_compressed, v->nsa.o_selected, v->nsa.o_window, v->qkv,
                                  c_.nsa_shape(M_ / c_.seq));
  if (NsaKernels* ran = kernels_of(block)) ran->add(Stage::gates, k);
  return o;
}

// Wo o, which the MLP's norm adds to x to make x2.
template <class T, class G>
void Model<T, G>::project(int64_t block, Saved* v, const T* o, Purpose life) {
  v->x2 = dev_.mem.take<T>(M_ * c_.dim, "middle of the block", life);
  dev_.mark("projections");
  ops::matmul<T>(dev_.compute(), v->x2, o, weight(at_[size_t(block)].o), nullptr, nullptr, M_, c_.dim,
                 c_.heads * c_.head_dim());
}

// x2 = x + Wo o, and its norm in the same pass, which is returned.
template <class T, class G>
Buffer<T> Model<T, G>::middle(int64_t block, Saved* v) {
  const Places& at = at_[size_t(block)];
  const int64_t M = M_, C = c_.dim;
  dev_.mark("norms");
  if (!v->stats2) v->stats2 = dev_.mem.take<A>(2 * M, "statistics 2", Purpose::activations);
  Buffer<T> n = dev_.mem.take<T>(M * C, "normed");
  ops::norm_forward<T>(dev_.compute(), norm_, n, v->x2, v->stats2, v->x, v->x2, weight(at.norm2), weight(at.norm2_bias),
                       M, C);
  return n;
}

template <class T, class G>
Buffer<T> Model<T, G>::block_forward(int64_t block, Saved* saved, Buffer<T> x, bool keep) {
  Saved here;
  Saved& v = keep ? *saved : here;
  v.x = std::move(x);
  auto life = [&](bool kept) { return keep && kept ? Purpose::activations : Purpose::temporaries; };
  Buffer<T> n;
  if (c_.attends()) {
    enter(c_.attention_module(block));
    queries(block, &v, life(c_.keeps_queries()));
    const bool trains = pass_ == Pass::forward;
    Buffer<T> o = attend(block, &v, life(keeps_attention()), trains ? kernels_of(block) : nullptr);
    if (trains && stats_) {
      const NsaShape a = c_.nsa_shape(M_ / c_.seq);
      Buffer<double> partials = dev_.mem.take<double>(nsa_stats_partials(a), "partial sums");
      nsa_stats<T>(dev_.compute(), stats_ + block, v.qkv, v.nsa.indices, partials, a);
    }
    if (!keep || !c_.keeps_queries()) v.qkv.reset();
    if (!keep || !keeps_attention()) {
      v.lse.reset();
      Buffer<int32_t> indices = std::move(v.nsa.indices);
      v.nsa = NsaSaved<T>();
      if (keep) v.nsa.indices = std::move(indices);
    }
    project(block, &v, o, life(keeps_middle()));
    if (keep && keeps_attention() && !c_.sparse) v.o = std::move(o);
    o.reset();
    enter(c_.mlp_module(block));
    n = middle(block, &v);
    if (!keep) v.x.reset();
  } else {
    enter(c_.mlp_module(block));
  }
  return mlp_forward(block, &v, std::move(n), keep);
}

// dx arrives as the gradient of the block's output and leaves, in the same buffer, as that of its input.
template <class T, class G>
Buffer<T> Model<T, G>::block_backward(int64_t block, Saved v, Buffer<T> dx) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const int64_t M = M_, C = c_.dim, D = c_.head_dim(), H = c_.heads, QKV = c_.row();
  const int mlp = c_.mlp_module(block), attention = c_.attention_module(block);
  auto queries_again = [&] {
    fsdp.note(Issued::recompute_attention, unit_of_[size_t(attention)]);
    queries(block, &v, Purpose::temporaries);
  };
  if (c_.attends() && !keeps_middle()) {
    enter(attention, mlp);
    if (c_.sparse || !keeps_attention()) queries_again();
    if (!keeps_attention()) v.o = attend(block, &v, Purpose::temporaries, kernels_of(block));
    if (!v.o) v.o = combine(block, &v);
    project(block, &v, v.o, Purpose::temporaries);
    enter(mlp, attention);
    middle(block, &v);
  }
  enter(mlp);
  open(mlp);
  mlp_backward(block, &v, dx);
  close(mlp);
  if (!c_.attends()) return dx;
  v.x2.reset(), v.stats2.reset();

  enter(attention);
  open(attention);
  const Places& at = at_[size_t(block)];
  if (!v.qkv) queries_again();
  if (keeps_middle() && !keeps_attention()) v.o = attend(block, &v, Purpose::temporaries, kernels_of(block));
  Buffer<T> dqkv;
  {
    Buffer<T> d_o = mem.take<T>(M * H * D, "gradient of attention");
    dev_.mark("projections, backward");
    ops::matmul_dgrad<T>(s, d_o, dx, weight(at.o), M, C, H * D, false);
    if (c_.sparse) {
      const NsaShape a = c_.nsa_shape(M / c_.seq);
      if (!v.o) v.o = combine(block, &v);
      dev_.mark("projections, backward");
      wgrad(at.o, dx, v.o, M, C, H * D, false);
      v.o.reset();
      dqkv = mem.take<T>(M * QKV, "gradient of q, k, v");
      nsa_backward<T, G>(dev_, dqkv, phi_grads(at), d_o, v.qkv, phi_weights(at), std::move(v.nsa), a,
                         kernels_of(block));
      Buffer<A> partials = mem.take<A>(ops::bias_grad_partials(M, c_.gates()), "partial sums");
      dev_.mark("gates, backward");
      ops::bias_grad<T, G>(s, grad(at.gate_bias), dqkv + a.gate(0), partials, M, c_.gates(), QKV);
    } else {
      wgrad(at.o, dx, v.o, M, C, H * D, false);
      const AttentionShape a = attention_shape();
      dqkv = mem.take<T>(M * QKV, "gradient of q, k, v");
      Buffer<A> workspace = mem.take<A>(attention_backward_workspace<T>(a), "attention workspace");
      const int64_t k = H * D, val = (H + c_.kv_heads) * D;
      dev_.mark("attention, backward");
      attention_backward<T>(s, dqkv, dqkv + k, dqkv + val, d_o, v.qkv, v.qkv + k, v.qkv + val, v.o, v.lse, workspace,
                            a);
    }
    v.o.reset(), v.lse.reset(), v.qkv.reset();
  }
  dev_.mark("positions, backward");
  if (rope_table_) ops::rope<T>(s, dqkv, rope_table_, M, c_.seq, H + c_.key_heads(), D, QKV, true);
  dev_.mark("norms, backward");
  Buffer<T> n = mem.take<T>(M * C, "normed, then its gradient");
  ops::norm_apply<T>(s, norm_, n, v.stats1, v.x, weight(at.norm1), weight(at.norm1_bias), M, C);
  dev_.mark("projections, backward");
  wgrad(at.qkv, dqkv, n, M, QKV, C, false);
  ops::matmul_dgrad<T>(s, n, dqkv, weight(at.qkv), M, QKV, C, false);
  dqkv.reset();
  dev_.mark("norms, backward");
  Buffer<A> partials = mem.take<A>(ops::norm_backward_partials(M, C), "partial sums");
  ops::norm_backward<T, G>(s, norm_, dx, grad(at.norm1), grad(at.norm1_bias), n, dx, v.x, v.stats1, weight(at.norm1),
                           partials, M, C);
  close(attention);
  return dx;
}

// ------------------------------------------------------------------------------------------------------ block: MLP

// x2 + W2 gelu(W1 n), n the norm of x2; without attention x + W2 gelu(W1 x). In the same pieces whether the hidden
// layer is kept or made again: the same products, so the same bits.
template <class T, class G>
Buffer<T> Model<T, G>::mlp_forward(int64_t block, Saved* v, Buffer<T> n, bool keep) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const Places& at = at_[size_t(block)];
  const int64_t C = c_.dim, F = c_.hidden, UP = hidden_row();
  const T *in = c_.attends() ? n.get() : v->x.get(), *residual = c_.attends() ? v->x2.get() : v->x.get();
  dev_.mark("MLP");
  Buffer<T> out = mem.take<T>(M_ * C, "block input", Purpose::activations);
  const bool keeps = keep && keeps_mlp();
  if (keeps) v->h = mem.take<T>(M_ * UP, "MLP hidden", Purpose::activations);
  for (int64_t i = 0, rows; i < M_; i += rows) {
    rows = forward_piece(i);
    Buffer<T> here;
    if (!keeps) here = mem.take<T>(rows * UP, "MLP hidden");
    T* h = keeps ? v->h + i * UP : here.get();
    Buffer<T> g = mem.take<T>(rows * F, "activated");
    if (c_.arch == Arch::llama) {
      ops::matmul<T>(s, h, in + i * C, weight(at.up), nullptr, nullptr, rows, UP, C);
      ops::swiglu_forward<T>(s, g, h, rows, F);
    } else {
      ops::matmul_gelu<T>(s, g, h, in + i * C, weight(at.up), weight(at.up_bias), rows, F, C);
    }
    here.reset();
    ops::matmul<T>(s, out + i * C, g, weight(at.down), weight(at.down_bias), residual + i * C, rows, C, F);
  }
  n.reset();
  if (!keep || !keeps_middle()) v->x2.reset();
  return out;
}

// Rows of the forward's piece that begins at row i; pieces of the backward are made of whole ones.
template <class T, class G>
int64_t Model<T, G>::forward_piece(int64_t i) const {
  return std::min(forward_rows_, std::min(M_ - i, rows_ - i % rows_));
}

template <class T, class G>
void Model<T, G>::mlp_backward(int64_t block, Saved* v, T* dx) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const Places& at = at_[size_t(block)];
  const int64_t C = c_.dim, F = c_.hidden, UP = hidden_row();
  const bool llama = c_.arch == Arch::llama, normed = c_.attends();
  const bool keeps = keeps_mlp();
  // Over pieces: onto what the pieces before have left, or into sums of their own.
  Buffer<A> up_sum, down_sum;
  if (wide_ && !at.up.frozen) up_sum = mem.take<A>(UP * C, "gradient of the MLP");
  if (wide_ && !at.down.frozen) down_sum = mem.take<A>(C * F, "gradient of the MLP");
  auto add = [&](const Place& p, A* sum, const T* dy, const T* x, int64_t rows, int64_t N, int64_t K, bool more) {
    if (sum) ops::matmul_wgrad<T, A>(s, sum, dy, x, rows, N, K, more);
    else wgrad(p, dy, x, rows, N, K, more);
  };
  auto bias = [&](const Place& p, const T* dy, int64_t rows, int64_t N, bool more) {
    if (p.unit < 0) return;
    Buffer<A> partials = mem.take<A>(ops::bias_grad_partials(rows, N), "partial sums");
    ops::bias_grad<T, G>(s, grad(p), dy, partials, rows, N, N, more);
  };
  dev_.mark("MLP, backward");
  if (!keeps) fsdp.note(Issued::recompute_mlp, unit_of_[size_t(c_.mlp_module(block))]);
  bias(at.down_bias, dx, M_, C, false);
  for (int64_t i = 0; i < M_; i += rows_) {
    const int64_t rows = std::min(rows_, M_ - i);
    const bool more = i > 0;
    T* dxi = dx + i * C;
    const T* x = (normed ? v->x2.get() : v->x.get()) + i * C;
    auto norm = [&](const char* name) {
      dev_.mark("norms, backward");
      Buffer<T> n = mem.take<T>(rows * C, name);
      ops::norm_apply<T>(s, norm_, n, v->stats2 + 2 * i, x, weight(at.norm2), weight(at.norm2_bias), rows, C);
      dev_.mark("MLP, backward");
      return n;
    };
    Buffer<T> here;
    if (!keeps) {
      Buffer<T> n;
      if (normed) n = norm("normed");
      here = mem.take<T>(rows * UP, "MLP hidden");
      const T* in = normed ? n.get() : x;
      for (int64_t j = 0, some; j < rows; j += some) {
        some = forward_piece(i + j);
        ops::matmul<T>(s, here + j * UP, in + j * C, weight(at.up), weight(at.up_bias), nullptr, some, UP, C);
      }
    }
    T* h = keeps ? v->h + i * UP : here.get();
    Buffer<T> dg = mem.take<T>(rows * F, "gradient of activated");
    ops::matmul_dgrad<T>(s, dg, dxi, weight(at.down), rows, C, F, false);
    // It leaves g and dh, each in the place of the other's counterpart.
    if (llama) ops::swiglu_backward<T>(s, dg, h, rows, F);
    else ops::gelu_backward<T>(s, dg, h, rows * F);
    const T *g = llama ? dg.get() : h, *dh = llama ? h : dg.get();
    add(at.down, down_sum, dxi, g, rows, C, F, more);
    if (llama) dg.reset();
    else here.reset();
    Buffer<T> n;
    if (normed) n = norm("normed, then its gradient");
    add(at.up, up_sum, dh, normed ? n.get() : x, rows, UP, C, more);
    bias(at.up_bias, dh, rows, F, more);
    ops::matmul_dgrad<T>(s, normed ? n.get() : dxi, dh, weight(at.up), rows, UP, C, !normed);
    here.reset(), dg.reset();
    if (!normed) continue;
    dev_.mark("norms, backward");
    Buffer<A> partials = mem.take<A>(ops::norm_backward_partials(rows, C), "partial sums");
    ops::norm_backward<T, G>(s, norm_, dxi, grad(at.norm2), grad(at.norm2_bias), n, dxi, x, v->stats2 + 2 * i,
                             weight(at.norm2), partials, rows, C, more);
  }
  v->h.reset();
  if constexpr (!std::is_same_v<G, A>) {
    if (up_sum) ops::cast<G, A>(s, grad(at.up), up_sum, UP * C);
    if (down_sum) ops::cast<G, A>(s, grad(at.down), down_sum, C * F);
  }
}

// ------------------------------------------------------------------------------------------------------------ head

// Final norm, logits, loss, and back again to the gradient of x, chunk by chunk: no more than chunk_ rows of logits
// ever exist.
template <class T, class G>
Buffer<T> Model<T, G>::head(Buffer<T> x, double scale, bool backward, bool first) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const int64_t M = M_, C = c_.dim, V = c_.vocab;
  const int module = c_.modules() - 1;
  enter(module);
  dev_.mark("head and loss");
  Buffer<A> stats = mem.take<A>(2 * M, "final statistics"), losses = mem.take<A>(M, "losses");
  Buffer<T> n = mem.take<T>(M * C, "final normed, then its gradient");
  ops::norm_forward<T>(s, norm_, n, nullptr, stats, x, nullptr, weight(head_norm_), weight(head_norm_bias_), M, C);
  if (backward) open(module);
  {
    Buffer<T> logits = mem.take<T>(chunk_ * V, "logits of a chunk");
    // Chunks are summed in the accumulation type: a sum of many roundings to bf16 would lose what they add.
    const bool wide = backward && !head_.frozen && !std::is_same_v<G, A> && chunk_ < M;
    Buffer<A> sum;
    if (wide) sum = mem.take<A>(V * C, "head's gradient");
    for (int64_t i = 0; i < M; i += chunk_) {
      const int64_t rows = std::min(chunk_, M - i);
      ops::matmul<T>(s, logits, n + i * C, weight(head_), nullptr, nullptr, rows, V, C);
      ops::cross_entropy<T>(s, logits, losses + i, batch_ + M + i, A(scale), backward, rows, V);
      if (!backward) continue;
      if (wide) ops::matmul_wgrad<T, A>(s, sum, logits, n + i * C, rows, V, C, i > 0);
      else wgrad(head_, logits, n + i * C, rows, V, C, i > 0);
      ops::matmul_dgrad<T>(s, n + i * C, logits, weight(head_), rows, V, C, false);
    }
    if constexpr (!std::is_same_v<G, A>)
      if (wide) ops::cast<G, A>(s, grad(head_), sum, V * C);
  }
  {
    Buffer<A> partials = mem.take<A>(ops::sum_partials(), "partial sums");
    ops::sum<A>(s, loss_sum_, losses, partials, M, !first);
  }
  if (!backward) return Buffer<T>();
  Buffer<A> partials = mem.take<A>(ops::norm_backward_partials(M, C), "partial sums");
  ops::norm_backward<T, G>(s, norm_, n, grad(head_norm_), grad(head_norm_bias_), n, nullptr, x, stats,
                           weight(head_norm_), partials, M, C);
  close(module);
  return n;
}

template class Model<float, float>;
template class Model<bf16, bf16>;
template class Model<bf16, float>;
template class Model<double, double>;
