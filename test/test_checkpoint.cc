// lib/program/checkpoint.h: what is saved comes back, at any number of ranks; what is damaged does not; and a save that
// is broken off at any point leaves the one before. Files as W ranks would write them are made by one process, through
// the functions that Saver's thread consists of, so every W meets every W' at each world size.
#include "test/arrays.h"
#include "test/errors.h"
#include "test/scratch.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <thread>

#include "lib/program/checkpoint.h"
#include "lib/program/checkpoint_manifest.h"
#include "lib/program/checksum.h"
#include "lib/program/export.h"
#include "lib/program/files.h"
#include "lib/program/json.h"
#include "model.h"
#include "test/worst.h"

using nlohmann::json;

namespace {

namespace fs = std::filesystem;

bool exists(const std::string& path) {
  struct stat s;
  return ::lstat(path.c_str(), &s) == 0;
}
std::string read_all(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}
void write_all(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << text;
}
std::vector<std::string> names_in(const std::string& path) {
  std::vector<std::string> names;
  if (DIR* dir = ::opendir(path.c_str())) {
    while (const dirent* e = ::readdir(dir))
      if (std::strcmp(e->d_name, ".") != 0 && std::strcmp(e->d_name, "..") != 0) names.push_back(e->d_name);
    ::closedir(dir);
  }
  std::sort(names.begin(), names.end());
  return names;
}
std::string list(const std::string& path) {
  std::string text;
  for (const std::string& name : names_in(path)) text += (text.empty() ? "" : " ") + name;
  return text;
}

// Directories of this process's, removed when it ends.
struct Directories {
  std::vector<std::string> made;
  static void remove(const std::string& path) {
    struct stat s;
    if (::lstat(path.c_str(), &s) == 0 && S_ISDIR(s.st_mode)) {
      for (const std::string& name : names_in(path)) remove(path + "/" + name);
      ::rmdir(path.c_str());
    } else {
      ::unlink(path.c_str());
    }
  }
  ~Directories() {
    for (const std::string& path : made) remove(path);
  }
} directories;
std::string my_directory(const fs::path& above = fs::temp_directory_path()) {
  directories.made.push_back(new_directory(above));
  return directories.made.back();
}
std::string common_directory() { return broadcast_text(test_world().rank == 0 ? my_directory() : ""); }

// Sets the hook for as long as it lives.
struct Hook {
  explicit Hook(std::function<int(const char*, const std::string&)> f) { checkpoint_hook = std::move(f); }
  ~Hook() { checkpoint_hook = nullptr; }
};

// ------------------------------------------------------------------------------------- a model that is numbers alone

Param param(const std::string& name, std::vector<int64_t> shape) {
  Param p = {};
  p.name = name, p.shape = std::move(shape), p.decay = p.shape.size() > 1, p.numel = 1;
  for (int64_t n : p.shape) p.numel *= n;
  return p;
}
// One of the matrices is longer than a chunk, so that parts of it begin and end within chunks.
std::vector<Param> tensors() {
  return {param("embedding.weight", {37, 8}), param("block0.up", {520, 600}), param("block0.down", {24, 8}),
          param("block0.norm", {8}),          param("block1.up", {16, 24}),   param("block1.norm", {8}),
          param("head.weight", {8, 40})};
}
// How tensors are dealt out over units: as models do it, all in one, each on its own.
enum class Grouping { blocks, one, each };
std::vector<Unit> wrapped(const std::vector<Param>& params, Grouping wrap, int ranks) {
  std::map<std::string, size_t> place;
  std::vector<Unit> units;
  for (const Param& p : params) {
    const std::string unit = wrap == Grouping::blocks ? p.name.substr(0, p.name.find('.'))
                             : wrap == Grouping::one  ? "all"
                                                      : p.name;
    if (!place.count(unit)) place[unit] = units.size(), units.emplace_back();
    units[place[unit]].name = unit;
    units[place[unit]].params.push_back(p);
  }
  for (Unit& u : units)
    std::stable_sort(u.params.begin(), u.params.end(),
                     [](const Param& a, const Param& b) { return a.decay > b.decay; });
  lay_out(&units, ranks);
  return units;
}
float value(const std::string& tensor, int kind, int64_t i, int64_t step) {
  const uint64_t x = (uint64_t(i) + 1) * 0x9E3779B97F4A7C15u ^ (tensor.size() * 31 + uint64_t(tensor[5])) << 40;
  return float(int64_t(x >> 20 & 0xffffff) - (1 << 23)) * 0x1p-20f + float(1000 * kind + step);
}
constexpr float padding = -7;

// What an Fsdp shows of a rank, on the host.
struct FakeRank {
  std::vector<Unit> all;
  int rank;
  mutable std::vector<std::vector<float>> data[3];
  FakeRank(const std::vector<Param>& params, Grouping wrap, int ranks, int rank)
      : all(wrapped(params, wrap, ranks)), rank(rank) {
    for (const Unit& u : all)
      for (auto& kind : data) kind.emplace_back(size_t(&kind == data ? u.shard : u.with_gradient.shard), padding);
  }
  const std::vector<Unit>& units() const { return all; }
  Masters master(int u) const { return data[0][size_t(u)].data(); }
  float* first_moment(int u) const { return data[1][size_t(u)].data(); }
  float* second_moment(int u) const { return data[2][size_t(u)].data(); }
  Dtype moment_dtype() const { return Dtype::f32; }
  int shard_rank(int) const { return rank; }
  bool first_replica(int) const { return true; }

  // f(number, what it should be), for all that the shards hold. without: tensors of whose moments nothing is known.
  template <class F>
  void each(int64_t step, F f, const std::vector<std::string>& without = {}) {
    for (int kind = 0; kind < 3; ++kind)
      for (size_t u = 0; u < all.size(); ++u) {
        std::vector<float> want(data[kind][u].size(), padding);
        for (const Param& p : all[u].params) {
          if (kind > 0 && (p.frozen || std::count(without.begin(), without.end(), p.name))) continue;
          const Unit::Piece mine = all[u].piece(p, rank);
          for (int64_t i = 0; i < mine.numel; ++i)
            want[size_t(mine.offset_in_shard + i)] = value(p.name, kind, mine.first + i, step);
        }
        for (size_t i = 0; i < want.size(); ++i) f(data[kind][u][i], want[i]);
      }
  }
  void fill(int64_t step) {
    each(step, [](float& x, float want) { x = want; });
  }
  bool holds(int64_t step, const std::vector<std::string>& without = {}) {
    bool same = true;
    each(
        step, [&](float x, float want) { same = same && std::memcmp(&x, &want, 4) == 0; }, without);
    return same;
  }
  std::vector<Part> parts() const { return parts_of(*this); }
  std::string bytes() const {
    std::string all;
    for (const Part& p : parts()) all.append(p.data, size_t(p.bytes()));
    return all;
  }
};

json some_state(int64_t step) { return {{"step", step}, {"sequence", step * 12}, {"seed", 7}, {"lr", 0.1}}; }

// A step as `ranks` ranks write it.
void save_as(const std::string& dir, int64_t step, int64_t keep, const std::vector<Param>& params, Grouping wrap,
             int ranks) {
  std::vector<std::string> shards;
  FakeRank first(params, wrap, ranks, 0);
  for (int r = 0; r < ranks; ++r) {
    FakeRank rank(params, wrap, ranks, r);
    rank.fill(step);
    shards.push_back(write_shard(dir, step, r, rank.parts(), rank.bytes().data()));
  }
  publish(dir, step, keep, shards, first.parts(), some_state(step).dump());
}

std::vector<Param> few_tensors() { return {param("block0.up", {16, 24}), param("block0.norm", {8})}; }

// The step that a process alone finds in `dir`, all of it checked; -1 if there is none or it is not what it should be.
int64_t found_in(const std::string& dir) {
  FakeRank rank(few_tensors(), Grouping::one, 1, 0);
  try {
    const json state = load_checkpoint(dir, "", test_device(Backend::cpu), World(), rank.parts());
    const int64_t step = state.at("step");
    return state == some_state(step) && rank.holds(step) ? step : -1;
  } catch (const UsageError& e) {
    UNSCOPED_INFO(e.what());
    return -1;
  }
}

// The error that all ranks get from a load by all of them; empty: none.
std::string refusal(const std::string& dir, FakeRank* rank) {
  std::string text;
  try {
    load_checkpoint(dir, "", test_device(Backend::cpu), test_world(), rank->parts());
  } catch (const UsageError& e) { text = e.what(); }
  require_same(text, "the refusal");
  return text;
}

// Set by one thread, waited for by another.
struct Latch {
  std::atomic<bool> open{false};
  void wait() {
    while (!open) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
};

}  // namespace

TEST_CASE("the checksums are XXH3 and, of old checkpoints, XXH64", "[checkpoint]") {
  auto now = [](const std::string& text) { return xxh3(text.data(), int64_t(text.size())); };
  CHECK(now("") == 0x2d06800538d394c2u);
  CHECK(now("a") == 0xe6c632b61e964e1fu);
  CHECK(now("abc") == 0x78af5f94892f3950u);
  auto of = [](const std::string& text) { return xxh64(text.data(), int64_t(text.size())); };
  CHECK(of("") == 0xef46db3751d8e999u);
  CHECK(of("abc") == 0x44bc2cf5ad770999u);
  CHECK(of("Nobody inspects the spammish repetition") == 0xfbcea83c8a378bf1u);
}

TEST_CASE("texts of any length go between ranks", "[checkpoint]") {
  const World& world = test_world();
  TextChannel talk(world);
  auto text_of = [](int rank, size_t n) { return std::string(n * size_t(rank % 3), char('a' + rank)); };
  for (size_t n : {0, 1, 100000}) {
    const std::vector<std::string> all = talk.gather(text_of(world.rank, n));
    CHECK(all.size() == (world.rank == 0 ? size_t(world.size) : 0));
    for (size_t r = 0; r < all.size(); ++r) CHECK(all[r] == text_of(int(r), n));
    CHECK(talk.broadcast(text_of(world.rank + 1, n)) == text_of(1, n));
  }
  CHECK(talk.agree("") == "");
  CHECK(talk.agree(world.rank == world.size - 1 ? "last" : "") == "last");
  CHECK(talk.agree(strf("rank %d", world.rank)) == "rank 0");
}

namespace {
// Into the rank's own memory; on a GPU through memory there.
json load_on(Device& dev, const std::string& dir, const World& world, const FakeRank& rank) {
  std::vector<Part> parts = rank.parts();
  if (dev.backend == Backend::cpu) return load_checkpoint(dir, "", dev, world, parts);
  Stream& s = dev.compute();
  Arrays on(s);
  for (Part& p : parts)
    if (p.count > 0) p.data = on.scratch<char>(p.bytes());
  const json state = load_checkpoint(dir, "", dev, world, parts);
  const std::vector<Part> own = rank.parts();
  for (size_t i = 0; i < own.size(); ++i)
    if (own[i].count > 0) s.copy(own[i].data, parts[i].data, own[i].bytes());
  on.down();
  return state;
}

void check_pairs(Backend backend) {
  const World& world = test_world();
  Device& dev = test_device(backend);
  const std::string top = common_directory();
  const Grouping wraps[] = {Grouping::blocks, Grouping::one, Grouping::each};
  auto dir_of = [&](int ranks, Grouping wrap) { return top + strf("/%d-%d", ranks, int(wrap)); };
  for (int i = world.rank; i < 12; i += world.size) {
    const std::string dir = dir_of(1 + i / 3, wraps[i % 3]);
    REQUIRE(::mkdir(dir.c_str(), 0777) == 0);
    save_as(dir, 20, 0, tensors(), wraps[i % 3], 1 + i / 3);
  }
  barrier();
  int turn = 0;
  for (int from = 1; from <= 4; ++from)
    for (Grouping saved : wraps)
      for (Grouping loaded : wraps) {
        // By the ranks there are, together.
        FakeRank mine(tensors(), loaded, world.size, world.rank);
        CHECK(load_on(dev, dir_of(from, saved), world, mine) == some_state(20));
        CHECK(mine.holds(20));  // the padding too: nothing was written there
        // By one of other worlds, alone: each pair by one of the ranks that there are.
        for (int to : {1, 2, 3, 4, 7}) {
          if (turn++ % world.size != world.rank || (saved != Grouping::blocks && loaded != Grouping::blocks)) continue;
          for (int r = 0; r < to; ++r) {
            FakeRank rank(tensors(), loaded, to, r);
            load_on(dev, dir_of(from, saved), World(), rank);
            CHECK(rank.holds(20));
          }
        }
      }
}
}  // namespace

TEST_CASE("what W ranks saved loads at W' ranks, whatever the units", "[checkpoint]") { check_pairs(Backend::cpu); }
TEST_CASE("GPU: what W ranks saved loads at W' ranks, whatever the units", "[checkpoint][gpu]") {
  NEEDS_GPU();
  check_pairs(Backend::gpu);
}

TEST_CASE("the calls of a save, in order", "[checkpoint]") {
  const std::string dir = my_directory();
  save_as(dir, 10, 1, few_tensors(), Grouping::one, 1);
  std::string trace;
  {
    Hook hook([&](const char* call, const std::string& path) {
      trace += std::string(call) + " " + (path == dir ? "DIR" : path.substr(dir.size() + 1)) + "\n";
      return 0;
    });
    save_as(dir, 20, 1, few_tensors(), Grouping::one, 2);
  }
  // Each file is on the disk before its directory's entry is, that before the step has its name, that before `latest`
  // says so, and that before the old step goes.
  CHECK(trace ==
        "mkdir .tmp-step-20\n"
        "open .tmp-step-20/rank-0.bin\n"
        "write .tmp-step-20/rank-0.bin\n"
        "write .tmp-step-20/rank-0.bin\n"
        "write .tmp-step-20/rank-0.bin\n"
        "fsync .tmp-step-20/rank-0.bin\n"
        "fsync .tmp-step-20\n"
        "mkdir .tmp-step-20\n"
        "open .tmp-step-20/rank-1.bin\n"
        "write .tmp-step-20/rank-1.bin\n"
        "write .tmp-step-20/rank-1.bin\n"
        "write .tmp-step-20/rank-1.bin\n"
        "write .tmp-step-20/rank-1.bin\n"
        "write .tmp-step-20/rank-1.bin\n"
        "write .tmp-step-20/rank-1.bin\n"
        "fsync .tmp-step-20/rank-1.bin\n"
        "fsync .tmp-step-20\n"
        "open .tmp-step-20/manifest.json\n"
        "write .tmp-step-20/manifest.json\n"
        "fsync .tmp-step-20/manifest.json\n"
        "fsync .tmp-step-20\n"
        "rename step-20\n"
        "fsync DIR\n"
        "symlink .tmp-latest\n"
        "rename latest\n"
        "fsync DIR\n"
        "rename .tmp-old-step-10\n"
        "unlink .tmp-old-step-10/manifest.json\n"
        "unlink .tmp-old-step-10/rank-0.bin\n"
        "rmdir .tmp-old-step-10\n");
  CHECK(list(dir) == "latest step-20");
  CHECK(list(dir + "/step-20") == "manifest.json rank-0.bin rank-1.bin");
}

TEST_CASE("a save that is killed at any call leaves a step that loads", "[checkpoint]") {
  // A child that stops at call n, for every n; the ranks share the work. A step of that name may be there already: one
  // that never became the latest, or the latest.
  enum Before { none, unfinished, latest };
  const World& world = test_world();
  // In memory where there is such a place: this flushes some thousand times.
  const fs::path above = ::access("/dev/shm", W_OK) == 0 ? "/dev/shm" : fs::temp_directory_path();
  for (Before before : {none, unfinished, latest}) {
    std::string after;
    bool done = false;
    for (int n = world.rank; !done; n += world.size) {
      INFO("call " << n << ", case " << before);
      const std::string dir = my_directory(above);
      for (int64_t step : {5, 10}) save_as(dir, step, 0, few_tensors(), Grouping::one, 2);
      if (before != none) save_as(dir, 20, 0, few_tensors(), Grouping::one, 3);
      if (before == unfinished) {
        ::unlink((dir + "/latest").c_str());
        REQUIRE(::symlink("step-10", (dir + "/latest").c_str()) == 0);
      }
      const pid_t child = ::fork();
      REQUIRE(child >= 0);
      if (child == 0) {
        int calls = 0;
        checkpoint_hook = [&](const char*, const std::string&) {
          if (calls++ == n) ::_exit(9);
          return 0;
        };
        save_as(dir, 20, 2, few_tensors(), Grouping::one, 2);
        ::_exit(0);
      }
      int status = 0;
      REQUIRE(::waitpid(child, &status, 0) == child);
      REQUIRE((WIFEXITED(status) && (WEXITSTATUS(status) == 9 || WEXITSTATUS(status) == 0)));
      done = WEXITSTATUS(status) == 0;
      const int64_t step = found_in(dir);
      CHECK((step == 20 || (step == 10 && before != latest)));
      const bool is_new = step == 20 && !exists(dir + "/step-20/rank-2.bin");
      CHECK((is_new || !done));
      CHECK((is_new || step == (before == latest ? 20 : 10)));
      after += is_new ? "n" : "o";
      // The next start cleans up, and its saves go through.
      {
        Saver saver(test_device(Backend::cpu), World(), {World(), dir}, 2, {});
        CHECK(!has(list(dir), ".tmp"));
      }
      CHECK(found_in(dir) == step);
      save_as(dir, 20, 2, few_tensors(), Grouping::one, 2);
      save_as(dir, 30, 2, few_tensors(), Grouping::one, 2);
      CHECK(found_in(dir) == 30);
      CHECK(list(dir) == "latest step-20 step-30");
    }
    // First the old step, from some call on the new one.
    CHECK(after.find("no") == std::string::npos);
    CHECK(after.size() >= 5);
    CHECK(after[0] == 'o');
  }
}

TEST_CASE("a full disk at any call leaves the step before and is said in one line", "[checkpoint]") {
  const World& world = test_world();
  Device& dev = test_device(Backend::cpu);
  bool done = false;
  int failed_calls = 0;
  for (int n = world.rank; !done; n += world.size) {
    const std::string dir = my_directory();
    FakeRank rank(few_tensors(), Grouping::one, 1, 0);
    std::vector<std::string> notes;
    Saver saver(dev, World(), {World(), dir}, 1, rank.parts(), [&](const std::string& note) { notes.push_back(note); });
    rank.fill(10);
    saver.begin(10, some_state(10));
    saver.finish();
    rank.fill(20);
    int calls = 0;
    std::string where, error;
    bool moved = false;  // before the call that fails
    {
      Hook hook([&](const char* call, const std::string& path) {
        if (calls++ != n) {
          moved = moved || (where.empty() && path == dir + "/latest");
          return 0;
        }
        where = std::string(call) + " " + path;
        return ENOSPC;
      });
      saver.begin(20, some_state(20));
      error = saver.finish();
    }
    done = where.empty();
    INFO(where << ": " << error);
    const int64_t step = found_in(dir);
    CHECK((step == 10 || step == 20));
    CHECK(!has(list(dir), ".tmp-step"));
    CHECK(!has(error, "\n"));
    if (done || has(where, ".tmp-old")) {  // an old step that stays is no error
      CHECK(error == "");
      CHECK(step == 20);
      CHECK(notes.size() == (done ? 0 : 1));
      if (!done) CHECK(has(notes[0], "an old checkpoint could not be deleted: " + dir));
    } else {
      ++failed_calls;
      CHECK(step == (moved ? 20 : 10));
      CHECK(has(error, "saving step 20 failed: rank 0: " + dir));
      CHECK(has(error, "No space left on device; make room there"));
      CHECK(has(error, "resume from " + dir + strf("/step-%d", int(step))));
      CHECK(notes.empty());  // of the last save of a run, which tries nothing again
      saver.check();
      REQUIRE(notes.size() == 1);
      CHECK(notes[0] == "warning: " + error + "; training goes on, and the next save tries again");
    }
    // With room again the next save goes through, and takes what is left over with it.
    rank.fill(30);
    saver.begin(30, some_state(30));
    CHECK(saver.finish() == "");
    CHECK(found_in(dir) == 30);
    CHECK(list(dir) == ".lock latest step-30");
  }
  CHECK(failed_calls > 2);
}

TEST_CASE("a file that takes no more bytes is noticed", "[checkpoint]") {
  // No hook here: the system itself writes a piece of the last part (the file would have 4704 bytes), and then refuses.
  if (test_world().rank != 0) return;
  const std::string dir = my_directory();
  const pid_t child = ::fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit = {4700, 4700};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const std::string error = error_of([&] { save_as(dir, 10, 0, few_tensors(), Grouping::one, 1); });
    ::_exit(has(error, "rank-0.bin: write failed: File too large") ? 3 : 4);
  }
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WEXITSTATUS(status) == 3);
  CHECK(found_in(dir) == -1);
}

TEST_CASE("a rank whose disk is full stops no rank, and all know of it", "[checkpoint]") {
  const World& world = test_world();
  const std::string dir = common_directory();
  FakeRank rank(few_tensors(), Grouping::one, world.size, world.rank);
  std::vector<std::string> notes;
  Saver saver(test_device(Backend::cpu), world, {world, dir}, 2, rank.parts(),
              [&](const std::string& note) { notes.push_back(note); });
  rank.fill(10);
  saver.begin(10, some_state(10));
  saver.finish();
  const int last = world.size - 1;
  std::string error;
  {
    Hook hook([&](const char* call, const std::string& path) {
      return world.rank == last && std::string(call) == "fsync" && has(path, "rank-") ? ENOSPC : 0;
    });
    saver.begin(20, some_state(20));
    error = saver.finish();
  }
  CHECK(has(error, strf("rank %d: %s/.tmp-step-20/rank-%d.bin: fsync failed: No space left", last, dir.c_str(), last)));
  CHECK(notes.empty());  // nobody knows yet that there is another save
  if (world.rank == 0) CHECK(list(dir) == ".lock latest step-10");
  barrier();
  CHECK(refusal(dir, &rank) == "");
  CHECK(rank.holds(10));
  barrier();
  rank.fill(30);
  saver.begin(30, some_state(30));
  CHECK(notes.size() == (world.rank == 0 ? 1 : 0));
  CHECK(saver.finish() == "");
  barrier();
  CHECK(found_in(dir) == 30);
}

TEST_CASE("an entry that cannot be removed keeps nothing else from being removed", "[checkpoint]") {
  const std::string dir = my_directory();
  for (int64_t step : {10, 20, 30, 40}) save_as(dir, step, 0, few_tensors(), Grouping::one, 2);
  const std::string stuck = dir + "/.tmp-old-step-10/rank-1.bin";
  {
    Hook hook([&](const char* call, const std::string& path) {
      return std::string(call) == "unlink" && path == stuck ? EBUSY : 0;
    });
    for (int64_t step : {50, 60}) {
      save_as(dir, step, 2, few_tensors(), Grouping::one, 2);
      CHECK(list(dir + "/.tmp-old-step-10") == "rank-1.bin");
      CHECK(list(dir) == strf(".tmp-old-step-10 latest step-%d step-%d", int(step - 10), int(step)));
    }
    std::vector<std::string> notes;
    Saver saver(test_device(Backend::cpu), World(), {World(), dir}, 2, {},
                [&](const std::string& n) { notes.push_back(n); });
    REQUIRE(notes.size() == 1);
    CHECK(has(notes[0], stuck + ": unlink failed"));
    CHECK(found_in(dir) == 60);
  }
  Saver saver(test_device(Backend::cpu), World(), {World(), dir}, 2, {});
  CHECK(list(dir) == ".lock latest step-50 step-60");
}

TEST_CASE("who saves to a directory already is named", "[checkpoint]") {
  const std::string dir = my_directory();
  char host[256] = "";
  REQUIRE(::gethostname(host, sizeof host - 1) == 0);
  {
    const DirectoryLock lock(dir, ".lock", "saving");
    const std::string error = error_of([&] { DirectoryLock second(dir, ".lock", "saving"); });
    CHECK(has(error, strf("another run is saving to %s (host %s, process %d)", dir.c_str(), host, int(::getpid()))));
  }
  CHECK(list(dir) == "");
  // What a process that was killed left keeps nobody out; a link that leads elsewhere is not followed.
  write_all(dir + "/.lock", "host gone, process 1");
  { const DirectoryLock lock(dir, ".lock", "saving"); }
  write_all(dir + "/.lock", "mine");
  CHECK(has(error_of([&] { DirectoryLock lock(dir, ".lock", "saving"); }), "/.lock is not a lock of this program"));
  CHECK(read_all(dir + "/.lock") == "mine");
  REQUIRE(::unlink((dir + "/.lock").c_str()) == 0);
  REQUIRE(::symlink("/dev/null", (dir + "/.lock").c_str()) == 0);
  CHECK(has(error_of([&] { DirectoryLock lock(dir, ".lock", "saving"); }), "/.lock: open failed"));
}

TEST_CASE("a save follows no link that was planted in its way", "[checkpoint]") {
  const std::string dir = my_directory(), elsewhere = my_directory();
  REQUIRE(::symlink(elsewhere.c_str(), tmp_of(dir, 10).c_str()) == 0);
  CHECK(has(error_of([&] { save_as(dir, 10, 0, few_tensors(), Grouping::one, 1); }), tmp_of(dir, 10)));
  CHECK(list(elsewhere) == "");
}

TEST_CASE("a forged manifest is refused in one line that names the key", "[checkpoint]") {
  const std::string dir = my_directory();
  save_as(dir, 10, 0, few_tensors(), Grouping::one, 1);
  const std::string path = dir + "/step-10/manifest.json", text = read_all(path);
  const int64_t huge = int64_t(1) << 62;
  struct {
    const char* at;
    json value;
    const char* says;
  } cases[] = {
      {"/files/0/file", "../../x", "\"files[0].file\" is \"../../x\", not rank-N.bin"},
      {"/files/0/file", "/etc/passwd", "files[0].file"},
      {"/files/0/file", 7, "\"files[0].file\" is 7, not a text"},
      {"/files/0/bytes", -1, "files[0].bytes"},
      {"/files/0/bytes", 1e300, "files[0].bytes"},
      {"/files/0/parts/0/first", 1e300, "files[0].parts[0].first"},
      {"/files/0/parts/0/first", uint64_t(1) << 63, "files[0].parts[0].first"},
      {"/files/0/parts/0/count", huge, "files[0].parts[0].count"},
      {"/files/0/parts/0/offset", huge, "files[0].parts[0].offset"},
      {"/files/0/parts/0/dtype", "fp64", "\"fp64\", not fp32 or bf16"},
      {"/files/0/parts/0/kind", "x", "not weight, m or v"},
      {"/files/0/parts/0/tensor", "none", "files[0].parts[0].tensor"},
      {"/files/0/parts/0/xxh3", "", "16 digits for each of 1 chunks"},
      {"/files/0/parts", json::object(), "\"files[0].parts\" is an object, not a list"},
      {"/files", nullptr, "\"files\" is null, not a list"},
      {"/tensors/0/shape", {huge, huge}, "tensors[0].shape[0]"},
      {"/tensors/0/shape", {1 << 30, 1 << 30}, "tensors[0].shape[1]"},
      {"/tensors/0/shape", {-16, -24}, "tensors[0].shape[0]"},
      {"/chunk_bytes", huge, "chunk_bytes"},
      {"/chunk_bytes", 0, "chunk_bytes"},
      {"/version", "2", "\"version\" is \"2\""},
      {"/version", 1, "there is no \"files[0].parts[0].xxh64\""},
  };
  auto refused = [&](const std::string& manifest) {
    return error_of([&] { parse_manifest(dir + "/step-10", manifest); });
  };
  CHECK(refused(text) == "");
  for (const auto& c : cases) {
    json j = json::parse(text);
    j[json::json_pointer(c.at)] = c.value;
    const std::string error = refused(seal(j));
    INFO(c.at << " " << error);
    CHECK(has(error, path + ": "));
    CHECK(has(error, c.says));
    CHECK(!has(error, "json.exception"));
    CHECK(!has(error, "\n"));
  }
  json deep = json::parse(text);
  json* in = &deep["state"];
  for (int i = 0; i < 40; i++) in = &((*in)["deeper"] = json::object());
  CHECK(has(refused(seal(deep)), "nested deeper than 32 levels"));
  // Neither a link nor a pipe is read in a file's place.
  const std::string file = dir + "/step-10/rank-0.bin";
  REQUIRE(::rename(file.c_str(), (dir + "/moved").c_str()) == 0);
  REQUIRE(::symlink("../moved", file.c_str()) == 0);
  CHECK(error_of([&] { read_manifest(dir + "/step-10"); }) != "");
  CHECK(has(error_of([&] { open_of_step(file); }), "a link, and not a file"));
  REQUIRE(::unlink(file.c_str()) == 0);
  REQUIRE(::mkfifo(file.c_str(), 0600) == 0);
  CHECK(has(error_of([&] { open_of_step(file); }), "not a file"));
}

namespace {
void check_overlap(Backend backend) {
  const World& world = test_world();
  Device& dev = test_device(backend);
  const std::string dir = common_directory();
  FakeRank rank(tensors(), Grouping::blocks, world.size, world.rank);
  // The numbers lie in planned memory of the device, as a trainer's do.
  std::vector<Part> parts = rank.parts();
  int64_t bytes = 0;
  for (const Part& p : parts) bytes += p.count * 4;
  Device own(backend, dev.ordinal);
  auto memory = [&] { return own.mem.keep<float>(bytes / 4, "parts", Purpose::master); };
  memory();
  own.mem.commit();
  float* at = memory();
  own.mode = Mode::run;
  for (Part& p : parts) p.data = reinterpret_cast<char*>(at), at += p.count;
  HostBuffer<char> host(own, bytes);
  auto put = [&](int64_t step) {
    own.compute().synchronize();
    rank.fill(step);
    const std::string all = rank.bytes();
    std::memcpy(host.get(), all.data(), all.size());
    own.compute().copy(at - bytes / 4, host.get(), bytes);
  };
  {
    Latch gate;
    bool waited = false;
    int said = 0;
    Saver saver(own, world, {world, dir}, 0, parts, [&](const std::string& note) {
      CHECK(has(note, "the checkpoint of step 10 is still being written"));
      if (++said == 1) return;  // of the one that is not saved
      waited = !gate.open;
      gate.open = true;
    });
    Hook hook([&](const char*, const std::string&) {
      if (world.rank == 0) gate.wait();
      return 0;
    });
    put(10);
    own.compute().sleep(30);
    put(11), put(10);
    saver.delay_ms = 30;
    saver.begin(10, some_state(10));
    own.compute().wait(saver.copied());
    put(12);  // behind the copy: not what is saved
    own.compute().synchronize();
    saver.check();
    CHECK(!exists(dir + "/step-10"));
    CHECK(saver.idle(15) == false);
    CHECK(saver.idle(16) == false);  // is not said twice
    CHECK(said == (world.rank == 0));
    put(20);
    saver.begin(20, some_state(20));  // waits; the note opens the gate
    own.compute().wait(saver.copied());
    put(21);
    saver.finish();
    CHECK(saver.idle(30));
    CHECK(said == 2 * (world.rank == 0));
    CHECK(waited == (world.rank == 0));
  }
  barrier();
  for (int64_t step : {10, 20}) {
    put(0);
    CHECK(load_checkpoint(dir + strf("/step-%d", int(step)), "", own, world, parts) == some_state(step));
    own.compute().copy(host.get(), at - bytes / 4, bytes);
    own.compute().synchronize();
    rank.fill(step);
    CHECK(std::string(host.get(), size_t(bytes)) == rank.bytes());
  }
  CHECK(load_state("latest", dir, world).state == some_state(20));
  CHECK(load_state("latest", dir, world).step_dir == dir + "/step-20");
}
}  // namespace

TEST_CASE("saving holds up nothing but the copy", "[checkpoint]") { check_overlap(Backend::cpu); }
TEST_CASE("GPU: saving holds up nothing but the copy", "[checkpoint][gpu]") {
  NEEDS_GPU();
  check_overlap(Backend::gpu);
}

TEST_CASE("weights that are not finite are not saved", "[checkpoint]") {
  const World& world = test_world();
  const std::string dir = common_directory();
  FakeRank rank(tensors(), Grouping::blocks, world.size, world.rank);
  const std::vector<Part> parts = rank.parts();
  auto save = [&](int64_t step, float bad) {
    Saver saver(test_device(Backend::cpu), world, {world, dir}, 1, parts);
    rank.fill(step);
    const Part* last = nullptr;
    for (const Part& p : parts)
      if (p.count > 0 && std::strcmp(p.kind, "weight") == 0) last = &p;
    if (world.rank == 0) std::memcpy(last->data + (last->count - 1) * 4, &bad, 4);
    saver.begin(step, some_state(step));
    return error_of([&] { saver.finish(); });
  };
  CHECK(save(10, 1) == "");
  for (const float bad : {NAN, INFINITY}) {
    const std::string error = save(20, bad);  // of one number of one rank
    barrier();
    CHECK(exists(dir + "/step-10"));
    CHECK(!exists(dir + "/step-20"));
    CHECK(load_state("latest", dir, world).state == some_state(10));
    if (world.rank > 0) continue;
    CHECK(has(error, "saving step 20 failed: rank 0: tensor '"));
    CHECK(has(error, "the run has diverged"));
    CHECK(has(error, "resume from " + dir + "/step-10"));
  }
}

TEST_CASE("what is damaged is refused, by name", "[checkpoint]") {
  const World& world = test_world();
  const std::string good = common_directory() + "/", step = good + "step-20";
  FakeRank rank(tensors(), Grouping::blocks, world.size, world.rank);
  const bool writes = world.rank == 0;
  if (writes) save_as(good, 20, 0, tensors(), Grouping::blocks, 3);
  barrier();
  REQUIRE(refusal(good, &rank) == "");
  const std::string manifest = read_all(step + "/manifest.json");
  const json content = json::parse(manifest);
  barrier();
  // What `change` does to a file is undone after the load.
  auto after = [&](const std::string& file, auto change) {
    const std::string was = writes ? read_all(file) : "";
    if (writes) change(was);
    barrier();
    const std::string text = refusal(good, &rank);
    if (writes) write_all(file, was);
    barrier();
    return text;
  };
  for (const json& f : content["files"]) {
    const std::string file = step + "/" + f["file"].get<std::string>();
    for (const json& p : f["parts"]) {
      // The first byte of a weight's part, the middle of a moment's, the last of the other's.
      const int64_t first = p["offset"], length = p["count"].get<int64_t>() * 4;
      const int64_t byte = p["kind"] == "weight" ? first : p["kind"] == "m" ? first + length / 2 : first + length - 1;
      const std::string text = after(file, [&](std::string was) {
        was[size_t(byte)] ^= 0x10;
        write_all(file, was);
      });
      INFO(text);
      CHECK(has(text, "rank "));
      CHECK(has(text, file + ": tensor '" + p["tensor"].get<std::string>() + "'"));
      CHECK(has(text, "AdamW's " + p["kind"].get<std::string>()) == (p["kind"] != "weight"));
      CHECK(has(text, "the checksum of bytes "));
    }
    const int64_t bytes = f["bytes"];
    for (int64_t size : {int64_t(0), bytes / 2, bytes - 1, bytes + 1}) {
      const std::string text = after(file, [&](std::string was) {
        was.resize(size_t(size));
        write_all(file, was);
      });
      INFO(text);
      CHECK(has(text, strf("rank 0: %s: %lld bytes and not %lld", file.c_str(), (long long)size, (long long)bytes)));
      CHECK((size > bytes || has(text, "it should hold tensor '")));
      if (size == bytes - 1)
        CHECK(has(text, "tensor '" + f["parts"].back()["tensor"].get<std::string>() + "' (AdamW's v) and pieces of 0"));
    }
    const std::string text = after(file, [&](const std::string&) { ::unlink(file.c_str()); });
    CHECK(has(text, file + ": No such file or directory; it should hold tensor '" +
                        f["parts"][0]["tensor"].get<std::string>() + "'"));
  }

  // The manifest: any byte, any length.
  const std::string file = step + "/manifest.json";
  for (size_t byte = 0; byte < manifest.size(); byte += manifest.size() / 40) {
    const std::string text = after(file, [&](std::string was) {
      was[byte] ^= 1;
      write_all(file, was);
    });
    CHECK(has(text, file + ": the checksum does not fit"));
  }
  for (size_t size : {size_t(0), manifest.size() / 2, manifest.size() - 1}) {
    CHECK(has(after(file, [&](const std::string& was) { write_all(file, was.substr(0, size)); }),
              file + ": the checksum does not fit"));
  }
  CHECK(has(after(file, [&](const std::string&) { ::unlink(file.c_str()); }), file + ": No such file"));

  // Another model.
  auto with = [&](std::vector<Param> params) {
    FakeRank other(params, Grouping::blocks, world.size, world.rank);
    return refusal(good, &other);
  };
  std::vector<Param> params = tensors();
  params[4].shape = {24, 16};  // as many elements
  CHECK(has(with(params), "rank 0: " + file + ": tensor 'block1.up' is 16 x 24 there and 24 x 16 in this model"));
  params = tensors();
  params.pop_back();
  CHECK(has(with(params), file + ": it has tensor 'head.weight', which this model has not"));
  params = tensors();
  params.push_back(param("block2.up", {8, 8}));
  CHECK(has(with(params), file + ": there is no tensor 'block2.up', tensor 'block2.up' (AdamW's m), tensor 'block2.up' "
                                 "(AdamW's v), which this model has"));
  CHECK(refusal(good, &rank) == "");
}

TEST_CASE("which steps stay, and which is found", "[checkpoint]") {
  if (test_world().rank != 0) return;
  const std::string dir = my_directory();
  auto error = [&](const std::string& resume, const std::string& save) {
    return error_of([&] { find_checkpoint(resume, save); });
  };
  CHECK(has(error("latest", ""), "--resume latest: of which directory? Give --save DIR"));
  CHECK(has(error(dir + "/none", ""), "No such file"));
  CHECK(has(error(dir, ""), "no checkpoint in " + dir));
  for (int64_t step : {100, 8, 9, 10}) save_as(dir, step, 2, few_tensors(), Grouping::one, 2);
  write_all(dir + "/step-by-step", "no step");
  CHECK(list(dir) == "latest step-10 step-100 step-9 step-by-step");  // 100 is another run's
  CHECK(find_checkpoint(dir, "") == dir + "/step-10");
  CHECK(find_checkpoint("latest", dir) == dir + "/step-10");
  CHECK(find_checkpoint(dir + "/step-9", dir) == dir + "/step-9");
  CHECK(found_in(dir + "/latest") == 10);
  ::unlink((dir + "/latest").c_str());
  CHECK(find_checkpoint(dir, "") == dir + "/step-100");
  // A step that is saved again where directories cannot change places.
  {
    int asked = 0;
    Hook hook([&](const char* call, const std::string&) {
      const bool is = std::string(call) == "exchange";
      asked += is;
      return is ? EINVAL : 0;
    });
    save_as(dir, 10, 2, few_tensors(), Grouping::one, 3);
    CHECK(asked == 1);
  }
  CHECK(list(dir) == "latest step-10 step-100 step-9 step-by-step");
  CHECK(list(dir + "/step-10") == "manifest.json rank-0.bin rank-1.bin rank-2.bin");
  CHECK(found_in(dir) == 10);
  // A directory that cannot be made: said on all ranks when the run starts.
  write_all(dir + "/file", "");
  for (const char* name : {"/file", "/file/below"})
    CHECK(has(error_of([&] {
                Saver(test_device(Backend::cpu), World(), {World(), dir + name}, 0, {});
              }),
              "--save: " + dir + "/file"));
  { Saver(test_device(Backend::cpu), World(), {World(), dir + "/a/b/c/"}, 0, {}); }
  CHECK(exists(dir + "/a/b/c"));
  // Two runs in one directory: the second is refused, and takes nothing of the first's away.
  {
    Saver first(test_device(Backend::cpu), World(), {World(), dir}, 2, {});
    REQUIRE(::mkdir((dir + "/.tmp-step-11").c_str(), 0777) == 0);
    write_all(dir + "/.tmp-step-11/rank-0.bin", "being written");
    CHECK(has(error_of([&] {
                Saver(test_device(Backend::cpu), World(), {World(), dir}, 2, {});
              }),
              "--save: another run is saving to " + dir));
    CHECK(exists(dir + "/.tmp-step-11"));
  }
  { Saver(test_device(Backend::cpu), World(), {World(), dir}, 2, {}); }
  CHECK(!exists(dir + "/.tmp-step-11"));
}

TEST_CASE("what is the user's stays in a directory that is saved to", "[checkpoint]") {
  if (test_world().rank != 0) return;
  const std::string dir = my_directory();
  auto save_all = [&] {
    { Saver(test_device(Backend::cpu), World(), {World(), dir}, 1, {}); }
    for (int64_t step : {10, 20}) save_as(dir, step, 1, few_tensors(), Grouping::one, 2);
  };
  // What only looks like ours.
  std::vector<std::string> mine = {".tmp-",          ".tmp-step-",           ".tmp-step-07",       ".tmp-step-7a",
                                   ".tmp-old-step-", ".tmp-oldstep-7",       ".tmp-latest-of-all", ".tmp-probe-",
                                   ".tmp-photos",    ".tmp-probe-123456789", "step-007",           "step-",
                                   "model.tmp-1234"};
  for (const std::string& name : mine) write_all(dir + "/" + name, "mine");
  REQUIRE(::mkdir((dir + "/.tmp-directory").c_str(), 0777) == 0);
  write_all(dir + "/.tmp-directory/rank-0.bin", "mine");
  // What is ours, of a save that was killed.
  for (const char* name : {"/.tmp-step-7", "/.tmp-old-step-5"}) {
    REQUIRE(::mkdir((dir + name).c_str(), 0777) == 0);
    for (const char* file : {"/rank-0.bin", "/rank-12.bin", "/manifest.json"}) write_all(dir + name + file, "x");
  }
  REQUIRE(::symlink("step-5", (dir + "/.tmp-latest").c_str()) == 0);
  write_all(dir + "/.tmp-probe-1234abcd", ".");
  save_all();
  for (const std::string& name : mine) CHECK(read_all(dir + "/" + name) == "mine");
  CHECK(read_all(dir + "/.tmp-directory/rank-0.bin") == "mine");
  std::vector<std::string> all = mine;
  all.insert(all.end(), {".tmp-directory", "latest", "step-20"});
  std::sort(all.begin(), all.end());
  CHECK(names_in(dir) == all);

  // Another's thing under a name of ours is said, and stays.
  struct {
    const char *name, *file, *says;
  } others[] = {{".tmp-step-30", "photo.jpg", ".tmp-step-30/photo.jpg does not belong to a checkpoint"},
                {".tmp-step-30", "rank-0.binary", ".tmp-step-30/rank-0.binary does not belong"},
                {".tmp-old-step-30", "rank-.bin", ".tmp-old-step-30/rank-.bin does not belong"},
                {".tmp-step-30", nullptr, ".tmp-step-30 is not a directory of a checkpoint"},
                {".tmp-latest", nullptr, ".tmp-latest is not a link to a checkpoint"},
                {"step-30", "photo.jpg", "step-30 is not a checkpoint, it has no manifest.json"},
                {"step-30", nullptr, "step-30 is not a checkpoint"},
                {"latest", nullptr, "latest is not a link to a checkpoint"}};
  for (const auto& other : others) {
    INFO(other.says);
    const std::string at = dir + "/" + other.name, file = other.file ? at + "/" + other.file : at;
    const bool was_latest = std::string(other.name) == "latest";
    if (was_latest) ::unlink(at.c_str());
    if (other.file) REQUIRE(::mkdir(at.c_str(), 0777) == 0);
    write_all(file, "mine");
    const std::string error = error_of([&] {
      check_save(dir, dir);
      save_all();
    });
    CHECK(has(error, "--save"));
    CHECK(has(error, dir + "/" + other.says));
    CHECK(read_all(file) == "mine");
    Directories::remove(at);
    if (was_latest) REQUIRE(::symlink("step-20", at.c_str()) == 0);
  }
  // In an old step: the step stays, and that is said.
  write_all(dir + "/step-20/notes.txt", "mine");
  FakeRank rank(few_tensors(), Grouping::one, 1, 0);
  std::string said;
  {
    Saver saver(test_device(Backend::cpu), World(), {World(), dir}, 1, rank.parts(),
                [&](const std::string& n) { said += n; });
    rank.fill(30);
    saver.begin(30, some_state(30));
    saver.finish();
  }
  CHECK(has(said,
            "an old checkpoint could not be deleted: " + dir + "/step-20/notes.txt does not belong to a checkpoint"));
  CHECK(read_all(dir + "/step-20/notes.txt") == "mine");
  CHECK(found_in(dir + "/step-20") == 20);
  CHECK(found_in(dir) == 30);
}

TEST_CASE("a directory that a rank cannot write to is refused at the start", "[checkpoint]") {
  const World& world = test_world();
  const std::string dir = common_directory();
  const int last = world.size - 1;
  auto refused = [&](const std::string& where) {
    return error_of([&] { Saver(test_device(Backend::cpu), world, {world, where}, 1, {}); });
  };
  for (const char* failing : {"open", "write", "unlink"}) {
    INFO(failing);
    Hook hook([&](const char* call, const std::string& path) {
      return world.rank == last && std::string(call) == failing && has(path, "/.tmp-probe-") ? EROFS : 0;
    });
    const std::string error = refused(dir);
    CHECK(has(error, strf("--save: rank %d: %s/.tmp-probe-", last, dir.c_str())));
    CHECK(has(error, strf("%s failed: Read-only file system; check who may write there", failing)));
    barrier();
    if (std::string(failing) != "unlink") CHECK(list(dir) == "");
    barrier();
  }
  CHECK(refused(dir) == "");
  barrier();
  CHECK(list(dir) == "");
  CHECK(has(refused("/proc"), "--save: /proc/.lock: open failed"));  // where not even root can
}

TEST_CASE("a run that another has overtaken takes nothing from it", "[checkpoint]") {
  if (test_world().rank != 0) return;
  const std::string dir = my_directory();
  Device& dev = test_device(Backend::cpu);
  FakeRank rank(few_tensors(), Grouping::one, 1, 0);
  auto start = [&](const Steps& found) {
    return error_of([&] { Saver(dev, World(), {World(), dir, found}, 1, rank.parts()); });
  };
  // Both begin on an empty directory, and the other has ended before this one takes the lock.
  const Steps none = check_save(dir, "");
  save_as(dir, 20, 1, few_tensors(), Grouping::one, 1);
  CHECK(has(start(none), "--save: another run saved " + dir + "/step-20 after this one started"));
  CHECK(found_in(dir) == 20);
  // Both go on from step 20; the other saves that step again, or the next.
  const Steps one = check_save(dir, dir);
  CHECK(start(one) == "");
  save_as(dir, 20, 1, few_tensors(), Grouping::one, 2);
  CHECK(has(start(one), dir + "/step-20 after"));
  const Steps again = check_save(dir, dir);
  save_as(dir, 30, 2, few_tensors(), Grouping::one, 1);
  CHECK(has(start(again), dir + "/step-30 after"));
  // Where there are no locks: it appears while this run trains.
  Saver saver(dev, World(), {World(), dir, check_save(dir, dir)}, 1, rank.parts());
  for (int64_t step : {40, 50}) {
    rank.fill(step);
    saver.begin(step, some_state(step));
    saver.finish();
    CHECK(list(dir) == strf(".lock latest step-%d", int(step)));  // its own are its own
  }
  save_as(dir, 60, 0, few_tensors(), Grouping::one, 1);
  rank.fill(70);
  saver.begin(70, some_state(70));
  const std::string error = error_of([&] { saver.finish(); });
  CHECK(has(error, "saving step 70 failed: rank 0: another run saved " + dir + "/step-60"));
  CHECK(found_in(dir) == 60);
  CHECK(list(dir) == ".lock latest step-50 step-60");
}

// For test/cli/checkpoints.sh: changes options in a manifest, as another version of this program would have written
// them.
TEST_CASE("changes a manifest", "[.rewrite]") {
  const std::string path = std::getenv("TEST_MANIFEST");
  json manifest = json::parse(read_all(path));
  manifest["state"].merge_patch(json::parse(std::getenv("TEST_PATCH")));
  write_all(path, seal(manifest));
}

TEST_CASE("a rank that unwinds does not wait for a save that others never begin", "[checkpoint]") {
  const World& world = test_world();
  const std::string dir = common_directory();
  FakeRank rank(few_tensors(), Grouping::one, world.size, world.rank);
  try {
    Saver saver(test_device(Backend::cpu), world, {world, dir}, 2, rank.parts());
    if (world.rank == 0) saver.begin(10, some_state(10));
    throw 1;
  } catch (int) {}
  CHECK((world.size == 1 || !exists(dir + "/step-10")));  // alone, a rank may have written it already
}

// ---------------------------------------------------------------------------------------------------- the real model

namespace {

template <class T>
struct TrainerOf {
  static constexpr int64_t rows = 12;
  World world;
  Transport transport;
  Device dev;
  ModelConfig config;
  FsdpOptions fsdp;
  int64_t batch, ints;
  std::unique_ptr<Model<T, T>> model;
  std::unique_ptr<HostBuffer<int32_t>> host;
  HostBuffer<ops::AdamW> adamw;
  Event copied;

  // way: a way to cut the model, of `ways`.
  static constexpr int ways = 6;
  TrainerOf(Backend backend, const World& world, int way = 0, const std::vector<std::string>& frozen = {},
            int64_t dim = 32)
      : world(world),
        transport(world.size == 1                               ? Transport::none
                  : backend == Backend::gpu && one_gpu_a_rank() ? Transport::nccl
                                                                : Transport::mpi),
        dev(backend, backend == Backend::gpu ? world.local_rank % gpus() : 0, world.size,
            comm_streams(backend, transport)),
        adamw(dev, 1),
        copied(dev) {
    config.arch = Arch::rope;
    config.dim = dim, config.depth = 2, config.heads = 4, config.kv_heads = 2, config.hidden = 48, config.vocab = 17;
    config.seq = 8, config.frozen = frozen;
    if (way == 1) config.wrap = Wrap::sublayer, config.replicate_below = 40;
    if (way == 2) config.wrap = Wrap::single, fsdp.reshard_after_forward = false;
    if (way == 3) fsdp.shard_ranks = 1, fsdp.reshard_after_forward = false;
    if (way == 4) fsdp.shard_ranks = world.size % 2 ? world.size : 2, config.wrap = Wrap::size;
    if (way == 4) config.wrap_min_params = 3000;
    if (way == 5) fsdp.moment_dtype = Dtype::bf16;
    fsdp.reduce_dtype = dtype_of<T>;
    batch = (rows + world.size - 1) / world.size, ints = batch_ints(config, batch);
    for (bool plan : {true, false}) {
      ops::keep_workspace(dev);
      model = std::make_unique<Model<T, T>>(dev, world, transport, config, batch, fsdp,
                                            plan ? Links::planned : Links::open);
      if (plan) step_program(1), dev.mem.commit(), dev.mem.rewind(), dev.mode = Mode::run;
    }
    host = std::make_unique<HostBuffer<int32_t>>(dev, ints);
    model->init_weights();
  }
  ~TrainerOf() { model.reset(); }
  void step_program(int64_t n) {
    dev.mem.begin("step");
    if (host) adamw[0] = ops::AdamW(1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, n);
    model->begin_step(adamw.get(), 1.0f);
    model->forward_backward(host ? host->get() : nullptr, 1.0 / double(rows * config.seq), true, true, copied);
    model->end_step();
    dev.mem.end();
  }
  // Steps [from, to]; their losses and gradient norms.
  std::vector<double> train(int64_t from, int64_t to) {
    std::vector<double> results;
    const int64_t first = world.rank * rows / world.size, last = (world.rank + 1) * rows / world.size;
    const int64_t seq = config.seq, M = batch * seq;
    HostBuffer<StepScalars> result(dev, 1);
    for (int64_t n = from; n <= to; ++n) {
      for (int64_t i = 0; i < M; ++i) {
        const int64_t row = first + i / seq;
        auto token = [&](int64_t at) { return int32_t((n * 31 + row * 7 + at * (row % 3 + 1)) % config.vocab); };
        (*host)[i] = row < last ? token(i % seq) : 0;
        micro_batch_at(host->get(), M).targets[i] = row < last ? token(i % seq + 1) : -1;
      }
      index_batch(config, batch, host->get());
      step_program(n);
      dev.compute().copy(result.get(), model->fsdp.scalars(), sizeof(StepScalars));
      dev.compute().synchronize();
      results.push_back(result[0].loss), results.push_back(result[0].norm2);
    }
    return results;
  }
  std::vector<Part> parts() { return parts_of(model->fsdp); }
  std::vector<Part> parts_to_save() { return ::parts_to_save(model->fsdp); }
  std::string bytes() {
    std::string all;
    for (const Part& p : parts()) {
      HostBuffer<char> part(dev, p.bytes());
      copy_to_host(dev.compute(), part.get(), p, 0, p.count);
      dev.compute().synchronize();
      all.append(part.get(), size_t(p.bytes()));
    }
    return all;
  }
};
using Trainer = TrainerOf<float>;

double furthest(const std::vector<double>& x, const std::vector<double>& y) {
  double worst = x.size() == y.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(x.size(), y.size()); ++i)
    worst = worse(worst, std::abs(x[i] - y[i]) / std::abs(y[i]));
  return worst;
}

}  // namespace

namespace {
// off: how far losses may be where another number of ranks sums in another order.
template <class T>
void check_resumed(Backend backend, double off) {
  constexpr int64_t dim = std::is_same_v<T, bf16> ? 256 : 32;  // heads of 64, which kernels in bf16 take
  struct Trainer : TrainerOf<T> {
    Trainer(Backend backend, const World& world) : TrainerOf<T>(backend, world, 0, {}, dim) {}
  };
  const World& world = test_world();
  const std::string dir = common_directory();
  std::vector<double> whole;
  std::string weights;
  {
    Trainer t(backend, world);
    Saver saver(t.dev, world, {world, dir}, 2, t.parts());
    whole = t.train(1, 3);
    saver.delay_ms = 100;  // the copies are of step 3, though the next has begun
    begin_save(&saver, &t.model->fsdp, 3, some_state(3));
    for (double x : t.train(4, 6)) whole.push_back(x);
    saver.finish();
    weights = t.bytes();
  }
  const std::vector<double> rest(whole.begin() + 6, whole.end());
  barrier();
  {
    Trainer t(backend, world);
    const json state = load_checkpoint("latest", dir, t.dev, world, t.parts());
    CHECK(state == some_state(3));
    CHECK(t.train(state.at("step").get<int64_t>() + 1, 6) == rest);  // bit for bit
    CHECK(t.bytes() == weights);
  }
  // Of W ranks, on one; then of one, on W: to rounding.
  const std::string dir1 = common_directory();
  if (world.rank == 0) {
    Trainer t(backend, World());
    load_checkpoint(dir, "", t.dev, World(), t.parts());
    CHECK(furthest(t.train(4, 6), rest) < off);
    Trainer start(backend, World());
    Saver saver(start.dev, World(), {World(), dir1}, 2, start.parts());
    CHECK(furthest(start.train(1, 3), std::vector<double>(whole.begin(), whole.begin() + 6)) < off);
    saver.begin(3, some_state(3));
    saver.finish();
  }
  barrier();
  Trainer t(backend, world);
  load_checkpoint(dir1, "", t.dev, world, t.parts());
  CHECK(furthest(t.train(4, 6), rest) < off);
}
}  // namespace

TEST_CASE("a run that is resumed goes on as if it had never stopped", "[checkpoint]") {
  check_resumed<float>(Backend::cpu, 1e-4);
}
TEST_CASE("so does one whose weights lie in halves", "[checkpoint]") { check_resumed<bf16>(Backend::cpu, 6e-2); }
TEST_CASE("GPU: a run that is resumed goes on as if it had never stopped", "[checkpoint][gpu]") {
  NEEDS_GPU();
  check_resumed<float>(Backend::gpu, 1e-4);
  check_resumed<bf16>(Backend::gpu, 6e-2);
}

TEST_CASE("weights in halves are in a checkpoint as all are", "[checkpoint]") {
  const World& world = test_world();
  const std::string dir = common_directory(), dir2 = common_directory();
  std::string weights;
  const auto numbers = [](auto& t) {
    std::vector<float> all;
    for (size_t u = 0; u < t.model->fsdp.units().size(); ++u)
      for (int64_t i = 0; i < t.model->fsdp.units()[u].shard; ++i) all.push_back(get(t.model->fsdp.master(int(u)), i));
    return all;
  };
  const auto save = [&](auto& t, const std::string& to) {
    Saver saver(t.dev, world, {world, to}, 2, t.parts_to_save());
    saver.begin(3, some_state(3));
    saver.finish();
    barrier();
  };
  TrainerOf<bf16> halves(Backend::cpu, world);
  halves.train(1, 3);
  REQUIRE(halves.model->fsdp.master(0).whole == nullptr);
  save(halves, dir);
  Trainer whole(Backend::cpu, world);
  load_checkpoint(dir, "", whole.dev, world, whole.parts());
  CHECK(numbers(whole) == numbers(halves));
  whole.train(4, 4);
  save(whole, dir2);
  load_checkpoint(dir2, "", halves.dev, world, halves.parts());
  CHECK(numbers(halves) == numbers(whole));
}

TEST_CASE("a checkpoint knows nothing of how the model was cut", "[checkpoint]") {
  const World& world = test_world();
  std::vector<double> rest;
  {
    Trainer t(Backend::cpu, world);
    t.train(1, 3);
    rest = t.train(4, 6);
  }
  for (int way = 0; way < Trainer::ways; ++way) {
    const std::string dir = common_directory();
    {
      Trainer t(Backend::cpu, world, way);
      Saver saver(t.dev, world, {world, dir}, 2, t.parts_to_save());
      t.train(1, 3);
      saver.begin(3, some_state(3));
      saver.finish();
      // Each number once, whoever has copies of it: fp32 weights and two moments.
      if (world.rank == 0) {
        int64_t bytes = 0;
        for (int r = 0; r < world.size; ++r) bytes += int64_t(read_all(dir + strf("/step-3/rank-%d.bin", r)).size());
        CHECK(bytes == parameter_count(t.config) * (way == 5 ? 8 : 12));
      }
      // The same way: bit for bit.
      const std::vector<double> on = t.train(4, 6);
      Trainer same(Backend::cpu, world, way);
      load_checkpoint(dir, "", same.dev, world, same.parts());
      CHECK(same.train(4, 6) == on);
      CHECK(same.bytes() == t.bytes());
    }
    // In any other.
    for (int other = 0; other < Trainer::ways; ++other) {
      INFO("from " << way << " to " << other);
      Trainer t(Backend::cpu, world, other);
      load_checkpoint(dir, "", t.dev, world, t.parts());
      CHECK(furthest(t.train(4, 6), rest) < (way == 5 || other == 5 ? 3e-2 : 1e-4));
    }
  }
}

TEST_CASE("what was frozen is saved without moments, and trained later it begins without", "[checkpoint]") {
  const World& world = test_world();
  const std::string top = common_directory();
  const std::vector<std::string> frozen = {"embedding.weight", "block0.down"};
  std::vector<Param> some = tensors();
  for (Param& p : some) p.frozen = std::count(frozen.begin(), frozen.end(), p.name) > 0;
  const Grouping wraps[] = {Grouping::blocks, Grouping::one, Grouping::each};
  if (world.rank == 0)
    for (int w = 0; w < 3; ++w)
      for (bool with : {false, true}) {
        const std::string dir = top + strf("/%d-%d", w, with);
        REQUIRE(::mkdir(dir.c_str(), 0777) == 0);
        save_as(dir, 20, 0, with ? tensors() : some, wraps[w], 3);
      }
  barrier();
  for (Grouping wrap : wraps)
    for (int w = 0; w < 3; ++w)
      for (bool with : {false, true})
        for (bool trains : {false, true}) {
          std::string said;
          FakeRank mine(trains ? tensors() : some, wrap, world.size, world.rank);
          load_checkpoint(top + strf("/%d-%d", w, with), "", test_device(Backend::cpu), world, mine.parts(),
                          [&](const std::string& line) { said += line; });
          const bool anew = trains && !with;
          CHECK(mine.holds(20, anew ? frozen : std::vector<std::string>()));
          CHECK(said == (anew && world.rank == 0 ? "AdamW's moments begin at zero for 'embedding.weight', "
                                                   "'block0.down': frozen in the checkpoint"
                                                 : ""));
        }
}

TEST_CASE("a run that unfreezes what was frozen goes on alike on any number of ranks", "[checkpoint]") {
  const World& world = test_world();
  const std::string dir = common_directory();
  const std::vector<std::string> frozen = {"block.0", "block.1.mlp", "block.1.attention.q", "head"};
  std::vector<double> rest;
  {
    Trainer t(Backend::cpu, world, 0, frozen);
    Saver saver(t.dev, world, {world, dir}, 2, t.parts_to_save());
    t.train(1, 3);
    begin_save(&saver, &t.model->fsdp, 3, some_state(3));
    rest = t.train(4, 6);
    saver.finish();
    int64_t bytes = 0, expected = 0;
    for (const Unit& u : t.model->fsdp.units())
      for (const Param& p : u.params) expected += p.numel * (p.frozen ? 4 : 12);
    for (int r = 0; r < world.size; ++r) bytes += int64_t(read_all(dir + strf("/step-3/rank-%d.bin", r)).size());
    CHECK(bytes == expected);
    Trainer same(Backend::cpu, world, 0, frozen);
    load_checkpoint(dir, "", same.dev, world, same.parts());
    CHECK(same.train(4, 6) == rest);
  }
  Trainer all(Backend::cpu, world);
  load_checkpoint(dir, "", all.dev, world, all.parts());
  const std::vector<double> unfrozen = all.train(4, 6);
  CHECK(furthest(unfrozen, rest) > 1e-3);
  Trainer alone(Backend::cpu, World());
  load_checkpoint(dir, "", alone.dev, World(), alone.parts());
  CHECK(furthest(alone.train(4, 6), unfrozen) < 1e-4);
  // And frozen again, with all moments there are.
  Trainer again(Backend::cpu, world, 1, frozen);
  load_checkpoint(dir, "", again.dev, world, again.parts());
  CHECK(furthest(again.train(4, 6), rest) < 1e-4);
}

TEST_CASE("the exported model is whole, and nothing but the model", "[checkpoint]") {
  const World& world = test_world();
  Device& dev = test_device(Backend::cpu);
  const std::string dir = common_directory(), path = dir + "/model.safetensors";
  for (Grouping wrap : {Grouping::blocks, Grouping::one})
    for (Dtype dtype : {Dtype::f32, Dtype::bf16}) {
      FakeRank rank(tensors(), wrap, world.size, world.rank);
      rank.fill(20);
      if (world.rank == 0) ::unlink(path.c_str());
      export_safetensors(path, dtype, dev, world, rank.parts());
      if (world.rank == 0) {
        CHECK(list(dir) == "model.safetensors");
        const std::string text = read_all(path);
        uint64_t length = 0;
        std::memcpy(&length, text.data(), 8);
        REQUIRE(8 + length < text.size());
        CHECK(length % 8 == 0);
        json header = json::parse(text.substr(8, length));
        CHECK(header["__metadata__"]["format"] == "pt");
        int64_t bytes = 0, wrong = 0;
        for (const Param& p : tensors()) {
          const json& t = header.at(p.name);
          CHECK(t.at("dtype") == (dtype == Dtype::bf16 ? "BF16" : "F32"));
          CHECK(t.at("shape") == p.shape);
          const int64_t begin = t.at("data_offsets")[0], end = t.at("data_offsets")[1];
          int64_t n = 1;
          for (int64_t size : p.shape) n *= size;
          REQUIRE(end - begin == n * size_of(dtype));
          bytes += end - begin;
          for (int64_t i = 0; i < n; ++i) {
            const char* at = text.data() + 8 + length + begin + i * size_of(dtype);
            const float want = value(p.name, 0, i, 20);
            const bf16 narrow = nearest_away(want);
            wrong += dtype == Dtype::bf16 ? std::memcmp(at, &narrow, 2) != 0 : std::memcmp(at, &want, 4) != 0;
          }
        }
        CHECK(wrong == 0);
        CHECK(header.size() == tensors().size() + 1);
        CHECK(text.size() == 8 + length + uint64_t(bytes));
      }
      barrier();
    }
  // A disk that is full on one rank: the files that were there stay, and nothing else.
  FakeRank rank(few_tensors(), Grouping::one, world.size, world.rank);
  const std::string was = read_all(path), other = dir + "/other.safetensors";
  if (world.rank == 0) write_all(other + ".tmp", "mine");
  barrier();
  std::string error;
  {
    Hook hook([&](const char* call, const std::string&) {
      return world.rank == world.size - 1 && std::string(call) == "fsync" ? ENOSPC : 0;
    });
    error = error_of([&] { export_safetensors(other, Dtype::f32, dev, world, rank.parts()); });
  }
  CHECK(has(error, strf("--export: rank %d: %s.tmp-", world.size - 1, other.c_str())));
  CHECK(has(error, ": fsync failed: No space left"));
  barrier();
  CHECK(list(dir) == "model.safetensors other.safetensors.tmp");
  CHECK(read_all(path) == was);
  CHECK(read_all(other + ".tmp") == "mine");
  // A weight that is not finite, on one rank.
  {
    std::vector<Part> parts = rank.parts();
    const auto weight = std::find_if(parts.begin(), parts.end(),
                                     [](const Part& p) { return p.count > 0 && !std::strcmp(p.kind, "weight"); });
    const bool has_one = world.rank == world.size - 1 && weight != parts.end();
    const float nan = std::nanf("");
    if (has_one) std::memcpy(weight->data, &nan, 4);
    error = error_of([&] { export_safetensors(other, Dtype::f32, dev, world, parts); });
    rank.fill(20);
  }
  CHECK(has(error, strf("--export: rank %d: tensor '", world.size - 1)));
  CHECK(has(error, "' has nan at place "));
  barrier();
  CHECK(list(dir) == "model.safetensors other.safetensors.tmp");
  // A file that is there: known at the start, and when it comes while the model is written. Where the file system
  // cannot rename so that nothing is replaced, too.
  CHECK(has(error_of([&] { check_export(path); }), "--export: " + path + " exists and is not overwritten"));
  CHECK(has(error_of([&] { export_safetensors(path, Dtype::f32, dev, world, rank.parts()); }),
            "--export: rank 0: " + path + ": create failed: File exists"));
  struct Unknown {
    const char* calls;
    int no_rename, no_link;
  };
  const std::vector<Unknown> file_systems = {{"", 0, 0},
                                             {"rename", EINVAL, 0},
                                             {"rename link", EINVAL, EPERM},
                                             {"rename link", ENOSYS, ENOSYS},
                                             {"rename link", EOPNOTSUPP, EOPNOTSUPP}};
  for (const Unknown& unknown : file_systems) {
    CAPTURE(unknown.calls, unknown.no_rename, unknown.no_link);
    {
      Hook hook([&](const char* call, const std::string& to) {
        if (std::string(call) == "truncate") write_all(other, "mine");  // on rank 0
        if (to != other || !has(unknown.calls, call)) return 0;
        return std::string(call) == "link" ? unknown.no_link : unknown.no_rename;
      });
      error = error_of([&] { export_safetensors(other, Dtype::f32, dev, world, rank.parts()); });
    }
    CHECK(has(error, other + ": "));
    CHECK(has(error, "failed: File exists; the model is in " + other + ".tmp-"));
    barrier();
    if (world.rank == 0) {
      CHECK(read_all(other) == "mine");
      const std::string model = error.substr(error.rfind(' ') + 1);
      CHECK(read_all(model).size() > 1000);
      ::unlink(model.c_str()), ::unlink(other.c_str());
      CHECK(list(dir) == "model.safetensors other.safetensors.tmp");
    }
    barrier();
  }
  CHECK(has(error_of([&] { export_safetensors(dir + "/none/x", Dtype::f32, dev, world, rank.parts()); }),
            "--export: rank 0: " + dir + "/none/x.tmp-"));
}
