#include "lib/program/presets.h"

namespace {

const std::vector<Preset>& presets() {
  // clang-format off
  static const std::vector<Preset> table = {
      //            architecture   dim  depth   h  kv  hidden   vocab   seq   batch, accumulation
      {"tiny",      {Arch::rope,    128,    2,  2,  1,    512,    256,  512}, 1, 1},
      {"simple",    {Arch::simple, 4096,    4, 32,  8,  16384,  32768, 4096}, 8, 1},
      {"rope",      {Arch::rope,   4096,    4, 32,  8,  16384,  32768, 4096}, 8, 1},
      {"class",     {Arch::simple,  768,    6, 12, 12,   3072,  32000,  256}, 8, 2},
      {"m7c",       {Arch::rope,    768,   12, 12,  2,   3072,    256, 2048}, 1, 1},
      // m7c has 78.6 M parameters, because its tokens are bytes. With BERT's vocabulary of 30,522, padded to a multiple
      // of 64, embedding and head have 2 x 30528 x 768 = 46.9 M beside the blocks' 78.2 M.
      {"m7c-125m",  {Arch::rope,    768,   12, 12,  2,   3072,  30528, 2048}, 1, 1},
      {"mlp-1024",  {Arch::mlp,    1024,    3,  1,  1,   4096,  32768, 1024}, 8, 1},
      {"mlp-4096",  {Arch::mlp,    4096,    4,  1,  1,  16384,  32768, 4096}, 8, 1},
      {"llama-1b",  {Arch::llama,  2048,   16, 32,  8,   8192, 128256, 4096}, 2, 1},
      {"llama-8b",  {Arch::llama,  4096,   32, 32,  8,  14336, 128256, 8192}, 1, 1},
      {"llama-47b", {Arch::llama,  8192,   54, 64,  8,  28672,  32768, 2048}, 1, 1},
  };
  // clang-format on
  return table;
}

}  // namespace

const char* name_of(Arch a) {
  for (const Named<Arch>& e : arch_names)
    if (a == e.value) return e.name;
  return "";
}

const Preset& preset_named(const std::string& name) {
  std::string all;
  for (const Preset& p : presets()) {
    if (name == p.name) return p;
    all += (all.empty() ? "" : ", ") + std::string(p.name);
  }
  throw UsageError("unknown preset '" + name + "': choose one of " + all);
}

std::vector<const char*> preset_names() {
  std::vector<const char*> names;
  for (const Preset& p : presets()) names.push_back(p.name);
  return names;
}
