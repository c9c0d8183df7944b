#include "lib/program/hf_llama.h"

#include <map>

#include "lib/program/options.h"

using nlohmann::json;

namespace {

// Fills in one option from one key; null and what is not there are Hugging Face's own default.
void take(const char* option, const CheckedJson& value, json* settings) {
  const std::string allowed = option_allows(option, value.value());
  if (!allowed.empty()) value.refuse(allowed);
  (*settings)[key_of(option)] = value.value();
}

bool says(const CheckedJson& config, const char* key) { return config.has(key) && !config.at(key).value().is_null(); }

void take_or(const char* option, const CheckedJson& config, const char* key, const json& otherwise, json* settings) {
  if (says(config, key)) take(option, config.at(key), settings);
  else (*settings)[key_of(option)] = otherwise;
}

double positive(const CheckedJson& value) {
  if (!value.value().is_number() || !(value.value().get<double>() > 0)) value.refuse("a number above 0");
  return value.value().get<double>();
}

bool is_empty(const CheckedJson& config, const char* key) {
  return !says(config, key) || config.at(key).value().empty();
}

// "default", "llama3" or what this program has not. What a default has no place for would make it another model, too.
std::string type_of(const CheckedJson& rope) {
  const char* type_key = says(rope, "type") ? "type" : "rope_type";  // "type" of old
  if (says(rope, "type") && says(rope, "rope_type") && rope.at("type").value() != rope.at("rope_type").value())
    rope.at("type").refuse(rope.at("rope_type").value().dump() + ", which rope_type says");
  const std::string type = says(rope, type_key) ? rope.at(type_key).text() : "default";
  if (type != "default" && type != "llama3")
    rope.at(type_key).refuse("default or llama3, and this program has no other");
  if (type == "default")
    for (const auto& [key, value] : rope.value().items())
      if (key != "type" && key != "rope_type" && key != "rope_theta" && key != "partial_rotary_factor" &&
          !value.is_null() && !(key == "factor" && value == 1))
        rope.at(key.c_str()).refuse("null, the only value with rope_type \"default\" or none");
  return type;
}

// Of version 5 of transformers, "rope_parameters", which hold the base too; before that "rope_scaling", which version 5
// prefers where it has both, and "rope_theta".
void take_positions(const CheckedJson& config, json* settings) {
  const char* key = is_empty(config, "rope_scaling") ? "rope_parameters" : "rope_scaling";
  (*settings)["rope_scaling"] = "none";
  take_or("rope-base", config, "rope_theta", 10000.0, settings);
  if (!says(config, key)) return;
  const CheckedJson rope = config.at(key);
  rope.object();
  if (says(rope, "rope_theta")) take("rope-base", rope.at("rope_theta"), settings);
  if (says(rope, "partial_rotary_factor") && rope.at("partial_rotary_factor").value() != 1)
    rope.at("partial_rotary_factor").refuse("1, and this program has no other");
  if (type_of(rope) == "default") return;
  const double factor = positive(rope.at("factor")), low = positive(rope.at("low_freq_factor")),
               high = positive(rope.at("high_freq_factor"));
  const int64_t original = rope.at("original_max_position_embeddings").whole(1, 1 << 24);
  if (factor != 1)
    (*settings)["rope_scaling"] =
        strf("llama3:%.15g:%.15g:%.15g:%lld", factor, low, high, static_cast<long long>(original));
}

// Keys that would make it another model, and the one value that makes it this one; null and none are that value too.
const std::map<std::string, json> only = {
    {"attention_bias", false}, {"mlp_bias", false},         {"hidden_act", "silu"}, {"attention_dropout", 0},
    {"sliding_window", {}},    {"quantization_config", {}}, {"layer_types", {}},    {"partial_rotary_factor", 1}};

}  // namespace

json settings_of_llama(const CheckedJson& config) {
  const std::string& type = config.at("model_type").text();
  if (type != "llama" && type != "mistral") config.at("model_type").refuse("llama, mistral or fsdp.cu");
  for (const auto& [key, value] : only)
    if (says(config, key.c_str()) && config.at(key.c_str()).value() != value)
      config.at(key.c_str()).refuse((value.is_null() ? "null" : value.dump()) + ", and this program has no other");
  // Where a Mistral's says nothing of them, transformers takes a window of 4096 and 8 key heads.
  if (type == "mistral")
    for (const char* key : {"sliding_window", "num_key_value_heads"}) (void)config.at(key);
  json settings = {{"arch", "llama"}, {"attn", "dense"}, {"tie_embeddings", false}};
  take("dim", config.at("hidden_size"), &settings);
  take("depth", config.at("num_hidden_layers"), &settings);
  take("heads", config.at("num_attention_heads"), &settings);
  take_or("kv-heads", config, "num_key_value_heads", settings["heads"], &settings);
  take("hidden", config.at("intermediate_size"), &settings);
  take("vocab", config.at("vocab_size"), &settings);
  take_or("norm-eps", config, "rms_norm_eps", 1e-6, &settings);
  take_or("max-positions", config, "max_position_embeddings", 2048, &settings);
  if (says(config, "tie_word_embeddings")) take("tie-embeddings", config.at("tie_word_embeddings"), &settings);
  take_positions(config, &settings);
  if (says(config, "head_dim")) take("head-dim", config.at("head_dim"), &settings);
  return settings;
}

bool is_llama(const ModelConfig& c) { return c.arch == Arch::llama && !c.sparse && c.v_head_dim() == c.head_dim(); }

// As versions 4 and 5 of transformers both read it. Whoever knows the tokenizer may add its ids.
json llama_config(const Run& r) {
  const ModelConfig& c = r.model;
  json config = {{"architectures", {"LlamaForCausalLM"}},
                 {"model_type", "llama"},
                 {"hidden_size", c.dim},
                 {"num_hidden_layers", c.depth},
                 {"num_attention_heads", c.heads},
                 {"num_key_value_heads", c.kv_heads},
                 {"head_dim", c.head_dim()},
                 {"intermediate_size", c.hidden},
                 {"vocab_size", c.vocab},
                 {"max_position_embeddings", r.max_positions()},
                 {"rms_norm_eps", c.norm_eps},
                 {"rope_theta", c.rope.base},
                 {"rope_scaling", nullptr},
                 {"tie_word_embeddings", c.tied},
                 {"hidden_act", "silu"},
                 {"attention_bias", false},
                 {"mlp_bias", false},
                 {"bos_token_id", nullptr},
                 {"eos_token_id", nullptr},
                 {"torch_dtype", r.o.export_dtype == "bf16" ? "bfloat16" : "float32"}};
  const RopeScaling& s = c.rope.scaling;
  if (s.factor != 1)
    config["rope_scaling"] = {{"rope_type", "llama3"},
                              {"factor", s.factor},
                              {"low_freq_factor", s.low_freq_factor},
                              {"high_freq_factor", s.high_freq_factor},
                              {"original_max_position_embeddings", s.original_seq}};
  return config;
}

std::string llama_name(const std::string& tensor) {
  static const std::map<std::string, std::string> whole = {{"embedding.weight", "model.embed_tokens.weight"},
                                                           {"head.weight", "lm_head.weight"},
                                                           {"head.norm", "model.norm.weight"}};
  static const std::map<std::string, std::string> of_block = {
      {"attention.q", "self_attn.q_proj"}, {"attention.k", "self_attn.k_proj"}, {"attention.v", "self_attn.v_proj"},
      {"attention.o", "self_attn.o_proj"}, {"mlp.gate", "mlp.gate_proj"},       {"mlp.up", "mlp.up_proj"},
      {"mlp.down", "mlp.down_proj"},       {"norm1", "input_layernorm"},        {"norm2", "post_attention_layernorm"}};
  if (const auto found = whole.find(tensor); found != whole.end()) return found->second;
  const std::string start = "block.";
  const size_t dot = tensor.find('.', start.size());
  if (tensor.rfind(start, 0) != 0 || dot == std::string::npos) return "";
  const auto found = of_block.find(tensor.substr(dot + 1));
  if (found == of_block.end()) return "";
  return "model.layers." + tensor.substr(start.size(), dot - start.size()) + "." + found->second + ".weight";
}

bool llama_may_have(const std::string& name, bool tied) {
  const std::string angles = ".rotary_emb.inv_freq";
  return (tied && name == "lm_head.weight") ||
         (name.size() > angles.size() && name.compare(name.size() - angles.size(), angles.size(), angles) == 0);
}
