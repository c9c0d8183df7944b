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

std::vector<Unit> parameter_table(const ModelConfig& c) {
  std::vector<Unit> units;
  uint32_t id = 0;
  auto add = [&](const std::string& name, std::vector<int64_t> shape, double mean, double std) {
    Param p = {};
    p.name = units.back().name + "." + name;
    p.decay = shape.size() > 1;
    p.shape = std::move(shape);
    p.mean = float(mean), p.std = float(std);
    p.unit = int(units.size()) - 1;
    p.id = id++;
    p.numel = 1;
    for (int64_t n : p.shape) p.numel *= n;
    units.back().params.push_back(std::move(p));
  };
  auto unit = [&](const std::string& name) {
    units.emplace_back();
    units.back().name = name;
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
  unit("embedding");
  add("weight", {c.vocab, C}, 0, layer_norm ? 1 : small);
  for (int64_t i = 0; i < c.depth; i++) {
    unit(strf("block.%lld", static_cast<long long>(i)));
    if (c.attends()) {
      const int64_t D = c.head_dim();
      // Neighbours, so that one product makes them all.
      add("attention.q", {c.heads * D, C}, 0, small);
      const std::vector<const char*> branches =
          c.sparse ? std::vector<const char*>{"_compressed", "_selected", "_window"} : std::vector<const char*>{""};
      for (const char* kind : {"attention.k", "attention.v"})
        for (const char* branch : branches) add(std::string(kind) + branch, {c.kv_heads * D, C}, 0, small);
      if (c.sparse) {
        add("attention.gate", {c.gates(), C}, 0, small);
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
    }
    if (c.arch == Arch::llama) add("mlp.gate", {F, C}, 0, small);
    add("mlp.up", {F, C}, 0, small);
    add("mlp.down", {C, F}, 0, into_stream);
    if (c.attends()) norm("norm1"), norm("norm2");
    if (c.attends() && c.sparse) {
      add("attention.gate.bias", {c.gates()}, 0, 0);  // gates start at one half
      if (c.nsa.phi != Phi::mean)
        for (const char* of : {"attention.phi_k", "attention.phi_v"})
          add(std::string(of) + ".position", {c.kv_heads * c.nsa.block * c.head_dim()}, 0, 0.02);
    }
    if (biases) add("mlp.up.bias", {F}, 0, 0), add("mlp.down.bias", {C}, 0, 0);
  }
  unit("head");
  add("weight", {c.vocab, C}, 0, small);
  norm("norm");
  return units;
}

int64_t parameter_count(const ModelConfig& c) {
  int64_t n = 0;
  for (const Unit& u : parameter_table(c))
    for (const Param& p : u.params) n += p.numel;
  return n;
}

double flops_per_token(const ModelConfig& c) {
  double weights = 0, keys = 0;
  for (const Unit& u : parameter_table(c))
    for (const Param& p : u.params) {
      if (p.shape.size() < 2 || u.name == "embedding") continue;
      const bool phi = p.name.find(".phi_") != std::string::npos;  // once for each compressed key
      weights += double(p.numel) / (phi ? double(c.nsa.stride) : 1.0);
    }
  if (!c.attends()) return 6 * weights;
  if (!c.sparse) return 6 * weights + 6.0 * double(c.depth) * double(c.dim) * double(c.seq);
  const NsaShape n = c.nsa_shape(1);
  for (int64_t t = 0; t < c.seq; t++) {
    const int64_t current = t / n.select_block, compressed = t + 1 < n.block ? 0 : (t + 1 - n.block) / n.stride + 1;
    keys += double(compressed + std::min(t + 1, n.window));
    keys += double(current < n.selected ? t + 1 : (n.selected - 1) * n.select_block + t % n.select_block + 1);
  }
  return 6 * weights + 12.0 * double(c.depth) * double(c.dim) * keys / double(c.seq);
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
            lay_out(&units, world.size);
            return units;
          }(),
          options, open),
      dev_(dev),
      c_(config),
      M_(batch * config.seq),
      norm_(config.arch == Arch::simple || config.arch == Arch::mlp ? ops::Norm::layer : ops::Norm::rms) {
  // Chunks of the head: in whole tiles where they are large, all alike but the last.
  const int64_t most = std::max<int64_t>(c_.logits_bytes / (c_.vocab * int64_t(sizeof(T))), 1);
  const int64_t chunks = (M_ + most - 1) / most, tile = most < 128 ? 1 : 128;
  chunk_ = std::min(M_, ((M_ + chunks - 1) / chunks + tile - 1) / tile * tile);
  const Unit& block = fsdp.units()[1];
  auto place = [&](const char* name) -> int64_t {
    for (const Param& p : block.params)
      if (p.name == block.name + "." + name) return p.offset;
    return -1;
  };
  at_ = {place("attention.q"),
         place("attention.o"),
         c_.arch == Arch::llama ? place("mlp.gate") : place("mlp.up"),
         place("mlp.down"),
         place("mlp.up.bias"),
         place("mlp.down.bias"),
         place("norm1"),
         place("norm1.bias"),
         place("norm2"),
         place("norm2.bias"),
         place("attention.gate.bias"),
         {place("attention.phi_k.position"), place("attention.phi_k.w1"), place("attention.phi_k.w2"),
          place("attention.phi_v.position"), place("attention.phi_v.w1"), place("attention.phi_v.w2")}};
  batch_ = dev.mem.keep<int32_t>(batch_ints(c_, batch), "tokens", Purpose::workspace);
  loss_sum_ = dev.mem.keep<A>(1, "loss", Purpose::workspace);
  stats_ = c_.sparse && c_.diagnostics ? dev.mem.keep<NsaStats>(c_.depth, "diagnostics", Purpose::workspace) : nullptr;
  const bool rotates = c_.arch == Arch::rope || c_.arch == Arch::llama;
  rope_table_ = rotates ? dev.mem.keep<A>(c_.seq * c_.head_dim(), "rotary table", Purpose::workspace) : nullptr;
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
template <class E>
PhiWeights<E> Model<T, G>::phi_at(E* base) const {
  auto at = [&](int i) { return at_.phi[i] < 0 ? nullptr : base + at_.phi[i]; };
  return {at(0), at(1), at(2), at(3), at(4), at(5)};
}

template <class T, class G>
void Model<T, G>::load(const int32_t* host, Event& copied) {
  dev_.compute().copy(batch_, host, batch_ints(c_, M_ / c_.seq) * 4);
  dev_.compute().record(copied);
}

// ------------------------------------------------------------------------------------------------------- the step

// While a block computes, the next one is on its way. With two slots the gather of unit i+1 waits, on its own stream,
// for the release of unit i-1; with one, gather(i+1) finds no slot and does nothing, and nothing overlaps.
template <class T, class G>
void Model<T, G>::forward_backward(const int32_t* host, double scale, bool first, bool last, Event& copied) {
  const int L = int(c_.depth), H = head_unit();
  const bool attends = c_.attends();
  std::vector<Saved> saved(size_t(L) + 1);
  if (first && stats_) kernels_.assign(size_t(L), {});

  dev_.mem.phase("forward");
  fsdp.gather(0);
  load(host, copied);
  fsdp.gather(1);
  Buffer<T> x = embed();
  for (int u = 1; u <= L; u++) {
    fsdp.gather(u);
    fsdp.gather(u + 1);
    Saved* s = &saved[size_t(u)];
    x = attends ? block_forward(u, s, std::move(x), true) : mlp_block_forward(u, s, std::move(x), true);
    fsdp.release(u);
  }

  dev_.mem.phase("head");
  fsdp.gather(H);
  fsdp.gather(L);  // its slot still holds it: this keeps it there
  x = head(std::move(x), scale, true, first);
  fsdp.release(H);
  fsdp.reduce(H);

  for (int u = L; u >= 1; u--) {
    dev_.mem.phase(strf("backward of block %d", u - 1));
    fsdp.gather(u);
    if (u > 1) fsdp.gather(u - 1);
    else if (!last) fsdp.gather(0);  // the next micro-batch begins with it
    Saved s = std::move(saved[size_t(u)]);
    x = attends ? block_backward(u, std::move(s), std::move(x)) : mlp_block_backward(u, std::move(s), std::move(x));
  }

  dev_.mem.phase("backward of the embedding");
  embed_backward(std::move(x));
}

template <class T, class G>
void Model<T, G>::evaluate(const int32_t* host, bool first, Event& copied) {
  const int L = int(c_.depth);
  dev_.mem.phase("validation");
  fsdp.gather(0);
  load(host, copied);
  fsdp.gather(1);
  Buffer<T> x = embed();
  for (int u = 1; u <= L; u++) {
    fsdp.gather(u);
    fsdp.gather(u + 1);
    x = c_.attends() ? block_forward(u, nullptr, std::move(x), false)
                     : mlp_block_forward(u, nullptr, std::move(x), false);
    fsdp.release(u);
  }
  head(std::move(x), 0, false, first);
  fsdp.release(L + 1);
}

template <class T, class G>
void Model<T, G>::step(const ops::AdamW& adamw, float clip) {
  dev_.mem.phase("optimizer");
  dev_.mark("optimizer, with the last reductions");
  ops::cast(dev_.compute(), fsdp.scalars() + 1, loss_sum_, 1);
  fsdp.step(adamw, clip);
}

template <class T, class G>
void Model<T, G>::finish_evaluation() {
  dev_.compute().zero(fsdp.scalars(), 8);
  ops::cast(dev_.compute(), fsdp.scalars() + 1, loss_sum_, 1);
  fsdp.sum_scalars();
}

// ------------------------------------------------------------------------------------------------------- embedding

template <class T, class G>
Buffer<T> Model<T, G>::embed() {
  Buffer<T> x = dev_.mem.take<T>(M_ * c_.dim, "block input", Purpose::activations);
  dev_.mark("waiting for communication");
  const T* table = fsdp.use(0);
  dev_.mark("embedding");
  ops::embedding_forward(dev_.compute(), x.get(), table, batch_, M_, c_.seq, c_.dim, c_.arch == Arch::simple);
  fsdp.release(0);
  return x;
}

template <class T, class G>
void Model<T, G>::embed_backward(Buffer<T> dx) {
  Buffer<A> partials = dev_.mem.take<A>(ops::embedding_partials(M_, c_.dim), "partial sums");
  dev_.mark("waiting for communication");
  G* dtable = fsdp.gradient(0);
  dev_.mark("embedding, backward");
  ops::embedding_backward(dev_.compute(), dtable, dx.get(), ops::token_index_at(batch_ + 2 * M_, M_, c_.vocab),
                          partials.get(), M_, c_.vocab, c_.dim);
  fsdp.reduce(0);
}

// ----------------------------------------------------------------------------------------------- transformer block

// x -> norm -> q, k, v -> attention. Fills in statistics, q, k, v and what attention's backward wants.
template <class T, class G>
Buffer<T> Model<T, G>::attend(const T* w, Saved* v, Purpose life, NsaKernels* ran) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const int64_t M = M_, C = c_.dim, D = c_.head_dim(), H = c_.heads, QKV = c_.row();
  auto at = [&](int64_t place) { return place < 0 ? nullptr : w + place; };
  dev_.mark("norms");
  Buffer<T> n = mem.take<T>(M * C, "normed");
  if (v->stats1) {
    ops::norm_apply<T>(s, norm_, n, v->stats1, v->x, at(at_.norm1), at(at_.norm1_bias), M, C);
  } else {
    v->stats1 = mem.take<A>(2 * M, "statistics 1", Purpose::activations);
    ops::norm_forward<T>(s, norm_, n, nullptr, v->stats1, v->x, nullptr, at(at_.norm1), at(at_.norm1_bias), M, C);
  }
  dev_.mark("projections");
  v->qkv = mem.take<T>(M * QKV, "q, k, v", life);
  ops::matmul<T>(s, v->qkv, n, at(at_.qkv), nullptr, nullptr, M, QKV, C);
  n.reset();
  dev_.mark("positions");
  if (rope_table_) ops::rope<T>(s, v->qkv, rope_table_, M, c_.seq, H + c_.key_heads(), D, QKV, false);
  Buffer<T> o = mem.take<T>(M * H * D, "attention", c_.sparse ? Purpose::temporaries : life);
  if (c_.sparse) {
    const NsaShape a = c_.nsa_shape(M / c_.seq);
    ops::add_bias<T>(s, v->qkv + a.gate(0), at(at_.gate_bias), M, c_.gates(), QKV);
    nsa_forward<T>(dev_, o, &v->nsa, v->qkv, phi_at(w), a, life, ran);
  } else {
    dev_.mark("attention");
    v->lse = mem.take<A>(M * H, "log-sum-exp", life);
    attention_forward<T>(s, o, v->lse, v->qkv, v->qkv + H * D, v->qkv + (H + c_.kv_heads) * D, attention_shape());
  }
  return o;
}

// x2 = x + Wo o, and its norm in the same pass, which is returned.
template <class T, class G>
Buffer<T> Model<T, G>::middle(const T* w, Saved* v, const T* o, Purpose life) {
  Stream& s = dev_.compute();
  const int64_t M = M_, C = c_.dim;
  auto at = [&](int64_t place) { return place < 0 ? nullptr : w + place; };
  v->x2 = dev_.mem.take<T>(M * C, "middle of the block", life);
  dev_.mark("projections");
  ops::matmul<T>(s, v->x2, o, at(at_.o), nullptr, nullptr, M, C, c_.heads * c_.head_dim());
  dev_.mark("norms");
  if (!v->stats2) v->stats2 = dev_.mem.take<A>(2 * M, "statistics 2", Purpose::activations);
  Buffer<T> n = dev_.mem.take<T>(M * C, "normed");
  ops::norm_forward<T>(s, norm_, n, v->x2, v->stats2, v->x, v->x2, at(at_.norm2), at(at_.norm2_bias), M, C);
  return n;
}

template <class T, class G>
void Model<T, G>::hidden_again(const T* w, Saved* v, const T* n) {
  const int64_t N = c_.arch == Arch::llama ? 2 * c_.hidden : c_.hidden;
  v->h = dev_.mem.take<T>(M_ * N, "MLP hidden");
  ops::matmul<T>(dev_.compute(), v->h, n, w + at_.up, at_.up_bias < 0 ? nullptr : w + at_.up_bias, nullptr, M_, N,
                 c_.dim);
}

template <class T, class G>
Buffer<T> Model<T, G>::block_forward(int u, Saved* saved, Buffer<T> x, bool keep) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const int64_t M = M_, C = c_.dim, F = c_.hidden;
  const bool llama = c_.arch == Arch::llama;
  auto life = [&](bool kept) { return keep && kept ? Purpose::activations : Purpose::temporaries; };

  Saved here;
  Saved& v = keep ? *saved : here;
  v.x = std::move(x);
  dev_.mark("waiting for communication");
  const T* w = fsdp.use(u);
  auto at = [&](int64_t place) { return place < 0 ? nullptr : w + place; };

  Buffer<T> o = attend(w, &v, life(keeps_attention()), keep ? kernels_of(u) : nullptr);
  if (keep && stats_) {
    const NsaShape a = c_.nsa_shape(M / c_.seq);
    Buffer<double> partials = mem.take<double>(nsa_stats_partials(a), "partial sums");
    nsa_stats<T>(s, stats_ + (u - 1), v.qkv, v.nsa.indices, partials, a);
  }
  if (!keep || !keeps_attention()) {
    v.qkv.reset(), v.lse.reset();
    Buffer<int32_t> indices = std::move(v.nsa.indices);
    v.nsa = NsaSaved<T>();
    if (keep) v.nsa.indices = std::move(indices);
  }
  Buffer<T> n = middle(w, &v, o, life(keeps_middle()));
  if (keep && keeps_attention() && !c_.sparse) v.o = std::move(o);
  o.reset();
  if (!keep) v.x.reset();

  // x2 + W2 gelu(W1 n)
  dev_.mark("MLP");
  v.h = mem.take<T>(M * (llama ? 2 * F : F), "MLP hidden", life(keeps_mlp()));
  Buffer<T> g = mem.take<T>(M * F, "activated");
  if (llama) {
    ops::matmul<T>(s, v.h, n, at(at_.up), nullptr, nullptr, M, 2 * F, C);
    ops::swiglu_forward<T>(s, g, v.h, M, F);
  } else {
    ops::matmul_gelu<T>(s, g, v.h, n, at(at_.up), at(at_.up_bias), M, F, C);
  }
  n.reset();
  if (!keep || !keeps_mlp()) v.h.reset();
  Buffer<T> out = mem.take<T>(M * C, "block input", Purpose::activations);
  ops::matmul<T>(s, out, g, at(at_.down), at(at_.down_bias), v.x2, M, C, F);
  if (!keeps_middle()) v.x2.reset();
  return out;
}

// dx arrives as the gradient of the block's output and leaves, in the same buffer, as that of its input.
template <class T, class G>
Buffer<T> Model<T, G>::block_backward(int u, Saved v, Buffer<T> dx) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const int64_t M = M_, C = c_.dim, F = c_.hidden, D = c_.head_dim(), H = c_.heads, QKV = c_.row();
  const bool llama = c_.arch == Arch::llama;
  const int64_t UP = llama ? 2 * F : F;
  dev_.mark("waiting for communication");
  const T* w = fsdp.use(u);
  G* dw = fsdp.gradient(u);
  auto at = [&](int64_t place) { return place < 0 ? nullptr : w + place; };
  auto to = [&](int64_t place) { return place < 0 ? nullptr : dw + place; };
  auto bias_grad = [&](int64_t place, const T* dy, int64_t N, int64_t ld) {
    if (place < 0) return;
    Buffer<A> partials = mem.take<A>(ops::bias_grad_partials(M, N), "partial sums");
    ops::bias_grad<T, G>(s, to(place), dy, partials, M, N, ld);
  };
  auto norm_backward = [&](int64_t weight, int64_t bias, const T* dy, const T* x, const A* stats) {
    Buffer<A> partials = mem.take<A>(ops::norm_backward_partials(M, C), "partial sums");
    ops::norm_backward<T, G>(s, norm_, dx, to(weight), to(bias), dy, dx, x, stats, at(weight), partials, M, C);
  };

  if (!keeps_middle()) {
    v.o = attend(w, &v, Purpose::temporaries, kernels_of(u));
    Buffer<T> n = middle(w, &v, v.o, Purpose::temporaries);
    hidden_again(w, &v, n);
  } else if (!keeps_mlp()) {
    dev_.mark("norms");
    Buffer<T> n = mem.take<T>(M * C, "normed");
    ops::norm_apply<T>(s, norm_, n, v.stats2, v.x2, at(at_.norm2), at(at_.norm2_bias), M, C);
    dev_.mark("MLP");
    hidden_again(w, &v, n);
  }

  // MLP. The activation's backward leaves g and dh, each in a place of the two buffers.
  {
    dev_.mark("MLP, backward");
    Buffer<T> dg = mem.take<T>(M * F, "gradient of activated");
    ops::matmul_dgrad<T>(s, dg, dx, at(at_.down), M, C, F, false);
    if (llama) ops::swiglu_backward<T>(s, dg, v.h, M, F);
    else ops::gelu_backward<T>(s, dg, v.h, M * F);
    Buffer<T>&g = llama ? dg : v.h, &dh = llama ? v.h : dg;
    ops::matmul_wgrad<T, G>(s, to(at_.down), dx, g, M, C, F, false);
    bias_grad(at_.down_bias, dx, C, C);
    g.reset();
    dev_.mark("norms, backward");
    Buffer<T> n = mem.take<T>(M * C, "normed, then its gradient");
    ops::norm_apply<T>(s, norm_, n, v.stats2, v.x2, at(at_.norm2), at(at_.norm2_bias), M, C);
    dev_.mark("MLP, backward");
    ops::matmul_wgrad<T, G>(s, to(at_.up), dh, n, M, UP, C, false);
    bias_grad(at_.up_bias, dh, F, F);
    ops::matmul_dgrad<T>(s, n, dh, at(at_.up), M, UP, C, false);
    dh.reset();
    dev_.mark("norms, backward");
    norm_backward(at_.norm2, at_.norm2_bias, n, v.x2, v.stats2);
    v.x2.reset(), v.stats2.reset();
  }

  // Attention.
  if (keeps_middle() && !keeps_attention()) v.o = attend(w, &v, Purpose::temporaries, kernels_of(u));
  Buffer<T> dqkv;
  {
    Buffer<T> d_o = mem.take<T>(M * H * D, "gradient of attention");
    dev_.mark("projections, backward");
    ops::matmul_dgrad<T>(s, d_o, dx, at(at_.o), M, C, H * D, false);
    if (c_.sparse) {
      const NsaShape a = c_.nsa_shape(M / c_.seq);
      if (!v.o) {
        v.o = mem.take<T>(M * H * D, "attention");
        dev_.mark("gates, backward");
        const Kernel k = nsa_combine<T>(s, v.o, v.nsa.o_compressed, v.nsa.o_selected, v.nsa.o_window, v.qkv, a);
        if (NsaKernels* ran = kernels_of(u)) ran->add(Stage::gates, k);
      }
      dev_.mark("projections, backward");
      ops::matmul_wgrad<T, G>(s, to(at_.o), dx, v.o, M, C, H * D, false);
      v.o.reset();
      dqkv = mem.take<T>(M * QKV, "gradient of q, k, v");
      nsa_backward<T, G>(dev_, dqkv, phi_at(dw), d_o, v.qkv, phi_at(w), std::move(v.nsa), a, kernels_of(u));
      Buffer<A> partials = mem.take<A>(ops::bias_grad_partials(M, c_.gates()), "partial sums");
      dev_.mark("gates, backward");
      ops::bias_grad<T, G>(s, to(at_.gate_bias), dqkv + a.gate(0), partials, M, c_.gates(), QKV);
    } else {
      ops::matmul_wgrad<T, G>(s, to(at_.o), dx, v.o, M, C, H * D, false);
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
  ops::norm_apply<T>(s, norm_, n, v.stats1, v.x, at(at_.norm1), at(at_.norm1_bias), M, C);
  dev_.mark("projections, backward");
  ops::matmul_wgrad<T, G>(s, to(at_.qkv), dqkv, n, M, QKV, C, false);
  ops::matmul_dgrad<T>(s, n, dqkv, at(at_.qkv), M, QKV, C, false);
  dqkv.reset();
  dev_.mark("norms, backward");
  norm_backward(at_.norm1, at_.norm1_bias, n, v.x, v.stats1);
  fsdp.release(u);
  fsdp.reduce(u);
  return dx;
}

// ------------------------------------------------------------------------------------------------------- MLP block

template <class T, class G>
Buffer<T> Model<T, G>::mlp_block_forward(int u, Saved* saved, Buffer<T> x, bool keep) {
  Stream& s = dev_.compute();
  const int64_t M = M_, C = c_.dim, F = c_.hidden;
  Saved here;
  Saved& v = keep ? *saved : here;
  v.x = std::move(x);
  dev_.mark("waiting for communication");
  const T* w = fsdp.use(u);
  dev_.mark("MLP");
  v.h = dev_.mem.take<T>(M * F, "MLP hidden", keep && keeps_mlp() ? Purpose::activations : Purpose::temporaries);
  Buffer<T> g = dev_.mem.take<T>(M * F, "activated");
  ops::matmul_gelu<T>(s, g, v.h, v.x, w + at_.up, nullptr, M, F, C);
  if (!keep || !keeps_mlp()) v.h.reset();
  Buffer<T> out = dev_.mem.take<T>(M * C, "block input", Purpose::activations);
  ops::matmul<T>(s, out, g, w + at_.down, nullptr, v.x, M, C, F);
  return out;
}

template <class T, class G>
Buffer<T> Model<T, G>::mlp_block_backward(int u, Saved v, Buffer<T> dx) {
  Stream& s = dev_.compute();
  const int64_t M = M_, C = c_.dim, F = c_.hidden;
  dev_.mark("waiting for communication");
  const T* w = fsdp.use(u);
  G* dw = fsdp.gradient(u);
  if (!keeps_mlp()) hidden_again(w, &v, v.x);
  dev_.mark("MLP, backward");
  Buffer<T> dh = dev_.mem.take<T>(M * F, "gradient of activated");
  ops::matmul_dgrad<T>(s, dh, dx, w + at_.down, M, C, F, false);
  ops::gelu_backward<T>(s, dh, v.h, M * F);
  ops::matmul_wgrad<T, G>(s, dw + at_.down, dx, v.h, M, C, F, false);
  ops::matmul_wgrad<T, G>(s, dw + at_.up, dh, v.x, M, F, C, false);
  ops::matmul_dgrad<T>(s, dx, dh, w + at_.up, M, F, C, true);
  fsdp.release(u);
  fsdp.reduce(u);
  return dx;
}

// ------------------------------------------------------------------------------------------------------------ head

// Final norm, logits, loss, and back again to the gradient of x, chunk by chunk: no more than chunk_ rows of logits
// ever exist.
template <class T, class G>
Buffer<T> Model<T, G>::head(Buffer<T> x, double scale, bool backward, bool first) {
  Stream& s = dev_.compute();
  Memory& mem = dev_.mem;
  const int64_t M = M_, C = c_.dim, V = c_.vocab;
  const Unit& unit = fsdp.units()[size_t(head_unit())];
  const int64_t gamma = unit.params[1].offset, beta = unit.params.size() > 2 ? unit.params[2].offset : -1;
  dev_.mark("waiting for communication");
  const T* w = fsdp.use(head_unit());
  dev_.mark("head and loss");
  Buffer<A> stats = mem.take<A>(2 * M, "final statistics"), losses = mem.take<A>(M, "losses");
  Buffer<T> n = mem.take<T>(M * C, "final normed, then its gradient");
  ops::norm_forward<T>(s, norm_, n, nullptr, stats, x, nullptr, w + gamma, beta < 0 ? nullptr : w + beta, M, C);
  G* dw = backward ? fsdp.gradient(head_unit()) : nullptr;
  {
    Buffer<T> logits = mem.take<T>(chunk_ * V, "logits of a chunk");
    // Chunks are summed in the accumulation type: a sum of many roundings to bf16 would lose what they add.
    const bool wide = backward && !std::is_same_v<G, A> && chunk_ < M;
    Buffer<A> sum;
    if (wide) sum = mem.take<A>(V * C, "head's gradient");
    for (int64_t i = 0; i < M; i += chunk_) {
      const int64_t rows = std::min(chunk_, M - i);
      ops::matmul<T>(s, logits, n + i * C, w, nullptr, nullptr, rows, V, C);
      ops::cross_entropy<T>(s, logits, losses + i, batch_ + M + i, A(scale), backward, rows, V);
      if (!backward) continue;
      if (wide) ops::matmul_wgrad<T, A>(s, sum, logits, n + i * C, rows, V, C, i > 0);
      else ops::matmul_wgrad<T, G>(s, dw, logits, n + i * C, rows, V, C, i > 0);
      ops::matmul_dgrad<T>(s, n + i * C, logits, w, rows, V, C, false);
    }
    if constexpr (!std::is_same_v<G, A>)
      if (wide) ops::cast<G, A>(s, dw, sum, V * C);
  }
  {
    Buffer<A> partials = mem.take<A>(ops::sum_partials(), "partial sums");
    ops::sum<A>(s, loss_sum_, losses, partials, M, !first);
  }
  if (!backward) return Buffer<T>();
  Buffer<A> partials = mem.take<A>(ops::norm_backward_partials(M, C), "partial sums");
  ops::norm_backward<T, G>(s, norm_, n, dw + gamma, beta < 0 ? nullptr : dw + beta, n, nullptr, x, stats, w + gamma,
                           partials, M, C);
  return n;
}

template class Model<float, float>;
template class Model<bf16, bf16>;
template class Model<bf16, float>;
template class Model<double, double>;
