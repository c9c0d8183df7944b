// Native Sparse Attention: the CPU twins (cpu/nsa.h) and the whole (nsa_attention.cu) against a plain NSA in double,
// written here from the paper's equations, and against central differences; then what must hold of any NSA: which
// blocks are selected, that nobody sees the future, which cases are dense attention. GPU cases have the tag [gpu]:
// every stage against its double twin, with the bf16 twin's own error as the measure, and the whole. Those with [small]
// are for compute-sanitizer.
#include "test/arrays.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <set>

#include "attention/stages.h"
#include "cpu/nsa.h"
#include "lib/ops/philox.h"
#include "test/worst.h"

using Doubles = std::vector<double>;
using Indices = std::vector<int32_t>;

namespace {

// ------------------------------------------------------------------------------------------------- shapes and arrays

NsaShape shape(int64_t B, int64_t T, int64_t H, int64_t HKV, int64_t D, Phi phi = Phi::mean) {
  NsaShape a = {B, T, H, HKV, D, 0, 1 / std::sqrt(double(D))};
  a.phi = phi;
  a.ld = (a.columns() + 7) / 8 * 8 + 8;
  return a;
}
NsaShape with_values(NsaShape a, int64_t DV) {  // of another head dim than keys
  a.DV = DV, a.ld = (a.columns() + 7) / 8 * 8 + 8;
  return a;
}
NsaShape with(NsaShape a, int64_t block, int64_t stride, int64_t select_block, int64_t selected, int64_t window) {
  a.block = block, a.stride = stride, a.select_block = select_block, a.selected = selected, a.window = window;
  return a;
}
std::string text(const NsaShape& a) {
  const auto ll = [](int64_t n) { return static_cast<long long>(n); };
  return strf("B %lld T %lld H %lld HKV %lld D %lld DV %lld, l %lld d %lld l' %lld n %lld w %lld, phi %d", ll(a.B),
              ll(a.T), ll(a.H), ll(a.HKV), ll(a.D), ll(a.v_dim()), ll(a.block), ll(a.stride), ll(a.select_block),
              ll(a.selected), ll(a.window), int(a.phi));
}

// Normal numbers rounded to bf16, so that every type computes the same function.
double normal(uint64_t seed, uint32_t tensor, int64_t i) {
  return double(float(bf16(philox_normals(seed, tensor, uint64_t(i / 4)).x[i % 4])));
}
Doubles normals(int64_t n, uint64_t seed, uint32_t tensor, double factor = 1) {
  Doubles v(n);
  for (int64_t i = 0; i < n; ++i) v[i] = double(float(bf16(float(factor * normal(seed, tensor, i)))));
  return v;
}
template <class To, class From>
std::vector<To> converted(const std::vector<From>& v) {
  std::vector<To> to(v.size());
  for (size_t i = 0; i < v.size(); ++i) to[i] = To(acc_t<From>(v[i]));
  return to;
}
template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}
template <class T>
bool all_finite(const std::vector<T>& v) {
  for (const T& x : v)
    if (!std::isfinite(double(acc_t<T>(x)))) return false;
  return true;
}
template <class T>
bool all_zero(const std::vector<T>& v) {
  for (const T& x : v)
    if (acc_t<T>(x) != 0) return false;
  return true;
}
// What nobody writes stays a NaN.
template <class T>
std::vector<T> nans(int64_t n) {
  std::vector<T> v(n);
  if (n > 0) std::memset(static_cast<void*>(v.data()), 0xff, v.size() * sizeof(T));
  return v;
}

template <class T>
struct Phis {  // of keys and of values, in PhiWeights' order
  std::vector<T> position[2], w1[2], w2[2];
};
int64_t dim_of(const NsaShape& a, int which) { return which ? a.v_dim() : a.D; }  // of keys, of values
template <class T>
Phis<T> phis_like(const NsaShape& a) {
  Phis<T> p;
  for (int i = 0; i < 2 && a.phi != Phi::mean; ++i) {
    const int64_t D = dim_of(a, i), in = a.block * D, F = 2 * D;
    p.position[i] = nans<T>(a.HKV * in);
    p.w1[i] = nans<T>(a.HKV * (a.phi == Phi::mlp ? F : D) * in);
    if (a.phi == Phi::mlp) p.w2[i] = nans<T>(a.HKV * D * F);
  }
  return p;
}
template <class T, class F>
void for_each(Phis<T>& p, F f) {
  for (int i : {0, 1}) f(p.position[i]), f(p.w1[i]), f(p.w2[i]);
}

// A step's inputs. Rows of x are filled column by column of columns(); the padding is NaN and nobody may read it.
struct Inputs {
  NsaShape a;
  Doubles x, d_o;
  Phis<double> phi;
  explicit Inputs(const NsaShape& a, uint64_t seed = 1)
      : a(a),
        x(nans<double>(a.B * a.T * a.ld)),
        d_o(normals(a.B * a.T * a.H * a.v_dim(), seed, 2)),
        phi(phis_like<double>(a)) {
    for (int64_t r = 0; r < a.B * a.T; ++r)
      for (int64_t c = 0; c < a.columns(); ++c) x[r * a.ld + c] = normal(seed, 1, r * a.columns() + c);
    uint32_t tensor = 10;
    for (int i : {0, 1}) {
      const int64_t D = dim_of(a, i), in = a.block * D;
      phi.position[i] = normals(int64_t(phi.position[i].size()), seed, tensor++, 0.5);
      phi.w1[i] = normals(int64_t(phi.w1[i].size()), seed, tensor++, 2 / std::sqrt(double(in)));
      phi.w2[i] = normals(int64_t(phi.w2[i].size()), seed, tensor++, 2 / std::sqrt(double(2 * D)));
    }
  }
  double& at(int64_t b, int64_t t, int64_t c) { return x[(b * a.T + t) * a.ld + c]; }
  void set_gates(double compressed, double selected, double window) {
    for (int64_t r = 0; r < a.B * a.T; ++r)
      for (int64_t h = 0; h < a.H; ++h) {
        x[r * a.ld + a.gate(0) + h] = compressed;
        x[r * a.ld + a.gate(1) + h] = selected;
        x[r * a.ld + a.gate(2) + h] = window;
      }
  }
};

// ------------------------------------------------------------------------------------- the plain NSA, from the paper

// Attention of one query over a list of keys; the same for all branches.
struct Key {
  const double *k, *v;
  double *dk, *dv;
};
double dot(const double* x, const double* y, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}
Doubles softmax(const double* q, const std::vector<Key>& keys, int64_t D, double scale, double* lse) {
  Doubles p;
  double top = -INFINITY, sum = 0;
  for (const Key& key : keys) p.push_back(scale * dot(q, key.k, D)), top = std::max(top, p.back());
  for (double& s : p) sum += s = std::exp(s - top);
  for (double& s : p) s /= sum;
  *lse = keys.empty() ? -INFINITY : top + std::log(sum);
  return p;
}

struct Reference {
  Doubles o, dx;  // dx: rows of ld, with zeros behind columns()
  Doubles branch[3], lse[3], k, v;
  Phis<double> dphi;
  Indices indices;
};

double gelu_of(double h) { return 0.5 * h * (1 + std::tanh(std::sqrt(2 / M_PI) * (h + 0.044715 * h * h * h))); }
double gelu_slope(double h) {
  const double t = std::tanh(std::sqrt(2 / M_PI) * (h + 0.044715 * h * h * h));
  return 0.5 * (1 + t) + 0.5 * h * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * h * h);
}

// Eq. 7 for one block: `in` is block x D numbers. Its gradients too if `dout` is given.
void phi_of(const NsaShape& a, const Phis<double>& phi, int which, int64_t head, const Doubles& in, double* out,
            const double* dout = nullptr, Doubles* din = nullptr, Phis<double>* dphi = nullptr) {
  const int64_t D = dim_of(a, which), n = a.block * D;
  if (a.phi == Phi::mean) {
    for (int64_t i = 0; i < n; ++i) {
      if (!dout) out[i % D] += in[i] / double(a.block);
      else (*din)[i] = dout[i % D] / double(a.block);
    }
    return;
  }
  Doubles z(n);
  for (int64_t i = 0; i < n; ++i) z[i] = in[i] + phi.position[which][head * n + i];
  const int64_t F = a.phi == Phi::mlp ? 2 * D : D;
  const double *w1 = &phi.w1[which][head * F * n], *w2 = a.phi == Phi::mlp ? &phi.w2[which][head * D * F] : nullptr;
  Doubles h(F), g(F), dh(F);
  for (int64_t f = 0; f < F; ++f) h[f] = dot(w1 + f * n, z.data(), n), g[f] = w2 ? gelu_of(h[f]) : h[f];
  if (!dout) {
    for (int64_t d = 0; d < D; ++d) out[d] = w2 ? dot(w2 + d * F, g.data(), F) : g[d];
    return;
  }
  for (int64_t f = 0; f < F; ++f) {
    if (!w2) dh[f] = dout[f];
    for (int64_t d = 0; w2 && d < D; ++d) {
      dh[f] += dout[d] * w2[d * F + f];
      dphi->w2[which][(head * D + d) * F + f] += dout[d] * g[f];
    }
    if (w2) dh[f] *= gelu_slope(h[f]);
  }
  for (int64_t i = 0; i < n; ++i) {
    (*din)[i] = 0;
    for (int64_t f = 0; f < F; ++f) {
      (*din)[i] += dh[f] * w1[f * n + i];
      dphi->w1[which][(head * F + f) * n + i] += dh[f] * z[i];
    }
    dphi->position[which][head * n + i] += (*din)[i];
  }
}

// Eq. 9: tokens that compressed key i and selection block j share, over d.
double overlap(const NsaShape& a, int64_t i, int64_t j) {
  int64_t tokens = 0;
  for (int64_t t = a.stride * i; t < a.stride * i + a.block; ++t) tokens += t / a.select_block == j;
  return double(tokens) / double(a.stride);
}

// Eq. 8 to 10: (B,HKV,T,select_blocks()); blocks after the query's own have no score.
Doubles scores(const NsaShape& a, const Doubles& x, const Doubles& k) {
  const int64_t keys = a.compressed(), group = a.H / a.HKV, blocks = a.select_blocks(), D = a.D;
  Doubles weights(keys * blocks), all(a.B * a.HKV * a.T * blocks);
  for (int64_t i = 0; i < keys; ++i)
    for (int64_t j = 0; j < blocks; ++j) weights[i * blocks + j] = overlap(a, i, j);
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t head = 0; head < a.HKV; ++head)
      for (int64_t t = 0; t < a.T; ++t)
        for (int64_t h = head * group; h < (head + 1) * group; ++h) {
          std::vector<Key> seen;
          for (int64_t i = 0; i < keys && a.stride * i + a.block - 1 <= t; ++i)
            seen.push_back({&k[((b * keys + i) * a.HKV + head) * D], nullptr, nullptr, nullptr});
          double lse;
          const Doubles p = softmax(&x[(b * a.T + t) * a.ld + h * D], seen, D, a.scale, &lse);
          double* s = &all[((b * a.HKV + head) * a.T + t) * blocks];
          for (size_t i = 0; i < p.size(); ++i)
            for (int64_t j = a.stride * int64_t(i) / a.select_block;
                 j < blocks && j * a.select_block < a.stride * int64_t(i) + a.block; ++j)
              s[j] += p[i] * weights[i * blocks + j];
        }
  return all;
}

// Eq. 11 and the forced blocks.
Indices best_blocks(const NsaShape& a, const Doubles& score) {
  const int64_t blocks = a.select_blocks(), n = a.selected;
  Indices all(a.B * a.HKV * a.T * n, -1);
  for (int64_t row = 0; row < a.B * a.HKV * a.T; ++row) {
    const int64_t own = row % a.T / a.select_block;
    std::set<int64_t> chosen = {0, std::max<int64_t>(own - 1, 0), own};
    while (int64_t(chosen.size()) < std::min(n, own + 1)) {
      int64_t best = -1;
      for (int64_t j = 0; j <= own; ++j)
        if (!chosen.count(j) && (best < 0 || score[row * blocks + j] > score[row * blocks + best])) best = j;
      chosen.insert(best);
    }
    std::copy(chosen.begin(), chosen.end(), all.begin() + row * n);
  }
  return all;
}

Reference reference(const Inputs& in, const Indices* frozen = nullptr) {
  const NsaShape& a = in.a;
  const int64_t D = a.D, DV = a.v_dim(), keys = a.compressed(), group = a.H / a.HKV, C = a.H * DV, rows = a.B * a.T;
  Reference r;
  r.o.assign(rows * C, 0), r.dx.assign(rows * a.ld, 0);
  for (Doubles& o : r.branch) o.assign(rows * C, 0);
  for (Doubles& l : r.lse) l.assign(rows * a.H, 0);
  r.dphi = phis_like<double>(a);
  for_each(r.dphi, [](Doubles& v) { std::fill(v.begin(), v.end(), 0.0); });
  r.k.assign(a.B * keys * a.HKV * D, 0), r.v.assign(a.B * keys * a.HKV * DV, 0);
  Doubles dk(r.k.size()), dv(r.v.size());
  const auto block_of = [&](int64_t b, int64_t i, int64_t column, int64_t width) {
    Doubles z;
    for (int64_t t = a.stride * i; t < a.stride * i + a.block; ++t) {
      const double* row = &in.x[(b * a.T + t) * a.ld + column];
      z.insert(z.end(), row, row + width);
    }
    return z;
  };
  const auto each_block = [&](auto f) {
    for (int64_t b = 0; b < a.B; ++b)
      for (int64_t head = 0; head < a.HKV; ++head)
        for (int64_t i = 0; i < keys; ++i) f(b, head, i, (b * keys + i) * a.HKV + head);
  };
  each_block([&](int64_t b, int64_t head, int64_t i, int64_t at) {
    phi_of(a, in.phi, 0, head, block_of(b, i, a.k(0) + head * D, D), &r.k[at * D]);
    phi_of(a, in.phi, 1, head, block_of(b, i, a.v(0) + head * DV, DV), &r.v[at * DV]);
  });
  r.indices = frozen ? *frozen : best_blocks(a, scores(a, in.x, r.k));

  std::vector<Key> list;
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t h = 0; h < a.H; ++h)
      for (int64_t t = 0; t < a.T; ++t) {
        const int64_t head = h / group, row = b * a.T + t;
        const double* q = &in.x[row * a.ld + h * D];
        const double* d_o = &in.d_o[row * C + h * DV];
        for (int branch = 0; branch < 3; ++branch) {
          list.clear();
          const auto add = [&](int64_t j) {
            const int64_t k = (b * a.T + j) * a.ld + a.k(branch) + head * D;
            const int64_t v = (b * a.T + j) * a.ld + a.v(branch) + head * DV;
            list.push_back({&in.x[k], &in.x[v], &r.dx[k], &r.dx[v]});
          };
          if (branch == 0)
            for (int64_t i = 0; i < keys && a.stride * i + a.block - 1 <= t; ++i) {
              const int64_t at = (b * keys + i) * a.HKV + head;
              list.push_back({&r.k[at * D], &r.v[at * DV], &dk[at * D], &dv[at * DV]});
            }
          if (branch == 1)
            for (int64_t s = 0; s < a.selected; ++s) {
              const int64_t block = r.indices[((b * a.HKV + head) * a.T + t) * a.selected + s];
              if (block < 0) break;
              for (int64_t j = block * a.select_block; j <= std::min(t, (block + 1) * a.select_block - 1); ++j) add(j);
            }
          if (branch == 2)
            for (int64_t j = std::max<int64_t>(0, t - a.window + 1); j <= t; ++j) add(j);
          const Doubles p = softmax(q, list, D, a.scale, &r.lse[branch][(b * a.H + h) * a.T + t]);
          double* o = &r.branch[branch][row * C + h * DV];
          for (size_t j = 0; j < p.size(); ++j)
            for (int64_t d = 0; d < DV; ++d) o[d] += p[j] * list[j].v[d];
          // Eq. 5 and its derivative.
          const double g = 1 / (1 + std::exp(-in.x[row * a.ld + a.gate(branch) + h])), delta = dot(d_o, o, DV);
          for (int64_t d = 0; d < DV; ++d) r.o[row * C + h * DV + d] += g * o[d];
          r.dx[row * a.ld + a.gate(branch) + h] = g * (1 - g) * delta;
          for (size_t j = 0; j < p.size(); ++j) {
            const double ds = p[j] * g * (dot(d_o, list[j].v, DV) - delta) * a.scale;
            for (int64_t d = 0; d < D; ++d) {
              r.dx[row * a.ld + h * D + d] += ds * list[j].k[d];
              list[j].dk[d] += ds * q[d];
            }
            for (int64_t d = 0; d < DV; ++d) list[j].dv[d] += p[j] * g * d_o[d];
          }
        }
      }
  each_block([&](int64_t b, int64_t head, int64_t i, int64_t at) {
    for (int which : {0, 1}) {
      const int64_t width = dim_of(a, which), column = (which ? a.v(0) : a.k(0)) + head * width;
      Doubles din(a.block * width);
      const double* dout = which ? &dv[at * DV] : &dk[at * D];
      phi_of(a, in.phi, which, head, block_of(b, i, column, width), nullptr, dout, &din, &r.dphi);
      for (int64_t n = 0; n < a.block * width; ++n)
        r.dx[(b * a.T + a.stride * i + n / width) * a.ld + column + n % width] += din[n];
    }
  });
  return r;
}

// --------------------------------------------------------------------------------------------------- the real thing

// Forward and backward on a device of its own: planned, then run in memory that is full of NaN.
template <class T, class G = T>
struct Step {
  using A = acc_t<T>;
  NsaShape a;
  std::vector<T> x, d_o, o, dx, branch[3], k, v;
  std::vector<A> lse[3];
  Phis<T> phi;
  Phis<G> dphi;
  Indices indices;
  NsaKernels kernels;  // of the latest program

  explicit Step(const Inputs& in, Backend backend = Backend::cpu)
      : a(in.a), x(converted<T>(in.x)), d_o(converted<T>(in.d_o)), dev_(std::make_unique<Device>(backend, 0)) {
    const int64_t rows = a.B * a.T, C = a.H * a.v_dim(), keys = a.B * a.compressed() * a.HKV;
    o = nans<T>(rows * C), dx = nans<T>(rows * a.ld), k = nans<T>(keys * a.D), v = nans<T>(keys * a.v_dim());
    for (auto& b : branch) b = nans<T>(rows * C);
    for (auto& l : lse) l = nans<A>(rows * a.H);
    indices = nans<int32_t>(a.B * a.HKV * a.T * a.selected);
    for (int i : {0, 1}) {
      phi.position[i] = converted<T>(in.phi.position[i]);
      phi.w1[i] = converted<T>(in.phi.w1[i]);
      phi.w2[i] = converted<T>(in.phi.w2[i]);
    }
    dphi = phis_like<G>(a);
    dev_->mode = Mode::plan;
    keep(), forward(), step();
    dev_->mem.commit();
    dev_->mem.rewind();
    dev_->mode = Mode::run;
    keep();
  }
  Step& forward() { return program("forward", false); }
  Step& step() { return program("step", true); }

 private:
  std::unique_ptr<Device> dev_;
  T *x_, *d_o_, *o_, *dx_;
  PhiWeights<T> phi_;
  PhiWeights<G> dphi_;

  void keep() {
    const auto of = [&](auto& v, const char* name) {
      using E = std::remove_reference_t<decltype(v[0])>;
      return dev_->mem.keep<E>(int64_t(v.size()), name, Purpose::workspace);
    };
    x_ = of(x, "x"), d_o_ = of(d_o, "do"), o_ = of(o, "o"), dx_ = of(dx, "dx");
    phi_ = {of(phi.position[0], "position k"), of(phi.w1[0], "w1 k"), of(phi.w2[0], "w2 k"),
            of(phi.position[1], "position v"), of(phi.w1[1], "w1 v"), of(phi.w2[1], "w2 v")};
    dphi_ = {of(dphi.position[0], "dposition k"), of(dphi.w1[0], "dw1 k"), of(dphi.w2[0], "dw2 k"),
             of(dphi.position[1], "dposition v"), of(dphi.w1[1], "dw1 v"), of(dphi.w2[1], "dw2 v")};
  }
  Step& program(const char* name, bool backward) {
    Stream& s = dev_->compute();
    const auto up = [&](auto* to, const auto& v) { s.copy(to, v.data(), int64_t(v.size() * sizeof(v[0]))); };
    const auto down = [&](auto& v, const auto* from) { s.copy(v.data(), from, int64_t(v.size() * sizeof(v[0]))); };
    const auto all = [&](auto&& f) {
      f(phi.position[0], phi_.position_k), f(phi.w1[0], phi_.w1_k), f(phi.w2[0], phi_.w2_k);
      f(phi.position[1], phi_.position_v), f(phi.w1[1], phi_.w1_v), f(phi.w2[1], phi_.w2_v);
    };
    if (dev_->mode == Mode::run) {
      s.synchronize();
      dev_->mem.poison();
    }
    const std::vector<T> blank_o = nans<T>(int64_t(o.size())), blank_dx = nans<T>(int64_t(dx.size()));
    Phis<G> blank = phis_like<G>(a);
    up(x_, x), up(d_o_, d_o), up(o_, blank_o), up(dx_, blank_dx);
    all([&](auto& v, T* p) { up(p, v); });
    up(dphi_.position_k, blank.position[0]), up(dphi_.w1_k, blank.w1[0]), up(dphi_.w2_k, blank.w2[0]);
    up(dphi_.position_v, blank.position[1]), up(dphi_.w1_v, blank.w1[1]), up(dphi_.w2_v, blank.w2[1]);
    dev_->mem.begin(name);
    kernels = {};
    {
      const PhiWeights<const T> phi = {phi_.position_k, phi_.w1_k, phi_.w2_k, phi_.position_v, phi_.w1_v, phi_.w2_v};
      NsaSaved<T> saved;
      nsa_forward<T>(*dev_, o_, backward ? &saved : nullptr, x_, phi, a, Purpose::activations, &kernels);
      if (backward) {
        down(k, saved.k.get()), down(v, saved.v.get()), down(indices, saved.indices.get());
        down(branch[0], saved.o_compressed.get()), down(lse[0], saved.lse_compressed.get());
        down(branch[1], saved.o_selected.get()), down(lse[1], saved.lse_selected.get());
        down(branch[2], saved.o_window.get()), down(lse[2], saved.lse_window.get());
        nsa_backward<T, G>(*dev_, dx_, dphi_, d_o_, x_, phi, std::move(saved), a, &kernels);
      }
    }
    dev_->mem.end();
    down(o, o_), down(dx, dx_);
    down(dphi.position[0], dphi_.position_k), down(dphi.w1[0], dphi_.w1_k), down(dphi.w2[0], dphi_.w2_k);
    down(dphi.position[1], dphi_.position_v), down(dphi.w1[1], dphi_.w1_v), down(dphi.w2[1], dphi_.w2_v);
    s.synchronize();
    return *this;
  }
};
template <class T>
bool same_results(const Step<T>& x, const Step<T>& y) {
  bool same = same_bits(x.o, y.o) && same_bits(x.dx, y.dx) && same_bits(x.indices, y.indices) && same_bits(x.k, y.k) &&
              same_bits(x.v, y.v);
  for (int i = 0; i < 3; ++i) same = same && same_bits(x.branch[i], y.branch[i]) && same_bits(x.lse[i], y.lse[i]);
  for (int i : {0, 1})
    same = same && same_bits(x.dphi.position[i], y.dphi.position[i]) && same_bits(x.dphi.w1[i], y.dphi.w1[i]) &&
           same_bits(x.dphi.w2[i], y.dphi.w2[i]);
  return same;
}

// Columns of the rows of dx (or x) by name.
struct Part {
  const char* name;
  int64_t from, to;
};
std::vector<Part> parts(const NsaShape& a) {
  const int64_t k = a.HKV * a.D, v = a.HKV * a.v_dim();
  return {{"q", 0, a.H * a.D},
          {"compressed k", a.k(0), a.k(0) + k},
          {"selected k", a.k(1), a.k(1) + k},
          {"window k", a.k(2), a.k(2) + k},
          {"compressed v", a.v(0), a.v(0) + v},
          {"selected v", a.v(1), a.v(1) + v},
          {"window v", a.v(2), a.v(2) + v},
          {"compressed gate", a.gate(0), a.gate(0) + a.H},
          {"selected gate", a.gate(1), a.gate(1) + a.H},
          {"window gate", a.gate(2), a.gate(2) + a.H},
          {"padding", a.columns(), a.ld}};
}
template <class T>
std::vector<T> columns(const std::vector<T>& rows, int64_t ld, int64_t from, int64_t to) {
  std::vector<T> out;
  for (size_t r = 0; r < rows.size(); r += size_t(ld)) out.insert(out.end(), &rows[r] + from, &rows[r] + to);
  return out;
}

// The norm of the difference over the norm of the reference; where that is nearly nothing, over `floor` a number: the
// gradient of a key that is seen alone is zero, and rounding what remains of numbers around 1. A NaN stays one. -inf
// may stand against -inf alone.
constexpr double least = 0.05;
template <class T>
double error(const std::vector<T>& x, const Doubles& ref, double floor = least) {
  REQUIRE(x.size() == ref.size());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < ref.size(); ++i) {
    const double got = double(acc_t<T>(x[i]));
    if (std::isinf(ref[i]) && got == ref[i]) continue;
    difference += (got - ref[i]) * (got - ref[i]), norm += ref[i] * ref[i];
  }
  return ref.empty() ? 0 : std::sqrt(difference / std::max(norm, floor * floor * double(ref.size())));
}

double rms(const Doubles& v) {
  return v.empty() ? 0 : std::sqrt(dot(v.data(), v.data(), int64_t(v.size())) / v.size());
}
// A linear phi adds the same vector to every compressed key for its positions. Softmax does not see that: the keys'
// positions have no gradient but rounding, which is measured by that of the values' positions.
double position_floor(const NsaShape& a, const Phis<double>& dphi) {
  return a.phi == Phi::linear ? std::max(least, rms(dphi.position[1])) : least;
}

using Errors = std::map<std::string, double>;
template <class T, class G>
Errors errors(const Step<T, G>& x, const Reference& ref) {
  Errors e;
  const char* names[3] = {"compressed", "selected", "window"};
  e["o"] = error(x.o, ref.o);
  e["compressed keys"] = error(x.k, ref.k), e["compressed values"] = error(x.v, ref.v);
  for (int i = 0; i < 3; ++i) {
    e[names[i] + std::string(" o")] = error(x.branch[i], ref.branch[i]);
    e[names[i] + std::string(" lse")] = error(x.lse[i], ref.lse[i]);
  }
  for (const Part& p : parts(x.a))
    e[p.name + std::string(" gradient")] =
        error(columns(x.dx, x.a.ld, p.from, p.to), columns(ref.dx, x.a.ld, p.from, p.to));
  for (int i : {0, 1}) {
    const std::string of = i ? " of v" : " of k";
    e["position" + of] = error(x.dphi.position[i], ref.dphi.position[i], position_floor(x.a, ref.dphi));
    e["w1" + of] = error(x.dphi.w1[i], ref.dphi.w1[i]);
    e["w2" + of] = error(x.dphi.w2[i], ref.dphi.w2[i]);
  }
  return e;
}
void check_below(const Errors& errors, double limit) {
  for (const auto& [name, e] : errors) {
    INFO(name);
    CHECK(e <= limit);
  }
}

// The first n of the (B,HKV,T) lists of `a` that are not as eq. 11 says, whatever the scores.
int64_t malformed_lists(const NsaShape& a, const Indices& indices) {
  int64_t bad = 0;
  for (int64_t row = 0; row < a.B * a.HKV * a.T; ++row) {
    const int32_t* list = &indices[row * a.selected];
    const int64_t own = row % a.T / a.select_block, count = std::min(a.selected, own + 1);
    const std::set<int64_t> set(list, list + count);
    bool good = int64_t(set.size()) == count && std::is_sorted(list, list + count);
    for (int64_t forced : {int64_t(0), std::max<int64_t>(0, own - 1), own}) good = good && set.count(forced);
    good = good && *set.begin() >= 0 && *set.rbegin() <= own;
    for (int64_t s = count; s < a.selected; ++s) good = good && list[s] == -1;
    bad += !good;
  }
  return bad;
}

// What f() throws as E, or "".
template <class E, class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const E& e) { return e.what(); }
  return "";
}
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// ------------------------------------------------------------------------------------------------ stages by themselves

Stream& stream_of(Backend b) { return test_device(b).compute(); }

template <class T>
Indices select(const NsaShape& a, const Doubles& x, const Doubles& k, const Doubles& lse, Backend backend) {
  Stream& s = stream_of(backend);
  Arrays on(s);
  std::vector<T> q = converted<T>(x), keys = converted<T>(k);
  std::vector<acc_t<T>> l(lse.begin(), lse.end());
  Indices indices = nans<int32_t>(a.B * a.HKV * a.T * a.selected);
  int32_t* out = on.up(indices);
  nsa_topk<T>(s, out, on.up(q), on.up(keys), on.up(l), on.scratch<acc_t<T>>(nsa_topk_scratch<T>(a)), a);
  on.down();
  return indices;
}

// The selected branch with given lists: o, lse and the gradients, dq on top of what is there and of dq_compressed.
template <class T>
struct Selected {
  NsaShape a;
  std::vector<T> x, d_o, o, dx, dq_compressed;
  std::vector<acc_t<T>> lse;
  Indices indices;
  bool gated = true;
  Selected(const Inputs& in, Indices lists)
      : a(in.a),
        x(converted<T>(in.x)),
        d_o(converted<T>(in.d_o)),
        o(nans<T>(int64_t(d_o.size()))),
        dx(nans<T>(int64_t(x.size()))),
        dq_compressed(converted<T>(normals(a.B * a.T * a.H * a.D, 7, 8))),
        lse(nans<acc_t<T>>(a.B * a.H * a.T)),
        indices(std::move(lists)) {
    for (int64_t r = 0; r < a.B * a.T; ++r)
      for (int64_t c = 0; c < a.H * a.D; ++c) dx[r * a.ld + c] = T(float(normal(9, 9, r * a.H * a.D + c)));
  }
  Selected& alone() {  // no gate, and dq from nothing
    gated = false;
    for (int64_t r = 0; r < a.B * a.T; ++r) std::fill_n(&dx[r * a.ld], a.H * a.D, T(0));
    dq_compressed.clear();
    return *this;
  }
  Selected& run(Backend backend = Backend::cpu) {
    Stream& s = stream_of(backend);
    Arrays on(s);
    const bool add = !dq_compressed.empty();
    T *px = on.up(x), *pd = on.up(d_o), *po = on.up(o), *pdx = on.up(dx), *pc = add ? on.up(dq_compressed) : nullptr;
    acc_t<T>* pl = on.up(lse);
    const int32_t* pi = on.up(indices);
    nsa_selected_forward<T>(s, po, pl, px, px + a.k(1), px + a.v(1), pi,
                            on.scratch<char>(nsa_selected_forward_scratch<T>(a)), a);
    const Gate<T> gate = {px + a.gate(1), pdx + a.gate(1), a.ld};
    nsa_selected_backward<T>(s, pdx, pdx + a.k(1), pdx + a.v(1), pc, pd, px, px + a.k(1), px + a.v(1), po, pl, pi,
                             on.scratch<char>(nsa_selected_backward_scratch<T>(a)), a, gated ? gate : Gate<T>{});
    s.synchronize();
    on.down();
    return *this;
  }
  std::vector<T> dq() const { return columns(dx, a.ld, 0, a.H * a.D); }
  std::vector<T> dk() const { return columns(dx, a.ld, a.k(1), a.k(1) + a.HKV * a.D); }
  std::vector<T> dv() const { return columns(dx, a.ld, a.v(1), a.v(1) + a.HKV * a.v_dim()); }
};
template <class T>
bool same_results(const Selected<T>& x, const Selected<T>& y) {
  return same_bits(x.o, y.o) && same_bits(x.lse, y.lse) && same_bits(x.dx, y.dx);
}
template <class T>
Errors errors(const Selected<T>& x, const Selected<double>& ref) {
  const NsaShape& a = x.a;
  return {{"o", error(x.o, ref.o)},
          {"lse", error(x.lse, ref.lse)},
          {"dq", error(x.dq(), ref.dq())},
          {"dk", error(x.dk(), ref.dk())},
          {"dv", error(x.dv(), ref.dv())},
          {"dgate",
           error(columns(x.dx, a.ld, a.gate(1), a.gate(1) + a.H), columns(ref.dx, a.ld, a.gate(1), a.gate(1) + a.H))}};
}

// Attention by attention_forward and backward of columns of x's rows, in Selected's layout: branch's keys.
template <class T>
Selected<T> attend(const Inputs& in, int branch, AttentionShape s, Backend backend = Backend::cpu) {
  const NsaShape& a = in.a;
  Selected<T> r(in, {0});
  r.alone();
  s.B = a.B, s.T = a.T, s.H = a.H, s.HKV = a.HKV, s.D = a.D, s.scale = a.scale;
  s.DV = a.DV, s.ld_q = s.ld_kv = s.ld_dq = s.ld_dkv = a.ld, s.ld_o = a.H * a.v_dim();
  Stream& stream = stream_of(backend);
  Arrays on(stream);
  T *x = on.up(r.x), *d_o = on.up(r.d_o), *o = on.up(r.o), *dx = on.up(r.dx);
  acc_t<T>* lse = on.up(r.lse);
  attention_forward<T>(stream, o, lse, x, x + a.k(branch), x + a.v(branch), s);
  attention_backward<T>(stream, dx, dx + a.k(1), dx + a.v(1), d_o, x, x + a.k(branch), x + a.v(branch), o, lse,
                        on.scratch<acc_t<T>>(attention_backward_workspace<T>(s)), s);
  stream.synchronize();
  on.down();
  return r;
}
Selected<double> dense(const Inputs& in, int branch) { return attend<double>(in, branch, AttentionShape{}); }

// Lists that a test makes up: blocks(b, head, t) in any order; the rest is -1.
Indices lists_of(const NsaShape& a, const std::function<std::set<int32_t>(int64_t, int64_t, int64_t)>& blocks) {
  Indices all(a.B * a.HKV * a.T * a.selected, -1);
  for (int64_t row = 0; row < a.B * a.HKV * a.T; ++row) {
    const std::set<int32_t> list = blocks(row / a.T / a.HKV, row / a.T % a.HKV, row % a.T);
    REQUIRE(int64_t(list.size()) <= a.selected);
    std::copy(list.begin(), list.end(), all.begin() + row * a.selected);
  }
  return all;
}
// Random ones, as eq. 11 makes them.
Indices random_lists(const NsaShape& a, uint64_t seed = 3) {
  return best_blocks(a, normals(a.B * a.HKV * a.T * a.select_blocks(), seed, 30));
}

}  // namespace

// ------------------------------------------------------------------------------------------------ against the paper

namespace {
// Small sizes with every relation of l, d, l', n and w, and sequences that end anywhere.
const std::vector<NsaShape>& small_shapes() {
  static const std::vector<NsaShape> list = [] {
    std::vector<NsaShape> v;
    for (Phi phi : {Phi::mean, Phi::linear, Phi::mlp}) {
      v.push_back(with(shape(2, 37, 4, 2, 3, phi), 4, 2, 4, 4, 7));
      v.push_back(with(shape(1, 61, 3, 1, 5, phi), 6, 2, 10, 3, 33));
      v.push_back(with(shape(1, 50, 2, 2, 4, phi), 8, 8, 16, 4, 1));
      v.push_back(with(shape(1, 90, 4, 2, 2, phi), 12, 4, 12, 5, 100));
      v.push_back(with(shape(1, 75, 3, 1, 3, phi), 1, 1, 1, 6, 5));
      v.push_back(with(shape(2, 70, 2, 1, 4, phi), 16, 2, 18, 3, 64));
      v.push_back(with(with_values(shape(2, 41, 4, 2, 5, phi), 3), 4, 2, 4, 4, 7));
      v.push_back(with(with_values(shape(1, 60, 2, 1, 2, phi), 6), 8, 4, 8, 3, 20));
    }
    return v;
  }();
  return list;
}
}  // namespace

TEST_CASE("NSA is the paper's equations: outputs and every gradient", "[nsa]") {
  std::vector<NsaShape> list = small_shapes();
  for (int64_t T : {1, 15, 31, 32, 33, 63, 64, 65, 127, 1000}) {  // l 32, d 16, l' 64, w 512
    list.push_back(shape(2, T, 2, 1, 8, T % 2 ? Phi::linear : Phi::mlp));
    list.push_back(shape(1, T, 2, 1, T < 1000 ? 64 : 16));
    list.back().selected = 4;
  }
  for (int64_t group : {1, 2, 4, 6, 8, 16}) {
    list.push_back(with(shape(1, 300, group, 1, 64), 32, 16, 64, 3, 100));
    list.push_back(with(shape(1, 97, 2 * group, 2, 128, group % 4 ? Phi::mlp : Phi::linear), 8, 4, 8, 5, 20));
  }
  for (const NsaShape& a : list) {
    INFO(text(a));
    const Inputs in(a);
    const Reference ref = reference(in);
    Step<double> x(in);
    x.step();
    CHECK(x.indices == ref.indices);
    check_below(errors(x, ref), 1e-12);
    const std::vector<double> o = x.o;
    CHECK(same_bits(x.forward().o, o));  // nothing kept: the same
  }
}

TEST_CASE("NSA with the paper's parameters at 2049 tokens", "[nsa]") {
  const Inputs in(shape(1, 2049, 1, 1, 16));
  const Reference ref = reference(in);
  Step<double> x(in);
  x.step();
  CHECK(x.indices == ref.indices);
  check_below(errors(x, ref), 1e-12);
}

TEST_CASE("NSA's gradients are central differences", "[nsa]") {
  std::vector<NsaShape> shapes;
  for (Phi phi : {Phi::mean, Phi::linear, Phi::mlp})
    for (int64_t DV : {3, 2}) shapes.push_back(with(with_values(shape(1, 37, 4, 2, 3, phi), DV), 4, 2, 4, 4, 7));
  for (const NsaShape& a : shapes) {
    INFO(text(a));
    const Inputs in(a, 5);
    Step<double> x(in);
    x.step();
    const Indices chosen = x.indices;
    const Doubles dx = x.dx;
    const Phis<double> dphi = x.dphi;
    // slope of the loss sum(do o) where `v` moves along `direction`, and what the gradient says of it
    const auto check = [&](const std::string& name, Doubles& v, const Doubles& gradient, const Doubles& direction) {
      const double h = 1e-6;
      const Doubles kept = v;
      double f[2], norm = 0;
      for (int side : {0, 1}) {
        for (size_t i = 0; i < v.size(); ++i)
          if (direction[i] != 0) v[i] = kept[i] + (side ? h : -h) * direction[i];
        x.step();
        REQUIRE(x.indices == chosen);  // a step that changes what is selected is not a derivative
        f[side] = dot(x.o.data(), x.d_o.data(), int64_t(x.o.size()));
      }
      v = kept;
      double slope = 0;
      for (size_t i = 0; i < v.size(); ++i)
        if (direction[i] != 0) slope += gradient[i] * direction[i], norm += gradient[i] * gradient[i];
      INFO(name);
      CHECK(norm > 0);
      CHECK(std::abs((f[1] - f[0]) / (2 * h) - slope) <= 1e-7 * std::max(1.0, std::sqrt(norm)));
    };
    for (const Part& p : parts(a)) {
      if (p.name == std::string("padding")) continue;
      for (uint32_t seed : {1, 2, 3}) {
        Doubles direction(x.x.size());
        for (int64_t r = 0; r < a.T; ++r)
          for (int64_t c = p.from; c < p.to; ++c) direction[r * a.ld + c] = normal(seed, 20, r * a.ld + c);
        check(p.name, x.x, dx, direction);
      }
    }
    for (int i : {0, 1})
      for (auto [name, v, gradient] :
           {std::tuple("position", &x.phi.position[i], &dphi.position[i]), std::tuple("w1", &x.phi.w1[i], &dphi.w1[i]),
            std::tuple("w2", &x.phi.w2[i], &dphi.w2[i])})
        for (uint32_t seed : {1, 2, 3})
          if (!v->empty()) check(name, *v, *gradient, normals(int64_t(v->size()), seed, 21));
  }
}

TEST_CASE("float and bf16 NSA are the double one, rounded", "[nsa]") {
  std::vector<NsaShape> list = {shape(1, 700, 4, 2, 64), shape(1, 200, 6, 1, 64, Phi::linear),
                                shape(1, 200, 4, 2, 32, Phi::mlp),
                                with_values(shape(1, 200, 4, 2, 48, Phi::linear), 32)};
  list[0].selected = 4, list[1].selected = list[2].selected = list[3].selected = 3;
  for (const NsaShape& a : list) {
    INFO(text(a));
    const Inputs in(a);
    Step<float> f(in);
    f.step();
    check_below(errors(f, reference(in, &f.indices)), 1e-5);
    Step<bf16> b(in);
    b.step();
    const Reference ref = reference(in, &b.indices);
    // Compressed keys and values are rounded before they are used, and so are the branches.
    check_below(errors(b, ref), 0.02);
    Step<bf16, float> wide(in);  // gradients of phi in float
    wide.step();
    check_below(errors(wide, ref), 0.02);
    CHECK(same_bits(wide.dx, b.dx));
  }
}

// -------------------------------------------------------------------------------------------------------- selection

TEST_CASE("eq. 9: a compressed key scores a block by what they share", "[nsa]") {
  for (auto [l, d, select] : {std::tuple(32, 16, 64), std::tuple(4, 2, 4), std::tuple(6, 2, 10), std::tuple(8, 8, 16),
                              std::tuple(1, 1, 1), std::tuple(1, 1, 7), std::tuple(16, 2, 18), std::tuple(12, 4, 12),
                              std::tuple(64, 16, 64), std::tuple(32, 32, 32)}) {
    const NsaShape a = with(shape(1, 6 * select + 5, 1, 1, 1), l, d, select, 3, 1);
    INFO(text(a));
    const int64_t keys = a.compressed();
    for (int64_t i = 0; i < keys; ++i) {
      Doubles p(keys);
      p[i] = 1;
      double sum = 0;
      for (int64_t j = 0; j < a.select_blocks(); ++j) {
        const double score = cpu::nsa_detail::block_score(p.data(), keys, j, a);
        CHECK(score == overlap(a, i, j));
        sum += score;
      }
      CHECK(sum == double(l) / double(d));  // no compressed key reaches beyond the sequence
      CHECK(cpu::nsa_detail::block_score(p.data(), i, i * d / select, a) == 0);  // not yet seen
    }
  }
  const NsaShape a = shape(1, 400, 1, 1, 1);
  std::vector<double> weights;
  for (int64_t i = 7; i <= 11; ++i) {  // block 2 is tokens 128 to 191: keys 7 (112 to 143) to 11 (176 to 207)
    Doubles p(a.compressed());
    p[i] = 1;
    weights.push_back(cpu::nsa_detail::block_score(p.data(), a.compressed(), 2, a));
  }
  CHECK(weights == std::vector<double>{1, 2, 2, 2, 1});
}

TEST_CASE("lists are ascending, unique and causal, with the first block and the last two", "[nsa]") {
  for (NsaShape a : small_shapes()) {
    INFO(text(a));
    CHECK(malformed_lists(a, Step<double>(Inputs(a)).step().indices) == 0);
    CHECK(malformed_lists(a, Step<float>(Inputs(a)).step().indices) == 0);
  }
  NsaShape a = shape(1, 64 * 16 + 100, 2, 1, 4);  // t to 64 n and beyond
  const Indices all = Step<bf16>(Inputs(a)).step().indices;
  CHECK(malformed_lists(a, all) == 0);
  for (int64_t t : {0, 30, 31, 47, 63, 64, 127, 128, 64 * 16 - 1}) {  // all that there are
    Indices want(16, -1);
    std::iota(want.begin(), want.begin() + t / 64 + 1, 0);
    CHECK(Indices(&all[t * 16], &all[t * 16] + 16) == want);
  }
  CHECK(all[64 * 16 * 16 + 15] == 16);  // the first query that must leave one out
}

TEST_CASE("eq. 10: a group selects together, and KV heads apart", "[nsa]") {
  const NsaShape a = with(shape(1, 700, 6, 2, 16), 32, 16, 64, 4, 64);
  const Inputs in(a);
  const Indices chosen = Step<double>(in).step().indices;
  const auto head = [&](const Indices& v, int64_t h) {
    return Indices(v.begin() + h * a.T * a.selected, v.begin() + (h + 1) * a.T * a.selected);
  };
  Inputs turned = in, last = in;
  for (int64_t t = 0; t < a.T; ++t) {
    std::rotate(&turned.at(0, t, 0), &turned.at(0, t, a.D), &turned.at(0, t, 3 * a.D));  // heads 1, 2, 0, 3, 4, 5
    for (int64_t d = 0; d < a.D; ++d) last.at(0, t, 5 * a.D + d) = 3 * normal(77, 1, t * a.D + d);
  }
  CHECK(Step<double>(turned).step().indices == chosen);
  const Indices other = Step<double>(last).step().indices;
  CHECK(head(other, 0) == head(chosen, 0));
  CHECK(head(other, 1) != head(chosen, 1));  // the group's last head has a voice
}

namespace {
template <class T>
void lowest_of_equals() {
  Inputs in(with(shape(2, 700, 2, 1, 64), 32, 16, 64, 5, 64));
  const NsaShape& a = in.a;
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t t = 0; t < a.T; ++t)
      for (int64_t d = 0; d < a.D; ++d) in.at(b, t, a.k(0) + d) = normal(4, 4, d);  // every key the same
  Step<T> x(in);
  x.step();
  int64_t bad = 0;
  for (int64_t row = 0; row < a.B * a.T; ++row) {
    const int64_t own = row % a.T / a.select_block;
    if (own < 5) continue;
    // Between the first block and the last two all score the same but the one before those, which may lack a key.
    bad += Indices(&x.indices[row * 5], &x.indices[row * 5] + 5) != Indices{0, 1, 2, int32_t(own - 1), int32_t(own)};
  }
  CHECK(bad == 0);
  const Indices once = x.indices;
  CHECK(x.step().indices == once);
}
}  // namespace

TEST_CASE("equal scores go to the lowest block", "[nsa]") {
  lowest_of_equals<double>();
  lowest_of_equals<float>();
  lowest_of_equals<bf16>();
}

TEST_CASE("keys a query selects at 2048 tokens: 752.5 on average", "[nsa]") {
  const NsaShape a = shape(1, 2048, 2, 2, 8);
  const Indices lists = Step<float>(Inputs(a)).step().indices;
  int64_t sum = 0, most = 0, at_most = 0;
  for (int64_t row = 0; row < a.HKV * a.T; ++row) {
    int64_t keys = 0;
    for (int64_t s = 0; s < a.selected && lists[row * a.selected + s] >= 0; ++s)
      keys += std::min<int64_t>(64, row % a.T - lists[row * a.selected + s] * 64 + 1);
    sum += keys;
    if (keys > most) most = keys, at_most = 0;
    at_most += keys == most;
  }
  CHECK(double(sum) / double(a.HKV * a.T) == 752.5);
  CHECK(most == 1024);
  CHECK(at_most == 17 * a.HKV);
}

TEST_CASE("a query that is a needle's key selects the needle's block", "[nsa]") {
  const NsaShape a = shape(1, 4096, 1, 1, 64);
  const int64_t places[] = {70, 200, 1000, 1555, 2047, 3000, 3700};
  Inputs in(a);
  int64_t i = 0;
  for (int64_t place : places) {
    const int64_t t = a.T - 1 - i++;
    for (int64_t d = 0; d < a.D; ++d)
      in.at(0, place, a.k(0) + d) = in.at(0, place, a.k(1) + d) = in.at(0, t, d) = 4 * normal(8, 8, place * a.D + d);
  }
  const Indices lists = Step<float>(in).step().indices;
  i = 0;
  for (int64_t place : places) {
    const int32_t* list = &lists[(a.T - 1 - i++) * a.selected];
    CHECK(std::count(list, list + a.selected, int32_t(place / 64)) == 1);
  }
}

// --------------------------------------------------------------------------------------------------------- causality

namespace {
template <class T>
int64_t same_rows(const std::vector<T>& x, const std::vector<T>& y, int64_t rows_x, int64_t rows_y, int64_t from,
                  int64_t to) {  // that of the rows [from, to) have the same bits, from the first
  const int64_t n = int64_t(x.size()) / rows_x;
  REQUIRE(n == int64_t(y.size()) / rows_y);
  int64_t same = 0;
  for (int64_t r = from; r < to; ++r) same += std::memcmp(&x[r * n], &y[r * n], n * sizeof(T)) == 0;
  return same;
}

template <class T>
void check_causality(const NsaShape& a, int64_t cut, Backend backend) {
  INFO(text(a) << " " << name_of(dtype_of<T>) << " cut " << cut);
  const Inputs in(a);
  Inputs later = in, earlier = in;
  const Inputs other(a, 2);
  std::copy(other.x.begin() + cut * a.ld, other.x.end(), later.x.begin() + cut * a.ld);
  std::copy(other.d_o.begin(), other.d_o.begin() + cut * a.H * a.D, earlier.d_o.begin());
  Step<T> x(in, backend), y(later, backend), z(earlier, backend);
  x.step(), y.step(), z.step();
  CHECK(same_rows(x.o, y.o, a.T, a.T, 0, cut) == cut);
  CHECK(same_rows(x.o, y.o, a.T, a.T, cut, a.T) == 0);
  for (int64_t head = 0; head < a.HKV; ++head)
    CHECK(std::equal(&x.indices[head * a.T * a.selected], &x.indices[(head * a.T + cut) * a.selected],
                     &y.indices[head * a.T * a.selected]));
  CHECK(x.indices != y.indices);
  // What earlier outputs want reaches no later row.
  CHECK(same_rows(x.dx, z.dx, a.T, a.T, cut, a.T) == a.T - cut);
  CHECK(same_rows(x.dx, z.dx, a.T, a.T, 0, cut) == 0);
}

template <class T>
void check_prefix(const NsaShape& a, int64_t shorter, Backend backend) {
  NsaShape b = a;
  b.T = shorter;
  INFO(text(a) << " " << name_of(dtype_of<T>) << " and its first " << shorter);
  Step<T> whole(Inputs(a), backend), part(Inputs(b), backend);
  whole.step(), part.step();
  CHECK(same_rows(part.o, whole.o, b.T, a.T, 0, b.T) == b.T);
  CHECK(std::equal(part.indices.begin(), part.indices.end(), whole.indices.begin()));
}
}  // namespace

TEST_CASE("NSA does not see the future, to the bit", "[nsa]") {
  for (int64_t cut : {1, 31, 32, 64, 191, 192, 250}) {
    const NsaShape a = with(shape(1, 333, 4, 2, 16), 32, 16, 32, 5, 50);
    check_causality<double>(a, cut, Backend::cpu);
    check_causality<float>(a, cut, Backend::cpu);
    check_causality<bf16>(a, cut, Backend::cpu);
  }
  check_causality<float>(with(shape(1, 150, 3, 1, 5, Phi::mlp), 6, 2, 10, 4, 20), 77, Backend::cpu);
}

TEST_CASE("a prefix of a sequence has the same outputs, to the bit", "[nsa]") {
  for (int64_t T : {1, 31, 64, 100, 255, 320}) {
    const NsaShape a = with(shape(1, 333, 4, 1, 16), 32, 16, 32, 5, 50);
    check_prefix<double>(a, T, Backend::cpu);
    check_prefix<float>(a, T, Backend::cpu);
    check_prefix<bf16>(a, T, Backend::cpu);
  }
}

// ---------------------------------------------------------------------------------------------------- dense attention

TEST_CASE("the window branch is a softmax over its keys", "[nsa]") {
  // A window no shorter than the sequence is dense attention, to the bit; gates one-hot isolate branches.
  for (int64_t T : {1, 64, 200, 321}) {
    NsaShape a = with(shape(2, T, 4, 2, 20), 32, 16, 64, 3, T);
    for (int64_t more : {0, 1, 1000}) {
      a.window = T + more;
      Inputs in(a);
      in.set_gates(-1e4, -1e4, 1e4);
      Step<double> x(in);
      x.step();
      const Selected<double> want = dense(in, 2);
      CHECK(same_bits(x.o, want.o));
      CHECK(same_bits(x.lse[2], want.lse));
      CHECK(error(columns(x.dx, a.ld, 0, a.H * a.D), want.dq()) <= 1e-15);
      CHECK(same_bits(columns(x.dx, a.ld, a.k(2), a.k(3)), want.dk()));
      CHECK(same_bits(columns(x.dx, a.ld, a.v(2), a.gate(0)), want.dv()));
    }
  }
}

TEST_CASE("attention with no more blocks than selected is dense", "[nsa]") {
  for (int64_t T : {1, 64, 200, 333}) {
    const NsaShape a = with(shape(2, T, 6, 2, 20), 8, 4, 24, (T + 23) / 24 < 3 ? 3 : (T + 23) / 24, 1);
    INFO(text(a));
    Inputs in(a);
    in.set_gates(-1e4, 1e4, -1e4);
    Step<double> x(in);
    x.step();
    const Selected<double> want = dense(in, 1);
    CHECK(error(x.o, want.o) <= 1e-13);
    CHECK(error(x.lse[1], want.lse) <= 1e-13);
    CHECK(error(columns(x.dx, a.ld, 0, a.H * a.D), want.dq()) <= 1e-13);
    CHECK(error(columns(x.dx, a.ld, a.k(1), a.k(2)), want.dk()) <= 1e-13);
    CHECK(error(columns(x.dx, a.ld, a.v(1), a.v(2)), want.dv()) <= 1e-13);
  }
}

TEST_CASE("attention to keys that compress one token is dense", "[nsa]") {
  for (int64_t T : {1, 63, 130}) {
    const NsaShape a = with(shape(2, T, 4, 2, 20), 1, 1, 4, 3, 1);
    Inputs in(a);
    in.set_gates(1e4, -1e4, -1e4);
    Step<double> x(in);
    x.step();
    const Selected<double> want = dense(in, 0);
    CHECK(same_bits(x.o, want.o));
    CHECK(error(columns(x.dx, a.ld, 0, a.H * a.D), want.dq()) <= 1e-15);
    CHECK(same_bits(columns(x.dx, a.ld, a.k(0), a.k(1)), want.dk()));
    CHECK(same_bits(columns(x.dx, a.ld, a.v(0), a.v(1)), want.dv()));
  }
}

// ------------------------------------------------------------------------------------------------------ single rules

TEST_CASE("queries before the first compressed key", "[nsa]") {
  for (int64_t T : {1, 15, 31, 32, 33, 65})
    for (Phi phi : {Phi::mean, Phi::linear, Phi::mlp}) {
      const NsaShape a = shape(2, T, 4, 2, 8, phi);
      INFO(text(a));
      Inputs in(a);
      in.set_gates(1e4, -1e4, -1e4);  // the compressed branch alone
      Step<float> x(in);
      x.step();
      const int64_t C = a.H * a.D, early = std::min<int64_t>(T, 31);
      for (int64_t b = 0; b < a.B; ++b) {
        CHECK(std::all_of(&x.o[b * T * C], &x.o[b * T * C] + early * C, [](float o) { return o == 0; }));
        for (int64_t h = 0; h < a.H; ++h)
          for (int64_t t = 0; t < T; ++t) {
            const float lse = x.lse[0][(b * a.H + h) * T + t];
            CHECK((t < 31 ? lse == -INFINITY : std::isfinite(lse)));
          }
        for (int64_t t = 0; t < early; ++t) {
          const float* dq = &x.dx[(b * T + t) * a.ld];
          CHECK(std::all_of(dq, dq + C, [](float d) { return d == 0; }));
        }
      }
      CHECK(all_finite(x.o));
      CHECK(all_finite(x.dx));
      for_each(x.dphi, [&](const std::vector<float>& d) { CHECK((T < 32 ? all_zero(d) : all_finite(d))); });
    }
}

// amax (B,H,T), or nothing: the largest |o| of each query and head of o (B*T, H D), to the bit.
template <class T>
static void check_amax(const std::vector<T>& o, const std::vector<float>& amax, const NsaShape& a) {
  int64_t broken = 0;
  for (int64_t i = 0; i < int64_t(amax.size()); ++i) {
    const int64_t t = i % a.T, h = i / a.T % a.H, b = i / a.T / a.H, at = ((b * a.T + t) * a.H + h) * a.D;
    float most = 0;
    for (int64_t c = at; c < at + a.D; ++c) most = std::max(most, std::abs(float(o[size_t(c)])));
    broken += amax[size_t(i)] != most;
  }
  CHECK(broken == 0);
}
template <class T>
static void check_amax_of_sum(const NsaShape& a) {
  Stream& s = test_device(Backend::cpu).compute();
  const int64_t n = a.B * a.T * a.H * a.D;
  const std::vector<T> x = converted<T>(Inputs(a).x), one = converted<T>(normals(n, 1, 43)),
                       two = converted<T>(normals(n, 1, 44)), three = converted<T>(normals(n, 1, 45));
  std::vector<T> o = nans<T>(n), again = o;
  std::vector<float> amax(size_t(a.B * a.H * a.T), NAN);
  nsa_combine<T>(s, o.data(), one.data(), two.data(), three.data(), x.data(), a, amax.data());
  nsa_combine<T>(s, again.data(), one.data(), two.data(), three.data(), x.data(), a);
  s.synchronize();
  check_amax(o, amax, a);
  CHECK(same_bits(o, again));
}
TEST_CASE("the sum of branches comes with its largest numbers", "[nsa]") {
  const NsaShape a = with(shape(2, 37, 6, 2, 5), 8, 4, 16, 4, 20);
  check_amax_of_sum<float>(a), check_amax_of_sum<bf16>(a), check_amax_of_sum<double>(a);
}

TEST_CASE("closed gates close everything", "[nsa]") {
  const NsaShape a = with(shape(1, 200, 4, 2, 8, Phi::mlp), 8, 4, 16, 4, 20);
  Inputs in(a);
  in.set_gates(-1e4, -1e4, -1e4);
  Step<float> x(in);
  x.step();
  CHECK(all_zero(x.o));
  CHECK(all_zero(x.dx));
  for_each(x.dphi, [](const std::vector<float>& d) { CHECK(all_zero(d)); });
}

TEST_CASE("weights sum to 1 in each branch", "[nsa]") {
  const NsaShape a = with(shape(1, 150, 4, 2, 8), 8, 4, 16, 4, 20);
  Inputs in(a);
  for (int64_t t = 0; t < a.T; ++t)
    for (int branch = 0; branch < 3; ++branch)
      for (int64_t c = 0; c < a.HKV * a.D; ++c) in.at(0, t, a.v(branch) + c) = 1;
  Step<double> x(in);
  x.step();
  double worst = 0;
  for (int64_t t = 0; t < a.T; ++t)
    for (int64_t h = 0; h < a.H; ++h) {
      double gates = 0;
      for (int branch = t + 1 < a.block; branch < 3; ++branch)  // the compressed branch is empty before
        gates += 1 / (1 + std::exp(-in.at(0, t, a.gate(branch) + h)));
      for (int64_t d = 0; d < a.D; ++d) worst = worse(worst, std::abs(x.o[(t * a.H + h) * a.D + d] - gates));
    }
  CHECK(worst <= 1e-14);
}

TEST_CASE("every parameter gets a gradient, but scores give none", "[nsa]") {
  for (Phi phi : {Phi::mean, Phi::linear, Phi::mlp}) {
    const NsaShape a = with(shape(1, 200, 4, 2, 8, phi), 8, 4, 16, 4, 20);
    INFO(text(a));
    Inputs in(a);
    Step<float> x(in);
    x.step();
    for (const Part& p : parts(a)) {
      INFO(p.name);
      for (int64_t c = p.from; c < p.to; ++c) CHECK(all_zero(columns(x.dx, a.ld, c, c + 1)) == (c >= a.columns()));
    }
    const double some = phi == Phi::mean ? 0 : 0.01 * rms(converted<double>(x.dphi.position[1]));
    CHECK((rms(converted<double>(x.dphi.position[0])) > some) == (phi == Phi::mlp));  // see position_floor()
    for (int i : {0, 1}) {
      CHECK((phi == Phi::mean || !all_zero(x.dphi.position[1])));
      CHECK((phi == Phi::mean || !all_zero(x.dphi.w1[i])));
      CHECK((phi != Phi::mlp || !all_zero(x.dphi.w2[i])));
    }
    // The compressed keys still choose the blocks, and learn nothing from it.
    in.set_gates(-1e4, 0.5, 0.5);
    Step<float> y(in);
    y.step();
    CHECK(y.indices == x.indices);
    CHECK(all_zero(columns(y.dx, a.ld, a.k(0), a.k(1))));
    CHECK(all_zero(columns(y.dx, a.ld, a.v(0), a.v(1))));
    for_each(y.dphi, [](const std::vector<float>& d) { CHECK(all_zero(d)); });
  }
}

TEST_CASE("sequences of a batch know nothing of each other", "[nsa]") {
  const NsaShape a = with(shape(3, 150, 4, 2, 8, Phi::linear), 8, 4, 16, 4, 20);
  const Inputs in(a);
  Step<float> all(in);
  all.step();
  Phis<double> sum = phis_like<double>(a);
  for_each(sum, [](Doubles& v) { std::fill(v.begin(), v.end(), 0.0); });
  for (int64_t b = 0; b < a.B; ++b) {
    NsaShape single = a;
    single.B = 1;
    Inputs part(single);
    part.phi = in.phi;
    std::copy_n(in.x.begin() + b * a.T * a.ld, a.T * a.ld, part.x.begin());
    std::copy_n(in.d_o.begin() + b * a.T * a.H * a.D, a.T * a.H * a.D, part.d_o.begin());
    Step<float> one(part);
    one.step();
    CHECK(std::equal(one.o.begin(), one.o.end(), all.o.begin() + b * int64_t(one.o.size())));
    CHECK(std::equal(one.dx.begin(), one.dx.end(), all.dx.begin() + b * int64_t(one.dx.size())));
    CHECK(std::equal(one.indices.begin(), one.indices.end(), all.indices.begin() + b * int64_t(one.indices.size())));
    for (int i : {0, 1}) {
      for (size_t j = 0; j < sum.position[i].size(); ++j) sum.position[i][j] += one.dphi.position[i][j];
      for (size_t j = 0; j < sum.w1[i].size(); ++j) sum.w1[i][j] += one.dphi.w1[i][j];
    }
  }
  for (int i : {0, 1}) {
    CHECK(error(all.dphi.position[i], sum.position[i], position_floor(a, sum)) <= 1e-5);
    CHECK(error(all.dphi.w1[i], sum.w1[i]) <= 1e-5);
  }
}

TEST_CASE("large and shifted logits", "[nsa]") {
  const NsaShape a = with(shape(1, 300, 2, 1, 16), 32, 16, 32, 4, 64);
  Inputs in(a), shifted(a);
  for (int64_t t = 0; t < a.T; ++t)
    for (int64_t c = 0; c < a.H * a.D; ++c) in.at(0, t, c) *= 1e3;  // scores of thousands: exp alone would overflow
  const Reference ref = reference(in);
  Step<double> d(in);
  d.step();
  CHECK(d.indices == ref.indices);
  check_below(errors(d, ref), 1e-9);
  Step<float> f(in);
  f.step();
  CHECK(all_finite(f.o));
  CHECK(all_finite(f.dx));
  // The same vector on every key is the same number on every score of a query: 4 |q| ~ 16 here.
  Step<double> x(shifted);
  x.step();
  for (int64_t t = 0; t < a.T; ++t)
    for (int branch = 0; branch < 3; ++branch)
      for (int64_t d2 = 0; d2 < a.D; ++d2) shifted.at(0, t, a.k(branch) + d2) += 16 * normal(3, 3, d2);
  Step<double> y(shifted);
  y.step();
  CHECK(x.indices == y.indices);
  CHECK(error(y.o, x.o) <= 1e-12);
  CHECK(error(columns(y.dx, a.ld, 0, a.H * a.D), columns(x.dx, a.ld, 0, a.H * a.D)) <= 1e-11);
}

TEST_CASE("NSA repeats its bits and leaves its inputs", "[nsa]") {
  const Inputs in(with(shape(2, 150, 4, 2, 8, Phi::mlp), 8, 4, 16, 4, 20));
  Step<float> x(in), y(in);
  x.step(), y.step();
  CHECK(same_results(x, y));
  CHECK(same_results(x, y.step()));
  Step<bf16> u(in), v(in);
  CHECK(same_results(u.step(), v.step()));
}

// ---------------------------------------------------------------------------------------- selected blocks, given lists

namespace {
// Nobody selects `never`; every query its own block.
Indices lists_without(const NsaShape& a, int32_t never) {
  Indices lists = random_lists(a);
  for (size_t i = 0; i < lists.size(); i += size_t(a.selected)) {
    auto begin = lists.begin() + int64_t(i), end = begin + a.selected;
    auto last = std::remove(begin, end, never);
    std::fill(last, end, -1);
  }
  return lists;
}
}  // namespace

TEST_CASE("selected attention reads and feeds what was selected, and nothing else", "[nsa]") {
  const NsaShape a = with(shape(2, 210, 4, 2, 8), 8, 4, 16, 5, 1);
  const int32_t never = 4;
  Inputs in(a);
  const Indices lists = lists_without(a, never);
  const Selected<float> x = Selected<float>(in, lists).run();
  CHECK(all_finite(x.o));
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t j = never * 16; j < never * 16 + 16; ++j)
      for (int64_t c = 0; c < a.HKV * a.D; ++c) {
        CHECK(x.dx[(b * a.T + j) * a.ld + a.k(1) + c] == 0);
        CHECK(x.dx[(b * a.T + j) * a.ld + a.v(1) + c] == 0);
      }
  // Other keys and values in block 2: just the outputs of those that have it in their lists change.
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t j = 32; j < 48; ++j)
      for (int64_t c = 0; c < a.HKV * a.D; ++c) in.at(b, j, a.k(1) + c) *= 2, in.at(b, j, a.v(1) + c) = 100;
  const Selected<float> y = Selected<float>(in, lists).run();
  int64_t wrong = 0, changed = 0;
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t h = 0; h < a.H; ++h)
      for (int64_t t = 0; t < a.T; ++t) {
        const int32_t* list = &lists[((b * a.HKV + h / 2) * a.T + t) * a.selected];
        const int64_t at = ((b * a.T + t) * a.H + h) * a.D;
        const bool same = std::memcmp(&x.o[at], &y.o[at], a.D * sizeof(float)) == 0;
        wrong += same == (std::count(list, list + a.selected, 2) == 1);
        changed += !same;
      }
  CHECK(wrong == 0);
  CHECK(changed > 0);
}

TEST_CASE("selected attention adds its dq to the other branches'", "[nsa]") {
  const NsaShape a = with(shape(1, 150, 4, 2, 8), 8, 4, 16, 4, 1);
  const Inputs in(a);
  Selected<double> with_all(in, random_lists(a)), without(in, random_lists(a)), neither(in, random_lists(a));
  without.dq_compressed.clear();
  neither.alone().gated = true;
  const Doubles window = with_all.dq(), compressed = with_all.dq_compressed;
  with_all.run(), without.run(), neither.run();
  Doubles own = neither.dq(), sum = own;
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += window[i];
  CHECK(error(without.dq(), sum) <= 1e-15);
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += compressed[i];
  CHECK(error(with_all.dq(), sum) <= 1e-15);
  CHECK(same_bits(with_all.dk(), neither.dk()));
}

TEST_CASE("heads of a group are heads with repeated keys", "[nsa]") {
  const NsaShape grouped = with(shape(1, 200, 6, 2, 8), 8, 4, 16, 4, 1);
  NsaShape apart = grouped;
  apart.HKV = 6;
  apart.ld = apart.columns();
  const Inputs in(grouped);
  Inputs repeated(apart);
  repeated.d_o = in.d_o;
  for (int64_t t = 0; t < grouped.T; ++t) {
    const double* row = &in.x[t * grouped.ld];
    for (int64_t h = 0; h < 6; ++h)
      for (int64_t d = 0; d < 8; ++d) {
        repeated.at(0, t, h * 8 + d) = row[h * 8 + d];
        repeated.at(0, t, apart.k(1) + h * 8 + d) = row[grouped.k(1) + h / 3 * 8 + d];
        repeated.at(0, t, apart.v(1) + h * 8 + d) = row[grouped.v(1) + h / 3 * 8 + d];
      }
  }
  const Indices lists = random_lists(grouped);
  const int64_t n = grouped.T * grouped.selected;
  Indices more;
  for (int64_t h = 0; h < 6; ++h) more.insert(more.end(), lists.begin() + h / 3 * n, lists.begin() + (h / 3 + 1) * n);
  const Selected<double> x = Selected<double>(in, lists).alone().run(),
                         y = Selected<double>(repeated, more).alone().run();
  CHECK(same_bits(x.o, y.o));
  CHECK(same_bits(x.dq(), y.dq()));
  const auto summed = [&](const Doubles& each) {  // over the heads of a group
    Doubles sum(grouped.T * 2 * 8);
    for (int64_t t = 0; t < grouped.T; ++t)
      for (int64_t h = 0; h < 6; ++h)
        for (int64_t d = 0; d < 8; ++d) sum[(t * 2 + h / 3) * 8 + d] += each[(t * 6 + h) * 8 + d];
    return sum;
  };
  CHECK(error(x.dk(), summed(y.dk())) <= 1e-14);
  CHECK(error(x.dv(), summed(y.dv())) <= 1e-14);
}

namespace {
std::vector<Indices> skewed_lists(const NsaShape& a) {
  const auto own = [&](int64_t t) { return int32_t(t / a.select_block); };
  return {lists_of(a,
                   [&](int64_t, int64_t, int64_t t) {
                     return std::set<int32_t>{0, own(t)};
                   }),
          lists_of(a,
                   [&](int64_t, int64_t, int64_t t) {
                     return std::set<int32_t>{std::min(own(t), 3), own(t)};
                   }),
          lists_of(a, [&](int64_t, int64_t, int64_t t) { return std::set<int32_t>{own(t)}; }),
          // Only the last query asks for most blocks.
          lists_of(a, [&](int64_t, int64_t, int64_t t) {
            return t + 1 < a.T ? std::set<int32_t>{own(t)} : std::set<int32_t>{0, 1, own(t)};
          })};
}
}  // namespace

TEST_CASE("all queries select one block", "[nsa]") {
  const NsaShape a = with(shape(1, 500, 2, 1, 8), 8, 4, 16, 5, 1);
  Inputs in(a);
  in.set_gates(-1e4, 1e4, -1e4);
  for (const Indices& lists : skewed_lists(a)) {
    const Reference ref = reference(in, &lists);
    const Selected<double> x = Selected<double>(in, lists).alone().run();
    CHECK(error(x.o, ref.o) <= 1e-13);
    CHECK(error(x.dq(), columns(ref.dx, a.ld, 0, a.H * a.D)) <= 1e-13);
    CHECK(error(x.dk(), columns(ref.dx, a.ld, a.k(1), a.k(2))) <= 1e-13);
    CHECK(error(x.dv(), columns(ref.dx, a.ld, a.v(1), a.v(2))) <= 1e-13);
  }
}

namespace {
// Inputs by which every query chooses blocks 1 and 3, whatever else: those blocks' compressed keys are what all queries
// of the group have in common.
Inputs skewed(const NsaShape& a) {
  Inputs in(a);
  const auto rounded = [](double x) { return double(float(bf16(float(x)))); };
  const int64_t group = a.H / a.HKV;
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t t = 0; t < a.T; ++t)
      for (int64_t c = 0; c < a.H * a.D; ++c) {
        const int64_t head = c / a.D / group, d = c % a.D, block = t / a.select_block;
        const double common = normal(6, uint32_t(head), b * a.D + d);
        double &q = in.at(b, t, c), &k = in.at(b, t, a.k(0) + head * a.D + d);
        q = rounded(0.25 * q + common);
        if (c / a.D % group == 0 && (block == 1 || block == 3)) k = rounded(0.25 * k + common);
      }
  return in;
}
// Queries whose list is not what those inputs make it; of 5 blocks.
int64_t not_skewed(const NsaShape& a, const Indices& lists) {
  int64_t bad = 0;
  for (int64_t row = 0; row < a.B * a.HKV * a.T; ++row) {
    const int32_t own = int32_t(row % a.T / a.select_block);
    bad += own >= 5 && Indices(&lists[row * 5], &lists[row * 5] + 5) != Indices{0, 1, 3, own - 1, own};
  }
  return bad;
}
}  // namespace

TEST_CASE("all queries choose the same blocks", "[nsa]") {
  const Inputs in = skewed(with(shape(2, 300, 4, 2, 32), 16, 8, 32, 5, 40));
  Step<double> x(in);
  x.step();
  CHECK(not_skewed(in.a, x.indices) == 0);
  CHECK(not_skewed(in.a, Step<double>(Inputs(in.a)).step().indices) > 0);  // it is the inputs that do it
  check_below(errors(x, reference(in)), 1e-12);
}

// -------------------------------------------------------------------------------------- attention to part of the keys

TEST_CASE("attention sees what its rule says", "[nsa][attention]") {
  // One-hot values: o is the row of weights itself.
  for (int64_t T : {1, 40, 150})
    for (int64_t n : {1, 2, 33, 64, 149, 500}) {
      const int64_t D = T;
      AttentionShape s = {1, T, 1, 1, D, D, D, D, D, D, 0.1};
      const Doubles q = normals(T * D, 1, 1), k = normals(T * D, 1, 2);
      Doubles v(T * D), o(T * D), lse(T);
      for (int64_t j = 0; j < T; ++j) v[j * D + j] = 1;
      const auto seen = [&](auto rule) {
        cpu::attention_forward(o.data(), lse.data(), q.data(), k.data(), v.data(), s);
        int64_t wrong = 0;
        for (int64_t t = 0; t < T; ++t)
          for (int64_t j = 0; j < T; ++j) wrong += (o[t * D + j] > 0) != (j < (s.keys ? s.keys : T) && rule(t, j));
        CHECK(wrong == 0);
      };
      INFO("T " << T << " n " << n);
      seen([](int64_t t, int64_t j) { return j <= t; });
      s.sees = Sees::window, s.window = n;
      seen([n](int64_t t, int64_t j) { return j <= t && j > t - n; });
      s.sees = Sees::compressed, s.window = 0, s.block = n;
      for (int64_t stride : {1, 2, 16}) {
        if (T < n) continue;
        s.stride = stride, s.keys = (T - n) / stride + 1;
        seen([=](int64_t t, int64_t j) { return stride * j + n - 1 <= t; });
      }
    }
}

TEST_CASE("a window costs its keys, not the sequence", "[nsa][attention]") {
  // The operations that a NaN reaches say what was read: tiles of keys that no query of a tile sees are not.
  const int64_t T = 640, D = 4;
  AttentionShape s = {1, T, 1, 1, D, D, D, D, D, D, 0.5, Sees::window};
  s.window = 64;
  Doubles q = normals(T * D, 1, 1), k = normals(T * D, 1, 2), v = k, o(T * D), lse(T);
  std::fill_n(v.begin(), 256 * D, std::nan(""));  // weight 0 times NaN would be a NaN
  cpu::attention_forward(o.data(), lse.data(), q.data(), k.data(), v.data(), s);
  CHECK(all_finite(Doubles(o.begin() + (256 + 64) * D, o.end())));
  CHECK(!std::isfinite(o[256 * D]));
}

// ---------------------------------------------------------------------------------------------------- plan and refusal

TEST_CASE("NSA's memory grows with the sequence, not with its square", "[nsa]") {
  const auto peak = [](int64_t T) {
    Device dev(Backend::gpu, Device::plan_only);
    NsaShape a = shape(8, T, 64, 4, 128, Phi::mlp);
    dev.mem.begin("step");
    NsaSaved<bf16> saved;
    bf16* none = nullptr;
    const PhiWeights<const bf16> phi;
    nsa_forward<bf16>(dev, none, &saved, none, phi, a, Purpose::activations);
    nsa_backward<bf16, bf16>(dev, none, PhiWeights<bf16>(), none, none, phi, std::move(saved), a);
    dev.mem.end();
    return double(dev.mem.report().live_peak);
  };
  const double at_16k = peak(16384);
  // What is saved, and as much again for what the backward makes on the way: 3 outputs of 64 heads of 128, their lse,
  // 4 lists of 16 blocks.
  const double saved = 8.0 * 16384 * (3 * 64 * (128 * 2 + 4) + 4 * 16 * 4);
  CHECK(at_16k >= saved);
  CHECK(at_16k <= 2.5 * saved);
  CHECK(peak(131072) / at_16k <= 8.1);
}

TEST_CASE("NSA refuses by name what the equations forbid", "[nsa]") {
  const NsaShape good = shape(1, 100, 2, 1, 8);
  CHECK(error_of<Error>([&] { check_nsa(good); }).empty());
  struct Bad {
    int64_t NsaShape::*member;
    int64_t value;
    const char *option, *limit;
  };
  for (const Bad& bad : {Bad{&NsaShape::stride, 0, "--nsa-stride 0", "1 or more"},
                         Bad{&NsaShape::stride, 12, "--nsa-block 32", "multiple of --nsa-stride 12"},
                         Bad{&NsaShape::block, 24, "--nsa-block 24", "multiple of --nsa-stride 16"},
                         Bad{&NsaShape::block, 0, "--nsa-block 0", "multiple of --nsa-stride 16"},
                         Bad{&NsaShape::block, 80, "--nsa-select-block 64", "--nsa-block 80"},
                         Bad{&NsaShape::select_block, 72, "--nsa-select-block 72", "multiple of --nsa-stride 16"},
                         Bad{&NsaShape::select_block, 0, "--nsa-select-block 0", "multiple of --nsa-stride 16"},
                         Bad{&NsaShape::select_block, -16, "--nsa-select-block -16", "multiple of --nsa-stride 16"},
                         Bad{&NsaShape::selected, 2, "--nsa-selected 2", "3 or more"},
                         Bad{&NsaShape::window, 0, "--nsa-window 0", "1 or more"}}) {
    NsaShape a = good;
    a.*bad.member = bad.value;
    const std::string error = error_of<UsageError>([&] { check_nsa(a); });
    INFO(error);
    CHECK(has(error, bad.option));
    CHECK(has(error, bad.limit));
  }
  NsaShape narrow = good;
  narrow.ld = narrow.columns() - 1;
  CHECK(has(error_of<Error>([&] { check_nsa(narrow); }), "columns"));
  Device dev(Backend::gpu, Device::plan_only);
  NsaShape a = good;
  a.selected = 2;
  CHECK(has(
      error_of<UsageError>([&] { nsa_forward<float>(dev, nullptr, nullptr, nullptr, {}, a, Purpose::activations); }),
      "--nsa-selected"));
}

// --------------------------------------------------------------------------------------------------------------- GPU

#define NEEDS_GPU() \
  if (!have_gpu()) SKIP_TEST("GPU kernels: no GPU here")

#if FSDP_CUDA
namespace {

// In bf16; float has kernels for every head dim of the lists below, but none for values of another than keys.
bool has_kernel(const NsaShape& a) { return a.DV ? a.D == 192 && a.DV == 128 : a.D == 64 || a.D == 128; }

// A kernel's errors against the double twin: bf16 within twice those of the bf16 twin; float to float. The floors are
// for what is nearly zero.
template <class T>
void check_against_twin(const Errors& gpu, const Errors& twin) {
  constexpr bool narrow = std::is_same_v<T, bf16>;
  for (const auto& [name, e] : gpu) {
    INFO(name << " " << name_of(dtype_of<T>) << ", the bf16 twin's error " << twin.at(name));
    CHECK(e <= (narrow ? 2 * twin.at(name) + 1e-4 : 5e-5));
  }
}

// The stages that move and pool numbers, each from the same inputs in every type.
template <class T, class G>
struct Simple {
  std::vector<T> mean, dmean, blocks, dblocks, last, first, combined;
  std::vector<G> dposition;
  std::vector<float> amax;  // of combined, of each query and head; of kernels in fp32 and for odd heads empty
  bool vectors = true;      // none of the kernels is the general one
  Simple(const NsaShape& a, Backend backend) {
    Stream& s = stream_of(backend);
    Arrays on(s);
    const Inputs in(a);
    const int64_t C = a.HKV * a.D, rows = a.B * a.compressed(), n = a.HKV * rows * a.block * a.D;
    std::vector<T> x = converted<T>(in.x), dout = converted<T>(normals(rows * C, 1, 40)),
                   position = converted<T>(normals(a.HKV * a.block * a.D, 1, 41)), d = converted<T>(normals(n, 1, 42)),
                   o[3];
    for (uint32_t i = 0; i < 3; ++i) o[i] = converted<T>(normals(int64_t(in.d_o.size()), 1, 43 + i));
    mean = nans<T>(rows * C), dmean = nans<T>(int64_t(x.size())), dblocks = dmean, blocks = nans<T>(n);
    last = mean, first = mean, combined = nans<T>(int64_t(in.d_o.size())),
    dposition = nans<G>(int64_t(position.size()));
    const T *px = on.up(x), *pd = on.up(dout);
    const auto tell = [&](const Kernel& k) { vectors = vectors && !k.general; };
    tell(nsa_mean<T>(s, on.up(mean), px + a.k(0), a));
    tell(nsa_mean_backward<T>(s, on.up(dmean) + a.v(0), pd, a));
    tell(nsa_blocks<T>(s, on.up(blocks), px + a.v(0), on.up(position), a));
    tell(nsa_blocks_backward<T, G>(s, on.up(dblocks) + a.k(0), on.up(dposition), on.up(d),
                                   on.scratch<acc_t<T>>(nsa_blocks_partials(a)), a));
    tell(nsa_heads_last<T>(s, on.up(last), pd, a.HKV, rows, a.D));
    tell(nsa_heads_first<T>(s, on.up(first), pd, a.HKV, rows, a.D));
    if (backend == Backend::cpu || (std::is_same_v<T, bf16> && (a.D == 64 || a.D == 128)))
      amax.assign(size_t(a.B * a.H * a.T), NAN);
    tell(nsa_combine<T>(s, on.up(combined), on.up(o[0]), on.up(o[1]), on.up(o[2]), px, a,
                        amax.empty() ? nullptr : on.up(amax)));
    s.synchronize();
    on.down();
  }
};
template <class T, class G>
Errors errors(const Simple<T, G>& x, const Simple<double, double>& ref, const NsaShape& a) {
  const auto in_columns = [&](const auto& v, int64_t from) { return columns(v, a.ld, from, from + a.HKV * a.D); };
  return {{"mean", error(x.mean, ref.mean)},
          {"mean's gradient", error(in_columns(x.dmean, a.v(0)), in_columns(ref.dmean, a.v(0)))},
          {"blocks", error(x.blocks, ref.blocks)},
          {"blocks' gradient", error(in_columns(x.dblocks, a.k(0)), in_columns(ref.dblocks, a.k(0)))},
          {"positions' gradient", error(x.dposition, ref.dposition)},
          {"heads last", error(x.last, ref.last)},
          {"heads first", error(x.first, ref.first)},
          {"combined", error(x.combined, ref.combined)}};
}
template <class T, class G>
void check_simple(const NsaShape& a, const Simple<double, double>& ref, const Errors& twin) {
  const Simple<T, G> x(a, Backend::gpu), y(a, Backend::gpu);
  check_against_twin<T>(errors(x, ref, a), twin);
  check_amax(x.combined, x.amax, a);
  CHECK((same_bits(x.mean, y.mean) && same_bits(x.dmean, y.dmean) && same_bits(x.blocks, y.blocks) &&
         same_bits(x.dblocks, y.dblocks) && same_bits(x.dposition, y.dposition) && same_bits(x.combined, y.combined)));
  const auto untouched = [&](const std::vector<T>& v, int64_t from) {  // outside of its columns
    bool clean = true;
    for (size_t i = 0; i < v.size(); ++i) {
      const int64_t c = int64_t(i) % a.ld - from;
      clean = clean && ((c >= 0 && c < a.HKV * a.D) || std::isnan(double(acc_t<T>(v[i]))));
    }
    return clean;
  };
  CHECK(untouched(x.dmean, a.v(0)));
  CHECK(untouched(x.dblocks, a.k(0)));
  CHECK(x.vectors == (a.D * sizeof(T) % 16 == 0));
}
void check_simple(const std::vector<NsaShape>& shapes) {
  for (const NsaShape& a : shapes) {
    INFO(text(a));
    const Simple<double, double> ref(a, Backend::cpu);
    check_amax(ref.combined, ref.amax, a);
    check_simple<float, float>(a, ref, errors(Simple<float, float>(a, Backend::cpu), ref, a));
    check_simple<bf16, bf16>(a, ref, errors(Simple<bf16, bf16>(a, Backend::cpu), ref, a));
    check_simple<bf16, float>(a, ref, errors(Simple<bf16, float>(a, Backend::cpu), ref, a));
  }
}

// Whatever blocks are selected, their exact scores are no lower than those of blocks that are not, but for rounding.
template <class T>
void check_select(const NsaShape& a) {
  INFO(text(a) << " " << name_of(dtype_of<T>));
  Inputs in(a);
  const int64_t rows = a.B * a.compressed(), group = a.H / a.HKV;
  const Doubles k = normals(rows * a.HKV * a.D, 1, 50);
  Doubles lse(a.B * a.H * a.T);
  for (int64_t i = 0; i < a.B * a.H * a.T; ++i) {
    const int64_t t = i % a.T, h = i / a.T % a.H, b = i / a.T / a.H;
    std::vector<Key> seen;
    for (int64_t j = 0; j < a.compressed() && a.stride * j + a.block - 1 <= t; ++j)
      seen.push_back({&k[((b * a.compressed() + j) * a.HKV + h / group) * a.D], nullptr, nullptr, nullptr});
    softmax(&in.x[(b * a.T + t) * a.ld + h * a.D], seen, a.D, a.scale, &lse[i]);
  }
  const Indices lists = select<T>(a, in.x, k, lse, Backend::gpu);
  CHECK(lists == select<T>(a, in.x, k, lse, Backend::gpu));
  CHECK(malformed_lists(a, lists) == 0);
  const Doubles score = scores(a, in.x, k);
  int64_t wrong = 0, differ = 0;
  const Indices exact = best_blocks(a, score);
  for (int64_t row = 0; row < a.B * a.HKV * a.T; ++row) {
    const int32_t own = int32_t(row % a.T / a.select_block), *list = &lists[row * a.selected];
    const double* s = &score[row * a.select_blocks()];
    const std::set<int32_t> chosen(list, list + std::min<int64_t>(a.selected, own + 1));
    double lowest = INFINITY, highest = -INFINITY;
    for (int32_t j = 1; j < own - 1; ++j)
      if (chosen.count(j)) lowest = std::min(lowest, s[j]);
      else highest = std::max(highest, s[j]);
    wrong += !(lowest >= highest - 1e-4 * std::abs(highest));
    differ += !std::equal(list, list + a.selected, &exact[row * a.selected]);
  }
  CHECK(wrong == 0);
  CHECK(differ <= a.B * a.HKV * a.T / 100);  // by rounding, where scores nearly tie
}
void check_select(const std::vector<NsaShape>& shapes) {
  for (const NsaShape& a : shapes) {
    check_select<float>(a);
    if (has_kernel(a)) check_select<bf16>(a);
  }
}

template <class T>
void check_selected(const Inputs& in, const Indices& lists, const Selected<double>& ref, const Errors& twin) {
  Selected<T> x(in, lists), y(in, lists);
  x.run(Backend::gpu), y.run(Backend::gpu);
  CHECK(same_results(x, y));
  check_against_twin<T>(errors(x, ref), twin);
  const NsaShape& a = in.a;
  bool clean = true;
  for (int64_t r = 0; r < a.B * a.T; ++r)
    for (const Part& p : parts(a))
      for (int64_t c = p.from; c < p.to; ++c) {
        const bool ours = p.name == std::string("q") || has(p.name, "selected");
        clean = clean && (ours || std::isnan(double(acc_t<T>(x.dx[r * a.ld + c]))));
      }
  CHECK(clean);
}
void check_selected(const NsaShape& a, const Indices& lists) {
  INFO(text(a));
  const Inputs in(a);
  Selected<double> ref(in, lists);
  ref.run();
  Selected<bf16> narrow(in, lists);
  const Errors twin = errors(narrow.run(), ref);
  if (!a.DV) check_selected<float>(in, lists, ref, twin);
  if (has_kernel(a)) check_selected<bf16>(in, lists, ref, twin);
}
void check_selected(const std::vector<NsaShape>& shapes) {
  for (const NsaShape& a : shapes) check_selected(a, random_lists(a));
}

// Attention under the branches' rules. With compressed keys the first a.keys rows of x's columns stand for them.
template <class T>
Errors rule_errors(const Selected<T>& x, const Selected<double>& ref, int64_t rows_of_keys) {
  const auto cut = [&](const auto& v) {
    return std::decay_t<decltype(v)>(v.begin(), v.begin() + rows_of_keys * (int64_t(v.size()) / (x.a.B * x.a.T)));
  };
  return {{"o", error(x.o, ref.o)},
          {"lse", error(x.lse, ref.lse)},
          {"dq", error(x.dq(), ref.dq())},
          {"dk", error(cut(x.dk()), cut(ref.dk()))},
          {"dv", error(cut(x.dv()), cut(ref.dv()))}};
}
void check_rules(const NsaShape& a) {
  const Inputs in(a);
  std::vector<AttentionShape> rules;
  for (int64_t window : {int64_t(1), int64_t(64), int64_t(100), a.T + 7}) {
    rules.push_back({});
    rules.back().sees = Sees::window, rules.back().window = window;
  }
  for (auto [block, stride] : {std::pair(32, 16), std::pair(64, 16), std::pair(16, 16)}) {
    if (a.T < block) continue;
    rules.push_back({});
    rules.back().sees = Sees::compressed, rules.back().block = block, rules.back().stride = stride;
    rules.back().keys = (a.T - block) / stride + 1;
  }
  for (const AttentionShape& s : rules) {
    INFO(text(a) << ": sees " << int(s.sees) << " window " << s.window << " block " << s.block << " stride "
                 << s.stride);
    const int64_t keys = a.B * (s.keys ? s.keys : a.T);
    const Selected<double> ref = attend<double>(in, 2, s);
    const Errors twin = rule_errors(attend<bf16>(in, 2, s), ref, keys);
    if (!a.DV) {
      const Selected<float> f = attend<float>(in, 2, s, Backend::gpu);
      check_against_twin<float>(rule_errors(f, ref, keys), twin);
      CHECK(same_results(f, attend<float>(in, 2, s, Backend::gpu)));
    }
    if (!has_kernel(a)) continue;
    const Selected<bf16> b = attend<bf16>(in, 2, s, Backend::gpu);
    check_against_twin<bf16>(rule_errors(b, ref, keys), twin);
    CHECK(same_results(b, attend<bf16>(in, 2, s, Backend::gpu)));
  }
}

template <class T>
void check_whole(const Inputs& in) {
  const NsaShape& a = in.a;
  INFO(text(a) << " " << name_of(dtype_of<T>));
  Step<T> x(in, Backend::gpu), y(in, Backend::gpu);
  x.step(), y.step();
  CHECK(same_results(x, y));
  CHECK(same_results(x, y.step()));
  CHECK(malformed_lists(a, x.indices) == 0);
  Step<bf16> twin(in);
  twin.step();
  const Reference own = reference(in, &twin.indices), ref = reference(in, &x.indices);
  check_against_twin<T>(errors(x, ref), errors(twin, own));
}
void check_whole(const std::vector<NsaShape>& shapes) {
  for (const NsaShape& a : shapes) {
    const Inputs in(a);
    if (!a.DV) check_whole<float>(in);
    if (has_kernel(a)) check_whole<bf16>(in);
  }
}

}  // namespace
#endif

TEST_CASE("GPU: NSA, a few small shapes", "[nsa][gpu][small]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t D : {64, 128}) {
    const NsaShape a = with(shape(1, 75, 4, 2, D, Phi::mlp), 8, 4, 16, 4, 20), b = shape(2, 130, 2, 1, D);
    check_simple({a, b});
    check_select({with(shape(1, 300, 4, 2, D), 32, 16, 64, 3, 20)});
    check_selected({with(shape(1, 150, 4, 2, D), 16, 16, 16, 4, 20), with(shape(1, 199, 2, 1, D), 32, 16, 64, 3, 20)});
    check_rules(shape(1, 70, 2, 1, D));
    check_whole({with(shape(1, 300, 4, 2, D, Phi::linear), 32, 16, 64, 3, 70), shape(1, 31, 2, 1, D)});
  }
#endif
}

TEST_CASE("GPU: NSA with keys wider than values", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  if (has_small_memory(test_device(Backend::gpu).compute_capability)) SKIP_TEST("99 KiB of shared memory");
  const auto wide = [](int64_t B, int64_t T, int64_t H, int64_t HKV, Phi phi = Phi::mean) {
    return with_values(shape(B, T, H, HKV, 192, phi), 128);
  };
  const NsaShape pooled = with(wide(1, 700, 16, 1), 32, 16, 64, 4, 100);  // the paper's group
  check_select<bf16>(with(shape(1, 700, 4, 2, 192), 32, 16, 32, 6, 64));
  check_select<bf16>(with(shape(1, 700, 16, 1, 192), 32, 16, 64, 4, 64));
  check_selected({pooled, with(wide(2, 333, 4, 2), 16, 16, 32, 5, 1), with(wide(1, 700, 6, 2), 32, 32, 128, 3, 1)});
  check_rules(wide(2, 127, 4, 2)), check_rules(wide(1, 500, 2, 1));
  check_whole({pooled, wide(2, 65, 2, 1, Phi::mlp), with(wide(1, 300, 4, 2, Phi::linear), 8, 4, 16, 4, 30),
               wide(1, 15, 2, 1, Phi::mlp), with(wide(1, 1000, 4, 2), 32, 16, 64, 4, 64)});
#endif
}

TEST_CASE("GPU: compression, heads and gates", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  check_simple({shape(2, 32, 2, 1, 64), shape(2, 33, 6, 2, 128), shape(3, 1000, 4, 4, 64), shape(1, 2049, 16, 1, 64),
                with(shape(2, 200, 4, 2, 40), 8, 4, 16, 4, 20), with(shape(1, 200, 4, 2, 64), 1, 1, 1, 4, 20),
                with(shape(1, 333, 6, 3, 128), 64, 16, 64, 4, 20), with(shape(2, 100, 4, 2, 8), 16, 16, 16, 4, 20),
                with(shape(2, 70, 6, 2, 5), 8, 4, 16, 4, 20)});  // 5: no vectors
#endif
}

TEST_CASE("GPU: selection", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  std::vector<NsaShape> list;
  for (int64_t T : {1, 15, 31, 32, 33, 63, 64, 65, 127, 1000}) {
    list.push_back(shape(2, T, 2, 1, 64));
    list.back().selected = 4;
  }
  for (int64_t group : {1, 2, 3, 4, 5, 6, 8, 12, 16})
    for (int64_t D : {64, 128}) list.push_back(with(shape(1, 500, 2 * group, 2, D), 32, 16, 32, 6, 64));
  list.push_back(shape(1, 2049, 2, 1, 64));
  check_select(list);
#endif
}

TEST_CASE("GPU: equal scores go to the lowest block", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  const NsaShape a = with(shape(2, 700, 4, 1, 64), 32, 16, 64, 5, 64);
  Doubles k(a.B * a.compressed() * a.D), lse(a.B * a.H * a.T);
  for (size_t i = 0; i < lse.size(); ++i) lse[i] = std::log(std::max(1.0, double((int64_t(i) % a.T - 15) / 16)));
  const Inputs in(a);  // keys of zeros: every score is 0
  const Indices f = select<float>(a, in.x, k, lse, Backend::gpu), b = select<bf16>(a, in.x, k, lse, Backend::gpu);
  CHECK(f == b);
  int64_t bad = 0;
  for (int64_t row = 0; row < a.B * a.T; ++row) {
    const int32_t own = int32_t(row % a.T / a.select_block);
    if (own >= 5) bad += Indices(&f[row * 5], &f[row * 5] + 5) != Indices{0, 1, 2, own - 1, own};
  }
  CHECK(bad == 0);
#endif
}

TEST_CASE("GPU: selected attention of the whole, around the edges of blocks", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  std::vector<NsaShape> list;
  for (int64_t D : {64, 128})
    for (int64_t T : {1, 15, 31, 32, 33, 63, 64, 65, 127, 1000}) {
      list.push_back(shape(2, T, 4, 2, D));
      list.back().selected = 4;
    }
  list.push_back(shape(1, 2049, 2, 1, 64));
  list.push_back(with(shape(2, 300, 4, 2, 64), 16, 16, 32, 5, 1));
  list.push_back(with(shape(1, 700, 4, 2, 128), 32, 32, 128, 3, 1));
  check_selected(list);
#endif
}

TEST_CASE("GPU: selected attention of the whole, in groups", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t group : {1, 2, 4, 6, 8, 16})
    check_selected({with(shape(1, 500, group, 1, 64), 32, 16, 64, 4, 1),
                    with(shape(2, 333, 2 * group, 2, 128), 32, 16, 64, 3, 1)});
#endif
}

TEST_CASE("GPU: all queries select one block", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t D : {64, 128}) {
    const NsaShape a = with(shape(2, 700, 4, 2, D), 32, 16, 64, 5, 1);
    for (const Indices& lists : skewed_lists(a)) check_selected(a, lists);
    check_selected(a, lists_without(a, 4));
  }
#endif
}

TEST_CASE("GPU: branches that are dense attention under another rule", "[nsa][attention][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t D : {64, 128})
    for (int64_t T : {1, 15, 31, 32, 33, 63, 64, 65, 127, 500}) check_rules(shape(2, T, 4, 2, D));
  for (int64_t group : {1, 2, 4, 6, 8, 16}) check_rules(shape(1, 300, group, 1, 64));
  for (int64_t group : {1, 6, 8, 16}) check_rules(shape(1, 150, group, 1, 128));
  check_rules(shape(1, 1000, 2, 1, 128));
  check_rules(shape(1, 2049, 2, 1, 64));
  check_rules(shape(1, 100, 3, 1, 40));
#endif
}

TEST_CASE("GPU: the whole of NSA", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  std::vector<NsaShape> list;
  int i = 0;
  for (int64_t T : {1, 15, 31, 32, 33, 63, 64, 65, 127, 1000}) {
    list.push_back(shape(2, T, 2, 1, T < 1000 ? 128 : 64, Phi(i++ % 3)));
    list.back().selected = 4;
  }
  for (int64_t group : {1, 2, 4, 6, 8, 16})
    list.push_back(with(shape(1, 300, group, 1, group < 8 ? 128 : 64, Phi(i++ % 3)), 32, 16, 64, 3, 100));
  for (int64_t group : {1, 2, 4, 6, 8, 16})  // the other head dim
    list.push_back(with(shape(1, 100, group, 1, group < 8 ? 64 : 128, Phi(i++ % 3)), 8, 4, 16, 4, 30));
  check_whole(list);
  check_whole<bf16>(Inputs(with(shape(1, 2049, 1, 1, 64), 32, 16, 64, 5, 64)));
  check_whole<bf16>(Inputs(with(shape(1, 1000, 2, 1, 128), 32, 16, 64, 4, 64)));
#endif
}

TEST_CASE("GPU: all queries choose the same blocks", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  // Lists of hundreds of queries, which several blocks (CTAs) share, and short ones; two KV heads skewed to keys of
  // their own.
  const auto check = [](auto type, const NsaShape& a) {
    using T = decltype(type);
    const Inputs in = skewed(a);
    Step<T> x(in, Backend::gpu);
    x.step();
    CHECK(not_skewed(a, x.indices) == 0);
    check_whole<T>(in);
  };
  check(bf16(), with(shape(1, 700, 4, 1, 64), 16, 8, 32, 5, 64));
  check(bf16(), with(shape(1, 400, 12, 2, 128), 16, 8, 32, 5, 40));
  check(float(), with(shape(2, 250, 4, 2, 64), 16, 8, 32, 5, 40));
#endif
}

TEST_CASE("GPU: closed gates close everything, and one gate leaves its branch", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  const auto check = [](auto type, int64_t D, Phi phi) {
    using T = decltype(type);
    Inputs in(with(shape(1, 150, 4, 2, D, phi), 8, 4, 16, 4, 20));
    in.set_gates(-1e4, -1e4, -1e4);
    Step<T> x(in, Backend::gpu);
    x.step();
    CHECK(all_zero(x.o));
    CHECK(all_zero(x.dx));
    for_each(x.dphi, [](const std::vector<T>& d) { CHECK(all_zero(d)); });
    for (int open = 0; open < 3; ++open) {
      INFO("branch " << open);
      const auto gate = [&](int branch) { return branch == open ? 1e4 : -1e4; };
      in.set_gates(gate(0), gate(1), gate(2));
      check_whole<T>(in);
    }
  };
  check(bf16(), 64, Phi::mlp), check(bf16(), 128, Phi::mean), check(float(), 40, Phi::mlp);
#endif
}

TEST_CASE("GPU: NSA does not see the future", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t cut : {1, 64, 191, 250})
    for (int64_t D : {64, 128}) {
      const NsaShape a = with(shape(1, 333, 4, 2, D), 32, 16, 32, 5, 50);
      check_causality<bf16>(a, cut, Backend::gpu);
      check_causality<float>(a, cut, Backend::gpu);
    }
#endif
}

// ------------------------------------------------------------------------------------------------------- diagnostics

namespace {
// Stats of one layer from gates' logits (B*T, 3H by branch) and indices, through the stream function, as often as that
// is called with them. The first `padding` queries have no target.
NsaStats stats_of(Backend backend, const NsaShape& a, const std::vector<float>& gates,
                  const std::vector<int32_t>& indices, int64_t padding = 0, int times = 1) {
  Device& dev = test_device(backend);
  Stream& s = dev.compute();
  HostBuffer<char> host(dev, a.B * a.T * a.ld * 4);
  HostBuffer<NsaSums> sums(dev, 2);
  HostBuffer<NsaMaxima> maxima(dev, 2);
  HostBuffer<int32_t> chosen(dev, int64_t(indices.size())), targets(dev, a.B * a.T);
  HostBuffer<double> partials(dev, 2 * nsa_stats_partials());  // of two layers, the first without a query
  auto* x = reinterpret_cast<float*>(host.get());
  for (int64_t i = 0; i < a.B * a.T; ++i)
    for (int64_t g = 0; g < 3 * a.H; ++g) x[i * a.ld + a.gate(0) + g] = gates[size_t(i * 3 * a.H + g)];
  std::copy(indices.begin(), indices.end(), chosen.get());
  for (int64_t i = 0; i < a.B * a.T; ++i) targets[i] = i < padding ? -1 : 0;
  for (int i = 0; i < times; ++i)  // pinned memory: a GPU reads it too
    nsa_stats<float>(s, {{partials.get() + nsa_stats_partials(), x, chosen.get()}}, targets.get(), a);
  nsa_stats_total(s, sums.get(), maxima.get(), partials.get(), 2);
  s.synchronize();
  CHECK(sums[0].rows == 0);
  return summary(sums[1], maxima[1]);
}

// More layers than one launch has room for, each with its own gates: as one by one, to the last bit.
void check_stats_of_many(Backend backend) {
  constexpr int64_t layers = 35;
  NsaShape a = {};
  a.B = 1, a.T = 96, a.H = 4, a.HKV = 2, a.D = 8, a.scale = 1;
  a.ld = a.columns();
  const int64_t n = a.B * a.T * a.ld, partials = nsa_stats_partials();
  Device& dev = test_device(backend);
  Stream& s = dev.compute();
  HostBuffer<float> x(dev, layers * n);
  HostBuffer<int32_t> indices(dev, a.B * a.HKV * a.T * a.selected), targets(dev, a.B * a.T);
  HostBuffer<double> sums_of_blocks(dev, 2 * layers * partials);
  HostBuffer<NsaSums> sums(dev, 2 * layers);
  HostBuffer<NsaMaxima> maxima(dev, 2 * layers);
  for (int64_t i = 0; i < layers * n; ++i) x[i] = 3 * std::sin(0.37f * float(i));
  for (int64_t row = 0; row < a.B * a.HKV * a.T; ++row)
    for (int64_t i = 0; i < a.selected; ++i)
      indices[row * a.selected + i] = i <= row % a.T / a.select_block ? int32_t(i) : -1;
  std::vector<NsaCounted<float>> together;
  for (int64_t i = 0; i < layers; ++i) {
    together.push_back({sums_of_blocks.get() + i * partials, x.get() + i * n, indices.get()});
    NsaCounted<float> alone = together.back();
    alone.partials += layers * partials;
    nsa_stats<float>(s, {alone}, targets.get(), a);
  }
  nsa_stats<float>(s, together, targets.get(), a);
  nsa_stats_total(s, sums.get(), maxima.get(), sums_of_blocks.get(), 2 * layers);
  s.synchronize();
  CHECK(std::memcmp(sums.get(), sums.get() + layers, layers * sizeof(NsaSums)) == 0);
  CHECK(std::memcmp(maxima.get(), maxima.get() + layers, layers * sizeof(NsaMaxima)) == 0);
  for (int64_t i = 0; i < layers; ++i) CHECK(sums[i].rows == a.B * a.T * a.HKV);
  CHECK(sums[0].entropy != sums[layers - 1].entropy);
}

void check_stats(Backend backend) {
  NsaShape a = {};
  a.B = 2, a.T = 2048, a.H = 6, a.HKV = 2, a.D = 8, a.scale = 1;
  a.ld = a.columns() + 5;
  // The first and the last blocks: as any choice of 16, they hold 15 whole blocks and a part of the query's own.
  std::vector<int32_t> indices(size_t(a.B * a.HKV * a.T * a.selected), -1);
  for (int64_t row = 0; row < a.B * a.HKV * a.T; ++row) {
    const int64_t current = row % a.T / a.select_block, count = std::min(a.selected, current + 1);
    for (int64_t i = 0; i < count; ++i)
      indices[size_t(row * a.selected + i)] = int32_t(i < count / 2 ? i : current - count + 1 + i);
  }
  const int64_t n = a.B * a.T * a.H;
  std::vector<float> gates(size_t(3 * n), 0.5f);
  NsaStats s = stats_of(backend, a, gates, indices);
  CHECK(s.keys_mean == 752.5);
  CHECK(s.keys_max == 1024);
  CHECK(s.at_max == 17.0 / 2048);
  CHECK(s.rows == double(a.B * a.T * a.HKV));
  CHECK(s.entropy_mean == Approx(std::log(3.0)));
  CHECK(s.entropy_min == Approx(std::log(3.0)));
  CHECK(s.gate_max == Approx(1 / (1 + std::exp(-0.5))));
  CHECK(s.share_max == Approx(1 / 3.0));
  CHECK(s.share_max_mean == Approx(1 / 3.0));
  for (double share : s.share) CHECK(share == Approx(1 / 3.0));
  CHECK(s.collapsed == 0);

  // The selected branch has all of every fourth query's gates, and one gate of one head is wide open.
  for (int64_t i = 0; i < a.B * a.T; i += 4)
    for (int64_t g = 0; g < 3 * a.H; ++g) gates[size_t(i * 3 * a.H + g)] = g / a.H == 1 ? 0.5f : -20.0f;
  gates[size_t(1 * 3 * a.H + 2 * a.H + 3)] = 30;
  s = stats_of(backend, a, gates, indices);
  CHECK(s.collapsed == 0.25f);
  CHECK(s.entropy_min < 1e-6);
  CHECK(s.entropy_mean == Approx(0.75 * std::log(3.0)).epsilon(1e-4));
  CHECK(s.gate_max == Approx(1));
  CHECK(s.share[1] == Approx(0.5).epsilon(1e-4));
  CHECK(s.share[0] == Approx(0.25).epsilon(1e-4));
  const NsaStats again = stats_of(backend, a, gates, indices);
  CHECK(std::memcmp(&s, &again, sizeof s) == 0);
  // Micro-batches add up; padding, though its gates are wide open, does not count: of the first sequence here.
  const NsaStats half = stats_of(backend, a, gates, indices, a.T);
  CHECK(half.rows == double(a.T * a.HKV));
  CHECK(half.keys_mean == 752.5);
  CHECK(half.gate_max < 1);
  const NsaStats twice = stats_of(backend, a, gates, indices, a.T, 2);
  CHECK(twice.rows == 2 * half.rows);
  CHECK(twice.entropy_mean == Approx(half.entropy_mean));
  CHECK(twice.at_max == half.at_max);
  const NsaStats none = stats_of(backend, a, gates, indices, a.B * a.T);
  CHECK(none.rows == 0);
  CHECK(none.entropy_mean == 0);
}
}  // namespace

TEST_CASE("diagnostics count gates and selected keys", "[nsa]") {
  check_stats(Backend::cpu);
  check_stats_of_many(Backend::cpu);
}
TEST_CASE("GPU: diagnostics count gates and selected keys", "[nsa][gpu][small]") {
  NEEDS_GPU();
  check_stats(Backend::gpu);
  check_stats_of_many(Backend::gpu);
}

namespace {
#if FSDP_CUDA
// Stages whose latest kernel is a general one.
std::set<std::string> general_stages(const NsaKernels& k) {
  std::set<std::string> names;
  for (int s = 0; s < nsa_stages; ++s)
    if (k.latest[s].general) names.insert(name_of(Stage(s)));
  return names;
}
#endif
std::string kernel_of(const NsaKernels& k, Stage s) { return name_of(k.latest[int(s)]); }
}  // namespace

TEST_CASE("diagnostics say which kernels ran", "[nsa]") {
  for (Phi phi : {Phi::mean, Phi::linear, Phi::mlp}) {
    Step<float> x(Inputs(with(shape(1, 40, 2, 1, 8, phi), 8, 4, 16, 4, 20)));
    CHECK(x.kernels.calls == 0);  // it has been planned, and nothing ran
    x.step();
    for (int s = 0; s < nsa_stages; ++s) {
      INFO(name_of(Stage(s)));
      CHECK(kernel_of(x.kernels, Stage(s)) == "plain loops");
    }
    CHECK(x.kernels.calls == 7 + 5);  // keys and values are compressed apart
    CHECK(x.kernels.general == 0);
    x.forward();
    CHECK(x.kernels.calls == 7);
    CHECK(kernel_of(x.kernels, Stage::gates) == "plain loops");
    CHECK(kernel_of(x.kernels, Stage::window_backward) == "");
  }
  Step<float> x(Inputs(shape(1, 31, 2, 1, 8)));  // nothing to compress
  x.step();
  CHECK(x.kernels.calls == 4 + 2);
  CHECK(kernel_of(x.kernels, Stage::compressed) == "");
}

TEST_CASE("GPU: diagnostics say which kernels ran", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  const int cc = test_device(Backend::gpu).compute_capability;
  const bool hopper = cc == 90;
  const std::string code = hopper ? "sm90" : "sm80";
  const auto run = [](auto type, const NsaShape& a) {
    Step<decltype(type)> x(Inputs(a), Backend::gpu);
    x.step();
    CHECK(x.kernels.calls == 7 + 5);
    return x.kernels;
  };
  const auto check = [&](const NsaShape& a, const std::string& selection, const std::set<std::string>& general) {
    INFO(text(a));
    const NsaKernels k = run(bf16(), a);
    CHECK(kernel_of(k, Stage::selection) == selection);
    CHECK(general_stages(k) == general);
    CHECK(k.general == int64_t(general.size()));
    CHECK(k.general == std::accumulate(k.fallbacks, k.fallbacks + nsa_fallbacks, int64_t(0)));  // each has a name
    CHECK(k.general == std::accumulate(k.fallbacks, k.fallbacks + nsa_fallbacks, int64_t(0)));  // each has a name
    for (Stage s : {Stage::compressed, Stage::window, Stage::compressed_backward, Stage::window_backward})
      CHECK(kernel_of(k, s) == code);
    const std::string blocks = a.select_block > 64 ? ", blocks in pieces" : ", blocks of one piece";
    CHECK(kernel_of(k, Stage::selected) == code + blocks);
    CHECK(has(kernel_of(k, Stage::selected_backward), code));
    CHECK(has(kernel_of(k, Stage::selected_backward), blocks));
    for (Stage s : {Stage::compression, Stage::compression_backward, Stage::gates})
      CHECK(kernel_of(k, s) == "cuda, vectors");
  };
  for (int64_t D : {64, 128})
    for (int64_t group : {1, 2, 3, 4, 6, 8, 12, 16})
      check(shape(1, 100, group, 1, D, group == 4 ? Phi::mlp : Phi::mean),
            hopper ? strf("sm90, pooled, %d head%s", int(group), group == 1 ? "" : "s") : "sm80, pooled", {});
  // Groups that no kernel was made for; a selection block that is not four strides; one that is two tiles of keys.
  for (int64_t group : {5, 7, 10})
    check(with(shape(1, 100, group, 1, 64), 8, 4, 16, 4, 20), hopper ? "sm90, pooled, any heads" : "sm80, pooled",
          hopper ? std::set<std::string>{"selection"} : std::set<std::string>{});
  check(with(shape(1, 100, 4, 1, 128), 8, 4, 8, 4, 20), code + ", not pooled", {"selection"});
  check(with(shape(1, 200, 4, 1, 128), 32, 16, 128, 3, 20), code + ", not pooled",
        {"selection", "selected", "selected_backward"});
  CHECK(kernel_of(run(bf16(), shape(16, 200, 8, 2, 64)), Stage::selected) ==  // tiles that fill a GPU
        (hopper ? "sm90, masked tiles" : code + ", blocks of one piece"));
  const NsaKernels k = run(float(), shape(1, 100, 3, 1, 40));
  CHECK(k.general == 0);  // there are no special ones in fp32
  CHECK(kernel_of(k, Stage::selection) == "fp32");
  CHECK(kernel_of(k, Stage::window_backward) == "fp32");
#endif
}
