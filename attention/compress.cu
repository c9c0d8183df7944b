// Dispatch of what stands around the attention of NSA's branches: as CUDA kernels (gpu::) or as their twins (cpu::), or
// not at all while planning.
#include "attention/stages.h"
#include "cpu/nsa.h"
#include "lib/ops/ops.h"

#if FSDP_CUDA
#include "attention/compress.cuh"
#include "attention/stats.cuh"
#endif

#if FSDP_CUDA
#define RUN_ON_GPU(T, name, ...)                                                                       \
  if (s.on_gpu()) {                                                                                    \
    if constexpr (std::is_same_v<T, double>) throw Error(#name ": fp64 runs on the CPU backend only"); \
    else return gpu::name(s.cuda(), __VA_ARGS__);                                                      \
  }
#else
#define RUN_ON_GPU(T, name, ...)
#endif
// bytes: read and written, for the estimate of a dry run.
#define RUN(T, bytes, name, ...)                  \
  do {                                            \
    if (s.off()) return s.spend(bytes), Kernel(); \
    RUN_ON_GPU(T, name, __VA_ARGS__)              \
    s.enqueue([=] { cpu::name(__VA_ARGS__); });   \
    return plain_loops;                           \
  } while (0)

template <class T>
Kernel nsa_mean(Stream& s, T* k, T* v, const T* x, const NsaShape& a) {
  RUN(T, moves<T>(a.B * a.T * a.HKV * (a.D + a.v_dim())), nsa_mean, k, v, x, a);
}
template <class T>
Kernel nsa_mean_backward(Stream& s, T* dx, const T* dk, const T* dv, const NsaShape& a) {
  RUN(T, moves<T>(a.B * a.T * a.HKV * (a.D + a.v_dim())), nsa_mean_backward, dx, dk, dv, a);
}

template <class T>
Kernel nsa_blocks(Stream& s, T* blocks, const T* x, const T* position, const NsaShape& a) {
  RUN(T, moves<T>(2 * a.B * a.compressed() * a.HKV * a.block * a.D), nsa_blocks, blocks, x, position, a);
}
// dposition is a column sum over all blocks, for each head.
int64_t nsa_blocks_partials(const NsaShape& a) {
  return ops::bias_grad_partials(a.B * a.compressed(), a.HKV * a.block * a.D);
}
template <class T, class G>
Kernel nsa_blocks_backward(Stream& s, T* dx, G* dposition, const T* dblocks, acc_t<T>* partials, const NsaShape& a) {
  RUN(T, moves<T>(2 * a.B * a.compressed() * a.HKV * a.block * a.D, 3), nsa_blocks_backward, dx, dposition, dblocks,
      partials, a);
}

template <class T>
Kernel nsa_heads_last(Stream& s, T* out, const T* x, int64_t heads, int64_t rows, int64_t D) {
  RUN(T, moves<T>(2 * heads * rows * D), nsa_heads_last, out, x, heads, rows, D);
}
template <class T>
Kernel nsa_heads_first(Stream& s, T* out, const T* x, int64_t heads, int64_t rows, int64_t D) {
  RUN(T, moves<T>(2 * heads * rows * D), nsa_heads_first, out, x, heads, rows, D);
}

template <class T>
Kernel nsa_combine(Stream& s, T* o, const T* compressed, const T* selected, const T* window, const T* x,
                   const NsaShape& a, float* amax) {
  RUN(T, moves<T>(4 * a.B * a.T * a.H * a.v_dim()), nsa_combine, o, compressed, selected, window, x, a, amax);
}

int64_t nsa_stats_partials() { return stats_partials * int64_t(sizeof(StatsSum) / sizeof(double)); }
template <class T>
void nsa_stats(Stream& s, const std::vector<NsaCounted<T>>& layers, const int32_t* targets, const NsaShape& a) {
  if (s.off()) return s.spend(moves<int32_t>(int64_t(layers.size()) * a.B * a.HKV * a.T * a.selected, 2));
  RUN_ON_GPU(T, nsa_stats, layers, targets, a)
  s.enqueue([=] { cpu::nsa_stats(layers, targets, a); });
}
void nsa_stats_total(Stream& s, NsaSums* sums, NsaMaxima* maxima, const double* partials, int64_t layers) {
  if (s.off()) return s.spend(moves<double>(layers * nsa_stats_partials()));
  RUN_ON_GPU(float, nsa_stats_total, sums, maxima, partials, layers)
  s.enqueue([=] { cpu::nsa_stats_total(sums, maxima, partials, layers); });
}

#define INSTANTIATE(T)                                                                                  \
  template Kernel nsa_mean(Stream&, T*, T*, const T*, const NsaShape&);                                 \
  template Kernel nsa_mean_backward(Stream&, T*, const T*, const T*, const NsaShape&);                  \
  template Kernel nsa_blocks(Stream&, T*, const T*, const T*, const NsaShape&);                         \
  template Kernel nsa_blocks_backward(Stream&, T*, T*, const T*, acc_t<T>*, const NsaShape&);           \
  template Kernel nsa_heads_last(Stream&, T*, const T*, int64_t, int64_t, int64_t);                     \
  template Kernel nsa_heads_first(Stream&, T*, const T*, int64_t, int64_t, int64_t);                    \
  template void nsa_stats(Stream&, const std::vector<NsaCounted<T>>&, const int32_t*, const NsaShape&); \
  template Kernel nsa_combine(Stream&, T*, const T*, const T*, const T*, const T*, const NsaShape&, float*);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bf16)
template Kernel nsa_blocks_backward(Stream&, bf16*, float*, const bf16*, float*, const NsaShape&);
