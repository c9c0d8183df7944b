// The tables: time and memory of a step under one change after another, with PyTorch and the reports' figures beside.
//
//   ./bench --list                         every sweep, the table that it mirrors, its rows and minutes
//   ./bench --sweep depth                  a rank for each GPU; on a CPU the same rows with tiny shapes
//   ./bench --sweep depth --peer           with PyTorch FSDP2 on the same rows
//   ./bench --sweep depth,seq --continue   goes on where it stopped
//   ./bench --sweep comm --only 3,7 --dry-run
//   ./bench --sweep world --ranks 2 -- --moments bf16
//
//   ./bench --summary results/class-2gpu.jsonl --over ddp_fp32
//   ./bench --plot train.jsonl             a picture: logs of ./train, a trace, rows; see plots.h
//   ./bench --notes NOTES.md README.md     writes the tables in documents from results/
//
// Run it without mpirun: it starts each row in fresh processes. The rows of a sweep are in lib/program/sweeps.cc, how
// they run in sweep_run.h, what is timed without ./train in timing.h.
#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

#include "CLI/CLI.hpp"

#include "build/version.h"
#include "lib/device/device.h"
#include "lib/device/terminal.h"
#include "lib/program/chips.h"
#include "lib/program/files.h"
#include "lib/program/json.h"
#include "lib/program/notes.h"
#include "lib/program/options.h"
#include "lib/program/plots.h"
#include "lib/program/process.h"
#include "lib/program/rows.h"
#include "lib/program/summary.h"
#include "lib/program/sweep_run.h"
#include "lib/program/sweeps.h"
#include "lib/program/tables.h"
#include "lib/program/timing.h"

namespace {

using nlohmann::json;
using ll = long long;
using Values = std::vector<int64_t>;

// -------------------------------------------------------------------------------------------------------- settings

struct Settings {
  Words names;      // of the sweeps
  std::string gpu;  // of a machine that is not here: nothing runs
  Values values, only;
  std::string window, out, command;
  int64_t ranks = 0, steps = 0, rounds = 1, timeout = 0;
  double warm_seconds = -1;  // the machine's
  bool list = false, dry_run = false, go_on = false, peer = false;
  bool rank = false;              // one of the ranks that --sweep collectives has started
  Words extra;                    // options of ./train, after --
  Words summary, notes, checked;  // documents
  std::string over, json, kind;
  PlotRequest plot;
  bool draws = false, plots = false, writes_notes = false, check = false;
};

// An option, the name of its value and what it is for. What is allowed is said where it is broken.
struct HelpFormat : CLI::Formatter {
  std::string make_option_opts(const CLI::Option* o) const override {
    if (o->get_expected_max() == 0) return "";
    const std::string type = o->get_type_name();
    return " " + type.substr(0, type.find(':'));
  }
};

template <class Words>
std::string listed(const Words& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ", ") + std::string(word);
  return text;
}

bool is_planned(const Sweep& sweep) { return sweep.kind == SweepKind::planned; }
bool says_its_ranks(const std::string& name) { return is_planned(find_sweep(name)); }

// Throws if a word before -- is an option that stands behind it.
void refuse_options_of_train(const CLI::App& app, char** argv, char** end) {
  const json theirs = to_json(Options());
  for (char** word = argv; word != end; ++word) {
    const std::string text = *word, name = text.substr(0, text.find('='));
    const bool known = name.rfind("--", 0) != 0 || app.get_option_no_throw(name);
    REQUIRE_USER(known || !theirs.contains(key_of(name.substr(2))),
                 "%s is an option of ./train: give it behind --, as in ./bench --sweep depth -- --seq 64",
                 name.c_str());
  }
}

Settings parse(int argc, char** argv) {
  Settings s;
  const auto end = std::find(argv, argv + argc, std::string("--"));
  if (end != argv + argc) s.extra.assign(end + 1, argv + argc);
  Words typed(argv, argv + argc);
  typed.erase(std::remove(typed.begin(), typed.end(), "--rank"), typed.end());
  s.command = join(typed);
  const CLI::Range count(1, 1 << 20);
  CLI::App app(
      "Time and memory of a training step over a sweep, with PyTorch and the reports' figures beside. Options of "
      "./train follow after --");
  app.formatter(std::make_shared<HelpFormat>());
  // clang-format off
  auto* list = app.add_flag("--list", s.list, "list the sweeps, with the table that each mirrors, its rows and minutes");
  auto* sweep = app.add_option("--sweep", s.names, "sweeps to run, separated by commas, or all; --list shows them")->type_name("NAMES")->delimiter(',')->excludes(list);
  app.add_flag("--dry-run", s.dry_run, "print the command of every row; run nothing")->needs(sweep);
  app.add_flag("--continue", s.go_on, "keep the file's rows that the same commands made, and run the rest")->needs(sweep);
  app.add_option("--only", s.only, "numbers of the rows to run, from 1; the file's other rows stay")->type_name("N,...")->delimiter(',')->check(count)->needs(sweep);
  app.add_flag("--peer", s.peer, "run PyTorch on the same rows (peers/torch_fsdp.py; --sweep kernels: cuDNN's attention, peers/attention.py); without it the file keeps its PyTorch rows")->needs(sweep);
  app.add_option("--ranks", s.ranks, "ranks (default: one for each GPU; on a CPU 2)")->type_name("N")->check(count);
  app.add_option("--rounds", s.rounds, "run every row N times, ours and PyTorch's in turn")->type_name("N")->check(CLI::Range(1, 100))->needs(sweep);
  app.add_option("--steps", s.steps, "steps of each row (default: 30, or 24 where one takes a second; on a CPU 6; as many as the window needs)")->type_name("N")->check(count)->needs(sweep);
  app.add_option("--window", s.window, "FIRST:LAST, the steps that count, from 1 (default: from 5, 20 steps or one second's worth, whichever is more; on a CPU 3:6)")->type_name("RANGE")->needs(sweep);
  app.add_option("--warm", s.warm_seconds, "seconds of steps before step 1, until the clocks have settled (default: 3; on a CPU 0)")->type_name("SECONDS")->check(CLI::Range(0.0, 600.0))->needs(sweep);
  app.add_option("--timeout", s.timeout, strf("seconds that a row may take (default: %lld)", ll(SweepRun().timeout_s)))->type_name("SECONDS")->check(count)->needs(sweep);
  app.add_option("--values", s.values, "attention: tokens; collectives: MiB (default: a list that suits the machine)")->type_name("LIST")->delimiter(',')->check(CLI::Range(int64_t(1), int64_t(1) << 40))->needs(sweep);
  app.add_option("--gpu", s.gpu, "plan every row for --ranks of this chip, which need not be here, and run none; list or print for them: " + listed(chip_words()))->type_name("CHIP")->check(CLI::IsMember(chip_words()));
  app.add_option("--out", s.out, "file of the rows, JSON lines (default: results/SWEEP-Ngpu.jsonl, results/SWEEP-cpu.jsonl); of --plot, the picture")->type_name("FILE");
  app.add_flag("--rank", s.rank)->needs(sweep)->group("");
  auto* summary = app.add_option("--summary", s.summary, "compare training logs or rows: speed, loss, memory, speed-up")->type_name("FILES")->excludes(sweep);
  app.add_option("--over", s.over, "--summary: the run that speed-ups are over (default: ddp_fp32, or the first)")->type_name("RUN")->needs(summary);
  app.add_option("--json", s.json, "--summary: a file for the same as JSON")->type_name("FILE")->needs(summary);
  auto* plot = app.add_option("--plot", s.plot.files, "make a picture (SVG, by gnuplot) of a trace, of training logs or of rows")->type_name("FILES")->expected(0, -1)->excludes(sweep);
  app.add_option("--kind", s.kind, "--plot: what to draw, " + listed(plot_kinds()) + " (default: what suits the file)")->type_name("KIND")->check(CLI::IsMember(plot_kinds()))->needs(plot);
  app.add_option("--key", s.plot.key, "--plot: the figure of rows (default: step_ms)")->type_name("KEY")->needs(plot);
  app.add_option("--title", s.plot.title, "--plot: its title (default: made from the file)")->type_name("TEXT")->needs(plot);
  app.add_flag("--plots", s.plots, "make every picture of the documents whose inputs are in results/")->excludes(sweep);
  auto* notes = app.add_option("--notes", s.notes, "write the tables of these documents from results/")->type_name("FILES")->expected(0, -1)->excludes(sweep);
  auto* check = app.add_option("--check", s.checked, "--notes: write nothing; say what differs in its documents and these")->type_name("FILES")->expected(0, -1)->needs(notes);
  // clang-format on
  try {
    app.parse(int(end - argv), argv);
  } catch (const CLI::CallForHelp&) {
    std::printf("%s", app.help().c_str());
    terminal::flush_output(terminal::OutputReader::reads_all);
    std::exit(0);
  } catch (const CLI::ParseError& e) {
    refuse_options_of_train(app, argv, end);
    throw UsageError(std::string(e.what()) + "; see ./bench --help");
  }
  s.plot.out = s.out, s.plot.kind = plot_kind(s.kind);
  s.draws = plot->count() > 0, s.writes_notes = notes->count() > 0, s.check = check->count() > 0;
  s.notes.insert(s.notes.end(), s.checked.begin(), s.checked.end());
  for (Words* files : {&s.notes, &s.plot.files})  // CLI11's word for an option that is given no value
    files->erase(std::remove(files->begin(), files->end(), ""), files->end());
  REQUIRE_USER(!s.writes_notes || !s.notes.empty(), "--notes: name the documents, as in --notes NOTES.md README.md");
  const bool asked = only_one({{"--sweep", !s.names.empty()},
                               {"--list", s.list},
                               {"--summary", !s.summary.empty()},
                               {"--plot", s.draws},
                               {"--plots", s.plots},
                               {"--notes", s.writes_notes}});
  REQUIRE_USER(asked, "choose --sweep NAME, --list, --summary, --plot, --plots or --notes; see ./bench --help");
  REQUIRE_USER(s.extra.empty() || !s.names.empty(), "options of ./train behind -- are for --sweep");
  REQUIRE_USER(s.out.empty() || !s.names.empty() || s.draws, "--out is for --sweep and --plot");
  if (s.names == Words{"all"}) {
    s.names.clear();
    for (const Sweep& one : sweeps()) s.names.push_back(one.name);
  }
  REQUIRE_USER((s.gpu.empty() && !s.ranks) || s.list || !s.names.empty(),
               "--gpu and --ranks are for --sweep and --list");
  const bool own_ranks = !s.names.empty() && std::all_of(s.names.begin(), s.names.end(), says_its_ranks);
  REQUIRE_USER(s.gpu.empty() || s.ranks > 0 || own_ranks, "--gpu %s: give --ranks N, how many of them", s.gpu.c_str());
  REQUIRE_USER(s.out.empty() || s.names.size() <= 1, "--out: one file for several sweeps; give one sweep");
  REQUIRE_USER(s.only.empty() || s.names.size() == 1, "--only: rows of several sweeps; give one sweep");
  return s;
}

// A row's command is to say what ran: it would be the same with a variable that ./train reads and without.
void check_environment() {
  for (char** variable = environ; *variable; ++variable) {
    const std::string text = *variable, name = text.substr(0, text.find('='));
    const bool ours = name.rfind("FSDP_", 0) == 0 && name.rfind("FSDP_TEST_", 0) != 0;
    REQUIRE_USER(!ours || name == "FSDP_ALLOW_SINGLE_RANK",
                 "%s is set: every row would run with it, and no row's command would show it; unset it, and give "
                 "options of ./train behind --",
                 name.c_str());
  }
}

// Refuses what says how rows run where none does: those of --gpu are planned, whatever sweeps they are of.
void check_planned(const Settings& s) {
  if (s.gpu.empty() || s.list || s.dry_run) return;
  REQUIRE_USER(!s.peer, "--gpu %s: rows are planned, and PyTorch has no plan", s.gpu.c_str());
  const std::pair<bool, const char*> of_runs[] = {{s.steps, "--steps"},
                                                  {!s.window.empty(), "--window"},
                                                  {s.rounds > 1, "--rounds"},
                                                  {s.timeout, "--timeout"},
                                                  {s.warm_seconds >= 0, "--warm"}};
  for (const auto& [given, option] : of_runs)
    REQUIRE_USER(!given, "%s with --gpu %s: rows are planned, of one step; leave it out", option, s.gpu.c_str());
}

// Refuses what a sweep does not use.
void check_use(const Settings& s, const Sweep& sweep) {
  const bool planned = is_planned(sweep), trains = planned || sweep.kind == SweepKind::training,
             collectives = sweep.kind == SweepKind::collectives, kernels = sweep.kind == SweepKind::kernels;
  const auto refuse = [&](bool given, const char* option) {
    REQUIRE_USER(!given, "--sweep %s does not use %s; leave it out", sweep.name, option);
  };
  refuse(!trains && !s.extra.empty(), "options of ./train");
  const bool steps = trains && !planned;  // a plan is of one step, and its rows say of how many ranks
  refuse(!steps && s.steps, "--steps"), refuse(!steps && !s.window.empty(), "--window");
  refuse(!trains && !s.only.empty(), "--only"), refuse(!steps && s.rounds > 1, "--rounds");
  refuse(!steps && s.warm_seconds >= 0, "--warm"), refuse(!trains && s.dry_run, "--dry-run");
  refuse(!trains && s.go_on, "--continue"), refuse(!steps && !kernels && s.peer, "--peer");
  refuse(planned && s.ranks, "--ranks"), refuse(!trains && !collectives && s.ranks > 1, "--ranks");
  refuse(!steps && !collectives && s.timeout, "--timeout");
  refuse((trains || kernels) && !s.values.empty(), "--values");
}

void read_window(const Settings& s, SweepRun* run) {
  if (s.window.empty()) return;
  int used = 0;
  ll first = 0, last = 0;
  const int n = std::sscanf(s.window.c_str(), "%lld:%lld%n", &first, &last, &used);
  REQUIRE_USER(
      n == 2 && size_t(used) == s.window.size() && first >= 1 && last >= first && (!s.steps || last <= s.steps),
      "--window %s: give FIRST:LAST with 1 <= FIRST <= LAST <= --steps", s.window.c_str());
  run->first = first, run->last = last;
}

SweepMachine machine_of(const json& hardware, int64_t ranks) {
  SweepMachine m;
  m.gpus = hardware.value("gpus", int64_t(0)), m.gpu = m.gpus > 0;
  m.ranks = ranks ? ranks : m.gpu ? m.gpus : 2;
  if (!m.gpu) return m;
  const std::string name = hardware.value("name", "");
  const Chip* chip = chip_named(name);
  if (chip && chip->word) m.chip = chip->word;
  else std::printf("note: unknown chip %s: rows are planned as if it were an %s\n", name.c_str(), m.chip.c_str());
  return m;
}

// ------------------------------------------------------------------------------------------------------------ runs

SweepRun run_of(const Settings& s, const Sweep& sweep, const json& hardware) {
  SweepRun run;
  run.sweep = &sweep, run.hardware = hardware, run.machine = machine_of(hardware, s.ranks);
  const bool nobodys = is_planned(sweep),  // GPUs that nobody has here, whatever this machine has
      planned = nobodys || (!s.gpu.empty() && !s.list && !s.dry_run);
  if (nobodys) run.machine = SweepMachine();
  if (!s.gpu.empty()) run.machine.chip = s.gpu;
  if (planned) {
    run.machine.gpu = true, run.machine.gpus = 0;
    run.hardware = {{"name", chip_named(run.machine.chip)->name}, {"gpus", 0}};
  }
  run.extra = s.extra, run.only.insert(s.only.begin(), s.only.end());
  run.begin = s.go_on ? Begin::where_it_stopped : Begin::anew;
  run.peers = s.peer ? Peers::on : Peers::off;
  run.rounds = s.rounds, run.steps = s.steps;
  if (s.timeout) run.timeout_s = s.timeout;
  REQUIRE_USER(s.warm_seconds <= 0 || run.machine.gpu,
               "--warm needs GPUs: nothing is known of a CPU's step time before it runs; leave it out");
  run.warm_seconds = s.warm_seconds >= 0 ? s.warm_seconds : run.machine.gpu ? 3 : 0;
  read_window(s, &run);
  const bool one = sweep.kind == SweepKind::layers || sweep.kind == SweepKind::kernels;
  // The tables read SWEEP-planned: other chips and numbers do not replace it.
  const bool of_tables = run.machine.chip == planned_chip && (nobodys || run.machine.ranks == planned_ranks);
  const std::string chip = "planned-" + run.machine.chip;
  const std::string where = planned && of_tables ? "planned"
                            : nobodys            ? chip
                            : planned            ? chip + strf("-%lldgpu", ll(run.machine.ranks))
                            : run.machine.gpu    ? strf("%lldgpu", one ? 1 : ll(run.machine.ranks))
                                                 : "cpu";
  run.path = !s.out.empty() ? s.out : strf("results/%s-%s.jsonl", sweep.name, where.c_str());
  return run;
}

// Where rows that are timed here lie until all of them are there.
std::string unfinished(const std::string& path) { return path + ".part"; }

// ./bench itself is what runs under mpirun here.
int sweep_collectives(const Settings& s, const SweepRun& run) {
  const Values values = !s.values.empty() ? s.values : run.machine.gpu ? run.sweep->on_gpus : run.sweep->on_cpu;
  std::string all;
  for (int64_t v : values) all += (all.empty() ? "" : ",") + std::to_string(v);
  const std::string ranks = std::to_string(run.machine.ranks),
                    output = strf("build/bench/collectives-%d.log", int(getpid()));
  const Words words = {"./bench", "--rank", "--sweep", run.sweep->name, "--ranks",
                       ranks,     "--out",  run.path,  "--values",      all};
  std::printf("collectives of %s ranks, medians of 20 calls; %s\n\n", ranks.c_str(),
              run.hardware.value("name", "?").c_str());
  std::fflush(stdout);
  const std::string error = run_ranks(run.machine.ranks, {}, words, output, run.timeout_s);
  REQUIRE_USER(error.empty(), "%s", error.c_str());
  std::printf("%s", read_file(output).c_str());
  std::remove(output.c_str());
  return 0;
}

// Whether a file's row is one of those that this sweep times.
bool is_row_of(const Sweep& sweep, const json& row) {
  if (sweep.kind == SweepKind::collectives) return row.contains("collective");
  return row.contains("attention") && is_layer(row) == (sweep.kind == SweepKind::layers);
}

// What a row is of, whenever and by whom it was timed.
json subject_of(json row) {
  for (const char* key : {"command", "commit", "date", "result"}) row.erase(key);
  return row;
}

// The rows timed now, in the places of those that they stand for; of another machine none stays, which is said. For
// --values, which asks for some rows of a file.
std::string merged(const std::vector<json>& before, std::vector<json> now) {
  std::string text;
  const json hardware = now.empty() ? json() : now[0].value("hardware", json());
  const auto put = [&](const json& row) { text += row.dump() + "\n"; };
  int64_t gone = 0;
  for (const json& old : before) {
    const auto same = std::find_if(
        now.begin(), now.end(), [&](const json& row) { return !row.is_null() && subject_of(row) == subject_of(old); });
    if (same != now.end()) put(std::exchange(*same, nullptr));
    else if (old.value("hardware", json()) == hardware) put(old);
    else ++gone;
  }
  if (gone > 0) std::printf("left out: %lld row%s of another machine\n", ll(gone), gone == 1 ? "" : "s");
  for (const json& row : now)
    if (!row.is_null()) put(row);
  return text;
}

// Sweeps that are timed by themselves. What their file held stays until they have ended.
int time_rows(const Settings& s, const SweepRun& run) {
  const Sweep& sweep = *run.sweep;
  const std::shared_ptr<DirectoryLock> lock = lock_rows(run.path);
  const std::vector<json> before = read_json_lines(run.path);
  const auto is_row = [&](const json& row) { return is_row_of(sweep, row); };
  REQUIRE_USER(before.empty() ? read_file(run.path).empty() : std::all_of(before.begin(), before.end(), is_row),
               "%s holds something else than rows of --sweep %s, and is not overwritten; choose another --out",
               run.path.c_str(), sweep.name);
  RowFile{run.path, s.command, FSDP_COMMIT}.require_writable();
  const RowFile rows{unfinished(run.path), s.command, FSDP_COMMIT};
  rows.require_writable();
  std::remove(rows.path.c_str());
  std::printf("%s\n", run.path.c_str());
  int status;
  bool peers_timed = true;
  if (sweep.kind == SweepKind::collectives) {
    status = sweep_collectives(s, run);
  } else if (sweep.kind == SweepKind::kernels) {
    status = time_attention_kernels(rows) ? 0 : 1;
    if (status == 0 && s.peer) peers_timed = time_peers_kernels(rows, run.timeout_s);
  } else {
    const Values values = !s.values.empty() ? s.values : gpu_count() > 0 ? sweep.on_gpus : sweep.on_cpu;
    status = time_attention_layers(rows, values) ? 0 : 1;
  }
  std::vector<json> now = read_json_lines(rows.path);
  if (sweep.kind == SweepKind::kernels) {
    if (!s.peer || !peers_timed) keep_peers(before, &now);
    now = by_attention(std::move(now));
  }
  if (status == 0 || before.empty())
    files::replace(run.path, merged(s.values.empty() ? std::vector<json>() : before, std::move(now)));
  else std::printf("nothing could be timed: %s stays as it was\n", run.path.c_str());
  std::remove(rows.path.c_str());
  return peers_timed ? status : 1;
}

int run_one(const Settings& s, const Sweep& sweep, const json& hardware) {
  const SweepRun run = run_of(s, sweep, hardware);
  if (s.dry_run) {
    if (sweep.rows) print_commands(run);
    else std::printf("%s: one process times it, ./bench --sweep %s\n", sweep.name, sweep.name);
    return 0;
  }
  if (sweep.kind == SweepKind::training || sweep.kind == SweepKind::planned) {
    const int status = run_sweep(run);
    std::printf("\n%s", sweep_table(read_rows({run.path})).c_str());
    return status;
  }
  return time_rows(s, run);
}

// --gpu's, or what this machine has.
json hardware_for(const Settings& s) {
  return s.gpu.empty() ? ask_hardware() : json{{"name", chip_named(s.gpu)->name}, {"gpus", s.ranks}};
}

int list_sweeps(const Settings& s) {
  const json hardware = hardware_for(s);
  std::vector<Words> table = {{"sweep", "mirrors", "varies", "rows", "minutes", "with PyTorch"}};
  for (const Sweep& sweep : sweeps()) {
    Words cells = {sweep.name, *sweep.report ? sweep.report : "-", sweep.what, "-", "-", "-"};
    if (sweep.rows) {
      const SweepRun run = run_of(s, sweep, hardware);
      const SweepSize size = size_of(run);
      cells[3] = std::to_string(size.rows);
      if (run.machine.gpu && sweep.kind == SweepKind::training)
        cells[4] = strf("%.0f", size.minutes), cells[5] = strf("%.0f", size.minutes_with_peers);
    }
    table.push_back(cells);
  }
  std::printf("%s", markdown(table).c_str());
  return 0;
}

int run_bench(const Settings& s) {
  if (!s.summary.empty()) return print_summary(s.summary, s.over, s.json);
  if (s.writes_notes) return s.check ? check_notes(s.notes, "results") : write_notes(s.notes, "results");
  if (s.plots) return make_pictures("results");
  if (s.draws) {
    std::printf("%s\n", plot(s.plot).c_str());
    return 0;
  }
  check_environment();
  mkdir("build", 0777), mkdir("build/bench", 0777);
  if (s.out.empty() && !s.list && !s.dry_run) mkdir("results", 0777);
  if (s.list) return list_sweeps(s);
  check_planned(s);
  for (const std::string& name : s.names) {
    const Sweep& sweep = find_sweep(name);
    REQUIRE_USER(s.gpu.empty() || s.dry_run || sweep.rows, "--sweep %s --gpu %s: there is no plan of it", sweep.name,
                 s.gpu.c_str());
    if (s.names.size() == 1) check_use(s, sweep);  // of several each takes what it uses
  }
  const json hardware = hardware_for(s);
  int worst = 0;
  for (const std::string& name : s.names) worst = std::max(worst, run_one(s, find_sweep(name), hardware));
  return worst;
}

}  // namespace

int main(int argc, char** argv) {
  terminal::fill_standard_streams();
  end_child_on_signals();
  try {
    const Settings s = parse(argc, argv);
    if (s.rank) return collectives_rank({unfinished(s.out), s.command, FSDP_COMMIT}, s.values, &argc, &argv);
    const int status = run_bench(s);
    terminal::flush_output(terminal::OutputReader::reads_all);
    return status;
  } catch (const std::exception& e) {
    terminal::say(strf("error: %s", e.what()));
    return exit_status(e);
  }
}
