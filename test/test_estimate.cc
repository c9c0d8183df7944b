// The estimate of a step's time: its clocks on cases made by hand, its formulas, and its error against what was
// measured (results/).
#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "lib/program/estimate.h"
#include "lib/program/json.h"
#include "lib/program/presets.h"
#include "lib/program/process.h"
#include "lib/program/sweep_plan.h"
#include "lib/program/sweeps.h"
#include "lib/ops/ops.h"
#include "model.h"
#include "test/catch.h"

namespace {

using nlohmann::json;

// Round figures: 1 TFLOP/s at share 1; 1 TB/s of memory and 1 GB/s of links and network at an H200's parts of them.
Chip toy() { return {"toy", 10, 1e12, 1e11, 1e12 / 0.75, 1e9, 1e9 / 0.7, 1e9 / 0.85, false, 80}; }

struct Dry {
  Device dev{Backend::gpu, Device::plan_only};
  Estimate estimate;
  explicit Dry(const Chip& chip) : estimate(chip) {
    dev.timeline = &estimate, dev.compute_capability = chip.compute_capability;
  }
};

Cost flops(double n) {
  Cost c{Work::matmul};
  c.flops = n, c.launches = 0;
  return c;
}

template <class T, class G>
void step(Device& dev, const ModelConfig& m, int64_t batch, World world, bool engines = false, int steps = 1) {
  world.local_size = std::min(world.size, gpus_per_node);
  ops::keep_workspace(dev);
  FsdpOptions o;
  o.reduce_dtype = dtype_of<G>, o.gather_by_copy_engine = engines;
  Model<T, G> model(dev, world, world.size > 1 ? Transport::nccl : Transport::none, m, batch, o, Links::planned);
  Event copied(dev);
  for (int i = 0; i < steps; ++i) {
    if (i > 0) dev.timeline->next_step();
    dev.mem.begin("step");
    model.begin_step(nullptr, 1);
    model.forward_backward(nullptr, 1, true, true, copied);
    model.end_step();
    dev.mem.end();
  }
}

double step_ms(const Chip& chip, const ModelConfig& m, int64_t batch, int ranks, bool engines = false) {
  Dry dry(chip);
  World world;
  world.size = ranks;
  step<bf16, bf16>(dry.dev, m, batch, world, engines);
  return 1e3 * dry.estimate.step();
}

// On the gather stream, as ranks that fetch do it: an all_gather in bf16. bytes: of all parts.
void fetch_parts(Device& dev, int ranks, int64_t bytes) {
  World world;
  world.size = world.local_size = ranks;
  Channel channel(dev, dev.gather(), world, Transport::nccl, "gather", bytes, Links::planned, CopyEngines::all_gather);
  channel.all_gather(nullptr, bytes / ranks / 2, Dtype::bf16, nullptr, Peers());
}

// On the reduce stream, what copy engines and owners do in place of a reduce_scatter in bf16. bytes: of all parts.
void exchange_and_sum(Device& dev, int ranks, int64_t bytes, bool fetch) {
  World world;
  world.size = world.local_size = ranks;
  Channel channel(dev, dev.reduce(), world, Transport::nccl, "exchange", bytes, Links::planned,
                  CopyEngines::all_to_all);
  const bf16* parts = nullptr;
  const int64_t count = bytes / ranks / 2;
  if (fetch)
    channel.all_to_all(
        nullptr, count, Dtype::bf16, Peers(), [] {}, nullptr, count, [](int64_t, int64_t) {});
  else channel.all_to_all(nullptr, nullptr, count, Dtype::bf16);
  ops::sum_parts(dev.reduce(), static_cast<float*>(nullptr), parts, 0, parts, count, ranks, /*accumulate=*/false);
}

std::vector<json> lines(const std::string& path) {
  std::ifstream in(path);
  INFO(path << ": tests run in the source's directory");
  REQUIRE(in.good());
  std::vector<json> all;
  for (std::string line; std::getline(in, line);) all.push_back(json::parse(line));
  return all;
}

}  // namespace

// ------------------------------------------------------------------------------------------------------------- clocks

TEST_CASE("a wait moves the clock up to the event's, and what compute waits is exposed", "[estimate]") {
  Dry dry(toy());
  Stream &compute = dry.dev.compute(), &gather = dry.dev.gather(), &reduce = dry.dev.reduce();
  Event gathered(dry.dev), reduced(dry.dev), never(dry.dev);
  compute.wait(never);
  CHECK(dry.estimate.clock(0) == 0);
  gather.spend(flops(3e12));
  gather.record(gathered);
  compute.spend(flops(1e12));
  CHECK(dry.estimate.clock(0) == Approx(1));
  compute.wait(gathered);  // at 3
  CHECK(dry.estimate.clock(0) == Approx(3));
  CHECK(dry.estimate.exposed(1) == Approx(2));
  compute.wait(gathered);
  CHECK(dry.estimate.exposed(1) == Approx(2));
  reduce.spend(flops(1e12));
  reduce.record(reduced);
  compute.wait(reduced);  // at 1: long over
  CHECK(dry.estimate.clock(0) == Approx(3));
  CHECK(dry.estimate.exposed(2) == 0);
  reduce.spend(flops(4e12));
  compute.wait(reduced);  // still the event of 1
  CHECK(dry.estimate.clock(0) == Approx(3));
  reduce.record(reduced);
  compute.wait(reduced);
  CHECK(dry.estimate.clock(0) == Approx(5));
  CHECK(dry.estimate.exposed(2) == Approx(2));
  Event computed(dry.dev);
  compute.record(computed);
  gather.wait(computed);  // is not exposed: compute does not wait
  CHECK(dry.estimate.clock(1) == Approx(5));
  CHECK(dry.estimate.exposed(1) + dry.estimate.exposed(2) == Approx(4));
  CHECK(dry.estimate.busy(Work::matmul) == Approx(1));  // of the compute stream alone
  CHECK(dry.estimate.step() == Approx(5));
}

TEST_CASE("a limit is what the datasheet alone allows, of the compute stream", "[estimate]") {
  Chip chip = toy();
  chip.bf16 = 4e12;
  Dry dry(chip);
  Stream& compute = dry.dev.compute();
  Cost product = flops(2e12);
  product.share = 0.5, product.launches = 3;
  compute.spend(product);                         // 0.5 s of FLOPs at the peak
  dry.dev.gather().spend(product);                // beside it
  compute.spend({Work::memory, chip.bandwidth});  // 1 s
  compute.spend({Work::optimizer, 2 * chip.bandwidth});
  Cost attention = {Work::attention, 3 * chip.bandwidth};
  attention.flops = 1e11, attention.dtype = Dtype::f32;
  compute.spend(attention);  // its bytes take longer than its FLOPs
  const Estimate& e = dry.estimate;
  CHECK(e.limit(Work::matmul) == Approx(0.5));
  CHECK(e.limit(Work::memory) == Approx(1));
  CHECK(e.limit(Work::optimizer) == Approx(2));
  CHECK(e.limit(Work::attention) == Approx(3));
  for (Work w : {Work::matmul, Work::attention, Work::memory, Work::optimizer}) CHECK(e.limit(w) < e.busy(w));
  // What is skipped counts, and a step begins at nothing.
  dry.estimate.begin_repeat();
  compute.spend(product);
  dry.estimate.skip(4);
  CHECK(e.limit(Work::matmul) == Approx(0.5 + 5 * 0.5));
  dry.estimate.next_step();
  CHECK(e.limit(Work::matmul) == 0);
  // TF32 reaches half of bf16's peak; what is not a product goes by its own.
  Estimate tf32(chip, false, true);
  tf32.operation(0, product);
  CHECK(tf32.limit(Work::matmul) == Approx(1));
}

TEST_CASE("a collective slows compute and other collectives while it runs, and nothing else", "[estimate]") {
  Dry dry(toy());
  Estimate& e = dry.estimate;
  const double talk = e.seconds(Collective::all_gather, 4e9 / 3, 4, 4);  // 1 GB sent
  CHECK(talk == Approx(1).epsilon(1e-4));
  dry.dev.gather().spend(Collective::all_gather, 4e9 / 3, 4, 4);
  dry.dev.reduce().spend(Collective::reduce_scatter, 4e9 / 3, 4, 4);  // the same links
  CHECK(e.clock(1) == Approx(talk));
  CHECK(e.clock(2) == Approx(2 * talk));
  dry.dev.compute().spend(flops(0.1e12));  // all of it beside a collective
  const double takes = 1 - 0.1 / e.clock(0);
  CHECK(takes > 0.5);
  CHECK(takes < 1);
  CHECK(e.slowed() == Approx(e.clock(0) - 0.1));
  dry.dev.compute().spend(flops(9.9e12));  // runs on for long after them
  CHECK(e.clock(0) == Approx(10 + 2 * talk * takes));
  CHECK(e.busy(Work::matmul) == Approx(10));
  const double end = e.clock(0);
  dry.dev.compute().spend(flops(1e12));
  CHECK(e.clock(0) == Approx(end + 1));
  CHECK(e.exposed(1) + e.exposed(2) == 0);
}

TEST_CASE("an exchange by copy engines takes the link's time and a sum's, and its sum holds products up",
          "[estimate]") {
  const Chip& chip = *chip_named("h200");
  const int64_t bytes = int64_t(400) << 20;
  for (auto [ranks, fetch] : {std::pair(2, false), {4, false}, {8, false}, {2, true}, {8, true}}) {
    Dry ring(chip), engines(chip);
    ring.dev.gather().spend(Collective::reduce_scatter, double(bytes), ranks, ranks);
    exchange_and_sum(engines.dev, ranks, bytes, fetch);
    const double part = double(bytes) / ranks, exchanged = engines.estimate.talking(Collective::all_to_all);
    CHECK(exchanged < ring.estimate.talking(Collective::reduce_scatter));
    CHECK(exchanged ==
          Approx(engines.estimate.seconds(Collective::all_to_all, double(bytes), ranks, ranks, Via::copy_engines)));
    // The own part is copied, unless it is summed where it lies; all parts are read, and a shard is written in fp32.
    const double summed = engines.estimate.clock(2) - exchanged, copied = fetch ? 0 : 2 * part;
    CHECK(summed == Approx((copied + double(bytes) + 2 * part) / (chip.bandwidth * 0.75)).epsilon(0.1));
    // Beside products.
    for (Dry* d : {&ring, &engines}) d->dev.compute().spend(flops(1e15));
    CHECK(engines.estimate.slowed() < ring.estimate.slowed());
    CHECK(engines.estimate.slowed() > summed);  // the sum is a kernel
  }
}

TEST_CASE("copy engines gather faster and leave the multiprocessors alone; between nodes rings hold a few",
          "[estimate]") {
  struct Case {
    int local;
    Via via;
    double seconds = 0, slowed = 0;
  } ring{2, Via::kernels}, engine{2, Via::copy_engines}, far{1, Via::kernels};
  for (Case* c : {&ring, &engine, &far}) {
    Chip chip = toy();
    chip.link *= c->local == 1 ? 100 : 1;  // then the network is what takes the time
    Dry dry(chip);
    dry.dev.gather().spend(Collective::all_gather, 2e9, 2, c->local, c->via);
    dry.dev.compute().spend(flops(100e12));
    c->seconds = dry.estimate.clock(1), c->slowed = dry.estimate.slowed();
  }
  CHECK(engine.seconds < ring.seconds);
  CHECK(engine.slowed < 0.25 * ring.slowed);
  CHECK(engine.slowed > 0);
  CHECK(far.slowed > 0);
  CHECK(far.slowed / far.seconds < 0.5 * ring.slowed / ring.seconds);
}

TEST_CASE("a step takes as long as the host needs to issue it", "[estimate]") {
  Dry dry(toy());
  Event event(dry.dev);
  for (int i = 0; i < 1000; i++) dry.dev.compute().record(event);
  CHECK(dry.estimate.clock(0) == 0);
  CHECK(dry.estimate.host() >= 1e-3);
  CHECK(dry.estimate.step() == dry.estimate.host());
  dry.dev.compute().spend(flops(1e12));
  CHECK(dry.estimate.step() == Approx(1));
}

// ----------------------------------------------------------------------------------------------------------- formulas

TEST_CASE("an operation takes the longer of its FLOPs and its bytes", "[estimate]") {
  const Estimate e(toy());
  Cost c = moves<float>(250000000, 0);  // 1 GB
  CHECK(e.seconds(c) == Approx(1e-3));
  c.flops = 0.5e9;
  CHECK(e.seconds(c) == Approx(1e-3));
  c.flops = 4e9;
  CHECK(e.seconds(c) == Approx(4e-3));
  c.share = 0.5;
  CHECK(e.seconds(c) == Approx(8e-3));
  c.dtype = Dtype::f32;  // a tenth as fast
  CHECK(e.seconds(c) == Approx(80e-3));
  c.tasks = 11;  // of 10 at a time: two rounds for what could be 1.1
  CHECK(e.seconds(c) == Approx(80e-3 * 20 / 11));
  c.launches = 1000;
  CHECK(e.seconds(c) >= 80e-3 * 20 / 11 + 1e-3);
}

TEST_CASE("a collective's time: bytes over the slowest link, hops, nodes", "[estimate]") {
  Chip chip = toy();
  chip.link *= 100, chip.network *= 10;
  const Estimate e(chip);
  const auto gather = [&](double bytes, int ranks, int local) {
    return e.seconds(Collective::all_gather, bytes, ranks, local);
  };
  CHECK(gather(800e9, 8, 8) == Approx(7).epsilon(1e-3));           // 700 GB at 100 GB/s
  CHECK(gather(800e9, 16, 8) == Approx(750 / 80.).epsilon(1e-3));  // 8 network cards of 10
  CHECK(gather(800e9, 16, 1) == Approx(75).epsilon(1e-3));         // a group with one rank a node
  CHECK(gather(800e9, 4, 8) == gather(800e9, 4, 4));
  CHECK(e.seconds(Collective::all_reduce, 800e9, 8, 8) == Approx(14).epsilon(1e-3));
  double last = 0;
  for (int ranks = 2; ranks <= 4096; ranks *= 2) {  // the more ranks, the more parts are another's, and the more hops
    CHECK(gather(1e9, ranks, 8) > last);
    last = gather(1e9, ranks, 8);
  }
  CHECK(gather(0, 4096, 8) > 5e-3);                              // a ring's latency
  CHECK(e.seconds(Collective::all_reduce, 16, 4096, 8) < 1e-3);  // two numbers go by a tree
  Dry dry(chip);
  dry.dev.gather().spend(Collective::all_gather, 1e9, 1, 1);
  CHECK(dry.estimate.clock(1) == 0);
}

// -------------------------------------------------------------------------------------------------------- whole steps

TEST_CASE("a better chip is no slower, and communication that cannot hide is the step", "[estimate]") {
  const ModelConfig m = preset_named("rope").model;
  const Chip h200 = *chip_named("h200");
  const double alone = step_ms(h200, m, 1, 1), four = step_ms(h200, m, 1, 4);
  CHECK(four > 0.9 * alone);  // the optimizer is shared
  for (double Chip::*figure : {&Chip::bf16, &Chip::bandwidth, &Chip::link}) {
    Chip better = h200;
    better.*figure *= 2;
    CHECK(step_ms(better, m, 1, 4) < four);
  }
  Chip poor = h200;
  poor.link /= 100;
  Dry dry(poor);
  World world;
  world.size = 4;
  step<bf16, bf16>(dry.dev, m, 1, world);
  const Estimate& e = dry.estimate;
  const double talking = e.talking(Collective::all_gather) + e.talking(Collective::reduce_scatter);
  CHECK(e.step() >= talking);  // all on one wire
  CHECK(e.step() <= talking + 0.2 * 1e-3 * alone);
  CHECK(e.step() == Approx(e.busy(Work::matmul) + e.busy(Work::attention) + e.busy(Work::memory) +
                           e.busy(Work::optimizer) + e.slowed() + e.exposed(1) + e.exposed(2)));
  // Over thousands of ranks latency and the network show.
  CHECK(step_ms(h200, m, 1, 4096) > 1.05 * step_ms(h200, m, 1, 512));
}

TEST_CASE("the first gathers of a step hide behind the optimizer of the one before", "[estimate]") {
  ModelConfig m = preset_named("rope").model;
  World world;
  world.size = 4;
  for (int64_t replicated : {0, 65536}) {  // with what is whole everywhere, and wanted first
    m.replicate_below = replicated;
    Dry one(*chip_named("h200")), two(*chip_named("h200"));
    step<bf16, bf16>(one.dev, m, 8, world);
    step<bf16, bf16>(two.dev, m, 8, world, false, 2);
    CHECK(one.estimate.exposed(1) > 5e-4);
    CHECK(two.estimate.exposed(1) == 0);
    CHECK(two.estimate.step() < one.estimate.step() - 0.9 * one.estimate.exposed(1));
    for (Work w : {Work::matmul, Work::attention, Work::memory, Work::optimizer})
      CHECK(two.estimate.busy(w) == Approx(one.estimate.busy(w)));
    CHECK(two.estimate.talking(Collective::all_gather) == Approx(one.estimate.talking(Collective::all_gather)));
    CHECK(two.estimate.host() == Approx(one.estimate.host()));
  }
}

TEST_CASE("recomputation costs a forward pass's time", "[estimate]") {
  ModelConfig m = preset_named("rope").model;
  m.sparse = false;
  const Chip h200 = *chip_named("h200");
  const double none = step_ms(h200, m, 8, 1);
  m.recompute = Recompute::block;
  const double block = step_ms(h200, m, 8, 1);
  CHECK(block > 1.15 * none);
  CHECK(block < 1.34 * none);
}

// In a block of `rope`, in tensors of M x C: the MLP's residual is three more; x2 and its norm take five in place of
// four; the two norms' backwards six in place of four each. GELU is a kernel of its own at this width anyway.
TEST_CASE("what is not fused costs a pass over memory", "[estimate]") {
  ModelConfig m = preset_named("rope").model;
  m.sparse = false;
  Dry fused(toy()), apart(toy());
  apart.dev.fuse = false;
  const int64_t batch = 2;
  step<bf16, bf16>(fused.dev, m, batch, World());
  step<bf16, bf16>(apart.dev, m, batch, World());
  const double tensors = double((3 + 1 + 2 + 2) * m.depth), launches = double((1 + 1 + 1 + 1) * m.depth);
  const double pass = double(batch * m.seq * m.dim) * 2 / 1e12, launch = 3.8e-6;
  CHECK(apart.estimate.busy(Work::memory) - fused.estimate.busy(Work::memory) ==
        Approx(tensors * pass + launches * launch));
  CHECK(apart.estimate.busy(Work::matmul) <= fused.estimate.busy(Work::matmul));
  CHECK(apart.dev.mem.arena_bytes() == fused.dev.mem.arena_bytes());
}

// Whether a fused GELU pays is found by timing it.
TEST_CASE("without tuning GELU is a kernel of its own", "[estimate]") {
  const ModelConfig m = preset_named("m7c").model;
  Dry tuned(toy()), first(toy());
  first.dev.tune_matmuls = false;
  step<bf16, bf16>(tuned.dev, m, 1, World());
  step<bf16, bf16>(first.dev, m, 1, World());
  const double gelus = double(m.depth), pass = double(m.seq * m.hidden) * 2 / 1e12, launch = 3.8e-6;
  CHECK(first.estimate.busy(Work::memory) - tuned.estimate.busy(Work::memory) == Approx(gelus * (2 * pass + launch)));
}

TEST_CASE("an estimate changes nothing in the plan of memory", "[estimate]") {
  const ModelConfig m = preset_named("m7c").model;
  World world;
  world.size = 8;
  Dry with(*chip_named("h200"));
  Device without(Backend::gpu, Device::plan_only);
  step<bf16, float>(with.dev, m, 2, world);
  step<bf16, float>(without, m, 2, world);
  CHECK(with.estimate.step() > 0);
  CHECK(with.dev.mem.arena_bytes() == without.mem.arena_bytes());
  CHECK(with.dev.mem.report().live_peak == without.mem.report().live_peak);
}

// --------------------------------------------------------------------------------------------------- against measured

// What a command trains, as one line: without what it is called and where it writes.
std::string trained_by(const Words& options, int ranks) {
  std::set<std::string> kept;
  for (size_t i = 0; i < options.size(); i++) {
    const std::string& o = options[i];
    if (o == "--trace" || o == "--log" || o == "--steps") i++;
    else if (o != "--allow-single-rank" && o != "--profile") kept.insert(o.rfind("--", 0) ? options[i - 1] + o : o);
  }
  std::string all = std::to_string(ranks);
  for (const std::string& k : kept) all += " " + k;
  return all;
}
// Of one rank's gathers over MPI, or of a CPU, nothing is estimated.
bool has_estimate(const json& row) {
  return row.value("who", "") == "fsdp.cu" && !row.contains("planned") &&
         row.value("result", json::object()).value("estimated_ms", json()).is_number();
}
std::string day_of(const json& row) { return row.at("date").get<std::string>().substr(0, 10); }
Words options_of(const json& row) {
  Words options = words_of(row.at("command"));
  options.erase(options.begin(), std::find(options.begin(), options.end(), "./train") + 1);
  return options;
}
// With rings where it ran with rings, though copy engines may be the default by now.
Words as_it_ran(const json& row) {
  Words options = options_of(row);
  const bool said = std::find(options.begin(), options.end(), "--reduce") != options.end();
  if (!said && row.at("config").value("reduce", "NCCL") == "NCCL") options.insert(options.end(), {"--reduce", "nccl"});
  return options;
}

// `build/test_unit "[measured]" -s` prints every row. Of rows that train the same the latest is what an estimate is of.
TEST_CASE("estimated steps and the measured ones of results/", "[estimate][measured]") {
  int rows = 0;
  std::vector<std::pair<std::string, json>> measured_rows;  // with their sweep
  std::map<std::string, std::string> latest;                // the day, by what was trained
  for (const Sweep& sweep : sweeps())
    for (int gpus : {1, 2, 4, 8})
      for (const json& j : read_json_lines(strf("results/%s-%dgpu.jsonl", sweep.name, gpus))) {
        if (!has_estimate(j)) continue;
        measured_rows.emplace_back(sweep.name, j);
        std::string& day = latest[trained_by(options_of(j), j.at("ranks"))];
        day = std::max(day, day_of(j));
      }
  for (const auto& [sweep, j] : measured_rows) {
    const Words options = options_of(j);
    if (day_of(j) < latest[trained_by(options, j.at("ranks"))]) continue;
    const double ms = 1e3 * planned(as_it_ran(j), j.at("ranks"), "h200").seconds,
                 measured = j.at("result").at("step_ms");
    const double error = ms / measured - 1;
    const std::string line =
        strf("%-12s %-34s %d GPUs: measured %8.2f ms, estimated %8.2f, %+5.1f %%", sweep.c_str(),
             j.at("row").get<std::string>().c_str(), j.at("ranks").get<int>(), measured, ms, 100 * error);
    INFO(line);
    // Steps of less than 30 ms are made of kernels that do not fill a chip, and issued as fast as a host can; of
    // less than 5 ms the host is all that is measured. What goes through host memory has no estimate.
    if (j.contains("environment") || measured < 5) continue;
    CHECK(std::abs(error) < (measured < 30 ? 0.2 : j.at("config").value("param_dtype", "") == "fp32" ? 0.15 : 0.1));
    rows++;
  }
  CHECK(rows > 20);
}

TEST_CASE("estimated collectives and the measured ones of results/", "[estimate][measured]") {
  for (const char* name : {"collectives-2gpu", "collectives-4gpu"})
    for (const json& j : lines(strf("results/%s.jsonl", name))) {
      const json& r = j.at("result");
      const int64_t mib = j.at("mib");
      const int ranks = j.at("ranks");
      const bool engines = j.at("by") == "copy engines", fetch = engines && ranks <= measured_peers;
      const Collective kind = j.at("collective") == "all_gather" ? Collective::all_gather : Collective::reduce_scatter;
      Dry dry(*chip_named("h200"));
      const bool sums = engines && kind == Collective::reduce_scatter;
      if (sums) exchange_and_sum(dry.dev, ranks, mib << 20, fetch);
      else if (fetch) fetch_parts(dry.dev, ranks, mib << 20);
      else dry.dev.gather().spend(kind, double(mib << 20), ranks, ranks, engines ? Via::copy_engines : Via::kernels);
      dry.dev.compute().spend(flops(1e15));
      const double ms = r.at("ms"), estimated = 1e3 * dry.estimate.clock(sums ? 2 : 1);
      // Beside products it takes so much longer, and they do for all that time.
      const double took = r.at("beside_product_ms").get<double>() *
                          (1 - r.at("product_ms").get<double>() / r.at("product_beside_ms").get<double>());
      const double takes = 1e3 * dry.estimate.slowed();
      const std::string line =
          strf("%s of %4d MiB, %d ranks%s: measured %.3f ms, estimated %.3f, %+5.1f %%; took %.3f ms, estimated %.3f",
               j.at("collective").get<std::string>().c_str(), int(mib), ranks, engines ? ", copy engines" : "", ms,
               estimated, 100 * (estimated / ms - 1), took, takes);
      INFO(line);
      if (mib < 64) continue;
      CHECK(std::abs(estimated / ms - 1) < 0.2);
      // A kernel that sums, or copies the own part of what is fetched, waits for SMs beside products.
      const bool by_engines_alone = engines && !sums && !fetch;
      if (mib > 64) CHECK(std::abs(takes - took) < (by_engines_alone ? 0.1 : sums ? 0.2 : 0.35) * ms);
    }
}

TEST_CASE("estimated attention and the measured one of results/", "[estimate][measured]") {
  for (const char* name : {"kernels-1gpu", "attention-1gpu"})
    for (const json& j : lines(strf("results/%s.jsonl", name))) {
      if (j.at("kernel") == "sm_80 (mma.sync)" || j.value("who", "") == "PyTorch") continue;
      const json& at = j.at("attention");
      const int64_t B = at.at("B"), T = at.at("T"), H = at.at("H"), HKV = at.at("HKV"), D = at.at("D");
      const int64_t DV = at.value("DV", D);
      Dry dry(*chip_named("h200"));
      double forward = 0;
      bf16* none = nullptr;
      if (j.at("kernel") == "nsa") {
        NsaShape a{};
        a.block = 32, a.stride = 16, a.select_block = 64, a.selected = 16, a.window = 512;
        a.B = B, a.T = T, a.H = H, a.HKV = HKV, a.D = D, a.DV = DV, a.ld = a.columns(), a.scale = 1;
        dry.dev.mem.begin("layer");
        NsaSaved<bf16> saved;
        nsa_forward<bf16>(dry.dev, none, &saved, none, {}, a, Purpose::activations);
        forward = dry.estimate.clock(0);
        nsa_backward<bf16, bf16>(dry.dev, none, {}, none, none, {}, std::move(saved), a);
        dry.dev.mem.end();
      } else {
        const int64_t q = H * D, kv = HKV * D;
        AttentionShape a{B, T, H, HKV, D, q, kv, H * DV, q, kv, 1};
        a.DV = DV, a.ld_v = a.ld_dv = HKV * DV;
        if (at.contains("window")) a.sees = Sees::window, a.window = at.at("window");
        if (at.contains("compressed")) {
          const json& c = at.at("compressed");
          a.sees = Sees::compressed, a.block = c.at("block"), a.stride = c.at("stride"), a.keys = c.at("keys");
        }
        Stream& s = dry.dev.compute();
        attention_forward<bf16>(s, none, nullptr, none, none, none, a);
        forward = dry.estimate.clock(0);
        attention_backward<bf16>(s, none, none, none, none, none, none, none, none, nullptr, nullptr, a);
      }
      const double f = j.at("result").at("forward_ms"), fb = j.at("result").at("forward_backward_ms");
      const double ef = 1e3 * forward / f - 1, efb = 1e3 * dry.estimate.clock(0) / fb - 1;
      const std::string line = strf(
          "%s B %d T %6d %d/%d heads D %3d: forward %8.3f ms, error %+5.1f %%; and backward "
          "%8.3f, %+5.1f %%",
          j.at("kernel").get<std::string>().c_str(), int(B), int(T), int(H), int(HKV), int(D), f, 100 * ef, fb,
          100 * efb);
      INFO(line);
      CHECK(std::abs(ef) < 0.25);
      CHECK(std::abs(efb) < 0.25);
    }
}
