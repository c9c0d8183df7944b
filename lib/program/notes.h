// Documents whose tables are written from results/, so that text and files cannot differ:
//
//   <!-- table depth -->
//   | depth | ...
//   <!-- end -->
//   A step takes <!-- figure depth-2gpu 4 ours step_ms -->352.8<!-- end --> ms.
//
// A table's name is one of tables() in tables.h; its markers stand on lines of their own. A figure's marker and its end
// stand on one line. Markers in fenced code, as above, are left alone.
//
//   ./bench --notes NOTES.md README.md           write_notes: make notes
//   ./bench --notes NOTES.md README.md --check   check_notes; a test does the same
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lib/program/rows.h"

// The document with all that is between markers made anew. `name` is for errors. Throws UsageError, with the name and
// the line, for a table or a figure that is not known and for a marker without its end.
std::string written_anew(const std::string& document, const std::string& name, const std::string& results_dir);

struct NotesDifference {
  std::string document, marker;    // "table depth"
  int64_t line;                    // of the document, from 1: the first that differs
  std::string written, generated;  // that line, here and as results/ has it; "" where one ends before
};
// One for each marker whose text is not what written_anew makes of it. Throws UsageError, also for no such document.
std::vector<NotesDifference> notes_differences(const std::string& path, const std::string& results_dir);

// Rewrites the documents that change, all or none, and says which. Returns the exit status. Throws UsageError.
int write_notes(const Words& paths, const std::string& results_dir);
// Prints a line for each difference. Returns 1 if there is one.
int check_notes(const Words& paths, const std::string& results_dir);
