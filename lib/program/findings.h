// What a run is asked to find out with its weights: --sample, --eval. All of it is collective, in Mode::run, between
// steps; what a rank throws, others cannot know of: call it within or_abort.
#pragma once

#include <vector>

#include "lib/comm/flight.h"
#include "lib/program/evaluation.h"
#include "lib/program/sampling.h"
#include "lib/program/start.h"

// What the weights behind a step write.
template <class T, class G>
Finding write_sample(const Job& job, Model<T, G>& model, int64_t step) {
  const Run& r = job.r;
  Writer<T, G> writer(*job.dev, job.world, model, r.model, r.batch);
  const Draw draw = {r.o.temperature, r.o.top_k, r.o.seed, step, used_vocab(*job.data, r.model.vocab)};
  return sample_finding(writer.write(job.prompt, r.o.sample, draw), int64_t(job.prompt.size()) + r.o.sample, *job.data,
                        step);
}

// By the last weights, those behind a step. sampled: that is done for this step.
template <class T, class G>
std::vector<Finding> last_findings(const Job& job, Model<T, G>& model, int64_t step, bool sampled) {
  const Run& r = job.r;
  std::vector<Finding> all;
  flight::set_phase("evaluating the model");
  if (job.eval)
    all.push_back(evaluated(*job.eval, sequence_losses(*job.dev, job.world, model, r.model, r.batch, *job.eval)));
  if (r.o.sample > 0 && !sampled) all.push_back(write_sample(job, model, step));
  return all;
}
