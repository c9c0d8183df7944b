// Checksums: of checkpoints, by the xxHash library, and how a file writes them, 16 hexadecimal digits; of TensorBoard's
// records, CRC-32C.
#pragma once

#include <cstdint>
#include <string>

uint64_t xxh3(const void* data, int64_t bytes);
uint64_t xxh64(const void* data, int64_t bytes);  // of checkpoints in version 1 of the format
std::string digits_of(uint64_t checksum);
uint32_t crc32c(const void* data, int64_t bytes);  // Castagnoli's polynomial, as in iSCSI (RFC 3720, B.4)
