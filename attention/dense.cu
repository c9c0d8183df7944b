#include "attention/dense.h"

#include <algorithm>
#include <initializer_list>

#include "attention/dq_order.h"
#include "attention/kv_parts.cuh"
#include "cpu/attention.h"

#if FSDP_CUDA
#include "attention/fp32.cuh"
#include "attention/prepare.cuh"
#include "attention/sm80.cuh"
#include "attention/sm90_backward_pair.cuh"
#include "attention/sm90_backward.cuh"
#include "attention/sm90_forward.cuh"
#endif

std::string name_of(const Kernel& k) { return !k.code ? "" : *k.variant ? strf("%s, %s", k.code, k.variant) : k.code; }

static void check(const AttentionShape& a) {
  if (a.B < 1 || a.T < 1 || a.D < 1 || a.DV < 0 || a.HKV < 1 || a.H < 1 || a.H % a.HKV || !(a.scale > 0))
    throw Error(
        strf("attention: bad shape B %lld T %lld H %lld HKV %lld D %lld DV %lld scale %g: all must be positive and HKV "
             "must divide H",
             (long long)a.B, (long long)a.T, (long long)a.H, (long long)a.HKV, (long long)a.D, (long long)a.v_dim(),
             a.scale));
  if (a.sees == Sees::compressed) {
    if (a.keys < 0 || a.block < 1 || a.stride < 1)
      throw Error(strf("attention: bad compressed keys: keys %lld block %lld stride %lld", (long long)a.keys,
                       (long long)a.block, (long long)a.stride));
  } else if (a.keys && a.keys != a.T) {
    throw Error(strf("attention: keys %lld: only compressed ones may be another number than T %lld", (long long)a.keys,
                     (long long)a.T));
  } else if (a.sees == Sees::window && a.window < 1) {
    throw Error(strf("attention: window %lld: it holds at least the query's own key", (long long)a.window));
  }
}

// Does one kernel make all gradients, or a pair of them? The one's blocks wait for each other while they begin, the
// longer the more tiles of keys there are, and walk the longer the more heads share a key: it wants groups, and enough
// blocks for a large GPU. Under a window, where summing dq in order takes longer than two products, it is slower at
// every length. Measured on an H200: results/gpu-tests-2026-11-27.log; compressed keys,
// results/gpu-tests-2026-11-28.log.
static bool in_one(const AttentionShape& a, BackwardKernels kernels) {
  if (a.sees != Sees::causal || a.D != a.v_dim() || kernels == BackwardKernels::pair) return false;
  if (kernels == BackwardKernels::one) return true;
  const int64_t units = a.B * a.HKV;
  if (units * ((a.T + 127) / 128) < 256) return false;
  if (a.H == a.HKV) return a.D == 128 && a.T >= 8192;
  return a.D == 128 || (a.D == 64 && units >= 8);
}
// The same for compressed keys: in how many parts are the heads of a group, or 0 for the pair? As few as give each
// multiprocessor of a large GPU a block in a round. With few rounds it is slower: blocks wait for the round before.
static int parts_in_one(const AttentionShape& a, BackwardKernels kernels) {
  if (a.sees != Sees::compressed || !a.keys || a.D != a.v_dim() || kernels == BackwardKernels::pair) return 0;
  if ((a.keys - 1) * a.stride >= a.T) return 0;  // there are some that nobody sees
  if (a.T > 16384 * 128 * a.stride) return 0;    // more blocks than a launch has
  const attention::Problem p(a);
  int most = 1;
  for (int parts = 1; parts <= p.group; ++parts) {
    if (p.group % parts) continue;
    most = parts;
    const attention::CompressedDqOrder order(p, int(a.stride), parts);
    if (order.chunks >= 16 && order.blocks_of_round() >= 128) return parts;
  }
  return kernels == BackwardKernels::one ? most : 0;
}
// Calls f with the order of the one kernel's blocks and with its mask; false: it is the pair's.
template <class F>
static bool with_order(const AttentionShape& a, BackwardKernels kernels, F f) {
  const attention::Problem p(a);
  if (in_one(a, kernels)) return f(attention::DqOrder(p), attention::Causal(a)), true;
  const int parts = parts_in_one(a, kernels);
  if (parts == 0) return false;
  f(attention::CompressedDqOrder(p, int(a.stride), parts), attention::Compressed(a));
  return true;
}

#if FSDP_CUDA
namespace attention {

template <class E>
static void check(int arch, const Problem& a, const AttentionShape& s, std::initializer_list<const void*> addresses) {
  constexpr bool narrow = std::is_same_v<E, bf16>;
  if (!has_gpu_kernels(dtype_of<E>, a.D, a.DV))
    throw Error(strf("attention: no %s kernel for head dims %d and %d of keys and values on a GPU: %s",
                     name_of(dtype_of<E>), a.D, a.DV,
                     narrow ? "64, 128, and 192 with 128 have one" : "equal multiples of 8 up to 128 have one"));
  if (a.D == 192 && has_small_memory(arch))
    throw Error("attention: keys of 192 need a GPU with more than 99 KiB of shared memory for a block");
  if (!narrow && (a.ld_v != a.ld_kv || a.ld_dv != a.ld_dkv))
    throw Error("attention: float kernels want rows of keys and of values equally far apart");
  bool aligned = true;  // for copies of 16 bytes
  for (int64_t ld : {a.ld_q, a.ld_kv, a.ld_v, a.ld_o, a.ld_dq, a.ld_dkv, a.ld_dv})
    aligned = aligned && ld * sizeof(E) % 16 == 0;
  for (const void* p : addresses) aligned = aligned && reinterpret_cast<uintptr_t>(p) % 16 == 0;
  if (!aligned) throw Error("attention: addresses and row strides must be multiples of 16 bytes on a GPU");
  const bool far = s.sees == Sees::compressed && s.stride * (a.keys + 128) + s.block > 1ll << 31;
  if (s.T > 1 << 30 || s.keys > 1 << 30 || far || s.B * s.H * s.T / 32 > 2000000000ll)
    throw Error("attention: too many rows for one launch");
}

}  // namespace attention

namespace gpu {

// Each is made for one head dim and one rule of who sees what: there is no general kernel.
static Kernel launched(bool hopper, bool narrow) { return {!narrow ? "fp32" : hopper ? "sm90" : "sm80"}; }

template <class T>
Kernel attention_forward(cudaStream_t stream, int arch, T* o, float* lse, const T* q, const T* k, const T* v,
                         const AttentionShape& shape, float* amax) {
  using namespace attention;
  const Problem a(shape);
  attention::check<T>(arch, a, shape, {o, q, k, v});
  const bool hopper = arch == 90;
  with_mask(shape, [&](const auto& mask) {
    if constexpr (std::is_same_v<T, bf16>) {
      using Mask = std::decay_t<decltype(mask)>;
      auto run = [&](auto forward) { forward(stream, o, lse, amax, q, k, v, a, mask); };
      if (a.D == 192) run(hopper ? sm90::forward<192, 128, Mask> : sm80::forward<192, 128, Mask>);
      else if (a.D == 128) run(hopper ? sm90::forward<128, 128, Mask> : sm80::forward<128, 128, Mask>);
      else run(hopper ? sm90::forward<64, 64, Mask> : sm80::forward<64, 64, Mask>);
    } else {
      if (amax) throw Error("attention: fp32 kernels do not find the largest numbers of their output");
      a.D > 64 ? fp32::forward<128>(stream, o, lse, q, k, v, a, mask)
               : fp32::forward<64>(stream, o, lse, q, k, v, a, mask);
    }
  });
  return launched(hopper, std::is_same_v<T, bf16>);
}

template <class T>
Kernel attention_backward(cudaStream_t stream, int arch, T* dq, T* dk, T* dv, const T* d_o, const T* q, const T* k,
                          const T* v, const T* o, const float* lse, float* workspace, const AttentionShape& shape,
                          Gate<T> gate, BackwardKernels kernels, const float* stats, const float* rotary) {
  using namespace attention;
  const Problem a(shape);
  attention::check<T>(arch, a, shape, {dq, dk, dv, d_o, q, k, v, o, workspace});
  const bool hopper = arch == 90;
  const int64_t rows = int64_t(a.B) * a.H * a.Tp;
  float* const more = stats ? workspace : workspace + 2 * rows;
  const float *lse2 = stats ? stats : workspace, *delta = lse2 + rows;
  if constexpr (std::is_same_v<T, bf16>) {
    const auto one = [&](const auto& order, const auto& mask) {
      using Order = std::decay_t<decltype(order)>;
      using Mask = std::decay_t<decltype(mask)>;
      auto* counts = reinterpret_cast<unsigned*>(more + order.sums(a.D));
      const int n = order.launches() * order.counts();
      if (!stats) prepare(stream, workspace, d_o, o, lse, a, gate, counts, n);
      else CUDA_CHECK(cudaMemsetAsync(counts, 0, n * sizeof(unsigned), stream));
      const auto in_one = [&](auto turns) {
        constexpr bool t = turns.value;
        return a.D == 128 ? sm90::backward_in_one<128, Mask, Order, t> : sm90::backward_in_one<64, Mask, Order, t>;
      };
      auto* run = in_one(std::false_type());
      if constexpr (std::is_same_v<Mask, Causal>)
        if (rotary) run = in_one(std::true_type());
      for (int i = 0; i < order.launches(); ++i)
        run(stream, dq, dk, dv, d_o, q, k, v, lse2, delta, a, mask, order.launch(i), more, counts + i * order.counts(),
            rotary);
    };
    if (hopper && with_order(shape, kernels, one)) return {"sm90", "five products"};
    ASSERT(!rotary);
    if (!stats) prepare(stream, workspace, d_o, o, lse, a, gate);
    const Parts parts = {dk, dv, more, kv_parts(shape)};
    with_mask(shape, [&](const auto& mask) {
      using Mask = std::decay_t<decltype(mask)>;
      auto run = [&](auto backward) { backward(stream, dq, parts, d_o, q, k, v, lse2, delta, a, mask); };
      if (a.D == 192) run(hopper ? sm90::backward<192, 128, Mask> : sm80::backward<192, 128, Mask>);
      else if (a.D == 128) run(hopper ? sm90::backward<128, 128, Mask> : sm80::backward<128, 128, Mask>);
      else run(hopper ? sm90::backward<64, 64, Mask> : sm80::backward<64, 64, Mask>);
    });
  } else {
    if (!stats) prepare(stream, workspace, d_o, o, lse, a, gate);
    with_mask(shape, [&](const auto& mask) {
      using Mask = std::decay_t<decltype(mask)>;
      const auto run = a.D <= 64                ? fp32::backward<64, 32, Mask>
                       : has_small_memory(arch) ? fp32::backward<128, 16, Mask>
                                                : fp32::backward<128, 32, Mask>;
      run(stream, dq, dk, dv, d_o, q, k, v, lse2, delta, a, mask);
    });
  }
  return launched(hopper, std::is_same_v<T, bf16>);
}

template Kernel attention_forward(cudaStream_t, int, float*, float*, const float*, const float*, const float*,
                                  const AttentionShape&, float*);
template Kernel attention_forward(cudaStream_t, int, bf16*, float*, const bf16*, const bf16*, const bf16*,
                                  const AttentionShape&, float*);
template Kernel attention_backward(cudaStream_t, int, float*, float*, float*, const float*, const float*, const float*,
                                   const float*, const float*, const float*, float*, const AttentionShape&, Gate<float>,
                                   BackwardKernels, const float*, const float*);
template Kernel attention_backward(cudaStream_t, int, bf16*, bf16*, bf16*, const bf16*, const bf16*, const bf16*,
                                   const bf16*, const bf16*, const float*, float*, const AttentionShape&, Gate<bf16>,
                                   BackwardKernels, const float*, const float*);

}  // namespace gpu
#endif

// For the estimate. Tiles of 128 queries walk tiles of 128 keys, and spend about as long on what stands around the walk
// as on some more of those. The shares of the peak are between the wgmma kernels' short runs and their long ones, which
// lower the clock (results/kernels-1gpu.jsonl). Float's products are three of TF32, which take twice as long as bf16's,
// and reach three quarters of those shares (results/precision-2gpu.jsonl, row `fp32, dense`).
template <class T>
static Cost cost(const AttentionShape& a, AttentionPass pass) {
  const bool backward = pass == AttentionPass::backward;
  const double around = a.D > 64 && a.sees != Sees::causal ? (backward ? 1.75 : 1) : 2.5;
  double tiles = 0;
  attention::with_mask(a, [&](const auto& mask) {
    for (int q = 0; q < a.T; q += 128)
      tiles += around + std::max(0, attention::ceil_div(mask.last_key(q + 128), 128) - mask.first_key(q) / 128);
  });
  const int64_t both = a.D + a.v_dim();  // head dims
  Cost c = moves<T>((backward ? 2 : 1) * a.B * a.T * (a.H + a.HKV) * both, backward ? 3 : 1, Work::attention);
  // Products contract over keys' head dim or over values': of five in the backward three and two.
  c.flops = 2 * double(a.B * a.H * (backward ? both * 2 + a.D : both)) * tiles * 128 * 128;
  c.share = a.D > 64 ? (backward ? 0.51 : 0.72) : (backward ? 0.475 : 0.545);
  c.dtype = dtype_of<T>;
  if (backward && c.dtype == Dtype::bf16 && in_one(a, BackwardKernels::suits)) c.share = a.D > 64 ? 0.55 : 0.53;
  if (c.dtype == Dtype::f32) c.dtype = Dtype::bf16, c.flops *= 6, c.share *= 0.75;
  c.tasks = double(a.B * a.H * ((a.T + 127) / 128));
  return c;
}

template <class T>
Kernel attention_forward(Stream& s, T* o, acc_t<T>* lse, const T* q, const T* k, const T* v, const AttentionShape& a,
                         float* amax) {
  check(a);
  if (s.off()) return s.spend(cost<T>(a, AttentionPass::forward)), Kernel();
#if FSDP_CUDA
  if (s.on_gpu()) {
    if constexpr (std::is_same_v<T, double>) throw Error("attention: no fp64 kernels on a GPU");
    else return gpu::attention_forward(s.cuda(), s.device().compute_capability, o, lse, q, k, v, a, amax);
  }
#endif
  s.enqueue([=] { cpu::attention_forward(o, lse, q, k, v, a, amax); });
  return plain_loops;
}

int64_t attention_stats(int64_t B, int64_t T, int64_t H) { return 2 * B * H * ((T + 127) / 128 * 128); }

template <class T>
void attention_begin_backward(Stream& s, const std::vector<BackwardStart<T>>& starts, [[maybe_unused]] const T* d_o,
                              const AttentionShape& a, T* gated_sum) {
  check(a);
  const int64_t n = int64_t(starts.size());
  const int64_t passes = n + (gated_sum ? 2 : 1);
  if (s.off()) return s.spend(moves<T>(passes * a.B * a.T * a.H * a.v_dim(), 1, Work::attention));
#if FSDP_CUDA
  if constexpr (std::is_same_v<T, bf16>) {
    ASSERT(s.on_gpu() && n > 1 && n <= most_starts);
    attention::Starts<T> all = {};
    std::copy(starts.begin(), starts.end(), all.of);
    all.gated_sum = gated_sum;
    const auto run = n == 2 ? attention::prepare<2, T> : attention::prepare<3, T>;
    return run(s.cuda(), all, d_o, attention::Problem(a), nullptr, 0);
  }
#endif
  throw Error("attention: several backwards begin at once on a GPU, in bf16");
}

template <class T>
int64_t attention_backward_workspace(const AttentionShape& a, BackwardKernels kernels, StatsAt stats) {
  check(a);
  int64_t numbers = stats == StatsAt::workspace ? attention_stats(a.B, a.T, a.H) : 0;
  if constexpr (std::is_same_v<T, bf16>) {
    int64_t more = attention::part_numbers(a, attention::kv_parts(a));  // another GPU than Hopper has the pair
    with_order(a, kernels, [&](const auto& order, const auto& /*mask*/) {
      more = std::max(more, order.sums(a.D) + order.launches() * order.counts());
    });
    numbers += more;
  }
  return numbers;
}

template <class T>
bool attention_backward_turns(const Device& dev, const AttentionShape& a) {
  return std::is_same_v<T, bf16> && dev.compute_capability == 90 && in_one(a, BackwardKernels::suits);
}

template <class T>
Kernel attention_backward(Stream& s, T* dq, T* dk, T* dv, const T* d_o, const T* q, const T* k, const T* v, const T* o,
                          const acc_t<T>* lse, acc_t<T>* workspace, const AttentionShape& a, Gate<T> gate,
                          const acc_t<T>* stats, const acc_t<T>* rotary) {
  check(a);
  if (s.off()) return s.spend(cost<T>(a, AttentionPass::backward)), Kernel();
#if FSDP_CUDA
  if (s.on_gpu()) {
    if constexpr (std::is_same_v<T, double>) throw Error("attention: no fp64 kernels on a GPU");
    else
      return gpu::attention_backward(s.cuda(), s.device().compute_capability, dq, dk, dv, d_o, q, k, v, o, lse,
                                     workspace, a, gate, BackwardKernels::suits, stats, rotary);
  }
#endif
  (void)workspace;
  ASSERT(!stats && !rotary);
  s.enqueue([=] { cpu::attention_backward(dq, dk, dv, d_o, q, k, v, o, lse, a, gate); });
  return plain_loops;
}

#define INSTANTIATE(T)                                                                                            \
  template Kernel attention_forward(Stream&, T*, acc_t<T>*, const T*, const T*, const T*, const AttentionShape&,  \
                                    float*);                                                                      \
  template void attention_begin_backward(Stream&, const std::vector<BackwardStart<T>>&, const T*,                 \
                                         const AttentionShape&, T*);                                              \
  template int64_t attention_backward_workspace<T>(const AttentionShape&, BackwardKernels, StatsAt);              \
  template Kernel attention_backward(Stream&, T*, T*, T*, const T*, const T*, const T*, const T*, const T*,       \
                                     const acc_t<T>*, acc_t<T>*, const AttentionShape&, Gate<T>, const acc_t<T>*, \
                                     const acc_t<T>*);                                                            \
  template bool attention_backward_turns<T>(const Device&, const AttentionShape&);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bf16)
