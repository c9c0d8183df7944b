// --help: the options by group, all in a table or one group as a manual's section.
#include <algorithm>
#include <cctype>

#include "lib/device/error.h"
#include "lib/program/config_file.h"
#include "lib/program/options_parts.h"

namespace options_parts {

namespace {

// Words from `column` on, wrapped at `width`; line: what stands there already.
std::string wrapped(std::string line, size_t column, size_t width, const std::string& words) {
  std::string text;
  line.resize(std::max(column, line.size()), ' ');
  size_t at = 0;
  while (at < words.size()) {
    const size_t end = std::min(words.find(' ', at), words.size());
    if (line.size() > column && line.size() + 1 + (end - at) > width) {
      text += line + "\n";
      line = std::string(column, ' ');
    } else if (at > 0) {
      line += ' ';
    }
    line += words.substr(at, end - at);
    at = end + 1;
  }
  return text + line + "\n";
}

std::string signature(const std::string& name, const std::string& value) {
  return "--" + name + (value.empty() ? "" : " ") + value;
}

// "Instead of training" is instead-of-training.
std::string section_name(const std::string& group) {
  std::string name = group;
  for (char& c : name) c = c == ' ' ? '-' : char(std::tolower(static_cast<unsigned char>(c)));
  return name;
}

std::string sections_text() {
  std::string text;
  for (const std::string& name : help_sections()) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

std::vector<std::string> help_sections() {
  std::vector<std::string> names;
  for (const Spec& s : specs)
    if (const std::string name = section_name(s.group); names.empty() || names.back() != name) names.push_back(name);
  return names;
}

std::string help_text() {
  const size_t column = 26, width = 100;
  std::string text =
      "Trains a transformer with fully sharded data parallelism.\n"
      "Usage: mpirun -np RANKS ./train [options]\n"
      "Every option can also be an environment variable: --grad-accum 4 is FSDP_GRAD_ACCUM=4, --tf32 is\n"
      "FSDP_TF32=1. The command line wins over the environment, and that over the file of --config.\n";
  const auto entry = [&](const std::string& name, const std::string& what) {
    text += wrapped("  " + name + "  ", column, width, what);
  };
  const char* group = "";
  for (const Spec& s : specs) {
    if (std::string(group) != s.group) text += strf("\n%s\n", group = s.group);
    std::string what = s.help;
    const std::string range = values_text(s);
    if (!is_flag(s))
      what += strf(" (%s%sdefault: %s)", range.c_str(), range.empty() ? "" : "; ", default_text(s).c_str());
    entry(signature(s.name, s.value), what);
    if (std::string(s.name) == "device") entry(signature("config", config_value), config_help);
  }
  entry("--help [SECTION]", "print this text, or a section of it with more about each option: " + sections_text());
  return text;
}

std::string help_section(const std::string& asked) {
  const std::vector<std::string> all = help_sections();
  const std::string name = section_name(asked), near = nearest(name, all);
  REQUIRE_USER(std::count(all.begin(), all.end(), name) == 1, "--help %s: no such section%s; choose one of %s",
               excerpt(asked).c_str(), did_you_mean(near).c_str(), sections_text().c_str());
  const size_t indent = 4, width = 88;
  std::string text;
  const auto paragraph = [&](size_t column, const std::string& words) { text += wrapped("", column, width, words); };
  const auto entry = [&](const std::string& option, const std::string& what) {
    paragraph(indent, option);
    paragraph(2 * indent, what);
  };
  for (const Spec& s : specs) {
    if (section_name(s.group) != name) continue;
    if (text.empty()) {
      for (const char* c = s.group; *c; c++) text += char(std::toupper(static_cast<unsigned char>(*c)));
      text += "\n";
    }
    text += "\n";
    entry(signature(s.name, s.value), s.help);
    const std::string values = values_text(s);
    if (!is_flag(s) && !values.empty()) paragraph(2 * indent, "Values: " + values + ".");
    paragraph(2 * indent,
              "Default: " + default_text(s) + ". Environment: " + variable_of(s.name) + (is_flag(s) ? "=1." : "."));
    // Two are no options of the table, and stand where --help has them.
    if (&s == &specs.back()) text += "\n", entry("--help [SECTION]", "print the options, or one section of them like this one");
    if (std::string(s.name) == "device") text += "\n", entry(signature("config", config_value), config_help);
  }
  return text + "\nSEE ALSO\n\n" +
         wrapped("", indent, width, "./train --help; ./train --help SECTION: " + sections_text());
}

}  // namespace options_parts
