#include "lib/comm/flight.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <new>

#include "nlohmann/json.hpp"

#include "lib/comm/mpi_calls.h"
#include "lib/device/error.h"

namespace flight {
namespace {

using ll = long long;

constexpr int kept = 1000;

struct Entry {
  int64_t step, bytes;
  int64_t number;                              // of its lane, from 1
  int64_t issued_ns, started_ns, finished_ns;  // since 1970; 0: not yet
  char lane[12], what[20], unit[44];
};

// Written by one rank and read by the others of its host at any moment: an entry that changes meanwhile is left out.
struct Slot {
  std::atomic<uint64_t> version{0};  // odd: being written
  Entry entry;
};
struct LaneState {
  std::atomic<bool> open{false};
  std::atomic<int64_t> issued{0}, started{0}, finished{0};
  Slot now;  // the latest that has started
};
struct Record {
  int rank = 0, pid = 0;
  int64_t born = 0;        // when the process started, in the kernel's ticks: a number of a process comes again
  uint64_t pid_space = 0;  // in which its pid is known
  char host[64] = "";
  std::atomic<int> fate{int(Fate::runs)};
  std::atomic<int64_t> step{0};
  std::atomic<uint64_t> progress{0};
  char phase_text[64] = "";
  LaneState lanes[most_lanes];
  std::atomic<uint64_t> written{0};  // entries of the ring, in all
  Slot ring[kept];
  // Of the first record, for the host.
  std::atomic<int> speaker{-1};
  std::atomic<bool> has_spoken{false};
};

struct Lane {
  std::string name;
  std::deque<Entry> issued;  // and not started
  uint64_t at = 0;           // of the one that has started, in the ring
  const Marks* marks = nullptr;
  int64_t behind_ns = 0;  // this host's clock minus theirs
};
struct Issue {
  int lane;
  const char* what;
  std::string unit;
  int64_t bytes;
};

std::mutex mutex;
std::unique_ptr<Record> alone = std::make_unique<Record>();
std::vector<Record*> shared;  // of the host's ranks; empty: this one has `alone`
Record* mine = alone.get();
int own_index = 0;
MPI_Win window = MPI_WIN_NULL;
Lane lanes[most_lanes];
std::map<uint64_t, std::vector<Issue>> graphs;
thread_local int depth = 0;
std::string records_dir;
std::atomic<bool> polled{false};

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

template <size_t n>
void set_text(char (&to)[n], const std::string& text) {
  std::snprintf(to, n, "%s", text.c_str());
}

template <class F>
void change(Slot* s, F f) {
  s->version.fetch_add(1);
  f(&s->entry);
  s->version.fetch_add(1);
}
// False if it is being written; a rank that was killed there leaves one so.
bool read(const Slot& s, Entry* e) {
  const uint64_t before = s.version.load();
  std::memcpy(e, &s.entry, sizeof *e);
  std::atomic_thread_fence(std::memory_order_acquire);
  e->lane[sizeof e->lane - 1] = e->what[sizeof e->what - 1] = e->unit[sizeof e->unit - 1] = 0;
  return before % 2 == 0 && s.version.load() == before;
}

// When a process was started and whether it runs: /proc/PID/stat, whose second field is a name that may hold anything.
bool process_stat(int pid, char* state, int64_t* born) {
  std::ifstream in("/proc/" + std::to_string(pid) + "/stat");
  std::string text;
  std::getline(in, text);
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos) return false;
  return std::sscanf(text.c_str() + name_end + 1,
                     " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %" SCNd64, state,
                     born) == 2;
}

uint64_t pid_space() {
  struct stat s;
  return ::stat("/proc/self/ns/pid", &s) == 0 ? uint64_t(s.st_ino) : 0;
}

void name_record(Record* r, int rank) {
  char state = 0;
  r->rank = rank, r->pid = int(getpid()), r->pid_space = pid_space();
  if (!process_stat(r->pid, &state, &r->born)) r->born = 0;
  gethostname(r->host, sizeof r->host - 1);
}

// Lanes stay open where the record moves.
void move_to(Record* to) {
  for (int i = 0; i < most_lanes; i++) {
    to->lanes[i].open = !lanes[i].name.empty();
    lanes[i].issued.clear();
  }
  mine = to;
}

struct TestFault {
  int rank = -1, signal = 0;
  ll step = 0;
  std::string text;
} test_fault;

void read_test_fault() {
  const char* text = std::getenv("FSDP_TEST_FAULT");
  int used = 0;
  if (!text) return;
  if (std::sscanf(text, "%d,%lld,%d,%n", &test_fault.rank, &test_fault.step, &test_fault.signal, &used) != 3 || !used)
    throw UsageError(strf("FSDP_TEST_FAULT=%s: give RANK,STEP,SIGNAL,TEXT", text));
  test_fault.text = text + used;
}
void test_fault_at(const Entry& e) {
  if (test_fault.rank != mine->rank || test_fault.step != e.step) return;
  if (strf("%s %s of '%s'", e.lane, e.what, e.unit).find(test_fault.text) == std::string::npos) return;
  test_fault.rank = -1;
  raise(test_fault.signal);
}

Record& record(int i) { return shared.empty() ? *mine : *shared[size_t(i)]; }

void start_locked(int lane, int64_t ns) {
  Lane& l = lanes[lane];
  if (l.issued.empty()) return;
  LaneState& state = mine->lanes[lane];
  Entry e = l.issued.front();
  l.issued.pop_front();
  e.started_ns = ns ? ns : now_ns();
  l.at = mine->written.load();
  change(&mine->ring[l.at % kept], [&](Entry* to) { *to = e; });
  change(&state.now, [&](Entry* to) { *to = e; });
  mine->written++, state.started++, mine->progress++;
  if (!l.marks) test_fault_at(e);
}

void finish_locked(int lane, int64_t ns) {
  Lane& l = lanes[lane];
  LaneState& state = mine->lanes[lane];
  if (state.finished >= state.started) return;
  const int64_t at = ns ? ns : now_ns();
  auto set = [&](Entry* e) { e->finished_ns = at; };
  if (l.at + kept > mine->written) change(&mine->ring[l.at % kept], set);
  change(&state.now, set);
  state.finished++, mine->progress++;
}

void issue_locked(int lane, const char* what, const std::string& unit, int64_t bytes) {
  Entry e = {};
  e.step = mine->step, e.bytes = bytes, e.number = ++mine->lanes[lane].issued, e.issued_ns = now_ns();
  set_text(e.lane, lanes[lane].name);
  set_text(e.what, what);
  set_text(e.unit, unit);
  lanes[lane].issued.push_back(e);
  if (lanes[lane].marks) test_fault_at(e);
}

}  // namespace

void share_with_host(int rank, int ranks) {
  name_record(mine, rank);
  read_test_fault();
  if (ranks == 1) return;
  MPI_Comm mates;
  MPI_CHECK(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &mates));
  MPI_CHECK(MPI_Comm_set_errhandler(mates, MPI_ERRORS_RETURN));
  int size = 0;
  MPI_CHECK(MPI_Comm_rank(mates, &own_index));
  MPI_CHECK(MPI_Comm_size(mates, &size));
  void* memory = nullptr;
  const MPI_Aint bytes = MPI_Aint(sizeof(Record) + alignof(Record));
  try {
    MPI_CHECK(MPI_Win_allocate_shared(bytes, 1, MPI_INFO_NULL, mates, &memory, &window));
  } catch (const MpiError& e) {
    throw MpiError(
        strf("%s, and whether /dev/shm has room for %lld bytes a rank", e.what(), static_cast<long long>(bytes)));
  }
  for (int i = 0; i < size; i++) {
    MPI_Aint there = 0;
    int unit = 0;
    size_t space = size_t(bytes);
    MPI_CHECK(MPI_Win_shared_query(window, i, &there, &unit, &memory));
    void* aligned = std::align(alignof(Record), sizeof(Record), memory, space);
    ASSERT(aligned != nullptr);
    shared.push_back(static_cast<Record*>(aligned));
  }
  std::lock_guard<std::mutex> lock(mutex);
  move_to(new (shared[size_t(own_index)]) Record);
  name_record(mine, rank);
  MPI_CHECK(MPI_Barrier(mates));  // nobody reads a record that is not made
  MPI_CHECK(MPI_Comm_free(&mates));
}

void unshare() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    alone = std::make_unique<Record>();
    move_to(alone.get());
    own_index = 0;
    shared.clear();
  }
  if (window != MPI_WIN_NULL) MPI_Win_free(&window);
}

int open_lane(const char* name) {
  std::lock_guard<std::mutex> lock(mutex);
  for (int i = 0; i < most_lanes; i++) {
    LaneState& s = mine->lanes[i];
    if (s.open) continue;
    s.issued = 0, s.started = 0, s.finished = 0;
    change(&s.now, [](Entry* e) { *e = {}; });
    lanes[i] = Lane();
    lanes[i].name = name;
    s.open = true;
    return i;
  }
  throw Error(strf("internal error: more than %d channels", most_lanes));
}
void close_lane(int lane) {
  std::lock_guard<std::mutex> lock(mutex);
  mine->lanes[lane].open = false;
  lanes[lane] = Lane();
}

void issue(int lane, const char* what, const std::string& unit, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  issue_locked(lane, what, unit, bytes);
}
void start(int lane, int64_t ns) {
  std::lock_guard<std::mutex> lock(mutex);
  start_locked(lane, ns);
}
void finish(int lane, int64_t ns) {
  std::lock_guard<std::mutex> lock(mutex);
  finish_locked(lane, ns);
}

void issue_in_graph(uint64_t graph, int lane, const char* what, const std::string& unit, int64_t bytes) {
  std::lock_guard<std::mutex> lock(mutex);
  graphs[graph].push_back({lane, what, unit, bytes});
}
void launch_graph(uint64_t graph) {
  std::lock_guard<std::mutex> lock(mutex);
  for (const Issue& i : graphs[graph]) issue_locked(i.lane, i.what, i.unit, i.bytes);
}

bool is_polled() { return polled; }
void set_polled(bool p) { polled = p; }
void follow(int lane, const Marks* marks, int64_t behind_ns) {
  std::lock_guard<std::mutex> lock(mutex);
  lanes[lane].marks = marks, lanes[lane].behind_ns = behind_ns;
}
void poll() {
  std::lock_guard<std::mutex> lock(mutex);
  for (int i = 0; i < most_lanes; i++) {
    const Marks* m = lanes[i].marks;
    if (!m) continue;
    const LaneState& s = mine->lanes[i];
    // One runs at a time; finished is read first, so that what it counts has started.
    const int64_t finished = int64_t(m->finished.count), started = int64_t(m->started.count);
    for (;;) {
      if (s.finished < s.started && s.finished < finished)
        finish_locked(i, m->finished.ns[(s.finished + 1) % Marks::kept] + lanes[i].behind_ns);
      else if (s.finished == s.started && s.started < started && !lanes[i].issued.empty())
        start_locked(i, m->started.ns[(s.started + 1) % Marks::kept] + lanes[i].behind_ns);
      else break;
    }
  }
}

static int host_lane() {
  static const int lane = open_lane("host");
  return lane;
}
OnHost::OnHost(const char* what) {
  const int host = host_lane();
  if (depth++ > 0) return;
  std::lock_guard<std::mutex> lock(mutex);
  issue_locked(host, what, "", 0);
  start_locked(host, 0);
}
OnHost::~OnHost() {
  if (--depth > 0) return;
  std::lock_guard<std::mutex> lock(mutex);
  finish_locked(host_lane(), 0);
}

void begin_step(int64_t step) { mine->step = step, mine->progress++; }

void set_phase(const char* phase) {
  std::lock_guard<std::mutex> lock(mutex);
  set_text(mine->phase_text, phase);
  mine->progress++;
}

// ---------------------------------------------------------------------------------------------------------- reading

int records() { return shared.empty() ? 1 : int(shared.size()); }
int own() { return own_index; }

Sight see(int i) {
  const Record& r = record(i);
  Sight s;
  s.rank = r.rank, s.pid = r.pid, s.host = r.host, s.step = r.step, s.progress = r.progress;
  Entry waits = {}, last = {};
  for (const LaneState& l : r.lanes) {
    Entry e;
    if (!l.open || l.started == 0) continue;
    read(l.now, &e);
    // The one that began first holds up the others.
    if (l.started > l.finished && (!waits.started_ns || e.started_ns < waits.started_ns)) waits = e;
    if (l.started == l.finished && e.finished_ns > last.finished_ns) last = e;
  }
  s.waits = waits.started_ns != 0;
  auto name = [](const Entry& e) { return std::string(e.what) + (*e.unit ? strf(" of '%s'", e.unit) : std::string()); };
  const std::string phase = r.phase_text;
  s.text = !phase.empty() ? phase
           : s.step > 0   ? strf("step %lld", ll(s.waits && waits.step ? waits.step : s.step))
                          : "the start";
  if (s.waits) s.text += ", " + name(waits);
  else if (last.finished_ns && phase.empty()) s.text += ", after " + name(last);
  return s;
}

Process process_of(int i) {
  const Record& r = record(i);
  if (r.pid_space == 0 || r.pid_space != pid_space()) return Process::lives;
  if (kill(r.pid, 0) != 0) return errno == ESRCH ? Process::is_gone : Process::lives;
  char state = 0;
  int64_t born = 0;
  if (!process_stat(r.pid, &state, &born)) return Process::lives;
  return state == 'Z' || state == 'X' || born != r.born ? Process::is_gone : Process::lives;
}
void kill_process(int i) {
  const Record& r = record(i);
  if (r.pid_space != 0 && r.pid_space == pid_space() && r.pid != int(getpid()) && process_of(i) == Process::lives)
    kill(r.pid, SIGKILL);
}

void set_fate(Fate fate) { mine->fate = int(fate); }
Fate fate_of(int i) { return Fate(record(i).fate.load()); }

bool speaks_first() {
  int nobody = -1;
  return record(0).speaker.compare_exchange_strong(nobody, own_index);
}
bool spoken() { return record(0).speaker >= 0; }
void done_speaking() { record(0).has_spoken = true; }
bool is_done_speaking() { return record(0).has_spoken; }

namespace {
std::string iso8601(int64_t ns) {
  const time_t seconds = time_t(ns / 1000000000);
  struct tm utc;
  gmtime_r(&seconds, &utc);
  char text[40];
  std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
  return strf("%s.%06lldZ", text, ll(ns % 1000000000 / 1000));
}

std::string text_of(const Record& r, const Sight& s, const std::string& reason) {
  using nlohmann::json;
  auto line = [](const json& j) { return j.dump(-1, ' ', false, json::error_handler_t::replace) + "\n"; };
  std::string text = line({{"type", "flight_record"},
                           {"rank", r.rank},
                           {"host", r.host},
                           {"pid", r.pid},
                           {"step", r.step.load()},
                           {"seen_in", s.text},
                           {"written", iso8601(now_ns())},
                           {"written_by_rank", mine->rank},
                           {"reason", reason}});
  for (const LaneState& l : r.lanes) {
    Entry e;
    if (!l.open || l.issued == 0) continue;
    read(l.now, &e);
    text += line({{"type", "channel"},
                  {"channel", e.lane},
                  {"issued", l.issued.load()},
                  {"started", l.started.load()},
                  {"finished", l.finished.load()}});
  }
  const uint64_t end = r.written, from = end > kept ? end - kept : 0;
  for (uint64_t i = from; i < end; i++) {
    Entry e;
    if (!read(r.ring[i % kept], &e)) continue;
    json j = {{"type", "collective"},
              {"step", e.step},
              {"channel", e.lane},
              {"number", e.number},
              {"what", e.what},
              {"unit", e.unit},
              {"bytes", e.bytes},
              {"issued", iso8601(e.issued_ns)},
              {"started", iso8601(e.started_ns)}};
    if (e.finished_ns) j["finished"] = iso8601(e.finished_ns);
    else j["finished"] = nullptr;
    text += line(j);
  }
  return text;
}

// Fresh files: a record of an earlier run is replaced, a link that somebody put there is not followed.
std::string write_file(const std::string& path, const std::string& text) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
  if (file < 0) return path + ": " + std::strerror(errno);
  std::string error;
  for (size_t at = 0; at < text.size() && error.empty();) {
    const ssize_t n = ::write(file, text.data() + at, text.size() - at);
    if (n < 0 && errno != EINTR) error = path + ": " + std::strerror(errno);
    if (n > 0) at += size_t(n);
  }
  ::close(file);
  return error;
}
}  // namespace

void set_records_dir(const std::string& dir) { records_dir = dir; }

std::string write_records(const std::string& reason) {
  if (records_dir.empty()) return "";
  ::mkdir(records_dir.c_str(), 0777);  // if it was not made yet; if it cannot be, the files tell
  std::string error;
  for (int i = 0; i < records(); i++) {
    const Record& r = record(i);
    const std::string path = strf("%s/flight_rank%d.jsonl", records_dir.c_str(), r.rank);
    const std::string wrong = write_file(path, text_of(r, see(i), reason));
    if (error.empty()) error = wrong;
  }
  return error.empty() ? "; flight records: " + records_dir + "/flight_rank*.jsonl" : "; no flight records: " + error;
}

}  // namespace flight
