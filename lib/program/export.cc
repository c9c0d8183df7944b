#include "lib/program/export.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>

#include "nlohmann/json.hpp"

#include "lib/program/checkpoint_manifest.h"
#include "lib/program/files.h"

using nlohmann::json;

namespace {
std::string start_of_export(const std::string& path) { return path + ".tmp-"; }
}  // namespace

void check_export(const std::string& path) {
  try {
    const mode_t kind = files::kind_of(path);
    if (kind == S_IFDIR) files::fail("open", path, EISDIR);
    if (kind != 0 && kind != S_IFREG) throw Error(strf("%s is not a regular file; choose another", path.c_str()));
    if (kind != 0)
      throw Error(strf("%s exists and is not overwritten; remove it or choose another file", path.c_str()));
    const std::unique_ptr<files::File> file = files::create_unique(start_of_export(path));
    files::remove(file->path);
  } catch (const Error& e) { throw Error(strf("--export: %s", e.what())); }
}

void export_safetensors(const std::string& path, Dtype dtype, Device& dev, const World& world,
                        const std::vector<Part>& parts) {
  ASSERT(dev.mode == Mode::run && dtype != Dtype::f64);
  TextChannel talk(world);
  // Every rank knows all tensors and so the same header: its length in 8 bytes, JSON padded with blanks to a multiple
  // of 8, then the tensors in the model's order without gaps.
  json header = {{"__metadata__", {{"format", "pt"}}}};
  std::map<std::string, int64_t> offsets;
  int64_t end = 0;
  for (const Part& p : parts) {
    if (std::strcmp(p.kind, "weight") != 0) continue;
    const int64_t bytes = elements_of(p.shape) * size_of(dtype);
    offsets[p.tensor] = end;
    header[p.tensor] = {
        {"dtype", dtype == Dtype::bf16 ? "BF16" : "F32"}, {"shape", p.shape}, {"data_offsets", {end, end + bytes}}};
    end += bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  const int64_t start = 8 + int64_t(length);

  std::unique_ptr<files::File> file;
  std::string tmp;        // the file's name until it is complete; empty: it is not there yet
  bool complete = false;  // a model that was trained is not thrown away for want of a name
  auto together = [&](auto f) {
    std::string error;
    try {
      f();
    } catch (const Error& e) {
      error = strf("--export: rank %d: %s", world.rank, e.what()) + (complete ? "; the model is in " + tmp : "");
    }
    error = talk.agree(error);
    if (error.empty()) return;
    if (world.rank == 0 && !tmp.empty() && !complete) ::unlink(tmp.c_str());
    throw Error(error);
  };
  together([&] {
    if (world.rank != 0) return;
    if (files::kind_of(path) != 0) files::fail("create", path, EEXIST);
    file = files::create_unique(start_of_export(path));
    tmp = file->path;
    file->write_at(reinterpret_cast<const char*>(&length), 8, 0);
    file->write_at(text.data(), int64_t(length), 8);
    files::change("truncate", tmp, [&] { return ::ftruncate(file->fd, off_t(start + end)); });
  });
  tmp = talk.broadcast(tmp);
  together([&] {
    if (world.rank != 0)
      file = std::make_unique<files::File>(
          int(files::change("open", tmp, [&] { return ::open(tmp.c_str(), O_WRONLY | O_CLOEXEC); })), tmp);
    constexpr int64_t most = 1 << 20;
    HostBuffer<char> buffer(dev, most * 4);
    for (const Part& p : parts) {
      if (std::strcmp(p.kind, "weight") != 0) continue;
      for (int64_t at = 0; at < p.count; at += most) {
        const int64_t n = std::min(most, p.count - at);
        dev.compute().copy(buffer.get(), p.data + at * 4, n * 4);
        dev.compute().synchronize();
        // Narrowed in place: the copy falls behind what is still to be read.
        for (int64_t i = 0; dtype == Dtype::bf16 && i < n; i++) {
          float wide;
          std::memcpy(&wide, buffer.get() + i * 4, 4);
          const bf16 narrow(wide);
          std::memcpy(buffer.get() + i * 2, &narrow, 2);
        }
        file->write_at(buffer.get(), n * size_of(dtype), start + offsets[p.tensor] + (p.first + at) * size_of(dtype));
      }
    }
    file->flush_and_close();
  });
  complete = true;
  together([&] {
    if (world.rank != 0) return;
    files::rename_new(tmp, path);
    tmp = path;
    files::flush_dir(files::parent_of(path));
  });
}
