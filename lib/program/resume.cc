#include "lib/program/resume.h"

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "nlohmann/json.hpp"

#include "lib/program/report.h"

using nlohmann::json;

namespace {

// Without directories: data may be moved.
json files_json(const Run& r) {
  json files = json::array();
  for (const DataFile& f : r.data_files) files.push_back({{"file", file_name(f.path)}, {"tokens", f.tokens}});
  return files;
}

// What has happened to the files of then, of which those of now are not the same list.
std::string change(const json& then, const json& now) {
  auto named = [](const json& files, const json& name) {
    return std::find_if(files.begin(), files.end(), [&](const json& f) { return f.at("file") == name; });
  };
  auto tokens = [](const json& f) { return f.at("tokens").dump(); };
  for (const json& f : then) {
    const auto same = named(now, f.at("file"));
    if (same == now.end()) return f.at("file").get<std::string>() + " is missing";
    if (same->at("tokens") != f.at("tokens"))
      return f.at("file").get<std::string>() + " has " + tokens(*same) + " tokens, and had " + tokens(f);
  }
  for (const json& f : now)
    if (named(then, f.at("file")) == then.end()) return f.at("file").get<std::string>() + " is new";
  return "they are in another order";
}

}  // namespace

json state_at(const Run& r, int64_t step) {
  return {{"step", step},
          {"sequences", step * r.global_batch},
          {"commit", commit()},
          {"options", settings(r)},
          {"data_files", files_json(r)}};
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
  // By the same name the same data, or the order of what comes would be another.
  if (state.contains("data_files") && !differs("data")) {
    const json &then = state.at("data_files"), files = files_json(*r);
    REQUIRE_USER(then == files,
                 "--data %s: the files are not those of the checkpoint: %s (%zu now, %zu then); restore them, or name "
                 "others by another --data",
                 r->o.data.c_str(), change(then, files).c_str(), files.size(), then.size());
  }
  std::vector<std::string> names = {"seq", "steps", "freeze"};
  names.insert(names.end(), carried.begin(), carried.end());
  std::string others;
  for (const std::string& name : names)
    if (differs(name)) others += (others.empty() ? " " : ", ") + here(name) + " (was " + there(name) + ")";
  if (!others.empty()) r->notices.push_back("differs from the checkpoint:" + others);
}
