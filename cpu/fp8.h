// The twins of what lib/ops/ops.h has of fp8: the same scales and the same rounding, so the same bytes as the kernels';
// products of them are exact in fp32, and differ from a GPU's by the order of a sum.
#pragma once

#include <array>

#include "cpu/ops.h"
#include "lib/device/fp8.h"

namespace cpu {

template <class T>
void amax(float* out, const T* x, float* /*partials*/, int64_t n) {
  *out = float(power_sum(GradNorm::inf, x, n));
}

template <class T>
void vector_amax(float* rows, float* columns, const T* x, float* /*partials*/, int64_t R, int64_t C) {
  std::vector<T> column(static_cast<size_t>(R));
  for (int64_t r = 0; r < R && rows; ++r) amax(rows + r, x + r * C, nullptr, C);
  for (int64_t c = 0; c < C && columns; ++c) {
    for (int64_t r = 0; r < R; ++r) column[size_t(r)] = x[r * C + c];
    amax(columns + c, column.data(), nullptr, R);
  }
}

template <class T>
void to_fp8(const ops::Fp8Matrix& to, const T* x, const float* amax, int64_t R, int64_t C) {
  const fp8::Format& format = fp8::format(to.format);
  const bool by_row = to.scaling == fp8::Scaling::row;
  const auto scale_at = [&](int64_t i) { return fp8::scale_for(amax[i], format.largest); };
  const auto cast = [&](uint8_t* codes, int64_t first, int64_t n, int64_t length, int64_t step, int64_t stride) {
    for (int64_t i = 0; i < n && codes; ++i) {
      const int64_t place = by_row ? first + i : 0;
      const float scale = scale_at(place);
      to.unscale[place] = 1 / scale;
      for (int64_t j = 0; j < length; ++j)
        codes[i * length + j] = fp8::encode(float(x[i * step + j * stride]) * scale, format);
    }
  };
  cast(to.rows, 0, R, C, C, 1), cast(to.columns, R, C, R, 1, C);
}

inline void to_e4m3(uint8_t* codes, const float* x, const float* amax, int64_t n) {
  const float scale = fp8::scale_for(*amax, fp8::e4m3.largest);
  for (int64_t i = 0; i < n; ++i) codes[i] = fp8::encode(x[i] * scale, fp8::e4m3);
}
inline void unscales(float* unscale, const float* amax, int64_t n, Dtype format) {
  for (int64_t i = 0; i < n; ++i)
    unscale[i * fp8::scale_stride] = 1 / fp8::scale_for(amax[i], fp8::format(format).largest);
}
inline void transpose_codes(uint8_t* columns, const uint8_t* codes, int64_t R, int64_t C) {
  for (int64_t r = 0; r < R; ++r)
    for (int64_t c = 0; c < C; ++c) columns[c * R + r] = codes[r * C + c];
}

template <class T>
void cast_to_fp8(const ops::Fp8Matrix& to, const T* x, float* amax, int64_t R, int64_t C) {
  cpu::amax(amax, x, nullptr, R * C);
  to_fp8(to, x, amax, R, C);
}
template <class T>
void activation_to_fp8(ops::Activation kind, const ops::Fp8Matrix& to, const T* h, float* amax, float* /*partials*/,
                       int64_t R, int64_t F) {
  std::vector<T> g(size_t(R * F));
  if (kind == ops::Activation::gelu) gelu_forward(g.data(), h, R * F);
  else swiglu_forward(g.data(), h, R, F);
  cast_to_fp8(to, g.data(), amax, R, F);
}
template <class T>
void activation_backward_to_fp8(ops::Activation kind, const ops::Fp8Matrix& to_dh, const ops::Fp8Matrix& to_g,
                                const T* dg, const T* h, float* amax, float* /*partials*/, int64_t R, int64_t F) {
  const int64_t row = kind == ops::Activation::swiglu ? 2 * F : F;
  std::vector<T> g(dg, dg + R * F), dh(h, h + R * row);
  if (kind == ops::Activation::gelu) gelu_backward(g.data(), dh.data(), R * F);
  else swiglu_backward(g.data(), dh.data(), R, F);
  cast_to_fp8(to_dh, dh.data(), amax, R, row);
  cast_to_fp8(to_g, g.data(), amax + 1, R, F);
}

// Of all 256 codes.
inline const std::array<float, 256>& decoded(Dtype t) {
  const auto all = [](const fp8::Format& f) {
    std::array<float, 256> numbers;
    for (int code = 0; code < 256; ++code) numbers[size_t(code)] = fp8::decode(uint8_t(code), f);
    return numbers;
  };
  static const std::array<float, 256> e4m3 = all(fp8::e4m3), e5m2 = all(fp8::e5m2);
  return t == Dtype::e5m2 ? e5m2 : e4m3;
}

template <class T>
void from_fp8(T* x, const ops::Fp8Factor& from, int64_t n) {
  const std::array<float, 256>& number = decoded(from.format);
  for (int64_t i = 0; i < n; ++i) x[i] = T(number[from.data[i]] * *from.unscale);
}

template <class T>
void matmul_fp8(T* z, const ops::Fp8Factor& a, const ops::Fp8Factor& b, const T* bias, const T* residual, int64_t M,
                int64_t N, int64_t K) {
  std::vector<float> factors[2], sum(size_t(M * N));
  const ops::Fp8Factor* const of[] = {&a, &b};
  const int64_t rows[] = {M, N};
  for (int i = 0; i < 2; ++i) {
    const std::array<float, 256>& number = decoded(of[i]->format);
    factors[i].resize(size_t(rows[i] * K));
    for (size_t j = 0; j < factors[i].size(); ++j) factors[i][j] = number[of[i]->data[j]];
  }
  gemm(false, true, M, N, K, factors[0].data(), factors[1].data(), 0, sum.data());
  const bool by_row = a.scaling == fp8::Scaling::row;
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n) {
      const int64_t i = m * N + n;
      const float unscale = a.unscale[by_row ? m : 0] * b.unscale[by_row ? n : 0];
      z[i] = T(sum[size_t(i)] * unscale + (bias ? float(bias[n]) : 0) + (residual ? float(residual[i]) : 0));
    }
}

}  // namespace cpu
