// Products with a block's weights, forward and backward: in the model's dtype, or in fp8 (Micikevicius et al., "FP8
// Formats for Deep Learning", 2022), where a factor is cast on its way, scaled by its own largest number as it is now;
// weights may have been cast before they were gathered (fsdp.h). Nothing is kept from step to step.
//
// w (N,K), x (M,K), y (M,N), as in ops::matmul, matmul_dgrad and matmul_wgrad. In fp8 the forward pass reads rows of x
// and w; dgrad rows of dy and columns of w; wgrad columns of dy and of x.
#pragma once

#include "lib/device/device.h"
#include "lib/ops/ops.h"

// A matrix in fp8 as products read it, as it lies and transposed, and what of that is this copy's own: a weight that
// was gathered in fp8 lies in its unit's slot, and is good while the unit is in use. Empty where products take the
// matrix itself.
struct Fp8Copy {
  ops::Fp8Factor by_rows, by_columns;
  Buffer<uint8_t> rows, columns;
  Buffer<float> unscale;
  explicit operator bool() const { return by_rows.unscale != nullptr; }
  ops::Fp8Matrix matrix() const { return {by_rows.format, rows, columns, unscale, by_rows.scaling}; }
};

template <class T>
class Linear {
 public:
  enum class Sides { rows, columns, both };
  // A weight (N,K) of a unit that is in use.
  struct Weight {
    const T* w = nullptr;            // null: it was gathered in fp8, as `codes`
    const uint8_t* codes = nullptr;  // times *unscale
    const float* unscale = nullptr;
    float* amax = nullptr;  // where the forward pass leaves the largest number for the backward of its micro-batch
  };
  struct ActivationGradients {
    Fp8Copy dh, g;  // both sides of dh, and the columns of g
  };

  // Numbers whose largest is a matrix's, from whoever has read it before: of its rows (R), or that itself. Empty: it is
  // looked for.
  struct Maxima {
    const float* x = nullptr;
    int64_t n = 0;
  };

  Linear(Device& dev, bool in_fp8, fp8::Scaling scaling) : dev_(dev), in_fp8_(in_fp8), scaling_(scaling) {}
  bool scales_rows() const { return scaling_ == fp8::Scaling::row; }

  // Factors; empty if not in fp8.
  Fp8Copy cast_weight(const Weight& w, int64_t N, int64_t K, Sides sides);
  Fp8Copy cast_gradient(const T* dy, int64_t M, int64_t N);
  // What an activation makes of h (M,F; of SwiGLU M,2F), in fp8 alone: g (M,F), its rows; and in the backward pass, not
  // scaled by row, from dg (M,F) the gradient of h and g.
  Fp8Copy cast_activation(ops::Activation kind, const T* h, int64_t M, int64_t F);
  ActivationGradients cast_activation_backward(ops::Activation kind, const T* dg, const T* h, int64_t M, int64_t F);
  // out (1): the largest |x| of x (n).
  template <class X>
  void find_amax(float* out, const X* x, int64_t n);

  // w8, dy8: as cast above; x is cast here, unless it comes as x8.
  void forward(T* y, const T* x, const Weight& w, const Fp8Copy& w8, const T* bias, const T* residual, int64_t M,
               int64_t N, int64_t K, Maxima of_x = {});
  void forward(T* y, const Fp8Copy& x8, const Fp8Copy& w8, const T* bias, const T* residual, int64_t M, int64_t N,
               int64_t K);
  void dgrad(T* dx, const T* dy, const Fp8Copy& dy8, const Weight& w, const Fp8Copy& w8, int64_t M, int64_t N,
             int64_t K, bool accumulate);
  template <class E>
  void wgrad(E* dw, const T* dy, const Fp8Copy& dy8, const T* x, int64_t M, int64_t N, int64_t K, bool accumulate,
             Maxima of_x = {});
  template <class E>
  void wgrad(E* dw, const Fp8Copy& dy8, const Fp8Copy& x8, int64_t M, int64_t N, int64_t K, bool accumulate);

 private:
  void find_amaxes(float* out, const T* x, int64_t R, int64_t C, Sides sides, Maxima known);
  Fp8Copy empty_copy(int64_t R, int64_t C, Dtype format, Sides sides);
  Fp8Copy cast(const T* x, int64_t R, int64_t C, Dtype format, Sides sides, Maxima known = {});

  Device& dev_;
  bool in_fp8_;
  fp8::Scaling scaling_;
};
