#include "lib/program/sweep_parts.h"

#include <cstdio>
#include <fstream>
#include <map>

#include "lib/program/format.h"
#include "lib/program/process.h"

using ll = long long;

namespace sweep_parts {

struct PeerTask {
  const Task* task;
  const Peer* peer;
  std::string tag() const { return task->row.name + (peer->variant.empty() ? "" : ", " + peer->variant); }
};

static json peer_row(const SweepRun& run, const PeerTask& p, int64_t round, const json& said, const std::string& error,
                     double launched, const GpuSampler& gpus) {
  json row = row_of(run, *p.task, theirs, p.peer->variant, round);
  row["command"] = peer_command(run, *p.task, *p.peer);
  for (const char* key : {"steps_ms", "losses", "versions", "hardware", "args", "graph_breaks"})
    if (said.contains(key)) row[key] = said[key];
  add_uuids(run, &row);
  if (!said.value("ok", false)) {
    const std::string kind = said.value("error", ""), detail = said.value("detail", "");
    row["error"] = kind.empty() ? error : detail.empty() ? kind : kind + ": " + lines_of(detail).front();
    return row;
  }
  row["window"] = said.value("window", json::array({p.task->first, p.task->last}));
  row["result"] = said["result"];
  if (launched > 0 && said.contains("first_step_unix"))
    row["result"]["first_step_s"] = said["first_step_unix"].get<double>() - launched;
  const json window = said.value("window_unix", json());
  if (window.is_array() && window.size() == 2) add_gpu_summary(gpus, window[0], window[1], &row["result"]);
  return row;
}

// What PyTorch has printed so far, by row.
static std::map<std::string, json> said_in(const std::string& output) {
  std::map<std::string, json> said;
  for (const json& j : read_json_lines(output))
    if (j.contains("ok") && j.contains("tag")) said.emplace(j["tag"], j);
  return said;
}

// The rows of one world and environment in one process, which compiles a shape once. Where it ends in the middle of
// them, those behind run in another.
static void run_peers(const SweepRun& run, std::vector<PeerTask> left, int64_t round, ResultFile* file) {
  const std::string rows = file_of(run, 0, "-peers.json"), output = file_of(run, 0, "-peers.log");
  bool any_failed = false;
  while (!left.empty()) {
    json list = json::array();
    for (const PeerTask& p : left) list.push_back({{"tag", p.tag()}, {"args", peer_words(run, *p.task, *p.peer)}});
    std::ofstream(rows) << list.dump(1) << "\n";
    const Task& t = *left[0].task;
    Words command = {"env"};
    for (const std::string& e : environment_of(t.row)) command.push_back(e);
    const Words launcher = torchrun(t.ranks);
    command.insert(command.end(), launcher.begin(), launcher.end());
    command.insert(command.end(), {"--rows", rows});

    size_t done = 0;
    const GpuSampler gpus = sampler_of(t.ranks);
    const double launched = unix_seconds();
    const auto keep = [&](const json& said, const std::string& error) {
      const PeerTask& p = left[done];
      const json row = peer_row(run, p, round, said, error, done == 0 ? launched : 0, gpus);
      any_failed |= row.contains("error");
      file->put(row);
      std::printf("%s %lld, %s, PyTorch: %s\n", run.sweep->name, ll(p.task->number), p.tag().c_str(),
                  outcome_of(row).c_str());
      std::fflush(stdout);
      done++;
    };
    const auto read_lines = [&] {
      const size_t before = done;
      for (const std::map<std::string, json> said = said_in(output); done < left.size();) {
        const auto found = said.find(left[done].tag());
        if (found == said.end()) break;
        keep(found->second, "");
      }
      return done > before ? Sign::of_life : Sign::none;
    };
    const std::string failed = ::run(command, output, run.timeout_s, read_lines);
    read_lines();
    if (done < left.size()) {  // it has ended in this one
      const std::string line = error_line(output);
      keep(json::object(), !line.empty() ? line : !failed.empty() ? failed : "no result; see " + output);
    }
    left.erase(left.begin(), left.begin() + long(done));
  }
  if (!any_failed) forget({rows, output});
}

static Words script_words(const Task& t, const Peer& peer) {
  Words command = {"python3"};
  if (t.ranks > 1)
    command = words_of("python3 -m torch.distributed.run --standalone --nproc_per_node=" + std::to_string(t.ranks));
  command.push_back(peer.script);
  command.insert(command.end(), peer.options.begin(), peer.options.end());
  return command;
}

// A program of its own beside a row: one run, one JSON line.
static void run_script(const SweepRun& run, const Task& t, const Peer& peer, int64_t round, ResultFile* file) {
  const Words command = script_words(t, peer);
  const std::string output = file_of(run, t.number, "-script.log");
  const GpuSampler gpus = sampler_of(t.ranks);
  const double launched = unix_seconds();
  const std::string failed = ::run(command, output, run.timeout_s);
  json row = row_of(run, t, theirs, peer.variant, round);
  row["command"] = join(command), row["error"] = failed.empty() ? "no result; see " + output : failed;
  if (!failed.empty() && !error_line(output).empty()) row["error"] = error_line(output);
  add_uuids(run, &row);
  for (const json& j : read_json_lines(output)) {
    if (!j.value("ok", false)) continue;
    row.erase("error");
    row.update({{"result", j["result"]}, {"args", j["config"]}, {"versions", j["versions"]}});
    row["result"]["step_ms"] = 1e3 * j["result"]["step_s"].get<double>();
    add_gpu_summary(gpus, launched, unix_seconds(), &row["result"]);
  }
  if (!row.contains("error")) forget({output});
  file->put(row);
  std::printf("%s %lld, %s, PyTorch: %s\n", run.sweep->name, ll(t.number), t.row.name.c_str(), outcome_of(row).c_str());
}

void run_all_peers(const SweepRun& run, std::vector<Task> tasks, int64_t round, ResultFile* file) {
  std::map<std::string, std::vector<PeerTask>> groups;
  for (Task& t : tasks) {
    if (!runs(t) && !t.row.no_counterpart) continue;
    // As many steps, and as long a warm-up, as the epochs gave ours: only a corpus that is open knows.
    if (t.steps == 0 && runs(t)) {
      const json* mine = file->find(row_of(run, t, ours, "", round));
      if (mine && mine->contains("config"))
        for (const char* key : {"steps", "warmup"}) t.plan.config[key] = (*mine)["config"][key];
      t.steps = t.plan.config["steps"], t.last = t.last > 0 ? t.last : t.steps;
    }
    for (const Peer& peer : t.row.peers) {
      json like = row_of(run, t, theirs, peer.variant, round);
      like["command"] = peer.script.empty() ? peer_command(run, t, peer) : join(script_words(t, peer));
      if (run.begin == Begin::where_it_stopped && file->kept(like)) continue;
      if (!peer.script.empty()) run_script(run, t, peer, round, file);
      else groups[std::to_string(t.ranks) + prefix(t.row)].push_back({&t, &peer});
    }
  }
  for (auto& group : groups) run_peers(run, std::move(group.second), round, file);
}

}  // namespace sweep_parts
