// Sharding, on the whole model: what W ranks do together is what one rank does alone. Run at 1, 2, 3 and 4 ranks; the
// one-rank run that they are compared with is made by rank 0 in a world of its own.
#include <algorithm>
#include <cmath>
#include <set>

#include "lib/program/estimate.h"
#include "test/training.h"

namespace {
// A host's allocator warms up over some steps.
int64_t growth_allowed(Backend backend) { return backend == Backend::gpu ? 0 : 512 * 1024; }

void check_flat(Backend backend) {
  Setup s;
  s.model = backend == Backend::gpu ? small_on_gpu(Arch::rope) : small(Arch::rope, 4 * test_world().size + 1);
  s.backend = backend, s.steps = 1010, s.micro_batches = 2;
  const Outcome out = train<float, float>(s, test_world());
  if (backend == Backend::gpu) CHECK(out.reported == out.memory.arena);
  CHECK(out.growth <= growth_allowed(backend));  // half a KiB lost in each step would show
}
}  // namespace

TEST_CASE("the collectives of a step, in order", "[fsdp]") {
  const World& world = test_world();
  if (world.size == 1) SKIP_TEST("one rank computes with its master copy");
  Setup s;
  s.model = small(Arch::rope, 4 * world.size + 1);  // units: 0 the embedding, 1 to 3 the blocks, 4 the head
  s.steps = 2;
  auto trace = [&](int slots, int64_t micro_batches) {
    s.fsdp.gather_slots = slots, s.micro_batches = micro_batches;
    return text_of(train<float, float>(s, world).trace);
  };
  // Two slots: the next unit is gathered before the current one computes, and the last block is still there when the
  // backward pass begins.
  CHECK(trace(2, 1) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 gather1 reduce2 reduce1 reduce0 sum step");
  // The next micro-batch finds the embedding on its way and the first block in its slot.
  CHECK(trace(2, 2) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 gather1 reduce2 gather0 reduce1 reduce0 "
        "gather2 gather3 gather4 reduce4 gather2 reduce3 gather1 reduce2 reduce1 reduce0 sum step");
  // One: nothing is gathered ahead, and the last block must be gathered again.
  CHECK(trace(1, 1) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 gather3 reduce3 gather2 reduce2 gather1 reduce1 reduce0 sum "
        "step");
  // As many slots as units, or no limit: a unit is still given up after its forward.
  for (int slots : {5, 0})
    CHECK(trace(slots, 1) ==
          "gather0 gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 gather1 reduce2 reduce1 reduce0 sum step");
  // Unless it is not to be: nothing is gathered twice.
  s.fsdp.reshard_after_forward = false;
  CHECK(trace(2, 1) == "gather0 gather1 gather2 gather3 gather4 reduce4 reduce3 reduce2 reduce1 reduce0 sum step");
  CHECK(trace(2, 2) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 reduce3 reduce2 reduce1 reduce0 "
        "reduce4 reduce3 reduce2 reduce1 reduce0 sum step");
  // Plain data parallelism moves nothing but gradients.
  s.fsdp.shard_ranks = 1;
  CHECK(trace(2, 1) == "sum4 sum3 sum2 sum1 sum0 sum step");
  s.fsdp.shard_ranks = 0, s.fsdp.reshard_after_forward = true;
  // What is gathered when it is wanted is gathered in the same order; after the gradient, behind its reduction.
  s.model.forward_prefetch = 0, s.model.backward_prefetch = BackwardPrefetch::none;
  CHECK(trace(2, 1) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 reduce3 gather2 reduce2 gather1 reduce1 reduce0 sum step");
  s.model.backward_prefetch = BackwardPrefetch::post;
  CHECK(trace(2, 1) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 gather1 reduce2 reduce1 reduce0 sum step");
  s.model.backward_prefetch = BackwardPrefetch::pre;
  // Two ahead, with slots for them.
  s.model.forward_prefetch = 2;
  CHECK(trace(3, 1) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 gather1 reduce2 reduce1 reduce0 sum step");
  s.model.forward_prefetch = 1;
  // Gradients that are kept until the last micro-batch; AdamW behind each reduction.
  s.fsdp.reduce_last = true;
  CHECK(trace(2, 2) ==
        "gather0 gather1 gather2 gather3 gather4 gather2 gather1 gather0 gather2 gather3 gather4 reduce4 gather2 "
        "reduce3 gather1 reduce2 reduce1 reduce0 sum step");
  s.fsdp.reduce_last = false, s.fsdp.update_in_backward = true, s.clip = 0;
  CHECK(trace(2, 1) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 step4 gather2 reduce3 step3 gather1 reduce2 step2 reduce1 "
        "step1 reduce0 step0 sum");
  s.fsdp.update_in_backward = false, s.clip = 1;
  // Whatever is made again, the next unit is on its way before a unit is used.
  s.model.recompute = Recompute::block;
  CHECK(trace(2, 1) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 gather1 reduce2 reduce1 reduce0 sum step");
  s.model.wrap = Wrap::sublayer, s.model.depth = 2;  // attention, for its output; the MLP; attention
  CHECK(trace(2, 1) ==
        "gather0 gather1 gather2 gather3 gather4 gather5 gather3 reduce5 gather4 reduce4 gather1 reduce3 gather2 "
        "reduce2 reduce1 reduce0 sum step");
  s.model.wrap = Wrap::block, s.model.depth = 3, s.model.recompute = Recompute::none;
  // Units: attention and MLP apart; all in one; a shared weight is reduced where it is used.
  s.model.depth = 1, s.model.wrap = Wrap::sublayer;  // 0 the embedding, 1 attention, 2 MLP, 3 the head
  CHECK(trace(2, 1) == "gather0 gather1 gather2 gather3 reduce3 gather1 reduce2 reduce1 reduce0 sum step");
  s.model.wrap = Wrap::single;
  CHECK(trace(2, 1) == "gather0 reduce0 sum step");
  s.model.wrap = Wrap::block, s.model.tied = true;
  CHECK(trace(2, 1) == "gather0 gather1 gather0 reduce0 reduce1 reduce0 sum step");
  s.model.wrap = Wrap::single;
  CHECK(trace(2, 1) == "gather0 reduce0 sum step");
  s.model.tied = false, s.model.wrap = Wrap::block;
  // What is small has a unit of its own, 3, which is never gathered.
  s.model.replicate_below = 33;
  CHECK(trace(2, 1) == "gather0 gather1 gather2 reduce2 reduce1 reduce0 sum3 sum step");
  s.model.replicate_below = 0;
  // A frozen unit is gathered and never reduced.
  s.model.frozen = {"block.0"};
  CHECK(trace(2, 1) == "gather0 gather1 gather2 reduce2 reduce0 sum step");
  // The backward pass ends where nothing further down is trained; the next micro-batch's first unit is then on its way.
  s.model.depth = 3, s.model.frozen = {"embedding", "block.0"};
  CHECK(trace(2, 1) == "gather0 gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 reduce2 sum step");
  CHECK(trace(2, 2) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 gather0 reduce2 "
        "gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 reduce2 sum step");
  s.model.wrap = Wrap::single;
  CHECK(trace(2, 1) == "gather0 gather0 reduce0 sum step");  // the trained and the frozen part
  s.model.wrap = Wrap::block, s.model.tied = true;
  CHECK(trace(2, 1) ==
        "gather0 gather0 gather1 gather2 gather3 gather0 gather0 reduce0 gather2 reduce3 reduce2 sum step");
  s.model.tied = false, s.model.depth = 1, s.model.frozen = {};
  // Bytes: the whole padded unit each time.
  std::vector<Unit> units = parameter_table(s.model);
  lay_out(&units, world.size);
  s.fsdp.gather_slots = 2, s.micro_batches = 1;
  for (const Issued& i : train<float, float>(s, world).trace)
    if (i.unit >= 0 && i.moves()) CHECK(i.bytes == units[size_t(i.unit)].padded * 4);
  // Groups of two: the all_reduce between replicas moves a shard.
  if (world.size != 4) return;
  s.fsdp.shard_ranks = 2;
  CHECK(trace(2, 1) == "gather0 gather1 gather2 reduce2 sum2 reduce1 sum1 reduce0 sum0 sum sum step");
  // What is whole on every rank is the same on every rank: the first one's sum.
  s.model.replicate_below = 33;
  CHECK(trace(2, 1) == "gather0 gather1 gather2 reduce2 sum2 reduce1 sum1 reduce0 sum0 sum3 sum3 copy3 sum sum step");
  s.model.replicate_below = 0;
  lay_out(&units, 2);
  for (const Issued& i : train<float, float>(s, world).trace) {
    if (i.unit < 0 || !i.moves()) continue;
    const Unit& u = units[size_t(i.unit)];
    CHECK(i.bytes == (i.kind == Issued::all_reduce ? u.shard : u.padded) * 4);
  }
}

TEST_CASE("a step that ends with the next one's gathers is the same step", "[fsdp]") {
  const World& world = test_world();
  if (world.size == 1) SKIP_TEST("one rank computes with its master copy");
  Setup s;
  s.model = small(Arch::rope, 4 * world.size + 1), s.steps = 3;
  const auto check = [&](const char* trace) {
    s.gathers_next = false;
    const Outcome plain = train<float, float>(s, world);
    s.gathers_next = true;
    const Outcome out = train<float, float>(s, world);
    CHECK(same(out, plain));
    CHECK(text_of(out.trace) == trace);
  };
  check("gather2 gather3 gather4 reduce4 gather2 reduce3 gather1 reduce2 reduce1 reduce0 sum step gather0 gather1");
  s.fsdp.gather_slots = 1;
  check(
      "gather1 gather2 gather3 gather4 reduce4 gather3 reduce3 gather2 reduce2 gather1 reduce1 reduce0 sum step "
      "gather0");
  // As far as what computes reads ahead.
  s.fsdp.gather_slots = 4, s.model.forward_prefetch = 2;
  check("gather3 gather4 reduce4 gather2 reduce3 gather1 reduce2 reduce1 reduce0 sum step gather0 gather1 gather2");
  s.model.forward_prefetch = 0;
  check("gather0 gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 gather1 reduce2 reduce1 reduce0 sum step");
  s.model.forward_prefetch = 1, s.fsdp.reshard_after_forward = false;
  check("gather2 gather3 gather4 reduce4 reduce3 reduce2 reduce1 reduce0 sum step gather0 gather1");
  // A validation takes the slots.
  s.fsdp.reshard_after_forward = true, s.fsdp.gather_slots = 2, s.validate = true;
  check(
      "gather0 gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 gather1 reduce2 reduce1 reduce0 sum step "
      "gather0 gather1");
}

TEST_CASE("one rank gathers nothing", "[fsdp]") {
  if (test_world().size != 1) SKIP_TEST("is about one rank");
  Setup s;
  s.model = small(Arch::rope, 4), s.steps = 2;
  for (bool reshards : {true, false}) {
    s.fsdp.reshard_after_forward = reshards;
    for (bool narrow : {false, true}) {
      s.fsdp.reduce_dtype = narrow ? Dtype::bf16 : Dtype::f32;
      const Outcome out = narrow ? train<bf16, bf16>(s, test_world()) : train<float, float>(s, test_world());
      CHECK(text_of(out.trace) == "reduce4 reduce3 reduce2 reduce1 reduce0 sum step");
      CHECK(out.memory.peak[int(Purpose::gather_slots)] == 0);
    }
  }
}

TEST_CASE("a unit is gathered as far ahead of its use as the prefetches say", "[fsdp]") {
  if (test_world().size == 1) SKIP_TEST("one rank computes with its master copy");
  Setup s;
  s.model = small(Arch::rope, 4 * test_world().size + 1), s.steps = 1;
  auto trace = [&](int slots, int ahead, BackwardPrefetch behind) {
    s.fsdp.gather_slots = slots, s.model.forward_prefetch = ahead, s.model.backward_prefetch = behind;
    return text_of(train<float, float>(s, test_world()).trace, true);
  };
  const char* forward[] = {"gather0 use0 gather1 use1 gather2 use2 gather3 use3 gather4 use4 ",
                           "gather0 gather1 use0 gather2 use1 gather3 use2 gather4 use3 use4 ",
                           "gather0 gather1 gather2 use0 gather3 use1 gather4 use2 use3 use4 ",
                           "gather0 gather1 gather2 gather3 use0 gather4 use1 use2 use3 use4 "};
  const char* backward[] = {"reduce4 gather2 use3 reduce3 gather1 use2 reduce2 use1 ",
                            "reduce4 use3 gather2 reduce3 use2 gather1 reduce2 use1 ",
                            "reduce4 use3 reduce3 gather2 use2 reduce2 gather1 use1 "};
  for (int ahead : {0, 1, 2, 3})
    for (auto behind : {BackwardPrefetch::pre, BackwardPrefetch::post, BackwardPrefetch::none})
      CHECK(trace(4, ahead, behind) ==
            std::string(forward[ahead]) + backward[int(behind)] + "reduce1 reduce0 sum step");
  // As far as there are slots.
  CHECK(trace(2, 3, BackwardPrefetch::pre) == trace(2, 1, BackwardPrefetch::pre));
}

// A trace tells the order on the host alone; for what a gather waits on the device shows in the estimate of a dry run.
TEST_CASE("what is gathered when it is wanted hides behind nothing", "[fsdp]") {
  const int gather = 1;  // that stream
  auto dry = [&](int ahead, BackwardPrefetch behind, int steps) {
    ModelConfig m = preset_named("llama-8b").model;
    m.depth = 4, m.forward_prefetch = ahead, m.backward_prefetch = behind;
    Device dev(Backend::gpu, Device::plan_only);
    Estimate estimate(*chip_named("h200"));
    dev.timeline = &estimate;
    World world;
    world.size = world.local_size = 8;
    FsdpOptions options;
    options.gather_slots = 3, options.reduce_dtype = Dtype::bf16;
    ops::keep_workspace(dev);
    Model<bf16, bf16> model(dev, world, Transport::nccl, m, 1, options, Links::planned);
    Event copied(dev);
    for (int i = 0; i < steps; ++i) {
      if (i > 0) estimate.next_step();
      dev.mem.begin("step");
      model.begin_step(nullptr, 1);
      model.forward_backward(nullptr, 1, true, true, copied);
      model.end_step();
      dev.mem.end();
    }
    const Estimate of_the_last = estimate;
    estimate.next_step();
    model.fsdp.use(1), model.fsdp.release(1);  // which AdamW was done with early
    CHECK(estimate.exposed(gather) == Approx(estimate.talking(Collective::all_gather)));
    return of_the_last;
  };
  for (auto behind : {BackwardPrefetch::post, BackwardPrefetch::none}) {
    const Estimate first = dry(0, behind, 1), second = dry(0, behind, 2);
    CHECK(first.exposed(gather) > 0.999 * first.talking(Collective::all_gather));
    // Nor behind the optimizer of the step before, where the gather of a unit ahead does.
    CHECK(second.exposed(gather) == Approx(first.exposed(gather)));
    CHECK(dry(1, behind, 2).exposed(gather) < 0.99 * dry(1, behind, 1).exposed(gather));
  }
  CHECK(dry(1, BackwardPrefetch::pre, 2).exposed(gather) <
        0.5 * dry(1, BackwardPrefetch::pre, 2).talking(Collective::all_gather));
}

TEST_CASE("a reduction moves its units' padded sizes in its dtype", "[fsdp]") {
  const World& world = test_world();
  Setup s;
  s.model = small(Arch::rope, 4 * world.size + 1), s.steps = 1;
  s.model.replicate_below = 33;
  for (int shard_ranks : {0, 1, 2}) {
    if (shard_ranks == 2 && world.size != 4) continue;
    s.fsdp.shard_ranks = shard_ranks, s.fsdp.reshard_after_forward = shard_ranks != 1;
    std::vector<Unit> units = parameter_table(s.model);
    lay_out(&units, s.fsdp.shards(world.size));
    for (int dtypes = 0; dtypes < 5; ++dtypes) {
      INFO("groups of " << shard_ranks << " dtypes " << dtypes);
      const Dtype reduced = dtypes == 0 || dtypes == 2 ? Dtype::f32 : Dtype::bf16;
      s.fsdp.reduce_dtype = reduced;
      const Outcome out = dtypes < 2   ? train<float, float>(s, world)
                          : dtypes < 4 ? train<bf16, float>(s, world)
                                       : train<bf16, bf16>(s, world);
      size_t reductions = 0;
      for (const Issued& i : out.trace) {
        if (i.kind != Issued::reduce_scatter && i.kind != Issued::all_reduce) continue;
        const bool scalars = i.unit < 0;
        CHECK(i.dtype == (scalars ? Dtype::f64 : reduced));
        if (scalars) {
          CHECK(i.bytes == int64_t(sizeof(StepScalars)));
          continue;
        }
        const Unit& u = units[size_t(i.unit)];
        CHECK(i.bytes == (i.kind == Issued::all_reduce ? u.shard : u.padded) * size_of(reduced));
        ++reductions;
      }
      CHECK(reductions == units.size() * (shard_ranks == 2 ? 2 : 1));
    }
  }
}

// The combinations of the knobs that change which bytes move and where they lie: a dozen of their product, drawn so
// that every value of each is there.
TEST_CASE("every way to shard trains as one rank does, in the memory that was planned", "[fsdp]") {
  const World& world = test_world();
  Setup s;
  s.steps = 3, s.micro_batches = 2;
  const Arch archs[] = {Arch::rope, Arch::simple, Arch::llama, Arch::mlp};
  const Wrap wraps[] = {Wrap::block, Wrap::sublayer, Wrap::single, Wrap::size};
  std::vector<int> groups;
  for (int k = 1; k <= world.size; ++k)
    if (world.size % k == 0) groups.push_back(k);
  for (int n = 0; n < 24; ++n) {
    auto pick = [&](int prime, int values) { return n * prime / 3 % values; };  // 0 <= pick < values
    s.model = small(archs[n % 4], 4 * world.size + 1);
    if (n % 6 == 1) s.model = sparse(small(Arch::rope, 4 * world.size + 1), Phi::linear);
    s.model.wrap = wraps[n / 2 % 4], s.model.wrap_min_params = 3000, s.model.bucket_params = n % 3 ? 0 : 4000;
    s.model.tied = n % 5 == 2;
    s.model.replicate_below = n % 4 == 3 ? 200 : 0;
    s.model.recompute = n % 7 == 3 && s.model.attends() ? Recompute::block : Recompute::none;
    s.model.hidden_bytes = n % 3 ? s.model.hidden_bytes : 1000;
    s.model.frozen.clear();
    if (n % 5 > 2)
      s.model.frozen = {"block.0.mlp", "block.1.attention.q", "block.2.norm2", n % 2 ? "head" : "embedding"};
    s.model.forward_prefetch = pick(5, 3);
    s.model.backward_prefetch = BackwardPrefetch(pick(7, 3));
    s.fsdp = FsdpOptions();
    s.clip = n % 8 == 6 ? 0 : 1;
    const Outcome one = alone<float, float>(s);
    s.fsdp.shard_ranks = groups[size_t(n) % groups.size()];
    s.fsdp.reshard_after_forward = s.fsdp.shard_ranks > 1 || world.size == 1 ? n % 2 == 0 : false;
    s.fsdp.gather_slots = pick(11, 4), s.fsdp.gradient_slots = 1 + pick(13, 3);
    s.fsdp.reduce_last = n % 4 == 1, s.fsdp.update_in_backward = s.clip == 0;
    s.fsdp.unsharded_init = n % 3 == 2;
    INFO("case " << n << ": " << name_of(s.model.arch) << " wrap " << int(s.model.wrap) << " groups of "
                 << s.fsdp.shard_ranks << " slots " << s.fsdp.gather_slots << " tied " << s.model.tied);
    const Outcome out = train<float, float>(s, world);
    s.poison = true;
    CHECK(same(train<float, float>(s, world), out));
    s.poison = false;
    if (world.rank != 0) continue;
    CHECK(furthest(out.losses, one.losses) < (s.model.sparse ? 2e-4 : 2e-5));
    CHECK(furthest(out.norms, one.norms) < 2e-3);
  }
}

// All of --shard, --wrap, --reshard-after-forward, --limit-all-gathers, both prefetches and the dtypes, but for those
// that are the same as another: what is not resharded has no limit, and --shard grad is that. Four ranks take the
// hybrid ones, groups of two, which fewer have not. The others share the rest by thirds that hold every pair of values.
// On a GPU, where it takes longer, four ranks take such a third too; the ranks share it: opening NCCL's communicators
// would take most of the time. On CPUs a ninth of the combinations take a hundred steps, and the others as many as
// losses are compared of.
namespace {
void check_six_knobs(Backend backend) {
  const World& world = test_world();
  const bool gpu = backend == Backend::gpu;
  Setup s;
  s.model = gpu ? small_on_gpu(Arch::rope) : small(Arch::rope, 4 * world.size + 1);
  s.backend = backend, s.share_gpu = gpu;
  s.model.depth = 2, s.model.wrap_min_params = 3000, s.rows = 4;
  // What a GPU that is shared has in use is the others' too.
  const bool own = !gpu || world.size == 1;
  constexpr int compared = 10;
  s.steps = own ? 100 : 2;
  auto begin = [](std::vector<double> losses) {
    losses.resize(std::min<size_t>(losses.size(), compared));
    return losses;
  };
  const Outcome one = alone<float, float>(s);
  int tried = 0;
  auto check = [&](int shard_ranks, Wrap wrap, bool reshard, int slots, int ahead, int behind, int dtypes) {
    // Thirds of the combinations: those whose knobs add up to the same.
    const bool in_third = (int(wrap) + slots + ahead + behind + dtypes) % 3 == world.size % 3;
    const bool in_ninth = in_third && (slots + 2 * ahead + behind) % 3 == int(wrap) % 3;
    if ((world.size != 4 || gpu) && !in_third) return;
    ++tried;
    if (own) s.steps = gpu || in_ninth ? 100 : compared;
    INFO("groups of " << shard_ranks << " wrap " << int(wrap) << " reshard " << reshard << " slots " << slots
                      << " prefetches " << ahead << " and " << behind << " dtypes " << dtypes);
    s.model.wrap = wrap;
    s.model.forward_prefetch = ahead, s.model.backward_prefetch = BackwardPrefetch(behind);
    s.fsdp = FsdpOptions();
    s.fsdp.shard_ranks = shard_ranks, s.fsdp.reshard_after_forward = reshard, s.fsdp.gather_slots = slots;
    s.fsdp.reduce_dtype = dtypes == 1 ? Dtype::bf16 : Dtype::f32;
    const Outcome out = dtypes == 0   ? train<float, float>(s, world)
                        : dtypes == 1 ? train<bf16, bf16>(s, world)
                                      : train<bf16, float>(s, world);
    // That it ran is most of it: a step that takes or gives anything else than was planned throws.
    CHECK(out.memory.live_peak <= out.memory.arena);
    if (own) CHECK(out.growth <= growth_allowed(backend));
    if (world.rank == 0)
      CHECK(furthest(begin(out.losses), begin(one.losses)) < (dtypes > 0 ? (gpu ? 2e-2 : 1e-2) : gpu ? 1e-4 : 2e-5));
  };
  const std::vector<int> groups = world.size == 4 ? std::vector<int>{2} : std::vector<int>{0, 1};
  for (int shard_ranks : groups)
    for (Wrap wrap : {Wrap::block, Wrap::sublayer, Wrap::single, Wrap::size})
      for (bool reshard : {true, false})
        for (int slots : {0, 1, 2})
          for (int ahead : {0, 1, 2})
            for (int behind : {0, 1, 2})
              for (int dtypes : {0, 1, 2}) {
                if (reshard ? shard_ranks == 1 : slots != 2) continue;  // refused
                check(shard_ranks, wrap, reshard, slots, ahead, behind, dtypes);
              }
  CHECK(tried == (world.size != 4 ? 180 : gpu ? 144 : 432));
}
}  // namespace

TEST_CASE("every combination of six knobs uses the memory that was planned, and no more as steps go on", "[fsdp]") {
  check_six_knobs(Backend::cpu);
}
TEST_CASE("GPU: every combination of six knobs uses the memory that was planned, and no more as steps go on",
          "[fsdp][gpu]") {
  NEEDS_GPU();
  check_six_knobs(Backend::gpu);
}

TEST_CASE("what only moves work in time changes no bit", "[fsdp]") {
  const World& world = test_world();
  Setup s;
  s.model = small(Arch::llama, 4 * world.size + 1);
  s.steps = 3, s.micro_batches = 2, s.clip = 0;
  const Outcome plain = train<float, float>(s, world);
  for (int n = 0; n < 6; ++n) {
    INFO("case " << n);
    Setup t = s;
    if (n == 0) t.model.forward_prefetch = 0, t.model.backward_prefetch = BackwardPrefetch::none;
    if (n == 1)
      t.model.forward_prefetch = 3, t.model.backward_prefetch = BackwardPrefetch::post, t.fsdp.gather_slots = 4;
    if (n == 2) t.fsdp.gather_slots = 0;
    if (n == 3) t.fsdp.reshard_after_forward = false;
    if (n == 4) t.fsdp.unsharded_init = true;
    if (n == 5) t.fsdp.shard_ranks = 1, t.fsdp.reshard_after_forward = false;
    t.delay_ms = n == 1 && world.rank % 2 ? 10 : 0;
    const Outcome out = train<float, float>(t, world);
    CHECK(out.losses == plain.losses);
    // The norm's terms are added up by whom they lie with.
    if (n == 5) CHECK(furthest(out.norms, plain.norms) < 1e-12);
    else CHECK(out.norms == plain.norms);
  }
}

TEST_CASE("in fp32 it changes no bit who sums the parts of a gradient", "[fsdp]") {
  const World& world = test_world();
  Setup s;
  s.steps = 3, s.micro_batches = 2;
  for (int n = 0; n < 5; ++n) {
    INFO("case " << n);
    s.model = small(n % 2 ? Arch::llama : Arch::rope, 4 * world.size + 1);
    s.model.replicate_below = n == 1 ? 200 : 0, s.model.tied = n == 2;
    s.fsdp = FsdpOptions(), s.clip = n == 3 ? 0 : 1;
    s.fsdp.reduce_last = n == 2, s.fsdp.update_in_backward = n == 3, s.fsdp.gradient_slots = 1 + n % 3;
    s.fsdp.shard_ranks = n == 4 && world.size == 4 ? 2 : 0;
    const Outcome plain = train<float, float>(s, world);
    s.fsdp.reduce_by_copy_engine = true;
    CHECK(same(train<float, float>(s, world), plain));
    s.delay_ms = world.rank % 2 ? 3 : 10, s.together = true;
    CHECK(same(train<float, float>(s, world), plain));
    s.delay_ms = 0, s.together = false;
  }
}

TEST_CASE("a gradient that is reduced once, in bf16, is kept in bf16", "[fsdp]") {
  const World& world = test_world();
  Setup s;
  s.model = small(Arch::rope, 4 * world.size + 1), s.model.dim = 64, s.model.hidden = 512, s.model.depth = 8;
  s.rows = world.size, s.steps = 3;  // the peak is near the end of the backward pass
  auto kept = [](const Outcome& out) { return double(out.memory.peak[int(Purpose::gradients)]); };
  s.fsdp.reduce_dtype = Dtype::f32;
  const double in_fp32 = kept(train<bf16, float>(s, world));
  s.fsdp.reduce_dtype = Dtype::bf16;
  CHECK(kept(train<bf16, bf16>(s, world)) < 0.6 * in_fp32);
  CHECK(kept(train<bf16, float>(s, world)) < 0.6 * in_fp32);
  // The same numbers in fp32: those of AdamW in the backward pass, which keeps none.
  s.clip = 0;
  const Outcome apart = train<bf16, bf16>(s, world);
  s.fsdp.update_in_backward = true;
  CHECK(train<bf16, bf16>(s, world).shards == apart.shards);
  s.fsdp.update_in_backward = false, s.clip = 1;
  // Several micro-batches add up in fp32, whoever sums the parts of each.
  for (bool engines : {false, true}) {
    s.fsdp.reduce_by_copy_engine = engines;
    s.micro_batches = 1;
    CHECK(kept(train<bf16, bf16>(s, world)) < 0.6 * in_fp32);
    s.micro_batches = 2;
    CHECK(kept(train<bf16, bf16>(s, world)) > 0.8 * in_fp32);
  }
}

TEST_CASE("weights that are made whole first need room for the whole model", "[fsdp]") {
  if (test_world().size == 1) SKIP_TEST("needs more ranks than one");
  Setup s;
  s.model = small(Arch::rope, 4 * test_world().size + 1);
  s.model.depth = 40, s.rows = test_world().size, s.steps = 0;
  const Outcome sharded = train<float, float>(s, test_world());
  s.fsdp.unsharded_init = true;
  const Outcome whole = train<float, float>(s, test_world());
  CHECK(whole.weights == sharded.weights);
  CHECK(whole.memory.live_peak > sharded.memory.live_peak);
  CHECK(whole.memory.init_total >= sharded.memory.init_total + 4 * parameter_count(s.model));
  CHECK(whole.memory.live_peak > 4 * parameter_count(s.model));
}

TEST_CASE("AdamW in the backward pass changes no bit and keeps no gradient shards", "[fsdp]") {
  Setup s;
  for (int64_t micro_batches : {1, 2, 3})  // with three the slots have taken an odd number of turns when a step ends
    for (bool tied : {false, true}) {
      s.model = small(Arch::rope, 4 * test_world().size + 1);
      s.model.tied = tied;
      s.steps = 3, s.clip = 0, s.micro_batches = micro_batches;
      s.fsdp.update_in_backward = false;
      const Outcome plain = train<float, float>(s, test_world());
      s.fsdp.update_in_backward = true;
      s.poison = true, s.delay_ms = 5;
      const Outcome out = train<float, float>(s, test_world());
      s.poison = false, s.delay_ms = 0;
      CHECK(out.losses == plain.losses);
      CHECK(out.shards == plain.shards);
      CHECK(furthest(out.norms, plain.norms) < 1e-12);  // summed in another order
      const int gradients = int(Purpose::gradients);
      if (micro_batches == 1 && !tied) CHECK(out.memory.peak[gradients] == 0);
    }
}

TEST_CASE("casting behind the gather changes no bit", "[fsdp]") {
  Setup s;
  s.model = small(Arch::llama, 4 * test_world().size + 1);
  s.steps = 3, s.fsdp.reduce_dtype = Dtype::f32;
  const Outcome narrow = train<bf16, float>(s, test_world());
  s.fsdp.gather_wide = true;
  const Outcome wide = train<bf16, float>(s, test_world());
  CHECK(same(narrow, wide));
  const bool gathers = test_world().size > 1;  // one rank has nothing to cast behind
  for (size_t i = 0; i < wide.trace.size(); ++i)
    if (wide.trace[i].kind == Issued::all_gather) {
      CHECK(wide.trace[i].bytes == (gathers ? 2 : 1) * narrow.trace[i].bytes);
      CHECK(wide.trace[i].dtype == (gathers ? Dtype::f32 : Dtype::bf16));
      CHECK(narrow.trace[i].dtype == Dtype::bf16);
    }
}

TEST_CASE("moments in bf16 halve their memory and train as well", "[fsdp]") {
  Setup s;
  s.model = small(Arch::rope, 4 * test_world().size + 1);
  s.steps = 20;
  const Outcome wide = train<float, float>(s, test_world());
  s.fsdp.moment_dtype = Dtype::bf16;
  const Outcome narrow = train<float, float>(s, test_world());
  CHECK(same(train<float, float>(s, test_world()), narrow));
  CHECK(narrow.losses != wide.losses);
  CHECK(furthest(narrow.losses, wide.losses) < 2e-2);
  const int moments = int(Purpose::moments);
  CHECK(4 * narrow.memory.before_step[moments] <= 3 * wide.memory.before_step[moments]);  // whole pages each
  const Outcome one = alone<float, float>(s);
  if (test_world().rank == 0) CHECK(furthest(narrow.losses, one.losses) < 2e-2);
  // What one rank alone adds to is the same sum on any number of ranks, and is rounded alike: by a number's place in
  // its parameter, not in a shard.
  s.rows = 1, s.clip = 0, s.steps = 3;
  const Outcome rounded = train<float, float>(s, test_world()), by_one = alone<float, float>(s);
  if (test_world().rank == 0) CHECK((rounded.trained == by_one.trained));
}

TEST_CASE("clipping bounds the norm that is asked for, however the model is cut", "[fsdp]") {
  const World& world = test_world();
  for (ops::GradNorm p : {ops::GradNorm::one, ops::GradNorm::two, ops::GradNorm::three, ops::GradNorm::inf}) {
    INFO("p " << int(p));
    Setup s;
    s.model = small(Arch::rope, 4 * world.size + 1);
    s.model.replicate_below = 100;
    s.steps = 4, s.fsdp.norm = p;
    s.clip = 0;
    const Outcome loose = alone<float, float>(s);
    s.clip = world.rank == 0 ? 0.3 * loose.norms[0] : 0;
    const std::string clip = broadcast_text(strf("%.17g", s.clip));
    s.clip = std::atof(clip.c_str());
    const Outcome one = alone<float, float>(s);
    if (world.rank == 0) CHECK(one.norms[0] > 3 * s.clip);  // it does something
    if (world.rank == 0) CHECK(one.losses.back() != loose.losses.back());
    for (int k = 1; k <= world.size; ++k) {
      if (world.size % k) continue;
      s.fsdp.shard_ranks = k;
      const Outcome out = train<float, float>(s, world);
      if (world.rank != 0) continue;
      CHECK(furthest(out.losses, one.losses) < 2e-5);
      CHECK(furthest(out.norms, one.norms) < 2e-3);
    }
  }
}

TEST_CASE("a rank that skips a step is found out in that step", "[fsdp]") {
  const World& world = test_world();
  Setup s;
  s.model = small(Arch::rope, 4 * world.size + 1), s.steps = 4;
  for (int n = 0; n < 4; ++n) {
    if (n == 1) s.fsdp.norm = ops::GradNorm::inf;
    if (n == 2) s.fsdp.shard_ranks = 1, s.fsdp.reshard_after_forward = false;
    if (n == 3) s.fsdp.shard_ranks = world.size % 2 ? 0 : 2;
    for (bool skips : {false, true}) {
      s.skipped = skips ? 3 : 0;
      const Outcome out = train<float, float>(s, world);
      for (int step = 1; step <= 4; ++step)
        CHECK((out.steps[size_t(step - 1)] == double(step * world.size)) == (!skips || step < 3));
    }
  }
}

TEST_CASE("a unit is used between its gather and its release", "[fsdp]") {
  if (test_world().size == 1) SKIP_TEST("one rank computes with its master copy");
  Setup s;
  s.model = small(Arch::llama, 4 * test_world().size + 1);
  s.steps = 2, s.micro_batches = 2;  // the trace is the second step's, which begins with empty slots
  for (int slots : {1, 2, 3, 5}) {
    s.fsdp.gather_slots = slots;
    s.model.wrap = slots == 3 ? Wrap::sublayer : Wrap::block;
    std::vector<int> held;  // units in slots, as far as the trace tells
    std::vector<int> used;
    for (const Issued& i : train<float, float>(s, test_world()).trace) {
      if (i.kind == Issued::all_gather) held.push_back(i.unit);
      if (i.kind == Issued::use) {
        CHECK(std::find(held.begin(), held.end(), i.unit) != held.end());
        CHECK(std::find(used.begin(), used.end(), i.unit) == used.end());
        used.push_back(i.unit);
      }
      if (i.kind == Issued::release) {
        const auto at = std::find(used.begin(), used.end(), i.unit);
        REQUIRE(at != used.end());
        used.erase(at);
      }
      CHECK(int(used.size()) <= slots);
    }
    CHECK(used.empty());
  }
}

TEST_CASE("a unit's shards cover it, aligned, whatever the number of ranks", "[fsdp]") {
  for (int ranks : {1, 2, 3, 4, 5, 7, 8, 13, 64})
    for (Arch arch : all_archs) {
      ModelConfig c = small(arch, 4 * ranks + 1);
      if (ranks % 2 == 0)
        c.frozen = {"block.0.mlp.down", "block.0.norm1", "block.1", "block.2.attention.k", "head.norm"};
      std::vector<Unit> units = parameter_table(c);
      lay_out(&units, ranks);
      for (const Unit& u : units) {
        int64_t at = 0, part = 0, numel = 0;
        for (const FlatParam& f : {u.with_gradient, u.without_gradient}) {
          CHECK((f.offset_in_unit == at && f.offset_in_shard == part));
          CHECK(f.padded == f.shard * ranks);
          CHECK(f.padded >= f.numel);
          CHECK((f.numel > 0 ? f.padded - f.numel < ranks * shard_align : f.padded == 0));
          CHECK(f.shard % shard_align == 0);
          at += f.padded, part += f.shard, numel += f.numel;
        }
        CHECK((u.padded == at && u.shard == part && u.numel == numel));
        at = 0;
        for (const Param& p : u.params) {
          if (!p.has_gradient && at < u.without_gradient.offset_in_unit) {
            CHECK(at == u.with_gradient.numel);
            at = u.without_gradient.offset_in_unit;
          }
          CHECK(p.offset == at);
          CHECK(p.decay == (p.shape.size() > 1));
          CHECK((p.offset < u.decayed) == (p.decay && p.has_gradient));
          CHECK((p.has_gradient || p.frozen));
          at += p.numel;
          // Every element in one shard, and nothing else in its place.
          int64_t next = 0;
          for (int r = 0; r < ranks; ++r) {
            const Unit::Piece mine = u.piece(p, r);
            if (mine.numel == 0) continue;
            CHECK(mine.first == next);
            CHECK((mine.offset_in_shard >= 0 && mine.offset_in_shard + mine.numel <= u.shard));
            const FlatParam& f = p.has_gradient ? u.with_gradient : u.without_gradient;
            CHECK(mine.offset_in_shard - f.offset_in_shard + r * f.shard == p.offset - f.offset_in_unit + next);
            next += mine.numel;
          }
          CHECK(next == p.numel);
        }
        CHECK(at == (u.without_gradient.numel > 0 ? u.without_gradient.offset_in_unit + u.without_gradient.numel
                                                  : u.with_gradient.numel));
      }
    }
}

TEST_CASE("initial weights do not depend on the number of ranks", "[fsdp]") {
  for (Arch arch : all_archs) {
    Setup s;
    s.model = small(arch, 4 * test_world().size + 1), s.steps = 0;
    const Outcome sharded = train<float, float>(s, test_world()), one = alone<float, float>(s);
    if (test_world().rank == 0) CHECK(sharded.weights == one.weights);
    s.fsdp.seed = 1;
    const Outcome other = train<float, float>(s, test_world());
    CHECK(other.weights != sharded.weights);
    // As the table says: mean and deviation of every matrix.
    for (const Unit& u : parameter_table(s.model))
      for (const Param& p : u.params) {
        double sum = 0, square = 0;
        for (int64_t i = 0; i < p.numel; ++i) {
          const double x = sharded.weights.at(p.name)[size_t(i)];
          sum += x, square += x * x;
        }
        const double n = double(p.numel), mean = sum / n, std = std::sqrt(std::max(0.0, square / n - mean * mean));
        CHECK(std::abs(mean - p.mean) <= 5 * p.std / std::sqrt(n) + 1e-6);
        if (p.decay) CHECK(std == Approx(p.std).epsilon(0.2));
      }
  }
}

TEST_CASE("W ranks train as one rank does", "[fsdp]") {
  for (const auto& [name, model] : all_models(4 * test_world().size + 1)) {
    INFO(name);
    Setup s;
    s.model = model;
    const Outcome sharded = train<float, float>(s, test_world()), again = train<float, float>(s, test_world());
    CHECK(same(sharded, again));  // bit for bit
    CHECK(sharded.losses.back() < sharded.losses.front() - 0.05);
    const Outcome one = alone<float, float>(s);
    if (test_world().rank != 0) continue;
    // Of two blocks with nearly the same score rounding may choose another.
    CHECK(furthest(sharded.losses, one.losses) < (model.sparse ? 2e-4 : 2e-5));
    CHECK(furthest(sharded.norms, one.norms) < 2e-3);
  }
}

TEST_CASE("in bf16, and with gradients reduced in either dtype", "[fsdp]") {
  Setup s;
  s.model = small(Arch::rope, 4 * test_world().size + 1);
  for (Dtype reduce : {Dtype::bf16, Dtype::f32}) {
    INFO(name_of(reduce));
    s.fsdp.reduce_dtype = reduce;
    const bool narrow = reduce == Dtype::bf16;
    const auto run = [&](const World& w) { return narrow ? train<bf16, bf16>(s, w) : train<bf16, float>(s, w); };
    const Outcome sharded = run(test_world()), again = run(test_world());
    CHECK(same(sharded, again));
    CHECK(sharded.losses.back() < sharded.losses.front() - 0.05);
    if (test_world().rank == 0) CHECK(furthest(sharded.losses, run(World()).losses) < 1e-2);
  }
  // fp32 gradients may be reduced in bf16.
  s.fsdp.reduce_dtype = Dtype::bf16;
  const Outcome narrow = train<float, float>(s, test_world());
  s.fsdp.reduce_dtype = Dtype::f32;
  const Outcome wide = train<float, float>(s, test_world());
  CHECK(furthest(narrow.losses, wide.losses) < 1e-2);
  CHECK(narrow.norms != wide.norms);
}

TEST_CASE("micro-batches add up to the batch", "[fsdp]") {
  for (Arch arch : {Arch::rope, Arch::mlp}) {
    Setup s;
    s.model = small(arch, 4 * test_world().size + 1);
    const Outcome whole = train<float, float>(s, test_world());
    s.micro_batches = 3;
    CHECK(furthest(train<float, float>(s, test_world()).losses, whole.losses) < 2e-5);
  }
}

TEST_CASE("a batch that the ranks do not divide is padded with nothing", "[fsdp]") {
  Setup s;
  s.model = small(Arch::simple, 4 * test_world().size + 1);
  s.rows = 7, s.micro_batches = 2;
  const Outcome sharded = train<float, float>(s, test_world());
  s.micro_batches = 1;
  const Outcome one = alone<float, float>(s);
  if (test_world().rank == 0) CHECK(furthest(sharded.losses, one.losses) < 2e-5);
}

TEST_CASE("delays before gathers, reductions and the optimizer change nothing", "[fsdp]") {
  for (void (*cut)(ModelConfig*) : {whole_blocks, head_with_last_mlp, replicated_head}) {
    Setup s;
    s.model = small(Arch::rope, 4 * test_world().size + 1);
    cut(&s.model);
    INFO("wrap " << int(s.model.wrap) << " replicated below " << s.model.replicate_below);
    s.steps = 2;
    s.micro_batches = 2;
    const Outcome plain = train<float, float>(s, test_world());
    for (bool together : {false, true}) {
      s.together = together;
      s.delay_ms = 0;
      CHECK(same(train<float, float>(s, test_world()), plain));
      s.delay_ms = test_world().rank % 2 ? 5 : 20;  // not in step with each other
      CHECK(same(train<float, float>(s, test_world()), plain));
    }
    s.clip = 0, s.fsdp.update_in_backward = true;
    CHECK(train<float, float>(s, test_world()).shards == [&] {
      s.together = false, s.delay_ms = 0;
      return train<float, float>(s, test_world()).shards;
    }());
  }
}

TEST_CASE("the number of slots changes no bit", "[fsdp]") {
  Setup s;
  s.model = small(Arch::llama, 4 * test_world().size + 1);
  s.steps = 3, s.micro_batches = 2;
  const Outcome plain = train<float, float>(s, test_world());
  for (int slots : {1, 3, 5}) {
    s.fsdp.gather_slots = slots, s.fsdp.gradient_slots = slots;
    CHECK(same(train<float, float>(s, test_world()), plain));
  }
}

TEST_CASE("with two slots every unit is on its way before it is wanted", "[fsdp]") {
  const World& world = test_world();
  for (void (*cut)(ModelConfig*) : {whole_blocks, sublayers, small_units, head_with_last_mlp, replicated_head})
    for (bool tied : {false, true})
      for (Recompute mode : {Recompute::none, Recompute::both, Recompute::block}) {
        Setup s;
        s.model = small(Arch::rope, 4 * world.size + 1), s.steps = 2, s.micro_batches = 2;
        s.model.tied = tied, s.model.recompute = mode;
        cut(&s.model);
        const std::vector<Issued> trace = train<float, float>(s, world).trace;
        INFO("wrap " << int(s.model.wrap) << " from " << s.model.wrap_min_params << " replicated below "
                     << s.model.replicate_below << " tied " << tied << " recompute " << int(mode) << ": "
                     << text_of(trace, true));
        std::set<int> behind;  // gathered behind the last work of the unit before
        for (const Issued& i : trace) {
          if (i.kind == Issued::release) behind.clear();
          if (i.kind == Issued::all_gather && i.unit != 0) behind.insert(i.unit);  // a step begins with unit 0
          if (i.kind == Issued::use) CHECK(behind.count(i.unit) == 0);
        }
      }
}

TEST_CASE("memory is flat over a thousand steps", "[fsdp]") { check_flat(Backend::cpu); }

TEST_CASE("the planned memory is what is used, and what --plan says", "[fsdp]") {
  const World& world = test_world();
  Setup s;
  s.model = small(Arch::rope, 4 * world.size + 1);
  s.steps = 1;
  const Outcome out = train<float, float>(s, world);
  CHECK(out.memory.live_peak <= out.memory.arena);
  std::vector<Unit> units = parameter_table(s.model);
  lay_out(&units, world.size);
  int64_t shards = 0, largest = 0;
  for (const Unit& u : units) shards += u.shard, largest = std::max(largest, u.padded);
  auto about = [](int64_t bytes, int64_t want, int64_t buffers) {
    return bytes >= want && bytes - want < buffers * 4096;
  };
  const int64_t n = int64_t(units.size());
  CHECK(about(out.memory.init[int(Purpose::master)], shards * 4, n));
  CHECK(about(out.memory.before_step[int(Purpose::moments)], shards * 8, 2 * n));
  const int gathers_here = world.size > 1;  // one rank computes with its master copy
  CHECK(about(out.memory.peak[int(Purpose::gather_slots)], gathers_here * largest * 4 * 2, 2));
  CHECK(about(out.memory.peak[int(Purpose::gradient_slots)], largest * 4 * 2, 2));
  // As many slots as are asked for, and no more than units.
  for (auto [gathers, gradients] : {std::pair<int, int>{1, 3}, {3, 1}, {9, 9}}) {
    s.fsdp.gather_slots = gathers, s.fsdp.gradient_slots = gradients;
    const MemoryReport memory = train<float, float>(s, world).memory;
    const int64_t g = std::min<int64_t>(gathers, n), r = std::min<int64_t>(gradients, n);
    CHECK(about(memory.peak[int(Purpose::gather_slots)], gathers_here * largest * 4 * g, g));
    CHECK(about(memory.peak[int(Purpose::gradient_slots)], largest * 4 * r, r));
  }
  // What the reduce stream alone works in is one for all slots: AdamW's shard in the backward pass, a gradient in bf16.
  auto slots = [&](const Setup& setup) {
    return train<float, float>(setup, world).memory.peak[int(Purpose::gradient_slots)];
  };
  s.fsdp.gradient_slots = 3, s.clip = 0, s.fsdp.update_in_backward = true;
  CHECK(about(slots(s), largest * 4 * 3 + largest / world.size * 4, 4));
  s.fsdp.update_in_backward = false, s.fsdp.reduce_dtype = Dtype::bf16;
  CHECK(about(slots(s), largest * 4 * 3 + largest * 2, 4));
}

TEST_CASE("few large units have a slot between them, and are on their way early", "[fsdp]") {
  const World& world = test_world();
  if (world.size == 1) SKIP_TEST("one rank computes with its master copy");
  Setup s;
  s.model = small(Arch::rope, 1001), s.steps = 2, s.micro_batches = 2;
  std::vector<Unit> units = parameter_table(s.model);  // embedding, three blocks, head
  lay_out(&units, world.size);
  const int64_t small = units[1].padded * 4, large = units[4].padded * 4;
  REQUIRE(large > 2 * small);
  auto bytes = [&](int64_t want) { return Approx(double(want)).margin(5 * 4096); };
  const Outcome out = train<float, float>(s, world);
  CHECK(out.memory.peak[int(Purpose::gather_slots)] == bytes(large + 2 * small));
  CHECK(out.memory.peak[int(Purpose::gradient_slots)] == bytes(large + 2 * small));
  CHECK(text_of(out.trace, true) ==
        "gather0 gather1 use0 gather2 use1 gather3 gather4 use2 use3 use4 reduce4 gather2 use3 reduce3 gather1 use2 "
        "reduce2 gather0 use1 reduce1 reduce0 use0 use1 gather3 gather4 use2 use3 use4 reduce4 gather2 use3 reduce3 "
        "gather1 use2 reduce2 use1 reduce1 reduce0 sum step");
  s.fsdp.gather_slots = 0;
  CHECK(same(out, train<float, float>(s, world)));
  // Together they save nothing, or would want the slot at once.
  s.fsdp.gather_slots = s.fsdp.gradient_slots = 5;
  CHECK(train<float, float>(s, world).memory.peak[int(Purpose::gradient_slots)] == bytes(5 * large));
  s.model.tied = true;
  CHECK(train<float, float>(s, world).memory.peak[int(Purpose::gradient_slots)] ==
        bytes(units[0].padded * 4 + 4 * small));
}

TEST_CASE("micro-batches of one plan end with the memory that they began with, whoever reduces", "[fsdp]") {
  const World& world = test_world();
  Setup s;
  s.model = small(Arch::rope, 1001), s.steps = 2, s.micro_batches = 5;  // embedding and head are large
  const Outcome rings = train<float, float>(s, world);
  s.fsdp.reduce_by_copy_engine = true;
  CHECK(same(train<float, float>(s, world), rings));
  s.poison = true, s.delays = {0, world.rank % 2 ? 2 : 5};
  CHECK(same(train<float, float>(s, world), rings));
}

TEST_CASE("what waits for a gather is told of gathers, and of reductions for a reduction", "[fsdp]") {
  const World& world = test_world();
  if (world.size == 1) SKIP_TEST("one rank waits for nobody");
  const auto exposed = [&](double gather_ms, double reduce_ms) {
    Setup s;
    s.model = small(Arch::rope, 4 * world.size + 1), s.steps = 2;
    s.delays = {gather_ms, reduce_ms};
    return train<float, float>(s, world).exposed;
  };
  const auto gathers = exposed(30, 0), reductions = exposed(0, 30);
  CHECK(gathers.first > 20);
  CHECK(gathers.first > 2 * gathers.second);
  CHECK(reductions.second > 20);
  CHECK(reductions.second > 2 * reductions.first);
}

// --------------------------------------------------------------------------------------------------------------- GPU

TEST_CASE("GPU: every way to shard as one GPU does", "[fsdp][gpu][hosts]") {
  NEEDS_GPU();
  if (!one_gpu_a_rank()) SKIP_TEST("fewer GPUs than ranks");
  const World& world = test_world();
  for (int n = 0; n < 8; ++n) {
    INFO("case " << n);
    Setup s;
    s.model = small_on_gpu(n == 1 ? Arch::simple : Arch::rope), s.lr = 1e-3, s.steps = 4, s.micro_batches = 2;
    s.backend = Backend::gpu, s.fsdp.reduce_dtype = Dtype::f32;
    if (n == 0) s.model.wrap = Wrap::sublayer, s.model.tied = true;
    if (n == 1) s.model.replicate_below = 1000, s.fsdp.reduce_last = true, s.model.hidden_bytes = 4096;
    if (n == 1) s.fsdp.norm = ops::GradNorm::three;
    if (n == 2) s.fsdp.norm = ops::GradNorm::one, s.model.recompute = Recompute::block, s.model.replicate_below = 1000;
    if (n == 3) s.fsdp.norm = ops::GradNorm::inf, s.model.frozen = {"block.0.mlp", "block.1", "head"};
    if (n == 4) s.fsdp.update_in_backward = true, s.clip = 0;
    if (n == 5) s.model.wrap = Wrap::size, s.model.wrap_min_params = 60000, s.model.bucket_params = 150000;
    if (n == 6) s.model.wrap = Wrap::single;
    if (n == 6) s.model.frozen = {"block.0.norm1", "block.1.attention", "block.2.mlp.down"};
    const Outcome one = alone<bf16, float>(s);
    if (n == 0) s.fsdp.gather_wide = true;
    if (n == 2) s.fsdp.shard_ranks = world.size % 2 ? 1 : 2;
    if (n == 3) s.fsdp.shard_ranks = 1;
    if (n == 3) s.fsdp.reshard_after_forward = false;
    if (n == 4) s.fsdp.moment_dtype = Dtype::bf16, s.model.backward_prefetch = BackwardPrefetch::post;
    if (n == 7) s.fsdp.reshard_after_forward = false;
    const Outcome out = train<bf16, float>(s, world);
    CHECK(same(train<bf16, float>(s, world), out));
    if (world.rank == 0) CHECK(furthest(out.losses, one.losses) < 1e-2);
    if (world.rank == 0) CHECK(furthest(out.norms, one.norms) < 5e-2);
  }
}

TEST_CASE("GPU: a step as a graph is the step bit for bit", "[fsdp][gpu][hosts]") {
  NEEDS_GPU();
  if (!one_gpu_a_rank()) SKIP_TEST("fewer GPUs than ranks");
  for (bool sparse_too : {false, true})
    for (bool in_backward : {false, true}) {
      Setup s;
      s.model = small_on_gpu(Arch::rope), s.lr = 1e-3, s.steps = 7, s.micro_batches = 2;
      s.model.sparse = sparse_too, s.model.seq = sparse_too ? 1100 : s.model.seq;
      s.backend = Backend::gpu, s.fsdp.reduce_dtype = Dtype::bf16;
      s.fsdp.update_in_backward = in_backward, s.clip = in_backward ? 0 : 1;
      const Outcome plain = train<bf16, bf16>(s, test_world());
      s.graph = true;
      CHECK(same(train<bf16, bf16>(s, test_world()), plain));
    }
  // With validations in between, which leave nothing in the slots that a graph would then not gather.
  Setup s;
  s.model = small_on_gpu(Arch::rope), s.model.replicate_below = 1000, s.lr = 1e-3, s.steps = 7;
  s.backend = Backend::gpu, s.fsdp.reduce_dtype = Dtype::bf16, s.fsdp.reshard_after_forward = false;
  s.validate = true;
  const Outcome plain = train<bf16, bf16>(s, test_world());
  s.graph = true;
  const Outcome out = train<bf16, bf16>(s, test_world());
  CHECK(same(out, plain));
  CHECK(out.validated == plain.validated);
  // What is gathered behind a graph waits for it, though nothing in the graph changes a frozen unit.
  s.graph = false, s.fsdp.reshard_after_forward = true, s.model.replicate_below = 0, s.steps = 12;
  s.model.frozen = {"embedding"}, s.model.hidden = 4096, s.rows = 64;  // long enough to be overtaken
  const Outcome frozen = train<bf16, bf16>(s, test_world());
  s.graph = true;
  const Outcome again = train<bf16, bf16>(s, test_world());
  CHECK(same(again, frozen));
  CHECK(again.validated == frozen.validated);
  // Nor does a step that is no graph, between others, let what is gathered behind the next launch overtake it.
  s.graph = false, s.model.frozen = {}, s.no_graph = 4;
  const Outcome steps = train<bf16, bf16>(s, test_world());
  s.graph = true;
  const Outcome mixed = train<bf16, bf16>(s, test_world());
  CHECK(same(mixed, steps));
  CHECK(mixed.validated == steps.validated);
}

TEST_CASE("GPU: who moves the gathers changes no bit", "[fsdp][gpu][hosts]") {
  NEEDS_GPU();
  if (!one_gpu_a_rank() || test_world().size == 1) SKIP_TEST("fewer GPUs than ranks, or one rank");
  Setup s;
  s.model = small_on_gpu(Arch::rope), s.lr = 1e-3, s.steps = 6;
  s.backend = Backend::gpu, s.fsdp.reduce_dtype = Dtype::bf16;
  const Outcome plain = train<bf16, bf16>(s, test_world());
  s.fsdp.gather_over_mpi = true;
  CHECK(same(train<bf16, bf16>(s, test_world()), plain));
  s.fsdp.gather_over_mpi = false, s.fsdp.gather_by_copy_engine = on_one_host(test_world(), test_world().size);
  for (bool fetch : {false, true})
    for (bool graph : {false, true}) {
      s.fsdp.fetch = fetch && s.fsdp.gather_by_copy_engine, s.graph = graph;
      CHECK(same(train<bf16, bf16>(s, test_world()), plain));
    }
  if (test_world().size != 4) return;
  s.fsdp.gather_by_copy_engine = s.fsdp.fetch = true;
  s.fsdp.shard_ranks = 2;  // each group has engines and windows of its own
  const Outcome by_engines = train<bf16, bf16>(s, test_world());
  s.fsdp.gather_by_copy_engine = s.fsdp.fetch = false;
  CHECK(same(train<bf16, bf16>(s, test_world()), by_engines));
}

TEST_CASE("GPU: reductions by copy engines train alike, in a graph too", "[fsdp][gpu][hosts]") {
  NEEDS_PEERS();
  Setup s;
  s.model = small_on_gpu(Arch::rope), s.model.replicate_below = 1000, s.lr = 1e-3, s.steps = 6, s.micro_batches = 2;
  s.backend = Backend::gpu, s.fsdp.reduce_dtype = Dtype::bf16;
  const Outcome ring = train<bf16, bf16>(s, test_world());
  s.fsdp.reduce_by_copy_engine = true;
  const Outcome plain = train<bf16, bf16>(s, test_world());
  CHECK(furthest(plain.losses, ring.losses) < 1e-2);
  s.delay_ms = test_world().rank % 2 ? 20 : 5, s.poison = true;
  CHECK(same(train<bf16, bf16>(s, test_world()), plain));
  s.delay_ms = 0, s.poison = false;
  for (auto [gathers_too, fetch] : {std::pair(false, false), {true, false}, {true, true}})
    for (bool graph : {false, true}) {
      s.fsdp.gather_by_copy_engine = gathers_too, s.fsdp.fetch = fetch, s.graph = graph;
      CHECK(same(train<bf16, bf16>(s, test_world()), plain));
    }
}

TEST_CASE("GPU: a rank fetches what its peers have updated, however late they are", "[fsdp][gpu][hosts]") {
  NEEDS_PEERS();
  Setup s;
  s.model = small_on_gpu(Arch::rope), s.lr = 1e-2, s.steps = 8, s.micro_batches = 2;
  s.backend = Backend::gpu, s.fsdp.reduce_dtype = Dtype::bf16;
  // Validations and steps that are no graph gather other units first than a graph does.
  s.validate = true, s.no_graph = 3;
  const Outcome plain = train<bf16, bf16>(s, test_world());
  s.fsdp.gather_by_copy_engine = s.fsdp.fetch = true;
  s.optimizer_ms = test_world().rank % 2 ? 60 : 0;
  for (bool graph : {false, true}) {
    s.graph = graph;
    const Outcome late = train<bf16, bf16>(s, test_world());
    CHECK(same(late, plain));
    CHECK(late.validated == plain.validated);
  }
}

TEST_CASE("GPU: a slot for large units changes no bit", "[fsdp][gpu][hosts]") {
  NEEDS_PEERS();
  Setup s;  // with biases; embedding and head are twice as large as a block and more
  s.model = small_on_gpu(Arch::simple), s.model.vocab = 4096, s.lr = 1e-3, s.steps = 6, s.micro_batches = 2;
  s.backend = Backend::gpu, s.fsdp.reduce_dtype = Dtype::bf16;
  s.fsdp.gather_slots = 5, s.fsdp.gradient_slots = 5;  // as large as the largest, all of them
  const Outcome plain = train<bf16, bf16>(s, test_world());
  s.fsdp.gather_slots = s.fsdp.gradient_slots = 2;
  for (bool engines : {false, true})
    for (bool graph : {false, true}) {
      s.fsdp.gather_by_copy_engine = s.fsdp.fetch = engines, s.graph = graph;
      const Outcome out = train<bf16, bf16>(s, test_world());
      CHECK(same(out, plain));
      CHECK(out.memory.peak[int(Purpose::gather_slots)] < plain.memory.peak[int(Purpose::gather_slots)]);
    }
  s.graph = false, s.delay_ms = test_world().rank % 2 ? 20 : 5, s.poison = true;
  CHECK(same(train<bf16, bf16>(s, test_world()), plain));
}

// The same sums in one piece and in several; of one micro-batch in the shard itself.
TEST_CASE("GPU: owners sum large gradients in pieces", "[fsdp][gpu][hosts]") {
  NEEDS_PEERS();
  Setup s;  // as above
  s.model = small_on_gpu(Arch::simple), s.model.vocab = 4096, s.lr = 1e-3, s.steps = 6;
  s.backend = Backend::gpu;
  s.fsdp.gather_by_copy_engine = s.fsdp.fetch = s.fsdp.reduce_by_copy_engine = true;
  for (Dtype reduce : {Dtype::bf16, Dtype::f32})
    for (int micro_batches : {1, 5}) {
      INFO(micro_batches << " micro-batches, reduced in " << name_of(reduce));
      s.fsdp.reduce_dtype = reduce, s.micro_batches = micro_batches;
      const auto run = [&] {
        return reduce == Dtype::bf16 ? train<bf16, bf16>(s, test_world()) : train<bf16, float>(s, test_world());
      };
      s.fsdp.gradient_slots = 5;
      const Outcome whole = run();
      s.fsdp.gradient_slots = 2;
      for (bool late : {false, true}) {
        s.graph = late, s.poison = !late, s.delay_ms = !late ? 0 : test_world().rank % 2 ? 20 : 5;
        const Outcome pieces = run();
        CHECK(pieces.losses == whole.losses);
        CHECK(furthest(pieces.norms, whole.norms) < 1e-9);
      }
      s.graph = s.poison = false, s.delay_ms = 0;
    }
}

TEST_CASE("GPU: memory is flat over a thousand steps", "[fsdp][gpu]") {
  NEEDS_GPU();
  if (!one_gpu_a_rank()) SKIP_TEST("fewer GPUs than ranks");
  check_flat(Backend::gpu);
}

TEST_CASE("GPU: sharded over NCCL as on one GPU", "[fsdp][gpu]") {
  NEEDS_GPU();
  if (!one_gpu_a_rank()) SKIP_TEST("fewer GPUs than ranks");
  for (Arch arch : all_archs)
    for (bool sparse_too : {false, true}) {
      if (sparse_too && arch != Arch::rope) continue;
      // Communicators take long to make: each architecture is run with one of the two.
      const Dtype reduce = arch == Arch::rope || arch == Arch::mlp ? Dtype::bf16 : Dtype::f32;
      INFO(name_of(arch) << (sparse_too ? " with NSA" : "") << ", reduced in " << name_of(reduce));
      Setup s;
      s.model = small_on_gpu(arch), s.lr = 1e-3;
      s.model.sparse = sparse_too, s.model.seq = sparse_too ? 1100 : s.model.seq;
      s.backend = Backend::gpu, s.fsdp.reduce_dtype = reduce, s.micro_batches = 2;
      const auto run = [&](const World& w) {
        return reduce == Dtype::bf16 ? train<bf16, bf16>(s, w) : train<bf16, float>(s, w);
      };
      const Outcome sharded = run(test_world()), again = run(test_world());
      CHECK(same(sharded, again));
      CHECK(sharded.losses.back() < sharded.losses.front());
      // What the device has less is the arena, in its own pages. Alone on it: NCCL frees memory at its leisure.
      if (test_world().size == 1) {
        CHECK(sharded.reported >= sharded.memory.arena);
        CHECK(sharded.reported - sharded.memory.arena <= 2 << 20);
      }
      s.poison = true;
      CHECK(same(run(test_world()), sharded));
      s.poison = false;
      if (test_world().rank == 0) CHECK(furthest(sharded.losses, run(World()).losses) < 1e-2);
    }
}

TEST_CASE("GPU: delays change nothing", "[fsdp][gpu]") {
  NEEDS_GPU();
  if (!one_gpu_a_rank()) SKIP_TEST("fewer GPUs than ranks");
  Setup s;
  s.model = small_on_gpu(Arch::rope), s.backend = Backend::gpu, s.steps = 2, s.fsdp.reduce_dtype = Dtype::bf16;
  const Outcome plain = train<bf16, bf16>(s, test_world());
  s.delay_ms = test_world().rank % 2 ? 30 : 100;
  for (bool together : {false, true}) {
    s.together = together;
    CHECK(same(train<bf16, bf16>(s, test_world()), plain));
  }
}

TEST_CASE("GPU: ranks that share one GPU train as one rank does", "[fsdp][gpu]") {
  NEEDS_GPU();
  Setup s;
  s.model = small_on_gpu(Arch::rope), s.backend = Backend::gpu, s.share_gpu = true, s.lr = 1e-3, s.steps = 5;
  const Outcome shared = train<float, float>(s, test_world()), again = train<float, float>(s, test_world());
  CHECK(same(shared, again));
  const Outcome one = alone<float, float>(s);
  if (test_world().rank == 0) CHECK(furthest(shared.losses, one.losses) < 1e-4);
}
