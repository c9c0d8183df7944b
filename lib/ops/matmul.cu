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
#include <cublasLt.h>
#include <cuda_fp8.h>

#include <array>
#include <deque>
#include <functional>
#include <map>

#include "lib/ops/matmul_activation.cuh"
#endif

namespace ops {

// Hopper's kernels may use 64 MiB for split-K sums and scheduling.
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

[[noreturn]] void throw_cublas(cublasStatus_t status, const char* call, const char* file, int line) {
  const char* remedy = "";
  if (status == CUBLAS_STATUS_NOT_INITIALIZED || status == CUBLAS_STATUS_ALLOC_FAILED)
    remedy = "; the GPU may be out of memory: lower --batch or --seq";
  if (status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE)
    remedy = "; bf16 wants dimensions that are multiples of 8, fp8 of 16, and both want 16-byte aligned pointers";
  if (status == CUBLAS_STATUS_ARCH_MISMATCH) remedy = "; this cuBLAS does not know the GPU: install a matching CUDA";
  if (status == CUBLAS_STATUS_EXECUTION_FAILED) remedy = "; run under compute-sanitizer to find the kernel";
  throw CublasError(strf("cuBLAS: %s failed at %s:%d on rank %d: %s%s", call, file, line, this_rank(),
                         cublasLtGetStatusName(status), remedy));
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
  if (!h) CUBLAS_CHECK(cublasLtCreate(&h));
  return h;
}

template <class V>
void set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t name, V value) {
  CUBLAS_CHECK(cublasLtMatmulDescSetAttribute(desc, name, &value, sizeof value));
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
  CUBLAS_CHECK(cublasLtMatmulPreferenceCreate(&wish));
  const auto want = [&](cublasLtMatmulPreferenceAttributes_t name, auto value) {
    CUBLAS_CHECK(cublasLtMatmulPreferenceSetAttribute(wish, name, &value, sizeof value));
  };
  want(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(dev.blas_workspace_bytes));
  want(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, uint32_t(alignment(c.a)));
  want(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, uint32_t(alignment(c.b)));
  want(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, uint32_t(alignment(c.c ? c.c : c.d)));
  want(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, uint32_t(alignment(c.d)));
  std::vector<cublasLtMatmulHeuristicResult_t> found(most);
  int n = 0;
  const cublasStatus_t status =
      cublasLtMatmulAlgoGetHeuristic(handle_of(dev), p.desc, p.a, p.b, p.d, p.d, wish, most, found.data(), &n);
  CUBLAS_CHECK(cublasLtMatmulPreferenceDestroy(wish));
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
  CUBLAS_CHECK(cublasLtMatmulDescCreate(&p.desc, compute, CUDA_R_32F));
  set(p.desc, CUBLASLT_MATMUL_DESC_TRANSA, c.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(p.desc, CUBLASLT_MATMUL_DESC_TRANSB, c.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(p.desc, CUBLASLT_MATMUL_DESC_EPILOGUE, c.epilogue);
  if (c.aux) set(p.desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, c.m);
  if (is_fp8(c.in_a)) set(p.desc, CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t(c.fast_sums));
  if (c.scaling == fp8::Scaling::row) set_row_scaling(p.desc);
  set_pointers(c, p);  // their alignment counts too
  const auto layout = [&](cublasLtMatrixLayout_t* l, Dtype t, int64_t rows, int64_t columns) {
    CUBLAS_CHECK(cublasLtMatrixLayoutCreate(l, type_of(t), uint64_t(rows), uint64_t(columns), rows));
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
  return cublasLtMatmul(handle_of(s.device()), p.desc, &one, c.a, p.a, c.b, p.b, c.c ? &one : &zero, c.c ? c.c : c.d,
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
// How many g are further from gelu(h) than roundings of h and of g explain: gelu's slope is at most 1.13 and
// |gelu(h)| <= |h|, so two roundings of 2^-8 make at most 2.13 * 2^-8 |h|.
__global__ void wrong_gelus_kernel(unsigned long long* out, const bf16* g, const bf16* h, int64_t n) {
  unsigned long long wrong = 0;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < n; i += int64_t(gridDim.x) * blockDim.x) {
    const float x = float(h[i]), exact = x / (1.0f + expf(-1.5957691216f * (x + 0.044715f * x * x * x)));
    wrong += !(fabsf(float(g[i]) - exact) <= 0x1p-6f * fabsf(x) + 1e-30f);
  }
  atomicAdd(out, wrong);
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
  CUBLAS_CHECK(
      cublasLtMatmulAlgoConfigGetAttribute(&algo, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &splits, sizeof splits, &n));
  CUBLAS_CHECK(
      cublasLtMatmulAlgoConfigGetAttribute(&algo, CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME, &scheme, sizeof scheme, &n));
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
std::map<FusedKey, bool>& fusions_that_agree() {
  static std::map<FusedKey, bool> all;
  return all;
}
// in_one, apart: make g (M,F) and h (M,F) or (M,2F).
template <class InOne, class Apart>
void one_kernel_or_two(Stream& s, const FusedKey& key, const Call& product, bool can, bf16* g, bf16* h, InOne in_one,
                       Apart apart) {
  std::map<FusedKey, bool>& agree = fusions_that_agree();
  const auto known = agree.find(key);
  if (s.device().mode == Mode::run) return can && known != agree.end() && known->second ? in_one() : apart();
  multiply(s, product);  // tunes it
  if (!can || known != agree.end()) return;
  const int64_t n = key[2] * key[3], hidden = n * (Activation(key[1]) == Activation::gelu ? 1 : 2);
  std::array<unsigned long long, 2> bits[2];
  for (int one = 0; one < 2; ++one) {
    fill(s, g, Dtype::bf16, n, 6, 4), fill(s, h, Dtype::bf16, hidden, 5, 4);
    fill_inputs(s, product);
    one ? in_one() : apart();
    bits[one] = {checksum(s, g, Dtype::bf16, n), checksum(s, h, Dtype::bf16, hidden)};
  }
  agree[key] = bits[0] == bits[1];
}

void forward_activation(Stream& s, Activation kind, bf16* g, bf16* h, const bf16* x, const bf16* w, int64_t M,
                        int64_t F, int64_t K) {
  if (M * F == 0) return;
  const bf16* const none = nullptr;
  const Call product = forward_call<bf16>(h, x, w, none, none, M, kind == Activation::gelu ? F : 2 * F, K);
  one_kernel_or_two(
      s, {int64_t(Pass::forward), int64_t(kind), M, F, K, s.device().ordinal}, product,
      sm90::takes_activation(g, h, x, w, M, F, K), g, h,
      [&] { sm90::forward_activation(s.cuda(), kind, g, h, x, w, M, F, K); },
      [&] {
        launch(s, product, plan_of(s.device(), product));
        if (kind == Activation::gelu) gpu::gelu_forward<bf16>(s.cuda(), g, h, M * F);
        else gpu::swiglu_forward<bf16>(s.cuda(), g, h, M, F);
      });
}
// H200, two kernels and one, ms, 100 and more in a row: GELU, M 32768, N 768, F 3072: 0.412 and 0.340; M 2048: 0.0271
// and 0.0222; M 16384, N 4096, F 16384: 3.63 and 3.48; SwiGLU, M 8192, N 4096, F 14336: 1.71 and 1.54.
void dgrad_activation(Stream& s, Activation kind, bf16* g, bf16* h_dh, const bf16* dy, const bf16* w, int64_t M,
                      int64_t N, int64_t F) {
  if (M * F == 0) return;
  const Call product = dgrad_call<bf16>(g, dy, w, M, N, F, /*accumulate=*/false);
  one_kernel_or_two(
      s, {int64_t(Pass::backward), int64_t(kind), M, F, N, s.device().ordinal}, product,
      sm90::takes_activation(g, h_dh, dy, w, M, F, N), g, h_dh,
      [&] { sm90::dgrad_activation(s.cuda(), kind, g, h_dh, dy, w, M, N, F); },
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
  c.flops = 2.0 * double(M) * double(N) * double(K), c.share = !fp32 ? 0.70 : dev.tf32 ? 0.35 : 0.77;
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
void matmul_gelu(Stream& s, T* g, T* h, const T* x, const T* w, const T* bias, int64_t M, int64_t N, int64_t K) {
  const T* const none = nullptr;
  if (!s.device().fuse) {
    matmul(s, h, x, w, bias, none, M, N, K);
    return gelu_forward(s, g, h, M * N);
  }
  const bool ours = !bias && may_fuse_activation<T>(s.device());
  if (s.device().mode == Mode::plan) {
    const bool fused = ours || (std::is_same_v<T, bf16> && may_fuse_gelu(s.device(), K));
    s.spend(product<T, T>(s.device(), M, N, K, fused));
    return fused ? void() : gelu_forward(s, g, h, M * N);
  }
#if FSDP_CUDA
  if (s.on_gpu()) {
    if constexpr (std::is_same_v<T, bf16>) {
      if (ours) return forward_activation(s, Activation::gelu, g, h, x, w, M, N, K);
      return gelu_matmul(s, g, h, x, w, bias, M, N, K);
    }
    matmul(s, h, x, w, bias, none, M, N, K);
    return gelu_forward(s, g, h, M * N);
  }
#endif
  s.enqueue([=] { cpu::matmul_gelu(g, h, x, w, bias, M, N, K); });
}

template <class T>
void matmul_swiglu(Stream& s, T* g, T* h, const T* x, const T* w, int64_t M, int64_t F, int64_t K) {
  const bool fused = may_fuse_activation<T>(s.device());
  if (fused && s.device().mode == Mode::plan) {
    Cost c = product<T, T>(s.device(), M, 2 * F, K, /*others=*/0);
    c.bytes += double(M * F) * sizeof(T);
    return s.spend(c);
  }
#if FSDP_CUDA
  if constexpr (std::is_same_v<T, bf16>)
    if (fused && s.on_gpu()) return forward_activation(s, Activation::swiglu, g, h, x, w, M, F, K);
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
  const auto found = fusions_that_agree().find({int64_t(pass), int64_t(kind), M, F, K, dev.ordinal});
  return may_fuse_activation<bf16>(dev) && found != fusions_that_agree().end() && found->second;
#else
  (void)dev, (void)pass, (void)kind, (void)M, (void)F, (void)K;
  return false;
#endif
}

template <class T>
void matmul_dgrad_activation(Stream& s, Activation kind, T* g, T* h_dh, const T* dy, const T* w, int64_t M, int64_t N,
                             int64_t F) {
  const bool fused = may_fuse_activation<T>(s.device());
  if (fused && s.device().mode == Mode::plan) {
    Cost c = product<T, T>(s.device(), M, F, N, /*others=*/kind == Activation::gelu ? 2 : 4);
    c.share = 0.66;  // of rope's on one H200: results/gpu-tests-2026-11-28.log
    return s.spend(c);
  }
#if FSDP_CUDA
  if constexpr (std::is_same_v<T, bf16>)
    if (fused && s.on_gpu()) return dgrad_activation(s, kind, g, h_dh, dy, w, M, N, F);
#endif
  matmul_dgrad(s, g, dy, w, M, N, F, /*accumulate=*/false);
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

#define FOR(T)                                                                                                       \
  template void matmul(Stream&, T*, const T*, const T*, const T*, const T*, int64_t, int64_t, int64_t);              \
  template void matmul_gelu(Stream&, T*, T*, const T*, const T*, const T*, int64_t, int64_t, int64_t);               \
  template void matmul_swiglu(Stream&, T*, T*, const T*, const T*, int64_t, int64_t, int64_t);                       \
  template void matmul_dgrad(Stream&, T*, const T*, const T*, int64_t, int64_t, int64_t, bool);                      \
  template void matmul_dgrad_activation(Stream&, Activation, T*, T*, const T*, const T*, int64_t, int64_t, int64_t); \
  template void matmul_wgrad(Stream&, T*, const T*, const T*, int64_t, int64_t, int64_t, bool);                      \
  template void matmul_fp8(Stream&, T*, const Fp8Factor&, const Fp8Factor&, Fp8Sums, const T*, const T*, int64_t,    \
                           int64_t, int64_t);
FOR(float)
FOR(bf16)
FOR(double)
#undef FOR
template void matmul_wgrad(Stream&, float*, const bf16*, const bf16*, int64_t, int64_t, int64_t, bool);

}  // namespace ops
