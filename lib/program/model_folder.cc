#include "lib/program/model_folder.h"

#include <sys/stat.h>

#include <set>

#include "lib/program/checked_json.h"
#include "lib/program/files.h"
#include "lib/program/hf_llama.h"

using nlohmann::json;

namespace {

constexpr int64_t most_text = 64 << 20;  // of config.json, and of an index
const char* const remedy = "--init cannot take this model";
const char* const remedy_index = "the folder is not whole; get it again";

// The options that make a model, as our own config.json says them.
const std::vector<std::string> sizes = {"arch",  "dim",           "depth",    "hidden",
                                        "vocab", "max-positions", "norm-eps", "tie-embeddings"};
const std::vector<std::string> sizes_of_attention = {"attn", "heads", "kv-heads", "rope-base", "rope-scaling"};
const std::vector<std::string> sizes_of_heads = {"head-dim", "v-head-dim"};  // which older files do not say
const std::vector<std::string> sizes_of_nsa = {"nsa-block",  "nsa-stride", "nsa-select-block", "nsa-selected",
                                               "nsa-window", "nsa-phi",    "nsa-gate"};

json read_own(const CheckedJson& config) {
  json settings;
  auto take = [&](const std::vector<std::string>& names) {
    for (const std::string& name : names) {
      const CheckedJson value = config.at(key_of(name).c_str());
      const std::string allowed = option_allows(name, value.value());
      if (!allowed.empty()) value.refuse(allowed);
      settings[key_of(name)] = value.value();
    }
  };
  take(sizes);
  if (settings["arch"] != "mlp") take(sizes_of_attention);
  if (settings["arch"] != "mlp" && config.has("head_dim")) take(sizes_of_heads);
  if (settings.value("attn", "") == "nsa") take(sizes_of_nsa);
  return settings;
}

// How wide heads are where a file does not say it, so that options on the command line cannot say otherwise.
void fill_head_dims(json* settings) {
  if (settings->at("arch") == "mlp") return;
  const int64_t dim = settings->at("dim"), heads = settings->at("heads");
  if (!settings->contains("head_dim") && dim % heads == 0) (*settings)["head_dim"] = dim / heads;
  if (!settings->contains("v_head_dim") && settings->contains("head_dim"))
    (*settings)["v_head_dim"] = settings->at("head_dim");
}

// A file beside the index, and nowhere else.
bool is_plain_name(const std::string& name) {
  return !name.empty() && name != "." && name != ".." && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

// The files that an index names, in order.
std::set<std::string> files_of_index(const CheckedJson& index) {
  const CheckedJson map = index.at("weight_map");
  std::set<std::string> names;
  for (const auto& [tensor, unused] : map.object().items()) {
    const CheckedJson file = map.at(tensor.c_str());
    if (!is_plain_name(file.text())) file.refuse("a file in the same folder");
    names.insert(file.text());
  }
  return names;
}

bool is_there(const std::string& path) {
  struct stat s;
  return ::stat(path.c_str(), &s) == 0;
}

}  // namespace

std::string read_model_folder(const std::string& folder) {
  const std::string dir = files::without_slash(folder);
  struct stat s;
  REQUIRE_USER(::stat(dir.c_str(), &s) == 0 && S_ISDIR(s.st_mode),
               "--init %s: not a directory; give one with config.json and safetensors files", dir.c_str());
  REQUIRE_USER(is_there(dir + "/" + config_name) || !(is_there(dir + "/latest") || is_there(dir + "/manifest.json")),
               "--init %s: a checkpoint of --save; --resume goes on from it, and --export makes a folder for --init",
               dir.c_str());
  json all = {{"config", files::read_all(dir + "/" + config_name, most_text)}, {"files", json::array()}};
  std::set<std::string> names = {weights_name};
  if (const std::string index = dir + "/" + index_name; is_there(index)) {
    all["index"] = files::read_all(index, most_text);
    const json j = parse_json(all["index"], index, remedy_index);
    names = files_of_index(CheckedJson(j, index, remedy_index));
    for (const std::string& name : names)
      REQUIRE_USER(is_there(dir + "/" + name), "%s: it names %s, which is not there; %s", index.c_str(), name.c_str(),
                   remedy_index);
  } else {
    REQUIRE_USER(is_there(dir + "/" + weights_name),
                 "--init %s: neither %s nor %s is there; weights in other formats are not read", dir.c_str(),
                 weights_name, index_name);
  }
  for (const std::string& name : names) {
    int64_t bytes = 0;
    const std::string header = read_safetensors_header(dir + "/" + name, &bytes);
    all["files"].push_back({{"name", name}, {"bytes", bytes}, {"header", header}});
  }
  try {
    return all.dump();
  } catch (const json::exception&) {
    throw UsageError(strf("--init %s: a config.json, index or header there is not UTF-8, so it is no JSON; %s",
                          dir.c_str(), remedy_index));
  }
}

ModelFolder parse_model_folder(const std::string& folder, const std::string& text) {
  ModelFolder m;
  m.dir = files::without_slash(folder);
  const json all = json::parse(text);
  m.settings = parse_model_config(all.at("config"), m.dir + "/" + config_name, &m.model_type);
  for (const json& file : all.at("files")) {
    const std::string path = m.dir + "/" + file.at("name").get<std::string>();
    for (auto& [name, tensor] : parse_safetensors(file.at("header"), path, file.at("bytes"))) {
      ModelFolder::Tensor t;
      static_cast<SafeTensor&>(t) = tensor;
      t.file = m.files.size();
      const auto [at, is_new] = m.tensors.emplace(name, t);
      REQUIRE_USER(is_new, "%s: tensor '%s' is in %s too; %s", path.c_str(), name.c_str(),
                   m.files[at->second.file].c_str(), remedy_index);
    }
    m.files.push_back(path);
  }
  if (!all.contains("index")) return m;
  const std::string path = m.dir + "/" + index_name;
  const json index = parse_json(all["index"], path, remedy_index);
  const CheckedJson map = CheckedJson(index, path, remedy_index).at("weight_map");
  for (const auto& [name, unused] : map.object().items()) {
    const CheckedJson file = map.at(name.c_str());
    const auto found = m.tensors.find(name);
    if (found == m.tensors.end() || m.files[found->second.file] != m.dir + "/" + file.text())
      file.refuse("a file that holds this tensor");
  }
  return m;
}

BesideModel read_beside_model(const std::string& dir) {
  BesideModel all;
  for (const char* name : {generation_name, "tokenizer.json", "tokenizer_config.json", "tokenizer.model",
                           "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"})
    try {
      if (files::kind_of(dir + "/" + name) != 0) all.files[name] = files::read_all(dir + "/" + name, most_text);
    } catch (const Error& e) { all.unread += strf("; without %s: %s", name, e.what()); }
  try {
    const std::string path = dir + "/" + config_name;
    const json config = parse_json(files::read_all(path, most_text), path, remedy);
    all.found = true;
    for (const char* key : {"bos_token_id", "eos_token_id", "pad_token_id"})
      if (config.is_object() && config.contains(key)) all.token_ids[key] = config[key];
  } catch (const Error&) {}
  return all;
}

json parse_model_config(const std::string& text, const std::string& path, std::string* model_type) {
  const json j = parse_json(text, path, remedy);
  const CheckedJson config(j, path, remedy);
  *model_type = config.at("model_type").text();
  json settings = *model_type == "fsdp.cu" ? read_own(config) : settings_of_llama(config);
  fill_head_dims(&settings);
  return settings;
}

json model_config_json(const Run& r) {
  if (is_llama(r.model)) return llama_config(r);
  json config = {{"model_type", "fsdp.cu"}, {"torch_dtype", r.o.export_dtype == "bf16" ? "bfloat16" : "float32"}};
  const json all = settings(r);
  auto put = [&](const std::vector<std::string>& names) {
    for (const std::string& name : names) config[key_of(name)] = all.at(key_of(name));
  };
  put(sizes);
  config["max_positions"] = r.max_positions();
  if (r.model.attends()) put(sizes_of_attention), put(sizes_of_heads);
  if (r.model.sparse) put(sizes_of_nsa);
  return config;
}
