// What a call throws, as text, and whether a text has a part.
#pragma once

#include <string>

#include "lib/device/error.h"

// The text of the Error, or of the kind asked for, that f() throws; "" if it throws none.
template <class Kind = Error, class F>
std::string error_of(F f) {
  try {
    f();
  } catch (const Kind& e) { return e.what(); }
  return "";
}

inline bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }
