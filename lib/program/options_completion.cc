// --completion bash: what Tab offers behind ./train, from the table of options.
#include <algorithm>
#include <map>

#include "lib/device/error.h"
#include "lib/program/options_parts.h"

using namespace options_parts;

namespace {

std::string joined(const std::vector<std::string>& words, const char* between) {
  std::string text;
  for (const std::string& w : words) text += (text.empty() ? "" : between) + w;
  return text;
}

bool begins(const char* text, const char* with) { return std::string(text).rfind(with, 0) == 0; }

// What completes an option's value: a call of one of the script's functions, or nothing for what is a number.
std::string action(const Spec& s) {
  const std::string value = s.value;
  std::vector<std::string> words(s.allowed.words.begin(), s.allowed.words.end());
  words.insert(words.end(), s.allowed.suggested.begin(), s.allowed.suggested.end());
  if (value == "0|1") words = {"0", "1"};
  std::string calls = words.empty() ? "" : "_fsdp_offer -W '" + joined(words, " ") + "'";
  for (const auto& [name, what] : {std::pair("FILE", "-f"), std::pair("DIR", "-d")})
    if (begins(s.value, name))
      calls += std::string(calls.empty() ? "" : "; ") + "compopt -o filenames 2>/dev/null; _fsdp_offer " + what;
  return calls.empty() ? ":" : calls;
}

}  // namespace

std::string completion_script() {
  std::vector<std::string> names = {"--config", "--help"};
  std::map<std::string, std::vector<std::string>> by_action;  // of options with a value
  for (const Spec& s : specs) {
    names.push_back(std::string("--") + s.name);
    if (!is_flag(s)) by_action[action(s)].push_back(names.back());
  }
  Spec config = {};
  config.value = config_value;
  by_action[action(config)].push_back("--config");
  by_action["_fsdp_offer -W '" + joined(help_sections(), " ") + "'"].push_back("--help");
  std::sort(names.begin(), names.end());
  std::string cases;
  for (const auto& [what, options] : by_action) cases += "    " + joined(options, " | ") + ") " + what + " ;;\n";
  return R"(# bash completion for ./train, made by ./train --completion bash; for this shell alone:
#   source <(./train --completion bash)
_fsdp_offer() { # FLAG [WORDS]: of compgen, for the word at the cursor
  local found
  mapfile -t found < <(compgen "$@" -- "$cur")
  COMPREPLY+=("${found[@]}")
}
_fsdp_train() {
  local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD - 1]}
  COMPREPLY=()
  # bash takes --option=value for three words.
  if [ "$cur" = '=' ]; then
    cur=
  elif [ "$prev" = '=' ] && [ "$COMP_CWORD" -ge 2 ]; then
    prev=${COMP_WORDS[COMP_CWORD - 2]}
  fi
  case $prev in
)" + cases +
         "    *) _fsdp_offer -W '" + joined(names, " ") + R"(' ;;
  esac
  # What a number follows (hybrid:4).
  [[ ${COMPREPLY[0]-} != *: ]] || compopt -o nospace 2>/dev/null
}
# Behind mpirun and the like, once ./train has been named; before that, files.
_fsdp_launched() {
  local word
  COMPREPLY=()
  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do
    [ "${word##*/}" != train ] || { _fsdp_train && return; }
  done
}
complete -F _fsdp_train train
for _fsdp_word in mpirun mpiexec srun run.sh; do
  complete -p "$_fsdp_word" &>/dev/null || complete -o bashdefault -o default -F _fsdp_launched "$_fsdp_word"
done
unset _fsdp_word
)";
}
