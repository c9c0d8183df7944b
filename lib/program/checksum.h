// Checksums of checkpoints, by the xxHash library, and how a file writes them: 16 hexadecimal digits.
#pragma once

#include <cstdint>
#include <string>

uint64_t xxh3(const void* data, int64_t bytes);
uint64_t xxh64(const void* data, int64_t bytes);  // of checkpoints in version 1 of the format
std::string digits_of(uint64_t checksum);
