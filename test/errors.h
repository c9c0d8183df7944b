// What a call throws, as text.
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
