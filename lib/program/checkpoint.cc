#include "lib/program/checkpoint.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <random>
#include <utility>

#include "nlohmann/json.hpp"

using nlohmann::json;
using ll = long long;

std::function<int(const char* call, const std::string& path)> checkpoint_hook;

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

// ----------------------------------------------------------------------------------------------------- system calls

namespace {

std::string hex(uint64_t x) { return strf("%016llx", static_cast<unsigned long long>(x)); }

[[noreturn]] void fail(const char* call, const std::string& path, int code) {
  const char* remedy = "";
  if (code == ENOSPC || code == EDQUOT || code == EFBIG) remedy = "; make room there, or name another place";
  if (code == EACCES || code == EPERM || code == EROFS) remedy = "; see who may write there, or name another place";
  if (code == ENOENT) remedy = "; the directory must be there, and all ranks must see it";
  if (code == EIO) remedy = "; see what the system's log says about this disk";
  throw Error(strf("%s: %s failed: %s%s", path.c_str(), call, std::strerror(code), remedy));
}

// Every change to the disk passes here. Returns what f returns; `allowed` is an errno that is no error: then -1.
template <class F>
int64_t change(const char* call, const std::string& path, F f, int allowed = 0) {
  int64_t result = -1;
  int code = checkpoint_hook ? checkpoint_hook(call, path) : 0;
  while (code == 0) {
    result = int64_t(f());
    if (result >= 0) return result;
    if (errno != EINTR) code = errno;
  }
  if (code != allowed) fail(call, path, code);
  return -1;
}

struct File {
  int fd;
  std::string path;
  // Numbers are written as they lie in memory; x86 and ARM are little endian.
  File(int fd, const std::string& path) : fd(fd), path(path) {}
  ~File() {
    if (fd >= 0) ::close(fd);
  }
  File(const File&) = delete;

  void write(const char* p, int64_t n) {
    while (n > 0) {
      const int64_t done = change("write", path, [&] { return ::write(fd, p, size_t(n)); });
      p += done, n -= done;
    }
  }
  void write_at(const char* p, int64_t n, int64_t offset) {
    while (n > 0) {
      const int64_t done = change("write", path, [&] { return ::pwrite(fd, p, size_t(n), off_t(offset)); });
      p += done, n -= done, offset += done;
    }
  }
  void flush_and_close() {
    change("fsync", path, [&] { return ::fsync(fd); });
    const int closing = std::exchange(fd, -1);
    // Network file systems report here what they could not write. EINTR: closed all the same.
    if (::close(closing) < 0 && errno != EINTR) fail("close", path, errno);
  }
};

// A file that was not there before: nobody's is written over, and no link is followed.
constexpr int new_file = O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC;
int create(const std::string& path) {
  return int(change("open", path, [&] { return ::open(path.c_str(), new_file, 0666); }));
}

// The same under a name that begins with `start` and that nothing had; the caller removes or renames it.
std::string random_digits() {
  std::random_device random;
  return strf("%08x", random());
}
std::unique_ptr<File> create_unique(const std::string& start) {
  for (;;) {
    const std::string path = start + random_digits();
    const int64_t fd = change(
        "open", path, [&] { return ::open(path.c_str(), new_file, 0666); }, EEXIST);
    if (fd >= 0) return std::make_unique<File>(int(fd), path);
  }
}

void remove_file(const std::string& path) {
  change(
      "unlink", path, [&] { return ::unlink(path.c_str()); }, ENOENT);
}

// Makes what was created, renamed and removed in a directory last. Some file systems know no such thing: EINVAL.
void flush_dir(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail("open", path, errno);
  File dir(fd, path);
  change(
      "fsync", path, [&] { return ::fsync(fd); }, EINVAL);
}

void make_dir(const std::string& path) {
  change(
      "mkdir", path, [&] { return ::mkdir(path.c_str(), 0777); }, EEXIST);
}
std::string parent_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}
void make_dirs(const std::string& path) {
  for (size_t at = path.find('/', 1); at != std::string::npos; at = path.find('/', at + 1)) {
    struct stat s;
    const std::string above = path.substr(0, at);
    if (::stat(above.c_str(), &s) == 0) continue;
    make_dir(above);
    flush_dir(parent_of(above));
  }
  make_dir(path);
  flush_dir(parent_of(path));
  struct stat s;
  if (::stat(path.c_str(), &s) != 0 || !S_ISDIR(s.st_mode)) fail("mkdir", path, ENOTDIR);
}

void rename_to(const std::string& from, const std::string& to) {
  change("rename", to, [&] { return ::rename(from.c_str(), to.c_str()); });
}

std::vector<std::string> names_in(const std::string& path) {
  std::vector<std::string> names;
  DIR* dir = ::opendir(path.c_str());
  if (!dir) fail("opendir", path, errno);
  while (const dirent* entry = ::readdir(dir)) {
    const std::string name = entry->d_name;
    if (name != "." && name != "..") names.push_back(name);
  }
  ::closedir(dir);
  std::sort(names.begin(), names.end());
  return names;
}

bool starts_with(const std::string& text, const char* start) { return text.rfind(start, 0) == 0; }

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

// ---------------------------------------------------------------------------------- the names that a save gives out

// Nothing that a user may have put into the directory is written over or removed: a name counts as ours only if it is
// exactly one that a save gives, and what it names is of the kind that a save makes.

bool all_digits(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}
std::string name_of_step(int64_t step) { return strf("step-%lld", ll(step)); }
// -1: the name is not a step's.
int64_t step_of(const std::string& name) {
  if (!starts_with(name, "step-") || name.size() > 23 || !all_digits(name.substr(5))) return -1;
  const int64_t step = std::atoll(name.c_str() + 5);
  return name == name_of_step(step) ? step : -1;
}

const std::string latest = "latest", manifest_name = "manifest.json", tmp_start = ".tmp-", old_start = ".tmp-old-",
                  tmp_latest = ".tmp-latest", probe_start = ".tmp-probe-";
std::string tmp_of(const std::string& dir, int64_t step) { return dir + "/" + tmp_start + name_of_step(step); }
std::string old_of(const std::string& dir, int64_t step) { return dir + "/" + old_start + name_of_step(step); }

bool is_tmp_step(const std::string& name) {
  for (const std::string& start : {old_start, tmp_start})
    if (starts_with(name, start.c_str()) && step_of(name.substr(start.size())) >= 0) return true;
  return false;
}
bool is_file_of_step(const std::string& name) {
  const size_t digits = name.size() < 10 ? 0 : name.size() - 9;
  return name == manifest_name || (digits > 0 && starts_with(name, "rank-") && all_digits(name.substr(5, digits)) &&
                                   name.substr(5 + digits) == ".bin");
}

// What kind of thing has that name itself, links not followed; 0: nothing.
mode_t kind_of(const std::string& path) {
  struct stat s;
  return ::lstat(path.c_str(), &s) == 0 ? s.st_mode & S_IFMT : 0;
}

// Throws Error unless path is a directory of files that a save puts into a step's, and of nothing else.
void require_step_files(const std::string& path) {
  const char* what = "; move it away, or name another directory";
  if (kind_of(path) != S_IFDIR) throw Error(strf("%s is no directory of a checkpoint%s", path.c_str(), what));
  for (const std::string& name : names_in(path))
    if (!is_file_of_step(name) || kind_of(path + "/" + name) != S_IFREG)
      throw Error(strf("%s is no part of a checkpoint%s", (path + "/" + name).c_str(), what));
}

// A step, or what is left of one.
void remove_step(const std::string& path) {
  if (kind_of(path) == 0) return;
  require_step_files(path);
  for (const std::string& name : names_in(path)) remove_file(path + "/" + name);
  change(
      "rmdir", path, [&] { return ::rmdir(path.c_str()); }, ENOENT);
}

// `latest` must be a link to a step wherever it is there: a save replaces it.
void require_link_to_step(const std::string& path) {
  char target[4096];
  const ssize_t n = ::readlink(path.c_str(), target, sizeof target);
  if (n < 0 && errno == ENOENT) return;
  const std::string name(target, n < 0 ? 0 : size_t(n));
  if (step_of(name.substr(name.rfind('/') + 1)) < 0)
    throw Error(strf("%s is no link to a step; move it away, or name another directory", path.c_str()));
}

// What a save that was broken off left in dir.
void remove_leftovers(const std::string& dir) {
  for (const std::string& name : names_in(dir)) {
    const std::string path = dir + "/" + name;
    struct stat s;
    if (is_tmp_step(name)) {
      remove_step(path);
    } else if (name == tmp_latest) {
      require_link_to_step(path);
      remove_file(path);
    } else if (starts_with(name, probe_start.c_str()) && ::lstat(path.c_str(), &s) == 0 && S_ISREG(s.st_mode) &&
               s.st_size <= 1 && name.size() == probe_start.size() + 8) {
      remove_file(path);
    }
  }
}

// Throws Error if a file cannot be made, written and removed in dir now.
void probe(const std::string& dir) {
  std::string path;
  try {
    const std::unique_ptr<File> file = create_unique(dir + "/" + probe_start);
    path = file->path;
    file->write(".", 1);
  } catch (const Error&) {
    if (!path.empty()) ::unlink(path.c_str());
    throw;
  }
  remove_file(path);
}

// Throws Error if another run has saved to dir: a step is there that is not one of `known`.
void require_known(const std::string& dir, const Steps& known) {
  for (const auto& [step, identity] : steps_in(dir)) {
    const auto it = known.find(step);
    if (it == known.end() || it->second != identity)
      throw Error(
          strf("another run has saved %s/%s since this one began, and it stays as it is; give each run a "
               "directory of its own",
               dir.c_str(), name_of_step(step).c_str()));
  }
}

// ---------------------------------------------------------------------------------------------------- the manifest

constexpr int version = 1;
const std::string seal_key = "\"checksum\":\"", no_seal(16, '0');
}  // namespace

std::string seal(json j) {
  j["checksum"] = no_seal;
  std::string text = j.dump() + "\n";
  const size_t at = text.find(seal_key + no_seal) + seal_key.size();
  return text.replace(at, 16, hex(xxh64(text.data(), int64_t(text.size()))));
}

namespace {
bool seal_holds(std::string text) {
  const size_t at = text.find(seal_key);
  if (at == std::string::npos || text.size() < at + seal_key.size() + 16) return false;
  const std::string digits = text.substr(at + seal_key.size(), 16);
  text.replace(at + seal_key.size(), 16, no_seal);
  return digits == hex(xxh64(text.data(), int64_t(text.size())));
}

int64_t numel(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t size : shape) n *= size;
  return n;
}
std::string text_of(const std::vector<int64_t>& shape) {
  std::string text;
  for (int64_t size : shape) text += (text.empty() ? "" : " x ") + std::to_string(size);
  return text.empty() ? "a scalar" : text;
}

struct Piece {
  size_t file;
  int64_t first, count, offset;  // elements of the tensor; bytes in the file
  std::string checksums;
  Dtype dtype;
  int64_t bytes() const { return count * size_of(dtype); }
};
struct Tensor {
  std::vector<int64_t> shape;
  std::map<std::string, std::vector<Piece>> pieces;  // by kind, in order
};
struct Manifest {
  std::string path;
  int64_t chunk = 0;
  std::vector<std::string> files;  // paths
  std::vector<int64_t> sizes;
  std::map<std::string, Tensor> tensors;
  json state;
};

std::string quoted(const std::string& tensor, const std::string& kind) {
  if (kind == "weight") return "tensor '" + tensor + "'";
  return strf("tensor '%s' (AdamW's %s)", tensor.c_str(), kind.c_str());
}

const char* remedy = "resume from another step with --resume DIR/step-N";

Manifest parse(const std::string& step_dir, const std::string& text) {
  Manifest m;
  m.path = step_dir + "/manifest.json";
  REQUIRE_USER(seal_holds(text), "%s: the checksum does not fit: the file is damaged or cut off; %s", m.path.c_str(),
               remedy);
  try {
    const json j = json::parse(text);
    REQUIRE_USER(j.at("version") == version, "%s: written in version %s of the format; this program reads version %d",
                 m.path.c_str(), j.at("version").dump().c_str(), version);
    m.chunk = j.at("chunk_bytes");
    ASSERT(m.chunk > 0 && m.chunk % 4 == 0);
    m.state = j.at("state");
    for (const json& t : j.at("tensors")) m.tensors[t.at("name")].shape = t.at("shape").get<std::vector<int64_t>>();
    for (const json& f : j.at("files")) {
      const size_t file = m.files.size();
      m.files.push_back(step_dir + "/" + f.at("file").get<std::string>());
      m.sizes.push_back(f.at("bytes"));
      for (const json& p : f.at("parts")) {
        const Piece piece = {file,          p.at("first"),
                             p.at("count"), p.at("offset"),
                             p.at("xxh64"), p.value("dtype", "fp32") == "bf16" ? Dtype::bf16 : Dtype::f32};
        const int64_t bytes = piece.bytes(), chunks = (bytes + m.chunk - 1) / m.chunk;
        ASSERT(piece.count > 0 && piece.offset >= 0 && piece.offset + bytes <= m.sizes.back());
        ASSERT(int64_t(piece.checksums.size()) == 16 * chunks);
        m.tensors.at(p.at("tensor")).pieces[p.at("kind")].push_back(piece);
      }
    }
  } catch (const UsageError&) { throw; } catch (const std::exception& e) {
    throw UsageError(strf("%s: its content makes no sense (%s); %s", m.path.c_str(), e.what(), remedy));
  }
  for (auto& [name, tensor] : m.tensors)
    for (auto& [kind, pieces] : tensor.pieces) {
      std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.first < b.first; });
      int64_t at = 0;
      for (const Piece& p : pieces) {
        if (p.first != at) break;
        at += p.count;
      }
      REQUIRE_USER(at == numel(tensor.shape), "%s: %s is not whole: no piece holds element %lld; %s", m.path.c_str(),
                   quoted(name, kind).c_str(), ll(at), remedy);
    }
  return m;
}

// A file's size, before anything is read from it. The tensor that is named is the first one that is not whole.
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
      for (const Piece& p : pieces) {
        if (p.file != file || p.offset + p.bytes() <= size) continue;
        others += first.empty() ? 0 : 1;
        if (first.empty() || p.offset < lowest) first = quoted(name, kind), lowest = p.offset;
      }
  const std::string holds =
      first.empty() ? "" : strf("; it should hold %s and pieces of %lld other tensors", first.c_str(), ll(others));
  if (!there) throw UsageError(strf("%s: %s%s; %s", m.files[file].c_str(), std::strerror(code), holds.c_str(), remedy));
  throw UsageError(strf("%s: %lld bytes and not %lld: the file is damaged or cut off%s; %s", m.files[file].c_str(),
                        ll(size), ll(m.sizes[file]), holds.c_str(), remedy));
}

std::string read_text(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) throw UsageError(strf("%s: %s; %s", path.c_str(), std::strerror(errno), remedy));
  File file(fd, path);
  std::string text;
  char buffer[1 << 16];
  for (;;) {
    const int64_t n = ::read(fd, buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw UsageError(strf("%s: read failed: %s; %s", path.c_str(), std::strerror(errno), remedy));
    if (n == 0) return text;
    text.append(buffer, size_t(n));
  }
}

// Rank 0's work before the others read: the manifest's text, checked, with all files there and as long as they should
// be.
std::string read_manifest(const std::string& step_dir) {
  const std::string text = read_text(step_dir + "/manifest.json");
  const Manifest m = parse(step_dir, text);
  for (size_t file = 0; file < m.files.size(); file++) check_size(m, file);
  return text;
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
      if (!was_frozen) missing.push_back(quoted(p.tensor, p.kind));
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

void read_parts(const Manifest& m, Device& dev, const std::vector<Part>& parts) {
  struct Job {
    const Piece* piece;
    const Part* part;
  };
  std::vector<Job> jobs;
  for (const Part& part : parts) {
    const auto& kinds = m.tensors.at(part.tensor).pieces;
    const auto pieces = kinds.find(part.kind);
    if (part.count == 0 || pieces == kinds.end()) continue;
    for (const Piece& p : pieces->second)
      if (p.first < part.first + part.count && part.first < p.first + p.count) jobs.push_back({&p, &part});
  }
  // Each file once, from front to back.
  std::sort(jobs.begin(), jobs.end(), [](const Job& a, const Job& b) {
    return std::make_pair(a.piece->file, a.piece->offset) < std::make_pair(b.piece->file, b.piece->offset);
  });
  HostBuffer<char> buffer(dev, m.chunk), converted(dev, 2 * m.chunk);
  std::unique_ptr<File> file;
  for (const Job& job : jobs) {
    const Piece& piece = *job.piece;
    const Part& part = *job.part;
    const std::string& path = m.files[piece.file];
    const std::string tensor = quoted(part.tensor, part.kind);
    if (!file || file->path != path) {
      check_size(m, piece.file);
      const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
      if (fd < 0) throw UsageError(strf("%s: %s; %s", path.c_str(), std::strerror(errno), remedy));
      file = std::make_unique<File>(fd, path);
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
                                n < 0 ? std::strerror(errno) : "the file ends too early", remedy));
        at += n;
      }
      const bool holds = piece.checksums.compare(size_t(16 * chunk), 16, hex(xxh64(buffer.get(), end - begin))) == 0;
      REQUIRE_USER(holds, "%s: %s: the checksum of bytes %lld to %lld does not fit: the file is damaged; %s",
                   path.c_str(), tensor.c_str(), ll(piece.offset + begin), ll(piece.offset + end), remedy);
      const int64_t a = std::max(from * size, begin) / size, b = std::min(to * size, end) / size;
      const char* elements = buffer.get() + (a * size - begin);
      if (piece.dtype != part.dtype) {
        convert(converted.get(), part.dtype, elements, piece.dtype, b - a);
        elements = converted.get();
      }
      dev.compute().copy(part.data + (piece.first - part.first + a) * size_of(part.dtype), elements,
                         (b - a) * size_of(part.dtype));
      dev.compute().synchronize();
    }
  }
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------- loading

std::string find_checkpoint(const std::string& resume, const std::string& save_dir) {
  auto has = [](const std::string& path) {
    struct stat s;
    return ::stat(path.c_str(), &s) == 0;
  };
  REQUIRE_USER(resume != "latest" || !save_dir.empty(),
               "--resume latest: of which directory? Give --save DIR, or "
               "--resume DIR");
  const std::string path = without_slash(resume == "latest" ? save_dir : resume);
  REQUIRE_USER(has(path), "--resume %s: %s: %s", resume.c_str(), path.c_str(), std::strerror(errno));
  if (has(path + "/manifest.json")) return path;
  if (has(path + "/latest")) {
    char target[4096];
    const ssize_t n = ::readlink((path + "/latest").c_str(), target, sizeof target);
    // By the step's own name, for whoever reads it in a message.
    const std::string name = n > 0 ? std::string(target, size_t(n)) : "latest";
    return name[0] == '/' ? name : path + "/" + name;
  }
  int64_t newest = -1;
  for (const std::string& name : names_in(path))
    if (has(path + "/" + name + "/manifest.json")) newest = std::max(newest, step_of(name));
  REQUIRE_USER(newest >= 0, "--resume %s: no checkpoint in %s: it has neither manifest.json nor latest nor a step",
               resume.c_str(), path.c_str());
  return path + "/" + name_of_step(newest);
}

Steps steps_in(const std::string& dir) {
  Steps steps;
  struct stat s;
  if (::stat(dir.c_str(), &s) != 0) return steps;
  for (const std::string& name : names_in(dir)) {
    const std::string manifest = dir + "/" + name + "/" + manifest_name;
    if (step_of(name) >= 0 && ::stat(manifest.c_str(), &s) == 0)
      steps[step_of(name)] =
          strf("%llu %lld %ld", static_cast<unsigned long long>(s.st_ino), ll(s.st_mtim.tv_sec), s.st_mtim.tv_nsec);
  }
  return steps;
}

bool in_checkpoint(const std::string& path, const std::string& dir) {
  namespace fs = std::filesystem;
  std::error_code none;
  const bool is_step = fs::exists(dir + "/" + manifest_name, none);
  for (fs::path at = path; at.has_relative_path(); at = at.parent_path()) {
    const std::string name = at.filename();
    if (is_step && fs::equivalent(at, dir, none)) return true;
    if ((name == latest || name == tmp_latest || step_of(name) >= 0 || is_tmp_step(name)) &&
        fs::equivalent(at.parent_path(), dir, none))
      return true;
  }
  return false;
}

Steps check_save(const std::string& dir, const std::string& resume) {
  const std::string to = without_slash(dir);
  Steps steps;
  std::string there;
  struct stat s;
  if (::stat(to.c_str(), &s) == 0) {
    try {
      steps = steps_in(to);
      require_link_to_step(to + "/" + latest);
      for (const std::string& name : names_in(to))
        if (step_of(name) >= 0 && !steps.count(step_of(name)))
          throw Error(strf("%s/%s is no step of a checkpoint: it has no %s; move it away, or name another directory",
                           to.c_str(), name.c_str(), manifest_name.c_str()));
    } catch (const Error& e) { throw UsageError(strf("--save %s: %s", dir.c_str(), e.what())); }
  }
  try {
    there = find_checkpoint(to, to);
  } catch (const UsageError&) { return steps; }  // none
  struct stat a, b;
  const bool goes_on = !resume.empty() && ::stat(to.c_str(), &a) == 0 &&
                       ::stat(parent_of(find_checkpoint(resume, to)).c_str(), &b) == 0 && a.st_dev == b.st_dev &&
                       a.st_ino == b.st_ino;
  REQUIRE_USER(
      goes_on,
      "--save %s: %s is there, of another run; --resume latest goes on from it, and another directory keeps it",
      dir.c_str(), there.c_str());
  return steps;
}

namespace {
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
  return parse(step_dir, talk->broadcast(text));
}
}  // namespace

SavedState load_state(const std::string& resume, const std::string& save_dir, const World& world) {
  TextChannel talk(world);
  const Manifest m = manifest_for_all(resume, save_dir, &talk, world.rank);
  return {parent_of(m.path), m.state};
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

// ----------------------------------------------------------------------------------------------------------- saving

std::string write_shard(const std::string& dir, int64_t step, int rank, const std::vector<Part>& parts,
                        const char* bytes) {
  const std::string tmp = tmp_of(dir, step), name = strf("rank-%d.bin", rank);
  make_dir(tmp);
  File file(create(tmp + "/" + name), tmp + "/" + name);
  json entries = json::array();
  int64_t offset = 0;
  for (const Part& p : parts) {
    if (p.count == 0) continue;
    std::string checksums;
    for (int64_t at = 0; at < p.bytes(); at += chunk_bytes) {
      const int64_t n = std::min(chunk_bytes, p.bytes() - at);
      checksums += hex(xxh64(bytes + offset + at, n));
      file.write(bytes + offset + at, n);
    }
    entries.push_back({{"tensor", p.tensor},
                       {"kind", p.kind},
                       {"first", p.first},
                       {"count", p.count},
                       {"offset", offset},
                       {"dtype", name_of(p.dtype)},
                       {"xxh64", checksums}});
    offset += p.bytes();
  }
  file.flush_and_close();
  flush_dir(tmp);
  return json({{"file", name}, {"bytes", offset}, {"parts", entries}}).dump();
}

std::vector<std::string> publish(const std::string& dir, int64_t step, int64_t keep,
                                 const std::vector<std::string>& shards, const std::vector<Part>& parts,
                                 const std::string& state) {
  const std::string tmp = tmp_of(dir, step), name = name_of_step(step), path = dir + "/" + name;
  json manifest = {{"format", "fsdp.cu checkpoint"}, {"version", version},         {"step", step},
                   {"ranks", shards.size()},         {"chunk_bytes", chunk_bytes}, {"state", json::parse(state)}};
  for (const std::string& shard : shards) {
    manifest["files"].push_back(json::parse(shard));
    // Written on another host's disk of the same name it would be lost without anyone noticing.
    const json& f = manifest["files"].back();
    const std::string file = tmp + "/" + f["file"].get<std::string>();
    struct stat s;
    if (::stat(file.c_str(), &s) != 0) fail("stat", file, errno);
    if (int64_t(s.st_size) != f["bytes"])
      throw Error(strf("%s: %lld bytes and not %lld; all ranks must see the same directory", file.c_str(),
                       ll(s.st_size), f["bytes"].get<ll>()));
  }
  manifest["tensors"] = json::array();
  std::map<std::string, bool> named;
  for (const Part& p : parts)
    if (!std::exchange(named[p.tensor], true)) manifest["tensors"].push_back({{"name", p.tensor}, {"shape", p.shape}});

  const std::string text = seal(manifest);
  File file(create(tmp + "/manifest.json"), tmp + "/manifest.json");
  file.write(text.data(), int64_t(text.size()));
  file.flush_and_close();
  flush_dir(tmp);

  // A step of that name is there if a run was resumed from before it. They change places in one go; where the file
  // system cannot do that, a kill between two renames leaves the steps before it.
  struct stat s;
  if (::lstat(path.c_str(), &s) == 0) {
    require_step_files(path);
    auto exchange = [&] { return ::renameat2(AT_FDCWD, tmp.c_str(), AT_FDCWD, path.c_str(), RENAME_EXCHANGE); };
    if (change("exchange", path, exchange, EINVAL) < 0) {
      const std::string old = old_of(dir, step);
      remove_step(old);
      rename_to(path, old);
      rename_to(tmp, path);
    }
  } else {
    rename_to(tmp, path);
  }
  flush_dir(dir);
  const std::string link = dir + "/" + tmp_latest;
  require_link_to_step(dir + "/" + latest);
  change("symlink", link, [&] { return ::symlink(name.c_str(), link.c_str()); });
  rename_to(link, dir + "/" + latest);
  flush_dir(dir);

  // The new step is safe. What goes loses its name first, so that no half step ever has one. Steps above this one are
  // another run's: not counted, not touched.
  std::vector<std::string> notes;
  try {
    std::vector<int64_t> steps;
    for (const auto& [there, identity] : steps_in(dir))
      if (there <= step) steps.push_back(there);
    std::sort(steps.rbegin(), steps.rend());
    for (size_t i = size_t(keep); keep > 0 && i < steps.size(); i++) {
      const std::string old = old_of(dir, steps[i]), now = dir + "/" + name_of_step(steps[i]);
      require_step_files(now);
      remove_step(old);
      rename_to(now, old);
    }
    remove_leftovers(dir);
  } catch (const Error& e) { notes.push_back(strf("an old checkpoint could not be deleted: %s", e.what())); }
  return notes;
}

namespace {
// A run that has diverged must not push out the last good step.
void require_finite(const std::vector<Part>& parts, const char* bytes) {
  for (const Part& p : parts) {
    for (int64_t i = 0; std::strcmp(p.kind, "weight") == 0 && i < p.count; i++) {
      float x;
      std::memcpy(&x, bytes + i * 4, 4);
      if (!std::isfinite(x))
        throw Error(strf("tensor '%s' has %g at place %lld: the run has diverged", p.tensor.c_str(), double(x),
                         ll(p.first + i)));
    }
    bytes += p.bytes();
  }
}
}  // namespace

DirectoryLock::DirectoryLock(const std::string& dir) : fd_(open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (fd_ < 0 || flock(fd_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;  // else: no locks here
  close(fd_);
  throw Error(strf("another run is saving to %s; give each run a directory of its own", dir.c_str()));
}
DirectoryLock::~DirectoryLock() {
  if (fd_ >= 0) close(fd_);
}

Saver::Saver(Device& dev, const World& world, const std::string& dir, int64_t keep, std::vector<Part> parts,
             std::function<void(const std::string&)> note, std::optional<Steps> found)
    : dev_(dev),
      world_(world),
      dir_(without_slash(dir)),
      keep_(keep),
      parts_(std::move(parts)),
      note_(std::move(note)),
      talk_(world),
      ask_(world),
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
  if (world.rank == 0 && error.empty()) {
    try {
      make_dirs(dir_);
      lock_ = std::make_unique<DirectoryLock>(dir_);
      known_ = found ? *found : steps_in(dir_);
      require_known(dir_, known_);  // another run may have saved and ended before the lock was taken
      remove_leftovers(dir_);
    } catch (const Error& e) { error = strf("--save: %s", e.what()); }
  }
  error = talk_.agree(error);
  if (error.empty()) {
    try {
      probe(dir_);
    } catch (const Error& e) { error = strf("--save: rank %d: %s", world.rank, e.what()); }
    error = talk_.agree(error);
  }
  if (!error.empty()) throw UsageError(error);
}

Saver::~Saver() {
  if (std::uncaught_exceptions() > 0) talk_.abandon();
  if (writer_.joinable()) writer_.join();
}

void Saver::begin(int64_t step, const json& state) {
  ASSERT(dev_.mode == Mode::run);
  if (busy_ && world_.rank == 0 && note_)
    note_(
        strf("step %lld: the checkpoint of step %lld is still being written; training waits for it (a larger "
             "--save-every would not, nor a faster disk)",
             ll(step), ll(step_)));
  finish();
  if (!error_.empty()) return;
  Stream& s = dev_.compute();
  char* to = copy_->get();
  for (size_t i = 0; i < parts_.size();) {
    const char* from = parts_[i].data;
    int64_t n = 0;
    for (; i < parts_.size(); i++) {
      if (parts_[i].count == 0) continue;
      if (n > 0 && parts_[i].data != from + n) break;
      if (n == 0) from = parts_[i].data;
      n += parts_[i].bytes();
    }
    if (n > 0) s.copy(to, from, n);
    to += n;
  }
  s.record(copied_);
  step_ = step;
  busy_ = true;
  // Outside of what it catches there is nothing that the others could know of.
  writer_ = std::thread([this, step, text = state.dump()] {
    or_abort([&] {
      try {
        write(step, text);
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

void Saver::write(int64_t step, const std::string& state) {
  std::string error, shard;
  try {
#if FSDP_CUDA
    if (dev_.backend == Backend::gpu) CUDA_CHECK(cudaSetDevice(dev_.ordinal));  // a thread starts on device 0
#endif
    synchronize(copied_);
    require_finite(parts_, copy_->get());
    shard = write_shard(dir_, step, world_.rank, parts_, copy_->get());
  } catch (const Error& e) { error = strf("rank %d: %s", world_.rank, e.what()); }
  error = talk_.agree(error);
  const std::vector<std::string> shards = talk_.gather(shard);
  if (world_.rank == 0) {
    try {
      if (error.empty()) {
        require_known(dir_, known_);  // there may be no locks here
        notes_ = publish(dir_, step, keep_, shards, parts_, state);
        known_[step] = steps_in(dir_)[step];
      }
    } catch (const Error& e) { error = strf("rank 0: %s", e.what()); }
    if (!error.empty()) {
      try {
        remove_step(tmp_of(dir_, step));
      } catch (const Error&) {}  // the next start removes it
    }
  }
  error = talk_.broadcast(error);
  if (error.empty()) return;
  std::string before;
  try {
    before = "; resume from " + find_checkpoint(dir_, dir_);
  } catch (const Error&) { before = "; there is no earlier one to resume from"; }
  error_ = strf("saving step %lld failed: %s%s", ll(step), error.c_str(), before.c_str());
}

void Saver::report() {
  for (const std::string& note : std::exchange(notes_, {}))
    if (note_) note_(note);
  if (!error_.empty() && world_.rank == 0) throw Error(error_);
}

void Saver::check() {
  if (!busy_) report();
}

void Saver::finish() {
  if (writer_.joinable()) writer_.join();
  report();
}

// ----------------------------------------------------------------------------------------------------------- export

namespace {
// Gives a file its name, unless something has that name.
void rename_new(const std::string& from, const std::string& to) {
  auto rename = [&] { return ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE); };
  if (change("rename", to, rename, EINVAL) >= 0) return;
  // This file system knows no such rename (NFS). Where it knows hard links, one is refused if the name is taken.
  if (change(
          "link", to, [&] { return ::link(from.c_str(), to.c_str()); }, EPERM) >= 0) {
    remove_file(from);
    return;
  }
  if (kind_of(to) != 0) fail("rename", to, EEXIST);
  rename_to(from, to);
}
std::string start_of_export(const std::string& path) { return path + ".tmp-"; }
}  // namespace

void check_export(const std::string& path) {
  try {
    const mode_t kind = kind_of(path);
    if (kind == S_IFDIR) fail("open", path, EISDIR);
    if (kind != 0 && kind != S_IFREG) throw Error(strf("%s is not a regular file; name another file", path.c_str()));
    if (kind != 0) throw Error(strf("%s is there already; remove it, or name another file", path.c_str()));
    const std::unique_ptr<File> file = create_unique(start_of_export(path));
    remove_file(file->path);
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
    const int64_t bytes = numel(p.shape) * size_of(dtype);
    offsets[p.tensor] = end;
    header[p.tensor] = {
        {"dtype", dtype == Dtype::bf16 ? "BF16" : "F32"}, {"shape", p.shape}, {"data_offsets", {end, end + bytes}}};
    end += bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const uint64_t length = text.size();
  const int64_t start = 8 + int64_t(length);

  std::unique_ptr<File> file;
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
    if (kind_of(path) != 0) fail("create", path, EEXIST);
    file = create_unique(start_of_export(path));
    tmp = file->path;
    file->write_at(reinterpret_cast<const char*>(&length), 8, 0);
    file->write_at(text.data(), int64_t(length), 8);
    change("truncate", tmp, [&] { return ::ftruncate(file->fd, off_t(start + end)); });
  });
  tmp = talk.broadcast(tmp);
  together([&] {
    if (world.rank != 0)
      file = std::make_unique<File>(int(change("open", tmp, [&] { return ::open(tmp.c_str(), O_WRONLY | O_CLOEXEC); })),
                                    tmp);
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
    rename_new(tmp, path);
    tmp = path;
    flush_dir(parent_of(path));
  });
}
