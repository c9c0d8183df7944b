#include "lib/program/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <random>
#include <utility>

std::function<int(const char* call, const std::string& path)> checkpoint_hook;

namespace files {

void fail(const char* call, const std::string& path, int code) {
  const char* remedy = "";
  if (code == ENOSPC || code == EDQUOT || code == EFBIG) remedy = "; make room there, or choose another place";
  if (code == EACCES || code == EPERM || code == EROFS) remedy = "; check who may write there, or choose another place";
  if (code == ENOENT) remedy = "; the directory must be there, and all ranks must see it";
  if (code == EIO) remedy = "; see what the system's log says about this disk";
  throw FileError(strf("%s: %s failed: %s%s", path.c_str(), call, std::strerror(code), remedy));
}

File::~File() {
  if (fd >= 0) ::close(fd);
}

void File::write(const char* p, int64_t n) {
  while (n > 0) {
    const int64_t done = change("write", path, [&] { return ::write(fd, p, size_t(n)); });
    p += done, n -= done;
  }
}

void File::write_at(const char* p, int64_t n, int64_t offset) {
  while (n > 0) {
    const int64_t done = change("write", path, [&] { return ::pwrite(fd, p, size_t(n), off_t(offset)); });
    p += done, n -= done, offset += done;
  }
}

void File::flush_and_close() {
  change("fsync", path, [&] { return ::fsync(fd); });
  const int closing = std::exchange(fd, -1);
  // Network file systems report here what they could not write. EINTR: closed all the same.
  if (::close(closing) < 0 && errno != EINTR) fail("close", path, errno);
}

namespace {
constexpr int new_file = O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC;  // follows no link either
}

std::unique_ptr<File> create(const std::string& path) {
  return std::make_unique<File>(int(change("open", path, [&] { return ::open(path.c_str(), new_file, 0666); })), path);
}

std::unique_ptr<File> create_unique(const std::string& start) {
  std::random_device random;
  for (;;) {
    const std::string path = start + strf("%08x", random());
    const int64_t fd = change("open", path, [&] { return ::open(path.c_str(), new_file, 0666); }, {EEXIST});
    if (fd >= 0) return std::make_unique<File>(int(fd), path);
  }
}

std::unique_ptr<File> open_to_append(const std::string& path) {
  // Without O_NONBLOCK a FIFO would be waited for until somebody reads it.
  constexpr int flags = O_CREAT | O_APPEND | O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
  auto file =
      std::make_unique<File>(int(change("open", path, [&] { return ::open(path.c_str(), flags, 0666); })), path);
  struct stat s;
  if (::fstat(file->fd, &s) != 0) fail("fstat", path, errno);
  if (!S_ISREG(s.st_mode)) throw Error(path + ": not a regular file");
  return file;
}

std::unique_ptr<File> open_to_read(const std::string& path) {
  // Without O_NONBLOCK a FIFO would be waited for until somebody writes to it.
  const int fd = ::open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  REQUIRE_USER(fd >= 0, "%s cannot be opened: %s", path.c_str(), std::strerror(errno));
  auto file = std::make_unique<File>(fd, path);
  struct stat s;
  REQUIRE_USER(::fstat(fd, &s) == 0 && S_ISREG(s.st_mode), "%s: not a regular file", path.c_str());
  return file;
}

int64_t size_of(const File& file) {
  struct stat s;
  REQUIRE_USER(::fstat(file.fd, &s) == 0, "%s: %s", file.path.c_str(), std::strerror(errno));
  return s.st_size;
}

void read_at(const File& file, char* p, int64_t n, int64_t offset) {
  while (n > 0) {
    const int64_t done = ::pread(file.fd, p, size_t(n), off_t(offset));
    if (done < 0 && errno == EINTR) continue;
    REQUIRE_USER(done > 0, "%s: reading byte %lld failed: %s", file.path.c_str(), static_cast<long long>(offset),
                 done < 0 ? std::strerror(errno) : "the file ends there");
    p += done, n -= done, offset += done;
  }
}

std::string read_all(const std::string& path, int64_t most) {
  const std::unique_ptr<File> file = open_to_read(path);
  const int64_t size = size_of(*file);
  REQUIRE_USER(size <= most, "%s: %lld bytes, more than the %lld that it may have", path.c_str(),
               static_cast<long long>(size), static_cast<long long>(most));
  std::string text(size_t(size), 0);
  read_at(*file, text.data(), size, 0);
  return text;
}

void cut(File* file, int64_t bytes) {
  change("ftruncate", file->path, [&] { return ::ftruncate(file->fd, off_t(bytes)); });
}

void append_whole(File* file, const std::string& piece, int64_t* bytes) {
  try {
    file->write(piece.data(), int64_t(piece.size()));
  } catch (const Error&) {
    try {
      cut(file, *bytes);
    } catch (const Error&) {}  // the first error says it
    throw;
  }
  *bytes += int64_t(piece.size());
}

void require_replaceable(const std::string& path) {
  struct stat s;
  if (::stat(path.c_str(), &s) == 0 && !S_ISREG(s.st_mode))
    throw FileError(path + " is no regular file, and is not replaced; choose another");
  const std::string dir = parent_of(path);
  if (::stat(dir.c_str(), &s) != 0 || !S_ISDIR(s.st_mode)) throw FileError(path + ": there is no directory " + dir);
}

void replace(const std::string& path, const std::string& text) {
  require_replaceable(path);
  std::error_code none;
  const std::string to = std::filesystem::weakly_canonical(path, none);
  const std::unique_ptr<File> file = create_unique(to + ".tmp-");
  try {
    file->write(text.data(), int64_t(text.size()));
    file->flush_and_close();
    rename(file->path, to);
  } catch (...) {
    ::unlink(file->path.c_str());
    throw;
  }
}

std::unique_ptr<File> create_in(const std::string& dir, const std::string& name) {
  const int fd = ::open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  if (fd < 0) fail("open", dir, errno);
  const File open_dir(fd, dir);
  const std::string path = dir + "/" + name;
  return std::make_unique<File>(int(change("open", path, [&] { return ::openat(fd, name.c_str(), new_file, 0666); })),
                                path);
}

void make_dir(const std::string& path) {
  change("mkdir", path, [&] { return ::mkdir(path.c_str(), 0777); }, {EEXIST});
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

std::string make_unique_dir(const std::string& start) {
  std::random_device random;
  for (;;) {
    const std::string path = start + strf("%08x", random());
    const int64_t made = change("mkdir", path, [&] { return ::mkdir(path.c_str(), 0777); }, {EEXIST});
    if (made >= 0) return path;
  }
}

void remove_dir(const std::string& path) {
  change("rmdir", path, [&] { return ::rmdir(path.c_str()); }, {ENOENT});
}

void flush_dir(const std::string& path) {
  const int fd = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) fail("open", path, errno);
  File dir(fd, path);
  // Some file systems know no such thing: EINVAL.
  change("fsync", path, [&] { return ::fsync(fd); }, {EINVAL});
}

void rename(const std::string& from, const std::string& to) {
  change("rename", to, [&] { return ::rename(from.c_str(), to.c_str()); });
}

void rename_new(const std::string& from, const std::string& to) {
  auto without_replacing = [&] { return ::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_NOREPLACE); };
  if (change("rename", to, without_replacing, no_such_rename) >= 0) return;
  // This file system knows no such rename (NFS). Where it knows hard links, one is refused if the name is taken.
  if (change("link", to, [&] { return ::link(from.c_str(), to.c_str()); }, {EPERM, ENOSYS, EOPNOTSUPP}) >= 0) {
    remove(from);
    return;
  }
  if (kind_of(to) != 0) fail("rename", to, EEXIST);
  rename(from, to);
}

void remove(const std::string& path) {
  change("unlink", path, [&] { return ::unlink(path.c_str()); }, {ENOENT});
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

mode_t kind_of(const std::string& path) {
  struct stat s;
  return ::lstat(path.c_str(), &s) == 0 ? s.st_mode & S_IFMT : 0;
}

std::string file_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }
std::string stem(const std::string& path) {
  const std::string file = file_name(path);
  const size_t dot = file.rfind('.');
  return dot == 0 ? file : file.substr(0, dot);
}

std::string parent_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : slash == 0 ? "/" : path.substr(0, slash);
}

std::string without_slash(std::string path) {
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  return path;
}

}  // namespace files
