// Attention alone: one layer of NSA beside dense attention, and the kernels one by one.
#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "lib/ops/ops.h"
#include "lib/program/telemetry.h"
#include "lib/program/timing.h"
#include "nsa_attention.h"

namespace {

using nlohmann::json;

// The bits of a row that say which attention was timed. a: AttentionShape or NsaShape.
template <class Shape>
json heads_json(const Shape& a) {
  json j = {{"B", a.B}, {"T", a.T}, {"H", a.H}, {"HKV", a.HKV}, {"D", a.D}};
  if (a.v_dim() != a.D) j["DV"] = a.v_dim();
  return j;
}

// ---------------------------------------------------------------------------------------- one layer, NSA beside dense

// One layer's attention of one kind, forward and backward. q, k and v are columns of one matrix x (B*T, row), as the
// model's projections leave them; o and its gradient are (B*T, H*DV). T: bf16 on a GPU, fp32 on a CPU.
template <class T>
class Layer {
 public:
  Layer(Backend backend, bool sparse, const NsaShape& n) : dev_(backend, 0), sparse_(sparse), nsa_(n) {
    dense_.B = n.B, dense_.T = n.T, dense_.H = n.H, dense_.HKV = n.HKV, dense_.D = n.D, dense_.scale = n.scale;
    dense_.DV = n.DV, dense_.ld_o = n.H * n.v_dim();
    dense_.ld_q = dense_.ld_kv = dense_.ld_dq = dense_.ld_dkv = (n.H + n.HKV) * n.D + n.HKV * n.v_dim();
    tokens_ = n.B * n.T, row_ = sparse ? n.ld : dense_.ld_q, width_ = dense_.ld_o;
    // Plan the memory with one pass that computes nothing; then take it.
    keep();
    Event unused(dev_);
    pass(unused, unused, unused);
    dev_.mem.commit();
    dev_.mem.rewind();
    keep();
    dev_.mode = Mode::run;
    fill(x_, tokens_ * row_, 1), fill(d_o_, tokens_ * width_, 2);
  }

  // Medians of `reps` passes after two that do not count; the last also says where the time went.
  json time(int reps) {
    std::vector<Event> events;
    for (int i = 0; i < 3 * (reps + 2); ++i) events.emplace_back(dev_, Event::timed);
    const auto event = [&](int pass, int which) -> Event& { return events[size_t(3 * pass + which)]; };
    for (int i = 0; i < reps + 2; ++i) {
      if (i == reps + 1) dev_.start_profile();
      pass(event(i, 0), event(i, 1), event(i, 2));
    }
    json parts = json::object();
    for (const auto& [name, ms] : dev_.end_profile()) parts[name] = ms;
    dev_.compute().synchronize();
    std::vector<double> forward, both;
    for (int i = 2; i < reps + 2; ++i) {
      forward.push_back(elapsed_ms(event(i, 0), event(i, 1)));
      both.push_back(elapsed_ms(event(i, 0), event(i, 2)));
    }
    json result = spread("forward_backward_ms", both);
    result.update({{"forward_ms", median(forward)},
                   {"parts_ms", parts},
                   {"planned_peak_mib", double(dev_.mem.arena_bytes()) / 1048576}});
    return result;
  }

 private:
  void keep() {
    x_ = dev_.mem.keep<T>(tokens_ * row_, "x", Purpose::activations);
    dx_ = dev_.mem.keep<T>(tokens_ * row_, "dx", Purpose::activations);
    d_o_ = dev_.mem.keep<T>(tokens_ * width_, "do", Purpose::activations);
  }

  // Forward between the events `start` and `middle`, backward between `middle` and `end`.
  void pass(Event& start, Event& middle, Event& end) {
    dev_.mem.begin("layer");
    Stream& s = dev_.compute();
    if (sparse_) nsa_pass(s, start, middle, end);
    else dense_pass(s, start, middle, end);
    dev_.mem.end();
  }

  void nsa_pass(Stream& s, Event& start, Event& middle, Event& end) {
    Buffer<T> o = dev_.mem.take<T>(tokens_ * width_, "o");
    NsaSaved<T> saved;
    s.record(start);
    nsa_forward<T>(dev_, o, &saved, x_, PhiWeights<const T>(), nsa_, Purpose::activations);
    s.record(middle);
    nsa_backward<T, T>(dev_, dx_, PhiWeights<T>(), d_o_, x_, PhiWeights<const T>(), std::move(saved), nsa_);
    s.record(end);
  }

  void dense_pass(Stream& s, Event& start, Event& middle, Event& end) {
    const T *k = x_ + nsa_.H * nsa_.D, *v = k + nsa_.HKV * nsa_.D;
    T *dk = dx_ + nsa_.H * nsa_.D, *dv = dk + nsa_.HKV * nsa_.D;
    Buffer<T> o = dev_.mem.take<T>(tokens_ * width_, "o");
    s.record(start);
    Buffer<acc_t<T>> lse = dev_.mem.take<acc_t<T>>(tokens_ * nsa_.H, "lse");
    attention_forward<T>(s, o, lse, x_, k, v, dense_);
    s.record(middle);
    Buffer<acc_t<T>> work = dev_.mem.take<acc_t<T>>(attention_backward_workspace<T>(dense_), "workspace");
    attention_backward<T>(s, dx_, dk, dv, d_o_, x_, k, v, o, lse, work, dense_);
    s.record(end);
  }

  // Normal numbers, made in fp32 in dx's memory, a piece at a time.
  void fill(T* to, int64_t count, uint32_t tensor) {
    const int64_t piece = tokens_ * row_ * int64_t(sizeof(T)) / 4;
    float* wide = reinterpret_cast<float*>(dx_);
    for (int64_t at = 0; at < count; at += piece) {
      const int64_t n = std::min(piece, count - at);
      ops::init_normal(dev_.compute(), wide, 1, tensor, at, n, 0, 1);
      ops::cast<T, float>(dev_.compute(), to + at, wide, n);
    }
  }

  Device dev_;
  const bool sparse_;
  const NsaShape nsa_;
  AttentionShape dense_ = {};
  int64_t tokens_, row_, width_;  // rows of the matrices; columns of x and of o
  T *x_ = nullptr, *dx_ = nullptr, *d_o_ = nullptr;
};

json time_layer(Backend backend, bool sparse, const NsaShape& n) {
  if (backend == Backend::cpu) return Layer<float>(backend, sparse, n).time(3);
  return Layer<bf16>(backend, sparse, n).time(n.T > 40000 ? 5 : 15);
}

}  // namespace

bool time_attention_layers(const RowFile& rows, const std::vector<int64_t>& lengths) {
  const bool gpu = gpu_count() > 0;
  const Backend backend = gpu ? Backend::gpu : Backend::cpu;
  const std::string name = Device(backend, 0).name;
  std::printf("one layer's attention, q, k, v to o, batch 1, %s; %s\n\n", gpu ? "bf16" : "fp32", name.c_str());
  std::vector<Words> table = {{"T", "heads", "D", "NSA forward ms", "forward + backward ms", "MiB", "dense forward ms",
                               "forward + backward ms", "MiB", "note"}};
  struct Heads {
    int64_t H, HKV, D, DV;
  };
  std::vector<Heads> all_heads = {{4, 1, 64, 64}, {4, 1, 96, 64}};
  if (gpu) all_heads = {{32, 8, 128, 128}, {64, 4, 128, 128}, {64, 4, 192, 128}};  // the last: the NSA paper's
  bool any = false;
  for (const Heads& heads : all_heads)
    for (int64_t T : lengths) {
      NsaShape n = {};
      n.B = 1, n.T = T, n.H = heads.H, n.HKV = heads.HKV, n.D = heads.D, n.DV = heads.DV;
      n.scale = 1 / std::sqrt(double(n.D)), n.ld = (n.columns() + 7) / 8 * 8;
      Words cells = {std::to_string(T), std::to_string(n.H) + "/" + std::to_string(n.HKV),
                     std::to_string(n.D) + (n.DV == n.D ? "" : "/" + std::to_string(n.DV))};
      std::string note;
      for (bool sparse : {true, false}) {
        json row = {{"attention", heads_json(n)},
                    {"kernel", sparse ? "nsa" : "dense"},
                    {"hardware", {{"gpus", gpu ? 1 : 0}, {"name", name}}}};
        try {
          const json r = time_layer(backend, sparse, n);
          for (const char* key : {"forward_ms", "forward_backward_ms"})
            cells.push_back(strf("%.3f", r[key].get<double>()));
          cells.push_back(grouped(int64_t(r["planned_peak_mib"].get<double>())));
          row["result"] = r, any = true;
        } catch (const OutOfMemory& e) {
          row["error"] = e.what(), note = "out of memory";
          cells.insert(cells.end(), {"-", "-", "-"});
        }
        rows.append(row);
      }
      cells.push_back(note);
      table.push_back(cells);
    }
  std::printf("%s", markdown(table).c_str());
  return any;
}

// ------------------------------------------------------------------------------------------------------- the kernels

#if FSDP_CUDA
namespace {

// Owns GPU memory and frees it.
struct GpuArrays {
  std::vector<void*> owned;
  GpuArrays() = default;
  GpuArrays(const GpuArrays&) = delete;
  ~GpuArrays() {
    for (void* p : owned) cudaFree(p);
  }
  template <class T>
  T* make(int64_t n) {
    void* p = nullptr;
    CUDA_CHECK(cudaMalloc(&p, size_t(n) * sizeof(T)));
    owned.push_back(p);
    return static_cast<T*>(p);
  }
};

// As causal_pairs, under any rule.
double seen_pairs(const AttentionShape& a) {
  if (a.sees == Sees::causal) return causal_pairs(a.T);
  double pairs = 0;
  for (int64_t t = 0; t < a.T; ++t) {
    const int64_t ended = t + 1 < a.block ? 0 : (t + 1 - a.block) / std::max<int64_t>(1, a.stride) + 1;
    pairs += double(a.sees == Sees::window ? std::min(t + 1, a.window) : std::min(ended, a.keys));
  }
  return pairs;
}

// One shape by the kernels of `arch`: q, k and v are columns of one buffer, as in a model. Compressed keys have a
// buffer of their own.
json time_kernels(Device& dev, int arch, AttentionShape a) {
  const int64_t tokens = a.B * a.T, DV = a.v_dim(), k_at = a.H * a.D, v_at = k_at + a.HKV * a.D, ld = v_at + a.HKV * DV;
  a.ld_q = a.ld_kv = a.ld_dq = a.ld_dkv = ld, a.ld_o = a.H * DV;
  Stream& s = dev.compute();
  GpuArrays arrays;
  auto *qkv = arrays.make<bf16>(tokens * ld), *dqkv = arrays.make<bf16>(tokens * ld);
  auto *o = arrays.make<bf16>(tokens * a.ld_o), *d_o = arrays.make<bf16>(tokens * a.ld_o);
  auto *lse = arrays.make<float>(a.B * a.H * a.T), *work = arrays.make<float>(attention_backward_workspace<bf16>(a));
  {
    GpuArrays fp32;
    auto* x = fp32.make<float>(tokens * ld);
    ops::init_normal(s, x, 1, 1, 0, tokens * ld, 0, 1);
    ops::cast<bf16, float>(s, qkv, x, tokens * ld);
    ops::init_normal(s, x, 1, 2, 0, tokens * a.ld_o, 0, 1);
    ops::cast<bf16, float>(s, d_o, x, tokens * a.ld_o);
    s.synchronize();
  }
  bf16 *k = qkv + k_at, *v = qkv + v_at, *dk = dqkv + k_at, *dv = dqkv + v_at;
  if (a.sees == Sees::compressed) {
    a.ld_kv = a.ld_dkv = a.HKV * (a.D + DV);
    const int64_t n = a.B * a.keys * a.ld_kv;
    k = arrays.make<bf16>(n), v = k + a.HKV * a.D, dk = arrays.make<bf16>(n), dv = dk + a.HKV * a.D;
    s.copy(k, qkv, n * int64_t(sizeof(bf16)));
  }
  auto forward = [&] { gpu::attention_forward<bf16>(s.cuda(), arch, o, lse, qkv, k, v, a); };
  auto both = [&] {
    forward();
    gpu::attention_backward<bf16>(s.cuda(), arch, dqkv, dk, dv, d_o, qkv, k, v, o, lse, work, a);
  };
  json result = spread("forward_ms", time_calls(dev, s, forward));
  result.update(spread("forward_backward_ms", time_calls(dev, s, both)));
  add_tflops(&result, double(a.B * a.H) * seen_pairs(a), a.D, DV);
  return result;
}

// The shapes of the table: causal attention of the reference shapes, then what these kernels do for NSA: a window, and
// compressed keys.
std::vector<AttentionShape> kernel_shapes() {
  std::vector<AttentionShape> shapes;
  auto add = [&](int64_t B, int64_t T, int64_t H, int64_t HKV, int64_t D, int64_t DV = 0) -> AttentionShape& {
    AttentionShape a = {};
    a.B = B, a.T = T, a.H = H, a.HKV = HKV, a.D = D, a.DV = DV, a.scale = 1 / std::sqrt(double(D));
    shapes.push_back(a);
    return shapes.back();
  };
  add(1, 8192, 32, 8, 128), add(1, 4096, 32, 8, 128), add(8, 4096, 32, 8, 128), add(1, 32768, 32, 8, 128);
  add(1, 2048, 12, 2, 64), add(16, 2048, 12, 2, 64), add(1, 8192, 32, 8, 64);
  for (const auto& [H, HKV] : {std::pair<int64_t, int64_t>{32, 8}, {64, 4}}) {
    for (int64_t T = 4096; T <= 65536; T *= 2) {
      AttentionShape& a = add(1, T, H, HKV, 128);
      a.sees = Sees::window, a.window = 512;
    }
    for (int64_t T = 4096; T <= 65536; T *= 2) {
      AttentionShape& a = add(1, T, H, HKV, 128);
      a.sees = Sees::compressed, a.block = 32, a.stride = 16, a.keys = (T - a.block) / a.stride + 1;
    }
  }
  // The NSA paper's heads.
  for (int64_t T : {4096, 16384}) add(1, T, 64, 4, 192, 128);
  AttentionShape& near = add(1, 16384, 64, 4, 192, 128);
  near.sees = Sees::window, near.window = 512;
  AttentionShape& far = add(1, 65536, 64, 4, 192, 128);
  far.sees = Sees::compressed, far.block = 32, far.stride = 16, far.keys = (far.T - far.block) / far.stride + 1;
  return shapes;
}

std::string shape_text(const AttentionShape& a) {
  const auto text = [](int64_t n) { return std::to_string(n); };
  std::string seen;
  if (a.sees == Sees::window) seen = " window " + text(a.window);
  if (a.sees == Sees::compressed) seen = " compressed " + text(a.block) + "/" + text(a.stride);
  return "B" + text(a.B) + " T" + text(a.T) + " " + text(a.H) + "/" + text(a.HKV) + " D" + text(a.D) +
         (a.DV ? "/" + text(a.DV) : "") + seen;
}

json shape_json(const AttentionShape& a) {
  json j = heads_json(a);
  if (a.sees == Sees::window) j["window"] = a.window;
  if (a.sees == Sees::compressed) j["compressed"] = {{"block", a.block}, {"stride", a.stride}, {"keys", a.keys}};
  return j;
}

json hardware(const Device& dev) {
  int runtime = 0, driver = 0;
  CUDA_CHECK(cudaRuntimeGetVersion(&runtime));
  CUDA_CHECK(cudaDriverGetVersion(&driver));
  return {{"gpus", 1},
          {"name", dev.name},
          {"compute_capability", dev.compute_capability},
          {"cuda_runtime", runtime},
          {"cuda_driver", driver}};
}

}  // namespace

bool time_attention_kernels(const RowFile& rows) {
  REQUIRE_USER(gpu_count() > 0, "--sweep kernels: no GPU here");
  Device dev(Backend::gpu, 0);
  dev.mode = Mode::run;
  const int cc = dev.compute_capability;
  REQUIRE_USER(cc >= 80, "--sweep kernels: %s has compute capability %d.%d; the kernels need 8.0 or newer",
               dev.name.c_str(), cc / 10, cc % 10);
  std::vector<std::pair<int, const char*>> kernels = {{80, "sm_80 (mma.sync)"}};
  if (cc == 90) kernels.insert(kernels.begin(), {90, "sm_90a (wgmma)"});
  std::printf("attention in bf16, medians of 20 calls; %s\n\n", dev.name.c_str());
  std::vector<Words> table = {{"shape", "kernel", "forward ms", "TFLOP/s", "forward + backward ms", "TFLOP/s", "note"}};
  bool all = true, any = false;
  for (const AttentionShape& a : kernel_shapes())
    for (const auto& [arch, kernel] : kernels) {
      json row = {{"attention", shape_json(a)}, {"kernel", kernel}, {"hardware", hardware(dev)}};
      Words cells = {shape_text(a), kernel};
      try {
        const json r = time_kernels(dev, arch, a);
        for (const std::string name : {"forward", "forward_backward"}) {
          cells.push_back(strf("%.3f", r[name + "_ms"].get<double>()));
          cells.push_back(strf("%.0f", r[name + "_tflops"].get<double>()));
        }
        cells.push_back("");
        row["result"] = r, any = true;
      } catch (const OutOfMemory&) {  // on a small GPU: the other shapes may fit
        cudaGetLastError();           // clears the error
        row["error"] = "out of memory", all = false;
        cells.insert(cells.end(), {"-", "-", "-", "-", "out of memory"});
      }
      rows.append(row);
      table.push_back(cells);
    }
  if (all)
    for (Words& cells : table) cells.pop_back();  // nothing to note
  std::printf("%s", markdown(table).c_str());
  return any;
}
#else
bool time_attention_kernels(const RowFile&) {
  throw UsageError("--sweep kernels: this build has no GPU backend; rebuild with CUDA");
}
#endif
