// Native Sparse Attention on a GPU: every stage against its double twin, with the bf16 twin's own error as the measure,
// and the whole. Cases with [small] are for compute-sanitizer.
#include "test/nsa.h"

using namespace nsa_tests;

#if FSDP_CUDA
namespace {

// In bf16; float has kernels for every head dim of the lists below, but none for values of another than keys.
bool has_kernel(const NsaShape& a) { return a.DV ? a.D == 192 && a.DV == 128 : a.D == 64 || a.D == 128; }

// A kernel's errors against the double twin: bf16 within twice those of the bf16 twin; float to float. The floors are
// for what is nearly zero.
template <class T>
void check_against_twin(const Errors& gpu, const Errors& twin) {
  constexpr bool narrow = std::is_same_v<T, bf16>;
  for (const auto& [name, e] : gpu) {
    INFO(name << " " << name_of(dtype_of<T>) << ", the bf16 twin's error " << twin.at(name));
    CHECK(e <= (narrow ? 2 * twin.at(name) + 1e-4 : 5e-5));
  }
}

// The stages that move and pool numbers, each from the same inputs in every type.
template <class T, class G>
struct Simple {
  std::vector<T> mean, mean_v, dmean, blocks, dblocks, last, first, combined;
  std::vector<G> dposition;
  std::vector<float> amax;  // of combined, of each query and head; of kernels in fp32 and for odd heads empty
  bool vectors = true;      // none of the kernels is the general one
  Simple(const NsaShape& a, Backend backend) {
    Stream& s = stream_of(backend);
    Arrays on(s);
    const Inputs in(a);
    const int64_t C = a.HKV * a.D, rows = a.B * a.compressed(), n = a.HKV * rows * a.block * a.D;
    const int64_t C_v = a.HKV * a.v_dim();
    std::vector<T> x = converted<T>(in.x), dout = converted<T>(normals(rows * C, 1, 40)),
                   dout_v = converted<T>(normals(rows * C_v, 1, 46)),
                   position = converted<T>(normals(a.HKV * a.block * a.D, 1, 41)), d = converted<T>(normals(n, 1, 42)),
                   o[3];
    for (uint32_t i = 0; i < 3; ++i) o[i] = converted<T>(normals(int64_t(in.d_o.size()), 1, 43 + i));
    mean = nans<T>(rows * C), mean_v = nans<T>(rows * C_v), dmean = nans<T>(int64_t(x.size())), dblocks = dmean,
    blocks = nans<T>(n);
    last = mean, first = mean, combined = nans<T>(int64_t(in.d_o.size())),
    dposition = nans<G>(int64_t(position.size()));
    const T *px = on.up(x), *pd = on.up(dout);
    const auto tell = [&](const Kernel& k) { vectors = vectors && !k.general; };
    tell(nsa_mean<T>(s, on.up(mean), on.up(mean_v), px, a));
    tell(nsa_mean_backward<T>(s, on.up(dmean), pd, on.up(dout_v), a));
    tell(nsa_blocks<T>(s, on.up(blocks), px + a.v(0), on.up(position), a));
    tell(nsa_blocks_backward<T, G>(s, on.up(dblocks) + a.k(0), on.up(dposition), on.up(d),
                                   on.scratch<acc_t<T>>(nsa_blocks_partials(a)), a));
    tell(nsa_heads_last<T>(s, on.up(last), pd, a.HKV, rows, a.D));
    tell(nsa_heads_first<T>(s, on.up(first), pd, a.HKV, rows, a.D));
    if (backend == Backend::cpu || (std::is_same_v<T, bf16> && (a.D == 64 || a.D == 128)))
      amax.assign(size_t(a.B * a.H * a.T), NAN);
    tell(nsa_combine<T>(s, on.up(combined), on.up(o[0]), on.up(o[1]), on.up(o[2]), px, a,
                        amax.empty() ? nullptr : on.up(amax)));
    s.synchronize();
    on.down();
  }
};
template <class T, class G>
Errors errors(const Simple<T, G>& x, const Simple<double, double>& ref, const NsaShape& a) {
  const auto in_columns = [&](const auto& v, int64_t from, int64_t D) {
    return columns(v, a.ld, from, from + a.HKV * D);
  };
  return {{"mean of keys", error(x.mean, ref.mean)},
          {"mean of values", error(x.mean_v, ref.mean_v)},
          {"gradient of keys' mean", error(in_columns(x.dmean, a.k(0), a.D), in_columns(ref.dmean, a.k(0), a.D))},
          {"gradient of values' mean",
           error(in_columns(x.dmean, a.v(0), a.v_dim()), in_columns(ref.dmean, a.v(0), a.v_dim()))},
          {"blocks", error(x.blocks, ref.blocks)},
          {"blocks' gradient", error(in_columns(x.dblocks, a.k(0), a.D), in_columns(ref.dblocks, a.k(0), a.D))},
          {"positions' gradient", error(x.dposition, ref.dposition)},
          {"heads last", error(x.last, ref.last)},
          {"heads first", error(x.first, ref.first)},
          {"combined", error(x.combined, ref.combined)}};
}
template <class T, class G>
void check_simple(const NsaShape& a, const Simple<double, double>& ref, const Errors& twin) {
  const Simple<T, G> x(a, Backend::gpu), y(a, Backend::gpu);
  check_against_twin<T>(errors(x, ref, a), twin);
  check_amax(x.combined, x.amax, a);
  CHECK((same_bits(x.mean, y.mean) && same_bits(x.mean_v, y.mean_v) && same_bits(x.dmean, y.dmean) &&
         same_bits(x.blocks, y.blocks) && same_bits(x.dblocks, y.dblocks) && same_bits(x.dposition, y.dposition) &&
         same_bits(x.combined, y.combined)));
  const auto untouched = [&](const std::vector<T>& v, bool values) {  // outside of its columns
    bool clean = true;
    for (size_t i = 0; i < v.size(); ++i) {
      const int64_t c = int64_t(i) % a.ld, of_k = c - a.k(0), of_v = c - a.v(0);
      const bool inside = (of_k >= 0 && of_k < a.HKV * a.D) || (values && of_v >= 0 && of_v < a.HKV * a.v_dim());
      clean = clean && (inside || std::isnan(double(acc_t<T>(v[i]))));
    }
    return clean;
  };
  CHECK(untouched(x.dmean, /*values=*/true));
  CHECK(untouched(x.dblocks, /*values=*/false));
  CHECK(x.vectors == (a.D * sizeof(T) % 16 == 0));
}
void check_simple(const std::vector<NsaShape>& shapes) {
  for (const NsaShape& a : shapes) {
    INFO(text(a));
    const Simple<double, double> ref(a, Backend::cpu);
    check_amax(ref.combined, ref.amax, a);
    check_simple<float, float>(a, ref, errors(Simple<float, float>(a, Backend::cpu), ref, a));
    check_simple<bf16, bf16>(a, ref, errors(Simple<bf16, bf16>(a, Backend::cpu), ref, a));
    check_simple<bf16, float>(a, ref, errors(Simple<bf16, float>(a, Backend::cpu), ref, a));
  }
}

// Whatever blocks are selected, their exact scores are no lower than those of blocks that are not, but for rounding.
template <class T>
void check_select(const NsaShape& a) {
  INFO(text(a) << " " << name_of(dtype_of<T>));
  Inputs in(a);
  const int64_t rows = a.B * a.compressed(), group = a.H / a.HKV;
  const Doubles k = normals(rows * a.HKV * a.D, 1, 50);
  Doubles lse(a.B * a.H * a.T);
  for (int64_t i = 0; i < a.B * a.H * a.T; ++i) {
    const int64_t t = i % a.T, h = i / a.T % a.H, b = i / a.T / a.H;
    std::vector<Key> seen;
    for (int64_t j = 0; j < a.compressed() && a.stride * j + a.block - 1 <= t; ++j)
      seen.push_back({&k[((b * a.compressed() + j) * a.HKV + h / group) * a.D], nullptr, nullptr, nullptr});
    softmax(&in.x[(b * a.T + t) * a.ld + h * a.D], seen, a.D, a.scale, &lse[i]);
  }
  const Indices lists = select<T>(a, in.x, k, lse, Backend::gpu);
  CHECK(lists == select<T>(a, in.x, k, lse, Backend::gpu));
  CHECK(malformed_lists(a, lists) == 0);
  const Doubles score = scores(a, in.x, k);
  int64_t wrong = 0, differ = 0;
  const Indices exact = best_blocks(a, score);
  for (int64_t row = 0; row < a.B * a.HKV * a.T; ++row) {
    const int32_t own = int32_t(row % a.T / a.select_block), *list = &lists[row * a.selected];
    const double* s = &score[row * a.select_blocks()];
    const std::set<int32_t> chosen(list, list + std::min<int64_t>(a.selected, own + 1));
    double lowest = INFINITY, highest = -INFINITY;
    for (int32_t j = 1; j < own - 1; ++j)
      if (chosen.count(j)) lowest = std::min(lowest, s[j]);
      else highest = std::max(highest, s[j]);
    wrong += !(lowest >= highest - 1e-4 * std::abs(highest));
    differ += !std::equal(list, list + a.selected, &exact[row * a.selected]);
  }
  CHECK(wrong == 0);
  CHECK(differ <= a.B * a.HKV * a.T / 100);  // by rounding, where scores nearly tie
}
void check_select(const std::vector<NsaShape>& shapes) {
  for (const NsaShape& a : shapes) {
    check_select<float>(a);
    if (has_kernel(a)) check_select<bf16>(a);
  }
}

template <class T>
void check_selected(const Inputs& in, const Indices& lists, const Selected<double>& ref, const Errors& twin) {
  Selected<T> x(in, lists), y(in, lists);
  x.run(Backend::gpu), y.run(Backend::gpu);
  CHECK(same_results(x, y));
  check_against_twin<T>(errors(x, ref), twin);
  const NsaShape& a = in.a;
  bool clean = true;
  for (int64_t r = 0; r < a.B * a.T; ++r)
    for (const Part& p : parts(a))
      for (int64_t c = p.from; c < p.to; ++c) {
        const bool ours = p.name == std::string("q") || has(p.name, "selected");
        clean = clean && (ours || std::isnan(double(acc_t<T>(x.dx[r * a.ld + c]))));
      }
  CHECK(clean);
}
void check_selected(const NsaShape& a, const Indices& lists) {
  INFO(text(a));
  const Inputs in(a);
  Selected<double> ref(in, lists);
  ref.run();
  Selected<bf16> narrow(in, lists);
  const Errors twin = errors(narrow.run(), ref);
  if (!a.DV) check_selected<float>(in, lists, ref, twin);
  if (has_kernel(a)) check_selected<bf16>(in, lists, ref, twin);
}
void check_selected(const std::vector<NsaShape>& shapes) {
  for (const NsaShape& a : shapes) check_selected(a, random_lists(a));
}

// Attention under the branches' rules. With compressed keys the first a.keys rows of x's columns stand for them.
template <class T>
Errors rule_errors(const Selected<T>& x, const Selected<double>& ref, int64_t rows_of_keys) {
  const auto cut = [&](const auto& v) {
    return std::decay_t<decltype(v)>(v.begin(), v.begin() + rows_of_keys * (int64_t(v.size()) / (x.a.B * x.a.T)));
  };
  return {{"o", error(x.o, ref.o)},
          {"lse", error(x.lse, ref.lse)},
          {"dq", error(x.dq(), ref.dq())},
          {"dk", error(cut(x.dk()), cut(ref.dk()))},
          {"dv", error(cut(x.dv()), cut(ref.dv()))}};
}
void check_rules(const NsaShape& a) {
  const Inputs in(a);
  std::vector<AttentionShape> rules;
  for (int64_t window : {int64_t(1), int64_t(64), int64_t(100), a.T + 7}) {
    rules.push_back({});
    rules.back().sees = Sees::window, rules.back().window = window;
  }
  for (auto [block, stride] : {std::pair(32, 16), std::pair(64, 16), std::pair(16, 16)}) {
    if (a.T < block) continue;
    rules.push_back({});
    rules.back().sees = Sees::compressed, rules.back().block = block, rules.back().stride = stride;
    rules.back().keys = (a.T - block) / stride + 1;
  }
  for (const AttentionShape& s : rules) {
    INFO(text(a) << ": sees " << int(s.sees) << " window " << s.window << " block " << s.block << " stride "
                 << s.stride);
    const int64_t keys = a.B * (s.keys ? s.keys : a.T);
    const Selected<double> ref = attend<double>(in, 2, s);
    const Errors twin = rule_errors(attend<bf16>(in, 2, s), ref, keys);
    if (!a.DV) {
      const Selected<float> f = attend<float>(in, 2, s, Backend::gpu);
      check_against_twin<float>(rule_errors(f, ref, keys), twin);
      CHECK(same_results(f, attend<float>(in, 2, s, Backend::gpu)));
    }
    if (!has_kernel(a)) continue;
    const Selected<bf16> b = attend<bf16>(in, 2, s, Backend::gpu);
    check_against_twin<bf16>(rule_errors(b, ref, keys), twin);
    CHECK(same_results(b, attend<bf16>(in, 2, s, Backend::gpu)));
  }
}

template <class T>
void check_whole(const Inputs& in) {
  const NsaShape& a = in.a;
  INFO(text(a) << " " << name_of(dtype_of<T>));
  Step<T> x(in, Backend::gpu), y(in, Backend::gpu);
  x.step(), y.step();
  CHECK(same_results(x, y));
  CHECK(same_results(x, y.step()));
  CHECK(malformed_lists(a, x.indices) == 0);
  Step<bf16> twin(in);
  twin.step();
  const Reference own = reference(in, &twin.indices), ref = reference(in, &x.indices);
  check_against_twin<T>(errors(x, ref), errors(twin, own));
}
void check_whole(const std::vector<NsaShape>& shapes) {
  for (const NsaShape& a : shapes) {
    const Inputs in(a);
    if (!a.DV) check_whole<float>(in);
    if (has_kernel(a)) check_whole<bf16>(in);
  }
}

}  // namespace
#endif

TEST_CASE("GPU: NSA, a few small shapes", "[nsa][gpu][small]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t D : {64, 128}) {
    const NsaShape a = with(shape(1, 75, 4, 2, D, Phi::mlp), 8, 4, 16, 4, 20), b = shape(2, 130, 2, 1, D);
    check_simple({a, b});
    check_select({with(shape(1, 300, 4, 2, D), 32, 16, 64, 3, 20)});
    check_selected({with(shape(1, 150, 4, 2, D), 16, 16, 16, 4, 20), with(shape(1, 199, 2, 1, D), 32, 16, 64, 3, 20)});
    check_rules(shape(1, 70, 2, 1, D));
    check_whole({with(shape(1, 300, 4, 2, D, Phi::linear), 32, 16, 64, 3, 70), shape(1, 31, 2, 1, D)});
  }
#endif
}

TEST_CASE("GPU: NSA with keys wider than values", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  if (has_small_memory(test_device(Backend::gpu).compute_capability)) SKIP_TEST("99 KiB of shared memory");
  const auto wide = [](int64_t B, int64_t T, int64_t H, int64_t HKV, Phi phi = Phi::mean) {
    return with_values(shape(B, T, H, HKV, 192, phi), 128);
  };
  const NsaShape pooled = with(wide(1, 700, 16, 1), 32, 16, 64, 4, 100);  // the paper's group
  check_select<bf16>(with(shape(1, 700, 4, 2, 192), 32, 16, 32, 6, 64));
  check_select<bf16>(with(shape(1, 700, 16, 1, 192), 32, 16, 64, 4, 64));
  check_selected({pooled, with(wide(2, 333, 4, 2), 16, 16, 32, 5, 1), with(wide(1, 700, 6, 2), 32, 32, 128, 3, 1)});
  check_rules(wide(2, 127, 4, 2)), check_rules(wide(1, 500, 2, 1));
  check_whole({pooled, wide(2, 65, 2, 1, Phi::mlp), with(wide(1, 300, 4, 2, Phi::linear), 8, 4, 16, 4, 30),
               wide(1, 15, 2, 1, Phi::mlp), with(wide(1, 1000, 4, 2), 32, 16, 64, 4, 64)});
#endif
}

TEST_CASE("GPU: compression, heads and gates", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  check_simple({shape(2, 32, 2, 1, 64), shape(2, 33, 6, 2, 128), shape(3, 1000, 4, 4, 64), shape(1, 2049, 16, 1, 64),
                with(shape(2, 200, 4, 2, 40), 8, 4, 16, 4, 20), with(shape(1, 200, 4, 2, 64), 1, 1, 1, 4, 20),
                with(shape(1, 333, 6, 3, 128), 64, 16, 64, 4, 20), with(shape(2, 100, 4, 2, 8), 16, 16, 16, 4, 20),
                with(shape(2, 70, 6, 2, 5), 8, 4, 16, 4, 20)});  // 5: no vectors
#endif
}

TEST_CASE("GPU: selection", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  std::vector<NsaShape> list;
  for (int64_t T : {1, 15, 31, 32, 33, 63, 64, 65, 127, 1000}) {
    list.push_back(shape(2, T, 2, 1, 64));
    list.back().selected = 4;
  }
  for (int64_t group : {1, 2, 3, 4, 5, 6, 8, 12, 16})
    for (int64_t D : {64, 128}) list.push_back(with(shape(1, 500, 2 * group, 2, D), 32, 16, 32, 6, 64));
  list.push_back(shape(1, 2049, 2, 1, 64));
  check_select(list);
#endif
}

TEST_CASE("GPU: equal scores go to the lowest block", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  const NsaShape a = with(shape(2, 700, 4, 1, 64), 32, 16, 64, 5, 64);
  Doubles k(a.B * a.compressed() * a.D), lse(a.B * a.H * a.T);
  for (size_t i = 0; i < lse.size(); ++i) lse[i] = std::log(std::max(1.0, double((int64_t(i) % a.T - 15) / 16)));
  const Inputs in(a);  // keys of zeros: every score is 0
  const Indices f = select<float>(a, in.x, k, lse, Backend::gpu), b = select<bf16>(a, in.x, k, lse, Backend::gpu);
  CHECK(f == b);
  int64_t bad = 0;
  for (int64_t row = 0; row < a.B * a.T; ++row) {
    const int32_t own = int32_t(row % a.T / a.select_block);
    if (own >= 5) bad += Indices(&f[row * 5], &f[row * 5] + 5) != Indices{0, 1, 2, own - 1, own};
  }
  CHECK(bad == 0);
#endif
}

TEST_CASE("GPU: selected attention of the whole, around the edges of blocks", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  std::vector<NsaShape> list;
  for (int64_t D : {64, 128})
    for (int64_t T : {1, 15, 31, 32, 33, 63, 64, 65, 127, 1000}) {
      list.push_back(shape(2, T, 4, 2, D));
      list.back().selected = 4;
    }
  list.push_back(shape(1, 2049, 2, 1, 64));
  list.push_back(with(shape(2, 300, 4, 2, 64), 16, 16, 32, 5, 1));
  list.push_back(with(shape(1, 700, 4, 2, 128), 32, 32, 128, 3, 1));
  check_selected(list);
#endif
}

TEST_CASE("GPU: selected attention of the whole, in groups", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t group : {1, 2, 4, 6, 8, 16})
    check_selected({with(shape(1, 500, group, 1, 64), 32, 16, 64, 4, 1),
                    with(shape(2, 333, 2 * group, 2, 128), 32, 16, 64, 3, 1)});
#endif
}

TEST_CASE("GPU: all queries select one block", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t D : {64, 128}) {
    const NsaShape a = with(shape(2, 700, 4, 2, D), 32, 16, 64, 5, 1);
    for (const Indices& lists : skewed_lists(a)) check_selected(a, lists);
    check_selected(a, lists_without(a, 4));
  }
#endif
}

TEST_CASE("GPU: branches that are dense attention under another rule", "[nsa][attention][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t D : {64, 128})
    for (int64_t T : {1, 15, 31, 32, 33, 63, 64, 65, 127, 500}) check_rules(shape(2, T, 4, 2, D));
  for (int64_t group : {1, 2, 4, 6, 8, 16}) check_rules(shape(1, 300, group, 1, 64));
  for (int64_t group : {1, 6, 8, 16}) check_rules(shape(1, 150, group, 1, 128));
  check_rules(shape(1, 1000, 2, 1, 128));
  check_rules(shape(1, 2049, 2, 1, 64));
  check_rules(shape(1, 100, 3, 1, 40));
#endif
}

TEST_CASE("GPU: the whole of NSA", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  std::vector<NsaShape> list;
  int i = 0;
  for (int64_t T : {1, 15, 31, 32, 33, 63, 64, 65, 127, 1000}) {
    list.push_back(shape(2, T, 2, 1, T < 1000 ? 128 : 64, Phi(i++ % 3)));
    list.back().selected = 4;
  }
  for (int64_t group : {1, 2, 4, 6, 8, 16})
    list.push_back(with(shape(1, 300, group, 1, group < 8 ? 128 : 64, Phi(i++ % 3)), 32, 16, 64, 3, 100));
  for (int64_t group : {1, 2, 4, 6, 8, 16})  // the other head dim
    list.push_back(with(shape(1, 100, group, 1, group < 8 ? 64 : 128, Phi(i++ % 3)), 8, 4, 16, 4, 30));
  check_whole(list);
  check_whole<bf16>(Inputs(with(shape(1, 2049, 1, 1, 64), 32, 16, 64, 5, 64)));
  check_whole<bf16>(Inputs(with(shape(1, 1000, 2, 1, 128), 32, 16, 64, 4, 64)));
#endif
}

TEST_CASE("GPU: a backward of NSA that is begun apart has the same bits, and the forward's gated sum", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (const NsaShape& a : {shape(2, 20, 4, 2, 64), shape(2, 333, 6, 1, 64), shape(1, 1000, 4, 2, 128)}) {
    if (!nsa_begins_at_once<bf16>(test_device(Backend::gpu), a)) continue;
    INFO(text(a));
    const Inputs in(a);
    Step<bf16> one(in, Backend::gpu), two(in, Backend::gpu, Begins::apart);
    one.step(), two.step();
    CHECK(same_results(one, two));
    CHECK(same_bits(two.gated_sum, two.o));
  }
#endif
}

TEST_CASE("GPU: all queries choose the same blocks", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  // Lists of hundreds of queries, which several blocks (CTAs) share, and short ones; two KV heads skewed to keys of
  // their own.
  const auto check = [](auto type, const NsaShape& a) {
    using T = decltype(type);
    const Inputs in = skewed(a);
    Step<T> x(in, Backend::gpu);
    x.step();
    CHECK(not_skewed(a, x.indices) == 0);
    check_whole<T>(in);
  };
  check(bf16(), with(shape(1, 700, 4, 1, 64), 16, 8, 32, 5, 64));
  check(bf16(), with(shape(1, 400, 12, 2, 128), 16, 8, 32, 5, 40));
  check(float(), with(shape(2, 250, 4, 2, 64), 16, 8, 32, 5, 40));
#endif
}

TEST_CASE("GPU: closed gates close everything, and one gate leaves its branch", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  const auto check = [](auto type, int64_t D, Phi phi) {
    using T = decltype(type);
    Inputs in(with(shape(1, 150, 4, 2, D, phi), 8, 4, 16, 4, 20));
    in.set_gates(-1e4, -1e4, -1e4);
    Step<T> x(in, Backend::gpu);
    x.step();
    CHECK(all_zero(x.o));
    CHECK(all_zero(x.dx));
    for_each(x.dphi, [](const std::vector<T>& d) { CHECK(all_zero(d)); });
    for (int open = 0; open < 3; ++open) {
      INFO("branch " << open);
      const auto gate = [&](int branch) { return branch == open ? 1e4 : -1e4; };
      in.set_gates(gate(0), gate(1), gate(2));
      check_whole<T>(in);
    }
  };
  check(bf16(), 64, Phi::mlp), check(bf16(), 128, Phi::mean), check(float(), 40, Phi::mlp);
#endif
}

TEST_CASE("GPU: NSA does not see the future", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  for (int64_t cut : {1, 64, 191, 250})
    for (int64_t D : {64, 128}) {
      const NsaShape a = with(shape(1, 333, 4, 2, D), 32, 16, 32, 5, 50);
      check_causality<bf16>(a, cut, Backend::gpu);
      check_causality<float>(a, cut, Backend::gpu);
    }
#endif
}
