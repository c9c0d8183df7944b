// Tables: from rows of results (JSON lines, see rows.h) to Markdown.
//
//   const std::vector<json> rows = read_rows({"results/depth-2gpu.jsonl"});
//   std::printf("%s", sweep_table(rows).c_str());                       // what ends a sweep: everything that was
//   measured std::printf("%s", render(find_table("depth"), "results").c_str());  // as NOTES.md has it: theirs,
//   PyTorch's, ours
//
// A row of training is one run: of ours ("who": "fsdp.cu"), or of PyTorch's ("who": "PyTorch", perhaps with a
// "variant"). Lines of one row, who and variant that differ in "round" are repetitions: the table shows the median over
// them. Of two lines for the same run, as files of two machines may have, a measured one stands before a planned one
// and a later one before an earlier.
//
// In cells: -            nothing was measured
//           OOM, ...     the run failed; a word where the error has one
//           *1,326*      planned, not measured
//           91,204 †     more than a GPU of 80 GiB has room for
#pragma once

#include <string>
#include <vector>

#include "lib/program/json.h"
#include "lib/program/rows.h"

// The rows of files, in the order of their "number" within a file. Throws UsageError for a file that cannot be read,
// that is empty, or that has a line which is no row or has a field of another type than ./bench writes.
std::vector<nlohmann::json> read_rows(const Words& paths);

// ---------------------------------------------------------------------------------------------------------- the forms

// Every row and who in a line, with the columns that some row has, and a note. Rows that are not of training (the
// sweeps attention, kernels and collectives) get the columns of their kind, rows with targets those of the table
// targets. Rows of one sweep.
std::string sweep_table(const std::vector<nlohmann::json>& rows);
bool is_layer(const nlohmann::json& row);  // of the sweep attention; others with an "attention" are of kernels

// ratio: ours over PyTorch's; before, goal, aim: the row's target, whose figure is named where figure stands.
enum class Whose { theirs, pytorch, ours, ratio, figure, before, goal, aim };

// A column of a table of training.
struct Column {
  Whose whose;
  const char* key;  // in "theirs", or in a row's "result"; see `figures` in table_figures.cc for what can be shown;
                    // "": that of the row's target
  const char* variant = "";  // PyTorch's; "": the line without one, else the fastest, and the cell says which
  enum Rounds { median, each } rounds = median;  // each: all rounds' figures beside each other
};

enum class Layout {
  stacked,       // a line for each row and number of GPUs
  side_by_side,  // a line for each row; PyTorch's and our columns again for each number of GPUs
};

struct Table {
  enum Form {
    companion,  // a line a row: labels, `columns`, a note
    lines,      // a line a row and who: labels, the keys of `columns` (whose: ours), a note
    plain,      // rows that are not of training
  };
  const char* name;  // of its marker in a document
  Words files;       // in results/, without ".jsonl"
  Form form = companion;
  std::vector<Column> columns = {};
  Layout layout = Layout::stacked;
  Words rows = {};                                                   // names of the rows shown; none: all
  bool (*keep)(const nlohmann::json& row) = nullptr;                 // what is shown of those; null: all
  enum Theirs { with_theirs, without_theirs } theirs = with_theirs;  // lines: whether the report's figures have a line
};

// Rows of training in one of the first two forms. Those of several sweeps, whose labels have other names, share one
// column of labels.
std::string training_table(const std::vector<nlohmann::json>& rows, const Table& table);

// How many losses at the end of a run its tail_loss is the mean of: the last tenth, five at least.
size_t tail_steps(size_t losses);

// Rows that are not of training: a table for each kind.
std::string plain_table(const std::vector<nlohmann::json>& rows);

// ---------------------------------------------------------------------------------------- the tables of the documents

// What SWEEP-planned.jsonl is planned for, which stands in where a table's rows are not all measured.
constexpr char planned_chip[] = "h200";
constexpr int planned_ranks = 2;

const std::vector<Table>& tables();
std::string rows_path(const std::string& results_dir, const std::string& file);  // of Table::files
const Table& find_table(const std::string& name);  // throws UsageError, which names those that sound like it

// The table and, below it, what made it: command, machine, commits, dates, and the file's name as a link. Files that
// are not there are left out and named, with the command that makes them. Rows that are planned for another chip than
// the measured ones ran on are left out too. links: what a link to a file begins with.
std::string render(const Table& table, const std::string& results_dir, const std::string& links = "results/");

// One figure as a table would show it. who: ours, PyTorch, PyTorch-VARIANT, theirs, or ratio (ours over PyTorch's).
// Throws UsageError.
std::string figure_text(const std::vector<nlohmann::json>& rows, const std::string& row, const std::string& who,
                        const std::string& key);
// The same, of a file. words: FILE ROW WHO KEY, as "depth-2gpu 4 ours step_ms"; a row's name may have spaces. "-" where
// the file is not there.
std::string figure(const std::string& words, const std::string& results_dir);

// ------------------------------------------------------------------------------------------ for summaries and pictures

constexpr double report_gpu_mib = 80 * 1024;  // the memory of the reports' A100s

// Repetitions in one, the median of each figure; "rounds" holds every round's result. In the order of the rows.
std::vector<nlohmann::json> merged_rounds(const std::vector<nlohmann::json>& rows);
// A word for an error: OOM, OOM bwd, badshape, timeout, else failed.
std::string error_word(const std::string& error);
// "PyTorch flex", "fsdp.cu".
std::string who_of(const nlohmann::json& row);
