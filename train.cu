// ./train: the training loop, from top to bottom. Start at main().
//
//   mpirun -np 4 ./train --seq 4096
#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include "lib/comm/flight.h"
#include "lib/device/terminal.h"
#include "lib/program/bad_steps.h"
#include "lib/program/checkpoint.h"
#include "lib/program/data.h"
#include "lib/program/export.h"
#include "lib/program/findings.h"
#include "lib/program/halt.h"
#include "lib/program/init.h"
#include "lib/program/launch.h"
#include "lib/program/plan.h"
#include "lib/program/profile.h"
#include "lib/program/ranks.h"
#include "lib/program/replay.h"
#include "lib/program/report.h"
#include "lib/program/resume.h"
#include "lib/program/start.h"
#include "lib/program/step.h"
#include "lib/program/step_in_flight.h"
#include "lib/program/telemetry.h"
#include "model.h"

namespace {

using Clock = std::chrono::steady_clock;
using ll = long long;

// Linear warm-up, then half a cosine down to min_lr_ratio at the schedule's end. step counts from 1.
double learning_rate(const Run& r, int64_t step) {
  if (step <= r.warmup) return r.o.lr * double(step) / double(r.warmup);
  const double progress = double(step - r.warmup) / double(std::max<int64_t>(1, r.steps - r.warmup));
  const double cosine = 0.5 * (1 + std::cos(3.14159265358979323846 * std::min(1.0, progress)));
  return r.o.lr * (r.o.min_lr_ratio + (1 - r.o.min_lr_ratio) * cosine);
}

// This rank's rows of a batch, in the layout that the model loads. Rows are numbered over all ranks: rank r has those
// from r * rows / W on, and puts them into its micro-batches one after another. What is left of those is padding, whose
// targets are -1: they have no loss and no gradient.
void fill_batches(const Run& r, const World& world, const Sampler& sampler, int64_t first_sequence, int64_t rows,
                  int32_t* host) {
  const int64_t T = r.model.seq, M = r.batch * T, ints = batch_ints(r.model, r.batch);
  const int64_t from = world.rank * rows / world.size, to = (world.rank + 1) * rows / world.size;
  for (int64_t m = 0; m < r.grad_accum; m++, host += ints) {
    for (int64_t i = 0; i < r.batch; i++) {
      const int64_t row = from + m * r.batch + i;
      const MicroBatch batch = micro_batch_at(host, M);
      int32_t *tokens = batch.tokens + i * T, *targets = batch.targets + i * T;
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

// --------------------------------------------------------------------------------------------------------- the step

template <class T, class G>
struct Training {
  const Job& job;
  Model<T, G>& model;
  const Run& r = job.r;
  Device& dev = *job.dev;
  const int64_t units = int64_t(model.fsdp.units().size());
  StepInFlight slots[2] = {{dev, r, {dev, units}}, {dev, r, {dev, units}}};
  HostBuffer<int32_t> val_batches{dev, batch_ints(r.model, r.batch) * r.grad_accum};
  Event val_copied{dev};
  HostBuffer<int32_t> bad_outputs{dev, r.model.modules()};  // of a step that was not finite
  Sampler sampler{job.data.get(), r.model.seq, r.o.seed};
  Sampler val_sampler{job.val_data.get(), r.model.seq, r.o.seed, /*shuffle=*/false};
  // Of a validation, all ranks together: counted in global batches, so that they are the same at any number of ranks.
  int64_t val_rows = job.val_data ? std::min(r.o.val_batches * r.global_batch, val_sampler.windows()) : 0;
  const double flops = flops_per_token(r.model) * double(r.tokens_per_step());  // of a step, all ranks together
  BadSteps bad{r};
  std::string stop = {};              // why to stop behind the step that is running: the same on all ranks
  int64_t first = 1, issued = 0;      // steps: the first of this run, the latest that the device was given
  std::string first_ended = {};       // when the device was through with the first
  StepProfiler profiler{job};         // with --profile and --trace
  std::unique_ptr<Saver> saver = {};  // with --save
  std::string unsaved = {};           // why the run's last save failed
  bool halted = false;                // asked to stop, and soon
  StepInFlight& slot(int64_t step) { return slots[step % 2]; }
  bool speaks() const { return job.world.rank == 0; }
  bool validates(int64_t step) const { return r.o.val_every > 0 && step % r.o.val_every == 0; }
  bool samples(int64_t step) const { return r.o.sample_every > 0 && step % r.o.sample_every == 0; }
};

// What a rank's files do not let it read ends the run, with what there is to go back to.
template <class T, class G>
void fetch(Training<T, G>& t, const Sampler& sampler, int64_t first_sequence, int64_t rows, int32_t* host) {
  try {
    fill_batches(t.r, t.job.world, sampler, first_sequence, rows, host);
  } catch (const Error& e) { throw Error(e.what() + (t.saver ? "; " + way_back(t.r.o.save) : "")); }
}

// Enqueues a step, and the copies of what is told of it. Nothing waits for the device but for the step before the last.
template <class T, class G>
void issue_step(Training<T, G>& t, int64_t step) {
  const Run& r = t.r;
  StepInFlight& now = t.slot(t.issued = step);
  Stream& s = t.dev.compute();
  synchronize(now.done);  // two steps ago: the host stays one step ahead of the device
  flight::begin_step(step);
  const auto begun = Clock::now();
  fetch(t, t.sampler, (step - 1) * r.global_batch, r.global_batch, now.batches.get());
  now.fetch_seconds = std::chrono::duration<double>(Clock::now() - begun).count();
  now.adamw[0] = ops::AdamW(float(learning_rate(r, step)), float(r.o.beta1), float(r.o.beta2), float(r.o.eps),
                            float(r.o.weight_decay), step);
  now.adamw[0].halt = halt::summand();
  t.profiler.begin(step, t.first);
  s.record(now.started);
  t.dev.mark("tokens");
  if (r.o.comm_timing) t.model.fsdp.exposed().begin();
  auto issue = [&] {
    step_program(t.dev, t.model, r, now.batches.get(), now.adamw.get(), now.copied);
    copy_results(t.dev, t.model, r, &now);
  };
  // The first two run as they are: what is loaded or connected at its first use cannot be part of a graph.
  // Nor can the step behind a save, whose updates wait for the copies.
  if (r.o.graph == 0 || step < t.first + 2 || t.model.fsdp.holds_updates()) {
    issue();
  } else {
    t.model.fsdp.before_graph();
    if (!now.graph.made()) {
      now.graph.make(issue);
      if (t.speaks() && !t.slot(step + 1).graph.made()) report_graph(now.graph.nodes(), t.job.telemetry.get());
    }
    now.graph.launch();
  }
  now.kernels = t.model.kernels();
  if (step == t.first) s.host([&t] { t.first_ended = now_iso8601(); });
  s.record(now.done);
  t.dev.mark("");
  t.profiler.end(step);
}

// Enqueues a validation behind the step: the loss of val_rows, dealt out to ranks and micro-batches as a step's are.
// Who asks to stop does not wait for it: then it ends early on all ranks, and has no result.
template <class T, class G>
void issue_validation(Training<T, G>& t, int64_t step) {
  const Run& r = t.r;
  StepInFlight& now = t.slot(step);
  now.validation_left = "";
  for (int64_t at = 0; at < t.val_rows && now.validation_left.empty(); at += r.global_batch) {
    synchronize(t.val_copied);
    now.validation_left = agree(halt::reason(halt::summand(), r.o.save));
    fetch(t, t.val_sampler, at, std::min(r.global_batch, t.val_rows - at), t.val_batches.get());
    for (int64_t m = 0; m < r.grad_accum; m++)
      validation_program(t.dev, t.model, t.val_batches.get() + m * batch_ints(r.model, r.batch), at + m == 0,
                         t.val_copied);
  }
  t.model.finish_evaluation();
  t.dev.compute().copy(now.validated.get(), t.model.fsdp.scalars(), sizeof(StepScalars));
  t.dev.compute().record(now.validation_done);
}

// Of a step that the device is through with, on any rank.
template <class T, class G>
StepRecord step_record(Training<T, G>& t, int64_t step) {
  const Run& r = t.r;
  StepInFlight& was = t.slot(step);
  StepRecord s = {};
  s.step = step;
  s.grad_norm = std::sqrt(was.trained[0].norm2);
  s.loss = was.trained[0].loss / double(r.tokens_per_step());
  s.val_loss = t.validates(step) && was.validation_left.empty()
                   ? was.validated[0].loss / double(t.val_rows * r.model.seq)
                   : std::nan("");
  s.lr = learning_rate(r, step);
  s.step_ms = elapsed_ms(was.started, was.done);
  if (step == t.first) s.ended = t.first_ended;
  s.is_last = step == t.issued && !t.stop.empty();
  s.tokens_per_sec = double(r.tokens_per_step()) / s.step_ms * 1e3;
  s.mfu = mfu(t.dev.name, t.job.gpus_used, t.flops, 1e-3 * s.step_ms);
  s.peak_mib = mib(t.dev.mem.device_reported_bytes());
  s.exposed_gather_ms = s.exposed_reduce_ms = -1;
  if (r.o.comm_timing) t.model.fsdp.exposed().read(step == t.issued, &s.exposed_gather_ms, &s.exposed_reduce_ms);
  return s;
}

// Waits for a step and says what came of it. Returns what ends the run, the same on all ranks, or nothing.
template <class T, class G>
std::string report_step(Training<T, G>& t, int64_t step) {
  const Run& r = t.r;
  StepInFlight& was = t.slot(step);
  synchronize(t.validates(step) ? was.validation_done : was.done);
  const StepScalars& of = was.trained[0];
  const double at_one = double(step) * t.job.world.size;
  if (of.steps != at_one && t.speaks())  // all ranks see it, and one says it
    abort_all_ranks(
        strf("step %lld: the ranks are at different steps (their sum is %.0f, not %.0f): one has skipped or "
             "repeated a step, and weights belong to several; --resume from a step before this one",
             ll(step), of.steps, at_one),
        1);
  StepRecord s = step_record(t, step);
  if (t.speaks()) {
    if (t.bad.skipped() > 0) s.more["skipped"] = t.bad.skipped();
    if (r.o.nsa_stats) s.more.update(stats_json(was.nsa_sums.get(), was.nsa_maxima.get(), was.kernels));
    t.job.telemetry->step(s);
  }
  if (t.validates(step) && !was.validation_left.empty() && t.speaks())
    t.job.telemetry->note(strf("the validation of step %lld is left out: %s", ll(step), was.validation_left.c_str()));
  if (step == t.first) t.job.diagnostics->count_fallbacks(was.kernels);
  if (const Finding f = std::exchange(was.sample, {}); t.speaks() && !f.line.empty()) t.job.telemetry->tell(f);
  const bool counts = t.model.nsa_sums() != nullptr;
  t.job.diagnostics->step(
      s, {counts ? was.nsa_sums.get() : nullptr, counts ? was.nsa_maxima.get() : nullptr, was.fetch_seconds});
  // From here on what this step told is the same on all ranks.
  if (const std::string stop = halt::reason(of.halts, r.o.save); !stop.empty()) t.stop = stop, t.halted = true;
  const auto note = [&](const std::string& line) { t.job.telemetry->note(line); };
  const auto replay = [&] {
    return first_bad_output(t.dev, t.model, r, was.batches.get(), was.adamw.get(), was.copied, t.bad_outputs.get());
  };
  const std::string wrong = t.bad.take(step, of, t.model.fsdp.units(), was.unit_sums.get(), replay, note);
  if (wrong.empty()) return "";
  t.dev.compute().synchronize();  // with a step that is still running
  t.dev.gather().synchronize();   // and the gathers that it ends with
  if (!t.saver) return wrong;
  try {
    t.saver->finish();       // a save that is under way may be the one to go back to
  } catch (const Error&) {}  // said is why the run ends
  return wrong + "; " + way_back(r.o.save);
}

// --------------------------------------------------------------------------------------------------------- the loop

// Says why the run stopped early and how it goes on. Everything is saved by now.
template <class T, class G>
void note_stop(Training<T, G>& t, int64_t last) {
  const std::string dir = t.r.o.save;
  const std::string next = dir.empty()         ? "nothing is saved without --save"
                           : t.unsaved.empty() ? "saved to " + dir + "; the same command with --resume latest goes on"
                                               : "it could not be saved";
  if (last < t.r.last_step)
    t.job.telemetry->note(strf("stopped after step %lld: %s; %s", ll(last), t.stop.c_str(), next.c_str()));
  const std::string wrong = dir.empty() ? "" : halt::remove_file(dir);
  if (!wrong.empty()) t.job.telemetry->note(wrong);
}

// Returns what ended the run before its last step, the same on all ranks, or nothing.
template <class T, class G>
std::string loop(Training<T, G>& t) {
  const Run& r = t.r;
  const auto begin = Clock::now();
  int64_t step = t.first, saved = 0;
  const auto note = [&](const std::string& line) { t.job.telemetry->note(line); };
  const auto save = [&](int64_t n) {
    const OlderSteps older = t.bad.amid() ? OlderSteps::stay : OlderSteps::rotate;
    begin_save(t.saver.get(), &t.model.fsdp, saved = n, state_at(r, n), older);
  };
  const auto norm2 = [&] {  // of the step that is running
    synchronize(t.slot(step).done);
    return t.slot(step).trained[0].norm2;
  };
  t.job.diagnostics->begin(t.first);
  for (; step <= r.last_step; step++) {
    issue_step(t, step);
    if (t.validates(step)) issue_validation(t, step);
    if (step > t.first) {
      const std::string wrong = report_step(t, step - 1);
      if (!wrong.empty()) return wrong;
      if (!t.stop.empty()) break;
    }
    if (t.samples(step)) t.slot(step).sample = write_sample(t.job, t.model, step);
    if (t.saver) {
      t.saver->check();
      // The last step is saved below, with whatever the run ends by.
      if (step < r.last_step && t.bad.save_is_due(step, norm2, note) && t.saver->idle(step)) save(step);
    }
    if (r.o.minutes > 0) {  // rank 0's clock counts
      const double minutes = std::chrono::duration<double>(Clock::now() - begin).count() / 60;
      t.stop = broadcast_text(minutes >= r.o.minutes ? "--minutes reached" : "");
      if (!t.stop.empty()) break;
    }
  }
  const int64_t last = std::min(step, r.last_step);
  if (last >= t.first) {
    const std::string wrong = report_step(t, last);
    if (!wrong.empty()) return wrong;
    if (t.saver && saved != last) save(last);
  }
  t.job.diagnostics->end();
  if (t.saver) t.unsaved = t.saver->finish();
  if (t.speaks() && !t.stop.empty()) note_stop(t, last);
  t.dev.compute().synchronize();
  t.dev.gather().synchronize();  // a step may have ended with gathers for a next one that does not come
  return "";
}

// What is found out by the last weights, unless somebody wants the machine. Returns what could not be found out, or
// nothing.
template <class T, class G>
std::string conclude(Training<T, G>& t) {
  // Everything is written. Who asked too late for the last step to tell, while the model was exported, is heard here.
  halt::end_at_once();
  if (!t.halted) t.stop = agree(halt::reason(halt::summand(), t.r.o.save)), t.halted = !t.stop.empty();
  const bool asked = t.job.eval || t.r.o.sample > 0;
  if (t.halted && asked && t.speaks()) t.job.telemetry->note("--eval and --sample are left out: " + t.stop);
  if (t.halted) return "";
  const bool sampled = t.issued >= t.first && t.samples(t.issued);
  std::string wrong;
  for (const Finding& f : last_findings(t.job, t.model, std::max(t.issued, t.first - 1), sampled)) {
    if (wrong.empty()) wrong = f.wrong;
    if (t.speaks() && f.wrong.empty()) t.job.telemetry->tell(f);
  }
  return wrong;
}

// Returns what is wrong, the same on all ranks, with what the user asked for, or nothing. What else goes wrong throws.
// Everything that can fail for want of memory or of a file has done so before, on all ranks together.
template <class T, class G>
std::string train(const Job& job) {
  const Run& r = job.r;
  Device& dev = *job.dev;
  dev.mem.rewind();
  dev.mode = Mode::tune;
  ops::keep_workspace(dev);
  flight::set_phase("the start, timing products and making weights");
  Model<T, G> model(dev, job.world, job.transport, r.model, r.batch, r.fsdp, Links::open);
  Training<T, G> t{job, model};
  StepInFlight& any = t.slots[0];
  step_program(dev, model, r, any.batches.get(), any.adamw.get(), any.copied);  // times the matmuls
  other_programs(dev, model, r, t.val_batches.get(), t.val_copied);
  dev.mode = Mode::run;
  model.init_weights();
  dev.compute().synchronize();

  const std::vector<Part> parts = parts_of(model.fsdp), own_parts = parts_to_save(model.fsdp);
  auto note = [&](const std::string& line) { job.telemetry->note(line); };
  flight::set_phase("the start, reading and opening checkpoints");
  try {
    if (!job.saved.state.is_null()) {
      load_checkpoint(job.saved.step_dir, r.o.save, dev, job.world, parts, note);
      t.first += job.saved.state.at("step").template get<int64_t>();
    } else if (job.init) {
      load_model(*job.init, dev, job.world, parts);
      if (t.speaks()) note(init_text(*job.init, r));
    }
    if (!r.o.save.empty())
      t.saver = std::make_unique<Saver>(dev, job.world, std::move(*job.save_to), r.o.keep, own_parts, note);
  } catch (const UsageError& e) { return e.what(); }
  if (r.o.graph == 1) model.end_steps_with_gathers();
  if (t.speaks() && t.first > 1)
    note(strf("resuming after step %lld, from %s", ll(t.first - 1), job.saved.step_dir.c_str()));
  if (t.speaks() && r.backend == Backend::gpu && peak_bf16_tflops(dev.name) == 0)
    note(strf("unknown chip %s: MFU is not shown", dev.name.c_str()));

  flight::set_phase("");
  halt::finish_steps();
  // What one rank throws ends all of them here: who unwound would take the model from under a step that still runs.
  std::string wrong;
  or_abort([&] {
    wrong = loop(t);
    if (!wrong.empty()) job.diagnostics->end(wrong);
    if (!wrong.empty()) return;
    t.profiler.tell(t.stop);
    std::vector<std::string> failed = {t.unsaved, agree(t.profiler.failed())};
    flight::set_phase("exporting the model");
    try {
      // A run that is to go on from its checkpoint would find this export in its way.
      const bool goes_on = !t.stop.empty() && t.issued < r.last_step && !r.o.save.empty() && t.unsaved.empty();
      const bool asked = !r.o.export_to.empty();
      if (asked && goes_on && t.speaks()) note("--export is left out: " + t.stop);
      const std::string made = asked && !goes_on ? export_model(r, dev, job.world, own_parts) : "";
      if (t.speaks() && !made.empty()) note(made);
    } catch (const Error& e) { failed.push_back(e.what()); }
    flight::set_phase("");
    failed.push_back(conclude(t));
    for (const std::string& what : failed)
      if (!what.empty()) wrong += (wrong.empty() ? "" : "; ") + what;
  });
  // One that came too late to stop this run is not for the next.
  const std::string left = t.speaks() && !r.o.save.empty() ? halt::remove_file(r.o.save) : "";
  if (!left.empty()) note(left);
  return wrong;
}

// ---------------------------------------------------------------------------------------------------- run and main

// From here on every rank takes part.
void run(const Options& o, const World& world, const std::string& command) {
  const Job job = start(o, world, command);
  std::string error;
  or_abort([&] { with_types(job.r, [&](auto t, auto g) { error = train<decltype(t), decltype(g)>(job); }); });
  if (!error.empty()) throw UsageError(error);
  if (world.rank != 0) return;
  const bool finds = !o.eval.empty() || o.sample > 0;
  terminal::flush_output(finds ? terminal::OutputReader::reads_all : terminal::OutputReader::may_leave);
}

}  // namespace

int main(int argc, char** argv) {
  terminal::fill_standard_streams();
  Options o;
  std::string text, error, command;
  for (int i = 0; i < argc; i++) command += std::string(i ? " " : "") + argv[i];
  try {
    if (!parse_options(argc, argv, &o, &text)) {
      if (is_first_process()) print_answer(text);
      return 0;
    }
  } catch (const Error& e) { error = e.what(); }
  if (error.empty() && o.instead_of_training()) {
    try {
      return answer(o, command);
    } catch (const Error& e) {
      terminal::say(strf("error: %s", e.what()));
      return exit_status(e);
    }
  }
  return run_as_rank(&argc, &argv, o, error, [&](const World& world) { run(o, world, command); });
}
