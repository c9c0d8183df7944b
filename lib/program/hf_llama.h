// Hugging Face's LlamaForCausalLM: what its config.json and its tensors are called there and here. The mathematics is
// the same, and so is the layout of every tensor, rotary pairs (i, i + D/2) included; what differs is names.
#pragma once

#include <string>

#include "lib/program/checked_json.h"
#include "lib/program/json.h"
#include "lib/program/run.h"

// What a config.json says, as options have it: {"arch": "llama", "dim": 2048, ...}, keys as key_of makes them. Takes
// model types llama, and mistral without a sliding window. Throws UsageError that names the key: one that is missing,
// or says what this program does not have (biases, other activations, other scaling of positions).
nlohmann::json settings_of_llama(const CheckedJson& config);
// And the other way, for a model that is_llama.
nlohmann::json llama_config(const Run& r);
bool is_llama(const ModelConfig& c);

// "block.3.attention.q" -> "model.layers.3.self_attn.q_proj.weight"; empty: it has no such tensor.
std::string llama_name(const std::string& tensor);
// What its files may hold beside the weights, or twice: the angles of positions, and a tied head.
bool llama_may_have(const std::string& name, bool tied);
