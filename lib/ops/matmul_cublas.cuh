// cuBLASLt's matrix products: what a call is, which algorithms there are for it, and tuning, which times them and keeps
// the fastest that changes no bit. For lib/ops/matmul.cu.
#pragma once

#include <cuda_fp8.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <functional>
#include <map>

#include "lib/device/device.h"
#include "lib/ops/cublaslt.h"

namespace ops {
namespace {

[[noreturn]] void throw_cublas(cublasStatus_t status, const char* call, const char* file, int line) {
  const char* remedy = "";
  if (status == CUBLAS_STATUS_NOT_INITIALIZED || status == CUBLAS_STATUS_ALLOC_FAILED)
    remedy = "; the GPU may be out of memory: lower --batch or --seq";
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE)
    remedy = "; bf16 wants dimensions that are multiples of 8, fp8 of 16, and both want 16-byte aligned pointers";
  if (status == CUBLAS_STATUS_ARCH_MISMATCH) remedy = "; this cuBLAS does not know the GPU: install a matching CUDA";
  if (status == CUBLAS_STATUS_EXECUTION_FAILED) remedy = "; run under compute-sanitizer to find the kernel";
  throw CublasError(strf("cuBLAS: %s failed at %s:%d on rank %d: %s%s", call, file, line, this_rank(),
                         cublaslt().status_name(status), remedy));
}
#define CUBLAS_CHECK(call)                                                                            \
  do {                                                                                                \
    cublasStatus_t cublas_code_ = (call);                                                             \
    if (cublas_code_ != CUBLAS_STATUS_SUCCESS) throw_cublas(cublas_code_, #call, __FILE__, __LINE__); \
  } while (0)

// D (m,n) = op(A) op(B) (+ C) + epilogue, column major. op(A) is (m,k), op(B) is (k,n); all matrices are dense.
struct Call {
  int64_t m, n, k;
  bool transpose_a = false, transpose_b = false;
  Dtype in_a, in_b, out;  // out: of C, D, bias and aux
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const void *a, *b, *c = nullptr;  // c null: not added
  void* d;
  const void* bias = nullptr;
  void* aux = nullptr;
  // Of fp8: what A and B are multiplied by, one number each, or one for each row of op(A) and each column of op(B); and
  // whether sums may have fewer bits than fp32's.
  const float *unscale_a = nullptr, *unscale_b = nullptr;
  fp8::Scaling scaling = fp8::Scaling::tensor;
  bool fast_sums = false;
};

// What an algorithm is chosen for. Addresses count by their alignment alone.
int alignment(const void* p) {
  int bytes = 256;
  while (reinterpret_cast<uintptr_t>(p) % bytes) bytes /= 2;
  return bytes;
}
using Key = std::array<int64_t, 9>;
Key key_of(const Device& dev, const Call& c) {
  const int64_t types = (int64_t(c.in_a) * 8 + int64_t(c.in_b)) * 8 + int64_t(c.out);
  const int64_t how_c = !c.c ? 0 : c.c == c.d ? 1 : 2;
  const int64_t flags =
      c.transpose_a + 2 * c.transpose_b + 4 * dev.tf32 + 8 * c.fast_sums + 16 * how_c + 64 * int(c.scaling);
  int64_t places = 0;
  for (const void* p : std::initializer_list<const void*>{c.a, c.b, c.c, c.d, c.bias, c.unscale_a, c.unscale_b})
    places = places * 512 + alignment(p);
  return {c.m, c.n, c.k, types, flags, c.epilogue, places, dev.blas_workspace_bytes, dev.ordinal};
}

struct Plan {
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
  cublasLtMatmulAlgo_t algo;
  bool possible = false;  // cuBLASLt knows an algorithm
  bool tuned = false;
  bool pays = false;  // of a fused GELU: faster than two kernels, and equal to rounding
};

cublasLtHandle_t handle_of(const Device& dev) {
  static std::map<int, cublasLtHandle_t> handles;  // for the life of the process
  cublasLtHandle_t& h = handles[dev.ordinal];
  if (!h) CUBLAS_CHECK(cublaslt().create(&h));
  return h;
}

template <class V>
void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t name, V value) {
  CUBLAS_CHECK(cublaslt().set_desc(desc, name, &value, sizeof value));
}

void set_row_scaling(cublasLtMatmulDesc_t desc) {
#if CUBLAS_VERSION >= 120900
  for (auto side : {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_MODE})
    set(desc, side, int32_t(CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F));
#else
  (void)desc;
  throw Error("--fp8-scaling row needs cuBLAS 12.9 or later; update CUDA or leave the option out");
#endif
}

void set_pointers(const Call& c, const Plan& p) {
  if (c.bias) set(p.desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, c.bias);
  if (c.aux) set(p.desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, c.aux);
  if (c.unscale_a) set(p.desc, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, c.unscale_a);
  if (c.unscale_b) set(p.desc, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, c.unscale_b);
}

// cuBLASLt's own ranking, best first.
std::vector<cublasLtMatmulAlgo_t> candidates(const Device& dev, const Call& c, const Plan& p, int most) {
  cublasLtMatmulPreference_t wish;
  CUBLAS_CHECK(cublaslt().create_preference(&wish));
  const auto want = [&](cublasLtMatmulPreferenceAttributes_t name, auto value) {
    CUBLAS_CHECK(cublaslt().set_preference(wish, name, &value, sizeof value));
  };
  want(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(dev.blas_workspace_bytes));
  want(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t(alignment(c.a)));
  want(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t(alignment(c.b)));
  want(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t(alignment(c.c ? c.c : c.d)));
  want(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t(alignment(c.d)));
  std::vector<cublasLtMatmulHeuristicResult_t> found(most);
  int n = 0;
  const cublasStatus_t status =
      cublaslt().heuristic(handle_of(dev), p.desc, p.a, p.b, p.d, p.d, wish, most, found.data(), &n);
  CUBLAS_CHECK(cublaslt().destroy_preference(wish));
  if (status != CUBLAS_STATUS_NOT_SUPPORTED) CUBLAS_CHECK(status);
  std::vector<cublasLtMatmulAlgo_t> algos;
  for (int i = 0; i < n; ++i)
    if (found[i].state == CUBLAS_STATUS_SUCCESS) algos.push_back(found[i].algo);
  return algos;
}

std::map<Key, Plan>& plans() {
  static std::map<Key, Plan> all;
  return all;
}

cudaDataType_t type_of(Dtype t) {
  switch (t) {
    case Dtype::bf16:
      return CUDA_R_16BF;
    case Dtype::e4m3:
      return CUDA_R_8F_E4M3;
    case Dtype::e5m2:
      return CUDA_R_8F_E5M2;
    default:
      return CUDA_R_32F;
  }
}

// Descriptors and the library's first choice, made at the first call with this key.
Plan& plan_of(const Device& dev, const Call& c) {
  const auto [at, fresh] = plans().try_emplace(key_of(dev, c));
  Plan& p = at->second;
  if (!fresh) return p;
  const auto compute = dev.tf32 && c.in_a == Dtype::f32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
  CUBLAS_CHECK(cublaslt().create_desc(&p.desc, compute, CUDA_R_32F));
  set(p.desc, CUBLASLT_MATMUL_DESC_TRANSA, c.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(p.desc, CUBLASLT_MATMUL_DESC_TRANSB, c.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(p.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, c.epilogue);
  if (c.aux) set(p.desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, c.m);
  if (is_fp8(c.in_a)) set(p.desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t(c.fast_sums));
  if (c.scaling == fp8::Scaling::row) set_row_scaling(p.desc);
  set_pointers(c, p);  // their alignment counts too
  const auto layout = [&](cublasLtMatrixLayout_t* l, Dtype t, int64_t rows, int64_t columns) {
    CUBLAS_CHECK(cublaslt().create_layout(l, type_of(t), uint64_t(rows), uint64_t(columns), rows));
  };
  layout(&p.a, c.in_a, c.transpose_a ? c.k : c.m, c.transpose_a ? c.m : c.k);
  layout(&p.b, c.in_b, c.transpose_b ? c.n : c.k, c.transpose_b ? c.k : c.n);
  layout(&p.d, c.out, c.m, c.n);
  const auto algos = candidates(dev, c, p, 1);
  p.possible = !algos.empty();
  if (p.possible) p.algo = algos[0];
  return p;
}

void check_possible(const Call& c, const Plan& p) {
  if (!p.possible)
    throw CublasError(
        strf("cuBLASLt knows no algorithm for %ld x %ld x %ld in %s on rank %d; bf16 wants dimensions that "
             "are multiples of 8, fp8 of 16 and a GPU that has it, and 16-byte aligned pointers",
             long(c.n), long(c.m), long(c.k), name_of(c.in_a), this_rank()));
}

cublasStatus_t try_launch(Stream& s, const Call& c, const Plan& p, const cublasLtMatmulAlgo_t& algo) {
  const float one = 1, zero = 0;
  set_pointers(c, p);
  return cublaslt().matmul(handle_of(s.device()), p.desc, &one, c.a, p.a, c.b, p.b, c.c ? &one : &zero, c.c ? c.c : c.d,
                           p.d, c.d, p.d, &algo, s.device().blas_workspace, size_t(s.device().blas_workspace_bytes),
                           s.cuda());
}
void launch(Stream& s, const Call& c, const Plan& p) {
  check_possible(c, p);
  CUBLAS_CHECK(try_launch(s, c, p, p.algo));
}

// -------------------------------------------------------------------------------------------------------------- tuning

__device__ uint32_t mixed(uint64_t i) {  // a hash: every input bit moves every output bit
  i = (i + 0x9E3779B97F4A7C15ull) * 0xBF58476D1CE4E5B9ull;
  i = (i ^ (i >> 29)) * 0x94D049BB133111EBull;
  return uint32_t(i >> 32);
}
// Random numbers in [-scale, scale): a GPU computes on zeros faster than on a model's numbers.
template <class T>
__global__ void fill_kernel(T* p, int64_t n, uint64_t seed, float scale) {
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
    p[i] = T((float(mixed(seed + uint64_t(i))) * 0x1p-31f - 1.0f) * scale);
}
// A sum of hashes of (place, bits): the same whatever the order, so atomics do no harm.
__global__ void checksum_kernel(unsigned long long* out, const uint16_t* p, int64_t n) {
  unsigned long long sum = 0;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x)
    sum += mixed(uint64_t(i) << 16 | p[i]);
  atomicAdd(out, sum);
}
void fill(Stream& s, const void* p, Dtype t, int64_t n, uint64_t seed, float scale) {
  if (!p) return;
  void* to = const_cast<void*>(p);  // while tuning, nothing in the arena is worth keeping
  const auto with = [&](auto* numbers) {
    fill_kernel<<<1024, 256, 0, s.cuda()>>>(numbers, n, seed << 40, scale);
    CUDA_CHECK_LAUNCH();
  };
  if (t == Dtype::bf16) with(static_cast<bf16*>(to));
  else if (t == Dtype::e4m3) with(static_cast<__nv_fp8_e4m3*>(to));
  else if (t == Dtype::e5m2) with(static_cast<__nv_fp8_e5m2*>(to));
  else with(static_cast<float*>(to));
}
// A matrix of `vectors` rows or columns and numbers up to `largest`; of fp8, whose small numbers are coarse, it is the
// scale that makes them so.
void fill_matrix(Stream& s, const Call& c, const void* p, Dtype t, int64_t vectors, uint64_t seed, float largest,
                 const float* unscale) {
  fill(s, p, t, vectors * c.k, seed, is_fp8(t) ? fp8::format(t).largest : largest);
  if (!unscale) return;
  const std::vector<float> scales(size_t(c.scaling == fp8::Scaling::row ? vectors : 1),
                                  largest / fp8::format(t).largest);
  CUDA_CHECK(cudaMemcpyAsync(const_cast<float*>(unscale), scales.data(), scales.size() * sizeof(float),
                             cudaMemcpyDefault, s.cuda()));
}
// Runs a kernel that adds to one number, which lies in the workspace, and reads it.
template <class F>
unsigned long long counted(Stream& s, F kernel) {
  auto* at = static_cast<unsigned long long*>(s.device().blas_workspace);
  unsigned long long result = 0;
  CUDA_CHECK(cudaMemsetAsync(at, 0, sizeof result, s.cuda()));
  kernel(at);
  CUDA_CHECK_LAUNCH();
  CUDA_CHECK(cudaMemcpyAsync(&result, at, sizeof result, cudaMemcpyDefault, s.cuda()));
  CUDA_CHECK(cudaStreamSynchronize(s.cuda()));
  return result;
}
unsigned long long checksum(Stream& s, const void* p, Dtype t, int64_t n) {
  return counted(s, [&](unsigned long long* at) {
    checksum_kernel<<<1024, 256, 0, s.cuda()>>>(at, static_cast<const uint16_t*>(p), n * size_of(t) / 2);
  });
}

// Times one call. A short one stands several times in a graph, as most steps of short calls are graphs: there a clear
// that cuBLASLt puts in front of some kernels takes longer than among launches.
class Timing {
 public:
  template <class F>
  Timing(Stream& s, F call) : s_(s) {
    CUDA_CHECK(cudaEventCreate(&from_));
    CUDA_CHECK(cudaEventCreate(&to_));
    call();
    once_ = timed(call);
    run_ = call;
    if (once_ > short_ms) return;
    calls_ = std::max(4, std::min(40, int(0.4f / std::max(once_, 1e-3f))));
    CUDA_CHECK(cudaStreamBeginCapture(s.cuda(), cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < calls_; ++i) call();
    cudaGraph_t graph;
    CUDA_CHECK(cudaStreamEndCapture(s.cuda(), &graph));
    CUDA_CHECK(cudaGraphInstantiate(&graph_, graph, 0));
    CUDA_CHECK(cudaGraphDestroy(graph));
    run_ = [this] { CUDA_CHECK(cudaGraphLaunch(graph_, s_.cuda())); };
    timed(run_);  // brings it to the device
  }
  ~Timing() {
    cudaEventDestroy(from_), cudaEventDestroy(to_);
    if (graph_) cudaGraphExecDestroy(graph_);
  }
  Timing(const Timing&) = delete;
  float once() const { return once_; }
  void take() { ms_.push_back(timed(run_) / float(calls_)); }
  float median() {
    std::sort(ms_.begin(), ms_.end());
    return ms_[ms_.size() / 2];
  }

 private:
  static constexpr float short_ms = 0.2f;
  float timed(const std::function<void()>& work) {
    CUDA_CHECK(cudaEventRecord(from_, s_.cuda()));
    work();
    CUDA_CHECK(cudaEventRecord(to_, s_.cuda()));
    CUDA_CHECK(cudaEventSynchronize(to_));
    float ms = 0;
    CUDA_CHECK(cudaEventElapsedTime(&ms, from_, to_));
    return ms;
  }
  Stream& s_;
  cudaEvent_t from_, to_;
  cudaGraphExec_t graph_ = nullptr;
  std::function<void()> run_;
  float once_;
  int calls_ = 1;
  std::vector<float> ms_;
};

// Does it cut k and add the parts up afterwards? That changes the bits, and with it results from one shape to the next.
bool splits_k(const cublasLtMatmulAlgo_t& algo) {
  int32_t splits = 1;
  uint32_t scheme = CUBLASLT_REDUCTION_SCHEME_NONE;
  size_t n = 0;
  CUBLAS_CHECK(cublaslt().get_algo(&algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits, sizeof splits, &n));
  CUBLAS_CHECK(cublaslt().get_algo(&algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme, &n));
  return splits > 1 || scheme != CUBLASLT_REDUCTION_SCHEME_NONE;
}

void fill_inputs(Stream& s, const Call& c) {
  fill_matrix(s, c, c.a, c.in_a, c.m, 1, 3 / std::sqrt(float(c.k)), c.unscale_a);  // results of about 1
  fill_matrix(s, c, c.b, c.in_b, c.n, 2, 1, c.unscale_b);
  fill(s, c.bias, c.out, c.m, 3, 1);
  if (c.c != c.d) fill(s, c.c, c.out, c.m * c.n, 4, 1);
}
// One run on known inputs, over a D that holds nothing of an earlier run. Returns D's checksum, false if the
// algorithm does not take the call.
bool result_of(Stream& s, const Call& c, const Plan& p, const cublasLtMatmulAlgo_t& algo, unsigned long long* bits) {
  if (c.c == c.d) fill(s, c.d, c.out, c.m * c.n, 4, 1);
  else CUDA_CHECK(cudaMemsetAsync(c.d, 0xff, size_t(c.m * c.n * size_of(c.out)), s.cuda()));
  if (c.aux) CUDA_CHECK(cudaMemsetAsync(c.aux, 0xff, size_t(c.m * c.n * size_of(c.out)), s.cuda()));
  if (try_launch(s, c, p, algo) != CUBLAS_STATUS_SUCCESS) return false;
  *bits = checksum(s, c.d, c.out, c.m * c.n);
  return true;
}

// The fastest candidate that gives the same bits as the first; the first if there is none. They take turns, because a
// chip that gets warm gets slower.
void tune(Stream& s, const Call& c, Plan& p) {
  check_possible(c, p);
  ASSERT(s.device().blas_workspace);
  p.tuned = true;
  fill_inputs(s, c);
  unsigned long long first = 0, bits = 0;
  if (!result_of(s, c, p, p.algo, &first)) return;  // the run will say what is wrong
  std::vector<cublasLtMatmulAlgo_t> right;
  int place = 0;
  for (const auto& algo : candidates(s.device(), c, p, 12)) {
    if (place++ > 0 && splits_k(algo)) continue;
    if (result_of(s, c, p, algo, &bits) && bits == first) right.push_back(algo);
  }
  std::deque<Timing> timings;
  for (const auto& algo : right) timings.emplace_back(s, [&, algo] { CUBLAS_CHECK(try_launch(s, c, p, algo)); });
  for (int turn = 0; !right.empty() && turn < (timings[0].once() > 20 ? 2 : 5); ++turn)
    for (Timing& t : timings) t.take();
  float best = -1;
  for (size_t i = 0; i < right.size(); ++i)
    if (const float ms = timings[i].median(); best < 0 || ms < best) best = ms, p.algo = right[i];
}

}  // namespace
}  // namespace ops
