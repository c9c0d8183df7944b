#include "lib/program/checkpoint_directory.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <utility>

#include "lib/device/device.h"
#include "lib/program/files.h"

namespace fs = std::filesystem;

using ll = long long;

// --------------------------------------------------------------------------------------------------------------- names

const std::string manifest_name = "manifest.json", latest_name = "latest", tmp_latest_name = ".tmp-latest";

namespace {

const std::string tmp_start = ".tmp-", old_start = ".tmp-old-", probe_start = ".tmp-probe-", lock_name = ".lock";

bool starts_with(const std::string& text, const std::string& start) {
  return text.compare(0, start.size(), start) == 0;
}
bool all_digits(const std::string& text) {
  return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
}

bool is_tmp_step(const std::string& name) {
  for (const std::string& start : {old_start, tmp_start})
    if (starts_with(name, start) && step_of(name.substr(start.size())) >= 0) return true;
  return false;
}
// NFS gives a file that is removed while somebody has it open the name .nfs and a number, until it is closed.
bool is_file_of_step(const std::string& name) {
  return name == manifest_name || is_shard_name(name) || starts_with(name, ".nfs");
}

}  // namespace

bool is_shard_name(const std::string& name) {
  const size_t digits = name.size() < 10 ? 0 : name.size() - 9;
  return digits > 0 && starts_with(name, "rank-") && all_digits(name.substr(5, digits)) &&
         name.substr(5 + digits) == ".bin";
}

std::string name_of_step(int64_t step) { return strf("step-%lld", ll(step)); }

int64_t step_of(const std::string& name) {
  if (!starts_with(name, "step-") || name.size() > 23 || !all_digits(name.substr(5))) return -1;
  const int64_t step = std::atoll(name.c_str() + 5);
  return name == name_of_step(step) ? step : -1;
}

std::string tmp_of(const std::string& dir, int64_t step) { return dir + "/" + tmp_start + name_of_step(step); }
std::string old_of(const std::string& dir, int64_t step) { return dir + "/" + old_start + name_of_step(step); }

// By which a directory is known before it is there: weakly_canonical leaves a relative path relative where nothing is.
static fs::path full_path(const std::string& dir) {
  std::error_code none;
  return fs::weakly_canonical(fs::absolute(files::without_slash(dir), none), none);
}

bool in_checkpoint(const std::string& path, const std::string& dir) {
  std::error_code none;
  const bool is_step = fs::exists(dir + "/" + manifest_name, none);
  const fs::path to_be = full_path(dir);  // where there is no directory yet
  for (fs::path at = path; at.has_relative_path(); at = at.parent_path()) {
    const std::string name = at.filename();
    if (is_step && fs::equivalent(at, dir, none)) return true;
    if ((name == latest_name || name == tmp_latest_name || name == lock_name || step_of(name) >= 0 ||
         is_tmp_step(name)) &&
        (at.parent_path() == to_be || fs::equivalent(at.parent_path(), dir, none)))
      return true;
  }
  return false;
}

std::string checkpoint_around(const std::string& path) {
  std::error_code none;
  for (fs::path at = full_path(path); at.has_relative_path(); at = at.parent_path())
    if (step_of(at.filename()) >= 0 && fs::exists(at / manifest_name, none)) return at;
  return "";
}

// --------------------------------------------------------------------------------------------------------------- steps

std::string find_checkpoint(const std::string& resume, const std::string& save_dir) {
  auto has = [](const std::string& path) {
    struct stat s;
    return ::stat(path.c_str(), &s) == 0;
  };
  REQUIRE_USER(resume != "latest" || !save_dir.empty(),
               "--resume latest: of which directory? Give --save DIR, or "
               "--resume DIR");
  const std::string path = files::without_slash(resume == "latest" ? save_dir : resume);
  REQUIRE_USER(has(path), "--resume %s: %s: %s", resume.c_str(), path.c_str(), std::strerror(errno));
  if (has(path + "/manifest.json")) return path;
  // A directory of that name is the user's own.
  if (has(path + "/latest") && (has(path + "/latest/manifest.json") || files::kind_of(path + "/latest") == S_IFLNK)) {
    char target[4096];
    const ssize_t n = ::readlink((path + "/latest").c_str(), target, sizeof target);
    // By the step's own name, for whoever reads it in a message.
    const std::string name = n > 0 ? std::string(target, size_t(n)) : "latest";
    return name[0] == '/' ? name : path + "/" + name;
  }
  int64_t newest = -1;
  for (const std::string& name : files::names_in(path))
    if (has(path + "/" + name + "/manifest.json")) newest = std::max(newest, step_of(name));
  REQUIRE_USER(newest >= 0, "--resume %s: no checkpoint in %s: it has neither manifest.json nor latest nor a step",
               resume.c_str(), path.c_str());
  return path + "/" + name_of_step(newest);
}

std::string way_back(const std::string& dir) {
  try {
    return "resume from " + find_checkpoint(dir, dir);
  } catch (const Error&) { return "there is no checkpoint to resume from"; }
}

Steps steps_in(const std::string& dir) {
  Steps steps;
  struct stat s;
  if (::stat(dir.c_str(), &s) != 0) return steps;
  for (const std::string& name : files::names_in(dir)) {
    const std::string manifest = dir + "/" + name + "/" + manifest_name;
    if (step_of(name) >= 0 && ::stat(manifest.c_str(), &s) == 0)
      steps[step_of(name)] =
          strf("%llu %lld %ld", static_cast<unsigned long long>(s.st_ino), ll(s.st_mtim.tv_sec), s.st_mtim.tv_nsec);
  }
  return steps;
}

Steps check_save(const std::string& dir, const std::string& resume) {
  const std::string to = files::without_slash(dir);
  Steps steps;
  std::string there;
  struct stat s;
  if (::stat(to.c_str(), &s) == 0) {
    try {
      steps = steps_in(to);
      require_link_to_step(to + "/" + latest_name);
      for (const std::string& name : files::names_in(to))
        if (step_of(name) >= 0 && !steps.count(step_of(name)))
          throw Error(strf("%s/%s is not a checkpoint, it has no %s; move it away or choose another directory",
                           to.c_str(), name.c_str(), manifest_name.c_str()));
    } catch (const Error& e) { throw UsageError(strf("--save %s: %s", dir.c_str(), e.what())); }
  }
  const std::string around = checkpoint_around(to);
  REQUIRE_USER(around.empty(), "--save %s is inside the checkpoint %s; choose another directory", dir.c_str(),
               around.c_str());
  std::error_code none;
  try {
    there = find_checkpoint(to, to);
  } catch (const UsageError&) { return steps; }  // none
  // Behind links, and by a path from anywhere.
  const fs::path from = resume.empty() ? fs::path() : fs::canonical(find_checkpoint(resume, to), none);
  const bool goes_on = !from.empty() && fs::equivalent(from.parent_path(), to, none);
  REQUIRE_USER(
      goes_on,
      "--save %s: %s is there, of another run; --resume latest goes on from it, and another directory keeps it",
      dir.c_str(), there.c_str());
  // Later steps are replaced, and with them only what is a checkpoint's.
  const int64_t begun = step_of(from.filename());  // negative: it was renamed
  try {
    for (const auto& [step, identity] : steps)
      if (begun >= 0 && step > begun) require_step_files(to + "/" + name_of_step(step));
  } catch (const Error& e) { throw UsageError(strf("--save %s: %s", dir.c_str(), e.what())); }
  return steps;
}

void require_known(const std::string& dir, const Steps& known) {
  for (const auto& [step, identity] : steps_in(dir)) {
    const auto it = known.find(step);
    if (it == known.end() || it->second != identity)
      throw Error(
          strf("another run saved %s/%s after this one started, and it is kept; give each run a directory "
               "of its own",
               dir.c_str(), name_of_step(step).c_str()));
  }
}

void require_step_files(const std::string& path) {
  const char* what = "; move it away or choose another directory";
  if (files::kind_of(path) != S_IFDIR) throw Error(strf("%s is not a directory of a checkpoint%s", path.c_str(), what));
  for (const std::string& name : files::names_in(path))
    if (!is_file_of_step(name) || files::kind_of(path + "/" + name) != S_IFREG)
      throw Error(strf("%s does not belong to a checkpoint%s", (path + "/" + name).c_str(), what));
}

void require_link_to_step(const std::string& path) {
  char target[4096];
  const ssize_t n = ::readlink(path.c_str(), target, sizeof target);
  if (n < 0 && errno == ENOENT) return;
  const std::string name(target, n < 0 ? 0 : size_t(n));
  if (step_of(name.substr(name.rfind('/') + 1)) < 0)
    throw Error(strf("%s is not a link to a checkpoint; move it away or choose another directory", path.c_str()));
}

void remove_step(const std::string& path) {
  if (files::kind_of(path) == 0) return;
  require_step_files(path);
  std::string first;
  auto attempt = [&](const std::function<void()>& f) {
    try {
      f();
    } catch (const Error& e) {
      if (first.empty()) first = e.what();
    }
  };
  for (const std::string& name : files::names_in(path)) attempt([&] { files::remove(path + "/" + name); });
  if (first.empty()) attempt([&] { files::change("rmdir", path, [&] { return ::rmdir(path.c_str()); }, {ENOENT}); });
  if (!first.empty()) throw files::FileError(first);
}

std::vector<std::string> remove_leftovers(const std::string& dir) {
  std::vector<std::string> left;
  std::string users;  // the first that is no save's
  for (const std::string& name : files::names_in(dir)) {
    const std::string path = dir + "/" + name;
    struct stat s;
    try {
      if (is_tmp_step(name)) {
        remove_step(path);
      } else if (name == tmp_latest_name) {
        require_link_to_step(path);
        files::remove(path);
      } else if (starts_with(name, probe_start) && ::lstat(path.c_str(), &s) == 0 && S_ISREG(s.st_mode) &&
                 s.st_size <= 1 && name.size() == probe_start.size() + files::unique_digits) {
        files::remove(path);
      }
    } catch (const files::FileError& e) { left.push_back(e.what()); } catch (const Error& e) {
      if (users.empty()) users = e.what();
    }
  }
  if (!users.empty()) throw Error(users);
  return left;
}

// ---------------------------------------------------------------------------------------------------------- this run's

namespace {
// Throws Error if files cannot be created, written and removed in dir now.
void probe(const std::string& dir) {
  std::string path;
  try {
    const std::unique_ptr<files::File> file = files::create_unique(dir + "/" + probe_start);
    path = file->path;
    file->write(".", 1);
  } catch (const Error&) {
    if (!path.empty()) ::unlink(path.c_str());
    throw;
  }
  files::remove(path);
}
}  // namespace

void require_shared(const World& world, const char* option, const std::string& start) {
  if (world.size == 1) return;
  std::string made, error;
  try {
    if (world.rank == 0) made = files::create_unique(start)->path;
  } catch (const Error& e) { error = strf("%s: %s", option, e.what()); }
  error = agree(error);
  if (!error.empty()) throw UsageError(error);
  const std::string path = broadcast_text(made);
  if (::access(path.c_str(), F_OK) != 0)
    error = strf("%s: rank %d: %s is another directory than rank 0's; give one that the ranks of all hosts share",
                 option, world.rank, files::parent_of(path).c_str());
  error = agree(error);
  if (world.rank == 0) ::unlink(made.c_str());
  if (!error.empty()) throw UsageError(error);
}

SaveDirectory::SaveDirectory(const World& world, const std::string& given, std::optional<Steps> found)
    : dir(files::without_slash(given)) {
  TextChannel talk(world);
  std::string error;
  auto agree_on = [&](const std::string& who, const std::function<void()>& f) {
    try {
      f();
    } catch (const Error& e) { error = "--save: " + who + e.what(); }
    error = talk.agree(error);
    if (!error.empty()) throw UsageError(error);
  };
  agree_on("", [&] {
    if (world.rank != 0) return;
    files::make_dirs(dir);
    lock = std::make_unique<DirectoryLock>(dir, lock_name, "saving");
    known = found ? *found : steps_in(dir);
    require_known(dir, known);  // another run may have saved and ended before the lock was taken
    for (const std::string& left : remove_leftovers(dir))
      notes.push_back("what an earlier save left could not be deleted: " + left);
  });
  agree_on(strf("rank %d: ", world.rank), [&] { probe(dir); });
  require_shared(world, "--save", dir + "/" + probe_start);
}
