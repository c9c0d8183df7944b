// Saving: what a rank writes, what rank 0 does after that, and the thread that does both beside the training.
#include "lib/program/checkpoint.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "lib/program/checkpoint_manifest.h"
#include "lib/program/checksum.h"
#include "lib/program/files.h"
#include "lib/program/format.h"

using nlohmann::json;
using ll = long long;

void copy_to_host(Stream& s, char* to, const Part& p, int64_t at, int64_t n) {
  if (!p.rest) return s.copy(to, p.data + at * size_of(p.dtype), n * size_of(p.dtype));
  constexpr int64_t half = sizeof(bf16);
  s.copy(to, p.data + at * half, n * half);
  s.copy(to + n * half, p.rest + at * half, n * half);
}

const char* joined(const Part& p, const char* host, int64_t count, int64_t at, int64_t n, char* room) {
  if (!p.rest) return host + at * size_of(p.dtype);
  const char* const rests = host + count * int64_t(sizeof(bf16));
  for (int64_t i = 0; i < n; i++) {
    bf16 high;
    int16_t rest;
    std::memcpy(&high, host + (at + i) * 2, 2), std::memcpy(&rest, rests + (at + i) * 2, 2);
    const float f = join(high, rest);
    std::memcpy(room + i * 4, &f, 4);
  }
  return room;
}

std::string write_shard(const std::string& dir, int64_t step, int rank, const std::vector<Part>& parts,
                        const char* bytes) {
  const std::string tmp = tmp_of(dir, step), name = strf("rank-%d.bin", rank);
  files::make_dir(tmp);
  const std::unique_ptr<files::File> file = files::create_in(tmp, name);
  json entries = json::array();
  int64_t offset = 0;
  std::vector<char> room(static_cast<size_t>(chunk_bytes));
  for (const Part& p : parts) {
    if (p.count == 0) continue;
    std::string checksums;
    const int64_t size = size_of(p.dtype), most = chunk_bytes / size;
    for (int64_t at = 0; at < p.count; at += most) {
      const int64_t n = std::min(most, p.count - at);
      const char* const numbers = joined(p, bytes + offset, p.count, at, n, room.data());
      checksums += digits_of(xxh3(numbers, n * size));
      file->write(numbers, n * size);
    }
    entries.push_back({{"tensor", p.tensor},
                       {"kind", p.kind},
                       {"first", p.first},
                       {"count", p.count},
                       {"offset", offset},
                       {"dtype", name_of(p.dtype)},
                       {"xxh3", checksums}});
    offset += p.bytes();
  }
  file->flush_and_close();
  files::flush_dir(tmp);
  return json({{"file", name}, {"bytes", offset}, {"parts", entries}}).dump();
}

namespace {
// The new step is safe. What goes loses its name first, so that no half step ever has one. Steps above this one are
// another run's: not counted, not touched. What cannot be removed stops nothing behind it.
std::vector<std::string> remove_old_steps(const std::string& dir, int64_t step, int64_t keep) {
  std::vector<std::string> notes;
  auto attempt = [&](const std::function<void()>& f) {
    try {
      f();
    } catch (const Error& e) { notes.push_back(e.what()); }
  };
  std::vector<int64_t> steps;
  attempt([&] {
    for (const auto& [there, identity] : steps_in(dir))
      if (there <= step) steps.push_back(there);
  });
  std::sort(steps.rbegin(), steps.rend());
  for (size_t i = size_t(keep); keep > 0 && i < steps.size(); i++)
    attempt([&] {
      const std::string old = old_of(dir, steps[i]), now = dir + "/" + name_of_step(steps[i]);
      require_step_files(now);
      remove_step(old);
      files::rename(now, old);
    });
  attempt([&] {
    for (const std::string& left : remove_leftovers(dir)) notes.push_back(left);
  });
  for (std::string& note : notes) note = "an old checkpoint could not be deleted: " + note;
  return notes;
}
}  // namespace

std::vector<std::string> publish(const std::string& dir, int64_t step, int64_t keep,
                                 const std::vector<std::string>& shards, const std::vector<Part>& parts,
                                 const std::string& state) {
  const std::string tmp = tmp_of(dir, step), name = name_of_step(step), path = dir + "/" + name;
  json manifest = {{"format", "fsdp.cu checkpoint"}, {"version", checkpoint_version}, {"step", step},
                   {"ranks", shards.size()},         {"chunk_bytes", chunk_bytes},    {"state", json::parse(state)}};
  for (const std::string& shard : shards) {
    manifest["files"].push_back(json::parse(shard));
    // Written on another host's disk of the same name it would be lost without anyone noticing.
    const json& f = manifest["files"].back();
    const std::string file = tmp + "/" + f["file"].get<std::string>();
    struct stat s;
    if (::stat(file.c_str(), &s) != 0) files::fail("stat", file, errno);
    if (int64_t(s.st_size) != f["bytes"])
      throw Error(strf("%s: %lld bytes and not %lld; all ranks must see the same directory", file.c_str(),
                       ll(s.st_size), f["bytes"].get<ll>()));
  }
  manifest["tensors"] = json::array();
  std::map<std::string, bool> named;
  for (const Part& p : parts)
    if (!std::exchange(named[p.tensor], true)) manifest["tensors"].push_back({{"name", p.tensor}, {"shape", p.shape}});

  const std::string text = seal(manifest);
  const std::unique_ptr<files::File> file = files::create_in(tmp, manifest_name);
  file->write(text.data(), int64_t(text.size()));
  file->flush_and_close();
  files::flush_dir(tmp);

  // A step of that name is there if a run was resumed from before it. They change places in one go; where the file
  // system cannot do that, a kill between two renames leaves the steps before it.
  struct stat s;
  if (::lstat(path.c_str(), &s) == 0) {
    require_step_files(path);
    auto exchange = [&] { return ::renameat2(AT_FDCWD, tmp.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE); };
    if (files::change("exchange", path, exchange, files::no_such_rename) < 0) {
      const std::string old = old_of(dir, step);
      remove_step(old);
      files::rename(path, old);
      files::rename(tmp, path);
    }
  } else {
    files::rename(tmp, path);
  }
  files::flush_dir(dir);
  const std::string link = dir + "/" + tmp_latest_name;
  require_link_to_step(dir + "/" + latest_name);
  files::change("symlink", link, [&] { return ::symlink(name.c_str(), link.c_str()); });
  files::rename(link, dir + "/" + latest_name);
  files::flush_dir(dir);

  return remove_old_steps(dir, step, keep);
}

std::optional<NotFinite> not_finite(const char* weights, int64_t count) {
  for (int64_t i = 0; i < count; i++) {
    float x;
    std::memcpy(&x, weights + i * 4, 4);
    if (!std::isfinite(x)) return NotFinite{i, plain_nan(x)};
  }
  return std::nullopt;
}

void require_finite(const std::string& tensor, const char* weights, int64_t first, int64_t count) {
  if (const auto found = not_finite(weights, count))
    throw Error(strf("tensor '%s' has %g at place %lld: the run has diverged", tensor.c_str(), found->value,
                     ll(first + found->place)));
}

namespace {
// A run that has diverged must not push out the last good step.
void require_finite_weights(const std::vector<Part>& parts, const char* bytes) {
  constexpr int64_t most = 1 << 20;
  std::vector<char> room(most * sizeof(float));
  for (const Part& p : parts) {
    for (int64_t at = 0; std::strcmp(p.kind, "weight") == 0 && at < p.count; at += most) {
      const int64_t n = std::min(most, p.count - at);
      require_finite(p.tensor, joined(p, bytes, p.count, at, n, room.data()), p.first + at, n);
    }
    bytes += p.bytes();
  }
}
}  // namespace

Saver::Saver(Device& dev, const World& world, SaveDirectory to, int64_t keep, std::vector<Part> parts,
             std::function<void(const std::string&)> note)
    : dev_(dev),
      world_(world),
      to_(std::move(to)),
      keep_(keep),
      parts_(std::move(parts)),
      note_(std::move(note)),
      talk_(world),
      ask_(world),
      copies_(dev, Stream::normal),
      begun_(dev),
      copied_(dev) {
  std::string error;
  int64_t bytes = 0;
  for (const Part& p : parts_) bytes += p.bytes();
  try {
    copy_ = std::make_unique<HostBuffer<char>>(dev, bytes);
  } catch (const Error& e) {
    error = strf("--save: no host memory for a copy of rank %d's shard, %.0f MiB: %s", world.rank,
                 double(bytes) / 1048576.0, e.what());
  }
  error = talk_.agree(error);
  if (!error.empty()) throw UsageError(error);
  notes_ = std::move(to_.notes);
  report();
}

Saver::~Saver() {
  if (std::uncaught_exceptions() > 0) talk_.abandon();
  if (writer_.joinable()) writer_.join();
}

void Saver::begin(int64_t step, const json& state, OlderSteps older) {
  ASSERT(dev_.mode == Mode::run);
  if (busy_ && world_.rank == 0 && note_)
    note_(
        strf("step %lld: the checkpoint of step %lld is still being written; training waits for it (a larger "
             "--save-every would not, nor a faster disk)",
             ll(step), ll(step_)));
  finish();
  check();  // what only the next save would hide
  if (!error_.empty()) return;
  dev_.compute().record(begun_);
  copies_.wait(begun_);
  copies_.sleep(delay_ms);
  char* to = copy_->get();
  for (size_t i = 0; i < parts_.size();) {
    const Part& p = parts_[i++];
    int64_t n = p.bytes();
    if (p.rest) {
      copy_to_host(copies_, to, p, 0, p.count);
    } else {
      for (; i < parts_.size() && !parts_[i].rest; n += parts_[i++].bytes())
        if (parts_[i].count > 0 && parts_[i].data != p.data + n) break;
      if (n > 0) copies_.copy(to, p.data, n);
    }
    to += n;
  }
  copies_.record(copied_);
  step_ = step;
  busy_ = true;
  // Outside of what it catches there is nothing that the others could know of.
  writer_ = std::thread([this, step, older, text = state.dump()] {
    or_abort([&] {
      try {
        write(step, text, older);
      } catch (const TextChannel::Abandoned&) {}
      busy_ = false;
    });
  });
}

bool Saver::idle(int64_t step) {
  if (ask_.agree(busy_ ? "busy" : "").empty()) return true;
  if (world_.rank == 0 && note_ && std::exchange(told_, step_) != step_)
    note_(
        strf("step %lld is not saved: the checkpoint of step %lld is still being written (a larger --save-every would "
             "do, or a faster disk)",
             ll(step), ll(step_)));
  return false;
}

void Saver::write(int64_t step, const std::string& state, OlderSteps older) {
  std::string error, shard;
  const std::string ends_run = "!";  // at the beginning of an error that is not the disk's
  try {
#if FSDP_CUDA
    if (dev_.backend == Backend::gpu) CUDA_CHECK(cudaSetDevice(dev_.ordinal));  // a thread starts on device 0
#endif
    synchronize(copied_);
    require_finite_weights(parts_, copy_->get());
    shard = write_shard(to_.dir, step, world_.rank, parts_, copy_->get());
  } catch (const files::FileError& e) { error = strf("rank %d: %s", world_.rank, e.what()); } catch (const Error& e) {
    error = ends_run + strf("rank %d: %s", world_.rank, e.what());
  }
  error = talk_.agree(error);
  const std::vector<std::string> shards = talk_.gather(shard);
  if (world_.rank == 0) {
    bool published = false;
    try {
      if (error.empty()) {
        require_known(to_.dir, to_.known);  // there may be no locks here
        published = true;
        const int64_t keep = older == OlderSteps::rotate ? keep_ : 0;
        notes_ = publish(to_.dir, step, keep, shards, parts_, state);
      }
    } catch (const files::FileError& e) { error = strf("rank 0: %s", e.what()); } catch (const Error& e) {
      error = ends_run + strf("rank 0: %s", e.what());
    }
    try {
      const Steps there = steps_in(to_.dir);  // the step may have its name, though `latest` could not be moved
      if (published && there.count(step)) to_.known[step] = there.at(step);
      if (!error.empty()) remove_leftovers(to_.dir);
    } catch (const Error&) {}  // the next save, or the next start, removes it
  }
  error = talk_.broadcast(error);
  failed_.clear();
  if (error.empty()) return;
  const bool ends = error.compare(0, ends_run.size(), ends_run) == 0;
  (ends ? error_ : failed_) = strf("saving step %lld failed: %s; %s", ll(step),
                                   error.substr(ends ? ends_run.size() : 0).c_str(), way_back(to_.dir).c_str());
}

void Saver::report() {
  // What stays as it is was said.
  for (const std::string& note : std::exchange(notes_, {}))
    if (note_ && world_.rank == 0 && said_.insert(note).second) note_(note);
  if (!error_.empty() && world_.rank == 0) throw Error(error_);
}

void Saver::check() {
  if (busy_) return;
  if (!failed_.empty()) notes_.push_back("warning: " + failed_ + "; training goes on, and the next save tries again");
  report();
}

std::string Saver::finish() {
  if (writer_.joinable()) writer_.join();
  report();
  return failed_;
}
