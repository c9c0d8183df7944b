#include "lib/program/notes.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <utility>

#include "lib/device/error.h"
#include "lib/program/files.h"
#include "lib/program/process.h"
#include "lib/program/tables.h"

namespace {

namespace fs = std::filesystem;

const std::string table_mark = "<!-- table ", figure_mark = "<!-- figure ", close = " -->", end_mark = "<!-- end -->";

// A document, cut where its markers are.
struct Part {
  int64_t line;        // where it begins, from 1
  std::string marker;  // "" for text that stays, else "table depth", "figure depth-2gpu 4 ours step_ms"
  std::string text;    // as it is written; of a marker what stands between
};

bool begins_with(const std::string& text, const std::string& with) { return text.rfind(with, 0) == 0; }
std::string trimmed(const std::string& text) {
  const size_t from = text.find_first_not_of(" \t\r"), to = text.find_last_not_of(" \t\r");
  return from == std::string::npos ? "" : text.substr(from, to - from + 1);
}

struct Cutter {
  std::string name;
  std::vector<Part> parts = {};

  void keep(int64_t line, const std::string& text) {
    if (parts.empty() || !parts.back().marker.empty()) parts.push_back({line, "", ""});
    parts.back().text += text;
  }

  [[noreturn]] void fail(int64_t line, const std::string& what) const {
    throw UsageError(strf("%s, line %lld: ", name.c_str(), static_cast<long long>(line)) + what);
  }

  // A line's figures. Code between backticks is left alone: it shows markers and is none.
  void figures(int64_t number, const std::string& line) {
    size_t from = 0, at = 0;
    while ((at = line.find(figure_mark, at)) != std::string::npos) {
      if (std::count(line.begin(), line.begin() + long(at), '`') % 2) {
        at += figure_mark.size();
        continue;
      }
      const size_t words = at + 5, shut = line.find(close, at);
      const size_t begin = shut == std::string::npos ? shut : shut + close.size();
      const size_t end = begin == std::string::npos ? begin : line.find(end_mark, begin);
      if (end == std::string::npos) fail(number, "a figure's marker needs " + end_mark + " after it on the same line");
      keep(number, line.substr(from, begin - from));
      parts.push_back({number, trimmed(line.substr(words, shut - words)), line.substr(begin, end - begin)});
      from = at = end;
    }
    keep(number, line.substr(from));
  }
};

std::vector<Part> parts_of(const std::string& document, const std::string& name) {
  Cutter c = {name};
  bool in_code = false, in_table = false;
  int64_t number = 0, begun = 0;
  for (size_t from = 0; from < document.size();) {
    const size_t newline = document.find('\n', from);
    const size_t next = newline == std::string::npos ? document.size() : newline + 1;
    const std::string line = document.substr(from, next - from), words = trimmed(line.substr(0, line.find('\n')));
    from = next, number++;
    if (in_table) {
      if (words == end_mark) in_table = false, c.keep(number, line);
      else if (begins_with(words, table_mark)) c.fail(begun, "a table's marker without " + end_mark + " below it");
      else c.parts.back().text += line;
      continue;
    }
    if (begins_with(words, "```")) in_code = !in_code;
    const bool marker = !in_code && begins_with(words, table_mark);
    if (marker && (words.size() < close.size() || words.compare(words.size() - close.size(), close.size(), close) != 0))
      c.fail(number, "a table's marker stands on a line of its own: " + table_mark + "NAME" + close);
    if (in_code) c.keep(number, line);
    else if (!marker) c.figures(number, line);
    if (!marker) continue;
    c.keep(number, line);
    c.parts.push_back({number + 1, trimmed(words.substr(5, words.size() - 5 - close.size())), ""});
    in_table = true, begun = number;
  }
  if (in_table) c.fail(begun, "a table's marker without " + end_mark + " below it");
  return c.parts;
}

std::string generated(const Part& p, const std::string& name, const std::string& results_dir,
                      const std::string& links) {
  try {
    const size_t space = p.marker.find(' ');
    const std::string kind = p.marker.substr(0, space), words = p.marker.substr(std::min(space + 1, p.marker.size()));
    return kind == "table" ? render(find_table(words), results_dir, links) : figure(words, results_dir);
  } catch (const UsageError& e) {
    throw UsageError(strf("%s, line %lld: %s", name.c_str(),
                          static_cast<long long>(p.line - begins_with(p.marker, "table")), e.what()));
  }
}

// What a link from the document to a result begins with.
std::string links_from(const std::string& name, const std::string& results_dir) {
  std::error_code none;
  const fs::path from = fs::absolute(name, none).parent_path();
  const std::string path = fs::proximate(fs::absolute(results_dir, none), from, none).generic_string();
  return path == "." ? "" : path + "/";
}

std::string read_document(const std::string& path) {
  REQUIRE_USER(std::ifstream(path), "%s cannot be read", path.c_str());
  std::error_code none;
  REQUIRE_USER(fs::is_regular_file(path, none), "%s is not a document", path.c_str());
  return read_file(path);
}

// Where they are not, every table would become one that was never measured.
void require_results(const std::string& results_dir) {
  std::error_code none;
  REQUIRE_USER(fs::is_directory(results_dir, none), "--notes: there is no %s/ here; run it in the project's directory",
               results_dir.c_str());
}

// The files that a marker's text was made of: a table links to them, a figure names its own.
Words sources_of(const Part& p) {
  const Words words = words_of(p.marker);
  if (words[0] == "figure") return p.text.empty() || p.text == "-" ? Words() : Words{words[1]};
  Words all;
  for (const std::string& file : find_table(words[1]).files)
    if (p.text.find("[" + file + "](") != std::string::npos) all.push_back(file);
  return all;
}

// Refuses to write over what was measured because its file is not there. What never was is written anew.
void require_sources(const std::string& document, const std::string& name, const std::string& results_dir) {
  for (const Part& p : parts_of(document, name)) {
    if (p.marker.empty()) continue;
    for (const std::string& file : sources_of(p)) {
      const std::string path = rows_path(results_dir, file);
      REQUIRE_USER(fs::exists(path),
                   "%s, line %lld: %s was made of %s, which is not there; bring it back, or delete what stands between "
                   "the markers",
                   name.c_str(), static_cast<long long>(p.line), p.marker.c_str(), path.c_str());
    }
  }
}

std::string line_of(const std::vector<std::string>& lines, size_t i) { return i < lines.size() ? lines[i] : ""; }

}  // namespace

std::string written_anew(const std::string& document, const std::string& name, const std::string& results_dir) {
  std::string text;
  for (const Part& p : parts_of(document, name))
    text += p.marker.empty() ? p.text : generated(p, name, results_dir, links_from(name, results_dir));
  return text;
}

std::vector<NotesDifference> notes_differences(const std::string& path, const std::string& results_dir) {
  std::vector<NotesDifference> all;
  for (const Part& p : parts_of(read_document(path), path)) {
    if (p.marker.empty()) continue;
    const std::string made = generated(p, path, results_dir, links_from(path, results_dir));
    if (made == p.text) continue;
    const std::vector<std::string> here = lines_of(p.text), there = lines_of(made);
    size_t i = 0;
    while (i < std::min(here.size(), there.size()) && here[i] == there[i]) i++;
    all.push_back({path, p.marker, p.line + int64_t(i), line_of(here, i), line_of(there, i)});
  }
  return all;
}

int write_notes(const Words& paths, const std::string& results_dir) {
  require_results(results_dir);
  std::vector<std::pair<std::string, std::string>> changed;
  for (const std::string& path : paths) {
    const std::string before = read_document(path), after = written_anew(before, path, results_dir);
    require_sources(before, path, results_dir);
    if (before == after) std::printf("%s: nothing to change\n", path.c_str());
    else changed.emplace_back(path, after);
  }
  for (const auto& [path, text] : changed) {
    files::replace(path, text);
    std::printf("%s: written\n", path.c_str());
  }
  return 0;
}

int check_notes(const Words& paths, const std::string& results_dir) {
  require_results(results_dir);
  int status = 0;
  for (const std::string& path : paths)
    for (const NotesDifference& d : notes_differences(path, results_dir)) {
      std::printf("%s:%lld: %s is not what %s has; run `make notes`\n  written: %s\n  results: %s\n", path.c_str(),
                  static_cast<long long>(d.line), d.marker.c_str(), results_dir.c_str(), d.written.c_str(),
                  d.generated.c_str());
      status = 1;
    }
  return status;
}
