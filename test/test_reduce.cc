// Reductions alone, without a model: what a rank finds in its shard of a gradient is, bit for bit, what a plain loop
// over the ranks makes of what they had. AdamW's first moment is that gradient where beta1 is 0.
#include <cmath>
#include <cstring>

#include "fsdp.h"
#include "test/catch.h"

namespace {

// Element i of a unit's gradient on a rank, in a micro-batch: of many sizes, so that rounding and order show.
float value(int micro_batch, int u, int rank, int64_t i) {
  uint64_t x =
      uint64_t(i) * 0x9E3779B97F4A7C15ull + uint64_t(micro_batch * 1009 + u * 101 + rank + 1) * 0xD1B54A32D192ED03ull;
  x ^= x >> 29, x *= 0xBF58476D1CE4E5B9ull, x ^= x >> 32;
  return std::ldexp(float(int64_t(x >> 44) - (1 << 19)), int(x & 7) - 20);
}

// Three units that are sharded, of which one is mostly padding, and one that every rank has.
constexpr int64_t some = 8 * 1003;
std::vector<Unit> units(int shards, int64_t first = some) {
  std::vector<Unit> all;
  for (int64_t numel : {first, int64_t(8), int64_t(8 * 130), int64_t(8 * 70)}) {
    Unit u;
    u.name = "unit " + std::to_string(all.size());
    Param p = {};
    p.name = u.name, p.shape = {numel}, p.numel = numel, p.id = uint32_t(all.size());
    u.params = {p};
    u.replicated = all.size() == 3;
    all.push_back(u);
  }
  lay_out(&all, shards);
  return all;
}

struct Reduced {
  std::vector<std::vector<float>> shards;  // this rank's, by unit
  std::vector<Issued> trace;
  MemoryReport memory;
  StepScalars scalars;
};

struct Setup {
  Backend backend = Backend::cpu;
  FsdpOptions fsdp;
  int micro_batches = 1;
  double delay_ms = 0;
  int64_t first_unit = some;
  int64_t width = 0;  // of the rows of the first unit, if only those that a rank uses are not zero
  double loss = 1;    // this rank's
};

// A rank uses a third of the rows; some rows nobody uses, and some all.
bool uses(int rank, int64_t row) { return row % 7 == 0 || (row % 7 != 3 && (row * 31 + rank * 17) % 3 == 0); }
float value(const Setup& s, int micro_batch, int u, int rank, int64_t i) {
  return u == 0 && s.width > 0 && !uses(rank, i / s.width) ? 0 : value(micro_batch, u, rank, i);
}

template <class T, class G>
Reduced reduce(const Setup& s) {
  const World& world = test_world();
  const bool gpu = s.backend == Backend::gpu;
  const Transport transport = world.size == 1 ? Transport::none : gpu ? Transport::nccl : Transport::mpi;
  const std::vector<Unit> all = units(s.fsdp.shards(world.size), s.first_unit);
  Device dev(s.backend, gpu ? world.local_rank % gpus() : 0, gpu ? 1 : world.local_size,
             comm_streams(s.backend, transport));
  HostBuffer<ops::AdamW> adamw(dev, 1);
  adamw[0] = ops::AdamW(0.0f, 0.0f, 0.0f, 1e-8f, 0.0f, 1);
  std::vector<HostBuffer<G>> gradients;
  for (int m = 0; m < s.micro_batches; ++m)
    for (size_t u = 0; u < all.size(); ++u) {
      gradients.emplace_back(dev, all[u].numel);
      for (int64_t i = 0; i < all[u].numel; ++i) gradients.back()[i] = G(value(s, m, int(u), world.rank, i));
    }
  const int64_t rows = s.width ? s.first_unit / s.width : 0;
  HostBuffer<int32_t> starts(dev, rows + 1);
  starts[0] = 0;
  for (int64_t v = 0; v < rows; ++v) starts[v + 1] = starts[v] + (uses(world.rank, v) ? 1 + int(v % 2) : 0);
  if (s.width)  // what is not used may be anything
    for (int64_t i = 0; i < s.first_unit; ++i)
      if (!uses(world.rank, i / s.width)) gradients[gradients.size() - all.size()][i] = G(std::nanf(""));
  ops::UsedRows used;
  auto keep_rows = [&] {
    if (s.width) used = {dev.mem.keep<int32_t>(rows + 1, "rows used", Purpose::workspace), rows, s.width};
  };
  HostBuffer<double> loss(dev, 1);
  loss[0] = s.loss;
  auto step = [&](Fsdp<T, G>& fsdp) {
    dev.mem.begin("step");
    fsdp.begin_step(adamw.get(), 0);
    dev.compute().copy(&fsdp.scalars()->loss, loss.get(), sizeof(double));
    for (int m = 0; m < s.micro_batches; ++m) {
      fsdp.begin_micro_batch(m + 1 == s.micro_batches);
      for (size_t u = all.size(); u-- > 0;) {
        const bool by_rows = s.width && u == 0 && m + 1 == s.micro_batches;
        if (by_rows && dev.mode == Mode::run) CHECK(fsdp.takes_rows(int(u), used));
        G* to = fsdp.gradient(int(u));
        dev.compute().copy(to, gradients[size_t(m) * all.size() + u].get(), all[u].numel * int64_t(sizeof(G)));
        if (by_rows) fsdp.reduce(int(u), used);
        else fsdp.reduce(int(u));
      }
    }
    fsdp.end_step();
    dev.mem.end();
  };
  {
    keep_rows();
    Fsdp<T, G> planned(dev, world, transport, all, s.fsdp, Links::planned);
    step(planned);
  }
  if (transport == Transport::nccl && s.fsdp.uses_copy_engines()) use_nccl_memory(dev);
  dev.mem.commit();
  dev.mem.rewind();
  dev.mode = Mode::run;
  keep_rows();
  Fsdp<T, G> fsdp(dev, world, transport, all, s.fsdp, Links::open);
  if (s.width) dev.compute().copy(const_cast<int32_t*>(used.start), starts.get(), (rows + 1) * 4);
  fsdp.init_weights();
  fsdp.set_delays(0, s.delay_ms, 0);
  dev.compute().synchronize();
  dev.mem.poison();
  Reduced out;
  fsdp.issued().begin();
  step(fsdp);
  out.trace = fsdp.issued().all();
  out.memory = dev.mem.report();
  HostBuffer<StepScalars> scalars(dev, 1);
  dev.compute().copy(scalars.get(), fsdp.scalars(), sizeof(StepScalars));
  dev.compute().synchronize();
  out.scalars = scalars[0];
  for (size_t u = 0; u < all.size(); ++u) {
    const int64_t n = all[u].with_gradient.shard;
    HostBuffer<float> host(dev, n);
    dev.compute().copy(host.get(), fsdp.first_moment(int(u)), n * 4);
    dev.compute().synchronize();
    out.shards.emplace_back(host.get(), host.get() + n);
  }
  return out;
}

// The same in loops, for ranks that send E: groups sum in fp32 and in rank order; their sums, where there are several,
// are rounded to E and summed in the groups' order. A step's only sum is rounded, others are added up as they are.
template <class E>
std::vector<std::vector<float>> expected(const Setup& s) {
  const World& world = test_world();
  const int ranks = s.fsdp.shards(world.size), groups = world.size / ranks;
  const std::vector<Unit> all = units(ranks, s.first_unit);
  std::vector<std::vector<float>> shards;
  for (size_t u = 0; u < all.size(); ++u) {
    const Unit& unit = all[u];
    const int64_t n = unit.with_gradient.shard, from = unit.replicated ? 0 : world.rank % ranks * n;
    std::vector<float> shard(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) {
      for (int m = 0; m < s.micro_batches; ++m) {
        auto sent = [&](int rank) {
          return from + i < unit.numel ? acc_t<E>(E(value(s, m, int(u), rank, from + i))) : acc_t<E>(0);
        };
        acc_t<E> total = 0;
        for (int g = 0; g < groups; ++g) {
          acc_t<E> sum = 0;
          for (int r = 0; r < ranks; ++r) sum += sent(g * ranks + r);
          if (groups > 1 || unit.replicated) sum = acc_t<E>(E(sum));
          total += sum;
        }
        if (groups > 1) total = acc_t<E>(E(total));
        shard[size_t(i)] += float(total);
      }
      if (s.micro_batches == 1) shard[size_t(i)] = float(E(shard[size_t(i)]));  // in bf16 if that was sent
    }
    shards.push_back(shard);
  }
  return shards;
}

bool same(const std::vector<std::vector<float>>& a, const std::vector<std::vector<float>>& b) {
  bool same = a.size() == b.size();
  for (size_t i = 0; same && i < a.size(); ++i)
    same = a[i].size() == b[i].size() && std::memcmp(a[i].data(), b[i].data(), a[i].size() * 4) == 0;
  return same;
}

template <class T, class G, class E>
void check(Setup s) {
  const World& world = test_world();
  s.fsdp.reduce_dtype = dtype_of<E>;
  for (int shard_ranks : {0, 2}) {
    if (shard_ranks == 2 && world.size != 4) continue;
    if (shard_ranks == 2 && s.backend == Backend::gpu)
      continue;  // NCCL's all_reduce between replicas has its own order
    s.fsdp.shard_ranks = shard_ranks;
    for (int slots : {1, 2}) {
      s.fsdp.gradient_slots = slots, s.micro_batches = 2 * slots - 1;
      INFO(name_of(dtype_of<G>) << " sent in " << name_of(dtype_of<E>) << ", groups of " << shard_ranks << ", " << slots
                                << " slots");
      std::vector<std::vector<float>> want = expected<E>(s), got = reduce<T, G>(s).shards;
      // A replicated unit goes through NCCL's all_reduce.
      if (s.backend == Backend::gpu && world.size > 1) want.pop_back(), got.pop_back();
      CHECK(same(got, want));
      Setup late = s;
      late.delay_ms = world.rank % 2 ? 1 : 4;
      got = reduce<T, G>(late).shards;
      got.resize(want.size());
      CHECK(same(got, want));
    }
  }
}

}  // namespace

TEST_CASE("owners sum their parts in fp32 and in rank order, whoever is late", "[reduce]") {
  Setup s;
  s.fsdp.reduce_by_copy_engine = true;
  check<float, float, float>(s);
  check<bf16, bf16, bf16>(s);
  check<bf16, float, bf16>(s);
  check<bf16, float, float>(s);
  check<double, double, double>(s);
  s.fsdp.reduce_last = true;
  s.micro_batches = 1;
  s.fsdp.reduce_dtype = Dtype::bf16;
  CHECK(same(reduce<bf16, float>(s).shards, expected<bf16>(s)));
}

TEST_CASE("a bf16 gradient is rounded on the wire, and of several sums none is", "[reduce]") {
  const World& world = test_world();
  Setup s;
  s.fsdp.reduce_dtype = Dtype::bf16;
  for (int micro_batches : {1, 2}) {
    s.micro_batches = micro_batches;
    s.fsdp.reduce_by_copy_engine = true;
    const Reduced exact = reduce<bf16, bf16>(s);
    s.fsdp.reduce_by_copy_engine = false;
    const Reduced rounded = reduce<bf16, bf16>(s);
    CHECK(same(exact.shards, expected<bf16>(s)));
    CHECK(same(exact.shards, rounded.shards) == (micro_batches == 1 || world.size == 1));
    for (const auto& [name, peak] :
         {std::pair("engines", exact.memory.peak), std::pair("rings", rounded.memory.peak)}) {
      INFO(name);
      int64_t numel = 0;
      for (const Unit& u : units(world.size)) numel += u.with_gradient.shard;
      CHECK(peak[int(Purpose::gradients)] == Approx(double(numel * (micro_batches == 1 ? 2 : 4))).margin(4 * 512));
    }
  }
}

// Every rank gets the same, of all ranks' shards and losses, whoever sums them.
void check_scalars(Setup s) {
  const World& world = test_world();
  const std::vector<Unit> all = units(world.size);
  for (ops::GradNorm p : {ops::GradNorm::one, ops::GradNorm::two, ops::GradNorm::three, ops::GradNorm::inf}) {
    INFO("norm " << int(p));
    double sum = 0, largest = 0;
    for (size_t u = 0; u < all.size(); ++u)
      for (int64_t i = 0; i < all[u].numel; ++i) {
        float x = 0;
        for (int r = 0; r < world.size; ++r) x += value(0, int(u), r, i);
        largest = std::max(largest, std::abs(double(x)));
        sum += std::pow(std::abs(double(x)), int(p));
      }
    const double norm = p == ops::GradNorm::inf ? largest : std::pow(sum, 1.0 / int(p));
    s.fsdp.norm = p, s.loss = 0.25 + world.rank;
    const StepScalars got = reduce<float, float>(s).scalars;
    CHECK(std::sqrt(got.norm2) == Approx(norm).epsilon(1e-6));
    CHECK(got.loss == 0.25 * world.size + world.size * (world.size - 1) / 2);
    CHECK(got.steps == world.size);
    CHECK(got.halts == 0);
    s.loss = world.rank == world.size - 1 ? std::nan("") : 1;
    const StepScalars lost = reduce<float, float>(s).scalars;
    CHECK(std::isnan(lost.loss));
    CHECK(!std::isfinite(lost.norm2));
    CHECK(lost.steps == world.size);
  }
}

TEST_CASE("a step's scalars are of all ranks", "[reduce]") {
  for (double late_ms : {0.0, test_world().rank % 2 ? 1.0 : 4.0}) {
    Setup s;
    s.delay_ms = late_ms;
    check_scalars(s);
  }
}

TEST_CASE("GPU: ranks sum a step's scalars in each other's memory", "[reduce][gpu][hosts]") {
  NEEDS_GPUS_OF_ONE_HOST();
  Setup s;
  s.backend = Backend::gpu;
  s.fsdp.gather_by_copy_engine = true;
  for (bool reads : {false, true})
    for (double late_ms : {0.0, test_world().rank % 2 ? 1.0 : 4.0}) {
      s.fsdp.read_tail = reads, s.delay_ms = late_ms;
      check_scalars(s);
    }
}

TEST_CASE("what owners sum lies in planned memory, and goes by all_to_all", "[reduce]") {
  const World& world = test_world();
  Setup s;
  s.fsdp.reduce_dtype = Dtype::bf16;
  s.micro_batches = 2;
  for (int slots : {1, 2}) {
    s.fsdp.gradient_slots = slots, s.fsdp.reduce_by_copy_engine = false;
    const Reduced without = reduce<bf16, bf16>(s);
    s.fsdp.reduce_by_copy_engine = true;
    const Reduced with = reduce<bf16, bf16>(s);
    const std::vector<Unit> all = units(world.size);
    // All ranks' parts of the largest, from the first reduction on.
    const int64_t parts = world.size > 1 ? 2 * all[0].with_gradient.padded : 0;
    const int64_t grew =
        with.memory.peak[int(Purpose::gradient_slots)] - without.memory.peak[int(Purpose::gradient_slots)];
    CHECK(grew >= parts);
    CHECK(grew < parts + 4096);
    CHECK(with.memory.before_step[int(Purpose::gradient_slots)] ==
          without.memory.before_step[int(Purpose::gradient_slots)]);
    // MPI's staging is for what is replicated alone. What is kept begins on a page.
    CHECK(with.memory.live_peak <= without.memory.live_peak + 4096);
    for (const Issued& i : with.trace) {
      if (i.unit < 0 || !i.moves()) continue;
      const Unit& u = all[size_t(i.unit)];
      CHECK(i.kind == (u.replicated     ? Issued::all_reduce
                       : world.size > 1 ? Issued::all_to_all
                                        : Issued::reduce_scatter));
      CHECK(i.bytes == 2 * u.with_gradient.padded);
      if (world.size > 1)
        CHECK(i.sent() ==
              Approx(2.0 * double(u.with_gradient.padded) * (world.size - 1) / world.size * (u.replicated ? 2 : 1)));
    }
  }
}

TEST_CASE("GPU: copy engines carry, and owners sum in fp32 and in rank order", "[reduce][gpu][hosts]") {
  NEEDS_GPUS_OF_ONE_HOST();
  Setup s;
  s.backend = Backend::gpu;
  s.fsdp.reduce_by_copy_engine = true;
  check<float, float, float>(s);
  check<bf16, bf16, bf16>(s);
  check<bf16, float, bf16>(s);
  s.fsdp.gather_by_copy_engine = true;
  check<bf16, bf16, bf16>(s);
  s.fsdp.fetch = true;
  check<float, float, float>(s);
  check<bf16, bf16, bf16>(s);
  check<bf16, float, bf16>(s);
}

// The first two units are a step's last. Each owner sums them in rank order whoever carries the rest.
TEST_CASE("GPU: owners read a step's last gradients in their peers' memory", "[reduce][gpu][hosts]") {
  NEEDS_GPUS_OF_ONE_HOST();
  Setup s;
  s.backend = Backend::gpu;
  s.fsdp.gather_by_copy_engine = s.fsdp.read_tail = true;
  for (bool copies : {false, true}) {
    s.fsdp.reduce_by_copy_engine = copies;
    for (double late_ms : {0.0, test_world().rank % 2 ? 1.0 : 4.0}) {
      s.delay_ms = late_ms, s.fsdp.reduce_dtype = Dtype::f32;
      std::vector<std::vector<float>> want = expected<float>(s), got = reduce<float, float>(s).shards;
      want.resize(2), got.resize(2);
      CHECK(same(got, want));
      s.fsdp.reduce_dtype = Dtype::bf16;
      want = expected<bf16>(s), got = reduce<bf16, bf16>(s).shards;
      want.resize(2), got.resize(2);
      CHECK(same(got, want));
    }
  }
  check<bf16, bf16, bf16>(s);
  check<bf16, float, bf16>(s);
  // As much as all blocks of a kernel read in several rounds.
  s.first_unit = 8 * 1'000'003, s.delay_ms = 0;
  s.fsdp.reduce_dtype = Dtype::f32;
  CHECK(reduce<float, float>(s).shards[0] == expected<float>(s)[0]);
}

// A rank's shard may begin and end within a row, and what its peers have not used is not read: it is no number here.
TEST_CASE("GPU: owners read the rows that their peers have used", "[reduce][gpu][hosts]") {
  NEEDS_PEERS();
  Setup s;
  s.backend = Backend::gpu;
  s.fsdp.gather_by_copy_engine = s.fsdp.read_tail = true;
  for (int64_t width : {8, 72, 1032})
    for (int64_t rows : {5, 701}) {
      s.width = width, s.first_unit = rows * width;
      INFO(rows << " rows of " << width);
      for (int micro_batches : {1, 3}) {
        s.micro_batches = micro_batches, s.delay_ms = test_world().rank % 2 ? 1.0 : 4.0;
        s.fsdp.reduce_dtype = Dtype::f32;
        std::vector<std::vector<float>> want = expected<float>(s), got = reduce<float, float>(s).shards;
        // The earlier micro-batches go by NCCL's ring, whose order among more ranks is its own.
        if (micro_batches == 1 || test_world().size == 2) CHECK(same({got[0]}, {want[0]}));
        if (micro_batches > 1) continue;
        s.fsdp.reduce_dtype = Dtype::bf16;
        want = expected<bf16>(s), got = reduce<bf16, bf16>(s).shards;
        CHECK(same({got[0]}, {want[0]}));
      }
    }
}

// Two ranks' sums know no order. The first unit is large, the others are small.
TEST_CASE("GPU: small gradients take a ring of their own", "[reduce][gpu]") {
  NEEDS_GPU();
  if (!one_gpu_a_rank()) SKIP_TEST("fewer GPUs than ranks");
  Setup s;
  s.backend = Backend::gpu;
  s.fsdp.small_reduce_ctas = 4, s.micro_batches = 2;
  s.first_unit = 8 * 1'000'003;
  REQUIRE(s.first_unit * int64_t(sizeof(float)) > FsdpOptions::small_gradient);
  const std::vector<std::vector<float>> want = expected<float>(s), got = reduce<float, float>(s).shards;
  for (size_t u = 0; u < want.size(); ++u) {
    double furthest = 0;
    for (size_t i = 0; i < want[u].size(); ++i)
      furthest = std::max(furthest, std::abs(double(got[u][i]) - double(want[u][i])));
    INFO("unit " << u);
    CHECK(furthest <= (test_world().size <= 2 ? 0 : 1e-4));
  }
}

// Over MPI a GPU's buffers pass through pinned host memory. What is gathered arrives where it is sent from; the parts
// that a reduction sums arrive beside it.
TEST_CASE("on GPUs over MPI reductions pin a second buffer, and gathers do not", "[reduce]") {
  const World& world = test_world();
  if (world.size == 1) return;
  const std::vector<Unit> all = units(world.size);
  int64_t largest = 0;
  for (const Unit& u : all) largest = std::max(largest, int64_t(sizeof(float)) * u.padded);
  Device dev(Backend::gpu, Device::plan_only);
  const Fsdp<float, float> fsdp(dev, world, Transport::mpi, all, FsdpOptions(), Links::open);
  REQUIRE(largest > world.size * piece_numbers * int64_t(sizeof(double)));
  CHECK(fsdp.pinned_bytes() == largest + 2 * largest);
}
