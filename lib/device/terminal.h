// Who reads standard output and standard error: people at a terminal, whose last line may be redrawn, or a file.
//
//   terminal::say("warning: no step has ended for 180 s");        // a line on standard error, not mixed with that one
//   std::printf("%s%s\r", terminal::clear_line(terminal::out), live.c_str());
//
// mpirun gives its ranks a pseudo-terminal or pipes: its own standard output and error are what counts, where its
// process is the parent, so on its own host.
#pragma once

#include <string>

namespace terminal {

enum Stream { out = 1, error = 2 };
// Whether it is a terminal that can move its cursor (TERM=dumb cannot).
bool is_watched(Stream s);
int columns();  // of the terminal behind standard output, as wide as it is now; 80 where it does not tell

// What takes a redrawn line away, which another thread or rank may have left; "" where nobody watches.
const char* clear_line(Stream s);

// Text in a colour or in bold; as it is where nobody watches or NO_COLOR is set.
enum class Style { plain, bold, red, yellow };
std::string painted(Stream s, Style style, const std::string& text);
// Of a line that begins with "error:" or "warning:", that word.
std::string with_colours(Stream s, const std::string& line);

// A line on standard error, in one piece.
void say(const std::string& line);

// Throws Error if what was printed could not be written: standard output is full or closed, or its reader has left, who
// may have seen enough of a run that has written what it made elsewhere.
enum class OutputReader { reads_all, may_leave };
void flush_output(OutputReader reader);

// Opens what a process was started without of standard input, output and error, so that no other file gets these
// numbers and lines that are meant for them; writing to them still fails.
void fill_standard_streams();

}  // namespace terminal
