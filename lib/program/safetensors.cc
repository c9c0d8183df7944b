#include "lib/program/safetensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "lib/device/error.h"
#include "lib/program/checked_json.h"
#include "lib/program/files.h"
#include "lib/program/json.h"

using nlohmann::json;
using ll = long long;

namespace {

constexpr int64_t most_header = 100000000;  // the reference reader's own limit
const char* const remedy = "the file is damaged or cut off; get it again";

// A shape's elements; -1: more than can be.
int64_t elements_in(const std::vector<int64_t>& shape) {
  int64_t n = 1;
  for (int64_t size : shape) {
    if (size > 0 && n > most_exact / size) return -1;
    n *= size;
  }
  return n;
}

}  // namespace

int64_t bytes_of_element(const std::string& dtype) {
  static const std::map<std::string, int64_t> sizes = {
      {"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"F8_E4M3", 1}, {"F8_E5M2", 1}, {"I64", 8}, {"I32", 4},
      {"I16", 2}, {"I8", 1},  {"U64", 8}, {"U32", 4},  {"U16", 2},     {"U8", 1},      {"BOOL", 1}};
  const auto found = sizes.find(dtype);
  return found == sizes.end() ? 0 : found->second;
}

std::string read_safetensors_header(const std::string& path, int64_t* file_bytes) {
  const std::unique_ptr<files::File> file = files::open_to_read(path);
  *file_bytes = files::size_of(*file);
  uint64_t length = 0;
  REQUIRE_USER(*file_bytes >= 8, "%s: %lld bytes are no safetensors file; %s", path.c_str(), ll(*file_bytes), remedy);
  files::read_at(*file, reinterpret_cast<char*>(&length), 8, 0);
  REQUIRE_USER(length <= uint64_t(most_header) && int64_t(length) <= *file_bytes - 8,
               "%s: a header of %llu bytes in a file of %lld: no safetensors file, or cut off; get it again",
               path.c_str(), static_cast<unsigned long long>(length), ll(*file_bytes));
  std::string text(size_t(length), 0);
  files::read_at(*file, text.data(), int64_t(length), 8);
  return text;
}

std::map<std::string, SafeTensor> parse_safetensors(const std::string& header, const std::string& path,
                                                    int64_t file_bytes) {
  const int64_t start = 8 + int64_t(header.size()), data = file_bytes - start;
  const json j = parse_json(header, path, remedy);
  const CheckedJson top(j, path, remedy);
  std::map<std::string, SafeTensor> tensors;
  std::vector<const std::pair<const std::string, SafeTensor>*> by_place;
  for (const auto& [name, unused] : top.object().items()) {
    if (name == "__metadata__") continue;
    const CheckedJson t = top.at(name.c_str()), dtype = t.at("dtype"), offsets = t.at("data_offsets");
    SafeTensor tensor;
    tensor.dtype = dtype.text();
    const int64_t size = bytes_of_element(tensor.dtype);
    if (size == 0) dtype.refuse("a dtype of the safetensors format");
    for (const CheckedJson& n : t.at("shape").items()) tensor.shape.push_back(n.whole(0, most_exact));
    const std::vector<CheckedJson> ends = offsets.items();
    if (ends.size() != 2) offsets.refuse("a begin and an end");
    const int64_t begin = ends[0].whole(0, data), end = ends[1].whole(begin, data);
    const int64_t elements = elements_in(tensor.shape);
    tensor.offset = start + begin, tensor.bytes = end - begin;
    REQUIRE_USER(elements >= 0 && elements <= most_exact / size && elements * size == tensor.bytes,
                 "%s: \"%s\": its data_offsets hold %lld bytes, its shape %s in %s does not; %s", path.c_str(),
                 name.c_str(), ll(tensor.bytes), t.at("shape").value().dump().c_str(), tensor.dtype.c_str(), remedy);
    by_place.push_back(&*tensors.emplace(name, std::move(tensor)).first);
  }
  std::sort(by_place.begin(), by_place.end(), [](const auto* a, const auto* b) {
    return std::make_pair(a->second.offset, a->second.bytes) < std::make_pair(b->second.offset, b->second.bytes);
  });
  int64_t at = start;
  for (const auto* t : by_place) {
    REQUIRE_USER(t->second.offset == at, "%s: \"%s\".data_offsets begin at %lld, where %s; %s", path.c_str(),
                 t->first.c_str(), ll(t->second.offset - start),
                 t->second.offset < at ? "another tensor lies" : "a gap is before it", remedy);
    at += t->second.bytes;
  }
  REQUIRE_USER(at == file_bytes, "%s: %lld bytes after the last tensor; %s", path.c_str(), ll(file_bytes - at), remedy);
  return tensors;
}

std::string make_safetensors_header(const std::vector<std::pair<std::string, std::vector<int64_t>>>& tensors,
                                    Dtype dtype) {
  json header = {{"__metadata__", {{"format", "pt"}}}};
  int64_t end = 0;
  for (const auto& [name, shape] : tensors) {
    const int64_t bytes = elements_in(shape) * size_of(dtype);
    header[name] = {
        {"dtype", dtype == Dtype::bf16 ? "BF16" : "F32"}, {"shape", shape}, {"data_offsets", {end, end + bytes}}};
    end += bytes;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // data are aligned
  const uint64_t length = text.size();
  return std::string(reinterpret_cast<const char*>(&length), 8) + text;
}

namespace {
float of_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 0    ? std::ldexp(float(fraction), -24)
                     : exponent == 31 ? (fraction ? std::numeric_limits<float>::quiet_NaN() : INFINITY)
                                      : std::ldexp(float(1024 + fraction), exponent - 25);
  return bits >> 15 ? -size : size;
}
}  // namespace

void widen_elements(float* to, const char* from, const std::string& dtype, int64_t n) {
  if (dtype == "F32") {
    std::memcpy(to, from, size_t(n) * 4);
    return;
  }
  ASSERT(dtype == "BF16" || dtype == "F16");
  for (int64_t i = 0; i < n; i++) {
    uint16_t bits;
    std::memcpy(&bits, from + 2 * i, 2);
    bf16 b;
    b.bits = bits;
    to[i] = dtype == "BF16" ? float(b) : of_half(bits);
  }
}

bool is_safetensors_name(const std::string& path) {
  const std::string end = ".safetensors";
  return path.size() >= end.size() && path.compare(path.size() - end.size(), end.size(), end) == 0;
}
