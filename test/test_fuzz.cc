// Inputs that a fuzzer found or that its corpus began with: each is read or refused, and nothing else.
#include <filesystem>
#include <fstream>
#include <sstream>

#include "test/catch.h"
#include "test/fuzz/targets.h"

TEST_CASE("parsers read or refuse what a fuzzer hands them", "[fuzz]") {
  for (const std::string& target : fuzz_targets()) {
    int files = 0;
    for (const auto& entry : std::filesystem::directory_iterator("test/fuzz/corpus/" + target)) {
      INFO(entry.path());
      std::ostringstream bytes;
      bytes << std::ifstream(entry.path(), std::ios::binary).rdbuf();
      CHECK_NOTHROW(fuzz(target, bytes.str()));
      files++;
    }
    INFO(target);
    CHECK(files > 0);
  }
}
