// What stands behind the end of a run that goes wrong: the flight record, what is said of a fault, and steps whose
// gradient is not finite. How whole runs end is in test/faults.sh.
#include "test/catch.h"
#include "test/scratch.h"
#include "test/training.h"

#include <array>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "fsdp.h"
#include "lib/comm/flight.h"
#include "lib/comm/watchdog.h"
#include "lib/program/bad_steps.h"
#include "lib/program/json.h"
#include "lib/program/plan.h"
#include "lib/program/replay.h"

using nlohmann::json;

namespace {

flight::Sight own() { return flight::see(flight::own()); }

// Three units of one matrix each, of which every rank makes a gradient of ones; a step of the three verbs that it
// takes.
struct Rig {
  const World world = test_world();
  const Transport transport = world.size > 1 ? Transport::mpi : Transport::none;
  Device dev{Backend::cpu, 0, world.size};
  HostBuffer<ops::AdamW> adamw{dev, 1};
  FsdpOptions options;
  std::vector<Unit> units;
  std::unique_ptr<Fsdp<float, float>> fsdp;
  double halt = 0;  // this rank's

  explicit Rig(ops::GradNorm norm) {
    options.norm = norm;
    for (uint32_t i = 0; i < 3; i++) {
      Unit u;
      u.name = "unit " + std::to_string(i);
      Param p = {};
      p.name = u.name + ".weight", p.shape = {8, 40 + i * 8}, p.std = 1, p.decay = true, p.id = i;
      p.numel = 8 * (40 + i * 8);
      u.params.push_back(p);
      units.push_back(u);
    }
    lay_out(&units, world.size);
    open(Links::planned);
    run(-1, 0);
    dev.mem.commit();
    dev.mem.rewind();
    dev.mode = Mode::run;
    open(Links::open);
    fsdp->init_weights();
  }
  void open(Links links) { fsdp = std::make_unique<Fsdp<float, float>>(dev, world, transport, units, options, links); }
  // bad: a unit in whose gradient the last rank has a NaN, or -1; loss: this rank's.
  void run(int bad, double loss) {
    adamw[0] = ops::AdamW(1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1);
    adamw[0].halt = halt;
    dev.mem.begin("step");
    fsdp->begin_step(adamw.get(), 1.0f);
    for (int u = 2; u >= 0; u--) {
      fsdp->gather(u);
      fsdp->use(u);
      float* g = fsdp->gradient(u);
      const Unit& unit = fsdp->units()[size_t(u)];
      const bool broken = u == bad && world.rank == world.size - 1;
      dev.compute().enqueue([=, n = unit.with_gradient.numel] {
        for (int64_t i = 0; i < n; i++) g[i] = 1;
        if (broken) g[0] = std::nanf("");
      });
      fsdp->release(u);
      fsdp->reduce(u);
    }
    StepScalars* scalars = fsdp->scalars();
    dev.compute().enqueue([=] { scalars->loss = loss; });
    fsdp->end_step();
    dev.mem.end();
    dev.compute().synchronize();
  }
  std::vector<float> state() const {
    std::vector<float> all;
    for (size_t u = 0; u < fsdp->units().size(); u++)
      for (const void* p : std::vector<const void*>{fsdp->master(int(u)).whole, fsdp->first_moment(int(u)),
                                                    fsdp->second_moment(int(u))})
        all.insert(all.end(), static_cast<const float*>(p), static_cast<const float*>(p) + fsdp->units()[u].shard);
    return all;
  }
};

}  // namespace

TEST_CASE("AdamW leaves out a step that is not finite on all ranks, and the unit is known", "[faults]") {
  for (ops::GradNorm norm : {ops::GradNorm::two, ops::GradNorm::one, ops::GradNorm::inf}) {
    INFO("norm " << int(norm));
    Rig rig(norm);
    rig.run(-1, 1);
    const std::vector<float> before = rig.state();
    CHECK(std::isfinite(rig.fsdp->scalars()->norm2));
    CHECK(first_bad_unit(rig.fsdp->units(), rig.fsdp->unit_sums()) == -1);
    for (int bad : {0, 1, 2}) {
      rig.run(bad, 1);
      CHECK(!std::isfinite(rig.fsdp->scalars()->norm2));
      CHECK((rig.state() == before));
      const int mine = first_bad_unit(rig.fsdp->units(), rig.fsdp->unit_sums());
      int found = -1;
      for (const std::string& of : gather_texts(std::to_string(mine))) found = std::max(found, std::atoi(of.c_str()));
      CHECK(found == bad);
    }
    // A loss alone, of one rank.
    rig.run(-1, rig.world.rank == 0 ? INFINITY : 1);
    CHECK(!std::isfinite(rig.fsdp->scalars()->norm2));
    CHECK((rig.state() == before));
    // And the next one counts again.
    rig.run(-1, 1);
    CHECK(std::isfinite(rig.fsdp->scalars()->norm2));
    CHECK_FALSE((rig.state() == before));
  }
}

TEST_CASE("all ranks learn with a step's scalars that one is asked to stop", "[faults]") {
  Rig rig(ops::GradNorm::two);
  rig.run(-1, 1);
  CHECK(rig.fsdp->scalars()->halts == 0);
  CHECK(rig.fsdp->scalars()->steps == rig.world.size);
  rig.halt = rig.world.rank == rig.world.size - 1;
  rig.run(-1, 1);
  CHECK(rig.fsdp->scalars()->halts == 1);
  rig.halt = 1;
  rig.run(-1, 1);
  CHECK(rig.fsdp->scalars()->halts == rig.world.size);
}

TEST_CASE("bad steps are skipped as far as --on-nan says", "[faults]") {
  Run r;
  r.global_batch = 8, r.model.seq = 4;
  const std::vector<Unit> units;
  std::vector<std::string> notes;
  int replays = 0;
  auto note = [&](const std::string& line) { notes.push_back(line); };
  const auto replay = [&] { return replays++, std::string(replays == 1 ? "the output of unit 'block.1'" : ""); };
  const StepScalars good = {1, 1, 1, 0}, bad = {NAN, 1, 1, 0};
  BadSteps stops(r);
  CHECK(stops.take(1, good, units, nullptr, replay, note).empty());
  const std::string end = stops.take(2, bad, units, nullptr, replay, note);
  INFO(end);
  CHECK(end.find("sequences 8 to 15") != std::string::npos);
  CHECK(end.find("did not apply it") != std::string::npos);
  CHECK(end.find("nan: the output of unit 'block.1'; its batch") != std::string::npos);
  CHECK(notes.empty());
  r.nan_skips = 2;
  BadSteps skips(r);
  CHECK(!skips.amid());
  for (int64_t step : {1, 2}) CHECK(skips.take(step, bad, units, nullptr, replay, note).empty());
  CHECK(skips.amid());
  CHECK(skips.take(3, good, units, nullptr, replay, note).empty());
  CHECK(!skips.amid());
  for (int64_t step : {4, 5}) CHECK(skips.take(step, bad, units, nullptr, replay, note).empty());
  CHECK(skips.skipped() == 4);
  CHECK(notes.size() == (test_world().rank == 0 ? 4 : 0));
  CHECK(skips.take(6, bad, units, nullptr, replay, note).find("at most 2 in a row") != std::string::npos);
  CHECK(replays == 6);  // of bad steps alone, and of none whose weights are gone
  // A save that is due waits for a step that is finite, and asks no step otherwise.
  r.o.save_every = 3;
  int asked = 0;
  const auto is_due = [&](int64_t step, double norm2) {
    return skips.save_is_due(
        step, [&] { return asked++, norm2; }, note);
  };
  notes.clear();
  CHECK(!is_due(2, 1));
  CHECK(asked == 0);
  CHECK(is_due(3, 1));
  CHECK(!is_due(6, NAN));
  CHECK(!is_due(7, INFINITY));
  CHECK(is_due(8, 1));
  CHECK(asked == 4);
  CHECK(!is_due(10, 1));
  CHECK(notes.size() == (test_world().rank == 0 ? 1 : 0));
  r.fsdp.update_in_backward = true, r.nan_skips = 0;
  CHECK(BadSteps(r).take(7, bad, units, nullptr, replay, note).find("every unit's gradient is finite") !=
        std::string::npos);
  CHECK(replays == 6);
}

TEST_CASE("of several ranks the one is named whose unit or output was bad first, and of those alike the lowest",
          "[faults]") {
  const World& world = test_world();
  Run r;
  r.global_batch = 8, r.model.seq = 4, r.fsdp.update_in_backward = true;
  std::vector<Unit> units(4);
  for (size_t u = 0; u < units.size(); u++) {
    units[u].name = strf("unit %zu", u);
    units[u].params.resize(1), units[u].params[0].frozen = u == 3;
  }
  // Rank r's shards of units 0 to r are bad, of at most three; what is frozen does not count.
  double sums[4] = {NAN, 1, 1, NAN};
  for (int u = 1; u <= std::min(world.rank, 2); u++) sums[u] = INFINITY;
  const int worst = std::min(world.size - 1, 2);
  const std::string text = BadSteps(r).take(
      1, {NAN, 1, 1, 0}, units, sums, [] { return std::string(); }, [](const std::string&) {});
  INFO(text);
  CHECK(text.find(strf("gradient of unit 'unit %d', in the shard of rank %d;", worst, worst)) != std::string::npos);
  // Of the forward pass: the last rank's first output, or that of all but rank 0.
  const bool last = world.rank == world.size - 1;
  const int32_t flags[3] = {0, last, 1}, others[3] = {0, 0, world.rank > 0}, none[3] = {0, 0, 0};
  const BadOutput first = first_on_any_rank(flags, 3), of_others = first_on_any_rank(others, 3);
  CHECK((first.module == 1 && first.rank == world.size - 1));
  CHECK(of_others.module == (world.size > 1 ? 2 : -1));
  CHECK(of_others.rank == (world.size > 1 ? 1 : 0));
  CHECK(first_on_any_rank(none, 3).module == -1);
}

namespace {

// A model of two blocks. Rank r sees token r + 1 in its last row, and token 0 in all others.
template <class T, class G>
struct Replay {
  const World world = test_world();
  const Transport transport = world.size > 1 ? Transport::mpi : Transport::none;
  const Run r;
  Device dev{Backend::cpu, 0, world.size};
  HostBuffer<ops::AdamW> adamw{dev, 1};
  HostBuffer<int32_t> batches{dev, batch_ints(r.model, r.batch) * r.grad_accum}, flags{dev, r.model.modules()};
  Event copied{dev};
  std::unique_ptr<Model<T, G>> model;

  static Run run_of(std::vector<const char*> words) {
    words.insert(words.begin(), {"train", "--device", "cpu", "--preset", "tiny", "--seq", "32", "--batch", "1"});
    Options o;
    std::string text;
    REQUIRE(parse_options(int(words.size()), words.data(), &o, &text));
    return resolve(o, test_world().size, 0);
  }
  explicit Replay(const std::vector<const char*>& words) : r(run_of(words)) {
    plan(dev, world, transport, r);
    dev.mem.commit();
    dev.mem.rewind();
    dev.mode = Mode::run;
    model = std::make_unique<Model<T, G>>(dev, world, transport, r.model, r.batch, r.fsdp, Links::open);
    const int64_t M = r.batch * r.model.seq, ints = batch_ints(r.model, r.batch);
    for (int64_t m = 0; m < r.grad_accum; m++) {
      int32_t* at = batches.get() + m * ints;
      for (int64_t i = 0; i < M; i++)
        micro_batch_at(at, M).tokens[i] = micro_batch_at(at, M).targets[i] = i < M - 1 ? 0 : world.rank + 1;
      index_batch(r.model, r.batch, at);
    }
    adamw[0] = ops::AdamW(1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 1);
    model->init_weights();
  }
  // Into element i of a parameter, on the rank that has it.
  void plant(const std::string& name, int64_t i, float value) {
    dev.compute().synchronize();
    for (size_t u = 0; u < model->fsdp.units().size(); u++) {
      const Unit& unit = model->fsdp.units()[u];
      for (const Param& p : unit.params) {
        const int64_t at = p.offset + i - (unit.replicated ? 0 : world.rank * unit.shard);
        if (p.name == name && at >= 0 && at < unit.shard) put(model->fsdp.master(int(u)), at, value);
      }
    }
  }
  std::vector<float> state() {
    dev.compute().synchronize();
    std::vector<float> all;
    for (size_t u = 0; u < model->fsdp.units().size(); u++)
      for (const Masters& of :
           {model->fsdp.master(int(u)), Masters(static_cast<float*>(model->fsdp.first_moment(int(u))))}) {
        const std::vector<float> numbers = numbers_of(of, model->fsdp.units()[u].shard);
        all.insert(all.end(), numbers.begin(), numbers.end());
      }
    return all;
  }
  std::string first() {
    const std::vector<float> before = state();
    const std::string text = first_bad_output(dev, *model, r, batches.get(), adamw.get(), copied, flags.get());
    CHECK(std::memcmp(state().data(), before.data(), before.size() * sizeof(float)) == 0);
    return text;
  }
};

template <class T, class G>
void name_first_outputs(const std::vector<const char*>& words, const std::vector<std::array<std::string, 3>>& cases) {
  for (const auto& [parameter, unit, part] : cases) {
    INFO(parameter);
    Replay<T, G> replay(words);
    CHECK(replay.first() == "");
    // Only the last rank sees the last of the tokens, in its last row.
    const bool embedding = parameter == "embedding.weight";
    const int last = replay.world.size - 1;
    replay.plant(parameter, embedding ? (last + 1) * replay.r.model.dim + 3 : 5, embedding ? NAN : INFINITY);
    CHECK(replay.first() == strf("the first in the forward pass that is not finite is the output of unit '%s' (%s) on "
                                 "rank %d",
                                 unit.c_str(), part.c_str(), embedding ? last : 0));
  }
}

}  // namespace

TEST_CASE("a replayed step names the unit whose output first is not finite, and changes nothing", "[faults]") {
  name_first_outputs<float, float>({"--grad-accum", "2"}, {{"embedding.weight", "embedding", "the embedding"},
                                                           {"block.0.attention.q", "block.0", "attention of block 0"},
                                                           {"block.1.mlp.down", "block.1", "the MLP of block 1"},
                                                           {"head.weight", "head", "the head's loss"}});
  // By sublayers; with a norm that takes the largest number, where one that is none must not get lost; recomputed.
  name_first_outputs<float, float>(
      {"--wrap", "sublayer", "--clip-norm", "inf", "--recompute", "block", "--attn", "dense"},
      {{"block.1.attention.o", "block.1.attention", "attention of block 1"},
       {"block.0.mlp.up", "block.0.mlp", "the MLP of block 0"}});
  name_first_outputs<bf16, bf16>({"--arch", "mlp", "--param-dtype", "bf16", "--wrap", "single"},
                                 {{"block.1.mlp.up", "model", "the MLP of block 1"}});
}

TEST_CASE("a replayed step sees a single row that is not finite, of whichever output", "[faults]") {
  for (bool attention : {true, false}) {
    INFO(attention);
    Replay<float, float> replay({"--attn", "dense"});
    const int64_t C = replay.r.model.dim, last = replay.world.size - 1;
    // In one place the last rank's last row alone has a number, of which one weight makes infinity.
    for (int64_t token = 0; token <= last + 1; token++)
      replay.plant("embedding.weight", token * C + 3, token > last ? 100.f : 0.f);
    for (int64_t i = 0; i < C; i++) replay.plant("block.0.attention.o", 3 * C + i, 0);
    CHECK(replay.first() == "");
    replay.plant(attention ? "block.0.attention.q" : "block.0.mlp.up", 3, 3e38f);
    CHECK(replay.first() == strf("the first in the forward pass that is not finite is the output of unit 'block.0' "
                                 "(%s of block 0) on rank %d",
                                 attention ? "attention" : "the MLP", int(last)));
  }
}

TEST_CASE("a rank is seen where it waits, by itself and by the ranks of its host", "[faults][comm]") {
  const World& w = test_world();
  flight::begin_step(12);
  const int lane = flight::open_lane("test");
  flight::issue(lane, "all_gather", "block 3", 64);
  flight::issue(lane, "all_gather", "block 4", 64);
  flight::start(lane);
  const flight::Sight waits = own();
  CHECK(waits.waits);
  CHECK(waits.text == "step 12, all_gather of 'block 3'");
  barrier();
  CHECK(flight::records() == w.local_size);
  for (int i = 0; i < flight::records(); i++) {
    CHECK(flight::process_of(i) == flight::Process::lives);
    CHECK(flight::see(i).text == "step 12, all_gather of 'block 3'");
    CHECK(flight::see(i).pid > 0);
  }
  barrier();
  flight::finish(lane);
  const flight::Sight works = own();
  CHECK_FALSE(works.waits);
  CHECK(works.text == "step 12, after all_gather of 'block 3'");
  CHECK(works.progress > waits.progress);
  flight::start(lane);
  CHECK(own().text == "step 12, all_gather of 'block 4'");
  flight::finish(lane);
  flight::close_lane(lane);
  flight::begin_step(0);
  barrier();
}

TEST_CASE("a flight record has the last thousand collectives, and those of all ranks of the host", "[faults][comm]") {
  namespace fs = std::filesystem;
  const World& w = test_world();
  std::string dir;
  if (w.rank == 0) dir = new_directory();
  dir = broadcast_text(dir);
  const int lane = flight::open_lane("test");
  flight::begin_step(7);
  for (int i = 0; i < 1500; i++) {
    flight::issue(lane, "reduce_scatter", "unit " + std::to_string(i), i);
    flight::start(lane);
    if (i + 1 < 1500) flight::finish(lane);
  }
  flight::issue(lane, "reduce_scatter", "not begun", 1);
  barrier();
  if (w.rank == 0) {
    flight::set_records_dir(dir);
    CHECK(flight::write_records("because") == "; flight records: " + dir + "/flight_rank*.jsonl");
    flight::set_records_dir("");
    for (int r = 0; r < w.local_size; r++) {
      INFO("rank " << r);
      std::ifstream in(dir + "/flight_rank" + std::to_string(r) + ".jsonl");
      std::vector<json> collectives;
      json head, channel;
      for (std::string line; std::getline(in, line);) {
        const json j = json::parse(line);
        if (j["type"] == "flight_record") head = j;
        if (j["type"] == "channel" && j["channel"] == "test") channel = j;
        if (j["type"] == "collective" && j["channel"] == "test") collectives.push_back(j);
      }
      CHECK(head["rank"] == r);
      CHECK(head["reason"] == "because");
      CHECK(head["seen_in"] == "step 7, reduce_scatter of 'unit 1499'");
      CHECK(channel["issued"] == 1501);
      CHECK(channel["started"] == 1500);
      CHECK(channel["finished"] == 1499);
      // The barrier is in the ring too.
      CHECK(collectives.size() >= 998);
      CHECK(collectives.size() <= 1000);
      std::string wrong;
      for (size_t i = 0; i < collectives.size(); i++) {
        const json& c = collectives[collectives.size() - 1 - i];
        if (c["unit"] != "unit " + std::to_string(1499 - i) || c["bytes"] != 1499 - int64_t(i) ||
            c["finished"].is_null() != (i == 0))
          wrong = c.dump();
      }
      CHECK(wrong.empty());
    }
    fs::remove_all(dir);
  }
  barrier();
  flight::close_lane(lane);
  flight::begin_step(0);
}

TEST_CASE("a flight record that cannot be written is said to be none", "[faults][comm]") {
  flight::set_records_dir("/proc/none");
  const std::string said = flight::write_records("because");
  flight::set_records_dir("");
  CHECK(said.find("; no flight records: /proc/none/flight_rank") == 0);
  CHECK(flight::write_records("because").empty());
}

TEST_CASE("collectives of a channel and of the host are recorded", "[faults][comm]") {
  const World& w = test_world();
  if (w.size == 1) SKIP_TEST("one rank has no collectives");
  Device dev(Backend::cpu, 0, w.size);
  std::vector<float> data(size_t(64 * w.size));
  flight::begin_step(3);
  std::unique_ptr<Channel> channel;
  { Channel planned(dev, dev.gather(), w, Transport::mpi, "gather", int64_t(data.size() * 4), Links::planned); }
  dev.mem.commit();
  dev.mem.rewind();
  dev.mode = Mode::run;
  channel =
      std::make_unique<Channel>(dev, dev.gather(), w, Transport::mpi, "gather", int64_t(data.size() * 4), Links::open);
  channel->set_unit("block 3");
  channel->all_gather(data.data(), 64, Dtype::f32);
  dev.gather().synchronize();
  CHECK(own().text == "step 3, after all_gather of 'block 3'");
  const uint64_t progress = own().progress;
  barrier();
  CHECK(own().text == "step 3, after barrier");
  CHECK(own().progress > progress);
  agree("");
  CHECK(own().text == "step 3, after agreement");  // and not what it is made of
  channel.reset();
  flight::begin_step(0);
}

TEST_CASE("what is said of a fault", "[faults][comm]") {
  const RankSeen a = {0, "here, pid 7", "step 12, all_gather of 'b'", true}, b = {2, "here, pid 9", "a save", false};
  CHECK(fault_text("rank 1 is gone", {a, b}) ==
        "rank 1 is gone; rank 0 waits in step 12, all_gather of 'b', rank 2 is in a save");
  CHECK(fault_text("x", {a, a, a, a, a, a}).find("and 2 more ranks") != std::string::npos);
}

// Hidden, because they end the program: test/faults.sh runs them and looks at what is left.
TEST_CASE("ranks wait for each other in different collectives", "[.deadlock]") {
  const World& w = test_world();
  Watchdog watchdog(w, {4, "."});
  flight::begin_step(1);
  barrier();
  // Whoever waits for one that computes is left alone, however long that takes.
  if (w.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2800));
  if (w.rank == 0) agree("");
  else barrier();
}

// As on a machine with more to do than it can: the watchdog's thread comes to its next tick after seconds.
TEST_CASE("ranks wait for each other, and watchdogs for the processor", "[.starved]") {
  const World& w = test_world();
  Watchdog watchdog(w, {10, ".", [] { std::this_thread::sleep_for(std::chrono::seconds(2)); }});
  flight::begin_step(1);
  barrier();
  if (w.rank == 0) agree("");
  else barrier();
}

// What a communicator of NCCL's would say some time after the last rank has begun to wait for the others, who wait too.
TEST_CASE("a communicator reports an error while all ranks wait", "[.asynchronous]") {
  const World& w = test_world();
  Watchdog watchdog(w, {60, "."});
  flight::begin_step(1);
  barrier();
  const auto begun = std::chrono::steady_clock::now();
  const bool broken = w.rank == w.size - 1;
  watch_errors([] { return std::string(); });  // one that is well
  watch_errors([=] {
    const bool met = broken && std::chrono::steady_clock::now() - begun > std::chrono::seconds(1);
    return std::string(met ? "NCCL: asynchronous error on the gather channel: unhandled system error: out of luck"
                           : "");
  });
  if (w.rank == 0) agree("");
  else barrier();
}
