#include "test/training.h"

#include <algorithm>
#include <cmath>
#include <fstream>

#ifdef __SANITIZE_ADDRESS__
extern "C" size_t __sanitizer_get_current_allocated_bytes();  // its header comes with clang, not with g++
#endif

ModelConfig small(Arch arch, int64_t vocab) {
  ModelConfig c;
  c.arch = arch;
  c.dim = 32, c.depth = 3, c.heads = 4, c.kv_heads = 2, c.hidden = 48, c.vocab = vocab, c.seq = 8;
  return c;
}

ModelConfig small_on_gpu(Arch arch) {
  ModelConfig c;
  c.arch = arch;
  c.dim = 128, c.depth = 3, c.heads = 2, c.kv_heads = 1, c.hidden = 320, c.vocab = 264, c.seq = 72;
  return c;
}

ModelConfig sparse(ModelConfig c, Phi phi) {
  c.sparse = true, c.seq = 24;
  c.nsa.block = 4, c.nsa.stride = 2, c.nsa.select_block = 4, c.nsa.selected = 4, c.nsa.window = 6, c.nsa.phi = phi;
  return c;
}

ModelConfig wide_heads(ModelConfig c) {
  c.own_head_dim = 16, c.own_v_head_dim = 8;
  return c;
}

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

namespace {
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
}  // namespace

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
    for (int64_t i = 0, last = s.micro_batches - 1; i <= last; ++i) {
      const bool between = i > 0 && i < last;  // one plan for all of these, as in step_program
      if (between) dev.mem.begin_repeat();
      m.forward_backward(host + i * ints, scale, i == 0, i == last, copied);
      if (between) dev.mem.end_repeat();
    }
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
  if (s.graph || s.gathers_next) model.end_steps_with_gathers();
  const bool times = s.delays.first + s.delays.second > 0;
  if (times) model.fsdp.set_delays(s.delays.first, s.delays.second, 0);
  else model.fsdp.set_delays(s.delay_ms, s.delay_ms, s.delay_ms + s.optimizer_ms);
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
      model.fsdp.before_graph();
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
    out.shards.push_back(numbers_of(model.fsdp.master(int(u)), model.fsdp.units()[u].shard));
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

template <class T, class G>
Weights gradients(const ModelConfig& c, int64_t batch, const World& world, Profile* profile) {
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

double furthest(const std::vector<double>& x, const std::vector<double>& y) {
  double worst = x.size() == y.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(x.size(), y.size()); ++i) {
    worst = worse(worst, std::abs(x[i] - y[i]) / std::abs(y[i]));
  }
  return worst;
}

std::string text_of(const std::vector<Issued>& issued, bool uses) {
  std::string text;
  for (const Issued& i : issued) {
    if (!i.moves() && !(uses && i.kind == Issued::use)) continue;
    static const char* names[] = {"gather", "reduce", "exchange", "sum", "copy", "step", "use"};
    ASSERT(size_t(i.kind) < std::size(names));
    text += (text.empty() ? "" : " ") + std::string(names[i.kind]);
    if (i.unit >= 0) text += std::to_string(i.unit);
  }
  return text;
}

#define FOR(T, G)                                                   \
  template Outcome train<T, G>(const Setup& s, const World& world); \
  template Weights gradients<T, G>(const ModelConfig&, int64_t, const World&, Profile*);
FOR(float, float)
FOR(bf16, bf16)
FOR(bf16, float)
FOR(double, double)
#undef FOR
