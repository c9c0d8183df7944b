#include "lib/device/terminal.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "lib/device/error.h"

namespace terminal {

namespace {

// A descriptor of the terminal where a stream ends, or -1. It stays open.
int find(Stream s) {
  const char* term = std::getenv("TERM");
  if (term && std::strcmp(term, "dumb") == 0) return -1;
  if (!std::getenv("OMPI_COMM_WORLD_SIZE") && !std::getenv("PMI_SIZE")) return isatty(s) ? int(s) : -1;
  struct stat own, launchers;
  const std::string path = strf("/proc/%d/fd/%d", int(getppid()), int(s));
  if (fstat(s, &own) != 0 || S_ISREG(own.st_mode)) return -1;
  if (stat(path.c_str(), &launchers) != 0 || !S_ISCHR(launchers.st_mode)) return -1;
  const int fd = open(path.c_str(), O_WRONLY | O_NOCTTY | O_NONBLOCK | O_CLOEXEC);
  if (fd < 0 || isatty(fd)) return fd;
  close(fd);
  return -1;
}

int of(Stream s) {
  static const int fds[] = {find(out), find(error)};
  return fds[s - 1];
}

bool has_colours(Stream s) {
  const char* no = std::getenv("NO_COLOR");
  return is_watched(s) && !(no && *no);
}

}  // namespace

bool is_watched(Stream s) { return of(s) >= 0; }

int columns() {
  winsize size;
  return is_watched(out) && ioctl(of(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0 ? size.ws_col : 80;
}

const char* clear_line(Stream s) { return is_watched(s) ? "\r\033[K" : ""; }

std::string painted(Stream s, Style style, const std::string& text) {
  const char* const codes[] = {"", "1", "1;31", "33"};
  if (style == Style::plain || !has_colours(s)) return text;
  return strf("\033[%sm%s\033[0m", codes[int(style)], text.c_str());
}

std::string with_colours(Stream s, const std::string& line) {
  for (const auto& [word, style] : {std::pair("error:", Style::red), std::pair("warning:", Style::yellow)})
    if (line.rfind(word, 0) == 0) return painted(s, style, word) + line.substr(std::strlen(word));
  return line;
}

void say(const std::string& line) {
  std::fprintf(stderr, "%s%s\n", clear_line(error), with_colours(error, line).c_str());
  std::fflush(stderr);
}

void flush_output(OutputReader reader) {
  const bool fails = std::fflush(stdout) != 0;
  const std::string now = strf(": %s", std::strerror(errno));
  if (!fails && !std::ferror(stdout)) return;
  const bool closed = (fcntl(out, F_GETFL) & O_ACCMODE) == O_RDONLY;  // since fill_standard_streams
  pollfd end = {out, POLLOUT, 0};
  const bool left = poll(&end, 1, 0) > 0 && end.revents & (POLLERR | POLLHUP);  // of a pipe and of a socket
  if (left && reader == OutputReader::may_leave) return;
  throw Error("standard output cannot be written" + (left     ? ": its reader has left"
                                                     : closed ? ": it is closed"
                                                     : fails  ? now
                                                              : "; see whether its disk has room"));
}

void fill_standard_streams() {
  for (int fd : {0, 1, 2})
    if (fcntl(fd, F_GETFD) < 0) open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY);  // the lowest number that is free
}

}  // namespace terminal
