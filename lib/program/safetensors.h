// The safetensors format: tensors by name, and nothing that could be run.
//
//   8 bytes     length of the header, little endian
//   header      JSON: {"head.weight": {"dtype": "BF16", "shape": [256, 64], "data_offsets": [0, 32768]}, ...}
//   data        the tensors without gaps, at those offsets
// Source: Hugging Face, safetensors, "Format". Whose files these are nobody knows: a header is checked to the
// last byte before anything is done with it.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "lib/device/dtype.h"

// Does a path name such a file, by how it ends?
bool is_safetensors_name(const std::string& path);

struct SafeTensor {
  std::string dtype;  // BF16, F16, F32; others that the format has are passed over by whoever does not want them
  std::vector<int64_t> shape;
  int64_t offset = 0, bytes = 0;  // in the file
};

// The header's text, and the file's size. Throws UsageError: it cannot be read, or is longer than the file or 100 MB.
std::string read_safetensors_header(const std::string& path, int64_t* file_bytes);
// Throws UsageError that names the file and the key: no JSON, a dtype that the format does not have, a shape whose
// elements are not as many bytes as the tensor has, tensors that overlap, lie beyond the file or leave a gap.
std::map<std::string, SafeTensor> parse_safetensors(const std::string& header, const std::string& path,
                                                    int64_t file_bytes);

// What a file of these tensors begins with, header and its length; the data follow in their order. dtype: f32 or bf16.
std::string make_safetensors_header(const std::vector<std::pair<std::string, std::vector<int64_t>>>& tensors,
                                    Dtype dtype);

// to (n) from (n) elements of BF16, F16 or F32. They do not overlap.
void widen_elements(float* to, const char* from, const std::string& dtype, int64_t n);
int64_t bytes_of_element(const std::string& dtype);  // 0: the format has no such dtype
