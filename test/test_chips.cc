// The table of chips: names that drivers report and people type, and nothing for what only looks like one of them.
#include <set>
#include <string>
#include <utility>

#include "lib/device/device.h"
#include "lib/device/fp8.h"
#include "lib/program/chips.h"
#include "test/catch.h"

TEST_CASE("chips are found by what people and drivers call them", "[chips]") {
  for (const char* name : {"h200", "h100", "a100", "l40s", "rtx4090", "NVIDIA H200", "NVIDIA A100-SXM4-80GB",
                           "NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3"})
    CHECK(chip_named(name) != nullptr);
  REQUIRE(chip_named("NVIDIA H200") != nullptr);
  CHECK(std::string(chip_named("NVIDIA H200")->name) == "H200");
  CHECK(chip_named("NVIDIA T4") == nullptr);
  CHECK(chip_named("") == nullptr);
}

TEST_CASE("peaks of chips", "[chips]") {
  CHECK(peak_bf16_tflops("NVIDIA H200") == 989.5);
  CHECK(peak_bf16_tflops("NVIDIA H100 80GB HBM3") == 989.5);
  CHECK(peak_bf16_tflops("NVIDIA H100 PCIe") == 756.5);
  CHECK(peak_bf16_tflops("NVIDIA H100 NVL") == 835.5);
  CHECK(peak_bf16_tflops("NVIDIA A100-SXM4-80GB") == 312);
  CHECK(peak_bf16_tflops("NVIDIA A10") == 125);
  CHECK(peak_bf16_tflops("NVIDIA L4") == 121);
  CHECK(peak_bf16_tflops("NVIDIA L40S") == 362.05);
  CHECK(peak_bf16_tflops("NVIDIA GeForce RTX 4090") == 165.2);
  CHECK(peak_bf16_tflops("NVIDIA RTX 6000 Ada Generation") == 364.25);
  CHECK(peak_bf16_tflops("NVIDIA GeForce RTX 4090 Laptop GPU") == 0);
  CHECK(peak_bf16_tflops("NVIDIA A100-SXM4-40GB MIG 3g.20gb") == 0);
  CHECK(peak_bf16_tflops("Tesla V100-SXM2-16GB") == 0);
  CHECK(peak_bf16_tflops("Intel Xeon") == 0);
}

namespace {
std::string known_as(const std::string& name) {
  const Chip* chip = chip_named(name);
  return chip ? chip->name : "none";
}
}  // namespace

TEST_CASE("a chip is not taken for its sister", "[chips]") {
  const std::pair<const char*, const char*> names[] = {
      {"NVIDIA H200", "H200"},
      {"NVIDIA H200 NVL", "H200 NVL"},
      {"NVIDIA GH200 480GB", "GH200"},
      {"NVIDIA GH200 144G HBM3e", "GH200 144G"},
      {"NVIDIA H100 80GB HBM3", "H100"},
      {"NVIDIA H100 PCIe", "H100 PCIe"},
      {"NVIDIA H100 NVL", "H100 NVL"},
      {"NVIDIA A100-SXM4-80GB", "A100"},
      {"NVIDIA A100-SXM4-40GB", "A100 40GB"},
      {"NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"},
      {"NVIDIA A100 80GB PCIe", "A100 PCIe"},
      {"A100-SXM4-40GB", "A100 40GB"},  // old drivers
      {"NVIDIA L40S", "L40S"},
      {"NVIDIA GeForce RTX 4090", "RTX 4090"},
      // No more than a peak, or nothing at all, is known of these.
      {"NVIDIA GB200", "none"},
      {"NVIDIA B200", "none"},
      {"NVIDIA H800", "none"},
      {"NVIDIA H20", "none"},
      {"NVIDIA L40", "none"},
      {"NVIDIA GeForce RTX 3090", "none"},
      {"NVIDIA GeForce RTX 4090 Laptop GPU", "none"},
      {"NVIDIA A100-SXM4-40GB MIG 3g.20gb", "none"},
      {"NVIDIA H100 80GB HBM3 MIG 1g.10gb", "none"},
      {"NVIDIA H2000", "none"},
  };
  for (const auto& [name, chip] : names) {
    INFO(name);
    CHECK(known_as(name) == chip);
  }
  CHECK(peak_bf16_tflops("NVIDIA GH200 480GB") == 989.5);
  CHECK(peak_bf16_tflops("NVIDIA H200 NVL") == 835.5);
  CHECK(peak_bf16_tflops("NVIDIA H20") == 148);
  CHECK(peak_bf16_tflops("NVIDIA H800 PCIe") == 756.5);
  CHECK(peak_bf16_tflops("NVIDIA L40") == 181.05);
  CHECK(peak_bf16_tflops("NVIDIA GeForce RTX 3090 Ti") == 80);
}

TEST_CASE("MFU is a step's part of the dense bf16 peak of all its chips", "[chips]") {
  CHECK(mfu("NVIDIA H200", 1, 989.5e12, 1) == Approx(1));
  CHECK(mfu("NVIDIA H200", 2, 989.5e12, 0.8) == Approx(0.625));
  CHECK(mfu("NVIDIA A100-SXM4-80GB", 8, 8 * 156e12 * 3, 3) == Approx(0.5));
  CHECK(mfu("NVIDIA GeForce RTX 3090", 1, 35.5e12, 1) == Approx(0.5));  // nothing but its peak is known
  CHECK(mfu("Intel Xeon", 1, 1e12, 1) < 0);
}

TEST_CASE("fp8 came with Ada and Hopper", "[chips]") {
  for (const char* chip : {"h200", "gh200", "h100-pcie"})
    CHECK(fp8::support(chip_named(chip)->compute_capability) == fp8::Support::by_row);
  for (const char* chip : {"l40s", "rtx4090"})
    CHECK(fp8::support(chip_named(chip)->compute_capability) == fp8::Support::by_tensor);
  for (const char* chip : {"a100", "a100-40gb", "a100-pcie"})
    CHECK(fp8::support(chip_named(chip)->compute_capability) == fp8::Support::none);
  CHECK(fp8::support(80) == fp8::Support::none);
  CHECK(fp8::support(89) == fp8::Support::by_tensor);
  CHECK(fp8::support(90) == fp8::Support::by_row);
  CHECK(fp8::support(100) == fp8::Support::by_tensor);
}

TEST_CASE("consumer chips have little shared memory", "[chips]") {
  for (int cc : {86, 89, 120}) CHECK(has_small_memory(cc));
  for (int cc : {80, 87, 90, 100}) CHECK_FALSE(has_small_memory(cc));
}

TEST_CASE("every word of --gpu names one chip, whose figures are all there", "[chips]") {
  std::set<const Chip*> chips;
  for (const char* word : chip_words()) {
    INFO(word);
    const Chip* c = chip_named(word);
    REQUIRE(c != nullptr);
    CHECK(std::string(c->word) == word);
    CHECK(chip_named(c->name) == c);
    CHECK(peak_bf16_tflops(c->name) == c->bf16 / 1e12);
    CHECK(chips.insert(c).second);
    for (double figure : {double(c->multiprocessors), c->bf16, c->fp32, c->bandwidth, c->memory, c->link, c->network})
      CHECK(figure > 0);
    CHECK(c->bf16 > c->fp32);
    CHECK(c->network <= 50e9);
  }
}
