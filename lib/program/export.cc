#include "lib/program/export.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "lib/program/checkpoint_directory.h"
#include "lib/program/checkpoint_manifest.h"
#include "lib/program/files.h"
#include "lib/program/hf_llama.h"
#include "lib/program/json.h"
#include "lib/program/model_folder.h"
#include "lib/program/safetensors.h"

using nlohmann::json;

namespace {

std::string start_of_export(const std::string& path) { return path + ".tmp-"; }

bool is_directory(const std::string& path) {
  struct stat s;
  return ::stat(path.c_str(), &s) == 0 && S_ISDIR(s.st_mode);
}

// A file of a model that a directory holds; empty: none.
std::string model_file_in(const std::string& dir) {
  for (const std::string& name : files::names_in(dir))
    if (name == config_name || name == generation_name || name == index_name || is_safetensors_name(name)) return name;
  return "";
}

void require_no_model(const std::string& dir) {
  const std::string name = model_file_in(dir);
  if (!name.empty())
    throw Error(
        strf("%s/%s exists and is not overwritten; remove it or choose another directory", dir.c_str(), name.c_str()));
}

void check_file(const std::string& path) {
  const mode_t kind = files::kind_of(path);
  if (kind == S_IFDIR) files::fail("open", path, EISDIR);
  if (kind != 0 && kind != S_IFREG) throw Error(strf("%s is not a regular file; choose another", path.c_str()));
  if (kind != 0) throw Error(strf("%s exists and is not overwritten; remove it or choose another file", path.c_str()));
  const std::unique_ptr<files::File> file = files::create_unique(start_of_export(path));
  files::remove(file->path);
}

// Beside a directory that is to be made, inside one that is there.
std::string start_of_folder(const std::string& dir) {
  return is_directory(dir) ? dir + "/.export-" : start_of_export(dir);
}

void check_folder(const std::string& dir) {
  if (!is_directory(dir) && files::kind_of(dir) != 0)
    throw Error(strf("%s is not a directory; choose another, or a file whose name ends in .safetensors", dir.c_str()));
  if (is_directory(dir)) require_no_model(dir);
  files::remove_dir(files::make_unique_dir(start_of_folder(dir)));
}

// What stands where: every rank knows all tensors, and so makes the same. In the order of their names, since that of
// the parts depends on how the model is sharded.
struct Layout {
  struct Place {
    size_t file;
    int64_t offset;
  };
  std::vector<std::string> headers;  // of each file
  std::vector<int64_t> bytes;        // of each file, header and all
  std::map<std::string, Place> places;
};

Layout lay_out_files(const std::vector<Part>& parts, const std::map<std::string, std::string>& names,
                     int64_t shard_bytes, Dtype dtype) {
  Layout all;
  std::vector<std::pair<std::string, std::vector<int64_t>>> tensors;  // of the file that is being filled
  int64_t bytes = 0;
  auto end_file = [&] {
    all.headers.push_back(make_safetensors_header(tensors, dtype));
    all.bytes.push_back(bytes + int64_t(all.headers.back().size()));
    tensors.clear(), bytes = 0;
  };
  std::map<std::string, std::vector<int64_t>> shapes;
  for (const Part& p : parts) shapes[p.tensor] = p.shape;
  for (const auto& [tensor, shape] : shapes) {
    const int64_t size = elements_of(shape) * size_of(dtype);
    if (bytes > 0 && bytes + size > shard_bytes) end_file();
    all.places[tensor] = {all.headers.size(), bytes};
    tensors.push_back({names.at(tensor), shape});
    bytes += size;
  }
  end_file();
  for (auto& [tensor, place] : all.places) place.offset += int64_t(all.headers[place.file].size());
  return all;
}

// An export under way, on all ranks. What rank 0 has made until it is complete is removed when anything fails; a model
// that was trained is not thrown away for want of a name.
struct Export {
  explicit Export(const World& world) : world(world), talk(world) {}
  const World& world;
  TextChannel talk;
  std::vector<std::string> made;  // rank 0's, in order: files, and before them their directory
  std::string made_dir;
  std::string model;  // where it is; empty: not complete
  // A step that all ranks take, and that has failed on all if it has on one.
  void together(const std::function<void()>& f) {
    std::string error;
    try {
      f();
    } catch (const Error& e) {
      error = strf("--export: rank %d: %s", world.rank, e.what()) + (model.empty() ? "" : "; the model is in " + model);
    }
    error = talk.agree(error);
    if (error.empty()) return;
    if (model.empty()) {
      for (const std::string& path : made) ::unlink(path.c_str());
      if (!made_dir.empty()) ::rmdir(made_dir.c_str());
    }
    throw Error(error);
  }
  std::unique_ptr<files::File> keep(std::unique_ptr<files::File> file) {
    made.push_back(file->path);
    return file;
  }
};

// A file with its header, as long as it will be.
void begin_file(files::File* file, const std::string& header, int64_t bytes) {
  file->write_at(header.data(), int64_t(header.size()), 0);
  files::change("truncate", file->path, [&] { return ::ftruncate(file->fd, off_t(bytes)); });
  file->flush_and_close();
}

// This rank's parts, at their places in the files at `paths`.
void write_parts(const Layout& all, const std::vector<std::string>& paths, Dtype dtype, Device& dev,
                 const std::vector<Part>& parts) {
  constexpr int64_t most = 1 << 20;
  HostBuffer<char> copied(dev, most * 4);
  std::vector<char> numbers(most * 4);
  std::vector<std::pair<Layout::Place, const Part*>> jobs;
  for (const Part& p : parts)
    if (std::strcmp(p.kind, "weight") == 0 && p.count > 0) jobs.push_back({all.places.at(p.tensor), &p});
  // Each file once, from front to back.
  std::sort(jobs.begin(), jobs.end(), [](const auto& a, const auto& b) {
    return std::make_pair(a.first.file, a.first.offset) < std::make_pair(b.first.file, b.first.offset);
  });
  std::unique_ptr<files::File> file;
  for (const auto& [place, part] : jobs) {
    const Part& p = *part;
    const std::string& path = paths[place.file];
    if (!file || file->path != path) {
      if (file) file->flush_and_close();
      file = std::make_unique<files::File>(
          int(files::change("open", path, [&] { return ::open(path.c_str(), O_WRONLY | O_CLOEXEC); })), path);
    }
    for (int64_t at = 0; at < p.count; at += most) {
      const int64_t n = std::min(most, p.count - at);
      copy_to_host(dev.compute(), copied.get(), p, at, n);
      dev.compute().synchronize();
      const char* weights = joined(p, copied.get(), n, 0, n, numbers.data());
      require_finite(p.tensor, weights, p.first + at, n);
      // Narrowed as a gather does, and perhaps in place: the copy falls behind what is still to be read.
      for (int64_t i = 0; dtype == Dtype::bf16 && i < n; i++) {
        float wide;
        std::memcpy(&wide, weights + i * 4, 4);
        const bf16 narrow = nearest_away(wide);
        std::memcpy(numbers.data() + i * 2, &narrow, 2);
      }
      if (dtype == Dtype::bf16) weights = numbers.data();
      file->write_at(weights, n * size_of(dtype), place.offset + (p.first + at) * size_of(dtype));
    }
  }
  if (file) file->flush_and_close();
}

std::map<std::string, std::string> own_names(const std::vector<Part>& parts) {
  std::map<std::string, std::string> names;
  for (const Part& p : parts) names[p.tensor] = p.tensor;
  return names;
}

// Hugging Face's names: of the only file, or of one of several.
std::string weights_file(size_t i, size_t files) {
  return files == 1 ? weights_name : strf("model-%05zu-of-%05zu.safetensors", i + 1, files);
}

std::string index_text(const Layout& all, const std::map<std::string, std::string>& names) {
  json map = json::object();
  int64_t bytes = 0;
  for (const auto& [tensor, place] : all.places) map[names.at(tensor)] = weights_file(place.file, all.headers.size());
  for (size_t i = 0; i < all.headers.size(); i++) bytes += all.bytes[i] - int64_t(all.headers[i].size());
  return json{{"metadata", {{"total_size", bytes}}}, {"weight_map", map}}.dump(2) + "\n";
}

bool holds(const std::string& path, const std::string& text) {
  try {
    return files::read_all(path, int64_t(text.size())) == text;
  } catch (const Error&) { return false; }  // longer, or unreadable
}

// What a directory has already stays there: "; kept DIR/tokenizer.json, which is not the model's" for each that
// differs.
std::string kept_files(const std::string& dir, const std::map<std::string, std::string>& texts) {
  std::string kept;
  for (const auto& [name, text] : texts)
    if (const std::string path = dir + "/" + name; files::kind_of(path) != 0 && !holds(path, text))
      kept += "; kept " + path + ", which is not the model's";
  return kept;
}

}  // namespace

void check_export(const std::string& path) {
  try {
    if (is_safetensors_name(path)) check_file(path);
    else check_folder(files::without_slash(path));
  } catch (const Error& e) { throw Error(strf("--export: %s", e.what())); }
}

void check_export_shared(const std::string& path, const World& world) {
  require_shared(world, "--export",
                 is_safetensors_name(path) ? start_of_export(path) : start_of_folder(files::without_slash(path)));
}

void export_safetensors(const std::string& path, Dtype dtype, Device& dev, const World& world,
                        const std::vector<Part>& parts) {
  ASSERT(dev.mode == Mode::run && dtype != Dtype::f64);
  const Layout all = lay_out_files(parts, own_names(parts), INT64_MAX, dtype);
  Export e(world);
  std::string tmp;
  e.together([&] {
    if (world.rank != 0) return;
    if (files::kind_of(path) != 0) files::fail("create", path, EEXIST);
    const std::unique_ptr<files::File> file = e.keep(files::create_unique(start_of_export(path)));
    tmp = file->path;
    begin_file(file.get(), all.headers[0], all.bytes[0]);
  });
  tmp = e.talk.broadcast(tmp);
  e.together([&] { write_parts(all, {tmp}, dtype, dev, parts); });
  e.model = tmp;
  e.together([&] {
    if (world.rank != 0) return;
    files::rename_new(tmp, path);
    e.model = path;
    files::flush_dir(files::parent_of(path));
  });
}

void export_folder(const std::string& path, const std::map<std::string, std::string>& texts,
                   const std::map<std::string, std::string>& names, int64_t shard_bytes, Dtype dtype, Device& dev,
                   const World& world, const std::vector<Part>& parts) {
  ASSERT(dev.mode == Mode::run && dtype != Dtype::f64);
  const std::string dir = files::without_slash(path);
  const Layout all = lay_out_files(parts, names, shard_bytes, dtype);
  const size_t count = all.headers.size();
  std::vector<std::string> in_order;  // config.json last: what has one is a model
  Export e(world);
  std::string tmp;
  e.together([&] {
    if (world.rank != 0) return;
    if (is_directory(dir)) require_no_model(dir);
    tmp = e.made_dir = files::make_unique_dir(start_of_folder(dir));
    auto create = [&](const std::string& name, const std::string& text, int64_t bytes) {
      begin_file(e.keep(files::create(tmp + "/" + name)).get(), text, bytes);
      in_order.push_back(name);
    };
    for (size_t i = 0; i < count; i++) create(weights_file(i, count), all.headers[i], all.bytes[i]);
    std::map<std::string, std::string> others = texts;
    if (count > 1) others[index_name] = index_text(all, names);
    for (const auto& [name, text] : others)
      if (name != config_name && files::kind_of(dir + "/" + name) == 0) create(name, text, int64_t(text.size()));
    const std::string& config = others.at(config_name);
    create(config_name, config, int64_t(config.size()));
  });
  tmp = e.talk.broadcast(tmp);
  e.together([&] {
    std::vector<std::string> paths;
    for (size_t i = 0; i < count; i++) paths.push_back(tmp + "/" + weights_file(i, count));
    write_parts(all, paths, dtype, dev, parts);
  });
  e.model = tmp;
  e.together([&] {
    if (world.rank != 0) return;
    files::flush_dir(tmp);
    if (files::parent_of(tmp) != dir) {
      files::rename_new(tmp, dir);
      e.model = dir;
      return files::flush_dir(files::parent_of(dir));
    }
    require_no_model(dir);
    size_t moved = 0;
    try {
      for (; moved < in_order.size(); moved++)
        files::rename_new(tmp + "/" + in_order[moved], dir + "/" + in_order[moved]);
    } catch (const Error&) {  // the model is whole in one place
      while (moved-- > 0) ::rename((dir + "/" + in_order[moved]).c_str(), (tmp + "/" + in_order[moved]).c_str());
      throw;
    }
    e.model = dir;
    files::remove_dir(tmp);
    files::flush_dir(dir);
  });
}

std::string export_model(const Run& r, Device& dev, const World& world, const std::vector<Part>& parts) {
  const std::string& to = r.o.export_to;
  const Dtype dtype = r.o.export_dtype == "bf16" ? Dtype::bf16 : Dtype::f32;
  if (is_safetensors_name(to)) {
    export_safetensors(to, dtype, dev, world, parts);
    return "exported the model to " + to;
  }
  std::map<std::string, std::string> names = own_names(parts), texts;
  if (is_llama(r.model)) {
    for (auto& [ours, theirs] : names) theirs = llama_name(ours);
    texts[generation_name] = json{{"_from_model_config", true}}.dump(2) + "\n";
  }
  json config = model_config_json(r);
  std::string without;
  if (!r.o.init.empty()) {
    const BesideModel beside = read_beside_model(r.o.init);
    config.update(beside.token_ids);
    for (const auto& [name, text] : beside.files) texts[name] = text;
    without = beside.unread;
    if (!beside.found) without += strf("; without tokenizer and token ids: %s is not there any more", r.o.init.c_str());
  }
  texts[config_name] = config.dump(2) + "\n";
  if (world.rank == 0) without += kept_files(files::without_slash(to), texts);
  export_folder(to, texts, names, r.o.export_shard_mb << 20, dtype, dev, world, parts);
  return strf("exported the model to %s (%s)%s", to.c_str(),
              is_llama(r.model) ? "LlamaForCausalLM, for transformers" : "for --init and peers/read_export.py",
              without.c_str());
}
