// Whole steps in fp8: products, gathers, and the hidden layer that is kept. Run at 1, 2, 3 and 4 ranks, as
// test_fsdp.cc.
#include <algorithm>
#include <cmath>

#include "test/training.h"

// Every rank scales what it has by its own largest numbers, so W ranks differ by fp8's rounding.
TEST_CASE("in fp8 W ranks train as one rank does, and as in bf16", "[fsdp][fp8]") {
  const auto alike = [](const Outcome& a, const Outcome& b) {
    CHECK(furthest(a.losses, b.losses) < 2e-2);
    CHECK(furthest(a.norms, b.norms) < 0.1);
    CHECK(furthest({a.norms[0]}, {b.norms[0]}) < 0.05);  // of the same weights
  };
  for (const auto& [name, model] : all_models(4 * test_world().size + 1)) {
    Setup s;
    s.model = model;
    if (model.own_head_dim) s.steps = 1;  // from there on what rounding does grows faster than in the others
    const Outcome wide = train<bf16, float>(s, test_world());
    s.model.fp8 = true;
    for (fp8::Scaling scaling : {fp8::Scaling::tensor, fp8::Scaling::row}) {
      if (scaling == fp8::Scaling::row && model.arch != Arch::rope && model.arch != Arch::simple) continue;
      if (scaling == fp8::Scaling::row && model.sparse) continue;  // what NSA selects follows any rounding
      INFO(name << ", scaling " << int(scaling));
      s.model.fp8_scaling = scaling;
      const Outcome sharded = train<bf16, float>(s, test_world()), again = train<bf16, float>(s, test_world());
      CHECK(same(sharded, again));
      CHECK(sharded.losses != wide.losses);
      alike(sharded, wide);
      if (test_world().rank == 0) alike(sharded, train<bf16, float>(s, World()));
    }
  }
}

TEST_CASE("in fp8 recomputation changes no bit either, and nothing is read that was not written", "[fsdp][fp8]") {
  bool by_row = true;
  for (const auto& [name, model] : all_models(4 * test_world().size + 1)) {
    by_row = !by_row;
    INFO(name << (by_row ? ", scaled by row" : ""));
    Setup s;
    s.model = model, s.model.fp8 = true, s.steps = 2, s.poison = true, s.model.hidden_bytes = 4096;
    if (by_row) s.model.fp8_scaling = fp8::Scaling::row;
    const Outcome all = train<bf16, float>(s, test_world());
    // Between them these make again whatever is cast.
    for (Recompute mode : {Recompute::mlp, Recompute::attn, Recompute::block}) {
      if (!model.attends() && mode != Recompute::mlp) continue;
      INFO("mode " << int(mode));
      s.model.recompute = mode;
      CHECK(same(train<bf16, float>(s, test_world()), all));
    }
  }
}

TEST_CASE("in fp8 what is frozen stays as it is too, and the others train as if it were not", "[fsdp][fp8]") {
  for (Arch arch : all_archs)
    for (bool by_row : {false, true}) {
      INFO(name_of(arch) << (by_row ? ", scaled by row" : ""));
      Setup s;
      s.model = small(arch, 4 * test_world().size + 1), s.model.fp8 = true, s.model.hidden_bytes = 4096;
      if (by_row) s.model.fp8_scaling = fp8::Scaling::row;
      s.steps = 1, s.clip = 0, s.poison = true, s.fsdp.reduce_dtype = Dtype::bf16;
      const Outcome free = train<bf16, bf16>(s, test_world());
      s.model.frozen = {"block.0.mlp.down", "block.1.mlp", "block.2.attention.o"};
      const Outcome out = train<bf16, bf16>(s, test_world());
      CHECK(out.losses == free.losses);
      for (const Unit& u : parameter_table(s.model))
        for (const Param& p : u.params) {
          INFO(p.name);
          CHECK((out.trained.at(p.name) == (p.frozen ? free.weights : free.trained).at(p.name)));
        }
    }
}

TEST_CASE("a hidden layer saved in fp8 changes gradients by its rounding, and the forward pass not", "[fsdp][fp8]") {
  bool multiplied = false;
  for (const auto& [name, model] : all_models(4 * test_world().size + 1)) {
    multiplied = !multiplied;
    INFO(name << (multiplied ? ", matmuls in fp8" : ""));
    Setup s;
    s.model = model, s.model.fp8 = multiplied, s.steps = 3, s.poison = true;
    // In pieces where both are cut alike: a BLAS may round a row by how many are multiplied with it.
    if (multiplied) s.model.hidden_bytes = 4096;
    const Outcome wide = train<bf16, float>(s, test_world());
    s.model.save_fp8 = true;
    const Outcome narrow = train<bf16, float>(s, test_world());
    CHECK(same(train<bf16, float>(s, test_world()), narrow));
    CHECK(narrow.losses[0] == wide.losses[0]);
    CHECK(narrow.norms[0] != wide.norms[0]);
    CHECK(furthest(narrow.norms, wide.norms) < 0.05);
    CHECK(furthest(narrow.losses, wide.losses) < 1e-2);
  }
}

// What an exact weight comes to when all ranks cast what they have of it under one scale.
static void check_gathered_in_fp8(const std::vector<Unit>& units, const Weights& exact, const Weights& gathered) {
  for (const Unit& u : units)
    for (size_t i = 0, end; i < u.params.size(); i = end) {
      for (end = i + 1; end < u.params.size() && u.params[end].joined; ++end) continue;
      float amax = 0;
      for (size_t j = i; j < end; ++j)
        for (float w : exact.at(u.params[j].name)) amax = std::max(amax, std::fabs(w));
      const float scale = fp8::scale_for(amax, fp8::e4m3.largest);
      for (size_t j = i; j < end; ++j) {
        const Param& p = u.params[j];
        INFO(p.name);
        std::vector<float> wanted = exact.at(p.name);
        for (float& w : wanted)
          w = p.fp8 ? fp8::decode(fp8::encode(w * scale, fp8::e4m3), fp8::e4m3) * (1 / scale) : float(bf16(w));
        CHECK(gathered.at(p.name) == wanted);
      }
    }
}

TEST_CASE("gathered in fp8 every rank has the same codes, and half the bytes have moved", "[fsdp][fp8]") {
  const World& world = test_world();
  int n = 0;
  for (const auto& [name, model] : all_models(4 * world.size + 1)) {
    INFO(name);
    Setup s;
    s.model = model, s.model.fp8 = true, s.steps = 3, s.poison = true;
    // By the way: groups of one rank, units that stay, copies of what is small, and AdamW in the backward pass.
    s.fsdp.shard_ranks = n % 4 == 1 ? 1 : 0, s.fsdp.reshard_after_forward = n % 4 != 2;
    if (n % 4 == 3) s.model.replicate_below = model.dim * model.dim + 1;
    if (n % 4 == 0) s.fsdp.update_in_backward = true, s.clip = 0;
    ++n;
    Setup wide = s;
    wide.steps = 1, wide.model.fp8 = false;
    const Weights exact = train<float, float>(wide, world).weights;
    const Outcome in_bf16 = train<bf16, float>(s, world);
    s.model.gather_fp8 = true;
    const Outcome in_fp8 = train<bf16, float>(s, world);
    CHECK(same(train<bf16, float>(s, world), in_fp8));
    std::vector<Unit> units = parameter_table(s.model);
    lay_out(&units, s.fsdp.shards(world.size));
    check_gathered_in_fp8(units, exact, in_fp8.weights);
    CHECK(furthest(in_fp8.losses, in_bf16.losses) < 2e-2);
    CHECK(furthest(in_fp8.norms, in_bf16.norms) < 0.1);
    CHECK(furthest({in_fp8.norms[0]}, {in_bf16.norms[0]}) < 0.05);

    // A scale is agreed on once a step, and blocks move as bytes.
    std::vector<int> agreed(units.size());
    double moved = 0, as_bf16 = 0;
    for (const Issued& i : in_fp8.trace) {
      if (i.kind == Issued::amax && i.ranks > 1) ++agreed[size_t(i.unit)];
      if (i.kind != Issued::all_gather || units[size_t(i.unit)].in_fp8 == 0) continue;
      moved += i.sent();
      if (i.dtype == Dtype::e4m3) CHECK(i.bytes == units[size_t(i.unit)].padded);
    }
    for (const Issued& i : in_bf16.trace)
      if (i.kind == Issued::all_gather && units[size_t(i.unit)].in_fp8 > 0) as_bf16 += i.sent();
    const bool gathers = s.fsdp.shards(world.size) > 1;
    for (size_t u = 0; u < units.size(); ++u)
      CHECK(agreed[u] == (gathers && units[u].in_fp8 > 0 && !units[u].replicated ? 1 : 0));
    if (n == 3) CHECK((moved > 0) == gathers);           // llama
    CHECK(moved <= (model.sparse ? 1 : 0.9) * as_bf16);  // such small matrices leave much beside them
  }
}

TEST_CASE("in a unit with parameters in fp8 every rank's part of the others lies where they join", "[fsdp][fp8]") {
  if (test_world().size != 1) SKIP_TEST("is about one rank");
  for (int shards : {1, 2, 3, 4, 8})
    for (int64_t matrix : {64, 512, 1000, 4096})
      for (int64_t rest : {0, 8, 64, 504, 2000, 20000}) {
        INFO(shards << " shards, " << matrix << " in fp8 and " << rest);
        Unit u;
        const auto add = [&](int64_t numel, bool fp8) {
          Param p = {};
          p.numel = numel, p.fp8 = fp8, p.decay = fp8;
          if (numel > 0) u.params.push_back(p);
        };
        add(rest / 2 / 8 * 8, false), add(matrix, true), add(rest - rest / 2 / 8 * 8, false);
        std::vector<Unit> units = {u};
        lay_out(&units, shards);
        const FlatParam& f = units[0].with_gradient;
        const bool pays = units[0].in_fp8 > 0;
        if (rest < matrix / shards / 2 && matrix > 1000 * shards) CHECK(pays);
        if (rest > matrix) CHECK(!pays);
        CHECK(units[0].params[0].fp8 == pays);
        if (!pays) continue;
        CHECK(units[0].in_fp8 == matrix);
        const Fp8Layout l = fp8_layout(units[0], shards, 2);
        CHECK(l.rest >= f.padded);
        CHECK(l.bytes == l.rest + shards * l.part * 2);
        CHECK(l.part <= f.shard);
        CHECK((l.part == 0) == (rest == 0));
        CHECK((l.first % 8 == 0 && l.part % shard_align == 0 && l.rest % 256 == 0));
        int64_t outside = 0;
        for (int64_t e = matrix; e < f.numel; ++e) outside += (l.first + e - matrix) / l.part != e / f.shard;
        CHECK(outside == 0);
      }
}

// e4m3 rounds a factor by up to 2^-4 of itself, e5m2 by 2^-3, which is 5 % on average, and bf16 by 2^-9. A gradient has
// come through up to nine such products here.
TEST_CASE("gradients in fp8 are those of fp32, a rounding of their factors apart", "[fsdp][fp8]") {
  if (test_world().size != 1) SKIP_TEST("is about one rank");
  for (Arch arch : all_archs) {
    ModelConfig c = small(arch, 37);
    c.dim = 64, c.hidden = 128, c.seq = 32;
    const Weights exact = gradients<float, float>(c, 4), narrow = gradients<bf16, float>(c, 4);
    c.fp8 = true;
    const Weights fp8 = gradients<bf16, float>(c, 4);
    c.fp8_scaling = fp8::Scaling::row;
    const Weights by_row = gradients<bf16, float>(c, 4);
    auto error = [&](const std::string& name, const Weights& of) {
      double apart = 0, size = 0;
      for (size_t i = 0; i < exact.at(name).size(); ++i) {
        const double x = double(exact.at(name)[i]), d = double(of.at(name)[i]) - x;
        apart += d * d, size += x * x;
      }
      return std::sqrt(apart / size);
    };
    for (const auto& [name, unused] : exact) {
      INFO(name_of(arch) << ", " << name << ": " << error(name, narrow) << " in bf16");
      CHECK(error(name, narrow) < 0.02);
      for (const Weights* in_fp8 : {&fp8, &by_row}) {
        CHECK(error(name, *in_fp8) < 0.25);
        CHECK(error(name, *in_fp8) > error(name, narrow));
      }
    }
  }
}

// --------------------------------------------------------------------------------------------------------------- GPU

// Why a case of fp8 on GPUs cannot run here; null: it can.
static const char* no_fp8() {
  return !have_gpu()                                         ? "no GPU"
         : test_device(Backend::gpu).compute_capability < 89 ? "no GPU with fp8"
         : !one_gpu_a_rank()                                 ? "fewer GPUs than ranks"
                                                             : nullptr;
}
static Setup in_sixteens(Arch arch) {
  Setup s;
  s.model = small_on_gpu(arch), s.lr = 1e-3, s.steps = 5;
  s.model.seq = 64;  // in sixteens, whatever the batch
  s.backend = Backend::gpu;
  return s;
}

TEST_CASE("GPU: a hidden layer saved in fp8 is the CPU's", "[fsdp][fp8][gpu]") {
  if (const char* why = no_fp8()) SKIP_TEST(why);
  for (Arch arch : all_archs) {
    INFO(name_of(arch));
    Setup s = in_sixteens(arch);
    s.model.save_fp8 = true;
    const Outcome on_gpu = train<bf16, float>(s, test_world());
    CHECK(same(train<bf16, float>(s, test_world()), on_gpu));
    s.backend = Backend::cpu;
    const Outcome on_cpu = train<bf16, float>(s, test_world());
    CHECK(furthest(on_gpu.losses, on_cpu.losses) < 2e-2);
    CHECK(furthest(on_gpu.norms, on_cpu.norms) < 0.1);
  }
}

TEST_CASE("GPU: gathered in fp8 trains as the CPU does, and alike as a graph", "[fsdp][fp8][gpu]") {
  if (const char* why = no_fp8()) SKIP_TEST(why);
  for (Arch arch : all_archs) {
    INFO(name_of(arch));
    Setup s = in_sixteens(arch);
    s.model.fp8 = s.model.gather_fp8 = true;
    const Outcome on_gpu = train<bf16, float>(s, test_world());
    CHECK(same(train<bf16, float>(s, test_world()), on_gpu));
    s.graph = true;
    CHECK(same(train<bf16, float>(s, test_world()), on_gpu));
    s.graph = false, s.backend = Backend::cpu;
    const Outcome on_cpu = train<bf16, float>(s, test_world());
    CHECK(furthest(on_gpu.losses, on_cpu.losses) < 1e-2);
  }
}

TEST_CASE("GPU: in fp8 trains as the CPU does, and alike recomputed and as a graph", "[fsdp][fp8][gpu]") {
  if (const char* why = no_fp8()) SKIP_TEST(why);
  const bool has_rows = fp8::support(test_device(Backend::gpu).compute_capability) == fp8::Support::by_row;
  std::vector<std::pair<Arch, fp8::Scaling>> cases;
  for (Arch arch : all_archs) {
    cases.emplace_back(arch, fp8::Scaling::tensor);
    if (has_rows) cases.emplace_back(arch, fp8::Scaling::row);
  }
  for (const auto& [arch, scaling] : cases) {
    INFO(name_of(arch) << ", scaling " << int(scaling));
    Setup s = in_sixteens(arch);
    s.model.fp8 = true, s.model.fp8_scaling = scaling;
    const Outcome on_gpu = train<bf16, float>(s, test_world());
    CHECK(same(train<bf16, float>(s, test_world()), on_gpu));
    s.graph = true;
    CHECK(same(train<bf16, float>(s, test_world()), on_gpu));
    s.graph = false, s.model.hidden_bytes = 50000;  // pieces: other scales
    const Outcome pieces = train<bf16, float>(s, test_world());
    CHECK(furthest(pieces.losses, on_gpu.losses) < 1e-2);
    for (Recompute mode : {Recompute::mlp, Recompute::both, Recompute::block}) {
      if (arch == Arch::mlp && mode != Recompute::mlp) continue;
      s.model.recompute = mode;
      CHECK(same(train<bf16, float>(s, test_world()), pieces));
    }
    s.model.recompute = Recompute::none, s.backend = Backend::cpu;
    CHECK(furthest(train<bf16, float>(s, test_world()).losses, pieces.losses) < 1e-2);
  }
}
