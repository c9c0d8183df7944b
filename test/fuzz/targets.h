// What a stranger may hand to the program, each kind with the parser that reads it. A parser takes what is right and
// refuses the rest by an Error of ours; any other exception, a crash, a hang or a gigabyte taken is a bug.
//
// `make fuzz SECONDS=n` feeds them what libFuzzer makes up; test/test_fuzz.cc what stands in test/fuzz/corpus/NAME/.
#pragma once

#include <string>
#include <vector>

std::vector<std::string> fuzz_targets();
// Throws whatever the parser throws that is no Error. Aborts for a name that is not there.
void fuzz(const std::string& target, const std::string& bytes);
