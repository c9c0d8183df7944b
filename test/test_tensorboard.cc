// lib/program/tensorboard.h: what a reader of its own finds in the event files, also behind a run that was killed and
// on a disk that is full.
#include <sys/resource.h>

#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>

#include "protozero/pbf_reader.hpp"

#include "lib/program/checksum.h"
#include "lib/program/process.h"
#include "lib/program/telemetry.h"
#include "lib/program/tensorboard.h"
#include "test/result_rows.h"

namespace {

namespace fs = std::filesystem;

// What TensorBoard would show of a directory.
struct Shown {
  std::map<std::string, std::map<int64_t, float>> scalars;
  int files = 0, half = 0;  // records at the ends of files
};

uint64_t number(const std::string& bytes) {
  uint64_t x = 0;
  std::memcpy(&x, bytes.data(), bytes.size());
  return x;
}
bool is_masked_checksum(const std::string& written, const std::string& data) {
  const uint32_t masked = uint32_t(number(written)) - 0xa282ead8u;
  return (masked >> 17 | masked << 15) == crc32c(data.data(), int64_t(data.size()));
}

void take_event(const std::string& bytes, bool first, Shown* shown) {
  int64_t step = 0;
  std::string version, summary, log;
  double time = 0;
  for (protozero::pbf_reader event(bytes); event.next();) {
    if (event.tag() == 1) time = event.get_double();
    else if (event.tag() == 2) step = event.get_int64();
    else if (event.tag() == 3) version = event.get_string();
    else if (event.tag() == 5) summary = event.get_string();
    else if (event.tag() == 7) log = event.get_string();
    else FAIL("a field that is not known");
  }
  CHECK(time > 1.7e9);
  CHECK(version == (first ? "brain.Event:2" : ""));
  if (!log.empty()) {  // status: start. What was told of this step and later ones is gone
    CHECK(log == std::string("\x08\x01", 2));
    for (auto& [tag, points] : shown->scalars) points.erase(points.lower_bound(step), points.end());
  }
  for (protozero::pbf_reader values(summary); values.next();) {
    REQUIRE(values.tag() == 1);
    protozero::pbf_reader value = values.get_message();
    REQUIRE(value.next(1));
    const std::string tag = value.get_string();
    REQUIRE(value.next(2));
    const float x = value.get_float();
    CHECK(!value.next());
    CHECK(shown->scalars[tag].emplace(step, x).second);
  }
}

Shown read(const std::string& dir) {
  std::vector<std::string> paths;
  for (const auto& entry : fs::directory_iterator(dir)) paths.push_back(entry.path());
  std::sort(paths.begin(), paths.end());
  Shown shown;
  for (const std::string& path : paths) {
    shown.files++;
    const std::string all = read_file(path);
    for (size_t at = 0; at < all.size();) {
      if (all.size() - at < 12) {
        shown.half++;
        break;
      }
      const std::string length = all.substr(at, 8);
      REQUIRE(is_masked_checksum(all.substr(at + 8, 4), length));
      const size_t bytes = size_t(number(length));
      if (all.size() - at < 16 + bytes) {
        shown.half++;
        break;
      }
      const std::string event = all.substr(at + 12, bytes);
      REQUIRE(is_masked_checksum(all.substr(at + 12 + bytes, 4), event));
      take_event(event, at == 0, &shown);
      at += 16 + bytes;
    }
  }
  return shown;
}

StepRecord step(int64_t n, double loss) {
  StepRecord r = {};
  r.step = n, r.loss = loss, r.grad_norm = 2 * loss, r.lr = 0.125, r.step_ms = 16, r.tokens_per_sec = 1e6;
  r.peak_mib = 1024, r.mfu = -1, r.val_loss = std::nan("");
  return r;
}

TelemetryOptions into(const std::string& dir, bool append, int64_t first) {
  TelemetryOptions o;
  o.tensorboard = dir, o.append = append, o.first_step = first, o.total_steps = 100, o.lines = Lines::plain;
  return o;
}

}  // namespace

TEST_CASE("CRC-32C of known vectors", "[tensorboard]") {
  CHECK(crc32c("", 0) == 0);
  CHECK(crc32c("123456789", 9) == 0xe3069283u);  // the check value in catalogues of CRCs
  std::string bytes(32, 0);                      // RFC 3720, B.4
  CHECK(crc32c(bytes.data(), 32) == 0x8a9136aau);
  for (size_t i = 0; i < 32; i++) bytes[i] = char(i);
  CHECK(crc32c(bytes.data(), 32) == 0x46dd794eu);
  CHECK(crc32c(std::string(32, '\xff').data(), 32) == 0x62a8ab43u);
}

TEST_CASE("TensorBoard's files have each step's scalars", "[tensorboard]") {
  const ScratchDirectory dir;
  {
    EventFile events(dir / "a/b", EventFile::Begin::anew, 1);
    events.add(step(1, 5.5));
    StepRecord validated = step(2, std::nan(""));
    validated.val_loss = 4.25, validated.mfu = 0.5;
    events.add(validated);
    events.add(step(int64_t(1) << 40, std::numeric_limits<double>::infinity()));
  }
  const Shown shown = read(dir / "a/b");
  auto& s = const_cast<Shown&>(shown).scalars;
  CHECK(s.size() == 8);
  CHECK(s["loss/training"].size() == 3);
  CHECK(s["loss/training"][1] == 5.5f);
  CHECK(std::isnan(s["loss/training"][2]));
  CHECK(std::isinf(s["loss/training"][int64_t(1) << 40]));
  CHECK(s["loss/validation"] == std::map<int64_t, float>{{2, 4.25f}});
  CHECK(s["speed/MFU"] == std::map<int64_t, float>{{2, 0.5f}});
  CHECK(s["gradient norm"][1] == 11);
  CHECK(s["learning rate"][1] == 0.125f);
  CHECK(s["speed/tokens per second"][1] == 1e6f);
  CHECK(s["speed/ms per step"][1] == 16);
  CHECK(s["memory/peak MiB"][1] == 1024);
}

TEST_CASE("a resumed run's events take the place of those that came after its checkpoint", "[tensorboard]") {
  const ScratchDirectory dir;
  const std::string there = dir / "events";
  {
    Telemetry t(into(there, false, 1), {});
    for (int n = 1; n <= 8; n++) t.step(step(n, n));
  }
  // Killed in the midst of a record.
  const std::string first = fs::directory_iterator(there)->path();
  fs::resize_file(first, fs::file_size(first) - 5);
  const std::string before = read_file(first);
  {
    Telemetry t(into(there, true, 5), {});
    for (int n = 5; n <= 6; n++) t.step(step(n, 10 * n));
  }
  Shown shown = read(there);
  CHECK(shown.files == 2);
  CHECK(shown.half == 1);
  CHECK(read_file(first) == before);
  CHECK(shown.scalars["loss/training"] == std::map<int64_t, float>{{1, 1}, {2, 2}, {3, 3}, {4, 4}, {5, 50}, {6, 60}});
  // One that begins anew leaves nothing of them, and what is no event file is not its own.
  dir.file("events/notes.txt", "mine");
  { Telemetry t(into(there, false, 1), {}); }
  CHECK(read_file(there + "/notes.txt") == "mine");
  fs::remove(there + "/notes.txt");
  shown = read(there);
  CHECK(shown.files == 1);
  CHECK(shown.scalars.empty());
}

TEST_CASE("where a run's events may not go", "[tensorboard]") {
  const ScratchDirectory dir;
  CHECK(error_of<UsageError>([&] { check_tensorboard(dir / "none"); }) == "");
  const std::string file = dir.file("file", "");
  CHECK(error_of<UsageError>([&] { check_tensorboard(file); }) ==
        "--tensorboard " + file + ": not a directory; choose another");
  fs::create_directory(dir / "theirs");
  dir.file("theirs/events.out.tfevents.1700000000.host.1.0", "");
  for (const auto begin : {EventFile::Begin::anew, EventFile::Begin::behind_it})
    CHECK(error_of<UsageError>([&] {
            EventFile(dir / "theirs", begin, 1);
          }).find("1700000000.host.1.0 there is another program's; choose a directory") != std::string::npos);
  CHECK(error_of<UsageError>([&] { EventFile(file + "/x", EventFile::Begin::anew, 1); }).rfind("--tensorboard: ", 0) ==
        0);
}

TEST_CASE("events that a full disk does not take are left out whole", "[tensorboard]") {
  const ScratchDirectory dir;
  rlimit before;
  REQUIRE(getrlimit(RLIMIT_FSIZE, &before) == 0);
  const auto action = std::signal(SIGXFSZ, SIG_IGN);
  std::vector<int> failed;
  {
    EventFile events(dir / "e", EventFile::Begin::anew, 1);
    for (int n = 1; n <= 30; n++) {
      const rlimit small = {1000, before.rlim_max};
      if (n == 2) REQUIRE(setrlimit(RLIMIT_FSIZE, &small) == 0);
      if (n == 20) setrlimit(RLIMIT_FSIZE, &before);  // there is room again
      try {
        events.add(step(n, n));
      } catch (const Error&) { failed.push_back(n); }
    }
  }
  std::signal(SIGXFSZ, action);
  REQUIRE(!failed.empty());
  CHECK(failed.front() > 2);
  CHECK(failed.back() == 19);
  Shown shown = read(dir / "e");
  CHECK(shown.half == 0);
  CHECK(shown.scalars["loss/training"].size() == 30 - failed.size());
  CHECK(shown.scalars["loss/training"].count(30) == 1);
}
