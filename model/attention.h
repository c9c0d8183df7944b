// A block's first half: x + Wo attention(q, k, v) of n, the norm of x, with dense causal attention or NSA
// (nsa_attention.h). Forward, what recomputation makes again, and backward.
//
//   attention.forward_turn(block, &saved, keep);  // of saved.x (M, C); leaves Wo o in saved.x2, to which mlp.h adds x
//   attention.backward_turn(block, &saved, dx);   // dx (M, C), of x2: becomes that of x
#pragma once

#include "model/block.h"

template <class T, class G>
class BlockAttention {
 public:
  // targets (M): as the micro-batch has them, for diagnostics.
  BlockAttention(Blocks<T, G>& blocks, const int32_t* targets);
  void init();  // of what is computed once: the rotary table

  // keep: what the options keep for the backward.
  void forward_turn(int64_t block, Saved<T>* v, bool keep);
  // With Recompute::block a block has kept its input alone: makes Wo o again, and leaves q, k, v and attention's output
  // for backward_turn.
  void recompute_turn(int64_t block, Saved<T>* v);
  // Frees what it reads of v.
  void backward_turn(int64_t block, Saved<T>* v, T* dx);

  // What gates and selection do, with ModelConfig::diagnostics: counted in a step's micro-batches, and summed over
  // ranks behind the last forward, so that the backward hides it.
  bool counts() const { return partials_ != nullptr; }
  void begin_counting();
  void count_kept(const std::vector<Saved<T>>& saved);
  void sum_counts(Fsdp<T, G>* fsdp);
  // On the device, one for each block; null if nothing counts.
  const NsaSums* sums() const { return sums_; }
  const NsaMaxima* maxima() const { return maxima_; }
  // For each block, the kernels of the latest step's micro-batches as they were issued; empty if nothing counts.
  const std::vector<NsaKernels>& kernels() const { return kernels_; }

 private:
  using A = acc_t<T>;
  using Sides = typename Linear<T>::Sides;

  Buffer<T> input(int64_t block, const Saved<T>& v, const char* name);
  void queries(int64_t block, Saved<T>* v, Purpose life);
  void gates(Stream& s, int64_t block, Saved<T>* v, Purpose life);
  void gates_backward(int64_t block, const Saved<T>& v, T* dqkv);
  Buffer<T> attend(int64_t block, Saved<T>* v, Purpose life, NsaKernels* ran);
  void project(int64_t block, Saved<T>* v, const T* o, Purpose life);
  void recompute_queries(int64_t block, Saved<T>* v);
  void recompute_attention(int64_t block, Saved<T>* v);
  void recompute_gated_sum(int64_t block, Saved<T>* v);
  void queries_backward(int64_t block, Saved<T>* v, T* dqkv, const T* d_o, NsaBegun<T> begun);
  AttentionShape dense_shape() const;
  bool backward_turns() const;
  void turn_back(T* dqkv);
  NsaShape nsa_shape() const { return c_.nsa_shape(M_ / c_.seq); }
  PhiWeights<const T> phi_weights(const BlockParams& at) const;
  PhiWeights<G> phi_grads(const BlockParams& at) const;
  NsaCounted<T> counted(int64_t block, const Saved<T>& v) const;
  void count(const std::vector<NsaCounted<T>>& blocks);
  NsaKernels* kernels_of(int64_t block) { return kernels_.empty() ? nullptr : &kernels_[size_t(block)]; }

  Device& dev_;
  const ModelConfig& c_;
  const int64_t M_;
  Blocks<T, G>& blocks_;
  Schedule<T, G>& schedule_;
  Linear<T>& linear_;
  const int32_t* targets_;
  A* rope_table_ = nullptr;  // (T, D), cos and sin
  // Of each block, with ModelConfig::diagnostics.
  double* partials_ = nullptr;
  NsaSums* sums_ = nullptr;
  NsaMaxima* maxima_ = nullptr;
  std::vector<NsaKernels> kernels_;
};
