#include "lib/program/start.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "cblas.h"

#include "lib/comm/flight.h"
#include "lib/comm/gpus.h"
#include "lib/program/checkpoint.h"
#include "lib/program/export.h"
#include "lib/program/files.h"
#include "lib/program/halt.h"
#include "lib/program/init.h"
#include "lib/program/outputs.h"
#include "lib/program/profile.h"
#include "lib/program/report.h"
#include "lib/program/resume.h"
#include "lib/program/sampling.h"
#include "lib/program/token_file.h"

#ifndef FSDP_NCCL
#define FSDP_NCCL 0
#endif

using nlohmann::json;
using ll = long long;

namespace {

template <class E>
void throw_agreed(std::string error) {
  error = agree(error);
  if (!error.empty()) throw E(error);
}

// What f throws on a rank is thrown on all of them.
template <class F>
void together(F f) {
  std::string refused, error;
  try {
    f();
  } catch (const UsageError& e) { refused = e.what(); } catch (const Error& e) {
    error = e.what();
  }
  throw_agreed<UsageError>(refused);
  throw_agreed<Error>(error);
}

// The ranks are those that were meant, of one program, told the same, and with GPUs where others have some. Returns
// what is to be noted.
std::vector<std::string> check_launch(const Options& o, const std::string& typed, int gpus, Job* job) {
  auto require_none = [](const std::string& wrong) { REQUIRE_USER(wrong.empty(), "%s", wrong.c_str()); };
  job->ranks = gather_facts(facts_here(job->world, gpus));
  require_none(other_programs(job->ranks));
  require_same(to_config(o), "the configuration");
  const bool cpu = o.device == "cpu";
  SingleRank alone;
  if (job->world.size == 1)
    alone = judge_single_rank(launcher_of(std::getenv), cpu ? 0 : gpus, o.allow_single_rank, in_ci(std::getenv), typed);
  require_none(alone.error);
  if (cpu) return {};
  require_none(without_gpus(job->ranks));
  return {alone.notice, fewer_gpus(job->ranks)};
}

// A model knows the tokens of one tokenizer. A built-in corpus that no step reads is compared with the checkpoint's
// alone.
void require_one_kind(const Job& job) {
  const Options& o = job.r.o;
  const bool trains = job.r.last_step > (job.saved.state.is_null() ? 0 : job.saved.state.at("step").get<int64_t>());
  std::vector<std::pair<std::string, TokenKind>> kinds = {
      {"the data of " + job.saved.step_dir, tokens_of(job.saved.state)}};
  const auto require_same_kind = [&](const std::string& name, const TokenKind& kind) {
    for (const auto& [other_name, other] : kinds)
      if (const std::string differs = difference(other, kind); !differs.empty())
        throw UsageError(
            strf("%s and %s differ: %s; use those of one kind", other_name.c_str(), name.c_str(), differs.c_str()));
  };
  // A folder does not say what its tokenizer is called in token files, but that it is none of bytes.
  const bool other_than_bytes = job.init && files::kind_of(job.init->dir + "/tokenizer.json") != 0;
  const auto add = [&](const std::string& option, const std::string& names, const TokenKind& kind) {
    const std::string name = names.empty() ? "the built-in corpus (--data)" : option + " " + names;
    require_same_kind(name, kind);
    const bool read = !names.empty() || trains;
    REQUIRE_USER(
        !other_than_bytes || kind.tokenizer != bytes_tokenizer || !(read || o.sample > 0),
        "--init %s has a tokenizer.json, and %s is text, a byte a token; make a token file with that tokenizer "
        "(data/prepare.py)%s",
        o.init.c_str(), name.c_str(), read ? "" : ", or give --data random and --prompt as token ids");
    if (read) kinds.push_back({name, kind});
  };
  add("--data", o.data, *job.data);
  if (job.val_data && !o.val_data.empty()) add("--val-data", o.val_data, *job.val_data);
  if (job.eval) add("--eval", o.eval, job.eval->kind);
}

// The options resolved and the data opened, alike on all ranks.
void agree_on_run(Options o, const std::vector<std::string>& notices, int gpus, Job* job) {
  const World& world = job->world;
  std::string error;
  Steps found;  // in --save's directory, rank 0's
  if (!o.resume.empty()) {
    job->saved = load_resumed(o, world);
  } else if (!o.init.empty()) {
    job->init = folder_for_all(o.init, world);
  }
  Run& r = job->r;
  try {
    r = job->init           ? resolve_from(*job->init, o, world.size, gpus)
        : !o.resume.empty() ? resolve_resumed(job->saved, o, world.size, gpus)
                            : resolve(o, world.size, gpus);
    o = r.o;
    if (!job->init && o.gives("init"))
      r.notices.push_back("--init " + o.init + " is not read: the checkpoint has the weights");
    for (const std::string& notice : notices)
      if (!notice.empty()) r.notices.push_back(notice);
    if (world.rank == 0 && !o.save.empty()) found = check_save(o.save, o.resume);
    if (world.rank == 0) check_outputs(o), check_profile(&r);
    const bool splits = o.val_every > 0 && o.val_data.empty();
    auto open = [&](const std::string& names, Split split) {
      const bool checked = split == Split::validation;
      return open_corpus(names, r.model.vocab, r.model.seq, o.seed, split, {world.rank, world.size, checked});
    };
    job->data = open(o.data, splits ? Split::training : Split::all);
    if (o.val_every > 0) job->val_data = splits ? open(o.data, Split::validation) : open(o.val_data, Split::all);
    if (!o.eval.empty()) job->eval = open_eval(o.eval, r.model.vocab, r.model.seq, {world.rank, world.size});
    if (o.sample > 0) job->prompt = parse_prompt(o.prompt, *job->data, r.model.vocab);
    require_one_kind(*job);
    r.data_files = job->data->files, r.tokens = *job->data;
    limit_epochs(Sampler{job->data.get(), r.model.seq, o.seed}.windows(), &r);
    compare(job->saved.state, &r);
  } catch (const Error& e) { error = e.what(); }
  throw_agreed<UsageError>(error);
  // What is left open may be chosen otherwise where a machine or a file is another.
  require_same(strf("%lld tokens of %s\n", ll(job->data->count), job->data->description.c_str()) + settings(r).dump(0),
               "the run");
  if (!o.save.empty()) job->save_to = std::make_unique<SaveDirectory>(world, o.save, found);
  together([&] {
    if (world.rank == 0) job->locks = lock_outputs(o);
  });
  if (!o.export_to.empty()) check_export_shared(o.export_to, world);
}

// Finds out who talks to whom and how, opens the device, and plans the step's memory.
void open_device(Job* job) {
  const World& world = job->world;
  Run& r = job->r;
  const bool gpu = r.backend == Backend::gpu;
  // One rank a GPU talks through NCCL. Otherwise all go through host memory, all in the same way.
  std::string sharing;
  const DeviceAssignment taken = assign_device(r.backend, world);
  if (world.size > 1 && gpu && taken.host_cards < world.local_size)
    sharing = strf("%d ranks on %s share %d GPU%s", world.local_size, job->ranks[size_t(world.rank)].host.c_str(),
                   taken.host_cards, taken.host_cards > 1 ? "s" : "");
  else if (world.size > 1 && gpu && !FSDP_NCCL) sharing = "this build has no NCCL";
  sharing = agree(sharing);
  if (world.size > 1) job->transport = gpu && sharing.empty() ? Transport::nccl : Transport::mpi;
  const bool one_host = agree(on_one_host(world, r.fsdp.shards(world.size)) ? "" : "no").empty();
  check_collectives(r, job->transport, one_host);  // what cannot be is said before a device is opened
  if (!one_host && r.fsdp.shard_ranks > 1)
    r.notices.push_back(
        strf("--shard hybrid:%d: some groups of %d ranks lie on several hosts and gather over the network; "
             "a number that divides the ranks of every host keeps each group on one",
             r.fsdp.shard_ranks, r.fsdp.shard_ranks));
  if (!sharing.empty()) r.notices.push_back(sharing + ": collectives go over MPI through host memory, which is slow");
  job->gpus_used = taken.world_gpus;
  if (!std::getenv("OPENBLAS_NUM_THREADS")) openblas_set_num_threads(std::max(1, cores() / world.local_size));

  bool engines_pay = false;
  together([&] {
    job->dev =
        std::make_unique<Device>(r.backend, taken.ordinal, taken.sharers, comm_streams(r.backend, job->transport));
    engines_pay = copy_engines_pay(*job->dev, world);
    try {
      if (gpu) check_gpu(r.model, job->dev->compute_capability, job->dev->name);
    } catch (const UsageError& e) { throw of_checkpoint(e, job->saved.step_dir); }
  });
  choose_collectives(&r, world.size, job->transport, one_host, agree(engines_pay ? "" : "no").empty());
  together([&] { plan(*job->dev, world, job->transport, r); });
  RankFacts here = job->ranks[size_t(world.rank)];
  here.device = gpu ? strf("GPU %d, ", taken.ordinal) + job->dev->name : job->dev->name;
  if (gpu) here.pci = name_gpu(taken.ordinal).card;
  job->ranks = gather_facts(here);
}

// Rank 0's, and all that is said from here on goes through it.
// Returns its first line.
nlohmann::json open_log(double estimated_ms, Job* job) {
  const Run& r = job->r;
  nlohmann::json first = header(r, *job->dev, job->world, job->transport, job->gpus_used, estimated_ms, job->command);
  first["launch"] = places_json(job->ranks);
  TelemetryOptions t;
  t.log = r.o.log, t.tensorboard = r.o.tensorboard, t.append = !r.o.resume.empty();
  if (!job->saved.state.is_null()) t.first_step = 1 + job->saved.state.at("step").get<int64_t>();
  t.total_steps = r.last_step, t.log_every = r.o.log_every;
  if (r.o.gives("log-every")) t.lines = Lines::plain;
  job->telemetry = std::make_unique<Telemetry>(t, first);
  for (Corpus* corpus : {job->data.get(), job->val_data.get()})
    if (corpus) corpus->warn = [t = job->telemetry.get()](const std::string& line) { t->note(line); };
  return first;
}

// Says what is about to run, takes the memory that was planned, and opens the log.
void begin(Job* job) {
  const Run& r = job->r;
  Device& dev = *job->dev;
  const bool over_mpi = job->transport == Transport::mpi || r.fsdp.gather_over_mpi;
  double estimated_ms = -1;
  nlohmann::json opening;
  std::function<void(const std::string&)> note;
  together([&] {
    if (job->world.rank == 0) {
      const Chip* chip = r.backend == Backend::gpu ? chip_named(dev.name) : nullptr;
      if (chip) job->price = price(r, job->world, *chip);
      if (job->price && !over_mpi) estimated_ms = 1e3 * job->price->seconds;
      std::printf("%s%s", places_text(job->ranks).c_str(),
                  opening_text(r, dev, job->world, job->transport, job->data->description, estimated_ms).c_str());
      std::fflush(stdout);
    }
    if (r.fsdp.uses_copy_engines() && job->transport == Transport::nccl) use_nccl_memory(dev);
    dev.mem.commit(library_bytes(r.backend, job->transport, r.fsdp.communicators(job->world.size)));
    if (job->world.rank != 0) return;
    opening = open_log(estimated_ms, job);
    note = [telemetry = job->telemetry.get()](const std::string& line) { telemetry->note(line); };
  });
  // Each rank begins its file anew, so none before rank 0 has the log, which another run may be writing to.
  together([&] { job->diagnostics = std::make_unique<Diagnostics>(r, job->world, dev, opening, note); });
}

}  // namespace

Job start(const Options& o, const World& world, const std::string& typed) {
  ignore_write_signals();
  Job job{world};
  job.command = strf("mpirun -np %d %s", world.size, typed.c_str());
  const int gpus = gpu_count();
  flight::set_phase("the start, reading options and data");
  const std::vector<std::string> notices = check_launch(o, typed, gpus, &job);
  agree_on_run(o, notices, gpus, &job);
  flight::set_phase("the start, planning the memory");
  open_device(&job);
  flight::set_phase("the start, taking the memory");
  begin(&job);
  return job;
}

WatchdogOptions watchdog_options(const Options& o, const World& world) {
  WatchdogOptions w;
  w.timeout_s = o.timeout;
  w.records_dir = !o.diagnostics.empty() ? o.diagnostics : !o.save.empty() ? o.save : ".";
  w.each_tick = [dir = world.rank == 0 ? o.save : ""] { halt::look(dir); };
  return w;
}
