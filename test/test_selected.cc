// The GPU kernels of NSA's selected branch (attention/selected.cu) against its definition in double, with given
// indices. The measure for bf16 is the definition computed in double and rounded where the interface rounds: inputs, o
// before the backward reads it, results. Cases with [small] too are for compute-sanitizer. [.time], hidden:
// milliseconds.
#include "test/arrays.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>

#include "attention/selected.cuh"
#include "attention/selected_masked.cuh"
#include "attention/stages.h"
#include "lib/ops/philox.h"
#include "test/worst.h"

#if FSDP_CUDA
namespace {

using attention::selected::is_masked;
using attention::selected::masked_tiles;
using attention::selected::scratch_bytes;

// Rows of a buffer, with one to spare before the first and after the last. All bytes are 0xff at first, a NaN in every
// type: what nobody may touch must stay so, and what was read from there shows in the results.
template <class T>
struct Rows {
  int64_t rows, ld;
  std::vector<T> v;
  Rows(int64_t rows, int64_t ld) : rows(rows), ld(ld), v((rows + 2) * ld) {
    std::memset(static_cast<void*>(v.data()), 0xff, v.size() * sizeof(T));
  }
  T* p() { return v.data() + ld; }
  const T* p() const { return v.data() + ld; }
  T& at(int64_t row, int64_t c) { return p()[row * ld + c]; }
  const T& at(int64_t row, int64_t c) const { return p()[row * ld + c]; }
};
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

enum class Choice {
  random,  // 0, the query's own, the one before, and others
  hot,     // 0 and 1 first, then the query's own, and others as far as there is room
  first,   // block 0 alone, whoever asks
  some,    // nothing, or any number, of blocks other than block 1
};

NsaShape shape(int64_t B, int64_t T, int64_t H, int64_t HKV, int64_t D) {
  NsaShape a{};
  a.B = B, a.T = T, a.H = H, a.HKV = HKV, a.D = D, a.scale = 1 / std::sqrt(double(D));
  a.block = 32, a.stride = 16, a.select_block = 64, a.selected = 16, a.window = 512;
  a.ld = (a.columns() + 7) / 8 * 8 + 8;
  return a;
}

NsaShape wide_keys(int64_t B, int64_t T, int64_t H, int64_t HKV) {
  NsaShape a = shape(B, T, H, HKV, 192);
  a.DV = 128, a.ld = (a.columns() + 7) / 8 * 8 + 8;
  return a;
}

std::string text(const NsaShape& a) {
  return strf("B %lld T %lld H %lld HKV %lld D %lld DV %lld, %lld of blocks of %lld", (long long)a.B, (long long)a.T,
              (long long)a.H, (long long)a.HKV, (long long)a.D, (long long)a.v_dim(), (long long)a.selected,
              (long long)a.select_block);
}

std::vector<int32_t> choose(const NsaShape& a, Choice choice) {
  std::vector<int32_t> indices(a.B * a.HKV * a.T * a.selected, -1);
  std::mt19937 random(7);
  for (int64_t i = 0; i < a.B * a.HKV * a.T; ++i) {
    const int own = int(i % a.T / a.select_block);
    std::vector<int32_t> list;
    const auto add = [&](int j) {
      if (j >= 0 && j <= own && int64_t(list.size()) < a.selected &&
          std::find(list.begin(), list.end(), j) == list.end())
        list.push_back(j);
    };
    if (choice == Choice::first) add(0);
    else if (choice == Choice::some) {
      const int64_t want = random() % (std::min<int64_t>(a.selected, own + 1) + 1);
      for (int tries = 0; int64_t(list.size()) < want && tries < 50; ++tries) {
        const int j = int(random() % (own + 1));
        if (j != 1) add(j);
      }
    } else {
      add(0);
      if (choice == Choice::hot) add(1);
      add(own), add(own - 1);
      while (int64_t(list.size()) < std::min<int64_t>(a.selected, own + 1)) add(int(random() % (own + 1)));
    }
    std::sort(list.begin(), list.end());
    std::copy(list.begin(), list.end(), indices.begin() + i * a.selected);
  }
  return indices;
}

// A call's arrays. x: the fused rows, of which the branch's columns are set; dx: their gradient, where dq holds the
// window's. Inputs are normal numbers rounded to bf16, so that every type computes the same function.
template <class T>
struct Call {
  NsaShape a;
  bool gated, compressed;
  std::vector<int32_t> indices;
  Rows<T> x, dx, d_o, o, dq_compressed;
  Rows<acc_t<T>> lse;
  Call(const NsaShape& s, std::vector<int32_t> chosen, bool gated = true, bool compressed = true, uint64_t seed = 1)
      : a(s),
        gated(gated),
        compressed(compressed),
        indices(std::move(chosen)),
        x(s.B * s.T, s.ld),
        dx(s.B * s.T, s.ld),
        d_o(s.B * s.T, s.H * s.v_dim()),
        o(s.B * s.T, s.H * s.v_dim()),
        dq_compressed(s.B * s.T, s.H * s.D),
        lse(1, s.B * s.H * s.T) {
    const int64_t q = a.H * a.D;
    fill(x, 0, q, seed, 1), fill(x, a.k(1), a.HKV * a.D, seed, 2), fill(x, a.v(1), a.HKV * a.v_dim(), seed, 3);
    fill(x, a.gate(1), a.H, seed, 4), fill(d_o, 0, a.H * a.v_dim(), seed, 5), fill(dq_compressed, 0, q, seed, 6);
    fill(dx, 0, q, seed, 7);
  }
  static void fill(Rows<T>& to, int64_t column, int64_t columns, uint64_t seed, uint32_t tensor) {
    static const std::vector<float> some = [] {
      std::vector<float> v(1000003);  // a prime: no two rows are alike
      for (size_t i = 0; i < v.size(); ++i) v[i] = float(bf16(philox_normals(1, 1, i / 4).x[i % 4]));
      return v;
    }();
    const int64_t shift = int64_t(seed) * 111119 + tensor * 12347;
    for (int64_t i = 0; i < to.rows * columns; ++i)
      to.at(i / columns, column + i % columns) = T(some[size_t((i + shift) % int64_t(some.size()))]);
  }
};

template <class T>
bool same_results(const Call<T>& x, const Call<T>& y) {
  return same_bits(x.o.v, y.o.v) && same_bits(x.lse.v, y.lse.v) && same_bits(x.dx.v, y.dx.v);
}
template <class T>
bool same_inputs(const Call<T>& x, const Call<T>& y) {
  return same_bits(x.x.v, y.x.v) && same_bits(x.d_o.v, y.d_o.v) && same_bits(x.dq_compressed.v, y.dq_compressed.v) &&
         same_bits(x.indices, y.indices);
}
// Of dx only dq, dk, dv and the gate's gradient may change; of o and lse nothing outside.
template <class T>
bool untouched_outside(const Call<T>& x) {
  const NsaShape& a = x.a;
  const auto kept = [](const auto* p) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(p);
    return std::all_of(bytes, bytes + sizeof(*p), [](unsigned char b) { return b == 0xff; });
  };
  bool clean = true;
  for (int64_t r = -1; r <= a.B * a.T; ++r)
    for (int64_t c = 0; c < a.ld; ++c) {
      const auto in = [&](int64_t from, int64_t n) { return c >= from && c < from + n; };
      const bool ours = in(0, a.H * a.D) || in(a.k(1), a.HKV * a.D) || in(a.v(1), a.HKV * a.v_dim()) ||
                        (x.gated && in(a.gate(1), a.H));
      if (!ours || r < 0 || r == a.B * a.T) clean = clean && kept(&x.dx.at(r, c));
    }
  for (int64_t c = 0; c < x.o.ld; ++c) clean = clean && kept(&x.o.at(-1, c)) && kept(&x.o.at(a.B * a.T, c));
  for (int64_t i = 0; i < x.lse.ld; ++i) clean = clean && kept(&x.lse.at(-1, i)) && kept(&x.lse.at(1, i));
  return clean;
}

// The definition. rounded: what goes through memory in bf16 is rounded to it.
void define(Call<double>& x, bool rounded) {
  const NsaShape& a = x.a;
  const int64_t D = a.D, DV = a.v_dim(), group = a.H / a.HKV;
  const auto round = [&](double& y) {
    if (rounded) y = double(float(bf16(float(y))));
  };
  constexpr int64_t parts = 8;  // of a sequence's queries, for threads
  std::vector<std::vector<double>> dks(a.B * a.HKV * parts), dvs(a.B * a.HKV * parts);
  const auto work = [&](int64_t b, int64_t head, int64_t part) {
    std::vector<double>&dk = dks[(b * a.HKV + head) * parts + part], &dv = dvs[(b * a.HKV + head) * parts + part];
    dk.assign(a.T * D, 0), dv.assign(a.T * DV, 0);
    std::vector<double> p, dq(D), o(DV);
    std::vector<int64_t> keys;
    const auto k = [&](int64_t j) { return &x.x.at(b * a.T + j, a.k(1) + head * D); };
    const auto v = [&](int64_t j) { return &x.x.at(b * a.T + j, a.v(1) + head * DV); };
    const auto dot = [](const double* y, const double* z, int64_t n) {
      double sum[8] = {};
      for (int64_t d = 0; d < n; d += 8)
        for (int e = 0; e < 8; ++e) sum[e] += y[d + e] * z[d + e];
      return (sum[0] + sum[1]) + (sum[2] + sum[3]) + (sum[4] + sum[5]) + (sum[6] + sum[7]);
    };
    const auto add = [](double* to, double f, const double* y, int64_t n) {
      for (int64_t d = 0; d < n; ++d) to[d] += f * y[d];
    };
    for (int64_t t = part * a.T / parts; t < (part + 1) * a.T / parts; ++t) {
      keys.clear();
      for (int64_t r = 0; r < a.selected; ++r)
        if (const int64_t j = x.indices[((b * a.HKV + head) * a.T + t) * a.selected + r]; j >= 0)
          for (int64_t i = j * a.select_block; i < (j + 1) * a.select_block && i <= t; ++i) keys.push_back(i);
      for (int64_t h = head * group; h < (head + 1) * group; ++h) {
        const int64_t row = b * a.T + t;
        const double *q = &x.x.at(row, h * D), *d_o = &x.d_o.at(row, h * DV);
        p.clear();
        for (int64_t j : keys) p.push_back(a.scale * dot(q, k(j), D));
        const double top = keys.empty() ? 0 : *std::max_element(p.begin(), p.end());
        double sum = 0, delta = 0;
        for (double& y : p) sum += y = std::exp(y - top);
        std::fill(o.begin(), o.end(), 0.0), std::fill(dq.begin(), dq.end(), 0.0);
        for (size_t i = 0; i < keys.size(); ++i) add(o.data(), p[i] /= sum, v(keys[i]), DV);
        for (int64_t d = 0; d < DV; ++d) {
          round(o[d]);
          x.o.at(row, h * DV + d) = o[d], delta += o[d] * d_o[d];
        }
        x.lse.at(0, (b * a.H + h) * a.T + t) = keys.empty() ? -INFINITY : top + std::log(sum);
        double gate = 1;
        if (x.gated) {
          gate = 1 / (1 + std::exp(-x.x.at(row, a.gate(1) + h)));
          double& dgate = x.dx.at(row, a.gate(1) + h);
          dgate = gate * (1 - gate) * delta;
          round(dgate);
        }
        for (size_t i = 0; i < keys.size(); ++i) {
          const double ds = p[i] * gate * (dot(d_o, v(keys[i]), DV) - delta) * a.scale;
          add(dq.data(), ds, k(keys[i]), D);
          add(&dk[keys[i] * D], ds, q, D);
          add(&dv[keys[i] * DV], p[i] * gate, d_o, DV);
        }
        for (int64_t d = 0; d < D; ++d) {
          double& y = x.dx.at(row, h * D + d);
          y += dq[d] + (x.compressed ? x.dq_compressed.at(row, h * D + d) : 0);
          round(y);
        }
      }
    }
  };
  std::vector<std::thread> threads;
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t head = 0; head < a.HKV; ++head)
      for (int64_t part = 0; part < parts; ++part) threads.emplace_back(work, b, head, part);
  for (std::thread& t : threads) t.join();
  const auto join = [&](const std::vector<std::vector<double>>& sums, int64_t column, int64_t width) {
    for (int64_t i = 0; i < a.B * a.HKV * a.T * width; ++i) {
      const int64_t pair = i / (a.T * width), b = pair / a.HKV, head = pair % a.HKV, at = i % (a.T * width);
      double sum = 0;
      for (int64_t part = 0; part < parts; ++part) sum += sums[pair * parts + part][at];
      round(sum);
      x.dx.at(b * a.T + at / width, column + head * width + at % width) = sum;
    }
  };
  join(dks, a.k(1), D), join(dvs, a.v(1), DV);
}

// Forward and backward on the GPU: arch's kernels, or for arch 0 those that the stream's device gets.
template <class T>
void run_gpu(Call<T>& c, int arch, int64_t segment = 0) {
  const NsaShape& a = c.a;
  Stream& s = test_device(Backend::gpu).compute();
  constexpr bool narrow = std::is_same_v<T, bf16>;
  Arrays gpu(s);
  char* at[2];
  constexpr AttentionPass passes[2] = {AttentionPass::forward, AttentionPass::backward};
  for (int i : {0, 1})
    at[i] = gpu.scratch<char>(narrow && arch ? scratch_bytes(a, arch, passes[i], segment)
                              : i            ? nsa_selected_backward_scratch<T>(s.device(), a)
                                             : nsa_selected_forward_scratch<T>(s.device(), a));
  const T* x = gpu.up(c.x.v) + a.ld;
  T* dx = gpu.up(c.dx.v) + a.ld;
  const T *d_o = gpu.up(c.d_o.v) + c.d_o.ld, *dqc = gpu.up(c.dq_compressed.v) + c.dq_compressed.ld;
  T* o = gpu.up(c.o.v) + c.o.ld;
  float* lse = gpu.up(c.lse.v) + c.lse.ld;
  const int32_t* indices = gpu.up(c.indices);
  Gate<T> gate;
  if (c.gated) gate = {x + a.gate(1), dx + a.gate(1), a.ld};
  const T *k = x + a.k(1), *v = x + a.v(1);
  if (!c.compressed) dqc = nullptr;
  if (arch == 0) {
    nsa_selected_forward<T>(s, o, lse, x, k, v, indices, at[0], a);
    nsa_selected_backward<T>(s, dx, dx + a.k(1), dx + a.v(1), dqc, d_o, x, k, v, o, lse, indices, at[1], a, gate);
  } else {
    const Kernel f = gpu::nsa_selected_forward<T>(s.cuda(), arch, o, lse, x, k, v, indices, at[0], a, segment);
    const Kernel b = gpu::nsa_selected_backward<T>(s.cuda(), arch, dx, dx + a.k(1), dx + a.v(1), dqc, d_o, x, k, v, o,
                                                   lse, indices, at[1], a, gate, segment);
    if (arch == 90 || arch == 80 || arch == 86) {
      const std::string code = !narrow ? "fp32" : arch == 90 ? "sm90" : "sm80";
      CHECK(f.code == code);
      CHECK(b.code == (narrow && arch == 86 && a.D == 128 ? "sm80 in 99 KiB" : code));
    }
    CHECK(f.general == (narrow && a.select_block > 64));
    CHECK(b.general == f.general);
  }
  gpu.down();
}

// The bf16 kernels that this device runs, by compute capability, its own first. 86: those for less shared memory.
std::vector<int> archs() {
  const int cc = test_device(Backend::gpu).compute_capability;
  if (cc == 90) return {90, 80, 86};
  return cc == 80 ? std::vector<int>{80, 86} : cc > 80 ? std::vector<int>{cc} : std::vector<int>{};
}

// The norm of the difference over the norm of the reference; where that is nearly nothing, over a hundredth a number.
template <class T>
double error(const Rows<T>& x, const Rows<double>& ref, int64_t from, int64_t columns) {
  double difference = 0, norm = 0;
  for (int64_t r = 0; r < ref.rows; ++r)
    for (int64_t c = from; c < from + columns; ++c) {
      const double want = ref.at(r, c), d = double(x.at(r, c)) - want;
      difference += d * d, norm += want * want;
    }
  return std::sqrt(difference / std::max(norm, 1e-4 * double(ref.rows * columns)));
}
struct Errors {
  double o, lse, dq, dk, dv, dgate;  // lse: the largest difference; NaN is kept
};
template <class T>
Errors errors(const Call<T>& x, const Call<double>& ref) {
  const NsaShape& a = x.a;
  double worst = 0;
  for (int64_t i = 0; i < ref.lse.ld; ++i) {
    const double got = x.lse.at(0, i), want = ref.lse.at(0, i), d = got == want ? 0 : std::abs(got - want);
    worst = worse(worst, d);
  }
  const int64_t k = a.HKV * a.D, v = a.HKV * a.v_dim();
  return {error(x.o, ref.o, 0, ref.o.ld),    worst,
          error(x.dx, ref.dx, 0, a.H * a.D), error(x.dx, ref.dx, a.k(1), k),
          error(x.dx, ref.dx, a.v(1), v),    x.gated ? error(x.dx, ref.dx, a.gate(1), a.H) : 0};
}

template <class T>
Call<T> like(const Call<double>& c) {
  return Call<T>(c.a, c.indices, c.gated, c.compressed);
}

// Twice on the GPU: the same bits, nothing written outside, and as near to the definition as that type can be.
template <class T>
void check_kernel(const Call<double>& ref, const Errors& twin, int arch, int64_t segment) {
  constexpr bool narrow = std::is_same_v<T, bf16>;
  INFO(name_of(dtype_of<T>) << " kernels of sm_" << arch << " segment " << segment);
  Call<T> x = like<T>(ref), y = like<T>(ref);
  run_gpu(x, arch, segment), run_gpu(y, arch, segment);
  CHECK(same_results(x, y));
  CHECK(same_inputs(x, like<T>(ref)));
  CHECK(untouched_outside(x));
  const Errors e = errors(x, ref);
  const double factor = narrow ? 2 : 0, floor = narrow ? 1e-4 : 5e-5;
  CHECK(e.lse <= 1e-4 * std::max(1.0, ref.a.scale));
  CHECK(e.o <= factor * twin.o + floor);
  CHECK(e.dq <= factor * twin.dq + floor);
  CHECK(e.dk <= factor * twin.dk + floor);
  CHECK(e.dv <= factor * twin.dv + floor);
  CHECK(e.dgate <= factor * twin.dgate + floor);
}

constexpr int64_t lists = 1 << 20;  // as `segment`: lists, and one segment

void check_kernels(const NsaShape& a, Choice choice = Choice::random, int64_t segment = 0, bool gated = true,
                   bool compressed = true) {
  INFO(text(a) << " choice " << int(choice) << (gated ? " gated" : "") << (compressed ? " compressed" : ""));
  const std::vector<int32_t> indices = choose(a, choice);
  Call<double> exact(a, indices, gated, compressed), rounded(a, indices, gated, compressed);
  define(exact, false);
  if (a.D == 64 || a.D == 128 || a.DV) {
    define(rounded, true);
    const Errors twin = errors(rounded, exact);
    for (int arch : archs())
      if (arch != 86 || a.D == 128 || a.DV) check_kernel<bf16>(exact, twin, arch, segment ? segment : lists);
    if (archs().front() == 90 && !segment && is_masked(a, AttentionPass::backward, masked_tiles))
      for (int64_t tiles : {masked_tiles, attention::selected::masked_in_one})
        check_kernel<bf16>(exact, twin, 90, tiles);
  }
  if (a.T <= 1000 && !segment && !a.DV) check_kernel<float>(exact, {}, test_device(Backend::gpu).compute_capability, 0);
}

}  // namespace
#endif

// The rule of masked tiles, without the kernel: words of bits from indices, as word_kernel makes them.
TEST_CASE("words of bits say what was selected", "[selected]") {
  using attention::selected::Chosen;
  AttentionShape shape{2, 300, 4, 2, 64, 256, 256, 256, 256, 256, 1};
  const attention::Problem p(shape);
  const int n = p.Tp / 64, blocks = (p.T + 63) / 64;
  std::mt19937 random(7);
  std::vector<char> selected(size_t(p.B * p.HKV * p.T * blocks));
  for (char& x : selected) x = random() % 3 == 0;
  for (int j = 0; j < blocks; ++j)  // one tile of queries selects everything
    for (int t = 256; t < p.T; ++t) selected[size_t((3 * p.T + t) * blocks + j)] = 1;
  std::vector<uint64_t> words(size_t(p.B * p.HKV * n * n));
  for (int pair = 0; pair < p.B * p.HKV; ++pair)
    for (int t = 0; t < p.T; ++t)
      for (int j = 0; j < blocks; ++j)
        if (selected[size_t((pair * p.T + t) * blocks + j)])
          words[size_t((pair * n + t / 64) * n + j)] |= uint64_t(1) << (t % 64);
  const Chosen mask(shape, p, words.data());
  int wrong = 0, wrong_whole = 0, wholes = 0;
  for (int pair = 0; pair < p.B * p.HKV; ++pair)
    for (int i = 0; i < blocks; ++i)
      for (int j = 0; j < blocks; j += 2) {
        const uint64_t* at = mask.words_at(pair / p.HKV, pair % p.HKV, i, j);
        const Chosen::Tile<2> both{{at[0], at[1]}};
        const Chosen::Tile<1> even{{at[0]}}, odd{{at[1]}};
        bool all = true;
        for (int t = i * 64; t < std::min(p.T, i * 64 + 64); ++t)
          for (int k = j * 64; k < std::min(p.T, j * 64 + 128); ++k) {
            const bool sees = k <= t && selected[size_t((pair * p.T + t) * blocks + k / 64)];
            wrong += (mask.visible(t, k) && both.visible(t, k)) != sees;
            wrong += (mask.visible(t, k) && (k / 64 % 2 ? odd : even).visible(t, k)) != sees;
            all = all && sees;
          }
        if (mask.whole(i * 64, i * 64 + 64, j * 64, j * 64 + 128) && both.whole()) wrong_whole += !all, ++wholes;
      }
  CHECK(wrong == 0);
  CHECK(wrong_whole == 0);
  CHECK(wholes == 0);  // 44 queries of the last tile do not make 64 bits
  words.assign(words.size(), ~uint64_t(0));
  CHECK(Chosen::Tile<2>{{words[0], words[1]}}.whole());
  CHECK(!Chosen::Tile<2>{{words[0], words[1] - 1}}.whole());
}

TEST_CASE("Divisor divides what an int holds", "[selected]") {
  const int most = std::numeric_limits<int>::max();
  std::vector<int> by = {4095, 4096, 4097, 65535, 65536, 65537, (1 << 30) - 1, 1 << 30, (1 << 30) + 1, most - 1, most};
  for (int d = 1; d <= 1200; ++d) by.push_back(d);
  int64_t wrong = 0;
  for (const int d : by) {
    const attention::Divisor divide(d);
    for (const int64_t times : {int64_t(0), int64_t(1), int64_t(2), int64_t(77), int64_t(most / d)})
      for (const int64_t n : {times * d - 1, times * d, times * d + 1, times * d + d / 2, int64_t(most)})
        if (n >= 0 && n <= most) wrong += divide(int(n)) != int(n) / d;
  }
  CHECK(wrong == 0);
}

TEST_CASE("GPU: selected attention, a few small shapes", "[selected][gpu][small]") {
  NEEDS_GPU();
#if FSDP_CUDA
  check_kernels(shape(1, 130, 2, 1, 128));
  check_kernels(shape(2, 65, 3, 1, 64));
  check_kernels(shape(1, 33, 3, 3, 40));
  check_kernels(shape(1, 600, 4, 2, 64), Choice::hot, 256);
  check_kernels(wide_keys(1, 130, 3, 1));
  check_kernels(shape(1, 130, 10, 2, 128)), check_kernels(shape(2, 200, 4, 1, 64)),
      check_kernels(wide_keys(1, 130, 4, 1));
#endif
}

TEST_CASE("GPU: selected attention around the edges of blocks", "[selected][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t D : {64, 128})
    for (int64_t T : {1, 15, 31, 32, 33, 63, 64, 65, 127})
      for (int64_t heads : {4, 10}) check_kernels(shape(2, T, heads, 2, D));
#endif
}

TEST_CASE("GPU: selected attention to keys wider than values", "[selected][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t T : {1, 31, 33, 63, 64, 65, 127}) check_kernels(wide_keys(2, T, 4, 2));
  check_kernels(wide_keys(2, 333, 32, 2));
  check_kernels(wide_keys(1, 2049, 4, 1), Choice::first);  // lists that several blocks (CTAs) share
  for (int64_t block : {16, 96}) {
    NsaShape a = wide_keys(2, 777, 6, 2);
    a.select_block = block, a.selected = 7;
    check_kernels(a), check_kernels(a, Choice::some, 256);
  }
  check_kernels(wide_keys(1, 400, 4, 2), Choice::random, 0, false, false);
#endif
}

TEST_CASE("GPU: selected attention in groups", "[selected][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t group : {1, 2, 3, 4, 6, 8, 16})
    for (int64_t D : {64, 128}) {
      NsaShape a = shape(2, 333, 2 * group, 2, D);
      a.selected = 4;
      check_kernels(a);
    }
  check_kernels(shape(1, 100, 48, 1, 64));
  check_kernels(shape(1, 70, 128, 1, 128));
#endif
}

TEST_CASE("GPU: selected attention over longer sequences, in one and several segments", "[selected][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  check_kernels(shape(1, 1000, 6, 1, 64));
  check_kernels(shape(2, 1000, 4, 2, 128));
  check_kernels(shape(2, 1000, 4, 2, 128), Choice::random, 256);
  check_kernels(shape(1, 2049, 4, 2, 64));
  check_kernels(shape(2, 2049, 2, 1, 128), Choice::random, 512);
#endif
}

TEST_CASE("GPU: selected attention of skewed and of missing choices", "[selected][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (Choice choice : {Choice::hot, Choice::first, Choice::some})
    for (int64_t segment : {0, 256})
      for (int64_t D : {64, 128}) {
        NsaShape a = shape(2, 777, 8, 2, D);
        a.selected = 5;
        check_kernels(a, choice, segment);
      }
  check_kernels(shape(1, 2049, 4, 1, 128), Choice::first);
#endif
}

TEST_CASE("GPU: selected attention without gates or the compressed branch", "[selected][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t D : {64, 128})
    for (int way : {0, 1, 2}) check_kernels(shape(1, 400, 4, 2, D), Choice::random, 0, way == 1, way == 2);
#endif
}

TEST_CASE("GPU: selected attention with blocks of other sizes", "[selected][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t block : {1, 16, 32, 48, 96, 128, 160, 256})
    for (int64_t D : {64, 128}) {
      NsaShape a = shape(2, 513, 4, 2, D);
      a.select_block = block, a.selected = block == 1 ? 30 : 7;
      check_kernels(a);
      check_kernels(a, Choice::some, 256);
    }
#endif
}

TEST_CASE("GPU: float selected attention with any head", "[selected][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t D : {8, 16, 24, 32, 40, 72, 96, 120, 128}) check_kernels(shape(2, 200, 3, 1, D));
#endif
}

TEST_CASE("GPU: selected attention with large scores", "[selected][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t D : {64, 128}) {
    NsaShape a = shape(1, 500, 4, 2, D);
    a.selected = 5, a.scale = 10;  // scores of hundreds
    check_kernels(a);
  }
#endif
}

TEST_CASE("GPU: keys that nobody selected", "[selected][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  const auto check = [](auto zero, int arch) {  // Choice::some leaves block 1 out
    using T = decltype(zero);
    NsaShape a = shape(2, 700, 6, 2, 64);
    const std::vector<int32_t> indices = choose(a, Choice::some);
    Call<T> x(a, indices), y(a, indices);
    const Call<T> other(a, indices, true, true, 2);
    double gradient = 0;
    for (int64_t b = 0; b < a.B; ++b)
      for (int64_t j = b * a.T + 64; j < b * a.T + 128; ++j)
        for (int64_t column : {a.k(1), a.v(1)}) std::copy_n(&other.x.at(j, column), a.HKV * a.D, &y.x.at(j, column));
    run_gpu(x, arch), run_gpu(y, arch);
    CHECK(!same_bits(x.x.v, y.x.v));
    CHECK(same_results(x, y));
    for (int64_t b = 0; b < a.B; ++b)
      for (int64_t j = b * a.T + 64; j < b * a.T + 128; ++j)
        for (int64_t column : {a.k(1), a.v(1)})
          for (int64_t c = 0; c < a.HKV * a.D; ++c) gradient += !(float(x.dx.at(j, column + c)) == 0);
    CHECK(gradient == 0);
  };
  for (int arch : archs()) check(bf16(0.f), arch);
  check(0.f, test_device(Backend::gpu).compute_capability);
#endif
}

TEST_CASE("GPU: selected attention through a stream takes the device's kernels", "[selected][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  const NsaShape a = shape(2, 150, 4, 2, 128);
  const std::vector<int32_t> indices = choose(a, Choice::random);
  if (!archs().empty()) {
    Call<bf16> x(a, indices), y(a, indices);
    run_gpu(x, archs().front()), run_gpu(y, 0);
    CHECK(same_results(x, y));
  }
  Call<float> x(a, indices), y(a, indices);
  run_gpu(x, test_device(Backend::gpu).compute_capability), run_gpu(y, 0);
  CHECK(same_results(x, y));
#endif
}

TEST_CASE("GPU: selected attention refuses what has no kernel", "[selected][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  Stream& s = test_device(Backend::gpu).compute();
  const auto forward = [&](auto* p, const NsaShape& a, int64_t shift = 0) -> std::string {
    using T = std::remove_pointer_t<decltype(p)>;
    try {
      nsa_selected_forward<T>(s, p, nullptr, p, p + shift, p, nullptr, nullptr, a);
    } catch (const Error& e) { return e.what(); }
    return "";
  };
  const auto has = [](const std::string& text, const std::string& part) { return text.find(part) != text.npos; };
  NsaShape a = shape(1, 4, 2, 1, 96);
  CHECK(has(forward(static_cast<bf16*>(nullptr), a), "head dims 96 and 96"));
  a.D = 192;
  CHECK(has(forward(static_cast<bf16*>(nullptr), a), "head dims 192 and 192"));
  CHECK(has(forward(static_cast<double*>(nullptr), a), "fp64"));
  a.D = 136;
  CHECK(has(forward(static_cast<float*>(nullptr), a), "head dims 136 and 136"));
  a = shape(1, 4, 2, 1, 64);
  alignas(16) bf16 narrow[16];
  CHECK(has(forward(narrow, a, 1), "16 bytes"));
  a.ld += 2;
  CHECK(has(forward(narrow, a), "16 bytes"));
  a.HKV = 3;
  CHECK(has(forward(narrow, a), "HKV 3"));
#endif
}

TEST_CASE("GPU: selected attention, milliseconds", "[.time]") {
  NEEDS_GPU();
#if FSDP_CUDA
  Stream& s = test_device(Backend::gpu).compute();
  const auto get = [](const char* name, int64_t other) {
    return std::getenv(name) ? std::atoll(std::getenv(name)) : other;
  };
  const int64_t segment = get("SEGMENT", 0), from = get("FROM", 4096), to = get("TO", 131072), heads = get("HEADS", 0);
  const int64_t B = get("BATCH", 1), D = get("HEAD_DIM", 128);
  const int arch = int(get("KERNELS", archs().front())), repeats = int(get("REPEATS", 5));
  for (auto [H, HKV] : {std::pair<int64_t, int64_t>{32, 8}, {64, 4}, {12, 2}})
    for (int64_t T = from; T <= to; T *= 2) {
      if (heads && heads != H) continue;
      NsaShape a = shape(B, T, H, HKV, D);
      std::vector<int32_t> indices = choose(a, Choice::random);
      std::vector<void*> taken;
      const auto take = [&](int64_t bytes) {
        void* p = nullptr;
        CUDA_CHECK(cudaMalloc(&p, size_t(bytes)));
        taken.push_back(p);
        return static_cast<char*>(p);
      };
      const auto numbers = [&](int64_t n) {  // normal ones, a few over and over
        static std::vector<bf16> some;
        if (some.empty())
          for (int64_t i = 0; i < 1 << 21; ++i) some.push_back(bf16(philox_normals(1, 1, uint64_t(i / 4)).x[i % 4]));
        bf16* p = reinterpret_cast<bf16*>(take(n * 2));
        for (int64_t i = 0; i < n; i += 1 << 21) s.copy(p + i, some.data(), std::min<int64_t>(n - i, 1 << 21) * 2);
        return p;
      };
      bf16 *x = numbers(B * T * a.ld), *dx = numbers(B * T * a.ld), *d_o = numbers(B * T * H * D),
           *dqc = numbers(B * T * H * D);
      bf16* o = reinterpret_cast<bf16*>(take(B * T * H * D * 2));
      float* lse = reinterpret_cast<float*>(take(B * T * H * 4));
      int32_t* chosen = reinterpret_cast<int32_t*>(take(int64_t(indices.size()) * 4));
      s.copy(chosen, indices.data(), int64_t(indices.size()) * 4);
      const int64_t bytes[2] = {scratch_bytes(a, arch, AttentionPass::forward, segment),
                                scratch_bytes(a, arch, AttentionPass::backward, segment)};
      char* scratch = take(std::max(bytes[0], bytes[1]));
      Event e[3] = {Event(s.device(), Event::timed), Event(s.device(), Event::timed), Event(s.device(), Event::timed)};
      std::vector<float> forward, backward;
      for (int i = 0; i < repeats; ++i) {
        s.record(e[0]);
        gpu::nsa_selected_forward<bf16>(s.cuda(), arch, o, lse, x, x + a.k(1), x + a.v(1), chosen, scratch, a, segment);
        s.record(e[1]);
        gpu::nsa_selected_backward<bf16>(s.cuda(), arch, dx, dx + a.k(1), dx + a.v(1), dqc, d_o, x, x + a.k(1),
                                         x + a.v(1), o, lse, chosen, scratch, a, {x + a.gate(1), dx + a.gate(1), a.ld},
                                         segment);
        s.record(e[2]);
        forward.push_back(elapsed_ms(e[0], e[1])), backward.push_back(elapsed_ms(e[1], e[2]));
      }
      std::sort(forward.begin(), forward.end()), std::sort(backward.begin(), backward.end());
      std::printf("%lld/%lld heads T %6lld: forward %7.3f ms, backward %7.3f ms; scratch %.0f and %.0f MiB\n",
                  (long long)H, (long long)HKV, (long long)T, forward[repeats / 2], backward[repeats / 2],
                  double(bytes[0]) / (1 << 20), double(bytes[1]) / (1 << 20));
      std::fflush(stdout);
      for (void* p : taken) cudaFree(p);
    }
#endif
}
