// Files and directories of a test's own, where the machine has temporary ones. They go when the test ends.
#pragma once

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

#include "test/catch.h"

// A new directory in `above`.
inline std::string new_directory(const std::filesystem::path& above = std::filesystem::temp_directory_path()) {
  std::string path = (above / "fsdp-test-XXXXXX").string();
  REQUIRE(::mkdtemp(&path[0]) != nullptr);
  return path;
}

class ScratchDirectory {
 public:
  const std::string path;
  ScratchDirectory() : ScratchDirectory(new_directory(), /*mine=*/true) {}
  ScratchDirectory(const ScratchDirectory&) = delete;
  ~ScratchDirectory() {
    std::error_code none;
    if (mine_) std::filesystem::remove_all(path, none);
  }
  std::string operator/(const std::string& name) const { return path + "/" + name; }
  std::string file(const std::string& name, const std::string& bytes) const {
    std::ofstream(*this / name, std::ios::binary) << bytes;
    return *this / name;
  }

 protected:
  ScratchDirectory(std::string path, bool mine) : path(std::move(path)), mine_(mine) {}

 private:
  const bool mine_;  // to remove
};

// Rank 0's, for all ranks of the host. Collective, at its end too.
struct SharedDirectory : ScratchDirectory {
  SharedDirectory()
      : ScratchDirectory(broadcast_text(test_world().rank == 0 ? new_directory() : ""), test_world().rank == 0) {}
  ~SharedDirectory() { barrier(); }
};

// A file in a directory of its own.
struct ScratchFile {
  ScratchDirectory dir;
  std::string path;
  explicit ScratchFile(const std::string& bytes, const std::string& name = "file") : path(dir.file(name, bytes)) {}
};
