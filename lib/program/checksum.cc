#include "lib/program/checksum.h"

#include <array>

// What GCC 12 says of its own intrinsics, which xxHash uses.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define XXH_INLINE_ALL
#include "xxhash.h"

#include "lib/device/error.h"

uint64_t xxh3(const void* data, int64_t bytes) { return XXH3_64bits(data, size_t(bytes)); }
uint64_t xxh64(const void* data, int64_t bytes) { return XXH64(data, size_t(bytes), 0); }
std::string digits_of(uint64_t x) { return strf("%016llx", static_cast<unsigned long long>(x)); }

namespace {
// What a byte adds to the remainder; the polynomial's bits are mirrored.
constexpr std::array<uint32_t, 256> remainders() {
  std::array<uint32_t, 256> table = {};
  for (uint32_t byte = 0; byte < 256; byte++) {
    uint32_t rest = byte;
    for (int bit = 0; bit < 8; bit++) rest = rest >> 1 ^ (rest & 1 ? 0x82f63b78u : 0);
    table[byte] = rest;
  }
  return table;
}
}  // namespace

uint32_t crc32c(const void* data, int64_t bytes) {
  static constexpr std::array<uint32_t, 256> table = remainders();
  const auto* p = static_cast<const unsigned char*>(data);
  uint32_t rest = ~0u;
  for (int64_t i = 0; i < bytes; i++) rest = rest >> 8 ^ table[(rest ^ p[i]) & 0xff];
  return ~rest;
}
