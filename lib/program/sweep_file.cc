#include "lib/program/sweep_parts.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <tuple>

#include <sys/stat.h>

#include "lib/device/error.h"
#include "lib/program/tables.h"

namespace sweep_parts {

static std::string key(const json& j) {
  return j.value("row", "") + "\n" + j.value("who", "") + "\n" + j.value("variant", "") + "\n" +
         std::to_string(j.value("round", 1));
}

const json* ResultFile::find(const json& like) const {
  for (const json& j : rows)
    if (key(j) == key(like)) return &j;
  return nullptr;
}

void ResultFile::put(const json& row) {
  const auto same = [&](const json& j) { return key(j) == key(row); };
  rows.erase(std::remove_if(rows.begin(), rows.end(), same), rows.end());
  rows.push_back(row);
  const auto before = [](const json& a, const json& b) {
    const auto order = [](const json& j) {
      return std::make_tuple(j.value("number", 0), j.value("who", "") != ours, j.value("variant", ""),
                             j.value("round", 1));
    };
    return order(a) < order(b);
  };
  std::stable_sort(rows.begin(), rows.end(), before);
  write();
}

void ResultFile::write() const {
  const std::string beside = path + ".part";
  {
    std::ofstream out(beside);
    for (const json& j : rows) out << j.dump() << "\n";
    out.flush();
    REQUIRE_USER(out, "%s cannot be written: %s", beside.c_str(), std::strerror(errno));
  }
  REQUIRE_USER(std::rename(beside.c_str(), path.c_str()) == 0, "%s cannot be written: %s", path.c_str(),
               std::strerror(errno));
}

ResultFile open_file(const SweepRun& run) {
  ResultFile file{run.path, read_json_lines(run.path)};
  const bool foreign = std::any_of(file.rows.begin(), file.rows.end(), [&](const json& j) {
    return !j.contains("sweep") || j["sweep"] != run.sweep->name;
  });
  struct stat s;
  const bool empty = ::stat(run.path.c_str(), &s) != 0 || s.st_size == 0;
  REQUIRE_USER(!foreign && (empty || !file.rows.empty()),
               "%s holds something else than rows of --sweep %s, and is not overwritten; choose another --out",
               run.path.c_str(), run.sweep->name);
  if (!file.rows.empty()) file.rows = read_rows({run.path});
  if (run.begin == Begin::anew && run.only.empty()) file.rows.clear();
  file.write();  // what cannot be written is said before the first row takes its time
  return file;
}

}  // namespace sweep_parts
