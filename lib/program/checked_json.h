// JSON that anybody may have written: each value is read with its type and its range, and what does not fit is an error
// that names the file and the key.
//
//   const json j = parse_json(text, file, remedy);
//   const CheckedJson top(j, file, remedy);
//   const int64_t bytes = top.at("files").items()[0].at("bytes").whole(0, most);
//   // UsageError: manifest.json: "files[0].bytes" is -3, not a whole number from 0 to 9000000000000000; resume from
//   ...
//
// A CheckedJson refers to the json and to the texts that it was made from.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/program/json.h"

constexpr int64_t most_exact = 9000000000000000;  // whole numbers up to here are exact in double

// Refuses what is no JSON, or nested deeper than anything that this program writes.
nlohmann::json parse_json(const std::string& text, const std::string& file, const char* remedy);

class CheckedJson {
 public:
  CheckedJson(const nlohmann::json& value, const std::string& file, const char* remedy, std::string key = "")
      : value_(value), file_(file), remedy_(remedy), key_(std::move(key)) {}
  bool has(const char* key) const { return value_.is_object() && value_.contains(key); }
  CheckedJson at(const char* key) const;   // of an object that has it
  std::vector<CheckedJson> items() const;  // of a list
  int64_t whole(int64_t lo, int64_t hi) const;
  const std::string& text() const;
  const nlohmann::json& object() const;
  const nlohmann::json& value() const { return value_; }
  [[noreturn]] void refuse(const std::string& wanted) const;

 private:
  const nlohmann::json& value_;
  const std::string& file_;
  const char* remedy_;
  std::string key_;
};
