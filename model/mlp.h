// A block's second half: x2 + W2 gelu(W1 n), or SwiGLU (Shazeer 2020), of n, the norm of x2; without attention
// x + W2 gelu(W1 x). Forward and backward, in pieces of rows, so that no more of the hidden layer exists than the
// configuration allows, but where more takes no memory (rows_of_last).
//
//   Buffer<T> out = mlp.forward_turn(block, &saved, keep);    // out (M, C), the next block's input
//   mlp.backward_turn(block, &saved, dx);                     // dx (M, C), of out: becomes that of x2
#pragma once

#include "model/block.h"

template <class T, class G>
class BlockMlp {
 public:
  BlockMlp(Blocks<T, G>& blocks, const Pieces& pieces);

  // Of x and the Wo o that attention has left in v. keep: what the options keep for the backward.
  Buffer<T> forward_turn(int64_t block, Saved<T>* v, bool keep);
  // With Recompute::block: makes x2 and its statistics again, of x and the Wo o that attention has made again.
  void recompute_turn(int64_t block, Saved<T>* v);
  // Frees what it reads of v, but for x.
  void backward_turn(int64_t block, Saved<T>* v, T* dx);

 private:
  using A = acc_t<T>;
  using Sides = typename Linear<T>::Sides;
  struct Sums {  // of a backward pass: what its pieces of rows share
    // fp32, over pieces; empty: the gradient is made in one piece, or not wanted.
    Buffer<A> up, down, up_bias, norm, norm_bias;
    Fp8Copy up8, down8;           // the weights' columns
    bool up_bias_summed = false;  // in pieces, beside the activation's backward
  };

  Buffer<T> middle(int64_t block, Saved<T>* v, bool keep);
  Buffer<T> forward(int64_t block, Saved<T>* v, Buffer<T> n, bool keep);
  Fp8Copy activation_backward(int64_t block, const T* dx, T* h, T* kept, int64_t i, int64_t rows, Sums* all);
  void up_backward(int64_t block, Saved<T>* v, T* dx, const T* dh, Fp8Copy dh8, int64_t i, int64_t rows,
                   const Sums& all);
  Buffer<T> input(int64_t block, Saved<T>* v, int64_t i, int64_t rows, const char* name);
  Buffer<T> recompute_hidden(int64_t block, Saved<T>* v, int64_t i, int64_t rows);
  void save_hidden(Saved<T>* v, const T* h, int64_t i, int64_t rows);
  Buffer<T> restore_hidden(const Saved<T>& v, int64_t i, int64_t rows);
  static int64_t rows_of_last(const ModelConfig& c, int64_t M, const Pieces& pieces, const BlockParams& last);
  int64_t kept_rows(int64_t block) const;
  int64_t forward_piece(int64_t i) const;
  int64_t forward_piece_number(int64_t i) const;
  // Does what the activation makes, and its gradients, exist in fp8 alone? A bias wants its layer's gradient itself,
  // and so do scales of rows, which take passes of their own to find.
  bool casts_activation(const BlockParams& at) const {
    return c_.fp8 && !linear_.scales_rows() && !at.up_bias.exists();
  }
  ops::Activation activation() const {
    return c_.arch == Arch::llama ? ops::Activation::swiglu : ops::Activation::gelu;
  }

  Device& dev_;
  const ModelConfig& c_;
  const int64_t M_, rows_, forward_rows_;  // rows; and of Pieces
  const int64_t last_rows_;                // see rows_of_last
  Blocks<T, G>& blocks_;
  Schedule<T, G>& schedule_;
  Linear<T>& linear_;
};
