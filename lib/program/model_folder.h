// A folder that holds a model: config.json, and its weights in one safetensors file or several.
//
//   DIR/config.json                     which model: Hugging Face's (hf_llama.h), or one of ours
//   DIR/model.safetensors               all tensors; or
//   DIR/model-00001-of-00003.safetensors ...
//   DIR/model.safetensors.index.json    which tensor is in which file
//
// Ours says {"model_type": "fsdp.cu", "arch": "rope", "attn": "nsa", "dim": 768, ...}: the options that make the model,
// by their names, and its tensors have the names of --show-params. Any of it may have been written by anybody.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "lib/program/json.h"
#include "lib/program/run.h"
#include "lib/program/safetensors.h"

struct ModelFolder {
  struct Tensor : SafeTensor {
    size_t file = 0;
  };
  std::string dir;
  std::string model_type;                 // as config.json says
  nlohmann::json settings;                // the options that make the model, by key_of's keys
  std::vector<std::string> files;         // paths
  std::map<std::string, Tensor> tensors;  // by their names there
  bool ours() const { return model_type == "fsdp.cu"; }
};

// Reads config.json, the index and all headers, and no weights. The text of them is what parse_model_folder takes: one
// rank reads, and the others are told. Throws UsageError that names file and key.
std::string read_model_folder(const std::string& dir);
ModelFolder parse_model_folder(const std::string& dir, const std::string& text);

// What stands beside a model's weights and belongs to it whatever they become: the tokenizer's files, and how to
// generate text; by name. And the tokens' ids in its config.json that begin, end and pad. What cannot be read is left
// out: the folder may be gone by now.
struct BesideModel {
  bool found = false;  // config.json at least
  std::map<std::string, std::string> files;
  std::string unread;  // for each that is there and cannot be read: "; without NAME: why"
  nlohmann::json token_ids = nlohmann::json::object();
};
BesideModel read_beside_model(const std::string& dir);

// The settings in a config.json: of either kind. Fills in its model type.
nlohmann::json parse_model_config(const std::string& text, const std::string& path, std::string* model_type);
// The config.json of a run's model.
nlohmann::json model_config_json(const Run& r);

constexpr char config_name[] = "config.json", index_name[] = "model.safetensors.index.json",
               weights_name[] = "model.safetensors", generation_name[] = "generation_config.json";
