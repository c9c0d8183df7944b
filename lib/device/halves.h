// fp32 numbers in two halves, each of 16 bits and at a place of its own: the bf16 nearest to the number, and the rest.
// The rest is the number's lower 16 bits, read as a signed number, so that bits = (high << 16) + rest. Together they
// are the number, bit for bit, in four bytes; what computes in bf16 reads the high halves as they lie, and nobody
// casts.
#pragma once

#include "lib/device/dtype.h"

// Of two bf16 that are as near the one farther from zero, because that is where the rest's sign leads: this is how
// weights are rounded wherever they are (all else: to nearest even).
HD inline bf16 nearest_away(float f) {
  const uint32_t u = bits_of(f);
  bf16 b;
  b.bits = uint16_t((u & 0x7fffffffu) > 0x7f800000u ? u >> 16 | 0x0040u : (u + 0x8000u) >> 16);
  return b;
}
HD inline int16_t rest_of(float f) { return f == f ? int16_t(uint16_t(bits_of(f))) : int16_t(0); }
HD inline float join(bf16 high, int16_t rest) {
  return float_of((uint32_t(high.bits) << 16) + uint32_t(int32_t(rest)));
}

struct Halves {
  bf16* high = nullptr;
  int16_t* rest = nullptr;
  HD Halves operator+(int64_t n) const { return {high + n, rest + n}; }
};

// The number at i, read and written.
HD inline float get(const float* w, int64_t i) { return w[i]; }
HD inline float get(const Halves& w, int64_t i) { return join(w.high[i], w.rest[i]); }
HD inline void put(float* w, int64_t i, float f) { w[i] = f; }
HD inline void put(const Halves& w, int64_t i, float f) { w.high[i] = nearest_away(f), w.rest[i] = rest_of(f); }

// Where fp32 numbers lie: one behind the other, or in halves.
struct Masters {
  float* whole = nullptr;  // null: in halves
  Halves halves;
  Masters() = default;
  Masters(float* whole) : whole(whole) {}
  Masters(const Halves& halves) : halves(halves) {}
  // f(float*) or f(Halves).
  template <class F>
  auto visit(F f) const {
    return whole ? f(whole) : f(halves);
  }
  Masters operator+(int64_t n) const {
    return visit([n](auto w) { return Masters(w + n); });
  }
};
inline float get(const Masters& w, int64_t i) {
  return w.visit([i](auto w) { return get(w, i); });
}
inline void put(const Masters& w, int64_t i, float f) {
  w.visit([=](auto w) { put(w, i, f); });
}
