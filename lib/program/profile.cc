#include "lib/program/profile.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "lib/program/json.h"

using nlohmann::json;

void check_profile(Run* r) {
  if ((!r->o.profile && r->o.trace.empty()) || r->backend != Backend::gpu) return;
  std::string why;
  if (activity::open(&why)) return;
  REQUIRE_USER(
      r->o.graph == 0,
      "--graph 1: only CUPTI sees into a graph, and there is none (%s); drop --profile and --trace, or --graph",
      why.c_str());
  r->notices.push_back("no CUPTI (" + why + "): --profile and --trace go by marks, and show no kernels");
}

StepProfiler::StepProfiler(const Job& job)
    : job_(job), asked_(job.r.o.profile || !job.r.o.trace.empty()), speaks_(job.world.rank == 0) {}

void StepProfiler::begin(int64_t step, int64_t first) {
  if (!asked_) return;
  const Run& r = job_.r;
  // The first step loads and connects. The step before the last is there for CUPTI to begin in: it slows what is issued
  // meanwhile, and the device still runs that when the last step is issued.
  if (r.o.profile && speaks_ && r.backend == Backend::gpu && step == std::min(first + 1, r.last_step)) {
    sampler_ = std::make_unique<GpuSampler>(load_nvml(),
                                            std::vector<std::string>{nvml_uuid(name_gpu(job_.dev->ordinal).uuid)});
    sampled_from_ = unix_seconds();
  }
  if (speaks_ && activity::is_open() && step == std::max(first, r.last_step - 1)) activity::start(), recording_ = true;
  if (step != r.last_step) return;
  job_.dev->start_profile();
  from_ = std::chrono::steady_clock::now();
}

void StepProfiler::end(int64_t step) {
  if (!asked_ || step != job_.r.last_step) return;
  host_ms_ = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - from_).count();
  Device& dev = *job_.dev;
  marks_ = dev.take_profile();
  ended_ = true;
  for (Stream* s : {&dev.compute(), &dev.gather(), &dev.reduce()}) s->synchronize();
  if (sampler_) gpu_ = sampler_->summary(sampled_from_, unix_seconds());
  sampler_.reset();
  if (!speaks_ || !std::exchange(recording_, false)) return;
  try {
    const StreamNumbers numbers = {activity::stream_number(dev.compute()), activity::stream_number(dev.gather()),
                                   activity::stream_number(dev.reduce())};
    ran_ = spans_of(activity::stop(), marks_, numbers);
    if (ran_.empty()) job_.telemetry->note("CUPTI has recorded nothing of the last step");
  } catch (const CudaError& e) { job_.telemetry->note(e.what()); }  // the run has ended well
}

void StepProfiler::tell(const std::string& stop) {
  if (!asked_ || !speaks_) return;
  if (!ended_) {
    const bool both = job_.r.o.profile && !job_.r.o.trace.empty();
    const char* what = both ? "--profile and --trace are" : job_.r.o.profile ? "--profile is" : "--trace is";
    return job_.telemetry->note(strf("%s left out, as the last step did not run: %s", what,
                                     stop.empty() ? "there was none to run" : stop.c_str()));
  }
  if (job_.r.o.profile) report();
  if (!job_.r.o.trace.empty()) write();
}

void StepProfiler::report() {
  StepProfile p;
  p.step = job_.r.last_step, p.marks = sums(marks_.device), p.host_ms = host_ms_;
  p.kernels = rows_of(ran_, /*kernels=*/true), p.copies = rows_of(ran_, /*kernels=*/false);
  p.nccl_share = nccl_share(ran_);
  if (!ran_.empty()) p.shares = shares_of(ran_, job_.price ? std::optional(job_.price->limits) : std::nullopt);
  p.gpu = gpu_;
  report_profile(p, job_.telemetry.get());
}

void StepProfiler::write() {
  Trace t;
  t.source = ran_.empty() ? "marks" : "cupti";
  t.device = ran_.empty() ? marks_.device : ran_;
  t.host = marks_.host;
  t.begin = std::numeric_limits<double>::infinity(), t.end = -t.begin;
  for (const Span& s : t.device)
    if (s.lane == Span::compute) t.begin = std::min(t.begin, s.from), t.end = std::max(t.end, s.to);
  if (t.begin > t.end) t.begin = t.end = 0;  // nothing ran there
  try {
    write_trace(job_.r.o.trace, t,
                {{"command", job_.command},
                 {"commit", commit()},
                 {"date", now_iso8601()},
                 {"ranks", job_.world.size},
                 {"rank", job_.world.rank},
                 {"chip", job_.dev->name},
                 {"step", job_.r.last_step}});
    job_.telemetry->note("wrote the trace of step " + std::to_string(job_.r.last_step) + " to " + job_.r.o.trace);
  } catch (const Error& e) { failed_ = e.what(); }  // the disk is full: the run goes on to its end
}

// ----------------------------------------------------------------------------------------------------------- records

namespace {

// The latest of the spans, which are in order, that has begun at this time and not ended; null: none.
const Span* span_at(const std::vector<const Span*>& spans, double at) {
  auto next = std::upper_bound(spans.begin(), spans.end(), at, [](double t, const Span* s) { return t < s->from; });
  if (next == spans.begin()) return nullptr;
  const Span* s = *(next - 1);
  return at <= s->to ? s : nullptr;
}

// Its stream, where that is one of ours. A graph's kernels may be reported on streams of the driver's, or all on the
// one that it was launched on; NCCL may use streams of its own. Then by what the host was at, or by what it is: who
// talks to other ranks gathers or reduces.
Span::Lane lane_of(const activity::Record& r, const Span* work, const StreamNumbers& streams) {
  const bool shared = streams.gather == streams.reduce;
  const bool talks = activity::is_nccl_kernel(r.name) || r.name == "gpu::sum_peers_kernel" ||
                     r.name == "gpu::sum_rows_kernel" || r.name == "gpu::sum_scalars_kernel" ||
                     r.name == "gpu::meet_kernel";
  if (shared && r.stream == streams.gather && work) return work->lane;
  if (r.stream == streams.gather) return Span::gather;
  if (r.stream == streams.reduce) return Span::reduce;
  if (work) return work->lane;
  if (talks) return r.name.find("AllGather") != std::string::npos ? Span::gather : Span::reduce;
  if (r.peer) return Span::gather;
  return r.stream == streams.compute ? Span::compute : Span::other;
}

}  // namespace

std::vector<Span> spans_of(const std::vector<activity::Record>& records, const Device::Profile& profile,
                           const StreamNumbers& streams) {
  std::vector<const Span*> marks, works;
  for (const Span& s : profile.host) (s.lane == Span::compute ? marks : works).push_back(&s);
  auto inside = [&](const activity::Record& r) {
    return r.issued_ns >= profile.began_ns && r.issued_ns <= profile.ended_ns;
  };
  uint64_t first = std::numeric_limits<uint64_t>::max();
  for (const activity::Record& r : records)
    if (inside(r)) first = std::min(first, r.start_ns);
  auto seconds = [&](uint64_t ns) { return 1e-9 * double(int64_t(ns - profile.began_ns)); };
  std::vector<Span> spans;
  for (const activity::Record& r : records) {
    const bool known = r.issued_ns != 0;
    if (known ? !inside(r) : r.start_ns < first) continue;
    const Span* mark = known ? span_at(marks, seconds(r.issued_ns)) : nullptr;
    const Span* work = known ? span_at(works, seconds(r.issued_ns)) : nullptr;
    Span s;
    s.kind = r.kind == activity::Record::copy    ? Span::copy
             : r.kind == activity::Record::clear ? Span::clear
             : activity::is_nccl_kernel(r.name)  ? Span::nccl_kernel
                                                 : Span::kernel;
    s.lane = lane_of(r, work, streams);
    s.name = r.name, s.from = seconds(r.start_ns), s.to = seconds(r.end_ns);
    if (s.lane == Span::compute && mark) s.mark = mark->name;
    if (s.lane != Span::compute && work) s.unit = work->unit;
    s.bytes = r.bytes, s.stream = r.stream;
    spans.push_back(std::move(s));
  }
  return spans;
}

std::vector<StepProfile::Row> rows_of(const std::vector<Span>& spans, bool kernels) {
  std::vector<StepProfile::Row> rows;
  for (const Span& s : spans) {
    if (kernels != (s.kind == Span::kernel || s.kind == Span::nccl_kernel)) continue;
    auto row = std::find_if(rows.begin(), rows.end(), [&](const auto& r) { return r.name == s.name; });
    if (row == rows.end()) row = rows.insert(rows.end(), {s.name});
    row->ms += 1e3 * (s.to - s.from), row->count++, row->bytes += s.bytes;
  }
  std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.ms > b.ms; });
  return rows;
}

namespace {
// Ours have a namespace by the kind of their work, and what has neither multiplies: cuBLAS's. A mark does not tell,
// since a product and what is around it share one, and what a graph launches has none.
Work work_of(const Span& s) {
  const auto is_in = [&](const char* name) { return s.name.rfind(name, 0) == 0; };
  if (is_in("attention::")) return Work::attention;
  return s.kind != Span::kernel || is_in("gpu::") ? Work::memory : Work::matmul;
}
}  // namespace

std::vector<StepProfile::Share> shares_of(const std::vector<Span>& ran, const std::optional<Limits>& limits) {
  std::vector<const Span*> computes;
  for (const Span& s : ran)
    if (s.kind != Span::nccl_kernel && (s.lane == Span::compute || s.lane == Span::other)) computes.push_back(&s);
  if (computes.empty()) return {};
  std::sort(computes.begin(), computes.end(), [](const Span* a, const Span* b) { return a->from < b->from; });
  double products = 0, attention = 0, memory_bound = 0, waiting = 0, at = computes[0]->from;
  for (const Span* s : computes) {
    const Work work = work_of(*s);
    double& busy = work == Work::matmul ? products : work == Work::attention ? attention : memory_bound;
    waiting += 1e3 * std::max(0.0, s->from - at);
    busy += 1e3 * std::max(0.0, s->to - std::max(s->from, at));
    at = std::max(at, s->to);
  }
  std::vector<StepProfile::Share> shares = {{"products", "products", products},
                                            {"attention", "attention", attention},
                                            {"memory-bound kernels", "memory_bound", memory_bound},
                                            {"waiting", "waiting", waiting, 0}};
  if (!limits) return shares;
  shares[0].limit_ms = 1e3 * limits->products, shares[1].limit_ms = 1e3 * limits->attention;
  shares[2].limit_ms = 1e3 * limits->memory_bound;
  return shares;
}

double nccl_share(const std::vector<Span>& spans) {
  double nccl = 0, all = 0;
  for (const Span& s : spans) {
    if (s.kind == Span::kernel || s.kind == Span::nccl_kernel) all += s.to - s.from;
    if (s.kind == Span::nccl_kernel) nccl += s.to - s.from;
  }
  return all > 0 ? nccl / all : -1;
}
