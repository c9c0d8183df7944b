// What a run finds out beside its steps: a line for people, an object for the log.
#pragma once

#include <string>

#include "lib/program/json.h"

struct Finding {
  std::string line = {};
  nlohmann::json record = {};
  std::string wrong = {};  // why nothing was found out, if so
};
