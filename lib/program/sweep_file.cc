#include "lib/program/sweep_parts.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <set>
#include <tuple>
#include <utility>

#include <sys/stat.h>

#include "lib/device/error.h"
#include "lib/program/files.h"
#include "lib/program/tables.h"

std::shared_ptr<DirectoryLock> lock_rows(const std::string& path) {
  const std::filesystem::path whole = std::filesystem::absolute(path), dir = whole.parent_path();
  const std::string name = whole.filename();
  REQUIRE_USER(std::filesystem::is_directory(dir),
               "--out %s: there is no directory %s; make it, or choose another file", path.c_str(), dir.c_str());
  try {
    files::require_replaceable(path);
    return std::make_shared<DirectoryLock>(dir, "." + name + ".lock", ("writing " + name).c_str());
  } catch (const Error& e) { throw UsageError(strf("--out: %s", e.what())); }
}

namespace sweep_parts {

static std::string key(const json& j) {
  return j.value("row", "") + "\n" + j.value("who", "") + "\n" + j.value("variant", "") + "\n" +
         std::to_string(j.value("round", 1));
}

// Of a sweep before the one that has begun anew, and there until that has this row.
static bool is_stale(const json& j) { return j.value("stale", false); }

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
  if (!there || there->contains("error") || is_stale(*there)) return nullptr;
  const auto same = [&](const char* key, auto none) { return there->value(key, none) == like.value(key, none); };
  const auto chip = [](const json& row) { return row.value(json::json_pointer("/hardware/name"), ""); };
  const bool same_command = without_log(there->value("command", "")) == without_log(like.value("command", ""));
  const char* other = !same("ranks", int64_t(0))                           ? "with another number of ranks"
                      : !same_command                                      ? "by another command"
                      : like.contains("window") && !same("window", json()) ? "for other steps that count"
                      : chip(*there) != chip(like)                         ? "on other hardware"
                                                                           : nullptr;
  if (!other) return there;
  std::printf("%s %d, %s, %s: %s has it %s, and it runs again\n", like.value("sweep", "").c_str(),
              like.value("number", 0), like.value("row", "").c_str(), like.value("who", "").c_str(), path.c_str(),
              other);
  return nullptr;
}

void ResultFile::put(const json& row) {
  const auto is = [&](const json& j, const char* who) {
    return j.value("row", "") == row.value("row", "") && j.value("who", "") == who;
  };
  const json* before_it = row.value("who", "") == ours ? find(row) : nullptr;
  const bool peers_go = before_it && trains_otherwise(*before_it, row);
  const auto goes = [&](const json& j) {
    const bool same_run = is(j, row.value("who", "").c_str()) && j.value("variant", "") == row.value("variant", "");
    return key(j) == key(row) || (peers_go && is(j, theirs)) || (same_run && is_stale(j)) ||
           (same_run && without_log(j.value("command", "")) != without_log(row.value("command", "")));
  };
  rows.erase(std::remove_if(rows.begin(), rows.end(), goes), rows.end());
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

void ResultFile::drop_stale() {
  const size_t all = rows.size();
  rows.erase(std::remove_if(rows.begin(), rows.end(), is_stale), rows.end());
  if (rows.size() != all) write();
}

void ResultFile::write() const {
  std::string text;
  for (const json& j : rows) text += j.dump() + "\n";
  try {
    files::replace(path, text);
  } catch (const files::FileError& e) { throw UsageError(e.what()); }
}

ResultFile open_file(const SweepRun& run, const std::vector<Task>& tasks) {
  std::shared_ptr<DirectoryLock> lock = lock_rows(run.path);
  ResultFile file{run.path, read_json_lines(run.path), std::move(lock)};
  const bool foreign = std::any_of(file.rows.begin(), file.rows.end(), [&](const json& j) {
    return !j.contains("sweep") || j["sweep"] != run.sweep->name;
  });
  struct stat s;
  const bool empty = ::stat(run.path.c_str(), &s) != 0 || s.st_size == 0;
  REQUIRE_USER(!foreign && (empty || !file.rows.empty()),
               "%s holds something else than rows of --sweep %s, and is not overwritten; choose another --out",
               run.path.c_str(), run.sweep->name);
  if (!file.rows.empty()) file.rows = read_rows({run.path});
  // Where PyTorch does not run, its rows stay, those that had no room too, and ours beside them until put() has seen
  // whether they still belong.
  std::set<std::string> with_peer;
  for (const json& j : file.rows)
    if (run.peers == Peers::off && j.value("who", "") == theirs) with_peer.insert(j.value("row", ""));
  const auto goes = [&](const json& j) {
    const std::string row = j.value("row", "");
    const bool beside = with_peer.count(row) && (j.value("who", "") == theirs || j.value("round", 1) == 1);
    const auto stays = [&](const Task& t) { return t.row.name == row && (!t.refused.empty() || beside); };
    return (!j.contains("result") && !beside) || std::none_of(tasks.begin(), tasks.end(), stays);
  };
  if (run.begin == Begin::anew && run.only.empty()) {
    const auto runs_again = [&](const json& j) {
      const auto is_its = [&](const Task& t) { return t.row.name == j.value("row", ""); };
      return j.contains("result") && std::any_of(tasks.begin(), tasks.end(), is_its);
    };
    for (json& j : file.rows)
      if (goes(j) && runs_again(j)) j["stale"] = true;
    const auto is_nobodys = [&](const json& j) { return goes(j) && !runs_again(j); };
    file.rows.erase(std::remove_if(file.rows.begin(), file.rows.end(), is_nobodys), file.rows.end());
  }
  file.write();  // what cannot be written is said before the first row takes its time
  return file;
}

}  // namespace sweep_parts
