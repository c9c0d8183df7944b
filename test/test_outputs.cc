// lib/program/outputs.h: what a run writes is none of the files that it reads, by whatever name it is called. And
// lib/device/terminal.h: who has left standard output.
#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "lib/device/device.h"
#include "lib/device/terminal.h"
#include "lib/program/checkpoint_directory.h"
#include "lib/program/outputs.h"
#include "lib/program/telemetry.h"
#include "test/catch.h"
#include "test/errors.h"
#include "test/scratch.h"

namespace {

namespace fs = std::filesystem;

std::string refusal(const Options& o) {
  return error_of([&] { check_outputs(o); });
}

}  // namespace

TEST_CASE("no output is an input, by whatever path", "[outputs]") {
  const ScratchDirectory dir;
  fs::create_hard_link(dir.file("data", "text"), dir / "hard");
  fs::create_symlink("data", dir / "soft");
  fs::create_directory(dir / "sub");
  fs::create_directory_symlink("sub", dir / "other");
  const std::string data = dir / "data";
  for (const std::string& path :
       {data, dir / "hard", dir / "soft", dir / "./data", dir / "sub/../data", dir / "other/../data"}) {
    INFO(path);
    Options o;
    o.log = path;
    o.data = data;
    CHECK(refusal(o) == "--log " + path + " is the same file as --data; choose another");
    o.data = "", o.val_data = data;
    CHECK(refusal(o) == "--log " + path + " is the same file as --val-data; choose another");
    o.val_data = "", o.config = data;
    CHECK(refusal(o) == "--log " + path + " is the same file as --config; choose another");
    o.log = "", o.export_to = path;
    CHECK(refusal(o) == "--export " + path + " is the same file as --config; choose another");
  }
  // Two that are not there yet.
  fs::create_symlink("sub/new", dir / "link");
  for (const std::string& path : {dir / "sub/new", dir / "other/new", dir / "sub/./new", dir / "link"}) {
    INFO(path);
    Options o;
    o.log = path, o.export_to = dir / "sub/new";
    CHECK(has(refusal(o), "is the same file as --log"));
    o.export_to = dir / "sub/newer";
    CHECK(refusal(o) == "");
  }
  CHECK(!fs::exists(dir / "sub/new"));
  Options o;
  o.data = "random", o.log = dir / "random";
  CHECK(refusal(o) == "");
}

TEST_CASE("no output is part of a checkpoint", "[outputs]") {
  const ScratchDirectory dir;
  fs::create_directories(dir / "run/step-10/more");
  std::ofstream(dir / "run/step-10/manifest.json") << "{}";
  fs::create_directory_symlink("step-10", dir / "run/latest");
  fs::create_directory_symlink("run", dir / "other");
  const std::string start = dir / "";
  for (const char* name :
       {"run/latest", "run/latest/x", "run/step-10/x", "run/step-20", "run/.tmp-step-20/x", "run/.tmp-old-step-1/x",
        "run/.tmp-latest", "other/step-10/more/x", "run/../run/step-20/x"}) {
    INFO(name);
    for (const char* with : {"run", "other", "run/"}) {
      Options o;
      o.log = start + name, o.save = start + with;
      CHECK(has(refusal(o), "is inside a checkpoint in " + o.save));
      o.save = "", o.resume = start + with;
      CHECK(has(refusal(o), "is inside a checkpoint in"));
    }
  }
  fs::create_symlink("run/step-20/rank-0.bin", dir / "link");  // leads nowhere yet
  Options o;
  o.log = dir / "link", o.save = dir / "run";
  CHECK(has(refusal(o), "is inside a checkpoint"));
  o = Options();
  o.log = dir / "run/step-10/more/x", o.resume = dir / "run/step-10";
  CHECK(has(refusal(o), "is inside a checkpoint"));
  // What the user has there beside them.
  for (const char* name : {"run/log", "run/step", "run/step-x", "step-10", "run/.tmp", "latest"}) {
    INFO(name);
    Options o;
    o.log = start + name, o.save = dir / "run", o.resume = "latest", o.export_to = o.log + ".model";
    CHECK(refusal(o) == "");
  }
  o = Options();
  o.save = dir / "none", o.log = dir / "log";
  CHECK(refusal(o) == "");
  // A directory that the run makes.
  for (const char* with : {"none", "none/", "./none"}) {
    INFO(with);
    o.save = start + with, o.log = dir / "none/step-2";
    CHECK(refusal(o) == "--log " + o.log + " is inside a checkpoint in " + o.save + "; choose another file");
    o.log = dir / "none/log";
    CHECK(refusal(o) == "");
  }
  // By a name alone, as most people write it.
  const fs::path was = fs::current_path();
  fs::current_path(dir.path);
  o.save = "none", o.log = "none/step-2";
  CHECK(refusal(o) == "--log none/step-2 is inside a checkpoint in none; choose another file");
  fs::current_path("run/step-10");
  CHECK(has(error_of<UsageError>([] { check_save("new", ""); }), "--save new is inside the checkpoint"));
  fs::current_path(was);
  // Of another run.
  for (const char* name : {"run/step-10", "run/latest", "other/step-10/more/x"}) {
    INFO(name);
    for (std::string Options::*option : {&Options::log, &Options::export_to, &Options::diagnostics}) {
      o = Options();
      o.*option = start + name;
      CHECK(has(refusal(o), "is inside the checkpoint"));
    }
  }
}

TEST_CASE("a log's directory is there, or the run makes it", "[outputs]") {
  const ScratchDirectory dir;
  Options o;
  o.log = dir / "sub/more/log";
  const std::string refused = strf("--log %s: there is no directory %s; make it, or choose another file", o.log.c_str(),
                                   fs::weakly_canonical(dir / "sub/more").c_str());
  CHECK(refusal(o) == refused);
  o.save = dir / "subordinate/more";
  CHECK(refusal(o) == refused);
  for (std::string Options::*made : {&Options::save, &Options::diagnostics, &Options::tensorboard})
    for (const char* name : {"sub/more", "sub/more/", "sub/more/below"}) {
      INFO(name);
      Options with = o;
      with.save = "", with.*made = dir / name;
      CHECK(refusal(with) == "");
    }
  fs::create_directories(dir / "sub/more");
  CHECK(refusal(o) == "");
}

TEST_CASE("a log replaces a log alone", "[telemetry]") {
  const ScratchDirectory dir;
  auto log = [](const std::string& path) { return error_of([&] { check_log(path); }); };
  CHECK(log(dir / "none") == "");
  CHECK(log(dir.file("empty", "")) == "");
  CHECK(log(dir.file("log", "{\"command\": \"x\", \"commit\": \"y\"}\n{\"step\": 1}\n")) == "");
  CHECK(log(dir.file("half", "{\"command\": \"x\", \"commit\": \"y\"}")) == "");
  const std::string refused = ": not a training log, so it is not overwritten; remove it or choose another file";
  for (const char* text : {"text", "\n{\"command\": \"x\", \"commit\": \"y\"}\n", "{\"command\": \"x\"}\n", "{}\n",
                           "[1]\n", "{\"command\": \"x\", \"comm", "\xff\xfe"}) {
    INFO(text);
    const std::string path = dir.file("text", text);
    CHECK(log(path) == "--log " + path + refused);
    TelemetryOptions o;
    o.log = path;
    for (bool append : {false, true}) {
      o.append = append;
      CHECK(error_of([&] { Telemetry(o, {}); }) == "--log " + path + refused);
    }
  }
  CHECK(log(dir.file("long", std::string(3 << 20, '{'))) == "--log " + (dir / "long") + refused);
  for (const std::string& path : {dir.path, std::string("/dev/null")})
    CHECK(log(path) == "--log " + path + ": not a regular file; choose another");
}

TEST_CASE("a reader who has left is no full disk, behind a pipe or a socket", "[outputs]") {
  const bool socket = GENERATE(false, true);
  const auto said = [&](terminal::OutputReader reader) {  // by a process whose standard output nobody reads
    int ends[2], back[2];
    REQUIRE((socket ? socketpair(AF_UNIX, SOCK_STREAM, 0, ends) : pipe(ends)) == 0);
    REQUIRE(pipe(back) == 0);
    close(ends[0]);
    std::fflush(stdout);  // or the child would write what the parent has there
    const pid_t child = fork();
    if (child == 0) {
      std::signal(SIGPIPE, SIG_IGN);
      dup2(ends[1], 1);
      for (int fd : {ends[1], back[0]}) close(fd);
      std::printf("3.14\n");
      std::string text = error_of([&] { terminal::flush_output(reader); });
      if (write(back[1], text.data(), text.size()) < 0) _exit(1);
      _exit(0);
    }
    for (int fd : {ends[1], back[1]}) close(fd);
    std::string text(1000, '\0');
    const ssize_t n = read(back[0], &text[0], text.size());
    close(back[0]);
    waitpid(child, nullptr, 0);
    text.resize(size_t(std::max<ssize_t>(0, n)));
    return text;
  };
  CHECK(said(terminal::OutputReader::reads_all) == "standard output cannot be written: its reader has left");
  CHECK(said(terminal::OutputReader::may_leave).empty());
}
