#!/bin/bash
# What people see at a terminal, and what bash completes.
# shellcheck source=common.sh
. "${BASH_SOURCE[0]%/*}/common.sh"

# at_terminal COLUMNS WORD...: a command under a terminal of its own; in $dir/raw all that came, in $dir/pieces each piece
# that was redrawn on a line of its own, in $dir/out what stayed.
at_terminal() {
  local columns=$1
  shift
  TERM=xterm timeout -k 5 $limit script -qec "stty cols $columns; $*" "$dir/typescript" >"$dir/raw" 2>&1 </dev/null
  status=$?
  sed -E 's/\r$//; s/\x1b\[[0-9;]*m//g' "$dir/raw" >"$dir/plain"
  sed 's/\r\x1b\[K/\n/g' "$dir/plain" >"$dir/pieces"
  sed 's/.*\r\x1b\[K//' "$dir/plain" >"$dir/out"
}
run=(--device cpu --preset tiny --seq 64 --batch 1 --steps 40 --val-every 16)
if ! command -v script >/dev/null; then
  skip "a live line at a terminal: there is no script (bsdutils)"
elif ! script -qec true /dev/null >"$dir/out" 2>&1 </dev/null; then  # a container without /dev/pts
  skip "a live line at a terminal: $(tail -n 1 "$dir/out")"
else
  # shellcheck disable=SC2086 # a list of flags
  for start in "" "mpirun $MPIRUN_FLAGS -np 2"; do
    name="a live line${start:+ under mpirun}"
    at_terminal 60 "$start ./train ${run[*]} --stall 0.001 --log $dir/live.jsonl"
    wrong=$([ "$status" = 0 ] || echo "exit status $status")
    grep -q 'avg loss [0-9.]* .*left ' "$dir/pieces" || wrong="$wrong; no smoothed loss and time left"
    sed -n 's/.*"loss":\([^,]*\),.*"step":\([0-9]*\).*/\2 \1/p' "$dir/live.jsonl" | awk '
      NR == FNR { sum = .95 * sum + .05 * $2; weight = .95 * weight + .05; mean[$1] = sum / weight; next }
      match($0, /avg loss [0-9.]+/) { d = mean[$2 + 0] - substr($0, RSTART + 9, RLENGTH - 9); n++; bad = bad || d * d > 1e-8 }
      END { exit !n || bad }' - "$dir/pieces" || wrong="$wrong; the smoothed loss is not that of the steps before, the latest weighing most"
    awk '/^step / && length > 59 { exit 1 }' "$dir/pieces" || wrong="$wrong; wider than the terminal"
    [ "$(grep -aoE '^step [0-9]+/40 loss' "$dir/out" | grep -oE '[0-9]+/' | paste -sd' ')" = "1/ 4/ 8/ 12/ 16/ 20/ 24/ 28/ 32/ 36/ 40/" ] ||
      wrong="$wrong; what stays is not a tenth of the steps, and the validations"
    [ "$(grep -c '^step .* val ' "$dir/out")" = 2 ] || wrong="$wrong; not two validations"
    [ "$(grep -c warning: "$dir/raw")" -gt 0 ] || wrong="$wrong; no warning"
    [ "$(grep -o warning: "$dir/raw" | wc -l)" = "$(grep -c '^warning: rank [0-9]*: no step .* is awaited$' "$dir/out")" ] ||
      wrong="$wrong; a warning is not alone in its line"
    grep -q $'\e\\[33mwarning:\e\\[0m' "$dir/raw" || wrong="$wrong; no colour"
    verdict "$name" "$wrong"
  done
  NO_COLOR=1 at_terminal 60 "./train ${run[*]}"
  verdict "NO_COLOR" "$(! grep -q $'\e\\[[0-9;]*m' "$dir/raw" && grep -q $'\r\e\\[K' "$dir/raw" || echo "there are colours, or no live line")"
  at_terminal 60 "./train ${run[*]} --log-every 10"
  verdict "plain lines at a terminal" "$(! grep -q $'\e' "$dir/raw" && [ "$(grep -c '^step  *[0-9]*/40  loss' "$dir/raw")" = 7 ] || echo "not 7 plain lines")"
  at_terminal 60 "./train ${run[*]} --log $dir/none/log"
  verdict "an error in red" "$(grep -q $'\e\\[1;31merror:\e\\[0m --log' "$dir/raw" || echo "it is not")"
  at_terminal 60 "./train ${run[*]} 2>&1 | cat"
  verdict "a pipe at a terminal" "$(! grep -q $'\e' "$dir/raw" && [ "$(grep -c '^step ' "$dir/raw")" = 40 ] || echo "not 40 plain lines")"
fi

# tab EXPECTED WORD...: what bash offers for the last word, in its order, with | between.
touch "$dir/my words.bin" && mkdir "$dir/my words"
./train --completion bash >"$dir/completion"
tab() {
  local expected=$1 got
  shift
  # shellcheck disable=SC2016 # another shell's
  got=$(cd "$dir" && bash --norc -uc 'source ./completion; COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
    rule=$(complete -p "${1##*/}") && [[ $rule =~ -F\ ([_a-z]+) ]] && "${BASH_REMATCH[1]}"
    IFS="|"; echo "${COMPREPLY[*]-}"' - "$@" 2>&1)
  echo "$got" >"$dir/out"
  verdict "Tab behind: $*" "$([ "$got" = "$expected" ] || echo "not $expected")"
}
tab "--preset" ./train --pres
tab "--wrap|--wrap-min-params" ./train --dim 64 --wrap
tab "simple|rope|llama|mlp" train --arch ""
tab "sublayer|single" ./train --wrap = s
tab "fp32" ./train --tf32 --param-dtype f
tab "hybrid:" ./train --shard h
tab "0|1" ./train --graph ""
tab "" ./train --dim ""
tab "my words.bin" ./train --data "my words."
tab "latest" ./train --resume l
tab "my words" ./train --save my
tab "sharding" ./train --help sh
tab "llama" mpirun -np 2 ./train --arch l
tab "" mpirun --arch l
tab "$(./train --help | sed -n 's/^  \(--[-a-z0-9]*\).*/\1/p' | sort -u | paste -sd'|')" ./train --
if command -v shellcheck >/dev/null; then
  shellcheck -s bash "$dir/completion" >"$dir/out"
  verdict "the script for completion is clean" "$([ ! -s "$dir/out" ] || echo "shellcheck says")"
fi

done_testing
