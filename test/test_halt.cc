// lib/program/halt.h: which signals ask a run to stop, and which end it. Each case is a process of its own.
#include "test/catch.h"
#include "test/scratch.h"

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lib/comm/flight.h"
#include "lib/comm/world.h"
#include "lib/program/halt.h"

namespace {

void sleep_ms(int ms) { usleep(useconds_t(ms) * 1000); }

// Starts a child that says nothing.
pid_t start(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child != 0) return child;
  dup2(open("/dev/null", O_WRONLY), 2);
  _exit(body());
}
int status_of(pid_t child) {
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}
int status_of(const std::function<int()>& body) { return status_of(start(body)); }

// Looks as a watchdog does, for so long; what was asked then.
int look_for(int ms) {
  for (int at = 0; at < ms; at += 50) halt::look(""), sleep_ms(50);
  return int(halt::asked());
}

}  // namespace

TEST_CASE("a signal ends a run that has not begun, and asks one that has", "[halt]") {
  for (int signal : {SIGTERM, SIGINT, SIGUSR1}) {
    INFO("signal " << signal);
    CHECK(status_of([=] {
            halt::catch_signals();
            raise(signal);
            return 0;
          }) == 128 + signal);
    CHECK(status_of([=] {
            halt::catch_signals();
            halt::finish_steps();
            if (halt::asked() != halt::Asked::no || halt::summand() != 0) return 1;
            raise(signal);
            raise(signal);  // a launcher's, of the same
            return halt::asked() == halt::Asked::by_signal && halt::summand() == 1 ? 0 : 2;
          }) == 0);
    CHECK(status_of([=] {
            halt::catch_signals();
            halt::finish_steps();
            raise(signal);
            sleep_ms(1100);
            raise(signal);
            return 0;
          }) == 128 + signal);
    CHECK(status_of([=] {
            halt::catch_signals();
            halt::finish_steps();
            halt::end_at_once();
            raise(signal);
            return 0;
          }) == 128 + signal);
    CHECK(status_of([=] {
            halt::catch_signals();
            halt::release_signals();
            raise(signal);
            return 0;
          }) == -signal);
  }
}

TEST_CASE("a signal that the parent had ignored stays ignored", "[halt]") {
  CHECK(status_of([] {
          std::signal(SIGINT, SIG_IGN);
          halt::catch_signals();
          raise(SIGINT);
          return 0;
        }) == 0);
}

TEST_CASE("a launcher's SIGCONT asks a rank that was not stopped", "[halt]") {
  auto rank = [] {
    setenv("OMPI_COMM_WORLD_RANK", "0", 1);
    halt::catch_signals();
    halt::finish_steps();
    return look_for(3000);
  };
  const pid_t asked = start(rank), stopped = start(rank), beside = start(rank);
  for (int i = 0; i < 25; i++) {
    // One that comes before the handler is there, or while the rank itself stands still, asks nothing.
    kill(asked, SIGCONT);
    // Stopped and continued, as by Ctrl-Z and fg.
    if (i == 5) kill(stopped, SIGSTOP);
    if (i == 15) kill(stopped, SIGCONT);
    // From another process than the launcher.
    if (i == 10) status_of([=] { return kill(beside, SIGCONT); });
    sleep_ms(100);
  }
  CHECK(status_of(asked) == int(halt::Asked::by_signal));
  CHECK(status_of(stopped) == int(halt::Asked::no));
  CHECK(status_of(beside) == int(halt::Asked::no));
}

TEST_CASE("what ends all ranks names its rank once, the lower the sooner", "[halt]") {
  const ScratchDirectory scratch;
  const std::string& dir = scratch.path;
  // What a rank that throws says, and after how many seconds.
  auto thrown = [&](int rank, const std::function<void()>& f) {
    int ends[2];
    REQUIRE(pipe(ends) == 0);
    const auto begun = std::chrono::steady_clock::now();
    const pid_t child = fork();
    if (child == 0) {
      dup2(ends[1], 2);
      set_this_rank(rank);
      flight::set_records_dir(dir);
      or_abort(f);
      _exit(0);
    }
    close(ends[1]);
    const int status = status_of(child);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
    char said[200] = "";
    CHECK(read(ends[0], said, sizeof said - 1) > 0);
    close(ends[0]);
    CHECK(status == 1);
    return std::pair(std::string(said), seconds);
  };
  CHECK(thrown(0, [] { throw Error("out of luck"); }).first == "error: rank 0: out of luck\n");
  const auto [said, seconds] = thrown(3, [] { throw Error("the data of rank 3 is gone"); });
  CHECK(said == "error: the data of rank 3 is gone\n");
  CHECK(seconds >= 0.3);
  // Of what a library reports there is a flight record to look into.
  CHECK(std::filesystem::is_empty(dir));
  CHECK(thrown(0, [] { throw MpiError("MPI: it failed"); }).first.rfind("error: rank 0: MPI: it failed", 0) == 0);
  CHECK_FALSE(std::filesystem::is_empty(dir));
}

TEST_CASE("a file asks, and is removed once it is obeyed", "[halt]") {
  namespace fs = std::filesystem;
  const ScratchDirectory scratch;
  const std::string& dir = scratch.path;
  CHECK(halt::remove_file(dir).empty());  // none there
  CHECK(status_of([=] {
          halt::look(dir);
          if (halt::asked() != halt::Asked::no) return 1;
          std::ofstream(dir + "/.HALT") << "";
          halt::look(dir);
          if (halt::asked() != halt::Asked::by_file) return 2;
          if (halt::reason(halt::summand(), dir) != dir + "/.HALT is there") return 5;
          // One rank sees the file, and 500 get a signal.
          if (halt::reason(halt::summand() + 500, dir) != dir + "/.HALT is there") return 3;
          if (!halt::remove_file(dir).empty() || fs::exists(dir + "/.HALT")) return 4;
          return 0;
        }) == 0);
  fs::create_directories(dir + "/.HALT/x");
  CHECK(halt::remove_file(dir) == dir + "/.HALT cannot be removed, and will stop the next run: Is a directory");
  CHECK(halt::reason(0, dir).empty());
  CHECK(halt::reason(1, dir) == "a signal at 1 rank");
  CHECK(halt::reason(2, dir) == "a signal at 2 ranks");
  CHECK(halt::reason(999999, dir) == "a signal at 999999 ranks");
}
