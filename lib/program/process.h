// Other programs, run one at a time as child processes, and their output.
//
//   end_child_on_signals();
//   const std::string error = run({"mpirun", "-np", "2", "./train"}, "build/train.log", 900);
//   if (error.empty()) use(lines_of(read_file("build/train.log")));
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

enum class Sign { none, of_life };  // of a command, since it was last asked for

// Runs a command, found in PATH, with its standard output and error in the file `output` and nothing to read. Returns
// "" if it exited with 0, else what went wrong: "timed out after 900 s", "exit status 2", "killed by signal 9". After
// the timeout the command and its children get SIGTERM, 15 seconds later SIGKILL. meanwhile, where there is one, is
// called every half second; at a sign of life the timeout begins anew. Where this process is killed, the command gets
// SIGTERM.
std::string run(const std::vector<std::string>& command, const std::string& output, int64_t timeout_s,
                const std::function<Sign()>& meanwhile = {});

// From here on SIGINT, SIGTERM and SIGHUP end the running child, with its children, and then this process.
void end_child_on_signals();

std::string join(const std::vector<std::string>& words);     // a command line for a shell, quoted where it must be
std::vector<std::string> words_of(const std::string& text);  // cut at white space
std::vector<std::string> lines_of(const std::string& text);  // cut at newlines and carriage returns; one at least
std::string read_file(const std::string& path);              // "" if it cannot be read

// The line of an output file that tells of an error: what follows `error: ` where a line begins with that, else the
// first line with the word in it, or with "out of memory"; "" if there is none.
std::string error_line(const std::string& path);
// Why a command that wrote `output` failed: that line, else how it ended, as run() says, and where to look.
std::string why(const std::string& ended, const std::string& output);
