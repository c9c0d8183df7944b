// JSON (nlohmann-json). What takes longest to compile of it, its parser and writer, is compiled once, in json.cc: each
// file that parses or writes would have a copy of its own.
#pragma once

#include <string>
#include <vector>

#include "nlohmann/json.hpp"

namespace json_parts {
using Text = nlohmann::detail::iterator_input_adapter<std::string::const_iterator>;
}  // namespace json_parts
extern template class std::vector<nlohmann::json>;
extern template class nlohmann::detail::serializer<nlohmann::json>;
extern template class nlohmann::detail::lexer<nlohmann::json, json_parts::Text>;
extern template class nlohmann::detail::parser<nlohmann::json, json_parts::Text>;
