// Every operation of the model, as a CUDA kernel or a cuBLASLt call on a GPU stream, and as its plain-loop twin
// (cpu/ops.h: same name, same arguments without the stream) on a CPU stream. A call enqueues and returns; in
// Mode::plan it does nothing. Matrices are row major. M: rows (tokens), C: model dim, V: vocabulary.
//
// T is the compute dtype: float, bf16, or double (CPU only: gradient checks). G is the dtype of the gradient slot:
// T, or float where T is bf16. Sums, softmax and statistics are in acc_t<T>. All results are deterministic: no atomics
// on floating-point numbers.
// Pointers are 16-byte aligned; C, V and hidden sizes are multiples of 8 on a GPU in bf16 (checked by the model).
#pragma once

#include "lib/device/fp8.h"
#include "lib/device/halves.h"
#include "lib/device/peers.h"
#include "lib/device/stream.h"
#include "lib/ops/rope.h"

namespace ops {

// Planned once, before everything else: cuBLASLt's workspace (GPU only).
void keep_workspace(Device& dev);

// Device::fuse says whether what only adds or maps elements is done by the kernel of the operation before it, or by a
// kernel of its own, which reads and writes the tensor once more: a product's bias, residual and activation, and the
// sum in front of a norm. Apart, a sum in bf16 is rounded once more. (The model knows three more: the residual's
// gradient is added by the backward of the norm, or of the product, beside it, and attention's backward undoes rotary
// positions.)

// ---- matmul (lib/ops/matmul.cu). On a GPU: cuBLASLt. In Mode::tune each new (shape, epilogue, dtypes) fills its
// inputs with random numbers, times the candidate algorithms on the very pointers of the plan and keeps the fastest of
// those that give the same bits as the library's first choice (so timing noise never changes a result). A shape that
// was never tuned, or on a device with tune_matmuls off, uses the first choice. A device's tf32 concerns float alone.

// y (M,N) = x (M,K) w (N,K)^T + bias (N) if not null + residual (M,N) if not null (may equal y).
template <class T>
void matmul(Stream& s, T* y, const T* x, const T* w, const T* bias, const T* residual, int64_t M, int64_t N, int64_t K);
enum class Activation { gelu, swiglu };
enum class Hidden { kept, scratch };   // scratch: nobody reads h, which may be left as it was
enum class Activated { made, given };  // given: g comes as what it leaves as
// h (M,N) = x (M,K) w (N,K)^T + bias (N), g (M,N) = gelu(h): one call, so that the GPU can fuse it (bf16, tuned). On
// Hopper, without a bias, one kernel has the bits of two; otherwise, where K is short, it gives the same h and a g that
// differs by rounding alone.
template <class T>
void matmul_gelu(Stream& s, T* g, T* h, Hidden hidden, const T* x, const T* w, const T* bias, int64_t M, int64_t N,
                 int64_t K);
// h (M,2F) = x (M,K) w (2F,K)^T, g (M,F) = SwiGLU of it: likewise, in one kernel on Hopper.
template <class T>
void matmul_swiglu(Stream& s, T* g, T* h, Hidden hidden, const T* x, const T* w, int64_t M, int64_t F, int64_t K);
// dx (M,K) = dy (M,N) w (N,K); added to dx if accumulate.
template <class T>
void matmul_dgrad(Stream& s, T* dx, const T* dy, const T* w, int64_t M, int64_t N, int64_t K, bool accumulate = false);
// Through W2 and an activation to its hidden layer: dy (M,N) is the gradient of g w^T, g (M,F) = activation(h), w
// (N,F). h_dh, (M,F) or of SwiGLU (M,2F), comes as h and leaves as its gradient; g is written, unless it is given. One
// call, so that the GPU can make it in one kernel (bf16, tuned, compute capability 9.0), with the bits of two.
template <class T>
void matmul_dgrad_activation(Stream& s, Activation kind, T* g, Activated activated, T* h_dh, const T* dy, const T* w,
                             int64_t M, int64_t N, int64_t F);
// Does one kernel make a product (M,F), contracted over K, and the activation behind it? Once a call has been tuned.
enum class Pass { forward, backward };
bool in_one_kernel(const Device& dev, Pass pass, Activation kind, int64_t M, int64_t F, int64_t K);
// dw (N,K) = dy^T (N,M) x (M,K); added to dw if accumulate.
template <class T, class G>
void matmul_wgrad(Stream& s, G* dw, const T* dy, const T* x, int64_t M, int64_t N, int64_t K, bool accumulate = false);
// ---- fp8 (lib/device/fp8.h). Current scaling: a matrix is cast with a scale of its own, from its own largest number,
// or with one for each row (and, of its transpose, for each column), from that row's. On a GPU (compute capability 8.9
// and later) matrices are bf16, and M, N, K, R and C multiples of 16.
constexpr int64_t fp8_most_rows = 65535 * 128;  // R of a cast on a GPU
// out (1) = the largest |x| of x (n), also fp32 on a GPU; of a NaN infinity. partials: sum_partials() numbers.
template <class T>
void amax(Stream& s, float* out, const T* x, float* partials, int64_t n);
// The same of each row of x (R,C), into rows (R), and of each column, into columns (C); either may be null. partials:
// vector_amax_partials(R, C) numbers.
int64_t vector_amax_partials(int64_t R, int64_t C);
template <class T>
void vector_amax(Stream& s, float* rows, float* columns, const T* x, float* partials, int64_t R, int64_t C);
// A matrix (R,C) in fp8, e4m3 or e5m2: times *unscale it is what was cast. rows: (R,C); columns: its transpose (C,R);
// either may be null. Scaled by row, unscale is (R + C): row r of `rows` times unscale[r], column c, which is a row of
// `columns`, times unscale[R + c].
struct Fp8Matrix {
  Dtype format = Dtype::e4m3;
  uint8_t *rows = nullptr, *columns = nullptr;
  float* unscale = nullptr;
  fp8::Scaling scaling = fp8::Scaling::tensor;
};
// A factor of a product: rows of K numbers, along which it is summed. Tensor cores take fp8 in this layout alone, so a
// product that sums along columns reads the transposes.
struct Fp8Factor {
  Dtype format = Dtype::e4m3;
  const uint8_t* data = nullptr;
  const float* unscale = nullptr;  // one number, or one for each row; on a GPU aligned to 16 bytes
  fp8::Scaling scaling = fp8::Scaling::tensor;
};
// Casts x (R,C) so that amax (1), the largest of it, becomes the format's largest; scaled by row, amax (R + C), the
// rows' and the columns', of which only those that `to` has are read. Rounded to nearest even. Where x is not finite,
// neither is a product of `to`.
template <class T>
void to_fp8(Stream& s, const Fp8Matrix& to, const T* x, const float* amax, int64_t R, int64_t C);
// codes (n) in e4m3 of x (n), cast as to_fp8 does; aligned to 8 numbers. unscale (n, scale_stride apart): what undoes
// the scale of each amax (n).
void to_e4m3(Stream& s, uint8_t* codes, const float* x, const float* amax, int64_t n);
void unscales(Stream& s, float* unscale, const float* amax, int64_t n, Dtype format);
// columns (C,R): the transpose of codes (R,C).
void transpose_codes(Stream& s, uint8_t* columns, const uint8_t* codes, int64_t R, int64_t C);
// x (n) = what the numbers of `from` (n) stand for. On a GPU n is a multiple of 16.
template <class T>
void from_fp8(Stream& s, T* x, const Fp8Factor& from, int64_t n);
// What an activation makes, cast with one scale without being written: the same bytes as amax and to_fp8 make of what
// gelu_forward or swiglu_forward has written, with less of memory's time.
// g (R,F) of h (R,F), or of SwiGLU (R,2F). amax (1) is written. partials: sum_partials() numbers.
template <class T>
void activation_to_fp8(Stream& s, Activation kind, const Fp8Matrix& g, const T* h, float* amax, float* partials,
                       int64_t R, int64_t F);
// dh, of h's shape and e5m2, and g (R,F) in e4m3, from dg (R,F) and h. amax (2), of dh and of g, is written. partials:
// sum_partials() numbers for each of them.
template <class T>
void activation_backward_to_fp8(Stream& s, Activation kind, const Fp8Matrix& dh, const Fp8Matrix& g, const T* dg,
                                const T* h, float* amax, float* partials, int64_t R, int64_t F);
// How tensor cores add up: fast, in fewer bits than fp32 has, which the forward pass may; or with sums in fp32.
enum class Fp8Sums { fast, fp32 };
// z (M,N) = a (M,K) b (N,K)^T + bias (N) if not null + residual (M,N) if not null (may equal z). One factor at most is
// e5m2; both are scaled alike.
template <class T>
void matmul_fp8(Stream& s, T* z, const Fp8Factor& a, const Fp8Factor& b, Fp8Sums sums, const T* bias, const T* residual,
                int64_t M, int64_t N, int64_t K);

// Sums of columns of which an operation leaves only pieces, each over some of the rows: out (C) will be the sum of
// pieces (count,C).
template <class G>
struct ColumnSums {
  static constexpr int most = 8;
  struct Of {
    G* out;
    const acc_t<G>* pieces;
    int count;
    int64_t C;
  } of[most];
  int n = 0;
  void add(G* out, const acc_t<G>* pieces, int64_t count, int64_t C) {
    ASSERT(n < most);
    of[n++] = {out, pieces, int(count), C};
  }
};
template <class G>
void sum_columns(Stream& s, const ColumnSums<G>& sums);
// db (N) = column sums of dy (M,N), rows of ld numbers; added to db if accumulate. partials: bias_grad_partials(M, N)
// numbers. later: instead of writing db, leaves pieces of it there and adds them to this list.
int64_t bias_grad_partials(int64_t M, int64_t N);
template <class T, class G>
void bias_grad(Stream& s, G* db, const T* dy, acc_t<T>* partials, int64_t M, int64_t N, int64_t ld,
               bool accumulate = false, ColumnSums<G>* later = nullptr);
// x (M,N), rows of ld numbers, += bias (N), where it is not a product's whole output.
template <class T>
void add_bias(Stream& s, T* x, const T* bias, int64_t M, int64_t N, int64_t ld);

// y (n) = a (n) + b (n); y may equal either.
template <class T>
void add(Stream& s, T* y, const T* a, const T* b, int64_t n);

// ---- norms. LayerNorm (Ba et al. 2016) with bias, RMSNorm (Zhang & Sennrich 2019) without.
enum class Norm { layer, rms };
// sum (M,C) = x (M,C) + delta (M,C); y (M,C) = norm(sum) * gamma (C) (+ beta (C)); stats (M,2): mean (0 for rms) and
// 1/std of each row, of the variance + eps. delta may be null: then sum is not written and may be null. sum may equal x
// or delta. largest (M; may be null): the largest |y| of each row, of a NaN infinity.
template <class T>
void norm_forward(Stream& s, Norm kind, T* y, T* sum, acc_t<T>* stats, const T* x, const T* delta, const T* gamma,
                  const T* beta, int64_t M, int64_t C, double eps, float* largest = nullptr);
// y (M,C) again from the saved input x (M,C) and stats (M,2): the same bits as norm_forward's y.
template <class T>
void norm_apply(Stream& s, Norm kind, T* y, const acc_t<T>* stats, const T* x, const T* gamma, const T* beta, int64_t M,
                int64_t C);
// dx (M,C) = dres (M,C), the residual's gradient (may be null, may equal dx), + the gradient through the norm of dy
// (M,C; may equal dx), from its input x (M,C), stats (M,2) and gamma (C). dgamma, dbeta (C; dbeta null for rms) are
// written, or added to if accumulate. partials: norm_backward_partials(kind, M, C) numbers. later: as of bias_grad.
int64_t norm_backward_partials(Norm kind, int64_t M, int64_t C);
template <class T, class G>
void norm_backward(Stream& s, Norm kind, T* dx, G* dgamma, G* dbeta, const T* dy, const T* dres, const T* x,
                   const acc_t<T>* stats, const T* gamma, acc_t<T>* partials, int64_t M, int64_t C,
                   bool accumulate = false, ColumnSums<G>* later = nullptr);

// ---- activations
// tanh-GELU (Hendrycks & Gimpel 2016): g (n) = gelu(h (n)). Backward in place: dg_g (n) comes as dg and leaves as
// gelu(h), which the next wgrad reads; h_dh (n) comes as h and leaves as dh.
template <class T>
void gelu_forward(Stream& s, T* g, const T* h, int64_t n);
template <class T>
void gelu_backward(Stream& s, T* dg_g, T* h_dh, int64_t n);
// The same of rows (M,F) to which a bias has been added: also leaves the pieces of its gradient db (F), as bias_grad.
template <class T, class G>
void gelu_backward(Stream& s, T* dg_g, T* h_dh, int64_t M, int64_t F, G* db, acc_t<T>* partials, ColumnSums<G>* later);
// SwiGLU (Shazeer 2020): h (M,2F) holds gate then up in each row; g (M,F) = silu(gate) * up. Backward in place:
// dg_g (M,F) comes as dg and leaves as g; h_dh (M,2F) comes as h and leaves as dh.
template <class T>
void swiglu_forward(Stream& s, T* g, const T* h, int64_t M, int64_t F);
template <class T>
void swiglu_backward(Stream& s, T* dg_g, T* h_dh, int64_t M, int64_t F);

// SiLU (Hendrycks & Gimpel 2016) of N columns of x, rows of ld numbers: h (M,N) = x + bias (N), a (M,N) = silu(h).
// Backward: da_a (M,N) comes as da and leaves as a; dx, N columns of rows of ld numbers, is written.
template <class T>
void silu_forward(Stream& s, T* a, T* h, const T* x, const T* bias, int64_t M, int64_t N, int64_t ld);
template <class T>
void silu_backward(Stream& s, T* da_a, T* dx, const T* h, int64_t M, int64_t N, int64_t ld);
// N columns of `from`, rows of ld_from numbers, to N columns of `to`, rows of ld_to.
template <class T>
void copy_columns(Stream& s, T* to, const T* from, int64_t M, int64_t N, int64_t ld_to, int64_t ld_from);

// ---- positions
// RoPE (Su et al. 2021), half-split pairs (i, i + D/2), in place on `heads` consecutive heads of D at the start of each
// row of x (M,ld); the row's position is row % T_. inverse: the transposed rotation, which is the backward.
// table (T_,D/2,2): cos and sin in fp32, made by rope_table.
template <class T>
void rope_table(Stream& s, acc_t<T>* table, int64_t T_, int64_t D, const Rope& how);
template <class T>
void rope(Stream& s, T* x, const acc_t<T>* table, int64_t M, int64_t T_, int64_t heads, int64_t D, int64_t ld,
          bool inverse);

// ---- embedding
// The inverse of a batch's tokens, made on the host beside the batch so that the gradient needs no sort and no atomics:
// a row of dE is the sum over its occurrences, in order; a row with many is cut into chunks of `chunk` occurrences.
struct TokenIndex {
  static constexpr int64_t chunk = 64;
  // order (M): positions sorted by token, stable. Row v owns order[start[v] .. start[v+1]), start (V+1).
  // part (V+1): row v with n > chunk occurrences owns ceil(n / chunk) partial sums, part[v] .. part[v+1] - 1, of C
  // numbers each, one for each run of `chunk` occurrences; a row with fewer owns none.
  const int32_t *order, *start, *part;
};
int64_t token_index_ints(int64_t M, int64_t V);  // ints that the three arrays need, in that order, in one buffer
void build_token_index(int32_t* out, const int32_t* tokens, int64_t M, int64_t V);  // host memory; tokens in [0,V)
TokenIndex token_index_at(const int32_t* base, int64_t M, int64_t V);
int64_t embedding_partials(int64_t M, int64_t C);  // an upper bound over all batches

// x (M,C) = table (V,C)[tokens (M)], + sin/cos positions (Vaswani et al. 2017: even channels sin, odd cos, base 10000,
// position row % T_) if add_positions.
template <class T>
void embedding_forward(Stream& s, T* x, const T* table, const int32_t* tokens, int64_t M, int64_t T_, int64_t C,
                       bool add_positions);
// dtable (V,C) = for each token the sum of dx (M,C) over its occurrences. Rows without occurrences are written with
// zero (all), or left alone (used), as they are where sums are added to what is there (add). index: of the batch's
// tokens (M). partials: embedding_partials(M, C) numbers.
enum class TableRows { all, used, add };
template <class T, class G>
void embedding_backward(Stream& s, G* dtable, const T* dx, TokenIndex index, acc_t<T>* partials, int64_t M, int64_t V,
                        int64_t C, TableRows rows);

// ---- head: softmax cross-entropy on a chunk of tokens
// logits (M,V) become dlogits = scale * (softmax - onehot(target)) in place if `backward`; loss_rows (M) = -log softmax
// [targets (M)], unscaled. A target of -1 is ignored: zero loss, zero gradient.
template <class T>
void cross_entropy(Stream& s, T* logits, acc_t<T>* loss_rows, const int32_t* targets, acc_t<T> scale, bool backward,
                   int64_t M, int64_t V);
// out (1) (+)= the sum of x (n), in a fixed order. partials: sum_partials() numbers.
int64_t sum_partials();
template <class A>
void sum(Stream& s, A* out, const A* x, A* partials, int64_t n, bool accumulate);
// flag (1) = 1 if some x (n) is infinite or not a number; else it stays as it is.
template <class T>
void flag_not_finite(Stream& s, int32_t* flag, const T* x, int64_t n);

// ---- parameters, on shards (n elements)
// w (n)[i] = mean + std * normal(seed, tensor, first + i), clamped at 3 std; Philox 4x32-10 (Salmon et al. 2011), so an
// element's value does not depend on how the tensor is cut.
void init_normal(Stream& s, const Masters& w, uint64_t seed, uint32_t tensor, int64_t first, int64_t n, float mean,
                 float std);
// w (n) = value; to (n) = from (n), rounded.
void fill(Stream& s, const Masters& w, float value, int64_t n);
template <class To, class From>
void cast(Stream& s, To* to, const From* from, int64_t n);
// The same of weights: to bf16 as halves are rounded. And without a loss.
template <class To>
void cast_weights(Stream& s, To* to, const float* w, int64_t n);
void copy_weights(Stream& s, const Masters& to, const float* from, int64_t n);
// The p-norm of a gradient is made in pieces. out (1), where somebody asks for it: the sum of |x|^p over what an
// operation writes, in a fixed order; where p is infinity the largest |x|, and of a NaN infinity. partials:
// sum_partials() doubles. adds: to what is in out.
enum class GradNorm { one = 1, two = 2, three = 3, inf = 0 };
struct PowerSum {
  GradNorm p = GradNorm::two;
  double *out = nullptr, *partials = nullptr;
  bool adds = false;
};
// out (1) = what pieces (n) make together.
void total_power(Stream& s, GradNorm p, double* out, const double* pieces, int64_t n);
// out (1) = the square of the norm, from that. loss (1), where there is one: the norm is not finite if that is not, so
// that adamw leaves the step out.
void squared_norm(Stream& s, GradNorm p, double* out, const double* loss = nullptr);
// Both, over ranks that write into each other's memory, in one kernel: mine (count, two or more) becomes the sum over
// ranks of theirs, in rank order, of which the first is made of pieces (n) and the second is the loss. from_ranks
// (scalars_of_peers(count, ranks)): what they write. On the stream of all else that meets them. On a GPU.
constexpr int64_t scalars_of_peers(int count, int ranks) { return int64_t(2) * ranks * count; }
void sum_scalars(Stream& s, GradNorm p, double* mine, int count, const double* pieces, int64_t n, double* from_ranks,
                 const Peers& peers);
// This rank's stream waits here until those of all ranks have come as far: what they wrote before, all may read behind
// it. row: of signals, for all that is on this stream. On a GPU.
void meet_peers(Stream& s, const Peers& peers, int row);
// shard (n) = (accumulate ? shard : 0) + grad (n). To is float; or G, where nothing is accumulated.
template <class G, class To>
void accumulate_gradient(Stream& s, To* shard, const G* grad, int64_t n, bool accumulate, PowerSum sum = {});
// to (n) = (accumulate ? to : 0) + the sum over ranks of their parts, in that order, in fp32 (fp64 of fp64): of `mine`
// (n), which is that of `rank`, and `others` (ranks - 1, n), all else. To is float; or E, where nothing is accumulated,
// and `to` may then be `mine`, or of two ranks `others`.
template <class To, class E>
void sum_parts(Stream& s, To* to, const E* mine, int rank, const E* others, int64_t n, int ranks, bool accumulate,
               PowerSum sum = {});
// The same of what each rank has at `mine` (n), read from its memory: on a GPU, on all ranks at once, which wait for
// each other before and behind it. to may be `mine`, and may be E with powers too. n: a multiple of a 16-byte vector's
// elements.
template <class To, class E>
void sum_parts(Stream& s, To* to, const E* mine, const Peers& peers, int64_t n, bool accumulate, PowerSum sum = {});
// Of a matrix (count, width) those rows that are not zero, though whatever may lie in the others: row v if start[v] <
// start[v + 1], of count + 1 of them. A TokenIndex says it of an embedding's gradient.
struct UsedRows {
  const int32_t* start = nullptr;
  int64_t count = 0, width = 0;
};
// The same of a matrix, of which `mine` is element `first`, where each rank's `start`, at the same place, tells which
// rows it used: no others are read, and what lies behind the matrix is zero. width and first: multiples of a vector's
// elements, too.
template <class To, class E>
void sum_parts(Stream& s, To* to, const E* mine, int64_t first, UsedRows rows, const Peers& peers, int64_t n,
               bool accumulate, PowerSum sum = {});
struct AdamW {  // Loshchilov & Hutter 2019; bias-corrected
  AdamW() = default;
  AdamW(float lr, float beta1, float beta2, float eps, float weight_decay, int64_t step);  // step counts from 1
  float lr = 0, beta1 = 0, beta2 = 0, eps = 1, weight_decay = 0, c1 = 1, c2 = 1;           // c: 1 / (1 - beta^step)
  uint32_t step = 1;
  // What is summed over all ranks, one behind the other as in StepScalars: the step again, and whether this rank is
  // asked to stop.
  double summand = 1, halt = 0;
};
// Whether a kernel begins a series of some that need nothing of each other, or goes on with it: then it takes the SMs
// that the one before on its stream has left, and need not wait until that is at its end.
enum class Series { begins, goes_on };
// w, m, v, grad (n): elements [first, first + n) of a tensor, of which the first `decayed` are decayed (matrices), the
// rest not. a (1) and sumsq (1), the square of the gradient's norm, are on the device: no number of a step is an
// argument, so that a CUDA graph of it can be replayed. Gradients are multiplied by min(1, clip / sqrt(*sumsq)) first
// if clip > 0. Where *sumsq is not finite nothing changes; without a sumsq (null, and clip 0) nobody looks. Moments in
// M, float or bf16; bf16 is rounded stochastically (up or down with the odds that make the mean right: Gupta et al.
// 2015), by Philox with seed, tensor, element and step, or else a beta close to 1 would never let a moment change.
template <class M, class G>
void adamw(Stream& s, const Masters& w, M* m, M* v, const G* grad, const double* sumsq, float clip, const AdamW* a,
           int64_t n, int64_t decayed, uint64_t seed, uint32_t tensor, int64_t first, Series series = Series::begins);

}  // namespace ops
