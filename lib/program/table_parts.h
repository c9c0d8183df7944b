// The parts of tables.h: what rows say, and how figures are written. Nothing else includes this.
#pragma once

#include <string>
#include <vector>

#include "lib/program/json.h"
#include "lib/program/tables.h"

using Rows = std::vector<nlohmann::json>;

// ---------------------------------------------------------------------------------------- rows (table_rows.cc)

std::string string_of(const nlohmann::json& j, const char* key);  // "" where there is none
bool has_number(const nlohmann::json& j, const char* key);
bool is_planned(const nlohmann::json& row);
bool is_training(const nlohmann::json& row);
// A row's result, with what a plan has for what was not measured.
nlohmann::json figures_of(const nlohmann::json& row);
// Notes of a line or below a table: each once, and all of them with "; " between.
void add_note(const std::string& text, Words* notes);
std::string together(const Words& notes);

// ------------------------------------------------------------------------------------- figures (table_figures.cc)

// What a column of training can show.
struct Figure {
  const char* key;
  const char* title;
  std::string (*text)(double);
  const char* in_words = "";  // the key under which a report has it in words
};
const Figure* find_figure(const std::string& key);                   // null: there is none
const Figure& figure_named(const std::string& key);                  // throws UsageError
const std::vector<const char*>& figures_of_training();               // the keys that a sweep ends with, from the left
std::string text_of(const nlohmann::json& result, const Figure& f);  // "" where it is not there

std::string whole(double v);
std::string tenths(double v);
std::string hundredths(double v);

// More than fits in the report's GPUs, and what a table says of it. The libraries take some of it.
constexpr char dagger[] = "†";
bool above_the_report(const nlohmann::json& result);
std::string footnote();
