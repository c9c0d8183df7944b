// Stopping a run that is asked to: by SIGTERM, SIGINT, SIGHUP or SIGUSR1 at any rank (a scheduler that wants the
// machine, Ctrl-C, a terminal that is closed; mpirun passes SIGUSR1 on to its ranks and itself goes on), or by a file
// .HALT in the directory that it saves to.
//
//   halt::catch_signals();                     // until the first step a signal ends this rank at once
//   halt::finish_steps();                      // from here on it asks
//   halt::end_at_once();                       // and from here on it ends this rank again: all is written
//   if (halt::asked() != halt::Asked::no) ...  // told to all ranks with a step's scalars: they stop behind the same
//   step
//
// Open MPI's mpirun, when it gets SIGTERM or SIGINT itself, sends its ranks SIGCONT first; SIGTERM some seconds later,
// and meanwhile it reads none of their output, on which they may come to stand still; then SIGKILL (the seconds are its
// parameter odls_base_sigkill_timeout). So a SIGCONT that comes from the launcher to a rank that was not stopped is a
// request too, and the SIGTERM behind it is no second one.
//
// A second signal, a second or more after the first, ends this rank at once; two that come together are one request, as
// launchers forward what they get themselves.
#pragma once

#include <string>

namespace halt {

void catch_signals();
void finish_steps();
void end_at_once();
void release_signals();  // at the end, before ranks leave: they do again what they did before

enum class Asked { no, by_signal, by_file };
Asked asked();
// For a thread that calls it ten times a second. dir: where to look for .HALT; "": nowhere.
void look(const std::string& dir);
// Once the request is obeyed; or the next run would obey it again. Returns what went wrong, or nothing.
std::string remove_file(const std::string& dir);

// What this rank adds to the sum over all ranks that StepScalars::halts is, and what a sum says; "": nobody asks.
double summand();
std::string reason(double sum, const std::string& dir);

}  // namespace halt
