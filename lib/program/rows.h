// Rows of results: JSON lines in a file for programs, a Markdown table for people.
//
//   RowFile file = {"results/depth.jsonl", "./bench --sweep depth", FSDP_COMMIT};
//   file.require_writable();                         // before the first measurement takes its time
//   file.append({{"depth", 4}, {"result", {{"step_ms", median(ms)}}}});
//   std::printf("%s", markdown({{"depth", "step ms"}, {"4", "258.1"}}).c_str());
#pragma once

#include <string>
#include <vector>

#include "lib/program/json.h"

using Words = std::vector<std::string>;

// A file that rows are added to, one JSON object a line. Every row says when it was made, by which command and from
// which commit, so that a figure can be traced and measured again.
struct RowFile {
  std::string path, command, commit;
  // Throws UsageError if the file cannot be written; leaves no empty file behind.
  void require_writable() const;
  // Adds "date" and "command", and "commit" where the row has none of its own. Throws UsageError if it cannot.
  void append(nlohmann::json row) const;
};

// The JSON objects of a file that has one a line; other lines are skipped. None if the file cannot be read.
std::vector<nlohmann::json> read_json_lines(const std::string& path);

double median(std::vector<double> values);  // -1 of none

// {"ms": median, "ms_min": ..., "ms_max": ...}; at least one value.
nlohmann::json spread(const std::string& name, const std::vector<double>& values);

enum class Align { by_content, left, right };  // by_content: words to the left, figures to the right

// A Markdown table, one line a row, each ending in a newline; rows[0] is the header, all rows are equally long. align:
// of the columns from the first; those behind its end go by content.
std::string markdown(std::vector<Words> rows, const std::vector<Align>& align = {});
