// Tables of rows that are not of training: layers of attention, kernels, collectives.
#include <algorithm>
#include <map>
#include <utility>

#include "lib/device/error.h"
#include "lib/program/format.h"
#include "lib/program/table_parts.h"

namespace {

using nlohmann::json;

std::string at(const json& row, const char* pointer, std::string (*text)(double)) {
  const json::json_pointer p(pointer);
  if (!row.contains(p)) return "-";
  const json& v = row[p];
  return v.is_number() ? text(v.get<double>()) : v.is_string() ? v.get<std::string>() : "-";
}
std::string heads(const json& row) { return at(row, "/attention/H", whole) + "/" + at(row, "/attention/HKV", whole); }
// The head dim, or those of keys and values where they differ.
std::string head_dim(const json& row) {
  const std::string DV = at(row, "/attention/DV", whole);
  return "D " + at(row, "/attention/D", whole) + (DV == "-" ? "" : "/" + DV);
}
std::string shape(const json& row) {
  std::string s = "B " + at(row, "/attention/B", whole) + ", T " + at(row, "/attention/T", whole) + ", " + heads(row) +
                  " heads, " + head_dim(row);
  if (row.contains("/attention/window"_json_pointer)) s += ", window " + at(row, "/attention/window", whole);
  if (row.contains("/attention/compressed"_json_pointer))
    s += ", keys compressed " + at(row, "/attention/compressed/block", whole) + "/" +
         at(row, "/attention/compressed/stride", whole);
  return s;
}
std::string three_digits(double v) { return v < 1 ? strf("%.3f", v) : v < 100 ? strf("%.2f", v) : tenths(v); }
std::string layer_heads(const json& row) {
  return heads(row) + (row.contains("/attention/DV"_json_pointer) ? ", " + head_dim(row) : "");
}

// One column: a name of the row, or a figure.
struct PlainColumn {
  const char* title;
  std::string (*text)(const json& row);
  Align align = Align::right;
};
struct PlainForm {
  bool (*is)(const json& row);
  std::vector<PlainColumn> names, shown;
  const char* beside = "";  // rows that differ in this key alone share a line; its values head their columns
};

const std::vector<PlainForm>& plain_forms() {
  // clang-format off
  static const std::vector<PlainForm> forms = {
      {is_layer,  // --sweep attention
       {{"tokens", [](const json& r) { return at(r, "/attention/T", whole); }},
        {"heads",  layer_heads}},
       {{"forward ms",            [](const json& r) { return at(r, "/result/forward_ms", three_digits); }},
        {"forward + backward ms", [](const json& r) { return at(r, "/result/forward_backward_ms", three_digits); }},
        {"planned MiB",           [](const json& r) { return at(r, "/result/planned_peak_mib", whole); }}},
       "kernel"},
      {[](const json& r) { return r.contains("attention") && !is_layer(r); },  // --sweep kernels
       {{"shape",  shape, Align::left},
        {"kernel", [](const json& r) { return at(r, "/kernel", whole); }, Align::left}},
       {{"forward ms",                 [](const json& r) { return at(r, "/result/forward_ms", three_digits); }},
        {"TFLOP/s",                    [](const json& r) { return at(r, "/result/forward_tflops", whole); }},
        {"forward + backward ms",      [](const json& r) { return at(r, "/result/forward_backward_ms", three_digits); }},
        {"TFLOP/s",                    [](const json& r) { return at(r, "/result/forward_backward_tflops", whole); }}}},
      {[](const json& r) { return r.contains("collective"); },  // --sweep collectives
       {{"collective", [](const json& r) { return at(r, "/collective", whole); }, Align::left},
        {"by",         [](const json& r) { return at(r, "/by", whole); }, Align::left},
        {"GPUs",       [](const json& r) { return at(r, "/ranks", whole); }},
        {"MiB",        [](const json& r) { return at(r, "/mib", whole); }}},
       {{"ms",                    [](const json& r) { return at(r, "/result/ms", three_digits); }},
        {"GB/s sent",             [](const json& r) { return at(r, "/result/sent_gb_s", whole); }},
        {"of the link",           [](const json& r) { return at(r, "/result/of_link", hundredths); }},
        {"estimated ms",          [](const json& r) { return at(r, "/result/estimated_ms", three_digits); }},
        {"ms beside products",    [](const json& r) { return at(r, "/result/beside_product_ms", three_digits); }},
        {"a product beside it", [](const json& r) {
           const json result = r.value("result", json::object());
           if (!has_number(result, "product_ms") || !has_number(result, "product_beside_ms")) return std::string("-");
           return strf("x %.2f", result["product_beside_ms"].get<double>() / result["product_ms"].get<double>());
         }}}},
  };
  // clang-format on
  return forms;
}

std::string plain_table_of(const Rows& rows, const PlainForm& form) {
  Words values;                                                             // of form.beside, as they come
  std::vector<std::pair<Words, std::map<std::string, const json*>>> lines;  // names, and a row for each value
  for (const json& row : rows) {
    if (!form.is(row)) continue;
    Words names;
    for (const PlainColumn& c : form.names) names.push_back(c.text(row));
    const std::string value = *form.beside ? string_of(row, form.beside) : "";
    if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
    auto line =
        std::find_if(lines.begin(), lines.end(), [&](const auto& l) { return *form.beside && l.first == names; });
    if (line == lines.end()) line = lines.insert(lines.end(), {names, {}});
    line->second[value] = &row;  // measured again: the later one
  }
  if (lines.empty()) return "";
  std::vector<Words> cells(1);
  std::vector<Align> align;
  for (const PlainColumn& c : form.names) cells[0].push_back(c.title), align.push_back(c.align);
  for (const std::string& v : values)
    for (const PlainColumn& c : form.shown)
      cells[0].push_back((v.empty() ? "" : (v == "nsa" ? "NSA" : v) + ": ") + c.title), align.push_back(c.align);
  for (const auto& [names, by_value] : lines) {
    Words line = names;
    for (const std::string& v : values)
      for (const PlainColumn& c : form.shown) {
        const auto found = by_value.find(v);
        line.push_back(found == by_value.end() ? "-" : c.text(*found->second));
      }
    cells.push_back(line);
  }
  return markdown(cells, align);
}

}  // namespace

bool is_layer(const json& row) {
  const std::string kernel = string_of(row, "kernel");
  return row.contains("attention") && (kernel == "nsa" || kernel == "dense");
}

std::string plain_table(const std::vector<json>& rows) {
  std::string text;
  for (const PlainForm& form : plain_forms()) {
    const std::string one = plain_table_of(rows, form);
    text += (text.empty() || one.empty() ? "" : "\n") + one;
  }
  return text;
}
