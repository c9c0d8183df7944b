#include "lib/comm/watchdog.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "lib/comm/flight.h"
#include "lib/comm/mpi_calls.h"

namespace {

constexpr double tick_s = 0.1, exchange_s = 0.5;
constexpr int to_rank_0 = 1, from_rank_0 = 2;  // MPI's tags

// What a rank tells rank 0, and rank 0 every rank.
struct State {
  int32_t pid = 0, waits = 0;
  uint64_t progress = 0;
  char host[64] = "", text[128] = "";
};

State own_state() {
  const flight::Sight s = flight::see(flight::own());
  State state;
  state.pid = s.pid, state.waits = s.waits, state.progress = s.progress;
  std::snprintf(state.host, sizeof state.host, "%s", s.host.c_str());
  std::snprintf(state.text, sizeof state.text, "%s", s.text.c_str());
  return state;
}

std::string process_text(const std::string& host, int pid) { return strf("%s, pid %d", host.c_str(), pid); }
RankSeen seen(int rank, const State& s) { return {rank, process_text(s.host, s.pid), s.text, s.waits != 0}; }
RankSeen seen(const flight::Sight& s) { return {s.rank, process_text(s.host, s.pid), s.text, s.waits}; }

std::mutex errors_mutex;
std::map<int, std::function<std::string()>> errors;

}  // namespace

int watch_errors(std::function<std::string()> error) {
  std::lock_guard<std::mutex> lock(errors_mutex);
  const int number = errors.empty() ? 0 : errors.rbegin()->first + 1;
  errors[number] = std::move(error);
  return number;
}
void unwatch_errors(int number) {
  std::lock_guard<std::mutex> lock(errors_mutex);
  errors.erase(number);
}

std::string fault_text(const std::string& what, const std::vector<RankSeen>& others) {
  constexpr size_t most = 4;
  std::string text = what;
  for (size_t i = 0; i < others.size() && i < most; i++)
    text += strf("%srank %d %s %s", i ? ", " : "; ", others[i].rank, others[i].waits ? "waits in" : "is in",
                 others[i].text.c_str());
  if (others.size() > most) text += strf(", and %zu more ranks", others.size() - most);
  return text;
}

struct Watchdog::Impl {
  World world;
  WatchdogOptions options;
  MPI_Comm mpi = MPI_COMM_NULL;
  std::mutex mutex;
  std::condition_variable stopped;
  bool stop = false;
  std::thread thread;

  // The thread's. Its clock counts no tick as more than longest_tick().
  double clock = 0, told = -exchange_s, moved = 0;
  uint64_t progress = 0;
  State mine, answer;                            // other ranks: what is sent, what rank 0 said last
  std::vector<State> board, incoming, outgoing;  // rank 0: what the ranks said last; what is on its way
  std::vector<double> heard;                     // when; of rank 0 alone where this is another
  std::vector<MPI_Request> receiving, sending;   // rank 0: of each rank; else one
  bool in_exchange = false;

  // Long enough for what ranks say of themselves to come in.
  double limit() const { return std::max({options.timeout_s / 2, options.timeout_s - 2, 4 * exchange_s}); }
  double longest_tick() const { return std::max(0.5, limit() / 4); }
  void begin();
  void end();
  void tick();
  void look_at_mates();
  void look_at_errors();
  void collect();
  void report();
  void judge();
  std::vector<RankSeen> others(int but) const;
  [[noreturn]] void end_run(const std::string& what, int missing, const std::vector<RankSeen>& all);
};

void Watchdog::Impl::begin() {
  if (world.size == 1) return;
  MPI_CHECK(MPI_Comm_dup(all_ranks(), &mpi));
  MPI_CHECK(MPI_Comm_set_errhandler(mpi, MPI_ERRORS_RETURN));
  const size_t ranks = world.rank == 0 ? size_t(world.size) : 1;
  board.resize(ranks), incoming.resize(ranks), outgoing.resize(ranks), heard.assign(ranks, 0);
  receiving.assign(ranks, MPI_REQUEST_NULL), sending.assign(ranks, MPI_REQUEST_NULL);
  // Until a rank has told, it is known as this.
  for (State& s : board) std::snprintf(s.text, sizeof s.text, "the start"), std::snprintf(s.host, sizeof s.host, "?");
  std::snprintf(answer.text, sizeof answer.text, "the start"), std::snprintf(answer.host, sizeof answer.host, "?");
  for (int r = 1; world.rank == 0 && r < world.size; r++)
    MPI_CHECK(MPI_Irecv(&incoming[size_t(r)], sizeof(State), MPI_BYTE, r, to_rank_0, mpi, &receiving[size_t(r)]));
}

// The communicator stays until MPI ends: what a rank sent before it stopped may still be on its way.
void Watchdog::Impl::end() {
  for (MPI_Request& r : receiving)
    if (r != MPI_REQUEST_NULL) MPI_Cancel(&r), MPI_Wait(&r, MPI_STATUS_IGNORE);
  for (MPI_Request& r : sending)
    if (r != MPI_REQUEST_NULL) MPI_Request_free(&r);
}

// All that is known of the ranks; of this host from its records, which are fresher than what was sent.
std::vector<RankSeen> Watchdog::Impl::others(int but) const {
  std::map<int, RankSeen> all;
  for (size_t r = 1; world.rank == 0 && r < board.size(); r++) all[int(r)] = seen(int(r), board[r]);
  for (int i = 0; i < flight::records(); i++) {
    const flight::Sight s = flight::see(i);
    all[s.rank] = seen(s);
  }
  std::vector<RankSeen> list;
  for (const auto& [rank, r] : all)
    if (rank != but) list.push_back(r);
  return list;
}

void Watchdog::Impl::end_run(const std::string& what, int missing, const std::vector<RankSeen>& all) {
  // A rank that is stopped would outlive the run where nobody but us ends it. Once all is said: who finds it dead would
  // say something else.
  std::thread([missing] {
    while (!flight::is_done_speaking()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    for (int i = 0; i < flight::records(); i++)
      if (flight::see(i).rank == missing) flight::kill_process(i);
  }).detach();
  abort_all_ranks(fault_text(what, all), 1, Cause::fault);
}

void Watchdog::Impl::look_at_mates() {
  if (flight::spoken()) abort_all_ranks("", 1);  // not the first: says nothing
  for (int i = 0; i < flight::records(); i++) {
    if (i == flight::own()) continue;
    const flight::Fate fate = flight::fate_of(i);
    if (fate == flight::Fate::was_interrupted) _exit(128 + SIGTERM);
    if (fate == flight::Fate::has_ended || flight::process_of(i) == flight::Process::lives) continue;
    if (flight::fate_of(i) != fate || flight::spoken()) continue;  // it has only just gone, and not without a word
    const flight::Sight s = flight::see(i);
    const RankSeen r = seen(s);
    end_run(strf("rank %d (%s) is gone, killed or crashed; it was last seen in %s", r.rank, r.process.c_str(),
                 r.text.c_str()),
            r.rank, others(r.rank));
  }
}

void Watchdog::Impl::look_at_errors() {
  std::string error;
  {
    std::lock_guard<std::mutex> lock(errors_mutex);
    for (const auto& [number, text] : errors)
      if (error.empty()) error = text();
  }
  if (error.empty()) return;
  const RankSeen r = seen(flight::see(flight::own()));
  end_run(strf("rank %d (%s): %s; it is in %s", r.rank, r.process.c_str(), error.c_str(), r.text.c_str()), -1,
          others(r.rank));
}

// Rank 0: takes what the ranks have told, and answers each.
void Watchdog::Impl::collect() {
  const State own = own_state();
  board[0] = own, heard[0] = clock;
  for (int r = 1; r < world.size; r++) {
    const size_t i = size_t(r);
    int done = 0, sent = 0;
    MPI_CHECK(MPI_Test(&receiving[i], &done, MPI_STATUS_IGNORE));
    MPI_CHECK(MPI_Test(&sending[i], &sent, MPI_STATUS_IGNORE));
    if (!done || !sent) continue;  // it tells again when it has the answer
    board[i] = incoming[i], heard[i] = clock;
    MPI_CHECK(MPI_Irecv(&incoming[i], sizeof(State), MPI_BYTE, r, to_rank_0, mpi, &receiving[i]));
    outgoing[i] = own;
    MPI_CHECK(MPI_Isend(&outgoing[i], sizeof(State), MPI_BYTE, r, from_rank_0, mpi, &sending[i]));
  }
}

// Other ranks: tells rank 0, and again half a second after the answer.
void Watchdog::Impl::report() {
  if (in_exchange) {
    int sent = 0, answered = 0;
    MPI_CHECK(MPI_Test(&sending[0], &sent, MPI_STATUS_IGNORE));
    MPI_CHECK(MPI_Test(&receiving[0], &answered, MPI_STATUS_IGNORE));
    if (answered) heard[0] = clock, answer = incoming[0];
    in_exchange = !sent || receiving[0] != MPI_REQUEST_NULL;
  }
  if (in_exchange || clock - told < exchange_s) return;
  told = clock, mine = own_state();
  MPI_CHECK(MPI_Irecv(&incoming[0], sizeof(State), MPI_BYTE, 0, from_rank_0, mpi, &receiving[0]));
  MPI_CHECK(MPI_Isend(&mine, sizeof(State), MPI_BYTE, 0, to_rank_0, mpi, &sending[0]));
  in_exchange = true;
}

void Watchdog::Impl::judge() {
  if (options.timeout_s <= 0) return;
  // Rank 0 is missed by all others: the lower speak sooner.
  const double patience = limit() + std::min(3.0, 0.02 * world.rank);
  int missing = -1;
  uint64_t now = 0;
  bool all_wait = true, all_heard = true;
  for (size_t r = 0; r < board.size(); r++) {
    if (clock - heard[r] > patience && missing < 0) missing = int(r);
    now += board[r].progress, all_wait = all_wait && board[r].waits;
    all_heard = all_heard && clock - heard[r] < 4 * exchange_s;
  }
  if (missing >= 0) {
    RankSeen r = seen(missing, world.rank == 0 ? board[size_t(missing)] : answer);
    for (int i = 0; i < flight::records(); i++)
      if (flight::see(i).rank == missing) r = seen(flight::see(i));
    end_run(strf("rank %d (%s) has not answered for %.0f s; it was last seen in %s", missing, r.process.c_str(),
                 clock - heard[size_t(missing)], r.text.c_str()),
            missing, others(missing));
  }
  if (world.rank != 0) return;
  if (!all_wait || !all_heard || now != std::exchange(progress, now)) moved = clock;
  if (clock - moved > limit())
    end_run(strf("all ranks wait and nothing has moved for %.0f s", clock - moved), -1, others(-1));
}

void Watchdog::Impl::tick() {
  flight::poll();
  look_at_mates();
  look_at_errors();
  if (options.each_tick) options.each_tick();
  if (world.size == 1) return;
  if (world.rank == 0) collect();
  else report();
  judge();
}

Watchdog::Watchdog(const World& world, const WatchdogOptions& options) : impl_(std::make_unique<Impl>()) {
  impl_->world = world, impl_->options = options;
  if (world.size > 1) flight::set_records_dir(options.records_dir);
  impl_->begin();
  flight::set_polled(options.timeout_s > 0);
  impl_->thread = std::thread([this] { or_abort([this] { loop(); }); });
}

void Watchdog::loop() {
  using Clock = std::chrono::steady_clock;
  Impl& i = *impl_;
  auto last = Clock::now();
  std::unique_lock<std::mutex> lock(i.mutex);
  while (!i.stopped.wait_for(lock, std::chrono::duration<double>(tick_s), [&] { return i.stop; })) {
    const auto now = Clock::now();
    i.clock += std::min(i.longest_tick(), std::chrono::duration<double>(now - last).count());
    last = now;
    lock.unlock();
    i.tick();
    lock.lock();
  }
}

Watchdog::~Watchdog() {
  barrier();
  flight::set_fate(flight::Fate::has_ended);
  {
    std::lock_guard<std::mutex> lock(impl_->mutex);
    impl_->stop = true;
    impl_->stopped.notify_all();
  }
  impl_->thread.join();
  flight::set_polled(false);
  impl_->end();
  flight::set_records_dir("");
}
