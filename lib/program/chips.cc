#include "lib/program/chips.h"

#include <algorithm>
#include <cctype>

namespace {

// Figures without sparsity. Names without "PCIe" or "NVL" are SXM modules; GeForce and RTX peaks are for fp32
// accumulation, which is what matmuls here use.
// clang-format off
constexpr Chip chips[] = {
    // name            SMs  bf16       fp32     bandwidth memory  link    network  copy engines, cc, --gpu
    {"H200",           132, 989.5e12,  66.9e12, 4.8e12,   141e9,  450e9,  50e9,    true,  90, "h200"},
    {"H200 NVL",       132, 835.5e12,  60e12,   4.8e12,   141e9,  64e9,   25e9,    true,  90, "h200-nvl"},
    {"GH200",          132, 989.5e12,  66.9e12, 4.0e12,   96e9,   450e9,  25e9,    true,  90, "gh200"},
    {"GH200 144G",     132, 989.5e12,  66.9e12, 4.9e12,   144e9,  450e9,  25e9,    true,  90, "gh200-144g"},
    {"H100",           132, 989.5e12,  66.9e12, 3.35e12,  80e9,   450e9,  50e9,    true,  90, "h100"},
    {"H100 NVL",       132, 835.5e12,  60e12,   3.9e12,   94e9,   64e9,   25e9,    true,  90, "h100-nvl"},
    {"H100 PCIe",      114, 756.5e12,  51.2e12, 2.0e12,   80e9,   64e9,   25e9,    true,  90, "h100-pcie"},
    {"A100",           108, 312e12,    19.5e12, 2.039e12, 80e9,   300e9,  25e9,    false, 80, "a100"},
    {"A100 40GB",      108, 312e12,    19.5e12, 1.555e12, 40e9,   300e9,  25e9,    false, 80, "a100-40gb"},
    {"A100 PCIe",      108, 312e12,    19.5e12, 1.935e12, 80e9,   32e9,   12.5e9,  false, 80, "a100-pcie"},
    {"A100 PCIe 40GB", 108, 312e12,    19.5e12, 1.555e12, 40e9,   32e9,   12.5e9,  false, 80, "a100-pcie-40gb"},
    {"L40S",           142, 362.05e12, 91.6e12, 0.864e12, 48e9,   32e9,   12.5e9,  false, 89, "l40s"},
    {"RTX 4090",       128, 165.2e12,  82.6e12, 1.008e12, 24e9,   32e9,   12.5e9,  false, 89, "rtx4090"},
};
// clang-format on

// Chips of which nothing else is wanted so far.
struct Peak {
  const char* name;
  double bf16;
};
constexpr Peak peaks[] = {
    {"GB300", 2500e12},      {"GB200", 2500e12},      {"B300", 2250e12},      {"B200", 2250e12},
    {"B100", 1750e12},       {"H800 PCIe", 756.5e12}, {"H800", 989.5e12},     {"H20", 148e12},
    {"A800", 312e12},        {"A40", 149.7e12},       {"A30", 165e12},        {"A10G", 70e12},
    {"A10", 125e12},         {"L40", 181.05e12},      {"L4", 121e12},         {"RTX 6000 Ada", 364.25e12},
    {"RTX A6000", 154.8e12}, {"RTX 5090", 209.5e12},  {"RTX 3090 Ti", 80e12}, {"RTX 3090", 71e12},
};

std::vector<std::string> words_of(const std::string& name) {
  std::vector<std::string> words(1);
  for (unsigned char c : name)
    if (std::isalnum(c)) words.back() += char(std::tolower(c));
    else if (!words.back().empty()) words.emplace_back();
  if (words.back().empty()) words.pop_back();
  return words;
}

bool holds(const std::vector<std::string>& words, const std::vector<std::string>& wanted) {
  return std::all_of(wanted.begin(), wanted.end(),
                     [&](const std::string& w) { return std::find(words.begin(), words.end(), w) != words.end(); });
}

struct Found {
  const Chip* chip = nullptr;
  double bf16 = 0;
};
Found find(const std::string& name) {
  const std::vector<std::string> words = words_of(name);
  Found best;
  if (holds(words, {"laptop"}) || holds(words, {"mig"})) return best;
  size_t most = 0;
  const auto offer = [&](const char* row, Found found) {
    const std::vector<std::string> wanted = words_of(row);
    if (wanted.size() > most && holds(words, wanted)) most = wanted.size(), best = found;
  };
  for (const Chip& c : chips) {
    if (words == words_of(c.word)) return {&c, c.bf16};
    offer(c.name, {&c, c.bf16});
  }
  for (const Peak& p : peaks) offer(p.name, {nullptr, p.bf16});
  return best;
}

}  // namespace

const Chip* chip_named(const std::string& name) { return find(name).chip; }

double peak_bf16_tflops(const std::string& name) { return find(name).bf16 / 1e12; }

double mfu(const std::string& name, double chips, double flops, double seconds) {
  const double peak = find(name).bf16;
  return peak > 0 ? flops / seconds / (chips * peak) : -1;
}

std::vector<const char*> chip_words() {
  std::vector<const char*> words;
  for (const Chip& c : chips) words.push_back(c.word);
  return words;
}
