// nsa_topk: the CPU twin and every GPU kernel against the definition in double. GPU cases have the tag [gpu]; those
// with [small] too are for compute-sanitizer. [.time], hidden, prints times.
#include "test/arrays.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>

#include "attention/stages.h"
#include "attention/topk.cuh"
#include "lib/ops/philox.h"

using Doubles = std::vector<double>;
using Indices = std::vector<int32_t>;

namespace {

NsaShape shape(int64_t B, int64_t T, int64_t H, int64_t HKV, int64_t D) {
  NsaShape a = {B, T, H, HKV, D, 0, 1 / std::sqrt(double(D))};
  a.ld = (a.columns() + 15) / 8 * 8;
  return a;
}
NsaShape blocks(NsaShape a, int64_t block, int64_t stride, int64_t select_block, int64_t selected) {
  a.block = block, a.stride = stride, a.select_block = select_block, a.selected = selected;
  return a;
}
std::string text(const NsaShape& a) {
  const auto ll = [](int64_t n) { return static_cast<long long>(n); };
  return strf("B %lld T %lld H %lld HKV %lld D %lld l %lld d %lld l' %lld n %lld", ll(a.B), ll(a.T), ll(a.H), ll(a.HKV),
              ll(a.D), ll(a.block), ll(a.stride), ll(a.select_block), ll(a.selected));
}
int64_t seen(const NsaShape& a, int64_t t) { return t < a.block - 1 ? 0 : (t - a.block + 1) / a.stride + 1; }

// Arguments of a call. q and k are normal numbers rounded to bf16, so that every type computes the same function; what
// nobody may read is NaN. lse is what rows of such logits have, about, and another for every head and query: no test
// here needs probabilities that sum to 1.
template <class T>
struct Call {
  NsaShape a;
  std::vector<T> q, k;
  std::vector<acc_t<T>> lse;
  Indices indices;
  explicit Call(const NsaShape& a)
      : a(a),
        q(a.B * a.T * a.ld),
        k(a.B * a.compressed() * a.HKV * a.D),
        lse(a.B * a.H * a.T),
        indices(a.B * a.HKV * a.T * a.selected, -7) {
    std::memset(static_cast<void*>(q.data()), 0xff, q.size() * sizeof(T));
    for (int64_t i = 0; i < a.B * a.T * a.H * a.D; ++i) q[i / (a.H * a.D) * a.ld + i % (a.H * a.D)] = number(1, i);
    for (size_t i = 0; i < k.size(); ++i) k[i] = number(2, int64_t(i));
    for (int64_t i = 0; i < int64_t(lse.size()); ++i) {
      const int64_t keys = seen(a, i % a.T);
      lse[i] = keys ? acc_t<T>(float(std::log(double(keys)) + 0.5 + 0.3 * double(float(number(3, i))))) : -INFINITY;
    }
  }
  static T number(uint32_t tensor, int64_t i) {  // one of 65536, which are made once
    static const std::vector<float> table = [] {
      std::vector<float> v(1 << 16);
      for (size_t i = 0; i < v.size(); ++i) v[i] = float(bf16(philox_normals(1, 0, i / 4).x[i % 4]));
      return v;
    }();
    return T(table[(uint64_t(i) * 8 + tensor + 1) * 0x9E3779B97F4A7C15ull >> 48]);
  }
  T& key(int64_t b, int64_t i, int64_t head, int64_t d) {
    return k[((b * a.compressed() + i) * a.HKV + head) * a.D + d];
  }
  // All keys a multiple of one vector, all queries that vector: the logit of key i is f(i), rounded to bf16.
  template <class F>
  void profile(F f) {
    for (int64_t r = 0; r < a.B * a.T; ++r)
      for (int64_t c = 0; c < a.H * a.D; ++c) q[r * a.ld + c] = T(1);
    for (int64_t i = 0; i < int64_t(k.size()); ++i)
      k[i] = T(float(bf16(float(f(i / (a.HKV * a.D) % a.compressed()) / (a.scale * double(a.D))))));
  }
  // The lse that belongs to q and k.
  void exact_lse() {
    for (int64_t b = 0; b < a.B; ++b)
      for (int64_t h = 0; h < a.H; ++h)
        for (int64_t t = 0; t < a.T; ++t) {
          Doubles s;
          for (int64_t i = 0; i < seen(a, t); ++i) s.push_back(logit(b, h, t, i).x);
          if (s.empty()) continue;
          const double top = *std::max_element(s.begin(), s.end());
          double sum = 0;
          for (double x : s) sum += std::exp(x - top);
          lse[(b * a.H + h) * a.T + t] = acc_t<T>(top + std::log(sum));
        }
  }
  struct Logit {
    double x, magnitude;  // and what it would be if no product were negative
  };
  Logit logit(int64_t b, int64_t h, int64_t t, int64_t i) const {
    const T *x = &q[(b * a.T + t) * a.ld + h * a.D],
            *y = &k[((b * a.compressed() + i) * a.HKV + h / (a.H / a.HKV)) * a.D];
    Logit l = {0, 0};
    for (int64_t d = 0; d < a.D; ++d) {
      const double p = double(x[d]) * double(y[d]);
      l.x += p, l.magnitude += std::abs(p);
    }
    return {l.x * a.scale, l.magnitude * a.scale};
  }
};

struct Reference {
  Doubles score;     // of blocks 0 to cur
  double tolerance;  // relative error that a score may have
};
// By the definition, token by token. fp32: a logit minus lse is off by no more than 2^-21 of the magnitudes that were
// added, a probability by as much in relation (and its exponential by 2^-21), and all that is added then is positive.
template <class T>
Reference reference(const Call<T>& c, int64_t b, int64_t head, int64_t t) {
  const NsaShape& a = c.a;
  const int64_t cur = t / a.select_block, group = a.H / a.HKV;
  Reference r = {Doubles(cur + 1), 0};
  for (int64_t h = head * group; h < (head + 1) * group; ++h) {
    const double lse = c.lse[(b * a.H + h) * a.T + t];
    for (int64_t i = 0; i < seen(a, t); ++i) {
      const auto l = c.logit(b, h, t, i);
      const double p = std::exp(l.x - lse);
      r.tolerance = std::max(r.tolerance, l.magnitude + std::abs(lse) + 1);
      for (int64_t token = a.stride * i; token < a.stride * i + a.block; token += a.stride)
        r.score[token / a.select_block] += p;
    }
  }
  r.tolerance *= std::is_same_v<T, double> ? 1e-14 : 0x1p-21;
  return r;
}

struct Verdict {
  int64_t malformed = 0;  // lists
  double worst = 0;       // best block left out against worst one taken, in tolerances; at most 1 is right
};
// All lists' form, and `sample` queries' choice (every one if 0).
template <class T>
Verdict judge(const Call<T>& c, int64_t sample = 0) {
  const NsaShape& a = c.a;
  const int64_t n = a.selected, every = sample ? std::max<int64_t>(1, a.T / sample) : 1;
  Verdict v;
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t head = 0; head < a.HKV; ++head)
      for (int64_t t = 0; t < a.T; ++t) {
        const int32_t* list = &c.indices[((b * a.HKV + head) * a.T + t) * n];
        const int64_t cur = t / a.select_block, count = std::min(n, cur + 1);
        const auto has = [&](int64_t j) { return j < 0 || std::find(list, list + count, j) != list + count; };
        bool good = has(0) && has(cur) && has(cur - 1);
        for (int64_t i = 0; i < n; ++i)
          good = good && (i >= count ? list[i] == -1 : list[i] <= cur && list[i] > (i ? list[i - 1] : -1));
        v.malformed += !good;
        if (!good || count == cur + 1 || (t + 3 * b + head) % every) continue;
        const Reference r = reference(c, b, head, t);
        double in = INFINITY, out = -INFINITY;
        for (int64_t j = 1; j < cur - 1; ++j) has(j) ? in = std::min(in, r.score[j]) : out = std::max(out, r.score[j]);
        if (out > in) v.worst = std::max(v.worst, (out - in - 1e-37) / (out * 2 * r.tolerance));
      }
  return v;
}
// Lists of a call whose scores are all equal: the lowest indices.
template <class T>
bool lowest(const Call<T>& c) {
  bool right = true;
  const int64_t n = c.a.selected;
  for (int64_t i = 0; i < int64_t(c.indices.size()); ++i) {
    const int64_t cur = i / n % c.a.T / c.a.select_block, s = i % n;
    right = right && c.indices[i] == (cur < n ? (s <= cur ? s : -1) : s < n - 2 ? s : cur + 1 - (n - s));
  }
  return right;
}

template <class T>
void twin(Call<T>& c) {
  Stream& s = test_device(Backend::cpu).compute();
  std::vector<acc_t<T>> scratch(nsa_topk_scratch<T>(c.a));
  nsa_topk<T>(s, c.indices.data(), c.q.data(), c.k.data(), c.lse.data(), scratch.data(), c.a);
  s.synchronize();
}

// Shapes of blocks: overlapping and not, several to one and one to one, not powers of two, few and many wanted.
std::vector<NsaShape> geometries(const NsaShape& a) {
  return {blocks(a, 32, 16, 64, 5),  blocks(a, 16, 16, 64, 4),  blocks(a, 32, 32, 32, 6), blocks(a, 64, 16, 64, 3),
          blocks(a, 32, 16, 128, 4), blocks(a, 8, 4, 16, 16),   blocks(a, 24, 8, 48, 5),  blocks(a, 4, 4, 8, 40),
          blocks(a, 1, 1, 1, 16),    blocks(a, 30, 10, 60, 10), blocks(a, 16, 8, 32, 31), blocks(a, 2, 1, 4, 16)};
}

// run(call) fills call.indices. What every implementation must get right, by type.
template <class T, class Run>
void check_choice(const NsaShape& a, Run run, int64_t sample = 0) {
  INFO(text(a) << " " << name_of(dtype_of<T>));
  Call<T> c(a);
  run(c);
  const Verdict v = judge(c, sample);
  CHECK(v.malformed == 0);
  CHECK(v.worst <= 1);
}
template <class T, class Run>
void check_ties(const NsaShape& a, Run run) {
  INFO(text(a) << " " << name_of(dtype_of<T>));
  for (int what = 0; what < 3; ++what) {
    INFO("what " << what);
    Call<T> c(a);
    if (what < 2)  // all keys equal; those at the same place of their block equal
      for (int64_t b = 0; b < a.B; ++b)
        for (int64_t i = 0; i < a.compressed(); ++i)
          for (int64_t head = 0; head < a.HKV; ++head)
            for (int64_t d = 0; d < a.D; ++d)
              c.key(b, i, head, d) = c.key(b, what == 0 ? 0 : i % (a.select_block / a.stride), head, d);
    else std::fill(c.lse.begin(), c.lse.end(), acc_t<T>(10000));  // all probabilities zero
    run(c);
    CHECK(lowest(c));
  }
}
// Scores that rise, fall, repeat as lanes do, or stand out in few or many places.
template <class T, class Run>
void check_profiles(const NsaShape& a, Run run, int64_t sample) {
  INFO(text(a) << " " << name_of(dtype_of<T>));
  const double blocks = double(a.select_blocks()), per = double(a.select_block / a.stride);
  const auto check = [&](const char* what, auto f) {
    INFO(what);
    Call<T> c(a);
    c.profile([&](int64_t i) { return f(std::floor(double(i) / per), i); });
    run(c);
    const Verdict v = judge(c, sample);
    CHECK(v.malformed == 0);
    CHECK(v.worst <= 1);
  };
  check("rising", [&](double j, int64_t) { return 8 * j / blocks; });
  check("falling", [&](double j, int64_t) { return -8 * j / blocks; });
  check("every 32nd", [&](double j, int64_t) { return std::fmod(j, 32) == 5 ? 4 + j / blocks : j / blocks; });
  check("every 128th", [&](double j, int64_t) { return std::fmod(j, 128) == 66 ? 4 + j / blocks : j / blocks; });
  check("every 3rd equal", [&](double j, int64_t) { return std::fmod(j, 3) == 1 ? 2.0 : 0.0; });
  check("ten stand out", [&](double j, int64_t) { return std::fmod(j, blocks / 10) < 1 ? 20.0 : -90.0; });
  check("noise", [&](double, int64_t i) { return 3 * double(float(Call<float>::number(9, i))); });
}
template <class T, class Run>
void check_large_logits(NsaShape a, Run run) {
  a.scale *= 60;  // logits of hundreds
  INFO(text(a) << " " << name_of(dtype_of<T>));
  Call<T> c(a);
  c.exact_lse();
  run(c);
  const Verdict v = judge(c);
  CHECK(v.malformed == 0);
  CHECK(v.worst <= 1);
}
// Another order of a group's heads: another rounding, else the same.
template <class T, class Run>
void check_permutation(const NsaShape& a, Run run) {
  INFO(text(a) << " " << name_of(dtype_of<T>));
  const int64_t group = a.H / a.HKV;
  Call<T> c(a), p(a);
  for (int64_t h = 0; h < a.H; ++h) {
    const int64_t from = h / group * group + (h * 5 + 3) % group;
    for (int64_t r = 0; r < a.B * a.T; ++r) std::copy_n(&c.q[r * a.ld + from * a.D], a.D, &p.q[r * a.ld + h * a.D]);
    for (int64_t b = 0; b < a.B; ++b) std::copy_n(&c.lse[(b * a.H + from) * a.T], a.T, &p.lse[(b * a.H + h) * a.T]);
  }
  run(c), run(p);
  int64_t different = 0, queries = a.B * a.HKV * a.T;
  for (int64_t i = 0; i < queries; ++i)
    different +=
        !std::equal(&c.indices[i * a.selected], &c.indices[i * a.selected] + a.selected, &p.indices[i * a.selected]);
  const Verdict v = judge(p, 50);
  CHECK(v.malformed == 0);
  CHECK(v.worst <= 1);
  CHECK(different <= 1 + queries / 500);  // near ties
}
// What comes after a query, and in other sequences, does not matter.
template <class T, class Run>
void check_causality(const NsaShape& a, int64_t shorter, Run run) {
  INFO(text(a) << " " << name_of(dtype_of<T>) << " against T " << shorter);
  NsaShape s = a;
  s.B = 1, s.T = shorter;
  Call<T> whole(a), part(s);
  const int64_t b = a.B - 1, n = a.selected;
  std::copy_n(&whole.q[b * a.T * a.ld], s.T * a.ld, part.q.begin());
  std::copy_n(whole.k.data() + b * a.compressed() * a.HKV * a.D, int64_t(part.k.size()), part.k.begin());
  for (int64_t h = 0; h < a.H; ++h) std::copy_n(&whole.lse[(b * a.H + h) * a.T], s.T, &part.lse[h * s.T]);
  run(whole), run(part);
  for (int64_t head = 0; head < a.HKV; ++head)
    CHECK(std::equal(&part.indices[head * s.T * n], &part.indices[head * s.T * n] + s.T * n,
                     &whole.indices[(b * a.HKV + head) * a.T * n]));
}

}  // namespace

// --------------------------------------------------------------------------------------------------------- CPU twins

TEST_CASE("nsa_topk takes the blocks of the best scores", "[topk]") {
  const auto run = [](auto& c) { twin(c); };
  for (int64_t T : {1, 15, 31, 32, 33, 63, 64, 65, 127, 400}) {
    check_choice<double>(shape(2, T, 6, 2, 5), run);
    check_choice<double>(blocks(shape(2, T, 6, 2, 5), 8, 4, 16, 5), run);
  }
  for (const NsaShape& a : geometries(shape(1, 400, 6, 2, 8))) {
    check_choice<double>(a, run), check_choice<float>(a, run), check_choice<bf16>(a, run);
    check_ties<double>(a, run), check_ties<float>(a, run), check_ties<bf16>(a, run);
  }
  check_profiles<float>(blocks(shape(1, 1000, 2, 1, 8), 8, 4, 16, 16), run, 20);
  check_large_logits<float>(blocks(shape(1, 400, 4, 2, 16), 8, 4, 16, 5), run);
  check_large_logits<double>(blocks(shape(1, 400, 4, 2, 16), 8, 4, 16, 5), run);
  check_permutation<double>(blocks(shape(2, 300, 6, 2, 8), 8, 4, 16, 5), run);
  check_causality<float>(blocks(shape(2, 300, 6, 2, 8), 8, 4, 16, 5), 177, run);
}

TEST_CASE("nsa_topk refuses what the equations forbid, and enqueues nothing while planning", "[topk]") {
  Device& dev = test_device(Backend::cpu);
  Call<float> c(shape(1, 100, 2, 1, 4));
  NsaShape bad = c.a;
  bad.block = 40;
  CHECK_THROWS_AS(nsa_topk_scratch<float>(bad), UsageError);
  CHECK_THROWS_AS(nsa_topk<float>(dev.compute(), c.indices.data(), c.q.data(), c.k.data(), c.lse.data(), nullptr, bad),
                  UsageError);
  dev.mode = Mode::plan;
  nsa_topk<float>(dev.compute(), c.indices.data(), c.q.data(), c.k.data(), c.lse.data(), nullptr, c.a);
  dev.mode = Mode::run;
  dev.compute().synchronize();
  CHECK(std::count(c.indices.begin(), c.indices.end(), -7) == int64_t(c.indices.size()));
}

TEST_CASE("nsa_topk's scratch does not grow with the number of queries", "[topk]") {
  // A few queries' scores for each of some hundred blocks of threads: 264 x 32 queries x 1.25 numbers a block.
  CHECK(nsa_topk_scratch<bf16>(shape(1, 65536, 32, 8, 128)) == 264 * 32 * (1024 + 256));
  CHECK(nsa_topk_scratch<bf16>(shape(8, 65536, 32, 8, 128)) == 264 * 32 * (1024 + 256));
  CHECK(nsa_topk_scratch<bf16>(shape(1, 65536, 64, 4, 128)) == 264 * 8 * (1024 + 256));
  CHECK(nsa_topk_scratch<bf16>(shape(1, 100, 4, 1, 64)) == 4 * 32 * (32 + 8));
}

// --------------------------------------------------------------------------------------------------------------- GPU

#if FSDP_CUDA
namespace {

Stream& gpu_stream() { return test_device(Backend::gpu).compute(); }

// arch's kernel, or for arch 0 what the stream's device gets. Twice, and the same.
template <class T>
void run_gpu(Call<T>& c, int arch) {
  Stream& s = gpu_stream();
  Arrays on(s);
  Indices again = c.indices;
  const T *q = on.up(c.q), *k = on.up(c.k);
  const float* lse = on.up(c.lse);
  float* scratch = on.scratch<float>(nsa_topk_scratch<T>(c.a));
  for (int32_t* to : {on.up(c.indices), on.up(again)})
    if (arch == 0) nsa_topk<T>(s, to, q, k, lse, scratch, c.a);
    else gpu::nsa_topk<T>(s.cuda(), arch, to, q, k, lse, scratch, c.a);
  on.down();
  CHECK(again == c.indices);
}

// What gpu::nsa_topk says it has launched for a shape.
template <class T>
std::string kernel_for(const NsaShape& a, int arch) {
  Call<T> c(a);
  Arrays on(gpu_stream());
  const Kernel ran = gpu::nsa_topk<T>(gpu_stream().cuda(), arch, on.up(c.indices), on.up(c.q), on.up(c.k), on.up(c.lse),
                                      on.scratch<float>(nsa_topk_scratch<T>(a)), a);
  on.down();
  return name_of(ran) + (ran.general ? " (general)" : "");
}

// The bf16 kernels that this device runs, by compute capability.
std::vector<int> archs() {
  const int cc = test_device(Backend::gpu).compute_capability;
  return cc == 90 ? std::vector<int>{90, 80} : cc >= 80 ? std::vector<int>{80} : std::vector<int>{};
}
// check(a bf16's or float's call of a kernel) for every kernel.
template <class F>
void every_kernel(F check) {
  for (int arch : archs()) {
    INFO("kernels of sm_" << arch);
    check(bf16(), [=](Call<bf16>& c) { run_gpu(c, arch); });
  }
  check(float(), [](Call<float>& c) { run_gpu(c, 0); });
}

// Head dims that T's kernels have.
template <class T>
std::vector<int64_t> widths() {
  return std::is_same_v<T, bf16> ? std::vector<int64_t>{64, 128, 192} : std::vector<int64_t>{64, 128};
}

}  // namespace
#endif

TEST_CASE("GPU: nsa_topk, a few small shapes", "[topk][gpu][small]") {
  NEEDS_GPU();
#if FSDP_CUDA
  every_kernel([](auto type, auto run) {
    using T = decltype(type);
    check_choice<T>(blocks(shape(2, 300, 8, 2, 64), 8, 4, 16, 5), run);
    check_choice<T>(blocks(shape(1, 333, 6, 1, 128), 16, 4, 16, 6), run);
    check_choice<T>(blocks(shape(1, 65, 17, 1, 64), 4, 4, 8, 3), run);
    check_choice<T>(blocks(shape(1, 165, 34, 2, 64), 4, 4, 8, 4), run);
    check_choice<T>(shape(1, 20, 2, 2, 64), run);
    check_ties<T>(blocks(shape(1, 300, 2, 2, 64), 2, 1, 4, 6), run);
  });
#endif
}

TEST_CASE("GPU: nsa_topk for every length", "[topk][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  every_kernel([](auto type, auto run) {
    using T = decltype(type);
    for (int64_t D : widths<T>())
      for (int64_t length : {1, 15, 31, 32, 33, 63, 64, 65, 127, 128, 1000, 2049}) {
        const NsaShape a = shape(2, length, 8, 2, D);
        check_choice<T>(a, run, 40);
        check_choice<T>(blocks(a, 32, 16, 64, 4), run, 40);
        check_choice<T>(blocks(a, 8, 4, 16, 16), run, 40);
      }
  });
#endif
}

TEST_CASE("GPU: nsa_topk for every group", "[topk][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  every_kernel([](auto type, auto run) {
    using T = decltype(type);
    for (int64_t D : widths<T>())
      for (int64_t group : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 32, 64, 128}) {
        const NsaShape a = blocks(shape(group < 17 ? 2 : 1, group < 32 ? 1100 : 300, 2 * group, 2, D), 8, 4, 16, 16);
        check_choice<T>(a, run, 400 / group);
        if (D == 64) check_ties<T>(blocks(shape(1, 700, group, 1, D), 8, 4, 16, 12), run);
      }
  });
#endif
}

// Two lengths on both sides of a kernel's limit, which choose for the queries that they share; and lists of every kind.
TEST_CASE("GPU: nsa_topk among 32 blocks and fewer", "[topk][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  every_kernel([](auto type, auto run) {
    using T = decltype(type);
    for (int64_t D : widths<T>())
      for (int64_t group : {1, 2, 3, 4, 5, 6, 8, 12, 16, 32}) {
        const NsaShape a = blocks(shape(group < 5 ? 2 : 1, 500, 2 * group, 2, D), 8, 4, 16, 12);
        check_choice<T>(a, run, 400 / group);
        check_causality<T>(blocks(shape(2, 700, 2 * group, 2, D), 8, 4, 16, 12), 512, run);
        if (D == 64) check_ties<T>(blocks(shape(1, 512, group, 1, D), 8, 4, 16, 12), run);
      }
    for (int64_t n : {3, 4, 16, 31, 32, 33}) check_choice<T>(blocks(shape(1, 2048, 12, 2, 64), 32, 16, 64, n), run, 60);
    check_profiles<T>(blocks(shape(1, 500, 2, 1, 64), 8, 4, 16, 7), run, 10);
    check_large_logits<T>(blocks(shape(2, 500, 4, 2, 64), 8, 4, 16, 6), run);
    check_permutation<T>(blocks(shape(2, 500, 12, 2, 64), 8, 4, 16, 8), run);
  });
#endif
}

TEST_CASE("GPU: nsa_topk for other blocks", "[topk][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  every_kernel([](auto type, auto run) {
    using T = decltype(type);
    for (const NsaShape& a : geometries(shape(2, 1500, 8, 2, 64)))
      check_choice<T>(a, run, 50),
          check_ties<T>(blocks(shape(1, 1500, 4, 1, 64), a.block, a.stride, a.select_block, a.selected), run);
    for (int64_t n : {3, 4, 13, 28, 31, 32, 33, 64, 100})
      check_choice<T>(blocks(shape(1, 1500, 4, 1, 128), 4, 2, 8, n), run, 50);
  });
#endif
}

TEST_CASE("GPU: nsa_topk for scores of every profile", "[topk][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  every_kernel([](auto type, auto run) {
    using T = decltype(type);
    for (int64_t n : {4, 16, 40}) check_profiles<T>(blocks(shape(1, 5000, 2, 1, 64), 4, 2, 8, n), run, 60);
    check_large_logits<T>(blocks(shape(2, 600, 4, 2, 64), 8, 4, 16, 6), run);
    check_large_logits<T>(blocks(shape(1, 600, 4, 2, 128), 16, 16, 16, 6), run);
  });
#endif
}

TEST_CASE("GPU: nsa_topk of permuted heads and of shorter sequences", "[topk][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  every_kernel([](auto type, auto run) {
    using T = decltype(type);
    for (int64_t group : {2, 4, 16, 32})
      check_permutation<T>(blocks(shape(2, 800, 2 * group, 2, 64), 8, 4, 16, 16), run);
    for (int64_t T1 : {700, 1023, 1025})
      check_causality<T>(shape(2, 1700, 8, 2, 64), T1, run),
          check_causality<T>(blocks(shape(2, 1700, 8, 2, 128), 8, 4, 16, 16), T1, run);
  });
#endif
}

TEST_CASE("GPU: nsa_topk over a long sequence", "[topk][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int arch : archs()) {
    INFO("kernels of sm_" << arch);
    check_choice<bf16>(
        shape(1, 20000, 8, 2, 64), [&](Call<bf16>& c) { run_gpu(c, arch); }, 50);
    check_choice<bf16>(
        shape(2, 9000, 32, 8, 128), [&](Call<bf16>& c) { run_gpu(c, arch); }, 10);
    // More blocks than have room in shared memory.
    for (int64_t n : {4, 16, 40})
      check_profiles<bf16>(
          blocks(shape(1, 9000, 2, 1, 64), 4, 2, 8, n), [&](Call<bf16>& c) { run_gpu(c, arch); }, 30);
    check_ties<bf16>(blocks(shape(1, 9000, 4, 1, 64), 4, 2, 8, 16), [&](Call<bf16>& c) { run_gpu(c, arch); });
  }
#endif
}

TEST_CASE("GPU: nsa_topk through a stream takes the device's kernels", "[topk][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  const NsaShape a = blocks(shape(2, 500, 8, 2, 64), 8, 4, 16, 16);
  Call<bf16> direct(a), x(a);
  if (!archs().empty()) {
    run_gpu(direct, archs().front()), run_gpu(x, 0);
    CHECK(direct.indices == x.indices);
  }
  Stream& s = gpu_stream();
  CHECK_THROWS_AS(nsa_topk<double>(s, nullptr, nullptr, nullptr, nullptr, nullptr, a), Error);
  CHECK_THROWS_AS(nsa_topk<bf16>(s, nullptr, nullptr, nullptr, nullptr, nullptr, shape(1, 4, 2, 1, 96)), Error);
  CHECK_THROWS_AS(nsa_topk<float>(s, nullptr, nullptr, nullptr, nullptr, nullptr, shape(1, 4, 2, 1, 136)), Error);
#endif
}

TEST_CASE("GPU: nsa_topk says which kernel it launched", "[topk][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int arch : archs()) {
    INFO("kernels of sm_" << arch);
    for (int64_t D : widths<bf16>()) {
      for (int64_t group : {1, 2, 3, 4, 6, 8, 12, 16})
        for (auto [T, which] : {std::pair<int64_t, const char*>{2048, "few blocks"}, {2049, "pooled"}})
          CHECK(kernel_for<bf16>(shape(1, T, group, 1, D), arch) ==
                (arch == 90 ? strf("sm90, %s, %d head%s", which, int(group), group == 1 ? "" : "s") : "sm80, pooled"));
      for (int64_t group : {5, 7, 10})
        CHECK(kernel_for<bf16>(shape(1, 100, group, 1, D), arch) ==
              (arch == 90 ? "sm90, pooled, any heads (general)" : "sm80, pooled"));
      const std::string not_pooled = strf("sm%d, not pooled (general)", arch);
      CHECK(kernel_for<bf16>(blocks(shape(1, 100, 4, 1, D), 16, 16, 64, 4), arch) == not_pooled);
      CHECK(kernel_for<bf16>(shape(1, 100, 32, 1, D), arch) == not_pooled);  // its heads go by in two parts
    }
  }
  CHECK(kernel_for<float>(shape(1, 100, 3, 1, 40), 0) == "fp32");
#endif
}

// Random q and k in rows as wide as NSA's; TFLOP/s of the products that are wanted, those with visible keys.
TEST_CASE("GPU: nsa_topk, times", "[.time]") {
  NEEDS_GPU();
#if FSDP_CUDA
  Device& dev = test_device(Backend::gpu);
  Stream& s = dev.compute();
  std::vector<bf16> numbers(1 << 25);
  uint64_t state = 1;
  for (bf16& x : numbers) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    double sum = 0;
    for (int i = 0; i < 8; ++i) sum += double(state >> (8 * i) & 255);
    x = bf16(float((sum - 1020) / 209));
  }
  for (int arch : archs())
    for (auto [H, HKV, D, from, to] :
         {std::array<int64_t, 5>{12, 2, 64, 2048, 4096}, {32, 8, 128, 2048, 131072}, {64, 4, 128, 4096, 131072}})
      for (int64_t T = from; T <= to; T *= 2) {
        const NsaShape a = shape(1, T, H, HKV, D);
        const int64_t q_bytes = T * a.ld * 2, all = int64_t(numbers.size()) * 2;
        Arrays on(s);
        const int64_t k_bytes = a.compressed() * HKV * a.D * 2, scratch_floats = nsa_topk_scratch<bf16>(a);
        bf16 *q = on.scratch<bf16>(q_bytes / 2), *k = on.scratch<bf16>(k_bytes / 2);
        for (int64_t at = 0; at < q_bytes; at += all)
          CUDA_CHECK(cudaMemcpy(reinterpret_cast<char*>(q) + at, numbers.data(), size_t(std::min(all, q_bytes - at)),
                                cudaMemcpyDefault));
        CUDA_CHECK(cudaMemcpy(k, numbers.data(), size_t(k_bytes), cudaMemcpyDefault));
        std::vector<float> rows(H * T);
        for (int64_t i = 0; i < H * T; ++i)
          rows[i] = seen(a, i % T) ? float(std::log(double(seen(a, i % T))) + 0.5) : -INFINITY;
        float *lse = on.up(rows), *scratch = on.scratch<float>(scratch_floats);
        int32_t* indices = on.scratch<int32_t>(HKV * T * a.selected);
        const auto run = [&](int times) {
          for (int i = 0; i < times; ++i) gpu::nsa_topk<bf16>(s.cuda(), arch, indices, q, k, lse, scratch, a);
        };
        const int times = T > 40000 ? 5 : 20;
        Event begin(dev, Event::timed), end(dev, Event::timed);
        run(3);
        s.record(begin), run(times), s.record(end);
        const double ms = elapsed_ms(begin, end) / times;
        double flops = 0;
        for (int64_t t = 0; t < T; ++t) flops += 2.0 * double(seen(a, t)) * double(H * a.D);
        std::printf("nsa_topk sm_%d T %lld heads %lld/%lld D %lld: %.4f ms, %.0f TFLOP/s, scratch %.0f MB\n", arch,
                    (long long)T, (long long)H, (long long)HKV, (long long)D, ms, flops / ms * 1e-9,
                    double(scratch_floats) * 4e-6);
        std::fflush(stdout);
      }
#endif
}
