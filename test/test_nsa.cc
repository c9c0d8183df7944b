// Native Sparse Attention: the CPU twins (cpu/nsa.h) and the whole (nsa_attention.cu) against a plain NSA in double and
// against central differences; then what must hold of any NSA: which blocks are selected, that nobody sees the future,
// which cases are dense attention.
#include "test/nsa.h"

using namespace nsa_tests;

// ------------------------------------------------------------------------------------------------ against the paper

namespace {
// Small sizes with every relation of l, d, l', n and w, and sequences that end anywhere.
const std::vector<NsaShape>& small_shapes() {
  static const std::vector<NsaShape> list = [] {
    std::vector<NsaShape> v;
    for (Phi phi : {Phi::mean, Phi::linear, Phi::mlp}) {
      v.push_back(with(shape(2, 37, 4, 2, 3, phi), 4, 2, 4, 4, 7));
      v.push_back(with(shape(1, 61, 3, 1, 5, phi), 6, 2, 10, 3, 33));
      v.push_back(with(shape(1, 50, 2, 2, 4, phi), 8, 8, 16, 4, 1));
      v.push_back(with(shape(1, 90, 4, 2, 2, phi), 12, 4, 12, 5, 100));
      v.push_back(with(shape(1, 75, 3, 1, 3, phi), 1, 1, 1, 6, 5));
      v.push_back(with(shape(2, 70, 2, 1, 4, phi), 16, 2, 18, 3, 64));
      v.push_back(with(with_values(shape(2, 41, 4, 2, 5, phi), 3), 4, 2, 4, 4, 7));
      v.push_back(with(with_values(shape(1, 60, 2, 1, 2, phi), 6), 8, 4, 8, 3, 20));
    }
    return v;
  }();
  return list;
}
}  // namespace

TEST_CASE("NSA is the paper's equations: outputs and every gradient", "[nsa]") {
  std::vector<NsaShape> list = small_shapes();
  for (int64_t T : {1, 15, 31, 32, 33, 63, 64, 65, 127, 1000}) {  // l 32, d 16, l' 64, w 512
    list.push_back(shape(2, T, 2, 1, 8, T % 2 ? Phi::linear : Phi::mlp));
    list.push_back(shape(1, T, 2, 1, T < 1000 ? 64 : 16));
    list.back().selected = 4;
  }
  for (int64_t group : {1, 2, 4, 6, 8, 16}) {
    list.push_back(with(shape(1, 300, group, 1, 64), 32, 16, 64, 3, 100));
    list.push_back(with(shape(1, 97, 2 * group, 2, 128, group % 4 ? Phi::mlp : Phi::linear), 8, 4, 8, 5, 20));
  }
  for (const NsaShape& a : list) {
    INFO(text(a));
    const Inputs in(a);
    const Reference ref = reference(in);
    Step<double> x(in);
    x.step();
    CHECK(x.indices == ref.indices);
    check_below(errors(x, ref), 1e-12);
    const std::vector<double> o = x.o;
    CHECK(same_bits(x.forward().o, o));  // nothing kept: the same
  }
}

TEST_CASE("NSA with the paper's parameters at 2049 tokens", "[nsa]") {
  const Inputs in(shape(1, 2049, 1, 1, 16));
  const Reference ref = reference(in);
  Step<double> x(in);
  x.step();
  CHECK(x.indices == ref.indices);
  check_below(errors(x, ref), 1e-12);
}

TEST_CASE("NSA's gradients are central differences", "[nsa]") {
  std::vector<NsaShape> shapes;
  for (Phi phi : {Phi::mean, Phi::linear, Phi::mlp})
    for (int64_t DV : {3, 2}) shapes.push_back(with(with_values(shape(1, 37, 4, 2, 3, phi), DV), 4, 2, 4, 4, 7));
  for (const NsaShape& a : shapes) {
    INFO(text(a));
    const Inputs in(a, 5);
    Step<double> x(in);
    x.step();
    const Indices chosen = x.indices;
    const Doubles dx = x.dx;
    const Phis<double> dphi = x.dphi;
    // slope of the loss sum(do o) where `v` moves along `direction`, and what the gradient says of it
    const auto check = [&](const std::string& name, Doubles& v, const Doubles& gradient, const Doubles& direction) {
      const double h = 1e-6;
      const Doubles kept = v;
      double f[2], norm = 0;
      for (int side : {0, 1}) {
        for (size_t i = 0; i < v.size(); ++i)
          if (direction[i] != 0) v[i] = kept[i] + (side ? h : -h) * direction[i];
        x.step();
        REQUIRE(x.indices == chosen);  // a step that changes what is selected is not a derivative
        f[side] = dot(x.o.data(), x.d_o.data(), int64_t(x.o.size()));
      }
      v = kept;
      double slope = 0;
      for (size_t i = 0; i < v.size(); ++i)
        if (direction[i] != 0) slope += gradient[i] * direction[i], norm += gradient[i] * gradient[i];
      INFO(name);
      CHECK(norm > 0);
      CHECK(std::abs((f[1] - f[0]) / (2 * h) - slope) <= 1e-7 * std::max(1.0, std::sqrt(norm)));
    };
    for (const Part& p : parts(a)) {
      if (p.name == std::string("padding")) continue;
      for (uint32_t seed : {1, 2, 3}) {
        Doubles direction(x.x.size());
        for (int64_t r = 0; r < a.T; ++r)
          for (int64_t c = p.from; c < p.to; ++c) direction[r * a.ld + c] = normal(seed, 20, r * a.ld + c);
        check(p.name, x.x, dx, direction);
      }
    }
    for (int i : {0, 1})
      for (auto [name, v, gradient] :
           {std::tuple("position", &x.phi.position[i], &dphi.position[i]), std::tuple("w1", &x.phi.w1[i], &dphi.w1[i]),
            std::tuple("w2", &x.phi.w2[i], &dphi.w2[i])})
        for (uint32_t seed : {1, 2, 3})
          if (!v->empty()) check(name, *v, *gradient, normals(int64_t(v->size()), seed, 21));
  }
}

TEST_CASE("float and bf16 NSA are the double one, rounded", "[nsa]") {
  std::vector<NsaShape> list = {shape(1, 700, 4, 2, 64), shape(1, 200, 6, 1, 64, Phi::linear),
                                shape(1, 200, 4, 2, 32, Phi::mlp),
                                with_values(shape(1, 200, 4, 2, 48, Phi::linear), 32)};
  list[0].selected = 4, list[1].selected = list[2].selected = list[3].selected = 3;
  for (const NsaShape& a : list) {
    INFO(text(a));
    const Inputs in(a);
    Step<float> f(in);
    f.step();
    check_below(errors(f, reference(in, &f.indices)), 1e-5);
    Step<bf16> b(in);
    b.step();
    const Reference ref = reference(in, &b.indices);
    // Compressed keys and values are rounded before they are used, and so are the branches.
    check_below(errors(b, ref), 0.02);
    Step<bf16, float> wide(in);  // gradients of phi in float
    wide.step();
    check_below(errors(wide, ref), 0.02);
    CHECK(same_bits(wide.dx, b.dx));
  }
}

// -------------------------------------------------------------------------------------------------------- selection

TEST_CASE("eq. 9: a compressed key scores a block by what they share", "[nsa]") {
  for (auto [l, d, select] : {std::tuple(32, 16, 64), std::tuple(4, 2, 4), std::tuple(6, 2, 10), std::tuple(8, 8, 16),
                              std::tuple(1, 1, 1), std::tuple(1, 1, 7), std::tuple(16, 2, 18), std::tuple(12, 4, 12),
                              std::tuple(64, 16, 64), std::tuple(32, 32, 32)}) {
    const NsaShape a = with(shape(1, 6 * select + 5, 1, 1, 1), l, d, select, 3, 1);
    INFO(text(a));
    const int64_t keys = a.compressed();
    for (int64_t i = 0; i < keys; ++i) {
      Doubles p(keys);
      p[i] = 1;
      double sum = 0;
      for (int64_t j = 0; j < a.select_blocks(); ++j) {
        const double score = cpu::nsa_detail::block_score(p.data(), keys, j, a);
        CHECK(score == overlap(a, i, j));
        sum += score;
      }
      CHECK(sum == double(l) / double(d));  // no compressed key reaches beyond the sequence
      CHECK(cpu::nsa_detail::block_score(p.data(), i, i * d / select, a) == 0);  // not yet seen
    }
  }
  const NsaShape a = shape(1, 400, 1, 1, 1);
  std::vector<double> weights;
  for (int64_t i = 7; i <= 11; ++i) {  // block 2 is tokens 128 to 191: keys 7 (112 to 143) to 11 (176 to 207)
    Doubles p(a.compressed());
    p[i] = 1;
    weights.push_back(cpu::nsa_detail::block_score(p.data(), a.compressed(), 2, a));
  }
  CHECK(weights == std::vector<double>{1, 2, 2, 2, 1});
}

TEST_CASE("lists are ascending, unique and causal, with the first block and the last two", "[nsa]") {
  for (NsaShape a : small_shapes()) {
    INFO(text(a));
    CHECK(malformed_lists(a, Step<double>(Inputs(a)).step().indices) == 0);
    CHECK(malformed_lists(a, Step<float>(Inputs(a)).step().indices) == 0);
  }
  NsaShape a = shape(1, 64 * 16 + 100, 2, 1, 4);  // t to 64 n and beyond
  const Indices all = Step<bf16>(Inputs(a)).step().indices;
  CHECK(malformed_lists(a, all) == 0);
  for (int64_t t : {0, 30, 31, 47, 63, 64, 127, 128, 64 * 16 - 1}) {  // all that there are
    Indices want(16, -1);
    std::iota(want.begin(), want.begin() + t / 64 + 1, 0);
    CHECK(Indices(&all[t * 16], &all[t * 16] + 16) == want);
  }
  CHECK(all[64 * 16 * 16 + 15] == 16);  // the first query that must leave one out
}

TEST_CASE("eq. 10: a group selects together, and KV heads apart", "[nsa]") {
  const NsaShape a = with(shape(1, 700, 6, 2, 16), 32, 16, 64, 4, 64);
  const Inputs in(a);
  const Indices chosen = Step<double>(in).step().indices;
  const auto head = [&](const Indices& v, int64_t h) {
    return Indices(v.begin() + h * a.T * a.selected, v.begin() + (h + 1) * a.T * a.selected);
  };
  Inputs turned = in, last = in;
  for (int64_t t = 0; t < a.T; ++t) {
    std::rotate(&turned.at(0, t, 0), &turned.at(0, t, a.D), &turned.at(0, t, 3 * a.D));  // heads 1, 2, 0, 3, 4, 5
    for (int64_t d = 0; d < a.D; ++d) last.at(0, t, 5 * a.D + d) = 3 * normal(77, 1, t * a.D + d);
  }
  CHECK(Step<double>(turned).step().indices == chosen);
  const Indices other = Step<double>(last).step().indices;
  CHECK(head(other, 0) == head(chosen, 0));
  CHECK(head(other, 1) != head(chosen, 1));  // the group's last head has a voice
}

TEST_CASE("equal scores go to the lowest block", "[nsa]") {
  lowest_of_equals<double>();
  lowest_of_equals<float>();
  lowest_of_equals<bf16>();
}

TEST_CASE("keys a query selects at 2048 tokens: 752.5 on average", "[nsa]") {
  const NsaShape a = shape(1, 2048, 2, 2, 8);
  const Indices lists = Step<float>(Inputs(a)).step().indices;
  int64_t sum = 0, most = 0, at_most = 0;
  for (int64_t row = 0; row < a.HKV * a.T; ++row) {
    int64_t keys = 0;
    for (int64_t s = 0; s < a.selected && lists[row * a.selected + s] >= 0; ++s)
      keys += std::min<int64_t>(64, row % a.T - lists[row * a.selected + s] * 64 + 1);
    sum += keys;
    if (keys > most) most = keys, at_most = 0;
    at_most += keys == most;
  }
  CHECK(double(sum) / double(a.HKV * a.T) == 752.5);
  CHECK(most == 1024);
  CHECK(at_most == 17 * a.HKV);
}

TEST_CASE("a query that is a needle's key selects the needle's block", "[nsa]") {
  const NsaShape a = shape(1, 4096, 1, 1, 64);
  const int64_t places[] = {70, 200, 1000, 1555, 2047, 3000, 3700};
  Inputs in(a);
  int64_t i = 0;
  for (int64_t place : places) {
    const int64_t t = a.T - 1 - i++;
    for (int64_t d = 0; d < a.D; ++d)
      in.at(0, place, a.k(0) + d) = in.at(0, place, a.k(1) + d) = in.at(0, t, d) = 4 * normal(8, 8, place * a.D + d);
  }
  const Indices lists = Step<float>(in).step().indices;
  i = 0;
  for (int64_t place : places) {
    const int32_t* list = &lists[(a.T - 1 - i++) * a.selected];
    CHECK(std::count(list, list + a.selected, int32_t(place / 64)) == 1);
  }
}

// --------------------------------------------------------------------------------------------------------- causality

TEST_CASE("NSA does not see the future, to the bit", "[nsa]") {
  for (int64_t cut : {1, 31, 32, 64, 191, 192, 250}) {
    const NsaShape a = with(shape(1, 333, 4, 2, 16), 32, 16, 32, 5, 50);
    check_causality<double>(a, cut, Backend::cpu);
    check_causality<float>(a, cut, Backend::cpu);
    check_causality<bf16>(a, cut, Backend::cpu);
  }
  check_causality<float>(with(shape(1, 150, 3, 1, 5, Phi::mlp), 6, 2, 10, 4, 20), 77, Backend::cpu);
}

TEST_CASE("a prefix of a sequence has the same outputs, to the bit", "[nsa]") {
  for (int64_t T : {1, 31, 64, 100, 255, 320}) {
    const NsaShape a = with(shape(1, 333, 4, 1, 16), 32, 16, 32, 5, 50);
    check_prefix<double>(a, T, Backend::cpu);
    check_prefix<float>(a, T, Backend::cpu);
    check_prefix<bf16>(a, T, Backend::cpu);
  }
}

// ---------------------------------------------------------------------------------------------------- dense attention

TEST_CASE("the window branch is a softmax over its keys", "[nsa]") {
  // A window no shorter than the sequence is dense attention, to the bit; gates one-hot isolate branches.
  for (int64_t T : {1, 64, 200, 321}) {
    NsaShape a = with(shape(2, T, 4, 2, 20), 32, 16, 64, 3, T);
    for (int64_t more : {0, 1, 1000}) {
      a.window = T + more;
      Inputs in(a);
      in.set_gates(-1e4, -1e4, 1e4);
      Step<double> x(in);
      x.step();
      const Selected<double> want = dense(in, 2);
      CHECK(same_bits(x.o, want.o));
      CHECK(same_bits(x.lse[2], want.lse));
      CHECK(error(columns(x.dx, a.ld, 0, a.H * a.D), want.dq()) <= 1e-15);
      CHECK(same_bits(columns(x.dx, a.ld, a.k(2), a.k(3)), want.dk()));
      CHECK(same_bits(columns(x.dx, a.ld, a.v(2), a.gate(0)), want.dv()));
    }
  }
}

TEST_CASE("attention with no more blocks than selected is dense", "[nsa]") {
  for (int64_t T : {1, 64, 200, 333}) {
    const NsaShape a = with(shape(2, T, 6, 2, 20), 8, 4, 24, (T + 23) / 24 < 3 ? 3 : (T + 23) / 24, 1);
    INFO(text(a));
    Inputs in(a);
    in.set_gates(-1e4, 1e4, -1e4);
    Step<double> x(in);
    x.step();
    const Selected<double> want = dense(in, 1);
    CHECK(error(x.o, want.o) <= 1e-13);
    CHECK(error(x.lse[1], want.lse) <= 1e-13);
    CHECK(error(columns(x.dx, a.ld, 0, a.H * a.D), want.dq()) <= 1e-13);
    CHECK(error(columns(x.dx, a.ld, a.k(1), a.k(2)), want.dk()) <= 1e-13);
    CHECK(error(columns(x.dx, a.ld, a.v(1), a.v(2)), want.dv()) <= 1e-13);
  }
}

TEST_CASE("attention to keys that compress one token is dense", "[nsa]") {
  for (int64_t T : {1, 63, 130}) {
    const NsaShape a = with(shape(2, T, 4, 2, 20), 1, 1, 4, 3, 1);
    Inputs in(a);
    in.set_gates(1e4, -1e4, -1e4);
    Step<double> x(in);
    x.step();
    const Selected<double> want = dense(in, 0);
    CHECK(same_bits(x.o, want.o));
    CHECK(error(columns(x.dx, a.ld, 0, a.H * a.D), want.dq()) <= 1e-15);
    CHECK(same_bits(columns(x.dx, a.ld, a.k(0), a.k(1)), want.dk()));
    CHECK(same_bits(columns(x.dx, a.ld, a.v(0), a.v(1)), want.dv()));
  }
}

// ------------------------------------------------------------------------------------------------------ single rules

TEST_CASE("queries before the first compressed key", "[nsa]") {
  for (int64_t T : {1, 15, 31, 32, 33, 65})
    for (Phi phi : {Phi::mean, Phi::linear, Phi::mlp}) {
      const NsaShape a = shape(2, T, 4, 2, 8, phi);
      INFO(text(a));
      Inputs in(a);
      in.set_gates(1e4, -1e4, -1e4);  // the compressed branch alone
      Step<float> x(in);
      x.step();
      const int64_t C = a.H * a.D, early = std::min<int64_t>(T, 31);
      for (int64_t b = 0; b < a.B; ++b) {
        CHECK(std::all_of(&x.o[b * T * C], &x.o[b * T * C] + early * C, [](float o) { return o == 0; }));
        for (int64_t h = 0; h < a.H; ++h)
          for (int64_t t = 0; t < T; ++t) {
            const float lse = x.lse[0][(b * a.H + h) * T + t];
            CHECK((t < 31 ? lse == -INFINITY : std::isfinite(lse)));
          }
        for (int64_t t = 0; t < early; ++t) {
          const float* dq = &x.dx[(b * T + t) * a.ld];
          CHECK(std::all_of(dq, dq + C, [](float d) { return d == 0; }));
        }
      }
      CHECK(all_finite(x.o));
      CHECK(all_finite(x.dx));
      for_each(x.dphi, [&](const std::vector<float>& d) { CHECK((T < 32 ? all_zero(d) : all_finite(d))); });
    }
}

template <class T>
static void check_amax_of_sum(const NsaShape& a) {
  Stream& s = test_device(Backend::cpu).compute();
  const int64_t n = a.B * a.T * a.H * a.D;
  const std::vector<T> x = converted<T>(Inputs(a).x), one = converted<T>(normals(n, 1, 43)),
                       two = converted<T>(normals(n, 1, 44)), three = converted<T>(normals(n, 1, 45));
  std::vector<T> o = nans<T>(n), again = o;
  std::vector<float> amax(size_t(a.B * a.H * a.T), NAN);
  nsa_combine<T>(s, o.data(), one.data(), two.data(), three.data(), x.data(), a, amax.data());
  nsa_combine<T>(s, again.data(), one.data(), two.data(), three.data(), x.data(), a);
  s.synchronize();
  check_amax(o, amax, a);
  CHECK(same_bits(o, again));
}
TEST_CASE("the sum of branches comes with its largest numbers", "[nsa]") {
  const NsaShape a = with(shape(2, 37, 6, 2, 5), 8, 4, 16, 4, 20);
  check_amax_of_sum<float>(a), check_amax_of_sum<bf16>(a), check_amax_of_sum<double>(a);
}

TEST_CASE("closed gates close everything", "[nsa]") {
  const NsaShape a = with(shape(1, 200, 4, 2, 8, Phi::mlp), 8, 4, 16, 4, 20);
  Inputs in(a);
  in.set_gates(-1e4, -1e4, -1e4);
  Step<float> x(in);
  x.step();
  CHECK(all_zero(x.o));
  CHECK(all_zero(x.dx));
  for_each(x.dphi, [](const std::vector<float>& d) { CHECK(all_zero(d)); });
}

TEST_CASE("weights sum to 1 in each branch", "[nsa]") {
  const NsaShape a = with(shape(1, 150, 4, 2, 8), 8, 4, 16, 4, 20);
  Inputs in(a);
  for (int64_t t = 0; t < a.T; ++t)
    for (int branch = 0; branch < 3; ++branch)
      for (int64_t c = 0; c < a.HKV * a.D; ++c) in.at(0, t, a.v(branch) + c) = 1;
  Step<double> x(in);
  x.step();
  double worst = 0;
  for (int64_t t = 0; t < a.T; ++t)
    for (int64_t h = 0; h < a.H; ++h) {
      double gates = 0;
      for (int branch = t + 1 < a.block; branch < 3; ++branch)  // the compressed branch is empty before
        gates += 1 / (1 + std::exp(-in.at(0, t, a.gate(branch) + h)));
      for (int64_t d = 0; d < a.D; ++d) worst = worse(worst, std::abs(x.o[(t * a.H + h) * a.D + d] - gates));
    }
  CHECK(worst <= 1e-14);
}

TEST_CASE("every parameter gets a gradient, but scores give none", "[nsa]") {
  for (Phi phi : {Phi::mean, Phi::linear, Phi::mlp}) {
    const NsaShape a = with(shape(1, 200, 4, 2, 8, phi), 8, 4, 16, 4, 20);
    INFO(text(a));
    Inputs in(a);
    Step<float> x(in);
    x.step();
    for (const Part& p : parts(a)) {
      INFO(p.name);
      for (int64_t c = p.from; c < p.to; ++c) CHECK(all_zero(columns(x.dx, a.ld, c, c + 1)) == (c >= a.columns()));
    }
    const double some = phi == Phi::mean ? 0 : 0.01 * rms(converted<double>(x.dphi.position[1]));
    CHECK((rms(converted<double>(x.dphi.position[0])) > some) == (phi == Phi::mlp));  // see position_floor()
    for (int i : {0, 1}) {
      CHECK((phi == Phi::mean || !all_zero(x.dphi.position[1])));
      CHECK((phi == Phi::mean || !all_zero(x.dphi.w1[i])));
      CHECK((phi != Phi::mlp || !all_zero(x.dphi.w2[i])));
    }
    // The compressed keys still choose the blocks, and learn nothing from it.
    in.set_gates(-1e4, 0.5, 0.5);
    Step<float> y(in);
    y.step();
    CHECK(y.indices == x.indices);
    CHECK(all_zero(columns(y.dx, a.ld, a.k(0), a.k(1))));
    CHECK(all_zero(columns(y.dx, a.ld, a.v(0), a.v(1))));
    for_each(y.dphi, [](const std::vector<float>& d) { CHECK(all_zero(d)); });
  }
}

TEST_CASE("sequences of a batch know nothing of each other", "[nsa]") {
  const NsaShape a = with(shape(3, 150, 4, 2, 8, Phi::linear), 8, 4, 16, 4, 20);
  const Inputs in(a);
  Step<float> all(in);
  all.step();
  Phis<double> sum = phis_like<double>(a);
  for_each(sum, [](Doubles& v) { std::fill(v.begin(), v.end(), 0.0); });
  for (int64_t b = 0; b < a.B; ++b) {
    NsaShape single = a;
    single.B = 1;
    Inputs part(single);
    part.phi = in.phi;
    std::copy_n(in.x.begin() + b * a.T * a.ld, a.T * a.ld, part.x.begin());
    std::copy_n(in.d_o.begin() + b * a.T * a.H * a.D, a.T * a.H * a.D, part.d_o.begin());
    Step<float> one(part);
    one.step();
    CHECK(std::equal(one.o.begin(), one.o.end(), all.o.begin() + b * int64_t(one.o.size())));
    CHECK(std::equal(one.dx.begin(), one.dx.end(), all.dx.begin() + b * int64_t(one.dx.size())));
    CHECK(std::equal(one.indices.begin(), one.indices.end(), all.indices.begin() + b * int64_t(one.indices.size())));
    for (int i : {0, 1}) {
      for (size_t j = 0; j < sum.position[i].size(); ++j) sum.position[i][j] += one.dphi.position[i][j];
      for (size_t j = 0; j < sum.w1[i].size(); ++j) sum.w1[i][j] += one.dphi.w1[i][j];
    }
  }
  for (int i : {0, 1}) {
    CHECK(error(all.dphi.position[i], sum.position[i], position_floor(a, sum)) <= 1e-5);
    CHECK(error(all.dphi.w1[i], sum.w1[i]) <= 1e-5);
  }
}

TEST_CASE("large and shifted logits", "[nsa]") {
  const NsaShape a = with(shape(1, 300, 2, 1, 16), 32, 16, 32, 4, 64);
  Inputs in(a), shifted(a);
  for (int64_t t = 0; t < a.T; ++t)
    for (int64_t c = 0; c < a.H * a.D; ++c) in.at(0, t, c) *= 1e3;  // scores of thousands: exp alone would overflow
  const Reference ref = reference(in);
  Step<double> d(in);
  d.step();
  CHECK(d.indices == ref.indices);
  check_below(errors(d, ref), 1e-9);
  Step<float> f(in);
  f.step();
  CHECK(all_finite(f.o));
  CHECK(all_finite(f.dx));
  // The same vector on every key is the same number on every score of a query: 4 |q| ~ 16 here.
  Step<double> x(shifted);
  x.step();
  for (int64_t t = 0; t < a.T; ++t)
    for (int branch = 0; branch < 3; ++branch)
      for (int64_t d2 = 0; d2 < a.D; ++d2) shifted.at(0, t, a.k(branch) + d2) += 16 * normal(3, 3, d2);
  Step<double> y(shifted);
  y.step();
  CHECK(x.indices == y.indices);
  CHECK(error(y.o, x.o) <= 1e-12);
  CHECK(error(columns(y.dx, a.ld, 0, a.H * a.D), columns(x.dx, a.ld, 0, a.H * a.D)) <= 1e-11);
}

TEST_CASE("NSA repeats its bits and leaves its inputs", "[nsa]") {
  const Inputs in(with(shape(2, 150, 4, 2, 8, Phi::mlp), 8, 4, 16, 4, 20));
  Step<float> x(in), y(in);
  x.step(), y.step();
  CHECK(same_results(x, y));
  CHECK(same_results(x, y.step()));
  Step<bf16> u(in), v(in);
  CHECK(same_results(u.step(), v.step()));
}

// ---------------------------------------------------------------------------------------- selected blocks, given lists

TEST_CASE("selected attention reads and feeds what was selected, and nothing else", "[nsa]") {
  const NsaShape a = with(shape(2, 210, 4, 2, 8), 8, 4, 16, 5, 1);
  const int32_t never = 4;
  Inputs in(a);
  const Indices lists = lists_without(a, never);
  const Selected<float> x = Selected<float>(in, lists).run();
  CHECK(all_finite(x.o));
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t j = never * 16; j < never * 16 + 16; ++j)
      for (int64_t c = 0; c < a.HKV * a.D; ++c) {
        CHECK(x.dx[(b * a.T + j) * a.ld + a.k(1) + c] == 0);
        CHECK(x.dx[(b * a.T + j) * a.ld + a.v(1) + c] == 0);
      }
  // Other keys and values in block 2: just the outputs of those that have it in their lists change.
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t j = 32; j < 48; ++j)
      for (int64_t c = 0; c < a.HKV * a.D; ++c) in.at(b, j, a.k(1) + c) *= 2, in.at(b, j, a.v(1) + c) = 100;
  const Selected<float> y = Selected<float>(in, lists).run();
  int64_t wrong = 0, changed = 0;
  for (int64_t b = 0; b < a.B; ++b)
    for (int64_t h = 0; h < a.H; ++h)
      for (int64_t t = 0; t < a.T; ++t) {
        const int32_t* list = &lists[((b * a.HKV + h / 2) * a.T + t) * a.selected];
        const int64_t at = ((b * a.T + t) * a.H + h) * a.D;
        const bool same = std::memcmp(&x.o[at], &y.o[at], a.D * sizeof(float)) == 0;
        wrong += same == (std::count(list, list + a.selected, 2) == 1);
        changed += !same;
      }
  CHECK(wrong == 0);
  CHECK(changed > 0);
}

TEST_CASE("selected attention adds its dq to the other branches'", "[nsa]") {
  const NsaShape a = with(shape(1, 150, 4, 2, 8), 8, 4, 16, 4, 1);
  const Inputs in(a);
  Selected<double> with_all(in, random_lists(a)), without(in, random_lists(a)), neither(in, random_lists(a));
  without.dq_compressed.clear();
  neither.alone().gated = true;
  const Doubles window = with_all.dq(), compressed = with_all.dq_compressed;
  with_all.run(), without.run(), neither.run();
  Doubles own = neither.dq(), sum = own;
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += window[i];
  CHECK(error(without.dq(), sum) <= 1e-15);
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += compressed[i];
  CHECK(error(with_all.dq(), sum) <= 1e-15);
  CHECK(same_bits(with_all.dk(), neither.dk()));
}

TEST_CASE("heads of a group are heads with repeated keys", "[nsa]") {
  const NsaShape grouped = with(shape(1, 200, 6, 2, 8), 8, 4, 16, 4, 1);
  NsaShape apart = grouped;
  apart.HKV = 6;
  apart.ld = apart.columns();
  const Inputs in(grouped);
  Inputs repeated(apart);
  repeated.d_o = in.d_o;
  for (int64_t t = 0; t < grouped.T; ++t) {
    const double* row = &in.x[t * grouped.ld];
    for (int64_t h = 0; h < 6; ++h)
      for (int64_t d = 0; d < 8; ++d) {
        repeated.at(0, t, h * 8 + d) = row[h * 8 + d];
        repeated.at(0, t, apart.k(1) + h * 8 + d) = row[grouped.k(1) + h / 3 * 8 + d];
        repeated.at(0, t, apart.v(1) + h * 8 + d) = row[grouped.v(1) + h / 3 * 8 + d];
      }
  }
  const Indices lists = random_lists(grouped);
  const int64_t n = grouped.T * grouped.selected;
  Indices more;
  for (int64_t h = 0; h < 6; ++h) more.insert(more.end(), lists.begin() + h / 3 * n, lists.begin() + (h / 3 + 1) * n);
  const Selected<double> x = Selected<double>(in, lists).alone().run(),
                         y = Selected<double>(repeated, more).alone().run();
  CHECK(same_bits(x.o, y.o));
  CHECK(same_bits(x.dq(), y.dq()));
  const auto summed = [&](const Doubles& each) {  // over the heads of a group
    Doubles sum(grouped.T * 2 * 8);
    for (int64_t t = 0; t < grouped.T; ++t)
      for (int64_t h = 0; h < 6; ++h)
        for (int64_t d = 0; d < 8; ++d) sum[(t * 2 + h / 3) * 8 + d] += each[(t * 6 + h) * 8 + d];
    return sum;
  };
  CHECK(error(x.dk(), summed(y.dk())) <= 1e-14);
  CHECK(error(x.dv(), summed(y.dv())) <= 1e-14);
}

TEST_CASE("all queries select one block", "[nsa]") {
  const NsaShape a = with(shape(1, 500, 2, 1, 8), 8, 4, 16, 5, 1);
  Inputs in(a);
  in.set_gates(-1e4, 1e4, -1e4);
  for (const Indices& lists : skewed_lists(a)) {
    const Reference ref = reference(in, &lists);
    const Selected<double> x = Selected<double>(in, lists).alone().run();
    CHECK(error(x.o, ref.o) <= 1e-13);
    CHECK(error(x.dq(), columns(ref.dx, a.ld, 0, a.H * a.D)) <= 1e-13);
    CHECK(error(x.dk(), columns(ref.dx, a.ld, a.k(1), a.k(2))) <= 1e-13);
    CHECK(error(x.dv(), columns(ref.dx, a.ld, a.v(1), a.v(2))) <= 1e-13);
  }
}

TEST_CASE("all queries choose the same blocks", "[nsa]") {
  const Inputs in = skewed(with(shape(2, 300, 4, 2, 32), 16, 8, 32, 5, 40));
  Step<double> x(in);
  x.step();
  CHECK(not_skewed(in.a, x.indices) == 0);
  CHECK(not_skewed(in.a, Step<double>(Inputs(in.a)).step().indices) > 0);  // it is the inputs that do it
  check_below(errors(x, reference(in)), 1e-12);
}

// -------------------------------------------------------------------------------------- attention to part of the keys

TEST_CASE("attention sees what its rule says", "[nsa][attention]") {
  // One-hot values: o is the row of weights itself.
  for (int64_t T : {1, 40, 150})
    for (int64_t n : {1, 2, 33, 64, 149, 500}) {
      const int64_t D = T;
      AttentionShape s = {1, T, 1, 1, D, D, D, D, D, D, 0.1};
      const Doubles q = normals(T * D, 1, 1), k = normals(T * D, 1, 2);
      Doubles v(T * D), o(T * D), lse(T);
      for (int64_t j = 0; j < T; ++j) v[j * D + j] = 1;
      const auto seen = [&](auto rule) {
        cpu::attention_forward(o.data(), lse.data(), q.data(), k.data(), v.data(), s);
        int64_t wrong = 0;
        for (int64_t t = 0; t < T; ++t)
          for (int64_t j = 0; j < T; ++j) wrong += (o[t * D + j] > 0) != (j < (s.keys ? s.keys : T) && rule(t, j));
        CHECK(wrong == 0);
      };
      INFO("T " << T << " n " << n);
      seen([](int64_t t, int64_t j) { return j <= t; });
      s.sees = Sees::window, s.window = n;
      seen([n](int64_t t, int64_t j) { return j <= t && j > t - n; });
      s.sees = Sees::compressed, s.window = 0, s.block = n;
      for (int64_t stride : {1, 2, 16}) {
        if (T < n) continue;
        s.stride = stride, s.keys = (T - n) / stride + 1;
        seen([=](int64_t t, int64_t j) { return stride * j + n - 1 <= t; });
      }
    }
}

TEST_CASE("a window costs its keys, not the sequence", "[nsa][attention]") {
  // The operations that a NaN reaches say what was read: tiles of keys that no query of a tile sees are not.
  const int64_t T = 640, D = 4;
  AttentionShape s = {1, T, 1, 1, D, D, D, D, D, D, 0.5, Sees::window};
  s.window = 64;
  Doubles q = normals(T * D, 1, 1), k = normals(T * D, 1, 2), v = k, o(T * D), lse(T);
  std::fill_n(v.begin(), 256 * D, std::nan(""));  // weight 0 times NaN would be a NaN
  cpu::attention_forward(o.data(), lse.data(), q.data(), k.data(), v.data(), s);
  CHECK(all_finite(Doubles(o.begin() + (256 + 64) * D, o.end())));
  CHECK(!std::isfinite(o[256 * D]));
}

// ---------------------------------------------------------------------------------------------------- plan and refusal

TEST_CASE("NSA's memory grows with the sequence, not with its square", "[nsa]") {
  const auto peak = [](int64_t T) {
    Device dev(Backend::gpu, Device::plan_only);
    NsaShape a = shape(8, T, 64, 4, 128, Phi::mlp);
    dev.mem.begin("step");
    NsaSaved<bf16> saved;
    bf16* none = nullptr;
    const PhiWeights<const bf16> phi;
    nsa_forward<bf16>(dev, none, &saved, none, phi, a, Purpose::activations);
    nsa_backward<bf16, bf16>(dev, none, PhiWeights<bf16>(), none, none, phi, std::move(saved), a);
    dev.mem.end();
    return double(dev.mem.report().live_peak);
  };
  const double at_16k = peak(16384);
  // What is saved, and as much again for what the backward makes on the way: 3 outputs of 64 heads of 128, their lse,
  // 4 lists of 16 blocks.
  const double saved = 8.0 * 16384 * (3 * 64 * (128 * 2 + 4) + 4 * 16 * 4);
  CHECK(at_16k >= saved);
  CHECK(at_16k <= 2.5 * saved);
  CHECK(peak(131072) / at_16k <= 8.1);
}

TEST_CASE("NSA refuses by name what the equations forbid", "[nsa]") {
  const NsaShape good = shape(1, 100, 2, 1, 8);
  CHECK(error_of<Error>([&] { check_nsa(good); }).empty());
  struct Bad {
    int64_t NsaShape::*member;
    int64_t value;
    const char *option, *limit;
  };
  for (const Bad& bad : {Bad{&NsaShape::stride, 0, "--nsa-stride 0", "1 or more"},
                         Bad{&NsaShape::stride, 12, "--nsa-block 32", "multiple of --nsa-stride 12"},
                         Bad{&NsaShape::block, 24, "--nsa-block 24", "multiple of --nsa-stride 16"},
                         Bad{&NsaShape::block, 0, "--nsa-block 0", "multiple of --nsa-stride 16"},
                         Bad{&NsaShape::block, 80, "--nsa-select-block 64", "--nsa-block 80"},
                         Bad{&NsaShape::select_block, 72, "--nsa-select-block 72", "multiple of --nsa-stride 16"},
                         Bad{&NsaShape::select_block, 0, "--nsa-select-block 0", "multiple of --nsa-stride 16"},
                         Bad{&NsaShape::select_block, -16, "--nsa-select-block -16", "multiple of --nsa-stride 16"},
                         Bad{&NsaShape::selected, 2, "--nsa-selected 2", "3 or more"},
                         Bad{&NsaShape::window, 0, "--nsa-window 0", "1 or more"}}) {
    NsaShape a = good;
    a.*bad.member = bad.value;
    const std::string error = error_of<UsageError>([&] { check_nsa(a); });
    INFO(error);
    CHECK(has(error, bad.option));
    CHECK(has(error, bad.limit));
  }
  NsaShape narrow = good;
  narrow.ld = narrow.columns() - 1;
  CHECK(has(error_of<Error>([&] { check_nsa(narrow); }), "columns"));
  Device dev(Backend::gpu, Device::plan_only);
  NsaShape a = good;
  a.selected = 2;
  CHECK(has(
      error_of<UsageError>([&] { nsa_forward<float>(dev, nullptr, nullptr, nullptr, {}, a, Purpose::activations); }),
      "--nsa-selected"));
}
