#include "lib/program/ranks.h"

#include <algorithm>
#include <memory>

#include "lib/comm/watchdog.h"
#include "lib/device/terminal.h"
#include "lib/program/halt.h"
#include "lib/program/start.h"

int exit_status(const Error& e) { return dynamic_cast<const UsageError*>(&e) ? 2 : 1; }

// Where nothing is said of it, hosts have longer to start than a rank has to answer.
static std::unique_ptr<Deadline> deadline_of_start(const Options& o) {
  const double seconds = o.timeout == 0 || o.gives("timeout") ? double(o.timeout) : std::max(300.0, double(o.timeout));
  return std::make_unique<Deadline>(
      seconds,
      strf("error: MPI has not started for %.0f s: see whether all ranks and hosts are there, and run", seconds), 1);
}

int run_ranks(int* argc, char*** argv, const Options& o, const std::string& error,
              const std::function<void(const World&)>& run) {
  World world;
  std::unique_ptr<Watchdog> watchdog;
  int status = 0;
  auto starting = deadline_of_start(o);
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
  const Deadline ending(o.timeout,
                        strf("warning: MPI has not ended for %lld s, after everything was done: a rank stands still",
                             static_cast<long long>(o.timeout)),
                        status);
  finish_mpi();
  return status;
}
