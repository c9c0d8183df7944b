#include "lib/program/outputs.h"

#include <sys/stat.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <tuple>
#include <utility>
#include <vector>

#include "lib/program/checkpoint_directory.h"
#include "lib/device/error.h"
#include "lib/program/data_files.h"
#include "lib/program/diagnostics.h"
#include "lib/program/export.h"
#include "lib/program/files.h"
#include "lib/program/telemetry.h"
#include "lib/program/tensorboard.h"
#include "lib/program/trace.h"

namespace {

namespace fs = std::filesystem;

// Where a file would be made that is opened by this path: links are followed, one that leads nowhere yet too.
fs::path resolved(const std::string& path) {
  std::error_code none;
  fs::path at = fs::absolute(path, none);
  constexpr int most_links = 40;  // the system's own limit
  for (int i = 0; i < most_links && fs::is_symlink(fs::symlink_status(at, none)); i++)
    at = at.parent_path() / fs::read_symlink(at, none);
  return fs::weakly_canonical(at, none);
}

// The same for two paths if they lead to the same file: one that is there is known by its inode, one that is not yet by
// its directory's and its name.
using Identity = std::tuple<dev_t, ino_t, std::string>;
Identity identity_of(const std::string& path) {
  struct stat s;
  if (::stat(path.c_str(), &s) == 0) return {s.st_dev, s.st_ino, ""};
  const fs::path full = resolved(path);
  if (::stat(full.parent_path().c_str(), &s) == 0) return {s.st_dev, s.st_ino, full.filename()};
  return {0, 0, full};
}

std::vector<std::string> checkpoint_directories(const Options& o) {
  std::vector<std::string> directories;
  if (!o.save.empty()) directories.push_back(o.save);
  if (!o.resume.empty() && o.resume != "latest") directories.push_back(o.resume);
  if (!o.resume.empty()) directories.push_back(find_checkpoint(o.resume, o.save));
  return directories;
}

// Whether a file's directory is there already. Throws UsageError if it is not, and the run will not make it before it
// opens its files.
bool has_directory(const Options& o, const char* option, const std::string& path) {
  const fs::path parent = resolved(files::without_slash(path)).parent_path();
  std::error_code none;
  if (fs::exists(parent, none)) return true;
  bool made_later = false;
  for (const std::string& made : {o.save, o.diagnostics, o.tensorboard}) {
    if (made.empty()) continue;
    const fs::path dir = resolved(files::without_slash(made));
    made_later |= std::mismatch(parent.begin(), parent.end(), dir.begin(), dir.end()).first == parent.end();
  }
  REQUIRE_USER(made_later, "%s %s: there is no directory %s; make it, or choose another file", option, path.c_str(),
               parent.c_str());
  return false;
}

// Of another run than this one's, too.
void require_no_checkpoint_around(const char* option, const std::string& path) {
  const std::string around = checkpoint_around(resolved(path));
  REQUIRE_USER(around.empty(), "%s %s is inside the checkpoint %s; choose another place", option, path.c_str(),
               around.c_str());
}

}  // namespace

void check_outputs(const Options& o) {
  const std::vector<std::pair<const char*, std::string>> outputs = {
      {"--log", o.log}, {"--trace", o.trace}, {"--export", o.export_to}};
  std::vector<std::pair<const char*, std::string>> taken = {{"--config", o.config}};
  for (const auto& [option, names] : {std::pair("--data", o.data), {"--val-data", o.val_data}, {"--eval", o.eval}})
    for (const std::string& path : names.empty() || names == "random" ? std::vector<std::string>() : data_files(names))
      taken.push_back({option, path});
  for (const auto& [option, path] : outputs) {
    if (path.empty()) continue;
    for (const auto& [by, other] : taken)
      REQUIRE_USER(other.empty() || identity_of(other) != identity_of(path),
                   "%s %s is the same file as %s; choose another", option, path.c_str(), by);
    taken.push_back({option, path});
    for (const std::string& dir : checkpoint_directories(o))
      REQUIRE_USER(!in_checkpoint(resolved(path), dir), "%s %s is inside a checkpoint in %s; choose another file",
                   option, path.c_str(), dir.c_str());
    require_no_checkpoint_around(option, path);
    REQUIRE_USER(o.diagnostics.empty() || identity_of(files::parent_of(resolved(path))) != identity_of(o.diagnostics) ||
                     !is_diagnostics_file(resolved(path).filename()),
                 "%s %s is one of the files of --diagnostics %s; choose another", option, path.c_str(),
                 o.diagnostics.c_str());
  }
  if (!o.diagnostics.empty()) {
    require_no_checkpoint_around("--diagnostics", o.diagnostics);
    for (const std::string& dir : checkpoint_directories(o))
      REQUIRE_USER(
          identity_of(o.diagnostics) != identity_of(dir) && !in_checkpoint(resolved(o.diagnostics), dir),
          "--diagnostics %s is where checkpoints are (%s); choose another directory, or a new one inside that one",
          o.diagnostics.c_str(), dir.c_str());
    check_diagnostics(o.diagnostics, !o.resume.empty());
  }
  if (!o.tensorboard.empty()) {
    require_no_checkpoint_around("--tensorboard", o.tensorboard);
    for (const std::string& dir : checkpoint_directories(o))
      REQUIRE_USER(identity_of(o.tensorboard) != identity_of(dir) && !in_checkpoint(resolved(o.tensorboard), dir),
                   "--tensorboard %s is where checkpoints are (%s); choose another directory, or a new one inside it",
                   o.tensorboard.c_str(), dir.c_str());
    check_tensorboard(o.tensorboard);
  }
  if (!o.log.empty() && has_directory(o, "--log", o.log)) check_log(o.log);
  if (!o.trace.empty() && has_directory(o, "--trace", o.trace)) check_trace(o.trace);
  if (!o.export_to.empty() && has_directory(o, "--export", o.export_to)) check_export(o.export_to);
}

OutputLocks lock_outputs(const Options& o) {
  const auto lock = [](const char* option, const std::string& given, const std::string& name) {
    if (given.empty()) return std::unique_ptr<DirectoryLock>();
    try {
      const std::string dir = files::without_slash(given);
      files::make_dirs(dir);
      return std::make_unique<DirectoryLock>(dir, name, "writing");
    } catch (const Error& e) { throw UsageError(strf("%s: %s", option, e.what())); }
  };
  // Names of their own, since a run may give one directory to both.
  return {lock("--tensorboard", o.tensorboard, ".tensorboard.lock"),
          lock("--diagnostics", o.diagnostics, ".diagnostics.lock")};
}

void ignore_write_signals() {
  for (int signal : {SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_IGN);
}
