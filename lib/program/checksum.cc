#include "lib/program/checksum.h"

// What GCC 12 says of its own intrinsics, which xxHash uses.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define XXH_INLINE_ALL
#include "xxhash.h"

#include "lib/device/error.h"

uint64_t xxh3(const void* data, int64_t bytes) { return XXH3_64bits(data, size_t(bytes)); }
uint64_t xxh64(const void* data, int64_t bytes) { return XXH64(data, size_t(bytes), 0); }
std::string digits_of(uint64_t x) { return strf("%016llx", static_cast<unsigned long long>(x)); }
