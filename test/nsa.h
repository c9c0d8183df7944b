// What the tests of Native Sparse Attention share: shapes and inputs, a plain NSA in double, written from the paper's
// equations, the real one with all that it leaves, and the errors of one against the other.
#pragma once

#include "test/arrays.h"
#include "test/errors.h"

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

namespace nsa_tests {

using Doubles = std::vector<double>;
using Indices = std::vector<int32_t>;

// ------------------------------------------------------------------------------------------------- shapes and arrays

inline NsaShape shape(int64_t B, int64_t T, int64_t H, int64_t HKV, int64_t D, Phi phi = Phi::mean) {
  NsaShape a = {B, T, H, HKV, D, 0, 1 / std::sqrt(double(D))};
  a.phi = phi;
  a.ld = (a.columns() + 7) / 8 * 8 + 8;
  return a;
}
inline NsaShape with_values(NsaShape a, int64_t DV) {  // of another head dim than keys
  a.DV = DV, a.ld = (a.columns() + 7) / 8 * 8 + 8;
  return a;
}
inline NsaShape with(NsaShape a, int64_t block, int64_t stride, int64_t select_block, int64_t selected,
                     int64_t window) {
  a.block = block, a.stride = stride, a.select_block = select_block, a.selected = selected, a.window = window;
  return a;
}
inline std::string text(const NsaShape& a) {
  const auto ll = [](int64_t n) { return static_cast<long long>(n); };
  return strf("B %lld T %lld H %lld HKV %lld D %lld DV %lld, l %lld d %lld l' %lld n %lld w %lld, phi %d", ll(a.B),
              ll(a.T), ll(a.H), ll(a.HKV), ll(a.D), ll(a.v_dim()), ll(a.block), ll(a.stride), ll(a.select_block),
              ll(a.selected), ll(a.window), int(a.phi));
}

// Normal numbers rounded to bf16, so that every type computes the same function.
inline double normal(uint64_t seed, uint32_t tensor, int64_t i) {
  return double(float(bf16(philox_normals(seed, tensor, uint64_t(i / 4)).x[i % 4])));
}
inline Doubles normals(int64_t n, uint64_t seed, uint32_t tensor, double factor = 1) {
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
inline int64_t dim_of(const NsaShape& a, int which) { return which ? a.v_dim() : a.D; }  // of keys, of values
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
inline double dot(const double* x, const double* y, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}
inline Doubles softmax(const double* q, const std::vector<Key>& keys, int64_t D, double scale, double* lse) {
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

inline double gelu_of(double h) { return 0.5 * h * (1 + std::tanh(std::sqrt(2 / M_PI) * (h + 0.044715 * h * h * h))); }
inline double gelu_slope(double h) {
  const double t = std::tanh(std::sqrt(2 / M_PI) * (h + 0.044715 * h * h * h));
  return 0.5 * (1 + t) + 0.5 * h * (1 - t * t) * std::sqrt(2 / M_PI) * (1 + 3 * 0.044715 * h * h);
}

// Eq. 7 for one block: `in` is block x D numbers. Its gradients too if `dout` is given.
inline void phi_of(const NsaShape& a, const Phis<double>& phi, int which, int64_t head, const Doubles& in, double* out,
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
inline double overlap(const NsaShape& a, int64_t i, int64_t j) {
  int64_t tokens = 0;
  for (int64_t t = a.stride * i; t < a.stride * i + a.block; ++t) tokens += t / a.select_block == j;
  return double(tokens) / double(a.stride);
}

// Eq. 8 to 10: (B,HKV,T,select_blocks()); blocks after the query's own have no score.
inline Doubles scores(const NsaShape& a, const Doubles& x, const Doubles& k) {
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
inline Indices best_blocks(const NsaShape& a, const Doubles& score) {
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

inline Reference reference(const Inputs& in, const Indices* frozen = nullptr) {
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

enum class Begins { inside, apart };  // the backward: nsa_backward's own matter, or nsa_begin_backward's before it

// Forward and backward on a device of its own: planned, then run in memory that is full of NaN.
template <class T, class G = T>
struct Step {
  using A = acc_t<T>;
  NsaShape a;
  std::vector<T> x, d_o, o, dx, branch[3], k, v, gated_sum;
  std::vector<A> lse[3];
  Phis<T> phi;
  Phis<G> dphi;
  Indices indices;
  NsaKernels kernels;  // of the latest program

  explicit Step(const Inputs& in, Backend backend = Backend::cpu, Begins begins = Begins::inside)
      : a(in.a),
        x(converted<T>(in.x)),
        d_o(converted<T>(in.d_o)),
        begins_(begins),
        dev_(std::make_unique<Device>(backend, 0)) {
    const int64_t rows = a.B * a.T, C = a.H * a.v_dim(), keys = a.B * a.compressed() * a.HKV;
    o = nans<T>(rows * C), dx = nans<T>(rows * a.ld), k = nans<T>(keys * a.D), v = nans<T>(keys * a.v_dim());
    gated_sum = o;
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
  Begins begins_;
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
        NsaBegun<T> begun;
        if (begins_ == Begins::apart) {
          Buffer<T> sum;
          begun = nsa_begin_backward<T>(*dev_, &sum, dx_, d_o_, x_, &saved, a);
          down(gated_sum, sum.get());
        }
        nsa_backward<T, G>(*dev_, dx_, dphi_, d_o_, x_, phi, std::move(saved), a, &kernels, std::move(begun));
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
inline std::vector<Part> parts(const NsaShape& a) {
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

inline double rms(const Doubles& v) {
  return v.empty() ? 0 : std::sqrt(dot(v.data(), v.data(), int64_t(v.size())) / v.size());
}
// A linear phi adds the same vector to every compressed key for its positions. Softmax does not see that: the keys'
// positions have no gradient but rounding, which is measured by that of the values' positions.
inline double position_floor(const NsaShape& a, const Phis<double>& dphi) {
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
inline void check_below(const Errors& errors, double limit) {
  for (const auto& [name, e] : errors) {
    INFO(name);
    CHECK(e <= limit);
  }
}

// The first n of the (B,HKV,T) lists of `a` that are not as eq. 11 says, whatever the scores.
inline int64_t malformed_lists(const NsaShape& a, const Indices& indices) {
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

// ------------------------------------------------------------------------------------------------ stages by themselves

inline Stream& stream_of(Backend b) { return test_device(b).compute(); }

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
                            on.scratch<char>(nsa_selected_forward_scratch<T>(s.device(), a)), a);
    const Gate<T> gate = {px + a.gate(1), pdx + a.gate(1), a.ld};
    nsa_selected_backward<T>(s, pdx, pdx + a.k(1), pdx + a.v(1), pc, pd, px, px + a.k(1), px + a.v(1), po, pl, pi,
                             on.scratch<char>(nsa_selected_backward_scratch<T>(s.device(), a)), a,
                             gated ? gate : Gate<T>{});
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
inline Selected<double> dense(const Inputs& in, int branch) { return attend<double>(in, branch, AttentionShape{}); }

// Lists that a test makes up: blocks(b, head, t) in any order; the rest is -1.
inline Indices lists_of(const NsaShape& a, const std::function<std::set<int32_t>(int64_t, int64_t, int64_t)>& blocks) {
  Indices all(a.B * a.HKV * a.T * a.selected, -1);
  for (int64_t row = 0; row < a.B * a.HKV * a.T; ++row) {
    const std::set<int32_t> list = blocks(row / a.T / a.HKV, row / a.T % a.HKV, row % a.T);
    REQUIRE(int64_t(list.size()) <= a.selected);
    std::copy(list.begin(), list.end(), all.begin() + row * a.selected);
  }
  return all;
}
// Random ones, as eq. 11 makes them.
inline Indices random_lists(const NsaShape& a, uint64_t seed = 3) {
  return best_blocks(a, normals(a.B * a.HKV * a.T * a.select_blocks(), seed, 30));
}

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

inline std::vector<Indices> skewed_lists(const NsaShape& a) {
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

// Inputs by which every query chooses blocks 1 and 3, whatever else: those blocks' compressed keys are what all queries
// of the group have in common.
inline Inputs skewed(const NsaShape& a) {
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
inline int64_t not_skewed(const NsaShape& a, const Indices& lists) {
  int64_t bad = 0;
  for (int64_t row = 0; row < a.B * a.HKV * a.T; ++row) {
    const int32_t own = int32_t(row % a.T / a.select_block);
    bad += own >= 5 && Indices(&lists[row * 5], &lists[row * 5] + 5) != Indices{0, 1, 3, own - 1, own};
  }
  return bad;
}

// Nobody selects `never`; every query its own block.
inline Indices lists_without(const NsaShape& a, int32_t never) {
  Indices lists = random_lists(a);
  for (size_t i = 0; i < lists.size(); i += size_t(a.selected)) {
    auto begin = lists.begin() + int64_t(i), end = begin + a.selected;
    auto last = std::remove(begin, end, never);
    std::fill(last, end, -1);
  }
  return lists;
}

// amax (B,H,T), or nothing: the largest |o| of each query and head of o (B*T, H D), to the bit.
template <class T>
void check_amax(const std::vector<T>& o, const std::vector<float>& amax, const NsaShape& a) {
  int64_t broken = 0;
  for (int64_t i = 0; i < int64_t(amax.size()); ++i) {
    const int64_t t = i % a.T, h = i / a.T % a.H, b = i / a.T / a.H, at = ((b * a.T + t) * a.H + h) * a.D;
    float most = 0;
    for (int64_t c = at; c < at + a.D; ++c) most = std::max(most, std::abs(float(o[size_t(c)])));
    broken += amax[size_t(i)] != most;
  }
  CHECK(broken == 0);
}

}  // namespace nsa_tests
