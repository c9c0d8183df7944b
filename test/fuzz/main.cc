// libFuzzer's entry. The environment names the target: FUZZ=manifest build/fuzz/run test/fuzz/corpus/manifest
#include <cstdint>
#include <cstdlib>

#include "test/fuzz/targets.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const char* const target = std::getenv("FUZZ");
  fuzz(target ? target : "", std::string(reinterpret_cast<const char*>(data), size));
  return 0;
}
