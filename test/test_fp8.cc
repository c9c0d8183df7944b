// lib/device/fp8.h and what lib/ops/ops.h makes of it: the formats against their definition, the twins against
// products in fp64, and every kernel against its twin.
#include <cmath>
#include <limits>

#include "cpu/fp8.h"
#include "lib/ops/ops.h"
#include "lib/ops/philox.h"
#include "test/arrays.h"
#include "test/worst.h"

namespace {

using fp8::Scaling;
using ops::Fp8Sums;
constexpr Dtype formats[] = {Dtype::e4m3, Dtype::e5m2};
const float inf = std::numeric_limits<float>::infinity(), not_a_number = std::numeric_limits<float>::quiet_NaN();

template <class T>
std::vector<T> normals(int64_t n, uint64_t seed, double scale = 1) {
  std::vector<T> v(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) v[size_t(i)] = T(float(scale * double(philox_normals(seed, 5, uint64_t(i)).x[0])));
  return v;
}

// x (R,C) cast on the stream's device.
struct Cast {
  std::vector<uint8_t> rows, columns;
  float amax = -1, unscale = -1;
  std::vector<float> amaxes = {}, unscales = {};  // scaled by row: of rows and of columns
};
template <class T>
Cast cast(Stream& s, Dtype format, std::vector<T> x, int64_t R, int64_t C, bool rows = true, bool columns = true,
          Scaling scaling = Scaling::tensor) {
  Arrays a(s);
  std::vector<uint8_t> by_rows(size_t(R * C), 0x55), by_columns(size_t(R * C), 0x55);
  std::vector<float> amax(size_t(fp8::scales(scaling, R, C)), -1), unscale(amax);
  float *largest = a.up(amax), *undo = a.up(unscale);
  const T* numbers = a.up(x);
  if (scaling == Scaling::row)
    ops::vector_amax<T>(s, rows ? largest : nullptr, columns ? largest + R : nullptr, numbers,
                        a.scratch<float>(ops::vector_amax_partials(R, C)), R, C);
  else ops::amax<T>(s, largest, numbers, a.scratch<float>(ops::sum_partials()), R * C);
  ops::to_fp8<T>(s, {format, rows ? a.up(by_rows) : nullptr, columns ? a.up(by_columns) : nullptr, undo, scaling},
                 numbers, largest, R, C);
  a.down();
  s.synchronize();
  return {by_rows, by_columns, amax[0], unscale[0], amax, unscale};
}

// z (M,N) on the stream's device, of x (M,K) in format_x and w (N,K) in e4m3.
struct Problem {
  int64_t M, N, K;
  Dtype format_x = Dtype::e4m3;
  Fp8Sums sums = Fp8Sums::fp32;
  bool bias = false, residual = false, accumulate = false;
  Scaling scaling = Scaling::tensor;
};
template <class T>
std::vector<T> product(Stream& s, const Problem& p) {
  auto x = normals<bf16>(p.M * p.K, 1, 3), w = normals<bf16>(p.N * p.K, 2, 0.1);
  auto z = normals<T>(p.M * p.N, 3), bias = normals<T>(p.N, 4), residual = normals<T>(p.M * p.N, 5);
  Stream& host = test_device(Backend::cpu).compute();
  Cast x8 = cast(host, p.format_x, x, p.M, p.K, true, false, p.scaling);
  Cast w8 = cast(host, Dtype::e4m3, w, p.N, p.K, true, false, p.scaling);
  Arrays a(s);
  T* out = a.up(z);
  ops::matmul_fp8<T>(s, out, {p.format_x, a.up(x8.rows), a.up(x8.unscales), p.scaling},
                     {Dtype::e4m3, a.up(w8.rows), a.up(w8.unscales), p.scaling}, p.sums, p.bias ? a.up(bias) : nullptr,
                     p.accumulate ? out
                     : p.residual ? a.up(residual)
                                  : nullptr,
                     p.M, p.N, p.K);
  a.down();
  s.synchronize();
  return z;
}

// g of h (R,F; of SwiGLU R,2F), or with dg both its gradient dh and g: cast at one go, or written and then cast.
struct Activated {
  Cast g, dh;
};
template <class T>
Activated activated(Stream& s, ops::Activation kind, bool at_once, bool backward, int64_t R, int64_t F) {
  const bool gelu = kind == ops::Activation::gelu;
  const int64_t row = gelu ? F : 2 * F;
  auto h = normals<T>(R * row, 21, 2), dg = normals<T>(R * F, 22, 1e-4);
  const auto h_before = h;
  std::vector<uint8_t> g_rows(size_t(R * F), 0x55), g_columns = g_rows, dh_rows(size_t(R * row), 0x55);
  std::vector<uint8_t> dh_columns = dh_rows;
  std::vector<float> amax(2, -1), unscale(2, -1);
  {
    Arrays a(s);
    T *layer = a.up(h), *gradient = a.up(dg), *g = a.scratch<T>(R * F);
    float *largest = a.up(amax), *undo = a.up(unscale), *partials = a.scratch<float>(2 * ops::sum_partials());
    // As training asks for them: of g the forward reads rows, the backward columns.
    const ops::Fp8Matrix to_g = {Dtype::e4m3, backward ? nullptr : a.up(g_rows), backward ? a.up(g_columns) : nullptr,
                                 undo + (backward ? 1 : 0)};
    const ops::Fp8Matrix to_dh = {Dtype::e5m2, a.up(dh_rows), a.up(dh_columns), undo};
    const auto cast = [&](const ops::Fp8Matrix& to, const T* x, float* most, int64_t C) {
      ops::amax<T>(s, most, x, partials, R * C);
      ops::to_fp8<T>(s, to, x, most, R, C);
    };
    if (at_once && backward)
      ops::activation_backward_to_fp8<T>(s, kind, to_dh, to_g, gradient, layer, largest, partials, R, F);
    else if (at_once) ops::activation_to_fp8<T>(s, kind, to_g, layer, largest, partials, R, F);
    else if (backward) {
      if (gelu) ops::gelu_backward<T>(s, gradient, layer, R * F);
      else ops::swiglu_backward<T>(s, gradient, layer, R, F);
      cast(to_dh, layer, largest, row), cast(to_g, gradient, largest + 1, F);
    } else {
      if (gelu) ops::gelu_forward<T>(s, g, layer, R * F);
      else ops::swiglu_forward<T>(s, g, layer, R, F);
      cast(to_g, g, largest, F);
    }
    a.down();
    s.synchronize();
  }
  if (at_once) CHECK(h == h_before);
  const size_t of_g = backward ? 1 : 0;
  return {{g_rows, g_columns, amax[of_g], unscale[of_g]}, {dh_rows, dh_columns, amax[0], unscale[0]}};
}
template <class T>
void compare_activations(Stream& s, int64_t R, int64_t F) {
  const auto same = [](const Cast& a, const Cast& b) {
    CHECK(a.amax == b.amax);
    CHECK(a.unscale == b.unscale);
    CHECK(a.rows == b.rows);
    CHECK(a.columns == b.columns);
  };
  for (ops::Activation kind : {ops::Activation::gelu, ops::Activation::swiglu})
    for (bool backward : {false, true}) {
      INFO(R << " x " << F << (kind == ops::Activation::gelu ? " gelu" : " swiglu") << (backward ? ", backward" : ""));
      const Activated once = activated<T>(s, kind, true, backward, R, F);
      const Activated twice = activated<T>(s, kind, false, backward, R, F);
      same(once.g, twice.g), same(once.dh, twice.dh);
      CHECK(once.g.amax > 0);
    }
}

}  // namespace

TEST_CASE("fp8: every number is its own nearest, and what lies between goes to the nearer, or to the even", "[fp8]") {
  for (const fp8::Format* f : {&fp8::e4m3, &fp8::e5m2}) {
    INFO("mantissa of " << f->mantissa_bits);
    for (int code = 0; code <= f->largest_code; ++code) {
      const float x = fp8::decode(uint8_t(code), *f);
      CHECK(int(fp8::encode(x, *f)) == code);
      CHECK(int(fp8::encode(-x, *f)) == (code | 0x80));
      CHECK(fp8::decode(uint8_t(code | 0x80), *f) == -x);
      if (code == f->largest_code) continue;
      const float next = fp8::decode(uint8_t(code + 1), *f), middle = (x + next) / 2;
      REQUIRE(next > x);
      CHECK(int(fp8::encode(middle, *f)) == code + code % 2);
      CHECK(int(fp8::encode(std::nextafter(middle, 0.0f), *f)) == code);
      CHECK(int(fp8::encode(std::nextafter(middle, inf), *f)) == code + 1);
    }
    for (float x : {f->largest * 1.5f, 1e30f, inf}) {
      CHECK(int(fp8::encode(x, *f)) == f->largest_code);
      CHECK(int(fp8::encode(-x, *f)) == (f->largest_code | 0x80));
    }
    CHECK(std::isnan(fp8::decode(fp8::encode(not_a_number, *f), *f)));
    CHECK(int(fp8::encode(1e-30f, *f)) == 0);
  }
  // The paper's table 1.
  CHECK(fp8::decode(0x7e, fp8::e4m3) == 448);
  CHECK(fp8::decode(0x08, fp8::e4m3) == 0x1p-6f);
  CHECK(fp8::decode(0x01, fp8::e4m3) == 0x1p-9f);
  CHECK(fp8::decode(0x7b, fp8::e5m2) == 57344);
  CHECK(fp8::decode(0x04, fp8::e5m2) == 0x1p-14f);
  CHECK(fp8::decode(0x01, fp8::e5m2) == 0x1p-16f);
  CHECK(fp8::decode(0x7c, fp8::e5m2) == inf);
}

TEST_CASE("fp8: a matrix's largest number becomes the format's, and the transpose has the same bytes", "[fp8]") {
  Stream& s = test_device(Backend::cpu).compute();
  for (Dtype format : formats) {
    const fp8::Format& f = fp8::format(format);
    const int64_t R = 24, C = 37;
    for (double size : {1e-30, 1e-3, 1.0, 1e20}) {
      const auto x = normals<float>(R * C, 9, size);
      const Cast c = cast(s, format, x, R, C);
      float largest = 0, furthest = 0;
      int most = 0, turned = 0;
      for (int64_t i = 0; i < R * C; ++i) {
        const uint8_t code = c.rows[size_t(i)];
        largest = std::max(largest, std::fabs(x[size_t(i)])), most = std::max(most, code & 0x7f);
        turned += c.columns[size_t(i % C * R + i / C)] != code;
        // Half a step of what is rounded; below the smallest normal number steps are of one size.
        const float back = fp8::decode(code, f) * c.unscale, a = std::fabs(x[size_t(i)]);
        const float step = std::max(a, std::ldexp(c.unscale, f.exponent)) * std::ldexp(1.0f, -f.mantissa_bits - 1);
        furthest = worse(furthest, std::fabs(back - x[size_t(i)]) / step);
      }
      CHECK(c.amax == largest);
      CHECK(most == f.largest_code);
      CHECK(c.unscale == Approx(largest / f.largest));
      CHECK(furthest <= 1.001f);
      CHECK(turned == 0);
    }
    const Cast rows = cast(s, format, normals<float>(R * C, 9), R, C, true, false);
    CHECK(rows.columns == std::vector<uint8_t>(size_t(R * C), 0x55));
  }
}

TEST_CASE("fp8: zeros, an outlier, the smallest numbers, and what is not finite", "[fp8]") {
  Stream& s = test_device(Backend::cpu).compute();
  const int64_t n = 64;
  for (Dtype format : formats) {
    const fp8::Format& f = fp8::format(format);
    const Cast zeros = cast(s, format, std::vector<float>(n, 0.0f), 1, n);
    CHECK(zeros.unscale == 1);
    CHECK(zeros.rows == std::vector<uint8_t>(n, 0));

    // What is 2^20 times smaller than an outlier is lost in e4m3, and kept in e5m2; the outlier is kept in both.
    auto x = normals<float>(n, 3);
    x[5] = 0x1p20f;
    const Cast outlier = cast(s, format, x, 1, n);
    CHECK(fp8::decode(outlier.rows[5], f) * outlier.unscale == Approx(x[5]));
    const float beside = fp8::decode(outlier.rows[6], f) * outlier.unscale;
    if (format == Dtype::e4m3) CHECK(beside == 0);
    else CHECK(beside == Approx(x[6]).epsilon(0.125));

    // Scales stay normal numbers.
    const Cast tiny = cast(s, format, std::vector<float>(n, 1e-44f), 1, n);
    CHECK(std::isnormal(tiny.unscale));
    CHECK(std::isfinite(fp8::decode(tiny.rows[0], f) * tiny.unscale));

    for (float bad : {inf, -inf, not_a_number}) {
      x[5] = bad;
      Cast c = cast(s, format, x, 1, n), ones = cast(s, Dtype::e4m3, std::vector<float>(n, 1.0f), 1, n);
      CHECK(c.amax == inf);
      float z = 0;
      const float* const none = nullptr;
      ops::matmul_fp8<float>(s, &z, {format, c.rows.data(), &c.unscale}, {Dtype::e4m3, ones.rows.data(), &ones.unscale},
                             Fp8Sums::fp32, none, none, 1, 1, n);
      s.synchronize();
      CHECK(!std::isfinite(z));
    }
  }
}

TEST_CASE("fp8: scaled by row, an outlier takes nothing from other rows and columns", "[fp8]") {
  Stream& s = test_device(Backend::cpu).compute();
  const int64_t R = 12, C = 20, row = 3, column = 7;
  const auto x = normals<float>(R * C, 13);
  auto with_outlier = x;
  with_outlier[size_t(row * C + column)] = 0x1p24f;
  const Cast before = cast(s, Dtype::e4m3, x, R, C, true, true, Scaling::row);
  const Cast after = cast(s, Dtype::e4m3, with_outlier, R, C, true, true, Scaling::row);
  const Cast as_a_whole = cast(s, Dtype::e4m3, with_outlier, R, C);
  for (int64_t r = 0; r < R; ++r)
    for (int64_t c = 0; c < C; ++c) {
      const size_t i = size_t(r * C + c), turned = size_t(c * R + r);
      const bool outlier = r == row && c == column;
      INFO("row " << r << ", column " << c);
      if (r != row) CHECK(after.rows[i] == before.rows[i]);
      else if (!outlier) CHECK(fp8::decode(after.rows[i], fp8::e4m3) == 0);
      if (c != column) CHECK(after.columns[turned] == before.columns[turned]);
      else if (!outlier) CHECK(fp8::decode(after.columns[turned], fp8::e4m3) == 0);
      if (outlier) CHECK(fp8::decode(after.rows[i], fp8::e4m3) * after.unscales[size_t(r)] == Approx(0x1p24f));
      else CHECK(fp8::decode(as_a_whole.rows[i], fp8::e4m3) == 0);
    }
  for (int64_t i = 0; i < R + C; ++i)
    if (i != row && i != R + column) CHECK(after.unscales[size_t(i)] == before.unscales[size_t(i)]);
  // Multiplied as a whole by a power of two, a row keeps its codes.
  auto y = x;
  for (int64_t c = 0; c < C; ++c) y[size_t(row * C + c)] *= 0x1p20f;
  CHECK(cast(s, Dtype::e4m3, y, R, C, true, false, Scaling::row).rows == before.rows);
  CHECK(cast(s, Dtype::e4m3, y, R, C, true, false, Scaling::tensor).rows != before.rows);
}

TEST_CASE("fp8: a product is that of what its factors stand for", "[fp8]") {
  Stream& s = test_device(Backend::cpu).compute();
  for (Dtype format : formats) {
    const int64_t M = 5, N = 12, K = 40;
    const auto x = normals<bf16>(M * K, 1, 3), w = normals<bf16>(N * K, 2, 0.1);
    const auto bias = normals<float>(N, 4), residual = normals<float>(M * N, 5), before = normals<float>(M * N, 3);
    for (int way = 0; way < 8; ++way) {
      Problem p{M, N, K, format};
      p.bias = way % 4 == 1, p.residual = way % 4 == 2, p.accumulate = way % 4 == 3;
      p.scaling = way < 4 ? Scaling::tensor : Scaling::row;
      const bool by_row = p.scaling == Scaling::row;
      const Cast x8 = cast(s, format, x, M, K, true, false, p.scaling);
      const Cast w8 = cast(s, Dtype::e4m3, w, N, K, true, false, p.scaling);
      const auto z = product<float>(s, p);
      double apart = 0;
      for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < N; ++n) {
          double sum = 0;
          for (int64_t k = 0; k < K; ++k)
            sum += double(fp8::decode(x8.rows[size_t(m * K + k)], fp8::format(format))) *
                   double(fp8::decode(w8.rows[size_t(n * K + k)], fp8::e4m3));
          sum *= double(x8.unscales[size_t(by_row ? m : 0)]) * double(w8.unscales[size_t(by_row ? n : 0)]);
          const size_t i = size_t(m * N + n);
          if (p.bias) sum += double(bias[size_t(n)]);
          if (p.residual) sum += double(residual[i]);
          if (p.accumulate) sum += double(before[i]);
          apart = worse(apart, std::fabs(sum - double(z[i])));
        }
      CHECK(apart < 1e-5);
    }
  }
}

// --------------------------------------------------------------------------------------------------------------- GPU

namespace {

bool has_fp8() { return have_gpu() && test_device(Backend::gpu).compute_capability >= 89; }

void compare_casts(int64_t R, int64_t C, double scale) {
  Stream &gpu = test_device(Backend::gpu).compute(), &cpu = test_device(Backend::cpu).compute();
  const auto x = normals<bf16>(R * C, uint64_t(R + C), scale);
  for (Dtype format : formats)
    for (Scaling scaling : {Scaling::tensor, Scaling::row})
      for (int sides = 1; sides < 4; ++sides) {
        INFO(R << " x " << C << " in " << name_of(format) << ", sides " << sides << ", by row "
               << (scaling == Scaling::row));
        const Cast here = cast(cpu, format, x, R, C, sides & 1, sides & 2, scaling);
        const Cast there = cast(gpu, format, x, R, C, sides & 1, sides & 2, scaling);
        CHECK(there.amaxes == here.amaxes);
        CHECK(there.unscales == here.unscales);
        CHECK(there.rows == here.rows);
        CHECK(there.columns == here.columns);
      }
}

}  // namespace

TEST_CASE("GPU: casts to fp8", "[fp8][gpu][small]") {
  if (!has_fp8()) SKIP_TEST("no GPU with fp8");
  for (int64_t R : {16, 128, 272})
    for (int64_t C : {16, 144, 256}) compare_casts(R, C, 1);
  compare_casts(48, 1600, 1e-6);
  compare_casts(1040, 48, 1e30);
  Stream& gpu = test_device(Backend::gpu).compute();
  const Cast zeros = cast(gpu, Dtype::e4m3, std::vector<bf16>(16 * 16, bf16(0.0f)), 16, 16);
  CHECK(zeros.unscale == 1);
  CHECK(zeros.rows == std::vector<uint8_t>(256, 0));
  for (float bad : {inf, not_a_number}) {
    auto x = normals<bf16>(32 * 32, 8);
    x[77] = bf16(bad);
    const Cast c = cast(gpu, Dtype::e5m2, x, 32, 32);
    CHECK(c.amax == inf);
    CHECK(std::isnan(fp8::decode(c.rows[77], fp8::e5m2)));
    const Cast by_row = cast(gpu, Dtype::e5m2, x, 32, 32, true, true, Scaling::row);
    for (int i = 0; i < 32; ++i) {
      CHECK((by_row.amaxes[size_t(i)] == inf) == (i == 77 / 32));
      CHECK((by_row.amaxes[size_t(32 + i)] == inf) == (i == 77 % 32));
    }
  }
}

TEST_CASE("fp8: what an activation makes is cast as if it had been written", "[fp8]") {
  compare_activations<float>(test_device(Backend::cpu).compute(), 7, 20);
  compare_activations<bf16>(test_device(Backend::cpu).compute(), 16, 48);
}
TEST_CASE("GPU: what an activation makes is cast as if it had been written", "[fp8][gpu][small]") {
  if (!has_fp8()) SKIP_TEST("no GPU with fp8");
  for (int64_t R : {16, 144, 272})
    for (int64_t F : {16, 48, 320}) compare_activations<bf16>(test_device(Backend::gpu).compute(), R, F);
  compare_activations<bf16>(test_device(Backend::gpu).compute(), 1040, 3072);
}

template <class T>
std::vector<T> restored(Stream& s, Dtype format, std::vector<uint8_t> codes, float unscale) {
  Arrays a(s);
  std::vector<T> x(codes.size());
  std::vector<float> undo = {unscale};
  ops::from_fp8<T>(s, a.up(x), {format, a.up(codes), a.up(undo)}, int64_t(x.size()));
  a.down();
  s.synchronize();
  return x;
}
TEST_CASE("fp8: what was cast comes back", "[fp8]") {
  Stream& s = test_device(Backend::cpu).compute();
  for (Dtype format : formats) {
    const auto x = normals<float>(96, 11);
    const Cast c = cast(s, format, x, 1, 96);
    const auto back = restored<float>(s, format, c.rows, c.unscale);
    for (size_t i = 0; i < x.size(); ++i) CHECK(back[i] == fp8::decode(c.rows[i], fp8::format(format)) * c.unscale);
    CHECK(cast(s, format, back, 1, 96).rows == c.rows);
  }
}
TEST_CASE("GPU: what was cast comes back", "[fp8][gpu][small]") {
  if (!has_fp8()) SKIP_TEST("no GPU with fp8");
  std::vector<uint8_t> all(16 * 300);
  for (size_t i = 0; i < all.size(); ++i) all[i] = uint8_t(i * 7);
  for (Dtype format : formats) {
    // Without what is not a number, which equals nothing.
    for (uint8_t& code : all)
      if ((code & 0x7f) > fp8::format(format).largest_code) code = 1;
    Stream &gpu = test_device(Backend::gpu).compute(), &cpu = test_device(Backend::cpu).compute();
    const auto here = restored<bf16>(cpu, format, all, 0.37f), there = restored<bf16>(gpu, format, all, 0.37f);
    CHECK(std::memcmp(here.data(), there.data(), here.size() * sizeof(bf16)) == 0);
  }
}

// A weight as ranks gather it: its codes, their transpose, the largest number, and what undoes the scale.
struct Gathered {
  std::vector<uint8_t> codes, columns;
  std::vector<float> amax, unscale;
};
Gathered gathered(Stream& s, int64_t R, int64_t C) {
  auto x = normals<float>(R * C, 17, 0.02);
  Gathered g = {std::vector<uint8_t>(size_t(R * C)), {}, {0}, {0}};
  g.columns = g.codes;
  Arrays a(s);
  const float* master = a.up(x);
  uint8_t* codes = a.up(g.codes);
  float* amax = a.up(g.amax);
  ops::amax<float>(s, amax, master, a.scratch<float>(ops::sum_partials()), R * C);
  ops::to_e4m3(s, codes, master, amax, R * C);
  ops::unscales(s, a.up(g.unscale), amax, 1, Dtype::e4m3);
  ops::transpose_codes(s, a.up(g.columns), codes, R, C);
  a.down();
  s.synchronize();
  return g;
}
TEST_CASE("fp8: a master weight is cast as a matrix is", "[fp8]") {
  Stream& s = test_device(Backend::cpu).compute();
  const Gathered g = gathered(s, 24, 40);
  const Cast c = cast(s, Dtype::e4m3, normals<float>(24 * 40, 17, 0.02), 24, 40);
  CHECK(g.codes == c.rows);
  CHECK(g.columns == c.columns);
  CHECK(g.amax == c.amaxes);
  CHECK(g.unscale == c.unscales);
}
TEST_CASE("GPU: a master weight is cast as a matrix is", "[fp8][gpu][small]") {
  if (!has_fp8()) SKIP_TEST("no GPU with fp8");
  for (int64_t R : {16, 144, 272})
    for (int64_t C : {16, 48, 1040}) {
      INFO(R << " x " << C);
      const Gathered here = gathered(test_device(Backend::cpu).compute(), R, C);
      const Gathered there = gathered(test_device(Backend::gpu).compute(), R, C);
      CHECK(there.codes == here.codes);
      CHECK(there.columns == here.columns);
      CHECK(there.amax == here.amax);
      CHECK(there.unscale == here.unscale);
    }
}

TEST_CASE("GPU: products in fp8", "[fp8][gpu]") {
  if (!has_fp8()) SKIP_TEST("no GPU with fp8");
  Stream &gpu = test_device(Backend::gpu).compute(), &cpu = test_device(Backend::cpu).compute();
  const auto compare = [&](const Problem& p, auto type) {
    using T = decltype(type);
    const auto there = product<T>(gpu, p), here = product<T>(cpu, p);
    double furthest = 0, size = 0;
    for (size_t i = 0; i < here.size(); ++i) {
      furthest = worse(furthest, std::fabs(double(float(there[i])) - double(float(here[i]))));
      size = std::max(size, std::fabs(double(float(here[i]))));
    }
    // bf16 has 8 bits. Fast sums keep about 13 bits of the largest term. Where cuBLAS adds up in fp32, it adds sums
    // that tensor cores have made so: an H200 was off by 2^-11.8.
    CHECK(furthest < size * (std::is_same_v<T, bf16> ? 0x1p-7 : p.sums == Fp8Sums::fast ? 0x1p-8 : 0x1p-11));
    CHECK(std::memcmp(there.data(), product<T>(gpu, p).data(), there.size() * sizeof(T)) == 0);
  };
  for (int64_t M : {16, 144})
    for (int64_t N : {32, 272})
      for (int64_t K : {16, 512})
        for (Dtype format : formats)
          for (Fp8Sums sums : {Fp8Sums::fast, Fp8Sums::fp32}) {
            INFO(M << " x " << N << " x " << K << " in " << name_of(format) << ", sums " << int(sums));
            Problem p{M, N, K, format, sums};
            compare(p, float());
            compare(p, bf16(0.0f));
            p.accumulate = true;
            compare(p, float());
            compare(p, bf16(0.0f));
            p.accumulate = false, p.bias = p.residual = true;
            compare(p, bf16(0.0f));
            if (fp8::support(test_device(Backend::gpu).compute_capability) != fp8::Support::by_row) continue;
            p.scaling = Scaling::row;
            compare(p, bf16(0.0f));
            p.bias = p.residual = false, p.accumulate = true;
            compare(p, float());
          }
}

TEST_CASE("GPU: fp8 of other types than bf16 is refused", "[fp8][gpu]") {
  NEEDS_GPU();
  Stream& s = test_device(Backend::gpu).compute();
  float x = 0;
  double y = 0;
  CHECK_THROWS_AS(ops::amax<double>(s, &x, &y, &x, 1), Error);
  CHECK_THROWS_AS(ops::to_fp8<float>(s, {Dtype::e4m3, nullptr, nullptr, &x}, &x, &x, 16, 16), Error);
}
