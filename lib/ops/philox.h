// Philox 4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): a keyed bijection of a 128-bit
// counter. Random number i is a pure function of (key, i), so it does not matter who computes it, or in which order.
#pragma once

#include <cmath>

#include "lib/device/dtype.h"

struct Philox4 {
  uint32_t x[4];
};

HD inline Philox4 philox4x32(Philox4 counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * counter.x[0], b = uint64_t(0xCD9E8D57u) * counter.x[2];
    counter = {
        {uint32_t(b >> 32) ^ counter.x[1] ^ key0, uint32_t(b), uint32_t(a >> 32) ^ counter.x[3] ^ key1, uint32_t(a)}};
    key0 += 0x9E3779B9u, key1 += 0xBB67AE85u;
  }
  return counter;
}

struct Normals4 {
  float x[4];
};

// Standard normal numbers 4q .. 4q+3 of a tensor, by Box and Muller (1958): two uniform numbers in (0, 1] make two
// normal ones, a radius and an angle.
HD inline Normals4 philox_normals(uint64_t seed, uint32_t tensor, uint64_t q) {
  const Philox4 u = philox4x32({{uint32_t(q), uint32_t(q >> 32), tensor, 0}}, uint32_t(seed), uint32_t(seed >> 32));
  Normals4 n;
  for (int pair = 0; pair < 2; ++pair) {
    // Half a step above the multiple of 2^-32: never 0, where the logarithm has its pole.
    const float a = float(u.x[2 * pair]) * 0x1p-32f + 0x1p-33f, b = float(u.x[2 * pair + 1]) * 0x1p-32f;
    const float radius = sqrtf(-2.0f * logf(a)), angle = 6.28318531f * b;
    n.x[2 * pair] = radius * cosf(angle), n.x[2 * pair + 1] = radius * sinf(angle);
  }
  return n;
}
