// What ran when: spans of marks and of named work, CUPTI's records told apart, the planned step as a trace, its file;
// and how busy GPUs are, by a library of the test's own.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#include "lib/device/activity.h"
#include "lib/device/nvml.h"
#include "lib/program/json.h"
#include "lib/program/plan.h"
#include "lib/program/profile.h"
#include "lib/program/trace.h"
#include "test/catch.h"
#include "test/errors.h"
#include "test/scratch.h"

namespace {

using nlohmann::json;
namespace fs = std::filesystem;

int files_in(const std::string& dir) {
  return int(std::distance(fs::directory_iterator(dir), fs::directory_iterator()));
}

json parsed(const std::string& path) {
  std::ifstream in(path);
  REQUIRE(in.good());
  std::stringstream text;
  text << in.rdbuf();
  return json::parse(text.str());
}

// The spans of a file, by process and track.
std::map<std::pair<int, int>, std::vector<json>> tracks_of(const json& trace) {
  std::map<std::pair<int, int>, std::vector<json>> tracks;
  for (const json& e : trace.at("traceEvents"))
    if (e.at("ph") == "X") tracks[{e.at("pid"), e.at("tid")}].push_back(e);
  return tracks;
}

// How many spans of a track begin before the one before them has ended.
int overlaps(std::vector<json> spans) {
  std::sort(spans.begin(), spans.end(), [](const json& a, const json& b) { return a.at("ts") < b.at("ts"); });
  int n = 0;
  for (size_t i = 1; i < spans.size(); i++) {
    const double end = spans[i - 1].at("ts").get<double>() + spans[i - 1].at("dur").get<double>();
    n += spans[i].at("ts").get<double>() < end - 1e-6;
  }
  return n;
}

// Whether one of the spans that are called so holds all of the other.
bool within(const json& inner, const std::vector<json>& spans, const std::string& name) {
  const double from = inner.at("ts"), to = from + inner.at("dur").get<double>();
  return std::any_of(spans.begin(), spans.end(), [&](const json& s) {
    const double begin = s.at("ts"), end = begin + s.at("dur").get<double>();
    return s.at("name") == name && begin < from + 1e-6 && to - 1e-6 < end;
  });
}

Run planned(std::vector<const char*> args, int ranks) {
  args.insert(args.begin(), {"train", "--plan"});
  Options o;
  std::string help;
  REQUIRE(parse_options(int(args.size()), args.data(), &o, &help));
  return resolve(o, ranks, 0);
}

Span span(Span::Lane lane, Span::Kind kind, const char* name, double from, double to) {
  Span s;
  s.lane = lane, s.kind = kind, s.name = name, s.from = from, s.to = to;
  return s;
}

}  // namespace

// ----------------------------------------------------------------------------------------------------- a planned step

TEST_CASE("the trace of a planned step has its gathers, reductions and memory", "[trace]") {
  const ScratchDirectory dir;
  struct Case {
    int ranks;
    std::vector<const char*> options;
  };
  const std::vector<Case> cases = {
      {2, {"--preset", "simple"}},
      {2, {"--preset", "tiny", "--param-dtype", "fp32", "--seq", "70"}},  // buffers of odd sizes
      {4, {"--preset", "m7c", "--recompute", "block", "--grad-accum", "2"}},
      {2, {"--preset", "m7c", "--graph", "1", "--wrap", "sublayer"}},
      {4, {"--preset", "rope", "--shard", "hybrid:2", "--gather", "nccl", "--val-every", "10"}},
      {16, {"--preset", "llama-8b", "--limit-all-gathers", "4", "--freeze", "block.0"}},
  };
  for (const Case& c : cases) {
    INFO(c.ranks << " ranks, " << c.options[1]);
    Run r = planned(c.options, c.ranks);
    World world;
    world.size = c.ranks, world.local_size = std::min(c.ranks, gpus_per_node);
    choose_collectives(&r, c.ranks, Transport::nccl, on_one_host(world, r.fsdp.shards(c.ranks)), /*engines_pay=*/true);
    const Trace trace = planned_trace(r, c.ranks, *chip_named("h200"));
    write_trace(dir / "a.json", trace, {{"ranks", c.ranks}});
    const json file = parsed(dir / "a.json");
    CHECK(file.at("otherData").at("source") == "plan");
    CHECK(file.at("otherData").at("ranks") == c.ranks);
    const double step_ms = file.at("otherData").at("step_ms");
    CHECK(step_ms == Approx(1e3 * price(r, c.ranks, *chip_named("h200")).seconds));

    auto tracks = tracks_of(file);
    for (const auto& [track, spans] : tracks) {
      INFO("process " << track.first << ", track " << track.second);
      CHECK((track.first == 1 || track.first == 5));
      CHECK((track.second <= 3 || track.first == 5));
      CHECK(overlaps(spans) == 0);
      for (const json& s : spans) CHECK(s.at("ts") >= 0);
    }
    // What --show-schedule tells, in order: unit by unit.
    Device dev(Backend::gpu, Device::plan_only);
    using Names = std::vector<std::pair<std::string, std::string>>;
    Names gathers, reductions, in_gathers, in_reductions;
    std::vector<Unit> units = parameter_table(r.model);
    for (const Issued& e : plan(dev, world, Transport::nccl, r)) {
      if (e.bytes == 0 || e.ranks == 1) continue;
      (e.of_gather() ? gathers : reductions)
          .emplace_back(name_of(e), e.unit < 0 ? "norm and loss" : units[size_t(e.unit)].name);
    }
    auto collectives = [&](int track) {
      Names names;
      for (const json& s : tracks[{1, track}])
        if (s.at("args").at("kind") == "collective") names.emplace_back(s.at("name"), s.at("args").at("unit"));
      return names;
    };
    CHECK(gathers.size() > 0);
    CHECK(collectives(2) == gathers);
    CHECK(collectives(3) == reductions);

    double most = 0;
    for (const json& e : file.at("traceEvents")) {
      if (e.at("ph") != "C") continue;
      double sum = 0;
      for (const double mib : e.at("args")) {
        sum += mib;
        CHECK(mib >= 0);
      }
      most = std::max(most, sum);
    }
    CHECK(most == file.at("otherData").at("live_peak_mib"));
    Device step(Backend::gpu, Device::plan_only);
    step.compute_capability = chip_named("h200")->compute_capability;
    Run alone = r;
    alone.o.val_every = 0;
    plan(step, world, Transport::nccl, alone);
    CHECK(most == double(step.mem.report().live_peak) / (1 << 20));
  }
}

TEST_CASE("in the trace of a planned step slots hold what is gathered and reduced", "[trace]") {
  const ScratchDirectory dir;
  struct Case {
    std::vector<const char*> options;
    size_t gather_slots, gradient_slots;
  };
  const std::vector<Case> cases = {
      {{"--preset", "simple"}, 2, 2},
      {{"--preset", "rope", "--limit-all-gathers", "3", "--gradient-slots", "1"}, 3, 1},
      {{"--preset", "m7c", "--recompute", "block", "--grad-accum", "2", "--accum-sync", "last"}, 2, 2},
      {{"--preset", "simple", "--depth", "3", "--shard", "grad"}, 5, 2},  // a slot a unit: embedding, blocks, head
      {{"--preset", "simple", "--optimizer-in-backward", "1", "--clip", "0"}, 2, 2},
  };
  for (const Case& c : cases) {
    CAPTURE(c.options);
    const Run r = planned(c.options, 4);
    write_trace(dir / "a.json", planned_trace(r, 4, *chip_named("h200")), {{"ranks", 4}});
    auto tracks = tracks_of(parsed(dir / "a.json"));
    std::vector<json> weights, gradients;
    size_t gather_slots = 0, gradient_slots = 0;
    for (const auto& [track, spans] : tracks) {
      if (track.first != 5) continue;
      const std::string slot = spans[0].at("args").at("mark");
      const bool of_gradients = slot.find("gradient slot") == 0;
      (of_gradients ? gradient_slots : gather_slots)++;
      for (size_t i = 0; i < spans.size(); i++) {
        INFO(slot << ": " << spans[i].at("name"));
        CHECK(spans[i].at("cat") == "slot");
        CHECK(spans[i].at("args").at("mark") == slot);
        (of_gradients ? gradients : weights).push_back(spans[i]);
        const std::string name = spans[i].at("name"), unit = name.substr(0, name.find(','));
        if (unit == name) continue;  // what stays resident was in use, and directly before
        REQUIRE(i > 0);
        CHECK(spans[i - 1].at("name") == unit);
        CHECK(spans[i].at("ts").get<double>() ==
              Approx(spans[i - 1].at("ts").get<double>() + spans[i - 1].at("dur").get<double>()));
      }
    }
    CHECK(gather_slots == c.gather_slots);
    CHECK(gradient_slots == c.gradient_slots);
    size_t gathers = 0, reductions = 0;
    for (const json& s : tracks[{1, 2}]) {
      if (s.at("args").at("kind") != "collective") continue;
      gathers++;
      CHECK(within(s, weights, s.at("args").at("unit")));
    }
    for (const json& s : tracks[{1, 3}]) {
      if (s.at("args").at("kind") != "collective" || s.at("args").at("unit") == "norm and loss") continue;
      reductions++;
      CHECK(within(s, gradients, s.at("args").at("unit")));
    }
    CHECK(gathers >= size_t(r.model.depth));
    CHECK(reductions >= size_t(r.model.depth));
  }
}

// ---------------------------------------------------------------------------------------------------- marks and units

TEST_CASE("marks and named work are spans of their streams", "[trace]") {
  Device dev(Backend::cpu, 0);
  dev.mode = Mode::run;
  Event gathered(dev);
  dev.start_profile();
  dev.mark("first");
  dev.compute().sleep(2);
  {
    const NamedWork named(dev, dev.gather(), Span::gather, "all_gather", "block.7", 1000);
    dev.gather().sleep(20);
  }
  dev.gather().record(gathered);
  {
    const MarkedWait marked(dev);
    dev.compute().wait(gathered);
  }
  dev.compute().sleep(2);
  dev.mark("");
  dev.compute().sleep(2);  // nobody's
  dev.mark("second");
  const Device::Profile p = dev.take_profile();
  std::map<std::string, double> ms;
  for (const Span& s : p.device) {
    ms[s.name] += 1e3 * (s.to - s.from);
    CHECK((s.kind == Span::wait) == (s.name == waiting));
  }
  CHECK(ms.count("") == 0);
  CHECK(ms["first"] >= 4);
  CHECK(ms["all_gather"] >= 20);
  const auto the = [&](auto is) {
    const auto at = std::find_if(p.device.begin(), p.device.end(), is);
    REQUIRE(at != p.device.end());
    return at;
  };
  const auto before = the([](const Span&s) { return s.name == "first"; }),
             wait = the([](const Span&s) { return s.kind == Span::wait; }),
             work = the([](const Span&s) { return s.lane == Span::gather; });
  // A thread may come late to its work, but not before its time.
  CHECK(wait->from == before->to);
  CHECK(wait->to >= work->to);
  CHECK(work->unit == "block.7");
  CHECK(work->bytes == 1000);
  for (const Span& s : p.host) CHECK(s.to >= s.from);
  CHECK(p.host.size() == p.device.size());
  // Without a profile there is nothing; and the next begins anew.
  dev.mark("third");
  { const NamedWork named(dev, dev.reduce(), Span::reduce, "reduce_scatter", "head", 8); }
  dev.start_profile();
  dev.mark("fourth");
  CHECK(dev.take_profile().device.size() == 1);
}

// ------------------------------------------------------------------------------------------------------------ records

TEST_CASE("names of kernels are short", "[trace]") {
  using activity::short_name;
  CHECK(short_name("_ZN7cutlass13device_kernelINS_4gemm6kernelEEEvNT_6ParamsE") == "cutlass::device_kernel");
  CHECK(short_name("void cast<float, __nv_bfloat16>(__nv_bfloat16*, float const*, long)") == "cast");
  CHECK(short_name("_ZN12_GLOBAL__N_14spinEl") == "spin");
  CHECK(short_name("void ops::(anonymous namespace)::norm<(anonymous namespace)::Row<8>, 2>(float*)") == "ops::norm");
  CHECK(short_name("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)") ==
        "ncclDevKernel_AllGather_RING_LL");
  CHECK(short_name("nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT") == "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT");
  CHECK(short_name("") == "");
  CHECK(activity::is_nccl_kernel("ncclDevKernel_AllGather_RING_LL"));
  CHECK(!activity::is_nccl_kernel("nvjet_hsh_128x256"));
}

TEST_CASE("a record finds its step, its stream and its unit", "[trace]") {
  using activity::Record;
  const StreamNumbers streams = {7, 13, 14};
  const uint64_t began = uint64_t(1) << 60;  // as a clock that counts since 1970 has them
  Device::Profile profile;
  profile.began_ns = began, profile.ended_ns = began + 1000;
  Span norms = span(Span::compute, Span::operation, "norms", 0, 400e-9);
  Span mlp = span(Span::compute, Span::operation, "MLP", 400e-9, 1000e-9);
  Span gather = span(Span::gather, Span::collective, "all_gather", 100e-9, 200e-9);
  gather.unit = "block.3";
  Span reduce = span(Span::reduce, Span::collective, "reduce_scatter", 500e-9, 600e-9);
  reduce.unit = "head";
  profile.host = {norms, mlp, gather, reduce};
  auto record = [&](Record::Kind kind, const char* name, uint32_t stream, int64_t issued, int64_t start) {
    Record r;
    r.kind = kind, r.name = name, r.stream = stream;
    r.issued_ns = issued == 0 ? 0 : uint64_t(int64_t(began) + issued);
    r.start_ns = uint64_t(int64_t(began) + start), r.end_ns = r.start_ns + 50;
    return r;
  };
  const char* const nccl = "ncclDevKernel_AllGather_RING_LL";
  Record peer = record(Record::copy, "copy, GPU to GPU", 99, 160, 5300);
  peer.peer = true, peer.bytes = 64;
  const std::vector<Record> records = {
      record(Record::kernel, "norm", 7, -50, 4900),     // of the step before
      record(Record::kernel, "unknown", 7, 0, 4950),    // not known whose, and before all that is this step's
      record(Record::kernel, "norm", 7, 50, 5000),      // "norms"
      record(Record::kernel, "cast", 13, 120, 5100),    // the gather's
      record(Record::kernel, nccl, 13, 150, 5200),      // on its stream
      peer,                                             // on one of NCCL's
      record(Record::kernel, "matmul", 7, 450, 5400),   // "MLP"
      record(Record::clear, "clear", 14, 550, 5500),    // the reduction's
      record(Record::kernel, "unknown", 7, 0, 5600),    // this step's: after its first
      record(Record::kernel, nccl, 7, 700, 5700),       // of a graph, all on one stream
      record(Record::kernel, "matmul", 50, 700, 5800),  // of a graph, on the driver's
      record(Record::kernel, "norm", 7, 1001, 6000),    // after the step
  };
  const std::vector<Span> spans = spans_of(records, profile, streams);
  struct Expected {
    const char *name, *mark, *unit;
    Span::Lane lane;
    Span::Kind kind;
  };
  const std::vector<Expected> expected = {
      {"norm", "norms", "", Span::compute, Span::kernel},
      {"cast", "", "block.3", Span::gather, Span::kernel},
      {nccl, "", "block.3", Span::gather, Span::nccl_kernel},
      {"copy, GPU to GPU", "", "block.3", Span::gather, Span::copy},
      {"matmul", "MLP", "", Span::compute, Span::kernel},
      {"clear", "", "head", Span::reduce, Span::clear},
      {"unknown", "", "", Span::compute, Span::kernel},
      {nccl, "", "", Span::gather, Span::nccl_kernel},
      {"matmul", "", "", Span::other, Span::kernel},
  };
  REQUIRE(spans.size() == expected.size());
  for (size_t i = 0; i < spans.size(); i++) {
    INFO(i << ": " << spans[i].name);
    CHECK(spans[i].name == expected[i].name);
    CHECK(spans[i].mark == expected[i].mark);
    CHECK(spans[i].unit == expected[i].unit);
    CHECK(spans[i].lane == expected[i].lane);
    CHECK(spans[i].kind == expected[i].kind);
    CHECK(spans[i].to - spans[i].from == Approx(50e-9));
  }
  CHECK(spans[0].from == Approx(5000e-9));
  CHECK(nccl_share(spans) == Approx(2.0 / 7));
  CHECK(nccl_share({}) < 0);
  const auto kernels = rows_of(spans, true), copies = rows_of(spans, false);
  REQUIRE(kernels.size() == 5);
  CHECK(kernels[0].count == 2);
  REQUIRE(copies.size() == 2);
  CHECK(copies[0].bytes == 64);
  // Ranks that share a GPU have one stream for both.
  const std::vector<Span> shared = spans_of({record(Record::copy, "copy", 13, 550, 5000)}, profile, {7, 13, 13});
  REQUIRE(shared.size() == 1);
  CHECK(shared[0].lane == Span::reduce);
}

// ------------------------------------------------------------------------------------------------- where a step goes

double sum_of(const std::vector<StepProfile::Share>& shares) {
  double ms = 0;
  for (const auto& s : shares) ms += s.ms;
  return ms;
}

TEST_CASE("kinds of work and waiting add up to the step, each beside its limit", "[trace]") {
  const std::vector<Span> ran = {
      span(Span::other, Span::kernel, "gpu::each_kernel", 1.009, 1.011),  // of a graph, beside the product's end
      span(Span::compute, Span::kernel, "nvjet_sm90_tst", 1.000, 1.010),
      span(Span::compute, Span::kernel, "attention::selected::sm90::backward_kernel", 1.012, 1.015),
      span(Span::compute, Span::kernel, "gpu::compress::rows_kernel", 1.015, 1.017),
      span(Span::compute, Span::clear, "clear", 1.017, 1.018),
      span(Span::gather, Span::kernel, "gpu::each_kernel", 0.900, 1.100),  // none of the compute stream's
      span(Span::other, Span::nccl_kernel, "ncclDevKernel", 0.900, 1.100),
      span(Span::compute, Span::kernel, "gpu::norm_forward_kernel", 1.020, 1.021)};
  const Limits limits = {0.008, 0.002, 0.001};
  const auto shares = shares_of(ran, limits);
  REQUIRE(shares.size() == 4);
  const double ms[] = {10, 3, 1 + 2 + 1 + 1, 1 + 2}, limit_ms[] = {8, 2, 1, 0};
  const char* const keys[] = {"products", "attention", "memory_bound", "waiting"};
  for (size_t i = 0; i < 4; i++) {
    CHECK(shares[i].key == std::string(keys[i]));
    CHECK(shares[i].ms == Approx(ms[i]));
    CHECK(shares[i].limit_ms == Approx(limit_ms[i]));
  }
  CHECK(sum_of(shares) == Approx(21));
  CHECK(shares_of(ran, std::nullopt)[0].limit_ms < 0);  // an unknown chip
  CHECK(shares_of({}, limits).empty());

  // The log has what a sweep's rows take over.
  const ScratchDirectory dir;
  {
    TelemetryOptions o;
    o.log = dir / "log.jsonl";
    Telemetry telemetry(o, json::object());
    StepProfile p;
    p.shares = shares;
    report_profile(p, &telemetry);
    p.shares = shares_of(ran, std::nullopt);
    report_profile(p, &telemetry);
  }
  std::ifstream log(dir / "log.jsonl");
  std::string line;
  std::getline(log, line), std::getline(log, line);
  const json all = json::parse(line).at("shares");
  CHECK(all.size() == 8);
  for (const auto& s : shares) {
    CHECK(all.at(s.key + std::string("_ms")) == s.ms);
    CHECK(all.at(s.key + std::string("_limit_ms")) == s.limit_ms);
  }
  std::getline(log, line);
  const json unknown = json::parse(line).at("shares");
  CHECK(unknown.contains("products_ms"));
  CHECK(!unknown.contains("products_limit_ms"));
}

// Steps that two H200 ran (results/), beside the limits of the same steps.
TEST_CASE("what GPUs ran takes longer than the limits, and all of the step", "[trace]") {
  struct Case {
    const char* file;
    std::vector<const char*> options;
  };
  const std::vector<Case> cases = {{"results/trace-rope-2gpu.json", {"--preset", "rope", "--attn", "dense"}},
                                   {"results/trace-m7c-2gpu.json", {"--preset", "m7c", "--attn", "nsa"}}};
  for (const Case& c : cases) {
    INFO(c.file);
    const json file = parsed(c.file);
    std::vector<Span> ran;
    double nvjet_ms = 0;
    for (const auto& [track, spans] : tracks_of(file)) {
      if (track.first != 1 || track.second % 1000 != 1) continue;  // the compute stream
      for (const json& s : spans) {
        const std::string name = s.at("name"), kind = s.at("args").at("kind");
        const double from = 1e-6 * s.at("ts").get<double>(), to = from + 1e-6 * s.at("dur").get<double>();
        ran.push_back(span(Span::compute, kind == "kernel" ? Span::kernel : Span::copy, name.c_str(), from, to));
        if (name.rfind("nvjet", 0) == 0) nvjet_ms += 1e3 * (to - from);
      }
    }
    const auto shares = shares_of(ran, price(planned(c.options, 2), 2, *chip_named("h200")).limits);
    REQUIRE(shares.size() == 4);
    CHECK(sum_of(shares) == Approx(file.at("otherData").at("step_ms").get<double>()));
    CHECK(shares[0].ms == Approx(nvjet_ms).epsilon(0.01));  // all that cuBLAS ran there
    for (size_t i = 0; i < 3; i++) {
      INFO(shares[i].name);
      CHECK(shares[i].limit_ms > 0);
      CHECK(shares[i].limit_ms < shares[i].ms);
    }
    CHECK(shares[3].ms > 0);
  }
}

// --------------------------------------------------------------------------------------------------------------- file

TEST_CASE("what would overlap on a track has another; NCCL's kernels and copies stand apart too", "[trace]") {
  const ScratchDirectory dir;
  Trace t;
  t.source = "cupti", t.begin = 1, t.end = 2;
  t.device = {span(Span::gather, Span::nccl_kernel, "ncclDevKernel", 1.5, 1.8),
              span(Span::reduce, Span::nccl_kernel, "ncclDevKernel", 1.6, 1.7),
              span(Span::gather, Span::copy, "copy, GPU to GPU", 1.8, 1.9),
              span(Span::compute, Span::kernel, "a", 1.0, 1.2),
              span(Span::compute, Span::kernel, "b \xff\"", 1.1, 1.3),
              span(Span::compute, Span::kernel, "c", 1.2, 1.4),
              span(Span::compute, Span::kernel, "never", 1.5, 1.5),
              span(Span::other, Span::kernel, "d", 1.2, 1.4)};
  t.device.back().stream = 21;
  t.host = {span(Span::compute, Span::operation, "outer", 0.5, 0.9),
            span(Span::gather, Span::collective, "inner", 0.6, 0.7)};
  write_trace(dir / "t.json", t, json::object());
  const json file = parsed(dir / "t.json");
  auto tracks = tracks_of(file);
  auto names = [&](int pid, int tid) {
    std::string all;
    for (const json& s : tracks[{pid, tid}]) all += s.at("name").get<std::string>() + ";";
    return all;
  };
  CHECK(names(1, 1) == "a;c;");
  CHECK(names(1, 1001) == "b \xef\xbf\xbd\";");
  CHECK(names(1, 2) == "ncclDevKernel;copy, GPU to GPU;");
  CHECK(names(1, 3) == "ncclDevKernel;");
  CHECK(names(1, 121) == "d;");
  CHECK(names(2, 1) == "ncclDevKernel;");
  CHECK(names(2, 1001) == "ncclDevKernel;");
  CHECK(names(2, 2) == "copy, GPU to GPU;");
  CHECK(names(3, 1) == "outer;inner;");
  CHECK(tracks[{3, 1}][0].at("ts") == 0);
  CHECK(file.at("otherData").at("begin_us") == 0.5e6);
  std::map<std::pair<int, int>, std::string> named;
  for (const json& e : file.at("traceEvents"))
    if (e.at("name") == "thread_name") named[{e.at("pid"), e.at("tid")}] = e.at("args").at("name");
  for (const auto& [track, spans] : tracks)
    if (!spans.empty()) CHECK(named.count(track) == 1);
  CHECK(named[{1, 1001}] == "compute 2");
  CHECK(named[{1, 121}] == "stream 21");
}

TEST_CASE("a trace replaces a trace alone", "[trace]") {
  const ScratchDirectory dir;
  auto check = [](const std::string& path) { return error_of([&] { check_trace(path); }); };
  const std::string path = dir / "t.json";
  CHECK(check(path) == "");
  CHECK(files_in(dir.path) == 0);
  std::ofstream(path).close();
  CHECK(check(path) == "");
  write_trace(path, Trace(), {{"command", "traceEvents\":["}});
  CHECK(check(path) == "");
  write_trace(path, Trace(), json::object());
  CHECK(check(path) == "");
  for (const char* text :
       {"text", "{}", "{\"traceEvents\":[]}", "{\"otherData\":{\"format\":\"x\"},\"traceEvents\":[\n]}",
        "{\"otherData\":3,\"traceEvents\":[\n]}", "\n"}) {
    INFO(text);
    std::ofstream(path) << text;
    CHECK(check(path) ==
          "--trace " + path + ": not a trace of a step, so it is not overwritten; remove it or choose another file");
  }
  CHECK(check(dir.path).find("not a regular file") != std::string::npos);
  CHECK(check("/nonexistent/t.json").find("--trace") == 0);
  CHECK(check("/nonexistent/t.json").find("No such file") != std::string::npos);
  CHECK(files_in(dir.path) == 1);
}

// --------------------------------------------------------------------------------------------------------------- NVML

namespace {
// Three GPUs, of which the second tells no power; GPU i runs at 1000 i MHz and is i * 10 % busy.
struct FakeNvml {
  static inline int opened = 0, closed = 0;
  static inline bool refuses = false;
  static unsigned number(Nvml::Gpu gpu) { return unsigned(reinterpret_cast<uintptr_t>(gpu)); }
  static const char* uuid(unsigned i) {
    static const char* const all[] = {"", "GPU-11111111-aaaa", "GPU-22222222-bbbb", "GPU-33333333-cccc"};
    return all[i];
  }
  static Nvml table() {
    Nvml n = {};
    n.init = [] { return refuses ? 9 : (opened++, 0); };
    n.shutdown = [] { return closed++, 0; };
    n.count = [](unsigned* gpus) { return *gpus = 3, 0; };
    n.by_index = [](unsigned i, Nvml::Gpu* gpu) {
      *gpu = reinterpret_cast<Nvml::Gpu>(uintptr_t(i + 1));
      return i < 3 ? 0 : 2;
    };
    n.by_uuid = [](const char* name, Nvml::Gpu* gpu) {
      for (unsigned i = 1; i <= 3; i++)
        if (std::string(name) == uuid(i)) return *gpu = reinterpret_cast<Nvml::Gpu>(uintptr_t(i)), 0;
      return 6;
    };
    n.uuid_of = [](Nvml::Gpu gpu, char* to, unsigned bytes) {
      std::snprintf(to, bytes, "%s", uuid(number(gpu)));
      return 0;
    };
    n.utilization = [](Nvml::Gpu gpu, Nvml::Utilization* u) { return u->gpu = 10 * number(gpu), 0; };
    n.clock = [](Nvml::Gpu gpu, Nvml::Clock which, unsigned* mhz) {
      *mhz = 1000 * number(gpu);
      return which == Nvml::sm_clock ? 0 : 1;
    };
    n.power = [](Nvml::Gpu gpu, unsigned* mw) { return *mw = 500000, number(gpu) == 2 ? 3 : 0; };
    n.processes = [](Nvml::Gpu gpu, unsigned* count, Nvml::Process* p) {
      if (number(gpu) == 2) return 3;
      p[0] = {1, 3ull << 30, 0, 0}, p[1] = {unsigned(getppid()), 5ull << 30, 0, 0};
      p[2] = {unsigned(getpid()), 7ull << 30, 0, 0}, p[3] = {1, ~0ull, 0, 0};
      return *count = 4, 0;
    };
    return n;
  }
};

std::optional<GpuSummary> sampled(const Nvml& nvml, const std::vector<std::string>& gpus) {
  const double from = unix_seconds();
  GpuSampler sampler(&nvml, gpus);
  for (int i = 0; i < 200 && !sampler.summary(from, unix_seconds()); i++)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(!sampler.summary(from - 2, from - 1));
  CHECK(!sampler.summary(unix_seconds() + 100, unix_seconds() + 200));
  // Of the first look all GPUs, and a second one.
  std::this_thread::sleep_for(std::chrono::milliseconds(450));
  std::optional<GpuSummary> seen = sampler.summary(from, unix_seconds());
  for (int i = 0; i < 200 && seen && seen->samples < 2; i++) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    seen = sampler.summary(from, unix_seconds());
  }
  return seen;
}
}  // namespace

TEST_CASE("the GPUs that are watched are those of CUDA_VISIBLE_DEVICES", "[nvml]") {
  using Names = std::vector<std::string>;
  CHECK(visible_gpus(nullptr, 2) == Names{"0", "1"});
  CHECK(visible_gpus("", 2).empty());
  CHECK(visible_gpus("3,1,0", 2) == Names{"3", "1"});
  CHECK(visible_gpus("2, GPU-22", 8) == Names{"2", "GPU-22"});
  CHECK(visible_gpus("1,-1,0", 8) == Names{"1"});
  CHECK(visible_gpus("MIG-11,x,0", 8) == Names{"MIG-11"});
  CHECK(visible_gpus(",0", 8).empty());
  CHECK(nvml_uuid("8932f937d72c4106c12f20bd9faed9f6") == "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6");
}

TEST_CASE("a summary of what GPUs told", "[nvml]") {
  const Nvml nvml = FakeNvml::table();
  const auto one = sampled(nvml, {"2"});
  REQUIRE(one.has_value());
  CHECK(one->utilization == Approx(0.3));
  CHECK(one->clock_mhz == 3000);
  CHECK(one->power_w == 500);
  CHECK(one->gpus == 1);
  CHECK(one->samples >= 2);
  const auto two = sampled(nvml, {"0", "GPU-2222"});  // the beginning of a UUID
  REQUIRE(two.has_value());
  CHECK(two->gpus == 2);
  CHECK(two->power_w == 500);  // of the one that tells it
  CHECK(two->utilization > 0.1);
  CHECK(two->utilization < 0.2);
  const auto silent = sampled(nvml, {"GPU-22222222-bbbb"});
  REQUIRE(silent.has_value());
  CHECK(std::isnan(silent->power_w));
  CHECK(silent->clock_mhz == 2000);
  CHECK(FakeNvml::opened == 3);
  CHECK(FakeNvml::closed == 3);
}

TEST_CASE("who holds a GPU's memory is told, the largest first, but not ourselves", "[nvml]") {
  FakeNvml::opened = FakeNvml::closed = 0, FakeNvml::refuses = false;
  Nvml nvml = FakeNvml::table();
  const std::vector<std::string> users = memory_users(&nvml, "0");
  REQUIRE(users.size() == 2);
  std::string parent;
  std::getline(std::ifstream("/proc/" + std::to_string(getppid()) + "/comm"), parent);
  CHECK(users[0] == parent + " (pid " + std::to_string(getppid()) + ") 5120 MiB");
  CHECK(users[1].find("(pid 1) 3072 MiB") != std::string::npos);
  CHECK(memory_users(&nvml, "1").empty());  // the driver does not tell
  CHECK(FakeNvml::opened == FakeNvml::closed);
  nvml.processes = nullptr;
  CHECK(memory_users(&nvml, "0").empty());
  CHECK(memory_users(nullptr, "0").empty());
}

TEST_CASE("GPUs are told apart by their UUIDs", "[nvml]") {
  FakeNvml::opened = FakeNvml::closed = 0;
  const Nvml nvml = FakeNvml::table();
  using Uuids = std::vector<std::string>;
  CHECK(uuids_of(&nvml, {"2", "GPU-1111", "7"}) == Uuids{"GPU-33333333-cccc", "GPU-11111111-aaaa"});
  CHECK(uuids_of(nullptr, {"0"}).empty());
  CHECK(FakeNvml::opened == FakeNvml::closed);
}

TEST_CASE("without NVML, or a GPU of that name, there is no summary", "[nvml]") {
  const Nvml nvml = FakeNvml::table();
  CHECK(!GpuSampler(nullptr, {"0"}).summary(0, 1e12));
  CHECK(!GpuSampler(&nvml, {"7"}).summary(0, 1e12));
  CHECK(!GpuSampler(&nvml, {"GPU-4"}).summary(0, 1e12));
  CHECK(!GpuSampler(&nvml, {}).summary(0, 1e12));
  FakeNvml::refuses = true;
  CHECK(!GpuSampler(&nvml, {"0"}).summary(0, 1e12));
  FakeNvml::refuses = false;
}
