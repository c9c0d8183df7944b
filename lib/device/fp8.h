// 8-bit floats, as tensor cores of Ada, Hopper and later multiply them (Micikevicius et al., "FP8 Formats for Deep
// Learning", 2022): e4m3, with 3 bits behind the point and numbers up to 448, for weights and activations; e5m2, with 2
// and up to 57,344, for gradients, whose sizes differ more. Storage alone: a byte, which these functions read and write
// on the host. Kernels take the toolkit's own casts, which round alike.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "lib/device/dtype.h"

namespace fp8 {

// What shares a scale: a matrix; or each of its rows, and each of its columns for the product that sums along those.
enum class Scaling { tensor, row };
inline int64_t scales(Scaling s, int64_t R, int64_t C) { return s == Scaling::row ? R + C : 1; }

// Where several tensors have their scales one behind the other: so many numbers apart, because cuBLASLt takes a scale
// that is aligned as a buffer is.
constexpr int64_t scale_stride = 64;

// What a GPU's tensor cores take. A scale for each row is what cuBLASLt knows on compute capability 9.0 alone.
enum class Support { none, by_tensor, by_row };
inline Support support(int compute_capability) {
  return compute_capability == 90 ? Support::by_row : compute_capability >= 89 ? Support::by_tensor : Support::none;
}

// exponent: of the smallest normal number. Below it numbers are a fixed distance apart.
struct Format {
  int mantissa_bits, exponent;
  float largest;
  uint8_t largest_code;  // behind it: infinity in e5m2, and not a number
};
// Kernels have this function; the table below is the host's.
HD constexpr float largest_number(Dtype t) { return t == Dtype::e5m2 ? 57344.0f : 448.0f; }
inline constexpr Format e4m3 = {3, -6, largest_number(Dtype::e4m3), 0x7e};
inline constexpr Format e5m2 = {2, -14, largest_number(Dtype::e5m2), 0x7b};
constexpr uint8_t infinity = 0x7c, not_a_number = 0x7f;  // e4m3 has no infinity: there 0x7c is a number
inline const Format& format(Dtype t) { return t == Dtype::e5m2 ? e5m2 : e4m3; }

// The nearest, of two equally near the even one; beyond the largest, the largest. Not a number stays none.
inline uint8_t encode(float x, const Format& f) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint8_t sign = uint8_t(bits >> 24 & 0x80);
  const float a = std::fabs(x);
  if (a != a) return sign | not_a_number;
  if (a >= f.largest) return sign | f.largest_code;
  // A code counts on from one exponent to the next: so many steps of 2^(exponent - mantissa_bits). What is added and
  // taken off leaves a float no bits behind the point.
  const int exponent = std::max(int(bits >> 23 & 0xff) - 127, f.exponent);
  const uint32_t power = uint32_t(127 + f.mantissa_bits - exponent) << 23;
  float steps_in_one;
  std::memcpy(&steps_in_one, &power, 4);
  const int steps = int(a * steps_in_one + 12582912.0f - 12582912.0f);
  return uint8_t(sign + ((exponent - f.exponent) << f.mantissa_bits) + steps);
}

inline float decode(uint8_t code, const Format& f) {
  const int magnitude = code & 0x7f, field = magnitude >> f.mantissa_bits, one = 1 << f.mantissa_bits;
  if (magnitude > f.largest_code) {
    const float x =
        magnitude == infinity ? std::numeric_limits<float>::infinity() : std::numeric_limits<float>::quiet_NaN();
    return code & 0x80 ? -x : x;
  }
  const int steps = field == 0 ? magnitude : one + (magnitude & (one - 1));
  const float a = std::ldexp(float(steps), f.exponent - f.mantissa_bits + std::max(field - 1, 0));
  return code & 0x80 ? -a : a;
}

// What numbers are multiplied by so that the largest of them, `amax`, becomes the format's largest: a normal number,
// and so is its inverse. Of zeros 1.
HD inline float scale_for(float amax, float largest) {
  const float scale = largest / amax;
  return amax == 0 ? 1.0f : scale > 0x1p126f ? 0x1p126f : scale;
}

}  // namespace fp8
