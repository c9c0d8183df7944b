// The chips that the program knows, by their vendors' datasheets: one table, for MFU, for the estimate of a step's time
// and for the words of --gpu.
//
//   chip_named("NVIDIA H200")->memory          // 141e9; also "h200", as --gpu has it
//   peak_bf16_tflops("NVIDIA H100 PCIe")       // 756.5
//   chip_named("NVIDIA GeForce RTX 3090")      // null: nothing but its peak is in the table
//
// A name is what a driver reports, or a word of --gpu. It fits a row if all words of the row's name are among its own,
// whole and in any case; the row with the most words wins, so "NVIDIA A100-SXM4-40GB" is an A100 40GB, and a GH200 no
// H200. A laptop's chip shares its name with a larger one and a MIG slice is a part of a chip: they fit no row, since
// no figure is better than a wrong one.
#pragma once

#include <string>
#include <vector>

struct Chip {  // bytes, bytes/s and FLOP/s
  const char* name;
  int multiprocessors;
  double bf16, fp32;  // dense, on tensor cores (accumulating in fp32) and beside them
  double bandwidth;   // of its memory
  double memory;
  double link;        // to the other GPUs of its node, one direction: NVLink, or PCIe where it has none or only bridges
  double network;     // a GPU's part of its node's network: an assumption, 400 Gbit/s and less
  bool copy_engines;  // whether gathers within a node go by them; see copy_engines_pay
  int compute_capability;
  const char* word = nullptr;  // of --gpu
};

// Null: the chip is not known, or nothing but its peak is.
const Chip* chip_named(const std::string& name);

// Dense bf16 peak, TFLOP/s; 0: the chip is not known.
double peak_bf16_tflops(const std::string& name);

// Model FLOP utilization: `flops` in so many seconds, as a part of the dense bf16 peak of so many of these chips;
// negative: the chip is not known.
double mfu(const std::string& name, double chips, double flops, double seconds);

// Of the chips that an estimate can be made for, as --gpu takes them.
std::vector<const char*> chip_words();
