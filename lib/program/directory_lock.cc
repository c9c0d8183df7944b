#include "lib/program/directory_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "lib/program/files.h"

using ll = long long;

namespace {
constexpr size_t most_lock_bytes = 400;
constexpr char beginning[] = "host ";  // of what a lock says that somebody holds or held
std::string read_text(int fd) {
  char text[most_lock_bytes];
  const ssize_t n = ::pread(fd, text, sizeof text, 0);
  return std::string(text, size_t(n > 0 ? n : 0));
}
}  // namespace

DirectoryLock::DirectoryLock(const std::string& dir, const std::string& name, const char* doing)
    : path_(dir + "/" + name) {
  const char* what = "; move it away or choose another directory";
  for (;;) {
    const int fd = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0666);
    if (fd < 0) files::fail("open", path_, errno);
    files::File file(fd, path_);  // closed unless it is kept
    struct stat mine, there;
    const bool may_be = ::fstat(fd, &mine) == 0 && S_ISREG(mine.st_mode) && mine.st_size <= off_t(most_lock_bytes);
    const std::string holder = may_be ? read_text(fd) : "";
    if (!may_be || !(holder.empty() || holder.rfind(beginning, 0) == 0))
      throw Error(strf("%s is not a lock of this program%s", path_.c_str(), what));
    if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
      if (errno != EWOULDBLOCK) return;  // no locks here
      throw Error(strf("another run is %s to %s (%s); give each run a directory of its own", doing, dir.c_str(),
                       holder.empty() ? "it has not said which" : holder.c_str()));
    }
    // Who held it may have removed it meanwhile, and then it keeps nobody out.
    if (::lstat(path_.c_str(), &there) != 0 || there.st_ino != mine.st_ino || there.st_dev != mine.st_dev) continue;
    char host[256] = "";
    ::gethostname(host, sizeof host - 1);
    const std::string text = strf("%s%s, process %lld", beginning, host, ll(::getpid()));
    if (::ftruncate(fd, 0) != 0 || ::pwrite(fd, text.data(), text.size(), 0) != ssize_t(text.size()))
      files::fail("write", path_, errno);
    fd_ = std::exchange(file.fd, -1);
    return;
  }
}
DirectoryLock::~DirectoryLock() {
  if (fd_ < 0) return;
  ::unlink(path_.c_str());  // while it is locked
  ::close(fd_);
}
