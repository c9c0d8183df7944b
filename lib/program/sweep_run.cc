#include "lib/program/sweep_run.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include <unistd.h>

#include "lib/device/error.h"
#include "lib/program/format.h"
#include "lib/program/process.h"
#include "lib/program/sweep_parts.h"

using namespace sweep_parts;
using ll = long long;

constexpr double launch_s = 7, compile_s = 25;  // seconds: until ./train and until PyTorch make a step

// PyTorch's step: a little longer than ours, but not shorter than its host takes to issue it, which is about 6.5 ms
// for the forward and backward of a block (results/class-1gpu.jsonl: 78 to 90 ms for two micro-batches of 6 blocks).
static double peer_step_s(const Task& t) {
  const auto count = [&](const char* key) { return double(t.plan.config.value(key, int64_t(1))); };
  return std::max(1.2 * t.plan.seconds, 0.0065 * count("depth") * count("grad_accum"));
}

// As many as the epochs have are taken to be as many as without them.
static double steps_of(const Task& t) {
  return double(t.steps > 0 ? t.warm + t.steps : t.plan.config.value("steps", int64_t(1)));
}

static double seconds_of(const SweepRun& run, const Task& t) {
  if (!runs(t)) return 0;
  const double steps = steps_of(t);
  double s = launch_s + steps * t.plan.seconds;
  if (run.peers == Peers::on) s += double(t.row.peers.size()) * (compile_s + steps * peer_step_s(t));
  return s * double(run.rounds);
}

// Negative where nothing is known of the machine.
static double minutes_of(const SweepRun& run, const std::vector<Task>& tasks) {
  if (!run.machine.gpu) return -1;
  double s = 0;
  for (const Task& t : tasks) s += seconds_of(run, t);
  return s / 60;
}

static void run_rows(const SweepRun& run, const std::vector<Task>& tasks, int64_t round, ResultFile* file) {
  double left = 0;
  for (const Task& t : tasks) left += seconds_of(run, t) / double(run.rounds);
  for (const Task& t : tasks) {
    if (t.row.no_counterpart) {
      file->put(row_of(run, t, ours, "", 1));
      continue;
    }
    json like = row_of(run, t, ours, "", round);
    like["command"] = t.only_planned ? planned_command(run, t) : train_command(run, t);
    if (t.last > 0 && !t.only_planned) like["window"] = {t.warm + t.first, t.warm + t.last};
    const json* there = file->find(like);
    if (!t.refused.empty() && there && there->contains("result")) {
      std::printf("%s %lld, %s: the row that %s has stays; now it is refused: %s\n", run.sweep->name, ll(t.number),
                  t.row.name.c_str(), run.path.c_str(), t.refused.c_str());
    } else if (run.begin == Begin::anew || !file->kept(like)) {
      const json row = t.only_planned ? planned_row(run, t) : train_row(run, t, round);
      file->put(row);
      std::printf("%s %lld, %s: %s%s\n", run.sweep->name, ll(t.number), t.row.name.c_str(), outcome_of(row).c_str(),
                  t.only_planned && row.contains("result") ? " (planned)" : "");
    }
    left -= runs(t) ? launch_s + steps_of(t) * t.plan.seconds : 0;
    if (left > 5 && run.machine.gpu) std::printf("  about %s left\n", duration_text(left).c_str());
    std::fflush(stdout);
  }
}

std::string run_ranks(int64_t ranks, const Words& environment, const Words& words, const std::string& output,
                      int64_t timeout_s) {
  const std::string n = std::to_string(ranks);
  // setup.sh knows the flags that this machine's mpirun needs.
  Words all = {"env"};
  all.insert(all.end(), environment.begin(), environment.end());
  const Words shell = {"bash", "-c", ". ./setup.sh env " + n + " && exec mpirun $MPIRUN_FLAGS -np " + n + " \"$@\"",
                       "bench"};
  all.insert(all.end(), shell.begin(), shell.end());
  all.insert(all.end(), words.begin(), words.end());
  const std::string error = run(all, output, timeout_s);
  if (error.empty() || error.rfind("timed out", 0) == 0) return error;
  return why(error, output);
}

json ask_hardware() {
  REQUIRE_USER(access("./train", X_OK) == 0, "no ./train in this directory: run `make`, and ./bench where ./train is");
  const std::string output = strf("build/bench/hardware-%d.log", int(getpid())),
                    why = run({"./train", "--hardware"}, output, 120);
  const std::vector<json> lines = read_json_lines(output);
  for (const json& j : lines) {
    if (!j.contains("gpus")) continue;
    std::remove(output.c_str());
    return j;
  }
  if (const std::string said = error_line(output); !said.empty()) throw Error("./train --hardware: " + said);
  throw Error(strf("./train --hardware printed no JSON line%s%s; see %s", why.empty() ? "" : ": ", why.c_str(),
                   output.c_str()));
}

// Options that no row takes are a mistake on the command line, and no result of the rows.
static void check_extra(const SweepRun& run, const std::vector<Task>& tasks) {
  const Task* refused = nullptr;
  for (const Task& t : tasks) {
    if (t.row.no_counterpart) continue;
    if (t.refused.empty()) return;
    if (t.by_extra && !refused) refused = &t;
  }
  REQUIRE_USER(!refused, "every row of --sweep %s refuses the options after --: %s", run.sweep->name,
               refused->refused.c_str());
}

int run_sweep(const SweepRun& run) {
  const std::vector<Task> tasks = tasks_of(run);
  check_extra(run, tasks);
  ResultFile file = open_file(run, tasks);
  const double minutes = minutes_of(run, tasks);
  std::printf("%s: %zu rows; %s%s; %s%s\n", run.sweep->name, tasks.size(),
              run.machine.gpus > 0 ? strf("%lld x ", ll(run.machine.gpus)).c_str()
              : run.machine.gpu    ? "planned for "
                                   : "small shapes on the CPU, ",
              run.hardware.value("name", "?").c_str(), run.path.c_str(),
              minutes > 0 ? strf("; about %.0f min", std::ceil(minutes)).c_str() : "");
  std::fflush(stdout);
  for (int64_t round = 1; round <= run.rounds; round++) {
    run_rows(run, tasks, round, &file);
    if (run.peers == Peers::on) run_all_peers(run, tasks, round, &file);
  }
  if (run.only.empty()) file.drop_stale();
  const auto is_good = [&](const json& j) {
    const auto is_its = [&](const Task& t) { return t.number == j.value("number", int64_t(0)); };
    return j.contains("result") && std::any_of(tasks.begin(), tasks.end(), is_its);
  };
  return std::any_of(file.rows.begin(), file.rows.end(), is_good) ? 0 : 1;
}

void print_commands(const SweepRun& run) {
  for (const Task& t : tasks_of(run)) {
    if (t.row.no_counterpart) {
      std::printf("%lld %s: %s\n", ll(t.number), t.row.name.c_str(), t.row.note.c_str());
      if (run.peers == Peers::on)
        for (const Peer& peer : t.row.peers)
          std::printf("  PyTorch: %s %s\n", peer.script.c_str(), join(peer.options).c_str());
      continue;
    }
    const std::string command =
        t.only_planned ? planned_row(run, t)["command"].get<std::string>() : train_command(run, t);
    std::printf("%lld %s: %s\n", ll(t.number), t.row.name.c_str(), command.c_str());
    if (!t.refused.empty()) std::printf("  refused: %s\n", t.refused.c_str());
    if (run.peers == Peers::on && runs(t))
      for (const Peer& peer : t.row.peers) std::printf("  PyTorch: %s\n", peer_command(run, t, peer).c_str());
    if (run.peers == Peers::on && runs(t) && t.steps == 0 && !t.row.peers.empty())
      std::printf("  and --steps, --warmup and --last, as many as the epochs give ours\n");
  }
}

SweepSize size_of(const SweepRun& run) {
  const std::vector<Task> tasks = tasks_of(run);
  SweepRun alone = run, beside = run;
  alone.peers = Peers::off, beside.peers = Peers::on;
  return {int64_t(tasks.size()), minutes_of(alone, tasks), minutes_of(beside, tasks)};
}
