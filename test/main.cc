// Runs the test cases and counts them. build/test_ranks runs every case on all ranks together: after each case the
// ranks tell each other how it went, so that they agree on the counts and a rank that left a case early, by a failure,
// does not leave the others waiting in a collective for ever.
//
// The last line of rank 0 is for test/run: RESULT passed failed skipped.
#include <chrono>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <unistd.h>

#if __has_include(<catch2/catch_all.hpp>)
#define CATCH_V3 1
#else
#define CATCH_V3 0
#define CATCH_CONFIG_RUNNER
#endif
#include <mpi.h>

#include "test/catch.h"

// Which program this is: of test/alone.cc, for build/test_unit, or test/ranks.cc, for build/test_ranks. Catch2 takes
// long to compile, and is the same for both.
extern const bool under_mpi;

namespace {

World world;
int passed = 0, failed = 0, skipped = 0;
bool skip_now = false;
std::string case_name;
std::unique_ptr<Device> devices[2];
bool one_gpu_each = false;

void print_result() {
  std::printf("RESULT %d %d %d\n", passed, failed, skipped);
  std::fflush(stdout);
}

MPI_Comm meeting;  // apart from what the tests send
FILE* quiet = nullptr;
int real_stdout = -1;

// TEST_HOSTS: this machine plays so many hosts, each with its share of the ranks, dealt out in turn (TEST_MAP=node) or
// in runs. To NCCL they are hosts, with sockets between them and GPUs of their own, so two GPUs do for four ranks on
// two.
void play_hosts() {
  const char* text = std::getenv("TEST_HOSTS");
  if (!text) return;
  const int hosts = std::atoi(text);
  ASSERT(hosts >= 1 && world.size % hosts == 0);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const char* map = std::getenv("TEST_MAP");
  const int host = map && map == std::string("node") ? rank % hosts : rank / (world.size / hosts);
  world = number_by_host(host);
  setenv("NCCL_HOSTID", ("host" + std::to_string(host)).c_str(), 1);
}

// Ranks other than 0 write into a file that nobody sees unless something fails.
void hush() {
  quiet = std::tmpfile();
  std::fflush(stdout);
  real_stdout = dup(1);
  if (quiet) dup2(fileno(quiet), 1);
}
void tell() {
  if (!quiet) return;
  std::fflush(stdout);
  std::rewind(quiet);
  char line[1024];
  while (std::fgets(line, sizeof line, quiet)) std::fprintf(stderr, "rank %d: %s", world.rank, line);
  std::fflush(stderr);
}

// The ranks meet after a case. One that waits too long says so and ends all: the others hang in the case.
void meet(const std::string& name, int flags[2]) {
  const char* limit = std::getenv("TEST_MEETING_SECONDS");
  const double seconds = limit ? std::atof(limit) : 60;
  int all[2] = {0, 0}, done = 0;
  MPI_Request request;
  MPI_Iallreduce(flags, all, 2, MPI_INT, MPI_MAX, meeting, &request);
  auto start = std::chrono::steady_clock::now();
  while (true) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done) break;
    if (std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() > seconds) {
      if (world.rank != 0) tell();
      std::fprintf(stderr, "rank %d of %d: \"%s\" %s here, but another rank has not come back from it after %.0f s\n",
                   world.rank, world.size, name.c_str(), flags[0] ? "failed" : "passed", seconds);
      if (world.rank != 0 && real_stdout >= 0) dup2(real_stdout, 1);
      ++failed;
      print_result();
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  flags[0] = all[0], flags[1] = all[1];
}

#if CATCH_V3
using ListenerBase = Catch::EventListenerBase;
#else
using ListenerBase = Catch::TestEventListenerBase;
#endif

struct Counter : ListenerBase {
  using ListenerBase::ListenerBase;
  void testCaseStarting(const Catch::TestCaseInfo& info) override {
    ListenerBase::testCaseStarting(info);
    skip_now = false;
    case_name = info.name;
  }
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    ListenerBase::testCaseEnded(stats);
    int flags[2] = {!stats.totals.assertions.allOk(), skip_now};
    if (under_mpi) meet(case_name, flags);
    ++(flags[0] ? failed : flags[1] ? skipped : passed);
  }
};
CATCH_REGISTER_LISTENER(Counter)

}  // namespace

const World& test_world() { return world; }
bool one_gpu_a_rank() { return one_gpu_each; }

void skip_test(const char* why) {
  skip_now = true;
  std::printf("skipped: %s: %s\n", case_name.c_str(), why);
  std::fflush(stdout);
}

Device& test_device(Backend backend) {
  auto& device = devices[backend == Backend::gpu];
  if (!device) {
    device = std::make_unique<Device>(backend, backend == Backend::gpu ? world.local_rank % gpus() : 0);
    device->mode = Mode::run;
  }
  return *device;
}

int main(int argc, char** argv) {
  if (under_mpi) {
    world = init_mpi(&argc, &argv);
    play_hosts();
    MPI_Comm_dup(MPI_COMM_WORLD, &meeting);
    one_gpu_each = have_gpu() && assign_device(Backend::gpu, world).host_cards == world.local_size;
    if (world.rank != 0) hush();
  } else {
    one_gpu_each = have_gpu();
  }
  // All ranks need the same order, and the same random numbers.
  std::vector<const char*> arguments(argv, argv + argc);
  arguments.insert(arguments.end(), {"--order", "decl", "--rng-seed", "1", CATCH_V3 ? "--colour-mode" : "--use-colour",
                                     CATCH_V3 ? "none" : "no"});
  Catch::Session session;
  int status = session.applyCommandLine(int(arguments.size()), arguments.data());
  if (status == 0) status = session.run();
  for (auto& device : devices) device.reset();
  if (world.rank == 0) print_result();
  if (under_mpi) {
    if (world.rank != 0 && status != 0) tell();
    MPI_Comm_free(&meeting);
    finish_mpi();
  }
  return status != 0 || failed != 0;
}
