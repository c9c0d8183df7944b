#include "lib/program/config_file.h"

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <sstream>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "lib/device/error.h"

namespace {

constexpr size_t most_bytes = 1 << 20;
const char blanks[] = " \t\r\f\v";

// The bytes of a regular file that is not larger than that.
std::string contents(const std::string& path) {
  const char* file = path.c_str();
  const int fd = open(file, O_RDONLY | O_CLOEXEC | O_NONBLOCK);  // of a FIFO it would wait for a writer
  REQUIRE_USER(fd >= 0, "--config %s cannot be opened: %s", file, std::strerror(errno));
  struct stat s;
  const bool regular = fstat(fd, &s) == 0 && S_ISREG(s.st_mode);
  std::string text(regular ? most_bytes + 1 : 0, 0);
  size_t have = 0;
  ssize_t n = 0;
  while (have < text.size() && (n = read(fd, &text[have], text.size() - have)) > 0) have += size_t(n);
  const int why = errno;
  close(fd);
  REQUIRE_USER(regular, "--config %s: not a regular file; write the options into one", file);
  REQUIRE_USER(n >= 0, "--config %s cannot be read: %s", file, std::strerror(why));
  REQUIRE_USER(have <= most_bytes, "--config %s: larger than 1 MiB, so it is no file of options", file);
  text.resize(have);
  const std::string mark = "\xef\xbb\xbf";  // some editors begin UTF-8 with it
  return text.compare(0, mark.size(), mark) == 0 ? text.substr(mark.size()) : text;
}

std::string trimmed(const std::string& s) {
  const size_t first = s.find_first_not_of(blanks);
  return first == std::string::npos ? "" : s.substr(first, s.find_last_not_of(blanks) + 1 - first);
}

// What follows a value's closing quote, or is no part of a line.
bool nothing_or_comment(const std::string& s) {
  const size_t first = s.find_first_not_of(blanks);
  return first == std::string::npos || s[first] == '#';
}

// s: trimmed. A quote ends the value only where nothing but a comment follows it. False: it does not end.
bool value_of(const std::string& s, std::string* value) {
  if (s.empty() || (s[0] != '"' && s[0] != '\'')) {
    size_t end = s.find('#');
    while (end != std::string::npos && end > 0 && !std::strchr(blanks, s[end - 1])) end = s.find('#', end + 1);
    *value = trimmed(s.substr(0, end));
    return true;
  }
  for (size_t end = s.find(s[0], 1); end != std::string::npos; end = s.find(s[0], end + 1)) {
    if (!nothing_or_comment(s.substr(end + 1))) continue;
    *value = s.substr(1, end - 1);
    return true;
  }
  return false;
}

}  // namespace

std::vector<Setting> read_config(const std::string& path) {
  std::vector<Setting> settings;
  std::istringstream in(contents(path));
  int number = 0;
  for (std::string raw; std::getline(in, raw);) {
    number++;
    const std::string line = trimmed(raw), where = strf("--config %s:%d", path.c_str(), number);
    if (line.empty() || line[0] == '#' || line[0] == ';') continue;
    const std::string shown = excerpt(line);
    REQUIRE_USER(line[0] != '[', "%s: sections such as %s are not supported; see --help", where.c_str(), shown.c_str());
    const size_t equals = line.find('=');
    REQUIRE_USER(equals != std::string::npos && equals > 0, "%s: '%s': write name = value; see --help", where.c_str(),
                 shown.c_str());
    Setting s;
    s.name = trimmed(line.substr(0, equals)), s.line = number;
    REQUIRE_USER(value_of(trimmed(line.substr(equals + 1)), &s.value), "%s: '%s': the quote does not end",
                 where.c_str(), shown.c_str());
    settings.push_back(s);
  }
  return settings;
}

std::string excerpt(const std::string& text) {
  constexpr size_t most = 80;
  size_t n = std::min(text.size(), most);
  while (n > 0 && n < text.size() && (static_cast<unsigned char>(text[n]) & 0xc0) == 0x80) n--;  // whole UTF-8
  std::string shown = text.substr(0, n);
  for (char& c : shown)
    if (std::iscntrl(static_cast<unsigned char>(c))) c = '?';
  return shown + (n < text.size() ? "..." : "");
}
