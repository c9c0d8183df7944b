// A directory that is one run's: who comes second is told who has it.
//
//   const DirectoryLock lock(dir, ".lock", "saving");   // "another run is saving to DIR (host HOST, process PID)..."
#pragma once

#include <string>

// Holds a directory for as long as it lives, and no longer than its process, by a lock on a file of that name in it.
// Throws Error that names the holder if there is one. Where the file system has no locks it holds nothing.
class DirectoryLock {
 public:
  DirectoryLock(const std::string& dir, const std::string& name, const char* doing);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;

 private:
  std::string path_;
  int fd_ = -1;
};
