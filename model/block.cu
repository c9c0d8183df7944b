#include "model/block.h"

template <class T, class G>
Blocks<T, G>::Blocks(Device& dev, const ModelConfig& c, int64_t M, Schedule<T, G>& schedule, OutputWatch& watch)
    : dev(dev),
      c(c),
      M(M),
      schedule(schedule),
      watch(watch),
      norm(c.arch == Arch::simple || c.arch == Arch::mlp ? ops::Norm::layer : ops::Norm::rms),
      linear(dev, c.fp8, c.fp8_scaling) {
  int64_t matrices = 0;
  for (int64_t i = 0; i < c.depth; i++) {
    auto at = [&](const char* name) { return schedule.find(strf("block.%lld.%s", static_cast<long long>(i), name)); };
    params.push_back({at("attention.q"),
                      at("attention.o"),
                      at(c.arch == Arch::llama ? "mlp.gate" : "mlp.up"),
                      at("mlp.down"),
                      at("mlp.up.bias"),
                      at("mlp.down.bias"),
                      at("norm1"),
                      at("norm1.bias"),
                      at("norm2"),
                      at("norm2.bias"),
                      at("attention.gate.bias"),
                      at("attention.gate.w1.bias"),
                      at("attention.gate.w2"),
                      at("attention.gate.w2.bias"),
                      {at("attention.phi_k.position"), at("attention.phi_k.w1"), at("attention.phi_k.w2"),
                       at("attention.phi_v.position"), at("attention.phi_v.w1"), at("attention.phi_v.w2")}});
    BlockParams& of = params.back();
    for (ParamRef* p : {&of.qkv, &of.o, &of.up, &of.down}) p->amax = matrices++;
  }
  if (c.fp8) weight_amaxes_ = dev.mem.keep<float>(matrices, "largest numbers of weights", Purpose::workspace);
  int64_t late = 0;
  if (c.attends()) late += 2 * ops::norm_backward_partials(norm, M, c.dim);
  if (params[0].down_bias.exists()) late += ops::bias_grad_partials(M, c.dim);
  if (params[0].up_bias.exists()) late += ops::bias_grad_partials(M, c.hidden);
  schedule.keep_late_sums(late);
}

template <class T, class G>
typename Linear<T>::Weight Blocks<T, G>::weight(const ParamRef& p) {
  typename Linear<T>::Weight w;
  if (p.fp8) w.codes = schedule.codes(p), w.unscale = schedule.unscale(p);
  else w.w = schedule.weight(p), w.amax = weight_amaxes_ ? weight_amaxes_ + p.amax : nullptr;
  return w;
}

template <class T, class G>
Fp8Copy Blocks<T, G>::cast_weight(const ParamRef& p, int64_t N, int64_t K, Sides sides) {
  return linear.cast_weight(weight(p), N, K, sides);
}

template <class T, class G>
void Blocks<T, G>::wgrad(const ParamRef& p, const T* dy, const Fp8Copy& dy8, const T* x, int64_t M, int64_t N,
                         int64_t K, bool accumulate, typename Linear<T>::Maxima of_x) {
  if (!p.frozen) linear.wgrad(schedule.grad(p), dy, dy8, x, M, N, K, accumulate, of_x);
}

template struct Blocks<float, float>;
template struct Blocks<bf16, bf16>;
template struct Blocks<bf16, float>;
template struct Blocks<double, double>;
