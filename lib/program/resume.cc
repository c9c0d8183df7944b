#include "lib/program/resume.h"

#include <algorithm>
#include <filesystem>
#include <initializer_list>
#include <string>
#include <vector>

#include "lib/program/json.h"
#include "lib/program/report.h"

using nlohmann::json;

namespace {

// Without directories: data may be moved.
json files_json(const Run& r) {
  json files = json::array();
  for (const DataFile& f : r.data_files) files.push_back({{"file", files::file_name(f.path)}, {"tokens", f.tokens}});
  return files;
}

// What has happened to the files of then, of which those of now are not the same list.
std::string change(const json& then, const json& now) {
  auto named = [](const json& files, const json& name) {
    return std::find_if(files.begin(), files.end(), [&](const json& f) { return f.at("file") == name; });
  };
  auto tokens = [](const json& f) { return f.at("tokens").dump(); };
  // By its place first: files of several directories may have the same name.
  for (size_t i = 0; i < std::min(then.size(), now.size()); i++)
    if (then[i].at("file") == now[i].at("file") && then[i].at("tokens") != now[i].at("tokens"))
      return strf("%s, file %zu, has ", now[i].at("file").get<std::string>().c_str(), i + 1) + tokens(now[i]) +
             " tokens, and had " + tokens(then[i]);
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
  json options = settings(r);
  // A run that goes on from here may be started elsewhere.
  std::error_code none;
  if (!r.o.init.empty()) options["init"] = std::filesystem::absolute(r.o.init, none).lexically_normal();
  return {{"step", step},
          {"sequences", step * r.global_batch},
          {"trained_tokens", r.before.tokens + (step - r.before.steps) * r.tokens_per_step()},
          {"commit", commit()},
          {"options", options},
          {"tokens", {{"vocab", r.tokens.vocab}, {"tokenizer", r.tokens.tokenizer}}},
          {"data_files", files_json(r)}};
}

namespace {

// What a run that goes on takes over, and may be told otherwise.
const std::vector<std::string> carried = {
    "rope-base",    "rope-scaling", "norm-eps",   "max-positions", "nsa-block", "nsa-stride", "nsa-select-block",
    "nsa-selected", "nsa-window",   "lr",         "min-lr-ratio",  "warmup",    "beta1",      "beta2",
    "eps",          "weight-decay", "clip",       "clip-norm",     "on-nan",    "data",       "val-data",
    "val-every",    "matmul-dtype", "save-dtype", "tf32",          "moments"};
// The same for what follows from one of these, where that is told otherwise.
const std::vector<std::string> following = {"param-dtype", "autocast", "reduce-dtype", "fp8-scaling", "gather-dtype"};

// One that does not say how many tokens it has seen is older than runs of several lengths.
Trained trained_until(const json& state) {
  const json& was = state.at("options");
  const int64_t step = state.at("step");
  if (state.contains("trained_tokens")) return {step, state.at("trained_tokens")};
  const json &batch = was.at("global_batch"), &seq = was.at("seq");
  if (!batch.is_number() || !seq.is_number()) return {step, 0};
  return {step, int64_t(std::min(9e15, double(step) * batch.get<double>() * seq.get<double>()))};
}

// Those of `following` that nothing has been told about.
std::vector<std::string> not_told(const json& was, const Options& o) {
  std::vector<std::string> names;
  // With --autocast the checkpoint says bf16, whatever type of parameters was asked for beside it.
  const bool casts = was.at("autocast") == "bf16";
  const bool same_cast = !o.gives("autocast") || (o.autocast == "bf16") == casts;
  const bool same_type =
      !o.gives("param-dtype") || (casts ? o.gives("autocast") : was.at("param_dtype") == o.param_dtype);
  if (same_cast && same_type) names = {casts ? "autocast" : "param-dtype", "reduce-dtype"};
  if (!o.gives("matmul-dtype") || was.at("matmul_dtype") == o.matmul_dtype)
    names.insert(names.end(), {"fp8-scaling", "gather-dtype"});
  return names;
}

}  // namespace

void take_up(const json& state, Options* o) {
  if (state.is_null()) return;
  const json& was = state.at("options");
  std::vector<std::string> names = carried;
  auto also = [&](std::initializer_list<const char*> more) { names.insert(names.end(), more.begin(), more.end()); };
  also({"preset", "init", "nsa-phi", "nsa-gate", "seed", "val-batches"});
  if (!o->gives("preset") || o->preset == was.at("preset"))
    also({"arch", "attn", "dim", "depth", "heads", "kv-heads", "head-dim", "v-head-dim", "hidden", "vocab", "seq",
          "tie-embeddings"});
  // The same command on other ranks goes on with the same global batch.
  if (!o->gives("global-batch")) also({"global-batch"}), o->keeps_global_batch = o->gives("batch");
  if (!o->gives("batch") && !o->gives("grad-accum")) also({"grad-accum"});
  if (!o->save.empty()) also({"save-every", "keep"});
  if (!o->gives("tokens") && !o->gives("epochs")) also({"steps"});
  for (const std::string& name : not_told(was, *o)) names.push_back(name);
  take_over(was, names, o);
}

UsageError of_checkpoint(const UsageError& e, const std::string& step_dir) {
  return step_dir.empty() ? e : UsageError(strf("%s (what is not given is of %s)", e.what(), step_dir.c_str()));
}

SavedState load_resumed(const Options& o, const World& world) {
  SavedState saved = load_state(o.resume, o.save, world);
  saved.state = read_state(saved.state, saved.step_dir + "/manifest.json");
  return saved;
}

namespace {

// What a run says of an option beside what its checkpoint says.
struct Both {
  json now, was;
  Both(const json& state, const Run& r) : now(settings(r)), was(state.at("options")) {}
  bool differs(const std::string& name) const {
    return !was.at(key_of(name)).is_null() && now.at(key_of(name)) != was.at(key_of(name));
  }
  std::string here(const std::string& name) const { return "--" + name + " " + now.at(key_of(name)).dump(); }
  std::string there(const std::string& name) const { return was.at(key_of(name)).dump(); }
};

// What cannot be another where a run goes on: the model, its weights' seed, the position in the data.
void require_same_model(const json& state, const Run& r) {
  if (state.is_null()) return;
  const Both both(state, r);
  for (const char* name : {"arch", "attn", "dim", "depth", "heads", "kv-heads", "head-dim", "v-head-dim", "hidden",
                           "tie-embeddings", "nsa-phi", "nsa-gate", "seed"})
    REQUIRE_USER(!both.differs(name), "%s: the checkpoint was made with %s", both.here(name).c_str(),
                 both.there(name).c_str());
  REQUIRE_USER(
      !both.differs("global-batch"),
      "a global batch of %lld: the checkpoint was made with --global-batch %s, in which its position in the data is "
      "counted",
      static_cast<long long>(r.global_batch), both.there("global-batch").c_str());
}

}  // namespace

Run resolve_resumed(const SavedState& saved, Options o, int world_size, int gpus) {
  try {
    take_up(saved.state, &o);
    check_carried_combinations(o);
    const Run r = resolve(o, world_size, gpus, trained_until(saved.state));
    require_same_model(saved.state, r);
    return r;
  } catch (const UsageError& e) { throw of_checkpoint(e, saved.step_dir); }
}

TokenKind tokens_of(const json& state) {
  if (!state.is_object() || !state.contains("tokens")) return {};
  const json& t = state.at("tokens");
  return {t.at("vocab"), t.at("tokenizer")};
}

void compare(const json& state, Run* r) {
  if (state.is_null()) return;
  const Both both(state, *r);
  // By the same name the same data, or the order of what comes would be another.
  if (state.contains("data_files") && !both.differs("data")) {
    const json &then = state.at("data_files"), files = files_json(*r);
    REQUIRE_USER(then == files,
                 "--data %s: the files are not those of the checkpoint: %s (%zu now, %zu then); restore them, or name "
                 "others by another --data",
                 r->o.data.c_str(), change(then, files).c_str(), files.size(), then.size());
  }
  std::vector<std::string> names = {"seq", "steps", "freeze"};
  for (const auto* more : {&carried, &following}) names.insert(names.end(), more->begin(), more->end());
  std::string others;
  for (const std::string& name : names)
    if (both.differs(name))
      others += (others.empty() ? " " : ", ") + both.here(name) + " (was " + both.there(name) + ")";
  if (!others.empty()) r->notices.push_back("differs from the checkpoint:" + others);
  const auto step = state.at("step").get<int64_t>();
  if (r->last_step <= step && r->o.stop_after != 0)
    r->notices.push_back(strf("nothing to train: the checkpoint is of step %lld, and the run ends after step %lld",
                              static_cast<long long>(step), static_cast<long long>(r->last_step)));
  // The type is chosen by the machine where nobody has said one, and the machine is another.
  const bool gpu = r->backend == Backend::gpu, said = r->o.gives("param-dtype") || r->o.gives("autocast");
  const Dtype own = gpu ? Dtype::bf16 : Dtype::f32;
  if (both.differs("device") && !said && r->dtype != own)
    r->notices.push_back(
        strf("parameters in %s, as in the checkpoint, which was made on a %s; on a %s the default is "
             "--param-dtype %s",
             name_of(r->dtype), gpu ? "CPU" : "GPU", gpu ? "GPU" : "CPU", name_of(own)));
}
