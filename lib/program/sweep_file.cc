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

// Without what the same run may differ in: where it writes its log.
static std::string without_log(std::string command) {
  const std::string option = " --log ";
  const size_t at = command.find(option);
  if (at != std::string::npos) command.erase(at, command.find(' ', at + option.size()) - at);
  return command;
}

const json* ResultFile::kept(const json& like) const {
  const json* there = find(like);
  if (!there || there->contains("error")) return nullptr;
  const auto same = [&](const char* key, auto none) { return there->value(key, none) == like.value(key, none); };
  const bool same_command = without_log(there->value("command", "")) == without_log(like.value("command", ""));
  if (same("ranks", int64_t(0)) && same_command) return there;
  std::printf("%s %d, %s, %s: %s has it %s, and it runs again\n", like.value("sweep", "").c_str(),
              like.value("number", 0), like.value("row", "").c_str(), like.value("who", "").c_str(), path.c_str(),
              same_command ? "with another number of ranks" : "by another command");
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

ResultFile open_file(const SweepRun& run, const std::vector<Task>& tasks) {
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
  const auto goes = [&](const json& j) {
    const auto is_refused = [&](const Task& t) { return !t.refused.empty() && t.row.name == j.value("row", ""); };
    return !j.contains("result") || std::none_of(tasks.begin(), tasks.end(), is_refused);
  };
  if (run.begin == Begin::anew && run.only.empty())
    file.rows.erase(std::remove_if(file.rows.begin(), file.rows.end(), goes), file.rows.end());
  file.write();  // what cannot be written is said before the first row takes its time
  return file;
}

}  // namespace sweep_parts
