// Dispatch: an operation runs as a CUDA kernel (gpu::) or as its twin (cpu::), or not at all while planning.
#include "lib/ops/ops.h"

#include "cpu/fp8.h"
#include "cpu/ops.h"
#include "lib/device/device.h"
#if FSDP_CUDA
#include "lib/ops/kernels_elementwise.cuh"
#include "lib/ops/kernels_fp8.cuh"
#include "lib/ops/kernels_norm.cuh"
#include "lib/ops/kernels_peers.cuh"
#include "lib/ops/kernels_sums.cuh"
#endif

namespace ops {

#if FSDP_CUDA
[[noreturn]] static void refuse_dtype(const char* name) {
  throw Error(strf("%s: this dtype runs on the CPU backend only", name));
}
#define RUN_ON_GPU(cpu_alone, name, ...)          \
  if (s.on_gpu()) {                               \
    if constexpr (cpu_alone) refuse_dtype(#name); \
    else gpu::name(s.cuda(), __VA_ARGS__);        \
    return;                                       \
  }
#else
#define RUN_ON_GPU(cpu_alone, name, ...)
#endif
// bytes: read and written, for the estimate of a dry run.
#define RUN(cpu_alone, bytes, name, ...)        \
  do {                                          \
    if (s.off()) return s.spend(bytes);         \
    RUN_ON_GPU(cpu_alone, name, __VA_ARGS__)    \
    s.enqueue([=] { cpu::name(__VA_ARGS__); }); \
  } while (0)

template <class T>
constexpr bool is_double = std::is_same_v<T, double>;
template <class T>
constexpr bool is_bf16 = std::is_same_v<T, bf16>;

// ------------------------------------------------------------------------------------------- workspaces and indices

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// These say how the kernels cut their sums over blocks. They depend on the shape alone: a plan made without a GPU asks
// for the same memory, and the order of a sum is the same on every GPU.
// A column sum: about 1056 blocks of 256 columns (eight for each SM of an H200), each with 64 rows or more.
int64_t bias_grad_partials(int64_t M, int64_t N) {
  return std::max<int64_t>(1, std::min(ceil_div(M, 32), ceil_div(1056, ceil_div(N, 256)))) * N;
}
// 264 blocks (two for each SM of an H200) with sums for dgamma and, of a LayerNorm, dbeta.
int64_t norm_backward_partials(Norm kind, int64_t M, int64_t C) {
  return (kind == Norm::layer ? 2 : 1) * std::max<int64_t>(1, std::min<int64_t>(264, M)) * C;
}
int64_t sum_partials() { return 1024; }

// Rows with n > chunk occurrences own ceil(n / chunk) <= 2n / (chunk + 1) slots.
int64_t embedding_partials(int64_t M, int64_t C) { return std::max<int64_t>(1, 2 * M / (TokenIndex::chunk + 1)) * C; }

int64_t token_index_ints(int64_t M, int64_t V) { return M + 2 * (V + 1); }
TokenIndex token_index_at(const int32_t* base, int64_t M, int64_t V) { return {base, base + M, base + M + V + 1}; }

// A counting sort.
void build_token_index(int32_t* out, const int32_t* tokens, int64_t M, int64_t V) {
  int32_t *order = out, *start = out + M, *part = start + V + 1;
  std::fill(start, start + V + 1, 0);
  for (int64_t m = 0; m < M; ++m) {
    ASSERT(tokens[m] >= 0 && tokens[m] < V);
    ++start[tokens[m] + 1];
  }
  part[0] = 0;
  for (int64_t v = 0; v < V; ++v) {
    const int64_t n = start[v + 1];
    part[v + 1] = part[v] + int32_t(n > TokenIndex::chunk ? ceil_div(n, TokenIndex::chunk) : 0);
    start[v + 1] += start[v];
  }
  std::vector<int32_t> next(start, start + V);
  for (int64_t m = 0; m < M; ++m) order[next[tokens[m]]++] = int32_t(m);
}

// --------------------------------------------------------------------------------------------------------- operations

template <class T, class G>
void bias_grad(Stream& s, G* db, const T* dy, acc_t<T>* partials, int64_t M, int64_t N, int64_t ld, bool accumulate,
               ColumnSums<G>* later) {
  ASSERT(!later || !accumulate);
  if (later && (s.off() || !s.on_gpu())) later->add(db, partials, 1, N);
  RUN(is_double<T>, moves<T>(M * N, later ? 1 : 2), bias_grad, db, dy, partials, M, N, ld, accumulate, later);
}
template <class G>
void sum_columns(Stream& s, const ColumnSums<G>& sums) {
  int64_t n = 0;
  for (int i = 0; i < sums.n; i++) n += sums.of[i].count * sums.of[i].C;
  if (sums.n > 0) RUN(is_double<G>, moves<acc_t<G>>(n), sum_columns, sums);
}

template <class T>
void add_bias(Stream& s, T* x, const T* bias, int64_t M, int64_t N, int64_t ld) {
  RUN(is_double<T>, moves<T>(2 * M * N), add_bias, x, bias, M, N, ld);
}

template <class T>
void add(Stream& s, T* y, const T* a, const T* b, int64_t n) {
  RUN(is_double<T>, moves<T>(3 * n), add, y, a, b, n);
}

template <class T>
void norm_forward(Stream& s, Norm kind, T* y, T* sum, acc_t<T>* stats, const T* x, const T* delta, const T* gamma,
                  const T* beta, int64_t M, int64_t C, double eps, float* largest) {
  if (delta && !s.device().fuse) {
    add(s, sum, x, delta, M * C);
    return norm_forward<T>(s, kind, y, nullptr, stats, sum, nullptr, gamma, beta, M, C, eps, largest);
  }
  RUN(is_double<T>, moves<T>((delta ? 4 : 2) * M * C), norm_forward, kind, y, sum, stats, x, delta, gamma, beta, M, C,
      eps, largest);
}
template <class T>
void norm_apply(Stream& s, Norm kind, T* y, const acc_t<T>* stats, const T* x, const T* gamma, const T* beta, int64_t M,
                int64_t C) {
  RUN(is_double<T>, moves<T>(2 * M * C), norm_apply, kind, y, stats, x, gamma, beta, M, C);
}
template <class T, class G>
void norm_backward(Stream& s, Norm kind, T* dx, G* dgamma, G* dbeta, const T* dy, const T* dres, const T* x,
                   const acc_t<T>* stats, const T* gamma, acc_t<T>* partials, int64_t M, int64_t C, bool accumulate,
                   ColumnSums<G>* later) {
  ASSERT(!later || !accumulate);
  if (later && (s.off() || !s.on_gpu())) {
    later->add(dgamma, partials, 1, C);
    if (dbeta) later->add(dbeta, partials + C, 1, C);
  }
  RUN(is_double<T>, moves<T>((dres ? 4 : 3) * M * C, later ? 1 : 2), norm_backward, kind, dx, dgamma, dbeta, dy, dres,
      x, stats, gamma, partials, M, C, accumulate, later);
}

template <class T>
void gelu_forward(Stream& s, T* g, const T* h, int64_t n) {
  RUN(is_double<T>, moves<T>(2 * n), gelu_forward, g, h, n);
}
template <class T>
void gelu_backward(Stream& s, T* dg_g, T* h_dh, int64_t n) {
  RUN(is_double<T>, moves<T>(4 * n), gelu_backward, dg_g, h_dh, n);
}
template <class T, class G>
void gelu_backward(Stream& s, T* dg_g, T* h_dh, int64_t M, int64_t F, G* db, acc_t<T>* partials, ColumnSums<G>* later) {
  if (s.off() || !s.on_gpu()) later->add(db, partials, 1, F);
  RUN(is_double<T>, moves<T>(4 * M * F), gelu_backward, dg_g, h_dh, M, F, db, partials, later);
}
template <class T>
void swiglu_forward(Stream& s, T* g, const T* h, int64_t M, int64_t F) {
  RUN(is_double<T>, moves<T>(3 * M * F), swiglu_forward, g, h, M, F);
}
template <class T>
void swiglu_backward(Stream& s, T* dg_g, T* h_dh, int64_t M, int64_t F) {
  RUN(is_double<T>, moves<T>(6 * M * F), swiglu_backward, dg_g, h_dh, M, F);
}

template <class T>
void silu_forward(Stream& s, T* a, T* h, const T* x, const T* bias, int64_t M, int64_t N, int64_t ld) {
  RUN(is_double<T>, moves<T>(3 * M * N), silu_forward, a, h, x, bias, M, N, ld);
}
template <class T>
void silu_backward(Stream& s, T* da_a, T* dx, const T* h, int64_t M, int64_t N, int64_t ld) {
  RUN(is_double<T>, moves<T>(4 * M * N), silu_backward, da_a, dx, h, M, N, ld);
}
template <class T>
void copy_columns(Stream& s, T* to, const T* from, int64_t M, int64_t N, int64_t ld_to, int64_t ld_from) {
  RUN(is_double<T>, moves<T>(2 * M * N), copy_columns, to, from, M, N, ld_to, ld_from);
}

template <class T>
void rope_table(Stream& s, acc_t<T>* table, int64_t T_, int64_t D, const Rope& how) {
  RUN(is_double<T>, moves<T>(T_ * D), rope_table<T>, table, T_, D, how);
}
template <class T>
void rope(Stream& s, T* x, const acc_t<T>* table, int64_t M, int64_t T_, int64_t heads, int64_t D, int64_t ld,
          bool inverse) {
  RUN(is_double<T>, moves<T>(2 * M * heads * D), rope, x, table, M, T_, heads, D, ld, inverse);
}

template <class T>
void embedding_forward(Stream& s, T* x, const T* table, const int32_t* tokens, int64_t M, int64_t T_, int64_t C,
                       bool add_positions) {
  RUN(is_double<T>, moves<T>(2 * M * C), embedding_forward, x, table, tokens, M, T_, C, add_positions);
}
template <class T, class G>
void embedding_backward(Stream& s, G* dtable, const T* dx, TokenIndex index, acc_t<T>* partials, int64_t M, int64_t V,
                        int64_t C, TableRows rows) {
  const int64_t moved = rows == TableRows::all ? M + V : std::min(M, V) * (rows == TableRows::add ? 2 : 1) + M;
  RUN(is_double<T>, moves<T>(moved * C, 2), embedding_backward, dtable, dx, index, partials, M, V, C, rows);
}

template <class T>
void cross_entropy(Stream& s, T* logits, acc_t<T>* loss_rows, const int32_t* targets, acc_t<T> scale, bool backward,
                   int64_t M, int64_t V) {
  RUN(is_double<T>, moves<T>((backward ? 2 : 1) * M * V), cross_entropy, logits, loss_rows, targets, scale, backward, M,
      V);
}
template <class A>
void sum(Stream& s, A* out, const A* x, A* partials, int64_t n, bool accumulate) {
  RUN(is_double<A>, moves<A>(n, 2), sum, out, x, partials, n, accumulate);
}

// Kernels cast bf16 alone.
static int64_t copies_of(const Fp8Matrix& m) { return (m.rows != nullptr) + (m.columns != nullptr); }
template <class T>
void amax(Stream& s, float* out, const T* x, float* partials, int64_t n) {
  RUN(is_double<T>, moves<T>(n, 2), amax, out, x, partials, n);
}
// A number for each row and column of a tile of 128 x 128.
int64_t vector_amax_partials(int64_t R, int64_t C) { return ceil_div(C, 128) * R + ceil_div(R, 128) * C; }
template <class T>
void vector_amax(Stream& s, float* rows, float* columns, const T* x, float* partials, int64_t R, int64_t C) {
  ASSERT(!s.on_gpu() || (R % 16 == 0 && C % 16 == 0));
  RUN(!is_bf16<T>, moves<T>(R * C, 1 + (rows != nullptr) + (columns != nullptr)), vector_amax, rows, columns, x,
      partials, R, C);
}
template <class T>
void to_fp8(Stream& s, const Fp8Matrix& to, const T* x, const float* amax, int64_t R, int64_t C) {
  ASSERT(!s.on_gpu() || (R % 16 == 0 && C % 16 == 0));
  RUN(!is_bf16<T>, moves<char>(R * C * (int64_t(sizeof(T)) + copies_of(to))), to_fp8, to, x, amax, R, C);
}

void to_e4m3(Stream& s, uint8_t* codes, const float* x, const float* amax, int64_t n) {
  ASSERT(n % 8 == 0);
  RUN(false, moves<char>(n * (1 + int64_t(sizeof(float)))), to_e4m3, codes, x, amax, n);
}
void unscales(Stream& s, float* unscale, const float* amax, int64_t n, Dtype format) {
  RUN(false, moves<float>(2 * n), unscales, unscale, amax, n, format);
}
void transpose_codes(Stream& s, uint8_t* columns, const uint8_t* codes, int64_t R, int64_t C) {
  ASSERT(!s.on_gpu() || (R % 16 == 0 && C % 16 == 0));
  RUN(false, moves<char>(2 * R * C), transpose_codes, columns, codes, R, C);
}
template <class T>
void from_fp8(Stream& s, T* x, const Fp8Factor& from, int64_t n) {
  ASSERT(!s.on_gpu() || n % 16 == 0);
  RUN(!is_bf16<T>, moves<char>(n * (1 + int64_t(sizeof(T)))), from_fp8, x, from, n);
}
template <class T>
void activation_to_fp8(Stream& s, Activation kind, const Fp8Matrix& g, const T* h, float* amax, float* partials,
                       int64_t R, int64_t F) {
  ASSERT(!s.on_gpu() || (R % 16 == 0 && F % 16 == 0));
  ASSERT(g.scaling == fp8::Scaling::tensor);
  const int64_t read = (kind == Activation::swiglu ? 2 : 1) * int64_t(sizeof(T));
  RUN(!is_bf16<T>, moves<char>(R * F * (2 * read + copies_of(g)), 3), activation_to_fp8, kind, g, h, amax, partials, R,
      F);
}
template <class T>
void activation_backward_to_fp8(Stream& s, Activation kind, const Fp8Matrix& dh, const Fp8Matrix& g, const T* dg,
                                const T* h, float* amax, float* partials, int64_t R, int64_t F) {
  ASSERT(!s.on_gpu() || (R % 16 == 0 && F % 16 == 0));
  ASSERT(dh.format == Dtype::e5m2 && g.format == Dtype::e4m3);
  ASSERT(dh.scaling == fp8::Scaling::tensor && g.scaling == fp8::Scaling::tensor);
  const int64_t row = kind == Activation::swiglu ? 2 : 1, read = (row + 1) * int64_t(sizeof(T));
  RUN(!is_bf16<T>, moves<char>(R * F * (2 * read + row * copies_of(dh) + copies_of(g)), 4), activation_backward_to_fp8,
      kind, dh, g, dg, h, amax, partials, R, F);
}

template <class T>
void flag_not_finite(Stream& s, int32_t* flag, const T* x, int64_t n) {
  RUN(is_double<T>, moves<T>(n), flag_not_finite, flag, x, n);
}

void init_normal(Stream& s, const Masters& weights, uint64_t seed, uint32_t tensor, int64_t first, int64_t n,
                 float mean, float std) {
  weights.visit([&](auto w) { RUN(false, moves<float>(n), init_normal, w, seed, tensor, first, n, mean, std); });
}
void fill(Stream& s, const Masters& weights, float value, int64_t n) {
  weights.visit([&](auto w) { RUN(false, moves<float>(n), fill, w, value, n); });
}
void copy_weights(Stream& s, const Masters& weights, const float* from, int64_t n) {
  weights.visit([&](auto to) { RUN(false, moves<float>(2 * n), copy_weights, to, from, n); });
}
template <class To>
void cast_weights(Stream& s, To* to, const float* w, int64_t n) {
  RUN(is_double<To>, moves<char>(n * (sizeof(To) + sizeof(float))), cast_weights, to, w, n);
}
template <class To, class From>
void cast(Stream& s, To* to, const From* from, int64_t n) {
  RUN(is_double<From>, moves<char>(n * (sizeof(To) + sizeof(From))), cast, to, from, n);
}
template <class G, class To>
void accumulate_gradient(Stream& s, To* shard, const G* grad, int64_t n, bool accumulate, PowerSum sum) {
  const int64_t bytes = int64_t(sizeof(G)) + int64_t(sizeof(To)) * (accumulate ? 2 : 1);
  RUN(is_double<G>, moves<char>(n * bytes, sum.out ? 2 : 1), accumulate_gradient, shard, grad, n, accumulate, sum);
}
template <class To, class E>
void sum_parts(Stream& s, To* to, const E* mine, int rank, const E* others, int64_t n, int ranks, bool accumulate,
               PowerSum sum) {
  const int64_t bytes = ranks * int64_t(sizeof(E)) + int64_t(sizeof(To)) * (accumulate ? 2 : 1);
  RUN(is_double<E>, moves<char>(n * bytes, sum.out ? 2 : 1), sum_parts, to, mine, rank, others, n, ranks, accumulate,
      sum);
}
template <class To, class E>
void sum_parts(Stream& s, To* to, const E* mine, const Peers& peers, int64_t n, bool accumulate, PowerSum sum) {
#if FSDP_CUDA
  if constexpr (is_double<E>) refuse_dtype("sum_parts");
  else gpu::sum_parts(s.cuda(), to, mine, peers, n, accumulate, sum);
#else
  (void)s, (void)to, (void)mine, (void)peers, (void)n, (void)accumulate, (void)sum;
  throw Error("sum_parts: a CPU does not read its peers' memory");
#endif
}
template <class To, class E>
void sum_parts(Stream& s, To* to, const E* mine, int64_t first, UsedRows rows, const Peers& peers, int64_t n,
               bool accumulate, PowerSum sum) {
#if FSDP_CUDA
  if constexpr (is_double<E>) refuse_dtype("sum_parts");
  else gpu::sum_parts(s.cuda(), to, mine, first, rows, peers, n, accumulate, sum);
#else
  (void)s, (void)to, (void)mine, (void)first, (void)rows, (void)peers, (void)n, (void)accumulate, (void)sum;
  throw Error("sum_parts: a CPU does not read its peers' memory");
#endif
}
void total_power(Stream& s, GradNorm p, double* out, const double* pieces, int64_t n) {
  RUN(false, moves<double>(n, 1, Work::optimizer), total_power, p, out, pieces, n);
}
void sum_scalars(Stream& s, GradNorm p, double* mine, int count, const double* pieces, int64_t n, double* from_ranks,
                 const Peers& peers) {
#if FSDP_CUDA
  gpu::sum_scalars(s.cuda(), p, mine, count, pieces, n, from_ranks, peers);
#else
  (void)s, (void)p, (void)mine, (void)count, (void)pieces, (void)n, (void)from_ranks, (void)peers;
  throw Error("sum_scalars: a CPU does not read its peers' memory");
#endif
}
void meet_peers(Stream& s, const Peers& peers, int row) {
#if FSDP_CUDA
  gpu::meet_peers(s.cuda(), peers, row);
#else
  (void)s, (void)peers, (void)row;
  throw Error("meet_peers: a CPU does not read its peers' memory");
#endif
}
void squared_norm(Stream& s, GradNorm p, double* out, const double* loss) {
  RUN(false, moves<double>(1, 1, Work::optimizer), squared_norm, p, out, loss);
}

AdamW::AdamW(float lr, float beta1, float beta2, float eps, float weight_decay, int64_t step)
    : lr(lr),
      beta1(beta1),
      beta2(beta2),
      eps(eps),
      weight_decay(weight_decay),
      c1(float(1 / (1 - std::pow(double(beta1), double(step))))),
      c2(float(1 / (1 - std::pow(double(beta2), double(step))))),
      step(uint32_t(step)),
      summand(double(step)) {}
template <class M, class G>
void adamw(Stream& s, const Masters& weights, M* m, M* v, const G* grad, const double* sumsq, float clip,
           const AdamW* a, int64_t n, int64_t decayed, uint64_t seed, uint32_t tensor, int64_t first, Series series) {
  weights.visit([&](auto w) {
    RUN(false, moves<char>(n * int64_t(8 + sizeof(G) + 4 * sizeof(M)), 1, Work::optimizer), adamw, w, m, v, grad, sumsq,
        clip, a, n, decayed, seed, tensor, first, series);
  });
}

// ------------------------------------------------------------------------------------------------------ instantiation

#define FOR(T)                                                                                                        \
  template void norm_forward(Stream&, Norm, T*, T*, acc_t<T>*, const T*, const T*, const T*, const T*, int64_t,       \
                             int64_t, double, float*);                                                                \
  template void norm_apply(Stream&, Norm, T*, const acc_t<T>*, const T*, const T*, const T*, int64_t, int64_t);       \
  template void add_bias(Stream&, T*, const T*, int64_t, int64_t, int64_t);                                           \
  template void add(Stream&, T*, const T*, const T*, int64_t);                                                        \
  template void gelu_forward(Stream&, T*, const T*, int64_t);                                                         \
  template void gelu_backward(Stream&, T*, T*, int64_t);                                                              \
  template void swiglu_forward(Stream&, T*, const T*, int64_t, int64_t);                                              \
  template void swiglu_backward(Stream&, T*, T*, int64_t, int64_t);                                                   \
  template void silu_forward(Stream&, T*, T*, const T*, const T*, int64_t, int64_t, int64_t);                         \
  template void silu_backward(Stream&, T*, T*, const T*, int64_t, int64_t, int64_t);                                  \
  template void copy_columns(Stream&, T*, const T*, int64_t, int64_t, int64_t, int64_t);                              \
  template void rope_table<T>(Stream&, acc_t<T>*, int64_t, int64_t, const Rope&);                                     \
  template void rope(Stream&, T*, const acc_t<T>*, int64_t, int64_t, int64_t, int64_t, int64_t, bool);                \
  template void embedding_forward(Stream&, T*, const T*, const int32_t*, int64_t, int64_t, int64_t, bool);            \
  template void flag_not_finite(Stream&, int32_t*, const T*, int64_t);                                                \
  template void amax(Stream&, float*, const T*, float*, int64_t);                                                     \
  template void vector_amax(Stream&, float*, float*, const T*, float*, int64_t, int64_t);                             \
  template void to_fp8(Stream&, const Fp8Matrix&, const T*, const float*, int64_t, int64_t);                          \
  template void from_fp8(Stream&, T*, const Fp8Factor&, int64_t);                                                     \
  template void activation_to_fp8(Stream&, Activation, const Fp8Matrix&, const T*, float*, float*, int64_t, int64_t); \
  template void activation_backward_to_fp8(Stream&, Activation, const Fp8Matrix&, const Fp8Matrix&, const T*,         \
                                           const T*, float*, float*, int64_t, int64_t);                               \
  template void cross_entropy(Stream&, T*, acc_t<T>*, const int32_t*, acc_t<T>, bool, int64_t, int64_t);              \
  template void accumulate_gradient(Stream&, float*, const T*, int64_t, bool, PowerSum);
FOR(float)
FOR(bf16)
FOR(double)
#undef FOR

#define FOR(T, G)                                                                                                 \
  template void bias_grad(Stream&, G*, const T*, acc_t<T>*, int64_t, int64_t, int64_t, bool, ColumnSums<G>*);     \
  template void norm_backward(Stream&, Norm, T*, G*, G*, const T*, const T*, const T*, const acc_t<T>*, const T*, \
                              acc_t<T>*, int64_t, int64_t, bool, ColumnSums<G>*);                                 \
  template void gelu_backward(Stream&, T*, T*, int64_t, int64_t, G*, acc_t<T>*, ColumnSums<G>*);                  \
  template void embedding_backward(Stream&, G*, const T*, TokenIndex, acc_t<T>*, int64_t, int64_t, int64_t, TableRows);
FOR(float, float)
FOR(bf16, bf16)
FOR(bf16, float)
FOR(double, double)
#undef FOR

template void sum_columns(Stream&, const ColumnSums<float>&);
template void sum_columns(Stream&, const ColumnSums<bf16>&);
template void sum_columns(Stream&, const ColumnSums<double>&);
template void sum(Stream&, float*, const float*, float*, int64_t, bool);
template void sum(Stream&, double*, const double*, double*, int64_t, bool);
template void sum_parts(Stream&, float*, const float*, int, const float*, int64_t, int, bool, PowerSum);
template void sum_parts(Stream&, float*, const bf16*, int, const bf16*, int64_t, int, bool, PowerSum);
template void sum_parts(Stream&, bf16*, const bf16*, int, const bf16*, int64_t, int, bool, PowerSum);
template void sum_parts(Stream&, float*, const double*, int, const double*, int64_t, int, bool, PowerSum);
template void sum_parts(Stream&, double*, const double*, int, const double*, int64_t, int, bool, PowerSum);
template void sum_parts(Stream&, float*, const float*, const Peers&, int64_t, bool, PowerSum);
template void sum_parts(Stream&, float*, const float*, int64_t, UsedRows, const Peers&, int64_t, bool, PowerSum);
template void sum_parts(Stream&, float*, const bf16*, const Peers&, int64_t, bool, PowerSum);
template void sum_parts(Stream&, float*, const bf16*, int64_t, UsedRows, const Peers&, int64_t, bool, PowerSum);
template void sum_parts(Stream&, bf16*, const bf16*, const Peers&, int64_t, bool, PowerSum);
template void sum_parts(Stream&, bf16*, const bf16*, int64_t, UsedRows, const Peers&, int64_t, bool, PowerSum);
template void sum_parts(Stream&, float*, const double*, const Peers&, int64_t, bool, PowerSum);
template void sum_parts(Stream&, float*, const double*, int64_t, UsedRows, const Peers&, int64_t, bool, PowerSum);
template void sum_parts(Stream&, double*, const double*, const Peers&, int64_t, bool, PowerSum);
template void sum_parts(Stream&, double*, const double*, int64_t, UsedRows, const Peers&, int64_t, bool, PowerSum);
template void cast(Stream&, float*, const float*, int64_t);
template void cast(Stream&, bf16*, const float*, int64_t);
template void cast(Stream&, double*, const float*, int64_t);
template void cast_weights(Stream&, float*, const float*, int64_t);
template void cast_weights(Stream&, bf16*, const float*, int64_t);
template void cast_weights(Stream&, double*, const float*, int64_t);
template void cast(Stream&, double*, const double*, int64_t);
template void cast(Stream&, float*, const bf16*, int64_t);
template void cast(Stream&, float*, const double*, int64_t);
template void accumulate_gradient(Stream&, bf16*, const bf16*, int64_t, bool, PowerSum);
#define FOR(M, G)                                                                                                      \
  template void adamw(Stream&, const Masters&, M*, M*, const G*, const double*, float, const AdamW*, int64_t, int64_t, \
                      uint64_t, uint32_t, int64_t, Series);
FOR(float, float)
FOR(float, bf16)
FOR(bf16, float)
FOR(bf16, bf16)
#undef FOR

}  // namespace ops

#if FSDP_CUDA
// lib/ops/matmul.cu times this kernel against cuBLASLt's fused one.
template void gpu::gelu_forward(cudaStream_t, float*, const float*, int64_t);
template void gpu::gelu_forward(cudaStream_t, bf16*, const bf16*, int64_t);
#endif
