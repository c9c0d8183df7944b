// The model: its parameters and FLOPs, the gradient of its loss, what is recomputed, frozen, tied or not fused. Run at
// 1, 2, 3 and 4 ranks, as test_fsdp.cc.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <set>

#include "test/training.h"

namespace {
// The loss straight from the definitions, a number at a time: no chunks, no fusion, nothing of the program's but its
// weights. One rank's.
double loss_by_definition(const ModelConfig& c, int64_t batch, const int32_t* host, const Fsdp<double, double>& fsdp) {
  using Vector = std::vector<double>;
  using Rows = std::vector<Vector>;
  auto weight = [&](int u, const char* name, int64_t i) -> double {
    const std::string of = u == 0 ? "embedding" : u == int(c.depth) + 1 ? "head" : strf("block.%d", u - 1);
    const std::string full =
        c.tied && of == "head" && std::string(name) == "weight" ? "embedding.weight" : of + "." + name;
    for (size_t unit = 0; unit < fsdp.units().size(); ++unit)
      for (const Param& p : fsdp.units()[unit].params)
        if (p.name == full) return get(fsdp.master(int(unit)), p.offset + i);
    return 0;  // a bias that this architecture has not
  };
  auto times = [&](int u, const char* name, const Vector& x, int64_t rows) {
    Vector y(static_cast<size_t>(rows));
    for (int64_t i = 0; i < rows; ++i)
      for (size_t j = 0; j < x.size(); ++j) y[size_t(i)] += weight(u, name, i * int64_t(x.size()) + int64_t(j)) * x[j];
    return y;
  };
  const bool layer = c.arch == Arch::simple || c.arch == Arch::mlp,
             rotates = c.arch == Arch::rope || c.arch == Arch::llama;
  auto norm = [&](int u, const std::string& name, const Vector& x) {
    double mean = 0, square = 0;
    for (double v : x) mean += layer ? v / double(x.size()) : 0;
    for (double v : x) square += (v - mean) * (v - mean) / double(x.size());
    Vector y(x.size());
    for (size_t i = 0; i < x.size(); ++i)
      y[i] = (x[i] - mean) / std::sqrt(square + c.norm_eps) * weight(u, name.c_str(), int64_t(i)) +
             weight(u, (name + ".bias").c_str(), int64_t(i));
    return y;
  };
  auto gelu = [](double x) {
    return 0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
  };
  auto mlp = [&](int u, const Vector& x) {
    Vector h = times(u, "mlp.up", x, c.hidden);
    if (c.arch == Arch::llama) {
      const Vector gate = times(u, "mlp.gate", x, c.hidden);
      for (size_t i = 0; i < h.size(); ++i) h[i] *= gate[i] / (1 + std::exp(-gate[i]));
    } else {
      for (size_t i = 0; i < h.size(); ++i) h[i] = gelu(h[i] + weight(u, "mlp.up.bias", int64_t(i)));
    }
    Vector y = times(u, "mlp.down", h, c.dim);
    for (size_t i = 0; i < y.size(); ++i) y[i] += weight(u, "mlp.down.bias", int64_t(i));
    return y;
  };
  auto rotate = [&](Vector& x, int64_t t) {
    const size_t D = size_t(c.head_dim());
    for (size_t head = 0; rotates && head < x.size(); head += D)
      for (size_t i = 0; i < D / 2; ++i) {
        const double angle = double(t) * c.rope.angle(i, D);
        const double a = x[head + i], b = x[head + i + D / 2];
        x[head + i] = a * std::cos(angle) - b * std::sin(angle);
        x[head + i + D / 2] = b * std::cos(angle) + a * std::sin(angle);
      }
  };
  double loss = 0;
  for (int64_t b = 0; b < batch; ++b) {
    Rows x;
    for (int64_t t = 0; t < c.seq; ++t) {
      x.emplace_back(static_cast<size_t>(c.dim));
      for (int64_t i = 0; i < c.dim; ++i) {
        const double angle = double(t) * std::pow(10000.0, -double(i / 2 * 2) / double(c.dim));
        x.back()[size_t(i)] = weight(0, "weight", host[b * c.seq + t] * c.dim + i) + (c.arch != Arch::simple ? 0
                                                                                      : i % 2 ? std::cos(angle)
                                                                                              : std::sin(angle));
      }
    }
    for (int u = 1; u <= int(c.depth); ++u) {
      const size_t D = c.attends() ? size_t(c.head_dim()) : 0, DV = c.attends() ? size_t(c.v_head_dim()) : 0;
      Rows q, k, v;
      for (int64_t t = 0; c.attends() && t < c.seq; ++t) {
        const Vector n = norm(u, "norm1", x[size_t(t)]);
        q.push_back(times(u, "attention.q", n, c.heads * int64_t(D)));
        k.push_back(times(u, "attention.k", n, c.kv_heads * int64_t(D)));
        v.push_back(times(u, "attention.v", n, c.kv_heads * int64_t(DV)));
        rotate(q.back(), t), rotate(k.back(), t);
      }
      for (size_t t = 0; t < x.size(); ++t) {
        Vector o(size_t(c.heads) * DV);
        for (size_t h = 0; c.attends() && h < size_t(c.heads); ++h) {
          const size_t kv_head = h / size_t(c.heads / c.kv_heads);
          Vector p;
          double sum = 0;
          for (size_t j = 0; j <= t; ++j) {
            double dot = 0;
            for (size_t d = 0; d < D; ++d) dot += q[t][h * D + d] * k[j][kv_head * D + d];
            p.push_back(std::exp(dot / std::sqrt(double(D))));
            sum += p.back();
          }
          for (size_t j = 0; j <= t; ++j)
            for (size_t d = 0; d < DV; ++d) o[h * DV + d] += p[j] / sum * v[j][kv_head * DV + d];
        }
        if (c.attends()) {
          const Vector y = times(u, "attention.o", o, c.dim);
          for (size_t i = 0; i < y.size(); ++i) x[t][i] += y[i];
        }
        const Vector y = mlp(u, c.attends() ? norm(u, "norm2", x[t]) : x[t]);
        for (size_t i = 0; i < y.size(); ++i) x[t][i] += y[i];
      }
    }
    for (int64_t t = 0; t < c.seq; ++t) {
      const int32_t target = host[batch * c.seq + b * c.seq + t];
      if (target < 0) continue;
      const int u = int(c.depth) + 1;
      const Vector logits = times(u, "weight", norm(u, "norm", x[size_t(t)]), c.vocab);
      double sum = 0;
      for (double z : logits) sum += std::exp(z);
      loss += std::log(sum) - logits[size_t(target)];
    }
  }
  return loss / double(batch * c.seq);
}
}  // namespace

TEST_CASE("the reference model has the parameters and FLOPs that it should", "[model]") {
  CHECK(parameter_count(preset_named("simple").model) == 973234176);
  CHECK(parameter_count(preset_named("llama-8b").model) == 8030261248);
  const Preset p = preset_named("simple");
  CHECK(flops_per_token(p.model) * double(p.batch * p.model.seq) == Approx(178.12e12).epsilon(1e-4));
  // What is frozen spares its own product; below the first block that is trained a third of the work is left.
  const ModelConfig& all = p.model;
  auto spared = [](ModelConfig c, const std::vector<std::string>& frozen) {
    const double whole = flops_per_token(c);
    c.frozen = frozen;
    return whole - flops_per_token(c);
  };
  const double up = double(all.dim * all.hidden),
               block = 2 * up + double(all.dim * (2 * all.heads + 2 * all.kv_heads) * all.head_dim()),
               attention = double(all.dim * all.seq);
  CHECK(spared(all, {"embedding"}) == 0);
  CHECK(spared(all, {"block.3.mlp.up"}) == 2 * up);
  CHECK(spared(all, {"block.0", "block.1"}) == 4 * block);  // the embedding's gradient goes through them
  CHECK(spared(all, {"embedding", "block.0", "block.1"}) == 8 * block + 8 * attention);
  // Phi multiplies once for each compressed key, a stride of tokens.
  const ModelConfig by_mean = sparse(small(Arch::rope, 11), Phi::mean),
                    by_mlp = sparse(small(Arch::rope, 11), Phi::mlp);
  const double D = double(by_mlp.head_dim()), phi = 2 * D * double(by_mlp.nsa.block) * D + D * 2 * D;
  CHECK(flops_per_token(by_mlp) - flops_per_token(by_mean) ==
        Approx(6 * double(by_mlp.depth * 2 * by_mlp.kv_heads) * phi / double(by_mlp.nsa.stride)));
  // Heads of another width: q and k, v and o, and what they make of each key, of which a query sees half.
  ModelConfig wide = all;
  wide.own_head_dim = 192, wide.own_v_head_dim = 160;  // in place of 128
  const double heads = double(all.dim * (all.heads + all.kv_heads)), keys = double(all.heads * all.seq) / 2;
  CHECK(flops_per_token(wide) - flops_per_token(all) == Approx(6 * double(all.depth) * (heads + keys) * (64 + 32)));
  ModelConfig tied = all;
  tied.tied = true;
  CHECK(flops_per_token(tied) == flops_per_token(all));
  CHECK(spared(tied, {"embedding", "block.0"}) == 4 * block + 4 * attention + 2 * double(all.dim * all.vocab));
}

// As the papers have it, and not as the table says: sqrt(2 / 5d), less by sqrt(2L) where the residual stream is
// written.
TEST_CASE("initial deviations are those of small init", "[model]") {
  const auto std_of = [](const ModelConfig& c, const std::string& name) {
    for (const Unit& u : parameter_table(c))
      for (const Param& p : u.params)
        if (p.name == name) return double(p.std);
    FAIL(name << " is no parameter");
    return 0.0;
  };
  for (Arch arch : all_archs)
    for (bool tied : {false, true}) {
      ModelConfig c = small(arch, 5);
      c.tied = tied;
      const double d = double(c.dim), matrix = std::sqrt(2 / (5 * d)),
                   stream = matrix / std::sqrt(2.0 * double(c.depth));
      const bool large = (arch == Arch::simple || arch == Arch::mlp) && !tied;  // positions are added to it, or no norm
      INFO(name_of(arch) << (tied ? ", tied" : ""));
      CHECK(std_of(c, "embedding.weight") == Approx(large ? 1 : matrix));
      if (!tied) CHECK(std_of(c, "head.weight") == Approx(matrix));
      CHECK(std_of(c, "block.1.mlp.up") == Approx(matrix));
      CHECK(std_of(c, "block.1.mlp.down") == Approx(stream));
      if (!c.attends()) continue;
      CHECK(std_of(c, "block.1.attention.q") == Approx(matrix));
      CHECK(std_of(c, "block.1.attention.o") == Approx(stream));
      c = sparse(c, Phi::mlp);
      const double wide = double(c.nsa.block * c.head_dim());
      CHECK(std_of(c, "block.1.attention.phi_k.w1") == Approx(1 / std::sqrt(wide)));
      CHECK(std_of(c, "block.1.attention.phi_v.w2") == Approx(1 / std::sqrt(2.0 * double(c.head_dim()))));
      CHECK(std_of(c, "block.1.attention.phi_k.position") == Approx(0.02));
    }
}

TEST_CASE("the whole model's gradient is that of its loss", "[model]") {
  // One rank, in double. The gradient is read where AdamW leaves it: with beta1 = 0 the first moment is the gradient.
  if (test_world().size != 1) SKIP_TEST("is about one rank");
  auto models = all_models(11);
  models.emplace_back("rope, tied", small(Arch::rope, 11));
  models.back().second.tied = true;
  models.emplace_back("simple in one unit, tied, in pieces", small(Arch::simple, 11));
  models.back().second.tied = true, models.back().second.wrap = Wrap::single, models.back().second.hidden_bytes = 1000;
  models.emplace_back("llama by sublayers, some replicated", small(Arch::llama, 11));
  models.back().second.wrap = Wrap::sublayer, models.back().second.replicate_below = 33;
  for (auto [name, c] : models) {
    INFO(name);
    c.depth = 2, c.seq = c.sparse ? 13 : 5;
    c.nsa.selected = 4;  // all there are: a choice that flips between two losses has no derivative
    const int64_t batch = 2, M = batch * c.seq;
    Device dev(Backend::cpu, 0);
    float clip = 0;
    HostBuffer<ops::AdamW> adamw(dev, 1);
    adamw[0] = ops::AdamW(0.0f, 0.0f, 0.0f, 1e-8f, 0.0f, 1);
    auto step = [&](Model<double, double>& m, const int32_t* host, Event& copied) {
      dev.mem.begin("step");
      m.begin_step(adamw.get(), clip);
      m.forward_backward(host, 1.0 / double(M), true, true, copied);
      m.end_step();
      dev.mem.end();
    };
    FsdpOptions options;
    options.reduce_dtype = Dtype::f64;
    Event copied(dev);
    {
      Model<double, double> m(dev, World(), Transport::none, c, batch, options, Links::planned);
      step(m, nullptr, copied);
    }
    dev.mem.commit();
    dev.mem.rewind();
    dev.mode = Mode::run;
    Model<double, double> model(dev, World(), Transport::none, c, batch, options, Links::open);
    model.init_weights();
    HostBuffer<int32_t> host(dev, batch_ints(c, batch));
    for (int64_t i = 0; i < M; ++i) {
      host[i] = token_at(1, i / c.seq, i % c.seq, c.vocab);
      micro_batch_at(host.get(), M).targets[i] = i == 3 ? -1 : token_at(1, i / c.seq, i % c.seq + 1, c.vocab);
    }
    index_batch(c, batch, host.get());
    auto loss = [&] {
      step(model, host.get(), copied);
      dev.compute().synchronize();
      return model.fsdp.scalars()->loss / double(M);
    };
    dev.compute().synchronize();
    // Biases away from zero and gains away from one, so that nothing cancels by chance.
    for (size_t u = 0; u < model.fsdp.units().size(); ++u)
      for (const Param& p : model.fsdp.units()[u].params)
        if (!p.decay)
          for (int64_t i = 0; i < p.numel; ++i)
            model.fsdp.master(int(u)).whole[p.offset + i] += float(0.1 * std::sin(double(i + p.id)));
    loss();
    double square = 0;
    std::vector<std::vector<float>> gradient;
    for (size_t u = 0; u < model.fsdp.units().size(); ++u) {
      const float* g = static_cast<const float*>(model.fsdp.first_moment(int(u)));
      gradient.emplace_back(g, g + model.fsdp.units()[u].numel);
      for (float x : gradient.back()) square += double(x) * double(x);
    }
    CHECK(std::sqrt(model.fsdp.scalars()->norm2) == Approx(std::sqrt(square)).epsilon(1e-6));
    if (!c.sparse) CHECK(loss() == Approx(loss_by_definition(c, batch, host.get(), model.fsdp)).epsilon(1e-9));
    // Clipped to a tenth of its norm.
    clip = float(0.1 * std::sqrt(square));
    loss();
    for (size_t u = 0; u < model.fsdp.units().size(); ++u)
      for (int64_t i = 0; i < model.fsdp.units()[u].numel; ++i)
        if (!(std::abs(static_cast<const float*>(model.fsdp.first_moment(int(u)))[i] - 0.1 * gradient[u][size_t(i)]) <=
              1e-6))
          FAIL("not clipped");
    clip = 0;
    for (size_t u = 0; u < model.fsdp.units().size(); ++u)
      for (const Param& p : model.fsdp.units()[u].params) {
        INFO(p.name);
        double size = 0;
        for (int64_t i = 0; i < p.numel; ++i)
          size = std::max(size, std::abs(double(gradient[u][size_t(p.offset + i)])));
        // Through a linear phi a position adds the same to every compressed key, which softmax does not see.
        const bool unseen = c.nsa.phi == Phi::linear && p.name.find("phi_k.position") != std::string::npos;
        if (!unseen) CHECK(size > 1e-5);
        for (int64_t k = 0; k < 4; ++k) {
          const int64_t i = p.offset + (k * 7919 + 13) % p.numel;
          float& w = model.fsdp.master(int(u)).whole[i];
          const float was = w, h = 0x1p-9f;
          w = was + h;
          const double above = loss(), high = double(w);
          w = was - h;
          const double below = loss(), low = double(w);
          w = was;
          CHECK(std::abs((above - below) / (high - low) - double(gradient[u][size_t(i)])) < 1e-3 * size + 1e-8);
        }
      }
  }
}

TEST_CASE("gradients in bf16 do not show in how many pieces the MLP and the head were made", "[model]") {
  if (test_world().size != 1) SKIP_TEST("is about one rank");
  for (Arch arch : {Arch::simple, Arch::llama, Arch::mlp}) {
    Weights kept;
    for (Recompute recompute : {Recompute::none, Recompute::mlp}) {
      ModelConfig c = small(arch, 64);
      c.depth = 1, c.seq = 64, c.recompute = recompute;
      const Weights one = gradients<bf16, bf16>(c, 4);
      c.hidden_bytes = 800;      // 8 rows of 256 and fewer
      c.logits_bytes = 4 * 128;  // 4 rows
      const Weights many = gradients<bf16, bf16>(c, 4);
      // Nor in whether it was recomputed, to the last bit.
      if (recompute == Recompute::none) kept = many;
      CHECK(many == kept);
      for (const auto& [name, gradient] : one) {
        INFO(name_of(arch) << (recompute == Recompute::mlp ? ", recomputed: " : ": ") << name);
        double size = 0, furthest = 0;
        for (size_t i = 0; i < gradient.size(); ++i) {
          size = std::max(size, std::abs(double(gradient[i])));
          furthest = worse(furthest, std::abs(double(gradient[i]) - double(many.at(name)[i])));
        }
        // A sum in bf16 loses half of its last bit with every piece.
        CHECK(furthest <= 0x1p-7 * size);
      }
    }
  }
}

TEST_CASE("the head's chunks add up to the whole", "[model]") {
  Setup s;
  s.model = small(Arch::rope, 4 * test_world().size + 1);
  s.steps = 4;
  const Outcome whole = train<float, float>(s, test_world());
  s.fsdp.reduce_dtype = Dtype::bf16;
  const Outcome narrow = train<bf16, bf16>(s, test_world());
  // Seven rows at a time, which do not divide the batch either.
  s.model.logits_bytes = 7 * s.model.vocab * 2;
  CHECK(furthest(train<bf16, bf16>(s, test_world()).losses, narrow.losses) < 2e-3);
  s.fsdp.reduce_dtype = Dtype::f32, s.model.logits_bytes *= 2;
  CHECK(furthest(train<float, float>(s, test_world()).losses, whole.losses) < 2e-5);
}

TEST_CASE("weights decay, and of them matrices alone", "[model]") {
  // Without a gradient nothing else moves: all targets are padding.
  const World& world = test_world();
  Setup s;
  s.model = small(Arch::simple, 4 * world.size + 1);
  s.steps = 1, s.lr = 0.5, s.silent = true;
  const Outcome out = train<float, float>(s, world);
  CHECK(out.losses[0] == 0);
  CHECK(out.norms[0] == 0);
  std::vector<Unit> units = parameter_table(s.model);
  lay_out(&units, world.size);
  for (size_t u = 0; u < units.size(); ++u) {
    for (int64_t i = 0; i < units[u].shard; ++i)
      if (world.rank * units[u].shard + i >= units[u].numel) CHECK(out.shards[u][size_t(i)] == 0);
    for (const Param& p : units[u].params)
      for (int64_t i = 0; i < p.numel; ++i)
        CHECK(out.trained.at(p.name)[size_t(i)] ==
              Approx(out.weights.at(p.name)[size_t(i)] * (p.decay ? 1 - 0.5 * 0.1 : 1.0)).margin(1e-7));
  }
}

TEST_CASE("every row of a tied embedding is trained, whoever holds it", "[model]") {
  const World& world = test_world();
  for (Wrap wrap : {Wrap::block, Wrap::single, Wrap::size})
    for (int64_t replicate_below : {0, 1000}) {
      Setup s;
      s.model = small(Arch::rope, 4 * world.size + 1), s.steps = 1;
      s.model.tied = true, s.model.wrap = wrap, s.model.replicate_below = replicate_below;
      if (wrap == Wrap::size) s.model.wrap_min_params = 3300, s.fsdp.reduce_last = true;
      const Outcome out = train<float, float>(s, world), one = alone<float, float>(s);
      const std::vector<float>&before = out.weights.at("embedding.weight"), &after = out.trained.at("embedding.weight");
      double furthest = 0;
      for (int64_t row = 0; row < s.model.vocab; ++row) {
        int64_t moved = 0;
        for (int64_t i = row * s.model.dim; i < (row + 1) * s.model.dim; ++i) {
          moved += before[size_t(i)] != after[size_t(i)];
          if (world.rank != 0) continue;
          furthest =
              worse(furthest, double(std::abs(after[size_t(i)] - one.trained.at("embedding.weight")[size_t(i)])));
        }
        CHECK(moved == s.model.dim);
      }
      CHECK(furthest < 1e-5);
    }
}

TEST_CASE("what is frozen stays as it is, and the others train as if it were not", "[model]") {
  const World& world = test_world();
  struct Case {
    Arch arch;
    std::vector<std::string> frozen;
    bool sparse, tied, some_replicated;
  };
  for (const Case& c : {Case{Arch::rope, {"embedding", "block.1"}, false, false, false},
                        {Arch::rope, {"block.0.attention", "block.0.norm1", "block.2.mlp.up"}, false, false, false},
                        {Arch::rope, {"head", "block"}, false, false, true},
                        {Arch::simple, {"block.0.mlp.up", "block.0.norm2", "head.norm.bias"}, false, true, true},
                        // Of one product with what trains: q, k and v; gate and up.
                        {Arch::rope, {"block.0.attention.q", "block.1.attention.k"}, false, false, false},
                        {Arch::llama, {"block.0.mlp.gate", "block.1.mlp.up"}, false, false, false},
                        {Arch::llama, {"block.0.attention.phi_k", "block.1.attention.gate"}, true, false, false}}) {
    INFO(name_of(c.arch) << ", frozen " << c.frozen[0]);
    Setup s;
    s.model = small(c.arch, 4 * world.size + 1);
    if (c.sparse) s.model.dim = 64, s.model = sparse(s.model, Phi::mlp);
    s.model.tied = c.tied, s.model.replicate_below = c.some_replicated ? 33 : 0;
    s.steps = 1, s.clip = 0;
    const Outcome free = train<float, float>(s, world);
    s.model.frozen = c.frozen;
    const Outcome first = train<float, float>(s, world);
    // The norm is that of what trains. (A weight and its bias begin with one name.)
    if (c.arch != Arch::simple && !c.sparse) {
      s.model.frozen.clear();
      for (const Unit& u : parameter_table(small(c.arch, s.model.vocab)))
        for (const Param& p : u.params)
          if (std::none_of(c.frozen.begin(), c.frozen.end(), [&](auto& f) { return is_among(p.name, f); }))
            s.model.frozen.push_back(p.name);
      const Outcome others = train<float, float>(s, world);
      CHECK(std::hypot(first.norms[0], others.norms[0]) == Approx(free.norms[0]).epsilon(1e-6));
      s.model.frozen = c.frozen;
    }
    s.steps = 3, s.clip = 1, s.micro_batches = 2, s.poison = true;
    const Outcome out = train<float, float>(s, world);
    std::vector<Unit> units = parameter_table(s.model);
    lay_out(&units, world.size);
    int64_t reduced = 0, moments = 0, fixed = 0;
    for (const Unit& u : units) {
      for (const Param& p : u.params) {
        INFO(p.name);
        CHECK(first.trained.at(p.name) == (p.frozen ? free.weights : free.trained).at(p.name));
        CHECK((out.trained.at(p.name) == out.weights.at(p.name)) == p.frozen);
        fixed += p.has_gradient ? 0 : p.numel;
      }
      moments += u.with_gradient.shard * 8;
    }
    CHECK((fixed == 0) == (c.frozen[0] == "block.0.attention.q" || c.frozen[0] == "block.0.mlp.gate"));
    // What is reduced, and what has moments, is what trains and no more; what is gathered is all.
    const int64_t has = out.memory.before_step[int(Purpose::moments)];
    CHECK((has >= moments && has - moments < int64_t(units.size()) * 2 * 4096));
    std::vector<int64_t> gathered(units.size());
    for (const Issued& i : first.trace) {
      if (i.unit < 0 || !i.moves() || i.kind == Issued::optimizer) continue;
      const Unit& u = units[size_t(i.unit)];
      if (i.kind == Issued::all_gather) {
        gathered[size_t(i.unit)] += i.bytes;
        continue;
      }
      CHECK((i.bytes == u.with_gradient.padded * 4 && u.trained()));
      reduced += i.bytes;
    }
    for (size_t u = 0; u < units.size(); ++u)
      if (!units[u].replicated)
        CHECK(((gathered[u] > 0) == (world.size > 1) && gathered[u] % (units[u].padded * 4) == 0));
    CHECK(reduced > 0);
    const Outcome one = alone<float, float>(s);
    if (world.rank != 0) continue;
    CHECK(furthest(out.losses, one.losses) < 2e-5);
    CHECK(furthest(out.norms, one.norms) < 2e-3);
  }
}

TEST_CASE("the backward pass ends at the first block that is trained", "[model]") {
  const World& world = test_world();
  for (Wrap wrap : {Wrap::block, Wrap::sublayer, Wrap::single, Wrap::size})
    for (int n = 0; n < 6; ++n) {
      if ((int(wrap) + n + world.size) % 2) continue;  // each at every second number of ranks
      INFO("wrap " << int(wrap) << " case " << n);
      Setup s;
      s.model = sparse(small(Arch::rope, 4 * world.size + 1), Phi::linear);
      if (n == 1 || n == 4) s.model = small(n == 1 ? Arch::mlp : Arch::simple, 4 * world.size + 1);
      s.model.depth = 4, s.rows = 48, s.model.wrap = wrap, s.model.wrap_min_params = 8000;
      s.model.diagnostics = true;
      s.model.tied = n == 2 || n == 3, s.model.replicate_below = n == 3 ? 50 : 0;
      if (n == 4) s.model.recompute = Recompute::block;
      if (n == 5) s.fsdp.reshard_after_forward = false;
      s.steps = 1, s.clip = 0, s.poison = true;
      const Outcome free = train<float, float>(s, world);
      s.model.frozen = {"embedding", "block.0", "block.1", "block.2.attention"};
      if (n == 5) s.model.frozen = {"embedding", "block"};
      const Outcome out = train<float, float>(s, world);
      for (const Unit& u : parameter_table(s.model))
        for (const Param& p : u.params) {
          INFO(p.name);
          CHECK(out.trained.at(p.name) == (p.frozen ? free.weights : free.trained).at(p.name));
        }
      CHECK(out.losses == free.losses);
      CHECK(out.nsa.size() == (s.model.sparse ? 4 : 0));
      for (size_t i = 0; i < out.nsa.size(); ++i)
        CHECK(std::memcmp(&out.nsa[i], &free.nsa[i], sizeof free.nsa[i]) == 0);
      const int activations = int(Purpose::activations);
      CHECK(out.memory.peak[activations] < free.memory.peak[activations] * (n == 4 ? 5 : 4) / 6);
      auto used_behind = [](const std::vector<Issued>& trace) {  // the first reduction, whose unit is the head's
        const auto from = std::find_if(trace.begin(), trace.end(), [](const Issued& i) {
          return i.kind == Issued::reduce_scatter || (i.kind == Issued::all_reduce && i.unit >= 0);
        });
        return std::count_if(from, trace.end(), [](const Issued& i) { return i.kind == Issued::use; });
      };
      if (wrap == Wrap::block || wrap == Wrap::sublayer) CHECK(used_behind(out.trace) < used_behind(free.trace));
      s.steps = 3, s.clip = 1, s.micro_batches = 3, s.fsdp.reduce_last = n % 2 == 0;
      const Outcome several = train<float, float>(s, world), one = alone<float, float>(s);
      if (world.rank != 0) continue;
      CHECK(furthest(several.losses, one.losses) < 2e-5);
      CHECK(furthest(several.norms, one.norms) < 2e-3);
    }
}

TEST_CASE("validation changes no bit of the training, and sees the loss that the next step sees", "[model]") {
  for (int n = 0; n < 8; ++n) {
    INFO("case " << n);
    Setup s;
    s.model = small(n == 1 ? Arch::llama : Arch::rope, 4 * test_world().size + 1);
    s.steps = 4, s.micro_batches = 2;
    if (n == 1) s.model.wrap = Wrap::sublayer, s.model.replicate_below = 33, s.fsdp.gather_slots = 3;
    if (n == 2) s.fsdp.reshard_after_forward = false;
    if (n == 3) s.clip = 0, s.fsdp.update_in_backward = true;
    if (n == 4) s.model.forward_prefetch = 0, s.model.backward_prefetch = BackwardPrefetch::none;
    const Outcome plain = train<float, float>(s, test_world());
    s.validate = true, s.poison = true, s.delay_ms = n == 0 ? 2 : 0;
    const Outcome out = train<float, float>(s, test_world());
    CHECK(same(out, plain));
    CHECK(out.shards == plain.shards);
    CHECK(text_of(out.trace) == text_of(plain.trace));  // or a graph of it would not be that of another step
    for (size_t i = 1; i < plain.losses.size(); ++i) CHECK(out.validated[i - 1] == plain.losses[i]);
  }
}

namespace {
// However the batch is cut: by ranks, groups of them, micro-batches, with padding.
void check_statistics(Backend backend) {
  const World& world = test_world();
  Setup s;
  s.backend = backend;
  s.model = sparse(small(Arch::rope, 4 * world.size + 1), Phi::mean);
  s.model.diagnostics = true;
  s.steps = 3;
  for (const auto& [rows, micro_batches] : {std::pair(12, 1), {7, 2}, {1, 1}}) {  // one: ranks with padding alone
    s.rows = rows, s.micro_batches = 1, s.fsdp.shard_ranks = 0;
    const Outcome one = alone<float, float>(s);
    s.micro_batches = micro_batches;
    for (int ranks : {0, 1, 2}) {
      if (ranks && world.size % ranks) continue;
      INFO(rows << " rows in groups of " << ranks);
      s.fsdp.shard_ranks = ranks;
      const Outcome all = train<float, float>(s, world);
      REQUIRE(all.nsa.size() == size_t(s.model.depth));
      // Sums and maxima once a step, and gradients behind them: the backward hides them.
      if (world.size > 1 && ranks == 0 && micro_batches == 1) {
        const std::string trace = text_of(all.trace);
        CHECK(trace.find("sum sum") < trace.find("reduce"));
        CHECK(std::count_if(all.trace.begin(), all.trace.end(),
                            [](const Issued& i) { return i.kind == Issued::all_reduce && i.unit < 0; }) == 3);
      }
      for (size_t i = 0; i < all.nsa.size(); ++i) {
        const NsaStats& a = all.nsa[i];
        CHECK(a.rows == double(rows * s.model.seq * s.model.kv_heads));
        if (world.rank != 0) continue;
        const NsaStats& b = one.nsa[i];
        CHECK(a.keys_mean == b.keys_mean);
        CHECK(a.keys_max == b.keys_max);
        CHECK(a.at_max == b.at_max);
        for (double NsaStats::*x : {&NsaStats::entropy_mean, &NsaStats::entropy_min, &NsaStats::gate_max,
                                    &NsaStats::share_max, &NsaStats::share_max_mean, &NsaStats::collapsed})
          CHECK(a.*x == Approx(b.*x).epsilon(1e-4));
        for (int branch = 0; branch < 3; ++branch) CHECK(a.share[branch] == Approx(b.share[branch]).epsilon(1e-4));
      }
    }
  }
  // What the backward pass makes again has been counted before.
  const Outcome kept = train<float, float>(s, world);
  for (const Recompute recompute : {Recompute::attn, Recompute::block}) {
    s.model.recompute = recompute;
    const Outcome again = train<float, float>(s, world);
    REQUIRE(again.nsa.size() == kept.nsa.size());
    for (size_t i = 0; i < kept.nsa.size(); ++i) {
      CHECK(again.nsa[i].rows == kept.nsa[i].rows);
      CHECK(again.nsa[i].keys_mean == kept.nsa[i].keys_mean);
      CHECK(again.nsa[i].entropy_mean == kept.nsa[i].entropy_mean);
    }
  }
}
}  // namespace

TEST_CASE("statistics of gates and selection over W ranks are those of one", "[model]") {
  check_statistics(Backend::cpu);
}

TEST_CASE("nothing is read that the step has not written", "[model]") {
  for (const auto& [name, model] : all_models(4 * test_world().size + 1)) {
    INFO(name);
    Setup s;
    s.model = model;
    s.steps = 3;
    const Outcome plain = train<float, float>(s, test_world());
    s.poison = true;
    CHECK(same(train<float, float>(s, test_world()), plain));
  }
}

// Each model at every second number of ranks.
TEST_CASE("recomputation changes no bit, and keeps less", "[model]") {
  int number = test_world().size;
  for (const auto& [name, model] : all_models(4 * test_world().size + 1)) {
    if (number++ % 2) continue;
    INFO(name);
    Setup s;
    s.model = model, s.steps = 2, s.poison = true;
    s.model.depth = 6, s.rows = 48;  // so that what blocks keep is most of the peak
    const Outcome all = train<float, float>(s, test_world());
    auto kept = [](const Outcome& o) { return o.memory.peak[int(Purpose::activations)]; };
    auto with = [&](Recompute mode) {
      s.model.recompute = mode;
      const Outcome out = train<float, float>(s, test_world());
      CHECK(same(out, all));
      return out;
    };
    s.model.keep_cheap = true;
    CHECK(kept(with(Recompute::none)) > kept(all));
    s.model.keep_cheap = false;
    const Outcome mlp = with(Recompute::mlp);
    CHECK(kept(mlp) < kept(all));
    if (!model.attends()) continue;
    const Outcome attn = with(Recompute::attn), both = with(Recompute::both), block = with(Recompute::block);
    CHECK(kept(attn) < kept(all));
    CHECK(kept(both) < kept(mlp));
    CHECK(kept(both) < kept(attn));
    CHECK(kept(block) < kept(both));
    s.model.keep_attention = true;
    const Outcome attn_kept = with(Recompute::attn), both_kept = with(Recompute::both),
                  block_kept = with(Recompute::block);
    CHECK(kept(attn) < kept(attn_kept));
    CHECK(kept(attn_kept) < kept(all));
    CHECK(kept(both) < kept(both_kept));
    CHECK(kept(block) < kept(block_kept));
    CHECK(kept(block_kept) < kept(both_kept));
  }
}

TEST_CASE("recomputation changes no bit however the model is cut", "[model]") {
  const World& world = test_world();
  for (Wrap wrap : {Wrap::block, Wrap::sublayer, Wrap::single, Wrap::size})
    for (bool tied : {false, true})
      for (int shard : {0, 1, 2}) {  // full, kept after the forward pass, in groups
        if (shard == 2 && world.size != 4) continue;
        INFO("wrap " << int(wrap) << " tied " << tied << " shard " << shard);
        Setup s;
        s.model = small(Arch::llama, 4 * world.size + 1), s.steps = 2, s.micro_batches = 2;
        s.model.wrap = wrap, s.model.wrap_min_params = 8000, s.model.tied = tied;
        s.fsdp.reshard_after_forward = shard != 1, s.fsdp.shard_ranks = shard == 2 ? 2 : 0;
        // One slot, which the unit that is wanted next must get.
        if (shard == 0) s.fsdp.gather_slots = 1, s.model.backward_prefetch = BackwardPrefetch::post;
        // One unit of the embedding, the head and the attention between them.
        if (shard == 0 && tied && wrap == Wrap::size) s.model.depth = 1, s.model.wrap_min_params = 3300;
        const Outcome all = train<float, float>(s, world);
        for (Recompute mode : {Recompute::mlp, Recompute::attn, Recompute::both, Recompute::block}) {
          s.model.recompute = mode;
          const Outcome out = train<float, float>(s, world);
          CHECK(same(out, all));
          CHECK(out.shards == all.shards);
        }
      }
}

// Apart, sums are rounded one by one: nothing else differs.
TEST_CASE("what is not fused trains as what is, in the memory that was planned", "[model]") {
  for (const auto& [name, model] : all_models(4 * test_world().size + 1)) {
    INFO(name);
    Setup s;
    s.model = model, s.steps = 5, s.poison = true;
    const Outcome fused = train<float, float>(s, test_world()), narrow = train<bf16, float>(s, test_world());
    s.fuse = false;
    const Outcome apart = train<float, float>(s, test_world()), narrow_apart = train<bf16, float>(s, test_world());
    CHECK(narrow_apart.losses != narrow.losses);
    CHECK(furthest(narrow_apart.losses, narrow.losses) < 2e-2);
    CHECK(furthest(apart.losses, fused.losses) < (model.sparse ? 2e-4 : 2e-5));
    CHECK(furthest(apart.norms, fused.norms) < 2e-3);
    CHECK(apart.memory.live_peak <= apart.memory.arena);
    for (Recompute mode : {Recompute::mlp, Recompute::block}) {
      s.model.recompute = mode;
      CHECK(same(train<float, float>(s, test_world()), apart));
    }
  }
}

TEST_CASE("a profile has each operation's time under its own name", "[model]") {
  ModelConfig c = small(Arch::rope, 8192);
  c.depth = 2, c.seq = 64;
  // The least of four steps: this machine has others to run.
  auto profile_of = [](const ModelConfig& c) {
    std::map<std::string, double> times;
    for (int n = 0; n < 4; ++n) {
      Profile profile;
      gradients<float, float>(c, 2, test_world(), &profile);
      for (const auto& [name, ms] : profile) times[name] = n > 0 ? std::min(times[name], ms) : ms;
    }
    return times;
  };
  auto names_of = [](const std::map<std::string, double>& times) {
    std::set<std::string> names;
    for (const auto& t : times) names.insert(t.first);
    return names;
  };
  const bool alone = test_world().size == 1;
  std::set<std::string> names = {"embedding",     "embedding, backward",
                                 "norms",         "norms, backward",
                                 "MLP",           "MLP, backward",
                                 "projections",   "projections, backward",
                                 "attention",     "attention, backward",
                                 "positions",     "positions, backward",
                                 "head and loss", "optimizer"};
  if (!alone) names.insert("waiting for communication");
  auto times = profile_of(c);
  CHECK(names_of(times) == names);
  // A vocabulary 256 times as wide as the model: the head takes longest, also behind its wait for a gradient slot. (The
  // sanitizer slows our loops and not BLAS, and ranks that share cores then take their time elsewhere.)
  for (const auto& [name, ms] : times) {
    CAPTURE(name);
    if (alone || !sanitized)
      CHECK((name == "head and loss" || name == "waiting for communication" || ms < times["head and loss"]));
  }
  // A hidden layer as wide as that, in pieces: every one of them counts as the MLP's.
  c.vocab = 16, c.hidden = 8192, c.hidden_bytes = 400000;
  times = profile_of(c);
  CHECK(names_of(times) == names);
  for (const auto& [name, ms] : times)
    if (alone) CHECK((name == "MLP" || name == "MLP, backward" || ms < times["MLP, backward"]));
  // What is recomputed says so.
  c.recompute = Recompute::block;
  for (const char* part : {"norms", "MLP", "projections", "attention", "positions"})
    names.insert(std::string(part) + ", recomputed");
  CHECK(names_of(profile_of(c)) == names);
  // The last block's first piece is kept unless the head takes more memory than what goes with it.
  c.recompute = Recompute::mlp, c.depth = 1, c.hidden_bytes = int64_t(512) << 20;
  CHECK(names_of(profile_of(c)).count("MLP, recomputed") == 0);
  for (auto change : {+[](ModelConfig& c) { c.vocab = 16384; }, +[](ModelConfig& c) { c.depth = 2; },
                      +[](ModelConfig& c) { c.hidden_bytes = 400000; }}) {
    ModelConfig other = c;
    change(other);
    CHECK(names_of(profile_of(other)).count("MLP, recomputed") == 1);
  }
  ModelConfig nsa = sparse(small(Arch::rope, 16), Phi::mean);
  nsa.recompute = Recompute::attn, nsa.keep_attention = true;
  const auto sparse_names = names_of(profile_of(nsa));
  for (const char* name : {"gates", "gates, backward", "gates, recomputed", "selection", "selected branch"})
    CHECK(sparse_names.count(name) == 1);
  CHECK(sparse_names.count("selection, recomputed") == 0);
  // Selected blocks are kept also where attention's output is not.
  nsa.keep_attention = false;
  const auto recomputed = names_of(profile_of(nsa));
  CHECK(recomputed.count("selected branch, recomputed") == 1);
  CHECK(recomputed.count("selection, recomputed") == 0);
}

// --------------------------------------------------------------------------------------------------------------- GPU

TEST_CASE("GPU: statistics of gates and selection over W ranks are those of one", "[model][gpu]") {
  if (!one_gpu_a_rank()) SKIP_TEST("needs a GPU for each rank");
  check_statistics(Backend::gpu);
}

TEST_CASE("GPU: trains as the CPU does", "[model][gpu]") {
  NEEDS_GPU();
  if (!one_gpu_a_rank()) SKIP_TEST("fewer GPUs than ranks");
  for (Arch arch : all_archs) {
    INFO(name_of(arch));
    Setup s;
    s.model = small_on_gpu(arch), s.lr = 1e-3, s.steps = 5;
    s.backend = Backend::gpu;
    const Outcome on_gpu = train<float, float>(s, test_world()), again = train<float, float>(s, test_world());
    CHECK(same(on_gpu, again));
    s.backend = Backend::cpu;
    const Outcome on_cpu = train<float, float>(s, test_world());
    // The generator's bits are the same, its logarithm and cosine are each machine's own.
    double apart = 0;
    for (const auto& [name, weights] : on_cpu.weights)
      for (size_t i = 0; i < weights.size(); ++i)
        apart = worse(apart, double(std::abs(on_gpu.weights.at(name)[i] - weights[i])));
    CHECK(apart < 1e-5);
    CHECK(furthest(on_gpu.losses, on_cpu.losses) < 1e-4);
    s.backend = Backend::gpu;
    const Outcome narrow = train<bf16, float>(s, test_world());
    CHECK(furthest(narrow.losses, on_cpu.losses) < 2e-2);
  }
}

TEST_CASE("GPU: heads whose keys are wider than values train as on a CPU", "[model][gpu]") {
  NEEDS_GPU();
  if (!one_gpu_a_rank()) SKIP_TEST("fewer GPUs than ranks");
  if (has_small_memory(test_device(Backend::gpu).compute_capability)) SKIP_TEST("99 KiB of shared memory");
  for (bool nsa : {false, true}) {
    INFO((nsa ? "NSA" : "dense"));
    Setup s;
    s.model = small_on_gpu(Arch::rope), s.lr = 1e-3, s.steps = 5;
    s.model.own_head_dim = 192, s.model.own_v_head_dim = 128, s.model.seq = 200;
    s.model.sparse = nsa, s.model.nsa.phi = Phi::mlp, s.model.nsa.selected = 3, s.model.nsa.window = 40;
    const Outcome on_cpu = train<float, float>(s, test_world());
    s.backend = Backend::gpu;
    const Outcome narrow = train<bf16, float>(s, test_world());
    CHECK(same(narrow, train<bf16, float>(s, test_world())));
    CHECK(furthest(narrow.losses, on_cpu.losses) < 2e-2);
  }
}

// AdamW's first step is as long whatever the gradient: where the backward left positions in q's and k's, or undid them
// twice, a third of their weights and more go the other way.
TEST_CASE("GPU: who undoes rotary positions changes no more than rounding does", "[model][gpu]") {
  NEEDS_GPU();
  if (test_world().size != 1) SKIP_TEST("is about one rank");
  for (bool nsa : {false, true}) {
    Setup s;
    s.model = small_on_gpu(Arch::rope), s.model.own_head_dim = 64, s.model.heads = 8, s.model.kv_heads = 4;
    s.model.seq = 1024, s.rows = 8;  // enough for one kernel on Hopper
    s.model.sparse = nsa;
    s.lr = 1e-3, s.steps = 1, s.backend = Backend::gpu, s.fsdp.reduce_dtype = Dtype::bf16;
    const Outcome fused = train<bf16, bf16>(s, test_world());
    s.fuse = false;
    const Outcome apart = train<bf16, bf16>(s, test_world());
    for (const auto& [name, weights] : apart.trained) {
      INFO(name << (nsa ? ", NSA" : ""));
      double difference = 0;
      for (size_t i = 0; i < weights.size(); ++i) difference += std::abs(fused.trained.at(name)[i] - weights[i]);
      CHECK(difference < 0.2 * s.lr * double(weights.size()));
    }
  }
}

TEST_CASE("GPU: recomputation changes no bit", "[model][gpu]") {
  NEEDS_GPU();
  if (test_world().size != 1) SKIP_TEST("is about one rank");
  for (bool sparse_too : {false, true}) {
    Setup s;
    s.model = small_on_gpu(Arch::rope), s.lr = 1e-3, s.steps = 3, s.backend = Backend::gpu;
    s.model.sparse = sparse_too, s.model.seq = sparse_too ? 1100 : s.model.seq;
    s.model.hidden_bytes = 100000;  // pieces
    s.fsdp.reduce_dtype = Dtype::bf16;
    const Outcome plain = train<bf16, bf16>(s, test_world());
    s.model.keep_cheap = true;
    CHECK(same(train<bf16, bf16>(s, test_world()), plain));
    s.model.keep_cheap = false;
    for (Recompute mode : {Recompute::mlp, Recompute::attn, Recompute::both, Recompute::block})
      for (bool keep : {false, true}) {
        if (keep && mode == Recompute::mlp) continue;
        INFO("mode " << int(mode) << (keep ? ", attention kept" : "") << (sparse_too ? ", NSA" : ""));
        s.model.recompute = mode, s.model.keep_attention = keep;
        CHECK(same(train<bf16, bf16>(s, test_world()), plain));
      }
  }
}
