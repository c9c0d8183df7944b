#include "lib/program/start.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "cblas.h"

#include "lib/comm/gpus.h"
#include "lib/program/checkpoint.h"
#include "lib/program/outputs.h"
#include "lib/program/plan.h"
#include "lib/program/profile.h"
#include "lib/program/report.h"
#include "lib/program/resume.h"

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

// The options resolved and the data opened, alike on all ranks.
void agree_on_run(Options o, int gpus, Job* job) {
  const World& world = job->world;
  std::string text = to_config(o) + "commit = " + commit(), error;
  std::replace(text.begin(), text.end(), '\n', ';');
  require_same(text, "the configuration");
  if (!o.resume.empty()) {
    job->saved = load_state(o.resume, o.save, world);
    job->saved.state = read_state(job->saved.state, job->saved.step_dir + "/manifest.json");
  }
  Run& r = job->r;
  try {
    take_up(job->saved.state, &o);
    r = resolve(o, world.size, gpus);
    if (world.rank == 0 && !o.save.empty()) job->found = check_save(o.save, o.resume);
    if (world.rank == 0) check_outputs(o), check_profile(&r);
    const bool splits = o.val_every > 0 && o.val_data.empty();
    job->data = open_corpus(o.data, r.model.vocab, r.model.seq, o.seed, splits ? Split::training : Split::all);
    if (o.val_every > 0)
      job->val_data = splits ? open_corpus(o.data, r.model.vocab, r.model.seq, o.seed, Split::validation)
                             : open_corpus(o.val_data, r.model.vocab, r.model.seq, o.seed, Split::all);
    limit_epochs(Sampler{job->data.get(), r.model.seq, o.seed}.windows(), &r);
    compare(job->saved.state, &r);
  } catch (const Error& e) { error = e.what(); }
  throw_agreed<UsageError>(error);
  require_same(strf("%s, %s, %lld tokens", r.backend == Backend::gpu ? "GPU" : "CPU", job->data->description.c_str(),
                    ll(job->data->count)),
               "what the machine holds");
}

// Finds out who talks to whom and how, opens the device, and plans the step's memory.
void open_device(Job* job) {
  const World& world = job->world;
  Run& r = job->r;
  const bool gpu = r.backend == Backend::gpu;
  // One rank a GPU talks through NCCL. Otherwise all go through host memory, all in the same way.
  std::string sharing, error;
  const DeviceAssignment taken = assign_device(r.backend, world);
  if (world.size > 1 && gpu && taken.host_cards < world.local_size)
    sharing = strf("%d ranks share %d GPU%s", world.local_size, taken.host_cards, taken.host_cards > 1 ? "s" : "");
  else if (world.size > 1 && gpu && !FSDP_NCCL) sharing = "this build has no NCCL";
  sharing = agree(sharing);
  if (world.size > 1) job->transport = gpu && sharing.empty() ? Transport::nccl : Transport::mpi;
  const bool one_host = agree(on_one_host(world, r.fsdp.shards(world.size)) ? "" : "no").empty();
  check_gathers(r, job->transport, one_host);  // what cannot be is said before a device is opened
  if (!one_host && r.fsdp.shard_ranks > 1)
    r.notices.push_back(
        strf("--shard hybrid:%d: some groups of %d ranks lie on several hosts and gather over the network; "
             "a number that divides the ranks of every host keeps each group on one",
             r.fsdp.shard_ranks, r.fsdp.shard_ranks));
  if (!sharing.empty()) r.notices.push_back(sharing + ": collectives go over MPI through host memory, which is slow");
  job->gpus_used = taken.world_gpus;
  if (!std::getenv("OPENBLAS_NUM_THREADS")) openblas_set_num_threads(std::max(1, cores() / world.local_size));
  ops::set_allow_tf32(r.o.tf32);

  bool engines_pay = false;
  try {
    job->dev =
        std::make_unique<Device>(r.backend, taken.ordinal, taken.sharers, comm_streams(r.backend, job->transport));
    engines_pay = copy_engines_pay(*job->dev, world);
    plan(*job->dev, world, job->transport, r);
  } catch (const Error& e) { error = e.what(); }
  throw_agreed<Error>(error);
  choose_gathers(&r, world.size, job->transport, one_host, agree(engines_pay ? "" : "no").empty());
}

// Says what is about to run, takes the memory that was planned, and opens the log.
void begin(const std::string& command, Job* job) {
  const Run& r = job->r;
  Device& dev = *job->dev;
  const bool over_mpi = job->transport == Transport::mpi || r.fsdp.gather_over_mpi;
  double estimated_ms = -1;
  if (job->world.rank == 0) {
    const Chip* chip = r.backend == Backend::gpu && !over_mpi ? chip_named(dev.name) : nullptr;
    if (chip) estimated_ms = 1e3 * price(r, job->world, *chip).seconds;
    std::printf("%s", opening_text(r, dev, job->world, job->transport, job->data->description, estimated_ms).c_str());
    std::fflush(stdout);
  }
  std::string error;
  try {
    if (r.fsdp.gather_by_copy_engine && job->transport == Transport::nccl) use_nccl_memory(dev);
    dev.mem.commit(library_bytes(r.backend, job->transport));
    json opening;
    std::function<void(const std::string&)> note;
    if (job->world.rank == 0) {
      opening = header(r, dev, job->world, job->transport, job->gpus_used, estimated_ms, command);
      job->telemetry = std::make_unique<Telemetry>(r.o.log, !r.o.resume.empty(), opening, r.last_step, r.o.log_every);
      note = [telemetry = job->telemetry.get()](const std::string& line) { telemetry->note(line); };
    }
    job->diagnostics = std::make_unique<Diagnostics>(r, job->world, dev, opening, note);
  } catch (const Error& e) { error = e.what(); }
  throw_agreed<Error>(error);
}

}  // namespace

Job start(const Options& o, const World& world, const std::string& command) {
  Job job{world};
  job.command = command;
  const int gpus = gpu_count();
  agree_on_run(o, gpus, &job);
  open_device(&job);
  begin(command, &job);
  return job;
}
