#include "nsa_attention.h"

#include <algorithm>
#include <cmath>

#include "attention/stages.h"
#include "attention/stats.h"
#include "lib/ops/ops.h"

void check_nsa(const NsaShape& a) {
  const auto ll = [](int64_t n) { return static_cast<long long>(n); };
  REQUIRE_USER(a.stride >= 1, "--nsa-stride %lld: must be 1 or more", ll(a.stride));
  REQUIRE_USER(a.block >= 1 && a.block % a.stride == 0,
               "--nsa-block %lld is not a positive multiple of --nsa-stride %lld", ll(a.block), ll(a.stride));
  REQUIRE_USER(a.select_block >= 1 && a.select_block % a.stride == 0,
               "--nsa-select-block %lld is not a positive multiple of --nsa-stride %lld", ll(a.select_block),
               ll(a.stride));
  REQUIRE_USER(a.select_block >= a.block,
               "--nsa-select-block %lld is less than --nsa-block %lld: must be at least as large", ll(a.select_block),
               ll(a.block));
  REQUIRE_USER(
      a.selected >= 3,
      "--nsa-selected %lld: must be 3 or more, for the first block, a query's own and the one before are always "
      "selected",
      ll(a.selected));
  REQUIRE_USER(a.window >= 1, "--nsa-window %lld: must be 1 or more, for a query sees itself", ll(a.window));
  if (a.B < 1 || a.T < 1 || a.D < 1 || a.DV < 0 || a.HKV < 1 || a.H < 1 || a.H % a.HKV || !(a.scale > 0) ||
      a.ld < a.columns())
    throw Error(
        strf("NSA: bad shape B %lld T %lld H %lld HKV %lld D %lld DV %lld ld %lld scale %g: all must be positive, HKV "
             "must divide H, and rows have %lld columns",
             ll(a.B), ll(a.T), ll(a.H), ll(a.HKV), ll(a.D), ll(a.v_dim()), ll(a.ld), a.scale, ll(a.columns())));
}

const char* name_of(Stage s) {
  static const char* names[nsa_stages] = {
      "compression", "compressed",      "selection",           "selected",          "window",
      "gates",       "window_backward", "compressed_backward", "selected_backward", "compression_backward"};
  return names[int(s)];
}

const char* const nsa_fallback_names[nsa_fallbacks] = {"compression_single_numbers", "gates_single_numbers",
                                                       "selection_any_heads", "selection_not_pooled",
                                                       "selected_in_pieces"};

int nsa_fallback(Stage s, const Kernel& k) {
  const std::string variant = k.variant;
  switch (s) {
    case Stage::compression:
    case Stage::compression_backward:
      return variant == "single numbers" ? 0 : -1;
    case Stage::gates:
      return variant == "single numbers" ? 1 : -1;
    case Stage::selection:
      return variant == "pooled, any heads" ? 2 : variant == "not pooled" ? 3 : -1;
    case Stage::selected:
    case Stage::selected_backward:
      return variant == "blocks in pieces" ? 4 : -1;
    default:
      return -1;
  }
}

template <class Half>
static Half total(const Half* of, int64_t n, Half StatsSum::*half) {
  StatsSum all;
  for (int64_t i = 0; i < n; ++i) {
    StatsSum one;
    one.*half = of[i];
    all.merge(one);
  }
  return all.*half;
}
NsaSums total(const NsaSums* sums, int64_t n) { return total(sums, n, &StatsSum::sums); }
NsaMaxima total(const NsaMaxima* maxima, int64_t n) { return total(maxima, n, &StatsSum::maxima); }

NsaStats summary(const NsaSums& sums, const NsaMaxima& maxima) {
  NsaStats s = {};
  if (sums.gates == 0 || sums.rows == 0) return s;
  s.entropy_mean = sums.entropy / sums.gates, s.entropy_min = std::log(3.0) - maxima.entropy_lack;
  s.gate_max = maxima.gate, s.share_max = maxima.share, s.share_max_mean = sums.largest_share / sums.gates;
  for (int i = 0; i < 3; ++i) s.share[i] = sums.share[i] / sums.gates;
  s.collapsed = sums.collapsed / sums.gates;
  s.keys_mean = sums.keys / sums.rows, s.keys_max = maxima.keys, s.rows = sums.rows;
  s.at_max = sums.at_max / sums.rows;
  return s;
}

namespace {

// The window branch: q, k and v, and their gradients, are columns of the fused rows.
AttentionShape window_shape(const NsaShape& a) {
  AttentionShape s = {a.B, a.T, a.H, a.HKV, a.D, a.ld, a.ld, a.H * a.v_dim(), a.ld, a.ld, a.scale, Sees::window};
  s.window = a.window, s.DV = a.DV;
  return s;
}
// The compressed branch: q is columns of the fused rows; compressed keys and values, and all gradients, have buffers.
AttentionShape compressed_shape(const NsaShape& a) {
  const int64_t q = a.H * a.D, k = a.HKV * a.D, v = a.HKV * a.v_dim(), o = a.H * a.v_dim();
  AttentionShape s = {a.B, a.T, a.H, a.HKV, a.D, a.ld, k, o, q, k, a.scale, Sees::compressed};
  s.keys = a.compressed(), s.block = a.block, s.stride = a.stride;
  s.DV = a.DV, s.ld_v = s.ld_dv = v;
  return s;
}

template <class T>
void zero_columns(Stream& s, T* p, int64_t columns, const NsaShape& a) {
  s.zero_rows(p, a.ld * int64_t(sizeof(T)), columns * int64_t(sizeof(T)), a.B * a.T);
}

// ------------------------------------------------------------------------------------------------------ phi, eq. 7

template <class T>
struct Parameters {  // of phi for keys, or for values
  T *position, *w1, *w2;
};
template <class T>
Parameters<T> of_keys(const PhiWeights<T>& p) {
  return {p.position_k, p.w1_k, p.w2_k};
}
template <class T>
Parameters<T> of_values(const PhiWeights<T>& p) {
  return {p.position_v, p.w1_v, p.w2_v};
}
// The sizes of phi's products, for each KV head: `rows` blocks of `in` numbers -> (mlp: `hidden` ->) D.
struct PhiSizes {
  int64_t rows, in, hidden;
  explicit PhiSizes(const NsaShape& a) : rows(a.B * a.compressed()), in(a.block * a.D), hidden(2 * a.D) {}
};

// out (B*compressed(), HKV D) = phi of x, columns of (B*T, ld); not Phi::mean. Returns the kernel that read x.
template <class T>
Kernel compress(Device& dev, T* out, const T* x, Parameters<const T> phi, const NsaShape& a) {
  Stream& s = dev.compute();
  const T* none = nullptr;
  const auto [rows, in, F] = PhiSizes(a);
  Buffer<T> y = dev.mem.take<T>(a.HKV * rows * a.D, "compressed, by head");
  Kernel kernel;
  {
    Buffer<T> blocks = dev.mem.take<T>(a.HKV * rows * in, "blocks to compress"), h, g;
    if (a.phi == Phi::mlp) {
      h = dev.mem.take<T>(rows * F, "hidden of phi");
      g = dev.mem.take<T>(rows * F, "activated of phi");
    }
    kernel = nsa_blocks(s, blocks.get(), x, phi.position, a);
    for (int64_t head = 0; head < a.HKV; ++head) {
      const T* block = blocks + head * rows * in;
      T* to = y + head * rows * a.D;
      if (a.phi == Phi::linear) {
        ops::matmul(s, to, block, phi.w1 + head * a.D * in, none, none, rows, a.D, in);
      } else {
        ops::matmul_gelu(s, g.get(), h.get(), ops::Hidden::scratch, block, phi.w1 + head * F * in, none, rows, F, in);
        ops::matmul<T>(s, to, g, phi.w2 + head * a.D * F, none, none, rows, a.D, F);
      }
    }
  }
  nsa_heads_last<T>(s, out, y, a.HKV, rows, a.D);
  return kernel;
}

// dx, columns of (B*T, ld), and dphi from dout (B*compressed(), HKV D); blocks and hidden layer are recomputed.
template <class T, class G>
Kernel compress_backward(Device& dev, T* dx, Parameters<G> dphi, const T* dout, const T* x, Parameters<const T> phi,
                         const NsaShape& a) {
  Stream& s = dev.compute();
  const T* none = nullptr;
  const auto [rows, in, F] = PhiSizes(a);
  Buffer<T> blocks = dev.mem.take<T>(a.HKV * rows * in, "blocks to compress, then their gradient");
  {
    Buffer<T> dy = dev.mem.take<T>(a.HKV * rows * a.D, "gradient of compressed, by head"), h, dg;
    if (a.phi == Phi::mlp) {
      h = dev.mem.take<T>(rows * F, "hidden of phi, then its gradient");
      dg = dev.mem.take<T>(rows * F, "gradient of activated, then activated");
    }
    nsa_blocks(s, blocks.get(), x, phi.position, a);
    nsa_heads_first(s, dy.get(), dout, a.HKV, rows, a.D);
    for (int64_t head = 0; head < a.HKV; ++head) {
      T* block = blocks + head * rows * in;
      const T* d = dy + head * rows * a.D;
      if (a.phi == Phi::linear) {
        ops::matmul_wgrad<T>(s, dphi.w1 + head * a.D * in, d, block, rows, a.D, in);
        ops::matmul_dgrad(s, block, d, phi.w1 + head * a.D * in, rows, a.D, in);
      } else {
        const T* w1 = phi.w1 + head * F * in;
        ops::matmul<T>(s, h, block, w1, none, none, rows, F, in);
        ops::matmul_dgrad<T>(s, dg, d, phi.w2 + head * a.D * F, rows, a.D, F);
        ops::gelu_backward<T>(s, dg, h, rows * F);  // leaves g in dg, and the hidden layer's gradient in h
        ops::matmul_wgrad<T>(s, dphi.w2 + head * a.D * F, d, dg, rows, a.D, F);
        ops::matmul_wgrad<T>(s, dphi.w1 + head * F * in, h, block, rows, F, in);
        ops::matmul_dgrad<T>(s, block, h, w1, rows, F, in);
      }
    }
  }
  Buffer<acc_t<T>> partials = dev.mem.take<acc_t<T>>(nsa_blocks_partials(a), "partial sums");
  return nsa_blocks_backward<T, G>(s, dx, dphi.position, blocks, partials, a);
}

// A sequence shorter than a block has no compressed key: gradients through phi are zero.
template <class T, class G>
void zero_gradients_of_phi(Stream& s, T* dx, Parameters<G> dphi, const NsaShape& a) {
  zero_columns(s, dx, a.HKV * a.D, a);
  if (a.phi == Phi::mean) return;
  const PhiSizes n(a);
  const int64_t bytes = a.HKV * int64_t(sizeof(G));
  s.zero(dphi.position, n.in * bytes);
  s.zero(dphi.w1, (a.phi == Phi::linear ? a.D : n.hidden) * n.in * bytes);
  if (a.phi == Phi::mlp) s.zero(dphi.w2, a.D * n.hidden * bytes);
}

// Behind the indices, which are rounded up so that they may be copied, lie words of bits (nsa_selected_words) if any.
int64_t indices(const NsaShape& a) { return (a.B * a.HKV * a.T * a.selected + 63) / 64 * 64; }
template <class T>
char* words_of(const Device& dev, const NsaSaved<T>& saved, const NsaShape& a) {
  if (!nsa_selected_words(dev, a, dtype_of<T>)) return nullptr;
  return reinterpret_cast<char*>(saved.indices.get() + indices(a));
}

// Are a stage's tiles of 128 queries and a head so few that another stage finds idle multiprocessors? Two rounds of a
// large GPU's.
bool leaves_idle(const NsaShape& a) { return a.B * a.H * ((a.T + 127) / 128) <= 2 * 132; }

}  // namespace

// ------------------------------------------------------------------------------------------- forward and backward

template <class T>
void nsa_forward(Device& dev, T* o, NsaSaved<T>* saved, const T* x, PhiWeights<const T> phi, const NsaShape& a,
                 Purpose life, NsaKernels* ran, float* amax, const std::function<void(Stream&)>& of_gates) {
  check_nsa(a);
  using A = acc_t<T>;
  const auto record = [&](Stage stage, const Kernel& k) {
    if (ran) ran->add(stage, k);
  };
  Stream& s = dev.compute();
  Memory& mem = dev.mem;
  const int64_t rows = a.B * a.T, keys = a.B * a.compressed() * a.HKV, width = a.H * a.v_dim();
  NsaSaved<T> v;
  // The window branch reads x alone: it may run beside the others, and the gates after it.
  const bool beside = leaves_idle(a);
  Branch branch(dev, beside);
  const auto window = [&] {
    v.o_window = mem.take<T>(rows * width, "window attention", life);
    v.lse_window = mem.take<A>(rows * a.H, "window log-sum-exp", life);
    dev.mark("window branch");
    record(Stage::window,
           attention_forward<T>(branch.stream(), v.o_window, v.lse_window, x, x + a.k(2), x + a.v(2), window_shape(a)));
    if (of_gates) of_gates(branch.stream());
  };
  if (beside) window();
  v.k = mem.take<T>(keys * a.D, "compressed keys", life);
  v.v = mem.take<T>(keys * a.v_dim(), "compressed values", life);
  v.o_compressed = mem.take<T>(rows * width, "compressed attention", life);
  v.lse_compressed = mem.take<A>(rows * a.H, "compressed log-sum-exp", life);
  if (a.compressed() > 0) {
    dev.mark("compression");
    if (a.phi == Phi::mean) {
      record(Stage::compression, nsa_mean<T>(s, v.k, v.v, x, a));
    } else {
      record(Stage::compression, compress<T>(dev, v.k, x + a.k(0), of_keys(phi), a));
      record(Stage::compression, compress<T>(dev, v.v, x + a.v(0), of_values(phi), a.of_values()));
    }
    dev.mark("compressed branch");
    record(Stage::compressed,
           attention_forward<T>(s, v.o_compressed, v.lse_compressed, x, v.k, v.v, compressed_shape(a)));
  } else {
    s.zero(v.o_compressed, rows * width * int64_t(sizeof(T)));
    if constexpr (std::is_same_v<A, float>) ops::fill(s, v.lse_compressed.get(), -INFINITY, rows * a.H);
    else s.enqueue([p = v.lse_compressed.get(), n = rows * a.H] { std::fill(p, p + n, -INFINITY); });
  }
  if (saved && saved->indices) {
    v.indices = std::move(saved->indices);
  } else {
    const int64_t words = nsa_selected_words(dev, a, dtype_of<T>) / int64_t(sizeof(int32_t));
    v.indices = mem.take<int32_t>(indices(a) + words, "selected blocks", Purpose::activations);
    {
      Buffer<A> scratch = mem.take<A>(nsa_topk_scratch<T>(a), "selection workspace");
      dev.mark("selection");
      record(Stage::selection, nsa_topk<T>(s, v.indices, x, v.k, v.lse_compressed, scratch, a));
    }
  }
  v.o_selected = mem.take<T>(rows * width, "selected attention", life);
  v.lse_selected = mem.take<A>(rows * a.H, "selected log-sum-exp", life);
  {
    char* const words = words_of(dev, v, a);
    Buffer<char> scratch;
    if (!words) scratch = mem.take<char>(nsa_selected_forward_scratch<T>(dev, a), "selected attention workspace");
    dev.mark("selected branch");
    record(Stage::selected, nsa_selected_forward<T>(s, v.o_selected, v.lse_selected, x, x + a.k(1), x + a.v(1),
                                                    v.indices, words ? words : scratch.get(), a));
  }
  if (!beside) window();
  branch.join();
  dev.mark("gates");
  record(Stage::gates, nsa_combine<T>(s, o, v.o_compressed, v.o_selected, v.o_window, x, a, amax));
  if (saved) *saved = std::move(v);
}

template <class T>
bool nsa_begins_at_once(const Device& dev, const NsaShape& a) {
  return nsa_selected_in_tiles(dev, a, dtype_of<T>);
}

template <class T>
bool nsa_backward_turns(const Device& dev, const NsaShape& a) {
  return nsa_selected_turns(dev, a, dtype_of<T>);
}

template <class T>
NsaBegun<T> nsa_begin_backward(Device& dev, Buffer<T>* o, T* dx, const T* d_o, const T* x, NsaSaved<T>* saved,
                               const NsaShape& a) {
  NsaBegun<T> begun;
  begun.has = true;
  std::vector<BackwardStart<T>> starts;
  const auto begin = [&](int i, Buffer<T>* of, Buffer<acc_t<T>>* lse) {
    begun.stats[i] = dev.mem.take<acc_t<T>>(attention_stats(a.B, a.T, a.H), "statistics of queries");
    starts.push_back({of->get(), lse->get(), {x + a.gate(i), dx + a.gate(i), a.ld}, begun.stats[i].get()});
  };
  if (a.compressed() > 0) begin(0, &saved->o_compressed, &saved->lse_compressed);
  begin(1, &saved->o_selected, &saved->lse_selected);
  begin(2, &saved->o_window, &saved->lse_window);
  dev.mark("statistics of queries, backward");
  attention_begin_backward<T>(dev.compute(), starts, d_o, window_shape(a), o ? saved->o_selected.get() : nullptr);
  if (o) *o = std::move(saved->o_selected);
  for (Buffer<T>* of : {&saved->o_compressed, &saved->o_selected, &saved->o_window}) of->reset();
  for (Buffer<acc_t<T>>* lse : {&saved->lse_compressed, &saved->lse_selected, &saved->lse_window}) lse->reset();
  return begun;
}

template <class T, class G>
void nsa_backward(Device& dev, T* dx, PhiWeights<G> dphi, const T* d_o, const T* x, PhiWeights<const T> phi,
                  NsaSaved<T> saved, const NsaShape& a, NsaKernels* ran, NsaBegun<T> begun,
                  const std::function<void(Stream&)>& of_gates, const acc_t<T>* rotary) {
  check_nsa(a);
  using A = acc_t<T>;
  const auto record = [&](Stage stage, const Kernel& k) {
    if (ran) ran->add(stage, k);
  };
  Stream& s = dev.compute();
  Memory& mem = dev.mem;
  const auto gate = [&](int branch) { return Gate<T>{x + a.gate(branch), dx + a.gate(branch), a.ld}; };

  const AttentionShape w = window_shape(a);
  const bool compressed = a.compressed() > 0;
  const bool waits = !begun.has;
  if (waits && nsa_begins_at_once<T>(dev, a)) begun = nsa_begin_backward<T>(dev, nullptr, dx, d_o, x, &saved, a);
  const StatsAt stats_at = begun.has ? StatsAt::elsewhere : StatsAt::workspace;

  // dq is columns of dx: the window branch writes it, the selected branch adds its own and the compressed branch's.
  Buffer<A> window_workspace =
      mem.take<A>(attention_backward_workspace<T>(w, BackwardKernels::suits, stats_at), "attention workspace");
  const bool beside = leaves_idle(a);
  Branch branch(dev, beside);
  dev.mark("window branch, backward");
  record(Stage::window_backward,
         attention_backward<T>(branch.stream(), dx, dx + a.k(2), dx + a.v(2), d_o, x, x + a.k(2), x + a.v(2),
                               saved.o_window, saved.lse_window, window_workspace, w, gate(2), begun.stats[2]));
  const auto window_done = [&] { window_workspace.reset(), saved.o_window.reset(), saved.lse_window.reset(); };
  if (!beside) window_done();
  // Small work finds room beside the other branches, if they have begun.
  const bool early = beside && begun.has;
  const auto rest = [&](Stream& on) {
    if (!compressed) zero_columns(on, dx + a.gate(0), a.H, a);
    zero_columns(on, dx + a.columns(), a.ld - a.columns(), a);
    if (of_gates) dev.mark("gates, backward"), of_gates(on);
  };
  if (early) rest(branch.stream());

  Buffer<T> dk, dv, dq;  // of the compressed branch
  if (compressed) {
    const AttentionShape c = compressed_shape(a);
    dk = mem.take<T>(saved.k.size(), "gradient of compressed keys");
    dv = mem.take<T>(saved.v.size(), "gradient of compressed values");
    const T* const o = saved.o_compressed;
    if (!begun.has && a.v_dim() == a.D) dq = std::move(saved.o_compressed);
    else dq = mem.take<T>(a.B * a.T * a.H * a.D, "gradient of compressed branch's q");
    Buffer<A> workspace =
        mem.take<A>(attention_backward_workspace<T>(c, BackwardKernels::suits, stats_at), "attention workspace");
    dev.mark("compressed branch, backward");
    record(Stage::compressed_backward,
           attention_backward<T>(s, dq, dk, dv, d_o, x, saved.k, saved.v, o, saved.lse_compressed, workspace, c,
                                 gate(0), begun.stats[0]));
  }
  saved.k.reset(), saved.v.reset(), saved.o_compressed.reset(), saved.lse_compressed.reset();
  const auto join = [&] { branch.join(); };
  if (waits) {
    join();
    if (beside) window_done();
  }
  {
    Buffer<char> scratch =
        mem.take<char>(nsa_selected_backward_scratch<T>(dev, a, stats_at), "selected attention workspace");
    dev.mark("selected branch, backward");
    record(Stage::selected_backward,
           nsa_selected_backward<T>(
               s, dx, dx + a.k(1), dx + a.v(1), dq, d_o, x, x + a.k(1), x + a.v(1), saved.o_selected,
               saved.lse_selected, saved.indices, scratch, a, gate(1),
               {waits ? std::function<void()>() : join, begun.stats[1], words_of(dev, saved, a), rotary}));
  }
  if (beside && !waits) window_done();
  dq.reset(), saved.o_selected.reset(), saved.lse_selected.reset(), saved.indices.reset();

  // The top-k has no gradient, so dk and dv of the compressed branch are all that phi gets.
  if (compressed) dev.mark("compression, backward");
  if (compressed && a.phi == Phi::mean) {
    record(Stage::compression_backward, nsa_mean_backward<T>(s, dx, dk, dv, a));
  } else if (compressed) {
    record(Stage::compression_backward,
           compress_backward<T, G>(dev, dx + a.k(0), of_keys(dphi), dk, x + a.k(0), of_keys(phi), a));
    dk.reset();
    record(Stage::compression_backward,
           compress_backward<T, G>(dev, dx + a.v(0), of_values(dphi), dv, x + a.v(0), of_values(phi), a.of_values()));
  } else {
    zero_gradients_of_phi(s, dx + a.k(0), of_keys(dphi), a);
    zero_gradients_of_phi(s, dx + a.v(0), of_values(dphi), a.of_values());
  }
  if (!early) rest(s);
}

#define INSTANTIATE(T)                                                                                          \
  template void nsa_forward(Device&, T*, NsaSaved<T>*, const T*, PhiWeights<const T>, const NsaShape&, Purpose, \
                            NsaKernels*, float*, const std::function<void(Stream&)>&);                          \
  template bool nsa_begins_at_once<T>(const Device&, const NsaShape&);                                          \
  template bool nsa_backward_turns<T>(const Device&, const NsaShape&);                                          \
  template NsaBegun<T> nsa_begin_backward(Device&, Buffer<T>*, T*, const T*, const T*, NsaSaved<T>*, const NsaShape&);
#define INSTANTIATE_G(T, G)                                                                                    \
  template void nsa_backward(Device&, T*, PhiWeights<G>, const T*, const T*, PhiWeights<const T>, NsaSaved<T>, \
                             const NsaShape&, NsaKernels*, NsaBegun<T>, const std::function<void(Stream&)>&,   \
                             const acc_t<T>*);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bf16)
INSTANTIATE_G(float, float)
INSTANTIATE_G(double, double)
INSTANTIATE_G(bf16, float)
INSTANTIATE_G(bf16, bf16)
