#include "lib/program/halt.h"

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <ctime>

#include "lib/comm/flight.h"
#include "lib/device/error.h"
#include "lib/device/terminal.h"

namespace halt {
namespace {

enum class Phase { start, steps, findings };
std::atomic<Phase> phase{Phase::start};
std::atomic<bool> file_asks{false}, launcher_asks{false};
std::atomic<long long> first_ms{0};  // of a signal; 0: none came
std::atomic<bool> continued{false};  // by the launcher
const char* fresh_line = "";         // set before the handler

long long now_ms() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000LL + t.tv_nsec / 1000000;
}

// What a handler may call is little: no allocation, no lock, no printf.
void on_signal(int signal) {
  const int saved_errno = errno;
  const long long now = now_ms();
  long long none = 0;
  const Phase at = phase;
  if (at == Phase::steps && (first_ms.compare_exchange_strong(none, now) || now < none + 1000)) {
    errno = saved_errno;
    return;
  }
  if (flight::speaks_first()) {
    const char* const text =
        at == Phase::start ? "error: ended by a signal before the first step; there is nothing to save\n"
        : at == Phase::steps
            ? "error: a second signal: ended at once; nothing is saved of what came after the latest checkpoint\n"
            : "error: ended by a signal after the last step; what was to be saved and exported is written\n";
    for (const char* part : {fresh_line, text})
      if (write(2, part, std::strlen(part)) < 0) {}  // nobody is left to tell
    flight::done_speaking();
  }
  flight::set_fate(flight::Fate::was_interrupted);
  _exit(128 + signal);
}

void on_continue(int, siginfo_t* from, void*) {
  if (from->si_pid == getppid()) continued = true;
}

std::string file_in(const std::string& dir) { return dir + "/.HALT"; }
constexpr double by_file = 1e6;  // above any number of ranks

}  // namespace

void catch_signals() {
  fresh_line = terminal::clear_line(terminal::error);
  struct sigaction action = {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1}) {
    struct sigaction before;
    sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);  // nohup and a shell's & mean it
  }
}
void release_signals() {
  for (int signal : {SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGCONT}) {
    struct sigaction now;
    sigaction(signal, nullptr, &now);
    if (now.sa_handler == on_signal || now.sa_sigaction == on_continue) std::signal(signal, SIG_DFL);
  }
}
void finish_steps() {
  if (std::getenv("OMPI_COMM_WORLD_RANK")) {
    struct sigaction action = {};
    action.sa_sigaction = on_continue;
    action.sa_flags = SA_RESTART | SA_SIGINFO;
    sigemptyset(&action.sa_mask);
    sigaction(SIGCONT, &action, nullptr);
  }
  phase = Phase::steps;
}
void end_at_once() { phase = Phase::findings; }

Asked asked() { return file_asks ? Asked::by_file : first_ms != 0 || launcher_asks ? Asked::by_signal : Asked::no; }
void look(const std::string& dir) {
  static long long last = now_ms();
  const long long now = now_ms();
  // Who was stopped has not looked meanwhile.
  if (continued.exchange(false) && now - last < 400) launcher_asks = true;
  last = now;
  if (!dir.empty() && !file_asks && access(file_in(dir).c_str(), F_OK) == 0) file_asks = true;
}
std::string remove_file(const std::string& dir) {
  if (unlink(file_in(dir).c_str()) == 0 || errno == ENOENT) return "";
  return strf("%s cannot be removed, and will stop the next run: %s", file_in(dir).c_str(), std::strerror(errno));
}

double summand() { return asked() == Asked::by_file ? by_file : asked() == Asked::by_signal ? 1 : 0; }
std::string reason(double sum, const std::string& dir) {
  if (sum >= by_file) return file_in(dir) + " is there";
  return sum > 0 ? strf("a signal at %.0f rank%s", sum, sum > 1 ? "s" : "") : "";
}

}  // namespace halt
