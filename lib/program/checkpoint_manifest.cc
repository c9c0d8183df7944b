#include "lib/program/checkpoint_manifest.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "lib/program/checked_json.h"
#include "lib/program/checkpoint_directory.h"
#include "lib/program/checksum.h"

using nlohmann::json;
using ll = long long;

const char* const other_step = "resume from another step with --resume DIR/step-N";

// ------------------------------------------------------------------------------------------------------------ the seal

namespace {
const std::string seal_key = "\"checksum\":\"", no_seal(16, '0');

// The version of the format whose checksum holds; 0: the text is damaged.
int sealed_version(std::string text) {
  const size_t at = text.find(seal_key);
  if (at == std::string::npos || text.size() < at + seal_key.size() + 16) return 0;
  const std::string digits = text.substr(at + seal_key.size(), 16);
  text.replace(at + seal_key.size(), 16, no_seal);
  if (digits == digits_of(xxh3(text.data(), int64_t(text.size())))) return 2;
  return digits == digits_of(xxh64(text.data(), int64_t(text.size()))) ? 1 : 0;
}
}  // namespace

std::string seal(json j) {
  j["checksum"] = no_seal;
  std::string text = j.dump() + "\n";
  const size_t at = text.find(seal_key + no_seal) + seal_key.size();
  const auto checksum = j.at("version") == 1 ? xxh64 : xxh3;
  return text.replace(at, 16, digits_of(checksum(text.data(), int64_t(text.size()))));
}

// -------------------------------------------------------------------------------------------------------- the manifest

int64_t elements_of(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t size : shape) n *= size;
  return n;
}

std::string tensor_text(const std::string& tensor, const std::string& kind) {
  if (kind == "weight") return "tensor '" + tensor + "'";
  return strf("tensor '%s' (AdamW's %s)", tensor.c_str(), kind.c_str());
}

namespace {

// Of a list of tensors: all sizes, and their product, are numbers of elements.
std::vector<int64_t> read_shape(const CheckedJson& list) {
  std::vector<int64_t> shape;
  int64_t most = most_exact;
  for (const CheckedJson& size : list.items()) {
    shape.push_back(size.whole(1, most));
    most /= shape.back();
  }
  return shape;
}

// A piece of the manifest's last file.
void read_piece(const CheckedJson& p, int version, Manifest* m) {
  const int64_t size = m->sizes.back();
  const CheckedJson tensor = p.at("tensor"), kind = p.at("kind");
  const auto found = m->tensors.find(tensor.text());
  if (found == m->tensors.end()) tensor.refuse("the name of one of \"tensors\"");
  if (kind.text() != "weight" && kind.text() != "m" && kind.text() != "v") kind.refuse("weight, m or v");
  Manifest::Piece piece = {};
  piece.file = m->files.size() - 1;
  piece.dtype = Dtype::f32;
  if (p.has("dtype")) {
    const std::string& dtype = p.at("dtype").text();
    if (dtype != "fp32" && dtype != "bf16") p.at("dtype").refuse("fp32 or bf16");
    if (dtype == "bf16") piece.dtype = Dtype::bf16;
  }
  piece.first = p.at("first").whole(0, most_exact);
  piece.offset = p.at("offset").whole(0, size);
  piece.count = p.at("count").whole(1, (size - piece.offset) / size_of(piece.dtype));
  const CheckedJson checksums = p.at(version == 1 ? "xxh64" : "xxh3");
  piece.checksums = checksums.text();
  const int64_t chunks = (piece.bytes() - 1) / m->chunk + 1;
  if (int64_t(piece.checksums.size()) / 16 != chunks || piece.checksums.size() % 16 != 0)
    checksums.refuse(strf("16 digits for each of %lld chunks", ll(chunks)));
  found->second.pieces[kind.text()].push_back(std::move(piece));
}

}  // namespace

Manifest parse_manifest(const std::string& step_dir, const std::string& text) {
  Manifest m;
  m.path = step_dir + "/" + manifest_name;
  const int sealed = sealed_version(text);
  REQUIRE_USER(sealed > 0, "%s: the checksum does not fit: the file is damaged or cut off; %s", m.path.c_str(),
               other_step);
  const json j = parse_json(text, m.path, other_step);
  const CheckedJson top(j, m.path, other_step);
  m.version = int(top.at("version").whole(1, 1 << 20));
  REQUIRE_USER(m.version <= checkpoint_version,
               "%s: written in version %d of the format; this program reads versions up to %d", m.path.c_str(),
               m.version, checkpoint_version);
  if (m.version != sealed) top.at("version").refuse(strf("%d, whose checksum it has", sealed));
  m.chunk = top.at("chunk_bytes").whole(4, most_chunk_bytes);
  if (m.chunk % 4 != 0) top.at("chunk_bytes").refuse("a multiple of 4");
  m.state = top.at("state").value();
  for (const CheckedJson& t : top.at("tensors").items())
    m.tensors[t.at("name").text()].shape = read_shape(t.at("shape"));
  for (const CheckedJson& f : top.at("files").items()) {
    // Whoever wrote the manifest may name files of this step, and no others.
    const CheckedJson name = f.at("file");
    if (!is_shard_name(name.text())) name.refuse("rank-N.bin");
    m.files.push_back(step_dir + "/" + name.text());
    m.sizes.push_back(f.at("bytes").whole(0, most_exact));
    for (const CheckedJson& p : f.at("parts").items()) read_piece(p, m.version, &m);
  }
  for (auto& [name, tensor] : m.tensors)
    for (auto& [kind, pieces] : tensor.pieces) {
      std::sort(pieces.begin(), pieces.end(),
                [](const Manifest::Piece& a, const Manifest::Piece& b) { return a.first < b.first; });
      int64_t at = 0;
      for (const Manifest::Piece& p : pieces) {
        if (p.first != at || p.count > elements_of(tensor.shape) - at) break;
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
  const bool there = ::lstat(m.files[file].c_str(), &s) == 0;
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

std::unique_ptr<files::File> open_of_step(const std::string& path) {
  // Neither a link, which may lead anywhere, nor a pipe, which would have us wait.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (fd < 0)
    throw UsageError(
        strf("%s: %s; %s", path.c_str(), errno == ELOOP ? "a link, and not a file" : std::strerror(errno), other_step));
  auto file = std::make_unique<files::File>(fd, path);
  struct stat s;
  REQUIRE_USER(::fstat(fd, &s) == 0 && S_ISREG(s.st_mode), "%s: not a file; %s", path.c_str(), other_step);
  return file;
}

namespace {
std::string read_text(const std::string& path) {
  const std::unique_ptr<files::File> file = open_of_step(path);
  std::string text;
  char buffer[1 << 16];
  for (;;) {
    const int64_t n = ::read(file->fd, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw UsageError(strf("%s: read failed: %s; %s", path.c_str(), std::strerror(errno), other_step));
    if (n == 0) return text;
    text.append(buffer, size_t(n));
    REQUIRE_USER(text.size() < size_t(1) << 30, "%s: more than 1 GiB; %s", path.c_str(), other_step);
  }
}

}  // namespace

std::string read_manifest(const std::string& step_dir) {
  const std::string text = read_text(step_dir + "/" + manifest_name);
  const Manifest m = parse_manifest(step_dir, text);
  for (size_t file = 0; file < m.files.size(); file++) check_size(m, file);
  return text;
}
