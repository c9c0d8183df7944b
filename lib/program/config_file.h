// A file of options, for --config:
//
//   # a run
//   preset = tiny
//   data = "my texts.txt"   # quotes keep blanks at the ends, and a #
//
// One `name = value` a line. Lines that begin with # or ; are comments, and so is what follows a # behind a blank.
#pragma once

#include <string>
#include <vector>

struct Setting {
  std::string name, value;  // without quotes
  int line;                 // from 1
};

// In the file's order. Knows nothing of the names. Throws UsageError that names the file, and the line: it cannot be
// read, is not a regular file (a FIFO, a device), is larger than 1 MiB; a line that is no `name = value`, a section, a
// quote that does not end.
std::vector<Setting> read_config(const std::string& path);

// A text as an error quotes it: no control characters, and of a long one the beginning.
std::string excerpt(const std::string& text);
