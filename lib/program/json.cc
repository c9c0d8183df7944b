#include "lib/program/json.h"

template class std::vector<nlohmann::json>;
template class nlohmann::detail::serializer<nlohmann::json>;
template class nlohmann::detail::lexer<nlohmann::json, json_parts::Text>;
template class nlohmann::detail::parser<nlohmann::json, json_parts::Text>;
