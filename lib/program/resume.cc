#include "lib/program/resume.h"

#include <initializer_list>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"

#include "lib/program/report.h"

using nlohmann::json;

json state_at(const Run& r, int64_t step) {
  return {{"step", step}, {"sequences", step * r.global_batch}, {"commit", commit()}, {"options", settings(r)}};
}

namespace {

// What a run that goes on takes over, and may be told otherwise.
const std::vector<std::string> carried = {
    "rope-base",    "rope-scaling", "norm-eps", "max-positions", "nsa-block", "nsa-stride", "nsa-select-block",
    "nsa-selected", "nsa-window",   "lr",       "min-lr-ratio",  "warmup",    "beta1",      "beta2",
    "eps",          "weight-decay", "clip",     "clip-norm",     "data",      "val-data",   "val-every"};

}  // namespace

void take_up(const json& state, Options* o) {
  if (state.is_null()) return;
  const json& was = state.at("options");
  std::vector<std::string> names = carried;
  auto also = [&](std::initializer_list<const char*> more) { names.insert(names.end(), more.begin(), more.end()); };
  also({"nsa-phi", "nsa-gate", "seed", "val-batches"});
  if (!o->gives("preset") || o->preset == was.at("preset"))
    also({"arch", "attn", "dim", "depth", "heads", "kv-heads", "hidden", "vocab", "seq", "tie-embeddings"});
  // The same command on other ranks goes on with the same global batch.
  if (!o->gives("global-batch")) also({"global-batch"}), o->keeps_global_batch = o->gives("batch");
  if (!o->gives("batch") && !o->gives("grad-accum")) also({"grad-accum"});
  if (!o->gives("tokens") && !o->gives("epochs")) also({"steps"});
  take_over(was, names, o);
}

void compare(const json& state, Run* r) {
  if (state.is_null()) return;
  const json now = settings(*r), &was = state.at("options");
  auto differs = [&](const std::string& name) {
    return !was.at(key_of(name)).is_null() && now.at(key_of(name)) != was.at(key_of(name));
  };
  auto here = [&](const std::string& name) { return "--" + name + " " + now.at(key_of(name)).dump(); };
  auto there = [&](const std::string& name) { return was.at(key_of(name)).dump(); };
  for (const char* name : {"seed", "heads", "kv-heads"})
    REQUIRE_USER(!differs(name), "%s: the checkpoint was made with %s", here(name).c_str(), there(name).c_str());
  REQUIRE_USER(
      !differs("global-batch"),
      "a global batch of %lld: the checkpoint was made with --global-batch %s, in which its position in the data is "
      "counted",
      static_cast<long long>(r->global_batch), there("global-batch").c_str());
  std::vector<std::string> names = {"seq", "steps", "freeze"};
  names.insert(names.end(), carried.begin(), carried.end());
  std::string others;
  for (const std::string& name : names)
    if (differs(name)) others += (others.empty() ? " " : ", ") + here(name) + " (was " + there(name) + ")";
  if (!others.empty()) r->notices.push_back("differs from the checkpoint:" + others);
}
