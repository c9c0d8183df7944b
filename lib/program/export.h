// The trained model as one file that other programs read: safetensors, weights alone.
//
//   8 bytes     length of the header, little endian
//   header      JSON: {"head.weight": {"dtype": "BF16", "shape": [256, 64], "data_offsets": [0, 32768]}, ...}
//   data        the tensors, unsharded, in the model's order and without gaps
// Source: github.com/huggingface/safetensors, "Format".
#pragma once

#include <string>
#include <vector>

#include "lib/program/checkpoint.h"

// Throws Error if something is there, or if rank 0 cannot write there now: so that it is known before a model is
// trained. Leaves nothing.
void check_export(const std::string& path);
// Every rank writes its parts (parts_of) at their places, with no more than a few MiB of them in host memory. dtype:
// f32 or bf16. The file has a name of its own beside `path` until it is complete, and nothing that has come to `path`
// meanwhile is replaced. Collective, in Mode::run. Throws Error, the same on all ranks.
void export_safetensors(const std::string& path, Dtype dtype, Device& dev, const World& world,
                        const std::vector<Part>& parts);
