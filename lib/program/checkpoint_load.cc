// Loading: rank 0 reads and checks the manifest for all, then every rank reads the pieces that its parts need.
#include "lib/program/checkpoint.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <utility>

#include "lib/program/checkpoint_manifest.h"
#include "lib/program/checksum.h"
#include "lib/program/files.h"

using nlohmann::json;
using ll = long long;

namespace {

std::string text_of(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t size : shape) text += (text.empty() ? "" : " x ") + std::to_string(size);
  return text.empty() ? "a scalar" : text;
}

std::string list_text(const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size() && i < 3; i++) text += (i ? ", " : "") + names[i];
  return names.size() > 3 ? text + strf(" and %zu more", names.size() - 3) : text;
}

// Names and shapes, both ways. Returns tensors whose moments are wanted and were not saved.
std::vector<std::string> check_tensors(const Manifest& m, const std::vector<Part>& parts) {
  std::vector<std::string> missing, extra, without;
  std::map<std::string, const Part*> wanted;
  for (const Part& p : parts) {
    wanted[p.tensor] = &p;
    const auto found = m.tensors.find(p.tensor);
    const bool there = found != m.tensors.end();
    if (!there || !found->second.pieces.count(p.kind)) {
      // What was frozen was saved without moments.
      const bool was_frozen = there && found->second.pieces.size() == 1 && found->second.pieces.count("weight");
      if (!was_frozen) missing.push_back(tensor_text(p.tensor, p.kind));
      else if (p.kind == std::string("m")) without.push_back("'" + p.tensor + "'");
      continue;
    }
    REQUIRE_USER(found->second.shape == p.shape,
                 "%s: tensor '%s' is %s there and %s in this model; give the options that it was saved with",
                 m.path.c_str(), p.tensor.c_str(), text_of(found->second.shape).c_str(), text_of(p.shape).c_str());
  }
  for (const auto& tensor : m.tensors)
    if (!wanted.count(tensor.first)) extra.push_back("'" + tensor.first + "'");
  REQUIRE_USER(missing.empty(), "%s: there is no %s, which this model has; give the options that it was saved with",
               m.path.c_str(), list_text(missing).c_str());
  REQUIRE_USER(extra.empty(), "%s: it has tensor %s, which this model has not; give the options that it was saved with",
               m.path.c_str(), list_text(extra).c_str());
  return without;
}

// Moments may have been saved in another format than they are wanted in.
void convert(char* to, Dtype to_type, const char* from, Dtype from_type, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    float x;
    bf16 narrow;
    if (from_type == Dtype::bf16) std::memcpy(&narrow, from + 2 * i, 2), x = narrow;
    else std::memcpy(&x, from + 4 * i, 4);
    if (to_type == Dtype::bf16) narrow = bf16(x), std::memcpy(to + 2 * i, &narrow, 2);
    else std::memcpy(to + 4 * i, &x, 4);
  }
}

}  // namespace

void copy_from_host(Stream& s, const Part& p, int64_t at, int64_t n, const char* numbers, char* room) {
  if (!p.rest) return s.copy(p.data + at * size_of(p.dtype), numbers, n * size_of(p.dtype));
  constexpr int64_t half = sizeof(bf16);
  for (int64_t i = 0; i < n; i++) {
    float f;
    std::memcpy(&f, numbers + i * 4, 4);
    const bf16 high = nearest_away(f);
    const int16_t rest = rest_of(f);
    std::memcpy(room + i * half, &high, half), std::memcpy(room + (n + i) * half, &rest, half);
  }
  s.copy(p.data + at * half, room, n * half);
  s.copy(p.rest + at * half, room + n * half, n * half);
}

namespace {

void read_parts(const Manifest& m, Device& dev, const std::vector<Part>& parts) {
  struct Job {
    const Manifest::Piece* piece;
    const Part* part;
  };
  std::vector<Job> jobs;
  for (const Part& part : parts) {
    const auto& kinds = m.tensors.at(part.tensor).pieces;
    const auto pieces = kinds.find(part.kind);
    if (part.count == 0 || pieces == kinds.end()) continue;
    for (const Manifest::Piece& p : pieces->second)
      if (p.first < part.first + part.count && part.first < p.first + p.count) jobs.push_back({&p, &part});
  }
  // Each file once, from front to back.
  std::sort(jobs.begin(), jobs.end(), [](const Job& a, const Job& b) {
    return std::make_pair(a.piece->file, a.piece->offset) < std::make_pair(b.piece->file, b.piece->offset);
  });
  int64_t chunk_bytes = 0;  // of the largest that there is
  for (const Job& job : jobs) chunk_bytes = std::max(chunk_bytes, std::min(m.chunk, job.piece->bytes()));
  HostBuffer<char> buffer(dev, chunk_bytes), converted(dev, 2 * chunk_bytes), halves(dev, 2 * chunk_bytes);
  std::unique_ptr<files::File> file;
  for (const Job& job : jobs) {
    const Manifest::Piece& piece = *job.piece;
    const Part& part = *job.part;
    const std::string& path = m.files[piece.file];
    const std::string tensor = tensor_text(part.tensor, part.kind);
    if (!file || file->path != path) {
      check_size(m, piece.file);
      file = open_of_step(path);
    }
    // The bytes of the piece that the part wants, and the chunks that these lie in.
    const int64_t from = std::max(part.first, piece.first) - piece.first,
                  to = std::min(part.first + part.count, piece.first + piece.count) - piece.first;
    const int64_t size = size_of(piece.dtype);
    for (int64_t chunk = from * size / m.chunk; chunk * m.chunk < to * size; chunk++) {
      const int64_t begin = chunk * m.chunk, end = std::min(begin + m.chunk, piece.bytes());
      for (int64_t at = begin; at < end;) {
        const int64_t n = ::pread(file->fd, buffer.get() + (at - begin), size_t(end - at), off_t(piece.offset + at));
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0)
          throw UsageError(strf("%s: reading %s failed: %s; %s", path.c_str(), tensor.c_str(),
                                n < 0 ? std::strerror(errno) : "the file ends too early", other_step));
        at += n;
      }
      const uint64_t checksum = (m.version == 1 ? xxh64 : xxh3)(buffer.get(), end - begin);
      const bool holds = piece.checksums.compare(size_t(16 * chunk), 16, digits_of(checksum)) == 0;
      REQUIRE_USER(holds, "%s: %s: the checksum of bytes %lld to %lld does not fit: the file is damaged; %s",
                   path.c_str(), tensor.c_str(), ll(piece.offset + begin), ll(piece.offset + end), other_step);
      const int64_t a = std::max(from * size, begin) / size, b = std::min(to * size, end) / size;
      const char* elements = buffer.get() + (a * size - begin);
      if (piece.dtype != part.dtype) {
        convert(converted.get(), part.dtype, elements, piece.dtype, b - a);
        elements = converted.get();
      }
      copy_from_host(dev.compute(), part, piece.first - part.first + a, b - a, elements, halves.get());
      dev.compute().synchronize();
    }
  }
}

// Rank 0 reads and checks the manifest for all.
Manifest manifest_for_all(const std::string& resume, const std::string& save_dir, TextChannel* talk, int rank) {
  std::string error, step_dir, text;
  if (rank == 0) {
    try {
      step_dir = find_checkpoint(resume, save_dir);
      text = read_manifest(step_dir);
    } catch (const Error& e) { error = strf("rank 0: %s", e.what()); }
  }
  error = talk->agree(error);
  if (!error.empty()) throw UsageError(error);
  step_dir = talk->broadcast(step_dir);
  return parse_manifest(step_dir, talk->broadcast(text));
}

}  // namespace

SavedState load_state(const std::string& resume, const std::string& save_dir, const World& world) {
  TextChannel talk(world);
  const Manifest m = manifest_for_all(resume, save_dir, &talk, world.rank);
  return {files::parent_of(m.path), m.state};
}

json load_checkpoint(const std::string& resume, const std::string& save_dir, Device& dev, const World& world,
                     const std::vector<Part>& parts, std::function<void(const std::string&)> note) {
  ASSERT(dev.mode == Mode::run);
  TextChannel talk(world);
  const Manifest m = manifest_for_all(resume, save_dir, &talk, world.rank);
  std::string error;
  std::vector<std::string> without;
  try {
    without = check_tensors(m, parts);
    read_parts(m, dev, parts);
  } catch (const Error& e) { error = strf("rank %d: %s", world.rank, e.what()); }
  error = talk.agree(error);
  if (!error.empty()) throw UsageError(error);
  if (world.rank == 0 && note && !without.empty())
    note(strf("AdamW's moments begin at zero for %s: frozen in the checkpoint", list_text(without).c_str()));
  return m.state;
}
