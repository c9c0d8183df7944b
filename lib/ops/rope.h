// The angles of rotary positions (Su et al. 2021): pair i of a head of D numbers turns by angle(i, D) at every
// position.
#pragma once

#include <cmath>
#include <cstdint>

#include "lib/device/dtype.h"

// How Llama 3.1 stretches them to longer texts than it was first trained with (Grattafiori et al. 2024; the formula is
// that of its reference code): pairs whose wave is longer than original_seq / low_freq_factor turn `factor` times
// slower, those whose wave is shorter than original_seq / high_freq_factor as before, and between them a mixture.
struct RopeScaling {
  double factor = 1;  // 1: none
  double low_freq_factor = 1, high_freq_factor = 4;
  int64_t original_seq = 8192;
  bool operator==(const RopeScaling& b) const {
    return factor == b.factor && low_freq_factor == b.low_freq_factor && high_freq_factor == b.high_freq_factor &&
           original_seq == b.original_seq;
  }
};

struct Rope {
  double base = 500000;
  RopeScaling scaling = {};
  HD double angle(int64_t i, int64_t D) const {
    const double plain = pow(base, -2.0 * double(i) / double(D));
    if (scaling.factor == 1) return plain;
    const double waves = double(scaling.original_seq) * plain / 6.283185307179586;  // in original_seq
    double kept = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
    kept = kept < 0 ? 0 : kept > 1 ? 1 : kept;
    return plain * (kept + (1 - kept) / scaling.factor);
  }
};
