// lib/program/safetensors.h, hf_llama.h, model_folder.h: texts that anybody may have written are read to the last key,
// or refused in a line that names file and key.
#include <cmath>
#include <cstring>

#include "lib/program/hf_llama.h"
#include "lib/program/json.h"
#include "lib/program/model_folder.h"
#include "lib/program/safetensors.h"
#include "test/catch.h"
#include "test/errors.h"

using nlohmann::json;

namespace {

json two_tensors() {
  return {{"__metadata__", {{"format", "pt"}}},
          {"a", {{"dtype", "BF16"}, {"shape", {4, 8}}, {"data_offsets", {0, 64}}}},
          {"b", {{"dtype", "F32"}, {"shape", json::array()}, {"data_offsets", {64, 68}}}}};
}
std::string refusal_of(const json& header, int64_t data = 68) {
  const std::string text = header.dump();
  const std::string error =
      error_of<UsageError>([&] { parse_safetensors(text, "F", 8 + int64_t(text.size()) + data); });
  CHECK((error.empty() || error.rfind("F: ", 0) == 0));
  return error;
}

}  // namespace

TEST_CASE("a safetensors header is read", "[safetensors]") {
  const std::string text = two_tensors().dump();
  const int64_t start = 8 + int64_t(text.size());
  const auto tensors = parse_safetensors(text, "F", start + 68);
  REQUIRE(tensors.size() == 2);
  CHECK(tensors.at("a").offset == start);
  CHECK(tensors.at("a").bytes == 64);
  CHECK(tensors.at("a").shape == std::vector<int64_t>{4, 8});
  CHECK(tensors.at("b").offset == start + 64);
  CHECK(tensors.at("b").dtype == "F32");
  // What we write is what we read, in the order given.
  for (Dtype dtype : {Dtype::bf16, Dtype::f32}) {
    const std::string made = make_safetensors_header({{"z", {3, 5}}, {"a", {7}}}, dtype);
    uint64_t length = 0;
    std::memcpy(&length, made.data(), 8);
    CHECK(length + 8 == made.size());
    CHECK(made.size() % 8 == 0);
    const auto read = parse_safetensors(made.substr(8), "F", int64_t(made.size()) + 22 * size_of(dtype));
    CHECK(read.at("z").offset == int64_t(made.size()));
    CHECK(read.at("a").offset == int64_t(made.size()) + 15 * size_of(dtype));
    CHECK(read.at("a").dtype == (dtype == Dtype::bf16 ? "BF16" : "F32"));
  }
}

TEST_CASE("a safetensors header that lies is refused", "[safetensors]") {
  CHECK(refusal_of(two_tensors()).empty());
  auto with = [](const char* tensor, const char* key, const json& value) {
    json j = two_tensors();
    if (value.is_null()) j[tensor].erase(key);
    else j[tensor][key] = value;
    return j;
  };
  CHECK(has(refusal_of(with("a", "dtype", "BF17")), "\"a.dtype\" is \"BF17\""));
  CHECK(has(refusal_of(with("a", "dtype", "F32")), "\"a\": its data_offsets hold 64 bytes, its shape [4,8] in F32"));
  CHECK(has(refusal_of(with("a", "dtype", nullptr)), "there is no \"a.dtype\""));
  CHECK(has(refusal_of(with("a", "shape", {4, 9})), "its shape [4,9]"));
  CHECK(has(refusal_of(with("a", "shape", {-4, -8})), "\"a.shape[0]\" is -4"));
  CHECK(has(refusal_of(with("a", "shape", {4.0, 8})), "\"a.shape[0]\" is 4.0"));
  CHECK(has(refusal_of(with("a", "shape", {int64_t(1) << 40, int64_t(1) << 40, 0})), "its shape"));
  CHECK(has(refusal_of(with("a", "shape", "large")), "\"a.shape\" is \"large\", not a list"));
  CHECK(has(refusal_of(with("b", "data_offsets", {64, 72})), "\"b.data_offsets[1]\" is 72"));
  CHECK(has(refusal_of(with("b", "data_offsets", {68, 64})), "\"b.data_offsets[1]\" is 64"));
  CHECK(has(refusal_of(with("b", "data_offsets", {60, 64})), "\"b\".data_offsets begin at 60, where another tensor"));
  CHECK(has(refusal_of(with("b", "data_offsets", {64})), "\"b.data_offsets\" is a list, not a begin and an end"));
  CHECK(has(refusal_of(with("b", "data_offsets", {64, 68}), 72), "4 bytes after the last tensor"));
  CHECK(has(refusal_of(with("b", "data_offsets", {68, 72}), 72), "a gap is before it"));
  CHECK(has(refusal_of(two_tensors(), 67), "\"b.data_offsets[1]\" is 68"));
  CHECK(has(refusal_of(json::array()), "a list, not an object"));
  CHECK(has(refusal_of({{"a", 3}}), "\"a\" is 3, not an object"));
  CHECK(has(error_of<UsageError>([] { parse_safetensors("{\"a\": ", "F", 100); }), "F: not JSON as of byte"));
}

TEST_CASE("elements of narrow types are widened exactly", "[safetensors]") {
  const uint16_t halves[] = {0x0000, 0x8000, 0x3c00, 0xc100, 0x7bff, 0x0001, 0x83ff, 0x0400, 0x7c00, 0xfc00, 0x7e00};
  float wide[11];
  widen_elements(wide, reinterpret_cast<const char*>(halves), "F16", 11);
  const float want[] = {0.0f, -0.0f, 1.0f, -2.5f, 65504.0f, 0x1p-24f, -1023 * 0x1p-24f, 0x1p-14f, INFINITY, -INFINITY};
  for (int i = 0; i < 10; ++i) CHECK((wide[i] == want[i] && std::signbit(wide[i]) == std::signbit(want[i])));
  CHECK(std::isnan(wide[10]));
  const uint16_t brains[] = {0x3f80, 0xc020, 0x0001};
  widen_elements(wide, reinterpret_cast<const char*>(brains), "BF16", 3);
  CHECK((wide[0] == 1 && wide[1] == -2.5f && wide[2] > 0));
  const float plain[] = {1.25f, -3e-39f};
  widen_elements(wide, reinterpret_cast<const char*>(plain), "F32", 2);
  CHECK(std::memcmp(wide, plain, 8) == 0);
}

namespace {

json llama() {
  return {{"model_type", "llama"},     {"hidden_size", 2048},       {"num_hidden_layers", 16},
          {"num_attention_heads", 32}, {"intermediate_size", 8192}, {"vocab_size", 128256}};
}
json settings_in(const json& config) {
  std::string type;
  return parse_model_config(config.dump(), "C", &type);
}
json changed(json config, const char* key, const json& value) {
  config[key] = value;
  return config;
}

}  // namespace

TEST_CASE("a Llama's config.json is read, of any version", "[safetensors]") {
  const json plain = settings_in(llama());  // Hugging Face's defaults
  CHECK(plain["arch"] == "llama");
  CHECK(plain["attn"] == "dense");
  CHECK((plain["dim"] == 2048 && plain["depth"] == 16 && plain["heads"] == 32 && plain["kv_heads"] == 32));
  CHECK((plain["hidden"] == 8192 && plain["vocab"] == 128256 && plain["max_positions"] == 2048));
  CHECK((plain["norm_eps"] == 1e-6 && plain["rope_base"] == 10000.0 && plain["rope_scaling"] == "none"));
  CHECK(plain["tie_embeddings"] == false);
  json old = llama(), recent = llama();
  const json scaling = {
      {"factor", 32.0}, {"low_freq_factor", 1}, {"high_freq_factor", 4.5}, {"original_max_position_embeddings", 8192}};
  for (json* j : {&old, &recent})
    j->update({{"num_key_value_heads", 8},
               {"rms_norm_eps", 1e-5},
               {"tie_word_embeddings", true},
               {"head_dim", 64},
               {"max_position_embeddings", 131072},
               {"attention_bias", false},
               {"mlp_bias", nullptr},
               {"hidden_act", "silu"},
               {"sliding_window", nullptr},
               {"attention_dropout", 0.0}});
  old["rope_theta"] = 500000.0, old["rope_scaling"] = scaling, old["rope_scaling"]["type"] = "llama3";
  recent["rope_parameters"] = scaling, recent["rope_parameters"]["rope_type"] = "llama3";
  recent["rope_parameters"]["rope_theta"] = 500000;
  CHECK(settings_in(old) == settings_in(recent));
  CHECK(settings_in(old)["rope_scaling"] == "llama3:32:1:4.5:8192");
  CHECK(settings_in(old)["rope_base"] == 500000);
  CHECK((settings_in(old)["kv_heads"] == 8 && settings_in(old)["tie_embeddings"] == true));
  CHECK(settings_in(changed(old, "model_type", "mistral")) == settings_in(old));
  CHECK(settings_in(changed(old, "head_dim", 128))["head_dim"] == 128);  // heads wider than dim / heads
}

TEST_CASE("a config.json of a model that is not here is refused by name", "[safetensors]") {
  auto refused = [](const json& config) { return error_of<UsageError>([&] { settings_in(config); }); };
  CHECK(refused(llama()).empty());
  for (const char* key :
       {"model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"}) {
    json j = llama();
    j.erase(key);
    CHECK(has(refused(j), strf("C: there is no \"%s\"", key)));
    CHECK(has(refused(changed(llama(), key, -1)), strf("C: \"%s\" is -1, not ", key)));
    CHECK(has(refused(changed(llama(), key, "x")), strf("C: \"%s\" is \"x\", not ", key)));
  }
  const std::pair<const char*, json> others[] = {{"attention_bias", true},
                                                 {"mlp_bias", true},
                                                 {"hidden_act", "gelu"},
                                                 {"sliding_window", 4096},
                                                 {"head_dim", 0},
                                                 {"attention_dropout", 0.1},
                                                 {"model_type", "qwen2"},
                                                 {"rms_norm_eps", 0},
                                                 {"rope_theta", "x"},
                                                 {"num_key_value_heads", 0},
                                                 {"tie_word_embeddings", 1},
                                                 {"quantization_config", {{"bits", 4}}}};
  for (const auto& [key, value] : others) {
    INFO(key);
    CHECK(has(refused(changed(llama(), key, value)), strf("C: \"%s\" is ", key)));
  }
  CHECK(has(refused(changed(llama(), "rope_scaling", {{"rope_type", "yarn"}, {"factor", 4}})),
            "C: \"rope_scaling.rope_type\" is \"yarn\", not default or llama3"));
  CHECK(has(refused(changed(llama(), "rope_scaling", {{"type", "llama3"}, {"factor", 4}})),
            "C: there is no \"rope_scaling.low_freq_factor\""));
  CHECK(has(refused(changed(llama(), "rope_scaling", 3)), "C: \"rope_scaling\" is 3, not an object"));
  for (const json& rope : {json::object(), {{"rope_type", "default"}}, {{"type", "default"}, {"factor", 1.0}}})
    for (const char* key : {"rope_scaling", "rope_parameters"}) CHECK(refused(changed(llama(), key, rope)).empty());
  // What no type or another place says would be passed over.
  CHECK(has(refused(changed(llama(), "rope_scaling", {{"factor", 8.0}})),
            "C: \"rope_scaling.factor\" is 8.0, not null, the only value with rope_type \"default\" or none;"));
  CHECK(has(refused(changed(llama(), "rope_scaling", {{"rope_type", "default"}, {"type", "linear"}, {"factor", 8.0}})),
            "C: \"rope_scaling.type\" is \"linear\", not \"default\""));
  CHECK(has(refused(changed(llama(), "rope_parameters", {{"full_attention", {{"rope_type", "linear"}}}})),
            "C: \"rope_parameters.full_attention\" is "));
  json both = changed(llama(), "rope_parameters", {{"rope_type", "default"}, {"rope_theta", 10000}});
  CHECK(refused(both).empty());
  both["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 8.0}};
  CHECK(has(refused(both), "C: \"rope_scaling.rope_type\" is \"linear\""));
  json mistral = changed(changed(llama(), "model_type", "mistral"), "sliding_window", nullptr);
  mistral["num_key_value_heads"] = mistral["num_attention_heads"];
  CHECK(refused(mistral).empty());
  for (const char* key : {"sliding_window", "num_key_value_heads"}) {
    json without = mistral;
    without.erase(key);
    CHECK(has(refused(without), strf("C: there is no \"%s\"", key)));
  }
}

TEST_CASE("our own config.json is refused without a field", "[safetensors]") {
  const json own = {{"model_type", "fsdp.cu"},
                    {"arch", "rope"},
                    {"attn", "nsa"},
                    {"dim", 64},
                    {"depth", 2},
                    {"heads", 4},
                    {"kv_heads", 2},
                    {"hidden", 96},
                    {"vocab", 256},
                    {"max_positions", 64},
                    {"rope_base", 1e4},
                    {"rope_scaling", "none"},
                    {"norm_eps", 1e-5},
                    {"tie_embeddings", false},
                    {"nsa_block", 32},
                    {"nsa_stride", 16},
                    {"nsa_select_block", 64},
                    {"nsa_selected", 16},
                    {"nsa_window", 512},
                    {"nsa_phi", "mean"},
                    {"nsa_gate", "linear"}};
  CHECK(settings_in(own)["nsa_window"] == 512);
  for (const auto& [key, value] : own.items()) {
    json j = own;
    j.erase(key);
    CHECK(has(error_of<UsageError>([&] { settings_in(j); }), "C: there is no \"" + key + "\""));
    CHECK(has(error_of<UsageError>([&] { settings_in(changed(own, key.c_str(), json::array())); }),
              "C: \"" + key + "\" is a list"));
  }
  // Files of before heads had widths of their own do not say them.
  json wide = changed(own, "head_dim", 24);
  CHECK(has(error_of<UsageError>([&] { settings_in(wide); }), "C: there is no \"v_head_dim\""));
  wide["v_head_dim"] = 16;
  CHECK((settings_in(wide)["head_dim"] == 24 && settings_in(wide)["v_head_dim"] == 16));
  json dense = changed(own, "attn", "dense");
  for (const char* key : {"nsa_block", "nsa_phi"}) dense.erase(key);
  CHECK(error_of<UsageError>([&] { settings_in(dense); }).empty());
  CHECK(has(error_of<UsageError>([&] { settings_in(changed(own, "arch", "mamba")); }),
            "\"arch\" is \"mamba\", not simple, rope"));
  CHECK(has(error_of<UsageError>([&] { settings_in(changed(own, "dim", 0)); }),
            "\"dim\" is 0, not a whole number from 1"));
}

TEST_CASE("tensors have Llama's names", "[safetensors]") {
  CHECK(llama_name("embedding.weight") == "model.embed_tokens.weight");
  CHECK(llama_name("block.12.attention.k") == "model.layers.12.self_attn.k_proj.weight");
  CHECK(llama_name("block.0.norm2") == "model.layers.0.post_attention_layernorm.weight");
  CHECK(llama_name("block.0.attention.gate").empty());
  CHECK(llama_name("head.norm.bias").empty());
}
