// What NSA tells of itself: how its gates stand, which keys are selected, which kernels ran.
#include "test/nsa.h"

using namespace nsa_tests;

namespace {
// Stats of one layer from gates' logits (B*T, 3H by branch) and indices, through the stream function, as often as that
// is called with them. The first `padding` queries have no target.
NsaStats stats_of(Backend backend, const NsaShape& a, const std::vector<float>& gates,
                  const std::vector<int32_t>& indices, int64_t padding = 0, int times = 1) {
  Device& dev = test_device(backend);
  Stream& s = dev.compute();
  HostBuffer<char> host(dev, a.B * a.T * a.ld * 4);
  HostBuffer<NsaSums> sums(dev, 2);
  HostBuffer<NsaMaxima> maxima(dev, 2);
  HostBuffer<int32_t> chosen(dev, int64_t(indices.size())), targets(dev, a.B * a.T);
  HostBuffer<double> partials(dev, 2 * nsa_stats_partials());  // of two layers, the first without a query
  auto* x = reinterpret_cast<float*>(host.get());
  for (int64_t i = 0; i < a.B * a.T; ++i)
    for (int64_t g = 0; g < 3 * a.H; ++g) x[i * a.ld + a.gate(0) + g] = gates[size_t(i * 3 * a.H + g)];
  std::copy(indices.begin(), indices.end(), chosen.get());
  for (int64_t i = 0; i < a.B * a.T; ++i) targets[i] = i < padding ? -1 : 0;
  for (int i = 0; i < times; ++i)  // pinned memory: a GPU reads it too
    nsa_stats<float>(s, {{partials.get() + nsa_stats_partials(), x, chosen.get()}}, targets.get(), a);
  nsa_stats_total(s, sums.get(), maxima.get(), partials.get(), 2);
  s.synchronize();
  CHECK(sums[0].rows == 0);
  return summary(sums[1], maxima[1]);
}

// More layers than one launch has room for, each with its own gates: as one by one, to the last bit.
void check_stats_of_many(Backend backend) {
  constexpr int64_t layers = 35;
  NsaShape a = {};
  a.B = 1, a.T = 96, a.H = 4, a.HKV = 2, a.D = 8, a.scale = 1;
  a.ld = a.columns();
  const int64_t n = a.B * a.T * a.ld, partials = nsa_stats_partials();
  Device& dev = test_device(backend);
  Stream& s = dev.compute();
  HostBuffer<float> x(dev, layers * n);
  HostBuffer<int32_t> indices(dev, a.B * a.HKV * a.T * a.selected), targets(dev, a.B * a.T);
  HostBuffer<double> sums_of_blocks(dev, 2 * layers * partials);
  HostBuffer<NsaSums> sums(dev, 2 * layers);
  HostBuffer<NsaMaxima> maxima(dev, 2 * layers);
  for (int64_t i = 0; i < layers * n; ++i) x[i] = 3 * std::sin(0.37f * float(i));
  for (int64_t row = 0; row < a.B * a.HKV * a.T; ++row)
    for (int64_t i = 0; i < a.selected; ++i)
      indices[row * a.selected + i] = i <= row % a.T / a.select_block ? int32_t(i) : -1;
  std::vector<NsaCounted<float>> together;
  for (int64_t i = 0; i < layers; ++i) {
    together.push_back({sums_of_blocks.get() + i * partials, x.get() + i * n, indices.get()});
    NsaCounted<float> alone = together.back();
    alone.partials += layers * partials;
    nsa_stats<float>(s, {alone}, targets.get(), a);
  }
  nsa_stats<float>(s, together, targets.get(), a);
  nsa_stats_total(s, sums.get(), maxima.get(), sums_of_blocks.get(), 2 * layers);
  s.synchronize();
  CHECK(std::memcmp(sums.get(), sums.get() + layers, layers * sizeof(NsaSums)) == 0);
  CHECK(std::memcmp(maxima.get(), maxima.get() + layers, layers * sizeof(NsaMaxima)) == 0);
  for (int64_t i = 0; i < layers; ++i) CHECK(sums[i].rows == a.B * a.T * a.HKV);
  CHECK(sums[0].entropy != sums[layers - 1].entropy);
}

void check_stats(Backend backend) {
  NsaShape a = {};
  a.B = 2, a.T = 2048, a.H = 6, a.HKV = 2, a.D = 8, a.scale = 1;
  a.ld = a.columns() + 5;
  // The first and the last blocks: as any choice of 16, they hold 15 whole blocks and a part of the query's own.
  std::vector<int32_t> indices(size_t(a.B * a.HKV * a.T * a.selected), -1);
  for (int64_t row = 0; row < a.B * a.HKV * a.T; ++row) {
    const int64_t current = row % a.T / a.select_block, count = std::min(a.selected, current + 1);
    for (int64_t i = 0; i < count; ++i)
      indices[size_t(row * a.selected + i)] = int32_t(i < count / 2 ? i : current - count + 1 + i);
  }
  const int64_t n = a.B * a.T * a.H;
  std::vector<float> gates(size_t(3 * n), 0.5f);
  NsaStats s = stats_of(backend, a, gates, indices);
  CHECK(s.keys_mean == 752.5);
  CHECK(s.keys_max == 1024);
  CHECK(s.at_max == 17.0 / 2048);
  CHECK(s.rows == double(a.B * a.T * a.HKV));
  CHECK(s.entropy_mean == Approx(std::log(3.0)));
  CHECK(s.entropy_min == Approx(std::log(3.0)));
  CHECK(s.gate_max == Approx(1 / (1 + std::exp(-0.5))));
  CHECK(s.share_max == Approx(1 / 3.0));
  CHECK(s.share_max_mean == Approx(1 / 3.0));
  for (double share : s.share) CHECK(share == Approx(1 / 3.0));
  CHECK(s.collapsed == 0);

  // The selected branch has all of every fourth query's gates, and one gate of one head is wide open.
  for (int64_t i = 0; i < a.B * a.T; i += 4)
    for (int64_t g = 0; g < 3 * a.H; ++g) gates[size_t(i * 3 * a.H + g)] = g / a.H == 1 ? 0.5f : -20.0f;
  gates[size_t(1 * 3 * a.H + 2 * a.H + 3)] = 30;
  s = stats_of(backend, a, gates, indices);
  CHECK(s.collapsed == 0.25f);
  CHECK(s.entropy_min < 1e-6);
  CHECK(s.entropy_mean == Approx(0.75 * std::log(3.0)).epsilon(1e-4));
  CHECK(s.gate_max == Approx(1));
  CHECK(s.share[1] == Approx(0.5).epsilon(1e-4));
  CHECK(s.share[0] == Approx(0.25).epsilon(1e-4));
  const NsaStats again = stats_of(backend, a, gates, indices);
  CHECK(std::memcmp(&s, &again, sizeof s) == 0);
  // Micro-batches add up; padding, though its gates are wide open, does not count: of the first sequence here.
  const NsaStats half = stats_of(backend, a, gates, indices, a.T);
  CHECK(half.rows == double(a.T * a.HKV));
  CHECK(half.keys_mean == 752.5);
  CHECK(half.gate_max < 1);
  const NsaStats twice = stats_of(backend, a, gates, indices, a.T, 2);
  CHECK(twice.rows == 2 * half.rows);
  CHECK(twice.entropy_mean == Approx(half.entropy_mean));
  CHECK(twice.at_max == half.at_max);
  const NsaStats none = stats_of(backend, a, gates, indices, a.B * a.T);
  CHECK(none.rows == 0);
  CHECK(none.entropy_mean == 0);
}
}  // namespace

TEST_CASE("diagnostics count gates and selected keys", "[nsa]") {
  check_stats(Backend::cpu);
  check_stats_of_many(Backend::cpu);
}
TEST_CASE("GPU: diagnostics count gates and selected keys", "[nsa][gpu][small]") {
  NEEDS_GPU();
  check_stats(Backend::gpu);
  check_stats_of_many(Backend::gpu);
}

namespace {
#if FSDP_CUDA
// Stages whose latest kernel is a general one.
std::set<std::string> general_stages(const NsaKernels& k) {
  std::set<std::string> names;
  for (int s = 0; s < nsa_stages; ++s)
    if (k.latest[s].general) names.insert(name_of(Stage(s)));
  return names;
}
#endif
std::string kernel_of(const NsaKernels& k, Stage s) { return name_of(k.latest[int(s)]); }
}  // namespace

TEST_CASE("diagnostics say which kernels ran", "[nsa]") {
  for (Phi phi : {Phi::mean, Phi::linear, Phi::mlp}) {
    Step<float> x(Inputs(with(shape(1, 40, 2, 1, 8, phi), 8, 4, 16, 4, 20)));
    CHECK(x.kernels.calls == 0);  // it has been planned, and nothing ran
    x.step();
    for (int s = 0; s < nsa_stages; ++s) {
      INFO(name_of(Stage(s)));
      CHECK(kernel_of(x.kernels, Stage(s)) == "plain loops");
    }
    const int64_t compressions = phi == Phi::mean ? 1 : 2;  // keys and values together, or apart
    CHECK(x.kernels.calls == 5 + compressions + 3 + compressions);
    CHECK(x.kernels.general == 0);
    x.forward();
    CHECK(x.kernels.calls == 5 + compressions);
    CHECK(kernel_of(x.kernels, Stage::gates) == "plain loops");
    CHECK(kernel_of(x.kernels, Stage::window_backward) == "");
  }
  Step<float> x(Inputs(shape(1, 31, 2, 1, 8)));  // nothing to compress
  x.step();
  CHECK(x.kernels.calls == 4 + 2);
  CHECK(kernel_of(x.kernels, Stage::compressed) == "");
}

TEST_CASE("GPU: diagnostics say which kernels ran", "[nsa][gpu]") {
  NEEDS_GPU();
#if FSDP_CUDA
  const int cc = test_device(Backend::gpu).compute_capability;
  const bool hopper = cc == 90;
  const std::string code = hopper ? "sm90" : "sm80";
  const auto run = [](auto type, const NsaShape& a) {
    Step<decltype(type)> x(Inputs(a), Backend::gpu);
    x.step();
    CHECK(x.kernels.calls == 6 + 4 + (a.phi == Phi::mean ? 0 : 2));
    return x.kernels;
  };
  const auto check = [&](const NsaShape& a, const std::string& selection, const std::set<std::string>& general) {
    INFO(text(a));
    const NsaKernels k = run(bf16(), a);
    CHECK(kernel_of(k, Stage::selection) == selection);
    CHECK(general_stages(k) == general);
    CHECK(k.general == int64_t(general.size()));
    CHECK(k.general == std::accumulate(k.fallbacks, k.fallbacks + nsa_fallbacks, int64_t(0)));  // each has a name
    for (Stage s : {Stage::compressed, Stage::window, Stage::compressed_backward, Stage::window_backward})
      CHECK(kernel_of(k, s) == code);
    const std::string blocks = hopper && a.select_block == 64 ? ", masked tiles"
                               : a.select_block > 64          ? ", blocks in pieces"
                                                              : ", blocks of one piece";
    CHECK(kernel_of(k, Stage::selected) == code + blocks);
    CHECK(has(kernel_of(k, Stage::selected_backward), code));
    CHECK(has(kernel_of(k, Stage::selected_backward), blocks));
    for (Stage s : {Stage::compression, Stage::compression_backward, Stage::gates})
      CHECK(kernel_of(k, s) == "cuda, vectors");
  };
  for (int64_t D : {64, 128})
    for (int64_t group : {1, 2, 3, 4, 6, 8, 12, 16})
      check(shape(1, 100, group, 1, D, group == 4 ? Phi::mlp : Phi::mean),
            hopper ? strf("sm90, few blocks, %d head%s", int(group), group == 1 ? "" : "s") : "sm80, pooled", {});
  // Groups that no kernel was made for; a selection block that is not four strides; one that is two tiles of keys.
  for (int64_t group : {5, 7, 10})
    check(with(shape(1, 100, group, 1, 64), 8, 4, 16, 4, 20), hopper ? "sm90, pooled, any heads" : "sm80, pooled",
          hopper ? std::set<std::string>{"selection"} : std::set<std::string>{});
  check(with(shape(1, 100, 4, 1, 128), 8, 4, 8, 4, 20), code + ", not pooled", {"selection"});
  check(with(shape(1, 200, 4, 1, 128), 32, 16, 128, 3, 20), code + ", not pooled",
        {"selection", "selected", "selected_backward"});
  const NsaKernels k = run(float(), shape(1, 100, 3, 1, 40));
  CHECK(k.general == 0);  // there are no special ones in fp32
  CHECK(kernel_of(k, Stage::selection) == "fp32");
  CHECK(kernel_of(k, Stage::window_backward) == "fp32");
#endif
}
