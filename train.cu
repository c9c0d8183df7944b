// ./train: the training loop, from top to bottom. Start at main().
//
//   mpirun -np 4 ./train --seq 4096
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <memory>

#include "cblas.h"
#include "nlohmann/json.hpp"

#include "lib/program/checkpoint.h"
#include "lib/program/data.h"
#include "lib/program/plan.h"
#include "lib/program/report.h"
#include "lib/program/resume.h"
#include "lib/program/run.h"
#include "lib/program/step.h"
#include "lib/program/telemetry.h"
#include "model.h"

#ifndef FSDP_NCCL
#define FSDP_NCCL 0
#endif

namespace {

using Clock = std::chrono::steady_clock;
using nlohmann::json;
using ll = long long;

// ------------------------------------------------------------------------------------------------- what is to be run

// Linear warm-up, then half a cosine down to min_lr_ratio at the schedule's end. step counts from 1.
double learning_rate(const Run& r, int64_t step) {
  if (step <= r.warmup) return r.o.lr * double(step) / double(r.warmup);
  const double progress = double(step - r.warmup) / double(std::max<int64_t>(1, r.steps - r.warmup));
  const double cosine = 0.5 * (1 + std::cos(3.14159265358979323846 * std::min(1.0, progress)));
  return r.o.lr * (r.o.min_lr_ratio + (1 - r.o.min_lr_ratio) * cosine);
}

// ------------------------------------------------------------------------------------------------------ what is said

// --------------------------------------------------------------------------------------------------------- the data

// This rank's rows of a step, in the layout that the model loads. Rows are numbered over all ranks: rank r has those
// from r * global / W on, and puts them into its micro-batches one after another; places left over are padding.
void fill_batches(const Run& r, const World& world, const Sampler& sampler, int64_t first_sequence, int64_t rows_in_all,
                  int64_t micro_batches, int32_t* host) {
  const int64_t T = r.model.seq, M = r.batch * T, ints = batch_ints(r.model, r.batch);
  const int64_t from = world.rank * rows_in_all / world.size, to = (world.rank + 1) * rows_in_all / world.size;
  for (int64_t m = 0; m < micro_batches; m++, host += ints) {
    for (int64_t i = 0; i < r.batch; i++) {
      const int64_t row = from + m * r.batch + i;
      int32_t *tokens = host + i * T, *targets = host + M + i * T;
      if (row < to) {
        sampler.sequence(first_sequence + row, tokens, targets);
      } else {
        std::fill(tokens, tokens + T, 0);
        std::fill(targets, targets + T, -1);
      }
    }
    index_batch(r.model, r.batch, host);
  }
}

// --------------------------------------------------------------------------------------------------------- the loop

struct Context {
  Device& dev;
  const World& world;
  Transport transport;
  int gpus_used;
  Corpus *data, *val_data;
  Telemetry* telemetry;  // rank 0's
  const json& state;     // of the checkpoint that the run goes on from; null: none
};

// Returns what is wrong, the same on all ranks, with what the user asked for, or nothing. What else goes wrong throws.
template <class T, class G>
std::string train(const Context& c, const Run& r) {
  Device& dev = c.dev;
  const World& world = c.world;
  const bool speaks = world.rank == 0;

  // Everything that can fail for want of memory or of a file has done so before this point, on all ranks together.
  dev.mem.rewind();
  dev.mode = Mode::tune;
  ops::keep_workspace(dev);
  Model<T, G> model(dev, world, c.transport, r.model, r.batch, r.fsdp, true);
  const int64_t ints = batch_ints(r.model, r.batch);
  // The host is one step ahead of the device: two of each, for the step that runs and the one being prepared.
  std::vector<HostBuffer<int32_t>> batches;
  std::vector<HostBuffer<StepScalars>> results;
  std::vector<HostBuffer<char>> stats;
  std::vector<NsaKernels> kernels[2];
  std::vector<Graph> graphs;
  std::vector<HostBuffer<ops::AdamW>> adamw;
  std::vector<Event> copied, started, done, val_done;
  for (int i = 0; i < 2; i++) {
    batches.emplace_back(dev, ints * r.grad_accum);
    adamw.emplace_back(dev, 1);
    results.emplace_back(dev, 2);  // the step's, and validation's
    stats.emplace_back(dev, r.o.nsa_stats ? r.model.depth * int64_t(sizeof(NsaStats)) : 1);
    graphs.emplace_back(dev);
    copied.emplace_back(dev), val_done.emplace_back(dev);
    started.emplace_back(dev, true), done.emplace_back(dev, true);
  }
  HostBuffer<int32_t> val_batch(dev, ints);
  Event val_copied(dev);
  step_program(dev, model, r, batches[0].get(), adamw[0].get(), copied[0]);  // times the matmuls
  if (r.o.val_every > 0) validation_program(dev, model, val_batch.get(), true, val_copied);
  dev.mode = Mode::run;
  model.init_weights();
  dev.compute().synchronize();
  const std::vector<Part> parts = parts_of(model.fsdp), own_parts = parts_of(model.fsdp, true);
  std::unique_ptr<Saver> saver;
  int64_t done_before = 0, saved = 0;
  try {
    auto note = [&](const std::string& line) { c.telemetry->note(line); };
    if (!c.state.is_null())
      load_checkpoint(r.o.resume, r.o.save, dev, world, parts, note).at("step").get_to(done_before);
    if (!r.o.save.empty()) saver = std::make_unique<Saver>(dev, world, r.o.save, r.o.keep, own_parts, note);
  } catch (const UsageError& e) { return e.what(); }
  if (speaks && done_before > 0)
    c.telemetry->note(strf("going on after step %lld of %s", ll(done_before), r.o.resume.c_str()));

  const Sampler sampler{c.data, r.model.seq, r.o.seed};
  const Sampler val_sampler{c.val_data, r.model.seq, r.o.seed, false};
  const int64_t val_rows = c.val_data ? std::min(val_sampler.windows(), r.o.val_batches * r.batch * world.size) : 0;
  const double peak_tflops = peak_bf16_tflops(dev.name) * c.gpus_used, flops = flops_per_token(r.model);
  if (speaks && r.backend == Backend::gpu && peak_tflops == 0)
    c.telemetry->note(strf("unknown chip %s: no MFU is given", dev.name.c_str()));

  auto report = [&](int64_t step, bool latest) {
    const int slot = int(step % 2);
    const bool validated = r.o.val_every > 0 && step % r.o.val_every == 0;
    synchronize(validated ? val_done[slot] : done[slot]);
    dev.check();
    const double steps = results[slot][0].steps, at_one = double(step) * world.size;
    if (steps != at_one && speaks)  // all ranks see it, and one says it
      abort_all_ranks(strf("step %lld: the ranks are not all at one step: theirs sum to %.0f and not to %.0f. A rank "
                           "has skipped or repeated one, and weights are of several steps; --resume a step before this",
                           ll(step), steps, at_one),
                      1);
    if (!speaks) return;
    StepRecord s = {};
    s.step = step;
    s.grad_norm = std::sqrt(results[slot][0].norm2);
    s.loss = results[slot][0].loss / double(r.tokens_per_step());
    s.val_loss = validated ? results[slot][1].loss / double(val_rows * r.model.seq) : std::nan("");
    s.lr = learning_rate(r, step);
    s.step_ms = elapsed_ms(started[slot], done[slot]);
    s.tokens_per_sec = double(r.tokens_per_step()) / s.step_ms * 1e3;
    s.mfu = peak_tflops > 0 ? flops * s.tokens_per_sec / (peak_tflops * 1e12) : -1;
    s.peak_mib = mib(dev.mem.device_reported_bytes());
    s.exposed_gather_ms = s.exposed_reduce_ms = -1;
    if (r.o.comm_timing) model.fsdp.exposed_ms(latest, &s.exposed_gather_ms, &s.exposed_reduce_ms);
    if (model.stats()) s.more = stats_json(reinterpret_cast<const NsaStats*>(stats[slot].get()), kernels[slot]);
    c.telemetry->step(s);
  };

  // All ranks have the same norm. What is not finite makes weights that are not, for ever.
  auto diverged = [&](int64_t step) { return !std::isfinite(results[int(step % 2)][0].norm2); };
  auto divergence = [&](int64_t step) {
    dev.compute().synchronize();  // with a step that is still running
    return strf(
        "step %lld: the norm of the gradient is %g: the run has diverged, and nothing of it is saved from here; "
        "a lower --lr, a longer --warmup or a --clip would help%s",
        ll(step), std::sqrt(results[int(step % 2)][0].norm2),
        saver ? ("; --resume " + r.o.save + " goes on from its latest step").c_str() : "");
  };

  auto loop = [&]() -> std::string {
    const auto begin = Clock::now();
    int64_t step = done_before + 1;
    for (; step <= r.last_step; step++) {
      const int slot = int(step % 2);
      synchronize(done[slot]);  // two steps ago
      fill_batches(r, world, sampler, (step - 1) * r.global_batch, r.global_batch, r.grad_accum, batches[slot].get());

      Stream& s = dev.compute();
      const bool profiled = r.o.profile && step == r.last_step;
      if (profiled) dev.start_profile();
      const auto issued = Clock::now();
      s.record(started[slot]);
      dev.mark("tokens");
      if (r.o.comm_timing) model.fsdp.begin_timing();
      adamw[slot][0] = ops::AdamW(float(learning_rate(r, step)), float(r.o.beta1), float(r.o.beta2), float(r.o.eps),
                                  float(r.o.weight_decay), step);
      auto issue = [&] { step_program(dev, model, r, batches[slot].get(), adamw[slot].get(), copied[slot]); };
      // The first two run as they are: what is loaded or connected at its first use cannot be part of a graph.
      if (r.o.graph == 0 || step <= done_before + 2) {
        issue();
      } else {
        if (!graphs[slot].made()) {
          graphs[slot].make(issue);
          if (speaks && step == done_before + 3) { report_graph(graphs[slot].nodes(), c.telemetry); }
        }
        graphs[slot].launch();
      }
      s.copy(results[slot].get(), model.fsdp.scalars(), sizeof(StepScalars));
      if (model.stats()) s.copy(stats[slot].get(), model.stats(), r.model.depth * int64_t(sizeof(NsaStats)));
      kernels[slot] = model.kernels();
      s.record(done[slot]);
      if (profiled) {
        const double host_ms = std::chrono::duration<double, std::milli>(Clock::now() - issued).count();
        const auto times = dev.end_profile();
        if (speaks) report_profile(times, host_ms, c.telemetry);
      }

      if (r.o.val_every > 0 && step % r.o.val_every == 0) {
        const int64_t rows = r.batch * world.size;
        for (int64_t at = 0; at < val_rows; at += rows) {
          synchronize(val_copied);
          fill_batches(r, world, val_sampler, at, std::min(rows, val_rows - at), 1, val_batch.get());
          validation_program(dev, model, val_batch.get(), at == 0, val_copied);
        }
        model.finish_evaluation();
        s.copy(results[slot].get() + 1, model.fsdp.scalars(), sizeof(StepScalars));
        s.record(val_done[slot]);
      }

      if (step > done_before + 1) {
        report(step - 1, false);
        if (diverged(step - 1)) return divergence(step - 1);
      }
      if (saver) {
        saver->check();
        if (r.o.save_every > 0 && step % r.o.save_every == 0 && (step == r.last_step || saver->idle(step)))
          saver->begin(saved = step, state_at(r, step));
      }
      if (r.o.minutes > 0) {  // rank 0's clock counts
        const double minutes = std::chrono::duration<double>(Clock::now() - begin).count() / 60;
        if (broadcast_text(minutes >= r.o.minutes ? "stop" : "go on") == "stop") break;
      }
    }
    const int64_t last = std::min(step, r.last_step);
    if (last > done_before) {
      report(last, true);
      if (diverged(last)) return divergence(last);
      if (speaks && last < r.last_step) c.telemetry->note(strf("stopped after step %lld: time is up", ll(last)));
      if (saver && saved != last) saver->begin(last, state_at(r, last));
    }
    if (saver) saver->finish();
    dev.compute().synchronize();
    if (!r.o.export_to.empty()) {
      try {
        export_safetensors(r.o.export_to, r.o.export_dtype == "bf16" ? Dtype::bf16 : Dtype::f32, dev, world, own_parts);
      } catch (const Error& e) { return e.what(); }
      if (speaks) c.telemetry->note("the model is in " + r.o.export_to);
    }
    return "";
  };
  // What one rank throws ends all of them here: who unwound would take the model from under a step that still runs.
  std::string wrong;
  or_abort([&] { wrong = loop(); });
  return wrong;
}

// ------------------------------------------------------------------------------------------------------------- main

// From here on every rank takes part. An error that all ranks can know of is agreed on and said once; any other ends
// all ranks from where it happened.
void run(Options o, const World& world, const std::string& command) {
  const int gpus = gpu_count();
  std::string text = to_config(o) + "commit = " + commit();
  std::replace(text.begin(), text.end(), '\n', ';');
  require_same(text, "the configuration");

  json state;
  if (!o.resume.empty()) state = load_state(o.resume, o.save, world);

  Run r;
  std::unique_ptr<Corpus> data, val_data;
  std::unique_ptr<Device> dev;
  Transport transport = Transport::none;
  std::string error, sharing;
  try {
    take_up(state, &o);
    r = resolve(o, world.size, gpus);
    compare(state, &r);
    if (world.rank == 0 && !o.save.empty()) check_save(o.save, o.resume);
    if (world.rank == 0 && !o.export_to.empty()) check_export(o.export_to);
    const bool splits = o.val_every > 0 && o.val_data.empty();
    data = open_corpus(o.data, r.model.vocab, r.model.seq, o.seed, splits ? 1 : 0);
    if (o.val_every > 0)
      val_data = splits ? open_corpus(o.data, r.model.vocab, r.model.seq, o.seed, 2)
                        : open_corpus(o.val_data, r.model.vocab, r.model.seq, o.seed, 0);
    const bool gpu = r.backend == Backend::gpu;
    if (world.size > 1 && gpu && (world.local_size > gpus || !FSDP_NCCL))
      sharing = world.local_size > gpus ? strf("%d ranks share %d GPU%s", world.local_size, gpus, gpus > 1 ? "s" : "")
                                        : "this build has no NCCL";
  } catch (const Error& e) { error = e.what(); }
  error = agree(error);
  if (!error.empty()) throw UsageError(error);
  require_same(strf("%s, %s, %lld tokens", r.backend == Backend::gpu ? "GPU" : "CPU", data->description.c_str(),
                    ll(data->count)),
               "what the machine holds");

  // One rank a GPU talks through NCCL. Otherwise all go through host memory, all in the same way.
  sharing = agree(sharing);
  const bool gpu = r.backend == Backend::gpu;
  if (world.size > 1) transport = gpu && sharing.empty() ? Transport::nccl : Transport::mpi;
  const bool one_host = agree(on_one_host(world, r.fsdp.shards(world.size)) ? "" : "no").empty();
  check_gathers(r, transport, one_host);  // what cannot be is said before a device is opened
  if (!sharing.empty()) r.notices.push_back(sharing + ": collectives go over MPI through host memory, which is slow");
  const int sharers = gpu ? (world.local_size + gpus - 1) / gpus : world.local_size;
  const int gpus_used = gpu ? std::max(1, world.size / sharers) : 0;
  if (!std::getenv("OPENBLAS_NUM_THREADS")) openblas_set_num_threads(std::max(1, cores() / world.local_size));
  ops::set_allow_tf32(o.tf32);

  bool engines = false;
  try {
    dev = std::make_unique<Device>(r.backend, gpu ? world.local_rank % gpus : 0, sharers,
                                   gpu && transport == Transport::mpi);
    engines = copy_engines_pay(*dev);
    plan(*dev, world, transport, r);
  } catch (const Error& e) { error = e.what(); }
  error = agree(error);
  if (!error.empty()) throw Error(error);
  choose_gathers(&r, world.size, transport, one_host, agree(engines ? "" : "no").empty());

  double estimated_ms = -1;
  if (world.rank == 0) {
    const Chip* chip = gpu && transport != Transport::mpi && !r.fsdp.gather_over_mpi ? chip_named(dev->name) : nullptr;
    if (chip) estimated_ms = 1e3 * price(r, world, *chip).seconds;
    std::printf("%s", opening_text(r, *dev, world, transport, data->description, estimated_ms).c_str());
    std::fflush(stdout);
  }
  std::unique_ptr<Telemetry> telemetry;
  try {
    if (r.fsdp.gather_by_copy_engine && transport == Transport::nccl) use_nccl_memory(*dev);
    dev->mem.commit();
    if (world.rank == 0)
      telemetry = std::make_unique<Telemetry>(o.log, !o.resume.empty(),
                                              header(r, *dev, world, transport, gpus_used, estimated_ms, command),
                                              r.last_step, o.log_every);
  } catch (const Error& e) { error = e.what(); }
  error = agree(error);
  if (!error.empty()) throw Error(error);

  const Context context{*dev, world, transport, gpus_used, data.get(), val_data.get(), telemetry.get(), state};
  or_abort([&] { with_types(r, [&](auto t, auto g) { error = train<decltype(t), decltype(g)>(context, r); }); });
  if (!error.empty()) throw UsageError(error);
}

int exit_status(const Error& e) { return dynamic_cast<const UsageError*>(&e) ? 2 : 1; }

}  // namespace

int main(int argc, char** argv) {
  Options o;
  std::string text, error, command = "mpirun -np ";
  try {
    if (!parse_options(argc, argv, &o, &text)) {
      std::printf("%s", text.c_str());
      return 0;
    }
  } catch (const Error& e) { error = e.what(); }
  if (error.empty() && (o.version || o.hardware || o.show_params || o.plan || o.show_schedule)) {
    try {
      return answer(o);
    } catch (const Error& e) {
      std::fprintf(stderr, "error: %s\n", e.what());
      return exit_status(e);
    }
  }
  World world;
  int status = 0;
  try {
    world = init_mpi(&argc, &argv);
    command += std::to_string(world.size);
    for (int i = 0; i < argc; i++) command += std::string(" ") + argv[i];
    error = agree(error);
    if (!error.empty()) throw UsageError(error);
    run(o, world, command);
  } catch (const Error& e) {  // agreed on: the same on all ranks
    status = exit_status(e);
    if (world.rank == 0) std::fprintf(stderr, "error: %s\n", e.what());
  } catch (const std::exception& e) { abort_all_ranks(strf("rank %d: %s", world.rank, e.what()), 1); }
  finish_mpi();
  return status;
}
