#include "lib/program/checkpoint_manifest.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "lib/program/checkpoint_directory.h"
#include "lib/program/files.h"

using nlohmann::json;
using ll = long long;

const char* const other_step = "resume from another step with --resume DIR/step-N";

// --------------------------------------------------------------------------------------------------------- checksum

namespace {
constexpr uint64_t prime1 = 0x9E3779B185EBCA87u, prime2 = 0xC2B2AE3D27D4EB4Fu, prime3 = 0x165667B19E3779F9u,
                   prime4 = 0x85EBCA77C2B2AE63u, prime5 = 0x27D4EB2F165667C5u;
uint64_t rotate(uint64_t x, int n) { return x << n | x >> (64 - n); }
uint64_t round_of(uint64_t lane, uint64_t word) { return rotate(lane + word * prime2, 31) * prime1; }
template <class W>
uint64_t word_at(const char* p) {
  W w;
  std::memcpy(&w, p, sizeof w);
  return w;
}
}  // namespace

uint64_t xxh64(const void* data, int64_t bytes, uint64_t seed) {
  const char *p = static_cast<const char*>(data), *end = p + bytes;
  uint64_t h = seed + prime5;
  if (bytes >= 32) {
    uint64_t lanes[4] = {seed + prime1 + prime2, seed + prime2, seed, seed - prime1};
    for (; end - p >= 32; p += 32)
      for (int i = 0; i < 4; i++) lanes[i] = round_of(lanes[i], word_at<uint64_t>(p + 8 * i));
    h = rotate(lanes[0], 1) + rotate(lanes[1], 7) + rotate(lanes[2], 12) + rotate(lanes[3], 18);
    for (uint64_t lane : lanes) h = (h ^ round_of(0, lane)) * prime1 + prime4;
  }
  h += uint64_t(bytes);
  for (; end - p >= 8; p += 8) h = rotate(h ^ round_of(0, word_at<uint64_t>(p)), 27) * prime1 + prime4;
  for (; end - p >= 4; p += 4) h = rotate(h ^ word_at<uint32_t>(p) * prime1, 23) * prime2 + prime3;
  for (; p < end; p++) h = rotate(h ^ word_at<uint8_t>(p) * prime5, 11) * prime1;
  h = (h ^ h >> 33) * prime2;
  h = (h ^ h >> 29) * prime3;
  return h ^ h >> 32;
}

std::string digits_of(uint64_t x) { return strf("%016llx", static_cast<unsigned long long>(x)); }

// -------------------------------------------------------------------------------------------------------- the manifest

namespace {
const std::string seal_key = "\"checksum\":\"", no_seal(16, '0');
}  // namespace

std::string seal(json j) {
  j["checksum"] = no_seal;
  std::string text = j.dump() + "\n";
  const size_t at = text.find(seal_key + no_seal) + seal_key.size();
  return text.replace(at, 16, digits_of(xxh64(text.data(), int64_t(text.size()))));
}

namespace {
bool seal_holds(std::string text) {
  const size_t at = text.find(seal_key);
  if (at == std::string::npos || text.size() < at + seal_key.size() + 16) return false;
  const std::string digits = text.substr(at + seal_key.size(), 16);
  text.replace(at + seal_key.size(), 16, no_seal);
  return digits == digits_of(xxh64(text.data(), int64_t(text.size())));
}

}  // namespace

int64_t elements_of(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t size : shape) n *= size;
  return n;
}

std::string tensor_text(const std::string& tensor, const std::string& kind) {
  if (kind == "weight") return "tensor '" + tensor + "'";
  return strf("tensor '%s' (AdamW's %s)", tensor.c_str(), kind.c_str());
}

Manifest parse_manifest(const std::string& step_dir, const std::string& text) {
  Manifest m;
  m.path = step_dir + "/" + manifest_name;
  REQUIRE_USER(seal_holds(text), "%s: the checksum does not fit: the file is damaged or cut off; %s", m.path.c_str(),
               other_step);
  try {
    const json j = json::parse(text);
    REQUIRE_USER(j.at("version") == checkpoint_version,
                 "%s: written in version %s of the format; this program reads version %d", m.path.c_str(),
                 j.at("version").dump().c_str(), checkpoint_version);
    m.chunk = j.at("chunk_bytes");
    ASSERT(m.chunk > 0 && m.chunk % 4 == 0);
    m.state = j.at("state");
    for (const json& t : j.at("tensors")) m.tensors[t.at("name")].shape = t.at("shape").get<std::vector<int64_t>>();
    for (const json& f : j.at("files")) {
      const size_t file = m.files.size();
      m.files.push_back(step_dir + "/" + f.at("file").get<std::string>());
      m.sizes.push_back(f.at("bytes"));
      for (const json& p : f.at("parts")) {
        const Manifest::Piece piece = {file,          p.at("first"),
                                       p.at("count"), p.at("offset"),
                                       p.at("xxh64"), p.value("dtype", "fp32") == "bf16" ? Dtype::bf16 : Dtype::f32};
        const int64_t bytes = piece.bytes(), chunks = (bytes + m.chunk - 1) / m.chunk;
        ASSERT(piece.count > 0 && piece.offset >= 0 && piece.offset + bytes <= m.sizes.back());
        ASSERT(int64_t(piece.checksums.size()) == 16 * chunks);
        m.tensors.at(p.at("tensor")).pieces[p.at("kind")].push_back(piece);
      }
    }
  } catch (const UsageError&) { throw; } catch (const std::exception& e) {
    throw UsageError(strf("%s: its content makes no sense (%s); %s", m.path.c_str(), e.what(), other_step));
  }
  for (auto& [name, tensor] : m.tensors)
    for (auto& [kind, pieces] : tensor.pieces) {
      std::sort(pieces.begin(), pieces.end(),
                [](const Manifest::Piece& a, const Manifest::Piece& b) { return a.first < b.first; });
      int64_t at = 0;
      for (const Manifest::Piece& p : pieces) {
        if (p.first != at) break;
        at += p.count;
      }
      REQUIRE_USER(at == elements_of(tensor.shape), "%s: %s is incomplete: no file has element %lld; %s",
                   m.path.c_str(), tensor_text(name, kind).c_str(), ll(at), other_step);
    }
  return m;
}

// The tensor that is named is the first one that is incomplete.
void check_size(const Manifest& m, size_t file) {
  struct stat s;
  const bool there = ::stat(m.files[file].c_str(), &s) == 0;
  const int code = errno;
  if (there && int64_t(s.st_size) == m.sizes[file]) return;
  const int64_t size = there ? int64_t(s.st_size) : 0;
  std::string first;
  int64_t lowest = 0, others = 0;
  for (const auto& [name, tensor] : m.tensors)
    for (const auto& [kind, pieces] : tensor.pieces)
      for (const Manifest::Piece& p : pieces) {
        if (p.file != file || p.offset + p.bytes() <= size) continue;
        others += first.empty() ? 0 : 1;
        if (first.empty() || p.offset < lowest) first = tensor_text(name, kind), lowest = p.offset;
      }
  const std::string holds =
      first.empty() ? "" : strf("; it should hold %s and pieces of %lld other tensors", first.c_str(), ll(others));
  if (!there)
    throw UsageError(strf("%s: %s%s; %s", m.files[file].c_str(), std::strerror(code), holds.c_str(), other_step));
  throw UsageError(strf("%s: %lld bytes and not %lld: the file is damaged or cut off%s; %s", m.files[file].c_str(),
                        ll(size), ll(m.sizes[file]), holds.c_str(), other_step));
}

namespace {
std::string read_text(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw UsageError(strf("%s: %s; %s", path.c_str(), std::strerror(errno), other_step));
  files::File file(fd, path);
  std::string text;
  char buffer[1 << 16];
  for (;;) {
    const int64_t n = ::read(fd, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw UsageError(strf("%s: read failed: %s; %s", path.c_str(), std::strerror(errno), other_step));
    if (n == 0) return text;
    text.append(buffer, size_t(n));
  }
}

}  // namespace

std::string read_manifest(const std::string& step_dir) {
  const std::string text = read_text(step_dir + "/" + manifest_name);
  const Manifest m = parse_manifest(step_dir, text);
  for (size_t file = 0; file < m.files.size(); file++) check_size(m, file);
  return text;
}
