// Numbers as people read them.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>

std::string count_text(double n);     // 973.2 M
std::string mib_text(int64_t bytes);  // 17,203
inline double mib(int64_t bytes) { return double(bytes) / (1 << 20); }
std::string grouped(int64_t n);             // 101,123
std::string duration_text(double seconds);  // 1m32s
// The same number: printf writes a NaN with its sign, which depends on the instruction that made it.
inline double plain_nan(double x) { return std::isnan(x) ? std::nan("") : x; }
