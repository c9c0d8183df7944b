#include "attention/selected_masked.cuh"

#if FSDP_CUDA
#include "attention/sm90_forward.cuh"
#endif

namespace attention::selected {

int64_t masked_bytes(const NsaShape& a) {
  const int64_t n = (a.T + 127) / 128 * 2;
  return a.B * a.HKV * n * n * 8;
}

#if FSDP_CUDA

// words from indices (B,HKV,T,n). A block has 64 queries of a pair; blockIdx.x: (B, HKV, Tp/64).
__global__ void __launch_bounds__(64)
    word_kernel(uint64_t* words, const int32_t* indices, int T, int selected, int tiles) {
  begin_kernel();
  __shared__ unsigned long long bits[masked_tokens / 64];
  const int tile = blockIdx.x % tiles, pair = blockIdx.x / tiles, t = tile * 64 + int(threadIdx.x);
  for (int j = threadIdx.x; j < tiles; j += 64) bits[j] = 0;
  __syncthreads();
  if (t < T)
    for (int r = 0; r < selected; ++r) {
      const int j = indices[(int64_t(pair) * T + t) * selected + r];
      if (j >= 0 && j < tiles) atomicOr(&bits[j], 1ull << threadIdx.x);
    }
  __syncthreads();
  for (int j = threadIdx.x; j < tiles; j += 64) words[int64_t(blockIdx.x) * tiles + j] = bits[j];
}

void masked_forward(cudaStream_t stream, bf16* o, float* lse, const bf16* q, const bf16* k, const bf16* v,
                    const int32_t* indices, char* scratch, const NsaShape& a) {
  const Problem p({a.B, a.T, a.H, a.HKV, a.D, a.ld, a.ld, a.H * a.D, a.ld, a.ld, a.scale});
  uint64_t* words = reinterpret_cast<uint64_t*>(scratch);
  const Chosen mask(p, words);
  launch(stream, word_kernel, {unsigned(a.B * a.HKV * mask.n), 64}, words, indices, p.T, int(a.selected), mask.n);
  const auto run = a.D == 128 ? sm90::forward<128, 128, Chosen> : sm90::forward<64, 64, Chosen>;
  run(stream, o, lse, nullptr, q, k, v, p, mask);
}

#endif

}  // namespace attention::selected
