// The trained model for other programs: safetensors, weights alone, unsharded.
//
//   --export FILE.safetensors   one file; our names
//   --export DIR                a folder as model_folder.h says: what transformers' from_pretrained(DIR) loads if the
//                               model is a Llama, else what --init DIR and peers/read_export.py read
//
// A run that began with --init DIR hands on DIR's tokenizer and token ids, and so do those that go on from its
// checkpoints. Weights must be finite. What is written has a name of its own until
// it is complete, and nothing that was there, or has come meanwhile, is replaced.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "lib/program/checkpoint.h"
#include "lib/program/run.h"

// Throws Error if a model is there, or if rank 0 cannot write there now: so that it is known before a model is trained.
// Leaves nothing.
void check_export(const std::string& path);
// Throws UsageError on all ranks if they do not see the same directory there. Collective over `world`.
void check_export_shared(const std::string& path, const World& world);

// Of a run, as its options say: collective, in Mode::run. parts: this rank's (parts_of, to save). Throws Error, the
// same on all ranks. Returns what was made, for people.
std::string export_model(const Run& r, Device& dev, const World& world, const std::vector<Part>& parts);

// What that is made of, and tests. Every rank writes its parts at their places, with no more than a few MiB of them in
// host memory. dtype: f32 or bf16.
void export_safetensors(const std::string& path, Dtype dtype, Device& dev, const World& world,
                        const std::vector<Part>& parts);
// texts: the folder's other files, by name. names: of the tensors there, by ours. shard_bytes: no file of weights is
// larger, but for one with a single tensor.
void export_folder(const std::string& dir, const std::map<std::string, std::string>& texts,
                   const std::map<std::string, std::string>& names, int64_t shard_bytes, Dtype dtype, Device& dev,
                   const World& world, const std::vector<Part>& parts);
