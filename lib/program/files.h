// Files and directories for what must not be lost: each call is checked, and an error names the call, the path and the
// remedy. What is written survives a machine that goes down once the file, and then its directory, is flushed.
//
//   const std::unique_ptr<files::File> file = files::create_unique("DIR/model.tmp-");
//   file->write(bytes, n);
//   file->flush_and_close();
//   files::rename_new(file->path, "DIR/model");
//   files::flush_dir("DIR");
//
// All functions throw FileError. None follows a link that it creates, renames or removes.
#pragma once

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "lib/device/error.h"

// For tests. Called before every system call that changes the disk or flushes it, with the call's name and the path;
// it may end the process, or return an errno with which the call then fails.
extern std::function<int(const char* call, const std::string& path)> checkpoint_hook;

namespace files {

// What a disk, a file system or who may write there refuses: it may be gone the next time.
struct FileError : Error {
  using Error::Error;
};
[[noreturn]] void fail(const char* call, const std::string& path, int code);

// Makes a system call that changes the disk; all of them pass here. Returns what f returns. `allowed`: each errno that
// is no error: then -1.
template <class F>
int64_t change(const char* call, const std::string& path, F f, const std::vector<int>& allowed = {}) {
  int64_t result = -1;
  int code = checkpoint_hook ? checkpoint_hook(call, path) : 0;
  while (code == 0) {
    result = int64_t(f());
    if (result >= 0) return result;
    if (errno != EINTR) code = errno;
  }
  if (std::find(allowed.begin(), allowed.end(), code) == allowed.end()) fail(call, path, code);
  return -1;
}
// What file systems say that know no renameat2 with flags.
inline const std::vector<int> no_such_rename = {EINVAL, ENOSYS, EOPNOTSUPP};

// Owns a descriptor. What is written is only safe after flush_and_close().
struct File {
  int fd;
  std::string path;
  File(int fd, const std::string& path) : fd(fd), path(path) {}
  ~File();
  File(const File&) = delete;
  void write(const char* p, int64_t n);
  void write_at(const char* p, int64_t n, int64_t offset);
  void flush_and_close();
};

// A file that was not there before: nobody's is written over. Unique: under a name that begins with `start` and that
// nothing had; the caller renames or removes it.
std::unique_ptr<File> create(const std::string& path);
std::unique_ptr<File> create_unique(const std::string& start);
constexpr size_t unique_digits = 8;  // at the end of such a name
// A file that may be there, to write behind what it holds.
std::unique_ptr<File> open_to_append(const std::string& path);
void cut(File* file, int64_t bytes);  // leaves so many
// A file of the user's, perhaps behind links, to be read: a regular one. read_at reads exactly n bytes.
std::unique_ptr<File> open_to_read(const std::string& path);
int64_t size_of(const File& file);
void read_at(const File& file, char* p, int64_t n, int64_t offset);
std::string read_all(const std::string& path, int64_t most);  // of no more than that
// Behind what such a file holds, *bytes, which it counts. What cannot be written whole is cut off again.
void append_whole(File* file, const std::string& piece, int64_t* bytes);
// A regular file's text, behind links too; what is there stays until all of the new is on the disk.
void replace(const std::string& path, const std::string& text);
void require_replaceable(const std::string& path);  // in its directory is nothing of that name, or a regular file
// In a directory that is this program's own: a link in its place is refused.
std::unique_ptr<File> create_in(const std::string& dir, const std::string& name);

void make_dir(const std::string& path);                 // may be there
void make_dirs(const std::string& path);                // with those above it
std::string make_unique_dir(const std::string& start);  // as create_unique; returns its name
void remove_dir(const std::string& path);               // an empty one
void flush_dir(const std::string& path);                // makes what was created, renamed and removed there last
void rename(const std::string& from, const std::string& to);
void rename_new(const std::string& from, const std::string& to);  // unless something has the name: an Error
void remove(const std::string& path);                             // a file or a link, if it is there
std::vector<std::string> names_in(const std::string& dir);        // sorted, without . and ..
mode_t kind_of(const std::string& path);                          // S_IFREG, S_IFLNK...; 0: nothing is there

std::string parent_of(const std::string& path);
std::string file_name(const std::string& path);  // without its directory
std::string stem(const std::string& path);       // and without its ending
std::string without_slash(std::string path);     // at its end

}  // namespace files
