// The flight record: what each rank's last thousand collectives were, when they were issued, begun and done, and so
// what a rank waits in now. It is for the end of a run that goes wrong, and costs a fraction of a microsecond a
// collective.
//
// It lies in memory that the ranks of a host share, so that a rank that lives can tell of one that was killed or
// stopped. Nothing of it is a file before it is written, and nothing stays behind.
//
//   const int lane = flight::open_lane("gather");
//   flight::issue(lane, "all_gather", "block 3", bytes);  // the host, in the order of the lane's stream
//   flight::start(lane);                                  // where the collective runs
//   ...
//   flight::finish(lane);
//   flight::see(rank).text;                               // "step 12, all_gather of 'block 3'"
//
// For tests, FSDP_TEST_FAULT=RANK,STEP,SIGNAL,TEXT in the environment makes that rank send itself the signal in the
// step's first collective, "gather all_gather of 'block 3'", that has TEXT in it: where it starts, or on a GPU is
// issued.
//
// A lane is a queue in which one collective runs at a time, in the order of issue: a channel's, or the host's own. All
// of it may be called from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace flight {

constexpr int most_lanes = 32;  // open at once, of a rank

// The ranks of this host, by their order in the memory that they share; a rank alone has one record, its own. Called by
// init_mpi: `rank` in the world, collective over the host's ranks. Errors: MpiError.
void share_with_host(int rank, int ranks);
void unshare();  // collective over the host's ranks; what was recorded is gone

int open_lane(const char* name);  // Error when there are too many
void close_lane(int lane);
void issue(int lane, const char* what, const std::string& unit, int64_t bytes);
// Of the lane's oldest that has not started, or the one that has. ns: when, since 1970; 0: now.
void start(int lane, int64_t ns = 0);
void finish(int lane, int64_t ns = 0);
// The same in a CUDA graph: what is issued while graph number `graph` is made is issued with each of its launches.
void issue_in_graph(uint64_t graph, int lane, const char* what, const std::string& unit, int64_t bytes);
void launch_graph(uint64_t graph);

// What a device tells of a lane, without a synchronisation: see progress.h. The watchdog's poll() takes it over; where
// there is none, nobody does.
bool is_polled();
void set_polled(bool polled);
struct Marks {
  static constexpr int kept = 1024;  // times, of the latest
  struct Count {
    volatile uint64_t count;
    volatile int64_t ns[kept];  // of number n at n % kept
  } started, finished;
};
void follow(int lane, const Marks* marks,
            int64_t behind_ns);  // this host's clock minus theirs; until the lane is closed
void poll();

// Collectives of the host itself, started as they are issued. One in another (agree calls broadcast_text) is part of
// it.
class OnHost {
 public:
  explicit OnHost(const char* what);
  ~OnHost();
  OnHost(const OnHost&) = delete;
};

void begin_step(int64_t step);
void set_phase(const char* phase);  // "reading the checkpoint": what a rank does outside of a step; "": nothing

// ------------------------------------------------------------------------------------- reading, by who survives

enum class Process { lives, is_gone };
struct Sight {
  int rank = 0, pid = 0;
  std::string host, text;  // "step 12, all_gather of 'block 3'" or "step 12, after reduce_scatter of 'block 4'"
  int64_t step = 0;
  bool waits = false;     // in a collective that has started
  uint64_t progress = 0;  // grows with whatever this rank begins or ends
};
int records();  // on this host
int own();      // this rank's
Sight see(int record);
// Whether the process of a record is there. One that cannot be asked, in another container, lives.
Process process_of(int record);
void kill_process(int record);  // with SIGKILL, if it is that process still

// What has become of a rank, for the others of its host. Both may be called by a signal's handler.
enum class Fate : int {
  runs,
  has_ended,       // as it should, or because all ranks agreed to
  was_interrupted  // by a signal, with nothing to say
};
void set_fate(Fate fate);
Fate fate_of(int record);

// A fault is told of once a host, by who is first: true for that one. The others wait until it is done, or a while.
bool speaks_first();
bool spoken();         // somebody on this host has begun to tell of a fault
void done_speaking();  // and has told all
bool is_done_speaking();

// Where write_records writes; "": nowhere, as it is in the beginning.
void set_records_dir(const std::string& dir);
// Writes flight_rank{r}.jsonl for each rank of this host: a header line, a line a channel, then the collectives in the
// order in which they began. Returns what to tell of it: "; flight records: DIR/flight_rank*.jsonl", or what went
// wrong, or nothing.
std::string write_records(const std::string& reason);

}  // namespace flight
