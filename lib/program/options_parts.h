// The parts of options.h: the table's form, and what --help tells of it. Nothing else includes
// this. The table itself is in options.cc.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "lib/program/options.h"

namespace options_parts {

using Member =
    std::variant<int64_t Options::*, uint64_t Options::*, double Options::*, bool Options::*, std::string Options::*>;

// What a value may be. Numbers: from lo to hi; `open` leaves out the end that it names ("lo" or "hi").
struct Allowed {
  double lo = 0, hi = 0;
  const char* open = "";
  std::vector<const char*> words = {};      // strings: one of these; none: anything
  std::vector<const char*> suggested = {};  // strings: for completion, among others
  bool fp32 = false;                        // numbers: a step computes with it in fp32
};

struct Spec {
  const char* name;
  const char* value;  // the value's name in the help; it tells the unit
  Member member;
  Allowed allowed;
  const char* help;
  const char* otherwise = nullptr;  // what happens without the option; null: the value in Options is the default
  const char* group = nullptr;
};
struct Group {
  const char* name;
  std::vector<Spec> specs;
};
extern const std::vector<Spec> specs;  // by group

// The file of options is no option of its own file: it stands beside the table.
constexpr char config_value[] = "FILE",
               config_help[] = "read options from a file, one `name = value` per line, # for comments";

// ---- options.cc
bool is_flag(const Spec& s);
bool is_number(const Spec& s);
std::string values_text(const Spec& s);             // "1 to 64", "0 or more", "bf16, fp32"
std::string default_text(const Spec& s);            // the value, or what happens without one
std::string variable_of(const std::string& name);   // FSDP_KV_HEADS
std::string did_you_mean(const std::string& name);  // " (did you mean NAME?)"; "" of none
// The name that is meant by what is none, or nothing if none is near.
std::string nearest(const std::string& typed, const std::vector<std::string>& names);

// ---- options_check.cc
void check_combinations(const Options& o);  // throws UsageError: an option needs another, or excludes it

// ---- options_help.cc
std::string help_text();
std::vector<std::string> help_sections();
// A group of the table as a manual would have it. Throws UsageError, which lists them.
std::string help_section(const std::string& name);

}  // namespace options_parts
