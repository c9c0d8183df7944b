#include "lib/program/data_files.h"

#include <glob.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "lib/device/error.h"
#include "lib/program/json.h"

namespace {

// Of a name that a pattern found: nobody has typed it.
void require_utf8(const std::string& pattern, const std::string& path) {
  try {
    (void)nlohmann::json(path).dump();
  } catch (const nlohmann::json::exception&) {
    std::string shown;
    for (const char c : path) shown += c > 31 && c < 127 ? std::string(1, c) : strf("\\x%02x", unsigned(uint8_t(c)));
    throw UsageError(strf("data files %s: the name %s is not valid UTF-8, which logs and checkpoints need; rename it",
                          pattern.c_str(), shown.c_str()));
  }
}

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
  for (const std::string& path : paths) require_utf8(pattern, path);
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
  std::set<std::pair<dev_t, ino_t>> there;  // one file may have several names
  for (const std::string& path : paths) {
    struct stat s;
    const bool again = ::stat(path.c_str(), &s) == 0 && !there.insert({s.st_dev, s.st_ino}).second;
    REQUIRE_USER(seen.insert(path).second && !again, "data files %s: %s is named twice", names.c_str(), path.c_str());
  }
  return paths;
}

std::string difference(const TokenKind& a, const TokenKind& b) {
  const bool both_said = a.vocab > 0 && b.vocab > 0, both_named = !a.tokenizer.empty() && !b.tokenizer.empty();
  if (both_named && a.tokenizer != b.tokenizer)
    return strf("the tokenizer %s and %s", a.tokenizer.c_str(), b.tokenizer.c_str());
  if (both_said && a.vocab != b.vocab)
    return strf("a vocabulary of %lld and %lld", static_cast<long long>(a.vocab), static_cast<long long>(b.vocab));
  return "";
}
