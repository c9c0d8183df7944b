// Child processes: what a run says went wrong, where its output goes, and that nothing outlives a timeout.
#include <csignal>
#include <cstdio>
#include <string>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "lib/device/error.h"
#include "lib/program/process.h"
#include "test/catch.h"

// Whether a process ends within five seconds.
static bool is_gone(const std::string& pid) {
  for (int i = 0; i < 100; ++i, usleep(50000)) {
    const std::string state = read_file("/proc/" + pid + "/stat");
    if (state.empty() || state.find(") Z") != std::string::npos) return true;  // a zombie's parent has yet to wait
  }
  return false;
}

TEST_CASE("a child's output and how it ended", "[process]") {
  const std::string output = strf("build/test-process-%d.log", int(getpid()));
  CHECK(run({"sh", "-c", "echo out; echo err >&2"}, output, 60).empty());
  CHECK(read_file(output) == "out\nerr\n");
  CHECK(run({"sh", "-c", "exit 3"}, output, 60) == "exit status 3");
  CHECK(run({"sh", "-c", "kill -9 $$"}, output, 60) == "killed by signal 9");
  CHECK(run({"/nonexistent/program"}, output, 60) == "exit status 127");
  CHECK(read_file(output) == "error: /nonexistent/program: No such file or directory\n");
  std::remove(output.c_str());
}

TEST_CASE("a child has nothing to read", "[process]") {
  const std::string output = strf("build/test-process-%d.log", int(getpid()));
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const int input = dup(0);
  dup2(ends[0], 0);  // this process has: a pipe that nobody writes to
  CHECK(run({"cat"}, output, 5).empty());
  dup2(input, 0);
  for (int fd : {ends[0], ends[1], input}) close(fd);
  std::remove(output.c_str());
}

TEST_CASE("a timeout ends a child and its children", "[process]") {
  const std::string output = strf("build/test-process-%d.log", int(getpid()));
  CHECK(run({"sh", "-c", "sleep 300 & echo $!; wait"}, output, 3) == "timed out after 3 s");
  const std::string child = lines_of(read_file(output)).front();
  REQUIRE(!child.empty());
  CHECK(is_gone(child));
  std::remove(output.c_str());
}

TEST_CASE("progress begins a child's timeout anew", "[process]") {
  const std::string output = strf("build/test-process-%d.log", int(getpid()));
  CHECK(run({"sleep", "1.2"}, output, 1, [] { return Sign::of_life; }).empty());
  CHECK(run({"sleep", "300"}, output, 1, [] { return Sign::none; }) == "timed out after 1 s");
  std::remove(output.c_str());
}

TEST_CASE("a child ends when its parent is killed", "[process]") {
  const std::string output = strf("build/test-process-%d.log", int(getpid()));
  const pid_t parent = fork();
  if (parent == 0) {
    run({"sh", "-c", "echo $$; exec sleep 300"}, output, 300);
    _exit(0);
  }
  REQUIRE(parent > 0);
  for (int i = 0; i < 400 && read_file(output).find('\n') == std::string::npos; ++i) usleep(25000);
  kill(parent, SIGKILL);
  waitpid(parent, nullptr, 0);
  const std::string child = lines_of(read_file(output)).front();
  REQUIRE(!child.empty());
  CHECK(is_gone(child));
  std::remove(output.c_str());
}

TEST_CASE("the line of an output that tells of an error", "[process]") {
  const std::string output = strf("build/test-process-%d.log", int(getpid()));
  CHECK(run({"printf", "step 1\\nRuntimeError: x\\nerror: --seq 0\\nError\\n"}, output, 60).empty());
  CHECK(error_line(output) == "--seq 0");
  CHECK(run({"printf", "step 1\\nCUDA out of memory\\nRuntimeError: x\\n"}, output, 60).empty());
  CHECK(error_line(output) == "CUDA out of memory");
  CHECK(run({"printf", "step 1\\n"}, output, 60).empty());
  CHECK(error_line(output).empty());
  std::remove(output.c_str());
}

TEST_CASE("words and lines", "[process]") {
  CHECK(words_of(" --shard  full\n") == std::vector<std::string>{"--shard", "full"});
  CHECK(lines_of("a\r\nb") == std::vector<std::string>{"a", "", "b"});
  CHECK(join({"./bench", "--out", "a b", ""}) == "./bench --out 'a b' ''");
}
