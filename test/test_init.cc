// Models that come from folders and go into them: what transformers has made gives its log-probabilities here, what is
// exported is read back bit for bit at any number of ranks, and what is not right is refused before anything is read.
#include <sys/stat.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <sstream>

#include "lib/program/export.h"
#include "lib/program/files.h"
#include "lib/program/hf_llama.h"
#include "lib/program/init.h"
#include "lib/program/json.h"
#include "lib/program/run.h"
#include "test/catch.h"
#include "test/errors.h"
#include "test/scratch.h"

using nlohmann::json;

namespace {

namespace fs = std::filesystem;
const std::string fixture = "test/hf-llama";

std::string read_all(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

Options parsed(const std::string& line) {
  std::istringstream in("./train --device cpu " + line);
  std::vector<std::string> words;
  for (std::string w; in >> w;) words.push_back(w);
  std::vector<const char*> argv;
  for (const std::string& w : words) argv.push_back(w.c_str());
  Options o;
  std::string text;
  REQUIRE(parse_options(int(argv.size()), argv.data(), &o, &text));
  return o;
}

// A run's model on `world`, from --init or from random weights, as ./train makes it.
template <class T, class G>
struct Loaded {
  World world;
  std::optional<ModelFolder> from;
  Run run;
  Device dev;
  std::unique_ptr<Model<T, G>> model;
  Event copied;
  std::string notes;

  Loaded(const World& world, const std::string& line)
      : world(world), run(resolved(line)), dev(Backend::cpu, 0, world.size), copied(dev) {
    const Transport transport = world.size > 1 ? Transport::mpi : Transport::none;
    for (Links links : {Links::planned, Links::open}) {
      ops::keep_workspace(dev);
      model = std::make_unique<Model<T, G>>(dev, world, transport, run.model, run.batch, run.fsdp, links);
      if (links == Links::open) break;
      evaluate(nullptr);
      dev.mem.commit(), dev.mem.rewind(), dev.mode = Mode::run;
    }
    model->init_weights();
    if (from) load_model(*from, dev, world, parts_of(model->fsdp)), notes = init_text(*from, run);
    dev.compute().synchronize();
  }
  Run resolved(const std::string& line) {
    Options o = parsed(line);
    if (!o.init.empty()) {
      from = parse_model_folder(o.init, read_model_folder(o.init));
      return resolve_from(*from, o, world.size, 0);
    }
    return resolve(o, world.size, 0);
  }
  void evaluate(const int32_t* host) {
    dev.mem.begin("validation");
    model->evaluate(host, true, copied);
    dev.mem.end();
    model->finish_evaluation();
  }
  // The sum of losses of one micro-batch, the same on all ranks.
  double loss(const std::vector<int32_t>& tokens, const std::vector<int32_t>& targets) {
    HostBuffer<int32_t> host(dev, batch_ints(run.model, run.batch));
    HostBuffer<StepScalars> result(dev, 1);
    const MicroBatch b = micro_batch_at(host.get(), int64_t(tokens.size()));
    std::copy(tokens.begin(), tokens.end(), b.tokens), std::copy(targets.begin(), targets.end(), b.targets);
    index_batch(run.model, run.batch, host.get());
    evaluate(host.get());
    dev.compute().copy(result.get(), model->fsdp.scalars(), sizeof(StepScalars));
    dev.compute().synchronize();
    return result[0].loss / world.size;
  }
  void write(const std::string& to) {
    run.o.export_to = to;
    export_model(run, dev, world, parts_to_save(model->fsdp));
  }
};

// The root of the mean square of what the log-probabilities of transformers differ from: ours, or its own in bf16.
struct Distances {
  double ours = 0, own = 0, largest = 0;
};
template <class T, class G>
Distances from_transformers(const std::string& line) {
  const json expected = json::parse(read_all(fixture + "/expected.json"));
  const std::vector<int32_t> tokens = expected.at("tokens");
  Loaded<T, G> model(test_world(), line + " --init " + fixture + " --batch 1 --seq " + std::to_string(tokens.size()));
  Distances d;
  int64_t n = 0;
  for (size_t i = 0; i < expected.at("positions").size(); ++i)
    for (int32_t v = int32_t(i); v < 96; v += 6, ++n) {
      std::vector<int32_t> targets(tokens.size(), -1);
      targets[expected.at("positions")[i]] = v;
      const double exact = expected.at("fp32")[i][size_t(v)], narrow = expected.at("bf16")[i][size_t(v)];
      const double apart = -model.loss(tokens, targets) - exact;
      d.ours += apart * apart, d.own += (narrow - exact) * (narrow - exact);
      d.largest = std::max(d.largest, std::abs(apart));
    }
  d.ours = std::sqrt(d.ours / double(n)), d.own = std::sqrt(d.own / double(n));
  return d;
}

}  // namespace

TEST_CASE("a Llama of transformers gives its log-probabilities", "[init]") {
  const Distances exact = from_transformers<float, float>("");
  CHECK(exact.largest < 1e-5);
  const Distances rounded = from_transformers<bf16, float>("--param-dtype bf16 --reduce-dtype fp32");
  INFO(rounded.ours << " here, " << rounded.own << " in transformers");
  CHECK(rounded.ours <= rounded.own);
  CHECK(rounded.ours > 10 * exact.ours);  // it is rounded
}

namespace {

const std::string sizes_without_heads = "--dim 32 --depth 2 --vocab 40 --seq 16 ",
                  sizes = sizes_without_heads + "--heads 4 --kv-heads 2 ";
const std::string small_nsa = "--nsa-block 4 --nsa-stride 2 --nsa-select-block 4 --nsa-selected 3 --nsa-window 6 ";

std::string text_of_files(const std::string& dir, bool of_weights) {
  std::string text;
  for (const std::string& name : files::names_in(dir))
    if (has(name, ".safetensors") == of_weights) text += name + "\n" + read_all(dir + "/" + name) + "\n";
  return text;
}

}  // namespace

TEST_CASE("what is exported is read back bit for bit", "[init]") {
  const World& world = test_world();
  SharedDirectory dir;
  int i = 0;
  for (const std::string& what :
       {std::string("--arch llama --attn dense --rope-scaling llama3:8:1:4:16 --norm-eps 1e-4 --rope-base 12345.5"),
        std::string("--arch llama --attn dense --tie-embeddings --max-positions 8192"),
        std::string("--arch rope --attn dense"), std::string("--arch simple --attn dense"),
        std::string("--arch mlp --hidden 64"), "--arch llama --attn nsa --nsa-phi mlp --nsa-gate mlp " + small_nsa,
        "--arch simple --attn nsa --nsa-phi linear --norm-eps 0.5 " + small_nsa}) {
    INFO(what);
    const std::string start = dir.path + "/" + std::to_string(i++), made = start + "-made", again = start + "-again",
                      alone = start + "-alone", narrow = start + "-narrow";
    const std::string& these = what.rfind("--arch mlp", 0) == 0 ? sizes_without_heads : sizes;
    Loaded<float, float> first(world, these + "--batch 1 " + what + " --seed 7 --export-dtype fp32 --export unused");
    first.write(made);
    barrier();
    // Nothing but the folder says what the model is.
    const std::string from = " --init " + made + " --batch 1 --seed 8 --export-dtype fp32 --export unused";
    Loaded<float, float> second(world, from);
    second.write(again);
    barrier();
    const std::string was = text_of_files(made, true);
    CHECK((text_of_files(again, true) == was));  // no text of megabytes

    CHECK(text_of_files(again, false) == text_of_files(made, false));
    CHECK(has(read_all(made + "/config.json"), is_llama(first.run.model) ? "LlamaForCausalLM" : "fsdp.cu"));
    CHECK(second.run.max_positions() == first.run.max_positions());
    // By one rank, and cut otherwise, with files as small as can be.
    if (world.rank == 0) {
      Loaded<float, float> third(World(), from + " --wrap single");
      std::map<std::string, std::string> names;
      for (const Part& p : parts_of(third.model->fsdp)) names[p.tensor] = p.tensor + ".x";
      export_folder(alone, {{config_name, "{}"}}, names, 20000, Dtype::f32, third.dev, World(),
                    parts_to_save(third.model->fsdp));
      third.write(narrow);
      CHECK((text_of_files(narrow, true) == was));
      CHECK(files::names_in(alone).size() >= 4);
      for (const std::string& name : files::names_in(alone))
        if (has(name, "model-")) CHECK(fs::file_size(alone + "/" + name) < 20000 + 4096);
      const json map = json::parse(read_all(alone + "/" + index_name)).at("weight_map");
      CHECK(map.size() == names.size());
      // The same numbers, tensor by tensor.
      const auto tensor = [](const std::string& folder, const std::string& file, const std::string& name) {
        int64_t bytes = 0;
        const std::string path = folder + "/" + file, header = read_safetensors_header(path, &bytes);
        const SafeTensor t = parse_safetensors(header, path, bytes).at(name);
        return read_all(path).substr(size_t(t.offset), size_t(t.bytes));
      };
      for (const auto& [ours, theirs] : names)
        CHECK((tensor(alone, map.at(theirs), theirs) ==
               tensor(made, weights_name, is_llama(first.run.model) ? llama_name(ours) : ours)));
    }
    barrier();
  }
}

TEST_CASE("a file of an export ends where the next tensor would not fit", "[init]") {
  SharedDirectory dir;
  if (test_world().rank != 0) return;
  Loaded<float, float> model(World(), sizes + "--batch 1 --arch rope --attn dense");
  const std::vector<Part> parts = parts_to_save(model.model->fsdp);
  std::map<std::string, std::string> names;
  std::map<std::string, int64_t> bytes;
  for (const Part& p : parts)
    if (p.kind == std::string("weight")) names[p.tensor] = p.tensor, bytes[p.tensor] = p.count * 2;
  std::vector<int64_t> in_order;
  for (const auto& [name, n] : bytes) in_order.push_back(n);
  const int64_t two = in_order[0] + in_order[1], total = std::accumulate(in_order.begin(), in_order.end(), int64_t(0));
  for (const int64_t most : {int64_t(1), two - 1, two, total - 1, total}) {
    INFO(most);
    const std::string to = dir.path + "/" + std::to_string(most);
    export_folder(to, {{config_name, "{}"}}, names, most, Dtype::bf16, model.dev, World(), parts);
    size_t files = 0;
    int64_t in_file = most;  // the first begins one
    for (const int64_t n : in_order) {
      if (in_file + n > most) ++files, in_file = 0;
      in_file += n;
    }
    const bool several = most < total;
    CHECK(files::names_in(to).size() == files + 1 + several);
    CHECK(fs::exists(to + "/" + weights_name) == !several);
    CHECK(fs::exists(to + "/" + strf("model-%05zu-of-%05zu.safetensors", files, files)) == several);
    if (several) CHECK(json::parse(read_all(to + "/" + index_name))["metadata"]["total_size"] == total);
  }
}

TEST_CASE("NSA begins with a dense model's keys and values in all branches", "[init]") {
  const World& world = test_world();
  SharedDirectory dir;
  for (const char* arch : {"llama", "rope"}) {
    const std::string made = dir.path + "/" + arch;
    Loaded<float, float>(world,
                         sizes + "--batch 1 --attn dense --seed 7 --export-dtype fp32 --export unused --arch " + arch)
        .write(made);
    barrier();
    const std::string nsa =
        " --attn nsa --nsa-phi linear --batch 1 --seed 9 --export-dtype fp32 --export unused " + small_nsa;
    Loaded<float, float> begun(world, "--init " + made + nsa);
    CHECK(has(begun.notes, "the three branches begin with its keys and values"));
    begun.write(made + "-nsa");
    Loaded<float, float> random(world, sizes + nsa + "--arch " + arch);
    random.write(made + "-random");
    barrier();
    const auto tensors = [](const std::string& folder) {
      const ModelFolder m = parse_model_folder(folder, read_model_folder(folder));
      std::map<std::string, std::string> all;
      for (const auto& [name, t] : m.tensors)
        all[name] = read_all(m.files[t.file]).substr(size_t(t.offset), size_t(t.bytes));
      return all;
    };
    const auto was = tensors(made), is = tensors(made + "-nsa"), initial = tensors(made + "-random");
    int64_t taken = 0, kept = 0;
    for (const auto& [name, bytes] : is) {
      INFO(name);
      std::string source = name;
      for (const char* branch : {"_compressed", "_selected", "_window"})
        if (const size_t at = name.find(branch); at != std::string::npos) source = name.substr(0, at);
      const bool is_new = has(name, "attention.gate") || has(name, ".phi_");
      const std::string there = std::string(arch) == "llama" ? llama_name(source) : source;
      CHECK((bytes == (is_new ? initial.at(name) : was.at(there))));
      ++(is_new ? kept : taken);
    }
    CHECK(taken == 2 * 12 + 3 + (std::string(arch) == "llama" ? 2 : 0));
    CHECK(kept == 2 * 6);
    // And without --attn a folder's model stays what it is.
    CHECK(!Loaded<float, float>(world, "--batch 1 --init " + made).run.model.sparse);
    CHECK(has(error_of([&] { Loaded<float, float>(world, "--attn dense --batch 1 --init " + made + "-nsa"); }),
              "--attn \"dense\": " + made + "-nsa/config.json says \"nsa\"; drop the option"));
  }
}

TEST_CASE("an option that contradicts config.json is refused, and what is free is free", "[init]") {
  const auto refusal = [](const std::string& line) {
    return error_of([&] { Loaded<float, float>(World(), "--init " + fixture + " --batch 1 " + line); });
  };
  CHECK(has(refusal("--dim 128"), "--dim 128: test/hf-llama/config.json says 64; drop the option"));
  CHECK(has(refusal("--norm-eps 1e-5"), "--norm-eps 1e-05: test/hf-llama/config.json says 0.0003"));
  CHECK(has(refusal("--rope-scaling none"), "says \"llama3:8:1:4:16\""));
  CHECK(has(refusal("--tie-embeddings"), "--tie-embeddings true"));
  CHECK(has(refusal("--arch rope"), "config.json says \"llama\""));
  CHECK(has(refusal("--preset tiny"), "--preset tiny"));
  CHECK(refusal("--dim 64 --rope-base 10000 --seq 24 --max-positions 4096 --export unused").empty());
  Loaded<float, float> plain(World(), "--batch 1 --init " + fixture);
  CHECK((plain.run.model.seq == 128 && plain.run.max_positions() == 128 && plain.run.preset.empty()));
  CHECK(plain.run.model.rope.scaling == RopeScaling{8, 1, 4, 16});
}

TEST_CASE("a model of long texts is trained at 4096 tokens unless it is asked for more", "[init]") {
  const auto seq = [](int64_t positions, const std::string& line) {
    json all = json::parse(read_model_folder(fixture)), config = json::parse(all["config"].get<std::string>());
    config["max_position_embeddings"] = positions;
    all["config"] = config.dump();
    const Options o = parsed("--batch 1 --init " + fixture + line);
    return resolve_from(parse_model_folder(fixture, all.dump()), o, 1, 0).model.seq;
  };
  CHECK(seq(4095, "") == 4095);
  CHECK(seq(4096, "") == 4096);
  CHECK(seq(4097, "") == 4096);
  CHECK(seq(131072, "") == 4096);
  CHECK(seq(131072, " --seq 8192") == 8192);
}

TEST_CASE("a tokenizer goes with the model", "[init]") {
  SharedDirectory dir;
  const std::string from = dir.path + "/from", to = dir.path + "/to";
  if (test_world().rank == 0) {
    fs::copy(fixture, from), std::ofstream(from + "/tokenizer.json") << "{\"words\": 3}";
    fs::create_directory(to), std::ofstream(to + "/tokenizer.model") << "mine";
    std::ofstream(from + "/tokenizer.model") << "theirs";
    fs::create_directory(from + "/added_tokens.json");
  }
  barrier();
  const std::string unread = read_beside_model(from).unread;  // what an export tells
  CHECK(unread.rfind("; without added_tokens.json: " + from + "/added_tokens.json", 0) == 0);
  CHECK(!has(unread, "tokenizer"));
  Loaded<float, float> model(test_world(), "--batch 1 --init " + from);
  model.write(to);
  barrier();
  CHECK(read_all(to + "/tokenizer.json") == "{\"words\": 3}");
  CHECK(read_all(to + "/tokenizer.model") == "mine");
  CHECK(read_all(to + "/generation_config.json") == read_all(fixture + "/generation_config.json"));
  const json config = json::parse(read_all(to + "/config.json"));
  CHECK((config["bos_token_id"] == 1 && config["eos_token_id"] == 2 && config["pad_token_id"].is_null()));
}

TEST_CASE("a tensor that stands in two files is refused with the names of both", "[init]") {
  json all = json::parse(read_model_folder(fixture));
  json again = all["files"][0];
  again["name"] = "again.safetensors";
  all["files"].push_back(again);
  const std::string error = error_of([&] { parse_model_folder(fixture, all.dump()); });
  INFO(error);
  CHECK(error.rfind(fixture + "/again.safetensors: tensor 'model.", 0) == 0);
  CHECK(has(error, "' is in " + fixture + "/model-00001-of-00002.safetensors too; the folder is not whole"));
}

TEST_CASE("a folder that is not whole is refused", "[init]") {
  SharedDirectory dir;
  if (test_world().rank == 0) {
    const auto refusal = [&](const char* file, const std::function<void(std::string*)>& change) {
      const std::string copy = dir.path + "/copy";
      fs::remove_all(copy), fs::copy(fixture, copy);
      std::string text = read_all(copy + "/" + file);
      change(&text);
      if (text.empty()) fs::remove(copy + "/" + file);
      else std::ofstream(copy + "/" + file, std::ios::binary) << text;
      const std::string error = error_of([&] { Loaded<float, float>(World(), "--batch 1 --init " + copy); });
      CHECK(!has(error, "internal"));
      CHECK(!has(error, "\n"));
      return error.size() > copy.size() ? error.substr(error.find(copy) + copy.size() + 1) : error;
    };
    const auto replace = [](const std::string& from, const std::string& to) {
      return [=](std::string* text) {
        const size_t at = text->find(from);
        REQUIRE(at != std::string::npos);
        text->replace(at, from.size(), to);
      };
    };
    const auto gone = [](std::string* text) { text->clear(); };
    const char *one = "model-00001-of-00002.safetensors", *two = "model-00002-of-00002.safetensors";
    CHECK(refusal("generation_config.json", gone).empty());
    CHECK(has(refusal("config.json", gone), "config.json cannot be opened: No such file"));
    CHECK(has(refusal(two, gone), strf("%s: it names %s, which is not there", index_name, two)));
    CHECK(has(refusal(index_name, gone), "neither model.safetensors nor model.safetensors.index.json is there"));
    CHECK(has(refusal(index_name, replace(two, one)),
              "\"weight_map.lm_head.weight\" is \"" + std::string(one) + "\", not a file that holds this tensor"));
    CHECK(has(refusal(index_name, replace(two, "../../secret")), "not a file in the same folder"));
    CHECK(has(refusal(index_name, replace("weight_map", "weights")), "there is no \"weight_map\""));
    CHECK(has(refusal("config.json", replace("\"hidden_size\": 64", "\"hidden_size\": 128")),
              "and config.json makes it [96,128]"));
    CHECK(has(refusal("config.json", replace("\"head_dim\": 16", "\"head_dim\": 24")),
              "and config.json makes it [96,64]"));
    CHECK(has(refusal("config.json", replace("\"intermediate_size\": 96", "\"intermediate_size\": 104")),
              "and config.json makes it [104,64]"));
    CHECK(has(refusal("config.json", replace("\"num_key_value_heads\": 2", "\"num_key_value_heads\": 3")),
              "config.json)"));
    CHECK(has(refusal("config.json", replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 3")),
              "there is no tensor 'model.layers.2."));
    CHECK(has(refusal("config.json", replace("\"num_hidden_layers\": 2", "\"num_hidden_layers\": 1")),
              "tensor 'model.layers.1."));
    CHECK(has(refusal(two, [](std::string* text) { text->resize(text->size() - 2); }), two));
    const std::string nan = refusal(two, [](std::string* text) { text->replace(text->size() - 2, 2, "\xc0\xff"); });
    CHECK(has(nan, std::string(two) + ": a weight of tensor '"));
    CHECK(has(nan, "' is nan, at place "));
    CHECK(has(refusal(two, replace("BF16", "F64 ")), two));
    CHECK(has(refusal(two, replace("BF16", "I16 ")), two));
    // A header that is right, of a model that is another.
    CHECK(has(
        refusal(two, [](std::string* text) { (*text)[text->find("BF16")] = ' ', (*text)[text->find("F16")] = 'I'; }),
        "dtype"));
  }
  // Whoever reads, all are told.
  CHECK(has(error_of([&] { folder_for_all(dir.path + "/none", test_world()); }), "/none: not a directory"));
}

TEST_CASE("an export to a folder replaces nothing and leaves nothing half-written", "[init]") {
  const World& world = test_world();
  SharedDirectory dir;
  Loaded<float, float> model(world, sizes + "--batch 1 --arch rope --attn dense");
  const std::string to = dir.path + "/model";
  // A disk that is full on one rank.
  checkpoint_hook = [&](const char* call, const std::string& path) {
    return world.rank == world.size - 1 && std::string(call) == "fsync" && has(path, "model.safetensors") ? ENOSPC : 0;
  };
  std::string error = error_of([&] { model.write(to); });
  checkpoint_hook = nullptr;
  CHECK(has(error, strf("--export: rank %d: %s.tmp-", world.size - 1, to.c_str())));
  CHECK(has(error, "No space left"));
  barrier();
  CHECK(files::names_in(dir.path).empty());
  barrier();
  // A directory that is there, with files of the user's.
  if (world.rank == 0) fs::create_directory(to), std::ofstream(to + "/notes.txt") << "mine";
  barrier();
  check_export(to);
  barrier();
  model.write(to + "/");
  barrier();
  CHECK(files::names_in(to) == std::vector<std::string>{"config.json", "model.safetensors", "notes.txt"});
  const std::string was = read_all(to + "/model.safetensors");
  CHECK(has(error_of([&] { model.write(to); }), to + "/config.json exists and is not overwritten"));
  CHECK(has(error_of([&] { check_export(to); }), to + "/config.json exists and is not overwritten"));
  CHECK((read_all(to + "/model.safetensors") == was));
  CHECK(has(error_of([&] { check_export(to + "/notes.txt"); }), "notes.txt is not a directory"));
  CHECK(has(error_of([&] { check_export(dir.path + "/none/model"); }), "No such file"));
  // One that comes while the model is written.
  const std::string other = dir.path + "/other";
  checkpoint_hook = [&](const char* call, const std::string& path) {
    if (std::string(call) == "rename" && path == other) fs::create_directory(other), std::ofstream(other + "/x") << "x";
    return 0;
  };
  error = error_of([&] { model.write(other); });
  checkpoint_hook = nullptr;
  CHECK(has(error, "File exists; the model is in " + other + ".tmp-"));
  barrier();
  CHECK(files::names_in(other) == std::vector<std::string>{"x"});
  CHECK((read_all(error.substr(error.rfind(' ') + 1) + "/model.safetensors") == was));
}
