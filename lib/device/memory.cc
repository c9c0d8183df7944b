#include "lib/device/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <numeric>
#include <set>

#include "lib/device/device.h"
#include "lib/device/nvml.h"

const char* name_of(Purpose p) {
  static const char* names[purposes] = {"master",         "moments",     "gradients",   "gather slots",
                                        "gradient slots", "activations", "temporaries", "workspace"};
  return names[int(p)];
}

namespace {
constexpr int64_t kept_align = 4096, align = 256, arena_align = 2 << 20;
int64_t round_up(int64_t n, int64_t a) { return (n + a - 1) / a * a; }

// Which offsets are taken at which moments: a binary tree over the moments, the root at 1, whose nodes hold offsets.
// Buffers lie close to each other, so the offsets of many buffers are few ranges: with n buffers, adding one and
// looking for a gap costs log n times that.
class OccupiedTree {
 public:
  explicit OccupiedTree(size_t moments) {
    while (leaves_ < moments) leaves_ *= 2;
    through_.resize(2 * leaves_), within_.resize(2 * leaves_);
  }
  void clear() {  // and keeps what memory it has
    for (Ranges& r : through_) r.clear();
    for (Ranges& r : within_) r.clear();
  }
  // The lowest offset from which on `bytes` are free in all of the moments [from, to).
  int64_t lowest_gap(size_t from, size_t to, int64_t bytes) {
    seen_.clear();
    auto see = [&](const Ranges& r) {
      if (!r.empty()) seen_.push_back({r.begin(), r.end()});
    };
    visit(
        from, to, [&](size_t node) { see(through_[node]); }, [&](size_t node) { see(within_[node]); });
    int64_t at = 0;
    for (size_t i = 0, without_change = 0; without_change < seen_.size(); i = (i + 1) % seen_.size()) {
      auto& [next, end] = seen_[i];  // where it was left: `at` only grows
      next = std::upper_bound(next, end, at, [](int64_t x, const Range& y) { return x < y.to; });
      for (without_change++; next != end && next->from - at < bytes; ++next) at = next->to, without_change = 0;
    }
    return at;
  }
  void add(size_t from, size_t to, int64_t offset, int64_t end) {
    visit(
        from, to, [&](size_t node) { unite(&within_[node], offset, end); },
        [&](size_t node) { unite(&through_[node], offset, end), unite(&within_[node], offset, end); });
  }

 private:
  struct Range {
    int64_t from, to;
  };
  using Ranges = std::vector<Range>;  // in order, with gaps between them

  // Calls whole for the few nodes that make up [from, to), above for the nodes over its first and its last moment.
  template <class Above, class Whole>
  void visit(size_t from, size_t to, Above above, Whole whole) {
    const size_t first = from + leaves_, last = to - 1 + leaves_;
    for (size_t node = first / 2; node > 0; node /= 2) above(node);
    for (size_t node = last / 2; node > 0; node /= 2) above(node);
    for (size_t l = first, r = last + 1; l < r; l /= 2, r /= 2) {
      if (l % 2) whole(l++);
      if (r % 2) whole(--r);
    }
  }
  static void unite(Ranges* ranges, int64_t from, int64_t to) {
    auto first =
        std::lower_bound(ranges->begin(), ranges->end(), from, [](const Range& r, int64_t x) { return r.to < x; });
    auto last = first;
    for (; last != ranges->end() && last->from <= to; ++last)
      from = std::min(from, last->from), to = std::max(to, last->to);
    if (first == last) ranges->insert(first, {from, to});
    else *first = {from, to}, ranges->erase(first + 1, last);
  }

  size_t leaves_ = 1;
  std::vector<Ranges> through_, within_;  // of a node: what lives through all its moments; what lives at some of them
  std::vector<std::pair<Ranges::const_iterator, Ranges::const_iterator>> seen_;
};

// The same as a list in the order of offsets: up to some two thousand buffers it is quicker to go through all.
class OccupiedList {
 public:
  void clear() { buffers_.clear(); }
  int64_t lowest_gap(size_t from, size_t to, int64_t bytes) const {
    int64_t at = 0;
    for (const Placed& p : buffers_) {
      const bool together = (p.from < to) & (from < p.to);  // without branches: which are together, none can foretell
      if (together & (p.offset - at >= bytes)) break;
      at = together ? std::max(at, p.end) : at;
    }
    return at;
  }
  void add(size_t from, size_t to, int64_t offset, int64_t end) {
    const auto behind = std::upper_bound(buffers_.begin(), buffers_.end(), offset,
                                         [](int64_t x, const Placed& p) { return x < p.offset; });
    buffers_.insert(behind, {from, to, offset, end});
  }

 private:
  struct Placed {
    size_t from, to;
    int64_t offset, end;
  };
  std::vector<Placed> buffers_;
};

// A buffer's bytes, and the moments that it lives through. Two that live at one time do so at the birth of one of them,
// hence the moments are births.
struct Stay {
  size_t from, to;
  int64_t bytes;
};
std::vector<Stay> stays_of(const std::vector<Life>& lives, int64_t align) {
  std::vector<int64_t> births;
  for (const Life& l : lives) births.push_back(l.born);
  std::sort(births.begin(), births.end());
  auto moment = [&](int64_t t) { return size_t(std::lower_bound(births.begin(), births.end(), t) - births.begin()); };
  std::vector<Stay> stays;
  for (const Life& l : lives) {
    const size_t from = moment(l.born);
    stays.push_back({from, std::max(moment(l.dead), from + 1), round_up(l.bytes, align)});
  }
  return stays;
}

// Places buffers one after another, each into the lowest gap between those that live at one time with it.
template <class Occupied>
int64_t pack_in_order(const std::vector<Stay>& stays, const std::vector<int>& order, Occupied* occupied,
                      std::vector<int64_t>* offsets) {
  occupied->clear();
  offsets->assign(stays.size(), 0);
  int64_t total = 0;
  for (int i : order) {
    const auto& [from, to, bytes] = stays[size_t(i)];
    const int64_t at = occupied->lowest_gap(from, to, bytes);
    (*offsets)[size_t(i)] = at;
    total = std::max(total, at + bytes);
    occupied->add(from, to, at, at + bytes);
  }
  return total;
}
}  // namespace

int64_t most_live(const std::vector<Life>& lives, int64_t align) {
  std::vector<std::pair<int64_t, int64_t>> changes;
  for (const Life& l : lives) {
    if (l.dead <= l.born) continue;
    changes.emplace_back(l.born, round_up(l.bytes, align));
    changes.emplace_back(l.dead, -round_up(l.bytes, align));
  }
  std::sort(changes.begin(), changes.end());  // at one time, deaths (negative) come before births
  int64_t live = 0, most = 0;
  for (const auto& c : changes) most = std::max(most, live += c.second);
  return most;
}

int64_t pack(const std::vector<Life>& lives, int64_t align, std::vector<int64_t>* offsets) {
  // Offline storage allocation is NP-hard. Placing the largest first is within a few per cent here, and where it is
  // not, one of the other orders usually is. What is left over goes when the buffer that lies highest is placed first,
  // and then the one that lies highest now, and so on; from which order, one cannot tell. Stop as soon as the lower
  // bound is met.
  std::vector<int> order(lives.size());
  auto span = [&](int i) { return lives[size_t(i)].dead - lives[size_t(i)].born; };
  auto size = [&](int i) { return lives[size_t(i)].bytes; };
  auto born = [&](int i) { return lives[size_t(i)].born; };
  const std::function<bool(int, int)> rules[] = {
      [&](int a, int b) { return size(a) > size(b); },
      [&](int a, int b) { return born(a) < born(b); },
      [&](int a, int b) { return span(a) > span(b); },
      [&](int a, int b) { return double(size(a)) * double(span(a)) > double(size(b)) * double(span(b)); },
      [&](int a, int b) { return lives[size_t(a)].dead > lives[size_t(b)].dead; },
  };
  // Those by span leave many gaps, which thousands of blocks' buffers would look through for half a minute.
  const int64_t n = int64_t(lives.size());
  const std::ptrdiff_t rules_used = n > 40000 ? 2 : std::end(rules) - std::begin(rules);
  std::vector<std::pair<int64_t, std::vector<int>>> orders;
  std::vector<int64_t> at;
  int64_t best = -1;
  const int64_t bound = most_live(lives, align);
  const std::vector<Stay> stays = stays_of(lives, align);
  const bool few = n <= 2000;
  OccupiedTree tree(few ? 0 : stays.size());
  OccupiedList list;
  const auto place = [&] {
    const int64_t total = few ? pack_in_order(stays, order, &list, &at) : pack_in_order(stays, order, &tree, &at);
    if (best < 0 || total < best) best = total, *offsets = at;
    return total;
  };
  for (const auto* rule = rules; rule != rules + rules_used && best != bound; rule++) {
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), *rule);
    const int64_t total = place();
    orders.emplace_back(total, order);
  }
  std::sort(orders.begin(), orders.end());
  const int64_t tries = n == 0 ? 0 : std::min<int64_t>(200, 400000000 / (n * n));
  for (size_t k = 0; k < orders.size() && best > bound; k++) {
    order = orders[k].second;
    place();
    std::set<std::vector<int>> tried = {order};
    for (int64_t i = 0; i < tries && best > bound; i++) {
      auto end = [&](int i) { return span(i) > 0 ? at[size_t(i)] + size(i) : -1; };
      const auto top = std::max_element(order.begin(), order.end(), [&](int a, int b) { return end(a) < end(b); });
      std::rotate(order.begin(), top, top + 1);
      if (!tried.insert(order).second) break;  // from here on in a circle
      place();
    }
  }
  return std::max<int64_t>(best, 0);
}

void* Memory::keep_bytes(int64_t bytes, const std::string& name, Purpose p) {
  ASSERT(current_ < 0 && bytes >= 0);
  if (!committed()) {
    int64_t at = kept_.empty() ? 0 : kept_.back().offset + round_up(kept_.back().bytes, kept_align);
    kept_.push_back({name, p, bytes, 0, 0, at, ""});
    arena_ = -1;
    return reinterpret_cast<char*>(int64_t(1) << 44) + at;
  }
  if (next_kept_ >= kept_.size() || kept_[next_kept_].name != name || kept_[next_kept_].bytes != bytes)
    throw Error(strf("internal error: '%s' (%lld bytes) is not what the memory plan holds at place %zu", name.c_str(),
                     (long long)bytes, next_kept_));
  return base_ + kept_[next_kept_++].offset;
}

void Memory::rewind() { next_kept_ = 0; }

void Memory::begin(const std::string& program) {
  ASSERT(current_ < 0);
  for (size_t i = 0; i < programs_.size(); i++)
    if (programs_[i].name == program) current_ = int(i);
  if (current_ < 0) {
    if (committed()) throw Error("internal error: program '" + program + "' was never planned");
    current_ = int(programs_.size());
    programs_.emplace_back();
    programs_.back().name = program;
  }
  phase_ = program;
  cursor_ = 0;
}

void Memory::begin_repeat() {
  ASSERT(current_ >= 0 && !repeating_);
  Program& p = programs_[size_t(current_)];
  if (p.repeat_from < 0) {
    if (p.recorded) throw Error("internal error: program '" + p.name + "' was planned without a part that is repeated");
    p.repeat_from = int64_t(p.order.size());
  }
  ASSERT(!p.recorded || int64_t(cursor_) == p.repeat_from || int64_t(cursor_) == p.repeat_to);
  cursor_ = size_t(p.repeat_from);
  repeating_ = true;
  live_before_repeat_ = live_.size();
}

void Memory::end_repeat() {
  ASSERT(repeating_ && live_.size() == live_before_repeat_);
  Program& p = programs_[size_t(current_)];
  if (p.repeat_to < 0) p.repeat_to = int64_t(p.order.size());
  else if (int64_t(cursor_) != p.repeat_to)
    throw Error("internal error: what program '" + p.name + "' repeats ended before its memory plan");
  repeating_ = false;
}

void Memory::end() {
  ASSERT(current_ >= 0 && live_.empty() && !repeating_);
  Program& p = programs_[size_t(current_)];
  if (p.recorded && cursor_ != p.order.size())
    throw Error("internal error: program '" + p.name + "' ended before its memory plan");
  if (!p.recorded) arena_ = -1;
  p.recorded = true;
  current_ = -1;
}

void Memory::phase(const std::string& name) { phase_ = name; }

void* Memory::take_bytes(int64_t bytes, const char* name, Purpose purpose) {
  ASSERT(current_ >= 0 && bytes >= 0);
  Program& p = programs_[size_t(current_)];
  auto add = [&](char* at, int index) {
    live_[at] = index;
    if (dev_.timeline) dev_.timeline->memory(purpose, round_up(bytes, align));
    return at;
  };
  // Distinct addresses that no one may follow: 16 TiB up, apart from the kept ones.
  auto fake = [](int index) { return reinterpret_cast<char*>(int64_t(1) << 45) + (int64_t(index) << 36); };
  if (records(p)) {
    const int index = int(p.bufs.size());
    p.bufs.push_back({name, purpose, bytes, p.clock++, -1, 0, phase_});
    p.order.push_back(index);
    return add(fake(index), index);
  }
  const int index = cursor_ < p.order.size() ? p.order[cursor_] : -1;
  if (index < 0 || p.bufs[size_t(index)].bytes != bytes || p.bufs[size_t(index)].name != name)
    throw Error(strf("internal error: in '%s', phase '%s': taking '%s' (%lld bytes) departs from the memory plan",
                     p.name.c_str(), phase_.c_str(), name, (long long)bytes));
  cursor_++;
  return add(committed() ? base_ + kept_bytes_ + p.bufs[size_t(index)].offset : fake(index), index);
}

void Memory::give(void* ptr) {
  if (current_ < 0) return;  // unwinding after an error
  Program& p = programs_[size_t(current_)];
  const auto found = live_.find(ptr);
  if (found == live_.end()) return;
  const int index = found->second;
  live_.erase(found);
  const Buf& b = p.bufs[size_t(index)];
  if (dev_.timeline) dev_.timeline->memory(b.purpose, -round_up(b.bytes, align));
  if (records(p)) {
    p.bufs[size_t(index)].dead = p.clock++;
    p.order.push_back(~index);
  } else if (cursor_ < p.order.size() && p.order[cursor_] == ~index) {
    cursor_++;
  } else if (!std::uncaught_exceptions()) {
    std::fprintf(stderr, "internal error: giving '%s' back departs from the memory plan\n",
                 p.bufs[size_t(index)].name.c_str());
    std::abort();  // called from destructors: nothing can be thrown here
  }
}

void Memory::pack_all() const {
  kept_bytes_ = kept_.empty() ? 0 : kept_.back().offset + round_up(kept_.back().bytes, kept_align);
  int64_t most = 0;
  for (Program& p : programs_) {
    std::vector<Life> lives;
    // A buffer of no bytes gets an address of its own too, since give() tells buffers by their addresses.
    for (const Buf& b : p.bufs) lives.push_back({std::max<int64_t>(b.bytes, 1), b.born, b.dead});
    std::vector<int64_t> offsets;
    most = std::max(most, pack(lives, align, &offsets));
    for (size_t i = 0; i < offsets.size(); i++) p.bufs[i].offset = offsets[i];
  }
  arena_ = round_up(std::max<int64_t>(kept_bytes_ + most, 1), arena_align);
}

int64_t Memory::arena_bytes() const {
  if (arena_ < 0) pack_all();
  return arena_;
}

MemoryReport Memory::report() const {
  MemoryReport r = live_report();
  r.arena = arena_bytes();
  return r;
}
int64_t Memory::live_peak() const { return live_report().live_peak; }

MemoryReport Memory::live_report() const {
  MemoryReport r = {};
  for (const Buf& b : kept_) {
    int64_t bytes = round_up(b.bytes, kept_align);
    if (b.purpose == Purpose::master) r.init[int(b.purpose)] += bytes, r.init_total += bytes;
    r.before_step[int(b.purpose)] += bytes, r.before_step_total += bytes;
  }
  int64_t most = -1, most_weights = 0;
  for (const Program& p : programs_) {
    int64_t live = 0, weights = 0;
    const Buf* peak = nullptr;  // the maximum falls right behind a birth
    for (int i : p.order) {
      const Buf& b = p.bufs[size_t(i >= 0 ? i : ~i)];
      const int64_t bytes = (i >= 0 ? 1 : -1) * round_up(b.bytes, align);
      live += bytes;
      if (b.purpose == Purpose::master) most_weights = std::max(most_weights, weights += bytes);
      if (live > most && i >= 0) most = live, peak = &b;
    }
    if (!peak) continue;
    std::copy(r.before_step, r.before_step + purposes, r.peak);
    int64_t largest = 0;
    for (const Buf& b : p.bufs) {
      if (b.born > peak->born || peak->born >= b.dead) continue;
      r.peak[int(b.purpose)] += round_up(b.bytes, align);
      if (b.bytes > largest) largest = b.bytes, r.largest = b.name;
    }
    r.peak_phase = peak->phase;
  }
  if (most < 0) std::copy(r.before_step, r.before_step + purposes, r.peak);
  r.init[int(Purpose::master)] += most_weights, r.init_total += most_weights;
  r.live_peak = r.before_step_total + std::max<int64_t>(most, 0);
  return r;
}

// What was asked for, what is free, and who has the rest.
std::string Memory::no_room(const Room& room) const {
  const double mib = 1048576.0;
  const MemoryReport r = report();
  const int64_t free = room.arena + room.reserve > room.free_now ? room.free_now : room.free_at_start;
  const std::string kept =
      room.reserve > 0 ? strf(" and %.0f MiB for CUDA's libraries", double(room.reserve) / mib) : "";
  const std::string shared = dev_.sharers > 1 ? strf(", for each of %d ranks that share it", dev_.sharers) : "";
  std::string others;
  if (dev_.backend == Backend::gpu)
    for (const std::string& user : memory_users(load_nvml(), nvml_uuid(name_gpu(dev_.ordinal).uuid)))
      others += (others.empty() ? "; in use there: " : ", ") + user;
  // Smaller batches do not help where weights, moments and slots fill it before the first step.
  const bool fits_before =
      Room{r.before_step_total, room.reserve, room.free_at_start, room.free_now, room.sharers}.fits();
  const std::string remedy =
      fits_before
          ? "lower --batch or --seq, or use more ranks"
          : strf(
                "what is allocated before step 1 takes %.0f MiB, whatever the batch: use more ranks or a smaller model",
                double(r.before_step_total) / mib);
  return strf(
      "no room in memory: the plan asks for %.0f MiB (peak in %s; largest there: %s)%s%s, and %s has "
      "%.0f MiB free of %.0f%s; nothing was allocated; %s",
      double(room.arena) / mib, r.peak_phase.c_str(), r.largest.c_str(), kept.c_str(), shared.c_str(),
      dev_.name.c_str(), double(free) / mib, double(dev_.total_bytes) / mib, others.c_str(), remedy.c_str());
}

void Memory::commit(int64_t reserve) {
  ASSERT(!committed() && current_ < 0 && reserve >= 0);
  const int64_t want = arena_bytes();
  ASSERT(dev_.backend == Backend::cpu || dev_.ordinal != Device::plan_only);
  Room room{want, reserve, dev_.free_bytes, dev_.free_bytes, dev_.sharers};
#if FSDP_CUDA
  const auto look = [&] { room.free_now = dev_.free_bytes_now(); };
  if (dev_.backend == Backend::gpu) look();
#endif
  if (!room.fits()) throw OutOfMemory(no_room(room));
  if (dev_.backend == Backend::cpu) {
    void* p = mmap(nullptr, size_t(want), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
      throw OutOfMemory(
          strf("no room in memory: the system refused the arena of %.0f MiB on rank %d: %s; lower --batch "
               "or --seq",
               double(want) / 1048576.0, this_rank(), std::strerror(errno)));
    base_ = static_cast<char*>(p);
    device_reported_ = want;
  } else {
#if FSDP_CUDA
    const int64_t before = room.free_now;
    // Another process may have been faster.
    if (!allocate && cudaMalloc(&base_, size_t(want)) == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      look();
      throw OutOfMemory(no_room(room));
    }
    CUDA_CHECK(cudaGetLastError());
    try {
      if (allocate) base_ = static_cast<char*>(allocate(want));
    } catch (const Error&) {
      look();
      if (room.fits()) throw;
      throw OutOfMemory(no_room(room));
    }
    look();
    device_reported_ = before - room.free_now;
#endif
  }
  next_kept_ = 0;
}

void Memory::poison() {
  ASSERT(committed());
  int64_t bytes = arena_ - kept_bytes_;
#if FSDP_CUDA
  if (dev_.backend == Backend::gpu) {
    CUDA_CHECK(cudaMemset(base_ + kept_bytes_, 0xff, size_t(bytes)));
    CUDA_CHECK(cudaDeviceSynchronize());  // the streams do not wait for the default stream
    return;
  }
#endif
  std::memset(base_ + kept_bytes_, 0xff, size_t(bytes));
}

Memory::~Memory() {
  if (!base_) return;
#if FSDP_CUDA
  if (dev_.backend == Backend::gpu) {
    if (free) free(base_);
    else cudaFree(base_);
    return;
  }
#endif
  munmap(base_, size_t(arena_));
}
