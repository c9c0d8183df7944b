#include "lib/program/estimate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "lib/device/error.h"
#include "lib/program/format.h"

namespace {

// What of a datasheet's figures an H200 reaches. results/README.md says how each is known.
constexpr double of_bandwidth = 0.75;  // a kernel that streams; a copy reaches 0.85
constexpr double of_bandwidth_adamw = 0.88;
constexpr double ring_of_link = 0.7, pair_of_link = 0.6;  // NCCL's rings; a ring of two
constexpr double engine_of_link = 0.83;                   // copy engines
// What a collective takes from the products beside it: a part of the time that its bytes are on the node's links. A
// ring's kernels last longer beside products, and move the bytes through multiprocessors; for all of its time, waiting
// for hops and the network too, it holds some of those.
constexpr double ring_takes = 0.8, engine_takes = 0.15;
// The same of memory-bound kernels on other streams, of the time that they take alone: casts beside the gathers, sums
// beside the reductions.
constexpr double kernel_takes[] = {0, 0.5, 1.4};
constexpr double of_network = 0.85, held = 0.13;  // not measured; held: 17 multiprocessors of 132
// Latencies, in seconds.
constexpr double launch = 3.8e-6;  // of a kernel on the device: to begin, to fill the chip, to end
constexpr double node = 2.5e-6;    // the same of a kernel in a graph
constexpr double issue = 3.4e-6;   // of the host, to issue a kernel or an event
// A ring's hops within and between nodes, and a tree's for the all-reduce of a few numbers, as NCCL itself reckons with
// them (its src/graph/tuning.cc).
constexpr double ring = 8.4e-6, ring_hop = 3.4e-6, ring_node_hop = 9.6e-6;
constexpr double tree = 4.4e-6, tree_hop = 0.52e-6, tree_node_hop = 5e-6;

const char* const collectives[] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "all_to_all"};
const char* const works[] = {"matmul", "attention", "memory-bound kernel", "optimizer"};
constexpr double never_ends = std::numeric_limits<double>::infinity();

double peak_of(const Chip& chip, Dtype t) {
  return is_fp8(t) ? 2 * chip.bf16 : t == Dtype::bf16 ? chip.bf16 : chip.fp32;
}

double link_rate(const Chip& chip, int ranks, Via via) {
  return chip.link * (via == Via::copy_engines ? engine_of_link : ranks == 2 ? pair_of_link : ring_of_link);
}

}  // namespace

double Estimate::launched() const { return graph_ ? node : launch; }

double Estimate::seconds(const Cost& c) const {
  const double peak = peak_of(chip_, c.dtype), places = chip_.multiprocessors;
  const double waves = c.tasks > 0 ? std::ceil(c.tasks / places) * places / c.tasks : 1;
  const double of_memory = c.kind == Work::optimizer ? of_bandwidth_adamw : of_bandwidth;
  return std::max(c.flops / (peak * c.share) * waves, c.bytes / (chip_.bandwidth * of_memory)) +
         c.launches * launched();
}

// A ring goes at the rate of a GPU's link. Across nodes there are as many rings as a node has GPUs in the group, and
// each leaves the node through another network card.
double Estimate::seconds(Collective kind, double bytes, int ranks, int local, Via via) const {
  local = std::min(local, ranks);
  const int nodes = (ranks + local - 1) / local;
  double rate = local > 1 ? link_rate(chip_, ranks, via) : never_ends;
  if (nodes > 1) rate = std::min(rate, local * chip_.network * of_network);
  const double latency = kind == Collective::all_reduce
                             ? tree + 2 * ((local - 1) * tree_hop + std::ceil(std::log2(nodes)) * tree_node_hop)
                             : ring + (ranks - nodes) * ring_hop + (nodes - 1) * ring_node_hop;
  return launched() + latency + sent(kind, bytes, ranks) / rate;
}

// The end of what takes `seconds` alone, and for a span's time is held up for the part of it that the span takes; 1:
// all. A stream's spans follow each other: those that are over at `start` are skipped at once.
double Estimate::end_of(double start, double seconds, double takes, const Spans& spans) {
  double end = start + seconds;
  auto span = std::partition_point(spans.begin(), spans.end(), [&](const Busy& b) { return b.to <= start; });
  for (; span != spans.end() && span->from < end; ++span) {
    const double from = std::max(start, span->from), part = std::max(takes, span->takes);
    end += std::min(part < 1 ? part / (1 - part) * (end - from) : never_ends, part * (span->to - from));
  }
  return end;
}

// A product by TF32 is told as one of bf16, whose peak is twice as high.
double Estimate::least(const Cost& c) const {
  const bool by_tf32 = tf32_ && c.kind == Work::matmul && c.dtype == Dtype::bf16;
  return std::max(c.flops / (peak_of(chip_, c.dtype) * (by_tf32 ? 0.5 : 1)), c.bytes / chip_.bandwidth);
}

void Estimate::operation(int stream, const Cost& c) {
  sums_.calls += c.launches;
  const double t = seconds(c);
  double &clock = clock_[size_t(stream)], end = clock + t;
  if (stream == 0) {
    for (const auto& streams : spans_)
      for (const Spans& spans : streams) end = end_of(clock, end - clock, 0, spans);
    for (const Spans& spans : kernels_) end = end_of(clock, end - clock, 0, spans);
    sums_.busy[size_t(c.kind)] += t, sums_.limit[size_t(c.kind)] += least(c), sums_.slowed += end - (clock + t);
    if (c.kind == Work::matmul) sums_.product_flops += c.flops;
  }
  const double from = std::exchange(clock, end);
  if (stream != 0 && c.kind == Work::memory) kernels_[size_t(stream)].push_back({from, end, kernel_takes[stream]});
  keep(stream, Span::operation, stream == 0 && !mark.empty() ? mark : works[size_t(c.kind)], from);
}

// Collectives share the links, or the network where their groups span nodes: one that is issued later has them while
// the earlier ones do not.
void Estimate::collective(int stream, Collective kind, double bytes, int ranks, int local, Via via) {
  if (ranks < 2) return;
  sums_.calls++;
  const double t = seconds(kind, bytes, ranks, local, via);
  double &clock = clock_[size_t(stream)], end = clock + t;
  auto& same = spans_[ranks > local];
  for (const Spans& spans : same) end = end_of(clock, end - clock, 1, spans);
  const double moving = sent(kind, bytes, ranks) / link_rate(chip_, ranks, via) / t;
  same[size_t(stream)].push_back(
      {end - t, end,
       via == Via::copy_engines ? engine_takes * moving : std::max(held, ring_takes * std::min(1.0, moving))});
  const double from = std::max(std::exchange(clock, end), end - t);  // not before it, by rounding
  keep(stream, Span::collective, collectives[size_t(kind)], from, bytes);
  Traffic& traffic = sums_.traffic[size_t(kind)];
  traffic.count++, traffic.bytes += sent(kind, bytes, ranks), traffic.seconds += t;
}

Timeline::Point Estimate::record(int stream) {
  sums_.calls++;
  return {stream, clock(stream)};
}

void Estimate::wait(int stream, const Point& event) {
  sums_.calls++;
  double& clock = clock_[size_t(stream)];
  if (event.seconds <= clock) return;
  if (stream == 0) sums_.exposed[size_t(event.stream)] += event.seconds - clock;
  const double from = std::exchange(clock, event.seconds);
  if (stream == 0) keep(stream, Span::wait, event.stream == 1 ? "waiting for gathers" : "waiting for reductions", from);
}

void Estimate::keep(int stream, Span::Kind kind, const std::string& name, double from, double bytes) {
  if (!keeps_) return;
  Span s;
  s.lane = Span::Lane(stream), s.kind = kind, s.name = name, s.from = from, s.to = clock(stream);
  s.unit = stream == 0 ? "" : unit, s.bytes = int64_t(bytes);
  kept_.push_back(std::move(s));
}

void Estimate::memory(Purpose purpose, int64_t bytes) {
  if (keeps_ && bytes != 0) memory_.push_back({clock(0), purpose, bytes});
}

void Estimate::holds(int stream, const std::string& slot, const std::string& unit, const char* how) {
  if (!keeps_) return;
  const std::string what = unit + how;
  const auto held = holding_.find(slot);
  if (held != holding_.end()) {
    Span& s = slots_[held->second];
    if (s.name == what) return;
    s.to = clock(stream);
    holding_.erase(held);
  }
  if (what.empty()) return;
  Span s;
  s.lane = Span::other, s.kind = Span::slot, s.name = what, s.mark = slot, s.from = clock(stream);
  holding_[slot] = slots_.size();
  slots_.push_back(std::move(s));
}

double Estimate::host() const { return (graph_ ? 1 : double(sums_.calls)) * issue; }
double Estimate::step() const {
  return std::max(*std::max_element(clock_.begin(), clock_.end()) - begun_ + sums_.skipped, host());
}

void Estimate::next_step() {
  begun_ = *std::max_element(clock_.begin(), clock_.end());
  sums_ = {};
  kept_.clear(), memory_.clear(), slots_.clear(), holding_.clear();
}

void Estimate::begin_repeat() { sums_before_repeat_ = sums_, repeat_from_ = clock(0); }

// The clocks stay as they are, since the events that were recorded hold their times.
void Estimate::skip(int64_t times) {
  const Sums& was = sums_before_repeat_;
  auto repeat = [&](auto* now, auto before) { *now += decltype(before)(times) * (*now - before); };
  for (size_t i = 0; i < sums_.exposed.size(); i++) repeat(&sums_.exposed[i], was.exposed[i]);
  for (size_t i = 0; i < sums_.busy.size(); i++)
    repeat(&sums_.busy[i], was.busy[i]), repeat(&sums_.limit[i], was.limit[i]);
  for (size_t i = 0; i < sums_.traffic.size(); i++) {
    repeat(&sums_.traffic[i].count, was.traffic[i].count);
    repeat(&sums_.traffic[i].bytes, was.traffic[i].bytes);
    repeat(&sums_.traffic[i].seconds, was.traffic[i].seconds);
  }
  repeat(&sums_.slowed, was.slowed), repeat(&sums_.product_flops, was.product_flops);
  repeat(&sums_.calls, was.calls);
  sums_.skipped += double(times) * (clock(0) - repeat_from_);
}

std::string Estimate::text(double tokens, double flops) const {
  const double s = step(), waited = exposed(1) + exposed(2);
  std::string t = strf("a step of a rank on %s, estimated %25s\n", chip_.name, "ms");
  auto row = [&](const char* what, double seconds) { t += strf("  %-46s %10.2f\n", what, 1e3 * seconds); };
  row(strf("matmuls, %.2f TFLOP", 1e-12 * sums_.product_flops).c_str(), busy(Work::matmul));
  row("attention", busy(Work::attention));
  row("memory-bound kernels", busy(Work::memory));
  row("optimizer", busy(Work::optimizer));
  const bool sends =
      std::any_of(sums_.traffic.begin(), sums_.traffic.end(), [](const Traffic& c) { return c.count > 0; });
  const char* const beside = sends ? "collectives" : "kernels";
  row(strf("slowdown from %s beside it", beside).c_str(), std::fabs(sums_.slowed));
  row("waiting for gathers", exposed(1));
  row("waiting for reductions", exposed(2));
  row("step", s);
  for (size_t i = 0; i < sums_.traffic.size(); i++)
    if (const Traffic& c = sums_.traffic[i]; c.count > 0)
      row(strf("beside it: %lld %s, %.1f MiB sent", static_cast<long long>(c.count), collectives[i],
               c.bytes / (1 << 20))
              .c_str(),
          c.seconds);
  row(strf("beside it: the host, %lld call%s", graph_ ? 1 : static_cast<long long>(sums_.calls), graph_ ? "" : "s")
          .c_str(),
      host());
  t += strf("  %s tokens/s a GPU, %.2f TFLOP, MFU %.1f %%; bound by %s\n", grouped(std::llround(tokens / s)).c_str(),
            1e-12 * flops, 1e2 * flops / s / chip_.bf16,
            s <= host()              ? "the host"
            : waited > 0.1 * s       ? "communication: it does not hide"
            : sums_.slowed > 0.1 * s ? strf("compute, which %s beside it slow down", beside).c_str()
                                     : "compute");
  t += strf("  assumed, at an H200's measured fractions of its datasheet: memory %.2f TB/s, %.2f for AdamW",
            1e-12 * chip_.bandwidth * of_bandwidth, 1e-12 * chip_.bandwidth * of_bandwidth_adamw);
  if (!sends) return t + "\n";
  t += strf(",\n  links %.0f GB/s a GPU for rings, %.0f for copy engines\n", 1e-9 * chip_.link * ring_of_link,
            1e-9 * chip_.link * engine_of_link);
  return t + strf("  assumed, not measured: nodes of %d GPUs, each with %.0f GB/s into the network\n", gpus_per_node,
                  1e-9 * chip_.network * of_network);
}
