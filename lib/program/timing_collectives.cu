// Collectives by size: how long one takes alone, how long beside matmuls, and what it costs those. Both directions
// matter for FSDP: NCCL's kernels take multiprocessors away from the computation that they are to hide behind, copy
// engines do not.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "lib/comm/gpus.h"
#include "lib/comm/channel.h"
#include "lib/comm/world.h"
#include "lib/ops/ops.h"
#include "lib/program/chips.h"
#include "lib/program/estimate.h"
#include "lib/program/timing.h"

namespace {

using nlohmann::json;

// Milliseconds of one of `calls` calls on stream s while `other_calls` on the stream `other` run, which must last
// longer.
template <class F, class G>
double time_beside(Device& dev, Stream& s, int64_t calls, F call, Stream& other, int64_t other_calls, G other_call) {
  Event begun(dev), start(dev, Event::timed), end(dev, Event::timed);
  other_call();
  other.record(begun);
  for (int64_t i = 1; i < other_calls; ++i) other_call();
  s.wait(begun);
  s.record(start);
  for (int64_t i = 0; i < calls; ++i) call();
  s.record(end);
  s.synchronize(), other.synchronize();
  return elapsed_ms(start, end) / double(calls);
}

// How many calls fill `total_ms`.
int64_t calls_for(double total_ms, double ms) { return std::max<int64_t>(3, std::llround(total_ms / ms)); }

// Rank 0's value on all ranks: they must agree on how many collectives they call.
double agreed(double x) { return std::atof(broadcast_text(strf("%.17g", x)).c_str()); }

// What one rank times collectives with: a channel for each way to move data, a buffer, and a matmul to run beside them:
// on a GPU the widest of the reference shape, y (M, N) = x (M, K) w (N, K)^T for M = 8192 tokens.
template <class T>
class Bench {
 public:
  // The memory is planned first and then taken, as ./train does.
  Bench(const World& world, int64_t most_mib)
      : world_(world),
        gpu_(gpu_count() > 0),
        transport_(gpu_ ? Transport::nccl : Transport::mpi),
        taken_(assign_device(gpu_ ? Backend::gpu : Backend::cpu, world)),
        dev_(gpu_ ? Backend::gpu : Backend::cpu, taken_.ordinal, taken_.sharers),
        copy_engines_(agree(copy_engines_pay(dev_, world) && on_one_host(world, world.size) ? "" : "no").empty()),
        fetches_(copy_engines_ && world.size <= measured_peers),
        M_(gpu_ ? 8192 : 128),
        N_(gpu_ ? 16384 : 256),
        K_(gpu_ ? 4096 : 128) {
    open(most_mib, Links::planned);
    if (copy_engines_) use_nccl_memory(dev_);
    dev_.mem.commit(library_bytes(dev_.backend, transport_, usual_communicators));
    dev_.mem.rewind();
    dev_.mode = Mode::run;
    open(most_mib, Links::open);
    fill(x_, M_ * K_), fill(w_, N_ * K_), fill(buffer_, bytes_of(most_mib) / int64_t(sizeof(T)));
    if (fetches_) fill(source_, bytes_of(most_mib) / world_.size / int64_t(sizeof(T)));
    dev_.compute().synchronize();
    matmul_ms_ = agreed(median(time_calls(dev_, dev_.compute(), [&] { matmul(); })));
  }

  struct Kind {
    const char* name;
    Collective what;  // an all_to_all is a reduce_scatter together with the sum that follows it
    Channel* channel;
    const char* by;
  };
  std::vector<Kind> kinds() const {
    std::vector<Kind> all = {{"all_gather", Collective::all_gather, ring_.get(), name_of(transport_)},
                             {"reduce_scatter", Collective::reduce_scatter, ring_.get(), name_of(transport_)}};
    if (copy_engines_) {
      all.push_back({"all_gather", Collective::all_gather, gathers_.get(), "copy engines"});
      all.push_back({"reduce_scatter", Collective::all_to_all, exchanges_.get(), "copy engines"});
    }
    return all;
  }

  // One collective of one size. Collective over all ranks.
  json time(const Kind& kind, int64_t mib) {
    const int64_t bytes = bytes_of(mib), count = bytes / world_.size / int64_t(sizeof(T));
    Stream &compute = dev_.compute(), &comm = dev_.gather();
    const auto multiply = [&] { matmul(); };
    const auto call = [&] {
      if (kind.channel == gathers_.get() && fetches_)
        kind.channel->all_gather(buffer_, count, dtype_of<T>, source_, peers_);
      else if (kind.what == Collective::all_gather) kind.channel->all_gather(buffer_, count, dtype_of<T>);
      else if (kind.what == Collective::reduce_scatter) kind.channel->reduce_scatter(buffer_, count, dtype_of<T>);
      else exchange_and_sum(kind.channel, count);
    };
    barrier();
    json result = spread("ms", time_calls(dev_, comm, call));
    const double ms = agreed(result["ms"]), gb_s = 1e-6 * sent(kind.what, double(bytes), world_.size) / ms;
    // 40 ms of the one beside 120 ms of the other, by their times alone.
    const double beside_matmul =
        time_beside(dev_, comm, calls_for(40, ms), call, compute, calls_for(120, matmul_ms_), multiply);
    barrier();
    const double matmul_beside =
        time_beside(dev_, compute, calls_for(40, matmul_ms_), multiply, comm, calls_for(120, ms), call);
    result.update({{"ms", ms},
                   {"sent_gb_s", gb_s},
                   {"beside_product_ms", beside_matmul},
                   {"product_ms", matmul_ms_},
                   {"product_beside_ms", matmul_beside}});
    if (const Chip* chip = chip_named(dev_.name)) {
      result["of_link"] = 1e9 * gb_s / chip->link;
      result["estimated_ms"] = estimated_ms(*chip, call);
    }
    return result;
  }

  // Of what is given the gather stream, which is at rest.
  template <class F>
  double estimated_ms(const Chip& chip, F call) {
    Estimate estimate(chip);
    dev_.mode = Mode::plan, dev_.timeline = &estimate;
    call();
    dev_.mode = Mode::run, dev_.timeline = nullptr;
    return 1e3 * estimate.clock(1);
  }

  void exchange_and_sum(Channel* channel, int64_t count) {
    Stream& s = dev_.gather();
    const int rank = fetches_ ? world_.rank : 0;
    const auto sum = [&](const T* own, const T* others) {
      ops::sum_parts(s, shard_, own, rank, others, count, world_.size, /*accumulate=*/false);
    };
    if (fetches_) {
      const T* const own = buffer_ + rank * count;
      channel->all_to_all(
          own, count, dtype_of<T>, peers_, [&] { ops::meet_peers(s, peers_, row_of_reductions); }, received_, count,
          [&](int64_t, int64_t) { sum(own, received_); });
    } else {
      channel->all_to_all(buffer_, received_, count, dtype_of<T>);
      sum(received_, received_ + count);
    }
  }

  json hardware() const {
    const int gpus = dev_.backend == Backend::gpu ? world_.size : 0;
    return {{"gpus", gpus}, {"name", dev_.name}, {"nccl", nccl_version()}};
  }

 private:
  // Cut so that every rank's part is a multiple of 256 bytes.
  int64_t bytes_of(int64_t mib) const { return (mib << 20) / (256 * world_.size) * 256 * world_.size; }

  void open(int64_t most_mib, Links links) {
    const int64_t most = bytes_of(most_mib);
    buffer_ = dev_.mem.keep<T>(most / int64_t(sizeof(T)), "buffer", Purpose::gather_slots);
    y_ = dev_.mem.keep<T>(M_ * N_, "y", Purpose::activations);
    x_ = dev_.mem.keep<T>(M_ * K_, "x", Purpose::activations);
    w_ = dev_.mem.keep<T>(N_ * K_, "w", Purpose::activations);
    ring_ = std::make_unique<Channel>(dev_, dev_.gather(), world_, transport_, "ring", most, links);
    if (!copy_engines_) return;
    const int64_t n = most / int64_t(sizeof(T));
    received_ = dev_.mem.keep<T>(n, "received", Purpose::gradient_slots);
    shard_ = dev_.mem.keep<float>(n / world_.size, "shard", Purpose::gradients);
    auto by_engines = [&](CopyEngines carry) {
      return std::make_unique<Channel>(dev_, dev_.gather(), world_, transport_, "copy engines", most, links, carry);
    };
    gathers_ = by_engines(CopyEngines::all_gather), exchanges_ = by_engines(CopyEngines::all_to_all);
    if (!fetches_) return;
    source_ = dev_.mem.keep<T>(n / world_.size, "source", Purpose::master);
    uint32_t* signals = dev_.mem.keep<uint32_t>(peer_signals(world_.size), "signals of peers", Purpose::workspace);
    if (links == Links::open) peers_ = gathers_->map_peers(signals);
  }

  // Normal numbers, made in fp32 in y's memory, a piece at a time.
  void fill(T* to, int64_t n) {
    const int64_t piece = M_ * N_ / 2;
    for (int64_t at = 0; at < n; at += piece, made_ += piece) {
      float* wide = reinterpret_cast<float*>(y_);
      ops::init_normal(dev_.compute(), wide, 1, 1, made_, std::min(piece, n - at), 0, 1);
      ops::cast<T, float>(dev_.compute(), to + at, wide, std::min(piece, n - at));
    }
  }

  void matmul() { ops::matmul<T>(dev_.compute(), y_, x_, w_, nullptr, nullptr, M_, N_, K_); }

  const World world_;
  const bool gpu_;
  const Transport transport_;
  const DeviceAssignment taken_;
  Device dev_;
  const bool copy_engines_, fetches_;
  const int64_t M_, N_, K_;
  Peers peers_;
  T *buffer_ = nullptr, *source_ = nullptr, *received_ = nullptr, *y_ = nullptr, *x_ = nullptr, *w_ = nullptr;
  float* shard_ = nullptr;
  std::unique_ptr<Channel> ring_, gathers_, exchanges_;
  int64_t made_ = 0;  // numbers, by fill
  double matmul_ms_ = 0;
};

template <class T>
void time_collectives(const RowFile& rows, const std::vector<int64_t>& sizes, const World& world) {
  Bench<T> bench(world, *std::max_element(sizes.begin(), sizes.end()));
  std::vector<Words> table = {{"collective", "by", "MiB", "ms", "GB/s sent", "of the link", "estimated ms",
                               "beside matmuls, ms", "a matmul beside it"}};
  for (const auto& kind : bench.kinds())
    for (int64_t mib : sizes) {
      const json result = bench.time(kind, mib);
      const auto cell = [&](const char* key, const char* format) {
        return result.contains(key) ? strf(format, result[key].get<double>()) : std::string("-");
      };
      table.push_back({kind.name, kind.by, std::to_string(mib), cell("ms", "%.3f"), cell("sent_gb_s", "%.1f"),
                       cell("of_link", "%.3f"), cell("estimated_ms", "%.3f"), cell("beside_product_ms", "%.3f"),
                       strf("x %.2f", result["product_beside_ms"].get<double>() / result["product_ms"].get<double>())});
      if (world.rank == 0)
        rows.append({{"sweep", "collectives"},
                     {"collective", kind.name},
                     {"by", kind.by},
                     {"mib", mib},
                     {"ranks", world.size},
                     {"dtype", name_of(dtype_of<T>)},
                     {"hardware", bench.hardware()},
                     {"result", result}});
    }
  if (world.rank == 0) std::printf("%s", markdown(table).c_str());
}

}  // namespace

int collectives_rank(const RowFile& rows, const std::vector<int64_t>& mib, int* argc, char*** argv) {
  const World world = init_mpi(argc, argv);
  const bool on_gpus = gpu_count() > 0;
  const int cards = on_gpus ? assign_device(Backend::gpu, world).host_cards : world.local_size;
  std::string error;
  if (world.size < 2)
    error = "--sweep collectives: one rank has no peer to exchange data with; choose --ranks 2 or more";
  else if (cards < world.local_size)
    error = strf("--sweep collectives: %d ranks on a host with %d GPU%s; NCCL needs one for each rank: lower --ranks",
                 world.local_size, cards, cards == 1 ? "" : "s");
  error = agree(error);
  if (error.empty())
    or_abort([&] {
      if (on_gpus) time_collectives<bf16>(rows, mib, world);
      else time_collectives<float>(rows, mib, world);
    });
  else if (world.rank == 0) std::fprintf(stderr, "error: %s\n", error.c_str());
  finish_mpi();
  return error.empty() ? 0 : 2;
}
