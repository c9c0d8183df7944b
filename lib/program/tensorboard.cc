#include "lib/program/tensorboard.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "protozero/pbf_writer.hpp"

#include "lib/device/error.h"
#include "lib/device/nvml.h"
#include "lib/program/checksum.h"
#include "lib/program/telemetry.h"

namespace {

// Fields of tensorflow's messages.
namespace event {
constexpr int wall_time = 1, step = 2, file_version = 3, summary = 5, session_log = 7;
}
namespace summary {
constexpr int value = 1;
namespace of_value {
constexpr int tag = 1, simple_value = 2;
}
}  // namespace summary
namespace session_log {
constexpr int status = 1, start = 1;
}

// TensorBoard takes any file whose name has this part for one of events, and reads them by name. Ours end in their own
// way.
const std::string name_part = "tfevents", name_start = "events.out." + name_part + ".", name_end = ".fsdp";

bool is_events(const std::string& name) { return name.find(name_part) != std::string::npos; }
bool is_ours(const std::string& name) {
  return name.rfind(name_start, 0) == 0 && name.size() > name_end.size() &&
         name.compare(name.size() - name_end.size(), name_end.size(), name_end) == 0;
}

std::string little_endian(uint64_t x, int bytes) {
  std::string text;
  for (int i = 0; i < bytes; i++) text += char(x >> (8 * i) & 0xff);
  return text;
}
// Masked, since records may hold checksums themselves.
std::string masked_checksum(const std::string& data) {
  const uint32_t crc = crc32c(data.data(), int64_t(data.size()));
  return little_endian(uint32_t((crc >> 15 | crc << 17) + 0xa282ead8u), 4);
}

// A name behind those that are there, whatever the clocks of the hosts say.
std::string new_name(const std::vector<std::string>& there) {
  int64_t seconds = int64_t(unix_seconds());
  for (const std::string& name : there)
    seconds = std::max(seconds, 1 + int64_t(std::atoll(name.c_str() + name_start.size())));
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  return strf("%s%010lld.%s.%d%s", name_start.c_str(), static_cast<long long>(seconds), host, int(getpid()),
              name_end.c_str());
}

std::vector<std::string> events_in(const std::string& dir) {
  std::vector<std::string> names = files::names_in(dir);
  names.erase(std::remove_if(names.begin(), names.end(), [](const std::string& n) { return !is_events(n); }),
              names.end());
  return names;
}

}  // namespace

void check_tensorboard(const std::string& dir) {
  struct stat s;
  if (::stat(dir.c_str(), &s) != 0) return;
  REQUIRE_USER(S_ISDIR(s.st_mode), "--tensorboard %s: not a directory; choose another", dir.c_str());
  for (const std::string& name : events_in(dir))
    REQUIRE_USER(is_ours(name),
                 "--tensorboard %s: %s there is another program's; choose a directory for this run alone", dir.c_str(),
                 name.c_str());
}

EventFile::EventFile(const std::string& given, Begin begin, int64_t first_step) {
  const std::string dir = files::without_slash(given);
  check_tensorboard(dir);
  try {
    files::make_dirs(dir);
    const std::vector<std::string> there = events_in(dir);
    file_ = files::open_to_append(dir + "/" + new_name(there));
    if (begin == Begin::anew)
      for (const std::string& name : there) files::remove(dir + "/" + name);
    std::string version, start, status;
    protozero::pbf_writer(version).add_double(event::wall_time, unix_seconds());
    protozero::pbf_writer(version).add_string(event::file_version, "brain.Event:2");
    write(version);
    protozero::pbf_writer(status).add_enum(session_log::status, session_log::start);
    protozero::pbf_writer begun(start);
    begun.add_double(event::wall_time, unix_seconds());
    begun.add_int64(event::step, first_step);
    begun.add_message(event::session_log, status);
    write(start);
  } catch (const UsageError&) { throw; } catch (const Error& e) {
    throw UsageError(strf("--tensorboard: %s", e.what()));
  }
}

void EventFile::write(const std::string& event) {
  const std::string length = little_endian(event.size(), 8);
  files::append_whole(file_.get(), length + masked_checksum(length) + event + masked_checksum(event), &bytes_);
}

void EventFile::add(const StepRecord& r) {
  std::string text;
  protozero::pbf_writer writer(text);
  writer.add_double(event::wall_time, unix_seconds());
  writer.add_int64(event::step, r.step);
  {
    protozero::pbf_writer values(writer, event::summary);
    const auto scalar = [&](const char* tag, double x) {
      protozero::pbf_writer value(values, summary::value);
      value.add_string(summary::of_value::tag, tag);
      value.add_float(summary::of_value::simple_value, float(x));
    };
    scalar("loss/training", r.loss);
    if (!std::isnan(r.val_loss)) scalar("loss/validation", r.val_loss);
    scalar("gradient norm", r.grad_norm);
    scalar("learning rate", r.lr);
    scalar("speed/tokens per second", r.tokens_per_sec);
    scalar("speed/ms per step", r.step_ms);
    if (r.mfu >= 0) scalar("speed/MFU", r.mfu);
    scalar("memory/peak MiB", r.peak_mib);
  }
  write(text);
}
