#include "model/linear.h"

template <class T>
template <class X>
void Linear<T>::find_amax(float* out, const X* x, int64_t n) {
  Buffer<float> partials = dev_.mem.take<float>(ops::sum_partials(), "partial sums");
  ops::amax<X>(dev_.compute(), out, x, partials, n);
}

// Of x (R,C): one number, or those of its rows and, behind them, of its columns, as far as `sides` wants them.
template <class T>
void Linear<T>::find_amaxes(float* out, const T* x, int64_t R, int64_t C, Sides sides, Maxima known) {
  if (!scales_rows()) return known.x ? find_amax(out, known.x, known.n) : find_amax(out, x, R * C);
  if (known.n == R && sides == Sides::rows) return dev_.compute().copy(out, known.x, R * int64_t(sizeof(float)));
  Buffer<float> partials = dev_.mem.take<float>(ops::vector_amax_partials(R, C), "partial maxima");
  ops::vector_amax<T>(dev_.compute(), sides == Sides::columns ? nullptr : out, sides == Sides::rows ? nullptr : out + R,
                      x, partials, R, C);
}

template <class T>
Fp8Copy Linear<T>::empty_copy(int64_t R, int64_t C, Dtype format, Sides sides) {
  Fp8Copy copy;
  if (sides != Sides::columns) copy.rows = dev_.mem.take<uint8_t>(R * C, "fp8");
  if (sides != Sides::rows) copy.columns = dev_.mem.take<uint8_t>(R * C, "fp8, transposed");
  copy.unscale = dev_.mem.take<float>(fp8::scales(scaling_, R, C), "fp8, scale");
  copy.by_rows = {format, copy.rows, copy.unscale, scaling_};
  copy.by_columns = {format, copy.columns, copy.unscale.get() + (scales_rows() ? R : 0), scaling_};
  return copy;
}
template <class T>
Fp8Copy Linear<T>::cast(const T* x, int64_t R, int64_t C, Dtype format, Sides sides, Maxima known) {
  if (!in_fp8_) return Fp8Copy();
  Fp8Copy copy = empty_copy(R, C, format, sides);
  Buffer<float> found;
  const bool is_it = !scales_rows() && known.n == 1;
  if (!is_it) {
    found = dev_.mem.take<float>(fp8::scales(scaling_, R, C), "fp8, largest number");
    find_amaxes(found, x, R, C, sides, known);
  }
  ops::to_fp8<T>(dev_.compute(), copy.matrix(), x, is_it ? known.x : found.get(), R, C);
  return copy;
}

// The forward pass, which reads rows, finds a weight's largest number; the backward of the same micro-batch finds it
// there.
template <class T>
Fp8Copy Linear<T>::cast_weight(const Weight& w, int64_t N, int64_t K, Sides sides) {
  if (!in_fp8_) return Fp8Copy();
  if (w.codes) {
    Fp8Copy copy;
    copy.by_rows = {Dtype::e4m3, w.codes, w.unscale};
    if (sides == Sides::rows) return copy;
    copy.columns = dev_.mem.take<uint8_t>(N * K, "fp8, transposed");
    copy.by_columns = {Dtype::e4m3, copy.columns, w.unscale};
    ops::transpose_codes(dev_.compute(), copy.columns, w.codes, N, K);
    return copy;
  }
  if (scales_rows()) return cast(w.w, N, K, Dtype::e4m3, sides);
  Fp8Copy copy = empty_copy(N, K, Dtype::e4m3, sides);
  if (sides == Sides::rows) find_amax(w.amax, w.w, N * K);
  ops::to_fp8<T>(dev_.compute(), copy.matrix(), w.w, w.amax, N, K);
  return copy;
}
// Gradients spread over more powers of two than weights and activations do.
template <class T>
Fp8Copy Linear<T>::cast_gradient(const T* dy, int64_t M, int64_t N) {
  return cast(dy, M, N, Dtype::e5m2, Sides::both);
}

// Scaled by row, what the activation makes is written first.
template <class T>
Fp8Copy Linear<T>::cast_activation(ops::Activation kind, const T* h, int64_t M, int64_t F) {
  Stream& s = dev_.compute();
  if (scales_rows()) {
    Buffer<T> g = dev_.mem.take<T>(M * F, "activated");
    if (kind == ops::Activation::swiglu) ops::swiglu_forward<T>(s, g, h, M, F);
    else ops::gelu_forward<T>(s, g, h, M * F);
    return cast(g, M, F, Dtype::e4m3, Sides::rows);
  }
  Fp8Copy g = empty_copy(M, F, Dtype::e4m3, Sides::rows);
  Buffer<float> amax = dev_.mem.take<float>(1, "fp8, largest number");
  Buffer<float> partials = dev_.mem.take<float>(ops::sum_partials(), "partial sums");
  ops::activation_to_fp8<T>(s, kind, g.matrix(), h, amax, partials, M, F);
  return g;
}
template <class T>
typename Linear<T>::ActivationGradients Linear<T>::cast_activation_backward(ops::Activation kind, const T* dg,
                                                                            const T* h, int64_t M, int64_t F) {
  const int64_t row = kind == ops::Activation::swiglu ? 2 * F : F;
  ActivationGradients of = {empty_copy(M, row, Dtype::e5m2, Sides::both),
                            empty_copy(M, F, Dtype::e4m3, Sides::columns)};
  Buffer<float> amax = dev_.mem.take<float>(2, "fp8, largest number");
  Buffer<float> partials = dev_.mem.take<float>(2 * ops::sum_partials(), "partial sums");
  ops::activation_backward_to_fp8<T>(dev_.compute(), kind, of.dh.matrix(), of.g.matrix(), dg, h, amax, partials, M, F);
  return of;
}

// -------------------------------------------------------------------------------------------------------- products

template <class T>
void Linear<T>::forward(T* y, const T* x, const Weight& w, const Fp8Copy& w8, const T* bias, const T* residual,
                        int64_t M, int64_t N, int64_t K, Maxima of_x) {
  if (!w8) return ops::matmul<T>(dev_.compute(), y, x, w.w, bias, residual, M, N, K);
  forward(y, cast(x, M, K, Dtype::e4m3, Sides::rows, of_x), w8, bias, residual, M, N, K);
}
template <class T>
void Linear<T>::forward(T* y, const Fp8Copy& x8, const Fp8Copy& w8, const T* bias, const T* residual, int64_t M,
                        int64_t N, int64_t K) {
  ops::matmul_fp8<T>(dev_.compute(), y, x8.by_rows, w8.by_rows, ops::Fp8Sums::fast, bias, residual, M, N, K);
}
template <class T>
void Linear<T>::dgrad(T* dx, const T* dy, const Fp8Copy& dy8, const Weight& w, const Fp8Copy& w8, int64_t M, int64_t N,
                      int64_t K, bool accumulate) {
  if (!w8) return ops::matmul_dgrad<T>(dev_.compute(), dx, dy, w.w, M, N, K, accumulate);
  ops::matmul_fp8<T>(dev_.compute(), dx, dy8.by_rows, w8.by_columns, ops::Fp8Sums::fp32, nullptr,
                     accumulate ? dx : nullptr, M, K, N);
}
template <class T>
template <class E>
void Linear<T>::wgrad(E* dw, const T* dy, const Fp8Copy& dy8, const T* x, int64_t M, int64_t N, int64_t K,
                      bool accumulate, Maxima of_x) {
  if (!dy8) return ops::matmul_wgrad<T, E>(dev_.compute(), dw, dy, x, M, N, K, accumulate);
  wgrad(dw, dy8, cast(x, M, K, Dtype::e4m3, Sides::columns, of_x), M, N, K, accumulate);
}
template <class T>
template <class E>
void Linear<T>::wgrad(E* dw, const Fp8Copy& dy8, const Fp8Copy& x8, int64_t M, int64_t N, int64_t K, bool accumulate) {
  ops::matmul_fp8<E>(dev_.compute(), dw, dy8.by_columns, x8.by_columns, ops::Fp8Sums::fp32, nullptr,
                     accumulate ? dw : nullptr, N, K, M);
}

template class Linear<float>;
template class Linear<bf16>;
template class Linear<double>;
template void Linear<float>::find_amax(float*, const float*, int64_t);
template void Linear<bf16>::find_amax(float*, const bf16*, int64_t);
template void Linear<double>::find_amax(float*, const double*, int64_t);
template void Linear<bf16>::find_amax(float*, const float*, int64_t);  // of what attention's kernels have found
template void Linear<double>::find_amax(float*, const float*, int64_t);
#define FOR(T, E)                                                                                                  \
  template void Linear<T>::wgrad(E*, const T*, const Fp8Copy&, const T*, int64_t, int64_t, int64_t, bool, Maxima); \
  template void Linear<T>::wgrad(E*, const Fp8Copy&, const Fp8Copy&, int64_t, int64_t, int64_t, bool);
FOR(float, float)
FOR(bf16, bf16)
FOR(bf16, float)
FOR(double, double)
#undef FOR
