#include "lib/program/rows.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

#include <unistd.h>

#include "lib/device/error.h"
#include "lib/program/process.h"
#include "lib/program/telemetry.h"

void RowFile::require_writable() const {
  const bool existed = access(path.c_str(), F_OK) == 0;
  REQUIRE_USER(std::ofstream(path, std::ios::app), "--out %s cannot be written: %s", path.c_str(),
               std::strerror(errno));
  if (!existed) std::remove(path.c_str());
}

void RowFile::append(nlohmann::json row) const {
  row["date"] = now_iso8601(), row["command"] = row.value("command", command);
  row["commit"] = row.value("commit", commit);
  std::ofstream out(path, std::ios::app);
  out << row.dump() << "\n";
  REQUIRE_USER(out.flush(), "--out %s cannot be written: %s", path.c_str(), std::strerror(errno));
}

std::vector<nlohmann::json> read_json_lines(const std::string& path) {
  std::vector<nlohmann::json> objects;
  for (const std::string& line : lines_of(read_file(path))) {
    nlohmann::json j = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (j.is_object()) objects.push_back(std::move(j));
  }
  return objects;
}

double median(std::vector<double> v) {
  if (v.empty()) return -1;
  std::sort(v.begin(), v.end());
  return v.size() % 2 ? v[v.size() / 2] : (v[v.size() / 2 - 1] + v[v.size() / 2]) / 2;
}

nlohmann::json spread(const std::string& name, const std::vector<double>& values) {
  ASSERT(!values.empty());
  return {{name, median(values)},
          {name + "_min", *std::min_element(values.begin(), values.end())},
          {name + "_max", *std::max_element(values.begin(), values.end())}};
}

namespace {

// A cell with letters is words; a factor, "x 1.03", is a figure.
bool is_words(const std::string& cell) {
  const auto is_letter = [](unsigned char c) { return std::isalpha(c) != 0; };
  return cell.rfind("x ", 0) != 0 && std::any_of(cell.begin(), cell.end(), is_letter);
}

// As it is seen: a character of UTF-8 is one byte and others that continue it.
size_t width_of(const std::string& cell) {
  return size_t(std::count_if(cell.begin(), cell.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

}  // namespace

std::string markdown(std::vector<Words> rows, const std::vector<Align>& align) {
  const size_t columns = rows[0].size();
  std::vector<size_t> width(columns, 0);
  std::vector<bool> words(columns, false);
  for (size_t r = 0; r < rows.size(); ++r) {
    ASSERT(rows[r].size() == columns);
    for (size_t i = 0; i < columns; ++i) {
      std::replace(rows[r][i].begin(), rows[r][i].end(), '|', '/');  // would end the cell
      width[i] = std::max(width[i], width_of(rows[r][i]));
      if (r > 0 && is_words(rows[r][i])) words[i] = true;
    }
  }
  for (size_t i = 0; i < std::min(columns, align.size()); ++i)
    if (align[i] != Align::by_content) words[i] = align[i] == Align::left;
  std::string text;
  for (size_t r = 0; r < rows.size(); ++r) {
    std::string line = "|", rule = "|";
    for (size_t i = 0; i < columns; ++i) {
      const std::string space(width[i] - width_of(rows[r][i]), ' ');
      line += " " + (words[i] ? rows[r][i] + space : space + rows[r][i]) + " |";
      rule += " " + std::string(width[i] - !words[i], '-') + (words[i] ? " |" : ": |");
    }
    text += line + "\n" + (r == 0 ? rule + "\n" : "");
  }
  return text;
}
