#include "lib/program/init.h"

#include <algorithm>
#include <memory>
#include <set>
#include <utility>

#include "lib/program/files.h"
#include "lib/program/hf_llama.h"

using nlohmann::json;
using ll = long long;

namespace {

constexpr int64_t longest_unasked = 4096;  // --seq: a model for 131072 tokens is not trained at that by accident

// Keys and values of a branch are those of the only attention that a dense model has. Empty: the tensor is new in NSA.
std::string without_branch(const std::string& tensor) {
  for (const std::string kind : {"attention.k_", "attention.v_"})
    if (const size_t at = tensor.find(kind); at != std::string::npos) return tensor.substr(0, at + kind.size() - 1);
  const bool is_new =
      tensor.find(".attention.gate") != std::string::npos || tensor.find(".attention.phi_") != std::string::npos;
  return is_new ? "" : tensor;
}

bool was_dense(const ModelFolder& from) { return from.settings.value("attn", "") == "dense"; }

// The name in the folder of one of the model's tensors; empty: it keeps its initial value. To a model of dense
// attention without_branch changes nothing.
std::string source_of(const ModelFolder& from, const std::string& tensor) {
  const std::string name = was_dense(from) ? without_branch(tensor) : tensor;
  return name.empty() || from.ours() ? name : llama_name(name);
}

std::string shape_text(const std::vector<int64_t>& shape) { return json(shape).dump(); }

}  // namespace

ModelFolder folder_for_all(const std::string& dir, const World& world) {
  std::string error, text;
  if (world.rank == 0) {
    try {
      text = read_model_folder(dir);
      parse_model_folder(dir, text);
    } catch (const Error& e) { error = e.what(); }
  }
  error = agree(error);
  if (!error.empty()) throw UsageError(error);
  return parse_model_folder(dir, broadcast_text(text));
}

namespace {

void take_model(const ModelFolder& from, Options* o) {
  const std::string config = from.dir + "/" + config_name;
  REQUIRE_USER(!o->gives("preset"), "--preset %s: with --init the sizes are those of %s; drop it", o->preset.c_str(),
               config.c_str());
  const json now = to_json(*o);
  std::vector<std::string> names;
  for (const auto& [key, value] : from.settings.items()) {
    std::string name = key;
    std::replace(name.begin(), name.end(), '_', '-');
    names.push_back(name);
    const bool free = name == "max-positions" || (name == "attn" && value == "dense" && o->attn == "nsa");
    REQUIRE_USER(free || !o->gives(name) || now.at(key) == value, "--%s %s: %s says %s; drop the option", name.c_str(),
                 now.at(key).dump().c_str(), config.c_str(), value.dump().c_str());
  }
  take_over(from.settings, names, o);
  // The model's, whatever --max-positions is to write.
  if (!o->gives("seq")) o->seq = std::min(from.settings.value("max_positions", o->max_positions), longest_unasked);
}

void check_tensors(const ModelFolder& from, const Run& r) {
  const char* remedy = "the weights are not those of config.json; get the folder again";
  std::set<std::string> used;
  for (const Unit& u : parameter_table(r.model))
    for (const Param& p : u.params) {
      const std::string name = source_of(from, p.name);
      if (name.empty()) continue;
      const auto found = from.tensors.find(name);
      REQUIRE_USER(found != from.tensors.end(), "--init %s: there is no tensor '%s'; %s", from.dir.c_str(),
                   name.c_str(), remedy);
      const ModelFolder::Tensor& t = found->second;
      const std::string& file = from.files[t.file];
      REQUIRE_USER(t.dtype == "BF16" || t.dtype == "F16" || t.dtype == "F32",
                   "%s: tensor '%s' is in %s; this program reads BF16, F16 and F32", file.c_str(), name.c_str(),
                   t.dtype.c_str());
      REQUIRE_USER(t.shape == p.shape, "%s: tensor '%s' is %s, and config.json makes it %s; %s", file.c_str(),
                   name.c_str(), shape_text(t.shape).c_str(), shape_text(p.shape).c_str(), remedy);
      used.insert(name);
    }
  for (const auto& [name, t] : from.tensors)
    REQUIRE_USER(used.count(name) || (!from.ours() && llama_may_have(name, r.model.tied)),
                 "%s: tensor '%s' is none of this model's; such a model is not supported", from.files[t.file].c_str(),
                 name.c_str());
}

}  // namespace

Run resolve_from(const ModelFolder& from, Options o, int world_size, int gpus) {
  take_model(from, &o);
  Run r;
  try {
    r = resolve(o, world_size, gpus);
  } catch (const UsageError& e) {
    throw UsageError(strf("%s (what is not given is of %s/%s)", e.what(), from.dir.c_str(), config_name));
  }
  check_tensors(from, r);
  return r;
}

namespace {
void read_parts(const ModelFolder& from, Device& dev, const std::vector<Part>& parts) {
  std::vector<std::pair<const ModelFolder::Tensor*, const Part*>> jobs;
  for (const Part& p : parts) {
    const std::string name = std::string(p.kind) == "weight" && p.count > 0 ? source_of(from, p.tensor) : "";
    if (!name.empty()) jobs.push_back({&from.tensors.at(name), &p});
  }
  // Each file once, from front to back.
  std::sort(jobs.begin(), jobs.end(), [](const auto& a, const auto& b) {
    return std::make_pair(a.first->file, a.first->offset) < std::make_pair(b.first->file, b.first->offset);
  });
  constexpr int64_t most = 1 << 20;
  HostBuffer<char> narrow(dev, most * 4);
  HostBuffer<float> wide(dev, most), halves(dev, most);
  std::unique_ptr<files::File> file;
  for (const auto& [tensor, part] : jobs) {
    const std::string& path = from.files[tensor->file];
    if (!file || file->path != path) file = files::open_to_read(path);
    const int64_t size = bytes_of_element(tensor->dtype);
    for (int64_t at = 0; at < part->count; at += most) {
      const int64_t n = std::min(most, part->count - at);
      files::read_at(*file, narrow.get(), n * size, tensor->offset + (part->first + at) * size);
      widen_elements(wide.get(), narrow.get(), tensor->dtype, n);
      const char* weights = reinterpret_cast<const char*>(wide.get());
      if (const auto found = not_finite(weights, n))
        throw Error(strf("%s: a weight of tensor '%s' is %g, at place %lld; get the folder again", path.c_str(),
                         part->tensor.c_str(), found->value, static_cast<long long>(part->first + at + found->place)));
      copy_from_host(dev.compute(), *part, at, n, weights, reinterpret_cast<char*>(halves.get()));
      dev.compute().synchronize();
    }
  }
}
}  // namespace

void load_model(const ModelFolder& from, Device& dev, const World& world, const std::vector<Part>& parts) {
  ASSERT(dev.mode == Mode::run);
  TextChannel talk(world);
  std::string error;
  try {
    read_parts(from, dev, parts);
  } catch (const Error& e) { error = strf("--init: rank %d: %s", world.rank, e.what()); }
  error = talk.agree(error);
  if (!error.empty()) throw UsageError(error);
}

std::string init_text(const ModelFolder& from, const Run& r) {
  std::set<std::string> dtypes;
  for (const auto& [name, t] : from.tensors) dtypes.insert(t.dtype);
  std::string text;
  for (const std::string& dtype : dtypes) text += (text.empty() ? "" : " and ") + dtype;
  text =
      strf("weights of %s (%s, %s)", from.dir.c_str(), from.ours() ? "fsdp.cu" : from.model_type.c_str(), text.c_str());
  if (r.model.sparse && was_dense(from))
    text += "; the three branches begin with its keys and values, gates and compression with initial weights";
  return text;
}
