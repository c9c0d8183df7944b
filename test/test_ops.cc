// lib/ops/ops.h: the twins against mathematics (finite differences in double, known answers), then every kernel against
// its twin. GPU cases have the tag [gpu].
#include "test/catch.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "cpu/ops.h"
#include "lib/ops/ops.h"
#include "lib/ops/philox.h"
#include "test/worst.h"

using ops::Norm;
using Doubles = std::vector<double>;

namespace {

// Standard normal numbers, the same for the same seed.
template <class T>
std::vector<T> normals(int64_t n, uint64_t seed, double scale = 1) {
  std::vector<T> v(n);
  Normals4 four{};
  for (int64_t i = 0; i < n; ++i) {
    if (i % 4 == 0) four = philox_normals(seed, 77, uint64_t(i / 4));
    v[i] = T(float(scale * double(four.x[i % 4])));
  }
  return v;
}
double dot(const Doubles& a, const Doubles& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

// Largest difference between the gradient `g` of f() at x and central differences, relative to the largest of g.
template <class F>
double gradient_error(Doubles& x, const Doubles& g, F f) {
  double worst = 0, largest = 1e-3;
  for (size_t i = 0; i < x.size(); ++i) {
    const double at = x[i], h = 1e-5;
    x[i] = at + h;
    const double above = f();
    x[i] = at - h;
    const double below = f();
    x[i] = at;
    worst = worse(worst, std::abs((above - below) / (2 * h) - g[i]));
    largest = std::max(largest, std::abs(g[i]));
  }
  return worst / largest;
}

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

}  // namespace

// ------------------------------------------------------------------------------------------------------------ numbers

TEST_CASE("bf16 rounds to nearest even", "[ops]") {
  const auto bits = [](float f) { return bf16(f).bits; };
  const float inf = std::numeric_limits<float>::infinity();
  CHECK(bits(1.0f) == 0x3f80);
  CHECK(bits(1.0f + 0x1p-8f) == 0x3f80);             // a tie: to the even neighbour, down
  CHECK(bits(1.0f + 3 * 0x1p-8f) == 0x3f82);         // a tie: to the even neighbour, up
  CHECK(bits(1.0f + 0x1p-8f + 0x1p-23f) == 0x3f81);  // just above the tie
  CHECK(bits(-1.0f - 3 * 0x1p-8f) == 0xbf82);
  CHECK(bits(0.0f) == 0x0000);
  CHECK(bits(-0.0f) == 0x8000);
  CHECK(bits(inf) == 0x7f80);
  CHECK(bits(-inf) == 0xff80);
  CHECK(bits(std::numeric_limits<float>::max()) == 0x7f80);  // rounds to infinity
  CHECK(bits(0x1.fep127f) == 0x7f7f);                        // the largest bf16
  CHECK(bits(0x1p-133f) == 0x0001);                          // the smallest denormal bf16
  CHECK(bits(0x1p-134f) == 0x0000);                          // half of it: a tie, to even
  CHECK(bits(0x1.8p-134f) == 0x0001);
  CHECK(std::isnan(float(bf16(std::nanf("")))));
  float low_nan;  // a NaN whose upper half alone would read infinity
  const uint32_t u = 0x7f800001u;
  std::memcpy(&low_nan, &u, 4);
  CHECK(std::isnan(float(bf16(low_nan))));
  for (uint32_t b = 0; b < 0x10000; ++b) {  // every bf16 survives the way through float
    bf16 x;
    x.bits = uint16_t(b);
    if (!std::isnan(float(x))) REQUIRE(bf16(float(x)).bits == b);
  }
}

TEST_CASE("Philox 4x32-10 gives the published answers", "[ops]") {
  const auto check = [](Philox4 counter, uint32_t k0, uint32_t k1, Philox4 expected) {
    const Philox4 got = philox4x32(counter, k0, k1);
    for (int i = 0; i < 4; ++i) CHECK(got.x[i] == expected.x[i]);
  };
  check({{0, 0, 0, 0}}, 0, 0, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
  check({{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u, {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
  check({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, 0xa4093822, 0x299f31d0,
        {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});
}

TEST_CASE("initial weights do not depend on the cut and are normal", "[ops]") {
  const int64_t n = 40001;
  std::vector<float> whole(n), cut(n);
  cpu::init_normal(whole.data(), 1234567890123ull, 5, 0, n, 0.5f, 0.02f);
  for (int64_t first = 0, size = 1; first < n; first += size, size = size * 3 + 1) {
    size = std::min(size, n - first);
    cpu::init_normal(cut.data() + first, 1234567890123ull, 5, first, size, 0.5f, 0.02f);
  }
  CHECK(same_bits(whole, cut));
  cpu::init_normal(cut.data(), 1234567890123ull, 6, 0, n, 0.5f, 0.02f);
  CHECK(!same_bits(whole, cut));
  double mean = 0, square = 0, largest = 0;
  for (float w : whole) {
    const double z = (double(w) - 0.5) / 0.02;
    mean += z / n, square += z * z / n, largest = std::max(largest, std::abs(z));
  }
  CHECK(std::abs(mean) < 0.02);
  CHECK(std::abs(square - 1) < 0.03);
  CHECK(largest < 3.0001);  // clamped
  CHECK(largest > 2.9);
}

TEST_CASE("the vector exponential is exact to 2e-7", "[ops]") {
  double worst = 0;
  for (float x = -86.9f; x < 88; x += 0.0137f)
    worst = worse(worst, std::abs(double(cpu::exp_(x)) / std::exp(double(x)) - 1));
  CHECK(worst < 2e-7);
  CHECK(std::isnan(cpu::exp_(std::nanf(""))));
  CHECK(cpu::exp_(0.0f) == 1.0f);
  CHECK(cpu::exp_(-1e30f) < 2e-38f);
}

// ----------------------------------------------------------------------------------------------- twins: gradient
// checks

TEST_CASE("norms: gradients", "[ops]") {
  const int64_t M = 3, C = 21;
  for (Norm kind : {Norm::layer, Norm::rms}) {
    const bool layer = kind == Norm::layer;
    Doubles x = normals<double>(M * C, 1), delta = normals<double>(M * C, 2), gamma = normals<double>(C, 3),
            beta = normals<double>(C, 4), dy = normals<double>(M * C, 5), dres = normals<double>(M * C, 6);
    Doubles y(M * C), sum(M * C), stats(2 * M), dx(M * C), dgamma(C), dbeta(C),
        partials(ops::norm_backward_partials(kind, M, C));
    // The block's output is a function of y and of the residual stream: sum dy y + dres sum.
    const auto loss = [&] {
      cpu::norm_forward(kind, y.data(), sum.data(), stats.data(), x.data(), delta.data(), gamma.data(),
                        layer ? beta.data() : nullptr, M, C, 1e-5);
      return dot(dy, y) + dot(dres, sum);
    };
    loss();
    cpu::norm_backward(kind, dx.data(), dgamma.data(), layer ? dbeta.data() : nullptr, dy.data(), dres.data(),
                       sum.data(), stats.data(), gamma.data(), partials.data(), M, C);
    CHECK(gradient_error(x, dx, loss) < 1e-7);
    CHECK(gradient_error(delta, dx, loss) < 1e-7);
    CHECK(gradient_error(gamma, dgamma, loss) < 1e-7);
    if (layer) CHECK(gradient_error(beta, dbeta, loss) < 1e-7);
    loss();
    Doubles in_place = dres;  // dx may be dres
    cpu::norm_backward(kind, in_place.data(), dgamma.data(), layer ? dbeta.data() : nullptr, dy.data(), in_place.data(),
                       sum.data(), stats.data(), gamma.data(), partials.data(), M, C);
    CHECK(same_bits(in_place, dx));
  }
}

TEST_CASE("activations: gradients", "[ops]") {
  const int64_t M = 5, F = 13;
  Doubles h = normals<double>(M * F, 1, 2), dg = normals<double>(M * F, 2), g(M * F);
  const auto gelu = [&] {
    cpu::gelu_forward(g.data(), h.data(), M * F);
    return dot(dg, g);
  };
  gelu();
  Doubles dh = h, again = dg;
  cpu::gelu_backward(again.data(), dh.data(), M * F);
  CHECK(same_bits(again, g));
  CHECK(gradient_error(h, dh, gelu) < 1e-7);
  for (size_t i = 0; i < h.size(); ++i)  // the textbook's form
    CHECK(g[i] == Approx(0.5 * h[i] * (1 + std::tanh(std::sqrt(2 / M_PI) * (h[i] + 0.044715 * std::pow(h[i], 3)))))
                      .margin(1e-12));

  Doubles h2 = normals<double>(M * 2 * F, 3, 2);
  const auto swiglu = [&] {
    cpu::swiglu_forward(g.data(), h2.data(), M, F);
    return dot(dg, g);
  };
  swiglu();
  Doubles dh2 = h2, g2 = dg;
  cpu::swiglu_backward(g2.data(), dh2.data(), M, F);
  CHECK(same_bits(g2, g));
  CHECK(gradient_error(h2, dh2, swiglu) < 1e-7);

  // Columns 2 to 2 + F of a wider matrix; what is beside them stays.
  const int64_t ld = F + 5;
  Doubles x = normals<double>(M * ld, 4, 2), bias = normals<double>(F, 5), h3(M * F);
  const auto silu = [&] {
    cpu::silu_forward(g.data(), h3.data(), x.data() + 2, bias.data(), M, F, ld);
    return dot(dg, g);
  };
  silu();
  for (int64_t i = 0; i < M * F; ++i) {
    const double v = x[i / F * ld + 2 + i % F] + bias[i % F];
    CHECK(h3[i] == v);
    CHECK(g[i] == Approx(v / (1 + std::exp(-v))).margin(1e-12));
  }
  Doubles dx(M * ld, 7), inner(M * F), g3 = dg;
  cpu::silu_backward(g3.data(), dx.data() + 2, h3.data(), M, F, ld);
  CHECK(same_bits(g3, g));
  cpu::copy_columns(inner.data(), dx.data() + 2, M, F, F, ld);
  Doubles x_inner(M * F);
  cpu::copy_columns(x_inner.data(), x.data() + 2, M, F, F, ld);
  const auto silu_of_inner = [&] {
    cpu::copy_columns(x.data() + 2, x_inner.data(), M, F, ld, F);
    return silu();
  };
  CHECK(gradient_error(x_inner, inner, silu_of_inner) < 1e-7);
  for (int64_t i = 0; i < M * ld; ++i)
    if (i % ld < 2 || i % ld >= 2 + F) CHECK(dx[i] == 7);
}

TEST_CASE("matmul: values and gradients", "[ops]") {
  const int64_t M = 5, N = 4, K = 6;
  Doubles x = normals<double>(M * K, 1), w = normals<double>(N * K, 2), bias = normals<double>(N, 3),
          residual = normals<double>(M * N, 4), dy = normals<double>(M * N, 5), y(M * N);
  const auto loss = [&] {
    cpu::matmul(y.data(), x.data(), w.data(), bias.data(), residual.data(), M, N, K);
    return dot(dy, y);
  };
  loss();
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n) {
      double sum = bias[n] + residual[m * N + n];
      for (int64_t k = 0; k < K; ++k) sum += x[m * K + k] * w[n * K + k];
      CHECK(y[m * N + n] == Approx(sum));
    }
  Doubles dx(M * K), dw(N * K), db(N), partials(ops::bias_grad_partials(M, N)), in_place = residual;
  cpu::matmul_dgrad(dx.data(), dy.data(), w.data(), M, N, K, false);
  cpu::matmul_wgrad(dw.data(), dy.data(), x.data(), M, N, K, false);
  cpu::bias_grad(db.data(), dy.data(), partials.data(), M, N, N);
  // Of a part of the columns, and onto it.
  Doubles part(N - 2), plus = y;
  cpu::bias_grad(part.data(), dy.data() + 1, partials.data(), M, N - 2, N);
  cpu::add_bias(plus.data() + 1, bias.data(), M, N - 2, N);
  for (int64_t n = 0; n < N; ++n) {
    const bool in = n >= 1 && n < N - 1;
    if (in) CHECK(part[n - 1] == db[n]);
    for (int64_t m = 0; m < M; ++m) CHECK(plus[m * N + n] == y[m * N + n] + (in ? bias[n - 1] : 0));
  }
  CHECK(gradient_error(x, dx, loss) < 1e-8);
  CHECK(gradient_error(w, dw, loss) < 1e-8);
  CHECK(gradient_error(bias, db, loss) < 1e-8);
  loss();
  cpu::matmul(in_place.data(), x.data(), w.data(), bias.data(), in_place.data(), M, N, K);  // residual may be y
  CHECK(same_bits(in_place, y));
  Doubles twice = dx;
  cpu::matmul_dgrad(twice.data(), dy.data(), w.data(), M, N, K, true);
  for (size_t i = 0; i < dx.size(); ++i) CHECK(twice[i] == Approx(2 * dx[i]));
  twice = dw;
  cpu::matmul_wgrad(twice.data(), dy.data(), x.data(), M, N, K, true);
  for (size_t i = 0; i < dw.size(); ++i) CHECK(twice[i] == Approx(2 * dw[i]));
}

TEST_CASE("matmul in bf16 rounds once", "[ops]") {
  const int64_t M = 9, N = 17, K = 40;
  const auto x = normals<bf16>(M * K, 1), w = normals<bf16>(N * K, 2), bias = normals<bf16>(N, 3),
             residual = normals<bf16>(M * N, 4);
  std::vector<bf16> y(M * N), g(M * N), h(M * N);
  cpu::matmul(y.data(), x.data(), w.data(), bias.data(), residual.data(), M, N, K);
  cpu::matmul_gelu(g.data(), h.data(), x.data(), w.data(), bias.data(), M, N, K);
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n) {
      double sum = float(bias[n]);
      for (int64_t k = 0; k < K; ++k) sum += double(float(x[m * K + k])) * float(w[n * K + k]);
      const int64_t i = m * N + n;
      CHECK(std::abs(float(h[i]) - sum) <= 0x1.01p-8 * std::abs(sum) + 1e-5);
      sum += float(residual[i]);
      CHECK(std::abs(float(y[i]) - sum) <= 0x1.01p-8 * std::abs(sum) + 1e-5);
    }
  std::vector<bf16> alone(M * N);
  cpu::gelu_forward(alone.data(), h.data(), M * N);
  CHECK(same_bits(alone, g));
}

TEST_CASE("norms add eps to the variance", "[ops]") {
  const float x[4] = {1, -3, 5, 1}, gamma[4] = {1, 1, 2, 1}, beta[4] = {0, 1, 0, 0};
  float y[4], stats[2];
  for (double eps : {1e-6, 0.5}) {
    cpu::norm_forward<float>(Norm::rms, y, nullptr, stats, x, nullptr, gamma, nullptr, 1, 4, eps);
    CHECK(stats[1] == Approx(1 / std::sqrt(9 + eps)).epsilon(1e-7));
    CHECK(y[2] == Approx(10 / std::sqrt(9 + eps)).epsilon(1e-6));
    cpu::norm_forward<float>(Norm::layer, y, nullptr, stats, x, nullptr, gamma, beta, 1, 4, eps);
    CHECK(stats[1] == Approx(1 / std::sqrt(8 + eps)).epsilon(1e-7));
    CHECK(y[1] == Approx(1 - 4 / std::sqrt(8 + eps)).epsilon(1e-6));
  }
}

// By wavelength, as the paper's appendix and transformers tell it.
TEST_CASE("Llama 3's scaling slows long waves alone", "[ops]") {
  const Rope plain = {500000, {}};
  Rope scaled = plain;
  scaled.scaling = {8, 1, 4, 8192};
  const int64_t D = 128;
  int64_t kept = 0, mixed = 0, slowed = 0;
  for (int64_t i = 0; i < D / 2; ++i) {
    const double angle = std::pow(500000.0, -2.0 * double(i) / D), length = 2 * 3.14159265358979 / angle;
    CHECK(plain.angle(i, D) == angle);
    double want = angle;
    if (length > 8192 / 1.0) want = angle / 8, slowed++;
    else if (length < 8192 / 4.0) kept++;
    else {
      const double smooth = (8192 / length - 1) / (4 - 1);
      want = (1 - smooth) * angle / 8 + smooth * angle, mixed++;
    }
    CHECK(scaled.angle(i, D) == Approx(want).epsilon(1e-12));
  }
  CHECK((kept > 20 && mixed > 3 && slowed > 20));
}

TEST_CASE("RoPE turns and its inverse is its transpose", "[ops]") {
  const int64_t M = 7, T = 3, heads = 2, D = 8, ld = 20;
  Doubles table(T * D), x = normals<double>(M * ld, 1), y = normals<double>(M * ld, 2);
  cpu::rope_table<double>(table.data(), T, D, Rope());
  Doubles turned = x, back = y;
  cpu::rope(turned.data(), table.data(), M, T, heads, D, ld, false);
  cpu::rope(back.data(), table.data(), M, T, heads, D, ld, true);
  CHECK(dot(turned, y) == Approx(dot(x, back)).epsilon(1e-12));
  for (int64_t m = 0; m < M; ++m)
    for (int64_t c = 0; c < ld; ++c) {
      const int64_t h = c / D, i = c % D % (D / 2), low = m * ld + h * D + i, high = low + D / 2;
      const double angle = double(m % T) * std::pow(500000.0, -2.0 * double(i) / D), sn = std::sin(angle),
                   cs = std::cos(angle);
      if (h >= heads) CHECK(turned[m * ld + c] == x[m * ld + c]);  // past the heads: untouched
      else if (c % D < D / 2) CHECK(turned[low] == Approx(x[low] * cs - x[high] * sn));
      else CHECK(turned[high] == Approx(x[high] * cs + x[low] * sn));
    }
  cpu::rope(turned.data(), table.data(), M, T, heads, D, ld, true);
  for (size_t i = 0; i < x.size(); ++i) CHECK(turned[i] == Approx(x[i]));
}

namespace {
// Tokens of which a few are very frequent, most do not occur, and the last of the vocabulary does.
std::vector<int32_t> skewed_tokens(int64_t M, int64_t V) {
  std::vector<int32_t> tokens(M);
  for (int64_t m = 0; m < M; ++m) {
    const uint32_t r = philox4x32({{uint32_t(m), 0, 0, 0}}, 9, 9).x[0];
    tokens[m] = int32_t(r % 4 ? r / 4 % std::min<int64_t>(V, 3) : r / 4 % V);
  }
  if (M > 0) tokens[M - 1] = int32_t(V - 1);
  return tokens;
}
std::vector<int32_t> index_of(const std::vector<int32_t>& tokens, int64_t V) {
  std::vector<int32_t> ints(ops::token_index_ints(int64_t(tokens.size()), V));
  ops::build_token_index(ints.data(), tokens.data(), int64_t(tokens.size()), V);
  return ints;
}
}  // namespace

TEST_CASE("the token index inverts the batch", "[ops]") {
  for (int64_t M : {1, 64, 65, 2000})
    for (int64_t V : {1, 5, 300}) {
      for (bool one_token : {false, true}) {
        const auto tokens = one_token ? std::vector<int32_t>(M, int32_t(V - 1)) : skewed_tokens(M, V);
        const auto ints = index_of(tokens, V);
        const ops::TokenIndex index = ops::token_index_at(ints.data(), M, V);
        REQUIRE(index.start[0] == 0);
        REQUIRE(index.start[V] == M);
        REQUIRE(index.part[0] == 0);
        REQUIRE(index.part[V] <= ops::embedding_partials(M, 1));
        for (int64_t v = 0; v < V; ++v) {
          const int n = index.start[v + 1] - index.start[v], slots = index.part[v + 1] - index.part[v];
          REQUIRE(n == std::count(tokens.begin(), tokens.end(), int32_t(v)));
          REQUIRE(slots ==
                  (n > ops::TokenIndex::chunk ? (n + ops::TokenIndex::chunk - 1) / ops::TokenIndex::chunk : 0));
          for (int i = index.start[v]; i < index.start[v + 1]; ++i) {
            REQUIRE(tokens[index.order[i]] == v);
            if (i > index.start[v]) REQUIRE(index.order[i] > index.order[i - 1]);  // stable
          }
        }
      }
    }
}

TEST_CASE("embedding: positions and gradient", "[ops]") {
  const int64_t M = 150, T = 10, V = 7, C = 6;
  auto tokens = skewed_tokens(M, V);
  std::replace(tokens.begin(), tokens.end(), 5, 4);  // nobody has token 5
  Doubles table = normals<double>(V * C, 1), dx = normals<double>(M * C, 2), x(M * C), dtable(V * C);
  const auto loss = [&] {
    cpu::embedding_forward(x.data(), table.data(), tokens.data(), M, T, C, true);
    return dot(dx, x);
  };
  loss();
  const auto ints = index_of(tokens, V);
  cpu::embedding_backward(dtable.data(), dx.data(), ops::token_index_at(ints.data(), M, V),
                          static_cast<double*>(nullptr), M, V, C, ops::TableRows::all);
  CHECK(gradient_error(table, dtable, loss) < 1e-7);
  Doubles more = normals<double>(V * C, 3);
  const Doubles before = more;
  cpu::embedding_backward(more.data(), dx.data(), ops::token_index_at(ints.data(), M, V), static_cast<double*>(nullptr),
                          M, V, C, ops::TableRows::add);
  for (int64_t i = 0; i < V * C; ++i) CHECK(more[i] == Approx(before[i] + dtable[i]));
  more = before;
  cpu::embedding_backward(more.data(), dx.data(), ops::token_index_at(ints.data(), M, V), static_cast<double*>(nullptr),
                          M, V, C, ops::TableRows::used);
  int64_t unused = 0;
  for (int64_t v = 0; v < V; ++v) {
    const bool used = std::count(tokens.begin(), tokens.end(), int32_t(v)) > 0;
    unused += !used;
    for (int64_t i = v * C; i < (v + 1) * C; ++i) CHECK(more[size_t(i)] == (used ? dtable : before)[size_t(i)]);
  }
  CHECK(unused > 0);
  loss();
  for (int64_t m : {0, 9, 10, 149})
    for (int64_t c = 0; c < C; ++c) {
      const double angle = double(m % T) / std::pow(10000.0, double(c / 2 * 2) / C);
      CHECK(x[m * C + c] == Approx(table[tokens[m] * C + c] + (c % 2 ? std::cos(angle) : std::sin(angle))));
    }
  cpu::embedding_forward(x.data(), table.data(), tokens.data(), M, T, C, false);
  CHECK(x[3 * C + 1] == table[tokens[3] * C + 1]);
}

TEST_CASE("cross-entropy: loss, gradient, ignored targets", "[ops]") {
  const int64_t M = 4, V = 19;
  const std::vector<int32_t> targets = {3, -1, 18, 0};
  const double scale = 0.37;
  Doubles logits = normals<double>(M * V, 1, 3), losses(M);
  const auto loss = [&] {
    Doubles copy = logits;
    cpu::cross_entropy(copy.data(), losses.data(), targets.data(), scale, false, M, V);
    CHECK(same_bits(copy, logits));  // not written without backward
    return scale * std::accumulate(losses.begin(), losses.end(), 0.0);
  };
  loss();
  CHECK(losses[1] == 0);
  double total = 0;
  for (int64_t v = 0; v < V; ++v) total += std::exp(logits[2 * V + v]);
  CHECK(losses[2] == Approx(std::log(total) - logits[2 * V + 18]));
  Doubles gradient = logits;
  cpu::cross_entropy(gradient.data(), losses.data(), targets.data(), scale, true, M, V);
  for (int64_t v = 0; v < V; ++v) CHECK(gradient[V + v] == 0);
  CHECK(gradient_error(logits, gradient, loss) < 1e-7);
  // Large logits do not overflow.
  Doubles large = {1000, 999, -1000};
  const int32_t target = 0;
  cpu::cross_entropy(large.data(), losses.data(), &target, 1.0, true, 1, 3);
  CHECK(losses[0] == Approx(std::log(1 + std::exp(-1.0))));
}

TEST_CASE("AdamW follows the paper, with clipping", "[ops]") {
  const int64_t n = 37, decayed = 17;
  const ops::AdamW a{1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 3};
  const auto w0 = normals<float>(n, 1), m0 = normals<float>(n, 2), g = normals<float>(n, 3, 5);
  auto v0 = normals<float>(n, 4);
  for (float& v : v0) v *= v;
  const double sumsq = cpu::power_sum(ops::GradNorm::two, g.data(), n);
  double exact = 0;
  for (float x : g) exact += double(x) * x;
  CHECK(sumsq == Approx(exact).epsilon(1e-14));
  for (float clip : {0.0f, 1.0f, 1e6f}) {
    auto w = w0, m = m0, v = v0;
    cpu::adamw(w.data(), m.data(), v.data(), g.data(), &sumsq, clip, &a, n, decayed, 0, 0, 0);
    const double factor = clip > 0 ? std::min(1.0, double(clip) / std::sqrt(exact)) : 1;
    auto kept = w0, kept_m = m0, kept_v = v0;
    for (const double bad : {double(NAN), double(INFINITY)}) {
      cpu::adamw(kept.data(), kept_m.data(), kept_v.data(), g.data(), &bad, clip, &a, n, decayed, 0, 0, 0);
      CHECK((kept == w0 && kept_m == m0 && kept_v == v0));
    }
    for (int64_t i = 0; i < n; ++i) {
      const double b1 = a.beta1, b2 = a.beta2, gi = g[i] * factor;
      const double mi = b1 * m0[i] + (1 - b1) * gi, vi = b2 * v0[i] + (1 - b2) * gi * gi;
      const double step = mi / (1 - std::pow(b1, 3)) / (std::sqrt(vi / (1 - std::pow(b2, 3))) + a.eps);
      const double wi = w0[i] - a.lr * step - (i < decayed ? double(a.lr) * a.weight_decay * w0[i] : 0);
      CHECK(m[i] == Approx(mi).margin(1e-6));
      CHECK(v[i] == Approx(vi).margin(1e-6));
      CHECK(w[i] == Approx(wi).margin(1e-6));
    }
  }
}

TEST_CASE("norms of a gradient", "[ops]") {
  const int64_t n = 53;
  const auto g = normals<float>(n, 3, 5);
  for (ops::GradNorm p : {ops::GradNorm::one, ops::GradNorm::two, ops::GradNorm::three, ops::GradNorm::inf}) {
    INFO("p " << int(p));
    double want = 0, got = 0;
    for (float x : g) {
      const double a = std::abs(double(x));
      want = p == ops::GradNorm::inf ? std::max(want, a) : want + std::pow(a, double(int(p)));
    }
    if (p != ops::GradNorm::inf) want = std::pow(want, 1.0 / int(p));
    // In two pieces: of what is set, and of what is there once it has been added to.
    auto norm_of = [&](const std::vector<float>& x) {
      double pieces[2];
      std::vector<float> set(20), added(x.begin() + 20, x.end());
      const std::vector<bf16> more(added.size(), bf16(0.0f));
      cpu::accumulate_gradient(set.data(), x.data(), 20, false, {p, &pieces[0]});
      cpu::accumulate_gradient(added.data(), more.data(), n - 20, true, {p, &pieces[1]});
      cpu::total_power(p, &got, pieces, 2);
      double summed = 0;
      cpu::sum_parts(set.data(), x.data(), 0, x.data(), 20, 1, false, {p, &summed});
      CHECK(same_bits(std::vector<double>{summed}, std::vector<double>{pieces[0]}));
      // And one piece added to another.
      cpu::sum_parts(added.data(), x.data() + 20, 0, x.data(), n - 20, 1, false, {p, &summed, nullptr, true});
      CHECK(same_bits(std::vector<double>{summed}, std::vector<double>{got}));
    };
    norm_of(g);
    const double loss = 1, no_loss = INFINITY;
    cpu::squared_norm(p, &got, &loss);
    CHECK(std::sqrt(got) == Approx(want).epsilon(1e-12));
    cpu::squared_norm(p, &got, &no_loss);
    CHECK(std::isnan(got));
    auto broken = g;
    broken[7] = NAN;
    norm_of(broken);
    // NCCL's maximum may lose a NaN, so there it is infinity.
    CHECK((p == ops::GradNorm::inf ? std::isinf(got) : std::isnan(got)));
  }
}

TEST_CASE("stochastic rounding is right on average, and leaves bf16 numbers alone", "[ops]") {
  for (float x : {1.0f + 0x1p-10f, -3.14159f, 1e-30f * 1.7f, 65504.0f}) {
    double sum = 0, low = INFINITY, high = -INFINITY;
    for (uint32_t r = 0; r < 65536; ++r) {
      const double y = float(bf16::stochastic(x, r));
      sum += y, low = std::min(low, y), high = std::max(high, y);
    }
    CHECK(sum / 65536 == Approx(double(x)).epsilon(1e-7));  // over all random numbers: exact
    CHECK(low < x);
    CHECK(high > x);
  }
  for (float x : {0.0f, -0.5f, 384.0f})
    for (uint32_t r : {0u, 1u, 65535u}) CHECK(float(bf16::stochastic(x, r)) == x);
  CHECK(std::isnan(float(bf16::stochastic(NAN, 65535))));
  CHECK(std::isinf(float(bf16::stochastic(INFINITY, 65535))));
}

TEST_CASE("AdamW with moments in bf16: cut anywhere, the same bits; and they follow fp32's", "[ops]") {
  const int64_t n = 400, steps = 300;
  const auto w0 = normals<float>(n, 1);
  std::vector<float> w = w0, wide = w0, pieces = w0, m32(n), v32(n);
  std::vector<bf16> m(n, bf16(0.f)), v(n, bf16(0.f)), mp = m, vp = v;
  for (int64_t step = 1; step <= steps; ++step) {
    const ops::AdamW a{1e-3f, 0.9f, 0.999f, 1e-8f, 0.1f, step};
    auto g = normals<float>(n, uint64_t(100 + step));
    for (float& x : g) x += 0.5f;
    cpu::adamw(w.data(), m.data(), v.data(), g.data(), nullptr, 0.0f, &a, n, n, 5, 7, 0);
    cpu::adamw(wide.data(), m32.data(), v32.data(), g.data(), nullptr, 0.0f, &a, n, n, 5, 7, 0);
    for (int64_t from : {0, 3, 64, 129}) {
      const int64_t to = from == 0 ? 3 : from == 3 ? 64 : from == 64 ? 129 : n;
      cpu::adamw(pieces.data() + from, mp.data() + from, vp.data() + from, g.data() + from, nullptr, 0.0f, &a,
                 to - from, to - from, 5, 7, from);
    }
  }
  CHECK(std::memcmp(w.data(), pieces.data(), size_t(n) * 4) == 0);
  CHECK(std::memcmp(m.data(), mp.data(), size_t(n) * 2) == 0);
  // Mean second moment: rounding to nearest would stop it far below, since a step changes it by less than half a bit.
  double sum = 0, sum32 = 0, drift = 0;
  for (int64_t i = 0; i < n; ++i) sum += float(v[i]), sum32 += v32[i], drift += double(w[i]) - double(wide[i]);
  CHECK(sum == Approx(sum32).epsilon(5e-3));
  CHECK(std::abs(drift / double(n)) < 1e-3);
}

TEST_CASE("casts and accumulation", "[ops]") {
  const auto x = normals<float>(100, 1);
  std::vector<bf16> b(100);
  std::vector<float> back(100), sum = x;
  std::vector<double> d(100);
  cpu::cast(b.data(), x.data(), 100), cpu::cast(back.data(), b.data(), 100), cpu::cast(d.data(), x.data(), 100);
  cpu::accumulate_gradient(sum.data(), b.data(), 100, true);
  for (int i = 0; i < 100; ++i) {
    CHECK(b[i].bits == bf16(x[i]).bits);
    CHECK(back[i] == float(b[i]));
    CHECK(d[i] == double(x[i]));
    CHECK(sum[i] == x[i] + back[i]);
  }
  cpu::accumulate_gradient(sum.data(), b.data(), 100, false);
  CHECK(same_bits(sum, back));
}

TEST_CASE("parts are summed in their order, and not rounded before the end", "[ops]") {
  const int64_t n = 100;
  for (int ranks : {1, 2, 3, 7})
    for (int rank = 0; rank < ranks; ++rank) {
      const auto x = normals<float>(n * ranks, 3);
      const std::vector<bf16> parts(x.begin(), x.end());
      const auto from = parts.begin() + rank * n;
      std::vector<bf16> narrow(from, from + n), others = parts;  // of the first this rank's own part is written over
      others.erase(others.begin() + rank * n, others.begin() + (rank + 1) * n);
      const std::vector<float> before = normals<float>(n, 4);
      std::vector<float> set(n, NAN), added = before;
      std::vector<bf16> in_place = others;  // of two ranks
      double power = 0, want = 0;
      if (ranks == 2)
        cpu::sum_parts(in_place.data(), narrow.data(), rank, in_place.data(), n, 2, false,
                       {ops::GradNorm::two, &power});
      cpu::sum_parts(set.data(), narrow.data(), rank, others.data(), n, ranks, false);
      cpu::sum_parts(added.data(), narrow.data(), rank, others.data(), n, ranks, true);
      cpu::sum_parts(narrow.data(), narrow.data(), rank, others.data(), n, ranks, false);
      for (int64_t i = 0; i < n; ++i) {
        float sum = 0;
        for (int r = 0; r < ranks; ++r) sum += float(parts[size_t(r * n + i)]);
        CHECK(set[size_t(i)] == sum);
        CHECK(added[size_t(i)] == before[size_t(i)] + sum);
        CHECK(narrow[size_t(i)].bits == bf16(sum).bits);
        if (ranks == 2) CHECK(in_place[size_t(i)].bits == bf16(sum).bits);
        want += double(float(bf16(sum))) * double(float(bf16(sum)));
      }
      if (ranks == 2) CHECK(power == Approx(want).epsilon(1e-12));
    }
}

// --------------------------------------------------------------------------------- one call on two backends, compared

namespace {

// The arrays of one run of an operation on one device. Inputs are random, the same on every device; outputs are
// poisoned with NaN; guards before and after each array must survive.
class Space {
 public:
  explicit Space(Device& dev) : dev(dev), s(dev.compute()) {}
  Space(const Space&) = delete;
  ~Space() {
    for (auto& a : arrays_) {
#if FSDP_CUDA
      if (dev.backend == Backend::gpu) {
        cudaFree(a.base);
        continue;
      }
#endif
      std::free(a.base);
    }
  }
  template <class T>
  T* in(const std::vector<T>& v) {
    return add(v, false);
  }
  template <class T>
  T* in(int64_t n, double scale = 1) {
    return add(normals<T>(n, 100 + arrays_.size(), scale), false);
  }
  template <class T>
  T* inout(int64_t n, double scale = 1) {  // random before, compared after
    return add(normals<T>(n, 100 + arrays_.size(), scale), true);
  }
  template <class T>
  T* out(int64_t n) {
    return add(std::vector<T>(n, T(std::nanf(""))), true);
  }
  template <class T>
  T* work(int64_t n) {
    return add(std::vector<T>(n, T(std::nanf(""))), false);
  }

  struct Result {
    std::vector<char> bits;
    Doubles values;
    Dtype type;
  };
  std::vector<Result> results() {  // of the arrays to compare; checks all guards
    std::vector<Result> all;
    for (auto& a : arrays_) {
      std::vector<char> bytes(a.bytes + 2 * guard);
      s.copy(bytes.data(), a.base, int64_t(bytes.size()));
      s.synchronize();
      int64_t broken = 0;
      for (int64_t i = 0; i < guard; ++i) broken += bytes[i] != mark, broken += bytes[guard + a.bytes + i] != mark;
      CHECK(broken == 0);
      if (!a.compared) continue;
      Result r{{bytes.begin() + guard, bytes.begin() + guard + a.bytes}, {}, a.type};
      for (int64_t i = 0; i < a.bytes / size_of(a.type); ++i) r.values.push_back(number(a.type, r.bits.data(), i));
      all.push_back(std::move(r));
    }
    return all;
  }

  Device& dev;
  Stream& s;

 private:
  static constexpr int64_t guard = 256;  // keeps the alignment
  static constexpr char mark = 0x5a;
  struct Array {
    char* base;
    int64_t bytes;
    Dtype type;
    bool compared;
  };
  static double number(Dtype t, const char* p, int64_t i) {
    if (t == Dtype::f64) return reinterpret_cast<const double*>(p)[i];
    return t == Dtype::f32 ? reinterpret_cast<const float*>(p)[i] : float(reinterpret_cast<const bf16*>(p)[i]);
  }
  template <class T>
  T* add(const std::vector<T>& v, bool compared) {
    const int64_t bytes = int64_t(v.size() * sizeof(T)), whole = bytes + 2 * guard;
    char* base = nullptr;
#if FSDP_CUDA
    if (dev.backend == Backend::gpu) CUDA_CHECK(cudaMalloc(&base, size_t(whole)));
#endif
    if (!base) base = static_cast<char*>(std::aligned_alloc(256, size_t((whole + 255) / 256 * 256)));
    std::vector<char> image(whole, mark);
    std::memcpy(image.data() + guard, v.data(), size_t(bytes));
    s.copy(base, image.data(), whole);
    s.synchronize();
    arrays_.push_back({base, bytes, dtype_of<T>, compared});
    return reinterpret_cast<T*>(base + guard);
  }
  std::vector<Array> arrays_;
};

template <class Body>
std::vector<Space::Result> run_on(Backend backend, Body body) {
  Space space(test_device(backend));
  body(space);
  space.s.synchronize();
  return space.results();
}

// The body's outputs on the GPU are those of the CPU within `factor` times the bound of their type, and the same bits
// when it runs again. The error is relative to |expected| + rms(expected), because sums cancel; bounds: bf16 2^-7 (one
// step in the last place, where a sum of another order falls on the other side), float 1e-5, double 1e-6 (sums whose
// vectors are added in float).
template <class Body>
void compare(Body body, double factor = 1) {
  const auto expected = run_on(Backend::cpu, body), got = run_on(Backend::gpu, body),
             again = run_on(Backend::gpu, body);
  REQUIRE(expected.size() == got.size());
  for (size_t k = 0; k < got.size(); ++k) {
    CHECK(same_bits(got[k].bits, again[k].bits));
    double square = 0, worst = 0;
    for (double x : expected[k].values) square += x * x;
    const double rms = std::sqrt(square / double(expected[k].values.size())) + 1e-30;
    size_t where = 0;
    for (size_t i = 0; i < got[k].values.size(); ++i) {
      const double e = expected[k].values[i], error = std::abs(got[k].values[i] - e) / (std::abs(e) + rms);
      if (!(error <= worst)) worst = std::isnan(error) ? 1e30 : error, where = i;
    }
    const Dtype t = got[k].type;
    const double bound = factor * (t == Dtype::bf16 ? 0x1p-7 : t == Dtype::f32 ? 1e-5 : 1e-6);
    INFO("output " << k << " at " << where << ": expected " << expected[k].values[where] << ", got "
                   << got[k].values[where] << ", rms " << rms);
    CHECK(worst <= bound);
  }
}

}  // namespace

TEST_CASE("operations through their streams on the CPU", "[ops]") {
  const int64_t M = 6, C = 40;
  const auto body = [&](Space& a) {
    auto *y = a.out<float>(M * C), *stats = a.out<float>(2 * M), *x = a.in<float>(M * C), *gamma = a.in<float>(C);
    ops::norm_forward<float>(a.s, Norm::rms, y, nullptr, stats, x, nullptr, gamma, nullptr, M, C, 1e-5);
    ops::gelu_forward(a.s, y, static_cast<const float*>(y), M * C);
  };
  const auto first = run_on(Backend::cpu, body), second = run_on(Backend::cpu, body);
  CHECK(same_bits(first[0].bits, second[0].bits));
  CHECK(!std::isnan(first[0].values[M * C - 1]));

  Device& dev = test_device(Backend::cpu);
  std::vector<float> x(8, 1), y(8, 7);
  dev.mode = Mode::plan;  // enqueues nothing
  ops::gelu_forward(dev.compute(), y.data(), static_cast<const float*>(x.data()), 8);
  ops::matmul(dev.compute(), y.data(), static_cast<const float*>(x.data()), static_cast<const float*>(x.data()),
              static_cast<const float*>(nullptr), static_cast<const float*>(nullptr), 2, 4, 2);
  dev.mode = Mode::run;
  dev.compute().synchronize();
  CHECK(y == std::vector<float>(8, 7));
}

// Rounded at each step, as separate kernels do; y += x w is the product's own either way.
TEST_CASE("a product and its epilogue, in one call or apart", "[ops]") {
  const int64_t M = 7, N = 24, K = 16;
  auto run = [&](bool fuse, auto zero) {
    using T = decltype(zero);
    return run_on(Backend::cpu, [&](Space& a) {
      auto *y = a.out<T>(M * N), *sum = a.inout<T>(M * N), *h = a.out<T>(M * N), *g = a.out<T>(M * N),
           *n = a.out<T>(M * N), *x2 = a.out<T>(M * N), *x = a.in<T>(M * K), *w = a.in<T>(N * K, 0.25),
           *bias = a.in<T>(N), *residual = a.in<T>(M * N);
      auto* stats = a.out<acc_t<T>>(2 * M);
      const T* none = nullptr;
      a.dev.fuse = fuse;
      ops::matmul<T>(a.s, y, x, w, bias, residual, M, N, K);
      ops::matmul<T>(a.s, sum, x, w, none, sum, M, N, K);
      ops::matmul_gelu<T>(a.s, g, h, ops::Hidden::kept, x, w, bias, M, N, K);
      ops::norm_forward<T>(a.s, Norm::rms, n, x2, stats, y, residual, bias, none, M, N, 1e-5);
      a.dev.fuse = true;
    });
  };
  auto furthest = [](const auto& p, const auto& q) {
    double most = 0;
    for (size_t k = 0; k < p.size(); ++k)
      for (size_t i = 0; i < p[k].values.size(); ++i)
        most = worse(most, std::abs(double(p[k].values[i]) - double(q[k].values[i])));
    return most;
  };
  CHECK(furthest(run(true, 0.0), run(false, 0.0)) < 1e-13);
  CHECK(furthest(run(true, 0.0f), run(false, 0.0f)) < 1e-5);
  const auto one = run(true, bf16(0.0f)), apart = run(false, bf16(0.0f));
  CHECK(furthest(one, apart) < 0.1);
  CHECK(!same_bits(one[0].bits, apart[0].bits));
  CHECK(same_bits(one[1].bits, apart[1].bits));
}

namespace {
// y of norm_forward and of norm_apply on the same input, on one backend, and the largest of its rows.
template <class T>
bool apply_repeats_forward(Backend backend, Norm kind, int64_t M, int64_t C) {
  const auto r = run_on(backend, [&](Space& a) {
    auto *y = a.out<T>(M * C), *again = a.out<T>(M * C), *sum = a.work<T>(M * C), *x = a.in<T>(M * C),
         *delta = a.in<T>(M * C), *gamma = a.in<T>(C), *beta = kind == Norm::layer ? a.in<T>(C) : nullptr;
    auto* stats = a.work<acc_t<T>>(2 * M);
    auto* largest = a.out<float>(M);
    ops::norm_forward<T>(a.s, kind, y, sum, stats, x, delta, gamma, beta, M, C, 1e-5, largest);
    ops::norm_apply<T>(a.s, kind, again, stats, sum, gamma, beta, M, C);
  });
  bool largest = true;
  for (int64_t m = 0; m < M; ++m) {
    double most = 0;
    for (int64_t c = 0; c < C; ++c) most = std::max(most, std::abs(r[0].values[m * C + c]));
    largest = largest && r[2].values[m] == double(float(most));
  }
  return largest && same_bits(r[0].bits, r[1].bits) && !std::isnan(r[0].values[M * C - 1]);
}
}  // namespace

TEST_CASE("norm_apply gives norm_forward's bits, and each row has its largest", "[ops]") {
  for (Norm kind : {Norm::layer, Norm::rms})
    for (int64_t C : {1, 7, 64, 770}) {
      CHECK(apply_repeats_forward<float>(Backend::cpu, kind, 5, C));
      CHECK(apply_repeats_forward<bf16>(Backend::cpu, kind, 5, C));
      CHECK(apply_repeats_forward<double>(Backend::cpu, kind, 5, C));
    }
}

TEST_CASE("GPU: norm_apply gives norm_forward's bits, and each row has its largest", "[ops][gpu]") {
  NEEDS_GPU();
  for (Norm kind : {Norm::layer, Norm::rms})
    for (int64_t C : {64, 257, 768, 4096, 16384, 20000}) {
      CHECK(apply_repeats_forward<float>(Backend::gpu, kind, 7, C));
      CHECK(apply_repeats_forward<bf16>(Backend::gpu, kind, 7, C));
    }
}

namespace {

template <class T, class G>
void compare_norms(Norm kind, int64_t M, int64_t C, bool with_delta, bool in_place) {
  INFO("M " << M << " C " << C << " layer " << (kind == Norm::layer) << " delta " << with_delta << " in place "
            << in_place << " " << name_of(dtype_of<T>) << " " << name_of(dtype_of<G>));
  const bool layer = kind == Norm::layer;
  compare([&](Space& a) {
    auto *y = a.out<T>(M * C), *x = in_place ? a.inout<T>(M * C) : a.in<T>(M * C),
         *delta = with_delta ? a.in<T>(M * C) : nullptr, *gamma = a.in<T>(C), *beta = layer ? a.in<T>(C) : nullptr;
    T* sum = !with_delta ? nullptr : in_place ? x : a.out<T>(M * C);
    auto* stats = a.out<float>(2 * M);
    ops::norm_forward<T>(a.s, kind, y, sum, stats, x, delta, gamma, beta, M, C, with_delta ? 1e-5 : 0.25);
  });
  compare(
      [&](Space& a) {
        const auto stats = [&] {  // of the inputs below: mean about 0, 1/std about 1
          auto v = normals<float>(2 * M, 55, 0.05);
          for (int64_t m = 0; m < M; ++m) v[2 * m] = layer ? v[2 * m] : 0, v[2 * m + 1] += 1;
          return v;
        }();
        auto *dy = a.in<T>(M * C), *x = a.in<T>(M * C), *gamma = a.in<T>(C),
             *dx = in_place ? a.inout<T>(M * C) : a.out<T>(M * C), *dres = with_delta ? a.in<T>(M * C) : nullptr;
        auto *dgamma = a.out<G>(C), *dbeta = layer ? a.out<G>(C) : nullptr;
        auto *partials = a.work<float>(ops::norm_backward_partials(kind, M, C)), *st = a.in(stats);
        const T* from = in_place && !with_delta ? dx : dy;  // dx may be dy or dres
        const T* res = in_place && with_delta ? dx : dres;
        ops::norm_backward<T, G>(a.s, kind, dx, dgamma, dbeta, from, res, x, st, gamma, partials, M, C);
        auto *more = a.inout<G>(C), *more_beta = layer ? a.inout<G>(C) : nullptr;
        auto* aside = a.out<T>(M * C);
        ops::norm_backward<T, G>(a.s, kind, aside, more, more_beta, a.in<T>(M * C), nullptr, x, st, gamma, partials, M,
                                 C, true);
        auto *late = a.out<G>(C), *late_beta = layer ? a.out<G>(C) : nullptr;
        ops::ColumnSums<G> later;
        ops::norm_backward<T, G>(a.s, kind, aside, late, late_beta, dy, nullptr, x, st, gamma, partials, M, C, false,
                                 &later);
        ops::sum_columns(a.s, later);
      },
      2);
}

}  // namespace

TEST_CASE("GPU: norms", "[ops][gpu]") {
  NEEDS_GPU();
  const auto compare_all = [](int64_t M, int64_t C) {
    const bool odd = (M + C) % 2;
    compare_norms<bf16, float>(Norm::layer, M, C, true, odd);
    compare_norms<bf16, bf16>(Norm::rms, M, C, odd, true);
    compare_norms<float, float>(odd ? Norm::layer : Norm::rms, M, C, !odd, false);
  };
  for (int64_t M : {1, 7, 129, 1100})
    for (int64_t C : {8, 64, 257, 768, 1000, 4096, 16384, 20000})
      if (M * C <= 2500000) compare_all(M, C);
  // More rows than the backward has blocks (264), so that a block goes from one to the next, for every way in which a
  // block's threads share rows: eight rows of 16 floats a thread, 512 threads, more with one, two and four vectors
  // each.
  compare_all(4001, 512), compare_all(271, 2056), compare_all(271, 4112), compare_all(271, 8192);
  compare_all(271, 12288), compare_norms<float, float>(Norm::layer, 271, 16384, true, true);
}

namespace {
template <class T>
void compare_activations() {
  for (int64_t n : {1, 7, 8, 1000, 4097, 100000}) {
    INFO(name_of(dtype_of<T>) << " n " << n);
    compare([&](Space& a) {
      auto *h = a.inout<T>(n, 3), *g = a.out<T>(n), *dg = a.inout<T>(n);
      ops::gelu_forward<T>(a.s, g, h, n);
      ops::gelu_backward<T>(a.s, dg, h, n);
    });
    compare([&](Space& a) {  // at an odd address
      auto *h = a.in<T>(n + 1, 3), *g = a.inout<T>(n + 1);
      ops::gelu_forward<T>(a.s, g + 1, h + 1, n);
    });
  }
  for (int64_t M : {1, 5, 64, 333, 2048})
    for (int64_t F : {1, 9, 256, 1000, 3072}) {
      if (M * F > 1100000) continue;
      INFO(name_of(dtype_of<T>) << " M " << M << " F " << F << ", with the gradient of a bias");
      compare([&](Space& a) {
        auto *h = a.inout<T>(M * F, 3), *dg = a.inout<T>(M * F), *db = a.out<T>(F);
        auto* pieces = a.work<float>(ops::bias_grad_partials(M, F));
        ops::ColumnSums<T> later;
        ops::gelu_backward<T, T>(a.s, dg, h, M, F, db, pieces, &later);
        ops::sum_columns(a.s, later);
      });
    }
  for (int64_t M : {1, 7, 129})
    for (int64_t F : {1, 8, 257, 768, 3072}) {
      INFO(name_of(dtype_of<T>) << " M " << M << " F " << F);
      compare([&](Space& a) {
        auto *h = a.inout<T>(2 * M * F, 2), *g = a.out<T>(M * F), *dg = a.inout<T>(M * F);
        ops::swiglu_forward<T>(a.s, g, h, M, F);
        ops::swiglu_backward<T>(a.s, dg, h, M, F);
      });
      compare([&](Space& a) {  // columns of a wider matrix
        const int64_t ld = F + (F == 257 ? 27 : 24);
        auto *x = a.inout<T>(M * ld, 2), *h = a.out<T>(M * F), *g = a.out<T>(M * F), *dg = a.inout<T>(M * F),
             *bias = a.in<T>(F), *wide = a.inout<T>(M * ld), *narrow = a.out<T>(M * F);
        ops::silu_forward<T>(a.s, g, h, x + 16, bias, M, F, ld);
        ops::silu_backward<T>(a.s, dg, x + 16, h, M, F, ld);
        ops::copy_columns<T>(a.s, wide + 8, g, M, F, ld, F);
        ops::copy_columns<T>(a.s, narrow, wide, M, F, F, ld);
      });
    }
}
}  // namespace

TEST_CASE("GPU: activations", "[ops][gpu]") {
  NEEDS_GPU();
  compare_activations<float>();
  compare_activations<bf16>();
}

namespace {
int32_t* put(Space& a, const std::vector<int32_t>& ints) {  // integers travel as floats of the same bits
  std::vector<float> bits(ints.size());
  std::memcpy(bits.data(), ints.data(), ints.size() * 4);
  return reinterpret_cast<int32_t*>(a.in(bits));
}

template <class T>
void compare_positions() {
  for (int64_t M : {1, 7, 129})
    for (int64_t D : {6, 64, 128})
      for (bool inverse : {false, true}) {
        const int64_t T_ = 50, heads = 5, ld = heads * D + (D == 6 ? 3 : 24);
        INFO(name_of(dtype_of<T>) << " M " << M << " D " << D);
        compare([&](Space& a) {
          auto *x = a.inout<T>(M * ld), *far = a.inout<T>(M * ld);
          auto *table = a.out<float>(T_ * D), *long_table = a.work<float>(4096 * D);
          ops::rope_table<T>(a.s, table, T_, D, Rope());
          ops::rope<T>(a.s, x, table, M, T_, heads, D, ld, inverse);
          ops::rope_table<T>(a.s, long_table, 4096, D, Rope{10000, {8, 1, 4, 1024}});
          ops::rope<T>(a.s, far, long_table + 3900 * D, M, 196, heads, D, ld, inverse);
        });
      }
  for (int64_t M : {1, 7, 129, 5000})
    for (int64_t C : {6, 64, 768, 4096}) {
      if (M * C > 5000000) continue;
      const int64_t V = 257, T_ = 4096;
      INFO(name_of(dtype_of<T>) << " M " << M << " C " << C);
      const auto tokens = skewed_tokens(M, V);
      compare([&](Space& a) {
        auto *with = a.out<T>(M * C), *without = a.out<T>(M * C), *table = a.in<T>(V * C);
        const int32_t* t = put(a, tokens);
        ops::embedding_forward<T>(a.s, with, table, t, M, T_, C, true);
        ops::embedding_forward<T>(a.s, without, table, t, M, T_, C, false);
      });
    }
}
}  // namespace

TEST_CASE("GPU: positions", "[ops][gpu]") {
  NEEDS_GPU();
  compare_positions<float>();
  compare_positions<bf16>();
}

namespace {
template <class T, class G>
void compare_embedding_backward() {
  for (int64_t M : {1, 7, 129, 2000})
    for (int64_t V : {1, 257, 5000})
      for (int64_t C : {6, 64, 768, 4096}) {
        if (V * C > 5000000 || M * C > 5000000) continue;
        INFO(name_of(dtype_of<T>) << " M " << M << " V " << V << " C " << C);
        const auto ints = index_of(skewed_tokens(M, V), V);
        compare([&](Space& a) {
          auto* dtable = a.out<G>(V * C);
          auto* dx = a.in<T>(M * C);
          auto* partials = a.work<float>(ops::embedding_partials(M, C));
          const auto index = ops::token_index_at(put(a, ints), M, V);
          using ops::TableRows;
          for (TableRows rows : {TableRows::all, TableRows::add, TableRows::used})
            ops::embedding_backward<T, G>(a.s, dtable, dx, index, partials, M, V, C, rows);
        });
      }
}
}  // namespace

TEST_CASE("GPU: gradient of the embedding", "[ops][gpu]") {
  NEEDS_GPU();
  compare_embedding_backward<float, float>();
  compare_embedding_backward<bf16, bf16>();
  compare_embedding_backward<bf16, float>();
}

namespace {
template <class T>
void compare_cross_entropy() {
  for (int64_t M : {1, 7, 129})
    for (int64_t V : {1, 5, 256, 257, 1000, 12008, 32000, 32768, 50257, 262144}) {
      if (M * V > 5000000) continue;
      INFO(name_of(dtype_of<T>) << " M " << M << " V " << V);
      std::vector<int32_t> targets(M);
      for (int64_t m = 0; m < M; ++m) targets[m] = m % 5 == 3 ? -1 : int32_t((m * 7919 + V - 1) % V);
      for (bool backward : {false, true})
        compare(
            [&](Space& a) {
              auto* logits = a.inout<T>(M * V, 3);
              auto* losses = a.out<float>(M);
              ops::cross_entropy<T>(a.s, logits, losses, put(a, targets), 0.25f, backward, M, V);
            },
            2);  // the twin adds up to 262,144 exponentials one after another
    }
}
}  // namespace

TEST_CASE("GPU: cross-entropy", "[ops][gpu]") {
  NEEDS_GPU();
  compare_cross_entropy<float>();
  compare_cross_entropy<bf16>();
}

TEST_CASE("GPU: sums", "[ops][gpu]") {
  NEEDS_GPU();
  for (int64_t n : {1, 5, 1023, 4096, 1000003})
    for (int64_t shift : {0, 1}) {
      INFO("n " << n << " shift " << shift);
      auto positive = normals<float>(n + shift, 8);
      for (float& x : positive) x = std::abs(x);
      // The twin's own rounding: a long sum in float; squares are exact there, but added in fours in float on the GPU.
      compare(
          [&](Space& a) {
            auto *total = a.out<float>(1), *partials = a.work<float>(ops::sum_partials()), *x = a.in(positive) + shift;
            ops::sum<float>(a.s, total, x, partials, n, false);
            ops::sum<float>(a.s, total, x, partials, n, true);
          },
          5);
      for (ops::GradNorm p : {ops::GradNorm::one, ops::GradNorm::two, ops::GradNorm::three, ops::GradNorm::inf})
        compare([&](Space& a) {
          auto *pieces = a.out<double>(3), *total = a.out<double>(1), *partials = a.work<double>(ops::sum_partials());
          auto *fresh = a.out<float>(n + shift), *more = a.inout<float>(n + shift), *sum = a.out<float>(n);
          const float* x = a.in<float>(n + shift) + shift;
          auto *narrow = a.out<bf16>(n + shift), *parts = a.out<bf16>(3 * n);
          ops::cast<bf16, float>(a.s, narrow, x - shift, n + shift);
          ops::cast<bf16, float>(a.s, parts, a.in<float>(3 * n), 3 * n);
          ops::fill(a.s, fresh, 2.5f, n + shift);
          ops::accumulate_gradient<float>(a.s, fresh + shift, x, n, false, {p, pieces, partials});
          ops::accumulate_gradient<bf16>(a.s, more + shift, narrow + shift, n, true, {p, pieces + 1, partials});
          ops::sum_parts<float, bf16>(a.s, sum, parts, 0, parts + n, n, 3, false, {p, pieces + 2, partials});
          ops::sum_parts<bf16, bf16>(a.s, parts, parts + n, 1, parts, n, 2, false, {p, pieces + 2, partials, true});
          ops::total_power(a.s, p, total, pieces, 3);
          ops::squared_norm(a.s, p, total, a.in(std::vector<double>{2.0}));
        });
    }
}

TEST_CASE("GPU: parameters", "[ops][gpu]") {
  NEEDS_GPU();
  for (int64_t n : {1, 3, 4, 1000, 4097, 300001})
    for (int64_t shift : {0, 1}) {
      INFO("n " << n << " shift " << shift);
      auto positive = normals<float>(n + shift, 8);
      for (float& x : positive) x *= x;
      compare([&](Space& a) {
        auto *w = a.inout<float>(n + shift) + shift, *m = a.inout<float>(n + shift) + shift,
             *v = a.in(positive) + shift, *g = a.in<float>(n + shift) + shift;
        const ops::AdamW adamw{1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 3};
        auto* sumsq = a.in(std::vector<double>{100.0});
        const ops::AdamW* now = a.in(std::vector<ops::AdamW>{adamw});
        ops::adamw(a.s, w, m, v, g, sumsq, 1.0f, now, n, n / 2, 1, 2, 0);
        ops::adamw(a.s, w, m, v, g, sumsq, 0.0f, now, n, n, 1, 2, 0);
        auto* bad = a.in(std::vector<double>{double(INFINITY)});
        ops::adamw(a.s, w, m, v, g, bad, 1.0f, now, n, n / 2, 1, 2, 0);
      });
      // One behind the other, each before the last one's end: what follows finds them all at theirs.
      compare([&](Space& a) {
        const ops::AdamW adamw{1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 3};
        const ops::AdamW* now = a.in(std::vector<ops::AdamW>{adamw});
        auto *sumsq = a.out<double>(1), *pieces = a.in(std::vector<double>{60.0, 40.0});
        std::vector<float*> all;
        for (int i = 0; i < 4; ++i) all.push_back(a.inout<float>(n + shift) + shift);
        auto *m = a.inout<float>(4 * n), *v = a.in(std::vector<float>(size_t(4 * n), 0.5f)), *total = a.out<float>(1),
             *partials = a.work<float>(ops::sum_partials());
        ops::total_power(a.s, ops::GradNorm::two, sumsq, pieces, 2);
        ops::Series series = ops::Series::begins;
        for (size_t i = 0; i < 4; ++i) {
          const int64_t numel = i == 2 ? std::min<int64_t>(n, 7) : n;
          ops::adamw(a.s, all[i], m + int64_t(i) * n, v + int64_t(i) * n, a.in<float>(n + shift) + shift, sumsq, 1.0f,
                     now, numel, n / 2, 1, 2, 0, series);
          series = ops::Series::goes_on;
        }
        ops::sum<float>(a.s, total, m, partials, 4 * n, false);
      });
      // The same random bits. A moment next to a boundary may fall to the other side by the arithmetic's last bit.
      for (int64_t first : {0, 64, 6})
        compare([&](Space& a) {
          auto *w = a.inout<float>(n + shift) + shift, *g = a.in<float>(n + shift) + shift;
          auto *m = a.inout<bf16>(n + shift) + shift, *v = a.out<bf16>(n + shift);
          const ops::AdamW* now = a.in(std::vector<ops::AdamW>{{1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 3}});
          ops::cast<bf16, float>(a.s, v, a.in(positive), n + shift);
          ops::adamw(a.s, w, m, v + shift, g, nullptr, 0.0f, now, n, n / 2, 1, 2, first);
        });
      compare([&](Space& a) {
        auto* b = a.out<bf16>(n + shift);
        auto *f = a.out<float>(n + shift), *x = a.in<float>(n + shift), *shard = a.inout<float>(n + shift),
             *shard2 = a.inout<float>(n + shift), *fresh = a.out<float>(n + shift);
        ops::cast<bf16, float>(a.s, b, x, n + shift);  // whole, so that no NaN is left to compare
        ops::cast<float, bf16>(a.s, f, b, n + shift);
        ops::cast<bf16, float>(a.s, b + shift, x, n);
        ops::accumulate_gradient<bf16>(a.s, shard + shift, b, n, true);
        ops::accumulate_gradient<float>(a.s, shard2 + shift, f, n, true);
        ops::fill(a.s, fresh, 2.5f, n + shift);
        ops::accumulate_gradient<bf16>(a.s, fresh + shift, b, n, false);
      });
      // A gradient in bf16 is the same one in fp32.
      for (int64_t first : {0, 64, 6})
        compare([&](Space& a) {
          auto *w = a.inout<float>(n + shift) + shift, *m = a.inout<float>(n + shift) + shift,
               *v = a.in(positive) + shift;
          auto* w2 = a.inout<float>(n + shift) + shift;
          auto *m2 = a.out<bf16>(n + shift), *v2 = a.out<bf16>(n + shift), *g = a.out<bf16>(n + shift),
               *copy = a.out<bf16>(n);
          ops::cast<bf16, float>(a.s, g, a.in<float>(n + shift), n + shift);
          ops::cast<bf16, float>(a.s, m2, a.in<float>(n + shift), n + shift);
          ops::cast<bf16, float>(a.s, v2, a.in(positive), n + shift);
          const ops::AdamW* now = a.in(std::vector<ops::AdamW>{{1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 3}});
          ops::adamw(a.s, w, m, v, g + shift, nullptr, 0.0f, now, n, n / 2, 1, 2, first);
          ops::adamw(a.s, w2, m2 + shift, v2 + shift, g + shift, nullptr, 0.0f, now, n, n / 2, 1, 2, first);
          auto *piece = a.out<double>(1), *partials = a.work<double>(ops::sum_partials());
          ops::accumulate_gradient<bf16>(a.s, copy, g + shift, n, false, {ops::GradNorm::two, piece, partials});
        });
      for (int ranks : {1, 2, 3, 8})
        compare([&](Space& a) {
          auto *x = a.in<float>(n * ranks + shift), *set = a.out<float>(n), *added = a.inout<float>(n + shift);
          auto *parts = a.out<bf16>(n * ranks + shift), *narrow = a.out<bf16>(n);
          ops::cast<bf16, float>(a.s, parts, x, n * ranks + shift);
          const bf16 *first = parts + shift, *last = parts + (ranks - 1) * n;
          ops::sum_parts<float, bf16>(a.s, set, parts, 0, parts + n, n, ranks, false);
          ops::sum_parts<float, bf16>(a.s, added + shift, first, 0, first + n, n, ranks, true);
          ops::sum_parts<bf16, bf16>(a.s, narrow, last, ranks / 2, parts, n, ranks, false);
          ops::sum_parts<float, float>(a.s, added + shift, x + shift, 0, x + shift + n, n, ranks, true);
          ops::sum_parts<bf16, bf16>(a.s, parts, parts, 0, parts + n, n, ranks, false);
          if (ranks == 2) ops::sum_parts<bf16, bf16>(a.s, parts, parts + n, 1, parts, n, ranks, false);
        });
      compare([&](Space& a) {
        auto *w = a.out<float>(n), *cut = a.out<float>(n);
        ops::init_normal(a.s, w, 99, 3, 1000000001 + shift, n, 0.1f, 0.02f);
        ops::init_normal(a.s, cut, 99, 3, 1000000001 + shift, n / 3, 0.1f, 0.02f);
        ops::init_normal(a.s, cut + n / 3, 99, 3, 1000000001 + shift + n / 3, n - n / 3, 0.1f, 0.02f);
      });
    }
}

TEST_CASE("a number in halves is the number, and the upper half is the bf16 nearest to it", "[ops]") {
  std::vector<uint32_t> all = {0,           0x80000000u, 1,           0x7fff,      0x8000,
                               0x8001,      0x3f808000u, 0xbf808000u, 0x3f818000u, 0x7f7fffffu,
                               0xff7fffffu, 0x7f7f8000u, 0x7f800000u, 0xff800000u};
  for (uint32_t i = 0, x = 12345; i < 1000000; ++i) all.push_back(x = x * 1664525u + 1013904223u);
  int64_t wrong = 0;
  for (const uint32_t bits : all) {
    const float f = float_of(bits);
    const bf16 high = nearest_away(f);
    if (std::isnan(f)) {
      wrong += !std::isnan(float(high)) || !std::isnan(join(high, rest_of(f)));
      continue;
    }
    wrong += bits_of(join(high, rest_of(f))) != bits;
    if (std::isinf(float(high))) wrong += !std::isinf(float(bf16(f)));
    else wrong += std::abs(double(f) - double(high)) != std::abs(double(f) - double(bf16(f)));
    // Of two as near: up in magnitude, where the other rounding takes the even one.
    if ((bits & 0xffffu) == 0x8000u) wrong += std::abs(float(high)) <= std::abs(f);
  }
  CHECK(wrong == 0);
  for (const uint32_t nan : {0x7f800001u, 0x7fffffffu, 0xffffffffu, 0x7fc08000u})
    CHECK(std::isnan(float(nearest_away(float_of(nan)))));
}

namespace {
// What is done to weights gives the same bits in halves as in one piece.
template <class M, class G>
void check_halves(Backend backend, int64_t n, int64_t shift) {
  CAPTURE(n, shift, name_of(dtype_of<M>), name_of(dtype_of<G>));
  const auto r = run_on(backend, [&](Space& a) {
    auto *whole = a.out<float>(n + shift) + shift, *copied = a.out<float>(n + shift) + shift;
    auto *high = a.out<bf16>(n + shift) + shift, *rest = a.out<bf16>(n + shift) + shift,
         *cast = a.out<bf16>(n + shift) + shift;
    const Halves halves{high, reinterpret_cast<int16_t*>(rest)};
    auto* grad = a.out<G>(n + shift) + shift;
    const float* normal = a.in<float>(n + shift);
    ops::cast<G, float>(a.s, grad - shift, normal, n + shift);
    const ops::AdamW* now = a.in(std::vector<ops::AdamW>{{1e-2f, 0.9f, 0.95f, 1e-8f, 0.1f, 3}});
    ops::copy_weights(a.s, copied, normal, n);
    for (const Masters& w : {Masters(whole), Masters(halves)}) {
      M *m = a.out<M>(n + shift) + shift, *v = a.out<M>(n + shift) + shift;
      ops::cast<M, float>(a.s, m - shift, normal, n + shift);
      ops::fill(a.s, w, 0.3f, n);
      ops::copy_weights(a.s, w, normal, n / 2);
      ops::init_normal(a.s, w + n / 3, 1, 2, 5, n / 3, 0.1f, 0.5f);
      a.s.zero(v - shift, (n + shift) * int64_t(sizeof(M)));
      for (int i = 0; i < 3; ++i) ops::adamw(a.s, w, m, v, grad, nullptr, 0.0f, now, n, n / 2, 1, 2, 4 * shift);
    }
    ops::cast_weights<bf16>(a.s, cast, whole, n);
  });
  const auto* whole = reinterpret_cast<const uint32_t*>(r[0].bits.data()) + shift;
  const auto* high = reinterpret_cast<const bf16*>(r[2].bits.data()) + shift;
  const auto* rest = reinterpret_cast<const int16_t*>(r[3].bits.data()) + shift;
  const auto* cast = reinterpret_cast<const bf16*>(r[4].bits.data()) + shift;
  int64_t wrong = 0;
  for (int64_t i = 0; i < n; ++i) {
    wrong += bits_of(join(high[i], rest[i])) != whole[i] || std::isnan(float(high[i]));
    wrong += high[i].bits != cast[i].bits;
  }
  CHECK(wrong == 0);
}
void check_halves(Backend backend) {
  for (int64_t n : {1, 3, 4, 1000, 4097, 300001})
    for (int64_t shift : {0, 1}) {
      check_halves<float, float>(backend, n, shift);
      check_halves<bf16, float>(backend, n, shift);
      check_halves<float, bf16>(backend, n, shift);
      check_halves<bf16, bf16>(backend, n, shift);
    }
}
}  // namespace

TEST_CASE("weights in halves are made and updated as those in one piece", "[ops]") { check_halves(Backend::cpu); }
TEST_CASE("GPU: weights in halves are made and updated as those in one piece", "[ops][gpu][small]") {
  NEEDS_GPU();
  check_halves(Backend::gpu);
}

TEST_CASE("GPU: initial weights do not depend on the cut", "[ops][gpu]") {
  NEEDS_GPU();
  const int64_t n = 10007;
  const auto r = run_on(Backend::gpu, [&](Space& a) {
    auto *w = a.out<float>(n), *cut = a.out<float>(n);
    ops::init_normal(a.s, w, 99, 3, 17, n, 0.1f, 0.02f);
    for (int64_t first = 0, size = 1; first < n; first += size, size = size * 3 + 1)
      ops::init_normal(a.s, cut + first, 99, 3, 17 + first, std::min(size, n - first), 0.1f, 0.02f);
  });
  CHECK(same_bits(r[0].bits, r[1].bits));
}

namespace {
template <class T, class G>
void compare_matmuls(int64_t M, int64_t N, int64_t K, Mode before = Mode::run, bool fuse = true) {
  INFO(name_of(dtype_of<T>) << " " << name_of(dtype_of<G>) << " M " << M << " N " << N << " K " << K);
  const double small = 1 / std::sqrt(double(K));
  compare(
      [&](Space& a) {
        auto *y = a.out<T>(M * N), *y2 = a.out<T>(M * N), *y3 = a.inout<T>(M * N), *g = a.out<T>(M * N),
             *h = a.out<T>(M * N), *dx = a.out<T>(M * K), *dx2 = a.inout<T>(M * K), *x = a.in<T>(M * K),
             *h2 = a.inout<T>(M * K, 3), *g2 = a.out<T>(M * K), *h3 = a.inout<T>(2 * M * K, 2), *g3 = a.out<T>(M * K),
             *h4 = a.out<T>(M * (N / 2 * 2)), *g4 = a.out<T>(M * (N / 2)), *w = a.in<T>(N * K, small),
             *bias = a.in<T>(N), *residual = a.in<T>(M * N), *dy = a.in<T>(M * N);
        auto *dw = a.out<G>(N * K), *dw2 = a.inout<G>(N * K), *db = a.out<G>(N), *db2 = a.out<G>(N / 2),
             *db3 = a.out<G>(N), *db4 = a.out<G>(N / 2);
        auto* y4 = a.inout<T>(M * N);
        auto *partials = a.work<float>(ops::bias_grad_partials(M, N)),
             *pieces = a.work<float>(ops::bias_grad_partials(M, N)),
             *more_pieces = a.work<float>(ops::bias_grad_partials(M, N));
        const T* none = nullptr;
        a.dev.fuse = fuse;
        const auto all = [&] {
          ops::matmul<T>(a.s, y, x, w, none, none, M, N, K);
          ops::matmul<T>(a.s, y2, x, w, bias, residual, M, N, K);
          ops::matmul<T>(a.s, y3, x, w, bias, y3, M, N, K);
          ops::matmul_gelu<T>(a.s, g, h, ops::Hidden::kept, x, w, bias, M, N, K);
          ops::matmul_dgrad<T>(a.s, dx, dy, w, M, N, K, false);
          ops::matmul_dgrad<T>(a.s, dx2, dy, w, M, N, K, true);
          ops::matmul_dgrad_activation<T>(a.s, ops::Activation::gelu, g2, ops::Activated::made, h2, dy, w, M, N, K);
          ops::matmul_dgrad_activation<T>(a.s, ops::Activation::swiglu, g3, ops::Activated::made, h3, dy, w, M, N, K);
          ops::matmul_swiglu<T>(a.s, g4, h4, ops::Hidden::kept, x, w, M, N / 2, K);
          ops::matmul_wgrad<T, G>(a.s, dw, dy, x, M, N, K, false);
          ops::matmul_wgrad<T, G>(a.s, dw2, dy, x, M, N, K, true);
          ops::bias_grad<T, G>(a.s, db, dy, partials, M, N, N);
          ops::bias_grad<T, G>(a.s, db2, dy, partials, M, N / 2, N);
          ops::bias_grad<T, G>(a.s, db2, dy + N / 2, partials, M, N / 2, N, true);
          ops::ColumnSums<G> later;
          ops::bias_grad<T, G>(a.s, db3, dy, pieces, M, N, N, false, &later);
          ops::bias_grad<T, G>(a.s, db4, dy, more_pieces, M, N / 2, N, false, &later);
          ops::sum_columns(a.s, later);
          ops::add_bias<T>(a.s, y4, bias, M, N / 2, N);
          ops::add<T>(a.s, y4, y4, residual, M * N);
        };
        if (before == Mode::tune && a.dev.backend == Backend::gpu) {
          std::vector<std::pair<void*, std::vector<char>>> kept;  // tuning writes over its arrays
          const auto keep = [&](void* p, int64_t bytes) {
            kept.emplace_back(p, std::vector<char>(bytes));
            a.s.copy(kept.back().second.data(), p, bytes);
          };
          for (T* p : {y3, residual, dy}) keep(p, M * N * int64_t(sizeof(T)));
          for (T* p : {dx2, x, h2}) keep(p, M * K * int64_t(sizeof(T)));
          keep(h3, 2 * M * K * int64_t(sizeof(T)));
          keep(w, N * K * int64_t(sizeof(T))), keep(bias, N * int64_t(sizeof(T))),
              keep(dw2, N * K * int64_t(sizeof(G)));
          a.s.synchronize();
          a.dev.mode = Mode::tune;
          all();
          a.dev.mode = Mode::run;
          for (auto& k : kept) a.s.copy(k.first, k.second.data(), int64_t(k.second.size()));
        }
        all();
        a.dev.fuse = true;
      },
      2);
}
}  // namespace

namespace {
#if FSDP_CUDA
struct Workspace {  // that tuning works in
  Device& dev = test_device(Backend::gpu);
  Workspace() {
    CUDA_CHECK(cudaMalloc(&dev.blas_workspace, 32 << 20));
    dev.blas_workspace_bytes = 32 << 20;
  }
  ~Workspace() {
    cudaDeviceSynchronize();
    cudaFree(dev.blas_workspace);
    dev.blas_workspace = nullptr, dev.blas_workspace_bytes = 0;
  }
};
// What a product with an activation makes on a GPU: h or its gradient, and g. one: that which is wanted either way.
enum class Outputs { both, one };
std::vector<Space::Result> with_activation(ops::Pass pass, ops::Activation kind, Outputs outputs, int64_t M, int64_t F,
                                           int64_t K, bool in_one) {
  return run_on(Backend::gpu, [&](Space& a) {
    const int64_t hidden = (kind == ops::Activation::gelu ? 1 : 2) * F;
    const bool forward = pass == ops::Pass::forward;
    struct Array {
      bf16* p;
      int64_t n;
      std::vector<bf16> first;
    };
    std::vector<Array> arrays = {
        {a.inout<bf16>(M * hidden, 3), M * hidden, {}},
        {a.in<bf16>(M * K), M * K, {}},
        {a.in<bf16>((forward ? hidden : F) * K, 1 / std::sqrt(double(K))), (forward ? hidden : F) * K, {}}};
    bf16 *h = arrays[0].p, *x = arrays[1].p, *w = arrays[2].p, *g = a.out<bf16>(M * F);
    const auto call = [&] {
      const bf16* const none = nullptr;
      const bool one = outputs == Outputs::one;
      const auto kept = one ? ops::Hidden::scratch : ops::Hidden::kept;
      if (!forward)
        ops::matmul_dgrad_activation<bf16>(a.s, kind, g, one ? ops::Activated::given : ops::Activated::made, h, x, w, M,
                                           K, F);
      else if (kind == ops::Activation::gelu) ops::matmul_gelu<bf16>(a.s, g, h, kept, x, w, none, M, F, K);
      else ops::matmul_swiglu<bf16>(a.s, g, h, kept, x, w, M, F, K);
    };
    for (Array& t : arrays) t.first.resize(size_t(t.n)), a.s.copy(t.first.data(), t.p, t.n * 2);
    a.s.synchronize();
    a.dev.fuse = in_one, a.dev.mode = Mode::tune;  // which writes over its arrays
    call();
    a.dev.mode = Mode::run;
    for (const Array& t : arrays) a.s.copy(t.p, t.first.data(), t.n * 2);
    CHECK(ops::in_one_kernel(a.dev, pass, kind, M, F, K) == (in_one && a.dev.compute_capability == 90));
    call();
    a.s.synchronize();
    a.dev.fuse = true;
  });
}
#endif
}  // namespace

// Edges of tiles (128 x 192, of gates and ups 96 each; 64 deep), more tiles than a GPU has multiprocessors, and fewer.
TEST_CASE("GPU: a product and an activation in one kernel have the bits of two", "[ops][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  const Workspace workspace;
  for (const auto [M, K, F] : {std::array<int64_t, 3>{1, 8, 8},
                               {128, 64, 192},
                               {777, 328, 1032},
                               {1000, 40, 200},
                               {2048, 768, 3072},
                               {4099, 136, 1544}})
    for (const auto pass : {ops::Pass::forward, ops::Pass::backward})
      for (const auto kind : {ops::Activation::gelu, ops::Activation::swiglu}) {
        INFO("M " << M << " K " << K << " F " << F << (kind == ops::Activation::gelu ? " GELU" : " SwiGLU")
                  << (pass == ops::Pass::forward ? " forward" : " backward"));
        const auto run = [&](Outputs outputs, bool in_one) {
          return with_activation(pass, kind, outputs, M, F, K, in_one);
        };
        const auto one = run(Outputs::both, true), two = run(Outputs::both, false);
        for (size_t i = 0; i < one.size(); ++i) CHECK(same_bits(one[i].bits, two[i].bits));
        // What the activation makes and what it reads, forward; and backward the other way about.
        const size_t still = pass == ops::Pass::forward ? one.size() - 1 : 0;
        CHECK(same_bits(run(Outputs::one, true)[still].bits, two[still].bits));
      }
#endif
}

TEST_CASE("GPU: matrix products", "[ops][gpu]") {
  NEEDS_GPU();
  for (int64_t M : {1, 7, 129})
    for (int64_t N : {64, 768})
      for (int64_t K : {64, 1000}) {
        compare_matmuls<float, float>(M, N, K);
        compare_matmuls<bf16, bf16>(M, N, K);
        compare_matmuls<bf16, float>(M, N, K);
      }
  compare_matmuls<float, float>(33, 257, 4096);
  compare_matmuls<bf16, float>(512, 512, 4096);
  compare_matmuls<bf16, float>(2048, 8, 64);
  compare_matmuls<bf16, bf16>(129, 768, 1000, Mode::run, /*fuse=*/false);
  compare_matmuls<float, float>(129, 64, 1000, Mode::run, /*fuse=*/false);
}

TEST_CASE("GPU: tuned matrix products", "[ops][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  const Workspace workspace;
  Device& dev = test_device(Backend::gpu);
  compare_matmuls<bf16, bf16>(512, 768, 768, Mode::tune);
  compare_matmuls<bf16, float>(129, 64, 1000, Mode::tune);
  compare_matmuls<float, float>(256, 256, 256, Mode::tune);
  compare_matmuls<bf16, bf16>(512, 768, 768, Mode::tune, /*fuse=*/false);
  dev.tune_matmuls = false;
  compare_matmuls<bf16, bf16>(256, 768, 768, Mode::tune);
  dev.tune_matmuls = true;
#endif
}

TEST_CASE("GPU: fp64 is refused", "[ops][gpu]") {
  NEEDS_GPU();
  Stream& s = test_device(Backend::gpu).compute();
  double x = 0;
  CHECK_THROWS_AS(ops::gelu_forward<double>(s, &x, &x, 1), Error);
  CHECK_THROWS_AS(ops::matmul<double>(s, &x, &x, &x, nullptr, nullptr, 1, 1, 1), Error);
}
