// What the two halves of a block share (attention.h, mlp.h): its parameters, what its forward pass saves for its
// backward, products with its weights, and norms.
//
// Shapes: B sequences of T tokens are M = B*T rows; C dim, H and HKV heads of D, of DV in values, F hidden.
#pragma once

#include <vector>

#include "model/linear.h"
#include "model/output_watch.h"
#include "model/schedule.h"

// What a block's forward leaves for its backward. Empty: not kept, to be recomputed.
template <class T>
struct Saved {
  using A = acc_t<T>;
  Buffer<T> x;       // (M, C) the block's input
  Buffer<A> stats1;  // (M, 2) of its norm
  // With ModelConfig::keep_cheap: what the norms made (M, C), and the activation (M, F).
  Buffer<T> n1, n2, g;
  // In fp8: the largest numbers that the products of this block read, for the backward to cast alike.
  Buffer<float> largest1, largest2;  // (M) of the norms' rows
  Buffer<float> largest_o;           // (1) of attention's output
  Buffer<T> qkv;                     // (M, row) q (H*D), k (key_heads*D), v (key_heads*DV), NSA's gates
  bool gates_due = false;            // NSA's gates are still to be made of q, k, v's last columns
  Buffer<T> gate_h;                  // (M, gate_hidden) the gates' hidden layer before its activation
  Buffer<T> o;                       // (M, H*DV) attention's output; dense
  Buffer<A> lse;                     // (B, H, T) log-sum-exp; dense
  NsaSaved<T> nsa;                   // in place of o and lse
  Buffer<T> x2;                      // (M, C) the MLP's input, x + Wo o
  Buffer<A> stats2;                  // (M, 2) of its norm
  // (M, F), SwiGLU (M, 2F): the hidden layer before its activation. Recomputed, of the last block: its first rows.
  Buffer<T> h;
  // Or the same in e4m3, with a scale for each piece that the forward pass made it in.
  Buffer<uint8_t> h8;
  Buffer<float> h8_unscales;
};

struct BlockParams {
  ParamRef qkv;                                  // (row, C)
  ParamRef o;                                    // (C, H*DV)
  ParamRef up;                                   // (F, C), SwiGLU gate and up (2F, C)
  ParamRef down;                                 // (C, F)
  ParamRef up_bias, down_bias;                   // (F), (C)
  ParamRef norm1, norm1_bias;                    // (C)
  ParamRef norm2, norm2_bias, gate_bias;         // (C), (C), (gates)
  ParamRef gate_w1_bias, gate_w2, gate_w2_bias;  // (gate_hidden), (gates, gate_hidden), (gates)
  ParamRef phi[6];                               // in the order of PhiWeights
};

template <class T, class G>
struct Blocks {
  using A = acc_t<T>;
  using Sides = typename Linear<T>::Sides;
  // Takes memory for the weights' largest numbers. Keeps references to all but M, the rows of a micro-batch.
  Blocks(Device& dev, const ModelConfig& c, int64_t M, Schedule<T, G>& schedule, OutputWatch& watch);

  // A product with one of a block's matrices (N, K): what Linear takes of it, cast to fp8 where that is asked for, and
  // its gradient, if it has one.
  typename Linear<T>::Weight weight(const ParamRef& p);
  Fp8Copy cast_weight(const ParamRef& p, int64_t N, int64_t K, Sides sides);
  void wgrad(const ParamRef& p, const T* dy, const Fp8Copy& dy8, const T* x, int64_t M, int64_t N, int64_t K,
             bool accumulate, typename Linear<T>::Maxima of_x = {});
  // Of a norm's rows [i, i + rows), or what there is one of; none if not in fp8.
  typename Linear<T>::Maxima maxima(const Buffer<float>& largest, int64_t i, int64_t rows) const {
    if (!largest) return {};
    return {largest.get() + i, rows};
  }
  // db, of a bias (N), from the gradient dy (rows, N) of what it was added to.
  template <class E>
  void bias_grad(E* db, const T* dy, int64_t rows, int64_t N, bool accumulate,
                 typename Schedule<T, E>::LateSums late = {}) {
    Buffer<A> partials;
    if (!late.pieces) partials = dev.mem.take<A>(ops::bias_grad_partials(rows, N), "partial sums");
    ops::bias_grad<T, E>(dev.compute(), db, dy, late.pieces ? late.pieces : partials.get(), rows, N, N, accumulate,
                         late.sums);
  }
  // Where the gradients of a norm and of a bias (N) may leave pieces, if `rows` are all there are.
  typename Schedule<T, G>::LateSums late_norm(const ParamRef& gamma, const ParamRef& beta, int64_t rows) {
    if (rows < M) return {};
    return schedule.late_sums({gamma, beta}, ops::norm_backward_partials(norm, M, c.dim));
  }
  typename Schedule<T, G>::LateSums late_bias(const ParamRef& p, int64_t rows, int64_t N) {
    if (rows < M || !p.exists()) return {};
    return schedule.late_sums({p}, ops::bias_grad_partials(M, N));
  }
  // dn (rows, C), the gradient of a norm's output, through the norm to its input's, which is added to dx: what is there
  // came down the residual stream, past the norm. dn is free afterwards. Not fused, the sum is a kernel of its own.
  template <class E>
  void norm_backward(T* dx, E* dgamma, E* dbeta, T* dn, const T* x, const A* stats, const T* gamma, int64_t rows,
                     bool accumulate, typename Schedule<T, E>::LateSums late = {}) {
    Stream& s = dev.compute();
    Buffer<A> partials;
    if (!late.pieces) partials = dev.mem.take<A>(ops::norm_backward_partials(norm, rows, c.dim), "partial sums");
    ops::norm_backward<T, E>(s, norm, dev.fuse ? dx : dn, dgamma, dbeta, dn, dev.fuse ? dx : nullptr, x, stats, gamma,
                             late.pieces ? late.pieces : partials.get(), rows, c.dim, accumulate, late.sums);
    if (!dev.fuse) ops::add<T>(s, dx, dx, dn, rows * c.dim);
  }

  Device& dev;
  const ModelConfig& c;
  const int64_t M;
  Schedule<T, G>& schedule;
  OutputWatch& watch;
  const ops::Norm norm;
  Linear<T> linear;
  std::vector<BlockParams> params;  // by block

 private:
  float* weight_amaxes_ = nullptr;  // (depth, 4) the largest numbers of the weights that are multiplied in fp8
};
