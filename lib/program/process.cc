#include "lib/program/process.h"

#include <cctype>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lib/device/error.h"

namespace {

volatile pid_t running = 0;  // the child's process group, for the signal handler

void end_child_and_exit(int signal) {
  if (running > 0) kill(-running, SIGTERM);
  _exit(128 + signal);
}

// In the child: becomes the command, in a process group of its own, and is asked to end where the parent is killed.
[[noreturn]] void become(char** argv, int out, pid_t parent) {
  setpgid(0, 0);
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (getppid() != parent) _exit(127);  // it was killed before the call
  const int in = open("/dev/null", O_RDONLY);
  dup2(in, 0), dup2(out, 1), dup2(out, 2);
  execvp(argv[0], argv);
  std::fprintf(stderr, "error: %s: %s\n", argv[0], std::strerror(errno));
  _exit(127);
}

}  // namespace

void end_child_on_signals() {
  for (int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, end_child_and_exit);
}

std::string run(const std::vector<std::string>& command, const std::string& output, int64_t timeout_s,
                const std::function<Sign()>& meanwhile) {
  std::vector<char*> argv;
  for (const std::string& word : command) argv.push_back(const_cast<char*>(word.c_str()));
  argv.push_back(nullptr);
  const int out = open(output.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (out < 0) return strf("%s cannot be written: %s", output.c_str(), std::strerror(errno));
  const pid_t parent = getpid(), child = fork();
  if (child == 0) become(argv.data(), out, parent);
  const int why = errno;
  close(out);
  if (child < 0) return strf("fork: %s", std::strerror(why));
  setpgid(child, child);
  running = child;
  const auto start = std::chrono::steady_clock::now();
  int status = 0, signals = 0;
  double called = 0, end = double(timeout_s);
  while (waitpid(child, &status, WNOHANG) == 0) {
    const double s = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (meanwhile && s > called + 0.5) {
      called = s;
      if (meanwhile() == Sign::of_life && signals == 0) end = s + double(timeout_s);
    }
    // mpirun ends its ranks on SIGTERM; what ignores that is killed.
    if (signals == 0 && s > end) kill(-child, SIGTERM), signals = 1;
    if (signals == 1 && s > end + 15) kill(-child, SIGKILL), signals = 2;
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  running = 0;
  if (signals) return strf("timed out after %lld s", static_cast<long long>(timeout_s));
  if (WIFSIGNALED(status)) return strf("killed by signal %d", WTERMSIG(status));
  if (WEXITSTATUS(status)) return strf("exit status %d", WEXITSTATUS(status));
  return "";
}

std::string join(const std::vector<std::string>& words) {
  std::string line;
  for (const std::string& w : words) {
    const bool plain = !w.empty() && w.find_first_of(" \t\"'$&|;<>()*?\\`") == std::string::npos;
    line += (line.empty() ? "" : " ") + (plain ? w : "'" + w + "'");
  }
  return line;
}

std::vector<std::string> words_of(const std::string& text) {
  std::istringstream in(text);
  return {std::istream_iterator<std::string>(in), {}};
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines(1);
  for (char c : text) {
    if (c == '\n' || c == '\r') lines.emplace_back();
    else lines.back() += c;
  }
  return lines;
}

std::string read_file(const std::string& path) {
  std::error_code none;
  if (std::filesystem::is_directory(path, none)) return "";
  std::ifstream in(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(in), {});
}

std::string error_line(const std::string& path) {
  std::string any;
  for (const std::string& line : lines_of(read_file(path))) {
    if (line.rfind("error: ", 0) == 0) return line.substr(7);
    std::string lower = line;
    for (char& c : lower) c = char(std::tolower(static_cast<unsigned char>(c)));
    if (any.empty() && (lower.find("error") != std::string::npos || lower.find("out of memory") != std::string::npos))
      any = line;
  }
  return any;
}

std::string why(const std::string& ended, const std::string& output) {
  const std::string line = error_line(output);
  return line.empty() ? ended + "; see " + output : line;
}
