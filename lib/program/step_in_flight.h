// What the host keeps of a step while the device runs it, and what the step tells it.
//
//   StepInFlight slots[2] = {{dev, r, {dev, units}}, {dev, r, {dev, units}}};
//   StepInFlight& now = slots[step % 2];
//   step_program(dev, model, r, now.batches.get(), now.adamw.get(), now.copied);
//   copy_results(dev, model, r, &now);                   // enqueued, as the step is
//   dev.compute().record(now.done);
#pragma once

#include <string>
#include <vector>

#include "lib/device/graph.h"
#include "lib/program/finding.h"
#include "lib/program/run.h"
#include "model.h"

// From a step's preparation to its report. There are two, used in turn: while the device runs one step the host
// prepares the next and reports the one before.
struct StepInFlight {
  Device& dev;
  const Run& r;
  HostBuffer<double> unit_sums;                                                   // Fsdp's
  HostBuffer<int32_t> batches{dev, batch_ints(r.model, r.batch) * r.grad_accum};  // micro-batches, one behind the other
  HostBuffer<ops::AdamW> adamw{dev, 1};
  HostBuffer<StepScalars> trained{dev, 1}, validated{dev, 1};
  HostBuffer<NsaSums> nsa_sums{dev, r.model.diagnostics ? r.model.depth : 1};  // of each block
  HostBuffer<NsaMaxima> nsa_maxima{dev, r.model.diagnostics ? r.model.depth : 1};
  std::vector<NsaKernels> kernels = {};
  double fetch_seconds = 0;          // the host's, to make the micro-batches
  std::string validation_left = {};  // why it was ended early; empty: it was not
  Finding sample = {};               // what was written behind the step, to be told behind its line
  Graph graph{dev};                  // of this step and every second one after it: it holds addresses of this struct
  Event copied{dev};                 // the device has read the micro-batches
  Event results{dev};                // for compute: the host has what it is told of the step, but for its time
  Event started{dev, Event::timed}, done{dev, Event::timed}, validation_done{dev};
};

// What a step tells the host, behind the step's last sums: on their stream, so that AdamW need not wait.
template <class T, class G>
void copy_results(Device& dev, Model<T, G>& model, const Run& r, StepInFlight* to) {
  Stream& s = dev.reduce();
  const int64_t depth = r.model.depth;
  s.copy(to->trained.get(), model.fsdp.scalars(), sizeof(StepScalars));
  s.copy(to->unit_sums.get(), model.fsdp.unit_sums(), to->unit_sums.size() * int64_t(sizeof(double)));
  if (model.nsa_sums()) {
    s.copy(to->nsa_sums.get(), model.nsa_sums(), depth * int64_t(sizeof(NsaSums)));
    s.copy(to->nsa_maxima.get(), model.nsa_maxima(), depth * int64_t(sizeof(NsaMaxima)));
  }
  s.record(to->results);
  dev.compute().wait(to->results);
}
