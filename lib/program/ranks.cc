#include "lib/program/ranks.h"

#include <memory>

#include "lib/comm/watchdog.h"
#include "lib/device/terminal.h"
#include "lib/program/halt.h"
#include "lib/program/start.h"

// Where --timeout is not given, hosts have longer to start than a rank has to answer.
static std::unique_ptr<Deadline> deadline_of_start(const Options& o, const std::string& error) {
  const double seconds = error.empty() && o.gives("timeout") ? o.timeout : 300;
  return std::make_unique<Deadline>(
      seconds, strf("error: MPI did not start within %g s: see whether all ranks and hosts are there and run", seconds),
      1);
}

static std::unique_ptr<Deadline> deadline_of_end(const Options& o, const std::string& error, int status) {
  const double seconds = error.empty() ? o.timeout : Options().timeout;
  return std::make_unique<Deadline>(
      seconds,
      status == 0
          ? strf("error: this run has done all it was asked for, but MPI did not end within %g s: a rank or "
                 "its host stands still",
                 seconds)
          : strf("warning: MPI did not end within %g s after this error: a rank or its host stands still", seconds),
      status == 0 ? 1 : status);
}

int run_as_rank(int* argc, char*** argv, const Options& o, const std::string& error,
                const std::function<void(const World&)>& run) {
  World world;
  std::unique_ptr<Watchdog> watchdog;
  int status = 0;
  auto starting = deadline_of_start(o, error);
  try {
    world = init_mpi(argc, argv);
    const std::string wrong = agree(error);
    if (!wrong.empty()) throw UsageError(wrong);
    watchdog = std::make_unique<Watchdog>(world, watchdog_options(o, world));
    starting.reset();
    halt::catch_signals();
    run(world);
  } catch (const Error& e) {
    if (is_fault(e)) abort_all_ranks(e);
    status = exit_status(e);  // agreed on: the same on all ranks
    if (world.rank == 0) terminal::say(strf("error: %s", e.what()));
  } catch (const std::exception& e) { abort_all_ranks(e); }
  starting.reset();
  halt::release_signals();
  watchdog.reset();
  const auto ending = deadline_of_end(o, error, status);
  finish_mpi();
  return status;
}
