// The parts of plots.h: scripts for gnuplot, by kind. Nothing else includes this.
#pragma once

#include <string>
#include <vector>

#include "lib/program/json.h"
#include "lib/program/plots.h"

// Okabe and Ito's palette, which colour-blind readers can tell apart; grey for what others measured.
constexpr const char* plot_colours[] = {"#0072B2", "#E69F00", "#009E73", "#CC79A7",
                                        "#D55E00", "#56B4E9", "#F0E442", "#999999"};
constexpr int plot_colour_count = 8;
// Gnuplot's dash type of curve i. Curves that lie on each other are told apart by their dashes, and those of one colour
// too: 32 curves differ.
inline size_t dashes_of(size_t i) { return (i + i / plot_colour_count) % 4 + 1; }
constexpr const char *colour_ours = "#0072B2", *colour_pytorch = "#E69F00", *colour_theirs = "#999999";

// Begins a script: terminal, output, title, grid.
std::string plot_opening(const std::string& out, int width, int height, const std::string& title);
std::string in_quotes(const std::string& text);  // for gnuplot

// Where an axis has ticks and what stands there: numbers in groups of three, which gnuplot only makes in some locales.
enum class Axis { linear, logarithmic };
std::string ticks(char axis, double least, double most, Axis kind);
// Where an axis from 0 ends: `room` times the most; 1 where nothing is above 0, since gnuplot draws no empty range.
inline double axis_end(double most, double room) { return most > 0 ? room * most : 1; }

// A trace of ./train --trace. Throws UsageError for a file that is none.
nlohmann::json read_trace(const std::string& path);
bool is_trace(const std::string& path);

// Each throws UsageError where the input has nothing of the kind.
std::string timeline_script(const PlotRequest& r, const std::string& out);
std::string memory_script(const PlotRequest& r, const std::string& out);
std::string curves_script(const PlotRequest& r, const std::string& out);
std::string loss_script(const PlotRequest& r, const std::string& out);
std::string bars_script(const PlotRequest& r, const std::string& out);
std::string scaling_script(const PlotRequest& r, const std::string& out);

// What suits rows: loss where they have long curves, scaling over numbers, else bars.
PlotKind kind_of_rows(const Words& files);
bool is_log(const std::string& path);
