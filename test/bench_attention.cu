// Attention on one GPU: checks every kernel against the double twin, then times them.
//
//   bench_attention check [tiny]     errors beside the bf16 twin's; tiny: few small shapes, for compute-sanitizer
//   bench_attention time [arch]      forward and backward, median of 20, causal FLOPs counted as half
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/attention.h"
#include "nsa_attention.h"
#include "attention_sm90.cuh"

namespace {

template <class T>
struct Tensors {  // q, k, v columns of one buffer with some to spare; their gradients likewise; o, do with their own
  AttentionShape a;
  int64_t rows, ld;
  std::vector<T> qkv, o, d_o, dqkv;
  std::vector<acc_t<T>> lse;
  explicit Tensors(AttentionShape s) : a(s), rows(s.B * s.T), ld((s.H + 2 * s.HKV) * s.D + 8) {
    a.ld_q = a.ld_kv = a.ld_dq = a.ld_dkv = ld, a.ld_o = a.H * a.D + 16;
    qkv.resize(rows * ld), dqkv.resize(rows * ld), o.resize(rows * a.ld_o), d_o.resize(rows * a.ld_o);
    lse.resize(a.B * a.H * a.T);
  }
  const T* q() const { return qkv.data(); }
  int64_t k_at() const { return a.H * a.D; }
  int64_t v_at() const { return (a.H + a.HKV) * a.D; }
  void twin() {
    cpu::attention_forward<T>(o.data(), lse.data(), q(), q() + k_at(), q() + v_at(), a);
    cpu::attention_backward<T>(dqkv.data(), dqkv.data() + k_at(), dqkv.data() + v_at(), d_o.data(), q(), q() + k_at(),
                               q() + v_at(), o.data(), lse.data(), a);
  }
};

struct Errors {
  double o, lse, dq, dk, dv;
};
// Norm of the difference over the reference's; the gradients' over at least a thousandth of what their factors allow.
template <class T>
Errors compare(const Tensors<T>& x, const Tensors<double>& ref) {
  auto part = [&](const std::vector<T>& y, const std::vector<double>& r, int64_t ld, int64_t from, int64_t n) {
    double d2 = 0, r2 = 0;
    for (int64_t i = 0; i < x.rows; ++i)
      for (int64_t c = from; c < from + n; ++c) {
        double want = r[i * ld + c], got = double(y[i * ld + c]);
        d2 += (got - want) * (got - want), r2 += want * want;
      }
    return std::sqrt(d2 / std::max(r2, 1e-4 * double(x.rows * n)));
  };
  double l = 0;
  for (size_t i = 0; i < ref.lse.size(); ++i) {
    double d = std::abs(double(x.lse[i]) - ref.lse[i]);
    if (!(d <= l)) l = d;
  }
  const auto& a = x.a;
  return {part(x.o, ref.o, a.ld_o, 0, a.H * a.D), l, part(x.dqkv, ref.dqkv, x.ld, 0, a.H * a.D),
          part(x.dqkv, ref.dqkv, x.ld, x.k_at(), a.HKV * a.D), part(x.dqkv, ref.dqkv, x.ld, x.v_at(), a.HKV * a.D)};
}

template <class T>
struct OnGpu {
  T *qkv, *o, *d_o, *dqkv;
  float *lse, *work;
  int64_t n_qkv, n_o, n_lse;
  AttentionShape a;
  OnGpu(int64_t qkv_n, int64_t o_n, const AttentionShape& s) : n_qkv(qkv_n), n_o(o_n), n_lse(s.B * s.H * s.T), a(s) {
    CUDA_CHECK(cudaMalloc(&qkv, n_qkv * sizeof(T)));
    CUDA_CHECK(cudaMalloc(&dqkv, n_qkv * sizeof(T)));
    CUDA_CHECK(cudaMalloc(&o, n_o * sizeof(T)));
    CUDA_CHECK(cudaMalloc(&d_o, n_o * sizeof(T)));
    CUDA_CHECK(cudaMalloc(&lse, n_lse * 4));
    CUDA_CHECK(cudaMalloc(&work, attention_backward_workspace<T>(a) * 4));
    CUDA_CHECK(cudaMemset(work, 0xff, attention_backward_workspace<T>(a) * 4));
    CUDA_CHECK(cudaMemset(lse, 0xff, n_lse * 4));
    CUDA_CHECK(cudaMemset(o, 0xff, n_o * sizeof(T)));
    CUDA_CHECK(cudaMemset(dqkv, 0xff, n_qkv * sizeof(T)));
  }
  ~OnGpu() {
    for (void* p : {(void*)qkv, (void*)dqkv, (void*)o, (void*)d_o, (void*)lse, (void*)work}) cudaFree(p);
  }
  void forward(int arch) {
    int64_t k = a.H * a.D, v = k + a.HKV * a.D;
    gpu::attention_forward<T>(0, arch, o, lse, qkv, qkv + k, qkv + v, a);
  }
  void backward(int arch) {
    int64_t k = a.H * a.D, v = k + a.HKV * a.D;
    gpu::attention_backward<T>(0, arch, dqkv, dqkv + k, dqkv + v, d_o, qkv, qkv + k, qkv + v, o, lse, work, a);
  }
};

template <class T>
void run_gpu(Tensors<T>& x, int arch) {
  OnGpu<T> g(x.qkv.size(), x.o.size(), x.a);
  CUDA_CHECK(cudaMemcpy(g.qkv, x.qkv.data(), x.qkv.size() * sizeof(T), cudaMemcpyHostToDevice));
  CUDA_CHECK(cudaMemcpy(g.d_o, x.d_o.data(), x.d_o.size() * sizeof(T), cudaMemcpyHostToDevice));
  g.forward(arch), g.backward(arch);
  CUDA_CHECK(cudaMemcpy(x.o.data(), g.o, x.o.size() * sizeof(T), cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaMemcpy(x.dqkv.data(), g.dqkv, x.dqkv.size() * sizeof(T), cudaMemcpyDeviceToHost));
  CUDA_CHECK(cudaMemcpy(x.lse.data(), g.lse, x.lse.size() * 4, cudaMemcpyDeviceToHost));
}

template <class T>
bool untouched(const std::vector<T>& x, int64_t ld, int64_t used) {
  for (size_t i = 0; i < x.size(); ++i)
    if (int64_t(i) % ld >= used)
      for (size_t b = 0; b < sizeof(T); ++b)
        if (reinterpret_cast<const uint8_t*>(&x[i])[b] != 0xff) return false;
  return true;
}

struct Case {
  int64_t B, T, H, HKV, D;
  Tensors<bf16>* in = nullptr;
  Tensors<double>* ref = nullptr;
  Errors twin{};
};

template <class T>
bool check_one(const Case& c, int arch, const char* name) {
  Tensors<T> x(c.in->a), y(c.in->a);
  for (size_t i = 0; i < x.qkv.size(); ++i) x.qkv[i] = y.qkv[i] = T(float(c.in->qkv[i]));
  for (size_t i = 0; i < x.d_o.size(); ++i) x.d_o[i] = y.d_o[i] = T(float(c.in->d_o[i]));
  run_gpu(x, arch), run_gpu(y, arch);
  bool same = !std::memcmp(x.o.data(), y.o.data(), x.o.size() * sizeof(T)) &&
              !std::memcmp(x.dqkv.data(), y.dqkv.data(), x.dqkv.size() * sizeof(T)) &&
              !std::memcmp(x.lse.data(), y.lse.data(), x.lse.size() * 4);
  bool clean = untouched(x.o, x.a.ld_o, x.a.H * x.a.D) && untouched(x.dqkv, x.ld, x.ld - 8);
  Errors e = compare(x, *c.ref);
  double f = std::is_same_v<T, bf16> ? 2 : 0, tiny = std::is_same_v<T, bf16> ? 1e-4 : 2e-5;
  const Errors& w = c.twin;
  bool ok = same && clean && e.o <= f * w.o + tiny && e.lse <= 1e-4 && e.dq <= f * w.dq + tiny &&
            e.dk <= f * w.dk + tiny && e.dv <= f * w.dv + tiny;
  if (!ok || c.T > 900)
    std::printf("%s %-5s B %lld T %lld H %lld/%lld D %lld: o %.2e (%.2e) lse %.1e dq %.2e (%.2e) dk %.2e (%.2e) dv %.2e "
                "(%.2e)%s%s\n",
                ok ? "ok  " : "FAIL", name, (long long)c.B, (long long)c.T, (long long)c.H, (long long)c.HKV,
                (long long)c.D, e.o, w.o, e.lse, e.dq, w.dq, e.dk, w.dk, e.dv, w.dv, same ? "" : " NOT REPEATABLE",
                clean ? "" : " WROTE OUTSIDE");
  return ok;
}

int check(bool tiny) {
  std::vector<Case> cases;
  if (tiny) {
    cases = {{1, 130, 2, 1, 128}, {2, 65, 2, 2, 64}};
  } else {
    for (int64_t D : {64, 128})
      for (int64_t T : {1, 15, 63, 64, 65, 127, 128, 129, 200, 257}) cases.push_back({2, T, 4, 2, D});
    for (int64_t g : {1, 2, 4, 6, 8, 16}) cases.push_back({1, 200, g, 1, 64}), cases.push_back({2, 193, 2 * g, 2, 128});
    cases.push_back({1, 1000, 6, 1, 64}), cases.push_back({2, 1000, 4, 2, 128}), cases.push_back({1, 2049, 2, 1, 64});
    cases.push_back({1, 2049, 4, 1, 128});
  }
  std::vector<std::thread> threads;
  for (size_t n = 0; n < cases.size(); ++n)
    threads.emplace_back([&, n] {
      Case& c = cases[n];
      AttentionShape a{c.B, c.T, c.H, c.HKV, c.D, 0, 0, 0, 0, 0, 1 / std::sqrt(double(c.D))};
      c.in = new Tensors<bf16>(a), c.ref = new Tensors<double>(a);
      std::mt19937 gen{unsigned(n + 1)};
      std::normal_distribution<float> normal;
      for (size_t i = 0; i < c.in->qkv.size(); ++i) c.ref->qkv[i] = float(c.in->qkv[i] = bf16(normal(gen)));
      for (size_t i = 0; i < c.in->d_o.size(); ++i) c.ref->d_o[i] = float(c.in->d_o[i] = bf16(normal(gen)));
      c.ref->twin(), c.in->twin();
      c.twin = compare(*c.in, *c.ref);
    });
  for (auto& t : threads) t.join();
  int failed = 0;
  for (auto& c : cases) {
    failed += !check_one<bf16>(c, 80, "mma");
    failed += !check_one<bf16>(c, 90, "wgmma");
    if (c.T < 300) failed += !check_one<float>(c, 0, "float");
  }
  std::printf("%zu shapes, %d failures\n", cases.size(), failed);
  return failed;
}

__global__ void fill(bf16* p, int64_t n, uint32_t seed, float scale) {  // roughly normal: a sum of four uniforms
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    uint64_t x = (uint64_t(seed) << 40) + i;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull, x = (x ^ (x >> 27)) * 0x94d049bb133111ebull, x ^= x >> 31;
    float sum = 0;
    for (int k = 0; k < 4; ++k) sum += float((x >> (16 * k)) & 0xffff) / 65536.f - 0.5f;
    p[i] = bf16(sum * 1.732f * scale);
  }
}
template <class F>
double median_ms(F f, int reps) {
  cudaEvent_t e0, e1;
  CUDA_CHECK(cudaEventCreate(&e0));
  CUDA_CHECK(cudaEventCreate(&e1));
  std::vector<float> ms(reps);
  for (int i = -3; i < reps; ++i) {
    CUDA_CHECK(cudaEventRecord(e0));
    f();
    CUDA_CHECK(cudaEventRecord(e1));
    CUDA_CHECK(cudaEventSynchronize(e1));
    if (i >= 0) CUDA_CHECK(cudaEventElapsedTime(&ms[i], e0, e1));
  }
  std::sort(ms.begin(), ms.end());
  return ms[reps / 2];
}

void time_one(int arch, int64_t B, int64_t T, int64_t H, int64_t HKV, int64_t D, int at_most = 20) {
  AttentionShape a{B, T, H, HKV, D, 0, 0, 0, 0, 0, 1 / std::sqrt(double(D))};
  a.ld_q = a.ld_kv = a.ld_dq = a.ld_dkv = (H + 2 * HKV) * D, a.ld_o = H * D;
  OnGpu<bf16> g(B * T * a.ld_q, B * T * a.ld_o, a);
  fill<<<1024, 256>>>(g.qkv, g.n_qkv, 1, 1), fill<<<1024, 256>>>(g.d_o, g.n_o, 2, 1);
  double flops = 2. * B * H * T * T * D;
  int reps = std::min(flops > 1e13 ? 5 : 20, at_most);
  double f = median_ms([&] { g.forward(arch); }, reps), b = median_ms([&] { g.backward(arch); }, reps);
  std::printf("sm_%d B %lld T %6lld H %lld/%lld D %3lld: forward %.3f ms %4.0f TFLOP/s, backward %.3f ms %4.0f, both %.3f "
              "ms %4.0f\n",
              arch, (long long)B, (long long)T, (long long)H, (long long)HKV, (long long)D, f, flops / f / 1e9, b,
              2.5 * flops / b / 1e9, f + b, 3.5 * flops / (f + b) / 1e9);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  std::string what = argc > 1 ? argv[1] : "check";
  try {
    if (what == "check") return check(argc > 2) ? 1 : 0;
    int arch = argc > 2 ? atoi(argv[2]) : 90;
    if (arch == 91) {
      using namespace attention::sm90;
      for (int turns : {0, 1})
        for (int only : {1, 2}) {
          tune_turns = turns, tune_only = only;
          std::printf("turns %d only %d\n", turns, only);
          time_one(90, 1, 8192, 32, 8, 128);
          time_one(90, 8, 4096, 32, 8, 128);
        }
      return 0;
    }
    if (argc > 3) return time_one(arch, 1, 8192, 32, 8, 128, 1), 0;  // for a profiler
    time_one(arch, 1, 8192, 32, 8, 128);
    time_one(arch, 1, 8192, 32, 8, 128);
    time_one(arch, 1, 4096, 32, 8, 128);
    time_one(arch, 8, 4096, 32, 8, 128);
    if (arch == 90) time_one(arch, 1, 32768, 32, 8, 128);
    time_one(arch, 1, 2048, 12, 2, 64);
    time_one(arch, 16, 2048, 12, 2, 64);
    time_one(arch, 1, 8192, 32, 8, 64);
  } catch (const std::exception& e) {
    std::printf("%s\n", e.what());
    return 1;
  }
}
