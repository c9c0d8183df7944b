// Pictures: SVG, made by gnuplot from results, logs and traces; the picture of a unit is drawn here.
//
//   ./bench --plot results/depth-2gpu.jsonl                     kind by the file's content, into results/depth-2gpu.svg
//   ./bench --plot trace.json --kind memory --out memory.svg
//   ./bench --plot a.jsonl b.jsonl --out ab.svg                logs of ./train: loss, gradient norm and tokens/s
//   ./bench --plots                                             all pictures of the documents whose inputs are there
//
// The same input gives the same bytes, but for gnuplot's version.
#pragma once

#include <string>
#include <vector>

#include "lib/program/rows.h"

enum class PlotKind {
  automatic,
  timeline,  // a trace: what ran when, in lanes for computation, gathers and reductions; and, of a plan with no more
             // than a dozen slots, what each of them holds
  memory,   // a trace: memory over the step by purpose, stacked
  curves,   // training logs: loss, gradient norm and tokens/s by step
  loss,     // training logs or rows: loss by step alone
  bars,     // rows: a figure of theirs, PyTorch's and ours for each row
  scaling,  // rows whose first label is a number: the same as lines, on logarithmic axes
  unit,     // no file: the flat buffer of a unit, cut for 4 ranks
};
PlotKind plot_kind(const std::string& name);  // "": automatic. Throws UsageError, which lists the names
std::vector<std::string> plot_kinds();

struct PlotRequest {
  Words files;
  PlotKind kind = PlotKind::automatic;
  std::string out;              // "": the first file's path, with .svg
  std::string key;              // bars, scaling: of "result"; "": step_ms
  std::string title;            // "": made from the file
  Words rows = {};              // names of the rows shown; none: all
  std::string preset = "rope";  // unit
  int ranks = 4;                // unit
};

// Makes the picture and returns its path. Throws UsageError: a file that cannot be read or holds nothing to plot, a
// kind that does not suit it, a path that cannot be written, no gnuplot (with the package that has it).
std::string plot(const PlotRequest& request);

// What gnuplot is given; for tests. `out` is where it writes.
std::string plot_script(const PlotRequest& request, const std::string& out);
// The picture of kind `unit`: the largest unit of a preset's model, its parameters in order and to scale, and where the
// cuts fall.
std::string unit_svg(const std::string& preset, int ranks);

// Pictures that the documents show.
struct Picture {
  const char* name;     // results/NAME.svg
  PlotRequest request;  // files: in results/, without a directory
};
const std::vector<Picture>& pictures();
// Makes those whose inputs are there and says which are not. Returns the exit status.
int make_pictures(const std::string& results_dir);
