// Sharding, on the whole model: what W ranks do together is what one rank does alone. Run at 1, 2, 3 and 4 ranks; the
// one-rank run that they are compared with is made by rank 0 in a world of its own.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <set>

#include "lib/program/estimate.h"
#include "lib/program/presets.h"
#include "model.h"
#include "test/catch.h"
#include "test/worst.h"

#ifdef __SANITIZE_ADDRESS__
extern "C" size_t __sanitizer_get_current_allocated_bytes();  // its header comes with clang, not with g++
constexpr bool sanitized = true;
#else
constexpr bool sanitized = false;
#endif

namespace {

ModelConfig small(Arch arch, int64_t vocab) {
  ModelConfig c;
  c.arch = arch;
  c.dim = 32, c.depth = 3, c.heads = 4, c.kv_heads = 2, c.hidden = 48, c.vocab = vocab, c.seq = 8;
  return c;
}
// Cuts of it. In the last two the backward pass begins in a unit that the forward pass has left in hand.
void whole_blocks(ModelConfig*) {}
void sublayers(ModelConfig* c) { c->wrap = Wrap::sublayer; }
void small_units(ModelConfig* c) { c->wrap = Wrap::size, c->wrap_min_params = 4000; }
void head_with_last_mlp(ModelConfig* c) { c->wrap = Wrap::size, c->wrap_min_params = 3200; }
void replicated_head(ModelConfig* c) { c->replicate_below = 1100; }
// Small enough that a sequence of 24 has compressed keys, blocks to choose from and tokens behind the window.
ModelConfig sparse(ModelConfig c, Phi phi) {
  c.sparse = true, c.seq = 24;
  c.nsa.block = 4, c.nsa.stride = 2, c.nsa.select_block = 4, c.nsa.selected = 4, c.nsa.window = 6, c.nsa.phi = phi;
  return c;
}
// Queries together are wider than the model, and keys wider than values.
ModelConfig wide_heads(ModelConfig c) {
  c.own_head_dim = 16, c.own_v_head_dim = 8;
  return c;
}
const Arch all_archs[] = {Arch::simple, Arch::rope, Arch::llama, Arch::mlp};

std::vector<std::pair<std::string, ModelConfig>> all_models(int64_t vocab) {
  std::vector<std::pair<std::string, ModelConfig>> models;
  for (Arch arch : all_archs) models.emplace_back(name_of(arch), small(arch, vocab));
  models.emplace_back("rope, NSA, mean", sparse(small(Arch::rope, vocab), Phi::mean));
  models.emplace_back("simple, NSA, linear", sparse(small(Arch::simple, vocab), Phi::linear));
  models.emplace_back("llama, NSA, MLP", sparse(small(Arch::llama, vocab), Phi::mlp));
  models.emplace_back("rope, NSA, gates by an MLP", sparse(small(Arch::rope, vocab), Phi::mean));
  ModelConfig& gated = models.back().second;  // wider than its gates
  gated.nsa_gate = NsaGate::mlp, gated.dim = 64, gated.kv_heads = 4;
  models.emplace_back("rope, heads of 16 and 8", wide_heads(small(Arch::rope, vocab)));
  models.emplace_back("rope, NSA, MLP, heads of 16 and 8", wide_heads(sparse(small(Arch::rope, vocab), Phi::mlp)));
  return models;
}

struct Setup {
  ModelConfig model;
  int64_t rows = 12;  // of the global batch; those that do not divide leave padding
  int64_t micro_batches = 1;
  int64_t steps = 10;
  FsdpOptions fsdp;
  double lr = 3e-3, clip = 1;
  double delay_ms = 0;
  std::pair<double, double> delays = {0, 0};  // of gathers and reductions alone; the last step's waits are then timed
  bool poison = false;
  bool silent = false;  // every target is padding
  Backend backend = Backend::cpu;
  bool share_gpu = false;
  bool graph = false;     // from the third step on
  int64_t no_graph = 0;   // but not every so many steps, as behind a save
  bool together = false;  // the host does not wait for one step before it issues the next
  bool validate = false;  // after each step, on the batch of the next
  bool fuse = true;
  int64_t skipped = 0;  // a step that the last rank leaves out, to make one more than the others instead
};

using Weights = std::map<std::string, std::vector<float>>;  // by parameter

struct Outcome {
  std::vector<double> losses, norms, validated, steps;
  std::vector<Issued> trace;               // of the last step
  Weights weights, trained;                // as gathered after init, and after the last step
  std::vector<std::vector<float>> shards;  // this rank's weights after the last step
  std::vector<NsaStats> nsa;               // of the last step, by block, where the model has diagnostics
  MemoryReport memory;
  int64_t reported = 0;
  std::pair<double, double> exposed = {0,
                                       0};  // ms that the last step waited for gathers and reductions, if it is timed
  int64_t growth = 0;  // bytes that the process, or the GPU's other memory, took from the tenth step on
};

// Memory in use beside the arena: the process's, and on a GPU the device's. AddressSanitizer keeps what was freed for a
// while, and knows better.
int64_t bytes_in_use(Backend backend) {
#if FSDP_CUDA
  if (backend == Backend::gpu) {
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    return int64_t(total) - int64_t(free);
  }
#endif
  (void)backend;
#ifdef __SANITIZE_ADDRESS__
  return int64_t(__sanitizer_get_current_allocated_bytes());
#endif
  std::ifstream statm("/proc/self/statm");
  int64_t size = 0, resident = 0;
  statm >> size >> resident;
  return resident * 4096;
}

int32_t token_at(int64_t step, int64_t row, int64_t at, int64_t vocab) {
  uint64_t x = uint64_t(step * 1000003 + row) * 0x9E3779B97F4A7C15ull + uint64_t(at) * 0xD1B54A32D192ED03ull;
  x ^= x >> 29, x *= 0xBF58476D1CE4E5B9ull, x ^= x >> 32;
  // Half of the tokens repeat the one before: something to learn.
  return at > 0 && x % 2 ? token_at(step, row, at - 1, vocab) : int32_t((x >> 8) % uint64_t(vocab));
}

template <class T, class G>
Outcome train(const Setup& s, const World& world) {
  const bool gpu = s.backend == Backend::gpu;
  const Transport transport = world.size == 1       ? Transport::none
                              : gpu && !s.share_gpu ? Transport::nccl
                                                    : Transport::mpi;
  const int ordinal = gpu && !s.share_gpu ? world.local_rank % gpus() : 0;
  Device dev(s.backend, ordinal, world.size, comm_streams(s.backend, transport));
  dev.fuse = s.fuse;
  const int64_t per_rank = (s.rows + world.size - 1) / world.size;
  const int64_t batch = (per_rank + s.micro_batches - 1) / s.micro_batches;
  const int64_t ints = batch_ints(s.model, batch), seq = s.model.seq, M = batch * seq;
  const double scale = 1.0 / double(s.rows * seq);
  const int64_t in_flight = s.together ? s.steps : 1;
  HostBuffer<ops::AdamW> adamw(dev, in_flight);
  auto step = [&](Model<T, G>& m, const int32_t* host, int64_t n, Event& copied) {
    ops::AdamW* a = adamw.get() + (n - 1) % in_flight;
    dev.mem.begin("step");
    const bool ahead = s.skipped > 0 && n >= s.skipped && world.rank == world.size - 1;
    if (host) *a = ops::AdamW(float(s.lr), 0.9f, 0.95f, 1e-8f, 0.1f, ahead ? n + 1 : n);
    m.begin_step(a, float(s.clip));
    for (int64_t i = 0; i < s.micro_batches; ++i)
      m.forward_backward(host + i * ints, scale, i == 0, i + 1 == s.micro_batches, copied);
    m.end_step();
    dev.mem.end();
  };
  auto validation = [&](Model<T, G>& m, const int32_t* host, bool first, Event& copied) {
    dev.mem.begin("validation");
    m.evaluate(host, first, copied);
    dev.mem.end();
  };
  {
    ops::keep_workspace(dev);
    Model<T, G> m(dev, world, transport, s.model, batch, s.fsdp, Links::planned);
    Event copied(dev);
    m.init_weights();
    step(m, nullptr, 1, copied);
    if (s.validate) validation(m, nullptr, true, copied);
  }
  if (transport == Transport::nccl && s.fsdp.uses_copy_engines()) use_nccl_memory(dev);
  dev.mem.commit();
  dev.mem.rewind();
  dev.mode = Mode::run;
  ops::keep_workspace(dev);
  Model<T, G> model(dev, world, transport, s.model, batch, s.fsdp, Links::open);
  Graph graph(dev);
  if (s.validate) {  // as programs do, to time products
    Event copied(dev);
    dev.mode = Mode::tune;
    step(model, nullptr, 1, copied);
    validation(model, nullptr, true, copied);
    dev.mode = Mode::run;
  }
  model.init_weights();
  const bool times = s.delays.first + s.delays.second > 0;
  if (times) model.fsdp.set_delays(s.delays.first, s.delays.second, 0);
  else model.fsdp.set_delays(s.delay_ms, s.delay_ms, s.delay_ms);
  HostBuffer<int32_t> hosts(dev, ints * s.micro_batches * in_flight), unseen(dev, ints * s.micro_batches);
  HostBuffer<StepScalars> results(dev, in_flight);
  HostBuffer<double> validated(dev, 1);
  Event copied(dev);

  Outcome out;
  auto gathered = [&] {
    Weights weights;
    for (size_t u = 0; u < model.fsdp.units().size(); ++u) {
      const Unit& unit = model.fsdp.units()[u];
      const int64_t wide = (unit.in_fp8 ? unit.numel : unit.padded) - unit.in_fp8;
      HostBuffer<T> whole(dev, std::max<int64_t>(wide, 1));
      HostBuffer<uint8_t> codes(dev, std::max<int64_t>(unit.in_fp8, 1));
      HostBuffer<float> unscales(dev, int64_t(unit.scaled.size()) + 1);
      dev.compute().copy(whole.get(), model.fsdp.use(int(u)), wide * int64_t(sizeof(T)));
      if (unit.in_fp8) dev.compute().copy(codes.get(), model.fsdp.codes(int(u)), unit.in_fp8);
      for (size_t i = 0; i < unit.scaled.size(); ++i)
        dev.compute().copy(&unscales[int64_t(i)], model.fsdp.unscale(int(u), unit.scaled[i].offset), 4);
      model.fsdp.release(int(u));
      dev.compute().synchronize();
      int64_t scale = -1;
      for (const Param& p : unit.params) {
        if (p.fp8 && !p.joined) ++scale;
        for (int64_t i = p.offset; i < p.offset + p.numel; ++i)
          weights[p.name].push_back(p.fp8 ? fp8::decode(codes[i], fp8::e4m3) * unscales[scale]
                                          : float(whole[i - unit.in_fp8]));
      }
    }
    return weights;
  };
  out.weights = gathered();
  const int64_t from = world.rank * s.rows / world.size, to = (world.rank + 1) * s.rows / world.size;
  auto fill = [&](int32_t* host, int64_t n) {
    for (int64_t m = 0; m < s.micro_batches; ++m) {
      int32_t* at = host + m * ints;
      for (int64_t i = 0; i < M; ++i) {
        const int64_t row = from + m * batch + i / seq;
        at[i] = row < to ? token_at(n, row, i % seq, s.model.vocab) : 0;
        micro_batch_at(at, M).targets[i] = row < to && !s.silent ? token_at(n, row, i % seq + 1, s.model.vocab) : -1;
      }
      index_batch(s.model, batch, at);
    }
  };
  for (int64_t n = 1; n <= s.steps; ++n) {
    if (n == 11) out.growth = -bytes_in_use(s.backend);
    int32_t* host = hosts.get() + (n - 1) % in_flight * ints * s.micro_batches;
    StepScalars* result = results.get() + (n - 1) % in_flight;
    fill(host, n);
    if (s.poison) dev.compute().synchronize(), dev.mem.poison();
    model.fsdp.issued().begin();
    if (times) model.fsdp.exposed().begin();
    if (s.graph && n > 2 && !(s.no_graph && n % s.no_graph == 0)) {
      adamw[0] = ops::AdamW(float(s.lr), 0.9f, 0.95f, 1e-8f, 0.1f, n);
      if (!graph.made()) graph.make([&] { step(model, host, n, copied); });
      graph.launch();
    } else {
      step(model, host, n, copied);
    }
    if (n == s.steps) out.trace = model.fsdp.issued().all();
    dev.compute().copy(result, model.fsdp.scalars(), sizeof *result);
    if (s.validate) {  // while the step may still run
      fill(unseen.get(), n + 1);
      for (int64_t m = 0; m < s.micro_batches; ++m) validation(model, unseen.get() + m * ints, m == 0, copied);
      model.finish_evaluation();
      dev.compute().copy(validated.get(), &model.fsdp.scalars()->loss, 8);
      dev.compute().synchronize();
      out.validated.push_back(validated[0] * scale);
    }
    for (int64_t i = std::max<int64_t>(0, n - in_flight); i < n && (!s.together || n == s.steps); ++i) {
      dev.compute().synchronize();
      const StepScalars& of = results[i % in_flight];
      out.norms.push_back(std::sqrt(of.norm2));
      out.losses.push_back(of.loss * scale);
      out.steps.push_back(of.steps);
    }
  }
  if (times) model.fsdp.exposed().read(/*latest=*/true, &out.exposed.first, &out.exposed.second);
  for (size_t u = 0; u < model.fsdp.units().size() && s.backend == Backend::cpu; ++u) {
    const float* w = model.fsdp.master(int(u));
    out.shards.emplace_back(w, w + model.fsdp.units()[u].shard);
  }
  if (model.nsa_sums()) {
    HostBuffer<NsaSums> sums(dev, s.model.depth);
    HostBuffer<NsaMaxima> maxima(dev, s.model.depth);
    dev.compute().copy(sums.get(), model.nsa_sums(), s.model.depth * int64_t(sizeof(NsaSums)));
    dev.compute().copy(maxima.get(), model.nsa_maxima(), s.model.depth * int64_t(sizeof(NsaMaxima)));
    dev.compute().synchronize();
    for (int64_t i = 0; i < s.model.depth; ++i) out.nsa.push_back(summary(sums[i], maxima[i]));
  }
  if (s.steps > 10) out.growth += bytes_in_use(s.backend);
  out.memory = dev.mem.report();
  out.reported = dev.mem.device_reported_bytes();
  out.trained = gathered();
  return out;
}

// Rank 0 alone; the others get an empty outcome.
template <class T, class G>
Outcome alone(const Setup& s) {
  return test_world().rank == 0 ? train<T, G>(s, World()) : Outcome();
}

double furthest(const std::vector<double>& x, const std::vector<double>& y) {
  double worst = x.size() == y.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
    worst = worse(worst, std::abs(x[i] - y[i]) / std::abs(y[i]));
  }
  return worst;
}

bool same(const Outcome& a, const Outcome& b) { return a.losses == b.losses && a.norms == b.norms; }

std::string text_of(const std::vector<Issued>& trace, bool uses = false) {
  std::string text;
  for (const Issued& i : trace) {
    if (!i.moves() && !(uses && i.kind == Issued::use)) continue;
    static const char* names[] = {"gather", "reduce", "exchange", "sum", "copy", "step", "use"};
    ASSERT(size_t(i.kind) < std::size(names));
    text += (text.empty() ? "" : " ") + std::string(names[i.kind]);
    if (i.unit >= 0) text += std::to_string(i.unit);
  }
  return text;
}

// The loss straight from the definitions, a number at a time: no chunks, no fusion, nothing of the program's but its
// weights. One rank's.
double loss_by_definition(const ModelConfig& c, int64_t batch, const int32_t* host, const Fsdp<double, double>& fsdp) {
  using Vector = std::vector<double>;
  using Rows = std::vector<Vector>;
  auto weight = [&](int u, const char* name, int64_t i) -> double {
    const std::string of = u == 0 ? "embedding" : u == int(c.depth) + 1 ? "head" : strf("block.%d", u - 1);
    const std::string full =
        c.tied && of == "head" && std::string(name) == "weight" ? "embedding.weight" : of + "." + name;
    for (size_t unit = 0; unit < fsdp.units().size(); ++unit)
      for (const Param& p : fsdp.units()[unit].params)
        if (p.name == full) return fsdp.master(int(unit))[p.offset + i];
    return 0;  // a bias that this architecture has not
  };
  auto times = [&](int u, const char* name, const Vector& x, int64_t rows) {
    Vector y(static_cast<size_t>(rows));
    for (int64_t i = 0; i < rows; ++i)
      for (size_t j = 0; j < x.size(); ++j) y[size_t(i)] += weight(u, name, i * int64_t(x.size()) + int64_t(j)) * x[j];
    return y;
  };
  const bool layer = c.arch == Arch::simple || c.arch == Arch::mlp,
             rotates = c.arch == Arch::rope || c.arch == Arch::llama;
  auto norm = [&](int u, const std::string& name, const Vector& x) {
    double mean = 0, square = 0;
    for (double v : x) mean += layer ? v / double(x.size()) : 0;
    for (double v : x) square += (v - mean) * (v - mean) / double(x.size());
    Vector y(x.size());
    for (size_t i = 0; i < x.size(); ++i)
      y[i] = (x[i] - mean) / std::sqrt(square + c.norm_eps) * weight(u, name.c_str(), int64_t(i)) +
             weight(u, (name + ".bias").c_str(), int64_t(i));
    return y;
  };
  auto gelu = [](double x) {
    return 0.5 * x * (1 + std::tanh(std::sqrt(2 / 3.14159265358979323846) * (x + 0.044715 * x * x * x)));
  };
  auto mlp = [&](int u, const Vector& x) {
    Vector h = times(u, "mlp.up", x, c.hidden);
    if (c.arch == Arch::llama) {
      const Vector gate = times(u, "mlp.gate", x, c.hidden);
      for (size_t i = 0; i < h.size(); ++i) h[i] *= gate[i] / (1 + std::exp(-gate[i]));
    } else {
      for (size_t i = 0; i < h.size(); ++i) h[i] = gelu(h[i] + weight(u, "mlp.up.bias", int64_t(i)));
    }
    Vector y = times(u, "mlp.down", h, c.dim);
    for (size_t i = 0; i < y.size(); ++i) y[i] += weight(u, "mlp.down.bias", int64_t(i));
    return y;
  };
  auto rotate = [&](Vector& x, int64_t t) {
    const size_t D = size_t(c.head_dim());
    for (size_t head = 0; rotates && head < x.size(); head += D)
      for (size_t i = 0; i < D / 2; ++i) {
        const double angle = double(t) * c.rope.angle(i, D);
        const double a = x[head + i], b = x[head + i + D / 2];
        x[head + i] = a * std::cos(angle) - b * std::sin(angle);
        x[head + i + D / 2] = b * std::cos(angle) + a * std::sin(angle);
      }
  };
  double loss = 0;
  for (int64_t b = 0; b < batch; ++b) {
    Rows x;
    for (int64_t t = 0; t < c.seq; ++t) {
      x.emplace_back(static_cast<size_t>(c.dim));
      for (int64_t i = 0; i < c.dim; ++i) {
        const double angle = double(t) * std::pow(10000.0, -double(i / 2 * 2) / double(c.dim));
        x.back()[size_t(i)] = weight(0, "weight", host[b * c.seq + t] * c.dim + i) + (c.arch != Arch::simple ? 0
                                                                                      : i % 2 ? std::cos(angle)
                                                                                              : std::sin(angle));
      }
    }
    for (int u = 1; u <= int(c.depth); ++u) {
      const size_t D = c.attends() ? size_t(c.head_dim()) : 0, DV = c.attends() ? size_t(c.v_head_dim()) : 0;
      Rows q, k, v;
      for (int64_t t = 0; c.attends() && t < c.seq; ++t) {
        const Vector n = norm(u, "norm1", x[size_t(t)]);
        q.push_back(times(u, "attention.q", n, c.heads * int64_t(D)));
        k.push_back(times(u, "attention.k", n, c.kv_heads * int64_t(D)));
        v.push_back(times(u, "attention.v", n, c.kv_heads * int64_t(DV)));
        rotate(q.back(), t), rotate(k.back(), t);
      }
      for (size_t t = 0; t < x.size(); ++t) {
        Vector o(size_t(c.heads) * DV);
        for (size_t h = 0; c.attends() && h < size_t(c.heads); ++h) {
          const size_t kv_head = h / size_t(c.heads / c.kv_heads);
          Vector p;
          double sum = 0;
          for (size_t j = 0; j <= t; ++j) {
            double dot = 0;
            for (size_t d = 0; d < D; ++d) dot += q[t][h * D + d] * k[j][kv_head * D + d];
            p.push_back(std::exp(dot / std::sqrt(double(D))));
            sum += p.back();
          }
          for (size_t j = 0; j <= t; ++j)
            for (size_t d = 0; d < DV; ++d) o[h * DV + d] += p[j] / sum * v[j][kv_head * DV + d];
        }
        if (c.attends()) {
          const Vector y = times(u, "attention.o", o, c.dim);
          for (size_t i = 0; i < y.size(); ++i) x[t][i] += y[i];
        }
        const Vector y = mlp(u, c.attends() ? norm(u, "norm2", x[t]) : x[t]);
        for (size_t i = 0; i < y.size(); ++i) x[t][i] += y[i];
      }
    }
    for (int64_t t = 0; t < c.seq; ++t) {
      const int32_t target = host[batch * c.seq + b * c.seq + t];
      if (target < 0) continue;
      const int u = int(c.depth) + 1;
      const Vector logits = times(u, "weight", norm(u, "norm", x[size_t(t)]), c.vocab);
      double sum = 0;
      for (double z : logits) sum += std::exp(z);
      loss += std::log(sum) - logits[size_t(target)];
    }
  }
  return loss / double(batch * c.seq);
}

ModelConfig small_on_gpu(Arch arch) {
  ModelConfig c;
  c.arch = arch;
  c.dim = 128, c.depth = 3, c.heads = 2, c.kv_heads = 1, c.hidden = 320, c.vocab = 264, c.seq = 72;
  return c;
}

// A host's allocator warms up over some steps.
int64_t growth_allowed(Backend backend) { return backend == Backend::gpu ? 0 : 512 * 1024; }

void check_flat(Backend backend) {
  Setup s;
  s.model = backend == Backend::gpu ? small_on_gpu(Arch::rope) : small(Arch::rope, 4 * test_world().size + 1);
  s.backend = backend, s.steps = 1010, s.micro_batches = 2;
  const Outcome out = train<float, float>(s, test_world());
  if (backend == Backend::gpu) CHECK(out.reported == out.memory.arena);
  CHECK(out.growth <= growth_allowed(backend));  // half a KiB lost in each step would show
}
}  // namespace

TEST_CASE("the collectives of a step, in order", "[fsdp]") {
  const World& world = test_world();
  Setup s;
  s.model = small(Arch::rope, 4 * world.size + 1);  // units: 0 the embedding, 1 to 3 the blocks, 4 the head
  s.steps = 2;
  auto trace = [&](int slots, int64_t micro_batches) {
    s.fsdp.gather_slots = slots, s.micro_batches = micro_batches;
    return text_of(train<float, float>(s, world).trace);
  };
  // Two slots: the next unit is gathered before the current one computes, and the last block is still there when the
  // backward pass begins.
  CHECK(trace(2, 1) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 gather1 reduce2 reduce1 reduce0 sum step");
  // The next micro-batch finds the embedding on its way and the first block in its slot.
  CHECK(trace(2, 2) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 gather1 reduce2 gather0 reduce1 reduce0 "
        "gather2 gather3 gather4 reduce4 gather2 reduce3 gather1 reduce2 reduce1 reduce0 sum step");
  // One: nothing is gathered ahead, and the last block must be gathered again.
  CHECK(trace(1, 1) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 gather3 reduce3 gather2 reduce2 gather1 reduce1 reduce0 sum "
        "step");
  if (world.size == 1) return;  // where each unit has a slot of its own, that is the master copy itself
  // As many slots as units, or no limit: a unit is still given up after its forward.
  for (int slots : {5, 0})
    CHECK(trace(slots, 1) ==
          "gather0 gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 gather1 reduce2 reduce1 reduce0 sum step");
  // Unless it is not to be: nothing is gathered twice.
  s.fsdp.reshard_after_forward = false;
  CHECK(trace(2, 1) == "gather0 gather1 gather2 gather3 gather4 reduce4 reduce3 reduce2 reduce1 reduce0 sum step");
  CHECK(trace(2, 2) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 reduce3 reduce2 reduce1 reduce0 "
        "reduce4 reduce3 reduce2 reduce1 reduce0 sum step");
  // Plain data parallelism moves nothing but gradients.
  s.fsdp.shard_ranks = 1;
  CHECK(trace(2, 1) == "sum4 sum3 sum2 sum1 sum0 sum step");
  s.fsdp.shard_ranks = 0, s.fsdp.reshard_after_forward = true;
  // What is gathered when it is wanted is gathered in the same order; after the gradient, behind its reduction.
  s.model.forward_prefetch = 0, s.model.backward_prefetch = BackwardPrefetch::none;
  CHECK(trace(2, 1) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 reduce3 gather2 reduce2 gather1 reduce1 reduce0 sum step");
  s.model.backward_prefetch = BackwardPrefetch::post;
  CHECK(trace(2, 1) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 gather1 reduce2 reduce1 reduce0 sum step");
  s.model.backward_prefetch = BackwardPrefetch::pre;
  // Two ahead, with slots for them.
  s.model.forward_prefetch = 2;
  CHECK(trace(3, 1) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 gather1 reduce2 reduce1 reduce0 sum step");
  s.model.forward_prefetch = 1;
  // Gradients that are kept until the last micro-batch; AdamW behind each reduction.
  s.fsdp.reduce_last = true;
  CHECK(trace(2, 2) ==
        "gather0 gather1 gather2 gather3 gather4 gather2 gather1 gather0 gather2 gather3 gather4 reduce4 gather2 "
        "reduce3 gather1 reduce2 reduce1 reduce0 sum step");
  s.fsdp.reduce_last = false, s.fsdp.update_in_backward = true, s.clip = 0;
  CHECK(trace(2, 1) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 step4 gather2 reduce3 step3 gather1 reduce2 step2 reduce1 "
        "step1 reduce0 step0 sum");
  s.fsdp.update_in_backward = false, s.clip = 1;
  // Whatever is made again, the next unit is on its way before a unit is used.
  s.model.recompute = Recompute::block;
  CHECK(trace(2, 1) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 gather1 reduce2 reduce1 reduce0 sum step");
  s.model.wrap = Wrap::sublayer, s.model.depth = 2;  // attention, for its output; the MLP; attention
  CHECK(trace(2, 1) ==
        "gather0 gather1 gather2 gather3 gather4 gather5 gather3 reduce5 gather4 reduce4 gather1 reduce3 gather2 "
        "reduce2 reduce1 reduce0 sum step");
  s.model.wrap = Wrap::block, s.model.depth = 3, s.model.recompute = Recompute::none;
  // Units: attention and MLP apart; all in one; a shared weight is reduced where it is used.
  s.model.depth = 1, s.model.wrap = Wrap::sublayer;  // 0 the embedding, 1 attention, 2 MLP, 3 the head
  CHECK(trace(2, 1) == "gather0 gather1 gather2 gather3 reduce3 gather1 reduce2 reduce1 reduce0 sum step");
  s.model.wrap = Wrap::single;
  CHECK(trace(2, 1) == "gather0 reduce0 sum step");
  s.model.wrap = Wrap::block, s.model.tied = true;
  CHECK(trace(2, 1) == "gather0 gather1 gather0 reduce0 reduce1 reduce0 sum step");
  s.model.wrap = Wrap::single;
  CHECK(trace(2, 1) == "gather0 reduce0 sum step");
  s.model.tied = false, s.model.wrap = Wrap::block;
  // What is small has a unit of its own, 3, which is never gathered.
  s.model.replicate_below = 33;
  CHECK(trace(2, 1) == "gather0 gather1 gather2 reduce2 reduce1 reduce0 sum3 sum step");
  s.model.replicate_below = 0;
  // A frozen unit is gathered and never reduced.
  s.model.frozen = {"block.0"};
  CHECK(trace(2, 1) == "gather0 gather1 gather2 reduce2 reduce0 sum step");
  // The backward pass ends where nothing further down is trained; the next micro-batch's first unit is then on its way.
  s.model.depth = 3, s.model.frozen = {"embedding", "block.0"};
  CHECK(trace(2, 1) == "gather0 gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 reduce2 sum step");
  CHECK(trace(2, 2) ==
        "gather0 gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 gather0 reduce2 "
        "gather1 gather2 gather3 gather4 reduce4 gather2 reduce3 reduce2 sum step");
  s.model.wrap = Wrap::single;
  CHECK(trace(2, 1) == "gather0 gather0 reduce0 sum step");  // the trained and the frozen part
  s.model.wrap = Wrap::block, s.model.tied = true;
  CHECK(trace(2, 1) ==
        "gather0 gather0 gather1 gather2 gather3 gather0 gather0 reduce0 gather2 reduce3 reduce2 sum step");
  s.model.tied = false, s.model.depth = 1, s.model.frozen = {};
  // Bytes: the whole padded unit each time.
  std::vector<Unit> units = parameter_table(s.model);
  lay_out(&units, world.size);
  s.fsdp.gather_slots = 2, s.micro_batches = 1;
  for (const Issued& i : train<float, float>(s, world).trace)
    if (i.unit >= 0 && i.moves()) CHECK(i.bytes == units[size_t(i.unit)].padded * 4);
  // Groups of two: the all_reduce between replicas moves a shard.
  if (world.size != 4) return;
  s.fsdp.shard_ranks = 2;
  CHECK(trace(2, 1) == "gather0 gather1 gather2 reduce2 sum2 reduce1 sum1 reduce0 sum0 sum sum step");
  // What is whole on every rank is the same on every rank: the first one's sum.
  s.model.replicate_below = 33;
  CHECK(trace(2, 1) == "gather0 gather1 gather2 reduce2 sum2 reduce1 sum1 reduce0 sum0 sum3 sum3 copy3 sum sum step");
  s.model.replicate_below = 0;
  lay_out(&units, 2);
  for (const Issued& i : train<float, float>(s, world).trace) {
    if (i.unit < 0 || !i.moves()) continue;
    const Unit& u = units[size_t(i.unit)];
    CHECK(i.bytes == (i.kind == Issued::all_reduce ? u.shard : u.padded) * 4);
  }
}

TEST_CASE("a unit is gathered as far ahead of its use as the prefetches say", "[fsdp]") {
  Setup s;
  s.model = small(Arch::rope, 4 * test_world().size + 1), s.steps = 1;
  auto trace = [&](int slots, int ahead, BackwardPrefetch behind) {
    s.fsdp.gather_slots = slots, s.model.forward_prefetch = ahead, s.model.backward_prefetch = behind;
    return text_of(train<float, float>(s, test_world()).trace, true);
  };
  const char* forward[] = {"gather0 use0 gather1 use1 gather2 use2 gather3 use3 gather4 use4 ",
                           "gather0 gather1 use0 gather2 use1 gather3 use2 gather4 use3 use4 ",
                           "gather0 gather1 gather2 use0 gather3 use1 gather4 use2 use3 use4 ",
                           "gather0 gather1 gather2 gather3 use0 gather4 use1 use2 use3 use4 "};
  const char* backward[] = {"reduce4 gather2 use3 reduce3 gather1 use2 reduce2 use1 ",
                            "reduce4 use3 gather2 reduce3 use2 gather1 reduce2 use1 ",
                            "reduce4 use3 reduce3 gather2 use2 reduce2 gather1 use1 "};
  for (int ahead : {0, 1, 2, 3})
    for (auto behind : {BackwardPrefetch::pre, BackwardPrefetch::post, BackwardPrefetch::none})
      CHECK(trace(4, ahead, behind) ==
            std::string(forward[ahead]) + backward[int(behind)] + "reduce1 reduce0 sum step");
  // As far as there are slots.
  CHECK(trace(2, 3, BackwardPrefetch::pre) == trace(2, 1, BackwardPrefetch::pre));
}

// A trace tells the order on the host alone; for what a gather waits on the device shows in the estimate of a dry run.
TEST_CASE("what is gathered when it is wanted hides behind nothing", "[fsdp]") {
  const int gather = 1;  // that stream
  auto dry = [&](int ahead, BackwardPrefetch behind, int steps) {
    ModelConfig m = preset_named("llama-8b").model;
    m.depth = 4, m.forward_prefetch = ahead, m.backward_prefetch = behind;
    Device dev(Backend::gpu, Device::plan_only);
    Estimate estimate(*chip_named("h200"));
    dev.timeline = &estimate;
    World world;
    world.size = world.local_size = 8;
    FsdpOptions options;
    options.gather_slots = 3, options.reduce_dtype = Dtype::bf16;
    ops::keep_workspace(dev);
    Model<bf16, bf16> model(dev, world, Transport::nccl, m, 1, options, Links::planned);
    Event copied(dev);
    for (int i = 0; i < steps; ++i) {
      if (i > 0) estimate.next_step();
      dev.mem.begin("step");
      model.begin_step(nullptr, 1);
      model.forward_backward(nullptr, 1, true, true, copied);
      model.end_step();
      dev.mem.end();
    }
    const Estimate of_the_last = estimate;
    estimate.next_step();
    model.fsdp.use(1), model.fsdp.release(1);  // which AdamW was done with early
    CHECK(estimate.exposed(gather) > estimate.talking(Collective::all_gather));
    return of_the_last;
  };
  for (auto behind : {BackwardPrefetch::post, BackwardPrefetch::none}) {
    const Estimate first = dry(0, behind, 1), second = dry(0, behind, 2);
    CHECK(first.exposed(gather) > first.talking(Collective::all_gather));
    // Nor behind the optimizer of the step before, where the gather of a unit ahead does.
    CHECK(second.exposed(gather) == Approx(first.exposed(gather)));
    CHECK(dry(1, behind, 2).exposed(gather) < 0.99 * dry(1, behind, 1).exposed(gather));
  }
  CHECK(dry(1, BackwardPrefetch::pre, 2).exposed(gather) <
        0.5 * dry(1, BackwardPrefetch::pre, 2).talking(Collective::all_gather));
}

TEST_CASE("a reduction moves its units' padded sizes in its dtype", "[fsdp]") {
  const World& world = test_world();
  Setup s;
  s.model = small(Arch::rope, 4 * world.size + 1), s.steps = 1;
  s.model.replicate_below = 33;
  for (int shard_ranks : {0, 1, 2}) {
    if (shard_ranks == 2 && world.size != 4) continue;
    s.fsdp.shard_ranks = shard_ranks, s.fsdp.reshard_after_forward = shard_ranks != 1;
    std::vector<Unit> units = parameter_table(s.model);
    lay_out(&units, s.fsdp.shards(world.size));
    for (int dtypes = 0; dtypes < 5; ++dtypes) {
      INFO("groups of " << shard_ranks << " dtypes " << dtypes);
      const Dtype reduced = dtypes == 0 || dtypes == 2 ? Dtype::f32 : Dtype::bf16;
      s.fsdp.reduce_dtype = reduced;
      const Outcome out = dtypes < 2   ? train<float, float>(s, world)
                          : dtypes < 4 ? train<bf16, float>(s, world)
                                       : train<bf16, bf16>(s, world);
      size_t reductions = 0;
      for (const Issued& i : out.trace) {
        if (i.kind != Issued::reduce_scatter && i.kind != Issued::all_reduce) continue;
        const bool scalars = i.unit < 0;
        CHECK(i.dtype == (scalars ? Dtype::f64 : reduced));
        if (scalars) {
          CHECK(i.bytes == int64_t(sizeof(StepScalars)));
          continue;
        }
        const Unit& u = units[size_t(i.unit)];
        CHECK(i.bytes == (i.kind == Issued::all_reduce ? u.shard : u.padded) * size_of(reduced));
        ++reductions;
      }
      CHECK(reductions == units.size() * (shard_ranks == 2 ? 2 : 1));
    }
  }
}

// The combinations of the knobs that change which bytes move and where they lie: a dozen of their product, drawn so
// that every value of each is there.
TEST_CASE("every way to shard trains as one rank does, in the memory that was planned", "[fsdp]") {
  const World& world = test_world();
  Setup s;
  s.steps = 3, s.micro_batches = 2;
  const Arch archs[] = {Arch::rope, Arch::simple, Arch::llama, Arch::mlp};
  const Wrap wraps[] = {Wrap::block, Wrap::sublayer, Wrap::single, Wrap::size};
  std::vector<int> groups;
  for (int k = 1; k <= world.size; ++k)
    if (world.size % k == 0) groups.push_back(k);
  for (int n = 0; n < 24; ++n) {
    auto pick = [&](int prime, int values) { return n * prime / 3 % values; };  // 0 <= pick < values
    s.model = small(archs[n % 4], 4 * world.size + 1);
    if (n % 6 == 1) s.model = sparse(small(Arch::rope, 4 * world.size + 1), Phi::linear);
    s.model.wrap = wraps[n / 2 % 4], s.model.wrap_min_params = 3000, s.model.bucket_params = n % 3 ? 0 : 4000;
    s.model.tied = n % 5 == 2;
    s.model.replicate_below = n % 4 == 3 ? 200 : 0;
    s.model.recompute = n % 7 == 3 && s.model.attends() ? Recompute::block : Recompute::none;
    s.model.hidden_bytes = n % 3 ? s.model.hidden_bytes : 1000;
    s.model.frozen.clear();
    if (n % 5 > 2)
      s.model.frozen = {"block.0.mlp", "block.1.attention.q", "block.2.norm", n % 2 ? "head" : "embedding"};
    s.model.forward_prefetch = pick(5, 3);
    s.model.backward_prefetch = BackwardPrefetch(pick(7, 3));
    s.fsdp = FsdpOptions();
    s.clip = n % 8 == 6 ? 0 : 1;
    const Outcome one = alone<float, float>(s);
    s.fsdp.shard_ranks = groups[size_t(n) % groups.size()];
    s.fsdp.reshard_after_forward = s.fsdp.shard_ranks > 1 || world.size == 1 ? n % 2 == 0 : false;
    s.fsdp.gather_slots = pick(11, 4), s.fsdp.gradient_slots = 1 + pick(13, 3);
    s.fsdp.reduce_last = n % 4 == 1, s.fsdp.update_in_backward = s.clip == 0;
    s.fsdp.unsharded_init = n % 3 == 2;
    INFO("case " << n << ": " << name_of(s.model.arch) << " wrap " << int(s.model.wrap) << " groups of "
                 << s.fsdp.shard_ranks << " slots " << s.fsdp.gather_slots << " tied " << s.model.tied);
    const Outcome out = train<float, float>(s, world);
    s.poison = true;
    CHECK(same(train<float, float>(s, world), out));
    s.poison = false;
    if (world.rank != 0) continue;
    CHECK(furthest(out.losses, one.losses) < (s.model.sparse ? 2e-4 : 2e-5));
    CHECK(furthest(out.norms, one.norms) < 2e-3);
  }
}

// All of --shard, --wrap, --reshard-after-forward, --limit-all-gathers, both prefetches and the dtypes, but for those
// that are the same as another: what is not resharded has no limit, and --shard grad is that. Four ranks take the
// hybrid ones, groups of two, which fewer have not. The others share the rest by thirds that hold every pair of values.
// On a GPU, where it takes longer, four ranks take such a third too; the ranks share it: opening NCCL's communicators
// would take most of the time. Such a third runs for a hundred steps, what else four ranks try for ten.
namespace {
void check_six_knobs(Backend backend) {
  const World& world = test_world();
  const bool gpu = backend == Backend::gpu;
  Setup s;
  s.model = gpu ? small_on_gpu(Arch::rope) : small(Arch::rope, 4 * world.size + 1);
  s.backend = backend, s.share_gpu = gpu;
  s.model.depth = 2, s.model.wrap_min_params = 3000, s.rows = 4;
  // What a GPU that is shared has in use is the others' too.
  const bool own = !gpu || world.size == 1;
  auto begin = [](std::vector<double> losses) {
    losses.resize(std::min<size_t>(losses.size(), 10));
    return losses;
  };
  s.steps = own ? 10 : 2;
  const Outcome one = alone<float, float>(s);
  int tried = 0;
  auto check = [&](int shard_ranks, Wrap wrap, bool reshard, int slots, int ahead, int behind, int dtypes) {
    // Thirds of the combinations: those whose knobs add up to the same.
    const bool in_third = (int(wrap) + slots + ahead + behind + dtypes) % 3 == world.size % 3;
    if ((world.size != 4 || gpu) && !in_third) return;
    ++tried;
    s.steps = !own ? 2 : in_third ? 100 : 10;
    INFO("groups of " << shard_ranks << " wrap " << int(wrap) << " reshard " << reshard << " slots " << slots
                      << " prefetches " << ahead << " and " << behind << " dtypes " << dtypes);
    s.model.wrap = wrap;
    s.model.forward_prefetch = ahead, s.model.backward_prefetch = BackwardPrefetch(behind);
    s.fsdp = FsdpOptions();
    s.fsdp.shard_ranks = shard_ranks, s.fsdp.reshard_after_forward = reshard, s.fsdp.gather_slots = slots;
    s.fsdp.reduce_dtype = dtypes == 1 ? Dtype::bf16 : Dtype::f32;
    const Outcome out = dtypes == 0   ? train<float, float>(s, world)
                        : dtypes == 1 ? train<bf16, bf16>(s, world)
                                      : train<bf16, float>(s, world);
    // That it ran is most of it: a step that takes or gives anything else than was planned throws.
    CHECK(out.memory.live_peak <= out.memory.arena);
    if (own) CHECK(out.growth <= growth_allowed(backend));
    if (world.rank == 0)
      CHECK(furthest(begin(out.losses), begin(one.losses)) < (dtypes > 0 ? (gpu ? 2e-2 : 1e-2) : gpu ? 1e-4 : 2e-5));
  };
  const std::vector<int> groups = world.size == 4 ? std::vector<int>{2} : std::vector<int>{0, 1};
  for (int shard_ranks : groups)
    for (Wrap wrap : {Wrap::block, Wrap::sublayer, Wrap::single, Wrap::size})
      for (bool reshard : {true, false})
        for (int slots : {0, 1, 2})
          for (int ahead : {0, 1, 2})
            for (int behind : {0, 1, 2})
              for (int dtypes : {0, 1, 2}) {
                if (reshard ? shard_ranks == 1 : slots != 2) continue;  // refused
                check(shard_ranks, wrap, reshard, slots, ahead, behind, dtypes);
              }
  CHECK(tried == (world.size != 4 ? 180 : gpu ? 144 : 432));
}
}  // namespace

TEST_CASE("every combination of six knobs uses the memory that was planned, and no more in a hundred steps", "[fsdp]") {
  check_six_knobs(Backend::cpu);
}
TEST_CASE("GPU: every combination of six knobs uses the memory that was planned, and no more in a hundred steps",
          "[fsdp][gpu]") {
  if (!have_gpu()) SKIP_TEST("no GPU");
  check_six_knobs(Backend::gpu);
}

TEST_CASE("what only moves work in time changes no bit", "[fsdp]") {
  const World& world = test_world();
  Setup s;
  s.model = small(Arch::llama, 4 * world.size + 1);
  s.steps = 3, s.micro_batches = 2, s.clip = 0;
  const Outcome plain = train<float, float>(s, world);
  for (int n = 0; n < 6; ++n) {
    INFO("case " << n);
    Setup t = s;
    if (n == 0) t.model.forward_prefetch = 0, t.model.backward_prefetch = BackwardPrefetch::none;
    if (n == 1)
      t.model.forward_prefetch = 3, t.model.backward_prefetch = BackwardPrefetch::post, t.fsdp.gather_slots = 4;
    if (n == 2) t.fsdp.gather_slots = 0;
    if (n == 3) t.fsdp.reshard_after_forward = false;
    if (n == 4) t.fsdp.unsharded_init = true;
    if (n == 5) t.fsdp.shard_ranks = 1, t.fsdp.reshard_after_forward = false;
    t.delay_ms = n == 1 && world.rank % 2 ? 10 : 0;
    const Outcome out = train<float, float>(t, world);
    CHECK(out.losses == plain.losses);
    // The norm's terms are added up by whom they lie with.
    if (n == 5) CHECK(furthest(out.norms, plain.norms) < 1e-12);
    else CHECK(out.norms == plain.norms);
  }
}

TEST_CASE("in fp32 it changes no bit who sums the parts of a gradient", "[fsdp]") {
  const World& world = test_world();
  Setup s;
  s.steps = 3, s.micro_batches = 2;
  for (int n = 0; n < 5; ++n) {
    INFO("case " << n);
    s.model = small(n % 2 ? Arch::llama : Arch::rope, 4 * world.size + 1);
    s.model.replicate_below = n == 1 ? 200 : 0, s.model.tied = n == 2;
    s.fsdp = FsdpOptions(), s.clip = n == 3 ? 0 : 1;
    s.fsdp.reduce_last = n == 2, s.fsdp.update_in_backward = n == 3, s.fsdp.gradient_slots = 1 + n % 3;
    s.fsdp.shard_ranks = n == 4 && world.size == 4 ? 2 : 0;
    const Outcome plain = train<float, float>(s, world);
    s.fsdp.reduce_by_copy_engine = true;
    CHECK(same(train<float, float>(s, world), plain));
    s.delay_ms = world.rank % 2 ? 3 : 10, s.together = true;
    CHECK(same(train<float, float>(s, world), plain));
    s.delay_ms = 0, s.together = false;
  }
}

TEST_CASE("a gradient that is reduced once, in bf16, is kept in bf16", "[fsdp]") {
  const World& world = test_world();
  Setup s;
  s.model = small(Arch::rope, 4 * world.size + 1), s.model.dim = 64, s.model.hidden = 512, s.model.depth = 8;
  s.rows = world.size, s.steps = 3;  // the peak is near the end of the backward pass
  auto kept = [](const Outcome& out) { return double(out.memory.peak[int(Purpose::gradients)]); };
  s.fsdp.reduce_dtype = Dtype::f32;
  const double in_fp32 = kept(train<bf16, float>(s, world));
  s.fsdp.reduce_dtype = Dtype::bf16;
  CHECK(kept(train<bf16, bf16>(s, world)) < 0.6 * in_fp32);
  CHECK(kept(train<bf16, float>(s, world)) < 0.6 * in_fp32);
  // The same numbers in fp32: those of AdamW in the backward pass, which keeps none.
  s.clip = 0;
  const Outcome apart = train<bf16, bf16>(s, world);
  s.fsdp.update_in_backward = true;
  CHECK(train<bf16, bf16>(s, world).shards == apart.shards);
  s.fsdp.update_in_backward = false, s.clip = 1;
  // Several micro-batches add up in fp32, and so do the parts that an owner sums.
  s.micro_batches = 2;
  CHECK(kept(train<bf16, bf16>(s, world)) > 0.8 * in_fp32);
  s.micro_batches = 1, s.fsdp.reduce_by_copy_engine = true;
  if (world.size > 1) CHECK(kept(train<bf16, bf16>(s, world)) > 0.8 * in_fp32);
}

TEST_CASE("weights that are made whole first need room for the whole model", "[fsdp]") {
  if (test_world().size == 1) SKIP_TEST("needs more ranks than one");
  Setup s;
  s.model = small(Arch::rope, 4 * test_world().size + 1);
  s.model.depth = 40, s.rows = test_world().size, s.steps = 0;
  const Outcome sharded = train<float, float>(s, test_world());
  s.fsdp.unsharded_init = true;
  const Outcome whole = train<float, float>(s, test_world());
  CHECK(whole.weights == sharded.weights);
  CHECK(whole.memory.live_peak > sharded.memory.live_peak);
  CHECK(whole.memory.init_total >= sharded.memory.init_total + 4 * parameter_count(s.model));
  CHECK(whole.memory.live_peak > 4 * parameter_count(s.model));
}

TEST_CASE("AdamW in the backward pass changes no bit and keeps no gradient shards", "[fsdp]") {
  Setup s;
  for (int64_t micro_batches : {1, 2, 3})  // with three the slots have taken an odd number of turns when a step ends
    for (bool tied : {false, true}) {
      s.model = small(Arch::rope, 4 * test_world().size + 1);
      s.model.tied = tied;
      s.steps = 3, s.clip = 0, s.micro_batches = micro_batches;
      s.fsdp.update_in_backward = false;
      const Outcome plain = train<float, float>(s, test_world());
      s.fsdp.update_in_backward = true;
      s.poison = true, s.delay_ms = 5;
      const Outcome out = train<float, float>(s, test_world());
      s.poison = false, s.delay_ms = 0;
      CHECK(out.losses == plain.losses);
      CHECK(out.shards == plain.shards);
      CHECK(furthest(out.norms, plain.norms) < 1e-12);  // summed in another order
      const int gradients = int(Purpose::gradients);
      if (micro_batches == 1 && !tied) CHECK(out.memory.peak[gradients] == 0);
    }
}

TEST_CASE("casting behind the gather changes no bit", "[fsdp]") {
  Setup s;
  s.model = small(Arch::llama, 4 * test_world().size + 1);
  s.steps = 3, s.fsdp.reduce_dtype = Dtype::f32;
  const Outcome narrow = train<bf16, float>(s, test_world());
  s.fsdp.gather_wide = true;
  const Outcome wide = train<bf16, float>(s, test_world());
  CHECK(same(narrow, wide));
  for (size_t i = 0; i < wide.trace.size(); ++i)
    if (wide.trace[i].kind == Issued::all_gather) {
      CHECK(wide.trace[i].bytes == 2 * narrow.trace[i].bytes);
      CHECK(wide.trace[i].dtype == Dtype::f32);
      CHECK(narrow.trace[i].dtype == Dtype::bf16);
    }
}

TEST_CASE("moments in bf16 halve their memory and train as well", "[fsdp]") {
  Setup s;
  s.model = small(Arch::rope, 4 * test_world().size + 1);
  s.steps = 20;
  const Outcome wide = train<float, float>(s, test_world());
  s.fsdp.moment_dtype = Dtype::bf16;
  const Outcome narrow = train<float, float>(s, test_world());
  CHECK(same(train<float, float>(s, test_world()), narrow));
  CHECK(narrow.losses != wide.losses);
  CHECK(furthest(narrow.losses, wide.losses) < 2e-2);
  const int moments = int(Purpose::moments);
  CHECK(4 * narrow.memory.before_step[moments] <= 3 * wide.memory.before_step[moments]);  // whole pages each
  const Outcome one = alone<float, float>(s);
  if (test_world().rank == 0) CHECK(furthest(narrow.losses, one.losses) < 2e-2);
  // What one rank alone adds to is the same sum on any number of ranks, and is rounded alike: by a number's place in
  // its parameter, not in a shard.
  s.rows = 1, s.clip = 0, s.steps = 3;
  const Outcome rounded = train<float, float>(s, test_world()), by_one = alone<float, float>(s);
  if (test_world().rank == 0) CHECK((rounded.trained == by_one.trained));
}

TEST_CASE("clipping bounds the norm that is asked for, however the model is cut", "[fsdp]") {
  const World& world = test_world();
  for (ops::GradNorm p : {ops::GradNorm::one, ops::GradNorm::two, ops::GradNorm::three, ops::GradNorm::inf}) {
    INFO("p " << int(p));
    Setup s;
    s.model = small(Arch::rope, 4 * world.size + 1);
    s.model.replicate_below = 100;
    s.steps = 4, s.fsdp.norm = p;
    s.clip = 0;
    const Outcome loose = alone<float, float>(s);
    s.clip = world.rank == 0 ? 0.3 * loose.norms[0] : 0;
    const std::string clip = broadcast_text(strf("%.17g", s.clip));
    s.clip = std::atof(clip.c_str());
    const Outcome one = alone<float, float>(s);
    if (world.rank == 0) CHECK(one.norms[0] > 3 * s.clip);  // it does something
    if (world.rank == 0) CHECK(one.losses.back() != loose.losses.back());
    for (int k = 1; k <= world.size; ++k) {
      if (world.size % k) continue;
      s.fsdp.shard_ranks = k;
      const Outcome out = train<float, float>(s, world);
      if (world.rank != 0) continue;
      CHECK(furthest(out.losses, one.losses) < 2e-5);
      CHECK(furthest(out.norms, one.norms) < 2e-3);
    }
  }
}

TEST_CASE("what is frozen stays as it is, and the others train as if it were not", "[fsdp]") {
  const World& world = test_world();
  struct Case {
    Arch arch;
    std::vector<std::string> frozen;
    bool sparse, tied, some_replicated;
  };
  for (const Case& c : {Case{Arch::rope, {"embedding", "block.1"}, false, false, false},
                        {Arch::rope, {"block.0.attention", "block.0.norm", "block.2.mlp.up"}, false, false, false},
                        {Arch::rope, {"head", "block"}, false, false, true},
                        {Arch::simple, {"block.0.mlp.up", "block.0.norm2", "head.norm.bias"}, false, true, true},
                        // Of one product with what trains: q, k and v; gate and up.
                        {Arch::rope, {"block.0.attention.q", "block.1.attention.k"}, false, false, false},
                        {Arch::llama, {"block.0.mlp.gate", "block.1.mlp.up"}, false, false, false},
                        {Arch::llama, {"block.0.attention.phi_k", "block.1.attention.gate"}, true, false, false}}) {
    INFO(name_of(c.arch) << ", frozen " << c.frozen[0]);
    Setup s;
    s.model = small(c.arch, 4 * world.size + 1);
    if (c.sparse) s.model.dim = 64, s.model = sparse(s.model, Phi::mlp);
    s.model.tied = c.tied, s.model.replicate_below = c.some_replicated ? 33 : 0;
    s.steps = 1, s.clip = 0;
    const Outcome free = train<float, float>(s, world);
    s.model.frozen = c.frozen;
    const Outcome first = train<float, float>(s, world);
    // The norm is that of what trains. (A weight and its bias begin with one name.)
    if (c.arch != Arch::simple && !c.sparse) {
      s.model.frozen.clear();
      for (const Unit& u : parameter_table(small(c.arch, s.model.vocab)))
        for (const Param& p : u.params)
          if (std::none_of(c.frozen.begin(), c.frozen.end(), [&](auto& f) { return p.name.rfind(f, 0) == 0; }))
            s.model.frozen.push_back(p.name);
      const Outcome others = train<float, float>(s, world);
      CHECK(std::hypot(first.norms[0], others.norms[0]) == Approx(free.norms[0]).epsilon(1e-6));
      s.model.frozen = c.frozen;
    }
    s.steps = 3, s.clip = 1, s.micro_batches = 2, s.poison = true;
    const Outcome out = train<float, float>(s, world);
    std::vector<Unit> units = parameter_table(s.model);
    lay_out(&units, world.size);
    int64_t reduced = 0, moments = 0, fixed = 0;
    for (const Unit& u : units) {
      for (const Param& p : u.params) {
        INFO(p.name);
        CHECK(first.trained.at(p.name) == (p.frozen ? free.weights : free.trained).at(p.name));
        CHECK((out.trained.at(p.name) == out.weights.at(p.name)) == p.frozen);
        fixed += p.has_gradient ? 0 : p.numel;
      }
      moments += u.with_gradient.shard * 8;
    }
    CHECK((fixed == 0) == (c.frozen[0] == "block.0.attention.q" || c.frozen[0] == "block.0.mlp.gate"));
    // What is reduced, and what has moments, is what trains and no more; what is gathered is all.
    const int64_t has = out.memory.before_step[int(Purpose::moments)];
    CHECK((has >= moments && has - moments < int64_t(units.size()) * 2 * 4096));
    std::vector<int64_t> gathered(units.size());
    for (const Issued& i : first.trace) {
      if (i.unit < 0 || !i.moves() || i.kind == Issued::optimizer) continue;
      const Unit& u = units[size_t(i.unit)];
      if (i.kind == Issued::all_gather) {
        gathered[size_t(i.unit)] += i.bytes;
        continue;
      }
      CHECK((i.bytes == u.with_gradient.padded * 4 && u.trained()));
      reduced += i.bytes;
    }
    for (size_t u = 0; u < units.size(); ++u)
      if (!units[u].replicated) CHECK((gathered[u] > 0 && gathered[u] % (units[u].padded * 4) == 0));
    CHECK(reduced > 0);
    const Outcome one = alone<float, float>(s);
    if (world.rank != 0) continue;
    CHECK(furthest(out.losses, one.losses) < 2e-5);
    CHECK(furthest(out.norms, one.norms) < 2e-3);
  }
}

TEST_CASE("the backward pass ends at the first block that is trained", "[fsdp]") {
  const World& world = test_world();
  for (Wrap wrap : {Wrap::block, Wrap::sublayer, Wrap::single, Wrap::size})
    for (int n = 0; n < 6; ++n) {
      INFO("wrap " << int(wrap) << " case " << n);
      Setup s;
      s.model = sparse(small(Arch::rope, 4 * world.size + 1), Phi::linear);
      if (n == 1 || n == 4) s.model = small(n == 1 ? Arch::mlp : Arch::simple, 4 * world.size + 1);
      s.model.depth = 4, s.rows = 48, s.model.wrap = wrap, s.model.wrap_min_params = 8000;
      s.model.diagnostics = true;
      s.model.tied = n == 2 || n == 3, s.model.replicate_below = n == 3 ? 50 : 0;
      if (n == 4) s.model.recompute = Recompute::block;
      if (n == 5) s.fsdp.reshard_after_forward = false;
      s.steps = 1, s.clip = 0, s.poison = true;
      const Outcome free = train<float, float>(s, world);
      s.model.frozen = {"embedding", "block.0", "block.1", "block.2.attention"};
      if (n == 5) s.model.frozen = {"embedding", "block"};
      const Outcome out = train<float, float>(s, world);
      for (const Unit& u : parameter_table(s.model))
        for (const Param& p : u.params) {
          INFO(p.name);
          CHECK(out.trained.at(p.name) == (p.frozen ? free.weights : free.trained).at(p.name));
        }
      CHECK(out.losses == free.losses);
      CHECK(out.nsa.size() == (s.model.sparse ? 4 : 0));
      for (size_t i = 0; i < out.nsa.size(); ++i)
        CHECK(std::memcmp(&out.nsa[i], &free.nsa[i], sizeof free.nsa[i]) == 0);
      const int activations = int(Purpose::activations);
      CHECK(out.memory.peak[activations] < free.memory.peak[activations] * (n == 4 ? 5 : 4) / 6);
      auto used_behind = [](const std::vector<Issued>& trace) {  // the first reduction, whose unit is the head's
        const auto from = std::find_if(trace.begin(), trace.end(), [](const Issued& i) {
          return i.kind == Issued::reduce_scatter || (i.kind == Issued::all_reduce && i.unit >= 0);
        });
        return std::count_if(from, trace.end(), [](const Issued& i) { return i.kind == Issued::use; });
      };
      if (wrap == Wrap::block || wrap == Wrap::sublayer) CHECK(used_behind(out.trace) < used_behind(free.trace));
      s.steps = 3, s.clip = 1, s.micro_batches = 3, s.fsdp.reduce_last = n % 2 == 0;
      const Outcome several = train<float, float>(s, world), one = alone<float, float>(s);
      if (world.rank != 0) continue;
      CHECK(furthest(several.losses, one.losses) < 2e-5);
      CHECK(furthest(several.norms, one.norms) < 2e-3);
    }
}

TEST_CASE("a rank that skips a step is found out in that step", "[fsdp]") {
  const World& world = test_world();
  Setup s;
  s.model = small(Arch::rope, 4 * world.size + 1), s.steps = 4;
  for (int n = 0; n < 4; ++n) {
    if (n == 1) s.fsdp.norm = ops::GradNorm::inf;
    if (n == 2) s.fsdp.shard_ranks = 1, s.fsdp.reshard_after_forward = false;
    if (n == 3) s.fsdp.shard_ranks = world.size % 2 ? 0 : 2;
    for (bool skips : {false, true}) {
      s.skipped = skips ? 3 : 0;
      const Outcome out = train<float, float>(s, world);
      for (int step = 1; step <= 4; ++step)
        CHECK((out.steps[size_t(step - 1)] == double(step * world.size)) == (!skips || step < 3));
    }
  }
}

TEST_CASE("a unit is used between its gather and its release", "[fsdp]") {
  Setup s;
  s.model = small(Arch::llama, 4 * test_world().size + 1);
  s.steps = 2, s.micro_batches = 2;  // the trace is the second step's, which begins with empty slots
  for (int slots : {1, 2, 3, 5}) {
    if (test_world().size == 1 && slots == 5) continue;
    s.fsdp.gather_slots = slots;
    s.model.wrap = slots == 3 ? Wrap::sublayer : Wrap::block;
    std::vector<int> held;  // units in slots, as far as the trace tells
    std::vector<int> used;
    for (const Issued& i : train<float, float>(s, test_world()).trace) {
      if (i.kind == Issued::all_gather) held.push_back(i.unit);
      if (i.kind == Issued::use) {
        CHECK(std::find(held.begin(), held.end(), i.unit) != held.end());
        CHECK(std::find(used.begin(), used.end(), i.unit) == used.end());
        used.push_back(i.unit);
      }
      if (i.kind == Issued::release) {
        const auto at = std::find(used.begin(), used.end(), i.unit);
        REQUIRE(at != used.end());
        used.erase(at);
      }
      CHECK(int(used.size()) <= slots);
    }
    CHECK(used.empty());
  }
}

TEST_CASE("a unit's shards cover it, aligned, whatever the number of ranks", "[fsdp]") {
  for (int ranks : {1, 2, 3, 4, 5, 7, 8, 13, 64})
    for (Arch arch : all_archs) {
      ModelConfig c = small(arch, 4 * ranks + 1);
      if (ranks % 2 == 0)
        c.frozen = {"block.0.mlp.down", "block.0.norm", "block.1", "block.2.attention.k", "head.norm"};
      std::vector<Unit> units = parameter_table(c);
      lay_out(&units, ranks);
      for (const Unit& u : units) {
        int64_t at = 0, part = 0, numel = 0;
        for (const FlatParam& f : {u.with_gradient, u.without_gradient}) {
          CHECK((f.offset_in_unit == at && f.offset_in_shard == part));
          CHECK(f.padded == f.shard * ranks);
          CHECK(f.padded >= f.numel);
          CHECK((f.numel > 0 ? f.padded - f.numel < ranks * shard_align : f.padded == 0));
          CHECK(f.shard % shard_align == 0);
          at += f.padded, part += f.shard, numel += f.numel;
        }
        CHECK((u.padded == at && u.shard == part && u.numel == numel));
        at = 0;
        for (const Param& p : u.params) {
          if (!p.has_gradient && at < u.without_gradient.offset_in_unit) {
            CHECK(at == u.with_gradient.numel);
            at = u.without_gradient.offset_in_unit;
          }
          CHECK(p.offset == at);
          CHECK(p.decay == (p.shape.size() > 1));
          CHECK((p.offset < u.decayed) == (p.decay && p.has_gradient));
          CHECK((p.has_gradient || p.frozen));
          at += p.numel;
          // Every element in one shard, and nothing else in its place.
          int64_t next = 0;
          for (int r = 0; r < ranks; ++r) {
            const Unit::Piece mine = u.piece(p, r);
            if (mine.numel == 0) continue;
            CHECK(mine.first == next);
            CHECK((mine.offset_in_shard >= 0 && mine.offset_in_shard + mine.numel <= u.shard));
            const FlatParam& f = p.has_gradient ? u.with_gradient : u.without_gradient;
            CHECK(mine.offset_in_shard - f.offset_in_shard + r * f.shard == p.offset - f.offset_in_unit + next);
            next += mine.numel;
          }
          CHECK(next == p.numel);
        }
        CHECK(at == (u.without_gradient.numel > 0 ? u.without_gradient.offset_in_unit + u.without_gradient.numel
                                                  : u.with_gradient.numel));
      }
    }
}

TEST_CASE("the reference model has the parameters and FLOPs that it should", "[fsdp]") {
  CHECK(parameter_count(preset_named("simple").model) == 973234176);
  CHECK(parameter_count(preset_named("llama-8b").model) == 8030261248);
  const Preset p = preset_named("simple");
  CHECK(flops_per_token(p.model) * double(p.batch * p.model.seq) == Approx(178.12e12).epsilon(1e-4));
  // What is frozen spares its own product; below the first block that is trained a third of the work is left.
  const ModelConfig& all = p.model;
  auto spared = [](ModelConfig c, const std::vector<std::string>& frozen) {
    const double whole = flops_per_token(c);
    c.frozen = frozen;
    return whole - flops_per_token(c);
  };
  const double up = double(all.dim * all.hidden),
               block = 2 * up + double(all.dim * (2 * all.heads + 2 * all.kv_heads) * all.head_dim()),
               attention = double(all.dim * all.seq);
  CHECK(spared(all, {"embedding"}) == 0);
  CHECK(spared(all, {"block.3.mlp.up"}) == 2 * up);
  CHECK(spared(all, {"block.0", "block.1"}) == 4 * block);  // the embedding's gradient goes through them
  CHECK(spared(all, {"embedding", "block.0", "block.1"}) == 8 * block + 8 * attention);
  // Phi multiplies once for each compressed key, a stride of tokens.
  const ModelConfig by_mean = sparse(small(Arch::rope, 11), Phi::mean),
                    by_mlp = sparse(small(Arch::rope, 11), Phi::mlp);
  const double D = double(by_mlp.head_dim()), phi = 2 * D * double(by_mlp.nsa.block) * D + D * 2 * D;
  CHECK(flops_per_token(by_mlp) - flops_per_token(by_mean) ==
        Approx(6 * double(by_mlp.depth * 2 * by_mlp.kv_heads) * phi / double(by_mlp.nsa.stride)));
  // Heads of another width: q and k, v and o, and what they make of each key, of which a query sees half.
  ModelConfig wide = all;
  wide.own_head_dim = 192, wide.own_v_head_dim = 160;  // in place of 128
  const double heads = double(all.dim * (all.heads + all.kv_heads)), keys = double(all.heads * all.seq) / 2;
  CHECK(flops_per_token(wide) - flops_per_token(all) == Approx(6 * double(all.depth) * (heads + keys) * (64 + 32)));
  ModelConfig tied = all;
  tied.tied = true;
  CHECK(flops_per_token(tied) == flops_per_token(all));
  CHECK(spared(tied, {"embedding", "block.0"}) == 4 * block + 4 * attention + 2 * double(all.dim * all.vocab));
}

TEST_CASE("initial weights do not depend on the number of ranks", "[fsdp]") {
  for (Arch arch : all_archs) {
    Setup s;
    s.model = small(arch, 4 * test_world().size + 1), s.steps = 0;
    const Outcome sharded = train<float, float>(s, test_world()), one = alone<float, float>(s);
    if (test_world().rank == 0) CHECK(sharded.weights == one.weights);
    s.fsdp.seed = 1;
    const Outcome other = train<float, float>(s, test_world());
    CHECK(other.weights != sharded.weights);
    // As the table says: mean and deviation of every matrix.
    for (const Unit& u : parameter_table(s.model))
      for (const Param& p : u.params) {
        double sum = 0, square = 0;
        for (int64_t i = 0; i < p.numel; ++i) {
          const double x = sharded.weights.at(p.name)[size_t(i)];
          sum += x, square += x * x;
        }
        const double n = double(p.numel), mean = sum / n, std = std::sqrt(std::max(0.0, square / n - mean * mean));
        CHECK(std::abs(mean - p.mean) <= 5 * p.std / std::sqrt(n) + 1e-6);
        if (p.decay) CHECK(std == Approx(p.std).epsilon(0.2));
      }
  }
}

// As the papers have it, and not as the table says: sqrt(2 / 5d), less by sqrt(2L) where the residual stream is
// written.
TEST_CASE("initial deviations are those of small init", "[fsdp]") {
  const auto std_of = [](const ModelConfig& c, const std::string& name) {
    for (const Unit& u : parameter_table(c))
      for (const Param& p : u.params)
        if (p.name == name) return double(p.std);
    FAIL(name << " is no parameter");
    return 0.0;
  };
  for (Arch arch : all_archs)
    for (bool tied : {false, true}) {
      ModelConfig c = small(arch, 5);
      c.tied = tied;
      const double d = double(c.dim), matrix = std::sqrt(2 / (5 * d)),
                   stream = matrix / std::sqrt(2.0 * double(c.depth));
      const bool large = (arch == Arch::simple || arch == Arch::mlp) && !tied;  // positions are added to it, or no norm
      INFO(name_of(arch) << (tied ? ", tied" : ""));
      CHECK(std_of(c, "embedding.weight") == Approx(large ? 1 : matrix));
      if (!tied) CHECK(std_of(c, "head.weight") == Approx(matrix));
      CHECK(std_of(c, "block.1.mlp.up") == Approx(matrix));
      CHECK(std_of(c, "block.1.mlp.down") == Approx(stream));
      if (!c.attends()) continue;
      CHECK(std_of(c, "block.1.attention.q") == Approx(matrix));
      CHECK(std_of(c, "block.1.attention.o") == Approx(stream));
      c = sparse(c, Phi::mlp);
      const double wide = double(c.nsa.block * c.head_dim());
      CHECK(std_of(c, "block.1.attention.phi_k.w1") == Approx(1 / std::sqrt(wide)));
      CHECK(std_of(c, "block.1.attention.phi_v.w2") == Approx(1 / std::sqrt(2.0 * double(c.head_dim()))));
      CHECK(std_of(c, "block.1.attention.phi_k.position") == Approx(0.02));
    }
}

TEST_CASE("W ranks train as one rank does", "[fsdp]") {
  for (const auto& [name, model] : all_models(4 * test_world().size + 1)) {
    INFO(name);
    Setup s;
    s.model = model;
    const Outcome sharded = train<float, float>(s, test_world()), again = train<float, float>(s, test_world());
    CHECK(same(sharded, again));  // bit for bit
    CHECK(sharded.losses.back() < sharded.losses.front() - 0.05);
    const Outcome one = alone<float, float>(s);
    if (test_world().rank != 0) continue;
    // Of two blocks with nearly the same score rounding may choose another.
    CHECK(furthest(sharded.losses, one.losses) < (model.sparse ? 2e-4 : 2e-5));
    CHECK(furthest(sharded.norms, one.norms) < 2e-3);
  }
}

TEST_CASE("in bf16, and with gradients reduced in either dtype", "[fsdp]") {
  Setup s;
  s.model = small(Arch::rope, 4 * test_world().size + 1);
  for (Dtype reduce : {Dtype::bf16, Dtype::f32}) {
    INFO(name_of(reduce));
    s.fsdp.reduce_dtype = reduce;
    const bool narrow = reduce == Dtype::bf16;
    const auto run = [&](const World& w) { return narrow ? train<bf16, bf16>(s, w) : train<bf16, float>(s, w); };
    const Outcome sharded = run(test_world()), again = run(test_world());
    CHECK(same(sharded, again));
    CHECK(sharded.losses.back() < sharded.losses.front() - 0.05);
    if (test_world().rank == 0) CHECK(furthest(sharded.losses, run(World()).losses) < 1e-2);
  }
  // fp32 gradients may be reduced in bf16.
  s.fsdp.reduce_dtype = Dtype::bf16;
  const Outcome narrow = train<float, float>(s, test_world());
  s.fsdp.reduce_dtype = Dtype::f32;
  const Outcome wide = train<float, float>(s, test_world());
  CHECK(furthest(narrow.losses, wide.losses) < 1e-2);
  CHECK(narrow.norms != wide.norms);
}

// Every rank scales what it has by its own largest numbers, so W ranks differ by fp8's rounding.
TEST_CASE("in fp8 W ranks train as one rank does, and as in bf16", "[fsdp][fp8]") {
  const auto alike = [](const Outcome& a, const Outcome& b) {
    CHECK(furthest(a.losses, b.losses) < 2e-2);
    CHECK(furthest(a.norms, b.norms) < 0.1);
    CHECK(furthest({a.norms[0]}, {b.norms[0]}) < 0.05);  // of the same weights
  };
  for (const auto& [name, model] : all_models(4 * test_world().size + 1)) {
    Setup s;
    s.model = model;
    if (model.own_head_dim) s.steps = 1;  // from there on what rounding does grows faster than in the others
    const Outcome wide = train<bf16, float>(s, test_world());
    s.model.fp8 = true;
    for (fp8::Scaling scaling : {fp8::Scaling::tensor, fp8::Scaling::row}) {
      if (scaling == fp8::Scaling::row && model.arch != Arch::rope && model.arch != Arch::simple) continue;
      if (scaling == fp8::Scaling::row && model.sparse) continue;  // what NSA selects follows any rounding
      INFO(name << ", scaling " << int(scaling));
      s.model.fp8_scaling = scaling;
      const Outcome sharded = train<bf16, float>(s, test_world()), again = train<bf16, float>(s, test_world());
      CHECK(same(sharded, again));
      CHECK(sharded.losses != wide.losses);
      alike(sharded, wide);
      if (test_world().rank == 0) alike(sharded, train<bf16, float>(s, World()));
    }
  }
}

TEST_CASE("in fp8 recomputation changes no bit either, and nothing is read that was not written", "[fsdp][fp8]") {
  bool by_row = true;
  for (const auto& [name, model] : all_models(4 * test_world().size + 1)) {
    by_row = !by_row;
    INFO(name << (by_row ? ", scaled by row" : ""));
    Setup s;
    s.model = model, s.model.fp8 = true, s.steps = 2, s.poison = true, s.model.hidden_bytes = 4096;
    if (by_row) s.model.fp8_scaling = fp8::Scaling::row;
    const Outcome all = train<bf16, float>(s, test_world());
    // Between them these make again whatever is cast.
    for (Recompute mode : {Recompute::mlp, Recompute::attn, Recompute::block}) {
      if (!model.attends() && mode != Recompute::mlp) continue;
      INFO("mode " << int(mode));
      s.model.recompute = mode;
      CHECK(same(train<bf16, float>(s, test_world()), all));
    }
  }
}

TEST_CASE("in fp8 what is frozen stays as it is too, and the others train as if it were not", "[fsdp][fp8]") {
  for (Arch arch : all_archs)
    for (bool by_row : {false, true}) {
      INFO(name_of(arch) << (by_row ? ", scaled by row" : ""));
      Setup s;
      s.model = small(arch, 4 * test_world().size + 1), s.model.fp8 = true, s.model.hidden_bytes = 4096;
      if (by_row) s.model.fp8_scaling = fp8::Scaling::row;
      s.steps = 1, s.clip = 0, s.poison = true, s.fsdp.reduce_dtype = Dtype::bf16;
      const Outcome free = train<bf16, bf16>(s, test_world());
      s.model.frozen = {"block.0.mlp.down", "block.1.mlp", "block.2.attention.o"};
      const Outcome out = train<bf16, bf16>(s, test_world());
      CHECK(out.losses == free.losses);
      for (const Unit& u : parameter_table(s.model))
        for (const Param& p : u.params) {
          INFO(p.name);
          CHECK((out.trained.at(p.name) == (p.frozen ? free.weights : free.trained).at(p.name)));
        }
    }
}

TEST_CASE("a hidden layer saved in fp8 changes gradients by its rounding, and the forward pass not", "[fsdp][fp8]") {
  bool multiplied = false;
  for (const auto& [name, model] : all_models(4 * test_world().size + 1)) {
    multiplied = !multiplied;
    INFO(name << (multiplied ? ", matmuls in fp8" : ""));
    Setup s;
    s.model = model, s.model.fp8 = multiplied, s.steps = 3, s.poison = true;
    // In pieces where both are cut alike: a BLAS may round a row by how many are multiplied with it.
    if (multiplied) s.model.hidden_bytes = 4096;
    const Outcome wide = train<bf16, float>(s, test_world());
    s.model.save_fp8 = true;
    const Outcome narrow = train<bf16, float>(s, test_world());
    CHECK(same(train<bf16, float>(s, test_world()), narrow));
    CHECK(narrow.losses[0] == wide.losses[0]);
    CHECK(narrow.norms[0] != wide.norms[0]);
    CHECK(furthest(narrow.norms, wide.norms) < 0.05);
    CHECK(furthest(narrow.losses, wide.losses) < 1e-2);
  }
}

// What an exact weight comes to when all ranks cast what they have of it under one scale.
void check_gathered_in_fp8(const std::vector<Unit>& units, const Weights& exact, const Weights& gathered) {
  for (const Unit& u : units)
    for (size_t i = 0, end; i < u.params.size(); i = end) {
      for (end = i + 1; end < u.params.size() && u.params[end].joined; ++end) continue;
      float amax = 0;
      for (size_t j = i; j < end; ++j)
        for (float w : exact.at(u.params[j].name)) amax = std::max(amax, std::fabs(w));
      const float scale = fp8::scale_for(amax, fp8::e4m3.largest);
      for (size_t j = i; j < end; ++j) {
        const Param& p = u.params[j];
        INFO(p.name);
        std::vector<float> wanted = exact.at(p.name);
        for (float& w : wanted)
          w = p.fp8 ? fp8::decode(fp8::encode(w * scale, fp8::e4m3), fp8::e4m3) * (1 / scale) : float(bf16(w));
        CHECK(gathered.at(p.name) == wanted);
      }
    }
}

TEST_CASE("gathered in fp8 every rank has the same codes, and half the bytes have moved", "[fsdp][fp8]") {
  const World& world = test_world();
  int n = 0;
  for (const auto& [name, model] : all_models(4 * world.size + 1)) {
    INFO(name);
    Setup s;
    s.model = model, s.model.fp8 = true, s.steps = 3, s.poison = true;
    // By the way: groups of one rank, units that stay, copies of what is small, and AdamW in the backward pass.
    s.fsdp.shard_ranks = n % 4 == 1 ? 1 : 0, s.fsdp.reshard_after_forward = n % 4 != 2;
    if (n % 4 == 3) s.model.replicate_below = model.dim * model.dim + 1;
    if (n % 4 == 0) s.fsdp.update_in_backward = true, s.clip = 0;
    ++n;
    Setup wide = s;
    wide.steps = 1, wide.model.fp8 = false;
    const Weights exact = train<float, float>(wide, world).weights;
    const Outcome in_bf16 = train<bf16, float>(s, world);
    s.model.gather_fp8 = true;
    const Outcome in_fp8 = train<bf16, float>(s, world);
    CHECK(same(train<bf16, float>(s, world), in_fp8));
    std::vector<Unit> units = parameter_table(s.model);
    lay_out(&units, s.fsdp.shards(world.size));
    check_gathered_in_fp8(units, exact, in_fp8.weights);
    CHECK(furthest(in_fp8.losses, in_bf16.losses) < 2e-2);
    CHECK(furthest(in_fp8.norms, in_bf16.norms) < 0.1);
    CHECK(furthest({in_fp8.norms[0]}, {in_bf16.norms[0]}) < 0.05);

    // A scale is agreed on once a step, and blocks move as bytes.
    std::vector<int> agreed(units.size());
    double moved = 0, as_bf16 = 0;
    for (const Issued& i : in_fp8.trace) {
      if (i.kind == Issued::amax && i.ranks > 1) ++agreed[size_t(i.unit)];
      if (i.kind != Issued::all_gather || units[size_t(i.unit)].in_fp8 == 0) continue;
      moved += i.sent();
      if (i.dtype == Dtype::e4m3) CHECK(i.bytes == units[size_t(i.unit)].padded);
    }
    for (const Issued& i : in_bf16.trace)
      if (i.kind == Issued::all_gather && units[size_t(i.unit)].in_fp8 > 0) as_bf16 += i.sent();
    const bool gathers = s.fsdp.shards(world.size) > 1;
    for (size_t u = 0; u < units.size(); ++u)
      CHECK(agreed[u] == (gathers && units[u].in_fp8 > 0 && !units[u].replicated ? 1 : 0));
    if (n == 3) CHECK((moved > 0) == gathers);           // llama
    CHECK(moved <= (model.sparse ? 1 : 0.9) * as_bf16);  // such small matrices leave much beside them
  }
}

TEST_CASE("in a unit with parameters in fp8 every rank's part of the others lies where they join", "[fsdp][fp8]") {
  if (test_world().size != 1) SKIP_TEST("is about one rank");
  for (int shards : {1, 2, 3, 4, 8})
    for (int64_t matrix : {64, 512, 1000, 4096})
      for (int64_t rest : {0, 8, 64, 504, 2000, 20000}) {
        INFO(shards << " shards, " << matrix << " in fp8 and " << rest);
        Unit u;
        const auto add = [&](int64_t numel, bool fp8) {
          Param p = {};
          p.numel = numel, p.fp8 = fp8, p.decay = fp8;
          if (numel > 0) u.params.push_back(p);
        };
        add(rest / 2 / 8 * 8, false), add(matrix, true), add(rest - rest / 2 / 8 * 8, false);
        std::vector<Unit> units = {u};
        lay_out(&units, shards);
        const FlatParam& f = units[0].with_gradient;
        const bool pays = units[0].in_fp8 > 0;
        if (rest < matrix / shards / 2 && matrix > 1000 * shards) CHECK(pays);
        if (rest > matrix) CHECK(!pays);
        CHECK(units[0].params[0].fp8 == pays);
        if (!pays) continue;
        CHECK(units[0].in_fp8 == matrix);
        const Fp8Layout l = fp8_layout(units[0], shards, 2);
        CHECK(l.rest >= f.padded);
        CHECK(l.bytes == l.rest + shards * l.part * 2);
        CHECK(l.part <= f.shard);
        CHECK((l.part == 0) == (rest == 0));
        CHECK((l.first % 8 == 0 && l.part % shard_align == 0 && l.rest % 256 == 0));
        int64_t outside = 0;
        for (int64_t e = matrix; e < f.numel; ++e) outside += (l.first + e - matrix) / l.part != e / f.shard;
        CHECK(outside == 0);
      }
}

TEST_CASE("micro-batches add up to the batch", "[fsdp]") {
  for (Arch arch : {Arch::rope, Arch::mlp}) {
    Setup s;
    s.model = small(arch, 4 * test_world().size + 1);
    const Outcome whole = train<float, float>(s, test_world());
    s.micro_batches = 3;
    CHECK(furthest(train<float, float>(s, test_world()).losses, whole.losses) < 2e-5);
  }
}

TEST_CASE("validation changes no bit of the training, and sees the loss that the next step sees", "[fsdp]") {
  for (int n = 0; n < 8; ++n) {
    INFO("case " << n);
    Setup s;
    s.model = small(n == 1 ? Arch::llama : Arch::rope, 4 * test_world().size + 1);
    s.steps = 4, s.micro_batches = 2;
    if (n == 1) s.model.wrap = Wrap::sublayer, s.model.replicate_below = 33, s.fsdp.gather_slots = 3;
    if (n == 2) s.fsdp.reshard_after_forward = false;
    if (n == 3) s.clip = 0, s.fsdp.update_in_backward = true;
    if (n == 4) s.model.forward_prefetch = 0, s.model.backward_prefetch = BackwardPrefetch::none;
    const Outcome plain = train<float, float>(s, test_world());
    s.validate = true, s.poison = true, s.delay_ms = n == 0 ? 2 : 0;
    const Outcome out = train<float, float>(s, test_world());
    CHECK(same(out, plain));
    CHECK(out.shards == plain.shards);
    CHECK(text_of(out.trace) == text_of(plain.trace));  // or a graph of it would not be that of another step
    for (size_t i = 1; i < plain.losses.size(); ++i) CHECK(out.validated[i - 1] == plain.losses[i]);
  }
}

TEST_CASE("the head's chunks add up to the whole", "[fsdp]") {
  Setup s;
  s.model = small(Arch::rope, 4 * test_world().size + 1);
  s.steps = 4;
  const Outcome whole = train<float, float>(s, test_world());
  s.fsdp.reduce_dtype = Dtype::bf16;
  const Outcome narrow = train<bf16, bf16>(s, test_world());
  // Seven rows at a time, which do not divide the batch either.
  s.model.logits_bytes = 7 * s.model.vocab * 2;
  CHECK(furthest(train<bf16, bf16>(s, test_world()).losses, narrow.losses) < 2e-3);
  s.fsdp.reduce_dtype = Dtype::f32, s.model.logits_bytes *= 2;
  CHECK(furthest(train<float, float>(s, test_world()).losses, whole.losses) < 2e-5);
}

TEST_CASE("weights decay, and of them matrices alone", "[fsdp]") {
  // Without a gradient nothing else moves: all targets are padding.
  const World& world = test_world();
  Setup s;
  s.model = small(Arch::simple, 4 * world.size + 1);
  s.steps = 1, s.lr = 0.5, s.silent = true;
  const Outcome out = train<float, float>(s, world);
  CHECK(out.losses[0] == 0);
  CHECK(out.norms[0] == 0);
  std::vector<Unit> units = parameter_table(s.model);
  lay_out(&units, world.size);
  for (size_t u = 0; u < units.size(); ++u) {
    for (int64_t i = 0; i < units[u].shard; ++i)
      if (world.rank * units[u].shard + i >= units[u].numel) CHECK(out.shards[u][size_t(i)] == 0);
    for (const Param& p : units[u].params)
      for (int64_t i = 0; i < p.numel; ++i)
        CHECK(out.trained.at(p.name)[size_t(i)] ==
              Approx(out.weights.at(p.name)[size_t(i)] * (p.decay ? 1 - 0.5 * 0.1 : 1.0)).margin(1e-7));
  }
}

TEST_CASE("a batch that the ranks do not divide is padded with nothing", "[fsdp]") {
  Setup s;
  s.model = small(Arch::simple, 4 * test_world().size + 1);
  s.rows = 7, s.micro_batches = 2;
  const Outcome sharded = train<float, float>(s, test_world());
  s.micro_batches = 1;
  const Outcome one = alone<float, float>(s);
  if (test_world().rank == 0) CHECK(furthest(sharded.losses, one.losses) < 2e-5);
}

namespace {
// However the batch is cut: by ranks, groups of them, micro-batches, with padding.
void check_statistics(Backend backend) {
  const World& world = test_world();
  Setup s;
  s.backend = backend;
  s.model = sparse(small(Arch::rope, 4 * world.size + 1), Phi::mean);
  s.model.diagnostics = true;
  s.steps = 3;
  for (const auto& [rows, micro_batches] : {std::pair(12, 1), {7, 2}, {1, 1}}) {  // one: ranks with padding alone
    s.rows = rows, s.micro_batches = 1, s.fsdp.shard_ranks = 0;
    const Outcome one = alone<float, float>(s);
    s.micro_batches = micro_batches;
    for (int ranks : {0, 1, 2}) {
      if (ranks && world.size % ranks) continue;
      INFO(rows << " rows in groups of " << ranks);
      s.fsdp.shard_ranks = ranks;
      const Outcome all = train<float, float>(s, world);
      REQUIRE(all.nsa.size() == size_t(s.model.depth));
      // Sums and maxima once a step, and gradients behind them: the backward hides them.
      if (world.size > 1 && ranks == 0 && micro_batches == 1) {
        const std::string trace = text_of(all.trace);
        CHECK(trace.find("sum sum") < trace.find("reduce"));
        CHECK(std::count_if(all.trace.begin(), all.trace.end(),
                            [](const Issued& i) { return i.kind == Issued::all_reduce && i.unit < 0; }) == 3);
      }
      for (size_t i = 0; i < all.nsa.size(); ++i) {
        const NsaStats& a = all.nsa[i];
        CHECK(a.rows == double(rows * s.model.seq * s.model.kv_heads));
        if (world.rank != 0) continue;
        const NsaStats& b = one.nsa[i];
        CHECK(a.keys_mean == b.keys_mean);
        CHECK(a.keys_max == b.keys_max);
        CHECK(a.at_max == b.at_max);
        for (double NsaStats::*x : {&NsaStats::entropy_mean, &NsaStats::entropy_min, &NsaStats::gate_max,
                                    &NsaStats::share_max, &NsaStats::share_max_mean, &NsaStats::collapsed})
          CHECK(a.*x == Approx(b.*x).epsilon(1e-4));
        for (int branch = 0; branch < 3; ++branch) CHECK(a.share[branch] == Approx(b.share[branch]).epsilon(1e-4));
      }
    }
  }
  // What the backward pass makes again has been counted before.
  const Outcome kept = train<float, float>(s, world);
  for (const Recompute recompute : {Recompute::attn, Recompute::block}) {
    s.model.recompute = recompute;
    const Outcome again = train<float, float>(s, world);
    REQUIRE(again.nsa.size() == kept.nsa.size());
    for (size_t i = 0; i < kept.nsa.size(); ++i) {
      CHECK(again.nsa[i].rows == kept.nsa[i].rows);
      CHECK(again.nsa[i].keys_mean == kept.nsa[i].keys_mean);
      CHECK(again.nsa[i].entropy_mean == kept.nsa[i].entropy_mean);
    }
  }
}
}  // namespace

TEST_CASE("statistics of gates and selection over W ranks are those of one", "[fsdp]") {
  check_statistics(Backend::cpu);
}

TEST_CASE("GPU: statistics of gates and selection over W ranks are those of one", "[fsdp][gpu]") {
  if (!one_gpu_a_rank()) SKIP_TEST("needs a GPU for each rank");
  check_statistics(Backend::gpu);
}

TEST_CASE("delays before gathers, reductions and the optimizer change nothing", "[fsdp]") {
  for (void (*cut)(ModelConfig*) : {whole_blocks, head_with_last_mlp, replicated_head}) {
    Setup s;
    s.model = small(Arch::rope, 4 * test_world().size + 1);
    cut(&s.model);
    INFO("wrap " << int(s.model.wrap) << " replicated below " << s.model.replicate_below);
    s.steps = 2;
    s.micro_batches = 2;
    const Outcome plain = train<float, float>(s, test_world());
    for (bool together : {false, true}) {
      s.together = together;
      s.delay_ms = 0;
      CHECK(same(train<float, float>(s, test_world()), plain));
      s.delay_ms = test_world().rank % 2 ? 5 : 20;  // not in step with each other
      CHECK(same(train<float, float>(s, test_world()), plain));
    }
    s.clip = 0, s.fsdp.update_in_backward = true;
    CHECK(train<float, float>(s, test_world()).shards == [&] {
      s.together = false, s.delay_ms = 0;
      return train<float, float>(s, test_world()).shards;
    }());
  }
}

TEST_CASE("the number of slots changes no bit", "[fsdp]") {
  Setup s;
  s.model = small(Arch::llama, 4 * test_world().size + 1);
  s.steps = 3, s.micro_batches = 2;
  const Outcome plain = train<float, float>(s, test_world());
  for (int slots : {1, 3, 5}) {
    s.fsdp.gather_slots = slots, s.fsdp.gradient_slots = slots;
    CHECK(same(train<float, float>(s, test_world()), plain));
  }
}

TEST_CASE("nothing is read that the step has not written", "[fsdp]") {
  for (const auto& [name, model] : all_models(4 * test_world().size + 1)) {
    INFO(name);
    Setup s;
    s.model = model;
    s.steps = 3;
    const Outcome plain = train<float, float>(s, test_world());
    s.poison = true;
    CHECK(same(train<float, float>(s, test_world()), plain));
  }
}

TEST_CASE("recomputation changes no bit, and keeps less", "[fsdp]") {
  for (const auto& [name, model] : all_models(4 * test_world().size + 1)) {
    INFO(name);
    Setup s;
    s.model = model, s.steps = 2, s.poison = true;
    s.model.depth = 6, s.rows = 48;  // so that what blocks keep is most of the peak
    const Outcome all = train<float, float>(s, test_world());
    auto kept = [](const Outcome& o) { return o.memory.peak[int(Purpose::activations)]; };
    auto with = [&](Recompute mode) {
      s.model.recompute = mode;
      const Outcome out = train<float, float>(s, test_world());
      CHECK(same(out, all));
      return out;
    };
    const Outcome mlp = with(Recompute::mlp);
    CHECK(kept(mlp) < kept(all));
    if (!model.attends()) continue;
    const Outcome attn = with(Recompute::attn), both = with(Recompute::both), block = with(Recompute::block);
    CHECK(kept(attn) < kept(all));
    CHECK(kept(both) < kept(mlp));
    CHECK(kept(both) < kept(attn));
    CHECK(kept(block) < kept(both));
    s.model.keep_attention = true;
    const Outcome attn_kept = with(Recompute::attn), both_kept = with(Recompute::both),
                  block_kept = with(Recompute::block);
    CHECK(kept(attn) < kept(attn_kept));
    CHECK(kept(attn_kept) < kept(all));
    CHECK(kept(both) < kept(both_kept));
    CHECK(kept(block) < kept(block_kept));
    CHECK(kept(block_kept) < kept(both_kept));
  }
}

TEST_CASE("recomputation changes no bit however the model is cut", "[fsdp]") {
  const World& world = test_world();
  for (Wrap wrap : {Wrap::block, Wrap::sublayer, Wrap::single, Wrap::size})
    for (bool tied : {false, true})
      for (int shard : {0, 1, 2}) {  // full, kept after the forward pass, in groups
        if (shard == 2 && world.size != 4) continue;
        INFO("wrap " << int(wrap) << " tied " << tied << " shard " << shard);
        Setup s;
        s.model = small(Arch::llama, 4 * world.size + 1), s.steps = 2, s.micro_batches = 2;
        s.model.wrap = wrap, s.model.wrap_min_params = 8000, s.model.tied = tied;
        s.fsdp.reshard_after_forward = shard != 1, s.fsdp.shard_ranks = shard == 2 ? 2 : 0;
        // One slot, which the unit that is wanted next must get.
        if (shard == 0) s.fsdp.gather_slots = 1, s.model.backward_prefetch = BackwardPrefetch::post;
        // One unit of the embedding, the head and the attention between them.
        if (shard == 0 && tied && wrap == Wrap::size) s.model.depth = 1, s.model.wrap_min_params = 3300;
        const Outcome all = train<float, float>(s, world);
        for (Recompute mode : {Recompute::mlp, Recompute::attn, Recompute::both, Recompute::block}) {
          s.model.recompute = mode;
          const Outcome out = train<float, float>(s, world);
          CHECK(same(out, all));
          CHECK(out.shards == all.shards);
        }
      }
}

// Apart, sums are rounded one by one: nothing else differs.
TEST_CASE("what is not fused trains as what is, in the memory that was planned", "[fsdp]") {
  for (const auto& [name, model] : all_models(4 * test_world().size + 1)) {
    INFO(name);
    Setup s;
    s.model = model, s.steps = 5, s.poison = true;
    const Outcome fused = train<float, float>(s, test_world()), narrow = train<bf16, float>(s, test_world());
    s.fuse = false;
    const Outcome apart = train<float, float>(s, test_world()), narrow_apart = train<bf16, float>(s, test_world());
    CHECK(narrow_apart.losses != narrow.losses);
    CHECK(furthest(narrow_apart.losses, narrow.losses) < 2e-2);
    CHECK(furthest(apart.losses, fused.losses) < (model.sparse ? 2e-4 : 2e-5));
    CHECK(furthest(apart.norms, fused.norms) < 2e-3);
    CHECK(apart.memory.live_peak <= apart.memory.arena);
    for (Recompute mode : {Recompute::mlp, Recompute::block}) {
      s.model.recompute = mode;
      CHECK(same(train<float, float>(s, test_world()), apart));
    }
  }
}

TEST_CASE("with two slots every unit is on its way before it is wanted", "[fsdp]") {
  const World& world = test_world();
  for (void (*cut)(ModelConfig*) : {whole_blocks, sublayers, small_units, head_with_last_mlp, replicated_head})
    for (bool tied : {false, true})
      for (Recompute mode : {Recompute::none, Recompute::both, Recompute::block}) {
        Setup s;
        s.model = small(Arch::rope, 4 * world.size + 1), s.steps = 2, s.micro_batches = 2;
        s.model.tied = tied, s.model.recompute = mode;
        cut(&s.model);
        const std::vector<Issued> trace = train<float, float>(s, world).trace;
        INFO("wrap " << int(s.model.wrap) << " from " << s.model.wrap_min_params << " replicated below "
                     << s.model.replicate_below << " tied " << tied << " recompute " << int(mode) << ": "
                     << text_of(trace, true));
        std::set<int> behind;  // gathered behind the last work of the unit before
        for (const Issued& i : trace) {
          if (i.kind == Issued::release) behind.clear();
          if (i.kind == Issued::all_gather && i.unit != 0) behind.insert(i.unit);  // a step begins with unit 0
          if (i.kind == Issued::use) CHECK(behind.count(i.unit) == 0);
        }
      }
}

TEST_CASE("every row of a tied embedding is trained, whoever holds it", "[fsdp]") {
  const World& world = test_world();
  for (Wrap wrap : {Wrap::block, Wrap::single, Wrap::size})
    for (int64_t replicate_below : {0, 1000}) {
      Setup s;
      s.model = small(Arch::rope, 4 * world.size + 1), s.steps = 1;
      s.model.tied = true, s.model.wrap = wrap, s.model.replicate_below = replicate_below;
      if (wrap == Wrap::size) s.model.wrap_min_params = 3300, s.fsdp.reduce_last = true;
      const Outcome out = train<float, float>(s, world), one = alone<float, float>(s);
      const std::vector<float>&before = out.weights.at("embedding.weight"), &after = out.trained.at("embedding.weight");
      double furthest = 0;
      for (int64_t row = 0; row < s.model.vocab; ++row) {
        int64_t moved = 0;
        for (int64_t i = row * s.model.dim; i < (row + 1) * s.model.dim; ++i) {
          moved += before[size_t(i)] != after[size_t(i)];
          if (world.rank != 0) continue;
          furthest =
              worse(furthest, double(std::abs(after[size_t(i)] - one.trained.at("embedding.weight")[size_t(i)])));
        }
        CHECK(moved == s.model.dim);
      }
      CHECK(furthest < 1e-5);
    }
}

TEST_CASE("memory is flat over a thousand steps", "[fsdp]") { check_flat(Backend::cpu); }

TEST_CASE("the planned memory is what is used, and what --plan says", "[fsdp]") {
  const World& world = test_world();
  Setup s;
  s.model = small(Arch::rope, 4 * world.size + 1);
  s.steps = 1;
  const Outcome out = train<float, float>(s, world);
  CHECK(out.memory.live_peak <= out.memory.arena);
  std::vector<Unit> units = parameter_table(s.model);
  lay_out(&units, world.size);
  int64_t shards = 0, largest = 0;
  for (const Unit& u : units) shards += u.shard, largest = std::max(largest, u.padded);
  auto about = [](int64_t bytes, int64_t want, int64_t buffers) {
    return bytes >= want && bytes - want < buffers * 4096;
  };
  const int64_t n = int64_t(units.size());
  CHECK(about(out.memory.init[int(Purpose::master)], shards * 4, n));
  CHECK(about(out.memory.before_step[int(Purpose::moments)], shards * 8, 2 * n));
  CHECK(about(out.memory.peak[int(Purpose::gather_slots)], largest * 4 * 2, 2));
  CHECK(about(out.memory.peak[int(Purpose::gradient_slots)], largest * 4 * 2, 2));
  // As many slots as are asked for, and no more than units.
  for (auto [gathers, gradients] : {std::pair<int, int>{1, 3}, {3, 1}, {9, 9}}) {
    s.fsdp.gather_slots = gathers, s.fsdp.gradient_slots = gradients;
    const MemoryReport memory = train<float, float>(s, world).memory;
    const int64_t g = std::min<int64_t>(gathers, n), r = std::min<int64_t>(gradients, n);
    CHECK(about(memory.peak[int(Purpose::gather_slots)], largest * 4 * g, g));
    CHECK(about(memory.peak[int(Purpose::gradient_slots)], largest * 4 * r, r));
  }
}

namespace {
// One step on one CPU rank. The gradient is read where AdamW leaves it: with beta1 = 0 the first moment is the
// gradient. profile: where the step's time went, if anyone asks.
using Profile = std::vector<std::pair<std::string, double>>;
template <class T, class G>
Weights gradients(const ModelConfig& c, int64_t batch, const World& world = World(), Profile* profile = nullptr) {
  const Transport transport = world.size > 1 ? Transport::mpi : Transport::none;
  const int64_t M = batch * c.seq;
  Device dev(Backend::cpu, 0, world.size);
  HostBuffer<ops::AdamW> adamw(dev, 1);
  adamw[0] = ops::AdamW(0.0f, 0.0f, 0.0f, 1e-8f, 0.0f, 1);
  FsdpOptions options;
  options.reduce_dtype = dtype_of<G>;
  Event copied(dev);
  auto step = [&](Model<T, G>& m, const int32_t* host) {
    dev.mem.begin("step");
    m.begin_step(adamw.get(), 0);
    m.forward_backward(host, 1.0 / double(M), true, true, copied);
    m.end_step();
    dev.mem.end();
  };
  {
    Model<T, G> m(dev, world, transport, c, batch, options, Links::planned);
    step(m, nullptr);
  }
  dev.mem.commit();
  dev.mem.rewind();
  dev.mode = Mode::run;
  Model<T, G> model(dev, world, transport, c, batch, options, Links::open);
  model.init_weights();
  HostBuffer<int32_t> host(dev, batch_ints(c, batch));
  for (int64_t i = 0; i < M; ++i) {
    host[i] = token_at(1, i / c.seq, i % c.seq, c.vocab);
    micro_batch_at(host.get(), M).targets[i] = token_at(1, i / c.seq, i % c.seq + 1, c.vocab);
  }
  index_batch(c, batch, host.get());
  if (profile) dev.start_profile();
  step(model, host.get());
  if (profile) *profile = dev.end_profile();
  dev.compute().synchronize();
  Weights gradients;
  for (size_t u = 0; u < model.fsdp.units().size() && world.size == 1; ++u)
    for (const Param& p : model.fsdp.units()[u].params) {
      const float* g = static_cast<const float*>(model.fsdp.first_moment(int(u))) + p.offset;
      gradients[p.name].assign(g, g + p.numel);
    }
  return gradients;
}
}  // namespace

TEST_CASE("gradients in bf16 do not show in how many pieces the MLP and the head were made", "[fsdp]") {
  if (test_world().size != 1) SKIP_TEST("is about one rank");
  for (Arch arch : {Arch::simple, Arch::llama, Arch::mlp}) {
    Weights kept;
    for (Recompute recompute : {Recompute::none, Recompute::mlp}) {
      ModelConfig c = small(arch, 64);
      c.depth = 1, c.seq = 64, c.recompute = recompute;
      const Weights one = gradients<bf16, bf16>(c, 4);
      c.hidden_bytes = 800;      // 8 rows of 256 and fewer
      c.logits_bytes = 4 * 128;  // 4 rows
      const Weights many = gradients<bf16, bf16>(c, 4);
      // Nor in whether it was recomputed, to the last bit.
      if (recompute == Recompute::none) kept = many;
      CHECK(many == kept);
      for (const auto& [name, gradient] : one) {
        INFO(name_of(arch) << (recompute == Recompute::mlp ? ", recomputed: " : ": ") << name);
        double size = 0, furthest = 0;
        for (size_t i = 0; i < gradient.size(); ++i) {
          size = std::max(size, std::abs(double(gradient[i])));
          furthest = worse(furthest, std::abs(double(gradient[i]) - double(many.at(name)[i])));
        }
        // A sum in bf16 loses half of its last bit with every piece.
        CHECK(furthest <= 0x1p-7 * size);
      }
    }
  }
}

TEST_CASE("a profile has each operation's time under its own name", "[fsdp]") {
  ModelConfig c = small(Arch::rope, 8192);
  c.depth = 2, c.seq = 64;
  // The least of four steps: this machine has others to run.
  auto profile_of = [](const ModelConfig& c) {
    std::map<std::string, double> times;
    for (int n = 0; n < 4; ++n) {
      Profile profile;
      gradients<float, float>(c, 2, test_world(), &profile);
      for (const auto& [name, ms] : profile) times[name] = n > 0 ? std::min(times[name], ms) : ms;
    }
    return times;
  };
  auto names_of = [](const std::map<std::string, double>& times) {
    std::set<std::string> names;
    for (const auto& t : times) names.insert(t.first);
    return names;
  };
  const bool alone = test_world().size == 1;
  std::set<std::string> names = {"embedding",     "embedding, backward",
                                 "norms",         "norms, backward",
                                 "MLP",           "MLP, backward",
                                 "projections",   "projections, backward",
                                 "attention",     "attention, backward",
                                 "positions",     "positions, backward",
                                 "head and loss", "optimizer"};
  if (!alone) names.insert("waiting for communication");
  auto times = profile_of(c);
  CHECK(names_of(times) == names);
  // A vocabulary 256 times as wide as the model: the head takes longest, also behind its wait for a gradient slot. (The
  // sanitizer slows our loops and not BLAS, and ranks that share cores then take their time elsewhere.)
  for (const auto& [name, ms] : times) {
    CAPTURE(name);
    if (alone || !sanitized)
      CHECK((name == "head and loss" || name == "waiting for communication" || ms < times["head and loss"]));
  }
  // A hidden layer as wide as that, in pieces: every one of them counts as the MLP's.
  c.vocab = 16, c.hidden = 8192, c.hidden_bytes = 400000;
  times = profile_of(c);
  CHECK(names_of(times) == names);
  for (const auto& [name, ms] : times)
    if (alone) CHECK((name == "MLP" || name == "MLP, backward" || ms < times["MLP, backward"]));
  // What is recomputed says so.
  c.recompute = Recompute::block;
  for (const char* part : {"norms", "MLP", "projections", "attention", "positions"})
    names.insert(std::string(part) + ", recomputed");
  CHECK(names_of(profile_of(c)) == names);
  ModelConfig nsa = sparse(small(Arch::rope, 16), Phi::mean);
  nsa.recompute = Recompute::attn, nsa.keep_attention = true;
  const auto sparse_names = names_of(profile_of(nsa));
  for (const char* name : {"gates", "gates, backward", "gates, recomputed", "selection", "selected branch"})
    CHECK(sparse_names.count(name) == 1);
  CHECK(sparse_names.count("selection, recomputed") == 0);
  // Selected blocks are kept also where attention's output is not.
  nsa.keep_attention = false;
  const auto recomputed = names_of(profile_of(nsa));
  CHECK(recomputed.count("selected branch, recomputed") == 1);
  CHECK(recomputed.count("selection, recomputed") == 0);
}

TEST_CASE("what waits for a gather is told of gathers, and of reductions for a reduction", "[fsdp]") {
  const World& world = test_world();
  if (world.size == 1) SKIP_TEST("one rank waits for nobody");
  const auto exposed = [&](double gather_ms, double reduce_ms) {
    Setup s;
    s.model = small(Arch::rope, 4 * world.size + 1), s.steps = 2;
    s.delays = {gather_ms, reduce_ms};
    return train<float, float>(s, world).exposed;
  };
  const auto gathers = exposed(30, 0), reductions = exposed(0, 30);
  CHECK(gathers.first > 20);
  CHECK(gathers.first > 2 * gathers.second);
  CHECK(reductions.second > 20);
  CHECK(reductions.second > 2 * reductions.first);
}

TEST_CASE("the whole model's gradient is that of its loss", "[fsdp]") {
  // One rank, in double. The gradient is read where AdamW leaves it: with beta1 = 0 the first moment is the gradient.
  if (test_world().size != 1) SKIP_TEST("is about one rank");
  auto models = all_models(11);
  models.emplace_back("rope, tied", small(Arch::rope, 11));
  models.back().second.tied = true;
  models.emplace_back("simple in one unit, tied, in pieces", small(Arch::simple, 11));
  models.back().second.tied = true, models.back().second.wrap = Wrap::single, models.back().second.hidden_bytes = 1000;
  models.emplace_back("llama by sublayers, some replicated", small(Arch::llama, 11));
  models.back().second.wrap = Wrap::sublayer, models.back().second.replicate_below = 33;
  for (auto [name, c] : models) {
    INFO(name);
    c.depth = 2, c.seq = c.sparse ? 13 : 5;
    c.nsa.selected = 4;  // all there are: a choice that flips between two losses has no derivative
    const int64_t batch = 2, M = batch * c.seq;
    Device dev(Backend::cpu, 0);
    float clip = 0;
    HostBuffer<ops::AdamW> adamw(dev, 1);
    adamw[0] = ops::AdamW(0.0f, 0.0f, 0.0f, 1e-8f, 0.0f, 1);
    auto step = [&](Model<double, double>& m, const int32_t* host, Event& copied) {
      dev.mem.begin("step");
      m.begin_step(adamw.get(), clip);
      m.forward_backward(host, 1.0 / double(M), true, true, copied);
      m.end_step();
      dev.mem.end();
    };
    FsdpOptions options;
    options.reduce_dtype = Dtype::f64;
    Event copied(dev);
    {
      Model<double, double> m(dev, World(), Transport::none, c, batch, options, Links::planned);
      step(m, nullptr, copied);
    }
    dev.mem.commit();
    dev.mem.rewind();
    dev.mode = Mode::run;
    Model<double, double> model(dev, World(), Transport::none, c, batch, options, Links::open);
    model.init_weights();
    HostBuffer<int32_t> host(dev, batch_ints(c, batch));
    for (int64_t i = 0; i < M; ++i) {
      host[i] = token_at(1, i / c.seq, i % c.seq, c.vocab);
      micro_batch_at(host.get(), M).targets[i] = i == 3 ? -1 : token_at(1, i / c.seq, i % c.seq + 1, c.vocab);
    }
    index_batch(c, batch, host.get());
    auto loss = [&] {
      step(model, host.get(), copied);
      dev.compute().synchronize();
      return model.fsdp.scalars()->loss / double(M);
    };
    dev.compute().synchronize();
    // Biases away from zero and gains away from one, so that nothing cancels by chance.
    for (size_t u = 0; u < model.fsdp.units().size(); ++u)
      for (const Param& p : model.fsdp.units()[u].params)
        if (!p.decay)
          for (int64_t i = 0; i < p.numel; ++i)
            model.fsdp.master(int(u))[p.offset + i] += float(0.1 * std::sin(double(i + p.id)));
    loss();
    double square = 0;
    std::vector<std::vector<float>> gradient;
    for (size_t u = 0; u < model.fsdp.units().size(); ++u) {
      const float* g = static_cast<const float*>(model.fsdp.first_moment(int(u)));
      gradient.emplace_back(g, g + model.fsdp.units()[u].numel);
      for (float x : gradient.back()) square += double(x) * double(x);
    }
    CHECK(std::sqrt(model.fsdp.scalars()->norm2) == Approx(std::sqrt(square)).epsilon(1e-6));
    if (!c.sparse) CHECK(loss() == Approx(loss_by_definition(c, batch, host.get(), model.fsdp)).epsilon(1e-9));
    // Clipped to a tenth of its norm.
    clip = float(0.1 * std::sqrt(square));
    loss();
    for (size_t u = 0; u < model.fsdp.units().size(); ++u)
      for (int64_t i = 0; i < model.fsdp.units()[u].numel; ++i)
        if (!(std::abs(static_cast<const float*>(model.fsdp.first_moment(int(u)))[i] - 0.1 * gradient[u][size_t(i)]) <=
              1e-6))
          FAIL("not clipped");
    clip = 0;
    for (size_t u = 0; u < model.fsdp.units().size(); ++u)
      for (const Param& p : model.fsdp.units()[u].params) {
        INFO(p.name);
        double size = 0;
        for (int64_t i = 0; i < p.numel; ++i)
          size = std::max(size, std::abs(double(gradient[u][size_t(p.offset + i)])));
        // Through a linear phi a position adds the same to every compressed key, which softmax does not see.
        const bool unseen = c.nsa.phi == Phi::linear && p.name.find("phi_k.position") != std::string::npos;
        if (!unseen) CHECK(size > 1e-5);
        for (int64_t k = 0; k < 4; ++k) {
          const int64_t i = p.offset + (k * 7919 + 13) % p.numel;
          float& w = model.fsdp.master(int(u))[i];
          const float was = w, h = 0x1p-9f;
          w = was + h;
          const double above = loss(), high = double(w);
          w = was - h;
          const double below = loss(), low = double(w);
          w = was;
          CHECK(std::abs((above - below) / (high - low) - double(gradient[u][size_t(i)])) < 1e-3 * size + 1e-8);
        }
      }
  }
}

// e4m3 rounds a factor by up to 2^-4 of itself, e5m2 by 2^-3, which is 5 % on average, and bf16 by 2^-9. A gradient has
// come through up to nine such products here.
TEST_CASE("gradients in fp8 are those of fp32, a rounding of their factors apart", "[fsdp][fp8]") {
  if (test_world().size != 1) SKIP_TEST("is about one rank");
  for (Arch arch : all_archs) {
    ModelConfig c = small(arch, 37);
    c.dim = 64, c.hidden = 128, c.seq = 32;
    const Weights exact = gradients<float, float>(c, 4), narrow = gradients<bf16, float>(c, 4);
    c.fp8 = true;
    const Weights fp8 = gradients<bf16, float>(c, 4);
    c.fp8_scaling = fp8::Scaling::row;
    const Weights by_row = gradients<bf16, float>(c, 4);
    auto error = [&](const std::string& name, const Weights& of) {
      double apart = 0, size = 0;
      for (size_t i = 0; i < exact.at(name).size(); ++i) {
        const double x = double(exact.at(name)[i]), d = double(of.at(name)[i]) - x;
        apart += d * d, size += x * x;
      }
      return std::sqrt(apart / size);
    };
    for (const auto& [name, unused] : exact) {
      INFO(name_of(arch) << ", " << name << ": " << error(name, narrow) << " in bf16");
      CHECK(error(name, narrow) < 0.02);
      for (const Weights* in_fp8 : {&fp8, &by_row}) {
        CHECK(error(name, *in_fp8) < 0.25);
        CHECK(error(name, *in_fp8) > error(name, narrow));
      }
    }
  }
}

// --------------------------------------------------------------------------------------------------------------- GPU

// Why a case of fp8 on GPUs cannot run here; null: it can.
static const char* no_fp8() {
  return !have_gpu()                                         ? "no GPU"
         : test_device(Backend::gpu).compute_capability < 89 ? "no GPU with fp8"
         : !one_gpu_a_rank()                                 ? "fewer GPUs than ranks"
                                                             : nullptr;
}
static Setup in_sixteens(Arch arch) {
  Setup s;
  s.model = small_on_gpu(arch), s.lr = 1e-3, s.steps = 5;
  s.model.seq = 64;  // in sixteens, whatever the batch
  s.backend = Backend::gpu;
  return s;
}

TEST_CASE("GPU: a hidden layer saved in fp8 is the CPU's", "[fsdp][fp8][gpu]") {
  if (const char* why = no_fp8()) SKIP_TEST(why);
  for (Arch arch : all_archs) {
    INFO(name_of(arch));
    Setup s = in_sixteens(arch);
    s.model.save_fp8 = true;
    const Outcome on_gpu = train<bf16, float>(s, test_world());
    CHECK(same(train<bf16, float>(s, test_world()), on_gpu));
    s.backend = Backend::cpu;
    const Outcome on_cpu = train<bf16, float>(s, test_world());
    CHECK(furthest(on_gpu.losses, on_cpu.losses) < 2e-2);
    CHECK(furthest(on_gpu.norms, on_cpu.norms) < 0.1);
  }
}

TEST_CASE("GPU: gathered in fp8 trains as the CPU does, and alike as a graph", "[fsdp][fp8][gpu]") {
  if (const char* why = no_fp8()) SKIP_TEST(why);
  for (Arch arch : all_archs) {
    INFO(name_of(arch));
    Setup s = in_sixteens(arch);
    s.model.fp8 = s.model.gather_fp8 = true;
    const Outcome on_gpu = train<bf16, float>(s, test_world());
    CHECK(same(train<bf16, float>(s, test_world()), on_gpu));
    s.graph = true;
    CHECK(same(train<bf16, float>(s, test_world()), on_gpu));
    s.graph = false, s.backend = Backend::cpu;
    const Outcome on_cpu = train<bf16, float>(s, test_world());
    CHECK(furthest(on_gpu.losses, on_cpu.losses) < 1e-2);
  }
}

TEST_CASE("GPU: in fp8 trains as the CPU does, and alike recomputed and as a graph", "[fsdp][fp8][gpu]") {
  if (const char* why = no_fp8()) SKIP_TEST(why);
  const bool has_rows = fp8::support(test_device(Backend::gpu).compute_capability) == fp8::Support::by_row;
  std::vector<std::pair<Arch, fp8::Scaling>> cases;
  for (Arch arch : all_archs) {
    cases.emplace_back(arch, fp8::Scaling::tensor);
    if (has_rows) cases.emplace_back(arch, fp8::Scaling::row);
  }
  for (const auto& [arch, scaling] : cases) {
    INFO(name_of(arch) << ", scaling " << int(scaling));
    Setup s = in_sixteens(arch);
    s.model.fp8 = true, s.model.fp8_scaling = scaling;
    const Outcome on_gpu = train<bf16, float>(s, test_world());
    CHECK(same(train<bf16, float>(s, test_world()), on_gpu));
    s.graph = true;
    CHECK(same(train<bf16, float>(s, test_world()), on_gpu));
    s.graph = false, s.model.hidden_bytes = 50000;  // pieces: other scales
    const Outcome pieces = train<bf16, float>(s, test_world());
    CHECK(furthest(pieces.losses, on_gpu.losses) < 1e-2);
    for (Recompute mode : {Recompute::mlp, Recompute::both, Recompute::block}) {
      if (arch == Arch::mlp && mode != Recompute::mlp) continue;
      s.model.recompute = mode;
      CHECK(same(train<bf16, float>(s, test_world()), pieces));
    }
    s.model.recompute = Recompute::none, s.backend = Backend::cpu;
    CHECK(furthest(train<bf16, float>(s, test_world()).losses, pieces.losses) < 1e-2);
  }
}

TEST_CASE("GPU: trains as the CPU does", "[fsdp][gpu]") {
  if (!have_gpu()) SKIP_TEST("no GPU");
  if (!one_gpu_a_rank()) SKIP_TEST("fewer GPUs than ranks");
  for (Arch arch : all_archs) {
    INFO(name_of(arch));
    Setup s;
    s.model = small_on_gpu(arch), s.lr = 1e-3, s.steps = 5;
    s.backend = Backend::gpu;
    const Outcome on_gpu = train<float, float>(s, test_world()), again = train<float, float>(s, test_world());
    CHECK(same(on_gpu, again));
    s.backend = Backend::cpu;
    const Outcome on_cpu = train<float, float>(s, test_world());
    // The generator's bits are the same, its logarithm and cosine are each machine's own.
    double apart = 0;
    for (const auto& [name, weights] : on_cpu.weights)
      for (size_t i = 0; i < weights.size(); ++i)
        apart = worse(apart, double(std::abs(on_gpu.weights.at(name)[i] - weights[i])));
    CHECK(apart < 1e-5);
    CHECK(furthest(on_gpu.losses, on_cpu.losses) < 1e-4);
    s.backend = Backend::gpu;
    const Outcome narrow = train<bf16, float>(s, test_world());
    CHECK(furthest(narrow.losses, on_cpu.losses) < 2e-2);
  }
}

TEST_CASE("GPU: heads whose keys are wider than values train as on a CPU", "[fsdp][gpu]") {
  if (!have_gpu()) SKIP_TEST("no GPU");
  if (!one_gpu_a_rank()) SKIP_TEST("fewer GPUs than ranks");
  if (has_small_memory(test_device(Backend::gpu).compute_capability)) SKIP_TEST("99 KiB of shared memory");
  for (bool nsa : {false, true}) {
    INFO((nsa ? "NSA" : "dense"));
    Setup s;
    s.model = small_on_gpu(Arch::rope), s.lr = 1e-3, s.steps = 5;
    s.model.own_head_dim = 192, s.model.own_v_head_dim = 128, s.model.seq = 200;
    s.model.sparse = nsa, s.model.nsa.phi = Phi::mlp, s.model.nsa.selected = 3, s.model.nsa.window = 40;
    const Outcome on_cpu = train<float, float>(s, test_world());
    s.backend = Backend::gpu;
    const Outcome narrow = train<bf16, float>(s, test_world());
    CHECK(same(narrow, train<bf16, float>(s, test_world())));
    CHECK(furthest(narrow.losses, on_cpu.losses) < 2e-2);
  }
}

TEST_CASE("GPU: every way to shard as one GPU does", "[fsdp][gpu][hosts]") {
  if (!have_gpu()) SKIP_TEST("no GPU");
  if (!one_gpu_a_rank()) SKIP_TEST("fewer GPUs than ranks");
  const World& world = test_world();
  for (int n = 0; n < 8; ++n) {
    INFO("case " << n);
    Setup s;
    s.model = small_on_gpu(n == 1 ? Arch::simple : Arch::rope), s.lr = 1e-3, s.steps = 4, s.micro_batches = 2;
    s.backend = Backend::gpu, s.fsdp.reduce_dtype = Dtype::f32;
    if (n == 0) s.model.wrap = Wrap::sublayer, s.model.tied = true;
    if (n == 1) s.model.replicate_below = 1000, s.fsdp.reduce_last = true, s.model.hidden_bytes = 4096;
    if (n == 1) s.fsdp.norm = ops::GradNorm::three;
    if (n == 2) s.fsdp.norm = ops::GradNorm::one, s.model.recompute = Recompute::block, s.model.replicate_below = 1000;
    if (n == 3) s.fsdp.norm = ops::GradNorm::inf, s.model.frozen = {"block.0.mlp", "block.1", "head"};
    if (n == 4) s.fsdp.update_in_backward = true, s.clip = 0;
    if (n == 5) s.model.wrap = Wrap::size, s.model.wrap_min_params = 60000, s.model.bucket_params = 150000;
    if (n == 6) s.model.wrap = Wrap::single;
    if (n == 6) s.model.frozen = {"block.0.norm", "block.1.attention", "block.2.mlp.down"};
    const Outcome one = alone<bf16, float>(s);
    if (n == 0) s.fsdp.gather_wide = true;
    if (n == 2) s.fsdp.shard_ranks = world.size % 2 ? 1 : 2;
    if (n == 3) s.fsdp.shard_ranks = 1;
    if (n == 3) s.fsdp.reshard_after_forward = false;
    if (n == 4) s.fsdp.moment_dtype = Dtype::bf16, s.model.backward_prefetch = BackwardPrefetch::post;
    if (n == 7) s.fsdp.reshard_after_forward = false;
    const Outcome out = train<bf16, float>(s, world);
    CHECK(same(train<bf16, float>(s, world), out));
    if (world.rank == 0) CHECK(furthest(out.losses, one.losses) < 1e-2);
    if (world.rank == 0) CHECK(furthest(out.norms, one.norms) < 5e-2);
  }
}

TEST_CASE("GPU: a step as a graph is the step bit for bit", "[fsdp][gpu][hosts]") {
  if (!have_gpu()) SKIP_TEST("no GPU");
  if (!one_gpu_a_rank()) SKIP_TEST("fewer GPUs than ranks");
  for (bool sparse_too : {false, true})
    for (bool in_backward : {false, true}) {
      Setup s;
      s.model = small_on_gpu(Arch::rope), s.lr = 1e-3, s.steps = 7, s.micro_batches = 2;
      s.model.sparse = sparse_too, s.model.seq = sparse_too ? 1100 : s.model.seq;
      s.backend = Backend::gpu, s.fsdp.reduce_dtype = Dtype::bf16;
      s.fsdp.update_in_backward = in_backward, s.clip = in_backward ? 0 : 1;
      const Outcome plain = train<bf16, bf16>(s, test_world());
      s.graph = true;
      CHECK(same(train<bf16, bf16>(s, test_world()), plain));
    }
  // With validations in between, which leave nothing in the slots that a graph would then not gather.
  Setup s;
  s.model = small_on_gpu(Arch::rope), s.model.replicate_below = 1000, s.lr = 1e-3, s.steps = 7;
  s.backend = Backend::gpu, s.fsdp.reduce_dtype = Dtype::bf16, s.fsdp.reshard_after_forward = false;
  s.validate = true;
  const Outcome plain = train<bf16, bf16>(s, test_world());
  s.graph = true;
  const Outcome out = train<bf16, bf16>(s, test_world());
  CHECK(same(out, plain));
  CHECK(out.validated == plain.validated);
  // What is gathered behind a graph waits for it, though nothing in the graph changes a frozen unit.
  s.graph = false, s.fsdp.reshard_after_forward = true, s.model.replicate_below = 0, s.steps = 12;
  s.model.frozen = {"embedding"}, s.model.hidden = 4096, s.rows = 64;  // long enough to be overtaken
  const Outcome frozen = train<bf16, bf16>(s, test_world());
  s.graph = true;
  const Outcome again = train<bf16, bf16>(s, test_world());
  CHECK(same(again, frozen));
  CHECK(again.validated == frozen.validated);
  // Nor does a step that is no graph, between others, let what is gathered behind the next launch overtake it.
  s.graph = false, s.model.frozen = {}, s.no_graph = 4;
  const Outcome steps = train<bf16, bf16>(s, test_world());
  s.graph = true;
  const Outcome mixed = train<bf16, bf16>(s, test_world());
  CHECK(same(mixed, steps));
  CHECK(mixed.validated == steps.validated);
}

TEST_CASE("GPU: who moves the gathers changes no bit", "[fsdp][gpu][hosts]") {
  if (!have_gpu()) SKIP_TEST("no GPU");
  if (!one_gpu_a_rank() || test_world().size == 1) SKIP_TEST("fewer GPUs than ranks, or one rank");
  Setup s;
  s.model = small_on_gpu(Arch::rope), s.lr = 1e-3, s.steps = 6;
  s.backend = Backend::gpu, s.fsdp.reduce_dtype = Dtype::bf16;
  const Outcome plain = train<bf16, bf16>(s, test_world());
  s.fsdp.gather_over_mpi = true;
  CHECK(same(train<bf16, bf16>(s, test_world()), plain));
  s.fsdp.gather_over_mpi = false, s.fsdp.gather_by_copy_engine = on_one_host(test_world(), test_world().size);
  CHECK(same(train<bf16, bf16>(s, test_world()), plain));
  s.graph = true;
  CHECK(same(train<bf16, bf16>(s, test_world()), plain));
  if (test_world().size != 4) return;
  s.fsdp.gather_by_copy_engine = true;
  s.fsdp.shard_ranks = 2;  // each group has engines and windows of its own
  const Outcome by_engines = train<bf16, bf16>(s, test_world());
  s.fsdp.gather_by_copy_engine = false;
  CHECK(same(train<bf16, bf16>(s, test_world()), by_engines));
}

TEST_CASE("GPU: reductions by copy engines train alike, in a graph too", "[fsdp][gpu][hosts]") {
  if (!have_gpu()) SKIP_TEST("no GPU");
  if (!one_gpu_a_rank() || test_world().size == 1) SKIP_TEST("fewer GPUs than ranks, or one rank");
  if (!on_one_host(test_world(), test_world().size)) SKIP_TEST("several hosts");
  Setup s;
  s.model = small_on_gpu(Arch::rope), s.model.replicate_below = 1000, s.lr = 1e-3, s.steps = 6, s.micro_batches = 2;
  s.backend = Backend::gpu, s.fsdp.reduce_dtype = Dtype::bf16;
  const Outcome ring = train<bf16, bf16>(s, test_world());
  s.fsdp.reduce_by_copy_engine = true;
  const Outcome plain = train<bf16, bf16>(s, test_world());
  CHECK(furthest(plain.losses, ring.losses) < 1e-2);
  s.delay_ms = test_world().rank % 2 ? 20 : 5, s.poison = true;
  CHECK(same(train<bf16, bf16>(s, test_world()), plain));
  s.delay_ms = 0, s.poison = false;
  for (bool gathers_too : {false, true})
    for (bool graph : {false, true}) {
      s.fsdp.gather_by_copy_engine = gathers_too, s.graph = graph;
      CHECK(same(train<bf16, bf16>(s, test_world()), plain));
    }
}

TEST_CASE("GPU: memory is flat over a thousand steps", "[fsdp][gpu]") {
  if (!have_gpu()) SKIP_TEST("no GPU");
  if (!one_gpu_a_rank()) SKIP_TEST("fewer GPUs than ranks");
  check_flat(Backend::gpu);
}

TEST_CASE("GPU: recomputation changes no bit", "[fsdp][gpu]") {
  if (!have_gpu()) SKIP_TEST("no GPU");
  if (test_world().size != 1) SKIP_TEST("is about one rank");
  for (bool sparse_too : {false, true}) {
    Setup s;
    s.model = small_on_gpu(Arch::rope), s.lr = 1e-3, s.steps = 3, s.backend = Backend::gpu;
    s.model.sparse = sparse_too, s.model.seq = sparse_too ? 1100 : s.model.seq;
    s.model.hidden_bytes = 100000;  // pieces
    s.fsdp.reduce_dtype = Dtype::bf16;
    const Outcome plain = train<bf16, bf16>(s, test_world());
    for (Recompute mode : {Recompute::mlp, Recompute::attn, Recompute::both, Recompute::block})
      for (bool keep : {false, true}) {
        if (keep && mode == Recompute::mlp) continue;
        INFO("mode " << int(mode) << (keep ? ", attention kept" : "") << (sparse_too ? ", NSA" : ""));
        s.model.recompute = mode, s.model.keep_attention = keep;
        CHECK(same(train<bf16, bf16>(s, test_world()), plain));
      }
  }
}

TEST_CASE("GPU: sharded over NCCL as on one GPU", "[fsdp][gpu]") {
  if (!have_gpu()) SKIP_TEST("no GPU");
  if (!one_gpu_a_rank()) SKIP_TEST("fewer GPUs than ranks");
  for (Arch arch : all_archs)
    for (bool sparse_too : {false, true}) {
      if (sparse_too && arch != Arch::rope) continue;
      // Communicators take long to make: each architecture is run with one of the two.
      const Dtype reduce = arch == Arch::rope || arch == Arch::mlp ? Dtype::bf16 : Dtype::f32;
      INFO(name_of(arch) << (sparse_too ? " with NSA" : "") << ", reduced in " << name_of(reduce));
      Setup s;
      s.model = small_on_gpu(arch), s.lr = 1e-3;
      s.model.sparse = sparse_too, s.model.seq = sparse_too ? 1100 : s.model.seq;
      s.backend = Backend::gpu, s.fsdp.reduce_dtype = reduce, s.micro_batches = 2;
      const auto run = [&](const World& w) {
        return reduce == Dtype::bf16 ? train<bf16, bf16>(s, w) : train<bf16, float>(s, w);
      };
      const Outcome sharded = run(test_world()), again = run(test_world());
      CHECK(same(sharded, again));
      CHECK(sharded.losses.back() < sharded.losses.front());
      // What the device has less is the arena, in its own pages. Alone on it: NCCL frees memory at its leisure.
      if (test_world().size == 1) {
        CHECK(sharded.reported >= sharded.memory.arena);
        CHECK(sharded.reported - sharded.memory.arena <= 2 << 20);
      }
      s.poison = true;
      CHECK(same(run(test_world()), sharded));
      s.poison = false;
      if (test_world().rank == 0) CHECK(furthest(sharded.losses, run(World()).losses) < 1e-2);
    }
}

TEST_CASE("GPU: delays change nothing", "[fsdp][gpu]") {
  if (!have_gpu()) SKIP_TEST("no GPU");
  if (!one_gpu_a_rank()) SKIP_TEST("fewer GPUs than ranks");
  Setup s;
  s.model = small_on_gpu(Arch::rope), s.backend = Backend::gpu, s.steps = 2, s.fsdp.reduce_dtype = Dtype::bf16;
  const Outcome plain = train<bf16, bf16>(s, test_world());
  s.delay_ms = test_world().rank % 2 ? 30 : 100;
  for (bool together : {false, true}) {
    s.together = together;
    CHECK(same(train<bf16, bf16>(s, test_world()), plain));
  }
}

TEST_CASE("GPU: ranks that share one GPU train as one rank does", "[fsdp][gpu]") {
  if (!have_gpu()) SKIP_TEST("no GPU");
  Setup s;
  s.model = small_on_gpu(Arch::rope), s.backend = Backend::gpu, s.share_gpu = true, s.lr = 1e-3, s.steps = 5;
  const Outcome shared = train<float, float>(s, test_world()), again = train<float, float>(s, test_world());
  CHECK(same(shared, again));
  const Outcome one = alone<float, float>(s);
  if (test_world().rank == 0) CHECK(furthest(shared.losses, one.losses) < 1e-4);
}
