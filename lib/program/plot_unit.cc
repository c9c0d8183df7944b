// The picture of a unit, cut for its ranks: the layout itself, drawn. SVG is written here, because a plotting program
// knows axes and not leader lines.
#include <algorithm>
#include <cmath>

#include "fsdp.h"
#include "lib/device/error.h"
#include "lib/program/format.h"
#include "lib/program/plot_parts.h"
#include "lib/program/presets.h"
#include "model.h"

namespace {

constexpr double left = 30, right = 970, top = 92, bar = 62;  // of the flat buffer

std::string escaped(const std::string& text) {
  std::string out;
  for (char c : text) out += c == '&' ? "&amp;" : c == '<' ? "&lt;" : c == '>' ? "&gt;" : std::string(1, c);
  return out;
}

enum class Anchor { start, middle };
std::string text_at(double x, double y, double size, const std::string& text, Anchor anchor = Anchor::middle,
                    const char* more = "") {
  return strf("<text x=\"%.1f\" y=\"%.1f\" font-size=\"%.0f\" text-anchor=\"%s\"%s>", x, y, size,
              anchor == Anchor::middle ? "middle" : "start", more) +
         escaped(text) + "</text>\n";
}
std::string box(double x, double y, double w, double h, const char* colour, const char* more = "") {
  return strf("<rect x=\"%.1f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\" fill=\"%s\"%s/>\n", x, y, w, h, colour, more);
}
std::string line(double x1, double y1, double x2, double y2, const char* more) {
  return strf("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" %s/>\n", x1, y1, x2, y2, more);
}

std::string shape_text(const Param& p) {
  std::string text;
  for (int64_t n : p.shape) text += (text.empty() ? "" : " x ") + grouped(n);
  return text;
}
std::string short_name(const Unit& u, const Param& p) {
  return p.name.rfind(u.name + ".", 0) == 0 ? p.name.substr(u.name.size() + 1) : p.name;
}
// "wq, 62 % of wo": what a rank owns.
std::string owned(const Unit& u, int rank) {
  std::string text;
  for (const Param& p : u.params) {
    const Unit::Piece piece = u.piece(p, rank);
    if (piece.numel == 0) continue;
    const double part = double(piece.numel) / double(p.numel);
    text +=
        (text.empty() ? "" : ", ") + (piece.numel == p.numel ? "" : strf("%.0f %% of ", 100 * part)) + short_name(u, p);
  }
  return text.empty() ? "padding alone" : text;
}

struct Scale {
  double per_element;
  double x(int64_t element) const { return left + per_element * double(element); }
};

// The parameters in their order. Those that are too narrow for their names are named above the end of the buffer, where
// lay_out puts them: what has no weight decay is small.
std::string parameters(const Unit& u, const Scale& s) {
  std::string svg, small;
  std::vector<const Param*> in_order;
  for (const Param& p : u.params) in_order.push_back(&p);
  std::sort(in_order.begin(), in_order.end(), [](const Param* a, const Param* b) { return a->offset < b->offset; });
  for (size_t i = 0; i < in_order.size(); i++) {
    const Param& p = *in_order[i];
    const double x = s.x(p.offset), w = s.per_element * double(p.numel);
    svg += box(x, top, w, bar, plot_colours[i % 6], " fill-opacity=\"0.55\" stroke=\"#ffffff\" stroke-width=\"1\"");
    std::string name = short_name(u, p);
    if (w <= 8.0 * double(name.size())) name = name.substr(name.rfind('.') + 1);
    if (w > 8.0 * double(name.size())) {
      svg += text_at(x + w / 2, top + 27, 14, name);
      const std::string below = shape_text(p);
      if (w > 6.5 * double(below.size())) svg += text_at(x + w / 2, top + 46, 11, below);
    } else {
      small += (small.empty() ? "" : ", ") + short_name(u, p) + " (" + shape_text(p) + ")";
    }
  }
  if (s.x(u.numel) < s.x(u.padded)) svg += box(s.x(u.numel), top, s.x(u.padded) - s.x(u.numel), bar, "#dddddd");
  if (!small.empty())
    svg += line(right - 2, top - 4, right - 2, top - 12, "stroke=\"#444444\"") +
           strf("<text x=\"%.1f\" y=\"%.1f\" font-size=\"11\" text-anchor=\"end\">", right, top - 16) +
           escaped("too narrow to see: " + small) + "</text>\n";
  return svg;
}

std::string shards(const Unit& u, int ranks, const Scale& s) {
  std::string svg;
  const double y = top + bar + 34;
  for (int r = 0; r < ranks; r++) {
    const double from = s.x(r * u.shard), to = s.x((r + 1) * u.shard);
    svg += box(from + 1, y, to - from - 2, 30, "#e8eef4", " stroke=\"#0072B2\" stroke-width=\"1.5\"");
    svg += text_at((from + to) / 2, y + 20, 14, strf("rank %d", r), Anchor::middle, " font-weight=\"bold\"");
    if (r > 0)
      svg += line(from, top - 6, from, y + 30, "stroke=\"#D55E00\" stroke-width=\"2\" stroke-dasharray=\"5 3\"");
  }
  for (int r = 0; r < ranks; r++)
    svg += text_at(left, y + 56 + 20 * r, 13, strf("rank %d owns ", r) + owned(u, r), Anchor::start);
  return svg;
}

}  // namespace

std::string unit_svg(const std::string& preset, int ranks) {
  REQUIRE_USER(ranks >= 1 && ranks <= 16, "a unit is drawn for 1 to 16 ranks, not for %d", ranks);
  std::vector<Unit> units = parameter_table(preset_named(preset).model);
  lay_out(&units, ranks);
  const Unit& u =
      *std::max_element(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.numel < b.numel; });
  const Scale s = {(right - left) / double(u.padded)};
  const double height = top + bar + 34 + 56 + 20 * ranks + 10;
  std::string svg = strf(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"1000\" height=\"%.0f\" viewBox=\"0 0 1000 %.0f\" "
      "font-family=\"sans-serif\" fill=\"#222222\">\n",
      height, height);
  svg += box(0, 0, 1000, height, "#ffffff");
  svg += text_at(left, 28, 17, strf("The unit `%s` of %s, cut for %d ranks", u.name.c_str(), preset.c_str(), ranks),
                 Anchor::start);
  svg += text_at(left, 50, 13,
                 "one flat buffer of " + grouped(u.numel) + " elements" +
                     (u.padded > u.numel ? ", " + grouped(u.padded - u.numel) + " more to make the shards equal" : "") +
                     ": " + mib_text(2 * u.padded) + " MiB gathered in bf16; a shard is " + grouped(u.shard),
                 Anchor::start);
  return svg + parameters(u, s) + shards(u, ranks, s) + "</svg>\n";
}
