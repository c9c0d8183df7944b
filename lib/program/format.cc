#include "lib/program/format.h"

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "lib/device/error.h"

std::string grouped(int64_t n) {
  std::string s = std::to_string(n < 0 ? -n : n);
  for (int64_t at = int64_t(s.size()) - 3; at > 0; at -= 3) s.insert(size_t(at), ",");
  return n < 0 ? "-" + s : s;
}

std::string mib_text(int64_t bytes) { return grouped((bytes + (1 << 19)) >> 20); }

std::string count_text(double n) {
  if (n < 1000) return strf("%.0f", n);
  const char* units[] = {"k", "M", "G", "T", "P", "E"};
  int unit = -1;
  // 999.95 rounds to 1000.0: the next unit takes over before that.
  while (n >= 999.95 && unit < 5) n /= 1000, ++unit;
  return strf("%.1f %s", n, units[unit]);
}

std::string duration_text(double seconds) {
  const int64_t s = std::llround(std::fmin(std::fmax(seconds, 0), 1e12));
  if (s < 60) return strf("%ds", int(s));
  if (s < 3600) return strf("%dm%02ds", int(s / 60), int(s % 60));
  if (s < 86400) return strf("%dh%02dm", int(s / 3600), int(s / 60 % 60));
  return strf("%lldd%02dh", static_cast<long long>(s / 86400), int(s / 3600 % 24));
}
