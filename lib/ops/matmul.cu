// Matrix products: cuBLASLt on a GPU, OpenBLAS (in cpu/ops.h) on a CPU. On Hopper a product makes the activation beside
// it in a kernel of our own, where that changes no bit (matmul_activation.cuh).
//
// cuBLASLt thinks in column-major matrices. A row-major (r, c) matrix is, byte for byte, a column-major (c, r) one, so
// the row-major Z = X Y is computed as the column-major Z^T = Y^T X^T: operands change places and keep their bytes. A
// bias along the columns of Z lies along the rows of Z^T, which is what cuBLASLt's bias epilogue adds.
#include "cpu/fp8.h"
#include "cpu/ops.h"
#include "lib/device/device.h"
#include "lib/ops/ops.h"

#if FSDP_CUDA
#include <array>
#include <map>

#include "lib/ops/matmul_activation.cuh"
#include "lib/ops/matmul_cublas.cuh"
#endif

namespace ops {

// Hopper's kernels may use 64 MiB for split-K sums and scheduling; what is left of them holds the pieces of columns'
// sums (model/schedule.h), for which no plan grew.
void keep_workspace(Device& dev) {
  if (dev.backend == Backend::cpu) return;
  dev.blas_workspace_bytes = int64_t(60) << 20;
  dev.blas_workspace = dev.mem.keep<char>(dev.blas_workspace_bytes, "cuBLASLt workspace", Purpose::workspace);
}

// May one call make both the product and its GELU? See gelu_matmul. Inner dimension up to which that may pay: 1024.
static bool may_fuse_gelu(const Device& dev, int64_t K) { return dev.fuse && dev.tune_matmuls && K <= 1024; }
// And, by our own kernels, a product and any activation, forward or backward? See one_kernel_or_two.
template <class T>
static bool may_fuse_activation(const Device& dev) {
  return std::is_same_v<T, bf16> && dev.fuse && dev.tune_matmuls && dev.compute_capability == 90;
}

#if FSDP_CUDA
namespace {

void multiply(Stream& s, const Call& c) {
  const Mode mode = s.device().mode;
  if (mode == Mode::plan || c.m == 0 || c.n == 0) return;
  ASSERT(&s == &s.device().compute());  // there is one workspace
  Plan& p = plan_of(s.device(), c);
  if (mode == Mode::run) launch(s, c, p);
  else if (!s.device().tune_matmuls) check_possible(c, p);
  else if (!p.tuned) tune(s, c, p);
}

// The products of ops.h. Shapes in the comments are column major: a row-major w (N,K) reads (K,N).
template <class T>
Call forward_call(T* y, const T* x, const T* w, const T* bias, const T* residual, int64_t M, int64_t N, int64_t K) {
  Call c;  // y (N,M) = w (K,N)^T x (K,M)
  c.m = N, c.n = M, c.k = K, c.in_a = c.in_b = c.out = dtype_of<T>;
  c.a = w, c.transpose_a = true, c.b = x, c.c = residual, c.d = y;
  if (bias) c.bias = bias, c.epilogue = CUBLASLT_EPILOGUE_BIAS;
  return c;
}
template <class T>
Call dgrad_call(T* dx, const T* dy, const T* w, int64_t M, int64_t N, int64_t K, bool accumulate) {
  Call c;  // dx (K,M) = w (K,N) dy (N,M)
  c.m = K, c.n = M, c.k = N, c.in_a = c.in_b = c.out = dtype_of<T>;
  c.a = w, c.b = dy, c.c = accumulate ? dx : nullptr, c.d = dx;
  return c;
}
template <class T, class G>
Call wgrad_call(G* dw, const T* dy, const T* x, int64_t M, int64_t N, int64_t K, bool accumulate) {
  Call c;  // dw (K,N) = x (K,M) dy (N,M)^T
  c.m = K, c.n = N, c.k = M, c.in_a = c.in_b = dtype_of<T>, c.out = dtype_of<G>;
  c.a = x, c.b = dy, c.transpose_b = true, c.c = accumulate ? dw : nullptr, c.d = dw;
  return c;
}

template <class T>
Call fp8_call(T* z, const Fp8Factor& a, const Fp8Factor& b, Fp8Sums sums, const T* bias, const T* residual, int64_t M,
              int64_t N, int64_t K) {
  const T* const none = nullptr;
  Call c = forward_call<T>(z, none, none, bias, residual, M, N, K);  // the only layout that fp8 has
  c.a = b.data, c.in_a = b.format, c.unscale_a = b.unscale;
  c.b = a.data, c.in_b = a.format, c.unscale_b = a.unscale;
  c.fast_sums = sums == Fp8Sums::fast, c.scaling = a.scaling;
  return c;
}

// How many g are further from gelu(h) than roundings of h and of g explain: gelu's slope is at most 1.13 and
// |gelu(h)| <= |h|, so two roundings of 2^-8 make at most 2.13 * 2^-8 |h|. The sum is of whole numbers: any order will
// do.
__global__ void wrong_gelus_kernel(unsigned long long* out, const bf16* g, const bf16* h, int64_t n) {
  unsigned long long wrong = 0;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    const float x = float(h[i]), exact = x / (1.0f + expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
    wrong += !(fabsf(float(g[i]) - exact) <= 0x1p-6f * fabsf(x) + 1e-30f);
  }
  atomicAdd(out, wrong);
}

// bf16 alone: cuBLASLt's fused GELU uses the hardware's tanh, which is good to bf16.
void gelu_matmul(Stream& s, bf16* g, bf16* h, const bf16* x, const bf16* w, const bf16* bias, int64_t M, int64_t N,
                 int64_t K) {
  const Mode mode = s.device().mode;
  if (mode == Mode::plan || M * N == 0) return;
  const Call plain = forward_call<bf16>(h, x, w, bias, nullptr, M, N, K);
  Call fused = plain;
  fused.d = g, fused.aux = h;
  fused.epilogue = bias ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
  const auto separate = [&] {
    launch(s, plain, plan_of(s.device(), plain));
    gpu::gelu_forward(s.cuda(), g, static_cast<const bf16*>(h), M * N);
  };

  if (mode == Mode::run) {
    const auto at = may_fuse_gelu(s.device(), K) ? plans().find(key_of(s.device(), fused)) : plans().end();
    if (at != plans().end() && at->second.pays) launch(s, fused, at->second);
    else separate();
    return;
  }
  multiply(s, plain);  // tunes it
  // The fused form differs in g's last bits, so a race between timings must not decide. Where the product is short the
  // saved pass over h counts, where it is long the heavier epilogue does. H200, fused and separate, ms: K 768,
  // M 32768, N 3072: 0.244 and 0.295; M 2048: 0.020 and 0.023; K 4096, M 32768, N 16384: 6.56 and 6.41.
  if (!may_fuse_gelu(s.device(), K)) return;
  Plan& p = plan_of(s.device(), fused);
  if (p.tuned || !p.possible) return;
  tune(s, fused, p);
  fill_inputs(s, plain);
  separate();
  const auto bits = checksum(s, h, Dtype::bf16, M * N);
  unsigned long long unused = 0;
  if (!result_of(s, fused, p, p.algo, &unused) || checksum(s, h, Dtype::bf16, M * N) != bits) return;
  p.pays =
      counted(s, [&](unsigned long long* at) { wrong_gelus_kernel<<<1024, 256, 0, s.cuda()>>>(at, g, h, M * N); }) == 0;
}

// Products with an activation behind them, by our own kernels where these give the bits of cuBLASLt's product and the
// activation's kernel: which of them runs then never changes a result. FusedKey: pass, kind, M, F, K, GPU.
using FusedKey = std::array<int64_t, 6>;
std::map<FusedKey, bool>& fusions() {  // that have been compared: do they agree?
  static std::map<FusedKey, bool> all;
  return all;
}
bool agrees(const FusedKey& key) {
  const auto found = fusions().find(key);
  return found != fusions().end() && found->second;
}
// in_one, apart: make g (M,F) and h (M,F) or (M,2F).
template <class InOne, class Apart>
void one_kernel_or_two(Stream& s, const FusedKey& key, const Call& product, bool can, bf16* g, bf16* h, InOne in_one,
                       Apart apart) {
  if (s.device().mode == Mode::run) return can && agrees(key) ? in_one() : apart();
  multiply(s, product);  // tunes it
  if (!can || fusions().count(key)) return;
  const int64_t n = key[2] * key[3], hidden = n * (Activation(key[1]) == Activation::gelu ? 1 : 2);
  std::array<unsigned long long, 2> bits[2];
  for (int one = 0; one < 2; ++one) {
    fill(s, g, Dtype::bf16, n, 6, 4), fill(s, h, Dtype::bf16, hidden, 5, 4);
    fill_inputs(s, product);
    one ? in_one() : apart();
    bits[one] = {checksum(s, g, Dtype::bf16, n), checksum(s, h, Dtype::bf16, hidden)};
  }
  fusions()[key] = bits[0] == bits[1];
}

void forward_activation(Stream& s, Activation kind, bf16* g, bf16* h, Hidden hidden, const bf16* x, const bf16* w,
                        int64_t M, int64_t F, int64_t K) {
  if (M * F == 0) return;
  bf16* const kept = s.device().mode == Mode::run && hidden == Hidden::scratch ? nullptr : h;
  const bf16* const none = nullptr;
  const Call product = forward_call<bf16>(h, x, w, none, none, M, kind == Activation::gelu ? F : 2 * F, K);
  one_kernel_or_two(
      s, {int64_t(Pass::forward), int64_t(kind), M, F, K, s.device().ordinal}, product,
      sm90::takes_activation(g, h, x, w, M, F, K), g, h,
      [&] { sm90::forward_activation(s.cuda(), kind, g, kept, x, w, M, F, K); },
      [&] {
        launch(s, product, plan_of(s.device(), product));
        if (kind == Activation::gelu) gpu::gelu_forward<bf16>(s.cuda(), g, h, M * F);
        else gpu::swiglu_forward<bf16>(s.cuda(), g, h, M, F);
      });
}
// H200, two kernels and one, ms, 100 and more in a row: GELU, M 32768, N 768, F 3072: 0.412 and 0.340; M 2048: 0.0271
// and 0.0222; M 16384, N 4096, F 16384: 3.63 and 3.48; SwiGLU, M 8192, N 4096, F 14336: 1.71 and 1.54.
void dgrad_activation(Stream& s, Activation kind, bf16* g, Activated activated, bf16* h_dh, const bf16* dy,
                      const bf16* w, int64_t M, int64_t N, int64_t F) {
  if (M * F == 0) return;
  bf16* const made = s.device().mode == Mode::run && activated == Activated::given ? nullptr : g;
  const Call product = dgrad_call<bf16>(g, dy, w, M, N, F, /*accumulate=*/false);
  one_kernel_or_two(
      s, {int64_t(Pass::backward), int64_t(kind), M, F, N, s.device().ordinal}, product,
      sm90::takes_activation(g, h_dh, dy, w, M, F, N), g, h_dh,
      [&] { sm90::dgrad_activation(s.cuda(), kind, made, h_dh, dy, w, M, N, F); },
      [&] {
        launch(s, product, plan_of(s.device(), product));
        if (kind == Activation::gelu) gpu::gelu_backward(s.cuda(), g, h_dh, M * F);
        else gpu::swiglu_backward(s.cuda(), g, h_dh, M, F);
      });
}

[[noreturn]] void refuse_double(const char* name) { throw Error(strf("%s: fp64 runs on the CPU backend only", name)); }

}  // namespace
#endif  // FSDP_CUDA

// For the estimate: z (M,N), of Z, = x (M,K) y (K,N), of T; others: how many more matrices like z are read or written.
// The share is what a step of the preset rope reaches on one H200, and of fp32 what those of `mlp-1024` and `mlp-4096`
// do. TF32 has half of bf16's peak on every chip.
template <class T, class Z>
static Cost product(const Device& dev, int64_t M, int64_t N, int64_t K, int others) {
  Cost c{Work::matmul};
  const bool fp32 = dtype_of<T> == Dtype::f32;
  c.flops = 2.0 * double(M) * double(N) * double(K), c.share = !fp32 ? 0.69 : dev.tf32 ? 0.35 : 0.77;
  c.dtype = fp32 && dev.tf32 ? Dtype::bf16 : dtype_of<T>;
  c.bytes = double(M * K + K * N) * sizeof(T) + double(M * N) * (1 + others) * sizeof(Z);
  return c;
}

// Not fused, y's bias and residual are kernels of their own behind the product, which is given no bias, and what it
// accumulates to: y itself or nothing. False: the product takes both.
template <class T, class F>
static bool apart(Stream& s, T* y, const T* bias, const T* residual, int64_t M, int64_t N, F product) {
  const bool accumulates = residual == y;
  if (s.device().fuse || (!bias && (!residual || accumulates))) return false;
  product(nullptr, accumulates ? residual : nullptr);
  if (bias) add_bias(s, y, bias, M, N, N);
  if (residual && !accumulates) add<T>(s, y, y, residual, M * N);
  return true;
}

template <class T>
void matmul(Stream& s, T* y, const T* x, const T* w, const T* bias, const T* residual, int64_t M, int64_t N,
            int64_t K) {
  if (apart(s, y, bias, residual, M, N, [&](const T* none, const T* own) { matmul(s, y, x, w, none, own, M, N, K); }))
    return;
  if (s.device().mode == Mode::plan) return s.spend(product<T, T>(s.device(), M, N, K, residual != nullptr));
#if FSDP_CUDA
  if (s.on_gpu()) {
    if constexpr (std::is_same_v<T, double>) refuse_double("matmul");
    else return multiply(s, forward_call(y, x, w, bias, residual, M, N, K));
  }
#endif
  s.enqueue([=] { cpu::matmul(y, x, w, bias, residual, M, N, K); });
}

template <class T>
void matmul_gelu(Stream& s, T* g, T* h, Hidden hidden, const T* x, const T* w, const T* bias, int64_t M, int64_t N,
                 int64_t K) {
  const T* const none = nullptr;
  if (!s.device().fuse) {
    matmul(s, h, x, w, bias, none, M, N, K);
    return gelu_forward(s, g, h, M * N);
  }
  const bool ours = !bias && may_fuse_activation<T>(s.device());
  if (s.device().mode == Mode::plan) {
    const bool fused = ours || (std::is_same_v<T, bf16> && may_fuse_gelu(s.device(), K));
    s.spend(product<T, T>(s.device(), M, N, K, fused && !(ours && hidden == Hidden::scratch)));
    return fused ? void() : gelu_forward(s, g, h, M * N);
  }
#if FSDP_CUDA
  if (s.on_gpu()) {
    if constexpr (std::is_same_v<T, bf16>) {
      if (ours) return forward_activation(s, Activation::gelu, g, h, hidden, x, w, M, N, K);
      return gelu_matmul(s, g, h, x, w, bias, M, N, K);
    }
    matmul(s, h, x, w, bias, none, M, N, K);
    return gelu_forward(s, g, h, M * N);
  }
#endif
  s.enqueue([=] { cpu::matmul_gelu(g, h, x, w, bias, M, N, K); });
}

template <class T>
void matmul_swiglu(Stream& s, T* g, T* h, Hidden hidden, const T* x, const T* w, int64_t M, int64_t F, int64_t K) {
  const bool fused = may_fuse_activation<T>(s.device());
  if (fused && s.device().mode == Mode::plan) {
    Cost c = product<T, T>(s.device(), M, 2 * F, K, /*others=*/0);
    c.bytes += double(M * F) * (hidden == Hidden::kept ? 1 : -1) * sizeof(T);
    return s.spend(c);
  }
#if FSDP_CUDA
  if constexpr (std::is_same_v<T, bf16>)
    if (fused && s.on_gpu()) return forward_activation(s, Activation::swiglu, g, h, hidden, x, w, M, F, K);
#endif
  const T* const none = nullptr;
  matmul(s, h, x, w, none, none, M, 2 * F, K);
  swiglu_forward(s, g, h, M, F);
}

template <class T>
void matmul_dgrad(Stream& s, T* dx, const T* dy, const T* w, int64_t M, int64_t N, int64_t K, bool accumulate) {
  if (s.device().mode == Mode::plan) return s.spend(product<T, T>(s.device(), M, K, N, accumulate));
#if FSDP_CUDA
  if (s.on_gpu()) {
    if constexpr (std::is_same_v<T, double>) refuse_double("matmul_dgrad");
    else return multiply(s, dgrad_call(dx, dy, w, M, N, K, accumulate));
  }
#endif
  s.enqueue([=] { cpu::matmul_dgrad(dx, dy, w, M, N, K, accumulate); });
}

bool in_one_kernel(const Device& dev, Pass pass, Activation kind, int64_t M, int64_t F, int64_t K) {
#if FSDP_CUDA
  return may_fuse_activation<bf16>(dev) && agrees({int64_t(pass), int64_t(kind), M, F, K, dev.ordinal});
#else
  (void)dev, (void)pass, (void)kind, (void)M, (void)F, (void)K;
  return false;
#endif
}

template <class T>
void matmul_dgrad_activation(Stream& s, Activation kind, T* g, Activated activated, T* h_dh, const T* dy, const T* w,
                             int64_t M, int64_t N, int64_t F) {
  const bool fused = may_fuse_activation<T>(s.device());
  if (fused && s.device().mode == Mode::plan) {
    Cost c = product<T, T>(s.device(), M, F, N, /*others=*/kind == Activation::gelu ? 2 : 4);
    if (activated == Activated::given) c.bytes -= double(M * F) * sizeof(T);
    c.share = 0.66;  // of rope's on one H200: results/gpu-tests-2026-11-28.log
    return s.spend(c);
  }
#if FSDP_CUDA
  if constexpr (std::is_same_v<T, bf16>)
    if (fused && s.on_gpu()) return dgrad_activation(s, kind, g, activated, h_dh, dy, w, M, N, F);
#endif
  matmul_dgrad(s, g, dy, w, M, N, F);
  if (kind == Activation::gelu) gelu_backward(s, g, h_dh, M * F);
  else swiglu_backward(s, g, h_dh, M, F);
}

template <class T, class G>
void matmul_wgrad(Stream& s, G* dw, const T* dy, const T* x, int64_t M, int64_t N, int64_t K, bool accumulate) {
  if (s.device().mode == Mode::plan) return s.spend(product<T, G>(s.device(), N, K, M, accumulate));
#if FSDP_CUDA
  if (s.on_gpu()) {
    if constexpr (std::is_same_v<T, double>) refuse_double("matmul_wgrad");
    else return multiply(s, wgrad_call(dw, dy, x, M, N, K, accumulate));
  }
#endif
  s.enqueue([=] { cpu::matmul_wgrad(dw, dy, x, M, N, K, accumulate); });
}

// The share of the peak: results/step-shares-2gpu.jsonl, row `rope, fp8`, less the head's products, which are bf16's.
template <class T>
void matmul_fp8(Stream& s, T* z, const Fp8Factor& a, const Fp8Factor& b, Fp8Sums sums, const T* bias, const T* residual,
                int64_t M, int64_t N, int64_t K) {
  ASSERT(a.scaling == b.scaling);
  const auto product_alone = [&](const T* none, const T* own) { matmul_fp8<T>(s, z, a, b, sums, none, own, M, N, K); };
  if (apart(s, z, bias, residual, M, N, product_alone)) return;
  if (s.device().mode == Mode::plan) {
    Cost c = product<uint8_t, T>(s.device(), M, N, K, residual != nullptr);
    c.share = 0.65, c.dtype = a.format;
    return s.spend(c);
  }
#if FSDP_CUDA
  if (s.on_gpu()) {
    ASSERT(M % 16 == 0 && N % 16 == 0 && K % 16 == 0);
    ASSERT(alignment(a.unscale) >= 16 && alignment(b.unscale) >= 16);
    if constexpr (std::is_same_v<T, double>) refuse_double("matmul_fp8");
    else return multiply(s, fp8_call(z, a, b, sums, bias, residual, M, N, K));
  }
#endif
  s.enqueue([=] { cpu::matmul_fp8(z, a, b, bias, residual, M, N, K); });
}

#define FOR(T)                                                                                                        \
  template void matmul(Stream&, T*, const T*, const T*, const T*, const T*, int64_t, int64_t, int64_t);               \
  template void matmul_gelu(Stream&, T*, T*, Hidden, const T*, const T*, const T*, int64_t, int64_t, int64_t);        \
  template void matmul_swiglu(Stream&, T*, T*, Hidden, const T*, const T*, int64_t, int64_t, int64_t);                \
  template void matmul_dgrad(Stream&, T*, const T*, const T*, int64_t, int64_t, int64_t, bool);                       \
  template void matmul_dgrad_activation(Stream&, Activation, T*, Activated, T*, const T*, const T*, int64_t, int64_t, \
                                        int64_t);                                                                     \
  template void matmul_wgrad(Stream&, T*, const T*, const T*, int64_t, int64_t, int64_t, bool);                       \
  template void matmul_fp8(Stream&, T*, const Fp8Factor&, const Fp8Factor&, Fp8Sums, const T*, const T*, int64_t,     \
                           int64_t, int64_t);
FOR(float)
FOR(bf16)
FOR(double)
#undef FOR
template void matmul_wgrad(Stream&, float*, const bf16*, const bf16*, int64_t, int64_t, int64_t, bool);

}  // namespace ops
