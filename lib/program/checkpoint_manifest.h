// manifest.json of a step: which piece of which tensor lies where in which file, with its checksums, and the state that
// the run gave. Every value is checked before anything is done with it: a manifest may come from anywhere.
//
//   {"format": "fsdp.cu checkpoint", "version": 2, "step": 20, "ranks": 2, "chunk_bytes": 1048576, "state": {...},
//    "tensors": [{"name": "head.weight", "shape": [256, 64]}, ...],
//    "files": [{"file": "rank-0.bin", "bytes": 65280, "parts": [{"tensor": "head.weight", "kind": "weight" | "m" | "v",
//      "first": 0, "count": 8192, "offset": 0, "dtype": "fp32" | "bf16", "xxh3": "16 digits a chunk"}, ...]}, ...],
//    "checksum": "16 digits, of the text in which these are zeros"}
//
// Checksums are XXH3's, of 64 bits. Version 1 has XXH64's, there as "xxh64", and is read too.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lib/device/device.h"
#include "lib/program/files.h"
#include "lib/program/json.h"

constexpr int checkpoint_version = 2;
constexpr int64_t chunk_bytes = 1 << 20, most_chunk_bytes = 1 << 30;  // written; read

// A manifest's text: JSON with a checksum of its own text, that of its version.
std::string seal(nlohmann::json j);

struct Manifest {
  struct Piece {  // elements [first, first + count) of a tensor, from byte `offset` of a file on
    size_t file;
    int64_t first, count, offset;
    std::string checksums;  // chunk by chunk, from the piece's first byte on
    Dtype dtype;
    int64_t bytes() const { return count * size_of(dtype); }
  };
  struct Tensor {
    std::vector<int64_t> shape;                        // unsharded
    std::map<std::string, std::vector<Piece>> pieces;  // by kind; in order and without gaps
  };
  std::string path;
  int version = 0;
  int64_t chunk = 0;
  std::vector<std::string> files;  // paths
  std::vector<int64_t> sizes;      // of the files, bytes
  std::map<std::string, Tensor> tensors;
  nlohmann::json state;
};

// These throw UsageError that names the file, what is damaged and the remedy.
Manifest parse_manifest(const std::string& step_dir, const std::string& text);
// The text of a manifest that parses, whose files are all there and as long as they should be.
std::string read_manifest(const std::string& step_dir);
// A file of a step's directory, to be read.
std::unique_ptr<files::File> open_of_step(const std::string& path);
// Of one file, before anything is read from it.
void check_size(const Manifest& m, size_t file);

int64_t elements_of(const std::vector<int64_t>& shape);
// "tensor 'head.weight' (AdamW's m)"
std::string tensor_text(const std::string& tensor, const std::string& kind);
extern const char* const other_step;  // the remedy for a step that cannot be loaded
