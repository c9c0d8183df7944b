#include "attention/topk.cuh"

#include <initializer_list>

#include "attention/stages.h"
#include "cpu/nsa.h"

#if FSDP_CUDA
#include "attention/topk_few.cuh"

namespace gpu {

template <class T>
Kernel nsa_topk(cudaStream_t stream, int arch, int32_t* indices, const T* q, const T* k, const float* lse,
                float* scratch, const NsaShape& shape) {
  using namespace attention;
  constexpr bool narrow = std::is_same_v<T, bf16>;
  const TopK a(shape, narrow);
  if (narrow ? a.D != 64 && a.D != 128 && a.D != 192 : a.D > 128 || a.D % 8)
    throw Error(strf("nsa_topk: no %s kernel for head dim %d on a GPU: %s", name_of(dtype_of<T>), a.D,
                     narrow ? "64, 128 and 192 have one" : "multiples of 8 up to 128 have one"));
  if (a.D == 192 && has_small_memory(arch))
    throw Error("nsa_topk: keys of 192 need a GPU with more than 99 KiB of shared memory for a block");
  bool aligned = a.ld * sizeof(T) % 16 == 0;  // for copies of 16 bytes
  for (const void* p : std::initializer_list<const void*>{q, k, scratch})
    aligned = aligned && reinterpret_cast<uintptr_t>(p) % 16 == 0;
  if (!aligned) throw Error("nsa_topk: addresses and row strides must be multiples of 16 bytes on a GPU");
  if (shape.T > 1 << 30 || shape.selected > 1 << 30 || shape.B * shape.H * shape.T / 8 > 2000000000ll)
    throw Error("nsa_topk: too many rows for one launch");
  if constexpr (narrow) {
    const auto launch = [&](auto f) { return f(stream, indices, q, k, lse, scratch, a); };
    using namespace topk;
    const auto launch_for = [&](auto d) -> Kernel {
      constexpr int D = decltype(d)::value;
      if (arch == 90 && a.few()) return few_launch<D>(stream, indices, q, k, lse, a);
      if (arch == 90) return a.pooled ? launch(sm90_launch<D, true>) : launch(sm90_launch<D, false>);
      return a.pooled ? launch(sm80_launch<D, true>) : launch(sm80_launch<D, false>);
    };
    if (a.D == 192) return launch_for(std::integral_constant<int, 192>());
    if (a.D == 128) return launch_for(std::integral_constant<int, 128>());
    return launch_for(std::integral_constant<int, 64>());
  } else {
    launch(stream, topk::float_kernel, {a.most(), 256}, indices, q, k, lse, scratch, a);
    return {"fp32"};
  }
}

template Kernel nsa_topk(cudaStream_t, int, int32_t*, const float*, const float*, const float*, float*,
                         const NsaShape&);
template Kernel nsa_topk(cudaStream_t, int, int32_t*, const bf16*, const bf16*, const float*, float*, const NsaShape&);

}  // namespace gpu
#endif

template <class T>
int64_t nsa_topk_scratch(const NsaShape& a) {
  check_nsa(a);
  const attention::TopK s(a, std::is_same_v<T, bf16>);
  return s.most() * s.scores();
}

// For the estimate. Per tile of 128 queries and 128 compressed keys: products for every head, and for each KV head the
// choosing, which is worth 2700 FLOPs a score; and what stands around the walk. By the stage times in
// results/attention-1gpu.jsonl; among few blocks by traces of m7c.
template <class T>
static Cost cost(const NsaShape& a) {
  const int64_t rows = (a.T + 127) / 128;
  int64_t tiles = 0;
  for (int64_t r = 1; r <= rows; r++) tiles += (compressed_keys(std::min(r * 128, a.T), a.block, a.stride) + 127) / 128;
  Cost c{Work::attention};
  c.flops = double(tiles * 128 * 128) * double(2 * a.H * a.D + 2700 * a.HKV) + 30e6 * double(rows * a.H);
  if (attention::TopK(a, std::is_same_v<T, bf16>).few()) c.flops *= 0.37;
  c.flops *= double(a.B), c.share = 0.96, c.dtype = dtype_of<T>;
  return c;
}

template <class T>
Kernel nsa_topk(Stream& s, int32_t* indices, const T* q, const T* k, const acc_t<T>* lse, acc_t<T>* scratch,
                const NsaShape& a) {
  check_nsa(a);
  if (s.off()) return s.spend(cost<T>(a)), Kernel();
#if FSDP_CUDA
  if (s.on_gpu()) {
    if constexpr (std::is_same_v<T, double>) throw Error("nsa_topk: no fp64 kernels on a GPU");
    else return gpu::nsa_topk(s.cuda(), s.device().compute_capability, indices, q, k, lse, scratch, a);
  }
#endif
  s.enqueue([=] { cpu::nsa_topk(indices, q, k, lse, scratch, a); });
  return plain_loops;
}

#define INSTANTIATE(T)                                   \
  template int64_t nsa_topk_scratch<T>(const NsaShape&); \
  template Kernel nsa_topk(Stream&, int32_t*, const T*, const T*, const acc_t<T>*, acc_t<T>*, const NsaShape&);
INSTANTIATE(float)
INSTANTIATE(double)
INSTANTIATE(bf16)
