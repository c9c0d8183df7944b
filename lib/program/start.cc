#include "lib/program/start.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "cblas.h"

#include "lib/program/checkpoint.h"
#include "lib/program/plan.h"
#include "lib/program/report.h"
#include "lib/program/resume.h"

#ifndef FSDP_NCCL
#define FSDP_NCCL 0
#endif

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
  if (!o.resume.empty()) job->state = load_state(o.resume, o.save, world);
  Run& r = job->r;
  try {
    take_up(job->state, &o);
    r = resolve(o, world.size, gpus);
    compare(job->state, &r);
    if (world.rank == 0 && !o.save.empty()) check_save(o.save, o.resume);
    if (world.rank == 0 && !o.export_to.empty()) check_export(o.export_to);
    const bool splits = o.val_every > 0 && o.val_data.empty();
    job->data = open_corpus(o.data, r.model.vocab, r.model.seq, o.seed, splits ? 1 : 0);
    if (o.val_every > 0)
      job->val_data = splits ? open_corpus(o.data, r.model.vocab, r.model.seq, o.seed, 2)
                             : open_corpus(o.val_data, r.model.vocab, r.model.seq, o.seed, 0);
  } catch (const Error& e) { error = e.what(); }
  throw_agreed<UsageError>(error);
  require_same(strf("%s, %s, %lld tokens", r.backend == Backend::gpu ? "GPU" : "CPU", job->data->description.c_str(),
                    ll(job->data->count)),
               "what the machine holds");
}

// Finds out who talks to whom and how, opens the device, and plans the step's memory.
void open_device(int gpus, Job* job) {
  const World& world = job->world;
  Run& r = job->r;
  const bool gpu = r.backend == Backend::gpu;
  // One rank a GPU talks through NCCL. Otherwise all go through host memory, all in the same way.
  std::string sharing, error;
  if (world.size > 1 && gpu && (world.local_size > gpus || !FSDP_NCCL))
    sharing = world.local_size > gpus ? strf("%d ranks share %d GPU%s", world.local_size, gpus, gpus > 1 ? "s" : "")
                                      : "this build has no NCCL";
  sharing = agree(sharing);
  if (world.size > 1) job->transport = gpu && sharing.empty() ? Transport::nccl : Transport::mpi;
  const bool one_host = agree(on_one_host(world, r.fsdp.shards(world.size)) ? "" : "no").empty();
  check_gathers(r, job->transport, one_host);  // what cannot be is said before a device is opened
  if (!sharing.empty()) r.notices.push_back(sharing + ": collectives go over MPI through host memory, which is slow");
  const int sharers = gpu ? (world.local_size + gpus - 1) / gpus : world.local_size;
  job->gpus_used = gpu ? std::max(1, world.size / sharers) : 0;
  if (!std::getenv("OPENBLAS_NUM_THREADS")) openblas_set_num_threads(std::max(1, cores() / world.local_size));
  ops::set_allow_tf32(r.o.tf32);

  bool engines_pay = false;
  try {
    job->dev = std::make_unique<Device>(r.backend, gpu ? world.local_rank % gpus : 0, sharers,
                                        gpu && job->transport == Transport::mpi);
    engines_pay = copy_engines_pay(*job->dev);
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
    dev.mem.commit();
    if (job->world.rank == 0)
      job->telemetry =
          std::make_unique<Telemetry>(r.o.log, !r.o.resume.empty(),
                                      header(r, dev, job->world, job->transport, job->gpus_used, estimated_ms, command),
                                      r.last_step, r.o.log_every);
  } catch (const Error& e) { error = e.what(); }
  throw_agreed<Error>(error);
}

}  // namespace

Job start(const Options& o, const World& world, const std::string& command) {
  Job job{world};
  const int gpus = gpu_count();
  agree_on_run(o, gpus, &job);
  open_device(gpus, &job);
  begin(command, &job);
  return job;
}
