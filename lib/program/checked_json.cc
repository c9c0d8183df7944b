#include "lib/program/checked_json.h"

#include "lib/device/error.h"

using nlohmann::json;

json parse_json(const std::string& text, const std::string& file, const char* remedy) {
  constexpr int deepest = 32;
  auto not_too_deep = [&](int depth, json::parse_event_t, json&) {
    REQUIRE_USER(depth <= deepest, "%s: nested deeper than %d levels; %s", file.c_str(), deepest, remedy);
    return true;
  };
  try {
    return json::parse(text, not_too_deep);
  } catch (const json::exception& e) {
    const auto* at = dynamic_cast<const json::parse_error*>(&e);
    throw UsageError(strf("%s: not JSON as of byte %zu; %s", file.c_str(), at ? at->byte : 0, remedy));
  }
}

namespace {
std::string brief(const json& value) {
  if (value.is_object()) return "an object";
  if (value.is_array()) return "a list";
  const std::string text = value.dump();
  return text.size() > 60 ? "a text of " + std::to_string(text.size()) + " bytes" : text;
}
}  // namespace

void CheckedJson::refuse(const std::string& wanted) const {
  throw UsageError(strf("%s: \"%s\" is %s, not %s; %s", file_.c_str(), key_.c_str(), brief(value_).c_str(),
                        wanted.c_str(), remedy_));
}

CheckedJson CheckedJson::at(const char* key) const {
  object();
  const std::string name = key_.empty() ? key : key_ + "." + key;
  const auto found = value_.find(key);
  REQUIRE_USER(found != value_.end(), "%s: there is no \"%s\"; %s", file_.c_str(), name.c_str(), remedy_);
  return {*found, file_, remedy_, name};
}

std::vector<CheckedJson> CheckedJson::items() const {
  if (!value_.is_array()) refuse("a list");
  std::vector<CheckedJson> all;
  for (const json& item : value_) all.push_back({item, file_, remedy_, key_ + "[" + std::to_string(all.size()) + "]"});
  return all;
}

int64_t CheckedJson::whole(int64_t lo, int64_t hi) const {
  // Of two kinds, neither of which holds all of the other's; and never a number with a fraction or an exponent.
  const bool fits = value_.is_number_unsigned()  ? value_.get<uint64_t>() <= uint64_t(INT64_MAX)
                    : value_.is_number_integer() ? true
                                                 : false;
  const int64_t x = fits ? value_.get<int64_t>() : 0;
  if (!fits || x < lo || x > hi)
    refuse(strf("a whole number from %lld to %lld", static_cast<long long>(lo), static_cast<long long>(hi)));
  return x;
}

const std::string& CheckedJson::text() const {
  if (!value_.is_string()) refuse("a text");
  return value_.get_ref<const std::string&>();
}

const json& CheckedJson::object() const {
  if (!value_.is_object()) {
    if (key_.empty())
      throw UsageError(strf("%s: %s, not an object; %s", file_.c_str(), brief(value_).c_str(), remedy_));
    refuse("an object");
  }
  return value_;
}
