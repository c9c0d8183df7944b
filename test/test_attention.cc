// nsa_attention.h: the CPU twins against the definition (softmax and finite differences in double), then every GPU
// kernel against the double twin, with the bf16 twin's own error as the measure. GPU cases have the tag [gpu]; those
// with [small] too are for compute-sanitizer.
#include "test/arrays.h"
#include "test/errors.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>
#include <set>

#include "attention/dense.h"
#include "attention/dq_order.h"
#include "cpu/attention.h"
#include "lib/ops/philox.h"
#include "test/worst.h"

using Doubles = std::vector<double>;

namespace {

// Rows of `used` columns in a buffer with more columns than that, and with a row to spare before the first and after
// the last. All bytes are 0xff at first, which is a NaN in every type: what nobody may touch must stay so, and what was
// read from there shows in the results.
template <class T>
struct Columns {
  int64_t rows, used, ld;
  std::vector<T> v;
  Columns(int64_t rows, int64_t used, int64_t spare) : rows(rows), used(used), ld(used + spare), v((rows + 2) * ld) {
    std::memset(static_cast<void*>(v.data()), 0xff, v.size() * sizeof(T));
  }
  T* p() { return v.data() + ld; }
  const T* p() const { return v.data() + ld; }
  T& at(int64_t row, int64_t c) { return p()[row * ld + c]; }
  bool untouched_outside() const {
    bool clean = true;
    for (int64_t i = 0; i < int64_t(v.size()); ++i) {
      if (i >= ld && i < (rows + 1) * ld && i % ld < used) continue;
      const auto* bytes = reinterpret_cast<const unsigned char*>(&v[i]);
      for (size_t b = 0; b < sizeof(T); ++b) clean = clean && bytes[b] == 0xff;
    }
    return clean;
  }
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

AttentionShape shape(int64_t B, int64_t T, int64_t H, int64_t HKV, int64_t D) {
  AttentionShape a = {};
  a.B = B, a.T = T, a.H = H, a.HKV = HKV, a.D = D, a.scale = 1 / std::sqrt(double(D));
  return a;
}
AttentionShape with_values(AttentionShape a, int64_t DV) {  // of another head dim than keys
  a.DV = DV;
  return a;
}
AttentionShape windowed(AttentionShape a, int64_t window) {
  a.sees = Sees::window, a.window = window;
  return a;
}
// keys 0: those that end in the sequence, or one that no query sees.
AttentionShape compressed(AttentionShape a, int64_t block, int64_t stride, int64_t keys = 0) {
  a.sees = Sees::compressed, a.block = block, a.stride = stride;
  a.keys = keys ? keys : a.T < block ? 1 : (a.T - block) / stride + 1;
  return a;
}
int64_t keys_of(const AttentionShape& a) { return a.keys ? a.keys : a.T; }
bool sees(const AttentionShape& a, int64_t t, int64_t j) {
  if (a.sees == Sees::compressed) return a.stride * j + a.block - 1 <= t;
  return j <= t && (a.sees == Sees::causal || j > t - a.window);
}
bool sees_any(const AttentionShape& a, int64_t t) { return a.sees != Sees::compressed || sees(a, t, 0); }
bool seen_by_any(const AttentionShape& a, int64_t j) { return sees(a, a.sees == Sees::window ? j : a.T - 1, j); }

// nearly_closed: gates of 5e-5 or so in front of gradients as much larger, which leave probabilities that fp16 lacks.
enum Gating { ungated, gated, nearly_closed };

// The arrays of one call, every row stride another one: k and v are columns of one buffer, and so are their gradients.
// Inputs are normal numbers rounded to bf16, so that every type computes the same function.
template <class T>
struct Tensors {
  AttentionShape a;
  Gating gating;
  Columns<T> q, kv, d_o, gate, o, dq, dkv, dgate;
  Columns<acc_t<T>> lse;
  Columns<float> amax;  // of float kernels on a GPU untouched
  explicit Tensors(const AttentionShape& s, uint64_t seed = 1, Gating gating = ungated)
      : a(s),
        gating(gating),
        q(s.B * s.T, s.H * s.D, 8),
        kv(s.B * keys_of(s), s.HKV * (s.D + s.v_dim()), 16),
        d_o(s.B * s.T, s.H * s.v_dim(), 24),
        gate(s.B * s.T, s.H, 3),
        o(s.B * s.T, s.H * s.v_dim(), 24),
        dq(s.B * s.T, s.H * s.D, 32),
        dkv(s.B * keys_of(s), s.HKV * (s.D + s.v_dim()), 40),
        dgate(s.B * s.T, s.H, 3),
        lse(1, s.B * s.H * s.T, 5),
        amax(1, s.B * s.H * s.T, 5) {
    a.ld_q = q.ld, a.ld_kv = kv.ld, a.ld_o = o.ld, a.ld_dq = dq.ld, a.ld_dkv = dkv.ld;
    fill(q, seed, 1), fill(kv, seed, 2), fill(d_o, seed, 3, gating == nearly_closed ? 0x1p14f : 1);
    fill(gate, seed, 4, 1, gating == nearly_closed ? -10 : 0);
  }
  static void fill(Columns<T>& x, uint64_t seed, uint32_t tensor, float deviation = 1, float mean = 0) {
    for (int64_t i = 0; i < x.rows * x.used; ++i)
      x.at(i / x.used, i % x.used) =
          T(float(bf16(philox_normals(seed, tensor, uint64_t(i / 4)).x[i % 4] * deviation + mean)));
  }
  const T* k() const { return kv.p(); }
  const T* v() const { return kv.p() + a.HKV * a.D; }
  T* dk() { return dkv.p(); }
  T* dv() { return dkv.p() + a.HKV * a.D; }
  Gate<T> gates() { return gating ? Gate<T>{gate.p(), dgate.p(), gate.ld} : Gate<T>{}; }
  bool untouched_outside() const {
    return o.untouched_outside() && dq.untouched_outside() && dkv.untouched_outside() && dgate.untouched_outside() &&
           lse.untouched_outside() && amax.untouched_outside();
  }
};

// The definition, in plain sums over the keys that a query sees.
void naive(Tensors<double>& x) {
  const AttentionShape& a = x.a;
  const int64_t keys = keys_of(a), DV = a.v_dim();
  for (Columns<double>* c : {&x.o, &x.dq, &x.dkv})
    for (int64_t r = 0; r < c->rows; ++r) std::fill_n(&c->at(r, 0), c->used, 0.0);
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t h = 0; h < a.H; ++h)
      for (int64_t t = 0; t < a.T; ++t) {
        const int64_t row = b * a.T + t, kv_head = h / (a.H / a.HKV), head = kv_head * a.D;
        const int64_t v_head = a.HKV * a.D + kv_head * DV;
        const double *q = &x.q.at(row, h * a.D), *d_o = &x.d_o.at(row, h * DV);
        double *o = &x.o.at(row, h * DV), *dq = &x.dq.at(row, h * a.D);
        std::vector<int64_t> seen;
        for (int64_t j = 0; j < keys; ++j)
          if (sees(a, t, j)) seen.push_back(b * keys + j);
        Doubles p;
        for (int64_t j : seen) p.push_back(a.scale * std::inner_product(q, q + a.D, &x.kv.at(j, head), 0.0));
        const double top = p.empty() ? 0 : *std::max_element(p.begin(), p.end());
        double sum = 0;
        for (double& s : p) sum += s = std::exp(s - top);
        x.lse.p()[(b * a.H + h) * a.T + t] = top + std::log(sum);
        for (size_t i = 0; i < p.size(); ++i) {
          p[i] /= sum;
          for (int64_t d = 0; d < DV; ++d) o[d] += p[i] * x.kv.at(seen[i], v_head + d);
        }
        const double delta = std::inner_product(d_o, d_o + DV, o, 0.0);
        const double g = x.gating ? 1 / (1 + std::exp(-x.gate.at(row, h))) : 1;
        if (x.gating) x.dgate.at(row, h) = g * (1 - g) * delta;
        for (size_t i = 0; i < p.size(); ++i) {
          const double dp = std::inner_product(d_o, d_o + DV, &x.kv.at(seen[i], v_head), 0.0);
          const double ds = a.scale * p[i] * g * (dp - delta);
          for (int64_t d = 0; d < a.D; ++d) {
            dq[d] += ds * x.kv.at(seen[i], head + d);
            x.dkv.at(seen[i], head + d) += ds * q[d];
          }
          for (int64_t d = 0; d < DV; ++d) x.dkv.at(seen[i], v_head + d) += p[i] * g * d_o[d];
        }
      }
}

// What no query sees has no gradient, and a query that sees nothing gives zeros and -inf.
template <class T>
void check_unseen(Tensors<T>& x) {
  const AttentionShape& a = x.a;
  int64_t broken = 0;
  for (int64_t row = 0; row < a.B * a.T; ++row) {
    if (sees_any(a, row % a.T)) continue;
    for (int64_t c = 0; c < x.o.used; ++c) broken += float(x.o.at(row, c)) != 0;
    for (int64_t c = 0; c < x.dq.used; ++c) broken += float(x.dq.at(row, c)) != 0;
    for (int64_t h = 0; h < a.H; ++h) {
      broken += x.lse.p()[(row / a.T * a.H + h) * a.T + row % a.T] != -INFINITY;
      if (x.gating) broken += float(x.dgate.at(row, h)) != 0;
    }
  }
  for (int64_t row = 0; row < a.B * keys_of(a); ++row)
    for (int64_t c = 0; c < x.dkv.used && !seen_by_any(a, row % keys_of(a)); ++c)
      broken += float(x.dkv.at(row, c)) != 0;
  CHECK(broken == 0);
}

// amax is the largest |o| of each query and head, to the bit, of a NaN infinity.
template <class T>
void check_amax(Tensors<T>& x) {
  const AttentionShape& a = x.a;
  int64_t broken = 0;
  for (int64_t row = 0; row < a.B * a.T; ++row)
    for (int64_t h = 0; h < a.H; ++h) {
      float most = 0;
      for (int64_t c = h * a.v_dim(); c < (h + 1) * a.v_dim(); ++c) {
        const float o = float(x.o.at(row, c));
        most = std::max(most, std::isnan(o) ? INFINITY : std::abs(o));
      }
      broken += x.amax.p()[(row / a.T * a.H + h) * a.T + row % a.T] != most;
    }
  CHECK(broken == 0);
}

template <class T>
bool same_results(const Tensors<T>& x, const Tensors<T>& y) {
  return same_bits(x.o.v, y.o.v) && same_bits(x.lse.v, y.lse.v) && same_bits(x.amax.v, y.amax.v) &&
         same_bits(x.dq.v, y.dq.v) && same_bits(x.dkv.v, y.dkv.v) && same_bits(x.dgate.v, y.dgate.v);
}
template <class T>
bool same_inputs(const Tensors<T>& x, const Tensors<T>& y) {
  return same_bits(x.q.v, y.q.v) && same_bits(x.kv.v, y.kv.v) && same_bits(x.d_o.v, y.d_o.v) &&
         same_bits(x.gate.v, y.gate.v);
}

template <class T>
void twin_forward(Tensors<T>& x) {
  Stream& s = test_device(Backend::cpu).compute();
  attention_forward<T>(s, x.o.p(), x.lse.p(), x.q.p(), x.k(), x.v(), x.a, x.amax.p());
  s.synchronize();
}
template <class T>
void twin(Tensors<T>& x) {
  twin_forward(x);
  Stream& s = test_device(Backend::cpu).compute();
  std::vector<acc_t<T>> work(attention_backward_workspace<T>(x.a));
  attention_backward<T>(s, x.dq.p(), x.dk(), x.dv(), x.d_o.p(), x.q.p(), x.k(), x.v(), x.o.p(), x.lse.p(), work.data(),
                        x.a, x.gates());
  s.synchronize();
}
double loss(Tensors<double>& x) {  // whose gradient by (gate times) o is d_o
  twin_forward(x);
  double sum = 0;
  for (int64_t r = 0; r < x.o.rows; ++r)
    for (int64_t c = 0; c < x.o.used; ++c)
      sum += x.o.at(r, c) * x.d_o.at(r, c) / (x.gating ? 1 + std::exp(-x.gate.at(r, c / x.a.v_dim())) : 1);
  return sum;
}

// The norm of the difference over the norm of the reference; where that is nearly nothing, over a hundredth a number.
template <class T>
double error(const Columns<T>& x, const Columns<double>& ref, int64_t from, int64_t to) {
  double difference = 0, norm = 0;
  for (int64_t r = 0; r < ref.rows; ++r)
    for (int64_t c = from; c < to; ++c) {
      const double want = ref.p()[r * ref.ld + c], d = double(x.p()[r * x.ld + c]) - want;
      difference += d * d, norm += want * want;
    }
  return std::sqrt(difference / std::max(norm, 1e-4 * double(ref.rows * (to - from))));
}
struct Errors {
  double o, lse, dq, dk, dv, dgate;  // lse: the largest difference; NaN is kept
};
template <class T>
Errors errors(const Tensors<T>& x, const Tensors<double>& ref) {
  double worst = 0;
  for (int64_t i = 0; i < ref.lse.used; ++i) {
    if (double(x.lse.p()[i]) == ref.lse.p()[i]) continue;  // both -inf, maybe
    const double d = std::abs(double(x.lse.p()[i]) - ref.lse.p()[i]);
    worst = worse(worst, d);
  }
  const int64_t k = x.a.HKV * x.a.D;
  return {error(x.o, ref.o, 0, ref.o.used),       worst,
          error(x.dq, ref.dq, 0, ref.dq.used),    error(x.dkv, ref.dkv, 0, k),
          error(x.dkv, ref.dkv, k, ref.dkv.used), x.gating ? error(x.dgate, ref.dgate, 0, x.a.H) : 0};
}

std::string text(const AttentionShape& a) {
  std::string rule;
  if (a.sees == Sees::window) rule = strf(" window %lld", (long long)a.window);
  if (a.sees == Sees::compressed)
    rule = strf(" block %lld stride %lld keys %lld", (long long)a.block, (long long)a.stride, (long long)a.keys);
  return strf("B %lld T %lld H %lld HKV %lld D %lld DV %lld%s", (long long)a.B, (long long)a.T, (long long)a.H,
              (long long)a.HKV, (long long)a.D, (long long)a.v_dim(), rule.c_str());
}

const std::vector<AttentionShape>& cpu_shapes() {  // odd ones, and such that cross the twin's tiles of 64 and 256
  static const std::vector<AttentionShape> list = {shape(1, 1, 1, 1, 1),
                                                   shape(2, 5, 3, 3, 3),
                                                   shape(1, 7, 4, 2, 5),
                                                   shape(2, 6, 3, 1, 4),
                                                   shape(1, 9, 8, 2, 2),
                                                   shape(2, 64, 2, 1, 8),
                                                   shape(1, 65, 3, 1, 7),
                                                   shape(2, 300, 4, 2, 33),
                                                   windowed(shape(2, 9, 4, 2, 3), 1),
                                                   windowed(shape(1, 9, 2, 1, 4), 4),
                                                   windowed(shape(2, 300, 4, 2, 9), 70),
                                                   compressed(shape(2, 9, 4, 2, 3), 3, 2),
                                                   compressed(shape(1, 40, 2, 1, 4), 16, 8),
                                                   compressed(shape(2, 300, 4, 2, 9), 32, 16),
                                                   with_values(shape(2, 7, 4, 2, 5), 3),
                                                   with_values(shape(1, 70, 2, 1, 6), 9),
                                                   with_values(windowed(shape(1, 300, 3, 1, 12), 70), 8),
                                                   with_values(compressed(shape(2, 90, 4, 2, 9), 16, 8), 4)};
  return list;
}

// Every rule of sight but the causal one at each length, with whatever sequences, heads and head dims `make` gives it.
template <class F>
std::vector<AttentionShape> rules(F make) {
  std::vector<AttentionShape> list;
  for (int64_t T : {1, 15, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 1000, 2049}) {
    for (int64_t window : {1, 16, 512, 5000}) list.push_back(windowed(make(T, int64_t(list.size())), window));
    for (int64_t block : {32, 64, 16}) list.push_back(compressed(make(T, int64_t(list.size())), block, 16));
  }
  // Keys that nobody sees, and fewer than there might be.
  list.push_back(compressed(make(129, int64_t(list.size())), 32, 16, 200));
  list.push_back(compressed(make(200, int64_t(list.size())), 150, 16));
  list.push_back(compressed(make(1000, int64_t(list.size())), 4, 2, 130));
  return list;
}

}  // namespace

// --------------------------------------------------------------------------------------------------------- CPU twins

TEST_CASE("attention is a softmax over the keys that a query sees", "[attention]") {
  const auto check_twin = [](const AttentionShape& a, Gating gating) {
    INFO(text(a) << " scale " << a.scale);
    Tensors<double> x(a, 1, gating), ref(a, 1, gating);
    twin(x), naive(ref);
    const Errors e = errors(x, ref);
    CHECK(e.lse <= 1e-12 * std::max(1.0, a.scale));
    for (double error : {e.o, e.dq, e.dk, e.dv, e.dgate}) CHECK(error <= 1e-12 * std::max(1.0, 10 * a.scale));
    CHECK(x.untouched_outside());
    CHECK(same_inputs(x, ref));
    check_unseen(x), check_amax(x);
  };
  for (AttentionShape a : cpu_shapes())
    for (double scale : {a.scale, 10.0}) {  // the second: scores of hundreds, of which exp alone would overflow
      a.scale = scale;
      check_twin(a, ungated);
    }
  Gating turn = ungated;
  for (const AttentionShape& a : rules([](int64_t T, int64_t n) { return shape(n % 2 + 1, T, 2 + n % 3, 1, 3); }))
    check_twin(a, turn = turn ? ungated : gated);
}

TEST_CASE("attention's gradients are central differences", "[attention]") {
  for (AttentionShape a : cpu_shapes()) {
    if (a.D == 4) a.scale = 0.7;
    INFO(text(a));
    Tensors<double> x(a, 5, gated);
    twin(x);
    CHECK(x.untouched_outside());
    const Columns<double> dq = x.dq, dkv = x.dkv, dgate = x.dgate;
    struct Pair {
      Columns<double>& input;
      const Columns<double>& gradient;
    };
    for (const Pair& p : {Pair{x.q, dq}, Pair{x.kv, dkv}, Pair{x.gate, dgate}}) {
      const double h = 1e-5;
      double worst = 0, largest = 1e-3;
      const auto slope_at = [&](const Doubles& direction) {
        const Columns<double> kept = p.input;
        double f[2];
        for (int side : {0, 1}) {
          for (int64_t i = 0; i < int64_t(direction.size()); ++i) {
            const int64_t r = i / kept.used, c = i % kept.used;
            p.input.at(r, c) = kept.p()[r * kept.ld + c] + (side ? h : -h) * direction[i];
          }
          f[side] = loss(x);
        }
        p.input = kept;
        return (f[1] - f[0]) / (2 * h);
      };
      Doubles direction(p.input.rows * p.input.used);
      if (direction.size() < 200) {  // every number by itself
        for (size_t i = 0; i < direction.size(); ++i) {
          direction[i] = 1;
          const double g = p.gradient.p()[int64_t(i) / p.input.used * p.gradient.ld + int64_t(i) % p.input.used];
          worst = worse(worst, std::abs(slope_at(direction) - g)), largest = std::max(largest, std::abs(g));
          direction[i] = 0;
        }
      } else {  // all at once, in a few random directions
        for (uint64_t seed : {1, 2, 3}) {
          double slope = 0, norm = 0;
          for (size_t i = 0; i < direction.size(); ++i) {
            const double g = p.gradient.p()[int64_t(i) / p.input.used * p.gradient.ld + int64_t(i) % p.input.used];
            direction[i] = double(philox_normals(seed, 9, i / 4).x[i % 4]);
            slope += direction[i] * g, norm += g * g;
          }
          worst = worse(worst, std::abs(slope_at(direction) - slope)), largest = std::max(largest, std::sqrt(norm));
        }
      }
      CHECK(worst <= 1e-7 * largest);
    }
  }
}

TEST_CASE("float and bf16 attention are the double one, rounded", "[attention]") {
  std::vector<AttentionShape> list = cpu_shapes();
  list.push_back(shape(1, 513, 6, 2, 64));
  for (const AttentionShape& a : list) {
    INFO(text(a));
    Tensors<double> d(a, 1, gated);
    Tensors<float> f(a, 1, gated);
    Tensors<bf16> b(a, 1, gated);
    twin(d), twin(f), twin(b);
    CHECK(f.untouched_outside());
    CHECK(b.untouched_outside());
    const Errors e = errors(f, d), w = errors(b, d);
    for (double x : {e.o, e.lse, e.dq, e.dk, e.dv, e.dgate}) CHECK(x <= 5e-6);
    CHECK(w.lse <= 5e-6);  // the inputs are the same and the scores are float
    for (double x : {w.o, w.dq, w.dk, w.dv, w.dgate}) CHECK(x <= 5e-3);
  }
}

// g++ 12 once made loads of it, for AVX-512, that took four rows' factors of the next step along.
TEST_CASE("a product reads nothing behind its factors", "[attention]") {
  const int64_t page = 4096, rows = 16, columns = 64;
  const auto check = [&](auto zero) {
    using A = decltype(zero);
    const int64_t bytes = rows * columns * int64_t(sizeof(A)), whole = (bytes + page - 1) / page * page;
    void* memory = mmap(nullptr, size_t(whole + page), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    REQUIRE(mprotect(static_cast<char*>(memory) + whole, size_t(page), PROT_NONE) == 0);
    A* a = reinterpret_cast<A*>(static_cast<char*>(memory) + whole - bytes);
    for (int64_t i = 0; i < rows * columns; ++i) a[i] = A(i % 7);
    const std::vector<A> b(rows * columns, A(1));
    std::vector<A> c(columns * columns);
    volatile int64_t ld = columns;  // as in a loop over blocks: strides that the compiler does not know
    volatile int m = int(columns), k = int(rows);
    cpu::attention_detail::multiply_add(c.data(), ld, a, 1, ld, b.data(), ld, m, m, k);
    CHECK(std::accumulate(c.begin(), c.end(), 0.0) == 64.0 * std::accumulate(a, a + rows * columns, 0.0));
    munmap(memory, size_t(whole + page));
  };
  check(float()), check(double());
}

TEST_CASE("attention to a single key", "[attention]") {
  const AttentionShape a = shape(2, 1, 4, 2, 3);
  Tensors<double> x(a);
  twin(x);
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t h = 0; h < a.H; ++h)
      for (int64_t d = 0; d < a.D; ++d) {
        const int64_t head = h / 2, in_v = (a.HKV + head) * a.D + d;
        CHECK(x.o.at(b, h * a.D + d) == Approx(x.kv.at(b, in_v)));
        CHECK(std::abs(x.dq.at(b, h * a.D + d)) < 1e-12);
        CHECK(std::abs(x.dkv.at(b, head * a.D + d)) < 1e-12);
        const double sum = x.d_o.at(b, 2 * head * a.D + d) + x.d_o.at(b, (2 * head + 1) * a.D + d);
        CHECK(x.dkv.at(b, in_v) == Approx(sum));
      }
}

namespace {

// Changes keys and values from position `cut` on, and the outputs' gradients before it: outputs, lse and dq before it
// must keep their bits, and so must dk and dv from it on; all others change.
template <class T, class Run>
void check_causality(const AttentionShape& a, int64_t cut, Run run) {
  INFO(text(a) << " " << name_of(dtype_of<T>) << " cut " << cut);
  Tensors<T> x(a), later(a), earlier(a);
  const Tensors<T> other(a, 2);
  const auto swap_rows = [&](Columns<T>& to, const Columns<T>& from, int64_t first, int64_t last) {
    for (int64_t b = 0; b < a.B; ++b)
      std::memcpy(static_cast<void*>(&to.at(b * a.T + first, 0)), from.p() + (b * a.T + first) * from.ld,
                  size_t(last - first) * from.ld * sizeof(T));
  };
  swap_rows(later.kv, other.kv, cut, a.T);
  swap_rows(earlier.d_o, other.d_o, 0, cut);
  run(x), run(later), run(earlier);
  const auto same_rows = [&](Columns<T>& one, Columns<T>& two, int64_t first, int64_t last) {
    int64_t same = 0;
    for (int64_t b = 0; b < a.B; ++b)
      for (int64_t t = first; t < last; ++t)
        same += std::memcmp(&one.at(b * a.T + t, 0), &two.at(b * a.T + t, 0), one.used * sizeof(T)) == 0;
    return same;
  };
  CHECK(same_rows(x.o, later.o, 0, cut) == a.B * cut);
  CHECK(same_rows(x.dq, later.dq, 0, cut) == a.B * cut);
  CHECK(same_rows(x.dkv, earlier.dkv, cut, a.T) == a.B * (a.T - cut));
  CHECK(same_rows(x.o, later.o, cut, a.T) == 0);
  CHECK(same_rows(x.dkv, earlier.dkv, 0, cut) == 0);
  int64_t broken = 0;
  for (int64_t i = 0; i < x.lse.used; ++i) broken += (x.lse.p()[i] == later.lse.p()[i]) != (i % a.T < cut);
  CHECK(broken == 0);
}

}  // namespace

TEST_CASE("attention does not see the future", "[attention]") {
  for (int64_t cut : {1, 63, 64, 65, 200, 256, 270}) {
    check_causality<double>(shape(2, 271, 2, 1, 5), cut, twin<double>);
    check_causality<float>(shape(1, 271, 3, 1, 32), cut, twin<float>);
    check_causality<bf16>(shape(1, 271, 2, 2, 32), cut, twin<bf16>);
  }
}

namespace {
template <class T>
bool twin_repeats(const AttentionShape& a) {
  Tensors<T> x(a), y(a);
  twin(x), twin(y);
  return same_results(x, y) && same_inputs(x, Tensors<T>(a));
}
}  // namespace

TEST_CASE("attention repeats its bits", "[attention]") {
  for (const AttentionShape& a : cpu_shapes()) {
    INFO(text(a));
    CHECK(twin_repeats<float>(a));
    CHECK(twin_repeats<bf16>(a));
    CHECK(twin_repeats<double>(a));
  }
}

TEST_CASE("attention's tiles of queries are taken once each, by heads whose keys fit into L2 together", "[attention]") {
  const auto long_one = [](int64_t B, int64_t T, int64_t H, int64_t HKV) { return shape(B, T, H, HKV, 128); };
  for (const AttentionShape& a :
       {long_one(2, 300, 6, 3), long_one(1, 8192, 32, 8), long_one(3, 8193, 32, 8), long_one(1, 20000, 12, 6),
        long_one(2, 70000, 6, 3), windowed(long_one(1, 70000, 6, 3), 512)}) {
    const attention::Problem p(a);
    for (const int rows : {64, 128}) {
      CAPTURE(a.B, a.T, a.H, a.HKV, a.window, rows);
      const attention::QueryOrder order(p, rows);
      const bool fits = a.HKV * a.T * 512 <= 32 << 20 || a.sees != Sees::causal;
      CHECK((p.heads_of_set == a.H) == fits);
      CHECK((p.heads_of_set % p.group == 0 && a.H % p.heads_of_set == 0));
      CHECK((fits || p.heads_of_set == p.group || p.heads_of_set / p.group * a.T * 512 <= 32 << 20));
      std::set<std::array<int, 3>> taken;
      bool right = true;
      int before = 0;  // queries of a set's last item
      for (int n = 0; n < order.count(p); ++n) {
        int b, q0, h;
        order.locate(n, p, &b, &q0, &h);
        right = right && b >= 0 && b < a.B && h >= 0 && h < a.H && q0 >= 0 && q0 < a.T && q0 % rows == 0;
        right = right && taken.insert({b, q0, h}).second;
        const bool begins = n % (order.tiles * p.heads_of_set) == 0;  // a set, with its longest
        right = right && (begins ? q0 + rows >= a.T : q0 <= before);
        right = right && h / p.heads_of_set == n / (order.tiles * p.heads_of_set) % (p.H / p.heads_of_set);
        before = q0;
      }
      CHECK(right);
      CHECK(int64_t(taken.size()) == a.B * a.H * ((a.T + rows - 1) / rows));
    }
  }
}

// What the one-kernel backward's blocks tell each other, without the kernel, a launch at a time.
struct Blocks {
  const attention::Problem p;
  std::map<int64_t, int> counts = {}, chains = {};         // of each slot, head and query tile: summands so far
  std::set<std::array<int, 3>> items = {}, complete = {};  // drawn; query tiles of heads whose last summand has come
  std::set<std::array<int, 2>> written = {};               // tiles of keys of KV heads
  bool right = true;

  template <class Order>
  void run(const Order& order) {
    counts.clear(), chains.clear();
    for (int n = 0, begun = 0; begun < order.blocks(); ++n) {
      attention::DqItem x;
      if (!order.locate(n, &x)) continue;
      ++begun;
      right = right && x.unit < order.units &&
              items.insert({order.pair(x.unit) * p.group + order.first_head(x.unit), x.j, x.chunk}).second;
      const auto before = order.before(x);
      for (int s = 0; s < order.steps(x); ++s) {
        const int i = order.tile(x, s), h = s % order.heads;
        const int slot = order.first_slot(x) + h * order.slots_of_head() + i;
        // A block waits for this count, and nothing but blocks before it makes it so.
        right = right && i >= 0 && i < order.tiles && slot >= 0 && slot < order.slots() &&
                unsigned(counts[slot]++) == before(i);
        if (s >= order.finishes(x))
          right = right && complete.insert({order.pair(x.unit), order.first_head(x.unit) + h, i}).second;
      }
      write(order, x);
    }
    right = right && int64_t(counts.size()) <= order.slots();
  }
  void write(const attention::DqOrder& order, const attention::DqItem& x) { written.insert({order.pair(x.unit), x.j}); }
  void write(const attention::CompressedDqOrder& order, const attention::DqItem& x) {
    // So often have these keys been carried, by blocks before it.
    right = right && chains[order.chain(x.unit, x.j)] == order.chunks_before(x);
    if (order.ends(x)) {
      const int other = order.ends_before(x.unit, x.j);
      right = right && (other < 0 || (order.pair(other) == order.pair(x.unit) && joined.count({other, x.j}) > 0));
      right = right && joined.insert({x.unit, x.j}).second;
      if (other >= 0) right = right && chains[order.chain(other, x.j)] == order.chunks_of(x.j);
      if (order.ends_last(x.unit, x.j)) {
        for (int part = 0; part < order.parts; ++part)
          right = right && joined.erase({x.unit / order.parts * order.parts + part, x.j}) > 0;
        right = right && written.insert({order.pair(x.unit), x.j}).second;
        return;
      }
    }
    ++chains[order.chain(x.unit, x.j)];
  }
  std::set<std::array<int, 2>> joined = {};  // chains that have ended
};

TEST_CASE("dQ's summands come in one order, each from a block drawn before the next", "[attention]") {
  const auto base = [](int64_t B, int64_t T, int64_t group) { return shape(B, T, 2 * group, 2, 64); };
  for (const AttentionShape& a : {base(1, 64, 1), base(3, 129, 1), base(2, 1000, 3), base(1, 4096, 4), base(40, 257, 2),
                                  base(1, 40000, 1), base(20, 1, 1)}) {
    CAPTURE(a.B, a.T, a.H);
    Blocks blocks{attention::Problem(a)};
    const attention::DqOrder order(blocks.p);
    blocks.run(order);
    CHECK(blocks.right);
    CHECK(int64_t(blocks.complete.size()) == int64_t(order.tiles) * a.H * a.B);
    CHECK(int64_t(blocks.written.size()) == int64_t(order.tiles) * a.HKV * a.B);
    CHECK(order.set <= order.units);
    for (int64_t n = 0; n < int64_t(order.tiles) * order.tiles; ++n) {  // who sees the keys comes by
      const int i = int(n / order.tiles), j = int(n % order.tiles);
      const attention::DqItem x = {0, j, 0};
      const bool walked = order.steps(x) > 0 && i >= order.tile(x, order.steps(x) - 1);
      if (walked != (i >= j)) FAIL("query tile " << i << ", key tile " << j);
    }
  }
}

TEST_CASE("compressed keys walk their queries in chunks, and dK and dV are carried from one to the next",
          "[attention]") {
  struct Case {
    int64_t B, T, group, block, stride;
  };
  for (const auto& [B, T, group, block, stride] :
       {Case{1, 65536, 4, 32, 16}, Case{1, 65536, 16, 32, 16}, Case{1, 8192, 6, 32, 16}, Case{3, 5000, 4, 8, 4},
        Case{20, 2100, 2, 2, 2}, Case{1, 1000, 1, 1, 1}, Case{2, 700, 3, 16, 300}, Case{5, 2049, 4, 1, 16},
        Case{1, 2080, 12, 64, 16}}) {
    AttentionShape a = shape(B, T, 2 * group, 2, 64);
    a.sees = Sees::compressed, a.block = block, a.stride = stride, a.keys = (T - block) / stride + 1;
    const attention::Compressed mask(a);
    for (int parts = 1; parts <= int(group); ++parts) {
      if (group % parts) continue;
      CAPTURE(B, T, group, block, stride, parts);
      Blocks blocks{attention::Problem(a)};
      const attention::CompressedDqOrder order(blocks.p, int(stride), parts);
      for (int n = 0; n < order.launches(); ++n) blocks.run(order.launch(n));
      CHECK(blocks.right);
      CHECK(blocks.joined.empty());
      CHECK(int64_t(blocks.complete.size()) == int64_t(order.tiles) * a.H * a.B);
      CHECK(int64_t(blocks.written.size()) == int64_t(order.key_tiles) * a.HKV * a.B);
      for (int c = 0; c < order.chunks; ++c) {  // no query of a chunk sees more keys
        const int last = (c * order.chunk_tiles + order.tiles_of(c)) * 128;
        CHECK(mask.last_key(last) <= order.key_tiles_of(c) * 128);
      }
    }
  }
}

// A round with few blocks leaves multiprocessors without work, for its blocks wait for those of the round before.
TEST_CASE("rounds of compressed keys have about as many blocks", "[attention]") {
  for (const auto& [T, group] : {std::pair<int64_t, int64_t>{32768, 4}, {65536, 4}, {65536, 16}, {131072, 4}}) {
    AttentionShape a = shape(1, T, 8 * group, 8, 64);
    a.sees = Sees::compressed, a.block = 32, a.stride = 16, a.keys = (T - 32) / 16 + 1;
    const attention::CompressedDqOrder order(attention::Problem(a), 16, 1);
    for (int round = 0; round < order.chunks; ++round) {
      int blocks = 0;
      for (int unit = 0; unit < order.units; ++unit) blocks += order.key_tiles_of(order.chunk_of(unit, round));
      CAPTURE(T, round, blocks, order.blocks_of_round());
      CHECK(std::abs(blocks - order.blocks_of_round()) <= (order.chunks + order.units) / 2);
    }
  }
}

// A last set of few units leaves a GPU with few blocks, and they are as long as any.
TEST_CASE("dQ's units come in even sets", "[attention]") {
  for (const int64_t T : {2048, 4096, 8192, 16384, 65536})
    for (int64_t B = 1; B <= 40; ++B) {
      CAPTURE(T, B);
      const attention::DqOrder order((attention::Problem(shape(B, T, 8, 2, 64))));
      const bool enough = order.set == order.units || order.set * order.tiles >= 256;
      CHECK(enough);
      CHECK((order.set - 1) * order.tiles < 2 * 256);  // slots are memory
      // Of the sizes that it may choose from, one always leaves at most half of the last set missing.
      const int last = order.units % order.set;
      if (order.set > 1) CHECK((last == 0 || 2 * last >= order.set));
    }
}

TEST_CASE("attention refuses bad shapes and is off when it should be", "[attention]") {
  Device& dev = test_device(Backend::cpu);
  Stream& s = dev.compute();
  Tensors<float> x(shape(1, 4, 4, 2, 3));
  std::vector<float> work(attention_backward_workspace<float>(x.a));
  const auto forward = [&](const AttentionShape& a) {
    attention_forward<float>(s, x.o.p(), x.lse.p(), x.q.p(), x.k(), x.v(), a);
  };
  const auto backward = [&](const AttentionShape& a) {
    attention_backward<float>(s, x.dq.p(), x.dk(), x.dv(), x.d_o.p(), x.q.p(), x.k(), x.v(), x.o.p(), x.lse.p(),
                              work.data(), a);
  };
  const auto change = [&](int64_t AttentionShape::*member, int64_t value) {
    AttentionShape a = x.a;
    a.*member = value;
    return a;
  };
  AttentionShape no_scale = x.a;
  no_scale.scale = 0;
  AttentionShape no_window = windowed(x.a, 0), no_stride = compressed(x.a, 2, 1);
  no_stride.stride = 0;
  const std::vector<std::pair<AttentionShape, std::string>> bad = {{no_window, "window 0"},
                                                                   {no_stride, "stride 0"},
                                                                   {change(&AttentionShape::keys, 3), "keys 3"},
                                                                   {change(&AttentionShape::HKV, 3), "H 4 HKV 3"},
                                                                   {change(&AttentionShape::HKV, 0), "HKV 0"},
                                                                   {change(&AttentionShape::B, 0), "B 0"},
                                                                   {change(&AttentionShape::T, -1), "T -1"},
                                                                   {change(&AttentionShape::D, 0), "D 0"},
                                                                   {change(&AttentionShape::DV, -1), "DV -1"},
                                                                   {no_scale, "scale 0"}};
  for (const auto& [a, part] : bad) {
    INFO(part);
    CHECK(has(error_of([&, &b = a] { forward(b); }), part));
    CHECK(has(error_of([&, &b = a] { backward(b); }), part));
    CHECK(has(error_of([&, &b = a] { attention_backward_workspace<float>(b); }), part));
  }
  dev.mode = Mode::plan;  // enqueues nothing
  forward(x.a), backward(x.a);
  dev.mode = Mode::run;
  s.synchronize();
  CHECK(same_results(x, Tensors<float>(shape(1, 4, 4, 2, 3))));
}

// --------------------------------------------------------------------------------------------------------------- GPU

#if FSDP_CUDA
namespace {

// A call's arrays on the GPU, and the calls: arch's kernels, or for arch 0 those that the stream's device gets.
template <class T>
struct GpuCall {
  Stream& s;
  AttentionShape a;
  Arrays gpu{s};
  T *q, *k, *v, *d_o, *o, *dq, *dk, *dv;
  Gate<T> gate;
  float *lse, *workspace, *amax = nullptr, *rotary = nullptr;
  BackwardKernels kernels;
  GpuCall(Stream& s, Tensors<T>& x, BackwardKernels kernels = BackwardKernels::suits) : s(s), a(x.a), kernels(kernels) {
    q = gpu.up(x.q.v) + x.q.ld, k = gpu.up(x.kv.v) + x.kv.ld, v = k + a.HKV * a.D;
    d_o = gpu.up(x.d_o.v) + x.d_o.ld, o = gpu.up(x.o.v) + x.o.ld, dq = gpu.up(x.dq.v) + x.dq.ld;
    dk = gpu.up(x.dkv.v) + x.dkv.ld, dv = dk + a.HKV * a.D;
    if (x.gating) gate = {gpu.up(x.gate.v) + x.gate.ld, gpu.up(x.dgate.v) + x.dgate.ld, x.gate.ld};
    lse = gpu.up(x.lse.v) + x.lse.ld, workspace = gpu.scratch<float>(attention_backward_workspace<T>(a, kernels));
    if (std::is_same_v<T, bf16>) amax = gpu.up(x.amax.v) + x.amax.ld;
  }
  void run(int arch) {
    if (arch == 0) {
      attention_forward<T>(s, o, lse, q, k, v, a, amax);
      attention_backward<T>(s, dq, dk, dv, d_o, q, k, v, o, lse, workspace, a, gate);
    } else {
      gpu::attention_forward<T>(s.cuda(), arch, o, lse, q, k, v, a, amax);
      gpu::attention_backward<T>(s.cuda(), arch, dq, dk, dv, d_o, q, k, v, o, lse, workspace, a, gate, kernels,
                                 /*stats=*/nullptr, rotary);
    }
  }
};

Stream& gpu_stream() { return test_device(Backend::gpu).compute(); }

template <class T>
void run_gpu(Tensors<T>& x, int arch, BackwardKernels kernels = BackwardKernels::suits) {
  GpuCall<T> call(gpu_stream(), x, kernels);
  call.run(arch);
  call.gpu.down();
}

// The bf16 kernels that this device runs, by compute capability.
std::vector<int> archs() {
  const int cc = test_device(Backend::gpu).compute_capability;
  return cc == 90 ? std::vector<int>{90, 80} : cc >= 80 ? std::vector<int>{80} : std::vector<int>{};
}

// Twice on the GPU: the same bits, nothing written outside, and as near to the double twin as that type can be: bf16
// within twice the error of its twin, which rounds outputs alone; float to float. The floors are for gradients that are
// zero (a single key), where error() divides what rounding leaves by a hundredth.
template <class T>
void check_kernel(const Tensors<double>& ref, const Errors& twin, const AttentionShape& a, int arch,
                  BackwardKernels kernels = BackwardKernels::pair) {
  constexpr bool narrow = std::is_same_v<T, bf16>;
  if (narrow && arch == 90 && a.sees != Sees::window && !a.DV && kernels == BackwardKernels::pair)
    check_kernel<T>(ref, twin, a, arch, BackwardKernels::one);
  INFO(text(a) << " " << name_of(dtype_of<T>) << " kernels of sm_" << arch
               << (kernels == BackwardKernels::one ? ", backward in one" : ""));
  Tensors<T> x(a, 1, ref.gating), y(a, 1, ref.gating);
  run_gpu(x, arch, kernels), run_gpu(y, arch, kernels);
  CHECK(same_results(x, y));
  CHECK(same_inputs(x, Tensors<T>(a, 1, ref.gating)));
  CHECK(x.untouched_outside());
  check_unseen(x);
  if (narrow) check_amax(x);
  const Errors e = errors(x, ref);
  const double factor = narrow ? 2 : 0, floor = narrow ? 1e-4 : 5e-5;
  CHECK(e.lse <= 1e-4 * std::max(1.0, a.scale));
  CHECK(e.o <= factor * twin.o + floor);
  CHECK(e.dq <= factor * twin.dq + floor);
  CHECK(e.dk <= factor * twin.dk + floor);
  CHECK(e.dv <= factor * twin.dv + floor);
  CHECK(e.dgate <= factor * twin.dgate + floor);
}

// Every kernel at these shapes; the float ones at short sequences only, for they are slow.
void check_kernels(const std::vector<AttentionShape>& shapes, Gating gating = ungated) {
  for (const AttentionShape& a : shapes) {
    Tensors<double> ref(a, 1, gating);
    twin(ref);
    if (a.D == 192 && has_small_memory(test_device(Backend::gpu).compute_capability)) continue;
    if (a.D == 64 || a.D == 128 || a.D == 192) {
      Tensors<bf16> narrow(a, 1, gating);
      twin(narrow);
      for (int arch : archs()) check_kernel<bf16>(ref, errors(narrow, ref), a, arch);
    }
    if (a.T >= 300 || a.DV) continue;
    check_kernel<float>(ref, {}, a, test_device(Backend::gpu).compute_capability);
    if (a.D > 64) check_kernel<float>(ref, {}, a, 86);  // those of chips with less shared memory
  }
}

}  // namespace
#endif

TEST_CASE("GPU: attention, a few small shapes", "[attention][gpu][small]") {
  NEEDS_GPU();
#if FSDP_CUDA
  check_kernels({shape(1, 130, 2, 1, 128), shape(2, 65, 2, 2, 64), shape(1, 33, 3, 1, 40)});
  check_kernels({windowed(shape(1, 200, 2, 1, 128), 50), windowed(shape(2, 65, 4, 2, 64), 16),
                 compressed(shape(1, 600, 2, 1, 128), 4, 2), compressed(shape(2, 300, 4, 2, 64), 150, 16),
                 compressed(shape(1, 33, 3, 1, 40), 16, 16), with_values(shape(1, 150, 2, 1, 192), 128)},
                gated);
  check_kernels({shape(1, 200, 2, 1, 128), shape(1, 200, 2, 1, 64)}, nearly_closed);
#endif
}

TEST_CASE("GPU: attention to keys wider than values", "[attention][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  const auto wide = [](int64_t B, int64_t T, int64_t H, int64_t HKV) {
    return with_values(shape(B, T, H, HKV, 192), 128);
  };
  std::vector<AttentionShape> list;
  for (int64_t T : {1, 15, 31, 32, 33, 63, 64, 65, 127, 128, 129, 200, 257}) list.push_back(wide(2, T, 4, 2));
  for (int64_t group : {1, 3, 16}) list.push_back(wide(1, 200, group, 1));
  list.push_back(wide(1, 2049, 4, 1));
  list.push_back(wide(1, 129, 2, 1)), list.back().scale = 10;  // scores of hundreds
  check_kernels(list);
  list = {windowed(wide(2, 200, 4, 2), 50), windowed(wide(1, 2049, 2, 1), 600), compressed(wide(1, 600, 2, 1), 4, 2),
          compressed(wide(1, 2049, 4, 1), 4, 2), compressed(wide(2, 300, 4, 2), 150, 16)};
  check_kernels(list, gated);
#endif
}

TEST_CASE("GPU: attention around the edges of tiles", "[attention][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  std::vector<AttentionShape> list;
  for (int64_t D : {64, 128})
    for (int64_t T : {1, 15, 63, 64, 65, 127, 128, 129, 200, 257}) list.push_back(shape(2, T, 4, 2, D));
  check_kernels(list);
#endif
}

TEST_CASE("GPU: attention in groups", "[attention][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  std::vector<AttentionShape> list;
  for (int64_t group : {1, 2, 4, 6, 8, 16})
    list.push_back(shape(1, 200, group, 1, 64)), list.push_back(shape(2, 193, 2 * group, 2, 128));
  list.push_back(shape(64, 129, 4, 2, 64));  // enough keys to fill a GPU: the group stays together
  check_kernels(list);
#endif
}

TEST_CASE("GPU: attention with so many heads of 64 that its warpgroups share rows", "[attention][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  std::vector<AttentionShape> list;
  for (int64_t T : {64, 65, 129, 193, 257, 400}) list.push_back(shape(4, T, 32, 8, 64));
  check_kernels(list);
  check_kernels({windowed(shape(4, 400, 32, 8, 64), 100), compressed(shape(4, 257, 32, 8, 64), 4, 2)}, gated);
#endif
}

// By a kernel of its own dq and dk are rounded before and after.
TEST_CASE("GPU: attention's backward undoes rotary positions", "[attention][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  if (archs().empty() || archs()[0] != 90) SKIP_TEST("compute capability is not 9.0");
  for (const AttentionShape& a : {shape(2, 130, 6, 2, 64), shape(1, 300, 4, 4, 128), shape(1, 513, 3, 1, 128),
                                  shape(2, 257, 3, 1, 64), shape(1, 64, 8, 1, 128)}) {
    INFO(text(a));
    Tensors<bf16> x(a), y(a);
    run_gpu(x, 90, BackwardKernels::one);
    std::vector<float> table;
    for (int64_t i = 0; i < a.T * a.D / 2; ++i)
      for (float c : {std::cos(0.37f * float(i)), std::sin(0.37f * float(i))}) table.push_back(c);
    GpuCall<bf16> call(gpu_stream(), y, BackwardKernels::one);
    call.rotary = call.gpu.up(table);
    call.run(90);
    call.gpu.down();
    int64_t wrong = 0;
    const auto compare = [&](Columns<bf16>& plain, Columns<bf16>& turned, int64_t heads) {
      for (int64_t row = 0; row < plain.rows; ++row)
        for (int64_t i = 0; i < heads * a.D / 2; ++i) {
          const int64_t pair = i % (a.D / 2), at = i / (a.D / 2) * a.D + pair;
          const float* cs = &table[size_t(row % a.T * a.D + 2 * pair)];
          const float low = float(plain.at(row, at)), high = float(plain.at(row, at + a.D / 2));
          const float allowed = 0x1p-7f * std::hypot(low, high) + 1e-30f;
          wrong += !(std::abs(float(turned.at(row, at)) - (low * cs[0] + high * cs[1])) <= allowed);
          wrong += !(std::abs(float(turned.at(row, at + a.D / 2)) - (high * cs[0] - low * cs[1])) <= allowed);
        }
    };
    compare(x.dq, y.dq, a.H), compare(x.dkv, y.dkv, a.HKV);
    CHECK(wrong == 0);
    for (int64_t row = 0; row < a.B * a.T; ++row)
      for (int64_t c = a.HKV * a.D; c < 2 * a.HKV * a.D; ++c) wrong += x.dkv.at(row, c) != y.dkv.at(row, c);
    CHECK(wrong == 0);
    CHECK(y.untouched_outside());
  }
#endif
}

TEST_CASE("GPU: attention over longer sequences", "[attention][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  check_kernels(
      {shape(1, 1000, 6, 1, 64), shape(2, 1000, 4, 2, 128), shape(1, 2049, 2, 1, 64), shape(1, 2049, 4, 1, 128)});
#endif
}

TEST_CASE("GPU: heads whose keys do not fit into L2 together come out as each alone", "[attention][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  const AttentionShape a = shape(1, 33000, 2, 2, 128);
  REQUIRE(attention::Problem(a).heads_of_set == 1);
  for (int arch : archs()) {
    Tensors<bf16> together(a), alone(a);
    run_gpu(together, arch, BackwardKernels::pair);
    GpuCall<bf16> call(gpu_stream(), alone, BackwardKernels::pair);
    call.a.H = call.a.HKV = 1;
    for (int head = 0; head < 2; ++head) {
      call.run(arch);
      for (bf16** p : {&call.q, &call.k, &call.v, &call.d_o, &call.o, &call.dq, &call.dk, &call.dv}) *p += a.D;
      call.lse += a.T, call.amax += a.T;
    }
    call.gpu.down();
    CHECK(same_bits(together.o.v, alone.o.v));
    CHECK(same_bits(together.lse.v, alone.lse.v));
    CHECK(same_bits(together.amax.v, alone.amax.v));
    CHECK(same_bits(together.dq.v, alone.dq.v));
  }
#endif
}

TEST_CASE("GPU: attention to a window and to compressed keys", "[attention][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  const auto make = [](int64_t T, int64_t n) {
    const int64_t group = std::vector<int64_t>{1, 2, 4, 6, 16}[n % 5], heads = T < 1000 ? n % 2 + 1 : 1;
    return shape(T < 1000 ? n % 3 / 2 + 1 : 1, T, (T > 1000 ? std::min<int64_t>(group, 4) : group) * heads, heads,
                 n % 4 / 2 ? 128 : 64);
  };
  Gating turn = ungated;
  for (const AttentionShape& a : rules(make)) check_kernels({a}, turn = turn ? ungated : gated);
  // Steps that walk several tiles of keys, and keys whose queries several blocks share.
  check_kernels({windowed(shape(1, 2049, 4, 1, 128), 600), compressed(shape(1, 2049, 4, 1, 128), 4, 2),
                 compressed(shape(2, 1500, 6, 2, 64), 16, 4)},
                gated);
#endif
}

TEST_CASE("GPU: attention sees what the rule says and nothing else", "[attention][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t D : {64, 128})
    for (const AttentionShape& a :
         {shape(1, 700, 2, 1, D), windowed(shape(1, 700, 2, 1, D), 130), compressed(shape(1, 700, 2, 1, D), 32, 16),
          compressed(shape(1, 700, 2, 1, D), 8, 4)})
      for (int arch : archs())
        for (int64_t key : {int64_t(0), int64_t(17), keys_of(a) / 2, keys_of(a) - 1}) {
          INFO(text(a) << " kernels of sm_" << arch << " key " << key);
          Tensors<bf16> x(a), y(a);
          for (int64_t c = 0; c < y.kv.used; ++c) y.kv.at(key, c) = bf16(1.5f - 2 * float(x.kv.at(key, c)));
          run_gpu(x, arch), run_gpu(y, arch);
          int64_t broken = 0;
          for (int64_t t = 0; t < a.T; ++t) {
            const auto same = [&](Columns<bf16>& one, Columns<bf16>& two) {
              return std::memcmp(&one.at(t, 0), &two.at(t, 0), size_t(one.used) * sizeof(bf16)) == 0;
            };
            for (int64_t h = 0; h < a.H; ++h)
              broken += (x.lse.p()[h * a.T + t] == y.lse.p()[h * a.T + t]) == sees(a, t, key);
            if (!sees(a, t, key)) broken += !same(x.o, y.o) + !same(x.dq, y.dq);
          }
          CHECK(broken == 0);
        }
#endif
}

TEST_CASE("GPU: float attention with any head", "[attention][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t D : {8, 16, 24, 32, 40, 72, 96, 120, 128}) check_kernels({shape(2, 70, 3, 1, D)});
#endif
}

TEST_CASE("GPU: attention does not see the future", "[attention][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t cut : {1, 64, 100, 128, 250})
    for (int64_t D : {64, 128}) {
      for (int arch : archs())
        check_causality<bf16>(shape(2, 260, 2, 1, D), cut, [&](Tensors<bf16>& x) { run_gpu(x, arch); });
      check_causality<float>(shape(2, 260, 2, 1, D), cut, [&](Tensors<float>& x) { run_gpu(x, 0); });
    }
#endif
}

TEST_CASE("GPU: attention of two streams at once", "[attention][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  // More launches than there are lists of items for persistent blocks, some of which run side by side.
  const AttentionShape a = shape(2, 700, 6, 2, 64);
  Device& dev = test_device(Backend::gpu);
  for (int arch : archs()) {
    INFO("kernels of sm_" << arch);
    Tensors<bf16> once(a), x(a), y(a);
    run_gpu(once, arch);
    GpuCall<bf16> one(dev.compute(), x), two(dev.gather(), y);
    for (int i = 0; i < 200; ++i) {
      one.run(arch), two.run(arch);
      if (i % 20 == 19) one.s.synchronize(), two.s.synchronize();  // those side by side must have different lists
    }
    one.gpu.down(), two.gpu.down();
    CHECK(same_results(once, x));
    CHECK(same_results(once, y));
  }
#endif
}

TEST_CASE("GPU: attention through a stream takes the device's kernels", "[attention][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  const AttentionShape a = shape(2, 150, 4, 2, 128);
  Tensors<bf16> direct(a), x(a);
  if (!archs().empty()) {
    run_gpu(direct, archs().front()), run_gpu(x, 0);
    CHECK(same_results(direct, x));
  }
  Tensors<float> f(a), g(a);
  run_gpu(f, test_device(Backend::gpu).compute_capability), run_gpu(g, 0);
  CHECK(same_results(f, g));
#endif
}

// Of a value that is NaN: some outputs are, and what finds the largest of them says so.
template <class T, class F>
static void check_amax_of_nan(F run) {
  Tensors<T> x(shape(1, 70, 2, 1, 64));
  x.kv.at(17, x.a.HKV * x.a.D + 3) = T(NAN);
  run(x);
  check_amax(x);
  CHECK(x.amax.p()[69] == INFINITY);
}
TEST_CASE("the largest number of attention's output is infinite where that is NaN", "[attention]") {
  check_amax_of_nan<float>([](Tensors<float>& x) { twin_forward(x); });
  check_amax_of_nan<bf16>([](Tensors<bf16>& x) { twin_forward(x); });
}
TEST_CASE("GPU: the largest number of attention's output is infinite where that is NaN", "[attention][gpu][small]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int arch : archs()) check_amax_of_nan<bf16>([&](Tensors<bf16>& x) { run_gpu(x, arch); });
#endif
}

TEST_CASE("GPU: attention refuses what has no kernel", "[attention][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  Stream& s = gpu_stream();
  const auto forward = [&](auto* p, const AttentionShape& a, int64_t shift = 0) {
    using T = std::remove_pointer_t<decltype(p)>;
    return error_of([&] { attention_forward<T>(s, p, nullptr, p, p + shift, p, a); });
  };
  AttentionShape a = shape(1, 4, 2, 1, 96);
  a.ld_q = a.ld_kv = a.ld_o = 192;
  CHECK(has(forward(static_cast<bf16*>(nullptr), a), "head dims 96 and 96"));
  a.D = 136;
  CHECK(has(forward(static_cast<float*>(nullptr), a), "head dims 136 and 136"));
  a.D = 128, a.DV = 64;
  CHECK(has(forward(static_cast<bf16*>(nullptr), a), "head dims 128 and 64"));
  CHECK(has(forward(static_cast<float*>(nullptr), a), "head dims 128 and 64"));
  a.D = 192, a.DV = 128;
  CHECK(has(error_of([&] {
              bf16* p = nullptr;
              gpu::attention_forward<bf16>(s.cuda(), 86, p, nullptr, p, p, p, a);
            }),
            "99 KiB"));
  a.D = 64, a.DV = 0, a.ld_v = 200;
  CHECK(has(forward(static_cast<float*>(nullptr), a), "equally far apart"));
  a.ld_v = 0;
  alignas(16) bf16 narrow[16];
  alignas(16) float wide[16];
  CHECK(has(forward(narrow, a, 1), "16 bytes"));
  CHECK(has(forward(wide, a, 1), "16 bytes"));
  a.ld_kv = 68;
  CHECK(has(forward(narrow, a), "16 bytes"));
  a.ld_kv = 66;
  CHECK(has(forward(wide, a), "16 bytes"));
  CHECK(has(forward(static_cast<double*>(nullptr), a), "fp64"));
  a.ld_kv = 64;
  CHECK(has(error_of([&] { attention_forward<float>(s, wide, nullptr, wide, wide, wide, a, wide); }), "largest"));
#endif
}
