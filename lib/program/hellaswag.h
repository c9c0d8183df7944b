// Multiple-choice questions in llm.c's format: HellaSwag (Zellers et al. 2019), MMLU.
//
//   256 int32    magic 20240522, version 1, questions, bytes of the longest
//   a question   uint16: 65535, its bytes with these, its number, the right answer, answers;
//                the context's tokens behind their number; each answer's tokens behind theirs
//
// Little endian. Source: github.com/karpathy/llm.c, dev/data/data_common.py.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct Question {
  std::vector<int32_t> context;
  std::vector<std::vector<int32_t>> answers;
  int64_t right;  // of them
};

bool has_questions(const std::string& path);  // a regular file that begins with the magic number
// Throws UsageError that names the file, the question and the byte: a wrong version, a field that does not fit, a
// token that is not below vocab, an answer that is empty or has more than seq tokens, no context, bytes that are
// missing or too many.
std::vector<Question> read_questions(const std::string& path, int64_t vocab, int64_t seq);
