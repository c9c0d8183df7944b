#include "lib/program/data_files.h"

#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "lib/device/error.h"

namespace {

bool is_there(const std::string& path) {
  struct stat s;
  return ::stat(path.c_str(), &s) == 0;
}

std::vector<std::string> matches(const std::string& pattern) {
  glob_t found = {};
  errno = 0;
  const int status = ::glob(pattern.c_str(), GLOB_ERR | GLOB_NOSORT, nullptr, &found);
  const int why = errno;
  std::vector<std::string> paths(found.gl_pathv, found.gl_pathv + (status == 0 ? found.gl_pathc : 0));
  ::globfree(&found);
  REQUIRE_USER(status == 0 || status == GLOB_NOMATCH, "data files %s: a directory cannot be searched: %s",
               pattern.c_str(), status == GLOB_NOSPACE ? "out of memory" : std::strerror(why));
  REQUIRE_USER(!paths.empty(), "data files %s: no file matches the pattern", pattern.c_str());
  std::sort(paths.begin(), paths.end());  // by bytes: the same in every locale, on every rank
  return paths;
}

}  // namespace

std::vector<std::string> data_files(const std::string& names) {
  if (is_there(names)) return {names};
  std::vector<std::string> paths;
  for (size_t at = 0, end; at <= names.size(); at = end + 1) {
    end = std::min(names.find(',', at), names.size());
    const std::string name = names.substr(at, end - at);
    REQUIRE_USER(!name.empty(), "data files %s: a name is empty; drop a comma", names.c_str());
    const bool pattern = name.find_first_of("*?[") != std::string::npos && !is_there(name);
    for (const std::string& path : pattern ? matches(name) : std::vector<std::string>{name}) paths.push_back(path);
  }
  std::set<std::string> seen;
  for (const std::string& path : paths)
    REQUIRE_USER(seen.insert(path).second, "data files %s: %s is named twice", names.c_str(), path.c_str());
  return paths;
}

std::string file_name(const std::string& path) { return path.substr(path.rfind('/') + 1); }
